"""Block sizes, warps and stages: a first choice from a small model, and a few to measure.

The model wants sixteen bytes per thread and access, several of them in flight, and enough programs
to fill the card.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.codegen.triton.shape import Axis, Shape, run_along
from tilewright.ir.program import Program
from tilewright.target import Target

MOST_WARPS = 32
MOST_ELEMENTS = 1 << 16  # of a tile: Triton allows more, registers do not


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


def configs(program: Program, shape: Shape, target: Target) -> tuple[Config, ...]:
    """Best first, each once."""
    vector = _vector(program, shape)
    if shape.family == "poi":
        found = _flat(shape.parallel[0], vector, target) if shape.rank == 1 else _tiled(shape)
    elif shape.persistent:
        found = _persistent(shape, target)
    else:
        found = _looped(shape, runs_across(program, shape))
    return tuple(dict.fromkeys(found))


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


def _persistent(shape: Shape, target: Target) -> Iterable[Config]:
    x = shape.parallel[0]
    rows = [(a.block, power(a.size or 1)) for a in shape.inner]
    longest = max(size for _, size in rows)
    enough = max(1, x.likely // (4 * max(target.sms, 1)))
    for tile, share in ((4096, 16), (2048, 16), (4096, 32), (2048, 8), (8192, 32)):
        block = clamp(1, tile // longest, power(enough))
        block = min(block, power(x.likely))
        warps = clamp(1, power(longest * block / (32 * share)), MOST_WARPS)
        yield Config(((x.block, block), *rows), warps)


def _looped(shape: Shape, across: bool) -> Iterable[Config]:
    """Along the rows where memory runs along them, else along the parallel axis."""
    x = shape.parallel[0]
    choices = ((64, 32, 8), (32, 64, 8), (128, 16, 8), (64, 64, 16), (32, 32, 4)) if across else (
        (1, 2048, 8), (1, 4096, 16), (1, 1024, 4), (4, 512, 8), (1, 8192, 16))  # fmt: skip
    for bx, br, warps in choices:
        block = min(bx, power(x.likely))
        rows = tuple((a.block, min(br, power(a.likely))) for a in shape.inner)
        yield Config(((x.block, block), *rows), warps)


def runs_across(program: Program, shape: Shape) -> bool:
    """Whether consecutive points of the parallel axis are consecutive in memory, not the rows'."""
    loops = [v for axis in shape.axes for v in axis.loops]
    along = run_along(program, shape.members, loops)
    across = max((along.get(v, 0) for v in shape.parallel[0].loops), default=0)
    return across > max(along.get(v, 0) for axis in shape.inner for v in axis.loops)
