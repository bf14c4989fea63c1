"""Groups whose rows are cut into chunks: losses, statistics and sums that leave partial results."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tilewright.testing import run_and_get_code


def test_a_mean_of_losses_leaves_the_rows_in_one_pass() -> None:
    """The rows are too long to stay in registers while losses are added up: they are folded in a
    kernel of their own, in one pass."""
    x, t = torch.empty(8192, 128256, dtype=torch.bfloat16), torch.zeros(8192, dtype=torch.int64)
    made = kernels_of(lambda x, t: F.cross_entropy(x, t), x, t)
    assert sum("for roffset" in k.text for k in made) == 1
    assert "tri.online" in made[0].text
    for kernel in made:
        assert build(kernel).spills == 0


def test_chunks_that_end_sooner() -> None:
    x = torch.randn(2, 33001)
    check(lambda x: torch.softmax(x, -1), x, rtol=1e-5, atol=1e-5)
    check(lambda x: (x.var(-1), x.argmax(-1), x.sum()), x, rtol=1e-4, atol=1e-4)
    check(lambda x: (x.var(0), x.sum(1)), torch.randn(501, 303), rtol=1e-4, atol=1e-4)


def test_losses_train() -> None:
    x, t = torch.randn(96, 40, requires_grad=True), torch.randint(0, 40, (96,))
    check(lambda x, t: F.cross_entropy(x, t), x.detach(), t)


def test_a_softmax_of_any_length_goes_where_its_scores_were() -> None:
    """The result takes the place of the product it is computed from: a later loop reads the scores
    again before it stores there."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-2, -1) * 0.125
        bias = torch.ones_like(scores, dtype=torch.bool).tril().logical_not()
        return torch.softmax(scores.masked_fill(bias, float("-inf")), -1) @ v

    args = [torch.randn(2, 3, 19, 8) for _ in range(3)]
    with as_cuda():
        fn = torch.compile(attention, backend="tilewright", dynamic=True)
        found, code = run_and_get_code(fn, *args)
    torch.testing.assert_close(found, attention(*args), rtol=1e-4, atol=1e-5)
    assert sum("@triton.jit" in text and "tri.online" in text for text in code) == 1
