"""Running sums, products and extremes along one dimension."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const
from tilewright.ir.ops import STEPS
from tilewright.ir.program import Store
from tilewright.lower.context import Lowering
from tilewright.lower.fold import axis_of, dtype_of, stride_of
from tilewright.lower.promote import compute_type
from tilewright.lower.table import lowers
from tilewright.lower.tensor import Tensor, placeholders
from tilewright.lower.views import replaced

aten = torch.ops.aten

SHORT = 4  # elements of a running sum that is written out


def _carried(t: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Eager carries a running float32 value in float64 on the CPU, but on a card in itself (H200:
    65132 rows of 1067 140 us, 183 us in float64), and the smaller floats in float32."""
    wide = dtype == torch.float32 and t.device.type == "cpu"
    return torch.float64 if wide else compute_type(dtype)


def _stores(ctx: Lowering, t: Tensor, values: list[Expr]) -> list[Tensor]:
    """One nest over `t` that stores each value (a scan, or a part of one) in its own buffer."""
    loops = placeholders(t.size)
    stores: list[Store] = []
    results: list[Tensor] = []
    for k, value in enumerate(values):
        stride = stride_of(ctx, k if len(values) > 1 else None)
        made = ctx.buffer(t.size, value.dtype, t.device, stride)
        stores.append(Store(made.name, ix.linearize(loops, made.stride), value))
        results.append(ctx.stored(made))
    ctx.nest(loops, (), stores)
    return results


def _axis(t: Tensor, dim: int) -> Expr | None:
    """The loop variable of the dimension; None if there is a single element along it."""
    loops = placeholders(t.size)
    found = loops[axis_of(t, dim)] if loops else ix.ZERO
    return found if found.op == "var" else None


def _written_out(step: str, t: Tensor, dim: int) -> Tensor:
    """A short one as arithmetic, so that it can be part of a larger expression: the gradient of a
    product of a few columns is made of running products."""
    loops = placeholders(t.size)
    total = found = t.at(replaced(loops, dim, ix.ZERO))
    for k in range(1, ix.value_of(t.size[dim]) or 1):
        total = build.op(step, total, t.at(replaced(loops, dim, const(k))))
        found = build.where(build.op("ge", loops[dim], const(k)), total, found)
    return Tensor(t.size, t.dtype, t.device, found)


def _running(kind: str) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, t: Tensor, dim: int, *,
                 dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
        result = dtype_of(ctx)
        values = t.to(result)
        axis = _axis(t, dim)
        if axis is None:
            return values
        carried = values.to(_carried(t, result))
        if kind in STEPS and (ix.value_of(axis.src[0]) or SHORT + 1) <= SHORT:
            return _written_out(STEPS[kind], carried, axis_of(t, dim)).to(result)
        scanned = build.scan(kind, axis, carried.body)
        return _stores(ctx, t, [build.cast(scanned, result)])[0]

    return lowering


lowers(aten.cumsum.default)(_running("sum"))
lowers(aten.cumprod.default)(_running("prod"))
lowers(aten.logcumsumexp.default)(_running("logsumexp"))


def _running_extreme(kind: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def lowering(ctx: Lowering, t: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        axis = _axis(t, dim)
        if axis is None:
            return t, Tensor(t.size, torch.int64, t.device, const(0))
        # integers of one byte stand for booleans: the fold compares numbers
        compared = torch.uint8 if t.dtype == torch.bool else compute_type(t.dtype)
        scanned = build.scan(kind, axis, t.to(compared).body, axis)
        parts = [build.cast(build.part(scanned, 0), t.dtype),
                 build.part(scanned, 1, torch.int64)]  # fmt: skip
        value, position = _stores(ctx, t, parts)
        return value, position

    return lowering


lowers(aten.cummax.default)(_running_extreme("max"))
lowers(aten.cummin.default)(_running_extreme("min"))
