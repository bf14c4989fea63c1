"""Boxes: columns of a few, put together and taken apart again, beside what is folded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_fake_cuda
from tests.compile.cubin import build, kernels_of


def _corners(box: Tensor) -> Tensor:
    middle, size = box[:, :2], box[:, 2:].abs() + 0.1
    return torch.cat((middle - size / 2, middle + size / 2), -1)


def _sizes(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = _corners(a.float()), _corners(b.float())
    common = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0)
    return common, (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])


def test_columns_of_what_was_put_together() -> None:
    """A part that is certain is loaded without a mask: the kernel is built as it was written."""
    boxes = torch.empty(2**20, 4, dtype=torch.bfloat16)
    for kernel in kernels_of(_sizes, boxes, boxes):
        assert "True, tl.int1" not in kernel.text
        build(kernel)


def test_few_planes_are_cut_further() -> None:
    """The sum over a few images of many pixels is the work of as many programs as of one image."""
    images = torch.empty(4, 3, 256, 256, dtype=torch.bfloat16)
    labels = torch.zeros(4, 256, 256, dtype=torch.int64)
    with as_fake_cuda() as driver:
        torch.compile(F.cross_entropy, backend="tilewright")(images, labels)
        assert driver.launches[0].grid[0] >= 32
