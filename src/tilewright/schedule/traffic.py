"""Bytes moved by each group: the compatible count, and the honest one.

Both charge a buffer once per direction. The compatible count assumes the best case for a kernel
and the worst for a buffer: a fused kernel that reads any of it reads all of it. The honest count
charges what can be touched.
"""

from __future__ import annotations

from tilewright.ir.expr import Expr, free_vars, loads
from tilewright.ir.program import Nest, Opaque, Program, Store
from tilewright.schedule.group import Group
from tilewright.schedule.sizes import hint_bytes, hint_product, work


def accessed(program: Program, group: Group) -> int:
    """The compatible count: targets of scatters are read too, a buffer that an opaque call
    mutates counts twice, a kernel of one nest is charged at most its iterations."""
    if group.parts:
        return sum(accessed(program, part) for part in group.parts)
    total = 0
    for b in group.reads | group.writes:
        if b in group.local or b not in program.buffers:
            continue
        whole = hint_product(program.buffers[b].size)
        if group.call is not None:
            count = whole * (2 if b in group.call.mutates and b in group.reads else 1)
            if group.call.out is not None and b == group.call.out.buffer:
                count = hint_product(group.call.out.size)
        else:
            count = _written(group, b, whole)
            if _needed(group, b) or _scattered(group, b):
                count += min(whole, _iterations(group, b))
        total += count * program.buffers[b].dtype.itemsize
    return total


def moved(program: Program, group: Group) -> int:
    """The honest count: slices and gathers by extent, write-only targets not read."""
    if group.parts:
        return sum(moved(program, part) for part in group.parts)
    if group.call is not None:
        return sum(_of_call(program, group.call, b) for b in group.reads | group.writes
                   if b in program.buffers)  # fmt: skip
    total = 0
    for b in group.reads | group.writes:
        if b in group.local:
            continue
        whole = hint_product(program.buffers[b].size)
        count = _written(group, b, whole)
        if _needed(group, b):
            count += min(whole, sum(_points(i) for m in group.members for i in _patterns(m, b)))
        total += count * program.buffers[b].dtype.itemsize
    return total


def _of_call(program: Program, call: Opaque, buffer: str) -> int:
    if call.out is not None and buffer == call.out.buffer:
        return hint_product(call.out.size) * call.out.dtype.itemsize
    return hint_bytes(program.buffers[buffer])


def _needed(group: Group, buffer: str) -> bool:
    """Whether the buffer's contents from before the group are read."""
    for m in group.members:
        if buffer in m.reads or any(s.mode != "set" for s in m.stores if s.buffer == buffer):
            return True
        if buffer in m.writes:
            return False
    return False


def _scattered(group: Group, buffer: str) -> bool:
    return any(_is_scatter(s) for m in group.members for s in m.stores if s.buffer == buffer)


def _is_scatter(store: Store) -> bool:
    return store.mode != "set" or store.mask is not None or bool(loads(store.index))


def _written(group: Group, buffer: str, whole: int) -> int:
    points = sum(work(m) if _is_scatter(s) else _points(s.index)
                 for m in group.members for s in m.stores if s.buffer == buffer)  # fmt: skip
    return min(whole, points)


def _iterations(group: Group, buffer: str) -> int:
    """The most elements a kernel of one nest can read; no bound for a fused one."""
    if len(group.members) != 1:
        return 1 << 62
    nest = group.members[0]
    return work(nest) * max(len(_patterns(nest, buffer)), 1)


def _patterns(nest: Nest, buffer: str) -> set[Expr]:
    """The different ways in which a nest reads a buffer."""
    return {n.src[0] for n in loads(*nest.exprs) if n.arg == buffer}


def _points(index: Expr) -> int:
    """How many different elements an access can touch: the iterations its index varies over."""
    return hint_product(v.src[0] for v in free_vars(index))
