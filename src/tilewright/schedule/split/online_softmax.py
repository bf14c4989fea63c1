"""Softmax over rows that several programs of a card have parts of: a largest value and a sum of
exponentials relative to it, reduced in one pass over each part.

A part sums exponentials relative to its own largest value; once the largest of all is known, the
parts' sums are scaled to it. What is between the reductions and what they make (the exponentials
themselves) is computed again rather than stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from tilewright import rules
from tilewright.ir import build
from tilewright.ir.expr import Expr, const, rewrite, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Nest, Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import Fit, is_alone
from tilewright.schedule.nests.hints import hint_bytes
from tilewright.schedule.nests.transform import rename
from tilewright.schedule.rewrite.rematerialise import inlined
from tilewright.schedule.split.pairs import is_pair
from tilewright.schedule.split.policy import starved
from tilewright.target import Target


def online_softmax(program: Program, groups: Sequence[Group]) -> list[Group]:
    """Groups that reduce one row's largest value and a sum of exponentials relative to it, as
    one, where the row would leave a card idle."""
    found = list(groups)
    visible = program.visible
    for top in [g for g in groups if _finds_largest(program, g)]:
        (buffer,) = top.writes
        for maker in [m for g in found for m in g.members if buffer in m.reads]:
            if not maker.writes & visible:
                found = _dropped(program, found, maker)
        (largest,) = top.members
        for group in [g for g in found if buffer in g.reads and len(g.members) == 1]:
            new = sums(group.members, top.members)
            before = found[found.index(top) + 1 : found.index(group)]
            if new and not any(g.writes & (group.reads - {buffer}) for g in before):
                joined = replace(top, members=(largest, *new))
                found = [joined if g is top else g for g in found if g is not group]
                break
    return found


def _finds_largest(program: Program, group: Group) -> bool:
    if len(group.members) != 1 or group.serial or len(group.writes) != 1:
        return False
    (nest,) = group.members
    fold = nest.stores[0].value
    if fold.op != "reduce" or fold.arg.kind != "max":
        return False
    target = Target.of(program.buffers[nest.stores[0].buffer].device)
    return bool(starved(Fit(group.members, group.outer), target))


def _dropped(program: Program, groups: list[Group], maker: Nest) -> list[Group]:
    """The groups without a nest that only computes values of a row for others, if these can."""
    new: list[Group] = []
    at = next(k for k, g in enumerate(groups) if maker in g.members)
    if any(g.writes & maker.reads for g in groups[at:]) or len(groups[at].members) > 2:
        return groups  # computed later it would be of other values
    beside = [m for m in groups[at].members if m is not maker]
    if any(maker.writes & n.writes for n in (*beside, *groups[:at], *groups[at + 1 :])):
        return groups  # or it is not all that is read there
    for g in groups:
        members = [recompute(program, maker, m) if maker.writes & m.reads else m
                   for m in g.members if m is not maker]  # fmt: skip
        kept = tuple(m for m in members if m is not None)
        if len(kept) < len(members) or (g.call is not None and maker.writes & g.reads):
            return groups
        if maker not in g.members:
            new.append(replace(g, members=kept) if kept != g.members else g)
        elif kept:
            new.append(Group(kept, kept[0].loops))
    return new


def recompute(program: Program, maker: Nest, reader: Nest) -> Nest | None:
    """The reader with what the maker computes, where that is little beside a store and a load."""
    if maker.reduce or len(maker.stores) != 1 or is_alone(maker):
        return None
    (store,) = maker.stores
    buffer = program.buffers[store.buffer]
    cost = sum(TABLE[n.op].cost for n in walk(store.value) if n.op in TABLE)
    more = sum(hint_bytes(program.buffers[b]) for b in maker.reads - reader.reads)
    little = hint_bytes(buffer) // 8  # beside a store and a load of it
    if (
        buffer.kind != "temporary"
        or cost > rules.RECOMPUTED_SOFTMAX.limit
        or more > 2 * hint_bytes(buffer) + little
    ):
        return None
    return inlined(reader, maker, buffer)


def recomputed_members(program: Program, members: Sequence[Nest], private: set[str]
                   ) -> tuple[Nest, ...]:  # fmt: skip
    """The members without those that only compute values of a row for others of them. `private`
    are buffers that nothing else needs."""
    found = list(members)
    for maker in members:
        at = next((k for k, m in enumerate(found) if m is maker), None)
        if at is None or not maker.writes <= private:
            continue
        new = {k: recompute(program, maker, m) for k, m in enumerate(found)
               if k != at and maker.writes & m.reads}  # fmt: skip
        if not all(new.values()) or any(maker.writes & m.writes for m in found if m is not maker):
            continue
        if any(m.writes & maker.reads for m in found[at:]):
            continue  # computed later it would be of other values
        found = [new.get(k) or m for k, m in enumerate(found) if k != at]
    return tuple(found)


def sums(later: Sequence[Nest], first: Sequence[Nest]) -> list[Nest]:
    """Those of the later nests that sum exponentials relative to largest values of the first, over
    the same loops as these."""
    found: list[Nest] = []
    for nest in later:
        for top in first:
            names = dict(zip(nest.reduce, top.reduce, strict=False))
            same = [v.src[0] for v in nest.reduce] == [v.src[0] for v in top.reduce]
            new = rename(nest, names) if same and names.keys() != set(names.values()) else nest
            if same and is_pair(new, top):
                found.append(new)
                break
    return found


def relative_to(fold: Expr, base: Expr, top: Expr) -> Expr:
    """The fold of exponentials relative to a part's largest value. Where that is -inf, all of the
    part are nothing; relative to -inf they would be no numbers."""
    none = build.op("eq", top, const(-math.inf, torch.float32))
    finite = build.where(none, const(0.0, torch.float32), top)
    return rewrite(fold, lambda node, src: finite if node is base else None)


def scaled(part: Expr, top: Expr, base: Expr) -> Expr:
    """A part's sum relative to the largest value of all, where its own was `top`."""
    scale = build.op("exp", build.op("sub", top, base))
    same = build.op("eq", top, base)
    return build.op("mul", part, build.where(same, const(1.0, torch.float32), scale))
