"""Rounding in a card's kernels: through bfloat16 two at a time, by arithmetic of bfloat16 where it
does, and not between a product and a sum."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import cubin
from tests.compile.as_cuda import _lower
from tests.compile.cubin import build
from tests.compile.interp import check
from tilewright import config
from tilewright.codegen.triton.launch import TritonKernel


def for_card(fn: Callable[..., Any], *args: Tensor, arch: str = "sm_90") -> list[TritonKernel]:
    with mock.patch.object(cubin, "lower", _lower), config.patch({"cuda.arch": arch}):
        return cubin.kernels_of(fn, *args, target=arch)


def group_norm(x: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32))


def test_values_are_rounded_two_at_a_time() -> None:
    """What eager would have stored as bfloat16 between two operators."""
    (kernel,) = for_card(group_norm, torch.empty(16, 512, 64, 64, dtype=torch.bfloat16))
    assert kernel.text.count("tri.rounded(") == 1
    ptx = build(kernel).ptx
    assert "cvt.rn.bf16x2.f32" in ptx
    assert not re.search(r"cvt\.rn\.bf16\.f32", ptx)


NARROW: dict[str, tuple[Callable[..., Any], int, int]] = {
    # name: (function of bfloat16, instructions of that type on pairs, roundings of floats)
    "a sum": (lambda x, y: F.gelu(x + y), 1, 0),
    "a product of what was rounded": (lambda x, y: F.silu(x) * y, 1, 0),
    "a chain": (lambda x, y: (x * y + 1) * x, 3, 0),
    "a sum that is used twice": (lambda x, y: (x.float() + y).bfloat16() * (x.float() + y), 0, 1),
    "floats": (lambda x, y: torch.exp(torch.sin(x)) * y.float(), 0, 2),
}


@pytest.mark.parametrize("name", NARROW)
def test_what_bfloat16_computes_is_not_computed_of_floats(name: str) -> None:
    """Each instruction of a thread that has eight elements takes two of them."""
    fn, steps, roundings = NARROW[name]
    x = torch.empty(1 << 22, dtype=torch.bfloat16)
    (kernel,) = for_card(fn, x, x)
    assert kernel.text.count("tri.rounded(") == roundings
    found = re.findall(r"\b(?:add|sub|mul|fma)\.(?:rn\.)?bf16x2", build(kernel).ptx)
    assert len(found) == steps * kernel.config.kwargs["XBLOCK"] // kernel.config.num_warps // 64
    older = for_card(fn, x, x, arch="sm_80")
    assert older[0].text.count("tri.rounded(") >= roundings


def test_numbers_of_bfloat16_are_not_rounded_again() -> None:
    """What the larger of two of them is, and where it is positive."""
    fn = lambda x: torch.where(F.relu(torch.sin(x)) <= 0, 0.0, -x)  # noqa: E731
    (kernel,) = for_card(fn, torch.empty(1 << 22, dtype=torch.bfloat16))
    assert kernel.text.count("tri.rounded(") == 1
    x = torch.randn(1 << 10).bfloat16()
    check(lambda x: F.relu(torch.sin(x)).float() * 1.7 + (-(x * 3)).abs().float(), x)


def test_one_value_is_rounded_alone() -> None:
    """A tile of one number has no pairs."""
    fn = lambda x: (x.float().sum(-1).bfloat16().float() + 1).bfloat16()  # noqa: E731
    for kernel in for_card(fn, torch.empty(4, 1 << 15, dtype=torch.bfloat16)):
        assert "tri.rounded(" not in kernel.text
        build(kernel)


@pytest.mark.parametrize(("fn", "dtype", "joins"), [
    (group_norm, torch.bfloat16, True),
    (group_norm, torch.float16, True),
    (group_norm, torch.float32, False),
    (lambda x: torch.floor(x.float() * 3.3 + 0.7).bfloat16(), torch.bfloat16, False),
    (lambda x: torch.where(x.float() * 3.3 + 0.7 > 0, x, 1), torch.bfloat16, False),
    (lambda x: torch.where(x > 0, x.float() * 3.3 + 0.7, x).bfloat16(), torch.bfloat16, True),
    (lambda x: (x.float() * x + 1).sum(1), torch.bfloat16, True),
    (lambda x: x.float() * x + 1, torch.bfloat16, False),
])  # fmt: skip
def test_products_and_sums_are_joined_where_nobody_sees_it(
    fn: Callable[[Tensor], Any], dtype: torch.dtype, joins: bool
) -> None:
    kernels = for_card(fn, torch.empty(16, 512, 8, 8, dtype=dtype))
    assert [kernel.joins for kernel in kernels] == [joins] * len(kernels)
    fused = re.search(r"fma\.rn", build(kernels[-1]).ptx)
    assert fused or not joins


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [
    lambda x: x * x + 1,
    lambda x: 3 * x - x * x,
    lambda x: (x * 0.3 + x, x * 0.5),
    lambda x: (x + 1) * x,
])  # fmt: skip
def test_products_of_sixteen_bits_are_rounded_before_sums(
    fn: Callable[[Tensor], Any], dtype: torch.dtype
) -> None:
    """As in eager, whatever instructions the type has."""
    for kernel in for_card(fn, torch.empty(1 << 16, dtype=dtype)):
        assert not re.search(r"\bfma\.rn\.(?:relu\.)?b?f16", build(kernel).ptx)


def test_exponentials_that_are_only_summed() -> None:
    """Relative to the largest of their row they need not be exact; of a result they have to be."""
    x = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)) * 20
    x[2], x[3, 5], x[4] = 3e30, float("inf"), float("-inf")
    (kernel,) = check(lambda x: torch.logsumexp(x, -1), x)
    assert "tri.exp(" not in kernel.text and "tri.fast_exp(" in kernel.text
    (kernel,) = check(lambda x: torch.softmax(x, -1), x)
    assert "tri.fast_exp(" not in kernel.text
    (kernel,) = check(lambda x: x.exp().sum(-1), x / 20)
    assert "tri.fast_exp(" not in kernel.text


def waves(t: Tensor) -> Tensor:
    angles = t[:, None] * torch.exp(torch.arange(40) * (-9.2 / 40)) / 0.7
    return torch.cat((angles.cos(), angles.sin()), -1).half()


def test_angles_keep_all_their_bits() -> None:
    """Of one of a hundred thousand the last bits are what its sine is made of."""
    t = torch.rand(7, generator=torch.Generator().manual_seed(0)) * 1e5
    (kernel,) = check(waves, t, rtol=1e-3, atol=6e-3)
    assert "fast_exp" not in kernel.text
    assert kernel.text.count(".cos(") == kernel.text.count(".sin(") == 1
    assert "tl.where" not in kernel.text  # no element has the arithmetic of both


@pytest.mark.parametrize("shape", [(9, 100), (9, 89)])
def test_the_nearest_integer_by_one_instruction(shape: tuple[int, int]) -> None:
    """As eager has it also of what is no number, infinite, or half way between two."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    x[1], x[2, :50], x[3, 3], x[4, 4] = 0, torch.arange(50) / 2, float("nan"), float("inf")

    def quantized(x: Tensor, most: float = 127) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / most
        whole = (x[2:3] * 2).round().clamp(-5, 40)
        return (x / scale).round().clamp(-127, 127).to(torch.int8), whole.to(torch.int32)

    kernels = check(quantized, x)
    assert "nearbyint" not in "".join(k.text for k in kernels)
    (kernel,) = (k for k in kernels if "nearest_quotient(" in k.text)  # nothing there to cut off
    assert "True, True)" in kernel.text and "tl.minimum" not in kernel.text
    kernels = for_card(lambda x: quantized(x, 128), x)
    assert "tl.minimum" in next(k.text for k in kernels if "True, False)" in k.text)
    (kernel,) = for_card(lambda x: (x / x.abs().amax(-1, keepdim=True)).round().to(torch.int8),
                         torch.empty(100000, 128))  # fmt: skip
    ptx = build(kernel).ptx
    assert re.search(r"cvt\.rni\S*\.s32\.f32", ptx) and "cvt.rni.f32" not in ptx


def test_what_is_scaled_by_the_largest_of_its_row_is_not_too_large() -> None:
    """Then an instruction makes eight bits of it, and nothing looks for what it cuts off."""
    x = torch.randn(99, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1], x[2, 3], x[3, 5] = 0, float("inf"), 3e38

    def scaled(x: Tensor, most: float = 448.0) -> tuple[Tensor, Tensor]:
        scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / most
        return (x.float() / scale).to(torch.float8_e4m3fn).float(), scale

    (kernel,) = check(scaled, x, rtol=0, atol=0)  # halfway between two as eager has it
    assert re.search(r"at_once\(.*True\)", kernel.text)
    (kernel,) = for_card(lambda x: scaled(x, 480.0), x)
    assert re.search(r"at_once\(.*False\)", kernel.text)
