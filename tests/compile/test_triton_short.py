"""Places of extremes among few elements, and one of few that is taken: in one pointwise kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check

Fn = Callable[..., Any]
nan, inf = float("nan"), float("inf")


def hue(image: Tensor) -> Tensor:
    high, at = image.max(1)
    span = (high - image.amin(1)).clamp(min=1e-6)
    r, g, b = image.unbind(1)
    hues = torch.stack(((g - b) / span % 6, (b - r) / span + 2, (r - g) / span + 4), 1)
    return torch.stack((hues.gather(1, at[:, None])[:, 0] / 6, span / (high + 1e-6), high), 1)


def one_of_few(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    """As a given index says, which is checked."""
    return torch.stack((x.exp(), y.exp() - x, x * y / 3), -1).gather(-1, at[:, :, None])[..., 0]


ODD = torch.tensor([[0.0, -0.0, -1.0], [-0.0, 0.0, -0.0], [1.0, nan, 2.0], [nan, inf, nan],
                    [-inf, -inf, -inf], [inf, 3.0, inf], [2.0, 1.0, nan]])  # fmt: skip

CASES: dict[str, tuple[Fn, tuple[Tensor, ...]]] = {
    "hue": (hue, (torch.rand(2, 3, 8, 40),)),
    "one of few": (one_of_few, (torch.randn(5, 70), torch.randn(5, 70),
                                torch.randint(3, (5, 70)))),
    "unusual ones": (lambda x: (*x.max(1), *x.min(1), x.argmax(1, keepdim=True)), (ODD,)),
    "sixteen bits": (lambda x: (*x.max(0), x.argmin(0)), (torch.randn(5, 90).bfloat16().round(),)),
    "integers": (lambda x: (*x.min(-1), x.argmax(-1)), (torch.randint(-2, 3, (60, 4)),)),
    "booleans": (lambda x: (*x.max(1), *x.min(1)), (torch.randn(40, 4) > 0,)),
    "one": (lambda x: (*x.max(1), x.argmin(1)), (torch.randn(40, 1),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    fn, args = CASES[name]
    check(fn, *args)
    assert all(k.name.startswith("triton_poi") for k in kernels_of(fn, *args))


def test_one_kernel_reads_each_element_once() -> None:
    (kernel,) = kernels_of(hue, torch.empty(4, 3, 256, 256))
    assert kernel.text.count("tl.load(") == 3 and not kernel.checked
    assert build(kernel).widest("ld.global") == 16


def test_positions_that_are_given_are_checked() -> None:
    kernels = kernels_of(one_of_few, torch.empty(64, 512), torch.empty(64, 512),
                         torch.empty(64, 512, dtype=torch.int64))  # fmt: skip
    assert len(kernels) == 1 and kernels[0].checked
