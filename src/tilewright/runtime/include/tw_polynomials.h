// Orthogonal polynomials by their three-term recurrences, in the element type itself: overflow
// comes where it comes in eager, and each step is rounded once (fma) as there. High degrees inside
// the interval use the trigonometric forms, as there.
#pragma once

namespace tw {

template <class T>
constexpr bool inside(T x) {
    return abs(x) < T(1);
}

// p_k = 2 y p_{k-1} - p_{k-2}, from p_0 = 1 and a given p_1.
template <class T>
inline T chebyshev_recurrence(T y, int64_t n, T first) {
    if (n == 0) return T(1);
    T p = T(1), q = first;
    for (int64_t k = 2; k <= n && q == q; ++k) {
        T r = fma(y + y, q, -p);
        p = q;
        q = r;
    }
    return q;
}

template <class T>
T alternating(int64_t n, T x) {
    return n % 2 == 0 ? x : -x;
}

template <class T>
inline T chebyshev_t(T x, int64_t n, int64_t trigonometric_from) {
    if (n < 0) return T(0);
    if (abs(x) == T(1)) return x > T(0) ? T(1) : alternating(n, T(1));
    if (n > trigonometric_from && inside(x)) return cos(T(n) * acos(x));
    return chebyshev_recurrence(x, n, x);
}
template <class T>
inline T chebyshev_u(T x, int64_t n, int64_t trigonometric_from) {
    if (n < 0) return T(0);
    if (abs(x) == T(1)) return x > T(0) ? T(n + 1) : alternating(n, T(n + 1));
    if (n > trigonometric_from && inside(x)) {
        T angle = acos(x), s = sin(angle);
        return s != T(0) ? sin(T(n + 1) * angle) / s : T(n + 1) * cos(T(n + 1) * angle) / x;
    }
    return chebyshev_recurrence(x, n, x + x);
}
template <class T>
inline T chebyshev_v(T x, int64_t n, int64_t trigonometric_from) {
    if (n < 0) return T(0);
    if (abs(x) == T(1)) return x > T(0) ? T(1) : alternating(n, T(n + n + 1));
    if (n > trigonometric_from && inside(x)) {
        T half = acos(x) / T(2);
        return sin(half) != T(1) ? cos(T(n + n + 1) * half) / cos(half)
                                 : alternating(n, T(n + n + 1));
    }
    return chebyshev_recurrence(x, n, x + x - T(1));
}
template <class T>
inline T chebyshev_w(T x, int64_t n, int64_t trigonometric_from) {
    if (n < 0) return T(0);
    if (abs(x) == T(1)) return x > T(0) ? T(n + n + 1) : alternating(n, T(1));
    if (n > trigonometric_from && inside(x)) {
        T half = acos(x) / T(2);
        if (cos(half) != T(1)) return sin(T(n + n + 1) * half) / sin(half);
        return x > T(0) ? T(n + n + 1) : alternating(n, T(1));
    }
    return chebyshev_recurrence(x, n, x + x + T(1));
}

// The degree is a tensor element: a float is truncated. A degree beyond what the recurrence can
// represent gives NaN.
template <class T>
inline T hermite(T x, int64_t n, T first, T step) {
    if (n < 0) return T(0);
    if (n == 0) return T(1);
    if (n == 1) return first;
    if (n > (same<T, float> ? 128 : 512)) return limits<T>::nan;
    T p = T(1), q = first;
    for (int64_t k = 1; k < n && q == q; ++k) {
        T r = fma(first, q, -(step * T(k) * p));
        p = q;
        q = r;
    }
    return q;
}

TW_SPECIAL_FN double chebyshev_polynomial_t(double x, double n) {
    return chebyshev_t(x, int64_t(n), 6);
}
TW_SPECIAL_FN double chebyshev_polynomial_u(double x, double n) {
    return chebyshev_u(x, int64_t(n), 8);
}
TW_SPECIAL_FN double chebyshev_polynomial_v(double x, double n) {
    return chebyshev_v(x, int64_t(n), 8);
}
TW_SPECIAL_FN double chebyshev_polynomial_w(double x, double n) {
    return chebyshev_w(x, int64_t(n), 8);
}
TW_SPECIAL_FN double shifted_chebyshev_polynomial_t(double x, double n) {
    return chebyshev_t(x + x - 1, int64_t(n), 6);
}
TW_SPECIAL_FN double shifted_chebyshev_polynomial_u(double x, double n) {
    return chebyshev_u(x + x - 1, int64_t(n), 6);
}
TW_SPECIAL_FN double shifted_chebyshev_polynomial_v(double x, double n) {
    return chebyshev_v(x + x - 1, int64_t(n), 6);
}
TW_SPECIAL_FN double shifted_chebyshev_polynomial_w(double x, double n) {
    return chebyshev_w(x + x - 1, int64_t(n), 4);
}
TW_SPECIAL_FN double hermite_polynomial_h(double x, double n) {
    return hermite(x, int64_t(n), x + x, 2.0);
}
TW_SPECIAL_FN double hermite_polynomial_he(double x, double n) {
    return hermite(x, int64_t(n), x, 1.0);
}

template <class T>
inline T laguerre(T x, int64_t n) {
    if (n < 0) return T(0);
    if (x == T(0) || n == 0) return T(1);
    T p = T(1), q = T(1) - x;
    for (int64_t k = 1; k < n && q == q; ++k) {
        T r = fma(T(k + k) + (T(1) - x), q, -(T(k) * p)) / T(k + 1);
        p = q;
        q = r;
    }
    return q;
}
template <class T>
inline T legendre(T x, int64_t n) {
    if (n < 0) return T(0);
    if (abs(x) == T(1)) return x > T(0) ? T(1) : alternating(n, T(1));
    if (n == 0) return T(1);
    T p = T(1), q = x;
    for (int64_t k = 1; k < n && q == q; ++k) {
        T r = fma(T(k + k + 1) * x, q, -(T(k) * p)) / T(k + 1);
        p = q;
        q = r;
    }
    return q;
}
TW_SPECIAL_FN double laguerre_polynomial_l(double x, double n) { return laguerre(x, int64_t(n)); }
TW_SPECIAL_FN double legendre_polynomial_p(double x, double n) { return legendre(x, int64_t(n)); }

inline float chebyshev_polynomial_t(float x, float n) { return chebyshev_t(x, int64_t(n), 6); }
inline float chebyshev_polynomial_u(float x, float n) { return chebyshev_u(x, int64_t(n), 8); }
inline float chebyshev_polynomial_v(float x, float n) { return chebyshev_v(x, int64_t(n), 8); }
inline float chebyshev_polynomial_w(float x, float n) { return chebyshev_w(x, int64_t(n), 8); }
inline float shifted_chebyshev_polynomial_t(float x, float n) {
    return chebyshev_t(x + x - 1, int64_t(n), 6);
}
inline float shifted_chebyshev_polynomial_u(float x, float n) {
    return chebyshev_u(x + x - 1, int64_t(n), 6);
}
inline float shifted_chebyshev_polynomial_v(float x, float n) {
    return chebyshev_v(x + x - 1, int64_t(n), 6);
}
inline float shifted_chebyshev_polynomial_w(float x, float n) {
    return chebyshev_w(x + x - 1, int64_t(n), 4);
}
inline float hermite_polynomial_h(float x, float n) { return hermite(x, int64_t(n), x + x, 2.0f); }
inline float hermite_polynomial_he(float x, float n) { return hermite(x, int64_t(n), x, 1.0f); }
inline float laguerre_polynomial_l(float x, float n) { return laguerre(x, int64_t(n)); }
inline float legendre_polynomial_p(float x, float n) { return legendre(x, int64_t(n)); }

}  // namespace tw
