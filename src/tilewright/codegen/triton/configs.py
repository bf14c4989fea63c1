"""Block sizes, warps and stages: a first choice from a small model, and a few to measure.

The model wants sixteen bytes per thread and access, several of them in flight, and enough programs
to fill the card.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tilewright.codegen.triton.shape import NARROWEST_TILE, Axis, Shape
from tilewright.ir.expr import walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Program
from tilewright.target import Target

MOST_WARPS = 32


@dataclass(frozen=True)
class Config:
    """One way to run a kernel; `blocks` are its constexpr arguments."""

    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int = 2

    @property
    def kwargs(self) -> dict[str, int]:
        return dict(self.blocks)


def power(n: float) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, int(-(-n // 1)) - 1).bit_length()


def clamp(low: int, n: int, high: int) -> int:
    return max(low, min(n, high))


def _vector(program: Program, shape: Shape) -> int:
    """Elements in sixteen bytes of the narrowest buffer the kernel walks."""
    sizes = [program.buffers[b].dtype.itemsize for m in shape.members for b in m.reads | m.writes]
    return clamp(4, 16 // min(sizes, default=4), 8)


def _is_heavy(shape: Shape) -> bool:
    """Whether a special function is among the operations: long code, so few elements a thread."""
    return any(n.op in TABLE and TABLE[n.op].cost >= 60 and n.dtype.is_floating_point
               for m in shape.members for n in walk(*m.exprs))  # fmt: skip


def configs(program: Program, shape: Shape, target: Target) -> tuple[Config, ...]:
    """Best first, each once."""
    vector = _vector(program, shape)
    heavy = _is_heavy(shape)
    if shape.family == "poi" and shape.serial:  # how far its loops run depends on the one point
        found = [Config(((shape.parallel[0].block, 1),), 1)]
    elif shape.family == "poi":
        x = shape.parallel[0]
        if shape.looked_up:
            found = _row_pieces(shape, vector)
        else:
            found = _tiled(shape) if shape.rank > 1 else _flat(x, 1 if heavy else vector, target)
    elif not shape.persistent:
        found = _looped(shape, target)
    else:
        found = _columns(shape) if shape.across else _rows(shape, target)
    chosen = dict.fromkeys(found)
    if heavy:  # one element per thread where threads suffice
        chosen = dict.fromkeys(
            replace(c, num_warps=clamp(c.num_warps, power(_elements(c) / 32), MOST_WARPS))
            for c in sorted(chosen, key=_elements))  # fmt: skip
    return tuple(chosen)


def _elements(config: Config) -> int:
    return math.prod(size for _, size in config.blocks)


def _flat(axis: Axis, vector: int, target: Target) -> Iterable[Config]:
    """Blocks of a thousand elements; smaller where a few programs would do all the work."""
    room = power(axis.likely / (2 * max(target.sms, 1)))
    block = clamp(32 * vector, room, 128 * vector)
    block = min(block, max(32, power(axis.likely)))
    for size in (block, 2 * block, block // 2, 4 * block):
        if size >= 32:
            yield Config(((axis.block, size),), clamp(1, size // (32 * vector), 8))


def _tiled(shape: Shape) -> Iterable[Config]:
    """Square tiles, as far as the loops are long enough."""
    *rest, y, x = shape.parallel
    fixed = tuple((a.block, clamp(1, power(a.likely), 8)) for a in rest)
    for across, along, warps in ((64, 64, 8), (32, 64, 4), (64, 32, 4), (32, 32, 4), (128, 32, 8),
                                 (8, 128, 4)):  # fmt: skip
        by = min(across, power(y.likely))
        bx = min(along * (across // by), power(x.likely))
        by = min(by * max(1, along // bx), power(y.likely))
        yield Config((*fixed, (y.block, by), (x.block, bx)), clamp(1, by * bx // 256, warps))


def _row_pieces(shape: Shape, vector: int) -> Iterable[Config]:
    """Pieces of a row, several rows of short ones; blocks that divide a row need no mask."""
    y, x = shape.parallel
    size = x.size or x.likely
    even = size & -size
    for piece in (128 * vector, 256 * vector, 64 * vector):
        bx = min(even, piece) if even >= 16 * vector else min(power(size), piece)
        by = min(max(1, piece // bx), power(y.likely))
        yield Config(((y.block, by), (x.block, bx)), clamp(1, by * bx // (32 * vector), 8))


def _rows(shape: Shape, target: Target) -> Iterable[Config]:
    """Whole rows, several of them where they are short; 32 elements per thread are fastest (H200:
    softmax of 8192 bfloat16 75 us, against 80 us with 16 and 107 us with 8)."""
    x = shape.parallel[0]
    rows = [(a.block, power(a.size or 1)) for a in shape.inner]
    longest = max((size for _, size in rows), default=1)
    enough = max(1, x.likely // (4 * max(target.sms, 1)))
    for tile, share in ((4096, 32), (2048, 16), (8192, 32), (4096, 16), (2048, 8)):
        block = clamp(1, tile // longest, power(enough))
        block = 1 if shape.serial else min(block, power(x.likely))
        warps = clamp(1, power(longest * block / (32 * share)), MOST_WARPS)
        yield Config(((x.block, block), *rows), warps)


def _columns(shape: Shape) -> Iterable[Config]:
    """Whole columns, as many side by side as memory reads at once."""
    x = shape.parallel[0]
    rows = [(a.block, power(a.size or 1)) for a in shape.inner]
    longest = max(size for _, size in rows)
    for tile, share in ((8192, 16), (4096, 16), (16384, 32), (32768, 32)):
        block = min(clamp(NARROWEST_TILE, tile // longest, 128), power(x.likely))
        warps = clamp(1, power(longest * block / (32 * share)), MOST_WARPS)
        yield Config(((x.block, block), *rows), warps)


def _looped(shape: Shape, target: Target) -> Iterable[Config]:
    """Along the rows where memory runs along them, else along the parallel axis. With fewer rows
    than the card runs programs, each gets more threads (H200: statistics of 256 channels 26 us with
    16 warps, 72 us with 8)."""
    x = shape.parallel[0]
    few = x.likely < 4 * target.sms
    if shape.across:
        choices = [(64, 64, 16), (32, 64, 8), (64, 32, 8), (32, 128, 16), (128, 32, 16)]
    else:
        choices = [(1, 2048, 8), (1, 4096, 16), (1, 1024, 4), (4, 512, 8), (1, 8192, 16)]
    if few and not shape.across:
        choices = [(1, 4096, 16), (1, 8192, 16), (1, 2048, 8), (1, 8192, 32)]
    for bx, br, warps in choices:
        block = min(bx, power(x.likely))
        rows = tuple((a.block, clamp(8, power(a.likely), br)) for a in shape.inner)
        yield Config(((x.block, block), *rows), warps)
