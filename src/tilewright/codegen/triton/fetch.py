"""Long rows that are walked once: the next block of a row is under way while one is folded.

Where all rows are at work at once their programs begin together, and would wait for memory together
and then compute together. What is fetched first does not wait for what else a program needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright.codegen.triton.configs import folds
from tilewright.codegen.triton.emit import RANDOM
from tilewright.codegen.triton.shape import Axis, Shape, scatters, uses
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, loads

if TYPE_CHECKING:
    from tilewright.codegen.triton.kernel import Kernel

SHORTEST = 8256  # elements of a row, or of a part of one: more than any block
MOST = 2  # rows of which a thread has a second block


def fetching(shape: Shape) -> Shape:
    """The shape with rows that are fetched so, where more is computed of them than that they add up
    (H200: std and mean of 1610 rows of 61992 bfloat16 49.5 us, 53.3 us without; losses of 761 rows
    of 32768 floats 25.7 us, 27.5 us; smoothed ones of 1500 rows of 50257 bfloat16 41.5 us, 45.5 us,
    of 151 rows of 100277 floats in parts 20.0 us, 22.8 us)."""
    if shape.rank != 2 or shape.persistent or shape.across or shape.serial or shape.ragged:
        return shape
    if shape.again or shape.walked or shape.ahead or len(shape.inner) != 1:
        return shape
    if shape.shared and not shape.in_turn:
        return shape
    if any(scatters(m) for m in shape.members) or uses(shape.members, *RANDOM):
        return shape
    if any(s.scans for s, _ in shape.segments) or folds(shape, "argmin", "argmax"):
        return shape
    if not (uses(shape.members, "exp") or folds(shape, "welford")):
        return shape
    long = (shape.inner[0].size or 0) >= SHORTEST * max(shape.shared, 1)
    return replace(shape, fetched=long and 0 < len(_rows(shape.flat())) <= MOST)


def _rows(flat: Shape) -> list[Expr]:
    """What is loaded along rows."""
    (axis,) = flat.inner
    made = frozenset[str]().union(*(m.writes for m in flat.members))
    nodes = dict.fromkeys(n for m in flat.members for n in loads(*m.exprs))
    return [n for n in nodes if n.arg not in made and not n.src[1:]
            and ix.coefficient(n.src[0], axis.var) is ix.ONE]  # fmt: skip


class Fetch:
    """The text of one kernel's rows that are fetched so."""

    def __init__(self, kernel: Kernel, axis: Axis) -> None:
        self.kernel, self.w, self.axis = kernel, kernel.w, axis
        self._names = {node: f"next{k}" for k, node in enumerate(_rows(kernel.shape))}

    def begin(self) -> None:
        """The first block."""
        self._load(self._first)

    def enter(self) -> None:
        """In a round of the loop over whole blocks: the one at hand, and the next."""
        for node, name in self._names.items():
            self.w.know(node, self.w.let(name))
        a, block, count = self.axis.name, self.axis.block, max(self.kernel.shape.shared, 1)
        self._load(f"tl.minimum({a}offset + {count}, {a}full - 1)" if self.kernel.lean
                   else f"tl.minimum({a}offset + {block}, {a}last - {block})")  # fmt: skip

    @property
    def _first(self) -> str:
        if self.kernel.lean is None:
            return f"{self.axis.name}first"
        return f"tl.minimum(part, {self.axis.name}full - 1)" if self.kernel.shape.shared else "0"

    def _load(self, place: str) -> None:
        w, a = self.w, self.axis.name
        everywhere, w.masked = w.masked, w.masked - {self.axis}
        with w.elsewhere(frozenset({self.axis}), {}):
            if self.kernel.lean is not None:
                self.kernel.lean.lanes(place, "")
            else:
                w.line(f"{a}index = {place} + {a}base")
                w.know(self.axis.var, f"{a}index")
            for node, name in self._names.items():
                w.line(f"{name} = {self.kernel.load(node)}")
        w.masked = everywhere
