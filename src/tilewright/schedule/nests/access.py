"""How nodes touch buffers: indices as strides per loop, and when two can never meet."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads
from tilewright.ir.program import Nest, Node

Terms = dict[Expr, Expr]  # variable -> stride
Signature = tuple[str, ...]


def accesses(nest: Nest, buffer: str) -> Iterator[Expr]:
    """Every index at which the nest touches the buffer, stores first."""
    yield from nest.indices.get(buffer, ())


def all_loops(nest: Nest) -> tuple[Expr, ...]:
    return (*nest.loops, *nest.reduce)


def touched(node: Node, buffer: str) -> list[Expr]:
    """The indices at which a node touches a buffer; none where it is not known."""
    return list(node.indices.get(buffer, ()))


def users_of(nests: Iterable[Nest]) -> dict[str, list[Nest]]:
    """The nests that touch each buffer, in their order."""
    found: dict[str, list[Nest]] = {}
    for m in nests:
        for b in m.indices:
            found.setdefault(b, []).append(m)
    return found


def terms(index: Expr, loops: Sequence[Expr]) -> tuple[Terms, Expr] | None:
    """The index as strides per loop and a constant rest; None if it is not affine in the loops."""
    strides, rest = index.memo("strides", _strides)
    found: Terms = {}
    for v in loops:
        if v in strides:
            if strides[v] is None:
                return None
            found[v] = strides[v]
    return found, rest if len(found) == len(strides) else ix.without(index, loops)


def _strides(index: Expr) -> tuple[dict[Expr, Expr | None], Expr]:
    """The stride along each variable an index depends on (None: not affine), and the rest."""
    loops = sorted(free_vars(index), key=lambda v: (v.arg, v.key))
    strides = {v: ix.coefficient(index, v) for v in loops}
    return ({v: s for v, s in strides.items() if s is not ix.ZERO}, ix.without(index, loops))


def signature(index: Expr) -> Signature:
    """What an access touches, whatever its loops are called: equal ones touch the same."""
    return index.memo("signature", _signature)


def _signature(index: Expr) -> Signature:
    found = terms(index, tuple(free_vars(index)))
    if found is None or any(free_vars(s) for s in found[0].values()):
        return (index.key,)
    steps = [f"{s.key}*{v.src[0].key}" for v, s in found[0].items() if v.src[0] is not ix.ONE]
    return (*sorted(steps), found[1].key)


# ---- ranges


def disjoint(a: Expr, b: Expr) -> bool:
    """Whether no iteration of one touches an element that any iteration of the other touches."""
    if signature(a) == signature(b):
        return False  # they touch the same
    known, other = spans(a), spans(b)
    return any(_is_before(span, other[row]) or _is_before(other[row], span)
               for row, span in known.items() if row in other)  # fmt: skip


Span = tuple["Expr | int", "Expr | int"]  # the least and the greatest element


def _is_before(a: Span, b: Span) -> bool:
    if isinstance(a[1], int) and isinstance(b[0], int):
        return a[1] < b[0]
    return ix.known_lt(a[1], b[0])


def spans(index: Expr) -> dict[Expr | None, Span]:
    """Where an access lies: in all of memory (None), and within the rows of each of its strides,
    where it does not leave them. Two are apart where one of these is."""
    return index.memo("spans", _spans)


def _spans(index: Expr) -> dict[Expr | None, Span]:
    steps = _steps(index)
    if steps is None:
        return {}
    found: dict[Expr | None, Span] = {}
    for row in (None, *dict.fromkeys(s for s, _ in steps[0])):
        part = steps if row is None else _within_rows(steps, row)
        span = None if part is None else _range(part)
        if span is not None:
            low, high = (e.arg if e.is_const else e for e in span)
            found[row] = low, high
    return found


class Touches:
    """Nodes that touch one buffer. Those that may touch an element of an access are found without
    asking each: of a thousand results that a loop puts side by side every one is asked about."""

    def __init__(self, buffer: str) -> None:
        self._buffer = buffer
        self._alike: dict[frozenset[Expr | None], _Alike] = {}  # by the rows they lie within
        self._anywhere: list[Node] = []

    def add(self, node: Node) -> None:
        indices = touched(node, self._buffer)
        if not indices:
            self._anywhere.append(node)
        for index in indices:
            known = _known_spans(index)
            self._alike.setdefault(frozenset(known), _Alike()).add(node, known)

    def near(self, index: Expr) -> list[Node]:
        """The nodes that `disjoint` has to be asked of; all others are apart from the access."""
        known = _known_spans(index)
        found = list(self._anywhere)
        for alike in self._alike.values():
            found += alike.near(known)
        return found


def _known_spans(index: Expr) -> Spans:
    """Those whose ends are numbers."""
    return {row: (low, high) for row, (low, high) in spans(index).items()
            if isinstance(low, int) and isinstance(high, int)}  # fmt: skip


Spans = dict["Expr | None", tuple[int, int]]


class _Alike:
    """Accesses with spans of the same kinds, those of about one length in the order they begin."""

    def __init__(self) -> None:
        self._all: list[Node] = []
        self._sorted: dict[Expr | None, dict[int, list[tuple[int, int, int]]]] = {}

    def add(self, node: Node, known: Spans) -> None:
        for row, (low, high) in known.items():
            lengths = self._sorted.setdefault(row, {})
            about = lengths.setdefault((high - low).bit_length(), [])
            bisect.insort(about, (low, high, len(self._all)))
        self._all.append(node)

    def near(self, known: Spans) -> list[Node]:
        least: list[Node] | None = None
        for row in known.keys() & self._sorted.keys():
            low, high = known[row]
            found: list[Node] = []
            for bits, about in self._sorted[row].items():
                first = bisect.bisect_left(about, (low - (1 << bits),))
                last = bisect.bisect_left(about, (high + 1,))
                found += [self._all[k] for _, end, k in about[first:last] if end >= low]
            if least is None or len(found) < len(least):
                least = found
        return self._all if least is None else least


Steps = tuple[list[tuple[Expr, Expr]], Expr]  # (stride, size) of each loop, and where it starts


def _steps(index: Expr) -> Steps | None:
    loops = tuple(free_vars(index))
    found = terms(index, loops)
    if found is None:
        return _free_steps(index)
    if loads(found[1]) or any(free_vars(s) for s in found[0].values()):
        return None
    return [(s, v.src[0]) for v, s in found[0].items()], found[1]


def _free_steps(index: Expr) -> Steps | None:
    """The same with each quotient and remainder a loop of its own: it goes where they go, and
    further."""
    steps: list[tuple[Expr, Expr]] = []
    start = ix.ZERO
    for atoms, factor in ix.poly(index).items():
        if not atoms:
            start = ix.as_index(factor)
            continue
        low, high = ix.bounds(ix.mul(*atoms))
        if len(atoms) > 1 or loads(*atoms) or low != 0 or not math.isfinite(high):
            return None
        steps.append((ix.as_index(factor), ix.as_index(int(high) + 1)))
    return steps, start


def _range(steps: Steps) -> tuple[Expr, Expr] | None:
    """The least and the greatest element, where the signs of the strides are known."""
    low = high = steps[1]
    for stride, size in steps[0]:
        reach = ix.mul(stride, ix.sub(size, 1))
        if ix.known_nonneg(stride):
            high = ix.add(high, reach)
        elif ix.known_nonneg(ix.neg(stride)):
            low = ix.add(low, reach)
        else:
            return None
    return low, high


def within(v: Expr, mask: Expr | None) -> tuple[Expr, Expr]:
    """The least and the greatest value a loop has where the mask holds, as far as it tells."""
    low, high = ix.ZERO, ix.sub(v.src[0], 1)
    conditions = [] if mask is None else [mask]
    while conditions:
        c = conditions.pop()
        if c.op == "bit_and":
            conditions += c.src
            continue
        if c.op not in ("lt", "ge") or c.src[0].dtype != v.dtype:
            continue
        p = ix.poly(ix.sub(*c.src))
        slope = p.get((v,), 0)
        rest = ix.from_poly({m: k for m, k in p.items() if m != (v,)})
        if abs(slope) != 1 or free_vars(rest) or loads(rest):
            continue
        if (c.op == "lt") == (slope == 1):  # v < -rest, or v <= rest
            high = ix.minimum(high, ix.sub(ix.neg(rest), 1) if slope == 1 else rest)
        else:  # v >= -rest, or v > rest
            low = ix.maximum(low, ix.neg(rest) if slope == 1 else ix.add(rest, 1))
    return low, high


def _within_rows(steps: Steps, row: Expr) -> Steps | None:
    """The part of an access inside a row of `row` elements, if it never leaves it."""
    if not ix.known_lt(0, row):
        return None
    fine = [(s, n) for s, n in steps[0] if ix.mod(s, row) is not ix.ZERO]
    inside = fine, ix.mod(steps[1], row)
    found = _range(inside)
    if found is None or not (ix.known_nonneg(found[0]) and ix.known_lt(found[1], row)):
        return None
    return inside
