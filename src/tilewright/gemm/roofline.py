"""How long a product takes at best: the larger of its arithmetic and its traffic."""

from __future__ import annotations

import math

import torch

from tilewright.gemm.problem import GemmProblem, takes_tf32
from tilewright.ir import index as ix
from tilewright.ir.program import Buffer
from tilewright.target import LAUNCH, Target

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
    rates = target.rates
    if dtype == torch.float32:
        return rates.matrix / 2 if takes_tf32() else rates.single
    if dtype == torch.float64:
        return rates.double
    return rates.matrix * (2 if dtype.itemsize == 1 else 1)


def bandwidth(target: Target) -> float:
    """Bytes per microsecond."""
    return target.rates.memory if target.is_gpu else _CPU_BANDWIDTH


def loop_time(buffers: list[Buffer], target: Target) -> float:
    """Microseconds of a loop kernel over these buffers."""
    return sum(map(buffer_bytes, buffers)) / bandwidth(target) + LAUNCH


def buffer_bytes(buffer: Buffer) -> int:
    """What a buffer holds: repeated elements are there once."""
    used = [n for n, s in zip(buffer.size, buffer.stride, strict=True) if s is not ix.ZERO]
    return math.prod(max(1, ix.likely(n)) for n in used) * buffer.dtype.itemsize
