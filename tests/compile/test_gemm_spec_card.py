"""Behaviours of products on a card that is not there: what is chosen, rendered, and laid out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from tests.compile.as_cuda import as_cuda
from tests.gemm_programs import host
from tests.products import problem
from tests.programs import compiled
from tilewright import caches, config, metrics
from tilewright.errors import BuildError
from tilewright.gemm import choose as choosing
from tilewright.gemm import cublaslt, heuristics, plan
from tilewright.gemm.analysis import Resources
from tilewright.gemm.heuristics import GemmConfig
from tilewright.gemm.plan import Plan
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.templates import TritonTemplate
from tilewright.gemm.triton import TritonCandidate, TritonProvider
from tilewright.runtime.triton_build import TritonSource
from tilewright.testing import run_and_get_code
from tilewright.tune import clock, kernels, records, select
from tilewright.tune.choices import ChoiceCaller

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TUNED: dict[str, Any] = {"max_autotune": True, "test_configs.max_mm_configs": 1}


def r(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.25).to(dtype)


@pytest.fixture(autouse=True)
def _fresh() -> Generator[None]:
    choosing._memo.clear()
    yield
    select.clear_preprocessing_fns()


def code_of(function: Callable[..., Any], *args: Any, dynamic: bool | None = None,
            **options: Any) -> str:  # fmt: skip
    """The generated program, run once in the interpreter and compared with eager."""
    with as_cuda():
        call = compiled(function, options={**TUNED, **options}, dynamic=dynamic)
        result, code = run_and_get_code(call, *args)
    torch.testing.assert_close(result, function(*args), rtol=0.05, atol=0.05)
    return "\n".join(code)


def templates(code: str) -> list[str]:
    """The templates the program launches, in order, by what is in them."""
    return re.findall(r"^ *\(?triton_tem_fused_(\w+?)_\d+\b(?!_wide)", host(code), re.M)


@pytest.mark.parametrize("dynamic", [False, True])
def test_ma_d4_rows_of_22_bytes_leave_no_choice(dynamic: bool) -> None:
    options = {"triton.enable_persistent_tma_matmul": "1",
               "test_configs.autotune_choice_name_regex": "mm_persistent_tma"}  # fmt: skip
    with pytest.raises(BackendCompilerFailed, match="NoValidChoicesError"):
        code_of(torch.mm, r(21, 11, dtype=F16), r(11, 31, dtype=F16), dynamic=dynamic, **options)


# ---- products into another dtype


@pytest.fixture
def cpu_dtype() -> Iterator[None]:
    """Products into another dtype, which torch has for cards alone."""
    made = torch.library.Library("aten", "IMPL")

    def bmm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.bmm(a.to(dtype), b.to(dtype))

    def mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.mm(a.to(dtype), b.to(dtype))

    def addmm(c: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1,
              alpha: float = 1) -> Tensor:  # fmt: skip
        return torch.addmm(c.to(dtype), a.to(dtype), b.to(dtype), beta=beta, alpha=alpha)

    for function in (bmm, mm, addmm):
        made.impl(f"{function.__name__}.dtype", function, "CPU")
    yield
    made._destroy()


WIDE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "bmm": (lambda a, b: torch.bmm(a, b, out_dtype=F32), (r(2, 3, 4), r(2, 4, 5))),
    "mm": (lambda a, b: torch.mm(a, b, out_dtype=F32), (r(6, 4), r(4, 5))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, out_dtype=F32), (r(6, 5), r(6, 4), r(4, 5))),
}  # fmt: skip


@pytest.mark.parametrize("op", WIDE)
def test_ma_b2_b5_b6_products_into_another_dtype(cpu_dtype: None, op: str) -> None:
    """The library's own form when nothing is tuned or only it is asked; a template that stores
    float32 where that is allowed. (torch cannot trace `baddbmm` with a dtype.)"""
    function, args = WIDE[op][0], tuple(t.half() for t in WIDE[op][1])
    code = code_of(function, *args, max_autotune=False, max_autotune_gemm_backends="ATEN")
    assert f"aten_{op}_dtype(" in code and "triton" not in code
    code = code_of(function, *args, max_autotune_gemm_backends="ATEN")
    assert f"aten_{op}_dtype(" in code
    code = code_of(function, *args, max_autotune_gemm_backends="TRITON")
    assert "triton_tem_fused_" in code and "extern_" not in code


def test_ma_b2_choices_come_library_first_and_one_is_not_timed(cpu_dtype: None) -> None:
    seen: list[ChoiceCaller] = []
    select.add_preprocessing_fn(lambda choices: seen.extend(choices) or choices[:1])
    before = metrics.counters["inductor"]["select_algorithm_autotune"]
    code_of(torch.mm, r(32, 64), r(64, 48), max_autotune_gemm_backends="TRITON, aten")
    assert [c.provider for c in seen][:2] == ["ATEN", "TRITON"]
    assert {c.provider for c in seen[1:]} == {"TRITON"}
    estimates = [c.trial.estimate for c in seen[1:]]
    assert estimates == sorted(estimates)
    assert metrics.counters["inductor"]["select_algorithm_autotune"] == before


OFFERED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((32, 64), (64, 32))),
    "addmm": (torch.addmm, ((32,), (32, 64), (64, 32))),
    "bmm": (torch.bmm, ((4, 32, 64), (4, 64, 32))),
    "baddbmm": (torch.baddbmm, ((4, 32, 32), (4, 32, 64), (4, 64, 32))),
    "mm_plus_mm": (lambda a, b, c, d: a @ b + c @ d, ((32, 64), (64, 32)) * 2),
}


@pytest.mark.parametrize("op", OFFERED)
@pytest.mark.parametrize("tuned", [False, True])
def test_ma_b1_c1_o4_libraries_are_offered_always_and_templates_while_tuning(
    op: str, tuned: bool
) -> None:
    """Without tuning nobody is asked: the product is the library's."""
    function, sizes = OFFERED[op]
    seen: list[ChoiceCaller] = []
    select.add_preprocessing_fn(lambda choices: seen.extend(choices) or choices)
    code = code_of(function, *(r(*size) for size in sizes), max_autotune=tuned,
                   max_autotune_gemm_backends="ATEN,TRITON")  # fmt: skip
    assert {c.provider for c in seen} == ({"ATEN", "TRITON"} if tuned else set())
    assert "extern_aten_" in code  # there is no card to measure on
    if tuned and op == "mm_plus_mm":
        assert any("mm_plus_mm" in c.name for c in seen)


def test_long_sums_are_not_split_when_there_are_to_be_no_parts() -> None:
    """`triton.num_decompose_k_splits`."""
    made = problem("mm", r(32, 4096), r(4096, 32)).problem
    found: list[set[str]] = []
    for splits in (10, 0):
        with config.patch({"max_autotune": True, "triton.num_decompose_k_splits": splits}):
            candidates = TritonProvider().candidates(made, "max")
        templates = [c for c in candidates if isinstance(c, TritonCandidate)]
        found.append({c.template.name for c in templates if c.config.split_k > 1})
        assert any("decompose_k" in c.name for c in candidates) == (splits > 0)
    assert "mm_split_k" in found[0] and not found[1]


def test_ma_b12_kernels_are_for_the_device_of_the_operands() -> None:
    made = problem("mm", r(32, 64), r(64, 48)).problem
    second = tuple(replace(b, device=torch.device("cuda", 1)) for b in made.buffers)
    with config.patch(max_autotune=True):
        for candidate in TritonProvider().candidates(replace(made, buffers=second), "quick"):
            source = candidate.kernel().source
            assert isinstance(source, TritonSource) and source.device == 1
    assert cublaslt._device(replace(made, buffers=second)) == torch.device("cuda", 1)


# ---- loop kernels


@pytest.mark.parametrize("shape", [(2048,), (128, 256), (64, 64, 64)])
def test_ma_a4_max_autotune_measures_what_max_autotune_pointwise_does(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """As many configurations with either option, and one without: the question needs no card."""
    sources: list[TritonSource] = []
    wanted = kernels._wanted

    def seen(source: TritonSource) -> bool:
        sources.append(source)
        return False

    monkeypatch.setattr(kernels, "_wanted", seen)
    across = list(reversed(range(len(shape))))
    with as_cuda():
        x, y = torch.randn(shape), torch.randn(shape).permute(across).contiguous().permute(across)
        compiled(lambda x, y: x * 2 + y, options={"triton.autotune_pointwise": False})(x, y)
    monkeypatch.setattr(
        kernels, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    )
    source = sources[0]
    assert len(source.configs) > 1
    tried: list[int] = []
    for options in ({}, {"max_autotune": True}, {"max_autotune_pointwise": True}):
        with config.patch(options):
            tried.append(len(source.configs) if wanted(source) else 1)
    assert tried[0] == 1 and tried[1] == tried[2] > 1


# ---- epilogues by analysis


def found(ms: float) -> Future[Any]:
    """What a process in the background finds of a plan: samples, and nothing wrong."""
    done = Future[Any]()
    done.set_result(([1000 * ms] * 3, ""))
    return done


@contextmanager
def measured(monkeypatch: pytest.MonkeyPatch, library: float, triton: float
             ) -> Iterator[list[str]]:  # fmt: skip
    """As if there were a card: a plan takes so many milliseconds, by who computes the product.
    Gives the names of those that are timed, each once."""
    timed: list[str] = []
    selector = select.get_algorithm_selector_cache()
    quiet = SimpleNamespace(
        is_quiet=True, heats=False, broken=lambda: "", bench=lambda run, sets: None
    )
    with monkeypatch.context() as patch:
        patch.setattr(clock, "of", lambda device: quiet)
        patch.setattr(records, "environment", lambda device: "a card")
        patch.setattr(plan.clock, "sets_beyond_cache", lambda size, device: 1)
        patch.setattr(choosing._Chooser, "_measurable", lambda self: True)
        patch.setattr(plan.Assembly, "finish", lambda self: None)
        patch.setattr(plan.Assembly, "check", lambda self: "")
        times = {"TRITON": triton, "ATEN": library}

        def sample(choice: ChoiceCaller, _: Any) -> float:
            if choice.name not in timed:
                timed.append(choice.name)
            return times[choice.provider]

        patch.setattr(selector, "benchmark_choice", sample)
        patch.setattr(select._Tuning, "ask", lambda _, choice: found(times[choice.provider]))
        yield timed


ANALYSED: dict[str, Any] = {
    "benchmark_epilogue_fusion": False, "prologue_fusion": False, "autotune_local_cache": False,
    "max_autotune_gemm_backends": "ATEN,TRITON",
    "test_configs.autotune_choice_name_regex": r"^mm$|^triton_mm_\d",
}  # fmt: skip
INF = float("inf")


def plain(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).float() + 1.0


@pytest.mark.parametrize(
    ("ids", "library", "triton", "epilogue", "alone", "fused", "found"),
    [
        ("MA-J4", INF, 0.1, None, (64, 0), (64, 100), "apart"),
        ("MA-J5", 0.001, 100.0, None, (64, 0), (64, 0), "library"),
        ("MA-J6", INF, 0.1, None, (64, 0), (64, 0), "fused"),
        ("MA-J7", 0.09999, 0.1, 0.02, (64, 0), (64, 0), "fused"),
        ("MA-J9", 0.19, 0.2, 0.1, (100, 0), (160, 0), "fused"),
        ("MA-J9 few", 0.21, 0.2, 0.1, (64, 0), (200, 0), "apart"),
        ("MA-J10", 0.39, 0.4, 0.3, (64, 0), (256, 0), "fused"),
        ("MA-J10 one", 0.41, 0.4, 0.3, (64, 0), (512, 0), "apart"),
        ("MA-J12", INF, 0.1, None, (64, 0), None, "apart"),
    ],
)
def test_an_epilogue_is_fused_by_analysis(
    monkeypatch: pytest.MonkeyPatch, ids: str, library: float, triton: float,
    epilogue: float | None, alone: tuple[int, int], fused: tuple[int, int] | None, found: str
) -> None:  # fmt: skip
    """MA-J11: fused kernels are not timed when `benchmark_epilogue_fusion` is off. A time is that
    of the product and its epilogue apart, in milliseconds."""

    def resources(self: Plan) -> Resources:
        facts = alone if self.fusion.after is None else fused
        if facts is None:
            raise BuildError("no room", command=("triton",), stderr="")
        return Resources(*facts, warps=4)

    monkeypatch.setattr(Plan, "resources", resources)
    if epilogue is not None:
        monkeypatch.setattr(choosing, "loop_time", lambda buffers, target: epilogue * 1000)
    with measured(monkeypatch, library, triton):
        code = code_of(plain, r(32, 64, dtype=BF16), r(64, 48, dtype=BF16), **ANALYSED)
    template, separate = "triton_tem_fused_" in code, "triton_poi_fused_" in code
    kind = {(True, False): "fused", (True, True): "apart", (False, True): "library"}
    assert kind[template, separate] == found


@pytest.mark.parametrize("fails", [False, True])
def test_ma_j12_a_template_with_descriptors(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """It alone has a configuration: where the fused kernel cannot be compiled, the cast is a
    kernel of its own."""

    def resources(self: Plan) -> Resources:
        if fails and self.fusion.after is not None:
            raise BuildError("shared memory", command=("triton",), stderr="")
        return Resources(64, 0, 8)

    monkeypatch.setattr(Plan, "resources", resources)
    own = heuristics.get_template_heuristic("mm_persistent_tma", "cuda", "mm")
    monkeypatch.setattr(own, "mm_configs", [GemmConfig(128, 64, 64, 4, 8)])
    options = {**ANALYSED, "triton.enable_persistent_tma_matmul": True,
               "test_configs.autotune_choice_name_regex": "^mm$|mm_persistent_tma"}  # fmt: skip
    args = r(256, 128, dtype=BF16), r(128, 384, dtype=BF16)
    with measured(monkeypatch, INF, 0.1):
        code = code_of(lambda a, b: (a @ b).float(), *args, **options)
    assert "desc_a.load(" in code and "extern_" not in code
    assert templates(code) == (["mm"] if fails else ["_to_copy_mm"])
    assert ("triton_poi_fused_" in code) == fails


def test_ma_a6_the_library_and_one_configuration_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = heuristics.get_template_heuristic("mm", "cuda", "mm")
    monkeypatch.setattr(own, "exhaustive_configs", [GemmConfig(32, 32, 32, 1, 8, group_m=8)])
    options = {**ANALYSED, "max_autotune_gemm_search_space": "EXHAUSTIVE",
               "benchmark_epilogue_fusion": True, "test_configs.max_mm_configs": 2}  # fmt: skip
    with measured(monkeypatch, 0.01, 0.1) as timed:
        code = code_of(torch.mm, r(128, 128, dtype=F16), r(128, 128, dtype=F16), **options)
    assert len(timed) == 2 and timed[0] == "mm" and re.fullmatch(r"triton_mm_\d+", timed[1])
    assert "extern_aten_mm" in code


@pytest.mark.parametrize(("more", "found"), [(-0.01, True), (0.01, False)])
def test_ma_j8_extra_reads_decide(
    monkeypatch: pytest.MonkeyPatch, more: float, found: bool
) -> None:
    def scaled(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return (x @ w) * scale + bias

    monkeypatch.setattr(choosing, "loop_time", lambda buffers, target: 500.0)
    monkeypatch.setattr(Plan, "resources", lambda self: Resources(64, 0, 4))
    args = (r(32, 64, dtype=BF16), r(64, 48, dtype=BF16), r(32, 48, dtype=BF16),
            r(32, 48, dtype=BF16))  # fmt: skip
    with measured(monkeypatch, 1.0 + 0.5, 1.5 - 1 / 3 + more + 0.5):
        code = code_of(scaled, *args, **ANALYSED)
    assert ("triton_tem_fused_" in code) is found
    assert ("triton_poi_fused_" in code) is not found


def test_ma_j13_a_prologue_is_still_decided_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epilogue joins whichever product was fastest, with or without its prologue."""
    monkeypatch.setattr(Plan, "resources", lambda self: Resources(64, 0, 4))
    names = r"^mm$|^triton_mm_\d+_prologue"
    options = {**ANALYSED, "prologue_fusion": True,
               "test_configs.autotune_choice_name_regex": names}  # fmt: skip
    with measured(monkeypatch, INF, 0.1):
        code = code_of(lambda a, b: (a + 1) @ b + 2, r(32, 64), r(64, 48), **options)
    assert code.count("triton_tem_fused_") >= 1 and "triton_poi_fused_" not in code


def test_ma_j18_spilling_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """MA-J18, BM-7."""
    spills = lambda self: Resources(64, 9 if self.fusion.after is not None else 0, 4)  # noqa: E731
    monkeypatch.setattr(Plan, "resources", spills)
    options = {**ANALYSED, "benchmark_epilogue_fusion": True}
    with measured(monkeypatch, INF, 0.1):
        code = code_of(plain, r(32, 64, dtype=BF16), r(64, 48, dtype=BF16), **options)
    assert "triton_tem_fused_" in code and "triton_poi_fused_" in code


@pytest.mark.parametrize(("library", "triton"), [(INF, 0.1), (0.01, 0.1)])
def test_bm_8_a_choice_that_waits_gives_the_same_program(
    monkeypatch: pytest.MonkeyPatch, library: float, triton: float
) -> None:
    """Timed with its epilogue, or decided before by analysis: the same launches, allocations and
    releases, whoever wins."""
    monkeypatch.setattr(Plan, "resources", lambda self: Resources(64, 0, 4))
    args = (r(32, 64, dtype=BF16), r(64, 48, dtype=BF16))
    programs: list[str] = []
    for waits in (False, True):
        choosing._memo.clear()
        with measured(monkeypatch, library, triton):
            code = code_of(plain, *args, **{**ANALYSED, "benchmark_epilogue_fusion": waits})
        programs.append(re.sub(r"#.*", "", host(code)))
    assert programs[0] == programs[1]
    assert ("extern_aten_mm" in programs[0]) == (library < triton)


def test_ma_j1_the_choice_waits_for_what_surrounds_the_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no placeholder for a choice to come: after grouping all plans, with and without
    what can be fused, are there at once. Several are timed, one is not, and where the library wins
    its call stays where it was."""
    names: list[str] = []

    def seen(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
        names.extend(c.name for c in choices)
        return choices

    select.add_preprocessing_fn(seen)
    options = {**ANALYSED, "benchmark_epilogue_fusion": True}
    args = (r(32, 64, dtype=BF16), r(64, 48, dtype=BF16))
    with measured(monkeypatch, 0.01, 0.1):
        code = code_of(plain, *args, **options)
    assert "mm" in names and any(n.endswith("_epilogue") for n in names)
    assert "extern_aten_mm" in code and "triton_tem" not in code
    untuned = code_of(plain, *args, max_autotune=False)
    assert untuned.count("triton_poi") == code.count("triton_poi")


def test_ma_a12_pipelined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed by a process in the background or not, the same is chosen."""
    args = (r(32, 64, dtype=BF16), r(64, 48, dtype=BF16))
    codes: list[str] = []
    for pipelined in (False, True):
        for timed in (False, True):
            choosing._memo.clear()
            monkeypatch.setattr(Plan, "resources", lambda self: Resources(64, 0, 4))
            options = {**ANALYSED, "benchmark_epilogue_fusion": timed,
                       "pipeline_max_autotune_gemm": pipelined}  # fmt: skip
            with measured(monkeypatch, INF, 0.1):
                codes.append(code_of(plain, *args, **options))
    assert all("triton_tem_fused_" in c and "extern_" not in c for c in codes)
    assert [c.count("triton_poi_fused_") for c in codes[:2]] == [
        c.count("triton_poi_fused_") for c in codes[2:]
    ]


# ---- what is rendered once


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[int, int]]]:
    """Hits and misses since the start; every hit is rendered again and compared."""
    caches.clear()
    metrics.reset()
    monkeypatch.setattr(TritonTemplate, "test_cache", True)
    counters = metrics.counters["inductor"]
    with config.patch({"max_autotune": True, "test_configs.max_mm_configs": 4}):
        yield lambda: (counters["generated_module_cache_hit"],
                       counters["generated_module_cache_miss"])  # fmt: skip


def render(made: GemmProblem, template: str = "mm") -> None:
    for c in TritonProvider().candidates(made, "max"):
        if c.template.name == template:
            c.kernel()


def test_ma_l5_the_key_takes_all_that_a_rendering_takes() -> None:
    key, made = (inspect.signature(f).parameters for f in (TritonTemplate.key,
                                                           TritonTemplate.render))  # fmt: skip
    assert list(key) == list(made)


def test_ma_l6_a_key_that_says_too_little_is_found_out(
    rendered: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonTemplate, "key", lambda self, *args, **named: self.name)

    def two(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y) @ y.t()

    with pytest.raises(BackendCompilerFailed, match="code cache results in wrong output"):
        code_of(two, r(10, 22), r(22, 30), max_autotune_gemm_backends="TRITON",
                **{"test_configs.max_mm_configs": 4})  # fmt: skip


def test_ma_l8_the_key_tells_all_apart() -> None:
    """Sizes, strides, dtypes, devices and offsets of operands and result, blocks, warps, stages,
    epilogue, scale and precision."""
    template, base = TritonTemplate.all_templates["mm"], GemmConfig(16, 32, 16, 1, 2)
    x, y = torch.randn(10, 22), torch.randn(22, 30)
    moved = torch.randn(11 * 22)[22:].view(10, 22)
    scaled = {"epilogue": lambda b, c: {"y": (torch.empty(10, 30), c)}}
    problems = [
        problem("mm", x, y), problem("mm", x[:9], y), problem("mm", x, torch.randn(30, 22).t()),
        problem("mm", x.half(), y.half()), problem("mm", moved, y),
        problem("mm", x, y, out=torch.empty(30, 10).t()), problem("mm", x, y, **scaled),
        problem("mm", x.half(), y.half(), dtype=F32), problem("mm", x, y, dynamic=(10,)),
        problem("addmm", x, y, bias=torch.randn(30)),
        problem("addmm", x, y, bias=torch.randn(30), beta=0.5),
    ]  # fmt: skip
    made = [p.problem for p in problems]
    other = tuple(replace(b, device=torch.device("cuda", 1)) for b in made[0].buffers)
    made.append(replace(made[0], buffers=other))
    keys = {template.key(p, base, "k") for p in made}
    assert len(keys) == len(made)
    configs = [replace(base, **{name: getattr(base, name) * 2})
               for name in ("block_m", "block_n", "block_k", "num_stages", "num_warps", "group_m",
                            "split_k")]  # fmt: skip
    more = {template.key(made[0], c, "k") for c in configs}
    more |= {template.key(made[0], base, "other"), template.key(made[0], base, "k", wide=True)}
    with config.patch({"test_configs.max_mm_configs": 3}):
        more.add(template.key(made[0], base, "k"))
    assert len(more) == len(configs) + 3 and not more & keys
    assert template.key(problem("mm", x, y).problem, base, "k") in keys


def test_ma_l9_l10_symbols(rendered: Callable[[], tuple[int, int]]) -> None:
    """Products of different symbols share nothing, those of the same share all. A kernel of sizes
    that are not known is rendered twice: for large ones its indices are wide."""
    render(problem("mm", r(10, 22), r(22, 30), dynamic=(10, 22)).problem)
    assert rendered() == (0, 2 * 4)
    render(problem("mm", r(9, 21), r(21, 30), dynamic=(11, 9, 21)).problem)
    assert rendered() == (0, 2 * 8)
    render(problem("mm", r(10, 22), r(22, 30), dynamic=(10, 22)).problem)
    assert rendered() == (2 * 4, 2 * 8)


@pytest.mark.parametrize("dynamic", [False, True])
def test_ma_l11_ten_equal_products(rendered: Callable[[], tuple[int, int]], dynamic: bool) -> None:
    """In a program equal products are chosen for once, so there is less to render still."""
    sizes = (10,) if dynamic else ()
    for _ in range(10):
        render(problem("mm", r(10, 10), r(10, 10), dynamic=sizes).problem)
    assert rendered() == ((72, 8) if dynamic else (36, 4))

    def chain(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x @ x
        return x

    turn = torch.linalg.qr(torch.randn(10, 10)).Q  # neither grows nor vanishes
    assert chain(turn).abs().max() > 0.1
    code = code_of(chain, turn, dynamic=dynamic, max_autotune_gemm_backends="TRITON")
    assert len(templates(code)) == 10


def test_ma_l12_operands_of_concatenations(rendered: Callable[[], tuple[int, int]]) -> None:
    """Their layouts are decided before anything is rendered, so nothing is left out."""

    def both(x: Tensor, y: Tensor, z: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return x @ y, torch.cat([x, z], 1) @ torch.cat([y, m, n], 0)

    args = (r(10, 22), r(22, 30), r(10, 11), r(8, 30), r(3, 30))
    code = code_of(both, *args, dynamic=True, max_autotune_gemm_backends="TRITON",
                   **{"test_configs.max_mm_configs": 4})  # fmt: skip
    assert templates(code) == ["mm", "cat_mm"]
    caches.clear()
    before = rendered()
    for m, n, k in ((10, 30, 22), (10, 30, 33)):  # as both are when nothing is fused
        render(problem("mm", r(m, k), r(k, n), dynamic=(m, n, k)).problem)
    hits, misses = (now - was for now, was in zip(rendered(), before, strict=True))
    assert (hits, misses) == (0, 2 * 4 + 2 * 4)


def test_ma_l13_batches(rendered: Callable[[], tuple[int, int]]) -> None:
    for _ in range(2):
        render(problem("bmm", r(10, 10, 22), r(10, 22, 30)).problem, "bmm")
    assert rendered() == (4, 4)

    def twice(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.bmm(a, b), torch.bmm(a + 1, b)

    code = code_of(twice, r(2, 10, 22), r(2, 22, 30), max_autotune_gemm_backends="TRITON",
                   prologue_fusion=False)  # fmt: skip
    assert templates(code) == ["bmm", "bmm"]


def test_ma_l14_sums_of_products(rendered: Callable[[], tuple[int, int]]) -> None:
    for _ in range(2):
        made = problem("mm_plus_mm", r(10, 40), r(40, 30), r(10, 40), r(40, 30))
        render(made.problem, "mm_plus_mm")
    hits, misses = rendered()
    assert hits == misses == 4

    def twice(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return a @ b + c @ d, c @ d + a @ b

    code_of(twice, r(10, 40), r(40, 30), r(10, 40), r(40, 30),
            max_autotune_gemm_backends="ATEN, TRITON")  # fmt: skip


def test_ma_l15_what_is_found_is_all_of_a_rendering(
    rendered: Callable[[], tuple[int, int]],
) -> None:
    """Nothing is recorded to be replayed: a rendering is one value, with its arguments, its grid
    and the memory it needs. Without the option each is made anew."""
    made = problem("mm", r(10, 200), r(200, 30)).problem
    template = TritonTemplate.all_templates["mm_split_k"]
    candidate = TritonCandidate(made, template, GemmConfig(16, 32, 16, 2, 4, 2, 3), "k", 0.0)
    first, again = candidate.kernel(), candidate.kernel()
    assert first == again and rendered() == (1, 1)
    with config.patch(enable_caching_generated_triton_templates=False):
        assert candidate.kernel() == first
    assert rendered() == (1, 2)


# ---- layouts


def test_ma_p1_layouts_are_decided_before_anybody_is_asked() -> None:
    """With tuning every choice has the strides the program will have; without, nobody is asked."""
    seen: list[ChoiceCaller] = []
    select.add_preprocessing_fn(lambda choices: seen.extend(choices) or choices)
    args = (r(64), r(32, 128), r(128, 64))
    code = code_of(torch.addmm, *args, max_autotune_gemm_backends="ATEN,TRITON")
    plans = [c.trial for c in seen]
    assert len(plans) > 1 and "buf0 = extern_aten_addmm_default(arg0, arg1, arg2)" in code
    for p in plans:
        assert isinstance(p, Plan)
        assert [s.arg for s in p.fusion.problem.result.stride] == [64, 1]
    seen.clear()
    code_of(torch.addmm, *args, max_autotune=False)
    assert not seen


@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "mm_plus_mm"])
def test_ma_p2_templates_see_the_strides_that_operands_have(op: str) -> None:
    """Rows are not padded here: an operand that is made in the program has the stride that is in
    the text of the template, and that it is allocated with."""
    a, b = r(46, 24, dtype=BF16), r(46, 41)
    bias = r(41, dtype=BF16)
    if op == "bmm":
        a, b = r(2, 46, 24, dtype=BF16), r(2, 46, 41)

    def function(a: Tensor, b: Tensor) -> Tensor:
        left, right = a.mT, b.to(BF16)
        match op:
            case "addmm":
                made = torch.addmm(bias, left, right)
            case "mm_plus_mm":
                made = left @ right + left @ right
            case _:
                made = torch.bmm(left, right) if op == "bmm" else left @ right
        return made.float()

    options: dict[str, Any] = {"max_autotune_gemm_backends": "TRITON", "prologue_fusion": False}
    code = code_of(function, a, b, **options)
    assert "triton_tem_fused_" in code and "* 41" in code
    assert ("(2, 46, 41,), (1886, 41, 1,)" if op == "bmm" else "(46, 41,), (41, 1,)") in code


@pytest.mark.parametrize("backends", ["TRITON", "ATEN,TRITON"])
def test_ma_p3_asking_for_strides_changes_none(backends: str) -> None:
    """Whoever is asked, and whoever wins."""
    codes = [code_of(lambda x, y: (x + 1) @ y, r(32, 16, dtype=F16), r(16, 32, dtype=F16),
                     max_autotune_gemm_backends=b, prologue_fusion=False)
             for b in (backends, "ATEN")]  # fmt: skip
    assert all("empty_cuda((32, 16,), (16, 1,), torch.float16)" in code for code in codes)


@pytest.mark.parametrize("kept", [False, True])
def test_ma_p4_a_concatenation_that_is_read_elsewhere_too(kept: bool) -> None:
    """There are no layouts to come that could contradict what a template was written for."""

    def function(a: Tensor, b1: Tensor, b2: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        c = (torch.cat((b1, b2), 1) + 1).to(BF16)
        made = torch.bmm(a.to(BF16), c)
        return (made, c - d, *((made.float(),) if kept else ()))

    args = (r(2, 16, 32), r(2, 16, 29), r(2, 16, 29), r(2, 32, 29, dtype=BF16))
    code = code_of(function, *args, max_autotune_gemm_backends="TRITON")
    assert "triton_tem_fused_" in code
    code_of(function, *args, max_autotune_gemm_backends="ATEN,TRITON")


def test_ma_p5_a_view_has_strides_of_its_own() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        d = b + 0
        return torch.bmm(a, d), b + 1, torch.bmm(d.permute(0, 2, 1), c)

    b = torch.randn(3, 19, 14).to(BF16).permute(0, 2, 1)
    args = (r(3, 10, 14, dtype=BF16), b, r(3, 14, 10, dtype=BF16))
    code = code_of(function, *args, max_autotune_gemm_backends="TRITON")
    assert "triton_tem_fused_" in code and "extern_" not in code


def test_ma_p6_a_view_of_what_was_written_in_place() -> None:
    at = torch.tensor([0, 2])

    def function(a: Tensor, b: Tensor, c: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        d = (b + 0).index_put((at,), v)
        seen = d.view(4, 26, 8)
        return torch.bmm(a, seen), torch.bmm(seen, c), d + 1

    b = torch.randn(4 * 215).to(BF16).as_strided((4, 208), (215, 1))
    args = (r(4, 8, 26, dtype=BF16), b, r(4, 8, 8, dtype=BF16), r(2, 208, dtype=BF16))
    code = code_of(function, *args, max_autotune_gemm_backends="TRITON")
    assert "triton_tem_fused_" in code


def test_ma_p13_benchmark_memory_reaches_as_far_as_views_do() -> None:
    """An operand may reach beyond the tensor it is a view of; memory for timing does too. (Where
    the result lies in a concatenation is in `test_gemm_programs.py`.)"""
    whole = torch.randn(40 * 24)
    part = whole.as_strided((4, 8), (8, 1))

    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.relu(torch.as_strided(x, (40, 8), (24, 1), 3) @ y)

    found: list[plan.Memory] = []

    def seen(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
        for c in choices:
            assert isinstance(c.trial, Plan)
            found.append(c.trial.work.bench.memory)
        return choices

    select.add_preprocessing_fn(seen)
    result = compiled(function, options={**TUNED, "max_autotune_gemm_backends": "ATEN,CPP"})(
        part, y := torch.randn(8, 6)
    )
    torch.testing.assert_close(result, function(part, y))
    sizes = {t.numel() for t in found[0].sets[0].values()}
    assert 3 + 39 * 24 + 8 in sizes
