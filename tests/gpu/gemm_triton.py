"""`python -m tests.gpu.gemm_triton [--most N] [--out FILE] [NAME ...]`: the Triton provider alone.

For each product every candidate is built, checked against float64 and timed by replaying a CUDA
graph over buffers that exceed the card's cache; torch's own product is timed the same way.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu import gemm_cublaslt
from tests.products import Made, arguments, problem, programs
from tilewright import config
from tilewright.gemm.provider import Kernel
from tilewright.gemm.triton import TritonCandidate, TritonProvider
from tilewright.runtime import launch, triton_build
from tilewright.runtime.triton_build import TritonSource
from tilewright.target import Target


@dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    batch: int = 0
    layout: str = "nn"  # n: rows are contiguous, t: columns are
    dtype: torch.dtype = torch.bfloat16
    tolerance: float = 2e-2

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        lead = (self.batch,) if self.batch else ()
        return (_filled(lead, self.m, self.k, self.layout[0], self.dtype),
                _filled(lead, self.k, self.n, self.layout[1], self.dtype))  # fmt: skip


def _filled(lead: tuple[int, ...], rows: int, columns: int, layout: str, dtype: torch.dtype
            ) -> torch.Tensor:  # fmt: skip
    if layout == "t":
        return torch.randn(*lead, columns, rows, device="cuda", dtype=dtype).mT
    return torch.randn(*lead, rows, columns, device="cuda", dtype=dtype)


CASES = {
    "prefill": Case(4096, 4096, 4096, layout="nt"),
    "prefill_nn": Case(2048, 11008, 4096),
    "decode1": Case(1, 4096, 4096, layout="nt"),
    "decode1_nn": Case(1, 4096, 4096),
    "decode4": Case(4, 6144, 4096, layout="nt"),
    "decode16": Case(16, 14336, 4096, layout="nt"),
    "decode64": Case(64, 4096, 14336, layout="nt"),
    "tokens128": Case(128, 6144, 4096, layout="nt"),
    "skinny": Case(16384, 512, 512),
    "narrow": Case(8192, 64, 4096, layout="nt"),
    "cube1000": Case(1000, 1000, 1000),
    "odd": Case(2049, 2051, 2047),
    "large_k": Case(64, 128, 65536),
    "weight_grad": Case(512, 512, 32768, layout="tn"),
    "fp32": Case(1024, 1024, 1024, dtype=torch.float32, tolerance=1e-1),
    "fp16": Case(512, 4096, 1024, layout="nt", dtype=torch.float16),
    "bmm": Case(128, 128, 64, batch=512),
    "bmm_t": Case(512, 512, 128, batch=32, layout="nt"),
}


def sets_of(case: Case) -> int:
    lead = max(1, case.batch)
    size = case.dtype.itemsize * lead * (case.m * case.k + case.k * case.n + case.m * case.n)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(gemm_cublaslt.LAUNCHES, 2 * cache // size + 1))


def microseconds(run: Callable[[int], None], sets: int) -> float:
    return gemm_cublaslt.microseconds([functools.partial(run, k) for k in range(sets)])


def _wrong(case: Case, made: Made, operands: tuple[torch.Tensor, torch.Tensor]) -> str:
    left, right = operands
    expected = torch.matmul(left.double(), right.double())
    actual = made.tensors["c"].view(expected.shape).double()
    worst = ((actual - expected).abs() / (expected.abs() + math.sqrt(case.k))).max().item()
    return "" if worst <= case.tolerance else f"off by {worst:.3g}"


class Bench:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.operands = [case.tensors() for _ in range(sets_of(case))]
        op = "bmm" if case.batch else "mm"
        self.made = [problem(op, *pair, target=Target.of("cuda")) for pair in self.operands]

    def library(self) -> float:
        results = [torch.matmul(*pair) for pair in self.operands]

        def run(which: int) -> None:
            torch.matmul(*self.operands[which], out=results[which])

        return microseconds(run, len(results))

    def candidate(self, kernel: Kernel) -> float | str:
        source = kernel.source
        assert isinstance(source, TritonSource)
        built = triton_build.build(source)
        function = launch.load(source, built, 0)
        count = programs(self.made[0], source)
        given = [arguments(made, kernel) for made in self.made]

        def run(which: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            function(stream, count, 1, 1, *given[which])

        self.made[0].tensors["c"].fill_(torch.nan)
        for _ in range(2):  # the second launch finds the counters as the first left them
            run(0)
        torch.cuda.synchronize()
        return _wrong(self.case, self.made[0], self.operands[0]) or microseconds(run, len(given))


def measure(name: str, most: int, only: str, write: Callable[[dict[str, Any]], None]) -> str:
    case = CASES[name]
    bench = Bench(case)
    every = TritonProvider().candidates(bench.made[0].problem, "max")
    found = [c for c in every if only in c.name][:most]
    kernels = [c.kernel() for c in found]
    for kernel in kernels:  # all are under way before the first is waited for
        assert isinstance(kernel.source, TritonSource)
        triton_build.submit(kernel.source)
    library = bench.library()
    times: list[tuple[float, TritonCandidate]] = []
    wrong: list[str] = []
    for candidate, kernel in zip(found, kernels, strict=True):
        try:
            time_or_why = bench.candidate(kernel)
        except Exception as error:
            time_or_why = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        said = {"name": candidate.name, "description": candidate.description}
        write({"case": name, **said, "estimate": candidate.estimate, "result": time_or_why,
               "torch": library})  # fmt: skip
        if isinstance(time_or_why, str):
            wrong.append(f"    {candidate.name} {candidate.description}: {time_or_why}")
        else:
            times.append((time_or_why, candidate))
    times.sort(key=lambda pair: pair[0])
    lines = [f"{name}: torch {library:.2f} us, {len(times)} candidates"]
    for took, c in times[:5]:
        lines.append(f"  {took:8.2f} us {library / took:5.2f}x  model {c.estimate:7.1f}  {c.name}  "
                     f"{c.description}")  # fmt: skip
    return "\n".join([*lines, *wrong[:4]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=40)
    parser.add_argument("--only", default="", help="candidates with this in their name")
    parser.add_argument("--out", default="")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with config.patch({"max_autotune": True, "triton.enable_persistent_tma_matmul": True}):
        for name in options.names or list(CASES):
            start = time.perf_counter()
            print(measure(name, options.most, options.only, rows.append), flush=True)
            print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
            if options.out:
                with open(options.out, "w") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
    return 1 if any(isinstance(row["result"], str) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
