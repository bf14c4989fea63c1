"""Which of torch's own kernels computes attention: those of the CPU stand for those of a card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.programs import compiled
from tilewright import config
from tilewright.attention import libraries
from tilewright.gemm.choose import decisions
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select

FLASH, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
times: dict[str, float] = {}
TUNED = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}


@pytest.fixture(autouse=True)
def _on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the CPU's two, with times that are given."""

    def pretended(selector: Any, tuning: Any, choices: Sequence[Any]) -> dict[Any, float]:
        return {c: times.get(c.trial.name, 1.0) for c in choices}

    monkeypatch.setattr(libraries, "NAMES", {FLASH: "flash", MATH: "math"})
    monkeypatch.setattr(libraries, "_enabled", lambda: {FLASH, MATH})
    monkeypatch.setattr(libraries, "_is_measured", lambda device: True)
    monkeypatch.setattr(libraries, "_capability", lambda device: (8, 0))
    monkeypatch.setattr(select.AlgorithmSelectorCache, "autotune", pretended)
    monkeypatch.setattr(select.AlgorithmSelectorCache, "lookup",
                        lambda self, tuning, choices, measure: measure(choices))  # fmt: skip
    libraries._memo.clear()


def trained(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def operands(length: int = 20) -> list[Tensor]:
    return [torch.randn(2, 3, length, 8, requires_grad=True) for _ in range(3)]


def code_of(**options: Any) -> str:
    given = operands()
    torch._dynamo.reset()
    with fresh_cache():
        call = compiled(trained, options={**TUNED, **options})
        found, code = run_and_get_code(call, *given)
        mine = torch.autograd.grad(found.square().sum(), given)
    theirs = torch.autograd.grad(trained(*given).square().sum(), given)
    torch.testing.assert_close(mine, theirs)
    return "\n".join(code)


FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


def test_the_fastest_is_in_the_graph() -> None:
    times.update(flash=1.0, math=2.0)
    assert FORWARD in code_of()
    libraries._memo.clear()
    times.update(flash=2.0, math=1.0)
    assert FORWARD not in code_of(), decisions[-1]
    assert any(d.winner == "math" and "trained" in d.site for d in decisions)


def test_of_equals_torchs_own_is_taken() -> None:
    times.update(flash=1.01, math=1.0)
    assert FORWARD in code_of()


@pytest.mark.parametrize("options", [
    {"deterministic": True}, {"autotune_effort": "none"}, {"max_autotune": False},
])  # fmt: skip
def test_nobody_is_asked(options: dict[str, Any]) -> None:
    times.update(flash=2.0, math=1.0)
    assert FORWARD in code_of(**options)
    assert not libraries._memo


def test_the_users_own_choice_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_enabled", lambda: {MATH})
    with config.patch(max_autotune=True):
        assert libraries.preferred(operands(), 0.0, True, None, False) is None


def test_one_that_cannot_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that gives something else."""
    times.update(flash=2.0, math=1.0)
    run = libraries.Kernel._run

    def wrong(self: libraries.Kernel, which: int, dropout: float) -> list[Tensor]:
        found = run(self, which, dropout)
        return found if self.backend == FLASH else [t * 1.5 for t in found]

    def broken(self: libraries.Kernel, which: int, dropout: float) -> list[Tensor]:
        if self.backend == MATH:
            raise RuntimeError("No available kernel")
        return run(self, which, dropout)

    for changed in (wrong, broken):
        monkeypatch.setattr(libraries.Kernel, "_run", changed)
        libraries._memo.clear()
        with config.patch(max_autotune=True), fresh_cache():
            assert libraries.preferred(operands(), 0.0, True, None, False) == (FLASH,)


def test_what_cannot_be_measured_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for operands, say: the program compiles, and the reason is kept."""

    def full(self: libraries.Layout, *args: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(libraries.Layout, "filled", full)
    before = len(decisions)
    assert FORWARD in code_of()
    told = [d for d in list(decisions)[before:] if d.winner == "torch's own"]
    assert told and all("no memory" in d.why for d in told), list(decisions)


def test_random_numbers_and_sizes_that_are_not_known() -> None:
    """Measuring takes none of the user's random numbers; of sizes that change nothing is known."""
    times.update(flash=2.0, math=1.0)
    given = operands()
    state = torch.random.get_rng_state()
    with config.patch(max_autotune=True), fresh_cache():
        assert libraries.preferred(given, 0.0, False, None, False) == (MATH,)
    assert torch.equal(state, torch.random.get_rng_state())
    with fresh_cache():
        call = compiled(trained, options=TUNED, dynamic=True)
        _, code = run_and_get_code(call, *given)
    assert FORWARD in "\n".join(code)


def test_cudnn_is_first_where_it_is_known_to_be_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long calls of narrow heads of sixteen bits on some cards; the rest is torch's to choose, and
    so is what somebody has put in order."""
    cudnn = SDPBackend.CUDNN_ATTENTION
    monkeypatch.setattr(libraries, "NAMES", {cudnn: "cudnn", FLASH: "flash"})
    monkeypatch.setattr(libraries, "_enabled", lambda: {cudnn, FLASH})
    monkeypatch.setattr(libraries, "_capability", lambda device: capability)

    def order(length: int, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> Any:
        given = [torch.empty(1, 2, length, width, dtype=dtype)] * 3
        return libraries.preferred(given, 0.0, True, None, False)

    capability = (9, 0)
    assert order(512) == (cudnn, FLASH, MATH)
    assert order(511) is order(512, 256) is order(512, dtype=torch.float32) is None
    with sdpa_kernel([MATH, FLASH], set_priority=True):
        assert order(512) is None
    with config.patch(deterministic=True):
        assert order(512) is None
    q = torch.randn(1, 2, 512, 64, dtype=torch.bfloat16)
    found = compiled(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.0))(
        q.requires_grad_()
    )  # cuDNN cannot: the next does
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, q, q))
    capability = (8, 9)
    assert order(512) is None


def test_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pretending: both run, and one of them is taken."""
    monkeypatch.undo()
    monkeypatch.setattr(libraries, "NAMES", {FLASH: "flash", MATH: "math"})
    monkeypatch.setattr(libraries, "_enabled", lambda: {FLASH, MATH})
    monkeypatch.setattr(libraries, "_is_measured", lambda device: True)
    with config.patch(max_autotune=True), fresh_cache(), sdpa_kernel([FLASH, MATH]):
        assert libraries.preferred(operands(300), 0.0, True, None, False) in ((FLASH,), (MATH,))
    why = decisions[-1].why
    assert why.startswith("measured: ") and "flash" in why and "math" in why
