"""Misaligned rows in memory, moved sixteen bytes at once.

Of a row of an odd length no thread can load neighbours at once: most rows begin between two places
of sixteen bytes. The lanes of an axis that leans begin at such a place, and pieces of sixteen bytes
that are whole in the row are loaded and stored at once. What is left at the two ends of a row is a
tile of two pieces, which is reduced and stored beside: its values stay while the row is walked.

Other rows may be walked beside, that begin elsewhere, as a layer's weights. Two of their pieces
have what belongs to one of the axis (`tri_rows.slid`); the last piece of a row is part of its end
then, for it takes one beyond it.

A tensor that is one row begins with a piece, and may end within one: there a mask would be needed
for every element. Its whole pieces have one for each piece, and its end is a tile of one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from tilewright import rules
from tilewright.codegen.triton.analysis.operations import is_gathered
from tilewright.codegen.triton.plan.tiling import Axis
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, walk
from tilewright.ir.program import Nest
from tilewright.target import PIECE

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel


class Peeled:
    """The text of one kernel's axis that leans."""

    def __init__(self, kernel: Kernel, axis: Axis) -> None:
        assert axis.start is not None
        self.kernel, self.w, self.axis = kernel, kernel.w, axis
        self.start = axis.start
        self.whole = axis.slack == 0  # one row that begins with a piece
        exprs = [e for m in kernel.shape.members for e in m.exprs]
        self.slid_rows = any(self.slides(n) and n.dtype.itemsize > 1 for n in loads(*exprs))
        self._lanes_of_ends = (
            axis.vector if self.whole else (4 if self.slid_rows else 2) * axis.vector
        )
        self.most_left = (3 if self.slid_rows else 2) * axis.vector  # of a row beside whole pieces
        self.at_ends = False
        self.kept: dict[Expr, str] = {}  # what is known at the ends of rows
        self.w.ends[axis] = self.w.support(axis.start)

    def begin(self) -> None:
        """Where lanes begin, the whole pieces of the row in them, and its ends."""
        a, n, block = self.axis.name, self.axis.vector, self.axis.block
        w = self.w
        if self.whole:
            w.line(f"{a}tail = {a}numel // {n} * {n}")
            w.line(f"{a}mask = {a}base < {a}tail")
            w.know(self.axis.var, f"{a}base")
            return
        if self.kernel.shape.planes_each > 1:
            return
        self.place_row()
        if self.axis in self.kernel.shape.parallel:
            w.line(f"{a}lane = {a}base")
            self._enter(f"({a}lane >= {a}head) & ({a}lane < {a}tail)")
            return
        self.edges()
        self.fetch(self.ends)
        if self.kernel.shape.chunk:
            return
        if self.kernel.shape.persistent:
            w.line(f"{a}lane = {a}head + {a}base")
            self._enter(f"{a}lane < {a}tail")
        else:
            less = 2 * n - 1 if self.slid_rows else n - 1
            w.line(f"{a}full = tl.maximum({a}numel - {less}, 0) // {n} * {n} // {block}")
            w.line(f"{a}all = ({a}numel // {n} * {n} + {block} - 1) // {block}")

    def place_row(self) -> None:
        w, a, n = self.w, self.axis.name, self.axis.vector
        w.line(f"{a}place = {w.spread(w.index(self.start), w.support(self.start), frozenset())}")
        w.line(f"{a}start = {a}place // {n} * {n}")
        w.line(f"{a}slide = {a}place - {a}start")
        w.line(f"{a}head = ({a}slide + {n - 1}) // {n} * {n}")
        last = f" - {n}" if self.slid_rows else ""
        w.line(f"{a}tail = ({a}slide + {a}numel) // {n} * {n}{last}")

    def _enter(self, mask: str) -> None:
        a = self.axis.name
        self.w.line(f"{a}index = {a}lane - {a}slide")
        if mask:
            self.w.line(f"{a}mask = {mask}")
        self.w.know(self.axis.var, f"{a}index")

    # ---- memory

    def steps(self, index: Expr) -> bool:
        """Whether pieces of this access are where the axis has pieces."""
        if ix.coefficient(index, self.axis.var) is not ix.ONE:
            return False
        apart = ix.sub(ix.sub(index, self.axis.var), self.start)
        return ix.mod(apart, self.axis.vector) is ix.ZERO and self.axis.var not in free_vars(apart)

    def moves_at_once(self, index: Expr) -> bool:
        """Whether an access is one of whole pieces."""
        return not (self.whole or self.at_ends) and self.steps(index)

    def place(self, index: Expr) -> str:
        """An index as text that shows what it is a multiple of; nothing where it is none."""
        if not self.moves_at_once(index):
            return ""
        a = self.axis.name
        apart = ix.sub(ix.sub(index, self.axis.var), self.start)
        more = "" if apart is ix.ZERO else f" + {self.w.index(apart)}"
        return f"{a}start + {a}lane{more}"

    def slides(self, node: Expr) -> bool:
        """Whether a load walks rows that begin elsewhere, of which whole pieces are loaded
        (H200: layer norm of 11003 bfloat16 88 us, 96 us with single weights). Beside rows that
        are held only bytes: for others there are no registers left (softmax of 3365 with a mask
        110 us, 120 us by single bytes). Where nothing is reduced, rows that are gathered (29843
        of 889 float16 29 us, 34 us by single elements; but 75000 of 301 32 us, 31 us)."""
        (index, *masks), var, shape = node.src, self.axis.var, self.kernel.shape
        if self.whole or masks or self.axis.vector != PIECE or self.steps(index):
            return False
        single = node.dtype.itemsize == 1
        if shape.family == "poi":
            allowed = is_gathered(index) and not single
        else:
            allowed = bool(shape.inner) and (single or not shape.persistent or bool(shape.chunk))
        if not allowed:
            return False
        if node.dtype.itemsize > rules.PEELED_BYTES.limit or node.arg in self.kernel.local:
            return False
        return ix.coefficient(index, var) is ix.ONE and var not in free_vars(ix.sub(index, var))

    def slid(self, node: Expr, pointer: str, mask: str) -> str:
        """Such a load; nothing where it is none."""
        if self.at_ends or not self.slides(node):
            return ""
        w, a = self.w, self.axis.name
        rest = ix.sub(node.src[0], self.axis.var)
        start = f"-{a}slide" if rest is ix.ZERO else f"{w.index(rest)} - {a}slide"
        shape = w.shape(w.covered(w.support(node.src[0]))).strip("[]")
        how = "slid_words" if node.dtype.itemsize == 1 else "slid"
        return f"tri_rows.{how}({pointer}, {start}, {a}lane, {mask or None}, {shape})"

    def alike(self, node: Expr) -> str:
        """The load of a row that is the same for all programs; nothing where it is as any other."""
        return ""

    # ---- loops

    def walk(self, back: bool, round_: Callable[[], None]) -> None:
        """A loop over the blocks of whole pieces, and one over what may be beyond these."""
        w, a, count = self.w, self.axis.name, self.kernel.shape.row_programs

        def own(first: str, end: str) -> str:
            """Those of this program's part of the row: every so many-th."""
            if not count:
                return f"{first}, {end}"
            return f"{first} + (part + {count} - {first} % {count}) % {count}, {end}, {count}"

        def inside() -> None:
            fetch = self.kernel.prefetch
            if fetch is not None and back:
                fetch.begin_back()
            with w.block(f"for {a}offset in {self.kernel.loop(own('0', f'{a}full'))}"):
                if fetch is not None:
                    fetch.enter(back)
                self.lanes(f"({a}full - 1 - {a}offset)" if back else f"{a}offset", "")
                w.masked.discard(self.axis)
                round_()
                w.masked.add(self.axis)

        def beyond() -> None:
            with w.block(f"for {a}offset in range({own(f'{a}full', f'{a}all')})"):
                self.lanes(f"{a}offset", f"{a}lane < {a}tail")
                round_()

        for loop in (beyond, inside) if back else (inside, beyond):
            loop()

    def lanes(self, round_: str, mask: str) -> None:
        """Of a round of a loop, or of a piece of a row."""
        a = self.axis.name
        self.w.line(f"{a}lane = {a}head + {round_} * {self.axis.block} + {a}base")
        self._enter(mask)

    # ---- the ends of rows

    def edges(self) -> None:
        """Places in the row of what is not in whole pieces, before them and after them."""
        w, a, n = self.w, self.axis.name, self.axis.vector
        if self.whole:
            w.line(f"{a}at = {a}tail + tl.arange(0, {n})")
            w.line(f"{a}edge = {a}at < {a}numel")
            return
        where = ", ".join(":" if d == self.axis.dim else "None" for d in range(w.rank))
        w.line(f"{a}two = tl.arange(0, {self._lanes_of_ends})[{where}]")
        w.line(f"{a}at = tl.where({a}two < {n}, {a}two, {a}tail - {a}slide + {a}two - {n})")
        shape, end = self.kernel.shape, f"{a}numel"
        if shape.row_programs and not (shape.chunk and shape.parts == 1):
            part = f"part % {shape.parts}" if shape.chunk else "part"
            end = f"tl.where({part} == 0, {a}numel, 0)"
        w.line(f"{a}edge = (({a}two < {n}) == ({a}at < {a}head - {a}slide)) & ({a}at < {end})")

    @contextmanager
    def ends(self) -> Generator[None]:
        """In the tile of the ends of rows."""
        w, a = self.w, self.axis.name
        with w.elsewhere(frozenset((self.axis,)), self.kept):
            w.know(self.axis.var, f"{a}at")
            w.ends_of_rows[self.axis] = str(self._lanes_of_ends), f"{a}edge"
            starts, w.blocks.starts = w.blocks.starts, {}  # random numbers are drawn one by one
            self.at_ends = True
            yield
            self.at_ends = False
            w.blocks.starts = starts
            del w.ends_of_rows[self.axis]

    def fetch(self, ends: Callable[[], AbstractContextManager[None]]) -> None:
        """What is loaded of the ends is in flight before the rows are."""
        members = self.kernel.shape.members
        made = frozenset[str]().union(*(m.writes for m in members))
        with ends():
            for node in loads(*(e for m in members for e in m.exprs)):
                waits = any(n.op in ("reduce", "scan") or n.arg in made for n in walk(node))
                if self.axis.var in free_vars(node.src[0]) and not waits:
                    self.w.operand(node)

    def store_ends(self, members: Sequence[Nest]) -> None:
        """Of what is stored along rows."""
        with self.ends():
            self.kernel.stores([m for m in members if not m.reduce])

    def tile(self) -> None:
        """What the program with a row's first block stores at both its ends."""
        with self.w.block(f"if {self.axis.name}block == 0"):
            self.edges()
            self.store_ends([m for s, _ in self.kernel.shape.segments for m in s.members])
        self.kept.clear()


__all__ = ["Peeled"]
