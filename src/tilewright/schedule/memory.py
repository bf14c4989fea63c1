"""Lifetimes: what is allocated when, what memory is used again, what is freed.

A buffer lives from the group that writes it first to the last group that touches it. A new buffer
takes over memory in two ways. In place: a value that dies in the very group that makes the buffer
is overwritten by it, if the group would still be right with the two being one buffer. Or from a
buffer that died before, of the same number of bytes, unless keeping that memory until then makes
the program's peak higher than freeing it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch

from tilewright import config
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, load, rewrite
from tilewright.ir.program import Buffer, Nest, Program, View
from tilewright.schedule.access import accesses
from tilewright.schedule.group import Group
from tilewright.schedule.legality import conflict
from tilewright.schedule.loops import is_fold, replace_exprs
from tilewright.schedule.sizes import hint, hint_bytes

MOST_DONORS = 8  # dying values that a buffer is tried in the place of
FARTHEST = 64  # steps for which dead memory may be kept for a later buffer


@dataclass(frozen=True)
class Pool:
    """An allocation of `size` bytes that buffers are carved out of."""

    name: str
    device: torch.device
    size: Expr


@dataclass(frozen=True)
class Slot:
    """A buffer's place in a pool, in bytes."""

    buffer: str
    pool: str
    start: Expr


@dataclass
class Step:
    """Around one group: buffers made before it (new, from one that is dead, or in a pool), freed
    after it."""

    group: Group
    allocate: list[str] = field(default_factory=list[str])
    reuse: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # (new, old)
    free: list[str] = field(default_factory=list[str])
    pools: list[Pool] = field(default_factory=list[Pool])
    carve: list[Slot] = field(default_factory=list[Slot])


def plan(program: Program, groups: Sequence[Group]) -> list[Step]:
    steps = _lifetimes(program, groups)
    if config.allow_buffer_reuse:
        _pass_on(program, steps)
    return steps


# ---- lifetimes, with what is overwritten in place


def _lifetimes(program: Program, groups: Sequence[Group]) -> list[Step]:
    visible = {o.buffer for o in program.outputs if isinstance(o, View)}
    shared = exposed(groups)
    last = {b: k for k, group in enumerate(groups) for b in group.reads | group.writes}
    exists = {b.name for b in program.buffers.values() if b.kind != "temporary"}
    steps: list[Step] = []
    for k, group in enumerate(groups):
        touched = (group.reads | group.writes) - group.local
        dying = [b for b in sorted(touched) if last[b] == k and b not in visible
                 and program.buffers[b].kind != "constant"]  # fmt: skip
        step = Step(group)
        made = set() if group.call is None else {r for r in group.call.results if r}
        donors = [b for b in dying if b in exists and b not in shared and _is_ours(program, b)]
        for b in sorted(group.writes - group.local - exists - made):
            found = _overwritten(program, step.group, b, donors)
            if found is None:
                step.allocate.append(b)
                continue
            donor, step.group = found
            donors.remove(donor)
            step.reuse.append((b, donor))
        exists |= group.writes
        taken = {old for _, old in step.reuse}
        step.free = [b for b in dying if b not in taken]
        steps.append(step)
    return steps


def exposed(groups: Sequence[Group]) -> set[str]:
    """Buffers whose memory something we do not see into may share: never used again."""
    return {b for g in groups if g.call is not None and g.call.aliases
            for b in g.call.reads | g.call.writes}  # fmt: skip


def _is_ours(program: Program, buffer: str) -> bool:
    return program.buffers[buffer].kind == "temporary" or buffer in program.donated


def _overwritten(program: Program, group: Group, buffer: str,
                 donors: Sequence[str]) -> tuple[str, Group] | None:  # fmt: skip
    """A dying value that `buffer` may overwrite, and the group with the two as one."""
    if group.call is not None or not (config.inplace_buffers and config.allow_buffer_reuse):
        return None
    if group.parts:
        return _overwritten_in_part(program, group, buffer, donors)
    if group.serial:
        return None
    mine = program.buffers[buffer]
    writer = next(k for k, m in enumerate(group.members) if buffer in m.writes)
    later = {b for m in group.members[writer + 1 :] for b in m.reads}
    near = group.members[writer].reads
    for donor in sorted(donors, key=lambda d: d not in near)[:MOST_DONORS]:
        theirs = program.buffers[donor]
        if donor in later or theirs.dtype != mine.dtype or not same_bytes(mine, theirs):
            continue
        merged = replace(group, members=tuple(_renamed(m, buffer, donor) for m in group.members))
        if _still_right(merged, donor):
            return donor, merged
    return None


def _overwritten_in_part(program: Program, group: Group, buffer: str,
                         donors: Sequence[str]) -> tuple[str, Group] | None:  # fmt: skip
    """The same for groups that share a launch: no other may touch either buffer."""
    touching = [p for p in group.parts if buffer in p.reads or buffer in p.writes]
    if len(touching) != 1:
        return None
    (part,) = touching
    apart = [d for d in donors if not any(d in p.reads for p in group.parts if p is not part)]
    found = _overwritten(program, part, buffer, apart)
    if found is None:
        return None
    donor, merged = found
    return donor, replace(group, parts=tuple(merged if p is part else p for p in group.parts))


def same_bytes(a: Buffer, b: Buffer) -> bool:
    """Whether both fill the same number of bytes on the same device without gaps."""
    return (a.device == b.device and is_dense(a) and is_dense(b)
            and ix.mul(a.numel, a.dtype.itemsize) is ix.mul(b.numel, b.dtype.itemsize))  # fmt: skip


def is_dense(buffer: Buffer) -> bool:
    """Whether its elements lie next to each other, each once."""
    left = [(s, n) for n, s in zip(buffer.size, buffer.stride, strict=True) if n is not ix.ONE]
    step: Expr = ix.ONE
    while left:
        k = next((k for k, (s, _) in enumerate(left) if s is step), None)
        if k is None:
            return False
        step = ix.mul(step, left.pop(k)[1])
    return True


def _renamed(nest: Nest, old: str, new: str) -> Nest:
    if old not in nest.writes and old not in nest.reads:
        return nest

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        return load(new, node.dtype, *src) if node.op == "load" and node.arg == old else None

    changed = replace_exprs(nest, lambda e: rewrite(e, rule))
    return replace(changed, stores=tuple(
        replace(s, buffer=new) if s.buffer == old else s for s in changed.stores))  # fmt: skip


def _still_right(group: Group, buffer: str) -> bool:
    """Whether a group that now reads and writes one buffer computes what it did with two."""
    users = [m for m in group.members if buffer in m.reads or buffer in m.writes]
    for m in users:
        stores = [s for s in m.stores if s.buffer == buffer]
        if any(s.mode != "set" or s.mask is not None for s in stores) or is_fold(m, "scan"):
            return False
        if stores and len(set(accesses(m, buffer))) > 1:
            return False
        if stores and m.reduce and buffer in m.reads:
            return False
    return not any(conflict(a, b, group.outer) for a, b in combinations(users, 2))


# ---- memory passed on


def _pass_on(program: Program, steps: Sequence[Step]) -> None:
    """Give dead memory to later buffers where keeping it does not raise the peak."""
    live = profile(program, steps)
    top = max(live, default=0)
    shared = exposed([step.group for step in steps])
    idle: dict[Block, list[tuple[int, str]]] = {}
    for k, step in enumerate(steps):
        for b in list(step.allocate):
            waiting = idle.get(_block(program.buffers[b]), [])
            while waiting and k - waiting[0][0] > FARTHEST:
                waiting.pop(0)
            found = _kept(program, waiting, b, k, live, top)
            if found is None:
                continue
            waiting.remove(found)
            since, old = found
            step.allocate.remove(b)
            step.reuse.append((b, old))
            steps[since].free.remove(old)
            for between in range(since + 1, k):
                live[between] += hint_bytes(program.buffers[b])
        for b in step.free:
            buffer = program.buffers[b]
            if buffer.kind == "temporary" and b not in shared and is_dense(buffer):
                idle.setdefault(_block(buffer), []).append((k, b))


Block = tuple[torch.device, Expr]


def _block(buffer: Buffer) -> Block:
    return buffer.device, ix.mul(buffer.numel, buffer.dtype.itemsize)


def _kept(program: Program, waiting: Sequence[tuple[int, str]], buffer: str, now: int,
          live: Sequence[int], top: int) -> tuple[int, str] | None:  # fmt: skip
    """The dead buffer whose memory `buffer` takes: one laid out alike if there is one."""
    mine = program.buffers[buffer]
    if not is_dense(mine) or hint(mine.numel) == 0:
        return None
    size = hint_bytes(mine)
    fits = [(since, old) for since, old in waiting
            if max(live[since + 1 : now], default=0) + size <= top]  # fmt: skip
    return max(fits, key=lambda f: (alike(program.buffers[f[1]], mine), f[0]), default=None)


def alike(a: Buffer, b: Buffer) -> bool:
    return a.dtype == b.dtype and a.size == b.size and a.stride == b.stride


# ---- how much is alive


def profile(program: Program, steps: Sequence[Step]) -> list[int]:
    """Bytes alive during each step: what the program allocates, and what was donated to it."""
    alive = sum(hint_bytes(program.buffers[b]) for b in program.donated)
    found: list[int] = []
    for step in steps:
        call = step.group.call
        made = () if call is None else (r for r in call.results if r is not None)
        alive += sum(hint_bytes(program.buffers[b]) for b in (*step.allocate, *made))
        found.append(alive)
        alive -= sum(hint_bytes(program.buffers[b]) for b in step.free
                     if _is_ours(program, b))  # fmt: skip
    return found


def peak(program: Program, steps: Sequence[Step]) -> int:
    """The most bytes alive at once."""
    return max(profile(program, steps), default=0)
