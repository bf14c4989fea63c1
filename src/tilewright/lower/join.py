"""Tensors put side by side, padded, repeated or turned: each element is found, none is searched.

A border is a condition on the index; loads behind a condition are guarded, so nothing outside a
tensor is ever read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright import config
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, loads
from tilewright.ir.program import Store
from tilewright.lower.context import Lowering
from tilewright.lower.promote import compute_type, scalar
from tilewright.lower.table import LOWERINGS, lowers
from tilewright.lower.tensor import Size, Tensor, cost, from_indices, placeholders, view
from tilewright.lower.views import axis, inside, permute, replaced, reshape, result_size, zero

aten = torch.ops.aten

CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
MOST_PARTS = 48  # inputs of a concatenation that is computed where it is used
MAX_POINTWISE_CAT_WORK = 24
"""Every input's arithmetic is done at every element of the result: above this, store each input
into its place instead."""
SHORTEST_PIECE, LONGEST_PIECE = 16, 1024  # bytes
FEW_PARTS = 4  # of which pieces may be longer
SLID = (2, 4)  # bytes of elements whose long pieces may begin anywhere


# ---- cat, stack


@lowers(aten.cat.default)
def _cat(ctx: Lowering, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    assert ctx.node is not None
    size, dtype = result_size(ctx), ctx.node.meta["val"].dtype
    # a one-dimensional tensor without elements joins anything
    inputs = [t.to(dtype) for t in tensors if t.rank == len(size) and not (
        t.rank == 1 and t.size[0] is ix.ZERO)]  # fmt: skip
    if not inputs:
        return tensors[0].to(dtype)
    dim = axis(dim, len(size))
    if len(inputs) == 1:
        return inputs[0]
    starts = [ix.ZERO]
    for t in inputs:
        starts.append(ix.add(starts[-1], t.size[dim]))
    taken = _one_is_taken(ctx.node, inputs, dim)
    if taken or _join_in_one_loop(ctx, inputs, dim):
        return _choose(inputs, starts, dim, size, taken)
    made = ctx.buffer(size, dtype, inputs[0].device,
                      ctx.sizes.tuple(ctx.node.meta["val"].stride()))  # fmt: skip
    for t, start in zip(inputs, starts, strict=False):
        point = placeholders(t.size)
        index = ix.linearize(replaced(point, dim, ix.add(point[dim], start)), made.stride)
        ctx.nest(point, (), [Store(made.name, index, t.body)], order=made.stride)
    return ctx.stored(made)


def _join_in_one_loop(ctx: Lowering, inputs: Sequence[Tensor], dim: int) -> bool:
    """Whether to choose an input per element, so that users fuse; pays if there are such users.

    Where only pointwise ops follow, what they store is cut into the inputs' parts again.
    """
    assert ctx.node is not None
    if config.force_pointwise_cat:
        return True
    if len(inputs) <= MOST_PARTS and _feeds_pointwise(ctx.node):
        return True
    work = sum(cost(t.body)[0] for t in inputs)
    return (
        len(inputs) <= config.max_pointwise_cat_inputs
        and work <= MAX_POINTWISE_CAT_WORK
        and (any(user.target in LOWERINGS for user in ctx.node.users)
             or _are_pieces(ctx, inputs, dim))
    )  # fmt: skip


def _are_pieces(ctx: Lowering, inputs: Sequence[Tensor], dim: int) -> bool:
    """Whether inputs that nothing else in the program makes lie in the result in pieces that follow
    each other: one kernel of a card writes it from its beginning to its end, while those that each
    write their own leave gaps, and of short pieces lines that are not whole (H200: two of 97980x80
    float32 32.0 us, 35.7 us; two of 40000x1000 bfloat16 79 us, 89 us; three of 200x100x1024 side by
    side 61 us, 63 us; two of 352x131072, one after the other, 89 us, 91 us). Pieces of a few bytes
    are put together in registers instead."""
    if inputs[0].device.type != "cuda":
        return False
    pieces = [math.prod(ix.likely(n) for n in t.size[dim:]) * t.dtype.itemsize for t in inputs]
    if max(pieces) > LONGEST_PIECE and (len(inputs) > FEW_PARTS or (
        math.prod(ix.likely(n) for n in inputs[0].size[:dim]) == 1
        and inputs[0].dtype.itemsize not in SLID and any(n % 16 for n in pieces[:-1])
    )):  # fmt: skip
        return False
    read = {n.arg for t in inputs for n in loads(t.body)}
    return min(pieces) >= SHORTEST_PIECE and all(
        ctx.program.buffers[b].kind == "input" for b in read)  # fmt: skip


def _feeds_pointwise(node: torch.fx.Node, depth: int = 8) -> bool:
    """Whether there are users, all pointwise, and so on until a result, a product or the like."""
    if not node.users or depth == 0:
        return False
    return all(
        (user.target in CASTS or torch.Tag.pointwise in getattr(user.target, "tags", ()))
        and (_is_stored(user) or _feeds_pointwise(user, depth - 1))
        for user in node.users
    )


def _one_is_taken(node: torch.fx.Node, inputs: Sequence[Tensor], dim: int) -> bool:
    """Whether of tensors that are one element each along the dimension only one is taken at each
    point: no more is computed than where all of them are stored (`indexing.takes_one_of_few`)."""
    few = len(inputs) <= min(config.max_pointwise_cat_inputs, config.unroll_reductions_threshold)
    if not few or not node.users or any(t.size[dim] is not ix.ONE for t in inputs):
        return False
    for user in node.users:
        if user.target is not aten.gather.default or user.args[0] is not node:
            return False
        along: Any = user.args[1]
        if axis(along, inputs[0].rank) != dim or user.meta["val"].shape[dim] != 1:
            return False
    return True


def _is_stored(node: torch.fx.Node) -> bool:
    return all(user.op == "output" or user.target not in LOWERINGS for user in node.users)


def _choose(inputs: Sequence[Tensor], starts: Sequence[Expr], dim: int, size: Size, taken: bool
            ) -> Tensor:  # fmt: skip
    """Where inputs of one element each are `taken` from, neighbours need all of them."""

    def value(*i: Expr) -> Expr:
        result: Expr | None = None
        for k in reversed(range(len(inputs))):
            place = ix.ZERO if taken else ix.sub(i[dim], starts[k])
            new = inputs[k].at(replaced(i, dim, place))
            if not taken:
                new = build.guard(new, inside(i[dim], starts[k], starts[k + 1]))
            before = build.op("lt", i[dim], starts[k + 1])
            result = new if result is None else build.where(before, new, result)
        assert result is not None
        return result

    return from_indices(size, inputs[0].device, value)


@lowers(aten.stack.default)
def _stack(ctx: Lowering, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim = axis(dim, tensors[0].rank + 1)
    rows = [reshape(t, (*t.size[:dim], ix.ONE, *t.size[dim:])) for t in tensors]
    return _cat(ctx, rows, dim)


# ---- padding

Place = Callable[[Expr, Expr], Expr]  # (position relative to the first element, size) -> index


@lowers(aten.constant_pad_nd.default)
def _constant_pad(ctx: Lowering, t: Tensor, pad: Sequence[ix.IndexLike], value: Any = 0) -> Tensor:
    fill = scalar(value, t.dtype)

    def element(*i: Expr) -> Expr:
        point, mask = list(i), build.TRUE
        for k, low, _ in _by_dimension(pad, t.rank):
            point[k] = ix.sub(i[k], low)
            mask = build.both(mask, inside(point[k], 0, t.size[k]))
        return build.where(mask, build.guard(t.at(point), mask), fill)

    return from_indices(result_size(ctx), t.device, element)


def _by_dimension(pad: Sequence[ix.IndexLike], rank: int) -> list[tuple[int, Expr, Expr]]:
    """(dimension, before, after) of a list that starts at the last dimension."""
    return [(rank - 1 - k, ix.as_index(pad[2 * k]), ix.as_index(pad[2 * k + 1]))
            for k in range(len(pad) // 2)]  # fmt: skip


def _reflect(i: Expr, size: Expr) -> Expr:
    last = ix.sub(size, 1)
    away = ix.sub(last, ix.maximum(i, ix.neg(i)))
    return ix.sub(last, ix.maximum(away, ix.neg(away)))


def _replicate(i: Expr, size: Expr) -> Expr:
    return ix.minimum(ix.maximum(i, 0), ix.sub(size, 1))


def _source(pad: Sequence[ix.IndexLike], size: Size, place: Place) -> Callable[..., list[Expr]]:
    """The element of the padded tensor's source that each of its elements repeats."""

    def reindex(*i: Expr) -> list[Expr]:
        point = list(i)
        for k, low, _ in _by_dimension(pad, len(size)):
            point[k] = place(ix.sub(i[k], low), size[k])
        return point

    return reindex


@lowers(aten.reflection_pad1d.default, aten.reflection_pad2d.default,
        aten.reflection_pad3d.default)  # fmt: skip
def _reflection_pad(ctx: Lowering, t: Tensor, padding: Sequence[ix.IndexLike]) -> Tensor:
    return view(t, result_size(ctx), _source(padding, t.size, _reflect))


@lowers(aten.replication_pad1d.default, aten.replication_pad2d.default,
        aten.replication_pad3d.default)  # fmt: skip
def _replication_pad(ctx: Lowering, t: Tensor, padding: Sequence[ix.IndexLike]) -> Tensor:
    return view(t, result_size(ctx), _source(padding, t.size, _replicate))


@lowers(aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default,
        aten.reflection_pad3d_backward.default)  # fmt: skip
def _reflection_pad_backward(ctx: Lowering, grad: Tensor, t: Tensor,
                             padding: Sequence[ix.IndexLike]) -> Tensor:  # fmt: skip
    """Each element gathers from itself and its at most two mirror images, per dimension, in the
    order of the gradient's memory; the sum is rounded at each step, as eager's is."""
    work = compute_type(grad.dtype)
    dims = list(reversed(_by_dimension(padding, t.rank)))

    def value(*i: Expr) -> Expr:
        total = zero(work)
        images = [_mirrors(i[k], t.size[k], low) for k, low, _ in dims]
        for chosen in itertools.product(*images):
            point, mask = list(i), build.TRUE
            for (k, _, _), (position, exists) in zip(dims, chosen, strict=True):
                point[k] = position
                mask = build.both(mask, build.both(exists, inside(position, 0, grad.size[k])))
            term = build.cast(build.guard(grad.at(point), mask), work)
            total = build.op("add", total, build.where(mask, term, zero(work)))
            total = build.cast(build.cast(total, grad.dtype), work)
        return build.cast(total, grad.dtype)

    return from_indices(t.size, grad.device, value)


def _mirrors(j: Expr, size: Expr, low: Expr) -> tuple[tuple[Expr, Expr], ...]:
    """(position, whether it is an image) of element `j` in the padded dimension, ascending."""
    last = ix.sub(size, 1)
    return (
        (ix.sub(low, j), build.op("ge", j, ix.ONE)),  # mirrored at the first element
        (ix.add(j, low), build.TRUE),
        (ix.add(low, ix.mul(last, 2), ix.neg(j)), build.op("lt", j, last)),  # at the last
    )


@lowers(aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default,
        aten.replication_pad3d_backward.default)  # fmt: skip
def _replication_pad_backward(ctx: Lowering, grad: Tensor, t: Tensor,
                              padding: Sequence[ix.IndexLike]) -> Tensor:  # fmt: skip
    """Added up in the compute type, and rounded once."""
    source = grad.to(compute_type(grad.dtype))
    into = Tensor(t.size, source.dtype, grad.device, zero(source.dtype))
    found = ctx.scatter(into, grad.size, _source(padding, t.size, _replicate),
                        lambda *i: source.at(i), mode="add")  # fmt: skip
    return found.to(grad.dtype)


# ---- turned and repeated


def flip(t: Tensor, dims: Sequence[int]) -> Tensor:
    turned = {axis(d, t.rank) for d in dims}
    return view(t, t.size, lambda *i: [ix.sub(ix.sub(t.size[k], 1), x) if k in turned else x
                                       for k, x in enumerate(i)])  # fmt: skip


@lowers(aten.flip.default)
def _flip(ctx: Lowering, t: Tensor, dims: Sequence[int]) -> Tensor:
    return flip(t, dims) if t.rank else t


@lowers(aten.rot90.default)
def _rot90(ctx: Lowering, t: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    a, b = (axis(d, t.rank) for d in dims)
    order = list(range(t.rank))
    order[a], order[b] = b, a
    match k % 4:
        case 1:
            return permute(flip(t, [b]), order)
        case 2:
            return flip(t, [a, b])
        case 3:
            return permute(flip(t, [a]), order)
        case _:
            return t


@lowers(aten.roll.default)
def _roll(ctx: Lowering, t: Tensor, shifts: Sequence[ix.IndexLike],
          dims: Sequence[int] = ()) -> Tensor:  # fmt: skip
    if any(s is ix.ZERO for s in t.size) or not t.rank:
        return t
    if not dims:
        return reshape(_rolled(reshape(t, (t.numel,)), [(0, shifts[0])]), t.size)
    return _rolled(t, [(axis(d, t.rank), s) for d, s in zip(dims, shifts, strict=True)])


def _rolled(t: Tensor, shifts: Sequence[tuple[int, ix.IndexLike]]) -> Tensor:
    def reindex(*i: Expr) -> list[Expr]:
        point = list(i)
        for dim, shift in shifts:
            point[dim] = ix.mod(ix.sub(point[dim], shift), t.size[dim])
        return point

    return view(t, t.size, reindex)


@lowers(aten.repeat.default)
def _repeat(ctx: Lowering, t: Tensor, repeats: Any) -> Tensor:
    size = result_size(ctx)
    lead = len(size) - t.rank

    def reindex(*i: Expr) -> list[Expr]:
        if any(s is ix.ZERO for s in size):
            return [ix.ZERO] * t.rank
        return [ix.mod(x, s) for x, s in zip(i[lead:], t.size, strict=True)]

    return view(t, size, reindex)


@lowers(aten.pixel_shuffle.default)
def _pixel_shuffle(ctx: Lowering, t: Tensor, factor: int) -> Tensor:
    def reindex(*i: Expr) -> list[Expr]:
        c, h, w = i[-3:]
        channel = ix.add(ix.mul(c, factor * factor), ix.mul(ix.mod(h, factor), factor),
                         ix.mod(w, factor))  # fmt: skip
        return [*i[:-3], channel, ix.floordiv(h, factor), ix.floordiv(w, factor)]

    return view(t, result_size(ctx), reindex)


@lowers(aten.pixel_unshuffle.default)
def _pixel_unshuffle(ctx: Lowering, t: Tensor, factor: int) -> Tensor:
    def reindex(*i: Expr) -> list[Expr]:
        c, h, w = i[-3:]
        within = ix.mod(c, factor * factor)
        return [*i[:-3], ix.floordiv(c, factor * factor),
                ix.add(ix.mul(h, factor), ix.floordiv(within, factor)),
                ix.add(ix.mul(w, factor), ix.mod(within, factor))]  # fmt: skip

    return view(t, result_size(ctx), reindex)


@lowers(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def _channel_shuffle(ctx: Lowering, t: Tensor, groups: ix.IndexLike) -> Tensor:
    each = ix.floordiv(t.size[1], groups)
    split = reshape(t, (t.size[0], ix.as_index(groups), each, *t.size[2:]))
    return reshape(permute(split, [0, 2, 1, *range(3, split.rank)]), t.size)
