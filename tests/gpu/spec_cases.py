"""Specified behaviours of products that are tagged for a card: numbers, kernels and errors there.

Their twins are in `tests/cpu/test_gemm_spec.py`, `tests/cpu/test_gemm_programs.py` and
`tests/compile/test_gemm_spec_card.py`; sizes here are the specification's own.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import SkipTest

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from tests import traffic
from tests.gemm_programs import PROGRAMS, all_most_fused, exactly, host, least_fused
from tests.gemm_programs import check as program_check
from tests.gpu.cases import case, check, cuda
from tests.gpu.gemm_cases import BF16, F16, FEW, code, compiled, rounded
from tilewright import metrics
from tilewright.gemm import heuristics
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.gemm.heuristics import GemmConfig, MMTemplateHeuristic, get_template_heuristic
from tilewright.target import Target
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select
from tilewright.tune.choices import ChoiceCaller

TRITON = {"max_autotune_gemm_backends": "TRITON"}


def noted() -> list[ChoiceCaller]:
    """What is offered from now on, until the functions are cleared."""
    seen: list[ChoiceCaller] = []
    select.add_preprocessing_fn(lambda choices: seen.extend(choices) or choices)
    return seen


def on_card(fn: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(t.cuda() for t in fn())


def failing(fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What compiling says; pytest is not everywhere."""
    try:
        code(fn, *args, **options)
    except BackendCompilerFailed as error:
        return str(error)
    return ""


@case
def programs_around_products() -> None:
    """MA-J6, MA-J14 to MA-J16, MA-K2 to MA-K15, MA-K17, MA-P10, MA-P12: kernels, allocations and
    releases are as many as in the interpreter, whichever configuration is the fastest."""
    select.add_preprocessing_fn(all_most_fused)
    try:
        for program in PROGRAMS:
            made = replace(program, inputs=on_card(program.inputs))
            kernels, text = program_check(made, "TRITON")
            exactly(program, kernels, text)
    finally:
        select.clear_preprocessing_fns()


@case
def operands_stored_first() -> None:
    """MA-K14, MA-K15: the plan that is not fused, too."""
    select.add_preprocessing_fn(least_fused)
    try:
        for program in PROGRAMS:
            if program.ids in ("MA-K14", "MA-K15"):
                made = replace(program, inputs=on_card(program.inputs))
                assert program_check(made, "TRITON")[0] == 2
    finally:
        select.clear_preprocessing_fns()


@case
def who_is_offered() -> None:
    """MA-A5, MA-B1, MA-C1, MA-O4, MA-P1: libraries always, templates while tuning alone."""
    x, w, bias = cuda(128, 256), cuda(256, 128), cuda(128)
    batch, weights = cuda(4, 128, 256), cuda(4, 256, 128)
    programs: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
        "mm": (torch.mm, (x, w)),
        "addmm": (torch.addmm, (bias, x, w)),
        "bmm": (torch.bmm, (batch, weights)),
        "baddbmm": (torch.baddbmm, (cuda(4, 128, 128), batch, weights)),
        "mm_plus_mm": (lambda a, b, c, d: a @ b + c @ d, (x, w, x + 1, w + 1)),
    }
    for fn, args in programs.values():
        for tuned in (False, True):
            seen = noted()
            try:
                code(fn, *args, max_autotune=tuned, max_autotune_gemm_backends="ATEN, Triton",
                     tolerance=rounded(torch.float32, 512))  # fmt: skip
            finally:
                select.clear_preprocessing_fns()
            assert {c.provider for c in seen} == ({"ATEN", "TRITON"} if tuned else set())


@case
def one_exhaustive_configuration() -> None:
    """MA-A6: the library and that one are timed."""
    found = get_template_heuristic("mm", "cuda", "mm")
    assert isinstance(found, MMTemplateHeuristic)
    found.exhaustive_configs = [GemmConfig(32, 32, 32, 1, 8, group_m=8)]
    seen = noted()
    try:
        code(torch.mm, cuda(1024, 1024, dtype=F16), cuda(1024, 1024, dtype=F16),
             max_autotune_gemm_backends="ATEN,TRITON", max_autotune_gemm_search_space="EXHAUSTIVE",
             tolerance=rounded(F16, 1024),
             **{"test_configs.autotune_choice_name_regex": r"^mm$|^triton_mm_\d+$"})  # fmt: skip
    finally:
        found.exhaustive_configs = ()
        select.clear_preprocessing_fns()
    assert len([c for c in seen if c.samples or c.timing is not None]) == 2


@case
def a_vocabulary_trains_with_libraries_alone() -> None:
    """MA-A9."""
    layer = torch.nn.Linear(768, 50257, device="cuda", dtype=BF16)
    x, target = cuda(2048, 768, dtype=BF16, grad=True), torch.randint(0, 50257, (2048,)).cuda()

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(layer(x).float(), target)

    options = {**FEW, "max_autotune_gemm_backends": "ATEN", "force_shape_pad": True}
    check(loss, x, target, options=options, tolerance={"rtol": 1e-2, "atol": 1e-2})


@case
def rows_are_added_as_rows() -> None:
    """MA-B3."""
    args = cuda(100), cuda(100, 10), cuda(10, 100)
    text = code(torch.addmm, *args, max_autotune_gemm_backends="ATEN")
    assert "extern_aten_addmm_default(arg0, " in text


@case
def batches_with_a_bias() -> None:
    """MA-B4."""
    w, bias = cuda(64, 64, 192, dtype=F16) / 8, cuda(64, 1, 192, dtype=F16)
    for space in ("DEFAULT", "EXHAUSTIVE"):
        text = code(lambda x: torch.baddbmm(bias, x, w), cuda(64, 2048, 64, dtype=F16), **TRITON,
                    max_autotune_gemm_search_space=space, tolerance=rounded(F16, 64))  # fmt: skip
        assert "triton_tem_fused_baddbmm" in text


@case
def batches_of_one_matrix() -> None:
    """MA-B7, MA-B8, MA-P9: no template is offered where the batch is not stepped over."""
    x = cuda(1, 32, 64, dtype=BF16).expand(4, 32, 64)
    y, c = cuda(4, 64, 16, dtype=BF16), cuda(4, 32, 16, dtype=BF16)
    for fn, args in ((torch.bmm, (x, y)), (torch.baddbmm, (c, x, y))):
        seen = noted()
        try:
            code(fn, *args, max_autotune_gemm_backends="ATEN,TRITON", tolerance=rounded(BF16, 64))
        finally:
            select.clear_preprocessing_fns()
        assert seen and all(s.provider != "TRITON" for s in seen)
    left = cuda(50304 * 64, dtype=BF16).as_strided((1, 5025, 64), (0, 1, 50304))
    code(torch.bmm, left, cuda(1, 64, 768, dtype=BF16), tolerance=rounded(BF16, 64))


@case
def narrow_and_even_k() -> None:
    """MA-B9, MA-B10, MA-I5."""
    for size, k in (*((n, 1) for n in range(90, 100)), (93, 16), (93, 90)):
        code(torch.mm, cuda(size, k), cuda(k, size), **TRITON,
             tolerance=rounded(torch.float32, k))  # fmt: skip
    for k in (15, 16):
        code(torch.mm, cuda(21, k, dtype=F16), cuda(k, 31, dtype=F16), **TRITON,
             tolerance=rounded(F16, k))  # fmt: skip


@case
def tuning_leaves_random_numbers_alone() -> None:
    """MA-B11."""

    def f(a: Tensor, b: Tensor) -> Tensor:
        return F.dropout(a @ b, 0.1).sum()

    options = {**FEW, "fallback_random": True, "benchmark_kernel": True}
    b = cuda(128, 128)
    found: list[Tensor] = []
    for call in (f, torch.compile(f, backend="tilewright", options=options)):
        torch.manual_seed(7)
        torch.cuda.manual_seed(7)
        a = torch.ones(128, 128, device="cuda", requires_grad=True)
        call(a, b).backward()
        assert a.grad is not None
        found.append(a.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-1, atol=1e-1)


@case
def operands_in_columns_with_gaps() -> None:
    """MA-C3, MA-P7, MA-P8."""

    def made(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = cuda(50304 * 2048, dtype=dtype).as_strided((50257, 2048), (1, 50304))
        return wide, cuda(2048, 768, dtype=dtype)

    (x, y), bias = made(BF16), cuda(768, dtype=BF16)
    code(torch.mm, x, y, tolerance=rounded(BF16, 2048))
    code(lambda x, y: torch.addmm(bias, x, y), x, y, tolerance=rounded(BF16, 2048))
    code(lambda a, b, c, d: a @ b + c @ d, *made(torch.float32), *made(torch.float32),
         tolerance=rounded(torch.float32, 2 * 2048))  # fmt: skip


@case
def operands_through_descriptors() -> None:
    """MA-D1, MA-D3, MA-D4, MA-D7: in every layout, with padded rows, and refused where rows start
    anywhere."""
    only = {"triton.enable_persistent_tma_matmul": "1", "triton.native_matmul": False,
            "test_configs.autotune_choice_name_regex": "mm_persistent_tma"}  # fmt: skip
    for left in (cuda(168, 88, dtype=F16), cuda(88, 168, dtype=F16).t(),
                 cuda(168, 96, dtype=F16)[:, :88]):  # fmt: skip
        for right in (cuda(88, 248, dtype=F16), cuda(248, 88, dtype=F16).t()):
            for dynamic in (False, True):
                call = torch.compile(torch.mm, backend="tilewright", dynamic=dynamic,
                                     options={**FEW, **only})  # fmt: skip
                found, text = run_and_get_code(call, left, right)
                torch.testing.assert_close(found, left @ right, **rounded(F16, 88))
                assert "make_tensor_descriptor" in "\n".join(text)
    said = failing(torch.mm, cuda(21, 11, dtype=F16), cuda(11, 31, dtype=F16), **only)
    assert "NoValidChoicesError" in said, "rows of 22 bytes were taken"


@case
def products_beyond_32_bits() -> None:
    """MA-D14, MA-D15, MA-D16."""
    plain = {**TRITON, "test_configs.autotune_choice_name_regex": "^triton_mm_"}
    code(torch.mm, cuda(65536, 32, dtype=F16), cuda(32, 65536, dtype=F16), **plain,
         tolerance=rounded(F16, 32))  # fmt: skip
    x, w = cuda(262144, 10000, dtype=BF16), cuda(10000, 32, dtype=BF16)
    torch._dynamo.mark_dynamic(x, 0)
    text = code(lambda x, w: x[x.shape[0] // 8 * 7 :] @ w, x, w, **plain,
                tolerance=rounded(BF16, 10000))  # fmt: skip
    assert "_wide)(" in text  # of any number of rows


@case
def empty_products() -> None:
    """MA-I1, MA-I2, MA-I3."""
    programs: tuple[tuple[Callable[..., Any], tuple[tuple[int, ...], ...]], ...] = (
        (lambda a, b, c, d: a @ b + c @ d, ((0, 64), (64, 1536), (0, 64), (64, 1536))),
        (lambda a, b: a.sin() @ b, ((0, 10), (10, 100))),
        (torch.addmm, ((100,), (0, 10), (10, 100))),
    )
    for fn, sizes in programs:
        for dynamic in (False, True):
            args = [cuda(*size) for size in sizes]
            found = torch.compile(fn, backend="tilewright", options=FEW, dynamic=dynamic)(*args)
            assert found.shape == fn(*args).shape and found.numel() == 0


@case
def mutation_around_a_product() -> None:
    """MA-J2, MA-J3."""

    def renamed(x: Tensor, y: Tensor, z: Tensor, other: Tensor) -> Tensor:
        product = x * y
        product.diagonal().copy_(other)
        result = torch.mm(product, z)
        result.diagonal().add_(1)
        return result

    forced = {"test_configs.force_extern_kernel_in_multi_template": True,
              "max_autotune_gemm_backends": "ATEN,TRITON"}  # fmt: skip
    text = code(renamed, cuda(3, 3), cuda(3, 3), cuda(3, 3), cuda(3), **forced)
    assert "extern_aten_mm" in text, text
    code(lambda x: (x + x, x * x, x @ x, x**2), cuda(256, 256), max_fusion_size=2,
         tolerance=rounded(torch.float32, 256))  # fmt: skip


@case
def epilogues_of_dynamic_sizes() -> None:
    """MA-J17: one compilation for two sizes."""
    w, bias = cuda(3, 4, dtype=F16), cuda(3, dtype=F16)

    def f(x: Tensor, mul: Tensor) -> Tensor:
        return F.relu(x.t() @ w.t() + bias) * mul

    with fresh_cache():
        options = {**FEW, **TRITON, "autotune_in_subproc": True}
        call = torch.compile(f, backend="tilewright", dynamic=True, fullgraph=True, options=options)
        for m in (5, 8):
            x, mul = cuda(4, m, dtype=F16), cuda(m, 3, dtype=F16)
            with torch._dynamo.config.patch(error_on_recompile=m == 8):
                torch.testing.assert_close(call(x, mul), f(x, mul), **rounded(F16, 4))


@case
def products_are_tuned_once() -> None:
    """MA-L2, MA-L3, MA-O11: four products are two problems; nothing fails to compile."""

    def twice(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        a16, b16, c16 = (t.half() for t in (a, b, c))
        return (a @ b) @ c, (a16 @ b16) @ c16

    args = tuple(cuda(256, 256) / 256 for _ in range(3))
    options = {"fx_graph_cache": False, "prologue_fusion": False, "tolerance": {
        "rtol": 1e-2, "atol": 1e-2}}  # fmt: skip
    counters = metrics.counters["inductor"]
    with fresh_cache():
        compiled(twice, *args, **options)
        assert counters["select_algorithm_precompile"] == 2
        compiled(twice, *args, **options)
        assert counters["select_algorithm_precompile"] == 2
    code(torch.mm, cuda(3, 3), cuda(3, 3))
    assert counters["select_algorithm_num_precompilation_exceptions"] == 0


@case
def savers_are_told_what_was_measured() -> None:
    """MA-O3."""
    told: list[tuple[Any, ...]] = []
    select.add_feedback_saver(lambda *args: told.append(args))
    try:
        code(torch.mm, cuda(32, 32), cuda(32, 32), max_autotune_gemm_backends="ATEN,TRITON",
             tolerance=rounded(torch.float32, 32))  # fmt: skip
    finally:
        select.clear_feedback_savers()
    timings, _, inputs, choices, *_ = told[0]
    assert timings and choices and len(inputs) == 2


@case
def shared_memory_is_as_estimated() -> None:
    """MA-O9, MA-O10: what is offered runs."""
    before = metrics.counters["inductor"]["select_algorithm_num_precompilation_exceptions"]
    for dtype in (torch.float32, BF16):
        code(torch.addmm, cuda(512, dtype=dtype), cuda(512, 512, dtype=dtype),
             cuda(512, 512, dtype=dtype), **TRITON, tolerance=rounded(dtype, 512),
             **{"test_configs.max_mm_configs": 12})  # fmt: skip
    assert heuristics.TABLES
    after = metrics.counters["inductor"]["select_algorithm_num_precompilation_exceptions"]
    assert after == before


@case
def nobody_is_left() -> None:
    """MA-Q1, MA-O7."""
    for options in ({"max_autotune_gemm_backends": ""},
                    {**TRITON, "test_configs.autotune_choice_name_regex": "nobody"}):  # fmt: skip
        assert "NoValidChoicesError" in failing(torch.mm, cuda(2, 2), cuda(2, 2), **options)


@case
def libraries_write_into_concatenations() -> None:
    """MA-P11."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x @ x, y.cos()])

    before = metrics.generated_kernel_count
    text = code(f, cuda(32, 32), cuda(32, 32), tolerance=rounded(torch.float32, 32),
                max_autotune_gemm_backends="ATEN,TRITON",
                **{"test_configs.force_extern_kernel_in_multi_template": True})  # fmt: skip
    assert metrics.generated_kernel_count - before == 1, text
    assert "out=" in text, text


@case
def rows_and_columns_at_once() -> None:
    """LO-11, RD-1, RD-2, RD-3, RD-7."""
    for x in (cuda(32768, 768), cuda(32769, 768, dtype=BF16)):
        check(lambda x: (x.sum(0), x.sum(1)), x, tolerance=rounded(x.dtype, 32768))
    w, b = cuda(768, grad=True), cuda(768, grad=True)
    norms = (lambda x: F.rms_norm(x, (768,), w), lambda x: F.layer_norm(x, (768,), w, b))
    for norm in norms:
        check(norm, cuda(4096, 768, grad=True), tolerance={"rtol": 1e-3, "atol": 1e-3})
    check(lambda x: torch.softmax(x, 0), cuda(32, 1 << 21))
    check(lambda *x: tuple(F.rms_norm(t, (768,), w) for t in x),
          *(cuda(2048, 768, grad=True) for _ in range(3)),
          tolerance={"rtol": 1e-3, "atol": 1e-3})  # fmt: skip


@case
def shared_launches_of_any_sizes() -> None:
    """CK-6."""

    def f(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return a.sin(), b.cos() + 1, c.exp()

    call = torch.compile(f, backend="tilewright", dynamic=True, options={"combo_kernels": True})
    for sizes in ((10, 20, 30), (500, 3, 70), (2, 900_000, 4)):
        args = [cuda(n) for n in sizes]
        torch.testing.assert_close(call(*args), f(*args))


@case
def padded_rows() -> None:
    """PD-2, PD-3, PD-6: of a vocabulary of odd size, and around what is written."""
    w = cuda(30523, 256, grad=True)

    def f(x: Tensor) -> Tensor:
        return F.softmax(F.linear(x, w), -1)

    options = {"comprehensive_padding": True}
    check(f, cuda(64, 256, grad=True), options=options, tolerance={"rtol": 1e-3, "atol": 1e-4})
    check(lambda a, b: F.pad(a @ b, (0, 6), value=2.0), cuda(10, 10), cuda(10, 10),
          tolerance={"rtol": 1e-2, "atol": 1e-2})  # fmt: skip


@case
def peak_of_two_products() -> None:
    """MP-1, MP-4, MP-7: both are never alive at once."""

    def f(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a @ c).sum(-1) + (b @ c).sum(-1)

    args = cuda(4096, 64), cuda(4096, 64), cuda(64, 16384)
    call = torch.compile(f, backend="tilewright")
    call(*args)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(*args)
    assert torch.cuda.max_memory_allocated() - before < 2 * 4096 * 16384 * 4


@case
def linears_of_different_shapes() -> None:
    """GB-4."""

    def f(*given: Tensor) -> list[Tensor]:
        return [F.linear(x, w).relu() for x, w in zip(given[::2], given[1::2], strict=True)]

    sizes = ((6, 5, 7), (4, 5, 7), (6, 3, 8), (5, 5, 5))
    args = [cuda(*s) for m, k, n in sizes for s in ((m, k), (n, k))]
    check(f, *args, options={"batch_fusion": "group_linear", "batch_fusion_min_size": 2},
          tolerance=rounded(torch.float32, 8), native=False)  # fmt: skip
    assert metrics.counters["batch_fusion"]["group_linear"] == 1


@case
def batches_and_sums_are_rendered_once() -> None:
    """MA-L13, MA-L14."""
    code(lambda a, b: (torch.bmm(a, b), torch.bmm(a + 1, b)), cuda(10, 10, 22), cuda(10, 22, 30),
         **TRITON, tolerance=rounded(torch.float32, 22))  # fmt: skip
    code(lambda a, b, c, d: (a @ b + c @ d, c @ d + a @ b), cuda(10, 40), cuda(40, 30),
         cuda(10, 40), cuda(40, 30), max_autotune_gemm_backends="ATEN, TRITON",
         tolerance=rounded(torch.float32, 80))  # fmt: skip
    assert metrics.counters["inductor"]["generated_module_cache_miss"] > 0


@case
def odd_rows_are_padded_where_that_is_faster() -> None:
    """MA-K16, PD-7: whatever is chosen, the product is right."""
    for m, n, k in ((250, 128, 245), (2049, 2051, 2047)):
        for dtype in (torch.float32, BF16):
            code(torch.mm, cuda(m, k, dtype=dtype), cuda(k, n, dtype=dtype),
                 max_autotune_gemm_backends="ATEN", shape_padding=True, force_shape_pad=True,
                 tolerance=rounded(dtype, k))  # fmt: skip


@case
def norms_of_everything_and_the_largest() -> None:
    """PF-28, PF-29: as many elements as are counted without a card."""
    for name in ("PF-28", "PF-29"):
        case_ = traffic.BY_NAME[name]
        given = [torch.randn(t.shape, device="cuda") for t in traffic.tensors(case_.inputs, "meta")]
        before = metrics.num_bytes_accessed
        check(case_.program, *given, tolerance={"rtol": 1e-3, "atol": 1e-3})
        assert (metrics.num_bytes_accessed - before) // 4 == case_.expected("cuda")[0]


@case
def eight_bit_copies_both_ways() -> None:
    """LO-10: a cast and its transposed copy in one kernel."""

    def f(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return y, y.t().contiguous()

    x, scale = cuda(512, 384), torch.tensor(2.0, device="cuda")
    before = metrics.generated_kernel_count
    found = torch.compile(f, backend="tilewright")(x, scale)
    assert metrics.generated_kernel_count - before == 1
    for a, b in zip(found, f(x, scale), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0)


@case
def sums_in_parts_in_a_backward_graph() -> None:
    """MA-H6."""

    def f(a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(torch.cat([a] * 256) @ b).sum()

    def decomposed(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
        return [c for c in choices if "decompose_k" in c.name] or choices

    a, b = cuda(8, 64, dtype=BF16) / 64, cuda(64, 32768, dtype=BF16) / 8
    call = torch.compile(f, backend="tilewright", options={**FEW, **TRITON})
    grads: list[Tensor] = []
    select.add_preprocessing_fn(decomposed)
    try:
        for run in (f, call):
            left, right = a.clone().requires_grad_(), b.clone().requires_grad_()
            torch._dynamo.maybe_mark_dynamic(left, 0)
            with fresh_cache():
                _, texts = run_and_get_code(lambda x, y, run=run: run(x, y).backward(), left, right)
            assert left.grad is not None
            grads.append(left.grad.float())
    finally:
        select.clear_preprocessing_fns()
    torch.testing.assert_close(grads[1] / grads[0].abs().max(), grads[0] / grads[0].abs().max(),
                               rtol=0, atol=5e-2)  # fmt: skip
    assert len(texts) == 2 and "decompose_k_mm_" in texts[1]
    assert re.search(r"\b256\*s\d+|s\d+\*256\b", texts[1])


@case
def a_choice_that_waits_gives_the_same_program() -> None:
    """BM-8: of one template, timed with its epilogue or decided before."""
    only = {**TRITON, "test_configs.max_mm_configs": 1}
    a, b = cuda(512, 256, dtype=BF16) / 16, cuda(256, 384, dtype=BF16)
    programs = [re.sub(r"#.*", "", host(code(lambda a, b: torch.relu(a @ b), a, b,
                                             benchmark_epilogue_fusion=waits, **only)))
                for waits in (False, True)]  # fmt: skip
    assert programs[0] == programs[1], programs


@case
def scores_by_a_template() -> None:
    """CD-M4, CD-M5: two subgraphs of one template, one of them under a mask."""
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        raise SkipTest("the CuTe DSL is not installed")
    from tests.compile.test_cutedsl_scores import given, scores

    made = scores(Target.of("cuda"))
    tensors, expected = given("cuda")
    CuteSource("scores", made.request, 0)(*(tensors[n] for n in made.names))
    torch.testing.assert_close(tensors["c"], expected)
