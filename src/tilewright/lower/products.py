"""Products that are not worth a library call.

Matrix products, convolutions, attention, FFT and linear algebra have no lowering: they are
opaque calls of ATen. Here are the ones that only look like products: a vector times a vector or a
matrix is a reduction bound by memory, an outer product is pointwise, and both fuse with what
surrounds them.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.lower.context import Fill, Lowering
from tilewright.lower.promote import compute_type, scalar
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Tensor, from_indices, pointwise

aten = torch.ops.aten


def _times(a: Expr, b: Expr) -> Expr:
    return build.op("bit_and" if a.dtype == torch.bool else "mul", a, b)


def _matrix_vector(ctx: Lowering, matrix: Tensor, vector: Tensor) -> Tensor:
    """The product in the type it is accumulated in."""
    dtype = compute_type(matrix.dtype)
    products = pointwise(_times, matrix.to(dtype), vector.to(dtype))
    kind = "any" if dtype == torch.bool else "sum"
    return ctx.reduce(kind, products, [products.rank - 1], False, Fill(dtype))[0]


@lowers(aten.mv.default, aten.dot.default, aten.vdot.default)
def mv(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
    return _matrix_vector(ctx, a, b).to(a.dtype)


@lowers(aten.addmv.default)
def addmv(ctx: Lowering, x: Tensor, matrix: Tensor, vector: Tensor, *, beta: Any = 1,
          alpha: Any = 1) -> Tensor:  # fmt: skip
    total = _matrix_vector(ctx, matrix, vector)
    dtype = total.dtype
    if alpha != 1:
        total = total.map(lambda e: build.op("mul", e, scalar(alpha, dtype)))
    if beta != 0:  # where it is, eager does not look at `x`, NaN or not
        start = x.to(dtype).map(lambda e: build.op("mul", e, scalar(beta, dtype)))
        total = pointwise(lambda a, b: build.op("add", a, b), start, total)
    return total.to(matrix.dtype)


@lowers(aten.mm.default, aten.bmm.default)
def outer_product(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
    """A matrix product over one element."""
    if a.size[-1] is not ix.ONE:
        raise Unsupported("a matrix product is the library's")
    dtype = compute_type(a.dtype)
    left, right = a.to(dtype), b.to(dtype)

    def body(*at: Expr) -> Expr:
        *batch, i, j = at
        return _times(left.at([*batch, i, ix.ZERO]), right.at([*batch, ix.ZERO, j]))

    return from_indices((*a.size[:-1], b.size[-1]), a.device, body).to(a.dtype)
