"""Short columns of which the place of an extreme is looked for, row after row.

A thread has as many columns as it loads at once, the largest of each so far, and where that was. As
one block it would have all rows of them, twice: once for the largest, and again for its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tilewright.codegen.triton.blocks import Config, folds, vector_of
from tilewright.codegen.triton.column_configs import LONGEST_OF_THREAD, at_once
from tilewright.codegen.triton.shape import Shape
from tilewright.ir import index as ix
from tilewright.ir.expr import free_vars, loads
from tilewright.ir.program import Program
from tilewright.target import Target

WARPS = 2
FEWEST = 4  # programs for each processor


def unrolled(program: Program, shape: Shape, target: Target) -> Shape:
    """The shape with columns that are walked so, where there are many and sixteen bytes of a row
    are loaded at once (H200: argmax over 1 of 64x21x256x256 bfloat16 53 us, 61 us as one block; of
    100x61x16384 58 us, 57 us), or rows are enlarged: neighbours read the same."""
    if shape.rank != 2 or not shape.across or not shape.persistent or shape.serial or shape.ragged:
        return shape
    if len(shape.segments) > 2 or len(shape.inner) != 1 or not folds(shape, "argmin", "argmax"):
        return shape
    segment, axis = shape.segments[0]
    if axis is None or not 0 < (axis.size or 0) <= LONGEST_OF_THREAD or not all(
        m.reduce for m in segment.members):  # fmt: skip
        return shape
    vector = vector_of(program, shape)
    many = shape.parallel[0].likely >= FEWEST * 32 * WARPS * vector * target.sms
    if not many or (at_once(program, shape) < vector and not _are_enlarged(shape)):
        return shape
    return replace(shape, persistent=False, ahead=False, unrolled=True)


def _are_enlarged(shape: Shape) -> bool:
    """Whether places in rows are computed, as those of an image between which others are made."""
    flat = shape.flat()
    x = flat.parallel[0].var
    return any(ix.coefficient(n.src[0], x) is None and x in free_vars(n.src[0])
               for m in flat.members for n in loads(*m.exprs))  # fmt: skip


def of_unrolled(program: Program, shape: Shape) -> Iterable[Config]:
    x, (r,) = shape.parallel[0], shape.inner
    yield Config(((x.block, 32 * WARPS * vector_of(program, shape)), (r.block, 1)), WARPS)
