"""Products with weights of eight bits (`_weight_int8pack_mm`); `tiled_weights` has four.

    result[m, n] = (sum over k of x[m, k] * weights[n, k]) * scales[n]

The sum is multiplied in float32 and rounded once, as by ATen's own kernels. Weights are widened
where they are read, on a CPU by C++ kernels and on a card by Triton templates, which take in what
makes `x` and what follows; ATen's call, which is hard to beat for few rows, is measured beside
them. For sizes known only at run time the call is ATen's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from tilewright.gemm.problem import GemmProblem, Operand, loops, plain, window
from tilewright.gemm.provider import Argument, Candidate, Effort, Kernel, enabled
from tilewright.gemm.roofline import roofline
from tilewright.ir import index as ix
from tilewright.ir.build import cast
from tilewright.ir.expr import load
from tilewright.ir.program import Opaque, Origin, Program, View
from tilewright.runtime import store
from tilewright.target import Target

aten = torch.ops.aten
OP = "_weight_int8pack_mm"
DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))


@dataclass(frozen=True)
class WeightsProblem(GemmProblem):
    """Its operands are `x` and the weights, turned around; its one scale is a row."""

    @property
    def out_dtype(self) -> torch.dtype | None:
        return self.dtype  # it is no product that another could be added to

    @property
    def is_bare(self) -> bool:
        """On a card weights are widened by an expression, of the operator itself."""
        return not self.epilogue and self.operands[0].is_plain

    @cached_property
    def bare(self) -> GemmProblem:
        if self.is_bare:
            return self
        x = plain(self.operands[0].view, self.positions[0])
        made = replace(self, operands=(x, self.operands[1]), epilogue=(), keeps=True,
                       factor=None)  # fmt: skip
        used = {*made.reads, *made.writes}
        return replace(made, buffers=tuple(b for b in self.buffers if b.name in used))

    @property
    def providers(self) -> tuple[Any, ...]:
        ours = "TRITON" if self.target.is_gpu else "CPP"
        return (PROVIDER, *(p for p in enabled() if p.name == ours))

    @property
    def library(self) -> Any:
        return Library(self)

    @property
    def given(self) -> tuple[View | int, ...]:
        """What the operator takes."""
        x, weights = (o.view for o in self.operands)
        turned = replace(weights, size=weights.size[::-1], stride=weights.stride[::-1])
        return x, turned, self.scales[0].view

    @property
    def operator(self) -> Opaque | None:
        call = partial(into, self.op)
        return Opaque(self.op, call, self.given, {}, (), (), Origin(()), out=self.result)


def into(op: str, *given: torch.Tensor | int, out: torch.Tensor) -> None:
    """The library's product, where it is wanted."""
    out.copy_(getattr(aten, op)(*given))


# ---- from a call


def is_tuned(call: Opaque) -> bool:
    return call.target is aten._weight_int8pack_mm.default


def parsed(program: Program, call: Opaque, result: View) -> WeightsProblem | str:
    """The problem, in the program's names, or why it is the library's."""
    target = Target.of(program.buffers[result.buffer].device)
    ours = "TRITON" if target.is_gpu else "CPP"
    if not {p.name for p in enabled()} & {"ATEN", ours}:
        return f"neither ATEN nor {ours} is in max_autotune_gemm_backends"
    tensors = (*call.args, *call.kwargs.values())
    if not all(isinstance(t, View) for t in tensors):
        return "its arguments are not all tensors in memory"
    x, weights, scales = tensors
    if any(ix.value_of(e) is None for t in (*tensors, result) for e in (*t.size, *t.stride)):
        return "a size is known only at run time"
    reason = _refused(x, weights, scales, result)
    if reason:
        return reason
    b, m, n, k = loops(ix.ONE, x.size[0], weights.size[0], x.size[1])
    turned = replace(weights, size=weights.size[::-1], stride=weights.stride[::-1])
    at = ix.add(ix.mul(n, scales.stride[0]), scales.offset)
    right = plain(turned, (k, n))
    if target.is_gpu:  # its matrix units multiply by numbers of one type
        right = Operand(replace(turned, dtype=x.dtype), cast(right.value, x.dtype), is_plain=False)
    scale = Operand(scales, load(scales.buffer, scales.dtype, at))
    used = sorted({t.buffer for t in (*tensors, result)})
    return WeightsProblem(
        OP, b, m, n, k, (plain(x, (m, k)), right), result,
        tuple(program.buffers[name] for name in used), target, scales=(scale,),
    )  # fmt: skip


def _refused(x: View, weights: View, scales: View, result: View) -> str:
    """What the library refuses, which says so when it is called, or what no kernel reads."""
    if [len(t.size) for t in (x, weights, scales)] != [2, 2, 1]:
        return "its operands are not two matrices and a row"
    if x.size[1] is not weights.size[1] or scales.size[0] is not weights.size[0]:
        return "its operands do not fit each other"
    kinds = (weights.dtype, scales.dtype, result.dtype)
    if x.dtype not in DTYPES or kinds != (torch.int8, x.dtype, x.dtype):
        return f"no kernels for {x.dtype} by {weights.dtype} with scales of {scales.dtype}"
    if x.stride[1] is not ix.ONE or not all(map(is_contiguous, (weights, scales))):
        return "its operands are not contiguous"
    return ""


def is_contiguous(view: View) -> bool:
    step = 1
    for size, stride in zip(reversed(view.size), reversed(view.stride), strict=True):
        n, s = ix.value_of(size), ix.value_of(stride)
        if n is None or (n != 1 and s != step):
            return False
        step *= n
    return True


# ---- the library's


@dataclass(frozen=True)
class Library:
    """What everybody has to beat."""

    problem: WeightsProblem
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
        return store.key(self.name, self.problem.key, torch.__version__)

    def kernel(self) -> Kernel:
        p = self.problem
        views = [v for v in (*p.given, p.result) if isinstance(v, View)]
        names = tuple(dict.fromkeys(v.buffer for v in views))
        arguments: tuple[Argument, ...] = tuple(("ptr", name) for name in names)
        call = LibraryCall(self.name, p.given, p.result, names)
        return Kernel(f"extern_kernels.{self.name}", call, arguments)


@dataclass(frozen=True)
class LibraryCall:
    """The operator, which makes its result; it is never put in a program, where the call is
    there already."""

    op: str
    given: tuple[View | int, ...]
    result: View
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"extern_kernels.{self.op}"

    def __call__(self, *args: Any) -> None:
        memory = dict(zip(self.names, args, strict=True))
        given = (window(g, memory) if isinstance(g, View) else g for g in self.given)
        into(self.op, *given, out=window(self.result, memory))


class _Provider:
    name = "ATEN"

    def supports(self, problem: GemmProblem) -> str:
        named = any(p.name == "ATEN" for p in enabled())
        if not problem.is_bare:
            return "the library computes products alone"
        return "" if named else "ATEN is not in max_autotune_gemm_backends"

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[Candidate]:
        assert isinstance(problem, WeightsProblem)
        return [Library(problem)]


PROVIDER = _Provider()

__all__ = ["Library", "WeightsProblem", "is_contiguous", "is_tuned", "parsed"]
