"""The model zoo: eight architectures in plain torch.nn, each at a `tiny` and a `small` size.

A factory gives a `Case`: the module, example inputs and a scalar loss of the module's output.
`tiny` is for tests (milliseconds), `small` for measurements (tens of milliseconds on two cores).
Widths differ between models on purpose: no model can profit from the kernels another one built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = ("tiny", "small")


@dataclass(frozen=True)
class Case:
    """A module with example inputs and a scalar loss of its output."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[Tensor], Tensor]


# --------------------------------------------------------------------------- transformers


class SelfAttention(nn.Module):
    """Multi-head self-attention through scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, width: int, hidden: int, approximate: str = "none") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = nn.GELU(approximate=approximate)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class PreNormBlock(nn.Module):
    """Norm, attention, residual; norm, MLP, residual (GPT and ViT)."""

    def __init__(self, width: int, heads: int, causal: bool, approximate: str = "none") -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal)
        self.mlp = Mlp(width, 4 * width, approximate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder-only language model with learnt positions and tied output weights."""

    def __init__(self, vocab: int, width: int, heads: int, depth: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            PreNormBlock(width, heads, causal=True, approximate="tanh") for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)  # tied to the output: keeps logits small

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


class PostNormBlock(nn.Module):
    """The original transformer's order: residual first, then norm (BERT)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, causal=False)
        self.mlp = Mlp(width, 4 * width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.mlp(x))


class BERT(nn.Module):
    """Bidirectional encoder with segments, a padding mask and a masked-token head."""

    def __init__(self, vocab: int, width: int, heads: int, depth: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(PostNormBlock(width, heads) for _ in range(depth))
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, vocab)
        )

    def forward(self, tokens: Tensor, segments: Tensor, lengths: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions) + self.segment(segments)
        x = self.norm(x)
        mask = (positions[None, :] < lengths[:, None])[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class RelativeBias(nn.Module):
    """T5's learnt bias per head, looked up by a logarithmic bucket of the distance."""

    def __init__(self, heads: int, bidirectional: bool, buckets: int = 32, far: int = 128) -> None:
        super().__init__()
        self.bidirectional, self.buckets, self.far = bidirectional, buckets, far
        self.table = nn.Embedding(buckets, heads)

    def bucket(self, distance: Tensor) -> Tensor:
        count, base = self.buckets, torch.zeros_like(distance)
        if self.bidirectional:
            count //= 2
            base = (distance > 0).long() * count
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = count // 2
        # The clamp keeps log(0) out of the branch that `where` throws away.
        scaled = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.far / exact)
        large = (exact + (scaled * (count - exact)).long()).clamp(max=count - 1)
        return base + torch.where(distance < exact, distance, large)

    def forward(self, queries: int, keys: int, device: torch.device) -> Tensor:
        rows = torch.arange(queries, device=device)[:, None]
        columns = torch.arange(keys, device=device)[None, :]
        return self.table(self.bucket(columns - rows)).permute(2, 0, 1)[None]


class BiasedAttention(nn.Module):
    """Unscaled attention written out (matmul, bias, softmax, matmul), as T5 does it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        y = scores.softmax(dim=-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    """GEGLU feed-forward (T5 v1.1)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class T5Block(nn.Module):
    """One encoder block, or one decoder block when `cross` is set."""

    def __init__(self, width: int, heads: int, cross: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attention, self.mlp = BiasedAttention(width, heads), GatedMlp(width, 2 * width)
        self.cross = BiasedAttention(width, heads) if cross else None
        self.norm3 = nn.RMSNorm(width, eps=1e-6) if cross else None

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, bias)
        if self.cross is not None and self.norm3 is not None and memory is not None:
            x = x + self.cross(self.norm3(x), memory, None)
        return x + self.mlp(self.norm2(x))


class T5(nn.Module):
    """Encoder-decoder with relative position bias and RMS norms."""

    def __init__(self, vocab: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.encoder_bias = RelativeBias(heads, bidirectional=True)
        self.decoder_bias = RelativeBias(heads, bidirectional=False)
        self.encoder = nn.ModuleList(T5Block(width, heads, cross=False) for _ in range(depth))
        self.decoder = nn.ModuleList(T5Block(width, heads, cross=True) for _ in range(depth))
        self.encoder_norm = nn.RMSNorm(width, eps=1e-6)
        self.decoder_norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, n = self.token(source), source.shape[1]
        bias = self.encoder_bias(n, n, source.device)
        for block in self.encoder:
            x = block(x, bias)
        memory = self.encoder_norm(x)
        y, m = self.token(target), target.shape[1]
        future = torch.ones(m, m, dtype=torch.bool, device=target.device).triu(1)
        bias = self.decoder_bias(m, m, target.device).masked_fill(future, float("-inf"))
        for block in self.decoder:
            y = block(y, bias, memory)
        return self.head(self.decoder_norm(y))


class ViT(nn.Module):
    """Vision transformer with a class token."""

    def __init__(self, image: int, patch: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(
            *(PreNormBlock(width, heads, causal=False) for _ in range(depth))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


# --------------------------------------------------------------------------- convolutional


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of an NCHW tensor."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, norm, pointwise MLP in channels-last order, layer scale, residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.mlp = Mlp(channels, 4 * channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.scale * self.mlp(self.norm(y))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Stages of ConvNeXt blocks with norm-and-stride downsampling between them."""

    def __init__(self, widths: tuple[int, ...], depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=4), ChannelNorm(widths[0])]
        for i, width in enumerate(widths):
            if i:
                layers += [
                    ChannelNorm(widths[i - 1]),
                    nn.Conv2d(widths[i - 1], width, 2, stride=2),
                ]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.body = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.body(image).mean((2, 3))))


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution without bias and its batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class ResidualBlock(nn.Module):
    """ResNet's basic (two 3x3) or bottleneck (1x1, 3x3, 1x1) block."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            layers = [*conv_bn(inputs, width, 1), nn.ReLU(), *conv_bn(width, width, 3, stride)]
            layers += [nn.ReLU(), *conv_bn(width, outputs, 1)]
        else:
            layers = [*conv_bn(inputs, width, 3, stride), nn.ReLU(), *conv_bn(width, width, 3)]
        self.body = nn.Sequential(*layers)
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Sequential(*conv_bn(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


class ResNet(nn.Module):
    """Stem with max pool, stages of basic then bottleneck blocks, adaptive pool, head."""

    def __init__(self, width: int, basic: int, bottleneck: int) -> None:
        super().__init__()
        stem = [*conv_bn(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        blocks: list[nn.Module] = []
        channels = width
        for _ in range(basic):
            blocks.append(ResidualBlock(width, width, 1, bottleneck=False))
        for i in range(bottleneck):
            blocks.append(ResidualBlock(channels, width, 2 if i == 0 else 1, bottleneck=True))
            channels = 4 * width
        self.body = nn.Sequential(*stem, *blocks)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.pool(self.body(image)).flatten(1))


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions with group norm and SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Encoder by max pool, decoder by bilinear upsampling, skips by concatenation."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.stem = DoubleConv(3, width)
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in pairwise(widths))
        self.upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.up = nn.ModuleList(DoubleConv(a + b, a) for a, b in reversed(list(pairwise(widths))))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = [self.stem(image)]
        for block in self.down:
            skips.append(block(self.pool(skips[-1])))
        x = skips.pop()
        for block in self.up:
            x = block(torch.cat([self.upsample(x), skips.pop()], dim=1))
        return self.head(x)


# --------------------------------------------------------------------------- recurrent


class LSTM(nn.Module):
    """Stacked LSTM cells over a short sequence.

    Built from nn.LSTMCell: dynamo leaves nn.LSTM itself outside the graph, so its maths would
    never reach a compiler.
    """

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.token = nn.Embedding(vocab, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.token(tokens)
        zero = x.new_zeros(batch, self.width)
        state = [(zero, zero) for _ in self.cells]
        outputs: list[Tensor] = []
        for t in range(length):
            y = x[:, t]
            for i, cell in enumerate(self.cells):
                state[i] = cell(y, state[i])
                y = state[i][0]
            outputs.append(y)
        return self.head(torch.stack(outputs, dim=1))


# --------------------------------------------------------------------------- the zoo


def token_loss(targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Cross entropy of logits (..., classes) against fixed targets (...)."""

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    return loss


def pixel_loss(targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Cross entropy of an image of logits (batch, classes, height, width)."""

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)

    return loss


def tokens(vocab: int, *shape: int) -> Tensor:
    return torch.randint(0, vocab, shape)


def gpt(size: str) -> Case:
    batch, length, width, heads, depth = {"tiny": (2, 12, 32, 2, 2), "small": (4, 128, 256, 4, 4)}[
        size
    ]
    vocab = 61 if size == "tiny" else 2000
    module = GPT(vocab, width, heads, depth, context=length)
    ids = tokens(vocab, batch, length + 1)
    return Case(module, (ids[:, :-1].contiguous(),), token_loss(ids[:, 1:].contiguous()))


def bert(size: str) -> Case:
    batch, length, width, heads, depth = {"tiny": (2, 10, 48, 4, 2), "small": (4, 128, 288, 6, 4)}[
        size
    ]
    vocab = 53 if size == "tiny" else 1500
    module = BERT(vocab, width, heads, depth, context=length)
    lengths = torch.randint(length // 2, length + 1, (batch,))
    inputs = (tokens(vocab, batch, length), tokens(2, batch, length), lengths)
    return Case(module, inputs, token_loss(tokens(vocab, batch, length)))


def t5(size: str) -> Case:
    batch, length, width, heads, depth = {"tiny": (2, 9, 24, 2, 1), "small": (4, 96, 224, 4, 2)}[
        size
    ]
    vocab = 47 if size == "tiny" else 1200
    module = T5(vocab, width, heads, depth)
    inputs = (tokens(vocab, batch, length), tokens(vocab, batch, length - 2))
    return Case(module, inputs, token_loss(tokens(vocab, batch, length - 2)))


def vit(size: str) -> Case:
    batch, image, patch, width, heads, depth = {
        "tiny": (2, 16, 4, 40, 2, 2),
        "small": (4, 96, 8, 192, 3, 4),
    }[size]
    module = ViT(image, patch, width, heads, depth)
    return Case(module, (torch.randn(batch, 3, image, image),), token_loss(tokens(10, batch)))


def convnext(size: str) -> Case:
    batch, image, widths, depth = {
        "tiny": (2, 32, (16, 24), 1),
        "small": (4, 128, (40, 80, 160), 2),
    }[size]
    module = ConvNeXt(widths, depth)
    return Case(module, (torch.randn(batch, 3, image, image),), token_loss(tokens(10, batch)))


def resnet(size: str) -> Case:
    batch, image, width, basic, bottleneck = {"tiny": (4, 32, 8, 1, 2), "small": (8, 96, 48, 2, 3)}[
        size
    ]
    module = ResNet(width, basic, bottleneck)
    return Case(module, (torch.randn(batch, 3, image, image),), token_loss(tokens(10, batch)))


def unet(size: str) -> Case:
    batch, image, width, depth = {"tiny": (2, 16, 8, 2), "small": (2, 96, 24, 3)}[size]
    targets = tokens(2, batch, image, image)
    return Case(UNet(width, depth), (torch.randn(batch, 3, image, image),), pixel_loss(targets))


def lstm(size: str) -> Case:
    batch, length, width, layers = {"tiny": (3, 4, 20, 2), "small": (32, 16, 208, 2)}[size]
    vocab = 41 if size == "tiny" else 1000
    module = LSTM(vocab, width, layers)
    ids = tokens(vocab, batch, length + 1)
    return Case(module, (ids[:, :-1].contiguous(),), token_loss(ids[:, 1:].contiguous()))


Factory = Callable[[str], Case]

MODELS: dict[str, Factory] = {
    "gpt": gpt,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "convnext": convnext,
    "resnet": resnet,
    "unet": unet,
    "lstm": lstm,
}


def build(
    name: str, size: str = "small", seed: int = 0, zoo: Mapping[str, Factory] = MODELS
) -> Case:
    """The named model with seeded weights and inputs, in training mode."""
    if name not in zoo:
        raise KeyError(f"no model {name!r}; the zoo has {', '.join(zoo)}")
    if size not in SIZES:
        raise KeyError(f"no size {size!r}; sizes are {', '.join(SIZES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        case = zoo[name](size)
    case.module.train()
    return case


def to_device(value: Any, device: str) -> Any:
    """A module or tensor, or a tuple of them, on `device`."""
    if isinstance(value, tuple):
        return tuple(to_device(v, device) for v in value)
    return value.to(device)
