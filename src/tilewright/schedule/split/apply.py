"""Loops cut into chunks that run in parallel, and the partial results they leave.

A group whose members share loops one after the other (`Group.serial`) would leave one thread at
work. Cut into chunks, each chunk folds its own part, and small nests after the kernel fold what the
chunks left. The same gives a card enough to do when a reduction has few results.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from tilewright import rules
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import (
    INDEX,
    Expr,
    const,
    free_vars,
    load,
    loads,
    rewrite,
    substitute,
    var,
    walk,
)
from tilewright.ir.ops import SURE
from tilewright.ir.program import Buffer, Nest, Program, Store
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import Fit, align, conflict, first_conflict, is_alone
from tilewright.schedule.fusion.row_column import folds_over
from tilewright.schedule.launch.horizontal import share_launches
from tilewright.schedule.launch.small_reductions import join_small_reductions
from tilewright.schedule.nests.access import all_loops
from tilewright.schedule.nests.hints import hint, hint_product, work
from tilewright.schedule.nests.segments import segments_of
from tilewright.schedule.nests.transform import merge, substitute_nest
from tilewright.schedule.split.cyclic import around_rows, cyclic_chunks, in_pieces, in_tiles
from tilewright.schedule.split.online_softmax import (
    online_softmax,
    recomputed_members,
    relative_to,
    scaled,
    sums,
)
from tilewright.schedule.split.pairs import is_pair
from tilewright.schedule.split.policy import (
    chunks,
    cooperating_programs,
    dependents,
    idles,
    is_coarse,
    shortest_chunk,
    starved,
    stays_apart,
    ticketed_programs,
)
from tilewright.target import Target

BLOCKS = (8192, 4096)  # elements that are split cyclically to chunks in turn


@dataclass(frozen=True)
class Cut:
    """A group cut into chunks: what its kernel is now, what reduces its partial results after
    it, and the buffers that hold them."""

    group: Group
    after: tuple[Group, ...]
    buffers: tuple[Buffer, ...]
    rounds: bool = False  # a chunk is a round, so that there may be too few of them


def cut_groups(program: Program, groups: Sequence[Group]) -> tuple[Program, list[Group]]:
    """Groups with serial loops, and those that leave a card idle, in parallel chunks. Returns the
    program with the buffers this takes: the one given is not changed."""
    buffers: dict[str, Buffer] = {}
    order = _Order()
    groups = online_softmax(program, groups)
    waiting = list(reversed(groups))
    private = _private(program, groups)
    while waiting:
        group = waiting.pop()
        target = Target.of(_device(program, group)) if group.members else None
        if target is None or group.serial:
            parts = [group]
        else:
            parts = _fed(program, group, target, private)
        waiting += parts[:0:-1]
        if target is None or not parts[0].serial:
            order.add(parts[0])
            continue
        buffers.update(_cut_into(order, program, parts[0], target, private))
    program = replace(program, buffers={**program.buffers, **buffers})
    return program, share_launches(program, join_small_reductions(program, order.all()))


def _cut_into(order: _Order, program: Program, group: Group, target: Target, private: set[str]
              ) -> dict[str, Buffer]:  # fmt: skip
    """The group's chunks and what reduces their results, in chunks too if these are many: the
    buffers this takes."""
    done = cut(program, group, target, private)
    made = {b.name: b for b in done.buffers}
    fit = Fit(done.group.members, done.group.outer)
    if done.rounds and (loops := starved(fit, target)) and not dependents(fit.members):
        known = replace(program, buffers={**program.buffers, **made})
        parts = tuple(replace(m, name=f"{m.name}_part") for m in fit.members)
        again = replace(done.group, members=parts, serial=loops)
        made |= _cut_into(order, known, again, target, private)
    else:
        order.add(done.group)
    for fold in done.after:
        rows = hint_product(v.src[0] for v in fold.members[0].reduce)
        many = rows >= rules.PARTIAL_RESULTS.limit and not dependents(fold.members)
        if many and (loops := starved(Fit(fold.members, fold.outer), target)):
            known = replace(program, buffers={**program.buffers, **made})
            made |= _cut_into(order, known, replace(fold, serial=loops), target, private)
        elif fold.reads & done.group.reads:  # rows that are left, not to be kept for long
            order.add(fold, folds=True)
        else:
            order.wait(fold)
    return made


def _private(program: Program, groups: Sequence[Group]) -> set[str]:
    """The buffers that one group makes for itself alone."""
    visible = program.visible
    users = Counter(b for group in groups for b in group.reads | group.writes)
    return {b for b, n in users.items() if n == 1 and b not in visible
            and program.buffers[b].kind == "temporary"}  # fmt: skip


def _fed(program: Program, group: Group, target: Target, private: set[str]) -> list[Group]:
    """The group with serial loops to cut, if it would leave the target idle; what needs its
    reductions comes after it."""
    fit = Fit(group.members, group.outer)
    count = cooperating_programs(fit, target)
    if count > 1:
        return [replace(group, row_programs=count)]
    loops = starved(fit, target)
    reordered = None if loops else _reordered(group, target, private)
    if reordered is not None:
        return [reordered]
    coarse = is_coarse(replace(fit, serial=loops), target) if loops else idles(fit, target)
    if coarse and (apart := _apart(group, target)):
        return [*_fed(program, apart[0], target, private), *apart[1:]]
    if not loops:
        count = ticketed_programs(fit, target)
        return [replace(group, row_programs=count, ticketed=True) if count > 1 else group]
    members = group.members
    if dependents(members):
        members = recomputed_members(program, members, private & group.writes)
    later = dependents(members)
    first = tuple(m for m in members if m not in later)
    folded = sums(later, first)
    names = {m.name for m in folded}
    later = tuple(m for m in later if m.name not in names)
    rest = [_widened(g) for g in _by_extent(replace(group, members=later))] if later else []
    return [replace(group, members=(*first, *folded), serial=loops), *rest]


def _by_extent(group: Group) -> list[Group]:
    """What is done with the results of reductions alone, as with running means, apart from what
    goes along the data again: that would all be run by the few programs the former has."""
    few = tuple(m for m in group.members if set(all_loops(m)) <= set(group.outer))
    many = tuple(m for m in group.members if m not in few)
    overtaken = ((n, m) for k, m in enumerate(group.members) if m in few
                 for n in group.members[:k] if n in many)  # fmt: skip
    if (
        not few
        or not many
        or any(n.writes & (m.reads | m.writes) or m.writes & n.reads for n, m in overtaken)
    ):
        return [group]
    return [replace(group, members=few), replace(group, members=many)]


def _apart(group: Group, target: Target) -> list[Group]:
    """A group of reductions that have no loop in common, as those of two means that are added,
    or fewer than without what needs their results, in groups that have; the latter comes after
    them. None, if these could not be cut either."""
    later = dependents(group.members)
    pieces: list[list[Nest]] = []
    for m in (m for m in group.members if m not in later):
        alike = [k for k, p in enumerate(pieces) if set(all_loops(p[0])) == set(all_loops(m))]
        needed = [k for k, p in enumerate(pieces) for n in p
                  if n.writes & (m.reads | m.writes) or m.writes & n.reads]  # fmt: skip
        if alike and alike[-1] >= max(needed, default=0):
            pieces[alike[-1]].append(m)
        else:
            pieces.append([m])
    found: list[Group] = []
    for first, *others in pieces:
        outer = tuple(v for v in first.loops if all(v in m.loops for m in others))
        outer = group.outer if first_conflict((first, *others), outer) else outer
        found.append(replace(group, members=(first, *others), outer=outer))
    if len(found) + bool(later) < 2 or not any(
        starved(Fit(g.members, g.outer), target) for g in found
    ):
        return []
    return [*found, _widened(replace(group, members=later))] if later else found


def _reordered(group: Group, target: Target, private: set[str]) -> Group | None:
    """A group of reductions that have programs enough, but none that read memory well: with the
    loops to cut, joined where they walk memory as one."""
    loops = next((m.reduce for m in group.members if m.reduce), ())
    fit = Fit(group.members, group.outer)
    if not target.is_gpu or not loops or any(is_alone(m) for m in group.members):
        return None
    if max(work(m) for m in group.members) < rules.SPLIT_WORK.limit or dependents(group.members):
        return None
    members, loops = _merged(group.members, loops)
    if cyclic_chunks(replace(fit, members=members, serial=loops), target, private, starved=False):
        return replace(group, members=members, serial=loops)
    if in_pieces(replace(fit, members=members, serial=loops[:-1]), target):
        return replace(group, members=members, serial=loops[:-1])
    return None


def _widened(group: Group) -> Group:
    """The group over all loops its members share, where nothing is left that reduces: what it
    shared with a reduction may be too little to run in parallel."""
    first, *others = group.members
    outer = tuple(v for v in first.loops if all(v in m.loops for m in others))
    if any(m.reduce or is_alone(m) for m in group.members) or any(
        conflict(m, later, outer)
        for k, later in enumerate(group.members) for m in group.members[:k]
    ):  # fmt: skip
        return group
    return replace(group, outer=outer)


class _Order:
    """Groups in order. Reductions of partial results wait for what first reads them, and run in
    one kernel with that and with later readers where they can."""

    def __init__(self) -> None:
        self.placed: list[Group] = []
        self.waiting = _Users()
        self.users = _Users()  # of what is placed
        self.known = -1  # the place after which no more sizes become known
        self.folds: set[int] = set()  # places of kernels that reduce partial results

    def add(self, group: Group, folds: bool = False) -> None:
        while (first := self.waiting.last_needed(group)) >= 0:
            fold = self.waiting.remove(first)
            joined = _joined(fold, group)
            if joined is None:
                self.add(fold, folds=True)
            else:
                group, folds = joined, True
        place = self.users.last_needed(group)
        if place in self.folds and place > self.known:
            joined = _joined(self.placed[place], group)
            if joined is not None:
                self._put(place, joined)
                return
        place = len(self.placed)
        self.placed.append(group)
        self._put(place, group)
        if folds:
            self.folds.add(place)
        if group.call is not None and group.call.binds:
            self.known = place

    def _put(self, place: int, group: Group) -> None:
        self.placed[place] = group
        self.users.add(place, group)

    def wait(self, group: Group) -> None:
        self.waiting.add(self.waiting.count, group)

    def all(self) -> list[Group]:
        return [*self.placed, *self.waiting.groups.values()]


class _Users:
    """Groups by number, and which of them use a buffer."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.count = 0
        self.readers: dict[str, list[int]] = {}
        self.writers: dict[str, list[int]] = {}

    def add(self, k: int, group: Group) -> None:
        self.groups[k] = group
        self.count = max(self.count, k + 1)
        for found, buffers in ((self.readers, group.reads), (self.writers, group.writes)):
            for b in buffers:
                insort(found.setdefault(b, []), k)

    def remove(self, k: int) -> Group:
        group = self.groups.pop(k)
        for found, buffers in ((self.readers, group.reads), (self.writers, group.writes)):
            for b in buffers:
                found[b].remove(k)
        return group

    def last_needed(self, group: Group) -> int:
        """The last group that this one must not run before, or -1."""
        reads, writes = group.reads, group.writes
        found = [ks for b in reads | writes if (ks := self.writers.get(b))]
        found += [ks for b in writes if (ks := self.readers.get(b))]
        return max((ks[-1] for ks in found), default=-1)


def _device(program: Program, group: Group) -> torch.device:
    return program.buffers[min(group.writes)].device


def _joined(first: Group, second: Group) -> Group | None:
    """Both in one kernel, if they have the same loops."""
    if second.serial or not second.members or any(is_alone(m) for m in second.members):
        return None
    position = {m.name: k for k, m in enumerate((*first.members, *second.members))}
    fit = align(Fit(first.members, first.outer), Fit(second.members, second.outer), position)
    if not isinstance(fit, Fit) or not len(fit.outer) == len(first.outer) == len(second.outer):
        return None
    return replace(second, members=fit.members, outer=fit.outer)


def cut(program: Program, group: Group, target: Target, private: set[str]) -> Cut:
    """The serial loops of a group in as many parallel chunks as the target is worth."""
    made = _Cutting(program, private)
    members, serial = _merged(group.members, group.serial)
    outer = group.outer
    if target.is_gpu:
        members, serial = _as_one(members, outer, serial)
    pairs = any(folds_over(m, serial) and is_pair(m, top) for m in members for top in members)
    whole = Fit(members, outer, serial)
    if (len(segments_of(members, outer)) > 1 or in_pieces(whole, target)) and not pairs:
        members = tuple(made.apart(m, serial) if stays_apart(m, whole, target) else m
                        for m in members)  # fmt: skip
        if not any(folds_over(m, serial) for m in members):
            in_rounds = replace(group, members=members, outer=(*outer, *serial), serial=())
            return replace(made.result(in_rounds), rounds=True)
    loop, *rest = serial
    whole = Fit(members, outer, serial)
    count = chunks(whole, target)
    in_turn = 0 if pairs else cyclic_chunks(whole, target, private, starved=count > 1)
    if not (in_turn or pairs) and len(segments_of(members, outer)) > 1:
        in_turn = in_tiles(whole, target)
    if target.is_gpu and not in_turn:
        members, finer = _finer(members, serial, count)
        loop, *rest = _longest_first(members, finer, count)
        if loop not in serial and hint(loop.src[0]) <= rules.FINER_ROUNDS.limit * count:
            count = hint(loop.src[0])  # a round each: two might be of two pictures
    if in_turn or (count > 1 and hint(loop.src[0]) > 1):
        inner = hint_product(v.src[0] for v in rest)
        step = _step(members, loop, count) if target.is_gpu else 1
        shortest = -(-shortest_chunk(whole) // max(inner, 1))
        block = 0 if in_turn or rest or pairs else _block(whole, count, target)
        parts = (_dealt(whole, in_turn) if in_turn else _in_blocks(loop, count, block) if block
                 else _chunk(loop, count, shortest, step))  # fmt: skip
        members = tuple(made.chunked(m, parts) for m in members)
        outer, serial = (parts.chunk, *outer), () if pairs else (*parts.inside, *rest)
    return made.result(replace(group, members=members, outer=outer, serial=serial))


class _Cutting:
    """What the members of one group leave behind when they are cut."""

    def __init__(self, program: Program, private: set[str]) -> None:
        self.program = program
        self.private = private
        self.left: list[Nest] = []  # rows that are in no chunk
        self.after: list[Nest] = []
        self.buffers: list[Buffer] = []
        self.tops: list[tuple[Nest, Expr]] = []  # nests with a chunk's largest value

    def result(self, group: Group) -> Cut:
        """Members that run in one loop anyway need no order among their rows."""
        if len(segments_of(group.members, group.outer)) == 1:
            group = replace(group, serial=())
        after = (*_grouped(self.left), *_grouped(self.after))
        return Cut(group, after, tuple(self.buffers))

    def chunked(self, nest: Nest, parts: _Chunks) -> Nest:
        """The nest with a loop over chunks and one inside them."""
        loop, both, cut = parts.loop, (parts.chunk, *parts.inside), {parts.loop: parts.index}
        loops = [w for v in nest.loops for w in (both if v is loop else (v,))]
        if loop not in nest.reduce:
            if parts.left is not None:
                self.left.append(self._left(parts.left.rows_of(nest, loop)))
            return substitute_nest(nest, cut, loops, nest.reduce)
        reduce = [w for v in nest.reduce for w in (parts.inside if v is loop else (v,))]
        new = substitute_nest(nest, cut, [parts.chunk, *loops], reduce)
        partial = _Partial(self.program, nest, new, (parts.chunk,), parts)
        partial.pair = next((p for p in self.tops if is_pair(nest, p[0])), None)
        made = self._split(partial, cut)
        if len(partial.kept) == len(nest.stores) == 1:
            self.tops.append((nest, partial.kept[0]))
        return made

    def _left(self, nest: Nest) -> Nest:
        """With buffers of its own for what no other group sees."""
        new = {b: f"{b}_left" for b in (nest.reads | nest.writes) & self.private}
        self.buffers += [replace(self.program.buffers[b], name=new[b])
                         for b in sorted(nest.writes & self.private)]  # fmt: skip

        def swap(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
            own = node.op == "load" and node.arg in new
            return load(new[node.arg], node.dtype, *src) if own else None

        return replace(nest, stores=tuple(
            replace(s, buffer=new.get(s.buffer, s.buffer), value=rewrite(s.value, swap))
            for s in nest.stores))  # fmt: skip

    def apart(self, nest: Nest, serial: tuple[Expr, ...]) -> Nest:
        """A partial result for every round of the serial loops."""
        reduce = tuple(v for v in nest.reduce if v not in serial)
        new = replace(nest, loops=(*serial, *nest.loops), reduce=reduce)
        return self._split(_Partial(self.program, nest, new, serial), {})

    def _split(self, partial: _Partial, cut: Mapping[Expr, Expr]) -> Nest:
        nest, after, buffers = partial.split(cut)
        self.after += after
        self.buffers += buffers
        return nest


def _merged(members: tuple[Nest, ...], serial: tuple[Expr, ...]
            ) -> tuple[tuple[Nest, ...], tuple[Expr, ...]]:  # fmt: skip
    """Serial loops that every index walks as one are one: there is more to cut."""
    for a, b in pairwise(serial):
        found = merge(members, a, b)
        if found is not None:
            joined = tuple(found[1] if v is a else v for v in serial if v is not b)
            return _merged(tuple(found[0]), joined)
    return members, serial


def _as_one(members: tuple[Nest, ...], outer: tuple[Expr, ...], serial: tuple[Expr, ...]
            ) -> tuple[tuple[Nest, ...], tuple[Expr, ...]]:  # fmt: skip
    """The serial loops and those inside them as one loop, where all of it is reduced at once, or
    stored beside that: its chunks can begin wherever memory is read best (H200: largest of
    99359x2311 bfloat16 108 us, 313 us in chunks of rows)."""
    loops = next(m.reduce for m in members if m.reduce)
    if any(tuple(v for v in all_loops(m) if v not in outer) != loops
           or m.reduce not in ((), loops) for m in members):  # fmt: skip
        return members, serial
    found, joined = _merged(members, loops)
    return (found, joined) if len(joined) == 1 else (members, serial)


def _finer(members: tuple[Nest, ...], serial: tuple[Expr, ...], count: int
           ) -> tuple[tuple[Nest, ...], tuple[Expr, ...]]:  # fmt: skip
    """The first of the serial loops with so many rounds as chunks are wanted, where it has too few:
    each has a piece of the second."""
    sizes = [ix.value_of(v.src[0]) or 0 for v in serial[:2]]
    if len(sizes) < 2 or not all(sizes) or sizes[0] >= count:
        return members, serial
    first, second, *rest = serial
    wanted = -(-count // sizes[0])
    times = next((k for k in range(wanted, sizes[1]) if sizes[1] % k == 0), sizes[1])
    length = sizes[1] // times
    each = [hint_product(v.src[0] for v in m.reduce) for m in members if first in m.reduce]
    if min(each, default=0) // (sizes[0] * times) < rules.CHUNK_ROWS.limit:
        return members, serial  # more would be left than is read
    rounds = var(f"{first.arg}{second.arg}", ix.as_index(sizes[0] * times))
    piece = var(f"{second.arg}q", ix.as_index(length))
    new = {first: rounds, second: piece}
    mapping = {first: ix.floordiv(rounds, times),
               second: ix.add(ix.mul(ix.mod(rounds, times), length), piece)}  # fmt: skip
    if any((first in m.reduce) != (second in m.reduce) for m in members):
        return members, serial
    found = tuple(substitute_nest(m, mapping, *([new.get(v, v) for v in vs]
                                                for vs in (m.loops, m.reduce)))
                  for m in members)  # fmt: skip
    return found, (rounds, piece, *rest)


def _longest_first(members: Sequence[Nest], serial: tuple[Expr, ...], count: int
                   ) -> tuple[Expr, ...]:  # fmt: skip
    """The serial loops with one to cut that has rounds enough, where the first has too few and
    sizes are not known."""
    longest = max(serial, key=lambda v: hint(v.src[0]))
    known = all(ix.value_of(v.src[0]) is not None for v in serial)
    if known or hint(serial[0].src[0]) >= count or any(map(_in_order, members)):
        return serial
    return (longest, *(v for v in serial if v is not longest))


def _step(members: Sequence[Nest], loop: Expr, count: int) -> int:
    """What chunks of a loop along memory are multiples of: pieces that are loaded at once, blocks
    if these are many."""
    if not any(ix.coefficient(n.src[0], loop) is ix.ONE for m in members for n in loads(*m.exprs)):
        return 1
    length = hint(loop.src[0]) // count
    return next((step for step in (8192, 1024, 64) if length >= 32 * step), 1)


@dataclass(frozen=True)
class _Left:
    """Rows that are in no chunk: what reduces the chunks' results takes each of them as one
    more."""

    chunks: Expr  # the loop over the chunks
    both: Expr  # the loop over the chunks, then these rows
    row: Mapping[Expr, Expr]  # the old variable in terms of that

    @property
    def in_chunk(self) -> Expr:
        return build.op("lt", self.both, self.chunks.src[0])

    def rows_of(self, nest: Nest, loop: Expr) -> Nest:
        """What goes along rows does the same with these."""
        first, count = self.chunks.src[0], self.both.src[0]
        row = var(f"{loop.arg}l", ix.sub(count, first))
        index = substitute(self.row[loop], {self.both: ix.add(row, first)})
        loops = [row if v is loop else v for v in nest.loops]
        return replace(substitute_nest(nest, {loop: index}, loops, ()), name=f"{nest.name}_left")


@dataclass(frozen=True)
class _Chunks:
    """A loop as one over chunks and those inside them."""

    loop: Expr
    chunk: Expr
    inside: tuple[Expr, ...]
    index: Expr  # the old variable in terms of all
    around: tuple[Expr, ...] = ()  # loops that are outside all of it in memory
    left: _Left | None = None


def _chunk(loop: Expr, count: int, shortest: int, step: int) -> _Chunks:
    """Chunks of neighbouring rows. The length of one is a number, so that other sizes need no other
    code."""
    size = loop.src[0]
    length = -(-hint(size) // (count * step)) * step
    if ix.value_of(size) is None:
        length = max(length, shortest)
    chunk = var(f"{loop.arg}p", ix.floordiv(ix.add(size, length - 1), length))
    left = ix.sub(size, ix.mul(chunk, length))
    even = ix.mod(size, length) is ix.ZERO
    inner = var(f"{loop.arg}q", ix.as_index(length) if even else ix.minimum(length, left))
    return _Chunks(loop, chunk, (inner,), ix.add(ix.mul(chunk, length), inner))


def _block(fit: Fit, count: int, target: Target) -> int:
    """Neighbouring elements that are split cyclically to chunks in turn, where all that is
    walked lies along memory: what is touched last, in a cache, is then the end of it, with which
    what follows may begin (H200: losses of 12582912 pairs of floats and their gradients 63.3 us,
    65.7 us in chunks; a step of 33554432 scaled by its norm 216 us, 224 us; but squares of 2**27
    bfloat16 90 us, 64 us). None: chunks are whole."""
    (loop,) = fit.serial
    size = ix.value_of(loop.src[0]) or 0
    read = [n for m in fit.members for n in loads(*m.exprs)]
    short = any(n.dtype.itemsize < 4 and loop in free_vars(n.src[0]) for n in read)
    places = [n.src[0] for n in read]
    places += [s.index for m in fit.members if loop in m.loops for s in m.stores]
    along = all(ix.coefficient(i, loop) is ix.ONE for i in places if loop in free_vars(i))
    if (
        not target.is_gpu
        or size < rules.BLOCK_CYCLIC.limit
        or fit.outer
        or short
        or not along
        or any(_in_order(m) for m in fit.members)
    ):
        return 0
    # with a store in each round more has to be in flight (163 us by 4096)
    stored = any(loop in m.loops for m in fit.members)
    return next((n for n in BLOCKS[: 1 if stored else None]
                 if size > n * count and size % (n * count) == 0), 0)  # fmt: skip


def _in_order(nest: Nest) -> bool:
    """Whether which element comes first matters."""
    return any(n.op == "reduce" and n.arg.kind in ("argmin", "argmax") for n in walk(*nest.exprs))


def _in_blocks(loop: Expr, count: int, block: int) -> _Chunks:
    """Chunks of blocks of neighbouring rows, split cyclically in turn."""
    turns = (ix.value_of(loop.src[0]) or 0) // (count * block)
    chunk, turn, row = (var(f"{loop.arg}{c}", ix.as_index(n))
                        for c, n in (("p", count), ("q", turns), ("r", block)))  # fmt: skip
    index = ix.add(ix.mul(ix.add(ix.mul(turn, count), chunk), block), row)
    return _Chunks(loop, chunk, (turn, row), index)


def _dealt(fit: Fit, count: int) -> _Chunks:
    """Chunks of rows that are split cyclically in turn, as long as there is one for each."""
    (loop,), around = fit.serial, around_rows(fit)
    size = loop.src[0]
    length, rest = ix.floordiv(size, count), ix.mod(size, count)
    chunk, inside = var(f"{loop.arg}p", ix.as_index(count)), var(f"{loop.arg}q", length)
    index = ix.add(ix.mul(inside, count), chunk)
    if rest is ix.ZERO:
        return _Chunks(loop, chunk, (inside,), index, around)
    both = var(f"{loop.arg}p", ix.add(rest, count))
    row = ix.add(both, ix.mul(ix.sub(length, 1), count))
    return _Chunks(loop, chunk, (inside,), index, around, _Left(chunk, both, {loop: row}))


def _grouped(nests: Sequence[Nest]) -> list[Group]:
    """Reductions of partial results over the same loops are one kernel."""
    found: list[Group] = []
    for nest in nests:
        for k, group in enumerate(found):
            if group.outer == nest.loops and not any(
                conflict(m, nest, group.outer) for m in group.members
            ):
                found[k] = replace(group, members=(*group.members, nest))
                break
        else:
            found.append(Group((nest,), nest.loops))
    return found


# ---- partial results


class _Partial:
    """A reduction over a loop that was cut: `nest` keeps the partial results of each chunk,
    nests after it reduce them. Partial results have the type they are accumulated in."""

    def __init__(self, program: Program, whole: Nest, nest: Nest, apart: tuple[Expr, ...],
                 parts: _Chunks | None = None) -> None:  # fmt: skip
        self.program = program
        self.whole = whole
        self.nest = nest
        self.apart = apart
        self.left = parts.left if parts else None
        self.around = parts.around if parts else ()
        self.columns = whole.loops
        self.made: list[Buffer] = []
        self.stores: list[Store] = []
        self.before: list[Store] = []  # what the last nest needs of all chunks together
        self.kept: list[Expr] = []  # what gives the partial results back
        self.pair: tuple[Nest, Expr] | None = None  # what its exponentials are relative to

    def split(self, cut: Mapping[Expr, Expr]) -> tuple[Nest, list[Nest], list[Buffer]]:
        """`cut` is the old loop in terms of the new ones."""
        known: dict[Expr, Expr] = {}
        for node in walk(*self.whole.exprs):
            if node.op == "reduce":
                known.update(self._fold(node, substitute(node, cut)) if self.pair is None
                             else self._powers(node, cut, *self.pair))  # fmt: skip

        def swap(e: Expr) -> Expr:
            return rewrite(e, lambda node, src: known.get(node))

        stores = tuple(replace(s, value=swap(s.value)) for s in self.whole.stores)
        partial = replace(self.nest, stores=tuple(self.stores))
        final = [self._nest(f"{self.nest.name}_before", tuple(self.before))] if self.before else []
        return partial, [*final, self._nest(f"{self.nest.name}_after", stores)], self.made

    def _nest(self, name: str, stores: tuple[Store, ...]) -> Nest:
        folds = any(n.op == "reduce" for s in stores for n in walk(*s.exprs))
        apart = self.apart if self.left is None else (self.left.both,)
        return Nest(name, self.columns, apart if folds else (), stores, self.nest.origin)

    def _keep(self, value: Expr, alone: Expr) -> Expr:
        """Store a partial result, `alone` if it is of one element; what gives it back."""
        columns = [v for v in self.columns if v not in self.around]
        where = (*self.around, *self.apart, *columns)
        new = alone if not self.nest.reduce else value
        kept = self._buffer(new, where, self.stores)
        self.kept.append(kept if self.left is None else self._or_left(self.left, kept, alone))
        return self.kept[-1]

    def _or_left(self, left: _Left, kept: Expr, alone: Expr) -> Expr:
        """What a chunk left, or a row that is in none."""
        inside, beyond = left.in_chunk, build.op("ge", left.both, left.chunks.src[0])
        kept = substitute(kept, {left.chunks: left.both})
        one = build.cast(substitute(alone, left.row), kept.dtype)
        return build.where(inside, build.guard(kept, inside), build.guard(one, beyond))

    def _buffer(self, value: Expr, where: Sequence[Expr], stores: list[Store]) -> Expr:
        sizes = tuple(v.src[0] for v in where)
        strides = ix.contiguous_strides(sizes)
        device = self.program.buffers[self.nest.stores[0].buffer].device
        made = Buffer(f"{self.nest.name}_part{len(self.made)}", value.dtype, device, sizes, strides)
        self.made.append(made)
        index = ix.linearize(where, strides)
        stores.append(Store(made.name, index, value))
        return load(made.name, value.dtype, index)

    def _fold(self, old: Expr, node: Expr) -> dict[Expr, Expr]:
        """What the whole fold (its parts, if it has several) is made of."""
        kind = node.arg.kind
        if kind in ("argmin", "argmax"):
            value, place = old.src
            best = self._keep(build.reduce(kind.removeprefix("arg"), node.src[0]), value)
            count = ix.product(v.src[0] for v in self.whole.reduce)
            first = build.op("index", build.cast(self._keep(node, place), INDEX), count, arg=SURE)
            return {old: build.reduce(kind, best, first, dtype=node.dtype)}
        if kind == "welford":
            return self._moments(old, node)
        one = self._keep(node, build.cast(old.src[0], node.dtype))
        return {old: build.reduce(kind, one, dtype=node.dtype)}

    def _powers(self, old: Expr, cut: Mapping[Expr, Expr], whole: Nest, top: Expr
                ) -> dict[Expr, Expr]:  # fmt: skip
        """A chunk's sum of exponentials is relative to its own largest value."""
        buffer = whole.stores[0].buffer
        base = next(n for n in loads(old) if n.arg == buffer)
        one = substitute(relative_to(old, base, top), cut)
        part = self._keep(one, one)
        return {old: build.reduce("sum", scaled(part, top, base), dtype=old.dtype)}

    def _moments(self, old: Expr, node: Expr) -> dict[Expr, Expr]:
        """The mean of the chunks' means; then their deviations, and those of their means."""
        value = old.src[0]
        mean = self._keep(build.part(node, 0), value)
        none = build.op("sub", value, value)  # zero, or NaN where the element has no deviation
        m2 = (self._keep(build.part(node, 1), none) if self.nest.reduce
              else build.op("sub", mean, mean))  # fmt: skip
        count = build.cast(ix.product(v.src[0] for v in self.nest.reduce), node.dtype)
        if self.left is not None:
            count = build.where(self.left.in_chunk, count, const(1, node.dtype))
        total = build.cast(ix.product(v.src[0] for v in self.whole.reduce), node.dtype)
        share = build.op("div", count, total)
        one = build.reduce("sum", build.op("mul", mean, share))
        middle = self._buffer(one, self.columns, self.before)
        apart = build.op("sub", mean, middle)
        spread = build.op("add", m2, build.op("mul", build.op("mul", apart, apart), count))
        return {build.part(old, 0): middle, build.part(old, 1): build.reduce("sum", spread)}
