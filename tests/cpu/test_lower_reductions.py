"""Reductions, softmax and losses against eager, natively: types, dims, NaN, empty and odd sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.against_eager import check, compiled
from tests.cpu.gradients import check_training

nan, inf = math.nan, math.inf
BF16 = torch.bfloat16
DIMS: list[Any] = [0, 1, -1, (0, 2), (0, 1, 2)]
HALF = {"rtol": 2e-2, "atol": 2e-2}


def floats() -> Tensor:
    return torch.randn(3, 10, 37)


def with_nan() -> Tensor:
    x = torch.randn(3, 10, 37)
    x[0, 1, 2] = x[2, 9, 36] = nan
    x[1, 1, 1] = inf
    return x


def transposed() -> Tensor:
    return torch.randn(37, 3, 10).permute(1, 2, 0)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "float32": floats,
    "nan": with_nan,
    "transposed": transposed,
    "bfloat16": lambda: torch.randn(3, 10, 37).to(BF16),
    "int64": lambda: torch.randint(-4, 5, (3, 10, 37)),
    "uint8": lambda: torch.randint(0, 2, (3, 10, 37), dtype=torch.uint8),
    "bool": lambda: torch.randn(3, 10, 37) > 1,
}


def tolerance(x: Tensor) -> dict[str, float]:
    if x.dtype == BF16:
        return HALF
    return {"rtol": 1e-5, "atol": 1e-5} if x.is_floating_point() else {}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", INPUTS)
def test_sums_and_logic(name: str) -> None:
    x = INPUTS[name]()

    def f(t: Tensor) -> list[Tensor]:
        folds = [t.sum(), t.nansum(), t.any(), t.all(), t.count_nonzero(), t.count_nonzero((0, 1))]
        for dim in DIMS:
            folds += [t.sum(dim), t.any(dim), t.all(dim), t.nansum(dim)]
        folds += [t.sum(1, dtype=torch.float64), t.sum(-1, dtype=torch.int32), t[:2, :3].prod(1)]
        return folds

    # the sums of uint8 and bool are int64; of int32, int32
    check(f, x, **tolerance(x))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", INPUTS)
def test_extremes(name: str) -> None:
    x = INPUTS[name]()

    def f(t: Tensor) -> list[Any]:
        return [
            t.amax(), t.amin(), t.max(), t.min(), t.aminmax(), t.aminmax(dim=1),
            *(g(t, d) for g in (torch.amax, torch.amin) for d in DIMS),
            *(g(t, d) for g in (torch.max, torch.min) for d in (0, 1, -1)),
        ]  # fmt: skip

    check(f, x)


@pytest.mark.parametrize("name", [n for n in INPUTS if n != "bool"])
def test_positions(name: str) -> None:
    check(lambda t: [g(t, d) for g in (torch.argmax, torch.argmin) for d in (None, 0, 1, 2)],
          INPUTS[name]())  # fmt: skip


def test_position_is_the_first_of_equals_and_of_nans() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, nan, nan, 9.0], [-0.0, 0.0, 0.0, -0.0]])
    check(lambda t: [t.argmax(1), t.argmin(1), t.max(1), t.min(1), t.argmax()], x, bits=True)


@pytest.mark.parametrize("name", ["float32", "nan", "transposed", "bfloat16"])
def test_means_and_variances(name: str) -> None:
    x = INPUTS[name]()

    def f(t: Tensor) -> list[Any]:
        found: list[Any] = [t.mean(), t.var(), t.mean(1, dtype=torch.float64)]
        for dim in DIMS:
            found += [t.mean(dim), t.var(dim), torch.std_mean(t, dim, correction=0)]
        return [*found, torch.var_mean(t, 1, correction=2.5), torch.std(t, -1, correction=40)]

    check(f, x, **tolerance(x))


def test_a_sum_and_a_variance_are_as_good_as_float64() -> None:
    x = torch.rand(1 << 18) + 1000
    total, variance = compiled(lambda t: (t.sum(), t.var()))(x)
    exact = x.double()
    assert abs(total.item() / exact.sum().item() - 1) < 2e-7
    assert abs(variance.item() / exact.var().item() - 1) < 1e-5


@pytest.mark.parametrize("name", ["float32", "nan", "bfloat16"])
def test_norms(name: str) -> None:
    x = INPUTS[name]()

    def f(t: Tensor) -> list[Tensor]:
        orders = (0, 1, 2, 3, 0.5, -1, inf, -inf)
        return [
            *(torch.linalg.vector_norm(t, p, d) for p in orders for d in (None, 1, (0, 2))),
            torch.linalg.vector_norm(t[..., :1], dim=-1), torch.linalg.vector_norm(t, dim=(-1, 0)),
            torch.norm(t), torch.norm(t, 1, 0), torch.dist(t, t.flip(0), 1.5), t[0].trace(),
            torch.linalg.vector_norm(t, dtype=torch.float64),
        ]  # fmt: skip

    check(f, x, **(HALF if x.dtype == BF16 else {"rtol": 1e-4, "atol": 1e-5}))


def test_nothing_to_fold() -> None:
    def f(t: Tensor) -> list[Any]:
        return [
            t.sum(1), t.sum(), t.prod(1), t.any(1), t.all(1), t.mean(1), torch.var_mean(t, 1),
            t.logsumexp(1), t.softmax(1), t.amax(0), torch.linalg.vector_norm(t, 2, 1),
            t.nansum(1), t.std(1, correction=0),
        ]  # fmt: skip

    check(f, torch.randn(3, 0, 4))


def test_one_element_and_no_dimension() -> None:
    def f(t: Tensor, s: Tensor) -> list[Any]:
        return [
            t.sum(1), t.max(1), t.argmin(1), t.var(1), torch.std_mean(t, 1, correction=0),
            t.softmax(1), torch.linalg.vector_norm(t, 3, 1), torch.linalg.vector_norm(t, 0, 1),
            s.sum(), s.sum(0), s.amax(), s.max(0), s.var(), s.softmax(0), s.argmax(), s.any(),
            s.mean(0), s.logsumexp(0), s.prod(0), torch.linalg.vector_norm(s),
        ]  # fmt: skip

    check(f, torch.randn(4, 1, 3), torch.tensor(-2.5))


def test_any_over_no_dimensions_folds_nothing() -> None:
    check(lambda t: [torch.any(t, dim=()), torch.all(t, dim=())], torch.tensor([[0.0, nan, -0.0]]))


def test_kept_dimensions() -> None:
    def f(t: Tensor) -> list[Any]:
        return [(t - t.mean(1, keepdim=True)) / t.std(1, keepdim=True), t - t.amax((0, 2), True),
                t - t.max(-1, True)[0], t.argmax(1, True) + 1]  # fmt: skip

    check(f, floats(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_sizes_known_at_run_time(dtype: torch.dtype) -> None:
    def f(t: Tensor) -> list[Any]:
        return [t.sum(1), t.mean(), t.var(0), t.softmax(-1), t.max(1), t.argmax(), t.logsumexp(1),
                torch.linalg.vector_norm(t, 2, 0)]  # fmt: skip

    run = compiled(f, dynamic=True)
    for size in ((6, 11), (19, 40)):
        x = torch.randn(size).to(dtype)
        torch.testing.assert_close(run(x), f(x), **tolerance(x))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", ["float32", "nan", "transposed", "bfloat16"])
def test_softmax(name: str) -> None:
    x = INPUTS[name]()

    def f(t: Tensor) -> list[Tensor]:
        fns = (F.softmax, F.log_softmax, torch.logsumexp)
        return [fn(t, dim) for fn in fns for dim in (0, 1, 2)]

    check_training(f, x, **tolerance(x))


def test_softmax_of_rows_of_minus_infinity() -> None:
    x = torch.full((3, 9), -inf)
    x[0, 2] = 1
    x[1] = torch.randn(9) * 50

    def f(t: Tensor) -> list[Tensor]:
        safe = torch.ops.aten._safe_softmax(t, 1)
        return [safe, t.softmax(1), t.log_softmax(1), t.logsumexp(1), (-t).logsumexp(1)]

    check(f, x)


def test_softmax_rounds_once() -> None:
    x = torch.randn(7, 300).to(BF16)
    check(lambda t: [F.softmax(t, -1, dtype=torch.float32), t.float().softmax(-1).to(BF16)], x)
    ours = compiled(lambda t: F.softmax(t, -1))(x)
    assert torch.equal(ours, F.softmax(x.float(), -1).to(BF16))


REDUCTIONS = ["none", "mean", "sum"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy(reduction: str) -> None:
    weight = torch.rand(10)

    def f(x: Tensor, y: Tensor, pixels: Tensor, labels: Tensor) -> list[Tensor]:
        return [
            F.cross_entropy(x, y, reduction=reduction),
            F.cross_entropy(x, y, weight, ignore_index=3, reduction=reduction),
            F.cross_entropy(x, y, label_smoothing=0.1, reduction=reduction),
            F.cross_entropy(pixels, labels, ignore_index=1, reduction=reduction),
            F.nll_loss(pixels, labels, weight[:5], reduction=reduction),
            F.nll_loss(x[0], y[0], reduction=reduction),
            F.nll_loss(x, torch.full_like(y, -100), reduction=reduction),
        ]

    check_training(f, torch.randn(6, 10), torch.tensor([0, 3, 9, 3, 5, 1]),
                   torch.randn(2, 5, 3, 4), torch.randint(0, 5, (2, 3, 4)))  # fmt: skip


def test_a_label_out_of_range_is_an_error() -> None:
    run = compiled(lambda x, y: F.cross_entropy(x, y))
    x = torch.randn(4, 5)
    run(x, torch.tensor([0, 4, 1, -100]))
    for label in (5, -1):
        with pytest.raises(IndexError):
            run(x, torch.tensor([0, 4, 1, label]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_elementwise_losses(reduction: str, dtype: torch.dtype) -> None:
    weight = torch.rand(6, 10).to(dtype)

    def f(x: Tensor, y: Tensor, p: Tensor, q: Tensor) -> list[Tensor]:
        return [
            F.mse_loss(x, y, reduction=reduction), F.l1_loss(x, y, reduction=reduction),
            F.smooth_l1_loss(x, y, reduction=reduction, beta=0.7),
            F.huber_loss(x, y, reduction=reduction, delta=0.6),
            F.huber_loss(x, y, reduction=reduction), F.smooth_l1_loss(x, y, reduction=reduction),
            F.binary_cross_entropy(p, q.detach(), weight, reduction=reduction),
            F.binary_cross_entropy(p, q.detach(), reduction=reduction),
            F.binary_cross_entropy_with_logits(x, q, reduction=reduction),
            F.binary_cross_entropy_with_logits(x, q, weight, pos_weight=weight[0],
                                               reduction=reduction),
            F.soft_margin_loss(x, y.detach().sign(), reduction=reduction),
            F.kl_div(x, q, reduction=reduction),
        ]  # fmt: skip

    x, y = torch.randn(2, 6, 10).to(dtype)
    p, q = (torch.rand(2, 6, 10) * 0.9 + 0.05).to(dtype)
    limits = {"rtol": 4e-2, "atol": 4e-2} if dtype == BF16 else {"rtol": 1e-5, "atol": 1e-5}
    check_training(f, x, y, p, q, **limits)
