"""Rows of few columns, as losses of users have them: compiled, and in the interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.interp import check
from tests.compile.test_triton_in_turn import for_card
from tests.limits import limit


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


def _nll(mean: Tensor, log: Tensor, x: Tensor) -> Tensor:
    var = F.softplus(log) + 1e-4
    return 0.5 * (var.log() + (x - mean) ** 2 / var).sum(-1)


@pytest.mark.parametrize("columns", [10, 17])
def test_few_floats_in_tiles(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a block of a power of two, or more, would be empty."""
    limit(monkeypatch, "SHORT_ROWS_ELEMENTS", 0)
    (kernel,) = check(_nll, *(torch.randn(67, columns) for _ in range(3)), rtol=1e-5, atol=1e-5)
    assert kernel.config.kwargs["RBLOCK"] == 4
    (kernel,) = for_card(_nll, *(torch.empty(1 << 16, 15) for _ in range(3)))
    assert kernel.config.kwargs["RBLOCK"] == 16


def _hinge(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    own = x.gather(1, labels[:, None])
    loss = F.relu(x - own + 1)
    return loss.scatter(1, labels[:, None], 0.0).sum(1), loss <= 0


def test_one_other_element_of_each_row_is_chosen_where_it_is_read() -> None:
    """Or rows would be stored for it to be stored into."""
    labels = torch.arange(33) % 19
    (kernel,) = check(_hinge, torch.randn(33, 19), labels)
    assert kernel.text.count("tl.store(") == 2
    x = torch.randn(4, 5, 6)
    check(lambda x, i, y: (x * 2).scatter(1, i, y), x, torch.randint(5, (4, 1, 6)), x[:, :2])
    compiled = torch.compile(lambda x, i: (x * 2).scatter(1, i, 0.0), backend="tilewright")
    with pytest.raises(RuntimeError):  # no place of the row
        compiled(x[0], torch.full((5, 1), 6))


def _pairs(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    each = (x[:, None] - y[None]) * w[:, None] * 2 + y[None] * w[:, None]
    return each.sum(0), -each.sum(1)


def test_what_all_pairs_make_is_not_stored() -> None:
    """Both sums compute it, of little."""
    x = torch.empty(2048, 3)
    assert {k.name.split("_")[1] for k in for_card(_pairs, x, x, x)} == {"per", "red"}


def test_masks_of_floats_are_stored_by_those_who_have_them() -> None:
    """A thread loads four floats at once; of more it would hand on some to store bytes at once."""

    def quantiles(x: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x * levels, x * (levels - 1)
        return torch.maximum(first, second).mean(), first > second

    first, *_ = for_card(quantiles, torch.empty(1 << 20, 9), torch.empty(9))
    assert first.config.kwargs["RBLOCK"] == 4 * 32 * first.config.num_warps


def test_rows_that_are_folded_often_fit_the_registers() -> None:
    def folded(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.logsumexp(torch.log_softmax(x, -1) - y * z, -1)

    first, *_ = for_card(folded, *(torch.empty(1 << 18, 16) for _ in range(3)))
    assert first.config.kwargs["XBLOCK"] * 16 <= 16 * 32 * first.config.num_warps
