"""Small folds that have nothing in common share a kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.compile.as_cuda import as_cuda
from tilewright.testing import run_and_get_code


def normal(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(7))


def test_folds_of_the_same_sizes_are_one_kernel() -> None:
    def means(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.abs().mean(), y.square().sum(), z.amax(-1)

    args = normal(65536), normal(65536), normal(7, 65536)
    with as_cuda():
        found, (code,) = run_and_get_code(torch.compile(means, backend="tilewright"), *args)
    assert code.count("@triton.jit") == 4  # two of the first, two of what is of another size
    assert_close(found, means(*args))


def test_what_needs_a_fold_stays_after_it() -> None:
    def spread(x: Tensor) -> Tensor:
        return (x - x.mean()).abs().mean()

    with as_cuda():
        found = torch.compile(spread, backend="tilewright")(x := normal(65536))
    assert_close(found, spread(x))
