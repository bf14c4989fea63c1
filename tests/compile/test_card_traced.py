"""Graphs for a card in place of what torch traces: gradients of running products, of shares."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compile.card import results, with_gradients
from tests.pretend import pretended
from tilewright.graph import decompositions
from tilewright.graph.expose import expose

aten = torch.ops.aten


def products(x: Tensor) -> Tensor:
    return x.cumprod(1)


@pretended
def test_values_around_zeros() -> None:
    x = torch.randn(7, 9, 3)
    x[1, 0], x[2, 8], x[3, 4], x[4, 2:4], x[5, ::3] = 0, 0, 0, 0, -0.0
    x[6, :6] = 1e-12  # products become zero before the first zero
    x[6, 7] = 0
    direction = torch.randn(7, 9, 3)
    found = results(with_gradients(products, (0,)), x, direction)
    expected = with_gradients(products, (0,))(x, direction)
    torch.testing.assert_close(found, [expected[0], *expected[1]])


@pretended
def test_sums_of_sixteen_bits_that_cancel() -> None:
    x, direction = (3 * torch.randn(5, 9, 5).bfloat16() for _ in range(2))
    _, found = results(with_gradients(products, (0,)), x, direction)
    exact = with_gradients(products, (0,))(x.double(), direction.double())[1][0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)


def test_scans_of_a_gradient_do_not_grow_with_the_row() -> None:
    with FakeTensorMode(), decompositions.keep_whole(), enable_python_dispatcher():
        x = torch.empty(5, 40)
        gm = make_fx(with_gradients(products, (0,)))(x, x)
    scans = [n for n in gm.graph.nodes if n.target in (aten.cumprod.default, aten.cumsum.default)]
    assert len(scans) == 3


def test_complex_ones_are_as_torch_has_them() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    expected = with_gradients(products, (0,))(x, x)
    with decompositions.keep_whole(), enable_python_dispatcher():
        found = with_gradients(products, (0,))(x, x)
    torch.testing.assert_close(found, expected)


def shares(x: Tensor) -> Tensor:
    return x.float().softmax(-1).to(x.dtype)


def _whole(x: Tensor) -> Tensor:
    return x.softmax(-1)


def dropped(x: Tensor) -> Tensor:
    return torch.native_dropout(x.softmax(-1), 0.1, True)[0]


@pretended
def test_shares_of_sixteen_bits_follow_from_their_input() -> None:
    """In float32 they are stored for no one; a result that is stays whole."""
    narrow, wide = torch.bfloat16, torch.float32
    for function, dtype, kept in ((shares, narrow, 0), (_whole, wide, 1), (dropped, wide, 1)):
        with FakeTensorMode():
            x = torch.empty(5, 40, dtype=dtype, device="cuda")
            gm = make_fx(with_gradients(function, (0,)))(x, x)
        expose(gm.graph, lambda _: True)
        assert sum(n.target is aten._softmax.default for n in gm.graph.nodes) == kept
