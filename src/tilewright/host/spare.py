"""The last resort for a group of a card: torch's own operations, one after the other.

Slow, and right: it takes the place of a kernel that cannot be written or that Triton does not
compile, so that neither is ever an error of the user's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.gemm.problem import GemmProblem, definition, statistics
from tilewright.ir import interp
from tilewright.ir.program import Buffer, Node, Program
from tilewright.ir.show import show_node
from tilewright.schedule.fusion.group import Group


@dataclass(frozen=True)
class Spare:
    """The nodes of a group, and the buffers and symbols they are called with, in order."""

    nodes: tuple[Node, ...]
    program: Program
    names: tuple[str, ...]
    local: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, group: Group) -> Spare:
        known = {b: program.buffers[b] for b in group.reads | group.writes}
        return cls._made(group.nodes, known, group.local)

    @classmethod
    def product(cls, problem: GemmProblem) -> Spare:
        """The library's product between loops."""
        used = {*problem.reads, *problem.writes}
        known = problem.memory | {b.name: b for _, b in statistics(problem)[0]}
        return cls._made(definition(problem), known, frozenset(known) - used)

    @classmethod
    def _made(cls, nodes: tuple[Node, ...], known: dict[str, Buffer],
              local: frozenset[str]) -> Spare:  # fmt: skip
        symbols = {s.arg.name: s for node in nodes for s in node.symbols}
        names = (*sorted(known.keys() - local), *sorted(symbols))
        part = Program(buffers=known, inputs=list(names), symbols=symbols)
        return cls(nodes, part, names, tuple(sorted(local)))

    @property
    def text(self) -> str:
        return "\n".join(f"# {line}" for n in self.nodes for line in show_node(n).splitlines())

    def __call__(self, *args: Any) -> None:
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        with torch.no_grad(), torch.device(device):
            interp.run_nodes(self.program, self.nodes, args, self.local)
