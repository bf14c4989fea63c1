"""Folds of much data have programs enough, whatever is done with their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.compile.as_cuda import as_cuda
from tests.compile.test_triton_in_turn import for_card
from tests.limits import limit


def two_means(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(1 - x).mean() + F.relu(1 + y).mean()


def quantiles(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    q = torch.linspace(0.1, 0.9, 9)
    e = y - p
    return torch.maximum(q * e, (q - 1) * e).mean(), e > 0


def ratio_of_columns(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    both, one = (x * y).sum(0), x.sum(0)
    return 1 - (both / (one + 1e-6)).mean(), x > y


def noise(x: Tensor, y: Tensor) -> Tensor:
    return (10 * torch.log10(1 / (x - y).square().mean((1, 2)))).mean()


def steps(x: Tensor, _: Tensor) -> Tensor:
    return (x[:, 1:] - x[:, :-1]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def deviations(x: Tensor, _: Tensor) -> Tensor:
    return F.relu(1 - (x.var(0) + 1e-4).sqrt()).mean()


def of_channels(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scaled = x * scale
    return scaled.sum((0, 1)).bfloat16(), scaled.relu()


def normed_columns(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    mean, var = x.mean(0), x.var(0)
    running = 0.9 * y[0] + 0.1 * mean, 0.9 * y[1] + 0.1 * var
    return F.relu((x - mean) * torch.rsqrt(var + 1e-5)), *running


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "folds of different data": (two_means, (1 << 22,), (1 << 22,)),
    "few columns": (quantiles, (1 << 20, 9), (1 << 20, 1)),
    "columns, and then their mean": (ratio_of_columns, (1 << 16, 80), (1 << 16, 80)),
    "many columns, and then their mean": (deviations, (1 << 15, 2048), (1,)),
    "pictures and scales of their channels": (of_channels, (40, 784, 512), (40, 1, 512)),
    "columns that are normalised": (normed_columns, (1 << 17, 384), (2, 384)),
    "pieces of images": (steps, (16, 1024, 1024), (1,)),
    "few rows, and then their mean": (noise, (32, 3, 1 << 18), (32, 3, 1 << 18)),
}


@pytest.mark.parametrize("name", CASES)
def test_no_fold_leaves_the_card_idle(name: str) -> None:
    fn, *sizes = CASES[name]
    args = [torch.empty(size) for size in sizes]
    first = next(k for k in for_card(fn, *args) if "_poi_" not in k.name)
    assert first.programs({}) > 66


@pytest.mark.parametrize("columns", [192, 384])
def test_what_is_normalised_has_other_programs_than_its_running_means(columns: int) -> None:
    made = for_card(normed_columns, torch.empty(1 << 17, columns), torch.empty(2, columns))
    assert ["_poi_" in k.name for k in made] == [False, False, True]


def test_what_columns_are_folded_of_is_computed_again() -> None:
    """The loads of both kernels are the same with it: a store is saved."""

    def gradient(way: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        way = torch.where(x * scale > 0, way, 0.0)
        return (way - way.mean(0) - x * (way * x).mean(0)) * scale

    rows = torch.empty(1 << 17, 384)
    first, *_ = for_card(gradient, rows, rows, torch.empty(384))
    assert first.text.count("tl.store") == 2


def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for what, size in (("LARGE_WORK", 1 << 10), ("WORK_ALONE", 1 << 8), ("CHUNK_WORK", 1 << 10)):
        limit(monkeypatch, what, size)


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_apart_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_ones_too(monkeypatch)
    fn, *sizes = CASES[name]
    args = [torch.randn([min(n, 1 << 11 // len(size)) for n in size],
                        generator=torch.Generator().manual_seed(5)) for size in sizes]  # fmt: skip
    with as_cuda():
        found = torch.compile(fn, backend="tilewright")(*args)
    assert_close(found, fn(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("pictures", "rows"), [(40, 784), (300, 784), (16, 787)])
def test_a_program_has_one_pictures_scales(pictures: int, rows: int) -> None:
    """Nor are there as many programs as rows where these have no divisor."""
    first, *_ = for_card(of_channels, torch.empty(pictures, rows, 512),
                         torch.empty(pictures, 1, 512))  # fmt: skip
    assert f"rnumel = {rows}\n" in first.text


def test_scales_of_odd_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    _small_ones_too(monkeypatch)
    args = torch.randn(5, 71, 33), torch.randn(5, 1, 33)
    with as_cuda():
        found = torch.compile(of_channels, backend="tilewright")(*args)
    assert_close(found, of_channels(*args))


def both_sums(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scaled = x * scale
    return x.sum((0, 1)).bfloat16(), scaled.sum(1)


def test_few_pictures_have_programs_for_their_pieces() -> None:
    first, *_ = for_card(both_sums, torch.empty(16, 3136, 192), torch.empty(16, 1, 192))
    assert first.programs({}) > 132 and ("XBLOCK", 32) in first.config.blocks


def test_pieces_of_few_pictures_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _small_ones_too(monkeypatch)
    args = torch.randn(3, 340, 33), torch.randn(3, 1, 33)
    with as_cuda():
        found = torch.compile(both_sums, backend="tilewright")(*args)
    assert_close(found, both_sums(*args), rtol=1e-3, atol=1e-3)
