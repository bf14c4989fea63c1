// What the loops of a kernel need around the arithmetic: index division, and folds OpenMP lacks.
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
