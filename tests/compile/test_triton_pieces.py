"""Pieces of rows that move as they are: rolled, padded, cut out, or put side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.compile.card import results
from tests.compile.cubin import build, kernels_of
from tests.pretend import pretended
from tilewright.codegen.triton.strategies import shifted_copy
from tilewright.codegen.triton.strategies.misaligned_rows import misaligned_rows
from tilewright.testing import limited


def test_pieces_of_several_rows_move_sixteen_bytes_at_once() -> None:
    (kernel,) = kernels_of(
        lambda x: F.pad(x, (0, 0, 8, 8)), torch.empty(9, 24, 1747, dtype=torch.bfloat16)
    )
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16


MOVED: dict[str, Callable[..., Any]] = {
    "rolled": lambda x, y: torch.roll(x + 1, 3, -1),
    "padded": lambda x, y: F.pad(x, (5, 2), value=3.0) * 2,
    "of the middle": lambda x, y: F.relu(x[:, 77:1201]),
    "beside each other": lambda x, y: torch.cat((x, -y, y[:, 7:651]), -1),
    "one after the other": lambda x, y: torch.cat((x, F.relu(y))),
    "with a scale of rows": lambda x, y: torch.roll(x, 3, -1) * y[:, :1],
}


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pretended
def test_values_of_pieces_that_are_moved(name: str, dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 2, 1301).to(dtype)
    wrapped = mock.Mock(wraps=misaligned_rows)
    wrap = mock.patch.object(shifted_copy, "misaligned_rows", wrapped)
    with wrap, limited("SHIFTED_BYTES", 0), limited("SHIFTED_PIECE", 512):
        (found,) = results(MOVED[name], x, y)
    torch.testing.assert_close(found, MOVED[name](x, y), rtol=0, atol=0)
    assert wrapped.called
