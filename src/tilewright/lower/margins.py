"""Losses of several classes at once: by how much the wrong ones come near the right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import INDEX, Expr, const
from tilewright.lower import formula as f
from tilewright.lower.context import Lowering
from tilewright.lower.fold import dtype_of, fake_of, fold, full, keep, number
from tilewright.lower.indexing import checked
from tilewright.lower.losses import MEAN, NONE
from tilewright.lower.promote import compute_type
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Size, Tensor, from_indices, pointwise
from tilewright.lower.views import reshape

aten = torch.ops.aten


def _matrix(t: Tensor) -> Tensor:
    """One row per sample; a vector is one sample, a number is one class."""
    return t if t.rank == 2 else reshape(t, (ix.ONE, t.numel))


def _reduced(ctx: Lowering, losses: Tensor, reduction: int, size: Size,
             dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Losses per row as the operator returns them."""
    if reduction == NONE:
        return reshape(losses.to(dtype), size)
    rows = number(ix.maximum(losses.numel, 1), losses.dtype)
    finish = (lambda total: f.div(total, rows)) if reduction == MEAN else None
    return fold(ctx, "sum", losses, [0], False, dtype, finish)


def _scaled(slopes: Tensor, grad: Tensor, reduction: int, size: Size,
            dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Slopes per row and class times the gradient of the loss: of each row, or of all."""
    rows, columns = slopes.size
    divisor = ix.mul(rows, columns) if reduction == MEAN else columns
    share = f.reciprocal(number(ix.maximum(divisor, 1), slopes.dtype))
    each = grad.rank > 0 and reduction == NONE

    def element(n: Expr, c: Expr) -> Expr:
        g = build.cast(grad.at([n] if each else [ix.ZERO] * grad.rank), slopes.dtype)
        return build.cast(f.mul(f.mul(slopes.at([n, c]), share), g), dtype)

    return reshape(from_indices(slopes.size, slopes.device, element), size)


# ---- one right class: the margin to every other one


class _Margin:
    """What the loss and its slope share: the labels, the distances, the power."""

    def __init__(self, x: Tensor, target: Tensor, p: Any, margin: Any,
                 weight: Tensor | None) -> None:  # fmt: skip
        if isinstance(p, Expr) or p not in (1, 2):
            raise Unsupported("the power is one or two")
        self.x = _matrix(x).to(compute_type(x.dtype))
        self.rows, self.classes = self.x.size
        self.labels = reshape(target, (self.rows,))
        self.squared = p == 2
        self.margin = number(margin, self.x.dtype)
        self.weight = weight

    def label(self, n: Expr) -> Expr:
        return checked(self.labels.at([n]), self.classes)

    def excess(self, n: Expr, c: Expr) -> Expr:
        return f.add(f.sub(self.margin, self.x.at([n, self.label(n)])), self.x.at([n, c]))

    def counted(self, n: Expr, c: Expr, value: Callable[[Expr], Expr]) -> Expr:
        """`value` of the excess of a wrong class that comes too near, weighted; else zero."""
        excess = self.excess(n, c)
        found = value(excess)
        if self.weight is not None:
            found = f.mul(found, build.cast(self.weight.at([self.label(n)]), found.dtype))
        wrong = build.op("ne", build.cast(self.labels.at([n]), INDEX), c)
        return f.where(f.both(f.gt(excess, 0.0), wrong), found, 0.0)

    def slope(self, n: Expr, c: Expr) -> Expr:
        return self.counted(n, c, lambda z: f.mul(z, 2.0) if self.squared else f.like(1.0, z))


@lowers(aten.multi_margin_loss.default)
def multi_margin_loss(ctx: Lowering, x: Tensor, target: Tensor, p: Any = 1, margin: Any = 1,
                      weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:  # fmt: skip
    loss = _Margin(x, target, p, margin, weight)
    power = f.square if loss.squared else lambda z: z
    terms = from_indices(loss.x.size, x.device, lambda n, c: loss.counted(n, c, power))
    classes = number(ix.maximum(loss.classes, 1), terms.dtype)
    losses = fold(ctx, "sum", terms, [1], False, None, lambda total: f.div(total, classes))
    size = ctx.sizes.tuple(fake_of(ctx).size())
    return _reduced(ctx, losses, reduction, size, dtype_of(ctx))


@lowers(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(ctx: Lowering, grad: Tensor, x: Tensor, target: Tensor, p: Any,
                               margin: Any, weight: Tensor | None = None,
                               reduction: int = MEAN) -> Tensor:  # fmt: skip
    loss = _Margin(x, target, p, margin, weight)
    slopes = from_indices(loss.x.size, x.device, loss.slope)
    total = fold(ctx, "sum", slopes, [1], False)

    def element(n: Expr, c: Expr) -> Expr:
        right = build.op("eq", build.cast(loss.labels.at([n]), INDEX), c)
        return f.where(right, f.neg(total.at([n])), slopes.at([n, c]))

    found = from_indices(slopes.size, x.device, element)
    return _scaled(found, grad, reduction, x.size, dtype_of(ctx))


# ---- several right classes: a list of labels that ends at the first negative one


def _listed(ctx: Lowering, labels: Tensor) -> Tensor:
    """Whether a label stands before the end of its row's list."""
    rows, columns = labels.size

    def end(n: Expr, k: Expr) -> Expr:
        return build.where(build.op("lt", labels.at([n, k]), ix.ZERO), k, columns)

    ends = fold(ctx, "min", from_indices((rows, columns), labels.device, end), [1], False)
    return from_indices((rows, columns), labels.device,
                        lambda n, k: build.op("lt", k, ends.at([n])))  # fmt: skip


class _Multilabel:
    def __init__(self, ctx: Lowering, x: Tensor, target: Tensor) -> None:
        self.ctx = ctx
        self.x = keep(ctx, _matrix(x).to(compute_type(x.dtype)))
        self.labels = _matrix(target).to(INDEX)
        self.rows, self.classes = self.x.size
        self.listed = _listed(ctx, self.labels)

    def label(self, n: Expr, k: Expr) -> Expr:
        """The label at place `k` of a row's list; zero behind its end."""
        here = self.listed.at([n, k])
        return checked(build.where(here, self.labels.at([n, k]), ix.ZERO), self.classes)

    def excess(self, n: Expr, right: Expr, wrong: Expr) -> Expr:
        return f.add(f.sub(1.0, self.x.at([n, right])), self.x.at([n, wrong]))

    def total(self, dims: list[int], term: Callable[..., Expr]) -> Tensor:
        """Terms of (row, class, class), or (row, class, place), summed over the last ones."""
        size = (self.rows, self.classes, self.classes)
        return fold(self.ctx, "sum", from_indices(size, self.x.device, term), dims, False)


@lowers(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(ctx: Lowering, x: Tensor, target: Tensor,
                           reduction: int) -> tuple[Tensor, Tensor]:  # fmt: skip
    loss = _Multilabel(ctx, x, target)
    dtype = dtype_of(ctx, 0)
    marks = ctx.scatter(full(loss.x.size, 0, x.dtype, x.device), loss.x.size,
                        lambda n, k: [n, loss.label(n, k)], lambda n, k: const(1, x.dtype),
                        mask=lambda n, k: loss.listed.at([n, k]))  # fmt: skip

    def term(n: Expr, k: Expr, c: Expr) -> Expr:
        excess = loss.excess(n, loss.label(n, k), c)
        wrong = build.op("eq", marks.at([n, c]), const(0, x.dtype))
        counts = f.both(f.both(wrong, loss.listed.at([n, k])), f.gt(excess, 0.0))
        return f.where(counts, excess, 0.0)

    classes = number(ix.maximum(loss.classes, 1), loss.x.dtype)
    losses = loss.total([1, 2], term).map(lambda total: f.div(total, classes))
    size = ctx.sizes.tuple(fake_of(ctx, 0).size())
    return _reduced(ctx, losses, reduction, size, dtype), reshape(marks, target.size)


@lowers(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(ctx: Lowering, grad: Tensor, x: Tensor, target: Tensor,
                                    reduction: int, is_target: Tensor) -> Tensor:  # fmt: skip
    loss = _Multilabel(ctx, x, target)
    marks = _matrix(is_target).map(lambda m: build.op("ne", m, const(0, m.dtype)))
    work = loss.x.dtype

    def counted(condition: Expr) -> Expr:
        return build.cast(condition, work)

    def too_near(n: Expr, c: Expr, k: Expr) -> Expr:
        excess = loss.excess(n, loss.label(n, k), c)
        return counted(f.both(f.gt(excess, 0.0), loss.listed.at([n, k])))

    def nearer(n: Expr, c: Expr, d: Expr) -> Expr:
        return counted(f.both(f.gt(loss.excess(n, c, d), 0.0), f.not_(marks.at([n, d]))))

    def times(n: Expr, c: Expr, k: Expr) -> Expr:
        return counted(f.both(build.op("eq", loss.labels.at([n, k]), c), loss.listed.at([n, k])))

    wrong, right, often = (loss.total([2], term) for term in (too_near, nearer, times))
    slopes = pointwise(lambda m, w, r, t: f.where(m, f.neg(f.mul(r, t)), w),
                       marks, wrong, right, often)  # fmt: skip
    return _scaled(slopes, grad, reduction, x.size, dtype_of(ctx))
