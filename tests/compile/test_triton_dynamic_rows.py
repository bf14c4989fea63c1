"""Rows and columns whose sizes are not known: how many a program has follows from likely ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.compile.as_cuda import as_cuda
from tilewright.testing import run_and_get_code


def normal(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(7))


def run(fn: Callable[..., Any], *args: Tensor) -> str:
    """The text of what is right."""
    with as_cuda():
        compiled = torch.compile(fn, backend="tilewright", dynamic=True)
        found, (code,) = run_and_get_code(compiled, *args)
    assert_close(found, fn(*args), rtol=1e-4, atol=1e-4)
    return code


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.log_softmax(x, -1),
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: (x.argmax(-1), x.std(-1)),
    ],
)
def test_short_rows_are_several_of_a_program(fn: Callable[..., Any]) -> None:
    code = run(fn, normal(2203, 21))
    assert "+ 3) // 4)" in code  # rows of a program


def test_the_longest_of_what_is_folded_is_cut() -> None:
    """Not the first, of which there are few."""
    code = run(
        lambda x, y: (x.transpose(1, 2) * y).sum((0, 1, 2)), normal(3, 400, 5, 24), normal(24)
    )
    assert "_part0 = empty_cuda(((" in code
