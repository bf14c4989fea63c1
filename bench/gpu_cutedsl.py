"""`python -m bench.gpu_cutedsl`: the CuTe DSL provider on a card, with a verdict for each of the
criteria at the end.

Parts, all of them by default, each with a share of `--minutes`:

- load: how long a candidate takes to compile for the first time, and to load in a second process
- template: the documentation's template: three choices, fused with a relu, one kernel for all sizes
- products: its best candidate beside torch's own product (cuBLAS), 14 shapes of 1024 to 16384
- fused: programs with an epilogue, only this provider or only libraries and loop kernels, 14 groups
- grouped: beside a loop of products and ATen's grouped product

All candidates are checked against torch before they are timed; times are medians of CUDA graphs
over rotating operands. What a part had no time for it leaves out, and says so.
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import rows
from bench.measure import geomean
from bench.rows import Found, Row, mark, said
from tests.gpu.gemm_cublaslt import microseconds
from tests.products import problem
from tilewright import config, metrics
from tilewright.gemm.choose import decisions
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


def product(m: int, n: int, k: int, dtype: torch.dtype) -> Found:
    pairs = [_operands(m, n, k, dtype) for _ in range(SETS)]
    out = [torch.empty(m, n, device="cuda", dtype=bf16) for _ in range(SETS)]
    theirs = microseconds(_library(pairs, out))
    expected = pairs[0][0].float() @ pairs[0][1].float()
    made = [problem("mm", *p, dtype=bf16, target=Target.of("cuda"), out=o)
            for p, o in zip(pairs, out, strict=True)]  # fmt: skip
    candidates = quack.candidates(made[0].problem)[:MOST]
    sources = [c.kernel().source for c in candidates]
    for source in sources:  # as many compilers at once as there are cores
        assert isinstance(source, CuteSource)
        build.submit(source.request)
    best, who, failed = math.inf, "nobody", list[str]()
    for candidate in candidates:
        try:
            ours = _timed(candidate, made, expected)
        except Exception as error:
            failed.append(f"{candidate.description}: {said(error)}")
            continue
        if ours < best:
            best, who = ours, candidate.description
    if not math.isfinite(best):
        raise RuntimeError(f"no candidate ran: {'; '.join(failed)[:300]}")
    shown = f"library {theirs:.1f} us, ours {best:.1f} us, {theirs / best:.3f} by {who}"
    return {"x": theirs / best, "candidates failed": failed,
            "shown": f"{shown} {'; '.join(failed)[:300]}"}  # fmt: skip


def _timed(candidate: quack.QuackCandidate, made: list[Any], expected: Tensor) -> float:
    kernel = candidate.kernel()
    assert isinstance(kernel.source, CuteSource)
    build.load(kernel.source.request)  # what cannot be loaded would be torch's own operation
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
    gate, up = (new(14336, 4096).t() for _ in range(2))
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
        "swiglu": (lambda x, w, v: F.silu(torch.mm(x, w)) * torch.mm(x, v), (x, gate, up)),
        "swiglu kept": (lambda x, w, v: (lambda g, u: (g, u, F.silu(g) * u))(
            torch.mm(x, w), torch.mm(x, v)), (x, gate, up)),
        "two results": (lambda x, w, b: (lambda z: (z, torch.relu(z)))(torch.addmm(b, x, w)),
                        (x, w, bias)),
        "gelu backward": (lambda x, w, r: torch.ops.aten.gelu_backward(torch.mm(x, w), r),
                          (x, w, res)),
        "relu backward": (lambda x, w, r: torch.where(r > 0, torch.mm(x, w), 0.0), (x, w, res)),
        "tanh scale": (lambda x, w: torch.tanh(torch.mm(x, w)) * 0.5, (x, w)),
    }  # fmt: skip


def fused(name: str) -> Found:
    f, given = _groups()[name]
    times: dict[str, float] = {}
    for backends in ("ATEN,CUBLASLT", "CUTEDSL"):
        torch._dynamo.reset()
        with config.patch(max_autotune=True, max_autotune_gemm_backends=backends):
            compiled = torch.compile(f, backend="tilewright")
            torch.testing.assert_close(compiled(*given), f(*given), rtol=5e-2, atol=1.0)
            times[backends] = microseconds([functools.partial(compiled, *given)])
    library, ours = times["ATEN,CUBLASLT"], times["CUTEDSL"]
    winner = decisions[-1].winner if decisions else ""
    shown = f"libraries {library:.1f}, ours {ours:.1f} us, {library / ours:.3f} by {winner}"
    return {"x": library / ours, "shown": shown}


GROUPED = ((8, 4096, 4096, 4096), (16, 8192, 2048, 4096), (64, 16384, 2048, 1408),
           (8, 1024, 4096, 14336), (32, 4096, 1024, 2048))  # fmt: skip


def grouped(groups: int, many: int, k: int, n: int) -> Found:
    a = torch.randn(many, k, device="cuda", dtype=bf16)
    b = torch.randn(groups, k, n, device="cuda", dtype=bf16)
    ends = [round(many * (g + 1) / groups / 8) * 8 for g in range(groups)]
    offs = torch.tensor(ends, dtype=torch.int32).to("cuda")
    starts = [0, *ends]

    def loop() -> Tensor:
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
    return {"over a loop": looped / ours, "over ATen": theirs / ours,
            "shown": f"loop {looped:.1f}, ATen {theirs:.1f}, ours {ours:.1f} us"}  # fmt: skip


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


def load(which: int) -> Found:
    """In a fresh cache: what is there already would cost nothing the first time. The first
    compilation of a process pays for the DSL's import too."""
    made = problem("mm", *_operands(512, 512, 512, bf16), target=Target.of("cuda")).problem
    with fresh_cache() as folder:
        candidate = quack.candidates(made)[which]
        request = quack.request(made, candidate.config)[0]
        start = time.perf_counter()
        build.submit(request).result()
        first = time.perf_counter() - start
        given = [sys.executable, "-c", SECOND, pickle.dumps(request).hex()]
        where = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(folder)}
        done = subprocess.run(given, capture_output=True, text=True, check=True, env=where)
        second, missed = map(float, done.stdout.split())
    return {"first": first, "second": second, "compiled again": missed,
            "shown": f"first {first:.2f} s, second process {second:.2f} ms"}  # fmt: skip


def template() -> Found:
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
            for many, columns in ((128, 128), (1000, 37), (4096, 512)):
                x, y = (torch.randn(many, columns, device="cuda") for _ in range(2))
                with torch._dynamo.config.patch(error_on_recompile=True):
                    torch.testing.assert_close(compiled(x, y), f(x, y))
            counted = metrics.counters["inductor"]
            fused = counted["cutedsl_epilogue_fusion_counter"]
            timed = sum(math.isfinite(t) and "cutedsl" in c.name for one in seen
                        for c, t in one.items())  # fmt: skip
    finally:
        select.clear_feedback_savers()
    shown = f"right at three sizes by one compilation, {timed} choices timed, {fused} relu fused"
    return {"timed": timed, "relu fused": fused, "shown": shown}


# ---- the verdict

LEAST = {"products": 0.97, "fused": 1.0, "over a loop": 1.5, "over ATen": 1.0}
AT_MOST = {"first": 3.0, "second": 10.0, "compiled again": 0.0}
WON = 8  # of the groups
LOADED = 4  # candidates of which loading is timed


def verdict(found: Sequence[Found]) -> list[str]:
    lines = ["", "## verdict"]
    for name, least in LEAST.items():
        speeds = _figures(found, name)
        if not speeds:
            continue
        mean, won = geomean(speeds), sum(s > 1.0 for s in speeds)
        met = won >= WON if name == "fused" else mean >= least
        asked = f"{WON} to be won" if name == "fused" else f"at least {least:g}"
        lines.append(f"{mark(met)} {name}: {mean:.3f} ({asked}), {won} of {len(speeds)} won")
    for name, most in AT_MOST.items():
        values = [f[name] for f in found if name in f]
        if values:
            lines.append(
                f"{mark(max(values) <= most)} {name}: {max(values):.2f} (at most {most:g})"
            )
    for f in found:
        if "timed" in f:
            met = f["timed"] == 3 and f["relu fused"] == 1
            lines.append(f"{mark(met)} template: {f['timed']:g} of 3 choices timed")
    return [*lines, *rows.rest(found)]


def _figures(found: Sequence[Found], name: str) -> list[float]:
    """Ratios, ours the faster above 1: those of a part, or under a name of their own."""
    return [f["x"] if f["part"] == name else f[name] for f in found
            if name in f or (f["part"] == name and "x" in f)]  # fmt: skip


SHARES = {"load": 0.5, "template": 0.3, "products": 4.0, "fused": 2.5, "grouped": 1.7}
NAMES = ("bias gelu", "bias gelu wide", "bias relu", "residual", "bias residual", "scale", "silu",
         "silu gate", "swiglu", "swiglu kept", "two results", "gelu backward", "relu backward",
         "tanh scale")  # fmt: skip


def every_row(chosen: Sequence[str]) -> Iterator[Row]:
    part = functools.partial
    made: dict[str, list[Row]] = {
        "load": [Row("load", f"candidate {k}", part(load, k)) for k in range(LOADED)],
        "template": [Row("template", "of the documentation", template)],
        "products": [Row("products", f"{m}x{n}x{k} {dtype}", part(product, m, n, k, dtype))
                     for m, n, k, dtype in SHAPES],
        "fused": [Row("fused", name, part(fused, name), 90.0) for name in NAMES],
        "grouped": [Row("grouped", f"{g} groups of {m}x{n}x{k}", part(grouped, g, m, k, n), 90.0)
                    for g, m, k, n in GROUPED],
    }  # fmt: skip
    for name in chosen:
        yield from made[name]


def main(argv: Sequence[str] | None = None) -> int:
    parser = rows.parser("bench.gpu_cutedsl", __doc__, SHARES)
    arguments = sys.argv[1:] if argv is None else list(argv)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no card here")
        return 1
    found = every_row(given.parts or list(SHARES))
    return rows.run("bench.gpu_cutedsl", given, arguments, found, SHARES, verdict)


if __name__ == "__main__":
    sys.exit(main())
