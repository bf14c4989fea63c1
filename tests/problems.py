"""Products as problems, made of tensors that hold their operands and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tilewright.gemm.problem import GemmProblem, Op, loops, plain
from tilewright.gemm.provider import Candidate
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Buffer, Store, View
from tilewright.target import Target


@dataclass(frozen=True)
class Case:
    problem: GemmProblem
    tensors: dict[str, torch.Tensor]  # whole memory, by buffer

    def run(self, candidate: Candidate) -> torch.Tensor:
        """The candidate's result, over poison."""
        memory = self.tensors[self.problem.writes[-1]]
        if memory.is_floating_point() and self.problem.writes[-1] not in self.problem.reads:
            memory.fill_(float("nan"))
        self.bound(candidate)()
        return memory

    def bound(self, candidate: Candidate) -> Callable[[], None]:
        """A launch of a library's candidate."""
        kernel = candidate.kernel()
        source: Any = kernel.source
        return partial(source, *(self.tensors[name] for _, name in kernel.arguments))


def numbers(values: Sequence[int]) -> tuple[Expr, ...]:
    return tuple(ix.as_index(v) for v in values)


def window(name: str, t: torch.Tensor) -> View:
    return View(name, numbers(t.shape), numbers(t.stride()), ix.as_index(t.storage_offset()),
                t.dtype)  # fmt: skip


def whole(t: torch.Tensor) -> torch.Tensor:
    count = t.untyped_storage().nbytes() // t.element_size()
    return t.as_strided((count,), (1,), 0)


def case(op: Op, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
         bias: torch.Tensor | None = None, alpha: float = 1.0, beta: float = 1.0,
         ) -> Case:  # fmt: skip
    batched = a.dim() == 3
    size = (a.shape[0] if batched else 1, a.shape[-2], b.shape[-1], a.shape[-1])
    batch, m, n, k = loops(*numbers(size))
    lead = (batch,) if batched else ()
    left, right = plain(window("a", a), (*lead, m, k)), plain(window("b", b), (*lead, k, n))
    added = None
    if bias is not None:
        added = plain(window("bias", bias.expand(out.shape)), (*lead, m, n))
    given = {"a": a, "b": b, "c": out} | ({} if bias is None else {"bias": bias})
    tensors = {name: whole(t) for name, t in sorted(given.items())}
    buffers = tuple(Buffer(name, t.dtype, t.device, numbers(t.shape), numbers(t.stride()))
                    for name, t in tensors.items())  # fmt: skip
    target = Target("sm_90") if a.device.type == "cpu" else Target.of(a.device)
    problem = GemmProblem(op, batch, m, n, k, (left, right), window("c", out), buffers, target,
                          added, alpha, beta)  # fmt: skip
    return Case(problem, tensors)


def fused(base: Case, value: Callable[[Expr], Expr], out: torch.Tensor,
          **extra: torch.Tensor) -> Case:  # fmt: skip
    """The case with `value` of the product stored to `out`, and memory that `value` reads."""
    p = base.problem
    place = linear(p, out)
    tensors = base.tensors | {"y": whole(out)} | {n: whole(t) for n, t in extra.items()}
    buffers = tuple(Buffer(name, t.dtype, t.device, numbers(t.shape), numbers(t.stride()))
                    for name, t in sorted(tensors.items()))  # fmt: skip
    made = replace(p, buffers=buffers, keeps=False, epilogue=(Store("y", place, value(p.product)),))
    return Case(made, tensors)


def linear(p: GemmProblem, t: torch.Tensor) -> Expr:
    return ix.linearize(p.place, numbers(t.stride()), t.storage_offset())
