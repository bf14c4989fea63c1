"""Trials that take the time they are told to, and a clock that believes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.tune import clock, purse, race, select
from tilewright.tune.results import Subject

CPU = torch.device("cpu")


@dataclass(eq=False)
class Fake:
    """A trial of `us` microseconds, give or take `noise` of it."""

    name: str
    us: float
    provider: str = "TRITON"
    description: str = ""
    estimate: float = 0.0
    key: str = ""
    noise: float = 0.0
    base: float = 0.0  # microseconds before the machine is disturbed
    disturbed: float = 0.0  # microseconds that others may have made a sample longer by
    wrong: str = ""
    build: Exception | None = None
    crash: BaseException | None = None
    slow: bool = False  # its build takes longer than anybody waits
    log: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.key = self.key or self.name
        self.estimate = self.estimate or self.us

    @property
    def is_library(self) -> bool:
        return self.provider == "ATEN"

    @property
    def compiles(self) -> bool:
        return not self.is_library

    def did(self, what: str) -> int:
        return self.log.count((what, self.name))

    def start(self) -> None:
        self.log.append(("start", self.name))

    def wait(self, seconds: float) -> bool:
        return not self.slow

    def finish(self) -> None:
        self.log.append(("finish", self.name))
        if self.build is not None:
            raise self.build

    def run(self, stream: int, which: int) -> None:
        self.log.append(("run", self.name))
        if self.crash is not None:
            raise self.crash

    def check(self) -> str:
        self.log.append(("check", self.name))
        return self.wrong


def aten(us: float, **more: Any) -> Fake:
    return Fake("mm", us, provider="ATEN", **more)


def subject(key: str = "subject", **more: Any) -> Subject:
    return Subject(key, "mm 4x4x4", CPU, 1, more)


class FakeClock:
    """Samples a trial without waiting."""

    is_quiet = True
    heats = False
    why_broken = ""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.on_sample: Callable[[Fake], None] = lambda trial: None
        self.samples = 0

    def bench(self, run: Any, sets: int) -> Any:
        run(0, 0)
        return _FakeBench(self, run.__self__)

    def broken(self) -> str:
        return self.why_broken


class _FakeBench:
    def __init__(self, clock: FakeClock, trial: Fake) -> None:
        self.clock, self.trial = clock, trial
        self.waited = 0.0

    def sample(self) -> float:
        self.clock.samples += 1
        self.clock.on_sample(self.trial)
        self.waited = self.trial.disturbed
        return self.trial.us * (1 + self.trial.noise * self.clock.random.gauss(0, 1))

    def level(self, us: float) -> None:
        self.trial.log.append(("level", self.trial.name))


class FakeTime:
    """A clock on the wall that moves only when told to."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now = 0.0
        for module in (select, race, purse):
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    sleep = advance


def use(monkeypatch: Any, fake: FakeClock) -> FakeClock:
    monkeypatch.setattr(clock, "of", lambda device: fake)
    return fake


def choose(*trials: Fake, key: str = "subject", **facts: Any) -> select.Verdict:
    log: list[tuple[str, str]] = []
    for trial in trials:
        trial.log = log
    return select.choose(subject(key, **facts), trials)
