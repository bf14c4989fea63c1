"""Pointwise maths: arithmetic, comparison, logic, bits, powers, special functions, selection.

Formulas are eager's CPU ones, computed in float32 for low-precision types and rounded once.
Activations and their gradients are in `activations.py`; casts and copies in `casts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.ops import POLYNOMIALS
from tilewright.lower import formula as f
from tilewright.lower.context import Lowering
from tilewright.lower.promote import (
    KIND,
    LOW_PRECISION,
    Operand,
    compute_type,
    elementwise,
    operand,
    promoted,
    scalar,
)
from tilewright.lower.table import LoweringFn, Unsupported, lowers
from tilewright.lower.tensor import Tensor, broadcast_size, expand, from_indices, pointwise

aten = torch.ops.aten


def _one(fn: Callable[[Expr], Expr], kind: KIND) -> LoweringFn:
    def lowering(ctx: Lowering, x: Tensor) -> Tensor:
        return elementwise(ctx, fn, x, kind=kind)

    return lowering


def _two(fn: Callable[[Expr, Expr], Expr], kind: KIND) -> LoweringFn:
    """Two operands, each a tensor or a number, rounded to their common type first."""

    def lowering(ctx: Lowering, a: Operand, b: Operand) -> Tensor:
        return elementwise(ctx, fn, a, b, kind=kind, rounds=2)

    return lowering


def _unless_integer(fn: Callable[[Expr], Expr]) -> Callable[[Expr], Expr]:
    """Integers are whole, finite and real already: for them the op changes nothing."""
    return lambda x: fn(x) if x.dtype.is_floating_point else x


# ---- one operand


def _sinc(x: Expr) -> Expr:
    scaled = f.mul(x, math.pi)
    return f.where(f.eq(x, 0), 1.0, f.div(f.sin(scaled), scaled))


def _angle(x: Expr) -> Expr:
    return f.where(f.isnan(x), x, f.where(f.lt(x, 0), math.pi, f.like(0.0, x)))


def _entr(x: Expr) -> Expr:
    inside = f.mul(f.neg(x), f.log(x))
    outside = f.where(f.eq(x, 0), 0.0, f.like(-math.inf, x))
    return f.where(f.isnan(x), x, f.where(f.gt(x, 0), inside, outside))


def _trigamma(x: Expr) -> Expr:
    """Reflection to the right half line, six steps up, then the asymptotic series."""
    mirrored = f.lt(x, 0.5)
    sine = f.sin(f.mul(x, math.pi))
    y = f.where(mirrored, f.sub(1.0, x), x)
    total = f.where(mirrored, f.neg(f.div(math.pi**2, f.square(sine))), 0.0)
    for _ in range(6):
        total = f.add(total, f.reciprocal(f.square(y)))
        y = f.add(y, 1.0)
    r = f.reciprocal(f.square(y))
    series = f.mul(r, f.sub(1 / 6, f.mul(r, f.sub(1 / 30, f.mul(r, 1 / 42)))))
    half = f.reciprocal(f.mul(y, 2.0))
    total = f.add(total, f.div(f.add(f.add(half, 1.0), series), y))
    return f.where(mirrored, f.neg(total), total)


def _is_infinite(sign: float | None) -> Callable[[Expr], Expr]:
    def test(x: Expr) -> Expr:
        if not x.dtype.is_floating_point:
            return build.FALSE
        return f.is_infinite(x) if sign is None else f.eq(x, sign * math.inf)

    return test


def _is_nan(x: Expr) -> Expr:
    return f.isnan(x) if x.dtype.is_floating_point else build.FALSE


def _truth(x: Expr) -> Expr:
    return build.cast(x, torch.bool)


_FLOAT_ROWS = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "digamma", "erf", "erfc",
    "erfinv", "exp", "exp2", "expm1", "i0", "lgamma", "log", "log10", "log1p", "log2", "rsqrt",
    "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "special_airy_ai", "special_bessel_j0",
    "special_bessel_j1", "special_bessel_y0", "special_bessel_y1", "special_erfcx",
    "special_i1", "special_i1e", "special_log_ndtr", "special_modified_bessel_i0",
    "special_modified_bessel_i1", "special_modified_bessel_k0", "special_modified_bessel_k1",
    "special_ndtri", "special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1",
    "special_spherical_bessel_j0",
)  # fmt: skip
"""ATen ops that are one row of `ir.ops.TABLE`; integers become floats."""

for _name in _FLOAT_ROWS:
    _row = f.unary(_name.removeprefix("special_"))
    lowers(getattr(aten, _name).default)(_one(_row, KIND.INT_TO_FLOAT))


@lowers(aten.special_i0e.default)
def _i0e(ctx: Lowering, x: Tensor) -> Tensor:
    if x.dtype in LOW_PRECISION:
        raise Unsupported("eager computes it in float32 by vectors, and the rest in its own type")
    return _one(f.unary("i0e"), KIND.INT_TO_FLOAT)(ctx, x)


_ONE: list[tuple[Any, Callable[[Expr], Expr], KIND]] = [
    (aten.reciprocal, f.reciprocal, KIND.INT_TO_FLOAT),
    (aten.sinc, _sinc, KIND.INT_TO_FLOAT),
    (aten.special_entr, _entr, KIND.INT_TO_FLOAT),
    (aten.angle, _angle, KIND.INT_TO_FLOAT),
    (aten.deg2rad, lambda x: f.mul(x, math.pi / 180), KIND.INT_TO_FLOAT),
    (aten.rad2deg, lambda x: f.mul(x, 180 / math.pi), KIND.INT_TO_FLOAT),
    (aten.abs, f.abs_, KIND.DEFAULT),
    (aten.neg, f.neg, KIND.DEFAULT),
    (aten._neg_view, f.neg, KIND.DEFAULT),
    (aten.sign, f.unary("sign"), KIND.DEFAULT),
    (aten.sgn, f.unary("sign"), KIND.DEFAULT),
    (aten.frac, lambda x: f.sub(x, f.trunc(x)), KIND.DEFAULT),
    (aten.bitwise_not, f.not_, KIND.DEFAULT),
    (aten.floor, _unless_integer(f.unary("floor")), KIND.DEFAULT),
    (aten.ceil, _unless_integer(f.unary("ceil")), KIND.DEFAULT),
    (aten.trunc, _unless_integer(f.trunc), KIND.DEFAULT),
    (aten.round, _unless_integer(f.round_), KIND.DEFAULT),
    (aten.isnan, _is_nan, KIND.ALWAYS_BOOL),
    (aten.isinf, _is_infinite(None), KIND.ALWAYS_BOOL),
    (aten.isposinf, _is_infinite(1.0), KIND.ALWAYS_BOOL),
    (aten.isneginf, _is_infinite(-1.0), KIND.ALWAYS_BOOL),
    (aten.signbit, f.unary("signbit"), KIND.ALWAYS_BOOL),
    (aten.logical_not, lambda x: f.not_(_truth(x)), KIND.ALWAYS_BOOL),
]

for _packet, _fn, _kind in _ONE:
    lowers(_packet.default)(_one(_fn, _kind))


@lowers(aten.round.decimals)
def round_decimals(ctx: Lowering, x: Tensor, *, decimals: int = 0) -> Tensor:
    scale = float(10 ** abs(decimals))

    def body(a: Expr) -> Expr:
        if decimals < 0:
            return f.mul(f.round_(f.div(a, scale)), scale)
        return f.div(f.round_(f.mul(a, scale)), scale)

    return elementwise(ctx, _unless_integer(body), x)


@lowers(aten.polygamma.default)
def polygamma(ctx: Lowering, n: int, x: Tensor) -> Tensor:
    def body(a: Expr) -> Expr:
        if n == 0:
            return build.op("digamma", a)
        if n == 1:
            return _trigamma(a)
        factor = math.exp(math.lgamma(n + 1)) * (1 if n % 2 else -1)
        return f.mul(build.op("zeta", f.like(n + 1, a), a), factor)

    return elementwise(ctx, body, x, kind=KIND.INT_TO_FLOAT)


@lowers(aten.nan_to_num.default)
def nan_to_num(ctx: Lowering, x: Tensor, nan: float | None = None, posinf: float | None = None,
               neginf: float | None = None) -> Tensor:  # fmt: skip
    if not x.dtype.is_floating_point:
        return x
    info = torch.finfo(x.dtype)
    high = f.literal(info.max if posinf is None else posinf, x.dtype)
    low = f.literal(info.min if neginf is None else neginf, x.dtype)
    other = f.literal(0.0 if nan is None else nan, x.dtype)

    def body(a: Expr) -> Expr:
        top, bottom, hole = (build.cast(e, a.dtype) for e in (high, low, other))
        infinite = f.where(f.eq(a, -math.inf), bottom, a)
        infinite = f.where(f.eq(a, math.inf), top, infinite)
        return f.where(f.isnan(a), hole, infinite)

    return elementwise(ctx, body, x)


@lowers(aten.frexp.Tensor)
def frexp(ctx: Lowering, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mantissa in [0.5, 1) and exponent, taken from the bits; subnormals are scaled up first."""
    wide = x.to(compute_type(x.dtype))
    bits, width, bias = (
        (torch.int64, 52, 1022) if wide.dtype == torch.float64 else (torch.int32, 23, 126)
    )
    field = (1 << (11 if bits == torch.int64 else 8)) - 1

    def parts(a: Expr) -> tuple[Expr, Expr, Expr]:
        small = f.lt(f.abs_(a), torch.finfo(a.dtype).tiny)
        scaled = build.op("bitcast", f.where(small, f.mul(a, 2.0**60), a), arg=bits)
        exponent = f.both(f.shr(scaled, width), field)
        kept = f.both(scaled, ~(field << width))
        mantissa = build.op("bitcast", f.either(kept, bias << width), arg=a.dtype)
        offset = f.where(small, f.like(bias + 60, exponent), bias)
        plain = f.either(f.eq(a, 0), f.either(f.is_infinite(a), f.isnan(a)))
        return plain, mantissa, f.sub(exponent, offset)

    def mantissa(a: Expr) -> Expr:
        plain, value, _ = parts(a)
        return f.where(plain, a, value)

    def exponent(a: Expr) -> Expr:
        plain, _, value = parts(a)
        return build.cast(f.where(plain, 0, value), torch.int32)

    return wide.map(mantissa).to(x.dtype), wide.map(exponent)


# ---- arithmetic of two operands


def _scaled(value: Expr, factor: Any) -> Expr:
    """`value * factor`; a factor of one costs nothing."""
    if isinstance(factor, Expr):
        return f.mul(value, build.cast(factor, value.dtype))
    return f.mul(value, factor)


def _sum(ctx: Lowering, row: str, a: Operand, b: Operand, alpha: Any) -> Tensor:
    if alpha == 1:
        return elementwise(ctx, f.binary(row), a, b, rounds=2)
    dtype = promoted(ctx, (a, b))[1]

    def body(x: Expr, y: Expr) -> Expr:
        return build.op(row, x, f.mul(y, build.cast(scalar(alpha, dtype), y.dtype)))

    return elementwise(ctx, body, a, b, rounds=2)


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(ctx: Lowering, a: Operand, b: Operand, alpha: Any = 1) -> Tensor:
    return _sum(ctx, "add", a, b, alpha)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: Lowering, a: Operand, b: Operand, alpha: Any = 1) -> Tensor:
    return _sum(ctx, "sub", a, b, alpha)


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: Lowering, a: Operand, b: Operand, alpha: Any = 1) -> Tensor:
    return _sum(ctx, "sub", b, a, alpha)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(ctx: Lowering, a: Operand, b: Operand) -> Tensor:
    return elementwise(ctx, f.mul, a, b, rounds=1)


@lowers(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar)
def div(ctx: Lowering, a: Operand, b: Operand) -> Tensor:
    return elementwise(ctx, f.div, a, b, kind=KIND.INT_TO_FLOAT, rounds=1)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: Lowering, a: Operand, b: Operand, *, rounding_mode: str | None) -> Tensor:
    """Eager rounds every step of a low-precision quotient, unless the divisor is one number."""
    if rounding_mode is None:
        return div(ctx, a, b)
    row = {"trunc": "truncdiv", "floor": "floordiv"}[rounding_mode]
    computation, result = promoted(ctx, (a, b))
    if computation == result or not isinstance(b, Tensor) or not b.rank:
        return elementwise(ctx, f.binary(row), a, b, rounds=1)
    stepwise = _stepwise_trunc if rounding_mode == "trunc" else _stepwise_floor
    return elementwise(ctx, lambda x, y: stepwise(x, y, result), a, b, rounds=2)


def _stepwise_trunc(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    return f.trunc(f.rounded(f.div(a, b), dtype))


def _stepwise_floor(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """From the exact remainder, with every intermediate number rounded to `dtype`."""
    rest = f.rounded(build.op("fmod", a, b), dtype)
    quotient = f.rounded(f.div(f.rounded(f.sub(a, rest), dtype), b), dtype)
    opposite = f.both(f.ne(rest, 0), f.ne(f.lt(b, 0), f.lt(rest, 0)))
    quotient = f.where(opposite, f.rounded(f.sub(quotient, 1.0), dtype), quotient)
    low = build.op("floor", quotient)
    low = f.where(f.gt(f.sub(quotient, low), 0.5), f.add(low, 1.0), low)
    exact = f.div(a, b)
    low = f.where(f.eq(quotient, 0), build.op("copysign", f.like(0.0, a), exact), low)
    return f.where(f.eq(b, 0), exact, low)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(ctx: Lowering, a: Operand, b: Operand) -> Tensor:
    return div_mode(ctx, a, b, rounding_mode="floor")


@lowers(aten.addcmul.default)
def addcmul(ctx: Lowering, x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    def body(base: Expr, y: Expr, z: Expr) -> Expr:
        return f.add(base, f.mul(_scaled(y, value), z))

    return elementwise(ctx, body, x, a, b)


@lowers(aten.addcdiv.default)
def addcdiv(ctx: Lowering, x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    def body(base: Expr, y: Expr, z: Expr) -> Expr:
        return f.add(base, f.div(_scaled(y, value), z))

    return elementwise(ctx, body, x, a, b)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(ctx: Lowering, start: Tensor, end: Tensor, weight: Operand) -> Tensor:
    """From the nearer end, so that both ends are met exactly."""

    def body(a: Expr, b: Expr, w: Expr) -> Expr:
        step = f.sub(b, a)
        low = f.add(a, f.mul(w, step))
        high = f.sub(b, f.mul(step, f.sub(1.0, w)))
        return f.where(f.lt(f.abs_(w), 0.5), low, high)

    return elementwise(ctx, body, start, end, weight)


# ---- powers


@lowers(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: Lowering, x: Tensor, exponent: Any) -> Tensor:
    """Eager's special cases: small whole exponents multiply, halves take roots."""
    if isinstance(exponent, Expr):
        return pow_tensor(ctx, x, exponent)
    result = promoted(ctx, (x, exponent), KIND.BOOL_TO_LONG)[1]

    def square(a: Expr) -> Expr:  # eager's bfloat16 vectors round between the steps
        squared = f.square(a)
        return f.rounded(squared, result) if result == torch.bfloat16 else squared

    special: dict[float, Callable[[Expr], Expr]] = {
        0: lambda a: f.like(1, a),
        1: lambda a: a,
        2: f.square,
        3: lambda a: f.mul(square(a), a),
    }
    if result.is_floating_point:
        special |= {-1: f.reciprocal, -2: lambda a: f.reciprocal(square(a))}
    if result == torch.float16:  # eager takes powers here: unlike a root's, that of -inf is inf
        special[0.5] = lambda a: f.add(f.sqrt(f.where(f.eq(a, -math.inf), math.inf, a)), 0.0)
    elif result.is_floating_point:
        special |= {0.5: f.sqrt, -0.5: f.unary("rsqrt")}
    if exponent < 0 and not result.is_floating_point:
        raise Unsupported("a negative power of integers is eager's error to report")
    if exponent in special:
        fn = special[exponent]
        return elementwise(ctx, lambda a, _: fn(a), x, exponent, kind=KIND.BOOL_TO_LONG)
    return pow_tensor(ctx, x, exponent)


@lowers(aten.pow.Tensor_Tensor)
def pow_tensor(ctx: Lowering, x: Operand, exponent: Operand) -> Tensor:
    return elementwise(ctx, f.pow_, x, exponent, kind=KIND.BOOL_TO_LONG, rounds=2)


@lowers(aten.pow.Scalar)
def pow_number(ctx: Lowering, base: Any, exponent: Tensor) -> Tensor:
    if base == 2 and promoted(ctx, (base, exponent), KIND.BOOL_TO_LONG)[1].is_floating_point:
        return elementwise(ctx, lambda _, b: f.exp2(b), base, exponent, kind=KIND.BOOL_TO_LONG)
    return pow_tensor(ctx, base, exponent)


# ---- two operands


def _fextreme(larger: bool) -> Callable[[Expr, Expr], Expr]:
    """The extreme of two where NaN loses; of two zeros the first."""
    compare = f.ge if larger else f.le

    def body(a: Expr, b: Expr) -> Expr:
        wins = compare(a, b)
        return f.where(f.either(wins, _is_nan(b)), a, b)

    return body


def _heaviside(x: Expr, at_zero: Expr) -> Expr:
    return f.where(f.eq(x, 0), at_zero, build.cast(f.gt(x, 0), x.dtype))


def _log_sum(power: Callable[[Expr], Expr], scale: float) -> Callable[[Expr, Expr], Expr]:
    def body(a: Expr, b: Expr) -> Expr:
        same = f.both(f.is_infinite(a), f.eq(a, b))
        tail = f.log1p(power(f.neg(f.abs_(f.sub(a, b)))))
        return f.where(same, a, f.add(f.maximum(a, b), f.mul(tail, scale)))

    return body


def _lcm(a: Expr, b: Expr) -> Expr:
    divisor = build.op("gcd", a, b)
    quotient = build.op("truncdiv", a, f.where(f.eq(divisor, 0), 1, divisor))
    wide = a.dtype if a.dtype.itemsize >= 4 else torch.int32  # as in C: seen on overflow
    product = f.mul(build.cast(quotient, wide), build.cast(b, wide))
    return build.cast(f.abs_(product), a.dtype)


def _logical(row: str) -> Callable[[Expr, Expr], Expr]:
    return lambda a, b: build.op(row, _truth(a), _truth(b))


_TWO: list[tuple[Any, Callable[[Expr, Expr], Expr], KIND]] = [
    (aten.maximum, f.maximum, KIND.DEFAULT),
    (aten.minimum, f.minimum, KIND.DEFAULT),
    (aten.fmax, _fextreme(True), KIND.DEFAULT),
    (aten.fmin, _fextreme(False), KIND.DEFAULT),
    (aten.remainder, f.binary("mod"), KIND.DEFAULT),
    (aten.fmod, f.binary("fmod"), KIND.DEFAULT),
    (aten.gcd, f.binary("gcd"), KIND.DEFAULT),
    (aten.lcm, _lcm, KIND.DEFAULT),
    (aten.hypot, f.binary("hypot"), KIND.DEFAULT),
    (aten.atan2, f.binary("atan2"), KIND.INT_TO_FLOAT),
    (aten.copysign, f.binary("copysign"), KIND.INT_TO_FLOAT),
    (aten.igamma, f.binary("igamma"), KIND.DEFAULT),
    (aten.igammac, f.binary("igammac"), KIND.DEFAULT),
    (aten.special_zeta, f.binary("zeta"), KIND.INT_TO_FLOAT),
    *((getattr(aten, f"special_{name}"), f.binary(name), KIND.INT_TO_FLOAT)
      for name in POLYNOMIALS),
    (aten.heaviside, _heaviside, KIND.DEFAULT),
    (aten.logaddexp, _log_sum(f.exp, 1.0), KIND.DEFAULT),
    (aten.logaddexp2, _log_sum(f.exp2, 1 / math.log(2)), KIND.DEFAULT),
    *((getattr(aten, name), f.binary(name), KIND.ALWAYS_BOOL)
      for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    (aten.logical_and, _logical("bit_and"), KIND.ALWAYS_BOOL),
    (aten.logical_or, _logical("bit_or"), KIND.ALWAYS_BOOL),
    (aten.logical_xor, _logical("bit_xor"), KIND.ALWAYS_BOOL),
    (aten.bitwise_and, f.both, KIND.DEFAULT),
    (aten.bitwise_or, f.either, KIND.DEFAULT),
    (aten.bitwise_xor, f.binary("bit_xor"), KIND.DEFAULT),
    (aten.bitwise_left_shift, f.shl, KIND.DEFAULT),
    (aten.bitwise_right_shift, f.shr, KIND.DEFAULT),
    (aten.__lshift__, f.shl, KIND.DEFAULT),
    (aten.__rshift__, f.shr, KIND.DEFAULT),
]  # fmt: skip

_FORMS = ("default", "Tensor", "Scalar", "Scalar_Tensor", "Tensor_Scalar", "self_scalar",
          "other_scalar", "x_scalar", "n_scalar")  # fmt: skip

for _packet, _fn, _kind in _TWO:
    _overloads = [getattr(_packet, form) for form in _FORMS if form in _packet.overloads()]
    lowers(*_overloads)(_two(_fn, _kind))


def _xlog(log: Callable[[Expr], Expr]) -> LoweringFn:
    """`x * log(y)`, zero where `x` is; the logarithm is rounded, as in eager's vectors."""

    def lowering(ctx: Lowering, a: Operand, b: Operand) -> Tensor:
        result = promoted(ctx, (a, b), KIND.INT_TO_FLOAT)[1]

        def body(x: Expr, y: Expr) -> Expr:
            product = f.where(f.eq(x, 0), 0.0, f.mul(x, f.rounded(log(y), result)))
            return f.where(f.isnan(y), y, product)

        return elementwise(ctx, body, a, b, kind=KIND.INT_TO_FLOAT, rounds=2)

    return lowering


lowers(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)(_xlog(f.log))
lowers(aten.special_xlog1py.default, aten.special_xlog1py.self_scalar,
       aten.special_xlog1py.other_scalar)(_xlog(f.log1p))  # fmt: skip


@lowers(aten.nextafter.default)
def nextafter(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
    if compute_type(a.dtype) == a.dtype:
        return elementwise(ctx, f.binary("nextafter"), a, b)
    if a.dtype != torch.bfloat16:
        raise Unsupported("the neighbours of a low-precision number are its own type's")
    return pointwise(_next_bfloat16, a, b)


def _next_bfloat16(a: Expr, b: Expr) -> Expr:
    """Bits of one sign are in the order of the numbers: one more is one further from zero."""
    x, y = (build.cast(e, torch.float32) for e in (a, b))
    bits = build.op("bitcast", a, arg=torch.int16)
    away = f.eq(f.lt(x, y), f.gt(x, 0.0))
    moved = f.add(bits, f.where(away, f.like(1, bits), -1))
    least = f.where(f.lt(y, 0.0), f.like(-0x7FFF, bits), 1)  # from zero: the smallest, signed
    moved = build.op("bitcast", f.where(f.eq(x, 0.0), least, moved), arg=torch.bfloat16)
    undefined = f.either(f.isnan(x), f.isnan(y))
    found = f.where(f.eq(x, y), b, moved)
    return build.where(undefined, build.cast(f.add(x, y), torch.bfloat16), found)


# ---- limits and selection


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(ctx: Lowering, x: Tensor, low: Operand | None = None, high: Operand | None = None
          ) -> Tensor:  # fmt: skip
    given = [bound for bound in (low, high) if bound is not None]

    def body(a: Expr, *bounds: Expr) -> Expr:
        rest = list(bounds)
        lower = None if low is None else rest.pop(0)
        return f.clamp(a, lower, None if high is None else rest.pop(0))

    return elementwise(ctx, body, x, *given, rounds=3)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(ctx: Lowering, x: Tensor, low: Operand) -> Tensor:
    return clamp(ctx, x, low, None)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(ctx: Lowering, x: Tensor, high: Operand) -> Tensor:
    return clamp(ctx, x, None, high)


@lowers(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(ctx: Lowering, condition: Tensor, a: Operand, b: Operand) -> Tensor:
    _, result = promoted(ctx, (a, b), KIND.NO_OPMATH)
    chosen = [operand(ctx, x, result) for x in (a, b)]
    return pointwise(build.where, condition.to(torch.bool), *chosen)


@lowers(aten.linalg_cross.default)
def cross(ctx: Lowering, a: Tensor, b: Tensor, *, dim: int = -1) -> Tensor:
    """Each of the three components is a difference of products of the other two."""
    size = broadcast_size((a, b))
    dim %= len(size)
    computation, result = promoted(ctx, (a, b))
    left, right = (expand(t.to(computation), size) for t in (a, b))

    def element(*indices: Expr) -> Expr:
        def turned(t: Tensor, steps: int) -> Expr:
            moved = ix.mod(ix.add(indices[dim], steps), 3)
            return t.at([moved if k == dim else i for k, i in enumerate(indices)])

        def product(j: int, k: int) -> Expr:  # eager rounds the products
            return f.rounded(f.mul(turned(left, j), turned(right, k)), result)

        return f.sub(product(1, 2), product(2, 1))

    return from_indices(size, a.device, element).to(result)
