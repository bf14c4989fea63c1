// Accumulators for reductions and atomic updates for parallel scatters.
#pragma once

namespace tw {

// ---------------------------------------------------------------------------------------- Welford
template <class T>
struct welford {
    T mean = T(0), m2 = T(0), weight = T(0);

    TW_INLINE void update(T x) {
        weight += T(1);
        T delta = x - mean;
        mean += delta / weight;
        m2 += delta * (x - mean);
    }

    TW_INLINE void combine(const welford& o) {
        T total = weight + o.weight;
        T share = total == T(0) ? T(0) : o.weight / total;  // an empty side changes nothing
        T delta = o.mean - mean;
        mean += delta * share;
        m2 += o.m2 + delta * delta * weight * share;
        weight = total;
    }
};

template <class T>
TW_INLINE welford<T> combine(welford<T> a, const welford<T>& b) {
    a.combine(b);
    return a;
}

// ------------------------------------------------------------------------------- argmin and argmax
// NaN beats every number; among equals (and among NaNs) the first index wins. An accumulator starts
// without an element: its index is the largest int64 and its value the neutral one.
template <class T>
struct indexed {
    T value;
    int64_t at;
};

template <class T>
constexpr indexed<T> argmax_start = {limits<T>::lowest, INT64_MAX};
template <class T>
constexpr indexed<T> argmin_start = {limits<T>::highest, INT64_MAX};

template <class T>
TW_INLINE bool argmax_takes(T v, int64_t i, T best, int64_t at) {
    bool better = (v > best) | ((v != v) & (best == best));
    bool equal = (v == best) | ((v != v) & (best != best));
    return better | (equal & (i < at));
}
template <class T>
TW_INLINE bool argmin_takes(T v, int64_t i, T best, int64_t at) {
    bool better = (v < best) | ((v != v) & (best == best));
    bool equal = (v == best) | ((v != v) & (best != best));
    return better | (equal & (i < at));
}

template <class T>
TW_INLINE indexed<T> argmax(indexed<T> a, indexed<T> b) {
    bool take = argmax_takes(b.value, b.at, a.value, a.at);
    return {take ? b.value : a.value, take ? b.at : a.at};
}
template <class T>
TW_INLINE indexed<T> argmin(indexed<T> a, indexed<T> b) {
    bool take = argmin_takes(b.value, b.at, a.value, a.at);
    return {take ? b.value : a.value, take ? b.at : a.at};
}

// ---------------------------------------------------------------------------------------- atomics
// Works on any element type by exchanging its bits. Relaxed: only the sum at the end of the
// parallel region is read, and the region's barrier orders that.
template <class T, class F>
TW_INLINE void atomic_update(T* at, F&& change) {
    using U = bits_of<T>;
    U* cell = reinterpret_cast<U*>(at);
    U seen = __atomic_load_n(cell, __ATOMIC_RELAXED);
    for (;;) {
        U next = bit_cast<U>(change(bit_cast<T>(seen)));
        if (__atomic_compare_exchange_n(cell, &seen, next, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
            return;
    }
}

// Small floats are added, multiplied and compared as float and rounded when stored.
template <class T>
TW_INLINE auto wide(T x) {
    if constexpr (is_small_float<T>)
        return to_float(x);
    else
        return x;
}

template <class T>
TW_INLINE void atomic_add(T* at, T x) {
    if constexpr (is_int<T>) {
        __atomic_fetch_add(reinterpret_cast<bits_of<T>*>(at), bits_of<T>(x), __ATOMIC_RELAXED);
    } else {
        atomic_update(at, [x](T old) { return cast<T>(add(wide(old), wide(x))); });
    }
}
template <class T>
TW_INLINE void atomic_mul(T* at, T x) {
    atomic_update(at, [x](T old) { return cast<T>(mul(wide(old), wide(x))); });
}
template <class T>
TW_INLINE void atomic_min(T* at, T x) {
    atomic_update(at, [x](T old) { return cast<T>(min(wide(old), wide(x))); });
}
template <class T>
TW_INLINE void atomic_max(T* at, T x) {
    atomic_update(at, [x](T old) { return cast<T>(max(wide(old), wide(x))); });
}

}  // namespace tw
