"""The configuration of a loop kernel: the model's first, or with autotuning the fastest measured.

What was measured is kept in the store under the kernel and the card, and never measured again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright import config, metrics
from tilewright.runtime import launch, store, triton_build
from tilewright.runtime.triton_build import Built, TritonConfig, TritonSource
from tilewright.tune import clock

FASTER = 0.98  # of the time of what is chosen so far: less of a gain is noise
MOST_STEPS = 16  # configurations coordinate descent may try
MOST_BYTES = 8 << 30  # of sample buffers; a larger kernel keeps the model's choice


@dataclass(frozen=True)
class Waiting:
    """A kernel under way: built for sure, to be measured if asked."""

    built: Future[Built]
    measured: bool


def submit(source: TritonSource) -> Waiting:
    """Start building. With autotuning every configuration is built, unless the winner is known."""
    if not _wanted(source):
        return Waiting(triton_build.submit(source), False)
    known = _known(source)
    if known is not None:
        return Waiting(
            triton_build.submit(replace(source, configs=(known, *source.configs))), False
        )
    triton_build.start_all(source)
    return Waiting(triton_build.submit(source), True)


def chosen(source: TritonSource, waiting: Waiting) -> Built:
    """Wait, and measure where that was asked for."""
    first = waiting.built.result()
    return measured(source, first) if waiting.measured else first


def _wanted(source: TritonSource) -> bool:
    return (config.max_autotune or config.max_autotune_pointwise) and len(source.configs) > 1


def measured(source: TritonSource, first: Built) -> Built:
    """The fastest configuration on the card; ties go to the model's choice."""
    bench = _Bench(source)
    if bench.size > MOST_BYTES:
        metrics.counters["tune"]["too large to measure"] += 1
        return first
    candidates = [first, *(b for b in triton_build.compile_all(source) if b != first)]
    times = bench.times(candidates)
    best, least = first, times[0]
    for built, time in zip(candidates, times, strict=True):
        if time < least * FASTER:
            best, least = built, time
    if config.coordinate_descent_tuning:
        best, least = _descend(source, bench, best, least)
    metrics.counters["tune"]["kernels measured"] += 1
    _remember(source, best.config, least, dict(zip(map(_text, candidates), times, strict=True)))
    return best


def _text(built: Built) -> str:
    return str(built.config)


class _Bench:
    """Sample arguments of a kernel, in several sets, and launches over them."""

    def __init__(self, source: TritonSource) -> None:
        self.source = source
        self.size = sum(s[0].itemsize * s[1] for s in source.sample if isinstance(s, tuple))
        self._sets: list[list[Any]] = []

    def times(self, candidates: list[Built]) -> list[float]:
        device = self.source.device
        if not self._sets:
            count = clock.sets_beyond_cache(self.size, device)
            self._sets = [[self._argument(s) for s in self.source.sample] for _ in range(count)]
        runs = [self._run(b) for b in candidates]
        return clock.interleaved(runs, len(self._sets), device)

    def _argument(self, sample: Any) -> Any:
        if isinstance(sample, tuple):
            dtype, count = sample
            return clock.filled(dtype, count, self.source.device)
        return sample

    def _run(self, built: Built) -> Callable[[int, int], None]:
        kernel = launch.load(self.source, built, self.source.device)
        programs = eval(self.source.programs(built.config), {}, dict(self.source.sizes))

        def run(stream: int, which: int) -> None:
            kernel(stream, programs, 1, 1, *self._sets[which])

        return run


# ---- coordinate descent


def _descend(source: TritonSource, bench: _Bench, best: Built, least: float
             ) -> tuple[Built, float]:  # fmt: skip
    """Change one number at a time by a factor of two for as long as that is faster."""
    tried = {*source.configs, best.config}
    improved = True
    while improved and len(tried) < MOST_STEPS + len(source.configs):
        improved = False
        fresh = [c for c in _neighbours(best.config) if c not in tried]
        tried.update(fresh)
        found = triton_build.compile_all(replace(source, configs=tuple(fresh)))
        for built, time in zip(found, bench.times(found), strict=True):
            if time < least * FASTER:
                best, least, improved = built, time, True
    return best, least


def _neighbours(at: TritonConfig) -> Iterator[TritonConfig]:
    for k, (name, value) in enumerate(at.constants):
        for scaled in (value * 2, value // 2):
            if 1 <= scaled <= 1 << 14:
                yield replace(at, constants=(*at.constants[:k], (name, scaled),
                                             *at.constants[k + 1 :]))  # fmt: skip
    for warps in (at.num_warps * 2, at.num_warps // 2):
        if 1 <= warps <= 32:
            yield replace(at, num_warps=warps)


# ---- the record


def _key(source: TritonSource) -> str:
    card = torch.cuda.get_device_name(source.device)
    return store.key(*(source.key(c) for c in source.configs), repr(source.sizes),
                     repr(source.sample), card, str(config.coordinate_descent_tuning))  # fmt: skip


def _known(source: TritonSource) -> TritonConfig | None:
    data = store.get(store.path(_key(source), ".choice"))
    if data is None:
        return None
    kept = json.loads(data)["config"]
    metrics.counters["tune"]["choices found"] += 1
    return TritonConfig(tuple((n, v) for n, v in kept["constants"]), kept["num_warps"],
                        kept["num_stages"], kept["maxnreg"])  # fmt: skip


def _remember(source: TritonSource, best: TritonConfig, least: float, times: dict[str, float]
              ) -> None:  # fmt: skip
    if not math.isfinite(least):
        return
    kept = {"constants": best.constants, "num_warps": best.num_warps,
            "num_stages": best.num_stages, "maxnreg": best.maxnreg}  # fmt: skip
    record = {"config": kept, "microseconds": least, "measured": times}
    store.put_atomic(store.path(_key(source), ".choice"), json.dumps(record).encode())
