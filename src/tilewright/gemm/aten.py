"""The library's own products, as eager calls them: always there, and what everybody has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright import config
from tilewright.gemm.problem import GemmProblem, takes_tf32
from tilewright.gemm.provider import Argument, Effort, Kernel, register
from tilewright.gemm.roofline import LAUNCH, loop_time, roofline
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import View
from tilewright.runtime import store

aten = torch.ops.aten

ALIGNED = 16  # bytes the matrix units load at once
WORTH = 1 << 30  # operations below which copying costs more than it brings

_CALLS: dict[str, Any] = {"mm": aten.mm.out, "addmm": aten.addmm.out, "bmm": aten.bmm.out,
                          "baddbmm": aten.baddbmm.out}  # fmt: skip


@dataclass(frozen=True)
class AtenCall:
    """`aten.op.out` over windows of the memory it is given."""

    op: str
    views: tuple[View, ...]  # operands in the order of the op, the result last
    scale: tuple[tuple[str, float], ...]
    names: tuple[str, ...]  # of the arguments

    @property
    def text(self) -> str:
        return f"extern_kernels.{self.op}"

    def __call__(self, *args: Any) -> None:
        given = dict(zip(self.names, args, strict=True))
        *operands, out = (_window(v, given) for v in self.views)
        _CALLS[self.op](*operands, **dict(self.scale), out=out)


def _window(view: View, given: dict[str, Any]) -> torch.Tensor:
    known = {name: value for name, value in given.items() if isinstance(value, int)}
    size, stride = ([_number(e, known) for e in part] for part in (view.size, view.stride))
    return given[view.buffer].as_strided(size, stride, _number(view.offset, known))


def _number(e: Expr, known: dict[str, int]) -> int:
    return ix.evaluate(e, known)


@dataclass(frozen=True)
class AtenCandidate:
    problem: GemmProblem
    provider: str = "ATEN"
    description: str = ""

    @property
    def name(self) -> str:
        return self.problem.op

    @property
    def estimate(self) -> float:
        return roofline(self.problem)

    @property
    def key(self) -> str:
        return store.key("aten", self.problem.key, torch.__version__,
                         str(takes_tf32()))  # fmt: skip

    def kernel(self) -> Kernel:
        p = self.problem
        views = [] if p.bias is None else [_natural(p.bias.view)]
        views += [*(o.view for o in p.operands), p.result]
        memory = tuple(dict.fromkeys(v.buffer for v in views))
        arguments: tuple[Argument, ...] = tuple(("ptr", b) for b in memory)
        arguments += tuple(("int", s.arg.name) for s in p.symbols)
        scale = () if p.bias is None else (("alpha", p.alpha), ("beta", p.beta))
        source = AtenCall(p.op, tuple(views), scale, tuple(name for _, name in arguments))
        return Kernel(f"extern_kernels.{p.op}", source, arguments)


# ---- padded


@dataclass(frozen=True)
class PaddedCall:
    """The library's product of operands copied into rows of a multiple of so many bytes, with zeros
    behind: what it is several times faster with than with rows that start anywhere."""

    op: str
    views: tuple[View, ...]  # left, right, result
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"extern_kernels.{self.op} of padded operands"

    def __call__(self, *args: Any) -> None:
        given = dict(zip(self.names, args, strict=True))
        left, right, out = (_window(v, given) for v in self.views)
        unit = ALIGNED // left.element_size()
        k, n = (-size % unit for size in (left.shape[-1], right.shape[-1]))
        pad = torch.nn.functional.pad
        made = getattr(torch, self.op)(pad(left, (0, k)), pad(right, (0, n, 0, k)))
        out.copy_(made.narrow(-1, 0, right.shape[-1]))


@dataclass(frozen=True)
class PaddedCandidate:
    problem: GemmProblem
    provider: str = "ATEN"
    description: str = ""

    @property
    def name(self) -> str:
        return f"padded_{self.problem.op}"

    @property
    def estimate(self) -> float:
        """Every operand is read and written once more, and so is the result."""
        p = self.problem
        copied = 2 * loop_time(list(p.buffers), p.target)
        return roofline(p) + copied + 2 * LAUNCH

    @property
    def key(self) -> str:
        return store.key("padded", AtenCandidate(self.problem).key)

    def kernel(self) -> Kernel:
        plain = AtenCandidate(self.problem).kernel()
        assert isinstance(plain.source, AtenCall)
        source = PaddedCall(self.problem.op, plain.source.views, plain.source.names)
        return Kernel(f"extern_kernels.padded_{self.problem.op}", source, plain.arguments)


def is_misaligned(problem: GemmProblem) -> bool:
    """Whether rows of operands or result start at addresses the matrix units cannot load from."""
    if problem.op not in ("mm", "bmm") or problem.symbols or not problem.target.is_gpu:
        return False
    _, _, n, k = problem.hints
    unit = ALIGNED // problem.operands[0].dtype.itemsize
    return bool(n % unit or k % unit) and problem.flops >= WORTH


def _natural(bias: View) -> View:
    """A row that is the same for all: a vector, which the library adds in its own epilogue."""
    if all(s is ix.ZERO for s in bias.stride[:-1]):
        return replace(bias, size=bias.size[-1:], stride=bias.stride[-1:])
    return bias


@register
class Aten:
    name = "ATEN"

    def supports(self, problem: GemmProblem) -> str:
        if not problem.is_bare:
            return "the library computes products alone"
        return "" if problem.op in _CALLS else f"the library has no {problem.op}"

    def candidates(self, problem: GemmProblem, effort: Effort
                   ) -> Sequence[AtenCandidate | PaddedCandidate]:  # fmt: skip
        found: list[AtenCandidate | PaddedCandidate] = [AtenCandidate(problem)]
        if config.shape_padding and is_misaligned(problem):
            found.append(PaddedCandidate(problem))
        return found
