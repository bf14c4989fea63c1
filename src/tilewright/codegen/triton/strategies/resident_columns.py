"""Columns that a program holds as they are in memory.

Where memory runs across, a program has whole columns that are reduced and then used again. As
floats those of sixteen bits take twice the registers, and few threads would do: those that share
columns do so by shared memory. As the sixteen bits they have in memory twice as many fit
(`held`). In pieces, of which a thread has what it loads at once, all of them have one address.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.analysis.operations import uses
from tilewright.codegen.triton.plan.config import MOST_WARPS, Config, clamp, power
from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.codegen.triton.strategies.chunked import is_expensive_to_repeat, is_own
from tilewright.codegen.triton.tile.interleaved import is_even
from tilewright.ir.expr import free_vars
from tilewright.schedule.fusion.group import Group
from tilewright.target import Target

NARROW = frozenset((torch.float16, torch.bfloat16))
FLOATS = frozenset((torch.float32,))
IN_PIECES = range(129, 257)  # rows of columns of sixteen bits that are


def resident_columns(facts: KernelFacts) -> Shape | str:
    """The shape with columns as they are in memory, where they are many, even, used again after
    a reduction, and so long that floats of them take too many threads (H200: norm over 1 of
    32x192x96x96 bfloat16 59 us, 71 us as floats; of 42x384x64x64 70 us, 100 us; of 21x768x64x64
    72 us, 108 us). Longer ones where only one reduction is before what is stored (RMS norm of
    256 rows 70 us, 69 us as floats; 384 69 us, 72 us; 1024 77 us, 96 us; layer norm of 256 74
    us, 69 us; 512 80 us, 93 us; 2048 103 us, 119 us) or exponentials are (softmax of 512 rows 79
    us, 71 us as floats; 768 82 us, 93 us; 2048 106 us, 117 us); shorter of these in pieces
    (norms of 32x256x64x64 35.4 us, 40.6 us as floats). Columns of floats that are too long for
    one tile are held in pieces too (128x3000x80 without their mean and divided by their
    deviation 106 us, 142 us walked three times)."""
    shape, group = facts.shape, facts.group
    if reason := facts.not_columns or facts.not_plain or facts.finds_places or facts.draws:
        return reason
    if shape.row_programs:
        return "several programs share a column"
    if not shape.reread:
        return "columns are read once"
    if is_expensive_to_repeat(shape):
        return "what is computed of columns is too expensive to repeat after each reduction"
    if facts.rows < rules.RESIDENT_COLUMNS_PER_SM.limit * facts.target.sms:
        return f"fewer than {rules.RESIDENT_COLUMNS_PER_SM.limit} columns for each SM"
    held = _rows_of_floats(group, shape)
    if shape.persistent and _is_one_tile(group, facts.flat, NARROW):
        buffers = facts.program.buffers
        stored = {buffers[b].dtype for m in shape.members for b in m.writes - group.local}
        if stored <= NARROW or not _divides(shape):  # which is rounded as a division
            held = _rows_of_halves(shape)
    if not held:
        return "columns are not one tile of sixteen-byte pieces, or fit in registers as floats"
    return replace(shape, chunk=held, persistent=True, pipelined=False)


def _rows_of_halves(shape: Shape) -> int:
    """Of each piece of columns of sixteen bits, or of the one tile that they are; none: columns are
    held as floats."""
    size = shape.inner[0].size or 1
    walks = sum(axis is not None for _, axis in shape.segments)
    exponentials = "exp" in shape.ops
    if walks == 2 and not exponentials and size in IN_PIECES and _folds_one_sum(shape):
        return rules.COLUMN_PIECE.limit
    least = 512 if exponentials else 256 if walks == 2 else 64
    return power(size) if size > least else 0


def _folds_one_sum(shape: Shape) -> bool:
    kinds = {n: n.arg.kind for n in shape.nodes if n.op == "reduce"}
    return list(kinds.values()) == ["sum"]


def _rows_of_floats(group: Group, shape: Shape) -> int:
    """The same of columns of floats that no tile holds."""
    size = shape.inner[0].size or 0
    if shape.persistent or not 0 < size <= rules.FLOAT_COLUMN.limit:
        return 0
    if "exp" in shape.ops or not _is_one_tile(group, shape.flat(), FLOATS):
        return 0
    return 256 if 2 * size > rules.FLOAT_COLUMN.limit else 128


def configs_of_columns(shape: Shape, target: Target) -> tuple[Config, ...]:
    """128 bytes of a row, 64 of long or few columns, by few threads with 128 elements each; with
    64 where exponentials are computed and two programs fit an SM then (H200: softmax over 1 of
    16x1024x4096 bfloat16 78 us by sixteen warps, 90 us by eight), or in pieces (norms of
    32x256x64x64 35.4 us by eight warps with 64 registers, 39.7 us by four with 128)."""
    x, (axis,), size = shape.parallel[0], shape.inner, shape.chunk
    if size < (axis.size or 0):
        return _of_pieces(shape)
    many = x.likely >= 4 * 64 * target.sms and "welford" not in shape.reductions
    block = 64 if size <= 512 and many else 32
    share = 64 if size <= 1024 and "exp" in shape.ops else 128
    warps = clamp(1, size * block // (32 * share), MOST_WARPS)
    blocks = ((x.block, block), (axis.block, size))
    return tuple(Config(blocks, warps, registers=most) for most in (share, None))


def _of_pieces(shape: Shape) -> tuple[Config, ...]:
    """A piece is what all threads load at once. Of floats each has as many as let two programs
    run on an SM, though some of them spill then (H200: 128x3000x80 105.7 us with 64 registers,
    111.8 us by half the threads with 128)."""
    x, (axis,), rows = shape.parallel[0], shape.inner, shape.chunk
    of_halves = rows == rules.COLUMN_PIECE.limit
    block, each = (64, 8) if of_halves else (rules.FLOAT_COLUMNS.limit, 4)
    blocks = ((x.block, block), (axis.block, rows))
    return (Config(blocks, rows * block // (32 * each), registers=64),)


def _divides(shape: Shape) -> bool:
    """Whether what is stored of columns is divided."""
    (axis,) = shape.inner
    stored = [m for m in shape.members if not m.reduce and set(axis.loops) & set(m.loops)]
    return uses(stored, "div")


def _is_one_tile(group: Group, flat: Shape, kinds: Set[torch.dtype]) -> bool:
    """Whether one tile of such a type is read, and all tiles are moved sixteen bytes at once."""
    x, (axis,) = flat.parallel[0], flat.inner
    made = flat.written
    read = {n for n in flat.loads if is_own(flat, n) and n.arg not in group.local}
    if any(n.dtype not in kinds or n.src[1:] for n in read):
        return False
    places = [s.index for s in flat.stores if s.buffer not in group.local]
    places = [i for i in places if {x.var, axis.var} <= free_vars(i)]
    together = 16 // min(kind.itemsize for kind in kinds)
    even = all(is_even(i, x, together) for i in [*places, *(n.src[0] for n in read)])
    return even and len({n for n in read if n.arg not in made}) == 1
