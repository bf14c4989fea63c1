// Storage types and conversions between all element types, with torch's semantics.
#pragma once

namespace tw {

// Enumerations rather than structs: to the compiler these are plain integers, so loads, stores and
// private copies of them never stand in the way of vectorisation.
enum class bf16 : uint16_t {};
enum class f16 : uint16_t {};
enum class f8e4m3fn : uint8_t {};
enum class f8e5m2 : uint8_t {};
enum class f8e4m3fnuz : uint8_t {};
enum class f8e5m2fnuz : uint8_t {};

// ---------------------------------------------------------------------------------- type facts
template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

template <class T>
constexpr bool is_float = same<T, float> || same<T, double>;
template <class T>
constexpr bool is_bool = same<T, bool>;
template <class T>
constexpr bool is_fp8 =
    same<T, f8e4m3fn> || same<T, f8e5m2> || same<T, f8e4m3fnuz> || same<T, f8e5m2fnuz>;
template <class T>
constexpr bool is_small_float = same<T, bf16> || same<T, f16> || is_fp8<T>;
template <class T>
constexpr bool is_int = !is_float<T> && !is_bool<T> && !is_small_float<T>;
template <class T>
constexpr bool is_signed = is_int<T> && T(-1) < T(1);
template <class T>
    requires is_small_float<T>
constexpr bool is_signed<T> = true;

template <size_t N>
struct unsigned_of;
template <>
struct unsigned_of<1> {
    using type = uint8_t;
};
template <>
struct unsigned_of<2> {
    using type = uint16_t;
};
template <>
struct unsigned_of<4> {
    using type = uint32_t;
};
template <>
struct unsigned_of<8> {
    using type = uint64_t;
};
template <class T>
using bits_of = typename unsigned_of<sizeof(T)>::type;

template <class To, class From>
TW_INLINE constexpr To bit_cast(From x) {
    return __builtin_bit_cast(To, x);
}

// ------------------------------------------------------------------------------ limits, constants
template <class T>
struct limits {
    // Integers. The shift goes through the unsigned type so that nothing overflows.
    static constexpr T lowest = is_signed<T> ? T(bits_of<T>(1) << (8 * sizeof(T) - 1)) : T(0);
    static constexpr T highest = T(~bits_of<T>(lowest));
};
template <>
struct limits<bool> {
    static constexpr bool lowest = false, highest = true;
};
template <>
struct limits<float> {
    static constexpr float inf = __builtin_inff(), nan = __builtin_nanf("");
    static constexpr float lowest = -inf, highest = inf;
    static constexpr float smallest_normal = 0x1p-126f, epsilon = 0x1p-23f;
};
template <>
struct limits<bf16> {
    static constexpr bf16 lowest = bf16(0xff80), highest = bf16(0x7f80);
};
template <>
struct limits<f16> {
    static constexpr f16 lowest = f16(0xfc00), highest = f16(0x7c00);
};
template <class T>
    requires is_fp8<T>
struct limits<T> {
    // The largest finite number, or infinity where there is one.
    static constexpr T highest = T(same<T, f8e4m3fn> ? 0x7e : same<T, f8e5m2> ? 0x7c : 0x7f);
    static constexpr T lowest = T(uint8_t(highest) | 0x80);
};
template <>
struct limits<double> {
    static constexpr double inf = __builtin_inf(), nan = __builtin_nan("");
    static constexpr double lowest = -inf, highest = inf;
    static constexpr double smallest_normal = 0x1p-1022, epsilon = 0x1p-52;
};

// ------------------------------------------------------------------------- 16-bit floats <-> float
TW_INLINE float to_float(bf16 x) { return bit_cast<float>(uint32_t(x) << 16); }

TW_INLINE bf16 to_bf16(float x) {
    uint32_t u = bit_cast<uint32_t>(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return bf16(x != x ? 0x7fc0u : rounded);
}

// Integer arithmetic instead of the F16C instructions: the compiler vectorises this, but does not
// vectorise a loop with the scalar intrinsic in it.
TW_INLINE float to_float(f16 x) {
    uint32_t sign = (uint32_t(x) & 0x8000u) << 16;
    uint32_t body = (uint32_t(x) & 0x7fffu) << 13;
    uint32_t exponent = body & 0x0f800000u;
    uint32_t normal = body + (112u << 23);
    // A denormal is read as 2^-14 * (1 + m), minus 2^-14. No denormal float takes part, so the
    // result does not depend on the flush-to-zero mode.
    float tiny = bit_cast<float>(body + (113u << 23)) - 0x1p-14f;
    uint32_t special = body + (224u << 23);
    uint32_t u = exponent == 0x0f800000u ? special : normal;
    u = exponent == 0u ? bit_cast<uint32_t>(tiny) : u;
    return bit_cast<float>(u | sign);
}

TW_INLINE f16 to_f16(float x) {
    uint32_t u = bit_cast<uint32_t>(x);
    uint32_t sign = (u >> 16) & 0x8000u;
    uint32_t a = u & 0x7fffffffu;
    uint32_t normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
    // Adding 0.5 puts the last bit of the sum at 2^-24, the unit of half denormals: the addition
    // itself rounds to nearest even.
    uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(a) + 0.5f) - 0x3f000000u;
    // All values are below 2^31: signed comparisons vectorise better than unsigned ones.
    uint32_t r = int32_t(a) < 0x38800000 ? tiny : normal;
    r = int32_t(a) >= 0x477ff000 ? 0x7c00u : r;
    r = int32_t(a) > 0x7f800000 ? 0x7e00u : r;
    return f16(r | sign);
}

// The float that a 16-bit float made of `x` stands for. Between two operations whose results eager
// stores in 16 bits this saves packing the numbers and unpacking them again.
template <class T>
TW_INLINE float rounded(float x) {
    uint32_t u = bit_cast<uint32_t>(x);
    if constexpr (same<T, bf16>) {
        uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
        return x != x ? x : bit_cast<float>(r);
    } else {
        uint32_t sign = u & 0x80000000u, a = u & 0x7fffffffu;
        uint32_t normal = (a + 0xfffu + ((a >> 13) & 1u)) & 0xffffe000u;
        uint32_t tiny = bit_cast<uint32_t>((bit_cast<float>(a) + 0.5f) - 0.5f);
        uint32_t r = int32_t(a) < 0x38800000 ? tiny : normal;
        r = int32_t(a) >= 0x477ff000 ? 0x7f800000u : r;
        r = int32_t(a) > 0x7f800000 ? 0x7fc00000u : r;
        return bit_cast<float>(r | sign);
    }
}

// -------------------------------------------------------------------------- 8-bit floats <-> float
// One description per format: mantissa bits, exponent bias, the codes of infinity (-1: none) and of
// the first NaN, the largest finite code, and what becomes of larger numbers. `uz` formats have one
// zero and one NaN (0x80).
template <class T>
struct fp8;
template <>
struct fp8<f8e4m3fn> {
    static constexpr int man = 3, bias = 7, inf = -1, nan = 0x7f, largest = 0x7e;
    // Newer releases of torch saturate, older ones give NaN; the builder asks the one it runs with.
#ifdef TW_E4M3FN_OVERFLOWS_TO_NAN
    static constexpr uint32_t beyond = 0x7f;
#else
    static constexpr uint32_t beyond = 0x7e;
#endif
    static constexpr bool uz = false;
};
template <>
struct fp8<f8e5m2> {
    static constexpr int man = 2, bias = 15, inf = 0x7c, nan = 0x7d, largest = 0x7b;
    static constexpr uint32_t beyond = 0x7c;
    static constexpr bool uz = false;
};
template <>
struct fp8<f8e4m3fnuz> {
    static constexpr int man = 3, bias = 8, inf = -1, nan = 0x80, largest = 0x7f;
    static constexpr uint32_t beyond = 0x80;
    static constexpr bool uz = true;
};
template <>
struct fp8<f8e5m2fnuz> {
    static constexpr int man = 2, bias = 16, inf = -1, nan = 0x80, largest = 0x7f;
    static constexpr uint32_t beyond = 0x80;
    static constexpr bool uz = true;
};

template <class T>
    requires is_fp8<T>
TW_INLINE float to_float(T x) {
    using F = fp8<T>;
    constexpr int shift = 23 - F::man;
    int32_t magnitude = uint32_t(x) & 0x7f;
    uint32_t sign = (uint32_t(x) & 0x80u) << 24;
    uint32_t body = uint32_t(magnitude) << shift;
    uint32_t normal = body + (uint32_t(127 - F::bias) << 23);
    constexpr uint32_t unit = uint32_t(128 - F::bias) << 23;
    float tiny = bit_cast<float>(body + unit) - bit_cast<float>(unit);
    uint32_t u = magnitude < (1 << F::man) ? bit_cast<uint32_t>(tiny) : normal;
    if constexpr (F::uz) {
        u = uint32_t(x) == 0x80u ? 0x7fc00000u : u | sign;
    } else {
        u = magnitude == F::inf ? 0x7f800000u : u;
        u = magnitude >= F::nan ? 0x7fc00000u : u;
        u |= sign;
    }
    return bit_cast<float>(u);
}

template <class T>
    requires is_fp8<T>
TW_INLINE T to_fp8(float x) {
    using F = fp8<T>;
    constexpr int shift = 23 - F::man;
    uint32_t u = bit_cast<uint32_t>(x);
    uint32_t sign = (u >> 24) & 0x80u;
    uint32_t a = u & 0x7fffffffu;
    constexpr uint32_t smallest = uint32_t(128 - F::bias) << 23;  // least normal number
    uint32_t normal =
        (a - (uint32_t(127 - F::bias) << 23) + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1u)) >>
        shift;
    constexpr uint32_t anchor = smallest + (uint32_t(shift) << 23);  // last bit: our denormal unit
    uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(a) + bit_cast<float>(anchor)) - anchor;
    // Masks, where one would write a selection: g++ 12 narrows selections between bytes to a form
    // that it then cannot vectorise.
    uint32_t low = -uint32_t(a < smallest);
    uint32_t r = (tiny & low) | (normal & ~low);
    // Beyond the largest finite number `r` has run past the codes, or wrapped around.
    r = int32_t(r) > F::largest ? F::beyond : r;
    r = int32_t(a) >= (160 << 23) ? F::beyond : r;
    r = int32_t(a) > 0x7f800000 ? (F::uz ? 0x80u : 0x7fu) : r;
    if constexpr (F::uz) return T((r == 0) | (r == 0x80u) ? r : r | sign);
    return T(r | sign);
}

// ----------------------------------------------------------------------------------------- cast
// Float to integer truncates; NaN and numbers out of range give what the x86 conversion
// instructions give, as in eager: the "indefinite" integer, then the low bits of it.

// By shifting the mantissa into place: before AVX-512 no instruction converts vectors to int64.
TW_INLINE int64_t float_to_int64(float x) {
    int32_t u = bit_cast<int32_t>(x);
    int64_t exponent = ((u >> 23) & 0xff) - 150;  // of the last bit of the mantissa
    int64_t mantissa = (u & 0x7fffff) | 0x800000;
    uint64_t left = uint64_t(exponent) & 63, right = uint64_t(-exponent) & 63;
    int64_t large = int64_t(uint64_t(mantissa) << left), small = mantissa >> right;
    int64_t r = exponent >= 0 ? large : small;
    r = exponent < -23 ? 0 : r;
    r = u < 0 ? -r : r;
    return exponent >= 40 ? limits<int64_t>::lowest : r;
}

template <class To, class From>
TW_INLINE To float_to_int(From x) {
    if constexpr (sizeof(To) <= 2 && (is_signed<To> || sizeof(To) == 2))
        return To(int32_t(x));
    else if constexpr (same<To, uint8_t> && same<From, float>)
        // Floats beyond int32 have zeros in their low eight bits, so int32 is as good as int64.
        return To(int32_t(x));
#ifndef __AVX512DQ__
    else if constexpr (same<To, int64_t> && same<From, float>)
        return float_to_int64(x);
#endif
    else if constexpr (is_signed<To>)
        return To(x);
    else if constexpr (same<To, uint64_t>)
        return To(x);
    else
        return To(int64_t(x));
}

// The same the other way: both halves take the place of a mantissa, and one addition rounds.
TW_INLINE double int64_to_double(int64_t x) {
    double low = bit_cast<double>((uint64_t(x) & 0xffffffffu) | 0x4330000000000000u);
    double high = bit_cast<double>((uint64_t(x) >> 32) ^ 0x4530000080000000u);
    return (high - 0x1.000008010p84) + low;  // 2^84 + 2^63 + 2^52
}

TW_INLINE float int64_to_float(int64_t x) {
    // What a double cannot hold is far below a float's last bit: one bit stands for all of it.
    int64_t kept = (x & ~int64_t(0xfff)) | ((x & 0xfff) != 0 ? 0x800 : 0);
    bool exact = uint64_t(x) + (uint64_t(1) << 53) <= uint64_t(1) << 54;
    return float(int64_to_double(exact ? x : kept));
}

template <class To, class From>
TW_INLINE To cast(From x) {
    if constexpr (same<To, From>)
        return x;
    else if constexpr (is_fp8<From> && same<To, int64_t>)
        return int64_t(to_float(x));  // the compiler's own conversion, as eager: it differs for NaN
    else if constexpr (is_small_float<From>)
        return cast<To>(to_float(x));
    else if constexpr (is_bool<To>)
        return x != From(0);
    else if constexpr (same<To, bf16>)
        return to_bf16(float(x));
    else if constexpr (same<To, f16>)
        return to_f16(float(x));
    else if constexpr (is_fp8<To>)
        return to_fp8<To>(float(x));
    else if constexpr (is_int<To> && is_float<From>)
        return float_to_int<To>(x);
#ifndef __AVX512DQ__
    else if constexpr (same<To, float> && same<From, int64_t>)
        return int64_to_float(x);
    else if constexpr (same<To, double> && same<From, int64_t>)
        return int64_to_double(x);
#endif
    else
        return To(x);
}

}  // namespace tw
