"""Worker processes that survive what they run.

A worker imports everything once and then takes jobs: one group of samples on one backend. A crash
or a hang costs the sample it happened in; a new worker goes on with the next sample.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Self

from tests.sweep.cases import Case, Group, choose
from tests.sweep.execute import EAGER_ERROR, NO_SAMPLES, Outcome, first_line, prepare, run
from tests.sweep.samples import generate, smallest_useful

# A compiler keeps things alive for the life of its process; beyond this a worker is replaced.
_WORKER_BYTES = 3 << 30


@dataclass(frozen=True)
class Job:
    """Samples of a group to run on a backend.

    ``pick`` is one of all (at most ``limit``, evenly spread), small (one quick sample), hashed
    (one, by fingerprint of the group), listed (those in ``samples``) and clamped (the same, with
    the last one for those that do not exist).
    """

    group: Group
    backend: str
    pick: str = "all"
    limit: int | None = None
    samples: tuple[int, ...] = ()
    skip: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Result:
    """``case`` is None when there is no sample, or making the samples failed."""

    job: Job
    case: Case | None
    outcome: Outcome


def serve(pipe: Connection, threads: int) -> None:
    """Body of a worker process: jobs in, results out, until told to stop."""
    prepare(threads)
    while True:
        job: Job | None = pipe.recv()
        if job is None:
            return
        try:
            samples = generate(job.group)
        except Exception as error:
            pipe.send(("unusable", first_line(error)))
            continue
        chosen = _pick(job, samples)
        pipe.send(("chosen", chosen))
        for number in chosen:
            pipe.send(("start", number))
            pipe.send(("done", number, run(job.group, samples[number], job.backend)))
        retire = _resident_bytes() > _WORKER_BYTES
        pipe.send(("end", retire))
        if retire:
            return


def _pick(job: Job, samples: list[Any]) -> list[int]:
    if not samples:
        return []
    match job.pick:
        case "small":
            return [smallest_useful(samples)]
        case "hashed":
            return [job.group.fingerprint // 7 % len(samples)]
        case "listed":
            return [i for i in job.samples if i < len(samples)]
        case "clamped":
            numbers = sorted({min(i, len(samples) - 1) for i in job.samples})
            return [i for i in numbers if i not in job.skip]
        case _:
            return [i for i in choose(len(samples), job.limit) if i not in job.skip]


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Worker:
    process: ForkServerProcess
    pipe: Connection
    job: Job | None = None
    waiting: list[int] = field(default_factory=list)
    current: int | None = None
    since: float = 0.0

    def give(self, job: Job) -> None:
        self.job, self.waiting, self.current = job, [], None
        self.since = time.monotonic()
        self.pipe.send(job)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Runs jobs on ``workers`` processes; results come in the order they are ready."""

    def __init__(self, workers: int, *, timeout: float = 120.0, threads: int = 1) -> None:
        self._context = _fork_server()
        self._count = workers
        self._timeout = timeout
        self._threads = threads
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, todo: deque[Job]) -> Iterator[Result]:
        """Pull results one by one; work goes on in the workers between pulls.

        The caller may add to ``todo`` while it pulls.
        """
        while todo or any(w.job for w in self._workers):
            self._hand_out(todo)
            busy = {w.pipe: w for w in self._workers if w.job}
            for pipe in wait(list(busy), timeout=1.0):
                yield from self._read(busy[pipe], todo)  # type: ignore[index]
            for worker in [w for w in self._workers if w.job and self._late(w)]:
                yield from self._lost(worker, todo, "timeout")

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def _hand_out(self, todo: deque[Job]) -> None:
        for worker in self._workers:
            if todo and worker.job is None:
                worker.give(todo.popleft())
        while todo and len(self._workers) < self._count:
            self._workers.append(self._start())
            self._workers[-1].give(todo.popleft())

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, self._threads), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _late(self, worker: _Worker) -> bool:
        return time.monotonic() - worker.since > self._timeout

    def _read(self, worker: _Worker, todo: deque[Job]) -> Iterator[Result]:
        assert worker.job is not None
        try:
            message: tuple[Any, ...] = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            yield from self._lost(worker, todo, "crash")
            return
        worker.since = time.monotonic()
        match message:
            case ("chosen", chosen):
                worker.waiting = list(chosen)
                if not chosen and not worker.job.skip:
                    yield Result(worker.job, None, Outcome(NO_SAMPLES))
            case ("unusable", text):
                yield Result(worker.job, None, Outcome(EAGER_ERROR, "samples", text))
                worker.job = None
            case ("start", number):
                worker.current = number
            case ("done", number, outcome):
                worker.waiting.remove(number)
                worker.current = None
                yield Result(worker.job, Case(worker.job.group, number), outcome)
            case ("end", retire):
                worker.job = None
                if retire:
                    worker.process.join()
                    self._drop(worker)
            case _:
                raise AssertionError(f"unknown message {message!r}")

    def _lost(self, worker: _Worker, todo: deque[Job], status: str) -> Iterator[Result]:
        """The worker died or hangs: blame the sample it was in, put the others back."""
        job, current = worker.job, worker.current
        assert job is not None
        stuck = time.monotonic() - worker.since
        if status == "crash":
            worker.process.join()
        text = _death(worker.process.exitcode) if status == "crash" else f"after {stuck:.0f} s"
        rest = tuple(i for i in worker.waiting if i != current)
        self._drop(worker)
        if rest:
            todo.appendleft(replace(job, pick="listed", samples=rest))
        # Without a current sample it was the generation of samples that failed.
        case = None if current is None else Case(job.group, current)
        stage = "run" if case else "samples"
        yield Result(job, case, Outcome(status, stage, text))

    def _drop(self, worker: _Worker) -> None:
        worker.stop()
        self._workers.remove(worker)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit status {code}"


def _fork_server() -> ForkServerContext:
    """A process that has imported everything, from which workers start at once."""
    context = multiprocessing.get_context("forkserver")
    # The server resolves its imports with PYTHONPATH alone, not with our sys.path.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    try:
        context.set_forkserver_preload(["tests.sweep.warm"])
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context
