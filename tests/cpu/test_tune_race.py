"""Who is sampled how often, and that equal candidates do not take turns in winning."""

from __future__ import annotations

import math
import random
import re
from collections import Counter

import pytest

from tests.cpu.fake_trials import Fake, FakeClock, FakeTime, aten, choose, use
from tilewright import config
from tilewright.testing import fresh_cache
from tilewright.tune import race
from tilewright.tune.results import ADVANTAGE, Timing, beats, preferred, timing


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    with fresh_cache(), config.patch(autotune_local_cache=False, autotune_effort="max"):
        yield use(monkeypatch, FakeClock())


def test_medians_and_spread():
    found = timing([10.0, 11.0, 9.0, 10.5, 100.0])
    assert (found.median_us, found.spread, found.samples) == (10.5, 0.5, 5)
    assert 0 < found.noise < 0.2
    assert Timing(10.0, 1.0, 400).noise < Timing(10.0, 1.0, 4).noise


def test_a_challenger_must_win_by_more_than_its_noise():
    steady, noisy = Timing(95.0, 0.1, 20), Timing(95.0, 8.0, 8)
    assert beats(steady, Timing(100.0, 0.1, 20))
    assert not beats(noisy, Timing(100.0, 0.1, 20))
    assert not beats(Timing(98.5, 0.0, 20), Timing(100.0, 0.0, 20))
    assert beats(Timing(1.0, 0.0, 1), Timing(math.inf, 0.0, 0))


def test_the_first_that_is_as_fast_as_the_best_is_preferred():
    times = [Timing(t, 0.0, 10) for t in (110.0, 101.0, 100.0, 103.0)]
    assert preferred(times) == 1
    assert preferred(times[:1]) == 0
    assert preferred([times[0], times[2]]) == 1


def test_far_candidates_cost_a_sample_or_two(clock):
    trials = [aten(20.0), *(Fake(f"t{k}", 50.0 + k, noise=0.005) for k in range(28)),
              Fake("best", 15.0, estimate=14.0)]  # fmt: skip
    verdict = choose(*trials)
    assert verdict.winner is trials[-1]
    assert clock.samples < 60  # of 400 us each: 24 ms of the card for 30 candidates
    assert all(verdict.times[f"t{k}"].samples == 1 for k in range(28))


def test_drift_of_the_machine_meets_all_alike(clock, monkeypatch):
    """A machine that gets slower all the time does not make the later ones lose."""
    slower = [0.0]

    def drift(trial: Fake) -> None:
        slower[0] += 0.002
        trial.us = trial.base * (1 + slower[0])

    clock.on_sample = drift
    trials = [aten(100.0), *(Fake(f"t{k}", u) for k, u in enumerate((99.5, 99.0, 90.0)))]
    for trial in trials:
        trial.base = trial.us
    assert choose(*trials).winner is trials[-1]


@pytest.mark.parametrize(("is_quiet", "at_first"), [(False, 14.0), (True, 11.0)])
def test_a_library_is_not_given_up_for_slow_first_samples(clock, is_quiet: bool, at_first: float):
    """It comes first, when the machine may still be busy with what was before."""
    library, other = aten(10.0), Fake("other", 10.0)
    taken: Counter[str] = Counter()

    def busy_at_first(trial: Fake) -> None:
        taken[trial.name] += 1
        library.us = at_first if taken[library.name] <= 7 else 10.0

    clock.is_quiet, clock.on_sample = is_quiet, busy_at_first
    assert choose(library, other).winner is library


def test_who_replaces_a_library_outruns_it(clock):
    """To be as fast as the fastest is not enough: the fastest is taken instead."""
    library, near, best = aten(100.0), Fake("near", 99.0, estimate=50.0), Fake("best", 97.5)
    assert choose(library, near, best).winner is best
    assert choose(near, best).winner is near
    near.us = 97.9
    assert choose(library, near, best).winner is near
    library.us = 99.0
    assert choose(library, near, best).winner is library


def test_a_library_is_compared_when_time_is_up_before_it_meets_the_others(clock, monkeypatch):
    library, others = aten(100.0), [Fake("a", 99.5), Fake("b", 99.4)]
    took: Counter[str] = Counter()
    now = FakeTime(monkeypatch)

    def slow(trial: Fake) -> None:
        took[trial.name] += 1
        now.advance(2.0 if took["a"] > 12 else 0.0)

    clock.on_sample = slow
    with config.patch(autotune_budget_seconds=1.0):
        assert choose(library, *others).winner is library
    assert took["mm"] < 12 < took["a"]


def test_what_many_others_do_to_a_library_does_not_count(clock):
    """It meets who is to replace it alone: here everything is slower after one of the others."""
    trials = [aten(100.0), *(Fake(f"t{k}", 99.0 + k / 100, provider="CUBLASLT") for k in range(6))]
    last: list[Fake] = []

    def hot(trial: Fake) -> None:
        crowd = {t.name for t in last[-4:]} - {"mm", "t0"}
        library = trial is trials[0]
        trial.us = trial.base * (1.03 if library and crowd else 1.0)
        last.append(trial)

    for trial in trials:
        trial.base = trial.us
    clock.on_sample = hot
    assert choose(*trials).winner is trials[0]


def slower_and_slower(clock: FakeClock, trials: list[Fake], part: float) -> None:
    """Every sample is longer than the one before, whosever it is."""
    scale = [1.0]

    def drift(trial: Fake) -> None:
        scale[0] *= 1 + part
        trial.us = trial.base * scale[0]

    for trial in trials:
        trial.base = trial.us
    clock.on_sample = drift


@pytest.mark.parametrize("is_quiet", [True, False])
def test_times_shown_together_are_of_one_moment(clock: FakeClock, is_quiet: bool) -> None:
    """Of a machine that gets slower all the time: who left after the first look, after the first
    race, or after the first turns has the time it would have at the end."""
    clock.is_quiet = is_quiet
    true = {"mm": 104.0, "far": 190.0, "near": 107.0, "second": 101.0, "first": 90.0, "last": 93.0}
    trials = [Fake(name, us, provider="ATEN" if name == "mm" else "CPP", estimate=100.0)
              for name, us in true.items()]  # fmt: skip
    slower_and_slower(clock, trials, 0.002 if is_quiet else 0.0005)
    verdict = choose(*trials)
    assert verdict.winner.name == "first" and not verdict.why
    scales = [verdict.times[name].median_us / us for name, us in true.items()]
    assert not is_quiet or min(scales) > 1.05, "the machine did get slower"
    assert max(scales) / min(scales) < 1.04


def busy_machine(clock: FakeClock, trials: list[Fake], seed: int) -> None:
    """Others have the cores for most of the time: a sample is often many times too long."""
    rng = random.Random(seed)

    def disturb(trial: Fake) -> None:
        late = rng.choice([0.0, 0.0, rng.expovariate(1 / 200.0), 15000.0])
        trial.us = trial.base * (1 + abs(rng.gauss(0, 0.01))) + late
        trial.disturbed = 20000.0 if late > 0 else 0.0

    for trial in trials:
        trial.base = trial.us
    clock.is_quiet, clock.on_sample = False, disturb


@pytest.mark.parametrize("seed", range(12))
def test_what_wins_on_a_busy_machine_is_fast(clock: FakeClock, seed: int) -> None:
    rng = random.Random(seed)
    true = {f"t{k}": rng.uniform(300.0, 400.0) for k in range(5)} | {"best": 290.0, "mm": 330.0}
    trials = [Fake(name, us, provider="ATEN" if name == "mm" else "CPP", estimate=100.0)
              for name, us in true.items()]  # fmt: skip
    busy_machine(clock, trials, seed)
    verdict = choose(*trials)
    assert true[verdict.winner.name] <= 1.04 * min(true.values())
    fastest = min(verdict.times[name].median_us for name in true)
    shown = verdict.times[verdict.winner.name].median_us
    assert verdict.why or fastest >= (1 - ADVANTAGE) * shown
    assert shown < 1.2 * true[verdict.winner.name], "and its time is its own"


def on_a_cpu(clock: FakeClock, monkeypatch: pytest.MonkeyPatch, varies: float, waits: float,
             seconds: float) -> None:  # fmt: skip
    """Samples that are too long by some part, and threads that wait for some part of each."""
    rng, now = random.Random(5), FakeTime(monkeypatch)

    def disturb(trial: Fake) -> None:
        now.advance(seconds)
        trial.us = trial.base * (1 + abs(rng.gauss(0, varies)))
        trial.disturbed = waits * trial.us

    clock.is_quiet, clock.on_sample = False, disturb


@pytest.mark.parametrize(("library", "varies", "waits", "seconds"), [
    (2110.0, 0.12, 0.0, 0.02), (2110.0, 0.03, 0.0, 0.02), (2600.0, 0.06, 0.4, 0.013),
], ids=["varying", "steady", "every thread waits"])  # fmt: skip
def test_what_is_a_tenth_faster_than_a_library_is_taken(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, library: float, varies: float, waits: float,
    seconds: float) -> None:  # fmt: skip
    """Though there is time for few turns, and though nobody's samples are undisturbed: with as many
    threads as there are cores, one of them nearly always waits for whatever else runs."""
    on_a_cpu(clock, monkeypatch, varies, waits, seconds)
    times = {"mm": library, "a": 1900.0, "b": 1930.0, "c": 2050.0}
    winners: Counter[str] = Counter()
    for turn in range(40):
        trials = [Fake(name, us, "ATEN" if name == "mm" else "CPP", estimate=100.0, base=us)
                  for name, us in times.items()]  # fmt: skip
        winners[choose(*trials, key=str(turn)).winner.name] += 1
    assert winners["a"] + winners["b"] >= 39 and winners["a"] >= 36, winners


def test_a_library_that_is_as_fast_is_kept_though_every_thread_waits(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    on_a_cpu(clock, monkeypatch, 0.06, 0.4, 0.013)
    for turn in range(20):
        trials = [aten(1910.0, base=1910.0), Fake("a", 1900.0, base=1900.0, provider="CPP")]
        assert choose(*trials, key=str(turn)).winner is trials[0]


def test_it_is_said_why_one_that_seems_slower_is_taken(clock: FakeClock) -> None:
    """A library that another is faster than, but not by more than the noise."""
    trials = [aten(100.0, noise=0.08), Fake("other", 95.0, noise=0.08)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race, "MOST_TURNS", 16)
        verdict = choose(*trials)
    times = {name: t.median_us for name, t in verdict.times.items()}
    assert verdict.winner is trials[0] and times["other"] < (1 - ADVANTAGE) * times["mm"]
    assert re.fullmatch(
        r"other is not faster for certain: times are known to \d+\.\d%", verdict.why
    )


def same_winners(clock: FakeClock, problems: int, noise: float, bias: float) -> tuple[float, float]:
    """Of twenty tunings of each problem: the part with the most common winner, and how far apart
    the true times of two winners are at most."""
    rng = random.Random(1)
    same, apart = 0, 0.0
    for problem in range(problems):
        best = rng.choice([80.0, 90.0, 97.0, 103.0])
        true = [100.0, *sorted(best * (1 + rng.expovariate(1 / 0.15)) for _ in range(16))]
        model = [us * math.exp(rng.gauss(0, 0.15)) for us in true]
        winners: list[str] = []
        for _ in range(20):
            # what differs between processes and no number of samples takes away
            trials = [Fake(f"t{k}" if k else "mm", us * math.exp(rng.gauss(0, bias)), noise=noise,
                           provider="TRITON" if k else "ATEN", estimate=model[k])
                      for k, us in enumerate(true)]  # fmt: skip
            for trial in trials:
                trial.base = trial.us
            winners.append(choose(*trials, key=str(problem)).winner.name)
        same += Counter(winners).most_common(1)[0][1]
        times = [true[int(name[1:])] if name != "mm" else true[0] for name in winners]
        apart = max(apart, max(times) / min(times) - 1)
    return same / (20 * problems), apart


def disturbed(clock: FakeClock) -> None:
    """An outlier of 20 % now and then, and a machine that gets slower and faster again."""
    rng, drift = random.Random(2), [0.0]

    def disturb(trial: Fake) -> None:
        drift[0] = 0.999 * drift[0] + rng.gauss(0, 0.0005)
        trial.us = trial.base * (1 + drift[0]) * (1.2 if rng.random() < 0.02 else 1.0)

    clock.on_sample = disturb


@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_twenty_tunings_choose_the_same_winner(clock: FakeClock, noise: float) -> None:
    """97 % agree, and who differs is within 2 %."""
    disturbed(clock)
    same, apart = same_winners(clock, problems=8, noise=noise, bias=0.0002)
    assert same >= 0.97
    assert apart <= 0.0225


@pytest.mark.parametrize("times", [
    (100.5, 100.0, 100.2),  # the library half a percent behind
    (101.7, 100.5, 100.0),  # and near the border
    (105.0, 101.7, 100.5, 100.0, 100.1),  # one that the model has first is near it
], ids=["half", "near", "beside"])  # fmt: skip
def test_close_races_end_the_same_way(clock: FakeClock, times: tuple[float, ...]) -> None:
    """With the spread of samples that an H200 has, and what differs from one tuning to the next."""
    disturbed(clock)
    rng = random.Random(3)
    winners: Counter[str] = Counter()
    for _ in range(60):
        trials = [Fake(f"t{k}" if k else "mm", us, base=us * math.exp(rng.gauss(0, 0.0005)),
                       noise=0.003, provider="TRITON" if k else "ATEN", estimate=50.0 + k)
                  for k, us in enumerate(times)]  # fmt: skip
        winners[choose(*trials).winner.name] += 1
    name, same = winners.most_common(1)[0]
    assert same >= 0.97 * 60
    assert times[int(name[1:]) if name != "mm" else 0] <= 1.02 * min(times)


def test_finalists_have_equally_many_runs_in_a_sample() -> None:
    trials = [aten(100.0), Fake("near", 99.0), Fake("far", 300.0)]
    choose(*trials)
    assert [t.did("level") for t in trials] == [1, 1, 0]


class Card:
    """One that comes to its limit of power after some work, and is away from it after a short rest:
    each trial has a time for either."""

    def __init__(self, clock: FakeClock, monkeypatch, **times: tuple[float, float]) -> None:
        self.wall = FakeTime(monkeypatch)
        self.times = times
        self.busy, self.last = 0.0, 0.0
        clock.heats, clock.on_sample = True, self.sample

    def sample(self, trial: Fake) -> None:
        if self.wall.now - self.last >= 0.02:
            self.busy = 0.0
        self.busy += 0.001
        self.wall.advance(0.001)
        self.last = self.wall.now
        trial.us = self.times[trial.name][self.busy > 0.028]


def test_what_is_faster_at_the_limit_of_power_must_not_be_behind_before_it(clock, monkeypatch):
    """4096x4096x4096 in float16 on an H200: 2 % slower after a pause, 3 % faster later."""
    Card(clock, monkeypatch, mm=(184.6, 216.9), other=(188.2, 210.9))
    verdict = choose(aten(184.6), Fake("other", 188.2))
    assert verdict.times["other"].median_us < 0.98 * verdict.times["mm"].median_us
    assert verdict.winner.name == "mm"
    assert verdict.why == "other is 2.0% slower where the card has rested"


def test_what_is_hardly_behind_before_the_limit_of_power_is_taken(clock, monkeypatch):
    Card(clock, monkeypatch, mm=(177.3, 207.3), other=(177.9, 201.6))
    assert choose(aten(177.3), Fake("other", 177.9)).winner.name == "other"


@pytest.mark.parametrize("us", [10.0, 2000.0])
def test_runs_that_are_short_or_long_are_not_measured_at_rest(clock, monkeypatch, us: float):
    """The short do not bring a card to its limit, and the long always do."""
    card = Card(clock, monkeypatch, mm=(us, 1.1 * us), other=(1.02 * us, 1.05 * us))
    rests: list[float] = []
    monkeypatch.setattr(card.wall, "sleep", rests.append)
    assert choose(aten(us), Fake("other", 1.02 * us)).winner.name == "other"
    assert not rests
