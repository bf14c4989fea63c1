"""Products that are several calls: sums in parts, and products of copied operands."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.products import HOPPER, problem
from tests.programs import compiled
from tilewright import config
from tilewright.gemm import choose, composed
from tilewright.gemm.composed import Composed
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.roofline import roofline
from tilewright.gemm.triton import TritonProvider
from tilewright.ir import index as ix
from tilewright.ir.expr import sym, var
from tilewright.runtime import triton_worker
from tilewright.runtime.interpret import Interpreted
from tilewright.testing import run_and_get_code
from tilewright.tune import select
from tilewright.tune.choices import ChoiceCaller

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PARTS = "test_configs.autotune_choice_name_regex"
TRITON: dict[str, Any] = {
    "max_autotune": True, "max_autotune_gemm_backends": "TRITON", "comprehensive_padding": False,
    "shape_padding": False, "test_configs.max_mm_configs": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> Generator[None]:
    choose._memo.clear()
    with config.patch(max_autotune=True):
        yield
    select.clear_preprocessing_fns()


def code_of(function: Callable[..., Any], *args: Any, dynamic: bool | None = False,
            tolerance: float = 1e-2, **options: Any) -> str:  # fmt: skip
    with as_cuda():
        call = compiled(function, options={**TRITON, **options}, dynamic=dynamic)
        result, code = run_and_get_code(call, *args)
    wanted = function(*(t.float() for t in args))  # half as long as in half of the bits
    torch.testing.assert_close(result.float(), wanted, rtol=tolerance, atol=tolerance)
    assert result.stride() == wanted.stride()
    return "\n".join(code)


def noted() -> list[ChoiceCaller]:
    seen: list[ChoiceCaller] = []
    select.add_preprocessing_fn(lambda choices: seen.extend(choices) or choices)
    return seen


def meta(*size: int, dtype: torch.dtype = F16) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


LONG = [(32, 32, 32768), (64, 128, 200000), (64, 64, 177147)]
FORCED = {PARTS: "decompose_k"}


def long(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = k**-0.25
    return (torch.randn(m, k) * scale).to(dtype), (torch.randn(k, n) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("sizes", LONG)
def test_ma_h1_a_long_sum_in_parts(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The library's batched product into float32, and a kernel that adds the parts up."""
    code = code_of(torch.mm, *long(*sizes, dtype), **FORCED)
    found = problem("mm", *(meta(*s, dtype=dtype) for s in ((sizes[0], sizes[2]),
                                                            (sizes[2], sizes[1]))))  # fmt: skip
    parts = composed.splits(found.problem)
    taken = next(s for s in parts if f"decompose_k_mm_{s}_split_0(" in code)
    assert sizes[2] % taken == 0 and 2 <= taken <= sizes[2] // max(sizes[:2])
    assert code.index("extern_kernels.bmm_dtype of") < code.index(
        "def triton_red_fused_decompose_k(")  # fmt: skip


def test_ma_n4_what_several_calls_are_kept_under(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, sizes, strides and what is computed: the same in every process, and of nothing else."""

    def key(left: Tensor, right: Tensor, parts: int = 4) -> str:
        return Composed(problem("mm", left, right).problem, parts).key

    given = meta(32, 32768), meta(32768, 32)
    strided = meta(32768, 64).as_strided((32768, 32), (64, 1))
    found = {
        "itself": key(*given),
        "another name": key(*given, parts=8),
        "other sizes": key(meta(64, 32768), meta(32768, 32)),
        "other strides": key(given[0], strided),
        "another dtype": key(*(meta(*t.shape, dtype=BF16) for t in given)),
    }
    assert key(*(t.clone() for t in given)) == found["itself"]
    monkeypatch.setattr(composed, "_TEXT", composed._TEXT + "\n# another graph")
    found["another graph"] = key(*given)
    assert len(set(found.values())) == 6, found


def test_ma_h2_sizes_that_may_be_anything() -> None:
    """Nothing says that k is long."""
    seen = noted()
    code = code_of(torch.mm, *long(32, 32, 4096, F16), dynamic=True)
    assert seen and not any("decompose_k" in c.name for c in seen)
    assert "decompose_k" not in code and "bmm_dtype" not in code


def test_ma_h3_what_follows_runs_on_the_result() -> None:
    code = code_of(lambda a, b: (a @ b).relu(), *long(32, 32, 32768, BF16), **FORCED)
    assert "decompose_k_mm_" in code and "triton_poi_fused_relu" in code


def test_ma_h4_a_transposed_operand() -> None:
    a, b = long(32, 32, 32768, F16)
    stored = a.t().contiguous()
    code = code_of(lambda a, b: a.t() @ b, stored, b, **FORCED)
    assert "decompose_k_mm_" in code and "bmm_dtype" in code


def test_ma_h5_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are twice a symbol, which the call is given."""
    monkeypatch.setattr(composed, "too_short", lambda problem: "")
    a, b = long(32, 64, 32768, BF16)
    torch._dynamo.mark_dynamic(a, 0)
    function = lambda a, b: (torch.stack((a, a)).view(-1, 32768) @ b).relu()  # noqa: E731
    code = code_of(function, a, b, dynamic=None, **FORCED)
    call = next(line for line in code.splitlines() if "decompose_k_mm_" in line and "(" in line
                and "def " not in line and "buf" in line)  # fmt: skip
    assert re.search(r", s\d+\)", call) and re.search(r"\(\(s\d+\*2, 64,\)", code)


@pytest.mark.parametrize("copies", [32, pytest.param(256, marks=pytest.mark.slow)])
def test_ma_h6_in_a_backward_graph(monkeypatch: pytest.MonkeyPatch, copies: int) -> None:
    monkeypatch.setattr(composed, "too_short", lambda problem: "")
    a, b = (torch.randn(8, 64) / 64).to(BF16), (torch.randn(64, 128) / 8).to(BF16)
    torch._dynamo.mark_dynamic(a, 0)

    def function(a: Tensor, b: Tensor) -> Tensor:
        return (torch.cat([a] * copies) @ b).relu().sum()

    def decomposed(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
        return [c for c in choices if "decompose_k" in c.name] or choices

    select.add_preprocessing_fn(decomposed)
    found: list[Tensor] = []
    with as_cuda():
        call = compiled(function, options=TRITON)
        for run in (function, call):
            left, right = a.clone().requires_grad_(), b.clone().requires_grad_()
            if run is call:
                torch._dynamo.mark_dynamic(left, 0)
                _, code = run_and_get_code(lambda x, y: call(x, y).backward(), left, right)
            else:
                run(left, right).backward()
            assert right.grad is not None
            found.append(right.grad)
    torch.testing.assert_close(found[1], found[0], rtol=5e-2, atol=5e-2)
    assert len(code) == 2 and re.search(r"decompose_k_mm_\d+_split_\d+\(.*, s\d+\)", code[1])
    assert re.search(rf"s\d+\*{copies}\b", code[1])


def test_ma_h7_the_result_has_strides_of_its_own() -> None:
    a = (torch.randn(4096, 256) / 8).to(BF16)
    b = (torch.randn(4096, 1152) / 8).to(BF16)[:, :1096]
    options = {**FORCED, "triton.decompose_k_threshold": 2}
    code = code_of(lambda a, b: a.t() @ b, a, b, tolerance=4e-2, **options)
    assert "decompose_k_mm_" in code and "(256, 1096,), (1096, 1,)" in code
    assert "1152" not in code[: code.index("decompose_k_mm_")].partition("empty")[2][:80]


@pytest.mark.parametrize("splits", [0, 5, 20])
@pytest.mark.parametrize("threshold", [8, 16])
@pytest.mark.parametrize("k", [32768, 256])
def test_ma_h8_how_many_are_tried(splits: int, threshold: int, k: int) -> None:
    """Changing an option changes what is offered, and what is remembered."""
    made = problem("mm", meta(32, k), meta(k, 32)).problem
    names: list[list[str]] = []
    for most in (splits, 1):
        with config.patch({"triton.num_decompose_k_splits": most,
                           "triton.decompose_k_threshold": threshold}):  # fmt: skip
            found = TritonProvider().candidates(made, "default")
            names.append([c.name for c in found if "decompose_k" in c.name])
            named = repr(config.code_key())
        assert f"'triton.decompose_k_threshold', {threshold}" in named
    none = splits == 0 or k // 32 < threshold
    assert (not names[0]) if none else (1 <= len(names[0]) <= splits)
    assert len(names[1]) <= 1


def test_ma_h9_who_may_be_decomposed() -> None:
    def why(*given: Tensor, **options: Any) -> str:
        return composed.decomposed_limits(problem("mm", *given, **options).problem)

    assert why(meta(32, 1024), meta(1024, 32)) == ""
    assert "32 times" in why(meta(33, 1024), meta(1024, 32))
    assert "32 times" in why(meta(32, 1024), meta(1024, 33))
    assert "for all that is known" in why(meta(32, 1024), meta(1024, 16), dynamic=(32,))
    whole = meta(32, 1024, dtype=torch.int8), meta(1024, 32, dtype=torch.int8)
    assert "only plain products" in why(*whole, dtype=torch.int32)
    with config.patch({"triton.num_decompose_k_splits": 0}):
        assert "is 0" in why(meta(32, 1024), meta(1024, 32))
    bias = problem("addmm", meta(32, 1024), meta(1024, 32), bias=meta(32))
    assert "plain products" in composed.decomposed_limits(bias.problem)


def test_ma_h9_into_which_parts() -> None:
    """Divisors with at least 128 elements each: powers of two first, then multiples of 32."""
    made = problem("mm", meta(32, 12288), meta(12288, 32)).problem
    with config.patch({"triton.num_decompose_k_splits": 1000}):
        every = composed.splits(made)
    assert sorted(every) == [s for s in range(2, 12288 // 32 + 1)
                             if 12288 % s == 0 and 12288 // s >= 128]  # fmt: skip
    kinds = [composed._suits(12288 // s) for s in every]
    assert kinds == sorted(kinds) and set(kinds) >= {0, 1}
    assert composed.splits(made) == every[:10]
    with config.patch(max_autotune_gemm_search_space="exhaustive"):
        assert composed.splits(made) == every
    rows = problem("mm", meta(32, 12288), meta(12288, 16), dynamic=(32,)).problem
    with config.patch({"triton.num_decompose_k_splits": 1000}):
        assert max(composed.splits(rows)) <= 256
    free = problem("mm", meta(32, 640), meta(640, 16), dynamic=(640,)).problem
    assert composed.splits(free) == []
    k = ix.mul(sym("s9", lower=0, hint=10), 64)
    wide = replace(free, k=var("k", k))
    assert composed.splits(wide) == [16, 32, 64]


def test_a_decomposed_product_is_charged_for_its_sum() -> None:
    """MA-H9: what the parts write and read beside, and a launch more."""
    made = problem("mm", meta(256, 65536), meta(65536, 256)).problem
    few, many = Composed(made, 2), Composed(made, 128)
    assert roofline(made) + 2 < few.estimate < many.estimate


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("parts", [2, 9, 31])
def test_ma_h1_the_kernel_that_adds_parts(dtype: torch.dtype, parts: int) -> None:
    shares = torch.randn(parts, 21, 33)
    out = torch.zeros(33, 40, dtype=dtype).t()[:21]
    made = problem("mm", meta(21, 512, dtype=dtype), meta(512, 33, dtype=dtype), target=HOPPER)
    source = composed.adder(made.problem)
    run = Interpreted(source.text, source.name, source.types, dict(source.configs[0].constants))
    given = shares.data_ptr(), out.data_ptr(), 21, 33, *out.stride(), parts
    run(-(-21 * 33 // composed.BLOCK), *given)
    torch.testing.assert_close(out.float(), shares.sum(0), rtol=1e-2, atol=2e-2)


def test_ma_h1_it_is_compiled_for_a_card() -> None:
    source = composed.adder(problem("mm", meta(32, 4096), meta(4096, 32)).problem)
    assert "ld.global" in triton_worker.build(source.order(source.configs[0]))["ptx"]


# ---- copies


@pytest.fixture
def contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed, "use_contiguous", lambda problem: True)


COPIED = {PARTS: "contiguous"}
SIZES = [(64, 128, 256), (128, 256, 512), (256, 512, 1024)]


def right(function: Callable[..., Any], *args: Tensor, **options: Any) -> str:
    with as_cuda():
        found, code = run_and_get_code(compiled(function, options={**TRITON, **options}), *args)
    wanted = function(*(t.double() for t in args))
    loose = 1e-2 if args[0].dtype != BF16 else 4e-2
    torch.testing.assert_close(found.double(), wanted, rtol=loose, atol=loose)
    return "\n".join(code)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("sizes", SIZES)
def test_ma_h10_of_a_copy(
    contiguous: None, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    m, n, k = sizes
    a, b = (torch.randn(m, k) * k**-0.25).to(dtype), (torch.randn(n, k) * k**-0.25).to(dtype)
    code = right(lambda a, b: a @ b.t(), a, b, **COPIED)
    assert "contiguous_mm_0(" in code


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("sizes", SIZES)
def test_ma_h11_with_a_bias(contiguous: None, sizes: tuple[int, int, int],
                            dtype: torch.dtype) -> None:  # fmt: skip
    m, n, k = sizes
    a, b = (torch.randn(m, k) * k**-0.25).to(dtype), (torch.randn(n, k) * k**-0.25).to(dtype)
    bias = torch.randn(m, n).to(dtype)
    code = right(lambda a, b, c: torch.addmm(c, a, b.t()), a, b, bias, **COPIED)
    assert "contiguous_addmm_0(" in code


@pytest.mark.parametrize("dynamic", [False, True])
def test_ma_h12_only_what_lies_in_columns(contiguous: None, dynamic: bool) -> None:
    a, rows, columns = torch.randn(64, 64) / 3, torch.randn(64, 128) / 3, torch.randn(128, 64) / 3
    seen = noted()
    assert "contiguous_mm" not in code_of(torch.mm, a, rows, dynamic=dynamic)
    assert not any("contiguous" in c.name for c in seen)
    code = code_of(lambda a, b: a @ b.t(), a, columns, dynamic=dynamic, **COPIED)
    assert "contiguous_mm_0(" in code


def test_ma_h13_with_what_follows(contiguous: None) -> None:
    a, b = torch.randn(128, 512) / 4, torch.randn(256, 512) / 4
    code = right(lambda a, b: (a @ b.t()).relu(), a, b, **COPIED)
    assert "contiguous_mm_0(" in code and "triton_poi_fused_relu" in code


def test_ma_h14_nothing_is_fused_to_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are libraries' calls for whoever times them, keep the strides of the result, and are
    offered by default on AMD's cards alone, for a long k."""
    a, b = meta(16, 1024), meta(16, 1024).t()
    made = problem("mm", a, b, dtype=F16)
    assert not composed.use_contiguous(made.problem)
    assert "as fast on columns" in composed.contiguous_limits(made.problem)
    fused = problem("mm", a, b, epilogue=lambda b, c: {"y": (meta(16, 16), c)})
    assert isinstance(fused.problem, GemmProblem) and not composed.offered(fused.problem)
    monkeypatch.setattr(composed, "use_contiguous", lambda problem: True)
    found = composed.offered(made.problem)
    assert found and {type(c.kernel().source).__name__ for c in found} == {
        "DecomposedCall", "ContiguousCall"}  # fmt: skip
    assert all(c.kernel().workspace.is_const for c in found)
