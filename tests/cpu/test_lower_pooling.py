"""Pooling against eager: windows of all kinds, forward and backward, all of it native."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tilewright import metrics

NAN, INF = float("nan"), float("inf")


def check(
    fn: Callable[..., Any],
    x: torch.Tensor,
    *,
    dynamic: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Values, strides and gradients are eager's, and nothing was left to ATen."""
    torch._dynamo.reset()
    metrics.reset()
    ours, theirs = (x.detach().clone().requires_grad_(x.is_floating_point()) for _ in range(2))
    compiled = torch.compile(fn, backend="tilewright", dynamic=dynamic)
    got, want = compiled(ours), fn(theirs)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
    first, wanted = (r[0] if isinstance(r, tuple) else r for r in (got, want))
    assert first.is_contiguous() == wanted.is_contiguous()
    if wanted.requires_grad:
        grad = torch.randn_like(wanted)
        first.backward(grad)
        wanted.backward(grad)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=rtol, atol=atol, equal_nan=True)
    assert not metrics.fallback_ops, metrics.fallback_ops


def rand(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


# kernel, stride, padding, dilation, ceil_mode
WINDOWS: list[tuple[Any, ...]] = [
    (3, 2, 1, 1, False),
    (2, 2, 0, 1, False),
    ((3, 2), (2, 1), (1, 0), 1, True),
    (3, 1, 1, 2, False),
    (7, 3, 2, 1, True),  # too large to be written out
    (2, 3, 1, 1, True),  # steps over elements
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_max_pool2d(window: tuple[Any, ...]) -> None:
    check(lambda x: F.max_pool2d(x, *window, return_indices=True), rand(2, 3, 15, 17))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("window", [w for w in WINDOWS if w[3] == 1], ids=str)
@pytest.mark.parametrize("count_pad", [True, False])
def test_avg_pool2d(window: tuple[Any, ...], count_pad: bool) -> None:
    kernel, stride, padding, _, ceil = window
    check(lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, count_pad), rand(2, 3, 15, 17))


def test_avg_pool2d_divisor() -> None:
    check(lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), rand(2, 3, 9, 8))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: F.adaptive_avg_pool2d(x, 3),
    ],
)
def test_layouts_and_types(fn: Callable[..., Any]) -> None:
    check(fn, rand(2, 4, 9, 8).to(memory_format=torch.channels_last))
    check(fn, rand(3, 9, 8))
    check(fn, rand(2, 3, 9, 8), dynamic=True)
    # eager adds gradients in bfloat16: what it rounds off on the way is the tolerance
    check(fn, rand(2, 3, 9, 8, dtype=torch.bfloat16), rtol=2e-2, atol=4e-2)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("size", [1, 3, (4, 5), (5, None), (20, 30)], ids=str)
def test_adaptive(size: Any) -> None:
    check(lambda x: F.adaptive_avg_pool2d(x, size), rand(2, 3, 15, 17))
    check(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), rand(2, 3, 15, 17))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.avg_pool1d(x, 3, 2, 1),
        lambda x: F.max_pool1d(x, 3, 2, 1),
        lambda x: F.adaptive_avg_pool1d(x, 3),
        lambda x: F.adaptive_max_pool1d(x, 3),
    ],
)
def test_one_dimension(fn: Callable[..., Any]) -> None:
    check(fn, rand(2, 3, 14))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.avg_pool3d(x, 3, 2, 1),
        lambda x: F.max_pool3d(x, 2, 1, 1, return_indices=True),
        lambda x: F.max_pool3d(x, 4, 2, 1),
        lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4)),
        lambda x: F.adaptive_max_pool3d(x, (2, 3, 4)),
    ],
)
def test_three_dimensions(fn: Callable[..., Any]) -> None:
    check(fn, rand(2, 2, 6, 7, 8))


@pytest.mark.parametrize("kernel", [3, 7])
def test_which_maximum(kernel: int) -> None:
    """The first of equals, the last of NaNs, the first of a window of nothing but -inf."""
    x = rand(1, 1, 9, 9).clone()
    x[0, 0, 2, 2] = x[0, 0, 2, 3] = x[0, 0, 3, 3] = NAN
    x[0, 0, 5:, :] = -INF
    x[0, 0, :2] = 0.0
    check(lambda t: F.max_pool2d(t, kernel, 1, kernel // 2, return_indices=True), x)
    check(lambda t: F.adaptive_max_pool2d(t, 4, return_indices=True), x)


def test_integers() -> None:
    x = torch.arange(-40, 58).reshape(2, 1, 7, 7)
    check(lambda t: F.max_pool2d(t, 3, 1, 1, return_indices=True), x)
    check(lambda t: F.avg_pool2d(t, 3, 1, 1), x)


def test_no_batch() -> None:
    check(lambda x: F.max_pool2d(x, 2), rand(0, 3, 8, 8))


@pytest.mark.parametrize("dynamic", [False, True])
def test_unpool(dynamic: bool) -> None:
    """Also with channels last, which eager keeps and torch's shape function does not."""

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return F.max_unpool2d(*F.max_pool2d(x, 2, 2, return_indices=True), 2, 2)

    check(there_and_back, rand(2, 3, 8, 10), dynamic=dynamic)
    image = rand(2, 3, 8, 10).to(memory_format=torch.channels_last)
    assert not there_and_back(image).is_contiguous()
    check(there_and_back, image, dynamic=dynamic)


def test_fuses_with_its_neighbours() -> None:
    torch._dynamo.reset()
    metrics.reset()
    x = rand(2, 3, 16, 16)
    fn = torch.compile(lambda t: F.max_pool2d(torch.relu(t), 3, 2, 1) + 1, backend="tilewright")
    torch.testing.assert_close(fn(x), F.max_pool2d(torch.relu(x), 3, 2, 1) + 1)
    assert metrics.generated_kernel_count == 1
