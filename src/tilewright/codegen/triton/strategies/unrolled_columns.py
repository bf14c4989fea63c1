"""Short columns of which the place of an extreme is looked for, row after row.

A thread has as many columns as it loads at once, the largest of each so far, and where that was. As
one block it would have all rows of them, twice: once for the largest, and again for its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tilewright import rules
from tilewright.codegen.triton.analysis.accesses import vector_of
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.column_configs import at_once
from tilewright.codegen.triton.plan.config import Config
from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.ir import index as ix
from tilewright.ir.expr import free_vars
from tilewright.ir.program import Program


def unrolled_columns(facts: KernelFacts) -> Shape | str:
    """The shape with columns that are walked so, where there are many and sixteen bytes of a row
    are loaded at once (H200: argmax over 1 of 64x21x256x256 bfloat16 53 us, 61 us as one block; of
    100x61x16384 58 us, 57 us), or rows are enlarged: neighbours read the same."""
    program, shape = facts.program, facts.shape
    if reason := facts.not_columns:
        return reason
    if not shape.persistent:
        return "columns do not fit in registers"
    (segment, axis), *others = shape.segments
    if not facts.finds_places or len(others) > 1:
        return "not only the place of an extreme is looked for"
    if axis is None or not all(m.reduce for m in segment.members):
        return "it does not begin with the reduction"
    if not 0 < facts.length <= rules.COLUMN_OF_THREAD.limit:
        return f"columns have more than {rules.COLUMN_OF_THREAD.limit} elements"
    vector = vector_of(program, shape)
    if (
        facts.rows
        < rules.UNROLLED_PER_SM.limit * 32 * rules.UNROLLED_WARPS.limit * vector * facts.target.sms
    ):
        return "there are too few columns for threads to have whole ones"
    if at_once(program, shape) < vector and not _are_enlarged(shape):
        return "rows are misaligned"
    return replace(shape, persistent=False, pipelined=False, unrolled=True)


def _are_enlarged(shape: Shape) -> bool:
    """Whether places in rows are computed, as those of an image between which others are made."""
    flat = shape.flat()
    x = flat.parallel[0].var
    return any(ix.coefficient(n.src[0], x) is None and x in free_vars(n.src[0]) for n in flat.loads)


def of_unrolled(program: Program, shape: Shape) -> Iterable[Config]:
    x, (r,) = shape.parallel[0], shape.inner
    yield Config(
        ((x.block, 32 * rules.UNROLLED_WARPS.limit * vector_of(program, shape)), (r.block, 1)),
        rules.UNROLLED_WARPS.limit,
    )
