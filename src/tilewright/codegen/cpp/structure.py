"""How a C++ kernel walks its group: shared outer loops, segments, and which loop is vectorised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, walk
from tilewright.ir.program import Nest
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import all_loops
from tilewright.schedule.nests.hints import hint, hint_product
from tilewright.schedule.nests.segments import Segment, merge_loops, segments_of, without_scan
from tilewright.schedule.nests.transform import reduces_or_scans, unroll


@dataclass
class Structure:
    outer: tuple[Expr, ...]
    serial: tuple[Expr, ...]  # inside the outer loops, in order
    segments: list[Segment]
    lanes: bool  # the last outer loop is vectorised, not the segments' own loops


def structure(group: Group) -> Structure:
    members, outer, serial = merge_loops(list(group.members), without_scan(group), group.serial)
    members, outer = _write_out_shortest(members, outer)
    segments = segments_of(members, (*outer, *serial))
    for segment in segments:
        _walk_along_memory(segment)
    lanes = not serial and _prefers_lanes(segments, outer)
    return Structure(outer, serial, segments, lanes)


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


def _walk_along_memory(segment: Segment) -> None:
    """Put last the loop along which the accesses of a segment that folds nothing cost least: what
    is stored need not lie as what is read does, and four channels beside each other fill no vector
    (group norm of 4x32x32x32, 8 groups, its result with channels last: 0.67 ms, now 0.16)."""
    loops = segment.loops
    if segment.reduce or segment.scans or len(loops) < 2 or any(free_vars(v.src[0]) for v in loops):
        return
    cost = {v: sum(_walk_cost(m, segment, v, FEW) for m in segment.members) for v in loops}
    last = min(reversed(loops), key=lambda v: (cost[v], -hint(v.src[0])))
    segment.loops = (*(v for v in loops if v is not last), last)


STRIDED = 8  # what a load that is not contiguous costs, in contiguous ones
FEW = 3  # the same of a few contiguous ones, too few to fill a vector
IN_ORDER = 4  # the same for a step of a scan, which waits for the one before


def _prefers_lanes(segments: Sequence[Segment], outer: tuple[Expr, ...]) -> bool:
    """Whether to vectorise the last outer loop: when walking memory along it costs less than along
    the innermost loops, or when those are too short to fill a vector."""
    if not outer:
        return False
    inside = [s for s in segments if s.inner]
    if not inside:
        return True
    if any(free_vars(v.src[0]) for s in inside for v in s.inner):
        return False  # lanes would have loops of different lengths
    last = outer[-1]
    shortest = min(hint_product(v.src[0] for v in s.inner) for s in inside)
    few = shortest <= 4 and hint(last.src[0]) >= 16
    looked_up = any(loads(n.src[0]) for s in inside for m in s.members if m.reduce
                    for n in loads(*m.exprs))  # fmt: skip
    if few and not looked_up:
        return True
    if not few and hint(last.src[0]) < 8:
        return False
    along_lanes = along_inner = 0
    for segment in inside:
        for nest in segment.members:
            along_lanes += _walk_cost(nest, segment, last)
            along_inner += _walk_cost(nest, segment, segment.inner[-1])
    return along_lanes < along_inner or (few and along_lanes == along_inner)


def folds_columns(segment: Segment) -> bool:
    """Whether memory runs along the last loop that a segment of folds has of its own, not along
    what it folds."""
    if not segment.loops or not segment.reduce:
        return False
    column = segment.loops[-1]
    if hint(column.src[0]) < 8 or any(free_vars(v.src[0]) for v in segment.inner):
        return False
    along = [sum(_walk_cost(m, segment, v) for m in segment.members)
             for v in (column, segment.reduce[-1])]  # fmt: skip
    return along[0] < along[1]


def _walk_cost(nest: Nest, segment: Segment, v: Expr, few: int = STRIDED) -> int:
    """What the accesses inside the segment's loops cost when `v` is the vectorised loop; a
    contiguous one costs `few` where `v` is too short to fill a vector."""
    indices = {n.src[0] for n in loads(*nest.exprs)}
    if not nest.reduce:
        indices |= {s.index for s in nest.stores}
    inner = set(segment.inner)
    short = hint(v.src[0]) < 8
    in_order = v in inner and reduces_or_scans(nest, "scan")
    total = 0
    for index in indices:
        if not inner & _vars(index):
            continue  # computed once, outside
        stride = ix.coefficient(index, v)
        if stride is ix.ZERO:
            continue
        if stride is not ix.ONE:
            total += STRIDED
        elif short:
            total += few
        else:
            total += IN_ORDER if in_order else 1
    return total * hint_product(u.src[0] for u in all_loops(nest))


def _vars(index: Expr) -> set[Expr]:
    return {n for n in walk(index) if n.op == "var"}
