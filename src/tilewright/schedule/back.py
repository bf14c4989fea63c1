"""Kernels of a card that run back, from their last block to the first.

A kernel leaves in cache what it touched last. The next one that reads the same finds it there, if
that is where it begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.program import Program
from tilewright.schedule.group import Group
from tilewright.schedule.sizes import hint_product

LARGE = 8 << 20  # bytes of a buffer: others stay in cache whichever way they are read


def alternate(program: Program, groups: Sequence[Group], after: bool) -> None:
    """Mark groups that run back: those that read what the one before them touched on its way
    forward. `after` says that arguments were just touched so, as by a forward pass."""
    before = {b for b in program.inputs if b in program.buffers} if after else set[str]()
    back = False
    for group in groups:
        large = {b for b in (group.reads | group.writes) - group.local
                 if _is_large(program, b)}  # fmt: skip
        if not large:
            continue
        back = not back and group.call is None and bool(before & large & group.reads)
        for part in group.kernels:
            part.back = back
        before = large


def _is_large(program: Program, name: str) -> bool:
    buffer = program.buffers.get(name)
    if buffer is None or buffer.device.type != "cuda":
        return False
    return hint_product(buffer.size) * buffer.dtype.itemsize >= LARGE
