"""Rows added up by key, on a card: every row of the result gathers those that belong to it.

Added one by one, rows go to a table of float32 that is cleared before and rounded after, and all of
it passes through memory four times (H200: 347 us for 32768 of 2048 bfloat16 into 32000 rows). Here
each row of the result is told the first places that have its key, and is stored once; what is
added to keys that have more goes one by one into a row beside the result. The first places are
found in as many rounds: in each, the least place that has a key and comes after the one before
(H200: three rounds 7 us, where sorting the keys takes 29 us).
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
from tilewright.lower.indexing import checked, sure, table
from tilewright.lower.promote import compute_type
from tilewright.lower.tensor import Tensor, from_indices, placeholders

FEW = 3  # rows of a key that are added at once
FINDING = 120 << 20  # bytes that a card moves while it finds them (30 us)
SHORTEST = 64  # elements of a row
PLACE = torch.int32
NONE = 2**31 - 1
COUNTED = 256  # keys that are counted together


def worthwhile(values: Tensor, height: Expr) -> bool:
    """Whether the result is so large, and so few rows have one key, that finding them costs less
    than passing over it again and again."""
    if values.device.type != "cuda":
        return False
    count, width = ix.likely(values.size[0]), ix.likely(ix.product(values.size[1:]))
    rows = ix.likely(height)
    narrow = ix.bounds(values.size[0])[1] < NONE and ix.bounds(height)[1] < NONE
    if not narrow or width < SHORTEST or count > 2 * rows:
        return False
    size, wide = values.dtype.itemsize, compute_type(values.dtype).itemsize
    added = 2 * min(count, rows) * wide + count * size + rows * wide  # with the table cleared
    rounded = rows * (wide + size) if size < wide else 0
    gathered = 1.5 * (count + rows) * size  # rows are waited for
    return (added + rounded - gathered) * width > FINDING


def summed(ctx: Lowering, values: Tensor, keys: Tensor, height: Expr,
           ignored: Expr | None = None, into: Tensor | None = None) -> Tensor:  # fmt: skip
    """(height, ...): the sum of the rows of `values` that have each key, but for one, and of the
    row of `into` if there is one."""
    places = _Places.of(ctx, keys, height, ignored)
    values = table(ctx, values)
    work = compute_type(values.dtype)
    beside = _sums_beside(ctx, values, places, work)

    def element(v: Expr, *j: Expr) -> Expr:
        found = [(values, p.at([v]), build.op("lt", p.at([v]), const(NONE, PLACE)))
                 for p in places.first]  # fmt: skip
        found.append((beside, places.row_beside(v), places.has_more(v)))
        terms = [] if into is None else [build.cast(into.at([v, *j]), work)]
        for source, row, given in found:
            known = checked if source is beside else sure
            place = known(build.where(given, row, const(0, PLACE)), source.size[0])
            value = places.guarded(build.cast(source.at([place, *j]), work), given)
            terms.append(build.where(given, value, const(0, work)))
        return build.cast(reduce(lambda a, b: build.op("add", b, a), terms), values.dtype)

    return ctx.realize(from_indices((height, *values.size[1:]), values.device, element))


def _sums_beside(ctx: Lowering, values: Tensor, places: _Places, work: torch.dtype) -> Tensor:
    """The sums of what the first places leave; rows that no key has are not even cleared."""
    count = ix.add(ix.floordiv(places.keys.size[0], FEW + 1), 1)
    made = ctx.buffer((count, *values.size[1:]), work, values.device)
    held = ctx.stored(made)

    def place(row: Expr, j: Sequence[Expr]) -> Expr:
        return ix.linearize((row, *j), made.stride)

    b, *j = placeholders(made.size)
    used = build.op("lt", b, build.cast(places.all_beside, INDEX))
    ctx.nest((b, *j), (), [Store(made.name, place(b, j), const(0, work), "set", used)])
    p, *j = placeholders(values.size)
    key, left = places.key(p), places.is_late(p)
    row = checked(build.where(left, places.row_beside(key), const(0, PLACE)), count)
    value = places.guarded(build.cast(values.at([p, *j]), work), left)
    ctx.nest((p, *j), (), [Store(made.name, place(row, j), value, "add", left)])
    return held


@dataclass(frozen=True)
class _Places:
    """Of every key the first places that have it. Keys with more places than these are counted, in
    pieces: `within` counts them up to a key from the first of its piece on, `before` up to the end
    of a piece."""

    keys: Tensor
    first: tuple[Tensor, ...]
    within: Tensor
    before: Tensor
    more: Tensor

    @staticmethod
    def of(ctx: Lowering, keys: Tensor, height: Expr, ignored: Expr | None) -> _Places:
        kept = ctx.copy(keys.map(lambda key: build.cast(checked(key, height), PLACE)))
        (p,) = placeholders(keys.size)
        key = sure(kept.at([p]), height)
        counts = None if ignored is None else build.op("ne", key, ignored)

        *first, more = made = [ctx.buffer((height,), PLACE, keys.device) for _ in range(FEW + 1)]
        (v,) = placeholders((height,))
        ctx.nest((v,), (), [Store(b.name, v, const(0 if b is more else NONE, PLACE))
                            for b in made])  # fmt: skip
        held = [ctx.stored(b) for b in made]
        place = build.cast(p, PLACE)
        for buffer, least in zip(first, held, strict=False):
            ctx.nest((p,), (), [Store(buffer.name, key, place, "min", counts)])
            counts = build.op("gt", place, least.at([key]))
        ctx.nest((p,), (), [Store(more.name, key, const(1, PLACE), "max", counts)])
        return _Places(kept, tuple(held[:FEW]), *_counted(ctx, held[FEW]), held[FEW])

    def key(self, p: Expr) -> Expr:
        return sure(self.keys.at([p]), self.more.size[0])

    def is_late(self, p: Expr) -> Expr:
        """Whether a place comes after the first ones of its key."""
        return build.op("gt", build.cast(p, PLACE), self.first[-1].at([self.key(p)]))

    def has_more(self, key: Expr) -> Expr:
        return build.op("gt", self.more.at([key]), const(0, PLACE))

    def row_beside(self, key: Expr) -> Expr:
        """The row beside the result of a key that has more."""
        piece = ix.floordiv(key, COUNTED)
        earlier = self.before.at([ix.maximum(ix.sub(piece, 1), 0)])
        earlier = build.where(build.op("gt", piece, ix.ZERO), earlier, const(0, PLACE))
        return build.op("sub", build.op("add", self.within.at([key]), earlier), const(1, PLACE))

    @property
    def all_beside(self) -> Expr:
        return self.before.at([ix.sub(self.before.size[0], 1)])

    def guarded(self, value: Expr, condition: Expr) -> Expr:
        """The value with no row read where it is not wanted."""
        tensors = (self.keys, *self.first, self.within, self.before, self.more)
        own = {t.body.arg for t in tensors}

        def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
            if node.op != "load" or node.arg in own:
                return None
            both = condition if len(src) == 1 else build.op("bit_and", src[1], condition)
            return load(node.arg, node.dtype, src[0], both)

        return rewrite(value, rule)


def _counted(ctx: Lowering, flags: Tensor) -> tuple[Tensor, Tensor]:
    """How many flags there are up to each place from the first of its piece on, and up to the end
    of each piece."""
    count = flags.size[0]
    pieces = ix.floordiv(ix.add(count, COUNTED - 1), COUNTED)
    within = ctx.buffer((ix.mul(pieces, COUNTED),), PLACE, flags.device)
    b, j = placeholders((pieces, ix.as_index(COUNTED)))
    at = ix.add(ix.mul(b, COUNTED), j)
    inside = build.op("lt", at, count)
    flag = build.where(inside, load(flags.body.arg, PLACE, at, inside), const(0, PLACE))
    ctx.nest((b, j), (), [Store(within.name, at, build.scan("sum", j, flag))])
    held = ctx.stored(within)
    before = ctx.buffer((pieces,), PLACE, flags.device)
    (b,) = placeholders((pieces,))
    total = held.at([ix.add(ix.mul(b, COUNTED), COUNTED - 1)])
    ctx.nest((b,) if b.op == "var" else (), (), [Store(
        before.name, b, build.scan("sum", b, total) if b.op == "var" else total)])  # fmt: skip
    return held, ctx.stored(before)
