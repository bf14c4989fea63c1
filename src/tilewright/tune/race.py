"""How many samples of whom: a first look, halving, and finals in turns.

Most candidates are far from the best and are known to be after a sample or two. Those that are not
are sampled more in every round, and the last few take turns, so that a drift of the clock or of the
machine meets all alike; only what happened in the same turn is compared. Whoever is near the border
between being preferred and not takes many more turns, so that the next tuning decides the same. A
library, which is what would run otherwise, is left only for what outruns it when they meet alone,
and is not behind it on a card that has rested.

Times that are shown or kept together are of one moment: those of an earlier one are expressed in it
by what those that were there both times took (`express`). Where others use the machine they only
ever make a sample longer, so there those count that nobody did, of whatever turn.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.tune.choices import ChoiceCaller
from tilewright.tune.results import ADVANTAGE, MOST_NOISE, Timing, timing

FAR = 2.0  # times the best: one sample is enough to know
LOOKS, LOOK = 5, 0.05  # on a noisy machine so many, but one where it takes more seconds
# A round: who is within this factor of the best goes on, and takes so many samples more.
ROUNDS = ((1.5, 2), (1.2, 3))
# On a noisy machine: more of them, after the first two while that takes no more than such seconds.
NOISY_ROUNDS, ROUND = ((2.0, 4), (1.4, 4)), 0.1
# Who may still win, beside the noise; and how many. Generous: who is as fast as the best within the
# least advantage has to be here every time, or equals would take turns in winning.
FINAL = 1.05
FINALISTS = 16
# A library within this factor of the best is in the finals, whatever its first samples say; on a
# noisy machine within the second. In four tunings of ten they were 5 % above what 16x14336x4096 in
# bfloat16 takes (H200), and it was not there to be preferred.
LIBRARY, NOISY_LIBRARY = 1.2, 1.5
LEAST_TURNS, MOST_TURNS = 12, 1024  # looked at after the first, then at twice as many
# Seconds after which the finals end, those with a library as well: more does not settle a noisy
# machine.
QUIET, NOISY = 0.4, 0.3
# Of the time: where memory lies changes a time by as much (H200), so more turns would not tell what
# the next tuning will find.
SETTLED = 0.001
FEWEST_TURNS = 4  # even then
# Of a machine that others use some samples are of no use at all: so many turns all the same, unless
# they take several times as long.
FEWEST_NOISY, LONGER = 8, 4
PATIENT = 3  # times as many seconds there for those that meet a library, as long as it is not clear
SURE = 1.25  # times the noise from the border: there are several looks, each may be mistaken
ACCIDENT = 0.005  # how probable it may be that equals win so many turns

# A card that is kept busy comes to its limit of power, and what then is faster need not be before:
# 4096x4096x4096 in float16 by the library's own choice takes 184.6 us after a pause and 216.9 us
# later, by another of its algorithms 188.2 and 210.9 (H200).
POWERFUL = 40.0  # microseconds of a run that may bring it there
LASTING = 1000.0  # and of one after a few dozens of which it is always there
# Seconds of rest, the first time and then, and of turns each time: too few for the limit.
RESTS, BURST = (0.08, 0.03, 0.03), 0.025
FEWEST_RESTED = 3  # turns each time
# Of its time that a choice may lose to a library on a card that has rested: what measuring may be
# wrong by. 4096x4096x4096 in bfloat16 loses 1.0 to 1.9 %, and gains 3 % later (H200).
BEHIND = 0.005

Take = Callable[[ChoiceCaller], bool]  # takes a sample; False once the choice is rejected
Late = Callable[[], bool]  # whether time is up
Turn = dict[ChoiceCaller, float]  # microseconds


def look(choice: ChoiceCaller, best: float, take: Take, is_quiet: bool = True) -> None:
    """The first samples of a choice, fewer if it is far from the best time so far. On a noisy
    machine it may only seem to be: there more, if that does not take long."""
    began = time.perf_counter()
    for count in range(1, (2 if is_quiet else LOOKS) + 1):
        long = not is_quiet and count > 1 and time.perf_counter() - began > LOOK
        if long or not take(choice) or (is_quiet and min(choice.samples) > FAR * best):
            return


def halved(choices: Sequence[ChoiceCaller], take: Take, late: Late, is_quiet: bool = True
           ) -> list[ChoiceCaller]:  # fmt: skip
    """Those that may still win, fastest first. A library that is not far from the best is among
    them: timed first, it may have met what was busy with something else."""
    alive = _fastest(choices)
    library = LIBRARY if is_quiet else NOISY_LIBRARY
    for within, more in ROUNDS if is_quiet else NOISY_ROUNDS:
        alive = _few(_within(alive, within, library), max(FINALISTS, (len(alive) + 1) // 2))
        began = time.perf_counter()
        for count in range(more):
            long = not is_quiet and count >= 2 and time.perf_counter() - began > ROUND
            if late() or len(alive) == 1 or long:
                break
            alive = [c for c in alive if take(c)]
        alive = _fastest(alive)
    noise = max((c.time.noise for c in alive[:2]), default=0.0)
    return _few(_within(alive, FINAL + min(MOST_NOISE, noise), library), FINALISTS)


def _few(fastest: Sequence[ChoiceCaller], most: int) -> list[ChoiceCaller]:
    """The first few, and every library: it is what the others have to beat."""
    return [c for k, c in enumerate(fastest) if k < most or c.trial.is_library]


def _fastest(choices: Sequence[ChoiceCaller]) -> list[ChoiceCaller]:
    return sorted((c for c in choices if not c.reason), key=lambda c: c.time.median_us)


def _within(fastest: Sequence[ChoiceCaller], factor: float, library: float) -> list[ChoiceCaller]:
    """Those that are as fast as the best within a factor, or may be for all that is known."""
    best = fastest[0].time.median_us if fastest else 0.0
    return [c for c in fastest if c.may_be_within(
        best * (max(factor, library) if c.trial.is_library else factor))]  # fmt: skip


def finals(choices: Sequence[ChoiceCaller], take: Take, late: Late, seconds: float,
           is_quiet: bool = True, heats: bool = False) -> None:  # fmt: skip
    """Turns among choices in order of preference, until it is clear who is to be preferred or so
    many seconds are over, first without libraries and then with them. Sets their `timing`, and
    `lost` of all but the one to take.

    What is to replace a library meets it again with nobody else there: how fast a card runs what
    keeps it at its limit of power depends on what ran before, and among many that is mostly others.
    Where a machine `heats` they meet once more after rests, away from that limit.
    """
    others = [c for c in choices if not c.trial.is_library]
    last, first = list(choices), dict[ChoiceCaller, Timing]()
    if 0 < len(others) < len(choices):
        near = _run(others, _Turns(is_quiet), take, late, seconds)
        first = {c: c.time for c in others if c.final}
        last = [c for c in choices if c.trial.is_library or c in near]
    patience = seconds if is_quiet else PATIENT * seconds
    taken = next(iter(_run(last, _Turns(is_quiet), take, late, patience)), None)
    if heats and taken is not None and POWERFUL < taken.time.median_us < LASTING:
        taken = _rested(taken, last, take, late)
    if taken is not None and is_quiet:
        express([c for c in first if c not in last], first)
    for choice in choices:
        if taken is None:  # no time was left: what is known of the libraries as well has to do
            choice.final |= choice.trial.is_library
        else:
            choice.lost = choice.final and choice is not taken


def _rested(taken: ChoiceCaller, choices: Sequence[ChoiceCaller], take: Take, late: Late
            ) -> ChoiceCaller:  # fmt: skip
    """What was taken, or the fastest library if that is ahead of it on a card that has rested."""
    libraries = [c for c in choices if c.trial.is_library and not c.reason]
    if not libraries or taken.trial.is_library:
        return taken
    library = min(libraries, key=lambda c: c.time.median_us)
    turns: list[Turn] = []
    for rest in RESTS:
        time.sleep(rest)
        end, few = time.perf_counter() + BURST, len(turns) + FEWEST_RESTED
        while time.perf_counter() < end or len(turns) < few:
            order = (taken, library) if len(turns) % 2 else (library, taken)
            if late() or not all(take(c) for c in order):
                return library if taken.reason else taken
            turns.append({c: c.samples[-1] for c in order})
    behind = _middle([turn[taken] / max(turn[library], 1e-9) for turn in turns]).median_us - 1
    if behind <= BEHIND:
        return taken
    taken.behind = behind
    return library


def express(choices: Sequence[ChoiceCaller], before: Mapping[ChoiceCaller, Timing]) -> None:
    """Set the times of choices, which are of an earlier moment like all of `before`, to what they
    would be now: by the others of `before`, which have been timed again."""
    again = [(c.time.median_us, was.median_us) for c, was in before.items()
             if c not in choices and not c.reason]  # fmt: skip
    logs = [math.log(now / was) for now, was in again if now > 0 and was > 0]
    scale = math.exp(statistics.median(logs)) if logs else 1.0
    for choice in choices:
        was = before[choice]
        choice.timing = replace(was, median_us=scale * was.median_us, spread=scale * was.spread)


def overlooked(choices: Sequence[ChoiceCaller], winner: ChoiceCaller) -> list[ChoiceCaller]:
    """Those that were left out of the finals, and look faster than who won them does by now."""
    limit = (1 - ADVANTAGE) * winner.time.median_us
    return [c for c in choices if not c.reason and not c.final and c.time.median_us < limit]


@dataclass
class _Turns:
    """What was sampled, turn by turn, and what follows from it."""

    is_quiet: bool
    all: list[Turn] = field(default_factory=list[Turn])

    def loss(self, choice: ChoiceCaller, best: ChoiceCaller) -> tuple[float, float]:
        """What part of its time a choice could save, and how uncertain that is."""
        sure = SURE * (1 + 6 / len(self.all))  # of few turns the spread itself is uncertain
        if self.is_quiet:
            ratio = _middle([turn[best] / max(turn[choice], 1e-9) for turn in self.all])
            return 1 - ratio.median_us, sure * ratio.noise * ratio.median_us
        fast, slow = best.sampled, choice.sampled
        part = fast.median_us / max(slow.median_us, 1e-9)
        lost, noise = 1 - part, sure * math.hypot(fast.noise, slow.noise) * part
        if lost > ADVANTAGE and self.is_ahead(best, choice):
            noise = min(noise, lost - ADVANTAGE)
        return lost, noise

    def is_ahead(self, best: ChoiceCaller, choice: ChoiceCaller) -> bool:
        """Whether one was faster by enough in so many of their turns that it is no accident. What
        others do meets both of them: however much it is, it does not decide who wins a turn."""
        won = [turn[best] < (1 - ADVANTAGE) * turn[choice] for turn in self.all
               if best in turn and choice in turn]  # fmt: skip
        more = sum(math.comb(len(won), k) for k in range(sum(won), len(won) + 1))
        return bool(won) and more <= ACCIDENT * 2 ** len(won)

    def times(self, alive: Sequence[ChoiceCaller]) -> dict[ChoiceCaller, Timing]:
        """Of all that took part, as those would have it that always did."""
        known = dict.fromkeys(c for turn in self.all for c in turn if not c.reason)
        if not self.is_quiet:
            return {c: c.sampled for c in known}
        found = paired(alive, self.all)
        for choice in known.keys() - found.keys():
            beside = [turn for turn in self.all if choice in turn]
            parts = [1 - _Turns(True, beside).loss(choice, c)[0] for c in alive]
            logs = [math.log(found[c].median_us / max(part, 1e-9))
                    for c, part in zip(alive, parts, strict=True)]  # fmt: skip
            own = timing([turn[choice] for turn in beside])
            middle = math.exp(statistics.fmean(logs))
            spread = own.spread * middle / max(own.median_us, 1e-9)
            found[choice] = Timing(middle, spread, len(beside))
        return found

    def settle(self, alive: Sequence[ChoiceCaller]) -> None:
        """Set the times of those that took part."""
        if self.all and alive:
            for choice, found in self.times(alive).items():
                choice.timing, choice.final = found, True

    def losses(self, alive: Sequence[ChoiceCaller]) -> dict[ChoiceCaller, tuple[float, float]]:
        """What part of its time each could save by being the fastest, and how uncertain that is."""
        if not alive or not self.all:
            return {}
        best = min(alive, key=lambda c: c.time.median_us)
        found = {c: (0.0, 0.0) if c is best else self.loss(c, best) for c in alive}
        # it may only seem to be the fastest
        found[best] = 0.0, max((noise - loss for loss, noise in found.values()), default=0.0)
        return found


def _run(choices: Sequence[ChoiceCaller], turns: _Turns, take: Take, late: Late, seconds: float
         ) -> list[ChoiceCaller]:  # fmt: skip
    """The one to take, after as many turns as it needs, and the fastest; none where there was no
    time for any."""
    alive = list(choices)
    began = time.perf_counter()
    look_at = LEAST_TURNS
    while len(turns.all) < MOST_TURNS and alive and not late():
        # every other turn the other way round: who follows whom must not matter
        order = alive if len(turns.all) % 2 == 0 else alive[::-1]
        turns.all.append({c: c.samples[-1] for c in order if take(c)})
        alive = [c for c in alive if not c.reason]
        took = time.perf_counter() - began
        slow = took > seconds and (turns.is_quiet or len(turns.all) >= FEWEST_NOISY
                                   or took > LONGER * seconds)  # fmt: skip
        if len(turns.all) < (FEWEST_TURNS if slow else look_at):
            continue
        look_at = 2 * len(turns.all)
        turns.settle(alive)
        open_ = _open(turns.losses(alive))
        if slow or not open_:
            break
        alive = [c for c in alive if c in open_ or c.trial.is_library]
    turns.settle(alive)
    libraries = [c for c in alive if c.trial.is_library]
    losses = turns.losses(alive)
    fastest = [c for c, (loss, _) in losses.items() if loss == 0]
    unknown = [c for c in libraries if fastest and c not in fastest
               and c.may_be_within(fastest[0].time.median_us)
               and not turns.is_ahead(fastest[0], c)]  # fmt: skip
    if unknown:  # nobody is known to be faster
        return [unknown[0], *fastest]
    for choice, (loss, noise) in losses.items():
        choice.margin = max(ADVANTAGE, min(MOST_NOISE, noise))
        if loss <= choice.margin and (choice in libraries or _outruns(choice, libraries, turns)):
            return [choice, *fastest]
    return fastest


def _outruns(choice: ChoiceCaller, libraries: Sequence[ChoiceCaller], turns: _Turns) -> bool:
    """Whether it is faster than the libraries by enough: to be nearly as fast as the one that is
    would not be enough."""
    return all(turns.loss(c, choice)[0] > ADVANTAGE for c in libraries)


def _open(losses: Mapping[ChoiceCaller, tuple[float, float]]) -> set[ChoiceCaller]:
    """Those that more turns are needed of; none where it is clear who is preferred."""
    open_: set[ChoiceCaller] = set()
    for choice, (loss, noise) in losses.items():
        margin = noise if noise > SETTLED else 0.0
        if ADVANTAGE - margin < loss < ADVANTAGE + margin:
            open_.add(choice)
        if loss <= max(0.0, ADVANTAGE - margin):  # it is taken if nobody before it is
            open_ |= {choice} if open_ else set()
            break
    if not open_:
        return set()
    # who may be the best after all says what the others lose
    return (
        open_
        | {c for c, (loss, noise) in losses.items() if loss < min(noise, ADVANTAGE)}
        | {c for c, (loss, _) in losses.items() if loss == 0}
    )


def _middle(parts: Sequence[float]) -> Timing:
    """The mean of the middle half: as blind to outliers as the median, and steadier."""
    inner = sorted(parts)[len(parts) // 4 : len(parts) - len(parts) // 4]
    middle = statistics.fmean(inner)
    return Timing(middle, statistics.median(abs(p - middle) for p in parts), len(parts))


def paired(choices: Sequence[ChoiceCaller], turns: Sequence[Turn]) -> dict[ChoiceCaller, Timing]:
    """Times from what each took relative to the others in the same turn."""
    # what all of them took in a turn says how fast the machine was in it
    whole = [math.exp(statistics.fmean(math.log(max(turn[c], 1e-9)) for c in choices))
             for turn in turns]  # fmt: skip
    usual = statistics.median(whole)
    found: dict[ChoiceCaller, Timing] = {}
    for choice in choices:
        part = _middle([turn[choice] / w for turn, w in zip(turns, whole, strict=True)])
        found[choice] = Timing(part.median_us * usual, part.spread * usual, part.samples)
    return found
