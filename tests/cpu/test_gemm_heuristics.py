"""Configurations of product templates: tables, scaling, limits, the registry, the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.products import problem
from tilewright import config
from tilewright.gemm import heuristics
from tilewright.gemm.heuristics import (
    GemmConfig,
    MMTemplateHeuristic,
    TemplateHeuristic,
    get_registered_heuristic_class,
    get_template_heuristic,
    override_template_heuristics,
    register_template_heuristic,
)
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.templates import TritonTemplate, mm_template
from tilewright.gemm.triton import TritonProvider
from tilewright.host import artifact
from tilewright.target import Target

PROVIDER = TritonProvider()


@pytest.fixture(autouse=True)
def _tuning() -> Iterator[None]:
    with config.patch(max_autotune=True):
        yield


def sized(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, arch: str = "sm_90"
          ) -> GemmProblem:  # fmt: skip
    a, b = (torch.empty(s, dtype=dtype, device="meta") for s in ((m, k), (k, n)))
    out = torch.int32 if dtype == torch.int8 else dtype
    return problem("mm", a, b, dtype=out, target=Target(arch)).problem


# ---- who is offered anything


def test_offered_on_large_cards_while_tuning_only() -> None:
    """MA-A8, MA-B1."""
    p = sized(128, 128, 256)
    assert PROVIDER.supports(p) == ""
    with config.patch(max_autotune=False):
        assert "max_autotune" in PROVIDER.supports(p)
        with config.patch(max_autotune_gemm=True):
            assert PROVIDER.supports(p) == ""
    small = replace(p, target=Target("sm_90", sms=67))
    assert "67 SMs" in PROVIDER.supports(small)
    assert "cards" in PROVIDER.supports(replace(p, target=Target("x86_64")))
    assert "float64" in PROVIDER.supports(sized(128, 128, 256, torch.float64))
    assert PROVIDER.supports(sized(128, 128, 256, torch.int8)) == ""


# ---- scaling


def test_blocks_are_scaled_to_the_sizes() -> None:
    """MA-B13."""
    p = sized(10, 30, 22)
    found = list(heuristics.scaled(heuristics.TABLES["sm_90"], p))
    assert len(set(found)) == len(found) < len(heuristics.TABLES["sm_90"])
    assert {c.block_m for c in found} == {16}
    assert max(c.block_n for c in found) == 32 and max(c.block_k for c in found) == 32
    assert all(c.num_warps <= max(1, c.block_m * c.block_n // 256) for c in found)
    assert all(c.group_m == 8 for c in found)
    whole = sized(10, 30, 22, torch.int8)
    assert {c.block_k for c in heuristics.scaled([GemmConfig(16, 32, 16, 1, 2)], whole)} == {32}


def test_sums_of_products_are_not_scaled() -> None:
    """MA-B13, MA-C4: blocks of k stay shorter than k."""
    a, b = torch.empty(128, 64, device="meta"), torch.empty(64, 128, device="meta")
    p = problem("mm_plus_mm", a, b, a, b).problem
    found = PROVIDER.candidates(p, "max")
    assert {c.template.name for c in found} == {"mm_plus_mm"}
    assert all(c.config.block_k < 64 for c in found)
    assert len({c.config.block_m for c in found}) > 1


def test_a_few_configurations_when_asked() -> None:
    """MA-A10: of each template its first, after scaling."""
    p = sized(512, 512, 512)
    with config.patch({"test_configs.max_mm_configs": 4}):
        names = [c.template.name for c in PROVIDER.candidates(p, "max")]
    assert names.count("mm") == 4
    assert all(names.count(n) <= 4 for n in names)


def test_exhaustive_space() -> None:
    """MA-A7."""
    every = list(heuristics.exhaustive())
    values = {16, 32, 64, 128, 256}
    assert {c.block_m for c in every} == {c.block_k for c in every} == values
    assert {c.num_stages for c in every} == {1, 2, 3, 4, 5}
    assert {c.num_warps for c in every} == {2, 4, 8}
    assert all(c.accumulator_registers <= 255 for c in every)
    left_out = (
        5 * 5 * sum(m * n / (32 * w) > 255 for m in values for n in values for w in (2, 4, 8))
    )
    assert len(every) == 5**3 * 5 * 3 - left_out
    p, sums = sized(512, 512, 512), heuristics._SUMS
    default = len(PROVIDER.candidates(p, "max"))
    with config.patch(max_autotune_gemm_search_space="exhaustive"):
        assert len(PROVIDER.candidates(p, "max")) > 10 * default
        whole = PROVIDER.candidates(sized(512, 512, 512, torch.int8), "max")
        assert len([c for c in whole if c.template.name == "mm"]) == len(heuristics._INT8)
        a = torch.empty(512, 512, device="meta")
        both = PROVIDER.candidates(problem("mm_plus_mm", a, a, a, a).problem, "max")
        assert {c.config for c in both} <= set(sums)


def test_one_exhaustive_configuration() -> None:
    """MA-A6: a test may put a list of its own in the singleton."""
    only = GemmConfig(32, 32, 32, 1, 8, group_m=8)
    found = get_template_heuristic("mm", "cuda", "mm")
    assert isinstance(found, MMTemplateHeuristic)
    found.exhaustive_configs = [only]
    try:
        with config.patch(max_autotune_gemm_search_space="EXHAUSTIVE"):
            listed = list(found.get_template_configs(sized(1024, 1024, 1024)))
    finally:
        found.exhaustive_configs = ()
    assert [(c.block_m, c.block_n, c.block_k, c.num_stages) for c in listed] == [(32, 32, 32, 1)]


# ---- what fits


def test_shared_memory_estimate() -> None:
    """MA-O10."""
    p = sized(512, 512, 512)
    c = GemmConfig(128, 64, 64, 4, 8)
    stages = 2 * (128 * 64 + 64 * 64) * 4
    assert heuristics.get_shared_memory_estimation(p, c) == stages + 128
    whole = heuristics.get_shared_memory_estimation(p, c, epilogue=True)
    assert whole == stages + 2 * 128 * (64 + 8) + 128
    assert "shared memory" in heuristics.exceeds(p, replace(c, num_stages=16))
    assert "registers" in heuristics.exceeds(p, GemmConfig(256, 256, 16, 1, 4))
    assert heuristics.exceeds(replace(p, target=Target("sm_86")), GemmConfig(128, 256, 64, 3, 8))


# ---- the registry


def test_a_heuristic_can_be_replaced() -> None:
    """MA-O6."""
    assert get_registered_heuristic_class(mm_template.uid, "cuda", "mm") is not None
    p = sized(64, 64, 64, torch.float32)
    own = get_template_heuristic(mm_template.uid, "cuda", "mm")
    first = next(iter(own.get_template_configs(p)))

    class Only(TemplateHeuristic):
        def get_template_configs(self, problem: GemmProblem) -> Iterator[GemmConfig]:
            return iter([first])

    with override_template_heuristics("cuda", [(mm_template.uid, "mm")], Only):
        found = get_template_heuristic(mm_template.uid, "cuda", "mm")
        assert isinstance(found, Only)
        assert list(found.get_template_configs(p)) == [first]
        offered = [c for c in PROVIDER.candidates(p, "max") if c.template is mm_template]
        assert [c.config for c in offered] == [first]
    assert get_template_heuristic(mm_template.uid, "cuda", "mm") is own


@pytest.mark.parametrize("name", ["mm", "triton::mm"])
def test_a_template_can_be_silenced(name: str) -> None:
    """MA-O7."""
    p = sized(64, 64, 64)
    with override_template_heuristics("cuda", [(name, "mm")]):
        assert "mm" not in {c.template.name for c in PROVIDER.candidates(p, "max")}
    assert "mm" in {c.template.name for c in PROVIDER.candidates(p, "max")}


def test_the_nearest_registration_counts(caplog: pytest.LogCaptureFixture) -> None:
    """MA-O8."""
    made = [type(f"H{k}", (TemplateHeuristic,), {}) for k in range(4)]
    places = ((None, None), ("cuda", None), (None, "mm"), ("cuda", "mm"))
    before = dict(heuristics._registered)
    try:
        for cls, (device, of) in zip(made, places, strict=True):
            register_template_heuristic("mine", device, of)(cls)
            assert get_registered_heuristic_class("mine", "cuda", "mm") is cls
        assert get_registered_heuristic_class("mine", "cuda", "bmm") is made[1]
        assert get_registered_heuristic_class("mine", "xpu", "bmm") is made[0]
    finally:
        heuristics._registered.clear()
        heuristics._registered.update(before)
    assert list(get_template_heuristic("nobody", "cuda", "mm").get_template_configs(
        sized(64, 64, 64))) == []  # fmt: skip
    assert "nobody" in caplog.text


def test_a_template_of_a_user() -> None:
    source = TritonTemplate.all_templates["mm"].source.replace("    M =", "    # mine\n    M =")
    mine = TritonTemplate("mine", source, ("mm",))
    try:
        with override_template_heuristics("cuda", [("mine", "mm")], MMTemplateHeuristic):
            p = sized(64, 64, 64)
            found = [c for c in PROVIDER.candidates(p, "max") if c.template is mine]
            assert found and found[0].name.startswith("triton_mine_")
            assert "# mine" in found[0].kernel().source.text
    finally:
        del TritonTemplate.all_templates["mine"]


# ---- the model


def test_the_model_knows_what_products_need() -> None:
    """Large ones want large blocks, few blocks with a long k want shares, one row wants no dot."""
    first = {
        name: PROVIDER.candidates(sized(*sizes), "none")[0]
        for name, sizes in {"large": (8192, 8192, 8192), "long": (64, 64, 65536)}.items()
    }
    assert first["large"].config.block_m * first["large"].config.block_n >= 128 * 128
    assert first["long"].config.split_k > 8
    row = PROVIDER.candidates(sized(1, 4096, 4096), "quick")
    assert row and all(c.config.block_m <= 16 for c in row)
    times = [c.estimate for c in PROVIDER.candidates(sized(512, 512, 512), "max")]
    assert times == sorted(times)


def test_more_work_takes_longer() -> None:
    for c in heuristics.TABLES["sm_90"]:
        small, large = (heuristics.estimate(sized(n, n, n), c) for n in (1024, 4096))
        assert small < large


def test_tf32_is_part_of_the_key() -> None:
    p = sized(64, 64, 64, torch.float32)
    before = torch.get_float32_matmul_precision()
    keys: list[str] = []
    kept: list[str] = []
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            c = PROVIDER.candidates(p, "none")[0]
            assert f"ALLOW_TF32={precision == 'high'}" in c.description  # MA-B13
            assert ('"tf32"' in c.kernel().source.text) == (precision == "high")
            keys.append(c.key)
            kept.append(artifact.named("graph"))  # a program that is found holds such a kernel
    finally:
        torch.set_float32_matmul_precision(before)
    assert keys[0] != keys[1] and kept[0] != kept[1]
