"""Softmax in one pass: a loop that folds a largest value, and a later one that folds exponentials
relative to it, as one loop.

The pair kept is the largest value so far and the sum relative to it; what the later fold is really
relative to is known after the loop, and the sum is scaled then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.codegen.triton.emit import Writer
from tilewright.codegen.triton.folds import Fold
from tilewright.codegen.triton.shape import Axis, Shape
from tilewright.ir.expr import Expr, free_vars, walk
from tilewright.ir.program import Nest
from tilewright.schedule.segments import Segment

SIDE = 8  # values a thread takes together: neighbours of a row
ROWS = 4  # the same where memory runs across: rows apart of a column


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
    pairs: tuple[Pair, ...]


def joined(shape: Shape, local: frozenset[str]) -> dict[int, Joined]:
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


class OnlineFold(Fold):
    """The accumulators of a pair; it takes the place of the fold of the largest value."""

    def __init__(self, pair: Pair, fold: Fold, w: Writer, side: int, apart: bool) -> None:
        """`side`: how many values of a thread are taken together, and whether they lie `apart`."""
        super().__init__(pair.largest, fold.axis, w)
        self.pair, self.side, self.apart = pair, side, apart
        self.combine = "tri.softmax"
        self._top = self._total = ""
        self._extents = w.shape(self.support).strip("[]").split(", ")

    def begin(self) -> None:
        x, r = self._extents
        for suffix, start in (("", self.start), ("_s", "0.0")):
            self.w.line(f"{self.name}{suffix} = tl.full([{x}, {r} // {self.side}], {start}, "
                        "tl.float32)")  # fmt: skip

    def step(self) -> None:
        x, r = self._extents
        names = f"{self.name}, {self.name}_s"
        lengths = [f"{r} // {self.side}", str(self.side)]
        if self.apart:
            lengths.reverse()
        tile = self.w.let(f"tl.reshape({self._tile()}, [{x}, {', '.join(lengths)}])")
        self.w.line(f"{names} = tri.online({names}, {tile}, {1 if self.apart else 2})")

    def of_row(self) -> list[str]:
        """Of pieces that are held: the largest of them all first."""
        top = self._reduced(self._tile, "tri.maximum")
        base = self.w.let(f"tl.where(tl.abs({top}) == float('inf'), 0.0, {top})")
        return [top, self._reduced(lambda: f"tri.fast_exp({self._tile()} - {base})", "tri.add")]

    @property
    def cells(self) -> list[tuple[str, str]]:
        return [("tl.float32", self.start), ("tl.float32", "0.0")]

    def _with_ends(self, names: Sequence[str]) -> Sequence[str]:
        if self.ends is None:
            return names
        w = self.w
        with self.ends():
            tile = w.let(self._tile())
            most = w.let(f"tri.one(tl.reduce({tile}, 1, tri.maximum))")
        own, total = (w.let(f"tri.one(tl.reshape({t}, [{self._extents[0]}]))") for t in names)
        top = w.let(f"tri.maximum({own}, {most})")
        with self.ends():
            each = f"tri.relative({tile}, {self._inside}.to(tl.float32), {top})"
            more = w.let(f"tri.one(tl.reduce({each}, 1, tri.add))")
        return [top, w.let(f"tri.relative({own}, {total}, {top}) + {more}")]

    def left(self) -> list[str]:
        """The largest of all lanes, then the sums relative to it: two folds of one number take less
        than one of both, with exponentials at every step."""
        w = self.w
        top = w.let(f"tl.reduce({self.name}, 1, tri.maximum, keep_dims=True)")
        sums = f"tri.relative({self.name}, {self.name}_s, {top})"
        return [top, w.let(f"tl.reduce({sums}, 1, tri.add, keep_dims=True)")]

    def taken(self, names: Sequence[str]) -> None:
        self._top, self._total = names
        self.w.know(self.node, self._top)

    def finish(self) -> None:
        """The sum, relative to what the program has it relative to."""
        w = self.w
        base = w.operand(self.pair.base)
        w.know(self.pair.total, w.let(f"{self._total} * tri.exp({self._top} - {base})"))
