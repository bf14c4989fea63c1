"""Kernels that begin at the end of what they read: there the one before them left off, and that is
still in a card's cache (H200: batch norm of 64x256x56x56 bfloat16 with channels last 78 us, 82 us
from the beginning on)."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir import index as ix
from tilewright.ir.program import Program
from tilewright.schedule.access import all_loops
from tilewright.schedule.group import Group
from tilewright.schedule.legality import accesses, is_alone
from tilewright.schedule.sizes import hint, hint_product
from tilewright.target import Target

MANY = 1024  # programs of a kernel that begin in the order of what they walk, a few at a time


def turn_around(program: Program, groups: Sequence[Group]) -> None:
    """Say of groups in their final order which are to run back."""
    before: dict[str, bool] = {}  # what was walked in order last, and whether back
    for group in groups:
        if not group.members or group.parts:
            before = {}
        elif large := _large(program, group):
            group.back = _only_walks(group) and any(not before.get(b, True) for b in large)
            before = {b: group.back for b in large if _in_order(group, b)}


def _large(program: Program, group: Group) -> set[str]:
    """What a kernel walks of which a cache has no more than a part. Without any it is over soon,
    and leaves there what was there."""
    target = Target.of(program.buffers[min(group.writes)].device)
    return {b for b in (group.reads | group.writes) - group.local if target.is_gpu
            and 2 * hint_product(program.buffers[b].size)
            * program.buffers[b].dtype.itemsize > target.l2}  # fmt: skip


def _only_walks(group: Group) -> bool:
    return not group.serial and not any(m.reduce or is_alone(m) for m in group.members)


def _in_order(group: Group, buffer: str) -> bool:
    """Whether what a kernel touched last of a buffer is its end: it has many programs, or folds
    over the rows of all of it."""
    if _only_walks(group) or hint_product(v.src[0] for v in group.outer) >= MANY:
        return True
    nest = next(m for m in group.members if buffer in m.reads | m.writes)
    index = next(accesses(nest, buffer))
    steps = {v: abs(hint(ix.coefficient(index, v) or ix.ZERO)) for v in all_loops(nest)}
    return max(steps, key=lambda v: steps[v]) in nest.reduce
