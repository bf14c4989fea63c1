"""Views keep their elements' values, whatever the sizes, strides and order of views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cpu.native import check
from tilewright.ir import index as ix
from tilewright.ir.expr import const, load, sym, walk
from tilewright.lower.tensor import Tensor, placeholders
from tilewright.lower.views import reshape


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "reshape": lambda x: (x + 1).reshape(24, 5).reshape(2, 2, 3, 10).reshape(-1) * 2,
    "transposed reshape": lambda x: x.transpose(0, 1).reshape(8, 15) + 1,
    "permute": lambda x: (x.permute(2, 0, 1) + 1, x.mT * 2, x[0].t() + 1),
    "slice": lambda x: (x + 1)[1:-1, ::2, -3:] + x[-3:-1, -100:100:2, 2:],
    "empty slice": lambda x: (x + 1)[3:1],
    "split": lambda x: [y + 1 for y in (*x.split(4, 1), *x.split([1, 2, 3], 1))],
    "unbind": lambda x: [y + 1 for y in (*x.unbind(0), *x.chunk(3, 2))],
    "select": lambda x: (x[1] + 1, x[:, -1] * 2),
    "diagonal": lambda x: (x.diagonal(1, 1, 2) + 1, x.diagonal(-2, 0, 1) * 2),
    "diag_embed": lambda x: torch.diag_embed(x[0], 1) + 1,
    "overlapping unfold": lambda x: (x * 2).unfold(1, 3, 2) + 1,
    "dense unfold": lambda x: (x * 2).unfold(1, 4, 1) + 1,
    "wide unfold": lambda x: torch.cat([x] * 4, 1).unfold(1, 20, 1) * 2,
    "disjoint unfold": lambda x: (x * 2).unfold(1, 2, 3) + 1,
    "squeeze": lambda x: (x[:1].squeeze() + 1, x[:1, :, :1].squeeze((0, 2)), x.unsqueeze(-1) + 1),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1) + x[0, 0].expand(4, 3, 5),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_view_and_its_gradient(name: str, dynamic: bool) -> None:
    check(VIEWS[name], torch.randn(4, 6, 5), dynamic=dynamic, grad=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_view_of_a_transposed_window(dynamic: bool) -> None:
    base = torch.randn(9, 8, 7)
    check(VIEWS["reshape"], base[1:5, ::2].transpose(1, 2)[:, 1:7, :4].reshape(4, 6, 4)[:, :, :1]
          .expand(4, 6, 5), dynamic=dynamic)  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_as_strided_means_eagers_storage(dynamic: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = (3, 3)
        return (
            (x * 2).as_strided(size, (2, 5), 4) + 1,
            x.t().as_strided(size, (1, 2), 3) + 1,
            x.t().contiguous().as_strided(size, (1, 2), 3) + 1,
            x[1:].clone().as_strided(size, (1, 2), 1) + 1,
            (x + 1)[2:].as_strided(size, (1, 2), 0) + 1,
        )

    check(function, torch.randn(5, 6), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_scattering_twins(dynamic: bool) -> None:
    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return (
            torch.slice_scatter(x, a, 1, 1, 5, 2),
            torch.select_scatter(x, b, 1, -1),
            torch.diagonal_scatter(x, c, -1, 1, 2),
        )

    given = (torch.randn(4, 6, 5), torch.randn(4, 2, 5), torch.randn(4, 5), torch.randn(4, 5))
    check(function, *given, dynamic=dynamic, grad=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_as_strided_scatter(dynamic: bool) -> None:
    check(lambda x, y: torch.as_strided_scatter(x, y, (2, 2), (1, 2), 3), torch.randn(4, 5),
          torch.randn(2, 2), dynamic=dynamic)  # fmt: skip


@pytest.mark.parametrize("other", [torch.int32, torch.uint8, torch.int64, torch.bfloat16])
def test_view_as_another_type(other: torch.dtype) -> None:
    check(lambda x: x.view(other).clone(), torch.randn(3, 4))


def test_bytes_as_floats() -> None:
    given = torch.randn(3, 4).view(torch.uint8)
    check(lambda x: (x.view(torch.float32) + 1, x.clone().view(torch.bfloat16).clone()), given)


def test_writing_through_a_view() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        y[1:, ::2].mul_(3)
        y[0].copy_(x[1])
        y.diagonal().zero_()
        return y, x[:, 2].clone().add_(1)

    check(function, torch.randn(4, 6))


def test_no_elements_and_no_dimensions() -> None:
    check(lambda x: (x.reshape(5, 0, 3) + 1, x.reshape(0) * 2, x[:, 1:3] + 1), torch.randn(0, 5, 3))
    check(lambda x: (x.reshape(1, 1) + 1, x.expand(3, 2) + 1, x.unsqueeze(0)), torch.tensor(2.5))


def _body(size: tuple[Any, ...]) -> Tensor:
    strides = ix.contiguous_strides(size)
    body = load("b", torch.float32, ix.linearize(placeholders(size), strides))
    return Tensor(size, torch.float32, torch.device("cpu"), body)


def test_matching_dimensions_make_no_quotients() -> None:
    n = sym("s0", lower=2)
    before = (n, const(6), const(4), const(5))
    after = (ix.mul(n, 6), const(2), const(2), const(5))
    names = {node.op for node in walk(reshape(_body(before), after).body)}
    assert not names & {"ifloordiv", "imod"}


def test_reshaping_there_and_back_leaves_no_trace() -> None:
    n = sym("s0", lower=2)
    t = _body((n, const(6), const(4)))
    assert reshape(reshape(t, (const(4), ix.mul(n, 6))), t.size) == t
