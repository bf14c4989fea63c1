"""`python -m bench.gpu_products`: what products do beside single ones of known sizes, in one run.

Sections, each with a part of the time: `dynamic` (one compilation of linear + gelu + linear, at
random numbers of rows, beside eager and beside kernels tuned for that number alone), `grouped`,
`gates` (two products of one operand), `convolutions` (those of ResNet-50, ConvNeXt and a U-Net,
with what follows them). The table ends with a verdict for each criterion. `bench.gpu_gemm` and
`bench.gpu_narrow` measure single products, fused groups and those of few bits.

`--host` measures `dynamic` on a CPU: processor time of one thread, the least of several turns.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gemm_cases import Case, rand
from bench.gpu_gemm import Recorder, in_turns, line, ratio, row
from bench.measure import geomean
from tilewright.gemm.choose import decisions

LAST = torch.channels_last
SHOW = functools.partial(print, flush=True)
TURNS = 7  # on a CPU, of each number of rows
LEAST_TURN = 2e-3  # seconds of a turn there
STATIC_EVERY = 5  # one number of rows in so many is tuned for by itself too


# ---- sizes that change


def layer(device: str) -> tuple[nn.Module, int]:
    """The layer, and what a row has."""
    wide, inner = (1024, 4096) if device == "cuda" else (256, 1024)
    made = nn.Sequential(nn.Linear(wide, inner), nn.GELU(), nn.Linear(inner, wide)).eval()
    return made.to(device, torch.bfloat16 if device == "cuda" else torch.float32), wide


def rows_drawn(count: int, seed: int, most: int) -> list[int]:
    """Of all magnitudes alike, 1 and the largest among them."""
    draw = random.Random(seed)
    found = {1, most}
    while len(found) < min(count, most):
        found.add(round(most ** draw.random()))
    return sorted(found)


def dynamic(options: argparse.Namespace, end: float) -> list[str]:
    device = "cpu" if options.host else "cuda"
    model, wide = layer(device)
    ours = torch.compile(model, backend="tilewright", mode="max-autotune-no-cudagraphs")
    # the first call has a size of its own that is none of those that are measured
    began, mark = time.perf_counter(), len(decisions)
    _called(ours, _input(67, wide, device))
    seconds = time.perf_counter() - began
    SHOW(f"dynamic: compiled and tuned in {seconds:.0f} s")
    for decision in itertools.islice(decisions, mark, None):
        SHOW(f"  {decision.winner}: {decision.why}")
    reports: list[dict[str, float]] = []
    for k, rows in enumerate(rows_drawn(options.rows, options.seed, 8192)):
        if time.perf_counter() > end:
            SHOW("  out of time")
            break
        calls = {"eager": model, "tilewright": ours}
        if k % STATIC_EVERY == STATIC_EVERY - 1:
            calls["static"] = _tuned_for(model, rows, wide, device)
        found = _at(calls, rows, wide, device)
        reports.append(found)
        static = f", {found['static']:.2f} of a static tune" if "static" in found else ""
        SHOW(f"  {rows} rows: {found['eager']:.2f} of eager's speed{static}")
    return _verdict_of_sizes(reports)


def _input(rows: int, wide: int, device: str) -> Tensor:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = torch.randn(rows, wide, device=device, dtype=dtype)
    torch._dynamo.decorators.mark_unbacked(made, 0)
    return made


def _called(fn: Callable[..., Any], x: Tensor) -> Any:
    with torch.no_grad():
        return fn(x)


def _tuned_for(model: nn.Module, rows: int, wide: int, device: str) -> Callable[..., Any]:
    def alone(x: Tensor) -> Any:
        return model(x)

    made = torch.compile(alone, backend="tilewright", mode="max-autotune-no-cudagraphs",
                         dynamic=False)  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    _called(made, torch.randn(rows, wide, device=device, dtype=dtype))
    return made


def _at(calls: dict[str, Callable[..., Any]], rows: int, wide: int, device: str
        ) -> dict[str, float]:  # fmt: skip
    """How many times as fast ours is as each, for so many rows; values are compared first."""
    sets = [(_input(rows, wide, device),) for _ in range(4)]
    plain = [(torch.empty_like(x).copy_(x),) for (x,) in sets]
    given = {name: plain if name == "static" else sets for name in calls}
    expected = _called(calls["eager"], sets[0][0])
    found = _called(calls["tilewright"], sets[0][0])
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
    if device == "cpu":
        times = _processor_times(calls, given)
        return {name: times[name] / times["tilewright"] for name in times}
    recorder = Recorder()
    with torch.no_grad():
        graphs = {name: recorder.recorded(fn, given[name]) for name, fn in calls.items()}
    turns = in_turns(graphs)
    return {name: ratio(turns, name) for name in graphs}


def _processor_times(calls: dict[str, Callable[..., Any]], given: dict[str, Any]
                     ) -> dict[str, float]:  # fmt: skip
    best = dict.fromkeys(calls, float("inf"))
    for name in [n for _ in range(TURNS) for n in calls]:
        count, began = 0, time.process_time()
        while (spent := time.process_time() - began) < LEAST_TURN or not count:
            _called(calls[name], given[name][count % 4][0])
            count += 1
        best[name] = min(best[name], spent / count)
    return best


def _verdict_of_sizes(reports: Sequence[dict[str, float]]) -> list[str]:
    if not reports:
        return ["dynamic: nothing was measured"]
    eager = [r["eager"] for r in reports]
    static = [r["static"] for r in reports if "static" in r]
    lines: list[str] = []
    lines.append(f"dynamic: {geomean(eager):.3f} of eager's speed (geomean of {len(eager)}), worst "
                 f"{min(eager):.3f}: {_met(min(eager) >= 0.98)} (never under 0.98)")  # fmt: skip
    if static:
        lines.append(f"dynamic: {min(static):.3f} of a static tune at worst, of {len(static)}: "
                     f"{_met(min(static) >= 0.95)} (within 5 %)")  # fmt: skip
    return lines


def _met(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"


# ---- cases of known sizes


@dataclass(frozen=True)
class Section:
    cases: Callable[[], list[Case]]
    geomean: float  # over eager, to be reached
    least: float  # of each case


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if a.dtype != torch.float64:
        return torch.ops.aten._grouped_mm(a, b, ends)
    bounds = [0, *ends.tolist()]
    parts = [a[s:e] @ b[g] for g, (s, e) in enumerate(itertools.pairwise(bounds))]
    return torch.cat(parts)


def expert(a: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, ends: Tensor) -> Tensor:
    """As a mixture of experts has it."""
    hidden = F.silu(grouped_mm(a, w1, ends)) * grouped_mm(a, w3, ends)
    return grouped_mm(hidden, w2, ends)


def _ends(rows: int, groups: int) -> Tensor:
    """Uneven, at multiples of 8; one group is empty."""
    draw = random.Random(rows + groups)
    inner = sorted(8 * draw.randrange(rows // 8 + 1) for _ in range(groups - 2))
    ends = [*inner, inner[-1], rows] if groups > 2 else [rows // 2, rows]
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def grouped_cases() -> list[Case]:
    sizes = [(256, 8, 4096, 1024), (2048, 8, 4096, 1024), (8192, 8, 2048, 4096),
             (4096, 64, 2048, 1408), (16384, 64, 2048, 1408), (512, 128, 2048, 768)]  # fmt: skip
    found = [Case(f"rows {m} in {g} groups, {k} to {n}", grouped_mm,
                  lambda m=m, g=g, n=n, k=k: (rand(m, k), rand(g, n, k).mT, _ends(m, g)))
             for m, g, k, n in sizes]  # fmt: skip
    return [*found, *(Case(f"expert {m} rows in {g} groups, {k} to {n}", expert,
                           lambda m=m, g=g, n=n, k=k: (rand(m, k), rand(g, n, k).mT,
                                                       rand(g, n, k).mT, rand(g, k, n).mT,
                                                       _ends(m, g)), fused=True)
                      for m, g, k, n in sizes[1:5])]  # fmt: skip


def gate(x: Tensor, w1: Tensor, w3: Tensor) -> Tensor:
    return F.silu(x @ w1) * (x @ w3)


def normed_gate(x: Tensor, scale: Tensor, w1: Tensor, w3: Tensor) -> Tensor:
    return gate(F.rms_norm(x, x.shape[-1:], scale), w1, w3)


def gate_cases() -> list[Case]:
    sizes = [(16, 14336, 4096), (512, 11008, 4096), (4096, 11008, 4096), (4096, 14336, 4096),
             (8192, 8192, 2048), (2048, 5632, 2048)]  # fmt: skip
    found = [Case(f"gate {m}x{n}x{k}", gate,
                  lambda m=m, n=n, k=k: (rand(m, k), rand(n, k).t(), rand(n, k).t()), fused=True)
             for m, n, k in sizes]  # fmt: skip
    return [*found, *(Case(f"norm and gate {m}x{n}x{k}", normed_gate,
                           lambda m=m, n=n, k=k: (rand(m, k), rand(1, k)[0], rand(n, k).t(),
                                                  rand(n, k).t()), fused=True)
                      for m, n, k in sizes[1:3])]  # fmt: skip


def _image(n: int, c: int, side: int) -> Tensor:
    return rand(n, c, side, side).to(memory_format=LAST)


def _convolution(name: str, n: int, c: int, side: int, to: int, of: int, *, step: int = 1,
                 groups: int = 1, after: str = "") -> Case:  # fmt: skip
    def run(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor, *more: Tensor) -> Tensor:
        made = F.conv2d(x, w, stride=step, padding=of // 2, groups=groups)
        if not after:
            return made
        made = made * scale[:, None, None] + bias[:, None, None]  # batch norm of inference
        if more:
            made = made + more[0]
        return F.gelu(made) if after == "gelu" else made.relu()

    def inputs() -> tuple[Tensor, ...]:
        weight = rand(to, c // groups, of, of).to(memory_format=LAST)
        more = (_image(n, to, -(-side // step)),) if after == "residual" else ()
        return (_image(n, c, side), weight, rand(1, to)[0], rand(1, to)[0], *more)

    fused = f" + {after}" if after else ""
    return Case(f"{name} {c} to {to} {of}x{of} at {side}{fused}", run, inputs, fused=bool(after))


def convolution_cases() -> list[Case]:
    def made() -> Iterator[Case]:
        for after in ("", "relu"):
            yield _convolution("ResNet-50", 64, 3, 224, 64, 7, step=2, after=after)
            for c, side in ((64, 56), (128, 28), (256, 14), (512, 7)):
                yield _convolution("ResNet-50", 64, c, side, c, 3, after=after)
                yield _convolution("ResNet-50", 64, c, side, 4 * c, 1,
                                   after="residual" if after else "")  # fmt: skip
        for c, side in ((96, 56), (192, 28), (384, 14), (768, 7)):
            yield _convolution("ConvNeXt", 64, c, side, c, 7, groups=c)
            yield _convolution("ConvNeXt", 64, c, side, 4 * c, 1, after="gelu")
        for c, to, side in ((320, 320, 64), (640, 640, 32), (1280, 1280, 16), (1920, 640, 32)):
            yield _convolution("U-Net", 4, c, side, to, 3)
            yield _convolution("U-Net", 4, c, side, to, 3, after="residual")

    return list(made())


SECTIONS = {
    "grouped": Section(grouped_cases, 1.2, 0.98),
    "gates": Section(gate_cases, 1.6, 0.98),
    "convolutions": Section(convolution_cases, 1.15, 1.0),
}


def measured(name: str, section: Section, backends: list[str], end: float) -> list[str]:
    SHOW(f"| {name} | {' | '.join(f'{b} us' for b in backends)} |")
    rows: list[dict[str, Any]] = []
    for case in section.cases():
        if time.perf_counter() > end:
            SHOW(f"| {case.name} | out of time |")
            continue
        rows.append(row(case, backends))
        SHOW(line(rows[-1], backends))
        torch.cuda.empty_cache()
    return verdict(name, section, rows, backends)


def verdict(name: str, section: Section, rows: Sequence[dict[str, Any]], backends: Sequence[str]
            ) -> list[str]:  # fmt: skip
    """Of what was measured; convolutions alone are only to be as fast as the library's."""
    lines: list[str] = []
    for other in [b for b in backends if b != "tilewright"]:
        for fused in (False, True):
            found = [r["x"][other] for r in rows if other in r.get("x", {}) and r["fused"] == fused]
            if not found:
                continue
            wanted = section.geomean if fused or name != "convolutions" else 1.0
            met = _met(geomean(found) >= wanted and min(found) >= section.least)
            said = f": {met} ({wanted}, none under {section.least})" if other == "eager" else ""
            kind = "with what follows" if fused else "alone"
            lines.append(f"{name} {kind}: {geomean(found):.3f} over {other} (geomean of "
                         f"{len(found)}, worst {min(found):.2f}){said}")  # fmt: skip
    seconds = [r["tilewright s"] for r in rows if "tilewright s" in r]
    if seconds:
        lines.append(f"{name}: {statistics.fmean(seconds):.1f} s a case to compile and tune")
    wrong = [r["case"] for r in rows
             if r.get("tilewright error", 0) > 2 * r.get("eager error", 1) + 1e-6]  # fmt: skip
    failed = [r["case"] for r in rows if "tilewright failed" in r]
    lines += [f"{name}: wrong: {', '.join(wrong)}"] if wrong else []
    return lines + ([f"{name}: failed: {', '.join(failed)}"] if failed else [])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--only", default="", help=f"one of dynamic, {', '.join(SECTIONS)}")
    parser.add_argument("--reference", action="store_true", help="measure the reference too")
    parser.add_argument("--host", action="store_true", help="the section `dynamic`, on a CPU")
    parser.add_argument("--rows", type=int, default=30, help="how many numbers of rows are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="", help="the verdicts as JSON")
    options = parser.parse_args(argv)
    backends = ["eager", *(["inductor"] if options.reference else []), "tilewright"]
    names = ["dynamic"] if options.host else [
        n for n in ("dynamic", *SECTIONS) if options.only in ("", n)]  # fmt: skip
    if options.host:
        torch.set_num_threads(1)
    began, lines = time.perf_counter(), list[str]()
    for k, name in enumerate(names):
        left = options.seconds - (time.perf_counter() - began)
        end = time.perf_counter() + left / (len(names) - k)
        lines += dynamic(options, end) if name == "dynamic" else (
            measured(name, SECTIONS[name], backends, end))  # fmt: skip
    SHOW(*lines, sep="\n")
    if options.out:
        with open(options.out, "w") as file:
            json.dump(lines, file, indent=1)


if __name__ == "__main__":
    main()
