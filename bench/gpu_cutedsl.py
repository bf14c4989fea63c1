"""`python -m bench.gpu_cutedsl`: the CuTe DSL provider on a card, with a verdict for each of the
criteria at the end.

Parts, all of them by default, each with a share of `--minutes`:

- load: how long a candidate takes to compile for the first time, and to load in a second process
- template: the documentation's template: three choices, fused with a relu, one kernel for all sizes
- products: its best candidate beside torch's own product (cuBLAS), 14 shapes of 1024 to 16384
- fused: programs with an epilogue, only this provider or only libraries and loop kernels, 12 groups
- grouped: beside a loop of products and ATen's grouped product

All candidates are checked against torch before they are timed; times are medians of CUDA graphs
over rotating operands. What a part had no time for it leaves out, and says so.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure import geomean
from tests.gpu.gemm_cublaslt import microseconds
from tests.products import problem
from tilewright import config, metrics
from tilewright.gemm.cutedsl import build, quack
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.target import Target
from tilewright.testing import fresh_cache
from tilewright.tune import select

bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
SHAPES: tuple[tuple[int, int, int, torch.dtype], ...] = (
    (1024, 1024, 1024, bf16), (2048, 2048, 2048, bf16), (4096, 4096, 4096, bf16),
    (8192, 8192, 8192, bf16), (16384, 4096, 4096, bf16), (4096, 14336, 4096, bf16),
    (4096, 4096, 14336, bf16), (8192, 1024, 8192, bf16), (2048, 16384, 4096, bf16),
    (16384, 8192, 2048, bf16), (4096, 4096, 4096, fp8), (8192, 8192, 8192, fp8),
    (4096, 14336, 4096, fp8), (16384, 4096, 8192, fp8),
)  # fmt: skip
SETS = 3
MOST = 12  # candidates of a product


def _operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    left = torch.randn(m, k, device="cuda").to(dtype)
    right = torch.randn(n, k, device="cuda").to(dtype).t()
    return left, right


def _library(pairs: list[tuple[Tensor, Tensor]], out: list[Tensor]) -> list[Callable[[], Any]]:
    if pairs[0][0].dtype != fp8:
        return [functools.partial(torch.mm, *p, out=o) for p, o in zip(pairs, out, strict=True)]
    one = torch.ones((), device="cuda")
    return [functools.partial(torch._scaled_mm, *p, one, one, out_dtype=bf16) for p in pairs]


@dataclass
class Findings:
    """Figures by name; those of which a list is kept are ratios, ours the faster above 1."""

    ratios: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    most: dict[str, float] = field(default_factory=dict[str, float])
    failed: list[str] = field(default_factory=list[str])
    left_out: list[str] = field(default_factory=list[str])

    def add(self, name: str, ratio: float) -> None:
        self.ratios.setdefault(name, []).append(ratio)

    def raised(self, name: str, value: float) -> None:
        """The largest of what is to be small."""
        self.most[name] = max(value, self.most.get(name, value))


def in_time(name: str, found: Findings, until: float) -> bool:
    if time.monotonic() < until:
        return True
    found.left_out.append(name)
    return False


def products(found: Findings, until: float) -> None:
    for m, n, k, dtype in SHAPES:
        if not in_time(f"{m}x{n}x{k} {dtype}", found, until):
            continue
        pairs = [_operands(m, n, k, dtype) for _ in range(SETS)]
        out = [torch.empty(m, n, device="cuda", dtype=bf16) for _ in range(SETS)]
        library = _library(pairs, out)
        theirs = microseconds(library)
        expected = pairs[0][0].float() @ pairs[0][1].float()
        made = [problem("mm", *p, dtype=bf16, target=Target.of("cuda"), out=o)
                for p, o in zip(pairs, out, strict=True)]  # fmt: skip
        best, who = math.inf, "nobody"
        for candidate in quack.candidates(made[0].problem)[:MOST]:
            try:
                ours = _timed(candidate, made, expected)
            except Exception as error:
                print(f"  {candidate.description}: {type(error).__name__}: {str(error)[:120]}")
                continue
            if ours < best:
                best, who = ours, candidate.description
        found.add("products", theirs / best)
        print(f"{m}x{n}x{k} {dtype}: library {theirs:.1f} us, ours {best:.1f} us, "
              f"{theirs / best:.3f} by {who}", flush=True)  # fmt: skip


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


def fused(found: Findings, until: float) -> None:
    for name, (f, given) in _groups().items():
        if not in_time(name, found, until):
            continue
        times: dict[str, float] = {}
        for backends in ("ATEN,CUBLASLT", "CUTEDSL"):
            torch._dynamo.reset()
            with config.patch(max_autotune=True, max_autotune_gemm_backends=backends):
                compiled = torch.compile(f, backend="tilewright")
                torch.testing.assert_close(compiled(*given), f(*given), rtol=5e-2, atol=1.0)
                times[backends] = microseconds([functools.partial(compiled, *given)])
        library, ours = times["ATEN,CUBLASLT"], times["CUTEDSL"]
        found.add("fused", library / ours)
        print(f"{name}: libraries {library:.1f} us, ours {ours:.1f} us, {library / ours:.3f}",
              flush=True)  # fmt: skip


def grouped(found: Findings, until: float) -> None:
    for groups, rows, k, n in ((8, 4096, 4096, 4096), (16, 8192, 2048, 4096),
                               (64, 16384, 2048, 1408),
                               (8, 1024, 4096, 14336), (32, 4096, 1024, 2048)):  # fmt: skip
        if not in_time(f"{groups} groups of {rows}x{n}x{k}", found, until):
            continue
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
        found.add("over a loop", looped / ours)
        found.add("over ATen", theirs / ours)
        print(f"{groups} groups, {rows}x{n}x{k}: loop {looped:.1f}, ATen {theirs:.1f}, "
              f"ours {ours:.1f} us", flush=True)  # fmt: skip


SECOND = """
import pickle, sys, time
from tilewright import metrics
from tilewright.gemm.cutedsl import build
request = pickle.loads(bytes.fromhex(sys.argv[1]))
start = time.perf_counter()
build.submit(request).result(); build.load(request)
took = 1000 * (time.perf_counter() - start)
print(took, metrics.counters["inductor"]["cutedsl_kernel_cache_miss"])
"""


def load(found: Findings, until: float) -> None:
    """In a fresh cache: what is there already would cost nothing the first time."""
    made = problem("mm", *_operands(512, 512, 512, bf16), target=Target.of("cuda")).problem
    with fresh_cache() as folder:
        for candidate in quack.candidates(made)[:4]:
            if not in_time(candidate.description, found, until):
                continue
            request = quack.request(made, candidate.config)[0]
            start = time.perf_counter()
            build.submit(request).result()
            first = time.perf_counter() - start
            given = [sys.executable, "-c", SECOND, pickle.dumps(request).hex()]
            where = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(folder)}
            done = subprocess.run(given, capture_output=True, text=True, check=True, env=where)
            second, missed = map(float, done.stdout.split())
            found.raised("first", first)
            found.raised("second", second)
            found.raised("compiled again", missed)
            print(f"{candidate.description}: first {first:.2f} s, second process {second:.2f} ms",
                  flush=True)  # fmt: skip


def template(found: Findings, until: float) -> None:
    """The template of the documentation, as its reader would use it."""
    from tests.gpu.cutedsl import documented

    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x + y)

    seen: list[dict[Any, float]] = []
    select.add_feedback_saver(lambda times, *_: seen.append(dict(times)))
    try:
        with documented(), fresh_cache():
            torch._dynamo.reset()
            metrics.reset()
            compiled = torch.compile(f, backend="tilewright", dynamic=True,
                                     options={"max_autotune": True})  # fmt: skip
            for rows, columns in ((128, 128), (1000, 37), (4096, 512)):
                x, y = (torch.randn(rows, columns, device="cuda") for _ in range(2))
                with torch._dynamo.config.patch(error_on_recompile=True):
                    torch.testing.assert_close(compiled(x, y), f(x, y))
            counted = metrics.counters["inductor"]
            assert counted["cutedsl_epilogue_fusion_counter"] == 1, "the relu is apart"
            timed = sum(math.isfinite(t) and "cutedsl" in c.name for one in seen
                        for c, t in one.items())  # fmt: skip
            found.most["template's choices timed"] = timed
            print(f"right at three sizes by one compilation, {timed} choices timed")
    finally:
        select.clear_feedback_savers()


# ---- the verdict

LEAST = {"products": 0.97, "fused": 1.0, "over a loop": 1.5, "over ATen": 1.0}
AT_MOST = {"first": 3.0, "second": 10.0, "compiled again": 0.0}
WON = 8  # of the twelve groups


def verdict(found: Findings) -> list[str]:
    lines = ["", "## verdict"]
    for name, least in LEAST.items():
        speeds = found.ratios.get(name, [])
        if not speeds:
            continue
        mean, won = geomean(speeds), sum(s > 1.0 for s in speeds)
        met = won >= WON if name == "fused" else mean >= least
        asked = f"{WON} to be won" if name == "fused" else f"at least {least:g}"
        lines.append(f"{_mark(met)} {name}: {mean:.3f} ({asked}), {won} of {len(speeds)} won")
    for name, most in AT_MOST.items():
        if name in found.most:
            value = found.most[name]
            lines.append(f"{_mark(value <= most)} {name}: {value:.2f} (at most {most:g})")
    timed = found.most.get("template's choices timed")
    if timed is not None:
        lines.append(f"{_mark(timed == 3)} template: {timed:g} of 3 choices timed")
    lines += [f"     left out for want of time: {name}" for name in found.left_out]
    return [*lines, *(f"     failed: {said}" for said in found.failed)]


def _mark(is_met: bool) -> str:
    return "met " if is_met else "MISS"


PARTS: dict[str, Callable[[Findings, float], None]] = {
    "load": load, "template": template, "products": products, "fused": fused, "grouped": grouped,
}  # fmt: skip
SHARES = {"load": 0.5, "template": 0.3, "products": 4.0, "fused": 2.5, "grouped": 1.7}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_cutedsl", description=__doc__, formatter_class=raw
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    given = parser.parse_args()
    chosen = given.parts or list(PARTS)
    if not torch.cuda.is_available():
        print("there is no card here")
        return 1
    found = Findings()
    ends = time.monotonic() + 60 * given.minutes
    for k, name in enumerate(chosen):
        print(f"\n# {name}", flush=True)
        left = sum(SHARES[other] for other in chosen[k:])
        until = time.monotonic() + SHARES[name] / left * (ends - time.monotonic())
        try:
            PARTS[name](found, until)
        except Exception as error:
            found.failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    print("\n".join(verdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
