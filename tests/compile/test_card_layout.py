"""Images with their channels last on a card: weights too, where the library follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.pretend import pretended
from tilewright.graph.layout import channels_last

aten = torch.ops.aten
LAST = torch.channels_last


def net(x: Tensor, w: Tensor, v: Tensor, d: Tensor) -> Tensor:
    y = F.conv2d(F.conv2d(x, w, padding=1).relu(), v, padding=1).relu()
    return F.conv2d(y, d, padding=1, groups=y.shape[1]).mean((2, 3))


def gradients(x: Tensor, *weights: Tensor) -> Any:
    with torch.enable_grad():
        loss = net(x, *(w.requires_grad_() for w in weights)).float().sum()
        return torch.autograd.grad(loss, weights)


def normed(x: Tensor, w: Tensor, v: Tensor, d: Tensor) -> Tensor:
    return F.group_norm(F.conv2d(x, d, padding=1, groups=3), 3)


def library(image: Tensor, weight: Tensor, _: Any) -> torch.memory_format:
    """What cuDNN does: a build of torch without it leaves all results as images come."""
    known = image.is_contiguous(memory_format=LAST) or weight.is_contiguous(memory_format=LAST)
    return LAST if known else torch.contiguous_format


def laid_out(
    fn: Callable[..., Any], dtype: torch.dtype, batch: int = 8
) -> tuple[bool, torch.fx.Graph]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        last = (3, 1, 3, 3) if fn is normed else (32, 1, 3, 3)
        sizes = (batch, 3, 64, 64), (16, 3, 3, 3), (32, 16, 3, 3), last
        given = [torch.empty(*s, device="cuda", dtype=dtype) for s in sizes]
        graph = make_fx(fn, tracing_mode="fake")(*given).graph
        return channels_last(graph), graph


@pytest.mark.parametrize("fn", [net, gradients])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pretended
def test_images_and_weights_are_laid_out_for_the_library(
    fn: Callable[..., Any], dtype: torch.dtype
) -> None:
    """The image and each weight are copied once, gradients of weights return as they were."""
    with mock.patch.object(torch._C, "_conv_determine_backend_memory_format", library):
        done, graph = laid_out(fn, dtype)
    assert done
    calls = [n for n in graph.nodes if n.target in (
        aten.convolution.default, aten.convolution_backward.default)]  # fmt: skip
    assert len(calls) == (3 if fn is net else 6)
    for call in calls:
        for n in call.all_input_nodes:
            assert n.meta["val"].is_contiguous(memory_format=LAST), str(n)
    clones = graph.find_nodes(op="call_function", target=aten.clone.default)
    copied = [n.meta["val"].shape for n in clones if n.args[0].op == "placeholder"]
    assert copied.count((8, 3, 64, 64)) == 1
    results = [n.meta["val"] for n in graph.output_node().all_input_nodes]
    assert all(t.is_contiguous() for t in results)


@pytest.mark.parametrize(("fn", "follows"), [(net, False), (normed, True)])
@pretended
def test_graphs_that_stay(fn: Callable[..., Any], follows: bool) -> None:
    """Where the library's results do not follow, or only a depthwise convolution would gain."""
    given = library if follows else torch._C._conv_determine_backend_memory_format
    with mock.patch.object(torch._C, "_conv_determine_backend_memory_format", given):
        done, graph = laid_out(fn, torch.bfloat16, batch=4)  # what was evaluated before is kept
    assert not done
    calls = graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert len(calls) == (3 if fn is net else 1)
    for call in calls:
        assert all(n.target is not aten.clone.default for n in call.all_input_nodes)
