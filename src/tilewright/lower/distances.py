"""Distances between the rows of matrices: each a fold over their columns, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const
from tilewright.lower import formula as f
from tilewright.lower.context import Lowering
from tilewright.lower.fold import fold, full
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Size, Tensor, from_indices
from tilewright.lower.views import result_size

aten = torch.ops.aten
BY_PRODUCT = 25  # rows from which eager computes Euclidean distances with a matrix product


def _power(p: float) -> float:
    if isinstance(p, Expr):
        raise Unsupported("a norm that is known only at run time")
    return float(p)


def _distance(ctx: Lowering, differences: Tensor, p: float) -> Tensor:
    """The p-norm over the last dimension."""
    dims = [differences.rank - 1]
    sizes = differences.map(f.abs_)
    if p == math.inf:
        if differences.size[-1] is ix.ZERO:
            return full(differences.size[:-1], 0, differences.dtype, differences.device)
        return fold(ctx, "max", sizes, dims, False)
    if p == 0:
        return fold(ctx, "sum", sizes.map(lambda d: f.minimum(build.op("ceil", d), 1.0)), dims,
                    False)  # fmt: skip
    if p == 1:
        return fold(ctx, "sum", sizes, dims, False)
    if p == 2:
        return fold(ctx, "sum", sizes.map(f.square), dims, False, None, f.sqrt)
    return fold(ctx, "sum", sizes.map(lambda d: f.pow_(d, p)), dims, False, None,
                lambda total: f.pow_(total, 1 / p))  # fmt: skip


def _slope(p: float, difference: Expr, grad: Expr, distance: Expr) -> Expr:
    """What one column adds to the gradient of a row; zero where the distance is."""
    size, sign = f.abs_(difference), build.op("sign", difference)
    if p == 1:
        return f.mul(grad, sign)
    if p == math.inf:  # the columns that reach the maximum
        return f.mul(f.mul(grad, sign), f.where(f.eq(size, distance), f.like(1.0, grad), 0.0))
    if p == 2:
        found = f.mul(grad, f.div(difference, distance))
    else:
        scale = f.div(grad, f.pow_(distance, p - 1))
        found = (
            f.mul(f.mul(sign, f.pow_(size, p - 1)), scale)
            if p < 2
            else f.mul(f.mul(difference, f.pow_(size, p - 2)), scale)
        )
    nothing = f.eq(distance, 0.0)
    if p < 1:
        nothing = f.either(nothing, f.eq(difference, 0.0))
    return f.where(nothing, 0.0, found)


# ---- every row of one matrix to every row of another


def _batch(t: Tensor, lead: Sequence[Expr]) -> list[Expr]:
    """The batch indices of a result as those of an operand that is broadcast to it."""
    given = t.size[:-2]
    return [ix.ZERO if s is ix.ONE else i
            for s, i in zip(given, lead[len(lead) - len(given) :], strict=True)]  # fmt: skip


def _difference(a: Tensor, b: Tensor, lead: Sequence[Expr], i: Expr, j: Expr, k: Expr) -> Expr:
    return f.sub(a.at([*_batch(a, lead), i, k]), b.at([*_batch(b, lead), j, k]))


def _uses_product(a: Tensor, b: Tensor, mode: int | None) -> bool:
    if mode == 2:
        return False
    few = all(ix.known_le(t.size[-2], BY_PRODUCT) for t in (a, b))
    return mode == 1 or not few


@lowers(aten._cdist_forward.default)
def cdist(ctx: Lowering, a: Tensor, b: Tensor, p: float, compute_mode: int | None) -> Tensor:
    p = _power(p)
    if p == 2 and _uses_product(a, b, compute_mode):
        raise Unsupported("a library's matrix product is faster")
    a, b = ctx.realize(a), ctx.realize(b)
    size = (*result_size(ctx), a.size[-1])

    def element(*point: Expr) -> Expr:
        *lead, i, j, k = point
        return _difference(a, b, lead, i, j, k)

    return _distance(ctx, from_indices(size, a.device, element), p)


@lowers(aten._cdist_backward.default)
def cdist_backward(ctx: Lowering, grad: Tensor, a: Tensor, b: Tensor, p: float,
                   distances: Tensor) -> Tensor:  # fmt: skip
    p = _power(p)
    out = result_size(ctx)
    if p == 0:
        return full(out, 0, grad.dtype, grad.device)
    a, b, grad, distances = (ctx.realize(t) for t in (a, b, grad, distances))
    size: Size = (*out[:-2], out[-2], b.size[-2], out[-1])

    def element(*point: Expr) -> Expr:
        *lead, i, j, k = point
        pair = [i, j]
        return _slope(p, _difference(a, b, lead, i, j, k), grad.at([*_batch(grad, lead), *pair]),
                      distances.at([*_batch(distances, lead), *pair]))  # fmt: skip

    terms = from_indices(size, grad.device, element)
    return fold(ctx, "sum", terms, [terms.rank - 2], False)


# ---- every pair of rows of one matrix


def _pair(k: Expr, rows: Expr) -> tuple[Expr, Expr]:
    """The rows of pair number `k` of (0, 1), (0, 2), ..., (1, 2), ..."""
    wide = torch.float64
    half = f.sub(build.cast(rows, wide), 0.5)
    root = f.sqrt(f.sub(f.sub(f.square(half), f.mul(build.cast(k, wide), 2.0)), 1.0))
    first = build.op("index", build.cast(f.sub(half, root), torch.int64), rows)
    before = ix.sub(ix.mul(first, rows), ix.floordiv(ix.mul(first, ix.add(first, 1)), 2))
    return first, build.op("index", ix.add(ix.sub(k, before), first, 1), rows)


def _number(i: Expr, j: Expr, rows: Expr) -> Expr:
    """The number of the pair `i < j`."""
    before = ix.sub(ix.mul(i, rows), ix.floordiv(ix.mul(i, ix.add(i, 1)), 2))
    return ix.add(before, ix.sub(j, i), -1)


@lowers(aten._pdist_forward.default)
def pdist(ctx: Lowering, x: Tensor, p: float = 2.0) -> Tensor:
    p = _power(p)
    x = ctx.realize(x)
    rows, columns = x.size

    def element(k: Expr, c: Expr) -> Expr:
        i, j = _pair(k, rows)
        return f.sub(x.at([i, c]), x.at([j, c]))

    return _distance(ctx, from_indices((*result_size(ctx), columns), x.device, element), p)


@lowers(aten._pdist_backward.default)
def pdist_backward(ctx: Lowering, grad: Tensor, x: Tensor, p: float, distances: Tensor) -> Tensor:
    p = _power(p)
    if p == 0:
        return full(x.size, 0, x.dtype, x.device)
    x, grad, distances = (ctx.realize(t) for t in (x, grad, distances))
    rows, columns = x.size

    def element(i: Expr, j: Expr, c: Expr) -> Expr:
        other = build.op("ne", i, j)
        number = _number(ix.minimum(i, j), ix.maximum(i, j), rows)
        difference = f.sub(x.at([i, c]), x.at([j, c]))
        found = _slope(p, difference, grad.at([number]), distances.at([number]))
        return build.where(other, build.guard(found, other), const(0, x.dtype))

    terms = from_indices((rows, rows, columns), x.device, element)
    return fold(ctx, "sum", terms, [1], False)
