"""Interpolation, grid sampling and unfolding against eager, all of it native."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tilewright import metrics
from tilewright.graph import decompositions


def check(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False,
          rtol: float | None = None, atol: float | None = None,
          left: tuple[str, ...] = ()) -> None:  # fmt: skip
    """Values and gradients are eager's; ATen computed only the ops that `left` names."""
    torch._dynamo.reset()
    metrics.reset()
    ours, theirs = ([a.detach().clone().requires_grad_(a.requires_grad) for a in args]
                    for _ in range(2))  # fmt: skip
    with decompositions.keep_whole():
        got = torch.compile(fn, backend="tilewright", dynamic=dynamic)(*ours)
        want = fn(*theirs)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
        if want.requires_grad:
            grad = torch.randn_like(want)
            got.backward(grad)
            want.backward(grad)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=rtol, atol=atol)
    assert set(metrics.fallback_ops) == set(left)


def rand(*size: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    made = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    return made.requires_grad_(grad)


SIZES = {"linear": (7,), "bilinear": (7, 9), "trilinear": (3, 4, 5), "bicubic": (7, 9)}
SMOOTH = [(mode, corners) for mode in SIZES for corners in (False, True)]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("size", [(7,), (7, 9), (3, 4, 5)], ids=str)
def test_nearest(mode: str, size: tuple[int, ...]) -> None:
    x = rand(2, 3, *size)
    check(lambda t: F.interpolate(t, scale_factor=2.0, mode=mode), x)
    check(lambda t: F.interpolate(t, scale_factor=0.6, mode=mode), x)
    check(lambda t: F.interpolate(t, size=[int(1.6 * n) for n in size], mode=mode), x)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("mode", "corners"), SMOOTH)
def test_smooth(mode: str, corners: bool) -> None:
    size = SIZES[mode]
    x = rand(2, 3, *size)
    for how in ({"scale_factor": 2.0}, {"scale_factor": 0.6},
                {"size": [int(1.6 * n) for n in size]}, {"size": [1] * len(size)}):  # fmt: skip
        check(lambda t, how=how: F.interpolate(t, mode=mode, align_corners=corners, **how), x)


def test_nearest_rounds_as_eager_does() -> None:
    """49 * (1 / 49) is below one in float32: eager repeats the element before."""
    check(lambda t: F.interpolate(t, scale_factor=49.0), rand(1, 1, 4))


def test_wide_reach() -> None:
    check(lambda t: F.interpolate(t, size=200, mode="linear"), rand(1, 2, 4))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_layouts_types_and_dynamic_sizes(mode: str) -> None:
    def fn(t: torch.Tensor) -> torch.Tensor:
        return F.interpolate(t, scale_factor=2, mode=mode)

    check(fn, rand(2, 4, 5, 6).detach().to(memory_format=torch.channels_last).requires_grad_())
    check(fn, rand(2, 4, 5, 6, dtype=torch.float64))
    check(fn, rand(2, 4, 5, 6, dtype=torch.bfloat16), rtol=2e-2, atol=4e-2)
    check(fn, rand(2, 4, 5, 6), dynamic=True)


def test_torch_is_left_as_it_was() -> None:
    op = torch.ops.aten.upsample_bilinear2d.vec
    before = dict(op.py_kernels)
    with decompositions.keep_whole():
        assert op.py_kernels != before
    assert op.py_kernels == before


@pytest.mark.covering(2)
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [False, True])
def test_grid_sample(mode: str, padding: str, corners: bool) -> None:
    grid = 1.5 * rand(2, 5, 4, 2, grad=False)
    check(
        lambda t, g: F.grid_sample(t, g, mode, padding, corners), rand(2, 3, 7, 6, grad=False), grid
    )


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_3d(padding: str) -> None:
    grid = 1.5 * rand(2, 3, 4, 2, 3, grad=False)
    for mode in ("bilinear", "nearest"):
        check(lambda t, g, mode=mode: F.grid_sample(t, g, mode, padding, False),
              rand(2, 3, 4, 5, 6, grad=False), grid)  # fmt: skip


def test_affine_grid() -> None:
    for corners in (False, True):
        check(lambda t, c=corners: F.affine_grid(t, [2, 3, 5, 4], c), rand(2, 2, 3, grad=False))
        check(lambda t, c=corners: F.affine_grid(t, [2, 3, 5, 4, 1], c), rand(2, 3, 4, grad=False))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": (3, 2), "dilation": (1, 2), "padding": (2, 1), "stride": (2, 1)},
        {"kernel_size": 7, "padding": 3, "stride": 2},
    ],
    ids=str,
)
def test_unfold_and_fold(options: dict[str, Any]) -> None:
    check(lambda t: F.unfold(t, **options), rand(2, 3, 9, 8))
    columns = F.unfold(rand(2, 3, 9, 8, grad=False), **options)
    check(lambda t: F.fold(t, (9, 8), **options), columns.requires_grad_())
