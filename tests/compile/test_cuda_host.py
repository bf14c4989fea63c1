"""Whole programs for a card on CPU tensors: kernels in the interpreter, launches in a fake driver.

The numbers on a real card are those of `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda, as_fake_cuda
from tests.ours import torch_may_take_over
from tests.programs import check, compiled, fresh_compiler, leaf  # noqa: F401
from tilewright import metrics, pipeline, testing
from tilewright.codegen.triton import generate as triton
from tilewright.errors import CodegenError
from tilewright.runtime import triton_build


@pytest.fixture
def cuda() -> Iterator[None]:
    with as_cuda():
        metrics.reset()
        yield


def pointwise(x: Tensor, y: Tensor) -> Any:
    return (x * 2 + y).relu(), torch.where(x > y, x, -y)


@pytest.mark.usefixtures("cuda")
def test_pointwise() -> None:
    check(pointwise, torch.randn(33, 100), torch.randn(100))
    assert metrics.generated_kernel_count == 1 and metrics.fallback_nodes == 0


@pytest.mark.usefixtures("cuda")
def test_training() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.softmax(F.layer_norm(x, (40,), w, b), -1).square().sum()

    check(f, leaf(6, 40), leaf(40), leaf(40))


@pytest.mark.usefixtures("cuda")
def test_sums_of_losses() -> None:
    def f(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), t)

    check(f, leaf(600, 70), torch.randint(0, 70, (600,)))
    assert not metrics.counters["triton"], "a kernel was left to torch"


@pytest.mark.usefixtures("cuda")
def test_dynamic_sizes_have_one_program() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x.exp() + y).sum(-1)

    call = compiled(f, dynamic=True)
    for rows, columns in ((4, 8), (5, 33), (17, 3)):
        x, y = torch.randn(rows, columns), torch.randn(columns)
        torch.testing.assert_close(call(x, y), f(x, y))
    assert metrics.cache_misses == 1


@pytest.mark.usefixtures("cuda")
def test_arguments_are_written_to() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y)
        return x.sum()

    check(f, torch.randn(7, 9), torch.randn(7, 9))


@pytest.mark.usefixtures("cuda")
def test_library_calls_between_kernels() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu((x + 1) @ w).sum(0)

    check(f, leaf(5, 8), leaf(8, 6))


@pytest.mark.usefixtures("cuda")
def test_an_empty_tensor_launches_nothing() -> None:
    check(lambda x: x.exp() + 1, torch.randn(0, 4))


@pytest.mark.usefixtures("cuda")
def test_a_bad_index_is_an_error_of_the_next_call() -> None:
    def f(x: Tensor, i: Tensor) -> Tensor:
        return x[i] * 2

    call = compiled(f)
    x, good = torch.randn(6), torch.tensor([0, 5, -1])
    torch.testing.assert_close(call(x, good), f(x, good))
    call(x, torch.tensor([0, 6, 1]))
    with pytest.raises(IndexError, match=r"out of range in triton_.*test_cuda_host"):
        call(x, good)
    torch.testing.assert_close(call(x, good), f(x, good))  # reported once


@pytest.mark.usefixtures("cuda")
def test_a_kernel_that_cannot_be_written_is_torch_s() -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CodegenError("as a test wants it")

    with mock.patch.object(triton, "generate", refuse), torch_may_take_over():
        check(pointwise, torch.randn(5, 3), torch.randn(3))
        check(lambda x: torch.softmax(x, -1), torch.randn(5, 3), dynamic=True)
    assert any("as a test" in reason for reason in metrics.counters["triton"])


@pytest.mark.usefixtures("cuda")
def test_a_kernel_that_does_not_compile_is_torch_s() -> None:
    real = triton.generate

    def spoil(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        return replace(made, text=made.text.replace("tl.load", "tl.lod"))

    with (mock.patch.object(triton, "generate", spoil), testing.fresh_cache(),
          torch_may_take_over()):  # fmt: skip
        check(pointwise, torch.randn(5, 3), torch.randn(3))
    assert metrics.counters["triton"]["kernels that did not compile"] == 1


@pytest.mark.usefixtures("cuda")
def test_members_that_cannot_share_a_kernel_are_kernels_of_their_own() -> None:
    def apart(program: Any, group: Any) -> str:
        return "as a test wants it"

    with mock.patch.object(pipeline, "_cannot", apart):
        check(lambda x: torch.softmax(x, -1), torch.randn(5, 30))
    assert metrics.generated_kernel_count == 4


def test_launches_of_a_program() -> None:
    with as_fake_cuda() as driver:
        call = compiled(pointwise)
        x, y = torch.randn(33, 100), torch.randn(100)
        first, second = call(x, y)
        (done,) = driver.launches
        assert done.name.startswith("triton_poi_fused_")
        assert done.stream == 7 and done.grid == (26, 1, 1)
        assert {x.data_ptr(), y.data_ptr(), first.data_ptr(), second.data_ptr()} == set(
            done.words[:4]
        )


def test_a_view_that_starts_inside_is_another_build() -> None:
    with as_fake_cuda() as driver, testing.fresh_cache():
        call = compiled(lambda x: x * 2, dynamic=False)
        x = torch.randn(1025)
        call(x[:1024])
        before = metrics.kernels_compiled
        call(x[1:])
        assert metrics.kernels_compiled == before + 1
        assert len(driver.launches) == 2 and driver.launches[1].words[0] == x.data_ptr() + 4


def test_the_other_build_is_for_what_is_aligned_even_then() -> None:
    with as_fake_cuda() as driver, testing.fresh_cache():
        call = compiled(lambda x, y: x * y, dynamic=False)
        x, y = torch.randn(1025), torch.randn(1025)
        call(x[:1024], y[:1024])
        with mock.patch.object(triton_build, "build", wraps=triton_build.build) as build:
            call(x[1:], y[:1024])
            call(x[1:], y[1:])
        assert [len(source.aligned) for (source,), _ in build.call_args_list] == [2, 1]
        assert len(driver.launches) == 3


def test_equal_kernels_are_built_once() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ w).relu()
        return x

    with as_fake_cuda() as driver, testing.fresh_cache():
        metrics.reset()
        compiled(f)(torch.randn(8, 8), torch.randn(8, 8))
        # the last one has another name
        assert metrics.kernels_compiled == 2 and len(driver.launches) == 4


def test_a_second_process_would_compile_nothing() -> None:
    with as_fake_cuda(), testing.fresh_cache():
        x, y = torch.randn(33, 100), torch.randn(100)
        compiled(pointwise)(x, y)
        torch._dynamo.reset()
        triton_build._workshop.clear()
        metrics.reset()
        compiled(pointwise)(x, y)
        assert (metrics.kernels_compiled, metrics.kernels_found) == (0, 1)
