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
        length = next((n for n in range(len(members) - 1, 1, -1)
                       if not cannot(_run(group, members[:n]))), 1)  # fmt: skip
        pieces.append(_run(group, members[:length]))
        members = members[length:]
    pieces[0].refused = {**group.refused, group.members[-1].name: reason}
    return pieces


def _run(group: Group, members: Sequence[Nest]) -> Group:
    """Some members of a group, one after the other: it keeps the loops they share."""
    if len(members) == 1:
        return Group((members[0],), members[0].loops)
    made = {b for m in members for b in m.writes}
    return Group(tuple(members), group.outer, group.serial, local=group.local & made)
