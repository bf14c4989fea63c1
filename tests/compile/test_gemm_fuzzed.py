"""Every Triton template against float64 at sizes, strides and types that nobody chose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.fuzz import templates
from tests.products import problem
from tilewright import config
from tilewright.gemm.heuristics import GemmConfig
from tilewright.gemm.templates import TritonTemplate
from tilewright.gemm.triton import TritonCandidate
from tilewright.runtime.triton_build import TritonSource
from tilewright.target import Target

SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12)))


@pytest.fixture(autouse=True)
def _tuning() -> Iterator[None]:
    with config.patch({"max_autotune": True, "triton.enable_persistent_tma_matmul": True}):
        yield


@pytest.mark.parametrize("name", templates.names())
@pytest.mark.parametrize("seed", SEEDS)
def test_near_float64(name: str, seed: int) -> None:
    case = templates.drawn(seed, name)
    assert not templates.wrong(case), case.text


def test_a_result_that_is_off_is_found() -> None:
    case = templates.drawn(0, "mm")
    assert "times what it may be off by" in templates.wrong(
        replace(case, exact=case.exact * 1.1 + 1)
    )


# Found by it, as small as they got.


def sources_of(
    name: str, c: GemmConfig, dtype: torch.dtype = torch.bfloat16, m: int = 7
) -> list[TritonSource]:
    """Its kernel for 7 by 32, and those in its place for many elements or other addresses."""
    template = TritonTemplate.all_templates[name]
    target = Target("sm_100" if template.specialised else "sm_90")
    a, b = torch.zeros(m, 64).to(dtype), torch.zeros(64, 32).to(dtype)
    whole = dtype == torch.int8
    dynamic = () if whole else (m,)
    made = problem("mm", a, b, dtype=torch.int32 if whole else dtype, dynamic=dynamic,
                   target=target)  # fmt: skip
    found = TritonCandidate(made.problem, template, c, name, 0.0).kernel().source
    assert isinstance(found, TritonSource)
    return [s for s in (found, found.wide, found.unaligned) if s is not None]


def test_the_kernel_without_descriptors_has_constants_of_its_own() -> None:
    c = GemmConfig(64, 32, 64, 3, 4, epilogue_subtile=2)
    found = sources_of("blackwell_ws_persistent_device_tma", c)
    assert len(found) == 3
    for source in found:
        names = {name for name, _ in source.configs[0].constants}
        assert {n for n in names if f"{n}: tl.constexpr" in source.text} == names
        assert ("EPILOGUE_SUBTILE" in names) == ("PIECE_N" in source.text)


def test_shares_of_a_sum_are_counted_by_a_name_of_their_own() -> None:
    """Triton gives a name one type, and k is of 64 bits where elements are many."""
    for source in sources_of("mm_split_k", GemmConfig(16, 32, 16, 2, 4, split_k=2)):
        assert source.text.count("for k0 in") == 1 and "for each in" in source.text


def test_triton_is_told_that_integers_are_summed() -> None:
    """Triton 3.6 takes sums to be float32 otherwise, and multiplies and adds floats alone."""
    dotted, rows = (
        sources_of(name, c, torch.int8, m)[0].text
        for name, c, m in (("mm", GemmConfig(16, 32, 32, 2, 4), 7),
                           ("mv", GemmConfig(2, 32, 32, 2, 4), 2))
    )  # fmt: skip
    assert "tl.dot(a, b, acc, out_dtype=tl.int32)" in dotted
    assert "sum1 = sum1 + a1 * b" in rows and "tl.fma" not in rows
