"""`choose`: of several trials that compute the same, the one to run.

Filters, the model's order, builds in worker processes while others are timed, a race of samples,
verification of whoever may win, and a record of it all. Libraries come first, so that there is
always something to take: a budget that ends, or an interrupt, loses nothing that was measured.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tilewright import caches, config, metrics, monitor
from tilewright.errors import BuildError, NoValidChoicesError, TilewrightError
from tilewright.runtime import store
from tilewright.tune import child, clock, display, memory, pool, purse, race, ranks, records, spread
from tilewright.tune import choices as trying
from tilewright.tune.choices import ChoiceCaller, Effort, Preprocessing, Saver, caller
from tilewright.tune.clock import Clock
from tilewright.tune.failures import explained, harmed, nothing_left
from tilewright.tune.purse import budget
from tilewright.tune.records import Choice, Row
from tilewright.tune.results import (
    ADVANTAGE,
    Source,
    Subject,
    Timing,
    Trial,
    Verdict,
    preferred,
)

__all__ = [
    "AlgorithmSelectorCache", "Subject", "Timing", "Trial", "Verdict", "add_feedback_saver",
    "add_preprocessing_fn", "budget", "choose", "clear_feedback_savers",
    "clear_preprocessing_fns", "get_algorithm_selector_cache", "internal",
]  # fmt: skip

log = logging.getLogger("tilewright.tune")
# Seconds for builds of candidates that will probably not win. Most are ready sooner; a fused kernel
# in ten takes its assembler five times as long as the others, for no good.
GRACE = 2.0
LONGEST = 600.0  # seconds that anybody waits for a build
BUILD = 1.0  # seconds of one compiler for one candidate, about
# Microseconds of a run that is made once: what it loses or gains by this much is clear from it, and
# what takes longer than the best so far is ended.
ONCE, CLEARLY = 1e6, 0.8
IN_ONE = 5  # samples that a choice is timed with in the background
Benchmark = Callable[[Sequence[ChoiceCaller]], Mapping[ChoiceCaller, float]]


def choose(subject: Subject, trials: Sequence[Trial]) -> Verdict:
    """The trial to run, built. Raises `NoValidChoicesError` when there is none."""
    return get_algorithm_selector_cache()(subject, trials)


def prepare(subject: Subject, trials: Sequence[Trial]) -> None:
    """Time the libraries, and begin to build what may be faster: for several subjects in a row,
    before `choose` is asked about the first, so that compilers never wait."""
    selector = get_algorithm_selector_cache()
    _Tuning(selector, subject, [caller(t) for t in trials], ahead=True).prepare()


class AlgorithmSelectorCache:
    """Chooses, and remembers what was chosen. There is one of it per process; its methods are the
    places where a test, or a user, may put others in."""

    patience = race.QUIET  # seconds that may be spent on telling the last few apart

    def __init__(self) -> None:
        self.preprocessing_fns: list[Preprocessing] = list(trying.FILTERS)
        self.feedback_saver_fns: list[Saver] = []

    def __call__(self, subject: Subject, trials: Sequence[Trial]) -> Verdict:
        tuning = _Tuning(self, subject, [caller(t) for t in trials])
        try:
            return tuning.verdict()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"while {subject.title} was tuned: what was measured is kept, "
                                    "and the next run goes on from there") from None  # fmt: skip
        finally:
            tuning.keep()
            child.tidied()

    def count(self, what: str, number: int = 1) -> None:
        metrics.counters["inductor"][what] += number

    def share(self, subject: Subject) -> None:
        records.share(subject)

    def lookup(self, tuning: _Tuning, choices: Sequence[ChoiceCaller],
               benchmark: Benchmark | None) -> dict[ChoiceCaller, float]:  # fmt: skip
        """Milliseconds of each choice: remembered, or else measured; infinite where rejected."""
        missing = tuning.missing(choices)
        if missing and benchmark is not None:
            benchmark(missing)
        return {c: _milliseconds(c) for c in choices}

    def autotune(self, tuning: _Tuning, choices: Sequence[ChoiceCaller]
                 ) -> Mapping[ChoiceCaller, float]:  # fmt: skip
        """Measure."""
        self.count("select_algorithm_autotune")
        return self.make_benchmark_fn(tuning)(choices)

    def make_benchmark_fn(self, tuning: _Tuning) -> Benchmark:
        return tuning.fetch if pool.use_pipelined_autotuning() else tuning.benchmark

    def benchmark_choice(self, choice: ChoiceCaller, tuning: _Tuning) -> float:
        """One sample of one choice, in milliseconds."""
        return tuning.sample(choice) / 1000


def _milliseconds(choice: ChoiceCaller) -> float:
    return math.inf if choice.reason else choice.time.median_us / 1000


class _Tuning:
    """One question on its way to an answer."""

    def __init__(self, selector: AlgorithmSelectorCache, subject: Subject,
                 choices: list[ChoiceCaller], ahead: bool = False) -> None:  # fmt: skip
        self.selector = selector
        self.subject = subject
        self.choices = choices
        self.began = time.perf_counter()
        self.deadline = purse.deadline(self.began, ahead)
        self.effort: Effort = trying.effort()
        self.complete = True
        self.spent = 0.0  # seconds of measuring
        self._clock: Clock | None = None
        self._unsaved: list[ChoiceCaller] = []
        self._offered = ""
        self._fetched_choice: Choice | None = None  # from the server
        self.shown = display.of(subject)

    # ---- from the trials to the verdict

    def verdict(self) -> Verdict:
        offered = trying.preprocessed(self.choices, self.selector.preprocessing_fns)
        if not offered:
            raise self._nothing()
        order = trying.ordered(offered)
        if config.deterministic:
            # as given: what the model thinks may change from one version to the next
            given = sorted(offered, key=lambda c: not c.trial.is_library)
            return self._first_good(given, "only" if len(given) == 1 else "model")
        self._offered = store.key(self.effort, *sorted(c.hash_key() for c in order))
        if collect is not None:
            collect(self.subject, [c.trial for c in order])
            self.complete = False
            return self._unmeasured(order)
        if self.effort == "none":
            return self._by_model(order)
        if len(order) == 1:
            return self._first_good(order, "only")
        if self.subject.size > memory.free(self.subject.device):
            log.warning("%s is not measured: it takes %.1f GB, and there is less",
                        self.subject.title, self.subject.size / 1e9)  # fmt: skip
            return self._unmeasured(order)
        return ranks.agreed(self.subject, self._offered, lambda: self._measured(order))

    def _unmeasured(self, order: Sequence[ChoiceCaller]) -> Verdict:
        """Without running anything: eager's own call, or else the model's first."""
        for choice in order:
            choice.reason = ""
        first = min(order, key=lambda c: (not c.trial.is_library, c.trial.estimate))
        first.checked = True
        if not first.trial.is_library:
            self._finish(first)
        return self._done(first, "model")

    def prepare(self) -> None:
        order = trying.ordered(trying.preprocessed(self.choices, self.selector.preprocessing_fns))
        if config.deterministic or self.effort == "none" or len(order) < 2:
            return
        self._offered = store.key(self.effort, *sorted(c.hash_key() for c in order))
        self.recall(order)
        if self.known_choice(order) is not None:
            return
        alive = [c for c in order if not c.reason]
        beyond = trying.out_of_reach(alive, self.effort)
        try:
            hopeful = self._hopeful([c for c in self.missing(alive) if c not in beyond])
            for choice in self._affordable(hopeful):
                self._guarded(choice, choice.trial.start)
        finally:
            self.keep()

    def _by_model(self, order: list[ChoiceCaller]) -> Verdict:
        """Without measuring: by earlier measurements, or else by the model."""
        self.recall(order)
        known = [c for c in order if c.remembered and not c.reason]
        if known:
            return self._fastest(known, "remembered")
        alive = [c for c in order if not c.reason]
        return self._first_good(sorted(alive, key=lambda c: c.trial.estimate), "model")

    def _measured(self, order: list[ChoiceCaller]) -> Verdict:
        self.recall(order)
        known = self.known_choice(order)
        if known is not None and self.is_good(known):
            return self._done(known, "remembered")
        monitor.happened("tuning", self.subject.title)
        like = records.nearest(self.subject)
        order = sorted(order, key=lambda c: (
            not c.trial.is_library, not like or c.description != like))  # fmt: skip
        tried: list[ChoiceCaller] = []
        while True:
            # what does not run no longer counts as the best estimate: others come within reach
            alive = [c for c in order if not c.reason or c.outdone]
            beyond = trying.out_of_reach(alive, self.effort)
            fresh = [c for c in alive if c not in beyond and c not in tried]
            if not fresh or (tried and self._late()):
                break
            tried += fresh
            if tried == alive == fresh and len(tried) == 1:
                return self._first_good(tried, "only")
            self._look_up([c for c in tried if not c.reason])
        for choice, why in beyond.items():
            choice.reject(why, lasting=False)
        alive = [c for c in tried if not c.reason]
        if not alive and not self.complete:  # not even the first was reached
            first = tried[0]
            first.reason = ""
            if first.trial.is_library:  # what the others are compared with, and eager's own
                return self._done(first, "model")
            return self._first_good([first], "model")
        libraries = [c for c in tried if c.trial.is_library]
        if not alive and (libraries or trying.all_are_short(tried)):  # eager's call needs no times
            taken = libraries or order
            log.warning("%s is not measured: %s", self.subject.title, taken[0].reason)
            return self._unmeasured(taken)
        remembered = all(c.remembered for c in alive)
        alive.sort(key=order.index)
        return self._fastest(alive, "remembered" if remembered else "measured")

    def _look_up(self, choices: list[ChoiceCaller]) -> None:
        selector = self.selector
        found = selector.lookup(self, choices, lambda missing: selector.autotune(self, missing))
        for choice, milliseconds in found.items():
            if not choice.reason and not math.isfinite(milliseconds):
                untried = not choice.samples and (not self.complete or self._late())
                choice.reject("the budget was spent before it was tried" if untried
                              else "no finite time was measured", lasting=False)  # fmt: skip
            elif not choice.reason and milliseconds * 1000 != choice.time.median_us:
                choice.timing = Timing(milliseconds * 1000, 0.0, 1)

    def _fastest(self, alive: list[ChoiceCaller], source: Source) -> Verdict:
        """Of choices in order of preference, the one to prefer, if it is good; or the next."""
        given = alive
        while alive:
            # who was not in the finals has too few samples to be compared with those who were
            pool = [c for c in alive if (c.final and not c.lost) or c.remembered] or alive
            winner = pool[preferred([c.time for c in pool])]
            if self.is_good(winner):
                return self._done(winner, source)
            alive = [c for c in alive if not c.reason]
        if trying.all_are_short(given):  # they ran, and could not be compared
            log.warning("%s is not verified: %s", self.subject.title, given[0].reason)
            return self._unmeasured(given)
        raise self._nothing()

    def _first_good(self, order: Iterable[ChoiceCaller], source: Source) -> Verdict:
        for choice in order:
            if self.is_good(choice):
                return self._done(choice, source)
        raise self._nothing()

    def _done(self, winner: ChoiceCaller, source: Source) -> Verdict:
        if source == "measured" and self.complete:
            choice = Choice(winner.hash_key(), winner.description)
            self.keep()
            records.choose(self.subject, self._offered, choice)
            self.selector.share(self.subject)
        times = {c.name: c.time for c in self.choices if c.samples or c.timing is not None}
        rejected = {c.name: c.reason for c in self.choices if c.reason}
        seconds = time.perf_counter() - self.began
        verdict = Verdict(winner.trial, times, rejected, seconds, source, self.complete,
                          self._why(winner))  # fmt: skip
        if source in ("measured", "remembered"):
            tried = [c for c in self.choices if c.name in times or c.reason]
            told = {c: _milliseconds(c) for c in tried}
            trying.tell(self.selector.feedback_saver_fns, self.subject, tried, told)
        display.logged(self.subject, verdict)
        self.shown.decided(verdict, self.choices)
        return verdict

    def _why(self, winner: ChoiceCaller) -> str:
        """Why it is taken, where another is shown to be faster by enough to matter."""
        timed = [c for c in self.choices if c.time.samples and not c.reason]
        best = min(timed, key=lambda c: c.time.median_us, default=winner)
        if best.time.median_us >= (1 - ADVANTAGE) * winner.time.median_us:
            return ""
        if winner.remembered:
            return "as decided when they were measured"
        if not (winner.final and best.final):
            return f"there was no time for it to meet {best.name}"
        if winner.may_be_within(best.time.median_us):
            return f"the machine was busy: {winner.name} was never timed undisturbed"
        if best.behind:
            return f"{best.name} is {best.behind:.1%} slower where the card has rested"
        return f"{best.name} is not faster for certain: times are known to {winner.margin:.1%}"

    # ---- records

    def known_choice(self, order: Sequence[ChoiceCaller]) -> ChoiceCaller | None:
        """What was chosen when the same was offered."""
        found = ranks.adopted(self.subject, self._offered) or self._fetched_choice
        if found is None and not config.autotune_local_cache:
            return None
        found = found or records.chosen(self.subject, self._offered)
        return next((c for c in order if found and c.hash_key() == found.trial), None)

    def recall(self, choices: Sequence[ChoiceCaller]) -> None:
        """Take over what earlier runs found of these choices."""
        rows = records.measured(self.subject) if config.autotune_local_cache else {}
        if not rows and records.had_from_others(self.subject):
            rows = records.measured(self.subject)
            self._fetched_choice = records.chosen(self.subject, self._offered)
        if not rows and log.isEnabledFor(logging.INFO):
            for other in records.elsewhere(self.subject):
                log.info("%s was measured, but not here: %s; this is %s", self.subject.title,
                         other, records.environment(self.subject.device))  # fmt: skip
        for choice in choices:
            row = rows.get(choice.hash_key())
            if row is None or choice.samples:
                continue
            choice.checked |= row.checked
            if row.reason:
                choice.reject(f"{row.reason} (as an earlier run found)", lasting=False)
            elif row.timing is not None:
                choice.timing, choice.remembered, choice.final = row.timing, True, row.final

    def missing(self, choices: Sequence[ChoiceCaller]) -> list[ChoiceCaller]:
        """Those to measure: without a time, or with one that was interrupted and may yet win. What
        comes anew meets who was the fastest: a machine is not what it was then."""
        timed = [c for c in choices if c.time.samples and not c.reason]
        best = min((c.time.median_us for c in timed), default=math.inf)
        anew = len(timed) < len(choices)
        open_ = [c for c in timed if c.remembered and (anew or not c.final)
                 and c.time.median_us <= (race.FINAL + c.time.noise) * best]  # fmt: skip
        if len(open_) > 1 or anew:
            for choice in open_:
                choice.remembered, choice.timing, choice.earlier = False, None, choice.timing
        return [c for c in choices if not c.reason and not c.time.samples]

    def keep(self) -> None:
        """Write down what is not yet, also when interrupted."""
        rows: list[Row] = []
        for c in self._unsaved:
            if c.reason and c.lasting:
                rows.append(Row(c.hash_key(), c.name, c.provider, None, c.reason))
            elif not c.reason and (c.samples or c.timing is not None):
                rows.append(Row(c.hash_key(), c.name, c.provider, c.time, "", c.checked, c.final))
        self._unsaved = []
        records.keep(self.subject, rows)

    def _changed(self, choice: ChoiceCaller) -> None:
        if choice not in self._unsaved:
            self._unsaved.append(choice)

    # ---- measuring

    def benchmark(self, order: Sequence[ChoiceCaller]) -> Mapping[ChoiceCaller, float]:
        """Build, look, halve, verify, and let the last few take turns."""
        self.shown.started(len(order))
        clock = self.clock
        self._count_builds(order)
        in_turn = trying.own_first(order)
        try:
            hopeful = self._hopeful(in_turn) if clock.is_quiet else in_turn
            built = self._built(hopeful, all_first=not clock.is_quiet)
            cards = spread.several(self.subject.device)
            self._look(self._sifted(built, cards) if cards else built)
            tried = [c for c in order if c.samples and not c.reason]
            if self._once(tried):
                return {c: _milliseconds(c) for c in order}
            self._finals(order, race.halved(tried, self._take, self._late, clock.is_quiet))
        finally:
            self.keep()
            for choice in order:
                choice.bench = None
            self.shown.stopped()
        return {c: _milliseconds(c) for c in order}

    def fetch(self, order: Sequence[ChoiceCaller]) -> Mapping[ChoiceCaller, float]:
        """What the process in the background finds of each; of those that cannot be sent there,
        what is measured here."""
        waiting = {c: future for c in order if (future := self.ask(c)) is not None}
        for choice, future in waiting.items():
            self._changed(choice)
            self._guarded(choice, functools.partial(self._fetched, choice, future))
        self.benchmark([c for c in order if c not in waiting])
        self.keep()
        return {c: _milliseconds(c) for c in order}

    def ask(self, choice: ChoiceCaller) -> Future[Any] | None:
        """Have a choice timed in the background, as far as that can be."""
        made = getattr(choice.trial, "remote", None)
        if made is None:
            return None
        remote = made()
        key = store.key(self.subject.key, choice.hash_key())
        return pool.AsyncAutotuner.start(key, functools.partial(child.whole, remote, IN_ONE))

    def _fetched(self, choice: ChoiceCaller, future: Future[Any]) -> None:
        samples, wrong = future.result()
        choice.ready = choice.checked = True
        if wrong:
            choice.reject(f"its result is wrong: {wrong}", lasting=True)
        for us in samples:
            choice.took(us)
        choice.final = True

    def _once(self, tried: Sequence[ChoiceCaller]) -> bool:
        """Whether one run of each has to do: they are long. A library is then left only for what is
        clearly faster."""
        best = min(tried, key=lambda c: c.time.median_us, default=None)
        if best is None or best.time.median_us < ONCE:
            return False
        libraries = [c for c in tried if c.trial.is_library]
        slow = [c for c in libraries if best.time.median_us < CLEARLY * c.time.median_us]
        taken = best if len(slow) == len(libraries) else min(
            libraries, key=lambda c: c.time.median_us)  # fmt: skip
        for choice in tried:
            choice.final, choice.lost = True, choice is not taken
        return True

    def _finals(self, order: Sequence[ChoiceCaller], fastest: Sequence[ChoiceCaller]) -> None:
        """Let the last few take turns; then who won, and whoever looks faster by now. The times of
        the others are at last expressed in theirs."""
        quiet = self.clock.is_quiet
        patience = self.selector.patience if quiet else race.NOISY
        before: dict[ChoiceCaller, Timing] = {}
        while fastest and not self._late():
            finalists = self._levelled(self._verified(fastest))
            before = before or {c: c.time for c in order if c.samples and not c.reason}
            race.finals([c for c in order if c in finalists], self._take, self._late, patience,
                        quiet, self.clock.heats)  # fmt: skip
            winner = next((c for c in finalists if c.final and not c.lost and not c.reason), None)
            if winner is None:
                return
            others = [] if quiet else race.overlooked([c for c in order if c.samples], winner)
            met = [c for c in finalists if c is winner or c.trial.is_library]
            fastest = [*met, *others] if others else []
        if not quiet or not before:
            return
        race.express([c for c in before if not c.final], before)
        then = {c: c.earlier or c.time for c in self.choices if c.earlier or c.remembered}
        race.express([c for c in then if c.remembered], then)

    def _hopeful(self, order: Sequence[ChoiceCaller]) -> list[ChoiceCaller]:
        """Look at those that need no compiler; then the others, but for what these outdo."""
        if self._late():
            self._cut()
            return []
        ready = [c for c in order if not c.trial.compiles]
        self._look(c for c in ready if self._finish(c))
        others = [c for c in order if c.trial.compiles]
        timed = [c for c in self.choices if c.time.samples and not c.reason]
        best = min((c for c in timed if not c.trial.compiles), key=lambda c: c.time.median_us,
                   default=None)  # fmt: skip
        if best is not None:
            for choice, why in trying.outdone(others, best, self.effort).items():
                choice.reject(why, lasting=False)
                choice.outdone = True
        return [c for c in others if not c.reason]

    def _look(self, choices: Iterable[ChoiceCaller]) -> None:
        times = [c.time.median_us for c in self.choices if c.time.samples and not c.reason]
        best = min(times, default=math.inf)
        failed: set[str] = set()  # providers of others, in this process: what is next may harm it
        for choice in choices:
            if choice.trial.provider in failed and math.isfinite(best):
                choice.reject("another of its provider failed in this process", lasting=False)
                continue
            race.look(choice, best, self._take, self.clock.is_quiet)
            best = min(best, choice.time.median_us) if not choice.reason else best
            if choice.reason and choice.is_foreign and trying.remote_of(choice) is None:
                failed.add(choice.trial.provider)
            self.shown.tried(choice)
            if self._late() and math.isfinite(best):
                self._cut()
                return

    def _sifted(self, built: Iterable[ChoiceCaller], cards: Sequence[child.Device]
                ) -> list[ChoiceCaller]:  # fmt: skip
        """Without those that are far slower than others on cards like this one."""
        near, far = spread.sifted(built, self.choices, cards, self._guarded, self._waited)
        for choice in far:
            self._changed(choice)
            self.shown.tried(choice)
        return near

    def _waited(self, seconds: float) -> bool:
        """For other cards; whether time is up."""
        self.spent += seconds
        purse.spend(seconds)
        return self._late()

    def _built(self, order: Sequence[ChoiceCaller], all_first: bool) -> Iterable[ChoiceCaller]:
        """Each choice once it is built, the next ones being built meanwhile; or, where building
        would disturb the timing, all of them at the end."""
        ahead = 2 * _compilers()
        ready: list[ChoiceCaller] = []
        left = self._affordable(order)  # ours, then others'
        until = time.perf_counter() + GRACE
        limit = time.perf_counter() + config.precompilation_timeout_seconds
        while left:
            if time.perf_counter() >= limit:
                left = self._not_built(left)
                limit = math.inf
                continue
            known = (c for c in self.choices if not c.reason)
            if self._late() and (ready or any(c.samples or c.trial.is_library for c in known)):
                self._cut()
                break
            for later in left[:ahead]:
                self._guarded(later, later.trial.start)
            group = [c for c in left if c.is_foreign == left[0].is_foreign]
            choice = self._next(group[:ahead], until, limit)
            if choice is None and (self._late() or time.perf_counter() >= limit):
                continue
            if choice is None:
                self._not_awaited(group)
                left = left[len(group) :]
                continue
            left.remove(choice)
            if not choice.reason and self._finish(choice):
                if all_first:
                    ready.append(choice)
                else:
                    yield choice
        ready.sort(key=order.index)
        for choice in ready:
            if self._late() and choice is not ready[0]:
                self._cut()
                return
            yield choice

    def _affordable(self, order: Sequence[ChoiceCaller]) -> list[ChoiceCaller]:
        """Without those that there is no time to build: compilers that were started work on, when
        others are waited for."""
        left = self.deadline - time.perf_counter()
        if not math.isfinite(left):
            return list(order)
        most = int(max(0.0, left) * _compilers() / BUILD)
        compiled = [c for c in order if c.trial.compiles]
        self.complete &= len(compiled) <= most
        return [c for c in order if c not in compiled[most:]]

    def _next(self, started: Sequence[ChoiceCaller], until: float, limit: float
              ) -> ChoiceCaller | None:  # fmt: skip
        """The first that is built, or else the first; none where all of them are still being built
        and not worth more time than until then, or the limit of all builds is reached, or the
        budget is spent and there is another."""
        best = self._best()
        certain = best is None or any(not trying.is_doubtful(c, best) for c in started)
        end = min(self.deadline, limit, math.inf if certain else until)
        for seconds in (0.0, max(0.0, min(end - time.perf_counter(), LONGEST))):
            started[0].trial.wait(seconds)
            for choice in started:
                if choice.reason or choice.trial.wait(0):
                    return choice
        if time.perf_counter() >= limit:
            return None
        return started[0] if certain and (best is None or not self._late()) else None

    def _not_built(self, choices: Sequence[ChoiceCaller]) -> list[ChoiceCaller]:
        """Those that are built; the others took too long, this time."""
        self.complete = False
        done = [c for c in choices if c.reason or c.trial.wait(0)]
        for choice in choices:
            if choice not in done:
                why = f"precompilation_timeout_seconds = {config.precompilation_timeout_seconds}"
                choice.reject(f"it was not built within config.{why}", lasting=False)
        return done

    def _not_awaited(self, choices: Sequence[ChoiceCaller]) -> None:
        best = self._best()
        assert best is not None
        for choice in choices:
            choice.reject(trying.not_awaited(choice, best), lasting=False)
            choice.outdone = True

    def _best(self) -> ChoiceCaller | None:
        """The fastest so far."""
        timed = (c for c in self.choices if c.time.samples and not c.reason)
        return min(timed, key=lambda c: c.time.median_us, default=None)

    def _count_builds(self, order: Sequence[ChoiceCaller]) -> None:
        key = store.key(self.subject.key, *sorted(c.hash_key() for c in order))
        if key not in _waited_for:
            _waited_for.add(key)
            self.selector.count("select_algorithm_precompile")
            built = {c.kernel_hash_key() for c in order}
            self.selector.count("select_algorithm_num_precompiles", len(built))

    def _verified(self, fastest: Sequence[ChoiceCaller]) -> list[ChoiceCaller]:
        """Those whose results are right."""
        return [c for c in fastest if self.is_good(c)]

    def _levelled(self, finalists: list[ChoiceCaller]) -> list[ChoiceCaller]:
        """Those that go on with as many runs in a sample as all others."""
        fastest = min((c.time.median_us for c in finalists), default=0.0)
        return [c for c in finalists
                if c.bench is None or self._guarded(c, functools.partial(c.bench.level, fastest))
                ]  # fmt: skip

    def is_good(self, choice: ChoiceCaller) -> bool:
        """Whether a choice may win: it is built, and computes what it should."""
        if choice.reason or not self._finish(choice):
            return False
        if not choice.checked:
            wrong: list[str] = []
            remote = trying.remote_of(choice)
            check = choice.trial.check if remote is None else lambda: child.checked(remote)
            if not self._guarded(choice, lambda: wrong.append(check())):
                return False
            if wrong[0]:
                choice.reject(f"its result is wrong: {wrong[0]}", lasting=True)
                log.warning("%s: %s: %s", self.subject.title, choice.name, choice.reason)
            choice.checked = True
            self._changed(choice)
        return not choice.reason

    def _finish(self, choice: ChoiceCaller) -> bool:
        if not choice.ready:
            began = time.perf_counter()
            choice.ready = self._guarded(choice, choice.trial.finish)
            choice.build_seconds = time.perf_counter() - began
            if not choice.ready:
                self.selector.count("select_algorithm_num_precompilation_exceptions")
        return choice.ready

    def _take(self, choice: ChoiceCaller) -> bool:
        """Take a sample."""

        def take() -> None:
            began = time.perf_counter()
            try:
                choice.took(1000 * self.selector.benchmark_choice(choice, self))
            finally:
                self.spent += time.perf_counter() - began
                purse.spend(time.perf_counter() - began)
            if len(choice.samples) == 1 and choice.trial.is_library and choice.samples[0] > ONCE:
                log.warning("%s: one run takes %.1f s; it is measured for about %.0f s at most, "
                            "which config.autotune_budget_seconds changes", self.subject.title,
                            choice.samples[0] / 1e6, self._limit())  # fmt: skip

        self._changed(choice)
        if self._guarded(choice, take) and not math.isfinite(choice.samples[-1]):
            choice.reject("no finite time was measured", lasting=False)
        return not choice.reason

    @property
    def clock(self) -> Clock:
        if self._clock is None:
            self._clock = clock.of(self.subject.device)
        return self._clock

    def sample(self, choice: ChoiceCaller) -> float:
        """One sample in microseconds; the first one makes the choice ready to be timed."""
        if choice.bench is None:
            kind = "gpu" if self.subject.device.type == "cuda" else "cpu"
            self.selector.count(f"benchmarking.Benchmarker.benchmark_{kind}")
            best = self._best()
            long = best is not None and best.time.median_us > ONCE
            remote = trying.remote_of(choice, long and not choice.trial.is_library)
            seconds = 0.5 + best.time.median_us / 1e6 if long and best is not None else None
            choice.is_quiet = self.clock.is_quiet
            choice.bench = (self.clock.bench(choice.trial.run, self.subject.sets)
                            if remote is None else child.Sampler(remote, seconds))  # fmt: skip
        us = choice.bench.sample()
        choice.waited = choice.bench.waited
        return us

    def _late(self) -> bool:
        return time.perf_counter() >= self.deadline or self._limit() <= self.spent

    def _limit(self) -> float:
        """Seconds of measuring that there are, where the options set no limit."""
        if self.effort == "max":
            return math.inf
        first = (c.samples[0] for c in self.choices if c.trial.is_library and c.samples)
        return purse.limit(self.spent, max(first, default=0.0) / 1e6)

    def _cut(self) -> None:
        """Not all was tried. Where that is for a limit of the options, the next run goes on."""
        self.complete &= time.perf_counter() < self.deadline

    # ---- what goes wrong

    def _guarded(self, choice: ChoiceCaller, work: Callable[[], object]) -> bool:
        """Do something with a choice; an error is why it is rejected."""
        try:
            work()
        except (Exception, SystemExit) as error:
            if config.triton.disallow_failing_autotune_kernels_TESTING_ONLY:
                raise
            reason, lasting = explained(error)
            choice.reject(reason, lasting=lasting)
            self._changed(choice)
            log.info("%s: %s is rejected: %s", self.subject.title, choice.name, reason)
            broken = "" if isinstance(error, BuildError) else self.clock.broken()
            if broken:
                raise self._harmed(choice, broken) from error
            return False
        return True

    def _harmed(self, choice: ChoiceCaller, broken: str) -> TilewrightError:
        choice.lasting = True
        return harmed(f"candidate {choice.name} for {self.subject.title}", broken)

    def _nothing(self) -> NoValidChoicesError:
        reasons = {c.name: c.reason for c in self.choices if c.reason}
        display.refused(self.subject, reasons)
        return nothing_left(self.subject.title, bool(self.choices), reasons)


def _compilers() -> int:
    """How many run at once."""
    return config.compile_threads or len(os.sched_getaffinity(0))


# Given every question, which then is not measured: somebody else will.
collect: Callable[[Subject, Sequence[Trial]], None] | None = None
_waited_for: set[str] = set()
caches.register(_waited_for.clear)


def unmeasured(subject: Subject, trials: Sequence[Trial]) -> Trial:
    """The choice where there is nothing to measure on: of those the filters leave, the first
    library's, or else the first. Nothing is built."""
    selector = get_algorithm_selector_cache()
    tuning = _Tuning(selector, subject, [caller(t) for t in trials])
    offered = trying.preprocessed(tuning.choices, selector.preprocessing_fns)
    if not offered:
        raise tuning._nothing()
    return min(offered, key=lambda c: not c.trial.is_library).trial


# ---- the user's functions


class _Internal(AlgorithmSelectorCache):
    """For configurations of one kernel: without the filters and the user's functions, which are
    for products, and counted apart from them. There are many kernels, and less to gain of each."""

    patience = race.NOISY

    def __init__(self) -> None:
        super().__init__()
        self.preprocessing_fns.clear()

    def count(self, what: str, number: int = 1) -> None:
        metrics.counters["tune"][what] += number

    def share(self, subject: Subject) -> None:
        """Left to who asks, who has more to say of a kernel than who was faster in one race."""


_selector = AlgorithmSelectorCache()
internal = _Internal()


def get_algorithm_selector_cache() -> AlgorithmSelectorCache:
    return _selector


def add_preprocessing_fn(fn: Preprocessing) -> None:
    """Have `fn(choices) -> choices` called before anything is built: it may leave choices out,
    reorder them, or only look."""
    _selector.preprocessing_fns.append(fn)


def clear_preprocessing_fns(clear_defaults: bool = False) -> None:
    """Forget the user's functions; with `clear_defaults` the filters of `test_configs` too."""
    _selector.preprocessing_fns[:] = [] if clear_defaults else trying.FILTERS


def add_feedback_saver(fn: Saver) -> None:
    """Have `fn(timings, name, inputs, choices, profiled_time_fn[, precompile_times])` called with
    what was measured, in milliseconds, whenever something was chosen by measuring."""
    _selector.feedback_saver_fns.append(fn)


def clear_feedback_savers() -> None:
    _selector.feedback_saver_fns.clear()
