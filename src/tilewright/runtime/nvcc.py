"""Building and loading kernels that nvcc compiles.

A kernel is a source text and its one `extern "C"` function, which launches it. What is missing is
compiled in parallel, each by an nvcc of its own, into an object and from there into a shared
library in the store. The library holds the CUDA runtime and asks for nothing else, so it loads
where there is no nvcc. A source that nvcc refused is refused again without asking it.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tilewright import caches, config, metrics
from tilewright.errors import BuildError
from tilewright.runtime import compilers, store

Kind = Literal["o", "so", "exe"]
Arg = Literal["ptr", "int", "float"]
KINDS: tuple[Kind, ...] = ("o", "so", "exe")
HOW = "install the CUDA toolkit, or set config.cuda.cuda_cxx, CUDACXX or CUDA_HOME to it"
TIMEOUT = 1800.0
# Cards whose newest instructions are in no later card's set: code for them is for them alone.
ALONE = frozenset((90, 100, 101, 103, 110, 120, 121))
_CTYPES: dict[Arg, Any] = {"ptr": ctypes.c_void_p, "int": ctypes.c_int64, "float": ctypes.c_float}


class CUDACompileError(BuildError):
    """nvcc refused a source."""


@dataclass(frozen=True)
class NvccSource:
    """A kernel to build. `made_with` names what its text includes: another CUTLASS makes another
    binary of the same text."""

    text: str
    name: str
    args: tuple[Arg, ...]
    arch: int
    includes: tuple[str, ...] = ()
    made_with: str = ""

    @property
    def key(self) -> str:
        """What its binaries are kept under, whatever their kind. The compiler counts by its version
        and not by its place: what one machine has built another finds."""
        if config.cuda.cutlass_hash_with_compile_cmd:
            whole = command(["kernel.cu"], "kernel.so", "so", self.arch, self.includes)
            return store.key("nvcc", self.text, *whole, self.made_with)
        return store.key(
            "nvcc",
            self.text,
            toolkit(),
            *flags(self.arch),
            self.made_with,
        )


# ---- the compiler


def find() -> str:
    """nvcc, or an empty string."""
    return _find(
        config.cuda.cuda_cxx,
        os.environ.get("CUDACXX"),
        os.environ.get("CUDA_HOME"),
        os.environ.get("PATH", ""),
    )


@functools.cache
def _find(named: str | None, cxx: str | None, home: str | None, path: str) -> str:
    places = (
        named,
        cxx,
        home and os.path.join(home, "bin", "nvcc"),
        shutil.which("nvcc", path=path),
    )
    for place in places:
        if place and os.path.exists(place):
            return place
        if place and os.sep not in place and (found := shutil.which(place, path=path)):
            return found
    return ""


def version() -> str:
    """`13.0`, or an empty string where there is no nvcc."""
    compiler = find()
    return _version(compiler) if compiler else ""


def toolkit() -> str:
    """The version that binaries are of: nvcc's, or where there is none that of another machine's,
    which the options name or torch is built with."""
    named = version() or config.cuda.version or torch.version.cuda or ""
    return ".".join(named.split(".")[:2])


def is_built(key: str) -> bool:
    """Whether a library is there, from here or from another machine."""
    return store.is_good(store.path(key, ".so"))


@functools.cache
def _version(compiler: str) -> str:
    # Asking takes a process; the answer is kept for as long as the file is the same.
    facts = os.stat(compiler)
    asked = store.key(
        "nvcc", os.path.realpath(compiler), str(facts.st_mtime_ns), str(facts.st_size)
    )
    kept = store.path(asked, ".nvcc")
    known = store.get(kept)
    if known is None:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
        found = re.search(r"release (\d+\.\d+)", done.stdout)
        known = found[1].encode() if found else b""
        store.put_atomic(kept, known)
    return known.decode()


def suffixed(arch: int) -> str:
    return f"{arch}a" if arch in ALONE else str(arch)


def flags(arch: int) -> list[str]:
    """What is the same for every source; folders are not among them."""
    options, name = config.cuda, suffixed(arch)
    codes = [f"sm_{name}", f"compute_{name}", *([f"lto_{name}"] if options.enable_cuda_lto else [])]
    found = [
        "-t=0",
        "-DCUTLASS_ENABLE_TENSOR_CORE_MMA=1",
        "-DCUTLASS_ENABLE_SM90_EXTENDED_MMA_SHAPES",
        "-w",
        f"-gencode=arch=compute_{name},code=[{','.join(codes)}]",
        options.compile_opt_level,
        "-std=c++17",
        "--expt-relaxed-constexpr",
        "-DNDEBUG",
    ]
    for host in ("-fPIC", "-fno-strict-aliasing", "-fvisibility=hidden"):
        found += ["-Xcompiler", host]
    found += (
        ["-lineinfo", "-g", "-DCUTLASS_DEBUG_TRACE_LEVEL=1"] if options.enable_debug_info else []
    )
    found += (
        ["--keep", "--ptxas-options=--warn-on-local-memory-usage", "--ptxas-options=-v"]
        if options.enable_ptxas_info
        else []
    )
    found += ["--use_fast_math"] if options.use_fast_math else []
    return found


def command(
    sources: Sequence[str], output: str, kind: str, arch: int, includes: Sequence[str] = ()
) -> list[str]:
    """The whole of it, for one kind of output."""
    if kind not in KINDS:
        raise NotImplementedError(f"nvcc makes {', '.join(KINDS)} here, and no {kind!r}")
    found = [find() or "nvcc", *flags(arch), *(f"-I{folder}" for folder in includes)]
    if kind == "exe":
        found.append("-DGENERATE_STANDALONE_RUNNER=1")
    how = {"o": ["-c"], "so": ["-shared"], "exe": []}[kind]
    return [*found, *how, "-o", output, *sources]


# ---- building


def build(source: NvccSource, kind: Kind = "so", key: str = "") -> Path:
    """The binary, compiled if it is not there. Of several processes one compiles, others wait."""
    if kind not in KINDS:
        raise NotImplementedError(f"nvcc makes {', '.join(KINDS)} here, and no {kind!r}")
    key = key or source.key
    output = store.path(key, f".{kind}")
    if store.is_good(output):
        return output
    _refused_before(key)
    with _alone(key):
        if not store.is_good(output):
            _refused_before(key)
            _make(source, kind, key, output)
    return output


def _make(source: NvccSource, kind: Kind, key: str, output: Path) -> None:
    if not find():
        raise BuildError(
            f"{source.name} is not built, and there is no nvcc",
            command=("nvcc",),
            stderr="",
            hint=HOW,
        )
    text = source_path(key)
    given = text
    if kind == "so":  # linked from the object, which packages hold
        given = store.path(key, ".o")
        if not store.is_good(given):
            _make(source, "o", key, given)
    else:
        told = " ".join(command([str(text)], f"kernel.{kind}", kind, source.arch, source.includes))
        store.put_atomic(text, f"{source.text}\n// {told}\n".encode(), plain=True)
        for listener in listeners:
            listener.append(source.text)
    store.put_atomic(output, lambda draft: _run(source, kind, key, [str(given)], draft))


def _run(source: NvccSource, kind: Kind, key: str, given: Sequence[str], output: Path) -> None:
    # nvcc tells the kind of a file by the end of its name
    final = output.with_name(f"{output.name}.{kind}")
    made = command(given, str(final), kind, source.arch, source.includes)
    metrics.counters["cutlass"]["nvcc_runs"] += kind != "so"
    done = compilers.run(made, timeout=TIMEOUT)
    if done.returncode:
        final.unlink(missing_ok=True)
        said = done.stdout + done.stderr
        if done.returncode > 0 and "Killed" not in said:
            kept = json.dumps({"command": made, "stderr": said, "name": source.name})
            store.put_atomic(store.path(key, ".error"), kept.encode())
        raise _refused(source.name, made, said, key)
    os.replace(final, output)


def _refused(name: str, made: Sequence[str], said: str, key: str) -> CUDACompileError:
    return CUDACompileError(
        f"nvcc refused the kernel {name}",
        command=made,
        stderr=said,
        hint=f"the source is {source_path(key)}",
    )


def _refused_before(key: str) -> None:
    kept = store.get(store.path(key, ".error"))
    if kept is not None:
        facts = json.loads(kept)
        raise _refused(facts["name"], facts["command"], facts["stderr"], key)


def source_path(key: str) -> Path:
    return store.path(key, ".cu")


@contextlib.contextmanager
def _alone(key: str) -> Generator[None]:
    """Hold what other processes would hold to compile the same; it goes with the process."""
    place = store.path(key, ".lock")
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


# ---- loading


@dataclass(frozen=True)
class Loaded:
    """A library and its function, called with addresses and numbers; it returns a status."""

    name: str
    function: Any
    library: Path

    def __call__(self, *args: int | float | None) -> int:
        return self.function(*args)


def load(path: Path, name: str, args: Sequence[Arg]) -> Loaded:
    if path.suffix != ".so":
        raise RuntimeError(f"only shared libraries are loaded, and {path.name} is none")
    with store.loadable(path) as library:
        function = ctypes.CDLL(library)[name]
    function.argtypes = [_CTYPES[kind] for kind in args]
    function.restype = ctypes.c_int
    return Loaded(name, function, path)


def loaded(source: NvccSource, key: str) -> Loaded:
    """The kernel, built if need be."""
    for attempt in (1, 2):
        path = build(source, "so", key)
        try:
            return load(path, source.name, source.args)
        except (OSError, AttributeError) as error:
            path.unlink(missing_ok=True)  # damaged, or of another machine: once is bad luck
            if attempt == 2:
                raise BuildError(
                    f"{source.name} was built but cannot be loaded: {error}",
                    command=("dlopen", str(path)),
                    stderr=str(error),
                ) from error
    raise AssertionError("unreachable")


class _Workshop:
    """Kernels of this process, loaded or under way, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: dict[str, Future[Loaded]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()

    def kernel(self, source: NvccSource, key: str) -> Future[Loaded]:
        with self._lock:
            if self._pid != os.getpid():  # after a fork the threads are gone, and their work too
                self._pool, self._pid, self._kernels = None, os.getpid(), {}
            found = self._kernels.get(key)
            if found is not None and not (found.done() and found.exception() is not None):
                return found
            if self._pool is None:
                most = config.compile_threads or len(os.sched_getaffinity(0))
                self._pool = ThreadPoolExecutor(most, thread_name_prefix="tilewright-nvcc")
            run = contextvars.copy_context().run  # the options of this thread
            self._kernels[key] = self._pool.submit(run, loaded, source, key)
            return self._kernels[key]

    def clear(self) -> None:
        with self._lock:
            self._kernels.clear()
            if self._pool is not None and self._pid == os.getpid():
                self._pool.shutdown(wait=False)
            self._pool = None


_workshop = _Workshop()
listeners: list[list[str]] = []  # each gets the texts that nvcc is given


def submit(source: NvccSource, key: str = "") -> Future[Loaded]:
    """Begin to build and load; as many at once as `config.compile_threads`."""
    return _workshop.kernel(source, key or source.key)


for _clear in (_find.cache_clear, _version.cache_clear, _workshop.clear):
    caches.register(_clear)
