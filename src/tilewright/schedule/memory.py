"""Lifetimes: what is allocated when, what memory is used again, what is freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright import config
from tilewright.ir.program import Buffer, Program, View
from tilewright.schedule.group import Group
from tilewright.schedule.legality import accesses


@dataclass
class Step:
    """Around one group: buffers made before it (new, or from one that is dead), freed after it."""

    group: Group
    allocate: list[str] = field(default_factory=list[str])
    reuse: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # (new, old)
    free: list[str] = field(default_factory=list[str])


def plan(program: Program, groups: Sequence[Group]) -> list[Step]:
    visible = {o.buffer for o in program.outputs if isinstance(o, View)}
    last: dict[str, int] = {}
    for k, group in enumerate(groups):
        for b in group.reads | group.writes:
            last[b] = k
    steps: list[Step] = []
    idle: list[str] = []
    exists = {b.name for b in program.buffers.values() if b.kind != "temporary"}
    for k, group in enumerate(groups):
        step = Step(group)
        dying = [
            b
            for b in sorted(group.reads - group.local)
            if last[b] == k and _may_die(program, b, visible)
        ]
        made = set() if group.call is None else {r for r in group.call.results if r}
        for b in sorted(group.writes - group.local - exists):
            exists.add(b)
            if b in made:
                continue
            buffer = program.buffers[b]
            donor = _in_place(program, groups, group, b, dying) or _idle(program, buffer, idle)
            if donor is None or not config.allow_buffer_reuse:
                step.allocate.append(b)
                continue
            step.reuse.append((b, donor))
            if donor in dying:
                dying.remove(donor)
            else:
                idle.remove(donor)
        written = [b for b in sorted(group.writes - group.local)
                   if last[b] == k and _may_die(program, b, visible)]  # fmt: skip
        taken = {old for _, old in step.reuse}
        gone = [b for b in dict.fromkeys([*dying, *written]) if b not in taken]
        step.free = gone
        # memory a library call returned may be shared with something we do not see
        idle += [b for b in gone if program.buffers[b].kind == "temporary" and _ours(groups, b)]
        steps.append(step)
    return _drop_stale(steps, idle)


def _drop_stale(steps: list[Step], idle: list[str]) -> list[Step]:
    """A freed buffer that is reused later must stay referenced until then."""
    donated = {old: k for k, step in enumerate(steps) for _, old in step.reuse}
    for k, step in enumerate(steps):
        step.free = [b for b in step.free if donated.get(b, -1) <= k]
    return steps


def _ours(groups: Sequence[Group], buffer: str) -> bool:
    return not any(g.call is not None and (
        buffer in g.call.writes or (g.call.aliases and buffer in g.call.reads)
    ) for g in groups)  # fmt: skip


def _may_die(program: Program, buffer: str, visible: set[str]) -> bool:
    return buffer not in visible and program.buffers[buffer].kind != "constant"


def _same_memory(a: Buffer, b: Buffer) -> bool:
    return a.dtype == b.dtype and a.device == b.device and a.size == b.size and a.stride == b.stride


def _idle(program: Program, buffer: Buffer, idle: Sequence[str]) -> str | None:
    return next((b for b in idle if _same_memory(program.buffers[b], buffer)), None)


def _in_place(program: Program, groups: Sequence[Group], group: Group, buffer: str,
              dying: Sequence[str]) -> str | None:  # fmt: skip
    """A dying temporary that may be overwritten: each of its elements is read only by the very
    iteration that stores the element of the result."""
    if group.call is not None or not config.inplace_buffers:
        return None
    mine = program.buffers[buffer]
    writers = [m for m in group.members if buffer in m.writes]
    for b in dying:
        if program.buffers[b].kind != "temporary" or not _same_memory(program.buffers[b], mine):
            continue
        if not _ours(groups, b):
            continue
        readers = [m for m in group.members if b in m.reads]
        if len(writers) == 1 and readers == writers and not writers[0].reduce:
            stores = {s.index for s in writers[0].stores if s.buffer == buffer and s.mode == "set"}
            if {i for m in readers for i in accesses(m, b)} == stores and len(stores) == 1:
                return b
    return None
