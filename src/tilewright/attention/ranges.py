"""What is known of a mask over a rectangle of queries and keys, as expressions of its corners.

`causal` masks, windows, prefixes and lengths compare sums of positions: whether they hold
somewhere, and whether they hold everywhere, follows from the first and the last of each. What is
read from memory at a position of its own may hold or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, var, walk

TRUE, FALSE = const(True, torch.bool), const(False, torch.bool)
_LONG = 1 << 62


def corner(name: str) -> Expr:
    """A number that is first or last of a range."""
    return var(name, const(_LONG))


M0, M1, N0, N1 = (corner(name) for name in ("m0", "m1", "n0", "n1"))


@dataclass(frozen=True)
class Holds:
    """Whether a mask may hold somewhere, and surely holds everywhere, in a rectangle."""

    maybe: Expr
    surely: Expr

    @property
    def tells(self) -> bool:
        """Whether there is anything to be known before looking at each element."""
        return self.maybe is not TRUE or self.surely is not FALSE


_UNKNOWN = Holds(TRUE, FALSE)
_Range = tuple[Expr, Expr]


def holds(mask: Expr, row: Expr, column: Expr) -> Holds:
    """Of queries `m0` to `m1` and keys `n0` to `n1`, the last included."""
    known = _Known({row: (M0, M1), column: (N0, N1)})
    for node in walk(mask):
        known.look(node)
    return known.truths.get(mask, _UNKNOWN)


class _Known:
    def __init__(self, ends: Mapping[Expr, _Range]) -> None:
        self.loops = frozenset(ends)
        self.ranges: dict[Expr, _Range] = dict(ends)
        self.truths: dict[Expr, Holds] = {}

    def look(self, node: Expr) -> None:
        if node.dtype == torch.bool:
            self.truths[node] = self._truth(node)
        elif not node.dtype.is_floating_point and node not in self.ranges:
            found = self._range(node)
            if found is not None:
                self.ranges[node] = found

    def _truth(self, node: Expr) -> Holds:
        if not free_vars(node) & self.loops:
            return Holds(node, node)
        src = [self.truths.get(s, _UNKNOWN) for s in node.src]
        match node.op:
            case "bit_and":
                return Holds(*(build.op("bit_and", *pair) for pair in _pairs(src)))
            case "bit_or":
                return Holds(*(build.op("bit_or", *pair) for pair in _pairs(src)))
            case "bit_not":
                return Holds(_not(src[0].surely), _not(src[0].maybe))
            case "lt" | "le" | "gt" | "ge" | "eq" | "ne":
                return self._compared(node)
            case "cast" if node.src[0].dtype == torch.bool:
                return src[0]
            case _:
                return _UNKNOWN

    def _compared(self, node: Expr) -> Holds:
        a, b = (self.ranges.get(s) for s in node.src)
        if a is None or b is None:
            return _UNKNOWN
        match node.op:
            case "lt":
                return Holds(_lt(a[0], b[1]), _lt(a[1], b[0]))
            case "le":
                return Holds(_not(_lt(b[1], a[0])), _not(_lt(b[0], a[1])))
            case "gt":
                return Holds(_lt(b[0], a[1]), _lt(b[1], a[0]))
            case "ge":
                return Holds(_not(_lt(a[1], b[0])), _not(_lt(a[0], b[1])))
            case _:
                meet = build.both(_not(_lt(a[1], b[0])), _not(_lt(b[1], a[0])))
                one = build.both(_not(_lt(a[0], b[1])), _not(_lt(b[0], a[1])))
                same = Holds(meet, build.both(meet, one))
                return same if node.op == "eq" else Holds(_not(same.surely), _not(same.maybe))

    def _range(self, node: Expr) -> _Range | None:
        if not free_vars(node) & self.loops:
            own = build.cast(node, torch.int64)
            return own, own
        src = [self.ranges.get(s) for s in node.src]
        if any(s is None for s in src) or node.op == "load":
            return None
        ends = [s for s in src if s is not None]
        match node.op:
            case "cast":
                return ends[0]
            case "iadd" | "add":
                low, high = ends[0]
                for a, b in ends[1:]:
                    low, high = _add(low, a), _add(high, b)
                return low, high
            case "sub":
                return _sub(ends[0][0], ends[1][1]), _sub(ends[0][1], ends[1][0])
            case "neg":
                return _sub(ix.ZERO, ends[0][1]), _sub(ix.ZERO, ends[0][0])
            case "abs":
                low, high = ends[0]
                less = _sub(ix.ZERO, high)
                return _max(ix.ZERO, _max(low, less)), _max(_sub(ix.ZERO, low), high)
            case "imul" | "mul":
                return _scaled(node, ends)
            case "ifloordiv" | "floordiv":
                by = ix.value_of(node.src[1])
                if by is None or by <= 0:
                    return None
                low, high = (ix.floordiv(e, by) if _is_index(e) else None for e in ends[0])
                return None if low is None or high is None else (low, high)
            case _:
                return None


def _scaled(node: Expr, ends: list[_Range]) -> _Range | None:
    if len(ends) != 2:
        return None
    by, other = (0, 1) if node.src[0].is_const else (1, 0)
    factor = ix.value_of(node.src[by])
    if factor is None:
        return None
    low, high = (_mul(e, factor) for e in ends[other])
    return (low, high) if factor >= 0 else (high, low)


def _is_index(e: Expr) -> bool:
    return e.op in ("iadd", "imul", "ifloordiv", "imod", "imin", "imax", "const", "var", "sym")


def _add(a: Expr, b: Expr) -> Expr:
    return ix.add(a, b) if _is_index(a) and _is_index(b) else build.op("add", a, b)


def _sub(a: Expr, b: Expr) -> Expr:
    return ix.sub(a, b) if _is_index(a) and _is_index(b) else build.op("sub", a, b)


def _max(a: Expr, b: Expr) -> Expr:
    return ix.maximum(a, b) if _is_index(a) and _is_index(b) else build.op("max", a, b)


def _mul(a: Expr, by: int) -> Expr:
    return ix.mul(a, by) if _is_index(a) else build.op("mul", a, const(by))


def _lt(a: Expr, b: Expr) -> Expr:
    return build.op("lt", a, b)


def _not(a: Expr) -> Expr:
    return build.op("bit_not", a)


def _pairs(src: list[Holds]) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    return tuple(s.maybe for s in src), tuple(s.surely for s in src)
