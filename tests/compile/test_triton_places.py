"""Rows that are put to the same places of several tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compile.card import CARD, Function, results
from tests.pretend import pretended
from tilewright.codegen.triton.analysis.operations import is_gathered
from tilewright.lower.graph import lower
from tilewright.schedule.plan import schedule


def written(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, at: Tensor
            ) -> tuple[Tensor, Tensor]:  # fmt: skip
    places = at // 4, at % 4
    return keys.index_put(places, k), values.index_put(places, v * 2)


def inputs() -> list[Tensor]:
    keys, values = torch.randn(2, 6, 4, 64)
    k, v = torch.randn(2, 9, 64)
    return [keys, values, k, v, torch.randperm(24)[:9]]


def puts(function: Function, *args: Tensor) -> list[int]:
    """How many tensors each kernel that looks up where to store does that to."""
    with FakeTensorMode():
        fakes = [torch.empty(t.size(), dtype=t.dtype, device="cuda") for t in args]
        gm = make_fx(lambda *a: list(function(*a)))(*fakes)
    groups = [step.group for step in schedule(lower(gm, CARD)).steps]
    found = [sum(is_gathered(s.index) for m in g.members for s in m.stores) for g in groups]
    return [n for n in found if n]


@pretended
def test_keys_and_values_are_put_by_one_kernel() -> None:
    args = inputs()
    for found, expected in zip(results(written, *args), written(*args), strict=True):
        torch.testing.assert_close(found, expected)


@pretended
def test_what_one_needs_of_the_other_stays_apart() -> None:
    def one_after_the_other(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, at: Tensor
                            ) -> tuple[Tensor, Tensor]:  # fmt: skip
        first = keys.index_put((at // 4, at % 4), k)
        return first, values.index_put((at // 4, at % 4), v + first[0, 0])

    def twice(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor]:
        first = keys.index_put((at // 4, at % 4), k)
        return (first.index_put((at // 4, at % 4), v),)

    args = inputs()
    for function in (one_after_the_other, twice):
        for found, expected in zip(results(function, *args), function(*args), strict=True):
            torch.testing.assert_close(found, expected)
        assert len(puts(function, *args)) == 2


@pretended
def test_other_places_stay_apart() -> None:
    def moved(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, at: Tensor
              ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return (keys.index_put((at // 4, at % 4), k),
                values.index_put(((at + 1) // 4 % 6, at % 4), v))  # fmt: skip

    args = inputs()
    assert len(puts(written, *args)) == 1
    assert len(puts(moved, *args)) == 2
