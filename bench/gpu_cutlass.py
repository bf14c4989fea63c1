"""`python -m bench.gpu_cutlass`: CUTLASS on a card, beside cuBLAS and among the other providers.

Four parts, each chosen by name (`alone`, `among`, `fused`, `cost`; all of them by default):

- alone: `max_autotune_gemm_backends="CUTLASS"` against eager, bf16, fp16, fp8 and int8: the
  geometric mean of the speeds is to be 0.97 of cuBLAS at least, with some products won outright
- among: the default providers with and without CUTLASS
- fused: bias + gelu, residual + relu, scale + row, several results, with CUTLASS's epilogues and
  without any CUTLASS
- cost: milliseconds of a list of candidates, nvcc runs and seconds of a first shape, of a second
  shape of the same kernel, and of a process that comes after

Times are of `bench.gpu_gemm`: CUDA graphs that take turns on the same inputs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_gemm import CALLS, Recorder, in_turns
from bench.measure import geomean
from tilewright import config, metrics
from tilewright.gemm.choose import decisions
from tilewright.testing import fresh_cache

BF16, F16 = torch.bfloat16, torch.float16
E4 = torch.float8_e4m3fn
OTHERS = "ATEN,CUBLASLT,TRITON"
SETS = 4
BASE: dict[str, Any] = {"max_autotune": True, "fx_graph_cache": False,
                        "cuda.cutlass_epilogue_fusion_enabled": True}  # fmt: skip
SHAPES = (
    (8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 1024),
    (512, 4096, 4096), (128, 4096, 4096), (64, 6144, 4096), (4096, 14336, 4096),
    (4096, 4096, 14336), (16384, 1024, 1024), (2048, 32000, 4096), (256, 256, 16384),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]


def _r(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape, device="cuda") / shape[-1] ** 0.5).to(dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def _scaled(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, s, t, out_dtype=BF16, use_fast_accum=True)


def products() -> Iterator[Case]:
    for m, n, k in SHAPES:
        for dtype in (BF16, F16):
            kind = str(dtype).removeprefix("torch.")
            yield Case(f"mm {m}x{n}x{k} {kind}", _mm,
                       lambda m=m, n=n, k=k, dtype=dtype: (_r(m, k, dtype=dtype),
                                                           _r(n, k, dtype=dtype).t()))  # fmt: skip
        yield Case(f"scaled_mm {m}x{n}x{k} e4m3", _scaled, lambda m=m, n=n, k=k: (
            _r(m, k).to(E4), _r(n, k).to(E4).t(), torch.rand(m, 1, device="cuda"),
            torch.rand(1, n, device="cuda")))  # fmt: skip
        if m > 16:
            yield Case(f"int_mm {m}x{n}x{k} int8", torch._int_mm, lambda m=m, n=n, k=k: (
                torch.randint(-8, 8, (m, k), device="cuda", dtype=torch.int8),
                torch.randint(-8, 8, (n, k), device="cuda", dtype=torch.int8).t()))  # fmt: skip


def _several(x: Tensor, w: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    first = torch.relu(x @ w.t())
    return first * rest, first + rest


def groups() -> Iterator[Case]:
    for m, n, k in ((8192, 8192, 4096), (4096, 14336, 4096), (2048, 4096, 4096)):
        size = f"{m}x{n}x{k}"
        yield Case(f"bias + gelu {size}", lambda x, w, b: F.gelu(F.linear(x, w, b)),
                   lambda m=m, n=n, k=k: (_r(m, k), _r(n, k), _r(n)))  # fmt: skip
        yield Case(f"residual + relu {size}", lambda x, w, y: torch.relu(x @ w.t() + y),
                   lambda m=m, n=n, k=k: (_r(m, k), _r(n, k), _r(m, n)))  # fmt: skip
        yield Case(f"scale + row {size}", lambda x, w, b: (x @ w.t()) * 0.125 + b,
                   lambda m=m, n=n, k=k: (_r(m, k), _r(n, k), _r(n)))  # fmt: skip
        yield Case(f"two results {size}", _several,
                   lambda m=m, n=n, k=k: (_r(m, k), _r(n, k), _r(m, n)))  # fmt: skip


# ---- measuring


def compiled(case: Case, backends: str, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    given = {**BASE, "max_autotune_gemm_backends": backends, **options}
    return torch.compile(case.function, backend="tilewright", dynamic=False, options=given)


def measured(case: Case, ways: dict[str, Callable[..., Any]]) -> dict[str, float]:
    """Microseconds of each way, from turns they took together."""
    torch.manual_seed(0)
    sets = [case.inputs() for _ in range(SETS)]
    right = case.function(*sets[0])
    for name, way in ways.items():
        _close(name, way(*sets[0]), right)
    recorder = Recorder()
    graphs = {name: recorder.recorded(way, sets) for name, way in ways.items()}
    turns = in_turns(graphs)
    return {name: statistics.median(t[name] for t in turns) for name in ways}


def _close(name: str, result: Any, right: Any) -> None:
    pairs = zip(result, right, strict=True) if isinstance(right, tuple) else [(result, right)]
    for one, other in pairs:
        scale = other.double().square().mean().sqrt()
        off = float((one.double() - other.double()).abs().max() / scale)
        assert off < 0.1, f"{name} is off by {off:.3g} of its scale"


def rows(cases: Iterator[Case], ways: Callable[[Case], dict[str, Callable[..., Any]]]
         ) -> list[dict[str, float]]:  # fmt: skip
    """A line for each case; those that fail say why, and count for nothing."""
    found: list[dict[str, float]] = []
    for case in cases:
        try:
            times = measured(case, ways(case))
        except Exception as error:
            print(
                f"{case.name:36} {type(error).__name__}: {str(error).splitlines()[0]}", flush=True
            )
            continue
        found.append(times)
        first = next(iter(times))
        shown = "  ".join(f"{name} {us:9.2f} us ({times[first] / us:5.3f})"
                          for name, us in times.items())  # fmt: skip
        print(f"{case.name:36} {shown}  {decisions[-1].winner if decisions else ''}", flush=True)
    for name in found[0] if found else []:
        first = next(iter(found[0]))
        speeds = [t[first] / t[name] for t in found]
        print(f"{name:36} geomean {geomean(speeds):.3f} of {first}, "
              f"{sum(s > 1.0 for s in speeds)} of {len(speeds)} won")  # fmt: skip
    return found


def alone() -> None:
    rows(products(), lambda c: {"eager": c.function, "CUTLASS": compiled(c, "CUTLASS")})


def among() -> None:
    rows(products(), lambda c: {"eager": c.function, "without": compiled(c, OTHERS),
                                "with": compiled(c, f"{OTHERS},CUTLASS")})  # fmt: skip


def fused() -> None:
    rows(groups(), lambda c: {"eager": c.function, "unfused": compiled(c, "ATEN,CUBLASLT"),
                              "without": compiled(c, OTHERS),
                              "CUTLASS": compiled(c, "CUTLASS"),
                              "with": compiled(c, f"{OTHERS},CUTLASS")})  # fmt: skip


_SECOND = """
import time, torch
from tilewright import metrics
a = torch.randn(4096, 4096, device="cuda").bfloat16()
f = torch.compile(lambda a: a @ a, backend="tilewright",
                  options={"max_autotune": True, "max_autotune_gemm_backends": "CUTLASS"})
began = time.perf_counter(); f(a); torch.cuda.synchronize()
print(f"{time.perf_counter() - began:.1f} s, {metrics.counters['cutlass']['nvcc_runs']} nvcc runs")
"""


def cost() -> None:
    from tests.products import problem
    from tilewright.gemm.cutlass.provider import Cutlass

    provider = Cutlass()
    took: list[float] = []
    with config.patch(BASE):
        for k in range(24):
            a, b = torch.empty(256 + 8 * k, 512, dtype=BF16), torch.empty(512, 1024, dtype=BF16)
            made = problem("mm", a, b).problem
            began = time.perf_counter()
            assert not provider.supports(made)
            for candidate in provider.candidates(made, "default"):
                candidate.kernel()
            took.append(1000 * (time.perf_counter() - began))
    print(f"a list of candidates: first {took[0]:.1f} ms, then median "
          f"{statistics.median(took[1:]):.2f} ms, at most {max(took[1:]):.2f} ms")  # fmt: skip
    with fresh_cache():
        for m, n, k in ((4096, 4096, 4096), (8192, 4096, 2048)):
            a, b = _r(m, k), _r(n, k).t()
            before = metrics.counters["cutlass"]["nvcc_runs"]
            began = time.perf_counter()
            compiled(Case("", _mm, lambda: ()), "CUTLASS")(a, b)
            torch.cuda.synchronize()
            runs = metrics.counters["cutlass"]["nvcc_runs"] - before
            print(f"{m}x{n}x{k}: {time.perf_counter() - began:.1f} s, {runs} nvcc runs")
    for _ in range(2):
        said = subprocess.run([sys.executable, "-c", _SECOND], capture_output=True, text=True)
        print(f"a process: {said.stdout.strip() or said.stderr[-300:]}")


PARTS: dict[str, Callable[[], None]] = {"cost": cost, "alone": alone, "among": among,
                                        "fused": fused}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_cutlass", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    chosen = parser.parse_args().parts or list(PARTS)
    if not torch.cuda.is_available():
        print("there is no card here")
        return 1
    print(f"{torch.cuda.get_device_name()}, {CALLS} calls in a graph")
    for name in chosen:
        print(f"\n# {name}")
        PARTS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
