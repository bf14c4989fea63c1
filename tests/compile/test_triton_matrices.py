"""Columns of small matrices with odd rows, each of which is moved as one piece of memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tilewright.testing import limited

F16 = torch.float16
WEIGHT = torch.randn(15, 1).to(F16)
CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "softmax": (lambda x: torch.softmax(x, 1), (5, 15, 29)),
    "sums, of an even number": (lambda x: x.cumsum(1), (3, 16, 29)),
    "norm": (lambda x: (x - x.mean(1, True)) * x.var(1, keepdim=True) * WEIGHT, (4, 15, 31)),
    "sums of one matrix": (lambda x: (2 * x).cumsum(0), (15, 29)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_matrix_is_moved_as_one_piece(name: str) -> None:
    fn, size = CASES[name]
    with (limited("MATRIX_ELEMENTS", 0), limited("MATRICES_PER_SM", 0),
          limited("MATRIX_ROWS", 0)):  # fmt: skip
        (kernel,) = check(fn, torch.randn(size).to(F16), rtol=1e-2, atol=1e-2)
    assert "tri_rows.matrix(" in kernel.text


def test_matrices_that_begin_anywhere_are_moved_sixteen_bytes_at_once() -> None:
    (kernel,) = kernels_of(lambda x: x.cumsum(1), torch.empty(13709, 53, 125, dtype=F16))
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16
    assert made.spills == 0 and "shfl" not in made.ptx  # a thread has whole columns
