"""Reductions shared among threads: partial results in a fixed number of slots.

Each slot folds its share of the outermost reduction loop, and the slots are combined in order, so
the result is the same on any number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.codegen.cpp.folds import accumulators
from tilewright.ir import index as ix
from tilewright.schedule.nests.hints import hint

if TYPE_CHECKING:
    from tilewright.codegen.cpp.kernel import Kernel

SLOTS = 64  # of a full reduction
COLUMN_SLOTS = 32  # of a reduction of columns, which keeps a row of partial results in each
FEWEST_ROWS = 256  # below, whole rows of partial results cost more than they gain
WIDEST = 2048  # columns of one tile: their partial sums stay in the nearest cache


def is_full_reduction(k: Kernel) -> bool:
    first, *rest = k.shape.segments
    return (not k.outer and bool(first.reduce) and not first.loops
            and k.threads() != "never" and all(m.reduce for m in first.members)
            and all(not s.inner for s in rest))  # fmt: skip


def write_full_reduction(k: Kernel) -> None:
    w = k.w
    first, *rest = k.shape.segments
    folds = accumulators(first.members, w.fresh)
    extent = w.index(first.reduce[0].src[0])
    w.line(f"const int64_t share = ({extent} + {SLOTS - 1}) / {SLOTS};")
    for fold in folds:
        fold.declare_slots(w, SLOTS)
    w.line(f"#pragma omp parallel for schedule(static){k.threads()}{k.flag_clause()}")
    with w.block(f"for (int64_t slot = 0; slot < {SLOTS}; ++slot)"):
        _share(k, extent)
        for fold in folds:
            fold.declare(w, 0)
        k.fold_loops(first, folds, ("begin", "end"))
        for fold in folds:
            fold.save_slot(w)
    for fold in folds:
        fold.combine_slots(w, SLOTS)
        fold.finish(w, "")
    k.declare_scalars()
    k.stores(first.members)
    for segment in rest:
        k.segment(segment)


def _share(k: Kernel, extent: str) -> None:
    k.w.line("const int64_t begin = slot * share;")
    k.w.line(f"const int64_t end = begin + share < {extent} ? begin + share : {extent};")


def is_column_reduction(k: Kernel) -> bool:
    """Rows are read whole and in order, where tiles of columns would jump from row to row."""
    first, *rest = k.shape.segments
    return (k.tiled and len(k.outer) == 1 and bool(first.reduce) and not first.loops
            and not first.scans and k.threads() != "never" and not k.rows
            and hint(ix.product(v.src[0] for v in first.reduce)) >= FEWEST_ROWS
            and all(not s.inner for s in rest))  # fmt: skip


def write_column_reduction(k: Kernel) -> None:
    """Slots of rows, each with a partial result per column; then the columns are finished."""
    w = k.w
    assert k.lane is not None
    first, *rest = k.shape.segments
    folds = accumulators(first.members, w.fresh)
    extent, columns = w.index(first.reduce[0].src[0]), w.index(k.lane.src[0])
    w.line(f"const int64_t share = ({extent} + {COLUMN_SLOTS - 1}) / {COLUMN_SLOTS};")
    states = [state for fold in folds for state in fold.lane_states()]
    for name, ctype in states:
        size = f"sizeof({ctype})*{COLUMN_SLOTS}*({columns}) + 64"
        w.line(f"{ctype}* const {name}_slots = ({ctype}*)__builtin_malloc({size});")
    for fold in folds:
        fold.declare_lane_slots(w, COLUMN_SLOTS)
    narrow, k.lanes = k.lanes, _width(k, len(states))
    w.line(f"#pragma omp parallel for collapse(2) schedule(static){k.threads()}{k.flag_clause()}")
    with w.block(f"for (int64_t slot = 0; slot < {COLUMN_SLOTS}; ++slot)"), w.block(k.tile_head()):
        k.tile_stop()
        _share(k, extent)
        for fold in folds:
            fold.declare(w, k.lanes)
        k.fold_loops(first, folds, ("begin", "end"))
        for name, _ in states:
            w.line(f"for (int64_t k = 0; k < stop; ++k) "
                   f"{name}_slots[slot*({columns}) + tile + k] = {name}[k];")  # fmt: skip
        for fold in folds:
            fold.save_lane_slot(w)
    k.lanes = narrow
    w.line(f"#pragma omp parallel for schedule(static){k.threads()}{k.flag_clause()}")
    with w.block(k.tile_head()):
        k.tile_stop()
        k.declare_scalars()
        for fold in folds:
            fold.declare(w, k.lanes)
            with w.block(f"for (int64_t slot = 0; slot < {COLUMN_SLOTS}; ++slot)"):
                fold.combine_lanes(w, lambda name: f"{name}_slots[slot*({columns}) + tile + k]")
        with k.lane_loop():
            for fold in folds:
                fold.finish(w, "[lane]")
            k.stores([m for m in first.members if m.reduce])
        for segment in rest:
            k.segment(segment)
    for name, _ in states:
        w.line(f"__builtin_free({name}_slots);")


def _width(k: Kernel, states: int) -> int:
    assert k.lane is not None
    widest = WIDEST // max(1, states // 2)
    known = ix.value_of(k.lane.src[0])
    if known is None:
        return min(512, widest)
    tiles = -(-known // widest)
    return -(-known // tiles // 16) * 16 if tiles > 1 else known
