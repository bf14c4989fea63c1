"""The kernel of a matrix that is turned and whose rows begin anywhere in memory, before and after:
`runtime/tri_moves.py` says how it is moved sixteen bytes at once."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.triton.configs import Config
from tilewright.codegen.triton.kernel import Kernel, TritonKernel
from tilewright.codegen.triton.shape import Shape
from tilewright.ir import index as ix
from tilewright.ir.program import Program
from tilewright.schedule.group import Group
from tilewright.target import Target

SHORTEST = 256  # elements of a row for which its ends do not matter
FEWEST = 1 << 22  # elements of a matrix that keep a card busy: smaller ones are in cache anyway
PIECE = 8  # elements of a column that are written by one program: sixteen bytes at least


def turned(program: Program, group: Group, shape: Shape, target: Target, name: str, wide: bool
           ) -> TritonKernel | None:  # fmt: skip
    """The kernel of such a group, None for others (H200: 8191x8191 bfloat16 77 us, 87 us as a tile
    of rows and columns; 30175x1089 41 us, 46 us; 8191x8191 float32 140 us, 157 us; 24879x987 55 us,
    60 us)."""
    if not _is_turned(program, group, shape):
        return None
    y, x = shape.parallel
    store = shape.members[0].stores[0]
    size = program.buffers[store.buffer].dtype.itemsize
    vector = 16 // size
    if (y.size or 0) % vector == 0 or (x.size or 0) % vector == 0:
        return None
    x = replace(x, lean=ix.sub(store.index, x.var), piece=PIECE)
    tiles = ((128, 128, 16), (128, 128, 8)) if size == 2 else ((64, 128, 16), (64, 64, 8))
    configs = tuple(Config(((y.block, by - vector), (x.block, bx - PIECE)), warps)
                    for by, bx, warps in tiles)  # fmt: skip
    made = _Turned(program, group, replace(shape, parallel=(y, x)), target, wide, configs)
    return made.generate(name)


def _is_turned(program: Program, group: Group, shape: Shape) -> bool:
    """Whether all it does is to turn a matrix of elements of two or four bytes."""
    nests = shape.flat().members
    if shape.rank != 2 or len(shape.parallel) != 2 or len(nests) != 1 or len(nests[0].stores) != 1:
        return False
    (y, x), (store,) = shape.parallel, nests[0].stores
    read, dtype = store.value, program.buffers[store.buffer].dtype
    if read.op != "load" or read.src[1:] or read.dtype != dtype or store.mask is not None:
        return False
    if store.mode != "set" or {read.arg, store.buffer} & group.local or read.arg == store.buffer:
        return False
    sizes = y.size or 0, x.size or 0
    if dtype.itemsize not in (2, 4) or min(sizes) < SHORTEST or sizes[0] * sizes[1] < FEWEST:
        return False
    return (read.src[0] is ix.add(ix.mul(x.var, y.extent), y.var)
            and store.index is ix.add(ix.mul(y.var, x.extent), x.var))  # fmt: skip


class _Turned(Kernel):
    def body(self) -> None:
        (nest,), (y, x) = self.shape.members, self.shape.parallel
        store = nest.stores[0]
        if self.early:
            self.w.line("tri.begin()")
        wide = ".to(tl.int64)" if self.w.index_type == "tl.int64" else ""
        given = [self.pointer(store.value.arg), self.pointer(store.buffer), f"{self.first}{wide}",
                 x.size, y.size, 16 // store.value.dtype.itemsize, x.piece, y.block,
                 x.block]  # fmt: skip
        self.w.line(f"tri_moves.turned({', '.join(map(str, given))})")
