"""Scans that run from the last point of a loop to the first, where memory then runs forwards.

A scan of what is flipped and flipped again (`schedule/rewrite/scan_epilogue.py`) reads and writes
rows from their ends. With its loop the other way around neighbours are neighbours again, and may be
moved at once.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, walk
from tilewright.ir.program import Nest
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.nests.transform import substitute_nest


def with_forward_scans(group: Group) -> tuple[Group, bool]:
    """The group with its loops such that memory runs forwards, and whether its scans run back."""
    scans = [n for m in group.members for n in walk(*m.exprs) if n.op == "scan"]
    axes = {v for m in group.members for v in m.loops for n in scans if n.arg.axis == v.arg}
    if len(axes) != 1 or any(n.arg.kind == "sort" for n in scans):
        return group, False
    (axis,) = axes
    if not all(_runs_back(m, axis) for m in group.members):
        return group, False
    place = {axis: ix.sub(ix.sub(axis.src[0], ix.ONE), axis)}
    members = (substitute_nest(m, place, m.loops, m.reduce) for m in group.members)
    return replace(group, members=tuple(members)), True


def _runs_back(nest: Nest, axis: Expr) -> bool:
    """Whether all that a nest moves along the loop it moves from the last point to the first."""
    places = [*(n.src[0] for n in loads(*nest.exprs)), *(s.index for s in nest.stores)]
    steps = [ix.coefficient(i, axis) for i in places if axis in free_vars(i)]
    return bool(steps) and all(step is not None and ix.bounds(step)[1] < 0 for step in steps)
