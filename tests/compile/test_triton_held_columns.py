"""Columns that a program holds as they are, in the interpreter and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tests.limits import limit

BF16, F16 = torch.bfloat16, torch.float16


def _normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _centred(x: Tensor, weight: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    spread = (x - mean).square().mean(1, keepdim=True)
    return (x - mean) / torch.sqrt(spread + 1e-6) * weight[:, None]


def _scaled(x: Tensor, weight: Tensor) -> Tensor:
    return (F.normalize(x.float(), dim=1) * weight[:, None]).to(x.dtype)


def _moments(x: Tensor, weight: Tensor) -> Tensor:
    var, mean = torch.var_mean(x.float(), 1, keepdim=True, correction=0)
    return ((x.float() - mean) * torch.rsqrt(var + 1e-6)).to(x.dtype) * weight[:, None]


def _softmax(x: Tensor, weight: Tensor) -> Tensor:
    return torch.softmax(x * weight[:, None], 1)


CASES: list[tuple[Callable[..., Any], tuple[int, ...], torch.dtype]] = [
    (_centred, (3, 97, 72), BF16),
    (_scaled, (2, 300, 40), F16),
    (_moments, (2, 300, 88), F16),
    (_softmax, (2, 613, 64), BF16),
]


@pytest.mark.parametrize(("fn", "shape", "dtype"), CASES)
def test_columns_are_made_anew_of_what_was_loaded(
    fn: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    limit(monkeypatch, "RESIDENT_COLUMNS_PER_SM", 0)
    x, weight = _normal(*shape, dtype=dtype), _normal(shape[1], dtype=dtype)
    (kernel,) = check(fn, x, weight, rtol=3e-2, atol=3e-2)
    assert "tri_rows.anew(" in kernel.text
    assert sum("tl.load(p0" in line for line in kernel.text.splitlines()) == 1


@pytest.mark.parametrize(("rows", "warps"), [(96, 2), (768, 8)])
def test_few_threads_hold_columns(rows: int, warps: int) -> None:
    x, weight = torch.empty(40, rows, 9216, dtype=BF16), torch.empty(rows, dtype=BF16)
    (kernel,) = kernels_of(_centred, x, weight)
    made = build(kernel)
    assert (kernel.config.num_warps, kernel.config.registers) == (warps, 128) and not made.spills
    assert made.widest("ld.global") == made.widest("st.global") == 16


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=1)


def _of_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    """Columns as far as they go, without their mean and by their deviation."""
    inside = (torch.arange(x.shape[1]) < lengths[:, None])[..., None]
    mean = (x * inside).sum(1, keepdim=True) / lengths[:, None, None]
    var = ((x - mean).square() * inside).sum(1, keepdim=True) / (lengths[:, None, None] - 1)
    return ((x - mean) / (var.sqrt() + 1e-5)).masked_fill(~inside, 0.0)


@pytest.mark.parametrize("rows", [256, 200])
def test_pieces_of_columns_have_one_address(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "RESIDENT_COLUMNS_PER_SM", 0)
    x = _normal(2, rows, 96)
    x[0, :, :3] = 0
    (kernel,) = check(_unit, x, rtol=3e-2, atol=3e-2)
    last = (rows - 1) // 32 * 32 * 96
    assert f" + rbase*96 + {last}" in kernel.text and "tri_rows.by_far(" in kernel.text
    (kernel,) = kernels_of(_unit, torch.empty(32, rows, 64, 64, dtype=BF16))
    made = build(kernel)
    assert (kernel.config.num_warps, kernel.config.registers) == (8, 64) and not made.spills
    assert made.widest("ld.global") == made.widest("st.global") == 16


@pytest.mark.parametrize("rows", [1100, 3000])
def test_long_columns_of_floats_are_read_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "RESIDENT_COLUMNS_PER_SM", 0)
    x, lengths = _normal(2, rows, 16, dtype=torch.float32), torch.tensor([rows - 99, rows])
    (kernel,) = check(_of_lengths, x, lengths, rtol=1e-4, atol=1e-4)
    loaded = sum("tl.load(p1" in line for line in kernel.text.splitlines())
    assert loaded == -(-rows // kernel.config.kwargs["RBLOCK"]) and "for roffset" not in kernel.text


def test_which_columns_of_floats_are_walked() -> None:
    """Longer and odd ones, and what takes many registers anyway."""
    cases: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
        (_unit, (128, 4000, 80)),
        (_unit, (128, 3000, 81)),
        (lambda x: torch.softmax(x, 1), (128, 3000, 80)),
    ]  # fmt: skip
    for fn, size in cases:
        (kernel,) = kernels_of(fn, torch.empty(size))
        assert "for roffset" in kernel.text


def test_which_columns_are_held_as_floats() -> None:
    """Few, wide, short or odd ones, two of them at once, and what takes many registers anyway."""

    def quantized(x: Tensor) -> Tensor:
        return (x.float() / x.float().abs().amax(1, keepdim=True) * 127).round().to(torch.int8)

    def both(x: Tensor) -> Tensor:
        return x[0] - (x[0] * x[1]).sum(1, keepdim=True)

    def shape(*size: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(*size, dtype=dtype)

    weight = shape(192)
    cases: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
        (_centred, (shape(1, 192, 1024), weight)),
        (_centred, (shape(40, 192, 9216, dtype=torch.float32), weight)),
        (_centred, (shape(40, 64, 9216), shape(64))),
        (_centred, (shape(40, 192, 9215), weight)),
        (_softmax, (shape(40, 192, 9216), weight)),
        (_moments, (shape(40, 192, 9216), weight)),
        (_scaled, (shape(40, 128, 9216), shape(128))),
        (both, (shape(2, 40, 192, 9216),)),
        (quantized, (shape(40, 192, 9216),)),
    ]  # fmt: skip
    for fn, args in cases:
        assert not any("tri_rows.anew(" in kernel.text for kernel in kernels_of(fn, *args))
