"""Tables of a run: rich for the terminal, Markdown for docs/measurements, JSON for machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from bench.measure import EAGER, REFERENCE, Result, geomean
from bench.suites import FIRST_EVER, Row, Table

Cells = list[list[str]]


def speed_cells(table: Table, backends: tuple[str, ...]) -> Cells:
    """Head, rows and geomeans of a timed suite. Ratios are speeds: above 1 is faster."""
    ours = challenger(backends)
    against = ours is not None and REFERENCE in backends
    head = ["program", *(f"{b} ms" for b in backends)]
    head += [f"{b} / eager" for b in backends if b != EAGER]
    head += [f"{ours} / {REFERENCE}"] if against else []
    rows: Cells = [head]
    for name, row in table.items():
        cells = [name, *(time_text(row[b]) for b in backends)]
        cells += [ratio_text(ratio(row, EAGER, b)) for b in backends if b != EAGER]
        if against and ours:
            cells.append(ratio_text(ratio(row, REFERENCE, ours)))
        rows.append(cells)
    rows.append(geomean_row(table, backends, ours if against else None))
    return rows


def geomean_row(table: Table, backends: tuple[str, ...], ours: str | None) -> list[str]:
    cells = ["geomean", *("" for _ in backends)]
    cells += [mean_text(table, EAGER, b) for b in backends if b != EAGER]
    return [*cells, mean_text(table, REFERENCE, ours)] if ours else cells


def compile_cells(table: Table, backends: tuple[str, ...]) -> Cells:
    """Head, rows and geomeans of the compile suite; ratios are ours over the reference's."""
    compiled = [b for b in backends if b != EAGER]
    ours = challenger(backends)
    against = ours is not None and REFERENCE in backends
    head = ["model", *(f"{b} {s} s" for s in ("cold", "warm") for b in compiled)]
    head += ["cold ratio", "warm ratio"] if against else []
    head += [f"{b} peak MB" for b in compiled]
    rows: Cells = [head]
    ratios: dict[str, list[float]] = {"cold": [], "warm": []}
    for name, row in table.items():
        cells = [name]
        cells += [seconds_text(row[b], s) for s in ("cold", "warm") for b in compiled]
        for state in ("cold", "warm") if against and ours else ():
            value = extra_ratio(row, ours or "", state)
            cells.append(ratio_text(value))
            if value is not None and name != FIRST_EVER:
                ratios[state].append(value)
        rows.append(cells + [peak_text(row[b]) for b in compiled])
    if against:
        means = [ratio_text(geomean(ratios[s])) if ratios[s] else "-" for s in ("cold", "warm")]
        blank = ["" for _ in range(2 * len(compiled))]
        rows.append([f"geomean ({len(ratios['cold'])})", *blank, *means, *("" for _ in compiled)])
    return rows


def summary_cells(tables: dict[str, Table], backends: tuple[str, ...]) -> Cells:
    """All suites in a few lines: geomeans."""
    ours = challenger(backends)
    rows: Cells = [["what", "rows", "geomean"]]
    for suite, table in tables.items():
        if suite == "growth":
            worst = max((r.extra.get("ratio", 0.0) for row in table.values()
                         for r in row.values()), default=0.0)  # fmt: skip
            rows.append(["growth: largest ratio for twice the nodes", str(len(table)),
                         ratio_text(worst)])  # fmt: skip
            continue
        if suite != "compile":
            pairs = [(b, EAGER) for b in backends if b != EAGER]
            pairs += [(ours, REFERENCE)] if ours and REFERENCE in backends else []
            rows += [[f"{suite}: speed of {b} over {base}", str(len(table)),
                      mean_text(table, base, b)] for b, base in pairs]  # fmt: skip
            continue
        models = [row for name, row in table.items() if name != FIRST_EVER]
        for state in ("cold", "warm") if ours and REFERENCE in backends else ():
            found = [r for row in models if (r := extra_ratio(row, ours or "", state)) is not None]
            text = ratio_text(geomean(found)) if found else "-"
            rows.append([f"{state} start: seconds of {ours} over {REFERENCE}'s",
                         str(len(models)), text])  # fmt: skip
    return rows


def challenger(backends: tuple[str, ...]) -> str | None:
    """The backend compared with the reference: the last that is neither it nor eager."""
    others = [b for b in backends if b not in (EAGER, REFERENCE)]
    return others[-1] if others else None


def ratio(row: Row, base: str, backend: str) -> float | None:
    a, b = row.get(base, Result()).timing, row.get(backend, Result()).timing
    return a.median / b.median if a and b else None


def extra_ratio(row: Row, ours: str, state: str) -> float | None:
    mine, theirs = row[ours].extra.get(state), row[REFERENCE].extra.get(state)
    return mine / theirs if mine and theirs else None


def mean_text(table: Table, base: str, backend: str) -> str:
    values = [r for row in table.values() if (r := ratio(row, base, backend)) is not None]
    note = "" if len(values) == len(table) else f" ({len(values)} of {len(table)})"
    return f"{geomean(values):.2f}{note}" if values else "-"


def ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def time_text(result: Result) -> str:
    if result.timing is None:
        return "failed"
    return f"{result.timing.median * 1e3:.3f} ±{result.timing.spread:.0%}"


def seconds_text(result: Result, state: str) -> str:
    return f"{result.extra[state]:.2f}" if state in result.extra else "failed"


def peak_text(result: Result) -> str:
    return f"{result.extra['peak_mb']:.0f}" if "peak_mb" in result.extra else "-"


def peak_cells(table: Table, backends: tuple[str, ...]) -> Cells:
    """Head and rows of the peak suite; ratios are ours over the others'."""
    ours = challenger(backends)
    others = [b for b in (EAGER, REFERENCE) if ours and b in backends]
    rows: Cells = [["model", *(f"{b} MB" for b in backends), *(f"{ours} / {b}" for b in others)]]
    for name, row in table.items():
        peaks = {b: row[b].extra.get("peak") for b in backends}
        cells = [name, *("failed" if p is None else f"{p / 1e6:.2f}" for p in peaks.values())]
        mine = peaks.get(ours or "")
        cells += [ratio_text(mine / p if mine and (p := peaks[b]) else None) for b in others]
        rows.append(cells)
    return rows


def growth_cells(table: Table, backends: tuple[str, ...]) -> Cells:
    """Head and rows of the growth suite; the ratio is to half as many nodes."""
    stages = ("graph", "lower", "group", "memory")
    rows: Cells = [["family and nodes", "seconds", "ratio", *stages, "nests", "kernels"]]
    for name, row in table.items():
        found = next(iter(row.values())).extra
        cells = [name, f"{found['seconds']:.2f}", ratio_text(found.get("ratio"))]
        cells += [f"{found[s]:.2f}" for s in stages]
        rows.append([*cells, f"{found['nests']:.0f}", f"{found['kernels']:.0f}"])
    return rows


FORMATS: dict[str, Callable[[Table, tuple[str, ...]], Cells]] = {
    "memory": speed_cells,
    "models": speed_cells,
    "compile": compile_cells,
    "peak": peak_cells,
    "growth": growth_cells,
}
TITLES = {
    "growth": "processor seconds to decide what runs, for graphs of doubling size",
    "memory": "memory-bound programs: time per call, speed over eager",
    "models": "models: time per call, speed over eager",
    "peak": "models: most memory at once beyond parameters and inputs",
    "compile": "first call of a training step in a new process, seconds",
}


def failures(tables: dict[str, Table]) -> list[str]:
    return [
        f"{suite}: {name}: {backend}: {result.error}"
        for suite, table in tables.items()
        for name, row in table.items()
        for backend, result in row.items()
        if result.error
    ]


def one_line(name: str, row: Row) -> str:
    """A finished row, for a log: a run that is cut short still has told what it measured."""
    parts: list[str] = []
    for backend, result in row.items():
        if result.error:
            parts.append(f"{backend} failed")
        elif result.timing:
            parts.append(f"{backend} {time_text(result)} ms")
        else:
            parts.append(f"{backend} " + " ".join(f"{k} {v:.2f}" for k, v in result.extra.items()))
    return f"{name}: {', '.join(parts)}"


def show(console: Console, suite: str, table: Table, backends: tuple[str, ...]) -> None:
    _show(console, TITLES[suite], FORMATS[suite](table, backends))


def show_summary(console: Console, tables: dict[str, Table], backends: tuple[str, ...]) -> None:
    _show(console, "summary", summary_cells(tables, backends))


def _show(console: Console, title: str, cells: Cells) -> None:
    head, *rows = cells
    out = RichTable(title=title, title_justify="left")
    for i, text in enumerate(head):
        out.add_column(text, justify="left" if i == 0 else "right")
    for i, row in enumerate(rows):
        out.add_row(*row, end_section=i == len(rows) - 2 and rows[-1][0].startswith("geomean"))
    console.print(out)


def markdown(header: dict[str, Any], tables: dict[str, Table], backends: tuple[str, ...]) -> str:
    lines = [f"# Measurement of {header['date']}", ""]
    lines += [f"- {key}: {value}" for key, value in header.items()]
    parts = {"summary": summary_cells(tables, backends)}
    parts |= {TITLES[suite]: FORMATS[suite](table, backends) for suite, table in tables.items()}
    for title, (head, *rows) in parts.items():
        lines += ["", f"## {title.capitalize()}", ""]
        lines += [pipe(head), pipe(["---", *("---:" for _ in head[1:])]), *map(pipe, rows)]
    wrong = failures(tables)
    if wrong:
        lines += ["", "## Failures", "", *(f"- {line}" for line in wrong)]
    return "\n".join(lines) + "\n"


def pipe(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def raw(header: dict[str, Any], tables: dict[str, Table]) -> dict[str, Any]:
    """Everything, ready for json.dump."""
    data = {
        suite: {
            name: {backend: dataclasses.asdict(result) for backend, result in row.items()}
            for name, row in table.items()
        }
        for suite, table in tables.items()
    }
    return {"machine": header, "suites": data}
