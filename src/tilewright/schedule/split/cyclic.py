"""Rows split cyclically to chunks in turn, where a card reduces columns.

Of `n` chunks, chunk `k` has the rows `k`, `k + n`, `k + 2n` and so on. One row of each chunk lies
beside those of the others: together they are a row of `n` times the width. It begins where memory
is read in the widest accesses, which rows of odd width seldom do, and is cut into whole lines.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, replace

from tilewright import rules
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, load, loads, walk
from tilewright.ir.program import Nest
from tilewright.schedule.fusion.legality import Fit
from tilewright.schedule.nests.hints import hint, hint_product
from tilewright.target import ACCESS, LINE, Target

FEW, MANY = 1.9, 4  # programs for each SM
EVEN = 0.94  # of the time that all of them have some, if all programs take as long


TWO = frozenset(("welford", "argmin", "argmax"))  # folds of two values


def may_slide(kinds: Set[str], columns: int, length: int, rows: int, size: int, target: Target
              ) -> bool:  # fmt: skip
    """Whether odd rows are better reduced in whole pieces, each from where its own begin, and
    what that gives moved into place: `columns` in all, and so many beside each other (H200:
    average over 0 of 109x481x793 bfloat16 26.7 us, 33 us by single elements; sum over 1 of
    2324x128x479 84 us, 93 us in chunks; of 700x333x615 91 us, 97 us; but of 33x3000001 over 0 95
    us, 61 us, and of deviations 166 us, 94 us)."""
    many = (
        columns >= rules.SHIFTED_COLUMNS_PER_SM.limit * target.sms
        and rows >= rules.CYCLIC_ROWS.limit
    )
    return size == 2 and length >= rules.SHIFTED_COLUMNS.limit and many and not kinds & TWO


@dataclass(frozen=True)
class _Rows:
    """How a load walks rows: the bytes of a row, and of an element."""

    width: int
    element: int


def cyclic_chunks(fit: Fit, target: Target, private: Set[str], starved: bool) -> int:
    """Into how many chunks the rows of the one serial loop are to be dealt; none: they are not.
    What goes along rows that are reduced does the rows that are in no chunk in a kernel of its
    own, in which `private` buffers are other ones: none of these is reduced."""
    if not target.is_gpu or len(fit.serial) != 1:
        return 0
    (loop,) = fit.serial
    along = [m for m in fit.members if not m.reduce]
    folds = replace(fit, members=tuple(m for m in fit.members if m.reduce))
    if not folds.members or not _all_fold(folds, fit.serial):
        return 0
    if any(set(m.loops) != {loop, *fit.outer} or not _sets(m) for m in along):
        return 0
    if any(m.reads & private for m in folds.members):
        return 0
    kinds = {n.arg.kind for m in fit.members for n in walk(*m.exprs) if n.op == "reduce"}
    moments = "welford" in kinds
    if moments and ix.value_of(loop.src[0]) is None:
        return 0  # a chunk of no rows has none
    touched = [n for m in fit.members for n in loads(*m.exprs)]
    touched += [load(s.buffer, s.value.dtype, s.index) for m in along for s in m.stores]
    found = [_rows(n, loop, fit.outer) for n in touched if loop in free_vars(n)]
    rows = [r for r in found if r is not None]
    if not rows or len(rows) < len(found):
        return 0
    aligned, lines = (math.lcm(*(n // math.gcd(r.width, n) for r in rows)) for n in (ACCESS, LINE))
    columns = hint_product(v.src[0] for v in fit.outer)
    tiles = columns * max(r.element for r in rows) / LINE
    # short rows that are no whole lines: most tiles would have parts of some (H200: gelu backwards
    # of 371135x120 float16 75 us dealt out to 136 chunks, 110 us in 128 of neighbouring rows)
    narrow = bool(along) and lines > aligned == 1 and 4 * tiles < target.sms
    if aligned == 1 and not narrow and (_is_even(tiles, target.sms) if along else not starved):
        return 0
    count = hint(loop.src[0])
    alike = len({n.src for n in touched if loop in free_vars(n)}) == len(set(rows)) == 1
    if alike and not starved and not along and aligned > 2:
        (one,) = set(rows)
        if may_slide(kinds, columns, one.width // one.element, count, one.element, target):
            return 0
    unit, most = (
        lines,
        min(
            rules.CYCLIC_CHUNKS.limit,
            count // rules.CYCLIC_ROWS.limit,
            count * columns // rules.CYCLIC_WORK.limit,
        ),
    )
    if lines > most:
        least = 2 * rules.CYCLIC_NARROW_ROWS.limit if moments else rules.CYCLIC_NARROW_ROWS.limit
        unit, most = aligned, max(most, min(aligned, count // least))
    if along and not narrow:
        chosen = (
            max(unit, min(most // 2, count // rules.CYCLIC_STORED_ROWS.limit) // unit * unit)
            if unit <= most
            else 0
        )
    else:
        chosen = _count(unit, most, count, tiles, target.sms)
    return chosen if chosen > 1 else 0


def in_tiles(fit: Fit, target: Target) -> int:
    """Into how many chunks short rows are to be dealt that are reduced both ways, one after the
    other: neighbouring ones are then rows of neighbouring chunks, and a program has several of
    them as one tile (H200: missing values of 1048576 rows of 40 floats 91 us by eight rows of
    two warps, 153 us by one row of a warp in chunks of neighbours). None: they are not, as where
    no fit number of chunks has all rows."""
    if not target.is_gpu or fit.outer or len(fit.serial) != 1:
        return 0
    (loop,) = fit.serial
    rows = ix.value_of(loop.src[0]) or 0
    kinds = {n.arg.kind for m in fit.members for n in walk(*m.exprs) if n.op == "reduce"}
    both = any(loop in m.reduce and len(m.reduce) > 1 for m in fit.members)
    if both or kinds & TWO or not all(_sets(m) for m in fit.members):
        return 0
    places = [(n.src[0], n.dtype.itemsize) for m in fit.members for n in loads(*m.exprs)]
    places += [(s.index, s.value.dtype.itemsize) for m in fit.members for s in m.stores]
    places = [(index, size) for index, size in places if loop in free_vars(index)]
    if all(len(free_vars(index)) == 1 for index, _ in places):  # nothing is reduced both ways
        return 0
    if not all(_is_short_row(index, size, loop) for index, size in places):
        return 0
    each, most = rules.TILED_ROWS.limit, rows // rules.CYCLIC_ROWS.limit
    wanted = each * rules.TILED_PROGRAMS.limit * target.sms
    counts = [n for n in range(each, most + 1, each)
              if rows % n == 0 and wanted <= 2 * n <= 4 * wanted]  # fmt: skip
    return min(counts, key=lambda n: abs(n - wanted), default=0)


def _is_short_row(index: Expr, size: int, loop: Expr) -> bool:
    """Whether an index is that of a short row, or of an element of it, and rows lie one after the
    other, all of them where memory is even."""
    step = ix.value_of(ix.coefficient(index, loop) or ix.ZERO)
    inside = free_vars(index) - {loop}
    if not inside:
        return step == 1
    (along, *more) = inside
    length = ix.value_of(along.src[0])
    if more or not length or ix.coefficient(index, along) is not ix.ONE:
        return False
    return step == length <= rules.TILED_ROW.limit and not length * size % ACCESS


def around_rows(fit: Fit) -> tuple[Expr, ...]:
    """The loops that go from rows to others further away."""
    (loop,) = fit.serial
    index = next(n.src[0] for m in fit.members for n in loads(*m.exprs) if loop in free_vars(n))
    step = {v: hint(ix.coefficient(index, v) or ix.ZERO) for v in (loop, *fit.outer)}
    return tuple(v for v in fit.outer if step[v] > step[loop])


def in_pieces(fit: Fit, target: Target) -> bool:
    """Whether each piece of a row is to be reduced by itself, where what a reduction walks is in
    pieces: the serial loops go from one to the next. Of many pieces only long ones: what they
    leave has to be reduced (H200: squares of 1070x69x1219 bfloat16 over 0 and 2 52 us, 101 us in
    chunks; of 3000x40x500 38 us either way; of 200000x4x64 36 us, 28 us in chunks; neighbours'
    differences of 49152 rows of 511 floats 27 us, 44 us in chunks)."""
    *_, along = fit.members[0].reduce or (ix.ZERO,)
    if not target.is_gpu or not fit.serial or not _all_fold(fit, (*fit.serial, along)):
        return False
    found = [n for m in fit.members for n in loads(*m.exprs) if along in free_vars(n)]
    if not all(ix.coefficient(n.src[0], along) is ix.ONE for n in found):
        return False
    count = hint_product(v.src[0] for v in fit.serial)
    if not count or hint(along.src[0]) < (
        rules.CYCLIC_ROWS.limit if count <= rules.CYCLIC_CHUNKS.limit else rules.PIECE_ALONE.limit
    ):
        return False
    steps = [(ix.coefficient(n.src[0], v), n) for n in found for v in (*fit.outer, *fit.serial)]
    narrow = any(hint(s or ix.ONE) * n.dtype.itemsize % ACCESS for s, n in steps)
    return narrow or hint_product(v.src[0] for v in fit.outer) < MANY * target.sms


def _all_fold(fit: Fit, loops: tuple[Expr, ...]) -> bool:
    """Whether nothing is done but to reduce these loops, inside those that are shared."""
    made = frozenset[str]().union(*(m.writes for m in fit.members))
    return all(m.reduce == loops and set(m.loops) == set(fit.outer) and not m.reads & made
               for m in fit.members)  # fmt: skip


def _is_even(tiles: float, processors: int) -> bool:
    """Whether programs of a tile each leave few SMs idle (H200: gelu backwards, 22666x6488
    bfloat16, 301 us by 102 programs, 238 us split cyclically); or most: then neighbouring rows
    are chunks."""
    waves = math.ceil(tiles) / processors
    return not 0.75 <= waves <= MANY or waves >= EVEN * math.ceil(waves)


def _sets(nest: Nest) -> bool:
    return all(s.mode == "set" and s.mask is None for s in nest.stores)


def _count(unit: int, most: int, rows: int, tiles: float, processors: int) -> int:
    """The fewest chunks that keep all SMs at work to the end, if possible with as many rows
    each; a chunk has so many tiles."""
    waves = {n: math.ceil(n * tiles) / processors for n in range(unit, most + 1, unit)}
    enough = [n for n, w in waves.items() if FEW <= w <= MANY]
    enough = enough or [n for n, w in waves.items() if w > MANY][:1] or [max(waves, default=0)]

    def worth(n: int) -> tuple[float, bool, int]:
        even = waves[n] / math.ceil(waves[n]) if n else 0
        return min(even, EVEN), n > 0 and rows % n == 0, -n

    return max(enough, key=worth)


def _rows(node: Expr, loop: Expr, outer: tuple[Expr, ...]) -> _Rows | None:
    """The rows that a load walks along `loop`, if they lie one after the other without gaps."""
    index, size = node.src[0], node.dtype.itemsize
    steps = [(ix.coefficient(index, v), v) for v in (loop, *outer) if v in free_vars(index)]
    known = [(ix.value_of(s) or 0, v) for s, v in steps if s is not None]
    start = ix.value_of(ix.without(index, [v for _, v in known]))
    stride = next((s for s, v in known if v is loop), 0)
    if node.src[1:] or len(known) < len(steps) or start is None:
        return None
    step = 1
    for s, v in sorted(known, key=lambda pair: pair[0]):
        if s < stride and s != step:
            return None
        step = s * (ix.value_of(v.src[0]) or 0) if s < stride else step
        if s > stride and s * size % ACCESS:
            return None
    whole = step == stride > 1 and not start * size % ACCESS
    return _Rows(stride * size, size) if whole else None
