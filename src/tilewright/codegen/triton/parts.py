"""Rows that several programs have parts of.

Each leaves what its part folds to. Where rows are walked again, all wait for each other and take
all parts. Where a row is folded once, none waits: the last to leave its part goes on alone, with
what is computed of the row as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright.codegen.triton.analysis.kernel_facts import KernelFacts
from tilewright.codegen.triton.blocks import power
from tilewright.codegen.triton.folds import Fold
from tilewright.codegen.triton.shape import Shape, cannot_share

if TYPE_CHECKING:
    from tilewright.codegen.triton.kernel import Kernel

WORKSPACE, COUNTERS = "workspace", "counters"
SHORTEST = 1 << 13  # elements of a part worth a program
TOGETHER = 9  # programs of four warps that a processor surely runs at once


def in_parts(facts: KernelFacts) -> Shape | str:
    """The shape with rows in parts, where they are folded once and too few for processors to have
    equally much to do: as many parts as all run at once (H200: smoothed losses of 151 rows of
    100277 floats 20.4 us by seven, 23.6 us by eight, of which some wait, 24.3 us by one; losses of
    290 rows of 128256 bfloat16 24.1 us by four, 27.2 us by eight, 25.9 us by one). What only adds
    up is read as fast by one program for each row, and what leaves its folds as they are is a part
    already (softmax of a row of 2**26 107 us, 110 us in parts of parts)."""
    shape = facts.shape
    if reason := facts.not_rows or facts.not_plain or facts.draws:
        return reason
    if shape.again:
        return "rows are read again after a reduction"
    if shape.shared and not shape.in_turn:
        return "all programs of a row run at once already"
    if shape.persistent:
        return "rows fit in registers"
    (x,), (r,) = shape.parallel, shape.inner
    if not x.size or not r.size:
        return "sizes are known only at the call"
    if "welford" in facts.reductions or "exp" not in facts.ops:
        return "it only adds up: one program for each row is as fast"
    if all(axis is r for _, axis in shape.segments):
        return "it leaves its reductions as they are: it is a part already"
    count = min(TOGETHER * facts.target.sms // x.size, r.size // SHORTEST)
    if count < 2:
        return "there are enough rows for all SMs, or rows are too short for parts"
    new = replace(shape, shared=count, in_turn=True, ahead=False)
    return cannot_share(new) or new


def meet(kernel: Kernel, found: Sequence[Fold]) -> None:
    """Each program leaves what became of its part of a row; those that go on take all parts."""
    w, count = kernel.w, kernel.shape.shared
    cells: list[tuple[Fold, list[tuple[str, str]]]] = []
    for fold in found:
        made: list[tuple[str, str]] = []
        for name, (kind, none) in zip(fold.left_of_row(), fold.cells, strict=True):
            cell = w.let(f"({kernel.cells} * xnumel + spot) * {count}")
            kernel.cells += 1
            w.line(f"tri.leave({WORKSPACE}, {cell} + part, {name})")
            made.append((cell, f"{kind}, {none}"))
        cells.append((fold, made))
    kernel.meetings += 1
    if kernel.alone:
        w.line("tl.debug_barrier()")
        with w.block(f"if tri.part({COUNTERS} + spot, {count}) == 0"):
            w.line("return")
    else:
        w.line(f"tri.meet({COUNTERS} + spot, {count * kernel.meetings})")
    for fold, made in cells:
        tiles = [w.let(f"tri.gather({WORKSPACE}, {cell}, {kind}, {count}, {power(count)})")
                 for cell, kind in made]  # fmt: skip
        fold.taken(names := fold.gathered(tiles))
        if fold.pieces is not None and fold is found[-1]:
            fold.pieces.renew(names[0])


def leave(kernel: Kernel) -> None:
    """Once a program has read what it needs. The last one of a row does what none may do while
    others read what was there."""
    if kernel.left or kernel.alone:
        return
    w, until = kernel.w, kernel.shape.shared * (kernel.meetings + 1)
    kernel.left = True
    made = frozenset[str]().union(*(m.writes for m in kernel.shape.members))
    if made & kernel.rewritten:
        w.line("tl.debug_barrier()")
        w.line(f"last = tri.part({COUNTERS} + spot, {until})")
    else:
        w.line(f"tri.gone({COUNTERS} + spot, {until})")


def end(kernel: Kernel) -> None:
    """What was left for the last program of a row."""
    leave(kernel)
    with nullcontext() if kernel.alone or not kernel.waiting else kernel.w.block("if last"):
        for line in kernel.waiting:
            kernel.w.line(line)
