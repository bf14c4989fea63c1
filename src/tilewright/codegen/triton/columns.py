"""Columns of sixteen bits that a program holds as they are in memory.

Where memory runs across, a program has whole columns that are folded and then used again. As floats
they take twice the registers, and few threads would do: those that share columns do so by shared
memory. As the sixteen bits they have in memory twice as many fit (`held`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewright.codegen.triton.blocks import MOST_WARPS, Config, clamp, folds, power
from tilewright.codegen.triton.doubles import is_even
from tilewright.codegen.triton.emit import RANDOM
from tilewright.codegen.triton.held import PLACES, is_dear, is_own
from tilewright.codegen.triton.shape import Shape, scatters, uses
from tilewright.ir.expr import free_vars, loads
from tilewright.ir.program import Program
from tilewright.schedule.group import Group
from tilewright.target import Target

NARROW = frozenset((torch.float16, torch.bfloat16))
EVEN = 8  # columns that are moved at once
FEWEST = 32  # columns for each processor


def holding_columns(program: Program, group: Group, shape: Shape, target: Target) -> Shape:
    """The shape with columns as they are in memory, where they are many, even, used again after a
    fold, and so long that floats of them take too many threads (H200: norm over 1 of 32x192x96x96
    bfloat16 59 us, 71 us as floats; of 42x384x64x64 70 us, 100 us; of 21x768x64x64 72 us, 108 us).
    Longer ones where only one fold is before what is stored (RMS norm of 256 rows 70 us, 69 us as
    floats; 384 69 us, 72 us; 1024 77 us, 96 us; layer norm of 256 74 us, 69 us; 512 80 us, 93 us;
    2048 103 us, 119 us) or exponentials are (softmax of 512 rows 79 us, 71 us as floats; 768 82 us,
    93 us; 2048 106 us, 117 us)."""
    if shape.rank != 2 or not shape.across or not shape.persistent or shape.serial or shape.ragged:
        return shape
    if len(shape.inner) != 1 or not shape.again or uses(shape.members, *RANDOM):
        return shape
    if any(scatters(m) for m in shape.members) or folds(shape, *PLACES) or is_dear(shape):
        return shape
    if any(s.scans for s, _ in shape.segments) or not _is_one_tile(group, shape.flat()):
        return shape
    stored = {program.buffers[b].dtype for m in shape.members for b in m.writes - group.local}
    if _divides(shape) and not stored <= NARROW:  # rounded as a division
        return shape
    size = shape.inner[0].size or 1
    walks = sum(axis is not None for _, axis in shape.segments)
    least = 512 if uses(shape.members, "exp") else 256 if walks == 2 else 64
    if size <= least or shape.parallel[0].likely < FEWEST * target.sms:
        return shape
    return replace(shape, held=power(size))


def configs_of_columns(shape: Shape, target: Target) -> tuple[Config, ...]:
    """128 bytes of a row, 64 of long or few columns, by few threads with 128 elements each; with 64
    where exponentials are computed and two programs fit a processor then (H200: softmax over 1 of
    16x1024x4096 bfloat16 78 us by sixteen warps, 90 us by eight)."""
    x, (axis,), size = shape.parallel[0], shape.inner, shape.held
    many = x.likely >= 4 * 64 * target.sms and not folds(shape, "welford")
    block = 64 if size <= 512 and many else 32
    share = 64 if size <= 1024 and uses(shape.members, "exp") else 128
    warps = clamp(1, size * block // (32 * share), MOST_WARPS)
    blocks = ((x.block, block), (axis.block, size))
    return tuple(Config(blocks, warps, registers=most) for most in (share, None))


def _divides(shape: Shape) -> bool:
    """Whether what is stored of columns is divided."""
    (axis,) = shape.inner
    stored = [m for m in shape.members if not m.reduce and set(axis.loops) & set(m.loops)]
    return uses(stored, "div")


def _is_one_tile(group: Group, flat: Shape) -> bool:
    """Whether one tile of sixteen bits is read, and all tiles are moved sixteen bytes at once."""
    x, (axis,) = flat.parallel[0], flat.inner
    made = {b for m in flat.members for b in m.writes}
    read = {n for m in flat.members for n in loads(*m.exprs)
            if is_own(flat, n) and n.arg not in group.local}  # fmt: skip
    if any(n.dtype not in NARROW or n.src[1:] for n in read):
        return False
    places = [s.index for m in flat.members for s in m.stores if s.buffer not in group.local]
    places = [i for i in places if {x.var, axis.var} <= free_vars(i)]
    even = all(is_even(i, x, EVEN) for i in [*places, *(n.src[0] for n in read)])
    return even and len({n for n in read if n.arg not in made}) == 1
