"""`python -m bench.gpu_cutedsl [products|fused|grouped|load]`: the CuTe DSL provider on a card.

- products: its best candidate beside torch's own product (cuBLAS), 14 shapes of 1024 to 16384
- fused: programs with an epilogue, only this provider or only libraries and loop kernels, 12 groups
- grouped: beside a loop of products and ATen's grouped product
- load: how long a candidate takes to compile for the first time, and to load in a second process

All candidates are checked against torch before they are timed; times are medians of CUDA graphs
over rotating operands. A table of ratios and their geometric mean ends each part.
"""

from __future__ import annotations

import argparse
import functools
import math
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure import geomean
from tests.gpu.gemm_cublaslt import microseconds
from tests.products import problem
from tilewright import config
from tilewright.gemm.cutedsl import build, quack
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.target import Target

bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
SHAPES: tuple[tuple[int, int, int, torch.dtype], ...] = (
    (1024, 1024, 1024, bf16), (2048, 2048, 2048, bf16), (4096, 4096, 4096, bf16),
    (8192, 8192, 8192, bf16), (16384, 4096, 4096, bf16), (4096, 14336, 4096, bf16),
    (4096, 4096, 14336, bf16), (8192, 1024, 8192, bf16), (2048, 16384, 4096, bf16),
    (16384, 8192, 2048, bf16), (4096, 4096, 4096, fp8), (8192, 8192, 8192, fp8),
    (4096, 14336, 4096, fp8), (16384, 4096, 8192, fp8),
)  # fmt: skip
SETS = 3


def _operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    left = torch.randn(m, k, device="cuda").to(dtype)
    right = torch.randn(n, k, device="cuda").to(dtype).t()
    return left, right


def _library(pairs: list[tuple[Tensor, Tensor]], out: list[Tensor]) -> list[Callable[[], Any]]:
    if pairs[0][0].dtype != fp8:
        return [functools.partial(torch.mm, *p, out=o) for p, o in zip(pairs, out, strict=True)]
    one = torch.ones((), device="cuda")
    return [functools.partial(torch._scaled_mm, *p, one, one, out_dtype=bf16) for p in pairs]


def products(most: int) -> None:
    ratios: list[float] = []
    for m, n, k, dtype in SHAPES:
        pairs = [_operands(m, n, k, dtype) for _ in range(SETS)]
        out = [torch.empty(m, n, device="cuda", dtype=bf16) for _ in range(SETS)]
        library = _library(pairs, out)
        theirs = microseconds(library)
        expected = pairs[0][0].float() @ pairs[0][1].float()
        made = [problem("mm", *p, dtype=bf16, target=Target.of("cuda"), out=o)
                for p, o in zip(pairs, out, strict=True)]  # fmt: skip
        best, who = math.inf, "nobody"
        for candidate in quack.candidates(made[0].problem)[:most]:
            try:
                ours = _timed(candidate, made, expected)
            except Exception as error:
                print(f"  {candidate.description}: {type(error).__name__}: {str(error)[:120]}")
                continue
            if ours < best:
                best, who = ours, candidate.description
        ratios.append(theirs / best)
        print(f"{m}x{n}x{k} {dtype}: library {theirs:.1f} us, ours {best:.1f} us, "
              f"{ratios[-1]:.3f} by {who}", flush=True)  # fmt: skip
    print(f"geometric mean of {len(ratios)}: {geomean(ratios):.3f} (to reach: 0.97)")


def _timed(candidate: quack.QuackCandidate, made: list[Any], expected: Tensor) -> float:
    kernel = candidate.kernel()
    assert isinstance(kernel.source, CuteSource)
    given = [[x.tensors[n] for _, n in kernel.arguments] for x in made]
    made[0].tensors["c"].fill_(float("nan"))
    kernel.source(*given[0])
    torch.cuda.synchronize()
    got = made[0].tensors["c"].view(expected.shape).float()
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=0.05 * math.sqrt(expected.shape[1]))
    return microseconds([functools.partial(kernel.source, *g) for g in given])


def _groups() -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    def new(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=bf16)

    x, w, wide = new(4096, 4096), new(4096, 4096), new(4096, 14336)
    bias, long, res, scale = new(4096), new(14336), new(4096, 4096), new(4096, 1).float()
    return {
        "bias gelu": (lambda x, w, b: F.gelu(torch.addmm(b, x, w)), (x, w, bias)),
        "bias gelu wide": (lambda x, w, b: F.gelu(torch.addmm(b, x, w)), (x, wide, long)),
        "bias relu": (lambda x, w, b: torch.relu(torch.addmm(b, x, w)), (x, w, bias)),
        "residual": (lambda x, w, r: torch.mm(x, w) + r, (x, w, res)),
        "bias residual": (lambda x, w, b, r: torch.addmm(b, x, w) + r, (x, w, bias, res)),
        "scale": (lambda x, w, s: (torch.mm(x, w).float() * s).to(bf16), (x, w, scale)),
        "silu": (lambda x, w: F.silu(torch.mm(x, w)), (x, w)),
        "silu gate": (lambda x, w, r: F.silu(torch.mm(x, w)) * r, (x, w, res)),
        "two results": (lambda x, w, b: (lambda z: (z, torch.relu(z)))(torch.addmm(b, x, w)),
                        (x, w, bias)),
        "gelu backward": (lambda x, w, r: torch.ops.aten.gelu_backward(torch.mm(x, w), r),
                          (x, w, res)),
        "relu backward": (lambda x, w, r: torch.where(r > 0, torch.mm(x, w), 0.0), (x, w, res)),
        "tanh scale": (lambda x, w: torch.tanh(torch.mm(x, w)) * 0.5, (x, w)),
    }  # fmt: skip


def fused() -> None:
    won, ratios = 0, list[float]()
    for name, (f, given) in _groups().items():
        times: dict[str, float] = {}
        for backends in ("ATEN,CUBLASLT", "CUTEDSL"):
            torch._dynamo.reset()
            with config.patch(max_autotune=True, max_autotune_gemm_backends=backends):
                compiled = torch.compile(f, backend="tilewright")
                torch.testing.assert_close(compiled(*given), f(*given), rtol=5e-2, atol=1.0)
                times[backends] = microseconds([functools.partial(compiled, *given)])
        library, ours = times["ATEN,CUBLASLT"], times["CUTEDSL"]
        won += ours < library
        ratios.append(library / ours)
        print(
            f"{name}: libraries {library:.1f} us, ours {ours:.1f} us, {ratios[-1]:.3f}", flush=True
        )
    print(f"won {won} of {len(ratios)} (to reach: 8 of 12), geometric mean {geomean(ratios):.3f}")


def grouped() -> None:
    over_loop, over_aten = list[float](), list[float]()
    for groups, rows, k, n in ((8, 4096, 4096, 4096), (16, 8192, 2048, 4096),
                               (64, 16384, 2048, 1408),
                               (8, 1024, 4096, 14336), (32, 4096, 1024, 2048)):  # fmt: skip
        a = torch.randn(rows, k, device="cuda", dtype=bf16)
        b = torch.randn(groups, k, n, device="cuda", dtype=bf16)
        ends = [round(rows * (g + 1) / groups / 8) * 8 for g in range(groups)]
        offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
        starts = [0, *ends]

        def loop(a: Tensor = a, b: Tensor = b, starts: list[int] = starts) -> Tensor:
            return torch.cat([a[s:e] @ b[g] for g, (s, e) in enumerate(pairwise(starts))])

        def f(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
            return torch.ops.aten._grouped_mm(a, b, offs)

        torch._dynamo.reset()
        options = {"max_autotune": True, "max_autotune_gemm_backends": "CUTEDSL",
                   "cutedsl_enable_autotuning": True}  # fmt: skip
        with config.patch(options):
            compiled = torch.compile(f, backend="tilewright")
            torch.testing.assert_close(compiled(a, b, offs), loop(), rtol=3e-2, atol=1.0)
            ours = microseconds([functools.partial(compiled, a, b, offs)])
        theirs = microseconds([functools.partial(f, a, b, offs)])
        looped = microseconds([loop])
        over_loop.append(looped / ours)
        over_aten.append(theirs / ours)
        print(f"{groups} groups, {rows}x{n}x{k}: loop {looped:.1f}, ATen {theirs:.1f}, "
              f"ours {ours:.1f} us", flush=True)  # fmt: skip
    print(f"over a loop {geomean(over_loop):.3f} (to reach: 1.5), "
          f"over ATen {geomean(over_aten):.3f} (1.0)")  # fmt: skip


SECOND = """
import pickle, sys, time
from tilewright.gemm.cutedsl import build
request = pickle.loads(bytes.fromhex(sys.argv[1]))
start = time.perf_counter()
build.submit(request).result(); build.load(request)
print(1000 * (time.perf_counter() - start))
"""


def load() -> None:
    made = problem("mm", *_operands(512, 512, 512, bf16), target=Target.of("cuda")).problem
    for candidate in quack.candidates(made)[:4]:
        request = quack.request(made, candidate.config)[0]
        start = time.perf_counter()
        build.submit(request).result()
        first = time.perf_counter() - start
        given = [sys.executable, "-c", SECOND, pickle.dumps(request).hex()]
        done = subprocess.run(given, capture_output=True, text=True, check=True)
        print(f"{candidate.description}: first {first:.2f} s (to reach: 3), "
              f"second process {float(done.stdout):.2f} ms (10)", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_cutedsl", description=__doc__)
    parser.add_argument("parts", nargs="*", default=["products", "fused", "grouped", "load"])
    parser.add_argument("--most", type=int, default=12, help="candidates of a product")
    options = parser.parse_args()
    for part in options.parts:
        print(f"== {part}")
        {"products": lambda: products(options.most), "fused": fused, "grouped": grouped,
         "load": load}[part]()  # fmt: skip


if __name__ == "__main__":
    main()
