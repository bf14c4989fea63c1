"""Columns of small matrices with odd rows: each matrix as one piece of memory.

Of rows of an odd length neighbouring threads have neighbouring elements, one at a time, and what
a program stores of a row begins and ends within what memory is written by. A matrix that a
program has all of is moved sixteen bytes at once, and turned in shared memory such that threads
have its columns, and back. Where matrices are misaligned, what is left at both ends is stored
beside.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.config import power
from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.codegen.triton.strategies.misaligned_columns import Staged, length_of
from tilewright.codegen.triton.tile.interleaved import is_even
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars
from tilewright.ir.program import Store
from tilewright.target import PIECE

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel


def small_matrices(facts: KernelFacts) -> Shape | str:
    """The shape with matrices that are moved so, where one is read and one is made of it (H200:
    softmax over 1 of 20000x64x121 bfloat16 183 us, 247 us by single elements; of 40000x60x61 173
    us, 201 us; cumulative sums 154 us, 166 us, and 159 us, 231 us; but softmax of 8000x28x237 78
    us, 74 us where threads have columns)."""
    shape, flat = facts.shape, facts.flat
    if reason := facts.not_columns or facts.sorts or facts.scatters or facts.draws:
        return reason
    if shape.row_programs:
        return "several programs share a column"
    if not shape.persistent:
        return "columns do not fit in registers"
    if not facts.shape.scans and facts.length <= rules.MATRIX_ROWS.limit:
        return f"columns have at most {rules.MATRIX_ROWS.limit} elements: a thread has them"
    (x,), (r,) = flat.parallel, flat.inner
    tiles, stores = _moved(facts.group.local, flat, x, r)
    if len(tiles) != 1 or len(stores) != 1 or tiles[0].src != (stores[0].index,):
        return "not one matrix is read and one like it written"
    index, rows, length = stores[0].index, r.size or 0, length_of(stores[0].index, x)
    buffers = facts.program.buffers
    if {buffers[b].dtype.itemsize for b in (tiles[0].arg, stores[0].buffer)} != {2}:
        return "elements have not two bytes"
    lanes = power(rows) * power(length)
    if tiles[0].arg == stores[0].buffer:
        return "it is written in place"
    if is_even(index, x, 4) or not length:
        return "rows are aligned"
    least, most = rules.MATRIX_ELEMENTS.limit, rules.MATRIX_TILE.limit
    if rows * length < least or lanes > most or 3 * lanes > 4 * rows * length:
        return f"a matrix does not fill a tile of {least} to {most} elements"
    if not is_matrix(index, x, r, length):
        return "rows of a matrix do not lie one after the other"
    if x.likely < rules.MATRICES_PER_SM.limit * length * facts.target.sms:
        return f"fewer than {rules.MATRICES_PER_SM.limit} matrices for each SM"
    return by_rows(shape, length)


def by_rows(shape: Shape, length: int) -> Shape:
    """With a tile whose rows are rows of so many columns: of one whose columns are, neighbouring
    threads have neighbouring columns as they are."""
    (x,), (r,) = shape.parallel, shape.inner
    axes = {x: replace(x, dim=1), r: replace(r, dim=0)}
    segments = tuple((s, None if a is None else axes[a]) for s, a in shape.segments)
    return replace(shape, staged=length, pipelined=False, segments=segments, parallel=(axes[x],))


def is_matrix(index: Expr, x: Axis, r: Axis, length: int) -> bool:
    """Whether rows of so many columns lie one after the other, and so do the matrices of them."""
    step, rows = ix.coefficient(index, r.var), r.size or 0
    matrix = ix.mul(ix.floordiv(x.var, length), rows * length)
    whole = ix.add(matrix, ix.mod(x.var, length))
    return ix.value_of(step or ix.ZERO) == length and ix.without(index, [r.var]) is whole


def _moved(local: frozenset[str], flat: Shape, x: Axis, r: Axis) -> tuple[list[Expr], list[Store]]:
    """What is loaded and stored at all points of a tile."""
    both = {x.var, r.var}
    nodes = dict.fromkeys(flat.loads)
    found = [n for n in nodes if both <= free_vars(n) and n.arg not in local]
    stores = [s for s in flat.stores if s.buffer not in local]
    return found, [s for s in stores if both <= free_vars(s.index)]


class SmallMatrices(Staged):
    """The text of one kernel's matrices."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.size = self.length * (self.r.size or 0)
        self.apart = self.size % PIECE != 0  # matrices are misaligned

    def columns(self) -> None:
        inside = self.r not in self.w.masked
        super().columns()
        if inside or (self.kernel.shape.scans and not self.kernel.shape.reverse_scan):
            self.w.masked.discard(self.r)  # what comes after the last row is not stored

    def begin(self) -> None:
        w, k = self.w, self.kernel
        w.line(f"fplace = pid * {self.size}")
        w.line(f"fstart = fplace // {PIECE} * {PIECE}" if self.apart else "fstart = fplace")
        w.line("fslide = fplace - fstart")
        w.line(f"flat = tl.arange(0, {power(self.size + PIECE * self.apart)})")
        w.line(f"fpiece = flat // {PIECE} * {PIECE}")
        (node,), _ = _moved(k.local, k.shape, self.x, self.r)
        mask = f"fpiece < fslide + {self.size}"
        piece = w.let(f"tl.load({k.pointer(node.arg)} + (fstart + flat), {mask}, other=0)")
        w.know(node, w.let(f"tri_rows.matrix({piece}, fslide, {self.length}, {self.r.size}, "
                           f"{self.x.block}, {self.r.block})"))  # fmt: skip

    def stores(self, store: Store, value: str) -> bool:
        """Whether a store is of a matrix: then it is done."""
        if not {self.x.var, self.r.var} <= free_vars(store.index):
            return False
        w, n, out = self.w, PIECE, self.kernel.pointer(store.buffer)
        inside = f"fpiece < {self.size}"
        if self.apart:
            w.line(f"fhead = (fslide + {n - 1}) // {n} * {n}")
            w.line(f"ftail = (fslide + {self.size}) // {n} * {n}")
            inside = "(fpiece >= fhead) & (fpiece < ftail)"
        found = w.let(f"tri_rows.in_a_row({value}, flat - fslide, {self.length})")
        w.line(f"tl.store({out} + (fstart + flat), {found}, {inside})")
        if self.apart:
            w.line(f"ftwo = tl.arange(0, {2 * n})")
            w.line(f"fat = tl.where(ftwo < {n}, ftwo, ftail - fslide + ftwo - {n})")
            w.line(f"fedge = ((ftwo < {n}) == (fat < fhead - fslide)) & (fat < {self.size})")
            ends = w.let(f"tri_rows.in_a_row({value}, fat, {self.length})")
            w.line(f"tl.store({out} + (fplace + fat), {ends}, fedge)")
        return True
