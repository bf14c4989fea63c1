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

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.cutlass_cases import BASE, BF16, VISITED, Case, epilogues, groups, products
from bench.gpu_gemm import CALLS, Recorder, in_turns
from bench.measure import geomean, leaves
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


@dataclass
class Findings:
    """What parts found, for the verdict."""

    rows: dict[str, list[tuple[Case, Times]]] = field(
        default_factory=dict[str, list[tuple[Case, Times]]]
    )
    failed: list[str] = field(default_factory=list[str])
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    cost: dict[str, float] = field(default_factory=dict[str, float])
    random: dict[str, int] = field(default_factory=dict[str, int])
    reference: list[str] = field(default_factory=list[str])


# ---- what is built ahead


class Enough(BaseException):
    """All is known that a compilation was begun for."""


@contextmanager
def collecting(found: dict[str, NvccSource]) -> Iterator[None]:
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


def build(found: Findings, until: float) -> None:
    began = time.perf_counter()
    wanted = sources(every_case(), lambda way, case: way(*case.inputs()))
    there = sum(nvcc.is_built(key) for key in wanted)
    print(f"{len(wanted)} kernels, {there} of them built before", flush=True)
    good, bad = build_all(wanted, until)
    print(f"{good} are there, {bad} were refused: {time.perf_counter() - began:.0f} s", flush=True)
    if bad:
        found.failed.append(f"nvcc refused {bad} kernels")


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


def rows(part: str, found: Findings, cases: Iterable[Case], ways: Callable[[Case], dict[str, Way]],
         until: float) -> None:  # fmt: skip
    """A line for each case; those that fail say why, and count for nothing."""
    mine = found.rows.setdefault(part, [])
    for case in cases:
        if time.monotonic() > until:
            found.left_out[part] = found.left_out.get(part, 0) + 1
            continue
        try:
            times = measured(case, ways(case))
        except Exception as error:
            said = f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0]}"
            found.failed.append(said)
            print(said, flush=True)
            continue
        mine.append((case, times))
        first = next(iter(times))
        shown = "  ".join(f"{name} {us:9.2f} us ({times[first] / us:5.3f})"
                          for name, us in times.items())  # fmt: skip
        print(f"{case.name:36} {shown}  {decisions[-1].winner if decisions else ''}", flush=True)


def alone(found: Findings, until: float) -> None:
    rows("alone", found, products(),
         lambda c: {"cuBLAS": c.function, "CUTLASS": compiled(c, "CUTLASS")}, until)  # fmt: skip


def among(found: Findings, until: float) -> None:
    rows("among", found, products(("bf16", "fp8")),
         lambda c: {"cuBLAS": c.function, "without": compiled(c, OTHERS),
                    "with": compiled(c, f"{OTHERS},CUTLASS")}, until)  # fmt: skip


def fused(found: Findings, until: float) -> None:
    rows("fused", found, groups(),
         lambda c: {"unfused": compiled(c, "ATEN,CUBLASLT"), "CUTLASS": compiled(c, "CUTLASS"),
                    "without": compiled(c, OTHERS),
                    "with": compiled(c, f"{OTHERS},CUTLASS")}, until)  # fmt: skip


def randomly(found: Findings, until: float) -> None:
    """Each is right; fused in one kernel, or not, for a reason that is shown."""
    counts = found.random
    for made, case in epilogues():
        if time.monotonic() > until:
            found.left_out["random"] = found.left_out.get("random", 0) + 1
            continue
        metrics.reset()
        torch.manual_seed(made.seed)
        given = case.inputs()
        try:
            close(case.name, compiled(case, "CUTLASS", **VISITED)(*given), case.function(*given))
        except Exception as error:
            said = f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0]}"
            found.failed.append(said)
            counts["wrong"] = counts.get("wrong", 0) + 1
            print(said, flush=True)
            continue
        taken = metrics.counters["inductor"]["cuda_epilogue_fusion_counter"] > 0
        counts["fused" if taken else "refused"] = counts.get("fused" if taken else "refused", 0) + 1
        why = "fused" if taken else f"apart: {decisions[-1].why if decisions else ''}"
        print(f"{case.name:60} right, {why}", flush=True)


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


def cost(found: Findings, until: float) -> None:
    took = list_milliseconds()
    found.cost["list"] = max(took[1:])
    print(f"a list of candidates: first {took[0]:.1f} ms, then median "
          f"{statistics.median(took[1:]):.2f} ms, at most {max(took[1:]):.2f} ms")  # fmt: skip
    with fresh_cache():
        for name, (m, n, k) in {"first": (4096, 4096, 4096), "second": (8192, 4096, 4096)}.items():
            torch.manual_seed(0)
            a, b = (torch.randn(s, k, device="cuda").bfloat16() for s in (m, n))
            before = metrics.counters["cutlass"]["nvcc_runs"]
            began = time.perf_counter()
            # the second has kernels of its own among the best eight: those of the first alone
            way = torch.compile(torch.mm, backend="tilewright", options={
                **BASE, "max_autotune_gemm_backends": "CUTLASS",
                "cuda.cutlass_max_profiling_configs": 8})  # fmt: skip
            torch._dynamo.reset()
            way(a, b.t())
            torch.cuda.synchronize()
            found.cost[f"{name} seconds"] = time.perf_counter() - began
            found.cost[f"{name} runs"] = metrics.counters["cutlass"]["nvcc_runs"] - before
            print(f"{m}x{n}x{k}: {found.cost[f'{name} seconds']:.1f} s, "
                  f"{found.cost[f'{name} runs']:.0f} nvcc runs", flush=True)  # fmt: skip
    for name in ("a process", "the next"):
        done = subprocess.run([sys.executable, "-c", _SECOND], capture_output=True, text=True)
        if done.returncode:
            found.failed.append(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
            continue
        seconds, runs = done.stdout.split()[-2:]
        found.cost["process runs"] = float(runs)
        print(f"{name}: {float(seconds):.1f} s, {runs} nvcc runs", flush=True)


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


def reference(found: Findings, until: float) -> None:
    for shape in ((4096, 4096, 4096), (8192, 8192, 8192), (1024, 1024, 1024)):
        left = until - time.monotonic()
        if left < 20:
            found.left_out["reference"] = found.left_out.get("reference", 0) + 1
            continue
        given = [sys.executable, "-c", _REFERENCE, *map(str, shape)]
        try:
            done = subprocess.run(given, capture_output=True, text=True, timeout=left)
            last = "".join(done.stderr.strip().splitlines()[-1:])[:160]
            said = done.stdout.strip() if done.returncode == 0 else f"cannot run here: {last}"
        except subprocess.TimeoutExpired:
            said = f"is not done in {left:.0f} s"
        found.reference.append(f"{'x'.join(map(str, shape))}: {said}")
        print(found.reference[-1], flush=True)
        if "us," not in said:
            return


# ---- the verdict


def verdict(found: Findings) -> list[str]:
    """A line for each criterion, and a table of geometric means."""
    lines = ["", "## verdict"]
    lines += _by_kind("alone", found, "CUTLASS", "cuBLAS", TO_REACH)
    lines += _by_kind("among", found, "with", "without", 1.0)
    lines += _by_kind("fused", found, "with", "without", 1.0)
    lines += _by_kind("fused", found, "CUTLASS", "unfused", 1.0)
    c = found.cost
    if c:
        asked = {"list": LIST_MS, "first seconds": FIRST_S, "second runs": 0, "process runs": 0}
        for name, most in asked.items():
            value = c.get(name)
            shown = "not measured" if value is None else f"{value:.1f}"
            lines.append(f"{_mark(value is not None and value <= most)} cost, {name}: {shown} "
                         f"(at most {most:g})")  # fmt: skip
    if found.random:
        wrong = found.random.get("wrong", 0)
        lines.append(f"{_mark(not wrong)} random epilogues: {found.random.get('fused', 0)} fused, "
                     f"{found.random.get('refused', 0)} apart, {wrong} wrong")  # fmt: skip
    lines += [f"     reference, {said}" for said in found.reference]
    lines += [f"     {part}: {count} left out for want of time"
              for part, count in found.left_out.items()]  # fmt: skip
    lines += [f"     failed: {said}" for said in found.failed[:20]]
    return lines


def _by_kind(part: str, found: Findings, ours: str, theirs: str, least: float) -> list[str]:
    mine = found.rows.get(part, [])
    kinds = dict.fromkeys(case.kind for case, _ in mine)
    lines: list[str] = []
    for kind in [*kinds, *(["all"] if len(kinds) > 1 else [])]:
        speeds = [t[theirs] / t[ours] for case, t in mine if kind in ("all", case.kind)]
        mean, won = geomean(speeds), sum(s > 1.0 for s in speeds)
        said = f"{ours} {mean:.3f} of the speed of {theirs} (at least {least:g})"
        lines.append(f"{_mark(mean >= least)} {part}, {kind}: {said}, {won} of {len(speeds)} won")
    return lines


def _mark(is_met: bool) -> str:
    return "met " if is_met else "MISS"


PARTS: dict[str, Callable[[Findings, float], None]] = {
    "build": build, "cost": cost, "alone": alone, "fused": fused, "random": randomly,
    "among": among, "reference": reference,
}  # fmt: skip


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_cutlass", description=__doc__, formatter_class=raw
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--kernels", type=Path, help="a file of `bench.cutlass_ahead`")
    given = parser.parse_args()
    chosen = given.parts or list(PARTS)
    if not torch.cuda.is_available():
        print("there is no card here: `python -m bench.cutlass_ahead FILE` builds its kernels")
        return 1
    if given.kernels is not None:
        new = sharing.add(sharing.read(given.kernels))
        print(f"{new} files of {given.kernels} are new here")
    print(f"{torch.cuda.get_device_name()}, {CALLS} calls in a graph")
    found = Findings()
    ends = time.monotonic() + 60 * given.minutes
    for k, name in enumerate(chosen):
        print(f"\n# {name}", flush=True)
        left = sum(SHARES[other] for other in chosen[k:])
        until = time.monotonic() + SHARES[name] / left * (ends - time.monotonic())
        PARTS[name](found, until)
    print("\n".join(verdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
