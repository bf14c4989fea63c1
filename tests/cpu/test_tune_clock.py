"""Timing on a CPU."""

from __future__ import annotations

import time

import pytest
import torch

from tilewright.tune import clock

CPU = torch.device("cpu")


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_run_takes_at_least_what_it_computes():
    found = clock.of(CPU).bench(lambda stream, which: busy(2e-4), 1)
    assert min(found.sample() for _ in range(3)) >= 190.0


def test_short_runs_are_measured_in_batches():
    calls: list[int] = []
    found = clock.of(CPU).bench(lambda stream, which: calls.append(which), 3)
    before = len(calls)
    found.sample()
    assert len(calls) - before >= 30
    assert calls[:6] == [0, 1, 2, 0, 1, 2]


def test_the_sets_take_turns_between_samples_of_long_runs():
    calls: list[int] = []

    def run(stream: int, which: int) -> None:
        assert stream == 0
        calls.append(which)
        busy(5e-4)

    found = clock.of(CPU).bench(run, 4)
    calls.clear()
    for _ in range(8):
        found.sample()
    assert len(calls) == 8
    assert sorted(set(calls)) == [0, 1, 2, 3]


def test_what_a_run_raises_is_raised():
    def run(stream: int, which: int) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        clock.of(CPU).bench(run, 1)


def test_ma_b11_sample_buffers_leave_the_random_numbers_alone():
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn):
        assert clock.filled(dtype, 100, CPU).dtype == dtype
    assert torch.equal(torch.rand(4), expected)


def test_sets_exceed_the_cache_within_reason():
    assert clock.sets_beyond_cache(1 << 40, CPU) == 1
    assert clock.sets_beyond_cache(16, CPU) == 8
