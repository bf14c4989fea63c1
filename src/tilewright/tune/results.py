"""What is tried, for what, how long it took, and which of them is taken.

Deciding is one pure function, `preferred`: the fastest is taken unless one that comes before it in
the order of preference (libraries first, then as the model has it) is as fast within the noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

# Of the time: a smaller gain is not worth leaving what is preferred. A little under 2 %, so that
# two tunings that decide a close case differently are within 2 % of each other.
ADVANTAGE = 0.019
MOST_NOISE = 0.10  # beyond it a measurement says too little to be believed in either direction


class Trial(Protocol):
    """One plan under trial. One that can be timed in another process (`tune/child.py`) has a
    method `remote` as well, which gives what is sent there; then `finish` only waits for builds,
    and neither `run` nor `check` is called here. One that `is_foreign` was not written by this
    package: it is, unless the options say otherwise."""

    @property
    def name(self) -> str: ...
    @property
    def provider(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def estimate(self) -> float:
        """Microseconds, by a model; not a positive number where there is no model."""
        ...

    @property
    def key(self) -> str:
        """Of what will run, the same in every process."""
        ...

    @property
    def is_library(self) -> bool: ...
    @property
    def compiles(self) -> bool:
        """Whether a compiler has to run for it, beside what all trials have in common."""
        ...

    def start(self) -> None:
        """Begin building in worker processes; returns at once."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait for builds that were begun, so long at most: whether they are done."""
        ...

    def finish(self) -> None:
        """Wait for the builds and load them. What it raises is why the trial is rejected."""
        ...

    def run(self, stream: int, which: int) -> None:
        """Launch the whole plan on buffer set `which`; the stream is 0 on the CPU."""
        ...

    def check(self) -> str:
        """Run once and compare with the reference result: why it is wrong, or nothing."""
        ...


@dataclass(frozen=True)
class Subject:
    """What is chosen for."""

    key: str  # the same in every process; empty: nothing is remembered
    title: str
    device: torch.device
    sets: int = 1  # of buffers, which rotate past the cache
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for records and feedback
    size: int = 0  # bytes that one set of buffers takes


@dataclass(frozen=True)
class Timing:
    """The time of one run: the median over samples, and their median deviation from it."""

    median_us: float
    spread: float
    samples: int

    @property
    def noise(self) -> float:
        """How far the median may be off, as a part of it: two standard errors."""
        if self.samples < 2 or not 0 < self.median_us < math.inf:
            return 0.0
        # 1.48 deviations make a sigma, and a median is 1.25 times less certain than a mean
        return 2 * 1.25 * 1.48 * self.spread / self.median_us / math.sqrt(self.samples)

    def __str__(self) -> str:
        part = 100 * self.spread / self.median_us if self.median_us else 0.0
        return f"{self.median_us:.2f} us, spread {part:.1f} %, {self.samples} samples"


def timing(samples: Sequence[float]) -> Timing:
    middle = statistics.median(samples)
    spread = statistics.median(abs(s - middle) for s in samples)
    return Timing(middle, spread, len(samples))


Source = Literal["measured", "remembered", "model", "only"]


@dataclass(frozen=True)
class Verdict:
    """The winner, built and ready to run, and how it came to be chosen."""

    winner: Trial
    times: Mapping[str, Timing]
    rejected: Mapping[str, str]
    seconds: float
    source: Source
    complete: bool = True  # False: the budget ended before all was tried; another run goes on
    why: str = ""  # it is taken, where the times show another to be faster by enough to matter


def preferred(times: Sequence[Timing]) -> int:
    """Which of several to take, given in order of preference: the fastest, unless an earlier one
    is not beaten by more than the least advantage, or than the noise."""
    best = min(range(len(times)), key=lambda k: times[k].median_us)
    for k in range(best):
        if not beats(times[best], times[k]):
            return k
    return best


def beats(challenger: Timing, incumbent: Timing) -> bool:
    """Whether a challenger is faster for certain, and by enough to matter."""
    if not math.isfinite(incumbent.median_us):
        return math.isfinite(challenger.median_us)
    noise = min(MOST_NOISE, math.hypot(challenger.noise, incumbent.noise))
    return challenger.median_us < incumbent.median_us * (1 - max(ADVANTAGE, noise))
