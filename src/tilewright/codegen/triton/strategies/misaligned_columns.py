"""Columns of misaligned rows in memory, reduced sixteen bytes at once.

Rows that are as many apart as there are elements in sixteen bytes begin alike. A tile has so
many rows, and of each of them whole pieces are loaded, from the one on that its first column is
in. What these lanes of rows have reduced in the end is moved into place, once for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.column_configs import STEP, pieces_of
from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.codegen.triton.tile.interleaved import is_even
from tilewright.codegen.triton.tile.lower import Writer
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, substitute, var, walk
from tilewright.ir.program import Nest, Store
from tilewright.schedule.split.cyclic import may_slide

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel
    from tilewright.codegen.triton.tile.reduce import Reduction


def misaligned_columns(facts: KernelFacts) -> Shape | str:
    """The shape with columns that are loaded so, where they are only reduced."""
    shape = facts.shape
    if reason := facts.not_columns or facts.draws:
        return reason
    if shape.row_programs or shape.column_threads or shape.prefetched_scan:
        return "threads or programs have parts of columns"
    walks = [segment for segment, axis in facts.flat.segments if axis is not None]
    if len(walks) != 1:
        return "columns are read again after a reduction"
    (x,), (r,) = shape.parallel, shape.inner
    nodes = _tiles(walks[0].members, x, r)
    if len({(n.src, n.dtype.itemsize) for n in nodes}) != 1:
        return "not one matrix is only reduced"
    index, size = nodes[0].src[0], nodes[0].dtype.itemsize
    kinds = {n.arg.kind for m in walks[0].members for n in walk(*m.exprs) if n.op == "reduce"}
    length, rows = length_of(index, x), r.size or 0
    if not length or is_even(index, x, 4):
        return "rows are aligned"
    if not may_slide(kinds, x.likely, length, rows, size, facts.target):
        return "rows are too short or too few, or the reduction needs places"
    return replace(shape, staged=length, persistent=False, pipelined=False)


def _tiles(members: Sequence[Nest], x: Axis, r: Axis) -> list[Expr]:
    """What is loaded at all points of a tile, if nothing else goes along its columns, and all
    members reduce."""
    roots = [n for m in members for e in m.exprs for n in walk(e) if n.op == "reduce"]
    found = [n for n in loads(*roots) if x.var in free_vars(n)]
    seen, waiting = set[Expr](found), list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.src
    even = all(len(n.src) == 1 and ix.coefficient(n.src[0], r.var) for n in found)
    return found if even and x.var not in seen and all(m.reduce for m in members) else []


def length_of(index: Expr, x: Axis) -> int:
    """How many columns are side by side in memory; none: that is not known."""
    if ix.coefficient(index, x.var) is ix.ONE:
        return x.size or 0
    parts = [n for n in walk(index) if n.op in ("imod", "ifloordiv") and x.var in free_vars(n)]
    lengths = {ix.value_of(n.src[1]) if n.src[0] is x.var else None for n in parts}
    (length,) = lengths if len(lengths) == 1 else (None,)
    whole = is_even(index, x, 1) and length and (x.size or 1) % length == 0
    return length or 0 if whole else 0


def walk_ahead(w: Writer, r: Axis, taken: Mapping[Expr, str], fetch: Callable[[str], None],
               round_: Callable[[], None]) -> None:  # fmt: skip
    """All blocks of an axis, the next of which is fetched before a round; `taken` says what the
    text of the one at hand is."""
    a = r.name
    fetch("0")
    with w.block(f"for {a}offset in range(0, {a}numel, {r.block})"):
        for node, text in taken.items():
            w.know_blank(node, w.let(text))
        fetch(f"({a}offset + {r.block})")
        w.line(f"{a}index = {a}offset + {a}base")
        w.line(f"{a}mask = {a}index < {a}numel")
        w.know(r.var, f"{a}index")
        round_()


class Staged:
    """The text of a kernel whose rows, so many columns of each, pass through shared memory."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.w, self.length = kernel, kernel.w, kernel.shape.staged
        (self.x,), (self.r,) = kernel.shape.parallel, kernel.shape.inner

    @property
    def grid(self) -> list[tuple[Expr, str]]:
        """A program for each matrix."""
        return [(ix.floordiv(self.x.extent, ix.as_index(self.length)), "1")]

    def columns(self) -> None:
        """Which columns are this program's: those of its matrix."""
        w, n = self.w, self.length
        w.line(f"xlane = {self.kernel.lanes(self.x)}")
        w.line(f"xbase = pid * {n} + xlane")
        w.line(f"xmask = xlane < {n}")
        w.masked |= {self.x, self.r}
        w.know(self.x.var, "xbase")

    def begin(self) -> None:
        """Where its rows are."""

    def walk(self, round_: Callable[[], None]) -> None:
        """All rows, round by round, where they are walked."""

    def end(self, folds: Sequence[Reduction]) -> None:
        """What is left to do once they are reduced."""

    def stores(self, store: Store, value: str) -> bool:
        """Whether a store is of whole rows: then it is done."""
        return False


class MisalignedColumns(Staged):
    """The text of one kernel's columns that are loaded so."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        walks = [segment for segment, axis in kernel.shape.segments if axis is not None]
        self.nodes = _tiles(walks[0].members, self.x, self.r)
        self.piece = pieces_of(self.nodes[0].dtype)
        self.first = var("xat", self.x.extent)  # the first column of a program

    @property
    def grid(self) -> list[tuple[Expr, str]]:
        count = ix.floordiv(self.x.extent, ix.as_index(self.length))
        return [(count, "1"), (ix.as_index(self.length), STEP)]

    def columns(self) -> None:
        """Which columns are this program's."""
        w, x, n = self.w, self.x, self.length
        w.line(f"xtiles = ({n} + {STEP} - 1) // {STEP}")
        w.line(f"xlane = {self.kernel.lanes(x)}")
        w.line(f"xfirst = pid % xtiles * {STEP}")
        w.line(f"xat = pid // xtiles * {n} + xfirst")
        w.line("xbase = xat + xlane")
        w.line(f"xmask = (xlane < {STEP}) & (xfirst + xlane < {n})")
        w.masked |= {x, self.r}
        w.know(x.var, "xbase")
        w.know(self.first, "xat")

    def begin(self) -> None:
        """Where the first piece of each row begins, and how far before its first column."""
        w, n = self.w, self.piece
        with w.apart():
            w.know(self.r.var, f"{self.r.name}base")
            place = w.let(w.index(substitute(self.nodes[0].src[0], {self.x.var: self.first})))
        w.line(f"xstart = {place} // {n} * {n}")
        w.line(f"xslide = {place} - xstart")
        w.line(f"xinside = xlane // {n} * {n} < {self.length} - xfirst + xslide")

    def walk(self, round_: Callable[[], None]) -> None:
        """All rows, with those of the next round in flight: else the compiler has few loads wait
        for each other, for their registers."""
        ahead = {node: self.w.fresh("next") for node in self.nodes}
        walk_ahead(self.w, self.r, ahead, partial(self._fetch, ahead), round_)

    def _fetch(self, ahead: dict[Expr, str], first: str) -> None:
        """Of the last row too whole pieces: some bytes behind it, that nobody looks at."""
        w, a = self.w, self.r.name
        wide = first if w.index_type == "tl.int32" else f"(tl.zeros([1, 1], tl.int64) + {first})"
        for node, name in ahead.items():
            step = ix.coefficient(node.src[0], self.r.var)
            assert step is not None
            start = f"{self.kernel.pointer(node.arg)} + {wide}*{w.index(step)}"
            mask = f"({first} + {a}base < {a}numel) & xinside"
            w.line(f"{name} = tl.load({start} + (xstart + xlane), {mask}, other=0)")

    def end(self, folds: Sequence[Reduction]) -> None:
        for fold in folds:
            self.w.line(f"{fold.name} = tri_rows.slid_back({fold.name}, xslide)")
