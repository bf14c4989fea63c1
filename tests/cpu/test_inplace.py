"""Working in place: what is mutated, what is copied, and what results share memory with."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.programs import check, compiled, fresh_compiler

__all__ = ["fresh_compiler"]


def test_view_of_a_mutated_argument_keeps_its_place_in_the_storage() -> None:
    def function(x: Tensor) -> Tensor:
        x[1:].copy_(x[1:] * 2)
        return x.reshape(x.shape[0], 2, x.shape[1] // 2).select(-1, 0)

    base = torch.randn(9, 8)
    eager, mine = base.clone()[3:], base.clone()[3:]
    want, got = function(eager), compiled(function, dynamic=True)(mine)
    assert torch.equal(got, want)
    assert got.storage_offset() == want.storage_offset() == 24
    assert got.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()


def test_argument_mutated_through_a_view_and_returned_whole() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        x[:, 0].add_(1)
        return x, x.t()

    check(function, torch.randn(4, 5))
    check(function, torch.randn(4, 5), dynamic=True)
