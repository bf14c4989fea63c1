"""Embedding bags: rows of a table, gathered and combined bag by bag, and their backwards.

A bag is a run of indices that starts at its offset. Runs of one length (an index matrix, whose rows
are the bags) are folded by a loop; otherwise the bag of every index is found first, by a running
count of the offsets met, and rows are added into their bags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import INDEX, Expr, const
from tilewright.ir.program import Store, StoreMode
from tilewright.lower.context import Fill, Lowering
from tilewright.lower.fold import fake_of, full
from tilewright.lower.indexing import checked, table
from tilewright.lower.promote import compute_type
from tilewright.lower.scatter import Points, scattered
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Size, Tensor, from_indices, placeholders

aten = torch.ops.aten
SUM, MEAN, MAX = range(3)
_FOLDS: dict[StoreMode, str] = {"add": "sum", "max": "max", "min": "min"}


# ---- which bag an index belongs to


def _spacing(offsets: Tensor, bags: Expr, count: Expr) -> Expr | None:
    """The length of every bag where the offsets are known to be that far apart."""
    body = offsets.body
    while body.op == "cast":
        body = body.src[0]
    (position,) = placeholders(offsets.size)
    if bags is ix.ONE and body is ix.ZERO:
        return count
    step = ix.coefficient(body, position) if position.op == "var" else None
    regular = step is not None and body is ix.mul(step, position) and ix.mul(step, bags) is count
    return step if regular else None


def _bag_of_each(ctx: Lowering, offsets: Tensor, bags: Expr, count: Expr) -> Tensor:
    """How many bags start at or before each of the `count` indices, less one."""
    size = (ix.add(count, 1),)  # the last bags may be empty, and start behind the last index
    nothing = full(size, 0, INDEX, offsets.device)
    starts = ctx.scatter(nothing, (bags,), lambda b: [checked(offsets.at([b]), size[0])],
                         lambda b: ix.ONE, mode="add")  # fmt: skip
    (position,) = placeholders(size)
    running = starts
    if position.op == "var":
        made = ctx.buffer(size, INDEX, offsets.device)
        ctx.nest([position], (), [Store(made.name, position,
                                        build.scan("sum", position, starts.body))])  # fmt: skip
        running = ctx.stored(made)
    return from_indices((count,), offsets.device,
                        lambda i: checked(ix.sub(running.at([i]), 1), bags))  # fmt: skip


@dataclass(frozen=True)
class Bags:
    """The indices of one call, in bags."""

    ctx: Lowering
    indices: Tensor
    count: Expr  # of bags
    padding: int
    spacing: Expr | None
    bag: Tensor

    @staticmethod
    def of(ctx: Lowering, indices: Tensor, offsets: Tensor, include_last: bool,
           padding: int) -> Bags:  # fmt: skip
        total, bags = indices.size[0], ix.sub(offsets.size[0], int(include_last))
        spacing = _spacing(offsets, bags, total)
        if spacing is not None:
            length = ix.maximum(spacing, 1)
            bag = from_indices((total,), offsets.device, lambda i: ix.floordiv(i, length))
        else:
            bag = _bag_of_each(ctx, offsets, bags, total)
        return Bags(ctx, indices, bags, padding, spacing, bag)

    def keeps(self, i: Expr) -> Expr:
        """Whether index `i` is not padding."""
        if self.padding < 0:
            return build.TRUE
        return build.op("ne", build.cast(self.indices.at([i]), INDEX), const(self.padding))

    def row(self, i: Expr, rows: Expr) -> Expr:
        return checked(self.indices.at([i]), rows)

    def fold(self, mode: StoreMode, start: Expr, width: tuple[Expr, ...],
             value: Callable[..., Expr]) -> Tensor:  # fmt: skip
        """`value(i, d...)` of every kept index `i` combined into its bag, from `start`."""
        size = (self.count, *width)
        if self.spacing is None:
            into = Tensor(size, start.dtype, self.indices.device, start)
            mask = None if self.padding < 0 else lambda i, *d: self.keeps(i)
            return self.ctx.scatter(into, (self.indices.size[0], *width),
                                    lambda i, *d: [self.bag.at([i]), *d], value, mode,
                                    mask)  # fmt: skip
        spacing = self.spacing

        def term(b: Expr, r: Expr, *d: Expr) -> Expr:
            i = ix.add(ix.mul(b, spacing), r)
            kept = self.keeps(i)
            return build.where(kept, build.guard(value(i, *d), kept), start)

        terms = from_indices((self.count, spacing, *width), self.indices.device, term)
        return self.ctx.reduce(_FOLDS[mode], terms, [1], False, Fill(start.dtype))[0]

    def sizes(self) -> Tensor:
        """How many indices each bag has, padding not counted."""
        if self.padding < 0 and self.spacing is not None:
            return Tensor((self.count,), INDEX, self.indices.device, self.spacing)
        return self.fold("add", ix.ZERO, (), lambda i: ix.ONE)


# ---- forward


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(ctx: Lowering, weight: Tensor, indices: Tensor, offsets: Tensor,
                  scale_grad_by_freq: bool = False, mode: int = SUM, sparse: bool = False,
                  per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
                  padding_idx: int = -1) -> tuple[Tensor, ...]:  # fmt: skip
    """(the bags, the bag of each index, the bags' sizes, where each maximum was)."""
    rows, source = weight.size[0], table(ctx, weight)
    bags = Bags.of(ctx, indices, offsets, include_last_offset, padding_idx)
    work = compute_type(weight.dtype)
    width = weight.size[1:]

    def element(i: Expr, d: Expr) -> Expr:
        value = build.cast(source.at([bags.row(i, rows), d]), work)
        if per_sample_weights is None:
            return value
        return build.op("mul", value, build.cast(per_sample_weights.at([i]), work))

    sizes = bags.sizes() if mode != SUM else full((bags.count,), 0, INDEX, weight.device)
    if mode == MAX:
        most, where = _maxima(bags, rows, width, element, sizes)
        return most.to(weight.dtype), *_rest(ctx, bags, sizes, where)
    total = bags.fold("add", const(0, work), width, element).to(weight.dtype)
    if mode == MEAN:
        total = _mean(total, sizes)
    return total, *_rest(ctx, bags, sizes, sizes)


def _mean(total: Tensor, sizes: Tensor) -> Tensor:
    """The sums, as they are stored, over the bags' sizes; an empty bag stays zero."""
    work = compute_type(total.dtype)

    def element(b: Expr, d: Expr) -> Expr:
        count = build.op("max", sizes.at([b]), ix.ONE)
        mean = build.op("div", build.cast(total.at([b, d]), work), build.cast(count, work))
        return build.cast(mean, total.dtype)

    return from_indices(total.size, total.device, element)


def _maxima(bags: Bags, rows: Expr, width: Size, element: Callable[[Expr, Expr], Expr],
            sizes: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The largest of every column of a bag, and the row it came from: the first such."""
    (d,) = placeholders(width)
    lowest = const(float("-inf"), element(ix.ZERO, d).dtype)
    most = bags.fold("max", lowest, width, element)
    last = bags.indices.size[0]

    def found_at(i: Expr, d: Expr) -> Expr:
        value = element(i, d)
        here = build.op("eq", value, most.at([bags.bag.at([i]), d]))
        return build.where(build.op("bit_or", here, build.op("isnan", value)), i, last)

    first = bags.fold("min", last, width, found_at)

    def of_filled(value: Callable[[Expr, Expr], Expr]) -> Tensor:
        def chosen(b: Expr, d: Expr) -> Expr:
            filled = build.op("lt", ix.ZERO, sizes.at([b]))
            found = value(b, d)
            return build.where(filled, build.guard(found, filled), const(0, found.dtype))

        return from_indices((bags.count, *width), bags.indices.device, chosen)

    where = of_filled(lambda b, d: bags.row(checked(first.at([b, d]), last), rows))
    return of_filled(lambda b, d: most.at([b, d])), where


def _rest(ctx: Lowering, bags: Bags, sizes: Tensor, where: Tensor) -> list[Tensor]:
    """The results beside the bags, with the graph's own sizes: some are left empty by eager."""
    made: list[Tensor] = []
    for k, t in enumerate((bags.bag, sizes, where), start=1):
        fake = fake_of(ctx, k)
        size = ctx.sizes.tuple(fake.size())
        made.append(_cut(t, size).to(fake.dtype))
    return made


def _cut(t: Tensor, size: Size) -> Tensor:
    """`t`, its first dimension cut short or filled up with zeros."""
    if t.size == size:
        return t

    def element(i: Expr, *rest: Expr) -> Expr:
        inside = build.op("lt", i, t.size[0])
        return build.where(inside, build.guard(t.at([i, *rest]), inside), const(0, t.dtype))

    return from_indices(size, t.device, element)


# ---- backward


def _bag_ids(ctx: Lowering, indices: Tensor, offsets: Tensor, given: Tensor) -> Tensor:
    """The forward pass leaves the bags of the indices out where it did not need them."""
    if given.size == indices.size:
        return given
    return Bags.of(ctx, indices, offsets, False, -1).bag


@lowers(aten._embedding_bag_dense_backward.default)
def dense_backward(ctx: Lowering, grad: Tensor, indices: Tensor, bag_of_each: Tensor,
                   bag_size: Tensor, maximum_indices: Tensor, rows: ix.IndexLike,
                   scale_grad_by_freq: bool, mode: int, per_sample_weights: Tensor | None,
                   padding_idx: int = -1) -> Tensor:  # fmt: skip
    if scale_grad_by_freq:
        raise Unsupported("eager divides by the frequencies of its sorted indices, not of the rows")
    height, width, work = ix.as_index(rows), grad.size[1:], compute_type(grad.dtype)
    into = full((height, *width), 0, grad.dtype, grad.device)
    if mode == MAX:
        empty = const(0, bag_size.dtype)
        points = Points(grad.size, lambda b, d: [checked(maximum_indices.at([b, d]), height), d],
                        lambda b, d: build.op("ne", bag_size.at([b]), empty))  # fmt: skip
        return scattered(ctx, into, points, lambda b, d: grad.at([b, d]), "add")
    bags = Bags(ctx, indices, grad.size[0], padding_idx, None, bag_of_each)
    source = table(ctx, grad)

    def value(i: Expr, d: Expr) -> Expr:
        bag = checked(bag_of_each.at([i]), bags.count)
        found = build.cast(source.at([bag, d]), work)
        if per_sample_weights is not None:
            found = build.op("mul", found, build.cast(per_sample_weights.at([i]), work))
        if mode == MEAN:
            found = build.op("div", found, build.cast(bag_size.at([bag]), work))
        return found

    points = Points((indices.size[0], *width), lambda i, d: [bags.row(i, height), d],
                    None if padding_idx < 0 else lambda i, d: bags.keeps(i))  # fmt: skip
    return scattered(ctx, into, points, value, "add")


@lowers(aten._embedding_bag_backward.default)
def backward(ctx: Lowering, grad: Tensor, indices: Tensor, offsets: Tensor, bag_of_each: Tensor,
             bag_size: Tensor, maximum_indices: Tensor, rows: ix.IndexLike,
             scale_grad_by_freq: bool, mode: int, sparse: bool,
             per_sample_weights: Tensor | None, padding_idx: int = -1) -> Tensor:  # fmt: skip
    ids = _bag_ids(ctx, indices, offsets, bag_of_each)
    return dense_backward(ctx, grad, indices, ids, bag_size, maximum_indices, rows,
                          scale_grad_by_freq, mode, per_sample_weights, padding_idx)  # fmt: skip


@lowers(aten._embedding_bag_per_sample_weights_backward.default)
def per_sample_weights_backward(ctx: Lowering, grad: Tensor, weight: Tensor, indices: Tensor,
                                offsets: Tensor, bag_of_each: Tensor, mode: int,
                                padding_idx: int = -1) -> Tensor:  # fmt: skip
    """For every index, the product of its row and the gradient of its bag."""
    ids = _bag_ids(ctx, indices, offsets, bag_of_each)
    bags = Bags(ctx, indices, grad.size[0], padding_idx, None, ids)
    work = compute_type(grad.dtype)
    left, right = table(ctx, grad), table(ctx, weight)

    def term(i: Expr, d: Expr) -> Expr:
        kept = bags.keeps(i)
        a = left.at([checked(ids.at([i]), bags.count), d])
        b = right.at([bags.row(i, weight.size[0]), d])
        product = build.op("mul", build.cast(a, work), build.cast(b, work))
        return build.where(kept, build.guard(product, kept), const(0, work))

    terms = from_indices((indices.size[0], weight.size[1]), grad.device, term)
    dtype = grad.dtype
    fill = Fill(dtype, lambda total: build.cast(total, dtype))
    return ctx.reduce("sum", terms, [1], False, fill)[0]
