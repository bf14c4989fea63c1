"""Losses that arrive as one operator: an elementwise part and its mean or sum, and backwards."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const
from tilewright.lower.context import Lowering
from tilewright.lower.fold import (
    add,
    apply,
    dims_of,
    div,
    dtype_of,
    fold,
    full,
    mul,
    number,
    sub,
)
from tilewright.lower.promote import compute_type
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Tensor, from_indices, pointwise

aten = torch.ops.aten
NONE, MEAN = 0, 1  # the `reduction` argument; 2 is the sum


def _c(value: float, like: Expr) -> Expr:
    return const(value, like.dtype)


def _abs(x: Expr) -> Expr:
    return build.op("abs", x)


def _reduced(ctx: Lowering, losses: Tensor, reduction: int) -> Tensor:
    result = dtype_of(ctx)
    if reduction == NONE:
        return losses.to(result)
    count = number(losses.numel, losses.dtype)
    finish = (lambda s: div(s, count)) if reduction == MEAN else None
    return fold(ctx, "sum", losses, dims_of(losses, None), False, result, finish)


def _in(ctx: Lowering, *tensors: Tensor | None) -> list[Tensor]:
    """The tensors that are there, in the type the loss is computed in."""
    dtype = compute_type(dtype_of(ctx))
    return [t.to(dtype) for t in tensors if t is not None]


# ---- losses of (input, target), some with one parameter


def _squared(x: Expr, y: Expr) -> Expr:
    difference = sub(x, y)
    return mul(difference, difference)


def _smooth_l1(x: Expr, y: Expr, beta: Expr) -> Expr:
    z = _abs(sub(x, y))
    inside = div(mul(mul(_c(0.5, z), z), z), beta)
    return build.where(build.op("lt", z, beta), inside, sub(z, mul(_c(0.5, z), beta)))


def _huber(x: Expr, y: Expr, delta: Expr) -> Expr:
    z = _abs(sub(x, y))
    outside = mul(delta, sub(z, mul(_c(0.5, z), delta)))
    return build.where(build.op("le", z, delta), mul(mul(_c(0.5, z), z), z), outside)


def _soft_margin(x: Expr, y: Expr) -> Expr:
    return build.op("log1p", build.op("exp", mul(build.op("neg", y), x)))


def _squared_slope(x: Expr, y: Expr) -> Expr:
    return mul(_c(2.0, x), sub(x, y))


def _clipped(x: Expr, inside: Expr, limit: Expr, outside: Expr) -> Expr:
    """`inside` for |x| below the limit, else `outside` with the sign of `x`."""
    below = build.op("le", x, build.op("neg", limit))
    above = build.op("ge", x, limit)
    return build.where(below, build.op("neg", outside), build.where(above, outside, inside))


def _smooth_l1_slope(x: Expr, y: Expr, beta: Expr) -> Expr:
    difference = sub(x, y)
    return _clipped(difference, div(difference, beta), beta, _c(1.0, x))


def _huber_slope(x: Expr, y: Expr, delta: Expr) -> Expr:
    difference = sub(x, y)
    return _clipped(difference, difference, delta, delta)


def _soft_margin_slope(x: Expr, y: Expr, stored: torch.dtype) -> Expr:
    """Eager stores the exponential: where it overflows there, so does the quotient."""
    z = build.cast(build.cast(build.op("exp", mul(build.op("neg", y), x)), stored), x.dtype)
    return div(mul(build.op("neg", y), z), add(z, _c(1.0, z)))


def _loss(element: Callable[..., Expr]) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, x: Tensor, target: Tensor, reduction: int = MEAN,
                 *numbers: float) -> Tensor:  # fmt: skip
        x, target = _in(ctx, x, target)
        given = [number(v, x.dtype) for v in numbers or _defaults(element)]
        return _reduced(ctx, pointwise(lambda a, b: element(a, b, *given), x, target), reduction)

    return lowering


def _defaults(element: Callable[..., Expr]) -> list[float]:
    """The parameter of a loss (beta, delta) is one where the call leaves it out."""
    return [1.0] if element in (_smooth_l1, _huber) else []


def _loss_backward(slope: Callable[..., Expr]) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, grad: Tensor, x: Tensor, target: Tensor, reduction: int,
                 *numbers: float) -> Tensor:  # fmt: skip
        result = dtype_of(ctx)
        grad, x, target = _in(ctx, grad, x, target)
        given = [number(v, x.dtype) for v in numbers] if slope is not _soft_margin_slope else [
            result]  # fmt: skip
        slopes = pointwise(lambda a, b: slope(a, b, *given), x, target)
        return pointwise(mul, slopes, _spread(slopes, grad, reduction)).to(result)

    return lowering


def _spread(x: Tensor, grad: Tensor, reduction: int) -> Tensor:
    """The gradient that reaches each element of a reduced loss over `x`."""
    if reduction != MEAN:
        return grad
    count = number(x.numel, grad.dtype)
    return grad.map(lambda g: div(g, count))


for _packet, _backward_packet, _element, _slope in (
    (aten.mse_loss, aten.mse_loss_backward, _squared, _squared_slope),
    (aten.smooth_l1_loss, aten.smooth_l1_loss_backward, _smooth_l1, _smooth_l1_slope),
    (aten.huber_loss, aten.huber_loss_backward, _huber, _huber_slope),
    (aten.soft_margin_loss, aten.soft_margin_loss_backward, _soft_margin, _soft_margin_slope),
):
    lowers(_packet.default)(_loss(_element))
    lowers(_backward_packet.default)(_loss_backward(_slope))


# ---- binary cross entropy


def _bounded_log(log: Expr) -> Expr:
    return build.op("max", log, _c(-100.0, log))


def _cross_entropy(x: Expr, y: Expr) -> Expr:
    """Of a probability: anything else is an error."""
    x = build.require(x, build.both(build.op("ge", x, _c(0.0, x)), build.op("le", x, _c(1.0, x))))
    miss = mul(sub(y, _c(1.0, y)), _bounded_log(build.op("log1p", build.op("neg", x))))
    return sub(miss, mul(y, _bounded_log(build.op("log", x))))


def _weighted(losses: Tensor, weight: Tensor | None) -> Tensor:
    return losses if weight is None else apply(mul, losses, weight.to(losses.dtype))


@lowers(aten.binary_cross_entropy.default)
def _bce(ctx: Lowering, x: Tensor, target: Tensor, weight: Tensor | None = None,
         reduction: int = MEAN) -> Tensor:  # fmt: skip
    losses = pointwise(_cross_entropy, *_in(ctx, x, target))
    return _reduced(ctx, _weighted(losses, weight), reduction)


@lowers(aten.binary_cross_entropy_backward.default)
def _bce_backward(ctx: Lowering, grad: Tensor, x: Tensor, target: Tensor,
                  weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:  # fmt: skip
    def slope(g: Expr, a: Expr, b: Expr) -> Expr:
        scale = build.op("max", mul(sub(_c(1.0, a), a), a), _c(1e-12, a))
        return div(mul(g, sub(a, b)), scale)

    result = dtype_of(ctx)
    grad, values, target = _in(ctx, grad, x, target)
    slopes = pointwise(slope, _spread(values, grad, reduction), values, target)
    return _weighted(slopes, weight).to(result)


@lowers(aten.binary_cross_entropy_with_logits.default)
def _bce_with_logits(ctx: Lowering, x: Tensor, target: Tensor, weight: Tensor | None = None,
                     pos_weight: Tensor | None = None,
                     reduction: int = MEAN) -> Tensor:  # fmt: skip
    def element(a: Expr, b: Expr, *positive: Expr) -> Expr:
        tail = build.op("log1p", build.op("exp", build.op("neg", _abs(a))))
        minus_log_sigmoid = sub(tail, build.op("min", a, _c(0.0, a)))
        if positive:
            scale = add(mul(sub(positive[0], _c(1.0, a)), b), _c(1.0, a))
            minus_log_sigmoid = mul(scale, minus_log_sigmoid)
        return add(mul(sub(_c(1.0, b), b), a), minus_log_sigmoid)

    losses = pointwise(element, *_in(ctx, x, target, pos_weight))
    return _reduced(ctx, _weighted(losses, weight), reduction)


# ---- negative log likelihood


def _class_axis(t: Tensor) -> int:
    return 1 if t.rank > 1 else 0


def _labels(t: Tensor, target: Tensor, ignore_index: Expr | int) -> tuple[Tensor, Tensor]:
    """(whether a label counts, the label, or zero where it does not)."""
    labels = target.to(torch.int64)
    ignored = number(ignore_index, torch.int64)
    counts = labels.map(lambda y: build.op("ne", y, ignored))
    used = labels.map(lambda y: build.where(build.op("ne", y, ignored), y, ix.ZERO))
    return counts, used


def _class_weight(weight: Tensor | None, used: Tensor, counts: Tensor, classes: Expr,
                  dtype: torch.dtype) -> Tensor:  # fmt: skip
    """The weight of each label's class; zero where the label is ignored."""

    def taken(y: Expr, valid: Expr) -> Expr:
        if weight is None:
            return build.cast(valid, dtype)
        value = build.cast(weight.at([build.op("index", y, classes)]), dtype)
        return build.where(valid, value, const(0.0, dtype))

    return pointwise(taken, used, counts)


def _nll(ctx: Lowering, t: Tensor, target: Tensor, weight: Tensor | None, reduction: int,
         ignore_index: Expr | int) -> tuple[Tensor, Tensor]:  # fmt: skip
    result = dtype_of(ctx, 0)
    dtype = compute_type(t.dtype)
    axis = _class_axis(t)
    classes = t.size[axis]
    counts, used = _labels(t, target, ignore_index)
    weights = _class_weight(weight, used, counts, classes, dtype)

    def loss(*point: Expr) -> Expr:
        at = list(point)
        at.insert(axis, build.op("index", used.at(point), classes))
        value = mul(build.op("neg", build.cast(t.at(at), dtype)), weights.at(point))
        return build.where(counts.at(point), value, const(0.0, dtype))

    losses = from_indices(target.size, t.device, loss)
    nothing = full((), 0.0, result, t.device)
    if reduction == NONE and t.rank > 1:
        return losses.to(result), nothing
    dims = dims_of(losses, None)
    summed = fold(ctx, "sum", losses, dims, False)
    divisor = fold(ctx, "sum", weights, dims, False)
    if reduction == MEAN:
        return pointwise(div, summed, divisor).to(result), divisor.to(result)
    return summed.to(result), nothing if reduction == NONE else divisor.to(result)


def _nll_backward(ctx: Lowering, grad: Tensor, t: Tensor, target: Tensor, weight: Tensor | None,
                  reduction: int, ignore_index: Expr | int,
                  total_weight: Tensor) -> Tensor:  # fmt: skip
    """Each row is zero but at its label: computed where it is read, without a scatter."""
    result = dtype_of(ctx)
    dtype = compute_type(result)
    axis = _class_axis(t)
    if target.rank != t.rank - 1 or grad.rank not in (0, target.rank):
        raise Unsupported("one sample whose label or gradient is a vector: eager reads the first")
    counts, used = _labels(t, target, ignore_index)
    weights = _class_weight(weight, used, counts, t.size[axis], dtype)
    grad = grad.to(dtype)
    if reduction == MEAN:
        grad = pointwise(div, grad, total_weight.to(dtype))
    grads = grad  # one for each label, or one for all of them

    def element(*point: Expr) -> Expr:
        label = [p for d, p in enumerate(point) if d != axis]
        g = grads.at(label if grads.rank else ())
        value = mul(build.op("neg", weights.at(label)), g)
        hit = build.both(build.op("eq", used.at(label), point[axis]), counts.at(label))
        return build.where(hit, value, const(0.0, dtype))

    return from_indices(t.size, t.device, element).to(result)


lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)(_nll)
lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)(_nll_backward)
