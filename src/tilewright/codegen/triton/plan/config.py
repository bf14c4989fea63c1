"""One way to run a kernel: the sizes of its blocks, warps, stages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.codegen.triton.plan.tiling import Axis

MOST_WARPS = 32


@dataclass(frozen=True)
class Config:
    """One way to run a kernel; `constants` are its constexpr arguments."""

    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int = 2
    ahead: int = 0  # rounds of a loop whose loads are in flight, where it may run ahead
    persistent: int | None = None  # whether rows are held or walked, of a kernel that does either
    registers: int | None = None  # the most of a thread, where the compiler would take more

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        stages = (("STAGES", self.ahead),) if self.ahead else ()
        either = () if self.persistent is None else (("HELD", self.persistent),)
        return (*self.blocks, *stages, *either)

    @property
    def kwargs(self) -> dict[str, int]:
        return dict(self.constants)

    def covers(self, blocks: Iterable[str]) -> bool:
        """Whether a tile of these blocks has an element for every thread. Of a smaller one several
        threads load an element, and one of them stores it."""
        return math.prod(self.kwargs[b] for b in blocks) >= 32 * self.num_warps


def power(n: float) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, int(-(-n // 1)) - 1).bit_length()


def below(n: int) -> int:
    """The largest power of two that is not larger."""
    return power(n + 1) // 2


def clamp(low: int, n: int, high: int) -> int:
    return max(low, min(n, high))


def round_of(axis: Axis, most: int, least: int) -> int:
    """How much of a row or column a loop takes at once: what divides it, if that is no less than
    `least`, for then no round has a mask."""
    even = (axis.size or 1) & -(axis.size or 1)
    return min(most, even) if even >= least else clamp(8, power(axis.likely), most)
