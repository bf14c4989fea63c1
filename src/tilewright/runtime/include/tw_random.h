// Philox4x32-10, counter-based: a place of stream `seed` is the same number on any number of threads
// and at any vector width. A counter gives four words: four places, or two of what needs two words.
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

TW_INLINE philox_words philox(uint64_t seed, int64_t counter) {
    philox_words start = {uint32_t(counter), uint32_t(uint64_t(counter) >> 32), 0, 0};
    return philox_rounds<10>(start, uint32_t(seed), uint32_t(seed >> 32));
}

// Uniform on [0, 1), 24 random bits.
TW_INLINE float uniform(uint32_t word) {
    return float(int32_t(word >> 8)) * 0x1p-24f;
}

// Standard normal by Box and Muller; two of them are a quarter turn apart. The radius uses 31 bits
// and is never taken from zero.
TW_INLINE float normal(uint32_t a, uint32_t b, float turn) {
    float u = fma(float(int32_t(a >> 1)), 0x1p-31f, 0x1p-32f);
    float angle = float(int32_t(b >> 8)) * (6.2831853f * 0x1p-24f);
    // The sum rounds to at most 1, where the logarithm is 0 and nothing negative gets to the root.
    return sqrt(-2.0f * log(u)) * cos(angle - turn);
}

// The words of a place that has two: a counter has two such places.
TW_INLINE philox_words philox_pair(uint64_t seed, int64_t place) {
    philox_words w = philox(seed, place >> 1);
    bool odd = place & 1;
    return {odd ? w.c : w.a, odd ? w.d : w.b, 0, 0};
}

// A counter has four places of one word each.
TW_INLINE float rand(uint64_t seed, int64_t place) {
    philox_words w = philox(seed, place >> 2);
    uint32_t first = place & 2 ? w.c : w.a, second = place & 2 ? w.d : w.b;
    return uniform(place & 1 ? second : first);
}

// Uniform on [0, 1), 53 random bits.
TW_INLINE double randd(uint64_t seed, int64_t place) {
    philox_words w = philox_pair(seed, place);
    return (double(int32_t(w.a >> 5)) * 0x1p26 + double(int32_t(w.b >> 6))) * 0x1p-53;
}

TW_INLINE float randn(uint64_t seed, int64_t place) {
    philox_words w = philox_pair(seed, place >> 1);
    return normal(w.a, w.b, place & 1 ? 1.5707964f : 0.0f);
}

// Uniform integer in [lo, hi): the high half of a 64 x 64 bit product, so the bias is below
// (hi - lo) / 2^64. Written with 32-bit pieces because those multiply in vector registers.
TW_INLINE int64_t randint(uint64_t seed, int64_t place, int64_t lo, int64_t hi) {
    philox_words w = philox_pair(seed, place);
    uint64_t range = uint64_t(hi) - uint64_t(lo);
    uint64_t r0 = w.a, r1 = w.b, g0 = range & 0xffffffffu, g1 = range >> 32;
    uint64_t mid = r1 * g0 + ((r0 * g0) >> 32);
    uint64_t low = r0 * g1 + (mid & 0xffffffffu);
    uint64_t high = r1 * g1 + (mid >> 32) + (low >> 32);
    return int64_t(uint64_t(lo) + high);
}

constexpr int64_t counters_at_once = 128;

// All words of as many counters, in the order of their places. Each of the four is an array of its
// own first, which is what vectorises.
TW_INLINE void draw_words(uint32_t* to, uint64_t seed, int64_t first, int64_t counters) {
    alignas(64) uint32_t a[counters_at_once], b[counters_at_once];
    alignas(64) uint32_t c[counters_at_once], d[counters_at_once];
#pragma omp simd
    for (int64_t i = 0; i < counters; ++i) {
        const philox_words w = philox(seed, first + i);
        a[i] = w.a, b[i] = w.b, c[i] = w.c, d[i] = w.d;
    }
    for (int64_t i = 0; i < counters; ++i)
        to[4 * i] = a[i], to[4 * i + 1] = b[i], to[4 * i + 2] = c[i], to[4 * i + 3] = d[i];
}

struct uniforms {
    TW_INLINE static float one(uint64_t seed, int64_t place) { return rand(seed, place); }
    TW_INLINE static void many(float* to, const uint32_t* words, int64_t count) {
#pragma omp simd
        for (int64_t k = 0; k < count; ++k) to[k] = uniform(words[k]);
    }
};
struct normals {
    TW_INLINE static float one(uint64_t seed, int64_t place) { return randn(seed, place); }
    TW_INLINE static void many(float* to, const uint32_t* words, int64_t count) {
        alignas(64) float even[2 * counters_at_once], odd[2 * counters_at_once];
#pragma omp simd
        for (int64_t p = 0; p < count / 2; ++p) {
            even[p] = normal(words[2 * p], words[2 * p + 1], 0.0f);
            odd[p] = normal(words[2 * p], words[2 * p + 1], 1.5707964f);
        }
        for (int64_t p = 0; p < count / 2; ++p) to[2 * p] = even[p], to[2 * p + 1] = odd[p];
    }
};

// The next `count` places of a stream, from any place on: every word of a counter is used.
template <class F>
TW_INLINE void draw(float* to, uint64_t seed, int64_t place, int64_t count, F of) {
    int64_t k = 0;
    for (; k < count && (place + k) & 3; ++k) to[k] = of.one(seed, place + k);
    while (count - k >= 4) {
        const int64_t left = (count - k) / 4;
        const int64_t counters = left < counters_at_once ? left : counters_at_once;
        alignas(64) uint32_t words[4 * counters_at_once];
        draw_words(words, seed, (place + k) >> 2, counters);
        of.many(to + k, words, 4 * counters);
        k += 4 * counters;
    }
    for (; k < count; ++k) to[k] = of.one(seed, place + k);
}

}  // namespace tw
