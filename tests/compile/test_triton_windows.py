"""Windows along rows: neighbours as one point, what they read in whole pieces, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.card import results
from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tests.limits import limit
from tests.pretend import pretended
from tilewright.testing import limited

Fn = Callable[..., Any]


def _bfloat16(*size: int) -> Tensor:
    return torch.randn(size).bfloat16()


def steps_before(x: Tensor, weight: Tensor) -> Tensor:
    padded = F.pad(x, (3, 0))
    taps = [weight[:, k, None] * padded[..., k : k + x.shape[-1]] for k in range(4)]
    return F.silu(taps[0] + taps[1] + taps[2] + taps[3])


def steps_after(x: Tensor) -> Tensor:
    padded = F.pad(x, (0, 5))
    return padded[:, 5:] - 2 * padded[:, 2:-3] + x


CASES: dict[str, tuple[Fn, tuple[Tensor, ...]]] = {
    "steps before": (steps_before, (_bfloat16(2, 3, 40), _bfloat16(3, 4))),
    "steps after": (steps_after, (torch.randn(7, 24),)),
    "largest": (lambda x: F.max_pool2d(x, 3, 2, 1), (torch.randn(2, 3, 10, 16),)),
    "largest of many": (lambda x: F.max_pool2d(x, 5, 2, 2), (_bfloat16(2, 3, 12, 32),)),
    "largest, as many": (lambda x: F.max_pool2d(x, 3, 1, 1), (_bfloat16(2, 3, 6, 24),)),
    "average": (lambda x: F.avg_pool2d(x, 3, 1, 1), (_bfloat16(2, 3, 7, 24),)),
    "rows of another buffer": (
        lambda x, y: x[:, 1:-1] + x[:, 2:] + y, (torch.randn(5, 18), torch.randn(5, 16))),
    "of two types": (
        lambda x, y: (x + F.pad(x, (1, 0))[:, :-1]).float() * y,
        (_bfloat16(9, 32), torch.randn(9, 1))),
}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "STENCIL_POINTS", 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    fn, args = CASES[name]
    check(fn, *args)


@pytest.mark.parametrize("name", CASES)
def test_pieces_are_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what `test_values` is about."""
    limit(monkeypatch, "STENCIL_POINTS", 0)
    fn, args = CASES[name]
    assert any("tri_rows.apart" in k.text for k in kernels_of(fn, *args))


@pretended
def test_values_of_images() -> None:
    x = _bfloat16(2, 3, 8, 16)
    x[1, :, 4, 0] = float("nan")
    x[0, 0, 1, 1] = float("inf")
    with limited("STENCIL_POINTS", 0):
        for fn in (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
                   lambda x: F.max_pool2d(x, 3, 2, 1)):  # fmt: skip
            (actual,) = results(fn, x)
            torch.testing.assert_close(actual, fn(x), equal_nan=True)


@pytest.mark.parametrize(("fn", "args", "accesses"), [
    (steps_before, (_bfloat16(8, 64, 2048), _bfloat16(64, 4)), 3),
    (lambda x: F.max_pool2d(x, 3, 2, 1), (torch.empty(64, 64, 16, 16),), 6),
    (lambda x: F.avg_pool2d(x, 3, 1, 1), (_bfloat16(16, 64, 56, 56),), 12),
])  # fmt: skip
def test_what_is_read_is_loaded_once(fn: Fn, args: tuple[Tensor, ...], accesses: int) -> None:
    (kernel,) = kernels_of(fn, *args)
    assert kernel.text.count("tl.load") == accesses
    made = build(kernel)
    assert made.shared == made.spills == 0 and made.widest("ld.global") == 16


def test_rows_of_two_results_are_stored_once() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.avg_pool2d(x, 3, 1, 1), F.max_pool2d(x, 3, 1, 1).float()

    (kernel,) = kernels_of(both, _bfloat16(16, 64, 56, 56))
    assert "tri_rows.apart" in kernel.text and kernel.text.count("tl.store") == 4
    build(kernel)


@pytest.mark.parametrize(("fn", "shape"), [
    (lambda x: F.avg_pool2d(x, 2), (64, 64, 32, 32)),
    (lambda x: F.interpolate(x, scale_factor=2.0), (64, 64, 32, 32)),
    (lambda x: x[:, :4096] * x[:, 4096:], (512, 8192)),
    (lambda x: F.max_pool2d(x, 3, 2, 1), (64, 64, 31, 31)),
])  # fmt: skip
def test_others_are_as_they_were(fn: Fn, shape: tuple[int, ...]) -> None:
    (kernel,) = kernels_of(fn, _bfloat16(*shape))
    assert "tri_rows.apart" not in kernel.text
