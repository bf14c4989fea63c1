"""Layouts: images with their channels last, and results laid out as eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.graph.gradients import one_by_one
from tilewright.graph.layout import channels_last

aten = torch.ops.aten


def conv(x: Tensor, w: Tensor, stride: int = 1) -> Tensor:
    return F.conv2d(x, w, stride=stride, padding=w.shape[-1] // 2)


def traced(fn: Callable[..., Any], *args: Tensor) -> torch.fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*args)


def convolutions(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=aten.convolution.default)


X, W = torch.randn(2, 3, 10, 9), torch.randn(4, 3, 3, 3)
V = torch.randn(4, 4, 3, 3)


def test_everything_between_convolutions_has_its_channels_last() -> None:
    gm = traced(lambda x, w, v: conv(conv(x, w).relu() * 2, v).sum(), X, W, V)
    assert channels_last(gm.graph)
    for node in convolutions(gm):
        image = node.args[0]
        assert isinstance(image, torch.fx.Node)
        for value in (image.meta["val"], node.meta["val"]):
            assert value.is_contiguous(memory_format=torch.channels_last)
    copies = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert [n.meta["val"].shape for n in copies] == [X.shape]  # weights stay as they are


@pytest.mark.parametrize(
    ("why", "fn"),
    [
        ("single pixels", lambda x, w: conv(x, w[:, :, :1, :1])),
        ("depthwise", lambda x, w: F.conv2d(x, w[:3, :1], groups=3)),
        ("transposed", lambda x, w: F.conv_transpose2d(x, w[:3])),
        ("results share memory", lambda x, w: (lambda y: (y, y.view(-1)))(conv(x, w))),
        ("groups of channels", lambda x, w: F.group_norm(conv(x, w), 2)),
    ],
)
def test_graphs_that_stay(why: str, fn: Callable[..., Any]) -> None:
    assert not channels_last(traced(fn, X, W).graph), why


def test_a_layout_that_does_not_pay_leaves_the_graph_as_it_was() -> None:
    gm = traced(lambda x, w: (conv(x, w).relu(), x.sin()), X, W)
    before = [(n.name, n.args, n.kwargs, n.meta["val"]) for n in gm.graph.nodes if "val" in n.meta]
    assert not channels_last(gm.graph)
    gm.graph.lint()
    after = [(n.name, n.args, n.kwargs, n.meta["val"]) for n in gm.graph.nodes if "val" in n.meta]
    assert after == before


def inverted(x: Tensor, w: Tensor, depthwise: Tensor, v: Tensor) -> Tensor:
    wide = F.silu(F.conv2d(x, w))
    return F.conv2d(F.silu(F.conv2d(wide, depthwise, padding=1, groups=len(w))), v).square()


def test_single_pixels_and_depthwise_convolutions_have_channels_last_together() -> None:
    args = X, torch.randn(18, 3, 1, 1), torch.randn(18, 1, 3, 3), torch.randn(5, 18, 1, 1)
    gm = traced(lambda *args: inverted(*args).sum(), *args)
    assert channels_last(gm.graph)
    assert len(gm.graph.find_nodes(op="call_function", target=aten.clone.default)) == 1
    for node in convolutions(gm):
        assert node.meta["val"].is_contiguous(memory_format=torch.channels_last)


TRAINED: dict[str, Callable[..., Tensor]] = {
    "inverted": inverted,
    "pooled": lambda x, w, d, v: F.max_pool2d(inverted(x, w, d, v), 2),
    "normalised": lambda x, w, d, v: F.batch_norm(
        inverted(x, w, d, v), None, None, training=True).relu(),
    "in groups": lambda x, w, d, v: F.group_norm(inverted(x, w, d, v), 5),
    "flattened": lambda x, w, d, v: inverted(x, w, d, v).flatten(1).softmax(-1),
    "transposed": lambda x, w, d, v: F.conv_transpose2d(
        inverted(x, w, d, v), v.transpose(1, 0).contiguous().permute(1, 0, 2, 3), stride=2),
    "resampled": lambda x, w, d, v: F.interpolate(inverted(x, w, d, v), scale_factor=2),
    "beside": lambda x, w, d, v: torch.cat([inverted(x, w, d, v), x.relu()], 1),
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_of_laid_out_convolutions_are_eagers(
    name: str, dtype: torch.dtype
) -> None:
    sizes = (3, 3, 11, 10), (18, 3, 1, 1), (18, 1, 3, 3), (5, 18, 1, 1)
    args = [(0.3 * torch.randn(s)).to(dtype).requires_grad_() for s in sizes]
    exact = [t.detach().double().requires_grad_() for t in args]

    def results(fn: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
        out = fn(*given)
        weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape) % 7 - 3
        return [out, *torch.autograd.grad((out * weights).sum(), given)]

    wanted = results(TRAINED[name], exact)
    eager = results(TRAINED[name], args)
    ours = results(torch.compile(TRAINED[name], backend="tilewright"), args)
    for got, theirs, right in zip(ours, eager, wanted, strict=True):
        assert got.stride() == theirs.stride() and got.dtype == theirs.dtype
        error, allowed = ((t.double() - right).abs().max() for t in (got, theirs))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * right.abs().max()


PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "returned": lambda x, w, v: conv(x, w),
    "both": lambda x, w, v: (lambda y: (y.relu(), conv(y, v)))(conv(x, w)),
    "view": lambda x, w, v: conv(x, w).view(x.shape[0], -1) + 1,
    "flattened": lambda x, w, v: F.avg_pool2d(conv(x, w), 3).flatten(1),
    "strided": lambda x, w, v: conv(x, w).relu().as_strided((3, 5), (7, 2), 4) * 2,
    "pooled": lambda x, w, v: F.max_pool2d(conv(x, w).relu(), 3, 2, 1, return_indices=True),
    "joined": lambda x, w, v: torch.cat([conv(x, w), x], 1).sin(),
    "reduced": lambda x, w, v: conv(x, w).mean((2, 3)).softmax(-1),
    "resampled": lambda x, w, v: F.interpolate(conv(x, w), scale_factor=2, mode="bilinear"),
    "permuted": lambda x, w, v: F.layer_norm(conv(x, w).permute(0, 2, 3, 1), (4,)),
    "as it came": lambda x, w, v: conv(conv(x.to(memory_format=torch.channels_last), w), v),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("size", [(2, 3, 10, 9), (1, 3, 10, 12)])
def test_values_and_strides_are_eagers(name: str, size: tuple[int, ...]) -> None:
    args = (torch.randn(size), W, V)
    with torch.no_grad():
        expected = PROGRAMS[name](*args)
        got = torch.compile(PROGRAMS[name], backend="tilewright")(*args)
    # Two convolutions in a row, summed in another order: a few more roundings than one.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    pairs = zip(_tensors(got), _tensors(expected), strict=True)
    assert all(a.stride() == b.stride() for a, b in pairs)


EXPANDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scalar": lambda a, b: a[0, 0] * b.t().expand(b.shape[1], b.shape[0]),
    "expanded": lambda a, b: a[0, 0].expand(b.shape[1], b.shape[0]) * b.t(),
    "row": lambda a, b: a[0, :1].expand(b.shape[1], b.shape[0]) + b.t(),
    "second": lambda a, b: b.t() / a[0, 0].expand(b.shape[1], b.shape[0]),
    "followed": lambda a, b: (a[0, 0].expand(b.shape[1], b.shape[0]) * b.t()).relu()[None].mT,
    "again": lambda a, b: a[:1, :1].expand(b.shape[1], b.shape[0]) * (a[0, 0].expand(
        b.shape[1], b.shape[0]) * b.t()),
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [(torch.bfloat16, False), (torch.float32, True),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         (torch.bfloat16, True), (torch.float16, False), (torch.float16, True),
         (torch.float32, False)))],
)  # fmt: skip
def test_results_of_expanded_operands(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    fn = torch.compile(EXPANDED[name], backend="tilewright", dynamic=dynamic)
    for rows in (3, 5):
        args = torch.randn(4, 4).to(dtype), torch.randn(rows, 7).to(dtype)
        got, expected = fn(*args), EXPANDED[name](*args)
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def widened(x: Tensor, w: Tensor, v: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    norm = aten._native_batch_norm_legit_no_training
    wide = norm(F.conv2d(x, w), None, None, mean, variance, 0.1, 1e-5)
    return F.conv2d(F.silu(wide[0]), v, stride=2, groups=v.shape[0]).softmax(1)


def test_what_makes_a_wide_image_alone_lays_it_out_for_the_convolution_that_takes_it() -> None:
    args = (X, torch.randn(12, 3, 1, 1), torch.randn(12, 1, 3, 3), torch.randn(12), torch.rand(12))
    gm = traced(widened, *args)
    assert channels_last(gm.graph)
    for node in convolutions(gm):
        assert node.meta["val"].is_contiguous(memory_format=torch.channels_last)
    copies = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert [tuple(n.meta["val"].shape) for n in copies] == [(2, 3, 10, 9)]
    with torch.no_grad():
        actual = torch.compile(widened, backend="tilewright")(*args)
    expected = widened(*args)
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# ---- gradients of wide convolutions


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"),
    [(1, 1, 1, 1), ((1, 1), 0, 2, 1), ((2, 1), (0, 1), 1, 1), ((1, 2), 2, (1, 2), 2)],
)
def test_gradients_of_a_wide_convolution_are_eagers(
    stride: Any, padding: Any, dilation: Any, groups: int
) -> None:
    x = torch.randn(2, 12, 11, 10, requires_grad=True)
    w = torch.randn(4, 12 // groups, 3, 3, requires_grad=True)
    b = torch.randn(4, requires_grad=True)

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.conv2d(x.sin(), w, b, stride, padding, dilation, groups)
        return (y * y).sum()

    compiled = torch.compile(loss, backend="tilewright")
    expected = torch.autograd.grad(loss(x, w, b), (x, w, b))
    actual = torch.autograd.grad(compiled(x, w, b), (x, w, b))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def wide(x: Tensor, w: Tensor, g: Tensor, *mask: bool) -> list[Tensor | None]:
    found = aten.convolution_backward(g, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
    return list(found)


@pytest.mark.parametrize(
    ("channels", "kernel", "mask", "apart"),
    [
        (8, 3, (True, True, True), True),
        (8, 3, (True, True, False), True),
        (8, 3, (False, True, True), False),
        (7, 3, (True, True, False), False),
        (8, 1, (True, True, False), False),
    ],
)
def test_an_image_is_not_needed_for_its_own_gradient(
    channels: int, kernel: int, mask: tuple[bool, ...], apart: bool
) -> None:
    x, w = torch.randn(2, channels, 6, 5), torch.randn(4, channels, kernel, kernel)
    g = torch.randn(2, 4, 6 + 3 - kernel, 5 + 3 - kernel)
    gm = traced(lambda x, w, g: wide(x, w, g, *mask), x, w, g)
    expected = gm(x, w, g)
    one_by_one(gm.graph)
    gm.graph.lint()
    gm.recompile()
    for ours, theirs in zip(gm(x, w, g), expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(convolutions(gm)) == apart
