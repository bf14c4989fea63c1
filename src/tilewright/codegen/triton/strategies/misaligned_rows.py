"""Which rows are walked from sixteen bytes to sixteen bytes though they are misaligned in memory
(`tile/peeled.py` says how)."""

from __future__ import annotations

from dataclasses import replace

from tilewright import rules
from tilewright.codegen.triton.analysis.accesses import reads_rows
from tilewright.codegen.triton.analysis.operations import is_gathered, scatters, sorts
from tilewright.codegen.triton.analysis.work import is_heavy
from tilewright.codegen.triton.plan.config import power
from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.codegen.triton.strategies.packed_rows import is_packed
from tilewright.codegen.triton.tile.lower import RANDOM
from tilewright.codegen.triton.tile.paired import PAIR
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, syms
from tilewright.ir.program import Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.nests.hints import hint, hint_product
from tilewright.target import ACCESS


def misaligned_rows(program: Program, group: Group, shape: Shape) -> Shape:
    """The shape with an axis that leans, where that lets most of what it moves move at once."""
    flat = shape.flat()
    axis = _last(shape)
    if axis is not None:
        guide = _guide(program, group, flat, axis)
    else:
        axis, guide = shape.parallel[0], _end(group, shape)
    if guide is None:
        odd = _is_odd(program, group, shape, flat)
        tiled = shape.chunk and (shape.inner[0].size or 0) >= rules.PAIRED_TILED_ROW.limit
        if odd and not tiled and is_packed(program, group, shape, flat):
            return _turned(shape)
        guide = _pairs(program, group, shape, flat) if odd else None
        if guide is None:
            return replace(shape, misaligned=odd)
        shape, axis = replace(shape, misaligned=True), shape.inner[0]
    new = replace(axis, start=guide[0], vector=guide[1])
    return replace(
        shape, parallel=tuple(new if a is axis else a for a in shape.parallel),
        segments=tuple((s, new if a is axis else a) for s, a in shape.segments))  # fmt: skip


def is_better_walked(group: Group, held: Shape, walked: Shape) -> bool:
    """Whether long rows that could be held should not be: those that are read once either way,
    for exponentials and their largest at once (H200: losses of 12048 rows of 13328 bfloat16 84
    us, 129 us held, of 13329 94 us, 159 us); odd ones beside weights, which lean only if they
    are walked (RMS norm of 11003 bfloat16 67 us, 85 us held), and of one buffer those that leave
    much of a block empty (softmax of 10001 63 us, 82 us) or are reduced for their mean and
    deviations (layer norm of 16384 67 us, 74 us)."""
    size = held.inner[0].size or 0
    if not held.persistent or size <= rules.ONE_BLOCK_ROW.limit:
        return False
    if not held.reread:
        return True
    flat, leans = held.flat(), any(a.start is not None for a in walked.inner)
    axes = {a.var for a in flat.axes}
    nodes = [n for n in flat.loads if n.arg not in group.local]
    rows = {n.arg: n.dtype.itemsize for n in nodes if axes <= free_vars(n.src[0])}
    if leans and rows_alike(flat):
        return True
    if len(rows) != 1 or max(rows.values()) > rules.MISALIGNED_BYTES.limit:
        return False
    return "welford" in held.reductions or (leans and 4 * size <= 3 * power(size))


def _last(shape: Shape) -> Axis | None:
    """The axis that memory runs along, where it is one that is worth leaning. Weights are loaded by
    single elements from every eighth place then: worse than all that way if rows are held (H200:
    layer norm of 3001 bfloat16 139 us, 235 us leaning; softmax of 1501 97 us, 89 us leaning)."""
    if not _may_lean(shape) or (_scans(shape) and (shape.reverse_scan or not shape.persistent)):
        return None
    if not shape.inner:
        axis = shape.parallel[1] if shape.gathered else None
        shortest = rules.PEELED_GATHERED_ROW.limit if reads_rows(shape) else rules.PEELED_ROW.limit
        return axis if axis is not None and axis.likely >= shortest else None
    if len(shape.inner) > 1 or has_computed_places(shape):
        return None
    if shape.persistent and not shape.chunk and rows_alike(shape.flat()):
        return None
    shortest = rules.PEELED_RESIDENT_ROW.limit if shape.persistent else rules.PEELED_ROW.limit
    return shape.inner[0] if shape.inner[0].likely >= shortest else None


def _turned(shape: Shape) -> Shape:
    """With rows one below the other."""
    (x,), (r,) = shape.parallel, shape.inner
    axis = replace(r, dim=0)
    return replace(
        shape, parallel=(replace(x, dim=1),), packed=True,
        segments=tuple((s, None if a is None else axis) for s, a in shape.segments))  # fmt: skip


def _may_lean(shape: Shape) -> bool:
    if shape.rank != 2 or shape.across or shape.serial or shape.ragged or sorts(shape.members):
        return False
    apart = shape.row_programs and not shape.chunk
    if apart and (shape.reread or not shape.ticketed or "welford" in shape.reductions):
        return False
    return shape.ops.isdisjoint(RANDOM) and not any(scatters(m) for m in shape.members)


def _pairs(program: Program, group: Group, shape: Shape, flat: Shape) -> tuple[Expr, int] | None:
    """Where rows begin that are moved two elements at once: held ones of an odd length, too short
    for pieces. Weights are loaded twice then, which many rows have to make up for (H200: layer norm
    of 131 bfloat16 112 us by single elements, 130 us so; of 249 179 us, 148 us so; of 5001 such
    rows 4.0 us, 4.6 us so; of 1501 108 us, 101 us so)."""
    if not shape.persistent or _scans(shape) or not _may_lean(shape) or has_computed_places(shape):
        return None
    (axis,) = shape.inner
    size, shortest = (
        axis.size or 0,
        rules.PAIRED_TILED_ROW.limit if shape.chunk else rules.PAIRED_ROW.limit,
    )
    if rows_alike(flat):
        shortest = rules.PAIRED_WEIGHTED_ROW.limit
        if hint_product(a.extent for a in shape.axes) < rules.PAIRED_WEIGHTED_ELEMENTS.limit:
            return None
    if size % PAIR == 0 or not shortest <= size <= rules.LONGEST_PAIRED_ROW.limit:
        return None
    rest, piece = most_moved(program, group, flat, axis)
    if piece * rules.MISALIGNED_BYTES.limit < 16 or _reads_what_others_store(flat, axis):
        return None
    return rest, PAIR


def _scans(shape: Shape) -> bool:
    return shape.scans


def has_computed_places(shape: Shape) -> bool:
    """Whether each element of a row has a place to compute for something else, as its channel's
    scale: that of eight neighbours a thread would load eight times (H200: group norm of rows of
    2890 bfloat16, channels of 289, 126 us by single elements, 257 us so)."""
    flat = shape.flat()
    rows = {a.var for a in flat.inner}
    return any(ix.coefficient(n.src[0], v) is None for n in flat.loads for v in rows)


def _end(group: Group, shape: Shape) -> tuple[Expr, int] | None:
    """Of a tensor that is walked as one row, its place and pieces: the last may not be whole (H200:
    bias and silu of 2313x54179 bfloat16 121 us, 418 us one element at a time)."""
    if shape.rank != 1 or shape.serial or shape.ragged or shape.inner or is_heavy(shape):
        return None
    (axis,) = shape.parallel
    if axis.likely < rules.PEELED_TENSOR.limit or begin_evenly(axis.extent, ACCESS):
        return None
    flat = shape.flat()
    if any(scatters(m) for m in flat.members):
        return None
    moved = [n.src[0] for n in flat.loads if n.arg not in group.local]
    moved += [s.index for s in flat.stores if s.buffer not in group.local]
    along = any(ix.mod(ix.sub(i, axis.var), ACCESS) is ix.ZERO
                and axis.var not in free_vars(ix.sub(i, axis.var)) for i in moved)  # fmt: skip
    return (ix.ZERO, ACCESS) if along else None


def _guide(program: Program, group: Group, flat: Shape, axis: Axis) -> tuple[Expr, int] | None:
    """Where a row begins and the elements of a piece, if that is worth it."""
    rest, piece = most_moved(program, group, flat, axis)
    widest = (
        2 * rules.MISALIGNED_BYTES.limit if _scans(flat) else rules.MISALIGNED_BYTES.limit
    )  # threads hand on one of several neighbours
    if piece * widest < 16 or _reads_what_others_store(flat, axis):
        return None
    return (rest, piece) if begins_anywhere(rest, piece, axis) else None


def _is_odd(program: Program, group: Group, shape: Shape, flat: Shape) -> bool:
    """Whether most of what is moved are misaligned rows, not even where half of a piece does."""
    if shape.across or len(shape.inner) != 1:
        return False
    rest, piece = most_moved(program, group, flat, shape.inner[0])
    return begins_anywhere(rest, max(piece // 2, 1), shape.inner[0])


def moved_singly(shape: Shape) -> set[str]:
    """What is taken to are misaligned beside odd rows, though it does not: their weights. A tile
    lies over threads as suits the widest load of it, and with weights eight at once the rows
    would be loaded from every eighth place (H200: layer norm of 222534 rows of 389 bfloat16 145
    us, 187 us so; its backward pass 245 us, 270 us). Where places are gathered, all (group norm
    of channels of 289 126 us, 164 us with pairs of neighbours)."""
    if has_computed_places(shape):
        return {b for m in shape.members for b in m.reads | m.writes}
    return rows_alike(shape)


def rows_alike(shape: Shape) -> set[str]:
    """Rows that are the same for all programs, as a layer's weights."""
    rows = frozenset(a.var for a in shape.inner)
    return {n.arg for n in shape.loads if free_vars(n.src[0]) == rows}


def most_moved(program: Program, group: Group, flat: Shape, axis: Axis) -> tuple[Expr, int]:
    """Where a row begins in what most is moved of, and the elements of sixteen bytes of that."""
    moved: dict[tuple[Expr, int], int] = {}
    nodes = [n for n in flat.loads if n.arg not in group.local]
    if not flat.inner:  # rows that are gathered are slid to where others begin
        nodes = [n for n in nodes if not is_gathered(n.src[0])]
    stores = [s for s in flat.stores if s.buffer not in group.local]
    accesses = [*((n.arg, n.src[0]) for n in nodes), *((s.buffer, s.index) for s in stores)]
    for buffer, index in dict.fromkeys(accesses):
        if ix.coefficient(index, axis.var) is not ix.ONE:
            continue
        rest = ix.sub(index, axis.var)
        size = program.buffers[buffer].dtype.itemsize
        key = rest, 16 // min(size, 16)
        total = hint_product(v.src[0] for v in free_vars(index)) * size
        moved[key] = moved.get(key, 0) + total
    return max(moved, key=lambda k: moved[k], default=(ix.ZERO, 1))


def begins_anywhere(rest: Expr, piece: int, axis: Axis) -> bool:
    """Whether rows are misaligned."""
    if axis.var in free_vars(rest) or not ix.known_nonneg(rest):
        return False
    return not begin_evenly(rest, piece)


def _reads_what_others_store(flat: Shape, axis: Axis) -> bool:
    """Whether what a thread stores at once others still have to read: all but what is read where it
    was stored before, which a thread has stored itself, and of the ends of rows knows."""
    stored = {s.buffer for s in flat.stores if axis.var in free_vars(s.index)}
    made: set[tuple[str, tuple[Expr, ...]]] = set()
    for m in flat.members:
        for n in loads(*m.exprs):
            if n.arg in stored and axis.var in free_vars(n.src[0]) and (n.arg, n.src) not in made:
                return True
        made |= {(s.buffer, (s.index,)) for s in m.stores}
    return False


def begin_evenly(rest: Expr, piece: int) -> bool:
    """Whether all rows begin with a piece; of sizes that are not known, likely."""
    if ix.mod(rest, piece) is ix.ZERO:
        return True
    if not syms(rest):
        return False
    steps = {v: ix.coefficient(rest, v) for v in free_vars(rest)}
    first = ix.sub(rest, ix.add(*(ix.mul(v, step) for v, step in steps.items() if step)))
    return all(step is not None and hint(step) % piece == 0 for step in (*steps.values(), first))
