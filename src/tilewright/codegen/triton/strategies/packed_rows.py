"""Short misaligned rows, one right after the other in memory.

So many of them as a program has are one piece of memory, which begins with sixteen bytes: it is
loaded as one, and turned through shared memory, so that a few threads have a row and reduce it
almost alone. What is stored of rows is computed once more, from the piece as it was loaded and
what its rows were reduced to, and stored as one. Rows that are left over by pieces are the last
program's, as other kernels have theirs (H200: log softmax of 3000000 rows of 33 bfloat16 117 us,
329 us by single elements; softmax of 85 116 us, 132 us; sums of 900001 rows of 71 float16 41 us,
71 us).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tilewright import rules
from tilewright.codegen.triton.analysis.operations import scatters
from tilewright.codegen.triton.analysis.quantise import is_far_from_zero
from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.codegen.triton.tile.lower import RANDOM, is_index
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars
from tilewright.ir.program import Nest, Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.nests.hints import hint_product

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel
from tilewright.codegen.triton.launch import TritonKernel
from tilewright.target import PIECE


def is_packed(program: Program, group: Group, shape: Shape, flat: Shape) -> bool:
    """Whether all that a kernel loads and stores of its rows lies so."""
    if (
        not shape.persistent
        or shape.serial
        or shape.row_programs
        or shape.ragged
        or shape.rank != 2
    ):
        return False
    if not shape.ops.isdisjoint(RANDOM) or shape.scans:
        return False
    (x,), (r,) = flat.parallel, flat.inner
    if r.size is None or not PIECE <= r.size <= rules.PACKED_ROW.limit:
        return False
    if hint_product((x.extent, r.extent)) < rules.PACKED_ELEMENTS.limit or any(
        scatters(m) for m in flat.members
    ):
        return False
    place = ix.add(ix.mul(x.var, r.extent), r.var)
    read = [n for n in flat.loads if n.arg not in group.local]
    rows = [n for n in read if r.var in free_vars(n.src[0])]
    stores = [s for s in flat.stores if s.buffer not in group.local]
    written = [s.index for s in stores if r.var in free_vars(s.index)]
    return (
        all(n.src == (place,) and n.dtype.itemsize <= rules.PACKED_BYTES.limit for n in rows)
        and all(index is place for index in written)
        and not {n.arg for n in rows} & {s.buffer for s in stores}
    )


class Packed:
    """The text of one kernel's rows that lie so."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.w = kernel, kernel.w
        (self.x,), (self.r,) = kernel.shape.parallel, kernel.shape.inner
        self._loaded: dict[Expr, str] = {}
        self._kept: dict[Expr, str] = {}  # what is known of the piece
        self._divided: dict[Expr, str] = {}  # text of divisions by what a row has
        self._lanes = f"{self.x.block} * {self.r.block} // {PIECE}"

    @classmethod
    def of(cls, kernel: Kernel) -> Packed | None:
        return cls(kernel) if kernel.shape.packed else None

    @property
    def rounded(self) -> str:
        """Behind the number of rows: as many as whole pieces are of."""
        return "" if ix.mod(self.x.extent, PIECE) is ix.ZERO else f" // {PIECE} * {PIECE}"

    def begin(self) -> None:
        w, length = self.w, self.r.size
        w.line(f"fstart = pid * {self.x.block} * {length}")
        w.line(f"ffirst = tl.arange(0, {self._lanes})[:, None] * {PIECE}")
        w.line(f"flat = ffirst + tl.arange(0, {PIECE})[None, :]")
        left = f" & (ffirst < (xnumel - pid * {self.x.block}) * {length})"
        w.line(f"fmask = (ffirst < {self.x.block} * {length}){left if self.x in w.masked else ''}")
        w.line(f"frow = ffirst // {length}")
        w.line(f"fnext = flat >= (frow + 1) * {length}")

    # ---- what is loaded

    def load(self, node: Expr) -> str:
        """A tile of rows, one below the other; nothing where a load is of no rows."""
        if self.r.var not in free_vars(node.src[0]):
            return ""
        return f"tri_rows.turned({self._flat(node)}, {self.r.size}, {self.x.block}, {self.r.block})"

    def _flat(self, node: Expr) -> str:
        if node not in self._loaded:
            pointer = self.kernel.pointer(node.arg)
            text = f"tl.load({pointer} + (fstart + flat), fmask, other=0)"
            self._loaded[node] = self.w.let(text)
        return self._loaded[node]

    # ---- what is stored

    def stores(self, nest: Nest) -> bool:
        """Whether a nest stores rows: then it has done so."""
        kernel, w = self.kernel, self.w
        if not any(self.r.var in free_vars(s.index) for s in nest.stores):
            return False
        for store in nest.stores:
            if store.buffer in kernel.local:
                kernel.stores([replace(nest, stores=(store,))])
                continue
            self._look_up(store.value)
            with self._as_piece():
                value = w.let(kernel.value(store))
                place = f"{kernel.pointer(store.buffer)} + (fstart + flat)"
                w.line(f"tl.store({place}, {value}, fmask)")
        return True

    def _look_up(self, root: Expr) -> None:
        """Make known of the piece what it is computed from: what was loaded of it, and what each
        row has as a whole."""
        w, seen = self.w, set[Expr]()
        stack = [root]
        while stack:
            node = stack.pop()
            if node in seen or node in self._kept or is_index(node) or node.is_const:
                continue
            seen.add(node)
            if node.op == "load" and node.arg in self.kernel.local:
                stack += [self.kernel.maker(node).value, *node.src[1:]]
            elif self.r not in w.support(node):
                if w.support(node):
                    self._kept[node] = self._of_rows(w.operand(node), node.dtype == torch.bool)
            elif node.op == "load":
                self._kept[node] = self._flat(node)
            elif node.op == "div" and self.r not in w.support(node.src[1]):
                stack.append(node.src[0])
                self._divisor(node)
            else:
                stack += node.src

    def _divisor(self, node: Expr) -> None:
        """The reciprocal of what a row is divided by is computed once for the row."""
        w = self.w
        by = w.operand(node.src[1])
        if node in w.numerics.coarse:
            self._divided[node] = f"({{0}} * {self._of_rows(w.let(f'1.0 / {by}'))})"
            return
        names = [w.fresh() for _ in range(3)]
        w.line(f"{', '.join(names)} = tri_rows.divisor({by})")
        if is_far_from_zero(node.src[1], w.numerics.made):
            looked_up = ", ".join(("1.0", *(self._of_rows(name) for name in names[1:])))
        else:
            looked_up = ", ".join(self._of_rows(name) for name in names)
        self._divided[node] = f"tri_rows.quotient({{0}}, {looked_up})"

    def _of_rows(self, name: str, truth: bool = False) -> str:
        if truth:
            return self.w.let(f"tri_rows.of_rows({name}.to(tl.int32), frow, fnext) != 0")
        return self.w.let(f"tri_rows.of_rows({name}, frow, fnext)")

    @contextmanager
    def _as_piece(self) -> Generator[None]:
        w = self.w
        numerics = w.numerics
        with w.elsewhere(frozenset((self.x, self.r)), self._kept):
            w.know(self.x.var, f"(pid * {self.x.block} + frow + fnext.to({w.index_type}))")
            w.know(self.r.var, f"(flat - (frow + fnext.to({w.index_type})) * {self.r.size})")
            w.ends_of_rows |= {self.r: (self._lanes, "fmask"), self.x: (str(PIECE), "")}
            w.computes(coarse={**numerics.coarse, **self._divided})
            yield
            w.numerics = numerics
            del w.ends_of_rows[self.r], w.ends_of_rows[self.x]


def with_rest(kernel: Kernel, rest: Kernel, name: str) -> TritonKernel:
    """A kernel of packed rows, and of those that are left over another, in programs of a piece of
    rows."""
    (x,) = kernel.shape.parallel
    packed = kernel.packed
    assert packed is not None
    rest.arguments = kernel.arguments
    rest.early, rest.first = False, f"(tl.program_id(0) * 0 + {rest.w.index(x.extent)} // {PIECE})"
    kernel.body()
    lines = kernel.w.lines
    if packed.rounded:
        rest.body()
        lines += [f"    if (tl.program_id(0) + 1) * {x.block} < {kernel.w.index(x.extent)}:",
                  "        return",
                  *(line.replace(x.block, str(PIECE)) for line in rest.w.lines)]  # fmt: skip
    kernel.checked = kernel.checked or rest.checked
    return kernel.whole(name, lines)
