"""Training as users write it, forward and backward: optimizers of many parameters, norms with their
running statistics, dropout, losses, augmentations, embeddings. Each was far behind when it was
first measured, or is one of a kind that no other list has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_programs import BF16, F32, GpuProgram, integers, randn

Tensors = Sequence[Tensor]

# the parameters of a small GPT with a convolution and an odd head beside it
LAYER = ((2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,),
         (768,), (768,))  # fmt: skip
SIZES = ((50257, 768), (1024, 768), *4 * LAYER, (64, 3, 7, 7), (1000, 511), (1000,))


def adamw(ps: Tensors, gs: Tensors, ms: Tensors, vs: Tensors, steps: Tensors) -> Any:
    found: list[tuple[Tensor, ...]] = []
    for p, g, m, v, step in zip(ps, gs, ms, vs, steps, strict=True):
        step = step + 1
        m, v = m.lerp(g, 0.1), v * 0.999 + 0.001 * g * g
        size = 1e-3 / (1 - 0.9**step)
        spread = v.sqrt() / (1 - 0.999**step).sqrt() + 1e-8
        found.append((p * (1 - 1e-5) - size * m / spread, m, v, step))
    return found


def nesterov(ps: list[Tensor], gs: list[Tensor], ms: list[Tensor]) -> Any:
    given = torch._foreach_add(gs, ps, alpha=1e-4)
    ms = list(torch._foreach_add(torch._foreach_mul(ms, 0.9), given))
    return torch._foreach_add(ps, torch._foreach_add(given, ms, alpha=0.9), alpha=-0.1), ms


def clipped(gs: list[Tensor]) -> Any:
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gs)))
    return torch._foreach_mul(gs, torch.clamp(1.0 / (total + 1e-6), max=1.0)), total


def averaged(means: Tensors, ps: Tensors) -> list[Tensor]:
    return [torch.lerp(m, p.float(), 1e-3) for m, p in zip(means, ps, strict=True)]


def adam_in_bytes(p: Tensor, g: Tensor, mq: Tensor, ms: Tensor, vq: Tensor, vs: Tensor) -> Any:
    g = g.float().view(-1, 256)
    m = 0.9 * (mq.float() / 127 - 1).view(-1, 256) * ms[:, None] + 0.1 * g
    v = 0.999 * (vq.float() / 255).view(-1, 256) * vs[:, None] + 0.001 * g * g
    p = p - 1e-3 * (m / (v.sqrt() + 1e-8)).view(-1)
    ms, vs = m.abs().amax(1).clamp(min=1e-12), v.amax(1).clamp(min=1e-12)
    mq = ((m / ms[:, None] + 1) * 127).round().to(torch.uint8)
    return p, mq.view(-1), ms, (v / vs[:, None] * 255).round().to(torch.uint8).view(-1), vs


def normed(x: Tensor, y: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, mean, var, w, b, True, 0.1) + y)


def normed_rows(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.dropout(F.relu(F.batch_norm(x, mean, var, w, b, True)), 0.2, True)


def normed_volumes(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, mean, var, w, b, True))


def convnext(x: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    y = F.layer_norm(x.permute(0, 2, 3, 1), w.shape, w, b, 1e-6)
    return x + (F.gelu(y) * scale).permute(0, 3, 1, 2)


def gated(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    v = (x.float() * F.silu(z.float())).view(*x.shape[:-1], 8, -1)
    v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5)
    return (v.flatten(-2) * w).to(z.dtype)


def language(x: Tensor, labels: Tensor) -> Tensor:
    x, labels = 30 * torch.tanh(x[:, :-1].float() / 30), labels[:, 1:]
    lse, seen = x.logsumexp(-1), labels != -100
    nll = lse - x.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return ((nll + 1e-4 * lse**2) * seen).sum() / seen.sum()


def distilled(x: Tensor, y: Tensor, seen: Tensor) -> Tensor:
    x, y = x.float() / 2, y.float() / 2
    kl = (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum(-1)
    return (kl * seen).sum() / seen.sum() * 4


def arcface(x: Tensor, labels: Tensor) -> Tensor:
    c = x.float().clamp(-1 + 1e-5, 1 - 1e-5)
    away = c * math.cos(0.5) - (1 - c * c).sqrt() * math.sin(0.5)
    return F.cross_entropy(64 * torch.where(F.one_hot(labels, x.shape[1]).bool(), away, c), labels)


def supervised(s: Tensor, labels: Tensor) -> Tensor:
    s = s.float() / 0.07
    s = s - s.amax(1, keepdim=True).detach()
    own = torch.eye(s.shape[0], device=s.device, dtype=torch.bool)
    same = (labels[:, None] == labels[None]) & ~own
    logs = s - s.exp().masked_fill(own, 0).sum(1, keepdim=True).log()
    return -((logs * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def attended(s: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    s = s.float() * 0.125 + bias
    s = s.masked_fill(~seen[:, None, None, :], torch.finfo(F32).min)
    return F.dropout(s.softmax(-1), 0.1, True).to(BF16)


def masked(x: Tensor, token: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    rows, length, width = x.shape
    order = noise.argsort(1)
    kept = x.gather(1, order[:, : length // 4, None].expand(-1, -1, width))
    full = torch.cat((kept, token.expand(rows, length - length // 4, width)), 1)
    return kept, full.gather(1, order.argsort(1)[..., None].expand(-1, -1, width))


def pools(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2)


def doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def learned(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    return tuple(randn(*shape, dtype=dtype, grad=True) for shape in shapes)


def of_each(dtype: torch.dtype = F32) -> list[Tensor]:
    return [randn(*size, dtype=dtype) for size in SIZES]


def spread_of_each() -> list[Tensor]:
    return [t.square() for t in of_each()]


def running(channels: int) -> tuple[Tensor, ...]:
    weights = learned((channels,), (channels,), dtype=F32)
    return *weights, torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")


def last(*shape: int) -> Tensor:
    x = randn(*shape).to(memory_format=torch.channels_last)
    return x.requires_grad_()


def labels(classes: int, *shape: int) -> Tensor:
    return torch.where(torch.rand(shape, device="cuda") < 0.2, -100, integers(classes, *shape))


def in_bytes(length: int) -> tuple[Tensor, ...]:
    scales = [torch.rand(length // 256, device="cuda") for _ in range(2)]
    codes = [integers(255, length).to(torch.uint8) for _ in range(2)]
    return codes[0], scales[0], codes[1], scales[1]


def training(name: str, fn: Callable[..., Any], inputs: Callable[[], tuple[Any, ...]],
             random: bool = False) -> GpuProgram:  # fmt: skip
    return GpuProgram(name, fn, inputs, backward=True, random=random)


TRAINED = (
    GpuProgram(
        "adamw of 45 parameters",
        adamw,
        lambda: (
            *(of_each() for _ in range(3)),
            spread_of_each(),
            [torch.full((), 5.0, device="cuda") for _ in SIZES],
        ),
    ),
    GpuProgram("nesterov of 45 parameters", nesterov, lambda: (of_each(), of_each(), of_each())),
    GpuProgram("clip 45 gradients", clipped, lambda: (of_each(BF16),)),
    GpuProgram("moving averages of 45", averaged, lambda: (of_each(), of_each(BF16))),
    GpuProgram(
        "adam in bytes",
        adam_in_bytes,
        lambda: (randn(1 << 25, dtype=F32), randn(1 << 25), *in_bytes(1 << 25)),
        random=True,  # a half of the last byte may be rounded either way
    ),
    training(
        "batch norm residual channels last",
        normed,
        lambda: (last(256, 192, 28, 28), last(256, 192, 28, 28), *running(192)),
    ),
    training(
        "batch norm of rows, dropout",
        normed_rows,
        lambda: (randn(131072, 384, dtype=F32, grad=True), *running(384)),
        random=True,
    ),
    training(
        "batch norm of volumes",
        normed_volumes,
        lambda: (randn(8, 64, 16, 64, 64, grad=True), *running(64)),
        random=True,  # eager's sums are off by more than is allowed (279 of float64's, ours by 45)
    ),
    training("convnext norm", convnext, lambda: learned((64, 192, 56, 56), (192,), (192,), (192,))),
    training(
        "gated norm of groups",
        gated,
        lambda: (*learned((16384, 4096), (16384, 4096)), randn(4096, dtype=F32, grad=True)),
    ),
    training(
        "language model loss",
        language,
        lambda: (randn(4, 1024, 50257, grad=True), labels(50257, 4, 1024)),
    ),
    training(
        "distilled",
        distilled,
        lambda: (
            randn(4, 1024, 32001, dtype=torch.float16, grad=True),
            randn(4, 1024, 32001, dtype=torch.float16),
            (torch.rand(4, 1024, device="cuda") > 0.3).float(),
        ),
    ),
    training(
        "arcface",
        arcface,
        lambda: (
            (torch.rand(2048, 50001, device="cuda") * 1.6 - 0.8).half().requires_grad_(),
            integers(50001, 2048),
        ),
    ),
    training(
        "supervised contrast",
        supervised,
        lambda: (randn(8192, 8192, grad=True), integers(1000, 8192)),
    ),
    training(
        "attention dropout",
        attended,
        lambda: (
            randn(8, 12, 1024, 1024, grad=True),
            randn(12, 1024, 1024, dtype=F32, grad=True),
            torch.rand(8, 1024, device="cuda") > 0.2,
        ),
        random=True,
    ),
    training(
        "masked tokens",
        masked,
        lambda: (*learned((256, 196, 768), (1, 1, 768)), torch.rand(256, 196, device="cuda")),
    ),
    training("max and average pool", pools, lambda: learned((64, 64, 112, 112))),
    training("bilinear", doubled, lambda: learned((16, 128, 64, 64))),
)
