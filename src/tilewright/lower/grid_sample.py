"""Grid sampling: an input read at positions that a tensor gives, and its gradients.

Along one dimension a position is a few taps: elements of the input, each with a weight, and with
the slope of that weight along the grid's own coordinate. Forward and both gradients multiply the
taps of all dimensions out; they differ in what is summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const
from tilewright.lower import formula as f
from tilewright.lower.context import Fill, Lowering
from tilewright.lower.promote import compute_type
from tilewright.lower.resample import CUBIC_A, cubic_weights
from tilewright.lower.table import lowers
from tilewright.lower.tensor import Size, Tensor, from_indices
from tilewright.lower.views import result_size

aten = torch.ops.aten

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)


@dataclass(frozen=True)
class Tap:
    """An element at a whole float position, its weight (None: one) and the weight's slope."""

    at: Expr
    weight: Expr | None = None
    slope: Expr | None = None


@dataclass(frozen=True)
class Sampler:
    mode: int
    padding: int
    align: bool

    def taps(self, c: Expr, size: Expr) -> list[Tap]:
        """What the grid's coordinate `c`, in [-1, 1], reads along a dimension of `size`."""
        at, rate = self._position(c, size)
        if self.mode == BICUBIC:
            return self._cubic(at, rate, size)
        at, inner = self._padded(at, size)
        if self.mode == NEAREST:
            return [Tap(build.op("round", at))]
        low = build.op("floor", at)
        high = f.add(low, 1.0)
        rate = rate if inner is None else f.mul(rate, inner)
        return [Tap(low, f.sub(high, at), f.neg(rate)), Tap(high, f.sub(at, low), rate)]

    def _cubic(self, at: Expr, rate: Expr, size: Expr) -> list[Tap]:
        whole = build.op("floor", at)
        part = f.sub(at, whole)
        slopes = [f.mul(s, rate) for s in _cubic_slopes(part)]
        ats = [self._padded(f.add(whole, float(k - 1)), size)[0] for k in range(4)]
        return [Tap(*tap) for tap in zip(ats, cubic_weights(part), slopes, strict=True)]

    def _position(self, c: Expr, size: Expr) -> tuple[Expr, Expr]:
        """From [-1, 1] to element positions, and how many of them to one of `c`."""
        extent = build.cast(size, c.dtype)
        if self.align:
            last = f.sub(extent, 1.0)
            return f.mul(f.mul(f.add(c, 1.0), 0.5), last), f.mul(last, 0.5)
        at = f.mul(f.sub(f.mul(f.add(c, 1.0), extent), 1.0), 0.5)
        return at, f.mul(extent, 0.5)

    def _padded(self, c: Expr, size: Expr) -> tuple[Expr, Expr | None]:
        """A position outside the input moved inside it, and its slope (None: one)."""
        if self.padding == ZEROS:
            return c, None
        rate: Expr | None = None
        if self.padding == REFLECTION:
            c, rate = self._reflected(c, size)
        last = build.cast(ix.sub(size, 1), c.dtype)
        inner = f.both(f.gt(c, 0.0), f.lt(c, last))
        rate = f.where(inner, f.like(1.0, c) if rate is None else rate, 0.0)
        return f.minimum(f.maximum(c, 0.0), last), rate

    def _reflected(self, c: Expr, size: Expr) -> tuple[Expr, Expr]:
        """Folded at the borders as often as it takes."""
        low = 0.0 if self.align else -0.5
        span = build.cast(ix.sub(size, 1) if self.align else size, c.dtype)
        distance = f.abs_(f.sub(c, low))
        turns = build.op("floor", f.div(distance, span))
        rest = build.op("fmod", distance, span)
        even = f.eq(f.mul(build.op("floor", f.mul(turns, 0.5)), 2.0), turns)
        folded = f.where(even, rest, f.sub(span, rest))
        back = f.add(folded, low) if low else folded
        forward = f.eq(even, f.ge(c, low))  # of two turns the second undoes the first
        rate = f.where(forward, f.like(1.0, c), -1.0)
        point = f.eq(span, 0.0)
        return f.where(point, 0.0, back), f.where(point, 0.0, rate)


def _cubic_slopes(t: Expr) -> list[Expr]:
    """The derivatives of `cubic_weights` by `t`."""
    a = CUBIC_A

    def near(x: Expr) -> Expr:
        return f.mul(f.sub(f.mul(x, 3 * (a + 2)), 2 * (a + 3)), x)

    def far(x: Expr) -> Expr:
        return f.add(f.mul(f.sub(f.mul(x, 3 * a), 10 * a), x), 8 * a)

    back = f.sub(1.0, t)
    return [far(f.add(t, 1.0)), near(t), f.neg(near(back)), f.neg(far(f.add(back, 1.0)))]


# ---- elements


def _inside(at: Sequence[Expr], sizes: Sequence[Expr]) -> Expr:
    """Whether float positions are inside (NaN is not)."""
    mask = build.TRUE
    for c, size in zip(at, sizes, strict=True):
        last = build.cast(ix.sub(size, 1), c.dtype)
        mask = build.both(mask, f.both(f.ge(c, 0.0), f.le(c, last)))
    return mask


def _indices(at: Sequence[Expr], sizes: Sequence[Expr]) -> list[Expr]:
    """Whole float positions as indices, each zero where it is not inside its own dimension: so one
    of a row is the same for all elements of it."""
    found: list[Expr] = []
    for c, size in zip(at, sizes, strict=True):
        i = build.cast(f.where(_inside([c], [size]), c, 0.0), torch.int64)
        found.append(ix.maximum(ix.minimum(i, ix.sub(size, 1)), 0))
    return found


def _pick(source: Tensor, lead: Sequence[Expr], at: Sequence[Expr]) -> Expr:
    """The element at float positions that are whole; zero outside."""
    sizes = source.size[len(lead) :]
    mask = _inside(at, sizes)
    value = build.guard(source.at([*lead, *_indices(at, sizes)]), mask)
    return f.where(mask, value, 0.0)


def _weighted(value: Expr, *weights: Expr | None) -> Expr:
    """`value` times the product of the weights, multiplied from the last."""
    total: Expr | None = None
    for weight in reversed(weights):
        if weight is not None:
            total = weight if total is None else f.mul(total, weight)
    return value if total is None else f.mul(value, build.cast(total, value.dtype))


def _sum(terms: Sequence[Expr]) -> Expr:
    total = terms[0]
    for term in terms[1:]:
        total = f.add(total, term)
    return total


# ---- the operators


def _taps(sampler: Sampler, grid: Tensor, n: Expr, at: Sequence[Expr], sizes: Size
          ) -> list[list[Tap]]:  # fmt: skip
    """The taps of one output per spatial dimension, outermost first; the grid's order is x, y."""
    last = len(sizes) - 1
    return [sampler.taps(grid.at([n, *at, const(last - k)]), size) for k, size in enumerate(sizes)]


@lowers(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(ctx: Lowering, x: Tensor, grid: Tensor, interpolation_mode: int,
                 padding_mode: int, align_corners: bool) -> Tensor:  # fmt: skip
    sampler = Sampler(interpolation_mode, padding_mode, align_corners)
    source = ctx.realize(x).to(compute_type(x.dtype))
    places = ctx.realize(grid).to(source.dtype)

    def element(n: Expr, c: Expr, *at: Expr) -> Expr:
        taps = _taps(sampler, places, n, at, x.size[2:])
        if sampler.mode == BICUBIC:  # row by row, as eager
            rows = [_weighted(_sum([_weighted(_pick(source, (n, c), [y.at, z.at]), z.weight)
                                    for z in taps[1]]), y.weight) for y in taps[0]]  # fmt: skip
            return build.cast(_sum(rows), x.dtype)
        terms = [_weighted(_pick(source, (n, c), [t.at for t in chosen]),
                           *(t.weight for t in chosen))
                 for chosen in itertools.product(*taps)]  # fmt: skip
        return build.cast(_sum(terms), x.dtype)

    return from_indices(result_size(ctx), x.device, element)


@lowers(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(ctx: Lowering, grad: Tensor, x: Tensor, grid: Tensor,
                          interpolation_mode: int, padding_mode: int, align_corners: bool,
                          output_mask: Sequence[bool]
                          ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    sampler = Sampler(interpolation_mode, padding_mode, align_corners)
    work = compute_type(x.dtype)
    source, places, slopes = (ctx.realize(t).to(work) for t in (x, grid, grad))
    of_input = _to_input(ctx, sampler, slopes, x, places) if output_mask[0] else None
    of_grid = _to_grid(ctx, sampler, slopes, source, places) if output_mask[1] else None
    return (None if of_input is None else of_input.to(x.dtype),
            None if of_grid is None else of_grid.to(grid.dtype))  # fmt: skip


def _to_input(ctx: Lowering, sampler: Sampler, grad: Tensor, x: Tensor, grid: Tensor) -> Tensor:
    """Every output's gradient added to its taps: one loop over the outputs and their taps."""
    sizes, rank = x.size[2:], len(x.size)
    count = {BILINEAR: 2, NEAREST: 1, BICUBIC: 4}[sampler.mode]
    over = (*grad.size, *[const(count)] * len(sizes))

    def chosen(point: Sequence[Expr]) -> list[Tap]:
        taps = _taps(sampler, grid, point[0], point[2:rank], sizes)
        return [_select(options, k) for options, k in zip(taps, point[rank:], strict=True)]

    def position(*point: Expr) -> list[Expr]:
        at = [t.at for t in chosen(point)]
        return [*point[:2], *_indices(at, sizes)]

    def mask(*point: Expr) -> Expr:
        return _inside([t.at for t in chosen(point)], sizes)

    def value(*point: Expr) -> Expr:
        return _weighted(grad.at(point[:rank]), *(t.weight for t in chosen(point)))

    nothing = Tensor(x.size, grad.dtype, x.device, const(0, grad.dtype))
    return ctx.scatter(nothing, over, position, value, "add", mask)


def _select(options: Sequence[Tap], k: Expr) -> Tap:
    """The tap number `k`, without its slope."""
    at, weight = options[0].at, options[0].weight
    for number, option in enumerate(options[1:], start=1):
        this = build.op("eq", k, const(number))
        at = build.where(this, option.at, at)
        assert weight is not None and option.weight is not None, "only a single tap has no weight"
        weight = build.where(this, option.weight, weight)
    return Tap(at, weight)


def _to_grid(ctx: Lowering, sampler: Sampler, grad: Tensor, source: Tensor, grid: Tensor) -> Tensor:
    """Summed over the channels: the taps times the slopes of their weights."""
    if sampler.mode == NEAREST:
        return Tensor(grid.size, grad.dtype, grid.device, const(0, grad.dtype))
    sizes = source.size[2:]
    over = (grad.size[0], *grad.size[2:], grad.size[1])

    def along(dim: int) -> Tensor:
        def term(n: Expr, *rest: Expr) -> Expr:
            *at, c = rest
            terms: list[Expr] = []
            for chosen in itertools.product(*_taps(sampler, grid, n, at, sizes)):
                factors = [t.slope if k == dim else t.weight for k, t in enumerate(chosen)]
                terms.append(_weighted(_pick(source, (n, c), [t.at for t in chosen]), *factors))
            return f.mul(_sum(terms), grad.at([n, c, *at]))

        return from_indices(over, grad.device, term)

    folded = [ctx.reduce("sum", along(dim), [len(over) - 1], False, Fill(grad.dtype))[0]
              for dim in reversed(range(len(sizes)))]  # fmt: skip

    def element(*point: Expr) -> Expr:
        value = folded[0].at(point[:-1])
        for k, t in enumerate(folded[1:], start=1):
            value = build.where(build.op("eq", point[-1], const(k)), t.at(point[:-1]), value)
        return value

    return from_indices(grid.size, grid.device, element)
