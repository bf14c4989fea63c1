"""Running folds against eager: every type, both ends of the dimensions, NaN, ties, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cpu.against_eager import check, compiled
from tests.cpu.gradients import check_training
from tilewright import metrics

nan, inf = math.nan, math.inf
BF16 = torch.bfloat16


def odd() -> Tensor:
    x = torch.randn(5, 9, 7)
    x[1, 2, 3], x[0, 0, 1], x[2, 3, :], x[3, 4, 4] = nan, inf, 0.0, -inf
    return x


INPUTS: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.randn(5, 9, 7),
    "odd": odd,
    "transposed": lambda: torch.randn(7, 5, 9).permute(1, 2, 0),
    "bfloat16": lambda: torch.randn(5, 9, 7).to(BF16),
    "int64": lambda: torch.randint(-2, 3, (5, 9, 7)),
    "bool": lambda: torch.randn(5, 9, 7) > 0,
    "empty": lambda: torch.randn(5, 0, 7),
    "one": lambda: torch.randn(1, 1, 1),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_scans(name: str, dynamic: bool) -> None:
    x = INPUTS[name]()

    def f(t: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for dim in (0, 1, -1):
            found += [t.cumsum(dim), t.cumprod(dim), *t.cummax(dim), *t.cummin(dim)]
            found += [t.cumsum(dim, dtype=torch.float64), t.cumsum(dim, dtype=torch.int32)]
            if t.is_floating_point():
                found.append(t.logcumsumexp(dim))
        return found

    limits = {"rtol": 2e-2, "atol": 2e-2} if x.dtype == BF16 else {}
    if name == "odd":  # converting NaN and infinity to integers is undefined
        check(lambda t: [t.cumsum(0), t.cumprod(1), *t.cummax(-1), *t.cummin(0), t.logcumsumexp(1)],
              x, dynamic=dynamic)  # fmt: skip
    else:
        check(f, x, dynamic=dynamic, **limits)


def test_no_dimensions() -> None:
    check(lambda t: [t.cumsum(0), t.cumprod(-1), *t.cummax(0), t.logcumsumexp(0)],
          torch.tensor(1.5))  # fmt: skip


def test_equals_take_the_last_position() -> None:
    x = torch.tensor([[1.0, 1.0, 0.0, 1.0, nan, 2.0, nan], [-0.0, 0.0, -0.0, -1, -1, -2, 0.0]])
    check(lambda t: [*t.cummax(1), *t.cummin(1)], x)


def test_a_long_sum_is_carried_in_float64() -> None:
    x = torch.rand(1 << 17)
    error = compiled(lambda t: t.cumsum(0))(x).double() - x.double().cumsum(0)
    assert error.abs().max() < 8e-3  # half a unit in the last place of 2**16


def test_gradients() -> None:
    def f(t: Tensor) -> list[Tensor]:
        return [t.cumsum(1), (t * 2).cumsum(0), t.cumprod(-1), t.logcumsumexp(0)]

    check_training(f, torch.rand(4, 6, 5) + 0.5, fallbacks=True, rtol=1e-4, atol=1e-4)


def test_the_input_of_a_scan_is_computed_in_its_loop() -> None:
    check(lambda t: (t.exp() + 1).cumsum(-1) * 2, torch.randn(8, 33))


def test_short_ones_are_written_out() -> None:
    """The gradient of a product of few columns is made of them, as one expression."""
    x = torch.randn(300, 3)
    x[4, 1] = 0.0
    check_training(lambda x: (x * 2).prod(-1), x)
    check(lambda x: (x.cumsum(1), x.to(BF16).cumprod(1)), x)
    metrics.reset()
    compiled(lambda x: (x * 2).prod(-1))(x.requires_grad_()).sum().backward()
    assert metrics.generated_kernel_count == 2  # one for each pass
