"""The last resort for a group of a card: torch's own operations, one after the other.

Slow, and right: it takes the place of a kernel that cannot be written or that Triton does not
compile, so that neither is ever an error of the user's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ir import interp
from tilewright.ir.program import Nest, Program
from tilewright.ir.show import show_nest
from tilewright.schedule.group import Group


@dataclass(frozen=True)
class Spare:
    """The nests of a group, and the buffers and symbols they are called with, in order."""

    nests: tuple[Nest, ...]
    program: Program
    names: tuple[str, ...]
    local: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, group: Group) -> Spare:
        memory = sorted((group.reads | group.writes) - group.local)
        symbols = {s.arg.name: s for m in group.members for s in m.symbols}
        names = (*memory, *sorted(symbols))
        known = {b: program.buffers[b] for b in group.reads | group.writes}
        part = Program(buffers=known, inputs=list(names), symbols=symbols)
        return cls(group.members, part, names, tuple(sorted(group.local)))

    @property
    def text(self) -> str:
        return "\n".join(f"# {line}" for n in self.nests for line in show_nest(n).splitlines())

    def __call__(self, *args: Any) -> None:
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        with torch.device(device):
            interp.run_nests(self.program, self.nests, args, self.local)
