"""Honest timing: values first, then interleaved rounds, medians with their spread.

Backends take turns within every round (A B C, B C A, ...), so a slow minute of the machine
falls on all of them, and only ratios inside one run are compared.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import datetime
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewright.config

EAGER = "eager"
REFERENCE = "inductor"

# Wider than assert_close's defaults: fused code keeps float32 where eager rounds in between,
# and sums in another order. A wrong index or operator is off by far more.
TOLERANCE = {
    torch.bfloat16: (1.6e-2, 4e-3),
    torch.float16: (2e-3, 1e-3),
    torch.float32: (1e-3, 1e-4),
}
# A row may take this long; a loaded machine gets fewer rounds instead of an endless run.
ROW_SECONDS = 20.0
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median of the rounds and the quartiles around it."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        return (self.high - self.low) / 2 / self.median


@dataclass
class Result:
    """What one backend did on one program or model."""

    timing: Timing | None = None
    compile_seconds: float | None = None
    error: str | None = None
    extra: dict[str, float] = field(default_factory=dict)


def machine() -> dict[str, Any]:
    """What a figure depends on: machine, versions, date, command and the load of the machine."""
    versions = {name: version_of(name) for name in ("torch", "triton", "tilewright")}
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        **versions,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": "python -m bench " + " ".join(sys.argv[1:]),
        "load": round(os.getloadavg()[0], 2),
    }


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def keep_freed_memory() -> bool:
    """Have glibc reuse freed blocks instead of returning them to the system; False without glibc.

    By default a block above a moving threshold is mapped and unmapped at every call, and page
    faults, which come and go with the history of the process, drown what is measured
    (cross entropy of 1024x8000 with gradients: spread 80 % with the default, 2 cores, torch 2.13).
    """
    m_trim_threshold, m_mmap_max = -1, -4
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(m_mmap_max, 0)) and bool(mallopt(m_trim_threshold, -1))


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def interleave(
    calls: dict[str, Callable[[], Any]], rounds: int, sample_seconds: float
) -> dict[str, Timing]:
    """Time every call in turns; one sample repeats the call for about `sample_seconds`."""
    names = list(calls)
    repeats = {name: repeats_for(calls[name], sample_seconds) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.perf_counter() + ROW_SECONDS
    for round_ in range(rounds if names else 0):
        if round_ >= FEWEST_ROUNDS and time.perf_counter() > deadline:
            break
        shift = round_ % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(per_call(calls[name], repeats[name]))
    return {name: summarise(taken) for name, taken in samples.items()}


def repeats_for(call: Callable[[], Any], sample_seconds: float) -> int:
    """How often to repeat a call in one sample; calling it here also warms it up."""
    call()
    once = min(per_call(call, 1) for _ in range(2))
    return max(1, min(1000, round(sample_seconds / max(once, 1e-7))))


def per_call(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def summarise(samples: Sequence[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, low, high, len(samples))


def compile_with(
    fn: Callable[..., Any], backend: str, mode: str | None = None
) -> Callable[..., Any]:
    """`fn` under a backend; every backend gets a code object, so a dynamo cache, of its own."""
    if backend == EAGER:
        return fn
    code = fn.__code__.replace(co_name=f"{fn.__name__}_{backend}".replace("<lambda>", "fn"))
    own = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    return torch.compile(own, backend=backend, mode=mode)


def clone(value: Any) -> Any:
    """A deep copy of tensors in nested lists and tuples that keeps `requires_grad`."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, list):
        return [clone(v) for v in value]
    if isinstance(value, tuple):
        return tuple(clone(v) for v in value)
    return copy.deepcopy(value)


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in leaves(v)]
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in leaves(v)]
    return []


def difference(expected: Any, actual: Any) -> str | None:
    """None when values agree, else one line saying where they do not."""
    want, got = leaves(expected), leaves(actual)
    if len(want) != len(got):
        return f"{len(got)} tensors instead of {len(want)}"
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        rtol, atol = TOLERANCE.get(a.dtype, (0.0, 0.0))
        # Gradients of sums over thousands of rows carry rounding in proportion to their size.
        scale = float(a.detach().abs().max()) if a.is_floating_point() and a.numel() else 1.0
        atol *= max(1.0, scale) if math.isfinite(scale) else 1.0
        try:
            torch.testing.assert_close(b, a, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            if not _is_rounding(a, b, rtol, atol):
                return f"tensor {i}: " + " ".join(str(error).split())[:160]
    return None


def _is_rounding(a: Tensor, b: Tensor, rtol: float, atol: float) -> bool:
    """Whether so few of many sixteen-bit numbers are a little further off as are rounded the other
    way on the way there (gradients of a group norm, H200: 1624 of 21 million; eager's own differ
    from those of doubles in 1822, ours in 1296)."""
    if a.shape != b.shape or a.dtype.itemsize != 2 or not a.is_floating_point():
        return False
    off = ~torch.isclose(b, a, rtol, atol, equal_nan=True)
    far = ~torch.isclose(b, a, 4 * rtol, 4 * atol, equal_nan=True)
    return not bool(far.any()) and int(off.sum()) <= a.numel() / 5000


CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TILEWRIGHT_CACHE_DIR", "TRITON_CACHE_DIR")


def run_all(commands: Iterable[Sequence[str]], seconds: float, **env: str) -> None:
    """Commands at once, each in a process; those that take longer are ended."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen(c, env={**os.environ, **env}, **quiet) for c in commands]
    end = time.perf_counter() + seconds
    for process in started:
        try:
            process.wait(max(0.0, end - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def empty_caches() -> Generator[None, None, None]:
    """Every compiler's caches in one new directory, for this process and those it starts."""
    before = {name: os.environ.get(name) for name in CACHE_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as folder:
        for name in CACHE_VARIABLES:
            os.environ[name] = str(Path(folder) / name.split("_")[0].lower())
        try:
            # Options were read from the environment at import; this process needs the patch.
            with tilewright.config.patch(cache_dir=os.environ["TILEWRIGHT_CACHE_DIR"]):
                yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
