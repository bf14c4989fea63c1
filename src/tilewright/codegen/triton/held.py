"""Long rows, held by a program in pieces.

A row that is folded and then used again is read once if its program keeps it. As floats, in one
block of a power of two, few rows fit: of 16384 elements one or two on a processor. As the sixteen
bits they have in memory, in as many pieces as they are long, four times as many do. Each piece is a
tile of its own. All of them are under way before the first is folded; they meet in one tile, which
is folded among threads once. What is made of a piece is made again after each fold: a compiler
would keep the floats instead, so it is not to know that they are the same (`tri_rows.anew`). Rows
of floats are held as they are, half as many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tilewright.codegen.triton.configs import folds, held_at_once, held_warps, power
from tilewright.codegen.triton.emit import RANDOM
from tilewright.codegen.triton.folds import folded_type, folds_of
from tilewright.codegen.triton.leaning import leaning
from tilewright.codegen.triton.shape import (
    LONGEST_PASS,
    Axis,
    Shape,
    cannot_hand_over,
    scatters,
    uses,
)
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Nest, Program
from tilewright.schedule.group import Group
from tilewright.schedule.segments import Segment
from tilewright.target import Target

if TYPE_CHECKING:
    from tilewright.codegen.triton.kernel import Kernel

MOST_HELD = 40 << 10  # elements of a row of which two programs on a processor hold one each
MOST_READ = 46 << 10  # the same of several rows, where one is made of them (H200: residual RMS norm
# of 4211 rows of 22847 191 us, 208 us walked; gradient of softmax of 23000, of both 134 us, 115 us)
FEWEST = 4  # rows for each processor
PLACES = ("argmin", "argmax")
HELD = (torch.float16, torch.bfloat16, torch.float32)
DEAR = 20  # what an operation costs that is not done several times


class Held:
    """The text of one kernel's rows in pieces."""

    def __init__(self, kernel: Kernel, axis: Axis) -> None:
        self.kernel, self.w, self.axis = kernel, kernel.w, axis
        self.block = kernel.shape.held
        self.count = -(-(axis.size or 0) // self.block)
        self._kept: list[dict[Expr, str]] = [{} for _ in range(self.count)]
        self.w.rounds[axis] = "0", self.block

    @contextmanager
    def _piece(self, k: int) -> Generator[None]:
        """In the tile of a piece."""
        w, a = self.w, self.axis.name
        lean = self.kernel.lean
        with w.elsewhere(frozenset((self.axis,)), self._kept[k]):
            w.rounds[self.axis] = f"{k * self.block}", self.block
            least = (self.axis.size or 0) - (0 if lean is None else lean.most_left)
            masked = (k + 1) * self.block > least
            everywhere, w.masked = w.masked, w.masked - {self.axis}
            if lean is not None:
                lean.lanes(str(k), f"{a}lane < {a}tail" if masked else "")
            else:
                w.line(f"{a}index = {k * self.block} + {a}base")
                w.know(self.axis.var, f"{a}index")
                if masked:
                    w.line(f"{a}mask = {a}index < {a}numel")
            if masked:
                w.masked = everywhere | {self.axis}
            yield
            w.masked = everywhere

    def begin(self) -> None:
        """All that is loaded of a row is under way."""
        members = self.kernel.shape.members
        made = frozenset[str]().union(*(m.writes for m in members))
        rows = [n for n in loads(*(e for m in members for e in m.exprs))
                if is_own(self.kernel.shape, n) and n.arg not in made]  # fmt: skip
        for k in range(self.count):
            with self._piece(k):
                for node in rows:
                    self.w.operand(node)

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
        if self.kernel.shape.tiled:
            return
        w, mark = self.w, ""
        for k, known in enumerate(self._kept):
            self._kept[k] = {e: name for e, name in known.items() if e.op == "load"
                             and self._stays(e)}  # fmt: skip
            for e, name in self._kept[k].items():
                if e.dtype.itemsize == 2:
                    mark = mark or w.let(f"tri_rows.mark({after})")
                    self._kept[k][e] = w.let(f"tri_rows.anew({name}, {mark})")

    def _stays(self, node: Expr) -> bool:
        """Whether a row is held: all that are read or stored, and those of sixteen bits."""
        wide = node.dtype.itemsize > 2 and node.arg in self.kernel.local
        return not wide and is_own(self.kernel.shape, node)

    def segment(self, segment: Segment) -> None:
        """Folds one after the other, and what is stored of rows piece by piece."""
        folds = folds_of([m for m in segment.members if m.reduce], self.axis, self.w)
        waiting: list[Nest] = []
        for m in segment.members:
            if not m.reduce:
                waiting += [m] if self._is_kept(m) else []
                continue
            self._store(waiting)
            waiting = []
            for node in walk(*m.exprs):
                if node in folds:
                    fold = folds.pop(node)
                    fold.pieces = self
                    fold.ends = None if self.kernel.lean is None else self.kernel.lean.ends
                    fold.whole()
            self.kernel.stores([m])
        self._store(waiting)

    def _is_kept(self, nest: Nest) -> bool:
        """Whether rows are stored, or held instead of those they are made of; others are made where
        they are used."""
        sizes = {s.buffer: self.kernel.buffers[s.buffer].dtype.itemsize for s in nest.stores}
        return any(size == 2 or b not in self.kernel.local for b, size in sizes.items())

    def _fetch(self, k: int, members: Sequence[Nest]) -> None:
        """Load what rows have in common for a piece, as weights, before the piece before it is
        stored: for all that a compiler knows, that might be to the same memory (H200: layer norm of
        3000 rows of 20000 bfloat16 64.4 us, 67.6 us; of 1700 of 18000 floats 67.1 us, 70.6 us)."""
        if k == self.count or self.kernel.lean is not None:
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
        if self.kernel.lean is not None:
            self.kernel.lean.store_ends(members)


def holding(program: Program, group: Group, shape: Shape, target: Target) -> Shape:
    """The shape with rows in pieces, where they are many, long, and used again after a fold (H200:
    softmax of 7000 rows of 13813 bfloat16 97 us, 113 us as floats; of 4000 of 20000 79 us, 97 us
    walked twice; layer norm of 6000 of 9000 56 us, 71 us; log softmax of 3021 of 36440 109 us,
    129 us; group norm of 1024 of 40960 49 us, 56 us)."""
    if shape.rank != 2 or shape.across or shape.serial or shape.shared or shape.ragged:
        return shape
    if len(shape.inner) != 1 or not shape.again or uses(shape.members, *RANDOM):
        return shape
    size = shape.inner[0].size or 0
    if size <= LONGEST_PASS or shape.parallel[0].likely < FEWEST * target.sms:
        return shape
    if any(scatters(m) for m in shape.members) or folds(shape, *PLACES) or is_dear(shape):
        return shape
    rows = _rows(group, shape.flat())
    count = sum(n.dtype.itemsize for n in rows) // 2
    most = MOST_READ if len(rows) > 1 and _joins_rows(program, shape) else MOST_HELD
    if not 0 < size * count <= most or cannot_hand_over(group, replace(shape, persistent=False)):
        return shape
    form = leaning(program, group, replace(shape, persistent=True, ahead=False, held=size))
    leans = form.inner[0].lean is not None
    if not leans and (form.odd or _is_held_as_floats(shape, size, len(rows))):
        return shape
    return replace(form, held=32 * held_at_once(form) * held_warps(size * count, leans))


def _is_held_as_floats(shape: Shape, size: int, count: int) -> bool:
    """Whether rows fit as one block of floats, and are no slower so: all but those that leave much
    of it empty and are folded for their mean and deviations."""
    empty = 4 * size <= 3 * power(size)
    return shape.persistent and not (empty and count == 1 and folds(shape, "welford"))


def _rows(group: Group, flat: Shape) -> set[Expr]:
    """The rows that a program reads; none if some are no floats, or lie otherwise."""
    (axis,), x = flat.inner, flat.parallel[0]
    made = {b for m in flat.members for b in m.writes}
    stored = [s.index for m in flat.members for s in m.stores if axis.var in free_vars(s.index)]
    if any(ix.coefficient(i, axis.var) is not ix.ONE for i in stored):
        return set()
    found: set[Expr] = set()
    for node in (n for m in flat.members for n in loads(*m.exprs) if n.arg not in group.local):
        if not is_own(flat, node):
            steps = ix.coefficient(node.src[0], axis.var) is not None
            if steps and {axis.var, x.var} <= free_vars(node):
                return set()
        elif node.dtype not in HELD or node.src[1:]:
            return set()
        elif node.arg not in made:
            found.add(node)
    return found


def _joins_rows(program: Program, shape: Shape) -> bool:
    """Whether a row of sixteen bits is made before the first fold: it is held instead of others."""
    first = next(s for s, axis in shape.segments if axis is not None)
    return any(program.buffers[s.buffer].dtype.itemsize == 2
               for m in first.members if not m.reduce for s in m.stores)  # fmt: skip


def is_dear(shape: Shape) -> bool:
    """Whether something takes long that would be computed again after each fold, or a fold is not
    of floats."""
    *before, _ = [s for s, axis in shape.segments if axis is not None]
    members = [m for s in before for m in s.members]
    folds = [n for m in members for n in walk(*m.exprs) if n.op == "reduce"]
    again = walk(*(e for n in folds for e in n.src),
                 *(e for m in members if not m.reduce for e in m.exprs))  # fmt: skip
    return any(n.op in ("scan", "index") or (
        n.op in TABLE and n.op != "exp" and TABLE[n.op].cost >= DEAR) for n in again) or any(
        folded_type(n.src[0].dtype) != torch.float32 for n in folds)  # fmt: skip


def is_own(shape: Shape, node: Expr) -> bool:
    """Whether a load is of a row of its own for every program, or of columns."""
    (axis,), index = shape.inner, node.src[0]
    if shape.across:
        return {axis.var, shape.parallel[0].var} <= free_vars(index)
    return ix.coefficient(index, axis.var) is ix.ONE and shape.parallel[0].var in free_vars(index)
