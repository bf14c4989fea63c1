"""Decide what an outcome means: a failure counts only where the baseline does better."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.sweep.baseline import Baseline
from tests.sweep.cases import Case, Group
from tests.sweep.execute import BASELINE, Outcome
from tests.sweep.pool import Job, Pool

# Verdicts beside the outcome's own status.
EXCUSED = "baseline fails too"
FAILED = "failed"


@dataclass(frozen=True)
class Verdict:
    """``case`` is None when making the samples of the group failed."""

    job: Job
    case: Case | None
    outcome: Outcome
    baseline: Outcome | None = None

    @property
    def group(self) -> Group:
        return self.job.group

    @property
    def backend(self) -> str:
        return self.job.backend

    @property
    def name(self) -> str:
        if not self.outcome.failed:
            return self.outcome.status
        if self.baseline is not None and self.baseline.severity >= self.outcome.severity:
            return EXCUSED
        return FAILED


def judge(pool: Pool, todo: deque[Job], baseline: Baseline) -> Iterator[Verdict]:
    """Run jobs, and the baseline for the cases that fail; yields one verdict per case."""
    pending: dict[Case, list[Verdict]] = {}
    for result in pool.run(todo):
        job, case = result.job, result.case
        if case is None:
            yield Verdict(job, None, result.outcome)
            continue
        if job.backend == BASELINE:
            baseline.put(case, result.outcome)
            if case in pending:
                for verdict in pending.pop(case):
                    yield replace(verdict, baseline=result.outcome)
                continue
        verdict = Verdict(job, case, result.outcome)
        if not result.outcome.failed or job.backend == BASELINE:
            yield verdict
        elif (known := baseline.get(case)) is not None:
            yield replace(verdict, baseline=known)
        elif case in pending:
            pending[case].append(verdict)
        else:
            pending[case] = [verdict]
            todo.appendleft(Job(job.group, BASELINE, "listed", samples=(case.sample,)))
    for verdicts in pending.values():
        yield from verdicts
