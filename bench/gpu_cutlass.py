"""`python -m bench.gpu_cutlass`: CUTLASS on a card, beside cuBLAS and among the other providers,
with a verdict for each of the criteria at the end.

Parts, all of them by default, each with a share of `--minutes`:

- build: the kernels that the others will ask for, as many compilers at once as there are cores
- cost: milliseconds of a list of candidates, nvcc runs and seconds of a first shape, of a second
  shape of the same kernel, and of a process that comes after
- alone: `max_autotune_gemm_backends="CUTLASS"` against eager, bf16, fp16, fp8 and int8
- fused: bias + gelu, residual + relu, scale + row, several results: CUTLASS's epilogues against the
  library and a kernel after it, and the default providers with and without CUTLASS
- random: random epilogues, each right or refused with a reason
- among: the default providers with and without CUTLASS, bf16 and fp8
- reference: the reference's CUTLASS backend, for what it can compute here in the time

What a part had no time for it leaves out, and says so. Kernels need not be built on the card:
`python -m bench.cutlass_ahead FILE` packs them on any machine that has nvcc, `--kernels FILE` takes
them from there. Times are of `bench.gpu_gemm`: CUDA graphs that take turns on the same inputs.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench import rows
from bench.cutlass_cases import BASE, BF16, VISITED, Case, Drawn, epilogues, groups, products
from bench.gpu_gemm import Recorder, in_turns
from bench.measure import geomean, leaves
from bench.rows import Found, Row, mark
from tilewright import config, metrics, sharing
from tilewright.gemm.choose import decisions
from tilewright.gemm.cutlass.provider import Cutlass, CutlassCandidate
from tilewright.runtime import nvcc
from tilewright.runtime.nvcc import NvccSource
from tilewright.testing import fresh_cache
from tilewright.tune import select

OTHERS = "ATEN,CUBLASLT,TRITON"
SETS = 4
TO_REACH = 0.97  # of cuBLAS, by CUTLASS alone
SHARES = {"build": 3.0, "cost": 1.5, "alone": 2.0, "fused": 1.5, "random": 0.7, "among": 2.0,
          "reference": 1.0}  # fmt: skip
LIST_MS, FIRST_S = 50.0, 45.0
Way = Callable[..., Any]
Times = dict[str, float]


# ---- what is built ahead


class Enough(BaseException):
    """All is known that a compilation was begun for."""


@contextmanager
def collecting(found: dict[str, NvccSource]) -> Generator[None]:
    """Gathers CUTLASS's kernels for the product that is compiled meanwhile, and ends that."""

    def note(_: Any, trials: Sequence[Any]) -> None:
        for trial in trials:
            candidate = getattr(trial, "candidate", None)
            if isinstance(candidate, CutlassCandidate):
                found.setdefault(candidate.binary, candidate.source)
        raise Enough

    before, select.collect = select.collect, note
    try:
        yield
    except Enough:
        pass
    finally:
        select.collect = before


def sources(cases: Iterable[Case], run: Callable[[Way, Case], Any]) -> dict[str, NvccSource]:
    """CUTLASS's kernels for these, by key; nothing is measured, built or run."""
    found: dict[str, NvccSource] = {}
    for case in cases:
        with collecting(found):
            run(compiled(case, "ATEN,CUTLASS"), case)
    return found


def build_all(wanted: dict[str, NvccSource], until: float) -> tuple[int, int]:
    """How many were built, and how many nvcc refused; the others go on being built."""
    made = {nvcc.submit(source, key): key for key, source in wanted.items()}
    good = bad = 0
    try:
        for future in as_completed(made, timeout=max(1.0, until - time.monotonic())):
            good, bad = good + (future.exception() is None), bad + (future.exception() is not None)
            if future.exception() is not None:
                print(f"  {wanted[made[future]].name}: {str(future.exception())[:200]}")
    except TimeoutError:
        print(f"  {len(made) - good - bad} of {len(made)} are not built in the time")
    return good, bad


def every_case() -> Iterator[Case]:
    yield from products()
    yield from groups()
    yield from (case for _, case in epilogues())


def build(seconds: float) -> Found:
    began = time.perf_counter()
    wanted = sources(every_case(), lambda way, case: way(*case.inputs()))
    there = sum(nvcc.is_built(key) for key in wanted)
    print(f"{len(wanted)} kernels, {there} of them built before", flush=True)
    good, bad = build_all(wanted, time.monotonic() + seconds)
    took = time.perf_counter() - began
    shown = f"{good} of {len(wanted)} are there, {bad} were refused: {took:.0f} s"
    return {"refused": bad, "shown": shown}


# ---- measuring


def compiled(case: Case, backends: str, **options: Any) -> Way:
    torch._dynamo.reset()
    given = {**BASE, **case.options, "max_autotune_gemm_backends": backends, **options}
    return torch.compile(case.function, backend="tilewright", dynamic=False, options=given)


def measured(case: Case, ways: dict[str, Way]) -> Times:
    """Microseconds of each way, from turns they took together."""
    torch.manual_seed(0)
    sets = [case.inputs() for _ in range(SETS)]
    right = case.function(*sets[0])
    for name, way in ways.items():
        close(name, way(*sets[0]), right)
    recorder = Recorder()
    graphs = {name: recorder.recorded(way, sets) for name, way in ways.items()}
    turns = in_turns(graphs)
    return {name: statistics.median(t[name] for t in turns) for name in ways}


def close(name: str, result: Any, right: Any, most: float = 0.1) -> None:
    for one, other in zip(leaves(result), leaves(right), strict=True):
        scale = other.double().square().mean().sqrt()
        off = float((one.double() - other.double()).abs().max() / scale)
        assert off < most, f"{name} is off by {off:.3g} of its scale"


def timed(case: Case, ways: Callable[[Case], dict[str, Way]]) -> Found:
    times = measured(case, ways(case))
    first = next(iter(times))
    shown = "  ".join(f"{name} {us:9.2f} us ({times[first] / us:5.3f})"
                      for name, us in times.items())  # fmt: skip
    winner = decisions[-1].winner if decisions else ""
    return {"kind": case.kind, "times": times, "winner": winner, "shown": f"{shown}  {winner}"}


def alone(case: Case) -> dict[str, Way]:
    return {"cuBLAS": case.function, "CUTLASS": compiled(case, "CUTLASS")}


def among(case: Case) -> dict[str, Way]:
    return {"cuBLAS": case.function, "without": compiled(case, OTHERS),
            "with": compiled(case, f"{OTHERS},CUTLASS")}  # fmt: skip


def fused(case: Case) -> dict[str, Way]:
    return {"unfused": compiled(case, "ATEN,CUBLASLT"), "CUTLASS": compiled(case, "CUTLASS"),
            "without": compiled(case, OTHERS),
            "with": compiled(case, f"{OTHERS},CUTLASS")}  # fmt: skip


def randomly(made: Drawn, case: Case) -> Found:
    """Right; fused in one kernel, or not, for a reason that is shown."""
    metrics.reset()
    torch.manual_seed(made.seed)
    given = case.inputs()
    close(case.name, compiled(case, "CUTLASS", **VISITED)(*given), case.function(*given))
    taken = metrics.counters["inductor"]["cuda_epilogue_fusion_counter"] > 0
    why = "fused" if taken else f"apart: {decisions[-1].why if decisions else ''}"
    return {"random": "fused" if taken else "apart", "shown": f"right, {why}"}


# ---- cost

_SECOND = """
import sys, time, torch
from tilewright import metrics
a = torch.randn(4096, 4096, device="cuda").bfloat16()
b = torch.randn(4096, 4096, device="cuda").bfloat16().t()
f = torch.compile(torch.mm, backend="tilewright",
                  options={"max_autotune": True, "max_autotune_gemm_backends": "CUTLASS"})
began = time.perf_counter(); f(a, b); torch.cuda.synchronize()
print(time.perf_counter() - began, metrics.counters['cutlass']['nvcc_runs'])
"""


def list_milliseconds(count: int = 24) -> list[float]:
    """Of lists of candidates, for one size after the other. Needs no card."""
    from tests.products import problem

    provider = Cutlass()
    took: list[float] = []
    with config.patch(BASE):
        for k in range(count):
            a, b = torch.empty(256 + 8 * k, 512, dtype=BF16), torch.empty(512, 1024, dtype=BF16)
            made = problem("mm", a, b).problem
            began = time.perf_counter()
            assert not provider.supports(made)
            for candidate in provider.candidates(made, "default"):
                candidate.kernel()
            took.append(1000 * (time.perf_counter() - began))
    return took


def lists() -> Found:
    took = list_milliseconds()
    shown = (f"first {took[0]:.1f} ms, then median {statistics.median(took[1:]):.2f} ms, at most "
             f"{max(took[1:]):.2f} ms")  # fmt: skip
    return {"cost": {"list": max(took[1:])}, "shown": shown}


def shapes() -> Found:
    """One after the other from an empty cache: the second has kernels of its own among the best
    eight, those of the first alone."""
    cost: dict[str, float] = {}
    with fresh_cache():
        for name, (m, n, k) in {"first": (4096, 4096, 4096), "second": (8192, 4096, 4096)}.items():
            torch.manual_seed(0)
            a, b = (torch.randn(s, k, device="cuda").bfloat16() for s in (m, n))
            before = metrics.counters["cutlass"]["nvcc_runs"]
            began = time.perf_counter()
            torch._dynamo.reset()
            way = torch.compile(torch.mm, backend="tilewright", options={
                **BASE, "max_autotune_gemm_backends": "CUTLASS",
                "cuda.cutlass_max_profiling_configs": 8})  # fmt: skip
            way(a, b.t())
            torch.cuda.synchronize()
            cost[f"{name} seconds"] = time.perf_counter() - began
            cost[f"{name} runs"] = metrics.counters["cutlass"]["nvcc_runs"] - before
    return {"cost": cost, "shown": ", ".join(f"{k} {v:.1f}" for k, v in cost.items())}


def process() -> Found:
    done = subprocess.run([sys.executable, "-c", _SECOND], capture_output=True, text=True)
    if done.returncode:
        return {"failed": "".join(done.stderr.strip().splitlines()[-1:])[:200]}
    seconds, runs = map(float, done.stdout.split()[-2:])
    return {"cost": {"process runs": runs}, "shown": f"{seconds:.1f} s, {runs:.0f} nvcc runs"}


# ---- the reference

_REFERENCE = """
import sys, torch
import torch._inductor.config as config
m, n, k = map(int, sys.argv[1:4])
config.max_autotune = True
config.max_autotune_gemm_backends = "CUTLASS"
options = getattr(config, "cutlass", config.cuda)
options.cutlass_max_profiling_configs = 4
import cutlass_library
options.cutlass_dir = cutlass_library.source_path
a = torch.randn(m, k, device="cuda").bfloat16()
b = torch.randn(n, k, device="cuda").bfloat16().t()
f = torch.compile(torch.mm, dynamic=False)
torch.testing.assert_close(f(a, b), a @ b, rtol=2e-2, atol=1.0)
def us(g):
    for _ in range(3): g(a, b)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20): g(a, b)
    end.record(); end.synchronize()
    return 50 * start.elapsed_time(end)
theirs, library = us(f), us(torch.mm)
print(f"reference {theirs:.1f} us, cuBLAS {library:.1f} us ({library / theirs:.3f})")
"""


def reference(shape: tuple[int, int, int], seconds: float) -> Found:
    given = [sys.executable, "-c", _REFERENCE, *map(str, shape)]
    try:
        done = subprocess.run(given, capture_output=True, text=True, timeout=seconds)
        last = "".join(done.stderr.strip().splitlines()[-1:])[:160]
        said = done.stdout.strip() if done.returncode == 0 else f"cannot run here: {last}"
    except subprocess.TimeoutExpired:
        said = f"is not done in {seconds:.0f} s"
    return {"reference": said, "shown": said}


# ---- the verdict


def verdict(found: Sequence[Found]) -> list[str]:
    """A line for each criterion, and a table of geometric means."""
    lines = ["", "## verdict"]
    lines += _by_kind("alone", found, "CUTLASS", "cuBLAS", TO_REACH)
    lines += _by_kind("among", found, "with", "without", 1.0)
    lines += _by_kind("fused", found, "with", "without", 1.0)
    lines += _by_kind("fused", found, "CUTLASS", "unfused", 1.0)
    cost: dict[str, float] = {}
    for f in found:
        cost |= f.get("cost", {})
    asked = {"list": LIST_MS, "first seconds": FIRST_S, "second runs": 0, "process runs": 0}
    for name, most in asked.items() if cost else ():
        value = cost.get(name)
        shown = "not measured" if value is None else f"{value:.1f}"
        lines.append(f"{mark(value is not None and value <= most)} cost, {name}: {shown} "
                     f"(at most {most:g})")  # fmt: skip
    lines += _random([f for f in found if f["part"] == "random"])
    lines += [f"     nvcc refused {f['refused']} kernels" for f in found if f.get("refused")]
    lines += [f"     reference, {f['row']}: {f['reference']}" for f in found if "reference" in f]
    return [*lines, *rows.rest(found)]


def _random(found: Sequence[Found]) -> list[str]:
    kinds = [f.get("random", "wrong") for f in found if "left_out" not in f]
    if not kinds:
        return []
    counts = {kind: kinds.count(kind) for kind in ("fused", "apart", "wrong")}
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return [f"{mark(not counts['wrong'])} random epilogues: {shown}"]


def _by_kind(part: str, found: Sequence[Found], ours: str, theirs: str, least: float) -> list[str]:
    mine = [f for f in found if f["part"] == part and "times" in f]
    kinds = dict.fromkeys(f["kind"] for f in mine)
    lines: list[str] = []
    for kind in [*kinds, *(["all"] if len(kinds) > 1 else [])]:
        times = [f["times"] for f in mine if kind in ("all", f["kind"])]
        speeds = [t[theirs] / t[ours] for t in times]
        mean, won = geomean(speeds), sum(s > 1.0 for s in speeds)
        said = f"{ours} {mean:.3f} of the speed of {theirs} (at least {least:g})"
        lines.append(f"{mark(mean >= least)} {part}, {kind}: {said}, {won} of {len(speeds)} won")
    return lines


def every_row(chosen: Sequence[str], seconds: float) -> Iterator[Row]:
    """Of the parts, in their order; `seconds` are for all of them."""
    building = seconds * SHARES["build"] / sum(SHARES.values())
    made: dict[str, list[Row]] = {
        "build": [Row("build", "all kernels", functools.partial(build, building), building + 60)],
        "cost": [Row("cost", "a list of candidates", lists),
                 Row("cost", "two shapes", shapes, 150.0),
                 *(Row("cost", name, process, 90.0) for name in ("a process", "the next"))],
        "alone": [_row("alone", case, alone) for case in products()],
        "fused": [_row("fused", case, fused) for case in groups()],
        "random": [Row("random", case.name, functools.partial(randomly, made, case))
                   for made, case in epilogues()],
        "among": [_row("among", case, among) for case in products(("bf16", "fp8"))],
        "reference": [Row("reference", "x".join(map(str, shape)),
                          functools.partial(reference, shape, 50.0))
                      for shape in ((4096, 4096, 4096), (8192, 8192, 8192))],
    }  # fmt: skip
    for part in chosen:
        yield from made[part]


def _row(part: str, case: Case, ways: Callable[[Case], dict[str, Way]]) -> Row:
    return Row(part, case.name, functools.partial(timed, case, ways))


def main(argv: Sequence[str] | None = None) -> int:
    parser = rows.parser("bench.gpu_cutlass", __doc__, SHARES)
    parser.add_argument("--kernels", type=Path, help="a file of `bench.cutlass_ahead`")
    arguments = sys.argv[1:] if argv is None else list(argv)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no card here: `python -m bench.cutlass_ahead FILE` builds its kernels")
        return 1
    if given.kernels is not None and not given.worker:
        new = sharing.add(sharing.read(given.kernels))
        print(f"{new} files of {given.kernels} are new here")
    chosen = given.parts or list(SHARES)
    found = every_row(chosen, 60 * given.minutes)
    return rows.run("bench.gpu_cutlass", given, arguments, found, SHARES, verdict)


if __name__ == "__main__":
    sys.exit(main())
