"""Kernels in several orders of tiles: one order is timed first, others for the fastest alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.cpu.fake_trials import Fake, FakeClock, aten, choose, use
from tilewright import config, metrics
from tilewright.errors import BuildError
from tilewright.testing import fresh_cache
from tilewright.tune import choices as trying
from tilewright.tune.choices import CUTLASSTemplateCaller, ExternKernelCaller, caller

ORDERS = {"cuda.cutlass_max_profiling_swizzle_options": "1,2"}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    with fresh_cache():
        yield use(monkeypatch, FakeClock())


@dataclass(frozen=True)
class Candidate:
    """What a choice of CUTLASS's says of itself."""

    kernel: str
    swizzle: int

    def info_dict(self):
        return {"swizzle": str(self.swizzle)}

    def hash_key(self):
        return f"cutlass_gemm-{self.kernel}-{self.swizzle}"

    def kernel_hash_key(self):
        return f"cutlass_gemm-{self.kernel}"


def kernel(k: int, swizzle: int, us: float, **more) -> Fake:
    made = Fake(f"cutlass_mm_{k}_{swizzle}", us, provider="CUTLASS", **more)
    made.candidate = Candidate(f"k{k}", swizzle)
    return made


def twelve(swizzles=(2,), **more) -> list[Fake]:
    return [kernel(k, s, 50.0 + k - 0.1 * s, **more) for k in range(12) for s in swizzles]


# ---- what is timed first, and what after it


def test_cu_d6_the_library_and_one_order_of_each():
    with config.patch(ORDERS):
        found = trying.prescreen_choices([caller(t) for t in (*twelve((1, 2)), aten(100.0))])
    assert isinstance(found[0], ExternKernelCaller)
    assert [type(c) for c in found[1:]] == [CUTLASSTemplateCaller] * 12
    assert {c.info_dict()["swizzle"] for c in found[1:]} == {"2"}


def test_cu_d7_nothing_to_gain():
    """CU-D7: by five of them, with one order, or where it is switched off."""
    every = [caller(t) for t in (aten(100.0), *twelve())]
    with config.patch(ORDERS):
        assert trying.prescreen_choices(every[:6]) == []
        assert trying.prescreen_choices(every[:10]) == []
        assert len(trying.prescreen_choices(every[:11])) == 11
        with config.patch({"cuda.cutlass_prescreening": False}):
            assert trying.prescreen_choices(every) == []
    with config.patch({"cuda.cutlass_max_profiling_swizzle_options": "2"}):
        assert trying.prescreen_choices(every) == []


@pytest.mark.parametrize(("kernels", "kept"), [(12, 8), (2000, 15)])
def test_cu_d9_the_fastest_in_every_order(kernels: int, kept: int):
    """CU-D9: eight, or a quarter of the root of how many choices there are; others than CUTLASS's
    all; what has no finite time is dropped."""
    every = [caller(kernel(k, s, 1.0)) for k in range(kernels) for s in (1, 2)]
    others = [caller(aten(1.0)), caller(Fake("triton_mm_0", 1.0))]
    times = {c: float(c.trial.candidate.kernel[1:]) for c in every if c.name.endswith("_2")}
    times[every[1]] = float("inf")  # the first kernel did not run
    times |= dict.fromkeys(others, 1e9)
    found = trying.prune_choices_postscreen([*others, *every], times)
    assert found[:2] == others
    assert {c.kernel_hash_key() for c in found[2:]} == {
        f"cutlass_gemm-k{k}" for k in range(1, kept + 1)
    }
    assert len(found) == 2 + 2 * kept


# ---- in a search


def test_cu_d9_slow_kernels_are_timed_in_one_order():
    """CU-D9: and the next process decides the same without timing any."""
    trials = [aten(100.0), *twelve((2, 1))]
    with config.patch({**ORDERS, "autotune_effort": "max"}):
        verdict = choose(*trials)
        again = choose(aten(100.0), *twelve((2, 1)))
    ran = {t.name for t in trials if t.did("run")}
    assert ran == {"mm", *(f"cutlass_mm_{k}_2" for k in range(12)),
                   *(f"cutlass_mm_{k}_1" for k in range(8))}  # fmt: skip
    assert verdict.rejected["cutlass_mm_11_1"] == (
        "the kernel was not among the fastest with swizzle=2"
    )
    assert verdict.winner.name.startswith("cutlass_mm_0_")
    assert again.winner.name == verdict.winner.name and again.source == "remembered"


def test_cu_d9_a_kernel_that_does_not_build_is_not_built_in_another_order():
    trials = [aten(100.0), *twelve((2, 1))]
    trials[1].build = BuildError("refused", command=("nvcc",), stderr="no")
    with config.patch({**ORDERS, "autotune_effort": "max"}):
        verdict = choose(*trials)
    assert trials[1].name == "cutlass_mm_0_2" and trials[2].did("finish") == 0
    assert trials[2].name in verdict.rejected
    assert sum(t.did("run") > 0 for t in trials if t.name.endswith("_1")) == 8


def test_all_orders_are_timed_where_nothing_is_screened():
    for options, count in ((ORDERS | {"cuda.cutlass_prescreening": False}, 12), (ORDERS, 4)):
        trials = [aten(100.0), *twelve((2, 1))[: 2 * count]]
        with fresh_cache(), config.patch({**options, "autotune_effort": "max"}):
            choose(*trials)
        assert all(t.did("run") for t in trials)


def test_cu_f1_orders_of_tiles_are_one_build():
    """CU-F1: what is counted is what a compiler makes."""
    metrics.reset()
    with config.patch({**ORDERS, "autotune_effort": "max"}):
        choose(*(kernel(0, s, 50.0) for s in (1, 2, 4)))
    assert metrics.counters["inductor"]["select_algorithm_num_precompiles"] == 1
