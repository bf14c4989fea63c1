"""`AttentionProblem`: a call of attention as one frozen value, in names of its own.

Operands are windows on buffers `q`, `k`, `v` and, backward, `do`, `lse`, `delta`; results on `out`,
`lse`, `max`, or `dq`, `dk`, `dv`. Two places that ask for the same have equal problems and one
`key`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tilewright.attention.ranges import Holds, holds
from tilewright.ir import index as ix
from tilewright.ir.attention import Attention
from tilewright.ir.expr import Expr
from tilewright.ir.program import Buffer, Opaque, Program, View
from tilewright.runtime import store
from tilewright.target import Target

FORWARD = ("q", "k", "v")
BACKWARD = ("q", "k", "v", "do", "lse", "delta")


@dataclass(frozen=True)
class AttentionProblem:
    node: Attention
    views: tuple[View, ...]  # of the operands, on buffers named as above
    results: tuple[View, ...]
    buffers: tuple[Buffer, ...]  # all of memory
    target: Target

    @property
    def sizes(self) -> tuple[Expr, Expr, Expr, Expr]:
        """Of batches, query heads, queries, keys."""
        b, h, m, n = (v.src[0] for v in self.node.place)
        return b, h, m, n

    @property
    def hints(self) -> tuple[int, int, int, int]:
        b, h, m, n = (ix.likely(e) for e in self.sizes)
        return b, h, m, n

    @property
    def widths(self) -> tuple[Expr, Expr]:
        """Elements of a query and of a value."""
        return self.views[0].size[-1], self.views[2].size[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.views[0].dtype

    @property
    def is_backward(self) -> bool:
        return self.node.is_backward

    @cached_property
    def memory(self) -> dict[str, Buffer]:
        return {b.name: b for b in self.buffers}

    @property
    def writes(self) -> tuple[str, ...]:
        return (*(v.buffer for v in self.results), *self.node.added)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.buffers if b.name not in self.writes)

    @cached_property
    def holds(self) -> Holds:
        """What is known of the mask over a rectangle."""
        return holds(self.node.mask, self.node.row, self.node.column)

    @property
    def visible(self) -> float:
        """A guess at the part of all scores that is computed."""
        return 0.5 if self.holds.tells or self.node.sparse is not None else 1.0

    @property
    def flops(self) -> float:
        b, h, m, n = self.hints
        d, dv = (ix.likely(e) for e in self.widths)
        products = 3 * d + 2 * dv if self.is_backward else d + dv
        return 2.0 * b * h * m * n * products * self.visible

    @cached_property
    def key(self) -> str:
        return store.key("attention", self.describe())

    def describe(self) -> str:
        parts = [self.target.key, repr(self.node), *map(repr, self.views), *map(repr, self.results)]
        return "\n".join([*parts, *map(repr, self.buffers)])

    def __str__(self) -> str:
        b, h, m, n = self.hints
        d = ix.likely(self.widths[0])
        kind = str(self.dtype).removeprefix("torch.")
        way = "backward" if self.is_backward else "forward"
        return f"attention {way} {b}x{h}x{m}x{n}x{d} {kind}"


def of_call(program: Program, call: Opaque) -> tuple[AttentionProblem, dict[str, str]]:
    """The problem, and the program's buffers by its names."""
    node: Attention = call.target
    names = BACKWARD if node.is_backward else FORWARD
    made = ("dq", "dk", "dv") if node.is_backward else ("out", "lse", "max")
    given = [a for a in call.args if isinstance(a, View)]
    own: dict[str, str] = {}
    views: list[View] = []
    for name, view in zip(names, given, strict=False):
        own[name] = view.buffer
        views.append(replace(view, buffer=name))
    for b, view in zip(node.buffers, given[len(names) :], strict=True):
        own[b.name] = view.buffer
    results: list[View] = []
    for name, buffer in zip(made, call.results, strict=False):
        assert buffer is not None
        own[name] = buffer
        b = program.buffers[buffer]
        results.append(View(name, b.size, b.stride, ix.ZERO, b.dtype))
    buffers = [_renamed(program.buffers[of], name) for name, of in own.items()]
    device = buffers[0].device
    target = Target.host() if device.type == "cpu" else Target.of(device)
    return AttentionProblem(node, tuple(views), tuple(results), tuple(buffers), target), own


def _renamed(b: Buffer, name: str) -> Buffer:
    return replace(b, name=name, kind="temporary")


def at(view: View, *place: Expr) -> Expr:
    """The index of an element: a dimension of one has no step."""
    steps = [ix.ZERO if n is ix.ONE else s for n, s in zip(view.size, view.stride, strict=True)]
    return ix.linearize(place, steps[: len(place)], view.offset)


def symbols(exprs: Sequence[Expr]) -> list[Expr]:
    return sorted(set(exprs), key=lambda e: e.arg.name)
