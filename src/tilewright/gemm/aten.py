"""The library's own products, as eager calls them: always there, and what everybody has to beat."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright import config
from tilewright.gemm.problem import GemmProblem, into, takes_tf32
from tilewright.gemm.provider import Argument, Effort, Kernel, register
from tilewright.gemm.roofline import LAUNCH, loop_time, roofline
from tilewright.ir import index as ix
from tilewright.ir.program import View
from tilewright.runtime import store

ALIGNED = 16  # bytes the matrix units load at once
WORTH = 1 << 30  # operations below which copying costs more than it brings


@dataclass(frozen=True)
class AtenCall:
    """`aten.op.out` over windows of the memory it is given. With `padded` operands are first copied
    into rows of a multiple of so many bytes, with zeros behind: what the library is several times
    faster with than with rows that start anywhere."""

    op: str
    views: tuple[View, ...]  # operands in the order of the op, the result last
    scale: tuple[tuple[str, float], ...]
    names: tuple[str, ...]  # of the arguments
    dtype: torch.dtype | None = None  # of the result, where not the operands'
    padded: bool = False

    @property
    def text(self) -> str:
        name = self.op if self.dtype is None else f"{self.op}_dtype"
        return f"extern_kernels.{name}{' of padded operands' if self.padded else ''}"

    def __call__(self, *args: Any) -> None:
        self.bound(*args)()

    def bound(self, *args: Any) -> Callable[[], Any]:
        """The call on memory that stays where it is. Finding the windows anew each time takes as
        long as a small product."""
        given = dict(zip(self.names, args, strict=True))
        *operands, out = (_window(v, given) for v in self.views)
        if self.padded:
            return functools.partial(_of_padded, self.op, operands, out)
        more = [] if self.dtype is None else [self.dtype]
        op = into(self.op, self.dtype)
        return functools.partial(op, *operands, *more, **dict(self.scale), out=out)


def _of_padded(op: str, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    made = getattr(torch, op)(*_padded(*operands))
    out.copy_(made.narrow(-1, 0, out.shape[-1]))


def _padded(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    unit = ALIGNED // left.element_size()
    k, n = (-size % unit for size in (left.shape[-1], right.shape[-1]))
    pad = torch.nn.functional.pad
    return pad(left, (0, k)), pad(right, (0, n, 0, k))


def _window(view: View, given: dict[str, Any]) -> torch.Tensor:
    known = {name: value for name, value in given.items() if isinstance(value, int)}
    size, stride = ([ix.evaluate(e, known) for e in part] for part in (view.size, view.stride))
    memory: torch.Tensor = given[view.buffer]
    start = memory.storage_offset() + ix.evaluate(view.offset, known)
    return memory.as_strided(size, stride, start)


@dataclass(frozen=True)
class AtenCandidate:
    problem: GemmProblem
    padded: bool = False
    provider: str = "ATEN"
    description: str = ""

    @property
    def name(self) -> str:
        return f"padded_{self.problem.op}" if self.padded else self.problem.op

    @property
    def estimate(self) -> float:
        """Padding reads and writes every operand once more, and the result."""
        p = self.problem
        copied = 2 * (loop_time(list(p.buffers), p.target) + LAUNCH) if self.padded else 0.0
        return roofline(p) + copied

    @property
    def key(self) -> str:
        kind = "padded" if self.padded else "aten"
        return store.key(kind, self.problem.key, torch.__version__, str(takes_tf32()))

    def kernel(self) -> Kernel:
        p = self.problem
        views = [] if p.bias is None else [_natural(p.bias.view)]
        views += [*(o.view for o in p.operands), p.result]
        memory = tuple(dict.fromkeys(v.buffer for v in views))
        arguments: tuple[Argument, ...] = tuple(("ptr", b) for b in memory)
        arguments += tuple(("int", s.arg.name) for s in p.symbols)
        scale = () if p.bias is None else (("alpha", p.alpha), ("beta", p.beta))
        names = tuple(name for _, name in arguments)
        source = AtenCall(p.op, tuple(views), scale, names, p.out_dtype, self.padded)
        return Kernel(f"extern_kernels.{self.name}", source, arguments)


def is_misaligned(problem: GemmProblem) -> bool:
    """Whether rows of operands or result start at addresses the matrix units cannot load from."""
    if problem.op not in ("mm", "bmm") or problem.symbols or not problem.target.is_gpu:
        return False
    if problem.out_dtype is not None:
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
        return "" if problem.op != "mm_plus_mm" else "the library has no mm_plus_mm"

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[AtenCandidate]:
        found = [AtenCandidate(problem)]
        if config.shape_padding and is_misaligned(problem):
            found.append(AtenCandidate(problem, padded=True))
        return found
