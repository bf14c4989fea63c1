"""Columns of odd rows that are scanned: rows as one piece of memory, turned in shared memory.

Eight rows that lie one after the other are a multiple of sixteen bytes, however long they are.
So many, or a multiple of that, are loaded as one, sixteen bytes at once, turned such that
threads have whole columns, and what is scanned is turned back and stored as one. A program has a
matrix of such rows, and the next of them in flight (H200: cumulative sums over 1 of 4000x128x127
bfloat16 69 us, 126 us by single elements; of 2000x96x203 47 us, 82 us; of 300x200x1001 94 us,
128 us; of 34538x64x71 209 us, 245 us). Matrices that begin between two places of sixteen bytes
are not moved so: their ends would be stored one by one (of 317x351x391 91 us, 90 us; of
20000x33x65 222 us, 62 us).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tilewright import rules
from tilewright.codegen.triton.analysis.accesses import sizes
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.column_configs import at_once
from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.codegen.triton.strategies.misaligned_columns import Staged, length_of, walk_ahead
from tilewright.codegen.triton.strategies.small_matrices import by_rows, is_matrix
from tilewright.ir.expr import free_vars
from tilewright.ir.program import Store
from tilewright.target import PIECE

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel


def misaligned_scans(facts: KernelFacts) -> Shape | str:
    """The shape with columns that are scanned so, where all that is moved are such matrices."""
    program, shape, flat = facts.program, facts.shape, facts.flat
    (x,), (r,) = flat.parallel, flat.inner
    nodes = list(dict.fromkeys(flat.loads))
    stores = flat.stores
    if len(nodes) != 1 or len(stores) != 1 or nodes[0].src != (stores[0].index,):
        return "not one matrix is read and one like it written"
    index, rows, length = stores[0].index, r.size or 0, length_of(stores[0].index, x)
    if set(sizes(program, flat)) != {2} or nodes[0].arg == stores[0].buffer:
        return "elements have not two bytes, or are written in place"
    shortest, longest = rules.SCANNED_ROW.limit, rules.LONGEST_SCANNED_ROW.limit
    fewest = rules.SCANNED_MATRIX_ROWS.limit
    if not shortest <= length <= longest or rows < fewest or rows * length % PIECE:
        return f"matrices do not have {fewest} rows of {shortest} to {longest} elements"
    if not is_matrix(index, x, r, length) or at_once(program, shape) > 2:
        return "rows of a matrix do not lie one after the other, or are aligned"
    if x.likely < rules.SCANNED_MATRICES_PER_SM.limit * length * facts.target.sms:
        return f"fewer than {rules.SCANNED_MATRICES_PER_SM.limit} matrices for each SM"
    return replace(by_rows(shape, length), persistent=False)


class MisalignedScans(Staged):
    """The text of one kernel's matrices."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        (self.node,) = set(kernel.shape.loads)

    def begin(self) -> None:
        w = self.w
        w.line(f"fstart = pid * ({self.r.name}numel * {self.length})")
        w.line(f"flat = tl.arange(0, {self.x.block} * {self.r.block})")
        w.line(f"fpiece = flat // {PIECE} * {PIECE}")

    def walk(self, round_: Callable[[], None]) -> None:
        ahead = self.w.fresh("next")
        turned = f"tri_rows.stacked({ahead}, {self.length}, {self.x.block}, {self.r.block})"
        walk_ahead(self.w, self.r, {self.node: turned}, partial(self._fetch, ahead), round_)

    def _fetch(self, name: str, first: str) -> None:
        place, mask = self._part(first)
        pointer = self.kernel.pointer(self.node.arg)
        self.w.line(f"{name} = tl.load({pointer} + {place}, {mask}, other=0)")

    def _part(self, first: str) -> tuple[str, str]:
        """Where the rows from one on are in memory, and whether they are in the matrix."""
        a, n = self.r.name, self.length
        rows = f"tl.minimum({a}numel - {first}, {self.r.block})"
        return f"(fstart + {first} * {n} + flat)", f"fpiece < {rows} * {n}"

    def stores(self, store: Store, value: str) -> bool:
        """Whether a store is of such rows: then it is done."""
        if self.r.var not in free_vars(store.index):
            return False
        place, mask = self._part(f"{self.r.name}offset")
        found = self.w.let(f"tri_rows.in_a_row({value}, flat, {self.length})")
        self.w.line(f"tl.store({self.kernel.pointer(store.buffer)} + {place}, {found}, {mask})")
        return True
