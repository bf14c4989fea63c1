"""Calls of attention to be measured: `scaled_dot_product_attention` over shapes and masks, and
`flex_attention` over functions of scores and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    b: int
    h: int
    hk: int
    m: int
    n: int
    d: int

    def __str__(self) -> str:
        heads = str(self.h) if self.h == self.hk else f"{self.h}/{self.hk}"
        return f"{self.b}x{heads}x{self.m}x{self.n}x{self.d}"

    def operands(self, device: str, dtype: torch.dtype, grad: bool) -> list[torch.Tensor]:
        """Heads beside each other, as a projection leaves them."""
        shapes = ((self.m, self.h), (self.n, self.hk), (self.n, self.hk))
        made = [torch.randn(self.b, length, heads, self.d, device=device, dtype=dtype)
                for length, heads in shapes]  # fmt: skip
        return [t.transpose(1, 2).detach().requires_grad_(grad) for t in made]


@dataclass(frozen=True)
class Case:
    name: str
    sizes: Sizes
    make: Callable[
        [Sizes, str], Call
    ]  # of a device: what it reads beside the operands is made here
    trained: bool = True

    @property
    def flops(self) -> float:
        """Of the forward, half of them where half of the scores are hidden."""
        s = self.sizes
        return 4.0 * s.b * s.h * s.m * s.n * s.d * (0.5 if "causal" in self.name else 1.0)

    def shorter(self) -> Case:
        s = self.sizes
        m, n = (min(length, 128 + length % 2) for length in (s.m, s.n))
        return replace(self, sizes=replace(s, b=min(s.b, 2), h=s.h // s.hk, hk=1, m=m, n=n))


# ---- scaled_dot_product_attention


def plain(causal: bool = False) -> Callable[[Sizes, str], Call]:
    def make(s: Sizes, device: str) -> Call:
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=s.h != s.hk)  # fmt: skip

    return make


def masked(kind: str) -> Callable[[Sizes, str], Call]:
    def make(s: Sizes, device: str) -> Call:
        lengths = torch.linspace(s.n // 2, s.n, s.b, device=device).long()
        bias = torch.randn(1, s.h, s.m, s.n, device=device) if kind == "added" else None

        def mask() -> torch.Tensor:
            m, n = torch.arange(s.m, device=device)[:, None], torch.arange(s.n, device=device)
            match kind:
                case "padding":
                    return (n < lengths[:, None])[:, None, None, :]
                case "expanded":
                    return (n < lengths[:, None])[:, None, None, :].expand(s.b, 1, s.m, s.n)
                case "causal":
                    return (m + s.n - s.m >= n).expand(s.b, 1, s.m, s.n)
                case "window":
                    return (m - n).abs() < 256
                case "all":
                    return torch.ones((), dtype=torch.bool, device=device).expand(s.b, 1, s.m, s.n)
                case _:
                    assert bias is not None
                    return bias

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            given = mask()
            given = given.to(q.dtype) if given.is_floating_point() else given
            return F.scaled_dot_product_attention(q, k, v, attn_mask=given,
                                                  enable_gqa=s.h != s.hk)  # fmt: skip

        return call

    return make


def _sdpa() -> list[Case]:
    found: list[Case] = []
    judged = Sizes(2, 16, 16, 8192, 8192, 128)
    found.append(Case(f"sdpa causal {judged}", judged, plain(True)))
    long = Sizes(1, 16, 16, 32768, 32768, 128)
    found.append(Case(f"sdpa causal {long}", long, plain(True)))
    for kind in ("padding", "expanded", "causal", "window", "all", "added"):
        for s in (Sizes(8, 12, 12, 512, 512, 64), Sizes(2, 16, 16, 2047, 2047, 128)):
            found.append(Case(f"sdpa {kind} {s}", s, masked(kind)))
    grouped = Sizes(2, 32, 8, 4096, 4096, 128)
    found += [Case(f"sdpa causal {grouped}", grouped, plain(True)),
              Case(f"sdpa window {grouped}", grouped, masked("window"))]  # fmt: skip
    for s in (Sizes(8, 32, 8, 1, 8192, 128), Sizes(1, 32, 32, 1, 32768, 128)):
        for name, make in (("", plain()), ("padding ", masked("padding"))):
            found.append(Case(f"sdpa decoding {name}{s}", s, make, trained=False))
    for d in (64, 96, 128, 256):
        for length in (128, 1024, 4096):
            s = Sizes(4, 16, 16, length, length, d)
            causal = (d > 96) == (length == 1024)
            found.append(Case(f"sdpa {'causal ' if causal else ''}{s}", s, plain(causal)))
    return found


# ---- flex_attention


def flex(name: str) -> Callable[[Sizes, str], Call]:
    def make(s: Sizes, device: str) -> Call:
        document = torch.randint(0, 8, (s.b, s.n), device=device).sort()[0]
        table = torch.randn(s.h, s.m + s.n, device=device, requires_grad=name == "relative")
        pages = torch.randperm(max(1, s.n // 128), device=device)
        logical = torch.empty_like(pages)
        logical[pages] = torch.arange(len(pages), device=device)
        shift = s.n - s.m

        def causal(b: Any, h: Any, m: Any, n: Any) -> Any:
            return m + shift >= n

        masks: dict[str, Callable[..., Any]] = {
            "sliding": lambda b, h, m, n: (m + shift >= n) & (m + shift - n < 512),
            "prefix": lambda b, h, m, n: (n < 512) | (m + shift >= n),
            "document": lambda b, h, m, n: (document[b, m] == document[b, n]) & (m >= n),
            "paged": lambda b, h, m, n: m + shift >= logical[n // 128] * 128 + n % 128,
        }
        scores: dict[str, Callable[..., Any]] = {
            "alibi": lambda x, b, h, m, n: x + (n - m) * torch.exp2(-0.5 * (h + 1)),
            "cap": lambda x, b, h, m, n: 20 * torch.tanh(x / 20),
            "relative": lambda x, b, h, m, n: x + table[h, m - n + s.n],
        }
        blocks: BlockMask | None = None
        if name != "noop":
            blocks = create_block_mask(masks.get(name, causal), s.b if name == "document" else None,
                                       None, s.m, s.n, device=device)  # fmt: skip
        return lambda q, k, v: flex_attention(q, k, v, score_mod=scores.get(name),
                                              block_mask=blocks, enable_gqa=s.h != s.hk)  # type: ignore[return-value]  # fmt: skip

    return make


def _flex(length: int = 4096) -> list[Case]:
    s = Sizes(2, 16, 16, length, length, 128)
    names = ("noop", "causal", "sliding", "prefix", "document", "alibi", "cap", "relative", "paged")
    found = [Case(f"flex {name} {s}", s, flex(name)) for name in names]
    grouped = Sizes(2, 32, 8, length, length, 64)
    found += [Case(f"flex {name} {grouped}", grouped, flex(name)) for name in ("causal", "cap")]
    for one in (Sizes(8, 32, 8, 1, 8192, 128), Sizes(1, 16, 16, 1, 32768, 64)):
        found.append(Case(f"flex decoding {one}", one, flex("causal"), trained=False))
    return found


SDPA, FLEX = _sdpa(), _flex()
JUDGED = SDPA[0].name  # of which a rate is asked
# What a machine of few cores measures in a minute or two.
HOST = [
    *(Case(f"sdpa {kind} {s}", s, masked(kind), trained=kind in ("padding", "added"))
      for kind in ("padding", "expanded", "causal", "window", "added")
      for s in (Sizes(1, 8, 8, 1024, 1024, 64),)),
    Case("sdpa causal 1x8x1024x1024x128", Sizes(1, 8, 8, 1024, 1024, 128), plain(True), False),
    Case("sdpa 2x12x197x197x64", Sizes(2, 12, 12, 197, 197, 64), plain(), False),
    Case("sdpa decoding 4x8/2x1x4096x64", Sizes(4, 8, 2, 1, 4096, 64), plain(), False),
    *(Case(f"flex {name} 1x8x1024x1024x64", Sizes(1, 8, 8, 1024, 1024, 64), flex(name), False)
      for name in ("noop", "causal", "sliding", "document", "alibi", "cap")),
]  # fmt: skip
