"""Pieces of programs as users write them, forward and backward: losses of few columns, heads of
detectors, graphs, renderers, recurrences, metrics. None was written with a kernel in mind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_programs import BF16, F32, GpuProgram, integers, randn

BOXES = 1 << 18


def area(b: Tensor) -> Tensor:
    return (b[..., 2] - b[..., 0]).clamp(min=0) * (b[..., 3] - b[..., 1]).clamp(min=0)


def corners(b: Tensor) -> Tensor:
    xy, wh = b[..., :2], b[..., 2:].exp()
    return torch.cat((xy - wh / 2, xy + wh / 2), -1)


def giou(a: Tensor, b: Tensor) -> Tensor:
    a, b = corners(a), corners(b)
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    inner = (high - low).clamp(min=0).prod(-1)
    union = area(a) + area(b) - inner
    around = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).prod(-1)
    return (1 - inner / union + (around - union) / around).mean()


def iou_matrix(a: Tensor, b: Tensor) -> Tensor:
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    inner = (high - low).clamp(min=0).prod(-1)
    return inner / (area(a)[:, None] + area(b)[None] - inner + 1e-7)


def decoded(deltas: Tensor, anchors: Tensor) -> Tensor:
    wh = anchors[:, 2:] - anchors[:, :2]
    center = anchors[:, :2] + wh / 2
    new = deltas[..., :2] * 0.1 * wh + center
    size = (deltas[..., 2:] * 0.2).clamp(max=math.log(1000 / 16)).exp() * wh
    return torch.stack((new - size / 2, new + size / 2), -2).flatten(-2)


def dice(logits: Tensor, labels: Tensor) -> Tensor:
    found = logits.float().softmax(1)
    wanted = F.one_hot(labels, logits.shape[1]).movedim(-1, 1).float()
    both = (found * wanted).sum((2, 3))
    total = found.sum((2, 3)) + wanted.sum((2, 3))
    return 1 - ((2 * both + 1) / (total + 1)).mean() + F.cross_entropy(logits.float(), labels)


def tversky(logits: Tensor, masks: Tensor) -> Tensor:
    p, t = logits.sigmoid().flatten(1), masks.flatten(1)
    tp, fp, fn = (p * t).sum(1), (p * (1 - t)).sum(1), ((1 - p) * t).sum(1)
    return ((1 - (tp + 1) / (tp + 0.3 * fp + 0.7 * fn + 1)) ** 0.75).mean()


def bce_dice(logits: Tensor, masks: Tensor) -> Tensor:
    p = logits.sigmoid()
    both = (p * masks).sum((-2, -1))
    score = (2 * both + 1) / (p.sum((-2, -1)) + masks.sum((-2, -1)) + 1)
    return F.binary_cross_entropy_with_logits(logits, masks) + 1 - score.mean()


def triplet(a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    return F.triplet_margin_loss(a.float(), p.float(), n.float(), margin=0.5)


def contrast(x: Tensor, y: Tensor) -> Tensor:
    x, y = F.normalize(x.float(), dim=-1), F.normalize(y.float(), dim=-1)
    return (2 - 2 * (x * y).sum(-1)).mean() + (x - y).pow(2).sum(-1).clamp(min=1e-6).sqrt().mean()


def both_ways(scores: Tensor) -> Tensor:
    labels = torch.arange(scores.shape[0], device=scores.device)
    s = scores.float() * 14.3
    return (F.cross_entropy(s, labels) + F.cross_entropy(s.t(), labels)) / 2


def barlow(c: Tensor) -> Tensor:
    c = c.float()
    on = (c.diagonal() - 1).pow(2).sum()
    off = c.pow(2).sum() - c.diagonal().pow(2).sum()
    return on + 0.005 * off


def vicreg(x: Tensor) -> Tensor:
    x = x.float()
    std = torch.sqrt(x.var(0) + 1e-4)
    return F.relu(1 - std).mean()


def elbo(mean: Tensor, log: Tensor, noise: Tensor, x: Tensor) -> Tensor:
    z = mean + noise * (0.5 * log).exp()
    kl = -0.5 * (1 + log - mean.pow(2) - log.exp()).sum(-1).mean()
    return F.mse_loss(z, x) + 0.1 * kl


def gaussian_nll(mean: Tensor, log: Tensor, x: Tensor) -> Tensor:
    var = F.softplus(log) + 1e-4
    return 0.5 * (var.log() + (x - mean) ** 2 / var + math.log(2 * math.pi)).sum(-1).mean()


def mixture(logits: Tensor, mean: Tensor, log: Tensor, x: Tensor) -> Tensor:
    log = log.clamp(min=-7)
    each = -0.5 * ((x[:, None] - mean) * (-log).exp()) ** 2 - log
    return -torch.logsumexp(F.log_softmax(logits, -1) + each, -1).mean()


def pinball(found: Tensor, x: Tensor, levels: Tensor) -> Tensor:
    error = x[:, None] - found
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def policy(logits: Tensor, actions: Tensor, old: Tensor, gains: Tensor) -> Tensor:
    logs = F.log_softmax(logits.float(), -1)
    new = logs.gather(-1, actions[:, None]).squeeze(-1)
    gains = (gains - gains.mean()) / (gains.std() + 1e-8)
    ratio = (new - old).exp()
    clipped = torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains)
    entropy = -(logs.exp() * logs).sum(-1)
    return -clipped.mean() - 0.01 * entropy.mean()


def preference(chosen: Tensor, rejected: Tensor, a: Tensor, b: Tensor) -> Tensor:
    def score(x: Tensor, labels: Tensor) -> Tensor:
        logs = x.float().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
        return (logs * (labels != 0)).sum(-1)

    return -F.logsigmoid(0.1 * (score(chosen, a) - score(rejected, b))).mean()


def returns(rewards: Tensor, values: Tensor, ends: Tensor) -> Tensor:
    gain, found = torch.zeros_like(rewards[0]), list[Tensor]()
    for t in reversed(range(rewards.shape[0] - 1)):
        delta = rewards[t] + 0.99 * values[t + 1] * ends[t] - values[t]
        gain = delta + 0.99 * 0.95 * ends[t] * gain
        found.append(gain)
    return torch.stack(found[::-1])


def psnr(x: Tensor, y: Tensor) -> Tensor:
    return (10 * torch.log10(1 / (x - y).pow(2).mean((1, 2, 3)))).mean()


def ssim(x: Tensor, y: Tensor) -> Tensor:
    mx, my = F.avg_pool2d(x, 7, 1), F.avg_pool2d(y, 7, 1)
    vx = F.avg_pool2d(x * x, 7, 1) - mx * mx
    vy = F.avg_pool2d(y * y, 7, 1) - my * my
    both = F.avg_pool2d(x * y, 7, 1) - mx * my
    over = (2 * mx * my + 1e-4) * (2 * both + 9e-4)
    return (over / ((mx * mx + my * my + 1e-4) * (vx + vy + 9e-4))).mean()


def variation(x: Tensor) -> Tensor:
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def sobel(x: Tensor) -> Tensor:
    p = F.pad(x, (1, 1, 1, 1), mode="reflect")
    gx = (p[..., :-2, 2:] + 2 * p[..., 1:-1, 2:] + p[..., 2:, 2:]
          - p[..., :-2, :-2] - 2 * p[..., 1:-1, :-2] - p[..., 2:, :-2])  # fmt: skip
    gy = (p[..., 2:, :-2] + 2 * p[..., 2:, 1:-1] + p[..., 2:, 2:]
          - p[..., :-2, :-2] - 2 * p[..., :-2, 1:-1] - p[..., :-2, 2:])  # fmt: skip
    return (gx * gx + gy * gy + 1e-6).sqrt()


def rendered(raw: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    far = torch.full_like(depths[:, :1], 1e10)
    away = torch.cat((depths[:, 1:] - depths[:, :-1], far), -1)
    alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * away)
    clear = torch.cumprod(torch.cat((torch.ones_like(far), 1 - alpha + 1e-10), -1), -1)[:, :-1]
    weights = alpha * clear
    return (weights[..., None] * raw[..., :3].sigmoid()).sum(-2), (weights * depths).sum(-1)


def positions(x: Tensor) -> Tensor:
    scaled = x[..., None] * 2.0 ** torch.arange(10, device=x.device)
    return torch.cat((x, scaled.sin().flatten(-2), scaled.cos().flatten(-2)), -1)


def quantized(x: Tensor, codes: Tensor, distances: Tensor) -> tuple[Tensor, Tensor]:
    found = codes[distances.argmin(-1)]
    loss = F.mse_loss(found.detach(), x) + 0.25 * F.mse_loss(found, x.detach())
    return x + (found - x).detach(), loss


def edges(x: Tensor, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, target, x[source] * weight[:, None])


def edge_softmax(scores: Tensor, target: Tensor, nodes: Tensor) -> Tensor:
    index = target[:, None].expand_as(scores)
    most = torch.full_like(nodes, -1e9).scatter_reduce(0, index, scores, "amax")
    exp = (scores - most[target]).exp()
    return exp / (torch.zeros_like(nodes).scatter_add(0, index, exp)[target] + 1e-16)


def bag(table: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    found = table[index] * mask[..., None]
    return found.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def crosses(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return (x[:, first] * x[:, second]).sum(-1)


def machine(x: Tensor) -> Tensor:
    return 0.5 * (x.sum(1).pow(2) - x.pow(2).sum(1)).sum(-1)


def gates(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(x: Tensor, g: Tensor, h: Tensor) -> Tensor:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), g.chunk(3, -1)
    z = (xz + hz).sigmoid()
    return (1 - z) * (xn + (xr + hr).sigmoid() * hn).tanh() + z * h


def shifted(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    before = F.pad(x, (0, 0, 1, -1))
    return x * a + before * (1 - a), x * b + before * (1 - b)


def selective(x: Tensor, step: Tensor, a: Tensor, b: Tensor) -> Tensor:
    step = F.softplus(step.float())
    return torch.exp(step[..., None] * -torch.exp(a)) + (step * x)[..., None] * b[:, :, None]


def relative(scores: Tensor, table: Tensor, index: Tensor) -> Tensor:
    bias = table[index].permute(2, 0, 1)
    return (scores.float() + bias).softmax(-1).to(scores.dtype)


def buckets(length: int) -> Tensor:
    place = torch.arange(length, device="cuda")
    n = (place[:, None] - place[None]).clamp(min=0)
    far = 16 + (torch.log(n.float().clamp(min=1) / 16) / math.log(8) * 16).long()
    return torch.where(n < 16, n, far.clamp(max=31))


def windows(x: Tensor) -> Tensor:
    b, h, w, c = x.shape
    x = torch.roll(x, (-3, -3), (1, 2)).view(b, h // 7, 7, w // 7, 7, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, c)


def scaled_block(x: Tensor, y: Tensor, scale: Tensor, drop: Tensor) -> Tensor:
    return x + drop[:, None, None, None] * scale[:, None, None] * y


def film(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32) * (1 + gamma[..., None, None]) + beta[..., None, None])


def response(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    norm = x.float().norm(dim=(1, 2), keepdim=True)
    return (gamma * (x * (norm / (norm.mean(-1, keepdim=True) + 1e-6))) + beta + x).to(x.dtype)


def attention_pool(x: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (x.float() * weights[..., None]).sum(1)


def penalised(logits: Tensor, seen: Tensor) -> Tensor:
    held = logits.gather(-1, seen)
    held = torch.where(held < 0, held * 1.2, held / 1.2)
    return logits.scatter(-1, seen, held).div(0.7).softmax(-1)


def sampled(logits: Tensor, noise: Tensor) -> Tensor:
    return (logits.float() / 0.8 - (-noise.log()).log()).argmax(-1)


def calibration(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sure, found = logits.float().softmax(-1).max(-1)
    bins = (sure * 15).long().clamp(max=14)
    zeros = torch.zeros(15, device=logits.device)
    right = (found == labels).float()
    return (zeros.index_add(0, bins, sure), zeros.index_add(0, bins, right),
            zeros.index_add(0, bins, torch.ones_like(sure)))  # fmt: skip


def confusion(found: Tensor, labels: Tensor) -> Tensor:
    return torch.zeros(441, device=found.device).index_add(
        0, labels * 21 + found, torch.ones_like(found, dtype=F32)
    )


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean()


def spectrum(x: Tensor) -> Tensor:
    frames = x.unfold(-1, 512, 256) * torch.hann_window(512, device=x.device)
    return (frames**2).mean(-1).clamp(min=1e-10).log10()


def power(re: Tensor, im: Tensor) -> Tensor:
    db = 10 * (re * re + im * im).clamp(min=1e-10).log10()
    return torch.maximum(db, db.amax((-2, -1), keepdim=True) - 80)


def weight_norm(v: Tensor, g: Tensor) -> Tensor:
    return v * (g / v.norm(dim=1, keepdim=True))


def factored(grad: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    square = grad * grad + 1e-30
    rows = rows.lerp(square.mean(-1), 0.1)
    columns = columns.lerp(square.mean(-2), 0.1)
    factor = (rows / rows.mean()).rsqrt()[:, None] * columns.rsqrt()[None]
    update = grad * factor
    return update / (update.square().mean().sqrt()).clamp(min=1.0), rows, columns


def trusted(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
    update = m / (v.sqrt() + 1e-6) + 0.01 * p
    ratio = torch.where(update.norm() > 0, p.norm() / update.norm(), 1.0)
    return p - 1e-3 * ratio * update


def noised(x: Tensor, noise: Tensor, alphas: Tensor, steps: Tensor) -> Tensor:
    a = alphas[steps][:, None, None, None]
    return a.sqrt() * x + (1 - a).sqrt() * noise


def guided(x: Tensor, both: Tensor, alpha: float = 0.7, after: float = 0.8) -> Tensor:
    free, held = both.chunk(2)
    eps = free + 7.5 * (held - free)
    start = ((x - math.sqrt(1 - alpha) * eps) / math.sqrt(alpha)).clamp(-1, 1)
    return math.sqrt(after) * start + math.sqrt(1 - after) * eps


def distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, :, None] - y[:, None]).pow(2).sum(-1).amin(-1).mean()


def skipped(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((F.interpolate(x, scale_factor=2), y), 1).relu()


def quats(q: Tensor, v: Tensor) -> Tensor:
    q = F.normalize(q, dim=-1)
    t = 2 * torch.linalg.cross(q[..., 1:], v)
    return v + q[..., :1] * t + torch.linalg.cross(q[..., 1:], t)


def hinge(x: Tensor, labels: Tensor) -> Tensor:
    right = x.gather(1, labels[:, None])
    return F.relu(x - right + 1).scatter(1, labels[:, None], 0.0).sum(1).mean()


def masked_l1(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return ((x - y).abs() * mask[..., None]).sum() / (mask.sum() * x.shape[-1]).clamp(min=1)


def f32(*shape: int, grad: bool = False) -> Tensor:
    return randn(*shape, dtype=F32, grad=grad)


def learned(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    return tuple(randn(*shape, dtype=dtype, grad=True) for shape in shapes)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, device="cuda")


def boxes(n: int) -> Tensor:
    low = uniform(n, 2)
    return torch.cat((low, low + 0.01 + uniform(n, 2)), -1)


def some(*shape: int) -> Tensor:
    return uniform(*shape) > 0.3


def training(
    name: str, fn: Callable[..., Any], inputs: Callable[[], tuple[Any, ...]]
) -> GpuProgram:
    return GpuProgram(name, fn, inputs, backward=True)


WRITTEN = (
    training("giou", giou, lambda: (f32(BOXES, 4, grad=True), f32(BOXES, 4))),
    GpuProgram("iou matrix", iou_matrix, lambda: (boxes(8192), boxes(4096))),
    training("decoded boxes", decoded, lambda: (f32(16, 1 << 17, 4, grad=True), boxes(1 << 17))),
    training(
        "dice", dice, lambda: (randn(16, 21, 512, 512, grad=True), integers(21, 16, 512, 512))
    ),
    training(
        "tversky",
        tversky,
        lambda: (f32(64, 1, 512, 512, grad=True), uniform(64, 1, 512, 512).round()),
    ),
    training(
        "bce and dice",
        bce_dice,
        lambda: (f32(32, 4, 512, 512, grad=True), uniform(32, 4, 512, 512).round()),
    ),
    training("triplet", triplet, lambda: learned(*3 * [(65536, 256)])),
    training("contrast", contrast, lambda: (randn(65536, 512, grad=True), randn(65536, 512))),
    training("both ways", both_ways, lambda: (randn(8192, 8192, grad=True),)),
    training("barlow", barlow, lambda: (randn(8192, 8192, grad=True),)),
    training("vicreg", vicreg, lambda: (randn(32768, 2048, grad=True),)),
    training(
        "elbo",
        elbo,
        lambda: (
            f32(131072, 128, grad=True),
            f32(131072, 128, grad=True),
            f32(131072, 128),
            f32(131072, 128),
        ),
    ),
    training(
        "gaussian nll",
        gaussian_nll,
        lambda: (f32(1 << 20, 17, grad=True), f32(1 << 20, 17, grad=True), f32(1 << 20, 17)),
    ),
    training(
        "mixture",
        mixture,
        lambda: (
            f32(1 << 20, 10, grad=True),
            f32(1 << 20, 10, grad=True),
            f32(1 << 20, 10, grad=True),
            f32(1 << 20),
        ),
    ),
    training("pinball", pinball, lambda: (f32(1 << 20, 9, grad=True), f32(1 << 20), uniform(9))),
    training(
        "policy",
        policy,
        lambda: (
            randn(1 << 20, 18, grad=True),
            integers(18, 1 << 20),
            -uniform(1 << 20),
            f32(1 << 20),
        ),
    ),
    training(
        "preference",
        preference,
        lambda: (
            randn(4, 1024, 32000, grad=True),
            randn(4, 1024, 32000, grad=True),
            integers(32000, 4, 1024),
            integers(32000, 4, 1024),
        ),
    ),
    GpuProgram(
        "returns", returns, lambda: (f32(64, 65536), f32(64, 65536), some(64, 65536).float())
    ),
    GpuProgram("psnr", psnr, lambda: (uniform(32, 3, 512, 512), uniform(32, 3, 512, 512))),
    training("ssim", ssim, lambda: (f32(32, 3, 256, 256, grad=True), f32(32, 3, 256, 256))),
    training("variation", variation, lambda: (f32(32, 3, 512, 512, grad=True),)),
    GpuProgram("sobel", sobel, lambda: (f32(64, 1, 512, 512),)),
    training(
        "rendered", rendered, lambda: (f32(65536, 64, 4, grad=True), uniform(65536, 64).cumsum(-1))
    ),
    GpuProgram("positions", positions, lambda: (uniform(1 << 20, 3),)),
    training(
        "quantized",
        quantized,
        lambda: (f32(65536, 64, grad=True), f32(512, 64, grad=True), f32(65536, 512)),
    ),
    training(
        "edges",
        edges,
        lambda: (
            f32(65536, 64, grad=True),
            integers(65536, 1 << 20),
            integers(65536, 1 << 20),
            uniform(1 << 20),
        ),
    ),
    GpuProgram(
        "edge softmax",
        edge_softmax,
        lambda: (f32(1 << 21, 4), integers(65536, 1 << 21), f32(65536, 4)),
    ),
    training(
        "bag",
        bag,
        lambda: (f32(100000, 64, grad=True), integers(100000, 32768, 20), some(32768, 20).float()),
    ),
    GpuProgram(
        "crosses",
        crosses,
        lambda: (randn(16384, 27, 128), *torch.triu_indices(27, 27, 1, device="cuda")),
    ),
    training("machine", machine, lambda: (f32(65536, 39, 16, grad=True),)),
    training(
        "lstm gates",
        gates,
        lambda: learned((16384, 4096), (16384, 4096), (16384, 1024)),
    ),
    training(
        "gru",
        gru,
        lambda: learned((16384, 3072), (16384, 3072), (16384, 1024)),
    ),
    training(
        "shifted tokens",
        shifted,
        lambda: learned((16, 2048, 2048), (2048,), (2048,)),
    ),
    GpuProgram(
        "selective",
        selective,
        lambda: (f32(4, 1024, 512), randn(4, 1024, 512), f32(512, 16), f32(4, 1024, 16)),
    ),
    training(
        "relative bias",
        relative,
        lambda: (randn(8, 16, 1024, 1024, grad=True), f32(32, 16, grad=True), buckets(1024)),
    ),
    GpuProgram("windows", windows, lambda: (randn(64, 56, 56, 192),)),
    training(
        "scaled block",
        scaled_block,
        lambda: (
            randn(64, 384, 28, 28, grad=True),
            randn(64, 384, 28, 28, grad=True),
            randn(384, grad=True),
            some(64).to(BF16),
        ),
    ),
    training(
        "film",
        film,
        lambda: learned((16, 320, 64, 64), (16, 320), (16, 320)),
    ),
    training(
        "response norm",
        response,
        lambda: learned((64, 28, 28, 512), (512,), (512,)),
    ),
    training(
        "attention pool",
        attention_pool,
        lambda: (randn(256, 512, 768, grad=True), f32(256, 512, grad=True), some(256, 512)),
    ),
    GpuProgram(
        "penalised",
        penalised,
        lambda: (
            f32(512, 50257),
            integers(50000, 512, 1) + torch.arange(256, device="cuda"),
        ),
    ),
    GpuProgram("sampled", sampled, lambda: (randn(2048, 32000), uniform(2048, 32000))),
    GpuProgram("calibration", calibration, lambda: (randn(65536, 1000), integers(1000, 65536))),
    GpuProgram("confusion", confusion, lambda: (integers(21, 1 << 22), integers(21, 1 << 22))),
    GpuProgram("accuracy", accuracy, lambda: (randn(65536, 1000), integers(1000, 65536))),
    GpuProgram("spectrum", spectrum, lambda: (f32(64, 16000 * 30),)),
    GpuProgram("power", power, lambda: (f32(64, 201, 3000), f32(64, 201, 3000))),
    training("weight norm", weight_norm, lambda: learned((8192, 4096), (8192, 1), dtype=F32)),
    GpuProgram("factored", factored, lambda: (f32(8192, 8192), uniform(8192), uniform(8192))),
    GpuProgram("trusted", trusted, lambda: (f32(8192, 4096), f32(8192, 4096), uniform(8192, 4096))),
    GpuProgram(
        "noised",
        noised,
        lambda: (f32(256, 4, 128, 128), f32(256, 4, 128, 128), uniform(1000), integers(1000, 256)),
    ),
    GpuProgram("guided", guided, lambda: (randn(128, 4, 128, 128), randn(256, 4, 128, 128))),
    training("distances", distances, lambda: learned((8, 2048, 3), (8, 2048, 3), dtype=F32)),
    training(
        "skipped",
        skipped,
        lambda: learned((16, 128, 64, 64), (16, 64, 128, 128)),
    ),
    training("quats", quats, lambda: learned((1 << 20, 4), (1 << 20, 3), dtype=F32)),
    training("hinge", hinge, lambda: (f32(1 << 17, 100, grad=True), integers(100, 1 << 17))),
    training(
        "masked l1",
        masked_l1,
        lambda: (f32(64, 1024, 80, grad=True), f32(64, 1024, 80), some(64, 1024).float()),
    ),
)
