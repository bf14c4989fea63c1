"""Six more architectures, for which only the most memory at once is measured.

They have what the zoo of `bench.models` lacks: attention beside convolutions, mixing across tokens
by products alone, gates over time, a scan, bags of embeddings, squeeze and excitation.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models import Case, Factory, Mlp, pixel_loss, token_loss, tokens


class DiffusionBlock(nn.Module):
    """Group norm, SiLU and convolution twice, told the time in between, then attention over all
    pixels; each with its residual."""

    def __init__(self, inputs: int, channels: int, time: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.GroupNorm(4, c) for c in (inputs, channels, channels))
        self.first = nn.Conv2d(inputs, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip = nn.Conv2d(inputs, channels, 1)
        self.time = nn.Linear(time, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norms[0](x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.second(F.silu(self.norms[1](y))) + self.skip(x)
        q, k, v = self.qkv(self.norms[2](y)).chunk(3, dim=1)
        split = [t.unflatten(1, (self.heads, -1)).flatten(3).transpose(2, 3) for t in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*split)
        return y + self.out(mixed.transpose(2, 3).flatten(1, 2).unflatten(2, y.shape[2:]))


class Diffusion(nn.Module):
    """A small denoiser: down by strided convolution, up by nearest neighbours."""

    def __init__(self, width: int, time: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.high = DiffusionBlock(width, width, time, 2)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.low = DiffusionBlock(2 * width, 2 * width, time, 4)
        self.last = DiffusionBlock(3 * width, width, time, 2)
        self.head = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, image: Tensor, when: Tensor) -> Tensor:
        time = self.time(when)
        x = self.high(self.stem(image), time)
        y = self.low(self.down(x), time)
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")
        return self.head(self.last(torch.cat([x, y], dim=1), time))


class MixerBlock(nn.Module):
    """Products across tokens, then across channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.patches = Mlp(patches, 2 * patches)
        self.channels = Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class Mixer(nn.Module):
    def __init__(self, image: int, patch: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        patches = (image // patch) ** 2
        self.blocks = nn.Sequential(*(MixerBlock(patches, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(self.embed(image).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


class Seq2Seq(nn.Module):
    """A GRU that reads, and one that writes, attending to what was read."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.reader, self.writer = nn.GRUCell(width, width), nn.GRUCell(width, width)
        self.head = nn.Linear(2 * width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        state = self.token.weight.new_zeros(source.shape[0], self.token.embedding_dim)
        read: list[Tensor] = []
        for step in self.token(source).unbind(1):
            state = self.reader(step, state)
            read.append(state)
        memory = torch.stack(read, dim=1)
        written: list[Tensor] = []
        for step in self.token(target).unbind(1):
            state = self.writer(step, state)
            weight = torch.softmax(memory @ state[:, :, None], dim=1)
            written.append(torch.cat([state, (weight * memory).sum(1)], dim=1))
        return self.head(torch.stack(written, dim=1))


class ScanBlock(nn.Module):
    """A gated recurrence over time with as many states for each channel, computed as a scan."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.states = states
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.select = nn.Linear(width, 2 * states)
        self.delta = nn.Linear(width, width)
        self.rate = nn.Parameter(torch.rand(width, states))
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.inner(self.norm(x)).chunk(2, dim=-1)
        value = self.conv(value.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        value = F.silu(value)
        delta = F.softplus(self.delta(value))
        into, out = self.select(value).chunk(2, dim=-1)
        decay = torch.cumsum(-delta[..., None] * self.rate, dim=1)  # (batch, time, width, states)
        added = (delta * value)[..., None] * into[:, :, None]
        state = torch.exp(decay) * torch.cumsum(added * torch.exp(-decay), dim=1)
        return x + self.outer((state * out[:, :, None]).sum(-1) * F.silu(gate))


class StateSpace(nn.Module):
    def __init__(self, vocab: int, width: int, states: int, depth: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*(ScanBlock(width, states) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(ids))))


def stack(*widths: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Bags of embeddings and numbers, all pairs of their products, and a stack on top."""

    def __init__(self, rows: int, tables: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = stack(13, 4 * width, width)
        pairs = tables * (tables + 1) // 2
        self.top = nn.Sequential(stack(pairs + width, 8 * width, 4 * width),
                                 nn.Linear(4 * width, 2))  # fmt: skip

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        parts = torch.stack([dense, *(bag(i) for bag, i in zip(self.bags, ids, strict=True))], 1)
        rows, columns = torch.tril_indices(parts.shape[1], parts.shape[1], -1)
        products = (parts @ parts.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([dense, products], dim=1))


class InvertedResidual(nn.Module):
    """Widen, convolve each channel by itself, weigh channels by their means, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int, factor: int = 4) -> None:
        super().__init__()
        wide = inputs * factor
        self.residual = stride == 1 and inputs == outputs
        self.widen = nn.Sequential(nn.Conv2d(inputs, wide, 1, bias=False),
                                   nn.BatchNorm2d(wide), nn.SiLU())  # fmt: skip
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide), nn.SiLU(),
        )  # fmt: skip
        self.squeeze = nn.Sequential(nn.Conv2d(wide, inputs, 1), nn.SiLU(),
                                     nn.Conv2d(inputs, wide, 1), nn.Sigmoid())  # fmt: skip
        self.narrow = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False),
                                    nn.BatchNorm2d(outputs))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.widen(x))
        y = self.narrow(y * self.squeeze(y.mean((2, 3), keepdim=True)))
        return x + y if self.residual else y


class EfficientNet(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, 2, 1, bias=False),
                                  nn.BatchNorm2d(widths[0]), nn.SiLU())  # fmt: skip
        blocks = [block for a, b in pairwise(widths)
                  for block in (InvertedResidual(a, b, 2), InvertedResidual(b, b, 1))]  # fmt: skip
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


# --------------------------------------------------------------------------- the cases


def diffusion(size: str) -> Case:
    batch, image, width = {"tiny": (2, 8, 8), "small": (2, 32, 40)}[size]
    inputs = torch.randn(batch, 3, image, image), torch.rand(batch, 1)
    return Case(Diffusion(width, 32), inputs, pixel_loss(tokens(2, batch, image, image)))


def mixer(size: str) -> Case:
    batch, image, patch, width, depth = {"tiny": (2, 16, 4, 24, 1), "small": (4, 96, 8, 136, 3)}[
        size
    ]
    module = Mixer(image, patch, width, depth)
    return Case(module, (torch.randn(batch, 3, image, image),), token_loss(tokens(10, batch)))


def seq2seq(size: str) -> Case:
    batch, length, width = {"tiny": (3, 3, 12), "small": (32, 10, 176)}[size]
    vocab = 31 if size == "tiny" else 800
    source, target = tokens(vocab, batch, length), tokens(vocab, batch, length + 1)
    inputs = (source, target[:, :-1].contiguous())
    return Case(Seq2Seq(vocab, width), inputs, token_loss(target[:, 1:].contiguous()))


def state_space(size: str) -> Case:
    batch, length, width, states, depth = {"tiny": (2, 6, 12, 3, 1), "small": (4, 64, 112, 8, 2)}[
        size
    ]
    vocab = 37 if size == "tiny" else 600
    ids = tokens(vocab, batch, length + 1)
    module = StateSpace(vocab, width, states, depth)
    return Case(module, (ids[:, :-1].contiguous(),), token_loss(ids[:, 1:].contiguous()))


def dlrm(size: str) -> Case:
    batch, rows, tables, width = {"tiny": (5, 20, 3, 8), "small": (512, 2000, 8, 48)}[size]
    ids = torch.randint(0, rows, (tables, batch, 6))
    return Case(DLRM(rows, tables, width), (torch.randn(batch, 13), ids),
                token_loss(tokens(2, batch)))  # fmt: skip


def efficientnet(size: str) -> Case:
    batch, image, widths = {"tiny": (3, 16, (8, 12)), "small": (4, 112, (20, 28, 44))}[size]
    module = EfficientNet(widths)
    return Case(module, (torch.randn(batch, 3, image, image),), token_loss(tokens(10, batch)))


MORE: dict[str, Factory] = {
    "diffusion": diffusion,
    "mixer": mixer,
    "seq2seq": seq2seq,
    "state_space": state_space,
    "dlrm": dlrm,
    "efficientnet": efficientnet,
}
