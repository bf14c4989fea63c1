"""The kernel of matrices with few rows that are turned: what a program writes of their columns
is one piece of memory, though each of these is misaligned in it."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.config import Config
from tilewright.codegen.triton.plan.plan import KernelPlan
from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.codegen.triton.strategies.transpose import Moving, by_matrix, moves
from tilewright.ir import index as ix
from tilewright.ir.program import Program
from tilewright.target import PIECE

PIECES = 256  # of sixteen bytes, that the threads of a program write at once
ROUNDS = 4  # in which they do


def transpose_few_rows(facts: KernelFacts) -> KernelPlan | str:
    """The kernel of such a group (H200: 2306x47x725 bfloat16 85 us, 99 us as a
    tile of rows and columns; 1500x95x250 43 us, 51 us; 700x65x700 38 us, 44 us)."""
    program, group, shape = facts.program, facts.group, facts.shape
    if reason := facts.not_pointwise:
        return reason
    for form in (shape, *by_matrix(shape)):
        if moves(program, group, form) is None or not _is_one_piece(program, shape):
            continue
        *z, y, x = form.parallel
        tile = _tile(y.size or 0, x.size or 0)
        if tile is not None:
            blocks = *((a.block, 1) for a in z), (y.block, tile.columns), (x.block, x.size or 0)
            configs = (Config(blocks, PIECES // 32, registers=32), Config(blocks, PIECES // 32))
            made = _Laid(program, group, form, facts.target, facts.wide, configs)
            return KernelPlan.of(made.of(tile))
    return "it does not only transpose large matrices of few rows, of two bytes, into one piece"


def _is_one_piece(program: Program, shape: Shape) -> bool:
    """Whether what is written of two bytes each lies column by column."""
    (store,), (y, x) = shape.flat().members[0].stores, shape.parallel
    if program.buffers[store.buffer].dtype.itemsize * PIECE != 16:
        return False
    return ix.sub(store.index, x.var) is ix.mul(y.var, x.extent)


@dataclass(frozen=True)
class Tile:
    rows: int

    @property
    def pieces(self) -> int:
        """Those that are written at once: of whole columns."""
        return PIECES // self.rows * self.rows

    @property
    def step(self) -> int:
        return self.pieces * PIECE // self.rows

    @property
    def columns(self) -> int:
        return ROUNDS * self.step

    @property
    def lanes(self) -> int:
        return (self.columns + 2 * PIECE - 2) // PIECE * PIECE

    @property
    def kept_rows(self) -> int:
        return -(-self.rows // PIECE) * PIECE


def _tile(columns: int, rows: int) -> Tile | None:
    """One that leaves few threads without work, where there is such a one. Even rows are written
    four bytes at once as they are (H200: 500x50x1401 48 us, 40 us; 900x17x3001, which takes
    twice as much shared memory, 71 us, 65 us)."""
    tile = Tile(rows)
    kept = tile.kept_rows * tile.lanes
    if rows % 2 == 0 or not PIECE < rows <= PIECES or kept > rules.FEW_ROWS_TILE.limit:
        return None
    written = -(-columns // tile.columns) * tile.columns
    return tile if 5 * columns * tile.pieces >= 3 * written * PIECES else None


class _Laid(Moving):
    tile: Tile

    def of(self, tile: Tile) -> _Laid:
        self.tile = tile
        return self

    def body(self) -> None:
        w, tile, (*z, y, x) = self.w, self.tile, self.shape.parallel
        (store,) = self.shape.members[0].stores
        read = store.value
        start, to = ix.sub(read.src[0], y.var), ix.sub(store.index, x.var)
        from_, into = self.pointer(read.arg), self.pointer(store.buffer)
        self._corner(z, y)
        sizes, most = f"{PIECE}, {tile.lanes}, {tile.kept_rows}", rules.FEW_ROWS_TILE.limit
        w.line(f"row = tri_moves.kept_rows({sizes}, {most})")
        w.line(f"xrow = tl.minimum(row, {x.size} - 1)")
        first = self.index_at(x.var, "xrow", start)
        end = f"{first} + tl.minimum(y0 + {y.block}, {y.size})"
        w.line(f"stop = tl.where(row < {x.size}, {end}, 0)")
        w.line(f"xrow = {first} + y0")
        w.line(f"tile = tri_moves.kept({from_}, xrow, stop, {PIECE}, {tile.lanes}, {most})")
        w.line(f"at = {self.index_at(y.var, 'y0', to)}")
        w.line(f"slide = at & {PIECE - 1}")
        w.line(f"piece, flat = tri_moves.pieces({tile.pieces}, {PIECES}, {PIECE})")
        w.line(f"behind = (flat - slide + {x.size}).to(tl.uint32)")
        w.line(f"xeach = (behind % {x.size}).to(tl.int32)")
        w.line(f"c = (behind // {x.size}).to(tl.int32) - 1")
        first = self.index_at(x.var, "xeach", start)
        w.line(f"lane = (({first} + y0) & {PIECE - 1}) + c")
        w.line(f"round = tl.arange(0, {ROUNDS})[:, None]")
        w.line(f"found = tri_moves.found_in(tile, xeach, lane, round * {tile.step}, {sizes})")
        w.line(f"first = (round * {tile.pieces} + piece) * {PIECE} - slide")
        w.line(f"size = tl.minimum({y.size} - y0, {y.block}) * {x.size}")
        w.line(f"inside = (piece < {tile.pieces}) & (first >= 0) & (first + {PIECE} <= size)")
        w.line(f"place = tl.multiple_of(at + first + (flat & {PIECE - 1}), [1, {PIECE}])")
        w.line(f"place = tl.max_contiguous(place, [1, {PIECE}])")
        w.line(f"tl.store({into} + place, found, tl.max_constancy(inside, [1, {PIECE}]))")
        w.line(f"flat, inside = tri_moves.edges(slide, size, {PIECE})")
        w.line(f"xeach = flat % {x.size}")
        first = self.index_at(x.var, "xeach", start)
        w.line(f"found = tl.load({from_} + ({first} + y0 + flat // {x.size}), inside, other=0)")
        w.line(f"tl.store({into} + (at + flat), found, inside)")

    def _corner(self, z: list[Axis], y: Axis) -> None:
        w = self.w
        w.begin(self.first, self.early)
        w.line(f"yblocks = ({y.size} + {y.block} - 1) // {y.block}")
        for axis in z:
            w.line(f"{axis.name} = pid // yblocks")
            w.know(axis.var, axis.name)
        w.line(f"y0 = pid % yblocks * {y.block}")
