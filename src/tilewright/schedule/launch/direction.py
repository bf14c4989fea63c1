"""Kernels of a card that run back, from their last block to the first.

A kernel leaves in cache what it touched last. The next one that reads the same finds it there, if
that is where it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright import rules
from tilewright.ir.program import Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.traffic import moved


def alternate(program: Program, groups: Sequence[Group], after: bool) -> list[Group]:
    """The groups, of which some run back: those that read what the one before them touched on its
    way forward. `after` says that arguments were just touched so, as by a forward pass. What
    touches little, as the rows that were left over by one, changes nothing of what is in cache."""
    before = {b for b in program.inputs if b in program.buffers} if after else set[str]()
    back = False
    filled = {b.name for b in program.buffers.values() if b.kind != "temporary"}
    found: list[Group] = []
    for group in groups:
        found.append(group)
        bytes_ = moved(program, group, filled)
        filled |= group.writes
        large = {
            b
            for b, size in bytes_.items()
            if size >= rules.REVERSED_BYTES.limit and _is_on_card(program, b)
        }
        if not large:
            continue
        back = not back and group.call is None and bool(before & large & group.reads)
        found[-1] = _run(group, back)
        before = large
    return found


def _run(group: Group, back: bool) -> Group:
    if not group.parts:
        return replace(group, back=back)
    return replace(group, parts=tuple(replace(part, back=back) for part in group.parts))


def _is_on_card(program: Program, name: str) -> bool:
    buffer = program.buffers.get(name)
    return buffer is not None and buffer.device.type == "cuda"
