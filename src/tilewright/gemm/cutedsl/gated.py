"""A gate, `silu(x @ w1) * (x @ w3)`, as one product: of `quack-kernels` too.

The kernel multiplies by a matrix of twice the columns, in which those of `w1` and `w3` take turns,
and gives the epilogue two neighbours of a row as one element. No such matrix is made: to the card's
tile loads columns in turn are one dimension more, of two, whose stride is the distance of the two
matrices in memory. Which of them comes first there is known when the kernel is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.gemm.cutedsl import quack
from tilewright.gemm.cutedsl.build import Request
from tilewright.gemm.cutedsl.epilogue import SUMS, Epilogue, translated
from tilewright.gemm.cutedsl.quack import Config, QuackCandidate
from tilewright.gemm.cutedsl.types import named
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.provider import Argument
from tilewright.ir import index as ix
from tilewright.ir.program import View
from tilewright.ir.show import number
from tilewright.target import Target

TURN = 32  # columns, of both, that a tile has to be a multiple of
KINDS = ("col", "scalar")  # of operands that are the same for both of a pair


def limits(problem: GemmProblem) -> str:
    """Why the kernel cannot compute a pair of products, or an empty string."""
    p = problem
    reason = quack.of_operands(p)
    if reason:
        return reason
    first, second = rights(p)
    if first.stride != second.stride:
        return "the two right operands have other strides"
    if first.stride[-2] is not ix.ONE:
        return "columns that take turns have to be contiguous along k"
    found = translated(p)
    if isinstance(found, str):
        return found
    if any(b.kind not in KINDS for b in found.operands):
        return "rows and tiles beside a pair of products are not read"
    if any(b.view.dtype.itemsize != 2 or b.view.stride[-1] is not ix.ONE for b in found.results):
        return "results of a pair are rows of sixteen bits an element"
    return quack.of_memory(p, found)


def rights(problem: GemmProblem) -> tuple[View, View]:
    return problem.operands[1].view, problem.operands[3].view


def ahead(problem: GemmProblem) -> int | None:
    """How many elements the second right operand is behind the first, where that is known."""
    first, second = rights(problem)
    if first.buffer != second.buffer:
        return None
    return ix.value_of(ix.sub(second.offset, first.offset))


class Text(quack.Text):
    """`acc` is an element of each product, in the order in which the matrices are in memory."""

    paired = True

    def function(self) -> list[str]:
        e = self.epilogue
        known = ahead(self.problem)
        beside = [b.name for b in e.operands]
        names = ", ".join((SUMS[0], *beside, *(["swapped"] if known is None else [])))
        made = ", ".join(f'"{b.name}": {v}' for b, v in zip(e.results, e.values, strict=True))
        first, second = SUMS
        if known is None:
            take = [f"{first} = tw.where(swapped != 0, pair[1], pair[0])",
                    f"{second} = tw.where(swapped != 0, pair[0], pair[1])"]  # fmt: skip
        else:
            order = (first, second) if known >= 0 else (second, first)
            take = [f"{order[0]}, {order[1]} = pair"]
        lines = (f"pair = {first}", *take, *e.lines, f"return {{{made}}}")
        return [f"def epilogue({names}):", *(f"    {line}" for line in lines)]

    def minted(self, ops: str, kinds: str, manner: str = "") -> list[str]:
        # what the DSL makes vectors of are some functions alone: with others it does not compile
        manner = ", mode='acc_pair', vectorize=False"
        if ahead(self.problem) is None:
            ops += ', "swapped": Scalar("swapped", dtype=cutlass.Int32)'
            kinds += '("swapped", "scalar"), '
        return super().minted(ops.removeprefix(", "), kinds, manner)

    @property
    def given(self) -> tuple[str, ...]:
        return ("swapped=cutlass.Int32(swapped)",) if ahead(self.problem) is None else ()

    def right(self) -> list[str]:
        first, second = rights(self.problem)
        known, size = ahead(self.problem), first.dtype.itemsize
        rows, k = (number(e) for e in reversed(first.size))
        step = self.step(first.stride[-1], first.dtype)
        if known is None:
            kind = named(first.dtype)
            lines = [
                f"one, two = ({quack.start(first)}).toint(), ({quack.start(second)}).toint()",
                "swapped, low, high = two < one, cutlass.min(one, two), cutlass.max(one, two)",
                f"first = cute.make_ptr({kind}, low, cute.AddressSpace.gmem, assumed_align=16)",
                f"apart = cute.assume((high - low) // {size}, divby={16 // size})",
            ]
        else:
            lines = [f"first, apart = {quack.start(first if known >= 0 else second)}, {abs(known)}"]
        layout = f"cute.make_layout(((2, {rows}), {k}), stride=((apart, {step}), 1))"
        return [*lines, f"t_b = cute.make_tensor(first, {layout})"]


@dataclass(frozen=True)
class GatedCandidate(QuackCandidate):
    def requested(self) -> tuple[Request, tuple[Argument, ...]]:
        found = translated(self.problem)
        assert isinstance(found, Epilogue), found
        return Text(self.problem, self.config, found).request()

    @property
    def near(self) -> tuple[str, str] | None:
        if ahead(self.problem) is not None:
            return None
        first, second = rights(self.problem)
        return first.buffer, second.buffer


def configurations(target: Target) -> tuple[Config, ...]:
    return tuple(c for c in quack.configurations(target) if c.n % TURN == 0)


def candidates(problem: GemmProblem) -> Sequence[GatedCandidate]:
    """Best first by the model."""
    every = quack.timed(problem, configurations(problem.target))
    return [GatedCandidate(problem, c, f"cutedsl_quack_gate_{rank}", time)
            for rank, (time, c) in enumerate(every)]  # fmt: skip
