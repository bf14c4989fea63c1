"""Bytes moved by each group: the compatible count, and the honest one.

Both charge a buffer once per direction. The compatible count assumes the best case for a kernel
and the worst for a buffer: a fused kernel that reads any of it reads all of it. The honest count
charges what can be touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.ir.expr import Expr, free_vars, loads
from tilewright.ir.program import Nest, Program, Store
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.nests.access import Signature, signature, touched, users_of
from tilewright.schedule.nests.hints import hint_product, work


@dataclass(frozen=True)
class Traffic:
    """Of one group, in bytes. `least` is what it would move if nothing but operands and results of
    the program and of library calls had to be in memory."""

    accessed: int
    moved: int
    least: int


def traffic(program: Program, groups: Iterable[Group]) -> list[Traffic]:
    """Of each group, given in the order they run."""
    groups = list(groups)
    fixed = _in_memory_anyway(program, groups)
    filled = {b.name for b in program.buffers.values() if b.kind != "temporary"}
    result: list[Traffic] = []
    for group in groups:
        bytes_ = moved(program, group, filled)
        least = sum(size for b, size in bytes_.items() if b in fixed)
        result.append(Traffic(accessed(program, group), sum(bytes_.values()), least))
        filled |= group.writes
    return result


def _in_memory_anyway(program: Program, groups: list[Group]) -> set[str]:
    fixed = program.visible
    fixed |= {b.name for b in program.buffers.values() if b.kind != "temporary"}
    return fixed.union(*(g.reads | g.writes for g in groups if g.call is not None))


# ---- the compatible count


def accessed(program: Program, group: Group) -> int:
    """Targets of scatters are read too, a buffer that an opaque call mutates counts twice, a kernel
    of one nest is charged at most its iterations."""
    if group.parts:
        return sum(accessed(program, part) for part in group.parts)
    total = 0
    users = users_of(group.members)
    for b in group.reads | group.writes:
        if b in group.local or b not in program.buffers:
            continue
        whole = hint_product(program.buffers[b].size)
        if group.call is not None:
            count = whole * (2 if b in group.call.mutates and b in group.reads else 1)
            if group.call.out is not None and b == group.call.out.buffer:
                count = hint_product(group.call.out.size)
        else:
            count = _written(users[b], b, whole)
            if _needed(users[b], b) or _scattered(users[b], b):
                count += min(whole, _iterations(group, b))
        total += count * program.buffers[b].dtype.itemsize
    return total


def _needed(users: Sequence[Nest], buffer: str) -> bool:
    """Whether the buffer's contents from before the group are read."""
    for m in users:
        if buffer in m.reads or any(s.mode != "set" for s in m.stores if s.buffer == buffer):
            return True
        if buffer in m.writes:
            return False
    return False


def _scattered(users: Sequence[Nest], buffer: str) -> bool:
    return any(_is_scatter(s) for m in users for s in m.stores if s.buffer == buffer)


def _iterations(group: Group, buffer: str) -> int:
    """The most elements a kernel of one nest can read; no bound for a fused one."""
    if len(group.members) != 1:
        return 1 << 62
    nest = group.members[0]
    return work(nest) * max(len(nest.loaded.get(buffer, ())), 1)


# ---- the honest count


def moved(program: Program, group: Group, filled: set[str]) -> dict[str, int]:
    """Bytes per buffer: slices and gathers by extent, write-only targets not read. `filled` are the
    buffers that hold something before the group runs."""
    found: dict[str, int] = {}
    for part in group.parts:
        for b, size in moved(program, part, filled).items():
            found[b] = found.get(b, 0) + size
    if group.parts:
        return found
    users = users_of(group.members)
    for b in group.reads | group.writes:
        if b in group.local or b not in program.buffers:
            continue
        whole = hint_product(program.buffers[b].size)
        if group.call is None:
            count = _written(users[b], b, whole) + min(whole, _read(users[b], b, whole))
        else:
            count = _touched_by_call(group, b, whole, filled)
        found[b] = count * program.buffers[b].dtype.itemsize
    return found


def _touched_by_call(group: Group, buffer: str, whole: int, filled: set[str]) -> int:
    call = group.call
    assert call is not None
    if call.out is not None and buffer == call.out.buffer:
        return hint_product(call.out.size)
    parts = {signature(i): _points(i) for i in touched(call, buffer)}
    extent = min(whole, sum(parts.values()))
    if buffer not in call.writes:
        return extent
    if not parts:
        return whole  # a result
    # a target without contents can only be written; what an op does with others is its own affair
    return extent * (2 if buffer in filled and buffer not in call.fills else 1)


def _read(users: Sequence[Nest], buffer: str, whole: int) -> int:
    """Elements read from memory: not those a member before has written."""
    parts: dict[Signature, int] = {}
    fresh: set[Signature] = set()
    for m in users:
        for i in m.loaded.get(buffer, ()):
            if signature(i) not in fresh:
                parts[signature(i)] = _points(i)
        for s in m.stores:
            if s.buffer != buffer:
                continue
            if s.mode != "set":
                parts[signature(s.index)] = work(m) if loads(s.index) else _points(s.index)
            elif not _is_scatter(s):
                fresh.add(signature(s.index))
                if _points(s.index) >= whole:
                    return sum(parts.values())
    return sum(parts.values())


# ---- shared


def _is_scatter(store: Store) -> bool:
    return store.mode != "set" or store.mask is not None or bool(loads(store.index))


def _written(users: Sequence[Nest], buffer: str, whole: int) -> int:
    points = sum(work(m) if _is_scatter(s) else _points(s.index)
                 for m in users for s in m.stores if s.buffer == buffer)  # fmt: skip
    return min(whole, points)


def _points(index: Expr) -> int:
    """How many different elements an access can touch: the iterations its index varies over."""
    return hint_product(v.src[0] for v in free_vars(index))
