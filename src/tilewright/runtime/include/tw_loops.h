// What the loops of a kernel need around the arithmetic: index division, loads under a condition,
// and folds OpenMP lacks.
#pragma once

namespace tw {

// Floored, as Python's: indices can be negative before they are masked.
TW_INLINE int64_t index_floordiv(int64_t a, int64_t b) {
    int64_t q = a / b;
    return q - ((a % b != 0) & ((a < 0) != (b < 0)));
}
TW_INLINE int64_t index_mod(int64_t a, int64_t b) {
    int64_t r = a % b;
    return r + ((r != 0) & ((r < 0) != (b < 0))) * b;
}

// An element where `held`, else zero, for loads that are not contiguous along the vector.
// g++ 12.2 makes `held ? *at : 0` a masked load, and of neighbouring ones in one iteration
// (`p[4*i]`, `p[4*i + 1]`, ...) a group, in which it forgets which lane reads which element. So it
// must not see that this is a choice.
template <class T>
TW_INLINE T masked(bool held, const T* at) {
    static const T zero{};
    const uintptr_t all = -(uintptr_t)held;
    return *(const T*)(((uintptr_t)at & all) | ((uintptr_t)&zero & ~all));
}

template <class T>
TW_INLINE T logaddexp(T a, T b) {
    T m = max(a, b);
    if (m == -limits<T>::inf || m == limits<T>::inf) return m;
    return m + log(exp(a - m) + exp(b - m));
}

}  // namespace tw

// Extremes that let NaN win, one private copy per vector lane.
#define TW_NUMBERS \
    bool, float, double, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
#define TW_FOLD(name) \
    _Pragma(TW_TEXT(omp declare reduction(tw_##name : TW_NUMBERS \
        : omp_out = tw::name(omp_out, omp_in)) initializer(omp_priv = omp_orig)))
#define TW_TEXT(...) TW_TEXT_(__VA_ARGS__)
#define TW_TEXT_(...) #__VA_ARGS__
TW_FOLD(max)
TW_FOLD(min)
