"""Text of what a product reduces over rows of its left operand before it multiplies them
(`rows.py`): each fold is a loop over the rows at hand, or one block where that is all of them."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.triton.plan.tiling import Axis
from tilewright.codegen.triton.tile.lower import Writer
from tilewright.codegen.triton.tile.ops import COMBINE, TYPE, cast, neutral
from tilewright.codegen.triton.tile.reduce import reduced_type
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, walk

MOST_HELD = 4096  # elements of rows in registers at once
LANE = "lane_row"


def folds(*values: Expr) -> list[Expr]:
    """What is reduced, each after what it is made of."""
    return [n for n in walk(*values) if n.op == "reduce"]


class RowWalk:
    """`axis` is the row's, in blocks of `block` elements."""

    def __init__(self, w: Writer, axis: Axis, block: int, wide: bool) -> None:
        self.w, self.axis, self.block, self.wide = w, axis, block, wide
        size = ix.value_of(axis.extent)
        self.whole = size is not None and size <= block
        self.even = size is not None and size % block == 0
        if not self.even:
            w.masked.add(axis)

    def write(self, values: Sequence[Expr]) -> None:
        """From here on, what values reduce is known."""
        w = self.w
        found = folds(*values)
        if not found:
            return
        wide = ".to(tl.int64)" if self.wide else ""
        w.line(f"{LANE} = tl.arange(0, {self.block})[None, :]{wide}")
        if self.whole:
            self._at("")
        for node in found:
            self._fold(node)

    def _at(self, first: str) -> None:
        """The block that begins there."""
        w, axis = self.w, self.axis
        w.know(axis.var, f"({first} + {LANE})" if first else LANE)
        if not self.even:
            left = f" - {first}" if first else ""
            w.line(f"{axis.name}mask = {LANE} < {w.index(axis.extent)}{left}")

    def _fold(self, node: Expr) -> None:
        w, value = self.w, node.src[0]
        if node.arg.kind != "welford":
            made = self._folded(node.arg.kind, value)
            w.know(node, cast(made, reduced_type(value.dtype), node.dtype))
            return
        mean, squares = build.part(node, 0), build.part(node, 1)
        w.know(mean, w.let(f"{self._folded('sum', value)} / {w.index(self.axis.extent)}"))
        away = build.op("sub", value, mean)
        w.know(squares, self._folded("sum", build.op("mul", away, away)))

    def _folded(self, kind: str, value: Expr) -> str:
        w, combine, dtype = self.w, COMBINE[kind], reduced_type(value.dtype)
        if self.whole:
            return self._reduced(w.let(self._tile(kind, value)), value, combine)
        total, start = w.fresh("acc"), neutral(kind, dtype)
        shape = w.shape(w.support(value) | {self.axis})
        w.line(f"{total} = tl.full({shape}, {start}, {TYPE[dtype]})")
        with w.block(f"for r0 in range(0, K, {self.block})"):
            self._at("r0")
            w.line(f"{total} = {combine}({total}, {self._tile(kind, value)})")
        return self._reduced(total, value, combine)

    def _reduced(self, tile: str, value: Expr, combine: str) -> str:
        """A number for each row. That of one row is spread from a scalar: a tile of one is laid out
        as the row was, and to bring it to other tiles takes Triton minutes (4096 elements)."""
        if self.w.support(value) - {self.axis}:
            return self.w.let(f"tl.reduce({tile}, 1, {combine}, keep_dims=True)")
        row = f"tl.reshape({tile}, [{self.block}])"
        return self.w.let(f"tl.broadcast_to(tl.reduce({row}, 0, {combine}), [1, 1])")

    def _tile(self, kind: str, value: Expr) -> str:
        """Values of the block at hand, neutral outside the row."""
        w, dtype = self.w, reduced_type(value.dtype)
        support = w.support(value) | {self.axis}
        text = cast(w.operand(value), value.dtype, dtype)
        text = f"tl.broadcast_to({text}, {w.shape(support)})"
        none = neutral(kind, dtype)
        return text if self.even else f"tl.where({self.axis.name}mask, {text}, {none})"


__all__ = ["MOST_HELD", "RowWalk", "folds"]
