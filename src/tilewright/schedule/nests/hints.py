"""Likely sizes: what decisions are made by where a size is known only when the program runs."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Buffer, Nest


def hint(e: Expr) -> int:
    """A likely value of a size: its literal, or the sizes the graph was traced with."""
    return max(ix.likely(e), 0)


def hint_product(sizes: Iterable[Expr]) -> int:
    total = 1
    for size in sizes:
        total *= hint(size)
    return total


def hint_bytes(buffer: Buffer) -> int:
    return hint_product(buffer.size) * buffer.dtype.itemsize


def work(nest: Nest) -> int:
    return hint_product(v.src[0] for v in (*nest.loops, *nest.reduce))
