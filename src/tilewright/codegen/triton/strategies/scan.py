"""Long rows that are scanned, and columns of which there are few, block by block: what the next
block needs is loaded before the one at hand is computed (H200: cumulative sums of 377 rows of 87913
floats 76 us, 245 us without; of 1024 rows of 34132 bfloat16 in rows of 1219 60 us, 71 us).

Misaligned rows in memory are moved sixteen bytes at once: their blocks begin where pieces of so
many bytes do, the first one before its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright import rules
from tilewright.codegen.triton.analysis.accesses import sizes
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.analysis.operations import sorts
from tilewright.codegen.triton.plan.column_configs import at_once, carried, rows_of_thread
from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.codegen.triton.strategies.misaligned_rows import begins_anywhere, most_moved
from tilewright.codegen.triton.strategies.misaligned_scans import misaligned_scans
from tilewright.codegen.triton.tile.lower import RANDOM, Load
from tilewright.codegen.triton.tile.peeled import Peeled
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads
from tilewright.ir.program import Nest, Program
from tilewright.target import Target

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.reduce import Scan


def block_scan(facts: KernelFacts) -> Shape | str:
    """The shape with rows or columns that are walked so, where they are scanned and not held."""
    program, group, shape, target = facts.program, facts.group, facts.shape, facts.target
    if not facts.shape.scans:
        return "nothing is scanned"
    if not is_one_scan(shape):
        return "there is more than one scan along rows or columns"
    ((segment, axis),) = shape.segments
    assert axis is not None
    if shape.across:
        whole = misaligned_scans(facts)
        moved = isinstance(whole, Shape) and not shape.reverse_scan
        return whole if moved else _columns(program, shape, target)
    if shape.reverse_scan:
        return "rows are scanned from their last element to the first"
    if 2 * axis.likely <= rules.REREAD_ROW.limit and (
        axis.start is None or axis.likely <= rules.ONE_BLOCK_ROW.limit
    ):
        return "rows fit in registers"
    start, piece = most_moved(program, group, shape.flat(), axis)
    if not begins_anywhere(start, piece, axis):
        start = ix.ZERO
    axis = replace(axis, start=start, vector=piece)
    count = _programs(shape, axis, target)
    return replace(shape, prefetched_scan=True, persistent=False, segments=((segment, axis),),
                   row_programs=count, ticketed=count > 0)  # fmt: skip


def is_one_scan(shape: Shape) -> bool:
    """Whether there is nothing but rows or columns that are scanned, other than put in order."""
    if len(shape.segments) != 1 or shape.ragged or shape.serial or not shape.ops.isdisjoint(RANDOM):
        return False
    ((segment, axis),) = shape.segments
    return axis is not None and segment.scans and not sorts(shape.members)


def _columns(program: Program, shape: Shape, target: Target) -> Shape | str:
    """Each column by one thread, if these are many. Not floats in misaligned rows (H200:
    cumulative sums of 128 rows of 4425x127 floats 249 us, 204 us if threads share columns)."""
    ((segment, axis),) = shape.segments
    assert axis is not None
    columns, neighbours = shape.parallel[0].likely, at_once(program, shape)
    if neighbours > 8 or (neighbours == 1 and carried(shape) > 4):
        return "one thread of a column would load too little at once"
    moved = columns * rows_of_thread(shape, neighbours) * max(sizes(program, shape))
    if moved < rules.SCAN_BYTES_PER_SM.limit * target.sms:
        return "one thread for each column would not keep memory busy"
    walked = (
        neighbours == 1
        and columns <= rules.SCAN_COLUMNS_PER_SM.limit * target.sms
        and not shape.reverse_scan
    )
    if walked:
        axis = replace(axis, start=ix.ZERO, vector=1)
    return replace(shape, column_threads=True, prefetched_scan=walked, persistent=False,
                   pipelined=False, segments=((segment, axis),))  # fmt: skip


def _programs(shape: Shape, axis: Axis, target: Target) -> int:
    """How many walk a row together where rows are too few, all of them at once: each reduces its
    part and then walks it again, from what those before it have reduced. None: a row has one."""
    rows = shape.parallel[0].size
    if not rows:
        return 0
    count = min(
        rules.SCAN_PROGRAMS.limit * target.sms // rows, axis.likely // rules.SCAN_PART.limit
    )
    return count if count > 1 else 0


class BlockScan(Peeled):
    """The text of one kernel's rows that are walked."""

    def place_row(self) -> None:
        w, a, n = self.w, self.axis.name, self.axis.vector
        if not self.whole:
            w.line(
                f"{a}place = {w.spread(w.index(self.start), w.support(self.start), frozenset())}"
            )
            w.line(f"{a}start = {a}place // {n} * {n}")
            w.line(f"{a}slide = {a}place - {a}start")
        if not self.kernel.shape.across:
            w.masked.discard(self.kernel.shape.parallel[0])  # a program has one row

    def begin(self) -> None:
        """Where rows begin."""
        self.place_row()
        w, a = self.w, self.axis.name
        lanes = f"{a}numel + {self.axis.slack}" if self.axis.slack else f"{a}numel"
        count, block = self.kernel.shape.row_programs, self.axis.block
        if not count:
            w.line(f"{a}first, {a}last = 0, {lanes}")
            return
        w.line(f"{a}each = ({lanes} + {count} * {block} - 1) // ({count} * {block}) * {block}")
        w.line(f"{a}first = part * {a}each")
        w.line(f"{a}last = tl.minimum({a}first + {a}each, {lanes})")

    def walk(self, back: bool, round_: Callable[[], None]) -> None:
        w, a, block = self.w, self.axis.name, self.axis.block
        ahead = {n: w.fresh("next") for n in self._loads()}
        self._fetch_block(f"{a}first", ahead)
        with w.block(f"for {a}offset in range({a}first, {a}last, {block})"):
            for node, name in ahead.items():
                w.know_blank(node, w.let(name))
            self._fetch_block(f"{a}offset + {block}", ahead)
            self._enter_block(f"{a}offset")
            round_()

    def meet(self, scan: Scan) -> None:
        """What the programs with a row's parts before this one reduction to is what it begins
        with."""
        w, k, count = self.w, self.kernel, self.kernel.shape.row_programs
        totals = scan.folded(lambda round_: self.walk(False, round_))
        cells: list[str] = []
        for name in totals:
            cells.append(w.let(f"({k.exchange.cells} * xnumel + spot) * {count}"))
            k.exchange.cells += 1
            w.line(f"tri.leave(workspace, {cells[-1]} + part, {name})")
        k.exchange.meetings += 1
        w.line(f"tri.meet(counters + spot, {count * k.exchange.meetings})")
        lanes = 1 << (count - 1).bit_length()
        tiles = [w.let(f"tri.gather(workspace, {cell}, {kind}, {none}, part, {lanes})")
                 for cell, (kind, none) in zip(cells, scan.kinds, strict=True)]  # fmt: skip
        scan.after(tiles)

    def _loads(self) -> list[Expr]:
        """What changes along a row, and needs nothing else to be loaded."""
        members = self.kernel.shape.members
        made = frozenset[str]().union(*(m.writes for m in members))
        found = dict.fromkeys(n for m in members for n in loads(*m.exprs))
        return [n for n in found if self.axis.var in free_vars(n.src[0]) and n.arg not in made
                and not n.src[1:] and not loads(n.src[0])]  # fmt: skip

    def _fetch_block(self, first: str, ahead: dict[Expr, str]) -> None:
        with self.w.elsewhere(frozenset({self.axis}), {}):
            self._enter_block(first)
            for node, name in ahead.items():
                self.w.line(f"{name} = {self.kernel.load(node)}")

    def _enter_block(self, first: str) -> None:
        """The points of a block, and whether all of them are inside the row."""
        w, a, block = self.w, self.axis.name, self.axis.block
        if self.kernel.shape.across:
            longest = max(c.kwargs[block] for c in self.kernel.configs)
            w.blocks.rounds[self.axis] = f"({first})", longest
        w.line(f"{a}lane = {first} + {a}base")
        if self.whole:
            w.know(self.axis.var, f"{a}lane")
            w.line(f"{a}mask = {a}lane < {a}numel")
            w.line(f"{a}whole = {first} + {block} <= {a}numel")
            return
        index = w.let(f"{a}lane - {a}slide")
        w.know(self.axis.var, index)
        w.line(f"{a}mask = ({index} >= 0) & ({index} < {a}numel)")
        w.line(f"{a}whole = {first} > 0 and {first} + {block} <= {a}numel")

    def slides(self, node: Expr) -> bool:
        return False  # what a block needs is loaded before it is entered

    def store_ends(self, members: Sequence[Nest]) -> None:
        """Blocks at the ends of rows store what is inside."""

    # ---- memory: without a mask where a block is whole, for then threads move sixteen bytes

    def may_be_whole(self, mask: str) -> bool:
        return mask == f"{self.axis.name}mask"

    def load(self, place: str, index: Expr) -> str | Load:
        w, a, name = self.w, self.axis.name, self.w.fresh()
        with w.block(f"if {a}whole"):
            w.line(f"{name} = tl.load({place})")
        with w.block("else"):
            w.line(f"{name} = tl.load({place}, {a}mask, other=0)")
        return name

    def store(self, place: str, value: str, index: Expr) -> None:
        w, a = self.w, self.axis.name
        with w.block(f"if {a}whole"):
            w.line(f"tl.store({place}, {value})")
        with w.block("else"):
            w.line(f"tl.store({place}, {value}, {a}mask)")
