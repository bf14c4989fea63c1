"""Choosing among trials: filters, builds, verification, measurements, records, hooks, errors."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import threading
from concurrent import futures
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.cpu.fake_trials import Fake, FakeClock, FakeTime, aten, choose, subject, use
from tilewright import config, metrics
from tilewright.errors import BuildError, NoValidChoicesError, TilewrightError
from tilewright.runtime import compilers, cxx
from tilewright.runtime.cxx import CxxSource
from tilewright.testing import fresh_cache
from tilewright.tune import choices as trying
from tilewright.tune import progress, records, select
from tilewright.tune.choices import ChoiceCaller, ExternKernelCaller, TritonTemplateCaller


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    with fresh_cache():
        yield use(monkeypatch, FakeClock())


@pytest.fixture(autouse=True)
def _hooks():
    yield
    select.clear_preprocessing_fns()
    select.clear_feedback_savers()


def refused(text: str) -> BuildError:
    return BuildError(text, command=("triton",), stderr="the compiler's words")


# ---- the winner


def test_the_fastest_wins_and_is_built_checked_and_timed():
    fast = Fake("triton_mm_0", 50.0)
    verdict = choose(aten(100.0), fast, Fake("triton_mm_1", 80.0))
    assert verdict.winner is fast
    assert verdict.source == "measured" and verdict.complete
    assert fast.did("finish") == 1 and fast.did("check") == 1
    assert verdict.times["triton_mm_0"].median_us == pytest.approx(50.0)
    assert verdict.times["mm"].median_us == pytest.approx(100.0)
    assert verdict.times["triton_mm_0"].samples >= 2
    assert verdict.rejected == {} and verdict.seconds > 0


def test_a_gain_of_less_than_two_percent_leaves_the_library_in_place():
    assert choose(aten(100.0), Fake("triton_mm_0", 98.5)).winner.name == "mm"
    assert choose(aten(100.0), Fake("triton_mm_0", 97.5), key="2").winner.name == "triton_mm_0"


def test_of_equals_the_one_the_model_prefers_is_taken():
    trials = [Fake(f"triton_mm_{k}", 50.0 + 0.1 * k, estimate=10.0 - k) for k in range(4)]
    assert choose(aten(100.0), *trials).winner.name == "triton_mm_3"


def test_every_finalist_is_verified_and_a_wrong_one_does_not_win():
    wrong = Fake("triton_mm_0", 50.0, wrong="3 elements are off")
    verdict = choose(aten(100.0), wrong, Fake("triton_mm_1", 52.0))
    assert verdict.winner.name == "triton_mm_1"
    assert "3 elements are off" in verdict.rejected["triton_mm_0"]
    verdict = choose(aten(100.0), wrong, Fake("triton_mm_1", 52.0), Fake("triton_mm_2", 51.5))
    assert wrong.did("run") == 0  # remembered
    assert "3 elements are off" in verdict.rejected["triton_mm_0"]


def test_a_candidate_that_fails_is_an_error_when_none_may_fail():
    """`triton.disallow_failing_autotune_kernels_TESTING_ONLY` (MA-J18)."""
    with (
        config.patch({"triton.disallow_failing_autotune_kernels_TESTING_ONLY": True}),
        pytest.raises(BuildError, match="no room"),
    ):
        choose(aten(100.0), Fake("triton_mm_0", 50.0, build=refused("no room")))
    verdict = choose(aten(100.0), Fake("triton_mm_0", 50.0, build=refused("no room")), key="2")
    assert verdict.winner.name == "mm" and "no room" in verdict.rejected["triton_mm_0"]


def test_a_wrong_library_alone_is_an_error():
    with pytest.raises(NoValidChoicesError, match="NaN everywhere"):
        choose(Fake("a", 1.0, wrong="NaN everywhere"), Fake("b", 1.0, wrong="NaN everywhere"))


# ---- records


def test_nothing_is_built_or_timed_twice():
    first = [aten(100.0), Fake("triton_mm_0", 50.0), Fake("triton_mm_1", 80.0)]
    choose(*first)
    again = [aten(100.0), Fake("triton_mm_0", 50.0), Fake("triton_mm_1", 80.0)]
    verdict = choose(*again)
    assert verdict.source == "remembered"
    assert verdict.winner is again[1]
    assert again[0].log == [("finish", "triton_mm_0")]
    assert verdict.times["mm"].median_us == pytest.approx(100.0)


def test_ma_n3_a_new_candidate_meets_who_was_the_fastest():
    """Those far behind are not measured again; their times are expressed in what the others take
    now."""
    choose(aten(100.0), Fake("triton_mm_0", 50.0), Fake("triton_mm_2", 80.0))
    trials = [aten(100.0), Fake("triton_mm_0", 60.0), Fake("triton_mm_2", 80.0),
              Fake("triton_mm_1", 40.0)]  # fmt: skip
    verdict = choose(*trials)
    assert verdict.winner is trials[3] and verdict.source == "measured"
    ran = {name for what, name in trials[0].log if what == "run"}
    assert ran == {"triton_mm_0", "triton_mm_1"}
    assert verdict.times["triton_mm_2"].median_us == pytest.approx(96.0)


def test_what_the_nearest_problem_chose_is_tried_first():
    """After the library, whatever the model thinks of it."""
    facts = {"op": "mm", "dtype": "float32"}
    tiles = [(f"triton_mm_{k}", f"BLOCK={2**k}") for k in range(4)]
    for m, best in ((64, 3), (4096, 1)):
        trials = [Fake(n, 50.0 if k == best else 80.0, description=d, estimate=40.0 + k)
                  for k, (n, d) in enumerate(tiles)]  # fmt: skip
        choose(aten(100.0), *trials, key=f"{m}", sizes=[m, 64, 64], **facts)
    for m, first in ((100, "triton_mm_3"), (3000, "triton_mm_1")):
        trials = [Fake(n, 60.0, description=d, estimate=40.0 + k)
                  for k, (n, d) in enumerate(tiles)]  # fmt: skip
        choose(aten(100.0), *trials, key=f"new {m}", sizes=[m, 64, 64], **facts)
        ran = [name for what, name in trials[0].log if what == "run"]
        assert ran[:2] == ["mm", first]


@pytest.mark.parametrize("now", [0.8, 1.25])
@pytest.mark.parametrize("gain", [0.9, 1.1])
def test_ma_n3_a_machine_that_is_slower_by_now_decides_nothing(now, gain):
    """A card may have been cooler when the others were measured."""
    choose(aten(100.0), Fake("triton_mm_0", 50.0))
    trials = [aten(100.0 * now), Fake("triton_mm_0", 50.0 * now),
              Fake("triton_mm_1", 50.0 * now * gain)]  # fmt: skip
    assert choose(*trials).winner is trials[2 if gain < 1 else 1]


def test_ma_n3_without_the_local_cache_everything_is_measured_again():
    choose(aten(100.0), Fake("triton_mm_0", 50.0))
    with config.patch(autotune_local_cache=False):
        trials = [aten(100.0), Fake("triton_mm_0", 50.0)]
        assert choose(*trials).source == "measured"
    assert trials[0].did("run") == 1


def test_another_environment_is_another_measurement(monkeypatch):
    choose(aten(100.0), Fake("triton_mm_0", 50.0))
    monkeypatch.setattr(records, "environment", lambda device: "another card")
    trials = [aten(100.0), Fake("triton_mm_0", 150.0)]
    assert choose(*trials).winner is trials[0]
    assert len(records.elsewhere(subject())) == 1


def test_a_lasting_failure_is_remembered_and_a_passing_one_is_not():
    build, memory = refused("no"), RuntimeError("CUDA out of memory. Tried")
    one = [aten(100.0), Fake("a", 10.0, build=build), Fake("b", 20.0, crash=memory)]
    verdict = choose(*one)
    assert "did not build: no" in verdict.rejected["a"]
    assert "out of memory" in verdict.rejected["b"]
    two = [aten(100.0), Fake("a", 10.0), Fake("b", 20.0), Fake("c", 90.0)]
    verdict = choose(*two)
    assert verdict.winner is two[2]
    assert two[1].did("start") == 0 and "earlier run" in verdict.rejected["a"]


def test_what_was_timed_and_not_compared_is_compared_before_it_wins():
    """An earlier run was interrupted between the two."""
    choose(aten(100.0), Fake("triton_mm_0", 50.0))
    rows = list(records.measured(subject()).values())
    assert {r.name for r in rows if r.checked} == {"triton_mm_0"}
    records.keep(subject(), [replace(r, checked=False) for r in rows])
    records_of_choice = [aten(100.0), Fake("triton_mm_0", 50.0, wrong="all of it is off")]
    with config.patch({"test_configs.autotune_choice_name_regex": "mm"}):
        verdict = choose(*records_of_choice, Fake("triton_mm_1", 90.0))
    assert verdict.winner.name != "triton_mm_0"
    assert "all of it is off" in verdict.rejected["triton_mm_0"]


def test_an_interrupt_keeps_what_was_measured_and_the_next_run_goes_on(clock):
    def interrupt(trial: Fake) -> None:
        if trial.name == "triton_mm_2":
            raise KeyboardInterrupt

    clock.on_sample = interrupt
    with pytest.raises(KeyboardInterrupt):
        choose(aten(100.0), *(Fake(f"triton_mm_{k}", 40.0 + 10 * k) for k in range(4)))
    assert {r.name for r in records.measured(subject()).values()} >= {"mm", "triton_mm_0"}
    clock.on_sample = lambda trial: None
    trials = [aten(100.0), *(Fake(f"triton_mm_{k}", 40.0 + 10 * k) for k in range(4))]
    verdict = choose(*trials)
    assert verdict.winner.name == "triton_mm_0"
    assert trials[0].did("run") == 0 and trials[2].did("run") == 0  # known to be far
    assert all(t.did("run") == 1 for t in (trials[1], *trials[3:]))


def test_every_decision_is_a_line_of_the_log():
    choose(aten(100.0), Fake("triton_mm_0", 50.0), Fake("x", 60.0, build=refused("too big")))
    (line,) = map(json.loads, records.log_path().read_text().splitlines())
    assert line["winner"] == "triton_mm_0" and line["source"] == "measured"
    assert line["times"]["mm"][0] == pytest.approx(100.0)
    assert "too big" in line["rejected"]["x"]


# ---- modes of choosing


def test_one_choice_is_used_unmeasured():
    """CU-D11: whoever's it is."""
    only = Fake("triton_mm_0", 50.0)
    verdict = choose(only)
    assert verdict.source == "only" and verdict.winner is only
    assert only.did("finish") == 1 and only.did("run") == 0


def test_ma_a13_deterministic_measures_nothing():
    trials = [Fake("triton_mm_0", 1.0), Fake("mm", 100.0, provider="ATEN"), Fake("b", 1.0)]
    with config.patch(deterministic=True):
        verdict = choose(*trials)
        assert verdict.winner is trials[1] and verdict.source == "model"
        verdict = choose(trials[2], trials[0])
        assert verdict.winner is trials[2]
    assert all(t.did("run") == 0 for t in trials)


def test_effort_none_asks_the_model_or_the_records():
    trials = [aten(100.0, estimate=50.0), Fake("triton_mm_0", 10.0, estimate=60.0)]
    with config.patch(autotune_effort="none"):
        verdict = choose(*trials)
        assert verdict.winner is trials[0] and verdict.source == "model"
    choose(*trials)
    with config.patch(autotune_effort="none"):
        verdict = choose(*trials)
    assert verdict.winner is trials[1] and verdict.source == "remembered"


@pytest.mark.parametrize(
    ("effort", "tried"), [("quick", {"mm", "a"}), ("default", {"mm", "a", "b"}), ("max", None)]
)
def test_effort_says_how_far_from_the_best_estimate_is_tried(effort, tried):
    trials = [aten(500.0), Fake("a", 100.0), Fake("b", 190.0), Fake("c", 900.0)]
    with config.patch(autotune_effort=effort):
        verdict = choose(*trials)
    assert {t.name for t in trials if ("run", t.name) in t.log} == (tried or {"mm", "a", "b", "c"})
    assert all("estimated" in why for why in verdict.rejected.values())


def test_ma_a6_an_exhaustive_search_tries_everything():
    trials = [aten(5.0), Fake("triton_mm_0", 900.0)]
    with config.patch(max_autotune_gemm_search_space="exhaustive"):
        choose(*trials)
    assert metrics.counters["inductor"]["benchmarking.Benchmarker.benchmark_cpu"] == 2


def test_the_budget_is_kept_up_to_the_candidate_under_way(clock, monkeypatch):
    wall = FakeTime(monkeypatch)
    clock.on_sample = lambda trial: wall.advance(0.5)
    trials = [aten(100.0), *(Fake(f"t{k}", 50.0 + k) for k in range(50))]
    with config.patch(autotune_budget_seconds=3.0):
        verdict = choose(*trials)
    assert wall.now <= 3.0 + 1.5 and verdict.seconds == wall.now
    assert not verdict.complete and verdict.winner.name == "t0"
    assert "budget" in verdict.rejected["t39"]


def test_without_any_budget_the_library_is_taken(monkeypatch):
    FakeTime(monkeypatch)
    with config.patch(autotune_budget_seconds=0.0):
        assert choose(aten(100.0), Fake("a", 60.0)).winner.name == "mm"


def test_nothing_is_built_that_there_is_no_time_for(monkeypatch):
    """Compilers that were started work on: who asks next would wait for them."""
    FakeTime(monkeypatch)
    trials = [aten(100.0), *(Fake(f"t{k}", 50.0 + k) for k in range(9))]
    with config.patch(autotune_budget_seconds=1.5, compile_threads=2):
        verdict = choose(*trials)
    assert [t.did("start") > 0 for t in trials[1:5]] == [True, True, True, False]
    assert verdict.winner.name == "t0" and not verdict.complete
    assert "budget" in verdict.rejected["t5"]


def test_a_question_that_comes_too_late_costs_nothing(clock, monkeypatch):
    FakeTime(monkeypatch)
    trials = [aten(100.0), Fake("a", 50.0)]
    with config.patch(autotune_budget_seconds=0.0):
        verdict = choose(*trials)
    assert verdict.winner.name == "mm" and not verdict.complete
    assert trials[0].log == [] and clock.samples == 0


def test_a_budget_is_shared_by_the_questions_of_a_graph(clock, monkeypatch):
    wall = FakeTime(monkeypatch)
    clock.on_sample = lambda trial: wall.advance(0.1)
    with config.patch(autotune_budget_seconds=8.0), select.budget(4):
        for k in range(4):
            trials = [aten(100.0), *(Fake(f"t{i}", 50.0 + i) for i in range(40))]
            verdict = choose(*trials, key=f"subject {k}")
            assert not verdict.complete and verdict.winner.name == "t0"
    assert wall.now <= 8.5


def test_preparing_takes_no_share_of_the_budget(clock, monkeypatch):
    """Of two questions that are both prepared, the first does not get all that is left."""
    now = FakeTime(monkeypatch)
    clock.on_sample = lambda trial: now.advance(0.5)
    patch = config.patch(autotune_budget_seconds=10.0, autotune_local_cache=False)
    with patch, select.budget(2):
        for key in ("one", "two"):
            select.prepare(subject(key), [aten(100.0), Fake("a", 50.0)])
        found = [choose(aten(100.0), Fake("a", 50.0), key=key) for key in ("one", "two")]
    assert [v.winner.name for v in found] == ["a", "a"]
    assert now.now <= 10.5


def test_eagers_own_choice_is_measured_first_whatever_the_budget(clock, monkeypatch):
    now = FakeTime(monkeypatch)
    clock.on_sample = lambda trial: now.advance(1.0)
    trials = [Fake(f"lt{k}", 10.0, provider="CUBLASLT") for k in range(8)]
    for trial in trials:
        monkeypatch.setattr(trial, "estimate", 1.0)
    mm = aten(100.0)
    with config.patch(autotune_budget_seconds=0.5):
        verdict = choose(*trials, mm)
    assert verdict.winner is mm and list(verdict.times) == ["mm"]
    assert not verdict.complete
    assert now.now <= 2.5


def test_a_budget_that_ended_is_continued_by_the_next_run(clock, monkeypatch):
    wall = FakeTime(monkeypatch)
    clock.on_sample = lambda trial: wall.advance(0.1)
    trials = [aten(100.0), *(Fake(f"t{k}", 90.0 - k, estimate=50.0 + k) for k in range(20))]
    with config.patch(autotune_budget_seconds=1.0):
        first = choose(*trials)
    second = choose(*trials)
    assert first.winner.us > second.winner.us and second.complete
    assert second.winner.us <= 72.0


# ---- building


def test_ma_l1_builds_are_under_way_before_the_first_is_waited_for():
    with config.patch(compile_threads=10):
        trials = [aten(100.0), *(Fake(f"t{k}", 50.0 + k) for k in range(9))]
        choose(*trials)
    events = trials[0].log
    first = next(k for k, (what, name) in enumerate(events) if what == "finish" and name != "mm")
    started = {name for what, name in events[:first] if what == "start"}
    assert started == {t.name for t in trials[1:]}


def test_ma_l4_equal_kernels_are_built_once_and_failures_are_counted():
    trials = [aten(100.0), Fake("a", 50.0, key="same"), Fake("b", 50.0, key="same"),
              Fake("c", 60.0, build=refused("does not fit"))]  # fmt: skip
    verdict = choose(*trials)
    assert trials[2].did("start") == 0 and verdict.rejected["b"] == "is the same as a"
    counted = metrics.counters["inductor"]
    assert counted["select_algorithm_autotune"] == 1
    assert counted["select_algorithm_precompile"] == 1
    assert counted["select_algorithm_num_precompiles"] == 3
    assert counted["select_algorithm_num_precompilation_exceptions"] == 1


@pytest.mark.parametrize(
    ("library", "expected", "built"),
    [
        (100.0, 100.0, {"fast", "equal", "near"}),  # the model may be wrong about others
        (80.0, 100.0, {"fast"}),  # it is too high for the library: so it is for others
    ],
)
def test_what_a_library_outdoes_is_not_compiled(library, expected, built):
    mm = Fake("mm", library, provider="ATEN", estimate=expected)
    others = [Fake("fast", 60.0, estimate=70.0), Fake("equal", 90.0, estimate=100.0),
              Fake("near", 110.0, estimate=120.0), Fake("far", 130.0, estimate=130.0)]  # fmt: skip
    verdict = choose(mm, *others)
    assert verdict.winner.name == "fast"
    assert {t.name for t in others if t.did("start")} == built
    assert "when mm takes" in verdict.rejected["far"]


def test_what_takes_long_to_build_is_awaited_only_if_the_model_has_it_win():
    """CU-F12: and the others are chosen among."""
    slow, hopeful = Fake("slow", 90.0, estimate=110.0, slow=True), Fake("hope", 95.0, estimate=80.0)
    hopeful.slow = True
    verdict = choose(
        aten(100.0, estimate=100.0), hopeful, Fake("quick", 96.0, estimate=105.0), slow
    )
    assert verdict.winner is hopeful  # it was waited for
    assert slow.did("finish") == 0
    assert "takes long to build" in verdict.rejected["slow"]
    assert verdict.complete


def test_all_that_may_win_is_built_while_the_first_question_is_answered():
    questions = [[aten(100.0), *(Fake(f"t{k}", 50.0 + k) for k in range(3)), Fake("slow", 300.0)]
                 for _ in range(2)]  # fmt: skip
    for k, trials in enumerate(questions):
        select.prepare(subject(f"question {k}"), trials)
    for trials in questions:
        assert [t.did("start") for t in trials[1:]] == [1, 1, 1, 0]
        assert not any(t.did("finish") for t in trials[1:])
    for k, trials in enumerate(questions):
        assert choose(*trials, key=f"question {k}").winner.name == "t0"


@dataclass(eq=False)
class Built(Fake):
    """A trial that is a kernel, compiled for real."""

    made: Any = None

    def start(self) -> None:
        super().start()
        if self.made is None:
            text = f'extern "C" void {self.name}(float* x) {{ x[0] = {self.us}; }}'
            self.made = cxx.submit([CxxSource(text, self.name, ("ptr",))]).futures[0]

    def wait(self, seconds: float) -> bool:
        return not futures.wait([self.made], seconds).not_done

    def finish(self) -> None:
        super().finish()
        self.made.result()


def test_ma_l1_compilers_run_and_none_on_the_main_thread(monkeypatch):
    ran: list[threading.Thread] = []
    run = compilers.run

    def seen(*args, **named):
        if "kernel" in named.get("text", ""):  # and not the module that launches them
            ran.append(threading.current_thread())
        return run(*args, **named)

    monkeypatch.setattr(compilers, "run", seen)
    with config.patch(compile_threads=10, autotune_in_subproc=False):
        trials = [Built(f"kernel{k}", 50.0 + k, estimate=40.0) for k in range(10)]
        verdict = choose(aten(100.0), *trials)
    assert verdict.winner.name == "kernel0" and verdict.rejected == {}
    assert [t.name for t in trials if not t.did("finish")] == []
    assert len(ran) == 10 and threading.main_thread() not in ran


@pytest.mark.parametrize("count", [2, 30])
def test_ma_l4_so_many_are_built_at_once(monkeypatch, count):
    """Twice as many as there are compilers, and no more than there are choices."""
    trials = [Fake(f"t{k}", 50.0 + k) for k in range(count)]
    most = 0
    original = Fake.finish

    def finish(self):
        nonlocal most
        under_way = sum(t.did("start") > 0 for t in trials) - sum(t.did("finish") for t in trials)
        most = max(most, under_way)
        original(self)

    monkeypatch.setattr(Fake, "finish", finish)
    with config.patch(compile_threads=3):
        choose(aten(100.0), *trials)
    assert most == min(count, 2 * 3)


def test_ma_l4_what_is_not_built_in_time_is_rejected_and_the_rest_goes_on(clock, monkeypatch):
    """`precompilation_timeout_seconds`: also where the model has it win, and it alone is left."""
    now = FakeTime(monkeypatch)

    def wait(self, seconds):
        now.advance(seconds if self.slow else 0.0)
        return not self.slow

    monkeypatch.setattr(Fake, "wait", wait)
    slow = Fake("slow", 10.0, slow=True)
    with config.patch(precompilation_timeout_seconds=20):
        verdict = choose(aten(100.0), slow, Fake("quick", 60.0))
    assert verdict.winner.name == "quick" and slow.did("finish") == 0
    assert "not built within config.precompilation_timeout_seconds = 20" in verdict.rejected["slow"]
    assert 20.0 <= now.now < 25.0
    again = [aten(100.0), Fake("slow", 10.0), Fake("quick", 60.0)]
    assert choose(*again).winner.name == "slow", "it is no fault of the kernel's"


def test_ma_l4_nothing_is_precompiled_when_all_times_are_known():
    """MA-L4, CU-F12."""
    choose(aten(100.0), Fake("a", 50.0))
    metrics.reset()
    choose(aten(100.0), Fake("a", 50.0))
    assert metrics.counters["inductor"]["select_algorithm_precompile"] == 0
    assert metrics.counters["inductor"]["select_algorithm_autotune"] == 0


def test_counters_of_this_process_are_not_kept_with_a_graph():
    before = metrics.snapshot()
    choose(aten(100.0), Fake("a", 50.0))
    assert "inductor" not in metrics.delta(before).counters


# ---- hooks


def test_ma_o1_o2_feedback_savers():
    selector = select.get_algorithm_selector_cache()
    select.clear_feedback_savers()

    def saver(*args: object) -> None: ...

    select.add_feedback_saver(saver)
    assert selector.feedback_saver_fns == [saver]
    select.add_feedback_saver(saver)
    assert len(selector.feedback_saver_fns) == 2
    select.clear_feedback_savers()
    assert selector.feedback_saver_fns == []


def test_ma_o3_savers_of_both_arities_are_told():
    seen = []

    def five(timings, name, inputs, choices, profiled):
        seen.append((timings, name, inputs, choices, profiled()))

    def six(timings, name, inputs, choices, profiled, precompile_times):
        seen.append((timings, name, inputs, choices, precompile_times))

    select.add_feedback_saver(five)
    select.add_feedback_saver(six)
    choose(aten(100.0), Fake("a", 50.0), op="mm", inputs=("x", "y"))
    assert len(seen) == 2
    for timings, name, inputs, choices, _ in seen:
        assert {c.name: round(ms, 6) for c, ms in timings.items()} == {"mm": 0.1, "a": 0.05}
        assert name == "mm" and inputs == ["x", "y"] and len(choices) == 2
    assert all(seconds >= 0 for seconds in seen[1][4].values()) and len(seen[1][4]) == 2
    assert seen[0][4] == seen[0][0]


def test_ma_o4_preprocessing_runs_in_order_after_the_filters():
    seen: list[list[str]] = []

    def look(choices):
        seen.append([c.name for c in choices])
        return choices

    def drop(choices):
        return [c for c in choices if c.name != "triton_mm_1"]

    for fn in (look, drop, look):
        select.add_preprocessing_fn(fn)
    with config.patch({"test_configs.autotune_choice_name_regex": "mm"}):
        verdict = choose(aten(9.0), Fake("triton_mm_0", 5.0), Fake("triton_mm_1", 1.0),
                         Fake("other", 1.0))  # fmt: skip
    assert seen == [["mm", "triton_mm_0", "triton_mm_1"], ["mm", "triton_mm_0"]]
    assert verdict.winner.name == "triton_mm_0"
    assert "'drop'" in verdict.rejected["triton_mm_1"]
    assert "autotune_choice_name_regex" in verdict.rejected["other"]


def test_ma_o4_preprocessing_also_sees_a_single_library_choice_and_its_kind():
    seen: list[ChoiceCaller] = []
    select.add_preprocessing_fn(lambda choices: seen.extend(choices) or choices)
    choose(aten(1.0))
    choose(aten(1.0), Fake("triton_mm_0", 1.0), key="2")
    assert [type(c) for c in seen] == [ExternKernelCaller, ExternKernelCaller, TritonTemplateCaller]


def test_ma_o5_clearing_preprocessing_functions():
    selector = select.get_algorithm_selector_cache()
    select.add_preprocessing_fn(lambda choices: choices)
    select.clear_preprocessing_fns()
    assert selector.preprocessing_fns == list(trying.FILTERS)
    select.clear_preprocessing_fns(clear_defaults=True)
    assert selector.preprocessing_fns == []
    with config.patch({"test_configs.autotune_choice_name_regex": "nothing like it"}):
        choose(aten(1.0))


def test_ma_o12_names_are_searched_not_matched_whole():
    trials = [aten(1.0), Fake("triton_mm_3", 9.0), Fake("triton_mm_persistent_tma_4", 9.5)]
    with config.patch({"test_configs.autotune_choice_name_regex": "mm_persistent_tma"}):
        assert choose(*trials).winner is trials[2]
    with config.patch({"test_configs.autotune_choice_name_regex": "tma|^mm$"}):
        assert choose(*trials).winner is trials[0]


def test_ma_o13_descriptions_are_filtered_and_libraries_have_none():
    trials = [aten(1.0), Fake("a", 5.0, description="BLOCK_M=64, num_stages=2, num_warps=4"),
              Fake("b", 2.0, description="BLOCK_M=128, num_stages=2, num_warps=8")]  # fmt: skip
    with config.patch({"test_configs.autotune_choice_desc_regex": "BLOCK_M=64,"}):
        assert choose(*trials).winner is trials[1]


# ---- seams


def test_benchmark_choice_can_be_replaced(monkeypatch):
    times = {"mm": 0.1, "a": 0.2, "b": 0.05}
    monkeypatch.setattr(select.AlgorithmSelectorCache, "benchmark_choice",
                        lambda self, choice, *args: times[choice.name])  # fmt: skip
    verdict = choose(aten(1.0), Fake("a", 1.0), Fake("b", 1.0))
    assert verdict.winner.name == "b"
    assert verdict.times["a"].median_us == pytest.approx(200.0)


def test_autotune_and_make_benchmark_fn_are_what_measures(monkeypatch):
    called = []
    for name in ("autotune", "make_benchmark_fn"):
        original = getattr(select.AlgorithmSelectorCache, name)

        def noted(self, *args, name=name, original=original):
            called.append(name)
            return original(self, *args)

        monkeypatch.setattr(select.AlgorithmSelectorCache, name, noted)
    choose(aten(1.0), Fake("a", 1.0))
    assert called == ["autotune", "make_benchmark_fn"]


# ---- errors


def test_ma_q1_no_choices_at_all_says_what_to_change():
    with pytest.raises(NoValidChoicesError) as caught:
        choose()
    text = str(caught.value)
    assert "no choices to select" in text
    assert "ATEN" in text and "max_autotune_gemm_backends" in text and "conv_backends" in text


def test_ma_q2_infinite_times_leave_no_choice(monkeypatch):
    lookup = select.AlgorithmSelectorCache.lookup

    def infinite(self, *args):
        return dict.fromkeys(lookup(self, *args), math.inf)

    monkeypatch.setattr(select.AlgorithmSelectorCache, "lookup", infinite)
    with pytest.raises(NoValidChoicesError, match="no finite time"):
        choose(Fake("a", 1.0), Fake("b", 1.0))


def test_ma_q3_filters_that_leave_nothing_are_named():
    with (
        config.patch({"test_configs.autotune_choice_name_regex": "tma"}),
        pytest.raises(NoValidChoicesError) as caught,
    ):
        choose(aten(1.0), Fake("a", 1.0))
    assert caught.value.reasons.keys() == {"mm", "a"}
    assert str(caught.value).count("autotune_choice_name_regex") >= 3


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("CUDA error: invalid argument", "card may be too small"),
        ("CUDA error: an illegal memory access was encountered", "fault of its template"),
        ("CUDA error: unspecified launch failure", "autotune_in_subproc"),
        ("something else", "RuntimeError: something else"),
    ],
)
def test_ma_q5_a_candidate_that_fails_costs_only_itself(said, told):
    verdict = choose(aten(100.0), Fake("a", 1.0, crash=RuntimeError(said)), Fake("b", 50.0))
    assert verdict.winner.name == "b"
    assert told in verdict.rejected["a"]


def test_ma_q5_any_error_rejects():
    OutOfResources = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    verdict = choose(aten(100.0), Fake("a", 1.0, crash=NotImplementedError("no")),
                     Fake("b", 1.0, crash=OutOfResources("shared memory")))  # fmt: skip
    assert verdict.winner.name == "mm" and "shared memory" in verdict.rejected["b"]
    for error in (TypeError("one"), KeyError("one"), AssertionError("one"), SystemExit(3)):
        verdict = choose(aten(100.0), Fake("c", 1.0, crash=error), key=repr(error))
        assert verdict.winner.name == "mm"
        assert ("one" if str(error) != "3" else "exit code 3") in verdict.rejected["c"]


def test_ma_q5_all_failing_to_compile_is_an_error_with_every_reason():
    with pytest.raises(NoValidChoicesError) as caught:
        choose(Fake("a", 1.0, build=refused("one")), Fake("b", 1.0, build=refused("two")))
    assert "a: did not build: one" in str(caught.value)
    assert "b: did not build: two" in str(caught.value)


def test_a_card_left_unusable_ends_the_tuning_and_the_culprit_is_remembered(clock):
    clock.why_broken = ""
    bad = Fake("a", 1.0, crash=RuntimeError("CUDA error: an illegal memory access"))
    clock.on_sample = lambda trial: None
    clock.bench = _breaking(clock, clock.bench)
    with pytest.raises(
        TilewrightError, match=r"left the card unusable(.|\n)*run the program again"
    ):
        choose(aten(100.0), bad, Fake("b", 50.0))
    clock.why_broken = ""
    trials = [aten(100.0), Fake("a", 1.0), Fake("b", 50.0)]
    assert choose(*trials).winner is trials[2]
    assert trials[1].did("run") == 0


def _breaking(clock, bench):
    def broken(run, sets):
        try:
            return bench(run, sets)
        except RuntimeError:
            clock.why_broken = "CUDA error: an illegal memory access"
            raise

    return broken


# ---- what is shown


def test_silent_unless_asked(capsys):
    choose(aten(100.0), Fake("a", 50.0))
    assert capsys.readouterr().err == ""


def test_the_table_shows_times_and_reasons(capsys):
    trials = [aten(100.0), *(Fake(f"t{k}", 50.0 + k) for k in range(5)),
              Fake("bad", 1.0, build=refused("does not fit"))]  # fmt: skip
    with config.patch(autotune_show=True, autotune_num_choices_displayed=3):
        choose(*trials)
    shown = capsys.readouterr().err
    assert "t0 *" in shown and "50.00" in shown and "t4" not in shown
    assert "3 more" in shown and "does not fit" in shown
    with config.patch(debug=1, max_autotune_report_choices_stats=False):
        choose(*trials, key="2")
    assert "t0 *" not in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tuned_graph() -> str:
    """What a terminal shows of choosing for two products."""
    with contextlib.redirect_stderr(Terminal()) as shown, progress.shown(2):
        choose(aten(100.0), Fake("a", 50.0), Fake("bad", 1.0, build=refused("no")))
        choose(aten(60.0), Fake("a", 70.0), Fake("b", 80.0), key="2")
    return re.sub(r"in [\d.]+ s", "in 0 s", shown.getvalue())


def test_a_terminal_is_told_in_a_line_what_was_tuned():
    assert tuned_graph() == (
        "tilewright: tuned 2 products in 0 s: 4 candidates timed, 1 rejected; "
        "1.45 times as fast as the library\n"
    )
    assert tuned_graph() == ""  # remembered


def test_a_bar_while_tuning_lasts(monkeypatch):
    monkeypatch.setattr(progress, "AFTER", 0.0)
    assert "tuning 2 of 2: mm 4x4x4" in tuned_graph()


def test_a_terminal_is_told_nothing_if_not_wanted():
    with config.patch(autotune_progress=False):
        assert tuned_graph() == ""


def test_what_is_no_terminal_is_told_nothing(capsys, monkeypatch):
    monkeypatch.setattr(progress, "AFTER", 0.0)
    with progress.shown(1):
        choose(aten(100.0), Fake("a", 50.0))
    assert capsys.readouterr().err == ""


def test_the_time_left_grows_while_nothing_is_done():
    assert [progress.time_left(seconds, 0.25) for seconds in (10, 30)] == ["0:00:30", "0:01:30"]
    assert progress.time_left(3, 0.0) == "-:--:--"
