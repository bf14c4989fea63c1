"""Attention on cards: numbers through Triton's interpreter, structure by compiling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import create_block_mask

from tests.attention import (
    causal,
    check,
    check_gradient,
    flex_attention,
    operands,
    prefix,
    sdpa,
    strict,
)
from tests.compile.as_cuda import as_cuda
from tests.ours import torch_may_take_over
from tests.pretend import pretended
from tilewright import metrics
from tilewright.attention import triton as templates
from tilewright.runtime import triton_build
from tilewright.runtime.triton_build import TritonSource

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch differentiates `flex_attention` on cards alone."""
    monkeypatch.setattr(module, "_validate_device", lambda *args: None)


def trained(fn: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> None:
    """Results and gradients against float64; the sums of a row take part in the loss."""
    torch._dynamo.reset()
    metrics.reset()
    mine = [t.detach().clone().requires_grad_() for t in given]
    exact = [t.double().detach().requires_grad_() for t in given]
    weights = None
    with as_cuda():
        found = torch.compile(fn, backend="tilewright")(*mine)
        weights = [torch.randn_like(t) for t in found]
        _loss(found, weights).backward()
    assert metrics.counters["attention"] == {"TRITON": 2} and not metrics.fallback_ops
    want = fn(*exact)
    _loss(want, weights).backward()
    check(found[0], want[0], (given[0], given[1], given[2]), steps=50.0)
    for a, b in zip(mine, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        check_gradient(a.grad, b.grad, a.dtype)


def _loss(found: tuple[torch.Tensor, ...], weights: list[torch.Tensor]) -> torch.Tensor:
    finite = [torch.where(t == -math.inf, 0, t) for t in found]
    return sum((t * w.to(t.dtype)).sum() for t, w in zip(finite, weights, strict=True))  # type: ignore[return-value]


def test_a_causal_mask_in_blocks_of_odd_size() -> None:
    blocks = create_block_mask(causal, None, None, 150, 150, device="cpu", BLOCK_SIZE=48)
    given = operands(1, 1, 1, 150, 150, 16)
    trained(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks, return_lse=True), given)


def test_memory_that_a_score_reads_has_gradients() -> None:
    """By place, by head, and as one number; and key heads are shared."""
    given = (*operands(1, 2, 1, 40, 50, 16, 24), torch.randn(2, 120), torch.rand(2), torch.rand(50))

    def fn(q: Any, k: Any, v: Any, bias: Any, slopes: Any, keys: Any) -> Any:
        def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
            return s * slopes[h] + bias[h, m - n + 50] + keys[n]

        return flex_attention(q, k, v, score_mod=score, enable_gqa=True, return_lse=True)

    trained(fn, given)


def test_a_bias_of_all_scores_is_not_added_to() -> None:
    """Its gradient has one term each: nothing is left to the order of programs."""
    given = (*operands(2, 1, 1, 20, 30, 8), torch.randn(2, 1, 20, 30))
    made: list[str] = []
    real = templates._Kernel._source

    def seen(self: Any) -> TritonSource:
        source = real(self)
        made.append(source.text)
        return source

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
            return s + bias[b, h, m, n]

        return flex_attention(q, k, v, score_mod=score, return_lse=True)

    with mock.patch.object(templates._Kernel, "_source", seen):
        trained(fn, given)
    assert made and not any("tl.atomic_add" in text for text in made)


def test_rows_of_which_nothing_is_left_and_blocks_that_are_full() -> None:
    for mask in (strict, prefix):
        blocks = create_block_mask(mask, None, None, 70, 100, device="cpu", BLOCK_SIZE=32)
        given = operands(1, 1, 1, 70, 100, 8)
        trained(lambda q, k, v, b=blocks: flex_attention(q, k, v, block_mask=b, return_lse=True),
                given)  # fmt: skip


def test_sixteen_bits_and_documents() -> None:
    document = torch.randint(0, 3, (2, 70)).sort()[0]

    def mask(b: Any, h: Any, m: Any, n: Any) -> Any:
        return (document[b, m] == document[b, n]) & (m >= n)

    blocks = create_block_mask(mask, 2, None, 70, 70, device="cpu", BLOCK_SIZE=32)
    given = operands(2, 1, 1, 70, 70, 16, dtype=torch.float16)

    def fn(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: 4 * torch.tanh(s / 4),
                              block_mask=blocks, return_lse=True)  # fmt: skip

    trained(fn, given)


@pytest.mark.parametrize(("heads", "length"), [((8, 2), 700), ((1, 1), 1500)])
def test_the_keys_of_few_queries_are_shared_out(heads: tuple[int, int], length: int) -> None:
    q, k, v = operands(1, *heads, 1, length, 16)
    torch._dynamo.reset()
    metrics.reset()
    with as_cuda():
        fn = torch.compile(lambda *t: flex_attention(*t, enable_gqa=True), backend="tilewright")
        found = fn(q, k, v)
    assert metrics.counters["attention"] == {"TRITON": 1}
    wide = [t.double().repeat_interleave(heads[0] // heads[1], 1) for t in (k, v)]
    check(found, sdpa(q.double(), *wide), (q, k, v))


def test_one_compilation_for_all_lengths() -> None:
    fn = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + 0.1 * (n - m)),
        backend="tilewright", dynamic=True,
    )  # fmt: skip
    torch._dynamo.reset()
    metrics.reset()
    with as_cuda():
        for m, n in ((70, 90), (33, 140)):
            given = (torch.randn(1, 3, m, 16), torch.randn(1, 3, n, 16), torch.randn(1, 3, n, 16))
            q, k, v = (t.double() for t in given)
            s = q @ k.transpose(-2, -1) / 4 + 0.1 * (torch.arange(n) - torch.arange(m)[:, None])
            check(fn(*given), torch.softmax(s, -1) @ v, given, steps=20.0)  # type: ignore[arg-type]
    assert metrics.counters["attention"] == {"TRITON": 1}


def test_rows_that_are_hidden_by_the_least_number_are_means() -> None:
    """In units of ln 2 it would be minus infinity."""
    q, k, v = operands(1, 2, 2, 20, 30, 8)
    mask = torch.zeros(1, 1, 20, 30)
    mask[:, :, 4:] = torch.finfo(torch.float32).min
    torch._dynamo.reset()
    with as_cuda(), torch.no_grad():
        found = torch.compile(lambda *t: sdpa(*t, attn_mask=mask), backend="tilewright")(q, k, v)
    torch.testing.assert_close(found[:, :, 4:], v.mean(2, keepdim=True).expand(1, 2, 16, 8))
    check(found, sdpa(q, k, v, attn_mask=mask).double(), (q, k, v))


@pytest.mark.parametrize("few", [False, True])
def test_torchs_own_operations_take_over_from_kernels_that_do_not_compile(few: bool) -> None:
    real = templates._Kernel._source

    def broken(self: Any) -> TritonSource:
        return replace(real(self), text="def nothing(:\n")

    q, k, v = operands(1, 2, 2, 1 if few else 40, 600 if few else 50, 8)
    torch._dynamo.reset()
    metrics.reset()
    with mock.patch.object(templates._Kernel, "_source", broken), as_cuda(), torch_may_take_over():
        found = torch.compile(lambda *t: flex_attention(*t), backend="tilewright")(q, k, v)
    assert metrics.counters["triton"]["kernels that did not compile"] == 1 + few
    exact = sdpa(q.double(), k.double(), v.double())
    check(found, exact, (q, k, v))


# ---- what cards get


@pretended
def test_training_with_a_mask_has_no_products_and_stores_no_mask() -> None:
    """The mask that a library of models builds is computed again in the backward."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tilewright.backend import count_schedules

    seen: dict[str, Any] = {}

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        n = torch.arange(256, device=q.device)
        mask = ((n[:, None] >= n) & pad[:, None, None, :]).expand(2, 1, 256, 256)
        x = sdpa(q, k, v, attn_mask=mask)
        return sdpa(x * 2, k, v, attn_mask=mask)

    with FakeTensorMode():
        given = [torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16,
                             requires_grad=True) for _ in range(3)]  # fmt: skip
        pad = torch.ones(2, 256, device="cuda", dtype=torch.bool)
        backend = count_schedules(lambda role, plan: seen.update({role: plan}))
        torch.compile(fn, backend=backend)(*[*given, pad]).sum().backward()
    for role, count in (("forward", 2), ("backward", 4)):
        calls = [s.group.call for s in seen[role].steps if s.group.call is not None]
        assert len(calls) == count
        assert all(c.target.kernel.name.startswith("triton_tem_fused_attention") for c in calls)
        sizes = [[e.arg for e in b.size] for b in seen[role].program.buffers.values()]
        assert [2, 1, 256, 256] not in sizes


def _sources(width: int, dtype: torch.dtype) -> list[TritonSource]:
    """The kernels of a long call, forward and backward."""
    made: list[TritonSource] = []
    real = templates._Kernel._source

    def source(self: Any) -> TritonSource:
        made.append(real(self))
        return made[-1]

    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return torch.where(m >= n, s, -math.inf)

    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.compile.as_cuda import _relabelled
    from tilewright.backend import count_schedules

    backend = count_schedules(lambda role, plan: None)
    with mock.patch.object(templates._Kernel, "_source", source), _relabelled("sm_90"), (
        FakeTensorMode(allow_non_fake_inputs=True)):  # fmt: skip
        q, k, v = (torch.empty(1, 4, 2048, width, dtype=dtype, requires_grad=True)
                   for _ in range(3))  # fmt: skip
        fn = torch.compile(lambda *t: flex_attention(*t, score_mod=score), backend=backend)
        fn(q, k, v).sum().backward()
    return made


@pytest.mark.parametrize("width", [64, 128])
def test_blocks_fit_registers_and_products_are_the_matrix_unit_s(width: int) -> None:
    made = _sources(width, torch.bfloat16)
    assert [s.name.removeprefix("triton_tem_fused_attention_") for s in made] == [
        "forward", "backward_kv", "backward_q"]  # fmt: skip
    for source in made:
        built = triton_build.build(source)
        assert built.config == source.configs[0]  # the first fits, and does not spill
        assert built.binary.stack == 0
