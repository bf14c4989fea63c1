"""Triton products compiled for cards that are not there: registers, shared memory, instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.products import Made, problem
from tilewright import config
from tilewright.gemm import heuristics
from tilewright.gemm.heuristics import GemmConfig
from tilewright.gemm.hooks import DESCRIPTORS
from tilewright.gemm.templates import TritonTemplate
from tilewright.gemm.triton import TritonCandidate, TritonProvider
from tilewright.ir.build import cast, op
from tilewright.ir.expr import const
from tilewright.runtime import triton_worker
from tilewright.runtime.cubin import facts
from tilewright.target import Target

PROVIDER = TritonProvider()


@pytest.fixture(autouse=True)
def _tuning() -> Iterator[None]:
    with config.patch({"max_autotune": True, "triton.enable_persistent_tma_matmul": True}):
        yield


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


@cache
def large(arch: str) -> Made:
    return problem("mm", meta(4096, 4096), meta(4096, 4096).t(), target=Target(arch))


def compiled(candidate: TritonCandidate) -> dict[str, Any]:
    source = candidate.kernel().source
    made = triton_worker.build(source.order(source.configs[0]))
    return {**made, "facts": facts(made["cubin"], made["name"])}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_first_choice_for_large_products(arch: str) -> None:
    """MA-O10: no spills, shared memory as estimated, the architecture's own matrix units."""
    made = large(arch)
    (first,) = PROVIDER.candidates(made.problem, "none")
    found = compiled(first)
    assert found["facts"].stack == 0
    assert found["shared"] <= Target(arch).shared_memory
    estimate = heuristics.get_shared_memory_estimation(made.problem, first.config, epilogue=True)
    assert found["shared"] <= estimate
    assert "cp.async" in found["ptx"]
    assert {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}[arch] in (
        found["ptx"])  # fmt: skip


@pytest.mark.parametrize(
    ("bias", "dtype", "name"),
    [(False, torch.bfloat16, "mm"), (True, torch.float32, "mm"),
     (False, torch.bfloat16, "mm_persistent_tma"),
     pytest.param(True, torch.bfloat16, "mm", marks=pytest.mark.slow),
     pytest.param(False, torch.float32, "mm", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_configuration_that_is_said_to_exceed_does(
    bias: bool, dtype: torch.dtype, name: str
) -> None:
    """MA-O9, MA-O10: none that fits is left out, and none that is kept needs more than said."""
    a, b = meta(512, 512, dtype=dtype), meta(512, 512, dtype=dtype)
    made = problem("addmm" if bias else "mm", a, b, bias=meta(512, dtype=dtype) if bias else None)
    template = TritonTemplate.all_templates[name]
    fits = GemmConfig(128, 128, 64 if dtype == torch.bfloat16 else 32, 4, 8)
    exceeding = replace(fits, num_stages=5, block_k=2 * fits.block_k)
    assert heuristics.exceeds(made.problem, fits) == ""
    assert "shared memory" in heuristics.exceeds(made.problem, exceeding)
    for c in (fits, exceeding):
        needed = compiled(TritonCandidate(made.problem, template, c, "triton_mm_0", 0.0))["shared"]
        estimate = heuristics.get_shared_memory_estimation(made.problem, c, epilogue=True)
        stage = dtype.itemsize * (c.block_m + c.block_n) * c.block_k
        assert stage * (c.num_stages - 1) <= needed <= estimate
        assert (needed > made.problem.target.shared_memory) == (c is exceeding)


MANY = [GemmConfig(m, n, k, stages, 8) for m in (64, 128, 256) for n in (64, 128, 256)
        for k in (64, 128, 256) if 192 < m + n + k < 512 for stages in (4, 5)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["mm", "mm_persistent_tma"])
def test_ma_o9_o10_what_is_said_of_shared_memory_is_true(
    bias: bool, dtype: torch.dtype, transposed: bool, name: str
) -> None:
    """All configurations of the specification: none needs more than is said of it, so what fits by
    the estimate fits."""
    a, b = meta(512, 512, dtype=dtype), meta(512, 512, dtype=dtype)
    a, b = (a.t(), b.t()) if transposed else (a, b)
    made = problem("addmm" if bias else "mm", a, b, bias=meta(512, dtype=dtype) if bias else None)
    template = TritonTemplate.all_templates[name]
    for c in MANY:
        needed = compiled(TritonCandidate(made.problem, template, c, "triton_mm_0", 0.0))["shared"]
        assert needed <= heuristics.get_shared_memory_estimation(made.problem, c, epilogue=True)
        if not heuristics.exceeds(made.problem, c):
            assert needed <= made.problem.target.shared_memory


def test_decoding() -> None:
    """One row: the first choices read the right operand sixteen bytes at a time, in stages."""
    made = problem("mm", meta(1, 4096), meta(4096, 4096).t())
    found = PROVIDER.candidates(made.problem, "default")
    assert {c.template.name for c in found} >= {"mm", "mv"}
    first = next(c for c in found if c.template.name == "mv")
    ptx = compiled(first)["ptx"]
    assert "cp.async.cg.shared.global" in ptx and "mma" not in ptx


def test_few_blocks_are_split_along_k() -> None:
    """MA-H9 in our terms: a long k with few blocks is shared out among programs."""
    made = problem("mm", meta(64, 32768), meta(32768, 64))
    first = PROVIDER.candidates(made.problem, "none")[0]
    assert first.template.name == "mm_split_k" and first.config.split_k > 8
    ptx = compiled(first)["ptx"]
    assert "atom.global.gpu.acq_rel" in ptx and "bar.sync" in ptx


def test_fused_kernels_still_use_the_matrix_units() -> None:
    """A prologue in float32 on the left, a cast of bytes on the right, and an epilogue."""
    x, scale, w = meta(512, 1024), meta(512, 1), meta(1024, 2048, dtype=torch.int8)
    out = meta(512, 2048, dtype=torch.float32)
    made = problem(
        "mm", x, meta(1024, 2048), keeps=False,
        prologue={0: lambda b: cast(op("mul", cast(b.read("x", x, b.m, b.k), torch.float32), cast(
                      b.read("s", scale, b.m, b.k), torch.float32)), torch.bfloat16),
                  1: lambda b: cast(b.read("w", w, b.k, b.n), torch.bfloat16)},
        epilogue=lambda b, c: {"out": (out, op("add", cast(c, torch.float32),
                                               const(1.0, torch.float32)))},
    )  # fmt: skip
    template = TritonTemplate.all_templates["mm"]
    candidate = TritonCandidate(made.problem, template, GemmConfig(64, 128, 64, 3, 4), "x", 0.0)
    found = compiled(candidate)
    assert found["facts"].stack == 0 and "wgmma.mma_async" in found["ptx"]


def test_every_default_configuration_fits_its_card() -> None:
    """Tables hold nothing that a card cannot run, by the estimate."""
    for arch, table in heuristics.TABLES.items():
        p = replace(large("sm_90").problem, target=Target(arch))
        assert [c for c in table if heuristics.exceeds(p, c)] == [], arch


@pytest.mark.parametrize("template", ["mm_tma", "mm_persistent_tma"])
def test_descriptors_on_hopper(template: str) -> None:
    """MA-D1, MA-D22: tiles are fetched by the card, and scratch is within what is set aside."""
    made = large("sm_90")
    chosen = GemmConfig(128, 128, 64, 4, 8)
    candidate = TritonCandidate(
        made.problem, TritonTemplate.all_templates[template], chosen, "x", 0
    )
    found = compiled(candidate)
    assert "cp.async.bulk.tensor" in found["ptx"] and "wgmma.mma_async" in found["ptx"]
    assert found["facts"].stack == 0
    assert 0 < found["global_scratch"] <= 4 * DESCRIPTORS
