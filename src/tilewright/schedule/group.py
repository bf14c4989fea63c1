"""Fusion groups, and how nests are gathered into them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload

from tilewright import config
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Buffer, Handle, Nest, Node, Opaque, Program, leaves
from tilewright.schedule.legality import Fit, Misfit, align, is_alone

LONGEST_ROW = 4096  # elements; what pointwise members may have to themselves inside a group


@dataclass
class Group:
    """Nests that become one kernel, or one opaque call.

    `outer` are the loops all members share; `local` the buffers that never leave the kernel.
    `serial` are loops all members share too, run one after the other inside `outer`: a member
    that folds over a serial loop stores after its last iteration.
    """

    members: tuple[Nest, ...] = ()
    outer: tuple[Expr, ...] = ()
    serial: tuple[Expr, ...] = ()
    call: Opaque | None = None
    local: frozenset[str] = frozenset()
    ancestors: int = 0  # a bit per earlier group this one depends on, also through others
    refused: dict[str, str] = field(default_factory=dict[str, str])  # nest name -> why not fused

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.members if self.call is None else (self.call,)

    @property
    def reads(self) -> set[str]:
        return {b for node in self.nodes for b in node.reads}

    @property
    def writes(self) -> set[str]:
        return {b for node in self.nodes for b in node.writes}


class Grouping:
    """Takes nodes in program order; each joins the group with which it shares most, or none."""

    def __init__(self, program: Program) -> None:
        self.buffers = program.buffers
        self.groups: list[Group] = []
        self._writer: dict[str, int] = {}
        self._users: dict[str, list[int]] = {}
        self._binder: dict[str, int] = {}  # which call makes a symbol or a handle known
        self._effect: int | None = None  # the last call whose order matters

    def add(self, node: Node) -> None:
        depends = self._dependences(node)
        refused: dict[str, str] = {}
        if isinstance(node, Nest) and not is_alone(node):
            for k in self._candidates(node):
                if any(self.groups[d].ancestors >> k & 1 for d in depends if d != k):
                    continue
                fit = self._fit(self.groups[k], node)
                if isinstance(fit, Fit):
                    self._join(k, fit, depends)
                    return
                refused[self.groups[k].nodes[0].name] = fit.reason
        group = Group((node,), node.loops) if isinstance(node, Nest) else Group(call=node)
        group.refused = refused
        self.groups.append(group)
        self._note(len(self.groups) - 1, node, depends)

    def _dependences(self, node: Node) -> set[int]:
        found = {self._writer[b] for b in node.reads | node.writes if b in self._writer}
        for b in node.writes:
            found.update(self._users.get(b, ()))
        names = [s.arg.name for s in node.symbols]
        if isinstance(node, Opaque):
            names += [h.name for h in leaves((node.args, node.kwargs)) if isinstance(h, Handle)]
            if has_effects(node) and self._effect is not None:
                found.add(self._effect)
        found.update(self._binder[name] for name in names if name in self._binder)
        return found

    def _candidates(self, node: Nest) -> list[int]:
        """Groups sharing a buffer, most shared bytes first."""
        shared: dict[int, float] = {}
        for b in node.reads | node.writes:
            for k in dict.fromkeys(self._users.get(b, [])[-8:]):
                group = self.groups[k]
                if group.call is None and not is_alone(group.members[0]):
                    shared[k] = shared.get(k, 0) + hint_bytes(self.buffers[b])
        return sorted(shared, key=lambda k: (-shared[k], -k))[:6]

    def _fit(self, group: Group, node: Nest) -> Fit | Misfit:
        if len(group.members) >= config.max_fusion_size:
            return Misfit("the group is full")
        fit = align(group.members, group.outer, node)
        if not isinstance(fit, Fit):
            return fit
        lanes = hint_product(v.src[0] for v in fit.outer)
        if lanes < 16 and (_serial(fit.members[-1]) or _serial(group.members[0])):
            return Misfit("too few shared iterations to run in parallel")
        if not any(m.reduce for m in fit.members) and _left_inside(fit) > LONGEST_ROW:
            return Misfit("the loops left to the members are too long to keep their values near")
        return fit

    def _join(self, k: int, fit: Fit, depends: set[int]) -> None:
        group = self.groups[k]
        group.members, group.outer = fit.members, fit.outer
        self._note(k, fit.members[-1], depends - {k})

    def _note(self, k: int, node: Node, depends: set[int]) -> None:
        group = self.groups[k]
        gained = 0
        for d in depends:
            gained |= 1 << d | self.groups[d].ancestors
        group.ancestors |= gained
        if gained:
            for other in self.groups:
                if other.ancestors >> k & 1:
                    other.ancestors |= gained
        for b in node.writes:
            self._writer[b] = k
        for b in node.reads | node.writes:
            self._users.setdefault(b, []).append(k)
        if isinstance(node, Opaque):
            self._binder.update({name: k for name, _ in node.binds})
            self._binder.update({f"{node.name}_r{i}": k for i in range(max(len(node.results), 1))})
            if has_effects(node):
                self._effect = k

    def ordered(self) -> list[Group]:
        """The groups in an order that respects their dependences, near the program's own."""
        done = 0
        result: list[Group] = []
        waiting = list(enumerate(self.groups))
        while waiting:
            rest: list[tuple[int, Group]] = []
            for k, group in waiting:
                if group.ancestors & ~done:
                    rest.append((k, group))
                else:
                    done |= 1 << k
                    result.append(group)
            assert len(rest) < len(waiting), "fusion made a cycle"
            waiting = rest
        return result


def _left_inside(fit: Fit) -> int:
    """Iterations of the longest member inside one point of the shared loops."""
    return max(hint_product(v.src[0] for v in m.loops if v not in fit.outer) for m in fit.members)


def _serial(nest: Nest) -> bool:
    """Whether running the nest's own loops on one thread would hurt. A fold does not mind."""
    return not nest.reduce and work(nest) > 4096


def has_effects(call: Opaque) -> bool:
    """Whether a call must keep its place among others: it checks, draws random numbers, mutates,
    or is code we know nothing of."""
    if not isinstance(call.target, OpOverload) or not call.results or call.mutates:
        return True
    return torch.Tag.nondeterministic_seeded in call.target.tags


def hint(e: Expr) -> int:
    """A likely value of a size: its literal, or the sizes the graph was traced with."""
    return max(ix.likely(e), 0)


def hint_product(sizes: Iterable[Expr]) -> int:
    total = 1
    for size in sizes:
        total *= hint(size)
    return total


def hint_bytes(buffer: Buffer) -> int:
    return hint_product(buffer.size) * buffer.dtype.itemsize


def work(nest: Nest) -> int:
    return hint_product(v.src[0] for v in (*nest.loops, *nest.reduce))
