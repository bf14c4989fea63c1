"""Candidates and providers that fail in every way, in whole programs with the default options: the
user's process lives, the result is right, and the reason is recorded."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from tests.cpu.fake_trials import Fake, FakeClock, aten, choose, subject, use
from tests.cpu.test_gemm_choose import (
    ToyCandidate,
    ToyProvider,
    check,
    inputs,
    layer,
    register,
    toy,
)
from tilewright import config, metrics
from tilewright.errors import NoValidChoicesError
from tilewright.gemm import choose as gemm
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.provider import Kernel
from tilewright.testing import fresh_cache
from tilewright.tune import memory, purse, records, select
from tilewright.tune.choices import ChoiceCaller
from tilewright.tune.clock import CpuClock

__all__ = ["register"]


@pytest.fixture
def clock(monkeypatch: Any) -> Any:
    with fresh_cache():
        yield use(monkeypatch, FakeClock())


DEFAULT = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TOY",
           "max_autotune_subproc_result_timeout_seconds": 8.0,
           "autotune_budget_seconds": 300.0}  # fmt: skip


@dataclass(frozen=True)
class Faulty:
    how: str

    @property
    def text(self) -> str:
        return self.how

    def __call__(self, *args: Any) -> None:
        match self.how:
            case "segfault":
                ctypes.string_at(0)
            case "exit":
                os._exit(3)
            case "system exit":
                sys.exit(4)
            case "hang":
                time.sleep(120)
            case "flood":
                for _ in range(2000):
                    print("x" * 1000)
                    print("y" * 1000, file=sys.stderr)
            case "memory":
                torch.empty(1 << 50)
            case "raise":
                raise KeyError("nobody expects it")
            case _:
                raise AssertionError(self.how)


@dataclass(frozen=True)
class FaultyCandidate(ToyCandidate):
    how: str = ""
    estimate: float = 1.0

    def kernel(self) -> Kernel:
        if self.how == "text":
            raise LookupError("it has no kernel")
        return replace(super().kernel(), source=Faulty(self.how))


@dataclass
class Several(ToyProvider):
    """All that go wrong at once: one process is shared, and started again after each that ends."""

    hows: tuple[str, ...] = ()

    def supports(self, problem: GemmProblem) -> str:
        return ""

    def candidates(self, problem: GemmProblem, effort: Any) -> Sequence[Any]:
        return [FaultyCandidate(problem, 0.0, how=how, name=f"toy_{how.replace(' ', '_')}")
                for how in self.hows]  # fmt: skip


EXPECTED = {
    "segfault": "signal 11",
    "exit": "exit code 3",
    "system exit": "process",
    "hang": "more than 8 s",
    "flood": "",  # what it says goes nowhere, and it is too slow to be looked at further
    "memory": "memory",
    "raise": "nobody expects it",
}


def test_every_kind_of_candidate_that_fails(register: Any, capfd: Any) -> None:
    register(Several(None, None, hows=(*EXPECTED, "text")))
    reasons: dict[str, str] = {}
    select.add_feedback_saver(lambda *told: reasons.update({c.name: c.reason for c in told[3]}))
    try:
        code = check(layer, inputs(), options=DEFAULT)
    finally:
        select.clear_feedback_savers()
    assert "addmm" in code and "toy" not in code
    for how, reason in EXPECTED.items():
        found = [
            r for name, r in reasons.items() if name.startswith(f"toy_{how.replace(' ', '_')}")
        ]
        assert found and any(reason in r for r in found), (how, reasons)
    assert len(capfd.readouterr().out) < 1000, "what a candidate prints is its own"


@dataclass
class Raising(ToyProvider):
    error: type[Exception] = ValueError
    where: str = "supports"

    def supports(self, problem: GemmProblem) -> str:
        if self.where == "supports":
            raise self.error("mine")
        return ""

    def candidates(self, problem: GemmProblem, effort: Any) -> Sequence[Any]:
        raise self.error("mine")


@dataclass
class Endless(ToyProvider):
    """Does not end, or offers without end; interrupts itself."""

    where: str = "supports"

    def supports(self, problem: GemmProblem) -> str:
        if self.where == "supports":
            time.sleep(20)
        return ""

    def candidates(self, problem: GemmProblem, effort: Any) -> Any:
        if self.where == "interrupts":
            raise KeyboardInterrupt
        while True:
            yield object()


@pytest.mark.parametrize("where", ["supports", "candidates", "interrupts"])
def test_a_provider_that_does_not_end(register: Any, monkeypatch: Any, where: str) -> None:
    monkeypatch.setattr(gemm, "PATIENCE", 0.2 if where == "supports" else 60.0)
    register(Endless(None, None, where=where))
    assert "addmm" in check(layer, inputs(), options=DEFAULT)


@dataclass
class Half(ToyProvider):
    """Offers one that does not say how long it takes, and ends the program in the middle."""

    error: type[BaseException] = SystemExit

    def supports(self, problem: GemmProblem) -> str:
        return ""

    def candidates(self, problem: GemmProblem, effort: Any) -> Any:
        yield replace(FaultyCandidate(problem, 0.0, name="toy"), estimate=cast("Any", None))
        raise self.error("mine")


@pytest.mark.parametrize("error", [SystemExit, RuntimeError, None])
def test_a_provider_that_ends_in_the_middle(register: Any, error: Any) -> None:
    register(Half(None, None, error=error))
    assert "addmm" in check(layer, inputs(), options=DEFAULT)


@pytest.mark.parametrize("where", ["supports", "candidates"])
@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_a_provider_that_raises_offers_nothing(register: Any, where: str, error: Any) -> None:
    register(Raising(None, None, error=error, where=where))
    assert "addmm" in check(layer, inputs(), options=DEFAULT)


def test_who_is_not_of_this_package_is_timed_elsewhere(register: Any) -> None:
    theirs, ours = ChoiceCaller(cast("Any", Foreign())), ChoiceCaller(Fake("a", 1.0))
    assert theirs.is_foreign and not ours.is_foreign
    register(ToyProvider(toy(), None))
    alone = {**DEFAULT, "max_autotune_gemm_backends": "TOY"}
    metrics.reset()
    assert "toy_fused" in check(layer, inputs(),
                                options=alone)  # fmt: skip


class Foreign:
    is_foreign = True


def test_a_crash_is_remembered_until_the_candidate_changes(clock: Any) -> None:
    crash = RuntimeError("CUDA error: an illegal memory access was encountered")
    first = Fake("a", 1.0, crash=crash)
    choose(aten(100.0), first, key="one")
    again = Fake("a", 1.0)
    verdict = choose(aten(100.0), again, key="one")
    assert "as an earlier run found" in verdict.rejected["a"] and not again.did("finish")
    changed = replace(Fake("a", 1.0), key="another source")
    assert choose(aten(100.0), changed, key="one").winner.name == "a"
    assert choose(aten(100.0), Fake("a", 1.0), key="two").winner.name == "a"


@dataclass(eq=False)
class Theirs(Fake):
    """Of a provider that is not ours."""

    is_foreign: bool = True


def looked_at(trials: Sequence[Fake]) -> list[str]:
    choose(*trials, key=str(len(trials)))
    return list(dict.fromkeys(name for what, name in trials[0].log if what == "run"))


@pytest.mark.parametrize("is_quiet", [True, False])
def test_cu_g8_g14_what_others_wrote_is_tried_last(clock: Any, is_quiet: bool) -> None:
    """Whatever is thought of it, and whichever is built first: the library, ours, theirs."""
    clock.is_quiet = is_quiet
    theirs = [Theirs(f"theirs {k}", 18.0 + k, "CUTLASS") for k in range(2)]
    ours = [Fake(f"ours {k}", 20.0 + k) for k in range(2)]
    assert looked_at([*theirs, *ours, aten(30.0)]) == [
        "mm", "ours 0", "ours 1", "theirs 0", "theirs 1"]  # fmt: skip


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, AssertionError])
def test_cu_g14_one_that_fails_in_this_process_is_the_last_of_its_provider(
    clock: Any, error: Any
) -> None:
    theirs = [Theirs(f"theirs {k}", 10.0 + k, "CUTLASS", crash=error("no")) for k in range(3)]
    assert looked_at([*theirs, Fake("ours", 20.0), aten(30.0)]) == ["mm", "ours", "theirs 0"]
    alone = [replace(t, crash=error("no") if k == 0 else None) for k, t in enumerate(theirs)]
    assert looked_at(alone)[:2] == ["theirs 0", "theirs 1"], "there is nothing else to take"


# ---- memory


def test_what_does_not_fit_in_memory_is_not_measured(clock: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(memory, "free", lambda device: 1000)
    small, large = subject("small"), replace(subject("large"), size=2000)
    assert select.choose(small, [aten(100.0), Fake("a", 1.0)]).source == "measured"
    verdict = select.choose(large, [aten(100.0), Fake("a", 1.0)])
    assert (verdict.winner.name, verdict.source) == ("mm", "model")


def test_out_of_memory_everywhere_is_the_librarys_call(clock: Any) -> None:
    short = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    verdict = choose(aten(100.0, crash=short), Fake("a", 1.0, crash=MemoryError()))
    assert (verdict.winner.name, verdict.source) == ("mm", "model")


class Unverified(Fake):
    """Runs, and has too little memory to be compared."""

    def check(self) -> str:
        raise RuntimeError("CUDA out of memory. Tried to allocate 32.00 GiB")


def test_what_nobody_could_compare_is_the_models_choice(clock: Any) -> None:
    """Templates alone: they ran, and their results could not be looked at. What was found wrong is
    not taken."""
    verdict = choose(Unverified("a", 5.0, estimate=5.0), Unverified("b", 4.0, estimate=6.0))
    assert (verdict.winner.name, verdict.source) == ("a", "model")
    assert choose(Fake("c", 4.0, wrong="off"), Unverified("d", 5.0)).winner.name == "d"


def test_without_any_time_it_is_the_librarys_call(clock: Any) -> None:
    """MA-M18: whatever kept the others, and it, from being timed."""
    lost = ValueError("the process that times is gone")
    verdict = choose(aten(100.0, crash=lost), Fake("a", 1.0, crash=lost))
    assert (verdict.winner.name, verdict.source) == ("mm", "model")
    assert "is gone" in verdict.rejected["a"]
    with pytest.raises(NoValidChoicesError):
        choose(Fake("a", 1.0, crash=lost), Fake("b", 1.0, crash=lost))


def test_cu_g9_infinite_times_of_all_but_the_library(clock: Any) -> None:
    """Neither an error nor remembered: the library is there."""
    infinite = [Fake(f"cutlass_{k}", math.inf, provider="CUTLASS", estimate=1.0) for k in range(4)]
    verdict = choose(*infinite, aten(100.0))
    assert (verdict.winner.name, verdict.source) == ("mm", "measured")
    assert set(verdict.rejected) == {c.name for c in infinite}
    assert all("no finite time" in why for why in verdict.rejected.values())
    assert [r.name for r in records.measured(subject()).values()] == ["mm"]


def test_free_memory_is_what_the_control_group_leaves(tmp_path: Any) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert memory._of_group(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._of_group(tmp_path) == 1 << 62
    assert 0 < memory.free(torch.device("cpu")) < 1 << 50


# ---- time


def test_a_long_run_is_made_once(monkeypatch: Any) -> None:
    runs: list[int] = []

    def slow(stream: int, which: int) -> None:
        runs.append(which)
        time.sleep(0.3)

    bench = CpuClock().bench(slow, 4)
    assert bench.sample() >= 0.3e6 and len(runs) == 1
    assert bench.sample() >= 0.3e6 and len(runs) == 2


def test_products_that_take_seconds_are_decided_by_one_look(clock: Any) -> None:
    """A library is left for what is clearly faster alone."""
    trials = [aten(5e6), *(Fake(f"t{k}", 4.9e6 + k, estimate=4e6) for k in range(20))]
    verdict = choose(*trials)
    assert verdict.winner.name == "mm" and verdict.complete
    faster = [aten(5e6), Fake("fast", 1e6 + 1, estimate=1e6), Fake("slow", 9e6, estimate=8e6)]
    assert choose(*faster, key="other").winner.name == "fast"
    assert clock.samples <= 2 * 21 + 2 * 3, "no rounds, no finals"


def test_the_limit_follows_from_what_a_run_takes() -> None:
    assert purse.limit(0.0, 0.001) == purse.PRODUCT
    assert purse.limit(0.0, 28.0) == 28.0 * purse.RUNS
    with purse.budget(3):
        purse.spend(purse.GRAPH - 5)
        assert purse.limit(2.0, 0.001) == 7.0
    with config.patch(autotune_budget_seconds=1.0):
        assert purse.limit(0.0, 28.0) == float("inf")


def test_a_record_says_why(clock: Any) -> None:
    choose(aten(100.0), Fake("a", 1.0, crash=NotImplementedError("CUDA error: misaligned address")),
           key="why")  # fmt: skip
    rows = [r for r in records.exported()["trials"] if r["reason"]]
    assert rows and "misaligned address" in rows[0]["reason"]
