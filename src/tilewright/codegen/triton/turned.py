"""The kernel of tensors that are turned and whose rows begin anywhere in memory: `tri_moves.py` of
the runtime says how they are moved sixteen bytes at once."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.triton.configs import Config
from tilewright.codegen.triton.kernel import Kernel, TritonKernel
from tilewright.codegen.triton.shape import Shape
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars
from tilewright.ir.program import Program
from tilewright.schedule.group import Group
from tilewright.target import Target

SHORTEST = 256  # elements of a row for which its ends do not matter
LONG_ROW = 1 << 17  # elements of rows of which few bytes each are slow to read
FEWEST = 1 << 24  # bytes of a tensor that keep a card busy: smaller ones are in cache anyway
PIECE = 8  # elements of a column that are written by one program: sixteen bytes at least


def turned(program: Program, group: Group, shape: Shape, target: Target, name: str, wide: bool
           ) -> TritonKernel | None:  # fmt: skip
    """The kernel of such a group, None for others (H200: 8191x8191 bfloat16 77 us, 87 us as a tile
    of rows and columns; 30175x1089 41 us, 46 us; 8191x8191 float32 140 us, 157 us; 24879x987 55 us,
    60 us; 14x1024x95x95 bfloat16 turned around, which is written even, 149 us, 162 us; 321 rows of
    250040 float16, which are read even, 106 us, 128 us; but 2101x2003 bfloat16 7.9 us, 7.6 us)."""
    places = _places(program, group, shape)
    if places is None:
        return None
    (start, to), (y, x) = places, shape.parallel
    size = program.buffers[shape.members[0].stores[0].buffer].dtype.itemsize
    vector, odd = 16 // size, _is_odd(start, 16 // size)
    tiles = ((128, 128, 16), (128, 128, 8)) if size == 2 else ((64, 128, 16), (64, 64, 8))
    if _is_odd(to, vector) or (x.size or 0) % vector:
        plain = start is ix.mul(x.var, y.extent) and to is ix.mul(y.var, x.extent)
        long = size == 2 and (y.size or 0) >= LONG_ROW
        if not plain or not (odd or long):
            return None
        x = replace(x, lean=to, piece=PIECE)
    elif not odd or size != 2:
        return None
    else:
        tiles = tiles[::-1]
    configs = tuple(Config(((y.block, by - vector), (x.block, bx - x.piece)), warps)
                    for by, bx, warps in tiles)  # fmt: skip
    made = _Turned(program, group, replace(shape, parallel=(y, x)), target, wide, configs)
    return made.generate(name)


def _places(program: Program, group: Group, shape: Shape) -> tuple[Expr, Expr] | None:
    """Where rows begin that are read along y, and those that are written along x, if all a group
    does is to move elements of two or four bytes so."""
    nests = shape.flat().members
    if shape.rank != 2 or len(shape.parallel) != 2 or len(nests) != 1 or len(nests[0].stores) != 1:
        return None
    (y, x), (store,) = shape.parallel, nests[0].stores
    read, dtype = store.value, program.buffers[store.buffer].dtype
    if read.op != "load" or read.src[1:] or read.dtype != dtype or store.mask is not None:
        return None
    if store.mode != "set" or {read.arg, store.buffer} & group.local or read.arg == store.buffer:
        return None
    sizes = y.size or 0, x.size or 0
    if dtype.itemsize not in (2, 4) or min(sizes) < SHORTEST:
        return None
    if sizes[0] * sizes[1] * dtype.itemsize < FEWEST:
        return None
    start, to = ix.sub(read.src[0], y.var), ix.sub(store.index, x.var)
    if free_vars(start) != frozenset((x.var,)) or free_vars(to) != frozenset((y.var,)):
        return None
    return start, to


def _is_odd(place: Expr, vector: int) -> bool:
    return ix.mod(place, vector) is not ix.ZERO


class _Turned(Kernel):
    def body(self) -> None:
        w, (y, x) = self.w, self.shape.parallel
        (store,) = self.shape.members[0].stores
        read, vector = store.value, 16 // store.value.dtype.itemsize
        from_, to = self.pointer(read.arg), self.pointer(store.buffer)
        if self.early:
            w.line("tri.begin()")
        wide = ".to(tl.int64)" if w.index_type == "tl.int64" else ""
        w.line(f"pid = {self.first}{wide}")
        if x.piece:
            w.line(f"tri_moves.turned({from_}, {to}, pid, {x.size}, {y.size}, {vector}, {x.piece}, "
                   f"{y.block}, {x.block})")  # fmt: skip
            return
        w.line(f"xblocks = ({x.size} + {x.block} - 1) // {x.block}")
        w.line(f"x0 = pid % xblocks * {x.block}")
        w.line(f"y0 = pid // xblocks * {y.block}")
        w.line(f"lanes: tl.constexpr = {y.block} + {vector}")
        w.line(f"xrow = x0 + tl.arange(0, {x.block})[:, None]")
        start = self._index_at(x.var, "xrow", ix.sub(read.src[0], y.var))
        w.line(f"stop = tl.where(xrow < {x.size}, {start} + {y.size}, 0)")
        w.line(f"tile = tri_moves.rows({from_}, {start} + y0, stop, {vector}, lanes)")
        w.line(f"each = tl.arange(0, lanes * {x.block})")
        w.line(f"c = tri_moves.column_of(each, {vector}, {x.block})")
        w.line(f"k = tri_moves.row_of(each, {vector}, {x.block})")
        w.line("xeach = x0 + k")
        start = self._index_at(x.var, "xeach", ix.sub(read.src[0], y.var))
        w.line(f"lane = ({start} + y0) % {vector} + tl.minimum(c, {y.block} - 1)")
        w.line(f"found = tri_moves.looked_up(tile, k, lane, {vector}, lanes)")
        w.line("yeach = y0 + c")
        first = self._index_at(y.var, "yeach", ix.sub(store.index, x.var))
        w.line(f"place = tl.max_contiguous(tl.multiple_of({first} + xeach, {vector}), {vector})")
        w.line(f"inside = (c < {y.block}) & (yeach < {y.size})")
        w.line(f"inside = inside & (xeach // {vector} * {vector} < {x.size})")
        w.line(f"tl.store({to} + place, found, tl.max_constancy(inside, {vector}))")

    def _index_at(self, v: Expr, name: str, index: Expr) -> str:
        """An index where a loop is at these points."""
        with self.w.apart():
            self.w.know(v, name)
            return self.w.let(self.w.index(index))
