"""Several processes that time, one for each card; and one that times in the background.

`TuningProcessPool` has candidates timed on every card of a kind at once
(`config.autotune_multi_device`): each process sees one card, takes the next candidate when it is
free, and is started again after one that brought it down. What fails on one card is tried on
another before anybody believes it; a card on which alone things fail is left out.
`AutotuneProcessPool` is one process beside the compiler, for `config.pipeline_max_autotune_gemm`:
what it is asked for is fetched when somebody needs it, and it ends when nobody has asked for a
while.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import importlib
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Protocol, TypeVar

from tilewright import config
from tilewright.tune.child import (
    START,
    Device,
    Job,
    NotStarted,
    TuningProcess,
    answered,
    harms,
    release,
)

log = logging.getLogger("tilewright.tune")
AUTOTUNE_POOL_INACTIVITY_TIMEOUT = 600.0  # seconds; 0: it does not end
VISIBLE = "CUDA_VISIBLE_DEVICES"
FAULTS = 2  # of a card's own, after which nothing is timed on it


class Request(Protocol):
    """A benchmark as data: it pickles, and makes its own inputs where it runs."""

    def benchmark(self) -> float:
        """Milliseconds."""
        ...


class Requested(Protocol):
    """A choice that can be timed elsewhere."""

    @property
    def bmreq(self) -> Request: ...


C = TypeVar("C", bound=Requested)
T = TypeVar("T")


class TuningProcessPool:
    """Choices timed by one process for each card."""

    def __init__(self, devices: Sequence[Device] | None = None) -> None:
        self.devices = self.get_device_list() if devices is None else list(devices)
        self._all = [TuningProcess(device) for device in self.devices]
        self.processes = _Idle(self._all)
        self._faults: Counter[TuningProcess] = Counter()
        self.is_open, self.is_ready = True, False  # whether one of them has been started
        self._threads = ThreadPoolExecutor(len(self._all), thread_name_prefix="tilewright-tune")
        atexit.register(self.shutdown)

    @staticmethod
    def get_device_list(card: int | None = None) -> list[Device]:
        """The cards to time on: none in particular, unless several are asked for; then all that
        this process sees which are of one kind with `card`, or with the current one."""
        if not config.autotune_multi_device:
            return [None]
        import torch

        count, text = torch.cuda.device_count(), os.environ.get(VISIBLE)
        named: list[Device] = list(range(count))
        if text is not None:
            named = [_device(d) for d in text.split(",") if d.strip()]
        if len(named) > max(count, 1) and count:
            raise ValueError(f"{VISIBLE}={text} names more cards than the {count} there are")
        if count > 1:
            like = kind(torch.cuda.current_device() if card is None else card)
            named = [d for k, d in enumerate(named) if kind(k) == like]
        return named or [None]

    def benchmark(self, choices: Sequence[C]) -> dict[C, float]:
        """Milliseconds of each; infinite for one that raised, crashed or did not end."""
        return dict(zip(choices, self._each(self.target, choices), strict=True))

    def _each(self, work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """All at once, with the options of who asks."""
        waiting = [self._begun(work, item) for item in items]
        return [w.result() for w in waiting]

    def _begun(self, work: Callable[[Any], T], item: Any) -> Future[T]:
        return self._threads.submit(contextvars.copy_context().run, work, item)

    def target(self, choice: Requested) -> float:
        """One choice, by the next process that is free."""
        process = self.processes.get()
        if process is None:
            return math.inf
        try:
            process.put(choice.bmreq.benchmark)
            return float(process.get(config.max_autotune_subproc_result_timeout_seconds))
        except TimeoutError:
            log.warning("a candidate took more than %g s in its own process: %s",
                        config.max_autotune_subproc_result_timeout_seconds, choice)  # fmt: skip
        except EOFError as error:
            log.warning("a candidate brought its own process down (%s): %s", error, choice)
        except Exception as error:
            log.warning("a candidate failed in its own process (%s): %s", error, choice)
            if harms(error):
                process.restart()
        finally:
            self.processes.put(process)
        return math.inf

    def run(self, jobs: Sequence[Job], seconds: float) -> list[Any]:
        """What each job gives, or the exception it ended with; all cards work on them at once."""

        def one(job: Job) -> Any:
            try:
                return self._asked(job, seconds)
            except Exception as error:
                return error

        return self._each(one, jobs)

    def submit(self, job: Job, seconds: float | None = None) -> Future[Any]:
        """What a job gives, or raises on two cards: what one alone raises is that card's fault."""
        return self._begun(functools.partial(self._asked, seconds=seconds), job)

    def _asked(self, job: Job, seconds: float | None) -> Any:
        failed: dict[TuningProcess, Exception] = {}
        while len(failed) < 2:
            process = self.processes.get(without=failed)
            if process is None:
                break
            try:
                if not process.is_alive:  # all that the job needs is imported
                    answered(process, functools.partial(callable, job), START)
                self.is_ready = True
                answer = answered(process, job, seconds)
            except NotStarted as error:  # it says nothing of the job
                self._at_fault(process, str(error))
            except Exception as error:
                failed[process] = error
            else:
                for other, error in failed.items():
                    self._at_fault(other, str(error))
                return answer
            finally:
                self.processes.put(process)
        if not failed:
            raise NotStarted("there is no card left to time on")
        raise next(iter(failed.values()))

    def tidied(self) -> None:
        """Have every process that is there and free give up the memory it timed on."""
        for process in self.processes.idle():
            try:
                if process.is_alive:
                    answered(process, release)
            except Exception:
                process.kill()
            finally:
                self.processes.put(process)

    def _at_fault(self, process: TuningProcess, why: str) -> None:
        """A card that fails again and again, where others do not, is left out."""
        self._faults[process] += 1
        if self._faults[process] >= FAULTS and self.processes.leave_out(process):
            log.warning("card %s is not tuned on any more: %s", process.device, why)
            process.kill()

    def shutdown(self) -> None:
        self.is_open = False
        atexit.unregister(self.shutdown)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.kill()


class _Idle:
    """Processes that wait for something to do, of those that take part."""

    def __init__(self, processes: Iterable[TuningProcess]) -> None:
        self._waiting = list(processes)
        self._part = set(self._waiting)
        self._out = set[TuningProcess]()
        self._changed = threading.Condition()

    def get(self, without: Collection[TuningProcess] = ()) -> TuningProcess | None:
        """The next that is free; none where no other takes part."""
        with self._changed:
            while True:
                for process in self._waiting:
                    if process not in without:
                        self._waiting.remove(process)
                        return process
                if not self._part - set(without):
                    return None
                self._changed.wait()

    def idle(self) -> list[TuningProcess]:
        """All that are free, which nobody else has until they are put back."""
        with self._changed:
            found, self._waiting = self._waiting, []
            return found

    def put(self, process: TuningProcess) -> None:
        with self._changed:
            if process not in self._out:
                self._waiting.append(process)
            self._changed.notify_all()

    def qsize(self) -> int:
        return len(self._waiting)

    def leave_out(self, process: TuningProcess) -> bool:
        with self._changed:
            found = process in self._part
            self._part.discard(process)
            self._out.add(process)
            self._changed.notify_all()
            return found


def _device(text: str) -> Device:
    """A card by its number, or by what else CUDA calls it (`GPU-`, `MIG-`)."""
    text = text.strip()
    return int(text) if text.isdigit() else text


def kind(card: int) -> tuple[Any, ...]:
    """What two cards have in common on which times can be compared."""
    import torch

    found = torch.cuda.get_device_properties(card)
    return (found.name, found.major, found.minor, found.multi_processor_count, found.total_memory)


# ---- in the background


class AutotuneProcessPool:
    """One process that times beside the compiler. There is one of it at most; it is made when it
    is first needed, and ends after `AUTOTUNE_POOL_INACTIVITY_TIMEOUT` seconds without a request."""

    _instance: AutotuneProcessPool | None = None
    _shutdown_for_inactivity = False
    _lock = threading.RLock()

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process: TuningProcess | None = None
        self._timer: threading.Timer | None = None
        self._busy = 0

    @classmethod
    def get_instance(cls) -> AutotuneProcessPool:
        with cls._lock:
            if cls._instance is None:
                cls._instance = AutotuneProcessPool()
            return cls._instance

    def warm_up(self) -> Future[Any]:
        """Have the process started; the time without requests begins when it has."""
        return self.submit(_nothing)

    def submit(self, job: Job, seconds: float | None = None) -> Future[Any]:
        """What the job gives in the process, or raises there."""
        with self._lock:
            type(self)._shutdown_for_inactivity = False
            if self._pool is None or self._process is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="tilewright-background")
                self._process = TuningProcess()
                atexit.register(self._process.kill)
            self._stop_timer()
            self._busy += 1
            limit = seconds or max(START, config.max_autotune_subproc_result_timeout_seconds)
            return self._pool.submit(self._run, self._process, self._process.packed(job), limit)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive

    def _run(self, process: TuningProcess, packed: bytes, seconds: float) -> Any:
        try:
            process.send(packed)
            return process.get(seconds)
        except Exception as error:
            if harms(error):
                process.restart()
            raise
        finally:
            with self._lock:
                self._busy -= 1
                if not self._busy:
                    self._start_timer()

    def _start_timer(self) -> None:
        if AUTOTUNE_POOL_INACTIVITY_TIMEOUT > 0:
            self._timer = threading.Timer(AUTOTUNE_POOL_INACTIVITY_TIMEOUT, self._inactive)
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _inactive(self) -> None:
        with self._lock:
            if self._busy:
                return
            type(self)._shutdown_for_inactivity = True
            self.shutdown()

    def shutdown(self) -> None:
        with self._lock:
            self._stop_timer()
            pool, self._pool = self._pool, None
            process, self._process = self._process, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        if process is not None:
            process.kill()


def _nothing() -> None:
    importlib.import_module("torch")  # what every request needs


def use_pipelined_autotuning() -> bool:
    """Whether candidates are timed in the background: asked for, and its process has not ended for
    want of requests."""
    return config.pipeline_max_autotune_gemm and not AutotuneProcessPool._shutdown_for_inactivity


class AsyncAutotuner:
    """Requests under way, by the choice and what it is for: equal ones are made once."""

    choice_hash_to_future: ClassVar[dict[str, Future[Any]]] = {}

    @classmethod
    def start(cls, key: str, job: Job) -> Future[Any]:
        if key not in cls.choice_hash_to_future:
            made = AutotuneProcessPool.get_instance().submit(job)
            cls.choice_hash_to_future[key] = made
        return cls.choice_hash_to_future[key]

    @classmethod
    def clear(cls) -> None:
        cls.choice_hash_to_future.clear()


def _in_a_fork() -> None:
    """It has neither the threads nor the processes of its parent, and nobody lets go of locks."""
    AutotuneProcessPool._instance, AutotuneProcessPool._lock = None, threading.RLock()
    AsyncAutotuner.clear()


os.register_at_fork(after_in_child=_in_a_fork)
