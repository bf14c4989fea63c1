"""Rows that are scanned by one warp, or two, with all of them in flight at once.

A row in one block of a power of two is scanned by many warps, which wait for each other, and
much of the block may be empty. Pieces of as much as its warps load at once are as many as the
row is long: all of them are loaded, and kept as they are in memory until they are scanned, one
after the other. Misaligned rows are loaded from the sixteen bytes on that their first element is
in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

from tilewright import rules
from tilewright.codegen.triton.analysis.accesses import sizes
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.codegen.triton.strategies.misaligned_rows import (
    begins_anywhere,
    has_computed_places,
    most_moved,
)
from tilewright.codegen.triton.strategies.scan import BlockScan, is_one_scan
from tilewright.codegen.triton.tile.lower import Load
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars


def preloaded_scan(facts: KernelFacts) -> Shape | str:
    """The shape with rows that are scanned so, where they are many, long and all alike (H200:
    cumulative sums of 7259 rows of 4959 bfloat16 38 us, 58 us in one block; of 10603 of 3395 38 us,
    39 us; of 3000 of 12000 43 us, 61 us; of 2571 of 14001 46 us, 60 us walked; but of 17569 of 2049
    38 us, 37 us; of 4394 of 8192 39 us, 37 us. Of 3629 of 4959 floats 44 us, 80 us; of 5998 of 3001
    38 us, 41 us; of 11992 of 1501 37 us either way)."""
    program, group, shape = facts.program, facts.group, facts.shape
    if not facts.shape.scans:
        return "nothing is scanned"
    if not is_one_scan(shape):
        return "there is more or less than one scan along rows"
    if shape.across:
        return "memory runs across what is scanned: these are columns"
    wide = {*sizes(program, shape)}
    if wide not in ({2}, {4}):
        return "not all that is moved has two bytes, or four"
    ((segment, axis),), flat = shape.segments, facts.flat
    assert axis is not None
    read = {n for n in flat.loads if axis.var in free_vars(n)}
    if not axis.size:
        return "the length of rows is known only at the call"
    if has_computed_places(shape):
        return "each element has a place of its own to compute in some operand"
    if facts.scatters:
        return facts.scatters
    start, piece = most_moved(program, group, flat, axis)
    start = start if begins_anywhere(start, piece, axis) else ix.ZERO
    new = replace(axis, start=start, vector=piece)
    most = rules.PRELOADED_WARPS.limit
    chunk = 32 * piece * rules.PRELOADED_CHUNKS.limit  # elements for which a warp has registers
    lanes = (axis.size + new.slack) * len(read)
    warps = next((w for w in range(1, most + 1) if lanes <= chunk * w), 0)
    misaligned = rules.PRELOADED_MISALIGNED.limit // max(wide)
    shortest = misaligned if new.slack else rules.PRELOADED_ALIGNED.limit
    if not warps:
        return f"rows do not fit in the registers of {most} warps"
    if axis.size <= shortest:
        return f"rows have at most {shortest} elements: more warps hold them"
    if facts.rows < rules.PRELOADED_PER_SM.limit * facts.target.sms:
        return f"fewer than {rules.PRELOADED_PER_SM.limit} rows for each SM"
    return replace(shape, prefetched_scan=True, preloaded=32 * warps * piece, persistent=False,
                   segments=((segment, new),))  # fmt: skip


class PreloadedScan(BlockScan):
    """The text of one kernel's rows that are scanned so."""

    def begin(self) -> None:
        self.place_row()

    def walk(self, back: bool, round_: Callable[[], None]) -> None:
        lanes, block = (self.axis.size or 0) + self.axis.slack, self.kernel.shape.preloaded
        kept: list[dict[Expr, str]] = [{} for _ in range(0, lanes, block)]
        for k, known in enumerate(kept):
            with self._piece(k, known):
                for node in self._loads():
                    self.w.operand(node)
        for k, known in sorted(enumerate(kept), reverse=back):
            with self._piece(k, known):
                round_()

    @contextmanager
    def _piece(self, k: int, kept: dict[Expr, str]) -> Generator[None]:
        """In the tile of a piece. Most of them are inside all rows."""
        w, a, block = self.w, self.axis.name, self.kernel.shape.preloaded
        whole = (k > 0 or self.whole) and (k + 1) * block <= (self.axis.size or 0)
        everywhere, w.masked = w.masked, w.masked - {self.axis}
        if not whole:
            w.masked = w.masked | {self.axis}
        with w.elsewhere(frozenset((self.axis,)), kept):
            w.line(f"{a}lane = {k * block} + {a}base")
            place = f"{a}lane" if self.whole else f"({a}lane - {a}slide)"
            w.know(self.axis.var, place)
            if not whole:
                before = "" if self.whole or k else f"({place} >= 0) & "
                w.line(f"{a}mask = {before}({place} < {a}numel)")
            yield
        w.masked = everywhere

    def load(self, place: str, index: Expr) -> str | Load:
        """Some bytes before and behind a row too, which nobody looks at."""
        a, n = self.axis.name, self.axis.vector
        if not self.moves_at_once(index):
            return Load(place, f"{a}mask")
        some = f"{a}lane // {n} * {n} < {a}slide + {a}numel"
        return self.w.let(f"tl.load({place}, {some}, other=0)")

    def store(self, place: str, value: str, index: Expr) -> None:
        """What is whole of a piece at once, the ends of the row beside."""
        w, a, n = self.w, self.axis.name, self.axis.vector
        if not self.moves_at_once(index):
            w.line(f"tl.store({place}, {value}, {a}mask)")
            return
        at = w.let(f"{a}lane // {n} * {n}")
        w.line(f"{a}whole = ({at} >= {a}slide) & ({at} + {n} <= {a}slide + {a}numel)")
        w.line(f"tl.store({place}, {value}, {a}whole)")
        w.line(f"tl.store({place}, {value}, {a}mask & ({a}whole == 0))")
