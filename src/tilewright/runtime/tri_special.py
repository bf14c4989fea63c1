"""Special functions for generated Triton kernels, in double; float arguments are widened before.

The same methods and tables as `include/tw_special.h` and `tw_polynomials.h`, with selections in
place of branches and loops that run until every element of the tile is done.
"""

# Triton compiles these functions from their text; they have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import re
from pathlib import Path

import triton.language as tl

if __name__.endswith("interpreted"):
    from tilewright.runtime.interpret import helpers, libdevice
    from tilewright.runtime.interpret import plain as jit

    any_of = helpers("tri").any_of

    def constant(value: object) -> object:
        return value
else:
    from triton.language.extra import libdevice

    from tilewright.runtime.tri import any_of, jit

    constant = tl.constexpr


def _tables() -> dict[str, tuple[float, ...]]:
    """The series of the C++ header."""
    text = (Path(__file__).parent / "include" / "tw_tables.h").read_text()
    found = re.findall(r"constexpr double (\w+)\[\] = \{([^}]*)\}", text)
    return {name: tuple(float(c) for c in body.split(",") if c.strip()) for name, body in found}


_T = _tables()
I0E_SMALL, I0E_LARGE = constant(_T["I0E_SMALL"]), constant(_T["I0E_LARGE"])
I1E_SMALL, I1E_LARGE = constant(_T["I1E_SMALL"]), constant(_T["I1E_LARGE"])
K0_SMALL, K0E_LARGE = constant(_T["K0_SMALL"]), constant(_T["K0E_LARGE"])
K1_SMALL, K1E_LARGE = constant(_T["K1_SMALL"]), constant(_T["K1E_LARGE"])
JY0_P, JY0_Q = constant(_T["JY0_P"]), constant(_T["JY0_Q"])
JY1_P, JY1_Q = constant(_T["JY1_P"]), constant(_T["JY1_Q"])
J0_SMALL, J1_SMALL = constant(_T["J0_SMALL"]), constant(_T["J1_SMALL"])
Y0_SMALL, Y1_SMALL = constant(_T["Y0_SMALL"]), constant(_T["Y1_SMALL"])
AIRY_MIDDLE, AIRY_LARGE = constant(_T["AIRY_MIDDLE"]), constant(_T["AIRY_LARGE"])
AIRY_F, AIRY_G = constant(_T["AIRY_F"]), constant(_T["AIRY_G"])
ERFCX = constant(_T["ERFCX"])
ERFINV_SMALL, ERFINV_LARGE = constant(_T["ERFINV_SMALL"]), constant(_T["ERFINV_LARGE"])
NDTRI_MID, NDTRI_FAR = constant(_T["NDTRI_MID"]), constant(_T["NDTRI_FAR"])
SINC = constant((1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800, 1 / 6227020800))
DIGAMMA = constant((1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12))
STIRLING = constant((1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188))
BERNOULLI = constant((1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160, -691 / 1307674368000,
                      1 / 74724249600, -3617 / 10670622842880000))  # fmt: skip
PI = constant(3.14159265358979323846)
INF = constant(float("inf"))
GAMMA_TERMS = constant(20000)


@jit
def series(c: tl.constexpr, t):
    """Clenshaw's summation of a Chebyshev series."""
    n: tl.constexpr = len(c)
    b1 = t * 0.0
    b2 = t * 0.0
    for j in tl.static_range(n - 1):
        b0 = 2.0 * t * b1 - b2 + c[n - 1 - j]
        b2 = b1
        b1 = b0
    return t * b1 - b2 + c[0]


@jit
def polynomial(x, c: tl.constexpr):
    """c0 + c1 x + c2 x^2 + ..."""
    n: tl.constexpr = len(c)
    r = x * 0.0 + c[n - 1]
    for j in tl.static_range(n - 1):
        r = r * x + c[n - 2 - j]
    return r


# ---- modified Bessel functions


@jit
def i0e(x):
    a = tl.abs(x)
    far = tl.maximum(a, 8.0)
    large = series(I0E_LARGE, 16.0 / far - 1.0) / tl.sqrt(far)
    r = tl.where(a <= 8.0, series(I0E_SMALL, tl.minimum(a, 8.0) / 4.0 - 1.0), large)
    return tl.where(x == x, r, x)


@jit
def i1e(x):
    a = tl.abs(x)
    far = tl.maximum(a, 8.0)
    small = x * series(I1E_SMALL, tl.minimum(a, 8.0) / 4.0 - 1.0)
    large = series(I1E_LARGE, 16.0 / far - 1.0) / tl.sqrt(far)
    r = tl.where(a <= 8.0, small, libdevice.copysign(large, x))
    return tl.where(x == x, r, x)


@jit
def i0(x):
    return libdevice.exp(tl.abs(x)) * i0e(x)


@jit
def i1(x):
    return libdevice.exp(tl.abs(x)) * i1e(x)


@jit
def modified_bessel_i0(x):
    return i0(x)


@jit
def modified_bessel_i1(x):
    return i1(x)


@jit
def k0_small(x):
    """For 0 < x <= 2."""
    return series(K0_SMALL, x * x / 2.0 - 1.0) - libdevice.log(x / 2.0) * i0(x)


@jit
def k1_small(x):
    return series(K1_SMALL, x * x / 2.0 - 1.0) / x + libdevice.log(x / 2.0) * i1(x)


@jit
def outside_positive(x, r, at_zero):
    """`r` where x > 0; the limit at zero, and NaN below."""
    return tl.where(x > 0.0, r, tl.where(x == 0.0, at_zero, float("nan")))


@jit
def scaled_modified_bessel_k0(x):
    near = tl.where((x > 0.0) & (x <= 2.0), x, 1.0)
    far = tl.where(x > 2.0, x, 2.0)
    large = series(K0E_LARGE, 4.0 / far - 1.0) / tl.sqrt(far)
    return outside_positive(x, tl.where(x <= 2.0, libdevice.exp(near) * k0_small(near), large), INF)


@jit
def scaled_modified_bessel_k1(x):
    near = tl.where((x > 0.0) & (x <= 2.0), x, 1.0)
    far = tl.where(x > 2.0, x, 2.0)
    large = series(K1E_LARGE, 4.0 / far - 1.0) / tl.sqrt(far)
    return outside_positive(x, tl.where(x <= 2.0, libdevice.exp(near) * k1_small(near), large), INF)


@jit
def modified_bessel_k0(x):
    near = tl.where((x > 0.0) & (x <= 2.0), x, 1.0)
    far = libdevice.exp(-x) * scaled_modified_bessel_k0(x)
    return tl.where((x > 0.0) & (x <= 2.0), k0_small(near), far)


@jit
def modified_bessel_k1(x):
    near = tl.where((x > 0.0) & (x <= 2.0), x, 1.0)
    far = libdevice.exp(-x) * scaled_modified_bessel_k1(x)
    return tl.where((x > 0.0) & (x <= 2.0), k1_small(near), far)


# ---- Bessel functions


@jit
def wave(x, p, q, order: tl.constexpr):
    """J and Y beyond 8. The shift of the argument goes through the sum formulas: subtracting it
    from a large x would lose digits."""
    s = libdevice.sin(x)
    c = libdevice.cos(x)
    if order == 0:
        cs = c + s
        sn = s - c
    else:
        cs = s - c
        sn = -s - c
    scale = 1.0 / tl.sqrt(PI * x)
    q = q * (8.0 / x)
    return scale * (p * cs - q * sn), scale * (p * sn + q * cs)


@jit
def wave0(x):
    t = 128.0 / (x * x) - 1.0
    return wave(x, series(JY0_P, t), series(JY0_Q, t), 0)


@jit
def wave1(x):
    t = 128.0 / (x * x) - 1.0
    return wave(x, series(JY1_P, t), series(JY1_Q, t), 1)


@jit
def bessel_j0(x):
    a = tl.abs(x)
    near = tl.minimum(a, 8.0)
    z = near * near
    small = (z - 5.783185962946784) * (z - 30.471262343662087) * series(J0_SMALL, z / 32.0 - 1.0)
    large, _ = wave0(tl.where(a > 8.0, a, 8.0))
    return tl.where(a <= 8.0, small, tl.where(x == x, large, x))


@jit
def bessel_j1(x):
    a = tl.abs(x)
    near = tl.minimum(a, 8.0)
    z = near * near
    shape = (z - 14.681970642123893) * (z - 49.2184563216946) * series(J1_SMALL, z / 32.0 - 1.0)
    large, _ = wave1(tl.where(a > 8.0, a, 8.0))
    large = tl.where(x < 0.0, -large, large)
    return tl.where(a <= 8.0, x * shape, tl.where(x == x, large, x))


@jit
def bessel_y0(x):
    near = tl.where((x > 0.0) & (x <= 8.0), x, 1.0)
    small = series(Y0_SMALL, near * near / 32.0 - 1.0)
    small = small + 2.0 / PI * libdevice.log(near) * bessel_j0(near)
    _, large = wave0(tl.where(x > 8.0, x, 8.0))
    return outside_positive(x, tl.where(x <= 8.0, small, large), -INF)


@jit
def bessel_y1(x):
    near = tl.where((x > 0.0) & (x <= 8.0), x, 1.0)
    small = near * series(Y1_SMALL, near * near / 32.0 - 1.0)
    small = small + 2.0 / PI * (libdevice.log(near) * bessel_j1(near) - 1.0 / near)
    _, large = wave1(tl.where(x > 8.0, x, 8.0))
    return outside_positive(x, tl.where(x <= 8.0, small, large), -INF)


@jit
def spherical_bessel_j0(x):
    near = tl.where(tl.abs(x) < 0.5, x, 0.0)
    far = tl.where(tl.abs(x) < 0.5, 1.0, x)
    large = tl.where(tl.abs(x) == INF, 0.0, libdevice.sin(far) / far)
    return tl.where(tl.abs(x) < 0.5, polynomial(near * near, SINC), large)


@jit
def airy_ai(x):
    z0 = 2.6352313834736494  # 2/3 * 2.5^(3/2)
    root_pi = 1.7724538509055160273
    a = tl.abs(x)
    middle = series(AIRY_MIDDLE, tl.where(a <= 2.5, x, 0.0) / 2.5)
    far = tl.where(a > 2.5, a, 2.5)
    z = 2.0 * far * tl.sqrt(far) / 3.0
    fourth = tl.sqrt(tl.sqrt(far))
    above = libdevice.exp(-z) * series(AIRY_LARGE, 2.0 * z0 / z - 1.0) / (2.0 * root_pi * fourth)
    u = z0 / z
    t = 2.0 * u * u - 1.0
    s = libdevice.sin(z)
    c = libdevice.cos(z)
    f = series(AIRY_F, t)
    g = series(AIRY_G, t) / z
    below = (f * (s + c) - g * (c - s)) * 0.70710678118654752440 / (root_pi * fourth)
    r = tl.where(a <= 2.5, middle, tl.where(x > 0.0, above, below))
    return tl.where((a == INF) | (x != x), float("nan"), r)


# ---- the error function


@jit
def erfcx_positive(x):
    r = series(ERFCX, (x - 3.75) / (x + 3.75)) / 2.0 / (0.5 + x)
    return tl.where(x == INF, 0.0, r)


@jit
def erfcx(x):
    positive = erfcx_positive(tl.abs(x))
    e = libdevice.exp(x * x)
    # far below, the first term is infinite and the second must not be subtracted from it
    negative = tl.where(e == INF, e, 2.0 * e - positive)
    return tl.where(x < 0.0, negative, positive)


@jit
def erfinv(x):
    inside = tl.where(tl.abs(x) < 1.0, x, 0.0)
    w = -libdevice.log((1.0 - inside) * (1.0 + inside))
    lo = 2.23606797749978969641
    hi = 6.05
    small = inside * series(ERFINV_SMALL, tl.minimum(w, 5.0) / 2.5 - 1.0)
    root = tl.sqrt(tl.maximum(w, 5.0))
    large = inside * series(ERFINV_LARGE, (2.0 * root - (hi + lo)) / (hi - lo))
    edge = tl.where(tl.abs(x) == 1.0, libdevice.copysign(x * 0.0 + INF, x), float("nan"))
    return tl.where(tl.abs(x) < 1.0, tl.where(w <= 5.0, small, large), edge)


@jit
def ndtri_tail(p):
    """The normal quantile of a small probability, negated."""
    s = tl.sqrt(-2.0 * libdevice.log(p))
    u = 1.0 / s
    middle = series(NDTRI_MID, (2.0 * u - (1.0 / 1.6 + 1.0 / 6.0)) / (1.0 / 1.6 - 1.0 / 6.0))
    far = series(NDTRI_FAR, (2.0 * u - (1.0 / 6.0 + 1.0 / 39.0)) / (1.0 / 6.0 - 1.0 / 39.0))
    return s + tl.where(s <= 6.0, middle, far)


@jit
def ndtri(p):
    inside = (p > 0.0) & (p < 1.0)
    low = ndtri_tail(tl.where(inside & (p < 0.13), p, 0.1))
    high = ndtri_tail(tl.where(inside & (p > 0.87), 1.0 - p, 0.1))
    middle = 1.41421356237309504880 * erfinv(tl.where(inside, 2.0 * p - 1.0, 0.0))
    r = tl.where(p < 0.13, -low, tl.where(p > 0.87, high, middle))
    return tl.where(inside, r, tl.where(p == 0.0, -INF, tl.where(p == 1.0, INF, float("nan"))))


@jit
def log_ndtr(x):
    t = x * 0.70710678118654752440
    low = libdevice.log(erfcx(-t) / 2.0) - t * t
    return tl.where(x < -1.0, low, libdevice.log1p(-libdevice.erfc(t) / 2.0))


# ---- the gamma function's kin


@jit
def digamma(x):
    negative = x < 0.0
    f = x - libdevice.trunc(x)  # exact, also next to zero
    pole = negative & (f == 0.0)
    angle = PI * tl.where(negative & (f != 0.0), f, 0.5)
    reflected = tl.where(negative, -PI / libdevice.tan(angle), 0.0)
    y = tl.where(negative, 1.0 - x, x)
    y = tl.where((y > 0.0) | (y != y), y, 1.0)
    shifted = y * 0.0
    for _ in tl.static_range(12):
        low = y < 12.0
        shifted = tl.where(low, shifted - 1.0 / y, shifted)
        y = tl.where(low, y + 1.0, y)
    z = 1.0 / (y * y)
    r = reflected + shifted + libdevice.log(y) - 0.5 / y - z * polynomial(z, DIGAMMA)
    r = tl.where(x == INF, INF, r)
    r = tl.where(pole | (x == -INF), float("nan"), r)
    return tl.where(x == 0.0, libdevice.copysign(x * 0.0 + INF, x * -1.0), r)


@jit
def zeta_from(x, q):
    """Hurwitz zeta by Euler and Maclaurin: a dozen terms, the integral of the rest, corrections."""
    total = x * 0.0
    a = q
    k = 0
    active = x == x
    while any_of(active & ((k < 12) | (a <= 12.0))):
        adding = active & ((k < 12) | (a <= 12.0))
        term = libdevice.pow(a, -x)
        total = tl.where(adding, total + term, total)
        done = adding & (a > 0.0) & (tl.abs(term) < 1e-17 * tl.abs(total))
        active = active & (done == 0)
        a = tl.where(adding, a + 1.0, a)
        k += 1
    power = libdevice.pow(a, -x)
    rest = power * a / (x - 1.0) + power / 2.0
    factor = x * power / a
    for j in tl.static_range(8):
        rest = rest + BERNOULLI[j] * factor
        factor = factor * ((x + (2 * j + 1)) * (x + (2 * j + 2)) / (a * a))
    return tl.where(active, total + rest, total)


@jit
def zeta(x, q):
    x, q = tl.broadcast(x, q)
    whole = q == tl.floor(q)
    valid = (x > 1.0) & ((q > 0.0) | ((whole == 0) & (x == tl.floor(x))))
    s = tl.where(valid, x, 2.0)
    # far below zero the negative terms are, up to their sign, those of zeta(x, 1 - f)
    far = valid & (q < -50.0)
    n = -tl.floor(tl.where(far, q, 0.0))
    f = tl.where(far, q + n, 1.0)
    direct = zeta_from(s, tl.where(valid & (far == 0), q, f))
    below = zeta_from(s, tl.where(far, 1.0 - f, 1.0)) - zeta_from(
        s, tl.where(far, 1.0 - f + n, 1.0)
    )
    even = libdevice.fmod(s, s * 0.0 + 2.0) == 0.0
    r = tl.where(far, direct + tl.where(even, below, -below), direct)
    r = tl.where(valid, r, float("nan"))
    r = tl.where((x > 1.0) & (q <= 0.0) & whole, INF, r)
    return tl.where(x == 1.0, INF, r)


@jit
def log1pmx(x):
    """log(1 + x) - x without cancellation for small x."""
    near = tl.where(tl.abs(x) <= 0.3, x, 0.0)
    r = near / (2.0 + near)
    z = r * r
    term = r * z
    total = x * 0.0
    for k in tl.static_range(14):
        total = total + term / (2 * k + 3)
        term = term * z
    return tl.where(tl.abs(x) > 0.3, libdevice.log1p(x) - x, 2.0 * total - near * r)


@jit
def gamma_density(a, x):
    """x^a e^-x / Gamma(a + 1), from Stirling's series where the logarithms would cancel."""
    small = libdevice.exp(a * libdevice.log(x) - x - libdevice.lgamma(a + 1.0))
    b = tl.maximum(a, 20.0)
    stirling = polynomial(1.0 / (b * b), STIRLING) / b
    large = libdevice.exp(b * log1pmx((x - b) / b) - stirling) / tl.sqrt(2.0 * PI * b)
    return tl.where(a < 20.0, small, large)


@jit
def gamma_series(a, x):
    """P(a, x) by its power series, good for x <= a + 1."""
    total = x * 0.0 + 1.0
    term = x * 0.0 + 1.0
    k = 1
    active = x == x
    while any_of(active) & (k < GAMMA_TERMS):
        term = tl.where(active, term * (x / (a + k)), term)
        total = tl.where(active, total + term, total)
        active = active & (term >= 1e-17 * total)
        k += 1
    return total * gamma_density(a, x)


@jit
def gamma_fraction(a, x):
    """Q(a, x) by its continued fraction (Lentz's way), good for x > a + 1."""
    tiny = 1e-300
    b = x + 1.0 - a
    c = x * 0.0 + 1.0 / tiny
    d = 1.0 / b
    h = d
    k = 1
    active = x == x
    while any_of(active) & (k < GAMMA_TERMS):
        an = (a - k) * k
        b = b + 2.0
        d = an * d + b
        d = 1.0 / tl.where(tl.abs(d) < tiny, tiny, d)
        c = b + an / c
        c = tl.where(tl.abs(c) < tiny, tiny, c)
        h = tl.where(active, h * (d * c), h)
        active = active & (tl.abs(d * c - 1.0) >= 1e-16)
        k += 1
    return h * gamma_density(a, x) * a


@jit
def gamma_ratio(a, x, upper: tl.constexpr):
    a, x = tl.broadcast(a, x)
    at_zero = 1.0 if upper else 0.0
    at_inf = 0.0 if upper else 1.0
    plain = (a > 0.0) & (x > 0.0) & (a < INF) & (x < INF)
    wide = plain & (x > a + 1.0)
    narrow = plain & (x <= a + 1.0)
    fraction = gamma_fraction(tl.where(wide, a, 1.0), tl.where(wide, x, 3.0))
    sums = gamma_series(tl.where(narrow, a, 1.0), tl.where(narrow, x, 1.0))
    if upper:
        r = tl.where(wide, fraction, 1.0 - sums)
    else:
        r = tl.where(wide, 1.0 - fraction, sums)
    edge = tl.where(
        x == 0.0, at_zero, tl.where(a == INF, tl.where(x == INF, float("nan"), at_zero), at_inf)
    )
    edge = tl.where(a == 0.0, tl.where(x > 0.0, at_inf, float("nan")), edge)
    edge = tl.where((x < 0.0) | (a < 0.0) | (a != a) | (x != x), float("nan"), edge)
    return tl.where(plain, r, edge)


@jit
def igamma(a, x):
    return gamma_ratio(a, x, False)


@jit
def igammac(a, x):
    return gamma_ratio(a, x, True)


# ---- orthogonal polynomials of (x, degree), by their recurrences, in the element type itself


@jit
def whole_degree(x, n):
    return tl.broadcast(x, n.to(tl.int64))


@jit
def alternating(n, x):
    return tl.where((n & 1) == 0, x, -x)


@jit
def chebyshev_recurrence(y, n, first):
    p = y * 0.0 + 1.0
    q = first
    k = 2
    while any_of((n >= k) & (q == q)):
        r = tl.fma(y + y, q, -p)
        more = (n >= k) & (q == q)
        p = tl.where(more, q, p)
        q = tl.where(more, r, q)
        k += 1
    return tl.where(n == 0, 1.0, q)


@jit
def chebyshev_t(x, degree, trigonometric: tl.constexpr):
    x, n = whole_degree(x, degree)
    deep = (n > trigonometric) & (tl.abs(x) < 1.0)
    cosine = libdevice.cos(n.to(x.dtype) * libdevice.acos(tl.where(deep, x, 0.0)))
    r = tl.where(deep, cosine, chebyshev_recurrence(x, tl.where(deep, 0, n), x))
    end = tl.where(x > 0.0, 1.0, alternating(n, x * 0.0 + 1.0))
    return tl.where(n < 0, 0.0, tl.where(tl.abs(x) == 1.0, end, r)).to(x.dtype)


@jit
def chebyshev_u(x, degree, trigonometric: tl.constexpr):
    x, n = whole_degree(x, degree)
    deep = (n > trigonometric) & (tl.abs(x) < 1.0)
    m = (n + 1).to(x.dtype)
    angle = libdevice.acos(tl.where(deep, x, 0.5))
    s = libdevice.sin(angle)
    flat = m * libdevice.cos(m * angle) / tl.where(deep, x, 1.0)
    sine = tl.where(s != 0.0, libdevice.sin(m * angle) / tl.where(s != 0.0, s, 1.0), flat)
    r = tl.where(deep, sine, chebyshev_recurrence(x, tl.where(deep, 0, n), x + x))
    end = tl.where(x > 0.0, m, alternating(n, m))
    return tl.where(n < 0, 0.0, tl.where(tl.abs(x) == 1.0, end, r)).to(x.dtype)


@jit
def chebyshev_v(x, degree, trigonometric: tl.constexpr):
    x, n = whole_degree(x, degree)
    deep = (n > trigonometric) & (tl.abs(x) < 1.0)
    m = (n + n + 1).to(x.dtype)
    half = libdevice.acos(tl.where(deep, x, 0.0)) / 2.0
    ratio = libdevice.cos(m * half) / libdevice.cos(half)
    ratio = tl.where(libdevice.sin(half) != 1.0, ratio, alternating(n, m))
    r = tl.where(deep, ratio, chebyshev_recurrence(x, tl.where(deep, 0, n), x + x - 1.0))
    end = tl.where(x > 0.0, 1.0, alternating(n, m))
    return tl.where(n < 0, 0.0, tl.where(tl.abs(x) == 1.0, end, r)).to(x.dtype)


@jit
def chebyshev_w(x, degree, trigonometric: tl.constexpr):
    x, n = whole_degree(x, degree)
    deep = (n > trigonometric) & (tl.abs(x) < 1.0)
    m = (n + n + 1).to(x.dtype)
    half = libdevice.acos(tl.where(deep, x, 0.0)) / 2.0
    s = libdevice.sin(half)
    ratio = libdevice.sin(m * half) / tl.where(s != 0.0, s, 1.0)
    end = tl.where(x > 0.0, m, alternating(n, x * 0.0 + 1.0))
    ratio = tl.where(libdevice.cos(half) != 1.0, ratio, end)
    r = tl.where(deep, ratio, chebyshev_recurrence(x, tl.where(deep, 0, n), x + x + 1.0))
    return tl.where(n < 0, 0.0, tl.where(tl.abs(x) == 1.0, end, r)).to(x.dtype)


@jit
def hermite(x, degree, first, step: tl.constexpr):
    x, n = whole_degree(x, degree)
    most = 512 if x.dtype == tl.float64 else 128
    p = x * 0.0 + 1.0
    q = first + p * 0.0
    m = tl.where(n > most, 0, n)
    k = 1
    while any_of((m > k) & (q == q)):
        r = tl.fma(first + p * 0.0, q, -(p * (step * k)))
        more = (m > k) & (q == q)
        p = tl.where(more, q, p)
        q = tl.where(more, r, q)
        k += 1
    r = tl.where(n > most, float("nan"), q)
    return tl.where(n < 0, 0.0, tl.where(n == 0, 1.0, r)).to(x.dtype)


@jit
def laguerre_polynomial_l(x, degree):
    x, n = whole_degree(x, degree)
    p = x * 0.0 + 1.0
    q = 1.0 - x
    k = 1
    while any_of((n > k) & (q == q)):
        r = tl.fma((1.0 - x) + (k + k), q, -(p * k)) / (k + 1)
        more = (n > k) & (q == q)
        p = tl.where(more, q, p)
        q = tl.where(more, r, q)
        k += 1
    r = tl.where((x == 0.0) | (n == 0), 1.0, q)
    return tl.where(n < 0, 0.0, r).to(x.dtype)


@jit
def legendre_polynomial_p(x, degree):
    x, n = whole_degree(x, degree)
    p = x * 0.0 + 1.0
    q = x
    k = 1
    while any_of((n > k) & (q == q)):
        r = tl.fma(x * (k + k + 1), q, -(p * k)) / (k + 1)
        more = (n > k) & (q == q)
        p = tl.where(more, q, p)
        q = tl.where(more, r, q)
        k += 1
    end = tl.where(x > 0.0, 1.0, alternating(n, x * 0.0 + 1.0))
    r = tl.where(n == 0, 1.0, tl.where(tl.abs(x) == 1.0, end, q))
    return tl.where(n < 0, 0.0, r).to(x.dtype)


@jit
def chebyshev_polynomial_t(x, n):
    return chebyshev_t(x, n, 6)


@jit
def chebyshev_polynomial_u(x, n):
    return chebyshev_u(x, n, 8)


@jit
def chebyshev_polynomial_v(x, n):
    return chebyshev_v(x, n, 8)


@jit
def chebyshev_polynomial_w(x, n):
    return chebyshev_w(x, n, 8)


@jit
def shifted_chebyshev_polynomial_t(x, n):
    return chebyshev_t(x + x - 1.0, n, 6)


@jit
def shifted_chebyshev_polynomial_u(x, n):
    return chebyshev_u(x + x - 1.0, n, 6)


@jit
def shifted_chebyshev_polynomial_v(x, n):
    return chebyshev_v(x + x - 1.0, n, 6)


@jit
def shifted_chebyshev_polynomial_w(x, n):
    return chebyshev_w(x + x - 1.0, n, 4)


@jit
def hermite_polynomial_h(x, n):
    return hermite(x, n, x + x, 2.0)


@jit
def hermite_polynomial_he(x, n):
    return hermite(x, n, x, 1.0)
