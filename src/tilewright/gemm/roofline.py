"""How long a product takes at best: the larger of its arithmetic and its traffic."""

from __future__ import annotations

import math

import torch

from tilewright.gemm.problem import GemmProblem, takes_tf32
from tilewright.ir import index as ix
from tilewright.ir.program import Buffer
from tilewright.target import Target

LAUNCH = 2.0  # microseconds of a launch that nothing hides

# Sustained, in operations and bytes per microsecond of the usual card of each architecture.
_FLOPS: dict[str, dict[torch.dtype, float]] = {
    "sm_80": {torch.float16: 2.5e8, torch.bfloat16: 2.5e8, torch.float32: 1.5e7,
              torch.float64: 1.5e7},
    "sm_90": {torch.float16: 6.5e8, torch.bfloat16: 6.5e8, torch.float32: 5e7,
              torch.float64: 5e7},
    "sm_100": {torch.float16: 1.5e9, torch.bfloat16: 1.5e9, torch.float32: 7e7,
               torch.float64: 3.5e7},
}  # fmt: skip
_BANDWIDTH = {"sm_80": 1.7e6, "sm_90": 4.0e6, "sm_100": 7e6}
_CPU_FLOPS = 5e4  # of one core, float32
_CPU_BANDWIDTH = 1e4


def roofline(problem: GemmProblem) -> float:
    """Microseconds for the whole problem, each buffer moved once."""
    names = dict.fromkeys((*problem.reads, *problem.writes))
    bytes_ = sum(buffer_bytes(problem.memory[b]) for b in names)
    return max(problem.flops / flops(problem.target, problem.operands[0].dtype),
               bytes_ / bandwidth(problem.target)) + LAUNCH  # fmt: skip


def flops(target: Target, dtype: torch.dtype) -> float:
    """Operations per microsecond."""
    if not target.is_gpu:
        return _CPU_FLOPS * 4 / max(dtype.itemsize, 4) * torch.get_num_threads()
    table = _FLOPS.get(target.arch, _FLOPS["sm_80"])
    if dtype == torch.float32 and takes_tf32():
        return table[torch.float16] / 2
    return table.get(dtype, table[torch.float16] * (2 if dtype.itemsize == 1 else 1))


def bandwidth(target: Target) -> float:
    """Bytes per microsecond."""
    return _BANDWIDTH.get(target.arch, 1e6) if target.is_gpu else _CPU_BANDWIDTH


def loop_time(buffers: list[Buffer], target: Target) -> float:
    """Microseconds of a loop kernel over these buffers."""
    return sum(map(buffer_bytes, buffers)) / bandwidth(target) + LAUNCH


def buffer_bytes(buffer: Buffer) -> int:
    """What a buffer holds: repeated elements are there once."""
    used = [n for n, s in zip(buffer.size, buffer.stride, strict=True) if s is not ix.ZERO]
    return math.prod(max(1, ix.likely(n)) for n in used) * buffer.dtype.itemsize
