"""A first look at candidates on several cards at once (`config.autotune_multi_device`).

Each card of the kind has a process of its own, which sees that card alone. What is built is looked
at there, beside the library, so that a card that is a little slower costs nobody anything; what
looks far slower than the best is not timed again. All others meet the library and each other on the
card that the program runs on, as they would without several: only what was compared there may win.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from tilewright import caches, config
from tilewright.tune import child, race
from tilewright.tune.child import Device
from tilewright.tune.choices import ChoiceCaller
from tilewright.tune.pool import TuningProcessPool
from tilewright.tune.results import timing

log = logging.getLogger("tilewright.tune")
# Who is within this factor of the best there is looked at here: cards of one kind differ by less
# than the rounds of a race allow for.
NEAR = race.ROUNDS[0][0]
OFTEN = 0.1  # seconds between looks at the time
IDLE = 60.0  # seconds after which nobody asks any more: other programs may need the cards

Guarded = Callable[[ChoiceCaller, Callable[[], object]], bool]
Look = tuple[list[float], float]  # microseconds of a candidate, and of the library beside it


def several(device: torch.device) -> list[Device]:
    """All cards like this one, itself among them; nothing where there is no other, or nobody asks
    for them."""
    if not config.autotune_multi_device or device.type != "cuda" or not torch.cuda.is_available():
        return []
    index: int | None = device.index
    try:
        found = TuningProcessPool.get_device_list(index)
    except (ValueError, RuntimeError, AssertionError) as error:
        log.warning("one card is tuned on: %s", error)
        return []
    return found if len(found) > 1 else []


def sifted(choices: Iterable[ChoiceCaller], known: Sequence[ChoiceCaller],
           devices: Sequence[Device], guarded: Guarded, late: Callable[[float], bool]
           ) -> tuple[list[ChoiceCaller], list[ChoiceCaller]]:  # fmt: skip
    """Of choices that are built one after the other, those to look at here: those that may win,
    beside those that are `known`, and what was not timed elsewhere. Then those that were, and are
    far slower. `late` is told of seconds that were waited, and says whether time is up."""
    with _kept.pool(devices) as pool:
        try:
            sift = _Sift(known, pool, guarded)
            for choice in choices:
                sift.begin(choice)
            return sift.end(late)
        except BaseException:  # Python would wait for those that are under way
            pool.shutdown()
            raise


@dataclass(frozen=True)
class _Under:
    """A choice that is under way, or stays here."""

    choice: ChoiceCaller
    look: Future[Look] | None


class _Sift:
    def __init__(self, known: Sequence[ChoiceCaller], pool: TuningProcessPool, guarded: Guarded
                 ) -> None:  # fmt: skip
        alive = [c for c in known if c.time.samples and not c.reason]
        self._best = min((c.time.median_us for c in alive), default=math.inf)
        libraries = [c for c in alive if c.trial.is_library and hasattr(c.trial, "remote")]
        self._library = min(libraries, key=lambda c: c.time.median_us, default=None)
        self._pool = pool
        self._guarded = guarded
        self._under: list[_Under] = []

    def begin(self, choice: ChoiceCaller) -> None:
        made: Any = getattr(choice.trial, "remote", None)
        if made is None:
            self._under.append(_Under(choice, None))
            return
        library: Any = None if self._library is None else self._library.trial
        beside = None if library is None else library.remote()
        enough = NEAR if self._library is None else NEAR * self._best / self._took
        look = self._pool.submit(functools.partial(child.look, made(), beside, enough))
        self._under.append(_Under(choice, look))

    @property
    def _took(self) -> float:
        """Of the library, here."""
        return self._library.time.median_us if self._library is not None else 0.0

    def end(self, late: Callable[[float], bool]
            ) -> tuple[list[ChoiceCaller], list[ChoiceCaller]]:  # fmt: skip
        """Those to look at here, and the others."""
        looks = [u.look for u in self._under if u.look is not None]
        ended: set[Future[Look]] = set()
        while left := wait(looks, OFTEN).not_done:
            if late(OFTEN if self._pool.is_ready else 0.0):  # to start a process is not to measure
                ended = {look for look in left if look.running()}
                self._pool.shutdown()
                break
        for choice, look in ((u.choice, u.look) for u in self._under):
            if look in ended:  # it may hang, and would hang here as well
                choice.reject("it was under way on another card when time was up", lasting=False)
            elif look is not None and look.done() and not _is_missed(look):
                self._guarded(choice, functools.partial(self._timed, choice, look))
        self._pool.tidied()
        alive = [u.choice for u in self._under if not u.choice.reason]
        best = min((c.time.median_us for c in alive), default=math.inf)
        limit = NEAR * min(best, self._best)
        far = [c for c in alive if c.timing is not None and c.time.median_us > limit]
        near = [c for c in alive if c not in far]
        for choice in near:
            choice.timing = None
        return near, far

    def _timed(self, choice: ChoiceCaller, look: Future[Look]) -> None:
        samples, beside = look.result()
        scale = self._took / beside if beside and self._took else 1.0
        choice.timing = timing([scale * us for us in samples])


def _is_missed(look: Future[Look]) -> bool:
    """Whether there was no card for it, or no time."""
    return look.cancelled() or isinstance(look.exception(), child.NotStarted)


class _Kept:
    """The processes that one product was looked at by, for the next one; not for long."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pool: TuningProcessPool | None = None
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def pool(self, devices: Sequence[Device]) -> Generator[TuningProcessPool]:
        """For one who asks at a time."""
        with self._lock:
            self._stop_timer()
            if self._pool is None or self._pool.devices != devices or not self._pool.is_open:
                self.close()
                self._pool = TuningProcessPool(devices)
            try:
                yield self._pool
            finally:
                self._timer = threading.Timer(IDLE, self.close)
                self._timer.daemon = True
                self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        with self._lock:
            self._stop_timer()
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.shutdown()


def _in_a_fork() -> None:
    global _kept
    _kept = _Kept()


_kept = _Kept()
caches.register(lambda: _kept.close())
os.register_at_fork(after_in_child=_in_a_fork)
