"""Pools: buffers that live at the same time, carved out of one allocation.

A pool is a row of slots. A buffer takes the slot of one that is dead, if it fits for certain, or
a new one behind the others; so the size of a pool is a sum over slots, symbolic where sizes are.
Buffers whose sizes become known only while the program runs have pools of their own, allocated
after that. What the program returns is never in a pool: it would keep all of it alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, syms
from tilewright.ir.program import Buffer, Program
from tilewright.schedule.memory import Pool, Slot, Step

ALIGNMENT = 64  # bytes


@dataclass
class _Row:
    """The slots of a pool: their sizes, and the step after which each is free."""

    pool: str
    device: torch.device
    first: int  # the step that allocates it
    sizes: list[Expr] = field(default_factory=list[Expr])
    until: list[int] = field(default_factory=list[int])
    taken: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])

    def take(self, buffer: str, size: Expr, start: int, end: int) -> None:
        free = [k for k, until in enumerate(self.until)
                if until < start and _holds(self.sizes[k], size)]  # fmt: skip
        k = min(free, key=lambda k: ix.likely(self.sizes[k]), default=len(self.sizes))
        if k == len(self.sizes):
            self.sizes.append(size)
            self.until.append(end)
        self.until[k] = end
        self.taken.append((buffer, k, start))

    def starts(self) -> list[Expr]:
        found: list[Expr] = [ix.ZERO]
        for size in self.sizes:
            found.append(ix.add(found[-1], size))
        return found


def pooled(program: Program, steps: Sequence[Step]) -> None:
    """Replace allocations by slots of pools."""
    ends = _ends(program, steps)
    known = _known(steps)
    rows: dict[tuple[torch.device, int], _Row] = {}
    for k, step in enumerate(steps):
        for b in list(step.allocate):
            buffer = program.buffers[b]
            if b not in ends or not buffer.is_dense:
                continue
            names = [name for s in syms(buffer.numel) for name in program.behind(s.arg.name)]
            when = max((known.get(name, -1) for name in names), default=-1)
            key = (buffer.device, when)
            row = rows.setdefault(key, _Row(f"pool{len(rows)}", buffer.device, k))
            row.take(b, _aligned(buffer), k, ends[b])
            step.allocate.remove(b)
    for row in rows.values():
        starts = row.starts()
        steps[row.first].pools.append(Pool(row.pool, row.device, starts[-1]))
        for b, slot, step in row.taken:
            steps[step].carve.append(Slot(b, row.pool, starts[slot]))


def _ends(program: Program, steps: Sequence[Step]) -> dict[str, int]:
    """For what is allocated and dies: the step after which its memory, however called, is free."""
    visible = program.visible
    root: dict[str, str] = {}
    ends: dict[str, int] = {}
    for k, step in enumerate(steps):
        root.update({b: b for b in step.allocate})
        root.update({new: root[old] for new, old in step.reuse if old in root})
        ends.update({root[b]: k for b in step.free if b in root})
    return {b: k for b, k in ends.items() if b not in {root.get(v) for v in visible}}


def _known(steps: Sequence[Step]) -> dict[str, int]:
    """Symbols that a call makes known -> its step."""
    return {name: k for k, step in enumerate(steps) if step.group.call is not None
            for name, _ in step.group.call.binds}  # fmt: skip


def _aligned(buffer: Buffer) -> Expr:
    return ix.mul(ix.floordiv(ix.add(buffer.bytes, ALIGNMENT - 1), ALIGNMENT), ALIGNMENT)


def _holds(slot: Expr, size: Expr) -> bool:
    return slot is size or ix.known_nonneg(ix.sub(slot, size))
