"""Which rows are walked from sixteen bytes to sixteen bytes though they begin anywhere in memory
(`lean.py` says how)."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.triton.configs import is_heavy
from tilewright.codegen.triton.emit import RANDOM
from tilewright.codegen.triton.shape import SHORTEST_LEAN, Axis, Shape, scatters, uses
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, syms
from tilewright.ir.program import Program
from tilewright.schedule.group import Group
from tilewright.schedule.sizes import hint, hint_product

PIECE = 16  # elements of a piece of a tensor that is one row: sixteen bytes of any type
SHORTEST_WHOLE = 1 << 16  # elements of such a tensor: smaller ones are in cache
WIDEST = 2  # bytes of elements that are worth it: wider ones fill lines as they are


def leaning(program: Program, group: Group, shape: Shape) -> Shape:
    """The shape with an axis that leans, where that lets most of what it moves move at once."""
    axis = _last(shape)
    if axis is not None and axis.likely >= SHORTEST_LEAN:
        guide = _guide(program, group, shape.flat(), axis)
    else:
        axis, guide = shape.parallel[0], _end(group, shape)
    if guide is None:
        return shape
    new = replace(axis, lean=guide[0], piece=guide[1])
    return replace(
        shape, parallel=tuple(new if a is axis else a for a in shape.parallel),
        segments=[(s, new if a is axis else a) for s, a in shape.segments])  # fmt: skip


def _last(shape: Shape) -> Axis | None:
    """The axis that memory runs along, where it is one that can lean."""
    if shape.rank != 2 or shape.across or shape.serial or shape.shared or shape.ragged:
        return None
    if any(s.scans for s, _ in shape.segments) or uses(shape.members, *RANDOM):
        return None
    if any(scatters(m) for m in shape.members):
        return None
    if shape.inner:
        return shape.inner[0] if len(shape.inner) == 1 else None
    return shape.parallel[1] if shape.looked_up else None


def _end(group: Group, shape: Shape) -> tuple[Expr, int] | None:
    """Of a tensor that is walked as one row, its place and pieces: the last may not be whole (H200:
    bias and silu of 2313x54179 bfloat16 121 us, 418 us one element at a time)."""
    if shape.rank != 1 or shape.serial or shape.ragged or shape.inner or is_heavy(shape):
        return None
    (axis,) = shape.parallel
    if axis.likely < SHORTEST_WHOLE or _is_even(axis.extent, PIECE):
        return None
    flat = shape.flat()
    if any(scatters(m) for m in flat.members):
        return None
    moved = [n.src[0] for m in flat.members for n in loads(*m.exprs) if n.arg not in group.local]
    moved += [s.index for m in flat.members for s in m.stores if s.buffer not in group.local]
    along = any(ix.mod(ix.sub(i, axis.var), PIECE) is ix.ZERO
                and axis.var not in free_vars(ix.sub(i, axis.var)) for i in moved)  # fmt: skip
    return (ix.ZERO, PIECE) if along else None


def _guide(program: Program, group: Group, flat: Shape, axis: Axis) -> tuple[Expr, int] | None:
    """Where a row begins in what most is moved of, and the elements of sixteen bytes of that."""
    moved: dict[tuple[Expr, int], int] = {}
    nodes = [n for m in flat.members for n in loads(*m.exprs) if n.arg not in group.local]
    stores = [s for m in flat.members for s in m.stores if s.buffer not in group.local]
    read = {n.arg for n in nodes if axis.var in free_vars(n.src[0])}
    if any(s.buffer in read for s in stores if axis.var in free_vars(s.index)):
        return None  # what a thread stores at once others still have to read
    accesses = {(n.arg, n.src[0]) for n in nodes} | {(s.buffer, s.index) for s in stores}
    for buffer, index in accesses:
        if ix.coefficient(index, axis.var) is not ix.ONE:
            continue
        rest = ix.sub(index, axis.var)
        size = program.buffers[buffer].dtype.itemsize
        key = rest, 16 // min(size, 16)
        total = hint_product(v.src[0] for v in free_vars(index)) * size
        moved[key] = moved.get(key, 0) + total
    rest, piece = max(moved, key=lambda k: moved[k], default=(ix.ZERO, 1))
    if piece * WIDEST < 16 or axis.var in free_vars(rest) or not ix.known_nonneg(rest):
        return None
    return None if _is_even(rest, piece) else (rest, piece)


def _is_even(rest: Expr, piece: int) -> bool:
    """Whether all rows begin with a piece; of sizes that are not known, likely."""
    if ix.mod(rest, piece) is ix.ZERO:
        return True
    if not syms(rest):
        return False
    steps = {v: ix.coefficient(rest, v) for v in free_vars(rest)}
    first = ix.sub(rest, ix.add(*(ix.mul(v, step) for v, step in steps.items() if step)))
    return all(step is not None and hint(step) % piece == 0 for step in (*steps.values(), first))
