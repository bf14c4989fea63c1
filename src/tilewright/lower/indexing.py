"""Elements found through index tensors: gather, index, embedding, searches.

A gathered position is an `index` node: it is checked against the size of the dimension it goes
into when the program runs, and an IndexError says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import INDEX, Expr, const, walk
from tilewright.ir.ops import CALL, SURE
from tilewright.ir.program import Store
from tilewright.lower.context import Lowering
from tilewright.lower.promote import Operand, operand, promoted
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import (
    Size,
    Tensor,
    broadcast_size,
    cost,
    expand,
    from_indices,
    placeholders,
    pointwise,
    view,
)
from tilewright.lower.views import axis, replaced, reshape, result_size, zero

aten = torch.ops.aten

Place = Callable[[Expr, Expr], Expr]  # (an element of an index tensor, size) -> a position


# ---- positions


def checked(i: Expr, size: Expr) -> Expr:
    """A position that must lie inside the dimension."""
    return build.op("index", build.cast(i, INDEX), size)


def sure(i: Expr, size: Expr) -> Expr:
    """A position that was made here, or has been checked."""
    return build.op("index", build.cast(i, INDEX), size, arg=SURE)


def checked_wrapped(i: Expr, size: Expr) -> Expr:
    """A position that may count from the end."""
    return build.op("index", unchecked(i, size), size)


def unchecked(i: Expr, size: Expr) -> Expr:
    """A position that whoever made it knows to be right; it may count from the end."""
    i = build.cast(i, INDEX)
    return build.where(build.op("lt", i, ix.ZERO), ix.add(i, size), i)


def table(ctx: Lowering, t: Tensor) -> Tensor:
    """`t` to be read at gathered positions: stored if computing an element costs much."""
    if t.numel is ix.ZERO:
        raise Unsupported("an index into nothing: torch says what is wrong with it")
    work, reads = cost(t.body)
    return ctx.realize(t) if work >= CALL or reads > 2 else t


def gathered(ctx: Lowering, t: Tensor, size: Size, place: Callable[..., Sequence[Expr]]) -> Tensor:
    """The elements of `t` at checked positions. An index that is out of range goes on as the first,
    which a tensor that is empty has not: its positions stand for elements, so they are checked."""
    source = table(ctx, t)
    found = view(source, size, place)
    if ix.known_lt(ix.ZERO, source.numel):
        return found
    some = build.op("lt", ix.ZERO, source.numel)
    positions = [i for i in place(*placeholders(size)) if is_checked(i)]
    instead = functools.reduce(lambda a, b: build.op("add", a, b), positions)
    return found.map(
        lambda v: build.where(some, build.guard(v, some), build.cast(instead, v.dtype))
    )


def is_checked(position: Expr) -> bool:
    return any(n.op == "index" and n.arg != SURE for n in walk(position))


def takes_one_of_few(ctx: Lowering, t: Tensor, dim: int, size: Size) -> bool:
    """Whether of a few elements along a dimension one is taken: no more is computed than where all
    of them are stored, and nothing is."""
    return size[dim] is ix.ONE and ctx.is_short(t, dim)


def at_least_1d(t: Tensor) -> Tensor:
    return t if t.rank else reshape(t, (ix.ONE,))


class Advanced:
    """Which elements `t[indices]` are: the size of the result and where each element comes from.

    The indexed dimensions are replaced by the index tensors' broadcast size: in place if they are
    neighbours, otherwise in front.
    """

    def __init__(self, size: Size, indices: Sequence[Tensor | None], place: Place) -> None:
        self.of = size
        self.place = place
        self.indices = [*indices, *[None] * (len(size) - len(indices))]
        given = [t for t in self.indices if t is not None]
        if any(t.dtype in (torch.bool, torch.uint8) for t in given):
            raise Unsupported("a mask as an index: the size of the result depends on the data")
        self.shape = broadcast_size(given)
        self.given = [expand(t, self.shape) if t is not None else None for t in self.indices]
        dims = [k for k, t in enumerate(self.indices) if t is not None]
        together = dims == list(range(dims[0], dims[0] + len(dims))) if dims else True
        self.front = dims[0] if dims and together else 0
        kept = [s for s, t in zip(size, self.indices, strict=True) if t is None]
        self.size = (*kept[: self.front], *self.shape, *kept[self.front :])

    def source(self, *point: Expr) -> list[Expr]:
        stop = self.front + len(self.shape)
        among = point[self.front : stop]
        kept = iter((*point[: self.front], *point[stop:]))
        return [next(kept) if t is None else self.place(t.at(among), size)
                for t, size in zip(self.given, self.of, strict=True)]  # fmt: skip


# ---- gather and its kin


@lowers(aten.gather.default)
def _gather(ctx: Lowering, t: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    dim = axis(dim, t.rank)
    if index.numel is ix.ZERO:  # may have any rank then
        return Tensor(index.size, t.dtype, t.device, zero(t.dtype))
    source, where = at_least_1d(t), at_least_1d(index)

    def place(*i: Expr) -> Sequence[Expr]:
        return replaced(i, dim, checked(where.at(i), source.size[dim]))

    if takes_one_of_few(ctx, source, dim, where.size):
        return reshape(view(source, where.size, place), index.size)
    return reshape(gathered(ctx, source, where.size, place), index.size)


@lowers(aten.index_select.default)
def _index_select(ctx: Lowering, t: Tensor, dim: int, index: Tensor) -> Tensor:
    dim = axis(dim, t.rank)
    source, where = at_least_1d(t), at_least_1d(index)
    size = tuple(replaced(source.size, dim, where.size[0]))

    def reindex(*i: Expr) -> list[Expr]:
        return replaced(i, dim, checked(where.at([i[dim]]), source.size[dim]))

    return reshape(gathered(ctx, source, size, reindex), result_size(ctx))


@lowers(aten.index.Tensor)
def _index(ctx: Lowering, t: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    chosen = Advanced(t.size, indices, checked_wrapped)
    return gathered(ctx, t, chosen.size, chosen.source)


@lowers(aten._unsafe_index.Tensor)
def _unsafe_index(ctx: Lowering, t: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    chosen = Advanced(t.size, indices, unchecked)
    return view(table(ctx, t), chosen.size, chosen.source)


@lowers(aten._unsafe_masked_index.default)
def _unsafe_masked_index(ctx: Lowering, t: Tensor, mask: Tensor, indices: Sequence[Tensor | None],
                         fill: Any) -> Tensor:  # fmt: skip
    found = _unsafe_index(ctx, t, indices)
    other = operand(ctx, fill, t.dtype)
    return pointwise(lambda v, m, f: build.where(m, build.guard(v, m), f), found, mask, other)


@lowers(aten.take.default)
def _take(ctx: Lowering, t: Tensor, index: Tensor) -> Tensor:
    flat = reshape(table(ctx, t), (t.numel,))
    return gathered(ctx, flat, index.size, lambda *i: [checked_wrapped(index.at(i), t.numel)])


# ---- embedding


@lowers(aten.embedding.default)
def _embedding(ctx: Lowering, weight: Tensor, indices: Tensor, *unused: Any,
               **also: Any) -> Tensor:  # fmt: skip
    count = indices.rank

    def reindex(*i: Expr) -> list[Expr]:
        return [checked(indices.at(i[:count]), weight.size[0]), *i[count:]]

    return gathered(ctx, weight, (*indices.size, *weight.size[1:]), reindex)


# ---- masks


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(ctx: Lowering, t: Tensor, mask: Tensor, value: Operand) -> Tensor:
    return pointwise(build.where, mask.to(torch.bool), operand(ctx, value, t.dtype), t)


def ranks(ctx: Lowering, mask: Tensor) -> Tensor:
    """How many elements hold up to and including each, in row-major order."""
    return _running(ctx, mask)


def _running(ctx: Lowering, t: Tensor) -> Tensor:
    """The sum of the elements up to and including each, in row-major order."""
    flat = reshape(t, (t.numel,)).to(INDEX)
    (position,) = placeholders(flat.size)
    if position.op != "var":
        return flat
    made = ctx.buffer(flat.size, INDEX, flat.device)
    ctx.nest([position], (), [Store(made.name, position, build.scan("sum", position, flat.body))])
    return ctx.stored(made)


@lowers(aten.masked_scatter.default)
def _masked_scatter(ctx: Lowering, t: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    size = result_size(ctx)
    keep, into = ctx.realize(expand(mask, size)), expand(t, size)
    rank = reshape(ranks(ctx, keep), size)
    flat = reshape(table(ctx, source), (source.numel,))

    def value(*i: Expr) -> Expr:
        chosen = keep.at(i)
        position = build.where(chosen, ix.sub(rank.at(i), 1), ix.ZERO)
        taken = flat.at([build.op("index", position, ix.maximum(source.numel, 1))])
        return build.where(chosen, build.guard(taken, chosen), into.at(i))

    return from_indices(size, t.device, value)


@lowers(aten.masked_scatter_backward.default)
def _masked_scatter_backward(ctx: Lowering, grad: Tensor, mask: Tensor, sizes: Any) -> Tensor:
    size = result_size(ctx)
    keep = ctx.realize(expand(mask, grad.size))
    rank = reshape(ranks(ctx, keep), grad.size)
    blank = Tensor((ix.product(size),), grad.dtype, grad.device, operand(ctx, 0, grad.dtype).body)
    found = ctx.scatter(blank, grad.size, lambda *i: [ix.sub(rank.at(i), 1)],
                        lambda *i: grad.at(i), mask=lambda *i: keep.at(i))  # fmt: skip
    return reshape(found, size)


# ---- searches in sorted sequences


MOST_HALVINGS = 40  # of a sequence as long as memory holds


def _halvings(count: Expr) -> int:
    """How often a sequence of (at most) this length can be halved."""
    most = ix.bounds(count)[1]
    return MOST_HALVINGS if most >= 1 << MOST_HALVINGS else int(most).bit_length()


def _search(sequence: Callable[[Sequence[Expr]], Expr], count: Expr, value: Expr,
            right: bool) -> Expr:  # fmt: skip
    """The first place where `value` could be put; halving exactly as eager does, since a sequence
    with NaNs has no order that would make every way of halving agree."""
    start, end = ix.ZERO, count
    last = ix.maximum(ix.sub(count, 1), 0)
    for _ in range(_halvings(count)):
        active = build.op("lt", start, end)
        middle = ix.floordiv(ix.add(start, end), 2)
        met = sequence([ix.minimum(middle, last)])
        met = met if ix.known_lt(0, count) else build.guard(met, active)
        after = build.op("bit_not", build.op("gt" if right else "ge", met, value))
        go_on = build.both(active, after)
        end = build.where(build.both(active, build.op("bit_not", after)), middle, end)
        start = build.where(go_on, ix.add(middle, 1), start)
    return start


def _searched(ctx: Lowering, sequence: Tensor, value: Operand, int32: bool, right: bool,
              sorter: Tensor | None = None) -> Tensor:  # fmt: skip
    common, _ = promoted(ctx, (sequence, value))
    values = operand(ctx, value, common)
    ordered = ctx.realize(sequence)
    order = None if sorter is None else ctx.realize(sorter)

    def element(*i: Expr) -> Expr:
        lead = i[:-1] if sequence.rank > 1 else ()

        def met(at: Sequence[Expr]) -> Expr:
            if order is not None:
                at = [checked(order.at([*lead, *at]), sequence.size[-1])]
            return build.cast(ordered.at([*lead, *at]), common)

        found = _search(met, sequence.size[-1], values.at(i), right)
        return build.cast(found, torch.int32 if int32 else INDEX)

    return from_indices(values.size, sequence.device, element)


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def _bucketize(ctx: Lowering, value: Operand, boundaries: Tensor, *, out_int32: bool = False,
               right: bool = False) -> Tensor:  # fmt: skip
    return _searched(ctx, boundaries, value, out_int32, right)


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def _searchsorted(ctx: Lowering, sequence: Tensor, value: Operand, *, out_int32: bool = False,
                  right: bool = False, side: str | None = None,
                  sorter: Tensor | None = None) -> Tensor:  # fmt: skip
    return _searched(ctx, sequence, value, out_int32, right or side == "right", sorter)


@lowers(aten.repeat_interleave.Tensor)
def _repeat_interleave(ctx: Lowering, repeats: Tensor, *, output_size: Any = None) -> Tensor:
    """Position k as often as `repeats[k]` says: found in the running sum of them."""
    if output_size is None:
        raise Unsupported("the size of the result depends on the data")
    size, count = ix.as_index(output_size), repeats.size[0]
    positive = repeats.map(lambda n: build.require(n, build.op("ge", n, const(0, n.dtype))))
    ends = _running(ctx, positive)

    def element(i: Expr) -> Expr:
        total = ends.at([ix.maximum(ix.sub(count, 1), 0)])
        found = _search(lambda at: ends.at(at), count, i, right=True)
        return build.cast(build.require(found, build.op("eq", total, size)), repeats.dtype)

    return from_indices((size,), repeats.device, element)


@lowers(aten.nonzero_static.default)
def _nonzero_static(ctx: Lowering, t: Tensor, *, size: Any, fill_value: int = -1) -> Tensor:
    """The coordinates of the elements that hold, in row-major order, cut or filled to `size`."""
    if not t.rank:
        return Tensor(result_size(ctx), INDEX, t.device, ix.ZERO)
    rows = ix.as_index(size)
    keep = ctx.realize(t.to(torch.bool))
    rank = reshape(ranks(ctx, keep), t.size)
    into = Tensor((rows, ix.as_index(t.rank)), INDEX, t.device, ix.as_index(fill_value))

    def row(*i: Expr) -> Expr:
        return ix.sub(rank.at(i[:-1]), 1)

    def coordinate(*i: Expr) -> Expr:
        value = i[0]
        for k in range(1, t.rank):
            value = build.where(build.op("eq", i[-1], ix.as_index(k)), i[k], value)
        return value

    return ctx.scatter(
        into,
        (*t.size, ix.as_index(t.rank)),
        lambda *i: [row(*i), i[-1]],
        coordinate,
        mask=lambda *i: build.both(keep.at(i[:-1]), build.op("lt", row(*i), rows)),
    )
