"""The most memory alive at once during a call, as the allocator of torch reports it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.measure import EAGER, REFERENCE, Result, difference
from bench.models import MODELS, build
from bench.more_models import MORE
from bench.suites import Options, Row, Table, model_calls, selected_models


def peak_suite(options: Options) -> Table:
    """Every model, inference and training: bytes beyond parameters and inputs."""
    table: Table = {}
    more = [] if options.quick else [name for name in MORE if options.only.search(name)]
    for name in [*selected_models(options), *more]:
        case = build(name, zoo={**MODELS, **MORE})
        for pass_ in ("inference", "training"):
            label = f"{name} {pass_}"
            torch._dynamo.reset()
            row = table[label] = {b: Result() for b in options.backends}
            expected: Any = None
            for backend, result in row.items():
                options.progress(f"{label}: {backend}")
                try:
                    call, probe = model_calls(case, backend, train=pass_ == "training")
                    actual = probe()
                    expected = actual if backend == EAGER else expected
                    result.error = difference(expected, actual)
                    del actual
                    result.extra["peak"] = peak_bytes(call)
                except Exception as error:
                    result.error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            hold_to_the_least(row)
            options.finished(label, row)
    return table


def hold_to_the_least(row: Row) -> None:
    """More memory than eager or the reference needs is a failure of ours."""
    for backend, result in row.items():
        for other in (EAGER, REFERENCE):
            mine, theirs = result.extra.get("peak"), row.get(other, Result()).extra.get("peak")
            if backend not in (EAGER, REFERENCE) and mine and theirs and mine > theirs:
                result.error = f"{mine:.0f} bytes at once, {other} has {theirs:.0f}"


def peak_bytes(call: Callable[[], Any]) -> int:
    """Bytes above what was alive before the call, results included.

    The call runs twice: the first run settles caches and lazily made state.
    """
    call()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        result = call()
    del result
    alive = most = 0
    for event in _changes(found):
        alive += event
        most = max(most, alive)
    return most


def _changes(found: Any) -> list[int]:
    """Bytes allocated (or, negative, freed), in order of time."""
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return [e.nbytes() for e in events if e.device_type() == torch.autograd.DeviceType.CPU]
