"""Complex numbers between pairs of floats are computed as those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilewright import metrics

OPAQUE = {"aten.view_as_real.default"}  # of an argument: a view


def numbers(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def pairs(z: Tensor) -> Tensor:
    return torch.view_as_real(z).flatten(-2)


def rotated(x: Tensor, y: Tensor, by: Tensor) -> Tensor:
    """Rotary embeddings as they are often written."""
    return pairs(numbers(x.float()) * by.view(1, 5, 1, 4)).to(x.dtype)


PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rotated": rotated,
    "numbers of both kinds": lambda x, y, by: pairs(numbers(x) * y[..., :4] * 2.5),
    "a real operand in front": lambda x, y, by: pairs(y[..., :4] * numbers(x)),
    "sums of other ranks": lambda x, y, by: pairs(numbers(x) + numbers(y) - numbers(x[0, 0])),
    "conjugates": lambda x, y, by: pairs(-(numbers(x) * numbers(y).conj()).conj()),
    "angles": lambda x, y, by: pairs(numbers(x) * torch.polar(y[..., :4].abs(), x[..., 4:])),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_taken_apart_is_loops(name: str) -> None:
    fn, compiled = PROGRAMS[name], torch.compile(PROGRAMS[name], backend="tilewright")
    x, y = (torch.randn(2, 5, 3, 8, requires_grad=True) for _ in range(2))
    by = torch.polar(torch.ones(5, 4), torch.rand(5, 4))
    before = metrics.snapshot()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, y, by), fn(x, y, by))
    assert set(metrics.delta(before).fallback_ops) <= OPAQUE
    actual, expected = compiled(x, y, by), fn(x, y, by)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn_like(expected)
    for got, want in zip(*(torch.autograd.grad((out * weight).sum(), (x, y), allow_unused=True)
                           for out in (actual, expected)), strict=True):  # fmt: skip
        torch.testing.assert_close(got, want)


def test_complex_results_stay_complex() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        z = numbers(x) * numbers(x)
        return z, pairs(z)

    x = torch.randn(3, 8)
    actual, expected = torch.compile(fn, backend="tilewright")(x), fn(x)
    torch.testing.assert_close(actual, expected)


def test_a_conjugate_that_is_given_is_left_to_aten() -> None:
    z = torch.randn(3, 4, dtype=torch.complex64).conj()
    fn = torch.compile(lambda z: torch.view_as_real(z * 2.0), backend="tilewright")
    torch.testing.assert_close(fn(z), torch.view_as_real(z * 2.0))


def test_the_gradient_of_a_product_with_a_number() -> None:
    z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    fn = torch.compile(lambda z: z * (2.0 + 1.0j) / (1.0 - 1.0j), backend="tilewright")
    found = [torch.autograd.grad(f(z).abs().sum(), z)[0]
             for f in (fn, lambda z: z * (2.0 + 1.0j) / (1.0 - 1.0j))]  # fmt: skip
    torch.testing.assert_close(*found)


def test_sizes_that_change() -> None:
    fn = torch.compile(rotated, backend="tilewright", dynamic=True)
    by = torch.polar(torch.ones(5, 4), torch.rand(5, 4))
    for batch in (3, 4, 7):
        x = torch.randn(batch, 5, 2, 8)
        torch.testing.assert_close(fn(x, x, by), rotated(x, x, by))
