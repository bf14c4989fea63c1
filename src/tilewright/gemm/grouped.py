"""Grouped products (`_grouped_mm`), as mixtures of experts have them.

Two kinds. Rows of one matrix in groups, each with a matrix of its own: a row's group is the batch
that its matrix is taken from. And, for the gradient of those matrices, two matrices that are
multiplied in groups along k: one result for each. Where groups end is in the card's memory, and is
read by the kernel, so other offsets are no other kernel; a group may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tilewright import config
from tilewright.gemm.problem import GemmProblem, loops, plain, window
from tilewright.gemm.provider import Argument, Candidate, Effort, Kernel
from tilewright.gemm.roofline import roofline
from tilewright.gemm.triton import TritonProvider
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Opaque, Origin, Program, View
from tilewright.runtime import store
from tilewright.target import Target

aten = torch.ops.aten
DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
MOST_GROUPS = 1024  # that one program looks through for its own
TARGETS: tuple[Any, ...] = (aten._grouped_mm.default,) if hasattr(aten, "_grouped_mm") else ()


@dataclass(frozen=True)
class GroupedProblem(GemmProblem):
    """`batch` is a group; with `along_k` groups are parts of k, otherwise of m."""

    along_k: bool = False

    @property
    def out_dtype(self) -> torch.dtype | None:
        return self.dtype  # it is no product that another could be added to

    @property
    def hints(self) -> tuple[int, int, int, int]:
        """As if all groups had the same size."""
        b, m, n, k = (ix.likely(e) for e in self.sizes)
        return (b, m, n, -(-k // max(1, b))) if self.along_k else (b, -(-m // max(1, b)), n, k)

    @property
    def place(self) -> tuple[Expr, ...]:
        return (self.batch, self.m, self.n) if self.along_k else (self.m, self.n)

    @property
    def is_bare(self) -> bool:
        return not self.epilogue

    @cached_property
    def bare(self) -> GemmProblem:
        return self if self.is_bare else replace(self, epilogue=(), keeps=True)

    @property
    def providers(self) -> tuple[Any, ...]:
        return (PROVIDER,)

    @property
    def library(self) -> Any:
        return Library(self)

    @property
    def views(self) -> tuple[View, ...]:
        assert self.ends is not None
        return (*(o.view for o in self.operands), self.ends.view, self.result)

    @property
    def operator(self) -> Opaque | None:
        *args, out = self.views
        return Opaque("grouped", into, tuple(args), {}, (), (), Origin(()), out=out)

    @property
    def contents(self) -> dict[str, tuple[int, ...]]:
        assert self.ends is not None
        size = ix.likely(self.sizes[3 if self.along_k else 1])
        return {self.ends.view.buffer: ends(size, ix.likely(self.sizes[0]))}

    def __str__(self) -> str:
        b, m, n, k = (ix.likely(e) for e in self.sizes)
        kind = str(self.dtype).removeprefix("torch.")
        of = "k" if self.along_k else "m"
        fused = " + epilogue" if self.epilogue else ""
        return f"_grouped_mm {m}x{n}x{k}, {of} in {b} groups, {kind}{fused}"


def ends(size: int, groups: int) -> tuple[int, ...]:
    """Where groups end while they are timed: about evenly, each at a multiple of 16, since the
    library wants whole pieces of 16 bytes along k."""
    return (*(size * (g + 1) // groups // 16 * 16 for g in range(groups - 1)), size)


def into(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, *, out: torch.Tensor
         ) -> None:  # fmt: skip
    """The library's product, where it is wanted."""
    out.copy_(aten._grouped_mm(left, right, offsets))


# ---- from a call


def is_tuned(call: Opaque) -> bool:
    return call.target in TARGETS


def parsed(program: Program, call: Opaque, result: View) -> GroupedProblem | str:
    """The problem, in the program's names, or why it is the library's."""
    left, right, offsets, *others = (*call.args, *call.kwargs.values())
    target = Target.of(program.buffers[result.buffer].device)
    if not target.is_gpu:
        return "on a CPU the library alone multiplies groups"
    if not all(isinstance(t, View) for t in (left, right, offsets)):
        return "its groups are not in memory"
    if any(o is not None and o != result.dtype for o in others):
        return "it has a bias, or a result of another type"
    if {left.dtype, right.dtype} != {result.dtype} or result.dtype not in DTYPES:
        return f"no template multiplies groups of {left.dtype}"
    count = ix.value_of(offsets.size[0])
    if offsets.dtype != torch.int32 or count is None or not 0 < count <= MOST_GROUPS:
        return f"it has other than 1 to {MOST_GROUPS} groups"
    ranks = len(left.size), len(right.size)
    if ranks not in ((2, 3), (2, 2)):
        return "it is a batch of products, or its columns are in groups"
    along_k = ranks == (2, 2)
    batch, m, n, k = loops(ix.as_index(count), left.size[0], right.size[-1], left.size[1])
    operands = (plain(left, (m, k)), plain(right, (k, n) if along_k else (batch, k, n)))
    used = sorted({left.buffer, right.buffer, offsets.buffer, result.buffer})
    return GroupedProblem(
        "_grouped_mm", batch, m, n, k,
        tuple(replace(o, is_plain=False) for o in operands), result,
        tuple(program.buffers[b] for b in used), target, ends=plain(offsets, (batch,)),
        along_k=along_k,
    )  # fmt: skip


# ---- who computes it


@dataclass(frozen=True)
class Library:
    """ATen's grouped product: what everybody has to beat."""

    problem: GroupedProblem
    provider: str = "ATEN"
    description: str = ""

    @property
    def name(self) -> str:
        return "_grouped_mm"

    @property
    def estimate(self) -> float:
        return roofline(self.problem)

    @property
    def key(self) -> str:
        return store.key("grouped", self.problem.key, torch.__version__)

    def kernel(self, label: str = "") -> Kernel:
        p = self.problem
        names = tuple(dict.fromkeys(v.buffer for v in p.views))
        arguments: tuple[Argument, ...] = tuple(("ptr", name) for name in names)
        arguments += tuple(("int", s.arg.name) for s in p.symbols)
        call = LibraryCall(p.views, tuple(name for _, name in arguments))
        return Kernel("extern_kernels._grouped_mm", call, arguments)


@dataclass(frozen=True)
class LibraryCall:
    """The operator, which makes its result: nothing is copied while it is timed, and it is never
    put in a program, where the call is there already."""

    views: tuple[View, ...]  # left, right, where groups end, and the result
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return "extern_kernels._grouped_mm"

    def __call__(self, *args: Any) -> None:
        given = dict(zip(self.names, args, strict=True))
        left, right, offsets, out = (window(v, given) for v in self.views)
        into(left, right, offsets, out=out)


class _Provider:
    name = "GROUPED"

    def supports(self, problem: GemmProblem) -> str:
        return "" if _named() else "config.max_autotune_gemm_backends names nobody"

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[Candidate]:
        assert isinstance(problem, GroupedProblem)
        found: list[Candidate] = []
        if "ATEN" in _named() and problem.is_bare:
            found.append(Library(problem))
        if "TRITON" in _named():
            found += TritonProvider().candidates(problem, effort)
        return found


def _named() -> set[str]:
    every = config.max_autotune_gemm_backends.split(",")
    return {n.strip().upper() for n in every if n.strip()} & {"ATEN", "TRITON"}


PROVIDER = _Provider()

__all__ = ["GroupedProblem", "Library", "is_tuned", "parsed"]
