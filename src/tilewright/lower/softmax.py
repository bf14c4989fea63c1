"""Softmax and its logarithm, forward and backward.

Exponentials are stored before they are summed, because the result needs each again: a fused kernel
keeps that row in cache, where computing them twice would double the dearest part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewright.ir import build
from tilewright.ir.expr import Expr, const
from tilewright.lower.context import Lowering
from tilewright.lower.fold import (
    apply,
    dims_of,
    div,
    dtype_of,
    fold,
    keep,
    mul,
    one_place,
    sub,
    total,
)
from tilewright.lower.promote import compute_type
from tilewright.lower.table import lowers
from tilewright.lower.tensor import Tensor, pointwise

aten = torch.ops.aten


def _exp_difference(x: Expr, m: Expr) -> Expr:
    return build.op("exp", sub(x, m))


def _exponentials(ctx: Lowering, values: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(exp(x - max), max) along `dims`."""
    top = fold(ctx, "max", values, dims, True)
    return pointwise(_exp_difference, values, top), top


@lowers(aten._softmax.default)
def _softmax(ctx: Lowering, t: Tensor, dim: int, half_to_float: bool) -> Tensor:
    result = dtype_of(ctx)
    dims = dims_of(t, dim)
    powers, _ = _exponentials(ctx, keep(ctx, t.to(compute_type(result))), dims)
    powers = ctx.realize(powers)
    return pointwise(div, powers, total(ctx, powers, dims)).to(result)


@lowers(aten._safe_softmax.default)
def _safe_softmax(ctx: Lowering, t: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax, but zero all along a row that is minus infinity everywhere."""
    result = dtype_of(ctx)
    dims = dims_of(t, dim)
    values = keep(ctx, t.to(compute_type(result)))
    powers, top = _exponentials(ctx, values, dims)
    powers = ctx.realize(powers)

    def share(e: Expr, s: Expr, m: Expr) -> Expr:
        masked = build.op("eq", m, const(-math.inf, m.dtype))
        return build.where(masked, const(0.0, e.dtype), div(e, s))

    return pointwise(share, powers, total(ctx, powers, dims), top).to(result)


@lowers(aten._log_softmax.default)
def _log_softmax(ctx: Lowering, t: Tensor, dim: int, half_to_float: bool) -> Tensor:
    result = dtype_of(ctx)
    dims = dims_of(t, dim)
    values = keep(ctx, t.to(compute_type(result)))
    powers, top = _exponentials(ctx, values, dims)
    logs = fold(ctx, "sum", powers, dims, True, finish=lambda s: build.op("log", s))
    return pointwise(lambda x, m, s: sub(sub(x, m), s), values, top, logs).to(result)


@lowers(aten._softmax_backward_data.default)
def _softmax_backward(ctx: Lowering, grad: Tensor, output: Tensor, dim: int,
                      input_dtype: torch.dtype) -> Tensor:  # fmt: skip
    dims = dims_of(output, dim)
    grad, output = keep(ctx, grad), keep(ctx, output)
    folded = total(ctx, apply(mul, grad, output), dims)
    return apply(lambda g, out, s: mul(out, sub(g, s)), grad, output, folded).to(dtype_of(ctx))


@lowers(aten._log_softmax_backward_data.default)
def _log_softmax_backward(ctx: Lowering, grad: Tensor, output: Tensor, dim: int,
                          input_dtype: torch.dtype) -> Tensor:  # fmt: skip
    """The output is used once, so it may be computed where it is used."""
    dims = dims_of(output, dim)
    folded = one_place(apply(lambda g: g, grad), dims)
    if folded is None:
        grad = keep(ctx, grad)
        folded = total(ctx, apply(lambda g: g, grad), dims)

    def gradient(g: Expr, out: Expr, s: Expr) -> Expr:
        return sub(g, mul(build.op("exp", out), s))

    return apply(gradient, grad, output, folded).to(dtype_of(ctx))
