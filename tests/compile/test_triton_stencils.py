"""Losses of images: windows that are large, differences along rows and along columns, and what is
summed of a plane. Which kernels they become, and how many programs these have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from tests.compile.card import CARD, results, with_gradients
from tests.compile.interp import check
from tests.pretend import pretended
from tilewright.codegen.triton.generate import generate, limits
from tilewright.codegen.triton.launch import TritonKernel
from tilewright.graph.simplify import simplify
from tilewright.lower.graph import lower
from tilewright.schedule.plan import schedule
from tilewright.target import Target

TARGET = Target("sm_90")


def kernels(fn: Callable[..., Any], *sizes: tuple[int, ...], dtype: torch.dtype = torch.float32
            ) -> list[TritonKernel]:  # fmt: skip
    """Of a function of tensors on a card. To be called in a process that believes in one."""
    with FakeTensorMode():
        fakes = [torch.empty(size, dtype=dtype, device="cuda") for size in sizes]
        gm = make_fx(lambda *xs: tree_leaves(fn(*xs)))(*fakes)
    simplify(gm)
    plan = schedule(lower(gm, CARD), lambda program, group: limits(program, group, TARGET))
    return [generate(plan.program, s.group, TARGET, str(k)) for k, s in enumerate(plan.steps)]


def averages(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 7, 1, 3, count_include_pad=False)


def differences(x: Tensor) -> Tensor:
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def of_a_plane(g: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    sums = (g * y).sum((2, 3), keepdim=True).to(g.dtype)
    return g * scale[:, None, None], sums.sum(0)


@pretended
def test_values_of_large_windows() -> None:
    x, direction = torch.randn(2, 3, 9, 16), torch.randn(2, 3, 9, 16)
    found = results(with_gradients(averages, (0,)), x, direction)
    expected = with_gradients(averages, (0,))(x, direction)
    torch.testing.assert_close(found, [expected[0], *expected[1]])


@pretended
def test_large_windows_are_folded_along_one_axis_after_the_other() -> None:
    """Neither as windows of windows nor in pieces where they reach over an edge."""
    planes = (32, 3, 256, 256)

    def gradient(g: Tensor, x: Tensor) -> Tensor:
        return torch.ops.aten.avg_pool2d_backward(g, x, [7, 7], [1, 1], [3, 3], False, False, None)

    for made in (kernels(averages, planes), kernels(gradient, planes, planes)):
        assert len(made) == 2 and not any("tl.reduce" in k.text for k in made)


def test_values_of_differences() -> None:
    check(differences, torch.randn(5, 40, 36))


@pretended
def test_differences_are_folded_by_many_programs() -> None:
    walks = [k for k in kernels(differences, (96, 512, 512)) if "tl.abs(" in k.text]
    assert len(walks) == 2 and all(k.programs({}) >= TARGET.sms for k in walks)


@pretended
def test_planes_are_folded_by_more_programs_than_there_are() -> None:
    """Their rows are apart in memory, so that there is no one loop over all."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x[:, 3:-3, 3:-3] * x[:, 6:, 6:]
        return y, y.mean()

    assert results(fn, x := torch.randn(4, 26, 30))[1].allclose(fn(x)[1], atol=1e-5)
    first, *_ = kernels(fn, (96, 256, 256))
    assert first.programs({}) >= TARGET.sms


def test_differences_are_not_kept() -> None:
    x = torch.randn(4, 16, 16, requires_grad=True)
    saved: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        torch.compile(differences, backend="tilewright")(x)
    assert {t.data_ptr() for t in saved if t.numel() > 1} == {x.data_ptr()}


@pretended
def test_what_is_summed_of_planes_leaves_them_their_programs() -> None:
    size = (64, 384, 28, 28)
    first, *_ = kernels(of_a_plane, size, size, (384,), dtype=torch.bfloat16)
    assert first.programs({}) >= 64 * 384 // 2
