"""The setting of a user's kernel: the only one, or the fastest measured.

As with Triton's own autotuner the first launch with new values of the kernel's keys tries them all,
on its own arguments; what it writes to is copied first, so trying changes nothing the program
holds. What was measured is remembered, and never measured again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright import metrics
from tilewright.errors import BuildError
from tilewright.graph.user_kernels import literal
from tilewright.runtime import launch, store, triton_build
from tilewright.runtime.triton_build import Built
from tilewright.runtime.user_kernel import Run, UserSource, by_triton, interpreted, refused
from tilewright.tune import records
from tilewright.tune.results import Subject
from tilewright.tune.select import internal

log = logging.getLogger("tilewright.tune")

Grid = tuple[int, int, int]


def submit(source: UserSource) -> None:
    """Start building every setting, and return at once."""
    if source.static is not None:
        triton_build.start_all(source.static)


def load(source: UserSource) -> Run:
    """The kernel, ready to be called: with a grid if it has one setting, else as `Tuned` says."""
    if source.device.type == "cpu":
        metrics.counters["user_kernels"]["interpreted"] += 1
        first = interpreted(source, source.kernel.settings[0])
        return first if len(source.kernel.settings) == 1 else _first(first)
    runs = _static(source) if source.static is not None else None
    if runs is None:
        metrics.counters["user_kernels"]["launched by Triton"] += 1
        runs = [by_triton(source, setting) for setting in source.kernel.settings]
    if len(runs) == 1 and runs[0] is not None:
        return runs[0]
    return Tuned(source, runs)


def _first(run: Run) -> Run:
    return lambda stream, grids, key, *args: run(stream, *grids()[0], *args)


def _static(source: UserSource) -> list[Run | None] | None:
    """A launcher for each setting that compiles; None if ours cannot launch the kernel."""
    static = source.static
    assert static is not None
    found: list[Run | None] = []
    error: BuildError | None = None
    for chosen, wait in triton_build.binaries(static):
        try:
            binary = wait.result()
        except BuildError as why:
            error = error or why
            found.append(None)
            continue
        if binary.scratch:
            return None
        fits = binary.shared <= static.shared_memory
        index = source.device.index or 0
        found.append(launch.load(static, Built(binary, chosen), index) if fits else None)
    if not any(found):
        raise refused(source.kernel, error or triton_build.too_big(static))
    return found


def later(source: UserSource) -> Run:
    """A kernel that is loaded when it is first called."""
    made: list[Run] = []

    def call(*args: Any) -> None:
        if not made:
            made.append(load(source))
        made[0](*args)

    return call


class Tuned:
    """Called with the stream, a function that gives the grid of each setting, the values of the
    kernel's keys, and its arguments."""

    def __init__(self, source: UserSource, runs: Sequence[Run | None]) -> None:
        self.source = source
        self.runs = runs
        self.chosen: dict[tuple[Any, ...], int] = {}

    def __call__(self, stream: int, grids: Callable[[], tuple[Grid, ...]], key: tuple[Any, ...],
                 *args: Any) -> None:  # fmt: skip
        which = self.chosen.get(key)
        if which is None:
            which = self._choose(grids(), key, args)
        run = self.runs[which]
        assert run is not None
        run(stream, *grids()[which], *args)

    def _choose(self, grids: tuple[Grid, ...], key: tuple[Any, ...], args: tuple[Any, ...]) -> int:
        usable = [k for k, run in enumerate(self.runs) if run is not None]
        if len(usable) == 1 or _capturing():  # nothing can be measured inside a recording
            return usable[0]
        named = zip(self.source.names, args, strict=True)
        given = [_copy(a) if name in self.source.writes else a for name, a in named]
        trials = [self._trial(k, grids[k], given) for k in usable]
        found = self.source.kernel
        subject = Subject(self._name(key), found.name, self.source.device)
        verdict = internal(subject, trials)
        if verdict.source == "measured":
            records.share(subject)
        counted = "choices found" if verdict.source == "remembered" else "user kernels measured"
        metrics.counters["tune"][counted] += 1
        log.info("%s: %s", found.name, verdict.winner.description)
        which = next(t.which for t in trials if t.name == verdict.winner.name)
        self.chosen[key] = which
        return which

    def _trial(self, which: int, grid: Grid, given: list[Any]) -> _Setting:
        run = self.runs[which]
        assert run is not None
        return _Setting(which, str(self.source.kernel.settings[which]),
                        lambda stream: run(stream, *grid, *given))  # fmt: skip

    def _name(self, key: tuple[Any, ...]) -> str:
        """Of its records; empty for a kernel that has no name beyond this process."""
        found = self.source.kernel
        if not found.text:
            return ""
        settings = repr([([(n, literal(v)) for n, v in s.constants], s.options)
                         for s in found.settings])  # fmt: skip
        built = "" if self.source.static is None else repr(self.source.static.params)
        known = repr([(n, literal(v)) for n, v in self.source.constants])
        return store.key("user kernel", found.text, settings, built, known, repr(key))


@dataclass(frozen=True)
class _Setting:
    """A setting as a trial: built already, and as right as its author made it."""

    which: int
    description: str
    launch: Callable[[int], None]
    provider: str = "USER"
    is_library: bool = False
    compiles: bool = True
    estimate: float = 0.0

    @property
    def name(self) -> str:
        return f"setting_{self.which}"

    @property
    def key(self) -> str:
        return f"{self.which}: {self.description}"

    def start(self) -> None: ...

    def finish(self) -> None: ...
    def wait(self, seconds: float) -> bool:
        return True

    def run(self, stream: int, which: int) -> None:
        self.launch(stream)

    def check(self) -> str:
        return ""


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(
        value.size(), value.stride(), dtype=value.dtype, device=value.device
    ).copy_(value)
