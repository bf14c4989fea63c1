"""`python -m bench.real`: whole models under eager, the reference and tilewright, in turn.

Every model runs in a process of its own; records are appended to a file as they come, and tasks
that are in it already are not run again, so that many models can be split over many runs. Last
comes whether all of the file is what is asked of real models, and which rows are not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch

from bench.measure import CACHE_VARIABLES
from bench.real import side_by_side, tables
from bench.real.child import Task
from bench.real.side_by_side import Running
from bench.real.verdict import verdict
from bench.real.zoo import SIZES, Model, zoo

WORKS = ("inference", "training")
MODES = ("default", "max-autotune", "reduce-overhead", "max-autotune-no-cudagraphs")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="[MODEL]...")
@click.option("--field", "fields", multiple=True, help="Only models of this field.")
@click.option("--source", "sources", multiple=True, help="Only models of this library.")
@click.option("--work", "works", multiple=True, type=click.Choice(WORKS), help="Default: both.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES), default=("default",))
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--size", type=click.Choice(SIZES), help="Default: full on a card, small elsewhere.")
@click.option("--rounds", default=15, show_default=True, help="Calls of each backend.")
@click.option("--row-seconds", default=20.0, show_default=True, help="For the rounds of a model.")
@click.option("--limit", default=420.0, show_default=True, help="Seconds that a model may take.")
@click.option("--budget", default=1e9, help="Seconds for all; what is left is for the next run.")
@click.option("--threads", type=int, help="Of each process; default: as many as there are cores.")
@click.option(
    "--clock",
    type=click.Choice(["wall", "processor"]),
    default="wall",
    help="processor: on a machine that others use too, with one thread.",
)
@click.option("--allocator", type=click.Choice(["reuse", "default"]), default="reuse")
@click.option("--jobs", default=1, show_default=True,
              help="Models at a time; all others are stopped while one is timed.")  # fmt: skip
@click.option("--shared-caches", is_flag=True, help="Models find what others compiled.")
@click.option(
    "--out",
    default=Path("real.jsonl"),
    type=click.Path(path_type=Path),
    show_default=True,
    help="Records are appended here; those in it are not run again.",
)
@click.option("--again", is_flag=True, help="Run what is in the file again.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the tables here.")
@click.option("--note", default="", help="A sentence for the tables: what else the machine did.")
@click.option("--list", "listing", is_flag=True, help="Only name the models.")
def main(**given: Any) -> None:
    """Measure whole models side by side; exit 1 if any is wrong, fails, or is not silent. The last
    lines say of all that the file has whether it is what is asked of real models."""
    options = Options(**given)
    chosen = _chosen(options.names, options.fields, options.sources)
    if options.listing:
        for model in chosen:
            click.echo(f"{model.name:30} {model.field:20} {model.source}")
        return
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of the processes that are started
    tasks = _tasks(options, chosen)
    done = set[Any]() if options.again else {tables.key(r) for r in tables.read(options.out)}
    left = _run([t for t in tasks if t.key not in done], options)
    wanted = {t.key for t in tasks}
    records = [r for r in tables.read(options.out) if tables.key(r) in wanted]
    if options.markdown:
        options.markdown.write_text(tables.markdown(records, options.note))
    wrong = tables.failures(records)
    click.echo(f"{len(records)} of {len(tasks)} measured, {left} left for the next run, "
               f"{len(wrong)} failures")  # fmt: skip
    for line in wrong:
        click.echo(f"failed: {line}")
    alike = [r for r in tables.read(options.out) if r["size"] == _size(options)]
    for line in verdict([r for r in alike if r["device"] == options.device]):
        click.echo(line)
    sys.exit(1 if wrong else 0)


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    names: tuple[str, ...]
    fields: tuple[str, ...]
    sources: tuple[str, ...]
    works: tuple[str, ...]
    modes: tuple[str, ...]
    device: str
    size: str | None
    rounds: int
    row_seconds: float
    limit: float
    budget: float
    threads: int | None
    clock: str
    allocator: str
    jobs: int
    shared_caches: bool
    out: Path
    again: bool
    markdown: Path | None
    note: str
    listing: bool


def _tasks(options: Options, models: list[Model]) -> list[Task]:
    return [Task(m.name, work, mode, options.device, _size(options), options.rounds,
                 options.row_seconds, options.allocator, options.clock)
            for mode in options.modes for m in models for work in options.works or WORKS
            if work == "inference" or m.trains]  # fmt: skip


def _size(options: Options) -> str:
    return options.size or ("small" if options.device == "cpu" else "full")


def _chosen(names: tuple[str, ...], fields: tuple[str, ...], sources: tuple[str, ...]
            ) -> list[Model]:  # fmt: skip
    models = zoo()
    unknown = [n for n in names if n not in models]
    if unknown:
        raise click.UsageError(f"no such model: {', '.join(unknown)} (--list names them)")
    found = [models[n] for n in names] if names else list(models.values())
    found = [m for m in found if (not fields or m.field in fields)
             and (not sources or m.source in sources)]  # fmt: skip
    if not found:
        raise click.UsageError("no model has that field and source (--list names them)")
    return found


def _run(tasks: list[Task], options: Options) -> int:
    """Run tasks until the time is over; how many are left."""
    end = time.perf_counter() + options.budget
    if options.budget <= 0:
        return len(tasks)
    left = len(tasks)
    with tempfile.TemporaryDirectory(prefix="bench-real-") as folder:

        def start(task: Task) -> Running[Task]:
            return _started(task, Path(folder), min(time.perf_counter() + options.limit, end),
                            options.shared_caches)  # fmt: skip

        for ended in side_by_side.run(tasks, options.jobs, start):
            if ended.status and time.perf_counter() >= end:
                return left
            record = _record(ended)
            left -= 1
            tables.append(options.out, record)
            click.echo(tables.one_line(record))
    return left


def _started(task: Task, folder: Path, end: float, shared: bool) -> Running[Task]:
    own = Path(tempfile.mkdtemp(dir=folder))
    caches = {name: str((folder if shared else own) / name) for name in CACHE_VARIABLES}
    command = [sys.executable, "-m", "bench.real.child", json.dumps(asdict(task)), str(own)]
    heard = (own / "said").open("w+b")
    process = subprocess.Popen(command, stdout=heard, stderr=subprocess.STDOUT,
                               env={**os.environ, **caches}, start_new_session=True)  # fmt: skip
    return Running(task, own, process, heard, end)


def _record(ended: Running[Task]) -> tables.Record:
    """What a task wrote before it ended, or why it wrote nothing. Its folder is removed."""
    result = ended.folder / "record.json"
    if result.exists():
        record = json.loads(result.read_text())
    else:
        ended.heard.seek(0)
        said = ended.heard.read().decode(errors="replace").strip().splitlines()
        why = f"{ended.status}: {' '.join(said[-3:])[-400:]}"
        record = {**asdict(ended.task), "failures": [why]}
    ended.heard.close()
    shutil.rmtree(ended.folder, ignore_errors=True)
    return record


if __name__ == "__main__":
    main()
