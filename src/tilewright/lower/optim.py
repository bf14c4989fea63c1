"""Ops over lists of tensors: `_foreach_*`, and the fused optimiser steps.

A foreach op is its base op applied to every element, so it is looked up in the op table when it is
met. A fused step is written in the formulas ATen's own kernel uses; scalars that depend on the step
number alone are computed in float64, once per tensor, not once per element.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir.expr import Expr, const
from tilewright.lower.context import Lowering
from tilewright.lower.promote import compute_type, scalar
from tilewright.lower.table import LOWERINGS, Unsupported, lowers
from tilewright.lower.tensor import Tensor, pointwise

aten = torch.ops.aten

Tensors = Sequence[Tensor]


# ---- foreach

UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "clone", "cos", "cosh", "erf", "erfc", "exp", "expm1",
    "floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "max", "neg", "reciprocal", "round",
    "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip

# Foreach op and overload -> base op. Lists are taken apart, other arguments are passed on.
COMPOUND: dict[str, dict[str, Any]] = {
    **{
        name: dict.fromkeys(overloads, getattr(aten, name).Tensor)
        for name, overloads in (
            ("add", ("List", "Scalar", "ScalarList", "Tensor")),
            ("sub", ("List", "Scalar", "ScalarList")),
            ("mul", ("List", "Scalar", "ScalarList", "Tensor")),
            ("div", ("List", "Scalar", "ScalarList", "Tensor")),
        )
    },
    **{
        name: dict.fromkeys(("List", "Scalar", "ScalarList"), base)
        for name, base in (
            ("maximum", aten.maximum.default),
            ("minimum", aten.minimum.default),
            ("clamp_min", aten.maximum.default),
            ("clamp_max", aten.minimum.default),
        )
    },
    "pow": {
        "List": aten.pow.Tensor_Tensor,
        "Scalar": aten.pow.Tensor_Scalar,
        "ScalarList": aten.pow.Tensor_Scalar,
        "ScalarAndTensor": aten.pow.Scalar,
    },
    "lerp": {
        "List": aten.lerp.Tensor,
        "Scalar": aten.lerp.Scalar,
        "ScalarList": aten.lerp.Scalar,
    },
    "copy": {"default": aten.copy.default},
    "zero": {"default": aten.zeros_like.default},
}


def _each(base: Any) -> Callable[..., list[Any]]:
    def lowering(ctx: Lowering, *args: Any, **kwargs: Any) -> list[Any]:
        return _over_elements(ctx, lambda *a: _base(base)(ctx, *a, **kwargs), args)

    return lowering


def _base(target: Any) -> Callable[..., Any]:
    found = LOWERINGS.get(target)
    if found is None:
        raise Unsupported(f"{target} has no lowering to apply to each tensor")
    return found


def _over_elements(ctx: Lowering, fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """`fn` of the k-th of every list; what is not a list is the same for all.

    While `fn` runs, the current node is the one that takes element k, so that its fake value is
    the element's; an element that nothing takes is not computed.
    """
    node = ctx.node
    assert node is not None
    takers = {n.args[1]: n for n in node.users if n.target is operator.getitem}
    results: list[Any] = []
    try:
        for k in range(max(len(a) for a in args if isinstance(a, (list, tuple)))):
            ctx.node = takers.get(k)
            element = [a[k] if isinstance(a, (list, tuple)) else a for a in args]
            results.append(None if ctx.node is None else fn(*element))
    finally:
        ctx.node = node
    return results


def _ternary(base: Any) -> Callable[..., list[Any]]:
    """`addcmul` and `addcdiv`, whose factor is a number, one number each, or a tensor of them."""

    def lowering(ctx: Lowering, x: Tensors, a: Tensors, b: Tensors, value: Any = 1) -> list[Any]:
        if isinstance(value, Tensor):
            factors = value
            value = [factors.at([const(k)] if factors.rank else []) for k in range(len(x))]
        return _over_elements(
            ctx, lambda p, q, r, v: _base(base)(ctx, p, q, r, value=v), (x, a, b, value)
        )

    return lowering


@lowers(aten._foreach_norm.Scalar)
def foreach_norm(ctx: Lowering, x: Tensors, ord: Any = 2, dtype: Any = None) -> list[Any]:
    base = _base(aten.linalg_vector_norm.default)
    return _over_elements(ctx, lambda t: base(ctx, t, ord, None, False, dtype=dtype), (x,))


def _register() -> None:
    for name in UNARY:
        packet = getattr(aten, f"_foreach_{name}", None)
        if packet is not None:  # some came after torch 2.11
            lowers(packet.default)(_each(getattr(aten, name).default))
    for name, overloads in COMPOUND.items():
        packet = getattr(aten, f"_foreach_{name}")
        for overload, base in overloads.items():
            lowers(getattr(packet, overload))(_each(base))
    for name in ("addcmul", "addcdiv"):
        packet = getattr(aten, f"_foreach_{name}")
        fn = _ternary(getattr(aten, name).default)
        for overload in ("Scalar", "ScalarList", "Tensor"):
            lowers(getattr(packet, overload))(fn)


_register()


# ---- arithmetic of the fused steps


def _number(value: Any, dtype: torch.dtype) -> Tensor:
    """A Python number, a run-time number or a tensor of one element, as a scalar of `dtype`."""
    if isinstance(value, Tensor):
        body = value.at([const(0)] * value.rank)
    else:
        body = scalar(value, torch.float64)
    return Tensor((), dtype, torch.device("cpu"), build.cast(body, dtype))


def _op(name: str) -> Callable[..., Tensor]:
    def apply(*operands: Tensor | float) -> Tensor:
        dtype = next(t.dtype for t in operands if isinstance(t, Tensor))
        tensors = [t if isinstance(t, Tensor) else _number(t, dtype) for t in operands]
        return pointwise(lambda *e: build.op(name, *e), *tensors)

    return apply


add, sub, mul, div, maximum = (_op(name) for name in ("add", "sub", "mul", "div", "max"))
sqrt, neg = _op("sqrt"), _op("neg")


class Step:
    """What every fused step shares: the gradient as given, and whether the step is skipped."""

    def __init__(self, ctx: Lowering, grad_scale: Any, found_inf: Any) -> None:
        self.ctx = ctx
        self.scale = None if grad_scale is None else _number(grad_scale, torch.float32)
        self.skip = None if found_inf is None else _number(found_inf, torch.float32)

    def gradient(self, grad: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
        """(the unscaled gradient, which is also stored, and the one to follow)."""
        value = grad.to(compute_type(grad.dtype))
        if self.scale is not None:
            value = div(value, self.scale.to(value.dtype))
        return value, neg(value) if maximize else value

    def scalar(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """A number computed once for a whole tensor."""
        return self.ctx.realize(value.to(dtype))

    def result(self, new: Tensor, old: Tensor) -> Tensor:
        """`new` with the type of `old`; `old` itself where the step is skipped."""
        rounded = new.to(old.dtype)
        if self.skip is None:
            return rounded
        skipped = self.skip.map(lambda e: build.op("eq", e, const(1, torch.float32)))
        return pointwise(build.where, skipped, old, rounded)


# ---- the fused steps


def _adam(decoupled: bool) -> Callable[..., Any]:
    def lowering(
        ctx: Lowering, params: Tensors, grads: Tensors, averages: Tensors, squares: Tensors,
        maxima: Tensors, steps: Tensors, *, lr: Any, beta1: float, beta2: float,
        weight_decay: float, eps: float, amsgrad: bool, maximize: bool, grad_scale: Any = None,
        found_inf: Any = None,
    ) -> tuple[list[Tensor], ...]:  # fmt: skip
        step = Step(ctx, grad_scale, found_inf)
        rate = _number(lr, torch.float64)
        columns: list[list[Tensor]] = [[], [], [], [], []]
        for k, (param, grad, average, square) in enumerate(
            zip(params, grads, averages, squares, strict=True)
        ):
            dtype = compute_type(param.dtype)
            stored_grad, g = step.gradient(grad, maximize)
            p, m, v = param.to(dtype), average.to(dtype), square.to(dtype)
            if weight_decay != 0 and decoupled:
                p = sub(p, mul(p, mul(_number(lr, dtype), weight_decay)))
            elif weight_decay != 0:
                g = add(g, mul(p, weight_decay))
            m = add(m, mul(sub(g, m), 1 - beta1))
            v = add(mul(v, beta2), mul(mul(g, g), 1 - beta2))
            count = _number(steps[k], torch.float64)
            size = step.scalar(div(rate, _bias_correction(beta1, count)), dtype)
            root = step.scalar(sqrt(_bias_correction(beta2, count)), dtype)
            largest = maximum(maxima[k].to(dtype), v) if amsgrad else v
            p = sub(p, div(mul(m, size), add(div(sqrt(largest), root), eps)))
            new = [(p, param), (stored_grad, grad), (m, average), (v, square)]
            new += [(largest, maxima[k])] if amsgrad else []
            for column, (value, old) in zip(columns, new, strict=False):
                column.append(step.result(value, old))
        if not amsgrad:
            columns[4] = list(maxima)
        return tuple(columns)

    return lowering


def _bias_correction(beta: float, count: Tensor) -> Tensor:
    return count.map(lambda e: _one_minus(_power(beta, e)))


def _power(base: float, exponent: Expr) -> Expr:
    return build.op("pow", const(base, torch.float64), exponent)


def _one_minus(e: Expr) -> Expr:
    return build.op("sub", const(1, torch.float64), e)


lowers(aten._fused_adam.default, aten._fused_adam.tensor_lr)(_adam(decoupled=False))
lowers(aten._fused_adamw.default, aten._fused_adamw.tensor_lr)(_adam(decoupled=True))


@lowers(aten._fused_sgd.default, aten._fused_sgd.tensor_lr)
def fused_sgd(
    ctx: Lowering, params: Tensors, grads: Tensors, buffers: Tensors, *, weight_decay: float,
    momentum: float, lr: Any, dampening: float, nesterov: bool, maximize: bool,
    is_first_step: bool, grad_scale: Any = None, found_inf: Any = None,
) -> tuple[list[Tensor], ...]:  # fmt: skip
    step = Step(ctx, grad_scale, found_inf)
    columns: list[list[Tensor]] = [[], [], []]
    for k, (param, grad) in enumerate(zip(params, grads, strict=True)):
        dtype = compute_type(param.dtype)
        stored_grad, g = step.gradient(grad, maximize)
        p = param.to(dtype)
        if weight_decay != 0:
            g = add(g, mul(p, weight_decay))
        if momentum != 0:
            old = buffers[k]
            buffer = g if is_first_step else add(
                mul(old.to(dtype), momentum), mul(g, 1 - dampening))  # fmt: skip
            columns[2].append(step.result(buffer, old))
            g = add(g, mul(buffer, momentum)) if nesterov else buffer
        columns[0].append(step.result(sub(p, mul(g, _number(lr, dtype))), param))
        columns[1].append(step.result(stored_grad, grad))
    if momentum == 0:
        columns[2] = list(buffers)
    return tuple(columns)


@lowers(aten._fused_adagrad.default, aten._fused_adagrad.tensor_lr)
def fused_adagrad(
    ctx: Lowering, params: Tensors, grads: Tensors, sums: Tensors, steps: Tensors, *, lr: Any,
    lr_decay: float, weight_decay: float, eps: float, maximize: bool, grad_scale: Any = None,
    found_inf: Any = None,
) -> tuple[list[Tensor], ...]:  # fmt: skip
    step = Step(ctx, grad_scale, found_inf)
    rate = _number(lr, torch.float64)
    columns: list[list[Tensor]] = [[], [], []]
    for param, grad, total, count in zip(params, grads, sums, steps, strict=True):
        dtype = compute_type(param.dtype)
        stored_grad, g = step.gradient(grad, maximize)
        p = param.to(dtype)
        if weight_decay != 0:
            g = add(g, mul(p, weight_decay))
        s = add(total.to(dtype), mul(g, g))
        passed = sub(_number(count, torch.float64), 1.0)
        size = step.scalar(div(rate, add(mul(passed, lr_decay), 1.0)), dtype)
        p = sub(p, div(mul(g, size), add(sqrt(s), eps)))
        for column, value, old in zip(columns, (p, stored_grad, s), (param, grad, total),
                                      strict=True):  # fmt: skip
            column.append(step.result(value, old))
    return (*columns, list(steps))
