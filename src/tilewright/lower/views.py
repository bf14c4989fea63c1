"""Views: the same elements under other indices. Nothing is stored, nothing is copied.

The scattering twins (`slice_scatter`, `select_backward`, ...) are here too: which elements they
replace is known from the index alone, so they are a choice between two expressions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import INDEX, Expr, const, load
from tilewright.ir.program import Store, View
from tilewright.lower.context import Lowering, as_view
from tilewright.lower.mutation import others, overwritable, put_window
from tilewright.lower.promote import compute_type
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Size, Tensor, expand, from_indices, placeholders, view

aten = torch.ops.aten

# ---- shared by the families that move elements around


def result_size(ctx: Lowering) -> Size:
    """The size of the node's (only) result, as the graph knows it."""
    assert ctx.node is not None
    return ctx.sizes.tuple(ctx.node.meta["val"].size())


def axis(dim: int, rank: int) -> int:
    """`dim` counted from the front; a tensor without dimensions has one of one element."""
    return dim % max(rank, 1)


def replaced(indices: Sequence[Expr], dim: int, new: ix.IndexLike) -> list[Expr]:
    return [*indices[:dim], ix.as_index(new), *indices[dim + 1 :]]


def inside(i: Expr, start: ix.IndexLike, stop: ix.IndexLike) -> Expr:
    """Whether `start <= i < stop`."""
    above = build.op("ge", i, ix.as_index(start))
    return build.both(above, build.op("lt", i, ix.as_index(stop)))


def wrapped(i: Expr, size: Expr) -> Expr:
    """An index counted from the end when negative."""
    if ix.known_nonneg(i):
        return i
    if ix.value_of(i) is not None or ix.known_nonneg(ix.sub(-1, i)):
        return ix.add(i, size)
    return build.where(build.op("lt", i, ix.ZERO), ix.add(i, size), i)


def zero(dtype: torch.dtype) -> Expr:
    return const(0, dtype)


# ---- reshape


def reshape(t: Tensor, size: Size) -> Tensor:
    """The elements in row-major order under another size. Dimensions are matched in groups of
    equal products, so quotients and remainders appear only where dimensions really mix."""
    if t.size == size:
        return t
    old = [k for k, s in enumerate(t.size) if s is not ix.ONE]
    new = [k for k, s in enumerate(size) if s is not ix.ONE]

    def reindex(*indices: Expr) -> list[Expr]:
        found: list[Expr] = [ix.ZERO] * t.rank
        if any(s is ix.ZERO for s in size):  # no elements: any index will do
            return found
        for olds, news in _groups([t.size[k] for k in old], [size[k] for k in new]):
            point = [indices[new[k]] for k in news]
            linear = _flatten(point, [size[new[k]] for k in news])
            for k, i in zip(olds, _unflatten(linear, [t.size[old[k]] for k in olds]), strict=True):
                found[old[k]] = i
        return found

    return view(t, size, reindex)


def _groups(old: Sequence[Expr], new: Sequence[Expr]) -> list[tuple[range, range]]:
    """The smallest runs of old and new dimensions that hold equally many elements."""
    cuts = {ix.product(new[:k]): k for k in range(len(new) + 1)}
    groups: list[tuple[range, range]] = []
    o, n = 0, 0
    for k in range(1, len(old) + 1):
        cut = len(new) if k == len(old) else cuts.get(ix.product(old[:k]))
        if cut is not None and (cut > n or k == len(old)):
            groups.append((range(o, k), range(n, cut)))
            o, n = k, cut
    return groups


def _flatten(indices: Sequence[Expr], size: Sequence[Expr]) -> Expr:
    total = ix.ZERO
    for i, s in zip(indices, size, strict=True):
        total = ix.add(ix.mul(total, s), i)
    return total


def _unflatten(linear: Expr, size: Sequence[Expr]) -> list[Expr]:
    found: list[Expr] = []
    for s in reversed(size[1:]):
        found.append(ix.mod(linear, s))
        linear = ix.floordiv(linear, s)
    return [*([linear] if size else []), *reversed(found)]


@lowers(aten.view.default, aten.reshape.default, aten._unsafe_view.default,
        aten._reshape_alias.default, aten.view_copy.default, aten._reshape_alias_copy.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze_copy.default,
        aten.squeeze_copy.dim, aten.squeeze_copy.dims, aten.unsqueeze.default,
        aten.unsqueeze_copy.default)  # fmt: skip
def _reshaped(ctx: Lowering, t: Tensor, *unused: Any, **also: Any) -> Tensor:
    return reshape(t, result_size(ctx))


@lowers(aten.view.dtype, aten.view_copy.dtype)
def _view_dtype(ctx: Lowering, t: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == t.dtype:
        return t
    ours, theirs = t.dtype.itemsize, dtype.itemsize
    if ours == theirs:
        return t.map(lambda e: build.op("bitcast", e, arg=dtype))
    size = result_size(ctx)
    return (_narrower if ours > theirs else _wider)(t, dtype, size)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _narrower(t: Tensor, dtype: torch.dtype, size: Size) -> Tensor:
    """Each element cut into the lower-addressed parts first."""
    count = t.dtype.itemsize // dtype.itemsize

    def value(*i: Expr) -> Expr:
        whole = build.op("bitcast", t.at([*i[:-1], ix.floordiv(i[-1], count)]),
                         arg=_BITS[t.dtype.itemsize])  # fmt: skip
        shift = ix.mul(ix.mod(i[-1], count), 8 * dtype.itemsize)
        part = build.op("shr", build.cast(whole, INDEX), shift)
        return build.op("bitcast", build.cast(part, _BITS[dtype.itemsize]), arg=dtype)

    return from_indices(size, t.device, value)


def _wider(t: Tensor, dtype: torch.dtype, size: Size) -> Tensor:
    count = dtype.itemsize // t.dtype.itemsize
    bits = 8 * t.dtype.itemsize

    def value(*i: Expr) -> Expr:
        total = zero(INDEX)
        for k in range(count):
            part = build.op("bitcast", t.at([*i[:-1], ix.add(ix.mul(i[-1], count), k)]),
                            arg=_BITS[t.dtype.itemsize])  # fmt: skip
            low = build.op("bit_and", build.cast(part, INDEX), const((1 << bits) - 1))
            total = build.op("bit_or", total, build.op("shl", low, const(k * bits)))
        return build.op("bitcast", build.cast(total, _BITS[dtype.itemsize]), arg=dtype)

    return from_indices(size, t.device, value)


# ---- dimensions moved, repeated, dropped


def permute(t: Tensor, dims: Sequence[int]) -> Tensor:
    order = [axis(d, t.rank) for d in dims]

    def reindex(*indices: Expr) -> list[Expr]:
        found = list(indices)
        for k, d in enumerate(order):
            found[d] = indices[k]
        return found

    return view(t, tuple(t.size[d] for d in order), reindex)


@lowers(aten.permute.default, aten.permute_copy.default)
def _permute(ctx: Lowering, t: Tensor, dims: Sequence[int]) -> Tensor:
    return permute(t, dims)


@lowers(aten.transpose.int, aten.transpose_copy.int)
def _transpose(ctx: Lowering, t: Tensor, dim0: int, dim1: int) -> Tensor:
    order = list(range(t.rank))
    if order:
        a, b = axis(dim0, t.rank), axis(dim1, t.rank)
        order[a], order[b] = b, a
    return permute(t, order)


@lowers(aten.t.default, aten.t_copy.default)
def _t(ctx: Lowering, t: Tensor) -> Tensor:
    return permute(t, range(t.rank)[::-1])


@lowers(aten.expand.default, aten.expand_copy.default)
def _expand(ctx: Lowering, t: Tensor, size: Any, *, implicit: bool = False) -> Tensor:
    return expand(t, result_size(ctx))


def select(t: Tensor, dim: int, index: ix.IndexLike) -> Tensor:
    dim = axis(dim, t.rank)
    at = wrapped(ix.as_index(index), t.size[dim])
    size = (*t.size[:dim], *t.size[dim + 1 :])
    return view(t, size, lambda *i: [*i[:dim], at, *i[dim:]])


@lowers(aten.select.int, aten.select_copy.int)
def _select(ctx: Lowering, t: Tensor, dim: int, index: ix.IndexLike) -> Tensor:
    return select(t, dim, index)


# ---- slices


def slice_start(start: ix.IndexLike | None, size: Expr) -> Expr:
    """Where a slice begins, after counting from the end and clamping, as Python's slices do."""
    if start is None:
        return ix.ZERO
    return ix.minimum(ix.maximum(wrapped(ix.as_index(start), size), 0), size)


def sliced(t: Tensor, dim: int, start: Expr, length: Expr, step: ix.IndexLike = 1) -> Tensor:
    size = (*t.size[:dim], length, *t.size[dim + 1 :])
    return view(t, size, lambda *i: replaced(i, dim, ix.add(start, ix.mul(i[dim], step))))


@lowers(aten.slice.Tensor, aten.slice_copy.Tensor)
def _slice(ctx: Lowering, t: Tensor, dim: int = 0, start: ix.IndexLike | None = None,
           end: ix.IndexLike | None = None, step: ix.IndexLike = 1) -> Tensor:  # fmt: skip
    dim = axis(dim, t.rank)
    return sliced(t, dim, slice_start(start, t.size[dim]), result_size(ctx)[dim], step)


@lowers(aten.narrow_copy.default)
def _narrow(ctx: Lowering, t: Tensor, dim: int, start: ix.IndexLike, length: Any) -> Tensor:
    dim = axis(dim, t.rank)
    return sliced(t, dim, wrapped(ix.as_index(start), t.size[dim]), result_size(ctx)[dim])


@lowers(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor,
        aten.split_with_sizes.default, aten.split_with_sizes_copy.default,
        aten.unsafe_split_with_sizes.default)  # fmt: skip
def _split(ctx: Lowering, t: Tensor, sizes: Any, dim: int = 0) -> list[Tensor]:
    assert ctx.node is not None
    dim = axis(dim, t.rank)
    pieces: list[Tensor] = []
    start = ix.ZERO
    for fake in ctx.node.meta["val"]:
        length = ctx.sizes.index(fake.size(dim))
        pieces.append(sliced(t, dim, start, length))
        start = ix.add(start, length)
    return pieces


@lowers(aten.unbind.int, aten.unbind_copy.int)
def _unbind(ctx: Lowering, t: Tensor, dim: int = 0) -> list[Tensor]:
    assert ctx.node is not None
    return [select(t, dim, k) for k in range(len(ctx.node.meta["val"]))]


@lowers(aten.unfold.default, aten.unfold_copy.default)
def _unfold(ctx: Lowering, t: Tensor, dim: int, size: ix.IndexLike, step: ix.IndexLike) -> Tensor:
    if not t.rank:
        return view(t, result_size(ctx), lambda *i: [])
    dim = axis(dim, t.rank)
    return view(t, result_size(ctx),
                lambda *i: replaced(i[:-1], dim, ix.add(ix.mul(i[dim], step), i[-1])))  # fmt: skip


def diagonal_start(offset: ix.IndexLike) -> tuple[Expr, Expr]:
    """(row, column) of a diagonal's first element."""
    return ix.maximum(ix.neg(offset), 0), ix.maximum(offset, 0)


@lowers(aten.diagonal.default, aten.diagonal_copy.default)
def _diagonal(ctx: Lowering, t: Tensor, offset: ix.IndexLike = 0, dim1: int = 0,
              dim2: int = 1) -> Tensor:  # fmt: skip
    return view(t, result_size(ctx), _along_diagonal(t.rank, offset, dim1, dim2))


def _along_diagonal(rank: int, offset: ix.IndexLike, dim1: int,
                    dim2: int) -> Callable[..., list[Expr]]:  # fmt: skip
    """Where element `(..., k)` of a diagonal lies."""
    a, b = axis(dim1, rank), axis(dim2, rank)
    row, column = diagonal_start(offset)

    def position(*i: Expr) -> list[Expr]:
        rest = iter(i[:-1])
        return [ix.add(i[-1], row) if k == a else ix.add(i[-1], column) if k == b else next(rest)
                for k in range(rank)]  # fmt: skip

    return position


# ---- scattering twins of views: which elements change is known from the index


def scatter_slice(into: Tensor, src: Tensor, dim: int, start: Expr, step: ix.IndexLike) -> Tensor:
    def value(*i: Expr) -> Expr:
        away = ix.sub(i[dim], start)
        mask = inside(i[dim], start, ix.add(start, ix.mul(src.size[dim], step)))
        mask = build.both(mask, build.op("eq", ix.mod(away, step), ix.ZERO))
        new = src.at(replaced(i, dim, ix.floordiv(away, step)))
        return build.where(mask, build.guard(new, mask), into.at(i))

    return from_indices(into.size, into.device, value)


def _blank(size: Size, like: Tensor) -> Tensor:
    return Tensor(size, like.dtype, like.device, zero(like.dtype))


@lowers(aten.slice_scatter.default)
def _slice_scatter(ctx: Lowering, t: Tensor, src: Tensor, dim: int = 0,
                   start: ix.IndexLike | None = None, end: ix.IndexLike | None = None,
                   step: ix.IndexLike = 1) -> Tensor:  # fmt: skip
    dim = axis(dim, t.rank)
    begin = slice_start(start, t.size[dim])
    if any(s is ix.ONE for s in src.size):
        src = expand(src, _slice_size(t, dim, begin, end, step))
    src = src.to(t.dtype)
    placed = put_window(
        ctx, t, src, lambda *i: replaced(i, dim, ix.add(begin, ix.mul(i[dim], step)))
    )
    return scatter_slice(t, src, dim, begin, step) if placed is None else placed


def _slice_size(t: Tensor, dim: int, start: Expr, end: ix.IndexLike | None,
                step: ix.IndexLike) -> Size:  # fmt: skip
    stop = t.size[dim] if end is None else slice_start(end, t.size[dim])
    count = ix.floordiv(ix.add(ix.sub(ix.maximum(stop, start), start), ix.sub(step, 1)), step)
    return (*t.size[:dim], count, *t.size[dim + 1 :])


@lowers(aten.slice_backward.default)
def _slice_backward(ctx: Lowering, grad: Tensor, sizes: Any, dim: int, start: ix.IndexLike,
                    end: ix.IndexLike, step: ix.IndexLike) -> Tensor:  # fmt: skip
    into = _blank(result_size(ctx), grad)
    dim = axis(dim, grad.rank)
    return scatter_slice(into, grad, dim, slice_start(start, into.size[dim]), step)


def _scatter_select(into: Tensor, src: Tensor, dim: int, index: ix.IndexLike) -> Tensor:
    dim = axis(dim, into.rank)
    at = wrapped(ix.as_index(index), into.size[dim])
    src = expand(src, (*into.size[:dim], *into.size[dim + 1 :])).to(into.dtype)

    def value(*i: Expr) -> Expr:
        return build.where(build.op("eq", i[dim], at), src.at([*i[:dim], *i[dim + 1 :]]),
                           into.at(i))  # fmt: skip

    return from_indices(into.size, into.device, value)


@lowers(aten.select_scatter.default)
def _select_scatter(ctx: Lowering, t: Tensor, src: Tensor, dim: int, index: Any) -> Tensor:
    d = axis(dim, t.rank)
    at = wrapped(ix.as_index(index), t.size[d])
    given = expand(src, (*t.size[:d], *t.size[d + 1 :])).to(t.dtype)
    placed = put_window(ctx, t, given, lambda *i: [*i[:d], at, *i[d:]])
    return _scatter_select(t, src, dim, index) if placed is None else placed


@lowers(aten.select_backward.default)
def _select_backward(ctx: Lowering, grad: Tensor, sizes: Any, dim: int, index: Any) -> Tensor:
    return _scatter_select(_blank(result_size(ctx), grad), grad, dim, index)


def _scatter_diagonal(into: Tensor, src: Tensor, offset: Any, dim1: int, dim2: int) -> Tensor:
    a, b = axis(dim1, into.rank), axis(dim2, into.rank)
    row, column = diagonal_start(offset)

    def value(*i: Expr) -> Expr:
        mask = build.op("eq", ix.sub(i[b], i[a]), ix.as_index(offset))
        rest = [x for k, x in enumerate(i) if k not in (a, b)]
        # off the diagonal the clamp keeps the position inside the source
        along = ix.minimum(ix.sub(i[a], row), ix.sub(i[b], column))
        return build.where(mask, build.guard(src.at([*rest, along]), mask), into.at(i))

    return from_indices(into.size, into.device, value)


@lowers(aten.diagonal_scatter.default)
def _diagonal_scatter(ctx: Lowering, t: Tensor, src: Tensor, offset: Any = 0, dim1: int = 0,
                      dim2: int = 1) -> Tensor:  # fmt: skip
    src = src.to(t.dtype)
    placed = put_window(ctx, t, src, _along_diagonal(t.rank, offset, dim1, dim2))
    return _scatter_diagonal(t, src, offset, dim1, dim2) if placed is None else placed


@lowers(aten.diagonal_backward.default)
def _diagonal_backward(ctx: Lowering, grad: Tensor, sizes: Any, offset: Any, dim1: int,
                       dim2: int) -> Tensor:  # fmt: skip
    return _scatter_diagonal(_blank(result_size(ctx), grad), grad, offset, dim1, dim2)


@lowers(aten.diag_embed.default)
def _diag_embed(ctx: Lowering, t: Tensor, offset: Any = 0, dim1: int = -2,
                dim2: int = -1) -> Tensor:  # fmt: skip
    return _scatter_diagonal(_blank(result_size(ctx), t), t, offset, dim1, dim2)


# ---- as_strided


def _argument(ctx: Lowering) -> torch.fx.Node:
    assert ctx.node is not None
    node = ctx.node.args[0]
    assert isinstance(node, torch.fx.Node)
    return node


def _base(ctx: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    """The node that made the storage `node` is a view of."""
    storage = node.meta["val"].untyped_storage()._cdata
    while node.op == "call_function":
        source = next((a for a in node.args if isinstance(a, torch.fx.Node)), None)
        value = None if source is None else source.meta.get("val")
        if source is None or not isinstance(value, torch.Tensor):
            return node
        if value.untyped_storage()._cdata != storage:
            return node
        node = source
    return node


def _storage_offset(ctx: Lowering, buffer: str) -> Expr:
    """How far into its storage a buffer begins; an input may be a view of larger memory."""
    for node, value in ctx.env.items():
        if node.op == "placeholder" and isinstance(value, Tensor) and value.body.arg == buffer:
            return ctx.sizes.index(node.meta["val"].storage_offset())
    return ix.ZERO


def _memory(ctx: Lowering, t: Tensor, node: torch.fx.Node) -> View | None:
    """The window that `t` is, if it lies in its buffer as eager's tensor lies in its storage."""
    fake: torch.Tensor = node.meta["val"]
    found = as_view(t)
    if found is None:
        return None
    stride = ctx.sizes.tuple(fake.stride())
    same = all(a is b or n is ix.ONE
               for a, b, n in zip(found.stride, stride, found.size, strict=True))  # fmt: skip
    offset = ix.add(found.offset, _storage_offset(ctx, found.buffer))
    return found if same and offset is ctx.sizes.index(fake.storage_offset()) else None


@lowers(aten.as_strided.default, aten.as_strided_copy.default)
def _as_strided(ctx: Lowering, t: Tensor, size: Any, stride: Sequence[ix.IndexLike],
                offset: ix.IndexLike | None = None) -> Tensor:  # fmt: skip
    node = _argument(ctx)
    begin = ctx.sizes.index(node.meta["val"].storage_offset() if offset is None else offset)
    found = _memory(ctx, t, node)
    if found is None:  # computed, not yet stored, or stored otherwise than eager does
        node = _base(ctx, node)
        base = ctx.env[node]
        if not isinstance(base, Tensor):
            raise Unsupported("as_strided of a storage that is not a plain tensor")
        found = _memory(ctx, base, node)
        if found is None:
            if not _is_dense(ctx, node.meta["val"]):
                raise Unsupported("as_strided of a storage with gaps")
            found = as_view(ctx.copy(base, ctx.sizes.tuple(node.meta["val"].stride())))
            assert found is not None
    start = ix.sub(begin, _storage_offset(ctx, found.buffer))
    points = placeholders(result_size(ctx))
    index = ix.linearize(points, stride, start)
    return Tensor(result_size(ctx), t.dtype, t.device, load(found.buffer, t.dtype, index))


def _is_dense(ctx: Lowering, fake: torch.Tensor) -> bool:
    """Whether the tensor begins its storage and fills it without gaps, each place once."""
    left = dict(enumerate(ctx.sizes.tuple(fake.size())))
    stride = ctx.sizes.tuple(fake.stride())
    left = {k: s for k, s in left.items() if s is not ix.ONE}
    step = ix.ONE
    while left:
        k = next((k for k in left if stride[k] is step), None)
        if k is None:
            return False
        step = ix.mul(step, left.pop(k))
    return ctx.sizes.index(fake.storage_offset()) is ix.ZERO


@lowers(aten.as_strided_scatter.default)
def _as_strided_scatter(ctx: Lowering, t: Tensor, src: Tensor, size: Any,
                        stride: Sequence[ix.IndexLike],
                        offset: ix.IndexLike | None = None) -> Tensor:  # fmt: skip
    fake = _argument(ctx).meta["val"]
    if not _is_dense(ctx, fake):
        raise Unsupported("as_strided_scatter into a storage with gaps")
    begin = ctx.sizes.index(fake.storage_offset() if offset is None else offset)
    in_place = _memory(ctx, t, _argument(ctx)) is not None and overwritable(ctx, t, others(ctx))
    target = t if in_place else ctx.copy(t, ctx.sizes.tuple(fake.stride()))
    points = placeholders(src.size)
    value = src.to(t.dtype).at(points)
    index = ix.linearize(points, stride, begin)
    ctx.nest(points, (), [Store(target.body.arg, index, value)])
    return target


MOST_WINDOWS = 16  # of an element; of more, each window adds to its elements


@lowers(aten.unfold_backward.default)
def _unfold_backward(ctx: Lowering, grad: Tensor, sizes: Any, dim: int, size: ix.IndexLike,
                     step: ix.IndexLike) -> Tensor:  # fmt: skip
    into = _blank(result_size(ctx), grad)
    if not into.rank:
        return reshape(grad, ())
    dim = axis(dim, into.rank)
    width, stride = ix.value_of(ix.as_index(size)), ix.value_of(ix.as_index(step))
    if width and stride and width <= MOST_WINDOWS * stride:
        return _sum_of_windows(grad, into, dim, width, stride)
    source = grad.to(compute_type(grad.dtype))
    return ctx.scatter(
        _blank(into.size, source), grad.size,
        lambda *i: replaced(i[:-1], dim, ix.add(ix.mul(i[dim], step), i[-1])),
        lambda *i: source.at(i), mode="add",
    ).to(grad.dtype)  # fmt: skip


def _sum_of_windows(grad: Tensor, into: Tensor, dim: int, width: int, step: int) -> Tensor:
    """Each element lies in few windows: it fetches its gradients instead of being added to."""

    def value(*i: Expr) -> Expr:
        last, within = ix.floordiv(i[dim], step), ix.mod(i[dim], step)
        parts: list[Expr] = []
        for k in reversed(range(-(-width // step))):  # in the order of the windows
            window, place = ix.sub(last, k), ix.add(within, k * step)
            mask = build.both(build.op("lt", place, const(width)),
                              build.both(build.op("ge", window, const(0)),
                                         build.op("lt", window, grad.size[dim])))  # fmt: skip
            new = grad.at([*replaced(i, dim, window), place])
            parts.append(build.where(mask, build.guard(new, mask), zero(grad.dtype)))
        if len(parts) == 1:
            return parts[0]
        wide = (build.cast(part, compute_type(grad.dtype)) for part in parts)
        return build.cast(functools.reduce(lambda a, b: build.op("add", a, b), wide), grad.dtype)

    return from_indices(into.size, into.device, value)
