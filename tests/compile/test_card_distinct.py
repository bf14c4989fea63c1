"""Places that a sort gives: nothing is added up there, and their inverse is no sort."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tilewright.testing import run_and_get_code


def left_out(x: Tensor, token: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Some tokens in random order, and all in their own, with others in place of the rest."""
    rows, length, width = x.shape
    order = noise.argsort(1)
    some = x.gather(1, order[:, : length // 3, None].expand(-1, -1, width))
    rest = token.expand(rows, length - length // 3, width)
    back = order.argsort(1)[..., None].expand(-1, -1, width)
    return some, torch.cat((some, rest), 1).gather(1, back)


def test_tokens_that_are_left_out() -> None:
    x, token, noise = torch.randn(3, 7, 5), torch.randn(1, 1, 5), torch.rand(3, 7)
    x, token = given = [t.bfloat16().requires_grad_() for t in (x, token)]
    expected = left_out(x, token, noise)
    ways = [torch.randn_like(t) for t in expected]
    wanted = torch.autograd.grad(expected, given, ways)
    with as_cuda():
        compiled = torch.compile(left_out, backend="tilewright")

        def both() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
            out = compiled(x, token, noise)
            return out, torch.autograd.grad(out, given, ways)

        (out, found), code = run_and_get_code(both)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, wanted)
    assert "atomic" not in "".join(code)


def test_a_sort_of_places_that_is_not_their_inverse() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        order = x.argsort(0)
        return order.argsort(1), order.argsort(0, descending=True)

    x = torch.rand(5, 6)
    with as_cuda():
        found = torch.compile(both, backend="tilewright")(x)
    assert all(map(torch.equal, found, both(x)))
