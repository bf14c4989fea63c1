"""What `bench.gpu_cutlass` measures: products, groups of a product and what follows it, and random
epilogues. Nothing here needs a card but the tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4 = torch.float8_e4m3fn
SHAPES = (
    (8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 1024),
    (512, 4096, 4096), (128, 4096, 4096), (64, 6144, 4096), (4096, 14336, 4096),
    (4096, 4096, 14336), (16384, 1024, 1024), (2048, 32000, 4096), (256, 256, 16384),
)  # fmt: skip
KINDS = ("bf16", "fp16", "fp8", "int8")
BASE: dict[str, Any] = {"max_autotune": True, "fx_graph_cache": False,
                        "cuda.cutlass_epilogue_fusion_enabled": True}  # fmt: skip
# One kernel with a visitor for each: what is asked is whether it is right.
VISITED: dict[str, Any] = {**BASE, "cuda.cutlass_max_profiling_configs": 1,
                           "cuda.cutlass_tma_only": True,
                           "cuda.cutlass_max_profiling_swizzle_options": [1],
                           "benchmark_epilogue_fusion": True}  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    kind: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def _r(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape, device="cuda") / shape[-1] ** 0.5).to(dtype)


def _int8(*shape: int) -> Tensor:
    return torch.randint(-8, 8, shape, device="cuda", dtype=torch.int8)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def _scaled(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, s, t, out_dtype=BF16, use_fast_accum=True)


def _product(kind: str, m: int, n: int, k: int) -> Case | None:
    size = f"{m}x{n}x{k} {kind}"
    if kind in ("bf16", "fp16"):
        dtype = BF16 if kind == "bf16" else F16
        return Case(f"mm {size}", _mm,
                    lambda: (_r(m, k, dtype=dtype), _r(n, k, dtype=dtype).t()), kind)  # fmt: skip
    if kind == "fp8":
        return Case(f"scaled_mm {size}", _scaled, lambda: (
            _r(m, k).to(E4), _r(n, k).to(E4).t(), torch.rand(m, 1, device="cuda"),
            torch.rand(1, n, device="cuda")), kind)  # fmt: skip
    if m <= 16:  # the library takes more rows
        return None
    return Case(f"int_mm {size}", torch._int_mm, lambda: (_int8(m, k), _int8(n, k).t()), kind)


def products(kinds: tuple[str, ...] = KINDS) -> Iterator[Case]:
    for shape in SHAPES:
        for kind in kinds:
            made = _product(kind, *shape)
            if made is not None:
                yield made


def _several(x: Tensor, w: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    first = torch.relu(x @ w.t())
    return first * rest, first + rest


def groups() -> Iterator[Case]:
    """The four kinds that are to beat the library and a kernel after it."""
    for m, n, k in ((8192, 8192, 4096), (4096, 14336, 4096), (2048, 4096, 4096)):
        size = f"{m}x{n}x{k}"
        yield Case(f"bias + gelu {size}", lambda x, w, b: F.gelu(F.linear(x, w, b)),
                   lambda m=m, n=n, k=k: (_r(m, k), _r(n, k), _r(n)), "bias + gelu")  # fmt: skip
        yield Case(f"residual + relu {size}", lambda x, w, y: torch.relu(x @ w.t() + y),
                   lambda m=m, n=n, k=k: (_r(m, k), _r(n, k), _r(m, n)),
                   "residual + relu")  # fmt: skip
        yield Case(f"scale + row {size}", lambda x, w, b: (x @ w.t()) * 0.125 + b,
                   lambda m=m, n=n, k=k: (_r(m, k), _r(n, k), _r(n)), "scale + row")  # fmt: skip
        yield Case(f"two results {size}", _several,
                   lambda m=m, n=n, k=k: (_r(m, k), _r(n, k), _r(m, n)), "two results")  # fmt: skip


# ---- random epilogues

# Continuous, and none of them makes much more of a rounding than it was: sums are taken in other
# orders.
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "gelu": F.gelu,
    "silu": F.silu, "hardswish": F.hardswish, "abs": torch.abs, "neg": torch.neg,
    "erf": torch.erf, "exp": lambda x: torch.exp(x.clamp(max=1)),
    "square": lambda x: torch.square(torch.tanh(x)), "relu6": lambda x: x.clamp(0, 6),
    "shifted": lambda x: x * 0.75 - 1.25, "leaky": F.leaky_relu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": lambda x, y: x * y.clamp(-1, 1),
    "maximum": torch.maximum, "minimum": torch.minimum, "div": lambda x, y: x / (y.abs() + 1),
    "where": lambda x, y: torch.where(x > y, x, y),
}  # fmt: skip
# What an epilogue may not do, by names of what is done instead.
BESIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: x + x.sum(1, keepdim=True), "shift": lambda x, y: x + y.roll(1, 0),
    "index": lambda x, y: x + torch.arange(x.shape[1], device=x.device),
    "int": lambda x, y: x + y.to(torch.int32),
}  # fmt: skip
SPREAD = ("whole", "whole", "turned", "apart", "row", "column", "number")


@dataclass(frozen=True)
class Drawn:
    """A random epilogue, as a function of a product and of tensors beside it."""

    seed: int
    dtype: torch.dtype
    beside: tuple[tuple[str, torch.dtype], ...]  # how each is spread, and its dtype
    steps: tuple[tuple[str, int, int], ...]  # operations, and which values they take
    results: tuple[tuple[int, torch.dtype], ...]
    odd: str  # something that is not to be fused, if not empty
    keeps: bool  # whether the product itself is a result

    def __call__(self, a: Tensor, b: Tensor, *given: Tensor) -> Any:
        total = a @ b
        values = [total.float(), *(t.float() for t in given)]
        for name, x, y in self.steps:
            made = UNARY[name](values[x]) if name in UNARY else BINARY[name](values[x], values[y])
            values.append(made.expand(total.shape))
        last = values[-1] + total.float()
        if self.odd:
            last = BESIDE[self.odd](last, values[1].expand(total.shape))
        made = [last.to(dtype) if k < 0 else (values[k] + total.float()).to(dtype)
                for k, dtype in self.results]  # fmt: skip
        return (total, *made) if self.keeps else tuple(made)

    def inputs(self, m: int, n: int, k: int, device: str = "cuda") -> tuple[Tensor, ...]:
        def r(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        makes: dict[str, Callable[[torch.dtype], Tensor]] = {
            "whole": lambda d: r(m, n, dtype=d), "turned": lambda d: r(n, m, dtype=d).t(),
            "apart": lambda d: r(m, n + 3, dtype=d)[:, 1 : n + 1],
            "row": lambda d: r(n, dtype=d), "column": lambda d: r(m, 1, dtype=d),
            "number": lambda d: r(1, 1, dtype=d),
        }  # fmt: skip
        first = r(m, k) / k**0.5, r(n, k).t()
        return (*first, *(makes[how](dtype) for how, dtype in self.beside))


def drawn(seed: int) -> Drawn:
    rng = random.Random(seed)
    kinds = (F16, BF16, F32)
    count = rng.randint(1, 3)
    beside = tuple((rng.choice(SPREAD), rng.choice(kinds)) for _ in range(count))
    steps: list[tuple[str, int, int]] = []
    for k in range(rng.randint(2, 6)):
        known = count + 1 + k
        steps.append((rng.choice([*UNARY, *BINARY]), rng.randrange(known), rng.randrange(known)))
    results = [(-1, rng.choice(kinds))]
    results += [(rng.randrange(len(steps) + count + 1), rng.choice(kinds))
                for _ in range(rng.randint(0, 2))]  # fmt: skip
    odd = rng.choice([*[""] * 6, *BESIDE])
    return Drawn(seed, rng.choice((F16, BF16)), beside, tuple(steps), tuple(results), odd,
                 rng.random() < 0.3)  # fmt: skip


def epilogues(count: int = 40, seed: int = 0, sizes: tuple[int, int, int] = (512, 768, 256)
              ) -> Iterator[tuple[Drawn, Case]]:  # fmt: skip
    for k in range(seed, seed + count):
        made = drawn(k)
        name = f"epilogue {k}: {' '.join(step for step, _, _ in made.steps)}"
        yield made, Case(name, made, lambda made=made: made.inputs(*sizes), "random", VISITED)
