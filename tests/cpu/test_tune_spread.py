"""A first look on several cards at once: who is looked at where, and cards that fail. What is sent
says which card its process sees, and takes as long as it is told to."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu import tuning_jobs
from tests.cpu.fake_trials import Fake, FakeClock, choose, use
from tilewright import config, metrics
from tilewright.gemm import choose as gemm
from tilewright.testing import fresh_cache
from tilewright.tune import child, pool, purse, records, spread
from tilewright.tune.results import Verdict

CARDS = [7, "GPU-8"]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Processes of two cards, that all tests share: `fresh_cache` would end them. To start one
    again may take long, on a busy machine."""
    monkeypatch.setattr(spread, "several", lambda device: CARDS)
    monkeypatch.setattr(spread._kept, "close", lambda: None)
    with fresh_cache(), config.patch(autotune_budget_seconds=300.0):
        yield use(monkeypatch, FakeClock())
    monkeypatch.undo()


@pytest.fixture(autouse=True, scope="module")
def ended() -> Any:
    yield
    spread._kept.close()


@dataclass(eq=False)
class There(Fake):
    """A trial that can be looked at elsewhere."""

    file: Path = Path()
    how: str = ""
    slower_on: str = ""

    def remote(self) -> tuning_jobs.Looked:
        return tuning_jobs.Looked(self.key, self.us, str(self.file), self.how, self.slower_on)


@dataclass
class Several:
    file: Path
    slower_on: str = ""
    hows: dict[int, str] = field(default_factory=dict[int, str])

    def trials(self, times: list[float]) -> list[There]:
        given: dict[str, Any] = {"file": self.file, "slower_on": self.slower_on, "estimate": 10.0}
        first = There("mm", 100.0, "ATEN", **given)
        return [first, *(There(f"t{k}", us, how=self.hows.get(k, ""), **given)
                         for k, us in enumerate(times))]  # fmt: skip

    @property
    def said(self) -> list[list[str]]:
        """Card and candidate, in order; the library is looked at on each card."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [line.split() for line in lines if not line.endswith(" mm")]


def looked_at_here(trials: list[There]) -> set[str]:
    return {name for what, name in trials[0].log if what == "run" and name != "mm"}


TIMES = [50.0, 55.0, 60.0, *(90.0 + k for k in range(9))]


def test_ma_c2_what_is_far_slower_is_looked_at_once_and_elsewhere(tmp_path):
    """Each by one card; those that may win meet here. A card that is slower has a slower library,
    and costs nobody anything."""
    several = Several(tmp_path / "said", slower_on="7")
    trials = several.trials(TIMES)
    verdict = choose(*trials)
    assert verdict.winner.name == "t0" and verdict.source == "measured" and verdict.complete
    assert looked_at_here(trials) == {"t0", "t1", "t2"}
    assert Counter(name for _, name in several.said) == Counter(f"t{k}" for k in range(12))
    assert {card for card, _ in several.said} == {"7", "GPU-8"}
    assert {n: round(t.median_us) for n, t in verdict.times.items()} == {
        "mm": 100, **{f"t{k}": us for k, us in enumerate(TIMES)}}  # fmt: skip
    again = several.trials(TIMES)
    known = choose(*again)
    assert (known.winner.name, known.source) == ("t0", "remembered")
    assert known.times.keys() == verdict.times.keys(), "what was seen elsewhere is kept as well"
    assert len(several.said) == 12 and looked_at_here(again) == set()


def test_the_verdict_is_that_of_one_card(tmp_path, monkeypatch):
    several = Several(tmp_path / "said")

    def told(verdict: Verdict) -> Any:
        return verdict.winner.name, verdict.source, verdict.complete, sorted(verdict.times)

    found = told(choose(*several.trials(TIMES), key="several"))
    monkeypatch.setattr(spread, "several", lambda device: [])
    assert told(choose(*several.trials(TIMES), key="one")) == found


def test_what_fails_on_two_cards_is_at_fault_itself(tmp_path):
    """And all cards go on: two that crash at once wait for each other's card."""
    several = Several(tmp_path / "said", hows={0: "crash", 1: "crash"})
    verdict = choose(*several.trials([10.0, 11.0, 50.0, 90.0]), key="crash")
    assert verdict.winner.name == "t2"
    assert all("exit code 3" in verdict.rejected[name] for name in ("t0", "t1"))
    tried = Counter(name for _, name in several.said)
    assert tried["t0"] == tried["t1"] == 2 and tried["t3"] == 1
    assert len({card for card, name in several.said if name == "t0"}) == 2
    rows = [r for r in records.exported()["trials"] if r["name"] in ("t0", "t1")]
    assert len(rows) == 2 and all("exit code 3" in r["reason"] for r in rows)


def test_a_card_on_which_alone_things_fail_is_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(spread, "_kept", spread._Kept())
    several = Several(tmp_path / "said", hows=dict.fromkeys(range(8), "fails on 7"))
    verdict = choose(*several.trials([50.0 + k for k in range(8)]), key="fails")
    assert verdict.winner.name == "t0" and not verdict.rejected
    (told,) = [r.getMessage() for r in caplog.records if "not tuned on any more" in r.getMessage()]
    assert told.startswith("card 7 is") and "unknown error" in told
    failed = [name for card, name in several.said if card == "7"]
    assert pool.FAULTS <= len(failed) < 8
    choose(*several.trials([50.0 + k for k in range(4)]), key="others")
    assert [name for card, name in several.said if card == "7"] == failed
    spread._kept.close()


def test_without_processes_all_is_looked_at_here(tmp_path, monkeypatch):
    monkeypatch.setattr(spread, "_kept", spread._Kept())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    several = Several(tmp_path / "said")
    trials = several.trials([50.0, 90.0])
    verdict = choose(*trials, key="here")
    assert verdict.winner.name == "t0" and not verdict.rejected
    assert looked_at_here(trials) == {"t0", "t1"} and several.said == []
    spread._kept.close()


def test_what_hangs_there_is_not_waited_for_beyond_the_budget(tmp_path, monkeypatch):
    """Nor run here, where it would hang the program."""
    monkeypatch.setattr(spread, "_kept", spread._Kept())
    several = Several(tmp_path / "said", hows={0: "hang"})
    trials = several.trials([50.0, 60.0])
    monkeypatch.setattr(purse, "PRODUCT", 0.3)  # seconds of measuring; to start is none
    with config.patch(autotune_budget_seconds=None):
        verdict = choose(*trials, key="hangs")
    assert verdict.winner.name in ("mm", "t1") and "under way" in verdict.rejected["t0"]
    assert "t0" not in looked_at_here(trials)
    assert verdict.seconds < 60, "it would be asked for two minutes, on two cards"
    assert not spread._kept._pool.is_open  # type: ignore[union-attr]


def test_the_processes_end_when_nobody_asks(tmp_path, monkeypatch):
    kept = spread._Kept()
    monkeypatch.setattr(spread, "_kept", kept)
    monkeypatch.setattr(spread, "IDLE", 0.1)
    with kept.pool([1, 2]) as made:
        assert made.submit(tuning_jobs.visible).result() in ("1", "2")
    with kept.pool([1, 2]) as again:
        assert again is made
    deadline = time.monotonic() + 20
    while kept._pool is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert kept._pool is None and not made.is_open
    assert not any(p.is_alive for p in made._all)


def test_ma_b12_who_sees_one_card_knows_it_as_the_first():
    """What is sent may be for another card of who asks."""
    third = torch.device("cuda", 2)
    alone, all_ = child.TuningProcess("GPU-9"), child.TuningProcess()
    try:
        for process, expected in ((alone, 0), (all_, 2)):
            process.put(functools.partial(tuning_jobs.index, third))
            assert process.get(60) == expected
        alone.put(functools.partial(tuning_jobs.index, torch.device("cpu")))
        assert alone.get(60) is None
    finally:
        alone.kill()
        all_.kill()


@dataclass(frozen=True)
class Numbered:
    device: int


def test_ma_b12_a_kernel_is_launched_where_its_memory_is():
    """A process of its own may know a card by another number than who asks."""
    part = gemm.Part(Numbered(3), ())  # type: ignore[arg-type]
    assert part.on(torch.device("cuda", 0)).source == Numbered(0)
    assert part.on(torch.device("cuda", 3)) is part
    assert part.on(torch.device("cpu")) is part


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(a @ b)


def test_ma_c2_products_are_looked_at_by_several_processes(monkeypatch):
    """A whole program, with kernels that are built here and loaded there; afterwards nobody holds
    what they were timed on."""
    monkeypatch.undo()
    monkeypatch.setattr(spread, "several", lambda device: CARDS)
    seen: list[Any] = []
    submit = pool.TuningProcessPool.submit
    monkeypatch.setattr(
        pool.TuningProcessPool,
        "submit",
        lambda self, job, *more: seen.append((self, job)) or submit(self, job),
    )
    a, b = torch.randn(48, 32), torch.randn(32, 64)
    options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,CPP",
               "autotune_in_subproc": True, "autotune_multi_device": True,
               "test_configs.max_mm_configs": 1}  # fmt: skip
    with fresh_cache():
        metrics.reset()
        compiled = torch.compile(product, backend="tilewright", options=options)
        torch.testing.assert_close(compiled(a, b), product(a, b), rtol=1e-4, atol=1e-4)
        assert "measured" in gemm.decisions[-1].why
        assert seen and all(job.func is child.look for _, job in seen)
        rows = records.exported()["trials"]
        assert sum(r["median_us"] is not None for r in rows) == len(rows) >= 2, rows
        for process in seen[0][0]._all:
            process.put(tuning_jobs.held)
            assert process.get(60) == ("", 0)
        assert child.asked(tuning_jobs.held) == ("", 0)


def test_a_fork_has_processes_of_its_own(monkeypatch):
    """Made while another thread has them, and while something is under way in the background."""
    background = pool.AutotuneProcessPool.get_instance()
    under_way = background.submit(functools.partial(time.sleep, 0.5))
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with spread._kept._lock, pool.AutotuneProcessPool._lock, child._asking:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(60)
    forked = os.fork()
    if not forked:
        code = 1
        signal.alarm(60)  # rather than for ever
        try:
            mine = pool.AutotuneProcessPool.get_instance()
            right = mine.submit(tuning_jobs.answer).result(60) == 42
            right &= child.asked(tuning_jobs.number) == 3.14
            with spread._kept.pool(CARDS) as made:
                right &= made.submit(tuning_jobs.answer).result(60) == 42
            spread._kept.close()
            mine.shutdown()
            child._process.kill()
            code = 0 if right else 2
        finally:
            os._exit(code)
    leave.set()
    thread.join()
    assert os.waitpid(forked, 0)[1] == 0
    assert under_way.result(60) is None
    background.shutdown()
