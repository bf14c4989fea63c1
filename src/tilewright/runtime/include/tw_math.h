// Unary and binary float maths for float and double.
//
// Two kinds: short polynomials written here for what neural networks use most (float exp, log, tanh
// and relatives), which inline into the loop, and libm functions declared with their vector
// variants, so that a `#pragma omp simd` loop calls glibc's libmvec. The polynomials are minimax
// fits of our own; errors are tested against float64.
#pragma once

// glibc's math.h declares the vector variants only under -ffast-math, which would lose NaN and
// infinity; we declare them ourselves. x86 glibc has six of them since 2.22 and all since 2.35.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define TW_VECTOR_VARIANT __attribute__((__simd__("notinbranch"), const))
#else
#define TW_VECTOR_VARIANT __attribute__((const))
#endif
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 35)
#define TW_VECTOR_235 TW_VECTOR_VARIANT
#else
#define TW_VECTOR_235 __attribute__((const))
#endif

#define TW_LIBM1(attribute, name)                \
    extern "C" {                                 \
    attribute double name(double) noexcept;      \
    attribute float name##f(float) noexcept;     \
    }                                            \
    namespace tw {                               \
    TW_INLINE double name(double x) { return ::name(x); } \
    }
#define TW_LIBM1F(attribute, name)               \
    TW_LIBM1(attribute, name)                    \
    namespace tw {                               \
    TW_INLINE float name(float x) { return ::name##f(x); } \
    }
#define TW_LIBM2(attribute, name)                          \
    extern "C" {                                           \
    attribute double name(double, double) noexcept;        \
    attribute float name##f(float, float) noexcept;        \
    }                                                      \
    namespace tw {                                         \
    TW_INLINE double name(double x, double y) { return ::name(x, y); }  \
    TW_INLINE float name(float x, float y) { return ::name##f(x, y); } \
    }

// Float has a polynomial below.
TW_LIBM1(TW_VECTOR_VARIANT, exp)
TW_LIBM1(TW_VECTOR_VARIANT, log)
TW_LIBM1(TW_VECTOR_235, exp2)
TW_LIBM1(TW_VECTOR_235, expm1)
TW_LIBM1(TW_VECTOR_235, log1p)
TW_LIBM1(TW_VECTOR_235, tanh)
TW_LIBM1(TW_VECTOR_235, erf)

TW_LIBM1F(TW_VECTOR_VARIANT, sin)
TW_LIBM1F(TW_VECTOR_VARIANT, cos)
TW_LIBM1F(TW_VECTOR_235, log2)
TW_LIBM1F(TW_VECTOR_235, log10)
TW_LIBM1F(TW_VECTOR_235, tan)
TW_LIBM1F(TW_VECTOR_235, asin)
TW_LIBM1F(TW_VECTOR_235, acos)
TW_LIBM1F(TW_VECTOR_235, atan)
TW_LIBM1F(TW_VECTOR_235, sinh)
TW_LIBM1F(TW_VECTOR_235, cosh)
TW_LIBM1F(TW_VECTOR_235, asinh)
TW_LIBM1F(TW_VECTOR_235, acosh)
TW_LIBM1F(TW_VECTOR_235, atanh)
TW_LIBM1F(TW_VECTOR_235, erfc)
TW_LIBM2(TW_VECTOR_VARIANT, pow)
TW_LIBM2(TW_VECTOR_235, atan2)
TW_LIBM2(TW_VECTOR_235, hypot)
TW_LIBM2(__attribute__((const)), nextafter)

extern "C" {
double lgamma_r(double, int*) noexcept;
float lgammaf_r(float, int*) noexcept;
__attribute__((const)) double ldexp(double, int) noexcept;
}

#undef TW_LIBM1
#undef TW_LIBM1F
#undef TW_LIBM2

namespace tw {

// Fused where the machine has it. Without it the constants below still carry enough trailing zeros
// for the argument reductions to be exact.
TW_INLINE float fma(float a, float b, float c) {
#ifdef __FMA__
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
TW_INLINE double fma(double a, double b, double c) {
#ifdef __FMA__
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

// c0 + c1 x + c2 x^2 + ...
template <class T>
TW_INLINE T polynomial(T, T c0) {
    return c0;
}
template <class T, class... C>
TW_INLINE T polynomial(T x, T c0, C... rest) {
    return fma(polynomial(x, T(rest)...), x, c0);
}

// -------------------------------------------------------------------------------------- rounding
TW_INLINE float ceil(float x) { return __builtin_ceilf(x); }
TW_INLINE double ceil(double x) { return __builtin_ceil(x); }
TW_INLINE float round(float x) { return __builtin_rintf(x); }  // halves to even
TW_INLINE double round(double x) { return __builtin_rint(x); }

template <class T>
TW_INLINE bool isnan(T x) {
    return x != x;
}
template <class T>
TW_INLINE bool isinf(T x) {
    if constexpr (is_float<T>) return abs(x) == limits<T>::inf;
    return false;
}
template <class T>
TW_INLINE bool isfinite(T x) {
    if constexpr (is_float<T>) return abs(x) < limits<T>::inf;
    return true;
}

TW_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
TW_INLINE double sqrt(double x) { return __builtin_sqrt(x); }
template <class T>
TW_INLINE T rsqrt(T x) {
    return T(1) / sqrt(x);
}

// --------------------------------------------------------------------------------- exp and its kin
constexpr float LOG2E_F = 1.44269504f;
constexpr float LN2_HI_F = 0.693145752f;      // 0x1.62e4p-1: eleven trailing zeros
constexpr float LN2_LO_F = 1.42860677e-6f;    // ln 2 - LN2_HI_F

TW_INLINE float pow2i(int32_t n) { return bit_cast<float>((n + 127) << 23); }

// e^r - 1 for |r| <= ln(2)/2.
TW_INLINE float expm1_reduced(float r) {
    float p = polynomial(r, 0.5f, 0.16666667f, 0.04166635f, 0.008333276f, 0.001394126f,
                         0.00019912406f);
    return fma(r * r, p, r);
}

// (1 + m) * 2^n in two steps, so that the result may be denormal or overflow with one rounding.
TW_INLINE float scale2(float m1, float n) {
    int32_t k = int32_t(n);
    int32_t half = k >> 1;
    return (m1 + 1.0f) * pow2i(half) * pow2i(k - half);
}

TW_INLINE float exp(float x) {
    // A comparison with NaN is false: NaN passes through the clamps and through all that follows.
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    float n = round(x * LOG2E_F);
    float r = fma(n, -LN2_LO_F, fma(n, -LN2_HI_F, x));
    return scale2(expm1_reduced(r), n);
}

TW_INLINE float exp2(float x) {
    x = x > 129.0f ? 129.0f : x;
    x = x < -151.0f ? -151.0f : x;
    float n = round(x);
    return scale2(expm1_reduced((x - n) * 0.69314718f), n);
}

TW_INLINE float expm1(float x) {
    float c = x > 89.0f ? 89.0f : x;
    c = c < -18.0f ? -18.0f : c;
    float n = round(c * LOG2E_F);
    float r = fma(n, -LN2_LO_F, fma(n, -LN2_HI_F, c));
    float s = pow2i(int32_t(n) - 1);
    float y = 2.0f * fma(s, expm1_reduced(r), s - 0.5f);
    return abs(x) < 1e-8f ? x : y;  // keeps the sign of zero
}

template <class T>
TW_INLINE T sigmoid(T x) {
    return T(1) / (T(1) + exp(-x));
}

TW_INLINE float tanh(float x) {
    float a = abs(x);
    float z = x * x;
    float p = polynomial(z, -0.33333278f, 0.13331328f, -0.053729217f, 0.020601973f,
                         -0.005660754f);
    float small = fma(a * z, p, a);
    float big = 1.0f - 2.0f / (exp(2.0f * a) + 1.0f);
    return copysign(a < 0.625f ? small : big, x);
}

// ------------------------------------------------------------------------------------------- log
TW_INLINE float log(float x) {
    bool tiny = x < 0x1p-126f;
    float y = tiny ? x * 0x1p25f : x;
    // Split into 2^e * m with m in [sqrt(1/2), sqrt(2)).
    int32_t u = bit_cast<int32_t>(y);
    int32_t e = (u - 0x3f3504f3) >> 23;
    float f = bit_cast<float>(u - (e << 23)) - 1.0f;
    float n = float(e) - (tiny ? 25.0f : 0.0f);
    float z = f * f;
    float p = polynomial(f, 0.3333333f, -0.25000823f, 0.20001227f, -0.16623354f, 0.14201777f,
                         -0.13160233f, 0.12761468f, -0.076342255f);
    float r = fma(n, LN2_LO_F, p * f * z);
    r = fma(-0.5f, z, r) + f;
    r = fma(n, LN2_HI_F, r);
    r = x < limits<float>::inf ? r : x;  // +inf and NaN are their own logarithms
    r = x < 0.0f ? limits<float>::nan : r;
    return x == 0.0f ? -limits<float>::inf : r;
}

TW_INLINE float log1p(float x) {
    float u = 1.0f + x;
    float y = log(u) + (x - (u - 1.0f)) / u;  // the quotient repairs the rounding of u
    y = (u == limits<float>::inf) | (u <= 0.0f) ? log(u) : y;
    return abs(x) < 1e-8f ? x : y;
}

// ------------------------------------------------------------------------------------------- erf
// Measured (AVX2, g++ 12, glibc 2.36): libmvec's takes 0.6 ns, the fit below 1.5 ns. The other way
// round for exp (0.64 against 0.57 ns) and expm1 (0.82 against 0.54 ns).
#if defined(__x86_64__) && defined(__GLIBC__) && __GLIBC_PREREQ(2, 35)
TW_INLINE float erf(float x) { return ::erff(x); }
#else
TW_INLINE float erf(float x) {
    float a = abs(x);
    float z = x * x;
    float p = polynomial(z, 0.12837917f, -0.37612632f, 0.11283666f, -0.026857791f, 0.0051971544f,
                         -0.0008099874f, 8.193768e-05f);
    float small = fma(x, p, x);
    float c = a > 4.0f ? 4.0f : a;
    float q = polynomial(c, 1.1285415f, 0.6356731f, 0.10516953f, -0.022575652f, 0.0028691445f,
                         -2.7444024e-05f, -4.993869e-05f, 5.296852e-06f);
    float big = copysign(1.0f - exp(-c * q), x);
    return a < 0.948f ? small : big;
}
#endif

// 1 + erf(x), twice the normal distribution in a gelu: 2^-y or 2 - 2^-y, where y = |x| q(|x|) is a
// fit of -log2 erfc(|x|) on [0, 4] that goes on growing beyond it. Off by 2e-7, and zero far below
// zero. Measured in a gelu (AVX-512, g++ 12, glibc 2.36): 0.34 ns an element, 0.72 with libmvec's erf.
TW_INLINE float one_plus_erf(float x) {
    constexpr float HALVES = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole
    constexpr float LEAST = 0x1p-126f;
    float a = abs(x);
    float q = polynomial(a, 1.62791f, 0.9183916f, 0.14862187f, -0.028612735f, 0.0012454028f,
                         0.0011636082f, -0.00033294625f, 3.0155143e-05f);
    float y = a * q;
    y = y > 126.0f ? 126.0f : y;
    float whole = y + HALVES;
    float f = (whole - HALVES) - y;
    float p = polynomial(f, 1.0f, 0.693147f, 0.24022242f, 0.055507336f, 0.009671513f, 0.0013264727f);
    float power = bit_cast<float>(0x3f800000 - (bit_cast<int32_t>(whole) << 23));
    float e = fma(p, power, -LEAST);
    return x < 0.0f ? e : 2.0f - e;
}

// ------------------------------------------------------------------------------------- the others
TW_INLINE double lgamma(double x) {
    int sign;
    return ::lgamma_r(x, &sign);
}
TW_INLINE float lgamma(float x) {
    int sign;
    return ::lgammaf_r(x, &sign);
}
// x * 2^n for a float n, as torch computes it: the power is rounded on its own.
template <class T>
TW_INLINE T ldexp(T x, T n) {
    return x * pow(T(2), n);
}

}  // namespace tw
