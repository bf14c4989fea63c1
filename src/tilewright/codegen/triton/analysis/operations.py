"""What nests are like, whatever their tile: gathers, scatters, sorts."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.expr import Expr, walk
from tilewright.ir.program import Nest

PLACES = frozenset(("argmin", "argmax"))  # reductions whose result is a place


def is_gathered(index: Expr) -> bool:
    """Whether a place that is read from memory says where this is."""
    return any(n.op == "index" for n in walk(index))


def scatters(nest: Nest) -> bool:
    """Whether its stores may meet, combine or stay away."""
    return any(s.mode != "set" or s.mask is not None for s in nest.stores)


def sorts(members: Sequence[Nest]) -> bool:
    """Whether rows are put in order, so that all of one has to be in one block."""
    return any(n.op == "scan" and n.arg.kind == "sort" for m in members for n in walk(*m.exprs))


def uses(members: Sequence[Nest], *ops: str) -> bool:
    return any(n.op in ops for m in members for n in walk(*m.exprs))
