"""A gate: two products of one operand, of which what follows takes an element each, as one kernel
that reads the operand once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.test_gemm_compile import compiled as built
from tests.programs import compiled
from tilewright import config
from tilewright.gemm import choose
from tilewright.gemm.heuristics import get_shared_memory_estimation
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.triton import TritonCandidate, TritonProvider
from tilewright.target import Target
from tilewright.testing import run_and_get_code
from tilewright.tune import select

BF16 = torch.bfloat16
TUNED: dict[str, Any] = {
    "max_autotune": True, "test_configs.max_mm_configs": 1, "max_autotune_gemm_backends": "TRITON",
    "test_configs.autotune_choice_name_regex": "mm_pair|mm_0|mm_1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> None:
    choose._memo.clear()


def gate(x: Tensor, w1: Tensor, w3: Tensor) -> Tensor:
    return F.silu(x @ w1) * (x @ w3)


def operands(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return (torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype),
            torch.randn(n, k).to(dtype).t())  # fmt: skip


def code_of(function: Callable[..., Any], *args: Tensor, rtol: float = 1e-3) -> str:
    with as_cuda():
        call = compiled(function, options=TUNED)
        found, code = run_and_get_code(call, *args)
    torch.testing.assert_close(found, function(*args), rtol=rtol, atol=rtol)
    assert not any("is replaced by torch's own" in c for c in code)
    return "\n".join(code)


@pytest.mark.parametrize("sizes", [(32, 48, 64), (1, 17, 33), (63, 65, 31), (7, 16, 128)])
def test_one_kernel(sizes: tuple[int, int, int]) -> None:
    code = code_of(gate, *operands(*sizes))
    assert code.count("acc2 = tl.dot(") == 1 and code.count("@triton.jit") == 1
    assert "extern_" not in code and code.count("empty_cuda(") == 1


def test_sixteen_bits_are_rounded_as_in_eager() -> None:
    """Each product before the gate reads it."""
    assert "acc2" in code_of(gate, *operands(48, 32, 64, BF16), rtol=2e-2)

    def wide(x: Tensor, w1: Tensor, w3: Tensor) -> Tensor:
        return (x @ w1).float() + (x @ w3).float()

    x, w1, w3 = operands(16, 16, 257, BF16)
    for t, value in ((x, 1), (w1, 0), (w3, 1)):  # 257 has no place among numbers of sixteen bits
        t.fill_(value)
    for given in ((x, w1, w3), (x, w3, w1)):
        assert "acc2" in code_of(wide, *given, rtol=0)


def test_results_that_are_needed_are_stored() -> None:
    def both(x: Tensor, w1: Tensor, w3: Tensor) -> tuple[Tensor, ...]:
        a, b = x @ w1, x @ w3
        return a, b, F.gelu(a) * b

    code = code_of(both, *operands(16, 32, 48))
    assert code.count("acc2 = tl.dot(") == 1 and code.count("@triton.jit") == 1

    def second(x: Tensor, w1: Tensor, w3: Tensor) -> tuple[Tensor, ...]:
        a, b = x @ w1, x @ w3
        return b, a.relu() + b

    assert "acc2" in code_of(second, *operands(16, 32, 48))


def test_trained() -> None:
    """What the backward needs is stored by the same kernel."""
    given = [t.requires_grad_() for t in operands(24, 16, 32)]
    with as_cuda(), config.patch(**TUNED):
        found, code = run_and_get_code(compiled(gate), *given)
        mine = torch.autograd.grad(found.square().sum(), given)
    theirs = torch.autograd.grad(gate(*given).square().sum(), given)
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-2)
    assert "acc2" in code[0]


APART: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "another operand": lambda x, w1, w3: F.silu(x @ w1) * ((x + 1) @ w3),
    "another element": lambda x, w1, w3: F.silu(x @ w1) * (x @ w3).flip(0),
    "needed in between": lambda x, w1, w3: F.silu(x @ w1) * (x @ (w3 + (x @ w1).sum())),
}  # fmt: skip


@pytest.mark.parametrize("why", APART)
def test_products_that_stay_apart(why: str) -> None:
    assert "acc2" not in code_of(APART[why], *operands(32, 32, 32), rtol=5e-3)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_compiled_for_cards(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two accumulators: nothing is spilled, and shared memory is as estimated."""
    found: list[GemmProblem] = []

    def noted(choices: Any) -> Any:
        found.extend(c.trial.fusion.problem for c in choices if c.trial.fusion.problem.second)
        return choices

    select.add_preprocessing_fn(noted)
    try:
        with as_cuda(), torch.no_grad():
            run_and_get_code(compiled(gate, options=TUNED), *operands(64, 64, 64, BF16))
    finally:
        select.clear_preprocessing_fns()
    problem = replace(found[0], target=Target(arch))
    with config.patch(max_autotune=True):
        first = TritonProvider().candidates(problem, "none")[0]
    assert isinstance(first, TritonCandidate)
    made = built(first)
    assert made["facts"].stack == 0
    assert made["shared"] <= get_shared_memory_estimation(problem, first.config, epilogue=True)
