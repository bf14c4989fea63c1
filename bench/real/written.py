"""Architectures of plain torch.nn, for fields that the libraries leave out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.real.zoo import Made, Model, of_size

# ---- convolution nets


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1,
              act: type[nn.Module] = nn.ReLU) -> nn.Sequential:  # fmt: skip
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), act())


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(inputs, outputs, 3, stride)
        self.second = conv_norm(outputs, outputs, 3, act=nn.Identity)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride, 1, nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.skip(x))


class Classifier(nn.Module):
    """A trunk of pictures, the mean over places, and classes."""

    def __init__(self, trunk: nn.Module, width: int, classes: int = 100) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).mean((2, 3)))


def resnet(size: str) -> Made:
    width, batch, side = of_size(size, (8, 2, 32), (32, 16, 64), (64, 64, 224))
    trunk = nn.Sequential(conv_norm(3, width, 3), Residual(width, width, 1),
                          Residual(width, width, 1), Residual(width, 2 * width, 2))  # fmt: skip
    return Made(Classifier(trunk, 2 * width), {"x": torch.randn(batch, 3, side, side)})


class InvertedBottleneck(nn.Module):
    """MobileNet's and EfficientNet's block: wide, depthwise, excited by channel, narrow."""

    def __init__(self, width: int, expand: int, excited: bool) -> None:
        super().__init__()
        wide = width * expand
        self.up = conv_norm(width, wide, 1, act=nn.SiLU)
        self.depthwise = conv_norm(wide, wide, 3, groups=wide, act=nn.SiLU)
        narrow = max(8, width // 4)
        self.excite = (
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, narrow, 1), nn.SiLU(),
                          nn.Conv2d(narrow, wide, 1), nn.Sigmoid()) if excited else None
        )  # fmt: skip
        self.down = conv_norm(wide, width, 1, act=nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.up(x))
        if self.excite is not None:
            y = y * self.excite(y)
        return x + self.down(y)


def mobilenet(size: str) -> Made:
    width, batch, side = of_size(size, (8, 2, 32), (16, 8, 112), (32, 64, 224))
    blocks = [InvertedBottleneck(width, 6, excited=k % 2 == 1) for k in range(4)]
    trunk = nn.Sequential(conv_norm(3, width, 3, 2, act=nn.SiLU), *blocks)
    return Made(Classifier(trunk, width), {"x": torch.randn(batch, 3, side, side)})


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext(size: str) -> Made:
    width, batch, side = of_size(size, (16, 2, 32), (64, 4, 96), (96, 64, 224))
    trunk = nn.Sequential(nn.Conv2d(3, width, 4, 4), *(ConvNextBlock(width) for _ in range(3)))
    return Made(Classifier(trunk, width), {"x": torch.randn(batch, 3, side, side)})


def vgg(size: str) -> Made:
    width, batch, side = of_size(size, (8, 2, 32), (32, 4, 64), (64, 64, 224))
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, count in ((width, 2), (2 * width, 2), (4 * width, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    return Made(
        Classifier(nn.Sequential(*layers), inputs), {"x": torch.randn(batch, 3, side, side)}
    )


class Dense(nn.Module):
    """DenseNet: every layer is given all before it."""

    def __init__(self, width: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width + k * growth), nn.ReLU(),
                          nn.Conv2d(width + k * growth, growth, 3, padding=1, bias=False))
            for k in range(layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def densenet(size: str) -> Made:
    width, batch, side = of_size(size, (8, 2, 16), (32, 8, 32), (64, 64, 56))
    trunk = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), Dense(width, width // 2, 4))
    return Made(Classifier(trunk, 3 * width), {"x": torch.randn(batch, 3, side, side)})


def generator(size: str) -> Made:
    """DCGAN's: a picture out of noise, by transposed convolutions."""
    width, batch = of_size(size, (8, 2), (32, 8), (64, 64))
    layers: list[nn.Module] = []
    widths = (64, 8 * width, 4 * width, 2 * width, width)
    for k, (a, b) in enumerate(itertools.pairwise(widths)):
        step, pad = (1, 0) if k == 0 else (2, 1)
        layers += [nn.ConvTranspose2d(a, b, 4, step, pad, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    layers += [nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()]
    return Made(nn.Sequential(*layers), {"input": torch.randn(batch, 64, 1, 1)})


# ---- diffusion


class TimedBlock(nn.Module):
    """Group norm, SiLU, convolution, twice; told the time in between."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class PlaceAttention(nn.Module):
    """Attention of all places of a picture to each other."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, width), heads
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        qkv = self.qkv(self.norm(x)).view(b, 3, self.heads, c // self.heads, h * w)
        q, k, v = qkv.transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(b, c, h, w)
        return x + self.out(y)


def waves(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of a time, of growing periods."""
    steps = torch.arange(width // 2, device=t.device, dtype=t.dtype)
    angles = t[:, None] * torch.exp(-math.log(1e4) / (width // 2) * steps)
    return torch.cat([angles.sin(), angles.cos()], -1)


class Unet(nn.Module):
    """A denoiser: down, attention at the bottom, up beside what came down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        time = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(4, width, 3, padding=1)
        self.down1 = TimedBlock(width, width, time)
        self.shrink = nn.Conv2d(width, width, 3, 2, 1)
        self.down2 = TimedBlock(width, 2 * width, time)
        self.middle = PlaceAttention(2 * width)
        self.up2 = TimedBlock(2 * width, 2 * width, time)
        self.grow = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up1 = TimedBlock(2 * width, width, time)
        self.head = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 4, 3, 1, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = self.time(waves(t, self.width))
        first = self.down1(self.stem(x), t)
        y = self.up2(self.middle(self.down2(self.shrink(first), t)), t)
        y = self.grow(F.interpolate(y, scale_factor=2.0))
        return self.head(self.up1(torch.cat([y, first], 1), t))


def unet(size: str) -> Made:
    width, batch, side = of_size(size, (16, 2, 16), (32, 4, 32), (128, 16, 64))
    return Made(Unet(width), {"x": torch.randn(batch, 4, side, side), "t": 100 * torch.rand(batch)})


class DitBlock(nn.Module):
    """A transformer block whose norms are scaled, shifted and gated by what it is told."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"),
                                 nn.Linear(4 * width, width))  # fmt: skip
        self.told = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        b, n, width = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.told(F.silu(c))[:, None].chunk(6, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, width)
        x = x + gate1 * self.out(y)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Dit(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, side: int) -> None:
        super().__init__()
        self.width = width
        self.patch = nn.Conv2d(4, width, 2, 2)
        self.place = nn.Parameter(torch.randn(1, (side // 2) ** 2, width) * 0.02)
        self.time = nn.Linear(width, width)
        self.blocks = nn.ModuleList(DitBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        c = self.time(waves(t, self.width))
        y = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            y = block(y, c)
        return F.pixel_shuffle(self.head(y).transpose(1, 2).unflatten(2, (x.shape[2] // 2, -1)), 2)


def dit(size: str) -> Made:
    width, heads, layers, batch, side = of_size(
        size, (32, 2, 2, 2, 8), (128, 4, 2, 4, 16), (768, 12, 6, 16, 32)
    )
    return Made(Dit(width, heads, layers, side),
                {"x": torch.randn(batch, 4, side, side), "t": 100 * torch.rand(batch)})  # fmt: skip


# ---- state space and recurrence


class StateSpace(nn.Module):
    """A diagonal state space (S4D) as a long convolution, through Fourier transforms."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.rand(width) * 2 - 5)
        self.decay = nn.Parameter(torch.full((width, states), -0.7))
        self.turn = nn.Parameter(math.pi * torch.arange(states).expand(width, states).clone())
        self.read = nn.Parameter(torch.randn(width, states) / states)
        self.skip = nn.Parameter(torch.ones(width))
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        u = self.norm(x).transpose(1, 2).float()
        step, place = self.step.float().exp()[:, None], torch.arange(length, device=x.device)
        decay = (-self.decay.float().exp() * step)[..., None] * place
        turn = (self.turn.float() * step)[..., None] * place
        kernel = (self.read.float()[..., None] * decay.exp() * turn.cos()).sum(1)
        spectrum = torch.fft.rfft(u, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        y = torch.fft.irfft(spectrum, 2 * length)[..., :length] + u * self.skip.float()[:, None]
        return x + F.glu(self.mix(F.gelu(y.transpose(1, 2).to(x.dtype))))


def state_space(size: str) -> Made:
    width, states, batch, length = of_size(
        size, (16, 4, 2, 32), (64, 16, 2, 256), (512, 64, 8, 2048)
    )
    blocks = nn.Sequential(*(StateSpace(width, states) for _ in range(2)))
    return Made(blocks, {"input": torch.randn(batch, length, width)})


class SelectiveScan(nn.Module):
    """Mamba's recurrence written as a cumulative sum in chunks: what a state forgets depends on
    the input."""

    def __init__(self, width: int, states: int, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.inside, self.outside = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.told = nn.Linear(width, 2 * states + 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        u, gate = self.inside(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :n]).transpose(1, 2)
        told = self.told(u)
        states = (told.shape[-1] - 1) // 2
        write, read, step = told.split([states, states, 1], -1)
        forget = -F.softplus(step.float()).view(b, n // self.chunk, self.chunk)
        past = forget.cumsum(-1)
        apart = past[..., :, None] - past[..., None, :]
        seen = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=x.device).tril()
        weight = torch.where(seen, apart, -torch.inf).exp().to(x.dtype)
        write, read = (t.reshape(b, -1, self.chunk, states) for t in (write, read))
        u = u.reshape(b, -1, self.chunk, width)
        y = ((read @ write.transpose(-1, -2)) * weight) @ u
        return x + self.outside(y.reshape(b, n, width) * F.silu(gate))


def selective_scan(size: str) -> Made:
    width, states, batch, length = of_size(
        size, (16, 4, 2, 32), (128, 16, 2, 256), (768, 64, 8, 2048)
    )
    blocks = nn.Sequential(*(SelectiveScan(width, states, 16) for _ in range(3)))
    return Made(blocks, {"input": torch.randn(batch, length, width)})


class LongShortTerm(nn.Module):
    """An LSTM of cells over a short sequence, a head at every step."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(x.shape[0], x.shape[2])
        states = [(zeros, zeros) for _ in self.cells]
        outputs: list[Tensor] = []
        for step in x.unbind(1):
            for k, cell in enumerate(self.cells):
                states[k] = cell(step, states[k])
                step = states[k][0]
            outputs.append(step)
        return self.head(torch.stack(outputs, 1))


def lstm(size: str) -> Made:
    width, batch, length = of_size(size, (16, 2, 4), (128, 16, 12), (1024, 64, 32))
    return Made(LongShortTerm(width, 2), {"x": torch.randn(batch, length, width)})


# ---- recommenders


class Recommender(nn.Module):
    """DLRM: dense features and bags of categories, all products of pairs, an MLP."""

    def __init__(self, rows: int, tables: int, width: int, dense: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 4 * width), nn.ReLU(),
                                    nn.Linear(4 * width, width), nn.ReLU())  # fmt: skip
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 8 * width), nn.ReLU(),
                                 nn.Linear(8 * width, 1))  # fmt: skip
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        parts = [x] + [bag(ids) for bag, ids in zip(self.bags, categories.unbind(1), strict=True)]
        stacked = torch.stack(parts, 1)
        products = stacked @ stacked.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, crossed], 1)).sigmoid()


def recommender(size: str) -> Made:
    rows, tables, width, batch = of_size(
        size, (50, 3, 8, 4), (10000, 8, 32, 256), (1000000, 26, 64, 8192)
    )
    ids = torch.randint(0, rows, (batch, tables, 4))
    return Made(Recommender(rows, tables, width, 13),
                {"dense": torch.randn(batch, 13), "categories": ids})  # fmt: skip


class TwoTowers(nn.Module):
    """Users and items as vectors, each scored against all others of the batch."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(rows, width), nn.Embedding(rows, width)
        self.left = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.right = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        a = F.normalize(self.left(self.users(user)), dim=-1)
        b = F.normalize(self.right(self.items(item)), dim=-1)
        return (a @ b.t() / 0.05).log_softmax(-1)


def two_towers(size: str) -> Made:
    rows, width, batch = of_size(size, (50, 8, 4), (10000, 128, 256), (1000000, 256, 4096))
    user, item = torch.randint(0, rows, (2, batch)).unbind(0)
    return Made(TwoTowers(rows, width), {"user": user.clone(), "item": item.clone()})


# ---- graphs and points


class GraphConvolution(nn.Module):
    """The mean over neighbours, and the node itself (GraphSAGE)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sums = torch.zeros_like(x).index_add(0, target, x[source])
        count = x.new_zeros(x.shape[0]).index_add(0, target, x.new_ones(target.shape[0]))
        return self.own(x) + self.others(sums / count.clamp_min(1)[:, None])


class GraphAttention(nn.Module):
    """Neighbours weighted by a softmax over those of each node (GAT)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.project = heads, nn.Linear(width, width)
        self.left = nn.Parameter(torch.randn(heads, width // heads) * 0.1)
        self.right = nn.Parameter(torch.randn(heads, width // heads) * 0.1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        h = self.project(x).view(x.shape[0], self.heads, -1)
        score = F.leaky_relu(
            (h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target], 0.2
        )
        weight = score.clamp(-10, 10).exp()
        total = weight.new_zeros(x.shape[0], self.heads).index_add(0, target, weight)
        weight = weight / total[target].clamp_min(1e-6)
        mixed = torch.zeros_like(h).index_add(0, target, weight[..., None] * h[source])
        return F.elu(mixed.flatten(1))


class GraphNet(nn.Module):
    def __init__(self, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(width, 16)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x, source, target))
        return self.head(x)


def _graph(width: int, nodes: int, edges: int) -> dict[str, Tensor]:
    source, target = torch.randint(0, nodes, (2, edges)).unbind(0)
    return {"x": torch.randn(nodes, width), "source": source.clone(), "target": target.clone()}


def graph_convolution(size: str) -> Made:
    width, nodes, edges = of_size(size, (8, 20, 60), (64, 2000, 10000), (256, 100000, 1000000))
    layers: list[nn.Module] = [GraphConvolution(width, width) for _ in range(3)]
    return Made(GraphNet(layers, width), _graph(width, nodes, edges))


def graph_attention(size: str) -> Made:
    width, nodes, edges = of_size(size, (8, 20, 60), (64, 2000, 10000), (256, 50000, 500000))
    layers: list[nn.Module] = [GraphAttention(width, 4) for _ in range(2)]
    return Made(GraphNet(layers, width), _graph(width, nodes, edges))


class Points(nn.Module):
    """PointNet: every point alone, the largest of all, classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 8 * width)
        self.alone = nn.Sequential(*(
            nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        ))  # fmt: skip
        self.head = nn.Sequential(nn.Linear(8 * width, width), nn.ReLU(), nn.Linear(width, 40))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.alone(x).amax(-1))


def points(size: str) -> Made:
    width, batch, count = of_size(size, (8, 2, 32), (32, 4, 512), (128, 32, 4096))
    return Made(Points(width), {"x": torch.randn(batch, 3, count)})


# ---- others


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(),
                                    nn.Linear(2 * tokens, tokens))  # fmt: skip
        self.along = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),
                                   nn.Linear(4 * width, width))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norm2(x))


def mixer(size: str) -> Made:
    tokens, width, batch, layers = of_size(size, (16, 16, 2, 1), (64, 192, 4, 2), (196, 768, 64, 6))
    blocks = nn.Sequential(*(MixerBlock(tokens, width) for _ in range(layers)))
    return Made(blocks, {"input": torch.randn(batch, tokens, width)})


def torch_encoder(size: str) -> Made:
    width, batch, length, layers = of_size(size, (32, 2, 8, 1), (192, 2, 96, 2), (768, 16, 512, 6))
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True)
    module = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return Made(module, {"src": torch.randn(batch, length, width)})


class Autoencoder(nn.Module):
    """A variational one: a mean and a spread, noise it is given, a picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(),
                                    nn.Conv2d(width, 2 * width, 4, 2, 1), nn.ReLU(),
                                    nn.Conv2d(2 * width, 16, 1))  # fmt: skip
        self.decode = nn.Sequential(nn.ConvTranspose2d(8, 2 * width, 4, 2, 1), nn.ReLU(),
                                    nn.ConvTranspose2d(2 * width, 3, 4, 2, 1))  # fmt: skip

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, 1)
        loss = (mean.square() + spread.exp() - spread - 1).mean((1, 2, 3))
        return self.decode(mean + (0.5 * spread).exp() * noise).sigmoid(), loss


def autoencoder(size: str) -> Made:
    width, batch, side = of_size(size, (8, 2, 16), (32, 8, 64), (64, 64, 128))
    noise = torch.randn(batch, 8, side // 4, side // 4)
    return Made(Autoencoder(width), {"x": torch.rand(batch, 3, side, side), "noise": noise})


class Separator(nn.Module):
    """Conv-TasNet: dilated depthwise convolutions of a wave that is masked."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, width, 16, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, 2 * width, 1), nn.PReLU(), nn.GroupNorm(1, 2 * width),
                          nn.Conv1d(2 * width, 2 * width, 3, padding=2**k, dilation=2**k,
                                    groups=2 * width),
                          nn.PReLU(), nn.GroupNorm(1, 2 * width), nn.Conv1d(2 * width, width, 1))
            for k in range(layers)
        )  # fmt: skip
        self.decode = nn.ConvTranspose1d(width, 1, 16, 8)

    def forward(self, wave: Tensor) -> Tensor:
        encoded = self.encode(wave).relu()
        y = encoded
        for block in self.blocks:
            y = y + block(y)
        return self.decode(encoded * y.sigmoid())


def separator(size: str) -> Made:
    width, layers, batch, length = of_size(
        size, (8, 2, 1, 400), (64, 3, 2, 8000), (256, 6, 8, 64000)
    )
    return Made(Separator(width, layers), {"wave": torch.randn(batch, 1, length)})


class Field(nn.Module):
    """NeRF's: sines of places through an MLP with a skip, colours added up along rays."""

    def __init__(self, width: int, waves: int = 6) -> None:
        super().__init__()
        self.waves = waves
        self.first = nn.Sequential(nn.Linear(6 * waves, width), nn.ReLU(),
                                   nn.Linear(width, width), nn.ReLU())  # fmt: skip
        self.second = nn.Sequential(nn.Linear(width + 6 * waves, width), nn.ReLU(),
                                    nn.Linear(width, 4))  # fmt: skip

    def forward(self, places: Tensor) -> Tensor:
        angles = (places[..., None] * 2.0 ** torch.arange(self.waves, device=places.device)
                  .to(places.dtype)).flatten(-2)  # fmt: skip
        seen = torch.cat([angles.sin(), angles.cos()], -1)
        y = self.second(torch.cat([self.first(seen), seen], -1))
        dense = F.softplus(y[..., 3])
        passed = torch.cat([torch.zeros_like(dense[..., :1]), dense[..., :-1]], -1).cumsum(-1)
        weight = (-passed).exp() * (1 - (-dense).exp())
        return (weight[..., None] * y[..., :3].sigmoid()).sum(-2)


def radiance_field(size: str) -> Made:
    width, rays, samples = of_size(size, (16, 8, 4), (128, 128, 32), (256, 8192, 64))
    return Made(Field(width), {"places": torch.rand(rays, samples, 3)})


MAKERS: dict[str, tuple[str, Callable[[str], Made]]] = {
    "torch_resnet": ("convolution net", resnet),
    "torch_mobilenet": ("convolution net", mobilenet),
    "torch_convnext": ("convolution net", convnext),
    "torch_vgg": ("convolution net", vgg),
    "torch_densenet": ("convolution net", densenet),
    "dcgan": ("generator", generator),
    "vae": ("generator", autoencoder),
    "diffusion_unet": ("diffusion", unet),
    "dit": ("diffusion", dit),
    "s4d": ("state space", state_space),
    "selective_scan": ("state space", selective_scan),
    "lstm": ("recurrent", lstm),
    "dlrm": ("recommender", recommender),
    "two_towers": ("recommender", two_towers),
    "graphsage": ("graph", graph_convolution),
    "gat": ("graph", graph_attention),
    "pointnet": ("points", points),
    "mlp_mixer": ("mixer", mixer),
    "torch_encoder": ("encoder", torch_encoder),
    "conv_tasnet": ("speech", separator),
    "nerf": ("radiance field", radiance_field),
}


def models() -> list[Model]:
    more: dict[str, Any] = MAKERS
    return [Model(name, field, "torch.nn", make) for name, (field, make) in more.items()]
