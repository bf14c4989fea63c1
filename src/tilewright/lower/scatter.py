"""Scatter: a tensor in which the elements at given positions are set or combined.

What is combined in low precision is combined in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.counts import MEET, is_count
from tilewright.ir.expr import Expr, const, loads
from tilewright.ir.program import Nest, Store, StoreMode
from tilewright.lower import rows as rows_of
from tilewright.lower.context import Lowering
from tilewright.lower.fold import fold
from tilewright.lower.indexing import (
    Advanced,
    Place,
    at_least_1d,
    checked,
    checked_wrapped,
    is_checked,
    unchecked,
)
from tilewright.lower.mutation import take
from tilewright.lower.promote import Operand, compute_type, operand
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import (
    Size,
    Tensor,
    expand,
    from_indices,
    is_stored,
    placeholders,
    pointwise,
)
from tilewright.lower.views import axis, replaced, reshape, zero

aten = torch.ops.aten


# ---- the one way anything is scattered


@dataclass(frozen=True)
class Points:
    """What is scattered: for every point of `size`, a target position, maybe only where `mask`."""

    size: Size
    position: Callable[..., list[Expr]]
    mask: Callable[..., Expr] | None = None


_BOOL_MODES: dict[StoreMode, StoreMode] = {"add": "max", "mul": "min"}  # true + true is true


class Target:
    """A tensor that is being scattered into, or a copy of it; `combines`: not only set."""

    def __init__(self, ctx: Lowering, into: Tensor, combines: bool = True) -> None:
        self.ctx = ctx
        self.dtype = self.work = into.dtype
        if combines:
            self.work = torch.uint8 if self.dtype == torch.bool else compute_type(self.dtype)
        assert ctx.node is not None
        fake = ctx.node.meta["val"]
        stride = ctx.sizes.tuple(fake.stride()) if fake.dim() == into.rank else None
        self.stored = take(ctx, into.to(self.work), stride)
        self.buffer = self.stored.body.arg

    def scatter(self, points: Points, value: Callable[..., Expr], mode: StoreMode = "set") -> None:
        loops = placeholders(points.size)
        if self.dtype == torch.bool:
            mode = _BOOL_MODES.get(mode, mode)
        index = self.stored.at(points.position(*loops)).src[0]
        mask = None if points.mask is None else points.mask(*loops)
        new = build.cast(value(*loops), self.work)
        self.ctx.nest(loops, (), [Store(self.buffer, index, new, mode, mask)])

    @property
    def result(self) -> Tensor:
        return self.stored.to(self.dtype)


FEW = 4096  # elements of a tensor that is scattered into, where many meet
COPIES = 1024
# elements of all of them (H200: 32 x 16 places of 1048576 x 16 points 54 us, 100 us by a quarter of
# it; 441 of 4194304 54 us, 61 us)
ROOM = 1 << 18
FEW_OF_ROWS = ROOM // 16  # where they are rows (262144 of 64 floats to 256 33.5 us, 41 us in one)
CHOSEN = 8  # elements of each row that every other is compared with


def scattered(ctx: Lowering, into: Tensor, points: Points, value: Callable[..., Expr],
              mode: StoreMode) -> Tensor:  # fmt: skip
    _has_places(into, points)
    if mode == "add" and (copies := _copies(into, points, value)):
        return _in_copies(ctx, into, points, value, copies)
    target = Target(ctx, into, combines=mode != "set")
    target.scatter(points, value, mode)
    return target.result


def _has_places(into: Tensor, points: Points) -> None:
    """A position that is out of range goes on as the first, which has to be there."""
    positions = points.position(*placeholders(points.size))
    if not ix.known_lt(ix.ZERO, into.numel) and any(map(is_checked, positions)):
        raise Unsupported("indices into what may be empty: torch says what is wrong with them")


def _copies(into: Tensor, points: Points, value: Callable[..., Expr]) -> int:
    """Of a small tensor in which so many meet that they wait for each other, as in a histogram: how
    many copies there should be to scatter into; 0 for one. Also where a kernel counts them."""
    count, places = (ix.value_of(ix.product(size)) or 0 for size in (points.size, into.size))
    if into.device.type != "cuda" or into.dtype == torch.bool or not 0 < places <= FEW_OF_ROWS:
        return 0
    if count < MEET * places:
        return 0
    loops, work = placeholders(points.size), compute_type(into.dtype)
    store = Store("", ix.ZERO, build.cast(value(*loops), work), "add")
    if is_count(store, loops, into.numel, work) or (
        places > FEW and not _are_rows(points.position(*loops), store.value, loops)):  # fmt: skip
        return 0
    most = min(COPIES, ROOM // places, 16 * count // (MEET * places))
    return 1 << most.bit_length() - 1


def _in_copies(ctx: Lowering, into: Tensor, points: Points, value: Callable[..., Expr],
               copies: int) -> Tensor:  # fmt: skip
    """Neighbours are added to different copies, and these to each other in the end (H200: 4194304
    ones to 441 places 735 us in one). Those of one place lie side by side, where neighbours that go
    to the same place find them at once, unless neighbours go to neighbouring places."""
    work = compute_type(into.dtype)
    loops = placeholders(points.size)
    position, new = points.position(*loops), build.cast(value(*loops), work)
    meet = [v for v in loops if v.op == "var" and v not in position]  # others have their own places
    which = ix.mod(ix.linearize(meet, ix.contiguous_strides([v.src[0] for v in meet])), copies)
    first = _are_rows(position, new, loops)
    size = (const(copies), *into.size) if first else (*into.size, const(copies))
    target = ctx.copy(from_indices(size, into.device, lambda *_: const(0, work)))
    index = target.at([which, *position] if first else [*position, which]).src[0]
    mask = None if points.mask is None else points.mask(*loops)
    ctx.nest(loops, (), [Store(target.body.arg, index, new, "add", mask)])
    total = fold(ctx, "sum", target, [0 if first else into.rank], False)
    return pointwise(lambda a, b: build.op("add", a, b), into.to(work), total).to(into.dtype)


def _are_rows(position: Sequence[Expr], value: Expr, loops: Sequence[Expr]) -> bool:
    """Whether neighbours in memory go to neighbouring places."""
    return _along_memory(value, loops) in position


def _along_memory(value: Expr, loops: Sequence[Expr]) -> Expr:
    """The loop along which what is scattered lies in memory."""
    read = [n.src[0] for n in loads(value)]
    return next((v for v in loops if any(ix.coefficient(i, v) is ix.ONE for i in read)), loops[-1])


# ---- reductions by name

_MODES: dict[str, StoreMode] = {
    "sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min",
    "mean": "add",
}  # fmt: skip


def _neutral(mode: StoreMode, dtype: torch.dtype) -> Expr:
    if mode in ("add", "mul"):
        return const(0 if mode == "add" else 1, dtype)
    if dtype.is_floating_point:
        return const(float("-inf") if mode == "max" else float("inf"), dtype)
    if dtype == torch.bool:
        return const(mode == "min", dtype)
    limits = torch.iinfo(dtype)
    return const(limits.min if mode == "max" else limits.max, dtype)


def combined(ctx: Lowering, into: Tensor, points: Points, value: Callable[..., Expr], kind: str,
             include_self: bool) -> Tensor:  # fmt: skip
    mode = _MODES[kind]
    _has_places(into, points)
    target = Target(ctx, into)
    if not include_self:
        target.scatter(points, lambda *i: _neutral(mode, into.dtype))
    target.scatter(points, value, mode)
    if kind != "mean":
        return target.result
    counts = Tensor(into.size, torch.int64, into.device, const(int(include_self)))
    counts = ctx.scatter(counts, points.size, points.position, lambda *i: ix.ONE, mode="add",
                         mask=points.mask)  # fmt: skip
    return pointwise(_mean, target.result, counts)


def _mean(total: Expr, count: Expr) -> Expr:
    count = build.op("max", count, ix.ONE)
    work = compute_type(total.dtype)
    divide = "div" if work.is_floating_point else "floordiv"
    return build.cast(build.op(divide, build.cast(total, work), build.cast(count, work)),
                      total.dtype)  # fmt: skip


# ---- scatter along a dimension


def _along(into: Tensor, dim: int, index: Tensor) -> Points:
    return Points(index.size, lambda *i: replaced(i, dim, checked(index.at(i), into.size[dim])))


def _elements(src: Operand, dtype: torch.dtype, ctx: Lowering) -> Callable[..., Expr]:
    """The value scattered from each point: of a tensor at least as large, or one number."""
    if isinstance(src, Tensor):
        values = at_least_1d(src).to(dtype)
        return lambda *i: values.at(i)
    number = operand(ctx, src, dtype).body
    return lambda *i: number


@lowers(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce,
        aten.scatter_add.default)  # fmt: skip
def _scatter(ctx: Lowering, t: Tensor, dim: int, index: Tensor, src: Operand, *,
             reduce: str | None = None) -> Tensor:  # fmt: skip
    assert ctx.node is not None
    if index.numel is ix.ZERO:  # may have any rank then
        return t
    if ctx.node.target is aten.scatter_add.default:
        reduce = "sum"
    into, index = at_least_1d(t), at_least_1d(index)
    mode: StoreMode = "set" if reduce is None else _MODES[reduce]
    value = _elements(src, t.dtype, ctx)
    if mode == "set" and _is_computed(ctx, t) and _are_few_of_each(into, axis(dim, t.rank), index):
        return reshape(_chosen(into, axis(dim, t.rank), index, value), t.size)
    points = _along(into, axis(dim, t.rank), index)
    return reshape(scattered(ctx, into, points, value, mode), t.size)


def _is_computed(ctx: Lowering, t: Tensor) -> bool:
    """Whether elements are computed here, so that one in place of another may be too."""
    if not is_stored(t):
        return True
    makers = [n for n in ctx.program.nodes if t.body.arg in n.writes]
    return ctx.program.buffers[t.body.arg].kind == "temporary" and all(
        isinstance(n, Nest) and all(s.mode == "set" and s.mask is None for s in n.stores)
        for n in makers)  # fmt: skip


def _are_few_of_each(into: Tensor, dim: int, index: Tensor) -> bool:
    few = CHOSEN if into.device.type == "cuda" else 1
    return (index.size == (*into.size[:dim], index.size[dim], *into.size[dim + 1 :])
            and (ix.value_of(index.size[dim]) or few + 1) <= few)  # fmt: skip


def _chosen(into: Tensor, dim: int, index: Tensor, value: Callable[..., Expr]) -> Tensor:
    """Of each row a few elements are others: of rows that are still to be computed, so are these.
    Where several are one element, the last is it."""

    def element(*i: Expr) -> Expr:
        found = into.at(i)
        for k in range(ix.value_of(index.size[dim]) or 0):
            at = replaced(i, dim, ix.as_index(k))
            own = build.op("eq", i[dim], checked(index.at(at), into.size[dim]))
            found = build.where(own, value(*at), found)
        return found

    return from_indices(into.size, into.device, element)


@lowers(aten.scatter_reduce.two)
def _scatter_reduce(ctx: Lowering, t: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *,
                    include_self: bool = True) -> Tensor:  # fmt: skip
    if index.numel is ix.ZERO:
        return t
    into = at_least_1d(t)
    points = _along(into, axis(dim, t.rank), at_least_1d(index))
    value = _elements(src, t.dtype, ctx)
    return reshape(combined(ctx, into, points, value, reduce, include_self), t.size)


# ---- whole slices along a dimension


def _slices(into: Tensor, dim: int, index: Tensor, place: Place = checked) -> Points:
    """Slice k of the source goes to slice `index[k]`."""
    where = at_least_1d(index)
    size = tuple(replaced(into.size, dim, where.size[0]))
    return Points(size, lambda *i: replaced(i, dim, place(where.at([i[dim]]), into.size[dim])))


@lowers(aten.index_add.default)
def _index_add(ctx: Lowering, t: Tensor, dim: int, index: Tensor, source: Tensor, *,
               alpha: Any = 1) -> Tensor:  # fmt: skip
    into, dim = at_least_1d(t), axis(dim, t.rank)
    whole_rows = t.rank > 1 and dim == 0 and index.rank == 1 and alpha == 1
    if whole_rows and t.dtype.is_floating_point and rows_of.worthwhile(source, t.size[0]):
        return rows_of.summed(ctx, source, index, t.size[0], into=t)
    work = compute_type(t.dtype)
    scale = operand(ctx, alpha, work).body
    given = reshape(source, ()) if not t.rank else source
    values = at_least_1d(given).to(work)
    multiply = "bit_and" if t.dtype == torch.bool else "mul"
    points = _slices(into, dim, index)
    found = scattered(ctx, into, points, lambda *i: build.op(multiply, values.at(i), scale), "add")
    return reshape(found, t.size)


@lowers(aten.index_copy.default)
def _index_copy(ctx: Lowering, t: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    into, dim = at_least_1d(t), axis(dim, t.rank)
    points = _slices(into, dim, index)
    values = reshape(source, points.size)
    return reshape(scattered(ctx, into, points, lambda *i: values.at(i), "set"), t.size)


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def _index_fill(ctx: Lowering, t: Tensor, dim: int, index: Tensor, value: Operand) -> Tensor:
    into, dim = at_least_1d(t), axis(dim, t.rank)
    fill = operand(ctx, value, t.dtype).body
    points = _slices(into, dim, index, checked_wrapped)
    return reshape(scattered(ctx, into, points, lambda *i: fill, "set"), t.size)


@lowers(aten.index_reduce.default)
def _index_reduce(ctx: Lowering, t: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *,
                  include_self: bool = True) -> Tensor:  # fmt: skip
    into, dim = at_least_1d(t), axis(dim, t.rank)
    points = _slices(into, dim, index)
    values = reshape(source, points.size)
    found = combined(ctx, into, points, lambda *i: values.at(i), reduce, include_self)
    return reshape(found, t.size)


# ---- index_put


@lowers(aten.index_put.default)
def _index_put(ctx: Lowering, t: Tensor, indices: Sequence[Tensor | None], values: Tensor,
               accumulate: bool = False) -> Tensor:  # fmt: skip
    masks = [m for m in indices if m is not None]
    if len(masks) == 1 and masks[0].dtype in (torch.bool, torch.uint8):
        return _masked_put(t, indices, masks[0], values, accumulate)
    return _put_at(ctx, t, indices, values, accumulate, checked_wrapped)


@lowers(aten._unsafe_index_put.default)
def _unsafe_index_put(ctx: Lowering, t: Tensor, indices: Sequence[Tensor | None], values: Tensor,
                      accumulate: bool = False) -> Tensor:  # fmt: skip
    return _put_at(ctx, t, indices, values, accumulate, unchecked)


def _put_at(ctx: Lowering, t: Tensor, indices: Sequence[Tensor | None], values: Tensor,
            accumulate: bool, place: Place, mask: Tensor | None = None) -> Tensor:  # fmt: skip
    chosen = Advanced(t.size, indices, place)
    given = expand(_fitted(values, len(chosen.size)), chosen.size)
    only = None if mask is None else expand(mask, chosen.size)
    points = Points(chosen.size, chosen.source, None if only is None else lambda *i: only.at(i))
    return scattered(ctx, t, points, lambda *i: given.at(i), "add" if accumulate else "set")


def _fitted(values: Tensor, rank: int) -> Tensor:
    """Leading dimensions of one element beyond `rank` dropped."""
    extra = max(values.rank - rank, 0)
    return reshape(values, values.size[extra:]) if extra else values


def _masked_put(t: Tensor, indices: Sequence[Tensor | None], mask: Tensor, values: Tensor,
                accumulate: bool) -> Tensor:  # fmt: skip
    """A mask whose chosen elements all get the same value, or the same slice."""
    dim = next(k for k, m in enumerate(indices) if m is not None)
    behind = t.rank - dim - mask.rank  # dimensions that come after those of the mask
    if dim and values.rank > behind + 1:
        raise Unsupported("values that differ in front of the mask")
    if values.rank > behind and values.size[values.rank - behind - 1] is not ix.ONE:
        raise Unsupported("one value per chosen element")
    kept = values.size[values.rank - behind :] if values.rank > behind else values.size
    given = expand(reshape(values, kept), t.size)
    over = (*[ix.ONE] * dim, *mask.size, *[ix.ONE] * behind)
    where = expand(reshape(mask.to(torch.bool), over), t.size)

    def value(chosen: Expr, new: Expr, old: Expr) -> Expr:
        if accumulate:
            work, add = compute_type(t.dtype), "bit_or" if t.dtype == torch.bool else "add"
            new = build.cast(build.op(add, build.cast(old, work), build.cast(new, work)), t.dtype)
        return build.where(chosen, new, old)

    return pointwise(value, where, given, t)


@lowers(aten._unsafe_masked_index_put_accumulate.default)
def _unsafe_masked_put(ctx: Lowering, t: Tensor, mask: Tensor, indices: Sequence[Tensor | None],
                       values: Tensor) -> Tensor:  # fmt: skip
    return _put_at(ctx, t, indices, values, True, unchecked, mask)


@lowers(aten.put.default)
def _put(ctx: Lowering, t: Tensor, index: Tensor, source: Tensor,
         accumulate: bool = False) -> Tensor:  # fmt: skip
    flat, values = reshape(t, (t.numel,)), reshape(source, index.size)
    points = Points(index.size, lambda *i: [checked_wrapped(index.at(i), t.numel)])
    found = scattered(ctx, flat, points, lambda *i: values.at(i), "add" if accumulate else "set")
    return reshape(found, t.size)


# ---- embedding


@lowers(aten.embedding_dense_backward.default)
def _embedding_dense_backward(ctx: Lowering, grad: Tensor, indices: Tensor, rows: ix.IndexLike,
                              padding: ix.IndexLike, scale_by_freq: bool) -> Tensor:  # fmt: skip
    count = indices.rank
    height, work = ix.as_index(rows), compute_type(grad.dtype)
    into = Tensor((height, *grad.size[count:]), grad.dtype, grad.device, zero(grad.dtype))
    used = build.op("ne", build.cast(indices.body, torch.int64), ix.as_index(padding))
    keep = Tensor(indices.size, torch.bool, indices.device, used)
    ignores = ix.value_of(ix.as_index(padding)) != -1

    def position(*i: Expr) -> list[Expr]:
        return [checked(indices.at(i[:count]), height), *i[count:]]

    flat = reshape(grad, (indices.numel, *grad.size[count:]))
    if not scale_by_freq and rows_of.worthwhile(flat, height):
        keys = reshape(indices, (indices.numel,))
        ignored = ix.as_index(padding) if ignores else None
        return rows_of.summed(ctx, flat, keys, height, ignored)
    points = Points(grad.size, position, (lambda *i: keep.at(i[:count])) if ignores else None)
    if not scale_by_freq:
        return scattered(ctx, into, points, lambda *i: grad.at(i), "add")
    nothing = Tensor((height,), torch.int64, grad.device, ix.ZERO)
    times = ctx.scatter(nothing, indices.size, lambda *i: [checked(indices.at(i), height)],
                        lambda *i: ix.ONE, mode="add")  # fmt: skip

    def value(*i: Expr) -> Expr:
        often = build.cast(times.at([checked(indices.at(i[:count]), height)]), work)
        share = build.op("div", const(1, work), often)
        return build.op("mul", build.cast(grad.at(i), work), share)

    return scattered(ctx, into, points, value, "add")
