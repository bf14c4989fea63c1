// Special functions, in double throughout: float arguments are widened and the result is rounded.
// Domains, poles and limits follow torch.special.
#pragma once

#include "tw_tables.h"

// Marks the functions that kernels call by name; the builder reads the names from these lines.
#define TW_SPECIAL_FN inline
#define TW_FLOAT1(name) \
    inline float name(float x) { return float(name(double(x))); }
#define TW_FLOAT2(name) \
    inline float name(float x, float y) { return float(name(double(x), double(y))); }

namespace tw {

constexpr double NAN_D = limits<double>::nan, INF_D = limits<double>::inf;
constexpr double PI = 3.14159265358979323846;

// Clenshaw's summation of a Chebyshev series.
template <int N>
inline double series(const double (&c)[N], double t) {
    double b1 = 0, b2 = 0;
    for (int j = N - 1; j > 0; --j) {
        double b0 = 2 * t * b1 - b2 + c[j];
        b2 = b1;
        b1 = b0;
    }
    return t * b1 - b2 + c[0];
}

// ----------------------------------------------------------------------- modified Bessel functions
TW_SPECIAL_FN double i0e(double x) {
    double a = abs(x);
    return a <= 8 ? series(tables::I0E_SMALL, a / 4 - 1)
                  : series(tables::I0E_LARGE, 16 / a - 1) / sqrt(a);
}
TW_SPECIAL_FN double i1e(double x) {
    double a = abs(x);
    if (a <= 8) return x * series(tables::I1E_SMALL, a / 4 - 1);
    return copysign(series(tables::I1E_LARGE, 16 / a - 1) / sqrt(a), x);
}
TW_SPECIAL_FN double i0(double x) { return exp(abs(x)) * i0e(x); }
TW_SPECIAL_FN double i1(double x) { return exp(abs(x)) * i1e(x); }
TW_SPECIAL_FN double modified_bessel_i0(double x) { return i0(x); }
TW_SPECIAL_FN double modified_bessel_i1(double x) { return i1(x); }

// K_n for 0 < x <= 2.
inline double k0_small(double x) {
    return series(tables::K0_SMALL, x * x / 2 - 1) - log(x / 2) * i0(x);
}
inline double k1_small(double x) {
    return series(tables::K1_SMALL, x * x / 2 - 1) / x + log(x / 2) * i1(x);
}
TW_SPECIAL_FN double scaled_modified_bessel_k0(double x) {
    if (!(x > 0)) return x == 0 ? INF_D : NAN_D;
    return x <= 2 ? exp(x) * k0_small(x) : series(tables::K0E_LARGE, 4 / x - 1) / sqrt(x);
}
TW_SPECIAL_FN double scaled_modified_bessel_k1(double x) {
    if (!(x > 0)) return x == 0 ? INF_D : NAN_D;
    return x <= 2 ? exp(x) * k1_small(x) : series(tables::K1E_LARGE, 4 / x - 1) / sqrt(x);
}
TW_SPECIAL_FN double modified_bessel_k0(double x) {
    if (x > 0 && x <= 2) return k0_small(x);
    return exp(-x) * scaled_modified_bessel_k0(x);
}
TW_SPECIAL_FN double modified_bessel_k1(double x) {
    if (x > 0 && x <= 2) return k1_small(x);
    return exp(-x) * scaled_modified_bessel_k1(x);
}

// -------------------------------------------------------------------------------- Bessel functions
// Beyond 8: sqrt(2 / (pi x)) times (P cos - 8/x Q sin) for J and (P sin + 8/x Q cos) for Y, of the
// argument x - pi/4 - n pi/2. The shift is applied through the sum formulas: subtracting it from a
// large x would lose digits.
struct wave {
    double j, y;
};
inline wave bessel_wave(double x, double p, double q, int order) {
    double s = sin(x), c = cos(x);
    double cs = order == 0 ? c + s : s - c;   // sqrt(2) cos(x - shift)
    double sn = order == 0 ? s - c : -s - c;  // sqrt(2) sin(x - shift)
    double scale = 1 / sqrt(PI * x);
    q *= 8 / x;
    return {scale * (p * cs - q * sn), scale * (p * sn + q * cs)};
}
inline wave bessel_wave0(double x) {
    double t = 128 / (x * x) - 1;
    return bessel_wave(x, series(tables::JY0_P, t), series(tables::JY0_Q, t), 0);
}
inline wave bessel_wave1(double x) {
    double t = 128 / (x * x) - 1;
    return bessel_wave(x, series(tables::JY1_P, t), series(tables::JY1_Q, t), 1);
}
TW_SPECIAL_FN double bessel_j0(double x) {
    double a = abs(x), z = x * x;
    if (a <= 8)
        return (z - 5.783185962946784) * (z - 30.471262343662087) *
               series(tables::J0_SMALL, z / 32 - 1);
    return bessel_wave0(a).j;
}
TW_SPECIAL_FN double bessel_j1(double x) {
    double a = abs(x), z = x * x;
    if (a <= 8)
        return x * (z - 14.681970642123893) * (z - 49.2184563216946) *
               series(tables::J1_SMALL, z / 32 - 1);
    double j = bessel_wave1(a).j;
    return x < 0 ? -j : j;
}
TW_SPECIAL_FN double bessel_y0(double x) {
    if (!(x > 0)) return x == 0 ? -INF_D : NAN_D;
    if (x <= 8) return series(tables::Y0_SMALL, x * x / 32 - 1) + 2 / PI * log(x) * bessel_j0(x);
    return bessel_wave0(x).y;
}
TW_SPECIAL_FN double bessel_y1(double x) {
    if (!(x > 0)) return x == 0 ? -INF_D : NAN_D;
    if (x <= 8)
        return x * series(tables::Y1_SMALL, x * x / 32 - 1) +
               2 / PI * (log(x) * bessel_j1(x) - 1 / x);
    return bessel_wave1(x).y;
}
TW_SPECIAL_FN double spherical_bessel_j0(double x) {
    if (isinf(x)) return 0;
    if (abs(x) < 0.5) {
        double z = x * x;
        return polynomial(z, 1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880,
                          -1.0 / 39916800, 1.0 / 6227020800);
    }
    return sin(x) / x;
}
TW_SPECIAL_FN double airy_ai(double x) {
    if (isinf(x)) return NAN_D;
    if (abs(x) <= 2.5) return series(tables::AIRY_MIDDLE, x / 2.5);
    constexpr double z0 = 2.6352313834736494;  // 2/3 * 2.5^(3/2)
    constexpr double root_pi = 1.7724538509055160273;
    double a = abs(x), z = 2 * a * sqrt(a) / 3, fourth = sqrt(sqrt(a));
    if (x > 0) return exp(-z) * series(tables::AIRY_LARGE, 2 * z0 / z - 1) / (2 * root_pi * fourth);
    double u = z0 / z, t = 2 * u * u - 1, s = sin(z), c = cos(z);
    double f = series(tables::AIRY_F, t), g = series(tables::AIRY_G, t) / z;
    return (f * (s + c) - g * (c - s)) * 0.70710678118654752440 / (root_pi * fourth);
}

// ------------------------------------------------------------------------------ the error function
TW_SPECIAL_FN double erfcx(double x) {
    if (x < 0) {
        double e = exp(x * x);
        // Below -26.7 the first term is infinite and the second must not be subtracted from it.
        return e == INF_D ? e : 2 * e - erfcx(-x);
    }
    if (x == INF_D) return 0;
    return series(tables::ERFCX, (x - 3.75) / (x + 3.75)) / 2 / (0.5 + x);
}
TW_SPECIAL_FN double erfinv(double x) {
    if (abs(x) >= 1) return abs(x) == 1 ? copysign(INF_D, x) : NAN_D;
    double w = -log((1 - x) * (1 + x));
    if (w <= 5) return x * series(tables::ERFINV_SMALL, w / 2.5 - 1);
    constexpr double lo = 2.23606797749978969641, hi = 6.05;
    return x * series(tables::ERFINV_LARGE, (2 * sqrt(w) - (hi + lo)) / (hi - lo));
}
// The normal quantile of a small probability, negated: s + correction(1 / s), s = sqrt(-2 log p).
inline double ndtri_tail(double p) {
    double s = sqrt(-2 * log(p)), u = 1 / s;
    if (s <= 6) {
        constexpr double lo = 1.0 / 6, hi = 1 / 1.6;
        return s + series(tables::NDTRI_MID, (2 * u - (hi + lo)) / (hi - lo));
    }
    constexpr double lo = 1.0 / 39, hi = 1.0 / 6;
    return s + series(tables::NDTRI_FAR, (2 * u - (hi + lo)) / (hi - lo));
}
TW_SPECIAL_FN double ndtri(double p) {
    if (!(p > 0 && p < 1)) return p == 0 ? -INF_D : (p == 1 ? INF_D : NAN_D);
    if (p < 0.13) return -ndtri_tail(p);
    if (p > 0.87) return ndtri_tail(1 - p);
    return 1.41421356237309504880 * erfinv(2 * p - 1);
}
TW_SPECIAL_FN double log_ndtr(double x) {
    double t = x * 0.70710678118654752440;
    return x < -1 ? log(erfcx(-t) / 2) - t * t : log1p(-erfc(t) / 2);
}

// ------------------------------------------------------------------------ the gamma function's kin
TW_SPECIAL_FN double digamma(double x) {
    if (x == 0) return copysign(INF_D, -x);
    double reflected = 0;
    if (x < 0) {
        double f = x - trunc(x);  // exact, also next to zero
        if (f == 0) return NAN_D;
        reflected = -PI / tan(PI * f);
        x = 1 - x;
    }
    double shifted = 0;
    for (; x < 12; x += 1) shifted -= 1 / x;
    double z = 1 / (x * x);
    double p = polynomial(z, 1.0 / 12, -1.0 / 120, 1.0 / 252, -1.0 / 240, 1.0 / 132,
                          -691.0 / 32760, 1.0 / 12);
    return reflected + shifted + log(x) - 0.5 / x - z * p;
}

// Hurwitz zeta by Euler and Maclaurin: a dozen terms, the integral of the rest, and corrections
// with the even Bernoulli numbers over factorials.
TW_SPECIAL_FN double zeta(double x, double q) {
    if (x == 1) return INF_D;
    if (x < 1) return NAN_D;
    if (q <= 0) {
        if (q == floor(q)) return INF_D;
        if (x != floor(x)) return NAN_D;
    }
    if (q < -50) {
        // Summing from q up would take forever. The n negative terms are, up to their sign, those
        // of zeta(x, 1 - f) before it reaches 1 - f + n.
        double n = -floor(q), f = q + n;
        double below = zeta(x, 1 - f) - zeta(x, 1 - f + n);
        return zeta(x, f) + (fmod(x, 2.0) == 0 ? below : -below);
    }
    double sum = 0, a = q;
    for (int k = 0; k < 12 || a <= 12; ++k, a += 1) {
        double term = pow(a, -x);
        sum += term;
        if (a > 0 && abs(term) < 1e-17 * abs(sum)) return sum;
    }
    double power = pow(a, -x);
    sum += power * a / (x - 1) + power / 2;
    constexpr double b[] = {1.0 / 12, -1.0 / 720, 1.0 / 30240, -1.0 / 1209600, 1.0 / 47900160,
                            -691.0 / 1307674368000, 1.0 / 74724249600,
                            -3617.0 / 10670622842880000};
    double factor = x * power / a;
    for (int k = 0; k < 8; ++k) {
        sum += b[k] * factor;
        factor *= (x + 2 * k + 1) * (x + 2 * k + 2) / (a * a);
    }
    return sum;
}
TW_FLOAT2(zeta)

// As in torch, rounding of the sine keeps the poles at negative integers finite.
inline double trigamma(double x) {
    double sign = 1, sum = 0;
    if (x < 0.5) {
        double s = sin(PI * x);
        sum = -PI * PI / (s * s);
        sign = -1;
        x = 1 - x;
    }
    for (; x < 12; x += 1) sum += 1 / (x * x);
    double z = 1 / (x * x);
    double p = polynomial(z, 1.0 / 6, -1.0 / 30, 1.0 / 42, -1.0 / 30, 5.0 / 66, -691.0 / 2730,
                          7.0 / 6);
    return sign * (sum + 1 / x + z / 2 + z / x * p);
}

TW_SPECIAL_FN double polygamma(int64_t n, double x) {
    if (n == 0) return digamma(x);
    if (n == 1) return trigamma(x);
    double factorial = exp(lgamma(double(n) + 1));
    return (n % 2 ? factorial : -factorial) * zeta(double(n + 1), x);
}
inline float polygamma(int64_t n, float x) { return float(polygamma(n, double(x))); }

// log(1 + x) - x without cancellation for small x.
inline double log1pmx(double x) {
    if (abs(x) > 0.3) return log1p(x) - x;
    // log(1 + x) = 2 atanh(r), r = x / (2 + x).
    double r = x / (2 + x), z = r * r, term = r * z, sum = 0;
    for (int k = 3; k < 60; k += 2, term *= z) {
        double next = sum + term / k;
        if (next == sum) break;
        sum = next;
    }
    return 2 * sum - x * r;  // 2 r - x = -x r
}
// x^a e^-x / Gamma(a + 1), from Stirling's series when a is large, where the logarithms would
// cancel.
inline double gamma_density(double a, double x) {
    if (a < 20) return exp(a * log(x) - x - lgamma(a + 1));
    double z = 1 / (a * a);
    double stirling = polynomial(z, 1.0 / 12, -1.0 / 360, 1.0 / 1260, -1.0 / 1680, 1.0 / 1188) / a;
    return exp(a * log1pmx((x - a) / a) - stirling) / sqrt(2 * PI * a);
}
constexpr int GAMMA_TERMS = 20000;
// P(a, x) by its power series, good for x <= a + 1.
inline double gamma_series(double a, double x) {
    double sum = 1, term = 1;
    for (int k = 1; k < GAMMA_TERMS; ++k) {
        term *= x / (a + k);
        sum += term;
        if (term < 1e-17 * sum) break;
    }
    return sum * gamma_density(a, x);
}
// Q(a, x) by its continued fraction (Lentz's way), good for x > a + 1.
inline double gamma_fraction(double a, double x) {
    constexpr double tiny = 1e-300;
    double b = x + 1 - a, c = 1 / tiny, d = 1 / b, h = d;
    for (int k = 1; k < GAMMA_TERMS; ++k) {
        double an = -double(k) * (k - a);
        b += 2;
        d = an * d + b;
        d = 1 / (abs(d) < tiny ? tiny : d);
        c = b + an / c;
        c = abs(c) < tiny ? tiny : c;
        h *= d * c;
        if (abs(d * c - 1) < 1e-16) break;
    }
    return h * gamma_density(a, x) * a;
}
// P or Q where a limit decides; -1 elsewhere.
inline double gamma_edge(double a, double x, double at_zero, double at_inf) {
    if (x < 0 || a < 0) return NAN_D;
    if (a == 0) return x > 0 ? at_inf : NAN_D;
    if (x == 0) return at_zero;
    if (isinf(a)) return isinf(x) ? NAN_D : at_zero;
    if (isinf(x)) return at_inf;
    return a != a || x != x ? NAN_D : -1;
}
TW_SPECIAL_FN double igamma(double a, double x) {
    double edge = gamma_edge(a, x, 0, 1);
    if (!(edge == -1)) return edge;
    return x > a + 1 ? 1 - gamma_fraction(a, x) : gamma_series(a, x);
}
TW_SPECIAL_FN double igammac(double a, double x) {
    double edge = gamma_edge(a, x, 1, 0);
    if (!(edge == -1)) return edge;
    return x > a + 1 ? gamma_fraction(a, x) : 1 - gamma_series(a, x);
}
TW_FLOAT2(igamma)
TW_FLOAT2(igammac)

TW_FLOAT1(i0)
TW_FLOAT1(i0e)
TW_FLOAT1(i1)
TW_FLOAT1(i1e)
TW_FLOAT1(modified_bessel_i0)
TW_FLOAT1(modified_bessel_i1)
TW_FLOAT1(modified_bessel_k0)
TW_FLOAT1(modified_bessel_k1)
TW_FLOAT1(scaled_modified_bessel_k0)
TW_FLOAT1(scaled_modified_bessel_k1)
TW_FLOAT1(bessel_j0)
TW_FLOAT1(bessel_j1)
TW_FLOAT1(bessel_y0)
TW_FLOAT1(bessel_y1)
TW_FLOAT1(spherical_bessel_j0)
TW_FLOAT1(airy_ai)
TW_FLOAT1(erfcx)
TW_FLOAT1(erfinv)
TW_FLOAT1(ndtri)
TW_FLOAT1(log_ndtr)
TW_FLOAT1(digamma)

}  // namespace tw

#include "tw_polynomials.h"

#undef TW_FLOAT1
#undef TW_FLOAT2
