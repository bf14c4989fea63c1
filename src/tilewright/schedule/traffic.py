"""Bytes moved by each group: the compatible count, and the honest one."""

from __future__ import annotations

from tilewright.ir.expr import loads
from tilewright.ir.program import Buffer, Nest, Program
from tilewright.schedule.group import Group, hint_bytes, hint_product, work
from tilewright.schedule.legality import accesses


def accessed(program: Program, group: Group) -> int:
    """Whole buffers, best case: a buffer the kernel keeps to itself is free, a mutated argument
    of an opaque call counts twice. A kernel of one nest is charged at most its iterations."""
    total = 0
    for b in group.reads | group.writes:
        if b in group.local or b not in program.buffers:
            continue
        buffer = program.buffers[b]
        count = hint_product(buffer.size)
        if len(group.members) == 1:
            patterns = len(set(accesses(group.members[0], b)))
            count = min(count, work(group.members[0]) * patterns)
        total += count * buffer.dtype.itemsize
    if group.call is not None:
        total += sum(hint_bytes(program.buffers[b]) for b in group.call.mutates)
    return total


def moved(program: Program, group: Group) -> int:
    """What a perfect cache moves: the extent each buffer is touched over, in each direction."""
    if group.call is not None:
        return accessed(program, group)
    total = 0
    for b in group.reads | group.writes:
        if b not in group.local:
            total += _extent(program.buffers[b], group)
    return total


def _extent(buffer: Buffer, group: Group) -> int:
    read = written = 0
    for member in group.members:
        patterns = {n.src[0] for n in loads(*member.exprs) if n.arg == buffer.name}
        read += sum(_points(index, member) for index in patterns)
        written += sum(_points(s.index, member) for s in member.stores if s.buffer == buffer.name)
    whole = hint_product(buffer.size)
    inside = any(buffer.name in m.writes for m in group.members)
    read = 0 if inside else min(read, whole)
    return (read + min(written, whole)) * buffer.dtype.itemsize


def _points(index: object, nest: Nest) -> int:
    """How many different elements an access can touch: the iterations its index varies over."""
    from tilewright.ir.expr import Expr, free_vars

    assert isinstance(index, Expr)
    return hint_product(v.src[0] for v in free_vars(index))
