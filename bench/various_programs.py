"""Programs of many fields, as their users write them: images, language, sound, physics, tables,
statistics, optimizers. None of them was looked at when kernels were designed."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_programs import BF16, F32, GpuProgram, integers, randn
from bench.served_programs import nbytes
from bench.trained_programs import learned, of_each, training
from bench.written_programs import f32, uniform

F16 = torch.float16

# ---- images


def adain(content: Tensor, style: Tensor) -> Tensor:
    a, b = content.flatten(2).float(), style.flatten(2).float()
    mean, std = a.mean(-1, keepdim=True), a.std(-1, keepdim=True) + 1e-5
    out = (a - mean) / std * b.std(-1, keepdim=True) + b.mean(-1, keepdim=True)
    return out.view_as(content).to(content.dtype)


def squeezed(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.sigmoid(x.mean((2, 3), keepdim=True) * w[:, None, None])


def spatial_attention(x: Tensor) -> Tensor:
    both = torch.cat((x.amax(1, keepdim=True), x.mean(1, keepdim=True)), 1)
    return x * torch.sigmoid(both.sum(1, keepdim=True))


def shuffled(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return F.relu(x.view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w))


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    ce = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    p = torch.sigmoid(logits)
    pt = p * labels + (1 - p) * (1 - labels)
    at = 0.25 * labels + 0.75 * (1 - labels)
    return (at * (1 - pt) ** 2 * ce).sum(-1).mean()


def hsv(image: Tensor) -> Tensor:
    high, at = image.max(1)
    low = image.amin(1)
    span = (high - low).clamp(min=1e-6)
    r, g, b = image.unbind(1)
    hue = torch.stack(((g - b) / span % 6, (b - r) / span + 2, (r - g) / span + 4), 1)
    hue = hue.gather(1, at[:, None])[:, 0] / 6
    return torch.stack((hue, span / (high + 1e-6), high), 1)


def mixed(x: Tensor, order: Tensor, lam: Tensor) -> Tensor:
    lam = lam[:, None, None, None]
    return x * lam + x[order] * (1 - lam)


def pyramid(fine: Tensor, coarse: Tensor) -> Tensor:
    return fine + F.interpolate(coarse, scale_factor=2, mode="nearest")


def patches_loss(image: Tensor, found: Tensor, mask: Tensor) -> Tensor:
    n, c, h, w = image.shape
    p = (
        image.view(n, c, h // 16, 16, w // 16, 16)
        .permute(0, 2, 4, 3, 5, 1)
        .flatten(3)
        .flatten(1, 2)
    )
    p = (p - p.mean(-1, keepdim=True)) / (p.var(-1, keepdim=True) + 1e-6) ** 0.5
    loss = (found.float() - p).square().mean(-1)
    return (loss * mask).sum() / mask.sum()


def shuffled_pixels(x: Tensor) -> Tensor:
    return F.leaky_relu(F.pixel_shuffle(x, 2), 0.2)


def warped(image: Tensor, flow: Tensor) -> Tensor:
    h, w = image.shape[2:]
    y, x = torch.meshgrid(torch.arange(h, device=image.device),
                          torch.arange(w, device=image.device), indexing="ij")  # fmt: skip
    at = torch.stack((x + flow[:, 0], y + flow[:, 1]), -1)
    at = at * torch.tensor([2 / (w - 1), 2 / (h - 1)], device=image.device) - 1
    return F.grid_sample(image, at, align_corners=True, padding_mode="border")


def charbonnier(a: Tensor, b: Tensor) -> Tensor:
    loss = ((a - b).square() + 1e-6).sqrt().mean()
    dx = (a[..., 1:] - a[..., :-1]) - (b[..., 1:] - b[..., :-1])
    return loss + 0.1 * dx.abs().mean()


def channel_norm(x: Tensor) -> Tensor:
    return F.normalize(x, dim=1)


def soft_argmax(maps: Tensor) -> Tensor:
    n, k, h, w = maps.shape
    p = maps.flatten(2).float().softmax(-1).view(n, k, h, w)
    ys, xs = torch.arange(h, device=maps.device), torch.arange(w, device=maps.device)
    return torch.stack(((p.sum(2) * xs).sum(-1), (p.sum(3) * ys).sum(-1)), -1)


def heatmaps(points: Tensor) -> Tensor:
    at = torch.arange(128, device=points.device, dtype=points.dtype)
    dx = (at - points[..., :1]).square()
    dy = (at - points[..., 1:]).square()
    return torch.exp(-(dy[..., :, None] + dx[..., None, :]) / 8)


def matrix_nms(iou: Tensor, scores: Tensor) -> Tensor:
    iou = iou.triu(1)
    most = iou.amax(1, keepdim=True)
    decay = torch.exp(-2 * (iou.square() - most.square())).amin(1)
    return scores * decay


def instance_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.leaky_relu(F.instance_norm(x, weight=w, bias=b), 0.2)


def gray_moments(image: Tensor) -> Any:
    gray = (image * image.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1)
    mean = gray.mean((1, 2), keepdim=True)
    return ((gray - mean) * 1.4 + mean).clamp(0, 1)


def cut(x: Tensor, y: Tensor, boxes: Tensor) -> Tensor:
    h, w = torch.arange(x.shape[2], device=x.device), torch.arange(x.shape[3], device=x.device)
    rows = (h >= boxes[:, :1]) & (h < boxes[:, 2:3])
    columns = (w >= boxes[:, 1:2]) & (w < boxes[:, 3:])
    return torch.where((rows[:, :, None] & columns[:, None])[:, None], y, x)


# ---- language


def alibi(scores: Tensor, slopes: Tensor) -> Tensor:
    at = torch.arange(scores.shape[-1], device=scores.device)
    bias = (at[None, :] - at[:, None]) * slopes[:, None, None]
    seen = at[None, :] <= at[:, None]
    return (scores.float() + bias).masked_fill(~seen, float("-inf")).softmax(-1).to(scores.dtype)


def sliding(scores: Tensor) -> Tensor:
    at = torch.arange(scores.shape[-1], device=scores.device)
    seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 256)
    return (50 * torch.tanh(scores.float() / 50)).masked_fill(~seen, -1e9).softmax(-1).to(BF16)


def head_norm(qkv: Tensor, wq: Tensor, wk: Tensor) -> Any:
    q, k, v = qkv.unflatten(-1, (3, -1, 128)).unbind(2)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * (1 + w)).to(x.dtype)

    return norm(q, wq).transpose(1, 2).contiguous(), norm(k, wk).transpose(1, 2).contiguous(), v


def balanced(logits: Tensor) -> tuple[Tensor, Tensor]:
    p = logits.float().softmax(-1)
    top, at = p.topk(2, -1)
    share = F.one_hot(at, p.shape[-1]).float().sum(1).mean(0)
    return top / top.sum(-1, keepdim=True), (share * p.mean(0)).sum() * p.shape[-1]


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100,
                           label_smoothing=0.1)  # fmt: skip


def entropy(logits: Tensor) -> Tensor:
    logs = logits.float().log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def grpo(logits: Tensor, old: Tensor, ref: Tensor, tokens: Tensor, adv: Tensor,
         mask: Tensor) -> Tensor:  # fmt: skip
    logp = logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    ratio = torch.exp(logp - old)
    gain = torch.minimum(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None])
    kl = torch.exp(ref - logp) - (ref - logp) - 1
    return (-(gain - 0.04 * kl) * mask).sum(1).div(mask.sum(1)).mean()


def gumbel(logits: Tensor, noise: Tensor) -> Tensor:
    y = (logits - torch.log(-torch.log(noise.clamp(1e-6, 1 - 1e-6)))) / 0.5
    soft = y.softmax(-1)
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hard - soft.detach() + soft


def modulated(x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    n = F.layer_norm(x, x.shape[-1:], eps=1e-6)
    return y + gate[:, None] * (n * (1 + scale[:, None]) + shift[:, None])


def squared_relu(x: Tensor, b: Tensor) -> Tensor:
    return F.relu(x + b).square()


def geglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return a * F.gelu(b, approximate="tanh")


def drop_path(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    keep = (torch.rand(x.shape[0], 1, 1, device=x.device) > 0.1).to(x.dtype)
    return x + y * scale * keep / 0.9


def repeated_heads(k: Tensor, v: Tensor) -> Any:
    return tuple(t.transpose(1, 2).repeat_interleave(4, 1) for t in (k, v))


def packed_int4(w: Tensor) -> Any:
    g = w.float().unflatten(-1, (-1, 32))
    low, high = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6)
    q = ((g - low) / scale).round().clamp(0, 15).to(torch.uint8).flatten(-2)
    return q[:, ::2] | (q[:, 1::2] << 4), scale.squeeze(-1).half(), low.squeeze(-1).half()


def unpacked_int4(q: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    w = torch.stack((q & 15, q >> 4), -1).flatten(-2).unflatten(-1, (-1, 32))
    return (w.to(F16) * scale[..., None] + low[..., None]).flatten(-2)


def by_token(x: Tensor) -> Any:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-5) / 127
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def by_channel(w: Tensor) -> Any:
    scale = w.abs().amax(0, keepdim=True).float().clamp(min=1e-5) / 127
    return (w.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def delayed(x: Tensor, scale: Tensor) -> Any:
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), x.abs().amax().float()


def both_fp8(x: Tensor, scale: Tensor) -> Any:
    y = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return y, y.t().contiguous()


def scaled_embedding(ids: Tensor, table: Tensor, w: Tensor) -> Tensor:
    x = F.embedding(ids, table) * math.sqrt(table.shape[1])
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def reward_pairs(chosen: Tensor, rejected: Tensor, mask: Tensor) -> Tensor:
    a, b = ((t.float() * mask).sum(1) / mask.sum(1) for t in (chosen, rejected))
    return -F.logsigmoid(a - b).mean() + 0.01 * (a.square() + b.square()).mean()


# ---- sound and time


def log_mel(power: Tensor) -> Tensor:
    x = power.clamp(min=1e-10).log10()
    x = torch.maximum(x, x.amax((1, 2), keepdim=True) - 8)
    return (x + 4) / 4


def mu_law(x: Tensor) -> Tensor:
    y = x.sign() * torch.log1p(255 * x.abs()) / math.log(256)
    return ((y + 1) / 2 * 255 + 0.5).long()


def spec_augmented(x: Tensor, start: Tensor, width: Tensor) -> Tensor:
    at = torch.arange(x.shape[2], device=x.device)
    hidden = (at >= start[:, None]) & (at < (start + width)[:, None])
    return x.masked_fill(hidden[:, None], 0.0) - x.mean((1, 2), keepdim=True)


def si_snr(found: Tensor, wanted: Tensor) -> Tensor:
    a, b = (t - t.mean(-1, keepdim=True) for t in (found, wanted))
    along = (a * b).sum(-1, keepdim=True) / (b.square().sum(-1, keepdim=True) + 1e-8) * b
    ratio = along.square().sum(-1) / ((a - along).square().sum(-1) + 1e-8)
    return -10 * torch.log10(ratio + 1e-8).mean()


def rolling(x: Tensor) -> Tensor:
    sums = F.pad(x.cumsum(1), (1, 0))
    return x[:, 31:] - (sums[:, 32:] - sums[:, :-32]) / 32


def drawdown(prices: Tensor) -> Any:
    peak = prices.cummax(1)[0]
    down = (prices - peak) / peak
    returns = prices[:, 1:] / prices[:, :-1] - 1
    return down.amin(1), returns.mean(1) / (returns.std(1) + 1e-8) * 15.87


def overlap_windows(x: Tensor, window: Tensor) -> Tensor:
    return x.unfold(-1, 400, 160) * window


# ---- physics and geometry


def laplacian(u: Tensor) -> Tensor:
    around = sum(torch.roll(u, s, d) for d in (0, 1, 2) for s in (1, -1))
    return u + 0.1 * (around - 6 * u)


def heat(u: Tensor) -> Tensor:
    p = F.pad(u[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    inner = p[:, 2:, 1:-1] + p[:, :-2, 1:-1] + p[:, 1:-1, 2:] + p[:, 1:-1, :-2] - 4 * u
    return u + 0.2 * inner


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    d = x.square().sum(1)[:, None] + y.square().sum(1)[None] - 2 * x @ y.t()
    return torch.exp(-d.clamp(min=0) / 8).sum(1)


def lennard(pos: Tensor, neighbours: Tensor) -> Any:
    d = pos[:, None] - pos[neighbours]
    r2 = d.square().sum(-1).clamp(min=0.1)
    s6 = (1 / r2) ** 3
    force = (24 * (2 * s6 * s6 - s6) / r2)[..., None] * d
    return force.sum(1), (4 * (s6 * s6 - s6)).sum()


def rotations(axis: Tensor) -> Tensor:
    angle = axis.norm(dim=-1, keepdim=True).clamp(min=1e-8)
    x, y, z = (axis / angle).unbind(-1)
    c, s = angle[..., 0].cos(), angle[..., 0].sin()
    t = 1 - c
    rows = (t * x * x + c, t * x * y - s * z, t * x * z + s * y,
            t * x * y + s * z, t * y * y + c, t * y * z - s * x,
            t * x * z - s * y, t * y * z + s * x, t * z * z + c)  # fmt: skip
    return torch.stack(rows, -1).view(*axis.shape[:-1], 3, 3)


def inverses(m: Tensor) -> Tensor:
    a, b, c = m.unbind(-2)
    rows = torch.stack((torch.linalg.cross(b, c), torch.linalg.cross(c, a),
                        torch.linalg.cross(a, b)), -1)  # fmt: skip
    return rows / (a * rows[..., 0]).sum(-1)[..., None, None]


def haversine(a: Tensor, b: Tensor) -> Tensor:
    a, b = torch.deg2rad(a), torch.deg2rad(b)
    d = a[:, None] - b[None]
    h = (d[..., 0] / 2).sin() ** 2 + a[:, None, 0].cos() * b[None, :, 0].cos() * (
        d[..., 1] / 2
    ).sin() ** 2
    return 12742 * torch.asin(h.clamp(0, 1).sqrt())


def projected(points: Tensor, matrix: Tensor, k: Tensor) -> Any:
    p = (matrix[:, None, :, :3] * points[..., None, :]).sum(-1) + matrix[:, None, :, 3]
    depth = p[..., 2].clamp(min=1e-3)
    uv = p[..., :2] / depth[..., None] * k[:2] + k[2:]
    inside = (uv > 0).all(-1) & (uv < 640).all(-1)
    return uv, depth, inside


def chamfer(a: Tensor, b: Tensor) -> Tensor:
    d = (a[:, :, None] - b[:, None]).square().sum(-1)
    return d.amin(2).mean() + d.amin(1).mean()


def complex_filter(x: Tensor, h: Tensor) -> Tensor:
    y = torch.view_as_complex(x) * torch.view_as_complex(h)
    return torch.view_as_real(y).square().sum(-1).sqrt()


# ---- tables, graphs and statistics


def assigned(x: Tensor, centers: Tensor) -> Any:
    d = centers.square().sum(1) - 2 * x @ centers.t()
    at = d.argmin(1)
    total = torch.zeros_like(centers).index_add_(0, at, x)
    count = torch.zeros(len(centers), device=x.device).index_add_(0, at, torch.ones_like(x[:, 0]))
    return at, total / count.clamp(min=1)[:, None]


def mean_of_neighbours(x: Tensor, edges: Tensor) -> Tensor:
    source, to = edges
    total = torch.zeros_like(x).index_add_(0, to, x[source])
    degree = torch.zeros(len(x), device=x.device).index_add_(0, to, torch.ones_like(to, dtype=F32))
    return total / degree.clamp(min=1)[:, None]


def segment_max(x: Tensor, at: Tensor) -> Tensor:
    out = x.new_full((4096, x.shape[1]), float("-inf"))
    return out.scatter_reduce(0, at[:, None].expand_as(x), x, "amax")


def standardised(x: Tensor) -> Tensor:
    return ((x - x.mean(0)) / (x.std(0) + 1e-6)).clamp(-5, 5)


def binned(x: Tensor, edges: Tensor) -> Tensor:
    return torch.bucketize(x, edges)


def counted(x: Tensor) -> Tensor:
    at = ((x.clamp(-4, 4) + 4) * 32).long().clamp(max=255)
    return torch.zeros(256, device=x.device).scatter_add_(0, at, torch.ones_like(x))


def many_tables(ids: Tensor, tables: Tensor, dense: Tensor) -> Tensor:
    found = tables[torch.arange(26, device=ids.device), ids]
    return torch.cat((dense, found.flatten(1)), 1)


def negative_binomial(mu: Tensor, theta: Tensor, x: Tensor) -> Tensor:
    both = torch.log(theta + mu + 1e-8)
    got = theta * (torch.log(theta + 1e-8) - both) + x * (torch.log(mu + 1e-8) - both)
    return -(got + torch.lgamma(x + theta) - torch.lgamma(theta) - torch.lgamma(x + 1)).mean()


def student(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    scale = F.softplus(scale) + 1e-4
    z = (x - mean) / scale
    return (scale.log() + 2.5 * torch.log1p(z * z / 4)).sum(-1).mean()


def crf_step(alpha: Tensor, transitions: Tensor, emission: Tensor) -> Tensor:
    return torch.logsumexp(alpha[:, :, None] + transitions, 1) + emission


def viterbi_step(alpha: Tensor, transitions: Tensor, emission: Tensor) -> Any:
    best, at = (alpha[:, :, None] + transitions).max(1)
    return best + emission, at


def sinkhorn(cost: Tensor) -> Tensor:
    x = -cost / 0.1
    for _ in range(3):
        x = x - x.logsumexp(2, keepdim=True)
        x = x - x.logsumexp(1, keepdim=True)
    return x.exp()


def correlation(x: Tensor) -> Any:
    low, high = x.amin(0), x.amax(0)
    mean, var = x.mean(0), x.var(0)
    skew = ((x - mean) ** 3).mean(0) / var**1.5
    return low, high, mean, var, skew


def missing(x: Tensor, fill: Tensor) -> Any:
    empty = torch.isnan(x)
    return torch.where(empty, fill, x), empty.sum(0), empty.any(1)


def margins(embedded: Tensor, labels: Tensor) -> Tensor:
    same = labels[:, None] == labels[None]
    away = torch.where(same, embedded, float("-inf")).amax(1)
    near = torch.where(same, float("inf"), embedded).amin(1)
    return F.relu(away - near + 0.3).mean()


def ranked(scores: Tensor, gains: Tensor) -> Tensor:
    order = scores.argsort(1, descending=True)
    by = gains.gather(1, order)
    weight = 1 / torch.log2(torch.arange(2, by.shape[1] + 2, device=by.device).float())
    ideal = gains.sort(1, descending=True)[0]
    return ((by * weight).sum(1) / (ideal * weight).sum(1).clamp(min=1e-6)).mean()


# ---- optimizers


def lion(p: Tensor, g: Tensor, m: Tensor) -> Any:
    step = torch.sign(m * 0.9 + g.float() * 0.1)
    return p * (1 - 1e-4) - 1e-4 * step, m * 0.99 + g.float() * 0.01


def unscaled(gs: list[Tensor], scale: Tensor) -> Any:
    inverse = 1 / scale
    out = [g * inverse for g in gs]
    bad = torch.stack([~torch.isfinite(g).all() for g in out]).any()
    return out, bad


def rowwise_adagrad(w: Tensor, state: Tensor, g: Tensor, at: Tensor) -> Any:
    state = state.index_add(0, at, g.square().mean(1))
    step = g / (state[at].sqrt() + 1e-8)[:, None]
    return w.index_add(0, at, step, alpha=-0.01), state


def muon_scale(g: Tensor, m: Tensor) -> Any:
    m = m.lerp(g.float(), 0.05)
    u = g.float().lerp(m, 0.95)
    return (u / (u.norm() + 1e-7)).to(BF16), m


def optimizer_step(ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor],
                   steps: list[Tensor]) -> Any:  # fmt: skip
    torch.optim._functional.adamw(
        ps,
        gs,
        ms,
        vs,
        [],
        steps,
        foreach=True,
        capturable=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.999,
        lr=1e-3,
        weight_decay=0.01,
        eps=1e-8,
        maximize=False,
    )
    return ps, ms, vs


def edges_of(nodes: int, count: int) -> Tensor:
    return integers(nodes, 2, count)


VARIOUS = (
    GpuProgram("adain", adain, lambda: (randn(16, 512, 64, 64), randn(16, 512, 64, 64))),
    GpuProgram("squeezed", squeezed, lambda: (randn(64, 256, 56, 56), randn(256))),
    training("squeezed, trained", squeezed, lambda: learned((64, 256, 56, 56), (256,))),
    GpuProgram("spatial attention", spatial_attention, lambda: (randn(64, 256, 56, 56),)),
    GpuProgram("channels shuffled", shuffled, lambda: (randn(64, 240, 56, 56),)),
    training("focal", focal,
             lambda: (randn(65536, 80, dtype=F32, grad=True), (uniform(65536, 80) > 0.9).float())),
    GpuProgram("hsv", hsv, lambda: (uniform(64, 3, 512, 512),), random=True),
    GpuProgram("mixed images", mixed,
               lambda: (uniform(256, 3, 224, 224), torch.randperm(256, device="cuda"),
                        uniform(256))),
    GpuProgram("pyramid", pyramid, lambda: (randn(16, 256, 128, 128), randn(16, 256, 64, 64))),
    training("patches loss", patches_loss,
             lambda: (uniform(256, 3, 224, 224), randn(256, 196, 768, grad=True),
                      (uniform(256, 196) > 0.25).float())),
    GpuProgram("pixels shuffled", shuffled_pixels, lambda: (randn(16, 256, 128, 128),)),
    GpuProgram("warped", warped, lambda: (f32(16, 3, 512, 512), f32(16, 2, 512, 512) * 5)),
    training("charbonnier", charbonnier,
             lambda: (randn(16, 3, 512, 512, dtype=F32, grad=True), f32(16, 3, 512, 512))),
    GpuProgram("channel norm", channel_norm, lambda: (randn(32, 256, 64, 64),)),
    training("channel norm, trained", channel_norm, lambda: learned((32, 256, 64, 64))),
    GpuProgram("soft argmax", soft_argmax, lambda: (randn(64, 17, 96, 72),)),
    GpuProgram("heatmaps", heatmaps, lambda: (uniform(64, 17, 2) * 128,)),
    GpuProgram("matrix nms", matrix_nms, lambda: (uniform(4096, 4096), uniform(4096))),
    GpuProgram("instance norm", instance_norm,
               lambda: (randn(16, 128, 128, 128), randn(128), randn(128))),
    training("instance norm, trained", instance_norm,
             lambda: learned((16, 128, 64, 64), (128,), (128,))),
    GpuProgram("contrast of images", gray_moments, lambda: (uniform(64, 3, 384, 384),)),
    GpuProgram("cut and mixed", cut,
               lambda: (uniform(128, 3, 224, 224), uniform(128, 3, 224, 224),
                        integers(224, 128, 4))),
    GpuProgram("alibi", alibi, lambda: (randn(4, 16, 1024, 1024), uniform(16))),
    GpuProgram("sliding window", sliding, lambda: (randn(2, 8, 2048, 2048),)),
    GpuProgram("head norm", head_norm, lambda: (randn(8, 2048, 3 * 2048), f32(128), f32(128))),
    training("head norm, trained", head_norm,
             lambda: (*learned((8, 1024, 3 * 2048)), *learned((128,), (128,), dtype=F32))),
    GpuProgram("balanced experts", balanced, lambda: (randn(32768, 64),), random=True),
    training("smoothed", smoothed,
             lambda: (randn(8, 512, 32000, grad=True), integers(32000, 8, 512))),
    GpuProgram("entropy", entropy, lambda: (randn(4096, 50304),)),
    training("grpo", grpo,
             lambda: (randn(8, 512, 32000, grad=True), -uniform(8, 512), -uniform(8, 512),
                      integers(32000, 8, 512), f32(8), (uniform(8, 512) > 0.1).float())),
    training("gumbel", gumbel, lambda: (randn(65536, 512, dtype=F32, grad=True),
                                        uniform(65536, 512))),
    GpuProgram("modulated", modulated,
               lambda: (randn(32, 1024, 1152), *(randn(32, 1152) for _ in range(3)),
                        randn(32, 1024, 1152))),
    training("modulated, trained", modulated,
             lambda: learned((32, 1024, 1152), *3 * ((32, 1152),), (32, 1024, 1152))),
    training("squared relu", squared_relu, lambda: learned((16384, 8192), (8192,))),
    training("geglu", geglu, lambda: learned((8192, 2 * 5461))),
    training("drop path", drop_path, lambda: learned((64, 1024, 768), (64, 1024, 768), (768,)),
             random=True),
    GpuProgram("repeated heads", repeated_heads,
               lambda: (randn(8, 2048, 8, 128), randn(8, 2048, 8, 128))),
    GpuProgram("packed in fours", packed_int4, lambda: (randn(8192, 8192),), random=True),
    GpuProgram("unpacked fours", unpacked_int4,
               lambda: (integers(255, 8192, 4096).to(torch.uint8), randn(8192, 256, dtype=F16),
                        randn(8192, 256, dtype=F16))),
    GpuProgram("int8 by token", by_token, lambda: (randn(16384, 5120),), random=True),
    GpuProgram("int8 by channel", by_channel, lambda: (randn(8192, 8192),), random=True),
    GpuProgram("delayed fp8", delayed, lambda: (randn(8192, 8192), uniform(())), random=True),
    GpuProgram("fp8 both ways", both_fp8, lambda: (randn(8192, 8192), uniform(())), random=True),
    GpuProgram("scaled embedding", scaled_embedding,
               lambda: (integers(50000, 32, 1024), randn(50000, 2048), randn(2048)),
               moved=lambda args, result: nbytes(args[0], result, result)),
    training("reward pairs", reward_pairs,
             lambda: (*learned((4096, 2048), (4096, 2048)), (uniform(4096, 2048) > 0.2).float())),
    GpuProgram("log mel", log_mel, lambda: (uniform(64, 80, 3000),)),
    GpuProgram("mu law", mu_law, lambda: (f32(64, 160000).clamp(-1, 1),), random=True),
    GpuProgram("spec augment", spec_augmented,
               lambda: (f32(128, 80, 3000), integers(2000, 128), integers(300, 128))),
    training("si snr", si_snr,
             lambda: (randn(256, 64000, dtype=F32, grad=True), f32(256, 64000))),
    GpuProgram("rolling mean", rolling, lambda: (f32(4096, 4096),)),
    GpuProgram("drawdown", drawdown, lambda: (uniform(8192, 2520) + 1,)),
    GpuProgram("overlapping windows", overlap_windows, lambda: (f32(64, 160000), f32(400))),
    GpuProgram("laplacian", laplacian, lambda: (f32(384, 384, 384),)),
    GpuProgram("heat", heat, lambda: (f32(32, 1023, 1023),)),
    GpuProgram("gaussian kernel", gaussian_kernel, lambda: (f32(8192, 64), f32(8192, 64))),
    GpuProgram("lennard jones", lennard, lambda: (f32(65536, 3) * 3, integers(65536, 65536, 64))),
    GpuProgram("rotations", rotations, lambda: (f32(1 << 21, 3),)),
    GpuProgram("inverses", inverses,
               lambda: (f32(1 << 21, 3, 3) + 10 * torch.eye(3, device="cuda"),)),
    GpuProgram("haversine", haversine, lambda: (uniform(8192, 2) * 90, uniform(8192, 2) * 90)),
    GpuProgram("projected", projected,
               lambda: (f32(8, 1 << 19, 3), f32(8, 3, 4), uniform(4) * 300)),
    GpuProgram("chamfer", chamfer, lambda: (f32(4, 4096, 3), f32(4, 4096, 3))),
    GpuProgram("complex filter", complex_filter, lambda: (f32(64, 262144, 2), f32(262144, 2))),
    GpuProgram("k means", assigned, lambda: (f32(1 << 18, 64), f32(256, 64)), random=True),
    GpuProgram("mean of neighbours", mean_of_neighbours,
               lambda: (f32(65536, 128), edges_of(65536, 1 << 20))),
    GpuProgram("segment max", segment_max, lambda: (f32(1 << 19, 64), integers(4096, 1 << 19))),
    GpuProgram("standardised", standardised, lambda: (f32(1 << 20, 50),)),
    GpuProgram("binned", binned, lambda: (f32(1 << 25), torch.linspace(-3, 3, 255, device="cuda"))),
    GpuProgram("counted", counted, lambda: (f32(1 << 25),)),
    GpuProgram("many tables", many_tables,
               lambda: (integers(20000, 16384, 26), f32(26, 20000, 64), f32(16384, 64)),
               moved=lambda args, result: nbytes(args[0], args[2], result, result)),
    GpuProgram("negative binomial", negative_binomial,
               lambda: (uniform(8192, 2000) * 5, uniform(2000) * 5,
                        integers(20, 8192, 2000).float())),
    training("student", student,
             lambda: (f32(65536, 96), *learned(*2 * ((65536, 96),), dtype=F32))),
    GpuProgram("crf step", crf_step, lambda: (f32(16384, 48), f32(48, 48), f32(16384, 48))),
    GpuProgram("viterbi step", viterbi_step, lambda: (f32(16384, 48), f32(48, 48), f32(16384, 48))),
    GpuProgram("sinkhorn", sinkhorn, lambda: (uniform(256, 256, 256),)),
    GpuProgram("statistics of columns", correlation, lambda: (f32(1 << 19, 64),)),
    GpuProgram("missing values", missing,
               lambda: (torch.where(uniform(1 << 20, 40) < 0.1, float("nan"), 1.0), f32(40))),
    GpuProgram("margins", margins, lambda: (f32(8192, 8192), integers(500, 8192))),
    GpuProgram("ranked", ranked, lambda: (f32(65536, 100), integers(5, 65536, 100).float())),
    GpuProgram("lion", lion, lambda: (f32(1 << 26), randn(1 << 26), f32(1 << 26))),
    GpuProgram("unscaled gradients", unscaled,
               lambda: (of_each(), torch.full((), 65536.0, device="cuda"))),
    GpuProgram("rowwise adagrad", rowwise_adagrad,
               lambda: (f32(100000, 128), uniform(100000), f32(65536, 128),
                        integers(100000, 65536))),
    GpuProgram("muon scale", muon_scale, lambda: (randn(8192, 8192), f32(8192, 8192))),
    GpuProgram("adamw of torch", optimizer_step,
               lambda: (of_each(), of_each(), of_each(), [t.square() for t in of_each()],
                        [torch.full((), 5.0, device="cuda") for _ in range(45)]), random=True),
)  # fmt: skip
