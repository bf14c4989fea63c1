"""Short rows put in order on a card, and the first few of a row.

An element and its place in the row are one integer, its key: keys in ascending order are the
elements in order, and no two keys are equal. So what comes first is the least key, what comes next
the least of those above it, and putting keys in order keeps equal elements in theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const
from tilewright.ir.program import Buffer, Store
from tilewright.lower.context import Fill, Lowering
from tilewright.lower.fold import axis_of, stride_of
from tilewright.lower.indexing import sure, table
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Tensor, from_indices, placeholders, pointwise

aten = torch.ops.aten

FEW = 8  # elements that are looked for one after the other
LONGEST_SEARCHED = 1 << 13  # elements of a row that a program holds while it looks for them
LONGEST_SORTED = 1 << 9
NARROW = (torch.float16, torch.bfloat16, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Keys:
    """How elements of a type and their places are packed."""

    dtype: torch.dtype
    descending: bool
    zeros_alike: bool  # of both signs; they cannot be told apart by their keys then

    @property
    def type(self) -> torch.dtype:
        return torch.int32 if self.dtype in NARROW else torch.int64

    @property
    def bits(self) -> int:
        """Of the place, and of the element."""
        return 4 * self.type.itemsize

    @property
    def none(self) -> Expr:
        """What is above the key of every element."""
        return const(torch.iinfo(self.type).max, self.type)

    def of(self, x: Expr, place: Expr) -> Expr:
        rank = self._rank(x)
        rank = build.op("bit_not", rank) if self.descending else rank
        high = build.op("shl", build.cast(rank, self.type), const(self.bits, self.type))
        return build.op("bit_or", high, build.cast(place, self.type))

    def place(self, key: Expr) -> Expr:
        low = build.op("bit_and", key, const((1 << self.bits) - 1, self.type))
        return build.cast(low, torch.int64)

    def element(self, key: Expr) -> Expr:
        rank = build.cast(build.op("shr", key, const(self.bits, self.type)), torch.int32)
        rank = build.op("bit_not", rank) if self.descending else rank
        if not self.dtype.is_floating_point:
            return build.cast(rank, self.dtype)
        bits = self._turned(rank)
        return build.op("bitcast", build.cast(bits, self._bits_type), arg=self.dtype)

    @property
    def _bits_type(self) -> torch.dtype:
        return torch.int16 if self.dtype.itemsize == 2 else torch.int32

    def _rank(self, x: Expr) -> Expr:
        """An integer in the order of the elements; NaN is above all."""
        if not self.dtype.is_floating_point:
            return build.cast(x, torch.int32)
        bits = build.cast(build.op("bitcast", x, arg=self._bits_type), torch.int32)
        rank = self._turned(bits)
        if self.zeros_alike:
            negative = build.op("eq", rank, const(-1, torch.int32))
            rank = build.where(negative, const(0, torch.int32), rank)
        most = const(torch.iinfo(self._bits_type).max, torch.int32)
        return build.where(build.op("isnan", build.cast(x, torch.float32)), most, rank)

    def _turned(self, bits: Expr) -> Expr:
        """Negative floats count downwards from zero; done twice, nothing has changed."""
        sign = build.op("shr", bits, const(31, torch.int32))
        rest = const(torch.iinfo(self._bits_type).max, torch.int32)
        return build.op("bit_xor", bits, build.op("bit_and", sign, rest))


def on_card(t: Tensor) -> bool:
    return t.device.type == "cuda"


def _keys(t: Tensor, dim: int, descending: bool, sorts: bool) -> Keys:
    longest = LONGEST_SORTED if sorts else LONGEST_SEARCHED
    size = ix.value_of(t.size[dim]) if t.rank else 1
    if not on_card(t):
        raise Unsupported("rows are put in order in kernels of a card only")
    if t.dtype not in (*NARROW, torch.float32, torch.int32):
        raise Unsupported(f"{t.dtype} and a place do not fit one integer")
    if size is None or not 1 < size <= longest:
        raise Unsupported(f"rows of {size or 'unknown length'} are not held by a program")
    return Keys(t.dtype, descending, zeros_alike=sorts)


def _tensor(keys: Keys, t: Tensor, dim: int) -> Tensor:
    place = from_indices(t.size, t.device, lambda *at: at[dim])
    return pointwise(keys.of, t, place)


def _results(ctx: Lowering, t: Tensor, dim: int, count: Expr) -> tuple[Buffer, Buffer]:
    """Of so many elements of each row, and of their places."""
    size = tuple(count if d == dim else n for d, n in enumerate(t.size))
    return (ctx.buffer(size, t.dtype, t.device, stride_of(ctx, 0)),
            ctx.buffer(size, torch.int64, t.device, stride_of(ctx, 1)))  # fmt: skip


def _in_order(ctx: Lowering, t: Tensor, dim: int, descending: bool, count: Expr
              ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The first elements of each row in order, and their places."""
    keys = _keys(t, dim, descending, sorts=True)
    t = table(ctx, t)
    loops = placeholders(t.size)
    key = build.scan("sort", loops[dim], _tensor(keys, t, dim).body)
    place = keys.place(key)
    value = t.at([sure(place, t.size[dim]) if d == dim else v for d, v in enumerate(loops)])
    made = _results(ctx, t, dim, count)
    inside = None if count is t.size[dim] else build.op("lt", loops[dim], count)
    ctx.nest(loops, (), [Store(b.name, ix.linearize(loops, b.stride), e, "set", inside)
                         for b, e in zip(made, (value, place), strict=True)])  # fmt: skip
    values, places = (ctx.stored(b) for b in made)
    return values, places


@lowers(aten.sort.default, aten.sort.stable)
def _sort(ctx: Lowering, t: Tensor, dim: int = -1, descending: bool = False, *,
          stable: bool | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    dim = axis_of(t, dim)
    return _in_order(ctx, t, dim, descending, t.size[dim] if t.rank else ix.ONE)


@lowers(aten.topk.default)
def _topk(ctx: Lowering, t: Tensor, k: int | Expr, dim: int = -1, largest: bool = True,
          sorted: bool = True) -> tuple[Tensor, Tensor]:  # fmt: skip
    dim = axis_of(t, dim)
    if t.dtype == torch.bool:
        raise Unsupported("eager looks for the first of numbers only")
    if not isinstance(k, int) or k < 1:
        raise Unsupported("as many elements of a row as are only known when it runs")
    if k > FEW:
        return _in_order(ctx, t, dim, largest, ix.as_index(k))
    keys = _keys(t, dim, largest, sorts=False)
    all_keys = _tensor(keys, t, dim)
    values, places = _results(ctx, t, dim, ix.as_index(k))
    left = all_keys
    for j in range(k):
        (first,) = ctx.reduce("min", left, [dim], True, Fill(keys.type))
        loops = placeholders(first.size)
        at = [const(j) if d == dim else v for d, v in enumerate(loops)]
        ctx.nest(loops, (), [
            Store(values.name, ix.linearize(at, values.stride), keys.element(first.body)),
            Store(places.name, ix.linearize(at, places.stride), keys.place(first.body)),
        ])  # fmt: skip
        left = pointwise(lambda key, last: build.where(build.op("gt", key, last), key, keys.none),
                         all_keys, first)  # fmt: skip
    return ctx.stored(values), ctx.stored(places)
