"""Building Triton kernels ahead of their first launch, in processes that see no GPU.

A kernel is a source text, the types of its parameters, and one or more configurations, best first.
`submit` returns at once. What was built is kept in the store under the hash of all that went into
it, so no process builds it again. A configuration that does not fit the card (shared memory,
registers) makes way for the next one.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import itertools
import logging
import math
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tilewright import caches, config, metrics, monitor
from tilewright.errors import BuildError
from tilewright.runtime import store
from tilewright.runtime.cubin import facts

log = logging.getLogger("tilewright.build")

WORKER = Path(__file__).parent / "triton_worker.py"
SPILLED = 64  # bytes of stack per thread that cost less than a smaller configuration would; where
# registers are held back none do (H200: gradient of cross entropy 271 us with 8, 252 us with none)
FLOATS = (("enable_fp_fusion", False),)  # a product and a sum round one after the other
FUSED = (("enable_fp_fusion", True),)
_TIMEOUT = 300.0  # seconds for one kernel; a hanging compiler costs only that kernel


@dataclass(frozen=True)
class TritonConfig:
    """One way to compile a kernel: values of its `tl.constexpr` parameters, and its threads."""

    constants: tuple[tuple[str, Any], ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    maxnreg: int | None = None
    num_ctas: int = 1

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.num_ctas != 1:
            found["num_ctas"] = self.num_ctas
        return found if self.maxnreg is None else {**found, "maxnreg": self.maxnreg}

    def __str__(self) -> str:
        names = ", ".join(f"{name}={value}" for name, value in self.constants)
        return f"{names}; {self.num_warps} warps, {self.num_stages} stages"


class Sample(NamedTuple):
    """A likely buffer. Of one that holds positions, all are below `high`. `meets` is how stores to
    it combine that may meet, where what they leave depends on their order."""

    dtype: Any
    elements: int
    high: int = 0
    meets: str = ""


@dataclass(frozen=True)
class TritonSource:
    """A kernel to build. `params` are (name, Triton type) of what it is launched with, in order;
    `aligned` names those taken for multiples of 16. `options` hold for every configuration.

    Its grid is the product of each extent (Python text, in the host program's names) divided by its
    block (a constant's name, or a number), rounded up, and the grids `beside` it are added. `wide`
    is the same kernel with 64-bit indices, for calls with sizes that need them. `sample` are likely
    values of the parameters: a number, or a `Sample` of a buffer. A `scratched` kernel is called
    with one address more: memory for Triton's own use. `unaligned` takes calls with arguments that
    are no multiples of 16, where the same text would not do. One that `shrinks` may be built with
    smaller blocks than any of its configurations has, if none of them fits.
    """

    text: str
    name: str
    params: tuple[tuple[str, str], ...]
    configs: tuple[TritonConfig, ...]
    capability: int  # 90 for sm_90
    shared_memory: int  # bytes a block may have
    aligned: frozenset[str] = frozenset()
    grid: tuple[tuple[str, str], ...] = ()
    wide: TritonSource | None = None
    sample: tuple[Any, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()  # likely values of what the grid depends on
    device: int = 0  # where it will run; not part of what is built
    scratched: bool = False
    unaligned: TritonSource | None = None
    options: tuple[tuple[str, Any], ...] = FLOATS
    order_of: tuple[str, ...] = ()  # all its parameters, if constants are not the last of them
    shrinks: bool = False
    beside: tuple[tuple[tuple[str, str], ...], ...] = ()

    @property
    def blocks(self) -> frozenset[str]:
        """The constants its grid depends on."""
        return frozenset(name for grid in (self.grid, *self.beside) for _, name in grid)

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(kind for _, kind in self.params)

    def programs(self, chosen: TritonConfig) -> str:
        """The number of programs, as text of the host program."""
        blocks = dict(chosen.constants)

        def product(grid: tuple[tuple[str, str], ...]) -> str:
            sizes = [(extent, int(blocks.get(name, name))) for extent, name in grid]
            parts = [f"(({extent}) + {block - 1}) // {block}" for extent, block in sizes]
            return " * ".join(f"({part})" for part in parts) or "1"

        return " + ".join(product(grid) for grid in (self.grid, *self.beside))

    def order(self, chosen: TritonConfig) -> dict[str, Any]:
        constants = dict(chosen.constants)
        names = self.order_of or tuple(name for name, _ in self.params)
        return {
            "text": self.text,
            "name": self.name,
            "signature": {**dict(self.params), **dict.fromkeys(constants, "constexpr")},
            "constants": constants,
            "attributes": {(k,): [["tt.divisibility", 16]]
                           for k, name in enumerate(names) if name in self.aligned},
            "capability": self.capability,
            "options": {**dict(self.options), **chosen.options()},
        }  # fmt: skip

    def key(self, chosen: TritonConfig) -> str:
        order = self.order(chosen)
        return store.key(*(f"{k}={order[k]!r}" for k in sorted(order)), _compiler(),
                         _helpers() if "tilewright.runtime" in self.text else "")  # fmt: skip


@dataclass(frozen=True)
class Binary:
    """A built kernel: machine code, and what its launcher must know."""

    key: str
    cubin: bytes
    name: str
    shared: int
    num_warps: int
    num_ctas: int
    cooperative: bool
    pdl: bool
    scratch: int  # bytes of global scratch per block
    registers: int
    stack: int
    parameters: tuple[int, ...]


@dataclass(frozen=True)
class Built:
    """The binary of the configuration that was taken."""

    binary: Binary
    config: TritonConfig


def submit(source: TritonSource) -> Future[Built]:
    """Start building (the first configuration that fits) and return at once."""
    return _workshop.kernel(source)


def build(source: TritonSource) -> Built:
    return submit(source).result()


def start_all(source: TritonSource) -> None:
    """Start building every configuration; `compile_all` waits for them."""
    binaries(source)


def binaries(source: TritonSource) -> list[tuple[TritonConfig, Future[Binary]]]:
    """Every configuration, under way."""
    return [(c, _workshop.binary(source, c)) for c in source.configs]


def compile_all(source: TritonSource) -> list[Built]:
    """Every configuration that compiles and fits, in parallel, in order; for measuring them."""
    found: list[Built] = []
    for chosen, wait in binaries(source):
        try:
            binary = wait.result()
        except BuildError:
            continue
        if binary.shared <= source.shared_memory:
            found.append(Built(binary, chosen))
    return found


def prepare() -> None:
    """Start the compiling process, which takes a second, while there is other work to do."""
    _workshop.pool()


# ---- one kernel


class _Workshop:
    """The binaries of this process, built or under way, by key."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._binaries: dict[str, Future[Binary]] = {}
        self._pool: _Pool | None = None

    def pool(self) -> _Pool:
        with self._lock:
            if self._pool is None or not self._pool.alive():
                self._pool = _Pool()
            return self._pool

    def binary(self, source: TritonSource, chosen: TritonConfig) -> Future[Binary]:
        key = source.key(chosen)
        with self._lock:
            found = self._binaries.get(key)
            if found is not None and not (found.done() and found.exception() is not None):
                return found
            future: Future[Binary] = Future()
            self._binaries[key] = future
        kept = _kept(key)
        if kept is not None:
            metrics.kernels_found += 1
            future.set_result(kept)
        else:
            self.pool().compile(key, source.order(chosen), future)
        return future

    def kernel(self, source: TritonSource) -> Future[Built]:
        result: Future[Built] = Future()
        self._attempt(source, list(source.configs), [], result)
        return result

    def _attempt(self, source: TritonSource, left: list[TritonConfig], seen: list[Built],
                 result: Future[Built]) -> None:  # fmt: skip
        """Take the first configuration left if it fits, else go on; `seen` run, but spill."""
        chosen = left.pop(0)

        def done(wait: Future[Binary]) -> None:
            error = wait.exception()
            if error is None:
                binary = wait.result()
                if binary.shared <= source.shared_memory:
                    seen.append(Built(binary, chosen))
                    if binary.stack <= (SPILLED if chosen.maxnreg is None else 0):
                        result.set_result(seen[-1])
                        return
            if not left and not seen and (less := smaller(source, chosen)) is not None:
                if chosen in source.configs:  # not for every half of it
                    metrics.counters["triton"]["kernels built with smaller blocks"] += 1
                    log.debug("%s is built with smaller blocks than planned: %s", source.name,
                              str(error or too_big(source)).splitlines()[0])  # fmt: skip
                left.append(less)
            if left:
                self._attempt(source, left, seen, result)
            elif seen:
                result.set_result(min(seen, key=lambda b: b.binary.stack))
            else:
                result.set_exception(error or too_big(source))

        self.binary(source, chosen).add_done_callback(done)

    def clear(self) -> None:
        with self._lock:
            self._binaries = {k: f for k, f in self._binaries.items() if not f.done()}


def smaller(source: TritonSource, chosen: TritonConfig) -> TritonConfig | None:
    """The configuration with its largest block half as large; None where there is none. The grid
    grows by it; blocks that are not of the grid stay, for a row may have to be whole."""
    names = source.blocks
    sizes = {n: v for n, v in chosen.constants if n in names and type(v) is int and v > 1}
    if not source.shrinks or not sizes:
        return None
    largest = max(sizes, key=lambda n: sizes[n])
    constants = tuple((n, v // 2 if n == largest else v) for n, v in chosen.constants)
    return replace(chosen, constants=constants)


def lesser(source: TritonSource, refused: TritonConfig) -> Iterator[TritonConfig]:
    """What asks for less than a configuration that the card refused: of those listed, then ever
    smaller blocks, then fewer threads."""

    def size(c: TritonConfig) -> int:
        return math.prod(v for _, v in c.constants if type(v) is int and v)

    for c in source.configs:
        if c != refused and c.num_warps <= refused.num_warps and size(c) <= size(refused):
            yield c
    less = refused
    while (found := smaller(source, less)) is not None:
        less = found
        yield less
    while less.num_warps > 1:
        less = replace(less, num_warps=less.num_warps // 2)
        yield less


def too_big(source: TritonSource) -> BuildError:
    return BuildError(
        f"no configuration of {source.name} fits in {source.shared_memory} bytes of shared memory",
        command=("triton",),
        stderr="",
        hint="this is a fault of tilewright: please report it with the program",
    )


def _kept(key: str) -> Binary | None:
    data = store.get(store.path(key, ".cubin"))
    if data is None:
        return None
    try:
        found = pickle.loads(data)
    except Exception:  # another version of this class, a torn disk
        return None
    return found if isinstance(found, Binary) else None


def _keep(path: Path, made: dict[str, Any]) -> Binary:
    known = facts(made["cubin"], made["name"])
    binary = Binary(
        path.stem, made["cubin"], made["name"], made["shared"], made["num_warps"], made["num_ctas"],
        made["cooperative"], made["pdl"], made["global_scratch"] + made["profile_scratch"],
        known.registers, known.stack, known.parameters,
    )  # fmt: skip
    store.keep(path, pickle.dumps(binary))
    return binary


@functools.cache
def _helpers() -> str:
    """What kernels import of ours is part of them."""
    return store.key(*(f.read_bytes() for f in sorted(Path(__file__).parent.glob("tri*.py"))))


@functools.cache
def _compiler() -> str:
    """Which Triton, and what we do about its faults."""
    return store.key(importlib.metadata.version("triton"), WORKER.read_bytes())


# ---- the compiling process


class _Pool:
    """The compiling process, and the kernels it was asked for."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="tilewright-")
        # the order, and where its binary goes by the options of who asked
        self._waiting: dict[int, tuple[Path, dict[str, Any], Future[Binary]]] = {}
        most = config.compile_threads or len(os.sched_getaffinity(0))
        path = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(most)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # an interrupt at the keyboard is ours to handle
        )
        threading.Thread(target=self._listen, name="tilewright-triton", daemon=True).start()
        atexit.register(self.close)

    def alive(self) -> bool:
        return self._pid == os.getpid() and self._process.poll() is None

    def compile(self, key: str, order: dict[str, Any], future: Future[Binary]) -> None:
        metrics.kernels_compiled += 1
        monitor.happened("build", f"the kernel {order['name']}")
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = (store.path(key, ".cubin"), order, future)
            data = pickle.dumps({**order, "number": number, "timeout": _TIMEOUT,
                                 "result": self._result(number)})  # fmt: skip
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(len(data).to_bytes(8, "little") + data)
                self._process.stdin.flush()
            except OSError:
                pass  # it has ended: `_listen` tells everybody who waits
        if self._process.poll() is not None:
            self._give_up()

    def _result(self, number: int) -> str:
        return os.path.join(self._folder.name, f"{number}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, status = map(int, line.split())
            path, order, future = self._waiting.pop(number)
            try:
                future.set_result(_keep(path, self._take(order, number, status)))
            except BaseException as error:
                future.set_exception(error)
        self._give_up()

    def _take(self, order: dict[str, Any], number: int, status: int) -> dict[str, Any]:
        if status != 0:
            signal = os.waitstatus_to_exitcode(status)
            raise _refused(order, f"its compiler ended with {signal}", "")
        with open(self._result(number), "rb") as file:
            made = pickle.load(file)
        os.unlink(self._result(number))
        if "error" in made:
            raise _refused(order, made["error"], made["trace"], made.get("line", 0),
                           made.get("why", ""))  # fmt: skip
        return made

    def _give_up(self) -> None:
        for number in list(self._waiting):
            found = self._waiting.pop(number, None)
            if found is not None:
                found[2].set_exception(_refused(found[1], "the compiling process ended", ""))

    def close(self) -> None:
        if self._pid == os.getpid() and self._process.stdin is not None:
            self._process.stdin.close()


def _refused(order: dict[str, Any], why: str, trace: str, line: int = 0, said: str = ""
             ) -> BuildError:  # fmt: skip
    return BuildError(
        f"Triton did not compile the kernel {order['name']}: {why.splitlines()[0]}",
        command=("triton.compile", f"sm_{order['capability']}", str(order["options"])),
        stderr=trace or why,
        hint="this is a fault of tilewright: please report it with the program",
        line=line,
        why=said,
    )


_workshop = _Workshop()
caches.register(_workshop.clear)
