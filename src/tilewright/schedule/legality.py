"""May this nest join that group? A pure question: the answer is an aligned nest, or a reason.

A group runs its shared outer loops once and, inside, its members one after the other. A member may
therefore read what an earlier member wrote at the same point of the outer loops, and nothing else
of that buffer. Loops of two nests correspond when they walk a common buffer with the same stride
and the same extent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, loads, var
from tilewright.ir.program import Nest
from tilewright.schedule.loops import is_fold, rename, split

Terms = dict[Expr, Expr]  # variable -> stride


@dataclass(frozen=True)
class Fit:
    """A nest aligned with a group: its variables renamed, and the outer loops both then share."""

    members: tuple[Nest, ...]
    outer: tuple[Expr, ...]


@dataclass(frozen=True)
class Misfit:
    reason: str

    def __bool__(self) -> bool:
        return False


def accesses(nest: Nest, buffer: str) -> Iterator[Expr]:
    """Every index at which the nest touches the buffer, stores first."""
    for store in nest.stores:
        if store.buffer == buffer:
            yield store.index
    for node in loads(*nest.exprs):
        if node.arg == buffer:
            yield node.src[0]


def terms(index: Expr, loops: Sequence[Expr]) -> tuple[Terms, Expr] | None:
    """The index as strides per loop and a constant rest; None if it is not affine in the loops."""
    found: Terms = {}
    for v in loops:
        stride = ix.coefficient(index, v)
        if stride is None:
            return None
        if stride is not ix.ZERO:
            found[v] = stride
    return found, ix.without(index, loops)


def all_loops(nest: Nest) -> tuple[Expr, ...]:
    return (*nest.loops, *nest.reduce)


def is_alone(nest: Nest) -> str:
    """Why a nest is never fused, or an empty string."""
    if any(s.mode != "set" or s.mask is not None for s in nest.stores):
        return "it scatters"
    if any(loads(s.index) for s in nest.stores):
        return "it stores at gathered indices"
    return "it scans" if is_fold(nest, "scan") else ""


def align(members: tuple[Nest, ...], outer: tuple[Expr, ...], nest: Nest) -> Fit | Misfit:
    """Try to bring `nest` into the loops of a group; tries each shared buffer as the guide."""
    reason = Misfit("no common buffer")
    touched = nest.reads | nest.writes
    for k in range(len(members) - 1, -1, -1):
        shared = (members[k].reads | members[k].writes) & touched
        for buffer in sorted(shared, key=lambda b: (b not in members[k].writes, b)):
            found = _align_by(members, outer, nest, k, buffer)
            if isinstance(found, Fit):
                return found
            reason = found
    return reason


def _align_by(members: tuple[Nest, ...], outer: tuple[Expr, ...], nest: Nest, k: int,
              buffer: str) -> Fit | Misfit:  # fmt: skip
    mine = terms(next(accesses(nest, buffer)), all_loops(nest))
    theirs = terms(next(accesses(members[k], buffer)), all_loops(members[k]))
    if mine is None or theirs is None:
        return Misfit(f"{buffer} is not read affinely")
    group = list(members)
    for _ in range(4):  # refine both nests until their extents agree
        cut = _refinement(mine[0], theirs[0])
        if cut is None:
            break
        side, v, inner = cut
        if side == "mine":
            nest = split(nest, v, inner)[0]
        else:
            if any(v in all_loops(m) for m in group if m is not group[k]) and v not in outer:
                return Misfit(f"{buffer}: extents differ")
            group, outer = _split_all(group, outer, v, inner)
        mine = terms(next(accesses(nest, buffer)), all_loops(nest))
        theirs = terms(next(accesses(group[k], buffer)), all_loops(group[k]))
        if mine is None or theirs is None:
            return Misfit(f"{buffer} is not affine after splitting")
    names = _correspondence(mine[0], theirs[0])
    aligned = rename(nest, _fresh_names(nest, names, group))
    shared = tuple(v for v in outer if v in aligned.loops)
    if not shared and outer:
        return Misfit("no loops in common")
    for member in group:
        problem = _conflict(member, aligned, shared)
        if problem:
            return Misfit(problem)
    return Fit((*group, aligned), shared)


def _split_all(group: list[Nest], outer: tuple[Expr, ...], v: Expr, inner: Expr
               ) -> tuple[list[Nest], tuple[Expr, ...]]:  # fmt: skip
    result: list[Nest] = []
    for member in group:
        result.append(split(member, v, inner)[0] if v in all_loops(member) else member)
    high, low = var(f"{v.arg}o", ix.floordiv(v.src[0], inner)), var(f"{v.arg}i", inner)
    spread = tuple(w for u in outer for w in ((high, low) if u is v else (u,)))
    return result, spread


def _refinement(mine: Terms, theirs: Terms) -> tuple[str, Expr, Expr] | None:
    """A loop to split, because the other side walks the same stride with a shorter extent."""
    for v, stride in mine.items():
        for u, other in theirs.items():
            if stride is not other:
                continue
            a, b = v.src[0], u.src[0]
            if a is b:
                break
            if _divides(b, a) and any(s is ix.mul(stride, b) for s in theirs.values()):
                return "mine", v, b
            if _divides(a, b) and any(s is ix.mul(stride, a) for s in mine.values()):
                return "theirs", u, a
    return None


def _divides(small: Expr, large: Expr) -> bool:
    return ix.mod(large, small) is ix.ZERO and ix.floordiv(large, small).op != "ifloordiv"


def _correspondence(mine: Terms, theirs: Terms) -> dict[Expr, Expr]:
    names: dict[Expr, Expr] = {}
    for v, stride in mine.items():
        for u, other in theirs.items():
            if stride is other and v.src[0] is u.src[0] and u not in names.values():
                names[v] = u
                break
    return names


def _fresh_names(nest: Nest, names: dict[Expr, Expr], group: Sequence[Nest]) -> dict[Expr, Expr]:
    """Loops without a counterpart get names nobody in the group uses."""
    used = {v.arg for member in group for v in all_loops(member)}
    result = dict(names)
    for v in all_loops(nest):
        if v in result:
            continue
        name, count = v.arg, 0
        while name in used:
            count += 1
            name = f"{v.arg}_{count}"
        used.add(name)
        result[v] = var(name, v.src[0])
    return result


def _conflict(earlier: Nest, later: Nest, outer: Sequence[Expr]) -> str:
    """Why `later` cannot follow `earlier` inside the same outer iteration, or an empty string."""
    hazards = (earlier.writes & (later.reads | later.writes)) | (later.writes & earlier.reads)
    for buffer in sorted(hazards):
        for a in accesses(earlier, buffer):
            for b in accesses(later, buffer):
                if a is not b and not _same_block(a, b, earlier, later, outer):
                    return f"{buffer} is needed at other points of the shared loops"
                if a is b and any(v not in earlier.loops for v in outer):
                    return f"{buffer} is complete only after the loop over the group"
    return ""


def _same_block(a: Expr, b: Expr, earlier: Nest, later: Nest, outer: Sequence[Expr]) -> bool:
    """Whether at one point of the outer loops both touch the same part of the buffer, and at
    different points different parts."""
    if any(v not in earlier.loops for v in outer):
        return False
    ta, tb = terms(a, all_loops(earlier)), terms(b, all_loops(later))
    if ta is None or tb is None or ta[1] is not tb[1]:
        return False
    moving = [v for v in outer if v.src[0] is not ix.ONE]
    if any(v not in ta[0] or ta[0][v] is not tb[0].get(v) for v in moving):
        return False
    rest_a = Counter((s, v.src[0]) for v, s in ta[0].items() if v not in outer)
    rest_b = Counter((s, v.src[0]) for v, s in tb[0].items() if v not in outer)
    if rest_a == rest_b:
        return True  # one of the two is a store, and a store never meets itself
    if rest_b <= rest_a and _meets_nobody(a, ta[0], earlier):
        return True
    if rest_a <= rest_b and _meets_nobody(b, tb[0], later):
        return True
    steps = [(ta[0][v], v.src[0]) for v in outer if v in ta[0]]
    return all(ix.separate(steps, _reach(t, outer)) for t in (ta[0], tb[0]))


def _meets_nobody(index: Expr, strides: Terms, nest: Nest) -> bool:
    """Whether different iterations touch different elements: always so where it stores."""
    if any(index is s.index for s in nest.stores):
        return True
    return ix.separate([(s, v.src[0]) for v, s in strides.items()])


def _reach(strides: Terms, outer: Sequence[Expr]) -> Expr:
    """How far the inner loops go from where the outer ones put them."""
    inner = [(s, v.src[0]) for v, s in strides.items() if v not in outer]
    return ix.add(0, *(ix.mul(s, ix.sub(n, 1)) for s, n in inner))
