"""Rows dealt out to chunks in turn, where a card folds columns.

Of `n` chunks, chunk `k` has the rows `k`, `k + n`, `k + 2n` and so on. One row of each chunk lies
beside those of the others: together they are a row of `n` times the width. It begins where memory
is read in the widest accesses, which rows of odd width seldom do, and is cut into whole lines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, walk
from tilewright.schedule.legality import Fit
from tilewright.schedule.sizes import hint, hint_product
from tilewright.target import Target

ACCESS = 16  # bytes of the widest access
LINE = 128  # bytes of memory that a tile takes of a row
SHORTEST = 64  # rows of a chunk: what it leaves is then a small part of what it reads
LEAST = 16  # where narrow accesses are the alternative
MOST = 1024  # chunks: few programs fold what they leave
WAVES = 4  # times that all processors are given work
EVEN = 0.94  # of the time that all of them have some, if all programs take as long


@dataclass(frozen=True)
class _Rows:
    """How a load walks rows: the bytes of a row, and of an element."""

    width: int
    element: int


def dealt(fit: Fit, target: Target, starved: bool) -> int:
    """Into how many chunks the rows of the one serial loop are to be dealt; none: they are not."""
    if not target.is_gpu or len(fit.serial) != 1:
        return 0
    if not _all_fold(fit, fit.serial):
        return 0
    (loop,) = fit.serial
    moments = any(n.op == "reduce" and n.arg.kind == "welford"
                  for m in fit.members for n in walk(*m.exprs))  # fmt: skip
    if moments and ix.value_of(loop.src[0]) is None:
        return 0  # a chunk of no rows has none
    found = [_rows(n, loop, fit.outer) for m in fit.members for n in loads(*m.exprs)
             if loop in free_vars(n)]  # fmt: skip
    rows = [r for r in found if r is not None]
    if not rows or len(rows) < len(found):
        return 0
    aligned, lines = (math.lcm(*(n // math.gcd(r.width, n) for r in rows)) for n in (ACCESS, LINE))
    if not starved and aligned == 1:
        return 0
    columns = hint_product(v.src[0] for v in fit.outer)
    tiles = columns * max(r.element for r in rows) / LINE
    most = min(MOST, hint(loop.src[0]) // SHORTEST)
    if lines <= most:
        return _count(lines, most, tiles, target.sms)
    return _count(aligned, max(most, aligned), tiles, target.sms) if (
        aligned * LEAST <= hint(loop.src[0])) else 0  # fmt: skip


def in_pieces(fit: Fit, target: Target) -> bool:
    """Whether each piece of a row is to be folded by itself, where what a fold walks is in pieces:
    the serial loops go from one to the next."""
    *_, along = fit.members[0].reduce or (ix.ZERO,)
    if not target.is_gpu or not fit.serial or not _all_fold(fit, (*fit.serial, along)):
        return False
    found = [n for m in fit.members for n in loads(*m.exprs) if along in free_vars(n)]
    if not all(ix.coefficient(n.src[0], along) is ix.ONE for n in found):
        return False
    count = hint_product(v.src[0] for v in fit.serial)
    if not 0 < count <= MOST or hint(along.src[0]) < SHORTEST:
        return False
    steps = [(ix.coefficient(n.src[0], v), n) for n in found for v in (*fit.outer, *fit.serial)]
    narrow = any(hint(s or ix.ONE) * n.dtype.itemsize % ACCESS for s, n in steps)
    return narrow or hint_product(v.src[0] for v in fit.outer) < WAVES * target.sms


def _all_fold(fit: Fit, loops: tuple[Expr, ...]) -> bool:
    """Whether nothing is done but to fold these loops, inside those that are shared."""
    made = frozenset[str]().union(*(m.writes for m in fit.members))
    return all(m.reduce == loops and set(m.loops) == set(fit.outer) and not m.reads & made
               for m in fit.members)  # fmt: skip


def _count(unit: int, most: int, tiles: float, processors: int) -> int:
    """The fewest chunks that keep all processors at work to the end; each has so many tiles."""
    best, least = 0, 0.0
    for count in range(unit, most + 1, unit):
        waves = math.ceil(count * tiles) / processors
        even = waves / math.ceil(waves)
        if even > least:
            best, least = count, even
        if waves >= WAVES or even >= EVEN:
            break
    return best


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
