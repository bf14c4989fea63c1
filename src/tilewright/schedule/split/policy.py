"""Whether a reduction is split, and into how many parts: the scheduler's one place that decides it.

`chunks` are parts that a kernel of their own reduces in the end, `cooperating_programs` walk a row
together and wait for each other, `ticketed_programs` are more than run at once. How rows are dealt
out to chunks is `cyclic.py`, and `apply.py` does what was decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tilewright import config, rules
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, walk
from tilewright.ir.ops import REDUCTIONS
from tilewright.ir.program import Nest
from tilewright.schedule.fusion.legality import Fit, is_alone
from tilewright.schedule.fusion.row_column import contiguous, folds_over, orders, points, problem
from tilewright.schedule.nests.access import all_loops
from tilewright.schedule.nests.hints import hint_product, work
from tilewright.schedule.nests.segments import segments_of
from tilewright.target import Target

CPU_CHUNKS = 32  # a fixed number: results do not depend on how many threads there are


def chunks(fit: Fit, target: Target) -> int:
    """How many chunks the serial loops are worth; one: none.

    On a card a row that is reduced in each round takes a quarter of a microsecond however short
    it is, so few rows are many chunks (H200: the gradient of layer norm of 512 rows of 256
    floats 15.8 us in chunks of 64 rows, sums of rows and columns of 512x512 8.6 us in chunks of
    32)."""
    rows = hint_product(v.src[0] for v in fit.serial)
    total = max(work(m) * (_often(m) if target.is_gpu else 1) for m in fit.members)
    wanted = -(-max(_wanted(target), _of_short_rows(fit, target)) // _programs(fit, target))
    if all(ix.value_of(v.src[0]) is not None for v in fit.serial):
        shortest = rules.CHUNK_ROWS.limit if partial_results(fit) > rules.CHUNK_ROWS.limit else 1
        least = (
            rules.CHUNK_WORK.limit // 8
            if shortest == 1 and target.is_gpu
            else rules.CHUNK_WORK.limit
        )
        if target.is_gpu and len(segments_of(fit.members, fit.outer)) > 1:
            shortest, least = (
                min(shortest, rules.ORDERED_CHUNK_ROWS.limit),
                rules.CHUNK_WORK.limit // 8,
            )
        wanted = min(wanted, total // least, -(-rows // shortest))
    else:  # more than one: the size of another call may be worth it
        wanted = max(2, min(wanted, -(-rows // shortest_chunk(fit))))
    return max(1, min(wanted, rows), _pieces(fit, target))


def _pieces(fit: Fit, target: Target) -> int:
    """Rounds of the first serial loop, if columns have something in common in each that would be
    gathered row by row in longer chunks, as a picture's scales of its channels; none: they have
    not."""
    if not target.is_gpu or len(fit.serial) < 2 or len(segments_of(fit.members, fit.outer)) > 1:
        return 0
    first, *rest = fit.serial
    rows = hint_product(v.src[0] for v in rest)
    if (
        rows < rules.CHUNK_ROWS.limit
        or rows * hint_product(v.src[0] for v in fit.outer) < rules.CHUNK_WORK.limit
    ):
        return 0
    used = [free_vars(n.src[0]) for m in fit.members for n in loads(*m.exprs)]
    common = any(first in v and v.isdisjoint(rest) for v in used)
    return hint_product([first.src[0]]) if common else 0


def _often(nest: Nest) -> int:
    """How often a point of a nest reads the same buffer, as where a short fold is written out."""
    return max(Counter(n.arg for n in loads(*nest.exprs)).values(), default=1)


def shortest_chunk(fit: Fit) -> int:
    """Iterations of the serial loops that are worth a chunk, where their number is not known."""
    rows = hint_product(v.src[0] for v in fit.serial)
    each = max(1, max(work(m) for m in fit.members) // max(rows, 1))
    return max(rules.CHUNK_ROWS.limit, rules.CHUNK_WORK.limit // each)


def _wanted(target: Target) -> int:
    return 1 << (2 * target.sms).bit_length() - 1 if target.is_gpu else CPU_CHUNKS


def _of_short_rows(fit: Fit, target: Target) -> int:
    """Programs of a card with short rows one after the other: one has few bytes of them in
    flight, so more have to (H200: the backward pass of layer norm, 100000 rows of 768 bfloat16:
    224 us by 256, 118 us by 1024; 40000 of 2048: 156 us by 256, 125 us by 512; 500000 of 128:
    137 us by 2048, 108 us by 4096). Of odd rows nothing is in flight before its round (31082 of
    2699: 222 us by 256, 161 us by 512; 222534 of 389 205 us by 2048, 179 us by 3072; RMS norm of
    761461 of 161 floats 462 us by 2048, 395 us by 4096). Each has rows enough for what it leaves
    not to matter.
    """
    if not target.is_gpu or len(segments_of(fit.members, fit.outer)) < 2:
        return 0
    beside = _programs(fit, target)
    rows = hint_product(v.src[0] for v in fit.serial)
    row = max(work(m) for m in fit.members) // max(rows * beside, 1)
    if row < rules.ORDERED_ROW.limit:
        return 0
    odd = row % 4 > 0
    most = 16 if row <= 256 else 12 if odd else 8
    times = min((rules.BUSY_MISALIGNED_ROW.limit if odd else rules.BUSY_ROW.limit) // row, most)
    if row % 8 and row <= rules.BUSY_ROW.limit:
        times = max(times, 2)
    return min(
        _wanted(target) * times,
        rows // (rules.LONG_CHUNK_ROWS.limit // 2 if odd else rules.LONG_CHUNK_ROWS.limit) * beside,
    )


def _programs(fit: Fit, target: Target, columns: int = rules.COLUMN_TILE.limit) -> int:
    """Parts that run side by side already; a card takes neighbouring columns together."""
    lanes = hint_product(v.src[0] for v in fit.outer)
    along = contiguous(fit.members)
    if target.is_gpu and along in fit.outer:
        lanes = -(-lanes // min(columns, hint_product([along.src[0]]) or 1))
    return max(lanes, 1)


def idles(fit: Fit, target: Target) -> bool:
    """Whether a group that reduces would leave most of a card idle."""
    if not target.is_gpu or not any(m.reduce for m in fit.members):
        return False
    most = max(work(m) for m in fit.members)
    if any(is_alone(m) for m in fit.members) or most < min(
        rules.LARGE_WORK.limit, rules.WORK_ALONE.limit * _programs(fit, target)
    ):
        return False
    if 2 * _programs(fit, target) > _wanted(target):
        return False
    if contiguous(fit.members) in fit.outer and 4 * _programs(fit, target) >= 3 * target.sms:
        return False  # columns in one loop that runs ahead (H200: 128 programs 62 us, 256 70 us)
    again = max((work(m) for m in dependents(fit.members)), default=0)
    if rules.LITTLE_WORK.limit * again < most:
        return True
    programs = _programs(fit, target, 16)
    if not again or 8 * programs <= target.sms:
        return True
    if _is_read_twice(fit, target):
        return True
    # columns that are held are read once, others again in any case (H200: batch norm of 131072 rows
    # of 384 floats 3.2 ms by 24 programs; 16384 rows of 2048 with gradients 366 us, 308 us cut)
    held = 16 * (most // hint_product(v.src[0] for v in fit.outer)) <= rules.ROW_ON_CHIP.limit
    return contiguous(fit.members) in fit.outer and not held and programs <= target.sms


def _is_read_twice(fit: Fit, target: Target) -> bool:
    """Whether few long rows are reduced in chunks, and then read again by a kernel of its own,
    of which a good part is in cache still: so many programs would have parts of one row that
    they wait for each other most of the time (H200: batch norm of 64 rows of 524288 bfloat16 117
    us by 32 programs that meet, 76 us in two passes; its backward pass 232 us by 64, 99 us)."""
    rows = ix.value_of(ix.product(v.src[0] for v in fit.outer))
    if not rows or rows >= target.sms or contiguous(fit.members) in fit.outer:
        return False
    longest, widths = walked_again(fit, rows)
    return (
        longest > rules.MEETING_ROW.limit
        and rows * longest * sum(widths) <= rules.READ_TWICE.limit * target.l2
    )


def walked_again(fit: Fit, rows: int) -> tuple[int, list[int]]:
    """Elements of a row that is walked again after its reductions, and bytes of one of each
    buffer."""
    longest = max((work(m) for m in dependents(fit.members)), default=0) // rows
    made = {s.buffer for m in fit.members for s in m.stores}
    walked = {n.arg: n.dtype.itemsize for m in fit.members for n in loads(*m.exprs)
              if n.arg not in made and points(n.src[0]) >= rows * longest}  # fmt: skip
    return longest, list(walked.values())


def starved(fit: Fit, target: Target) -> tuple[Expr, ...]:
    """Loops to cut because the group would leave most of a card idle; none: it would not."""
    if not idles(fit, target):
        return ()
    later = dependents(fit.members)
    left = tuple(m for m in fit.members if m not in later)
    for _, serial in orders(left):
        if all(v not in fit.outer for v in serial) and not problem(left, fit.outer, serial):
            return serial
    return ()


def is_coarse(fit: Fit, target: Target) -> bool:
    """Whether a card has SMs idle however the serial loops are cut (H200: differences of 96
    planes of 512x512 along rows and along columns 178 us by plane). Rows of which exponentials
    are reduced are not: several programs have parts of one."""
    if not target.is_gpu or max(work(m) for m in fit.members) < 4 * rules.LARGE_WORK.limit:
        return False
    if any(n.op == "exp" for m in fit.members for n in walk(*m.exprs)):
        return False
    beside = _programs(replace(fit, outer=(*fit.outer, *fit.serial)), target)
    return min(beside, chunks(fit, target) * _programs(fit, target)) < target.sms


def cooperating_programs(fit: Fit, target: Target) -> int:
    """How many programs of a card should walk each row together; none: each row has its own.

    All of them have to be at work at once, for they wait for each other's folds."""
    rows = ix.value_of(ix.product(v.src[0] for v in fit.outer))
    if not config.triton.cooperative_reductions or not target.is_gpu:
        return 0
    if not rows or 2 * rows > target.sms:
        return 0
    if any(is_alone(m) or not _plain(m, fit) for m in fit.members):
        return 0
    longest = max(work(m) for m in fit.members) // rows
    if not any(m.reduce for m in fit.members) or longest < rules.LARGE_WORK.limit:
        return 0
    if contiguous(fit.members) in fit.outer:
        return 0
    return min(target.sms // rows, longest // rules.SHARED_ROW_PART.limit)


def ticketed_programs(fit: Fit, target: Target) -> int:
    """How many programs of a card should walk each row together where rows are walked again, and
    are too long to be in cache until then: so many that those at work, two on each SM, have half
    of the cache (H200: batch norm of 256 rows of 200704 bfloat16 77.5 us by fours, 80.3 us by
    one each). None: each row has its own, as where several buffers are walked (its backward pass
    124 us by one each, 128, 137 and 173 us by 4, 8 and 16). Of fewer rows than SMs so many that
    all of these have some (64 rows of 802816 76.9 us by 16, 78.5 us by 32, 100 us by one), or of
    long ones that these are in cache (64 rows of two times 603000 floats 177 us by 64, 199 us by
    16)."""
    rows = ix.value_of(ix.product(v.src[0] for v in fit.outer))
    if not target.is_gpu or not rows or 16 * rows < target.sms:
        return 0
    if any(is_alone(m) or not _plain(m, fit) for m in fit.members):
        return 0
    if contiguous(fit.members) in fit.outer:
        return 0
    longest, walked = walked_again(fit, rows)
    if longest < rules.CACHED_ROW.limit:
        return 0
    few = rows < target.sms
    if len(walked) > 1 and not few:
        return 0
    row = longest * sum(walked)
    count = 1
    wanted = 2 * target.sms if few else 0
    while 2 * target.sms * row // count > target.l2 // 2 or rows * count < wanted:
        count *= 2
    if (
        few
        and len(walked) > 1
        and 2 * target.sms * row // rules.TICKETED_PROGRAMS.limit > target.l2
    ):
        return min(count, rules.TICKETED_FEW_ROWS.limit)
    return (
        min(count, rules.TICKETED_PROGRAMS.limit)
        if few or count <= rules.TICKETED_PROGRAMS.limit
        else 0
    )


def _plain(nest: Nest, fit: Fit) -> bool:
    """Whether a nest reduces its row or goes along it, and stores where nothing else does."""
    inside = [v for v in nest.loops if v not in fit.outer]
    scans = any(n.op == "scan" for n in walk(*nest.exprs))
    return not (inside and nest.reduce) and not scans and all(
        s.mode == "set" and s.mask is None for s in nest.stores)  # fmt: skip


def dependents(members: Sequence[Nest]) -> tuple[Nest, ...]:
    """The members that need a reduction of another, also through others."""
    made: set[str] = set()
    used: set[str] = set()  # by those found: who writes it must not come before them
    found: list[Nest] = []
    for m in members:
        if (m.reads | m.writes) & made or m.writes & used:
            found.append(m)
            made |= m.writes
            used |= m.reads
        elif m.reduce:
            made |= m.writes
    return tuple(found)


def partial_results(fit: Fit) -> int:
    """Elements each chunk leaves behind."""
    return sum(_results(m, fit) for m in fit.members if folds_over(m, fit.serial))


def _results(nest: Nest, fit: Fit) -> int:
    return hint_product(v.src[0] for v in nest.loops if v not in fit.outer)


def _width(nest: Nest) -> int:
    """Bytes of one partial result."""
    folds = [n for n in walk(*nest.exprs) if n.op == "reduce"]
    return sum(sum(s.dtype.itemsize for s in n.src) * REDUCTIONS[n.arg.kind].outputs for n in folds)


def stays_apart(nest: Nest, fit: Fit, target: Target) -> bool:
    """Whether a reduction over serial loops leaves a result per round, not per chunk: on a card
    a program has a row to itself, and accumulates over rows only what it has a column of."""
    columns = [v for v in nest.loops if v not in fit.outer]
    return target.is_gpu and not columns and folds_over(nest, fit.serial)


def wasteful(fit: Fit, saved: int, target: Target) -> str:
    """Why the target should not run these in order, or an empty string. `saved` are bytes."""
    parts = chunks(fit, target)
    rows = hint_product(v.src[0] for v in fit.serial)
    if is_coarse(fit, target):
        return "so few rows would leave most of the card idle"
    together = len(segments_of(fit.members, fit.outer)) == 1  # then chunks leave one result each
    left = sum(_results(m, fit) * _width(m)
               * (parts if together or not stays_apart(m, fit, target) else rows)
               for m in fit.members if folds_over(m, fit.serial))  # fmt: skip
    if parts > 1 and 2 * left > saved:
        return "partial results would cost more than reading the data again"
    programs = rows * hint_product(v.src[0] for v in fit.outer)
    longest = max(work(m) for m in fit.members) // max(programs, 1)
    if target.is_gpu and 2 * programs <= target.sms and longest >= rules.LARGE_WORK.limit:
        return "a few programs would have all of the work"
    folded = [m for m in fit.members if folds_over(m, fit.serial)]
    if target.is_gpu and not all(stays_apart(m, fit, target) for m in folded):
        shared = (*fit.outer, *fit.serial)
        for m in fit.members:
            row = [v.src[0] for v in all_loops(m) if v not in shared]
            if (
                ix.value_of(ix.product(row)) or rules.ROW_ON_CHIP.limit + 1
            ) > rules.ROW_ON_CHIP.limit:
                return "rows do not stay on the chip"
    return ""
