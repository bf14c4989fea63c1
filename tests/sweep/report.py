"""Counts and groups the verdicts of a run, and prints them."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.sweep.cases import Case
from tests.sweep.judge import FAILED, Verdict

KNOWN = "known difference"
STALE = "listed as a difference, but passes"


@dataclass
class Report:
    """``known`` are the listed differences: failures among them are expected."""

    known: dict[Case, str]
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    failures: list[Verdict] = field(default_factory=list)
    stale: list[Case] = field(default_factory=list)
    left: int = 0  # groups that a time budget left undone
    by_dtype: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, verdict: Verdict) -> str:
        name = verdict.name
        listed = verdict.case is not None and verdict.case in self.known
        if listed and name == FAILED:
            name = KNOWN
        elif listed and verdict.case is not None:
            name = STALE
            self.stale.append(verdict.case)
        self.counts[name] += 1
        self.by_dtype[verdict.group.dtype][name] += 1
        self.seconds += verdict.outcome.seconds
        if name == FAILED:
            self.failures.append(verdict)
        return name

    def text(self) -> str:
        total = sum(self.counts.values())
        lines = [f"{total} cases, {self.seconds:.0f} s of work"]
        if self.left:
            lines.append(f"out of time: {self.left} groups were not run; --resume runs them")
        lines += [f"  {count:7d}  {name}" for name, count in self.counts.most_common()]
        lines += self._table()
        lines += self._groups(self.failures)
        lines += [f"remove it from differences.toml, it passes: {case}" for case in self.stale]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """How the cases of each dtype ended."""
        names = [name for name, _ in self.counts.most_common()]
        if len(self.by_dtype) < 2:
            return []
        lines = ["", f"| dtype | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for dtype, counts in sorted(self.by_dtype.items()):
            lines.append(f"| {dtype} | {' | '.join(str(counts[n]) for n in names)} |")
        return lines

    def _groups(self, verdicts: list[Verdict]) -> list[str]:
        if not verdicts:
            return []
        by_reason: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
        for verdict in verdicts:
            outcome = verdict.outcome
            reason = f"{outcome.status} ({outcome.stage}): {generalise(outcome.text)}"
            by_reason[verdict.group.op, reason].append(verdict)
        operators = len({v.group.op for v in verdicts})
        lines = ["", f"failures: {len(verdicts)} cases of {operators} operators"]
        for (op, reason), found in sorted(by_reason.items(), key=lambda item: -len(item[1])):
            lines.append(f"  {len(found):5d}  {op}: {reason}")
            lines.append(f"         {reproduce(found[0])}")
        return lines

    @property
    def exit_status(self) -> int:
        return int(bool(self.failures or self.stale))


def generalise(text: str) -> str:
    """A message without its numbers, so that the same failure counts once."""
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)[:180]


def reproduce(verdict: Verdict) -> str:
    target = f"--case '{verdict.case}'" if verdict.case else f"--op '^{verdict.group.op}$' --all"
    return f"python -m tests.sweep --backend {verdict.backend} {target}"


def progress(done: int, groups: int, report: Report, started: float, now: float) -> None:
    bad = report.counts[FAILED]
    line = f"{done} cases, about {groups} groups left, {bad} failed, {now - started:.0f} s"
    if sys.stderr.isatty():
        print(f"\r{line}   ", end="", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)
