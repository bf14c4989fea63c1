"""Timing in a process of its own (`config.autotune_in_subproc`).

A candidate that crashes, hangs or leaves the card unusable then costs itself and not the user's
program. The process is started when it is first needed and again after each death. What it is asked
for arrives as a pickled function; it makes its own inputs, so nothing but descriptions is sent. It
ends with its parent, and leaves interrupts at the keyboard to it.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import io
import os
import pickle
import secrets
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from tilewright import caches, config
from tilewright.tune.failures import Crashed

if TYPE_CHECKING:  # the process starts in a tenth of a second; torch comes with the first candidate
    import torch

    from tilewright.tune.clock import Bench, Clock

START = 120.0  # seconds: a Python process that imports torch on a busy machine
DEFAULT_TIMEOUT = 120.0
TAKES = 30.0  # seconds for a process that has nothing to do to read what it is to do
BESIDE = 3  # samples of what is looked at beside another
LAST = 5.0  # of a process that has closed its end, for its end to be known
FOR_EVER = 1e6  # as long as can be waited for at once
LONGEST = 1 << 28  # bytes of an answer
# Errors after which CUDA wants the process ended, 700, 702, 710, 714 to 719: texts and names.
_HARMFUL = ("illegal memory access", "cudaerrorillegaladdress",
            "launch timed out", "cudaerrorlaunchtimeout",
            "device-side assert", "cudaerrorassert",
            "hardware stack error", "cudaerrorhardwarestackerror",
            "illegal instruction", "cudaerrorillegalinstruction",
            "misaligned address", "cudaerrormisalignedaddress",
            "not supported on global/shared address space", "cudaerrorinvalidaddressspace",
            "invalid program counter", "cudaerrorinvalidpc",
            "launch failure", "cudaerrorlaunchfailure")  # fmt: skip
# Of `torch.backends`: what libraries compute, and how long they take, depends on them.
_FLAGS = {
    "cuda.matmul": ("fp32_precision", "allow_fp16_reduced_precision_reduction",
                    "allow_bf16_reduced_precision_reduction"),
    "cudnn": ("benchmark", "deterministic", "enabled"),
    "cudnn.conv": ("fp32_precision",),
    "mkldnn.matmul": ("fp32_precision",),
    "mkldnn.conv": ("fp32_precision",),
}  # fmt: skip
_PR_SET_PDEATHSIG = 1

Job = Callable[[], Any]
Device = int | str | None


class TuningProcess:
    """`put` a picklable function, `get` what it returns or raises. `device` is the only card it is
    to see, by number or by what else CUDA calls it; none: all of them. Whichever it is to who asks,
    there it is the first."""

    def __init__(self, device: Device = None) -> None:
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = os.getpid()

    @property
    def device(self) -> Device:
        return self._device

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        return (self._process is not None and self._process.poll() is None
                and self._pid == os.getpid())  # fmt: skip

    def _get_ready(self, job: Job) -> None:
        """Have it import what a job needs, torch first of all: that is not the job's own time."""
        self.send(self.packed(functools.partial(callable, job)))
        try:
            self.get(START)
        except TimeoutError as error:  # a busy machine, as far as can be told
            raise NotStarted(f"a process to time in does not get ready: {error}") from error

    def put(self, job: Job) -> None:
        """Give it something to do; it is started if it is not there."""
        if not self.is_alive:
            self._get_ready(job)
        self.send(self.packed(job))

    @staticmethod
    def packed(job: Job) -> bytes:
        """The job as it is sent, with the options of who asks."""
        return pickle.dumps((job, _settings_now()))

    def send(self, packed: bytes) -> None:
        """Raises `NotStarted` where there is no process to be had, and `TimeoutError`, having
        killed it, where it does not take what it is sent."""
        if not self.is_alive:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        fd, end = self._process.stdin.fileno(), time.monotonic() + TAKES
        left = memoryview(len(packed).to_bytes(8, "little") + packed)
        with contextlib.suppress(BrokenPipeError):  # it has died: `get` tells
            while left:
                if not _ready(fd, select.POLLOUT, end):
                    self.kill()
                    raise TimeoutError("it does not read what it is sent")
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(fd, left) :]

    def get(self, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """The result. Raises what the job raised, or `EOFError` if the process died; having killed
        it, `TimeoutError`, or an interrupt that came meanwhile."""
        assert self._process is not None and self._process.stdout is not None, "nothing was put"
        end = time.monotonic() + timeout
        try:
            size = int.from_bytes(self._read(8, end), "little")
            done, value = pickle.loads(self._read(size, end))
        except EOFError:
            why = self._ended()
            self.kill()
            raise EOFError(f"the process {why}") from None
        except BaseException:  # an answer that comes later would be taken for another's
            self.kill()
            raise
        if not done:
            raise value
        return value

    def _ended(self) -> str:
        """How it ended, which may be a moment after it was last heard of."""
        assert self._process is not None
        try:
            code = self._process.wait(LAST)
        except subprocess.TimeoutExpired:
            return "closed its connection, and was ended"
        return f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"

    def restart(self) -> None:
        """End it: its card is of no more use to it. The next `put` starts another."""
        self.kill()

    def kill(self) -> None:
        """End it at once; the next `put` starts another."""
        process, self._process = self._process, None
        if process is None or self._pid != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _start(self) -> None:
        if self._pid != os.getpid():  # a fork has its own
            self._process, self._pid = None, os.getpid()
        self.kill()
        # programs have paths and what else in this list
        given = cast("list[Any]", sys.path)
        found = [os.fspath(p) for p in given if p and isinstance(p, (str, os.PathLike))]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.fsdecode, found))}
        if self._device is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(self._device)
        greeting = secrets.token_hex(16)
        alone = self._device is not None
        main = f"from {__name__} import main; main({os.getpid()}, {greeting!r}, {alone})"
        try:
            self._process = _begin([sys.executable, "-c", main], env)
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            self._await(greeting.encode(), time.monotonic() + START)
        except (OSError, EOFError, RuntimeError, ValueError) as error:  # no thread; no such text
            why = self._ended() if isinstance(error, EOFError) else f"{error}"
            self.kill()
            raise NotStarted(f"a process to time in cannot be started: {sys.executable}: {why}"
                             ) from error  # fmt: skip
        except BaseException:
            self.kill()
            raise

    def _await(self, greeting: bytes, end: float) -> None:
        """It is there. What a machine's own start files print before that is passed over."""
        said = self._read(len(greeting), end)
        while said != greeting:
            said = said[1:] + self._read(1, end)

    def _read(self, count: int, end: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        if count > LONGEST:
            raise ValueError(f"it answers with {count} bytes")
        fd, found = self._process.stdout.fileno(), bytearray()
        while len(found) < count:
            if not _ready(fd, select.POLLIN, end):
                raise TimeoutError("no answer in time")
            data = os.read(fd, count - len(found))
            if not data:
                raise EOFError
            found += data
        return bytes(found)


def _ready(fd: int, event: int, end: float) -> bool:
    """Whether it can be read or written before that time, or after it now: who asks may have been
    stopped meanwhile. `select` has no numbers over 1023."""
    left = max(0.0, end - time.monotonic())
    waiting = select.poll()
    waiting.register(fd, event)
    return bool(waiting.poll(1000 * min(FOR_EVER, left)))


class NotStarted(RuntimeError):
    """There is no other process to be had; it says nothing of what was to be done there."""


def _begin(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process that ends with this one. Linux ends it with the thread that began it, which is
    therefore one that does not end before."""
    global _beginner
    pid = os.getpid()
    with _lock:
        if _beginner is None or _beginner[0] != pid:  # a fork has no threads
            _beginner = pid, ThreadPoolExecutor(1, thread_name_prefix="tilewright-begin")
        thread = _beginner[1]
    return thread.submit(
        subprocess.Popen,
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        start_new_session=True,  # an interrupt at the keyboard is ours to handle
    ).result()


_beginner: tuple[int, ThreadPoolExecutor] | None = None
_lock = threading.Lock()


@dataclass(frozen=True)
class Settings:
    """What results and times depend on beside the job."""

    options: tuple[tuple[str, Any], ...]
    flags: tuple[tuple[str, str, Any], ...]
    deterministic: tuple[bool, bool]  # and whether a warning is enough
    threads: int
    epoch: int  # counts how often all was forgotten that is kept in memory

    @classmethod
    def now(cls) -> Settings:
        import torch

        flags = [(where, name, getattr(_flags(where), name))
                 for where, names in _FLAGS.items() for name in names]  # fmt: skip
        deterministic = (torch.are_deterministic_algorithms_enabled(),
                         torch.is_deterministic_algorithms_warn_only_enabled())  # fmt: skip
        return cls(tuple(config.snapshot().items()), tuple(flags), deterministic,
                   torch.get_num_threads(), _Table.epoch)  # fmt: skip

    def take(self) -> None:
        """For what was unpickled with them: without torch there is nothing to set."""
        if self.epoch != _Table.epoch:
            _Table.epoch = self.epoch
            _table.__init__()
        torch = sys.modules.get("torch")
        if torch is None:
            return
        for where, name, value in self.flags:
            if getattr(_flags(where), name) != value:
                setattr(_flags(where), name, value)
        enabled, warned = self.deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warned)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


def _flags(where: str) -> Any:
    import torch

    return functools.reduce(getattr, where.split("."), cast("Any", torch.backends))


def _settings_now() -> bytes:
    """As they are sent; equal ones as equal bytes, by which they are known there."""
    global _sent
    now = Settings.now()
    if _sent is None or _sent[0] != now:
        _sent = now, pickle.dumps(now)
    return _sent[1]


_sent: tuple[Settings, bytes] | None = None


# ---- in the process


def main(parent: int, greeting: str, alone: bool = False) -> None:
    """Serve until there is nobody to serve; `alone` with one card."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also while a job hangs
    if os.getppid() != parent:
        return
    with contextlib.suppress(OSError):  # where memory runs out, this is what Linux ends
        Path("/proc/self/oom_score_adj").write_text("1000")
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor does a job read what is asked next
    os.dup2(2, 1)  # whatever a job prints is not an answer
    answers.write(greeting.encode())
    answers.flush()
    me, folder = os.getpid(), os.open(".", os.O_RDONLY)
    while True:
        size = asked.read(8)
        if len(size) < 8:
            return
        data = _answer(asked.read(int.from_bytes(size, "little")), _FirstCard if alone else None)
        if os.getpid() != me:  # a job has forked, and the other one answers
            os._exit(0)
        os.fchdir(folder)
        answers.write(len(data).to_bytes(8, "little") + data)
        answers.flush()


class _FirstCard(pickle.Unpickler):
    """Who sees one card knows it as the first one, whatever it is to who sends this."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _first_card if (module, name) == ("torch", "device") else found


def _first_card(kind: str, *index: int) -> torch.device:
    import torch

    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind, *index)


def _read(asked: bytes, reader: type[pickle.Unpickler]) -> tuple[Job, bytes]:
    try:
        return reader(io.BytesIO(asked)).load()
    except AttributeError as error:
        if "__main__" not in str(error):
            raise
        raise LookupError(
            f"what the program's main file defines is not known here ({error}): define it in a "
            "module, or set config.autotune_in_subproc = False"
        ) from error


class _Options:
    """What jobs run with. To set all options takes as long as a sample of a short kernel; mostly
    they are those of the job before."""

    def __init__(self) -> None:
        self._packed = b""
        self._settings: Settings | None = None
        self._context = contextvars.Context()

    def run(self, job: Job, packed: bytes) -> Any:
        settings = self._settings
        if packed != self._packed or settings is None:
            settings = cast("Settings", pickle.loads(packed))
            self._context = contextvars.copy_context()
            self._context.run(config.patch(dict(settings.options)).__enter__)
            self._packed, self._settings = packed, settings
        settings.take()
        try:
            return self._context.copy().run(job)
        finally:
            if tuple(self._context.run(config.snapshot).items()) != settings.options:
                self._settings = None  # the job has set some itself


_options = _Options()


def _answer(asked: bytes, reader: type[pickle.Unpickler] | None) -> bytes:
    try:
        job, packed = _read(asked, reader or pickle.Unpickler)
        return pickle.dumps((True, _options.run(job, packed)))
    except Exception as error:
        try:
            data = pickle.dumps((False, error))
            pickle.loads(data)  # who asked has to be able to
            return data
        except Exception:
            return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))


# ---- candidates


class Opened(Protocol):
    """A candidate ready to run in the process that times it."""

    def run(self, stream: int, which: int) -> None: ...
    def check(self) -> str: ...


class Remote(Protocol):
    """A candidate as it is sent: it pickles."""

    @property
    def key(self) -> str: ...
    @property
    def site(self) -> str:
        """Candidates of one site share their memory; another site's is given up for it."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def sets(self) -> int: ...
    def open(self) -> Opened: ...


class _Table:
    """The candidates of the site that is tuned, in the process that times."""

    epoch = 0

    def __init__(self) -> None:
        self.site = ""
        self.opened: dict[str, Opened] = {}
        self.benches: dict[str, Bench] = {}
        self.took: dict[str, float] = {}  # microseconds of what others are compared with
        self.clock: Clock | None = None

    def open(self, remote: Remote) -> Opened:
        if remote.site != self.site:
            self.site, self.opened, self.benches, self.took = remote.site, {}, {}, {}
            self.clock = _clock(remote.device)
        if remote.key not in self.opened:
            self.opened[remote.key] = remote.open()
        return self.opened[remote.key]

    def bench(self, remote: Remote) -> Bench:
        run = self.open(remote).run
        if remote.key not in self.benches:
            assert self.clock is not None
            self.benches[remote.key] = self.clock.bench(run, remote.sets)
        return self.benches[remote.key]


def _clock(device: torch.device) -> Clock:
    from tilewright.tune import clock

    return clock.of(device)


_table = _Table()
on_release: list[Callable[[], object]] = []  # called when memory is given up


def ready(remote: Remote) -> None:
    _table.open(remote)


def sample(remote: Remote) -> tuple[float, float]:
    bench = _table.bench(remote)
    return bench.sample(), bench.waited


def again(site: str, key: str) -> tuple[float, float] | None:
    """A sample of a candidate that is known here; none of one that is not."""
    if _table.site != site or key not in _table.benches:
        return None
    bench = _table.benches[key]
    return bench.sample(), bench.waited


def whole(remote: Remote, samples: int) -> tuple[list[float], str]:
    """Some samples, in microseconds, and why the result is wrong, or nothing: all there is to know
    of a candidate, in one request."""
    wrong = check(remote)
    if wrong:
        return [], wrong
    bench = _table.bench(remote)
    return [bench.sample() for _ in range(samples)], ""


def look(remote: Remote, beside: Remote | None, enough: float) -> tuple[list[float], float]:
    """The first samples of a candidate, one alone where that is over `enough` times what the other
    one takes; and what that takes, or zero. All in microseconds."""
    _table.open(remote)
    took = 0.0 if beside is None else _taken(beside)
    bench = _table.bench(remote)
    samples = [bench.sample()]
    if not took or samples[0] <= enough * took:
        samples.append(bench.sample())
    return samples, took


def _taken(beside: Remote) -> float:
    """What others are compared with, of the same site, takes here; zero where it does not run."""
    if beside.key not in _table.took:
        _table.took[beside.key] = 0.0
        with contextlib.suppress(Exception):
            bench = _table.bench(beside)
            _table.took[beside.key] = statistics.median(bench.sample() for _ in range(BESIDE))
    return _table.took[beside.key]


def release() -> None:
    """Give up the memory of the site that was tuned: the program needs it."""
    _table.__init__()
    for also in on_release:
        also()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def level(remote: Remote, us: float) -> None:
    _table.bench(remote).level(us)


def check(remote: Remote) -> str:
    return _table.open(remote).check()


# ---- for who tunes


class Sampler:
    """A `Bench` whose samples are taken in the other process."""

    def __init__(self, remote: Remote, seconds: float | None = None) -> None:
        """`seconds` are what a run may take, once all is ready for it."""
        self._remote = remote
        self._seconds = seconds
        self.waited = 0.0
        self._is_known = False
        if seconds is not None:
            asked(functools.partial(ready, remote), START)

    def sample(self) -> float:
        remote, taken = self._remote, None
        if self._is_known:
            taken = asked(functools.partial(again, remote.site, remote.key), self._seconds)
        if taken is None:  # the first, or it is another process by now
            taken = asked(functools.partial(sample, remote), self._seconds)
            self._is_known = True
        us, self.waited = taken
        return us

    def level(self, us: float) -> None:
        asked(functools.partial(level, self._remote, us))


def checked(remote: Remote) -> str:
    return asked(functools.partial(check, remote))


def harms(error: Exception) -> bool:
    """Whether an error leaves the card unusable for the process that met it."""
    return any(words in str(error).lower() for words in _HARMFUL)


def asked(job: Job, seconds: float | None = None) -> Any:
    """What a job gives in the process that times. Raises `Crashed` where it took the process with
    it, or had to be ended."""
    global _holds
    with _asking:
        _holds = True
        return answered(_process, job, seconds)


def answered(process: TuningProcess, job: Job, seconds: float | None = None) -> Any:
    """The same of one process, which nobody else asks meanwhile."""
    seconds = seconds or config.max_autotune_subproc_result_timeout_seconds
    try:
        process.put(job)
        return process.get(seconds)
    except TimeoutError:
        raise Crashed(f"it took more than {seconds:g} s in its own process") from None
    except EOFError as error:
        raise Crashed(f"it brought its own process down: {error}") from None
    except RuntimeError as error:
        if harms(error):
            process.restart()
        raise


def tidied() -> None:
    """Have the process that times give up the memory it timed on, if it has any, and nobody else
    is tuning."""
    global _holds
    if not _asking.acquire(blocking=False):
        return
    try:
        if _holds and _process.is_alive:
            answered(_process, release)
    except Exception:
        _process.kill()
    finally:
        _holds = False
        _asking.release()


@caches.register
def forget() -> None:
    """Have the process that times forget what it has, with its next job."""
    _Table.epoch += 1


def _in_a_fork() -> None:
    """Nobody is left there who lets go of them."""
    global _asking, _lock
    _asking, _lock = threading.RLock(), threading.Lock()


_asking = threading.RLock()  # one question at a time: an answer belongs to the one before it
_holds = False  # whether the process may have memory that was timed on
_process = TuningProcess()
atexit.register(_process.kill)
os.register_at_fork(after_in_child=_in_a_fork)
