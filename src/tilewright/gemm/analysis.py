"""Whether to fuse an epilogue into a product, from what is known without timing the two together.

Before anything is built: the bytes the epilogue reads beside the product say what it costs inside.
Once it is built: spilled registers, and how many blocks an SM still holds. All of it is arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.roofline import buffer_bytes
from tilewright.ir.expr import loads
from tilewright.runtime.triton_build import Built

MOST_SPILLS = 8  # four-byte words of a thread, of a fused kernel; untimed it must have fewer
REGISTERS = 65536  # of an SM
ENOUGH_BLOCKS = 4  # on an SM: fewer before fusing do not matter then
KEPT_BLOCKS = 0.5  # of the blocks without the epilogue
DOMINATES = 2.0  # an epilogue of that many times the product is worth the blocks it costs


@dataclass(frozen=True)
class Resources:
    """Of a built kernel, for each thread; and its warps."""

    registers: int
    spills: int
    warps: int

    @property
    def blocks(self) -> int:
        """That an SM holds at once, by registers alone."""
        return REGISTERS // max(1, self.registers * 32 * self.warps)


def resources(built: Built) -> Resources:
    binary = built.binary
    return Resources(binary.registers, binary.stack // 4, binary.num_warps)


@dataclass(frozen=True)
class Times:
    """In one unit: of the fastest product alone, of the one to be fused, of the epilogue alone."""

    best: float
    own: float
    epilogue: float


def extra_reads(problem: GemmProblem) -> float:
    """What a fused epilogue reads from memory, as a part of the bytes of the product itself."""
    own = buffer_bytes(problem.memory[problem.result.buffer])
    names = {n.arg for s in problem.epilogue for n in loads(*s.exprs)} - {problem.result.buffer}
    return sum(buffer_bytes(problem.memory[name]) for name in names) / max(1, own)


def inside(epilogue: float, extra: float) -> float:
    """What the epilogue costs inside the product: it no longer reads that back."""
    return epilogue * extra / (1 + extra)


def not_worth_building(times: Times, extra: float) -> str:
    """Why the product with its epilogue cannot be the fastest, or an empty string."""
    apart, fused = times.best + times.epilogue, times.own + inside(times.epilogue, extra)
    if times.own <= times.best or apart > fused:
        return ""
    return f"fused it is estimated at {fused:.4g}, and {apart:.4g} apart"


def spilled(fused: Resources, most: int = MOST_SPILLS) -> str:
    if fused.spills > most:
        return f"with its epilogue it spills {fused.spills} registers"
    return ""


def not_worth_running(alone: Resources, fused: Resources, times: Times) -> str:
    """Why the built product with its epilogue is not taken, or an empty string."""
    reason = spilled(fused, MOST_SPILLS - 1)
    if reason:
        return reason
    before, after = alone.blocks, fused.blocks
    dominates = times.epilogue > DOMINATES * times.best and after > 1
    if after >= ENOUGH_BLOCKS or after > KEPT_BLOCKS * before or dominates:
        return ""
    return f"with its epilogue {after} blocks fit on an SM, and {before} without"
