"""What all neighbours of a thread have in common along a row, as a channel's scale along a row of
many channels: loaded once for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.codegen.triton.plan.tiling import Axis
from tilewright.codegen.triton.tile.lower import Support
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, rewrite, substitute, var, walk

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel


def common(kernel: Kernel, node: Expr, support: Support) -> Axis | None:
    """The axis along which all neighbours of a thread have a load in common."""
    shape = kernel.shape
    axis = next((a for a in shape.inner if a in support), None)
    if axis is None or shape.across or kernel.peeled is not None or node.src[1:]:
        return None
    side = _neighbours(kernel, axis)
    pieces = [n for n in walk(node.src[0]) if n.op == "ifloordiv" and n.src[0] is axis.var]
    without = rewrite(node.src[0], lambda n, src: ix.ZERO if n in pieces else None)
    if not pieces or side == 1 or axis.var in free_vars(without):
        return None
    even = all((ix.value_of(n.src[1]) or 1) % side == 0 for n in pieces)
    return axis if even and all(c.kwargs[axis.block] >= side for c in kernel.configs) else None


def load_pieces(kernel: Kernel, node: Expr, axis: Axis) -> str:
    """Once for all neighbours of a thread (H200: group norm of rows of 65536 bfloat16, channels of
    4096, 43 us in blocks of 16384)."""
    w, name, side = kernel.w, f"{axis.name}piece", _neighbours(kernel, axis)
    first = w.blocks.rounds[axis][0] if axis in w.blocks.rounds else "0"
    with w.apart():
        lanes = kernel.lanes(axis, f"{axis.block} // {side}")
        w.line(f"{name} = {first} + {lanes} * {side}")
        if axis in w.masked:
            w.line(f"{name}mask = {name} < {axis.name}numel")
        made = w.stand_in(axis, var(name, axis.extent), f"{axis.block} // {side}")
        again = substitute(node.src[0], {axis.var: made})
        mask = w.mask(w.support(again))
        masked = f", {mask}, other=0" if mask else ""
        text = w.let(f"tl.load({kernel.pointer(node.arg)} + ({w.index(again)}){masked})")
        del w.ends_of_rows[axis]
    return f"tri.each({text}, {side})"


def _neighbours(kernel: Kernel, axis: Axis) -> int:
    """Elements that a thread loads at once of rows along an axis."""
    sizes = [n.dtype.itemsize for n in kernel.shape.loads
             if n.arg not in kernel.local
             and ix.coefficient(n.src[0], axis.var) is ix.ONE]  # fmt: skip
    return 16 // max(sizes, default=16)
