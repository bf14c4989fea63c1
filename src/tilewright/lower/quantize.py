"""Fake quantisation: numbers rounded to the steps an integer type would leave them."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir.expr import INDEX, Expr, const
from tilewright.lower import formula as f
from tilewright.lower.context import Lowering
from tilewright.lower.fold import along
from tilewright.lower.promote import operand
from tilewright.lower.table import lowers
from tilewright.lower.tensor import Tensor, pointwise

aten = torch.ops.aten
WORK = torch.float32
Results = tuple[Tensor, Tensor]


def _steps(x: Expr, scale: Expr, zero_point: Expr) -> Expr:
    """The number of the step nearest to `x`, ties to the even one."""
    return f.add(zero_point, f.round_(f.mul(x, f.reciprocal(scale))))


def _limited(step: Expr, low: int, high: int) -> Expr:
    """Into the integer type's range; of a NaN the lowest."""
    above = f.where(f.gt(step, float(low)), step, float(low))
    return f.where(f.lt(above, float(high)), above, float(high))


def _quantized(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int,
               whole: bool) -> Results:  # fmt: skip
    """(rounded values, where they were in range); `whole`: eager takes the step as an int64."""

    def stepped(a: Expr, s: Expr, z: Expr) -> Expr:
        step = _steps(a, s, z)
        return build.cast(build.cast(step, INDEX), WORK) if whole else step

    def value(a: Expr, s: Expr, z: Expr) -> Expr:
        return f.mul(f.sub(_limited(stepped(a, s, z), low, high), z), s)

    def in_range(a: Expr, s: Expr, z: Expr) -> Expr:
        step = stepped(a, s, z)
        return f.both(f.le(f.like(float(low), step), step), f.le(step, float(high)))

    given = [t.to(WORK) for t in (x, scale, zero_point)]
    return pointwise(value, *given).to(x.dtype), pointwise(in_range, *given)


@lowers(aten.fake_quantize_per_tensor_affine_cachemask.default)
def per_tensor(ctx: Lowering, x: Tensor, scale: Any, zero_point: Any, quant_min: int,
               quant_max: int) -> Results:  # fmt: skip
    parameters = [operand(ctx, n, WORK) for n in (scale, zero_point)]
    return _quantized(x, parameters[0], parameters[1], quant_min, quant_max, whole=False)


@lowers(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def per_tensor_of_tensors(ctx: Lowering, x: Tensor, scale: Tensor, zero_point: Tensor,
                          enabled: Tensor, quant_min: int, quant_max: int) -> Results:  # fmt: skip
    """The parameters are tensors of one element, and so is whether to quantise at all."""
    one, zero, on = (Tensor((), t.dtype, t.device, t.at([0] * t.rank))
                     for t in (scale, zero_point, enabled))  # fmt: skip
    value, mask = _quantized(x, one, zero, quant_min, quant_max, whole=False)
    chosen = on.map(lambda e: build.op("ne", e, const(0, e.dtype)))
    return (pointwise(build.where, chosen, value, x),
            pointwise(lambda e, m: build.op("bit_or", m, f.not_(e)), chosen, mask))  # fmt: skip


@lowers(aten.fake_quantize_per_channel_affine_cachemask.default)
def per_channel(ctx: Lowering, x: Tensor, scale: Tensor, zero_point: Tensor, axis: int,
                quant_min: int, quant_max: int) -> Results:  # fmt: skip
    parameters = [along(t, [axis % x.rank], x.size) for t in (scale, zero_point)]
    return _quantized(x, parameters[0], parameters[1], quant_min, quant_max, whole=True)
