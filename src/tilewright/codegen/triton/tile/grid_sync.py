"""The text of a row's programs that exchange their partial results.

Each leaves what its part reduces to. Where rows are read again, all wait for each other and take
all parts. Where a row is reduced once, none waits: the last to leave its part goes on alone, with
what is computed of the row as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilewright.codegen.triton.plan.config import power
from tilewright.codegen.triton.tile.reduce import Reduction

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel

WORKSPACE, COUNTERS = "workspace", "counters"


@dataclass
class Exchange:
    """What the programs of a row have exchanged so far."""

    cells: int = 0  # of each program
    meetings: int = 0
    left: bool = False  # whether one has told the others that it has all it needs
    waiting: list[str] = field(default_factory=list[str])  # stores that are the last one's


def meet(kernel: Kernel, found: Sequence[Reduction]) -> None:
    """Each program leaves what became of its part of a row; those that go on take all parts."""
    w, count = kernel.w, kernel.shape.row_programs
    cells: list[tuple[Reduction, list[tuple[str, str]]]] = []
    for fold in found:
        made: list[tuple[str, str]] = []
        for name, (kind, none) in zip(fold.left_of_row(), fold.cells, strict=True):
            cell = w.let(f"({kernel.exchange.cells} * xnumel + spot) * {count}")
            kernel.exchange.cells += 1
            w.line(f"tri.leave({WORKSPACE}, {cell} + part, {name})")
            made.append((cell, f"{kind}, {none}"))
        cells.append((fold, made))
    kernel.exchange.meetings += 1
    if kernel.last_finishes:
        w.line("tl.debug_barrier()")
        with w.block(f"if tri.part({COUNTERS} + spot, {count}) == 0"):
            w.line("return")
    else:
        w.line(f"tri.meet({COUNTERS} + spot, {count * kernel.exchange.meetings})")
    for fold, made in cells:
        tiles = [w.let(f"tri.gather({WORKSPACE}, {cell}, {kind}, {count}, {power(count)})")
                 for cell, kind in made]  # fmt: skip
        fold.taken(names := fold.gathered(tiles))
        if fold.pieces is not None and fold is found[-1]:
            fold.pieces.renew(names[0])


def leave(kernel: Kernel) -> None:
    """Once a program has read what it needs. The last one of a row does what none may do while
    others read what was there."""
    if kernel.exchange.left or kernel.last_finishes:
        return
    w, until = kernel.w, kernel.shape.row_programs * (kernel.exchange.meetings + 1)
    kernel.exchange.left = True
    made = kernel.shape.written
    if made & kernel.rewritten:
        w.line("tl.debug_barrier()")
        w.line(f"last = tri.part({COUNTERS} + spot, {until})")
    else:
        w.line(f"tri.gone({COUNTERS} + spot, {until})")


def end(kernel: Kernel) -> None:
    """What was left for the last program of a row."""
    leave(kernel)
    waiting = kernel.exchange.waiting
    with nullcontext() if kernel.last_finishes or not waiting else kernel.w.block("if last"):
        for line in waiting:
            kernel.w.line(line)
