"""Groups that a code generator cannot express as one kernel, in pieces that it can.

A row of a card is in registers, where a value can only be read where it was made. What is read
elsewhere too, and is cheap, is computed there again; that may be all that was in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from tilewright.ir.program import Nest, Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import first_conflict
from tilewright.schedule.rewrite.rematerialise import inlined, is_cheap

Limits = Callable[[Program, Group], str]
"""Why a group cannot be one kernel, or an empty string. A single nest always can."""


def taken_apart(program: Program, groups: Sequence[Group], limits: Limits) -> list[Group]:
    """The groups in order, each whole or as the longest runs of members that are expressible."""
    found: list[Group] = []
    cannot = partial(limits, program)
    for group in groups:
        reason = cannot(group) if group.call is None else ""
        if reason and group.parts:
            found += taken_apart(program, group.parts, limits)
        elif reason:
            again = _computed_again(program, group)
            found += [again] if again and not cannot(again) else _pieces(group, cannot, reason)
        else:
            found.append(group)
    return found


def _computed_again(program: Program, group: Group) -> Group | None:
    """The group with cheap values of its own computed by the members that read them."""
    members = list(group.members)
    for maker in group.members:
        buffer = program.buffers[maker.stores[0].buffer]
        if buffer.name not in group.local or not is_cheap(program, maker):
            continue
        place = next((k for k, m in enumerate(members) if m.name == maker.name), None)
        if place is None or any(buffer.name in m.writes for m in members if m.name != maker.name):
            continue
        if any(m.writes & members[place].reads for m in members[place + 1 :]):
            continue  # it would read what has changed
        made = {k: inlined(m, members[place], buffer) for k, m in enumerate(members)
                if buffer.name in m.reads}  # fmt: skip
        if all(made.values()):
            members = [made.get(k) or m for k, m in enumerate(members) if k != place]
    if len(members) in (0, len(group.members)):
        return None
    return replace(group, members=tuple(members))


def _pieces(group: Group, cannot: Callable[[Group], str], reason: str) -> list[Group]:
    pieces: list[Group] = []
    members = list(group.members)
    while members:
        most = len(members) if pieces else len(members) - 1  # the whole is known not to do
        runs = (run for n in range(most, 1, -1) for run in _runs(group, members[:n]))
        pieces.append(next((run for run in runs if not cannot(run)), _run(group, members[:1])))
        members = members[len(pieces[-1].members) :]
    refused = {**group.refused, group.members[-1].name: reason}
    return [replace(pieces[0], refused=refused), *pieces[1:]]


def _runs(group: Group, members: Sequence[Nest]) -> Iterator[Group]:
    """Some members in the loops of the group, and in all that they share without the others."""
    yield _run(group, members)
    outer = tuple(v for v in members[0].loops if all(v in m.loops for m in members))
    if not group.serial and len(outer) > len(group.outer) and not first_conflict(members, outer):
        yield replace(_run(group, members), outer=outer)


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
