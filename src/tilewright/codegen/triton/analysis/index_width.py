"""Which indices fit 32 bits, and which symbols are numbers of the program and not only sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.codegen.triton.tile.lower import is_index
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, walk
from tilewright.ir.ops import INDEX_OPS, TABLE
from tilewright.ir.program import Buffer, Store

LARGEST = 2**31 - 1


def narrow(exprs: Sequence[Expr], extents: Sequence[Expr], buffers: Sequence[Buffer],
           largest: int) -> list[Expr] | None:  # fmt: skip
    """Numbers that must be below 2**31 at a call for 32-bit indices to do; None where they
    cannot. Lanes outside an axis go `largest` beyond its end. Places that were found before are
    reduced as indices too, however few of them there are."""
    nodes = list(walk(*exprs))
    folded = [n.src[1] for n in nodes if n.op == "reduce" and n.arg.kind in ("argmin", "argmax")]
    extents = [*extents, *(n.src[1] for n in walk(*folded) if n.op == "index")]
    for e in [*extents, *(n for n in nodes if n.op in INDEX_OPS)]:
        low, high = ix.bounds(e)
        if (math.isfinite(high) and high + largest > LARGEST) or (
            math.isfinite(low) and low < -LARGEST
        ):
            return None
    spans = [span(b.size, b.stride) for b in buffers]
    assumed = [s for s in dict.fromkeys([*extents, *spans]) if ix.bounds(s)[1] + largest > LARGEST]
    return None if any(ix.value_of(s) is not None for s in assumed) else assumed


def valued(exprs: Sequence[Expr], stores: Sequence[Store]) -> frozenset[Expr]:
    """Symbols that are numbers of the program, such as seeds, and not only sizes."""
    found: set[Expr] = set()
    for node in walk(*exprs):
        if node.op == "load":
            operands = node.src[1:]
        elif node.op == "index":
            operands = node.src[:1]
        elif node.op not in TABLE or (TABLE[node.op].result == "bool" and all(
            is_index(s) or s.is_const for s in node.src
        )):  # fmt: skip
            continue  # index arithmetic, or a comparison of indices
        else:
            operands = node.src
        found |= {s for s in operands if s.op == "sym"}
    found |= {s.value for s in stores if s.value.op == "sym"}
    return frozenset(found)


def span(size: Sequence[Expr], stride: Sequence[Expr]) -> Expr:
    return ix.add(1, *(ix.mul(ix.sub(n, 1), s) for n, s in zip(size, stride, strict=True)))
