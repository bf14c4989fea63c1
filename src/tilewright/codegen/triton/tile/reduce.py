"""Reductions and scans: of a whole row in one tile, or block by block with accumulators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from tilewright import rules
from tilewright.codegen.triton.plan.tiling import Axis
from tilewright.codegen.triton.tile.lower import NOWHERE, Writer
from tilewright.codegen.triton.tile.ops import COMBINE, RUNNING, TYPE, cast, neutral
from tilewright.ir import index as ix
from tilewright.ir.build import part, reduce
from tilewright.ir.expr import INDEX, Expr, substitute, walk
from tilewright.ir.program import Nest

if TYPE_CHECKING:
    from tilewright.codegen.triton.strategies.chunked import Chunked

_NO_PLACE = {"tl.int32": str(2**31 - 1), "tl.int64": str(2**63 - 1)}


def reduced_type(dtype: torch.dtype) -> torch.dtype:
    """The type a reduction of such values runs in: small ones have no instructions of their own."""
    if dtype == torch.bool or (not dtype.is_floating_point and dtype.itemsize < 4):
        return torch.int32
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _is_truth(e: Expr) -> bool:
    """Whether this is one or zero, as something holds or not."""
    return e.op == "cast" and e.src[0].dtype == torch.bool and e.dtype == torch.int64


@dataclass(frozen=True)
class ThreadLanes:
    """How values of a block that one thread has are taken together: the lengths of what the row
    part of the block is seen as, and which of both is theirs."""

    lengths: tuple[str, str]
    own: int  # 0 or 1

    @property
    def lanes(self) -> str:
        return self.lengths[1 - self.own]

    @property
    def count(self) -> str:
        return self.lengths[self.own]


def _vanishes(fold: Reduction | Scan, e: Expr) -> bool:
    """Whether a value is neutral outside the row as it is: what is loaded there is zero. To choose
    for each element takes registers (sum of columns of bfloat16: 68, 52 without)."""
    if fold.start not in ("0", "0.0"):
        return False
    if e.op == "load":
        return fold.w.is_blank(fold.w.operand(e)) and fold.axis in fold.w.support(e)
    known = e.op in ("cast", "mul", "add", "sub", "neg")
    return known and all(_vanishes(fold, s) for s in e.src)


class Reduction:
    """One `reduce` node: its accumulators' names, start values and steps.

    Without an axis it reduces over serial loops: every point of the tile has its own
    accumulator.
    """

    def __init__(self, node: Expr, axis: Axis | None, w: Writer) -> None:
        self.node, self.axis, self.w = node, axis, w
        self.kind: str = node.arg.kind
        self.value = node.src[0]
        self.dtype = reduced_type(self.value.dtype)
        self.combine = COMBINE[self.kind]
        self.name = w.fresh("acc")
        self.support = w.covered(w.support(*node.src) | (NOWHERE if axis is None else {axis}))
        self.start = neutral(self.kind, torch.int32 if self.value.dtype == torch.bool
                             else self.dtype)  # fmt: skip
        # how values are reduced before they meet the accumulators, if these shall be few
        self.beside: ThreadLanes | None = None
        # what has the pieces of rows, if these are in several
        self.pieces: Chunked | None = None
        # where the ends of rows are, if these are a tile of their own
        self.ends: Callable[[], AbstractContextManager[None]] | None = None

    def _tile(self) -> str:
        """The values of this block, neutral outside the row."""
        text = self._values()
        return f"tl.where({self._inside}, {text}, {self.start})" if self.masked else text

    def _values(self) -> str:
        text = cast(self.w.operand(self.value), self.value.dtype, self.dtype)
        if self.w.support(self.value) != self.support:
            text = f"tl.broadcast_to({text}, {self.w.shape(self.support)})"
        return text

    @property
    def masked(self) -> bool:
        """Whether lanes of the block at hand may be outside the row."""
        return self.axis in self.w.masked

    @property
    def _inside(self) -> str:
        return "" if self.axis is None else self.w.inside(self.axis)

    def _finish(self, folded: str) -> None:
        result = cast(folded, self.dtype, self.node.dtype)
        self.w.know(self.node, folded if result == folded else self.w.let(result))

    def whole(self) -> None:
        """The row is one block, or in pieces; 32 bits do to count how often something holds in
        it."""
        if self.kind == "sum" and _is_truth(self.value):
            self.value, self.dtype = self.value.src[0], torch.int32
        self.taken(self.of_row())

    def of_row(self) -> list[str]:
        """What is left of such a row."""
        return [self._reduced(self._tile, self.combine)]

    def _reduced(self, tile: Callable[[], str], combine: str) -> str:
        """A tile of the row as one number, and with it a tile of its ends if there is one."""
        w, own = self.w, tile
        if self.pieces is not None:
            tile = partial(self.pieces.joined, tile, combine)
        elif self.ends is None:
            dim = 1 if self.axis is None else self.axis.dim
            return w.let(f"tl.reduce({w.let(tile())}, {dim}, {combine}, keep_dims=True)")
        made = w.let(f"tri.one(tl.reduce({tile()}, 1, {combine}))")
        if self.ends is not None:
            edge = ""
            for ends in [self.ends] if self.pieces is None else self.pieces.ends():
                with ends():
                    one = w.let(own())
                    edge = w.let(f"{combine}({edge}, {one})") if edge else one
            more = w.let(f"tri.one(tl.reduce({edge}, 1, {combine}))")
            made = w.let(f"{combine}({made}, {more})")
        if self.pieces is not None:
            self.pieces.renew(made)
        return made

    def begin(self) -> None:
        shape = self.w.shape(self.support)
        if self.beside is not None:
            shape = f"[{self._columns}, {self.beside.lanes}]"
        self.w.line(f"{self.name} = tl.full({shape}, {self.start}, {TYPE[self.dtype]})")

    def step(self) -> None:
        known = self.axis is not None and self.axis.start is None
        text = self._values() if known and _vanishes(self, self.value) else self._tile()
        if self.beside is not None:
            seen = f"tl.reshape({text}, [{self._columns}, {', '.join(self.beside.lengths)}])"
            text = f"tl.reduce({seen}, {1 + self.beside.own}, {self.combine})"
        self.w.line(f"{self.name} = {self.combine}({self.name}, {text})")

    @property
    def _columns(self) -> str:
        return self.w.extents(self.support)[0]

    def end(self) -> None:
        if self.axis is None:
            self._finish(self.name)
        else:
            self.taken(self.left_of_row())

    def _with_ends(self, names: Sequence[str]) -> Sequence[str]:
        """What is left of a row that was walked, and of its ends."""
        if self.ends is None:
            return names
        with self.ends():
            more = self.again([self.w.let(t) for t in self._tiles()], keep="")
        made = [self.w.fresh() for _ in names]
        rows = self.w.extents(self.support)[0]
        both = [f"tri.one({t})" for t in (*(f"tl.reshape({t}, [{rows}])" for t in names), *more)]
        self.w.line(f"{', '.join(made)} = {self.combine}({', '.join(both)})")
        return made

    def _tiles(self) -> list[str]:
        """Of every lane, what would be left of it alone."""
        return [self._tile()]

    # what a program leaves of a row that it shares with others

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Types and neutral values of what is left."""
        return [(TYPE[self.dtype], self.start)]

    def left_of_row(self) -> Sequence[str]:
        return self._with_ends(self.left()) if self.pieces is None else self.of_row()

    def left(self) -> list[str]:
        """All lanes as one."""
        return [self.w.let(f"tl.reduce({self.name}, 1, {self.combine}, keep_dims=True)")]

    def again(self, tiles: Sequence[str], axis: int = 1, keep: str = ", keep_dims=True"
              ) -> list[str]:  # fmt: skip
        names = [self.w.fresh() for _ in tiles]
        source = f"({', '.join(tiles)})" if len(tiles) > 1 else tiles[0]
        self.w.line(f"{', '.join(names)} = tl.reduce({source}, {axis}, {self.combine}{keep})")
        return names

    def gathered(self, tiles: Sequence[str]) -> list[str]:
        """What all programs left, one in each lane, as one. Numbers are spread from scalars: a tile
        of one is laid out for another tile than it will meet, and brought there by the thousand."""
        found = self.again(tiles, 0, "")
        if self.pieces is not None:
            return found
        return [self.w.let(f"tl.broadcast_to({name}, [1, 1])") for name in found]

    def taken(self, names: Sequence[str]) -> None:
        """The fold is done: this is what became of it."""
        self._finish(names[0])


class ArgReduction(Reduction):
    """The position of an extreme."""

    def _places(self, kept: bool = False) -> str:
        """`kept`: what is outside the row never takes the place of what is inside."""
        w = self.w
        place = self.node.src[1]
        text = f"tl.broadcast_to({w.index(place)}, {w.shape(self.support)})"
        if self.masked and not kept:
            text = f"tl.where({self._inside}, {text}, {_NO_PLACE[w.index_type]})"
        return text

    @property
    def cells(self) -> list[tuple[str, str]]:
        index = self.w.index_type
        return [(TYPE[self.dtype], self.start), (index, _NO_PLACE[index])]

    def left(self) -> list[str]:
        """The extreme, then the first place that has it: two reductions of one number take less
        than one of both."""
        top = self.w.let(f"tl.reduce({self.name}, 1, {self._extreme}, keep_dims=True)")
        there = self._having(top, self.name, f"{self.name}_at")
        at = self.w.let(f"tl.reduce({there}, 1, tri.minimum, keep_dims=True)")
        return [top, self._or_first(at) if self._in_order() else at]

    def _or_first(self, at: str) -> str:
        """The first, where all of a row is as small as what lanes begin with: that has no place."""
        w, place, axis = self.w, self.node.src[1], self.axis
        assert axis is not None
        start, slope = substitute(place, {axis.var: ix.ZERO}), ix.coefficient(place, axis.var)
        first = f"{w.index(start)} + {w.index(slope or ix.ONE)} * {axis.name}first"
        return w.let(f"tl.where({at} == {_NO_PLACE[w.index_type]}, {first}, {at})")

    @property
    def _extreme(self) -> str:
        return COMBINE[self.kind.removeprefix("arg")]

    def _having(self, top: str, values: str, places: str) -> str:
        return f"tri.having({top}, {values}, {places}, {_NO_PLACE[self.w.index_type]})"

    def _tiles(self) -> list[str]:
        return [self._tile(), self._places()]

    def taken(self, names: Sequence[str]) -> None:
        self.w.know(self.node, self.w.let(f"{names[1]}.to(tl.int64)"))

    def of_row(self) -> list[str]:
        self.top = top = self._reduced(self._tile, self._extreme)
        return [top, self._reduced(
            lambda: self._having(top, self._tile(), self._places()), "tri.minimum")]  # fmt: skip

    def _in_order(self) -> bool:
        """Whether later rounds of the loop have later places: the first of equals is kept then."""
        if self.axis is None or self.axis.start is not None:
            return False
        slope = ix.coefficient(self.node.src[1], self.axis.var)
        return slope is not None and ix.bounds(slope)[0] > 0

    def begin(self) -> None:
        super().begin()
        w = self.w
        none = _NO_PLACE[w.index_type]
        w.line(f"{self.name}_at = tl.full({w.shape(self.support)}, {none}, {w.index_type})")

    def step(self) -> None:
        at, kept = f"{self.name}_at", self._in_order()
        combine = self.combine.replace("tri.", "tri.first_") if kept else self.combine
        self.w.line(f"{self.name}, {at} = {combine}({self.name}, {at}, {self._tile()}, "
                    f"{self._places(kept)})")  # fmt: skip

    def end(self) -> None:
        if self.axis is None:
            self.taken([self.name, f"{self.name}_at"])
        else:
            super().end()


class Welford(Reduction):
    """Mean and squared deviations: in two steps of a whole row, else a running pair for several
    values of a block (H200: var of 256 rows of 512 columns 65 us, 81 us with a pair for each)."""

    def __init__(self, node: Expr, axis: Axis | None, w: Writer) -> None:
        super().__init__(node, axis, w)
        self.start = "0.0"
        self.together = ThreadLanes((w.extents(self.support)[-1], "1"), 1)

    def _give(self, mean: str, m2: str) -> None:
        self.w.know(part(self.node, 0), mean)
        self.w.know(part(self.node, 1), m2)

    def of_row(self) -> list[str]:
        w, count = self.w, self._count()
        mean = w.let(f"{self._total() or self._reduced(self._tile, 'tri.add')} / {count}")

        def squares() -> str:
            away = w.let(f"{self._tile()} - {mean}")
            if self.masked:
                away = w.let(f"tl.where({self._inside}, {away}, 0.0)")
            return f"{away} * {away}"

        return [mean, self._reduced(squares, "tri.add"), count]

    def _total(self) -> str | None:
        """The sum of the row, where it was wanted too."""
        whole = self.pieces is None and self.ends is None
        return self.w.known(reduce("sum", self.value, dtype=self.dtype)) if whole else None

    def _tiles(self) -> list[str]:
        kind = TYPE[self.dtype]
        none = f"tl.full({self.w.shape(self.support)}, 0.0, {kind})"
        return [self._tile(), none, f"{self._inside}.to({kind})"]

    def _count(self) -> str:
        """How many values a row has."""
        w = self.w
        assert self.axis is not None
        if self.pieces is not None and self.pieces.own:
            return f"({self.pieces.own}).to({TYPE[self.dtype]})"
        if self.axis in w.ends and self.axis.start is None:
            tile = f"tl.broadcast_to({self._inside}, {w.shape(self.support)})"
            return f"tl.reduce({tile}.to({TYPE[self.dtype]}), 1, tri.add, keep_dims=True)"
        count = w.spread(w.index(self.axis.extent), NOWHERE, NOWHERE)
        if self.pieces is not None and self.pieces.several > 1:
            count = f"({count}) * {self.pieces.several}"
        return f"({count}).to({TYPE[self.dtype]})"

    def begin(self) -> None:
        w = self.w
        shape = f"[{self._columns}, {self.together.lanes}]" if self.counted else w.shape(
            self.support)  # fmt: skip
        for name in self._names[: 2 if self.counted and not self._leans else 3]:
            w.line(f"{name} = tl.full({shape}, 0.0, {TYPE[self.dtype]})")
        if self.counted:
            w.line(f"{self.name}_k = tl.full({w.shape(NOWHERE)}, 0.0, {TYPE[self.dtype]})")

    @property
    def _names(self) -> list[str]:
        return [self.name, f"{self.name}_m2", f"{self.name}_n"]

    @property
    def counted(self) -> bool:
        """Whether all lanes inside the row have as many values, those of the rounds so far: one
        reciprocal does for all of them, where divisions would take longer than memory."""
        return self._leans or (self.axis is not None and self.axis not in self.w.ends)

    @property
    def _leans(self) -> bool:
        """Whether how many values a lane has beyond whole blocks depends on the row: they are
        counted where they are, which lays them out as the values."""
        return self.axis is not None and self.axis.start is not None

    def step(self) -> None:
        w = self.w
        names = ", ".join(self._names)
        if not self.counted:
            one = f"{self._inside}.to({TYPE[self.dtype]})" if self.masked else "1.0"
            w.line(f"{names} = tri.welford({names}, {self._tile()}, 0.0, {one})")
            return
        both = ", ".join(self._names[:2])
        tile, how = self._seen(self._columns, self._tile()), 1 + self.together.own
        if self.masked:
            inside = self._seen(self._columns if self._leans else "1", self._inside)
            made = f"several_inside({both}, {tile}, {inside}"
            if self._leans:
                count = f"{inside}.to({TYPE[self.dtype]})"
                w.line(f"{self.name}_n += tl.reduce({count}, {how}, tri.add)")
        else:
            made = f"several_more({both}, {tile}"
        w.line(f"{both} = tri.{made}, {self.name}_k, {how})")
        w.line(f"{self.name}_k += {self.together.count}")

    def _seen(self, columns: str, tile: str) -> str:
        """A block with the values that are taken together along an axis of their own."""
        return f"tl.reshape({tile}, [{columns}, {', '.join(self.together.lengths)}])"

    def end(self) -> None:
        if self.axis is None:
            self.taken(self._names)
        else:
            self.taken(self._with_ends(self._lanes_joined("tri.moments")))

    @property
    def cells(self) -> list[tuple[str, str]]:
        return [(TYPE[self.dtype], "0.0")] * 3

    def left(self) -> list[str]:
        """Two by two: sums over the lanes of a part of a row take Triton 3.6 minutes to compile."""
        return self._lanes_joined("")

    def _lanes_joined(self, by: str) -> list[str]:
        """How many rounds a lane was inside for is known after them."""
        made = [self.w.fresh() for _ in self._names]
        results, names = ", ".join(made), ", ".join(self._names)
        if by and self.counted and not self.masked:
            both = ", ".join(self._names[:2])
            self.w.line(f"{results} = tri.even_moments({both}, {self.name}_k)")
            return made
        if self._leans:
            assert self.axis is not None
            whole = f"({self.axis.name}full * ({self.together.count}))"
            self.w.line(f"{self._names[2]} += {whole}.to({TYPE[self.dtype]})")
        elif self.counted:
            assert self.axis is not None
            w, a, count = self.w, self.axis, self._names[2]
            own, lanes = self.together.count, self.together.lanes
            lane = f"tl.arange(0, {lanes})[None, :]"
            left = f"tl.maximum({a.name}last - {a.name}first, 0)"
            rest = f"{left} % {a.block}"
            last = f"{rest} - {lane} * ({own})" if self.together.own else (
                f"({rest} - {lane} + {lanes} - 1) // ({lanes})")  # fmt: skip
            some = f"tl.minimum(tl.maximum({last}, 0), {own})"
            w.line(f"{count} = ({left} // {a.block} * ({own}) + {some}).to({TYPE[self.dtype]})")
        two_by_two = f"tl.reduce(({names}), 1, tri.welford, keep_dims=True)"
        self.w.line(f"{results} = {f'{by}({names})' if by else two_by_two}")
        return made

    def taken(self, names: Sequence[str]) -> None:
        self._give(names[0], names[1])


class Scan:
    """One `scan` node; the carry is what all blocks before this one gave, or, if it runs back, all
    behind it. `placed` says that the places of extremes are scanned with them."""

    def __init__(self, node: Expr, axis: Axis, w: Writer, back: bool = False,
                 placed: bool = True) -> None:  # fmt: skip
        self.node, self.axis, self.w, self.back = node, axis, w, back
        self.kind: str = node.arg.kind
        self.extremes = self.kind in ("min", "max")
        self.places = self.extremes and placed
        self.logs = self.kind == "logsumexp"  # of sums beside the largest of what they are of
        self.dtype = reduced_type(node.src[0].dtype)
        self.combine = RUNNING[self.kind]
        if self.extremes and not placed:
            self.combine = f"tri.later_of_{self.kind}"
        self.support = w.covered(w.support(*node.src) | {axis})
        kind = {"logsumexp": "max", "sort": "min"}.get(self.kind, self.kind)
        self.start = neutral(kind, self.dtype)
        name = w.fresh("carry")
        self.carry = [name, f"{name}_at"][: len(self.kinds)]

    def _tiles(self) -> list[str]:
        w = self.w
        text = cast(w.operand(self.node.src[0]), self.node.src[0].dtype, self.dtype)
        tiles = [f"tl.broadcast_to({text}, {w.shape(self.support)})"]
        if self.axis in w.masked and not _vanishes(self, self.node.src[0]):
            tiles[0] = f"tl.where({w.inside(self.axis)}, {tiles[0]}, {self.start})"
        if self.places:
            tiles.append(f"tl.broadcast_to({w.index(self.node.src[1])}, {w.shape(self.support)})")
        elif self.logs:
            tiles.append(f"tl.full({w.shape(self.support)}, 1.0, {TYPE[self.dtype]})")
        return [w.let(t) for t in tiles]

    def begin(self) -> None:
        w = self.w
        across = w.shape(self.support - {self.axis})
        for name, (kind, none) in zip(self.carry, self.kinds, strict=True):
            w.line(f"{name} = tl.full({across}, {none}, {kind})")

    def step(self, carried: bool) -> None:
        w = self.w
        tiles = self._tiles()
        names = self._scanned(tiles, self.carry if carried else ())
        if carried:
            w.line(f"{', '.join(self.carry)} = {self._last(tiles, names)}")
        self._give(names)

    def _scanned(self, tiles: Sequence[str], before: Sequence[str] = ()) -> list[str]:
        """After what was before."""
        order = ", reverse=True" if self.back else ""
        names = self._along(tiles, "associative_scan", self.combine + order)
        if before:
            made = ", ".join(names)
            self.w.line(f"{made} = {self.combine}({', '.join(before)}, {made})")
        return names

    def _last(self, tiles: Sequence[str], names: Sequence[str]) -> str:
        """What is carried on."""
        return f"{self.combine}({', '.join((*self.carry, *self._total(tiles)))})"

    def _whole(self, tiles: Sequence[str]) -> list[str]:
        """What a block reduces to."""
        return self._total(tiles)

    @property
    def _fold(self) -> str:
        """Of values in any order."""
        return self.combine.replace("later", "last")

    def _total(self, tiles: Sequence[str]) -> list[str]:
        return self._along(tiles, "reduce", f"{self._fold}, keep_dims=True")

    def _along(self, tiles: Sequence[str], how: str, combine: str) -> list[str]:
        names = [self.w.fresh() for _ in tiles]
        source = f"({', '.join(tiles)})" if len(tiles) > 1 else tiles[0]
        self.w.line(f"{', '.join(names)} = tl.{how}({source}, {self.axis.dim}, {combine})")
        return names

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """Types and neutral values of what is carried."""
        beside = [(self.w.index_type, "0")] if self.places else [(TYPE[self.dtype], "0.0")]
        return [(TYPE[self.dtype], self.start), *(beside if self.places or self.logs else [])]

    def folded(self, walk: Callable[[Callable[[], None]], None]) -> list[str]:
        """What all blocks of a walk fold to."""
        w, names = self.w, [self.w.fresh("acc") for _ in self.kinds]
        for name, (kind, none) in zip(names, self.kinds, strict=True):
            w.line(f"{name} = tl.full({w.shape(self.support)}, {none}, {kind})")
        made = ", ".join(names)

        def round_() -> None:
            w.line(f"{made} = {self._fold}({made}, {', '.join(self._placed())})")

        walk(round_)
        return self._total(names)

    def after(self, tiles: Sequence[str]) -> None:
        """Begin with what was before: one of it in each lane."""
        source = f"({', '.join(tiles)})" if len(tiles) > 1 else tiles[0]
        names = [self.w.fresh() for _ in tiles]
        self.w.line(f"{', '.join(names)} = tl.reduce({source}, 0, {self._fold})")
        before = ", ".join(f"tl.broadcast_to({name}, [1, 1])" for name in names)
        carry = ", ".join(self.carry)
        self.w.line(f"{carry} = {self.combine}({carry}, {before})")

    def with_ends(self, ends: Callable[[], AbstractContextManager[None]]) -> None:
        """Of a row whose ends are a tile of their own: what comes before its whole pieces, and what
        comes after them."""
        w, before = self.w, f"{self.axis.name}two < {self.axis.vector}"
        with ends():
            tiles = self._placed()
            edges = self._scanned(tiles)
            head = self._whole(self._where(before, tiles))
        tiles = self._placed()
        total = self._whole(tiles)
        self._give(self._scanned(tiles, head))
        with ends():
            after = [w.fresh() for _ in edges]
            w.line(f"{', '.join(after)} = {self._fold}({', '.join((*total, *edges))})")
            self._give([w.let(f"tl.where({before}, {edge}, {later})")
                        for edge, later in zip(edges, after, strict=True)])  # fmt: skip

    def _placed(self) -> list[str]:
        """Tiles of which the order does not matter: what is outside the row has no place."""
        tiles = self._tiles()
        return self._where(self.w.inside(self.axis), tiles) if self.places else tiles

    def _where(self, mask: str, tiles: Sequence[str]) -> list[str]:
        return [self.w.let(f"tl.where({mask}, {tile}, {none})")
                for tile, (_, none) in zip(tiles, self.kinds, strict=True)]  # fmt: skip

    def _give(self, names: Sequence[str]) -> None:
        w = self.w
        top = w.let(f"tri_logs.log_of({', '.join(names)})") if self.logs else names[0]
        result = cast(top, self.dtype, self.node.src[0].dtype)
        of = part(self.node, 0) if self.extremes else self.node
        w.know(of, result if result == top else w.let(result))
        if self.places:
            w.know(part(self.node, 1, INDEX), w.let(f"{names[1]}.to(tl.int64)"))


class Logarithms(Scan):
    """Of sums of exponentials, which are scanned by a function of their own."""

    @property
    def _how(self) -> str:
        return f"{self.axis.dim}, {self.back}"

    def _scanned(self, tiles: Sequence[str], before: Sequence[str] = ()) -> list[str]:
        w, names = self.w, [self.w.fresh() for _ in tiles]
        start = ", ".join(before or (f"tl.full({w.shape(NOWHERE)}, {none}, {kind})"
                                     for kind, none in self.kinds))  # fmt: skip
        w.line(f"{', '.join(names)} = tri_logs.scan({tiles[0]}, {start}, {self._how})")
        return names

    def _last(self, tiles: Sequence[str], names: Sequence[str]) -> str:
        return f"tri_logs.last({', '.join(names)}, {self._how})"

    def _whole(self, tiles: Sequence[str]) -> list[str]:
        names = [self.w.fresh() for _ in tiles]
        self.w.line(f"{', '.join(names)} = tri_logs.total({tiles[0]}, {self.axis.dim})")
        return names


class Sorting(Scan):
    """A row in order; one block has all of it, what is outside comes last."""

    def step(self, carried: bool) -> None:
        assert not carried, "rows that are put in order are held"
        (tile,) = self._tiles()
        self._give([self.w.let(f"{self.combine}({tile})")])


def _fold(node: Expr, axis: Axis | None, w: Writer) -> Reduction:
    kinds = {"welford": Welford, "argmax": ArgReduction, "argmin": ArgReduction}
    return kinds.get(node.arg.kind, Reduction)(node, axis, w)


def reduce_whole(node: Expr, folds: dict[Expr, Reduction]) -> None:
    """Of a row that is one block; with the place of an extreme there is the extreme itself."""
    fold = folds.pop(node)
    fold.whole()
    for other in [f for f in folds.values() if f.value is fold.value]:
        if isinstance(fold, ArgReduction) and fold.kind == f"arg{other.kind}":
            folds.pop(other.node).taken([fold.top])


def reductions_of(members: Sequence[Nest], axis: Axis | None, w: Writer) -> dict[Expr, Reduction]:
    """One accumulator per distinct `reduce` node of the members."""
    found = [n for m in members for n in walk(*m.exprs) if n.op == "reduce"]
    return {node: _fold(node, axis, w) for node in dict.fromkeys(found)}


def scans_of(members: Sequence[Nest], axis: Axis, w: Writer, back: bool, whole: bool = False
             ) -> list[Scan]:  # fmt: skip
    """`whole` says that rows are one tile, in order: where places of extremes are not asked for,
    they are not needed there to tell which of two equal ones is later, as zeros are."""
    nodes = list(walk(*(e for m in members for e in m.exprs)))
    found = [n for n in nodes if n.op == "scan"]
    placed = {n.src[0] for n in nodes if n.op == "part" and n.arg == 1}
    # of long rows in one block pairs are joined faster (H200: cumulative logarithms of 4394 rows of
    # 8192 bfloat16 106 us, 142 us so; 17578 of 2048 82 us)
    joined = axis.start is None and axis.likely > rules.LOG_SCAN_ROW.limit
    kinds = {"sort": Sorting, "logsumexp": Scan if joined else Logarithms}
    return [kinds.get(node.arg.kind, Scan)(node, axis, w, back, node in placed or not whole)
            for node in dict.fromkeys(found)]  # fmt: skip
