"""The plan of a kernel: what strategies decide, frozen, and what of it a reader wants to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from tilewright.codegen.triton.launch import Summary, TritonKernel
from tilewright.codegen.triton.plan.config import Config
from tilewright.codegen.triton.plan.cost import estimate
from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.target import Target

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel


class Declined(NamedTuple):
    """A strategy that does not suit a kernel."""

    strategy: str
    reason: str


@dataclass(frozen=True)
class KernelPlan:
    """How one kernel will be written: its tiling and modes, the configurations it may run in, best
    first, and `emit(name)`, which writes it."""

    shape: Shape
    configs: tuple[Config, ...]
    emit: Callable[[str], TritonKernel]
    strategy: str = ""
    declined: tuple[Declined, ...] = ()

    @classmethod
    def of(cls, kernel: Kernel) -> KernelPlan:
        return cls(kernel.shape, kernel.configs, kernel.generate)

    def write(self, name: str) -> TritonKernel:
        return replace(self.emit(name), plan=self.summary)

    @property
    def summary(self) -> Summary:
        shape, config = self.shape, self.configs[0]
        return Summary(
            self.strategy,
            tuple(_tiling(shape, axis, config) for axis in shape.axes),
            residency(shape),
            cooperation(shape),
            access(shape),
            _launched(config, len(self.configs)),
            tuple(self.declined),
        )

    def predicted(self, target: Target, moved: int) -> Summary:
        """With how long it takes on a card where it moves so many bytes."""
        found = estimate(self.shape, self.configs[0], target, moved)
        return replace(self.summary, predicted=found)


def residency(shape: Shape) -> str:
    """Where a program has a row or column from its first use to its last."""
    if not shape.inner:
        return "each element once"
    what = "columns" if shape.across else "rows"
    if shape.short:
        return f"{what} in registers, in tiles of {shape.chunk}, several by a warp"
    if shape.chunk:
        return f"{what} in registers, in chunks of {shape.chunk}, as they are in memory"
    if shape.persistent:
        return f"{what} in registers, in one block"
    if shape.preloaded:
        return f"all chunks of {shape.preloaded} of {what} are loaded before one is scanned"
    if shape.unrolled:
        return f"{what} unrolled, an element at a time"
    prefetched = shape.prefetched_scan or shape.prefetched
    return f"loop over blocks of {what}" + (", the next block prefetched" if prefetched else "")


def cooperation(shape: Shape) -> str:
    """Which programs have a row or column."""
    if not shape.row_programs:
        return "one program"
    waits = "the last one finishes it" if shape.ticketed and not shape.reread else "they meet"
    return f"{shape.row_programs} programs; {waits}"


def access(shape: Shape) -> str:
    """How what runs along memory is moved."""
    if shape.packed:
        return "several rows as one piece, transposed through shared memory"
    if shape.staged:
        return f"whole misaligned rows of {shape.staged}, shifted in shared memory"
    pieces = {a.vector: a for a in shape.axes if a.start is not None}
    if pieces:
        piece, axis = max(pieces.items())
        if axis.slack and piece == 2:
            return "misaligned rows, two elements at once"
        if axis.slack:
            return f"misaligned rows peeled: {piece} elements at once, head and tail beside"
        if piece > 16:
            return f"the first {piece} elements of a row, then the remainder"
    if shape.misaligned:
        return "misaligned rows, element by element"
    return "direct"


def _tiling(shape: Shape, axis: Axis, config: Config) -> str:
    extent = str(axis.size) if axis.size is not None else f"likely {axis.likely}"
    block = config.kwargs.get(axis.block)
    role = "reduced" if axis in shape.inner else "parallel"
    return f"{axis.name} {extent} {role}" + (f" in blocks of {block}" if block else "")


def _launched(config: Config, count: int) -> str:
    found = " ".join(f"{name}={value}" for name, value in config.constants)
    found += f", {config.num_warps} warps"
    found += f", at most {config.registers} registers" if config.registers else ""
    return found + (f"; {count - 1} more may be measured" if count > 1 else "")
