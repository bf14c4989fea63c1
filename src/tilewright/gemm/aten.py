"""The library's own products, as eager calls them: always there, and what everybody has to beat."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.gemm import padded
from tilewright.gemm.problem import GemmProblem, into, takes_tf32, window
from tilewright.gemm.provider import Argument, Candidate, Effort, Kernel, register
from tilewright.gemm.roofline import roofline
from tilewright.ir import index as ix
from tilewright.ir.program import View
from tilewright.runtime import store


@dataclass(frozen=True)
class AtenCall:
    """`aten.op.out` over windows of the memory it is given."""

    op: str
    views: tuple[View, ...]  # operands in the order of the op, the result last
    scale: tuple[tuple[str, Any], ...]  # and what else is given by name
    names: tuple[str, ...]  # of the arguments
    dtype: torch.dtype | None = None  # of the result, where not the operands'

    @property
    def text(self) -> str:
        name = self.op if self.dtype is None else f"{self.op}_dtype"
        return f"extern_kernels.{name}"

    def __call__(self, *args: Any) -> None:
        self.bound(*args)()

    def bound(self, *args: Any) -> Callable[[], Any]:
        """The call on memory that stays where it is."""
        given = dict(zip(self.names, args, strict=True))
        *operands, out = (window(v, given) for v in self.views)
        more = [] if self.dtype is None else [self.dtype]
        op = into(self.op, self.dtype)
        return functools.partial(op, *operands, *more, **dict(self.scale), out=out)


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
        return store.key("aten", self.problem.key, torch.__version__, str(takes_tf32()))

    def kernel(self) -> Kernel:
        p = self.problem
        views = [] if p.bias is None else [_natural(p.bias.view)]
        views = [*(o.view for o in p.operands), *(o.view for o in p.scales), *views, p.result
                 ] if p.scales else [*views, *(o.view for o in p.operands), p.result]  # fmt: skip
        memory = tuple(dict.fromkeys(v.buffer for v in views))
        arguments: tuple[Argument, ...] = tuple(("ptr", b) for b in memory)
        arguments += tuple(("int", s.arg.name) for s in p.symbols)
        scale = () if p.bias is None else (("alpha", p.alpha), ("beta", p.beta))
        if p.scales:
            scale = (("out_dtype", p.dtype), ("use_fast_accum", p.fast))
        names = tuple(name for _, name in arguments)
        source = AtenCall(p.op, tuple(views), scale, names, p.out_dtype)
        return Kernel(f"extern_kernels.{self.name}", source, arguments)


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
        return "" if problem.op != "mm_plus_mm" else "the library has no mm_plus_mm"

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[Candidate]:
        return [AtenCandidate(problem), *padded.offered(problem)]
