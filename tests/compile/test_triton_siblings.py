"""Long rows that several programs hold together, in the interpreter and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import build, kernels_of
from tests.compile.test_triton_held import normal, residual, softmax
from tests.limits import limit
from tilewright.testing import run_and_get_code

BF16, F16 = torch.bfloat16, torch.float16
ROWS = 17


def _batch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, training=True))


def _group_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 1, weight))


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    y = torch.where(mask, 0.0, x)
    return y - y.float().mean(-1, keepdim=True)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rows": (softmax, (normal(ROWS, 1400),)),
    "odd rows": (softmax, (normal(ROWS, 1411, dtype=F16),)),
    "some of -inf": (softmax, (normal(ROWS, 1401).masked_fill(
        torch.arange(1401) > 400, -torch.inf),)),
    "odd rows and weights": (residual, (normal(ROWS, 811), normal(ROWS, 811) * 2, normal(811))),
    "planes": (_batch_norm, (normal(3, ROWS, 24, 24), normal(ROWS))),
    "two odd planes": (_batch_norm, (normal(4, ROWS, 29, 29), normal(ROWS))),
    "parts of odd planes": (_batch_norm, (normal(2, ROWS, 37, 37), normal(ROWS))),
    "odd channels of a group": (_group_norm, (normal(ROWS, 2, 29, 29), normal(2))),
    "a mask": (_masked, (normal(ROWS, 1400), normal(ROWS, 1400) > 0)),
}  # fmt: skip


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows are long."""
    for name in ("COOPERATIVE_ROW", "COOPERATIVE_PLANES", "COOPERATIVE_PART"):
        limit(monkeypatch, name, 900)
    limit(monkeypatch, "COOPERATIVE_SMALL_PART", 1700)
    limit(monkeypatch, "COOPERATIVE_WARPS", 2)
    limit(monkeypatch, "RESIDENT_ROW", 1024)
    limit(monkeypatch, "RESIDENT_ONE_PASS", 256)


@pytest.mark.in_turn(2)
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", CASES)
def test_programs_of_a_row_meet_once(name: str) -> None:
    fn, args = CASES[name]
    with as_cuda():
        found, (text,) = run_and_get_code(torch.compile(fn, backend="tilewright"), *args)
    assert text.count("tri.meet(") == text.count("@triton.jit") == 1
    assert "tri_rows.anew(" in text
    assert_close(found, fn(*args), rtol=2e-2, atol=2e-2, equal_nan=True)


def test_parts_fill_their_blocks_and_registers() -> None:
    """Of 200704 elements in planes of 3136 fourteen programs have seven blocks each."""
    x = torch.empty(64, 256, 56, 56, dtype=BF16)
    (kernel,) = kernels_of(_batch_norm, x, torch.empty(256, dtype=BF16))
    assert kernel.programs({}) == 14 * 256 and kernel.counters == 256 + 1 and kernel.ticketed
    assert (kernel.config.num_warps, kernel.config.registers) == (8, 64)
    made = build(kernel)
    assert not made.spills and made.widest("ld.global") == made.widest("st.global") == 16


def test_a_program_has_several_planes_that_begin_anywhere() -> None:
    x = torch.empty(56, 320, 69, 69, dtype=BF16)
    (kernel,) = kernels_of(_batch_norm, x, torch.empty(320, dtype=BF16))
    assert kernel.programs({}) == 28 * 320
    made = build(kernel)
    assert not made.spills and made.widest("ld.global") == made.widest("st.global") == 16


def test_rows_that_are_as_fast_in_cache_have_a_program_each() -> None:
    x = torch.empty(16, 512, 64, 64, dtype=BF16)
    (kernel,) = kernels_of(lambda x: F.silu(F.group_norm(x, 32)), x)
    assert kernel.programs({}) == 512 and not kernel.counters
