"""Products that are several calls: a long sum in parts, and a product of a copied operand.

Decompose-K: the sum over k is cut into parts of equal length, which the library computes as one
batched product into float32; a kernel of ours adds them up and rounds. It is for few rows and
columns and a long k, of which a single product fills a few SMs. Contiguous: the right operand is
copied row by row first, for libraries that are slow on columns.

Either is one candidate, and its time is that of all its calls. Nothing is fused to it: what follows
runs on its result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright import caches, config
from tilewright.gemm.problem import GemmProblem, takes_tf32, window
from tilewright.gemm.provider import Argument, Kernel
from tilewright.gemm.roofline import LAUNCH, bandwidth, roofline
from tilewright.ir import index as ix
from tilewright.ir.program import View
from tilewright.runtime import launch, store, triton_build
from tilewright.runtime.triton_build import TritonConfig, TritonSource

SHORTEST = 128  # elements of k in a part
MOST_PARTS = 256  # where rows or columns are not known
LIKELY_PARTS = (16, 32, 64, 128, 256)  # of a k that is not known
MUCH_LONGER = 16  # times its rows and columns that a product's k is, for its operand to be copied
BLOCK, PARTS = 256, 8  # elements, and parts of each, that one program adds up at once


# ---- which there are


def decomposed_limits(problem: GemmProblem) -> str:
    """Why a sum is not computed in parts, or an empty string."""
    if config.triton.num_decompose_k_splits == 0:
        return "triton.num_decompose_k_splits is 0"
    if problem.op != "mm" or not problem.is_bare or problem.out_dtype is not None:
        return "only plain products are computed in parts"
    if not problem.operands[0].dtype.is_floating_point:
        return "parts are summed in float32"
    if any(s.hint is None for s in (e.arg for e in problem.symbols)):
        return "a size is not known before it runs"
    return too_short(problem)


def too_short(problem: GemmProblem) -> str:
    """Why k is not long enough, or an empty string. What is not known for sure does not count."""
    _, m, n, k = problem.sizes
    least = config.triton.decompose_k_threshold
    if not all(ix.known_le(ix.mul(side, least), k) for side in (m, n)):
        return f"k is not {least} times as long as rows and columns, for all that is known"
    return ""


def splits(problem: GemmProblem) -> list[int]:
    """Into how many parts of equal length; those whose length suits the hardware come first."""
    _, m, n, k = (ix.value_of(e) for e in problem.sizes)
    most = config.triton.num_decompose_k_splits
    if k is None:
        length = problem.sizes[3]
        return [s for s in LIKELY_PARTS if ix.mod(length, s) is ix.ZERO][:most]
    end = MOST_PARTS if m is None or n is None else min(k // max(m, 1), k // max(n, 1))
    found = [s for s in range(2, end + 1) if k % s == 0 and k // s >= SHORTEST]
    found.sort(key=lambda s: _suits(k // s))
    exhaustive = config.max_autotune_gemm_search_space.upper() == "EXHAUSTIVE"
    return found if exhaustive else found[:most]


def _suits(length: int) -> int:
    return 0 if length & (length - 1) == 0 else 1 if length % 32 == 0 else 2


def use_contiguous(problem: GemmProblem) -> bool:
    """Whether copying a right operand that lies in columns may pay: on AMD's cards, for long k."""
    _, m, n, k = problem.hints
    far = k >= MUCH_LONGER * max(m, n)
    return far and problem.target.arch.startswith("gfx")


def contiguous_limits(problem: GemmProblem) -> str:
    """Why the right operand is not copied first, or an empty string."""
    if problem.op not in ("mm", "addmm") or not problem.is_bare or problem.out_dtype is not None:
        return "only plain products are computed of a copy"
    if problem.operands[1].view.stride[-1] is ix.ONE:
        return "the right operand lies in rows already"
    return "" if use_contiguous(problem) else "the library is as fast on columns"


def offered(problem: GemmProblem) -> list[Composed]:
    parts = [] if decomposed_limits(problem) else splits(problem)
    found = [Composed(problem, s) for s in parts]
    return found if contiguous_limits(problem) else [*found, Composed(problem, 0)]


@dataclass(frozen=True)
class Composed:
    """A candidate: so many parts of k, or, with none, the right operand copied."""

    problem: GemmProblem
    parts: int
    provider: str = "TRITON"

    @property
    def name(self) -> str:
        op = self.problem.op
        return f"decompose_k_{op}_{self.parts}_split" if self.parts else f"contiguous_{op}"

    @property
    def description(self) -> str:
        return f"K_SPLIT={self.parts}" if self.parts else ""

    @property
    def estimate(self) -> float:
        """Of all calls: what they leave for each other is written and read."""
        p = self.problem
        _, m, n, k = p.hints
        left = self.parts * m * n * 4 if self.parts else k * n * p.operands[1].dtype.itemsize
        return roofline(p) + 2 * left / bandwidth(p.target) + LAUNCH

    @property
    def key(self) -> str:
        return store.key("composed", self.problem.key, self.name, _TEXT, torch.__version__,
                         str(takes_tf32()))  # fmt: skip

    def kernel(self, label: str = "") -> Kernel:
        p = self.problem
        views = [] if p.bias is None or p.beta == 0 else [p.bias.view]
        views = [*views, *(o.view for o in p.operands), p.result]
        arguments: tuple[Argument, ...] = tuple(("ptr", b) for b in
                                                dict.fromkeys(v.buffer for v in views))  # fmt: skip
        arguments += tuple(("int", s.arg.name) for s in p.symbols)
        names = tuple(name for _, name in arguments)
        if self.parts:
            source = DecomposedCall(self.parts, tuple(views), names, adder(p))
        else:
            source = ContiguousCall(p.op, tuple(views), names, (p.alpha, p.beta))
        return Kernel(self.name, source, arguments)


# ---- what runs


@dataclass(frozen=True)
class DecomposedCall:
    """The library's batched product of parts into float32, and our sum of them."""

    parts: int
    views: tuple[View, ...]  # left, right, result
    names: tuple[str, ...]  # of the arguments
    adder: TritonSource

    @property
    def text(self) -> str:
        first = f"extern_kernels.bmm_dtype of {self.parts} parts into float32"
        return f"decompose_k_mm_{self.parts}_split: {first}, then\n{self.adder.text}"

    def __call__(self, *args: Any) -> None:
        given = dict(zip(self.names, args, strict=True))
        left, right, out = (window(v, given) for v in self.views)
        a, b = left.unflatten(1, (self.parts, -1)).transpose(0, 1), right.unflatten(
            0, (self.parts, -1))  # fmt: skip
        if not out.is_cuda:
            out.copy_(torch.bmm(a.float(), b.float()).sum(0))
            return
        wide = a.dtype == torch.float32
        shares = torch.bmm(a, b) if wide else torch.bmm(a, b, out_dtype=torch.float32)
        kernel = _loaded(self.adder, out.device.index or 0)
        rows, columns = out.shape
        stream = torch.cuda.current_stream(out.device).cuda_stream
        kernel(stream, -(-rows * columns // BLOCK), 1, 1, shares, out, rows, columns,
               out.stride(0), out.stride(1), self.parts)  # fmt: skip


@dataclass(frozen=True)
class ContiguousCall:
    """The library's product of a copy of the right operand."""

    op: str
    views: tuple[View, ...]  # operands in the order of the op, the result last
    names: tuple[str, ...]
    scale: tuple[float, float]

    @property
    def text(self) -> str:
        return f"contiguous_{self.op}: extern_kernels.{self.op} of a copy of the right operand"

    def __call__(self, *args: Any) -> None:
        given = dict(zip(self.names, args, strict=True))
        *added, left, right, out = (window(v, given) for v in self.views)
        rows = right.contiguous()
        alpha, beta = self.scale
        if added:
            torch.addmm(added[0], left, rows, alpha=alpha, beta=beta, out=out)
            return
        torch.mm(left, rows, out=out)
        if alpha != 1:
            out.mul_(alpha)


_TEXT = """\
import triton
import triton.language as tl


@triton.jit
def triton_red_fused_decompose_k(shares, out, rows, columns, step_m, step_n, parts,
                                 BLOCK: tl.constexpr, PARTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = rows.to(tl.int64) * columns
    inside = at < count
    total = tl.full((BLOCK,), 0, tl.float32)
    for first in range(0, parts, PARTS):
        for k in tl.static_range(PARTS):  # under way at once
            part = first + k
            known = tl.full((BLOCK,), part, tl.int32) < parts
            total += tl.load(shares + part * count + at, inside & known, 0)
    place = at // columns * step_m + at % columns * step_n
    tl.store(out + place, total.to(out.dtype.element_ty), inside)
"""
_NAMES: Sequence[str] = ("rows", "columns", "step_m", "step_n", "parts")
_POINTER = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def adder(problem: GemmProblem) -> TritonSource:
    """The kernel that adds up parts and stores them as the result lies."""
    major, minor = problem.target.capability if problem.target.is_gpu else (0, 0)
    kinds = {"step_m": "i64", "step_n": "i64"}
    params = (("shares", "*fp32"), ("out", _POINTER.get(problem.dtype, "*fp32")),
              *((name, kinds.get(name, "i32")) for name in _NAMES))  # fmt: skip
    return TritonSource(
        _TEXT,
        "triton_red_fused_decompose_k",
        params,
        (TritonConfig((("BLOCK", BLOCK), ("PARTS", PARTS)), 4, 1),),
        10 * major + minor,
        problem.target.shared_memory,
        aligned=frozenset(("shares",)),
    )


@functools.cache
def _loaded(source: TritonSource, device: int) -> launch.Launcher:
    return launch.load(source, triton_build.build(source), device)


caches.register(_loaded.cache_clear)
