"""Low precision on a card: what eager computes there in float32 and rounds once, we do too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile import card
from tests.pretend import pretended

Made = Callable[..., Tensor]


def normal(*size: int) -> Made:
    return lambda dtype: torch.randn(size).to(dtype)


def positive(*size: int) -> Made:
    return lambda dtype: torch.rand(size).to(dtype) + 1


def labels(size: int, below: int) -> Made:
    return lambda dtype: torch.randint(0, below, (size,))


CASES: dict[str, tuple[Callable[..., Any], list[Made], int]] = {
    # name: (function, its arguments, how many of them get a gradient)
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3, 1, 1, True, False), [normal(2, 3, 9)], 1),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), [normal(2, 3, 9, 7)], 1),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (5, 3)), [normal(2, 9, 7)], 1),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 1, 1), [normal(2, 3, 9, 7)], 1),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
                   [normal(4, 3, 5), normal(3), normal(3)], 3),
    "batch_norm with statistics": (
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True),
        [normal(4, 3, 5), normal(3), normal(3), normal(3), positive(3)], 3),
    "batch_norm in use": (lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False),
                          [normal(4, 3, 5), normal(3), normal(3), normal(3), positive(3)], 3),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=0.1),
                      [normal(4, 3, 9), normal(3), normal(3)], 3),
    "instance_norm of few": (
        lambda x, w, b, m, v: F.instance_norm(x, m, v, w, b, momentum=0.5, eps=0.6),
        [normal(5, 5, 5), normal(5), normal(5), normal(5), positive(5)], 3),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (17,), w, b),
                   [normal(6, 17), normal(17), normal(17)], 3),
    "softmax": (lambda x: torch.softmax(x, -1, dtype=torch.float32), [normal(6, 17)], 1),
    "bilinear": (lambda x: F.interpolate(x, (9, 11), mode="bilinear"), [normal(2, 3, 5, 6)], 1),
    "bilinear, twice": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [normal(2, 3, 5, 6)], 1),
    "bicubic": (lambda x: F.interpolate(x, (4, 5), mode="bicubic"), [normal(1, 2, 7, 9)], 1),
    "nearest": (lambda x: F.interpolate(x, (9, 11)), [normal(2, 3, 5, 6)], 1),
    "replicated": (lambda x: F.pad(x, (3, 2, 1, 2), mode="replicate"), [normal(2, 3, 5, 6)], 1),
    "unfolded": (lambda x: x.unfold(-1, 24, 1), [normal(3, 40)], 1),
    "embedding": (lambda w, i: F.embedding(i, w), [normal(5, 7), labels(40, 5)], 1),
    "cross_entropy": (lambda x, t: F.cross_entropy(x.float(), t), [normal(9, 7), labels(9, 7)], 1),
    "smooth_l1": (lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
                  [normal(9, 7), normal(9, 7)], 1),
}  # fmt: skip


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", CASES)
@pretended
def test_rounded_once(name: str) -> None:
    """Every result and gradient is the float64 one, rounded."""
    function, made, count = CASES[name]
    dtype = torch.bfloat16
    torch.manual_seed(len(name))
    args = [make(dtype) for make in made]
    wide = [a.double() if a.is_floating_point() else a for a in args]
    wide[:count] = [a.requires_grad_() for a in wide[:count]]
    out = function(*wide)
    direction = torch.randn(out.shape).to(dtype)
    exact = [out, *torch.autograd.grad(out, wide[:count], direction.double())]
    if name in ("softmax", "cross_entropy"):  # their results are float32
        direction = direction.float()
    found = card.results(card.with_gradients(function, range(count)), *args, direction)
    for position, (ours, right) in enumerate(zip(found, exact, strict=True)):
        error = (ours.double() - right).abs()
        most = 0.505 * torch.finfo(ours.dtype).eps * right.abs() + 4e-6 * right.abs().max()
        assert bool((error <= most).all()), f"result {position}: {(error - most).max()} too much"
