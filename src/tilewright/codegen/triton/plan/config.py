"""One way to run a kernel, and what decides on the sizes of its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.codegen.triton.plan.tiling import (
    Axis,
    Shape,
    is_looked_up,
)
from tilewright.ir import index as ix
from tilewright.ir.expr import free_vars, loads, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Program, StoreMode

MOST_WARPS = 32
LONG_ROW = 1 << 14  # elements of a row of which each program has a piece


@dataclass(frozen=True)
class Config:
    """One way to run a kernel; `constants` are its constexpr arguments."""

    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int = 2
    ahead: int = 0  # rounds of a loop whose loads are under way, where it may run ahead
    held: int | None = None  # whether rows are held or walked, of a kernel that does either
    registers: int | None = None  # the most of a thread, where the compiler would take more

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        stages = (("STAGES", self.ahead),) if self.ahead else ()
        return (*self.blocks, *stages, *(() if self.held is None else (("HELD", self.held),)))

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


def vector_of(program: Program, shape: Shape) -> int:
    """Elements in sixteen bytes of the narrowest buffer the kernel walks."""
    return clamp(4, 16 // min(sizes(program, shape), default=4), 8)


def sizes(program: Program, shape: Shape) -> list[int]:
    """The sizes of all that the kernel reads and writes."""
    return [program.buffers[b].dtype.itemsize for m in shape.members for b in m.reads | m.writes]


def floats_of(program: Program, shape: Shape) -> list[int]:
    """The sizes of the numbers that the kernel reads and writes, which are computed as no less than
    sixteen bits."""
    kinds = {program.buffers[b].dtype for m in shape.members for b in m.reads | m.writes}
    return [max(2, kind.itemsize) for kind in kinds if kind.is_floating_point]


def folds(shape: Shape, *kinds: str) -> bool:
    """Whether something of these kinds is folded."""
    return any(n.op == "reduce" and n.arg.kind in kinds
               for m in shape.members for n in walk(*m.exprs))  # fmt: skip


def is_heavy(shape: Shape) -> bool:
    """Whether a special function is among the operations: long code, so few elements a thread."""
    return any(n.op in TABLE and TABLE[n.op].cost >= 60 and n.dtype.is_floating_point
               for m in shape.members for n in walk(*m.exprs))  # fmt: skip


def reads_rows(shape: Shape) -> bool:
    """Whether rows are read that are looked up."""
    x = shape.parallel[-1]
    flat = shape.flat()
    return any(
        ix.coefficient(n.src[0], x.var) is ix.ONE and is_looked_up(n.src[0])
        for m in flat.members
        for n in loads(*m.exprs)
    )


def writes_rows(shape: Shape, mode: StoreMode) -> bool:
    """Whether rows are stored so at places that are looked up."""
    x = shape.parallel[-1]
    return any(s.mode == mode and is_looked_up(s.index)
               and ix.coefficient(s.index, x.var) is ix.ONE
               for m in shape.flat().members for s in m.stores)  # fmt: skip


def in_pairs(shape: Shape) -> bool:
    """Whether rows are folded with others, all of which come again with others, be it that they are
    looked up in one table: they come from the cache, and what threads do to meet is seen."""
    own = {v for a in shape.inner for v in a.loops}
    outer = {v for a in shape.parallel for v in a.loops}
    rows = {n for m in shape.members for n in loads(*m.exprs) if own & free_vars(n.src[0])}
    found = {n.arg for n in rows if is_looked_up(n.src[0])}
    looked_up = [n for n in rows if n.arg in found]
    again = len(looked_up) > len(found) or not found
    stored = any(own & free_vars(s.index) for m in shape.members for s in m.stores)
    return not stored and again and len(rows) > 1 and all(
        n in looked_up or outer - free_vars(n.src[0]) for n in rows)  # fmt: skip


def walked_by(shape: Shape) -> set[str]:
    """What is loaded along rows or columns."""
    inner = {v for a in shape.inner for v in a.loops}
    return {n.arg for m in shape.members for n in loads(*m.exprs) if inner & free_vars(n)}


def given_to(shape: Shape) -> set[str]:
    """What is loaded so, and not made by the kernel itself."""
    return walked_by(shape).difference(*(m.writes for m in shape.members))


def round_of(axis: Axis, most: int, least: int) -> int:
    """How much of a row or column a loop takes at once: what divides it, if that is no less than
    `least`, for then no round has a mask."""
    even = (axis.size or 1) & -(axis.size or 1)
    return min(most, even) if even >= least else clamp(8, power(axis.likely), most)
