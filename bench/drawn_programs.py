"""Memory-bound programs that are drawn: the kinds models have, in sizes nobody chose.

A kind says what its arguments are with a letter each, and what their shape is like:

    x  a tensor of the shape that is drawn     f  the same in float32     l  channels last
    w  a vector as long as a row               W  the same in float32     c  one of the channels
    b  a mask of the shape                     B  a mask of its last two axes
    i  a place in the row for each element     t  one for each row        T  some are to be ignored
    p  some rows, by number                    q  int8 of the shape       s  a scale for each row
    r  cosines and sines of a rotation for the last two axes, twice
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import gpu_programs as known
from bench.gpu_programs import BF16, F32, GpuProgram

F16 = torch.float16
NAMES = {BF16: "bf16", F16: "f16", F32: "f32"}
WHOLE = {"x": 0, "l": 0, "f": 4, "b": 1, "i": 8, "q": 1}  # bytes of an element, 0: as drawn
Shape = tuple[int, ...]


class Draw:
    """What is drawn: numbers evenly by their logarithm, half of them round."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def between(self, low: float, high: float) -> float:
        return math.exp(self.random.uniform(math.log(low), math.log(high)))

    def size(self, low: int, high: int) -> int:
        found = round(self.between(low, high))
        match self.random.randrange(4):
            case 0:
                found = 1 << round(math.log2(found))
            case 1:
                found = -(-found // 8) * 8
            case _:
                found |= 1
        return max(low, min(found, high))


# ---- shapes of so many elements


def rows(low: int = 64, high: int = 200_000, step: int = 1) -> Callable[[Draw, int], Shape]:
    def shape(draw: Draw, elements: int) -> Shape:
        length = draw.size(low, high) * step
        return max(1, elements // length), length

    return shape


ROWS = rows()


def vocabulary(draw: Draw, elements: int) -> Shape:
    length = draw.random.choice((30522, 32000, 32768, 50257, 50304, 65024, 100277, 128256, 151936))
    return max(1, elements // length), length


def cube(draw: Draw, elements: int) -> Shape:
    last, middle = draw.size(64, 2048), draw.size(16, 1024)
    return max(1, elements // (last * middle)), middle, last


def heads(draw: Draw, elements: int) -> Shape:
    """Batch, positions, heads and what a head has."""
    head, count = draw.random.choice((64, 80, 96, 128)), draw.random.choice((8, 12, 16, 32, 40))
    length = draw.size(128, 8192)
    return max(1, elements // (length * count * head)), length, count, head


def scores(draw: Draw, elements: int) -> Shape:
    length = draw.size(128, 4096)
    return max(1, elements // (length * length * 8)), 8, length, length


def planes(draw: Draw, elements: int) -> Shape:
    channels, side = draw.random.choice((32, 64, 96, 128, 320, 512, 1024)), draw.size(14, 192)
    return max(1, elements // (channels * side * side)), channels, side, side


def flat(draw: Draw, elements: int) -> Shape:
    return (draw.size(elements - elements // 8, elements),)


# ---- what is computed, where the list does not have it


def causal_softmax(x: Tensor) -> Tensor:
    length = x.shape[-1]
    seen = torch.ones(length, length, device=x.device, dtype=torch.bool).tril()
    return torch.softmax((x * 0.125).masked_fill(~seen, float("-inf")), -1)


def seen_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(torch.where(mask, x * 0.125, -1e4).float(), -1).to(x.dtype)


def wide_layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias).to(x.dtype)


def wide_rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight).to(x.dtype)


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, label_smoothing=0.1)


def each_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none", ignore_index=-100)


def squared_relu(x: Tensor, bias: Tensor) -> Tensor:
    return F.relu(x + bias).square()


def geglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.transpose(1, 2).chunk(2, -1)
    turned = torch.cat((-high, low), -1)
    return (x.transpose(1, 2) * cos + turned * sin).to(x.dtype).contiguous()


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = cos[:, None, ::2], sin[:, None, ::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def int8_rows(x: Tensor) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def int8_whole(x: Tensor) -> Any:
    scale = x.float().abs().amax() / 127
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def fp8_rows(x: Tensor) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def other_type(x: Tensor) -> Tensor:
    return x.to(BF16 if x.dtype is F32 else F32)


def split_rows(x: Tensor) -> Any:
    first, second = x.split([x.shape[-1] // 3, x.shape[-1] - x.shape[-1] // 3], -1)
    return first * 2, F.relu(second)


def chain(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x.clamp(-1, 1) * y, y.masked_fill(y > 2, 0.0)).clamp(max=3)


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Any:
    g = g.float()
    m, v = torch.lerp(m, g, 0.1), v * 0.95 + g * g * 0.05
    p = p * (1 - 1e-4) - 1e-3 * (m / 0.5) / ((v.abs() / 0.3).sqrt() + 1e-8)
    return p, m, v, p.to(BF16)


def momentum(p: Tensor, g: Tensor, m: Tensor) -> Any:
    m = m * 0.9 + (g.float() + p * 1e-4)
    return p - 0.01 * m, m, (p - 0.01 * m).to(BF16)


def permuted(order: Sequence[int]) -> Callable[..., Any]:
    return lambda x: x.permute(*order).contiguous()


def reduced(op: Callable[..., Any], *dims: int) -> Callable[..., Any]:
    if not dims:
        return lambda x: op(x)
    dim = dims[0] if len(dims) == 1 else dims
    return lambda x: op(x, dim)


# ---- kinds


@dataclass(frozen=True)
class Kind:
    name: str
    fn: Callable[..., Any]
    letters: str = "x"
    shape: Callable[[Draw, int], Shape] = ROWS
    backward: bool = False
    again: tuple[int, ...] = ()
    compared: bool = True


SUMS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, *dim: x.float().sum(*dim),
    "mean": lambda x, *dim: x.mean(*dim),
    "max": lambda x, *dim: x.amax(*dim),
    "squares": lambda x, *dim: x.float().square().sum(*dim),
}
SPREADS: dict[str, Callable[..., Any]] = {
    "var": lambda x, *dim: x.var(*dim),
    "norm": lambda x, *dim: torch.linalg.vector_norm(x, 2, *dim),
    "argmax": lambda x, *dim: x.argmax(*dim),
    "std and mean": lambda x, *dim: torch.std_mean(x, *dim),
}


def _reductions(ops: dict[str, Callable[..., Any]], *dims: Sequence[int]) -> tuple[Kind, ...]:
    return tuple(
        Kind(f"{name} over {','.join(map(str, d)) or 'all'}", reduced(op, *d), shape=shape)
        for (name, op), d in itertools.product(ops.items(), dims)
        if name != "argmax" or len(d) < 2
        for shape in ((ROWS, cube) if d in ((-1,), (0,)) else (cube,))
    )


def _permutes(shape: Callable[[Draw, int], Shape], *orders: Sequence[int]) -> tuple[Kind, ...]:
    return tuple(Kind(f"permute {''.join(map(str, o))}", permuted(o), shape=shape) for o in orders)


# One of a group is drawn in turn: neither reductions nor norms are to crowd out the rest.
GROUPS: tuple[tuple[Kind, ...], ...] = (
    (Kind("softmax", known.softmax), Kind("log softmax", known.log_softmax),
     Kind("softmax over 1", lambda x: torch.softmax(x, 1), shape=cube)),
    (Kind("causal softmax", causal_softmax, "x", scores),
     Kind("masked softmax", known.masked_softmax, "xB", scores),
     Kind("where softmax", seen_softmax, "xB", scores)),
    (Kind("layernorm", known.layernorm, "xww", rows(64, 32768)),
     Kind("layernorm wide weights", wide_layernorm, "xWW", rows(64, 32768)),
     Kind("rmsnorm", known.rmsnorm, "xw", rows(64, 32768)),
     Kind("rmsnorm wide weights", wide_rmsnorm, "xW", rows(64, 32768))),
    (Kind("residual layernorm", known.residual_layernorm, "xxww", rows(64, 32768)),
     Kind("residual rmsnorm", known.residual_rmsnorm, "xxw", rows(64, 32768))),
    (Kind("layernorm training", known.layernorm, "xww", rows(64, 16384), backward=True),
     Kind("rmsnorm training", known.rmsnorm, "xw", rows(64, 16384), backward=True),
     Kind("softmax training", known.softmax, "x", rows(64, 32768), backward=True)),
    (Kind("cross entropy", known.cross_entropy, "xt", vocabulary),
     Kind("cross entropy smoothed", smoothed, "xt", vocabulary),
     Kind("cross entropy each", each_loss, "xT", vocabulary),
     Kind("cross entropy", known.cross_entropy, "xT", rows(100, 200_000))),
    (Kind("cross entropy training", known.cross_entropy, "xT", vocabulary, backward=True),
     Kind("cross entropy smoothed training", smoothed, "xt", vocabulary, backward=True)),
    (Kind("bias gelu", known.bias_gelu, "xw"), Kind("bias squared relu", squared_relu, "xw"),
     Kind("bias silu", lambda x, b: F.silu(x + b), "xw"),
     Kind("gelu tanh", lambda x: F.gelu(x, approximate="tanh"))),
    (Kind("bias gelu training", known.bias_gelu, "xw", rows(64, 32768), backward=True),
     Kind("bias squared relu training", squared_relu, "xw", rows(64, 32768), backward=True),
     Kind("silu training", lambda x: F.silu(x), "x", backward=True)),
    (Kind("swiglu", known.swiglu, "x", rows(64, 32768, 2)),
     Kind("geglu", geglu, "x", rows(64, 32768, 2)),
     Kind("silu mul", known.silu_mul, "xx")),
    (Kind("rope halves", rotated, "xr", heads), Kind("rope pairs", rotated_pairs, "xr", heads)),
    _permutes(rows(64, 30000), (1, 0)),
    _permutes(cube, (0, 2, 1), (1, 0, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)),
    (*_permutes(heads, (0, 2, 1, 3), (0, 2, 3, 1)), *_permutes(planes, (0, 2, 3, 1), (3, 2, 1, 0))),
    _reductions(SUMS, (-1,), (0,)),
    _reductions(SUMS, (1,), (0, 1), (0, 2), (1, 2), ()),
    _reductions(SPREADS, (-1,), (0,), (1,), ()),
    (Kind("cast", other_type), Kind("int8 rows", int8_rows, compared=False),
     Kind("fp8 rows", fp8_rows, compared=False), Kind("int8 whole", int8_whole, again=(0,)),
     Kind("from int8", lambda q, s: (q * s).to(BF16), "qs")),
    (Kind("cat last", lambda x, y: torch.cat((x, y * 2), -1), "xx"),
     Kind("cat first", lambda x, y: torch.cat((x, F.relu(y))), "xx"),
     Kind("stack", lambda x, y: torch.stack((x, y), -1), "xx"), Kind("split", split_rows),
     Kind("cat of three", lambda x, y, z: torch.cat((x, y, z), 1), "xxx", cube)),
    (Kind("pad", lambda x: F.pad(x, (1, 2))), Kind("roll", lambda x: torch.roll(x + 1, 3, -1)),
     Kind("flip", lambda x: x.flip(-1)),
     Kind("reflect", lambda x: F.pad(x, (1, 1, 1, 1), "reflect"), shape=planes)),
    (Kind("chain", chain, "xxb"), Kind("masked fill", lambda x, m: x.masked_fill(m, 0) * 2, "xb"),
     Kind("clamp", lambda x: x.clamp(-1, 1).nan_to_num(0.0))),
    (Kind("gather", lambda x, i: x.gather(-1, i), "xi", rows(64, 16384)),
     Kind("embedding", known.embedding, "px", rows(64, 16384)),
     Kind("embedding by index_select", lambda i, x: x.index_select(0, i), "px", rows(64, 16384))),
    (Kind("dropout", lambda x: F.dropout(x, 0.1), compared=False),
     Kind("dropout add", lambda x, y: F.dropout(x, 0.1) + y, "xx", compared=False)),
    (Kind("group norm", known.group_norm, "xcc", planes),
     Kind("batch norm relu", known.batch_norm, "xcc", planes, again=(0,)),
     Kind("batch norm relu channels last", known.batch_norm, "lcc", planes, again=(0,)),
     Kind("instance norm", lambda x: F.instance_norm(x), "x", planes),
     Kind("scale and shift", lambda x, w, b: F.relu(x * w[:, None, None] + b[:, None, None]),
          "xcc", planes)),
    (Kind("average pool 2", lambda x: F.avg_pool2d(x, 2), "x", planes),
     Kind("max pool 3 by 2", lambda x: F.max_pool2d(x, 3, 2, 1), "x", planes),
     Kind("max pool 2 channels last", lambda x: F.max_pool2d(x, 2), "l", planes),
     Kind("average of planes", lambda x: x.mean((2, 3)), "x", planes),
     Kind("upsample", lambda x: F.interpolate(x, scale_factor=2.0), "x", planes)),
    # eager rounds sums of sixteen bits on their way
    (Kind("cumsum", known.cumulative, compared=False),
     Kind("cumsum over 1", lambda x: x.cumsum(1), "x", cube, compared=False)),
    (Kind("adamw", adamw, "ffff", flat), Kind("adamw low gradient", adamw, "fxff", flat),
     Kind("sgd momentum", momentum, "fxf", flat)),
)  # fmt: skip


# ---- drawing


def drawn(count: int, seed: int, moved: tuple[float, float] = (60e6, 500e6),
          device: str = "cuda") -> list[GpuProgram]:  # fmt: skip
    """So many programs whose inputs are that large, with the seed always the same."""
    draw = Draw(seed)
    groups = [draw.random.sample(group, len(group)) for group in GROUPS]
    draw.random.shuffle(groups)
    made: dict[str, GpuProgram] = {}
    for turn in itertools.count():
        group = groups[turn % len(groups)]
        one = program(group[turn // len(groups) % len(group)], draw, moved, device)
        made[one.name] = one
        if len(made) == count:
            break
    return list(made.values())


def program(kind: Kind, draw: Draw, moved: tuple[float, float], device: str) -> GpuProgram:
    dtype = draw.random.choices((BF16, F16, F32), (6, 2, 2))[0]
    each = sum(WHOLE[k] or dtype.itemsize for k in kind.letters if k in WHOLE)
    shape = kind.shape(draw, int(draw.between(*moved)) // each)

    def inputs() -> tuple[Any, ...]:
        found = [argument(k, shape, dtype, device) for k in kind.letters.replace("r", "rR")]
        if kind.backward:
            found = [a.requires_grad_(a.is_floating_point()) for a in found]
        return tuple(found)

    name = f"{kind.name} {'x'.join(map(str, shape))} {NAMES[dtype]}"
    return GpuProgram(name, kind.fn, inputs, kind.backward, kind.again, not kind.compared)


def argument(letter: str, shape: Shape, dtype: torch.dtype, device: str) -> Tensor:
    def randn(*size: int) -> Tensor:
        return torch.randn(size, device=device)

    def integers(high: int, *size: int) -> Tensor:
        return torch.randint(0, high, size, device=device)

    places = shape[-1]
    match letter:
        case "x" | "f":
            return randn(*shape).to(F32 if letter == "f" else dtype)
        case "l":
            return randn(*shape).to(dtype).contiguous(memory_format=torch.channels_last)
        case "w" | "W":
            return randn(places).to(F32 if letter == "W" else dtype)
        case "c":
            return randn(shape[1]).to(dtype)
        case "b" | "B":
            return randn(*(shape if letter == "b" else shape[-2:])) < -0.5
        case "i" | "t":
            return integers(places, *(shape if letter == "i" else shape[:-1]))
        case "T":
            found = integers(places, *shape[:-1])
            return found.masked_fill(randn(*shape[:-1]) < -1.5, -100)
        case "p":
            return integers(shape[0], max(1, shape[0] // 4))
        case "q":
            return torch.randint(-128, 128, shape, device=device, dtype=torch.int8)
        case "s":
            return randn(*shape[:-1], 1)
        case _:
            angle = randn(shape[1], shape[-1])
            return angle.cos() if letter == "r" else angle.sin()
