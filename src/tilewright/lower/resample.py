"""Resampling: interpolation, affine grids, and the unfolding of windows into columns.

Interpolation along one dimension is an `Axis`: which inputs an output is made of, with which
weights (its taps). Forward multiplies the taps of all dimensions out, in one loop. Backward runs
over the dimensions one at a time and gathers, for an input, from the outputs it is a tap of; where
sizes are not known, it scatters. Coordinates are computed in the type eager computes them in, so
that they round the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const
from tilewright.ir.program import Store
from tilewright.lower.context import Fill, Lowering
from tilewright.lower.pooling import inside
from tilewright.lower.promote import compute_type, scalar
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Size, Tensor, from_indices, placeholders
from tilewright.lower.views import replaced, result_size

aten = torch.ops.aten

Kind = Literal["nearest", "exact", "linear", "cubic"]
Tap = tuple[Expr, Expr | None]  # an input's index, and its weight (None: one)

CUBIC_A = -0.75
MOST_OF_ONE = 16  # outputs of an input that are added up as they are
UNROLL = 32
MOST_AT_ONCE = 64  # outputs of an input that are gathered along all dimensions at once


# ---- float arithmetic on expressions


def _const(value: float, like: Expr) -> Expr:
    return const(value, like.dtype)


def _f(name: str, a: Expr, b: Expr | float) -> Expr:
    return build.op(name, a, b if isinstance(b, Expr) else _const(b, a))


def _product(*factors: Expr | None) -> Expr | None:
    total: Expr | None = None
    for factor in factors:
        if factor is not None:
            total = factor if total is None else build.op("mul", total, factor)
    return total


def _sum(terms: Sequence[Expr]) -> Expr:
    total = terms[0]
    for term in terms[1:]:
        total = build.op("add", total, term)
    return total


def _to_index(e: Expr, size: Expr) -> Expr:
    """A whole float as an index, kept inside `[0, size)`."""
    return _clamp(build.cast(e, torch.int64), size)


def _clamp(i: Expr, size: Expr) -> Expr:
    return ix.maximum(ix.minimum(i, ix.sub(size, 1)), 0)


def cubic_weights(t: Expr) -> list[Expr]:
    """Keys' convolution at distances 1 + t, t, 1 - t and 2 - t."""

    def near(x: Expr) -> Expr:
        inner = _f("sub", _f("mul", x, CUBIC_A + 2), CUBIC_A + 3)
        return _f("add", build.op("mul", build.op("mul", inner, x), x), 1.0)

    def far(x: Expr) -> Expr:
        inner = _f("sub", _f("mul", x, CUBIC_A), 5 * CUBIC_A)
        inner = _f("add", build.op("mul", inner, x), 8 * CUBIC_A)
        return _f("sub", build.op("mul", inner, x), 4 * CUBIC_A)

    back = build.op("sub", _const(1, t), t)
    return [far(_f("add", t, 1.0)), near(t), near(back), far(_f("add", back, 1.0))]


# ---- interpolation


@dataclass(frozen=True)
class Axis:
    """Interpolation of `into` inputs to `out` outputs; `dtype` is that of the coordinates."""

    kind: Kind
    into: Expr
    out: Expr
    align: bool
    factor: Any  # the scale factor the user gave, or None
    dtype: torch.dtype
    device: torch.device

    def _scale(self) -> Expr:
        """Inputs per output."""
        if self.align:
            if ix.known_le(self.out, 1):
                return const(0, self.dtype)
            return self._ratio(ix.sub(self.into, 1), ix.maximum(ix.sub(self.out, 1), 1))
        if self.factor is not None:
            given = scalar(self.factor, torch.float64)
            return build.cast(build.op("div", const(1, torch.float64), given), self.dtype)
        return self._ratio(self.into, self.out)

    def _ratio(self, a: Expr, b: Expr) -> Expr:
        return build.op("div", build.cast(a, self.dtype), build.cast(b, self.dtype))

    def _source(self, o: Expr) -> Expr:
        """Where output `o` lies among the inputs."""
        position = build.cast(o, self.dtype)
        if self.align or self.kind == "nearest":
            return build.op("mul", position, self._scale())
        centre = build.op("mul", _f("add", position, 0.5), self._scale())
        return centre if self.kind == "exact" else _f("sub", centre, 0.5)

    def taps(self, o: Expr) -> list[Tap]:
        if self.kind in ("nearest", "exact"):
            return [(self._nearest(o), None)]
        source = self._source(o)
        if self.kind == "cubic":
            whole = build.op("floor", source)
            start = build.cast(whole, torch.int64)
            weights = cubic_weights(_unit(build.op("sub", source, whole)))
            return [(_clamp(ix.add(start, k - 1), self.into), w) for k, w in enumerate(weights)]
        if (found := self._exact_taps(o)) is not None:
            return found
        source = source if self.align else _f("max", source, 0.0)
        first = _clamp(build.cast(source, torch.int64), self.into)
        second = ix.minimum(ix.add(first, 1), ix.sub(self.into, 1))
        right = _unit(build.op("sub", source, build.cast(first, self.dtype)))
        return [(first, build.op("sub", _const(1, right), right)), (second, right)]

    def _nearest(self, o: Expr) -> Expr:
        if self.into is self.out and self.factor is None:
            return o
        exact = self._integer_form(o)
        if exact is not None:
            return exact
        return _to_index(build.op("floor", self._source(o)), self.into)

    def _integer_form(self, o: Expr) -> Expr | None:
        """Integer arithmetic where it gives what eager's float arithmetic gives, for every `o`."""
        into, out = ix.value_of(self.into), ix.value_of(self.out)
        scale = self._scale()
        if into is None or out is None or not scale.is_const:
            return None
        positions = torch.arange(out)
        offset = 0.5 if self.kind == "exact" else 0.0
        found = ((positions.to(self.dtype) + offset) * scale.arg).floor().long().clamp(0, into - 1)
        if self.kind == "exact":
            if torch.equal(found, (2 * positions + 1) * into // (2 * out)):
                return ix.floordiv(ix.mul(ix.add(ix.mul(o, 2), 1), into), 2 * out)
        elif torch.equal(found, positions * into // out):
            return ix.floordiv(ix.mul(o, into), out)
        return None

    def outputs_of_one(self) -> int:
        """Of how many outputs each input is the nearest, 0 where that differs or is not known."""
        into, out = ix.value_of(self.into), ix.value_of(self.out)
        if self.kind not in ("nearest", "exact") or not into or not out or out % into:
            return 0
        same = self.into is self.out and self.factor is None
        return out // into if same or self._integer_form(ix.ZERO) is not None else 0

    def _exact_taps(self, o: Expr) -> list[Tap] | None:
        """The two inputs next to output `o`, and their weights, by integer arithmetic where it
        gives what eager's float arithmetic gives, for every `o`: as for twice as many outputs.
        Neighbours have inputs in common then, and most weights are literals (H200: 16x128x64x64
        bfloat16 to twice as many rows and columns 32 us, 56 us; to half as many of 128x128 22 us,
        38 us). A CPU is slower so (2x32x64x64 float32 3.0 ms, 1.8 ms; AVX2, one thread)."""
        into, out = ix.value_of(self.into), ix.value_of(self.out)
        scale = self._scale()
        if into is None or out is None or not scale.is_const or self.align:
            return None
        if self.device.type != "cuda":
            return None
        place, whole = torch.arange(out), 2 * out  # the input, and parts that it is counted in
        source = ((place.to(self.dtype) + 0.5) * scale.arg - 0.5).clamp(min=0)
        parts = ((2 * place + 1) * into - out).clamp(min=0)
        if not torch.equal(source.long(), parts // whole) or not torch.equal(
            source - source.floor(), (parts % whole).to(self.dtype) / whole
        ):
            return None
        along = ix.add(ix.mul(ix.add(ix.mul(o, 2), 1), into), out)  # one input further
        first = ix.maximum(ix.sub(ix.floordiv(along, whole), 1), 0)
        second = ix.minimum(ix.add(first, 1), ix.sub(self.into, 1))
        right = _f("mul", build.cast(ix.mod(along, whole), self.dtype), 1 / whole)
        right = build.where(build.op("lt", along, const(whole)), _const(0, right), right)
        return [(first, build.op("sub", _const(1, right), right)), (second, right)]

    def outputs(self, i: Expr) -> list[tuple[Expr, Expr, Expr]]:
        """Those that input `i` may be a tap of, with what it weighs in them and whether it is."""
        reach = self.reach()
        assert reach is not None
        shift, out, count = reach
        start = ix.sub(ix.floordiv(ix.mul(i, out), self.into), shift)
        found: list[tuple[Expr, Expr, Expr]] = []
        for o in (ix.add(start, k) for k in range(count)):
            weight, hit = const(0, self.dtype), const(False, torch.bool)
            for tap, part in self.taps(o):
                mine = build.op("eq", tap, i)
                part = const(1, self.dtype) if part is None else part
                weight = build.op("add", weight, build.where(mine, part, const(0, self.dtype)))
                hit = build.op("bit_or", hit, mine)
            found.append((o, weight, build.both(inside(o, self.out), hit)))
        return found

    @property
    def is_exact(self) -> bool:
        return self.kind == "linear" and self._exact_taps(ix.ZERO) is not None

    @property
    def is_plain(self) -> bool:
        """Whether an output is the input at the same place."""
        return (self.into is self.out and self.kind in ("nearest", "exact")
                and self.factor is None)  # fmt: skip

    def reach(self) -> tuple[int, int, int] | None:
        """`(shift, step, count)`: input `i` is a tap only of outputs from
        `i * out // into - shift`, `count` of them; None where sizes are not known."""
        into, out = ix.value_of(self.into), ix.value_of(self.out)
        scale = self._scale()
        if not into or not out or not scale.is_const:
            return None
        low, high = self._tap_range(into, out, scale.arg)
        first, last = torch.full((into,), out), torch.full((into,), -1)
        outputs = torch.arange(out)
        for offset in range(int((high - low).max()) + 1):
            hit = (low + offset).minimum(high)
            first.scatter_reduce_(0, hit, outputs, "amin")
            last.scatter_reduce_(0, hit, outputs, "amax")
        start = torch.arange(into) * out // into
        shift = int((start - first).max().clamp(min=0))
        return shift, out, int((last - start).max()) + shift + 1

    def _tap_range(self, into: int, out: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """First and last tap of every output, with room for rounding."""
        centre = torch.arange(out, dtype=torch.float64)
        if not (self.align or self.kind == "nearest"):
            centre = centre + 0.5
        source = centre * scale - (
            0.5 if self.kind in ("linear", "cubic") and not self.align else 0
        )
        before, after = {"cubic": (1, 2), "linear": (0, 1)}.get(self.kind, (0, 0))
        low = (source - 1e-3).floor().long() - before
        high = (source + 1e-3).floor().long() + after
        return low.clamp(0, into - 1), high.clamp(0, into - 1)


def _unit(e: Expr) -> Expr:
    return _f("min", _f("max", e, 0.0), 1.0)


def _axes(kind: Kind, x: Tensor, into: Size, out: Size, align: bool,
          factors: Sequence[Any]) -> list[Axis]:  # fmt: skip
    """Coordinates are float32, except those of float64 tensors."""
    coordinates = x.dtype if x.dtype == torch.float64 else torch.float32
    factors = [*factors, *[None] * (len(into) - len(factors))]
    # one that is not above zero counts as none: eager scales by the sizes then
    factors = [None if isinstance(f, (int, float)) and f <= 0 else f for f in factors]
    return [Axis(kind, i, o, align, f, coordinates, x.device)
            for i, o, f in zip(into, out, factors, strict=True)]  # fmt: skip


def _weighted(value: Expr, weight: Expr | None) -> Expr:
    return value if weight is None else build.op("mul", value, build.cast(weight, value.dtype))


def _interpolate(ctx: Lowering, x: Tensor, axes: Sequence[Axis], out: Size) -> Tensor:
    lead = x.rank - len(axes)
    plain = axes[0].kind in ("nearest", "exact")
    if not plain and not x.dtype.is_floating_point:
        raise Unsupported("integers are interpolated in fixed point")
    source = ctx.realize(x) if not plain else x
    source = source if plain else source.to(compute_type(x.dtype))
    at = placeholders(out)
    taps = [axis.taps(o) for axis, o in zip(axes, at[lead:], strict=True)]

    def level(k: int, chosen: list[Expr]) -> Expr:
        """Dimension k summed over its taps, innermost last, in eager's order."""
        if k == len(axes):
            return source.at([*at[:lead], *chosen])
        return _sum([_weighted(level(k + 1, [*chosen, i]), w) for i, w in taps[k]])

    body = build.cast(level(0, []), x.dtype)
    return Tensor(out, x.dtype, x.device, body)


def _interpolate_backward(ctx: Lowering, grad: Tensor, axes: Sequence[Axis], into: Size) -> Tensor:
    if not grad.dtype.is_floating_point:
        raise Unsupported("integers have no gradient")
    lead = grad.rank - len(axes)
    total = grad.to(compute_type(grad.dtype))
    each = [axis.outputs_of_one() for axis in axes]
    if 0 < math.prod(each) <= MOST_OF_ONE:
        at = placeholders(into)
        windows = itertools.product(*(range(count) for count in each))
        parts = [total.at([*at[:lead], *(ix.add(ix.mul(i, count), k) for i, count, k
                                         in zip(at[lead:], each, window, strict=True))])
                 for window in windows]  # fmt: skip
        return Tensor(into, total.dtype, grad.device, _sum(parts)).to(grad.dtype)
    if any(axis.reach() is None for axis in axes):
        return _scatter_taps(ctx, total, axes, into, lead).to(grad.dtype)
    total = ctx.realize(grad).to(total.dtype)  # as it is, not as it is added up
    moved = {dim: axes[dim - lead] for dim in reversed(range(lead, grad.rank))
             if not axes[dim - lead].is_plain}  # fmt: skip
    if all(axis.is_exact for axis in moved.values()) and _outputs(moved) <= MOST_AT_ONCE:
        return _gather_all(total, moved).to(grad.dtype)
    for k, (dim, axis) in enumerate(moved.items()):
        total = _gather_taps(ctx, ctx.realize(total) if k else total, axis, dim)
    return total.to(grad.dtype)


def _outputs(axes: Mapping[int, Axis]) -> int:
    return math.prod(found[2] for axis in axes.values() if (found := axis.reach()) is not None)


def _gather_all(grad: Tensor, axes: Mapping[int, Axis]) -> Tensor:
    """Along all dimensions at once. Where weights are literals: an input's neighbours have most of
    what it is the sum of in common, and what is between two passes is written and read.
    """
    size = tuple(axes[k].into if k in axes else n for k, n in enumerate(grad.size))
    at = placeholders(size)
    found = {dim: axis.outputs(at[dim]) for dim, axis in axes.items()}

    def level(dims: Sequence[int], chosen: Sequence[Expr], mask: Expr) -> Expr:
        if not dims:
            return build.guard(grad.at(chosen), mask)
        dim, *rest = dims
        parts: list[Expr] = []
        for o, weight, hit in found[dim]:
            inner = build.both(mask, inside(o, axes[dim].out))
            inner = level(rest, replaced(chosen, dim, o), inner)
            parts.append(build.where(hit, _weighted(inner, weight), const(0, inner.dtype)))
        return _sum(parts)

    body = level(sorted(axes), at, build.TRUE)
    return Tensor(size, body.dtype, grad.device, body)


def _gather_taps(ctx: Lowering, grad: Tensor, axis: Axis, dim: int) -> Tensor:
    """Along one dimension: for an input, the sum over the outputs it is a tap of."""
    reach = axis.reach()
    assert reach is not None
    shift, out, count = reach
    size = (*grad.size[:dim], axis.into, *grad.size[dim + 1 :])

    def term(at: Sequence[Expr], w: Expr) -> Expr:
        start = ix.sub(ix.floordiv(ix.mul(at[dim], out), axis.into), shift)
        o = ix.add(start, w)
        mask = inside(o, axis.out)
        value = build.guard(grad.at(replaced(at, dim, o)), mask)
        parts = [
            build.where(
                build.both(mask, build.op("eq", i, at[dim])),
                _weighted(value, weight),
                const(0, value.dtype),
            )
            for i, weight in axis.taps(o)
        ]
        return _sum(parts)

    if count <= UNROLL:
        at = placeholders(size)
        body = _sum([term(at, const(w)) for w in range(count)])
        return Tensor(size, body.dtype, grad.device, body)
    terms = from_indices((*size, const(count)), grad.device, lambda *p: term(p[:-1], p[-1]))
    return ctx.reduce("sum", terms, [len(size)], False, Fill(terms.dtype))[0]


def _scatter_taps(ctx: Lowering, grad: Tensor, axes: Sequence[Axis], into: Size,
                  lead: int) -> Tensor:  # fmt: skip
    """For an output, add its gradient to each of its taps."""
    zeros = from_indices(into, grad.device, lambda *_: const(0, grad.dtype))
    target = ctx.copy(zeros)
    buffer = ctx.program.buffers[target.body.arg]
    source = ctx.realize(grad)
    at = placeholders(grad.size)
    taps = [axis.taps(o) for axis, o in zip(axes, at[lead:], strict=True)]
    for chosen in itertools.product(*taps):
        where = ix.linearize([*at[:lead], *(i for i, _ in chosen)], buffer.stride)
        value = _weighted(source.body, _product(*(w for _, w in chosen)))
        ctx.nest(at, (), [Store(buffer.name, where, value, "add")])
    return target


def _forward(kind: Kind, n: int, aligned: bool) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, x: Tensor, output_size: Any, *rest: Any, **named: Any) -> Tensor:
        align, factors = _options(aligned, rest, named)
        out = result_size(ctx)
        axes = _axes(kind, x, x.size[-n:], out[-n:], align, factors)
        return _interpolate(ctx, x, axes, out)

    return lowering


def _backward(kind: Kind, n: int, aligned: bool) -> Callable[..., Tensor]:
    def lowering(ctx: Lowering, grad: Tensor, output_size: Any, input_size: Any, *rest: Any,
                 **named: Any) -> Tensor:  # fmt: skip
        align, factors = _options(aligned, rest, named)
        into = result_size(ctx)
        axes = _axes(kind, grad, into[-n:], grad.size[-n:], align, factors)
        return _interpolate_backward(ctx, grad, axes, into)

    return lowering


def _options(aligned: bool, rest: Sequence[Any], named: dict[str, Any]) -> tuple[bool, list[Any]]:
    """(align_corners, the scale factors per dimension) from either form of the arguments."""
    values = [*rest, *named.values()]
    align = bool(values.pop(0)) if aligned else False
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = list(values[0])
    return align, [] if values == [None] else values


def _register() -> None:
    families: list[tuple[str, Kind, int, bool]] = [
        *((f"upsample_nearest{n}d", "nearest", n, False) for n in (1, 2, 3)),
        *((f"_upsample_nearest_exact{n}d", "exact", n, False) for n in (1, 2, 3)),
        ("upsample_linear1d", "linear", 1, True),
        ("upsample_bilinear2d", "linear", 2, True),
        ("upsample_trilinear3d", "linear", 3, True),
        ("upsample_bicubic2d", "cubic", 2, True),
    ]
    for name, kind, n, aligned in families:
        packet, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
        lowers(packet.default, packet.vec)(_forward(kind, n, aligned))
        lowers(backward.default)(_backward(kind, n, aligned))


_register()


# ---- grids of positions


@lowers(aten.affine_grid_generator.default)
def affine_grid_generator(ctx: Lowering, theta: Tensor, size: Any, align_corners: bool) -> Tensor:
    out = result_size(ctx)
    matrix = theta.to(compute_type(theta.dtype))
    dtype = matrix.dtype

    def coordinate(i: Expr, extent: Expr) -> Expr:
        """Evenly spaced in [-1, 1]; between pixel centres unless corners are aligned."""
        count = build.cast(extent, dtype)
        last = count if not align_corners else _f("sub", count, 1.0)
        twice = _f("mul", build.cast(i, dtype), 2.0)
        inner = build.op("div", build.op("sub", twice, _f("sub", count, 1.0)), last)
        return build.where(build.op("lt", ix.ONE, extent), inner, const(0, dtype))

    def body(n: Expr, *rest: Expr) -> Expr:
        *at, row = rest
        axes = list(zip(at, out[1:-1], strict=True))[::-1]
        terms = [build.op("mul", matrix.at([n, row, const(k)]), coordinate(i, extent))
                 for k, (i, extent) in enumerate(axes)]  # fmt: skip
        return build.cast(_sum([*terms, matrix.at([n, row, const(len(axes))])]), theta.dtype)

    return from_indices(out, theta.device, body)


# ---- windows as columns


@lowers(aten.im2col.default)
def im2col(ctx: Lowering, x: Tensor, kernel_size: Any, dilation: Any, padding: Any,
           stride: Any) -> Tensor:  # fmt: skip
    out = result_size(ctx)
    height, width = x.size[-2:]
    (kh, kw), (dh, dw) = map(ix.as_index, kernel_size), map(ix.as_index, dilation)
    (ph, pw), (sh, sw) = map(ix.as_index, padding), map(ix.as_index, stride)
    columns = _positions(width, kw, dw, pw, sw)

    def body(*at: Expr) -> Expr:
        *lead, row, block = at
        c, inner = ix.floordiv(row, ix.mul(kh, kw)), ix.mod(row, ix.mul(kh, kw))
        h = ix.sub(ix.add(ix.mul(ix.floordiv(block, columns), sh),
                          ix.mul(ix.floordiv(inner, kw), dh)), ph)  # fmt: skip
        w = ix.sub(ix.add(ix.mul(ix.mod(block, columns), sw), ix.mul(ix.mod(inner, kw), dw)), pw)
        mask = build.both(inside(h, height), inside(w, width))
        value = build.guard(x.at([*lead, c, h, w]), mask)
        return build.where(mask, value, const(0, x.dtype))

    return from_indices(out, x.device, body)


def _positions(size: Expr, kernel: Expr, dilation: Expr, pad: Expr, stride: Expr) -> Expr:
    """How often a window fits."""
    span = ix.add(ix.mul(dilation, ix.sub(kernel, 1)), 1)
    return ix.add(ix.floordiv(ix.sub(ix.add(size, ix.mul(pad, 2)), span), stride), 1)


@lowers(aten.col2im.default)
def col2im(ctx: Lowering, x: Tensor, output_size: Any, kernel_size: Any, dilation: Any,
           padding: Any, stride: Any) -> Tensor:  # fmt: skip
    out = result_size(ctx)
    kernel = [ix.as_index(k) for k in kernel_size]
    axes = [tuple(map(ix.as_index, row)) for row in zip(dilation, padding, stride, strict=True)]
    counts = [_positions(n, k, *axis) for n, k, axis in zip(out[-2:], kernel, axes, strict=True)]
    source = x.to(compute_type(x.dtype))

    def term(at: Sequence[Expr], window: Sequence[Expr]) -> Expr:
        """What the window element puts here: blocks start every `stride` elements."""
        *lead, c, _, _ = at
        mask, block = build.TRUE, []
        for i, k, (d, p, s), count in zip(at[-2:], window, axes, counts, strict=True):
            start = ix.sub(ix.add(i, p), ix.mul(k, d))
            position = ix.floordiv(start, s)
            mask = build.both(mask, build.op("eq", ix.mod(start, s), ix.ZERO))
            mask = build.both(mask, inside(position, count))
            block.append(position)
        row = ix.add(ix.mul(ix.add(ix.mul(c, kernel[0]), window[0]), kernel[1]), window[1])
        index = [*lead, row, ix.linearize(block, (counts[1], ix.ONE))]
        return build.where(mask, build.guard(source.at(index), mask), const(0, source.dtype))

    extents = [ix.value_of(k) for k in kernel]
    if None not in extents and extents[0] * extents[1] <= UNROLL:  # type: ignore[operator]
        at = placeholders(out)
        windows = itertools.product(*(range(k) for k in extents if k is not None))
        body = _sum([term(at, [const(a), const(b)]) for a, b in windows])
        total = Tensor(out, body.dtype, x.device, body)
    else:
        terms = from_indices((*out, *kernel), x.device, lambda *p: term(p[:-2], p[-2:]))
        rank = len(out)
        (total,) = ctx.reduce("sum", terms, [rank, rank + 1], False, Fill(terms.dtype))
    return total.to(x.dtype)
