"""Building and loading C++ kernels.

A kernel is a source text and the name of its one `extern "C"` function. Missing ones are compiled
in parallel, each in a compiler process of its own, straight into a shared library in the store;
the rest is loaded from there. `submit` returns at once, so that the next kernels can be generated
while the first are built.

No precompiled header: it was measured (g++ 12, `tw.h`, 2 cores, 2026) to save 14 of 97 ms per
kernel and to cost 110 ms of its own before the first one can start.
"""

from __future__ import annotations

import contextvars
import ctypes
import errno
import functools
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tilewright import caches, config, monitor
from tilewright.errors import BuildError
from tilewright.runtime import compilers, native, store
from tilewright.target import Target

ArgKind = Literal["ptr", "int", "float"]

INCLUDE = Path(__file__).parent / "include"
# Contraction is off because eager rounds every product; trapping maths and errno are off because
# they forbid vectorisation and nobody looks at them. All else of IEEE arithmetic stays.
# Unroll-and-jam took g++ 12 from 0.2 to 28 s on a column reduction of 40 lanes (AVX2, 2026-11-15).
# Sinking moves loads under the condition of a `?:`: see `tw::masked` for what becomes of them.
# Load motion (g++ 12.2) took loads of a row beyond its stores, where others were under conditions.
FLAGS = (
    "-O3",
    "-std=c++20",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fno-loop-unroll-and-jam",
    "-fno-tree-sink",
    "-fno-gcse-lm",
    "-fPIC",
    "-shared",
    "-pipe",
    "-w",
)
# A kernel needs neither the C++ runtime nor start files; leaving them out saves 15 ms of linking.
# An undefined symbol is to fail here, where the source is at hand, and not when loading.
LINK = ("-nostdlib", "-Wl,-z,defs", "-lm", "-lc", "-lgcc")
_TIMEOUT = 600.0
_NO_ROOM, _CROWDED = os.strerror(errno.ENOSPC), os.strerror(errno.EAGAIN)
_TOO_MANY = ("there may be no more processes: lower config.compile_threads, or raise the limit "
             "(ulimit -u, or the container's)")  # fmt: skip

_CTYPES: dict[ArgKind, type[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_double]] = {
    "ptr": ctypes.c_void_p,
    "int": ctypes.c_int64,
    "float": ctypes.c_double,
}


@dataclass(frozen=True)
class CxxSource:
    """A kernel to build: its text, the function in it, and the kinds of the function's arguments.

    `flags` choose the instruction set; None means this machine's.
    """

    text: str
    name: str
    args: tuple[ArgKind, ...]
    flags: tuple[str, ...] | None = None


@dataclass
class Loaded:
    """A kernel ready to be called with tensors, addresses, integers and floats. `function` is
    replaced by a quicker one as soon as that is there."""

    name: str
    function: Callable[..., None]
    address: int
    library: Path
    source: Path

    def __call__(self, *args: int | float) -> None:
        self.function(*args)


@dataclass(frozen=True)
class Submitted:
    """Kernels under way, in the order they were asked for."""

    futures: tuple[Future[Loaded], ...]

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def result(self) -> list[Loaded]:
        """Wait for all; the first failure, in that order, is raised."""
        return [future.result() for future in self.futures]


def build(sources: Sequence[CxxSource]) -> list[Loaded]:
    """Build what is missing, load everything."""
    return submit(sources).result()


def submit(sources: Sequence[CxxSource]) -> Submitted:
    """Start building what is missing and return at once."""
    return Submitted(tuple(_workshop.kernel(source) for source in sources))


def abandon() -> None:
    """Build nothing of what is under way: the program was interrupted. What is asked for again is
    built then."""
    _workshop.abandon()


def key_of(source: CxxSource) -> str:
    """What a kernel is kept under: of its source, the headers, the compiler and the flags."""
    return _Order.of(source).key


# ---------------------------------------------------------------------------------------- running


class _Workshop:
    """The kernels of this process, built, loaded or under way, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: dict[tuple[str, str, tuple[ArgKind, ...]], Future[Loaded]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()

    def kernel(self, source: CxxSource) -> Future[Loaded]:
        order = _Order.of(source)
        identity = (order.key, source.name, source.args)
        with self._lock:
            if self._pid != os.getpid():  # after a fork the threads are gone, and their work too
                self._pool, self._pid = None, os.getpid()
                self._kernels = {k: f for k, f in self._kernels.items() if f.done()}
            found = self._kernels.get(identity)
            if found is not None and not (found.done() and found.exception() is not None):
                return found
            if store.is_good(order.library):
                try:
                    future: Future[Loaded] = Future()
                    future.set_result(_load(source, order, order.library))
                    self._kernels[identity] = future
                    return future
                except OSError:
                    pass  # not a library of this machine: build it again
            monitor.happened("build", f"the kernel {source.name}")
            # in the context of who asks: the options of a thread are its own
            future = self._workers().submit(contextvars.copy_context().run, _build, source, order)
            self._kernels[identity] = future
            return future

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            threads = config.compile_threads or len(os.sched_getaffinity(0))
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tilewright-cxx")
        return self._pool

    def clear(self) -> None:
        with self._lock:
            self._kernels.clear()
            if self._pool is not None:
                self._pool.shutdown(wait=False)
            self._pool = None

    def abandon(self) -> None:
        with self._lock:
            self._kernels = {k: f for k, f in self._kernels.items() if f.done()}
            if self._pool is not None and self._pid == os.getpid():
                self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        compilers.end()


_workshop = _Workshop()
caches.register(_workshop.clear)


@dataclass(frozen=True)
class _Order:
    """How a source is to be built, and where to."""

    key: str
    compiler: str | None  # none: what was built with one that is gone can still be had
    command: tuple[str, ...]  # without the compiler and the files
    link: tuple[str, ...]
    library: Path
    source: Path

    @classmethod
    def of(cls, source: CxxSource) -> _Order:
        isa = Target.host().cxx_flags if source.flags is None else source.flags
        compiler, version = _compiler(config.cpp.cxx)
        flags = (*FLAGS, *isa, *_definitions(source.text))
        openmp = _openmp_library()
        # The library is found again by its own name, not by where it was when we linked.
        linked = os.path.basename(openmp)
        key = store.key(source.text, _headers(), version, *flags, *LINK, linked)
        return cls(
            key,
            compiler,
            (*flags, f"-I{INCLUDE}"),
            (openmp, *LINK),
            store.path(key, ".so"),
            store.path(key, ".cpp"),
        )


def _build(source: CxxSource, order: _Order) -> Loaded:
    for attempt in (1, 2):
        library = _compile(source, order)
        try:
            return _load(source, order, library)
        except OSError as error:
            # Deleted or damaged between building and loading: once is bad luck.
            if attempt == 2:
                raise BuildError(
                    f"the kernel {source.name} was built but cannot be loaded: {error}",
                    command=order.command,
                    stderr=str(error),
                    hint=f"the source is {order.source}",
                ) from error
    raise AssertionError("unreachable")


def _compile(source: CxxSource, order: _Order) -> Path:
    store.keep(order.source, source.text.encode(), plain=True)
    return store.build(order.library, lambda draft: _run(source, order, draft))


def _run(source: CxxSource, order: _Order, output: Path) -> None:
    if order.compiler is None:
        raise _no_compiler()
    # The text goes through a pipe: nobody can delete it under the compiler.
    command = (order.compiler, *order.command, "-x", "c++", "-", "-x", "none", "-o", str(output),
               *order.link)  # fmt: skip
    for attempt in (1, 2):
        try:
            done = compilers.run(command, timeout=_TIMEOUT, text=source.text, folder=output.parent)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(
                f"the C++ compiler could not build {source.name}: {error}",
                command=command,
                stderr="",
                hint=_TOO_MANY
                if isinstance(error, BlockingIOError)
                else f"the source is {order.source}",
            ) from error
        if done.returncode == 0:
            return
        if _NO_ROOM in done.stderr:
            raise OSError(errno.ENOSPC, _NO_ROOM)
        if not _worth_retrying(done, output) or attempt == 2:
            raise _refused(source, order, command, done)
        output.parent.mkdir(parents=True, exist_ok=True)


def _worth_retrying(done: subprocess.CompletedProcess[str], output: Path) -> bool:
    """Whether it failed for a reason outside the source: killed, without room for a process of its
    own, or the folder was deleted."""
    outside = ("Killed", "fatal signal", _CROWDED)
    killed = done.returncode < 0 or any(said in done.stderr for said in outside)
    return killed or not output.parent.exists()


def _refused(
    source: CxxSource,
    order: _Order,
    command: Sequence[str],
    done: subprocess.CompletedProcess[str],
) -> BuildError:
    if _CROWDED in done.stderr:
        message, hint = f"the C++ compiler could not build {source.name}: {_CROWDED}", _TOO_MANY
    elif _worth_retrying(done, order.library):
        message = f"the C++ compiler was killed twice while building {source.name}"
        hint = "the machine may be short of memory: lower config.compile_threads"
    else:
        message = f"the C++ compiler refused the kernel {source.name}"
        hint = f"the source is {order.source}"
    return BuildError(message, command=command, stderr=done.stderr, hint=hint)


def _load(source: CxxSource, order: _Order, file: Path) -> Loaded:
    with store.loadable(file) as path:
        library = ctypes.CDLL(path)
    if "omp parallel" in source.text:
        _survive_forks()
    try:
        function = library[source.name]
    except AttributeError as error:
        raise BuildError(
            f"the source of {source.name} defines no function of that name",
            command=order.command,
            stderr=str(error),
            hint=f'it needs `extern "C" void {source.name}(...)`; the source is {order.source}',
        ) from error
    function.argtypes = [_CTYPES[kind] for kind in source.args]
    function.restype = None
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    loaded = Loaded(source.name, _of_tensors(function), address, file, order.source)
    if "float" in source.args or len(source.args) > native.MOST:
        return loaded

    def quick(module: Any) -> None:
        loaded.function = module.Function(source.name, address, len(source.args))

    native.when_ready(quick)
    return loaded


@functools.cache
def _survive_forks() -> None:
    """OpenMP's threads are not there in a forked process, and whoever waits for them waits for ever
    (libgomp): there kernels run on the one thread there is. A DataLoader's workers have torch run
    on one thread too, but a kernel for `config.cpp.threads` does not ask torch."""
    try:
        openmp = ctypes.CDLL(_openmp_library())
        alone = openmp.omp_set_max_active_levels
    except (OSError, AttributeError):
        return
    os.register_at_fork(after_in_child=functools.partial(alone, 0))


def _of_tensors(function: Callable[..., None]) -> Callable[..., None]:
    """A function of addresses, called with tensors."""

    def call(*args: Any) -> None:
        function(*(_address(a) if isinstance(a, torch.Tensor) else a for a in args))

    return call


def _address(tensor: torch.Tensor) -> int:
    """As in launch.cpp; a tensor of FakeTensorMode has elements and no memory."""
    found = tensor.data_ptr()
    if not found and tensor.numel():
        raise RuntimeError(
            f"a compiled program was given a {type(tensor).__name__}, which has no memory: "
            "call the function that was compiled, or do so outside of FakeTensorMode"
        )
    return found


# ------------------------------------------------------------------------- the compiler's own facts


@functools.cache
def _compiler(name: str) -> tuple[str | None, str]:
    """Where the compiler is, and what it says of itself. Of one that is gone, what it last said:
    what was built with it needs none to be loaded."""
    found = shutil.which(name)
    last = store.path(store.key("the last compiler", name), ".cxx")
    if found is None:
        known = store.get(last)
        if known is None:
            raise _no_compiler()
        return None, known.decode()
    version = _compiler_version(found)
    if store.get(last) != version.encode():
        store.keep(last, version.encode())
    return found, version


def _no_compiler() -> BuildError:
    name = config.cpp.cxx
    return BuildError(
        f"no C++ compiler: {name!r} is not on the PATH",
        command=(name,),
        stderr="",
        hint="install g++ (Debian, Ubuntu: `apt install g++`) or set config.cpp.cxx",
    )


@functools.cache
def _compiler_version(compiler: str) -> str:
    # Asking takes a process; the answer is kept for as long as the file is the same.
    facts = os.stat(compiler)
    asked = store.key(os.path.realpath(compiler), str(facts.st_mtime_ns), str(facts.st_size))
    kept = store.path(asked, ".cxx")
    known = store.get(kept)
    if known:
        return known.decode()
    asked_for = (compiler, "--version")
    try:
        done = compilers.run(asked_for, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler cannot be started: {error}", command=asked_for,
                         stderr="", hint=_TOO_MANY) from error  # fmt: skip
    if done.returncode != 0:
        raise BuildError(
            f"{compiler} does not answer to --version",
            command=asked_for,
            stderr=done.stderr,
            hint="set config.cpp.cxx to a GNU C++ compiler",
        )
    store.keep(kept, done.stdout.encode())
    return done.stdout


@functools.cache
def _headers() -> str:
    return store.key(*(file.read_bytes() for file in sorted(INCLUDE.glob("*.h"))))


def _definitions(text: str) -> tuple[str, ...]:
    """The macros a source needs, which depend on what it uses."""
    special = ("-DTW_SPECIAL",) if _special_names().search(text) else ()
    to_nan = "f8e4m3fn" in text and _e4m3fn_overflows_to_nan()
    return (*special, "-DTW_E4M3FN_OVERFLOWS_TO_NAN") if to_nan else special


@functools.cache
def _e4m3fn_overflows_to_nan() -> bool:
    return bool(torch.tensor([1e4]).to(torch.float8_e4m3fn).float().isnan().item())


@functools.cache
def _special_names() -> re.Pattern[str]:
    """Matches a source that calls a function of `tw_special.h`."""
    files = (INCLUDE / "tw_special.h", INCLUDE / "tw_polynomials.h")
    text = "".join(file.read_text() for file in files)
    names = set(re.findall(r"^TW_SPECIAL_FN\w* \w+ (\w+)\(", text, re.MULTILINE))
    return re.compile(r"\btw::(" + "|".join(sorted(names)) + r")\b") if names else re.compile("$^")


@functools.cache
def _openmp_library() -> str:
    """The OpenMP runtime torch runs on: two of them in a process mean two thread pools."""
    name = re.compile(r"lib(gomp|iomp5|omp)[-.\w]*\.so")
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        maps = ""
    for line in maps.splitlines():
        file = line.split(maxsplit=5)[-1]
        if name.match(os.path.basename(file)) and os.path.exists(file):
            return file
    bundled = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    return str(bundled[0]) if bundled else "-lgomp"


for _memo in (_compiler, _compiler_version, _headers, _special_names, _openmp_library):
    caches.register(_memo.cache_clear)
