"""Reductions: sums, extremes and their positions, logic, variances, norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, loads
from tilewright.ir.ops import SURE
from tilewright.ir.program import Nest
from tilewright.lower.context import Fill, Lowering
from tilewright.lower.fold import (
    Dims,
    accumulator,
    apply,
    axis_of,
    count_of,
    dims_of,
    div,
    dtype_of,
    fold,
    keep,
    moments,
    mul,
    number,
    squeeze,
    stride_of,
    sub,
)
from tilewright.lower.promote import compute_type, elementwise
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Tensor, placeholders, view
from tilewright.lower.views import replaced

aten = torch.ops.aten


# ---- sums and products


def _nan_is_zero(x: Expr) -> Expr:
    if not x.dtype.is_floating_point:
        return x
    return build.where(build.op("isnan", x), const(0.0, x.dtype), x)


def _folded(ctx: Lowering, kind: str, t: Tensor, dim: Dims, keepdim: bool,
            element: Callable[[Expr], Expr] | None = None) -> Tensor:  # fmt: skip
    """Elements are converted to the result's type first, as eager does, then accumulated."""
    result = dtype_of(ctx)
    values = t.to(result).to(compute_type(result))
    if element is not None:
        values = values.map(element)
    return fold(ctx, kind, values, dims_of(t, dim), keepdim, result, stride=stride_of(ctx))


@lowers(aten.sum.default, aten.sum.dim_IntList)
def _sum(ctx: Lowering, t: Tensor, dim: Dims = None, keepdim: bool = False, *,
         dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    parts = _partial_sums(ctx, t) if dtype_of(ctx) == t.dtype else None
    if parts is None:
        return _folded(ctx, "sum", t, dim, keepdim)
    return fold(ctx, "sum", parts, dims_of(t, dim), keepdim, t.dtype, stride=stride_of(ctx))


def _partial_sums(ctx: Lowering, t: Tensor) -> Tensor | None:
    """`t` before it is rounded, if it is made of sums in the compute type: parts of a sum are not
    rounded. Such are the gradients of a norm's parameters, of which every instance has its own."""
    if t.body.op != "cast" or t.body.src[0].dtype != compute_type(t.dtype) or _is_wide(t.dtype):
        return None
    read = {load.arg for load in loads(t.body)}
    summed = {b for n in ctx.program.nodes if isinstance(n, Nest) and n.reduce for b in n.writes}
    if not read & summed:
        return None
    return Tensor(t.size, t.body.src[0].dtype, t.device, t.body.src[0])


def _is_wide(dtype: torch.dtype) -> bool:
    return compute_type(dtype) == dtype


@lowers(aten.nansum.default)
def _nansum(ctx: Lowering, t: Tensor, dim: Dims = None, keepdim: bool = False, *,
            dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    return _folded(ctx, "sum", t, dim, keepdim, _nan_is_zero)


@lowers(aten.prod.default, aten.prod.dim_int)
def _prod(ctx: Lowering, t: Tensor, dim: Dims = None, keepdim: bool = False, *,
          dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    return _folded(ctx, "prod", t, dim, keepdim)


@lowers(aten.mean.default, aten.mean.dim)
def _mean(ctx: Lowering, t: Tensor, dim: Dims = None, keepdim: bool = False, *,
          dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    result = dtype_of(ctx)
    values = t.to(result).to(compute_type(result))
    dims = dims_of(t, dim)
    count = number(count_of(t, dims), values.dtype)
    return fold(ctx, "sum", values, dims, keepdim, result, lambda s: div(s, count), stride_of(ctx))


@lowers(aten.trace.default)
def _trace(ctx: Lowering, t: Tensor) -> Tensor:
    size = (ix.minimum(*t.size),)
    return _folded(ctx, "sum", view(t, size, lambda i: (i, i)), None, False)


def nonzero(t: Tensor) -> Tensor:
    """Where `t` is not zero; a NaN is not."""
    values = accumulator(t)
    if values.dtype == torch.bool:
        return values
    return values.map(lambda x: build.op("ne", x, const(0, x.dtype)))


@lowers(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def _count_nonzero(ctx: Lowering, t: Tensor, dim: Dims = None) -> Tensor:
    return fold(ctx, "sum", nonzero(t).to(torch.int64), dims_of(t, dim), False)


# ---- logic


def _logic(kind: str) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, t: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        result = dtype_of(ctx)  # uint8 stays uint8
        if isinstance(dim, Sequence) and not dim:  # unlike the sums: no dimensions, no fold
            return nonzero(t).to(result)
        return fold(ctx, kind, nonzero(t), dims_of(t, dim), keepdim, result, stride=stride_of(ctx))

    return lowering


lowers(aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default)(_logic("any"))
lowers(aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default)(_logic("all"))


# ---- extremes


def _not_empty(t: Tensor, dims: Sequence[int]) -> None:
    """Nothing has no extreme: a size that may be zero is left to ATen, which says so."""
    if any(ix.bounds(t.size[d])[0] < 1 for d in dims):
        raise Unsupported("the extreme of an empty dimension")


_ON_BOOL = {"min": "all", "max": "any"}


def extreme(ctx: Lowering, kind: str, t: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The least or greatest element; a NaN wins."""
    if t.dtype == torch.bool:
        return fold(ctx, _ON_BOOL[kind], t, dims, keepdim)
    return fold(ctx, kind, accumulator(t), dims, keepdim, t.dtype)


def _extreme(kind: str) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, t: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        dims = dims_of(t, dim)
        _not_empty(t, dims)
        return extreme(ctx, kind, t, dims, keepdim)

    return lowering


lowers(aten.amin.default, aten.min.default)(_extreme("min"))
lowers(aten.amax.default, aten.max.default)(_extreme("max"))


@lowers(aten.aminmax.default)
def _aminmax(ctx: Lowering, t: Tensor, *, dim: int | None = None,
             keepdim: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    dims = dims_of(t, dim)
    _not_empty(t, dims)
    return extreme(ctx, "min", t, dims, keepdim), extreme(ctx, "max", t, dims, keepdim)


_POSITION = Fill(torch.int64)


def position_of(ctx: Lowering, kind: str, t: Tensor, dims: Sequence[int],
                keepdim: bool) -> Tensor:  # fmt: skip
    """Where the first extreme is, counted over `dims` in row-major order."""
    sizes = [t.size[d] for d in dims]
    where = [placeholders(t.size)[d] for d in dims]
    position = ix.linearize(where, ix.contiguous_strides(sizes))
    positions = Tensor(t.size, torch.int64, t.device, position)
    if position.op == "const":
        return positions if keepdim else squeeze(positions, dims)
    if len(dims) == 1 and ctx.is_short(t, dims[0]):
        _, result = _first_extreme(kind, t, dims[0])
        return result if keepdim else squeeze(result, dims)
    fold_over = [d for d in dims if t.size[d] is not ix.ONE]
    (result,) = ctx.reduce(kind, [_numbers(t), positions], fold_over, True, _POSITION)
    return result if keepdim else squeeze(result, dims)


def _numbers(t: Tensor) -> Tensor:
    """What is compared: integers of one byte stand for booleans."""
    return t.to(torch.uint8) if t.dtype == torch.bool else accumulator(t)


def _first_extreme(kind: str, t: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The first extreme of few elements and where it is, written out: a NaN wins (H200: of three
    colours of 64x512x512, and what is made of these, 97 us, 264 us with a fold of its own)."""
    size = tuple(replaced(t.size, dim, ix.ONE))
    values, point = _numbers(t), placeholders(size)
    best, place = values.at(replaced(point, dim, ix.ZERO)), ix.ZERO
    for k in map(ix.as_index, range(1, ix.likely(t.size[dim]))):
        other = values.at(replaced(point, dim, k))
        better = _is_better(kind, other, best)
        best, place = build.where(better, other, best), build.where(better, k, place)
    where = place if place.is_const else build.op("index", place, t.size[dim], arg=SURE)
    extreme = Tensor(size, best.dtype, t.device, best).to(t.dtype)
    return extreme, Tensor(size, torch.int64, t.device, where)


def _is_better(kind: str, value: Expr, best: Expr) -> Expr:
    if not value.dtype.is_floating_point:
        return build.op("gt" if kind == "argmax" else "lt", value, best)
    within = build.op("le" if kind == "argmax" else "ge", value, best)
    return build.both(build.op("bit_not", within), build.op("bit_not", build.op("isnan", best)))


def _position(kind: str) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, t: Tensor, dim: int | None = None,
                 keepdim: bool = False) -> Tensor:  # fmt: skip
        if t.dtype == torch.bool:
            raise Unsupported("positions among booleans, an error in eager")
        dims = dims_of(t, dim)
        _not_empty(t, dims)
        return position_of(ctx, kind, t, dims, keepdim)

    return lowering


lowers(aten.argmin.default)(_position("argmin"))
lowers(aten.argmax.default)(_position("argmax"))


def _extreme_and_position(kind: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def lowering(ctx: Lowering, t: Tensor, dim: int,
                 keepdim: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
        axis = axis_of(t, dim)
        dims = [axis] if t.rank else []
        _not_empty(t, dims)
        if dims and ctx.is_short(t, axis):
            short = _first_extreme(f"arg{kind}", t, axis)
            return short if keepdim else (squeeze(short[0], dims), squeeze(short[1], dims))
        where = position_of(ctx, f"arg{kind}", t, dims, True)

        def found(*point: Expr) -> list[Expr]:
            return [where.at(point) if d == axis else p for d, p in enumerate(point)]

        if t.body.op == "load" or not dims:
            value = view(t, where.size, found)  # of 0.0 and -0.0 the first stays
        else:  # all of what is computed would have to be stored to find one of it
            value = extreme(ctx, kind, t, dims, True)
        if keepdim or not t.rank:
            return value, where
        return squeeze(value, [axis]), squeeze(where, [axis])

    return lowering


lowers(aten.min.dim)(_extreme_and_position("min"))
lowers(aten.max.dim)(_extreme_and_position("max"))


# ---- variances

Correction = int | float | Expr | None


def _spread(t: Tensor, dims: Sequence[int], correction: Correction,
            root: bool) -> Callable[[Expr, Expr], Expr]:  # fmt: skip
    """Variance (or its root) from a sum of squared deviations; no freedom left gives inf or NaN."""
    dtype = compute_type(t.dtype)
    freedom = sub(number(count_of(t, dims), dtype), number(1 if correction is None else correction,
                                                           dtype))  # fmt: skip
    divisor = build.op("max", freedom, const(0.0, dtype))

    def make(mean: Expr, squares: Expr) -> Expr:
        variance = div(squares, divisor)
        return build.op("sqrt", variance) if root else variance

    return make


def _mean_fill(t: Tensor, dims: Sequence[int]) -> Callable[[Expr, Expr], Expr]:
    count = count_of(t, dims)
    if ix.bounds(count)[0] > 0:
        return lambda mean, squares: mean
    empty = build.op("eq", count, ix.ZERO)
    return lambda mean, squares: build.where(empty, const(math.nan, mean.dtype), mean)


def _variance(root: bool, with_mean: bool) -> Callable[..., Any]:
    def lowering(ctx: Lowering, t: Tensor, dim: Dims = None, correction: Correction = None,
                 keepdim: bool = False) -> Any:  # fmt: skip
        dims = dims_of(t, dim)
        values = accumulator(t)
        fills = [(t.dtype, _spread(t, dims, correction, root))]
        if with_mean:
            fills.append((t.dtype, _mean_fill(t, dims)))
        results = moments(ctx, values, dims, keepdim, *fills)
        return results if with_mean else results[0]

    return lowering


def _unbiased(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """The older form, with a flag in place of the correction."""

    def without_dim(ctx: Lowering, t: Tensor, unbiased: bool = True) -> Any:
        return lowering(ctx, t, None, int(unbiased))

    return without_dim


def _unbiased_dim(lowering: Callable[..., Any]) -> Callable[..., Any]:
    def with_dim(ctx: Lowering, t: Tensor, dim: Dims, unbiased: bool = True,
                 keepdim: bool = False) -> Any:  # fmt: skip
        return lowering(ctx, t, dim, int(unbiased), keepdim)

    return with_dim


for _packet, _root, _with_mean in (
    (aten.var, False, False), (aten.std, True, False),
    (aten.var_mean, False, True), (aten.std_mean, True, True),
):  # fmt: skip
    _lowering = _variance(_root, _with_mean)
    lowers(_packet.correction)(_lowering)
    lowers(_packet.default)(_unbiased(_lowering))
    lowers(_packet.dim)(_unbiased_dim(_lowering))


# ---- norms


def vector_norm(ctx: Lowering, t: Tensor, order: float, dims: Sequence[int], keepdim: bool,
                result: torch.dtype) -> Tensor:  # fmt: skip
    """The p-norm over `dims`, accumulated in the result's compute type."""
    values = t.to(compute_type(result))
    size = values.map(lambda x: build.op("abs", x))
    if order == 0:
        return fold(ctx, "sum", nonzero(values).to(values.dtype), dims, keepdim, result)
    if all(t.size[d] is ix.ONE for d in dims):
        return (size if keepdim else squeeze(size, dims)).to(result)
    if math.isinf(order):
        _not_empty(t, dims)
        return fold(ctx, "max" if order > 0 else "min", size, dims, keepdim, result)
    if order == 1:
        return fold(ctx, "sum", size, dims, keepdim, result)
    if order == 2:
        squares = values.map(lambda x: mul(x, x))
        return fold(ctx, "sum", squares, dims, keepdim, result, lambda s: build.op("sqrt", s))
    power, root = const(order, values.dtype), const(1 / order, values.dtype)
    powers = size.map(lambda x: build.op("pow", x, power))
    return fold(ctx, "sum", powers, dims, keepdim, result, lambda s: build.op("pow", s, root))


def _order(order: Any) -> float:
    if isinstance(order, Expr):
        raise Unsupported("the order of the norm is not known before the call")
    return 2.0 if order is None else float(order)


@lowers(aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim,
        aten.norm.ScalarOpt_dim_dtype, aten.norm.ScalarOpt_dtype)  # fmt: skip
def _vector_norm(ctx: Lowering, t: Tensor, order: Any = 2, dim: Dims = None, keepdim: bool = False,
                 *, dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    return vector_norm(ctx, t, _order(order), dims_of(t, dim), keepdim, dtype_of(ctx))


@lowers(aten.dist.default)
def _dist(ctx: Lowering, a: Tensor, b: Tensor, p: Any = 2) -> Tensor:
    order = _order(p)
    difference = elementwise(ctx, sub, a, b)
    return vector_norm(ctx, difference, order, dims_of(difference, None), False, dtype_of(ctx))


# ---- log of a sum of exponentials


def _finite_or_zero(x: Expr) -> Expr:
    infinite = build.op("eq", build.op("abs", x), const(math.inf, x.dtype))
    return build.where(infinite, const(0.0, x.dtype), x)


@lowers(aten.logsumexp.default)
def _logsumexp(ctx: Lowering, t: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    result = dtype_of(ctx)
    dims = dims_of(t, dim)
    wide = compute_type(result)
    values = keep(ctx, t.to(wide))

    def held(e: Expr) -> Expr:
        """Eager stores every step of it in the result's type."""
        return build.cast(build.cast(e, result), wide)

    # an infinite greatest element is not subtracted: inf - inf would be NaN
    top = fold(ctx, "max", values, dims, True, finish=_finite_or_zero)
    powers = apply(lambda x, m: held(build.op("exp", held(sub(x, m)))), values, top)
    logs = fold(ctx, "sum", powers, dims, True, finish=lambda s: held(build.op("log", held(s))))
    out = apply(lambda s, m: build.op("add", s, m), logs, top).to(result)
    return out if keepdim else squeeze(out, dims)
