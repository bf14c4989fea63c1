"""What a user sees of tuning, if asked; and the log of every decision. What a terminal shows
unasked is `progress.py`.

`config.autotune_show`, or `config.debug` of 1 and more, shows progress while measuring and a table
of the choices afterwards, on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from tilewright import config
from tilewright.tune import progress, records
from tilewright.tune.choices import ChoiceCaller
from tilewright.tune.results import Subject, Verdict

if TYPE_CHECKING:  # rich takes 50 ms to import, and most runs show nothing
    from rich.console import Console
    from rich.progress import Progress, TaskID


class Display(Protocol):
    def started(self, total: int) -> None: ...
    def tried(self, choice: ChoiceCaller) -> None: ...
    def stopped(self) -> None: ...
    def decided(self, verdict: Verdict, choices: Sequence[ChoiceCaller]) -> None: ...


def of(subject: Subject) -> Display:
    return _Shown(subject) if config.autotune_show or config.debug >= 1 else _Quiet(subject)


class _Quiet:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def started(self, total: int) -> None:
        progress.started(total)

    def tried(self, choice: ChoiceCaller) -> None:
        progress.tried(self._subject.title)

    def stopped(self) -> None: ...

    def decided(self, verdict: Verdict, choices: Sequence[ChoiceCaller]) -> None:
        progress.decided(verdict, choices)


class _Shown:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._bar: tuple[Progress, TaskID] | None = None

    def started(self, total: int) -> None:
        from rich.progress import Progress

        bar = Progress(console=_console(), transient=True)
        self._bar = bar, bar.add_task(self._subject.title, total=total)
        bar.start()

    def tried(self, choice: ChoiceCaller) -> None:
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, advance=1, description=f"{self._subject.title}: {choice.name}")

    def stopped(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def decided(self, verdict: Verdict, choices: Sequence[ChoiceCaller]) -> None:
        progress.decided(verdict, choices)
        if config.max_autotune_report_choices_stats:
            _print_table(self._subject, verdict, choices)


def _console() -> Console:
    from rich.console import Console

    # a file or a pipe has no width of its own; the table's columns should not be cut there
    return Console(file=sys.stderr, width=None if sys.stderr.isatty() else 160, highlight=False)


def _print_table(subject: Subject, verdict: Verdict, choices: Sequence[ChoiceCaller]) -> None:
    from rich.table import Table

    title = f"{subject.title}: {verdict.winner.name} ({verdict.source}, {verdict.seconds:.2f} s)"
    table = Table(title=title, title_justify="left", caption=verdict.why or None,
                  caption_justify="left")  # fmt: skip
    for column in ("choice", "us", "of best", "spread", "samples", "estimate", "description"):
        table.add_column(column, justify="left" if column in ("choice", "description") else "right")
    rows = list(_rows(verdict, choices))
    most = config.autotune_num_choices_displayed
    for row in rows[:most]:
        table.add_row(*row)
    out = _console()
    out.print(table)
    if most is not None and len(rows) > most:
        out.print(f"{len(rows) - most} more; config.autotune_num_choices_displayed = {most}")
    for reason, names in _by_reason(verdict.rejected).items():
        first, others = names[0], len(names) - 1
        out.print(f"rejected {first}{f' and {others} more' if others else ''}: {reason}",
                  markup=False)  # fmt: skip


def _rows(verdict: Verdict, choices: Sequence[ChoiceCaller]) -> Iterator[tuple[str, ...]]:
    alive = [c for c in choices if c.name in verdict.times and not c.reason]
    alive.sort(key=lambda c: c.time.median_us)
    for choice in alive:
        time, best = choice.time, alive[0].time.median_us
        mark = " *" if choice.trial is verdict.winner else ""
        part = f"{time.median_us / best:.3f}" if best else ""
        spread = f"{100 * time.spread / time.median_us:.1f} %" if time.median_us else ""
        yield (choice.name + mark, f"{time.median_us:.2f}", part, spread, str(time.samples),
               f"{choice.trial.estimate:.2f}", choice.description)  # fmt: skip


def _by_reason(rejected: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in rejected.items():
        found.setdefault(reason, []).append(name)
    return found


def logged(subject: Subject, verdict: Verdict) -> None:
    """The decision, in the log."""
    times = {name: (round(t.median_us, 4), round(t.spread, 4), t.samples)
             for name, t in verdict.times.items()}  # fmt: skip
    records.write_log({
        "subject": subject.title, "key": subject.key, "facts": subject.facts,
        "environment": records.environment(subject.device), "winner": verdict.winner.name,
        "description": verdict.winner.description, "source": verdict.source,
        "complete": verdict.complete, "why": verdict.why, "seconds": round(verdict.seconds, 4),
        "times": times, "rejected": verdict.rejected,
    })  # fmt: skip


def refused(subject: Subject, reasons: Mapping[str, str]) -> None:
    """That nothing could be chosen, in the log."""
    records.write_log({"subject": subject.title, "key": subject.key, "winner": None,
                       "rejected": reasons})  # fmt: skip
