"""Pooling: averages and maxima over windows, fixed or adaptive, forward and backward.

A window along one dimension is an `Axis`: which inputs an output sees, and which outputs see an
input. Forward and backward are then the same fold over the one or the other. A small window is
written out as one expression, so that it fuses with its neighbours; a large one is a reduction.
Backward passes gather from the windows that cover an element, so they need no atomic addition.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const
from tilewright.lower.context import Fill, Lowering
from tilewright.lower.promote import compute_type
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Size, Tensor, cost, from_indices, is_stored, placeholders, view

aten = torch.ops.aten

UNROLL = 32  # windows of up to this many elements are written out
GATHER_LIMIT = 64  # an element covered by more windows than this is reached by scattering instead
FAR = const(torch.iinfo(torch.int64).max)

Step = tuple[Expr, Expr]  # an index, and where it is valid
Point = Sequence[Expr]


def ceildiv(a: ix.IndexLike, b: ix.IndexLike) -> Expr:
    return ix.neg(ix.floordiv(ix.neg(a), b))


def inside(i: Expr, size: Expr) -> Expr:
    return build.both(build.op("ge", i, ix.ZERO), build.op("lt", i, size))


@dataclass(frozen=True)
class Strided:
    """Windows of fixed size at fixed steps along one dimension of `into` inputs, `out` outputs."""

    into: Expr
    out: Expr
    kernel: Expr
    stride: Expr
    pad: Expr
    dilation: Expr
    count_pad: bool = True

    @property
    def extent(self) -> Expr:
        """Inputs an output may see."""
        return self.kernel

    @property
    def _span(self) -> Expr:
        return ix.add(ix.mul(ix.sub(self.kernel, 1), self.dilation), 1)

    @property
    def covers(self) -> Expr:
        """Outputs that may see an input."""
        return ceildiv(self._span, self.stride)

    @property
    def steps_evenly(self) -> bool:
        """Whether windows are two inputs apart, of an even number, and reach beyond the first only,
        where they have one at least of either parity."""
        given = (self.into, self.out, self.kernel, self.pad)
        if any(ix.value_of(e) is None for e in given) or ix.value_of(self.stride) != 2:
            return False
        into, out, kernel, pad = (e.arg for e in given)
        last = kernel - 1 - pad  # input of the first window
        return into % 2 == 0 and 0 < last < into - 2 * (out - 1)

    def _start(self, o: Expr) -> Expr:
        return ix.sub(ix.mul(o, self.stride), self.pad)

    def input(self, o: Expr, w: Expr) -> Step:
        """The `w`-th input that output `o` sees."""
        i = ix.add(self._start(o), ix.mul(w, self.dilation))
        return i, inside(i, self.into)

    def nearest(self, o: Expr, w: Expr) -> Step:
        """The same, or the input of the window that is nearest where there is none."""
        i, _ = self.input(o, w)
        return ix.minimum(ix.maximum(i, 0), ix.sub(self.into, 1)), build.TRUE

    def alike(self, o: Expr, w: Expr) -> Step:
        """The same, or the first input of its parity, if windows step evenly."""
        if not self.steps_evenly:
            return self.nearest(o, w)
        i, _ = self.input(o, w)
        return ix.add(ix.mul(ix.maximum(ix.floordiv(i, 2), 0), 2), ix.mod(i, 2)), build.TRUE

    def output(self, i: Expr, j: Expr) -> Step:
        """The `j`-th output that may see input `i`, in rising order."""
        shifted = ix.add(i, self.pad)
        o = ix.sub(ix.floordiv(shifted, self.stride), ix.sub(ix.sub(self.covers, 1), j))
        valid = inside(o, self.out)
        if ix.mod(self._span, self.stride) is not ix.ZERO:
            reach = ix.sub(shifted, ix.mul(o, self.stride))
            valid = build.both(valid, build.op("lt", reach, self._span))
        return o, valid

    def first(self, o: Expr) -> Expr:
        """The first input of the window that is not padding."""
        start = self._start(o)
        skipped = ix.maximum(ceildiv(ix.neg(start), self.dilation), 0)
        return ix.add(start, ix.mul(skipped, self.dilation))

    def count(self, o: Expr) -> Expr:
        """By how much a sum over the window of `o` is divided."""
        start = self._start(o)
        end = ix.minimum(ix.add(start, self.kernel), ix.add(self.into, self.pad))
        if self.count_pad:
            return ix.sub(end, start)
        # a window that lies in the padding altogether has sum zero, whatever it is divided by
        return ix.maximum(ix.sub(ix.minimum(end, self.into), ix.maximum(start, 0)), 1)


@dataclass(frozen=True)
class Adaptive:
    """Windows that divide `into` inputs among `out` outputs; the methods are those of `Strided`."""

    into: Expr
    out: Expr

    @property
    def extent(self) -> Expr:
        return _widest(self.into, self.out)

    @property
    def covers(self) -> Expr:
        return _widest(self.out, self.into)

    def input(self, o: Expr, w: Expr) -> Step:
        return _share(o, w, self.into, self.out)

    def output(self, i: Expr, j: Expr) -> Step:
        return _share(i, j, self.out, self.into)

    def first(self, o: Expr) -> Expr:
        return ix.floordiv(ix.mul(o, self.into), self.out)

    def count(self, o: Expr) -> Expr:
        return ix.sub(ceildiv(ix.mul(ix.add(o, 1), self.into), self.out), self.first(o))


def _share(o: Expr, w: Expr, total: Expr, parts: Expr) -> Step:
    """Element `w` of share `o`, when `total` elements are divided into overlapping `parts`."""
    i = ix.add(ix.floordiv(ix.mul(o, total), parts), w)
    end = ceildiv(ix.mul(ix.add(o, 1), total), parts)
    return i, build.op("lt", i, end)


def _widest(total: Expr, parts: Expr) -> Expr:
    """The size of the largest share."""
    t, p = ix.value_of(total), ix.value_of(parts)
    if t is None or p is None:
        return ix.add(ix.floordiv(total, parts), 2)
    return const(max((-(-(o + 1) * t // p) - o * t // p for o in range(p)), default=0))


Axis = Strided | Adaptive


# ---- folding over windows


def _steps(axes: Sequence[Axis], step: Callable[[Axis, Expr, Expr], Step], at: Point,
           w: Point) -> tuple[list[Expr], Expr]:  # fmt: skip
    found = [step(axis, p, q) for axis, p, q in zip(axes, at, w, strict=True)]
    mask = build.TRUE
    for _, valid in found:
        mask = build.both(mask, valid)
    return [i for i, _ in found], mask


def _unrolled(extents: Sequence[Expr], limit: int = UNROLL) -> list[tuple[Expr, ...]] | None:
    """Every point of a small window, in order."""
    count = ix.value_of(ix.product(extents))
    if count is None or not 0 < count <= limit:
        return None
    ranges = [range(e.arg) for e in extents]
    return [tuple(const(k) for k in point) for point in itertools.product(*ranges)]


def _fold_sum(ctx: Lowering, like: Tensor, size: Size, extents: Sequence[Expr],
              term: Callable[[Point, Point], Expr]) -> Tensor:  # fmt: skip
    """The tensor of `size` whose elements are sums of `term(point, w)` over a window."""
    window = _unrolled(extents)
    if window is not None:
        at = placeholders(size)
        total = term(at, window[0])
        for w in window[1:]:
            total = build.op("add", total, term(at, w))
        return Tensor(size, total.dtype, like.device, total)
    rank = len(size)
    terms = from_indices((*size, *extents), like.device, lambda *p: term(p[:rank], p[rank:]))
    dims = range(rank, rank + len(extents))
    (result,) = ctx.reduce("sum", terms, dims, False, Fill(terms.dtype))
    return result


def _prepared(ctx: Lowering, t: Tensor, axes: Sequence[Axis]) -> Tensor:
    """`t`, stored if its windows overlap and computing it again costs more than reading it."""
    overlap = ix.value_of(ix.product(axis.covers for axis in axes)) != 1
    work, reads = cost(t.body)
    return ctx.realize(t) if overlap and not is_stored(t) and (work > 2 or reads > 1) else t


def _guarded(t: Tensor, at: Point, mask: Expr, fill: Expr) -> Expr:
    return build.where(mask, build.guard(t.at(at), mask), fill)


def _zero(dtype: torch.dtype) -> Expr:
    return const(0, dtype)


def _divide(total: Expr, divisor: Expr) -> Expr:
    name = "div" if total.dtype.is_floating_point else "truncdiv"
    return build.op(name, total, build.cast(divisor, total.dtype))


Steps = Callable[[Axis, Expr, Expr], Step]


def _input(axis: Axis, o: Expr, w: Expr) -> Step:
    return axis.input(o, w)


def _output(axis: Axis, i: Expr, k: Expr) -> Step:
    return axis.output(i, k)


def _is_by_axis(t: Tensor, axes: Sequence[Axis], extents: Sequence[Expr]) -> bool:
    """Whether windows are folded along one axis after the other: those on a card that are too large
    to be written out, and have most of what they see in common (H200: averages of seven by seven of
    96 planes of 256x256 floats 369 us as one fold)."""
    plain = all(isinstance(axis, Strided) and axis.stride is ix.ONE for axis in axes)
    if t.device.type != "cuda" or len(axes) < 2 or not plain or _unrolled(extents) is not None:
        return False
    return all(1 < (ix.value_of(e) or 0) <= UNROLL for e in extents)


def _by_axis(ctx: Lowering, t: Tensor, out: Size, axes: Sequence[Axis], step: Steps, op: str,
             fill: Expr) -> Tensor:  # fmt: skip
    """`t` folded along its last axis, then along the one before, to a tensor of size `out`."""
    lead = t.rank - len(axes)
    for k, axis in reversed(list(enumerate(axes, lead))):
        source = ctx.realize(t)
        extent = axis.extent if step is _input else axis.covers
        size = (*source.size[:k], *out[k:])
        at = placeholders(size)
        total: Expr | None = None
        for w in range(extent.arg):
            where, mask = step(axis, at[k], const(w))
            value = _guarded(source, [*at[:k], where, *at[k + 1 :]], mask, fill)
            total = value if total is None else build.op(op, total, value)
        assert total is not None
        t = Tensor(size, total.dtype, source.device, total)
    return t


# ---- averages


def _sum_inputs(ctx: Lowering, t: Tensor, out: Size, axes: Sequence[Axis],
                divisor: Expr | None) -> Tensor:  # fmt: skip
    lead = t.rank - len(axes)
    source = _prepared(ctx, t.to(compute_type(t.dtype)), axes)
    by = _counts(axes, placeholders(out)[lead:]) if divisor is None else divisor
    if _is_by_axis(t, axes, [axis.extent for axis in axes]):
        total = _by_axis(ctx, source, out, axes, _input, "add", _zero(source.dtype))
        return total.map(lambda e: _divide(e, by)).to(t.dtype)

    def term(at: Point, w: Point) -> Expr:
        where, mask = _steps(axes, _input, at[lead:], w)
        return _guarded(source, [*at[:lead], *where], mask, _zero(source.dtype))

    total = _fold_sum(ctx, t, out, [axis.extent for axis in axes], term)
    return total.map(lambda e: _divide(e, by)).to(t.dtype)


def _counts(axes: Sequence[Axis], at: Point) -> Expr:
    return ix.product(axis.count(o) for axis, o in zip(axes, at, strict=True))


def _spread_outputs(ctx: Lowering, grad: Tensor, into: Size, axes: Sequence[Axis],
                    divisor: Expr | None) -> Tensor:  # fmt: skip
    lead = grad.rank - len(axes)
    source = grad.to(compute_type(grad.dtype))
    if _is_by_axis(grad, axes, [axis.covers for axis in axes]):
        by = _counts(axes, placeholders(grad.size)[lead:]) if divisor is None else divisor
        shares = source.map(lambda e: _divide(e, by))
        total = _by_axis(ctx, shares, into, axes, _output, "add", _zero(source.dtype))
        return total.to(grad.dtype)

    def term(at: Point, w: Point) -> Expr:
        where, mask = _steps(axes, _output, at[lead:], w)
        by = _counts(axes, where) if divisor is None else divisor
        share = _divide(source.at([*at[:lead], *where]), by)
        return build.where(mask, build.guard(share, mask), _zero(source.dtype))

    return _fold_sum(ctx, grad, into, [axis.covers for axis in axes], term).to(grad.dtype)


# ---- maxima


def _lowest(dtype: torch.dtype) -> Expr:
    return const(-float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min, dtype)


def _maxima(ctx: Lowering, t: Tensor, out: Size,
            axes: Sequence[Axis]) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Values and positions (in the flattened spatial dimensions) of the window maxima.

    The first of equal maxima counts; of several NaNs the last, as eager has it.
    """
    lead = t.rank - len(axes)
    source = _prepared(ctx, t.to(compute_type(t.dtype)), axes)
    strides = ix.contiguous_strides([axis.into for axis in axes])

    window = _unrolled([axis.extent for axis in axes])
    step = _input if window is None else _repeating(ctx, t, axes)

    def element(at: Point, w: Point) -> tuple[Expr, Expr, Expr]:
        where, mask = _steps(axes, step, at[lead:], w)
        value = _guarded(source, [*at[:lead], *where], mask, _lowest(source.dtype))
        return value, ix.linearize(where, strides), mask

    if window is None:
        values, positions = _reduced_maxima(ctx, t, out, axes, element)
    else:
        values, positions = _written_maxima(t, out, axes, element, window, strides)
    return values.to(t.dtype), positions


def _repeating(ctx: Lowering, t: Tensor, axes: Sequence[Axis]) -> Steps:
    """The inputs of a window, of which one stands for the padding next to it where that is worth
    it: it changes no maximum, and without masks neighbouring windows have loads in common, those of
    an even number of columns in pairs. Then of equal maxima another may come first. (H200, three by
    two, bfloat16: 281408 planes of 15x15 75 us, 81 us with masks; 57600 of 31x31 50 us, 56 us;
    12800 of 54x54 27 us, 45 us; 12288 of 64x64 32 us, 39 us; 4096 of 112x112 41 us, 42 us; 16384 of
    56x56 45 us, 44 us; but 149504 of 16x16 35 us, 33 us; 9600 of 55x55 float32 43 us, 39 us.)"""
    plain = [axis for axis in axes if isinstance(axis, Strided) and axis.dilation is ix.ONE]
    if t.device.type != "cuda" or t.dtype.itemsize != 2 or len(plain) < len(axes):
        return _input
    if ix.mod(plain[-1].into, 2) is ix.ONE:
        return lambda axis, o, w: plain[axes.index(axis)].nearest(o, w)
    if plain[-1].steps_evenly and not _has_positions(ctx) and ix.known_lt(16, plain[-1].into):
        return lambda axis, o, w: plain[axes.index(axis)].alike(o, w)
    return _input


def _has_positions(ctx: Lowering) -> bool:
    """Whether more than values are asked for."""
    assert ctx.node is not None
    return any(user.target is not operator.getitem or user.args[1] != 0 for user in ctx.node.users)


Element = Callable[[Point, Point], tuple[Expr, Expr, Expr]]


def _written_maxima(t: Tensor, out: Size, axes: Sequence[Axis], element: Element,
                    window: Sequence[Point], strides: Size) -> tuple[Tensor, Tensor]:  # fmt: skip
    at = placeholders(out)
    spatial = at[len(out) - len(axes) :]
    # what eager starts from: the answer when every element is the lowest value
    first = [axis.first(o) for axis, o in zip(axes, spatial, strict=True)]
    position = ix.linearize(first, strides)
    best: Expr | None = None
    for w in window:
        value, where, mask = element(at, w)
        if best is None:
            best = value
            if mask is not build.TRUE and not _always_inside(axes):
                found = build.op("gt", value, _lowest(value.dtype))
                position = build.where(_or_nan(found, value), where, position)
            continue
        larger = _or_nan(build.op("gt", value, best), value)
        position = build.where(larger, where, position)
        best = build.op("max", best, value)
    assert best is not None
    return Tensor(out, best.dtype, t.device, best), Tensor(out, torch.int64, t.device, position)


def _always_inside(axes: Sequence[Axis]) -> bool:
    """Whether the first element of every window exists, and so is `first` of each axis."""
    return all(isinstance(axis, Adaptive) or axis.pad is ix.ZERO for axis in axes)


def _or_nan(condition: Expr, value: Expr) -> Expr:
    if not value.dtype.is_floating_point:
        return condition
    return build.op("bit_or", condition, build.op("isnan", value))


def _reduced_maxima(ctx: Lowering, t: Tensor, out: Size, axes: Sequence[Axis],
                    element: Element) -> tuple[Tensor, Tensor]:  # fmt: skip
    rank = len(out)
    size = (*out, *(axis.extent for axis in axes))
    dims = range(rank, len(size))
    values = from_indices(size, t.device, lambda *p: element(p[:rank], p[rank:])[0])
    (best,) = ctx.reduce("max", values, dims, False, Fill(values.dtype))

    def key(*p: Expr) -> Expr:
        """Smallest for the first maximum; below zero, and smaller the later, for a NaN."""
        value, where, mask = element(p[:rank], p[rank:])
        equal = build.both(mask, build.op("eq", value, best.at(p[:rank])))
        found = build.where(equal, where, FAR)
        if not value.dtype.is_floating_point:
            return found
        return build.where(build.op("isnan", value), ix.sub(-1, where), found)

    keys = from_indices(size, t.device, key)
    decode = Fill(torch.int64, lambda e: build.where(
        build.op("lt", e, ix.ZERO), build.op("sub", const(-1), e), e))  # fmt: skip
    (positions,) = ctx.reduce("min", keys, dims, False, decode)
    return best, positions


def _route(ctx: Lowering, grad: Tensor, indices: Tensor, into: Size,
           axes: Sequence[Axis]) -> Tensor:  # fmt: skip
    """Send each gradient to the element whose position was kept."""
    lead = grad.rank - len(axes)
    source = grad.to(compute_type(grad.dtype))
    covers = [axis.covers for axis in axes]
    # A CPU adds one element as fast as it looks at one place it might have gone to (windows of
    # nine, 8x48x48x48: 22 ms looking, under 1 ms adding; AVX2, one thread, 2026-11-15).
    most = 1 if source.device.type == "cpu" else GATHER_LIMIT
    if _unrolled(covers, most) is None:
        flat = _scattered(ctx, source, indices, into, lead, "add")
        return flat.to(grad.dtype)
    strides = ix.contiguous_strides(into[lead:])

    def term(at: Point, w: Point) -> Expr:
        where, mask = _steps(axes, _output, at[lead:], w)
        here = [*at[:lead], *where]
        own = build.op("eq", build.guard(indices.at(here), mask),
                       ix.linearize(at[lead:], strides))  # fmt: skip
        return _guarded(source, here, build.both(mask, own), _zero(source.dtype))

    return _fold_sum(ctx, grad, into, covers, term).to(grad.dtype)


def _scattered(ctx: Lowering, source: Tensor, indices: Tensor, into: Size, lead: int,
               mode: Any) -> Tensor:  # fmt: skip
    """Zeros of size `into`, with `source` put at positions in the flattened trailing dimensions."""
    plane = ix.product(into[lead:])
    if plane is ix.ZERO:
        raise Unsupported("nothing can be put into a plane without elements")
    zeros = from_indices((*into[:lead], plane), source.device, lambda *_: _zero(source.dtype))

    def target(*at: Expr) -> list[Expr]:
        return [*at[:lead], build.op("index", indices.at(at), plane)]

    flat = ctx.scatter(zeros, source.size, target, lambda *at: source.at(at), mode)
    strides = ix.contiguous_strides(into[lead:])
    return view(flat, into, lambda *at: [*at[:lead], ix.linearize(at[lead:], strides)])


# ---- the ATen ops


def _per_axis(n: int, given: Sequence[Any] | None, default: Sequence[Any]) -> list[Expr]:
    values = list(given) if given else list(default)
    values = values * n if len(values) == 1 else values
    return [ix.as_index(v) for v in values]


def _strided(into: Size, out: Size, kernel: Sequence[Any], stride: Sequence[Any] | None,
             padding: Sequence[Any], dilation: Sequence[Any] = (1,),
             count_pad: bool = True) -> list[Strided]:  # fmt: skip
    n = len(into)
    columns = (into, out, _per_axis(n, kernel, ()), _per_axis(n, stride, kernel),
               _per_axis(n, padding, (0,)), _per_axis(n, dilation, (1,)))  # fmt: skip
    return [Strided(i, o, k, s, p, d, count_pad) for i, o, k, s, p, d in zip(*columns, strict=True)]


def _result_size(ctx: Lowering) -> Size:
    assert ctx.node is not None
    value = ctx.node.meta["val"]
    return ctx.sizes.tuple((value[0] if isinstance(value, (tuple, list)) else value).size())


def _avg_pool(n: int) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = (0,),
                 ceil_mode: bool = False, count_include_pad: bool = True,
                 divisor_override: Any = None) -> Tensor:  # fmt: skip
        out = _result_size(ctx)
        if not (x.dtype.is_floating_point or x.dtype == torch.int64):
            raise Unsupported("eager averages floats and 64-bit integers alone, and says so")
        axes = _strided(x.size[-n:], out[-n:], kernel_size, stride, padding,
                        count_pad=count_include_pad)  # fmt: skip
        return _sum_inputs(ctx, x, out, axes, _divisor(divisor_override))

    return lowering


def _divisor(given: Any) -> Expr | None:
    return None if given is None else ix.as_index(given)


def _avg_pool_backward(n: int) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, grad: Tensor, x: Tensor, kernel_size: Any, stride: Any,
                 padding: Any, ceil_mode: bool, count_include_pad: bool,
                 divisor_override: Any = None) -> Tensor:  # fmt: skip
        axes = _strided(x.size[-n:], grad.size[-n:], kernel_size, stride, padding,
                        count_pad=count_include_pad)  # fmt: skip
        return _spread_outputs(ctx, grad, x.size, axes, _divisor(divisor_override))

    return lowering


def _max_pool(n: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def lowering(
        ctx: Lowering, x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = (0,),
        dilation: Any = (1,), ceil_mode: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out = _result_size(ctx)
        axes = _strided(x.size[-n:], out[-n:], kernel_size, stride, padding, dilation)
        return _maxima(ctx, x, out, axes)

    return lowering


def _max_pool_backward(n: int) -> Callable[..., Tensor]:
    def lowering(
        ctx: Lowering, grad: Tensor, x: Tensor, kernel_size: Any, stride: Any, padding: Any,
        dilation: Any, ceil_mode: bool, indices: Tensor,
    ) -> Tensor:  # fmt: skip
        axes = _strided(x.size[-n:], grad.size[-n:], kernel_size, stride, padding, dilation)
        return _route(ctx, grad, indices, x.size, axes)

    return lowering


def _adaptive(into: Size, out: Size) -> list[Adaptive]:
    return [Adaptive(i, o) for i, o in zip(into, out, strict=True)]


def _of_floats(x: Tensor) -> None:
    if not x.dtype.is_floating_point:
        raise Unsupported("eager pools adaptively over floats alone, and says so")


def _adaptive_avg_pool(n: int) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, x: Tensor, output_size: Any) -> Tensor:
        out = _result_size(ctx)
        _of_floats(x)
        return _sum_inputs(ctx, x, out, _adaptive(x.size[-n:], out[-n:]), None)

    return lowering


def _adaptive_avg_pool_backward(n: int) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, grad: Tensor, x: Tensor) -> Tensor:
        return _spread_outputs(ctx, grad, x.size, _adaptive(x.size[-n:], grad.size[-n:]), None)

    return lowering


def _adaptive_max_pool(n: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def lowering(ctx: Lowering, x: Tensor, output_size: Any) -> tuple[Tensor, Tensor]:
        out = _result_size(ctx)
        _of_floats(x)
        return _maxima(ctx, x, out, _adaptive(x.size[-n:], out[-n:]))

    return lowering


def _adaptive_max_pool_backward(n: int) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        return _route(ctx, grad, indices, x.size, _adaptive(x.size[-n:], grad.size[-n:]))

    return lowering


def _max_unpool(n: int) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, x: Tensor, indices: Tensor, output_size: Any, stride: Any = (),
                 padding: Any = ()) -> Tensor:  # fmt: skip
        return _scattered(ctx, x, indices, _result_size(ctx), x.rank - n, "set")

    return lowering


for _n, _op, _make in (
    (1, aten.avg_pool1d.default, _avg_pool),
    (2, aten.avg_pool2d.default, _avg_pool),
    (3, aten.avg_pool3d.default, _avg_pool),
    (2, aten.avg_pool2d_backward.default, _avg_pool_backward),
    (3, aten.avg_pool3d_backward.default, _avg_pool_backward),
    (2, aten.max_pool2d_with_indices.default, _max_pool),
    (3, aten.max_pool3d_with_indices.default, _max_pool),
    (2, aten.max_pool2d_with_indices_backward.default, _max_pool_backward),
    (3, aten.max_pool3d_with_indices_backward.default, _max_pool_backward),
    (1, aten.adaptive_avg_pool1d.default, _adaptive_avg_pool),
    (2, aten._adaptive_avg_pool2d.default, _adaptive_avg_pool),
    (3, aten._adaptive_avg_pool3d.default, _adaptive_avg_pool),
    (2, aten._adaptive_avg_pool2d_backward.default, _adaptive_avg_pool_backward),
    (3, aten._adaptive_avg_pool3d_backward.default, _adaptive_avg_pool_backward),
    (2, aten.adaptive_max_pool2d.default, _adaptive_max_pool),
    (3, aten.adaptive_max_pool3d.default, _adaptive_max_pool),
    (2, aten.adaptive_max_pool2d_backward.default, _adaptive_max_pool_backward),
    (3, aten.adaptive_max_pool3d_backward.default, _adaptive_max_pool_backward),
    (2, aten.max_unpool2d.default, _max_unpool),
    (3, aten.max_unpool3d.default, _max_unpool),
):
    lowers(_op)(_make(_n))
