"""Small folds of the same sizes, one after the other and of nothing in common, as one kernel.

Means of several rows of results, as losses that are added have, take a card less time than to
start the kernels that reduce them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright import rules
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import is_alone
from tilewright.schedule.nests.hints import work
from tilewright.schedule.nests.transform import rename


def join_small_reductions(program: Program, groups: Sequence[Group]) -> list[Group]:
    found: list[Group] = []
    for group in groups:
        both = _joined(found[-1], group) if found and _is_small(program, group) else None
        if both is not None and _is_small(program, found[-1]):
            found[-1] = both
        else:
            found.append(group)
    return found


def _is_small(program: Program, group: Group) -> bool:
    """Whether it does nothing but fold some rows on a card, each in one loop."""
    if (
        not group.members
        or group.serial
        or group.row_programs
        or len(group.members) > rules.SMALL_REDUCTIONS.limit
    ):
        return False
    device = program.buffers[min(group.writes)].device
    return device.type != "cpu" and all(
        m.loops == group.outer and len(m.reduce) == 1 and not is_alone(m)
        and work(m) <= rules.SMALL_REDUCTION.limit and not m.reads & group.writes
        for m in group.members)  # fmt: skip


def _joined(first: Group, second: Group) -> Group | None:
    touched = first.reads | first.writes
    if second.writes & touched or second.reads & first.writes:
        return None
    if len(first.members) + len(second.members) > rules.SMALL_REDUCTIONS.limit or not first.members:
        return None
    mine, others = (_sizes(g) for g in (first, second))
    if mine is None or mine != others:
        return None
    loops = (*first.outer, *first.members[0].reduce)
    members = tuple(rename(m, dict(zip((*m.loops, *m.reduce), loops, strict=True)))
                    for m in second.members)  # fmt: skip
    return replace(second, members=(*first.members, *members), outer=first.outer)


def _sizes(group: Group) -> tuple[Expr, ...] | None:
    """Of the loops that all members have; none if they differ, or are not known."""
    found = {tuple(v.src[0] for v in (*m.loops, *m.reduce)) for m in group.members}
    (sizes,) = found if len(found) == 1 else (None,)
    if sizes is None or any(ix.value_of(size) is None for size in sizes):
        return None
    return sizes
