"""From a kernel's text to a function that launches it, compiled once for all processes.

A `Request` is all that a compilation depends on, and its hash is the name of what is made of it: a
shared library of the object that the DSL compiles and the few functions it calls (`shim.cpp`). A
process that finds it in the store neither traces nor compiles, and does not import the DSL.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import hashlib
import importlib
import itertools
import linecache
import logging
import os
import queue
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tilewright import caches, config, metrics
from tilewright.errors import BuildError
from tilewright.gemm.cutedsl import toolchain
from tilewright.gemm.cutedsl.types import memory
from tilewright.runtime import driver, store
from tilewright.tune.child import TuningProcess

log = logging.getLogger("tilewright.build")

SHIM = Path(__file__).parent / "shim.cpp"
DEVICE = Path(__file__).parent / "device.py"
PREFIX = "tw"
LONGEST = 300.0  # seconds of one compilation


@dataclass(frozen=True)
class Pointer:
    """A buffer: elements of a type, at a multiple of so many bytes."""

    dtype: torch.dtype
    align: int = 16


@dataclass(frozen=True)
class Number:
    """A size, a stride, or another integer of the call."""

    kind: Literal["Int32", "Int64"] = "Int32"


Argument = Pointer | Number


@dataclass(frozen=True)
class Request:
    """A module's text, the function in it to compile, and what that is called with. The function
    is a `@cute.jit` of pointers and integers, and of a stream."""

    text: str
    entry: str
    arguments: tuple[Argument, ...]
    architecture: str  # sm_90a
    options: str = ""  # of the DSL's compiler
    version: str = field(default_factory=toolchain.version)  # of the DSL where it was asked for

    @functools.cached_property
    def key(self) -> str:
        return store.key("cutedsl", self.text, self.entry, repr(self.arguments), self.architecture,
                         self.options, self.version, _support())  # fmt: skip

    @property
    def path(self) -> Path:
        return store.path(self.key, ".cute.so")


@functools.cache
def _support() -> str:
    """What else is in a library: the shim, and functions that generated text calls."""
    return store.key(SHIM.read_bytes(), DEVICE.read_bytes(), toolchain.HOST)


# ---- compiling


def compiled(request: Request) -> bytes:
    """The object file, compiled in this process. Nothing is written: the DSL finds the text in
    `linecache`."""
    with undisturbed():
        made = traced(request)
        return made.dump_to_object(PREFIX)


def traced(request: Request) -> Any:
    """The DSL's own compiled function."""
    cutlass: Any = importlib.import_module("cutlass")
    cute: Any = importlib.import_module("cutlass.cute")
    runtime: Any = importlib.import_module("cutlass.cute.runtime")
    entry = module(request.text).get(request.entry)
    given: list[Any] = []
    for argument in request.arguments:
        if isinstance(argument, Pointer):
            kind = getattr(cutlass, memory(argument.dtype))
            given.append(runtime.make_ptr(kind, 1 << 12, cute.AddressSpace.gmem,
                                          assumed_align=argument.align))  # fmt: skip
        else:
            given.append(getattr(cutlass, argument.kind)(1))
    host = f"--host-target 'llvm -mtriple=x86_64-unknown-linux-gnu -mcpu={toolchain.HOST}'"
    options = f"--gpu-arch {request.architecture} {host} {request.options}".strip()
    return cute.compile(entry, *given, runtime.make_fake_stream(), options=options)


def module(text: str) -> dict[str, Any]:
    """The names that a text defines, straight from the string."""
    name = f"<cutedsl {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    made: dict[str, Any] = {"__name__": name.strip("<>").replace(" ", "_")}
    exec(compile(text, name, "exec"), made)
    return made


@contextlib.contextmanager
def undisturbed() -> Any:
    """The DSL asks no device, and its settings in the environment are not changed by it."""
    before = dict(os.environ)
    os.environ.setdefault("CUTE_DSL_NO_CACHE", "1")
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


def linked(request: Request, data: bytes, name: str) -> Callable[[Path], None]:
    """How to write the library of an object whose host function has that name."""

    def write(target: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="tilewright_cute_") as folder:
            at = Path(folder, "kernel.o")
            at.write_bytes(data)
            draft = Path(folder, "kernel.so")
            command = [config.cpp.cxx, "-O2", "-std=c++17", "-fPIC", "-shared", "-w", "-x", "c++",
                       str(SHIM), "-x", "none", str(at), f"-Wl,--defsym=tw_call={PREFIX}_{name}",
                       "-Wl,-z,defs", "-ldl", "-o", str(draft)]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"{request.entry} cannot be linked", command=tuple(command),
                                 stderr=done.stderr)  # fmt: skip
            target.write_bytes(draft.read_bytes())

    return write


def make(request: Request) -> str:
    """Compile, and keep. For a process that compiles."""
    try:
        with undisturbed():
            made = traced(request)
            data, name = made.dump_to_object(PREFIX), made.function_name
    except Exception as error:  # of the DSL, which raises what it likes
        said = _plain(f"{type(error).__name__}: {error}")
        raise BuildError(
            f"the CuTe DSL does not compile {request.entry}: {said}",
            command=("cute.compile", request.entry),
            stderr=said,
        ) from None
    store.put_atomic(request.path, linked(request, data, name))
    return request.key


def _plain(text: str) -> str:
    """Without colours and empty lines."""
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return "\n".join(line.rstrip() for line in bare.splitlines() if line.strip())


# ---- processes that compile


class _Workers:
    """GPU-blind processes, started when they are first needed; each imports the DSL once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._idle: queue.SimpleQueue[TuningProcess] = queue.SimpleQueue()
        self._all: list[TuningProcess] = []
        self._pid = os.getpid()
        self._numbers = itertools.count()

    def submit(self, request: Request) -> Future[str]:
        with self._lock:
            if self._threads is None or self._pid != os.getpid():
                self._begin()
            assert self._threads is not None
            return self._threads.submit(contextvars.copy_context().run, self._run, request)

    def _begin(self) -> None:
        count = config.compile_threads or os.cpu_count() or 1
        self._pid = os.getpid()
        self._idle = queue.SimpleQueue()
        self._all = [TuningProcess(-1) for _ in range(min(count, 8))]
        for process in self._all:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(len(self._all), thread_name_prefix="tilewright-cute")

    def _run(self, request: Request) -> str:
        process = self._idle.get()
        try:
            process.put(functools.partial(make, request))
            return process.get(LONGEST)
        except (EOFError, TimeoutError) as error:
            raise BuildError(
                f"compiling {request.entry} ended badly: {error}",
                command=("cute.compile", request.entry),
                stderr="",
            ) from error
        finally:
            self._idle.put(process)

    def end(self) -> None:
        with self._lock:
            if self._pid != os.getpid():
                return
            for process in self._all:
                process.kill()
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads, self._all = None, []


_workers = _Workers()
atexit.register(_workers.end)
_under_way: dict[str, Future[str]] = {}
caches.register(_under_way.clear)


def submit(request: Request) -> Future[str]:
    """Have it in the store, if it is not there. Each kernel is asked for once in a process."""
    found = _under_way.get(request.key)
    if found is not None:
        return found
    counters = metrics.counters["inductor"]
    if store.is_good(request.path):
        counters["cutedsl_kernel_cache_hit"] += 1
        found = Future[str]()
        found.set_result(request.key)
    else:
        counters["cutedsl_kernel_cache_miss"] += 1
        apart = config.compile_threads != 1 and not toolchain.why_not()
        found = _workers.submit(request) if apart else _at_once(request)
    _under_way[request.key] = found
    return found


def _at_once(request: Request) -> Future[str]:
    done = Future[str]()
    try:
        if toolchain.why_not():
            raise BuildError(
                f"{request.entry} is not in the store, and cannot be compiled here",
                command=("cute.compile", request.entry),
                stderr="",
                hint=toolchain.why_not(),
            )
        done.set_result(make(request))
    except Exception as error:
        done.set_exception(error)
    return done


# ---- loading


class Loaded:
    """A library of this process. `function(*addresses and integers, stream)` launches."""

    def __init__(self, path: Path) -> None:
        with store.loadable(path) as library:
            self.library = ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL)
        self.function: Any = self.library.tw_call
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value or 0
        self._devices: set[int] = set()

    def ready(self, device: int) -> None:
        """Load the kernels on a device, which is to be the current one."""
        if device in self._devices:
            return
        if not self._devices:
            self._check(self.library.tw_open(driver.driver().library._name.encode()), "tw_open")
        with driver.driver().current(device):
            self._check(self.library.tw_load(device), "tw_load")
        self._devices.add(device)

    def _check(self, code: int, what: str) -> None:
        driver.driver().check(code, what)


_loaded: dict[str, Loaded] = {}
caches.register(_loaded.clear)


def load(request: Request) -> Loaded:
    """The function, compiled first if need be."""
    found = _loaded.get(request.key)
    if found is None:
        submit(request).result()
        found = _loaded[request.key] = Loaded(request.path)
        if config.force_disable_caches:  # it stays mapped, and leaves no file
            request.path.unlink(missing_ok=True)
            _under_way.pop(request.key, None)
    return found
