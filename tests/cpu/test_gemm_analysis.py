"""Fusing by what is known without timing: bytes, registers, occupancy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.test_gemm_fuse import site
from tests.programs import compiled
from tilewright.gemm import analysis, choose
from tilewright.gemm.analysis import Resources, Times
from tilewright.testing import fresh_cache, run_and_get_code

BF16 = torch.bfloat16


def test_ma_j8_j11_extra_reads() -> None:
    """Two operands as large as the product: two thirds of the epilogue's time stay."""

    def scaled(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return (x @ w) * scale + bias

    x, w = torch.empty(512, 1024, dtype=BF16), torch.empty(1024, 2048, dtype=BF16)
    full = [torch.empty(512, 2048, dtype=BF16) for _ in range(2)]
    fused = next(f for f in site(scaled, x, w, *full).fusions if f.after is not None)
    extra = analysis.extra_reads(fused.problem)
    assert extra == 2.0
    assert analysis.inside(0.5, extra) == pytest.approx(0.5 * 2 / 3)
    limit = 1.5 - 1 / 3
    assert not analysis.not_worth_building(Times(1.0, limit - 0.01, 0.5), extra)
    assert analysis.not_worth_building(Times(1.0, limit + 0.01, 0.5), extra)
    row = torch.empty(2048, dtype=BF16)
    fused = next(f for f in site(scaled, x, w, row, row).fusions if f.after is not None)
    assert analysis.extra_reads(fused.problem) < 0.01


def test_ma_j11_the_fastest_is_always_looked_at() -> None:
    assert not analysis.not_worth_building(Times(1.0, 1.0, 0.0), 100.0)


@pytest.mark.parametrize(
    ("alone", "fused", "best", "epilogue", "taken"),
    [
        (100, 160, 0.09, 0.1, True),  # MA-J9: 5 blocks become 3
        (64, 200, 0.1, 0.1, False),  # MA-J9: 8 become 2
        (64, 256, 0.09, 0.3, True),  # MA-J10: 8 become 2, but the epilogue is most of it
        (64, 512, 0.1, 0.3, False),  # MA-J10: one is left
        (64, 128, 0.1, 0.1, True),  # MA-J11: four are enough
        (255, 255, 0.1, 0.1, True),
    ],
)
def test_ma_j9_j10_occupancy(
    alone: int, fused: int, best: float, epilogue: float, taken: bool
) -> None:
    times = Times(best, 0.1, epilogue)
    reason = analysis.not_worth_running(Resources(alone, 0, 4), Resources(fused, 0, 4), times)
    assert (reason == "") is taken
    assert taken or "blocks fit on an SM" in reason


def test_ma_j11_blocks_and_spills() -> None:
    blocks = [Resources(n, 0, 4).blocks for n in (64, 100, 160, 200, 256, 512)]
    assert blocks == [8, 5, 3, 2, 2, 1]
    times, plain = Times(0.1, 0.1, 0.1), Resources(64, 0, 4)
    assert not analysis.not_worth_running(plain, Resources(64, 7, 4), times)
    assert "spills 8" in analysis.not_worth_running(plain, Resources(64, 8, 4), times)
    assert not analysis.spilled(Resources(64, 8, 4)) and analysis.spilled(Resources(64, 9, 4))


@pytest.mark.parametrize("backends", ["ATEN,CPP", "CPP"])
def test_ma_j11_a_cpu_has_no_registers_to_count(backends: str) -> None:
    """Bytes alone decide, and what is taken is verified as ever."""
    x, w, b = torch.randn(33, 20), torch.randn(24, 20), torch.randn(24)
    options = {"max_autotune": True, "max_autotune_gemm_backends": backends,
               "benchmark_epilogue_fusion": False, "test_configs.max_mm_configs": 2}  # fmt: skip

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.relu(F.linear(x, w, b)) * 2

    with fresh_cache():
        found, code = run_and_get_code(compiled(layer, options=options), x, w, b)
    torch.testing.assert_close(found, layer(x, w, b), rtol=1e-4, atol=1e-4)
    if backends == "CPP":
        assert "analysed: " in choose.decisions[-1].why, choose.decisions[-1]
        assert "extern_" not in code[0]
