"""The loop structure of a kernel: shared outer loops, and segments of jammed inner loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from tilewright.ir.expr import Expr, walk
from tilewright.ir.program import Nest
from tilewright.schedule.nests.access import accesses, all_loops
from tilewright.schedule.nests.transform import merge, reduces_or_scans

if TYPE_CHECKING:
    from tilewright.schedule.fusion.group import Group


Loops = tuple[Expr, ...]


@dataclass
class Segment:
    """Members that run in one loop. `loops` are outside the reductions, `reduce` are reduced."""

    loops: Loops
    reduce: Loops
    members: list[Nest] = field(default_factory=list[Nest])

    @property
    def inner(self) -> Loops:
        return (*self.loops, *self.reduce)

    @property
    def scans(self) -> bool:
        return any(reduces_or_scans(m, "scan") for m in self.members)


def without_scan(group: Group) -> Loops:
    """A loop that a scan runs along stays inside, in order."""
    axes = {n.arg.axis for m in group.members for n in walk(*m.exprs) if n.op == "scan"}
    return tuple(v for v in group.outer if v.arg not in axes)


def merge_loops(members: list[Nest], outer: Loops, serial: Loops = (), compared: bool = False
                ) -> tuple[list[Nest], Loops, Loops]:  # fmt: skip
    """Join adjacent loops that every index walks as one: long loops vectorise, short do not. Also
    where the first is `compared` with something, which is a branch outside the second."""
    if any(reduces_or_scans(m, "scan") for m in members):
        return members, outer, serial
    changed = True
    while changed:
        changed = False
        for chain in (outer, serial, *_chains(members, (*outer, *serial))):
            for a, b in pairwise(chain):
                found = merge(members, a, b, compared)
                if found is None:
                    continue
                members, joined = found
                outer = tuple(joined if v is a else v for v in outer if v is not b)
                serial = tuple(joined if v is a else v for v in serial if v is not b)
                changed = True
                break
            if changed:
                break
    return members, outer, serial


def _chains(members: Sequence[Nest], shared: Loops) -> list[Loops]:
    chains: list[Loops] = []
    for m in members:
        chains.append(tuple(v for v in m.loops if v not in shared))
        chains.append(tuple(v for v in m.reduce if v not in shared))
    return chains


def segments_of(members: Sequence[Nest], shared: Loops) -> list[Segment]:
    """The loops of the members inside those they share, jammed where they are the same."""
    segments: list[Segment] = []
    written = {b for m in members for b in m.writes}
    placed: dict[str, list[tuple[int, Nest]]] = {}  # buffer -> who touches it, in which segment
    for m in members:
        loops = tuple(v for v in m.loops if v not in shared)
        reduce = tuple(v for v in m.reduce if v not in shared)
        first = _earliest(placed, m)
        place = next((k for k in range(first, len(segments))
                      if _jams(segments[k], loops, reduce)), len(segments))  # fmt: skip
        if place == len(segments):
            segments.append(Segment(loops, reduce))
        target = segments[place]
        if reduce and not target.reduce:
            target.loops, target.reduce = loops, reduce
        target.members.append(m)
        for b in written & m.indices.keys():
            placed.setdefault(b, []).append((place, m))
    return segments


def _earliest(placed: Mapping[str, Sequence[tuple[int, Nest]]], nest: Nest) -> int:
    """The first segment the nest may run in: after what it needs, or beside it point by point."""
    earliest = 0
    for buffer in nest.indices:
        for k, other in placed.get(buffer, ()):
            if k < earliest or not (buffer in other.writes or buffer in nest.writes):
                continue
            same = not other.reduce and all(a is b for a in accesses(other, buffer)
                                            for b in accesses(nest, buffer))  # fmt: skip
            earliest = max(earliest, k if same and set(all_loops(other)) == set(all_loops(nest))
                           else k + 1)  # fmt: skip
    return earliest


def _jams(segment: Segment, loops: Loops, reduce: Loops) -> bool:
    if set(segment.inner) != {*loops, *reduce}:
        return False
    if segment.reduce and reduce:
        return set(segment.reduce) == set(reduce)
    return True
