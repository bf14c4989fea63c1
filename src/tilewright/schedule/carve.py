"""Groups that a code generator cannot express as one kernel, in pieces that it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tilewright.ir.program import Nest, Program
from tilewright.schedule.group import Group

Limits = Callable[[Program, Group], str]
"""Why a group cannot be one kernel, or an empty string. A single nest always can."""


def carved(program: Program, groups: Sequence[Group], limits: Limits) -> list[Group]:
    """The groups in order, each whole or as the longest runs of members that are expressible."""
    found: list[Group] = []
    cannot = partial(limits, program)
    for group in groups:
        reason = cannot(group) if group.call is None else ""
        if reason and group.parts:
            found += carved(program, group.parts, limits)
        else:
            found += _pieces(group, cannot, reason) if reason else [group]
    return found


def _pieces(group: Group, cannot: Callable[[Group], str], reason: str) -> list[Group]:
    pieces: list[Group] = []
    members = list(group.members)
    while members:
        most = len(members) if pieces else len(members) - 1  # the whole is known not to do
        length = next((n for n in range(most, 1, -1)
                       if not cannot(_run(group, members[:n]))), 1)  # fmt: skip
        pieces.append(_run(group, members[:length]))
        members = members[length:]
    pieces[0].refused = {**group.refused, group.members[-1].name: reason}
    return pieces


def _run(group: Group, members: Sequence[Nest]) -> Group:
    """Some members of a group, one after the other: it keeps the loops they share. Serial loops
    that none of them folds over are parallel ones."""
    if len(members) == 1:
        return Group((members[0],), members[0].loops)
    made = {b for m in members for b in m.writes}
    if not any(v in m.reduce for m in members for v in group.serial):
        outer = (*group.outer, *group.serial)
        return Group(tuple(members), outer, local=group.local & made)
    return Group(tuple(members), group.outer, group.serial, local=group.local & made)
