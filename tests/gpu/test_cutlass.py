"""CUTLASS kernels on a card: numbers against eager, and what is chosen.

Their twins without one are `tests/compile/test_cutlass_*.py`.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.gemm_cases import rounded
from tilewright import metrics
from tilewright.gemm.cutlass.words import (
    CUDACompileSourceCapturingContext,
    cuda_standalone_runner_compile_command,
)
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune.choices import ChoiceCaller, CUTLASSTemplateCaller
from tilewright.tune.select import AlgorithmSelectorCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
ALONE: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "CUTLASS",
                         "fx_graph_cache": False}  # fmt: skip
EVT = {**ALONE, "cuda.cutlass_max_profiling_configs": 1, "cuda.cutlass_tma_only": True,
       "cuda.cutlass_epilogue_fusion_enabled": True,
       "cuda.cutlass_max_profiling_swizzle_options": [1]}  # fmt: skip


def configs(n: int, **more: Any) -> dict[str, Any]:
    return {**ALONE, "cuda.cutlass_max_profiling_configs": n, **more}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(1234)
    torch._dynamo.reset()
    metrics.reset()


def r(*shape: int, dtype: torch.dtype = F16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=F32).to(dtype)


def col(n: int, k: int, dtype: torch.dtype = F16) -> torch.Tensor:
    return r(n, k, dtype=dtype).t()


def same(function: Callable[..., Any], *args: Any, options: dict[str, Any],
         dynamic: bool | None = False, **tolerance: float) -> str:  # fmt: skip
    compiled = torch.compile(function, backend="tilewright", dynamic=dynamic, options=options)
    result, code = run_and_get_code(compiled, *args)
    torch.testing.assert_close(result, function(*args), **tolerance)
    text = "\n".join(code)
    assert "cutlass" in text
    return text


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_cu_c1_mm(dtype: torch.dtype, dynamic: bool) -> None:
    """CU-C1, CU-E1: one compilation for both sizes, where they are dynamic."""
    f = torch.compile(mm, backend="tilewright", dynamic=dynamic, options=configs(2))
    for m, n, k in ((128, 128, 16), (1024, 1024, 256)) if dynamic else ((128, 128, 16),):
        a, b = r(m, k, dtype=dtype), r(k, n, dtype=dtype)
        with torch._dynamo.config.patch(error_on_recompile=True):
            torch.testing.assert_close(f(a, b), a @ b)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("shape", ["mn", "m1", "1n", "n"])
@pytest.mark.parametrize("tma", [False, True])
def test_cu_c2_addmm(dtype: torch.dtype, shape: str, tma: bool) -> None:
    """CU-C2, CU-C3, CU-C24."""
    m, n, k = 512, 512, 128
    size = {"mn": (m, n), "m1": (m, 1), "1n": (1, n), "n": (n,)}[shape]
    options = configs(2, **{"cuda.cutlass_tma_only": tma})
    given = r(*size, dtype=dtype), r(m, k, dtype=dtype), col(n, k, dtype)
    near = {"rtol": 1.6e-2, "atol": 2e-2}
    same(torch.addmm, *given, options=options, **near)
    scaled = functools.partial(torch.addmm, alpha=2.0, beta=0.4)
    same(lambda x, a, b: scaled(x, a, b), *given, options=options, **near)


def test_cu_c5_linear() -> None:
    a, bias = r(2048, 4096), r(2048)
    same(lambda a, bias: F.linear(a, a, bias), a, bias, options=configs(2), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_cu_c6_bmm(dtype: torch.dtype) -> None:
    """CU-C6, CU-C7, CU-E2: also of a matrix that is the same for the whole batch."""
    b = r(10, 256, 512, dtype=dtype).permute(0, 2, 1)
    same(torch.bmm, r(10, 1024, 512, dtype=dtype), b, options=configs(2), rtol=2e-2, atol=2e-2)
    wide = r(1024, 512, dtype=dtype).expand(10, 1024, 512)
    same(torch.bmm, wide, b, options=configs(2), rtol=2e-2, atol=2e-2)


def test_cu_c9_integers() -> None:
    a = torch.randint(0, 5, (100, 16), dtype=torch.int8, device="cuda")
    b = torch.randint(0, 5, (32, 16), dtype=torch.int8, device="cuda").t()
    same(torch._int_mm, a, b, options=configs(2), rtol=0, atol=0)


def _quantised(x: torch.Tensor, dtype: torch.dtype, rows: bool
               ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    top = torch.finfo(dtype).max
    amax = x.float().abs().amax(1, keepdim=True) if rows else x.float().abs().max()
    scale = top / amax.clamp(min=1e-12)
    return (x.float() * scale).clamp(-top, top).to(dtype), scale.reciprocal().float()


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fast", [True, False])
def test_cu_c15_scaled(rows: bool, bias: bool, fast: bool) -> None:
    """CU-C12, CU-C15, CU-C17."""
    m, k, n = 512, 128, 64
    (a, sa), (b, sb) = _quantised(r(m, k), E4, rows), _quantised(r(n, k), E4, rows)
    added = [r(n, dtype=BF16)] if bias else []

    def f(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, *bias: Any) -> Any:
        return torch._scaled_mm(a, b, sa, sb, bias=bias[0] if bias else None, out_dtype=BF16,
                                use_fast_accum=fast)  # fmt: skip

    same(f, a, b.t(), sa, sb.t() if rows else sb, *added,
         options=configs(2, **{"cuda.cutlass_tma_only": True}), rtol=1e-2, atol=0.05)  # fmt: skip


def test_cu_c13_two_kinds_of_fp8() -> None:
    a, b = r(256, 256).to(E4), r(256, 256).to(E5).t()
    one, two = (torch.tensor(v, device="cuda") for v in (1.0, 2.0))
    same(lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=F16), a, b, one, two,
         options=configs(2), rtol=1e-2, atol=0.05)  # fmt: skip


@pytest.mark.parametrize("sizes", [(128, 16, 128), (1024, 256, 1024), (16384, 1408, 16384)])
def test_cu_d1_stream_k(sizes: tuple[int, int, int]) -> None:
    """CU-D1, CU-D2, CU-D10: with workspaces."""
    m, k, n = sizes
    same(mm, r(m, k), col(n, k), rtol=0.01, atol=0.01 * k**0.5,
         options=configs(2, **{"cuda.cutlass_op_allowlist_regex": "stream_k"}))  # fmt: skip


UNARY: dict[str, Any] = {"relu": torch.relu, "tanh": torch.tanh, "exp": torch.exp,
                         "sigmoid": torch.sigmoid}  # fmt: skip
BINARY: dict[str, Any] = {"add": torch.add, "mul": torch.mul, "sub": torch.sub, "div": torch.div}


def _fused(function: Callable[..., Any], *args: Any, count: int = 1, **tolerance: float) -> None:
    same(function, *args, options=EVT, **(tolerance or {"rtol": 1e-2, "atol": 1e-2}))
    assert metrics.counters["inductor"]["cuda_epilogue_fusion_counter"] == count


@pytest.mark.parametrize("m", [512, 1024])
@pytest.mark.parametrize("n", [512, 1024])
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_cu_h1_epilogues(name: str, m: int, n: int) -> None:
    """CU-H1, CU-H2, CU-H3, CU-H8."""
    a, b = r(m, 64) / 8, col(n, 64) / 8
    extra = torch.rand(m, n, device="cuda").half() + 0.5
    if name in UNARY:
        _fused(lambda a, b: (a @ b, UNARY[name](a @ b)), a, b)
    else:
        _fused(lambda a, b, x: (a @ b, BINARY[name](torch.relu(a @ b), x)), a, b, extra)


@pytest.mark.parametrize("name", list(BINARY))
def test_cu_h4_h7_more(name: str) -> None:
    """CU-H4, CU-H5, CU-H6, CU-H7: of other dtypes, several operations, an operand again, several
    results."""
    op = BINARY[name]
    a, b = r(256, 256) / 16, col(256, 256)
    extra, ones = torch.rand(256, 256, device="cuda").half() + 0.5, r(256, 256, dtype=F32)
    _fused(lambda a, b, x, o: op(torch.relu(a @ b), x) + o, a, b, extra, ones)
    metrics.reset()

    def again(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(op(torch.relu(a @ b), x)) + a

    _fused(again, a, b, extra)
    metrics.reset()

    def several(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Any:
        first = torch.relu(a @ b)
        z = op(first, x)
        return z, z + first

    _fused(several, a, b, extra, count=2)


def test_cu_e7_dynamic_epilogues() -> None:
    def f(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(a @ b) + x

    compiled = torch.compile(f, backend="tilewright", dynamic=True, options=EVT)
    for m, k, n in ((1024, 64, 512), (128, 256, 384)):
        a, b, x = r(m, k), col(n, k), r(m, n)
        with torch._dynamo.config.patch(error_on_recompile=True):
            torch.testing.assert_close(compiled(a, b, x), f(a, b, x), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("bias", ["gelu", "residual", "row"])
def test_epilogues_of_models(bias: str) -> None:
    """bias and gelu, a residual and relu, a scale and a row."""
    x, w, row, rest = r(512, 256), r(768, 256), r(768), r(512, 768)
    made: dict[str, Callable[..., Any]] = {
        "gelu": lambda x, w, row, rest: F.gelu(F.linear(x, w, row)),
        "residual": lambda x, w, row, rest: torch.relu(x @ w.t() + rest),
        "row": lambda x, w, row, rest: (x @ w.t()) * 0.125 + row,
    }
    _fused(made[bias], x, w, row, rest, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_cu_c11_mixed(dtype: torch.dtype) -> None:
    a = r(256, 128, dtype=dtype)
    b = torch.randint(-8, 8, (512, 128), device="cuda", dtype=torch.int8).t()
    text = same(lambda a, b: torch.mm(a, b.to(a.dtype)), a, b, options=configs(2), rtol=2e-2,
                atol=0.1)  # fmt: skip
    assert "_s8_" in text


def test_cu_f13_a_program_around_a_kernel(tmp_path: Path) -> None:
    with CUDACompileSourceCapturingContext() as captured, fresh_cache():
        same(mm, r(128, 16), col(128, 16), rtol=1e-2, atol=1e-2,
             options=configs(2, **{"cuda.generate_test_runner": True}))  # fmt: skip
    assert captured.sources
    (tmp_path / "kernel.cu").write_text(captured.sources[0])
    command = cuda_standalone_runner_compile_command(
        str(tmp_path / "kernel.cu"), str(tmp_path / "kernel")
    )
    subprocess.run(command, shell=True, check=True)
    subprocess.run([str(tmp_path / "kernel")], check=True)


def test_cu_j1_one_tensor_twice() -> None:
    a = r(128, 128)
    same(lambda a: a @ a.t(), a, options=configs(2), rtol=1e-2, atol=2e-2)


def test_cu_j2_an_offset() -> None:
    a = r(129, 128)
    same(lambda a: a[1:] @ a[1:].t(), a, options=configs(2), rtol=1e-2, atol=2e-2)


def test_cu_c4_g11_with_the_library() -> None:
    bias, x, w = 100 + r(2048, dtype=BF16), r(256, 3520, dtype=BF16), r(3520, 2048, dtype=BF16)
    options = {**configs(4), "max_autotune_gemm_backends": "CUTLASS,ATEN"}
    f = torch.compile(torch.addmm, backend="tilewright", options=options)
    torch.testing.assert_close(f(bias, x, w), torch.addmm(bias, x, w), **rounded(BF16, 3520))


def test_cu_g9_g10_times_that_are_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all of CUTLASS's choices, with a bias (CU-G10) and without: the library computes it."""
    sample = AlgorithmSelectorCache.benchmark_choice

    def infinite(self: AlgorithmSelectorCache, choice: ChoiceCaller, tuning: Any) -> float:
        took = sample(self, choice, tuning)
        return math.inf if isinstance(choice, CUTLASSTemplateCaller) else took

    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark_choice", infinite)
    x, w = r(256, 3520, dtype=BF16), r(3520, 2048, dtype=BF16)
    options = {**configs(4), "max_autotune_gemm_backends": "CUTLASS,ATEN"}
    near = rounded(BF16, 3520)
    same(torch.mm, x, w, options=options, **near)
    same(torch.addmm, 100 + r(2048, dtype=BF16), x, w, options=options, **near)


APART = {"autotune_in_subproc": True, "compile_threads": 4}
LARGE = 4096, 2048, 25728  # rows, columns and what is summed


def test_cu_g1_timed_by_a_process() -> None:
    m, n, k = LARGE
    same(mm, r(m, k), col(n, k), options=configs(4, **APART), **rounded(F16, k))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_cu_g2_sums_timed_by_a_process(dtype: torch.dtype) -> None:
    m, n, k = LARGE
    a, b = (t.div(k**0.5).to(dtype) for t in (r(m, k, dtype=F32), col(n, k, F32)))
    scaled = functools.partial(torch.addmm, alpha=2.0, beta=0.4)
    for size in ((m, n), (m, 1), (1, n), (n,)):
        torch._dynamo.reset()
        same(lambda x, a, b: scaled(x, a, b), r(*size, dtype=dtype), a, b,
             options=configs(4, **APART), rtol=2e-2, atol=2e-2)  # fmt: skip


def test_cu_g3_batches_timed_by_a_process() -> None:
    m, n, k = LARGE
    b = r(10, n, k).permute(0, 2, 1)
    same(torch.bmm, r(10, m, k), b, options=configs(4, **APART), **rounded(F16, k))


def test_cu_b25_one_hundred_products_of_one_shape() -> None:
    """CU-B25: the filter runs once."""

    def f(b: torch.Tensor) -> torch.Tensor:
        a = torch.zeros_like(b)
        for _ in range(100):
            a = a @ b.t()
        return a

    with fresh_cache():
        began = time.perf_counter()
        same(f, r(1024, 1024), options=configs(1))
        assert time.perf_counter() - began < 60
    assert metrics.counters["cutlass"]["filtered"] == 1


def test_cu_b27_the_log_has_the_number(caplog: pytest.LogCaptureFixture) -> None:
    options = {**configs(2), "max_autotune_gemm_backends": "ATEN,TRITON,CUTLASS"}
    a, b = r(128, 16), col(128, 16)
    with caplog.at_level("DEBUG", "tilewright.cutlass"), fresh_cache():
        f = torch.compile(mm, backend="tilewright", options=options)
        torch.testing.assert_close(f(a, b), a @ b, rtol=1e-2, atol=2e-2)
    found = re.search(r"Got cutlass configs: total number of ops: (\d+)", caplog.text)
    assert found is not None and int(found[1]) > 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_cu_c16_quantised_in_the_program(dynamic: bool) -> None:
    """CU-C16: rows are scaled, multiplied, scaled again and multiplied again."""
    pairs = [_quantised(r(1024, 1024), E4, rows=True) for _ in range(2)]

    def f(x: torch.Tensor, w: list[torch.Tensor], scales: list[torch.Tensor]) -> torch.Tensor:
        for weight, scale in zip(w, scales, strict=True):
            q, s = _quantised(x, E4, rows=True)
            x = torch._scaled_mm(q, weight.t(), s, scale.t(), out_dtype=BF16, use_fast_accum=True)
        return x

    x, w, scales = r(512, 1024, dtype=BF16), [q for q, _ in pairs], [s for _, s in pairs]
    top = f(x, w, scales).abs().max().item()
    same(f, x, w, scales, options=configs(2), dynamic=dynamic, rtol=1e-2, atol=0.05 * top)


@pytest.mark.parametrize("dynamic", [False, True])
def test_cu_e3_one_kernel_for_both(dynamic: bool) -> None:
    a, b, c = r(128, 16), col(128, 16), col(512, 16)
    text = same(lambda a, b, c: (a @ b, a @ c), a, b, c, options=configs(1), dynamic=dynamic,
                rtol=1e-2, atol=2e-2)  # fmt: skip
    calls = re.findall(r"^ *(cutlass_\w+)\(", text, re.M)
    assert len(calls) >= 2 and len(set(calls)) == 1, calls


def test_cu_f11_nothing_to_offer_is_no_failure() -> None:
    options = {**configs(2), "max_autotune_gemm_backends": "CUTLASS,Triton,ATen",
               "compile_threads": 4, "autotune_in_subproc": True}  # fmt: skip
    a, b = r(100, 10), r(10, 100)
    f = torch.compile(mm, backend="tilewright", options=options)
    torch.testing.assert_close(f(a, b), a @ b, rtol=1e-2, atol=2e-2)


def test_cu_h9_j3_a_layout_decided_late() -> None:
    """CU-H9, CU-J3."""
    b = r(1024, 1024)
    same(lambda b: torch.relu(torch.zeros_like(b) @ b.t()), b, options=EVT)
    assert metrics.counters["inductor"]["cuda_epilogue_fusion_counter"] == 1
    same(lambda b: torch.zeros_like(b) @ b.t(), b, options=configs(1))


AFTER: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scaled": lambda a, b: (a @ b) * 3.0,
    "shifted": lambda a, b: (a @ b) * 3.3 - 1.234,
    "relu": lambda a, b: torch.relu((a @ b) * 3.3 - 1.234),
    "relu6": lambda a, b: torch.clamp(torch.relu(a @ b), max=6.0),
    "wider": lambda a, b: (a @ b).to(F32) * 0.00001,
    "by a size": lambda a, b: (a @ b) / b.size(1),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", AFTER)
def test_cu_h10_h11_what_comes_after(name: str, fused: bool) -> None:
    options = EVT if fused else configs(4)
    small = {"wider": 1e-5, "by a size": 1 / 256}.get(name, 1.0)
    same(AFTER[name], r(256, 32), col(256, 32), options=options, rtol=1e-2, atol=2e-2 * small)
    assert metrics.counters["inductor"]["cuda_epilogue_fusion_counter"] == int(fused)


def test_streams_and_graphs() -> None:
    """On the user's stream, and replayed as a CUDA graph."""
    a, b = r(256, 128), col(512, 128)
    f = torch.compile(mm, backend="tilewright", options=configs(2))
    f(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            f(a, b)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = f(a, b)
    a.copy_(r(256, 128))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(result, a @ b, rtol=1e-2, atol=2e-2)


def test_cu_f15_seconds() -> None:
    """CU-F15, and the cost of a second shape and a second process: no compiler."""
    with fresh_cache():
        began = time.perf_counter()
        same(mm, r(1024, 1024), col(1024, 1024), options=configs(1), rtol=1e-2, atol=0.1)
        assert time.perf_counter() - began < 50
        runs = metrics.counters["cutlass"]["nvcc_runs"]
        assert runs == 1
        same(mm, r(2048, 1024), col(512, 1024), options=configs(1), rtol=1e-2, atol=0.1)
        assert metrics.counters["cutlass"]["nvcc_runs"] == runs


def test_a_new_process_compiles_nothing() -> None:
    script = """
import torch
from tilewright import metrics
options = {"max_autotune": True, "max_autotune_gemm_backends": "CUTLASS",
           "cuda.cutlass_max_profiling_configs": 1}
a = torch.randn(512, 512, device="cuda").half()
f = torch.compile(lambda a: a @ a, backend="tilewright", options=options)
torch.testing.assert_close(f(a), a @ a, rtol=1e-2, atol=0.1)
print(metrics.counters["cutlass"]["nvcc_runs"])
"""
    found = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                            check=True).stdout.split()[-1] for _ in range(2)]  # fmt: skip
    assert found[1] == "0"
