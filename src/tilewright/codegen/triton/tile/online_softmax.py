"""Softmax in one pass: a loop that reduces a largest value, and a later one that reduces
exponentials relative to it, as one loop.

The pair kept is the largest value so far and the sum relative to it; what the later fold is really
relative to is known after the loop, and the sum is scaled then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.codegen.triton.tile.lower import Writer
from tilewright.codegen.triton.tile.ops import cast
from tilewright.codegen.triton.tile.reduce import Reduction
from tilewright.codegen.triton.tile.weighted_sums import Matching, Terms, Weighted
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, substitute, walk
from tilewright.ir.program import Nest
from tilewright.schedule.nests.segments import Segment


@dataclass(frozen=True)
class Pair:
    """`total` sums exponentials of what `largest` folds, less `base`."""

    total: Expr
    largest: Expr
    base: Expr


@dataclass(frozen=True)
class Joined:
    """A segment whose folds run in the loop of segment `first`."""

    first: int
    pairs: tuple[Pair | Weighted, ...]


def joined(shape: Shape, local: frozenset[str], weighted: bool = True) -> dict[int, Joined]:
    """Which segments need no loop of their own."""
    found: dict[int, Joined] = {}
    for k, (segment, axis) in enumerate(shape.segments):
        if axis is None:
            continue
        if any(not m.writes <= local for m in segment.members if not m.reduce):
            continue
        sums = _folds([m for m in segment.members if m.reduce])
        for first in range(k):
            pairs = [_pair(shape, n, first, axis) for n in sums]
            if weighted and sums and not any(pairs):
                pairs = _weighted(shape, sums, first, axis)
            if shape.segments[first][1] is axis and first not in found and pairs and all(pairs):
                found[k] = Joined(first, tuple(p for p in pairs if p is not None))
                break
    return found


def passes(shape: Shape, local: frozenset[str]) -> list[Segment]:
    """The segments that have a loop of their own where rows are walked."""
    without = joined(shape, local)
    return [s for k, (s, axis) in enumerate(shape.segments)
            if axis is not None and k not in without]  # fmt: skip


def _folds(members: Sequence[Nest]) -> list[Expr]:
    nodes = (n for m in members for n in walk(*m.exprs) if n.op == "reduce")
    return list(dict.fromkeys(nodes))


def _made(shape: Shape, e: Expr) -> Expr:
    """What a load of a row of this kernel stands for."""
    if e.op != "load" or len(e.src) != 1:
        return e
    stores = (s for m in shape.members if not m.reduce for s in m.stores if s.buffer == e.arg)
    return next((s.value for s in stores
                 if s.index is e.src[0] and s.value.dtype == e.dtype), e)  # fmt: skip


def _pair(shape: Shape, node: Expr, first: int, axis: Axis) -> Pair | None:
    power = _made(shape, node.src[0])
    if node.arg.kind != "sum" or power.op != "exp" or power.dtype != torch.float32:
        return None
    away = power.src[0]
    if away.op != "sub" or axis.var in free_vars(away.src[1]):
        return None
    for other in _folds([m for m in shape.segments[first][0].members if m.reduce]):
        if other.arg.kind == "max" and other.src[0] is away.src[0]:
            return Pair(node, other, away.src[1])
    return None


def _weighted(shape: Shape, sums: Sequence[Expr], first: int, axis: Axis
              ) -> list[Weighted | None]:  # fmt: skip
    """One of each largest value, of rows that memory runs along."""
    if shape.across:
        return []
    tops = [n for n in _folds([m for m in shape.segments[first][0].members if m.reduce])
            if n.arg.kind == "max"]  # fmt: skip
    kept = shape.written
    matching = Matching(tops, lambda e: _made(shape, e), kept, axis.var)
    found = [matching.weighted(n) for n in sums]
    return found if len({w.largest for w in found if w}) == len(found) else []


class OnlineReduction(Reduction):
    """The accumulators of a pair; it takes the place of the reduction of the largest value."""

    def __init__(self, pair: Pair | Weighted, fold: Reduction, w: Writer, side: int, apart: bool
                 ) -> None:  # fmt: skip
        """`side`: how many values of a thread are taken together, and whether they lie `apart`."""
        super().__init__(pair.largest, fold.axis, w)
        self.side, self.apart = side, apart
        self.combine = "tri.softmax"
        self.bases: dict[Expr, Expr] = {}  # of sums, what they are relative to
        self.weighted: Weighted | None = None
        self.join(pair)
        self._top = self._total = self._product = self._middle = ""
        self._extents = w.extents(self.support)

    def join(self, pair: Pair | Weighted) -> None:
        if isinstance(pair, Weighted):
            self.weighted, self.combine = pair, "tri_rows.softmax_with"
        else:
            self.bases[pair.total] = pair.base

    @property
    def _names(self) -> list[str]:
        return [self.name, f"{self.name}_s", *([f"{self.name}_w"] if self.weighted else [])]

    def begin(self) -> None:
        """Weights are taken relative to the first of them: of a row that is far from another, as a
        whole, nothing else would be left of the difference."""
        x, r = self._extents
        if self.weighted and self.axis:
            place = {self.axis.var: ix.ZERO}
            first = self._sum(tuple((k, substitute(e, place)) for k, e in self.weighted.weight))
            self._middle = self.w.let(f"tri_rows.if_finite({first})")
        for name in self._names:
            start = self.start if name == self.name else "0.0"
            self.w.line(f"{name} = tl.full([{x}, {r} // {self.side}], {start}, tl.float32)")

    def step(self) -> None:
        x, r = self._extents
        names = ", ".join(self._names)
        lengths = [f"{r} // {self.side}", str(self.side)]
        if self.apart:
            lengths.reverse()
        tiles = [self._tile(), *([self._weights()] if self.weighted else [])]
        seen = [self.w.let(f"tl.reshape({t}, [{x}, {', '.join(lengths)}])") for t in tiles]
        how = "tri_rows.online_with" if self.weighted else "tri.online"
        self.w.line(f"{names} = {how}({names}, {', '.join(seen)}, {1 if self.apart else 2})")

    def _weights(self) -> str:
        """Nothing outside the row, where a power of nothing would be no number times this."""
        assert self.weighted is not None
        text = f"({self._sum(self.weighted.weight)} - {self._middle})"
        wide = f"tl.broadcast_to({text}, {self.w.shape(self.support)})"
        return f"tl.where({self._inside}, {wide}, 0.0)" if self.masked else wide

    def _sum(self, terms: Terms, start: str = "0.0") -> str:
        signed = (("-" if less else "+", cast(self.w.operand(e), e.dtype, torch.float32))
                  for less, e in terms)  # fmt: skip
        return f"({' '.join((start, *(t for pair in signed for t in pair)))})"

    def of_row(self) -> list[str]:
        """Of pieces that are held: the largest of them all first."""
        top = self._reduced(self._tile, "tri.maximum")
        base = self.w.let(f"tl.where(tl.abs({top}) == float('inf'), 0.0, {top})")
        return [top, self._reduced(lambda: f"tri.fast_exp({self._tile()} - {base})", "tri.add")]

    @property
    def cells(self) -> list[tuple[str, str]]:
        return [("tl.float32", "0.0" if k else self.start) for k in range(len(self._names))]

    def _with_ends(self, names: Sequence[str]) -> Sequence[str]:
        if self.ends is None:
            return names
        w = self.w
        with self.ends():
            tile = w.let(self._tile())
            most = w.let(f"tri.one(tl.reduce({tile}, 1, tri.maximum))")
        own, *totals = (w.let(f"tri.one(tl.reshape({t}, [{self._extents[0]}]))") for t in names)
        top = w.let(f"tri.maximum({own}, {most})")
        with self.ends():
            each = f"tri.relative({tile}, {self._inside}.to(tl.float32), {top})"
            more = [w.let(f"tri.one(tl.reduce({each}, 1, tri.add))")]
            if self.weighted:
                each = f"tri.relative({tile}, {self._weights()}, {top})"
                more.append(w.let(f"tri.one(tl.reduce({each}, 1, tri.add))"))
        return [top, *(w.let(f"tri.relative({own}, {t}, {top}) + {m}")
                       for t, m in zip(totals, more, strict=True))]  # fmt: skip

    def left(self) -> list[str]:
        """The largest of all lanes, then the sums relative to it: two reductions of one number
        take less than one of both, with exponentials at every step."""
        w = self.w
        top = w.let(f"tl.reduce({self.name}, 1, tri.maximum, keep_dims=True)")
        sums = (f"tri.relative({self.name}, {name}, {top})" for name in self._names[1:])
        return [top, *(w.let(f"tl.reduce({s}, 1, tri.add, keep_dims=True)") for s in sums)]

    def taken(self, names: Sequence[str]) -> None:
        self._top, self._total, *products = names
        self._product = next(iter(products), "")
        self.w.know(self.node, self._top)

    def finish(self, total: Expr) -> None:
        """A sum, relative to what the program has it relative to."""
        w = self.w
        if total in self.bases:
            base = w.operand(self.bases[total])
            w.know(total, w.let(f"{self._total} * tri.exp({self._top} - {base})"))
            return
        assert self.weighted is not None
        power = f"tri.exp({self._sum(self.weighted.base, self._top)})"
        more = self._sum(self.weighted.more, self._middle)
        whole = w.let(f"({self._product} + {more} * {self._total}) * {power}")
        for e in self.weighted.divisors:
            whole = w.let(f"tri.div({whole}, {w.operand(e)})")
        w.know(total, whole)
