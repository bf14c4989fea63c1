// Arithmetic with torch's semantics: integers wrap, NaN propagates, nothing traps.
#pragma once

extern "C" {
float fmodf(float, float) noexcept;
double fmod(double, double) noexcept;
}

namespace tw {

// -------------------------------------------------------------------------------- add, sub, mul
// bool: + is "or", * is "and", as in torch.
template <class T>
TW_INLINE T add(T a, T b) {
    if constexpr (is_bool<T>)
        return a | b;
    else if constexpr (is_int<T>)
        return T(bits_of<T>(a) + bits_of<T>(b));
    else
        return a + b;
}

template <class T>
TW_INLINE T sub(T a, T b) {
    if constexpr (is_bool<T>)
        return a ^ b;
    else if constexpr (is_int<T>)
        return T(bits_of<T>(a) - bits_of<T>(b));
    else
        return a - b;
}

template <class T>
TW_INLINE T mul(T a, T b) {
    if constexpr (is_bool<T>)
        return a & b;
    else if constexpr (is_int<T> && sizeof(T) < 4)
        // 16-bit unsigned would be promoted to int and could overflow it.
        return T(uint32_t(a) * uint32_t(b));
    else if constexpr (is_int<T>)
        return T(bits_of<T>(a) * bits_of<T>(b));
    else
        return a * b;
}

template <class T>
TW_INLINE T neg(T a) {
    if constexpr (is_int<T>)
        return T(bits_of<T>(0) - bits_of<T>(a));
    else
        return -a;
}

TW_INLINE float abs(float a) { return __builtin_fabsf(a); }
TW_INLINE double abs(double a) { return __builtin_fabs(a); }
TW_INLINE bool abs(bool a) { return a; }
template <class T>
    requires is_int<T>
TW_INLINE T abs(T a) {
    return a < T(0) ? neg(a) : a;
}

template <class T>
TW_INLINE T sign(T a) {
    if constexpr (is_bool<T>)
        return a;
    else
        return T(T(T(0) < a) - T(a < T(0)));
}

TW_INLINE bool signbit(float a) { return (bit_cast<uint32_t>(a) >> 31) != 0; }
TW_INLINE bool signbit(double a) { return (bit_cast<uint64_t>(a) >> 63) != 0; }
template <class T>
    requires(!is_float<T>)
TW_INLINE bool signbit(T a) {
    return a < T(0);
}

TW_INLINE float copysign(float a, float b) { return __builtin_copysignf(a, b); }
TW_INLINE double copysign(double a, double b) { return __builtin_copysign(a, b); }

// -------------------------------------------------------------------------------------- min, max
// NaN on either side wins. With a NaN in b the comparison is false and b is taken; a NaN in a sets
// the bits that make any number a NaN. Not a second selection: the compiler would join the
// conditions of several in a row into logic on booleans, which does not vectorise (g++ 12).
template <class T>
TW_INLINE T nan_if(bool nan, T x) {
    using U = bits_of<T>;
    constexpr U quiet = bit_cast<U>(limits<T>::nan);
    return bit_cast<T>(U(bit_cast<U>(x) | (nan ? quiet : U(0))));
}

template <class T>
TW_INLINE T max(T a, T b) {
    if constexpr (is_float<T>)
        return nan_if(a != a, a > b ? a : b);
    else
        return a > b ? a : b;
}

template <class T>
TW_INLINE T min(T a, T b) {
    if constexpr (is_float<T>)
        return nan_if(a != a, a < b ? a : b);
    else
        return a < b ? a : b;
}

// The number wins over NaN.
template <class T>
TW_INLINE T fmax(T a, T b) {
    if constexpr (is_float<T>)
        return b != b ? a : (a > b ? a : b);
    else
        return a > b ? a : b;
}

template <class T>
TW_INLINE T fmin(T a, T b) {
    if constexpr (is_float<T>)
        return b != b ? a : (a < b ? a : b);
    else
        return a < b ? a : b;
}

// ------------------------------------------------------------------------------------- division
TW_INLINE float div(float a, float b) { return a / b; }
TW_INLINE double div(double a, double b) { return a / b; }

// Truncating integer quotient; `b` is not zero. The quotient of two 32-bit integers rounded to
// double truncates to the exact answer, and double division vectorises. The lowest number over -1
// wraps instead of trapping.
template <class T>
TW_INLINE T quotient(T a, T b) {
    if constexpr (sizeof(T) <= 2)
        return T(int32_t(float(a) / float(b)));
    else if constexpr (sizeof(T) == 4 && is_signed<T>)
        return T(double(a) / double(b));
    else if constexpr (sizeof(T) == 4)
        return T(int64_t(double(a) / double(b)));
    else if constexpr (is_signed<T>)
        return b == T(-1) ? neg(a) : T(a / b);
    else
        return T(a / b);
}

template <class T>
TW_INLINE T nonzero(T b, int& bad) {
    bad |= b == T(0) ? BAD_ZERO_DIVISION : 0;
    return b == T(0) ? T(1) : b;
}

TW_INLINE float trunc(float x) { return __builtin_truncf(x); }
TW_INLINE double trunc(double x) { return __builtin_trunc(x); }
TW_INLINE float floor(float x) { return __builtin_floorf(x); }
TW_INLINE double floor(double x) { return __builtin_floor(x); }

TW_INLINE float fmod(float a, float b) { return ::fmodf(a, b); }
TW_INLINE double fmod(double a, double b) { return ::fmod(a, b); }
template <class T>
TW_INLINE T fmod(T a, T b, int& bad) {
    if constexpr (is_float<T>) {
        return fmod(a, b);
    } else {
        T d = nonzero(b, bad);
        T r = sub(a, mul(quotient(a, d), d));
        return b == T(0) ? T(0) : r;
    }
}

// The remainder with the divisor's sign.
template <class T>
    requires is_float<T>
TW_INLINE T mod(T a, T b) {
    T r = fmod(a, b);
    return (r != T(0)) & ((b < T(0)) != (r < T(0))) ? r + b : r;
}
template <class T>
TW_INLINE T mod(T a, T b, int& bad) {
    if constexpr (is_float<T>) {
        return mod(a, b);
    } else {
        T r = fmod(a, b, bad);
        return (r != T(0)) & ((b < T(0)) != (r < T(0))) ? add(r, b) : r;
    }
}

template <class T>
TW_INLINE T truncdiv(T a, T b, int& bad) {
    if constexpr (is_float<T>) {
        return trunc(a / b);
    } else {
        T q = quotient(a, nonzero(b, bad));
        return b == T(0) ? T(0) : q;
    }
}

// Float: torch starts from the exact remainder, so that (a // b) * b + a % b stays near a.
template <class T>
    requires is_float<T>
TW_INLINE T floordiv(T a, T b) {
    T r = fmod(a, b);
    T q = (a - r) / b;
    q = (r != T(0)) & ((b < T(0)) != (r < T(0))) ? q - T(1) : q;
    T f = floor(q);
    f = q - f > T(0.5) ? f + T(1) : f;
    f = q == T(0) ? copysign(T(0), a / b) : f;
    return b == T(0) ? a / b : f;
}
template <class T>
TW_INLINE T floordiv(T a, T b, int& bad) {
    if constexpr (is_float<T>) {
        return floordiv(a, b);
    } else {
        T d = nonzero(b, bad);
        T q = quotient(a, d);
        T r = sub(a, mul(q, d));
        q = (r != T(0)) & ((r < T(0)) != (d < T(0))) ? sub(q, T(1)) : q;
        return b == T(0) ? T(0) : q;
    }
}

// -------------------------------------------------------------------------------- integer powers
// By squaring, wrapping. Negative exponents: only 1 and -1 have an integer reciprocal.
template <class T>
    requires is_int<T>
TW_INLINE T pow(T a, T b) {
    if constexpr (is_signed<T>) {
        if (b < T(0)) {
            if (a == T(1)) return T(1);
            if (a == T(-1)) return (b & T(1)) ? T(-1) : T(1);
            return T(0);
        }
    }
    T r = 1;
    for (bits_of<T> e = bits_of<T>(b); e != 0; e >>= 1) {
        if (e & 1) r = mul(r, a);
        a = mul(a, a);
    }
    return r;
}

// Euclid's; never negative, and zero only of two zeros.
template <class T>
    requires is_int<T>
TW_INLINE T gcd(T a, T b) {
    a = abs(a);
    b = abs(b);
    while (b != T(0)) {
        T r = T(a % b);
        a = b;
        b = r;
    }
    return a;
}

// ------------------------------------------------------------------------------------------ bits
template <class T>
TW_INLINE T bit_and(T a, T b) {
    return T(a & b);
}
template <class T>
TW_INLINE T bit_or(T a, T b) {
    return T(a | b);
}
template <class T>
TW_INLINE T bit_xor(T a, T b) {
    return T(a ^ b);
}
template <class T>
TW_INLINE T bit_not(T a) {
    if constexpr (is_bool<T>)
        return !a;
    else
        return T(~a);
}

// Shift amounts out of range: everything is shifted out (to the left) or only the sign is left.
template <class T>
TW_INLINE T shl(T a, T b) {
    using U = bits_of<T>;
    constexpr U bits = 8 * sizeof(T);
    using W = typename unsigned_of<(sizeof(T) < 4 ? 4 : sizeof(T))>::type;
    W r = W(U(a)) << (U(b) & U(bits - 1));
    return U(b) >= bits ? T(0) : T(r);
}
template <class T>
TW_INLINE T shr(T a, T b) {
    using U = bits_of<T>;
    constexpr U bits = 8 * sizeof(T);
    T r = T(a >> (U(b) & U(bits - 1)));
    T out = a < T(0) ? T(-1) : T(0);
    return U(b) >= bits ? out : r;
}

// --------------------------------------------------------------------------------------- indices
template <class I>
TW_INLINE int64_t index(I i, int64_t size, int& bad) {
    bool ok = uint64_t(int64_t(i)) < uint64_t(size);
    bad |= ok ? 0 : BAD_INDEX;
    return ok ? int64_t(i) : int64_t(0);
}
template <class I>
TW_INLINE int64_t wrap(I i, int64_t size) {
    return int64_t(i) < 0 ? int64_t(i) + size : int64_t(i);
}

}  // namespace tw
