"""Sums of powers times something, of rows that are walked once, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.interp import check


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def _divergence(x: Tensor, y: Tensor) -> Tensor:
    wanted, found = F.log_softmax(y.float(), -1), F.log_softmax(x.float(), -1)
    return F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)


def _entropy(x: Tensor, y: Tensor) -> Tensor:
    logs = torch.log_softmax(x - y, -1)
    return -(logs.exp() * logs).sum(-1)


def _cross(x: Tensor, y: Tensor) -> Tensor:
    return (torch.softmax(x, -1) * y).sum(-1)


def _distilled(x: Tensor, y: Tensor) -> Tensor:
    """Two sums of the same powers, each relative to its own largest value."""
    return (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum(-1)


@pytest.mark.parametrize(
    ("fn", "length"),
    [(_divergence, 20000), (_divergence, 18001), (_entropy, 20000), (_cross, 18001),
     (_distilled, 20000)],
)  # fmt: skip
def test_one_walk(fn: Callable[[Tensor, Tensor], Tensor], length: int) -> None:
    """By one program, or by several that meet once."""
    x, y = _normal(16, length), _normal(16, length, seed=1)
    y[1] += 1000  # far from the other, of which nothing is left in the result
    x[2, 5] = 40
    (kernel,) = check(fn, x, y, rtol=2e-5, atol=2e-5)
    assert "online_with" in kernel.text and "evict_first" not in kernel.text


def test_what_a_row_hides() -> None:
    """Powers of what is hidden are zero; times something infinite they are no number, as eager."""
    x, y = _normal(2, 20000), _normal(2, 20000, seed=1)
    x[0, 0] = x[0, 19999] = float("-inf")
    check(_cross, x, y, rtol=2e-5, atol=2e-5)
    check(_divergence, y, x)
