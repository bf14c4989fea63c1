"""What a group moves, kept in a form in which joining two groups is cheap to weigh.

An access is known by its signature: strides, extents and a constant, whatever its loops are called.
Accesses of equal signature touch the same elements, so a kernel that makes both moves them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewright.ir.expr import Expr, free_vars
from tilewright.ir.program import Buffer, Nest, Node
from tilewright.schedule.nests.access import Signature, signature, touched
from tilewright.schedule.nests.hints import hint_product

Parts = dict[Signature, int]  # what is touched -> elements


@dataclass
class Touch:
    """How one group uses one buffer. `users` are the nodes of the group that do."""

    reads: Parts = field(default_factory=dict[Signature, int])
    writes: Parts = field(default_factory=dict[Signature, int])
    users: int = 0
    first_read: int = 1 << 60  # position in the program
    first_write: int = 1 << 60


Footprint = dict[str, Touch]


def footprint(node: Node, position: int, buffers: Mapping[str, Buffer]) -> Footprint:
    found: Footprint = {}
    reads, writes = node.reads, node.writes
    for b in sorted(reads | writes):
        if b not in buffers:
            continue
        touch = found[b] = Touch(users=1)
        if b in reads:
            touch.first_read = position
            touch.reads = _parts(_read_indices(node, b), buffers[b])
        if b in writes:
            touch.first_write = position
            touch.writes = _parts(_written_indices(node, b), buffers[b])
    return found


def _read_indices(node: Node, buffer: str) -> list[Expr]:
    if not isinstance(node, Nest):
        return touched(node, buffer)
    return list(node.loaded.get(buffer, ()))


def _written_indices(node: Node, buffer: str) -> list[Expr]:
    if isinstance(node, Nest):
        return [s.index for s in node.stores if s.buffer == buffer]
    return [] if node.out is None or node.out.buffer != buffer else [node.out.window]


def _parts(indices: list[Expr], buffer: Buffer) -> Parts:
    whole = hint_product(buffer.size)
    if not indices:
        return {("all",): whole}
    return {signature(i): min(whole, hint_product(v.src[0] for v in free_vars(i)))
            for i in indices}  # fmt: skip


class Prices:
    """The bytes of groups over one program. `total` counts the users of each buffer."""

    def __init__(self, buffers: Mapping[str, Buffer], visible: set[str],
                 total: Mapping[str, int]) -> None:  # fmt: skip
        self.total = total
        known = [b for b in total if b in buffers]  # a part of a program has few of them
        self.keep = {b for b in known if b in visible or buffers[b].kind != "temporary"}
        self.whole = {b: max(hint_product(buffers[b].size), 0) for b in known}
        self.item = {b: buffers[b].dtype.itemsize for b in known}

    def of(self, buffer: str, touch: Touch) -> int:
        """Bytes one group moves of one buffer; none of what only it uses."""
        if touch.users > 1 and touch.users == self.total[buffer] and buffer not in self.keep:
            return 0
        whole = self.whole[buffer]
        count = min(whole, sum(touch.reads.values())) + min(whole, sum(touch.writes.values()))
        return count * self.item[buffer]

    def bytes(self, group: Footprint) -> int:
        return sum(self.of(b, touch) for b, touch in group.items())

    def read_of_others(self, group: Footprint) -> int:
        """Bytes a group reads of what the program made before."""
        return sum(min(self.whole[b], sum(touch.reads.values())) * self.item[b]
                   for b, touch in group.items() if b not in self.keep)  # fmt: skip

    def saving(self, a: Footprint, b: Footprint) -> int:
        """Bytes that are not moved when the two are one kernel."""
        if len(b) < len(a):
            a, b = b, a
        return sum(self.of(name, mine) + self.of(name, b[name])
                   - self.of(name, self.joined(name, mine, b[name]))
                   for name, mine in a.items() if name in b)  # fmt: skip

    def joined(self, buffer: str, a: Touch, b: Touch) -> Touch:
        return Touch(
            {**self._from_memory(buffer, a, b), **self._from_memory(buffer, b, a)},
            {**a.writes, **b.writes},
            a.users + b.users,
            min(a.first_read, b.first_read),
            min(a.first_write, b.first_write),
        )

    def _from_memory(self, buffer: str, reader: Touch, other: Touch) -> Parts:
        """What `reader` reads that `other` has not written just before."""
        if not reader.reads or reader.first_read <= other.first_write:
            return reader.reads
        if sum(other.writes.values()) >= self.whole[buffer]:
            return {}
        return {s: n for s, n in reader.reads.items() if s not in other.writes}

    def join(self, a: Footprint, b: Footprint) -> Footprint:
        return {name: self.joined(name, a[name], b[name]) if name in a and name in b
                else a.get(name) or b[name] for name in dict.fromkeys((*a, *b))}  # fmt: skip
