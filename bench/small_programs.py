"""The same kinds of programs at the sizes of a decoding step, a small batch or a small model: what
counts there is how many kernels there are, and how long each waits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import gpu_programs as big
from bench.gpu_programs import F32, GpuProgram, integers, randn
from bench.served_programs import grouped_experts, normed_fp8, rope, table
from bench.trained_programs import learned, nesterov, running, training
from bench.usual_programs import clipped, experts, mse, to_heads
from bench.various_programs import by_token, head_norm, optimizer_step
from bench.written_programs import f32, uniform

SIZES = (*4 * ((256, 256), (256,)), (1000, 256), (1000,))  # of a small network's parameters


def evaluated_norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, mean, var, w, b))


def sampled(logits: Tensor, temperature: Tensor) -> Tensor:
    p = (logits.float() / temperature[:, None]).softmax(-1)
    return (p / torch.empty_like(p).exponential_(1)).argmax(-1)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean()


def heads_of_actions(logits: Tensor, actions: Tensor, advantage: Tensor, old: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    logp = logs.gather(1, actions[:, None])[:, 0]
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain.mean() + 0.01 * (logs.exp() * logs).sum(-1).mean()


def standard(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def unit_rows(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def causal(scores: Tensor) -> Tensor:
    at = torch.arange(scores.shape[-1], device=scores.device)
    return scores.float().masked_fill(at > at[:, None], float("-inf")).softmax(-1).to(scores.dtype)


def of_each() -> list[Tensor]:
    return [randn(*size, dtype=F32) for size in SIZES]


def steps() -> list[Tensor]:
    return [torch.full((), 5.0, device="cuda") for _ in SIZES]


SMALL = (
    GpuProgram("rms norm 1x4096", big.rmsnorm, lambda: (randn(1, 4096), randn(4096))),
    GpuProgram("residual rms norm 16x4096", big.residual_rmsnorm,
               lambda: (randn(16, 4096), randn(16, 4096), randn(4096))),
    GpuProgram("residual rms norm to fp8 64x8192", normed_fp8,
               lambda: (randn(64, 8192), randn(64, 8192), randn(8192)), random=True),
    GpuProgram("int8 by token 32x4096", by_token, lambda: (randn(32, 4096),), random=True),
    GpuProgram("layer norm 2048x768", big.layernorm,
               lambda: (randn(2048, 768), randn(768), randn(768))),
    training("layer norm 2048x768, trained", big.layernorm,
             lambda: learned((2048, 768), (768,), (768,))),
    training("layer norm 512x256 f32, trained", big.layernorm,
             lambda: learned((512, 256), (256,), (256,), dtype=F32)),
    GpuProgram("softmax 64x1000 f32", big.softmax, lambda: (f32(64, 1000),)),
    GpuProgram("causal 8x12x128x128", causal, lambda: (randn(8, 12, 128, 128),)),
    training("causal 8x12x128x128, trained", causal, lambda: learned((8, 12, 128, 128))),
    GpuProgram("swiglu 16x28672", big.swiglu, lambda: (randn(16, 28672),)),
    GpuProgram("bias gelu 1576x3072", big.bias_gelu, lambda: (randn(1576, 3072), randn(3072))),
    training("bias gelu 1576x3072, trained", big.bias_gelu, lambda: learned((1576, 3072), (3072,))),
    GpuProgram("rope of a step", rope,
               lambda: (randn(16, 32, 1, 128), randn(16, 8, 1, 128), *table(4096),
                        integers(4096, 16, 1))),
    GpuProgram("heads 4x256", to_heads, lambda: (randn(4, 256, 3 * 4096),)),
    GpuProgram("head norm 1x64", head_norm, lambda: (randn(1, 64, 3 * 2048), f32(128), f32(128))),
    GpuProgram("cross entropy 128x1000", big.cross_entropy,
               lambda: (randn(128, 1000), integers(1000, 128))),
    training("cross entropy 128x1000, trained", big.cross_entropy,
             lambda: (*learned((128, 1000), dtype=F32), integers(1000, 128))),
    training("cross entropy 512x50257, trained", big.cross_entropy,
             lambda: (*learned((512, 50257)), integers(50257, 512))),
    GpuProgram("argmax 16x128256", big.largest, lambda: (randn(16, 128256),)),
    GpuProgram("sampled 16x32000", sampled,
               lambda: (randn(16, 32000), uniform(16) + 0.5), random=True),
    GpuProgram("log softmax 32x32000", big.log_softmax, lambda: (randn(32, 32000),)),
    GpuProgram("experts of 64 tokens", experts, lambda: (randn(64, 64),)),
    GpuProgram("grouped experts of 64 tokens", grouped_experts, lambda: (f32(64, 256), f32(256)),
               random=True),
    GpuProgram("batch norm 8x64x56x56", evaluated_norm,
               lambda: (randn(8, 64, 56, 56), f32(64), uniform(64), f32(64), f32(64))),
    training("batch norm 8x64x32x32, trained", big.batch_norm,
             lambda: learned((8, 64, 32, 32), (64,), (64,), dtype=F32)),
    training("batch norm of rows 256x512", big.batch_norm,
             lambda: learned((256, 512), (512,), (512,), dtype=F32)),
    GpuProgram("group norm 2x320x64x64", big.group_norm,
               lambda: (randn(2, 320, 64, 64), randn(320), randn(320))),
    GpuProgram("group norm 1x512x32x32", big.group_norm,
               lambda: (randn(1, 512, 32, 32), randn(512), randn(512))),
    training("dropout add layer norm 1024x768", big.dropped,
             lambda: learned((1024, 768), (1024, 768), (768,), (768,)), random=True),
    GpuProgram("mse 1024x16", mse, lambda: (f32(1024, 16), f32(1024, 16))),
    training("actions 2048x18", heads_of_actions,
             lambda: (*learned((2048, 18), dtype=F32), integers(18, 2048), f32(2048), f32(2048))),
    GpuProgram("accuracy 1024x1000", accuracy, lambda: (randn(1024, 1000), integers(1000, 1024))),
    GpuProgram("embedding 8x128", big.embedding,
               lambda: (integers(50257, 1024), randn(50257, 768))),
    training("embedding 8x128, trained", big.embedding,
             lambda: (integers(5000, 1024), *learned((5000, 256), dtype=F32))),
    GpuProgram("sum of all 2**20", big.everything, lambda: (f32(1 << 20),)),
    GpuProgram("sum of columns 1024x256", big.columns_sum, lambda: (f32(1024, 256),)),
    GpuProgram("rows and columns 512x512", big.rows_and_columns, lambda: (f32(512, 512),)),
    GpuProgram("standardised 4096x20", standard, lambda: (f32(4096, 20),)),
    GpuProgram("unit rows 4096x128", unit_rows, lambda: (f32(4096, 128),)),
    GpuProgram("cumsum 64x1000", big.cumulative, lambda: (f32(64, 1000),)),
    GpuProgram("transpose 512x512", big.transposed, lambda: (randn(512, 512),)),
    GpuProgram("clip by norm 2**20", clipped, lambda: (f32(1 << 20),)),
    GpuProgram("adam 2**18", big.adam, lambda: tuple(uniform(1 << 18) for _ in range(4))),
    GpuProgram("adamw of 10 parameters", optimizer_step,
               lambda: (of_each(), of_each(), of_each(), [t.square() for t in of_each()], steps()),
               random=True),
    GpuProgram("nesterov of 10 parameters", nesterov, lambda: (of_each(), of_each(), of_each())),
    training("batch norm residual 16x64x28x28",
             lambda x, w, b, mean, var: F.relu(F.batch_norm(x, mean, var, w, b, True) + x),
             lambda: (*learned((16, 64, 28, 28), dtype=F32), *running(64))),
)  # fmt: skip
