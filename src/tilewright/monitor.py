"""What this process compiled, built and tuned; and a seal, after which it should not.

A server warms up (`tilewright.warm_up`), seals (`tilewright.sealed`), and serves: whatever is
compiled, built or tuned from then on is a warning, or an error, that names its cause, and is
counted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

from tilewright.errors import TilewrightError

log = logging.getLogger("tilewright.monitor")
Kind = Literal["compilation", "build", "tuning"]


class SealedError(TilewrightError):
    """Something was compiled, built or tuned after the process was sealed."""


@dataclass(frozen=True)
class Event:
    """One thing that took time, and why it was done."""

    kind: Kind
    cause: str
    at: float
    after_seal: bool


counts: Counter[str] = Counter()  # by kind; those after the seal as `sealed.<kind>` as well
events: deque[Event] = deque(maxlen=1000)
_sealed: list[Sealed] = []


class Sealed:
    """In force from when it is made until `open`, or until the end of a `with` block."""

    def __init__(self, error: bool) -> None:
        self.error = error
        self.counts: Counter[str] = Counter()  # what happened meanwhile, by kind
        self.events: list[Event] = []
        _sealed.append(self)

    def open(self) -> None:
        if self in _sealed:
            _sealed.remove(self)

    def __enter__(self) -> Sealed:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()


def happened(kind: Kind, cause: str) -> None:
    """Something that a sealed process should not do is about to be done."""
    event = Event(kind, cause, time.time(), bool(_sealed))
    counts[kind] += 1
    events.append(event)
    if not _sealed:
        return
    counts[f"sealed.{kind}"] += 1
    for seal in _sealed:
        seal.counts[kind] += 1
        seal.events.append(event)
    if any(seal.error for seal in _sealed):
        raise SealedError(
            f"a {kind} after the process was sealed: {cause}",
            hint="call tilewright.warm_up with inputs of this kind before tilewright.sealed(), or "
            "have it warn with sealed(error=False)",
        )
    log.warning("a %s after the process was sealed: %s", kind, cause)
