"""Several processes that time, one for each card; and one that times in the background.

`TuningProcessPool` has candidates timed on every card at once (`config.autotune_multi_device`):
each process sees one card, takes the next candidate when it is free, and is started again
after one that brought it down. `AutotuneProcessPool` is one process beside the compiler, for
`config.pipeline_max_autotune_gemm`: what it is asked for is fetched when somebody needs it, and it
ends when nobody has asked for a while.
"""

from __future__ import annotations

import atexit
import contextvars
import importlib
import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Protocol, TypeVar

from tilewright import config
from tilewright.tune.child import START, Job, TuningProcess, harms

log = logging.getLogger("tilewright.tune")
AUTOTUNE_POOL_INACTIVITY_TIMEOUT = 600.0  # seconds; 0: it does not end
VISIBLE = "CUDA_VISIBLE_DEVICES"


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

    def __init__(self) -> None:
        self.devices = self.get_device_list()
        self.processes: queue.Queue[TuningProcess] = queue.Queue()
        self._all = [TuningProcess(device) for device in self.devices]
        for process in self._all:
            self.processes.put(process)
        self._threads = ThreadPoolExecutor(len(self._all), thread_name_prefix="tilewright-tune")
        atexit.register(self.shutdown)

    @staticmethod
    def get_device_list() -> list[int | None]:
        """The cards to time on: none in particular, unless several are asked for."""
        if not config.autotune_multi_device:
            return [None]
        import torch

        count = torch.cuda.device_count()
        named = os.environ.get(VISIBLE)
        if named is None:
            return list(range(count)) or [None]
        devices = [int(d) for d in named.split(",") if d.strip().isdigit()]
        if len(devices) > max(count, 1) and count:
            raise ValueError(f"{VISIBLE}={named} names more cards than the {count} there are")
        return list(devices) or [None]

    def benchmark(self, choices: Sequence[C]) -> dict[C, float]:
        """Milliseconds of each; infinite for one that raised, crashed or did not end."""
        return dict(zip(choices, self._each(self.target, choices), strict=True))

    def _each(self, work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """All at once, with the options of who asks."""
        waiting = [self._threads.submit(contextvars.copy_context().run, work, i) for i in items]
        return [w.result() for w in waiting]

    def target(self, choice: Requested) -> float:
        """One choice, by the next process that is free."""
        process = self.processes.get()
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
            process = self.processes.get()
            try:
                process.put(job)
                return process.get(seconds)
            except Exception as error:
                if harms(error):
                    process.restart()
                return error
            finally:
                self.processes.put(process)

        return self._each(one, jobs)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.kill()


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
