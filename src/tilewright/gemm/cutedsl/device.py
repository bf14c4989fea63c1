"""What generated text calls: functions of scalars and `TensorSSA` that the DSL lacks, or has with
another meaning. They run while a kernel is traced; `tw` is their name in the text.

Each means what the row of `ir.ops.TABLE` with its name means in eager: NaN, signed zeros, integers
that wrap, division rounded down.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

cutlass: Any = importlib.import_module("cutlass")
cute: Any = importlib.import_module("cutlass.cute")

_FLOATS = ("Float64", "Float32", "Float16", "BFloat16")
_BITS = {"Float64": "Int64", "Float32": "Int32", "Float16": "Int16", "BFloat16": "Int16"}


def is_tensor(x: Any) -> bool:
    return isinstance(x, cute.TensorSSA)


def kind(x: Any) -> Any:
    """The type of a value's elements."""
    return x.element_type if is_tensor(x) else type(cute.as_numeric(x))


def like(value: Any, x: Any) -> Any:
    """A number with the type, and the shape, of another value."""
    return cute.full_like(x, value) if is_tensor(x) else kind(x)(value)


def is_float(x: Any) -> bool:
    return kind(x).__name__ in _FLOATS


def where(condition: Any, a: Any, b: Any) -> Any:
    if is_tensor(condition) or is_tensor(a) or is_tensor(b):
        return cute.where(condition, a, b)
    if not isinstance(condition, cutlass.Boolean):
        condition = cutlass.Boolean(condition)
    return kind(a)(cutlass.select_(condition, a, b))


def isnan(x: Any) -> Any:
    return x != x


# ---- arithmetic


def maximum(a: Any, b: Any) -> Any:
    """NaN where either is; the DSL's own gives the other."""
    return where((a > b) | isnan(a), a, b) if is_float(a) else where(a > b, a, b)


def minimum(a: Any, b: Any) -> Any:
    return where((a < b) | isnan(a), a, b) if is_float(a) else where(a < b, a, b)


def absolute(x: Any) -> Any:
    if is_float(x):
        return cute.math.absf(x)
    if not kind(x).signed:
        return x
    return where(x < like(0, x), -x, x)


def sign(x: Any) -> Any:
    """One, minus one or zero; zero for NaN, as eager has it."""
    one, zero = like(1, x), like(0, x)
    if not is_float(x) and not kind(x).signed:
        return where(x > zero, one, zero)
    return where(x > zero, one, where(x < zero, like(-1, x), zero))


def signbit(x: Any) -> Any:
    if not is_float(x):
        return x < like(0, x)
    bits = x.bitcast(getattr(cutlass, _BITS[kind(x).__name__]))
    return bits < like(0, bits)


def floordiv(a: Any, b: Any) -> Any:
    """Of floats: the quotient of what is left without the remainder, which is whole but for
    rounding."""
    if not is_float(a):
        return a // b
    rest = cute.math.rem(a, b)
    one, zero = like(1, a), like(0, a)
    quotient = (a - rest) / b
    quotient = where((rest != zero) & ((b < zero) != (rest < zero)), quotient - one, quotient)
    below = cute.math.floor(quotient)
    below = where(quotient - below > like(0.5, a), below + one, below)
    below = where(quotient == zero, cute.math.copysign(zero, a / b), below)
    return where(b == zero, a / b, below)


def truncdiv(a: Any, b: Any) -> Any:
    if is_float(a):
        return cute.math.trunc(a / b)
    quotient = a // b
    inexact = quotient * b != a
    return where(inexact & (quotient < like(0, a)), quotient + like(1, a), quotient)


def mod(a: Any, b: Any) -> Any:
    """With the sign of the divisor."""
    if not is_float(a):
        return a - (a // b) * b
    rest = cute.math.rem(a, b)
    zero = like(0, a)
    return where((rest != zero) & ((b < zero) != (rest < zero)), rest + b, rest)


def fmod(a: Any, b: Any) -> Any:
    """With the sign of the dividend."""
    return cute.math.rem(a, b) if is_float(a) else a - truncdiv(a, b) * b


def shl(a: Any, b: Any) -> Any:
    """Zero for a shift by the width of the type or more."""
    wide = like(kind(a).width, a)
    inside = (b >= like(0, b)) & (b < wide)
    return where(inside, a << where(inside, b, like(0, b)), like(0, a))


def shr(a: Any, b: Any) -> Any:
    """The sign for a shift by the width of the type or more."""
    wide = like(kind(a).width, a)
    inside = (b >= like(0, b)) & (b < wide)
    if kind(a).signed:
        return a >> where(inside, b, like(kind(a).width - 1, b))
    return where(inside, a >> where(inside, b, like(0, b)), like(0, a))


def pick(which: Any, items: Any) -> Any:
    """One of several: of lists element by element, of tensors that are laid out alike the one that
    begins where it does, of numbers the first, for they are the same."""
    first = items[0]
    if isinstance(first, (list, tuple)):
        return [pick(which, [each[k] for each in items]) for k in range(len(first))]
    if not isinstance(first, cute.Tensor):
        return first
    start = first.iterator.toint()
    for k, other in enumerate(items[1:], 1):
        start = where(which == k, other.iterator.toint(), start)
    pointer = cute.make_ptr(first.element_type, start, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, first.layout)


# ---- functions


def exp(x: Any) -> Any:
    return cute.math.exp(x)


def sigmoid(x: Any) -> Any:
    one = like(1.0, x)
    return one / (one + cute.math.exp(-x))


def pow(a: Any, b: Any) -> Any:
    return cute.math.pow(a, b)


def hypot(a: Any, b: Any) -> Any:
    """Scaled, so that squares neither overflow nor vanish; infinite where either is."""
    x, y = cute.math.absf(a), cute.math.absf(b)
    large, small = maximum(x, y), minimum(x, y)
    zero, infinite = like(0.0, a), like(math.inf, a)
    ratio = small / where(large == zero, like(1.0, a), large)
    length = large * cute.math.sqrt(like(1.0, a) + ratio * ratio)
    length = where(large == zero, large, length)
    return where((x == infinite) | (y == infinite), infinite, length)


# ---- conversions


def to(x: Any, dtype: Any) -> Any:
    """As eager converts: small floats through float32, floats to small integers by their low bits,
    anything but zero to True."""
    have = kind(x)
    if have is dtype:
        return x
    if dtype is cutlass.Boolean:
        return x != like(0, x)
    if have is cutlass.Boolean and is_tensor(x):
        return where(x, cute.full_like(x, 1, dtype), cute.full_like(x, 0, dtype))
    wide = ("Float32", "Float64")
    small = dtype.__name__ in _FLOATS and dtype.__name__ not in wide
    if small and have is not cutlass.Float32:
        x = x.to(cutlass.Float32)
    if have.__name__ in _FLOATS and dtype.__name__ in ("Int8", "Int16", "Uint8", "Uint16"):
        x = x.to(cutlass.Int32)
    return x.to(dtype)


def to_fp8(x: Any, dtype: Any, largest: float, beyond: float) -> Any:
    """An eight-bit float. What is beyond the largest is `beyond`: NaN, or the largest itself."""
    x = to(x, cutlass.Float32)
    if beyond != largest:
        x = where(cute.math.absf(x) >= like(largest, x), like(beyond, x), x)
    return x.to(dtype)
