"""Attention as programs have it: written out in many ways, of other than four dimensions, with keys
that are repeated. All of it is one call, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.attention import check, check_gradient, sdpa
from tests.programs import compiled, counting
from tilewright import metrics
from tilewright.testing import run_and_get_code

B, H, M, N, D = 2, 3, 24, 40, 16
Form = Callable[..., torch.Tensor]


def gpt2(q: Any, k: Any, v: Any, r: Any) -> torch.Tensor:
    """A mask chosen by `where`, with numbers that are tensors."""
    s = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], 4.0, dtype=v.dtype)
    least = torch.full([], torch.finfo(s.dtype).min, dtype=s.dtype)
    return F.softmax(torch.where(r > 0.5, s, least), dim=-1).type(v.dtype) @ v


def capped(q: Any, k: Any, v: Any, r: Any) -> torch.Tensor:
    s = torch.tanh(torch.matmul(q, k.mT) * 0.25 / 5) * 5
    s = F.softmax(torch.sub(s, r, alpha=0.5) + r, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(s, 0.1, training=False), v)


def einsums(q: Any, k: Any, v: Any, r: Any) -> torch.Tensor:
    s = torch.einsum("bhmd, bhnd -> bhmn", q, k) * 0.25
    s = (r + s).masked_fill_(r > 0.7, -1e4)
    return torch.einsum("bhmn,bhnd->bmhd", s.softmax(-1), v).transpose(1, 2)


def flat(q: Any, k: Any, v: Any, r: Any) -> torch.Tensor:
    """Batches and heads are one dimension."""
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    bias = r.expand(B, H, M, N).flatten(0, 1)
    s = torch.baddbmm(bias, q, k.transpose(1, 2), beta=2.0, alpha=0.25)
    return torch.bmm(torch.softmax(s, -1), v).view(B, H, M, D)


def bloom(q: Any, k: Any, v: Any, r: Any) -> torch.Tensor:
    """Flat products, and a mask over scores with heads."""
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    bias = r[:, 0, :1].repeat_interleave(H, 0)
    s = bias.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.25)
    s = F.softmax(s.view(B, H, M, N) + r, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(s.view(B * H, M, N), v).view(B, H, M, D)


def learned(q: Any, k: Any, v: Any, r: Any) -> torch.Tensor:
    """A temperature for each head, and weights of the type that scores have."""
    s = (r[0, 0, :H, :1, None] + 1.0) * (q @ k.transpose(2, 3))
    s += r
    return F.softmax(s.float(), dim=-1).type_as(s) @ v


def windows(q: Any, k: Any, v: Any, r: Any) -> torch.Tensor:
    """A mask of windows, which are part of the batch."""
    s = (q * 0.25) @ k.transpose(-2, -1)
    s = s.view(1, B, H, M, N) + r.view(B, M, N)[None, :, None]
    return s.view(-1, H, M, N).softmax(-1) @ v


FORMS: dict[str, Form] = {
    f.__name__: f for f in (gpt2, capped, einsums, flat, bloom, learned, windows)
}


def drawn() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return (torch.randn(B, H, M, D), torch.randn(B, H, N, D), torch.randn(B, H, N, D),
            torch.rand(B, 1, M, N))  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_attention_written_out_is_one_kernel(form: str) -> None:
    q, k, v, r = drawn()
    fn = FORMS[form]
    with torch.no_grad():
        metrics.reset()
        found = compiled(fn)(q, k, v, r)
    assert metrics.counters["attention"] == {"recognised": 1, "CPP": 1}
    assert not metrics.fallback_ops
    exact = fn(q.double(), k.double(), v.double(), r.double())
    check(found, exact, (q, k, v), 2.0, steps=10.0)
    assert found.stride() == fn(q, k, v, r).stride()


@pytest.mark.parametrize("form", ["plain", "added", "hidden"])
def test_training_stores_no_scores(form: str) -> None:
    """By the library, which has a backward on a CPU; a row of which nothing is left is not a
    number, as in eager."""

    def fn(q: Any, k: Any, v: Any, r: Any) -> torch.Tensor:
        s = q @ k.transpose(-2, -1) * 0.25
        if form != "plain":
            s = s + r if form == "added" else s.masked_fill(r > 0.5, -math.inf)
        return torch.softmax(s, -1) @ v

    q, k, v, r = drawn()
    given = (q, k, v)
    r[1, 0, 3] = 1.0
    mine = [t.clone().requires_grad_() for t in given]
    exact = [t.double().requires_grad_() for t in given]
    metrics.reset()
    found, want = compiled(fn)(*mine, r), fn(*[*exact, r.double()])
    assert torch.equal(found.isnan(), want.isnan())
    assert bool(found.isnan().any()) == (form == "hidden")
    if form == "hidden":
        found, want = found[:, :, 4:], want[:, :, 4:]
    check(found, want, given, 0.25, steps=10.0)
    found.sum().backward()
    want.sum().backward()
    assert metrics.counters["attention"] == {"recognised": 1}
    assert not any("mm" in name for name in metrics.fallback_ops)
    for a, b in zip(mine, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        if form != "hidden":  # eager's are not numbers there
            check_gradient(a.grad, b.grad, a.dtype)


def test_rows_filled_with_a_number_have_no_gradient() -> None:
    """So nothing that adds to scores may compute it."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax((q @ k.mT).masked_fill(mask, -1e9), -1) @ v

    *given, r = drawn()
    mine = [t.clone().requires_grad_() for t in given]
    compiled(fn)(*mine, r > -1).sum().backward()
    assert mine[0].grad is not None and not mine[0].grad.any()


HIDDEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "added": lambda s: s + torch.triu(torch.full((M, M), -math.inf), diagonal=1),
    "filled": lambda s: s.masked_fill(torch.tril(torch.ones(M, M)) == 0, -1e9),
}


@pytest.mark.parametrize("how", HIDDEN)
def test_a_mask_that_is_the_lower_triangle_is_computed(how: str) -> None:
    """So what is above the diagonal is not, and nothing is read."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(HIDDEN[how](q @ k.transpose(2, 3) * 0.25), -1) @ v

    q, k, v = (torch.randn(B, H, M, D) for _ in range(3))
    with torch.no_grad():
        metrics.reset()
        found, (text,) = run_and_get_code(compiled(fn), q, k, v)
    assert metrics.counters["attention"]["CPP"] == metrics.generated_kernel_count == 1
    assert "bool maybe(int64_t b, int64_t h, int64_t m0, int64_t m1, int64_t n0" in text
    assert "memory_x0_" not in text
    check(found, fn(*(t.double() for t in (q, k, v))), (q, k, v), steps=10.0)


REPEATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda t: t[:, :, None, :, :].expand(B, 2, 3, N, D).reshape(B, 6, N, D),
    "interleaved": lambda t: t.repeat_interleave(3, dim=1),
}


@pytest.mark.parametrize("how", REPEATS)
@pytest.mark.parametrize("written", [False, True])
def test_repeated_keys_are_not_copied(how: str, written: bool) -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        k, v = (REPEATS[how](t) for t in (k, v))
        if not written:
            return sdpa(q, k, v, attn_mask=mask)
        return torch.softmax(q @ k.transpose(2, 3) * D**-0.5 + mask, -1) @ v

    q, mask = torch.randn(B, 6, M, D), torch.randn(B, 1, M, N)
    k, v = (torch.randn(B, 2, N, D) for _ in range(2))
    with torch.no_grad():
        metrics.reset()
        found = compiled(fn)(q, k, v, mask)
    assert metrics.counters["attention"]["CPP"] == 1
    # rows of which an added mask may leave nothing are looked at once more
    assert metrics.generated_kernel_count == 1 + written
    check(found, fn(*(t.double() for t in (q, k, v, mask))), (q, k, v), steps=10.0)


def test_operands_of_other_than_four_dimensions() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, k, attn_mask=mask)

    for lead, of in (((), ()), ((3,), (3,)), ((2, 2, 3), (2, 1, 1))):
        q, k = torch.randn(*lead, M, D), torch.randn(*lead, N, D)
        mask = torch.rand(*of, M, N) > 0.3
        with torch.no_grad():
            torch._dynamo.reset()
            metrics.reset()
            found = compiled(fn)(q, k, mask)
        assert metrics.counters["attention"] == {"CPP": 1}
        assert found.stride() == fn(q, k, mask).stride()
        torch.testing.assert_close(found, fn(q, k, mask), atol=1e-5, rtol=1e-5)


def test_training_of_odd_operands_stores_no_scores() -> None:
    """Three dimensions of operands, or of a mask: eager takes the mathematical form."""

    def fn(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return sdpa(q, q, q, attn_mask=mask)

    for shape, of in (((4, M, D), (M, M)), ((2, 4, M, D), (4, M, M))):
        mine = torch.randn(*shape, requires_grad=True)
        theirs = mine.detach().clone().requires_grad_()
        mask = torch.rand(*of) > 0.2
        metrics.reset()
        found, want = compiled(fn)(mine, mask), fn(theirs, mask)
        torch.testing.assert_close(found, want)
        assert found.stride() == want.stride()
        found.square().sum().backward()
        want.square().sum().backward()
        assert not any("mm" in name for name in metrics.fallback_ops)
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-5)


def test_a_query_that_batches_share_has_eager_s_strides() -> None:
    q, k = torch.randn(1, M, D).expand(4, M, D)[:, None], torch.randn(4, 1, N, D)
    found, want = compiled(sdpa)(q, k, k), sdpa(q, k, k)
    assert found.stride()[0] == want.stride()[0] and found.stride()[2:] == want.stride()[2:]
    torch.testing.assert_close(found, want)


def test_attention_written_out_under_vmap() -> None:
    q, k, v, _ = drawn()

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda q, k, v: torch.softmax(q @ k.mT / 4, -1) @ v)(q, k, v)

    torch.testing.assert_close(compiled(fn)(q, k, v), fn(q, k, v), atol=1e-5, rtol=1e-5)


def test_rows_that_are_hidden_by_the_least_number_are_means() -> None:
    """A number, as in eager, and not what is left of nothing."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT + mask, -1) @ v

    q, k, v, r = drawn()
    mask = torch.zeros_like(r)
    mask[:, :, 4:] = torch.finfo(torch.float32).min
    with torch.no_grad():
        found = compiled(fn)(q, k, v, mask)
    torch.testing.assert_close(found, fn(q, k, v, mask), atol=1e-5, rtol=1e-5)


def test_what_is_changed_between_the_products_is_left_as_it_is() -> None:
    """The call that takes their place would read keys after they were changed."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        s = q @ k.mT
        k.mul_(2)
        return torch.softmax(s, -1) @ v

    q, k, v, _ = drawn()
    with torch.no_grad():
        metrics.reset()
        found = compiled(fn)(q, k.clone(), v)
    assert not metrics.counters["attention"]
    torch.testing.assert_close(found, fn(q, k, v))


def test_one_compilation_of_attention_written_out_for_all_lengths() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        k = k.repeat_interleave(2, dim=1)
        return torch.softmax(q @ k.mT * 0.25, -1) @ k

    call, counter = counting(fn, dynamic=True)
    metrics.reset()
    for m, n in ((20, 30), (7, 9), (64, 65)):
        q, k = torch.randn(B, 4, m, D), torch.randn(B, 2, n, D)
        with torch.no_grad():
            torch.testing.assert_close(call(q, k), fn(q, k), atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1
    assert metrics.counters["attention"] == {"recognised": 1, "CPP": 1}
