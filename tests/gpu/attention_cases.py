"""Attention on a card against float64: values, gradients, memory. Their twins without a card are in
`tests/compile/test_attention.py`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from tests.attention import MASKS, SCORES, check, check_gradient, flex_attention, sdpa
from tests.gpu.cases import case
from tilewright import metrics

HALVES = (torch.bfloat16, torch.float16)


def _operands(b: int, h: int, hk: int, m: int, n: int, d: int, dtype: torch.dtype
              ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return tuple(torch.randn(b, heads, length, d, device="cuda", dtype=dtype)  # type: ignore[return-value]
                 for heads, length in ((h, m), (hk, n), (hk, n)))  # fmt: skip


def _trained(fn: Any, given: Any, more: tuple[torch.Tensor, ...] = ()) -> None:
    torch._dynamo.reset()
    mine = [t.detach().clone().requires_grad_() for t in (*given, *more)]
    exact = [t.detach().double().requires_grad_() for t in (*given, *more)]
    found, want = torch.compile(fn, backend="tilewright")(*mine), fn(*exact)
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    (want * weight.double()).sum().backward()
    check(found, want, given, steps=50.0)
    for a, b in zip(mine, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        # those of what a score reads come from scores that were rounded with the operands
        check_gradient(a.grad, b.grad, given[0].dtype)


@case
def attention_flex_trains_with_every_mask() -> None:
    for (mask, holds), (score, changes) in itertools.product(MASKS.items(), SCORES.items()):
        torch.manual_seed(len(mask) * 7 + len(score))
        blocks = create_block_mask(holds, None, 4, 300, 333, device="cuda")
        given = _operands(2, 4, 2, 300, 333, 64, HALVES[len(mask) % 2])
        _trained(lambda q, k, v, c=changes, b=blocks: flex_attention(
            q, k, v, score_mod=c, block_mask=b, enable_gqa=True), given)  # fmt: skip


@case
def attention_widths_and_lengths() -> None:
    for width, (m, n) in itertools.product(
        (64, 72, 96, 128, 256), ((1, 777), (130, 130), (512, 65))
    ):
        mask = torch.rand(2, 1, m, n, device="cuda") > 0.2
        given = _operands(2, 2, 2, m, n, width, torch.bfloat16)
        _trained(lambda q, k, v, held=mask: sdpa(q, k, v, attn_mask=held), given)


@case
def attention_memory_that_a_score_reads_has_gradients() -> None:
    given = _operands(2, 4, 4, 200, 200, 64, torch.float16)
    table = torch.randn(4, 400, device="cuda")

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + bias[h, m - n + 200])

    _trained(fn, given, (table,))


@case
def attention_masks_of_a_library_of_models() -> None:
    """Padding and causal, used by several layers, trained: no product of scores, no stored mask."""
    metrics.reset()
    pad = torch.arange(384, device="cuda") < torch.tensor([[200], [384]], device="cuda")

    def fn(q: Any, k: Any, v: Any) -> Any:
        n = torch.arange(384, device="cuda")
        mask = ((n[:, None] >= n) & pad[:, None, None, :]).expand(2, 1, 384, 384)
        for _ in range(3):
            q = sdpa(q, k, v, attn_mask=mask) + q
        return q

    _trained(fn, _operands(2, 4, 4, 384, 384, 64, torch.bfloat16))
    assert metrics.counters["attention"]["TRITON"] == 6


@case
def attention_few_queries_and_many_keys() -> None:
    for b, h, hk, n in ((1, 32, 8, 32768), (8, 8, 8, 4095), (2, 16, 2, 300)):
        q, k, v = _operands(b, h, hk, 1, n, 128, torch.bfloat16)
        torch._dynamo.reset()
        found = torch.compile(lambda *t: flex_attention(*t, enable_gqa=True),
                              backend="tilewright")(q, k, v)  # fmt: skip
        wide = [t.double().repeat_interleave(h // hk, 1) for t in (k, v)]
        check(found, F.scaled_dot_product_attention(q.double(), wide[0], wide[1]), (q, k, v))


@case
def attention_memory_grows_with_length_alone() -> None:
    blocks = create_block_mask(MASKS["causal"], None, None, 8192, 8192, device="cuda")
    q, k, v = (t.requires_grad_() for t in _operands(1, 8, 8, 8192, 8192, 64, torch.bfloat16))
    torch._dynamo.reset()
    fn = torch.compile(lambda *t: flex_attention(*t, block_mask=blocks), backend="tilewright")
    fn(q, k, v).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn(q, k, v).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 12 * q.numel() * q.element_size()


@case
def attention_measured() -> None:
    """Under `max-autotune` the sizes of blocks are measured, and the result is the same."""
    given = _operands(2, 4, 4, 1024, 1024, 128, torch.bfloat16)
    torch._dynamo.reset()
    fn = torch.compile(lambda *t: flex_attention(*t), backend="tilewright",
                       mode="max-autotune-no-cudagraphs")  # fmt: skip
    found = fn(*given)
    q, k, v = (t.double() for t in given)
    check(found, F.scaled_dot_product_attention(q, k, v), given)
