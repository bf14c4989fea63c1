"""Normalisations: layer, RMS, group, batch and weight norm, forward and backward.

Each is written over an input `x` seen as (rows to normalise) x (elements of a row): `Rows` says
which dimensions are which. Statistics are in the compute type; what is returned of them has the
type the graph gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, loads
from tilewright.lower.context import Lowering
from tilewright.lower.fold import (
    FromMoments,
    add,
    along,
    axis_of,
    count_of,
    div,
    dtype_of,
    fake_of,
    full,
    keep,
    moments,
    mul,
    number,
    partial,
    squeeze,
    sub,
    total,
)
from tilewright.lower.promote import compute_type
from tilewright.lower.reductions import vector_norm
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Size, Tensor, placeholders, pointwise, view

aten = torch.ops.aten
Triple = tuple[Tensor | None, Tensor | None, Tensor | None]


# ---- shared arithmetic


def _inverse_root(count: Expr, eps: float) -> FromMoments:
    """1 / sqrt(variance + eps), from the moments of `count` elements."""

    def make(mean: Expr, squares: Expr) -> Expr:
        variance = div(squares, number(count, squares.dtype))
        return build.op("rsqrt", add(variance, number(eps, squares.dtype)))

    return make


def _mean(mean: Expr, squares: Expr) -> Expr:
    return mean


def _statistics(ctx: Lowering, x: Tensor, dims: Sequence[int],
                eps: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(mean, 1 / standard deviation) over `dims`, which stay as dimensions of one."""
    mean, inverse = moments(ctx, x, dims, True, (x.dtype, _mean),
                            (x.dtype, _inverse_root(count_of(x, dims), eps)))  # fmt: skip
    return mean, inverse


def _normalized(x: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    return pointwise(lambda v, m, r: mul(sub(v, m), r), x, mean, inverse)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = pointwise(mul, x, weight)
    return x if bias is None else pointwise(add, x, bias)


def _centred(ctx: Lowering, g: Tensor, normal: Tensor, inverse: Tensor, dims: Sequence[int],
             means: Sequence[Tensor] | None = None) -> Tensor:  # fmt: skip
    """The gradient of a normalised row: `g` without its parts along one and along the row.

    `means` are the sums of `g` and of `g` times the row, if known already.
    """
    count = number(count_of(g, dims), g.dtype)
    if means is None:
        means = (total(ctx, g, dims), total(ctx, pointwise(mul, g, normal), dims))

    def element(v: Expr, n: Expr, r: Expr, s: Expr, p: Expr) -> Expr:
        return mul(sub(sub(v, div(s, count)), mul(n, div(p, count))), r)

    return pointwise(element, g, normal, inverse, *means)


def _in(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.to(compute_type(dtype)) for t in tensors]


# ---- layer and RMS norm: rows are the last dimensions


def _last(x: Tensor, shape: Sequence[Any]) -> tuple[list[int], list[int]]:
    """(the dimensions of a row, the dimensions that number the rows)."""
    split = x.rank - len(shape)
    return list(range(split, x.rank)), list(range(split))


@lowers(aten.native_layer_norm.default)
def _layer_norm(ctx: Lowering, x: Tensor, shape: Sequence[Any], weight: Tensor | None,
                bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:  # fmt: skip
    rows, _ = _last(x, shape)
    values, weight, bias = _in(x.dtype, keep(ctx, x), weight, bias)
    mean, inverse = _statistics(ctx, values, rows, eps)
    out = _affine(_normalized(values, mean, inverse), weight, bias)
    return out.to(dtype_of(ctx, 0)), mean.to(dtype_of(ctx, 1)), inverse.to(dtype_of(ctx, 2))


@lowers(aten.native_layer_norm_backward.default)
def _layer_norm_backward(ctx: Lowering, grad: Tensor, x: Tensor, shape: Sequence[Any],
                         mean: Tensor, inverse: Tensor, weight: Tensor | None,
                         bias: Tensor | None, mask: Sequence[bool]) -> Triple:  # fmt: skip
    rows, others = _last(x, shape)
    grad, values, mean, inverse, weight = _in(x.dtype, keep(ctx, grad), keep(ctx, x), mean,
                                              inverse, weight)  # fmt: skip
    normal = _normalized(values, mean, inverse)
    wanted = _wanted(ctx, mask)
    gradient = None
    if mask[0]:
        gradient = _centred(ctx, _affine(grad, weight, None), normal, inverse, rows)
    scale = total(ctx, pointwise(mul, grad, normal), others, False) if mask[1] else None
    shift = total(ctx, grad, others, False) if mask[2] else None
    return _typed(wanted, gradient, scale, shift)


def _wanted(ctx: Lowering, mask: Sequence[bool]) -> list[torch.dtype | None]:
    return [dtype_of(ctx, k) if m else None for k, m in enumerate(mask)]


def _typed(dtypes: Sequence[torch.dtype | None], *tensors: Tensor | None) -> Any:
    return tuple(None if t is None or d is None else t.to(d)
                 for t, d in zip(tensors, dtypes, strict=True))  # fmt: skip


@lowers(aten._fused_rms_norm.default)
def _rms_norm(ctx: Lowering, x: Tensor, shape: Sequence[Any], weight: Tensor | None,
              eps: float | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, _ = _last(x, shape)
    values, weight = _in(x.dtype, keep(ctx, x), weight)
    floor = torch.finfo(values.dtype).eps if eps is None else eps
    count = number(count_of(values, rows), values.dtype)
    squares = total(ctx, values.map(lambda v: mul(v, v)), rows)
    inverse = ctx.realize(squares.map(
        lambda s: build.op("rsqrt", add(div(s, count), number(floor, s.dtype)))
    ))  # fmt: skip
    out = _affine(pointwise(mul, values, inverse), weight, None)
    return out.to(dtype_of(ctx, 0)), inverse.to(dtype_of(ctx, 1))


@lowers(aten._fused_rms_norm_backward.default)
def _rms_norm_backward(ctx: Lowering, grad: Tensor, x: Tensor, shape: Sequence[Any],
                       inverse: Tensor, weight: Tensor | None,
                       mask: Sequence[bool]) -> tuple[Tensor | None, ...]:  # fmt: skip
    rows, others = _last(x, shape)
    grad, values, inverse, weight = _in(x.dtype, keep(ctx, grad), keep(ctx, x), inverse, weight)
    normal = pointwise(mul, values, inverse)
    wanted = _wanted(ctx, mask)
    gradient = scale = None
    if mask[0]:
        g = _affine(grad, weight, None)
        none = full((), 0.0, g.dtype, g.device)  # no mean was taken away, so no part along it is
        along_row = total(ctx, pointwise(mul, g, normal), rows)
        gradient = _centred(ctx, g, normal, inverse, rows, (none, along_row))
    if mask[1] and weight is not None:
        scale = total(ctx, pointwise(mul, grad, normal), others, False)
    return _typed(wanted, gradient, scale)


# ---- group norm: rows are groups of channels


@dataclass(frozen=True)
class _Groups:
    """An input (N, C, ...) seen as (N, groups, C / groups, ...)."""

    size: Size
    split: Size

    @staticmethod
    def of(x: Tensor, groups: int) -> _Groups:
        n, c, *rest = x.size
        return _Groups(x.size, (n, ix.as_index(groups), ix.floordiv(c, groups), *rest))

    @property
    def rows(self) -> list[int]:
        return list(range(2, len(self.split)))

    @property
    def places(self) -> list[int]:
        return list(range(3, len(self.split)))

    def apart(self, x: Tensor) -> Tensor:
        width = self.split[2]
        return view(x, self.split, lambda n, g, k, *rest: (n, ix.add(ix.mul(g, width), k), *rest))

    def together(self, x: Tensor) -> Tensor:
        width = self.split[2]
        return view(x, self.size, lambda n, c, *rest: (n, ix.floordiv(c, width), ix.mod(c, width),
                                                       *rest))  # fmt: skip

    def channels(self, t: Tensor | None) -> Tensor | None:
        """A value per channel, over the split size."""
        if t is None:
            return None
        width = self.split[2]
        return view(t, (self.split[1], width, *[ix.ONE] * len(self.places)),
                    lambda g, k, *rest: (ix.add(ix.mul(g, width), k),))  # fmt: skip

    def per_group(self, t: Tensor) -> Tensor:
        """A statistic (N, groups), over the split size."""
        size = (*self.split[:2], *[ix.ONE] * (len(self.split) - 2))
        return view(t, size, lambda n, g, *rest: (n, g))


def _in_planes(ctx: Lowering, x: Tensor) -> Tensor:
    """`x` for several passes over its groups: on a CPU each of their channels as one piece."""
    v = placeholders(x.size)[-1]
    apart = any(ix.coefficient(n.src[0], v) is not ix.ONE for n in loads(x.body)
                if v in free_vars(n.src[0]))  # fmt: skip
    if x.device.type != "cpu" or not apart:
        return keep(ctx, x)
    return ctx.copy(x, ix.contiguous_strides(x.size))


@lowers(aten.native_group_norm.default)
def _group_norm(ctx: Lowering, x: Tensor, weight: Tensor | None, bias: Tensor | None, n: Any,
                c: Any, hxw: Any, groups: int, eps: float) -> tuple[Tensor, ...]:  # fmt: skip
    split = _Groups.of(x, groups)
    values, weight, bias = _in(x.dtype, split.apart(_in_planes(ctx, x)), split.channels(weight),
                               split.channels(bias))  # fmt: skip
    mean, inverse = _statistics(ctx, values, split.rows, eps)
    out = split.together(_affine(_normalized(values, mean, inverse), weight, bias))
    mean, inverse = squeeze(mean, split.rows), squeeze(inverse, split.rows)
    return out.to(dtype_of(ctx, 0)), mean.to(dtype_of(ctx, 1)), inverse.to(dtype_of(ctx, 2))


@lowers(aten.native_group_norm_backward.default)
def _group_norm_backward(ctx: Lowering, grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor,
                         weight: Tensor | None, n: Any, c: Any, hxw: Any, groups: int,
                         mask: Sequence[bool]) -> Triple:  # fmt: skip
    split = _Groups.of(x, groups)
    grad, values, mean, inverse, weight = _in(
        x.dtype, split.apart(keep(ctx, grad)), split.apart(keep(ctx, x)), split.per_group(mean),
        split.per_group(inverse), split.channels(weight),
    )  # fmt: skip
    normal = _normalized(values, mean, inverse)
    wanted = _wanted(ctx, mask)
    # sums over the places of one channel serve the row sums and the parameters alike
    plain = total(ctx, grad, split.places)
    scaled = total(ctx, pointwise(mul, grad, normal), split.places)
    gradient = None
    if mask[0]:
        means = [total(ctx, _affine(s, weight, None), split.rows) for s in (plain, scaled)]
        gradient = split.together(
            _centred(ctx, _affine(grad, weight, None), normal, inverse, split.rows, means)
        )
    sums = [_over_batch(ctx, s, x.size[1], split) if m else None
            for s, m in zip((scaled, plain), mask[1:], strict=True)]  # fmt: skip
    return _typed(wanted, gradient, *sums)


def _over_batch(ctx: Lowering, t: Tensor, channels: Expr, split: _Groups) -> Tensor:
    """(N, groups, width, 1...) summed over the batch, as one value per channel."""
    summed = total(ctx, t, [0, *split.places], False)
    width = split.split[2]
    return view(summed, (channels,), lambda c: (ix.floordiv(c, width), ix.mod(c, width)))


# ---- batch norm: rows are channels


def _channel_dims(x: Tensor) -> list[int]:
    return [d for d in range(x.rank) if d != 1]


def _channel(t: Tensor | None, x: Tensor) -> Tensor | None:
    """A value per channel, over the size of `x`."""
    return None if t is None else along(t, [1], x.size)


@dataclass(frozen=True)
class _BatchNorm:
    """What a batch norm in training gives: the statistics per channel are without other dims."""

    out: Tensor
    mean: Tensor
    inverse: Tensor
    variance: Tensor  # unbiased, for the running variance


def _batch_norm_training(ctx: Lowering, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                         eps: float) -> _BatchNorm:  # fmt: skip
    dims = _channel_dims(x)
    values, weight, bias = _in(x.dtype, keep(ctx, x), _channel(weight, x), _channel(bias, x))
    dtype, saved = values.dtype, dtype_of(ctx, 1)

    def held(e: Expr) -> Expr:
        """Eager keeps every statistic, and even the count, in bfloat16 where the saved ones are; in
        float16, which cannot hold them, it does not."""
        return build.cast(build.cast(e, saved), dtype) if saved == torch.bfloat16 else e

    def variance(freedom: Expr) -> FromMoments:
        return lambda mean, squares: held(div(held(squares), held(number(freedom, dtype))))

    def inverse_root(mean: Expr, squares: Expr) -> Expr:
        biased = variance(count)(mean, squares)
        return build.op("rsqrt", add(biased, number(eps, dtype)))

    count = count_of(x, dims)
    statistics = moments(ctx, values, dims, False, (saved, _mean), (saved, inverse_root),
                         (saved, variance(ix.sub(count, 1))))  # fmt: skip
    mean, inverse = (along(t, [1], x.size).to(dtype) for t in statistics[:2])
    normal = _normalized(values, mean, inverse)
    return _BatchNorm(_affine(normal, weight, bias), *statistics)


def _batch_norm_inference(ctx: Lowering, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                          mean: Tensor, variance: Tensor, eps: float) -> Tensor:  # fmt: skip
    values, weight, bias, mean, inverse = _in(
        x.dtype, x, _channel(weight, x), _channel(bias, x), _channel(mean, x),
        _channel(_inverse(variance, eps), x),
    )  # fmt: skip
    return _affine(_normalized(values, mean, inverse), weight, bias)


def _inverse(variance: Tensor, eps: float) -> Tensor:
    """1 / sqrt(variance + eps) of a stored variance, in its compute type."""
    values = variance.to(compute_type(variance.dtype))
    return values.map(lambda v: build.op("rsqrt", add(v, number(eps, v.dtype))))


def _updated(running: Tensor, fresh: Tensor, momentum: float, result: torch.dtype) -> Tensor:
    dtype = torch.float64  # as eager's momentum
    share, rest = number(momentum, dtype), number(1 - momentum, dtype)
    mixed = pointwise(lambda old, new: add(mul(share, new), mul(rest, old)),
                      running.to(dtype), fresh.to(dtype))  # fmt: skip
    return mixed.to(result)


def _unused(ctx: Lowering, position: int) -> Tensor:
    """A result that carries nothing: zeros of the size the graph gives it."""
    fake = fake_of(ctx, position)
    return full(ctx.sizes.tuple(fake.size()), 0, fake.dtype, fake.device)


def _batch_norm(ctx: Lowering, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                running: tuple[Tensor | None, Tensor | None], training: bool, momentum: float,
                eps: float) -> list[Tensor]:  # fmt: skip
    """(out, saved mean, saved inverse[, new running mean, new running variance])."""
    mean, variance = running
    if not training:
        if mean is None or variance is None:
            raise Unsupported("inference without running statistics")
        out = _batch_norm_inference(ctx, x, weight, bias, mean, variance, eps)
        kept = [mean.to(dtype_of(ctx, -2)), variance.to(dtype_of(ctx, -1))]
        saved = [_unused(ctx, 1), _unused(ctx, 2)]
        if saved[0].size != (ix.ZERO,):  # a card gives what was used, a CPU nothing
            saved = [mean.to(dtype_of(ctx, 1)), _inverse(variance, eps).to(dtype_of(ctx, 2))]
        return [out.to(dtype_of(ctx, 0)), *saved, *kept]
    found = _batch_norm_training(ctx, x, weight, bias, eps)
    results = [found.out.to(dtype_of(ctx, 0)), found.mean.to(dtype_of(ctx, 1)),
               found.inverse.to(dtype_of(ctx, 2))]  # fmt: skip
    if mean is not None and variance is not None:
        results += [_updated(mean, found.mean, momentum, dtype_of(ctx, -2)),
                    _updated(variance, found.variance, momentum, dtype_of(ctx, -1))]  # fmt: skip
    return results


@lowers(aten._native_batch_norm_legit_functional.default)
def _batch_norm_functional(ctx: Lowering, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                           mean: Tensor, variance: Tensor, training: bool, momentum: float,
                           eps: float) -> list[Tensor]:  # fmt: skip
    return _batch_norm(ctx, x, weight, bias, (mean, variance), training, momentum, eps)


@lowers(aten._batch_norm_with_update_functional.default)
def _batch_norm_update(ctx: Lowering, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                       mean: Tensor, variance: Tensor, momentum: float,
                       eps: float) -> list[Tensor]:  # fmt: skip
    found = _batch_norm(ctx, x, weight, bias, (mean, variance), True, momentum, eps)
    return [*found[:3], _unused(ctx, 3), *found[3:]]


@lowers(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_no_training(ctx: Lowering, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                            mean: Tensor, variance: Tensor, momentum: float,
                            eps: float) -> list[Tensor]:  # fmt: skip
    return _batch_norm(ctx, x, weight, bias, (mean, variance), False, momentum, eps)[:3]


@lowers(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(ctx: Lowering, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                         training: bool, momentum: float, eps: float) -> list[Tensor]:  # fmt: skip
    return _batch_norm(ctx, x, weight, bias, (None, None), training, momentum, eps)


@lowers(aten.native_batch_norm.default)
def _native_batch_norm(ctx: Lowering, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                       mean: Tensor | None, variance: Tensor | None, training: bool,
                       momentum: float, eps: float) -> list[Tensor]:  # fmt: skip
    if training and mean is not None:
        raise Unsupported("it writes the running statistics without saying so")
    return _batch_norm(ctx, x, weight, bias, (mean, variance), training, momentum, eps)[:3]


@lowers(aten._batch_norm_no_update.default)
def _batch_norm_no_update(ctx: Lowering, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                          mean: Tensor | None, variance: Tensor | None, momentum: float,
                          eps: float) -> list[Tensor]:  # fmt: skip
    training = mean is None or variance is None
    found = _batch_norm(ctx, x, weight, bias, (mean, variance), training, momentum, eps)[:3]
    return [*found, _unused(ctx, 3)]


@lowers(aten.native_batch_norm_backward.default)
def _batch_norm_backward(ctx: Lowering, grad: Tensor, x: Tensor, weight: Tensor | None,
                         running_mean: Tensor | None, running_variance: Tensor | None,
                         mean: Tensor | None, inverse: Tensor | None, training: bool, eps: float,
                         mask: Sequence[bool]) -> Triple:  # fmt: skip
    if not training and running_variance is not None:
        mean, inverse = running_mean, _inverse(running_variance, eps)
    if mean is None or inverse is None:
        raise Unsupported("inference without running statistics")
    dims = _channel_dims(x)
    wanted = _wanted(ctx, mask)
    grad, values, centre, spread, weight = _in(
        x.dtype, keep(ctx, grad), keep(ctx, x), _channel(mean, x), _channel(inverse, x),
        _channel(weight, x),
    )  # fmt: skip
    away = pointwise(sub, values, centre)
    normal = pointwise(mul, away, spread)
    gradient = None
    # an instance norm adds these up: rounded before that, they would be less exact than eager's
    summed = total if grad.dtype == x.dtype else partial
    plain = summed(ctx, grad, dims) if training or mask[2] else None
    scaled = None
    if training or mask[1]:  # scaled after it is summed, as in eager: it may be rounded next
        scaled = summed(ctx, pointwise(mul, grad, away), dims)
        scaled = pointwise(mul, scaled, along(inverse, [1], scaled.size).to(scaled.dtype))
    if mask[0]:
        if plain is not None and scaled is not None and training:
            gradient = _centred(ctx, grad, normal, spread, dims, (plain, scaled))
        else:
            gradient = pointwise(mul, grad, spread)
        gradient = _affine(gradient, weight, None)
    sums = [None if s is None else squeeze(s, dims) for s in (scaled, plain)]
    return _typed(wanted, gradient, *sums)


@lowers(aten.batch_norm_backward.default)
def _batch_norm_backward_reserve(ctx: Lowering, grad: Tensor, x: Tensor, weight: Tensor,
                                 running_mean: Tensor | None, running_variance: Tensor | None,
                                 mean: Tensor | None, inverse: Tensor | None, update: bool,
                                 eps: float, mask: Sequence[bool],
                                 reserve: Tensor) -> Triple:  # fmt: skip
    return _batch_norm_backward(ctx, grad, x, weight, running_mean, running_variance, mean,
                                inverse, update, eps, mask)  # fmt: skip


# ---- norms of weights


@lowers(aten._weight_norm_interface.default)
def _weight_norm(ctx: Lowering, v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    others = [d for d in range(v.rank) if d != axis_of(v, dim)]
    norm_type = dtype_of(ctx, 1)
    values, scale = _in(v.dtype, keep(ctx, v), g)
    norm = vector_norm(ctx, values, 2, others, True, compute_type(norm_type))
    out = pointwise(lambda a, s, n: mul(a, div(s, n)), values, scale, norm.to(values.dtype))
    return out.to(dtype_of(ctx, 0)), norm.to(norm_type)


@lowers(aten._weight_norm_interface_backward.default)
def _weight_norm_backward(ctx: Lowering, grad: Tensor, v: Tensor, g: Tensor, norm: Tensor,
                          dim: int) -> tuple[Tensor, Tensor]:  # fmt: skip
    others = [d for d in range(v.rank) if d != axis_of(v, dim)]
    grad, values, scale, norms = _in(v.dtype, keep(ctx, grad), keep(ctx, v), g, norm)
    products = total(ctx, pointwise(mul, grad, values), others)

    def element(w: Expr, a: Expr, s: Expr, n: Expr, p: Expr) -> Expr:
        return mul(div(s, n), sub(w, mul(a, div(p, mul(n, n)))))

    gradient = pointwise(element, grad, values, scale, norms, products)
    return gradient.to(dtype_of(ctx, 0)), pointwise(div, products, norms).to(dtype_of(ctx, 1))


@lowers(aten.renorm.default)
def _renorm(ctx: Lowering, t: Tensor, p: Any, dim: int, maxnorm: Any) -> Tensor:
    if isinstance(p, Expr):
        raise Unsupported("the order of the norm is not known before the call")
    others = [d for d in range(t.rank) if d != axis_of(t, dim)]
    values = keep(ctx, t).to(compute_type(t.dtype))
    norm = vector_norm(ctx, values, float(p), others, True, values.dtype)

    def factor(n: Expr) -> Expr:
        limit = number(maxnorm, n.dtype)
        scale = div(limit, add(n, const(1e-7, n.dtype)))
        return build.where(build.op("gt", n, limit), scale, const(1.0, n.dtype))

    factors = norm.map(factor).to(t.dtype).to(values.dtype)  # eager stores it in the input's type
    return pointwise(mul, values, factors).to(t.dtype)
