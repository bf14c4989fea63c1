"""Block sizes, warps and stages of kernels that reduce along rows."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright import rules
from tilewright.codegen.triton.analysis.accesses import (
    floats_of,
    given_along,
    own_rows,
    read_along,
    reduces_pairs_of_rows,
    sizes,
    vector_of,
)
from tilewright.codegen.triton.analysis.operations import PLACES
from tilewright.codegen.triton.analysis.work import (
    functions_of_each,
    nests_functions,
    reduces_often,
)
from tilewright.codegen.triton.plan.config import MOST_WARPS, Config, clamp, power, round_of
from tilewright.codegen.triton.plan.tiling import Axis, Shape, accumulates, is_one_walk
from tilewright.ir import index as ix
from tilewright.ir.expr import free_vars
from tilewright.ir.program import Program
from tilewright.target import Target


def of_rows(program: Program, shape: Shape, target: Target) -> Iterable[Config]:
    """Whole rows, several of them where they are short; 16 elements per thread (H200: softmax of
    1024 floats 128 us, 133 us with four rows of 32; of 8192 bfloat16 67 us either way; of 8191
    68 us with 32 registers and four rows on an SM, 76 us with 40 and three), 32 of longer ones,
    or one row alone is at work on an SM (12000 bfloat16 61 us, 73 us). Of odd rows 32 of sixteen
    bits (layer norm of 389 bfloat16 106 us by two rows of a warp, 145 us by four of four warps;
    causal softmax of 205 floats 138 us by two of a warp, 155 us by four of two), as of rows of
    odd channels (group norm of eight of 49 67 us by two of a warp, 97 us by four of four)."""
    vector = vector_of(program, shape)
    x = shape.parallel[0]
    rows = [(a.block, power(a.size // max(a.vector, 1) * max(a.vector, 1) if a.size else 1))
            for a in shape.inner]  # fmt: skip
    longest = max((size for _, size in rows), default=1)
    enough = max(1, x.likely // (4 * max(target.sms, 1)))
    if (
        longest <= 32
        and enough >= rules.PAIRS_TILE.limit // longest
        and reduces_pairs_of_rows(shape)
    ):
        yield Config(((x.block, rules.PAIRS_TILE.limit // longest), *rows), 4)
    if shape.packed:  # a thread has 32 elements; one warp alone would not turn them in memory
        for warps in (4, 2):
            yield Config(((x.block, 32 * warps // max(1, longest // 32)), *rows), warps)
        return
    picks = any(0 < shape.pieces(a) < vector for a in shape.inner)  # each its channel's scale
    if shape.misaligned or picks:  # few threads of many loads each, and rows of one warp if can be
        share = 64 // min(floats_of(program, shape), default=4)
        if longest <= rules.ROW_OF_WARP.limit and folds_one(shape):
            share = 64
        block = min(clamp(1, 32 * share // longest, power(enough)), power(x.likely))
        warps = clamp(1, longest * block // (32 * share), MOST_WARPS)
        yield Config(((x.block, block), *rows), warps)
    if any(a.start is ix.ZERO for a in shape.inner):  # in two tiles: many loads of few threads
        share = 128 // min(floats_of(program, shape), default=4)
        block = min(clamp(1, 32 * share // longest, power(enough)), power(x.likely))
        yield Config(((x.block, block), *rows), clamp(1, longest // (32 * share), MOST_WARPS))
    scans = shape.scans
    leans = any(a.vector for a in shape.inner) and not scans
    if scans and any(a.vector for a in shape.inner):  # cumulative sums: 67 us, 87 us by single ones
        share = 64 // min(floats_of(program, shape), default=4)
        yield Config(((x.block, 1), *rows), clamp(1, longest // (32 * share), MOST_WARPS))
    if leans and longest <= 2048:
        yield Config(((x.block, 1), *rows), clamp(1, longest // (32 * 32), 2))
    elif leans and longest <= 8192 and len(given_along(shape)) > 1:
        # 32 elements of two rows (softmax with a mask of 3365 bfloat16 109 us, 120 us by 16; of
        # 5001 296 us, 342 us)
        for registers in (64, None):
            yield Config(((x.block, 1), *rows), longest // (32 * 32), registers=registers)
    if x.likely >= 32 * target.sms and not scans and _is_partly_empty(program, shape, longest):
        few = longest > rules.ROW_OF_WARP.limit
        for registers in (None,) if few else (64, None):
            yield Config(((x.block, 1 if few else 2), *rows), 1, registers=registers)
    if leans:  # as many rows at work as of those that are even
        warps = clamp(1, power(longest / (32 * 16)), MOST_WARPS)
        yield Config(((x.block, 1), *rows), warps, registers=32)
    elif x.likely >= 16 * target.sms and (
        _is_scanned_in_part(shape, longest) if scans else _is_sparse(program, shape, longest)
    ):
        yield Config(((x.block, 1), *rows), longest // (32 * 32))
    if longest > rules.ONE_BLOCK_ROW.limit:
        yield Config(((x.block, 1), *rows), 16)
    elif scans and longest == rules.ONE_BLOCK_ROW.limit and min(sizes(program, shape)) == 2:
        # as floats of bfloat16 103 us, 123 us with 16; of floats 132 us, 130 us
        yield Config(((x.block, 1), *rows), 8)
    even = x.likely >= 8 * target.sms and not (leans or scans or shape.misaligned)
    if even and 512 <= longest <= 1024 and functions_of_each(shape) > 1:
        yield Config(((x.block, 2), *rows), 2)
    narrow = all(n.dtype.itemsize == 2 for n in own_rows(shape)) and not reduces_often(shape)
    if even and narrow and shape.reductions & PLACES and 128 <= longest <= 1024:
        # places are reduced too: by few threads (65536 rows of 1000 bfloat16 38 us, 50 us by two
        # rows of four warps, 41 us of two, 43 us by one row of a warp; 268800 of 80 float16 42 us,
        # 45 us by four)
        yield Config(((x.block, (4096 if longest >= 512 else 2048) // longest), *rows), 2)
    elif even and narrow and longest == 512 and len(own_rows(shape)) > 1:
        # no row by two warps (gradients of two normed rows of 512 bfloat16 and what they differ by
        # 50 us, 67 us by four rows of four warps, 61 us of two, 61 us by one row of a warp)
        yield Config(((x.block, 2), *rows), 1)
    if x.likely >= 8 * target.sms and reduces_often(shape):
        # where rows are used again fewer of them, for what a thread keeps (distances of
        # 65536 rows of 512 bfloat16 that are normed 41 us by two rows of a warp, 54 us by four)
        most = 64 if longest <= rules.ROW_OF_WARP.limit else 32
        share = min(32 if shape.reread else 64, max(16, most // power(len(own_rows(shape)))))
        block = min(clamp(1, 32 * share // longest, power(enough)), power(x.likely))
        if longest == rules.ONE_BLOCK_ROW.limit and functions_of_each(shape):
            # two rows on an SM either way, by more threads (supervised contrast of 8192 rows
            # 147 us by sixteen warps, 155 us by eight, 168 us with all registers)
            yield Config(((x.block, 1), *rows), 16, registers=64)
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
    flat, given = shape.flat(), given_along(shape)
    whole = {flat.inner[0].var, flat.parallel[0].var}
    wide = any(n.dtype.itemsize > 2 and whole <= free_vars(n.src[0]) and n.arg in given
               for n in flat.loads)  # fmt: skip
    return 4 if wide else 8


def of_held_rows(program: Program, shape: Shape) -> Iterable[Config]:
    """With no more registers than let all threads run that may, if a row fits them (H200: group
    norm of 1024 rows of 40960 bfloat16 49 us, 63 us with 73 and one row on an SM)."""
    if shape.short:
        yield from _tiles(program, shape)
        return
    (axis,), each = shape.inner, held_at_once(shape)
    warps = shape.chunk // (32 * each)
    blocks = ((shape.parallel[0].block, 1), (axis.block, shape.chunk))
    weights = any(free_vars(n.src[0]) == frozenset((axis.var,)) for n in shape.flat().loads)
    room = (5 if weights and axis.start is not None else 10) * each  # elements of a thread
    if (shape.part or axis.likely) <= room * 32 * warps and shape.planes_each == 1:
        yield Config(blocks, warps, registers=64)
    yield Config(blocks, warps)


def _tiles(program: Program, shape: Shape) -> Iterable[Config]:
    """A row for as many threads as move a tile of it at once, and enough of them for as many
    programs to start as memory is fast: no more than three do in two nanoseconds. More where each
    loads weights that are far wider than its rows (H200: 524288 rows of 384 int8 times floats 71 us
    by sixteen rows, 126 us by eight)."""
    x, (axis,) = shape.parallel[0], shape.inner
    if (axis.size or 1) <= 32:  # of single floats each thread has two (60 us, 67 us by one)
        yield Config(((x.block, 32), (axis.block, shape.chunk)), 2)
    if reduces_pairs_of_rows(
        shape
    ):  # little of it comes from memory (174 us, 184 us by half of it)
        yield Config(
            ((x.block, rules.PAIRS_TILE.limit // shape.chunk), (axis.block, shape.chunk)), 4
        )
    threads = shape.chunk // (axis.vector or vector_of(program, shape))
    rows = max(1, 32 // threads)
    moved = _moved(program, shape)
    bytes_ = rows * (axis.size or 1) * moved
    most = (
        1
        if bytes_ >= rules.BYTES_OF_PROGRAM.limit
        else 2
        if 3 * bytes_ >= rules.BYTES_OF_PROGRAM.limit
        else 4
    )
    weights = _alike(shape) & given_along(shape)
    if sum(program.buffers[b].dtype.itemsize for b in weights) >= 4 * moved:
        most = 4
    for times in (most, 2 if most == 1 else 1):
        warps = times * max(1, threads // 32)
        yield Config(((x.block, times * rows), (axis.block, shape.chunk)), warps)


def _moved(program: Program, shape: Shape) -> int:
    """Bytes that are loaded and stored of each element of a row of its own."""
    inner = shape.row_loops
    read = {b for m in shape.members for b in m.reads}
    stored = {s.buffer for s in shape.stores if inner & free_vars(s.index)}
    moved = given_along(shape) - _alike(shape) | stored - read
    return sum(program.buffers[b].dtype.itemsize for b in moved)


def _alike(shape: Shape) -> set[str]:
    """What is the same for all rows."""
    inner = shape.row_loops
    return {n.arg for n in shape.loads if free_vars(n.src[0]) <= inner}


def folds_one(shape: Shape) -> bool:
    """Whether one row is loaded for each that is reduced, and none is stored: programs are
    short, and no more than three start in two nanoseconds (H200: squares of 269175 rows of 217
    bfloat16 30 us by eight rows of a warp, 43 us by four; of 102912 of 461 25 us by four, 34 us
    by two; sums of 193778 of 360 60 us by two, of which memory takes 32 us)."""
    inner = shape.row_loops
    read = {(n.arg, n.src[0]) for n in shape.loads if inner & free_vars(n.src[0])}
    stored = any(inner & free_vars(s.index) for s in shape.stores)
    return len(read) == 1 and not stored


def of_rows_in_order(program: Program, shape: Shape, target: Target) -> Iterable[Config]:
    """Rows one after the other, the loads of the next ones under way (H200: the backward pass of
    layer norm, 16384x4096 bfloat16: 105 us with three, 169 us without)."""
    x = shape.parallel[0]
    rows = [(a.block, power(a.size or 1)) for a in shape.inner]
    longest = max((size for _, size in rows), default=1)
    if longest <= rules.TILED_ROW.limit and shape.pipelined and _lie_beside(shape):
        # several as one tile, which the next ones are in flight of (missing values of 1048576 rows
        # of 40 floats 91 us, 103 us without, 153 us by one row)
        for warps, ahead in ((2, 3), (1, 3), (2, 1)):
            yield Config(((x.block, rules.TILED_ROWS.limit), *rows), warps, ahead=ahead)
    choices = (
        ((32, 3), (16, 3), (32, 2), (16, 1)) if shape.pipelined else ((16, 0), (32, 0), (8, 0))
    )
    if shape.misaligned and shape.pipelined:
        wide = min(floats_of(program, shape), default=4) > 2
        if (0 if wide else rules.ROW_OF_WARP.limit) < longest <= 4096:
            yield from _odd_rows_in_order(shape, rows, target)
        # of 777 bfloat16 171 us with one warp, 202 us with two
        choices = ((8, 1), (16, 1)) if wide else ((32, 1), (16, 1))
    for share, ahead in choices:
        warps = clamp(1, power(longest / (32 * share)), MOST_WARPS)
        most = 128 if ahead == 1 and share == 32 and warps > 1 else None  # four of four warps
        yield Config(((x.block, 1), *rows), warps, ahead=ahead, registers=most)


def _lie_beside(shape: Shape) -> bool:
    """Whether rows that run one after the other do so beside those of other programs: rows that
    follow each other in memory were split cyclically to them (`schedule.dealt`)."""
    flat = shape.flat()
    x, (axis, *more) = flat.parallel[0], flat.inner
    if more or shape.total or any(free_vars(v.src[0]) for v in shape.serial):
        return False
    found = [n.src[0] for n in flat.loads if {axis.var, x.var} <= free_vars(n.src[0])]
    steps = {ix.value_of(ix.coefficient(i, x.var) or ix.ZERO) for i in found}
    return steps == {axis.size}


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
    kept = len(read_along(shape)) + sum(accumulates(m, shape.serial) for m in shape.members)
    warps = clamp(1, power(size * kept / (32 * 120)), MOST_WARPS)
    if x.likely * warps < 12 * target.sms:
        warps = clamp(1, 2 * warps, size // 32)
    most = 128 if size * kept > 64 * 32 * warps else None
    yield Config(((x.block, 1), *rows), warps, ahead=1, registers=most)


def _is_partly_empty(program: Program, shape: Shape, longest: int) -> bool:
    """Whether a warp has less to do by itself: of rows that leave a quarter of a block empty it has
    no element there, while one of several warps has nothing else (H200: softmax with a mask of 648
    bfloat16 107 us by two rows of a warp, 130 us by two of four; causal of 600 86 us, 109 us; layer
    norm of 648 103 us, 112 us; of 400 98 us, 126 us by four of four; softmax of 328 98 us, 105 us;
    of 480 and 1000 all the same). Norms of longer ones, one row of a warp (layer norm of 1152 with
    a scale for each image 79 us, 89 us by two warps, 93 us by four)."""
    if shape.misaligned or any(a.vector for a in shape.inner) or folds_one(shape):
        return False
    size = max(a.size or longest for a in shape.inner)
    wide = any(program.buffers[b].dtype.itemsize > 2 for b in given_along(shape))
    most = {512: 448, 1024: 768, 2048: 1280 if "welford" in shape.reductions else 0}
    return size < most.get(longest, 0) and not wide


def _is_sparse(program: Program, shape: Shape, longest: int) -> bool:
    """Whether a thread should have 32 elements of a longer row of sixteen bits: where warps have
    nothing but what is empty, or wait for each other twice, for the mean and the deviations (H200:
    layer norm of 1536 bfloat16 90 us, 98 us by 16; of 3072 91 us, 102 us; of 5120 84 us, 115 us; of
    6144 120 us, 155 us; of 8192 132 us, 141 us; but of 4096 133 us, 132 us; softmax of 6144 97 us,
    102 us, of 8192 132 us, 130 us)."""
    if (
        shape.misaligned
        or any(a.vector for a in shape.inner)
        or not 2048 <= longest <= rules.ONE_BLOCK_ROW.limit
    ):
        return False
    if any(program.buffers[b].dtype.itemsize > 2 for b in given_along(shape)):
        return False
    size = max(a.size or longest for a in shape.inner)
    if "welford" not in shape.reductions:
        return 8 * size <= 7 * longest
    return size < longest or longest == rules.ONE_BLOCK_ROW.limit


def _is_scanned_in_part(shape: Shape, longest: int) -> bool:
    """Whether a thread should have 32 elements of a row that is scanned in a block which it
    leaves empty by an eighth or more: those that have nothing are waited for too (H200: the
    largest so far of 8192 rows of 2520 floats, and what is reduced of it, 37 us by four warps,
    53 us by eight; of 4096 rows of 4096 the running sums 55.0 us, 56.5 us)."""
    if (
        shape.misaligned
        or any(a.vector for a in shape.inner)
        or not 2048 <= longest <= rules.ONE_BLOCK_ROW.limit
    ):
        return False
    return 8 * max(a.size or longest for a in shape.inner) <= 7 * longest


def _piece_of(shape: Shape, axis: Axis, most: int) -> int:
    """No more than the pieces of a row that have something in common: it is loaded once then, not
    for every eight elements."""
    piece = shape.pieces(axis)
    return min(most, piece) if piece >= 1024 and most <= 8192 else most


def of_long_rows(shape: Shape, target: Target) -> Iterable[Config]:
    """Sixteen elements per thread (H200: training's cross entropy of 32000 bfloat16 127 us in
    blocks of 2048, 132 us of 4096, 155 us of 8192; of 50257 199, 207 and 300 us), eight where
    each has a place too (argmax of 32768 bfloat16 119 us, 187 us). What only adds up waits for
    memory alone: all rows at work together have as much under way as the card takes, however few
    they are (squares of 542 rows of 262144 float16 69 us in blocks of 8192, 118 us of 2048; of
    2731 rows of 27520 floats 73 us, 80 us); of chunks that may end sooner loads are not moved
    ahead by the compiler (254 chunks of 376832 bfloat16 47 us of 16384, 55 us of 8192). So do
    few rows with more to compute (std and mean of 2731 rows 73 us in blocks of 4096, 80 us of
    2048; cross entropy of 819 rows of 110087 bfloat16 51 us, 58 us; of 1400 of 128256 89 us of
    4096 by four warps, 97 us of 2048, 104 us of 4096 by eight, of which not all run at once).
    With the next block in flight these are half as long (of 1287 of 100277 65.6 us of 2048, 79.7
    us of 4096, 66.2 us without; std and mean of 1610 rows of 61992 49.5 us of 2048, 54.7 us of
    4096). Rows that are walked again should be in cache until then, so fewer of them are at work
    (log softmax of 50257 bfloat16 445 us with 32 warps, 497 us with 16, 605 us with 8; of 832
    rows of 103720 117 us in blocks of 16384 with 32, 147 us of 4096 with 8, which all run at
    once), but not if most of the time they are computed (two log softmaxes of 4096 rows of 32000
    and what they differ by 224 us with 16 warps, 318 us with 32; int8 of 740 rows of 110021 103
    us, 126 us in blocks of 4096 with eight). With fewer rows than the card runs programs, each
    gets more threads, and more loads if it walks again (group norm of 512 rows of 65536 bfloat16
    43 us in blocks of 16384, 47 us of 4096). Rows that no cache keeps until then are fetched
    ahead (batch norm of 256 rows of 200704 bfloat16 79 us, 86 us)."""
    x = shape.parallel[0]
    if is_one_walk(shape):
        yield from _one_walk(shape, target)
        return
    exponentials = "exp" in shape.ops
    choices = [(1, 2048, 4), (1, 4096, 8), (1, 8192, 16), (4, 512, 4), (1, 1024, 4)]
    longest = max(a.likely for a in shape.inner)
    if shape.reread and longest <= rules.REREAD_ROW.limit // 2:
        choices = [(1, 1024, 4), (1, 2048, 8), (1, 2048, 4)]
        if longest > rules.ONE_BLOCK_ROW.limit and "welford" not in shape.reductions:
            choices.insert(0, (1, 2048, 8))
        elif longest > rules.ONE_BLOCK_ROW.limit and all(a.start is None for a in shape.inner):
            choices.insert(0, (1, 4096, 16))
    elif shape.reread:
        choices = [(1, 8192, 32), (1, 8192, 16), (1, 4096, 8), (1, 2048, 4), (4, 512, 4)]
        if "welford" in shape.reductions:
            choices.insert(0, (1, 4096, 16))
        elif x.likely < 8 * target.sms and shape.pipelined:
            choices.insert(0, (1, 4096, 8))
        elif x.likely < 8 * target.sms and exponentials and _largest(shape) == 1:
            choices.insert(0, (1, 16384, 32))
        elif x.likely < 8 * target.sms or (_largest(shape) > 1 and not shape.pipelined):
            choices.insert(0, (1, 8192, 16))
    elif not exponentials and not shape.prefetched:
        choices.insert(0, (1, 4096, 8) if "welford" in shape.reductions else (1, 8192, 16))
    elif exponentials and x.likely < 8 * target.sms:
        choices.insert(0, (1, 4096, 8))
    elif exponentials and x.likely < 16 * target.sms and not shape.prefetched:
        choices.insert(0, (1, 4096, 4))
    elif exponentials and 16 * target.sms <= x.likely < 28 * target.sms:
        # all run at once (2982 rows of 30522 51 us, 54 us by four warps; 2200 of 65024 74 us, 84
        # us); more by four warps, one half after the other (4096 of 32000 65 us, 66 us so)
        choices.insert(0, (1, 1024, 2))
    if shape.reductions & PLACES:
        choices = [(1, 2048, 8), (1, 4096, 16), (1, 4096, 8), (1, 1024, 4)]
    elif x.likely < 4 * target.sms:
        choices = [(1, 8192, 16), (1, 4096, 16), (1, 2048, 8), (1, 8192, 32)]
        if _moves_much(shape):
            choices.insert(0, (1, 4096, 16))
        if nests_functions(shape):
            choices.insert(0, (1, 8192, 32))
        if not shape.pipelined and (shape.reread or (shape.ragged and not exponentials)):
            choices.insert(0, (1, 16384, 16))
    if _stores_masks(shape):
        choices.insert(0, (1, 2048, 16))
    aheads = [4] * len(choices) if shape.pipelined else [0] * len(choices)
    if shape.pipelined:  # what is fetched ahead may not fit
        choices, aheads = [*choices, choices[1]], [*aheads, 1]
    for (bx, br, warps), ahead in zip(choices, aheads, strict=True):
        rows = tuple((a.block, round_of(a, _piece_of(shape, a, br), 1024)) for a in shape.inner)
        block, size = min(bx, power(x.likely)), max(size for _, size in rows)
        if size < rules.ROW_OF_WARP.limit and not (
            shape.prefetched or any(a.vector for a in shape.inner)
        ):
            # of another length they may be long: as many as fill a block (gradients of norms of
            # 262016 rows of likely 128 bfloat16, and what is around them, 718 us, 2578 us by one);
            # of exponentials by one warp, or rows are shared (focal loss of 500001 rows of likely
            # 81 floats, both passes 249 us, 840 us by one row of four warps, 1179 us by sixteen)
            enough = power(max(1, x.likely // (4 * max(target.sms, 1))))
            fill, warps = (512, 1) if exponentials else (bx * br, warps)
            block = clamp(block, fill // size, max(block, enough))
        most = clamp(1, block * size // 32, warps)
        yield Config(((x.block, block), *rows), most, ahead=ahead)


def _stores_masks(shape: Shape) -> bool:
    """Whether bytes are stored of rows of floats: a thread has four elements then, as it loads at
    once, or they are brought to others through shared memory in each round (H200: quantile losses
    of 1048576 rows of nine, with three masks, 39 us, 48 us by 4096)."""
    inner = shape.row_loops
    stored = {s.value.dtype.itemsize for s in shape.stores if inner & free_vars(s.index)}
    read = {n.dtype.itemsize for n in shape.loads if inner & free_vars(n.src[0])}
    return 1 in stored and 4 in read


def _moves_much(shape: Shape) -> bool:
    """Whether chunks in one piece are walked once, with so much of each element that half a block
    is as much under way (H200: squares of 256 chunks of floats with bfloat16 added, which are
    stored, 170 us in blocks of 4096, 175 us of 8192, 204 us of 2048 by eight warps)."""
    inner = shape.row_loops
    if shape.reread or shape.pipelined or len(inner) != 1:
        return False
    stored = {s.buffer: s.value.dtype.itemsize for s in shape.stores if inner & free_vars(s.index)}
    read = {n.arg: n.dtype.itemsize for n in shape.loads if inner & free_vars(n.src[0])}
    return bool(stored) and len(read) > 1 and sum(stored.values()) + sum(read.values()) >= 10


def _largest(shape: Shape) -> int:
    """Of how many rows the largest value is looked for, as of several that exponentials are of."""
    nodes = {n for n in shape.nodes if n.op == "reduce"}
    return sum(n.arg.kind == "max" for n in nodes)


def _one_walk(shape: Shape, target: Target) -> Iterable[Config]:
    """Small blocks of many threads, four rows on an SM (H200: average of 960 rows of 36864
    bfloat16 18.1 us, 20.0 us in blocks of 4096; squares of 2731 rows of 27520 floats 68 us, 71
    us of 8192; of 300 of 262144 bfloat16 37 us, 45 us). Where a few rows would be left over, all
    of them at once by fewer threads, with the next blocks under way (of 542 rows of 262144
    float16 65 us, 69 us; of 530 of 200000 floats 98 us, 104 us)."""
    x = shape.parallel[0]
    choices = [(2048, 16, 1), (8192, 16, 1), (2048, 4, 1)]
    if shape.pipelined and 4 * target.sms < x.likely <= 5 * target.sms:
        choices.insert(0, (2048, 4, 5))
    for br, warps, ahead in choices:
        rows = tuple((a.block, round_of(a, br, 1024)) for a in shape.inner)
        yield Config(((x.block, 1), *rows), warps, ahead=ahead if shape.pipelined else 0)


def of_walked_rows(program: Program, shape: Shape, target: Target) -> Iterable[Config]:
    """Small blocks, for those at the ends take long (H200: cumulative sums of 2048 rows of 20001
    floats 96 us by 2048 of eight warps, 119 us of four, 133 us by 4096; of 6000 rows of 14001
    bfloat16 113 us by 1024, 144 us by 2048). Longer ones where rows are few (377 rows of 175001
    bfloat16 84 us by 4096, 94 us by 2048)."""
    x, (r,) = shape.parallel[0], shape.inner
    wide, few = max(sizes(program, shape)) > 2, x.likely < 4 * target.sms
    if shape.row_programs:  # two on an SM, no less
        yield Config(((x.block, 1), (r.block, 2048 if wide else 4096)), 8, registers=128)
        return
    choices = [(2048, 8), (1024, 4)] if wide else [(1024, 2), (2048, 4)]
    if few and not wide:
        choices.insert(0, (4096, 8))
    for size, warps in choices:
        yield Config(((x.block, 1), (r.block, size)), warps)


def of_shared_rows(shape: Shape, vector: int) -> Iterable[Config]:
    """One program on each SM: it alone has to keep memory busy. Of programs in turn there are
    several (H200: batch norm of 256 rows of 200704 bfloat16, four programs each, 77.5 us in
    blocks of 4096, 79.6 us of 8192, 80.6 us of 16384; its backward pass 161, 233 and 271 us)."""
    x = shape.parallel[0]
    choices = [(4096 * vector, 32), (2048 * vector, 16), (1024 * vector, 16), (512 * vector, 16)]
    if shape.ticketed and not shape.reread:
        choices = [(2048, 4), (4096, 8)]
    elif shape.ticketed:
        choices = [choices[3], choices[2], (256 * vector, 8)]
    for size, warps in choices:
        yield Config(((x.block, 1), *((a.block, size) for a in shape.inner)), warps)
