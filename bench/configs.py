"""Which configuration of a kernel a card likes best: `python -m bench.configs [programs]`.

Every Triton kernel of the programs of `bench.gpu_programs` (names given by their beginning, all by
default) that moves enough memory is compiled in many configurations, and the fastest of these in a
few variants of its text. Shown are the model's choice, the fastest found and the fastest of each
variant. `--dry` compiles nothing and needs no card: it names what would be timed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_programs import PROGRAMS, GpuProgram
from bench.kernels import copy_bandwidth
from bench.measure import leaves
from tilewright import pipeline
from tilewright.backend import count_schedules
from tilewright.errors import BuildError
from tilewright.runtime import launch, triton_build
from tilewright.runtime.triton_build import Built, Sample, TritonConfig, TritonSource
from tilewright.schedule.plan import Schedule
from tilewright.tune import clock

LEAST_BYTES = 32 << 20  # of its buffers: smaller kernels are not bound by memory
DEVICE = torch.device("cuda", 0)
MOST = 28  # configurations of one text
PER_THREAD = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Found:
    """A kernel of a program."""

    label: str
    source: TritonSource
    bytes: int  # of its buffers, each once


# ---- the kernels of a program


def kernels_of(program: GpuProgram) -> list[Found]:
    plans: list[tuple[str, Schedule]] = []
    torch._dynamo.reset()
    backend = count_schedules(lambda role, plan: plans.append((role, plan)))
    out = leaves(torch.compile(program.fn, backend=backend, dynamic=False)(*program.inputs()))
    if program.backward:
        torch.autograd.backward(out, [torch.ones_like(o) for o in out])
    found: list[Found] = []
    for role, plan in plans:
        for k, step in enumerate(plan.steps):
            made = pipeline._generate(plan.program, step.group, k)
            if made is None or not isinstance(made[1], TritonSource):
                continue
            source = made[1]
            moved = sum(s[0].itemsize * s[1] for s in source.sample if isinstance(s, tuple))
            if moved >= LEAST_BYTES:
                short = "" if role == "inference" else f" {role}"
                found.append(Found(f"{program.name}{short} {k}", source, moved))
    return found


# ---- variants of a text


def _stages(count: int) -> Callable[[str], str]:
    """Loops whose loads run ahead, through shared memory."""
    loop = re.compile(r"in (?:tl\.)?range\((.*?)(?:, num_stages=STAGES)?\):")
    return lambda text: loop.sub(rf"in tl.range(\1, num_stages={count}):", text)


def _streamed(text: str) -> str:
    """Results are not worth a place in cache."""
    return re.sub(r"(tl\.store\(.*)\)$", r'\1, eviction_policy="evict_first")', text, flags=re.M)


def _once(text: str) -> str:
    """Neither is what is read."""
    load = re.compile(r"(= tl\.load\(.*(?:rbase|rindex|xbase).*?)(, eviction_policy=\"\w+\")?\)$",
                      flags=re.M)  # fmt: skip
    return load.sub(r'\1, eviction_policy="evict_first")', text)


def _no_policy(text: str) -> str:
    return re.sub(r', eviction_policy="\w+"', "", text)


VARIANTS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "2 stages": _stages(2),
    "3 stages": _stages(3),
    "4 stages": _stages(4),
    "stores first": _streamed,
    "all first": lambda text: _streamed(_once(text)),
    "no policy": _no_policy,
}


def texts_of(source: TritonSource) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, change in VARIANTS.items():
        text = change(source.text)
        if text not in found.values():
            found[name] = text
    return found


# ---- configurations


def configs_of(source: TritonSource) -> list[TritonConfig]:
    """The model's, and a grid around them."""
    every = dict.fromkeys([*source.configs, *_grid(source)])
    return [c for c in every if _inside(source, c)][:MOST]


def _extent(source: TritonSource, axis: str) -> int:
    found = re.search(rf"^ *{axis}numel = (\d+)$", source.text, flags=re.M)
    return int(found[1]) if found else 0


def _inside(source: TritonSource, c: TritonConfig) -> bool:
    """Whether the text holds for the configuration: an axis without a mask has whole blocks."""
    for name, block in c.constants:
        axis = name.removesuffix("BLOCK").lower()
        extent = _extent(source, axis)
        if f"{axis}mask" not in source.text and extent % block:
            return False
        if f"{axis}offset" not in source.text and axis.startswith("r") and block < extent:
            return False  # the whole row at once
    return c.num_warps <= 32


def _grid(source: TritonSource) -> Iterator[TritonConfig]:
    first = source.configs[0]
    names = [name for name, _ in first.constants if name != "STAGES"]
    fixed = tuple((n, v) for n, v in first.constants if n == "STAGES")
    sizes = dict(first.constants)
    looped = [n for n in names if f"{n.removesuffix('BLOCK').lower()}offset" in source.text]
    across = len(names) == 2 and looped and sizes["XBLOCK"] > 4
    if names == ["XBLOCK"]:
        shapes = [(b,) for b in (512, 1024, 2048, 4096)]
    elif across:
        shapes = [(16, 512), (16, 1024), (32, 256), (32, 512), (64, 128), (64, 256), (128, 64),
                  (128, 128)]  # fmt: skip
    elif looped:
        shapes = [(x, *[r] * (len(names) - 1)) for x, r in (
            (1, 1024), (1, 2048), (1, 4096), (1, 8192), (2, 2048), (4, 1024))]  # fmt: skip
    elif len(names) == 2 and "ymask" not in source.text and "YBLOCK" in names:
        shapes = [(y, x) for y, x in ((32, 32), (32, 64), (64, 32), (64, 64), (128, 64), (64, 128))]
    else:
        rest = tuple(sizes[n] for n in names[1:])
        shapes = [(b, *rest) for b in (1, 2, 4, 8)]
    spread = {shape: _warps(math.prod(shape)) for shape in shapes}
    for k in range(len(PER_THREAD)):  # the likely ones of every shape first
        for shape, warps in spread.items():
            if k < len(warps):
                blocks = tuple(zip(names, shape, strict=True))
                yield replace(first, constants=(*blocks, *fixed), num_warps=warps[k])


def _warps(elements: int) -> list[int]:
    found = [elements // (32 * share) for share in (16, 32, 8, 4, 64)]
    return [w for w in found if 1 <= w <= 32]


# ---- timing

Times = dict[str, list[tuple[float, TritonConfig, str]]]


def timed(found: Found, end: float) -> Times:
    """Variant -> times, best first. Variants are tried in the best configurations of the text."""
    samples = [_argument(s) for s in found.source.sample]
    source = found.source
    plain = _measured(source, configs_of(source), samples, end)
    times: Times = {"model": [t for t in plain if t[1] == source.configs[0]], "plain": plain}
    best = list(dict.fromkeys([*(c for _, c, _ in plain[:3]), source.configs[0]]))
    for name, text in texts_of(source).items():
        if name != "plain":
            times[name] = _measured(replace(source, text=text), best, samples, end)
    return times


def _measured(source: TritonSource, configs: list[TritonConfig], samples: list[Any], end: float
              ) -> list[tuple[float, TritonConfig, str]]:  # fmt: skip
    waits = [(c, triton_build.submit(replace(source, configs=(c,)))) for c in configs]
    found: list[tuple[float, TritonConfig, str]] = []
    for c, wait in waits:
        try:
            built = wait.result()
        except BuildError as why:
            print("   ", c, str(why).splitlines()[0][:150], flush=True)
            continue
        if time.perf_counter() > end:
            continue
        bench = clock.of(DEVICE).bench(_run(source, built, samples), 1)
        us = statistics.median(bench.sample() for _ in range(5))
        found.append((us, c, f"{c} {built.binary.registers}r {built.binary.stack}s"))
    return sorted(found, key=lambda t: t[0])


def _run(source: TritonSource, built: Built, samples: list[Any]) -> clock.Run:
    kernel = launch.load(source, built, 0)
    programs = eval(source.programs(built.config), {}, dict(source.sizes))
    return lambda stream, which: kernel(stream, programs, 1, 1, *samples)


def _argument(sample: Any) -> Any:
    if not isinstance(sample, tuple):
        return sample
    dtype, count, high, _ = Sample(*sample)
    return clock.filled(dtype, count, DEVICE, high)


def report(found: Found, times: Times, bandwidth: float) -> list[str]:
    floor = found.bytes / bandwidth
    lines = [f"{found.label}: {found.bytes >> 20} MiB, {floor:.1f} us at copy bandwidth"]
    for name, rows in times.items():
        shown = rows[:3] if name == "plain" else rows[:1]
        lines += [f"    {name:12} {us:8.1f} us {floor / us:4.0%}  {text}" for us, _, text in shown]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.configs", description=__doc__)
    parser.add_argument("programs", nargs="*", help="beginnings of names")
    parser.add_argument("--budget", type=float, default=300, help="seconds in all")
    parser.add_argument("--out", type=Path, help="a JSON file of all times")
    parser.add_argument("--dry", action="store_true", help="only name what would be timed")
    options = parser.parse_args()
    chosen = [
        p
        for p in PROGRAMS
        if not options.programs or any(p.name.startswith(n) for n in options.programs)
    ]
    end = time.perf_counter() + options.budget
    bandwidth = 1.0 if options.dry else copy_bandwidth()
    raw: dict[str, Any] = {"copy": bandwidth}
    for program in chosen:
        if time.perf_counter() > end:
            print(f"{program.name}: out of time", flush=True)
            continue
        for found in kernels_of(program):
            if options.dry:
                print(
                    found.label,
                    list(texts_of(found.source)),
                    [f"{dict(c.constants)} {c.num_warps}" for c in configs_of(found.source)],
                )
                continue
            times = timed(found, end)
            raw[found.label] = {n: [(us, t) for us, _, t in rows] for n, rows in times.items()}
            print("\n".join(report(found, times, bandwidth)), flush=True)
            if options.out:
                options.out.write_text(json.dumps(raw, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
