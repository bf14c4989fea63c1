"""How many samples of whom: a first look, halving, and finals in turns.

Most candidates are far from the best and are known to be after a sample or two. Those that are not
are sampled more in every round, and the last few take turns, so that a drift of the clock or of the
machine meets all alike; only what happened in the same turn is compared.
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
FINALISTS = 12
LEAST_TURNS, MOST_TURNS = 10, 40
SECONDS = 1.0  # after which the finals of slow candidates end early
FEWEST_TURNS = 4  # even then

Take = Callable[[ChoiceCaller], bool]  # takes a sample; False once the choice is rejected
Late = Callable[[], bool]  # whether time is up


def look(choice: ChoiceCaller, best: float, take: Take) -> None:
    """The first samples of a choice, fewer if it is far from the best time so far."""
    for _ in range(2):
        if not take(choice) or min(choice.samples) > FAR * best:
            return


def halved(choices: Sequence[ChoiceCaller], take: Take, late: Late) -> list[ChoiceCaller]:
    """Those that may still win, fastest first."""
    alive = _fastest(choices)
    for within, more in ROUNDS:
        alive = _few(_within(alive, within), max(FINALISTS, (len(alive) + 1) // 2))
        for _ in range(more):
            if late() or len(alive) == 1:
                break
            alive = [c for c in alive if take(c)]
        alive = _fastest(alive)
    noise = max((c.time.noise for c in alive[:2]), default=0.0)
    return _few(_within(alive, FINAL + min(MOST_NOISE, noise)), FINALISTS)


def _few(fastest: Sequence[ChoiceCaller], most: int) -> list[ChoiceCaller]:
    """The first few, and every library: it is what the others have to beat."""
    return [c for k, c in enumerate(fastest) if k < most or c.trial.is_library]


def _fastest(choices: Sequence[ChoiceCaller]) -> list[ChoiceCaller]:
    return sorted((c for c in choices if not c.reason), key=lambda c: c.time.median_us)


def _within(fastest: Sequence[ChoiceCaller], factor: float) -> list[ChoiceCaller]:
    return [c for c in fastest if c.time.median_us <= factor * fastest[0].time.median_us]


def finals(choices: Sequence[ChoiceCaller], take: Take, late: Late) -> None:
    """Turns among choices in order of preference, until it is clear who is to be preferred. Sets
    their `timing`."""
    alive = list(choices)
    turns: list[dict[ChoiceCaller, float]] = []
    began = time.perf_counter()
    while len(turns) < MOST_TURNS and alive and not late():
        # every other turn the other way round: who follows whom must not matter
        order = alive if len(turns) % 2 == 0 else alive[::-1]
        turns.append({c: c.samples[-1] for c in order if take(c)})
        alive = [c for c in alive if not c.reason]
        slow = time.perf_counter() - began > SECONDS
        if len(turns) < (FEWEST_TURNS if slow else LEAST_TURNS):
            continue
        alive = _settled(alive, turns)
        if slow or _is_clear([c.time for c in alive]):
            return
    _settled(alive, turns)


def _settled(alive: list[ChoiceCaller], turns: Sequence[dict[ChoiceCaller, float]]
             ) -> list[ChoiceCaller]:  # fmt: skip
    """Set the times of choices from their turns; those that may still be preferred."""
    if not turns or not alive:
        return alive
    for choice, found in paired(alive, turns).items():
        choice.timing, choice.final = found, True
    best = min((c.time for c in alive), key=lambda t: t.median_us)
    return [c for c in alive if _loss(best, c.time) < 2 * _border(best, c.time)]


def _loss(best: Timing, other: Timing) -> float:
    """What part of its time another could save."""
    return 1 - best.median_us / other.median_us if other.median_us > 0 else 0.0


def _border(best: Timing, other: Timing) -> float:
    """The loss beyond which the best is preferred."""
    return max(ADVANTAGE, min(MOST_NOISE, math.hypot(best.noise, other.noise)))


def paired(choices: Sequence[ChoiceCaller], turns: Sequence[dict[ChoiceCaller, float]]
           ) -> dict[ChoiceCaller, Timing]:  # fmt: skip
    """Times from what each took relative to the others in the same turn."""
    # what all of them took in a turn says how fast the machine was in it
    whole = [math.exp(statistics.fmean(math.log(max(turn[c], 1e-9)) for c in choices))
             for turn in turns]  # fmt: skip
    usual = statistics.median(whole)
    found: dict[ChoiceCaller, Timing] = {}
    for choice in choices:
        parts = [turn[choice] / w for turn, w in zip(turns, whole, strict=True)]
        middle = statistics.median(parts)
        spread = statistics.median(abs(p - middle) for p in parts)
        found[choice] = Timing(middle * usual, spread * usual, len(parts))
    return found


def _is_clear(times: Sequence[Timing]) -> bool:
    """Whether more samples would hardly change who is preferred."""
    best = min(range(len(times)), key=lambda k: times[k].median_us)
    for k in range(best):
        noise = math.hypot(times[k].noise, times[best].noise)
        if abs(_loss(times[best], times[k]) - ADVANTAGE) < noise:
            return False
    return True
