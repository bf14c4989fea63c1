"""Cases in several processes: most of their time goes into tracing and compiling. The first process
imports none of them: that takes as long as a case. A case that ends its process, or takes longer
than it may, costs itself alone."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any
from unittest import SkipTest

CORES = len(os.sched_getaffinity(0))
MOST = 150.0  # seconds of a case
_SPAWN = multiprocessing.get_context("spawn")
Said = tuple[str, str, float]  # a case, what became of it, and seconds


def finished(
    wanted: list[str], jobs: int, seconds: float = 1e9,
    serve: Callable[[Any], None] | None = None, most: float = MOST
) -> Iterator[Said]:  # fmt: skip
    """The cases as they end, all where none is named; those that measure time come last, with
    nobody beside them. Of those that have not begun after so many seconds nothing is heard."""
    end = time.monotonic() + seconds
    os.environ.setdefault("TILEWRIGHT_COMPILE_THREADS", str(max(2, CORES // jobs)))
    workers = [_Worker(serve or _serve, most) for _ in range(jobs)]
    try:
        known, alone = workers[0].asked()
        wanted = wanted or known
        # the last are the longest: they are begun first
        yield from _shared(workers, [n for n in reversed(wanted) if n not in alone], end)
        yield from _shared(workers[:1], [n for n in wanted if n in alone], end)
    finally:
        for worker in workers:
            worker.process.kill()


def _shared(workers: list[_Worker], wanted: list[str], end: float) -> Iterator[Said]:
    left = deque(wanted)
    while True:
        for worker in workers:
            if not worker.name and left and time.monotonic() < end:
                worker.begin(left.popleft())
        busy = [worker for worker in workers if worker.name]
        if not busy:
            return
        connection.wait([worker.ends for worker in busy], timeout=1.0)
        for worker in busy:
            said = worker.said()
            if said is not None:
                yield said


@dataclass
class _Worker:
    """A process, and the case it has under way."""

    serve: Callable[[Any], None]
    most: float
    name: str = ""
    began: float = 0.0
    process: Any = field(init=False)
    ends: Any = field(init=False)

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.ends, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=self.serve, args=(theirs,), daemon=False)
        self.process.start()
        theirs.close()

    def asked(self) -> tuple[list[str], set[str]]:
        self.ends.send("")
        return self.ends.recv()

    def begin(self, name: str) -> None:
        self.name, self.began = name, time.monotonic()
        self.ends.send(name)

    def said(self) -> Said | None:
        """What became of its case, if that is over; the process is another one if it broke."""
        took = time.monotonic() - self.began
        try:
            if self.ends.poll():
                name, said, seconds, usable = self.ends.recv()
                self.name = ""
                if not usable:
                    self._again()
                return name, said, seconds
            if took < self.most:
                return None
            why = f"FAILED took longer than {self.most:.0f} s"
        except (EOFError, ConnectionError):
            self.process.join(10)
            why = f"FAILED ended its process with code {self.process.exitcode}"
        name, self.name = self.name, ""
        self._again()
        return name, why, took

    def _again(self) -> None:
        self.process.kill()
        self._start()


def _serve(ends: Any) -> None:
    """Runs what it is told to, and says whether the card can still be used."""
    names()
    while True:
        try:
            name = ends.recv()
        except EOFError:
            return
        ends.send((*one(name), _usable()) if name else names())


def _usable() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return not torch.cuda.is_available()
    return True


def names() -> tuple[list[str], set[str]]:
    """All cases, and those to run with nobody beside them."""
    from tests.gpu import (
        attention_cases,
        cases,
        gemm_cases,
        narrow_cases,
        spec_cases,
        template_cases,
        tuning_cases,
        user_kernels,
    )

    # their cases are registered
    assert attention_cases and gemm_cases and narrow_cases and template_cases
    assert spec_cases and tuning_cases and user_kernels
    return list(cases.CASES), cases.ALONE


def one(name: str) -> tuple[str, str, float]:
    """A case, what became of it, and seconds."""
    names()
    from tests.gpu import cases

    start = time.perf_counter()
    try:
        cases.run(name)
        said = "ok"
    except SkipTest as why:
        said = f"skipped: {why}"
    except Exception as error:
        traceback.print_exc()
        said = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return name, said, time.perf_counter() - start
