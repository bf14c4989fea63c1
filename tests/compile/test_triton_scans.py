"""Scans of rows that are held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.interp import check

BF16 = torch.bfloat16
Case = tuple[Callable[[Tensor], Any], tuple[int, ...], torch.dtype]


def _numbers(*size: int, dtype: torch.dtype) -> Tensor:
    """In the first row some are infinite, and in the second all are, where they can be."""
    torch.manual_seed(0)
    made = 3 * torch.randn(*size)
    if dtype.is_floating_point:
        made[0, 7::1000] = -torch.inf
        made[1] = -torch.inf
    return made.to(dtype) if dtype != torch.bool else made > 0


# ---- rows that are held

HELD: dict[str, Case] = {
    "sum": (lambda x: x.cumsum(-1), (9, 801), torch.float32),
    "wide sum": (lambda x: x.cumsum(-1, dtype=torch.float32), (9, 801), BF16),
    "largest and where": (lambda x: x.cummax(-1), (9, 801), torch.float32),
    "exponentials": (lambda x: x.logcumsumexp(-1), (9, 801), torch.float32),
}


@pytest.mark.parametrize("name", HELD)
def test_ends_of_odd_rows_are_scanned_beside_what_is_moved_at_once(name: str) -> None:
    fn, size, dtype = HELD[name]
    (kernel,) = check(fn, _numbers(*size, dtype=dtype), rtol=1e-4, atol=1e-4)
    assert "rtwo" in kernel.text
