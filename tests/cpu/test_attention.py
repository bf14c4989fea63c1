"""Attention on the CPU: one kernel, without the matrix of scores, right where eager is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.attention import Case, causal, check, flex_attention, operands, sdpa
from tilewright import metrics
from tilewright.testing import run_and_get_code

pytestmark = pytest.mark.filterwarnings("ignore")


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    metrics.reset()
    return torch.compile(fn, backend="tilewright", **options)


def by_kernel(calls: int = 1) -> None:
    """All attention was computed by kernels of ours."""
    assert metrics.counters["attention"]["CPP"] == calls
    assert not metrics.fallback_ops


# ---- flex_attention


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("seed", range(8))
def test_flex_attention_of_functions_and_masks_drawn_at_random(seed: int) -> None:
    case = Case(seed)
    out, lse = compiled(case.run)(*case.given)
    by_kernel()
    case.check(out, lse)


def test_no_memory_is_as_large_as_the_scores() -> None:
    q, k, v = operands(2, 2, 2, 130, 170, 16)
    torch._dynamo.reset()
    fn = torch.compile(lambda q, k, v: flex_attention(q, k, v), backend="tilewright")
    _, (text, *_) = run_and_get_code(fn, q, k, v)
    sizes = re.findall(r"empty_cpu\(\(([\d, ]+)\)", text)
    assert sizes
    assert all(math.prod(map(int, s.strip(", ").split(", "))) < 130 * 170 for s in sizes)


def test_a_score_reads_memory_at_its_position() -> None:
    q, k, v = operands(2, 4, 2, 50, 60, 16)
    bias, slopes = torch.randn(4, 120), torch.rand(4)

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
            return s * slopes[h] + bias[h, m - n + 59]

        return flex_attention(q, k, v, score_mod=score, enable_gqa=True)

    found = compiled(fn)(q, k, v)
    by_kernel()
    where = torch.arange(50)[:, None] - torch.arange(60) + 59
    wide = [t.double().repeat_interleave(2, 1) for t in (k, v)]
    s = q.double() @ wide[0].transpose(-2, -1) / 4 * slopes[:, None, None] + bias[:, where]
    check(found, torch.softmax(s, -1) @ wide[1], (q, k, v), steps=10.0)


def test_a_position_out_of_range_is_an_index_error() -> None:
    bias = torch.randn(10)

    def fn(q: torch.Tensor) -> Any:
        return flex_attention(q, q, q, score_mod=lambda s, b, h, m, n: s + bias[n])

    with pytest.raises(IndexError, match="out of range"):
        compiled(fn)(torch.randn(1, 1, 20, 8))


def test_pages_in_any_order() -> None:
    """A cache whose pages lie anywhere: the mask looks up where a key belongs."""
    length, page, heads = 256, 64, 2
    q, k, v = operands(1, heads, heads, 256, length, 16)
    order = torch.tensor([2, 0, 3, 1])
    logical = torch.empty(4, dtype=torch.int64)
    logical[order] = torch.arange(4)

    def mask(b: Any, h: Any, m: Any, n: Any) -> Any:
        return m >= logical[n // page] * page + n % page

    blocks = create_block_mask(mask, None, None, 256, length, device="cpu", BLOCK_SIZE=page)
    fn = compiled(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks))
    pages = (order[:, None] * page + torch.arange(page)).reshape(-1)  # where each page was put
    stored_k, stored_v = torch.empty_like(k), torch.empty_like(v)
    stored_k[:, :, pages], stored_v[:, :, pages] = k, v
    found = fn(q, stored_k, stored_v)
    by_kernel()
    exact = sdpa(q.double(), k.double(), v.double(), is_causal=True)
    check(found, exact, (q, k, v))


def test_blocks_that_are_not_listed_are_not_computed() -> None:
    q, k, v = operands(1, 1, 1, 64, 128, 8)
    one = torch.ones(1, 1, 2, dtype=torch.int32)
    second = torch.full((1, 1, 2, 4), 1, dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(one * 0, second, one, second, BLOCK_SIZE=32,
                                      seq_lengths=(64, 128))  # fmt: skip
    found = compiled(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks))(q, k, v)
    by_kernel()
    part = (q.double(), k.double()[:, :, 32:64], v.double()[:, :, 32:64])
    check(found, sdpa(*part), (q, k, v))


def test_one_compilation_for_all_lengths() -> None:
    fn = compiled(lambda q, k, v, pad: sdpa(q, k, v, attn_mask=pad),
                  dynamic=True)  # fmt: skip
    for m, n in ((130, 77), (3, 500), (64, 64)):
        q, k, v = torch.randn(2, 4, m, 24), torch.randn(2, 4, n, 24), torch.randn(2, 4, n, 24)
        pad = torch.rand(2, 1, 1, n) > 0.2
        with torch.no_grad():
            found = fn(q, k, v, pad)
        exact = sdpa(q.double(), k.double(), v.double(), attn_mask=pad)
        check(found, exact, (q, k, v))
    by_kernel()


@pytest.mark.parametrize("heads", [(1, 1), (8, 2)])
def test_few_queries_share_out_their_keys(heads: tuple[int, int]) -> None:
    q, k, v = operands(1, *heads, 1, 3000, 40)
    found = compiled(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True))(q, k, v)
    by_kernel()
    wide = [t.double().repeat_interleave(heads[0] // heads[1], 1) for t in (k, v)]
    check(found, sdpa(q.double(), *wide), (q, k, v))


# ---- scaled_dot_product_attention


def _arange_mask(m: int, n: int) -> torch.Tensor:
    return (torch.arange(m)[:, None] - torch.arange(n)).abs() < 20


SDPA: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "none": lambda r: None,
    "boolean": lambda r: r[0, 0] > 0.4,
    "batched": lambda r: r[:, :1] > 0.4,
    "padding": lambda r: r[:, :1, :1] > 0.4,
    "expanded": lambda r: (r[:, :1, :1] > 0.4).expand(2, 1, 70, 90),
    "rows": lambda r: (r[0, 0, :, :1] > 0.4).expand(70, 90),
    "added": lambda r: 4 * r - 2,
    "a head's": lambda r: r[0],
    "all": lambda r: torch.ones(1, dtype=torch.bool).expand(2, 1, 70, 90),
    "window": lambda r: _arange_mask(70, 90),
}


@pytest.mark.parametrize("kind", SDPA)
def test_masks_are_computed_where_scores_are(kind: str) -> None:
    q, k = torch.randn(2, 70, 2, 24).transpose(1, 2), torch.randn(2, 90, 2, 24).transpose(1, 2)
    v = torch.randn(2, 2, 90, 24)
    drawn = torch.rand(2, 2, 70, 90)

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, attn_mask=SDPA[kind](r))

    with torch.no_grad():
        found = compiled(fn)(q, k, v, drawn)
    by_kernel()
    # no mask is stored; of one of three dimensions eager's result is contiguous, unlike queries
    assert metrics.generated_kernel_count == 1 + (kind == "a head's")
    mask = SDPA[kind](drawn)
    wide = mask.double() if mask is not None and mask.dtype.is_floating_point else mask
    exact = sdpa(q.double(), k.double(), v.double(), attn_mask=wide)
    check(found, exact, (q, k, v), steps=20.0)
    assert found.stride() == sdpa(q, k, v, attn_mask=mask).stride()


def test_grouped_causal_and_scaled() -> None:
    q, k, v = operands(2, 6, 2, 70, 70, 40, dtype=torch.bfloat16)
    given = {"is_causal": True, "enable_gqa": True, "scale": 0.2}
    with torch.no_grad():
        found = compiled(lambda *t: sdpa(*t, **given))(q, k, v)
    by_kernel()
    exact = sdpa(q.double(), k.double(), v.double(), **given)
    check(found, exact, (q, k, v), 0.2)


def test_one_mask_of_many_layers_is_not_stored() -> None:
    def fn(x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        n = torch.arange(48)
        mask = (n[:, None] >= n) & pad[:, None, None, :]
        for _ in range(3):
            x = sdpa(x, x, x, attn_mask=mask[:, :, :, :48]) + x
        return x

    x, pad = torch.randn(2, 2, 48, 16), torch.rand(2, 48) > 0.3
    with torch.no_grad():
        found, want = compiled(fn)(x, pad), fn(x, pad)
    by_kernel(3)
    assert metrics.generated_kernel_count == 6
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "why", ["dropout", "gradient of the mask", "nothing", "float64", "training"]
)
def test_what_kernels_do_not_compute_is_torchs(why: str) -> None:
    dtype = torch.float64 if why == "float64" else torch.float32
    q = torch.randn(2, 2, 0 if why == "nothing" else 20, 8, dtype=dtype)
    q.requires_grad_(why in ("dropout", "training"))
    mask = torch.randn(20, 20, dtype=dtype, requires_grad=why == "gradient of the mask")

    def fn(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        given = None if why == "nothing" else mask
        p = 0.5 if why == "dropout" else 0.0
        return sdpa(q, q, q, attn_mask=given, dropout_p=p)

    found = compiled(fn)(q, mask)
    assert not metrics.counters["attention"]
    assert found.shape == q.shape
    if why != "dropout":
        torch.testing.assert_close(found, fn(q, mask))
    for t in (q, mask):
        if t.requires_grad:
            found.sum().backward()
            assert t.grad is not None and bool(t.grad.isfinite().all())


def test_transforms_of_functions_are_torchs() -> None:
    q = torch.randn(3, 2, 2, 20, 8)

    def one(q: torch.Tensor) -> torch.Tensor:
        return sdpa(q, q, q, is_causal=True)

    fn = compiled(torch.vmap(one))
    torch.testing.assert_close(fn(q), torch.vmap(one)(q), atol=1e-5, rtol=1e-5)
    grad = torch.func.grad(lambda q: one(q).square().sum())
    torch.testing.assert_close(compiled(grad)(q[0]), grad(q[0]), atol=1e-5, rtol=1e-5)


# ---- written out, and constant


def _written(mask: str) -> Callable[..., torch.Tensor]:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        s = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask == "filled":
            s = s.masked_fill(r > 0.5, float("-inf"))
        elif mask == "large":
            s = s.masked_fill(r[..., :1] > 0.5, -1e9)
        elif mask == "added":
            s = s + r
        w = F.dropout(torch.softmax(s, dim=-1), 0.1, training=False)
        return torch.matmul(w, v)

    return fn


@pytest.mark.parametrize("mask", ["none", "filled", "large", "added"])
def test_attention_that_is_written_out(mask: str) -> None:
    q, k, v = operands(2, 3, 3, 40, 50, 16)
    r = torch.rand(2, 1, 40, 50)
    r[0, 0, 3] = 1.0  # of this row nothing is left
    fn = _written(mask)
    with torch.no_grad():
        found = compiled(fn)(q, k, v, r)
    by_kernel()
    assert metrics.counters["attention"]["recognised"] == 1
    exact = fn(*(t.double() for t in (q, k, v, r)))
    assert bool((found.isnan() == exact.isnan()).all())
    check(found.nan_to_num(), exact.nan_to_num(), (q, k, v), steps=10.0)


def test_weights_that_are_returned_are_not_recognised() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = torch.softmax(x @ x.transpose(-2, -1), -1)
        return w @ x, w

    x = torch.randn(1, 2, 20, 8)
    for found, want in zip(compiled(fn)(x), fn(x), strict=True):
        torch.testing.assert_close(found, want)
    assert not metrics.counters["attention"]


@pytest.mark.parametrize("kind", ["all", "lower"])
def test_a_mask_without_inputs_is_looked_at_once(kind: str) -> None:
    def fn(q: torch.Tensor) -> torch.Tensor:
        n = torch.arange(q.size(2))
        held = n[:, None] >= (n if kind == "lower" else torch.zeros_like(n))
        mask = held.expand(2, 1, q.size(2), q.size(2))
        return sdpa(q, q, q, attn_mask=mask)

    q = torch.randn(2, 2, 40, 16, requires_grad=True)
    found = compiled(fn)(q)
    torch.testing.assert_close(found, fn(q), atol=1e-5, rtol=1e-5)
    assert metrics.generated_kernel_count == 0  # no mask is made for the library


def test_the_option_turns_it_off() -> None:
    q = torch.randn(1, 2, 20, 8)
    fn = compiled(lambda q: sdpa(q, q, q), options={"attention": False})
    torch.testing.assert_close(fn(q), sdpa(q, q, q))
    assert not metrics.counters["attention"]


def test_create_block_mask_compiled() -> None:
    def make() -> BlockMask:
        return create_block_mask(causal, 2, 2, 300, 300, device="cpu", BLOCK_SIZE=64)

    found = compiled(make)()
    pairs: Any = zip(found.as_tuple()[2:10], make().as_tuple()[2:10], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert metrics.generated_kernel_count == 11
