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
from tilewright.tune.results import ADVANTAGE, Timing, beats

FAR = 2.0  # times the best: one sample is enough to know
# A round: who is within this factor of the best goes on, and takes so many samples more.
ROUNDS = ((1.5, 2), (1.2, 3))
FINAL = 1.1  # who may still win
FINALISTS = 6
LEAST_TURNS, MOST_TURNS = 8, 40
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
    return _within(alive, FINAL)


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
        times = paired(alive, turns)
        for choice, found in times.items():
            choice.timing, choice.final = found, True
        spent = time.perf_counter() - began
        if len(turns) >= (FEWEST_TURNS if spent > SECONDS else LEAST_TURNS) and (
            spent > SECONDS or _is_clear(list(times.values()))
        ):
            break


def paired(choices: Sequence[ChoiceCaller], turns: Sequence[dict[ChoiceCaller, float]]
           ) -> dict[ChoiceCaller, Timing]:  # fmt: skip
    """Times from what each took relative to the others in the same turn."""
    if not choices:
        return {}
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
        gain = 1 - times[best].median_us / times[k].median_us
        if abs(gain - ADVANTAGE) < noise and not beats(times[best], times[k]):
            return False
    return True
