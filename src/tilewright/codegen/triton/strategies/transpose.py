"""The kernel of tensors that are turned and whose rows are misaligned in memory: `tri_moves.py`
of the runtime says how they are moved sixteen bytes at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.config import Config, power
from tilewright.codegen.triton.plan.plan import KernelPlan
from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.codegen.triton.tile.kernel import Kernel
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars
from tilewright.ir.program import Program
from tilewright.schedule.fusion.group import Group
from tilewright.target import SECTOR

MOST_PADDED = 1.2  # of tiles by what is in them, of many matrices


def transpose(facts: KernelFacts) -> KernelPlan | str:
    """The kernel of such a group (H200: 32 matrices of 4929x893 bfloat16 between
    each other 159 us, 258 us as tiles of rows and columns, of floats 317 us, 385 us; 8191x8191
    bfloat16 75 us, 87 us; 18545x5392 106 us; 5143x8192 45 us; 506268x151 84 us, 96 us; 300001x192
    64 us, 78 us; 8x1751x40x80 to 8x40x80x1751 47 us; 40x1001x803 36 us, 44 us)."""
    program, group, shape = facts.program, facts.group, facts.shape
    if reason := facts.not_pointwise:
        return reason
    reason = ""
    for form in (shape, *by_matrix(shape)):
        places = moves(program, group, form)
        tile = None if places is None else _tile(program, form, *places)
        if places is None:
            reason = reason or "it does not only transpose a large matrix of two or four bytes"
            continue
        if tile is None:
            reason = "rows are aligned on one side at least, or too short for a tile"
            continue
        *z, y, x = form.parallel
        if tile.over:
            x = replace(x, start=places[1], vector=tile.over)
        blocks = *((a.block, 1) for a in z), (y.block, tile.columns), (x.block, tile.rows)
        warps = max(4, min(16, tile.kept // tile.vector // 128))
        configs = Config(blocks, warps, registers=32), Config(blocks, warps)
        form = replace(form, parallel=(*z, y, x))
        made = _Turned(program, group, form, facts.target, facts.wide, configs)
        return KernelPlan.of(made.of(tile, *places))
    return reason


def by_matrix(shape: Shape) -> list[Shape]:
    """The same with an axis for which of many matrices it is."""
    if len(shape.parallel) != 2 or len(shape.parallel[0].loops) < 2:
        return []
    y, x = shape.parallel
    z, y = Axis("z", y.loops[:-1], 0), Axis("y", y.loops[-1:], 0)
    return [replace(shape, parallel=(z, y, x))]


def moves(program: Program, group: Group, shape: Shape) -> tuple[Expr, Expr] | None:
    """Where rows begin that are read along y, and those that are written along x, if all a group
    does is to move many elements of two or four bytes so."""
    nests = shape.flat().members
    if shape.rank != 2 or len(shape.parallel) < 2 or len(nests) != 1 or len(nests[0].stores) != 1:
        return None
    (*z, y, x), (store,) = shape.parallel, nests[0].stores
    read, dtype = store.value, program.buffers[store.buffer].dtype
    if read.op != "load" or read.src[1:] or read.dtype != dtype or store.mask is not None:
        return None
    if store.mode != "set" or {read.arg, store.buffer} & group.local or read.arg == store.buffer:
        return None
    elements = math.prod(a.size or 0 for a in shape.parallel)
    if dtype.itemsize not in (2, 4) or elements * dtype.itemsize < rules.TRANSPOSED_BYTES.limit:
        return None
    start, to = ix.sub(read.src[0], y.var), ix.sub(store.index, x.var)
    which = frozenset(a.var for a in z)
    if free_vars(start) | which != which | {x.var} or free_vars(to) | which != which | {y.var}:
        return None
    return start, to


def is_odd(place: Expr, vector: int) -> bool:
    return ix.mod(place, vector) is not ix.ZERO


# ---- tiles


@dataclass(frozen=True)
class Tile:
    """Some columns of some rows that a program reads, to write so much of each of these columns."""

    vector: int  # elements of sixteen bytes
    rows: int  # elements that are written of a column
    over: int  # rows that are read before these, where columns are misaligned
    columns: int
    pitch: int  # how far rows are apart in shared memory
    whole: bool = False  # they are one piece of memory

    @property
    def gap(self) -> int:
        """Elements between each `vector` rows there: so these are in other banks of it."""
        return 0 if self.pitch % 2 else self.vector

    @property
    def kept(self) -> int:
        """Elements there."""
        rows = self.rows + self.over
        return power(rows * self.pitch + rows // self.vector * self.gap + self.vector)

    @property
    def apart(self) -> int:
        """How far columns are apart in memory that a warp writes at once: in other banks."""
        return self.vector // 4

    @property
    def pieces(self) -> int:
        """Sixteen bytes that are written, a warp eight of each of four columns at once."""
        columns = -(-self.columns // (4 * self.apart)) * 4 * self.apart
        return power(columns * self.rows // self.vector)

    @property
    def sizes(self) -> str:
        return f"{self.vector}, {self.pitch}, {self.gap}"

    def moved(self, width: int, height: int) -> int:
        """Bytes that pass the cache for a matrix, as if all tiles were full, with the sectors at
        the ends of each piece of memory: two of what is read, or tiles would be too narrow."""
        size = 16 // self.vector
        tiles = -(-width // self.columns) * -(-(height + max(0, self.over - 1)) // self.rows)
        read = (self.rows + self.over) * (self.columns * size + (0 if self.whole else 2 * SECTOR))
        return tiles * (read + self.columns * (self.rows * size + SECTOR))


def _tile(program: Program, shape: Shape, start: Expr, to: Expr) -> Tile | None:
    """The one that moves the fewest bytes, where it is worth it."""
    y, x = shape.parallel[-2:]
    size = program.buffers[shape.members[0].stores[0].buffer].dtype.itemsize
    vector, width, height = 16 // size, y.size or 0, x.size or 0
    odd, slides = is_odd(start, vector), is_odd(to, vector) or height % vector != 0
    if (
        not (odd or slides)
        or height < rules.TRANSPOSED_ROW.limit
        or width < rules.TRANSPOSED_WIDTH.limit
    ):
        return None
    step, over = _step(start, x), SECTOR // size if slides else 0
    for most in (rules.TRANSPOSED_TILE.limit, rules.TRANSPOSED_WHOLE_TILE.limit):
        tiles = [_tile_of(Tile(vector, rows, over, width, width), step, odd, most // size)
                 for rows in range(8 * vector, 64 * vector, 8 * vector)]  # fmt: skip
        tile = min((t for t in tiles if t), key=lambda t: t.moved(width, height), default=None)
        narrow = (
            tile is not None
            and tile.whole
            and size == 2
            and (over or most == rules.TRANSPOSED_WHOLE_TILE.limit)
        )
        if tile is not None and (width >= rules.TRANSPOSED_ROW.limit or narrow):
            padded = _padded(width, tile.columns) * _padded(height, tile.rows)
            return tile if len(shape.parallel) == 2 or padded <= MOST_PADDED else None
    return None


def _padded(size: int, block: int) -> float:
    return -(-size // block) * block / size


def _step(start: Expr, x: Axis) -> int:
    """How far apart rows begin, 0 if that differs."""
    return ix.value_of(ix.coefficient(start, x.var) or ix.ZERO) or 0


def _tile_of(tile: Tile, step: int, odd: bool, most: int) -> Tile | None:
    """The widest of so many rows of a matrix that begin `step` apart."""
    vector, width = tile.vector, tile.columns
    if step == width and max(tile.kept, tile.pieces * vector) <= most:
        return replace(tile, whole=True)
    ends = vector - 1 if odd else 0
    pitch = (most - vector) // (tile.rows + tile.over)
    pitch -= (pitch - step) % vector if odd else pitch % vector
    if replace(tile, pitch=pitch).kept > most:
        pitch -= vector
    if pitch - ends < vector:
        return None
    columns = -(-width // -(-width // (pitch - ends)))
    columns += 0 if odd else -columns % vector
    pitch = columns + ends
    return replace(tile, columns=columns, pitch=pitch + (step - pitch) % vector if odd else pitch)


# ---- the kernel


class Moving(Kernel):
    def index_at(self, v: Expr, name: str, index: Expr) -> str:
        """An index where a loop is at these points."""
        with self.w.apart():
            self.w.know(v, name)
            return self.w.let(self.w.index(index))


class _Turned(Moving):
    tile: Tile
    start: Expr
    to: Expr

    def of(self, tile: Tile, start: Expr, to: Expr) -> _Turned:
        self.tile, self.start, self.to = tile, start, to
        return self

    def body(self) -> None:
        w, tile, (*z, y, x) = self.w, self.tile, self.shape.parallel
        (store,) = self.shape.members[0].stores
        from_, to = self.pointer(store.value.arg), self.pointer(store.buffer)
        w.begin(self.first, self.early)
        w.line(f"xblocks = ({x.size} + {x.slack} + {x.block} - 1) // {x.block}")
        for axis in z:
            w.line(f"blocks = xblocks * (({y.size} + {y.block} - 1) // {y.block})")
            w.line(f"{axis.name} = pid // blocks")
            w.line("pid = pid % blocks")
            w.know(axis.var, axis.name)
        w.line(f"x0 = pid % xblocks * {x.block}")
        w.line(f"y0 = pid // xblocks * {y.block}")
        self._read(x, y, from_)
        self._write(x, y, to)
        if tile.over:
            with w.block("if x0 == 0"):
                self._edges(x, y, from_, to)

    def _read(self, x: Axis, y: Axis, from_: str) -> None:
        w, tile, even = self.w, self.tile, _step(self.start, x)
        rows, end = tile.rows + tile.over, (x.size or 0) + tile.over
        behind = f"{self.index_at(x.var, 'x0', self.start)} + y0" if even else "0"
        w.line(f"behind = ({behind}) & {tile.vector - 1}")
        w.line(f"row = tri_moves.row_of(behind, {tile.sizes}, {tile.kept})")
        w.line("at = x0 + row")
        begin = self.index_at(x.var, self._row_at("at"), self.start)
        if tile.whole:  # the last vector of the last row belongs to the next one
            w.line(f"stop = {begin} + tl.where((row < {rows}) & (at < {end}), {y.size}, 0)")
            w.line(f"inside = (row <= {rows}) & (at >= {tile.over}) & (at <= {end})")
        else:
            w.line(f"stop = {begin} + tl.minimum(y0 + {y.block}, {y.size})")
            w.line(f"inside = (row < {rows}) & (at >= {tile.over}) & (at < {end})")
        w.line(f"head = tri_moves.head(row, {tile.sizes}) + behind")
        w.line(f"tile = tri_moves.rows({from_}, {begin} + y0, stop, inside, head, {tile.vector})")

    def _row_at(self, at: str) -> str:
        """The row at a place of the tile. It is none below zero, not even where nothing is read:
        LLVM may believe that and leave out the comparison (Triton 3.6)."""
        over = self.tile.over
        return self.w.let(f"tl.maximum({at}, {over}) - {over}") if over else at

    def _write(self, x: Axis, y: Axis, to: str) -> None:
        w, tile = self.w, self.tile
        w.line(f"v, c = tri_moves.pieces_of({tile.rows // tile.vector}, {tile.apart}, "
               f"{tile.pieces})")  # fmt: skip
        w.line(f"inside = (c < {y.block}) & (y0 + c < {y.size})")
        w.line(f"c = tl.minimum(c, {y.block} - 1)")
        w.line("yeach = y0 + c")
        first = self.index_at(y.var, "yeach", self.to)
        w.line(f"slide = {first} & {tile.over - 1}" if tile.over else "slide = 0")
        w.line(f"k = v * {tile.vector}")
        w.line(f"each = (k + {tile.over} - slide)[:, None] + tl.arange(0, {tile.vector})[None, :]")
        w.line(f"spot = tri_moves.head(each, {tile.sizes}) + c[:, None] + behind")
        if not _step(self.start, x):
            begin = self.index_at(x.var, self._row_at("(x0 + each)"), self.start)
            w.line(f"spot += ({begin} + y0) & {tile.vector - 1}")
        w.line("at = x0 + k")
        w.line(f"inside = inside & (at >= slide) & (at + {tile.vector} <= {x.size} + slide)")
        w.line("found = tri_moves.looked_up(tile, spot)")
        w.line(f"tri_moves.put({to}, {first} - slide + at, found, inside)")

    def _edges(self, x: Axis, y: Axis, from_: str, to: str) -> None:
        """What is not in whole vectors of columns, at both ends of them."""
        w, tile = self.w, self.tile
        w.line(f"yend = y0 + tl.arange(0, {power(tile.columns)})[:, None]")
        first = self.index_at(y.var, "yend", self.to)
        behind = f"{first} & {tile.vector - 1}"
        w.line(f"xend, left = tri_moves.edges({behind}, {x.size}, {tile.vector})")
        w.line(f"left = left & (yend < tl.minimum(y0 + {y.block}, {y.size}))")
        begin = self.index_at(x.var, "xend", self.start)
        w.line(f"ends = tl.load({from_} + ({begin} + yend), left, other=0)")
        w.line(f"tl.store({to} + ({first} + xend), ends, left)")
