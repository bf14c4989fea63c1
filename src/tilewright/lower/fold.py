"""What the families that fold over dimensions share: dimensions, counts, sums, moments.

Accumulation is done in the compute type (float32 for the low-precision floats); a result is rounded
once, where it is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars
from tilewright.lower.context import Fill, Lowering
from tilewright.lower.layouts import along_operands
from tilewright.lower.promote import compute_type
from tilewright.lower.tensor import Size, Tensor, cost, is_stored, placeholders, pointwise

Dims = int | Sequence[int] | None
Finish = Callable[[Expr], Expr]
FromMoments = Callable[[Expr, Expr], Expr]

KEEP_WORK = 16  # in additions: dearer elements are stored rather than computed once per pass
KEEP_READS = 2


def dims_of(t: Tensor, dim: Dims) -> list[int]:
    """The dimensions as sorted positions; None and the empty list mean all of them."""
    if t.rank == 0:
        return []
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(t.rank))
    given = [dim] if isinstance(dim, int) else dim
    return sorted({d % t.rank for d in given})


def axis_of(t: Tensor, dim: int) -> int:
    return dim % max(t.rank, 1)


def count_of(t: Tensor, dims: Sequence[int]) -> Expr:
    """How many elements are folded into one, as an index expression."""
    return ix.product(t.size[d] for d in dims)


def number(value: Expr | float, dtype: torch.dtype) -> Expr:
    return build.cast(value, dtype) if isinstance(value, Expr) else const(value, dtype)


def accumulator(t: Tensor) -> Tensor:
    """`t` in the type it is accumulated in."""
    return t.to(compute_type(t.dtype))


def fake_of(ctx: Lowering, position: int | None = None) -> torch.Tensor:
    """The graph's own idea of the node's result (of one of its results)."""
    assert ctx.node is not None
    value = ctx.node.meta["val"]
    return value if position is None else value[position]


def dtype_of(ctx: Lowering, position: int | None = None) -> torch.dtype:
    return fake_of(ctx, position).dtype


def stride_of(ctx: Lowering, position: int | None = None) -> Size:
    return ctx.sizes.tuple(fake_of(ctx, position).stride())


def rounded(dtype: torch.dtype, finish: Finish | None = None) -> Fill:
    """Store the fold, or what `finish` makes of it, as `dtype`."""
    return Fill(dtype, lambda fold: build.cast(fold if finish is None else finish(fold), dtype))


def keep(ctx: Lowering, t: Tensor) -> Tensor:
    """`t` for several passes over it: stored if computing an element again costs too much."""
    work, reads = cost(t.body)
    if is_stored(t) or (work <= KEEP_WORK and reads <= KEEP_READS):
        return t
    users = () if ctx.node is None else (ctx.node,)
    return ctx.realize(t, along_operands(t, ix.contiguous_strides(t.size), users))


def fold(ctx: Lowering, kind: str, t: Tensor, dims: Sequence[int], keepdim: bool,
         dtype: torch.dtype | None = None, finish: Finish | None = None,
         stride: Size | None = None) -> Tensor:  # fmt: skip
    """One fold with one result."""
    (result,) = ctx.reduce(kind, t, dims, keepdim, rounded(dtype or t.dtype, finish), stride=stride)
    return result


def partial(ctx: Lowering, t: Tensor, dims: Sequence[int]) -> Tensor:
    """A sum that may be a part of another: `aten.sum` finds it as it was before it was rounded,
    however short it is."""
    (result,) = ctx.reduce("sum", t, dims, True, rounded(t.dtype), unrolls=False)
    return result


def total(ctx: Lowering, t: Tensor, dims: Sequence[int], keepdim: bool = True) -> Tensor:
    return fold(ctx, "sum", t, dims, keepdim)


def one_place(t: Tensor, dims: Sequence[int]) -> Tensor | None:
    """The sum over a dimension, which is kept, of what is zero but at one place of it, as the
    gradient of a loss at its labels: the value there. Labels that are smoothed add the same
    everywhere: as often as there are places."""
    if len(dims) != 1 or t.size[dims[0]] is ix.ONE:
        return None
    (dim,) = dims
    along = placeholders(t.size)[dim]
    body, casts = t.body, list[torch.dtype]()
    while body.op == "cast":
        casts.insert(0, body.dtype)
        body = body.src[0]
    everywhere = next((e for e in body.src if along not in free_vars(e)), None)
    if body.op == "add" and everywhere is not None and not casts:
        body = body.src[1 - body.src.index(everywhere)]
    else:
        everywhere = None
    if body.op != "where" or not body.src[2].is_const or body.src[2].arg != 0:
        return None
    hits = [e for e in _conjuncts(body.src[0]) if e.op == "eq" and along in e.src]
    if len(hits) != 1:
        return None
    place = next(e for e in hits[0].src if e is not along)
    rest = [e for e in _conjuncts(body.src[0]) if e is not hits[0]]
    if any(along in free_vars(e) for e in (place, body.src[1], *rest)):
        return None
    inside = [build.op("ge", place, const(0, place.dtype)), build.op("lt", place, t.size[dim])]
    value = build.where(functools.reduce(build.both, (*rest, *inside)), *body.src[1:])
    for dtype in casts:
        value = build.cast(value, dtype)
    if everywhere is not None:
        count = build.cast(t.size[dim], everywhere.dtype)
        value = build.op("add", build.op("mul", everywhere, count), value)
    size = tuple(ix.ONE if d == dim else n for d, n in enumerate(t.size))
    return Tensor(size, t.dtype, t.device, value)


def _conjuncts(e: Expr) -> list[Expr]:
    if e.op == "bit_and" and e.dtype == torch.bool:
        return [*_conjuncts(e.src[0]), *_conjuncts(e.src[1])]
    return [e]


def moments(ctx: Lowering, t: Tensor, dims: Sequence[int], keepdim: bool,
            *fills: tuple[torch.dtype, FromMoments]) -> tuple[Tensor, ...]:  # fmt: skip
    """Welford's fold: each fill makes a result of (mean, sum of squared deviations)."""
    if all(t.size[d] is ix.ONE for d in dims):  # the only element is its own mean
        squeezed = t if keepdim else squeeze(t, dims)

        def one(dtype: torch.dtype, make: FromMoments) -> Tensor:
            # x - x is zero, but NaN for an infinite or NaN x, as the deviation is
            return squeezed.map(lambda x: build.cast(make(x, build.op("sub", x, x)), dtype))

        return tuple(one(dtype, make) for dtype, make in fills)

    def taken(make: FromMoments) -> Finish:
        return lambda both: make(build.part(both, 0), build.part(both, 1))

    return ctx.reduce("welford", t, dims, keepdim,
                      *(rounded(dtype, taken(make)) for dtype, make in fills))  # fmt: skip


def squeeze(t: Tensor, dims: Sequence[int]) -> Tensor:
    """`t` without these dimensions, each of one element."""
    kept = [d for d in range(t.rank) if d not in dims]
    size = tuple(t.size[d] for d in kept)
    indices: list[ix.IndexLike] = [0] * t.rank
    for d, p in zip(kept, placeholders(size), strict=True):
        indices[d] = p
    return Tensor(size, t.dtype, t.device, t.at(indices))


def along(t: Tensor, dims: Sequence[int], size: Size) -> Tensor:
    """A tensor whose dimensions are `dims` of `size`, broadcast over the others of it."""
    indices: list[ix.IndexLike] = []
    point = placeholders(size)
    for k, d in enumerate(dims):
        indices.append(0 if t.size[k] is ix.ONE else point[d])
    return Tensor(size, t.dtype, t.device, t.at(indices))


def apply(fn: Callable[..., Expr], *tensors: Tensor) -> Tensor:
    """`fn` over the broadcast elements, each in its compute type."""
    return pointwise(fn, *(accumulator(t) for t in tensors))


def full(size: Size, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return Tensor(size, dtype, device, const(value, dtype))


def add(a: Expr, b: Expr) -> Expr:
    return build.op("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return build.op("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    return build.op("mul", a, b)


def div(a: Expr, b: Expr) -> Expr:
    return build.op("div", a, b)
