"""May these two groups be one kernel? A pure question: the answer is the joint group, or a reason.

A group runs its shared outer loops once and, inside, its members one after the other. A member may
therefore read what an earlier member wrote at the same point of the outer loops, and nothing else
of that buffer. Loops of two nests correspond when they walk a common buffer with the same stride
and the same extent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, loads, var
from tilewright.ir.program import Nest
from tilewright.schedule.nests.access import (
    Terms,
    accesses,
    all_loops,
    disjoint,
    signature,
    terms,
    users_of,
    within,
)
from tilewright.schedule.nests.transform import halves, reduces_or_scans, rename, split, unused

MOST_GUIDES = 6  # common buffers tried, until one brings the loops together


@dataclass(frozen=True)
class Fit:
    """Nests that run together inside the loops `outer`, in order. `serial` are loops they share
    too, over which some of them fold (`schedule.mixed`)."""

    members: tuple[Nest, ...]
    outer: tuple[Expr, ...]
    serial: tuple[Expr, ...] = ()

    @cached_property
    def users(self) -> dict[str, list[Nest]]:
        """The members that touch each buffer."""
        return users_of(self.members)

    @cached_property
    def written(self) -> dict[str, None]:
        return {b: None for m in self.members for b in m.writes}

    @cached_property
    def loops(self) -> dict[Expr, None]:
        """Every loop of any member."""
        return {v: None for m in self.members for v in all_loops(m)}


@dataclass(frozen=True)
class Misfit:
    reason: str

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class Hazard:
    """Two accesses of one buffer, at least one of them a store, in the order they happen."""

    buffer: str
    earlier: Nest
    later: Nest


def is_alone(nest: Nest) -> str:
    """Why a nest is never fused, or an empty string."""
    if any(s.mode != "set" or s.mask is not None for s in nest.stores):
        return "it scatters"
    if any(loads(s.index) for s in nest.stores):
        return "it stores at gathered indices"
    if any(v.src[0] is ix.ZERO for v in nest.loops):
        return "it has no points"  # those of others must not become its own
    return "it scans" if reduces_or_scans(nest, "scan") else ""


def align(left: Fit, right: Fit, position: Mapping[str, int]) -> Fit | Misfit:
    """Bring `right` into the loops of `left`; common buffers are tried in turn as the guide.

    `position` is each nest's place in the program, by name: members keep that order.
    """
    reason = Misfit("no common buffer")
    if left.serial or right.serial:
        return Misfit("their loops run one after the other")
    for a, b, buffer in guides(left, right):
        found = match_loops(left, right, a, b, buffer)
        found = found if isinstance(found, Misfit) else _align(*found, position)
        if isinstance(found, Fit):
            return found
        reason = found
    return reason


def guides(left: Fit, right: Fit) -> list[tuple[int, int, str]]:
    """(member on the left, on the right, buffer), most promising first."""

    def promise(b: str) -> tuple[bool, int, str]:
        one, other = left.users[b][-1], right.users[b][0]
        written = b in one.writes or b in other.writes
        loops = max(len(signature(i)) for m in (one, other) for i in m.indices[b])
        return not written, -loops, b

    shared = sorted(left.users.keys() & right.users.keys(), key=promise)[:MOST_GUIDES]
    return [(_place(left.users[b][-1], left), _place(right.users[b][0], right), b) for b in shared]


def _place(nest: Nest, group: Fit) -> int:
    return next(k for k, m in enumerate(group.members) if m is nest)


def match_loops(left: Fit, right: Fit, a: int, b: int, buffer: str
                ) -> tuple[Fit, Fit] | Misfit:  # fmt: skip
    """Both groups with loops of the same names where member `a` of one walks the buffer as member
    `b` of the other does. Nothing is said about whether they may run together."""
    names: dict[Expr, Expr] = {}
    for _ in range(5):  # refine both sides until their extents agree
        pair = _walks(left.members[a], right.members[b], buffer)
        if pair is None:
            return Misfit(f"{buffer} is not read affinely")
        cut = _refinement(pair[1], pair[0])
        if cut is None:
            names = _correspondence(pair[1], pair[0])
            break
        side, v, inner = cut
        if side == "mine":
            right = _split_all(right, v, inner)
        else:
            left = _split_all(left, v, inner)
    _match_more(left.members[a], right.members[b], names)
    return left, _renamed(right, names, left)


def _align(left: Fit, right: Fit, position: Mapping[str, int]) -> Fit | Misfit:
    shared = tuple(v for v in left.outer if v in right.outer)
    if not shared and left.outer and right.outer:
        return Misfit("no loops in common")
    return _fit(left, right, shared, position)


def _fit(left: Fit, right: Fit, shared: tuple[Expr, ...],
         position: Mapping[str, int]) -> Fit | Misfit:  # fmt: skip
    """The two under `shared`, or under fewer loops if one needs what another iteration writes."""
    hazards = list(_hazards(left, right, position))
    problem = next((p for h in hazards if (p := _conflict(h, shared))), "")
    if problem:
        fewer = next((outer for outer in _fewer(hazards, shared)
                      if not any(_conflict(h, outer) for h in hazards)), ())  # fmt: skip
        if not fewer:
            return Misfit(problem)
        shared = fewer
    members = sorted((*left.members, *right.members), key=lambda m: position[m.name])
    return Fit(tuple(members), shared)


# ---- loops that correspond


def _walks(a: Nest, b: Nest, buffer: str) -> tuple[Terms, Terms] | None:
    """How the two walk the buffer: by accesses that touch the same, where there are such."""
    one, other = list(accesses(a, buffer)), list(accesses(b, buffer))
    alike = ((i, j) for i in one for j in other if signature(i) == signature(j))
    i, j = next(alike, (one[0], other[0]))
    ti, tj = terms(i, all_loops(a)), terms(j, all_loops(b))
    return None if ti is None or tj is None else (ti[0], tj[0])


def _match_more(a: Nest, b: Nest, names: dict[Expr, Expr]) -> None:
    """Loops the guide does not walk may correspond by other buffers both touch."""
    for buffer in sorted(a.indices.keys() & b.indices.keys()):
        if len(names) == len(all_loops(b)):
            return
        pair = _walks(a, b, buffer)
        if pair is None:
            continue
        for v, u in _correspondence(pair[1], pair[0]).items():
            if v not in names and u not in names.values():
                names[v] = u


def _split_all(group: Fit, v: Expr, inner: Expr) -> Fit:
    high, low = halves(v, inner, group.loops)
    members = tuple(split(m, v, high, low) if v in all_loops(m) else m for m in group.members)

    def spread(loops: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(w for u in loops for w in ((high, low) if u is v else (u,)))

    return Fit(members, spread(group.outer), spread(group.serial))


def _refinement(mine: Terms, theirs: Terms) -> tuple[str, Expr, Expr] | None:
    """A loop to split, because the other side walks the same stride with a shorter extent."""
    for v, stride in mine.items():
        for u, other in theirs.items():
            if stride is not other:
                continue
            a, b = v.src[0], u.src[0]
            if a is b:
                break
            if _divides(b, a) and any(s is ix.mul(stride, b) for s in theirs.values()):
                return "mine", v, b
            if _divides(a, b) and any(s is ix.mul(stride, a) for s in mine.values()):
                return "theirs", u, a
    return None


def _divides(small: Expr, large: Expr) -> bool:
    return ix.mod(large, small) is ix.ZERO and ix.floordiv(large, small).op != "ifloordiv"


def _correspondence(mine: Terms, theirs: Terms) -> dict[Expr, Expr]:
    names: dict[Expr, Expr] = {}
    for v, stride in mine.items():
        for u, other in theirs.items():
            if stride is other and v.src[0] is u.src[0] and u not in names.values():
                names[v] = u
                break
    return names


def _renamed(group: Fit, names: Mapping[Expr, Expr], other: Fit) -> Fit:
    """The group with its loops called as their counterparts in `other` are; loops without a
    counterpart get names nobody there uses."""
    used = {v.arg for v in other.loops}
    result = dict(names)
    for v in group.loops:
        if v in result:
            continue
        name = unused(v.arg, used)
        used.add(name)
        result[v] = var(name, v.src[0])
    return Fit(tuple(rename(m, result) for m in group.members),
               tuple(result[v] for v in group.outer),
               tuple(result[v] for v in group.serial))  # fmt: skip


# ---- what one needs of the other


def _hazards(left: Fit, right: Fit, position: Mapping[str, int]) -> Iterator[Hazard]:
    shared = left.users.keys() & right.users.keys()
    for b in sorted(b for b in shared if b in left.written or b in right.written):
        for one in left.users[b]:
            for other in right.users[b]:
                if b in one.writes or b in other.writes:
                    before = position[one.name] < position[other.name]
                    yield Hazard(b, one, other) if before else Hazard(b, other, one)


def _conflict(hazard: Hazard, outer: Sequence[Expr]) -> str:
    """Why the later access cannot follow inside the same outer iteration, or an empty string."""
    earlier, later = hazard.earlier, hazard.later
    for a in accesses(earlier, hazard.buffer):
        for b in accesses(later, hazard.buffer):
            if a is b:
                if any(v not in earlier.loops for v in outer):
                    return f"{hazard.buffer} is complete only after the loop over the group"
            elif not (_same_block(a, b, earlier, later, outer) or disjoint(a, b)
                      or _near_by(hazard, a, b, outer)):  # fmt: skip
                return f"{hazard.buffer} is needed at other points of the shared loops"
    return ""


def first_conflict(nests: Sequence[Nest], outer: Sequence[Expr],
                   buffers: Set[str] | None = None) -> str:  # fmt: skip
    """Why nests in this order cannot follow each other inside the same outer iteration, for what
    they do with these buffers (or with all of them); or nothing."""
    if buffers is None:
        buffers = {b for m in nests for b in m.writes}
    users: dict[str, list[Nest]] = {}
    for later in nests:
        for b in sorted(buffers & later.indices.keys()):
            before = users.setdefault(b, [])
            for earlier in before:
                if b in earlier.writes or b in later.writes:
                    why = _conflict(Hazard(b, earlier, later), outer)
                    if why:
                        return why
            before.append(later)
    return ""


def conflict(earlier: Nest, later: Nest, outer: Sequence[Expr]) -> str:
    """Why two nests cannot follow each other inside the same outer iteration, or nothing."""
    hazards = (earlier.writes & (later.reads | later.writes)) | (later.writes & earlier.reads)
    found = (_conflict(Hazard(b, earlier, later), outer) for b in sorted(hazards))
    return next((problem for problem in found if problem), "")


def _fewer(hazards: Sequence[Hazard], outer: tuple[Expr, ...]) -> Iterator[tuple[Expr, ...]]:
    """Fewer shared loops, under which accesses that meet may do so within one iteration."""
    agreed = _agreed(hazards, outer)
    if agreed != outer:
        yield agreed
    for count in range(len(outer) - 1, 0, -1):
        yield outer[:count]


def _agreed(hazards: Sequence[Hazard], outer: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The outer loops along which all accesses that could meet step alike."""
    for hazard in hazards:
        for a in accesses(hazard.earlier, hazard.buffer):
            for b in accesses(hazard.later, hazard.buffer):
                ta = terms(a, all_loops(hazard.earlier))
                tb = terms(b, all_loops(hazard.later))
                if ta is None or tb is None:
                    return ()
                outer = tuple(v for v in outer if v in ta[0] and ta[0][v] is tb[0].get(v))
    return outer


def _same_block(a: Expr, b: Expr, earlier: Nest, later: Nest, outer: Sequence[Expr]) -> bool:
    """Whether at one point of the outer loops both touch the same part of the buffer, and at
    different points different parts."""
    if any(v not in earlier.loops for v in outer):
        return False
    ta, tb = terms(a, all_loops(earlier)), terms(b, all_loops(later))
    if ta is None or tb is None or ta[1] is not tb[1]:
        return False
    moving = [v for v in outer if v.src[0] is not ix.ONE]
    if any(v not in ta[0] or ta[0][v] is not tb[0].get(v) for v in moving):
        return False
    rest_a = Counter((s, v.src[0]) for v, s in ta[0].items() if v not in outer)
    rest_b = Counter((s, v.src[0]) for v, s in tb[0].items() if v not in outer)
    if rest_a == rest_b:
        return True  # one of the two is a store, and a store never meets itself
    if rest_b <= rest_a and _meets_nobody(a, ta[0], earlier):
        return True
    if rest_a <= rest_b and _meets_nobody(b, tb[0], later):
        return True
    steps = [(ta[0][v], v.src[0]) for v in outer if v in ta[0]]
    return all(ix.separate(steps, _reach(t, outer)) for t in (ta[0], tb[0]))


def _near_by(hazard: Hazard, a: Expr, b: Expr, outer: Sequence[Expr]) -> bool:
    """Whether both stay, at each point of the outer loops, in a block that no other point's
    accesses reach into."""
    one = _block(hazard.earlier, hazard.buffer, a, outer)
    other = _block(hazard.later, hazard.buffer, b, outer)
    if one is None or other is None or one[0] != other[0]:
        return False
    if any(v not in one[0] for v in outer if v.src[0] is not ix.ONE):
        return False
    low, high = ix.minimum(one[1], other[1]), ix.maximum(one[2], other[2])
    return ix.separate([(s, v.src[0]) for v, s in one[0].items()], ix.sub(high, low))


def _block(nest: Nest, buffer: str, index: Expr, outer: Sequence[Expr]
           ) -> tuple[Terms, Expr, Expr] | None:  # fmt: skip
    """Strides along the outer loops, and the range inside them, of an access."""
    found = terms(index, all_loops(nest))
    if found is None or loads(found[1]):
        return None
    masks = [n.src[1] if len(n.src) > 1 else None for n in loads(*nest.exprs)
             if n.arg == buffer and n.src[0] is index]  # fmt: skip
    stored = any(s.buffer == buffer and s.index is index for s in nest.stores)
    mask = masks[0] if len(set(masks)) == 1 and not stored else None
    low = high = found[1]
    for v, stride in found[0].items():
        if v in outer:
            continue
        first, last = within(v, mask)
        ends = ix.mul(stride, first), ix.mul(stride, last)
        if not ix.known_nonneg(stride):
            ends = ends[::-1]
        low, high = ix.add(low, ends[0]), ix.add(high, ends[1])
    return {v: s for v, s in found[0].items() if v in outer}, low, high


def _meets_nobody(index: Expr, strides: Terms, nest: Nest) -> bool:
    """Whether different iterations touch different elements: always so where it stores."""
    if any(index is s.index for s in nest.stores):
        return True
    return ix.separate([(s, v.src[0]) for v, s in strides.items()])


def _reach(strides: Terms, outer: Sequence[Expr]) -> Expr:
    """How far the inner loops go from where the outer ones put them."""
    inner = [(s, v.src[0]) for v, s in strides.items() if v not in outer]
    return ix.add(0, *(ix.mul(s, ix.sub(n, 1)) for s, n in inner))
