"""Joining, padding, repeating and turning tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.native import check
from tests.programs import compiled
from tilewright import config
from tilewright.testing import run_and_get_code


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_cat(dynamic: bool) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (
            torch.cat([x, y * 2, x[:, :2]], 1) + 1,
            torch.cat([x, torch.empty(0)], 1),
            torch.stack([x, y], -1) * 2,
            torch.cat([x, y[:0]]),
        )

    check(function, torch.randn(4, 6, 5), torch.randn(4, 6, 5), dynamic=dynamic, grad=True)


@pytest.mark.parametrize("dim", [0, 1])
def test_differences_of_differences(dim: int) -> None:
    """Their gradients are padded and added up time and again: what is kept of one in between has
    several pieces, for each lane of a vector."""
    check(lambda x: torch.diff(x, 4, dim), torch.randn(5, 5), grad=True)
    check(lambda x: torch.diff(x, 3, dim), torch.randn(70, 6), grad=True)


def test_cat_promotes() -> None:
    check(lambda x, y: torch.cat([x, y], 0) + 1, torch.randn(3, 2).bfloat16(), torch.randn(4, 2))
    check(lambda x, y: torch.cat([x, y], 0) * 2, torch.arange(3, dtype=torch.int8), torch.ones(2))


def test_cat_of_more_than_fits_one_loop() -> None:
    check(lambda x: torch.cat([x[:, k::3].exp() for k in range(12)], 1) + 1, torch.randn(4, 9),
          exact=False)  # fmt: skip


def test_cat_stores_each_input_when_asked() -> None:
    with config.patch(max_pointwise_cat_inputs=1):
        check(lambda x, y: torch.cat([x, y + 1], 1) * 2, torch.randn(3, 4), torch.randn(3, 5))


def test_what_is_not_chosen_cannot_fail() -> None:
    """Divisors and gathered positions of one input are not checked in the range of another."""
    check(lambda a, b: torch.cat([a // b, b]) + 1, torch.arange(5), torch.arange(1, 6))
    check(lambda x, y: torch.cat([y, x[torch.arange(4) - 2]]) + 1, torch.randn(4), torch.randn(10))


PADS = [
    ("constant", (1, 2)), ("constant", (1, -2, -1, 3)),
    ("reflect", (1, 3, 2, 1, 1, 0)), ("reflect", (-1, 3, 2, -1, 1, 0)),
    ("replicate", (1, 2, 5, 0, 2, 3)), ("replicate", (-1, 3, 2, -1, 1, 0)),
    ("circular", (1, 2, 3, 0, 2, 3)),
]  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("mode", "pad"), PADS)
def test_pad(mode: str, pad: tuple[int, ...], dynamic: bool) -> None:
    check(lambda x: F.pad(x + 1, pad, mode) * 2, torch.randn(2, 3, 4, 5, 6), dynamic=dynamic,
          grad=True)  # fmt: skip


def test_pad_with_a_value_of_the_tensors_type() -> None:
    check(lambda x: F.pad(x, (1, 2), value=3.7), torch.arange(6, dtype=torch.int8).reshape(2, 3))
    check(lambda x: F.pad(x, (1, 2), value=float("nan")), torch.randn(2, 3).bfloat16())


@pytest.mark.parametrize("dynamic", [False, True])
def test_turned_and_repeated(dynamic: bool) -> None:
    def function(x: torch.Tensor) -> Any:
        return (
            x.flip(0, 2) + 1,
            x.roll(2, 1) + 1,
            x.roll(5) + 1,
            x.roll((1, -9), (0, 2)) + 1,
            [torch.rot90(x, k, (0, 2)) + 1 for k in range(-1, 3)],
            x.repeat(2, 3, 1, 2) + 1,
            x.tile(2) + 1,
            x.repeat_interleave(3, 1) + 1,
        )

    check(function, torch.randn(4, 6, 5), dynamic=dynamic, grad=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_shuffles(dynamic: bool) -> None:
    def function(x: torch.Tensor) -> Any:
        return (F.pixel_shuffle(x, 2) + 1, F.pixel_unshuffle(x, 2) + 1,
                F.channel_shuffle(x, 4) + 1, torch.block_diag(x[0, 0], x[1, 1]))  # fmt: skip

    check(function, torch.randn(2, 8, 4, 6), dynamic=dynamic, grad=True)


def test_no_elements_and_no_dimensions() -> None:
    check(lambda x, y: (torch.cat([x, y]) + 1, F.pad(x, (1, 1, 1, 1)) + 1, x.roll(1, 0), x.flip(0),
                        x.repeat(2, 2) + 1, torch.stack([x, x]), y.repeat(2, 0)),
          torch.randn(0, 3), torch.randn(2, 3))  # fmt: skip
    check(lambda x: (torch.stack([x, x]) + 1, x.repeat(3) + 1, x.roll(1)), torch.tensor(2.5))


@pytest.mark.parametrize("forced", [False, True])
def test_every_concatenation_is_one_loop_when_asked(forced: bool) -> None:
    """`force_pointwise_cat` (MA-P4): what is chosen among is then computed where it is read, and
    is not in memory in between."""

    def function(*given: Tensor) -> Tensor:
        return torch.cat([t.cos().sin() for t in given], 1)[:, ::3].cumsum(1)

    inputs = [torch.randn(4, 3) for _ in range(12)]
    with config.patch(force_pointwise_cat=forced, force_disable_caches=True):
        torch._dynamo.reset()
        found, code = run_and_get_code(compiled(function), *inputs)
    torch.testing.assert_close(found, function(*inputs))
    assert ("empty_cpu((4, 36,)" in code[0]) != forced
