"""Rows that come again: the order of the programs of a tile.

Programs run through the columns of their rows first, as memory does. Rows that are gathered more
than once in a table that does not fit in cache come from memory each time so. Where the rows run
first, only a piece of each is in use at a time, and all of these pieces together do fit.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright import rules
from tilewright.codegen.triton.analysis.operations import is_gathered
from tilewright.codegen.triton.plan.tiling import Shape, is_narrow
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, loads
from tilewright.ir.program import Buffer
from tilewright.schedule.nests.hints import hint_product
from tilewright.target import LINE, Target


def rows_first(buffers: Mapping[str, Buffer], shape: Shape, target: Target) -> bool:
    """Whether programs of the same columns are beside each other."""
    return is_narrow(shape) or bool(columns_at_once(buffers, shape, target))


def columns_at_once(buffers: Mapping[str, Buffer], shape: Shape, target: Target) -> int:
    """The most columns of which the pieces of all rows that come again are half of the cache; zero
    where all of them are in it anyway, or the pieces would be too short to be moved one by one
    (H200: 256 images of 150528 floats mixed with others of them 83 us, 104 us image by image;
    1048576 rows of 128 floats of 65536, added to as many others, 170 us by 32 columns, 173 us by
    64, 207 us by 16, 247 us by all)."""
    if not shape.gathered or len(shape.parallel) != 2:
        return 0
    *_, x = shape.parallel
    rows, others = _tables(shape)
    if not rows or x.size is None:
        return 0
    whole = {b: hint_product(buffers[b].size) * buffers[b].dtype.itemsize for b in rows}
    if any(
        times * x.likely < rules.REUSES.limit * hint_product(buffers[b].size)
        for b, times in rows.items()
    ):
        return 0
    least = (rules.REUSED_PIECE.limit if others - set(rows) else LINE) // min(
        buffers[b].dtype.itemsize for b in rows
    )
    columns = 1
    while 2 * sum(whole.values()) * columns <= target.l2 * x.likely:
        columns *= 2
    return (
        columns // 2 if least <= columns // 2 < x.likely and sum(whole.values()) > target.l2 else 0
    )


def _tables(shape: Shape) -> tuple[dict[str, int], set[str]]:
    """The buffers of which rows are gathered, be it to add to them, and how many rows of each
    the kernel touches; and all others that it has rows of."""
    flat = shape.flat()
    y, x = flat.parallel
    places: list[tuple[str, Expr, bool]] = []
    for m in flat.members:
        places += [(n.arg, n.src[0], True) for n in loads(*m.exprs)]
        places += [(s.buffer, s.index, s.mode != "set") for s in m.stores]
    along = {p for p in places if ix.coefficient(p[1], x.var) is ix.ONE}
    found = {b for b, index, again in along if again and is_gathered(index)}
    rows = {b: y.likely * sum(b == other for other, _, _ in along) for b in found}
    return rows, {b for b, _, _ in along}
