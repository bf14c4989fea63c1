"""Products with a 2:4 sparse left operand: of every four neighbours along k two are stored.

`_sparse_semi_structured_mm(values, metadata, right)` has in `values` half of the columns, and in
`metadata` two bits for each of them: its place among its four. The metadata is in the order that
CUTLASS's kernels read it in. ATen's own kernels are for sm_8x; those of CUTLASS run on later cards
as well, and elsewhere the left operand is written out and multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

from tilewright.gemm.problem import GemmProblem, loops, plain, window
from tilewright.gemm.provider import Argument, Candidate, Effort, Kernel, enabled
from tilewright.gemm.roofline import roofline
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Opaque, Origin, Program, View
from tilewright.runtime import store
from tilewright.target import Target

OP = "_sparse_semi_structured_mm"
CALLS = (f"aten.{OP}.default", "semi_structured.cutlass_mm.default")
# Dtypes of values, with the metadata's, and how many values an element of it is about.
METADATA = {
    torch.float16: (torch.int16, 8),
    torch.bfloat16: (torch.int16, 8),
    torch.int8: (torch.int32, 16),
}
# Of every four the first and the second: what the metadata says while it is timed. Zeros would say
# the first twice, which is no valid metadata.
ORDINARY = {torch.int16: 0x4444, torch.int32: 0x44444444}


@dataclass(frozen=True)
class SparseProblem(GemmProblem):
    """Its operands are values, right and metadata; `k` is that of the right operand."""

    @property
    def positions(self) -> tuple[tuple[Expr, ...], ...]:
        return _positions(self.m, self.n, self.k, self.operands[0].dtype)

    @property
    def out_dtype(self) -> torch.dtype | None:
        return self.dtype  # it is no product that another could be added to

    @property
    def providers(self) -> tuple[Any, ...]:
        return (PROVIDER, *(p for p in enabled() if p.name == "CUTLASS"))

    @property
    def library(self) -> Any:
        return Library(self)

    @property
    def contents(self) -> dict[str, tuple[int, ...]]:
        meta = self.operands[2].view
        return {meta.buffer: (ORDINARY[meta.dtype],)}

    @property
    def views(self) -> tuple[View, ...]:
        return (*(o.view for o in self.operands), self.result)

    @property
    def operator(self) -> Opaque | None:
        values, right, meta, out = self.views
        args = (values, meta, right)
        return Opaque(OP, multiplied, args, {}, (), (), Origin(()), out=out)

    def describe(self) -> str:
        return f"sparse {super().describe()}"


def _positions(m: Expr, n: Expr, k: Expr, dtype: torch.dtype) -> tuple[tuple[Expr, ...], ...]:
    half = ix.floordiv(k, 2)
    return (m, half), (k, n), (m, ix.floordiv(half, METADATA[dtype][1]))


def multiplied(
    values: torch.Tensor, meta: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor
) -> None:
    """The product by ATen where it has a kernel, and of the whole left operand elsewhere."""
    if values.is_cuda and torch.cuda.get_device_capability(values.device)[0] == 8:
        kind = None if out.dtype == right.dtype else out.dtype
        out.copy_(torch._sparse_semi_structured_mm(values, meta, right, out_dtype=kind))
        return
    dense = sparse_semi_structured_to_dense_cutlass(values, meta)
    if dense.dtype == torch.int8:
        exact = dense.double() @ right.double()  # sums of fewer than 2**38 products
        out.copy_(exact.to(torch.int32))
        return
    torch.mm(dense, right, out=out)


# ---- from a call


def is_tuned(call: Opaque) -> bool:
    return str(call.target) in CALLS


def parsed(program: Program, call: Opaque, result: View) -> SparseProblem | str:
    """The problem, in the program's names, or why it is the library's."""
    if not {p.name for p in enabled()} & {"ATEN", "CUTLASS"}:
        return "neither ATEN nor CUTLASS is in max_autotune_gemm_backends"
    found = _operands(call)
    if isinstance(found, str):
        return found
    values, meta, right = found
    target = Target.of(program.buffers[result.buffer].device)
    if not target.is_gpu:
        return "a CPU has no sparse products"
    tensors = (values, right, meta, result)
    if any(ix.value_of(e) is None for t in tensors for e in (*t.size, *t.stride, t.offset)):
        return "a size is known only at run time"
    kind, about = METADATA.get(values.dtype, (None, 0))
    sums = torch.int32 if values.dtype == torch.int8 else values.dtype
    if (meta.dtype, right.dtype, result.dtype) != (kind, values.dtype, sums):
        return f"no kernels for {values.dtype} by {right.dtype} with {meta.dtype}"
    b, m, n, k = loops(ix.ONE, values.size[0], right.size[1], right.size[0])
    stored, rows, columns = values.size[1], *meta.size
    if ix.mul(stored, 2) is not right.size[0] or rows is not values.size[0] or (
        ix.mul(columns, about) is not stored
    ):  # fmt: skip
        return "its metadata is of another matrix"
    if (meta.stride[1], meta.stride[0]) != (ix.ONE, columns):
        return "its metadata is not contiguous"
    places = _positions(m, n, k, values.dtype)
    views = (values, right, meta)
    operands = tuple(plain(v, place) for v, place in zip(views, places, strict=True))
    used = sorted({v.buffer for v in (*views, result)})
    return SparseProblem(
        "_sparse_semi_structured_mm", b, m, n, k, operands, result,
        tuple(program.buffers[name] for name in used), target,
    )  # fmt: skip


def _operands(call: Opaque) -> tuple[View, View, View] | str:
    """Values, metadata and the right operand."""
    if str(call.target) == CALLS[0]:
        found, more = call.args[:3], [v for v in call.kwargs.values() if v is not None]
        values, meta, right = found
        if any(kind not in (values.dtype, torch.int32) for kind in more):
            return "its result has another dtype"
    else:
        right, values, meta, bias, rows, least_rows, least_columns, turned = call.args
        if bias is not None or turned:
            return "it is transposed, or something is added to it"
        if any(ix.mod(n, least) is not ix.ZERO for n, least in
               zip(right.size, (least_rows, least_columns), strict=True)):  # fmt: skip
            return "its right operand is padded first"
        if values.size[0] is not ix.as_index(rows):
            return "its left operand is padded"
    if not all(isinstance(v, View) and len(v.size) == 2 for v in (values, meta, right)):
        return "its arguments are not all matrices in memory"
    return values, meta, right


# ---- the library's


@dataclass(frozen=True)
class Library:
    """What everybody is compared with."""

    problem: SparseProblem
    provider: str = "ATEN"
    description: str = ""

    @property
    def name(self) -> str:
        return OP

    @property
    def estimate(self) -> float:
        return roofline(self.problem)

    @property
    def key(self) -> str:
        return store.key(OP, self.problem.key, torch.__version__)

    def kernel(self) -> Kernel:
        views = self.problem.views
        names = tuple(dict.fromkeys(v.buffer for v in views))
        arguments: tuple[Argument, ...] = tuple(("ptr", name) for name in names)
        return Kernel(f"extern_kernels.{OP}", LibraryCall(views, names), arguments)


@dataclass(frozen=True)
class LibraryCall:
    views: tuple[View, ...]
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"extern_kernels.{OP}"

    def __call__(self, *args: Any) -> None:
        given = dict(zip(self.names, args, strict=True))
        values, right, meta, out = (window(v, given) for v in self.views)
        multiplied(values, meta, right, out=out)


class _Provider:
    name = "ATEN"

    def supports(self, problem: GemmProblem) -> str:
        named = any(p.name == "ATEN" for p in enabled())
        if not problem.is_bare:
            return "the library computes products alone"
        return "" if named else "ATEN is not in max_autotune_gemm_backends"

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[Candidate]:
        assert isinstance(problem, SparseProblem)
        return [Library(problem)]


PROVIDER = _Provider()
