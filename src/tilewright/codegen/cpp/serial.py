"""Kernels whose members share loops in order: rows one after the other, and folds over the rows.

A fold over rows keeps its accumulators across them: one per column, or a single one where it folds
the columns too. Sums of a few rows are kept in their own type and then added to the total, which is
wider, so that long columns stay accurate.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.codegen.cpp.folds import Accumulator, accumulators
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Nest

if TYPE_CHECKING:
    from tilewright.codegen.cpp.kernel import Kernel

ROWS = 128  # rows summed up before they are added to the totals


@dataclass(frozen=True)
class Carried:
    """A member that folds over the serial loops. `columns` are its loops inside them."""

    nest: Nest
    columns: tuple[Expr, ...]
    folds: list[Accumulator]
    by_column: bool  # each row adds one value per column; or folds the row into a single one

    @property
    def width(self) -> Expr:
        return ix.product(v.src[0] for v in self.columns)

    @property
    def lane(self) -> Expr:
        """The place of a column's accumulators."""
        strides = ix.contiguous_strides([v.src[0] for v in self.columns])
        return ix.linearize(self.columns, strides)


def carried(k: Kernel) -> dict[str, Carried]:
    """The members that fold over the serial loops, by name."""
    found: dict[str, Carried] = {}
    for nest in k.members:
        if not any(v in k.shape.serial for v in nest.reduce):
            continue
        columns = tuple(v for v in nest.loops if v not in k.outer)
        folds = accumulators([nest], k.w.fresh)
        for fold in folds:
            fold.owner = nest.name
        by_column = all(v in k.shape.serial for v in nest.reduce)
        found[nest.name] = Carried(nest, columns, folds, by_column)
    return found


def write_serial(k: Kernel) -> None:
    w = k.w
    threads = k.threads()
    parallel = threads != "never" and bool(k.shape.outer)
    with ExitStack() as region:
        if parallel:
            w.line(f"#pragma omp parallel{threads}{k.flag_clause()}")
            region.enter_context(w.block(""))
        k.open_scratch()
        with ExitStack() as loops:
            k.open_loops(loops, [k.for_loop(v) for v in k.shape.outer], parallel)
            heap: list[str] = []
            for c in k.carried.values():
                for fold in c.folds:
                    fold.declare(w, w.index(c.width) if c.by_column else 0)
                    heap += [name for name, _ in fold.lane_states()] if c.by_column else []
            _rows(k)
            for c in k.carried.values():
                _finish(k, c)
            for name in heap:
                w.line(f"__builtin_free({name});")
        k.close_scratch()


def _rows(k: Kernel) -> None:
    """The serial loops around all segments, the last in blocks of rows."""
    w = k.w
    *before, last = k.shape.serial
    by_column = [c for c in k.carried.values() if c.by_column]
    with ExitStack() as stack:
        for v in before:
            stack.enter_context(w.block(k.for_loop(v)))
        size = w.index(last.src[0])
        stack.enter_context(
            w.block(f"for (int64_t block = 0; block < {size}; block += {ROWS})"))  # fmt: skip
        w.line(f"const int64_t block_end = {size} - block < {ROWS} ? {size} : block + {ROWS};")
        for c in by_column:
            for fold in c.folds:
                fold.start_lanes(w, w.index(c.width))
        with w.block(f"for (int64_t {last.arg} = block; {last.arg} < block_end; ++{last.arg})"):
            for c in by_column:
                for fold in c.folds:
                    fold.before_lanes(w)
            k.declare_scalars()
            for segment in k.shape.segments:
                k.segment(segment)
        for c in by_column:
            for fold in c.folds:
                fold.end_lanes(w, w.index(c.width))
                for name in fold.lane_parts():
                    w.line(f"__builtin_free({name});")


def carry(k: Kernel, c: Carried) -> None:
    """One row's value of a column, into its accumulators."""
    w = k.w
    for fold in c.folds:
        for source in fold.node.src:
            w.value(source)
    with w.block(""):
        w.line(f"const int64_t lane = {w.index(c.lane)};")
        for fold in c.folds:
            fold.step_lane(w)


def _finish(k: Kernel, c: Carried) -> None:
    """The stores of a fold, all rows being folded."""
    w = k.w
    with ExitStack() as stack:
        for v in c.columns:
            if v is c.columns[-1] and c.by_column:
                w.line(f"#pragma omp simd{k.flag_clause()}")
            stack.enter_context(w.block(k.for_loop(v)))
        if not c.columns:
            stack.enter_context(w.block(""))
        if c.by_column:
            w.line(f"const int64_t lane = {w.index(c.lane)};")
        for fold in c.folds:
            fold.finish(w, "[lane]" if c.by_column else "")
        k.write(c.nest)
