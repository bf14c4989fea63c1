"""Tensors made from numbers and indices: exactly eager's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.cpu.against_eager import check

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
def test_filled(dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [
            torch.zeros(3, 2, dtype=dtype), torch.ones(0, 4, dtype=dtype), torch.zeros_like(x),
            torch.full((2, 3), 3.3, dtype=dtype), torch.full_like(x, 2, dtype=dtype),
            x.new_full((3,), 7, dtype=dtype), x.new_ones(2), x.new_zeros((), dtype=dtype),
            torch.tensor(1, dtype=dtype) + x, torch.empty_like(x).fill_(2.5),
            torch.eye(3, 5, dtype=dtype), torch.eye(4, dtype=dtype),
        ]  # fmt: skip

    check(fn, torch.randn(3, 4).t(), rtol=0, atol=0)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences(dtype: torch.dtype) -> None:
    check(lambda: [torch.arange(7, dtype=dtype), torch.arange(2, 9, 3, dtype=dtype),
                   torch.arange(9, 2, -2, dtype=dtype), torch.arange(5, 5, dtype=dtype),
                   torch.linspace(0, 10, 11, dtype=dtype), torch.linspace(1, 9, 7, dtype=dtype),
                   torch.linspace(3, 9, 1, dtype=dtype), torch.linspace(3, 9, 0, dtype=dtype),
                   torch.linspace(100, 2, 50, dtype=dtype)], rtol=0, atol=0)  # fmt: skip


def test_float_sequences() -> None:
    check(lambda: [torch.arange(0.3, 7.1, 0.37), torch.arange(0, 1, 0.01, dtype=torch.float64),
                   torch.linspace(-1.7, 3.3, 100), torch.logspace(-2, 3, 50),
                   torch.logspace(0, 5, 6, base=2, dtype=torch.int64),
                   torch.arange(5.0), torch.arange(1e9, 1e9 + 5, dtype=torch.float64)])  # fmt: skip


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("diagonal", [-9, -2, -1, 0, 1, 3, 9])
def test_triangles(diagonal: int) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        rows, cols = x.shape[-2:]
        return [
            x.tril(diagonal), x.triu(diagonal), (x > 0).tril(diagonal),
            torch.tril_indices(rows, cols, diagonal), torch.triu_indices(rows, cols, diagonal),
            torch.tril_indices(cols, rows, diagonal), torch.triu_indices(cols, rows, diagonal),
        ]  # fmt: skip

    check(fn, torch.randn(2, 4, 7), rtol=0, atol=0)
    check(fn, torch.randn(0, 3), rtol=0, atol=0)


def test_triangle_drops_what_it_cuts_off() -> None:
    x = torch.full((3, 3), float("nan"))
    check(lambda x: (x.tril(-1), x.triu(1)), x, bits=True)


def test_dynamic() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        n = x.shape[0]
        return [
            torch.arange(n) * 2, torch.arange(1, 2 * n, 2, dtype=torch.float32),
            torch.zeros(n, 3) + n, torch.full((n,), n), torch.eye(n), x.tril(),
            torch.linspace(0, 1, n), x + torch.arange(n),
        ]  # fmt: skip

    check(fn, torch.randn(6, 6), dynamic=True)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def uninitialised(x: Tensor) -> list[Tensor]:
    made = [torch.empty(2, 3), x.new_empty(4), torch.empty_like(x), torch.empty_strided((2,), (3,))]
    kinds = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.uint16)
    return made + [torch.empty(3, dtype=kind) for kind in kinds]


def test_deterministic_memory_is_filled(deterministic: None) -> None:
    check(uninitialised, torch.randn(3), bits=True)


def test_only_deterministic_memory_is_filled(deterministic: None) -> None:
    """The same graph is compiled once for each: what was kept of one is not the other's."""
    compiled = torch.compile(lambda x: torch.empty(3) * x, backend="tilewright")
    assert compiled(torch.ones(3)).isnan().all()
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    assert not compiled(torch.ones(3)).isnan().any()
