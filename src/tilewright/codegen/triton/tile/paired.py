"""Short rows of an odd length, moved two elements at once.

Every other row begins between two places of four bytes. The lanes of an axis in pairs begin at the
first whole pair, and one element is left over: the first of such a row, the last of the others. It
is a tile of its own, of one lane. Pieces of sixteen bytes would leave over more of a short row than
they are worth (H200: softmax of 389 bfloat16 86 us in pairs, 99 us by single elements, 113 us so).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tilewright.codegen.triton.strategies.remainder import Remainder
from tilewright.codegen.triton.tile.peeled import Peeled
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, substitute, var

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel

PAIR = 2


class Paired(Peeled):
    """The text of one kernel's axis in pairs."""

    def begin(self) -> None:
        w, a = self.w, self.axis.name
        self._lanes_of_ends = self.most_left = 1
        self._as_it_is = [var(f"{a}pair", self.axis.extent), var(f"{a}beside", self.axis.extent)]
        w.line(f"{a}place = {w.spread(w.index(self.start), w.support(self.start), frozenset())}")
        w.line(f"{a}odd = {a}place % 2")
        w.line(f"{a}start = ({a}place + {a}odd) // 2 * 2")
        w.line(f"{a}at = tl.where({a}odd == 0, {a}numel - 1, 0)")
        w.line(f"{a}tail = {a}numel - 1")
        self.fetch(self.ends)
        if not self.kernel.shape.chunk:
            w.line(f"{a}lane = {a}base")
            self._enter(f"{a}lane < {a}tail")

    def lanes(self, round_: str, mask: str) -> None:
        a = self.axis.name
        self.w.line(f"{a}lane = {round_} * {self.axis.block} + {a}base")
        self._enter(mask)

    def _enter(self, mask: str) -> None:
        a = self.axis.name
        self.w.line(f"{a}index = {a}lane + {a}odd")
        if mask:
            self.w.line(f"{a}mask = {mask}")
        self.w.know(self.axis.var, f"{a}index")

    def place(self, index: Expr) -> str:
        if self.at_ends or not self.steps(index):
            return ""
        a = self.axis.name
        apart = ix.sub(ix.sub(index, self.axis.var), self.start)
        more = "" if apart is ix.ZERO else f" + {self.w.index(apart)}"
        return f"{a}start + {a}lane{more}"

    @contextmanager
    def ends(self) -> Generator[None]:
        masked, self.w.masked = self.w.masked, self.w.masked - {self.axis}
        with super().ends():
            yield
        self.w.masked = masked

    def alike(self, node: Expr) -> str:
        """A row that is the same for all programs, as a layer's weights: loaded where it is and one
        further on, for the rows that begin so."""
        w, a = self.w, self.axis.name
        if self.at_ends or node.src[1:] or free_vars(node.src[0]) != frozenset((self.axis.var,)):
            return ""
        made: list[str] = []
        for k, lane in enumerate(self._as_it_is):
            w.know(lane, f"(tl.max_contiguous({a}lane, [1, 2]){' + 1' if k else ''})")
            index = w.index(substitute(node.src[0], {self.axis.var: lane}))
            pointer = self.kernel.pointer(node.arg)
            mask = f", {a}mask, other=0" if self.axis in w.masked else ""
            made.append(w.let(f"tl.load({pointer} + ({index}){mask})"))
        return f"tl.where({a}odd == 0, {', '.join(made)})"


def lean_of(kernel: Kernel) -> Peeled | None:
    axis = next((a for a in kernel.shape.axes if a.start is not None), None)
    if axis is None:
        return None
    if axis.start is ix.ZERO and axis in kernel.shape.inner:
        return Remainder(kernel, axis)
    return Paired(kernel, axis) if axis.vector == PAIR else Peeled(kernel, axis)
