"""What generated Triton kernels call: device functions with torch's semantics.

The file is loaded a second time, as plain Python, for kernels that run in Triton's interpreter
(`runtime/interpret.py`): `jit` then leaves functions as they are, and `libdevice` is torch's maths.
Functions take tensors of one shape (or shapes that broadcast) and any rank.
"""

# Triton compiles these functions from their text; they have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportUnusedImport=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = __name__.endswith("interpreted")

if INTERPRETED:
    from tilewright.runtime.interpret import in_order, libdevice, meet, nearest, product, rounded
    from tilewright.runtime.interpret import nothing as gdc_launch_dependents
    from tilewright.runtime.interpret import nothing as gdc_wait
    from tilewright.runtime.interpret import plain as jit
else:
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    jit = triton.jit

    @jit
    def meet(counter, until):
        """Wait until the programs of a row have come here so often, all together."""
        tl.debug_barrier()
        here = tl.atomic_add(counter, 1, sem="acq_rel") + 1
        while here < until:
            here = tl.atomic_add(counter, 0, sem="acquire")
        tl.debug_barrier()

    @jit
    def in_order(x):
        """Each row of a tile in ascending order."""
        return tl.sort(x, 1)

    @jit
    def rounded(x):
        """Through bfloat16 and back, two at a time."""
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $1, $3, $2; shl.b32 $0, $1, 16; and.b32 $1, $1, 0xffff0000;",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip

    @jit
    def nearest(x):
        """As an integer, at once; what is no number as zero."""
        return libdevice.float2int_rn(x)

    @jit
    def product(a, by):
        """Both halves of a product by one instruction (H200: dropout of 16384x4096 bfloat16 70 us,
        76 us by two)."""
        return tl.inline_asm_elementwise(
            "{ .reg .b64 t; mul.wide.u32 t, $2, $3; mov.b64 {$0, $1}, t; }",
            "=r,=r,r,r", [a, by], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip


@jit
def begin():
    """First in a kernel that is started while the one before it still runs: wait for that, then let
    the next one be started. What starting costs is hidden so, a few microseconds of a kernel."""
    gdc_wait()
    gdc_launch_dependents()


# ---- folds: how two partial results combine


@jit
def add(a, b):
    return a + b


@jit
def mul(a, b):
    return a * b


@jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def either(a, b):
    return a | b


@jit
def both(a, b):
    return a & b


@jit
def differ(a, b):
    return a ^ b


@jit
def argmax(a, i, b, j):
    """The first of the largest; a NaN is larger than any number."""
    same = (a == b) | ((a != a) & (b != b))
    first = (a > b) | ((a != a) & (b == b)) | (same & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@jit
def first_argmax(a, i, b, j):
    """The same where `j` is later than `i`."""
    first = (b <= a) | (a != a)
    return tl.where(first, a, b), tl.where(first, i, j)


@jit
def first_argmin(a, i, b, j):
    first = (b >= a) | (a != a)
    return tl.where(first, a, b), tl.where(first, i, j)


@jit
def argmin(a, i, b, j):
    same = (a == b) | ((a != a) & (b != b))
    first = (a < b) | ((a != a) & (b == b)) | (same & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@jit
def having(top, values, places, none):
    """The places that have the extreme of their row; a NaN is the extreme where there is one."""
    return tl.where((values == top) | (values != values), places, none)


@jit
def welford(mean, m2, n, mean_b, m2_b, n_b):
    """Two sets' means, squared deviations and sizes as one's; an empty set changes nothing."""
    total = n + n_b
    share = tl.where(total == 0, 0.0, n_b / total)
    apart = mean_b - mean
    return mean + apart * share, m2 + m2_b + apart * apart * n * share, total


@jit
def several_more(mean, m2, values, n, axis: tl.constexpr):
    """The same of sets of `n` with several values more each, along `axis`."""
    count: tl.constexpr = values.shape[axis]
    middle = tl.reduce(values, axis, add) * (1.0 / count)
    away = values - tl.broadcast_to(tl.expand_dims(middle, axis), values.shape)
    share = 1.0 / (n + count) * count
    return moved(mean, m2, middle, tl.reduce(away * away, axis, add), n, share)


@jit
def several_inside(mean, m2, values, inside, n, axis: tl.constexpr):
    """The same where not all of them are `inside`; those that are not are zero."""
    count = tl.reduce(inside.to(values.dtype), axis, add)
    inverse = 1.0 / tl.maximum(count, 1.0)
    total = tl.reduce(values, axis, add)
    middle = total * tl.broadcast_to(inverse, total.shape)
    away = values - tl.broadcast_to(tl.expand_dims(middle, axis), values.shape)
    away = tl.where(inside, away, 0.0)
    share = count / tl.maximum(n + count, 1.0)
    return moved(mean, m2, middle, tl.reduce(away * away, axis, add), n, share)


@jit
def moved(mean, m2, mean_b, m2_b, n, share):
    """Sets of `n` joined with others, which are this share of both."""
    apart = mean_b - mean
    mean = tl.fma(apart, tl.broadcast_to(share, mean.shape), mean)
    return mean, m2 + tl.fma(apart * apart, tl.broadcast_to(n * share, mean.shape), m2_b)


@jit
def moments(mean, m2, n):
    """Rows of lanes' means, squared deviations and sizes as one's each: two sums, where lanes taken
    two by two would take a division each."""
    total = tl.reduce(n, 1, add)
    middle = tl.reduce(mean * (n * (1.0 / tl.maximum(one(total), 1.0))), 1, add)
    apart = mean - one(middle)
    return middle[:, None], tl.reduce(m2 + apart * apart * n, 1, add)[:, None], total[:, None]


@jit
def even_moments(mean, m2, n):
    """The same where all lanes have `n` values."""
    lanes: tl.constexpr = mean.shape[1]
    middle = tl.reduce(mean, 1, add, keep_dims=True) * (1.0 / lanes)
    apart = mean - middle
    total = tl.reduce(m2 + apart * apart * n, 1, add, keep_dims=True)
    return middle, total, n * lanes


@jit
def softmax(m, s, m_b, s_b):
    """Two sets' largest values and sums of exponentials relative to them."""
    top = maximum(m, m_b)
    # of two empty sets, or beyond a largest value that is infinite, nothing is left to scale
    here = tl.where(m == top, 1.0, exp(m - top))
    there = tl.where(m_b == top, 1.0, exp(m_b - top))
    return top, s * here + s_b * there


@jit
def relative(m, s, top):
    """Sums of exponentials relative to `m` as relative to `top`."""
    return s * tl.where(m == top, 1.0, libdevice.exp2((m - top) * 1.4426950408889634))


@jit
def online(m, s, v, axis: tl.constexpr):
    """The largest so far and the sum of exponentials relative to it, with several values more each,
    along `axis`: of eight, one exponential in nine goes into keeping up with the largest."""
    log2e: tl.constexpr = 1.4426950408889634
    top = maximum(m, tl.reduce(v, axis, maximum))
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    # subtracted first: of equal values of any size nothing is left to round
    away = (v - tl.broadcast_to(tl.expand_dims(base, axis), v.shape)) * log2e
    return top, s * libdevice.exp2((m - base) * log2e) + tl.reduce(libdevice.exp2(away), axis, add)


@jit
def one(values):
    """A number for each row as a column of them; of one row the number itself, which meets any tile
    as it is laid out."""
    if values.shape[0] == 1:
        return tl.reduce(values, 0, add)
    else:
        return values[:, None]


@jit
def each(values, count: tl.constexpr):
    """Every value of a row so many times, one after the other."""
    x: tl.constexpr = values.shape[0]
    r: tl.constexpr = values.shape[1]
    wide = tl.broadcast_to(tl.expand_dims(values, 2), [x, r, count])
    return tl.reshape(wide, [x, r * count])


# ---- rows that several programs share


@jit
def ticket(counter, total):
    """A program's number, in the order they begin; the last leaves zero."""
    mine = tl.atomic_add(counter, 1, sem="relaxed")
    if mine == total - 1:
        tl.atomic_xchg(counter, 0, sem="relaxed")
    return mine


@jit
def part(counter, until):
    """Whether this is the last to go, which leaves zero."""
    last = tl.atomic_add(counter, 1, sem="acq_rel") == until - 1
    if last:
        tl.atomic_xchg(counter, 0, sem="relaxed")
    return last


@jit
def gone(counter, until):
    """The same where none waits for what others have stored."""
    if tl.atomic_add(counter, 1, sem="relaxed") == until - 1:
        tl.atomic_xchg(counter, 0, sem="relaxed")


@jit
def leave(workspace, cell, value):
    """One number of this program's, in eight bytes that no other writes."""
    place = (workspace + 2 * cell).to(tl.pointer_type(value.dtype), bitcast=True)
    tl.store(place + tl.full(value.shape, 0, tl.int32), value)


@jit
def gather(workspace, cell, kind: tl.constexpr, none, count, lanes: tl.constexpr):
    """What `count` programs have left from a cell on, past the caches of one processor."""
    lane = tl.arange(0, lanes)
    place = (workspace + 2 * cell).to(tl.pointer_type(kind), bitcast=True)
    step: tl.constexpr = 64 // kind.primitive_bitwidth
    return tl.load(place + lane * step, lane < count, other=none, cache_modifier=".cg")


# ---- running folds


@jit
def later_max(a, i, b, j):
    """The largest so far and its last place; a NaN stays."""
    take = (b >= a) | (b != b)
    return tl.where(take, b, a), tl.where(take, j, i)


@jit
def later_min(a, i, b, j):
    take = (b <= a) | (b != b)
    return tl.where(take, b, a), tl.where(take, j, i)


@jit
def later_of_max(a, b):
    """The largest so far, which of two zeros is the later one; a NaN stays."""
    return tl.where((b >= a) | (b != b), b, a)


@jit
def later_of_min(a, b):
    return tl.where((b <= a) | (b != b), b, a)


@jit
def last_max(a, i, b, j):
    """The same of sets in any order."""
    take = (b > a) | ((b != b) & (a == a)) | (((b == a) | ((b != b) & (a != a))) & (j > i))
    return tl.where(take, b, a), tl.where(take, j, i)


@jit
def last_min(a, i, b, j):
    take = (b < a) | ((b != b) & (a == a)) | (((b == a) | ((b != b) & (a != a))) & (j > i))
    return tl.where(take, b, a), tl.where(take, j, i)


# ---- elementary functions


@jit
def exp(x):
    return libdevice.exp(x)


# In kernels whose results are all of sixteen bits or less, an error of a millionth does not show.


@jit
def fast_exp(x):
    return libdevice.exp2(x * 1.4426950408889634)


@jit
def fast_sigmoid(x):
    power = libdevice.exp2(x * -1.4426950408889634)
    return libdevice.fast_dividef(tl.full(x.shape, 1.0, x.dtype), 1.0 + power)


@jit
def horner(p, z, c: tl.constexpr):
    """`p * z + c`, rounded once: kernels are compiled without joining products and sums."""
    return tl.fma(p, z, tl.full(z.shape, c, z.dtype))


@jit
def fast_tanh(x):
    """Near zero, where one less something would have few bits, by a fit of our own."""
    z = x * x
    p = horner(tl.full(z.shape, 0.12841613590717316, z.dtype), z, -0.33321908116340637)
    return tl.where(tl.abs(x) < 0.25, x * horner(p, z, 0.9999995827674866), tanh_beside_one(x))


@jit
def tanh_beside_one(x):
    """Where one is added to it."""
    e = libdevice.exp2(x * 2.8853900817779268)
    part = libdevice.fast_dividef(tl.full(x.shape, 1.0, x.dtype), e + 1.0)
    return horner(part, tl.full(x.shape, -2.0, x.dtype), 1.0)


@jit
def fast_erf(x):
    """A rational fit of our own on [-3.92, 3.92], off by 8e-7 at most."""
    c = maximum(minimum(x, tl.full(x.shape, 3.92, x.dtype)), tl.full(x.shape, -3.92, x.dtype))
    z = c * c
    p = horner(tl.full(z.shape, -1.680571585893631e-06, z.dtype), z, 0.00029988359892740846)
    p = horner(p, z, 0.011873009614646435)
    p = horner(p, z, 0.07763772457838058)
    p = horner(p, z, 0.4023369550704956)
    p = horner(p, z, 1.128378987312317)
    q = horner(tl.full(z.shape, 0.002806158736348152, z.dtype), z, 0.03149774298071861)
    q = horner(q, z, 0.19882404804229736)
    q = horner(q, z, 0.6898851990699768)
    return libdevice.fast_dividef(c * p, horner(q, z, 1.0))


@jit
def erf_beside_one(x):
    """Where one is added to it: 1 - 2**-p(|x|) with a fit of our own, off by 3e-7 at most, which is
    much of a small result."""
    t = minimum(tl.abs(x), tl.full(x.shape, 3.92, x.dtype))
    p = horner(tl.full(t.shape, -0.0001420290645910427, t.dtype), t, 0.003664218820631504)
    p = horner(p, t, -0.03089609369635582)
    p = horner(p, t, 0.1496993750333786)
    p = horner(p, t, 0.9181655049324036)
    p = horner(p, t, 1.6279250383377075)
    return libdevice.copysign(1.0 - libdevice.exp2(-(p * t)), x)


@jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@jit
def div(a, b):
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@jit
def sqrt(x):
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@jit
def signbit(x):
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x.to(tl.int32, bitcast=True) < 0


# ---- division


@jit
def mod(a, b):
    """The remainder with the divisor's sign."""
    r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((b < 0) != (r < 0)), r + b, r)


@jit
def floordiv(a, b):
    """As torch: from the exact remainder, so that (a // b) * b + a % b stays near a."""
    r = libdevice.fmod(a, b)
    q = div(a - r, b)
    q = tl.where((r != 0) & ((b < 0) != (r < 0)), q - 1.0, q)
    f = tl.floor(q)
    f = tl.where(q - f > 0.5, f + 1.0, f)
    exact = div(a, b)
    f = tl.where(q == 0, libdevice.copysign(f * 0.0, exact), f)
    return tl.where(b == 0, exact, f)


@jit
def int_truncdiv(a, b):
    """Nothing traps: dividing by zero gives zero."""
    d = tl.where(b == 0, 1, b).to(a.dtype)
    return tl.where(b == 0, 0, a // d).to(a.dtype)


@jit
def int_fmod(a, b):
    d = tl.where(b == 0, 1, b).to(a.dtype)
    return (a % d).to(a.dtype)


@jit
def int_mod(a, b):
    r = int_fmod(a, b)
    return tl.where((r != 0) & ((b < 0) != (r < 0)), r + b, r).to(a.dtype)


@jit
def int_floordiv(a, b):
    d = tl.where(b == 0, 1, b).to(a.dtype)
    q = (a // d).to(a.dtype)
    r = (a % d).to(a.dtype)
    q = tl.where((r != 0) & ((d < 0) != (r < 0)), q - 1, q)
    return tl.where(b == 0, 0, q).to(a.dtype)


# ---- integers


@jit
def any_of(condition):
    """Whether it holds anywhere in the tile: a scalar, to loop on."""
    return tl.reduce(condition.to(tl.int32), None, either) != 0


@jit
def int_pow(a, b):
    """By squaring, wrapping. Of negative powers only those of 1 and -1 are whole."""
    a, b = tl.broadcast(a, b)
    odd = (b & 1) != 0
    one = tl.full(a.shape, 1, a.dtype)
    minus = (a + 1) == 0
    reciprocal = tl.where(minus, tl.where(odd, a, one), tl.where(a == 1, one, one - one))
    negative = b < 0
    e = tl.where(negative, 0, b).to(a.dtype)
    result = one
    base = a
    while any_of(e != 0):
        result = tl.where((e & 1) != 0, result * base, result).to(a.dtype)
        base = (base * base).to(a.dtype)
        e = (e >> 1).to(a.dtype)
    return tl.where(negative, reciprocal, result).to(a.dtype)


@jit
def gcd(a, b):
    """Euclid's; never negative, and zero only of two zeros."""
    a, b = tl.broadcast(tl.abs(a), tl.abs(b))
    a = a.to(b.dtype)
    while any_of(b != 0):
        d = tl.where(b == 0, 1, b).to(a.dtype)
        r = tl.where(b == 0, 0, a % d).to(a.dtype)
        a = tl.where(b == 0, a, b).to(a.dtype)
        b = r
    return a


@jit
def shl(a, b):
    """Shifted by its width or more, nothing is left."""
    bits: tl.constexpr = a.dtype.primitive_bitwidth
    outside = (b < 0) | (b >= bits)
    return tl.where(outside, 0, a << tl.where(outside, 0, b).to(a.dtype)).to(a.dtype)


@jit
def shr(a, b):
    """Shifted by its width or more, only the sign is left."""
    bits: tl.constexpr = a.dtype.primitive_bitwidth
    outside = (b < 0) | (b >= bits)
    gone = tl.where(a < 0, -1, 0).to(a.dtype)
    return tl.where(outside, gone, a >> tl.where(outside, 0, b).to(a.dtype)).to(a.dtype)


# ---- indices


@jit
def index_floordiv(a, b):
    """Floored, where the dividend may be negative."""
    q = a // b
    return tl.where(q * b > a, q - 1, q)


@jit
def index_mod(a, b):
    r = a % b
    return tl.where(r < 0, r + b, r)


@jit
def wrapped(first, n, block: tl.constexpr):
    """Numbers from `first` on, a multiple of eight, modulo `n`, which is more: by one division for
    eight of them (H200: bias and gelu of 22666x6487 bfloat16 156 us, 172 us by one each)."""
    first = first + tl.arange(0, block // 8) * 8
    if first.dtype == tl.int32:  # nothing to do for a sign
        first = (first.to(tl.uint32) % n).to(tl.int32)
    else:
        first = first % n
    place = first[:, None] + tl.arange(0, 8)[None, :]
    return tl.reshape(tl.where(place < n, place, place - n), [block])


@jit
def report(err, bad, code: tl.constexpr):
    """Set the error flag where a position is bad."""
    at = err + tl.where(bad, 0, 0)
    tl.atomic_or(at, code, mask=bad, sem="relaxed")


# ---- random numbers: Philox4x32-10, the same as the C++ and the torch one. A place of the stream
# is a number of 32 bits, four to a counter; what needs 64 bits has two to a counter. `..._block`
# computes all numbers of each counter, as new dimensions of two that come last.


@jit
def philox(seed, counter):
    """The four words of a counter, as uint32."""
    k0 = seed.to(tl.uint32)
    k1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    a = counter.to(tl.uint32)
    b = (counter.to(tl.uint64) >> 32).to(tl.uint32)
    c = a ^ a
    d = a ^ a
    for _ in tl.static_range(10):
        low_a, high_a = product(a, 0xD2511F53)
        low_c, high_c = product(c, 0xCD9E8D57)
        a = high_c ^ b ^ k0
        b = low_c
        c = high_a ^ d ^ k1
        d = low_a
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return a, b, c, d


@jit
def uniform(word):
    """On [0, 1): 24 random bits."""
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@jit
def uniform64(a, b):
    """On [0, 1): 53 random bits."""
    high = (a >> 5).to(tl.int64).to(tl.float64) * 67108864.0
    return (high + (b >> 6).to(tl.int64).to(tl.float64)) * 1.1102230246251565e-16


@jit
def normal(a, b, turn):
    """Standard normal, by Box and Muller: two of them are a quarter `turn` apart."""
    u = tl.fma((a >> 1).to(tl.int32).to(tl.float32), 4.656612873077393e-10, 2.3283064365386963e-10)
    angle = (b >> 8).to(tl.int32).to(tl.float32) * 3.7450704e-07
    return tl.sqrt(-2.0 * libdevice.log(u)) * libdevice.cos(angle - turn)


@jit
def between(a, b, low, high):
    """Uniform in [low, high): the high half of a 64 by 64 bit product."""
    word: tl.constexpr = 0xFFFFFFFF
    r0 = a.to(tl.uint64)
    r1 = b.to(tl.uint64)
    span = high.to(tl.uint64) - low.to(tl.uint64)
    g0 = span & word
    g1 = span >> 32
    middle = r1 * g0 + ((r0 * g0) >> 32)
    rest = r0 * g1 + (middle & word)
    top = r1 * g1 + (middle >> 32) + (rest >> 32)
    return (low.to(tl.uint64) + top).to(tl.int64)


@jit
def pair(seed, place):
    """The words of a place that has two."""
    a, b, c, d = philox(seed, place >> 1)
    odd = (place & 1) == 1
    return tl.where(odd, c, a), tl.where(odd, d, b)


@jit
def rand(seed, place):
    a, b, c, d = philox(seed, place >> 2)
    odd = (place & 1) == 1
    return uniform(tl.where((place & 2) == 2, tl.where(odd, d, c), tl.where(odd, b, a)))


@jit
def rand_block(seed, counter):
    a, b, c, d = philox(seed, counter)
    return tl.join(tl.join(uniform(a), uniform(c)), tl.join(uniform(b), uniform(d)))


@jit
def below_block(seed, counter, limit: tl.constexpr):
    """Which uniform numbers are below `limit` of 2**32, without making the numbers."""
    a, b, c, d = philox(seed, counter)
    return tl.join(tl.join(a < limit, c < limit), tl.join(b < limit, d < limit))


@jit
def randn(seed, place):
    a, b = pair(seed, place >> 1)
    return normal(a, b, (place & 1).to(tl.float32) * 1.5707964)


@jit
def randn_block(seed, counter):
    a, b, c, d = philox(seed, counter)
    even = tl.join(normal(a, b, 0.0), normal(c, d, 0.0))
    return tl.join(even, tl.join(normal(a, b, 1.5707964), normal(c, d, 1.5707964)))


@jit
def rand64(seed, place):
    a, b = pair(seed, place)
    return uniform64(a, b)


@jit
def rand64_block(seed, counter):
    a, b, c, d = philox(seed, counter)
    return tl.join(uniform64(a, b), uniform64(c, d))


@jit
def randint(seed, place, low, high):
    a, b = pair(seed, place)
    return between(a, b, low, high)


@jit
def randint_block(seed, counter, low, high):
    a, b, c, d = philox(seed, counter)
    return tl.join(between(a, b, low, high), between(c, d, low, high))


# ---- combining with memory, where the hardware has no instruction for it


@jit
def widened(x):
    if x.dtype == tl.float16 or x.dtype == tl.bfloat16:
        return x.to(tl.float32)
    else:
        return x


@jit
def combined(old, new, mode: tl.constexpr):
    """Small floats are combined as float and rounded when stored."""
    if mode == "add_bool" or mode == "max_bool":
        return old | new
    elif mode == "mul_bool" or mode == "min_bool":
        return old & new
    else:
        a = widened(old)
        b = widened(new)
        if mode == "add":
            r = a + b
        elif mode == "mul":
            r = a * b
        elif mode == "min":
            r = minimum(a, b)
        else:
            r = maximum(a, b)
        return r.to(old.dtype)


@jit
def exchange_words(p, place, value, held, mode: tl.constexpr):
    """`p[place] = combined(p[place], value)` where `held`, for elements of 2, 4 or 8 bytes."""
    bits: tl.constexpr = value.dtype.primitive_bitwidth
    kind: tl.constexpr = tl.int64 if bits == 64 else (tl.int32 if bits == 32 else tl.int16)
    at = p + tl.where(held, place, 0)
    words = at.to(tl.pointer_type(kind), bitcast=True)
    seen = tl.load(at, held, other=0).to(kind, bitcast=True)
    waiting = held
    while any_of(waiting):
        old = seen.to(value.dtype, bitcast=True)
        new = combined(old, value, mode).to(kind, bitcast=True)
        # who is done, or has nothing to do, exchanges what is there with itself
        found = tl.atomic_cas(words, seen, tl.where(waiting, new, seen), sem="relaxed")
        waiting = waiting & (found != seen)
        seen = found


@jit
def exchange_bytes(p, place, value, held, mode: tl.constexpr):
    """The same for single bytes, each inside its aligned word."""
    at = (p + tl.where(held, place, 0)).to(tl.int64)
    shift = ((at & 3) * 8).to(tl.int32)
    words = (at & -4).to(tl.pointer_type(tl.int32))
    seen = tl.load(words, held, other=0)
    waiting = held
    while any_of(waiting):
        byte = (seen >> shift) & 0xFF
        if value.dtype == tl.int1:
            old = byte != 0
        else:
            old = byte.to(value.dtype)
        new = combined(old, value, mode).to(tl.int32) & 0xFF
        word = (seen & ~(0xFF << shift)) | (new << shift)
        found = tl.atomic_cas(words, seen, tl.where(waiting, word, seen), sem="relaxed")
        waiting = waiting & (found != seen)
        seen = found
