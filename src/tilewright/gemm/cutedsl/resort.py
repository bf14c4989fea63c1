"""What a kernel computes, by torch's own operations: its reference, and what runs where memory is
not as the kernel assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.gemm.problem import GemmProblem
from tilewright.ir import interp
from tilewright.ir.program import Node, Program
from tilewright.ir.show import show_node


@dataclass(frozen=True)
class Resort:
    """Nodes of the IR, and the buffers and symbols they are called with, in order."""

    nodes: tuple[Node, ...]
    program: Program
    names: tuple[str, ...]
    local: tuple[str, ...]
    order: tuple[str, ...] = ()  # of the arguments of a call, where not that of the names

    @classmethod
    def of(cls, problem: GemmProblem, nodes: tuple[Node, ...]) -> Resort:
        local = frozenset(problem.memory) - {*problem.reads, *problem.writes}
        symbols = {s.arg.name: s for node in nodes for s in node.symbols}
        names = (*sorted(problem.memory.keys() - local), *sorted(symbols))
        part = Program(buffers=problem.memory, inputs=list(names), symbols=symbols)
        return cls(nodes, part, names, tuple(sorted(local)))

    def over(self, order: Sequence[str]) -> Resort | None:
        """Called with arguments in another order; None where one would be missing."""
        return replace(self, order=tuple(order)) if set(self.names) <= set(order) else None

    @property
    def text(self) -> str:
        return "\n".join(f"# {line}" for n in self.nodes for line in show_node(n).splitlines())

    def __call__(self, *args: Any) -> None:
        if self.order:
            given = dict(zip(self.order, args, strict=True))
            args = tuple(given[name] for name in self.names)
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        with torch.no_grad(), torch.device(device):
            interp.run_nodes(self.program, self.nodes, args, self.local)
