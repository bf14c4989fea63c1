"""Products on a card: what is chosen is right, in every layout and however it is tuned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import SkipTest, mock

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.cases import alone, case, check, cuda
from tilewright import metrics, pipeline
from tilewright.gemm import choose
from tilewright.gemm.plan import Plan
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import child, select

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FEW: dict[str, Any] = {"max_autotune": True, "test_configs.max_mm_configs": 4}
LOOSE = {"rtol": 2e-2, "atol": 2e-2}


def rounded(dtype: torch.dtype, k: int) -> dict[str, float]:
    """What sums over k random numbers of a type may differ by: they are near sqrt(k), and rounded
    to the type once or twice. What an epilogue adds has to be larger than that to be missed."""
    step = torch.finfo(dtype).eps if dtype != F32 else 2.0**-10  # as TF32 multiplies
    return {"rtol": 2 * step, "atol": 2 * step * k**0.5}


def code(function: Callable[..., Any], *args: Any, tolerance: Any = None, **options: Any) -> str:
    """The program, which is run and compared."""
    with fresh_cache():
        return compiled(function, *args, tolerance=tolerance, **options)


def compiled(function: Callable[..., Any], *args: Any, tolerance: Any = None,
             **options: Any) -> str:  # fmt: skip
    call = torch.compile(function, backend="tilewright", options={**FEW, **options})
    result, text = run_and_get_code(call, *args)
    torch.testing.assert_close(result, function(*args), **(tolerance or LOOSE))
    return "\n".join(text)


def measured(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """The same, with every product chosen anew; what was compiled is not compiled again."""
    choose._memo.clear()
    choose.decisions.clear()
    anew = {"autotune_local_cache": False, "fx_graph_cache": False}
    compiled(function, *args, **anew, **options)
    assert any(d.why.startswith("measured") for d in choose.decisions), choose.decisions


@case
def products_into_float32() -> None:
    """MA-B2, MA-B5, MA-B6."""
    a, b = cuda(2, 3, 4, dtype=F16), cuda(2, 4, 5, dtype=F16)
    tight = {"rtol": 1e-3, "atol": 1e-3}

    def bmm(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b, out_dtype=F32)

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b, out_dtype=F32) + 50

    text = code(bmm, a, b, max_autotune=False, max_autotune_gemm_backends="ATEN", tolerance=tight)
    assert "bmm_dtype(" in text
    text = code(bmm, a, b, max_autotune_gemm_backends="TRITON", tolerance=tight)
    assert "triton_tem_fused_" in text
    for backends in ("TRITON", "ATEN,CUBLASLT,TRITON"):
        x, y = cuda(100, 64, dtype=BF16), cuda(64, 72, dtype=BF16)
        code(mm, x, y, max_autotune_gemm_backends=backends, tolerance=tight)


@case
def products_on_another_card() -> None:
    """MA-B12: which is not the current one."""
    if torch.cuda.device_count() < 2:
        raise SkipTest("there is one card, and this is about the second")
    a, b = (torch.randn(1024, 1024, device="cuda:1") for _ in range(2))
    assert torch.cuda.current_device() == 0
    code(torch.mm, a, b, tolerance={"rtol": 4e-3, "atol": 4e-3})


@case
def sums_of_products_are_tuned_anywhere() -> None:
    """MA-C2, MA-M3, MA-M4."""

    def two(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return a @ b + c @ d

    a, b, c, d = cuda(2048, 64), cuda(64, 1536), cuda(2048, 64), cuda(64, 1536)
    with fresh_cache():  # one for all: the process that times is started once
        for subproc in (False, True):
            for many in (False, True):
                measured(two, a, b, c, d, autotune_in_subproc=subproc, autotune_multi_device=many)
        measured(lambda x, a, b: torch.addmm(x, a, b), cuda(100), cuda(100, 10), cuda(10, 100),
                 autotune_in_subproc=True)  # fmt: skip


@case
def a_crash_in_the_process_that_times_costs_itself() -> None:
    from tests.cpu import tuning_jobs

    said = ""
    try:
        child.asked(tuning_jobs.crash)
    except RuntimeError as error:
        said = str(error)
    assert "signal 11" in said
    assert child.asked(tuning_jobs.number) == 3.14
    x = cuda(64, 64)
    torch.testing.assert_close(x + 1, x.add(1))  # the card is usable


@alone
def a_budget_is_kept() -> None:
    """A dozen products that would take a minute, in two seconds and a candidate under way: eager's
    own choice is taken, or what was measured to be faster."""
    sizes = [(512 + 64 * k, 1024 + 128 * k, 768) for k in range(12)]
    pairs = [(cuda(m, k, dtype=BF16), cuda(k, n, dtype=BF16)) for m, n, k in sizes]
    verdicts: list[select.Verdict] = []
    spent: list[float] = []
    whole, one = pipeline.choose, select.AlgorithmSelectorCache.__call__

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        found = whole(*args)
        spent.append(time.perf_counter() - began)
        return found

    def seen(*args: Any) -> select.Verdict:
        verdicts.append(one(*args))
        return verdicts[-1]

    def products(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [F.relu(a @ b) for a, b in pairs]

    tuned = mock.patch.object(select.AlgorithmSelectorCache, "__call__", seen)
    with mock.patch.object(pipeline, "choose", timed), tuned:
        code(products, pairs, autotune_budget_seconds=2.0, autotune_local_cache=False,
             **{"test_configs.max_mm_configs": None})  # fmt: skip
    assert sum(spent) < 2.0 + 4.0, spent
    chosen = [v for v in verdicts if isinstance(v.winner, Plan)]  # and not those of loop kernels
    assert len(chosen) == len(sizes) and not all(v.complete for v in chosen)
    for verdict in chosen:
        times = {name: t.median_us for name, t in verdict.times.items()}
        assert verdict.winner.name == "mm" or times["mm"] > min(times.values())


@case
def epilogues_by_analysis() -> None:
    """MA-J4 to MA-J13: decided without timing, right in any case."""

    def cast(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).float() + 100.0

    def scaled(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return (x @ w) * scale + bias

    loose = rounded(BF16, 1024)
    a, b = cuda(512, 1024, dtype=BF16), cuda(1024, 2048, dtype=BF16)
    text = code(cast, a, b, benchmark_epilogue_fusion=False, tolerance=loose,
                max_autotune_gemm_backends="TRITON")  # fmt: skip
    assert "triton_tem_fused_" in text
    full = [1 + cuda(512, 2048, dtype=BF16).abs(), 100 + cuda(512, 2048, dtype=BF16)]
    wide = {"rtol": 4 * loose["rtol"], "atol": 4 * loose["atol"]}  # rounded three times, scaled
    code(scaled, a, b, *full, benchmark_epilogue_fusion=False, tolerance=wide)
    code(lambda a, b: (a + 1) @ b + 100, cuda(512, 1024), cuda(1024, 2048),
         tolerance=rounded(F32, 2 * 1024), benchmark_epilogue_fusion=False)  # fmt: skip


@case
def renderings_are_shared() -> None:
    """MA-L7 to MA-L12."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x @ x
        return x

    def both(x: Tensor, y: Tensor, z: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return x @ y, torch.cat([x, z], 1) @ torch.cat([y, m, n], 0)

    turn = torch.linalg.qr(cuda(10, 10)).Q  # neither grows nor vanishes
    assert chain(turn).abs().max() > 0.1
    code(chain, turn, max_autotune_gemm_backends="TRITON")
    args = cuda(10, 22), cuda(22, 30), cuda(10, 11), cuda(8, 30), cuda(3, 30)
    counters = metrics.counters["inductor"]
    misses = 0
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            before = counters["generated_module_cache_miss"]
            compiled(both, *args, max_autotune_gemm_backends="TRITON", fx_graph_cache=False,
                     tolerance={"rtol": 5e-2, "atol": 5e-2})  # fmt: skip
            misses, first = counters["generated_module_cache_miss"] - before, misses
    assert first > 0 and misses == 0  # what was rendered once is there


@case
def operands_made_in_the_program() -> None:
    """MA-P2, MA-P3: they have the strides their readers were written for."""
    a, b = cuda(4608, 512, dtype=BF16), cuda(4608, 1490)
    bias = cuda(1490, dtype=BF16)
    loose = rounded(BF16, 4608)
    for backends in ("TRITON", "ATEN,CUBLASLT,TRITON"):
        code(lambda a, b: (a.t() @ b.to(BF16)).float(), a, b, tolerance=loose,
             max_autotune_gemm_backends=backends)  # fmt: skip
        code(lambda a, b, c: torch.addmm(c, a.t(), b.to(BF16)).float(), a, b, bias,
             tolerance=loose, max_autotune_gemm_backends=backends)  # fmt: skip


@case
def views_of_operands_have_strides_of_their_own() -> None:
    """MA-P4, MA-P5, MA-P6."""

    def joined(a: Tensor, b1: Tensor, b2: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        c = (torch.cat((b1, b2), 1) + 1).to(BF16)
        made = torch.bmm(a.to(BF16), c)
        return made, c - d, made.float()

    def turned(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        d = b + 0
        return torch.bmm(a, d), b + 1, torch.bmm(d.permute(0, 2, 1), c)

    def put(a: Tensor, b: Tensor, c: Tensor, at: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        d = (b + 0).index_put((at,), v)
        seen = d.view(32, 1053, 40)
        return torch.bmm(a, seen), torch.bmm(seen, c), d + 1

    loose = rounded(BF16, 1053)
    joint = cuda(32, 512, 512), cuda(32, 256, 1490), cuda(32, 256, 1490), cuda(
        32, 512, 1490, dtype=BF16)  # fmt: skip
    b = cuda(460, 1119, 112, dtype=BF16).permute(0, 2, 1)
    wide = cuda(32 * 42176, dtype=BF16).as_strided((32, 42120), (42176, 1))
    at = torch.tensor([0, 5, 9], device="cuda")
    for backends in ("TRITON", "ATEN,CUBLASLT,TRITON"):
        code(joined, *joint, tolerance=loose, max_autotune_gemm_backends=backends)
        code(turned, cuda(460, 40, 112, dtype=BF16), b, cuda(460, 112, 40, dtype=BF16),
             tolerance=loose, max_autotune_gemm_backends=backends)  # fmt: skip
        values = cuda(3, 42120, dtype=BF16)
        code(put, cuda(32, 40, 1053, dtype=BF16), wide, cuda(32, 40, 40, dtype=BF16), at, values,
             tolerance=loose, max_autotune_gemm_backends=backends)  # fmt: skip


@case
def pipelined_tuning() -> None:
    """MA-A12: on and off, from two threads too."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(x @ w.t())

    args = cuda(256, 128, dtype=BF16), cuda(512, 128, dtype=BF16)
    for pipelined in (False, True):
        code(f, *args, pipeline_max_autotune_gemm=pipelined)
    assert choose.decisions
    worker = threading.Thread(target=check, args=(f, *args))
    worker.start()
    worker.join()
