"""More architectures written here, each around a layer that the others have not."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.real.zoo import Made, Model, of_size, tokens


class RotaryBlock(nn.Module):
    """Rotary positions, fewer heads of keys than of queries, a gated MLP (Llama)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split([width, width // 2, width // 2], -1)
        q, k, v = (t.view(b, n, -1, self.size).transpose(1, 2) for t in (q, k, v))
        q, k = _turned(q), _turned(k)
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor) -> Tensor:
    steps = torch.arange(x.shape[-1] // 2, device=x.device, dtype=torch.float32)
    speeds = torch.exp(-math.log(1e4) / len(steps) * steps)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Tied(nn.Module):
    """Tokens in and out by the same weights."""

    def __init__(self, vocabulary: int, width: int, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*blocks)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.blocks(self.embedding(ids)), self.embedding.weight)


def _language(size: str, block: Callable[[int, int], nn.Module]) -> Made:
    vocabulary, width, heads, layers, batch, length = of_size(
        size, (101, 32, 4, 2, 2, 12), (2000, 256, 4, 2, 2, 128), (32000, 1024, 16, 6, 8, 1024)
    )
    model = Tied(vocabulary, width, *(block(width, heads) for _ in range(layers)))
    return Made(model, {"ids": tokens(vocabulary, batch, length)})


def rotary_decoder(size: str) -> Made:
    return _language(size, RotaryBlock)


class BiasedBlock(nn.Module):
    """Scores with a bias learnt for each distance, in buckets that grow (T5)."""

    def __init__(self, width: int, heads: int, buckets: int = 16, farthest: int = 64) -> None:
        super().__init__()
        self.heads, self.buckets, self.farthest = heads, buckets, farthest
        self.norm, self.bias = nn.RMSNorm(width), nn.Embedding(buckets, heads)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def _bucket(self, length: int, device: torch.device) -> Tensor:
        places = torch.arange(length, device=device)
        apart = places[None] - places[:, None]
        half = self.buckets // 2
        near = half // 2
        grown = torch.log(apart.abs().clamp(1) / near) / math.log(self.farthest / near)
        far = (near + grown * (half - near)).long().clamp(max=half - 1)
        return half * (apart > 0) + torch.where(apart.abs() < near, apart.abs(), far)

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        qkv = self.qkv(self.norm(x)).view(b, n, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.bias(self._bucket(n, x.device)).permute(2, 0, 1)
        weights = (q @ k.transpose(-1, -2) + bias).float().softmax(-1).to(x.dtype)
        return x + self.out((weights @ v).transpose(1, 2).reshape(b, n, width))


def biased_encoder(size: str) -> Made:
    return _language(size, BiasedBlock)


class Experts(nn.Module):
    """Two of several MLPs for each token; results are added up where they belong."""

    def __init__(self, width: int, heads: int, count: int = 4) -> None:
        super().__init__()
        del heads
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) / math.sqrt(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).view(-1, x.shape[-1])
        weights, chosen = self.gate(y).float().softmax(-1).topk(2, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        found, rows = torch.zeros_like(y), torch.arange(len(y), device=x.device)
        for k, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            share = (weights * (chosen == k)).sum(-1, keepdim=True)
            found = found.index_add(0, rows, share * (F.gelu(y @ up) @ down))
        return x + found.view(x.shape)


def experts(size: str) -> Made:
    return _language(size, Experts)


class LinearAttention(nn.Module):
    """Attention without softmax: keys and values summed up on the way."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, self.heads, -1).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        seen = torch.ones(n, n, device=x.device, dtype=x.dtype).tril()
        weights = torch.einsum("bnhd,bmhd->bhnm", q, k) * seen
        scale = torch.einsum("bnhd,bnhd->bnh", q, k.cumsum(1)).clamp(1e-3)
        y = torch.einsum("bhnm,bmhd->bnhd", weights, v) / scale[..., None]
        return x + self.out(y.reshape(b, n, width))


def linear_attention(size: str) -> Made:
    return _language(size, LinearAttention)


class TimeMixing(nn.Module):
    """A weighted mean over the past that forgets, step after step, as exponentials relative to the
    largest so far (RWKV)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.told = nn.Linear(width, 3 * width)
        self.forget, self.first = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        key, value, gate = self.told(x).chunk(3, -1)
        above = below = torch.zeros_like(x[:, 0])
        top, made = torch.full_like(above, -1e30), list[Tensor]()
        for k, v in zip(key.unbind(1), value.unbind(1), strict=True):
            most = torch.maximum(top, self.first + k)
            old, new = (top - most).exp(), (self.first + k - most).exp()
            made.append((old * above + new * v) / (old * below + new))
            top = top - self.forget.exp()
            most = torch.maximum(top, k)
            old, new = (top - most).exp(), (k - most).exp()
            above, below, top = old * above + new * v, old * below + new, most
        return x + gate.sigmoid() * torch.stack(made, 1)


def time_mixing(size: str) -> Made:
    width, batch, length = of_size(size, (16, 2, 8), (128, 4, 32), (512, 32, 64))
    return Made(TimeMixing(width), {"x": torch.randn(batch, length, width)})


class Gated(nn.Module):
    """A GRU of cells over a short sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


def gated(size: str) -> Made:
    width, batch, length = of_size(size, (16, 2, 6), (128, 8, 24), (512, 64, 48))
    return Made(Gated(width), {"x": torch.randn(batch, length, width)})


class Segmenter(nn.Module):
    """U-Net: pooled and grown again, beside what there was before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = _twice(3, width), _twice(width, 2 * width)
        self.bottom = _twice(2 * width, 4 * width)
        self.grow = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.third, self.fourth = _twice(4 * width, 2 * width), _twice(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        y = self.third(torch.cat([self.grow(self.bottom(F.max_pool2d(b, 2))), b], 1))
        y = F.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=True)
        return self.head(self.fourth(torch.cat([y, a], 1)))


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


def segmenter(size: str) -> Made:
    width, batch, side = of_size(size, (8, 2, 16), (16, 2, 64), (64, 16, 256))
    return Made(Segmenter(width), {"x": torch.randn(batch, 3, side, side)})


class Windows(nn.Module):
    """Attention within windows of a rolled picture, with a bias for each distance (Swin)."""

    def __init__(self, width: int, heads: int, side: int = 4) -> None:
        super().__init__()
        self.heads, self.side = heads, side
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.bias = nn.LayerNorm(width), nn.Embedding((2 * side - 1) ** 2, heads)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, width = x.shape
        s = self.side
        y = self.norm(x).roll((-s // 2, -s // 2), (1, 2)).view(b, h // s, s, w // s, s, width)
        y = y.transpose(2, 3).reshape(-1, s * s, width)
        q, k, v = self.qkv(y).view(len(y), s * s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        places = torch.arange(s * s, device=x.device)
        down, across = places // s, places % s
        apart = (down[:, None] - down + s - 1) * (2 * s - 1) + across[:, None] - across + s - 1
        mask = self.bias(apart).permute(2, 0, 1)[None].to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        y = self.out(y.reshape(-1, s * s, width)).view(b, h // s, w // s, s, s, width)
        return x + y.transpose(2, 3).reshape(b, h, w, width).roll((s // 2, s // 2), (1, 2))


def windows(size: str) -> Made:
    width, heads, batch, side = of_size(size, (16, 2, 2, 8), (96, 3, 2, 28), (192, 6, 32, 56))
    blocks = nn.Sequential(*(Windows(width, heads) for _ in range(2)))
    return Made(blocks, {"input": torch.randn(batch, side, side, width)})


class Quantised(nn.Module):
    """A wave by the nearest of a few vectors, and back (VQ-VAE)."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(4, width, 4, 2, 1), nn.ConvTranspose1d(width, 4, 4, 2, 1)
        self.codes = nn.Embedding(count, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.down(x).transpose(1, 2)
        codes = self.codes.weight
        apart = codes.square().sum(-1) - 2 * z @ codes.mT
        q = self.codes(apart.argmin(-1))
        loss = F.mse_loss(q.detach(), z) + F.mse_loss(q, z.detach())
        return self.up((z + (q - z).detach()).transpose(1, 2)), loss


def quantised(size: str) -> Made:
    width, count, batch, length = of_size(
        size, (8, 8, 2, 16), (64, 256, 4, 512), (256, 1024, 16, 8192)
    )
    return Made(Quantised(width, count), {"x": torch.randn(batch, 4, length)})


class Adapted(nn.Module):
    """A linear layer with weights of eight bits that are not trained, and a narrow one that is."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.full((outputs,), 0.01 / math.sqrt(inputs)))
        self.narrow, self.wide = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs)

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.get_buffer("weight"), self.get_buffer("scale")
        return F.linear(x, weight.to(x.dtype)) * scale + 2 * self.wide(self.narrow(x))


def adapted(size: str) -> Made:
    width, rows = of_size(size, (16, 1), (512, 1), (4096, 1))
    layers = Adapted(width, 4 * width), nn.GELU(), Adapted(4 * width, width), nn.LayerNorm(width)
    return Made(nn.Sequential(*layers), {"input": torch.randn(rows, width)})


ALL: dict[str, tuple[str, Callable[[str], Made]]] = {
    "rotary_decoder": ("decoder", rotary_decoder),
    "biased_encoder": ("encoder", biased_encoder),
    "experts": ("mixture of experts", experts),
    "linear_attention": ("decoder", linear_attention),
    "time_mixing": ("recurrent", time_mixing),
    "gru": ("recurrent", gated),
    "segmenter": ("convolution net", segmenter),
    "windows": ("vision transformer", windows),
    "vq_autoencoder": ("generator", quantised),
    "adapted_int8": ("quantised", adapted),
}


def models() -> list[Model]:
    return [Model(name, field, "torch.nn", make) for name, (field, make) in ALL.items()]
