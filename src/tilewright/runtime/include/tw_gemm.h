// Matrix products. A kernel describes its own as a struct `S`: how operands are packed, and what is
// done with each finished row. The loops here bring that through the caches and the registers.
//
// The two sides of a product are P and Q: its tiles have ROWS rows of P, whose elements are
// broadcast, and VECS vectors of columns of Q. Either side may be the left operand, so a transposed
// weight is read along its rows without being packed. K is walked in blocks of KC; a task computes
// PC rows by QC columns in a buffer that stays in the second-level cache, and finishes a panel's rows
// when their last block of K is there.
//
// Three ways to walk (`S::WAY`):
//   PACKED  Q is copied to panels of tile width first: by each thread the columns that it has to
//           itself, or, where they are too few for that, by all threads for all
//   STREAM  few rows: Q is read where it is, once; its columns are contiguous
//   DOT     few rows of Q, both sides contiguous along K: dot products, nothing is packed
#pragma once

#include "tw_tile.h"

extern "C" {
void* aligned_alloc(size_t, size_t) noexcept;
void free(void*) noexcept;
}

namespace tw::gemm {

enum Way { PACKED, STREAM, DOT };

constexpr int UNROLL = 4;  // steps of k

// ---------------------------------------------------------------------------------------- vectors
template <class T, int N>
struct lanes {
    typedef T type __attribute__((vector_size(N * sizeof(T)), aligned(sizeof(T)), may_alias));
};

// sum += a * b in one instruction: kernels are compiled without contraction, and products want it.
// Written out because of the registers: left to itself, g++ 12 moves sums around, or keeps them in
// memory as soon as steps are unrolled (AVX2, 6 rows by 16: half the speed).
template <class V>
TW_INLINE void madd(V& sum, V a, V b) {
#if defined(__FMA__)
    using T = decltype(a[0] + a[0]);
    if constexpr (same<T, float> && sizeof(V) >= 16) {
        asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return;
    } else if constexpr (same<T, double> && sizeof(V) >= 16) {
        asm("vfmadd231pd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return;
    }
#endif
    sum = a * b + sum;
}

// Elements from memory, made numbers of the sums' type. The instructions are named because g++ 12
// widens one half of a vector at a time.
template <class V, class E>
TW_INLINE V fetch(const E* at) {
    using T = decltype(V{}[0] + V{}[0]);
    constexpr int N = sizeof(V) / sizeof(T);
    if constexpr (same<E, T>) return *(const V*)at;
#if defined(__AVX2__)
    if constexpr (same<T, float> && sizeof(V) >= 32) {
        typename lanes<int32_t, N>::type wide;
        const auto& memory = *(const typename lanes<bits_of<E>, N>::type*)at;
        if constexpr (same<E, f16>) {
            V v;
            asm("vcvtph2ps %1, %0" : "=v"(v) : "m"(memory));
            return v;
        } else if constexpr (same<E, bf16>) {
            asm("vpmovzxwd %1, %0" : "=v"(wide) : "m"(memory));
            return bit_cast<V>(wide << 16);
        } else if constexpr (sizeof(E) == 1 && is_int<E>) {
            if constexpr (is_signed<E>)
                asm("vpmovsxbd %1, %0" : "=v"(wide) : "m"(memory));
            else
                asm("vpmovzxbd %1, %0" : "=v"(wide) : "m"(memory));
            return __builtin_convertvector(wide, V);
        }
    }
#endif
    V v;
    for (int i = 0; i < N; ++i) v[i] = cast<T>(at[i]);
    return v;
}

// Nothing less zero is itself. A loop over the lanes is not seen to be a broadcast (g++ 12).
template <class V, class T>
TW_INLINE V splat(T x) {
    return x - V{};
}

template <class T>
TW_INLINE T least(T a, T b) {
    return a < b ? a : b;
}
TW_INLINE int64_t parts(int64_t size, int64_t part) { return (size + part - 1) / part; }
TW_INLINE int64_t rounded_up(int64_t size, int64_t unit) { return parts(size, unit) * unit; }
// Where one of so many parts begins: each has as many units as the others, or one more.
TW_INLINE int64_t begin(int64_t part, int64_t of, int64_t size, int64_t unit) {
    return least(size, parts(size, unit) * part / of * unit);
}

// ------------------------------------------------------------------------------------------ tiles
// What a tile multiplies, and how: a step of K is one element of each row of P and of each column of
// Q, or for other instructions several (`tw_pairs.h`).
template <class S, class E>
struct OneByOne {
    using T = typename S::T;
    typedef typename lanes<T, S::LANES>::type V;
    static constexpr int64_t STEPS = 1;

    TW_INLINE static V row(const T* p) { return splat<V>(*p); }
    TW_INLINE static V columns(const E* q) { return fetch<V>(q); }
    TW_INLINE static void add(V& sum, V a, V b) { madd(sum, a, b); }
};

// One step of k: the sums of a tile, ROWS elements of P, VECS vectors of Q.
template <class S, class How, class V, class T, class E>
TW_INLINE void tile_step(V (&sum)[S::ROWS][S::VECS], const T* p, int64_t p_stride, const E* q) {
    decltype(How::columns(q)) b[S::VECS];
#pragma GCC unroll 32
    for (int v = 0; v < S::VECS; ++v) b[v] = How::columns(q + How::STEPS * v * S::LANES);
#pragma GCC unroll 32
    for (int r = 0; r < S::ROWS; ++r) {
        const auto a = How::row(p + r * p_stride);
#pragma GCC unroll 32
        for (int v = 0; v < S::VECS; ++v) How::add(sum[r][v], a, b[v]);
    }
}

// out[ROWS][VECS * LANES] (+)= p[ROWS][kc] * q[kc][VECS * LANES], a row of q holding all of a step
template <class S, class How, int UNROLLED, class T, class E>
__attribute__((noinline)) void tile_by(typename S::T* out, int64_t out_stride, const T* p,
                                       int64_t p_stride, const E* q, int64_t q_stride, int64_t kc,
                                       bool first) {
    typedef typename lanes<typename S::T, S::LANES>::type V;
    constexpr int64_t STEPS = How::STEPS;
    V sum[S::ROWS][S::VECS];
#pragma GCC unroll 32
    for (int r = 0; r < S::ROWS; ++r)
#pragma GCC unroll 32
        for (int v = 0; v < S::VECS; ++v)
            sum[r][v] = first ? V{} : *(const V*)(out + r * out_stride + v * S::LANES);
    int64_t k = 0;
    for (; k + UNROLLED * STEPS <= kc; k += UNROLLED * STEPS) {
#pragma GCC unroll 32
        for (int u = 0; u < UNROLLED; ++u)
            tile_step<S, How>(sum, p + k + u * STEPS, p_stride, q + u * q_stride);
        q += UNROLLED * q_stride;
    }
    for (; k < kc; k += STEPS) {
        tile_step<S, How>(sum, p + k, p_stride, q);
        q += q_stride;
    }
#pragma GCC unroll 32
    for (int r = 0; r < S::ROWS; ++r)
#pragma GCC unroll 32
        for (int v = 0; v < S::VECS; ++v)
            *(V*)(out + r * out_stride + v * S::LANES) = sum[r][v];
}

template <class S, class E>
TW_INLINE void tile(typename S::T* out, int64_t out_stride, const typename S::T* p, int64_t p_stride,
                    const E* q, int64_t q_stride, int64_t kc, bool first) {
    tile_by<S, OneByOne<S, E>, UNROLL>(out, out_stride, p, p_stride, q, q_stride, kc, first);
}

// The lanes of a vector added up, halves first.
template <class V>
TW_INLINE auto across(V v) {
    constexpr int N = sizeof(V) / sizeof(v[0]);
    if constexpr (N == 16)
        return across(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
    else if constexpr (N == 8)
        return across(__builtin_shufflevector(v, v, 0, 1, 2, 3) +
                      __builtin_shufflevector(v, v, 4, 5, 6, 7));
    else if constexpr (N == 4)
        return across(__builtin_shufflevector(v, v, 0, 1) + __builtin_shufflevector(v, v, 2, 3));
    else
        return v[0] + v[1];
}

// One step of LANES elements along k for VECS rows of q and ROWS rows of p. What there is less of is
// held in registers, beside the sums.
template <class S, class V, class A, class B>
TW_INLINE void dots_step(V (&sum)[S::VECS][S::ROWS], const A* const* p, const B* const* q,
                         int64_t k) {
    if constexpr (S::VECS <= S::ROWS) {
        V held[S::VECS];
#pragma GCC unroll 32
        for (int v = 0; v < S::VECS; ++v) held[v] = fetch<V>(q[v] + k);
#pragma GCC unroll 32
        for (int r = 0; r < S::ROWS; ++r) {
            const V other = fetch<V>(p[r] + k);
#pragma GCC unroll 32
            for (int v = 0; v < S::VECS; ++v) madd(sum[v][r], held[v], other);
        }
    } else {
        V held[S::ROWS];
#pragma GCC unroll 32
        for (int r = 0; r < S::ROWS; ++r) held[r] = fetch<V>(p[r] + k);
#pragma GCC unroll 32
        for (int v = 0; v < S::VECS; ++v) {
            const V other = fetch<V>(q[v] + k);
#pragma GCC unroll 32
            for (int r = 0; r < S::ROWS; ++r) madd(sum[v][r], held[r], other);
        }
    }
}

// out[VECS][ROWS] (+)= the dot products of VECS rows of q and ROWS rows of p, all along k
template <class S, class A, class B>
__attribute__((noinline)) void dots(typename S::T* out, int64_t out_stride, const A* const* p,
                                    const B* const* q, int64_t kc, bool first) {
    using T = typename S::T;
    typedef typename lanes<T, S::LANES>::type V;
    V sum[S::VECS][S::ROWS];
#pragma GCC unroll 32
    for (int v = 0; v < S::VECS; ++v)
#pragma GCC unroll 32
        for (int r = 0; r < S::ROWS; ++r) sum[v][r] = V{};
    int64_t k = 0;
    for (; k + S::LANES <= kc; k += S::LANES) dots_step<S>(sum, p, q, k);
    if (k < kc) {  // the rest, with zeros behind it
        T some[S::ROWS + S::VECS][S::LANES] = {};
        const T *p_rest[S::ROWS], *q_rest[S::VECS];
        for (int r = 0; r < S::ROWS + S::VECS; ++r)
            for (int64_t at = 0; at < kc - k; ++at)
                some[r][at] = r < S::ROWS ? cast<T>(p[r][k + at]) : cast<T>(q[r - S::ROWS][k + at]);
        for (int r = 0; r < S::ROWS; ++r) p_rest[r] = some[r];
        for (int v = 0; v < S::VECS; ++v) q_rest[v] = some[S::ROWS + v];
        dots_step<S>(sum, p_rest, q_rest, 0);
    }
#pragma GCC unroll 32
    for (int v = 0; v < S::VECS; ++v)
#pragma GCC unroll 32
        for (int r = 0; r < S::ROWS; ++r) {
            T* to = out + v * out_stride + r;
            *to = first ? across(sum[v][r]) : *to + across(sum[v][r]);
        }
}

// ----------------------------------------------------------------------------------------- memory
// Scratch memory is kept between calls: fresh pages cost more than packing what goes into them.
// Variables that are inline are one for all kernels of the process.
struct alignas(64) Spare {
    size_t size;
};
inline Spare* spares[8];

struct Scratch {
    Spare* block = nullptr;

    explicit Scratch(size_t size) {
        for (Spare*& slot : spares) {
            block = __atomic_exchange_n(&slot, (Spare*)nullptr, __ATOMIC_ACQ_REL);
            if (block && block->size >= size) return;
            free(block);
        }
        const size_t page = 4096;
        size = (size + sizeof(Spare) + page - 1) / page * page;
        block = (Spare*)aligned_alloc(page, size);
        if (!block) __builtin_trap();
        block->size = size - sizeof(Spare);
    }
    ~Scratch() {
        for (Spare*& slot : spares) {
            Spare* empty = nullptr;
            if (__atomic_compare_exchange_n(&slot, &empty, block, false, __ATOMIC_ACQ_REL,
                                            __ATOMIC_RELAXED))
                return;
        }
        free(block);
    }
    char* data() const { return (char*)(block + 1); }
};

// ----------------------------------------------------------------------------------------- threads
// The threads that work on one product. Tasks are numbered on through all phases of a product; at
// the end of each phase every thread has drawn one number too many.
struct Team {
    int64_t size = 1;
    int64_t* ticket = nullptr;
    int64_t me = 0;
    int64_t base = 0;

    template <class F>
    TW_INLINE void share(int64_t count, F&& task) {
        if (size == 1) {
            for (int64_t i = 0; i < count; ++i) task(i);
            return;
        }
        for (;;) {
            const int64_t i = __atomic_fetch_add(ticket, 1, __ATOMIC_RELAXED) - base;
            if (i >= count) break;
            task(i);
        }
        base += count + size;
#pragma omp barrier
    }
};

// --------------------------------------------------------------------------------------- the loops
constexpr int64_t SHARED = 8 << 20;  // bytes of packed columns at a time: they stay in a cache
constexpr int64_t TURNED = 16;       // columns turned around at a time
constexpr int64_t ENOUGH = 64;       // columns for a thread to have them to itself

template <class S>
struct Loops {
    using T = typename S::T;
    static constexpr int64_t WIDTH = S::WAY == DOT ? S::VECS : S::VECS * S::LANES;
    static constexpr int64_t PC = S::PC, QC = S::QC, KC = S::KC;
    // Not a multiple of a page: rows below each other must not share a place in the cache.
    static constexpr int64_t STRIDE = (S::WAY == DOT ? PC : QC) + 64 / sizeof(T);
    static constexpr int64_t SUMS = S::WAY == DOT ? QC * STRIDE : PC * STRIDE;
    static constexpr int64_t PACKED_P = (S::PACK_P ? PC : S::ROWS) * KC;
    static constexpr int64_t PACKED_Q = S::WAY == STREAM ? KC * WIDTH : 0;
    static constexpr int64_t OWN = SUMS + PACKED_P + PACKED_Q + TURNED * PC + 64;

    const S& s;
    const int64_t P, Q, K;
    int64_t blocks;   // of P: a task is one of them and one of Q's
    int64_t across;   // blocks of Q, of what is packed at a time
    int64_t columns;  // that are packed at a time
    bool apart;       // each thread has columns of its own, which nobody else packs or waits for

    Loops(const S& s, int64_t threads, bool may_part = true)
        : s(s), P(s.p_size()), Q(s.q_size()), K(s.k_size()) {
        const int64_t deep = K * S::PASSES > 0 ? K * S::PASSES : 1;
        const int64_t fits = SHARED / int64_t(sizeof(T)) / deep / QC * QC;
        const int64_t times = S::WAY == PACKED ? parts(Q, fits > QC ? fits : QC) : 1;
        columns = rounded_up(parts(Q, times), WIDTH);
        across = S::WAY == DOT ? 1 : parts(columns, QC);
        blocks = parts(P, PC);
        const int64_t wide = rounded_up(columns, threads * WIDTH);  // what all would take if apart
        apart = may_part && S::WAY == PACKED && threads > 1 && times == 1 && Q >= ENOUGH * threads &&
                wide - columns <= columns / 32;
        if (apart) return;
        // the same number of tasks for each thread, as far as there are tiles
        int64_t& finer = S::WAY == STREAM ? across : blocks;
        const int64_t most = S::WAY == STREAM ? parts(Q, WIDTH) : parts(P, S::ROWS);
        while (blocks * across % threads && finer < most) ++finer;
    }

    int64_t p_begin(int64_t block) const { return begin(block, blocks, P, S::ROWS); }

    // Elements the threads share.
    int64_t shared() const {
        if (S::WAY == STREAM || !S::PACK_Q) return 0;
        return S::PASSES * K * rounded_up(columns, WIDTH);
    }

    void run(Team& team, int64_t batch, T* packed, T* own) const {
        if constexpr (S::WAY == PACKED) {
            if (apart) {
                const int64_t q = begin(team.me, team.size, Q, WIDTH);
                const int64_t here = begin(team.me + 1, team.size, Q, WIDTH) - q;
                Team nobody;
                walk(nobody, batch, q, here, parts(here, QC), packed + q * K * S::PASSES, own);
                return;
            }
            for (int64_t q = 0; q < Q; q += columns)
                walk(team, batch, q, least(columns, Q - q), across, packed, own);
        } else if constexpr (S::WAY == STREAM) {
            team.share(blocks * across, [&](int64_t task) {
                const int64_t q = begin(task % across, across, Q, WIDTH);
                block(batch, task / across, q, begin(task % across + 1, across, Q, WIDTH) - q,
                      nullptr, own);
            });
        } else {
            if constexpr (S::PACK_Q)
                team.share(S::PASSES * Q, [&](int64_t task) {
                    const int64_t pass = task / Q, q = task % Q;
                    s.q_rows(pass, packed + task * K, K, batch, 0, K, q, 1);
                });
            team.share(blocks, [&](int64_t task) { dot_block(batch, task, packed, own); });
        }
    }

    // Some columns with all rows: packed, then used.
    void walk(Team& team, int64_t batch, int64_t q0, int64_t here, int64_t across, T* packed,
              T* own) const {
        pack(team, batch, q0, here, packed);
        team.share(blocks * across, [&](int64_t task) {
            const int64_t q = begin(task % across, across, here, WIDTH);
            block(batch, task / across, q0 + q, begin(task % across + 1, across, here, WIDTH) - q,
                  packed + q * K * S::PASSES, own);
        });
    }

    // Panels of `columns` columns, each with all of K: panel by panel, pass by pass.
    void pack(Team& team, int64_t batch, int64_t q0, int64_t here, T* packed) const {
        const int64_t steps = parts(K, KC);
        team.share(parts(here, WIDTH) * S::PASSES * steps, [&](int64_t task) {
            const int64_t k = task % steps * KC, line = task / steps;
            const int64_t pass = line % S::PASSES, q = line / S::PASSES * WIDTH;
            T* to = packed + (q * S::PASSES + pass * WIDTH) * K + k * WIDTH;
            s.q_panel(pass, to, batch, k, least(KC, K - k), q0 + q, least(WIDTH, here - q));
        });
    }

    __attribute__((noinline)) void block(int64_t batch, int64_t number, int64_t q0, int64_t cols,
                                         const T* packed, T* own) const {
        const int64_t p0 = p_begin(number), rows = p_begin(number + 1) - p0;
        T* const sums = own;
        T* const p_own = sums + SUMS;
        T* const q_own = p_own + PACKED_P;
        T* const turned = q_own + PACKED_Q;
        if (K == 0) return finish_nothing(batch, p0, rows, q0, cols, sums, turned);
        const bool once = K <= KC && S::PASSES == 1;  // a panel is done before the next begins
        for (int64_t pass = 0; pass < S::PASSES; ++pass)
            for (int64_t k = 0; k < K; k += KC) {
                const int64_t kc = least(KC, K - k);
                const bool first = k == 0 && pass == 0, last = k + KC >= K && pass + 1 == S::PASSES;
                const int64_t whole = rows / S::ROWS * S::ROWS;
                if constexpr (S::PACK_P)
                    s.p_rows(pass, p_own, KC, batch, k, kc, p0, rows);
                else if (whole < rows)
                    last_rows(p_own, pass, batch, k, kc, p0 + whole, rows - whole);
                for (int64_t q = 0; q < cols; q += WIDTH) {
                    T* const here = once ? sums : sums + q;
                    auto with = [&](const auto* panel, int64_t q_stride) {
                        for (int64_t p = 0; p < rows; p += S::ROWS) {
                            T* out = here + p * STRIDE;
                            if (last) expect(batch, p0 + p, q0 + q);
                            const T* from = p_own + (S::PACK_P ? p * KC : 0);
                            int64_t stride = KC;
                            if constexpr (!S::PACK_P)
                                if (p < whole) {
                                    from = s.p_at(pass, batch, k, p0 + p);
                                    stride = s.p_stride(pass);
                                }
                            tile<S>(out, STRIDE, from, stride, panel, q_stride, kc, first);
                        }
                        if (last)
                            finish(batch, p0, rows, q0 + q, least(WIDTH, cols - q), here, turned);
                    };
                    if constexpr (S::WAY == PACKED) {
                        with(packed + (q * S::PASSES + pass * WIDTH) * K + k * WIDTH, WIDTH);
                        continue;
                    }
                    if constexpr (S::WAY == STREAM && !S::PACK_Q)
                        if (q + WIDTH <= cols) {
                            with(s.q_at(pass, batch, k, q0 + q), s.q_stride(pass));
                            continue;
                        }
                    s.q_panel(pass, q_own, batch, k, kc, q0 + q, least(WIDTH, cols - q));
                    with((const T*)q_own, WIDTH);
                }
            }
    }

    // Fewer rows than a tile has, with zeros below them: behind them there is nothing to read.
    __attribute__((noinline)) void last_rows(T* to, int64_t pass, int64_t batch, int64_t k, int64_t kc,
                                             int64_t p, int64_t rows) const {
        const T* from = s.p_at(pass, batch, k, p);
        const int64_t stride = s.p_stride(pass);
        for (int64_t r = 0; r < S::ROWS; ++r)
            for (int64_t at = 0; at < kc; ++at)
                to[r * KC + at] = r < rows ? from[r * stride + at] : T(0);
    }

    // The rows of a panel, while they are in the nearest cache.
    __attribute__((noinline)) void finish(int64_t batch, int64_t p0, int64_t rows, int64_t q0,
                                          int64_t cols, const T* sums, T* turned) const {
        if constexpr (S::ALONG_Q) {
            if (cols == WIDTH)  // a number that the compiler knows
                for (int64_t p = 0; p < rows; ++p) s.row(batch, p0 + p, q0, WIDTH, sums + p * STRIDE);
            else
                for (int64_t p = 0; p < rows; ++p) s.row(batch, p0 + p, q0, cols, sums + p * STRIDE);
        } else {
            for (int64_t q = 0; q < cols; q += TURNED) {
                const int64_t some = least(TURNED, cols - q);
                transpose_tile(turned, PC, sums + q, STRIDE, some, rows);
                for (int64_t at = 0; at < some; ++at)
                    s.row(batch, q0 + q + at, p0, rows, turned + at * PC);
            }
        }
    }

    // Have the memory that a tile's rows are finished with brought near, while they are computed.
    TW_INLINE void expect(int64_t batch, int64_t p, int64_t q) const {
        if constexpr (S::ALONG_Q)
            for (int64_t r = 0; r < S::ROWS; ++r) s.expect(batch, p + r, q);
    }

    // A sum of nothing is zero.
    void finish_nothing(int64_t batch, int64_t p0, int64_t rows, int64_t q0, int64_t cols, T* sums,
                        T* turned) const {
        for (int64_t i = 0; i < SUMS; ++i) sums[i] = T(0);
        for (int64_t q = 0; q < cols; q += WIDTH)
            finish(batch, p0, rows, q0 + q, least(WIDTH, cols - q), sums + q, turned);
    }

    // All rows of Q with some of P's, QC at a time.
    __attribute__((noinline)) void dot_block(int64_t batch, int64_t number, const T* packed,
                                             T* own) const {
        const int64_t p0 = p_begin(number), rows = p_begin(number + 1) - p0, step = S::PACK_P ? KC : K;
        T* const sums = own;
        T* const p_own = sums + SUMS;
        for (int64_t q0 = 0; q0 < Q; q0 += QC) {
            const int64_t cols = least(QC, Q - q0);
            if (K == 0)
                for (int64_t i = 0; i < SUMS; ++i) sums[i] = T(0);
            for (int64_t pass = 0; pass < S::PASSES; ++pass)
                for (int64_t k = 0; k < K; k += step) {
                    const int64_t kc = least(step, K - k);
                    if constexpr (S::PACK_P) s.p_rows(pass, p_own, KC, batch, k, kc, p0, rows);
                    for (int64_t p = 0; p < rows; p += S::ROWS) {
                        const typename S::PT* from[S::ROWS];
                        for (int64_t r = 0; r < S::ROWS; ++r) {
                            const int64_t at = least(p + r, rows - 1);
                            if constexpr (S::PACK_P)
                                from[r] = p_own + at * KC;
                            else
                                from[r] = s.p_at(pass, batch, k, p0 + at);
                        }
                        for (int64_t q = 0; q < cols; q += S::VECS) {
                            const typename S::QT* with[S::VECS];
                            for (int64_t v = 0; v < S::VECS; ++v) {
                                const int64_t at = q0 + least(q + v, cols - 1);
                                if constexpr (S::PACK_Q)
                                    with[v] = packed + (pass * Q + at) * K + k;
                                else
                                    with[v] = s.q_at(pass, batch, k, at);
                            }
                            dots<S>(sums + q * STRIDE + p, STRIDE, from, with, kc,
                                    k == 0 && pass == 0);
                        }
                    }
                }
            for (int64_t q = 0; q < cols; ++q) s.row(batch, q0 + q, p0, rows, sums + q * STRIDE);
        }
    }
};

// Threads that are worth starting: one core does 80 operations, or reads 8 elements, in the time
// below divided by their number. Measured to begin with: a parallel region takes about 10 us.
template <class S>
int64_t worth_threads(const S& s) {
    const int64_t limit = S::THREADS > 0 ? S::THREADS : omp_get_max_threads();
    if (limit == 1) return 1;
    const double p = s.p_size(), q = s.q_size(), k = double(s.k_size()) * S::PASSES;
    const double ns = s.batches() * (2 * p * q * k / 80 + (p * k + q * k + p * q) / 8);
    const double worth = ns / 10000;
    return worth < 2 ? 1 : worth < limit ? int64_t(worth) : limit;
}

template <class S, template <class> class Walk = Loops>
void run(const S& s) {
    using T = typename S::T;
    const int64_t batches = s.batches();
    if (batches <= 0 || s.p_size() <= 0 || s.q_size() <= 0) return;
    const int64_t threads = worth_threads(s);
    const bool alone = batches >= threads;  // each thread has whole products
    const Walk<S> loops(s, alone ? 1 : threads);
    const int64_t together = rounded_up(loops.shared(), 16), own = rounded_up(loops.OWN, 16);
    const Scratch scratch(sizeof(T) * (alone ? threads * (together + own) : together + threads * own));
    T* const memory = (T*)scratch.data();
    if (threads == 1) {
        Team team;
        for (int64_t b = 0; b < batches; ++b) loops.run(team, b, memory, memory + together);
        return;
    }
    alignas(64) int64_t ticket = 0;
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num();
        if (alone) {
            T* const mine = memory + me * (together + own);
            Team team;
#pragma omp for schedule(dynamic)
            for (int64_t b = 0; b < batches; ++b) loops.run(team, b, mine, mine + together);
        } else {
            Team team{omp_get_num_threads(), &ticket, me};
            for (int64_t b = 0; b < batches; ++b)
                loops.run(team, b, memory, memory + together + me * own);
        }
    }
}

}  // namespace tw::gemm
