"""Random programs around products; `python -m tests.fuzz --products` runs many more of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.fuzz.check import difference
from tests.fuzz.forced import forced, templates
from tests.fuzz.products import generate
from tests.programs import compiled

PROGRAMS = 4


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_products(seed: int) -> None:
    """By the library, then each with a kernel of ours."""
    assert not difference(generate(seed))
    with forced(seed, "cpu"):
        assert not difference(generate(seed))


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("seed", range(len(templates("card"))))
def test_random_products_of_a_card(seed: int) -> None:
    """Every Triton template once, in the interpreter."""
    with as_cuda(), forced(seed, "card"):
        assert not difference(generate(seed))


# Found by the fuzzer, as small as they got.


@pytest.mark.parametrize("device", ["cpu", "card"])
def test_an_argument_of_a_gradient_is_a_number_computed_of_sizes(device: str) -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return v.mT @ (w @ F.pad(x, (1, 0))[..., 1:].mT).mT

    def check() -> None:
        with forced(0, device):
            call = compiled(function, dynamic=True)
            for rows in (9, 12):
                x, w, v = torch.randn(rows, 8), torch.randn(12, 8), torch.randn(rows, 12)
                mine, theirs = (x.clone().requires_grad_() for _ in range(2))
                call(mine, w, v).sum().backward()
                function(theirs, w, v).sum().backward()
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-3)

    if device == "cpu":
        check()
    else:
        with as_cuda():
            check()


def test_a_product_sums_over_a_part_of_a_dynamic_size() -> None:
    """`K = n // 2` has no line before it for its quotient to have a name."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return x.chunk(2, -1)[0] @ y.chunk(2, 0)[0]

    with as_cuda():
        for seed in range(len(templates("card"))):
            with forced(seed, "card"):
                call = compiled(function, dynamic=True)
                for inner in (32, 48):
                    x, y = torch.randn(8, inner), torch.randn(inner, 24)
                    torch.testing.assert_close(call(x, y), function(x, y), rtol=1e-3, atol=1e-3)
