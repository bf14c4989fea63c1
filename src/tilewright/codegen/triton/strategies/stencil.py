"""The kernel of windows along rows: several neighbours are one point of it.

Where an element is made of neighbours in memory, as of a window of an image or of the steps before
it, most of what one needs the next one needs too. Here so many of them are written out that they
are sixteen bytes: what they read is loaded as whole pieces, each once, and taken apart in
registers; what they are is put together and stored as one. Only what lies before or behind a piece
is loaded by itself. That a place is inside its row, and weights that come in turns, are literals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.analysis.index_width import span
from tilewright.codegen.triton.plan.config import Config
from tilewright.codegen.triton.plan.plan import KernelPlan
from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.codegen.triton.tile.interleaved import Interleaved, interleaved, is_even
from tilewright.codegen.triton.tile.kernel import Kernel
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, rewrite, substitute, var, walk
from tilewright.ir.program import Buffer, Nest, Program, Store
from tilewright.schedule.nests.transform import plainly, substitute_nest, unused
from tilewright.target import ACCESS

# of the loads of two rows, for both as one (H200: 0.67 of them 59 us, 61 us; 0.83 58 us, 56 us)
SAVED = 0.75
WARPS = (4, 8, 2)
JOINED = {2: "two", 4: "four", 8: "eight"}  # in `tri_rows.py`


def stencil(facts: KernelFacts) -> KernelPlan | str:
    """The kernel of such a group (H200: largest of three by two of 186880 planes
    of 16x16 floats 56 us, 74 us by elements; of bfloat16 4096 planes of 112x112 31 us, 41 us, 16384
    of 56x56 32 us, 44 us, 149504 of 16x16 23 us, 33 us; four steps of 32768 rows of 2048 67 us,
    91 us; 2048 planes of 64x64 to twice as many rows and columns 25 us, 33 us)."""
    program, group, shape = facts.program, facts.group, facts.shape
    if reason := facts.not_pointwise or facts.scatters or facts.draws:
        return reason
    if group.local or group.row_programs:
        return "some results stay inside the kernel"
    loops = tuple(v for a in shape.parallel for v in a.loops)
    if any(set(m.loops) != set(loops) for m in shape.members) or not loops:
        return "not all is computed over the same loops"
    *_, last = loops
    if not _has_windows(shape.members, last):
        return "no tensor is read at several places along the last loop"
    before = _accesses(program, shape, last)
    counts = [c for c in (8, 4, 2) if _fits(program, shape.members, last, c)]
    for count in counts:
        form, after = _written_out(program, shape, {last: count})
        if 3 * after > 2 * count * before:
            continue
        rows = {
            v: rules.STENCIL_ROWS.limit
            for v in loops[-2:-1]
            if (ix.value_of(v.src[0]) or 1) % rules.STENCIL_ROWS.limit == 0
        }
        both, more = _written_out(program, shape, {**rows, last: count})
        if rows and more <= SAVED * rules.STENCIL_ROWS.limit * after:
            form, count = both, rules.STENCIL_ROWS.limit * count
        x = form.parallel[0]
        if (x.size or 0) * count < rules.STENCIL_POINTS.limit:
            return (
                f"fewer than {rules.STENCIL_POINTS.limit} points, or only the call knows how many"
            )
        if len(list(walk(*form.members[0].exprs))) > rules.STENCIL_NODES.limit:
            return f"several points as one make more than {rules.STENCIL_NODES.limit} operations"
        among = tuple(Config(((x.block, 32 * warps),), warps) for warps in WARPS)
        return KernelPlan.of(_Windows(program, group, form, facts.target, facts.wide, among))
    return "several points as one would not save a third of the loads"


def _has_windows(members: Sequence[Nest], last: Expr) -> bool:
    """Whether something is read at several places along the last loop, and all by place alone."""
    nodes = loads(*(e for m in members for e in m.exprs))
    if any(loads(n.src[0]) or n.arg in m.writes for m in members for n in nodes):
        return False
    along = {(n.arg, n.src[0]) for n in nodes if last in free_vars(n.src[0])}
    return len(along) > len({buffer for buffer, _ in along})


def _accesses(program: Program, shape: Shape, last: Expr) -> float:
    """Loads along the last loop of a point as it is: of neighbours that are together eight points
    have one."""
    flat = shape.flat()
    known, _ = interleaved(flat, program.buffers, frozenset())
    x = flat.parallel[-1]
    total = 0.0
    for node in _along(shape, last):
        whole = known[node] in known if node in known else is_even(node.src[0], x, 8)
        share = sum(f is known.get(node) for f in known.values())
        total += (1 / 8 if whole else 1) / max(1, share)
    return total


def _along(shape: Shape, last: Expr) -> list[Expr]:
    """What is read along a loop, over the one that stands for all."""
    places = {v: e for a in shape.parallel for v, e in a.places().items()}
    nodes = shape.loads
    return list(dict.fromkeys(substitute(n, places) for n in nodes if last in free_vars(n.src[0])))


# ---- several points as one


def _fits(program: Program, members: Sequence[Nest], last: Expr, count: int) -> bool:
    """Whether so many points of the last loop are together in what is stored, and no access is
    too wide."""
    if (ix.value_of(last.src[0]) or 1) % count:
        return False
    for m in members:
        for s in m.stores:
            each = program.buffers[s.buffer].dtype.itemsize
            if ix.coefficient(s.index, last) is not ix.ONE or count * each > ACCESS:
                return False
        for n in loads(*m.exprs):
            along = ix.value_of(ix.coefficient(n.src[0], last) or ix.ONE) or 0
            if abs(along) * count * n.dtype.itemsize > ACCESS:
                return False
    return True


def _written_out(program: Program, shape: Shape, counts: Mapping[Expr, int]) -> tuple[Shape, int]:
    """The shape with so many points of these loops as one, and how many loads along the last of
    them it has."""
    loops = tuple(v for a in shape.parallel for v in a.loops)
    taken = {v.arg for v in loops}
    pieces = {v: var(unused(f"{v.arg}q", taken), ix.floordiv(v.src[0], count))
              for v, count in counts.items()}  # fmt: skip
    points = [{v: ix.add(ix.mul(pieces[v], count), k)
               for (v, count), k in zip(counts.items(), at, strict=True)}
              for at in product(*map(range, counts.values()))]  # fmt: skip
    members: list[Nest] = []
    for m in shape.members:
        new = tuple(pieces.get(v, v) for v in m.loops)
        each = [substitute_nest(m, point, new, ()) for point in points]
        stores = [replace(s, value=rewrite(s.value, plainly)) for n in each for s in n.stores]
        members.append(replace(each[0], stores=tuple(stores)))
    axis = Axis("x", tuple(pieces.get(v, v) for v in loops), 0)
    (segment, _), *_ = shape.segments
    segments = ((replace(segment, members=members), None),)
    form = replace(shape, parallel=(axis,), segments=segments, rank=1, members=tuple(members),
                   gathered=False)  # fmt: skip
    places = _places(_along(form, axis.loops[-1]))
    return form, len(set(_pieces(places, program.buffers).values()))


# ---- pieces


@dataclass(frozen=True)
class Piece:
    """So many neighbours of a buffer from an index on, where these hold."""

    buffer: str
    index: Expr
    size: int
    masks: tuple[Expr, ...] = ()


Place = tuple[str, Expr, tuple[Expr, ...]]  # a buffer, an index and masks


def _places(nodes: Iterable[Expr]) -> dict[Place, Expr]:
    return {(n.arg, n.src[0], n.src[1:]): n for n in nodes}


def _pieces(places: Iterable[Place], buffers: Mapping[str, Buffer]) -> dict[Place, Piece]:
    """The piece that each place is in: as large as is needed for all that is read near it."""
    near: dict[Place, list[tuple[int, Place]]] = {}
    for place in places:
        buffer, index, masks = place
        terms = dict(ix.poly(index))
        at = terms.pop((), 0)
        buf = buffers[buffer]
        size = math.gcd(ACCESS // buf.dtype.itemsize, *terms.values(),
                        *ix.poly(span(buf.size, buf.stride)).values())  # fmt: skip
        first = ix.add(ix.from_poly(terms), at // size * size)
        near.setdefault((buffer, first, masks), []).append((at % size, place))
    found: dict[Place, Piece] = {}
    for (buffer, first, masks), members in near.items():
        offsets = [k for k, _ in members]
        size = 1
        while len({k // size for k in offsets}) > 1:
            size *= 2
        begin = ix.add(first, offsets[0] // size * size)
        found |= {place: Piece(buffer, begin, size, masks) for _, place in members}
    return found


class _Pieces(Interleaved):
    """The text of accesses of whole pieces."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.read, self.written = {}, {}
        members, buffers = kernel.shape.members, kernel.buffers
        self.nodes = _places(n for m in members for n in loads(*m.exprs))
        self.loaded = _pieces(self.nodes, buffers)
        stores = [(s.buffer, s.index, ()) for m in members for s in m.stores]
        self.stored = _pieces(stores, buffers)
        self._values: dict[tuple[str, Expr], str] = {}  # of results that are not whole yet

    def load(self, node: Expr) -> str:
        piece = self.loaded[node.arg, node.src[0], node.src[1:]]
        if piece.size == 1 or not free_vars(piece.index):
            return ""
        w = self.w
        place = f"({w.index(piece.index)})[:, None] + tl.arange(0, {piece.size})[None, :]"
        mask = w.mask(w.support(piece.index), *(w.operand(m) for m in piece.masks))
        masked = f", ({mask})[:, None], other=0" if mask else ""
        text = f"tri_rows.apart(tl.load({self.kernel.pointer(piece.buffer)} + ({place}){masked}))"
        names = [w.fresh() for _ in range(piece.size)]
        w.line(f"{', '.join(names)} = {text}")
        for at, other in self.loaded.items():
            if other == piece:
                w.know(self.nodes[at], names[ix.sub(at[1], piece.index).arg])
        known = w.known(node)
        assert known is not None
        return known

    def store(self, store: Store, value: str) -> bool:
        piece = self.stored[store.buffer, store.index, ()]
        if piece.size == 1:
            return False
        w = self.w
        support = w.support(piece.index)
        if w.support(store.value) != support:
            value = w.let(f"tl.broadcast_to({value}, {w.shape(support)})")
        self._values[store.buffer, store.index] = value
        places = [(store.buffer, ix.add(piece.index, k)) for k in range(piece.size)]
        if all(p in self._values for p in places):
            whole = f"tri_rows.{JOINED[piece.size]}({', '.join(self._values[p] for p in places)})"
            place = f"({w.index(piece.index)})[:, None] + tl.arange(0, {piece.size})[None, :]"
            mask = w.mask(support)
            masked = f", ({mask})[:, None]" if mask else ""
            w.line(f"tl.store({self.kernel.pointer(store.buffer)} + ({place}), {whole}{masked})")
        return True


class _Windows(Kernel):
    accesses = _Pieces
