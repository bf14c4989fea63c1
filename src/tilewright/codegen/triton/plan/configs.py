"""Block sizes, warps and stages: a first choice from a small model, and a few to measure.

The model wants sixteen bytes per thread and access, several of them in flight, and enough programs
to fill the card.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from tilewright import rules
from tilewright.codegen.triton.analysis.accesses import reads_rows, sizes, vector_of, writes_rows
from tilewright.codegen.triton.analysis.work import has_long_code, is_heavy
from tilewright.codegen.triton.plan.column_configs import (
    of_columns,
    of_long_columns,
    of_scanned_columns,
    of_slid_columns,
)
from tilewright.codegen.triton.plan.config import MOST_WARPS, Config, clamp, power
from tilewright.codegen.triton.plan.grid_order import columns_at_once
from tilewright.codegen.triton.plan.row_configs import (
    of_held_rows,
    of_long_rows,
    of_rows,
    of_rows_in_order,
    of_shared_rows,
    of_walked_rows,
)
from tilewright.codegen.triton.plan.tiling import Axis, Shape, is_narrow
from tilewright.codegen.triton.strategies.unrolled_columns import of_unrolled
from tilewright.codegen.triton.tile.interleaved import interleaved, is_even, step
from tilewright.ir import index as ix
from tilewright.ir.expr import free_vars, loads, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Program
from tilewright.schedule.nests.hints import hint_product
from tilewright.target import Target


def _is_seldom(shape: Shape) -> bool:
    """Whether all that is stored is held back by a mask: most threads have nothing to do but to
    find that out, so they are few and have many elements each."""
    return all(s.mask is not None for s in shape.stores)


def configs(program: Program, shape: Shape, target: Target) -> tuple[Config, ...]:
    """Best first, each once."""
    vector = vector_of(program, shape)
    heavy = is_heavy(shape)
    if shape.family == "poi" and shape.serial:  # how far its loops run depends on the one point
        found = [Config(((shape.parallel[0].block, 1),), 1)]
    elif shape.family == "poi":
        x = shape.parallel[0]
        if shape.gathered:
            few = columns_at_once(program.buffers, shape, target)
            found = [*_columns_first(shape, vector, few), *_row_pieces(shape, vector, target)]
        else:
            many = 1 if heavy else _at_once(program, shape, vector)
            found = (_tiled(program, shape, target) if shape.rank > 1 else list(_sampled(shape))
                     or [*_looked_up(shape, target), *_flat(x, many, target)])  # fmt: skip
    elif shape.chunk:
        found = of_held_rows(program, shape)
    elif shape.staged:
        found = of_slid_columns(shape)
    elif shape.unrolled:
        found = of_unrolled(program, shape)
    elif shape.column_threads:
        found = of_scanned_columns(program, shape)
    elif shape.preloaded:
        (x,), (r,), size = shape.parallel, shape.inner, shape.preloaded
        found = [Config(((x.block, 1), (r.block, size)), size // (32 * r.vector))]
    elif shape.prefetched_scan:
        found = of_walked_rows(program, shape, target)
    elif shape.row_programs:
        found = of_shared_rows(shape, vector)
    elif not shape.persistent:
        found = (
            of_long_columns(shape, vector, target) if shape.across else of_long_rows(shape, target)
        )
    elif shape.serial:
        found = of_rows_in_order(program, shape, target)
    else:
        found = (
            of_columns(shape, vector, target) if shape.across else of_rows(program, shape, target)
        )
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
    known, _ = interleaved(flat, program.buffers, frozenset())
    axis = flat.parallel[-1]
    apart = {n.arg for n in flat.loads if n not in known and 2 <= step(n.src[0], axis) <= 8}
    large = max((hint_product(program.buffers[b].size) for b in apart), default=0)
    if 8 * large >= axis.likely:  # not for tables, which stay in cache
        return 1
    # of several wide tensors fewer, for their registers (H200: adamw of 4114805 floats 33.8 us,
    # 37.7 us by eight; of 11832117 88.0 us, 91.8 us)
    read = {n.arg: n.dtype.itemsize for n in flat.loads
            if ix.coefficient(n.src[0], axis.var) is ix.ONE}  # fmt: skip
    if 2 * vector * sum(read.values()) > rules.BYTES_OF_THREAD.limit:
        return 4
    # of many floats one access each (lion of 33554432 157.3 us, 159.8 us; adam 222.4 us, 223.9 us;
    # sums of two 93.2 us, 93.6 us)
    written = flat.written
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
    places = (n for e in flat.loads for n in walk(e.src[0]))
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
    nodes = flat.nodes
    moved = {n.arg for n in nodes if n.op == "load" and free_vars(n.src[0])}
    moved |= flat.written
    bytes_ = {vector * program.buffers[b].dtype.itemsize for b in moved}
    return max(bytes_, default=0) > 16 <= min(bytes_)


def _computes(shape: Shape) -> bool:
    """Whether more than a few instructions are made of an element."""
    return any(n.op in TABLE and TABLE[n.op].cost >= 20 for n in shape.nodes)


def _flat(axis: Axis, vector: int, target: Target) -> Iterable[Config]:
    """Two accesses of sixteen bytes per thread (H200: bias and gelu of 16384x8192 bfloat16 128 us,
    135 us with one); smaller blocks where a few programs would do all the work."""
    room = power(axis.likely / (2 * max(target.sms, 1)))
    block = clamp(32 * vector, room, 256 * vector)
    block = min(block, max(32, power(axis.likely)))
    for size, share in ((block, 64), (block // 2, 64), (block, 32), (2 * block, 64)):
        if size >= 32:
            yield Config(((axis.block, size),), clamp(1, size // (share * vector), 8))


def _sampled(shape: Shape) -> Iterable[Config]:
    """One element a thread where many are gathered for it: no access has neighbours, and the
    places of all have registers (H200: three channels sampled by four neighbours each 97 us, 119
    us by four elements)."""
    (x,) = shape.parallel
    if sum(bool(loads(n.src[0])) for n in loads(*(e for m in shape.members for e in m.exprs))
           ) >= rules.SAMPLES.limit:  # fmt: skip
        yield from (Config(((x.block, 32 * warps),), warps) for warps in (4, 8, 16))


def _looked_up(shape: Shape, target: Target) -> Iterable[Config]:
    """Large blocks where each element is gathered in a row: more of what a program has read of
    it is read again while it is in cache (H200: gather of 1931 rows of 10600 float16 70 us, 81
    us by 2048; of 1000 rows of 16384 floats 80 us, 113 us by 1024)."""
    (x,) = shape.parallel
    if x.likely >= 8192 * target.sms and any(
        free_vars(i) for n in shape.loads
        for i in walk(n.src[0]) if i.op == "index"):  # fmt: skip
        yield Config(((x.block, 4096),), 16)


def _tiled(program: Program, shape: Shape, target: Target) -> Iterable[Config]:
    """Square tiles, as far as the loops are long enough; large ones where memory is all there is
    to wait for (H200: 8191x8191 bfloat16 transposed 87 us, 122 us in tiles of 64 by 64;
    512x400x640 reversed 138 us, 150 us; 8191x8191 float32 155 us, 187 us). Small ones where what
    is loaded at once cannot be stored so (559x363x1024 bfloat16 turned 228 us, 315 us). A second
    tile that would be almost empty is part of the first (rows of 134: 178 us, 205 us)."""
    *rest, y, x = shape.parallel
    fixed = tuple((a.block, clamp(1, power(a.likely), 8)) for a in rest)
    choices = [(64, 64, 8), (32, 64, 4), (64, 32, 4), (32, 32, 4), (128, 32, 8), (8, 128, 4)]
    read = {n.arg for n in shape.loads}
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
    read = [n.src[0] for n in flat.loads]
    written = [s.index for s in flat.stores]
    return all(is_even(i, x, 8) or is_even(i, y, 8) for i in read) and not any(
        is_even(i, x, 8) for i in written)  # fmt: skip


def _columns_first(shape: Shape, vector: int, most: int) -> Iterable[Config]:
    """Pieces of rows that come again (`plan/grid_order.py`)."""
    y, x = shape.parallel
    if 0 < most < 128 * vector and most < x.likely:
        by = clamp(1, 256 * vector // most, power(y.likely))
        yield Config(((y.block, by), (x.block, most)), clamp(1, by * most // (64 * vector), 4))


def _row_pieces(shape: Shape, vector: int, target: Target) -> Iterable[Config]:
    """Short pieces of many rows (H200: 65536 rows of 2048 bfloat16 124 us with 64 pieces of 128,
    133 us with one of 1024); blocks that divide a row need no mask. With no more registers than
    let all threads run (gradient of cross entropy of 8192x32000 bfloat16 255 us with 32, 277 us
    with 34; of 50257 420 us, 444 us with 40). Where each row gathers many, one at a time
    (gathered gradients of 2048 bfloat16 132 us, 200 us in short pieces). Where rows are
    gathered, few of them: what a program waits for first is not to hold up much (2358 rows of
    5159 bfloat16 15.1 us by two, 19.5 us by sixteen; 14367 of 743 14.6 us, 18.5 us; 2227 of 4040
    floats 19.7 us, 20.3 us; 65536 of 2048 bfloat16 125 us either way)."""
    y, x = shape.parallel
    size = x.size or x.likely
    even = size & -size
    if has_long_code(shape):
        # a tile of which a quarter is empty computes it too: pieces of whole sectors have no rest
        sparse = 4 * size <= 3 * power(size)
        whole = even >= (32 if sparse else 16 * vector)
        bx = min(even if whole else power(size), 64 * vector)
        by = clamp(1, 256 * vector // bx, power(y.likely))
        yield Config(((y.block, by), (x.block, bx)), clamp(1, by * bx // 256, 4))
    if _is_seldom(shape):
        bx = min(power(size), 256 * vector)
        yield Config(((y.block, 4), (x.block, bx)), clamp(1, bx // (64 * vector), 4))
    if sum(n.op == "index" for n in shape.nodes) > 2:
        bx = min(power(size), 256 * vector)
        yield Config(((y.block, 1), (x.block, bx)), clamp(1, bx // (64 * vector), 16))
    elif reads_rows(shape) or writes_rows(shape, "add") or writes_rows(shape, "set"):
        # rows that are only put elsewhere are less to wait for (262144 of 128 bfloat16 35.4 us by
        # eight, 35.6 us by sixteen, 36.0 us by 64)
        put = writes_rows(shape, "set") and not reads_rows(shape)
        each = (32 if put else 64) * vector  # elements of a warp
        bx = min(even if even >= 16 * vector else power(size), 128 * vector)
        enough = y.likely * -(-size // bx) // (2 * max(target.sms, 1))
        by = clamp(1, 4 * each // bx, power(enough))
        yield Config(((y.block, by), (x.block, bx)), clamp(1, by * bx // each, 4))
    if size >= rules.LONG_ROW.limit and not _computes(shape):
        # 10560 planes of 128x128 bfloat16 scaled 165 us, 170 us with eight warps
        yield Config(((y.block, 1), (x.block, 256 * vector)), 4)
    if (
        size >= rules.LONG_ROW.limit
    ):  # one row (849 of 100277 bfloat16 85 us, 95 us; 300 floats 65 us, 85 us)
        for registers in (32, None):
            yield Config(((y.block, 1), (x.block, 512 * vector)), 8, registers=registers)
    # of misaligned rows longer pieces (50257 bfloat16: 438 us by 512, 447 us by 128)
    lengths = (64, 128, 32) if x.start is not None else (16, 128, 32)
    most: list[int | None] = [32, None, None, None]  # as many threads as there is room for
    for piece, registers in zip((n * vector for n in (lengths[0], *lengths)), most, strict=True):
        bx = min(even, piece) if even >= 16 * vector else min(power(size), piece)
        enough = y.likely * -(-size // bx) // (2 * max(target.sms, 1))
        by = clamp(1, 1024 * vector // bx, power(enough))
        warps = clamp(1, by * bx // (64 * vector), 16)
        yield Config(((y.block, by), (x.block, bx)), warps, registers=registers)
