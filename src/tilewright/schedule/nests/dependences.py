"""Which nodes must run before which. Writes to different parts of one buffer do not wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload

from tilewright.graph.user_kernels import Launch
from tilewright.ir.expr import Expr, syms
from tilewright.ir.program import Handle, Node, Opaque, Program, leaves
from tilewright.schedule.nests.access import disjoint, signature, touched

MOST_PARTS = 64  # writers of one buffer that are told apart


def dependences(program: Program, nodes: Sequence[Node]) -> list[set[int]]:
    """For each node the earlier ones it waits for; those that these wait for may be missing."""
    found: list[set[int]] = []
    memory: dict[str, _Users] = {}
    binder: dict[str, int] = {}  # which call makes a symbol or a handle known
    effect: int | None = None  # the last call whose order matters
    for k, node in enumerate(nodes):
        waits: set[int] = set()
        writes = node.writes
        for b in sorted(node.reads | writes):
            waits |= memory.setdefault(b, _Users()).add(nodes, k, b, b in writes)
        used = {*node.symbols, *(s for b in writes for s in _sizes(program, b))}
        names = [name for s in used for name in program.behind(s.arg.name)]
        if isinstance(node, Opaque):
            names += [h.name for h in leaves((node.args, node.kwargs)) if isinstance(h, Handle)]
            if has_effects(node):
                waits |= set() if effect is None else {effect}
                effect = k
            binder.update({name: k for name, _ in node.binds})
            binder.update({f"{node.name}_r{i}": k for i in range(max(len(node.results), 1))})
        waits.update(binder[name] for name in names if name in binder)
        waits.discard(k)
        found.append(waits)
    return found


def _sizes(program: Program, buffer: str) -> set[Expr]:
    """The symbols that have to be known for a buffer to be allocated."""
    found = program.buffers.get(buffer)
    return set() if found is None else {s for n in (*found.size, *found.stride) for s in syms(n)}


@dataclass
class _Users:
    """Who wrote and who read a buffer, but for those that whoever must wait for them waits for
    anyway, through a later writer."""

    writers: list[int] = field(default_factory=list[int])
    readers: list[int] = field(default_factory=list[int])
    floor: set[int] = field(default_factory=set[int])  # the writer that everybody waits for

    def add(self, nodes: Sequence[Node], k: int, buffer: str, writes: bool) -> set[int]:
        if not writes:
            self.readers.append(k)
            return self.floor | set(self.writers)
        users = [*self.writers, *self.readers]
        if len(users) > MOST_PARTS:
            self.writers, self.readers, self.floor = [], [], {k}
            return set(users)
        waits = {u for u in users if not _apart(nodes[u], nodes[k], buffer)}
        past = {u for u in waits if _covers(nodes[k], nodes[u], buffer)}
        self.writers = [*(u for u in self.writers if u not in past), k]
        self.readers = [u for u in self.readers if u not in past]
        return self.floor | waits


def _apart(a: Node, b: Node, buffer: str) -> bool:
    """Whether the two certainly touch different elements."""
    left, right = touched(a, buffer), touched(b, buffer)
    return bool(left and right) and all(disjoint(i, j) for i in left for j in right)


def _covers(a: Node, b: Node, buffer: str) -> bool:
    """Whether nobody can be told apart from the first that is not apart from the second as well."""
    all_of, part = touched(a, buffer), touched(b, buffer)
    if not all_of:
        return True
    return bool(part) and {signature(i) for i in part} <= {signature(i) for i in all_of}


def has_effects(call: Opaque) -> bool:
    """Whether a call must keep its place among others: it checks, draws random numbers, mutates,
    or is code we know nothing of. Of a user's kernel all that it reads and writes is known."""
    if isinstance(call.target, Launch):
        return False
    if not isinstance(call.target, OpOverload) or not call.results or call.mutates:
        return True
    return torch.Tag.nondeterministic_seeded in call.target.tags
