"""A product whose rows start anywhere, by way of copies whose rows do not.

The matrix units load sixteen bytes at once, from multiples of sixteen. With an odd row length the
library falls back to kernels that are several times slower (bfloat16, 2049x2051x2047 on an H200:
164 us; 26 us once operands and result are padded). Both operands are copied by one launch of a
Triton kernel, zeros behind what is summed over; the library multiplies the copies; one more launch
copies the result to where it belongs.
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
from tilewright.gemm.roofline import LAUNCH, loop_time, roofline
from tilewright.ir import index as ix
from tilewright.ir.program import View
from tilewright.runtime import launch, store, triton_build
from tilewright.runtime.triton_build import TritonConfig, TritonSource

ALIGNED = 16  # bytes the matrix units load at once
UNIT = 16  # elements that rows of copies are a multiple of: then they are stored sixteen bytes each
WORTH = 1 << 30  # operations below which copying costs more than it brings
ROWS, COLUMNS = 2, 1024  # that one program copies; of nine sizes the best there, 8.8 and 6.1 us


def is_misaligned(problem: GemmProblem) -> bool:
    """Whether rows of operands or result start at addresses the matrix units cannot load from."""
    if problem.op not in ("mm", "bmm") or problem.symbols or not problem.target.is_gpu:
        return False
    views = (*(o.view for o in problem.operands), problem.result)
    if problem.out_dtype is not None or not all(o.is_plain for o in problem.operands):
        return False
    if problem.result.stride[-1] is not ix.ONE or not all(ix.ONE in v.stride[-2:] for v in views):
        return False
    _, _, n, k = problem.hints
    unit = ALIGNED // problem.operands[0].dtype.itemsize
    return bool(n % unit or k % unit) and problem.flops >= WORTH


def offered(problem: GemmProblem) -> list[PaddedCandidate]:
    wanted = config.shape_padding and is_misaligned(problem)
    return [PaddedCandidate(problem)] if wanted else []


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
        """Operands and result are read and written once more, from cache or into it."""
        p = self.problem
        return roofline(p) + loop_time(list(p.buffers), p.target) + LAUNCH

    @property
    def key(self) -> str:
        text = _text(2), repr((ROWS, COLUMNS))
        return store.key("padded", self.problem.key, *text, torch.__version__, str(takes_tf32()))

    def kernel(self) -> Kernel:
        p = self.problem
        views = (*(o.view for o in p.operands), p.result)
        memory = tuple(dict.fromkeys(v.buffer for v in views))
        arguments: tuple[Argument, ...] = tuple(("ptr", b) for b in memory)
        major, minor = p.target.capability if p.target.is_gpu else (0, 0)
        source = PaddedCall(p.op, views, memory, 10 * major + minor, p.target.shared_memory)
        return Kernel(f"extern_kernels.{self.name}", source, arguments)


@dataclass(frozen=True)
class PaddedCall:
    """`aten.op` over padded copies of windows of the memory it is given."""

    op: str
    views: tuple[View, ...]  # left, right, result
    names: tuple[str, ...]  # of the arguments
    capability: int
    shared_memory: int

    @property
    def text(self) -> str:
        return f"extern_kernels.{self.op} of padded operands"

    def __call__(self, *args: torch.Tensor) -> None:
        given = dict(zip(self.names, args, strict=True))
        left, right, out = (window(v, given) for v in self.views)
        # a matrix that is contiguous down its columns is copied as its transpose
        down = left.stride(-1) != 1
        m, n, k = left.shape[-2], right.shape[-1], left.shape[-1]
        wide_n, wide_k = _up(n, out), _up(k, out)
        a = _room(left, _up(m, out) if down else m, wide_k, down)
        b = _room(right, wide_k, wide_n, right.stride(-1) != 1)
        pairs = [(x, room) for x, room in ((left, a), (right, b)) if x is not room]
        self._copy(pairs, into=True)
        if wide_n == n and a.shape[-2] == m and _is_aligned(out):
            getattr(torch, self.op)(a, b, out=out)
            return
        made = getattr(torch, self.op)(a, b)
        self._copy([(made, out)], into=False)

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], into: bool) -> None:
        """Each into a window of another size: what is not there is zero, what has no place is left
        out. The padded side is what is copied into, or from."""
        if not pairs:
            return
        first = pairs[0][0]
        if not first.is_cuda:
            for source, target in pairs:
                rows, columns = map(min, source.shape[-2:], target.shape[-2:])
                target.zero_()[..., :rows, :columns].copy_(source[..., :rows, :columns])
            return
        source = copier(len(pairs), first.element_size(), into, self.capability,
                        self.shared_memory)  # fmt: skip
        kernel = _loaded(source, first.device.index or 0)
        given: list[Any] = []
        programs = 0
        for source, target in pairs:
            numbers, blocks = _numbers(source, target)
            given += [source, target, *numbers, blocks]
            programs += blocks
        kernel(torch.cuda.current_stream(first.device).cuda_stream, programs, 1, 1, *given)


def _up(size: int, like: torch.Tensor) -> int:
    return size if size * like.element_size() % ALIGNED == 0 else -(-size // UNIT) * UNIT


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether every row, or every column, starts where the matrix units can load."""
    steps = [s for s in x.stride() if s != 1]
    return all(at % ALIGNED == 0 for at in (x.data_ptr(), *(s * x.element_size() for s in steps)))


def _room(like: torch.Tensor, rows: int, columns: int, down: bool) -> torch.Tensor:
    """Memory for the matrix with so many rows and columns; itself, where it will do."""
    if (rows, columns) == tuple(like.shape[-2:]) and _is_aligned(like):
        return like
    lead = like.shape[:-2]
    if down:
        return like.new_empty(*lead, columns, rows).transpose(-1, -2)
    return like.new_empty(*lead, rows, columns)


def _numbers(source: torch.Tensor, target: torch.Tensor) -> tuple[list[int], int]:
    """What the kernel is told of a copy, and how many programs make it."""
    if target.stride(-1) != 1:
        source, target = source.transpose(-1, -2), target.transpose(-1, -2)
    batch = source.shape[0] if source.dim() == 3 else 1
    leaps = (source.stride(0), target.stride(0)) if source.dim() == 3 else (0, 0)
    (rows, columns), (high, wide) = source.shape[-2:], target.shape[-2:]
    numbers = [rows, columns, high, wide, source.stride(-2), target.stride(-2), *leaps]
    return numbers, batch * -(-high // ROWS) * -(-wide // COLUMNS)


# ---- the kernel

_HEAD = """\
import triton
import triton.language as tl


@triton.jit
def copied({params}, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
"""
_ONE = """\
    if (program >= 0) & (program < blocks{i}):
        across{i} = (wide{i} + COLUMNS - 1) // COLUMNS
        down{i} = (high{i} + ROWS - 1) // ROWS
        block{i} = program // across{i}
        batch{i} = (block{i} // down{i}).to(tl.int64)
        row{i} = (block{i} % down{i}) * ROWS + tl.arange(0, ROWS)[:, None]
        column{i} = (program % across{i}) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        from{i} = batch{i} * source_leap{i} + row{i}.to(tl.int64) * source_step{i} + column{i}
        to{i} = batch{i} * target_leap{i} + row{i}.to(tl.int64) * target_step{i} + column{i}
        value{i} = tl.load(source{i} + from{i}, (row{i} < rows{i}) & (column{i} < columns{i}), 0)
        tl.store(target{i} + to{i}, value{i}, (row{i} < high{i}) & (column{i} < wide{i}))
    program -= blocks{i}
"""
_NUMBERS: tuple[str, ...] = (
    "rows", "columns", "high", "wide", "source_step", "target_step", "source_leap", "target_leap",
    "blocks",
)  # fmt: skip


@functools.cache
def _text(count: int) -> str:
    """Of the kernel that makes so many copies in one launch."""
    names = [f"{name}{i}" for i in range(count) for name in ("source", "target", *_NUMBERS)]
    return _HEAD.format(params=", ".join(names)) + "".join(_ONE.format(i=i) for i in range(count))


@functools.cache
def copier(count: int, itemsize: int, into: bool, capability: int, shared_memory: int
           ) -> TritonSource:  # fmt: skip
    """The kernel. Rows that are copied into, or from, start at multiples of sixteen bytes; those of
    the other side may start anywhere."""
    kind = f"*i{8 * itemsize}"
    types = {"source": kind, "target": kind, "source_leap": "i64", "target_leap": "i64"}
    params = tuple((f"{name}{i}", types.get(name, "i32")) for i in range(count)
                   for name in ("source", "target", *_NUMBERS))  # fmt: skip
    side = "target" if into else "source"
    aligned = [side, f"{side}_step", f"{side}_leap", "wide" if into else "columns"]
    return TritonSource(
        _text(count),
        "copied",
        params,
        (TritonConfig((("ROWS", ROWS), ("COLUMNS", COLUMNS)), 4, 1),),
        capability,
        shared_memory,
        aligned=frozenset(f"{name}{i}" for i in range(count) for name in aligned),
    )


@functools.cache
def _loaded(source: TritonSource, device: int) -> launch.Launcher:
    return launch.load(source, triton_build.build(source), device)


caches.register(_loaded.cache_clear)
