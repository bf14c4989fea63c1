"""Neighbours that are every second element each, moved together.

The two halves of pairs, as of a rotation of pairs or the columns of a window, lie in memory in
turns: every access of one of them alone moves half of what it touches, an element at a time. Here
both are one access over twice the lanes, taken apart or put together in registers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tilewright.codegen.triton.analysis.index_width import span
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, load, loads, substitute, var

if TYPE_CHECKING:
    from tilewright.codegen.triton.plan.tiling import Axis, Shape
    from tilewright.codegen.triton.tile.kernel import Kernel
    from tilewright.ir.program import Buffer, Store

Place = tuple[str, Expr]  # a buffer and an index


class Interleaved:
    """The text of one kernel's accesses of two neighbours."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.w = kernel, kernel.w
        self.axis = kernel.shape.parallel[-1]
        self.read, self.written = interleaved(kernel.shape, kernel.buffers, kernel.local)
        self.two = _lanes(self.axis)
        self._waiting: dict[Place, str] = {}  # values of the first of two stores

    def begin(self, axis: Axis, block: str) -> None:
        """The lanes of a block, two for each point."""
        if axis is not self.axis or not (self.read or self.written):
            return
        w, name = self.w, self.two.arg
        dims = ", ".join(":" if d == axis.dim else "None" for d in range(w.rank))
        where = f"[{dims}]" if w.rank > 1 else ""
        size = f"2 * {axis.block}"
        w.line(f"{name} = {block} * ({size}) + tl.arange(0, {size}){where}")
        if axis in w.masked:
            piece = max(axis.vector, 1)  # of a row whose end is a tile beside
            w.line(f"{name}mask = {name} < {axis.name}numel // {piece} * {2 * piece}")

    def load(self, node: Expr) -> str:
        """The load of an element with its neighbour; nothing where it has none."""
        first = self.read.get(node)
        if first is None or self._at_ends:
            return ""
        w = self.w
        with self._both():
            index = from_both(first.src[0], self.axis) or behind(first.src[0], self.axis)
            support = w.covered(w.support(index))
            mask = w.mask(support)
            masked = f", {mask}, other=0" if mask else ""
            both = w.let(f"tl.load({self.kernel.pointer(node.arg)} + ({w.index(index)}){masked})")
        names = [w.fresh(), w.fresh()]
        w.line(f"{', '.join(names)} = tl.split(tl.reshape({both}, {self._apart(support)}))")
        found = {n: names[n.src[0] is not f.src[0]] for n, f in self.read.items() if f is first}
        for n, name in found.items():
            w.know(n, name)
        return found[node]

    def store(self, store: Store, value: str) -> bool:
        """Whether the store has a neighbour: the second of the two stores both."""
        first = self.written.get((store.buffer, store.index))
        if first is None or self._at_ends:
            return False
        w = self.w
        w.barriers.before_store(store.buffer, store.index)
        support = w.covered(w.support(store.index))
        if w.support(store.value) != support:
            value = w.let(f"tl.broadcast_to({value}, {w.shape(support)})")
        self._waiting[store.buffer, store.index] = value
        both = [p for p, f in self.written.items() if f is first and p[0] == store.buffer]
        if not all(p in self._waiting for p in both):
            return True
        with self._both():
            index = from_both(first, self.axis)
            assert index is not None
            place = w.index(index)
            text = ", ".join(self._waiting.pop(p) for p in both)
            joined = f"tl.reshape(tl.join({text}), {w.shape(support)})"
            mask = w.mask(support)
        masked = f", {mask}" if mask else ""
        w.line(f"tl.store({self.kernel.pointer(store.buffer)} + ({place}), {joined}{masked})")
        return True

    @property
    def _at_ends(self) -> bool:
        return self.kernel.peeled is not None and self.kernel.peeled.at_ends

    @contextmanager
    def _both(self) -> Generator[None]:
        """Among lanes that are two for each point."""
        self.w.stand_in(self.axis, self.two, f"2 * {self.axis.block}")
        yield
        del self.w.ends_of_rows[self.axis]

    def _apart(self, support: frozenset[Axis]) -> str:
        return self.w.shape(support)[:-1] + ", 2]"


def interleaved(shape: Shape, buffers: Mapping[str, Buffer], local: frozenset[str]
          ) -> tuple[dict[Expr, Expr], dict[Place, Expr]]:  # fmt: skip
    """For loads that have a neighbour the first of the two, and for stores the index of the first;
    the first comes before the second in both. A load at even places has a neighbour in memory, if
    nowhere else: both come in one access as soon as one does."""
    axis = shape.parallel[-1] if shape.parallel else None
    if axis is None or shape.family != "poi" or axis.slack or shape.serial or shape.ragged:
        return {}, {}
    stores = shape.stores
    nodes = loads(*(e for m in shape.members for e in m.exprs))
    made, used = {s.buffer for s in stores}, {n.arg for n in nodes}
    read: dict[Expr, Expr] = {}
    alone = {(n.arg, n.src[0]): n for n in nodes
             if n.arg not in made | local and len(n.src) == 1}  # fmt: skip
    for (buffer, index), other in _neighbours(alone, axis):
        first = alone[buffer, index]
        read |= {first: first, alone[buffer, other]: first}
    read |= {n: n for (b, i), n in alone.items() if n not in read and _is_even(i, axis)
             and ix.mod(span(buffers[b].size, buffers[b].stride), 2) is ix.ZERO}  # fmt: skip
    paired = {n.arg for n in read}  # of which also what is between, as the column before a window
    read |= {n: load(b, n.dtype, first) for (b, i), n in alone.items()
             if b in paired and n not in read and step(i, axis) != 1
             and ix.mod(first := ix.sub(i, 1), 2) is ix.ZERO and ix.known_nonneg(first)
             and ix.mod(span(buffers[b].size, buffers[b].stride), 2) is ix.ZERO}  # fmt: skip
    plain = [(s.buffer, s.index) for s in stores if s.buffer not in used | local
             and s.mode == "set" and s.mask is None]  # fmt: skip
    written: dict[Place, Expr] = {}
    for (buffer, index), other in _neighbours(plain, axis):
        written |= {(buffer, index): index, (buffer, other): index}
    return read, written


def _neighbours(places: Iterable[Place], axis: Axis) -> list[tuple[Place, Expr]]:
    """Places at even indices every two elements, each with the index after it, where both are."""
    known = dict.fromkeys(places)
    found: list[tuple[Place, Expr]] = []
    for buffer, index in known:
        after = ix.add(index, 1)
        if (buffer, after) in known and _is_even(index, axis):
            found.append(((buffer, index), after))
    return found


def _is_even(index: Expr, axis: Axis) -> bool:
    return ix.mod(index, 2) is ix.ZERO and from_both(index, axis) is not None


def _lanes(axis: Axis) -> Expr:
    return var(f"{axis.name}two", ix.mul(axis.extent, 2))


def from_both(index: Expr, axis: Axis) -> Expr | None:
    """Where the neighbours are that begin at an index: over twice the lanes of the axis, one after
    the other. None where the index is not every second element along it."""
    if loads(index):
        return None
    x, two = axis.var, _lanes(axis)
    atom = _atom(index, axis, 2)
    if atom is None:
        return None
    along = two if atom is x else ix.mod(two, ix.mul(atom.src[1], 2))
    return ix.add(along, substitute(ix.sub(index, ix.mul(atom, 2)), {x: ix.floordiv(two, 2)}))


def behind(index: Expr, axis: Axis) -> Expr:
    """The same where it is any two neighbours for each point."""
    two = _lanes(axis)
    return ix.add(substitute(index, {axis.var: ix.floordiv(two, 2)}), ix.mod(two, 2))


def step(index: Expr, axis: Axis) -> int:
    """Elements from one point of an axis to the next, for most of its points; 0 if not known."""
    found = [abs(factor) for factor in ix.poly(index).values() if _atom(index, axis, factor)]
    return min(found, default=0)


def is_even(index: Expr, axis: Axis, piece: int) -> bool:
    """Whether pieces of so many points of an axis are together in memory, where pieces are."""
    atom = _atom(index, axis, 1)
    if atom is None or ix.mod(ix.sub(index, atom), piece) is not ix.ZERO:
        return False
    return atom is axis.var or ix.mod(atom.src[1], piece) is ix.ZERO


def _atom(index: Expr, axis: Axis, factor: int) -> Expr | None:
    """The part of an index that goes along an axis by so many elements, as it is or in turns."""
    for monomial, found in ix.poly(index).items():
        if found != factor or len(monomial) != 1:
            continue
        (atom,) = monomial
        in_turns = atom.op == "imod" and atom.src[0] is axis.var and not free_vars(atom.src[1])
        if atom is axis.var or in_turns:
            return atom
    return None
