"""Which operations are offered for a problem, and in which order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.compile.cutlass import (
    BF16,
    CUTLASS,
    F16,
    F32,
    ON,
    col,
    offered,
    operations,
    ran,
    refused,
)
from tests.products import Made, problem
from tests.programs import calls_of
from tilewright import config, metrics
from tilewright.errors import NoValidChoicesError
from tilewright.gemm.cutlass import arrange, filter
from tilewright.gemm.cutlass.arrange import accumulator
from tilewright.gemm.cutlass.filter import estimate
from tilewright.gemm.cutlass.matrices import CPP, METADATA, SHORT
from tilewright.gemm.cutlass.operations import operations as listed
from tilewright.gemm.cutlass.provider import OPS, is_enabled
from tilewright.gemm.cutlass.words import (
    CUDATemplateBuffer,
    CUTLASS3xGemmTemplate,
    CUTLASSTemplateCaller,
    FixedLayout,
    FlexibleLayout,
    get_max_alignment,
)
from tilewright.target import Target
from tilewright.tune.choices import ChoiceCaller


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    filter._filtered.clear()
    yield
    filter._filtered.clear()


def mm(m: int = 128, k: int = 128, n: int = 128, dtype: torch.dtype = F16) -> Made:
    return problem("mm", torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype))


def addmm(**given: float) -> Made:
    return problem(
        "addmm",
        torch.empty(128, 128, dtype=F16),
        col(128, 128),
        bias=torch.empty(128, 128, dtype=F16),
        **given,
    )  # type: ignore[arg-type]


# ---- whether anything is offered


def test_cu_b1_when_it_is_asked() -> None:
    made = mm().problem
    assert CUTLASS.supports(made) == "nothing is measured without max_autotune or max_autotune_gemm"
    with config.patch({**ON, "max_autotune": False, "max_autotune_gemm": True}):
        assert CUTLASS.supports(made) == ""
    cpu = problem("mm", torch.empty(8, 8), torch.empty(8, 8), target=Target.host(), device="cpu")
    assert "NVIDIA" in refused(cpu.problem)


@pytest.mark.parametrize("dtype", [F32, torch.float64])
def test_cu_b1_operands_that_are_refused(dtype: torch.dtype) -> None:
    assert str(dtype) in refused(mm(dtype=dtype).problem)


def test_cu_b1_results_that_are_refused() -> None:
    """CU-B1, CU-C19: a float32 result that the call asks for."""
    made = problem("mm", torch.empty(128, 64, dtype=F16), col(128, 64), dtype=F32)
    assert "results of torch.float32" in refused(made.problem)


def test_cu_b1_empty_products() -> None:
    assert refused(mm(k=0).problem) == "it is smaller than cuda.cutlass_backend_min_gemm_size = 1"


def test_cu_b2_smaller_than_the_limit() -> None:
    made = problem("mm", torch.empty(100, 10, dtype=F16), col(100, 10))
    limit = 100 * 100 * 10 + 1
    assert "cutlass_backend_min_gemm_size" in refused(
        made.problem, cutlass_backend_min_gemm_size=limit
    )


def test_cu_b3_the_limit_itself() -> None:
    made = problem("mm", torch.empty(128, 16, dtype=F16), col(128, 16)).problem
    assert offered(made, cutlass_backend_min_gemm_size=262144)
    assert refused(made, cutlass_backend_min_gemm_size=262145)


def test_cu_b4_operators() -> None:
    for text in ("all", "ALL", " All "):
        with config.patch({"cuda.cutlass_enabled_ops": text}):
            assert all(is_enabled(op) for op in OPS)
    with config.patch({"cuda.cutlass_enabled_ops": " MM , bmm,"}):
        assert [op for op in OPS if is_enabled(op)] == ["mm", "bmm"]
        assert is_enabled("baddbmm")
    with config.patch({"cuda.cutlass_enabled_ops": ""}):
        assert not any(is_enabled(op) for op in OPS)
    assert "cutlass_enabled_ops" in refused(mm().problem, cutlass_enabled_ops="bmm")


# ---- which operations


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("layouts", ["rr", "rc", "cr", "cc"])
def test_cu_b17_as_many_for_every_layout(layouts: str, dtype: torch.dtype) -> None:
    """CU-B17: one order of tiles, no limit: 78 for all; CU-B16: names tell layouts apart."""
    a = torch.empty(128, 128, dtype=dtype) if layouts[0] == "r" else col(128, 128, dtype)
    b = torch.empty(128, 128, dtype=dtype) if layouts[1] == "r" else col(128, 128, dtype)
    made = problem("mm", a, b)
    found = offered(made.problem, cutlass_max_profiling_swizzle_options=[2])
    assert len(found) == 78 == len({c.operation.name for c in found})
    marks = "".join({"r": "t", "c": "n"}[x] for x in layouts) + "t"
    assert all(f"_{marks}_align8" in c.operation.name for c in found)
    assert all(c.swizzle == 2 for c in found)


def test_cu_b20_patterns() -> None:
    """Regular expressions, searched in the final names."""
    made = mm().problem
    counts = {
        "stream_k": 18,
        "128x256x64.*stream_k": 5,
        "pingpong": 20,
        "warpspecialized_cooperative_epi_tma": 16,
    }
    for pattern, count in counts.items():
        found = operations(made, cutlass_op_allowlist_regex=pattern)
        assert len(found) == count and all(re.search(pattern, name) for name in found), pattern
    assert len(operations(made, cutlass_op_denylist_regex="pingpong")) == 58
    assert len(operations(made, cutlass_op_allowlist_regex="")) == 78


def test_cu_b18_allowed(caplog: pytest.LogCaptureFixture) -> None:
    """CU-B18, CU-B29: of an addmm, through the names that other programs use."""
    nodes = [
        _node("x", (128, 128), (128, 1)),
        _node("w", (128, 128), (1, 128)),
        _node("bias", (128, 128), (128, 1)),
    ]
    layout = FixedLayout("cuda", F16, (128, 128), (128, 1))
    choices: list[ChoiceCaller] = []
    given = {
        **ON,
        "cuda.cutlass_max_profiling_configs": 2,
        "cuda.cutlass_op_allowlist_regex": "pingpong",
    }
    with config.patch(given):
        CUTLASS3xGemmTemplate.add_cutlass_gemm_choices(choices, layout, nodes, 1.0, 1.0)
    assert len(choices) == 8  # two operations, each in four orders of tiles
    for choice in choices:
        assert isinstance(choice, CUTLASSTemplateCaller)
        facts = choice.info_dict()
        assert "pingpong" in facts["op_conf_name"]
        assert facts["backend"] == "CUDA" and facts["op_arch"] == "90"
        assert set(facts) == {
            "backend",
            "op_type",
            "op_conf_name",
            "op_arch",
            "tile_shape",
            "epilogue_schedule",
            "kernel_schedule",
            "element_accumulator",
            "op_name",
            "instruction_shape",
            "swizzle",
        }
        assert all(isinstance(v, str) for v in facts.values())


def test_cu_b19_denied() -> None:
    made = addmm(alpha=2.0, beta=1.0).problem
    found = operations(
        made,
        cutlass_op_allowlist_regex="",
        cutlass_op_denylist_regex="pingpong",
        cutlass_max_profiling_configs=2,
    )
    assert len(found) == 2 and not any("pingpong" in name for name in found)


@pytest.mark.parametrize(
    ("m", "k", "n", "count"),
    [
        (128, 500, 576, 6),
        (500, 128, 576, 78),
        (128, 250, 576, 6),
        (250, 128, 576, 78),
        (125, 128, 576, 78),
    ],
)
def test_cu_b21_odd_shapes(m: int, k: int, n: int, count: int) -> None:
    """CU-B21: what begins at multiples of 4 or 2 elements is copied without descriptors."""
    found = operations(mm(m, k, n).problem)
    assert len(found) == count
    assert len(found) == 78 or all("cpasync" in name for name in found)


def test_cu_b21_b30_nothing_fits(caplog: pytest.LogCaptureFixture) -> None:
    """CU-B24, CU-B30: rows of an odd length; results that begin anywhere."""
    for odd in (mm(k=125), mm(n=100)):
        with caplog.at_level("INFO", "tilewright.cutlass"):
            reason = refused(odd.problem)
        assert reason == "no operation of CUTLASS has these dtypes, layouts and alignments"
        assert "layouts and alignments are" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "size", "stride", "offset", "expected"),
    [
        (F16, (1, 2, 4), (0, 4, 1), 0, 4),
        (F16, (1, 4, 2), (0, 1, 4), 0, 4),
        (F16, (2, 4, 2), (23, 1, 4), 0, 1),
        (F16, (1, 2, 4), (0, 4, 1), 6, 2),
        (F16, (2, 2, 8), (32, 8, 1), 24, 8),
        (F32, (2, 2, 8), (32, 8, 1), 24, 4),
        (torch.int8, (2, 48), (96, 1), 16, 16),
        (torch.int8, (2, 48), (24, 1), 0, 8),
        (F16, (4, 4), (8, 2), 0, 1),
    ],
)
def test_cu_b22_alignment(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int, expected: int
) -> None:
    assert get_max_alignment(FixedLayout("cpu", dtype, size, stride, offset)) == expected


def test_cu_b23_no_such_widths() -> None:
    with pytest.raises(NotImplementedError, match="float64"):
        get_max_alignment(FixedLayout("cpu", torch.float64, (2, 2), (2, 1)))


def test_cu_b14_in_order_of_their_names() -> None:
    """CU-B14, CU-B28: a limit takes the first by name; sorted first of those that store through
    descriptors is a stream-K one, and a cooperative one where sizes are dynamic."""
    made = mm().problem
    names = operations(made, cutlass_max_profiling_configs=5)
    with config.patch(ON):
        assert names == sorted(o.name for o in _fitting(made))[:5]
    tma = operations(made, cutlass_tma_only=True, cutlass_max_profiling_configs=100)
    assert len(tma) == 26 and tma == sorted(tma) and "stream_k" in tma[0]
    dynamic = problem(
        "mm",
        torch.empty(128, 64, dtype=F16),
        torch.empty(64, 256, dtype=F16),
        dynamic=(128, 64, 256),
    )
    first = operations(dynamic.problem, cutlass_tma_only=True, cutlass_max_profiling_configs=1)
    assert "stream_k" not in first[0] and "cooperative_epi_tma" in first[0]


def _fitting(made: object) -> tuple[filter.Operation, ...]:
    found = arrange.arranged(made)  # type: ignore[arg-type]
    assert not isinstance(found, str)
    return filter.fitting(found, 90, "13.0")


@pytest.mark.parametrize(
    ("left", "right", "sums"),
    [
        (F16, F16, F32),
        (BF16, BF16, F32),
        (F32, F32, F32),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, F32),
        (torch.float8_e4m3fn, torch.float8_e5m2, F32),
        (torch.int8, torch.int8, torch.int32),
        (F16, torch.int8, F32),
        (torch.int8, BF16, F32),
    ],
)
def test_cu_b15_sums(left: torch.dtype, right: torch.dtype, sums: torch.dtype) -> None:
    assert accumulator(left, right) == sums


def test_cu_b15_what_is_not_multiplied() -> None:
    with pytest.raises(NotImplementedError, match=r"float16 by torch\.bfloat16"):
        accumulator(F16, BF16)
    with pytest.raises(AssertionError, match="int64"):
        accumulator(torch.int64, torch.int64)


def test_cu_b16_the_list_is_not_changed() -> None:
    before = listed(90, "13.0")["f16", "f16", "f32"]
    copied = [repr(op) for op in before]
    operations(problem("mm", col(128, 128), torch.empty(128, 128, dtype=F16)).problem)
    assert [repr(op) for op in listed(90, "13.0")["f16", "f16", "f32"]] == copied


# ---- remembering


def test_cu_b25_one_hundred_equal_problems_are_filtered_once() -> None:
    for _ in range(100):
        offered(mm(1024, 1024, 1024).problem, cutlass_max_profiling_configs=1)
    assert metrics.counters["cutlass"]["filtered"] == 1


def test_cu_b26_fifty_problems_are_remembered(caplog: pytest.LogCaptureFixture) -> None:
    made = mm().problem
    with caplog.at_level("DEBUG", "tilewright.cutlass"):
        offered(made)
        offered(made)
    assert "are known" in caplog.text
    for pattern in range(60):
        offered(made, cutlass_op_denylist_regex=f"nothing{pattern}")
    assert len(filter._filtered) == 50


def test_cu_b26_every_option_counts() -> None:
    made = mm().problem
    every = len(operations(made))
    assert len(operations(made, cutlass_tma_only=True)) < every
    assert len(operations(made, cutlass_op_allowlist_regex="stream_k")) < every
    assert len(operations(made, cutlass_op_denylist_regex="stream_k")) < every
    assert len(operations(made, cutlass_instantiation_level="1")) == 22
    assert len(operations(made, cutlass_max_profiling_configs=3)) == 3
    assert len(operations(made)) == every


def test_cu_b27_the_log_has_the_number(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "tilewright.cutlass"):
        offered(problem("mm", torch.empty(128, 16, dtype=F16), col(128, 16)).problem)
    found = re.search(r"Got cutlass configs: total number of ops: (\d+)", caplog.text)
    assert found is not None and int(found[1]) == 78


def test_cu_b29_without_an_operation() -> None:
    class Nothing:
        provider, name, description, key = "CUTLASS", "n", "d", "k"
        is_library, compiles, estimate = False, True, 1.0

    assert CUTLASSTemplateCaller(Nothing()).info_dict() == {"backend": "CUDA", "op_type": "unknown"}  # type: ignore[arg-type]


def test_cu_b30_others_go_on() -> None:
    """CU-B30, CU-A2: with other backends compilation succeeds, and with CUTLASS alone it does
    not."""
    a, b = torch.randn(64, 33).half(), torch.randn(33, 64).half()
    called, code = ran(torch.mm, a, b, max_autotune_gemm_backends="ATEN,CUTLASS")
    assert not called and "mm" in code
    with pytest.raises(Exception, match=NoValidChoicesError.__name__):
        ran(torch.mm, a, b)


# ---- operators


def test_cu_c8_batches() -> None:
    """CU-C8: distances between matrices are arguments: padded, repeated, or as they come."""
    a, b = torch.empty(6, 128, 64, dtype=F16), torch.empty(6, 64, 128, dtype=F16)
    whole = offered(problem("bmm", a, b).problem, cutlass_max_profiling_configs=1)[0]
    assert dict(_numbers(whole))["step_a"] == 128 * 64
    padded = torch.empty(6, 160, 64, dtype=F16)[:, :128]
    found = offered(problem("bmm", padded, b).problem, cutlass_max_profiling_configs=1)[0]
    assert dict(_numbers(found))["step_a"] == 160 * 64
    same = torch.empty(128, 64, dtype=F16).expand(6, 128, 64)
    found = offered(problem("bmm", same, b).problem, cutlass_max_profiling_configs=1)[0]
    assert dict(_numbers(found))["step_a"] == 0 and dict(_numbers(found))["B"] == 6
    assert found.rendered.text == whole.rendered.text


def _numbers(candidate: object) -> list[tuple[str, int | float]]:
    source = candidate.kernel().source  # type: ignore[attr-defined]
    values = source._worked_out(()).values
    return [(name, v) for (name, _, _), v in zip(candidate.rendered.numbers, values, strict=True)]  # type: ignore[attr-defined]


def test_cu_c22_layouts_of_a_product() -> None:
    out = FixedLayout("cuda", F16, (128, 64))
    good = [_node("x", (128, 32)), _node("w", (32, 64)), _node("bias", (64,))]
    assert CUTLASS3xGemmTemplate(good, out, 1.0, 1.0).mismatch() == ""
    for bad, why in (
        ([_node("x", (128, 32)), _node("w", (16, 64))], "K is 32 and 16"),
        ([_node("x", (2, 128, 32)), _node("w", (3, 32, 64))], "batches differ"),
        ([*good[:2], _node("bias", (63,))], "is not spread over"),
        ([good[0]], "1 inputs"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            CUTLASS3xGemmTemplate(bad, out)


def test_cu_c23_scales() -> None:
    """CU-C23: numbers of the call; 1 and 0 of a product alone."""
    one = offered(mm().problem, cutlass_max_profiling_configs=1)[0]
    assert dict(_numbers(one))["alpha"] == 1 and dict(_numbers(one))["beta"] == 0
    scaled = offered(addmm(alpha=2.0, beta=0.4).problem, cutlass_op_allowlist_regex="epi_nosmem")[0]
    found = dict(_numbers(scaled))
    assert (found["alpha"], found["beta"]) == (2.0, 0.4)
    other = offered(addmm(alpha=3.0, beta=0.5).problem, cutlass_op_allowlist_regex="epi_nosmem")[0]
    assert other.rendered.text == scaled.rendered.text


@pytest.mark.parametrize("shape", [(128, 128), (128, 1), (1, 128), (128,), (1, 1)])
def test_cu_c24_every_bias(shape: tuple[int, ...]) -> None:
    """CU-C24, CU-C2: C is void, or the bias where an operation takes it for C."""
    made = problem(
        "addmm", torch.empty(128, 64, dtype=F16), col(128, 64), bias=torch.empty(shape, dtype=F16)
    )
    every = offered(made.problem, cutlass_max_profiling_swizzle_options=[1])
    tma = [c for c in every if c.operation.is_tma]
    others = [c for c in every if not c.operation.is_tma]
    assert len(tma) == 26
    assert {c.operation.c for c in tma} == {"f16" if shape == (128, 128) else "void"}
    if shape != (1, 1):  # a number is no matrix, row or column
        assert {c.operation.c for c in others} == {"f16"} and others
    kind = {
        (128, 128): "Sm90SrcFetch",
        (128, 1): "Sm90ColBroadcast",
        (1, 1): "Sm90ScalarBroadcast",
    }.get(shape, "Sm90RowBroadcast")
    assert kind in tma[0].rendered.text


def test_cu_c24_another_dtype_is_added_by_a_visitor() -> None:
    made = problem(
        "addmm", torch.empty(128, 64, dtype=F16), col(128, 64), bias=torch.empty(128, dtype=F32)
    )
    assert all(c.operation.is_tma for c in offered(made.problem))


def test_cu_c25_types() -> None:
    table = {
        F16: "cutlass::half_t",
        BF16: "cutlass::bfloat16_t",
        F32: "float",
        torch.float64: "double",
        torch.float8_e4m3fn: "cutlass::float_e4m3_t",
        torch.float8_e5m2: "cutlass::float_e5m2_t",
        torch.int8: "int8_t",
        torch.int32: "int32_t",
        torch.bool: "bool",
    }
    assert {dtype: CPP[SHORT[dtype]] for dtype in table} == table
    assert {torch.int16: "uint16_t", torch.int32: "uint32_t"} == METADATA


def test_cu_d3_stream_k_needs_known_sizes() -> None:
    made = problem("mm", torch.empty(128, 16, dtype=F16), col(256, 16), dynamic=(128, 256, 16))
    assert refused(made.problem, cutlass_op_allowlist_regex="stream_k")
    assert len(operations(made.problem)) == 60


def test_cu_d4_every_order_of_tiles() -> None:
    """CU-D4, CU-D5: they share source and binary."""
    made = mm().problem
    found = offered(made, cutlass_max_profiling_configs=1)
    assert [c.swizzle for c in found] == [1, 2, 4, 8]
    assert len({c.binary for c in found}) == 1
    assert [c.description.rpartition(" ")[2] for c in found] == [
        f"swizzle={s}" for s in (1, 2, 4, 8)
    ]
    assert len({c.kernel_hash_key() for c in found}) == 1
    assert len({c.hash_key() for c in found}) == 4 == len({c.key for c in found})
    assert all(c.hash_key().startswith("cutlass_gemm") for c in found)


def test_cu_j3_a_layout_that_is_not_decided() -> None:
    flexible = FlexibleLayout("cuda", F16, (1024, 1024))
    nodes = [CUDATemplateBuffer("a", flexible), _node("w", (1024, 1024), (1, 1024))]
    choices: list[ChoiceCaller] = []
    with config.patch({**ON, "cuda.cutlass_max_profiling_configs": 1}):
        CUTLASS3xGemmTemplate.add_cutlass_gemm_choices(choices, flexible.as_fixed(), nodes)
    assert len(choices) == 4


# ---- the order and the cost of it


def test_the_model_prefers_what_fills_the_card() -> None:
    """Large products go to tiles of 128x256 by two warp groups; a candidate list has few."""
    large = offered_by_effort(mm(8192, 8192, 8192))
    assert large[0].operation.tile[:2] in ((128, 256), (256, 128))
    assert "cooperative" in large[0].operation.name
    assert len({c.operation.name for c in large}) == 8 and len(large) == 16
    small = offered_by_effort(mm(128, 4096, 256))
    assert {c.swizzle for c in small} == {1}
    assert any(c.operation.is_stream_k for c in small)


def offered_by_effort(made: Made) -> list[filter.Ranked]:
    with config.patch(ON):
        return list(CUTLASS.candidates(made.problem, "default"))  # type: ignore[return-value]


def test_the_model_knows_waves() -> None:
    found = arrange.arranged(mm(4096, 4096, 4096).problem)
    assert not isinstance(found, str)
    ops = {
        op.name: estimate(op, found, Target("sm_90")) for op in filter.fitting(found, 90, "13.0")
    }
    best, worst = min(ops, key=lambda n: ops[n]), max(ops, key=lambda n: ops[n])
    assert "cpasync" in worst or "256x256" in worst
    # 137 GFLOP at the rate a card sustains
    assert 150 < ops[best] < 400


def test_a_list_costs_little_once_there_is_one() -> None:
    """Counted in calls of functions: a new size is filtered and rendered, and nothing is listed."""
    offered_by_effort(mm())

    def offered_for(m: int) -> Callable[[], None]:
        made = mm(m, 512, 1024).problem

        def work() -> None:
            assert CUTLASS.supports(made) == ""
            for candidate in CUTLASS.candidates(made, "default"):
                candidate.kernel()

        return work

    with config.patch(ON):
        offered_for(264)()
        listed = metrics.counters["cutlass"]["listed"]
        efforts = [calls_of(offered_for(272 + 8 * k)) for k in range(3)]
    assert metrics.counters["cutlass"]["listed"] == listed
    assert max(efforts) < 30_000, efforts


def _node(name: str, size: tuple[int, ...], stride: tuple[int, ...] = ()) -> CUDATemplateBuffer:
    return CUDATemplateBuffer(name, FixedLayout("cuda", F16, size, stride))
