"""What a terminal shows of tuning unasked (`config.autotune_progress`): a bar with the time left
once a graph's tuning has lasted two seconds, and a line when it ends."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from tilewright import config
from tilewright.tune.choices import ChoiceCaller
from tilewright.tune.results import Verdict

if TYPE_CHECKING:  # rich takes 50 ms to import, and most runs show nothing
    from rich.progress import Progress, TaskID

AFTER = 2.0  # seconds: what is over sooner needs no bar


class _Tuned:
    """The products of one graph, so far."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._bar: tuple[Progress, TaskID] | None = None
        self.expected = self._decided = self._measured = self._tried = self._rejected = 0
        self._here = self._offered = 0  # candidates of the product at hand
        self._library = self._winners = 0.0  # microseconds

    def started(self, offered: int) -> None:
        self._here, self._offered = 0, offered

    def tried(self, title: str) -> None:
        self._here += 1
        if self._bar is None and time.perf_counter() - self._began >= AFTER:
            self._bar = _bar(self._began)
        if self._bar is not None:
            part = min(self._here / max(self._offered, 1), 1.0)
            expected = max(self.expected, self._decided + 1)
            progress, task = self._bar
            progress.update(task, total=expected, completed=self._decided + part,
                            description=f"tuning {self._decided + 1} of {expected}: {title}"
                            )  # fmt: skip

    def decided(self, verdict: Verdict, choices: Sequence[ChoiceCaller]) -> None:
        self._decided += 1
        if verdict.source != "measured":
            return
        self._measured += 1
        self._tried += sum(bool(c.samples) for c in choices)
        self._rejected += sum(bool(c.reason) and c.lasting for c in choices)
        libraries = [c.time.median_us for c in choices if c.trial.is_library and c.time.samples]
        winner = verdict.times.get(verdict.winner.name)
        if libraries and winner is not None:
            self._library += min(libraries)
            self._winners += winner.median_us

    def ended(self) -> str:
        """The line, or nothing where nothing was measured."""
        if self._bar is not None:
            self._bar[0].stop()
        if not self._measured:
            return ""
        products = f"{self._measured} product{'' if self._measured == 1 else 's'}"
        gain = self._library / self._winners if self._winners else 0.0
        return (
            f"tilewright: tuned {products} in {time.perf_counter() - self._began:.1f} s: "
            f"{self._tried} candidates timed, {self._rejected} rejected"
            + (f"; {gain:.2f} times as fast as the library" if gain else "")
        )


_tuned: _Tuned | None = None


@contextlib.contextmanager
def shown(expected: int) -> Generator[None]:
    """So many products are chosen for inside."""
    global _tuned
    wanted = config.autotune_progress and sys.stderr is not None and sys.stderr.isatty()
    if not wanted or _tuned is not None:
        yield
        return
    _tuned = _Tuned()
    _tuned.expected = expected
    line = ""
    try:
        yield
    finally:
        line, _tuned = _tuned.ended(), None
    if line:
        print(line, file=sys.stderr)


def started(offered: int) -> None:
    if _tuned is not None:
        _tuned.started(offered)


def tried(title: str) -> None:
    if _tuned is not None:
        _tuned.tried(title)


def decided(verdict: Verdict, choices: Sequence[ChoiceCaller]) -> None:
    if _tuned is not None:
        _tuned.decided(verdict, choices)


def time_left(elapsed: float, done: float) -> str:
    """By what was done so far: more and more while nothing is, as when a kernel is long in the
    making (rich goes by the last steps, and said three seconds for half a minute)."""
    return str(timedelta(seconds=round(elapsed * (1 - done) / done))) if done > 0 else "-:--:--"


def _bar(began: float) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Left(ProgressColumn):
        def render(self, task: Task) -> Text:
            done = task.completed / task.total if task.total else 0.0
            return Text(f"{100 * done:3.0f}% {time_left(time.perf_counter() - began, done)}")

    columns = TextColumn("{task.description}"), BarColumn(), Left()
    progress = Progress(*columns, console=Console(file=sys.stderr), transient=True)
    progress.start()
    return progress, progress.add_task("tuning")
