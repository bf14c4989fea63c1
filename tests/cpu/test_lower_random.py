"""Random numbers: the right distributions, repeatable from a seed, consistent in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright
from tests.cpu.against_eager import compiled
from tilewright import metrics

N = 40_000


def native(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` compiled; its first call must not need ATen."""
    ours = compiled(fn)

    def call(*args: Any) -> Any:
        metrics.reset()
        result = ours(*args)
        assert not metrics.fallback_ops, dict(metrics.fallback_ops)
        return result

    return call


def close(value: Any, expected: float, within: float) -> None:
    assert abs(float(value) - expected) < within, (float(value), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_uniform_and_normal(dtype: torch.dtype) -> None:
    torch.manual_seed(1)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        uniform = torch.empty_like(x).uniform_(-3, -1)
        return torch.rand(N, dtype=dtype), torch.randn_like(x), torch.rand_like(x) * 2, uniform

    u, z, v, w = native(fn)(torch.empty(N, dtype=dtype))
    assert u.dtype == dtype and z.dtype == dtype and v.dtype == dtype
    assert u.min() >= 0 and u.max() < 1
    u, z, w = u.double(), z.double(), w.double()
    close(u.mean(), 0.5, 0.02)
    close(u.var(), 1 / 12, 0.01)
    close(z.mean(), 0, 0.03)
    close(z.std(), 1, 0.03)
    close((z.abs() < 1).double().mean(), 0.6827, 0.02)
    close(w.mean(), -2, 0.05)
    assert w.min() >= -3 and w.max() <= -1
    assert not torch.equal(u * 2, v.double()), "two ops must not share their numbers"


def test_neighbours_are_independent() -> None:
    z = native(lambda: torch.randn(200, 200))()
    for a, b in ((z[:, 1:], z[:, :-1]), (z[1:], z[:-1])):
        close((a * b).mean(), 0, 0.03)


def test_integers() -> None:
    a, b, c = native(lambda x: (
        torch.randint(10, (N,)), torch.randint(-5, 5, (N,), dtype=torch.int32),
        torch.randint_like(x, 3)))(torch.empty(N))  # fmt: skip
    assert a.dtype == torch.int64 and b.dtype == torch.int32 and c.dtype == torch.float32
    assert torch.equal(a.unique(), torch.arange(10))
    assert torch.equal(b.unique(), torch.arange(-5, 5, dtype=torch.int32))
    assert torch.equal(c.unique(), torch.tensor([0.0, 1.0, 2.0]))
    close((a == 7).double().mean(), 0.1, 0.01)


def test_distributions() -> None:
    def fn(x: Tensor, p: Tensor) -> list[Tensor]:
        return [
            torch.bernoulli(p), torch.bernoulli(x, 0.3), x.clone().exponential_(2.0),
            x.clone().geometric_(0.25), x.clone().cauchy_(1.0, 2.0),
            x.clone().log_normal_(0.0, 0.5), x.clone().normal_(3.0, 2.0), torch.normal(p, 2.0),
            torch.normal(p, p),
            torch.bernoulli(x, 0.0), torch.bernoulli(x, 1.0),
        ]  # fmt: skip

    p = torch.full((N,), 0.8)
    b, c, e, g, y, w, n, m, k, never, always = native(fn)(torch.zeros(N), p)
    close(b.mean(), 0.8, 0.02)
    close(c.mean(), 0.3, 0.02)
    close(e.mean(), 0.5, 0.02)
    close(g.mean(), 4, 0.15)
    assert g.min() == 1 and e.min() >= 0
    close(y.median(), 1, 0.1)
    close(w.log().mean(), 0, 0.02)
    close(n.mean(), 3, 0.06)
    close(n.std(), 2, 0.06)
    close(m.std(), 2, 0.06)
    close(k.std(), 0.8, 0.03)
    assert never.sum() == 0 and always.sum() == N


def test_seeds() -> None:
    fn = compiled(lambda: (torch.rand(100), torch.randn(3, 5), torch.rand(100)))
    torch.manual_seed(5)
    first, other = fn(), fn()
    torch.manual_seed(5)
    again = fn()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[2]), "two ops of one call"
    assert not torch.equal(first[0], other[0]), "two calls"


def test_layout_does_not_matter() -> None:
    flat = compiled(lambda x: torch.rand_like(x))
    torch.manual_seed(3)
    a = flat(torch.empty(6, 10))
    torch.manual_seed(3)
    b = flat(torch.empty(10, 6).t())
    assert torch.equal(a, b) and b.stride() == (1, 6)


@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_loops_do_not_matter(draw: Callable[..., Tensor]) -> None:
    """Whether numbers are drawn four at a time or one by one: from any place of the stream on, in
    rows whose lengths are no multiples of four, with sizes that are not known."""
    flat = None
    for shape in ((1980,), (30, 66), (66, 30), (20, 99), (99, 20), (11, 4, 45)):
        torch.manual_seed(8)
        got = compiled(lambda *s: draw(*s))(*shape).flatten()
        flat = got if flat is None else flat
        torch.testing.assert_close(got, flat, rtol=1e-5, atol=1e-6)
    rows = compiled(lambda x: draw(x.shape) + x, dynamic=True)
    turned = compiled(lambda x: draw(x.shape).t() + x.t())
    for shape in ((30, 66), (20, 99)):
        for fn, back in ((rows, Tensor.clone), (turned, Tensor.t)):
            torch.manual_seed(8)
            got = back(fn(torch.zeros(shape))).flatten()
            torch.testing.assert_close(got, flat, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_one_counter_are_independent(draw: Any, dtype: torch.dtype) -> None:
    x = native(lambda: draw(4 * N, dtype=dtype))().double()
    x = (x - x.mean()) / x.std()
    four = torch.corrcoef(x.view(-1, 4).t())
    squares = torch.corrcoef((x * x).view(-1, 4).t())
    for found in (four, squares):
        assert (found - torch.eye(4)).abs().max() < 0.03
    for part in x.view(-1, 4).unbind(1):
        close(part.mean(), 0, 0.03)
        close(part.var(), 1, 0.04)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_gradient_uses_the_mask_of_the_forward(dtype: torch.dtype) -> None:
    x = torch.ones(50, 100, dtype=dtype, requires_grad=True)
    y = native(lambda x: F.dropout(x, 0.25))(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(y.detach(), x.grad)
    close((y == 0).double().mean(), 0.25, 0.03)
    close(y.detach().max(), 4 / 3, 0.01)


def test_dropout_edges() -> None:
    x = torch.randn(100)
    none, all_, off = native(lambda x: (
        F.dropout(x, 0.0), F.dropout(x, 1.0), F.dropout(x, 0.5, training=False)))(x)  # fmt: skip
    assert torch.equal(none, x) and torch.equal(off, x) and not all_.any()


def test_rrelu_keeps_its_slopes() -> None:
    x = torch.linspace(-2, 2, 1000).requires_grad_()
    y = native(lambda x: F.rrelu(x, 0.1, 0.4, training=True))(x)
    y.sum().backward()
    slope = y.detach() / x.detach()
    torch.testing.assert_close(x.grad, slope)
    negative = slope[:500]
    assert negative.min() >= 0.1 and negative.max() <= 0.4 + 1e-6
    assert negative.unique().numel() > 400
    assert torch.equal(slope[500:], torch.ones(500))


def test_fallback_random_is_eagers_stream() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.rand(7), x * torch.randn(3), F.dropout(x, 0.5), torch.randint(9, (4,)),
                torch.bernoulli(x.abs().clamp(max=1)))  # fmt: skip

    x = torch.randn(3)
    torch.manual_seed(11)
    expected = fn(x)
    with tilewright.config.patch(fallback_random=True):
        ours = compiled(fn)
        torch.manual_seed(11)
        actual = ours(x)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
