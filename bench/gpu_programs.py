"""Memory-bound programs at the size of a card: inputs of hundreds of megabytes, past its cache.

The fewest bytes a program can move are those of its inputs and outputs, each once; for a training
step also of the gradients that come in and go out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BF16 = torch.bfloat16
F32 = torch.float32


@dataclass(frozen=True)
class GpuProgram:
    name: str
    fn: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    backward: bool = False


def randn(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_(grad)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, device="cuda")


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def softmax_columns(x: Tensor) -> Tensor:
    return torch.softmax(x, 0)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def residual_layernorm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    total = x + residual
    return total, F.layer_norm(total, total.shape[-1:], weight, bias)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, low * sin + high * cos], -1).to(x.dtype)


def transposed_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y.t()


def permuted(x: Tensor) -> Tensor:
    return x.permute(0, 2, 1, 3).contiguous()


def rows_sum(x: Tensor) -> Tensor:
    return x.float().sum(-1)


def columns_sum(x: Tensor) -> Tensor:
    return x.float().sum(0)


def everything(x: Tensor) -> Tensor:
    return x.float().square().sum()


def rows_and_columns(x: Tensor) -> Any:
    wide = x.float()
    return wide.sum(0), wide.sum(1)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table) * 2


def cumulative(x: Tensor) -> Tensor:
    return torch.cumsum(x, -1)


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Any:
    m = m * 0.9 + g * 0.1
    v = v * 0.999 + g * g * 0.001
    return p - 1e-3 * m / (v.sqrt() + 1e-8), m, v


def _rope_inputs() -> tuple[Tensor, ...]:
    angle = torch.randn(4096, 64, device="cuda")
    return randn(8, 32, 4096, 128), angle.cos(), angle.sin()


PROGRAMS = [
    GpuProgram("softmax 8192x8192", softmax, lambda: (randn(8192, 8192),)),
    GpuProgram("softmax 65536x1024 f32", softmax, lambda: (randn(65536, 1024, dtype=F32),)),
    GpuProgram("softmax columns 8192x8192", softmax_columns, lambda: (randn(8192, 8192),)),
    GpuProgram("layernorm 16384x4096", layernorm,
               lambda: (randn(16384, 4096), randn(4096), randn(4096))),
    GpuProgram("layernorm 16384x4096 training", layernorm,
               lambda: (randn(16384, 4096, grad=True), randn(4096, grad=True),
                        randn(4096, grad=True)), backward=True),
    GpuProgram("rmsnorm 16384x4096", rmsnorm, lambda: (randn(16384, 4096), randn(4096))),
    GpuProgram("rmsnorm 16384x4096 training", rmsnorm,
               lambda: (randn(16384, 4096, grad=True), randn(4096, grad=True)), backward=True),
    GpuProgram("residual layernorm", residual_layernorm,
               lambda: (randn(16384, 4096), randn(16384, 4096), randn(4096), randn(4096))),
    GpuProgram("cross entropy 8192x128256", cross_entropy,
               lambda: (randn(8192, 128256), integers(128256, 8192))),
    GpuProgram("cross entropy 8192x32000 training", cross_entropy,
               lambda: (randn(8192, 32000, grad=True), integers(32000, 8192)), backward=True),
    GpuProgram("bias gelu 16384x8192", bias_gelu, lambda: (randn(16384, 8192), randn(8192))),
    GpuProgram("bias gelu 16384x8192 training", bias_gelu,
               lambda: (randn(16384, 8192, grad=True), randn(8192, grad=True)), backward=True),
    GpuProgram("silu mul 16384x8192", silu_mul, lambda: (randn(16384, 8192), randn(16384, 8192))),
    GpuProgram("rope", rope, _rope_inputs),
    GpuProgram("transposed add 8192x8192", transposed_add,
               lambda: (randn(8192, 8192), randn(8192, 8192))),
    GpuProgram("permute 16x2048x32x128", permuted, lambda: (randn(16, 2048, 32, 128),)),
    GpuProgram("sum of rows 16384x8192", rows_sum, lambda: (randn(16384, 8192),)),
    GpuProgram("sum of columns 16384x8192", columns_sum, lambda: (randn(16384, 8192),)),
    GpuProgram("sum of all squares 2**27", everything, lambda: (randn(2**27),)),
    GpuProgram("rows and columns 16384x8192", rows_and_columns, lambda: (randn(16384, 8192),)),
    GpuProgram("embedding 65536 of 32000x2048", embedding,
               lambda: (integers(32000, 65536), randn(32000, 2048))),
    GpuProgram("cumsum 16384x4096 f32", cumulative, lambda: (randn(16384, 4096, dtype=F32),)),
    GpuProgram("adam 2**26 f32", adam,
               lambda: tuple(torch.rand(2**26, device="cuda") for _ in range(4))),
]  # fmt: skip
