"""How a Triton kernel walks its group: the axes of its tile, and which loops each stands for.

An axis is a number of loops walked as one: a program has a block of consecutive points of it.
Parallel axes come from the group's shared loops, and each segment with loops of its own has an
axis for them, either whole in one block (persistent) or block by block (looped).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import combinations, product

from tilewright import rules
from tilewright.codegen.triton.analysis.operations import scatters, sorts
from tilewright.codegen.triton.rewrite.loop_order import (
    longest_first,
    ordered_loops,
    read_in_pieces,
    strides_of,
)
from tilewright.codegen.triton.rewrite.reverse_scan import with_forward_scans
from tilewright.codegen.triton.rewrite.split_pairs import split_pairs
from tilewright.codegen.triton.rewrite.unroll_channels import unroll_channels
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, substitute, var, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Nest, Program, Store
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import accesses, all_loops
from tilewright.schedule.nests.access import disjoint
from tilewright.schedule.nests.hints import hint, hint_product
from tilewright.schedule.nests.segments import Segment, merge_loops, segments_of, without_scan
from tilewright.schedule.nests.transform import reduces_or_scans, rename, substitute_nest


@dataclass(frozen=True)
class Axis:
    name: str
    loops: tuple[Expr, ...]  # outermost first
    dim: int  # of the tile
    _: KW_ONLY
    start: Expr | None = None  # where a row along it begins in memory, if its lanes begin before it
    vector: int = 0  # lanes that move at once then

    @cached_property
    def extent(self) -> Expr:
        return ix.product(v.src[0] for v in self.loops)

    @cached_property
    def var(self) -> Expr:
        """The one loop that stands for all of them."""
        return self.loops[0] if len(self.loops) == 1 else var(f"{self.name}flat", self.extent)

    def places(self) -> Mapping[Expr, Expr]:
        """Each loop's variable in terms of `var`."""
        return self._places

    @cached_property
    def _places(self) -> dict[Expr, Expr]:
        found: dict[Expr, Expr] = {}
        below: Expr = ix.ONE
        for k, v in reversed(list(enumerate(self.loops))):
            place = ix.floordiv(self.var, below)
            found[v] = ix.mod(place, v.src[0]) if k else place
            below = ix.mul(below, v.src[0])
        return found

    @property
    def block(self) -> str:
        return f"{self.name.upper()}BLOCK"

    @property
    def size(self) -> int | None:
        return ix.value_of(self.extent)

    @property
    def likely(self) -> int:
        return max(1, hint(self.extent))

    @property
    def slack(self) -> int:
        """The most lanes before a row."""
        return 0 if self.start is None or self.start is ix.ZERO else self.vector - 1


Placed = tuple[Segment, Axis | None]  # a segment, and the axis of its own loops


@dataclass(frozen=True)
class Shape:
    """The axes, and the segments in order, each with the axis of its own loops.

    `ragged` says of loops that end sooner in a last chunk what has to be negative inside them.
    """

    parallel: tuple[Axis, ...]
    segments: tuple[Placed, ...]
    rank: int
    persistent: bool = True
    across: bool = False  # memory runs along the parallel axis, not along the rows
    pipelined: bool = False  # loads of later rounds of its loops may be in flight
    scattered: bool = False  # stores are in pieces, in the order of what is read
    gathered: bool = False  # of the axes of a tile, the outer ones say which rows are read
    reread: bool = False  # rows are walked more than once
    row_programs: int = 0  # programs that walk each row together
    ticketed: bool = False  # these are more than run at once
    prefetched_scan: bool = False  # rows are scanned block by block, with the next one under way
    preloaded: int = 0  # elements of the pieces of these, where all of them are
    column_threads: bool = False  # a thread scans a column, or several
    unrolled: bool = False  # columns are reduced row by row, without a loop
    reverse_scan: bool = False  # scans run from the last point to the first
    prefetched: bool = False  # rows are reduced block by block, with the next one under way
    serial: tuple[Expr, ...] = ()  # loops run in order around the segments
    total: frozenset[str] = frozenset()  # members that fold both their rows and the serial loops
    misaligned: bool = False  # rows are misaligned in memory: they are moved by single elements
    packed: bool = False  # and lie one after the other: those of a program are loaded as one
    staged: int = 0  # columns beside each other, which are loaded in whole pieces of their rows
    chunk: int = 0  # elements of the pieces that a program holds a row in
    short: bool = False  # these are narrow, and a warp has several rows
    part: int = 0  # elements of a row, or of a plane of it, that one of several programs holds
    planes: tuple[Expr, ...] = ()  # loops of which each of the programs of a row has some points
    planes_each: int = 1  # neighbouring points of the last of these
    ragged: Mapping[Expr, Expr] = field(default_factory=dict[Expr, Expr])
    members: tuple[Nest, ...] = ()

    def flat(self) -> Shape:
        """The same over one loop per axis; an index that walks all loops of one is affine again."""
        return self._flat

    @cached_property
    def _flat(self) -> Shape:
        segments: list[Placed] = []
        for segment, own in self.segments:
            axes = [*self.parallel, *([] if own is None else [own])]
            places = tuple(p for a in axes for p in a.places().items() if p[0] is not p[1])
            members = [_over_axes(m, places) for m in segment.members]
            segments.append((replace(segment, members=members), own))
        return replace(self, segments=tuple(segments),
                       members=tuple(m for s, _ in segments for m in s.members))  # fmt: skip

    def pieces(self, axis: Axis) -> int:
        """The length of the pieces of a row that have something in common, as a channel's scale:
        the largest power of two that divides all such lengths, or zero."""
        found = 0
        for node in walk(*(e for m in self.flat().members for e in m.exprs)):
            if node.op == "ifloordiv" and node.src[0] is axis.var:
                found |= ix.value_of(node.src[1]) or 1
        return found & -found

    def ends(self, axis: Axis) -> list[Expr]:
        """What has to be negative at a point of the axis, beyond being inside its extent."""
        axes = [*self.parallel, *([] if axis in self.parallel else [axis])]
        mapping = {v: e for a in axes for v, e in a.places().items()}
        return [substitute(e, mapping) for v, e in self.ragged.items() if v in axis.loops]

    def limit(self, axis: Axis) -> Expr | None:
        """Where rows along the axis end in a last chunk, if one place says it."""
        ends = self.ends(axis)
        if len(ends) != 1 or ix.coefficient(ends[0], axis.var) is not ix.ONE:
            return None
        limit = ix.sub(axis.var, ends[0])
        return limit if free_vars(limit) else None

    @cached_property
    def inner(self) -> list[Axis]:
        return list(dict.fromkeys(axis for _, axis in self.segments if axis is not None))

    @cached_property
    def row_loops(self) -> frozenset[Expr]:
        """The loops of rows or columns, along which it reduces or scans."""
        return frozenset(v for axis in self.inner for v in axis.loops)

    @cached_property
    def nodes(self) -> tuple[Expr, ...]:
        """All that is computed, of one member after the other."""
        return tuple(n for m in self.members for n in walk(*m.exprs))

    @cached_property
    def ops(self) -> frozenset[str]:
        return frozenset(n.op for n in self.nodes)

    @cached_property
    def reductions(self) -> frozenset[str]:
        """The kinds of all reductions."""
        return frozenset(n.arg.kind for n in self.nodes if n.op == "reduce")

    @cached_property
    def scans(self) -> bool:
        return any(segment.scans for segment, _ in self.segments)

    @cached_property
    def loads(self) -> tuple[Expr, ...]:
        return tuple(n for m in self.members for n in loads(*m.exprs))

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        return tuple(s for m in self.members for s in m.stores)

    @cached_property
    def written(self) -> frozenset[str]:
        """The buffers that are."""
        return frozenset(s.buffer for s in self.stores)

    @property
    def parts(self) -> int:
        """Of a row that is held, or of a plane of it."""
        return -(-(self.inner[0].size or 0) // self.part) if self.part else 1

    @cached_property
    def axes(self) -> list[Axis]:
        return [*self.parallel, *self.inner]

    @property
    def family(self) -> str:
        if not self.inner:
            return "poi"
        return "per" if self.persistent else "red"


@functools.lru_cache(1 << 10)  # each way to write a kernel asks for it before it is chosen
def _over_axes(nest: Nest, places: tuple[tuple[Expr, Expr], ...]) -> Nest:
    return substitute_nest(nest, dict(places), nest.loops, nest.reduce)


def shape_of(program: Program, group: Group) -> Shape | str:
    """The shape of a group's kernel, or why Triton cannot express it."""
    if all(v in group.outer or v in group.serial for m in group.members for v in all_loops(m)):
        group = replace(group, serial=())  # nothing is inside: the serial loops are the rows
    group, back = with_forward_scans(group)
    group, ragged = _regular(group)
    if ragged is None:
        return "the length of a loop depends on another in an unknown way"
    members, outer = ordered_loops(list(group.members), without_scan(group))
    if not group.serial and not ragged:
        members, outer = split_pairs(*unroll_channels(members, outer))
        # pieces of a concatenation are as long as their rows together (H200: three of 359x24x1747
        # bfloat16 side by side 45 us, 73 us with a place in its row for each element)
        members, outer, _ = merge_loops(members, outer, compared=True)
    segments = segments_of([_inside(m, group.serial) for m in members], (*outer, *group.serial))
    for segment in segments:
        if segment.loops and segment.reduce:
            return "a reduction has loops of its own inside the shared ones"
        if segment.scans and len(segment.inner) != 1:
            return "a scan has loops of its own beside the one it runs along"
    placed = _inner_axes(segments)
    members = [m for s, _ in placed for m in s.members]
    # loops that have the same names now are one (H200: averages of 256x384x768 float16 by a mask
    # that is summed too 52 us, 181 us held for two reductions)
    placed = _inner_axes(segments_of(members, (*outer, *group.serial)))
    if not any(axis for _, axis in placed) and not group.serial:
        parallel, looked_up = _tiles(program, members, outer), False
        if len(parallel) == 1:
            parallel = (
                _rows_looked_up(members, outer) or _rows_of_one(program, members, outer) or parallel
            )
            looked_up = len(parallel) > 1
        scattered = read_in_pieces(members) is not None
        shape = Shape(parallel, placed, max(1, len(parallel)), scattered=scattered,
                      gathered=looked_up, ragged=ragged, members=tuple(members))  # fmt: skip
        return cannot_hand_over(group, shape) or shape
    total = frozenset(m.name for m in group.members if any(v in m.reduce for v in group.serial)
                      and any(v not in group.serial for v in m.reduce))  # fmt: skip
    shape = Shape((Axis("x", outer, 0),), placed, 2, serial=group.serial, total=total,
                  reverse_scan=back, ragged=ragged, members=tuple(members),
                  row_programs=group.row_programs, ticketed=group.ticketed)  # fmt: skip
    shape = replace(shape, across=_runs_across(program, shape))
    shape = replace(shape, persistent=not group.row_programs and (_fits(shape) or sorts(members)))
    shape = replace(shape, pipelined=_may_run_ahead(group, shape))
    if group.serial and not shape.persistent:
        return "rows that do not fit in registers cannot share serial loops"
    return cannot_hand_over(group, shape) or cannot_share(shape) or shape


def other_residency(group: Group, shape: Shape) -> Shape | str:
    """The same kernel with its rows walked instead of held, or held instead of walked, where both
    are worth measuring."""
    if len(shape.inner) != 1 or shape.serial or shape.row_programs or shape.across or shape.ragged:
        return "only rows along memory that one program has can be either"
    size = shape.inner[0].size
    shortest, longest = rules.EITHER_RESIDENCY.limit, rules.RESIDENT_ROW.limit // 2
    if size is None or not shortest <= size <= longest:
        return f"rows do not have between {shortest} and {longest} elements"
    if shape.scans:
        return "rows are scanned"
    other = replace(shape, persistent=not shape.persistent)
    return cannot_hand_over(group, other) or other


def cannot_share(shape: Shape) -> str:
    """What a program reads of a shared row that another may write."""
    if not shape.row_programs:
        return ""
    flat = shape.flat()
    made = {(s.buffer, s.index) for s in flat.stores}
    stored = {buffer for buffer, _ in made}
    for n in flat.loads:
        if n.arg in stored and (n.arg, n.src[0]) not in made:
            return f"{n.arg} is read of another program's part of the row"
    for (a, i), (b, j) in combinations(made, 2):
        if a == b and not disjoint(i, j):
            return f"{a} is written by two programs of a row"
    return ""


def _inside(nest: Nest, serial: tuple[Expr, ...]) -> Nest:
    """The nest at one iteration of the serial loops: what it reduces over them, it accumulates,
    for each point of the loops inside."""
    if not any(v in nest.reduce for v in serial):
        return nest
    return replace(nest, loops=(*nest.loops, *nest.reduce), reduce=())


def accumulates(nest: Nest, serial: tuple[Expr, ...]) -> bool:
    """Whether a nest of the shape folds over the serial loops."""
    return bool(serial) and not nest.reduce and reduces_or_scans(nest, "reduce")


# ---- loops that end sooner in a last chunk


def _regular(group: Group) -> tuple[Group, dict[Expr, Expr] | None]:
    """The group with loops of constant length, and what has to be negative inside those that may
    end sooner; None where a length depends on another loop in a way that is not known."""
    names: dict[Expr, Expr] = {}
    ends: dict[Expr, Expr] = {}
    for m in group.members:
        for v in all_loops(m):
            size = v.src[0]
            if v in names or not free_vars(size):
                continue
            if size.op != "imin" or free_vars(size.src[0]) or v in group.serial:
                if v not in group.serial:
                    return group, None
                continue
            names[v] = var(v.arg, size.src[0])
            ends[names[v]] = ix.sub(names[v], size.src[1])
    if not names:
        return group, {}
    swapped = replace(group, members=tuple(rename(m, names) for m in group.members),
                      outer=tuple(names.get(v, v) for v in group.outer))  # fmt: skip
    return swapped, ends


# ---- axes of segments


def _inner_axes(segments: list[Segment]) -> tuple[Placed, ...]:
    """An axis per distinct set of loops; loops that only differ in name become the same."""
    axes: list[Axis] = []
    placed: list[Placed] = []
    for segment in segments:
        if not segment.inner:
            placed.append((segment, None))
            continue
        found = next((a for a in axes if set(a.loops) == set(segment.inner)), None)
        if found is None:
            for axis in axes:
                names = _matched(axis, segment, [m for s, _ in placed for m in s.members])
                if names is not None:
                    segment = Segment(tuple(names[v] for v in segment.loops),
                                      tuple(names[v] for v in segment.reduce),
                                      [rename(m, names) for m in segment.members])  # fmt: skip
                    found = axis
                    break
        if found is None:
            found = Axis(f"r{len(axes)}", segment.inner, 1)
            axes.append(found)
        placed.append((segment, found))
    if len(axes) == 1:
        only = Axis("r", axes[0].loops, 1)
        placed = [(s, None if a is None else only) for s, a in placed]
    return tuple(placed)


def _matched(axis: Axis, segment: Segment, earlier: Sequence[Nest]) -> dict[Expr, Expr] | None:
    """The segment's loops by those of an axis, when a buffer both touch says which is which, at any
    of the places they touch it at: labels that are compared with each other are read at a row's and
    along it. As two axes they would be held twice."""
    if sorted(v.src[0].key for v in axis.loops) != sorted(v.src[0].key for v in segment.inner):
        return None
    for m in segment.members:
        for other in earlier:
            for buffer in sorted((m.reads | m.writes) & (other.reads | other.writes)):
                for theirs, mine in product(accesses(other, buffer), accesses(m, buffer)):
                    names = _by_stride(axis, segment, theirs, mine)
                    if names is not None:
                        return names
    return None


def _by_stride(axis: Axis, segment: Segment, theirs: Expr, mine: Expr) -> dict[Expr, Expr] | None:
    names: dict[Expr, Expr] = {}
    for v in segment.inner:
        stride = ix.coefficient(mine, v)
        if stride is None or stride is ix.ZERO:
            return None
        u = next((u for u in axis.loops if u.src[0] is v.src[0] and u not in names.values()
                  and ix.coefficient(theirs, u) is stride), None)  # fmt: skip
        if u is None:
            return None
        names[v] = u
    return names


def _fits(shape: Shape) -> bool:
    """Whether every row stays in registers from its first use to its last."""
    for axis in shape.inner:
        if axis.size is None:
            return False
        passes = [s for s, a in shape.segments if a is axis]
        once = len(passes) == 1 and not passes[0].scans
        alive = rules.RESIDENT_ROW.limit // rules.RESIDENT_ONE_PASS.limit if once else 2
        if shape.across:
            alive = (
                rules.TILE_COLUMNS.limit
                if len(passes) > 1
                else rules.RESIDENT_ROW.limit // rules.RESIDENT_COLUMN.limit
            )
        if axis.size * alive > rules.RESIDENT_ROW.limit:
            return False
    return True


def _runs_across(program: Program, shape: Shape) -> bool:
    loops = [v for axis in shape.axes for v in axis.loops]
    along = run_along(program, shape.members, loops)
    across = max((along.get(v, 0) for v in shape.parallel[0].loops), default=0)
    return across > max((along.get(v, 0) for axis in shape.inner for v in axis.loops), default=0)


def _is_beyond_cache(shape: Shape) -> bool:
    """Whether rows are walked again that are too long for all at work to stay in cache."""
    if shape.persistent or shape.row_programs or len(shape.inner) != 1:
        return False
    walks = sum(axis is not None for _, axis in shape.segments)
    return walks > 1 and (shape.inner[0].size or 0) >= rules.PIPELINED_AGAIN.limit


def is_one_walk(shape: Shape) -> bool:
    """Whether even rows of one tensor are walked once, to add them up or the like: there is nothing
    to wait for but memory."""
    walks = [s for s, axis in shape.segments if axis is not None]
    if shape.persistent or shape.row_programs or shape.across or shape.ragged or len(walks) != 1:
        return False
    members, own = walks[0].members, shape.row_loops
    nodes = list(walk(*(e for m in members for e in m.exprs)))
    read = {n for n in nodes if n.op == "load" and own & free_vars(n)}
    kinds = {n.arg.kind for n in nodes if n.op == "reduce"}
    return (len(read) == 1 and all(n.dtype.itemsize > 1 for n in read)
            and all(m.reduce for m in members) and not any(n.op == "exp" for n in nodes)
            and not kinds & {"welford", "argmin", "argmax"}
            and all((a.size or 1) % 8 == 0 and a.start is None for a in shape.inner))  # fmt: skip


def _may_run_ahead(group: Group, shape: Shape) -> bool:
    """Whether a loop is worth having later rounds' loads in flight, and nothing is loaded that
    the kernel has stored: what is read where it was just written is no load."""
    long = is_one_walk(shape) and all(
        (a.size or 0) >= rules.PIPELINED_LOOP.limit for a in shape.inner
    )
    if not (group.serial or (shape.across and not shape.persistent) or _is_beyond_cache(shape)
            or long):  # fmt: skip
        return False
    stored: set[str] = set(group.writes - group.local) if group.serial else set()
    made: set[tuple[str, Expr]] = set()
    for segment, axis in shape.flat().segments:
        mine: set[tuple[str, Expr]] = set()  # what only this loop knows
        if not group.serial:  # a reduction is stored after its loop
            stored |= {b for m in segment.members if not m.reduce for b in m.writes} - group.local
        for m in segment.members:
            for n in loads(*m.exprs):
                known = not n.src[1:] and (n.arg, n.src[0]) in made | mine
                if n.arg in stored and not known and (group.serial or axis is not None):
                    return False
            lasts = group.serial or axis is None or m.reduce
            new = {(s.buffer, s.index) for s in m.stores if not scatters(m)}
            made, mine = (made | new, mine) if lasts else (made, mine | new)
        if not group.serial:
            stored |= {b for m in segment.members for b in m.writes} - group.local
    return True


def cannot_hand_over(group: Group, shape: Shape) -> str:
    """Local buffers have no memory: what reads one takes the value from the statement that makes
    it, and in a looped kernel a later loop computes it again. Why that cannot be."""
    seen: set[str] = set()
    rewritten: set[str] = set()  # by the members so far
    flat = shape.flat()
    axis_of = {m.name: axis for s, axis in flat.segments for m in s.members}
    makers = {(s.buffer, s.index): m for m in flat.members for s in m.stores}
    stored: dict[str, list[Expr]] = {}  # where, by the members so far
    for m in flat.members:
        own = {s.buffer: s.index for s in m.stores}
        for node in loads(*m.exprs):
            if node.arg not in group.local:
                continue
            maker = makers.get((node.arg, node.src[0]))
            if maker is None:
                return f"{node.arg} is read at other places than it is made"
            if any(not disjoint(other, node.src[0]) for other in stored.get(node.arg, ())
                   if other is not node.src[0]):  # fmt: skip
                return f"{node.arg} is made in parts that overlap"
            again = not shape.persistent and axis_of[maker.name] is not None and not maker.reduce
            if not again or maker is m:
                continue
            # a result in the place of what it is computed from: read there before it is stored
            gone = any(n.arg in rewritten or own.get(n.arg, n.src[0]) is not n.src[0]
                       for n in _behind(maker, makers, group.local))  # fmt: skip
            twice = sum(i is node.src[0] for i in stored.get(node.arg, ())) > 1
            if gone or twice or reduces_or_scans(maker, "scan"):
                return f"{node.arg} cannot be computed twice"
        rewritten |= seen & m.writes
        seen |= m.reads | m.writes
        for s in m.stores:
            stored.setdefault(s.buffer, []).append(s.index)
    return ""


def _behind(maker: Nest, makers: dict[tuple[str, Expr], Nest], local: frozenset[str]
            ) -> list[Expr]:  # fmt: skip
    """The loads from memory that a value is computed from, through rows that are local."""
    found: dict[Expr, None] = {}
    waiting = [maker]
    while waiting:
        for n in loads(*waiting.pop().exprs):
            other = makers.get((n.arg, n.src[0])) if n.arg in local else None
            if other is not None and not other.reduce and n not in found:
                waiting.append(other)
            found[n] = None
    return list(found)


# ---- tiles of pointwise kernels


def run_along(program: Program, members: Sequence[Nest], loops: Sequence[Expr]
              ) -> dict[Expr, int]:  # fmt: skip
    """For each loop, the bytes of the accesses that are contiguous along it."""
    found: dict[Expr, int] = {}
    for m in members:
        indices = {(n.arg, n.src[0]) for n in loads(*m.exprs)}
        indices |= {(s.buffer, s.index) for s in m.stores}
        for buffer, index in indices:
            used = [v for v in loops if v in free_vars(index)]
            for v in used:
                if ix.coefficient(index, v) is ix.ONE:
                    size = hint_product(u.src[0] for u in used)
                    found[v] = found.get(v, 0) + size * program.buffers[buffer].dtype.itemsize
    return found


def _tiles(program: Program, members: Sequence[Nest], outer: tuple[Expr, ...]
           ) -> tuple[Axis, ...]:  # fmt: skip
    """One axis; or one per loop that memory runs along, where these differ between buffers."""
    if len(outer) < 2:
        return (Axis("x", outer, 0),)
    last = outer[-1]
    along = run_along(program, members, outer)
    largest = max(along.values(), default=0)
    turned = [v for v in outer[:-1] if v in along and along[v] * 8 >= largest
              and hint(v.src[0]) >= rules.TILE_SIDE.limit]  # fmt: skip
    dynamic = any(ix.value_of(v.src[0]) is None for v in outer[1:])
    if hint(last.src[0]) < rules.TILE_SIDE.limit or not (
        turned or (dynamic and hint(last.src[0]) >= 64)
    ):
        return (Axis("x", outer, 0),)
    turned = sorted(turned, key=lambda v: -along[v])[:2]
    if not turned:
        return Axis("y", outer[:-1], 0), Axis("x", (last,), 1)
    if len(turned) < 2:
        y, x = _sides(members, outer, turned[0])
        return Axis("y", y, 0), Axis("x", x, 1)
    rest = [v for v in outer[:-1] if v not in turned]
    return Axis("z", (*rest, turned[1]), 0), Axis("y", (turned[0],), 1), Axis("x", (last,), 2)


def _sides(members: Sequence[Nest], outer: tuple[Expr, ...], turned: Expr
           ) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:  # fmt: skip
    """The loops of the two sides of a tile, each in the order of what runs along it. A short
    side takes the loops that memory goes on along: so 14 columns of 1024 rows are written as one
    (H200: 14x1024x95x95 bfloat16 reversed 380 us as rows of 14)."""
    sides: list[tuple[Expr, ...]] = [(turned,), (outer[-1],)]
    strides = [_strides_along(members, outer, side[0]) for side in sides]
    while True:
        free = [v for v in outer if v not in sides[0] and v not in sides[1]]
        lengths = [hint_product(v.src[0] for v in side) for side in sides]
        short = [k for k in (0, 1) if lengths[k] < rules.TILE_SIDE_LOOPS.limit]
        longer = [(lengths[k], k, v) for k in short for v in free if strides[k][v] == lengths[k]]
        if not longer:
            return (*longest_first(tuple(free), strides[0]), *sides[0]), sides[1]
        _, k, v = min(longer, key=lambda found: found[:2])
        sides[k] = (v, *sides[k])


def _strides_along(members: Sequence[Nest], loops: tuple[Expr, ...], along: Expr
                   ) -> dict[Expr, int]:  # fmt: skip
    """The strides of the largest of the accesses that run along a loop, if there are any."""
    indices = {n.src[0]: None for m in members for n in loads(*m.exprs)}
    indices |= {s.index: None for m in members for s in m.stores}
    found = [i for i in indices if ix.coefficient(i, along) is ix.ONE]
    largest = max(found, key=lambda i: hint_product(v.src[0] for v in free_vars(i)), default=None)
    return dict.fromkeys(loops, 0) if largest is None else strides_of(largest, loops)


def _rows_looked_up(members: Sequence[Nest], outer: tuple[Expr, ...]) -> tuple[Axis, ...]:
    """Rows and columns, where positions that are read from memory name whole rows: each is then
    read and checked once, not for every element (H200: embedding of 2048 bfloat16)."""
    nodes = [n for m in members for n in walk(*m.exprs) if n.op == "index"]
    used = {v for n in nodes for v in free_vars(n)}
    inner = 0
    while inner < len(outer) and outer[len(outer) - 1 - inner] not in used:
        inner += 1
    rows, columns = outer[: len(outer) - inner], outer[len(outer) - inner :]
    if not used or not rows or hint_product(v.src[0] for v in columns) < rules.ROW_AXIS.limit:
        return ()
    return Axis("y", rows, 0), Axis("x", columns, 1)


def _rows_of_one(program: Program, members: Sequence[Nest], outer: tuple[Expr, ...]
                 ) -> tuple[Axis, ...]:  # fmt: skip
    """Rows and columns, where something is the same all along a row, as a channel's scale or the
    largest value of a softmax: it is loaded once for the row, not once for each element of it.
    Or along a column, if it takes computing (H200: gradient of deviations over the first
    dimension, 32768x2048 bfloat16, 67.6 us, 72.7 us with a quotient for each element). But short
    misaligned rows are moved as one."""
    if len(outer) < 2 or hint(outer[-1].src[0]) < rules.ROW_AXIS.limit:
        return ()
    *rows, column = outer
    indices = [s.index for m in members for s in m.stores]
    if not all(ix.coefficient(i, column) is ix.ONE for i in indices):
        return ()
    read = [free_vars(n.src[0]) for m in members for n in loads(*m.exprs)]
    of_rows = any(used and column not in used for used in read)
    if not (of_rows or _is_expensive_by_column(members, column)) or _is_better_flat(
        program, members, outer
    ):
        return ()
    return Axis("y", tuple(rows), 0), Axis("x", (column,), 1)


def _is_expensive_by_column(members: Sequence[Nest], column: Expr) -> bool:
    """Whether something that takes computing is computed of a column alone."""
    least = rules.REPEATED_COST.limit
    dear = (n for m in members for n in walk(*m.exprs)
            if n.op in TABLE and TABLE[n.op].cost >= least and not n.src[-1].is_const)  # fmt: skip
    return any(free_vars(n) == frozenset((column,)) for n in dear)


def _is_better_flat(program: Program, members: Sequence[Nest], outer: tuple[Expr, ...]) -> bool:
    """Whether short rows lie one after the other and begin between two places of sixteen bytes: as
    one they are moved sixteen bytes at once, which is worth more than to load what they have in
    common once (H200: int8 times a float of its row, 140001x711, 80 us, 156 us; images of 17x17
    bfloat16 scaled by channels 99 us, 186 us; with rows of 5001 that lean 80 us, 78 us); or are so
    short that much of a tile would be empty (65536 rows of 80 signs times a float of its row 6.7
    us, 10.0 us as tiles of 128)."""
    length = outer[-1].src[0]
    if hint(length) >= rules.PEELED_ROW.limit and not _is_mostly_wide(program, members, outer[-1]):
        return False
    whole = Axis("x", outer, 0)
    tile = 1 << (hint(length) - 1).bit_length()
    sparse = tile <= rules.SPARSE_ROW_TILE.limit and 4 * hint(length) <= 3 * tile
    for s in (s for m in members for s in m.stores):
        piece = 16 // min(program.buffers[s.buffer].dtype.itemsize, 16)
        place = substitute(s.index, whole.places())
        if (hint(length) % piece == 0 and not sparse) or ix.coefficient(
            place, whole.var
        ) is not ix.ONE:
            return False
    return True


def _is_mostly_wide(program: Program, members: Sequence[Nest], column: Expr) -> bool:
    """Whether most of what rows move is wide, which does not lean (H200: bfloat16 and int32 to
    floats, 1024x50257, 121 us, 156 us; floats over one of their row, 2048x50257, 196 us, 215 us;
    16384x5001 times such a one, and a sum with bfloat16, 194 us, 219 us)."""
    places = {(n.arg, n.src[0]) for m in members for n in loads(*m.exprs)}
    places |= {(s.buffer, s.index) for m in members for s in m.stores}
    sizes = [program.buffers[b].dtype.itemsize for b, i in places if column in free_vars(i)]
    return 2 * sum(n for n in sizes if n <= 2) < sum(sizes)


def is_narrow(shape: Shape) -> bool:
    """Whether tiles across a turned matrix are few, and the last one of the largest would be
    partly empty: smaller ones then, each beside those of the same rows, which are read as a
    whole so (H200: 683464x173 float16 146 us, 162 us; 790500x207 bfloat16 208 us, 217 us;
    400000x136 60 us, 69 us; 300001x192 78 us, 94 us; but 500001x173, of which no row is aligned,
    176 us, 147 us)."""
    if shape.family != "poi" or shape.gathered or len(shape.parallel) != 2:
        return False
    y, x = shape.parallel
    wide = any(n.dtype.itemsize > 2 for n in shape.loads)
    return 128 < y.likely < 256 and (y.likely % 8 == 0 or x.likely % 4 == 0) and not wide
