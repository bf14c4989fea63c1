"""Long rows that are walked: the next block of a row is in flight while one is computed.

Where all rows are at work at once their programs begin together, and would wait for memory together
and then compute together. What is fetched first does not wait for what else a program needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel


def prefetched_rows(facts: KernelFacts) -> Shape | str:
    """The shape with rows that are fetched so, where more is computed of them than that they add
    up (H200: std and mean of 1610 rows of 61992 bfloat16 49.5 us, 53.3 us without; losses of 761
    rows of 32768 floats 25.7 us, 27.5 us; smoothed ones of 1500 rows of 50257 bfloat16 41.5 us,
    45.5 us, of 151 rows of 100277 floats in parts 20.0 us, 22.8 us). Of rows that are walked
    again, those of sixteen bits that are misaligned, and their exponentials (log softmax of 8192
    rows of 50257 bfloat16 420 us, 448 us; softmax of 2000 rows of 90001 225 us, 231 us; but of
    6000 rows of 45000 284 us, 276 us; int8 of 2000 rows of 76001 210 us, 147 us)."""
    shape = facts.shape
    if reason := facts.not_rows or facts.not_plain or facts.finds_places or facts.draws:
        return reason
    if shape.persistent:
        return "rows fit in registers"
    if shape.pipelined:
        return "the compiler pipelines its loads"
    if shape.row_programs and (shape.reread or not shape.ticketed):
        return "programs of a row wait for each other"
    if not ("exp" in facts.shape.ops or "welford" in facts.shape.reductions):
        return "it only adds up: loads are waited for anyway"
    shortest = (
        rules.PREFETCHED_AGAIN.limit
        if shape.reread
        else rules.PREFETCHED_ROW.limit * max(shape.row_programs, 1)
    )
    if facts.length < shortest:
        return f"rows have fewer than {shortest} elements"
    if shape.reread and not _is_odd_walk(facts):
        return "rows are read again, and are not many misaligned ones of sixteen bits"
    if not 0 < len(_rows(facts.flat)) <= rules.PREFETCHED_TENSORS.limit:
        return f"not one to {rules.PREFETCHED_TENSORS.limit} tensors are read along rows"
    return replace(shape, prefetched=True)


def _is_odd_walk(facts: KernelFacts) -> bool:
    """Whether many odd rows of sixteen bits are walked again, and nothing wider is stored."""
    shape, group, buffers = facts.shape, facts.group, facts.program.buffers
    read = [n.dtype.itemsize for n in _rows(facts.flat)]
    stored = {buffers[b].dtype.itemsize for s, axis in shape.segments if axis is not None
              for m in s.members if not m.reduce for b in m.writes - group.local}  # fmt: skip
    return (shape.inner[0].start is not None and read == [2] and stored <= {1, 2}
            and facts.rows >= rules.PREFETCHED_PER_SM.limit * facts.target.sms
            and "welford" not in facts.shape.reductions)  # fmt: skip


def _rows(flat: Shape) -> list[Expr]:
    """What is loaded along rows."""
    (axis,) = flat.inner
    made = flat.written
    nodes = dict.fromkeys(flat.loads)
    return [n for n in nodes if n.arg not in made and not n.src[1:]
            and ix.coefficient(n.src[0], axis.var) is ix.ONE]  # fmt: skip


class Prefetch:
    """The text of one kernel's rows that are fetched so."""

    def __init__(self, kernel: Kernel, axis: Axis) -> None:
        self.kernel, self.w, self.axis = kernel, kernel.w, axis
        self._names = {node: f"next{k}" for k, node in enumerate(_rows(kernel.shape))}

    def begin(self) -> None:
        """The first block of a kernel, before all else."""
        if self.kernel.peeled is None:
            self._load(f"{self.axis.name}first")
        else:
            part = f"tl.minimum(part, {self.axis.name}full - 1)"
            self._load(part if self.kernel.shape.row_programs else "0")

    def begin_back(self) -> None:
        """The first block of a loop that runs back."""
        self._load(f"({self.axis.name}full - 1)")

    def enter(self, back: bool = False) -> None:
        """In a round of the loop over whole blocks: the one at hand, and the next."""
        for node, name in self._names.items():
            self.w.know(node, self.w.let(name))
        a, block, count = self.axis.name, self.axis.block, max(self.kernel.shape.row_programs, 1)
        if self.kernel.peeled is None:
            self._load(f"tl.minimum({a}offset + {block}, {a}last - {block})")
        elif back:
            self._load(f"tl.maximum({a}full - 2 - {a}offset, 0)")
        else:
            self._load(f"tl.minimum({a}offset + {count}, {a}full - 1)")

    def _load(self, place: str) -> None:
        w, a = self.w, self.axis.name
        everywhere, w.masked = w.masked, w.masked - {self.axis}
        with w.elsewhere(frozenset({self.axis}), {}):
            if self.kernel.peeled is not None:
                self.kernel.peeled.lanes(place, "")
            else:
                w.line(f"{a}index = {place} + {a}base")
                w.know(self.axis.var, f"{a}index")
            for node, name in self._names.items():
                w.line(f"{name} = {self.kernel.load(node)}")
        w.masked = everywhere
