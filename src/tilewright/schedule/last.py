"""Small folds that the last program of the kernel before them does.

What became of rows, or of chunks, is often folded once more to one number: a loss, a norm. As a
kernel of its own that takes a few microseconds, most of them to be started. Done by the program
that is the last to leave its part, it takes one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir import index as ix
from tilewright.ir.program import Program
from tilewright.schedule.group import Group
from tilewright.schedule.legality import is_alone
from tilewright.schedule.sizes import hint_product
from tilewright.target import Target

MOST = 2048  # numbers that are folded: few enough for the registers that the kernel has anyway
LONGEST = 8  # programs for each processor that have one result each: each of them waits to be told
# whether it is the last, which many short ones would do for longer than a kernel takes


def with_last(program: Program, groups: Sequence[Group]) -> list[Group]:
    """The groups, with such folds in one launch with the group before them."""
    found: list[Group] = []
    for group in groups:
        if found and _is_last(program, found[-1], group):
            both = (found[-1], group)
            found[-1] = Group(parts=both, local=found[-1].local | group.local, last=True)
        else:
            found.append(group)
    return found


def _is_last(program: Program, first: Group, group: Group) -> bool:
    if not first.members or not group.members or group.serial or group.shared:
        return False
    devices = {program.buffers[b].device for b in first.writes | group.writes}
    if len(devices) > 1 or next(iter(devices)).type != "cuda" or not first.writes & group.reads:
        return False
    if any(m.loops or is_alone(m) for m in group.members):
        return False
    sizes = [ix.value_of(ix.product(v.src[0] for v in m.reduce)) for m in group.members]
    if any(n is None or n > MOST for n in sizes) or not any(m.reduce for m in group.members):
        return False
    target = Target.of(next(iter(devices)))
    return hint_product(v.src[0] for v in first.outer) <= LONGEST * target.sms
