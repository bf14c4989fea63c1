"""What becomes of a group: a kernel's text, and all that a launcher needs to know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tilewright.codegen.triton.plan.config import Config
from tilewright.codegen.triton.plan.cost import Estimate
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr


@dataclass(frozen=True)
class Param:
    """One argument of a kernel, in order. `type` is what Triton calls it in a signature."""

    kind: Literal["ptr", "int", "float"]
    name: str  # a buffer, or a symbol
    type: str
    argument: str  # its name in the text
    multiple: int = 1  # expected of a buffer's address: to be checked at the call
    hint: int | None = None  # a likely value of a number
    high: int = 0  # of a buffer of positions: likely how many places there are
    meets: str = ""  # how stores to a buffer combine that may meet, where their order matters


@dataclass(frozen=True)
class Summary:
    """The plan a kernel was written from, in words."""

    strategy: str
    tiling: tuple[str, ...]  # of each axis
    residency: str
    cooperation: str
    access: str
    config: str
    declined: tuple[tuple[str, str], ...]  # strategies that were asked before, and why not
    predicted: Estimate | None = None  # how long it takes, where the bytes it moves are known


@dataclass(frozen=True)
class TritonKernel:
    """A kernel's text and all a launcher needs to know.

    It takes `params`, then the address of an int64 error flag if `checked`, then the block sizes
    of a configuration as constexpr arguments. It runs on a one-dimensional grid: the product, over
    `grid`, of each extent divided by its block, rounded up, and as many programs more as the grids
    `beside` say. `assume` are numbers that must be below 2**31 at the call, or the kernel made with
    `wide=True` has to be used.
    """

    text: str
    name: str
    params: tuple[Param, ...]
    grid: tuple[tuple[Expr, str], ...]
    config: Config
    configs: tuple[Config, ...]
    checked: bool
    assume: tuple[Expr, ...] = ()
    early: bool = False  # may be started before the kernel before it has ended
    joins: bool = False  # products and sums may be rounded as one
    workspace: int = 0  # float32 elements
    counters: int = 0  # int32 elements, zero before and after; its programs wait for each other
    ticketed: bool = False  # in the order they begin; else all of them have to run at once
    beside: tuple[tuple[tuple[Expr, str], ...], ...] = ()
    plan: Summary | None = None

    def programs(self, sizes: dict[str, int], config: Config | None = None) -> int:
        """How many programs run, with these values of the symbols."""
        blocks = (config or self.config).kwargs
        grids = (self.grid, *self.beside)
        return sum(math.prod(-(-ix.evaluate(extent, sizes) // int(blocks.get(b, b)))
                             for extent, b in grid) for grid in grids)  # fmt: skip

    @property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """Names in the text and types of what it is launched with, the error flag included."""
        flag = (("err", "*i64"),) if self.checked else ()
        return (*((p.argument, p.type) for p in self.params), *flag)
