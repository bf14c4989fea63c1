"""Short rows in tiles, and what is folded and rounded of them, in the interpreter and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.interp import check
from tests.compile.test_triton_in_turn import for_card
from tests.limits import limit

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(x.masked_fill(mask, float("-inf")), -1)


def _residual(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, F.layer_norm(total, total.shape[-1:], weight)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def _loss(x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), targets, reduction="none")


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "even": (_softmax, (_normal(9, 160),)),
    "of floats": (_softmax, (_normal(9, 168, dtype=F32),)),
    "with a mask": (_masked, (_normal(3, 9, 648, dtype=F16), _normal(9, 648) > 0.5)),
    "in pairs": (_masked, (_normal(3, 3, 145), _normal(3, 145) > 0.5)),
    "that lean": (_masked, (_normal(3, 9, 811), _normal(9, 811) > 0.5)),
    "of two, with weights": (_residual, (_normal(33, 1877), _normal(33, 1877), _normal(1877))),
    "that are quantized": (_quantized, (_normal(9, 168),)),
    "longer ones that are quantized": (_quantized, (_normal(33, 1280, dtype=F16),)),
    "that are only folded": (_loss, (_normal(9, 1000), torch.arange(9))),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", CASES)
def test_rows_in_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "SHORT_ROWS_ELEMENTS", 0)
    fn, args = CASES[name]
    (kernel,) = check(fn, *args, rtol=2e-2, atol=2e-2)
    assert kernel.config.kwargs["RBLOCK"] * 2 < args[0].shape[-1]


def test_pairs_that_are_only_folded_have_fewer_threads() -> None:
    x, targets = torch.empty(1 << 18, 91, dtype=BF16), torch.zeros(1 << 18, dtype=torch.int64)
    for fn, tile in ((_loss, 8), (lambda x, t: (_softmax(x), t + 1), 16)):
        first, *_ = for_card(fn, x, targets)
        assert first.config.kwargs["RBLOCK"] == tile


def test_no_program_adds_up_many_numbers_alone() -> None:
    """Losses of 67041 rows took it half as long as these; of 30000 one program is fast enough."""
    for rows, programs in ((67041, 32), (30000, 1)):
        x, targets = torch.empty(rows, 1001, dtype=BF16), torch.zeros(rows, dtype=torch.int64)
        _, second, *_ = for_card(lambda x, t: F.cross_entropy(x.float(), t), x, targets)
        assert second.programs({}) == programs


def test_rows_of_whose_sums_alone_exponentials_are_taken_are_in_blocks() -> None:
    def scored(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(-x.float().sum(1).abs())

    (kernel,) = for_card(scored, torch.empty(4096, 2048, dtype=BF16))
    assert kernel.config.kwargs["RBLOCK"] == 2048
    check(scored, _normal(5, 256), rtol=2e-2, atol=2e-2)
