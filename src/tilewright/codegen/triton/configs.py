"""Block sizes, warps and stages: a first choice from a small model, and a few to measure.

The model wants sixteen bytes per thread and access, several of them in flight, and enough programs
to fill the card.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from tilewright.codegen.triton.doubles import is_even, pairs, step
from tilewright.codegen.triton.elements import dear_of_each, folds_many, has_long_code, is_dear
from tilewright.codegen.triton.shape import (
    LONGEST_PASS,
    MOST_KEPT,
    NARROWEST_TILE,
    Axis,
    Shape,
    accumulates,
    is_looked_up,
    is_narrow,
    is_one_walk,
)
from tilewright.ir import index as ix
from tilewright.ir.expr import free_vars, loads, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Program
from tilewright.schedule.sizes import hint_product
from tilewright.target import Target

LONGEST_OF_THREAD = 32  # rows of a column that a thread folds alone: so many loads are under way
LONGEST_OF_WARP = 1024  # elements of a row that one warp folds
MOST_WARPS = 32
LONG_ROW = 1 << 14  # elements of a row of which each program has a piece
LEAST_MOVED = 2560  # bytes of the rows of a program
STEP = "XSTEP"  # columns of a program that has more lanes
SLID_LANES = 512
MOST_READ = 160  # bytes that a thread has under way where nothing is folded


@dataclass(frozen=True)
class Config:
    """One way to run a kernel; `constants` are its constexpr arguments."""

    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int = 2
    ahead: int = 0  # rounds of a loop whose loads are under way, where it may run ahead
    held: int | None = None  # whether rows are held or walked, of a kernel that does either
    registers: int | None = None  # the most of a thread, where the compiler would take more

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        stages = (("STAGES", self.ahead),) if self.ahead else ()
        return (*self.blocks, *stages, *(() if self.held is None else (("HELD", self.held),)))

    @property
    def kwargs(self) -> dict[str, int]:
        return dict(self.constants)

    def covers(self, blocks: Iterable[str]) -> bool:
        """Whether a tile of these blocks has an element for every thread. Of a smaller one several
        threads load an element, and one of them stores it."""
        return math.prod(self.kwargs[b] for b in blocks) >= 32 * self.num_warps


def power(n: float) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, int(-(-n // 1)) - 1).bit_length()


def below(n: int) -> int:
    """The largest power of two that is not larger."""
    return power(n + 1) // 2


def clamp(low: int, n: int, high: int) -> int:
    return max(low, min(n, high))


def _vector(program: Program, shape: Shape) -> int:
    """Elements in sixteen bytes of the narrowest buffer the kernel walks."""
    return clamp(4, 16 // min(sizes(program, shape), default=4), 8)


def sizes(program: Program, shape: Shape) -> list[int]:
    """The sizes of all that the kernel reads and writes."""
    return [program.buffers[b].dtype.itemsize for m in shape.members for b in m.reads | m.writes]


def _floats(program: Program, shape: Shape) -> list[int]:
    """The sizes of the numbers that the kernel reads and writes, which are computed as no less than
    sixteen bits."""
    kinds = {program.buffers[b].dtype for m in shape.members for b in m.reads | m.writes}
    return [max(2, kind.itemsize) for kind in kinds if kind.is_floating_point]


def folds(shape: Shape, *kinds: str) -> bool:
    """Whether something of these kinds is folded."""
    return any(n.op == "reduce" and n.arg.kind in kinds
               for m in shape.members for n in walk(*m.exprs))  # fmt: skip


def is_heavy(shape: Shape) -> bool:
    """Whether a special function is among the operations: long code, so few elements a thread."""
    return any(n.op in TABLE and TABLE[n.op].cost >= 60 and n.dtype.is_floating_point
               for m in shape.members for n in walk(*m.exprs))  # fmt: skip


def _is_seldom(shape: Shape) -> bool:
    """Whether all that is stored is held back by a mask: most threads have nothing to do but to
    find that out, so they are few and have many elements each."""
    return all(s.mask is not None for m in shape.members for s in m.stores)


def configs(program: Program, shape: Shape, target: Target) -> tuple[Config, ...]:
    """Best first, each once."""
    vector = _vector(program, shape)
    heavy = is_heavy(shape)
    if shape.family == "poi" and shape.serial:  # how far its loops run depends on the one point
        found = [Config(((shape.parallel[0].block, 1),), 1)]
    elif shape.family == "poi":
        x = shape.parallel[0]
        if shape.looked_up:
            found = _row_pieces(shape, vector, target)
        else:
            many = 1 if heavy else _at_once(program, shape, vector)
            found = (_tiled(program, shape, target) if shape.rank > 1
                     else [*_looked_up(shape, target), *_flat(x, many, target)])  # fmt: skip
    elif shape.held:
        found = _held_rows(program, shape)
    elif shape.slid:
        found = _slid_columns(shape)
    elif shape.alone:
        found = _scanned_columns(program, shape)
    elif shape.walked:
        found = _walked_rows(program, shape, target)
    elif shape.shared:
        found = _shared_rows(shape, vector)
    elif not shape.persistent:
        found = _long_columns(shape, vector, target) if shape.across else _long_rows(shape, target)
    elif shape.serial:
        found = _rows_in_order(program, shape, target)
    else:
        found = _columns(shape, vector, target) if shape.across else _rows(program, shape, target)
    chosen = dict.fromkeys(found)
    if heavy:  # one element per thread where threads suffice
        chosen = dict.fromkeys(
            replace(c, num_warps=clamp(c.num_warps, power(_elements(c) / 32), MOST_WARPS))
            for c in sorted(chosen, key=_elements))  # fmt: skip
    return tuple(chosen)


def _elements(config: Config) -> int:
    return math.prod(size for _, size in config.blocks)


def _at_once(program: Program, shape: Shape, vector: int) -> int:
    """Elements of a thread at once. Neighbours that are some elements apart in memory belong to
    neighbouring threads, or each access of these has lines of its own (H200: largest of three by
    two of 146x1024x16x16 bfloat16 32 us by one element, 100 us by four)."""
    if _is_seldom(shape):
        return 4 * vector
    if shape.scattered:  # halves of rotary embeddings of 80 bfloat16: 44.9 us, 50.5 us by eight
        return 2
    flat = shape.flat()
    known, _ = pairs(flat, program.buffers, frozenset())
    axis = flat.parallel[-1]
    apart = {n.arg for m in flat.members for n in loads(*m.exprs)
             if n not in known and 2 <= step(n.src[0], axis) <= 8}  # fmt: skip
    large = max((hint_product(program.buffers[b].size) for b in apart), default=0)
    if 8 * large >= axis.likely:  # not for tables, which stay in cache
        return 1
    # of several wide tensors fewer, for their registers (H200: adamw of 4114805 floats 33.8 us,
    # 37.7 us by eight; of 11832117 88.0 us, 91.8 us)
    read = {n.arg: n.dtype.itemsize for m in flat.members for n in loads(*m.exprs)
            if ix.coefficient(n.src[0], axis.var) is ix.ONE}  # fmt: skip
    if 2 * vector * sum(read.values()) > MOST_READ:
        return 4
    # of many floats one access each (lion of 33554432 157.3 us, 159.8 us; adam 222.4 us, 223.9 us;
    # sums of two 93.2 us, 93.6 us)
    written = {b for m in flat.members for b in m.writes}
    if len({*read, *written}) >= 5 and all(size >= 4 for size in sizes(program, flat)):
        return vector // 2
    if any(first not in known for first in known.values()):  # those between pairs
        return 4  # largest of 12288 planes of 64x64 bfloat16 32 us, 34 us by two
    halved = not known or _divides(flat)
    return vector // 2 if halved and _is_mixed(program, flat, vector) else vector


def _divides(flat: Shape) -> bool:
    """Whether where an element is in its row takes more than a mask: pairs are halved for that
    (H200: rotations of heads of 96 53 us, 56 us; of 80 103 us, 105 us; but of 64 109 us, 106 us, of
    128 90 us, 86 us)."""
    x = flat.parallel[-1].var
    places = (n for m in flat.members for e in loads(*m.exprs) for n in walk(e.src[0]))
    sizes = {ix.value_of(n.src[1]) or 1 for n in places if n.op == "imod" and n.src[0] is x}
    return any(size & (size - 1) for size in sizes)


def _is_mixed(program: Program, flat: Shape, vector: int) -> bool:
    """Whether some of what is moved is so wide that a thread's elements of it are several accesses
    already, none so narrow that they are part of one, and little is computed: half as many of all
    then (H200: halves of rotary embeddings of 64 bfloat16 56 us, 61 us; a step of momentum of
    31812712 numbers 155 us, 157 us; 69009408 float16 to float32 102 us, 105 us; but gelu 134 us,
    129 us)."""
    if _computes(flat):
        return False
    nodes = [n for m in flat.members for n in walk(*m.exprs)]
    moved = {n.arg for n in nodes if n.op == "load" and free_vars(n.src[0])}
    moved |= {b for m in flat.members for b in m.writes}
    bytes_ = {vector * program.buffers[b].dtype.itemsize for b in moved}
    return max(bytes_, default=0) > 16 <= min(bytes_)


def _computes(shape: Shape) -> bool:
    """Whether more than a few instructions are made of an element."""
    return any(n.op in TABLE and TABLE[n.op].cost >= 20
               for m in shape.members for n in walk(*m.exprs))  # fmt: skip


def _flat(axis: Axis, vector: int, target: Target) -> Iterable[Config]:
    """Two accesses of sixteen bytes per thread (H200: bias and gelu of 16384x8192 bfloat16 128 us,
    135 us with one); smaller blocks where a few programs would do all the work."""
    room = power(axis.likely / (2 * max(target.sms, 1)))
    block = clamp(32 * vector, room, 256 * vector)
    block = min(block, max(32, power(axis.likely)))
    for size, share in ((block, 64), (block // 2, 64), (block, 32), (2 * block, 64)):
        if size >= 32:
            yield Config(((axis.block, size),), clamp(1, size // (share * vector), 8))


def _looked_up(shape: Shape, target: Target) -> Iterable[Config]:
    """Large blocks where each element is looked up in a row: more of what a program has read of it
    is read again while it is in cache (H200: gather of 1931 rows of 10600 float16 70 us, 81 us by
    2048; of 1000 rows of 16384 floats 80 us, 113 us by 1024)."""
    (x,) = shape.parallel
    if x.likely >= 8192 * target.sms and any(
        free_vars(i) for m in shape.members for n in loads(*m.exprs)
        for i in walk(n.src[0]) if i.op == "index"):  # fmt: skip
        yield Config(((x.block, 4096),), 16)


def _tiled(program: Program, shape: Shape, target: Target) -> Iterable[Config]:
    """Square tiles, as far as the loops are long enough; large ones where memory is all there is
    to wait for (H200: 8191x8191 bfloat16 transposed 87 us, 122 us in tiles of 64 by 64; 512x400x640
    turned around 138 us, 150 us; 8191x8191 float32 155 us, 187 us). Small ones where what is loaded
    at once cannot be stored so (559x363x1024 bfloat16 turned 228 us, 315 us). A second tile that
    would be almost empty is part of the first (rows of 134: 178 us, 205 us)."""
    *rest, y, x = shape.parallel
    fixed = tuple((a.block, clamp(1, power(a.likely), 8)) for a in rest)
    choices = [(64, 64, 8), (32, 64, 4), (64, 32, 4), (32, 32, 4), (128, 32, 8), (8, 128, 4)]
    read = {n.arg for m in shape.members for n in loads(*m.exprs)}
    widest = max((program.buffers[b].dtype.itemsize for m in shape.members
                  for b in m.reads | m.writes), default=4)  # fmt: skip
    large = (128, 128, 8) if widest <= 2 else (64, 128, 16)
    tiles = y.likely * x.likely // (large[0] * large[1])
    if not rest and len(read) <= 2 and widest <= 4 and tiles >= 4 * target.sms:
        choices.insert(0, large)
        if widest <= 2 and _is_stored_apart(shape):
            choices.insert(0, (32, 128, 4))
        elif widest <= 2 and is_narrow(shape):
            choices.insert(0, (64, 256, 8))
    for across, along, warps in choices:
        if along < x.likely < along + along // 2:
            across, along, warps = across // 2, 2 * along, 2 * warps
        by = min(across, power(y.likely))
        bx = min(along * (across // by), power(x.likely))
        by = min(by * clamp(1, along // bx, 2), power(y.likely))
        yield Config((*fixed, (y.block, by), (x.block, bx)), clamp(1, by * bx // 256, warps))


def _is_stored_apart(shape: Shape) -> bool:
    """Whether all loads of a tile are of sixteen bytes, and no store is."""
    flat = shape.flat()
    y, x = flat.parallel
    read = [n.src[0] for m in flat.members for n in loads(*m.exprs)]
    written = [s.index for m in flat.members for s in m.stores]
    return all(is_even(i, x, 8) or is_even(i, y, 8) for i in read) and not any(
        is_even(i, x, 8) for i in written)  # fmt: skip


def _row_pieces(shape: Shape, vector: int, target: Target) -> Iterable[Config]:
    """Short pieces of many rows (H200: 65536 rows of 2048 bfloat16 124 us with 64 pieces of 128,
    133 us with one of 1024); blocks that divide a row need no mask. With no more registers than let
    all threads run (gradient of cross entropy of 8192x32000 bfloat16 255 us with 32, 277 us with
    34; of 50257 420 us, 444 us with 40). Where each row looks up many, one at a time (gathered
    gradients of 2048 bfloat16 132 us, 200 us in short pieces). Where rows are looked up, few of
    them: what a program waits for first is not to hold up much (2358 rows of 5159 bfloat16 15.1 us
    by two, 19.5 us by sixteen; 14367 of 743 14.6 us, 18.5 us; 2227 of 4040 floats 19.7 us, 20.3 us;
    65536 of 2048 bfloat16 125 us either way)."""
    y, x = shape.parallel
    size = x.size or x.likely
    even = size & -size
    if has_long_code(shape):
        bx = min(even if even >= 16 * vector else power(size), 64 * vector)
        by = clamp(1, 256 * vector // bx, power(y.likely))
        yield Config(((y.block, by), (x.block, bx)), clamp(1, by * bx // 256, 4))
    if _is_seldom(shape):
        bx = min(power(size), 256 * vector)
        yield Config(((y.block, 4), (x.block, bx)), clamp(1, bx // (64 * vector), 4))
    if sum(n.op == "index" for m in shape.members for n in walk(*m.exprs)) > 2:
        bx = min(power(size), 256 * vector)
        yield Config(((y.block, 1), (x.block, bx)), clamp(1, bx // (64 * vector), 16))
    elif reads_rows(shape):
        bx = min(even if even >= 16 * vector else power(size), 128 * vector)
        enough = y.likely * -(-size // bx) // (2 * max(target.sms, 1))
        by = clamp(1, 256 * vector // bx, power(enough))
        yield Config(((y.block, by), (x.block, bx)), clamp(1, by * bx // (64 * vector), 4))
    if size >= LONG_ROW and not _computes(shape):
        # 10560 planes of 128x128 bfloat16 scaled 165 us, 170 us with eight warps
        yield Config(((y.block, 1), (x.block, 256 * vector)), 4)
    if size >= LONG_ROW:  # one row (849 of 100277 bfloat16 85 us, 95 us; 300 floats 65 us, 85 us)
        for registers in (32, None):
            yield Config(((y.block, 1), (x.block, 512 * vector)), 8, registers=registers)
    # of rows that begin anywhere longer pieces (50257 bfloat16: 438 us by 512, 447 us by 128)
    lengths = (64, 128, 32) if x.lean is not None else (16, 128, 32)
    most: list[int | None] = [32, None, None, None]  # as many threads as there is room for
    for piece, registers in zip((n * vector for n in (lengths[0], *lengths)), most, strict=True):
        bx = min(even, piece) if even >= 16 * vector else min(power(size), piece)
        enough = y.likely * -(-size // bx) // (2 * max(target.sms, 1))
        by = clamp(1, 1024 * vector // bx, power(enough))
        warps = clamp(1, by * bx // (64 * vector), 16)
        yield Config(((y.block, by), (x.block, bx)), warps, registers=registers)


def reads_rows(shape: Shape) -> bool:
    """Whether rows are read that are looked up."""
    x = shape.parallel[-1]
    flat = shape.flat()
    return any(
        ix.coefficient(n.src[0], x.var) is ix.ONE and is_looked_up(n.src[0])
        for m in flat.members
        for n in loads(*m.exprs)
    )


def _rows(program: Program, shape: Shape, target: Target) -> Iterable[Config]:
    """Whole rows, several of them where they are short; 16 elements per thread (H200: softmax of
    1024 floats 128 us, 133 us with four rows of 32; of 8192 bfloat16 67 us either way; of 8191
    68 us with 32 registers and four rows on a processor, 76 us with 40 and three), 32 of longer
    ones, or one row alone is at work on a processor (12000 bfloat16 61 us, 73 us). Of odd rows 32
    of sixteen bits (layer norm of 389 bfloat16 106 us by two rows of a warp, 145 us by four of four
    warps; causal softmax of 205 floats 138 us by two of a warp, 155 us by four of two), as of rows
    of odd channels (group norm of eight of 49 67 us by two of a warp, 97 us by four of four)."""
    vector = _vector(program, shape)
    x = shape.parallel[0]
    rows = [(a.block, power(a.size // max(a.piece, 1) * max(a.piece, 1) if a.size else 1))
            for a in shape.inner]  # fmt: skip
    longest = max((size for _, size in rows), default=1)
    enough = max(1, x.likely // (4 * max(target.sms, 1)))
    if shape.packed:  # a thread has 32 elements; one warp alone would not turn them in memory
        for warps in (4, 2):
            yield Config(((x.block, 32 * warps // max(1, longest // 32)), *rows), warps)
        return
    picks = any(0 < shape.pieces(a) < vector for a in shape.inner)  # each its channel's scale
    if shape.odd or picks:  # few threads with many loads each, and rows of one warp where it can be
        share = 64 // min(_floats(program, shape), default=4)
        if longest <= LONGEST_OF_WARP and folds_one(shape):
            share = 64
        block = min(clamp(1, 32 * share // longest, power(enough)), power(x.likely))
        warps = clamp(1, longest * block // (32 * share), MOST_WARPS)
        yield Config(((x.block, block), *rows), warps)
    if any(a.lean is ix.ZERO for a in shape.inner):  # in two tiles: many loads of few threads
        share = 128 // min(_floats(program, shape), default=4)
        block = min(clamp(1, 32 * share // longest, power(enough)), power(x.likely))
        yield Config(((x.block, block), *rows), clamp(1, longest // (32 * share), MOST_WARPS))
    scans = any(segment.scans for segment, _ in shape.segments)
    leans = any(a.piece for a in shape.inner) and not scans
    if scans and any(a.piece for a in shape.inner):  # cumulative sums: 67 us, 87 us by single ones
        share = 64 // min(_floats(program, shape), default=4)
        yield Config(((x.block, 1), *rows), clamp(1, longest // (32 * share), MOST_WARPS))
    if leans and longest <= 2048:
        yield Config(((x.block, 1), *rows), clamp(1, longest // (32 * 32), 2))
    elif leans and longest <= 8192 and len(_given(shape)) > 1:
        # 32 elements of two rows (softmax with a mask of 3365 bfloat16 109 us, 120 us by 16; of
        # 5001 296 us, 342 us)
        for registers in (64, None):
            yield Config(((x.block, 1), *rows), longest // (32 * 32), registers=registers)
    if x.likely >= 32 * target.sms and not scans and _is_partly_empty(program, shape, longest):
        few = longest > LONGEST_OF_WARP
        for registers in (None,) if few else (64, None):
            yield Config(((x.block, 1 if few else 2), *rows), 1, registers=registers)
    if leans:  # as many rows at work as of those that are even
        warps = clamp(1, power(longest / (32 * 16)), MOST_WARPS)
        yield Config(((x.block, 1), *rows), warps, registers=32)
    elif x.likely >= 16 * target.sms and not scans and _is_sparse(program, shape, longest):
        yield Config(((x.block, 1), *rows), longest // (32 * 32))
    if longest > LONGEST_PASS:
        yield Config(((x.block, 1), *rows), 16)
    elif scans and longest == LONGEST_PASS and min(sizes(program, shape)) == 2:
        # as floats of bfloat16 103 us, 123 us with 16; of floats 132 us, 130 us
        yield Config(((x.block, 1), *rows), 8)
    even = x.likely >= 8 * target.sms and not (leans or scans or shape.odd)
    if even and 512 <= longest <= 1024 and dear_of_each(shape) > 1:
        yield Config(((x.block, 2), *rows), 2)
    if x.likely >= 8 * target.sms and folds_many(shape):
        share = 64 if longest <= LONGEST_OF_WARP else 32
        block = min(clamp(1, 32 * share // longest, power(enough)), power(x.likely))
        yield Config(((x.block, block), *rows), clamp(1, longest * block // (32 * share), 16))
    for tile, share in ((256, 16), (1024, 32), (512, 16), (2048, 32), (512, 8)):
        block = min(clamp(1, tile * vector // longest, power(enough)), power(x.likely))
        warps = clamp(1, power(longest * block / (32 * share)), MOST_WARPS)
        yield Config(((x.block, block), *rows), warps)


def held_warps(size: int, leans: bool) -> int:
    """By how many warps so many elements are held: by as few as have registers for them (H200: int8
    of 2874 rows of 27487 bfloat16 64 us by 8, 72 us by 16; layer norm of 5378 of 11003 77 us by 4,
    86 us by 8), but two accesses under way for each (of 6000 of 9000 56 us by 8, 58 us by 4)."""
    return clamp(4 if leans else 8, power(size / (32 * 112)), MOST_WARPS)


def held_at_once(shape: Shape) -> int:
    """Elements of the rows a program holds that a thread loads at once."""
    flat, given = shape.flat(), _given(shape)
    whole = {flat.inner[0].var, flat.parallel[0].var}
    wide = any(n.dtype.itemsize > 2 and whole <= free_vars(n.src[0]) and n.arg in given
               for m in flat.members for n in loads(*m.exprs))  # fmt: skip
    return 4 if wide else 8


def _held_rows(program: Program, shape: Shape) -> Iterable[Config]:
    """With no more registers than let all threads run that may, if a row fits them (H200: group
    norm of 1024 rows of 40960 bfloat16 49 us, 63 us with 73 and one row on a processor)."""
    if shape.tiled:
        yield from _tiles(program, shape)
        return
    (axis,), each = shape.inner, held_at_once(shape)
    warps = shape.held // (32 * each)
    blocks = ((shape.parallel[0].block, 1), (axis.block, shape.held))
    weights = any(free_vars(n.src[0]) == frozenset((axis.var,)) for m in shape.flat().members
                  for n in loads(*m.exprs))  # fmt: skip
    room = (5 if weights and axis.lean is not None else 10) * each  # elements of a thread
    if (shape.each or axis.likely) <= room * 32 * warps and shape.several == 1:
        yield Config(blocks, warps, registers=64)
    yield Config(blocks, warps)


def _tiles(program: Program, shape: Shape) -> Iterable[Config]:
    """A row for as many threads as move a tile of it at once, and enough of them for as many
    programs to start as memory is fast: no more than three do in two nanoseconds."""
    x, (axis,) = shape.parallel[0], shape.inner
    threads = shape.held // (axis.piece or _vector(program, shape))
    rows = max(1, 32 // threads)
    bytes_ = rows * (axis.size or 1) * _moved(program, shape)
    most = 1 if bytes_ >= LEAST_MOVED else 2 if 3 * bytes_ >= LEAST_MOVED else 4
    for times in (most, 2 if most == 1 else 1):
        warps = times * max(1, threads // 32)
        yield Config(((x.block, times * rows), (axis.block, shape.held)), warps)


def _moved(program: Program, shape: Shape) -> int:
    """Bytes that are loaded and stored of each element of a row of its own."""
    inner = {v for a in shape.inner for v in a.loops}
    read = {b for m in shape.members for b in m.reads}
    stored = {s.buffer for m in shape.members for s in m.stores if inner & free_vars(s.index)}
    alike = {n.arg for m in shape.members for n in loads(*m.exprs) if free_vars(n.src[0]) <= inner}
    moved = _given(shape) - alike | stored - read
    return sum(program.buffers[b].dtype.itemsize for b in moved)


def folds_one(shape: Shape) -> bool:
    """Whether one row is loaded for each that is folded, and none is stored: programs are short,
    and no more than three start in two nanoseconds (H200: squares of 269175 rows of 217 bfloat16
    30 us by eight rows of a warp, 43 us by four; of 102912 of 461 25 us by four, 34 us by two)."""
    inner = {v for a in shape.inner for v in a.loops}
    read = {(n.arg, n.src[0]) for m in shape.members for n in loads(*m.exprs)
            if inner & free_vars(n.src[0])}  # fmt: skip
    stored = any(inner & free_vars(s.index) for m in shape.members for s in m.stores)
    return len(read) == 1 and not stored


def _rows_in_order(program: Program, shape: Shape, target: Target) -> Iterable[Config]:
    """Rows one after the other, the loads of the next ones under way (H200: the backward pass of
    layer norm, 16384x4096 bfloat16: 105 us with three, 169 us without)."""
    x = shape.parallel[0]
    rows = [(a.block, power(a.size or 1)) for a in shape.inner]
    longest = max((size for _, size in rows), default=1)
    choices = ((32, 3), (16, 3), (32, 2), (16, 1)) if shape.ahead else ((16, 0), (32, 0), (8, 0))
    if shape.odd and shape.ahead:
        wide = min(_floats(program, shape), default=4) > 2
        if (0 if wide else LONGEST_OF_WARP) < longest <= 4096:
            yield from _odd_rows_in_order(shape, rows, target)
        # of 777 bfloat16 171 us with one warp, 202 us with two
        choices = ((8, 1), (16, 1)) if wide else ((32, 1), (16, 1))
    for share, ahead in choices:
        warps = clamp(1, power(longest / (32 * share)), MOST_WARPS)
        most = 128 if ahead == 1 and share == 32 and warps > 1 else None  # four of four warps
        yield Config(((x.block, 1), *rows), warps, ahead=ahead, registers=most)


def _odd_rows_in_order(shape: Shape, rows: list[tuple[str, int]], target: Target
                       ) -> Iterable[Config]:  # fmt: skip
    """Single elements are not fetched ahead: floats would go through shared memory one by one
    (H200: backward pass of RMS norm, 761461 rows of 161 floats: 395 us, 482 us so; 300000 of 401
    370 us, 421 us). So few warps that a thread's part of all that it has of a row fits its
    registers, with room for as many programs as there are (of layer norm, 24660 rows of 2049
    floats: 176 us by four with 128 registers, 201 us by eight, 313 us by sixteen; 33000 of 1501
    bfloat16 102 us by two, 110 us by four); of few programs each has more (RMS norm of 1999
    floats, 250 programs: 75 us by eight, 79 us by four)."""
    x, size = shape.parallel[0], max((a.size or 1 for a in shape.inner), default=1)
    kept = len(_walked(shape)) + sum(accumulates(m, shape.serial) for m in shape.members)
    warps = clamp(1, power(size * kept / (32 * 120)), MOST_WARPS)
    if x.likely * warps < 12 * target.sms:
        warps = clamp(1, 2 * warps, size // 32)
    most = 128 if size * kept > 64 * 32 * warps else None
    yield Config(((x.block, 1), *rows), warps, ahead=1, registers=most)


def _columns(shape: Shape, vector: int, target: Target) -> Iterable[Config]:
    """Whole columns. Short ones that are only folded, each by one thread (H200: 26 rows of 1369912
    bfloat16 20 us, 106 us by several, eager 26 us), which has as many as it loads at once (24 rows
    of 20000x100 bfloat16 27 us by four, 32 us by eight; of 20000x101 31 us by one, 33 us; 32 rows
    of 9566x69 floats 23.3 us by one, 23.9 us by four)."""
    x = shape.parallel[0]
    rows = [(a.block, power(a.size or 1)) for a in shape.inner]
    longest = max(size for _, size in rows)
    walks = [segment for segment, axis in shape.segments if axis is not None]
    folded = len(walks) == 1 and all(m.reduce for m in walks[0].members)
    wide = 32 * vector
    if folded and longest <= LONGEST_OF_THREAD and x.likely >= 4 * wide * target.sms:
        yield Config(((x.block, 2 * wide), *rows), 2 * vector // _beside(shape, vector))
    block, warps = _held_columns(shape, longest, folded, vector, target)
    yield Config(((x.block, block), *rows), warps)
    room = clamp(NARROWEST_TILE, power(x.likely / max(target.sms, 1)), 128)
    for tile, share in ((8192, 16), (4096, 16), (16384, 32), (32768, 32)):
        block = min(clamp(NARROWEST_TILE, tile // longest, room), power(x.likely))
        warps = clamp(1, power(longest * block / (32 * share)), MOST_WARPS)
        yield Config(((x.block, block), *rows), warps)


def pieces_of(dtype: torch.dtype) -> int:
    """The elements of sixteen bytes."""
    return 16 // dtype.itemsize


def _slid_columns(shape: Shape) -> Iterable[Config]:
    """A thread has eight loads of the next round under way while it adds eight up (H200: average
    over 0 of 109x481x793 bfloat16 26.7 us, 44 us with half as many of twice the threads)."""
    x, r = shape.parallel[0], shape.inner[0]
    if any(segment.scans for segment, _ in shape.segments):
        lanes = power(shape.slid)
        for elements in (4096, 2048):
            count = max(8, elements // lanes)
            yield Config(((x.block, lanes), (r.block, count)), min(lanes // 32, 8))
        return
    rows = max(pieces_of(n.dtype) for m in shape.members for n in loads(*m.exprs))
    blocks = ((x.block, SLID_LANES), (STEP, SLID_LANES - rows), (r.block, rows))
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
    given = below(max(1, len(_given(shape))))
    wide = line if side == line else 4 * line if side < vector and longest <= 32 else 2 * line
    room = clamp(NARROWEST_TILE, power(x.likely / max(target.sms, 1)), wide)
    tile = 256 * line // (given if side < vector else 1)
    block = min(clamp(NARROWEST_TILE, tile // longest, room), power(x.likely))
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
    indices = [n.src[0] for m in flat.members for n in loads(*m.exprs)]
    indices += [s.index for m in flat.members for s in m.stores]
    tiles = [i for i in indices if x.var in free_vars(i) and inner & free_vars(i)]
    while most > 1 and not all(is_even(i, x, most) for i in tiles):
        most //= 2
    return most


def _walked(shape: Shape) -> set[str]:
    """What is loaded along rows or columns."""
    inner = {v for a in shape.inner for v in a.loops}
    return {n.arg for m in shape.members for n in loads(*m.exprs) if inner & free_vars(n)}


def _given(shape: Shape) -> set[str]:
    """What is loaded so, and not made by the kernel itself."""
    return _walked(shape).difference(*(m.writes for m in shape.members))


def _is_partly_empty(program: Program, shape: Shape, longest: int) -> bool:
    """Whether a warp has less to do by itself: of rows that leave a quarter of a block empty it has
    no element there, while one of several warps has nothing else (H200: softmax with a mask of 648
    bfloat16 107 us by two rows of a warp, 130 us by two of four; causal of 600 86 us, 109 us; layer
    norm of 648 103 us, 112 us; of 400 98 us, 126 us by four of four; softmax of 328 98 us, 105 us;
    of 480 and 1000 all the same). Norms of longer ones, one row of a warp (layer norm of 1152 with
    a scale for each image 79 us, 89 us by two warps, 93 us by four)."""
    if shape.odd or any(a.piece for a in shape.inner):
        return False
    size = max(a.size or longest for a in shape.inner)
    wide = any(program.buffers[b].dtype.itemsize > 2 for b in _given(shape))
    most = {512: 448, 1024: 768, 2048: 1280 if folds(shape, "welford") else 0}
    return size < most.get(longest, 0) and not wide


def _is_sparse(program: Program, shape: Shape, longest: int) -> bool:
    """Whether a thread should have 32 elements of a longer row of sixteen bits: where warps have
    nothing but what is empty, or wait for each other twice, for the mean and the deviations (H200:
    layer norm of 1536 bfloat16 90 us, 98 us by 16; of 3072 91 us, 102 us; of 5120 84 us, 115 us; of
    6144 120 us, 155 us; of 8192 132 us, 141 us; but of 4096 133 us, 132 us; softmax of 6144 97 us,
    102 us, of 8192 132 us, 130 us)."""
    if shape.odd or any(a.piece for a in shape.inner) or not 2048 <= longest <= LONGEST_PASS:
        return False
    if any(program.buffers[b].dtype.itemsize > 2 for b in _given(shape)):
        return False
    size = max(a.size or longest for a in shape.inner)
    if not folds(shape, "welford"):
        return 8 * size <= 7 * longest
    return size < longest or longest == LONGEST_PASS


def _round_of(axis: Axis, most: int, least: int) -> int:
    """How much of a row or column a loop takes at once: what divides it, if that is no less than
    `least`, for then no round has a mask."""
    even = (axis.size or 1) & -(axis.size or 1)
    return min(most, even) if even >= least else clamp(8, power(axis.likely), most)


def _piece_of(shape: Shape, axis: Axis, most: int) -> int:
    """No more than the pieces of a row that have something in common: it is loaded once then, not
    for every eight elements."""
    piece = shape.pieces(axis)
    return min(most, piece) if piece >= 1024 and most <= 8192 else most


def _long_rows(shape: Shape, target: Target) -> Iterable[Config]:
    """Sixteen elements per thread (H200: training's cross entropy of 32000 bfloat16 127 us in
    blocks of 2048, 132 us of 4096, 155 us of 8192; of 50257 199, 207 and 300 us), eight where each
    has a place too (argmax of 32768 bfloat16 119 us, 187 us). What only adds up waits for memory
    alone: all rows at work together have as much under way as the card takes, however few they are
    (squares of 542 rows of 262144 float16 69 us in blocks of 8192, 118 us of 2048; of 2731 rows of
    27520 floats 73 us, 80 us); of chunks that may end sooner loads are not moved ahead by the
    compiler (254 chunks of 376832 bfloat16 47 us of 16384, 55 us of 8192). So do few rows with more
    to compute (std and mean of 2731 rows 73 us in blocks of 4096, 80 us of 2048; cross entropy of
    819 rows of 110087 bfloat16 51 us, 58 us; of 1400 of 128256 89 us of 4096 by four warps, 97 us
    of 2048, 104 us of 4096 by eight, of which not all run at once). With the next block under way
    these are half as long (of 1287 of 100277 65.6 us of 2048, 79.7 us of 4096, 66.2 us without;
    std and mean of 1610 rows of 61992 49.5 us of 2048, 54.7 us of 4096). Rows that are walked again
    should be in cache until then, so fewer of them are at work (log softmax of 50257 bfloat16 445
    us with 32 warps, 497 us with 16, 605 us with 8), but not if most of the time they are computed
    (two log softmaxes of 4096 rows of 32000 and what they differ by 224 us with 16 warps, 318 us
    with 32; int8 of 740 rows of 110021 103 us, 126 us in blocks of 4096 with eight). With fewer
    rows than the card runs programs, each gets more threads, and more loads if it walks again
    (group norm of 512 rows of 65536 bfloat16 43 us in blocks of 16384, 47 us of 4096). Rows that no
    cache keeps until then are fetched ahead (batch norm of 256 rows of 200704 bfloat16 79 us, 86
    us)."""
    x = shape.parallel[0]
    if is_one_walk(shape):
        yield from _one_walk(shape, target)
        return
    exponentials = any(n.op == "exp" for m in shape.members for n in walk(*m.exprs))
    choices = [(1, 2048, 4), (1, 4096, 8), (1, 8192, 16), (4, 512, 4), (1, 1024, 4)]
    longest = max(a.likely for a in shape.inner)
    if shape.again and longest <= MOST_KEPT // 2:
        choices = [(1, 1024, 4), (1, 2048, 8), (1, 2048, 4)]
        if longest > LONGEST_PASS and not folds(shape, "welford"):
            choices.insert(0, (1, 2048, 8))
        elif longest > LONGEST_PASS and all(a.lean is None for a in shape.inner):
            choices.insert(0, (1, 4096, 16))
    elif shape.again:
        choices = [(1, 8192, 32), (1, 8192, 16), (1, 4096, 8), (1, 2048, 4), (4, 512, 4)]
        if folds(shape, "welford"):
            choices.insert(0, (1, 4096, 16))
        elif x.likely < 8 * target.sms and (exponentials or shape.ahead):
            choices.insert(0, (1, 4096, 8))
        elif x.likely < 8 * target.sms or (_largest(shape) > 1 and not shape.ahead):
            choices.insert(0, (1, 8192, 16))
    elif not exponentials and not shape.fetched:
        choices.insert(0, (1, 4096, 8) if folds(shape, "welford") else (1, 8192, 16))
    elif exponentials and x.likely < 8 * target.sms:
        choices.insert(0, (1, 4096, 8))
    elif exponentials and x.likely < 16 * target.sms and not shape.fetched:
        choices.insert(0, (1, 4096, 4))
    elif exponentials and 16 * target.sms <= x.likely < 28 * target.sms:
        # all run at once (2982 rows of 30522 51 us, 54 us by four warps; 2200 of 65024 74 us, 84
        # us); more by four warps, one half after the other (4096 of 32000 65 us, 66 us so)
        choices.insert(0, (1, 1024, 2))
    if folds(shape, "argmin", "argmax"):
        choices = [(1, 2048, 8), (1, 4096, 16), (1, 4096, 8), (1, 1024, 4)]
    elif x.likely < 4 * target.sms:
        choices = [(1, 8192, 16), (1, 4096, 16), (1, 2048, 8), (1, 8192, 32)]
        if is_dear(shape):
            choices.insert(0, (1, 8192, 32))
        if not shape.ahead and (shape.again or (shape.ragged and not exponentials)):
            choices.insert(0, (1, 16384, 16))
    aheads = [4] * len(choices) if shape.ahead else [0] * len(choices)
    if shape.ahead:  # what is fetched ahead may not fit
        choices, aheads = [*choices, choices[1]], [*aheads, 1]
    for (bx, br, warps), ahead in zip(choices, aheads, strict=True):
        rows = tuple((a.block, _round_of(a, _piece_of(shape, a, br), 1024)) for a in shape.inner)
        block = min(bx, power(x.likely))
        most = clamp(1, block * max(size for _, size in rows) // 32, warps)
        yield Config(((x.block, block), *rows), most, ahead=ahead)


def _largest(shape: Shape) -> int:
    """Of how many rows the largest value is looked for, as of several that exponentials are of."""
    nodes = {n for m in shape.members for n in walk(*m.exprs) if n.op == "reduce"}
    return sum(n.arg.kind == "max" for n in nodes)


def _one_walk(shape: Shape, target: Target) -> Iterable[Config]:
    """Small blocks of many threads, four rows on a processor (H200: average of 960 rows of 36864
    bfloat16 18.1 us, 20.0 us in blocks of 4096; squares of 2731 rows of 27520 floats 68 us, 71 us
    of 8192; of 300 of 262144 bfloat16 37 us, 45 us). Where a few rows would be left over, all of
    them at once by fewer threads, with the next blocks under way (of 542 rows of 262144 float16 65
    us, 69 us; of 530 of 200000 floats 98 us, 104 us)."""
    x = shape.parallel[0]
    choices = [(2048, 16, 1), (8192, 16, 1), (2048, 4, 1)]
    if shape.ahead and 4 * target.sms < x.likely <= 5 * target.sms:
        choices.insert(0, (2048, 4, 5))
    for br, warps, ahead in choices:
        rows = tuple((a.block, _round_of(a, br, 1024)) for a in shape.inner)
        yield Config(((x.block, 1), *rows), warps, ahead=ahead if shape.ahead else 0)


def at_once(program: Program, shape: Shape) -> int:
    """Neighbouring columns that a thread loads and stores at once."""
    flat = shape.flat()
    x = flat.parallel[0]
    places = {n.src[0] for m in flat.members for n in loads(*m.exprs)}
    places |= {s.index for m in flat.members for s in m.stores}
    found = 16 // min(16, *sizes(program, flat))
    while found > 1 and not all(is_even(i, x, found) for i in places if x.var in free_vars(i)):
        found //= 2
    return found


def carried(shape: Shape) -> int:
    """Bytes of what a scan carries from one element to the next."""
    return max(sum(s.dtype.itemsize for s in n.src) << (n.arg.kind == "logsumexp")
               for m in shape.members for n in walk(*m.exprs) if n.op == "scan")  # fmt: skip


def rows_of_thread(shape: Shape, neighbours: int) -> int:
    """Rows of columns that a thread has at once, if it has so many neighbours of each: those of
    sixteen bits are kept as such until they are added."""
    share = 256 if neighbours == 1 or carried(shape) == 8 else 512 if neighbours < 8 else 1024
    most = below(clamp(4, share // (neighbours * carried(shape)), 64))
    return _round_of(shape.inner[0], min(most, 32) if shape.walked else most, 8)


def _scanned_columns(program: Program, shape: Shape) -> Iterable[Config]:
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


def _walked_rows(program: Program, shape: Shape, target: Target) -> Iterable[Config]:
    """Small blocks, for those at the ends take long (H200: cumulative sums of 2048 rows of 20001
    floats 96 us by 2048 of eight warps, 119 us of four, 133 us by 4096; of 6000 rows of 14001
    bfloat16 113 us by 1024, 144 us by 2048). Longer ones where rows are few (377 rows of 175001
    bfloat16 84 us by 4096, 94 us by 2048)."""
    x, (r,) = shape.parallel[0], shape.inner
    wide, few = max(sizes(program, shape)) > 2, x.likely < 4 * target.sms
    if shape.shared:  # two on a processor, no less
        yield Config(((x.block, 1), (r.block, 2048 if wide else 4096)), 8, registers=128)
        return
    choices = [(2048, 8), (1024, 4)] if wide else [(1024, 2), (2048, 4)]
    if few and not wide:
        choices.insert(0, (4096, 8))
    for size, warps in choices:
        yield Config(((x.block, 1), (r.block, size)), warps)


def _shared_rows(shape: Shape, vector: int) -> Iterable[Config]:
    """One program on each processor: it alone has to keep memory busy. Of programs in turn there
    are several (H200: batch norm of 256 rows of 200704 bfloat16, four programs each, 77.5 us in
    blocks of 4096, 79.6 us of 8192, 80.6 us of 16384; its backward pass 161, 233 and 271 us)."""
    x = shape.parallel[0]
    choices = [(4096 * vector, 32), (2048 * vector, 16), (1024 * vector, 16), (512 * vector, 16)]
    if shape.in_turn and not shape.again:
        choices = [(2048, 4), (4096, 8)]
    elif shape.in_turn:
        choices = [choices[3], choices[2], (256 * vector, 8)]
    for size, warps in choices:
        yield Config(((x.block, 1), *((a.block, size) for a in shape.inner)), warps)


def _steps_oddly(shape: Shape) -> bool:
    """Whether rows of numbers of four bytes begin anywhere. They are not to be fetched ahead:
    Triton 3.6 lays single elements out in shared memory such that all of a row are in one bank
    (H200: sums of 2042 rows of 389 floats, what the backward pass of layer norm leaves, 49 us)."""
    flat = shape.flat()
    steps = [ix.coefficient(n.src[0], a.var) for m in flat.members for n in loads(*m.exprs)
             if n.dtype.itemsize == 4 for a in flat.inner]  # fmt: skip
    return any(step is not None and (ix.value_of(step) or 0) % 2 for step in steps)


def _long_columns(shape: Shape, vector: int, target: Target) -> Iterable[Config]:
    """128 bytes of a row by 256 rows, the next ones under way (H200: sum of columns of 16384x8192
    bfloat16 62 us, 69 us in small blocks without); 128 rows of several buffers, if there are many
    (gradient of bias and gelu 208 us, 213 us by 256, 420 us in small blocks without). Of
    means and deviations a thread has sixteen rows, all of them under way at once: few threads, for
    each has its part in joining them in the end (var of 256 rows of 512 columns 67 us with two
    warps, 69 us with four, 101 us with eight; of 1024 rows of 131072 64 us and 72 us). Programs
    that are too few to wait for each other's loads have the next ones under way (batch norm,
    channels last: 28 us, 71 us without). Where several programs are at work on a processor, all of
    them together have as much under way as one would (sum of 116864 rows of 1155 bfloat16, dealt
    out to 1155 programs: 66 us by 64 rows, 71 us by 128, 76 us by 256; argmax of 1024 rows of 54784
    31 us by 32, 34 us by 64, 57 us by 256; bias and gelu backwards of 267421x512 219 us by 64, 234
    us by 128, of 22666x6487, dealt out to 6487 programs, 241 us and 375 us). Of many short columns
    programs take turns anyway (sum over 1 of 1157x167x256 bfloat16 27 us by 64 rows of two warps,
    34 us ahead with four)."""
    x = shape.parallel[0]
    bx = 8 * vector
    while bx > NARROWEST_TILE and 4 * x.likely < 3 * bx * target.sms:
        bx //= 2
    # a running softmax wants rows of one thread, arithmetic of much else wants threads
    exponentials = any(n.op == "exp" for m in shape.members for n in walk(*m.exprs))
    loaded = _walked(shape)
    share = 32 if len(loaded) == 1 or (exponentials and len(shape.segments) > 1) else 16
    choices = [(bx, 256, share, 3), (bx, 128, share, 3), (bx, 64, 8, 3), (bx, 256, share, 1),
               (bx, 128, 8, 1), (bx // 2, 256, 8, 1)]  # fmt: skip
    if share == 16 and all(a.likely > 256 for a in shape.inner):
        choices[:2] = choices[1::-1]
    if vector == 8 and any(segment.scans for segment, _ in shape.segments):
        choices.insert(0, (32, 128, 32, 3))  # 8192x8192 bfloat16 131 us, 240 us by 64 columns
    together = round(x.likely / (bx * max(target.sms, 1)))  # programs on a processor
    places = folds(shape, "argmin", "argmax")
    stored = len(shape.segments) == 1 and any(not m.reduce for m in shape.members)
    if together > 1 and (stored or not exponentials) and choices[0][0] == bx:
        most, each = (128, 32) if places else (256, share)
        br = clamp(most // 4, below(most // (below(together) * len(loaded))), most)
        if all(a.likely > 2 * br for a in shape.inner):
            choices.insert(0, (bx, br, each, 3))
    if folds(shape, "welford"):
        choices = [(bx, 128, 16 * vector, 1), (bx, 64, 4 * vector, 4), (bx, 128, 8 * vector, 3),
                   (bx, 128, 8 * vector, 1)]  # fmt: skip
        if x.likely < 8 * bx * target.sms:
            choices[:2] = choices[1::-1]
    short = 512 if folds(shape, "welford") else 256
    if together >= 8 and all(a.likely <= short for a in shape.inner) and not (
        places or exponentials or stored):  # fmt: skip
        choices.insert(0, (bx, 64, below(8 * vector // len(loaded)), 1))
    elif together < 1 and not exponentials and _steps_oddly(shape):
        choices = [(bx, 512, 16, 1), (bx, 256, 16, 1), (bx, 128, 8, 1)]
    for columns, br, each, ahead in choices:
        rows = tuple((a.block, _round_of(a, br, 64)) for a in shape.inner)
        longest = max(size for _, size in rows)
        block = min(columns, power(x.likely))
        warps = clamp(1, longest * block // (32 * each), MOST_WARPS)
        yield Config(((x.block, block), *rows), warps, ahead=ahead if shape.ahead else 0)
