"""Random numbers of a card: the CPU's own, every word of a counter used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import build, kernels_of
from tilewright.testing import run_and_get_code

NUMBERS = {
    "rand": lambda: torch.rand(1000),
    "randn": lambda: torch.randn(7, 24),
    "integers": lambda: torch.randint(-4, 9, (50,)),
    "float64": lambda: torch.rand(33, dtype=torch.float64),
    "normal float64": lambda: torch.randn(5, 40, dtype=torch.float64),
    "rows that are folded": lambda: torch.rand(12, 16).sum(1),
    "rows no multiple of four": lambda: torch.rand(9, 17).sum(1),
    "turned around": lambda: torch.rand(40, 36).t().contiguous(),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NUMBERS)
def test_both_targets_draw_the_same_numbers(name: str) -> None:
    fn = NUMBERS[name]
    torch.manual_seed(3)
    expected = torch.compile(fn, backend="tilewright")()
    with as_cuda():
        ours = torch.compile(fn, backend="tilewright")
        torch.manual_seed(3)
        actual = ours()
        other = ours()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(actual, other)


def test_the_mask_of_dropout_is_the_same() -> None:
    x = torch.randn(16, 64)
    torch.manual_seed(3)
    expected = torch.compile(lambda x: F.dropout(x, 0.3), backend="tilewright")(x)
    with as_cuda():
        torch.manual_seed(3)
        actual = torch.compile(lambda x: F.dropout(x, 0.3), backend="tilewright")(x)
    torch.testing.assert_close(actual, expected)


def test_what_is_dropped_is_one_product() -> None:
    """With the scale or with zero, which does not make zero of what is not finite."""
    x = torch.tensor([1.0, torch.inf]).repeat(64)
    with as_cuda():
        compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="tilewright")
        found, code = run_and_get_code(compiled, x)
    one, infinite = found[::2], found[1::2]
    assert set(one.tolist()) == {0.0, 2.0} and 0 < infinite.isnan().sum() < 64
    assert " * 2.0" not in "".join(code)


def masked(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape) < 0.5)


def rows(x: Tensor) -> Tensor:
    return masked(x).sum(-1)


def added(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape)


@pytest.mark.parametrize(("fn", "block"), [(masked, "below"), (rows, "below"), (added, "rand")])
def test_a_counter_gives_four_numbers(fn: Any, block: str) -> None:
    """Ten rounds of two products per counter, both halves of each by one instruction."""
    (kernel,) = kernels_of(fn, torch.empty(4096, 2048, dtype=torch.bfloat16))
    assert f"tri.{block}_block(" in kernel.text
    made = build(kernel)
    points = 1
    for size in kernel.config.kwargs.values():
        points *= size
    each = points // (32 * kernel.config.num_warps)
    assert 0 < made.ptx.count("mul.wide.u32") <= 21 * max(1, each // 4)
    assert "mul.hi.u32" not in made.ptx
    assert made.spills == 0


@pytest.mark.parametrize("limit", [0.3, 0.5, 1 - 2**-24, 2**-24, 2**-30, 0.0, 1.0])
def test_what_is_below_a_limit_is_what_its_numbers_say(limit: float) -> None:
    """Words are compared where only that is asked for, up to the last number before the limit."""

    def both(x: Tensor) -> Any:
        r = torch.rand(x.shape)
        return r, r < limit

    x = torch.zeros(3, 512)
    with as_cuda():
        torch.manual_seed(5)
        drawn, below = torch.compile(both, backend="tilewright")(x)
    torch.testing.assert_close(below, drawn < limit)
