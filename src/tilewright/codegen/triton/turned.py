"""The kernel of tensors that are turned and whose rows begin anywhere in memory: `tri_moves.py` of
the runtime says how they are moved sixteen bytes at once."""

from __future__ import annotations

import math
from dataclasses import replace

from tilewright.codegen.triton.blocks import Config
from tilewright.codegen.triton.kernel import Kernel
from tilewright.codegen.triton.made import TritonKernel
from tilewright.codegen.triton.shape import Axis, Shape
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars
from tilewright.ir.program import Program
from tilewright.schedule.group import Group
from tilewright.target import Target

SHORTEST = 256  # elements of a row for which its ends do not matter
FEWEST = 1 << 24  # bytes of a tensor that keep a card busy: smaller ones are in cache anyway
MOST_PADDED = 1.2  # of tiles by what is in them, of many matrices
PIECE = 8  # elements of a column that are written by one program: sixteen bytes at least


def turned(program: Program, group: Group, shape: Shape, target: Target, name: str, wide: bool
           ) -> TritonKernel | None:  # fmt: skip
    """The kernel of such a group, None for others (H200: 8191x8191 bfloat16 76 us, 87 us as a tile
    of rows and columns; 30175x1089 41 us, 46 us; 8191x8191 float32 140 us, 157 us; 24879x987 55 us,
    60 us; 14x1024x95x95 bfloat16 turned around, which is written even, 149 us, 162 us; 43963x2048,
    which is read even, 97 us, 126 us; 16385x4096 71 us, 84 us; 40x1001x803 41 us, 44 us; but
    300x363x1024, of whose tiles a quarter is empty, 144 us, 122 us; 2101x2003 7.9 us, 7.6 us)."""
    for form in (shape, *matrices(shape)):
        places = _places(program, group, form)
        made = None if places is None else _tiles(program, form, *places)
        if made is not None:
            form, configs = made
            return _Turned(program, group, form, target, wide, configs).generate(name)
    return None


def matrices(shape: Shape) -> list[Shape]:
    """The same with an axis for which of many matrices it is."""
    if len(shape.parallel) != 2 or len(shape.parallel[0].loops) < 2:
        return []
    y, x = shape.parallel
    z, y = Axis("z", y.loops[:-1], 0), Axis("y", y.loops[-1:], 0)
    return [replace(shape, parallel=(z, y, x))]


def _tiles(program: Program, shape: Shape, start: Expr, to: Expr
           ) -> tuple[Shape, tuple[Config, ...]] | None:  # fmt: skip
    """The shape with the sizes of its tiles, where they are worth it."""
    *z, y, x = shape.parallel
    size = program.buffers[shape.members[0].stores[0].buffer].dtype.itemsize
    vector = 16 // size
    odd = is_odd(start, vector)
    tiles = ((128, 128, 16), (128, 128, 8)) if size == 2 else ((64, 128, 16), (64, 64, 8))
    if is_odd(to, vector) or (x.size or 0) % vector:
        plain = ix.coefficient(start, x.var) is y.extent and ix.coefficient(to, y.var) is x.extent
        if not plain or not (odd or size == 2):
            return None
        x = replace(x, lean=to, piece=PIECE)
    elif not odd or size != 2:
        return None
    else:
        tiles = tiles[::-1]
    lean = vector if odd else 0
    by, bx, _ = tiles[0]
    if z and _padded(y.size or 0, by - lean) * _padded(x.size or 0, bx - x.piece) > MOST_PADDED:
        return None
    blocks = [(*((a.block, 1) for a in z), (y.block, by - lean), (x.block, bx - x.piece))
              for by, bx, _ in tiles]  # fmt: skip
    configs = tuple(Config(b, warps) for b, (_, _, warps) in zip(blocks, tiles, strict=True))
    return replace(shape, parallel=(*z, y, x)), configs


def _padded(size: int, block: int) -> float:
    return -(-size // block) * block / size


def _places(program: Program, group: Group, shape: Shape) -> tuple[Expr, Expr] | None:
    """Where rows begin that are read along y, and those that are written along x, of matrices that
    are worth it."""
    found = moves(program, group, shape)
    if found is None or min(a.size or 0 for a in shape.parallel[-2:]) < SHORTEST:
        return None
    return found


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
    if dtype.itemsize not in (2, 4) or elements * dtype.itemsize < FEWEST:
        return None
    start, to = ix.sub(read.src[0], y.var), ix.sub(store.index, x.var)
    which = frozenset(a.var for a in z)
    if free_vars(start) | which != which | {x.var} or free_vars(to) | which != which | {y.var}:
        return None
    return start, to


def is_odd(place: Expr, vector: int) -> bool:
    return ix.mod(place, vector) is not ix.ZERO


class Moving(Kernel):
    def index_at(self, v: Expr, name: str, index: Expr) -> str:
        """An index where a loop is at these points."""
        with self.w.apart():
            self.w.know(v, name)
            return self.w.let(self.w.index(index))


class _Turned(Moving):
    def body(self) -> None:
        w, (*z, y, x) = self.w, self.shape.parallel
        (store,) = self.shape.members[0].stores
        read, vector = store.value, 16 // store.value.dtype.itemsize
        from_, to = self.pointer(read.arg), self.pointer(store.buffer)
        w.begin(self.first, self.early)
        w.line(f"xblocks = ({x.size} + {x.slack} + {x.block} - 1) // {x.block}")
        for axis in z:
            w.line(f"blocks = xblocks * (({y.size} + {y.block} - 1) // {y.block})")
            w.line(f"{axis.name} = pid // blocks")
            w.line("pid = pid % blocks")
            w.know(axis.var, axis.name)
        if x.piece:
            begin = self.index_at(x.var, "0", ix.sub(read.src[0], y.var))
            at = self.index_at(y.var, "0", ix.sub(store.index, x.var))
            lean = vector if is_odd(ix.sub(read.src[0], y.var), vector) else 0
            w.line(f"tri_moves.turned({from_}, {to}, {begin}, {at}, pid, {x.size}, {y.size}, "
                   f"{vector}, {lean}, {x.piece}, {y.block}, {x.block})")  # fmt: skip
            return
        w.line(f"x0 = pid % xblocks * {x.block}")
        w.line(f"y0 = pid // xblocks * {y.block}")
        w.line(f"lanes: tl.constexpr = {y.block} + {vector}")
        w.line(f"xrow = x0 + tl.arange(0, {x.block})[:, None]")
        start = self.index_at(x.var, "xrow", ix.sub(read.src[0], y.var))
        w.line(f"stop = tl.where(xrow < {x.size}, {start} + {y.size}, 0)")
        w.line(f"tile = tri_moves.rows({from_}, {start} + y0, stop, {vector}, lanes)")
        w.line(f"each = tl.arange(0, lanes * {x.block})")
        w.line(f"c = tri_moves.column_of(each, {vector}, {x.block})")
        w.line(f"k = tri_moves.row_of(each, {vector}, {x.block})")
        w.line("xeach = x0 + k")
        start = self.index_at(x.var, "xeach", ix.sub(read.src[0], y.var))
        w.line(f"lane = ({start} + y0) % {vector} + tl.minimum(c, {y.block} - 1)")
        w.line(f"found = tri_moves.looked_up(tile, k, lane, {vector}, lanes)")
        w.line("yeach = y0 + c")
        first = self.index_at(y.var, "yeach", ix.sub(store.index, x.var))
        w.line(f"place = tl.max_contiguous(tl.multiple_of({first} + xeach, {vector}), {vector})")
        w.line(f"inside = (c < {y.block}) & (yeach < {y.size})")
        w.line(f"inside = inside & (xeach // {vector} * {vector} < {x.size})")
        w.line(f"tl.store({to} + place, found, tl.max_constancy(inside, {vector}))")
