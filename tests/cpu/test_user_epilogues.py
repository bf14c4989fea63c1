"""Pointwise work on a user's kernel's result as a part of that kernel (UT-9), and when not (UT-10).
On CPU tensors, where Triton's interpreter runs the kernels."""

# Kernels have no types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests import kernels as user
from tilewright import config
from tilewright.testing import run_and_get_code


@pytest.fixture(autouse=True)
def _seen() -> Generator[None]:
    torch._dynamo.reset()
    with user.seen(), config.patch(epilogue_fusion_user_defined_triton_kernel=True):
        yield
    torch._dynamo.reset()


@triton.jit
def twice(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def broken_lines(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places = out + i
    value = tl.load(x + i, mask=i < n)
    tl.store(
        places,
        value
        # a remark, and a string with a bracket: ")"
        + 1,
        mask=(i
              < n),
    )  # fmt: skip


@triton.jit
def two_stores(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 0.0, mask=i < n)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def reads_back(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(out + i, mask=i < n) * 0
    tl.store(out + i, tl.load(x + i, mask=i < n) + before, mask=i < n)


@triton.jit
def adds(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + i, tl.load(x + i, mask=i < n), mask=i < n)


After = Callable[[Tensor], Any]


def launch(kernel: Any, after: After, start: Callable[[Tensor], Tensor] = torch.empty_like
           ) -> Callable[[Tensor], Any]:  # fmt: skip
    def run(x: Tensor) -> Any:
        out = start(x)
        kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), BLOCK=16)
        return after(out)

    return run


def found(
    kernel: Any,
    after: After,
    x: Tensor,
    start: Callable[[Tensor], Tensor] = torch.empty_like,
    dynamic: bool = False,
) -> str:
    """The generated code of a program whose result is eager's."""
    run = torch.compile(launch(kernel, after, start), backend="tilewright", fullgraph=True,
                        dynamic=dynamic)  # fmt: skip
    actual, code = run_and_get_code(run, x)
    torch.testing.assert_close(actual, launch(user.eager(kernel), after, start)(x))
    return "\n".join(code)


UNARY: dict[str, After] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "several": lambda y: (y.sin() * 2 + 1).clamp(max=1.5),
    "rounded": lambda y: y.to(torch.bfloat16).to(y.dtype),
}


@pytest.mark.parametrize("kernel", [twice, broken_lines], ids=["plain", "broken lines"])
@pytest.mark.parametrize("name", UNARY)
def test_ut_09_a_unary_epilogue_is_part_of_the_kernel(name: str, kernel: Any) -> None:
    code = found(kernel, UNARY[name], torch.randn(5, 7))
    assert "cpp_fused" not in code and code.count("empty_cpu(") == 1
    assert "_epilogue(" in code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_ut_09_other_types_and_sizes(dtype: torch.dtype) -> None:
    """What the kernel stores is rounded before the epilogue sees it."""
    code = found(twice, torch.exp, torch.randn(33).to(dtype), dynamic=True)
    assert "cpp_fused" not in code


def test_ut_09_a_kernel_with_and_without_epilogue() -> None:
    def run(kernel: Any) -> Callable[[Tensor], list[Tensor]]:
        plain, relu = launch(kernel, lambda y: y), launch(kernel, torch.relu)
        return lambda x: [relu(x), plain(x), launch(kernel, torch.sigmoid)(x), relu(x + 1)]

    x = torch.randn(40)
    actual = torch.compile(run(twice), backend="tilewright", fullgraph=True)(x)
    torch.testing.assert_close(actual, run(user.eager(twice))(x))


REFUSED: dict[str, tuple[Any, After, Callable[[Tensor], Tensor]]] = {
    "stores twice": (two_stores, torch.relu, torch.empty_like),
    "reads its result": (reads_back, torch.relu, torch.zeros_like),
    "atomic": (adds, torch.relu, torch.zeros_like),
    "has several readers": (twice, lambda y: (y.relu(), y.sum()), torch.empty_like),
    "is returned": (twice, lambda y: (y.relu(), y), torch.empty_like),
    "has contents": (twice, torch.relu, torch.ones_like),
    "is a part": (twice, torch.relu, lambda x: torch.empty(3, *x.shape)[1]),
    "joined": (twice, lambda y: torch.cat([y.relu(), y.new_ones(3)]), torch.empty_like),
    "other tensors": (twice, lambda y: y * torch.arange(40).sin().flip(0), torch.empty_like),
    "the place": (twice, lambda y: y * torch.arange(40), torch.empty_like),
    "moved": (twice, lambda y: y.flip(0).relu(), torch.empty_like),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ut_10_what_is_not_plain_stays_apart(name: str) -> None:
    kernel, after, start = REFUSED[name]
    code = found(kernel, after, torch.randn(40), start)
    assert "_epilogue(" not in code


def test_ut_10_not_unless_asked_for() -> None:
    with config.patch(epilogue_fusion_user_defined_triton_kernel=False):
        assert "_epilogue(" not in found(twice, torch.relu, torch.randn(40))
