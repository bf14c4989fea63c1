"""Folds of all: blocks are dealt out to programs in turn, so that the end is what is in cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.compile.as_cuda import as_cuda
from tests.limits import limit
from tilewright.schedule.split import apply
from tilewright.testing import run_and_get_code

IN_TURN = "// (1024)"  # which round it is, of 32 programs


@pytest.fixture(autouse=True)
def much(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "BLOCK_CYCLIC", 1)
    monkeypatch.setattr(apply, "BLOCKS", (1024,))


def normal(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(7))


def folded(fn: Callable[..., Any], *args: Tensor) -> str:
    """The text of what is right."""
    with as_cuda():
        found, code = run_and_get_code(torch.compile(fn, backend="tilewright"), *args)
    assert_close(found, fn(*args), rtol=1e-4, atol=1e-5)
    return code[0]


@pytest.mark.parametrize(
    "fn", [F.mse_loss, lambda x, y: torch.var(x * y), lambda x, y: (x - y).amax()]
)
def test_blocks_are_dealt_out(fn: Callable[..., Any]) -> None:
    assert IN_TURN in folded(fn, normal(256, 256), normal(256, 256))


def test_what_is_stored_beside_is_dealt_out_too() -> None:
    x, y = normal(256, 256).requires_grad_(), normal(256, 256)

    def run() -> tuple[Tensor, Tensor]:
        loss = torch.compile(F.l1_loss, backend="tilewright")(x, y)
        return loss, torch.autograd.grad(loss, x)[0]

    with as_cuda():
        (loss, gradient), code = run_and_get_code(run)
    assert IN_TURN in code[0]
    assert_close(loss, F.l1_loss(x, y))
    assert_close(gradient, torch.autograd.grad(F.l1_loss(x, y), x)[0])


@pytest.mark.parametrize(
    "fn", [lambda x: x.sum(), lambda x: x[:, ::2].sum(), lambda x: x[:-1].argmax()]
)
def test_others_are_in_chunks(fn: Callable[..., Any]) -> None:
    """Of sizes that do not divide so, not along memory, or of which the first is looked for."""
    assert IN_TURN not in folded(fn, normal(257, 256))
