"""Long rows that are walked once, with the next block under way, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tests.limits import limit

BF16 = torch.bfloat16


def _normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _losses(x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), targets, reduction="none")


def _moments(x: Tensor) -> tuple[Tensor, ...]:
    return torch.std_mean(x, -1)


def _logs(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


CASES: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
    (_losses, (_normal(17, 9003), torch.arange(17))),
    (_losses, (_normal(17, 16400, dtype=torch.float32), torch.arange(17))),
    (_moments, (_normal(17, 9001, dtype=torch.float32),)),
    (_logs, (_normal(17, 25003),)),
]


@pytest.mark.parametrize(("fn", "args"), CASES)
def test_next_block_is_under_way(fn: Callable[..., Any], args: tuple[Tensor, ...],
                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The first one before anything else is waited for."""
    limit(monkeypatch, "PREFETCHED_ROW", 1 << 12)
    limit(monkeypatch, "PREFETCHED_AGAIN", 0)
    limit(monkeypatch, "PREFETCHED_PER_SM", 0)
    limit(monkeypatch, "CHUNKED_PER_SM", 9)
    kernel, *_ = check(fn, *args, rtol=2e-2, atol=2e-2)
    assert kernel.text.count("next0 = tl.load(") == (4 if fn is _logs else 2)
    assert "p1" not in kernel.text.split(":\n", 1)[1].split("next0")[0]


def test_which_elements_of_a_block_a_thread_takes_together() -> None:
    """Those that it loads at once, four floats: of others it would have to be told."""
    targets = torch.empty(1000, dtype=torch.int64)
    for dtype, side in ((BF16, 8), (torch.float32, 4)):
        kernel, *_ = kernels_of(_losses, torch.empty(1000, 32768, dtype=dtype), targets)
        assert f"[XBLOCK, RBLOCK // {side}, {side}])" in kernel.text
        loop = build(kernel).ptx.split("$L__BB0_1:")[1].split("bra")[0]
        assert "shfl" not in loop


def test_which_rows_are_not_fetched_so() -> None:
    kernels = kernels_of(lambda x: (x.float() ** 2).sum(-1), torch.empty(1000, 50000, dtype=BF16))
    for dtype, size in ((torch.float32, 50000), (BF16, 50000)):  # nor those that are walked again
        kernels += kernels_of(_logs, torch.empty(3000, size, dtype=dtype))
    assert not any("next0" in k.text for k in kernels)
