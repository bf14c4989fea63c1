"""Functions that generated Triton kernels call in place of one of libdevice's, or of several that
are less work together. Fits are our own; `tests/compile/test_triton_maths.py` has their errors."""

# Triton compiles these functions from their text; they have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalOperand=false, reportOptionalMemberAccess=false, reportAssignmentType=false

from __future__ import annotations

import triton.language as tl

if __name__.endswith("interpreted"):
    from tilewright.runtime.interpret import helpers, libdevice
    from tilewright.runtime.interpret import plain as jit

    tri = helpers("tri")
    div, exp, fast_exp, horner = tri.div, tri.exp, tri.fast_exp, tri.horner
    maximum, minimum = tri.maximum, tri.minimum

    def once(a, b, c):
        """Rounded once, which `tl.fma` is not in the interpreter of some versions."""
        return (a.to(tl.float64) * b.to(tl.float64) + c).to(tl.float32)

    fused = once
else:
    from triton.language.extra import libdevice

    from tilewright.runtime.tri import div, exp, fast_exp, horner, jit, maximum, minimum

    @jit
    def fused(a, b, c):
        return tl.fma(a, b, c)

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


@jit
def lgamma(x):
    """Of positive numbers without a branch, others are seldom: fifty instructions, where libdevice
    has two hundred in a branch for each of five ranges, and the threads of a warp are in all."""
    return _or_rest(x, _log_of_gamma(tl.abs(x)))


@jit
def _log_of_gamma(x):
    """Of what is positive, not below 2**-126 and not infinite, off by five of the last places at
    most: from three on by Stirling's series, below by a fit on [1, 3] over its zeros at one and
    two, and below one by that of the next number."""
    low, small = x < 3.0, x < 1.0
    v = x - tl.where(small, 0.0, 1.0)
    n = horner(tl.full(v.shape, 0.001565843354910612, v.dtype), v, 0.1180620938539505)
    n = horner(horner(n, v, 0.5806007385253906), v, 0.5772156715393066)
    d = horner(tl.full(v.shape, 0.04756535217165947, v.dtype), v, 0.5431888103485107)
    d = horner(horner(d, v, 1.4307492971420288), v, 1.0)
    inverse = libdevice.fast_dividef(tl.full(v.shape, 1.0, v.dtype), tl.where(low, d, x))
    power = _log(x)
    near = tl.fma(v, v, -v) * (n * inverse) - tl.where(small, power, 0.0)
    z = inverse * inverse
    s = horner(tl.full(z.shape, 0.0006789773469790816, z.dtype), z, -0.0027698876801878214)
    s = horner(horner(s, z, 0.08333316445350647), inverse, 0.418938547372818)
    return tl.where(low, near, tl.fma(x - 0.5, power - 1.0, s))


@jit
def _log(x):
    """Of what is positive, not below 2**-126 and not infinite, off by one of the last place."""
    bits = x.to(tl.int32, bitcast=True)
    power = (bits - 0x3F2AAAAB) & -0x800000  # what is left is from 2 / 3 to 4 / 3
    f = (bits - power).to(tl.float32, bitcast=True) - 1.0
    p = horner(tl.full(f.shape, -0.12948963046073914, f.dtype), f, 0.1400475651025772)
    p = horner(p, f, -0.12167154252529144)
    p = horner(p, f, 0.14001160860061646)
    p = horner(p, f, -0.1668230593204498)
    p = horner(p, f, 0.20010747015476227)
    p = horner(p, f, -0.24999716877937317)
    p = horner(p, f, 0.3333320915699005)
    p = horner(p, f, -0.5)
    near = tl.fma(p * f, f, f)
    return tl.fma(power.to(tl.float32), tl.full(f.shape, 8.26295831757307e-08, f.dtype), near)


@jit
def _is_unusual(x):
    """Whether this is negative, below 2**-126, infinite or no number."""
    bits = x.to(tl.int32, bitcast=True) - 0x800000
    return bits.to(tl.uint32, bitcast=True) >= 0x7F000000


@jit
def _lgamma_rest(x, far):
    """Of the rest, from what it is of the absolute value: of negative numbers the sine of so many
    half turns says how far apart both are."""
    a = tl.abs(x)
    r = a - libdevice.nearbyint(a)
    z = r * r
    p = horner(tl.full(z.shape, 0.02468823827803135, z.dtype), z, -0.19042637944221497)
    p = horner(horner(p, z, 0.811712384223938), z, -1.6449331045150757)
    part = tl.where(a < 1e-10, a, a * (tl.abs(r) * horner(p, z, 1.0)))
    found = -libdevice.log(part) - tl.where(a < 1e-10, 0.0, far)
    return tl.where(a < float("inf"), tl.where(part == 0, float("inf"), found), a)


@jit
def _of_all(x, usual):
    return tl.where(_is_unusual(x), _lgamma_rest(x, usual), usual)


@jit
def _of_some(x, usual):
    return tl.map_elementwise(_of_one, x, usual)


@jit
def _of_one(x, usual):
    """A warp goes this way only where an element of it has to."""
    if _is_unusual(x):
        usual = _lgamma_rest(x, usual)
    return usual


_or_rest = _of_all if __name__.endswith("interpreted") else _of_some


@jit
def sin(x):
    """Of what is not far from zero without a branch, off by 1.5 of the last place at most; of the
    cosine of the same number most is the same, and computed once."""
    r, turns = _in_a_quarter(x)
    return _or_sin(x, _of_a_circle(r, turns))


@jit
def cos(x):
    r, turns = _in_a_quarter(x)
    return _or_cos(x, _of_a_circle(r, turns + 1))


@jit
def _in_a_quarter(x):
    """What is left of an angle by quarters of a turn, no more than half of one, and how many these
    are: the first part of a quarter leaves what is exact, no part is so large as to change the sign
    of a zero."""
    t = fused(x, tl.full(x.shape, 0.6366197466850281, x.dtype), 12582912.0)
    q = t - 12582912.0  # the nearest integer, which the last bits are
    r = fused(q, tl.full(x.shape, -1.570796251296997, x.dtype), x)
    r = fused(q, tl.full(x.shape, -7.549789415861596e-08, x.dtype), r)
    r = fused(q, tl.full(x.shape, -5.390302953474238e-15, x.dtype), r)
    return r, t.to(tl.int32, bitcast=True)


@jit
def _of_a_circle(r, turns):
    """The sine, after one quarter the cosine, and both with the other sign."""
    z = r * r
    odd = (turns & 1) != 0
    p = tl.where(odd, 2.4430661142105237e-05, 2.837512056430569e-06)
    p = tl.fma(p, z, tl.where(odd, -0.00138873013202101, -0.00019853511184919626))
    p = tl.fma(p, z, tl.where(odd, 0.04166664555668831, 0.008333380334079266))
    p = tl.fma(p, z, tl.where(odd, -0.5, -0.1666666716337204))
    first = tl.where(odd, 1.0, r)
    value = tl.fma(p, tl.fma(first, z, 0.0), first)  # of -0.0 it is -0.0
    return (value.to(tl.int32, bitcast=True) ^ ((turns & 2) << 30)).to(tl.float32, bitcast=True)


@jit
def _is_far(x):
    """Whether so many turns are away that three numbers do not say where they end, or no number."""
    return (tl.abs(x) <= 100000.0) == 0


@jit
def _sin_of_all(x, near):
    return tl.where(_is_far(x), libdevice.sin(x), near)


@jit
def _sin_of_some(x, near):
    return tl.map_elementwise(_sin_of_one, x, near)


@jit
def _sin_of_one(x, near):
    if _is_far(x):
        near = libdevice.sin(x)
    return near


@jit
def _cos_of_all(x, near):
    return tl.where(_is_far(x), libdevice.cos(x), near)


@jit
def _cos_of_some(x, near):
    return tl.map_elementwise(_cos_of_one, x, near)


@jit
def _cos_of_one(x, near):
    if _is_far(x):
        near = libdevice.cos(x)
    return near


_or_sin = _sin_of_all if __name__.endswith("interpreted") else _sin_of_some
_or_cos = _cos_of_all if __name__.endswith("interpreted") else _cos_of_some


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
