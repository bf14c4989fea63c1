"""`python -m bench`: eager, the reference and tilewright side by side, in one run."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import click
import torch
from rich.console import Console

from bench import report
from bench.growth import growth_suite
from bench.measure import EAGER, empty_caches, keep_freed_memory, machine
from bench.peak import peak_suite
from bench.suites import Options, Table, compile_suite, memory_suite, models_suite

SUITES = ("growth", "compile", "models", "memory", "peak")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="A few programs and two models, under four minutes.")
@click.option("--only", default="", metavar="REGEX", help="Only programs and models that match.")
@click.option("--suite", "suites", multiple=True, type=click.Choice(SUITES), help="Default: all.")
@click.option(
    "--backends",
    default="eager,inductor,tilewright",
    show_default=True,
    help="In this order; eager is always measured.",
)
@click.option(
    "--allocator",
    type=click.Choice(["reuse", "default"]),
    default="reuse",
    show_default=True,
    help="reuse: freed memory stays in the process; default: as glibc comes.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write raw data here.")
@click.option(
    "--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the tables here."
)
def main(
    quick: bool,
    only: str,
    suites: tuple[str, ...],
    backends: str,
    allocator: str,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Measure compilers side by side; exit 1 if any result is wrong or missing."""
    names = chosen_backends(backends)
    console = Console(width=None if sys.stdout.isatty() else 160)
    reuse = allocator == "reuse" and keep_freed_memory()
    header = {**machine(), "allocator": "reuse" if reuse else "default"}
    for key, value in header.items():
        console.print(f"[bold]{key:>11}[/bold]  {value}", highlight=False)
    tables: dict[str, Table] = {}
    with console.status("") as status, empty_caches():
        options = Options(
            backends=names,
            only=pattern(only),
            quick=quick,
            rounds=5 if quick else 15,
            sample_seconds=0.01 if quick else 0.03,
            progress=status.update,
            finished=lambda name, row: log(console, report.one_line(name, row)),
        )
        # Compile goes first: the models then start from the caches it filled.
        for suite in [s for s in SUITES if not suites or s in suites]:
            tables[suite] = run_suite(suite, options)
            report.show(console, suite, tables[suite], names)
    report.show_summary(console, tables, names)
    if json_file:
        json_file.write_text(json.dumps(report.raw(header, tables), indent=1))
    if markdown_file:
        markdown_file.write_text(report.markdown(header, tables, names))
        console.print(f"wrote {markdown_file}", highlight=False)
    console.print(f"load of the machine at the end: {os.getloadavg()[0]:.2f}", highlight=False)
    wrong = report.failures(tables)
    for line in wrong:
        console.print(f"[red]failed[/red] {line}", highlight=False)
    sys.exit(1 if wrong else 0)


def log(console: Console, line: str) -> None:
    """Rows as they come, where no status line can show that the run is alive."""
    if not console.is_terminal:
        click.echo(line, err=True)


def run_suite(suite: str, options: Options) -> Table:
    if suite == "compile":
        return compile_suite(options)
    if suite == "peak":
        return peak_suite(options)
    if suite == "growth":
        return growth_suite(options)
    return models_suite(options) if suite == "models" else memory_suite(options)


def chosen_backends(text: str) -> tuple[str, ...]:
    names = [n.strip() for n in text.split(",") if n.strip()]
    known = [EAGER, *torch.compiler.list_backends(exclude_tags=())]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"no backend {name!r}; there are {', '.join(known)}")
    return tuple(dict.fromkeys([EAGER, *names]))


def pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"--only {text!r} is no regular expression: {error}") from error


if __name__ == "__main__":
    main()
