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
    """`again` says which inputs must be read a second time: what no cache or processor can hold
    from one use to the next. `random` programs are not compared with eager. `moved` says the fewest
    bytes, of arguments and result, where these are touched in part or written in place."""

    name: str
    fn: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    backward: bool = False
    again: tuple[int, ...] = ()
    random: bool = False
    moved: Callable[[tuple[Any, ...], Any], int] | None = None


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


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(x.masked_fill(mask, float("-inf")), -1)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def residual_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = x + residual
    return total, F.rms_norm(total, total.shape[-1:], weight)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, weight, bias))


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def dropped(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(residual + F.dropout(x, 0.1), x.shape[-1:], weight, bias)


def largest(x: Tensor) -> Tensor:
    return x.argmax(-1)


def variance(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.var(dim)


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()


def reversed_axes(x: Tensor) -> Tensor:
    return x.permute(2, 1, 0).contiguous()


def one_row(x: Tensor) -> Tensor:
    return torch.softmax(x, 0)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


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
    GpuProgram("cross entropy 8192x50257 training", cross_entropy,
               lambda: (randn(8192, 50257, grad=True), integers(50257, 8192)), backward=True),
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
    GpuProgram("softmax 8191x8191", softmax, lambda: (randn(8191, 8191),)),
    GpuProgram("softmax 131072x1000", softmax, lambda: (randn(131072, 1000),)),
    GpuProgram("log softmax 8192x50257", log_softmax, lambda: (randn(8192, 50257),)),
    GpuProgram("masked softmax 16x16x1024x1024", masked_softmax,
               lambda: (randn(16, 16, 1024, 1024),
                        torch.rand(16, 1, 1024, 1024, device="cuda") < 0.3)),
    GpuProgram("softmax of one row 2**26", one_row, lambda: (randn(2**26),), again=(0,)),
    GpuProgram("residual rmsnorm 16384x4096", residual_rmsnorm,
               lambda: (randn(16384, 4096), randn(16384, 4096), randn(4096))),
    GpuProgram("layernorm 131072x1000", layernorm,
               lambda: (randn(131072, 1000), randn(1000), randn(1000))),
    GpuProgram("dropout add layernorm training", dropped,
               lambda: (randn(16384, 4096, grad=True), randn(16384, 4096, grad=True),
                        randn(4096, grad=True), randn(4096, grad=True)),
               backward=True, random=True),
    GpuProgram("group norm silu 16x512x64x64", group_norm,
               lambda: (randn(16, 512, 64, 64), randn(512), randn(512))),
    GpuProgram("group norm silu channels last", group_norm,
               lambda: (_last(randn(16, 512, 64, 64)), randn(512), randn(512))),
    GpuProgram("batch norm relu 64x256x56x56", batch_norm,
               lambda: (randn(64, 256, 56, 56), randn(256), randn(256)), again=(0,)),
    GpuProgram("batch norm relu channels last", batch_norm,
               lambda: (_last(randn(64, 256, 56, 56)), randn(256), randn(256)), again=(0,)),
    GpuProgram("batch norm relu training", batch_norm,
               lambda: (randn(64, 256, 56, 56, grad=True), randn(256, grad=True),
                        randn(256, grad=True)), backward=True, again=(0,)),
    GpuProgram("swiglu 16384x16384", swiglu, lambda: (randn(16384, 16384),)),
    GpuProgram("swiglu training", swiglu, lambda: (randn(16384, 16384, grad=True),), backward=True),
    GpuProgram("argmax 8192x32768", largest, lambda: (randn(8192, 32768),)),
    GpuProgram("var over 0 of 1024x256x512", variance(0), lambda: (randn(1024, 256, 512),)),
    GpuProgram("var over 1 of 1024x256x512", variance(1), lambda: (randn(1024, 256, 512),)),
    GpuProgram("var over 2 of 1024x256x512", variance(2), lambda: (randn(1024, 256, 512),)),
    GpuProgram("transpose 8192x8192", transposed, lambda: (randn(8192, 8192),)),
    GpuProgram("transpose 8191x8191", transposed, lambda: (randn(8191, 8191),)),
    GpuProgram("transpose 8192x8192 f32", transposed, lambda: (randn(8192, 8192, dtype=F32),)),
    GpuProgram("permute 512x400x640 backwards", reversed_axes, lambda: (randn(512, 400, 640),)),
    GpuProgram("cumsum 65536x1000 f32", cumulative, lambda: (randn(65536, 1000, dtype=F32),)),
    GpuProgram("embedding training", embedding,
               lambda: (integers(32000, 32768), randn(32000, 2048, grad=True)), backward=True),
]  # fmt: skip
