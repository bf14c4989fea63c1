"""Command line of the sweep: ``python -m tests.sweep --help``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

# Read by every module of the sweep and by its workers, so it is set before they are imported.
if "--device" in sys.argv[:-1]:
    os.environ["TILEWRIGHT_SWEEP_DEVICE"] = sys.argv[sys.argv.index("--device") + 1]
    os.environ.setdefault("TILEWRIGHT_COMPILE_THREADS", "2")

from tests.sweep.baseline import Baseline, default_path
from tests.sweep.cases import DIRECTIONS, DTYPES, MODES, Case, Group, groups, in_shard
from tests.sweep.differences import PAGE, by_case, load, render
from tests.sweep.execute import Outcome
from tests.sweep.judge import Verdict, judge
from tests.sweep.pool import Job, Pool
from tests.sweep.report import FAILED, Report, progress, reproduce

_RESULTS = "results.jsonl"
_SAMPLES = "these of each group, from 0; a group with fewer runs its last"
_BUDGET = "begin nothing after this long: --resume does the rest"
_OUT = "for results.jsonl, a line per case as it ends, and summary.txt"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    what = made.add_argument_group("what to run")
    what.add_argument("--all", action="store_true", help="every group the other options leave")
    what.add_argument("--case", action="append", default=[], metavar="OP/DTYPE/MODE/DIRECTION/N")
    what.add_argument("--op", default="", metavar="REGEX", help="operators whose name matches")
    what.add_argument("--dtype", action="append", choices=list(DTYPES))
    what.add_argument("--static", action="store_true")
    what.add_argument("--dynamic", action="store_true")
    what.add_argument("--forward", action="store_true")
    what.add_argument("--backward", action="store_true")
    what.add_argument("--shard", default="1/1", metavar="I/N")
    what.add_argument("--max-samples", type=int, metavar="N", help="per group, evenly spread")
    what.add_argument("--samples", type=_numbers, default=(), metavar="K,...", help=_SAMPLES)
    how = made.add_argument_group("how")
    how.add_argument("--backend", default="tilewright")
    how.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    how.add_argument("--jobs", type=int, default=2, help="worker processes")
    how.add_argument("--threads", type=int, default=1, help="threads of each worker")
    how.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="per case")
    how.add_argument("--budget", type=float, metavar="SECONDS", help=_BUDGET)
    how.add_argument("--out", type=Path, metavar="FOLDER", help=_OUT)
    how.add_argument("--resume", action="store_true", help="go on with the run in --out")
    how.add_argument("--cache", type=Path, default=default_path(), help="baseline outcomes")
    made.add_argument("--write-docs", action="store_true", help="write docs/differences.md")
    return made


def main(arguments: list[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(arguments)
    differences = load()
    if options.write_docs:
        PAGE.write_text(render(differences))
        return 0
    if not (options.all or options.op or options.case):
        command.error("say what to run: --all, --op REGEX or --case CASE")
    if options.resume and not options.out:
        command.error("--resume needs --out FOLDER")
    report = Report(by_case(differences))
    done = _resume(options, report)
    todo = deque(_jobs(options, done))
    pool = Pool(options.jobs, timeout=options.timeout, threads=options.threads)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pool)
        file = None
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            mode = "a" if options.resume else "w"
            file = stack.enter_context((options.out / _RESULTS).open(mode))
        _sweep(pool, options, todo, report, file)
    summary = report.text()
    print(summary)
    if options.out:
        (options.out / "summary.txt").write_text(summary + "\n")
    return report.exit_status


def _sweep(pool: Pool, options: Any, todo: deque[Job], report: Report, file: TextIO | None) -> None:
    started = shown = time.monotonic()
    every = 2.0 if sys.stderr.isatty() else 30.0
    verdicts = judge(pool, todo, Baseline(options.cache))
    for count, verdict in enumerate(verdicts, start=1):
        name = report.add(verdict)
        if file is not None:
            file.write(json.dumps(_record(verdict, name)) + "\n")
            file.flush()
        if name == FAILED:
            outcome = verdict.outcome
            print(f"{outcome.status} ({outcome.stage}) {verdict.case}: {outcome.text}")
            print(f"    {reproduce(verdict)}", flush=True)
        now = time.monotonic()
        if todo and options.budget and now - started > options.budget:
            report.left += len(todo)
            todo.clear()
        if now - shown > every:
            progress(count, len(todo), report, started, now)
            shown = now


def _jobs(options: Any, done: dict[Group, set[int]]) -> list[Job]:
    if options.case:
        cases = [Case.parse(text) for text in options.case]
        return [Job(c.group, options.backend, "listed", samples=(c.sample,)) for c in cases]
    index, count = map(int, options.shard.split("/"))
    found = groups(
        pattern=options.op,
        dtypes=tuple(options.dtype or DTYPES),
        modes=_flags(options, MODES),
        wanted=_flags(options, DIRECTIONS),
    )
    wanted = [g for g in found if in_shard(g, index, count)]
    if options.samples:
        jobs = [Job(g, options.backend, "clamped", samples=options.samples) for g in wanted]
    else:
        jobs = [Job(g, options.backend, limit=options.max_samples) for g in wanted]
    jobs = [replace(job, skip=frozenset(done[job.group])) for job in jobs]
    # Shuffled, and the same way every time: what a budget leaves undone is no particular family.
    return sorted(jobs, key=lambda job: job.group.fingerprint)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _flags(options: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Both of a pair when neither flag is given."""
    return tuple(n for n in names if getattr(options, n)) or names


def _record(verdict: Verdict, name: str) -> dict[str, Any]:
    baseline = verdict.baseline.as_dict() if verdict.baseline else None
    return {
        "case": str(verdict.case or verdict.group),
        "backend": verdict.backend,
        "verdict": name,
        **verdict.outcome.as_dict(),
        "baseline": baseline,
    }


def _resume(options: Any, report: Report) -> dict[Group, set[int]]:
    """Count the results of the interrupted run and say which samples they were."""
    done: dict[Group, set[int]] = defaultdict(set)
    if not (options.resume and (options.out / _RESULTS).exists()):
        return done
    for line in (options.out / _RESULTS).read_text().splitlines():
        record = json.loads(line)
        if record["case"].count("/") != 4:
            continue
        case = Case.parse(record["case"])
        fields = {k: record[k] for k in Outcome.__dataclass_fields__}
        known = record["baseline"]
        baseline = Outcome(**known) if known else None
        job = Job(case.group, record["backend"], "listed", samples=(case.sample,))
        report.add(Verdict(job, case, Outcome(**fields), baseline))
        done[case.group].add(case.sample)
    return done


if __name__ == "__main__":
    sys.exit(main())
