"""Several models at a time, of which one alone is timed.

Compiling takes most of a task and one core or two; timing takes a second, and wants the machine to
itself. So tasks run beside each other, and while one measures all others are stopped (SIGSTOP to
their process groups). A task asks for that by a file in its folder, and waits for the answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, TypeVar

T = TypeVar("T")
POLL, SETTLE = 0.02, 0.3  # seconds: between looks, and until a card has run what was launched
READY, GO, STOPPED = "ready", "go", "stopped"


class Gate:
    """A task's side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        ready, go = self._folder / READY, self._folder / GO
        ready.touch()
        while not go.exists():
            time.sleep(POLL)
        try:
            yield
        finally:
            go.unlink()
            ready.unlink()

    def clock(self) -> float:
        """Seconds, without those in which this process was stopped."""
        stopped = self._folder / STOPPED
        return time.perf_counter() - (float(stopped.read_text()) if stopped.exists() else 0.0)


@dataclass
class Running(Generic[T]):
    task: T
    folder: Path
    process: subprocess.Popen[bytes]
    heard: IO[bytes]
    end: float  # when its time is over
    stopped: float = 0.0
    status: str = ""  # why it ended, where it did not end well


def run(tasks: Sequence[T], jobs: int, start: Callable[[T], Running[T]]) -> Iterator[Running[T]]:
    """Tasks as they end, `jobs` at a time. What runs when the caller goes is ended."""
    left, running = list(tasks), list[Running[T]]()
    measuring: Running[T] | None = None
    began = 0.0
    try:
        while left or running:
            while left and len(running) < jobs and measuring is None:
                running.append(start(left.pop(0)))
            if measuring is not None and not (measuring.folder / READY).exists():
                _go_on([r for r in running if r is not measuring], time.perf_counter() - began)
                measuring = None
            ended = [r for r in running if _has_ended(r, paused=measuring not in (None, r))]
            for r in ended:
                if r is measuring:
                    _go_on([o for o in running if o is not r], time.perf_counter() - began)
                    measuring = None
                running.remove(r)
                yield r
            if measuring is None:
                measuring = next((r for r in running if (r.folder / READY).exists()), None)
                if measuring is not None:
                    began = time.perf_counter()
                    _stop([r for r in running if r is not measuring])
                    time.sleep(SETTLE)
                    (measuring.folder / GO).touch()
            time.sleep(POLL)
    finally:
        _signalled(running, signal.SIGKILL)


def _has_ended(r: Running[object], paused: bool) -> bool:
    if paused:
        return False
    code = r.process.poll()
    if code is None and time.perf_counter() - r.stopped > r.end:
        _signalled([r], signal.SIGKILL)
        r.process.wait()
        r.status = "took too long"
        return True
    if code is not None:
        r.status = f"ended with {code}" if code else ""
    return code is not None


def _stop(others: Sequence[Running[object]]) -> None:
    """Returns when none of them runs any more: a busy machine takes its time to stop one."""
    _signalled(others, signal.SIGSTOP)
    for r in others:
        os.waitid(os.P_PID, r.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def _go_on(others: Sequence[Running[object]], seconds: float) -> None:
    for r in others:
        r.stopped += seconds
        draft = r.folder / f"{STOPPED}.draft"
        draft.write_text(str(r.stopped))
        draft.rename(r.folder / STOPPED)
    _signalled(others, signal.SIGCONT)


def _signalled(running: Sequence[Running[object]], number: int) -> None:
    for r in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(r.process.pid, number)
