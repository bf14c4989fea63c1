"""Attention in float64, and how far a kernel may be from it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import create_block_mask

EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

sdpa: Any = F.scaled_dot_product_attention  # tests call them in ways that their types do not know
flex_attention: Any = module.flex_attention

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(b: int, h: int, hk: int, m: int, n: int, d: int, dv: int | None = None,
             dtype: torch.dtype = torch.float32) -> Tensors:  # fmt: skip
    """Queries, keys and values, some of them not contiguous."""

    def one(heads: int, length: int, width: int) -> torch.Tensor:
        if random.random() < 0.5:
            return torch.randn(b, heads, length, width).to(dtype)
        return torch.randn(b, length, heads, width).to(dtype).transpose(1, 2)

    return one(h, m, d), one(hk, n, d), one(hk, n, dv or d)


def check(found: torch.Tensor, exact: torch.Tensor, given: Tensors, scale: float | None = None,
          steps: float = 1.0) -> None:  # fmt: skip
    """Within the rounding of weights and of the result, and of scores: sums of products in float32,
    of which an error is a relative error of the weights."""
    q, k, v = (t.double() for t in given)
    by = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    sums = by * (q.abs() @ k.abs().transpose(-2, -1))
    of_scores = EPS[torch.float32] * (4 + math.sqrt(q.shape[-1])) * (sums.amax() + steps)
    weight = v.abs().amax(-2, keepdim=True)  # no sum of weights is more than this
    bound = (EPS[given[0].dtype] + 2 * float(of_scores)) * (weight + exact.abs()) + 1e-30
    assert found.shape == exact.shape and not found.isnan().any()
    assert bool(((found.double() - exact).abs() <= bound).all()), float(
        ((found.double() - exact).abs() / bound).max()
    )


def check_gradient(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the largest element: sums that nearly cancel."""
    scale = float(exact.abs().max()) + 1e-30
    limit = (64 if dtype == torch.float32 else 4) * EPS[dtype]
    assert float((found.double() - exact).abs().max()) <= limit * scale


# ---- functions of scores and of positions


def alibi(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    return s + (n - m) * torch.exp2(-(h + 1.0))


def capped(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    return 3 * torch.tanh(s / 3)


def causal(b: Any, h: Any, m: Any, n: Any) -> Any:
    return m >= n


def window(b: Any, h: Any, m: Any, n: Any) -> Any:
    return (m >= n) & (m - n < 37)


def prefix(b: Any, h: Any, m: Any, n: Any) -> Any:
    return (n < 20) | (m >= n)


def strict(b: Any, h: Any, m: Any, n: Any) -> Any:
    return m > n + 9  # of the first rows nothing is left


def blockwise(b: Any, h: Any, m: Any, n: Any) -> Any:
    return (m // 16 == n // 16) | (h % 2 == 1)


SCORES: dict[str, Callable[..., Any] | None] = {"none": None, "alibi": alibi, "capped": capped}
MASKS = {"causal": causal, "window": window, "prefix": prefix, "strict": strict,
         "blockwise": blockwise}  # fmt: skip


@dataclass
class Case:
    """A call that nobody chose."""

    seed: int
    text: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        pick = random.choice
        self.dtype = pick([torch.float32, torch.float32, torch.bfloat16, torch.float16])
        hk, group = pick([1, 2]), pick([1, 1, 2, 3])
        m, n = pick([1, 7, 40, 129, 150]), pick([5, 64, 97, 160])
        d, dv = pick([8, 16, 24, 40]), pick([16, 20])
        self.given = operands(pick([1, 2]), hk * group, hk, m, n, d, dv, self.dtype)
        score, mask = pick(list(SCORES)), pick([*MASKS, "none"])
        self.kwargs = {"score_mod": SCORES[score], "enable_gqa": group > 1, "return_lse": True}
        if mask != "none":
            block = pick([128, 32, 48])
            self.kwargs["block_mask"] = create_block_mask(
                MASKS[mask], None, hk * group, m, n, device="cpu", BLOCK_SIZE=block)  # fmt: skip
        if random.random() < 0.3:
            self.kwargs["scale"] = 0.3
        self.text = f"{self.seed} {self.dtype} {m}x{n}x{d} {score} {mask} x{group}"

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flex_attention(q, k, v, **self.kwargs)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(*(t.double() for t in self.given))

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        exact, sums = self.exact()
        check(out, exact, self.given, self.kwargs.get("scale"), steps=200.0)
        none = sums == -math.inf
        assert bool(((lse == -math.inf) == none).all())
        off = (lse.double() - sums).masked_fill(none, 0.0)
        assert float(off.abs().max()) <= 1e-4
        assert bool((out.masked_fill(~none[..., None], 0.0) == 0).all())
