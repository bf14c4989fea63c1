// Products of bfloat16 by instructions that multiply pairs of it and add to float32: AVX-512's, for
// vectors, and AMX's, for tiles of 16 by 16 sums. Both want two steps of K next to each other, on
// either side: P is packed as rows along K, and Q as panels in which each column has a pair of steps.
// K is filled up with zeros to whole pairs, or tiles.
//
// Where the compiler was not told of the instructions, or the kernel refuses a process AMX's
// registers, the same is computed without them.
#pragma once

#include "tw_gemm.h"

namespace tw::gemm {

enum Unit { PAIRS, TILES };  // of `S::UNIT`

// ----------------------------------------------------------------------------------------- vectors
// sum += a0 * b0 + a1 * b1 in each lane, of pairs a and b.
template <class V, class W>
TW_INLINE void dot_pairs(V& sum, W a, W b) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(V) == 64) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return;
    }
#endif
    sum += bit_cast<V>(a << 16) * bit_cast<V>(b << 16);
    sum += bit_cast<V>(a & 0xffff0000u) * bit_cast<V>(b & 0xffff0000u);
}

// Of a tile, two steps of K at once.
template <class S>
struct TwoByTwo {
    typedef typename lanes<float, S::LANES>::type V;
    typedef typename lanes<uint32_t, S::LANES>::type W;
    typedef uint32_t pair __attribute__((may_alias));
    static constexpr int64_t STEPS = 2;

    TW_INLINE static W row(const bf16* p) { return splat<W>(*(const pair*)p); }
    TW_INLINE static W columns(const bf16* q) { return *(const W*)q; }
    TW_INLINE static void add(V& sum, W a, W b) { dot_pairs(sum, a, b); }
};

// ------------------------------------------------------------------------------------------- tiles
constexpr int64_t SIDE = 16;  // rows of a tile, of 64 bytes each

// What `ldtilecfg` reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    TileShapes() {
        for (int t = 0; t < 8; ++t) bytes[t] = 64, rows[t] = SIDE;
    }
};

// The registers as memory.
struct PlainTiles {
    alignas(64) uint8_t file[8][SIDE][64];

    template <int TILE>
    void zero() {
        __builtin_memset(file[TILE], 0, sizeof file[TILE]);
    }
    template <int TILE>
    void load(const void* from, int64_t stride) {
        for (int64_t r = 0; r < SIDE; ++r)
            __builtin_memcpy(file[TILE][r], (const char*)from + r * stride, 64);
    }
    template <int TILE>
    void store(void* to, int64_t stride) const {
        for (int64_t r = 0; r < SIDE; ++r)
            __builtin_memcpy((char*)to + r * stride, file[TILE][r], 64);
    }
    template <int SUM, int A, int B>
    void dot() {
        typedef typename lanes<float, SIDE>::type V;
        typedef typename lanes<uint32_t, SIDE>::type W;
        for (int64_t r = 0; r < SIDE; ++r) {
            V sum = *(const V*)file[SUM][r];
            for (int64_t k = 0; k < SIDE; ++k) {
                uint32_t pair;
                __builtin_memcpy(&pair, file[A][r] + 4 * k, 4);
                dot_pairs(sum, splat<W>(pair), *(const W*)file[B][k]);
            }
            *(V*)file[SUM][r] = sum;
        }
    }
};

#if defined(__AMX_BF16__) && defined(__x86_64__)
// Linux gives a process the registers' memory when it is asked: arch_prctl(ARCH_REQ_XCOMP_PERM,
// XFEATURE_XTILEDATA), zero where they may be used.
inline bool ask_for_tiles() {
    long result;
    asm volatile("syscall" : "=a"(result) : "a"(158), "D"(0x1023), "S"(18) : "rcx", "r11", "memory");
    return result == 0;
}
inline const bool tiles_granted = ask_for_tiles();

// The registers themselves, from its making to its end.
struct Tiles {
    Tiles() {
        const TileShapes shapes;
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    ~Tiles() { asm volatile("tilerelease"); }

    template <int TILE>
    TW_INLINE void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
    }
    template <int TILE>
    TW_INLINE void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
    }
    template <int TILE>
    TW_INLINE void store(void* to, int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
    }
    template <int SUM, int A, int B>
    TW_INLINE void dot() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
    }
};
#else
constexpr bool tiles_granted = false;
using Tiles = PlainTiles;
#endif

// out[32][32] (+)= p[32][kc] * q[kc / 2][32][2], of tiles 0 to 3 the sums, then two of P and of Q.
template <class F>
TW_INLINE void tiles_tile(F& tiles, float* out, int64_t out_stride, const bf16* p, int64_t p_stride,
                          const bf16* q, int64_t kc, bool first) {
    const int64_t wide = 4 * out_stride, p_wide = 2 * p_stride, q_wide = 8 * SIDE;
    float* const lower = out + SIDE * out_stride;
    if (first) {
        tiles.template zero<0>();
        tiles.template zero<1>();
        tiles.template zero<2>();
        tiles.template zero<3>();
    } else {
        tiles.template load<0>(out, wide);
        tiles.template load<1>(out + SIDE, wide);
        tiles.template load<2>(lower, wide);
        tiles.template load<3>(lower + SIDE, wide);
    }
    for (int64_t k = 0; k < kc; k += 2 * SIDE) {
        const bf16* panel = q + k * 2 * SIDE;
        tiles.template load<4>(p + k, p_wide);
        tiles.template load<6>(panel, q_wide);
        tiles.template dot<0, 4, 6>();
        tiles.template load<7>(panel + 2 * SIDE, q_wide);
        tiles.template dot<1, 4, 7>();
        tiles.template load<5>(p + SIDE * p_stride + k, p_wide);
        tiles.template dot<2, 5, 6>();
        tiles.template dot<3, 5, 7>();
    }
    tiles.template store<0>(out, wide);
    tiles.template store<1>(out + SIDE, wide);
    tiles.template store<2>(lower, wide);
    tiles.template store<3>(lower + SIDE, wide);
}

// --------------------------------------------------------------------------------------- the loops
template <class S>
struct Pairs : Loops<S> {
    using Base = Loops<S>;
    using Base::across, Base::blocks, Base::columns, Base::K, Base::Q, Base::s;
    static constexpr int64_t WIDTH = Base::WIDTH, PC = S::PC, KC = S::KC, STRIDE = Base::STRIDE;
    static constexpr int64_t STEP = S::UNIT == TILES ? 2 * SIDE : 2;
    static constexpr int64_t PLAIN = 64;  // steps of a panel before they are paired
    static constexpr int64_t OWN = Base::SUMS + PC * KC / 2 + TURNED * PC + 64;
    static_assert(KC % STEP == 0 && WIDTH % 8 == 0 && PC % S::ROWS == 0);
    static_assert(S::UNIT != TILES || (S::ROWS == 2 * SIDE && WIDTH == 2 * SIDE));

    const int64_t deep = rounded_up(K, STEP);

    Pairs(const S& s, int64_t threads) : Base(s, threads, false) {}

    int64_t shared() const { return S::PASSES * deep * rounded_up(columns, WIDTH) / 2; }

    void run(Team& team, int64_t batch, float* memory, float* own) const {
        if constexpr (S::UNIT == TILES) {
            if (tiles_granted) {
                Tiles tiles;
                walk(tiles, team, batch, (bf16*)memory, own);
                return;
            }
        }
        PlainTiles tiles;
        walk(tiles, team, batch, (bf16*)memory, own);
    }

    template <class F>
    void walk(F& tiles, Team& team, int64_t batch, bf16* packed, float* own) const {
        for (int64_t q0 = 0; q0 < Q; q0 += columns) {
            const int64_t here = least(columns, Q - q0);
            pack(team, batch, q0, here, packed);
            team.share(blocks * across, [&](int64_t task) {
                const int64_t q = begin(task % across, across, here, WIDTH);
                const int64_t cols = begin(task % across + 1, across, here, WIDTH) - q;
                block(tiles, batch, task / across, q0 + q, cols, packed + q * deep * S::PASSES, own);
            });
        }
    }

    void pack(Team& team, int64_t batch, int64_t q0, int64_t here, bf16* packed) const {
        const int64_t steps = parts(K, PLAIN);
        team.share(parts(here, WIDTH) * S::PASSES * steps, [&](int64_t task) {
            const int64_t k = task % steps * PLAIN, line = task / steps;
            const int64_t pass = line % S::PASSES, q = line / S::PASSES * WIDTH;
            const int64_t count = least(PLAIN, K - k), whole = rounded_up(count, STEP);
            alignas(64) bf16 some[PLAIN * WIDTH];
            s.q_panel(pass, some, batch, k, count, q0 + q, least(WIDTH, here - q));
            for (int64_t i = count * WIDTH; i < whole * WIDTH; ++i) some[i] = bf16{};
            pair_up(packed + (q * S::PASSES + pass * WIDTH) * deep + k * WIDTH, some, whole);
        });
    }

    // Two rows of a panel become one with both elements of a column next to each other.
    static void pair_up(bf16* out, const bf16* in, int64_t steps) {
        typedef typename tw::pack<bf16, 8>::type V;
        for (int64_t k = 0; k < steps; k += 2)
            for (int64_t at = 0; at < WIDTH; at += 8) {
                const V a = *(const V*)(in + k * WIDTH + at), b = *(const V*)(in + (k + 1) * WIDTH + at);
                *(V*)(out + k * WIDTH + 2 * at) = low_pairs(a, b);
                *(V*)(out + k * WIDTH + 2 * at + 8) = high_pairs(a, b);
            }
    }

    template <class F>
    __attribute__((noinline)) void block(F& tiles, int64_t batch, int64_t number, int64_t q0,
                                         int64_t cols, const bf16* packed, float* own) const {
        const int64_t p0 = this->p_begin(number), rows = this->p_begin(number + 1) - p0;
        float* const sums = own;
        bf16* const p_own = (bf16*)(sums + Base::SUMS);
        float* const turned = sums + Base::SUMS + PC * KC / 2;
        if (K == 0) return this->finish_nothing(batch, p0, rows, q0, cols, sums, turned);
        for (int64_t pass = 0; pass < S::PASSES; ++pass)
            for (int64_t k = 0; k < K; k += KC) {
                const int64_t kc = least(KC, K - k), whole = rounded_up(kc, STEP);
                s.p_rows(pass, p_own, KC, batch, k, kc, p0, rows);
                for (int64_t r = 0; r < rows; ++r)
                    for (int64_t at = kc; at < whole; ++at) p_own[r * KC + at] = bf16{};
                const bool first = k == 0 && pass == 0, last = k + KC >= K && pass + 1 == S::PASSES;
                for (int64_t q = 0; q < cols; q += WIDTH) {
                    const bf16* panel = packed + (q * S::PASSES + pass * WIDTH) * deep + k * WIDTH;
                    for (int64_t p = 0; p < rows; p += S::ROWS) {
                        float* const out = sums + p * STRIDE + q;
                        if (last) this->expect(batch, p0 + p, q0 + q);
                        if constexpr (S::UNIT == TILES)
                            tiles_tile(tiles, out, STRIDE, p_own + p * KC, KC, panel, whole, first);
                        else
                            tile_by<S, TwoByTwo<S>, 1>(out, STRIDE, p_own + p * KC, KC, panel, 2 * WIDTH,
                                                       whole, first);
                    }
                    if (last)
                        this->finish(batch, p0, rows, q0 + q, least(WIDTH, cols - q), sums + q, turned);
                }
            }
    }
};

}  // namespace tw::gemm
