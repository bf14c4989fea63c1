"""Gathers, masks, embeddings and searches, with eager's errors for positions outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.native import check


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_index(dynamic: bool) -> None:
    def function(x: torch.Tensor, i: torch.Tensor, n: torch.Tensor) -> Any:
        return (
            x[i] + 1,
            x[:, n] + 1,
            x[i, n] + 1,
            x[i, :, n] + 1,  # not neighbours: the indexed dimension comes first
            x[:, i, n] + 1,
            x[i[:, None], n] + 1,
            x[..., n] + 1,
            (x * 2).exp()[i[0]],
        )

    check(function, torch.randn(4, 6, 5), torch.tensor([2, 0, 3]), torch.tensor([-1, 0, -3]),
          dynamic=dynamic, grad=True, exact=False)  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_gather_select_take(dynamic: bool) -> None:
    def function(x: torch.Tensor, g: torch.Tensor, i: torch.Tensor) -> Any:
        return (
            x.gather(1, g) + 1,
            x.index_select(1, i) + 1,
            x.take(-i) + 1,
            torch.take_along_dim(x, i[:, None, None], 0) + 1,
        )

    check(function, torch.randn(4, 6, 5), torch.randint(0, 6, (4, 3, 5)), torch.tensor([2, 0, 3]),
          dynamic=dynamic, grad=True)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dynamic", [False, True])
def test_embedding(dtype: torch.dtype, dynamic: bool) -> None:
    def function(i: torch.Tensor, w: torch.Tensor) -> Any:
        return (F.embedding(i, w) + 1, F.embedding(i, w, padding_idx=2) * 3,
                F.embedding(i, w, scale_grad_by_freq=True))  # fmt: skip

    given = torch.randint(0, 6, (3, 4), dtype=dtype)
    check(function, given, torch.randn(6, 5), dynamic=dynamic, grad=True)


def test_many_gradients_into_few_rows_in_low_precision() -> None:
    """Summed in float32: a running bfloat16 sum would stop growing at 256."""
    index, weight = torch.zeros(1000, dtype=torch.int64), torch.randn(4, 3).bfloat16()
    weight.requires_grad_()
    torch.compile(F.embedding, backend="tilewright")(index, weight).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0], torch.full((3,), 1000.0).bfloat16())


@pytest.mark.parametrize("dynamic", [False, True])
def test_masks(dynamic: bool) -> None:
    def function(x: torch.Tensor, m: torch.Tensor, y: torch.Tensor) -> Any:
        return (x.masked_fill(m, float("-inf")), x.masked_fill(m[0], y[0].detach()) + 1,
                x.masked_scatter(m, y) + 1)  # fmt: skip

    check(function, torch.randn(4, 6, 5), torch.rand(4, 6, 5) > 0.5, torch.randn(200),
          dynamic=dynamic, grad=True)  # fmt: skip


def test_searches_with_ties_and_nans() -> None:
    nan, inf = float("nan"), float("inf")
    values = torch.cat([torch.randn(20), torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.0])])
    boundaries = torch.tensor([-1.0, 0, 0, 0.5, 1, 2, nan])

    def function(x: torch.Tensor, b: torch.Tensor) -> Any:
        return (torch.bucketize(x, b), torch.bucketize(x, b, right=True, out_int32=True),
                torch.bucketize(0.3, b), torch.bucketize(x, b[:0]))  # fmt: skip

    check(function, values, boundaries)
    rows, order = torch.randn(4, 9).sort()[0], torch.tensor([1, 2, 0])
    check(lambda s, v: (torch.searchsorted(s, v), torch.searchsorted(s, v, side="right"),
                        torch.searchsorted(s[0], v)), rows, torch.randn(4, 6))  # fmt: skip
    check(lambda s, v, o: torch.searchsorted(s, v, sorter=o), torch.tensor([3.0, 1, 2]),
          torch.randn(4, 6), order)  # fmt: skip


def test_a_mask_of_unknown_count_is_left_to_aten() -> None:
    check(lambda x, m: x[m].sum(), torch.randn(6), torch.rand(6) > 0.5, exact=False,
          fallbacks=("aten.nonzero.default", "aten.index.Tensor"))  # fmt: skip


OUTSIDE: dict[str, Callable[..., Any]] = {
    "index": lambda x, i: x[i] + 1,
    "gather": lambda x, i: x.gather(0, i),
    "embedding": lambda x, i: F.embedding(i, x[:, None]),
    "index_select": lambda x, i: x.index_select(0, i),
    "take": lambda x, i: x.take(i),
    "scatter": lambda x, i: x.scatter(0, i, 1.0),
    "index_add": lambda x, i: x.index_add(0, i, x[:2]),
    "index_put": lambda x, i: x.index_put((i,), x[:2]),
}


@pytest.mark.parametrize("position", [5, 7, -8])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_position_outside_is_an_error(name: str, position: int) -> None:
    compiled = torch.compile(OUTSIDE[name], backend="tilewright")
    with pytest.raises(IndexError):
        compiled(torch.randn(5), torch.tensor([0, position]))


@pytest.mark.parametrize("name", ["gather", "embedding", "index_select", "scatter", "index_add"])
def test_a_negative_position_is_an_error_where_eager_says_so(name: str) -> None:
    with pytest.raises(IndexError):
        torch.compile(OUTSIDE[name], backend="tilewright")(torch.randn(5), torch.tensor([0, -1]))


def test_no_elements_and_no_dimensions() -> None:
    none = torch.empty(0, dtype=torch.int64)
    check(lambda x, e: (x[e] + 1, x.index_select(1, e) + 1, x.gather(1, e.reshape(0, 1)),
                        torch.cat([x[e], x]) + 1), torch.randn(4, 6), none)  # fmt: skip
    check(lambda z, i: (z.gather(0, i) + 1, z.index_select(0, i) + 1, z.take(i) + 1,
                        z.masked_fill(i == 0, 2)), torch.tensor(1.5), torch.tensor(0))  # fmt: skip


def test_dimensions_found_apart_come_first() -> None:
    """As eager has it: what is indexed is in front where other dimensions lie between."""
    x, i, j = torch.randn(3, 4, 5, 6), torch.tensor([0, 2, 1]), torch.tensor([5, 0, 3])
    check(lambda x, i, j: x[:, i, :, j] * 2, x, i, j)
    check(lambda x, i: x[:, i, i] * 2, x, i)
