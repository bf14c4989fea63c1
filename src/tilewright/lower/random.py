"""Random numbers: a seed drawn from torch's generator, then counted (Philox), element by element.

Element `i` (in row-major order) of one op's result depends on the seed and `i` alone, so layout,
threads and recomputation change nothing. With `config.fallback_random` ATen's own stream is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tilewright import config
from tilewright.graph import seeded
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.lower import formula as f
from tilewright.lower.context import Lowering
from tilewright.lower.promote import Operand, compute_type, elementwise, operand, scalar
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Tensor, expand, placeholders, pointwise

aten = torch.ops.aten

Draw = Callable[[Expr, Expr], Expr]  # (seed, offset) -> number

_UNIFORM_BITS = {torch.float16: 11, torch.bfloat16: 8}
"""A low-precision uniform number has the bits its type holds: rounding could otherwise give 1."""


def _result(ctx: Lowering) -> torch.Tensor:
    assert ctx.node is not None
    value = ctx.node.meta["val"]
    return value[0] if isinstance(value, (tuple, list)) else value


def _check(generator: Any) -> None:
    if config.fallback_random:
        raise Unsupported("fallback_random asks for ATen's own stream of numbers")
    if generator is not None:
        raise Unsupported("a generator of the caller's own")


def _drawn(ctx: Lowering, draw: Draw, generator: Any = None) -> Tensor:
    """One number per element of the node's result, in the type `draw` gives."""
    _check(generator)
    fake = _result(ctx)
    size = ctx.sizes.tuple(fake.size())
    offset = ix.linearize(placeholders(size), ix.contiguous_strides(size))
    body = draw(ctx.seed(fake.device), offset)
    return Tensor(size, body.dtype, fake.device, body)


def _uniform(dtype: torch.dtype) -> Draw:
    """On [0, 1), with the steps `dtype` can hold; computed in its compute type."""
    wide = compute_type(dtype)

    def draw(seed: Expr, offset: Expr) -> Expr:
        value = build.op("rand", seed, offset, arg=wide)
        bits = _UNIFORM_BITS.get(dtype)
        if bits is None:
            return value
        return f.mul(build.op("floor", f.mul(value, 2.0**bits)), 2.0**-bits)

    return draw


def _normal(dtype: torch.dtype) -> Draw:
    wide = compute_type(dtype)

    def draw(seed: Expr, offset: Expr) -> Expr:
        if wide != torch.float64:
            return build.op("randn", seed, offset, arg=wide)
        first, second = ix.mul(offset, 2), ix.add(ix.mul(offset, 2), 1)
        radius = f.log1p(f.neg(build.op("rand", seed, first, arg=wide)))
        angle = f.mul(build.op("rand", seed, second, arg=wide), 2 * math.pi)
        return f.mul(f.sqrt(f.mul(radius, -2.0)), f.cos(angle))

    return draw


def _integer(low: Any, high: Any) -> Draw:
    bounds = [scalar(n, torch.int64) for n in (low, high)]
    return lambda seed, offset: build.op("randint", seed, offset, *bounds, arg=torch.int64)


# ---- factories


@lowers(aten.rand.default, aten.rand.generator, aten.rand_like.default, aten.rand_like.generator)
def rand(ctx: Lowering, *_: Any, generator: Any = None, **__: Any) -> Tensor:
    dtype = _result(ctx).dtype
    return _drawn(ctx, _uniform(dtype), generator).to(dtype)


@lowers(
    aten.randn.default, aten.randn.generator, aten.randn_like.default, aten.randn_like.generator
)
def randn(ctx: Lowering, *_: Any, generator: Any = None, **__: Any) -> Tensor:
    dtype = _result(ctx).dtype
    return _drawn(ctx, _normal(dtype), generator).to(dtype)


def _randint(ctx: Lowering, low: Any, high: Any, generator: Any) -> Tensor:
    """A bound may be a tensor of one element."""
    bounds = [n.at([0] * n.rank) if isinstance(n, Tensor) else n for n in (low, high)]
    return _drawn(ctx, _integer(*bounds), generator).to(_result(ctx).dtype)


@lowers(aten.randint.default, aten.randint.generator)
def randint(ctx: Lowering, high: Any, *_: Any, generator: Any = None, **__: Any) -> Tensor:
    return _randint(ctx, 0, high, generator)


@lowers(aten.randint.low, aten.randint.low_generator)
def randint_low(ctx: Lowering, low: Any, high: Any, *_: Any, generator: Any = None,
                **__: Any) -> Tensor:  # fmt: skip
    return _randint(ctx, low, high, generator)


@lowers(aten.randint_like.default, aten.randint_like.generator, aten.randint_like.Tensor,
        aten.randint_like.Tensor_generator)  # fmt: skip
def randint_like(ctx: Lowering, x: Tensor, high: Any, *, generator: Any = None,
                 **_: Any) -> Tensor:  # fmt: skip
    return _randint(ctx, 0, high, generator)


@lowers(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def randint_like_low(ctx: Lowering, x: Tensor, low: Any, high: Any, *, generator: Any = None,
                     **_: Any) -> Tensor:  # fmt: skip
    return _randint(ctx, low, high, generator)


# ---- distributions


@lowers(aten.bernoulli.p, aten.bernoulli.Tensor, aten.bernoulli.default)
def bernoulli(ctx: Lowering, x: Tensor, p: Operand | None = None, *, generator: Any = None
              ) -> Tensor:  # fmt: skip
    """One with the chance `p` (or with the chance each element of `x` is)."""
    chance = x if p is None else p
    wide = compute_type(chance.dtype) if isinstance(chance, Tensor) else torch.float64
    if not isinstance(chance, Tensor) and chance in (0, 1):
        wide = torch.float32  # the certain cases need no more bits
    draws = _drawn(ctx, _uniform(wide), generator)
    return pointwise(f.lt, draws, expand(operand(ctx, chance, wide), draws.size)).to(x.dtype)


@lowers(aten.native_dropout.default)
def native_dropout(ctx: Lowering, x: Tensor, p: float, train: bool | None = None
                   ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The mask is a result: the backward pass is given it and draws nothing."""
    assert ctx.node is not None
    kept_type = ctx.node.meta["val"][1].dtype
    if train is False:
        return x, expand(operand(ctx, True, kept_type), x.size)
    if isinstance(p, Expr):
        raise Unsupported("a rate that is known only at run time")
    limit = f.literal(1.0 - p, torch.float32)
    draws = _drawn(ctx, _uniform(torch.float32))
    mask = draws.map(lambda u: f.lt(u, limit)).to(kept_type)
    return _dropped(ctx, x, mask, 0.0 if p == 1 else 1.0 / (1.0 - p)), mask


@lowers(seeded.seed)
def seed(ctx: Lowering, number: int, *, device: torch.device) -> Tensor:
    """Drawn by the host program, into memory."""
    drawn = ctx.call(seeded.seed, (number,), {"device": device}, _result(ctx), aliases=False)
    assert isinstance(drawn, Tensor)
    return drawn


@lowers(seeded.uniform)
def uniform_of_seed(ctx: Lowering, seed: Tensor, size: Any) -> Tensor:
    """As many numbers as asked for, from a seed that is in memory."""
    size = ctx.sizes.tuple(_result(ctx).size())
    offset = ix.linearize(placeholders(size), ix.contiguous_strides(size))
    body = _uniform(torch.float32)(seed.to(torch.int64).at([]), offset)
    return Tensor(size, body.dtype, seed.device, body)


@lowers(aten.native_dropout_backward.default)
def native_dropout_backward(ctx: Lowering, grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return _dropped(ctx, grad, mask, scale)


def _dropped(ctx: Lowering, x: Tensor, mask: Tensor, scale: Any) -> Tensor:
    """A product with zero or one is exact: with the scale it is one choice."""

    def kept(a: Expr, m: Expr, s: Expr) -> Expr:
        if m.op == "cast" and m.src[0].dtype == torch.bool:
            return f.mul(a, f.where(m.src[0], s, f.mul(s, 0)))
        return f.mul(f.mul(a, m), s)

    return elementwise(ctx, kept, x, mask, scale)


@lowers(aten.uniform.default)
def uniform(ctx: Lowering, x: Tensor, low: Any = 0.0, high: Any = 1.0, generator: Any = None
            ) -> Tensor:  # fmt: skip
    def spread(u: Expr) -> Expr:
        start, end = scalar(low, u.dtype), scalar(high, u.dtype)
        return f.add(f.mul(u, f.sub(end, start)), start)

    return _drawn(ctx, _uniform(x.dtype), generator).map(spread).to(x.dtype)


@lowers(
    aten.normal_functional.default, aten.normal.Tensor_float, aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
)  # fmt: skip
def normal(ctx: Lowering, first: Operand, *rest: Any, generator: Any = None, **named: Any
           ) -> Tensor:  # fmt: skip
    """`normal_functional(x, mean, std)` and `normal(mean, std)` with tensors for either."""
    assert ctx.node is not None
    functional = ctx.node.target is aten.normal_functional.default
    given = list(rest) if functional else [first, *rest]
    mean = named.get("mean", given[0] if given else 0.0)
    std = named.get("std", given[1] if len(given) > 1 else 1.0)
    dtype = _result(ctx).dtype
    draws = _drawn(ctx, _normal(dtype), generator)
    parts = [expand(operand(ctx, n, draws.dtype), draws.size) for n in (std, mean)]
    return pointwise(lambda z, s, m: f.add(f.mul(z, s), m), draws, *parts).to(dtype)


@lowers(aten.normal.float_float)
def normal_of_size(ctx: Lowering, mean: Any, std: Any, size: Any, *, generator: Any = None,
                   **_: Any) -> Tensor:  # fmt: skip
    dtype = _result(ctx).dtype
    draws = _drawn(ctx, _normal(dtype), generator)
    return draws.map(lambda z: f.add(f.mul(z, scalar(std, z.dtype)), scalar(mean, z.dtype))
                     ).to(dtype)  # fmt: skip


def _transformed(ctx: Lowering, x: Tensor, fn: Callable[[Expr], Expr], generator: Any) -> Tensor:
    """`fn` of a uniform number on (0, 1]; eager's formulas, whose poles are at zero."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    draws = _drawn(ctx, _uniform(wide), generator)
    return draws.map(lambda u: fn(f.sub(1.0, u))).to(x.dtype)


@lowers(aten.exponential.default)
def exponential(ctx: Lowering, x: Tensor, lambd: float = 1, generator: Any = None) -> Tensor:
    return _transformed(ctx, x, lambda u: f.div(f.neg(f.log(u)), lambd), generator)


@lowers(aten.geometric.default)
def geometric(ctx: Lowering, x: Tensor, p: float, generator: Any = None) -> Tensor:
    def count(u: Expr) -> Expr:
        trials = build.op("ceil", f.div(f.log(u), math.log1p(-p)))
        return f.maximum(trials, 1.0)  # u = 1 would count none

    return _transformed(ctx, x, count, generator)


@lowers(aten.cauchy.default)
def cauchy(ctx: Lowering, x: Tensor, median: float = 0, sigma: float = 1, generator: Any = None
           ) -> Tensor:  # fmt: skip
    def spread(u: Expr) -> Expr:
        return f.add(f.mul(f.tan(f.mul(f.sub(u, 0.5), math.pi)), sigma), median)

    return _transformed(ctx, x, spread, generator)


@lowers(aten.log_normal.default)
def log_normal(ctx: Lowering, x: Tensor, mean: float = 1, std: float = 2, generator: Any = None
               ) -> Tensor:  # fmt: skip
    draws = _drawn(ctx, _normal(x.dtype), generator)
    return draws.map(lambda z: f.exp(f.add(f.mul(z, std), mean))).to(x.dtype)


@lowers(getattr(aten.random, "from"), aten.random.to, aten.random.default)
def random(ctx: Lowering, x: Tensor, *bounds: Any, generator: Any = None) -> Tensor:
    """Integers: below a bound, between two, or all that the type holds exactly."""
    if not bounds or bounds[-1] is None:
        bounds = (bounds[0] if bounds else 0, _whole_limit(x.dtype))
    low, high = (0, *bounds)[-2:]
    return _drawn(ctx, _integer(low, high), generator).to(x.dtype)


def _whole_limit(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 2
    if not dtype.is_floating_point:
        return min(torch.iinfo(dtype).max + 1, 2**63 - 1)
    return int(2 / torch.finfo(dtype).eps)


@lowers(aten.rrelu_with_noise_functional.default)
def rrelu(ctx: Lowering, x: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3,
          training: bool = False, generator: Any = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A negative element is multiplied by a random slope, which is kept for the backward pass."""
    if not training:
        mean = (lower + upper) / 2
        return elementwise(ctx, lambda a: f.where(f.le(a, 0), f.mul(a, mean), a), x), noise
    draws = _drawn(ctx, _uniform(compute_type(x.dtype)), generator)
    slope = draws.map(lambda u: f.add(f.mul(u, upper - lower), lower)).to(x.dtype)
    kept = elementwise(ctx, lambda a, r: f.where(f.le(a, 0), r, 1.0), x, slope)
    return elementwise(ctx, f.mul, x, kept), kept
