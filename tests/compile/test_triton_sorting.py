"""Short rows in order, and the first few of a row, in kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tilewright.lower import sorting

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.bool)


@pytest.fixture(autouse=True)
def as_on_a_card() -> Iterator[None]:
    with mock.patch.object(sorting, "on_card", return_value=True):
        yield


def _numbers(*size: int, dtype: torch.dtype) -> Tensor:
    """With equal ones, and all that floats have beside numbers."""
    torch.manual_seed(0)
    made = (8 * torch.randn(*size)).round() / 2
    if dtype.is_floating_point:
        made.view(-1)[::7] = -0.0
        made.view(-1)[3::11] = torch.nan
        made.view(-1)[4::13] = torch.inf
        made.view(-1)[5::17] = -torch.inf
    return made.to(dtype) if dtype != torch.bool else made > 0


def _found(x: Tensor, values: Tensor, places: Tensor) -> Any:
    """Any places of equal elements will do, if they are different ones, and of the values."""
    same = x.gather(-1, places)
    apart = places[:, :, None] != places[:, None, :]
    return values, (same == values) | (same != same) & (values != values), apart


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_the_first_few_of_a_row(dtype: torch.dtype, largest: bool) -> None:
    x = _numbers(9, 37, dtype=dtype)
    kernel, *_ = check(lambda x: _found(x, *x.topk(3, largest=largest)), x, rtol=0, atol=0)
    assert kernel.text.count("tl.reduce(") == 3


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_short_row_in_order(dtype: torch.dtype, descending: bool) -> None:
    """Equal elements keep their order, so places are eager's too; zeros keep their signs."""
    x = _numbers(5, 70, dtype=dtype)

    def ordered(x: Tensor) -> Any:
        return torch.sort(x, stable=True, descending=descending)

    (kernel,) = check(ordered, x, rtol=0, atol=0)
    assert "tri.in_order(" in kernel.text
    if dtype.is_floating_point:
        check(lambda x: 1 / ordered(x)[0], x, rtol=0, atol=0)


def test_other_dimensions_and_counts() -> None:
    x = _numbers(3, 20, 5, dtype=torch.float32)
    check(lambda x: x.sort(dim=1, stable=True), x, rtol=0, atol=0)
    check(lambda x: (x * 2 + 1).sort(dim=0, stable=True), x, rtol=0, atol=0)
    check(lambda x: x.topk(12, 1)[0], x, rtol=0, atol=0)
    check(lambda x: x.topk(2, 1)[0], x, rtol=0, atol=0)
    check(lambda x: x.argsort(dim=-1, stable=True), x, rtol=0, atol=0)


def test_experts_of_a_token_are_chosen_in_one_kernel() -> None:
    (kernel,) = check(lambda x: torch.softmax(x, -1).topk(2), torch.randn(50, 64))
    assert kernel.text.count("tl.load(") == 1


@pytest.mark.parametrize("fn", [lambda x: x.sort(-1), lambda x: x.topk(2)])
def test_what_is_left_to_aten(fn: Callable[..., Any]) -> None:
    for x in (torch.randn(3, 9000), torch.randn(3, 7, dtype=torch.float64)):
        assert not check(fn, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_order_stay_in_registers(dtype: torch.dtype) -> None:
    (kernel,) = kernels_of(lambda x: x.sort(-1), torch.randn(4096, 256).to(dtype))
    assert build(kernel).spills == 0
