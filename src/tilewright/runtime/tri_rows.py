"""What generated Triton kernels call for rows: values that a whole row has, short rows that lie one
right after the other, and such as begin between two places of sixteen bytes."""

# Triton compiles these functions from their text; they have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton.language as tl

if __name__.endswith("interpreted"):
    from tilewright.runtime import interpret
    from tilewright.runtime.interpret import helpers
    from tilewright.runtime.interpret import plain as jit

    tri = helpers("tri")
    add, div, maximum, relative = tri.add, tri.div, tri.maximum, tri.relative

    def divided(a, k, b, r):
        return div(a * k, b)

    def divided_to_nearest(a, b, far, within):
        return interpret.nearest(div(a, b))

    quotient, share, mark, anew = divided, div, interpret.mark, interpret.anew
    nearest_quotient = divided_to_nearest
else:
    from tilewright.runtime.tri import add, jit, maximum, nearest, relative

    @jit
    def quotient(a, k, b, r):
        a = a * k
        q = a * r
        left = tl.fma(q, tl.broadcast_to(-b, q.shape), a)
        more = tl.fma(left, tl.broadcast_to(r, q.shape), q)
        # of zero nothing is left, and nothing to put right of what is infinite
        return tl.where((tl.abs(left) > 0) & (tl.abs(q) < float("inf")), more, q)

    @jit
    def share(a, b):
        """The same of what is neither negative nor more than `b`, which is one or more."""
        r = tl.div_rn(tl.full(b.shape, 1.0, tl.float32), b)
        q = a * r
        left = tl.fma(q, tl.broadcast_to(-b, q.shape), a)
        return tl.fma(left, tl.broadcast_to(r, q.shape), q)

    @jit
    def nearest_quotient(a, b, far: tl.constexpr, within: tl.constexpr):
        """Of floats with a divisor in common the nearest integers: what is no number is zero, and
        so is what nothing is left of. A divisor that is `far` from zero is taken as it is; `within`
        no quotient is infinite."""
        if far:
            c, r = b, tl.div_rn(tl.full(b.shape, 1.0, tl.float32), b)
        else:
            k, c, r = divisor(b)
            a = a * k
        q = a * r
        left = tl.fma(q, tl.broadcast_to(-c, q.shape), a)
        more = tl.fma(left, tl.broadcast_to(r, q.shape), q)
        return nearest(more if within else tl.where(tl.abs(q) < float("inf"), more, q))

    @jit
    def mark(after):
        """Zero, which a compiler does not know before it has `after`."""
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.u32 p, $1, 0x7fedcba9; selp.b32 $0, 1, 0, p; }",
            "=r,r", [after], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip

    @jit
    def anew(x, mark):
        """The same sixteen bits, which a compiler takes for others: it keeps nothing that it made
        of them before, such as floats of twice the width."""
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r,r",
            [x, tl.broadcast_to(mark, x.shape)], dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip


@jit
def div_by_shared(a, b):
    """Of floats with a divisor in common, rounded as a division: its reciprocal and what is left
    over by that. A division takes three times as long, and more for zeros, which masked elements
    are (H200: causal softmax of 205 floats 97 us, 142 us)."""
    k, c, r = divisor(b)
    return quotient(a, k, c, r)


@jit
def div_by_far(a, b):
    """The same by a number that is far from zero."""
    return quotient(a, 1.0, b, tl.div_rn(tl.full(b.shape, 1.0, tl.float32), b))


@jit
def by_shared(a, b):
    """The same where the last bit does not matter."""
    k, _, r = divisor(b)
    return a * k * r


@jit
def by_far(a, b):
    """The same by a number that is far from zero."""
    return a * tl.div_rn(tl.full(b.shape, 1.0, tl.float32), b)


@jit
def divisor(b):
    """A factor, the divisor times that, and the reciprocal of it, which is finite so."""
    k = tl.where(tl.abs(b) < 2.0**-64, 2.0**64, 1.0)
    b = b * k
    return k, b, tl.div_rn(tl.full(b.shape, 1.0, tl.float32), b)


@jit
def if_finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@jit
def softmax_with(m, s, w, m_b, s_b, w_b):
    """`tri.softmax`, and two sets' sums of the exponentials times something."""
    top = maximum(m, m_b)
    return (top, relative(m, s, top) + relative(m_b, s_b, top),
            relative(m, w, top) + relative(m_b, w_b, top))  # fmt: skip


@jit
def online_with(m, s, w, v, a, axis: tl.constexpr):
    """`tri.online`, and the sum of the exponentials times `a`."""
    log2e: tl.constexpr = 1.4426950408889634
    top = maximum(m, tl.reduce(v, axis, maximum))
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    powers = tl.exp2((v - tl.broadcast_to(tl.expand_dims(base, axis), v.shape)) * log2e)
    before = tl.exp2((m - base) * log2e)
    total = s * before + tl.reduce(powers, axis, add)
    return top, total, w * before + tl.reduce(powers * a, axis, add)


# ---- rows one right after the other


@jit
def turned(piece, length: tl.constexpr, count: tl.constexpr, block: tl.constexpr):
    """The rows of a piece of memory as columns of a block; neighbouring threads have 32 elements of
    one each, in turns."""
    tl.static_assert(count % 8 == 0)  # or pieces would reach into other programs' rows
    side: tl.constexpr = block // 32 if block > 32 else 1
    lane = tl.arange(0, count * block)
    column = lane // (count * side) * side + lane % side
    place = tl.where(column < length, lane // side % count * length + column, 0)
    found = tl.gather(tl.reshape(piece, [count * block]), place, 0)
    tile = tl.permute(tl.reshape(found, [block // side, count, side]), (0, 2, 1))
    return tl.reshape(tile, [block, count])


@jit
def of_rows(values, row, beyond):
    """Of all elements what their row has, of a piece that may reach into the next row."""
    count: tl.constexpr = values.shape[1]
    pieces: tl.constexpr = row.shape[0]
    row = tl.reshape(row, [pieces])
    rows = tl.minimum(tl.reshape(tl.join(row, row + 1), [2 * pieces]), count - 1)
    found = tl.gather(tl.reshape(values, [count]), rows, 0)
    this, other = tl.split(tl.reshape(found, [pieces, 2]))
    return tl.where(beyond, other[:, None], this[:, None])


@jit
def slid_back(tile, slide):
    """Columns in place that begin so far behind the first lane, in each row another number."""
    count: tl.constexpr = tile.shape[1]
    lane, row = tl.arange(0, tile.shape[0])[:, None], tl.arange(0, count)[None, :]
    spot = tl.minimum(lane + slide, tile.shape[0] - 1) * count + row
    # as one row, or threads would look for it among all that a warp has
    found = tl.gather(tl.reshape(tile, [tile.numel]), tl.reshape(spot, [tile.numel]), 0)
    return tl.reshape(found, tile.shape)


@jit
def stacked(piece, length: tl.constexpr, block: tl.constexpr, count: tl.constexpr):
    """So many rows of a piece of memory as rows of a tile: a thread has all of its columns."""
    row, column = tl.arange(0, count)[:, None], tl.arange(0, block)[None, :]
    place = tl.minimum(row * length + tl.minimum(column, length - 1), piece.numel - 1)
    found = tl.gather(piece, tl.reshape(place, [block * count]), 0)
    return tl.reshape(found, [count, block])


@jit
def matrix(piece, slide, length: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
           count: tl.constexpr):  # fmt: skip
    """The same of all rows there are, which begin so far behind the first lane."""
    row, column = tl.arange(0, count)[:, None], tl.arange(0, block)[None, :]
    place = tl.minimum(row, rows - 1) * length + tl.minimum(column, length - 1) + slide
    found = tl.gather(piece, tl.reshape(place, [block * count]), 0)
    return tl.reshape(found, [count, block])


@jit
def in_a_row(tile, flat, length: tl.constexpr):
    """Rows of a tile as a piece of memory again, that may begin before and end behind them."""
    place = tl.minimum(flat // length * tile.shape[1] + flat % length, tile.numel - 1)
    return tl.gather(tl.reshape(tile, [tile.numel]), tl.maximum(place, 0), 0)


# ---- rows loaded in whole pieces, and moved into place in registers

PIECE = 8  # elements of a piece


@jit
def _halves(x):
    """The first half of each piece and the second, where a piece is all dimensions but two."""
    if len(x.shape) == 5:
        halves = tl.permute(x, (0, 1, 3, 4, 2))
    elif len(x.shape) == 4:
        halves = tl.permute(x, (0, 1, 3, 2))
    else:
        halves = x
    return tl.split(halves)


@jit
def _as_pairs(x, X: tl.constexpr, R: tl.constexpr):
    low, high = tl.split(tl.reshape(x.to(tl.uint16, bitcast=True), [X, R // 8, 2, 2, 2]))
    return low.to(tl.uint32) | (high.to(tl.uint32) << 16)


@jit
def _slid_pairs(here, after, away, X: tl.constexpr, R: tl.constexpr):
    """Of elements of two bytes a piece is four pairs: only the last step takes them apart."""
    a, b = _halves(_as_pairs(here, X, R))
    c, d = _halves(_as_pairs(after, X, R))
    by = (away & 4)[:, :, None] != 0
    a, b, c = tl.where(by, b, a), tl.where(by, c, b), tl.where(by, d, c)
    p0, p1 = _halves(a)
    p2, p3 = _halves(b)
    p4, p5 = _halves(c)
    by = (away & 2) != 0
    p0, p1, p2 = tl.where(by, p1, p0), tl.where(by, p2, p1), tl.where(by, p3, p2)
    p3, p4 = tl.where(by, p4, p3), tl.where(by, p5, p4)
    by = (away & 1) != 0
    p0, p1 = tl.where(by, p0 >> 16 | p1 << 16, p0), tl.where(by, p1 >> 16 | p2 << 16, p1)
    p2, p3 = tl.where(by, p2 >> 16 | p3 << 16, p2), tl.where(by, p3 >> 16 | p4 << 16, p3)
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    found = tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16))
    return tl.reshape(found, [X, R]).to(here.dtype, bitcast=True)


@jit
def slid(p, start, lane, mask, X: tl.constexpr, R: tl.constexpr):
    """What is at `start + lane` of a row: lanes run in whole pieces of eight from a multiple of
    eight, `start` is any number. Two neighbouring pieces of memory have all of a piece of lanes;
    it is picked by halving, four elements further or not, then two, then one."""
    first = (start >> 3) * 8
    away = start - first
    parted = away != 0  # or there may be no memory behind the last piece
    if mask is None:
        here = tl.load(p + (first + lane))
        after = tl.load(p + (first + lane + 8), parted, other=0)
    else:
        here = tl.load(p + (first + lane), mask, other=0)
        after = tl.load(p + (first + lane + 8), mask & parted, other=0)
    if here.dtype.primitive_bitwidth == 16:
        return _slid_pairs(here, after, away, X, R)
    a, b = _halves(tl.reshape(here, [X, R // 8, 2, 2, 2]))
    c, d = _halves(tl.reshape(after, [X, R // 8, 2, 2, 2]))
    by = (away & 4)[:, :, None, None] != 0
    a, b, c = tl.where(by, b, a), tl.where(by, c, b), tl.where(by, d, c)
    p0, p1 = _halves(a)
    p2, p3 = _halves(b)
    p4, p5 = _halves(c)
    by = (away & 2)[:, :, None] != 0
    p0, p1, p2 = tl.where(by, p1, p0), tl.where(by, p2, p1), tl.where(by, p3, p2)
    p3, p4 = tl.where(by, p4, p3), tl.where(by, p5, p4)
    e0, e1 = _halves(p0)
    e2, e3 = _halves(p1)
    e4, e5 = _halves(p2)
    e6, e7 = _halves(p3)
    e8, _ = _halves(p4)
    by = (away & 1) != 0
    e0, e1, e2 = tl.where(by, e1, e0), tl.where(by, e2, e1), tl.where(by, e3, e2)
    e3, e4, e5 = tl.where(by, e4, e3), tl.where(by, e5, e4), tl.where(by, e6, e5)
    e6, e7 = tl.where(by, e7, e6), tl.where(by, e8, e7)
    even = tl.join(tl.join(e0, e4), tl.join(e2, e6))
    odd = tl.join(tl.join(e1, e5), tl.join(e3, e7))
    return tl.reshape(tl.join(even, odd), [X, R])


@jit
def slid_as_one(p, start, mask, R: tl.constexpr):
    """A piece of memory that begins anywhere."""
    start = tl.full([1, 1], 0, tl.int32) + start
    inside = None if mask is None else mask[None, :]
    found = slid(p, start, tl.arange(0, R)[None, :], inside, 1, R)
    return tl.reshape(found, [R])


@jit
def _firsts(x):
    """The first of each piece."""
    x, _ = _halves(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 2, 2, 2]))
    x, _ = _halves(x)
    x, _ = _halves(x)
    return x


@jit
def _joined(here, after, shift):
    """Eight bytes of two neighbouring words."""
    return (here >> shift) | ((after << 1) << (63 - shift))


@jit
def slid_words(p, start, lane, mask, X: tl.constexpr, R: tl.constexpr):
    """The same of elements of one or two bytes: words of eight bytes, one more than a piece has,
    have all of it wherever it begins."""
    kind: tl.constexpr = p.dtype.element_ty
    at = (p + (start + _firsts(lane))).to(tl.int64)
    words = (at & -8).to(tl.pointer_type(tl.uint64))
    shift = ((at & 7) * 8).to(tl.uint64)
    inside = shift == shift if mask is None else _firsts(tl.broadcast_to(mask, [X, R]))
    parted = inside & (shift != 0)
    here = tl.load(words, inside, other=0)
    if kind.primitive_bitwidth <= 8:
        both = _joined(here, tl.load(words + 1, parted, other=0), shift)
        each = both[:, :, None] >> (8 * tl.arange(0, 8)).to(tl.uint64)[None, None, :]
        bits = tl.reshape(each.to(tl.uint8), [X, R])
    else:
        after = tl.load(words + 1, inside, other=0)
        last = _joined(after, tl.load(words + 2, parted, other=0), shift)
        both = tl.join(_joined(here, after, shift), last)
        each = both[:, :, :, None] >> (16 * tl.arange(0, 4)).to(tl.uint64)[None, None, None, :]
        bits = tl.reshape(each.to(tl.uint16), [X, R])
    if kind == tl.int1:
        return bits != 0
    else:
        return bits.to(kind, bitcast=True)


# ---- pieces taken apart, and put together


@jit
def apart(piece):
    """The elements of pieces, each by itself."""
    if piece.shape[1] == 2:
        return tl.split(piece)
    elif piece.shape[1] == 4:
        even, odd = tl.split(tl.reshape(piece, [piece.shape[0], 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return a, b, c, d
    else:
        even, odd = tl.split(tl.reshape(piece, [piece.shape[0], 2, 2, 2]))
        a, c, e, g = _quarters(even)
        b, d, f, h = _quarters(odd)
        return a, b, c, d, e, f, g, h


@jit
def _quarters(x):
    even, odd = tl.split(x)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@jit
def two(a, b):
    return tl.join(a, b)


@jit
def four(a, b, c, d):
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], 4])


@jit
def eight(a, b, c, d, e, f, g, h):
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), [a.shape[0], 8])
