"""Value expressions written like the formulas they are: `mul(x, 0.5)` takes the type of `x`.

Each name is a row of `ir.ops.TABLE`. A plain number beside an expression becomes a literal of the
expression's type, so a formula is written once for every type.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tilewright.ir import build
from tilewright.ir.expr import Expr, const

Value = Expr | int | float
Binary = Callable[[Value, Value], Expr]
Unary = Callable[[Expr], Expr]


def literal(value: int | float, dtype: torch.dtype) -> Expr:
    """A number of `dtype`, rounded (floats) or wrapped (integers) as storing it would."""
    if dtype == torch.bool:
        return const(bool(value), dtype)
    if dtype.is_floating_point:
        if dtype == torch.float64 or math.isnan(value) or math.isinf(value):
            return const(float(value), dtype)
        return const(torch.tensor(float(value), dtype=torch.float64).to(dtype).item(), dtype)
    if isinstance(value, float) and not math.isfinite(value):
        return const(torch.tensor(value).to(dtype).item(), dtype)
    info = torch.iinfo(dtype)
    return const((int(value) - info.min) % (1 << info.bits) + info.min, dtype)


def like(value: Value, other: Expr) -> Expr:
    return value if isinstance(value, Expr) else literal(value, other.dtype)


def _pair(a: Value, b: Value) -> tuple[Expr, Expr]:
    if isinstance(a, Expr):
        return a, like(b, a)
    if isinstance(b, Expr):
        return like(a, b), b
    raise TypeError("one operand must be an expression")


def binary(name: str) -> Binary:
    return lambda a, b: build.op(name, *_pair(a, b))


def unary(name: str) -> Unary:
    return lambda a: build.op(name, a)


def where(condition: Expr, a: Value, b: Value) -> Expr:
    return build.where(condition, *_pair(a, b))


add, sub, mul, div = binary("add"), binary("sub"), binary("mul"), binary("div")
eq, ne, lt, le, gt, ge = (binary(name) for name in ("eq", "ne", "lt", "le", "gt", "ge"))
both, either = binary("bit_and"), binary("bit_or")
pow_, shl, shr = binary("pow"), binary("shl"), binary("shr")
neg, abs_, sqrt, isnan, trunc = (unary(n) for n in ("neg", "abs", "sqrt", "isnan", "trunc"))
exp, exp2, expm1, log, log1p = (unary(n) for n in ("exp", "exp2", "expm1", "log", "log1p"))
sin, cos, tan, tanh, erf = (unary(n) for n in ("sin", "cos", "tan", "tanh", "erf"))
sigmoid, lgamma, round_, not_ = (unary(n) for n in ("sigmoid", "lgamma", "round", "bit_not"))


def maximum(a: Value, b: Value) -> Expr:
    """The larger; NaN wins; of two zeros the second, as eager's vector code has it."""
    a, b = _pair(a, b)
    return build.op("max", a, b)


def minimum(a: Value, b: Value) -> Expr:
    """The smaller; NaN wins; of two zeros the second."""
    a, b = _pair(a, b)
    return build.op("min", a, b)


def clamp(x: Expr, low: Value | None, high: Value | None) -> Expr:
    """`x` limited below, then above; NaN anywhere wins."""
    x = x if low is None else maximum(low, x)
    return x if high is None else minimum(high, x)


def square(x: Expr) -> Expr:
    return mul(x, x)


def reciprocal(x: Expr) -> Expr:
    return div(1.0, x)


def is_infinite(x: Expr) -> Expr:
    return eq(abs_(x), math.inf)


def rounded(x: Expr, dtype: torch.dtype) -> Expr:
    """`x` as it reads back after being stored as `dtype`."""
    return build.cast(build.cast(x, dtype), x.dtype)
