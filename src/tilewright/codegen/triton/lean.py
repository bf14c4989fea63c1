"""Rows that begin anywhere in memory, walked from sixteen bytes to sixteen bytes.

Of a row of an odd length no thread can load neighbours at once: most rows begin between two places
of sixteen bytes. The lanes of an axis that leans begin at the last such place before its row.
Pieces of sixteen bytes that hold something of the row are loaded at once: they are memory as a
whole, and what is not of the row is not used. Those that are whole in the row are stored at once;
what is left of a result at the two ends of its row is stored by a tile of two pieces. Blocks that
hold an end of the row have a loop of their own: all others need no masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tilewright.codegen.triton.emit import Support
from tilewright.codegen.triton.shape import Axis
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars
from tilewright.ir.program import Nest
from tilewright.schedule.segments import Segment

if TYPE_CHECKING:
    from tilewright.codegen.triton.kernel import Kernel


class Lean:
    """The text of one kernel's axis that leans."""

    def __init__(self, kernel: Kernel, axis: Axis) -> None:
        assert axis.lean is not None
        self.kernel, self.w, self.axis = kernel, kernel.w, axis
        self.start = axis.lean
        self._stepping = True  # whether lanes follow each other in memory
        self._folding = False  # whether a block with an end of the row is folded
        self.w.ends[axis] = self.w.support(axis.lean)

    @classmethod
    def of(cls, kernel: Kernel) -> Lean | None:
        axis = next((a for a in kernel.shape.axes if a.lean is not None), None)
        return None if axis is None else cls(kernel, axis)

    def begin(self) -> None:
        """Where lanes begin, the row in them, and the whole pieces of that."""
        a, n = self.axis.name, self.axis.piece
        w = self.w
        w.line(f"{a}place = {w.spread(w.index(self.start), w.support(self.start), frozenset())}")
        w.line(f"{a}start = {a}place // {n} * {n}")
        w.line(f"{a}slide = {a}place - {a}start")
        w.line(f"{a}head = ({a}slide + {n - 1}) // {n} * {n}")
        w.line(f"{a}tail = ({a}slide + {a}numel) // {n} * {n}")
        if self.axis in self.kernel.shape.parallel:
            w.line(f"{a}lane = {a}base")
            w.line(f"{a}index = {a}lane - {a}slide")
            w.line(f"{a}mask = ({a}lane >= {a}head) & ({a}lane < {a}tail)")
            w.know(self.axis.var, f"{a}index")
        else:
            block = self.axis.block
            w.line(f"{a}over = ({a}slide + {a}numel + {n - 1}) // {n} * {n}")
            w.line(f"{a}full = {a}numel // {block}")
            w.line(f"{a}all = ({a}numel + {n - 1} + {block} - 1) // {block}")

    # ---- memory

    def steps(self, index: Expr) -> bool:
        """Whether pieces of this access are where the axis has pieces."""
        if ix.coefficient(index, self.axis.var) is not ix.ONE:
            return False
        apart = ix.sub(ix.sub(index, self.axis.var), self.start)
        return ix.mod(apart, self.axis.piece) is ix.ZERO and self.axis.var not in free_vars(apart)

    def place(self, index: Expr) -> str:
        """An index as text that shows what it is a multiple of; nothing where it is none."""
        if not self._stepping or not self.steps(index):
            return ""
        a = self.axis.name
        apart = ix.sub(ix.sub(index, self.axis.var), self.start)
        more = "" if apart is ix.ZERO else f" + {self.w.index(apart)}"
        return f"{a}start + {a}lane{more}"

    def pieces(self, support: Support, size: int) -> str:
        """The mask of a load of elements of a size in a block that holds an end of the row; empty:
        that of the row. A piece of more than sixteen bytes may not be memory as a whole."""
        if not self._folding or size * self.axis.piece > 16:
            return ""
        rest = self.w.mask(support - {self.axis})
        return f"{self.axis.name}some" + (f" & {rest}" if rest else "")

    # ---- loops

    def walk(self, segment: Segment, back: bool, round_: Callable[[], None]) -> None:
        """A loop over the blocks inside the row, and one over those with its ends."""
        w, a = self.w, self.axis.name
        folds = any(m.reduce for m in segment.members)
        self._tile([m for m in segment.members if not m.reduce])

        def inside() -> None:
            with w.block(f"for {a}offset in {self.kernel.loop(f'1, {a}full')}"):
                self._lanes(f"({a}full - {a}offset)" if back else f"{a}offset")
                w.masked.discard(self.axis)
                round_()
                w.masked.add(self.axis)

        def ends() -> None:
            with w.block(f"for {a}offset in range({a}full + 1 // ({a}full + 1), {a}all + 1)"):
                self._lanes(f"({a}offset % {a}all)")
                whole = f"({a}lane >= {a}head) & ({a}lane < {a}tail)"
                if folds:
                    w.line(f"{a}some = {a}lane < {a}over")
                    w.line(f"{a}mask = ({a}index >= 0) & ({a}index < {a}numel)")
                else:
                    w.line(f"{a}mask = {whole}")
                self._folding = folds
                round_()
                self._folding = False

        for loop in (ends, inside) if back else (inside, ends):
            loop()

    def _lanes(self, round_: str) -> None:
        a = self.axis.name
        self.w.line(f"{a}lane = {round_} * {self.axis.block} + {a}base")
        self.w.line(f"{a}index = {a}lane - {a}slide")
        self.w.know(self.axis.var, f"{a}index")

    # ---- the ends of rows

    def tile(self) -> None:
        """What the program with a row's first block stores at both its ends."""
        with self.w.block(f"if {self.axis.name}block == 0"):
            self._tile([m for s, _ in self.kernel.shape.segments for m in s.members])

    def _tile(self, members: list[Nest]) -> None:
        w, a, n = self.w, self.axis.name, self.axis.piece
        if all(m.writes <= self.kernel.local for m in members):
            return
        where = ", ".join(":" if d == self.axis.dim else "None" for d in range(w.rank))
        w.line(f"{a}two = tl.arange(0, {2 * n})[{where}]")
        w.line(f"{a}at = tl.where({a}two < {n}, {a}two, {a}tail - {a}slide + {a}two - {n})")
        w.line(f"{a}edge = (({a}two < {n}) == ({a}at < {a}head - {a}slide)) & ({a}at < {a}numel)")
        with w.apart():
            w.know(self.axis.var, f"{a}at")
            w.ends_of_rows[self.axis] = f"{2 * n}", f"{a}edge"
            self._stepping = False
            for m in members:
                self.kernel.stores([m])
            self._stepping = True
            del w.ends_of_rows[self.axis]


__all__ = ["Lean"]
