"""Kernels that begin where the one before ended, for that is what is in cache."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.compile.as_cuda import as_cuda
from tests.compile.test_triton_in_turn import for_card
from tests.limits import limit
from tilewright.testing import run_and_get_code

BACK = "(tl.num_programs(0) - 1 - tl.program_id(0))"


def normal(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(7))


def clipped(x: Tensor) -> Tensor:
    return x * (1.0 / (torch.linalg.vector_norm(x) + 1e-6)).clamp(max=1.0)


def test_a_backward_pass_begins_where_the_forward_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "REVERSED_BYTES", 1 << 10)
    x = normal(33, 101).requires_grad_()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.compile(F.silu, backend="tilewright")(x)
        return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]

    with as_cuda():
        (_, gradient), code = run_and_get_code(run, x)
    assert [BACK in text for text in code] == [False, True]
    assert_close(gradient, torch.autograd.grad(F.silu(x).sum(), x)[0])


def test_a_kernel_reads_back_what_the_one_before_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(301, 777)
    assert not any(BACK in k.text for k in for_card(clipped, x))
    limit(monkeypatch, "REVERSED_BYTES", 1 << 10)
    assert [BACK in k.text for k in for_card(clipped, x)] == [False, False, True]


def test_a_kernel_that_writes_where_it_reads_runs_back_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        update = m / (v.sqrt() + 1e-6) + 0.01 * p
        return p - update / update.norm()

    limit(monkeypatch, "REVERSED_BYTES", 1 << 10)
    args = (normal(129, 512), normal(129, 512), normal(129, 512).abs())
    with as_cuda():
        found, (code,) = run_and_get_code(torch.compile(step, backend="tilewright"), *args)
    assert "# memory used again" in code and BACK in code
    assert_close(found, step(*args))


def skewed(x: Tensor) -> Tensor:
    return (x - x.mean(0)).pow(3).mean(0)


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def test_columns_are_walked_back_where_others_walked_them_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, "REVERSED_BYTES", 1 << 18)
    x = normal(20011, 64)
    folds = [k.text for k in for_card(skewed, x) if "for roffset" in k.text]
    assert [BACK in text for text in folds] == ["rend - roffset" in text for text in folds]
    assert any(BACK in text for text in folds)
    with as_cuda():
        found = torch.compile(skewed, backend="tilewright")(x)
    assert_close(found, skewed(x), rtol=1e-4, atol=1e-5)


def test_rows_left_over_are_no_kernel_to_run_back_from(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "REVERSED_BYTES", 1 << 18)
    assert [BACK in k.text for k in for_card(standardised, normal(20011, 50))] == [
        False,
        False,
        True,
    ]
