"""Block sizes, warps and stages of kernels whose memory runs across what they reduce or scan."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewright import rules
from tilewright.codegen.triton.analysis.accesses import given_along, read_along, sizes
from tilewright.codegen.triton.analysis.operations import PLACES
from tilewright.codegen.triton.plan.config import MOST_WARPS, Config, below, clamp, power, round_of
from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.codegen.triton.tile.interleaved import is_even
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, rewrite
from tilewright.ir.program import Program
from tilewright.target import Target

STEP = "XSTEP"  # columns of a program that has more lanes


def of_columns(shape: Shape, vector: int, target: Target) -> Iterable[Config]:
    """Whole columns. Short ones that are only reduced, each by one thread (H200: 26 rows of
    1369912 bfloat16 20 us, 106 us by several, eager 26 us), which has as many as it loads at
    once (24 rows of 20000x100 bfloat16 27 us by four, 32 us by eight; of 20000x101 31 us by one,
    33 us; 32 rows of 9566x69 floats 23.3 us by one, 23.9 us by four)."""
    x = shape.parallel[0]
    rows = [(a.block, power(a.size or 1)) for a in shape.inner]
    longest = max(size for _, size in rows)
    walks = [segment for segment, axis in shape.segments if axis is not None]
    folded = len(walks) == 1 and all(m.reduce for m in walks[0].members)
    wide = 32 * vector
    piece = shape.pieces(x) if gathers(shape) else 0
    if 32 <= piece < 2 * wide:  # so what is gathered is the same for all of a program
        yield Config(((x.block, piece), *rows), piece // 32)
        return
    if folded and longest <= rules.COLUMN_OF_THREAD.limit and x.likely >= 4 * wide * target.sms:
        yield Config(((x.block, 2 * wide), *rows), 2 * vector // _beside(shape, vector))
    block, warps = _held_columns(shape, longest, folded, vector, target)
    yield Config(((x.block, block), *rows), warps)
    room = clamp(rules.TILE_COLUMNS.limit, power(x.likely / max(target.sms, 1)), 128)
    for tile, share in ((8192, 16), (4096, 16), (16384, 32), (32768, 32)):
        block = min(clamp(rules.TILE_COLUMNS.limit, tile // longest, room), power(x.likely))
        warps = clamp(1, power(longest * block / (32 * share)), MOST_WARPS)
        yield Config(((x.block, block), *rows), warps)


def gathers(shape: Shape) -> bool:
    """Whether where something is read is read."""
    return "index" in shape.ops


def pieces_of(dtype: torch.dtype) -> int:
    """The elements of sixteen bytes."""
    return 16 // dtype.itemsize


def of_slid_columns(shape: Shape) -> Iterable[Config]:
    """A thread has eight loads of the next round in flight while it adds eight up (H200: average
    over 0 of 109x481x793 bfloat16 26.7 us, 44 us with half as many of twice the threads)."""
    x, r = shape.parallel[0], shape.inner[0]
    if shape.persistent:
        lanes, count = power(shape.staged), power(r.size or 1)
        warps = max(lanes * count // (32 * 64), 2)
        yield Config(((x.block, lanes), (r.block, count)), warps)
        return
    if shape.scans:
        lanes = power(shape.staged)
        for elements in (4096, 2048):
            count = max(8, elements // lanes)
            yield Config(((x.block, lanes), (r.block, count)), min(lanes // 32, 8))
        return
    rows = max(pieces_of(n.dtype) for n in shape.loads)
    blocks = (
        (x.block, rules.SHIFTED_LANES.limit),
        (STEP, rules.SHIFTED_LANES.limit - rows),
        (r.block, rows),
    )
    yield Config(blocks, 2)


def _held_columns(shape: Shape, longest: int, folded: bool, vector: int, target: Target
                  ) -> tuple[int, int]:  # fmt: skip
    """How many columns, by how many warps: 128 bytes of a row, twice that where rows begin between
    lines, less of long columns. Where sixteen bytes are loaded at once few threads with many rows
    each, for those that share columns do so by shared memory (H200: softmax over 1 of 762x128x512
    bfloat16 52 us with four warps, 74 us with eight, 134 us with sixteen; of 1502x64x520 54 us by
    128 columns, 67 us by 64); more threads where less is (of 758x128x515 65 us with eight, 88 us
    with four of 64 columns; of 189x512x515 78 us with sixteen of 32, 97 us with eight)."""
    x, line = shape.parallel[0], 8 * vector
    side, size = _beside(shape, line), max(a.size or 1 for a in shape.inner)
    given = below(max(1, len(given_along(shape))))
    wide = line if side == line else 4 * line if side < vector and longest <= 32 else 2 * line
    room = clamp(rules.TILE_COLUMNS.limit, power(x.likely / max(target.sms, 1)), wide)
    tile = 256 * line // (given if side < vector else 1)
    block = min(clamp(rules.TILE_COLUMNS.limit, tile // longest, room), power(x.likely))
    share = line // given
    warps, least = power(longest * block / (32 * share)), power(longest * block / (64 * share))
    if side >= vector:
        most = 1 if folded else below(max(1, size // 24))
    elif 2 * side >= vector:
        warps, most = 2 * warps, max(4, 8 * line // block)
    else:
        warps, most = 4 * warps, max(8, 16 * line // block)
    return block, min(max(least, min(warps, most, 16)), MOST_WARPS)


def _beside(shape: Shape, most: int) -> int:
    """How many columns lie side by side in all rows, counted from where memory is even."""
    flat = shape.flat()
    x, inner = flat.parallel[0], {a.var for a in flat.inner}
    indices = [n.src[0] for n in flat.loads]
    indices += [s.index for s in flat.stores]
    tiles = [i for i in indices if inner & free_vars(i) and _differs(i, x.var, most)]
    while most > 1 and not all(is_even(i, x, most) for i in tiles):
        most //= 2
    return most


def _differs(index: Expr, column: Expr, most: int) -> bool:
    """Whether columns side by side are at different places, and not all at that of their piece, as
    weights are (H200: 16 weighted parts of 131072x128 floats 260 us, 369 us a column each)."""

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        whole = node.op == "ifloordiv" and src[0] is column
        return ix.ZERO if whole and (ix.value_of(src[1]) or 1) % most == 0 else None

    return column in free_vars(rewrite(index, rule))


def at_once(program: Program, shape: Shape) -> int:
    """Neighbouring columns that a thread loads and stores at once."""
    flat = shape.flat()
    x = flat.parallel[0]
    places = {n.src[0] for n in flat.loads}
    places |= {s.index for s in flat.stores}
    found = 16 // min(16, *sizes(program, flat))
    while found > 1 and not all(is_even(i, x, found) for i in places if x.var in free_vars(i)):
        found //= 2
    return found


def carried(shape: Shape) -> int:
    """Bytes of what a scan carries from one element to the next."""
    return max(sum(s.dtype.itemsize for s in n.src) << (n.arg.kind == "logsumexp")
               for n in shape.nodes if n.op == "scan")  # fmt: skip


def rows_of_thread(shape: Shape, neighbours: int) -> int:
    """Rows of columns that a thread has at once, if it has so many neighbours of each: those of
    sixteen bits are kept as such until they are added."""
    share = 256 if neighbours == 1 or carried(shape) == 8 else 512 if neighbours < 8 else 1024
    most = below(clamp(4, share // (neighbours * carried(shape)), 64))
    return round_of(shape.inner[0], min(most, 32) if shape.prefetched_scan else most, 8)


def of_scanned_columns(program: Program, shape: Shape) -> Iterable[Config]:
    """A thread has as many neighbours as it loads at once, and several rows under way. What threads
    share of a column they hand on through shared memory (H200: cumulative sums of 64 rows of
    34538x72 bfloat16 177 us by 32 rows, 195 us by 16, 401 us so; of 128 rows of 4425x128 float16
    77 us, 118 us so; of 2200x128 floats 76 us by 32 rows, 79 us by 16). By single elements more
    warps and rows (64 rows of 34538x71 bfloat16 212 us, 260 us by 32 of two warps, 284 us)."""
    x, (r,) = shape.parallel[0], shape.inner
    neighbours = at_once(program, shape)
    warps, rows = 4 if neighbours == 1 else 1, rows_of_thread(shape, neighbours)
    yield Config(((x.block, 32 * warps * neighbours), (r.block, rows)), warps)
    yield Config(((x.block, 32 * neighbours), (r.block, max(rows // 2, 4))), 1)


def _steps_oddly(shape: Shape) -> bool:
    """Whether rows of numbers of four bytes are misaligned. They are not to be fetched ahead:
    Triton 3.6 lays single elements out in shared memory such that all of a row are in one bank
    (H200: sums of 2042 rows of 389 floats, what the backward pass of layer norm leaves, 49 us)."""
    flat = shape.flat()
    steps = [ix.coefficient(n.src[0], a.var) for n in flat.loads
             if n.dtype.itemsize == 4 for a in flat.inner]  # fmt: skip
    return any(step is not None and (ix.value_of(step) or 0) % 2 for step in steps)


def of_long_columns(shape: Shape, vector: int, target: Target) -> Iterable[Config]:
    """128 bytes of a row by 256 rows, the next ones under way (H200: sum of columns of
    16384x8192 bfloat16 62 us, 69 us in small blocks without); 128 rows of several buffers, if
    there are many (gradient of bias and gelu 208 us, 213 us by 256, 420 us in small blocks
    without). Of means and deviations a thread has sixteen rows, all of them in flight at once:
    few threads, for each has its part in joining them in the end (var of 256 rows of 512 columns
    67 us with two warps, 69 us with four, 101 us with eight; of 1024 rows of 131072 64 us and 72
    us). Programs that are too few to wait for each other's loads have the next ones under way
    (batch norm, channels last: 28 us, 71 us without). Where several programs are at work on an
    SM, all of them together have as much under way as one would (sum of 116864 rows of 1155
    bfloat16, split cyclically to 1155 programs: 66 us by 64 rows, 71 us by 128, 76 us by 256;
    argmax of 1024 rows of 54784 31 us by 32, 34 us by 64, 57 us by 256; bias and gelu backwards
    of 267421x512 219 us by 64, 234 us by 128, of 22666x6487, split cyclically to 6487 programs,
    241 us and 375 us); half as many of several buffers where nothing is stored (products of
    400x300x512 bfloat16 over 1 62 us by 32, 67 us by 64; but bias and gelu backwards 231 us by
    32). Of many short columns programs take turns anyway (sum over 1 of 1157x167x256 bfloat16 27
    us by 64 rows of two warps, 34 us ahead with four)."""
    x = shape.parallel[0]
    bx = 8 * vector
    while bx > rules.TILE_COLUMNS.limit and 4 * x.likely < 3 * bx * target.sms:
        bx //= 2
    # a running softmax wants rows of one thread, arithmetic of much else wants threads
    exponentials = "exp" in shape.ops
    loaded = read_along(shape)
    count = max(len(loaded), 1)  # what is computed of its place alone loads nothing
    share = 32 if len(loaded) == 1 or (exponentials and len(shape.segments) > 1) else 16
    choices = [(bx, 256, share, 3), (bx, 128, share, 3), (bx, 64, 8, 3), (bx, 256, share, 1),
               (bx, 128, 8, 1), (bx // 2, 256, 8, 1)]  # fmt: skip
    if share == 16 and all(a.likely > 256 for a in shape.inner):
        choices[:2] = choices[1::-1]
    if vector == 8 and shape.scans:
        choices.insert(0, (32, 128, 32, 3))  # 8192x8192 bfloat16 131 us, 240 us by 64 columns
    together = round(x.likely / (bx * max(target.sms, 1)))  # programs on an SM
    places = bool(shape.reductions & PLACES)
    stored = len(shape.segments) == 1 and any(not m.reduce for m in shape.members)
    if together > 1 and (stored or not exponentials) and choices[0][0] == bx:
        most, each = (128, 32) if places else (256, share)
        least = most // 8 if count > 1 and not stored else most // 4
        br = clamp(least, below(most // (below(together) * count)), most)
        if all(a.likely > 2 * br for a in shape.inner):
            choices.insert(0, (bx, br, each, 4 if br < 64 else 3))
    if "welford" in shape.reductions:
        choices = [(bx, 128, 16 * vector, 1), (bx, 64, 4 * vector, 4), (bx, 128, 8 * vector, 3),
                   (bx, 128, 8 * vector, 1)]  # fmt: skip
        if x.likely < 8 * bx * target.sms:
            choices[:2] = choices[1::-1]
    short = 512 if "welford" in shape.reductions else 256
    if together >= 8 and all(a.likely <= short for a in shape.inner) and not (
        places or exponentials or stored):  # fmt: skip
        choices.insert(0, (bx, 64, below(8 * vector // count), 1))
    elif together < 1 and not exponentials and _steps_oddly(shape):
        choices = [(bx, 512, 16, 1), (bx, 256, 16, 1), (bx, 128, 8, 1)]
    for columns, br, each, ahead in choices:
        rows = tuple((a.block, round_of(a, br, 64)) for a in shape.inner)
        longest = max(size for _, size in rows)
        block = min(columns, power(x.likely))
        warps = clamp(1, longest * block // (32 * each), MOST_WARPS)
        yield Config(((x.block, block), *rows), warps, ahead=ahead if shape.pipelined else 0)
