"""What only loops see lies in memory as what it is computed of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.compile.as_cuda import as_cuda
from tests.compile.test_triton_in_turn import for_card
from tilewright.lower import layouts
from tilewright.testing import run_and_get_code


def channels_first(x: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    y = F.layer_norm(x.permute(0, 2, 3, 1), w.shape, w, b)
    return x + (F.gelu(y) * scale).permute(0, 3, 1, 2)


@pytest.mark.parametrize("shape", [(3, 33, 7, 6), (2, 64, 16, 16)])
def test_gradients_of_a_norm_over_channels_that_are_not_last(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "CARDS", frozenset(("cpu",)))
    generator = torch.Generator().manual_seed(3)
    sizes = [shape, *3 * [shape[1:2]], shape]
    *args, given = (torch.randn(s, generator=generator).requires_grad_() for s in sizes)
    with as_cuda():
        compiled = torch.compile(channels_first, backend="tilewright")
        found, code = run_and_get_code(
            lambda: torch.autograd.grad(compiled(*args), args, given.detach())
        )
    assert_close(found, torch.autograd.grad(channels_first(*args), args, given.detach()),
                 rtol=1e-3, atol=1e-3)  # fmt: skip
    n, c, h, w = shape
    stride = (c * h * w, w, 1, h * w)
    assert f"({n}, {h}, {w}, {c},), ({', '.join(map(str, stride))},)" in "".join(code)


def spread(x: Tensor, norm: Tensor, weights: Tensor) -> Tensor:
    """As the gradient of a normalised mean over the second dimension is."""
    found = (x / norm + x / (norm + 1)) / (norm + 2)
    return found[:, None] * weights[..., None]


def test_rows_that_are_repeated_are_computed_once() -> None:
    args = torch.empty(256, 768), torch.empty(256, 1), torch.empty(256, 511)
    once, each = for_card(spread, *args)
    assert once.text.count("div_by_shared(") == 3 and "div_by_shared(" not in each.text
