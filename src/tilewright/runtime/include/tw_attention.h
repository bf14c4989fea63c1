// Attention without its matrix of scores. A kernel describes its own as a struct `S`: where operands
// lie, what becomes of a score, which blocks there is something in. The loops here bring that through
// the caches and the registers.
//
// The lanes of a vector are queries. A task has ROWS = LANES * VECS of them: their scores with one key
// are VECS vectors, the largest and the sum of a row of scores are a lane each, and nothing is ever
// turned around or added up across lanes. Keys and values are read where they are, an element at a
// time, which is broadcast; only queries are turned around, once. Where a head has fewer queries than
// there are lanes (S::FLAT), those of the heads that share a key head are put beside each other.
//
// With fewer tasks than threads the keys of a task are shared out (decoding); the parts are brought
// together in the end.
#pragma once

#include "tw_gemm.h"

namespace tw::attention {

using gemm::least;
using gemm::madd;
using gemm::parts;
using gemm::splat;

template <class S>
struct Task {
    using T = typename S::T;
    static constexpr int64_t ROWS = S::LANES * S::VECS;
    static constexpr int64_t KEYS = S::KEYS;  // at a time
    typedef typename gemm::lanes<T, S::LANES>::type V;

    const S& s;
    T *query, *scores, *sums, *most, *total, *keys, *values;
    int64_t d, dv;
    int64_t b, g, first;  // the batch, key head, and the first row
    int64_t h, m, last;   // where not FLAT: head and first query; the last there is

    static int64_t memory(const S& s) {
        const int64_t d = s.d(), dv = s.dv();
        return ROWS * (d + KEYS + dv + 2) + KEYS * (d + dv) + 64;
    }

    Task(const S& s, T* memory) : s(s), d(s.d()), dv(s.dv()) {
        query = memory;
        scores = query + ROWS * d;
        sums = scores + ROWS * KEYS;
        most = sums + ROWS * dv;
        total = most + ROWS;
        keys = total + ROWS;
        values = keys + KEYS * d;
    }

    TW_INLINE int64_t head(int64_t i) const {
        if constexpr (!S::FLAT) return h;
        return g * s.group() + least(first + i, last) / s.rows();
    }
    TW_INLINE int64_t row(int64_t i) const {
        if constexpr (!S::FLAT) return least(m + i, last);
        return least(first + i, last) % s.rows();
    }

    // Queries turned around, and scaled.
    void begin() {
        for (int64_t i = 0; i < ROWS; ++i) {
            const auto* from = s.query(b, head(i), row(i));
            for (int64_t x = 0; x < d; ++x) query[x * ROWS + i] = cast<T>(from[x]) * T(S::SCALE);
        }
        for (int64_t i = 0; i < ROWS; ++i) most[i] = -limits_inf(), total[i] = 0;
        for (int64_t i = 0; i < ROWS * dv; ++i) sums[i] = 0;
    }
    static constexpr T limits_inf() { return T(__builtin_inff()); }

    // Rows of keys or values as numbers that are multiplied: where they are, or converted.
    template <class E>
    TW_INLINE static const T* wide(const E* from, int64_t& stride, int64_t count, int64_t width,
                                   T* to) {
        if constexpr (same<E, T>) return from;
        for (int64_t j = 0; j < count; ++j)
#pragma omp simd
            for (int64_t x = 0; x < width; ++x) to[j * width + x] = cast<T>(from[j * stride + x]);
        stride = width;
        return to;
    }

    template <int J>
    TW_INLINE void multiply(const T* k, int64_t stride, T* out) {
        V sum[J][S::VECS] = {};
        for (int64_t x = 0; x < d; ++x) {
            V q[S::VECS];
#pragma GCC unroll 32
            for (int v = 0; v < S::VECS; ++v) q[v] = *(const V*)(query + x * ROWS + v * S::LANES);
#pragma GCC unroll 32
            for (int j = 0; j < J; ++j) {
                const V a = splat<V>(k[j * stride + x]);
#pragma GCC unroll 32
                for (int v = 0; v < S::VECS; ++v) madd(sum[j][v], a, q[v]);
            }
        }
#pragma GCC unroll 32
        for (int j = 0; j < J; ++j)
#pragma GCC unroll 32
            for (int v = 0; v < S::VECS; ++v) *(V*)(out + j * ROWS + v * S::LANES) = sum[j][v];
    }

    template <int C>
    TW_INLINE void accumulate(const T* v, int64_t stride, int64_t count, T* out) {
        V sum[C][S::VECS];
#pragma GCC unroll 32
        for (int c = 0; c < C; ++c)
#pragma GCC unroll 32
            for (int k = 0; k < S::VECS; ++k) sum[c][k] = *(V*)(out + c * ROWS + k * S::LANES);
        for (int64_t j = 0; j < count; ++j) {
            V p[S::VECS];
#pragma GCC unroll 32
            for (int k = 0; k < S::VECS; ++k) p[k] = *(const V*)(scores + j * ROWS + k * S::LANES);
#pragma GCC unroll 32
            for (int c = 0; c < C; ++c) {
                const V a = splat<V>(v[j * stride + c]);
#pragma GCC unroll 32
                for (int k = 0; k < S::VECS; ++k) madd(sum[c][k], a, p[k]);
            }
        }
#pragma GCC unroll 32
        for (int c = 0; c < C; ++c)
#pragma GCC unroll 32
            for (int k = 0; k < S::VECS; ++k) *(V*)(out + c * ROWS + k * S::LANES) = sum[c][k];
    }

    // Keys [n, n + count): scores, their exponentials, and the values they weigh.
    void step(int64_t n, int64_t count, bool masked) {
        constexpr int J = S::TILE;
        int64_t stride = s.key_stride();
        const T* k = wide(s.key(b, g, n), stride, count, d, keys);
        int64_t j = 0;
        for (; j + J <= count; j += J) multiply<J>(k + j * stride, stride, scores + j * ROWS);
        for (; j + 2 <= count; j += 2) multiply<2>(k + j * stride, stride, scores + j * ROWS);
        for (; j < count; ++j) multiply<1>(k + j * stride, stride, scores + j * ROWS);
        if (masked)
            s.masked(*this, n, count);
        else
            s.unmasked(*this, n, count);
        weigh(count);
        stride = s.value_stride();
        const T* v = wide(s.value(b, g, n), stride, count, dv, values);
        int64_t c = 0;
        for (; c + J <= dv; c += J) accumulate<J>(v + c, stride, count, sums + c * ROWS);
        for (; c + 4 <= dv; c += 4) accumulate<4>(v + c, stride, count, sums + c * ROWS);
        for (; c < dv; ++c) accumulate<1>(v + c, stride, count, sums + c * ROWS);
    }

    // Scores relative to the largest so far, as exponentials; what was summed follows it.
    TW_INLINE void weigh(int64_t count) {
        alignas(64) T top[ROWS], old[ROWS];
        for (int64_t i = 0; i < ROWS; ++i) top[i] = most[i];
        for (int64_t j = 0; j < count; ++j)
#pragma omp simd
            for (int64_t i = 0; i < ROWS; ++i) {
                const T x = scores[j * ROWS + i];
                top[i] = x > top[i] ? x : top[i];
            }
        int moved = 0;
#pragma omp simd reduction(| : moved)
        for (int64_t i = 0; i < ROWS; ++i) {
            moved |= top[i] != most[i];
            const T none = top[i] == -limits_inf() ? T(0) : top[i];
            old[i] = exp(most[i] - none);
            most[i] = top[i];
            top[i] = none;
            total[i] *= old[i];
        }
        for (int64_t j = 0; j < count; ++j)
#pragma omp simd
            for (int64_t i = 0; i < ROWS; ++i) {
                const T p = exp(scores[j * ROWS + i] - top[i]);
                scores[j * ROWS + i] = p;
                total[i] += p;
            }
        if (moved)
            for (int64_t c = 0; c < dv; ++c)
#pragma omp simd
                for (int64_t i = 0; i < ROWS; ++i) sums[c * ROWS + i] *= old[i];
    }

    // Keys [from, to) of one block, of which this part has the pieces `start` to `stop`; `seen` pieces
    // came before.
    void block(int64_t from, int64_t to, bool full, int64_t start, int64_t stop, int64_t& seen) {
        to = least(to, s.columns());
        for (int64_t n = from; n < to; n += KEYS, ++seen) {
            if (seen < start || seen >= stop) continue;
            const int64_t count = least(KEYS, to - n);
            if (full) {
                step(n, count, false);
                continue;
            }
            const int64_t h0 = head(0), h1 = head(ROWS - 1), m0 = row(0), m1 = row(ROWS - 1);
            if (S::FLAT && h0 != h1) {  // several heads, each with all its queries
                step(n, count, true);
                continue;
            }
            if (!s.maybe(b, h0, m0, m1, n, n + count - 1)) continue;
            step(n, count, !s.surely(b, h0, m0, m1, n, n + count - 1));
        }
    }

    int64_t pieces() const {
        if constexpr (!S::SPARSE) return parts(s.columns(), KEYS);
        const int64_t i = s.block_of(row(0));
        const int64_t each = parts(least(s.other(), s.columns()), KEYS);
        return (s.count(b, head(0), i) + s.full_count(b, head(0), i)) * each;
    }

    void walk(int64_t start, int64_t stop) {
        int64_t seen = 0;
        if constexpr (!S::SPARSE) {
            block(0, s.columns(), false, start, stop, seen);
        } else {
            const int64_t i = s.block_of(row(0)), h0 = head(0);
            const int64_t some = s.count(b, h0, i), full = s.full_count(b, h0, i);
            for (int64_t j = 0; j < some + full; ++j) {
                const int64_t at = j < some ? s.place(b, h0, i, j) : s.full_place(b, h0, i, j - some);
                block(at * s.other(), (at + 1) * s.other(), j >= some, start, stop, seen);
            }
        }
    }

    void finish(int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            const T by = total[i] == T(0) ? T(0) : T(1) / total[i];
            auto* out = s.out(b, head(i), row(i));
            using O = typename S::O;
            for (int64_t c = 0; c < dv; ++c) {
                const T x = sums[c * ROWS + i];
                out[c * s.out_step()] = cast<O>(by == T(0) && total[i] == T(0) ? T(0) : x * by);
            }
            const T found = (most[i] + log(total[i])) * T(1.4426950408889634), lowest = T(-__FLT_MAX__);
            *s.lse(b, head(i), row(i)) =
                float(total[i] == T(0) ? -limits_inf() : found < lowest ? lowest : found);
            if constexpr (S::MAXIMA)
                *s.maximum(b, head(i), row(i)) = float(most[i] * T(1.4426950408889634));
        }
    }

    // Another part of the same rows.
    void join(const T* from) {
        const T *their_sums = from, *their_most = from + ROWS * dv, *their_total = their_most + ROWS;
        for (int64_t i = 0; i < ROWS; ++i) {
            const T top = most[i] > their_most[i] ? most[i] : their_most[i];
            const T none = top == -limits_inf() ? T(0) : top;
            const T mine = exp(most[i] - none), theirs = exp(their_most[i] - none);
            total[i] = total[i] * mine + their_total[i] * theirs;
            for (int64_t c = 0; c < dv; ++c)
                sums[c * ROWS + i] = sums[c * ROWS + i] * mine + their_sums[c * ROWS + i] * theirs;
            most[i] = top;
        }
    }
};

// Which rows a task has.
template <class S>
struct Rows {
    const S& s;
    int64_t tiles, length;

    Rows(const S& s) : s(s) {
        length = S::FLAT ? s.rows() * s.group() : s.rows();
        const int64_t own = least(s.own(), length);
        tiles = length ? parts(length, own) * parts(own, Task<S>::ROWS) : 0;
    }
    int64_t tasks() const {
        const int64_t heads = S::FLAT ? s.heads() / s.group() : s.heads();
        return s.batches() * heads * tiles;
    }
    // How many rows there are of this task.
    int64_t set(Task<S>& t, int64_t number) const {
        const int64_t heads = S::FLAT ? s.heads() / s.group() : s.heads();
        // the last rows first: of a causal mask they are the longest
        const int64_t tile = tiles - 1 - number % tiles;
        const int64_t h = number / tiles % heads;
        t.b = number / tiles / heads;
        const int64_t own = least(s.own(), length), each = parts(own, Task<S>::ROWS);
        const int64_t first = tile / each * own + tile % each * Task<S>::ROWS;
        const int64_t end = least(length, (tile / each + 1) * own);
        t.first = t.m = first;
        t.last = end - 1;
        t.h = h;
        t.g = S::FLAT ? h : h / s.group();
        return least(Task<S>::ROWS, end - first);
    }
};

template <class S>
void run(const S& s) {
    using T = typename S::T;
    const int64_t threads = S::THREADS > 0 ? S::THREADS : omp_get_max_threads();
    const Rows<S> rows(s);
    const int64_t tasks = rows.tasks();
    const int64_t most = parts(s.columns(), 4 * S::KEYS);
    int64_t shares = 1;
    if (tasks && tasks < threads) shares = least(parts(threads, tasks), most < 1 ? 1 : most);
    const int64_t memory = gemm::rounded_up(Task<S>::memory(s), 64);
    const int64_t kept = Task<S>::ROWS * (s.dv() + 2);
    T* all = (T*)aligned_alloc(64, gemm::rounded_up(sizeof(T) * memory * threads, 64));
    T* part = shares > 1 ? (T*)aligned_alloc(64, gemm::rounded_up(sizeof(T) * kept * tasks * shares, 64))
                         : nullptr;
#pragma omp parallel num_threads(threads)
    {
        Task<S> task(s, all + memory * omp_get_thread_num());
#pragma omp for schedule(dynamic, 1)
        for (int64_t number = 0; number < tasks * shares; ++number) {
            const int64_t count = rows.set(task, number / shares), share = number % shares;
            if (count <= 0) continue;
            task.begin();
            const int64_t pieces = task.pieces();
            task.walk(pieces * share / shares, pieces * (share + 1) / shares);
            if (shares == 1) {
                task.finish(count);
            } else {
                T* to = part + number * kept;
                for (int64_t i = 0; i < kept; ++i) to[i] = task.sums[i];
            }
        }
        if (shares > 1) {
#pragma omp for schedule(static)
            for (int64_t number = 0; number < tasks; ++number) {
                const int64_t count = rows.set(task, number);
                if (count <= 0) continue;
                const T* from = part + number * shares * kept;
                for (int64_t i = 0; i < kept; ++i) task.sums[i] = from[i];
                for (int64_t k = 1; k < shares; ++k) task.join(from + k * kept);
                task.finish(count);
            }
        }
    }
    free(all);
    free(part);
}

}  // namespace tw::attention
