"""Barriers in a Triton kernel whose threads touch each other's memory.

A tile lies over the threads of a program as suits the instruction that loads or stores it. What is
touched twice at the same index is touched by the same threads, in the order of the text, if there
are no more of these than elements; what is touched at another one, by any: then a barrier has to
stand between, if one of the two is a store.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from tilewright.ir.expr import Expr, loads
from tilewright.ir.program import Nest
from tilewright.schedule.nests.access import disjoint

Places = dict[str, set[Expr | None]]  # the indices at which a buffer was touched; None: anywhere


class Barriers:
    """What was touched since the last barrier."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._loaded: Places = {}
        self._stored: Places = {}

    def before_load(self, buffer: str, index: Expr | None) -> None:
        if _meet(self._stored, buffer, index):
            self._wait()
        self._loaded.setdefault(buffer, set()).add(index)

    def before_store(self, buffer: str, index: Expr | None) -> None:
        if _meet(self._stored, buffer, index) or _meet(self._loaded, buffer, index):
            self._wait()
        self._stored.setdefault(buffer, set()).add(index)

    def before_loop(self, members: Iterable[Nest]) -> None:
        """One barrier ahead of a loop for all that its rounds wait for."""
        for m in members:
            read = any(_meet(self._stored, n.arg, n.src[0]) for n in loads(*m.exprs))
            written = any(_meet(found, s.buffer, s.index)
                          for s in m.stores for found in (self._stored, self._loaded))  # fmt: skip
            if read or written:
                self._wait()
                return

    @contextmanager
    def perhaps(self) -> Generator[None]:
        """Around text that may not run: a barrier in it is none for what follows."""
        loaded, stored = _copied(self._loaded), _copied(self._stored)
        yield
        for now, before in ((self._loaded, loaded), (self._stored, stored)):
            for buffer, places in before.items():
                now.setdefault(buffer, set()).update(places)

    def _wait(self) -> None:
        self._line("tl.debug_barrier()")
        self._loaded.clear()
        self._stored.clear()


def _meet(touched: Places, buffer: str, index: Expr | None) -> bool:
    """Whether other threads may have touched the same."""
    return any(
        index is None or place is None or (place is not index and not disjoint(place, index))
        for place in touched.get(buffer, ())
    )


def _copied(places: Places) -> Places:
    return {buffer: set(found) for buffer, found in places.items()}
