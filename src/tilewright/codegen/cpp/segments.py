"""The loop structure of a kernel: shared outer loops, and segments of jammed inner loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, loads, walk
from tilewright.ir.program import Nest
from tilewright.schedule.group import Group, hint, hint_product
from tilewright.schedule.legality import accesses, all_loops
from tilewright.schedule.loops import is_fold, merge, unroll


@dataclass
class Segment:
    """Members that run in one loop. `loops` are outside the folds, `reduce` are folded."""

    loops: tuple[Expr, ...]
    reduce: tuple[Expr, ...]
    members: list[Nest] = field(default_factory=list[Nest])

    @property
    def inner(self) -> tuple[Expr, ...]:
        return (*self.loops, *self.reduce)

    @property
    def scans(self) -> bool:
        return any(is_fold(m, "scan") for m in self.members)


@dataclass
class Structure:
    outer: tuple[Expr, ...]
    segments: list[Segment]
    lanes: bool  # the last outer loop is vectorised, not the segments' own loops


def structure(group: Group) -> Structure:
    members, outer = _merge_loops(list(group.members), _without_scan(group))
    members, outer = _write_out_shortest(members, outer)
    segments = _segments(members, outer)
    return Structure(outer, segments, _prefers_lanes(segments, outer))


def _without_scan(group: Group) -> tuple[Expr, ...]:
    """A loop that a scan runs along stays inside, in order."""
    axes = {n.arg.axis for m in group.members for n in walk(*m.exprs) if n.op == "scan"}
    return tuple(v for v in group.outer if v.arg not in axes)


def _merge_loops(members: list[Nest], outer: tuple[Expr, ...]
                 ) -> tuple[list[Nest], tuple[Expr, ...]]:  # fmt: skip
    """Join adjacent loops that every index walks as one: long loops vectorise, short do not."""
    if any(is_fold(m, "scan") for m in members):
        return members, outer
    changed = True
    while changed:
        changed = False
        for chain in (outer, *_chains(members, outer)):
            for a, b in pairwise(chain):
                found = merge(members, a, b)
                if found is None:
                    continue
                members, joined = found
                outer = tuple(joined if v is a else v for v in outer if v is not b)
                changed = True
                break
            if changed:
                break
    return members, outer


def _write_out_shortest(members: list[Nest], outer: tuple[Expr, ...]
                        ) -> tuple[list[Nest], tuple[Expr, ...]]:  # fmt: skip
    """A last loop of a few points, such as a stack of two, as statements: then the loop around it
    can be vectorised."""
    if len(members) != 1 or len(outer) < 2 or members[0].loops != outer or members[0].reduce:
        return members, outer
    nest, last = members[0], outer[-1]
    short = (ix.value_of(last.src[0]) or 0) in (2, 3, 4)
    if not short or hint(outer[-2].src[0]) < 8 or any(
        s.mode != "set" or s.mask is not None or loads(s.index) for s in nest.stores
    ):  # fmt: skip
        return members, outer
    return [unroll(nest, last)], outer[:-1]


def _chains(members: Sequence[Nest], outer: tuple[Expr, ...]) -> list[tuple[Expr, ...]]:
    chains: list[tuple[Expr, ...]] = []
    for m in members:
        chains.append(tuple(v for v in m.loops if v not in outer))
        chains.append(m.reduce)
    return chains


def _segments(members: Sequence[Nest], outer: tuple[Expr, ...]) -> list[Segment]:
    segments: list[Segment] = []
    for m in members:
        loops = tuple(v for v in m.loops if v not in outer)
        place = _earliest(segments, m)
        target = next((s for s in segments[place:] if _jams(s, loops, m)), None)
        if target is None:
            target = Segment(loops, m.reduce)
            segments.append(target)
        elif m.reduce and not target.reduce:
            target.loops, target.reduce = loops, m.reduce
        target.members.append(m)
    return segments


def _earliest(segments: Sequence[Segment], nest: Nest) -> int:
    """The first segment the nest may run in: after what it needs, or beside it point by point."""
    earliest = 0
    for k, segment in enumerate(segments):
        for other in segment.members:
            hazards = (other.writes & (nest.reads | nest.writes)) | (other.reads & nest.writes)
            if not hazards:
                continue
            same = not other.reduce and all(
                a is b for buffer in hazards for a in accesses(other, buffer)
                for b in accesses(nest, buffer)
            )  # fmt: skip
            earliest = max(earliest, k if same and set(all_loops(other)) == set(all_loops(nest))
                           else k + 1)  # fmt: skip
    return earliest


def _jams(segment: Segment, loops: tuple[Expr, ...], nest: Nest) -> bool:
    if set(segment.inner) != {*loops, *nest.reduce}:
        return False
    if segment.reduce and nest.reduce:
        return set(segment.reduce) == set(nest.reduce)
    return True


STRIDED = 8  # what a load that is not contiguous costs, in contiguous ones
IN_ORDER = 4  # the same for a step of a scan, which waits for the one before


def _prefers_lanes(segments: Sequence[Segment], outer: tuple[Expr, ...]) -> bool:
    """Whether to vectorise the last outer loop: when walking memory along it costs less than along
    the innermost loops, or when those are too short to fill a vector."""
    if not outer:
        return False
    inside = [s for s in segments if s.inner]
    if not inside:
        return True
    last = outer[-1]
    shortest = min(hint_product(v.src[0] for v in s.inner) for s in inside)
    if shortest <= 4 and hint(last.src[0]) >= 16:
        return True
    if hint(last.src[0]) < 8:
        return False
    along_lanes = along_inner = 0
    for segment in inside:
        for nest in segment.members:
            along_lanes += _walk_cost(nest, segment, last)
            along_inner += _walk_cost(nest, segment, segment.inner[-1])
    return along_lanes < along_inner


def _walk_cost(nest: Nest, segment: Segment, v: Expr) -> int:
    """What the accesses inside the segment's loops cost when `v` is the vectorised loop."""
    indices = {n.src[0] for n in loads(*nest.exprs)}
    if not nest.reduce:
        indices |= {s.index for s in nest.stores}
    inner = set(segment.inner)
    short = hint(v.src[0]) < 8
    in_order = v in inner and is_fold(nest, "scan")
    total = 0
    for index in indices:
        if not inner & _vars(index):
            continue  # computed once, outside
        stride = ix.coefficient(index, v)
        if stride is ix.ZERO:
            continue
        plain = stride is ix.ONE and not short
        total += (IN_ORDER if in_order else 1) if plain else STRIDED
    return total * hint_product(u.src[0] for u in all_loops(nest))


def _vars(index: Expr) -> set[Expr]:
    return {n for n in walk(index) if n.op == "var"}
