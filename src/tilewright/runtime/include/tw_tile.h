// Transposed reads: a tile of memory is turned around on its way into a small buffer, so that the
// loop over it is contiguous.
#pragma once

namespace tw {

// Four or eight elements as one vector; the compiler splits it where registers are narrower.
template <class T, int N>
struct pack {
    typedef bits_of<T> type __attribute__((vector_size(N * sizeof(T)), aligned(sizeof(T)), may_alias));
};

template <class V>
TW_INLINE V low_pairs(V a, V b) {
    if constexpr (sizeof(V) / sizeof(a[0]) == 8)
        return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    else
        return __builtin_shufflevector(a, b, 0, 4, 1, 5);
}
template <class V>
TW_INLINE V high_pairs(V a, V b) {
    if constexpr (sizeof(V) / sizeof(a[0]) == 8)
        return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    else
        return __builtin_shufflevector(a, b, 2, 6, 3, 7);
}

// A block of 8 rows of 8 four-byte elements, with shuffles that stay in the halves of a register.
template <class T>
    requires(sizeof(T) == 4)
TW_INLINE void transpose_block(T* out, int64_t width, const T* in, int64_t stride) {
    typedef typename pack<T, 8>::type V;
    V r[8], s[8];
    for (int k = 0; k < 8; ++k) r[k] = *(const V*)(in + k * stride);
    for (int k = 0; k < 8; k += 2) {
        s[k] = __builtin_shufflevector(r[k], r[k + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        s[k + 1] = __builtin_shufflevector(r[k], r[k + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int k = 0; k < 8; k += 4)
        for (int j = 0; j < 2; ++j) {
            r[k + 2 * j] = __builtin_shufflevector(s[k + j], s[k + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            r[k + 2 * j + 1] =
                __builtin_shufflevector(s[k + j], s[k + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int k = 0; k < 4; ++k) {
        *(V*)(out + k * width) = __builtin_shufflevector(r[k], r[k + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(V*)(out + (k + 4) * width) =
            __builtin_shufflevector(r[k], r[k + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

// Other sizes: interleaving rows of the upper with rows of the lower half, log2 times.
template <class T>
    requires(sizeof(T) != 4)
TW_INLINE void transpose_block(T* out, int64_t width, const T* in, int64_t stride) {
    constexpr int N = sizeof(T) == 8 ? 4 : 8;
    typedef typename pack<T, N>::type V;
    V r[N], s[N];
    for (int k = 0; k < N; ++k) r[k] = *(const V*)(in + k * stride);
    for (int round = 1; round < N; round *= 2) {
        for (int k = 0; k < N / 2; ++k) {
            s[2 * k] = low_pairs(r[k], r[k + N / 2]);
            s[2 * k + 1] = high_pairs(r[k], r[k + N / 2]);
        }
        for (int k = 0; k < N; ++k) r[k] = s[k];
    }
    for (int k = 0; k < N; ++k) *(V*)(out + k * width) = r[k];
}

// out[u * width + l] = in[l * stride + u] for u < us, l < ls.
template <class T>
TW_INLINE void transpose_tile(T* out, int64_t width, const T* in, int64_t stride, int64_t us,
                              int64_t ls) {
    constexpr int N = sizeof(T) == 8 ? 4 : 8;
    int64_t whole_u = us / N * N, whole_l = ls / N * N;
    for (int64_t u = 0; u < whole_u; u += N)
        for (int64_t l = 0; l < whole_l; l += N)
            transpose_block(out + u * width + l, width, in + l * stride + u, stride);
    for (int64_t l = 0; l < whole_l; ++l)
        for (int64_t u = whole_u; u < us; ++u) out[u * width + l] = in[l * stride + u];
    for (int64_t l = whole_l; l < ls; ++l)
        for (int64_t u = 0; u < us; ++u) out[u * width + l] = in[l * stride + u];
}

}  // namespace tw
