"""How long tuning may take: by the options, and where they do not say, by what it can gain."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator
from dataclasses import dataclass

from tilewright import config

# Seconds of measuring, where the options set no limit: of one product, and of a graph. Most take
# one or two; a product whose library takes seconds gets so many runs of it instead, and no more: it
# was measured for minutes to save less than that (bfloat16 on a CPU without such units).
PRODUCT, GRAPH, RUNS = 20.0, 600.0, 2.0


@dataclass
class _Purse:
    """The time there is for the questions that share a budget."""

    deadline: float
    left: int  # questions that are still to come
    spent: float = 0.0  # seconds of measuring

    def share(self, now: float, ahead: bool) -> float:
        """Until when the next question may take: what nobody has used is for all to come, and what
        is prepared ahead takes nothing of it."""
        share = max(0.0, self.deadline - now) / max(1, self.left)
        self.left -= 0 if ahead else 1
        return now + share


_purse: _Purse | None = None  # none: every question has a budget of its own


def deadline(now: float, ahead: bool) -> float:
    return now + _seconds() if _purse is None else _purse.share(now, ahead)


def spend(seconds: float) -> None:
    if _purse is not None:
        _purse.spent += seconds


def limit(spent: float, run: float) -> float:
    """Seconds of measuring that a product has, of which some are spent, where the options set no
    limit: as many as may be worth it, by how long a run of the library's takes."""
    if config.autotune_budget_seconds is not None:
        return math.inf
    left = GRAPH if _purse is None else max(0.0, GRAPH - _purse.spent)
    return min(max(PRODUCT, RUNS * run), spent + left)


def _seconds() -> float:
    seconds = config.autotune_budget_seconds
    return math.inf if seconds is None else seconds


@contextlib.contextmanager
def budget(subjects: int) -> Generator[None, None, None]:
    """`config.autotune_budget_seconds` for this many questions together, asked inside."""
    global _purse
    before, _purse = _purse, _Purse(time.perf_counter() + _seconds(), subjects)
    try:
        yield
    finally:
        _purse = before
