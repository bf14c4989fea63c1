"""What a server of models does between its products, as users write it: caches, quantized weights,
experts, samplers, images before and after a model, steps of recurrent models."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_programs import BF16, GpuProgram, integers, randn
from bench.written_programs import f32, uniform

F16, FP8 = torch.float16, torch.float8_e4m3fn
HEADS, GROUPS, WIDTH = 32, 8, 128  # of queries, of keys, elements of each


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Any:
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def packed_rope(qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k, v = qkv.split((HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH), -1)
    q, k, v = (t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in (q, k, v))
    q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
    return q.contiguous(), k.contiguous(), v.contiguous()


def partial_rope(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, kept = q[..., :64].float(), q[..., 64:]
    a, b = rotated[..., ::2], rotated[..., 1::2]
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((rotated.to(q.dtype), kept), -1)


def static_cache(cache: Tensor, new: Tensor, cache_position: Tensor) -> Tensor:
    return cache.index_copy_(2, cache_position, new)


def paged_write(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Any:
    block, offset = slots // keys.shape[1], slots % keys.shape[1]
    keys[block, offset] = k
    values[block, offset] = v
    return keys, values


def paged_read(cache: Tensor, block_tables: Tensor) -> Tensor:
    return cache[block_tables].flatten(1, 2).transpose(1, 2).contiguous()


def from_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, device=qweight.device, dtype=torch.int32)
    weight = ((qweight[:, None] >> shifts[None, :, None]) & 15).flatten(0, 1)
    zeros = ((qzeros[:, :, None] >> shifts) & 15).flatten(1) + 1
    weight = weight.unflatten(0, (len(scales), -1))
    return ((weight - zeros[:, None]).to(scales.dtype) * scales[:, None]).flatten(0, 1)


def from_fp8_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (weight.float() * full).to(BF16)


def normed_fp8(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    h = x.float() + residual.float()
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    scale = (y.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (y / scale).clamp(-448, 448).to(FP8), scale, h.to(x.dtype)


def swiglu_fp8(gate_up: Tensor) -> Any:
    gate, up = gate_up.chunk(2, -1)
    y = (F.silu(gate.float()) * up.float()).unflatten(-1, (-1, 128))
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (y / scale).to(FP8).flatten(-2), scale.squeeze(-1)


def grouped_experts(logits: Tensor, bias: Tensor) -> Any:
    scores = logits.sigmoid()
    groups = (scores + bias).unflatten(-1, (8, -1))
    best = groups.topk(2, -1)[0].sum(-1).topk(4, -1, sorted=False)[1]
    mask = torch.zeros_like(groups[..., 0]).scatter_(1, best, 1).bool()
    places = groups.masked_fill(~mask[..., None], float("-inf")).flatten(1).topk(8, -1)[1]
    weights = scores.gather(1, places)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, places


def combined(y: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    each = y[inverse].unflatten(0, weights.shape)
    return (each * weights[..., None].to(y.dtype)).sum(1)


def top_k(logits: Tensor, temperature: Tensor) -> Tensor:
    logits = logits.float() / temperature[:, None]
    least = logits.topk(50, -1)[0][:, -1:]
    return logits.masked_fill(logits < least, float("-inf")).softmax(-1)


def verified(target: Tensor, draft: Tensor, token: Tensor, chance: Tensor) -> Any:
    p, q = target.softmax(-1), draft.softmax(-1)
    at = token[:, None]
    accepted = chance < (p.gather(1, at) / q.gather(1, at)).squeeze(1).clamp(max=1)
    left = (p - q).clamp(min=0)
    return accepted, left / left.sum(-1, keepdim=True)


def bert(ids: Tensor, kinds: Tensor, table: Tensor, of_kinds: Tensor, places: Tensor,
         weight: Tensor, bias: Tensor) -> Tensor:  # fmt: skip
    place = torch.arange(ids.shape[1], device=ids.device)
    x = F.embedding(ids, table) + F.embedding(kinds, of_kinds) + F.embedding(place, places)
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-12)


def preprocessed(frames: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    x = frames.permute(0, 3, 1, 2).float().div(255)
    return ((x - mean[:, None, None]) / std[:, None, None]).half().contiguous()


def yolo(x: Tensor, anchors: Tensor, stride: Tensor) -> Any:
    box, classes = x[..., :4].float(), x[..., 4:].float().sigmoid()
    sure, label = classes.max(-1)
    low, high = anchors - box[..., :2], anchors + box[..., 2:]
    boxes = torch.cat(((low + high) / 2, high - low), -1) * stride[:, None]
    return boxes, sure, label, sure > 0.25


def mamba_step(state: Tensor, x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor,
               z: Tensor) -> Tensor:  # fmt: skip
    dt = F.softplus(dt.float())[..., None]
    state.copy_(state * torch.exp(-dt * a_log.exp()) + x[..., None] * dt * b[:, None])
    return ((state * c[:, None]).sum(-1) * F.silu(z.float())).to(x.dtype)


def timesteps(t: Tensor) -> Tensor:
    frequencies = torch.exp(torch.arange(160, device=t.device) * (-math.log(1e4) / 160))
    angles = t[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1).to(BF16)


def normalised_speech(x: Tensor, lengths: Tensor) -> Tensor:
    mask = (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[..., None]
    count = lengths[:, None, None]
    mean = (x * mask).sum(1, keepdim=True) / count
    variance = ((x - mean).square() * mask).sum(1, keepdim=True) / (count - 1)
    return ((x - mean) / (variance.sqrt() + 1e-5)).masked_fill(~mask, 0.0)


def table(length: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    frequencies = 1e4 ** (-torch.arange(0, width, 2, device="cuda") / width)
    angles = torch.outer(torch.arange(length, device="cuda"), frequencies)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(BF16), angles.sin().to(BF16)


def nbytes(*tensors: Tensor) -> int:
    return sum(t.nbytes for t in tensors)


SERVED = (
    GpuProgram(
        "rope by position ids",
        rope,
        lambda: (randn(8, HEADS, 2048, WIDTH), randn(8, GROUPS, 2048, WIDTH), *table(4096),
                 integers(4096, 8, 2048)),
    ),
    GpuProgram("rope of packed queries", packed_rope,
               lambda: (randn(8, 2048, (HEADS + 2 * GROUPS) * WIDTH), *table(2048))),
    GpuProgram("partial rope", partial_rope,
               lambda: (randn(8, 1999, 16, 256, dtype=F16), *(f32(1999, 1, 32) for _ in range(2)))),
    GpuProgram("static cache", static_cache,
               lambda: (randn(64, GROUPS, 4096, WIDTH), randn(64, GROUPS, 512, WIDTH),
                        torch.arange(1000, 1512, device="cuda")),
               moved=lambda args, _: 2 * nbytes(*args[1:])),
    GpuProgram("paged cache, written", paged_write,
               lambda: (*(randn(4096, 16, GROUPS, WIDTH) for _ in range(2)),
                        *(randn(32768, GROUPS, WIDTH) for _ in range(2)),
                        torch.randperm(65536, device="cuda")[:32768]),
               moved=lambda args, _: 2 * nbytes(*args[2:4])),
    GpuProgram("paged cache, read", paged_read,
               lambda: (randn(4096, 16, GROUPS, WIDTH), integers(4096, 64, 64)),
               moved=lambda _, result: 2 * nbytes(result)),
    GpuProgram("from gptq", from_gptq,
               lambda: (integers(2**31 - 1, 1024, 8192).int(), integers(2**31 - 1, 64, 1024).int(),
                        randn(64, 8192, dtype=F16))),
    GpuProgram("from fp8 blocks", from_fp8_blocks,
               lambda: (f32(7168, 7168).to(FP8), uniform(56, 56))),
    GpuProgram("residual rms norm to fp8", normed_fp8,
               lambda: (randn(16384, 4096), randn(16384, 4096), randn(4096)), random=True),
    GpuProgram("swiglu to fp8 groups", swiglu_fp8, lambda: (randn(8192, 28672),), random=True),
    GpuProgram("experts of groups", grouped_experts, lambda: (f32(65536, 256), f32(256)),
               random=True),
    GpuProgram("experts combined", combined,
               lambda: (randn(65536, 2048), torch.randperm(65536, device="cuda"),
                        uniform(16384, 4))),
    GpuProgram("top 50 of 32000", top_k, lambda: (randn(1024, 32000), uniform(1024) + 0.5)),
    GpuProgram("draft verified", verified,
               lambda: (f32(512, 32000), f32(512, 32000), integers(32000, 512), uniform(512))),
    GpuProgram("bert embeddings", bert,
               lambda: (integers(30522, 128, 512), integers(2, 128, 512), randn(30522, 768),
                        randn(2, 768), randn(512, 768), randn(768), randn(768)),
               moved=lambda args, result: nbytes(*args[:2], result, result)),
    GpuProgram("images to planes", preprocessed,
               lambda: (integers(256, 64, 640, 640, 3).to(torch.uint8), uniform(3),
                        uniform(3) + 0.2)),
    GpuProgram("yolo boxes", yolo,
               lambda: (randn(32, 8400, 84, dtype=F16), uniform(8400, 2), uniform(8400))),
    GpuProgram("mamba step", mamba_step,
               lambda: (f32(1024, 2048, 16), randn(1024, 2048), randn(1024, 2048), f32(2048, 16),
                        randn(1024, 16), randn(1024, 16), randn(1024, 2048)),
               moved=lambda args, result: nbytes(*args, args[0], result)),
    GpuProgram("timesteps", timesteps, lambda: (uniform(65536) * 1000,)),
    GpuProgram("normalised speech", normalised_speech,
               lambda: (f32(128, 3000, 80), integers(2000, 128) + 999)),
)  # fmt: skip
