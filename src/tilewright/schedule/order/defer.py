"""Parts of a buffer that are written long before the rest, written later instead.

A kernel that makes a value can also put it where a concatenation wants it. That saves reading it
again, and keeps all of the concatenation alive from there on: where that is when most memory is
alive, the value waits by itself until the rest is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tilewright import config
from tilewright.ir.program import Nest, Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.take_apart import Limits
from tilewright.schedule.nests.hints import hint_bytes
from tilewright.schedule.order.peak_memory import Facts

MOST_DELAYS = 16  # in one program
LEAST_GAIN = 1 << 18  # bytes, that are worth reading a value again
NEAR_THE_PEAK = 0.7  # of it: library calls have memory of their own, which is not known


@dataclass(frozen=True)
class _Early:
    """A member of a group that writes a part of a buffer nobody touches before `until`."""

    group: int
    member: Nest
    buffer: str
    until: int


def deferred(
    program: Program, groups: Sequence[Group], limits: Limits | None = None
) -> list[Group]:
    """The groups, with such members on their own where that lowers the peak, and the others are
    still one kernel."""
    found = list(groups)
    if not config.reorder_for_peak_memory:
        return found
    refused: set[str] = set()
    for _ in range(MOST_DELAYS):
        early = [e for e in _early(program, found) if e.member.name not in refused]
        if not early:
            break
        profile = Facts(program, found).profile(range(len(found)))
        near = max(profile) * NEAR_THE_PEAK
        across = [e for e in early if max(profile[e.group : e.until]) >= near]
        if not across:
            break
        most = max(across, key=lambda e: hint_bytes(program.buffers[e.buffer]))
        tried = _apart(found, most)
        after = Facts(program, tried).profile(range(len(tried)))
        gained = max(profile[most.group : most.until]) - max(after[most.group : most.until])
        whole = limits is None or not limits(program, tried[most.group])
        if whole and gained >= LEAST_GAIN and max(after) <= max(profile):
            found = tried
        else:
            refused.add(most.member.name)
    return found


def _early(program: Program, groups: Sequence[Group]) -> Iterator[_Early]:
    visible = program.visible
    users: dict[str, list[int]] = {}
    for k, group in enumerate(groups):
        for b in group.reads | group.writes:
            users.setdefault(b, []).append(k)
    for k, group in enumerate(groups):
        if len(group.members) < 2 or group.serial or group.row_programs:
            continue
        for member in group.members:
            found = _waits(program, group, member)
            if found is None or found in visible or users[found][0] != k or len(users[found]) < 2:
                continue
            until = users[found][1]
            if not any(b in groups[j].writes for b in member.reads for j in range(k + 1, until)):
                yield _Early(k, member, found, until)


def _waits(program: Program, group: Group, member: Nest) -> str | None:
    """The one buffer a member writes, large beside all that it is made of, if no other does."""
    if member.reduce or len(member.writes) != 1:
        return None
    (name,) = member.writes
    buffer = program.buffers[name]
    others = [m for m in group.members if m is not member]
    if buffer.kind != "temporary" or any(name in m.reads | m.writes for m in others):
        return None
    if not member.reads & {b for m in others for b in m.writes}:
        return None  # nothing is saved by having it here
    made = sum(hint_bytes(program.buffers[b]) for b in member.reads)
    return name if hint_bytes(buffer) >= made + LEAST_GAIN else None


def _apart(groups: Sequence[Group], early: _Early) -> list[Group]:
    """The member on its own, before what else touches its buffer."""
    whole = groups[early.group]
    rest = replace(whole, members=tuple(m for m in whole.members if m is not early.member),
                   local=whole.local - early.member.reads)  # fmt: skip
    alone = Group((early.member,), early.member.loops)
    return [*groups[: early.group], rest, *groups[early.group + 1 : early.until], alone,
            *groups[early.until :]]  # fmt: skip
