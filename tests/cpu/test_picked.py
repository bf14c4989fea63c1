"""Gradients of what was picked from rows are computed where they are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.native import check
from tilewright import metrics


def _labels(x: Tensor, at: Tensor) -> Tensor:
    return -F.log_softmax(x, -1).gather(-1, at[:, None]).squeeze(-1) * 0.9


def _largest(x: Tensor, at: Tensor) -> Tensor:
    return (x * 2).max(1).values + x.exp().gather(1, at[:, None, None].expand(-1, 1, 6))[:, 0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("function", "shape"), [(_labels, (7, 11)), (_largest, (7, 11, 6))])
def test_values(function: Callable[..., Tensor], shape: tuple[int, ...], dynamic: bool) -> None:
    check(function, torch.randn(shape), torch.randint(0, 11, (7,)), dynamic=dynamic, grad=True,
          exact=False)  # fmt: skip


def test_no_zeros_are_stored() -> None:
    x = torch.randn(64, 512, requires_grad=True)
    loss = torch.compile(_labels, backend="tilewright")(x, torch.randint(0, 512, (64,)))
    metrics.reset()
    loss.sum().backward()
    assert metrics.generated_kernel_count == 1
    assert metrics.num_bytes_moved < 2.2 * x.nbytes
