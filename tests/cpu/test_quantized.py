"""Quantised programs: what quantises and dequantises is loops, fused with its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
import torch.nn.functional as F
from torch import Tensor

from tilewright import metrics

ops = torch.ops.quantized_decomposed
BYTE = (-128, 127, torch.int8)


def agree(f: Callable[..., Any], *args: Any, kernels: int = 1, aten: int = 0) -> None:
    torch._dynamo.reset()
    metrics.reset()
    torch.testing.assert_close(torch.compile(f, backend="tilewright")(*args), f(*args),
                               rtol=0, atol=0)  # fmt: skip
    assert (metrics.generated_kernel_count, metrics.fallback_nodes) == (kernels, aten)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pair_is_one_loop_with_its_neighbours(dtype: torch.dtype):
    def f(x: Tensor) -> Tensor:
        q = ops.quantize_per_tensor(x.relu(), 0.0371, 3, 0, 255, torch.uint8)
        return ops.dequantize_per_tensor(q, 0.0371, 3, 0, 255, torch.uint8, out_dtype=dtype) + 1

    agree(f, torch.randn(33, 17).to(dtype) * 4)


@pytest.mark.parametrize("overload", ["tensor", "tensor2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [torch.tensor(0.0371), torch.tensor([0.0371]).double()])
def test_parameters_that_are_tensors(overload: str, dtype: torch.dtype, scale: Tensor):
    limits = (torch.tensor(-128), torch.tensor(127)) if overload == "tensor2" else BYTE[:2]

    def f(x: Tensor, s: Tensor, z: Tensor) -> Any:
        q = getattr(ops.quantize_per_tensor, overload)(x, s, z, *limits, torch.int8)
        back = getattr(ops.dequantize_per_tensor, overload)
        return q, back(q, s, z, *limits, torch.int8, out_dtype=dtype)

    agree(f, torch.randn(9, 31).to(dtype) * 5, scale, torch.tensor(-7))


@pytest.mark.parametrize("axis", [0, 1])
def test_per_channel(axis: int):
    def f(x: Tensor, s: Tensor, z: Tensor) -> Any:
        q = ops.quantize_per_channel(x, s, z, axis, *BYTE)
        return q, ops.dequantize_per_channel(q, s, z, axis, *BYTE).relu()

    x = torch.randn(6, 5, 4)
    n = x.size(axis)
    agree(f, x, torch.rand(n) * 0.1 + 0.01, torch.randint(-5, 5, (n,)))


def test_per_token():
    def f(x: Tensor) -> Any:
        s, z = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
        q = ops.quantize_per_token(x, s, z, *BYTE)
        return q, ops.dequantize_per_token(q, s, z, *BYTE, torch.float32)

    agree(f, torch.randn(12, 40))


def test_groups_of_a_channel():
    def f(x: Tensor, s: Tensor, z: Tensor) -> Tensor:
        return ops.dequantize_per_channel_group(x, s, z, -8, 7, torch.int8, 4, torch.float32)

    x = torch.randint(-8, 8, (6, 16), dtype=torch.int8)
    agree(f, x, torch.rand(6, 4), torch.randint(-3, 3, (6, 4), dtype=torch.float32))


def test_a_quantised_layer():
    def f(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        weight = ops.dequantize_per_channel(w, s, torch.zeros_like(s), 0, *BYTE)
        q = ops.quantize_per_tensor(x, 0.05, 2, *BYTE)
        y = F.linear(ops.dequantize_per_tensor(q, 0.05, 2, *BYTE), weight).relu()
        q = ops.quantize_per_tensor(y, 0.1, -4, *BYTE)
        return ops.dequantize_per_tensor(q, 0.1, -4, *BYTE)

    w = torch.randint(-128, 128, (8, 16), dtype=torch.int8)
    agree(f, torch.randn(4, 16), w, torch.rand(8) * 0.01, kernels=3, aten=1)


def test_limits_that_do_not_fit_are_refused():
    f = torch.compile(lambda x: ops.quantize_per_tensor(x, 1.0, 0, 0, 300, torch.uint8),
                      backend="tilewright")  # fmt: skip
    with pytest.raises(Exception, match="out of bound"):
        f(torch.randn(3))
