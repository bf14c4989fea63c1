"""Long rows that several programs hold together.

A row that is too long for one program to hold is held by several that are at work at once. Each
folds what it has and leaves that; they meet, and each goes on with what it holds. So a row is read
once, as long as all SMs together have registers for it.

A row may be planes that are apart in memory, as a channel of images is. Where these are
misaligned, each program has whole planes of it, or parts of one: they are moved from sixteen
bytes to sixteen bytes then (`tile/peeled.py`), and what a plane has in common, as a channel's
scale, is one number.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.row_configs import held_at_once
from tilewright.codegen.triton.plan.tiling import Axis, Shape, cannot_hand_over, cannot_share
from tilewright.codegen.triton.strategies.chunked import is_expensive_to_repeat, rows_read
from tilewright.codegen.triton.strategies.misaligned_rows import misaligned_rows
from tilewright.ir import index as ix
from tilewright.schedule.nests.hints import hint_product


def cooperative_rows(facts: KernelFacts) -> Shape | str:
    """The shape with rows that programs hold together, where they are too long to stay in cache
    until they are walked again, or would be moved one element at a time (H200: log softmax of 956
    rows of 183232 bfloat16 235 us, 249 us walked; batch norm of 256 rows of 64 planes of 56x56
    74.7 us, 77.1 us, of 320 rows of 56 planes of 69x69 129 us, 219 us, of 256 of 256 planes of
    31x31 113 us, 169 us; group norm of 512 rows of 16 channels of 63x63 52 us, 84 us. But of rows
    of 65536 that stay in cache 46 us, 44 us)."""
    shape = facts.shape
    if reason := facts.not_rows or facts.not_plain or facts.finds_places or facts.draws:
        return reason
    if not shape.reread:
        return "rows are read once"
    if is_expensive_to_repeat(shape):
        return "what is computed of rows is too expensive to repeat after each reduction"
    if not shape.parallel[0].size or not facts.length:
        return "sizes are known only at the call"
    whole = _held(facts, shape)
    if isinstance(whole, Shape):
        return whole
    planes = _planes(shape)
    of_planes = whole if planes is None else _held(facts, planes)
    return of_planes if isinstance(of_planes, Shape) else whole


def _planes(shape: Shape) -> Shape | None:
    """With whole planes of a row for each program, where these are misaligned."""
    axis = shape.inner[0]
    *planes, last = axis.loops
    new = Axis(axis.name, (last,), axis.dim)
    if not planes or (new.size or 0) < rules.COOPERATIVE_PLANE.limit or (new.size or 0) % 8 == 0:
        return None
    segments = tuple((s, None if a is None else new) for s, a in shape.segments)
    return replace(shape, segments=segments, planes=tuple(planes))


def _held(facts: KernelFacts, shape: Shape) -> Shape | str:
    group, target = facts.group, facts.target
    shape = replace(shape, persistent=True, pipelined=False, row_programs=1, ticketed=True)
    rows = rows_read(group.local, shape.flat())
    count = sum(n.dtype.itemsize for n in rows) // 2  # of sixteen bits
    if not count:
        return "no row of floats is read along memory"
    planes = hint_product(v.src[0] for v in shape.planes)
    size = shape.inner[0].size or 0
    shortest = rules.COOPERATIVE_PLANES.limit if planes > 1 else rules.COOPERATIVE_ROW.limit
    if size * len(rows) * planes < shortest:
        return f"rows are shorter than {shortest} elements: they stay in cache"
    several = _several(shape, size * count)
    warps = (
        rules.COOPERATIVE_WARPS.limit
        if size * several * count > rules.COOPERATIVE_SMALL_PART.limit
        else rules.COOPERATIVE_WARPS.limit // 2
    )
    block = 32 * held_at_once(shape) * warps
    each = _each(size, count, block, 8 if not shape.pieces(shape.inner[0]) else block)
    shape = replace(shape, chunk=block, part=each, planes_each=several)
    shape = replace(shape, row_programs=planes // several * shape.parts)
    if reason := cannot_share(shape) or cannot_hand_over(group, replace(shape, persistent=False)):
        return reason
    if shape.row_programs > target.sms:  # as many surely run at once
        return "a row takes more programs than surely run at once"
    form = misaligned_rows(facts.program, group, shape)
    return "rows are misaligned, and not all of them alike" if form.misaligned else form


def _several(shape: Shape, plane: int) -> int:
    """How many planes a program has: as many as half of the warps hold, all of them alike."""
    last = (ix.value_of(shape.planes[-1].src[0]) or 1) if shape.planes else 1
    fits = [
        k
        for k in range(1, last + 1)
        if last % k == 0 and k * plane <= rules.COOPERATIVE_SMALL_PART.limit
    ]
    return max(fits, default=1)


def _each(size: int, count: int, block: int, step: int) -> int:
    """Elements of a part, of as few as leave little of their blocks empty."""
    least = -(-size * count // rules.COOPERATIVE_PART.limit)
    if least == 1:
        return size
    found = [-(-size // (parts * step)) * step for parts in range(least, 2 * least)]
    filled = [-(-size // each) * -(-each // block) for each in found]
    enough = min(filled) + min(filled) // 32
    return next(each for each, blocks in zip(found, filled, strict=True) if blocks <= enough)
