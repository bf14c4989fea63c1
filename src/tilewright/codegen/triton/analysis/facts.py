"""What strategies ask of a group: one analysis, made once for a kernel that is to be planned."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewright.codegen.triton.analysis.operations import PLACES, scatters, sorts
from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.codegen.triton.tile.lower import RANDOM
from tilewright.ir.program import Program
from tilewright.schedule.fusion.group import Group
from tilewright.target import Target


@dataclass(frozen=True)
class KernelFacts:
    """A group, its loops as axes of a tile, and what its operations are like.

    Questions that several strategies have are answered by a reason: why the kernel is none of
    those that are asked for, or an empty string.
    """

    program: Program
    group: Group
    shape: Shape
    target: Target
    wide: bool = False  # 64-bit indices are asked for

    @cached_property
    def flat(self) -> Shape:
        return self.shape.flat()

    @property
    def row(self) -> Axis:
        """The axis along which the kernel reduces or scans, where it has one."""
        return self.shape.inner[0]

    @property
    def length(self) -> int:
        """Elements along it; 0 where that is only known at the call."""
        return self.row.size or 0

    @property
    def rows(self) -> int:
        """Likely how many rows or columns there are."""
        return self.shape.parallel[0].likely

    @cached_property
    def loops(self) -> int:
        """How many segments run along rows or columns."""
        return sum(axis is not None for _, axis in self.shape.segments)

    # ---- reasons

    @cached_property
    def not_pointwise(self) -> str:
        if self.shape.family != "poi":
            return "it reduces or scans"
        return self._irregular

    @cached_property
    def not_rows(self) -> str:
        """Why these are not rows, along which memory runs."""
        if self.shape.across:
            return "memory runs across what is reduced: these are columns"
        return self._not_one_axis

    @cached_property
    def not_columns(self) -> str:
        """Why these are not columns, across which memory runs."""
        if not self.shape.across:
            return "memory does not run across what is reduced"
        return self._not_one_axis

    @cached_property
    def not_plain(self) -> str:
        """Why results are not plainly stored reductions of floats or integers."""
        if self.shape.scans:
            return "it scans"
        return self.scatters

    @cached_property
    def scatters(self) -> str:
        if any(map(scatters, self.shape.members)):
            return "stores may meet at one place or be masked"
        return ""

    @cached_property
    def finds_places(self) -> str:
        return "the place of an extreme is looked for" if self.shape.reductions & PLACES else ""

    @cached_property
    def draws(self) -> str:
        return "random numbers are drawn" if self.shape.ops & set(RANDOM) else ""

    @cached_property
    def sorts(self) -> str:
        return "rows are sorted" if sorts(self.shape.members) else ""

    @cached_property
    def _irregular(self) -> str:
        if self.shape.serial:
            return "loops run one after the other around it"
        if self.shape.ragged:
            return "the last chunk of a loop is shorter"
        return ""

    @cached_property
    def _not_one_axis(self) -> str:
        if self.shape.rank != 2 or not self.shape.inner:
            return "nothing is reduced or scanned along an axis of its own"
        if len(self.shape.inner) > 1:
            return "it has several axes to reduce or scan along"
        return self._irregular
