"""That kernels of ours run: torch's operations in the place of one are a failure, not a pass."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

SAID = "torch's own operations"


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []
        self.allowed = 0

    def emit(self, record: logging.LogRecord) -> None:
        if SAID in record.getMessage() and not self.allowed:
            self.heard.append(record.getMessage())


_listener = _Listener()


@contextmanager
def ours() -> Iterator[None]:
    """Fails at its end if torch's operations took a kernel's place and nobody asked for that."""
    logger = logging.getLogger("tilewright")
    logger.addHandler(_listener)
    _listener.heard.clear()
    try:
        yield
    finally:
        logger.removeHandler(_listener)
    assert not _listener.heard, "\n".join(_listener.heard)


@contextmanager
def torch_may_take_over() -> Iterator[None]:
    """For tests of just that."""
    _listener.allowed += 1
    try:
        yield
    finally:
        _listener.allowed -= 1
