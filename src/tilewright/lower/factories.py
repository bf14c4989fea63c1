"""Tensors from nothing but numbers and indices: full, arange, linspace, eye, triangles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.lower import formula as f
from tilewright.lower.context import Lowering
from tilewright.lower.promote import Operand, compute_type, operand, scalar
from tilewright.lower.table import LoweringFn, lowers
from tilewright.lower.tensor import Tensor, from_indices

aten, prims = torch.ops.aten, torch.ops.prims


def _result(ctx: Lowering) -> torch.Tensor:
    assert ctx.node is not None
    return ctx.node.meta["val"]


def filled(ctx: Lowering, value: Operand) -> Tensor:
    """A tensor of the size and type the graph says, with one value everywhere."""
    fake = _result(ctx)
    body = operand(ctx, value, fake.dtype).body
    return Tensor(ctx.sizes.tuple(fake.size()), fake.dtype, fake.device, body)


def _constant(value: int) -> LoweringFn:
    return lambda ctx, *_, **__: filled(ctx, value)


_CONSTANTS: dict[int, list[Any]] = {
    0: [aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default],
    1: [aten.ones.default, aten.ones_like.default, aten.new_ones.default],
}

for _value, _targets in _CONSTANTS.items():
    lowers(*_targets)(_constant(_value))


@lowers(aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
        aten.empty_permuted.default, aten.new_empty.default, aten.new_empty_strided.default,
        prims.empty_strided.default, prims.empty_permuted.default)  # fmt: skip
def empty(ctx: Lowering, *_: Any, **__: Any) -> Tensor:
    """What an uninitialised tensor holds is free: zeros cost nothing until they are read. Where
    torch is told to be deterministic, eager fills it."""
    dtype = _result(ctx).dtype
    settings: Any = torch.utils.deterministic
    if not (torch.are_deterministic_algorithms_enabled() and settings.fill_uninitialized_memory):
        return filled(ctx, 0)
    if dtype.is_floating_point or dtype.is_complex:
        return filled(ctx, math.nan)
    return filled(ctx, dtype == torch.bool or torch.iinfo(dtype).max)


@lowers(aten.full.default, aten.full_like.default, aten.new_full.default)
def full(ctx: Lowering, _: Any, *args: Any, fill_value: Any = None, **__: Any) -> Tensor:
    """`full(size, value)`, `full_like(x, value)` and `new_full(x, size, value)`."""
    return filled(ctx, args[-1] if args else fill_value)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(ctx: Lowering, value: Any, **_: Any) -> Tensor:
    return filled(ctx, value)


# ---- sequences


def _is_whole(*numbers: Any) -> bool:
    return all(isinstance(n, int) or (isinstance(n, Expr) and n.dtype == torch.int64)
               for n in numbers)  # fmt: skip


@lowers(aten.arange.start_step)
def arange(ctx: Lowering, start: Any, end: Any, step: Any = 1, **_: Any) -> Tensor:
    """`start + step * i`: in integers where all are whole, else in float64 (low precision: float32)
    and rounded once."""
    fake = _result(ctx)
    wide = torch.float32 if compute_type(fake.dtype) != fake.dtype else torch.float64

    def element(*indices: Expr) -> Expr:
        i = indices[0]
        if _is_whole(start, step):
            return build.cast(ix.add(start, ix.mul(i, step)), fake.dtype)
        if not fake.dtype.is_floating_point:  # eager rounds the numbers, not the sums, to integers
            whole = [build.cast(scalar(n, torch.float64), torch.int64) for n in (start, step)]
            return build.cast(f.add(whole[0], f.mul(i, whole[1])), fake.dtype)
        sums = f.add(scalar(start, wide), f.mul(build.cast(i, wide), scalar(step, wide)))
        return build.cast(sums, fake.dtype)

    return from_indices(ctx.sizes.tuple(fake.size()), fake.device, element)


@lowers(aten.arange.default)
def arange_to(ctx: Lowering, end: Any, **_: Any) -> Tensor:
    return arange(ctx, 0, end)


@lowers(aten.arange.start)
def arange_from(ctx: Lowering, start: Any, end: Any, **_: Any) -> Tensor:
    return arange(ctx, start, end)


@lowers(prims.iota.default)
def iota(ctx: Lowering, length: Any, *, start: Any, step: Any, **_: Any) -> Tensor:
    return arange(ctx, start, length, step)


def _spaced(dtype: torch.dtype, start: Any, end: Any, steps: Any) -> Callable[[Expr], Expr]:
    """Element `i` of `steps` points from `start` to `end`: each half counts from its own end.

    Eager's arithmetic: in the type itself (every sum rounded), or for integers in float64.
    """
    held = dtype if dtype.is_floating_point else torch.float64
    wide = compute_type(held)

    def number(value: Any) -> Expr:
        return build.cast(scalar(value, dtype), wide)

    def rounded(value: Expr) -> Expr:
        return f.rounded(value, held)

    def element(i: Expr) -> Expr:
        first, last = number(start), number(end)
        if ix.value_of(ix.as_index(steps)) == 1:
            return first
        gaps = build.cast(ix.sub(steps, 1), wide)
        step = rounded(f.div(rounded(f.sub(last, first)), rounded(gaps)))
        rest = ix.sub(ix.sub(steps, i), 1)
        low = rounded(f.add(first, rounded(f.mul(step, rounded(build.cast(i, wide))))))
        high = rounded(f.sub(last, rounded(f.mul(step, rounded(build.cast(rest, wide))))))
        return f.where(f.lt(i, ix.floordiv(steps, 2)), low, high)

    return element


@lowers(aten.linspace.default)
def linspace(ctx: Lowering, start: Any, end: Any, steps: Any, **_: Any) -> Tensor:
    fake = _result(ctx)
    point = _spaced(fake.dtype, start, end, steps)
    size = ctx.sizes.tuple(fake.size())
    return from_indices(size, fake.device, lambda i: build.cast(point(i), fake.dtype))


@lowers(aten.logspace.default)
def logspace(ctx: Lowering, start: Any, end: Any, steps: Any, base: Any = 10.0, **_: Any) -> Tensor:
    fake = _result(ctx)
    point = _spaced(fake.dtype, start, end, steps)

    def element(i: Expr) -> Expr:
        power = f.pow_(scalar(base, torch.float64), build.cast(point(i), torch.float64))
        return build.cast(power, fake.dtype)

    return from_indices(ctx.sizes.tuple(fake.size()), fake.device, element)


# ---- by position in a matrix


@lowers(aten.eye.default, aten.eye.m)
def eye(ctx: Lowering, *_: Any, **__: Any) -> Tensor:
    fake = _result(ctx)
    one, zero = f.literal(1, fake.dtype), f.literal(0, fake.dtype)
    return from_indices(ctx.sizes.tuple(fake.size()), fake.device,
                        lambda i, j: build.where(f.eq(i, j), one, zero))  # fmt: skip


def _triangle(keeps: Callable[[Expr, Expr], Expr]) -> LoweringFn:
    """Keep the elements whose column minus row stands so to the diagonal; the others are zero."""

    def lowering(ctx: Lowering, x: Tensor, diagonal: Any = 0) -> Tensor:
        def element(*indices: Expr) -> Expr:
            row, column = indices[-2:]
            kept = keeps(column, ix.add(row, diagonal))
            return build.where(kept, build.guard(x.at(indices), kept), f.literal(0, x.dtype))

        return from_indices(x.size, x.device, element)

    return lowering


lowers(aten.tril.default)(_triangle(lambda column, limit: f.le(column, limit)))
lowers(aten.triu.default)(_triangle(lambda column, limit: f.ge(column, limit)))


def _growing(i: Expr, first: int) -> tuple[Expr, Expr]:
    """(row, column) of element `i` of rows that have `first`, `first + 1`, ... elements."""
    b = first - 0.5
    x = build.cast(i, torch.float64)
    row = build.cast(f.sub(f.sqrt(f.add(f.mul(x, 2.0), b * b)), b), torch.int64)
    before = f.shr(f.mul(row, f.add(row, 2 * first - 1)), 1)
    return row, f.sub(i, before)


@lowers(aten.tril_indices.default)
def tril_indices(ctx: Lowering, rows: int, cols: int, offset: int = 0, **_: Any) -> Tensor:
    """Rows that grow by one element up to all the columns, then full rows."""
    first = min(cols, 1 + offset) if offset > 0 else int(rows + offset > 0)
    last = max(0, min(cols, rows + offset))
    growing = last - first + 1
    before = (first + last) * growing // 2

    def position(i: Expr) -> tuple[Expr, Expr]:
        row, column = _growing(i, first)
        rest = ix.sub(i, before)
        full_row = ix.add(ix.floordiv(rest, cols), growing)
        early = f.lt(i, before)
        return f.where(early, row, full_row), f.where(early, column, ix.mod(rest, cols))

    return _positions(ctx, position, max(0, -offset))


@lowers(aten.triu_indices.default)
def triu_indices(ctx: Lowering, rows: int, cols: int, offset: int = 0, **_: Any) -> Tensor:
    """Full rows, then rows that lose one element each: those, read backwards, grow."""
    full = max(0, min(rows, -offset))
    before = full * cols
    fake = _result(ctx)
    count = fake.size(1) - before
    longest = cols - max(0, offset)
    shortest = longest - (rows - full) + 1 if rows - full < longest else 1

    def position(i: Expr) -> tuple[Expr, Expr]:
        row, column = _growing(ix.sub(count - 1 + before, i), shortest)
        height = longest - shortest
        early = f.lt(i, before)
        shrunk_row = f.sub(height + full, row)
        shrunk_column = f.sub(cols - 1, column)
        return (f.where(early, ix.floordiv(i, cols), shrunk_row),
                f.where(early, ix.mod(i, cols), shrunk_column))  # fmt: skip

    return _positions(ctx, position)


def _positions(ctx: Lowering, position: Callable[[Expr], tuple[Expr, Expr]], down: int = 0
               ) -> Tensor:  # fmt: skip
    """Two rows: where each element of a triangle is."""
    fake = _result(ctx)
    size = ctx.sizes.tuple(fake.size())
    if size[1] is ix.ZERO:
        return filled(ctx, 0)

    def element(which: Expr, i: Expr) -> Expr:
        row, column = position(i)
        chosen = f.where(f.eq(which, 0), f.add(row, down), column)
        return build.cast(chosen, fake.dtype)

    return from_indices(size, fake.device, element)
