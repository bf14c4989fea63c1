"""Activations and their gradients: one formula each, in the table at the end of the file.

Low-precision types are computed in float32 and rounded once, as eager's kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.lower import formula as f
from tilewright.lower.context import Lowering
from tilewright.lower.promote import KIND, compute_type, elementwise, promoted
from tilewright.lower.table import LoweringFn, Unsupported, lowers
from tilewright.lower.tensor import Tensor, from_indices, view

aten = torch.ops.aten

_SQRT_HALF = math.sqrt(0.5)
_TANH_BETA = math.sqrt(2 / math.pi)
_TANH_KAPPA = 0.044715
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


# ---- forward: the first operand is the input, the rest are the op's numbers


def _relu(x: Expr) -> Expr:
    return f.maximum(0, x)


def gelu(x: Expr, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        inner = f.mul(f.add(x, f.mul(f.mul(f.square(x), x), _TANH_KAPPA)), _TANH_BETA)
        return f.mul(f.mul(x, 0.5), f.add(f.tanh(inner), 1.0))
    return f.mul(f.mul(x, 0.5), f.add(f.erf(f.mul(x, _SQRT_HALF)), 1.0))


def _silu(x: Expr) -> Expr:
    return f.div(x, f.add(f.exp(f.neg(x)), 1.0))


def _mish(x: Expr) -> Expr:
    return f.mul(x, f.tanh(f.log1p(f.exp(x))))


def _relu6_shifted(x: Expr) -> Expr:
    return f.clamp(f.add(x, 3.0), 0.0, 6.0)


def _hardswish(x: Expr) -> Expr:
    return f.div(f.mul(x, _relu6_shifted(x)), 6.0)


def _hardsigmoid(x: Expr) -> Expr:
    return f.div(_relu6_shifted(x), 6.0)


def _hardtanh(x: Expr, low: float = -1, high: float = 1) -> Expr:
    return f.clamp(x, low, high)


def _elu(x: Expr, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Expr:
    negative = f.mul(f.expm1(f.mul(x, input_scale)), alpha * scale)
    return f.where(f.le(x, 0), negative, f.mul(x, scale))


def _celu(x: Expr, alpha: float = 1) -> Expr:
    return _elu(x, alpha, 1, 1 / alpha)


def _selu(x: Expr) -> Expr:
    return _elu(x, _SELU_ALPHA, _SELU_SCALE)


def _softplus(x: Expr, beta: float = 1, threshold: float = 20) -> Expr:
    scaled = f.mul(x, beta)
    return f.where(f.gt(scaled, threshold), x, f.div(f.log1p(f.exp(scaled)), beta))


def _leaky_relu(x: Expr, slope: float = 0.01) -> Expr:
    return f.where(f.gt(x, 0), x, f.mul(x, slope))


def _threshold(x: Expr, threshold: float, value: float) -> Expr:
    return f.where(f.le(x, threshold), value, x)


def _hardshrink(x: Expr, lambd: float = 0.5) -> Expr:
    return f.where(f.both(f.ge(x, -lambd), f.le(x, lambd)), 0.0, x)


def _softshrink(x: Expr, lambd: float = 0.5) -> Expr:
    shrunk = f.where(f.lt(x, -lambd), f.add(x, lambd), f.mul(x, 0.0))
    return f.where(f.gt(x, lambd), f.sub(x, lambd), shrunk)


# ---- backward: the gradient, then what the op takes


def _sigmoid_backward(g: Expr, y: Expr) -> Expr:
    return f.mul(f.mul(g, f.sub(1.0, y)), y)


def _tanh_backward(g: Expr, y: Expr) -> Expr:
    return f.mul(g, f.sub(1.0, f.square(y)))


def _gelu_backward(g: Expr, x: Expr, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        return f.mul(g, _gelu_tanh_slope(x))
    cdf = f.mul(f.add(f.erf(f.mul(x, _SQRT_HALF)), 1.0), 0.5)
    pdf = f.mul(f.exp(f.mul(f.square(x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return f.mul(g, f.add(cdf, f.mul(x, pdf)))


def _gelu_tanh_slope(x: Expr) -> Expr:
    squared = f.square(x)
    t = f.tanh(f.mul(f.add(x, f.mul(f.mul(squared, x), _TANH_KAPPA)), _TANH_BETA))
    inner = f.mul(f.add(f.mul(squared, 3 * _TANH_KAPPA), 1.0), _TANH_BETA)
    left = f.mul(f.add(t, 1.0), 0.5)
    right = f.mul(f.mul(f.mul(x, 0.5), f.sub(1.0, f.square(t))), inner)
    return f.add(left, right)


def _silu_backward(g: Expr, x: Expr) -> Expr:
    s = f.sigmoid(x)
    return f.mul(f.mul(g, s), f.add(f.mul(x, f.sub(1.0, s)), 1.0))


def _mish_backward(g: Expr, x: Expr) -> Expr:
    t = f.tanh(f.log1p(f.exp(x)))
    slope = f.mul(f.mul(x, f.sigmoid(x)), f.sub(1.0, f.square(t)))
    return f.mul(g, f.add(t, slope))


def _hardswish_backward(g: Expr, x: Expr) -> Expr:
    middle = f.mul(g, f.add(f.div(x, 3.0), 0.5))
    return f.where(f.le(x, -3.0), 0.0, f.where(f.lt(x, 3.0), middle, g))


def _hardsigmoid_backward(g: Expr, x: Expr) -> Expr:
    inside = f.both(f.gt(x, -3.0), f.lt(x, 3.0))
    return f.where(inside, f.mul(g, 1 / 6), 0.0)


def _hardtanh_backward(g: Expr, x: Expr, low: float, high: float) -> Expr:
    return f.where(f.either(f.le(x, low), f.ge(x, high)), 0.0, g)


def _softplus_backward(g: Expr, x: Expr, beta: float, threshold: float) -> Expr:
    scaled = f.mul(x, beta)
    z = f.exp(scaled)
    return f.where(f.gt(scaled, threshold), g, f.div(f.mul(g, z), f.add(z, 1.0)))


def _leaky_relu_backward(g: Expr, x: Expr, slope: float, is_result: bool = False) -> Expr:
    return f.where(f.gt(x, 0), g, f.mul(g, slope))


def _threshold_backward(g: Expr, x: Expr, threshold: float) -> Expr:
    return f.where(f.le(x, threshold), 0, g)


def _shrink_backward(g: Expr, x: Expr, lambd: float) -> Expr:
    return f.where(f.both(f.ge(x, -lambd), f.le(x, lambd)), 0.0, g)


def _prelu(x: Expr, weight: Expr) -> Expr:
    return f.where(f.gt(x, 0), x, f.mul(x, weight))


# ---- registration


def _activation(fn: Callable[..., Expr], tensors: int) -> LoweringFn:
    """A lowering whose first `tensors` arguments are tensors and whose others are numbers."""

    def lowering(ctx: Lowering, *args: Any, **kwargs: Any) -> Tensor:
        numbers = (*args[tensors:], *kwargs.values())
        if any(isinstance(n, Expr) for n in numbers):
            raise Unsupported("a parameter that is known only at run time")
        return elementwise(ctx, lambda *values: fn(*values, *args[tensors:], **kwargs),
                           *args[:tensors])  # fmt: skip

    return lowering


_FORWARD: list[tuple[Any, Callable[..., Expr]]] = [
    (aten.relu, _relu),
    (aten.gelu, gelu),
    (aten.silu, _silu),
    (aten.mish, _mish),
    (aten.hardswish, _hardswish),
    (aten.hardsigmoid, _hardsigmoid),
    (aten.hardtanh, _hardtanh),
    (aten.elu, _elu),
    (aten.celu, _celu),
    (aten.selu, _selu),
    (aten.softplus, _softplus),
    (aten.leaky_relu, _leaky_relu),
    (aten.threshold, _threshold),
    (aten.hardshrink, _hardshrink),
    (aten.softshrink, _softshrink),
]

_BACKWARD: list[tuple[Any, Callable[..., Expr]]] = [
    (aten.sigmoid_backward, _sigmoid_backward),
    (aten.tanh_backward, _tanh_backward),
    (aten.gelu_backward, _gelu_backward),
    (aten.silu_backward, _silu_backward),
    (aten.mish_backward, _mish_backward),
    (aten.hardswish_backward, _hardswish_backward),
    (aten.hardsigmoid_backward, _hardsigmoid_backward),
    (aten.hardtanh_backward, _hardtanh_backward),
    (aten.softplus_backward, _softplus_backward),
    (aten.leaky_relu_backward, _leaky_relu_backward),
    (aten.threshold_backward, _threshold_backward),
    (aten.hardshrink_backward, _shrink_backward),
    (aten.softshrink_backward, _shrink_backward),
    (aten._prelu_kernel, _prelu),
]

for _packet, _fn in _FORWARD:
    lowers(_packet.default)(_activation(_fn, 1))
for _packet, _fn in _BACKWARD:
    lowers(_packet.default)(_activation(_fn, 2))


@lowers(aten.elu_backward.default)
def elu_backward(ctx: Lowering, g: Tensor, alpha: float, scale: float, input_scale: float,
                 is_result: bool, x: Tensor) -> Tensor:  # fmt: skip
    """`x` is elu's input, or its result: the slope follows from either."""

    def body(d: Expr, a: Expr) -> Expr:
        power = a if is_result else f.exp(f.mul(a, input_scale))
        slope = f.add(power, alpha * scale) if is_result else f.mul(power, alpha * scale)
        return f.where(f.le(a, 0), f.mul(f.mul(d, input_scale), slope), f.mul(d, scale))

    return elementwise(ctx, body, g, x)


@lowers(aten._prelu_kernel_backward.default)
def prelu_backward(ctx: Lowering, g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    to_input = elementwise(ctx, lambda d, a, w: f.where(f.gt(a, 0), d, f.mul(w, d)), g, x, weight)
    to_weight = elementwise(
        ctx, lambda d, a, w: f.where(f.gt(a, 0), 0.0, f.mul(a, d)), g, x, weight
    )
    return to_input, to_weight


# ---- logit: eager rounds every step of it in low precision


@lowers(aten.logit.default)
def logit(ctx: Lowering, x: Tensor, eps: float | None = None) -> Tensor:
    dtype = _between(x, promoted(ctx, (x,), KIND.INT_TO_FLOAT)[1])

    def body(a: Expr) -> Expr:
        if eps is not None and eps >= 0:
            low = f.rounded(f.like(eps, a), dtype)
            high = f.rounded(f.sub(1.0, low), dtype)
            a = f.where(f.lt(a, low), low, f.where(f.gt(a, high), high, a))
        return f.log(f.rounded(f.div(a, f.rounded(f.sub(1.0, a), dtype)), dtype))

    return elementwise(ctx, body, x, kind=KIND.INT_TO_FLOAT)


@lowers(aten.logit_backward.default)
def logit_backward(ctx: Lowering, g: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    dtype = _between(x, x.dtype)

    def body(d: Expr, a: Expr) -> Expr:
        rest = f.rounded(f.sub(1.0, a), dtype)
        slope = f.div(d, f.rounded(f.mul(a, rest), dtype))
        if eps is None or eps < 0:
            return f.where(f.either(f.lt(a, 0.0), f.gt(a, 1.0)), math.nan, slope)
        low = f.rounded(f.like(eps, a), dtype)
        high = f.rounded(f.sub(1.0, low), dtype)
        return f.where(f.either(f.lt(a, low), f.gt(a, high)), 0.0, slope)

    return elementwise(ctx, body, g, x)


def _between(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What eager rounds to on the way: the CPU's kernels their own type, a card's do not."""
    return dtype if x.device.type == "cpu" else compute_type(dtype)


# ---- gated linear unit: one half gates the other


@lowers(aten.glu.default)
def glu(ctx: Lowering, x: Tensor, dim: int = -1) -> Tensor:
    dim %= x.rank
    value, gate, _ = _halves(x, dim)
    return elementwise(ctx, lambda a, b: f.mul(a, f.sigmoid(b)), value, gate)


@lowers(aten.glu_backward.default)
def glu_backward(ctx: Lowering, g: Tensor, x: Tensor, dim: int) -> Tensor:
    dim %= x.rank
    value, gate, half = _halves(x, dim)

    def to_value(d: Expr, b: Expr) -> Expr:
        return f.mul(f.sigmoid(b), d)

    def to_gate(d: Expr, a: Expr, b: Expr) -> Expr:
        s = f.sigmoid(b)
        return f.mul(f.mul(f.mul(f.sub(1.0, s), s), d), a)

    first = elementwise(ctx, to_value, g, gate)
    second = elementwise(ctx, to_gate, g, value, gate)

    def joined(*indices: Expr) -> Expr:
        i = indices[dim]
        low = build.op("lt", i, half)
        back = [ix.sub(i, half) if k == dim else p for k, p in enumerate(indices)]
        ahead = build.guard(second.at(back), build.op("bit_not", low))
        return build.where(low, build.guard(first.at(indices), low), ahead)

    return from_indices(x.size, x.device, joined)


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Expr]:
    half = ix.floordiv(x.size[dim], 2)
    size = tuple(half if k == dim else s for k, s in enumerate(x.size))

    def second(*indices: Expr) -> list[Expr]:
        return [ix.add(i, half) if k == dim else i for k, i in enumerate(indices)]

    return view(x, size, lambda *indices: indices), view(x, size, second), half


# ---- randomised leaky relu


@lowers(aten.rrelu_with_noise_backward.default)
def rrelu_backward(ctx: Lowering, g: Tensor, x: Tensor, noise: Tensor, lower: float, upper: float,
                   training: bool, is_result: bool) -> Tensor:  # fmt: skip
    if training and upper - lower > 1e-6:
        return elementwise(ctx, f.mul, g, noise)
    return elementwise(ctx, lambda d, a: _leaky_relu_backward(d, a, (lower + upper) / 2), g, x)
