"""How many samples of whom: a first look, halving, and finals in turns.

Most candidates are far from the best and are known to be after a sample or two. Those that are not
are sampled more in every round, and the last few take turns, so that a drift of the clock or of the
machine meets all alike; only what happened in the same turn is compared. Whoever is near the border
between being preferred and not takes many more turns, so that the next tuning decides the same. A
library, which is what would run otherwise, is left only for what outruns it when they meet alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

from tilewright.tune.choices import ChoiceCaller
from tilewright.tune.results import ADVANTAGE, MOST_NOISE, Timing

FAR = 2.0  # times the best: one sample is enough to know
# A round: who is within this factor of the best goes on, and takes so many samples more.
ROUNDS = ((1.5, 2), (1.2, 3))
# Who may still win, beside the noise; and how many. Generous: who is as fast as the best within the
# least advantage has to be here every time, or equals would take turns in winning.
FINAL = 1.05
FINALISTS = 16
LIBRARY = 1.5  # on a noisy machine a library within this factor of the best is in the finals
LEAST_TURNS, MOST_TURNS = 12, 1024  # looked at after the first, then at twice as many
# Seconds after which the finals end, those with a library as well: more does not settle a noisy
# machine.
QUIET, NOISY = 0.4, 0.3
# Of the time: where memory lies changes a time by as much (H200), so more turns would not tell what
# the next tuning will find.
SETTLED = 0.001
FEWEST_TURNS = 4  # even then
SURE = 1.25  # times the noise from the border: there are several looks, each may be mistaken

Take = Callable[[ChoiceCaller], bool]  # takes a sample; False once the choice is rejected
Late = Callable[[], bool]  # whether time is up
Turn = dict[ChoiceCaller, float]  # microseconds


def look(choice: ChoiceCaller, best: float, take: Take) -> None:
    """The first samples of a choice, fewer if it is far from the best time so far."""
    for _ in range(2):
        if not take(choice) or min(choice.samples) > FAR * best:
            return


def halved(choices: Sequence[ChoiceCaller], take: Take, late: Late, library: float = 1.0
           ) -> list[ChoiceCaller]:  # fmt: skip
    """Those that may still win, fastest first, and a library within that factor of the best: timed
    first, it may have met a machine that was busy with what was before."""
    alive = _fastest(choices)
    for within, more in ROUNDS:
        alive = _few(_within(alive, within, library), max(FINALISTS, (len(alive) + 1) // 2))
        for _ in range(more):
            if late() or len(alive) == 1:
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
    best = fastest[0].time.median_us if fastest else 0.0
    return [c for c in fastest if c.time.median_us
            <= best * (max(factor, library) if c.trial.is_library else factor)]  # fmt: skip


def finals(choices: Sequence[ChoiceCaller], take: Take, late: Late, seconds: float) -> None:
    """Turns among choices in order of preference, until it is clear who is to be preferred or so
    many seconds are over, first without libraries and then with them. Sets their `timing`, and
    `lost` of all but the one to take.

    What is to replace a library meets it again with nobody else there: how fast a card runs what
    keeps it at its limit of power depends on what ran before, and among many that is mostly others.
    """
    others = [c for c in choices if not c.trial.is_library]
    last = list(choices)
    if 0 < len(others) < len(choices):
        near = _run(others, take, late, seconds)
        last = [c for c in choices if c.trial.is_library or c in near]
    taken = next(iter(_run(last, take, late, seconds)), None)
    for choice in choices:
        if taken is None:  # no time was left: what is known of the libraries as well has to do
            choice.final |= choice.trial.is_library
        else:
            choice.lost = choice.final and choice is not taken


def _run(choices: Sequence[ChoiceCaller], take: Take, late: Late, seconds: float
         ) -> list[ChoiceCaller]:  # fmt: skip
    """The one to take, after as many turns as it needs, and the fastest; none where there was no
    time for any."""
    alive = list(choices)
    turns: list[Turn] = []
    began = time.perf_counter()
    look_at = LEAST_TURNS
    while len(turns) < MOST_TURNS and alive and not late():
        # every other turn the other way round: who follows whom must not matter
        order = alive if len(turns) % 2 == 0 else alive[::-1]
        turns.append({c: c.samples[-1] for c in order if take(c)})
        alive = [c for c in alive if not c.reason]
        slow = time.perf_counter() - began > seconds
        if len(turns) < (FEWEST_TURNS if slow else look_at):
            continue
        look_at = 2 * len(turns)
        _settle(alive, turns)
        open_ = _open(alive, turns)
        if slow or not open_:
            break
        alive = [c for c in alive if c in open_ or c.trial.is_library]
    _settle(alive, turns)
    libraries = [c for c in alive if c.trial.is_library]
    losses = _losses(alive, turns)
    fastest = [c for c, (loss, _) in losses.items() if loss == 0]
    for choice, (loss, noise) in losses.items():
        is_close = loss <= max(ADVANTAGE, min(MOST_NOISE, noise))
        if is_close and (choice in libraries or _outruns(choice, libraries, turns)):
            return [choice, *fastest]
    return fastest


def _outruns(choice: ChoiceCaller, libraries: Sequence[ChoiceCaller], turns: Sequence[Turn]
             ) -> bool:  # fmt: skip
    """Whether it is faster than the libraries by enough: to be nearly as fast as the one that is
    would not be enough."""
    return all(_loss(c, choice, turns)[0] > ADVANTAGE for c in libraries)


def _settle(alive: Sequence[ChoiceCaller], turns: Sequence[Turn]) -> None:
    """Set the times of choices from their turns."""
    if turns and alive:
        for choice, found in paired(alive, turns).items():
            choice.timing, choice.final = found, True


def _losses(alive: Sequence[ChoiceCaller], turns: Sequence[Turn]
            ) -> dict[ChoiceCaller, tuple[float, float]]:  # fmt: skip
    """What part of its time each could save by being the fastest, and how uncertain that is."""
    if not alive or not turns:
        return {}
    best = min(alive, key=lambda c: c.time.median_us)
    found = {c: (0.0, 0.0) if c is best else _loss(c, best, turns) for c in alive}
    # it may only seem to be the fastest
    found[best] = 0.0, max((noise - loss for loss, noise in found.values()), default=0.0)
    return found


def _open(alive: Sequence[ChoiceCaller], turns: Sequence[Turn]) -> set[ChoiceCaller]:
    """Those that more turns are needed of; none where it is clear who is preferred."""
    losses = _losses(alive, turns)
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


def _loss(choice: ChoiceCaller, best: ChoiceCaller, turns: Sequence[Turn]) -> tuple[float, float]:
    """What part of its time a choice could save, turn by turn, and how uncertain that is."""
    ratio = _middle([turn[best] / max(turn[choice], 1e-9) for turn in turns])
    sure = SURE * (1 + 6 / len(turns))  # of few turns the spread itself is uncertain
    return 1 - ratio.median_us, sure * ratio.noise * ratio.median_us


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
