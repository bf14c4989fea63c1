"""Functions that generated Triton kernels call in place of one of libdevice's, or of several that
are less work together. Fits are our own; `tests/compile/test_triton_maths.py` has their errors."""

# Triton compiles these functions from their text; they have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalOperand=false, reportOptionalMemberAccess=false

from __future__ import annotations

import triton.language as tl

if __name__.endswith("interpreted"):
    from tilewright.runtime.interpret import helpers, libdevice
    from tilewright.runtime.interpret import plain as jit

    tri = helpers("tri")
    div, exp, fast_exp, horner = tri.div, tri.exp, tri.fast_exp, tri.horner
    maximum, minimum = tri.maximum, tri.minimum
else:
    from triton.language.extra import libdevice

    from tilewright.runtime.tri import div, exp, fast_exp, horner, jit, maximum, minimum

# ---- as exact as what they stand for


@jit
def log1p_power(y):
    """`log1p(exp(y))` of what is not positive."""
    return _log1p(exp(y))


@jit
def _log1p(u):
    """Of what is between zero and one."""
    p = horner(tl.full(u.shape, 0.005232606083154678, u.dtype), u, -0.029504863545298576)
    p = horner(p, u, 0.07822529226541519)
    p = horner(p, u, -0.13663184642791748)
    p = horner(p, u, 0.19105973839759827)
    p = horner(p, u, -0.24842973053455353)
    p = horner(p, u, 0.3331909477710724)
    p = horner(p, u, -0.4999949336051941)
    return horner(p, u, 0.9999999403953552) * u


@jit
def softplus(y):
    """`log1p(exp(y))`, which is infinite where the power is."""
    return _with_rest(y, log1p_power(-tl.abs(y)))


@jit
def _with_rest(y, tail):
    total = maximum(y, tl.full(y.shape, 0.0, y.dtype)) + tail
    return tl.where(y > 88.72283, float("inf"), total)


@jit
def tanh_softplus(x):
    """`tanh(log1p(exp(x)))`: with a power u, (u * u + 2 * u) / (u * u + 2 * u + 2)."""
    n = _squared_less_one(exp(_not_beyond(x)))
    return div(n, n + 2.0)


@jit
def _not_beyond(x):
    """Up to where the result is one, and a power's square is finite."""
    return minimum(x, tl.full(x.shape, 20.0, x.dtype))


@jit
def _squared_less_one(u):
    return tl.fma(u, u, u + u)


# ---- as exact beside one: what is small is part of a sum, and many bits of it are not seen


@jit
def summed_log1p_power(y):
    """(H200: binary cross entropy of 16384x4096 bfloat16, as floats, 70 us, 87 us exact and 141 us
    by two functions.)"""
    return _log1p(fast_exp(y))


@jit
def summed_softplus(y):
    return _with_rest(y, summed_log1p_power(-tl.abs(y)))


# ---- where an error of a millionth does not show


@jit
def fast_log1p_power(y):
    u = fast_exp(y)
    p = horner(tl.full(u.shape, 0.014140843413770199, u.dtype), u, -0.06640121340751648)
    p = horner(p, u, 0.14922313392162323)
    p = horner(p, u, -0.235038161277771)
    p = horner(p, u, 0.331094354391098)
    p = horner(p, u, -0.4998696446418762)
    return horner(p, u, 0.9999987483024597) * u


@jit
def fast_softplus(y):
    return _with_rest(y, fast_log1p_power(-tl.abs(y)))


@jit
def fast_tanh_softplus(x):
    n = _squared_less_one(fast_exp(_not_beyond(x)))
    return libdevice.fast_dividef(n, n + 2.0)


@jit
def fast_log1p(x):
    """By a logarithm, and near zero, where that would have few bits, by a fit."""
    return tl.where(tl.abs(x) < 0.125, _log_near_one(x), libdevice.fast_logf(1.0 + x))


@jit
def fast_log(x):
    away = x - 1.0
    tiny = x < 2.0**-126  # which an instruction takes for zero
    far = libdevice.fast_logf(tl.where(tiny, x * 2.0**24, x)) - tl.where(tiny, 16.635532, 0.0)
    return tl.where(tl.abs(away) < 0.125, _log_near_one(away), far)


@jit
def _log_near_one(x):
    p = horner(tl.full(x.shape, 0.2033015638589859, x.dtype), x, -0.2532956600189209)
    p = horner(p, x, 0.33331480622291565)
    return horner(horner(p, x, -0.49998706579208374), x, 1.0) * x


@jit
def fast_expm1(x):
    p = horner(tl.full(x.shape, 0.0416666641831398, x.dtype), x, 0.16679686307907104)
    p = horner(horner(p, x, 0.5000002384185791), x, 0.9999997615814209) * x
    return tl.where(tl.abs(x) < 0.125, p, fast_exp(x) - 1.0)


@jit
def extreme_words(p, place, value, held, mode: tl.constexpr):
    """`p[place]` becomes the larger of it and `value`, or the smaller one, where `held`: floats of
    four bytes, which are ordered as integers are, negative ones the other way round. A NaN wins:
    here it is the largest of those, or the smallest; one that is there already stays. So does what
    was as large before, whatever others do meanwhile."""
    at = p + tl.where(held, place, 0)
    seen = tl.load(at, held, other=0)
    better = value > seen if mode == "max" else value < seen
    held = held & (seen == seen) & (better | (value != value))
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value == value, bits, 0x7FC00000 if mode == "max" else -0x400000)
    words = at.to(tl.pointer_type(tl.int32), bitcast=True)
    reversed_ = at.to(tl.pointer_type(tl.uint32), bitcast=True)
    unsigned = bits.to(tl.uint32, bitcast=True)
    if mode == "max":
        tl.atomic_max(words, bits, mask=held & (bits >= 0), sem="relaxed")
        tl.atomic_min(reversed_, unsigned, mask=held & (bits < 0), sem="relaxed")
    else:
        tl.atomic_min(words, bits, mask=held & (bits >= 0), sem="relaxed")
        tl.atomic_max(reversed_, unsigned, mask=held & (bits < 0), sem="relaxed")
