"""Memory-bound programs of other kinds than the list has, at sizes models have: losses, images,
attention without its products, quantized weights, what an optimizer does, and what users write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_programs import BF16, F32, GpuProgram, adam, cross_entropy, integers, randn

WIDE = (16384, 4096)  # tokens by what a model has of each
IMAGES = (64, 256, 56, 56)


def mse(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x.float(), y.float())


def bce(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.float(), targets.float())


def huber(x: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(x, y)


def distilled(x: Tensor, teacher: Tensor) -> Tensor:
    log, other = (F.log_softmax(t.float(), -1) for t in (x, teacher))
    return F.kl_div(log, other, reduction="batchmean", log_target=True)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(x.float(), y.float(), dim=-1)


def unit(x: Tensor) -> Tensor:
    return F.normalize(x.float(), dim=-1).to(x.dtype)


def standard_weights(w: Tensor) -> Tensor:
    variance, mean = torch.var_mean(w.float(), (1, 2, 3), keepdim=True)
    return ((w - mean) * torch.rsqrt(variance + 1e-6)).to(w.dtype)


def clipped(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x.float())
    return x * (1.0 / (norm + 1e-6)).clamp(max=1.0)


def to_heads(qkv: Tensor) -> Any:
    b, t, _ = qkv.shape
    q, k, v = qkv.view(b, t, 3, 32, 128).permute(2, 0, 3, 1, 4)
    return q.contiguous(), k.contiguous(), v.contiguous()


def from_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def alibi(x: Tensor, slopes: Tensor) -> Tensor:
    length = x.shape[-1]
    place = torch.arange(length, device=x.device)
    away = (place[None, :] - place[:, None]).abs()
    return torch.softmax(x.float() - slopes[:, None, None] * away, -1).to(x.dtype)


def capped(x: Tensor) -> Tensor:
    return torch.softmax((torch.tanh(x.float() / 30) * 30), -1).to(x.dtype)


def normed_heads(q: Tensor, weight: Tensor) -> Tensor:
    wide = q.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(q.dtype) * weight


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]


def gated_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return x + gate[:, None] * y


def from_int4(packed: Tensor, scale: Tensor) -> Tensor:
    low, high = (packed & 15).to(BF16) - 8, (packed >> 4).to(BF16) - 8
    return torch.stack((low, high), -1).flatten(-2) * scale


def group_fp8(x: Tensor) -> Any:
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
    return (groups / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def averaged(old: Tensor, new: Tensor) -> Tensor:
    return old * 0.999 + new.float() * 0.001


def lion(p: Tensor, g: Tensor, m: Tensor) -> Any:
    way = (m * 0.9 + g * 0.1).sign()
    return p * (1 - 1e-4) - 1e-4 * way, m * 0.99 + g * 0.01


def experts(logits: Tensor) -> Any:
    weights, places = torch.softmax(logits.float(), -1).topk(2)
    return weights / weights.sum(-1, keepdim=True), places


def counted(x: Tensor) -> Any:
    return (x > 1).sum(-1), torch.isnan(x).any(-1), x.amin(-1), x.amax(-1)


def relu_residual(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x + y)


def scaled_planes(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, mean, spread, weight, bias))


def squeezed(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)[:, :, None, None]


def channel_norm(x: Tensor, weight: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    spread = (x - mean).square().mean(1, keepdim=True)
    return (x - mean) * torch.rsqrt(spread + 1e-6) * weight[:, None, None]


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.float(), targets, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    total = torch.logsumexp(logits.float(), -1)
    own = logits.gather(-1, targets[:, None]).squeeze(-1).float()
    return (total - own).mean() + 1e-4 * total.square().mean()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    kept = mask[..., None].to(x.dtype)
    return (x * kept).sum(1) / kept.sum(1)


def normed_int8(x: Tensor, weight: Tensor) -> Any:
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float())
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (y / scale).round().to(torch.int8), scale


def fp8_both_ways(x: Tensor, scale: Tensor) -> Any:
    """Rows and columns of what goes into the products of a backward pass."""
    y = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return y, y.t().contiguous()


def patches(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, c, h // 16, 16, w // 16, 16).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, 768)


def windows(x: Tensor) -> Tensor:
    b, h, w, c = x.shape
    x = torch.roll(x, (-3, -3), (1, 2)).view(b, h // 7, 7, w // 7, 7, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, c)


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Of each channel along the positions, as state space models begin."""
    padded = F.pad(x, (3, 0))
    length = x.shape[-1]
    taps = [weight[:, k, None] * padded[..., k : k + length] for k in range(4)]
    return F.silu(taps[0] + taps[1] + taps[2] + taps[3])


def smoothed_steps(x: Tensor) -> Any:
    """Advantages: a sum over what comes later."""
    return x.flip(-1).cumsum(-1).flip(-1)


def cached(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    return cache.index_copy(2, at, new)


def gumbel(x: Tensor, noise: Tensor) -> Tensor:
    return torch.softmax((x.float() - torch.log(-torch.log(noise))) / 0.5, -1)


def many_steps(*tensors: Tensor) -> Any:
    """An optimizer's step for parameters of many sizes."""
    count = len(tensors) // 4
    parts = (tensors[k * count : (k + 1) * count] for k in range(4))
    return [adam(*each) for each in zip(*parts, strict=True)]


def many_norms(*tensors: Tensor) -> Any:
    total = torch.stack([t.float().square().sum() for t in tensors]).sum().sqrt()
    return [t * (1.0 / (total + 1e-6)).clamp(max=1.0) for t in tensors]


SIZES = ((4096, 4096), (4096,), (11008, 1024), (4096, 1024), (1024,), (333, 777), (32000, 256)) * 3


def _last(*shape: int) -> Tensor:
    return randn(*shape).contiguous(memory_format=torch.channels_last)


def _one(name: str, fn: Callable[..., Any], *makers: Callable[[], Tensor], backward: bool = False,
         again: tuple[int, ...] = (), random: bool = False) -> GpuProgram:  # fmt: skip
    return GpuProgram(name, fn, lambda: tuple(make() for make in makers), backward, again, random)


def wide() -> Tensor:
    return randn(*WIDE)


def wide_grad() -> Tensor:
    return randn(*WIDE, grad=True)


def images() -> Tensor:
    return randn(*IMAGES)


def scores() -> Tensor:
    return randn(4, 16, 2048, 1024)


def vector(length: int, dtype: torch.dtype = BF16, grad: bool = False) -> Callable[[], Tensor]:
    return lambda: randn(length, dtype=dtype, grad=grad)


def spread() -> Tensor:
    return torch.rand(IMAGES[1], device="cuda") + 0.5


def packed() -> Tensor:
    return torch.randint(0, 256, (8192, 8192), device="cuda", dtype=torch.uint8)


USUAL = [
    _one("softmax 4096x4096", lambda x: torch.softmax(x, -1), lambda: randn(4096, 4096)),
    _one("softmax 32768x2048", lambda x: torch.softmax(x, -1), lambda: randn(32768, 2048)),
    _one("layernorm 32768x1024", lambda x, w, b: F.layer_norm(x, (1024,), w, b),
         lambda: randn(32768, 1024), vector(1024), vector(1024)),
    _one("layernorm 65536x768 f32", lambda x, w, b: F.layer_norm(x, (768,), w, b),
         lambda: randn(65536, 768, dtype=F32), vector(768, F32), vector(768, F32)),
    _one("layernorm 16384x8192", lambda x, w, b: F.layer_norm(x, (8192,), w, b),
         lambda: randn(16384, 8192), vector(8192), vector(8192)),
    _one("rms norm 16384x5120", lambda x, w: F.rms_norm(x, (5120,), w),
         lambda: randn(16384, 5120), vector(5120)),
    _one("layernorm training 65536x1024", lambda x, w, b: F.layer_norm(x, (1024,), w, b),
         lambda: randn(65536, 1024, grad=True), vector(1024, grad=True), vector(1024, grad=True),
         backward=True),
    _one("cross entropy 16384x32000", cross_entropy, lambda: randn(16384, 32000),
         lambda: integers(32000, 16384)),
    _one("cross entropy 1000 classes", cross_entropy, lambda: randn(131072, 1000),
         lambda: integers(1000, 131072)),
    _one("cross entropy training 4096x50304", cross_entropy, lambda: randn(4096, 50304, grad=True),
         lambda: integers(50304, 4096), backward=True),
    _one("mse", mse, wide, wide),
    _one("binary cross entropy", bce, wide, wide),
    _one("huber f32", huber, lambda: randn(*WIDE, dtype=F32), lambda: randn(*WIDE, dtype=F32)),
    _one("distilled 4096x32000", distilled, lambda: randn(4096, 32000),
         lambda: randn(4096, 32000)),
    _one("cosine similarity", cosine, wide, wide),
    _one("normalize 131072x768", unit, lambda: randn(131072, 768)),
    _one("standard weights", standard_weights, lambda: randn(4096, 1024, 3, 3)),
    _one("clip by norm", clipped, wide, again=(0,)),
    _one("gelu", lambda x: F.gelu(x), wide),
    _one("silu training", lambda x: F.silu(x), wide_grad, backward=True),
    _one("relu of a sum", relu_residual, images, images),
    _one("mish", lambda x: F.mish(x), wide),
    _one("tanh f32", lambda x: torch.tanh(x), lambda: randn(*WIDE, dtype=F32)),
    _one("queries, keys, values", to_heads, lambda: randn(4, 2048, 3 * 4096)),
    _one("from heads", from_heads, lambda: randn(8, 32, 2048, 128)),
    _one("alibi softmax", alibi, lambda: randn(2, 16, 2048, 2048),
         vector(16, F32)),
    _one("capped softmax", capped, scores),
    _one("normed heads", normed_heads, lambda: randn(16, 2048, 32, 128), vector(128)),
    _one("modulated layernorm", modulated, lambda: randn(16, 4096, 1152),
         lambda: randn(16, 1152), lambda: randn(16, 1152)),
    _one("gated residual", gated_residual, lambda: randn(16, 4096, 1152),
         lambda: randn(16, 4096, 1152), lambda: randn(16, 1152)),
    _one("from int4", from_int4, packed, lambda: randn(8192, 1)),
    _one("fp8 by groups of 128", group_fp8, wide, random=True),
    _one("moving average f32", averaged, lambda: randn(*WIDE, dtype=F32), wide),
    _one("lion f32", lion, *(lambda: randn(2**25, dtype=F32),) * 3),
    _one("dropout", lambda x: F.dropout(x, 0.1), wide, random=True),
    _one("experts 262144x64", experts, lambda: randn(262144, 64, dtype=F32)),
    _one("counts of rows", counted, wide),
    _one("sum over all", lambda x: x.float().sum(), wide),
    _one("mean over 0", lambda x: x.mean(0), wide),
    _one("max over 1 of 64x4096x512", lambda x: x.amax(1), lambda: randn(64, 4096, 512)),
    _one("logsumexp 16384x4096", lambda x: torch.logsumexp(x.float(), -1), wide),
    _one("batch norm, inference", scaled_planes, images, *(vector(256),) * 2,
         vector(256, F32), spread),
    _one("batch norm, inference, channels last", scaled_planes, lambda: _last(*IMAGES),
         *(vector(256),) * 2, vector(256, F32), spread),
    _one("group norm 8x320x128x128", lambda x, w, b: F.group_norm(x, 32, w, b),
         lambda: randn(8, 320, 128, 128), vector(320), vector(320)),
    _one("group norm silu 32x256x64x64 f32", lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)),
         lambda: randn(32, 256, 64, 64, dtype=F32), vector(256, F32), vector(256, F32)),
    _one("instance norm", lambda x: F.instance_norm(x), lambda: randn(16, 64, 256, 256)),
    _one("norm over channels", channel_norm, lambda: randn(32, 192, 96, 96), vector(192)),
    _one("squeeze and excite", squeezed, images, lambda: randn(*IMAGES[:2])),
    _one("average pool 2", lambda x: F.avg_pool2d(x, 2), images),
    _one("max pool 3 by 2 of 112", lambda x: F.max_pool2d(x, 3, 2, 1),
         lambda: randn(64, 64, 112, 112)),
    _one("average of planes", lambda x: x.mean((2, 3)), images),
    _one("pixel shuffle", lambda x: F.pixel_shuffle(x, 2), lambda: randn(32, 256, 64, 64)),
    _one("bilinear", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
         lambda: randn(16, 128, 64, 64)),
    _one("to channels last", lambda x: x.contiguous(memory_format=torch.channels_last), images),
    _one("padded images", lambda x: F.pad(x, (1, 1, 1, 1)), images),
    _one("transpose 16384x4096", lambda x: x.t().contiguous(), wide),
    _one("triangle", lambda x: x.tril(), lambda: randn(64, 1024, 1024)),
    _one("cumsum 8192x8192", lambda x: x.float().cumsum(-1), lambda: randn(8192, 8192)),
    _one("cumulative log sum", lambda x: torch.logcumsumexp(x, -1),
         lambda: randn(16384, 2048, dtype=F32)),
    _one("embedding by rows", lambda i, x: x[i], lambda: integers(16384, 16384), wide),
    _one("index add", lambda x, i, y: x.index_add(0, i, y),
         lambda: randn(*WIDE, dtype=F32), lambda: integers(16384, 8192),
         lambda: randn(8192, 4096, dtype=F32)),
    _one("outer sum", lambda x, y: x[:, None] + y[None, :], vector(16384), vector(8192)),
    _one("sinusoids", lambda t: torch.cat(((t[:, None] * _frequencies(t)).cos(),
                                           (t[:, None] * _frequencies(t)).sin()), -1),
         lambda: torch.rand(65536, device="cuda") * 1000),
    _one("complex rotation", lambda x, a: torch.view_as_real(
        torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * a).flatten(-2).to(x.dtype),
         lambda: randn(8, 2048, 32, 128),
         lambda: torch.polar(torch.ones(2048, 1, 64), torch.rand(2048, 1, 64)).cuda()),
    _one("focal loss 2**20x91", focal, lambda: randn(2**20, 91), lambda: integers(91, 2**20)),
    _one("z loss 8192x32768", with_z_loss, lambda: randn(8192, 32768),
         lambda: integers(32768, 8192)),
    _one("masked mean of tokens", masked_mean, lambda: randn(256, 512, 768),
         lambda: torch.rand(256, 512, device="cuda") < 0.7),
    _one("rms norm to int8", normed_int8, wide, vector(4096), random=True),
    _one("fp8, rows and columns", fp8_both_ways, wide, lambda: torch.rand(1, device="cuda"),
         random=True),
    _one("patches", patches, lambda: randn(128, 3, 448, 448)),
    _one("shifted windows", windows, lambda: randn(64, 56, 56, 192)),
    _one("short convolution", short_convolution, lambda: randn(8, 4096, 2048),
         lambda: randn(4096, 4)),
    _one("sums of later steps f32", smoothed_steps, lambda: randn(16384, 2048, dtype=F32)),
    _one("cache of keys", cached, lambda: randn(32, 32, 1024, 128), lambda: randn(32, 32, 16, 128),
         lambda: torch.arange(500, 516, device="cuda")),
    _one("gumbel softmax 65536x512", gumbel, lambda: randn(65536, 512),
         lambda: torch.rand(65536, 512, device="cuda") * 0.99 + 0.005),
    _one("adam of 21 parameters f32", many_steps,
         *(lambda s=s: torch.rand(s, device="cuda") for _ in range(4) for s in SIZES)),
    _one("clip 21 gradients", many_norms, *(lambda s=s: randn(*s) for s in SIZES),
         again=tuple(range(len(SIZES)))),
    _one("group norm training 16x256x64x64", lambda x, w, b: F.group_norm(x, 32, w, b),
         lambda: randn(16, 256, 64, 64, grad=True), vector(256, grad=True), vector(256, grad=True),
         backward=True),
    _one("gelu training", lambda x: F.gelu(x), wide_grad, backward=True),
    _one("residual rms norm training",
         lambda x, y, w: (x + y, F.rms_norm(x + y, (4096,), w)), wide_grad, wide_grad,
         vector(4096, grad=True), backward=True),
    _one("softmax training 16x16x1024x1024", lambda x: torch.softmax(x, -1),
         lambda: randn(16, 16, 1024, 1024, grad=True), backward=True),
    _one("max pool training", lambda x: F.max_pool2d(x, 2), lambda: randn(*IMAGES, grad=True),
         backward=True),
    _one("argmax over 1", lambda x: x.argmax(1), lambda: randn(64, 21, 256, 256)),
    _one("one hot", lambda i: F.one_hot(i, 1000).to(BF16), lambda: integers(1000, 65536)),
    _one("variance of tokens", lambda x: x.float().var(1), lambda: randn(64, 2048, 1024)),
    _one("sort 65536x256", lambda x: x.sort(-1), lambda: randn(65536, 256)),
    _one("topk 8 of 65536x256", lambda x: x.topk(8), lambda: randn(65536, 256), random=True),
    _one("product of rows f32", lambda x: x.prod(-1), lambda: randn(65536, 1024, dtype=F32)),
    _one("add of three types", lambda x, y, z: x + y + z, wide, lambda: randn(*WIDE, dtype=F32),
         lambda: randn(*WIDE, dtype=torch.float16)),
    _one("bias and residual, transposed", lambda x, y, b: (x + b).t() + y, wide,
         lambda: randn(4096, 16384), vector(4096)),
]  # fmt: skip


def _frequencies(t: Tensor) -> Tensor:
    return torch.exp(torch.arange(256, device=t.device) * (-math.log(1e4) / 256))
