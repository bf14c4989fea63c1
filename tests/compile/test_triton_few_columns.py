"""Rows of few columns, as losses of users have them: compiled, and in the interpreter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.interp import check


def _gradients(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """As of a mean over rows of sums: each row has the same."""
    each = (grad * 0.5).expand(x.shape[0]).div(x.shape[0])[:, None].expand(x.shape)
    power = F.softplus(y) + 1e-4
    return each * 2 * x / power, each / power - each * x * x / power / power


def test_one_number_for_all_rows_is_no_row_of_its_own() -> None:
    """Or gradients that nothing is folded of would go row by row."""
    x, y = torch.randn(33, 17), torch.randn(33, 17)
    (kernel,) = check(_gradients, torch.tensor(3.0), x, y)
    assert kernel.name.startswith("triton_poi")
