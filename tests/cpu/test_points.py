"""Convolutions of one point as products (`config.conv_1x1_as_mm`)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs import check, compiled
from tilewright import config
from tilewright.testing import run_and_get_code


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("size", "last"),
    [((4, 3, 8, 9), False), ((4, 3, 8, 9), True), ((1, 5, 6, 7), False), ((2, 5, 7), False)],
)
def test_ma_g8_a_convolution_of_one_point_is_a_product(
    size: tuple[int, ...], last: bool, bias: bool
) -> None:
    """MA-G8: with the option, whatever is tuned; without it, a convolution."""
    x = torch.randn(size)
    x = x.to(memory_format=torch.channels_last) if last else x
    weight = torch.randn(6, size[1], *(1 for _ in size[2:]))
    added = torch.randn(6) if bias else None
    function = F.conv2d if len(size) == 4 else F.conv1d
    given = [t.requires_grad_() for t in (x, weight, *([added] if bias else []))]
    with config.patch(conv_1x1_as_mm=True):
        check(function, *given, tolerance={"rtol": 1e-4, "atol": 1e-4})
        args = [t.detach() for t in given]
        _, code = run_and_get_code(compiled(function), *args)
    assert "convolution" not in code[0] and "mm" in code[0]
    _, code = run_and_get_code(compiled(function), *args)
    assert "convolution" in code[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.conv2d(x, w, stride=2),
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda x, w: F.conv2d(x, w[:, :1], groups=4),
        lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1)),
        lambda x, w: F.conv2d(x[:0], w),
    ],
    ids=["steps", "margin", "groups", "transposed", "empty"],
)
def test_what_is_more_stays_a_convolution(function: object) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        return function(x, w)  # type: ignore[operator]

    with config.patch(conv_1x1_as_mm=True):
        check(run, torch.randn(2, 4, 5, 6), torch.randn(4, 4, 1, 1),
              tolerance={"rtol": 1e-4, "atol": 1e-4})  # fmt: skip
