"""The register of in-memory caches, so that one call can empty them all.

A module that memoises something that depends on options or on the disk registers how to forget
it: `caches.register(_memo.clear)`. `testing.fresh_cache` calls `clear()` on entry and on exit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_clearers: list[Callable[[], object]] = []
C = TypeVar("C", bound=Callable[[], object])


def register(clear: C) -> C:
    """Have `clear` called whenever all in-memory caches are emptied."""
    _clearers.append(clear)
    return clear


def clear() -> None:
    """Empty every registered cache."""
    for forget in _clearers:
        forget()
