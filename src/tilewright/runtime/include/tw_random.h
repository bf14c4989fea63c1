// Philox4x32-10, counter-based: element `offset` of stream `seed` is the same number on any number
// of threads and at any vector width.
#pragma once

namespace tw {

struct philox_words {
    uint32_t a, b, c, d;
};

TW_INLINE uint32_t high_product(uint32_t a, uint32_t b) {
    return uint32_t((uint64_t(a) * b) >> 32);
}

// One round after another by recursion: a loop in here, even with an unroll pragma, can stay a loop
// for long enough to keep the caller's loop from vectorising.
template <int rounds>
TW_INLINE philox_words philox_rounds(philox_words w, uint32_t k0, uint32_t k1) {
    if constexpr (rounds == 0) {
        return w;
    } else {
        constexpr uint32_t m0 = 0xD2511F53u, m1 = 0xCD9E8D57u;
        philox_words next = {high_product(w.c, m1) ^ w.b ^ k0, w.c * m1,
                             high_product(w.a, m0) ^ w.d ^ k1, w.a * m0};
        return philox_rounds<rounds - 1>(next, k0 + 0x9E3779B9u, k1 + 0xBB67AE85u);
    }
}

TW_INLINE philox_words philox(uint64_t seed, int64_t offset) {
    philox_words counter = {uint32_t(offset), uint32_t(uint64_t(offset) >> 32), 0, 0};
    return philox_rounds<10>(counter, uint32_t(seed), uint32_t(seed >> 32));
}

// Uniform on [0, 1), 24 random bits.
TW_INLINE float rand(uint64_t seed, int64_t offset) {
    return float(int32_t(philox(seed, offset).a >> 8)) * 0x1p-24f;
}

// Uniform on [0, 1), 53 random bits.
TW_INLINE double randd(uint64_t seed, int64_t offset) {
    philox_words w = philox(seed, offset);
    return (double(int32_t(w.a >> 5)) * 0x1p26 + double(int32_t(w.b >> 6))) * 0x1p-53;
}

// Standard normal by Box and Muller. The radius uses 31 bits and is never taken from zero.
TW_INLINE float randn(uint64_t seed, int64_t offset) {
    philox_words w = philox(seed, offset);
    float u = fma(float(int32_t(w.a >> 1)), 0x1p-31f, 0x1p-32f);
    float angle = float(int32_t(w.b >> 8)) * (6.2831853f * 0x1p-24f);
    // The sum rounds to at most 1, where the logarithm is 0 and nothing negative gets to the root.
    return sqrt(-2.0f * log(u)) * cos(angle);
}

// Uniform integer in [lo, hi): the high half of a 64 x 64 bit product, so the bias is below
// (hi - lo) / 2^64. Written with 32-bit pieces because those multiply in vector registers.
TW_INLINE int64_t randint(uint64_t seed, int64_t offset, int64_t lo, int64_t hi) {
    philox_words w = philox(seed, offset);
    uint64_t range = uint64_t(hi) - uint64_t(lo);
    uint64_t r0 = w.a, r1 = w.b, g0 = range & 0xffffffffu, g1 = range >> 32;
    uint64_t mid = r1 * g0 + ((r0 * g0) >> 32);
    uint64_t low = r0 * g1 + (mid & 0xffffffffu);
    uint64_t high = r1 * g1 + (mid >> 32) + (low >> 32);
    return int64_t(uint64_t(lo) + high);
}

}  // namespace tw
