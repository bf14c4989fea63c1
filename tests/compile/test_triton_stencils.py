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
from tilewright.codegen.triton.made import TritonKernel
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


def test_differences_are_not_kept() -> None:
    x = torch.randn(4, 16, 16, requires_grad=True)
    saved: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        torch.compile(differences, backend="tilewright")(x)
    assert all(t.data_ptr() == x.data_ptr() for t in saved if t.numel() > 1)
