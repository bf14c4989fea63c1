"""Rows little longer than a power of two, in two tiles: as much as that, and what is left.

As one tile they would be half empty, and its threads issue what loads nothing (H200: squares of
127199 rows of 520 bfloat16 33 us, 40 us; std and mean of 60000 rows of 1088 32 us, 52 us; sums of
30000 rows of 1100 floats 31 us either way).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.config import below, power
from tilewright.codegen.triton.plan.row_configs import folds_one
from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.codegen.triton.tile.peeled import Peeled
from tilewright.ir import index as ix
from tilewright.ir.expr import free_vars


def remainder(facts: KernelFacts) -> Shape | str:
    """The shape with such rows, where they begin with sixteen bytes and are only reduced."""
    if reason := facts.not_rows:
        return reason
    shape, flat = facts.shape, facts.flat
    axis, size = facts.row, facts.length
    if not shape.persistent or shape.row_programs or not size:
        return "no program has whole rows"
    if axis.start is not None or shape.misaligned:
        return "rows are misaligned"
    first = below(size)
    if (
        not rules.REMAINDER_TILE.limit <= first <= rules.LONGEST_REMAINDER_TILE.limit
        or not 0 < rules.REMAINDER.limit * (size - first) <= first
    ):
        return "rows are not a little longer than a power of two"
    rows = [n for n in flat.loads if axis.var in free_vars(n)]
    even = all(ix.coefficient(n.src[0], axis.var) is ix.ONE and len(n.src) == 1 and ix.mod(
        ix.mul(ix.without(n.src[0], [axis.var]), n.dtype.itemsize), 16) is ix.ZERO
        for n in rows)  # fmt: skip
    if not even:
        return "rows do not begin with sixteen bytes"
    if not folds_one(shape):
        return "rows are not only reduced, once"
    new = replace(axis, start=ix.ZERO, vector=first)
    return replace(shape, segments=tuple((s, a and new) for s, a in shape.segments))


class Remainder(Peeled):
    """The text of one kernel's axis of such rows: what is left of them is their end."""

    def begin(self) -> None:
        w, a, n = self.w, self.axis.name, self.axis.vector
        self._lanes_of_ends = power((self.axis.size or 0) - n)
        w.line(f"{a}at = {n} + tl.arange(0, {self._lanes_of_ends})[None, :]")
        w.line(f"{a}edge = {a}at < {a}numel")
        w.masked.discard(self.axis)
        w.know(self.axis.var, f"{a}base")
        self.fetch(self.ends)

    @contextmanager
    def ends(self) -> Generator[None]:
        w, masked = self.w, self.w.masked
        w.masked = masked | {self.axis}
        with super().ends():
            yield
        w.masked = masked
