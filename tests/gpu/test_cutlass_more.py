"""CUTLASS kernels on a card: sizes and options of the specification, corner cases, sparse products.

Their twins without one are `tests/compile/test_cutlass_*.py`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

from tests.gpu.gemm_cases import rounded
from tests.gpu.test_cutlass import APART, BF16, E4, F16, _quantised, col, configs, mm, r, same
from tilewright import metrics
from tilewright.gemm.cutlass import provider
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select
from tilewright.tune.choices import CUTLASSTemplateCaller, ExternKernelCaller

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
BOTH = ("CUTLASS", "ATen,Triton,CUTLASS")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(1234)
    torch._dynamo.reset()
    metrics.reset()
    provider._rendered.clear()


def among(backends: str, n: int, **more: Any) -> dict[str, Any]:
    return {**configs(n, **more), "max_autotune_gemm_backends": backends}


def close(f: Any, *args: Any, options: dict[str, Any], dynamic: bool = False,
          **tolerance: float) -> None:  # fmt: skip
    compiled = torch.compile(f, backend="tilewright", dynamic=dynamic, options=options)
    torch.testing.assert_close(compiled(*args), f(*args), **tolerance)


# ---- operators


@pytest.mark.parametrize("shape", ["mn", "m1", "1n", "n"])
def test_cu_c2_e1_sums_of_any_size(shape: str) -> None:
    """CU-C2, CU-E1: one compilation serves both sizes."""
    f = torch.compile(torch.addmm, backend="tilewright", dynamic=True, options=configs(2))
    for m, n, k in ((128, 128, 16), (512, 512, 128)):
        size = {"mn": (m, n), "m1": (m, 1), "1n": (1, n), "n": (n,)}[shape]
        given = r(*size), r(m, k), col(n, k)
        with torch._dynamo.config.patch(error_on_recompile=True):
            torch.testing.assert_close(f(*given), torch.addmm(*given), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("backends", BOTH)
@pytest.mark.parametrize("size", [(4096, 2048), (2048,), (4096, 1)])
def test_cu_c3_large_sums(backends: str, size: tuple[int, ...]) -> None:
    options = among(backends, 4, **{"cuda.cutlass_op_denylist_regex": "pingpong"}, **APART)
    given = r(*size), r(4096, 25728) / 160, col(2048, 25728)
    close(lambda x, a, b: torch.addmm(x, a, b, alpha=2.0, beta=0.4), *given, options=options,
          rtol=2e-2, atol=2e-2)  # fmt: skip


def test_cu_c4_every_time_is_finite() -> None:
    seen: list[dict[Any, float]] = []
    select.add_feedback_saver(lambda times, *_: seen.append(dict(times)))
    try:
        with fresh_cache():
            close(torch.addmm, 100 + r(2048, dtype=BF16), r(256, 3520, dtype=BF16),
                  r(3520, 2048, dtype=BF16), options=among("ATEN,CUTLASS", 2),
                  **rounded(BF16, 3520))  # fmt: skip
    finally:
        select.clear_feedback_savers()
    kinds = {type(c): math.isfinite(t) for times in seen for c, t in times.items()}
    assert kinds == {ExternKernelCaller: True, CUTLASSTemplateCaller: True}


@pytest.mark.parametrize("backends", BOTH)
def test_cu_c5_linear_timed_by_a_process(backends: str) -> None:
    a, bias = r(2048, 4096), r(2048)
    close(lambda a, bias: F.linear(a, a, bias), a, bias, options=among(backends, 2, **APART),
          rtol=0.1, atol=0.1)  # fmt: skip


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("wide", [False, True])
def test_cu_c6_e2_batches_of_any_size(dtype: torch.dtype, wide: bool) -> None:
    """CU-C6, CU-E2: the sizes of the specification; also of one matrix for the whole batch."""
    f = torch.compile(torch.bmm, backend="tilewright", dynamic=True, options=configs(2))
    for batch, m, n, k in ((10, 4096, 2048, 25728), (20, 2048, 1024, 12864)):
        a = r(m, k, dtype=dtype).expand(batch, m, k) if wide else r(batch, m, k, dtype=dtype)
        b = r(batch, n, k, dtype=dtype).permute(0, 2, 1) / k**0.5
        torch.testing.assert_close(f(a, b), torch.bmm(a, b), rtol=2e-2, atol=2e-2)


def test_cu_c7_batches_have_no_epilogue() -> None:
    close(torch.bmm, r(10, 256, 32), r(10, 32, 256), options=configs(4, **APART), rtol=1e-2,
          atol=1e-2)  # fmt: skip
    assert metrics.counters["inductor"]["cuda_epilogue_fusion_counter"] == 0


@pytest.mark.parametrize("backends", BOTH)
def test_cu_c11_mixed_among_others(backends: str) -> None:
    a = r(100, 16)
    b = torch.randint(-8, 8, (104, 16), device="cuda", dtype=torch.int8).t()
    close(lambda a, b: torch.mm(a, b.to(a.dtype)), a, b, options=among(backends, 2, **APART),
          rtol=1e-2, atol=2e-2)  # fmt: skip


def test_cu_c12_e1_scaled_of_any_size() -> None:
    """CU-C12, CU-E1."""

    def f(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b, s, t, out_dtype=BF16)

    options = configs(2, **{"cuda.cutlass_tma_only": True})
    compiled = torch.compile(f, backend="tilewright", dynamic=True, options=options)
    for m, n, k in ((128, 128, 16), (1024, 1024, 256)):
        (a, s), (b, t) = _quantised(r(m, k), E4, True), _quantised(r(n, k), E4, True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            torch.testing.assert_close(compiled(a, b.t(), s, t.t()), f(a, b.t(), s, t.t()),
                                       rtol=1e-2, atol=0.05)  # fmt: skip


_ENVIRONMENT = """
import torch
a, b = (torch.randn(256, 256, device="cuda") for _ in range(2))
a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e5m2).t()
s, t = (torch.tensor(v, device="cuda") for v in (1.0, 2.0))
f = lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=torch.float16)
g = torch.compile(f, backend="tilewright", fullgraph=True)
torch.testing.assert_close(g(a, b, s, t), f(a, b, s, t), rtol=1e-2, atol=0.05)
from tilewright import metrics
assert metrics.counters["gemm"]["CUTLASS"] == 1
"""


def test_cu_c13_backends_of_the_environment() -> None:
    given = {**os.environ, "TILEWRIGHT_MAX_AUTOTUNE_GEMM": "1",
             "TILEWRIGHT_MAX_AUTOTUNE_GEMM_BACKENDS": "CUTLASS"}  # fmt: skip
    subprocess.run([sys.executable, "-c", _ENVIRONMENT], env=given, check=True)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_cu_c17_whole_tensors_by_the_mode(dtype: torch.dtype) -> None:
    (a, s), (b, t) = _quantised(r(512, 128), E4, False), _quantised(r(64, 128), E4, False)

    def f(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b, s, t, out_dtype=dtype)

    compiled = torch.compile(f, backend="tilewright", mode="max-autotune")
    for _ in range(3):  # recorded, then replayed
        torch.testing.assert_close(compiled(a, b.t(), s, t), f(a, b.t(), s, t), rtol=1e-2,
                                   atol=0.05)  # fmt: skip


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("sizes", [(32, 8, 64), (1024, 2048, 512)])
def test_cu_c20_sparse(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """CU-C20: values and metadata, and as `torch.mm` of torch's own tensor."""
    m, n, k = sizes
    kept = torch.tensor([0, 0, 1, 1], device="cuda", dtype=dtype).repeat(m, k // 4)
    dense = r(m, k, dtype=dtype) * kept
    values, meta = sparse_semi_structured_from_dense_cutlass(dense)
    right = r(k, n, dtype=dtype)
    tolerance = {"rtol": 1e-2, "atol": 1e-2 * k**0.5}
    f = torch.compile(lambda v, e, b: torch._sparse_semi_structured_mm(v, e, b),
                      backend="tilewright", options=configs(2, **APART))  # fmt: skip
    result, code = run_and_get_code(f, values, meta, right)
    torch.testing.assert_close(result, dense @ right, **tolerance)
    assert "cutlass_" in "\n".join(code)
    torch.sparse.SparseSemiStructuredTensor._FORCE_CUTLASS = True
    tensor = torch.sparse.to_sparse_semi_structured(dense)
    f = torch.compile(torch.mm, backend="tilewright", options=configs(2, **APART))
    torch.testing.assert_close(f(tensor, right), dense @ right, **tolerance)


# ---- stream-K, orders of tiles


def test_cu_d1_one_function_for_all_sizes() -> None:
    options = configs(2, **{"cuda.cutlass_op_allowlist_regex": "stream_k"}, **APART)
    f = torch.compile(mm, backend="tilewright", dynamic=False, options=options)
    for m, k, n in ((128, 16, 128), (1024, 256, 1024), (16384, 1024, 16384), (16384, 1408, 16384)):
        a, b = r(m, k), col(n, k) / k**0.5
        torch.testing.assert_close(f(a, b), a @ b, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("m", [18432, 9216, 4608])
def test_cu_d2_large_sizes(m: int) -> None:
    n, k = 3072, 6144
    same(mm, r(m, k), col(n, k) / k**0.5, rtol=0.01, atol=0.02,
         options=configs(1, **{"cuda.cutlass_op_allowlist_regex": "stream_k"}))  # fmt: skip


def test_cu_d8_prescreened() -> None:
    """CU-D8: forty kernels, among which the library's call is; slow ones in one order alone."""
    seen: list[list[Any]] = []
    select.add_feedback_saver(lambda times, name, inputs, choices, *_: seen.append(choices))
    try:
        with fresh_cache():
            close(mm, r(256, 3520, dtype=BF16), r(3520, 2048, dtype=BF16),
                  options=among("CUTLASS,ATEN", 40), **rounded(BF16, 3520))  # fmt: skip
    finally:
        select.clear_feedback_savers()
    (choices,) = seen
    assert any(isinstance(c, ExternKernelCaller) for c in choices)
    assert any("among the fastest with swizzle" in c.reason for c in choices)


# ---- how much is rendered and built


def test_cu_f1_orders_of_tiles_are_one_build() -> None:
    options = configs(1, **{"cuda.cutlass_max_profiling_swizzle_options": [1, 2, 4]}, **APART)
    with fresh_cache():
        f = torch.compile(mm, backend="tilewright", dynamic=True, options=options)
        a, b = r(128, 16), col(128, 16)
        result, code = run_and_get_code(f, a, b)
    torch.testing.assert_close(result, a @ b, rtol=1e-2, atol=2e-2)
    assert metrics.counters["inductor"]["select_algorithm_num_precompiles"] == 1
    assert "cutlass_" in "\n".join(code)


def test_cu_f2_a_product_again_and_again() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            a = a @ b / 32
        return a

    close(f, r(1024, 1024, dtype=BF16), col(1024, 1024, BF16), options=configs(2), rtol=2e-2,
          atol=2e-2)  # fmt: skip
    assert metrics.counters["cutlass"]["rendered"] == 2


def test_cu_f3_two_sizes() -> None:
    same(lambda a, b, c, d: (a @ b, c @ d), r(128, 64), col(32, 64), r(256, 128), col(64, 128),
         options=configs(2), rtol=1e-2, atol=2e-2)  # fmt: skip
    assert metrics.counters["cutlass"]["rendered"] == 4


def test_cu_f4_e6_sizes_that_are_known_beside_others() -> None:
    """CU-F4, CU-E6."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", r(64, 256))
            self.register_buffer("b", col(128, 256))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
            return a @ b, self.a @ self.b

    model = Model()
    f = torch.compile(model, backend="tilewright", dynamic=True, options=configs(2))
    for m, n, k in ((128, 32, 64), (256, 64, 128)):
        a, b = r(m, k), col(n, k)
        torch.testing.assert_close(f(a, b), model(a, b), rtol=1e-2, atol=2e-2)
    assert metrics.counters["cutlass"]["rendered"] == 4


# ---- corner cases


@pytest.mark.parametrize("sizes", [(0, 64, 32), (64, 0, 32), (64, 32, 0)])
def test_cu_j5_empty(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    for dynamic in (False, True):
        torch._dynamo.reset()
        options = among("ATEN,CUTLASS", 2)
        f = torch.compile(torch.addmm, backend="tilewright", dynamic=dynamic, options=options)
        for one in ((128, 64, 32), sizes) if dynamic else (sizes,):
            m, n, k = one
            given = r(m, n), r(m, k), r(k, n)
            torch.testing.assert_close(f(*given), torch.addmm(*given), rtol=1e-2, atol=2e-2)


def test_cu_j6_what_no_kernel_can_read() -> None:
    """CU-J6: right with others; an error that says so without."""
    odd = torch.empty_strided((128, 64), (2, 256), device="cuda", dtype=F16).copy_(r(128, 64))
    for a, b in ((odd, r(64, 96)), (r(128, 63), r(63, 96)), (r(128, 64), r(64, 97))):
        close(mm, a, b, options=among("ATEN,TRITON,CUTLASS", 2), rtol=1e-2, atol=2e-2)
        with pytest.raises(Exception, match="NoValidChoicesError"):
            torch.compile(mm, backend="tilewright", options=configs(2))(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two cards")
def test_cu_j7_the_second_card() -> None:
    """CU-J7: on its own stream, with the first one current."""
    a, b = r(256, 128).to("cuda:1"), col(512, 128).to("cuda:1")
    f = torch.compile(mm, backend="tilewright", options=configs(2))
    stream = torch.cuda.Stream("cuda:1")
    stream.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(stream), torch.cuda.device(0):
        result = f(a, b)
    torch.cuda.synchronize("cuda:1")
    torch.testing.assert_close(result, a @ b, rtol=1e-2, atol=2e-2)


def test_cu_j7_another_stream() -> None:
    a, b = r(4096, 4096), col(4096, 4096) / 64
    f = torch.compile(mm, backend="tilewright", options=configs(1))
    f(a, b)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        a.zero_()  # what the kernel reads, if it waits for its stream
        result = f(a, b)
    torch.cuda.synchronize()
    assert result.dtype == F16 and not result.any()
