"""Programs that torch.compile's users wrote, and that were wrong or refused here once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def check(f: Callable[..., Any], *args: Any, **how: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="tilewright", **how)
    torch.testing.assert_close(compiled(*args), f(*args), equal_nan=True)


def jagged(values: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 3, 8, 10]))


def test_a_jagged_nested_tensor_forward_and_backward():
    layer = torch.nn.Linear(8, 4)

    def f(x: Tensor) -> Tensor:
        return F.gelu(layer(x.sin() * 2)).values()

    values = torch.randn(10, 8, requires_grad=True)
    torch._dynamo.reset()
    found = torch.compile(f, backend="tilewright")(jagged(values))
    torch.testing.assert_close(found, f(jagged(values)))
    found.cos().sum().backward()
    gradient, values.grad = values.grad, None
    f(jagged(values)).cos().sum().backward()
    torch.testing.assert_close(gradient, values.grad)


def test_a_logarithm_of_a_dynamic_size():
    def padded(x: Tensor) -> Tensor:
        n = x.shape[0]
        return F.pad(x, (0, 2 ** math.ceil(math.log2(n)) - n)).view(2, -1).sum(0)

    torch._dynamo.reset()
    compiled = torch.compile(padded, backend="tilewright", dynamic=True)
    for n in (9, 33, 64, 5):
        x = torch.randn(n)
        torch.testing.assert_close(compiled(x), padded(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne])
def test_numbers_are_rounded_before_they_are_compared(op: Any, dtype: torch.dtype):
    x = torch.tensor([0.1, 0.2, 1.1, 3.0], dtype=dtype)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: [op(x, c) for c in (0.1, 1.1, 0.2, 3)], backend="tilewright")
    assert all(map(torch.equal, compiled(x), [op(x, c) for c in (0.1, 1.1, 0.2, 3)]))


@pytest.mark.parametrize(
    "pool",
    [F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d],
)
def test_integers_are_not_pooled_adaptively(pool: Any):
    x = torch.randint(0, 9, (1, 2, 4, 4))
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        torch.compile(lambda x: pool(x, 2), backend="tilewright")(x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool])
@pytest.mark.parametrize("pool", [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d])
def test_averages_of_narrow_integers_are_refused(pool: Any, dtype: torch.dtype):
    x = torch.ones(1, 2, *[4] * int(pool.__name__[-2]), dtype=dtype)
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match="not implemented for"):
        torch.compile(lambda x: pool(x, 2), backend="tilewright")(x)


def test_a_plane_without_elements_takes_nothing():
    x, places = torch.randn(1, 2, 2, 2), torch.zeros(1, 2, 2, 2, dtype=torch.int64)
    check(lambda x, places: aten.max_unpool2d(x, places, [0, 4]), x, places)


def test_a_scale_factor_below_zero_counts_as_none():
    x = torch.randn(2, 3, 4, 4)
    check(lambda x: aten.upsample_nearest2d(x, [9, 7], -2.0, -1.0), x)
    check(lambda x: aten._upsample_nearest_exact1d(x[0], [9], 0.0), x)


@pytest.mark.parametrize("size", [(1,), (), (0,)])
@pytest.mark.parametrize("beta", [0, 1, 2])
def test_addmv_without_rows(size: tuple[int, ...], beta: int):
    check(lambda x, m, v: torch.addmv(x, m, v, beta=beta), torch.randn(size), torch.ones(0, 3),
          torch.ones(3))  # fmt: skip


def test_the_gradient_of_nll_loss_of_one_sample():
    def f(grad: Tensor, x: Tensor, label: Tensor) -> Tensor:
        return aten.nll_loss_backward(grad, x, label, None, 0, 10, torch.tensor(1.0))

    check(f, torch.randn(1), torch.randn(3), torch.tensor([2, 0, 1]))
    check(f, torch.randn(1), torch.randn(3), torch.tensor(2))


def test_resize_as_what_is_laid_out_otherwise():
    def f(x: Tensor, y: Tensor) -> Tensor:
        return aten.resize_as(x, y, memory_format=torch.preserve_format)

    y = torch.randn(1, 3, 2, 3).to(memory_format=torch.channels_last)
    check(f, torch.randn(100), y)
    check(f, torch.randn(50).view(25, 2).t(), y.contiguous())


def test_sizes_and_numbers_that_are_not_what_the_program_was_told():
    def rows(x: Tensor) -> Tensor:
        found = x.nonzero()
        torch._check(found.size(0) == 4)
        return found + 3

    def number(x: Tensor) -> Tensor:
        n = int(x.sum().item())
        torch._check(n == 4)
        return torch.ones(n) * 2

    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    for f in (rows, number):
        torch._dynamo.reset()
        with torch._dynamo.config.patch(settings):
            compiled = torch.compile(f, backend="tilewright", fullgraph=True)
            good = torch.tensor([1, 1, 0, 1, 1])
            torch.testing.assert_close(compiled(good), f(good))
            with pytest.raises(RuntimeError, match="where the program was told"):
                compiled(torch.tensor([1, 1, 0, 1, 0]))


@pytest.mark.skipif(not hasattr(torch.Tag, "needs_contiguous_strides"),
                    reason="this torch has no tag for it")  # fmt: skip
def test_an_op_that_needs_contiguous_tensors_gets_them():
    tag = torch.Tag.needs_contiguous_strides

    @torch.library.custom_op("tilewright_tests::in_order", mutates_args=(), tags=[tag])
    def in_order(x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x * 2

    in_order.register_fake(lambda x: torch.empty_like(x.contiguous()))
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    found = torch.compile(lambda x: in_order(x.t()) + 1, backend="tilewright")(x)
    torch.testing.assert_close(found, x.t() * 2 + 1)
