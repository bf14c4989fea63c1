"""Long rows, held by a program in pieces.

A row that is reduced and then used again is read once if its program keeps it. As floats, in one
block of a power of two, few rows fit: of 16384 elements one or two on an SM. As the sixteen bits
they have in memory, in as many pieces as they are long, four times as many do. Each piece is a
tile of its own. All of them are in flight before the first is reduced; they meet in one tile,
which is reduced among threads once. What is made of a piece is made again after each reduction:
a compiler would keep the floats instead, so it is not to know that they are the same
(`tri_rows.anew`). Rows of floats are held as they are, half as many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.config import power
from tilewright.codegen.triton.plan.row_configs import held_at_once, held_warps
from tilewright.codegen.triton.plan.tiling import Axis, Shape, cannot_hand_over
from tilewright.codegen.triton.strategies.misaligned_rows import misaligned_rows
from tilewright.codegen.triton.tile.grid_sync import leave, meet
from tilewright.codegen.triton.tile.online_softmax import OnlineReduction, joined
from tilewright.codegen.triton.tile.reduce import Reduction, reduced_type, reductions_of
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, substitute, var, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Nest, Program
from tilewright.schedule.nests.segments import Segment

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel

HELD = (torch.float16, torch.bfloat16, torch.float32)
HALVES = HELD[:2]


class Chunked:
    """The text of one kernel's rows in pieces."""

    def __init__(self, kernel: Kernel, axis: Axis) -> None:
        self.kernel, self.w, self.axis = kernel, kernel.w, axis
        self.block = kernel.shape.chunk
        size = axis.size or 0
        self.parts, self.each = kernel.shape.parts, kernel.shape.part or size
        self.several = kernel.shape.planes_each  # planes of a row
        self._first = ""  # of these
        self._plane = -1  # that was entered last
        self.before = 0  # elements before the piece that was entered last, of columns
        self._of_plane = -(-self.each // self.block)
        self.count = self.several * self._of_plane
        self.own = f"{axis.name}own" if self.parts > 1 else ""  # elements that are this program's
        self._least = size - (self.parts - 1) * self.each  # such that a program has at least
        self._joined = (
            joined(kernel.shape, kernel.local, False) if kernel.shape.row_programs else {}
        )
        self._made = kernel.shape.written
        self._rows = (columns_read(kernel.shape) if kernel.shape.across
                      else rows_read(kernel.local, kernel.shape))  # fmt: skip
        self._kept: list[dict[Expr, str]] = [{} for _ in range(self.count)]
        ends: list[dict[Expr, str]] = [{} for _ in range(self.several - 1)]
        self._kept_ends = [{} if kernel.peeled is None else kernel.peeled.kept, *ends]
        if self.parts == 1 or self.each % self.block == 0:
            self.w.blocks.rounds[axis] = "0", self.block

    def place(self) -> None:
        """Which planes of a row are this program's: the last loop of them runs fastest."""
        w, below, several = self.w, self.parts, self.several
        for v in reversed(self.kernel.shape.planes):
            size = (ix.value_of(v.src[0]) or 1) // several
            place = f"part // {below} % {size}" + (f" * {several}" if several > 1 else "")
            name = w.let(f"tl.full([1, 1], 0, {w.index_type}) + {place}", "s_")
            if several == 1:
                w.know(v, name)
            else:
                self._first = name
            below, several = below * size, 1

    @contextmanager
    def _piece(self, i: int) -> Generator[None]:
        """In the tile of a piece."""
        w, a = self.w, self.axis.name
        lean = self.kernel.peeled
        plane, k = divmod(i, self._of_plane)
        self.before = k * self.block
        with w.elsewhere(frozenset((self.axis,)), self._kept[i]):
            self._enter(plane)
            first = f"{k * self.block}" if self.parts == 1 else f"({a}first + {k * self.block})"
            if self.axis in w.blocks.rounds:
                w.blocks.rounds[self.axis] = first, self.block
            left = 0 if lean is None else lean.most_left
            masked = (k + 1) * self.block > self._least - left
            everywhere, w.masked = w.masked, w.masked - {self.axis}
            if lean is not None:
                lean.lanes(str(k), f"{a}lane < {a}tail" if masked else "")
            else:
                w.line(f"{a}index = {first} + {a}base")
                w.know(self.axis.var, f"{a}index")
                if masked:
                    w.line(f"{a}mask = {a}index < {a}{'last' if self.own else 'numel'}")
            if masked:
                w.masked = everywhere | {self.axis}
            yield
            w.masked = everywhere

    def _enter(self, plane: int) -> None:
        """Where a plane is, if a program has several."""
        if self.several == 1:
            return
        self.w.know(self.kernel.shape.planes[-1], f"({self._first} + {plane})")
        if self.kernel.peeled is not None and plane != self._plane:
            self.kernel.peeled.place_row()
            self.kernel.peeled.edges()
        self._plane = plane

    @contextmanager
    def _ends(self, plane: int) -> Generator[None]:
        """In the tile of the ends of a plane."""
        lean = self.kernel.peeled
        assert lean is not None
        lean.kept = self._kept_ends[plane]
        with lean.ends():
            self._enter(plane)
            yield

    def ends(self) -> list[Callable[[], AbstractContextManager[None]]]:
        return [partial(self._ends, plane) for plane in range(self.several)]

    def begin(self) -> None:
        """All that is loaded of a row is in flight."""
        if self.parts > 1:
            self._begin_part()
        members, made = self.kernel.shape.members, self._made
        read = [n for n in loads(*(e for m in members for e in m.exprs)) if n.arg not in made]
        rows = [n for n in read if is_own(self.kernel.shape, n)]
        if not self.kernel.shape.short:
            self._common()
        for place in (n for row in rows for n in walk(row.src[0]) if n.op == "index"):
            if self.axis.var not in free_vars(place):
                self.w.value(place)  # which row it is: gathered, and checked, once for all pieces
        if self.kernel.peeled is not None and self.several > 1:
            for ends in self.ends():
                self.kernel.peeled.fetch(ends)
        for k in range(self.count):
            with self._piece(k):
                for node in rows:
                    self.w.operand(node)
        for k in range(self.count):
            with self._piece(k):
                for node in self._rows:
                    self.w.operand(node)

    def _common(self) -> None:
        """What a row has in common, as its scale, is loaded once for all pieces: behind a store it
        would be waited for."""
        written: set[str] = set()
        inside = {self.axis.var, *self.kernel.shape.planes}
        for m in self.kernel.shape.members:
            for node in loads(*m.exprs):
                waits = any(n.op == "reduce" or n in inside or (n.op == "load" and n.arg in written)
                            for n in walk(node))  # fmt: skip
                if not waits:
                    self.w.operand(node)
            written |= m.writes

    def _begin_part(self) -> None:
        """From where to where this program has a row, and how many elements that are."""
        w, a, lean = self.w, self.axis.name, self.kernel.peeled
        w.line(f"{a}first = part % {self.parts} * {self.each}")
        if lean is None:
            w.line(f"{a}last = tl.minimum({a}first + {self.each}, {a}numel)")
            w.line(f"{a}own = {a}last - {a}first")
            return
        w.line(f"{a}own = tl.where({a}first == 0, {a}numel - {a}tail + {a}head, 0)")
        w.line(f"{a}head += {a}first")
        w.line(f"{a}tail = tl.minimum({a}head + {self.each}, {a}tail)")
        w.line(f"{a}own += {a}tail - {a}head")

    def joined(self, tile: Callable[[], str], combine: str) -> str:
        """The tiles of all pieces as one."""
        found = ""
        for k in range(self.count):
            with self._piece(k):
                one = self.w.let(tile())
                found = one if not k else self.w.let(f"{combine}({found}, {one})")
        return found

    def renew(self, after: str) -> None:
        """Once something is known, nothing is left of what was made of the pieces before."""
        if self.kernel.shape.short:
            return
        w, mark = self.w, ""
        for k, known in enumerate(self._kept):
            self._kept[k] = {e: name for e, name in known.items() if self._stays(e)}
            for e, name in self._kept[k].items():
                if e.dtype.itemsize == 2:
                    mark = mark or w.let(f"tri_rows.mark({after})")
                    self._kept[k][e] = w.let(f"tri_rows.anew({name}, {mark})")

    def _stays(self, e: Expr) -> bool:
        """Whether something is held: rows that are read, and those that are made if they are stored
        or of sixteen bits."""
        if e.op != "load" or e.arg not in self._made:
            return e in self._rows
        wide = e.dtype.itemsize > 2 and e.arg in self.kernel.local
        return not wide and is_own(self.kernel.shape, e)

    def segment(self, k: int, segment: Segment) -> None:
        """Reductions one after the other, and what is stored of rows piece by piece."""
        if self.kernel.shape.row_programs:
            self._shared(k, segment)
            return
        folds = reductions_of([m for m in segment.members if m.reduce], self.axis, self.w)
        waiting: list[Nest] = []
        for m in segment.members:
            if not m.reduce:
                waiting += [m] if self._is_kept(m) else []
                continue
            self._store(waiting)
            waiting = []
            for node in walk(*m.exprs):
                if node in folds:
                    self._in_pieces(fold := folds.pop(node))
                    fold.whole()
            self.kernel.stores([m])
        self._store(waiting)

    def _in_pieces(self, fold: Reduction) -> None:
        fold.pieces = self
        fold.ends = None if self.kernel.peeled is None else self.kernel.peeled.ends

    def _shared(self, k: int, segment: Segment) -> None:
        """The same where others have parts of the row too: they meet once for all reductions."""
        kernel, w = self.kernel, self.w
        self._store([m for m in segment.members if not m.reduce and self._is_kept(m)])
        folded = [m for m in segment.members if m.reduce]
        if k in self._joined:
            for pair in self._joined[k].pairs:
                kernel.online[pair.total].finish(pair.total)
        elif folds := reductions_of(folded, self.axis, w):
            for pair in (p for j in self._joined.values() if j.first == k for p in j.pairs):
                fold = OnlineReduction(
                    pair, folds[pair.largest], w, rules.SOFTMAX_SIDE.limit, False
                )
                folds[pair.largest] = kernel.online[pair.total] = fold
            for fold in folds.values():
                self._in_pieces(fold)
            meet(kernel, list(folds.values()))
            self._leave(k)
        kernel.stores(folded)

    def _leave(self, k: int) -> None:
        """Once all reductions are known, before rows are stored: those would be waited for."""
        left = [s for n, (s, axis) in enumerate(self.kernel.shape.segments)
                if n > k and axis is not None and n not in self._joined]  # fmt: skip
        if not any(m.reduce for s in left for m in s.members):
            leave(self.kernel)

    def _is_kept(self, nest: Nest) -> bool:
        """Whether rows are stored, or held instead of those they are made of; others are made where
        they are used."""
        sizes = {s.buffer: self.kernel.buffers[s.buffer].dtype.itemsize for s in nest.stores}
        return any(size == 2 or b not in self.kernel.local for b, size in sizes.items())

    def _fetch(self, k: int, members: Sequence[Nest]) -> None:
        """Load what rows have in common for a piece, as weights, before the piece before it is
        stored: for all that a compiler knows, that might be to the same memory (H200: layer norm of
        3000 rows of 20000 bfloat16 64.4 us, 67.6 us; of 1700 of 18000 floats 67.1 us, 70.6 us)."""
        if k == self.count or self.kernel.peeled is not None:
            return
        alike = frozenset((self.axis.var,))
        with self._piece(k):
            for node in loads(*(e for m in members for e in m.exprs)):
                if free_vars(node.src[0]) == alike and not node.src[1:]:
                    self.w.operand(node)

    def _store(self, members: Sequence[Nest]) -> None:
        if not members:
            return
        self._fetch(0, members)
        for k in range(self.count):
            self._fetch(k + 1, members)
            with self._piece(k):
                self.kernel.stores(members)
        for ends in self.ends() if self.kernel.peeled is not None else ():
            with ends():
                self.kernel.stores(members)


def chunked_rows(facts: KernelFacts) -> Shape | str:
    """The shape with rows in pieces, where they are many, long, and used again after a reduction
    (H200: softmax of 7000 rows of 13813 bfloat16 97 us, 113 us as floats; of 4000 of 20000 79
    us, 97 us walked twice; layer norm of 6000 of 9000 56 us, 71 us; log softmax of 3021 of 36440
    109 us, 129 us; group norm of 1024 of 40960 49 us, 56 us)."""
    program, group, shape = facts.program, facts.group, facts.shape
    if reason := facts.not_rows or facts.scatters or facts.finds_places or facts.draws:
        return reason
    if shape.row_programs:
        return "several programs share a row already"
    if not shape.reread:
        return "rows are read once"
    size = facts.length
    if size <= rules.ONE_BLOCK_ROW.limit:
        return f"rows have at most {rules.ONE_BLOCK_ROW.limit} elements: one block holds them"
    if facts.rows < rules.CHUNKED_PER_SM.limit * facts.target.sms:
        return f"fewer than {rules.CHUNKED_PER_SM.limit} rows for each SM"
    if is_expensive_to_repeat(shape):
        return "what is computed of rows is too expensive to repeat after each reduction"
    rows = rows_read(group.local, facts.flat)
    count = sum(n.dtype.itemsize for n in rows) // 2
    most = (
        rules.CHUNKED_FLOATS.limit
        if [n.dtype.itemsize for n in rows] == [4]
        else rules.CHUNKED_ROW.limit
    )
    most = rules.CHUNKED_ROWS.limit if len(rows) > 1 and _joins_rows(program, shape) else most
    if not count:
        return "no row of floats is read along memory"
    if size * count > most:
        return f"rows of {size * count} sixteen-bit values do not fit in registers ({most} do)"
    if reason := cannot_hand_over(group, replace(shape, persistent=False)):
        return reason
    form = misaligned_rows(
        program, group, replace(shape, persistent=True, pipelined=False, chunk=size)
    )
    leans = form.inner[0].start is not None
    if not leans and form.misaligned:
        return "rows are misaligned, and not all of them alike"
    if not leans and _is_held_as_floats(shape, size, len(rows)):
        return "rows fit in registers as one block of floats"
    return replace(form, chunk=32 * held_at_once(form) * held_warps(size * count, leans))


def _is_held_as_floats(shape: Shape, size: int, count: int) -> bool:
    """Whether rows fit as one block of floats, and are no slower so: all but those that leave
    much of it empty and are reduced for their mean and deviations."""
    empty = 4 * size <= 3 * power(size)
    return shape.persistent and not (empty and count == 1 and "welford" in shape.reductions)


def rows_read(local: frozenset[str], flat: Shape) -> list[Expr]:
    """The rows that a program reads, or makes of narrower ones, as of a gradient and a mask; none
    if some are no floats, or lie otherwise."""
    (axis,), x = flat.inner, flat.parallel[0]
    made = flat.written
    stored = [s.index for s in flat.stores if axis.var in free_vars(s.index)]
    if not all(_runs_along(i, axis) for i in stored):
        return []
    found: dict[Expr, None] = {}
    waiting = [e for m in flat.members for e in m.exprs]
    seen: set[Expr] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if _is_made_of_rows(flat, node, made):
            found[node] = None
            continue
        waiting += node.src
        if node.op != "load" or node.arg in local:
            continue
        if not is_own(flat, node):
            steps = ix.coefficient(node.src[0], axis.var) is not None
            if steps and {axis.var, x.var} <= free_vars(node):
                return []
        elif node.dtype not in HELD or node.src[1:]:
            return []
        elif node.arg not in made:
            found[node] = None
    return list(found)


def columns_read(flat: Shape) -> list[Expr]:
    """The same of columns, which a program of these holds all of."""
    made = flat.written
    nodes = loads(*(e for m in flat.members for e in m.exprs))
    return [n for n in nodes if n.arg not in made and is_own(flat, n)]


def _is_made_of_rows(flat: Shape, node: Expr, made: frozenset[str]) -> bool:
    """Whether sixteen bits are made of rows some of which are narrower."""
    if node.op == "load" or node.dtype not in HALVES:
        return False
    parts = loads(node)
    if not any(n.dtype.itemsize == 1 for n in parts) or any(
        n.op in ("reduce", "scan", "index") for n in walk(node)
    ):
        return False
    return all(is_own(flat, n) and not n.src[1:] and n.arg not in made
               and n.dtype.itemsize <= 2 for n in parts)  # fmt: skip


def _joins_rows(program: Program, shape: Shape) -> bool:
    """Whether a row of sixteen bits is made before the first reduction: it is held instead of
    others."""
    first = next(s for s, axis in shape.segments if axis is not None)
    return any(program.buffers[s.buffer].dtype.itemsize == 2
               for m in first.members if not m.reduce for s in m.stores)  # fmt: skip


def is_expensive_to_repeat(shape: Shape) -> bool:
    """Whether something takes long that would be computed again after each reduction, or a
    reduction is not of floats."""
    *before, _ = [s for s, axis in shape.segments if axis is not None]
    members = [m for s in before for m in s.members]
    folds = [n for m in members for n in walk(*m.exprs) if n.op == "reduce"]
    again = walk(*(e for n in folds for e in n.src),
                 *(e for m in members if not m.reduce for e in m.exprs))  # fmt: skip
    least = rules.RECOMPUTED_COST.limit
    return any(n.op in ("scan", "index") or (
        n.op in TABLE and n.op != "exp" and TABLE[n.op].cost >= least) for n in again) or any(
        reduced_type(n.src[0].dtype) != torch.float32 for n in folds)  # fmt: skip


def is_own(shape: Shape, node: Expr) -> bool:
    """Whether a load is of a row of its own for every program, or of columns."""
    (axis,), index = shape.inner, node.src[0]
    if shape.across:
        return {axis.var, shape.parallel[0].var} <= free_vars(index)
    return _runs_along(index, axis) and shape.parallel[0].var in free_vars(index)


def _runs_along(index: Expr, axis: Axis) -> bool:
    """Whether memory does, in one piece or in planes of whole pieces of sixteen bytes (H200: batch
    norm of 1024 rows of 8 planes of 64x64 bfloat16 48 us, 68 us walked)."""
    if ix.coefficient(index, axis.var) is ix.ONE:
        return True
    lengths = {n.src[1] for n in walk(index) if n.op == "imod" and n.src[0] is axis.var}
    if len(lengths) != 1 or (ix.value_of(length := lengths.pop()) or 1) % 8:
        return False
    place = var("place", length)
    swap = {ix.mod(axis.var, length): place, ix.floordiv(axis.var, length): ix.ZERO}
    plain = substitute(index, swap)
    return ix.coefficient(plain, place) is ix.ONE and axis.var not in free_vars(plain)
