"""What counts in few places, as histograms do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compile.card import results
from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tests.pretend import pretended
from tilewright.codegen.triton.launch import TritonKernel


def binned(x: Tensor) -> Tensor:
    at = ((x.clamp(-4, 4) + 4) * 2).long().clamp(max=15)
    return torch.zeros(16).scatter_add(0, at, torch.ones_like(x))


def counts(kernels: list[TritonKernel]) -> list[TritonKernel]:
    return [k for k in kernels if "tl.histogram(" in k.text]


@pytest.mark.parametrize("size", [16 * 256, 10007, 4])
def test_values_of_histograms(size: int) -> None:
    x = torch.randn(size)
    kernels = check(binned, x)
    assert bool(counts(kernels)) == (size > 4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
def test_types_and_numbers_that_are_added(dtype: torch.dtype) -> None:
    def added(into: Tensor, at: Tensor) -> Tensor:
        return into.index_put((at,), torch.tensor(3, dtype=dtype), accumulate=True)

    into, at = torch.arange(9).to(dtype), torch.randint(-9, 9, (3000,))
    (kernel,) = counts(check(added, into, at))
    assert "mask=tl.arange(0, 16) < 9" in kernel.text


def test_ones_of_rows_where_some_are_left_out() -> None:
    def added(at: Tensor, rows: Tensor) -> Tensor:
        row = torch.arange(rows.shape[0])[:, None]
        return torch.zeros(rows.shape[0], 5).index_put((row, at), torch.ones(()), accumulate=True)

    assert counts(check(added, torch.randint(5, (3, 2000)), torch.zeros(3)))


@pretended
def test_a_card_counts_without_copies() -> None:
    x = torch.randn(9000)

    def of_card(x: Tensor) -> Tensor:
        at = ((x.clamp(-4, 4) + 4) * 2).long().clamp(max=15)
        return torch.zeros(16, device=x.device).scatter_add(0, at, torch.ones_like(x))

    (found,) = results(of_card, x)
    assert torch.equal(found, of_card(x))


def test_blocks_of_many_elements() -> None:
    kernels = kernels_of(binned, torch.empty(1 << 25))
    (kernel,) = counts(kernels)
    assert kernel.config.kwargs == {"XBLOCK": 4096, "EACH": 32768}
    assert "xmask" not in kernel.text
    made = build(kernel)
    assert made.widest("ld.global") == 16 and not made.spills


def test_many_places_or_other_numbers_are_added_one_by_one() -> None:
    def weighted(x: Tensor, at: Tensor) -> Tensor:
        return torch.zeros(16).index_add(0, at, x)

    at = torch.empty(1 << 16, dtype=torch.int64)
    assert not counts(kernels_of(weighted, torch.empty(1 << 16), at))
    assert not counts(kernels_of(lambda at: torch.zeros(4096).index_add(0, at, torch.ones(1 << 16)),
                                 at))  # fmt: skip


def test_places_that_none_meets_have_nothing_of_infinity() -> None:
    def added(at: Tensor) -> Tensor:
        return torch.zeros(16).index_put((at,), torch.full((), float("inf")), accumulate=True)

    assert not counts(check(added, torch.randint(3, 9, (5000,))))
