"""Lifetimes: what is allocated when, what memory is used again, what is freed.

A buffer lives from the group that writes it first to the last group that touches it. A new buffer
takes over memory in two ways. In place: a value that dies in the very group that makes the buffer
is overwritten by it, if the group would still be right with the two being one buffer, and still be
one kernel: on a card, what a row is computed from twice must not change in between. Or from a
buffer that died before, of the same number of bytes, unless keeping that memory until then makes
the program's peak higher than freeing it at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import torch

from tilewright import config
from tilewright.ir.expr import Expr, load, rewrite
from tilewright.ir.program import Buffer, Nest, Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import first_conflict
from tilewright.schedule.fusion.take_apart import Limits
from tilewright.schedule.nests.access import Signature, accesses, signature
from tilewright.schedule.nests.hints import hint, hint_bytes
from tilewright.schedule.nests.transform import reduces_or_scans, replace_exprs

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


def plan(program: Program, groups: Sequence[Group], limits: Limits | None = None) -> list[Step]:
    steps = _lifetimes(program, groups, limits)
    if config.allow_buffer_reuse:
        _pass_on(program, steps)
    return steps


# ---- lifetimes, with what is overwritten in place


def _lifetimes(program: Program, groups: Sequence[Group], limits: Limits | None) -> list[Step]:
    visible = program.visible
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
        donors = {b: None for b in dying if b in exists and b not in shared
                  and _is_ours(program, b)}  # fmt: skip
        inside = _InPlace(program, group, limits)
        for b in sorted(group.writes - group.local - exists - made):
            donor = inside.overwrite(b, donors)
            if donor is None:
                step.allocate.append(b)
            else:
                del donors[donor]
                step.reuse.append((b, donor))
        step.group = inside.group()
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


class _InPlace:
    """The members of a group while buffers take the place of values that die in it. Of groups that
    share a launch, no other may touch either."""

    def __init__(self, program: Program, group: Group, limits: Limits | None) -> None:
        self.program = program
        self.limits = limits
        self.whole = group
        self.nests = [list(part.members) for part in group.kernels]
        self.users: dict[str, list[tuple[int, int]]] = {}  # of a buffer: (part, member)
        self.changed = False
        for p, nests in enumerate(self.nests):
            for k, m in enumerate(nests):
                for b in m.indices:
                    self.users.setdefault(b, []).append((p, k))

    def group(self) -> Group:
        if not self.changed:
            return self.whole
        if not self.whole.parts:
            return replace(self.whole, members=tuple(self.nests[0]))
        return replace(self.whole, parts=tuple(
            replace(part, members=tuple(nests))
            for part, nests in zip(self.whole.parts, self.nests, strict=True)))  # fmt: skip

    def overwrite(self, buffer: str, donors: Mapping[str, None]) -> str | None:
        """A dying value whose memory `buffer` takes from now on, if there is one."""
        if not (config.inplace_buffers and config.allow_buffer_reuse) or not donors:
            return None
        users = self.users.get(buffer, [])
        if len({p for p, _ in users}) != 1:
            return None
        mine = self.program.buffers[buffer]
        writer = next(u for u in users if buffer in self._nest(u).writes)
        near = [d for d in sorted(self._nest(writer).reads) if d in donors]
        others = (d for d in donors if d not in near)
        for donor in islice(chain(near, others), MOST_DONORS):
            theirs = self.program.buffers[donor]
            if theirs.dtype != mine.dtype or not same_bytes(mine, theirs):
                continue
            if self._merge(buffer, donor, writer):
                return donor
        return None

    def _nest(self, at: tuple[int, int]) -> Nest:
        return self.nests[at[0]][at[1]]

    def _merge(self, buffer: str, donor: str, writer: tuple[int, int]) -> bool:
        """Make the two one buffer, if the group still computes what it did with both."""
        mine, theirs = self.users[buffer], self.users[donor]
        if theirs[0][0] != writer[0] or theirs[-1][0] != writer[0]:
            return False
        if any(u > writer and donor in self._nest(u).reads for u in theirs):
            return False
        both = sorted({*mine, *theirs})
        nests = [self._nest(u) for u in both]
        if not _in_one_place(nests, buffer, donor):
            return False
        nests = [_renamed(m, buffer, donor) for m in nests]
        part = self.whole.kernels[writer[0]]
        if not _still_right(nests, (*part.outer, *part.serial), donor):
            return False
        after = self.nests[writer[0]].copy()
        for (_, k), m in zip(both, nests, strict=True):
            after[k] = m
        if self.limits and self.limits(self.program, replace(part, members=tuple(after))):
            return False
        self.nests[writer[0]] = after
        del self.users[buffer]
        self.users[donor] = both
        self.changed = True
        return True


def same_bytes(a: Buffer, b: Buffer) -> bool:
    """Whether both fill the same number of bytes on the same device without gaps."""
    return a.device == b.device and a.is_dense and b.is_dense and a.bytes is b.bytes


def _renamed(nest: Nest, old: str, new: str) -> Nest:
    if old not in nest.writes and old not in nest.reads:
        return nest

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        return load(new, node.dtype, *src) if node.op == "load" and node.arg == old else None

    changed = replace_exprs(nest, lambda e: rewrite(e, rule))
    return replace(changed, stores=tuple(
        replace(s, buffer=new) if s.buffer == old else s for s in changed.stores))  # fmt: skip


def _in_one_place(nests: Sequence[Nest], buffer: str, donor: str) -> bool:
    """Whether all touch the same elements of both, and those that store step alike through them:
    quickly told, and most pairs are not like that."""
    touched: set[Signature] = set()
    for m in nests:
        indices = {*accesses(m, buffer), *accesses(m, donor)}
        touched.update(map(signature, indices))
        if len(touched) > 1 or (len(indices) > 1 and {buffer, donor} & m.writes):
            return False
    return True


def _still_right(users: Sequence[Nest], outer: Sequence[Expr], buffer: str) -> bool:
    """Whether nests that now read and write one buffer compute what they did with two."""
    for m in users:
        stores = [s for s in m.stores if s.buffer == buffer]
        if any(s.mode != "set" or s.mask is not None for s in stores) or reduces_or_scans(
            m, "scan"
        ):
            return False
        if stores and m.reduce and buffer in m.reads:
            return False
    return not first_conflict(users, outer, {buffer})


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
        # a result nobody reads may not be there at all: attention on a card leaves some out
        unread = () if step.group.call is None else step.group.call.results
        for b in step.free:
            buffer = program.buffers[b]
            if (buffer.kind == "temporary" and b not in shared and b not in unread
                    and buffer.is_dense):  # fmt: skip
                idle.setdefault(_block(buffer), []).append((k, b))


Block = tuple[torch.device, Expr]


def _block(buffer: Buffer) -> Block:
    return buffer.device, buffer.bytes


def _kept(program: Program, waiting: Sequence[tuple[int, str]], buffer: str, now: int,
          live: Sequence[int], top: int) -> tuple[int, str] | None:  # fmt: skip
    """The dead buffer whose memory `buffer` takes: one laid out alike if there is one."""
    mine = program.buffers[buffer]
    if not mine.is_dense or hint(mine.numel) == 0:
        return None
    size = hint_bytes(mine)
    most, reach, fits = 0, now, list[tuple[int, str]]()
    for since, old in reversed(waiting):  # the latest first: what is alive since then only grows
        most = max(most, *live[since + 1 : reach], 0)
        reach = min(reach, since + 1)
        if most + size > top:
            break
        fits.append((since, old))
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
