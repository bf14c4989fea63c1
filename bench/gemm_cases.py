"""The products and fused groups of `bench.gpu_gemm`: a list of each, and such as are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    name: str
    fn: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    fused: bool = False


def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    scale = shape[-1] ** -0.25
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def mm(m: int, n: int, k: int, dtype: torch.dtype = BF16, layout: str = "nt") -> Case:
    """`nt`: the right operand is a transposed weight, as in a linear layer."""

    def inputs() -> tuple[Tensor, ...]:
        a = rand(m, k, dtype=dtype) if layout[0] == "n" else rand(k, m, dtype=dtype).t()
        b = rand(k, n, dtype=dtype) if layout[1] == "n" else rand(n, k, dtype=dtype).t()
        return a, b

    kind = str(dtype).removeprefix("torch.")
    return Case(f"mm {m}x{n}x{k} {kind} {layout}", torch.mm, inputs)


def bmm(b: int, m: int, n: int, k: int, dtype: torch.dtype = BF16) -> Case:
    kind = str(dtype).removeprefix("torch.")
    return Case(f"bmm {b}x{m}x{n}x{k} {kind}", torch.bmm,
                lambda: (rand(b, m, k, dtype=dtype), rand(b, k, n, dtype=dtype)))  # fmt: skip


PRODUCTS = [
    mm(8192, 8192, 8192), mm(4096, 4096, 4096), mm(4096, 14336, 4096), mm(2048, 4096, 14336),
    mm(16384, 512, 512), mm(1000, 1000, 1000), mm(2049, 2051, 2047, layout="nn"),
    mm(1, 4096, 4096), mm(4, 4096, 14336), mm(16, 14336, 4096), mm(32, 4096, 4096),
    mm(64, 6144, 4096), mm(128, 6144, 4096), mm(128, 4096, 14336),
    mm(256, 256, 16384), mm(64, 64, 65536, layout="nn"), mm(512, 128, 8192),
    mm(4096, 4096, 64, layout="nn"), mm(2048, 50257, 768), mm(4096, 768, 3072, layout="tn"),
    mm(4096, 4096, 4096, F16, "nn"), mm(1024, 1024, 1024, F32), mm(333, 777, 555, F32, "nn"),
    bmm(64, 512, 512, 64), bmm(128, 2048, 64, 2048), bmm(16, 1024, 1024, 1024),
]  # fmt: skip


# ---- products that are drawn

WIDTHS = (512, 768, 1024, 1280, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 11008, 14336)
KINDS = ("prefill", "decode", "skinny", "large k", "odd", "batched")
MOST_FLOPS = {BF16: 1.5e12, F16: 1.5e12, F32: 8e10}  # about two milliseconds


def drawn(count: int, seed: int) -> list[Case]:
    """So many products of all kinds in turn, with the seed always the same."""
    rng = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        kind = KINDS[len(cases) % len(KINDS)]
        dtype = rng.choices((BF16, F16, F32), (6, 2, 2))[0]
        batch, m, n, k = sizes(kind, rng)
        moved = dtype.itemsize * batch * (m * n + n * k + m * k)
        if 2 * batch * m * n * k <= MOST_FLOPS[dtype] and moved < 4 << 30:
            layout = rng.choice(("nt", "nt", "nn", "tn"))
            one = bmm(batch, m, n, k, dtype) if kind == "batched" else mm(m, n, k, dtype, layout)
            cases.append(one)
    return cases


def sizes(kind: str, rng: random.Random) -> tuple[int, int, int, int]:
    """Batch, rows, columns and what is summed over."""
    n, k = rng.choice(WIDTHS), rng.choice(WIDTHS)
    match kind:
        case "prefill":
            return 1, rng.choice((256, 512, 1024, 1536, 2048, 4096, 8192, 16384)), n, k
        case "decode":
            return 1, rng.choice((1, 2, 3, 5, 8, 16, 24, 32, 48, 64, 100, 128)), n, k
        case "skinny":
            few, many = rng.choice((16, 64, 96, 128, 256)), rng.choice((4096, 20000, 65536))
            return 1, *rng.choice(((many, few, k), (many, k, few), (few, many, k)))
        case "large k":
            few = [rng.choice((32, 64, 128, 320, 512)) for _ in range(2)]
            return 1, *few, rng.choice((8192, 16384, 50000, 131072))
        case "odd":
            return 1, *(rng.randrange(33, 5000) for _ in range(3))
        case _:
            lengths = [rng.choice((64, 128, 256, 512, 1000, 1024, 2048)) for _ in range(2)]
            batch = rng.choice((4, 12, 16, 32, 96, 128))
            return batch, *lengths, rng.choice((32, 64, 80, 128, 512))


def linear(m: int, n: int, k: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (rand(m, k), rand(n, k), rand(n))


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ gate.t()) * (x @ up.t())


def normed(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), scale) @ w.t()


def int8_weights(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return (x @ w.to(x.dtype).t()) * scale


def int8(n: int, k: int) -> Tensor:
    return torch.randint(-128, 128, (n, k), device=DEVICE, dtype=torch.int8)


FUSED = [
    Case("bias + gelu 8192x16384x4096", lambda x, w, b: F.gelu(F.linear(x, w, b)),
         linear(8192, 16384, 4096), True),
    Case("bias + tanh gelu 2048x4096x1024", lambda x, w, b: F.gelu(F.linear(x, w, b),
         approximate="tanh"), linear(2048, 4096, 1024), True),
    Case("bias + relu 4096x4096x4096", lambda x, w, b: F.relu(F.linear(x, w, b)),
         linear(4096, 4096, 4096), True),
    Case("bias + residual 8192x4096x1024", lambda x, w, b, r: F.linear(x, w, b) + r,
         lambda: (*linear(8192, 4096, 1024)(), rand(8192, 4096)), True),
    Case("swiglu 4096x11008x4096", swiglu,
         lambda: (rand(4096, 4096), rand(11008, 4096), rand(11008, 4096)), True),
    Case("rms norm, product 4096x4096x4096", normed,
         lambda: (rand(4096, 4096), rand(4096), rand(4096, 4096)), True),
    Case("int8 weights 16x14336x4096", int8_weights,
         lambda: (rand(16, 4096), int8(14336, 4096), rand(14336)), True),
    Case("silu and scale 128x8192x4096", lambda x, w, s: F.silu(x @ w.t()) * s,
         lambda: (rand(128, 4096), rand(8192, 4096), rand(8192)), True),
    Case("float32 out 4096x4096x1024", lambda x, w: (x @ w.t()).float() * 0.5,
         lambda: (rand(4096, 1024), rand(4096, 1024)), True),
    Case("batched scores 64x1024x1024x64", lambda q, k, m: (q @ k.transpose(1, 2)) * 0.125 + m,
         lambda: (rand(64, 1024, 64), rand(64, 1024, 64), rand(1024, 1024)), True),
]  # fmt: skip


# ---- what gradients come to


def mlp_gradients(up: Tensor, h: Tensor, x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, ...]:
    """Of gelu(linear) and linear; `h` is what gelu was given."""
    inner = torch.ops.aten.gelu_backward(up @ w2, h)
    return inner @ w1, inner.t() @ x, inner.sum(0), up.t() @ F.gelu(h)


def gate_gradients(up: Tensor, a: Tensor, b: Tensor, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor
                   ) -> tuple[Tensor, ...]:  # fmt: skip
    """Of silu(x @ w1.t()) * (x @ w3.t()) and a product."""
    inner, s = up @ w2, torch.sigmoid(a)
    left, right = inner * b * (s * (1 + a * (1 - s))), inner * (a * s)
    return left @ w1 + right @ w3, left.t() @ x, right.t() @ x


def norm_gradients(up: Tensor, w: Tensor, x: Tensor, scale: Tensor, r: Tensor) -> Tensor:
    """Of a residual stream before rms norm and a product."""
    grad = (up @ w).float() * scale.float()
    y = x.float()
    inverse = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    mean = (grad * y).mean(-1, keepdim=True)
    return (inverse * (grad - y * inverse * inverse * mean)).to(x.dtype) + r


BACKWARD = [
    Case("gradients of mlp 4096x4096x1024", mlp_gradients,
         lambda: (rand(4096, 1024), rand(4096, 4096), rand(4096, 1024), rand(4096, 1024),
                  rand(1024, 4096)), True),
    Case("gradients of mlp 8192x3072x768", mlp_gradients,
         lambda: (rand(8192, 768), rand(8192, 3072), rand(8192, 768), rand(3072, 768),
                  rand(768, 3072)), True),
    Case("gradients of swiglu 2048x5632x2048", gate_gradients,
         lambda: (rand(2048, 2048), rand(2048, 5632), rand(2048, 5632), rand(2048, 2048),
                  rand(5632, 2048), rand(5632, 2048), rand(2048, 5632)), True),
    Case("gradients of norm 4096x4096x4096", norm_gradients,
         lambda: (rand(4096, 4096), rand(4096, 4096), rand(4096, 4096), rand(4096),
                  rand(4096, 4096)), True),
]  # fmt: skip


# ---- groups that are drawn

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1000, 1024, 2048, 4096, 8192)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "squared relu": lambda x: F.relu(x).square(),
    "soft cap": lambda x: torch.tanh(x / 30) * 30,
}
Inputs = Callable[[], tuple[Tensor, ...]]


def normed_both(x: Tensor, w: Tensor, b: Tensor, r: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """What follows attention: the residual stream, and what the next layer reads of it."""
    stream = F.linear(x, w, b) + r
    return stream, F.rms_norm(stream, (stream.shape[-1],), scale)


def packed_gate(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w.t()).chunk(2, -1)
    return F.silu(gate) * up


def to_heads(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    heads = F.linear(x, w, b).view(x.shape[0], 3, -1, 64).permute(1, 2, 0, 3)
    return tuple(one.contiguous() for one in heads.unbind())


def grouped_int8(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    wide = w.view(*scale.shape, -1).to(x.dtype) * scale.unsqueeze(-1)
    return x @ wide.view(w.shape).t()


def low_rank(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ w.t() + (x @ a.t()) @ b.t() * 0.5


def scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(1, 2) * 0.125 + mask, -1)


def relu_gradients(up: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of the weights and the bias of a linear layer before a relu."""
    masked = torch.where(y > 0, up, 0)
    return masked.t() @ x, masked.sum(0)


def group(kind: str, m: int, n: int, k: int) -> tuple[Callable[..., Any], Inputs]:
    """A function and what makes its inputs."""
    match kind:
        case "linear residual":
            return (lambda x, w, b, r: F.linear(x, w, b) + r,
                    lambda: (*linear(m, n, k)(), rand(m, n)))  # fmt: skip
        case "linear residual rmsnorm":
            return normed_both, lambda: (*linear(m, n, k)(), rand(m, n), rand(n))
        case "swiglu":
            return swiglu, lambda: (rand(m, k), rand(n, k), rand(n, k))
        case "packed swiglu":
            return packed_gate, lambda: (rand(m, k), rand(2 * n, k))
        case "rmsnorm linear":
            return normed, lambda: (rand(m, k), rand(k), rand(n, k))
        case "layernorm linear":
            return (lambda x, s, w, b: F.linear(F.layer_norm(x, (k,), s, s), w, b),
                    lambda: (rand(m, k), rand(k), rand(n, k), rand(n)))  # fmt: skip
        case "to heads":
            return to_heads, lambda: (rand(m, k), rand(3 * k, k), rand(3 * k))
        case "int8 weights":
            return int8_weights, lambda: (rand(m, k), int8(n, k), rand(n))
        case "grouped int8 weights":
            return grouped_int8, lambda: (rand(m, k), int8(n, k), rand(n, k // 128))
        case "float32 out":
            return lambda x, w: (x @ w.t()).float() * 0.5, lambda: (rand(m, k), rand(n, k))
        case "float32 in":
            return (lambda x, w: x.to(w.dtype) @ w.t(),
                    lambda: (rand(m, k, dtype=F32), rand(n, k)))  # fmt: skip
        case "low rank":
            return low_rank, lambda: (rand(m, k), rand(n, k), rand(16, k), rand(n, 16))
        case "two products":
            return (lambda x, w, y, v: x @ w.t() + y @ v.t(),
                    lambda: (rand(m, k), rand(n, k), rand(m, k), rand(n, k)))  # fmt: skip
        case "chosen rows":
            return (lambda x, w, rows: x[rows] @ w.t(),
                    lambda: (rand(m, k), rand(n, k),
                             torch.randint(m, (m,), device=DEVICE)))  # fmt: skip
        case "transposed out":
            return lambda x, w: (x @ w.t()).t().contiguous(), lambda: (rand(m, k), rand(n, k))
        case "log softmax head":
            return (lambda x, w: F.log_softmax(x @ w.t(), -1),
                    lambda: (rand(m, k), rand(32000, k)))  # fmt: skip
        case "relu gradients":
            return relu_gradients, lambda: (rand(m, n), rand(m, n), rand(m, k))
        case "scores":
            batch, length = min(64, -(-m // 16)), min(m, 1024)
            return (scores, lambda: (rand(batch, length, 64), rand(batch, length, 64),
                                     rand(length, length)))  # fmt: skip
        case _:
            activation = ACTIVATIONS[kind.removeprefix("linear ")]
            return lambda x, w, b: activation(F.linear(x, w, b)), linear(m, n, k)


GROUP_KINDS = (
    *(f"linear {name}" for name in ACTIVATIONS), "linear residual", "linear residual rmsnorm",
    "swiglu", "packed swiglu", "rmsnorm linear", "layernorm linear", "to heads", "int8 weights",
    "grouped int8 weights", "float32 out", "float32 in", "low rank", "two products", "chosen rows",
    "transposed out", "log softmax head", "relu gradients", "scores",
)  # fmt: skip


def drawn_groups(count: int, seed: int) -> list[Case]:
    """So many fused groups, every kind once before any again, with the seed always the same."""
    rng = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        for kind in rng.sample(GROUP_KINDS, min(len(GROUP_KINDS), count - len(cases))):
            m, n, k = rng.choice(ROWS), rng.choice(WIDTHS), rng.choice(WIDTHS[:-2])
            m = min(m, int(MOST_FLOPS[BF16] / (8 * n * k)))
            cases.append(Case(f"{kind} {m}x{n}x{k}", *group(kind, m, n, k), fused=True))
    return cases
