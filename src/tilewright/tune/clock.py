"""How long a run takes: on a card by replays of a CUDA graph, on a CPU by batches of calls.

Each launch has the next of several sets of buffers, which together exceed the cache of a card, so
that memory is what is measured. A `Bench` is one candidate made ready; a sample of it is the mean
over some hundreds of microseconds of runs. Who takes how many samples is not decided here.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable
from typing import Protocol

import torch

from tilewright import caches
from tilewright.target import Target

Run = Callable[[int, int], None]  # (raw stream, which set of buffers)

SAMPLE = 250.0  # microseconds of runs in a sample, many times a run's own variation
LED = 2000.0  # microseconds of runs above which what starting them costs does not show
MOST_LAUNCHES = 200  # in one graph
BATCH = 400.0  # microseconds of calls in a batch on a CPU
MOST_CALLS = 1000  # in one batch
# A sample is the median of so many batches for which our threads did not wait for a core, if there
# are such in this many nanoseconds, and if samples before it were not all disturbed.
ALONE, TRYING, HOPELESS = 3, 10e6, 3
WAITED = 0.05  # part of its time that all threads together may have waited in a batch
LONG = 20e6  # nanoseconds of a batch that is neither led nor taken again: who is alone so long?
SELDOM = 0.25e9  # nanoseconds of a run that is too long to be made for nothing
IDLE = 0.02  # seconds after which a card may have lowered its clock
WARM = 0.01  # seconds of work that bring it back


class Bench(Protocol):
    waited: float  # microseconds by which others may have made the last sample longer

    def sample(self) -> float:
        """Microseconds of one run."""
        ...

    def level(self, us: float) -> None:
        """From now on, as many runs in a sample as of one that takes so long: what a sample costs
        beside its runs is then the same part of all that are compared."""
        ...


class Clock(Protocol):
    is_quiet: bool  # whether other processes' work leaves its times as they are
    heats: bool  # whether the machine comes to a limit of power, and is slower there

    def bench(self, run: Run, sets: int) -> Bench:
        """Make a run ready: all of it is done once on every set. Raises what the run raises."""
        ...

    def broken(self) -> str:
        """Why the device cannot be used any more by this process, or nothing."""
        ...


def of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


# ---- on a card


class CudaClock:
    is_quiet = True  # what is measured happens on the card alone
    heats = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = -math.inf  # when the card last worked

    def bench(self, run: Run, sets: int) -> Bench:
        with torch.cuda.device(self._device):
            stream = _stream(self._device)
            stream.wait_stream(torch.cuda.current_stream())
            return _Replay(self, run, sets, stream)

    def timed(self, work: Callable[[], None], stream: torch.cuda.Stream, led: bool) -> float:
        """Microseconds on the card between the start and the end of some work; `led` by the same
        work, behind which the host starts it and the card finds nothing that others left."""
        with torch.cuda.device(self._device):
            stream.wait_stream(torch.cuda.current_stream())  # which may be filling the buffers
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._warm(work, stream)
            if led:
                work()
            took = between(work)
        self._last = time.perf_counter()
        return took

    def _warm(self, work: Callable[[], None], stream: torch.cuda.Stream) -> None:
        """The same work for a while, if the card has been idle."""
        now = time.perf_counter()
        if now - self._last < IDLE:
            return
        while time.perf_counter() - now < WARM:
            work()
            stream.synchronize()

    def broken(self) -> str:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all that is ever timed: libraries keep memory of their own for every stream."""
    return torch.cuda.Stream()


caches.register(_stream.cache_clear)


def between(work: Callable[[], object]) -> float:
    """Microseconds of the card from before the work to after it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


class _Replay:
    """Many launches in one graph, each on the next set."""

    waited = 0.0  # a card is not shared

    def __init__(self, clock: CudaClock, run: Run, sets: int, stream: torch.cuda.Stream) -> None:
        self._clock = clock
        self._run = run
        self._sets = sets
        self._stream = stream
        with torch.cuda.stream(stream):
            self._once()  # loads what is loaded at the first launch
            stream.synchronize()
            self._us = between(self._once) / sets  # at most: a launch by itself waits for the host
        self._launches = _launches(self._us, sets)
        self._work = self._recorded()
        launches = _launches(self.sample(), sets)
        if launches > 1.5 * self._launches:
            self._again(launches)

    def sample(self) -> float:
        led = self._launches * self._us < LED
        self._us = self._clock.timed(self._work, self._stream, led) / self._launches
        return self._us

    def level(self, us: float) -> None:
        launches = _launches(us, self._sets)
        if launches != self._launches:
            self._again(launches)

    def _again(self, launches: int) -> None:
        self._launches = launches
        self._work = self._recorded()

    def _once(self) -> None:
        for k in range(self._sets):
            self._run(self._stream.cuda_stream, k)

    def _recorded(self) -> Callable[[], None]:
        try:
            return self._graph().replay
        except RuntimeError:
            if self._clock.broken():
                raise
            return self._all  # what cannot be recorded is launched one by one, as it will be

    def _graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # not torch.cuda.graph(): that empties the allocator's cache every time
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._all()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error is the one to tell
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _all(self) -> None:
        for k in range(self._launches):
            self._run(self._stream.cuda_stream, k % self._sets)


def _launches(us: float, sets: int) -> int:
    """In one sample, of what takes so many microseconds."""
    return _whole(SAMPLE / max(us, 0.1), sets, MOST_LAUNCHES)


def _whole(count: float, sets: int, most: int) -> int:
    """About `count` launches, so that every set has equally many; every set at least once."""
    return max(1, round(min(count, most) / sets)) * sets


# ---- on a CPU


class CpuClock:
    is_quiet = False  # whatever else runs takes its cores and caches
    heats = False  # as far as could be told among all that others do to it

    def bench(self, run: Run, sets: int) -> Bench:
        return _Batch(run, sets)

    def broken(self) -> str:
        return ""


class _Batch:
    """Calls one after the other, with caches as warm as the calls before leave them."""

    def __init__(self, run: Run, sets: int) -> None:
        self._run = run
        self._sets = sets
        self._next = 0
        self._calls = sets
        self._is_long = False
        self._in_vain = 0  # samples in a row that were disturbed
        self.waited = 0.0
        self._first = 0.0  # microseconds, where one run is long: it counts, and is not made again
        began, waited = time.perf_counter_ns(), delays()
        run(0, 0)
        took = time.perf_counter_ns() - began
        if took > SELDOM:
            self._calls, self._is_long = 1, True
            self._first, self.waited = took / 1000, (delays() - waited) / 1000
            return
        for k in range(1, sets):
            run(0, k)
        self._calls = _whole(BATCH / max(self.sample(), 0.1), sets, MOST_CALLS)
        if sets * self.sample() > BATCH:
            self._calls = 1  # the sets take turns between samples

    def sample(self) -> float:
        if self._first:
            first, self._first = self._first, 0.0
            return first
        alone: list[tuple[int, int]] = []
        shortest, spent = (0, 0), 0
        while len(alone) < ALONE:
            took, waited = self._batch()
            if waited <= WAITED * took:
                alone.append((took, waited))
            shortest = min(shortest, (took, waited)) if spent else (took, waited)
            spent += took
            self._is_long = took > LONG
            if self._is_long or spent > TRYING or self._in_vain >= HOPELESS:
                break
        self._in_vain = 0 if alone else self._in_vain + 1
        took, waited = sorted(alone)[len(alone) // 2] if alone else shortest
        self.waited = waited / 1000 / self._calls
        return took / 1000 / self._calls

    def _batch(self) -> tuple[int, int]:
        """Nanoseconds of a batch, and those that our threads waited for a core in it."""
        run, sets, first = self._run, self._sets, self._next
        if self._calls == 1 and not self._is_long:  # what others leave in caches is not its own
            run(0, first)
        waited, start = delays(), time.perf_counter_ns()
        for k in range(first, first + self._calls):
            run(0, k % sets)
        took = time.perf_counter_ns() - start
        self._next = (first + self._calls) % sets
        return took, delays() - waited

    def level(self, us: float) -> None:
        """A batch costs nothing beside its calls."""


class _Delays:
    """How long the threads of this process have waited for a core, in nanoseconds, where Linux
    tells; the files in which it does are kept open, for there are many threads."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._pid = 0

    def __call__(self) -> int:
        if self._pid != os.getpid():
            self.close()
            self._pid = os.getpid()
        try:
            names = os.listdir("/proc/self/task")
        except OSError:
            return 0
        return sum(self._of(name) for name in names)

    def _of(self, name: str) -> int:
        try:
            if name not in self._files:
                self._files[name] = os.open(f"/proc/self/task/{name}/schedstat", os.O_RDONLY)
            return int(os.pread(self._files[name], 64, 0).split()[1])
        except (OSError, ValueError, IndexError):  # it has just ended, or is another of that name
            with contextlib.suppress(OSError, KeyError):
                os.close(self._files.pop(name))
            return 0

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                os.close(file)
        self._files = {}


delays = _Delays()
caches.register(delays.close)


# ---- buffers


def sets_beyond_cache(size: int, device: torch.device) -> int:
    """How many sets of `size` bytes exceed the cache; a few at most."""
    target = Target.of(device)
    cache = target.l2 * max(1, target.cores)
    return max(1, min(8, 2 * cache // max(size, 1) + 1))


def filled(dtype: torch.dtype, count: int, device: torch.device, high: int = 0) -> torch.Tensor:
    """Memory with plausible contents: small floats, and integers that are safe as indices, or
    positions below `high` in any order, each as rarely as can be. The user's random numbers are
    not touched."""
    generator = torch.Generator(device).manual_seed(0)
    if high > 1 and not dtype.is_floating_point:
        order = torch.randperm(count, generator=generator, device=device)
        return (order % high).to(dtype)
    if not dtype.is_floating_point:
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.rand(count, generator=generator, device=device).to(dtype)
