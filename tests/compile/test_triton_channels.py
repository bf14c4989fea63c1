"""Short loops along which elements are looked up at the same places."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tests.limits import limit


def sampled(image: Tensor, at: Tensor) -> Tensor:
    return F.grid_sample(image, at, align_corners=False)


def moved(image: Tensor, flow: Tensor) -> tuple[Tensor, Tensor]:
    """Where to is a result too, so that the channels are loops inside those of it."""
    at = flow.movedim(1, -1) * 0.5 + 0.25
    return F.grid_sample(image, at, align_corners=True), at


@pytest.mark.parametrize("count", [2, 3, 4])
def test_channels_of_what_is_sampled(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "CHANNEL_POINTS", 1)
    image, at = torch.randn(2, count, 9, 20), torch.randn(2, 7, 11, 2)
    at[0, 0, 0, 0] = float("nan")
    (kernel,) = check(sampled, image, at, rtol=1e-4, atol=1e-4)
    assert kernel.text.count("tl.floor(") == 2
    assert len(re.findall(r"tl\.store\(", kernel.text)) == count
    for made in check(moved, image, at.movedim(-1, 1).contiguous(), rtol=1e-4, atol=1e-4):
        assert "RBLOCK" not in made.text


def test_many_points_are_sampled_one_a_thread() -> None:
    shapes = torch.empty(4, 3, 256, 256), torch.empty(4, 256, 256, 2)
    (kernel,) = kernels_of(sampled, *shapes)
    assert "RBLOCK" not in kernel.text and len(re.findall(r"tl\.store\(", kernel.text)) == 3
    assert kernel.config.kwargs["XBLOCK"] == 32 * kernel.config.num_warps
    assert not build(kernel).spills


def test_channels_beside_each_other_stay_an_axis() -> None:
    """And those of few points, or of many channels."""
    last = torch.empty(4, 4, 256, 256).to(memory_format=torch.channels_last)
    for image in (last, torch.empty(4, 16, 256, 256)):
        (kernel,) = kernels_of(sampled, image, torch.empty(4, 256, 256, 2))
        assert len(re.findall(r"tl\.store\(", kernel.text)) == 1
    (kernel,) = kernels_of(sampled, torch.empty(1, 3, 64, 64), torch.empty(1, 64, 64, 2))
    assert len(re.findall(r"tl\.store\(", kernel.text)) == 1


def test_rows_that_are_looked_up_stay_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "CHANNEL_POINTS", 1)

    def taken(x: Tensor, at: Tensor) -> Tensor:
        return x[:, at]

    (kernel,) = check(taken, torch.randn(3, 7, 128), torch.randint(7, (20,)))
    assert len(re.findall(r"tl\.store\(", kernel.text)) == 1


def test_elements_that_are_taken_of_each_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "CHANNEL_POINTS", 1)

    def taken(x: Tensor, at: Tensor) -> Tensor:
        return x[..., at] * 2

    (kernel,) = check(taken, torch.randn(3, 70), torch.randint(-70, 70, (90,)))
    assert len(re.findall(r"tl\.store\(", kernel.text)) == 3
    assert kernel.text.count("tri.report(") == 1
