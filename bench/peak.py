"""The most memory alive at once during a call, as the allocator of torch reports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """Bytes above what was alive before the call, results included.

    The call runs twice: the first run settles caches and lazily made state.
    """
    call()
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
