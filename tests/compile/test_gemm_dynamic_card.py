"""Products of a size that is known only at run time, on a card: which Triton kernel runs for which
rows, with pretended times. Kernels run in the interpreter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.programs import counting
from tilewright import config
from tilewright.gemm import choose, dynamic
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select

TUNED: dict[str, Any] = {
    "max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON",
    "test_configs.max_mm_configs": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _pretends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split sums for few rows, the library for many."""

    def pretended(selector: Any, tuning: Any, choices: Sequence[Any]) -> dict[Any, float]:
        found: dict[Any, float] = {}
        for choice in choices:
            plan = choice.trial
            made = getattr(plan.candidate, "inner", plan.candidate)
            rows = plan.fusion.problem.hints[1]
            template = made.template.name if hasattr(made, "template") else made.provider
            best = "mm_split_k" if rows <= 16 else "ATEN"
            found[choice] = (1.0 if template == best else 5.0) + 0.1 * len(plan.work.parts)
        return found

    choose._memo.clear()
    choose._sized.clear()
    monkeypatch.setattr(dynamic, "LARGEST", 128)
    monkeypatch.setattr(dynamic, "room", lambda device: 1 << 40)
    monkeypatch.setattr(choose._Chooser, "_measurable", lambda self: True)
    monkeypatch.setattr(select.AlgorithmSelectorCache, "autotune", pretended)
    monkeypatch.setattr(select.AlgorithmSelectorCache, "lookup",
                        lambda self, tuning, choices, measure: measure(choices))  # fmt: skip
    monkeypatch.setattr(select._Tuning, "is_good", lambda self, choice: True)
    monkeypatch.setattr(select.memory, "free", lambda device: 1 << 40)
    monkeypatch.setattr("tilewright.tune.records._card", lambda index: "a card")
    monkeypatch.setattr("tilewright.gemm.plan.room", lambda device: 1 << 40)
    monkeypatch.setattr("tilewright.tune.clock.sets_beyond_cache", lambda size, device: 1)


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def test_each_range_has_its_kernel() -> None:
    """With its own workspace and counters, its grid, and what follows where it is not fused."""
    w, b = torch.randn(48, 512) / 20, torch.randn(48)

    def rows_of(n: int) -> Tensor:
        x = torch.randn(n, 512)
        torch._dynamo.mark_dynamic(x, 0)
        return x

    with fresh_cache(), as_cuda(), config.patch(**TUNED), torch.no_grad():
        call, counter = counting(layer)
        _, code = run_and_get_code(call, rows_of(67), w, b)
        for n in (2, 7, 16, 17, 33, 64, 65, 100, 150):
            x = rows_of(n)
            torch.testing.assert_close(call(x, w, b), layer(x, w, b), rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 1
    lines = [line.strip() for line in "\n".join(code).splitlines() if " else None" in line]
    guarded = {line: re.findall(r" if ([^()]*) else None", line)[-1] for line in lines}
    few = [line for line, when in guarded.items() if when == "s77 <= 16"]
    many = [line for line, when in guarded.items() if when == "17 <= s77"]
    assert len(few) + len(many) == len(lines) == 5, lines
    assert [line.partition(" = ")[0] for line in few[:2]] == ["workspace", "zeroed"]
    assert few[2].startswith("(triton_tem_fused_")
    assert many[0].startswith("extern_aten_addmm_out(") and "triton_poi_" in many[1]
