"""The order of programs where rows of a table come again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tilewright.codegen.triton.launch import TritonKernel
from tilewright.codegen.triton.plan import configs, grid_order


def mixed(x: Tensor, order: Tensor) -> Tensor:
    return x * 0.25 + x[order] * 0.75


def summed(x: Tensor, source: Tensor, to: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, to, x[source])


def runs_rows_first(kernel: TritonKernel) -> bool:
    return "pid % yblocks" in kernel.text


def test_images_that_are_mixed_with_others_of_them() -> None:
    order = torch.empty(256, dtype=torch.int64)
    (kernel,) = kernels_of(mixed, torch.empty(256, 3, 224, 224), order)
    assert runs_rows_first(kernel) and not build(kernel).spills
    (kernel,) = kernels_of(mixed, torch.empty(64, 3, 224, 224), order[:64])  # fit in cache
    assert not runs_rows_first(kernel)
    (kernel,) = kernels_of(lambda x, order: x[order], torch.empty(256, 3, 224, 224), order)
    assert not runs_rows_first(kernel)


def test_rows_of_neighbours_by_pieces_that_fit() -> None:
    edges = torch.empty(1 << 20, dtype=torch.int64)
    _, kernel, *_ = kernels_of(summed, torch.empty(65536, 128), edges, edges)
    assert runs_rows_first(kernel) and kernel.config.kwargs["XBLOCK"] == 32
    assert kernel.config.kwargs["YBLOCK"] == 32
    _, kernel, *_ = kernels_of(summed, torch.empty(1 << 20, 128), edges, edges)  # each once
    assert not runs_rows_first(kernel)
    many = torch.empty(1 << 23, dtype=torch.int64)
    _, kernel, *_ = kernels_of(summed, torch.empty(1 << 20, 128), many, many)  # too many rows
    assert not runs_rows_first(kernel)


def test_values_where_rows_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grid_order, configs):
        monkeypatch.setattr(module, "columns_at_once", lambda *_: 32)
    (kernel,) = check(mixed, torch.randn(10, 150), torch.randint(-10, 10, (10,)))
    assert runs_rows_first(kernel)
    source, to = torch.randint(20, (2, 300))
    _, kernel, *_ = check(summed, torch.randn(20, 100), source, to, rtol=1e-4, atol=1e-4)
    assert runs_rows_first(kernel)


def test_rows_that_are_put_elsewhere_have_small_programs() -> None:
    def put(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
        return cache.index_copy(0, at, new)

    rows = torch.empty(32768, dtype=torch.int64)
    for width, by in ((128, 8), (1024, 1)):
        cache = torch.empty(65536, width, dtype=torch.bfloat16)
        *_, kernel = kernels_of(put, cache, rows, cache[:32768])
        assert kernel.config.kwargs == {"YBLOCK": by, "XBLOCK": width}
        assert kernel.config.num_warps == 4 and build(kernel).widest("st.global") == 16
