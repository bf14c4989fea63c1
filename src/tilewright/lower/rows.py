"""Rows added up by key, on a card: every row of the result gathers those that belong to it.

Added one by one, rows go to a table of float32 that is cleared before and rounded after, and all of
it passes through memory four times (H200: 347 us for 32768 of 2048 bfloat16 into 32000 rows). Here
the keys are sorted, each row of the result is told the first rows of its run, and is stored once;
of a long run the rest is added one by one into a row beside the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import INDEX, Expr, const, load, rewrite
from tilewright.ir.program import Store
from tilewright.lower.context import Lowering
from tilewright.lower.fold import full
from tilewright.lower.indexing import checked, table
from tilewright.lower.promote import compute_type
from tilewright.lower.tensor import Tensor, from_indices, placeholders

aten = torch.ops.aten
FEW = 3  # rows of a run that are added at once; with one number more they are 16 bytes
SORT = 240 << 20  # bytes that a card moves while it sorts the keys (60 us, with what goes with it)
SHORTEST = 64  # elements of a row
SLOT = torch.int32  # numbers from one on; zero: none


def worthwhile(values: Tensor, height: Expr) -> bool:
    """Whether the result is so large, and its runs so short, that sorting costs less than passing
    over it again and again."""
    if values.device.type != "cuda":
        return False
    count, width = ix.likely(values.size[0]), ix.likely(ix.product(values.size[1:]))
    rows = ix.likely(height)
    narrow = ix.bounds(values.size[0])[1] < 2**31 and ix.bounds(height)[1] < 2**31
    if not narrow or width < SHORTEST or count > 2 * rows:
        return False
    size, wide = values.dtype.itemsize, compute_type(values.dtype).itemsize
    added = 2 * min(count, rows) * wide + count * size + rows * wide  # with the table cleared
    rounded = rows * (wide + size) if size < wide else 0
    gathered = 1.5 * (count + rows) * size  # rows are waited for
    return (added + rounded - gathered) * width > SORT


def summed(ctx: Lowering, values: Tensor, keys: Tensor, like: torch.Tensor, height: Expr,
           ignored: Expr | None) -> Tensor:  # fmt: skip
    """(height, ...): the sum of the rows of `values` that have each key, but for one. `like` is
    what the graph has for the keys."""
    runs = _Runs.of(ctx, keys, like, height, ignored)
    values = table(ctx, values)
    work = compute_type(values.dtype)
    beside = _rest_of_long_runs(ctx, values, runs, work)

    def element(v: Expr, *j: Expr) -> Expr:
        terms: list[Expr] = []
        for k in range(FEW + 1):
            slot = runs.slots.at([v, ix.as_index(k)])
            source = values if k < FEW else beside
            value = source.at([_row(slot, source.size[0]), *j])
            given = build.op("gt", slot, const(0, SLOT))
            value = runs.guarded(build.cast(value, work), given)
            terms.append(build.where(given, value, const(0, work)))
        return build.cast(reduce(lambda a, b: build.op("add", a, b), terms), values.dtype)

    return ctx.realize(from_indices((height, *values.size[1:]), values.device, element))


def _rest_of_long_runs(ctx: Lowering, values: Tensor, runs: _Runs, work: torch.dtype) -> Tensor:
    """The sums of what is left of long runs; rows that no run has are not even cleared."""
    made = ctx.buffer((runs.count_beside, *values.size[1:]), work, values.device)
    held = ctx.stored(made)

    def place(row: Expr, j: Sequence[Expr]) -> Expr:
        return ix.linearize((row, *j), made.stride)

    b, *j = placeholders(made.size)
    ctx.nest((b, *j), (), [Store(made.name, place(b, j), const(0, work), "set",
                                 runs.is_used(b))])  # fmt: skip
    p, *j = placeholders(values.size)
    slot = runs.beside(p)
    left = build.op("bit_and", runs.is_late(p), build.op("gt", slot, const(0, SLOT)))
    row = checked(runs.order.at([p]), runs.count)
    value = runs.guarded(build.cast(values.at([row, *j]), work), left)
    ctx.nest((p, *j), (), [Store(made.name, place(_row(slot, runs.count_beside), j), value, "add",
                                 left)])  # fmt: skip
    return held


@dataclass(frozen=True)
class _Runs:
    """Keys in order. `slots` of a key are the first rows that have it, and then, if there are more,
    the row beside the result that these are added up in."""

    keys: Tensor
    order: Tensor  # which row each key was of
    slots: Tensor

    @staticmethod
    def of(ctx: Lowering, keys: Tensor, like: torch.Tensor, height: Expr,
           ignored: Expr | None) -> _Runs:  # fmt: skip
        # shorter keys are sorted in fewer passes (H200: 32768 of them in 29, 42 or 69 us)
        kind = torch.int16 if ix.bounds(height)[1] < 2**15 else torch.int32
        kept = ctx.copy(keys.map(lambda key: build.cast(checked(key, height), kind)))
        value = tuple(torch.sort(like.reshape(-1).to(kind)))
        found = ctx.call(aten.sort.default, (ctx.view_of(kept),), {}, value, aliases=False)
        nothing = full((height, ix.as_index(FEW + 1)), 0, SLOT, keys.device)
        runs = _Runs(found[0], found[1], ctx.copy(nothing))
        (p,) = placeholders(keys.size)
        after = [build.cast(runs._is_after(p, k), SLOT) for k in range(1, FEW + 2)]
        rank = reduce(lambda a, b: build.op("add", a, b), after)
        row = build.where(build.op("lt", rank, const(FEW, SLOT)),
                          build.cast(runs.order.at([p]), SLOT),
                          build.cast(ix.floordiv(p, FEW), SLOT))  # fmt: skip
        taken = build.op("le", rank, const(FEW, SLOT))
        if ignored is not None:
            counts = build.op("ne", build.cast(runs.keys.at([p]), INDEX), ignored)
            taken = build.op("bit_and", taken, counts)
        made = ctx.program.buffers[runs.slots.body.arg]
        key, spot = checked(runs.keys.at([p]), height), checked(rank, ix.as_index(FEW + 2))
        place = ix.linearize((key, spot), made.stride)
        ctx.nest((p,), (), [Store(made.name, place, build.op("add", row, const(1, SLOT)), "set",
                                  taken)])  # fmt: skip
        return runs

    @property
    def count(self) -> Expr:
        return self.keys.size[0]

    @property
    def count_beside(self) -> Expr:
        """What is left of long runs starts further apart than so many places share a row."""
        return ix.add(ix.floordiv(self.count, FEW), 1)

    def _is_after(self, p: Expr, k: int) -> Expr:
        """Whether a place and the one `k` before it are of one run."""
        before = ix.sub(p, k)
        same = build.op("eq", self.keys.at([p]), self.keys.at([ix.maximum(before, 0)]))
        return build.op("bit_and", build.op("ge", before, ix.ZERO), same)

    def is_late(self, p: Expr) -> Expr:
        return self._is_after(p, FEW)

    def beside(self, p: Expr) -> Expr:
        """The slot of what is left of the run of a place."""
        key = checked(self.keys.at([p]), self.slots.size[0])
        return self.slots.at([key, ix.as_index(FEW)])

    def is_used(self, b: Expr) -> Expr:
        """Whether a run has this row beside the result: what is left of it starts at one of the
        places that share the row, so it has the place before them."""
        before = ix.maximum(ix.sub(ix.mul(b, FEW), 1), 0)
        return build.op("eq", build.cast(self.beside(before), INDEX), ix.add(b, 1))

    def guarded(self, value: Expr, condition: Expr) -> Expr:
        """The value with no row read where it is not wanted."""
        own = {t.body.arg for t in (self.keys, self.order, self.slots)}

        def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
            if node.op != "load" or node.arg in own:
                return None
            both = condition if len(src) == 1 else build.op("bit_and", src[1], condition)
            return load(node.arg, node.dtype, src[0], both)

        return rewrite(value, rule)


def _row(slot: Expr, count: Expr) -> Expr:
    """The row a slot names; the first where it names none."""
    return checked(build.op("sub", build.op("max", slot, const(1, SLOT)), const(1, SLOT)), count)
