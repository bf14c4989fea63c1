"""A time limit for what cannot be ended: it is done in a thread, and left to itself after that."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T], what: str) -> T:
    """What it gives or raises, with the options of who asks. Raises `TimeoutError`, which says what
    was waited for, where it takes longer."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        except BaseException as error:  # an interrupt at the keyboard is the main thread's
            done.set_exception(RuntimeError(f"it raised {error!r}"))

    in_context = contextvars.copy_context().run
    threading.Thread(target=in_context, args=(run,), name="tilewright-limit", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        if done.done():  # its own
            raise
        raise TimeoutError(f"{what} in {seconds:g} s") from None
