"""From a hand-written `Program` to something callable, without torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from tilewright import pipeline
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, load, var
from tilewright.ir.program import Buffer, BufferKind, Nest, Opaque, Origin, Program, Store, View
from tilewright.ir.verify import verify
from tilewright.schedule.plan import Schedule, schedule

CPU = torch.device("cpu")
NOWHERE = Origin(("test",))


def executable(program: Program, plan: Schedule | None = None) -> Callable[[list[Any]], Any]:
    """Every stage after lowering: verified, scheduled, generated, built, loaded."""
    verify(program)
    plan = plan or schedule(program)
    return pipeline.write(plan).load({}, {})


def size(*numbers: int | Expr) -> tuple[Expr, ...]:
    return tuple(ix.as_index(n) for n in numbers)


class Build:
    """A program written line by line; every tensor is contiguous."""

    def __init__(self) -> None:
        self.program = Program()
        self._count = 0

    def buffer(self, shape: Sequence[int | Expr], dtype: torch.dtype = torch.float32,
               kind: BufferKind = "temporary") -> str:  # fmt: skip
        inputs = self.program.inputs
        name = f"arg{len(inputs)}" if kind == "input" else f"buf{len(self.program.buffers)}"
        dims = size(*shape)
        self.program.buffers[name] = Buffer(name, dtype, CPU, dims, ix.contiguous_strides(dims),
                                            kind)  # fmt: skip
        if kind == "input":
            inputs.append(name)
        return name

    def input(self, *shape: int | Expr, dtype: torch.dtype = torch.float32) -> str:
        return self.buffer(shape, dtype, "input")

    def loops(self, *sizes: int | Expr) -> tuple[Expr, ...]:
        return tuple(var(f"i{k}", ix.as_index(n)) for k, n in enumerate(sizes))

    def at(self, buffer: str, *indices: ix.IndexLike, mask: Expr | None = None) -> Expr:
        b = self.program.buffers[buffer]
        return load(buffer, b.dtype, ix.linearize(indices, b.stride), mask)

    def index(self, buffer: str, *indices: ix.IndexLike) -> Expr:
        return ix.linearize(indices, self.program.buffers[buffer].stride)

    def nest(self, loops: Sequence[Expr], *stores: Store, reduce: Sequence[Expr] = ()) -> Nest:
        self._count += 1
        made = Nest(f"nest{self._count}", tuple(loops), tuple(reduce), stores, NOWHERE)
        self.program.nodes.append(made)
        return made

    def call(self, target: Any, args: tuple[Any, ...], result: str | None) -> Opaque:
        self._count += 1
        made = Opaque(f"call{self._count}", target, args, {}, (result,), (), NOWHERE, aliases=False)
        self.program.nodes.append(made)
        return made

    def view(self, buffer: str) -> View:
        b = self.program.buffers[buffer]
        return View(buffer, b.size, b.stride, const(0), b.dtype)

    def returns(self, *buffers: str) -> Program:
        self.program.outputs = [self.view(b) for b in buffers]
        return self.program
