"""Memory-bound programs: what they compute costs less than moving their tensors.

Each program is a plain function and a maker of its inputs, about 8 to 64 MB, past the caches of
most CPUs. `backward` programs run forward and backward through autograd.
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
class Program:
    """A function, a maker of its inputs, and whether the backward pass is run too."""

    name: str
    fn: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    backward: bool = False
    quick: bool = False  # part of the short run


PROGRAMS: list[Program] = []


def program(
    name: str,
    inputs: Callable[[], tuple[Any, ...]],
    *,
    backward: bool = False,
    quick: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function; it may carry several names with other inputs."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(Program(name, fn, inputs, backward, quick))
        return fn

    return register


def randn(*shape: int, dtype: torch.dtype = F32, grad: bool = False) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


# --------------------------------------------------------------------------- softmax and losses


@program("softmax_inner", lambda: (randn(4096, 2048),), quick=True)
@program("softmax_inner_bf16", lambda: (randn(4096, 2048, dtype=BF16),))
@program("softmax_inner_bwd", lambda: (randn(4096, 1536, grad=True),), backward=True)
def softmax_inner(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


@program("softmax_outer", lambda: (randn(2048, 4096),))
def softmax_outer(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=0)


@program("log_softmax", lambda: (randn(4096, 2000),))
def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, dim=-1)


@program("masked_softmax", lambda: (randn(16, 512, 1024), torch.rand(512, 1024) > 0.3))
def masked_softmax(scores: Tensor, keep: Tensor) -> Tensor:
    return torch.softmax((scores * 0.125).masked_fill(~keep, float("-inf")), dim=-1)


@program("cross_entropy", lambda: (randn(1024, 8192), torch.randint(0, 8192, (1024,))), quick=True)
@program(
    "cross_entropy_bwd",
    lambda: (randn(1024, 8000, grad=True), torch.randint(0, 8000, (1024,))),
    backward=True,
)
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


# --------------------------------------------------------------------------- norms


@program("layernorm", lambda: (randn(8192, 1024), randn(1024), randn(1024)), quick=True)
@program(
    "layernorm_bf16",
    lambda: (randn(8192, 1024, dtype=BF16), randn(1024, dtype=BF16), randn(1024, dtype=BF16)),
)
@program(
    "layernorm_bwd",
    lambda: (randn(8192, 768, grad=True), randn(768, grad=True), randn(768, grad=True)),
    backward=True,
    quick=True,
)
def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


@program("rmsnorm", lambda: (randn(8192, 1024), randn(1024)))
@program("rmsnorm_bf16", lambda: (randn(8192, 1024, dtype=BF16), randn(1024, dtype=BF16)))
def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * scale).to(x.dtype) * weight


@program("groupnorm_silu", lambda: (randn(8, 64, 96, 96), randn(64), randn(64)))
def groupnorm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 8, weight, bias))


def batchnorm_inputs() -> tuple[Tensor, ...]:
    return randn(16, 64, 56, 56), torch.zeros(64), torch.ones(64), randn(64), randn(64)


@program("batchnorm_train_relu", batchnorm_inputs)
def batchnorm_train_relu(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, mean, var, w, b, training=True))


@program(
    "bias_residual_layernorm",
    lambda: (randn(8192, 768), randn(8192, 768), randn(768), randn(768), randn(768)),
    quick=True,
)
def bias_residual_layernorm(
    x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + bias + residual
    return total, F.layer_norm(total, total.shape[-1:], weight, shift)


@program(
    "embedding_layernorm",
    lambda: (torch.randint(0, 20000, (8192,)), randn(20000, 512), randn(512), randn(512)),
)
def embedding_layernorm(ids: Tensor, table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(ids, table), (table.shape[1],), weight, bias)


# --------------------------------------------------------------------------- pointwise


@program("gelu", lambda: (randn(4096, 2048), randn(2048)), quick=True)
@program("gelu_bf16", lambda: (randn(4096, 2048, dtype=BF16), randn(2048, dtype=BF16)))
@program("gelu_bwd", lambda: (randn(4096, 1792, grad=True), randn(1792, grad=True)), backward=True)
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@program("silu_mul", lambda: (randn(4096, 2048), randn(4096, 2048)))
@program("silu_mul_bf16", lambda: (randn(4096, 2048, dtype=BF16), randn(4096, 2048, dtype=BF16)))
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@program("geglu", lambda: (randn(4096, 4096),))
def geglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def rope_inputs() -> tuple[Tensor, ...]:
    angle = torch.arange(1024)[:, None] / 10000 ** (torch.arange(0, 64, 2) / 64)
    return randn(4, 16, 1024, 64), angle.cos(), angle.sin()


@program("rope", rope_inputs)
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


# --------------------------------------------------------------------------- layout


@program("transposed_add", lambda: (randn(2048, 2048), randn(2048, 2048)), quick=True)
def transposed_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y.t()


@program("permute_copy", lambda: (randn(16, 64, 64, 96),))
def permute_copy(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2).contiguous()


@program("cat_silu", lambda: (randn(4096, 512), randn(4096, 1024), randn(4096, 256)))
def cat_silu(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return F.silu(torch.cat([a, b, c], dim=1))


@program("pad_relu", lambda: (randn(16, 64, 62, 62),))
def pad_relu(x: Tensor) -> Tensor:
    return F.relu(F.pad(x, (1, 1, 1, 1)) + 0.5)


# --------------------------------------------------------------------------- reductions and scans


@program("sum_rows", lambda: (randn(4096, 4096),))
def sum_rows(x: Tensor) -> Tensor:
    return (x * x).sum(dim=1)


@program("sum_columns", lambda: (randn(4096, 4096),), quick=True)
def sum_columns(x: Tensor) -> Tensor:
    return (x * 2 + 1).sum(dim=0)


@program("sum_all", lambda: (randn(4096, 4096), randn(4096, 4096)))
def sum_all(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).abs().sum()


@program("var_mean", lambda: (randn(8192, 1536),))
def var_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x, dim=-1)
    return mean, var.sqrt()


@program("argmax", lambda: (randn(4096, 3000),))
def argmax(x: Tensor) -> Tensor:
    return (x * 1.5).argmax(dim=-1)


@program("cumsum", lambda: (randn(4096, 2048),))
def cumsum(x: Tensor) -> Tensor:
    return torch.cumsum(x * 0.5, dim=-1)


# --------------------------------------------------------------------------- indexing


@program("gather_scale", lambda: (randn(8192, 1024), torch.randint(0, 1024, (8192, 512))))
def gather_scale(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, 1, index) * 2 + 1


@program(
    "scatter_add",
    lambda: (torch.zeros(4096, 512), torch.randint(0, 4096, (8192, 512)), randn(8192, 512)),
)
def scatter_add(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return x.scatter_add(0, index, values * 0.5)


@program(
    "index_put_add",
    lambda: (torch.zeros(8192, 512), torch.randint(0, 8192, (4096,)), randn(4096, 512)),
)
def index_put_add(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    return x.index_put((rows,), values.relu(), accumulate=True)


# --------------------------------------------------------------------------- images


@program("max_pool", lambda: (randn(16, 64, 56, 56),))
def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(x), 3, stride=2, padding=1)


@program("avg_pool", lambda: (randn(16, 64, 56, 56),))
def avg_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2) + 1


@program("interpolate_bilinear", lambda: (randn(8, 64, 48, 48),))
def interpolate_bilinear(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


# --------------------------------------------------------------------------- optimiser


def adam_inputs() -> tuple[list[Tensor], ...]:
    shapes = [(1024, 1024), (1024,), (4096, 512), (4096,), (512, 2048)]
    params, grads, first = ([randn(*s) for s in shapes] for _ in range(3))
    second = [randn(*s).square() for s in shapes]
    return params, grads, first, second


@program("adam_foreach", adam_inputs, quick=True)
def adam_foreach(
    params: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor]
) -> None:
    torch._foreach_lerp_(first, grads, 0.1)
    torch._foreach_mul_(second, 0.999)
    torch._foreach_addcmul_(second, grads, grads, 0.001)
    scale = torch._foreach_sqrt(second)
    torch._foreach_add_(scale, 1e-8)
    torch._foreach_addcdiv_(params, first, scale, -1e-3)
