"""Loads that only their masks tell apart from row to row, or from round to round."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.interp import check


def overlaps(x: Tensor, y: Tensor) -> Tensor:
    """The most that what comes before has in common with each, and what is made of that."""
    both = (torch.minimum(x[:, :, None], x[:, None]) / (y[:, :, None] + y[:, None])).triu(1)
    return ((1 - both) / (1 - both.amax(1)[:, :, None])).amin(1)


def test_a_side_of_pairs_is_loaded_without_a_mask() -> None:
    x, y = torch.rand(2, 3, 37)
    made = check(overlaps, x, y + 1, rtol=1e-5, atol=1e-5)
    for kernel in made:
        assert not re.search(r"tl\.load\([^\n]*, (\w+mask & )?t\d+, other", kernel.text)


def test_what_is_outside_is_not_loaded() -> None:
    def shifted(x: Tensor, y: Tensor) -> Tensor:
        return (F.pad(x, (0, 0, 1, -1)) * y).sum(0)

    x, y = torch.randn(2, 33, 20)
    (kernel,) = check(shifted, x, y, rtol=1e-4, atol=1e-4)
    assert re.search(r"tl\.load\([^\n]*t\d+, other", kernel.text)


def test_a_choice_of_another_place_stays() -> None:
    """An index that is chosen under a condition is one only where that holds."""

    def picked(x: Tensor, places: Tensor) -> Tensor:
        row = torch.arange(9)[:, None]
        far = torch.where(row < places[None], places[None], 0).clamp(max=6)
        return torch.where(row < places[None], x[far], x[:1].expand(9, 20)).sum(0)

    check(picked, torch.randn(7), torch.randint(0, 50, (20,)), rtol=1e-4, atol=1e-4)


def test_where_something_is_sampled_is_computed_once() -> None:
    """Whether a corner is inside says the same position that it is read at."""

    def warped(image: Tensor, flow: Tensor) -> Tensor:
        at = flow.movedim(1, -1) * 0.5 + 0.25
        return F.grid_sample(image, at, align_corners=True)

    image, flow = torch.randn(2, 3, 9, 20), torch.randn(2, 2, 9, 20)
    flow[0, 0, 0, 0] = float("nan")
    (kernel,) = check(warped, image, flow, rtol=1e-4, atol=1e-4)
    assert len(re.findall(r"= tl\.load\(", kernel.text)) == 4 + 2
    assert kernel.text.count("tl.floor(") == 2
