"""What an SM asks of a group beyond being right: parallel work, rows that stay near."""

from __future__ import annotations

from tilewright import config, rules
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads
from tilewright.ir.program import Nest
from tilewright.schedule.fusion.legality import Fit
from tilewright.schedule.fusion.row_column import contiguous
from tilewright.schedule.nests.access import all_loops
from tilewright.schedule.nests.hints import hint_product, work
from tilewright.schedule.split.pairs import is_pair
from tilewright.schedule.split.policy import cooperating_programs, dependents, walked_again
from tilewright.target import Target

CACHE_LINE = 64  # bytes, of a CPU


def unsuited(group: Fit, target: Target) -> str:
    """Why the target should not run these nests as one kernel, or an empty string."""
    lanes = hint_product(v.src[0] for v in group.outer)
    long = lanes < rules.SHARED_ITERATIONS.limit and any(_is_long(m) for m in group.members)
    if long and cooperating_programs(group, target) < 2:
        return "too few shared iterations to run in parallel"
    if (
        not any(m.reduce for m in group.members)
        and _longest_inside(group) > rules.ROW_OF_MEMBER.limit
    ):
        return "the loops left to the members are too long to keep their values near"
    if not target.is_gpu:
        return _reads_columns_twice(group)
    return _more_than_rows(group) or _turns_long_rows(group) or _has_many_rows(group)


def _reads_columns_twice(group: Fit) -> str:
    """A thread of a CPU reduces some columns, a cache line of each row, and goes along them again.
    Where the cache no longer has them, or there are so few that all are one thread's, both are
    kernels that read memory in order, by all threads (batch norm and SiLU in training, channels
    last, two cores of an AMD EPYC with 1 MiB each, torch 2.13, 2026-11-19: 8 images of 96
    channels of 56x56 2.71 ms as one and 1.45 so, 28x28 0.51 and 0.39; 64 channels of 14x14 0.12
    and 0.14, which stay one)."""
    along = contiguous(group.members)
    if along is None or group.outer != (along,) or _walk_once(group):
        return ""
    columns = hint_product([along.src[0]])
    rows, widths = walked_again(group, columns)
    if rows * CACHE_LINE * len(widths) > rules.COLUMNS_IN_CACHE.limit:
        return "columns leave the cache before they are read again"
    alone = columns <= CACHE_LINE // max(widths, default=1)
    if alone and rows * columns >= rules.COLUMNS_OF_THREADS.limit:
        return "one thread would have all columns"
    return ""


def _walk_once(group: Fit) -> bool:
    """Whether all that needs a reduction is reduced in the same walk, as exponentials relative to
    the largest value."""
    return all(any(is_pair(m, top) for top in group.members) for m in dependents(group.members))


def _has_many_rows(group: Fit) -> str:
    """One program does with one row after the other what others would do beside it (H200: norms of
    21 rows of 768 to 3072 bfloat16, and these scaled by the norm of all 45, 30 us)."""
    if group.outer or len(rows_of(group)) <= rules.ROWS_OF_PROGRAM.limit:
        return ""
    return "one program would have too many rows"


def rows_of(group: Fit) -> set[frozenset[Expr]]:
    """The loops of members that have some."""
    return {frozenset(loops) for m in group.members if (loops := all_loops(m))}


def combo_kind(group: Fit) -> tuple[bool, int] | None:
    """What groups have in common that may share a launch: whether they reduce, and how many
    loops their memory is contiguous along, but for small operands. None: this one never does."""
    folds = any(m.reduce for m in group.members)
    if folds and config.combo_kernels_pointwise_only:
        return None
    least = rules.SHARED_ITERATIONS.limit
    walks = {v for m in group.members for indices in m.indices.values() for i in indices
             for v in all_loops(m) if ix.coefficient(i, v) is ix.ONE
             and least * _walked(i, m) >= hint_product(v.src[0] for v in all_loops(m))}  # fmt: skip
    return folds, max(len(walks), 1)


def _walked(index: Expr, nest: Nest) -> int:
    """Elements of a buffer that a nest touches by an index."""
    return hint_product(v.src[0] for v in all_loops(nest) if v in free_vars(index))


def _is_long(nest: Nest) -> bool:
    """Whether running the nest's own loops on one thread would hurt. A reduction does not mind."""
    return not nest.reduce and work(nest) > 4096


def _longest_inside(group: Fit) -> int:
    """Iterations of the longest member inside one point of the shared loops."""
    return max(_inside(m, group) for m in group.members)


def _inside(nest: Nest, group: Fit) -> int:
    return hint_product(v.src[0] for v in nest.loops if v not in group.outer)


def _more_than_rows(group: Fit) -> str:
    """A Triton kernel holds one row per point of the grid: loops inside it are one row, reduced
    or not, and what is both looped and reduced inside is short."""
    for m in group.members:
        if m.reduce and _inside(m, group) > rules.SERIAL_ITERATIONS.limit:
            return f"{m.name} reduces inside loops of its own"
    rows = {_row(m, group) for m in group.members} - {1}
    if len(rows) > 1 and min(rows) > rules.SERIAL_ITERATIONS.limit:
        return "the members' rows differ"
    return ""


def _turns_long_rows(group: Fit) -> str:
    """A row too long to be held is walked: what is written along another loop than it is read along
    goes to memory element by element, where a kernel of its own turns tiles."""
    if not any(m.reduce for m in group.members):
        return ""
    for m in group.members:
        if m.reduce or _inside(m, group) <= rules.ROW_ON_CHIP.limit:
            continue
        read = {v for n in loads(*m.exprs) if (v := _contiguous(n.src[0], m)) is not None}
        for s in m.stores:
            along = _contiguous(s.index, m)
            if along is not None and read and along not in read:
                return f"{m.name} turns what it reads"
    return ""


def _contiguous(index: Expr, nest: Nest) -> Expr | None:
    """The loop that walks memory, of an index that walks most of the nest."""
    used = [v for v in nest.loops if v in free_vars(index)]
    if 8 * hint_product(v.src[0] for v in used) < work(nest):
        return None
    return next((v for v in used if ix.coefficient(index, v) is ix.ONE), None)


def _row(nest: Nest, group: Fit) -> int:
    return _inside(nest, group) * hint_product(v.src[0] for v in nest.reduce)
