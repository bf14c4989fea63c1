"""Records of the suite as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.measure import EAGER, REFERENCE, geomean
from bench.real.child import OURS

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The latest record of each task; a line that was cut off is not one."""
    found: dict[tuple[str, ...], Record] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[key(record)] = record
    return list(found.values())


def key(record: Record) -> tuple[str, ...]:
    return tuple(record[k] for k in ("model", "work", "mode", "device", "size"))


def append(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


HEAD = (
    "model", "work", "mode", "eager ms", "reference ms", "ours ms", "over eager", "over reference",
    "host ms", "device ms", "peak MB", "compile s", "error",
)  # fmt: skip


def markdown(records: list[Record], note: str) -> str:
    lines = ["# Real models", "", note, ""]
    if records:
        lines += [f"- {k}: {v}" for k, v in records[-1].get("machine", {}).items()]
        lines += [f"- {k}: {records[-1][k]}" for k in ("size", "clock", "allocator", "rounds")]
    lines += ["", "Times of a call are medians, the three in turn in every round; speeds are the",
              "median over rounds of one time over the other, ours below: above 1 is faster.",
              "Columns with three figures are eager's, the reference's and ours. The error is the",
              "largest distance from a run in wider numbers.", ""]  # fmt: skip
    lines += ["## Summary", "", *_summary(records), "", "## Models", ""]
    lines += [_pipe(HEAD), _pipe(["---"] * 3 + ["---:"] * (len(HEAD) - 3))]
    lines += [_pipe(cells(r)) for r in sorted(records, key=lambda r: (r["mode"], r["model"]))]
    wrong = failures(records)
    if wrong:
        lines += ["", "## Failures", "", *(f"- {line}" for line in wrong)]
    return "\n".join(lines) + "\n"


def _summary(records: list[Record]) -> list[str]:
    lines = [_pipe(("mode", "work", "models", "over eager", "over reference", "slower than eager",
                    "slower than the reference", "compile, of the reference's",
                    "device over eager", "device over reference")),
             _pipe(["---"] * 2 + ["---:"] * 8)]  # fmt: skip
    for mode, work in sorted({(r["mode"], r["work"]) for r in records}):
        some = [r for r in records if (r["mode"], r["work"]) == (mode, work)]
        lines.append(_pipe((
            mode, work, str(len(some)), _mean(_speed(some, EAGER)), _mean(_speed(some, REFERENCE)),
            _slower(some, EAGER), _slower(some, REFERENCE),
            _mean(_ratios(some, "compile_s", OURS, REFERENCE)),
            *(_mean(_ratios(some, "device_ms", b, OURS)) for b in (EAGER, REFERENCE)),
        )))  # fmt: skip
    return lines


def _speed(records: list[Record], base: str) -> list[float]:
    return [r["speed"][base] for r in records if base in r.get("speed", {})]


def _ratios(records: list[Record], what: str, one: str, other: str) -> list[float]:
    pairs = [[r.get("backends", {}).get(b, {}).get(what) for b in (one, other)] for r in records]
    return [a / b for a, b in pairs if a and b]


def _mean(values: list[float]) -> str:
    return f"{geomean(values):.2f}" if values else "-"


def _slower(records: list[Record], base: str) -> str:
    """How many are slower by more than 3 %."""
    speeds = _speed(records, base)
    return f"{sum(s < 1 / 1.03 for s in speeds)} of {len(speeds)}"


def cells(record: Record) -> list[str]:
    rows = record.get("backends", {})
    name = f"{record['model']}{' *' if record['failures'] else ''}"
    walls = [_number(rows.get(b, {}).get("wall_ms")) for b in (EAGER, REFERENCE, OURS)]
    speeds = [_number(record.get("speed", {}).get(b), 2) for b in (EAGER, REFERENCE)]
    return [name, record["work"], record["mode"], *walls, *speeds, _three(rows, "host_ms"),
            _three(rows, "device_ms"), _three(rows, "peak_mb", 1), _three(rows, "compile_s", 1),
            " / ".join(_small(rows.get(b, {}).get("error")) for b in (EAGER, REFERENCE, OURS)),
            ]  # fmt: skip


def _three(rows: dict[str, Any], what: str, digits: int = 3) -> str:
    found = [rows.get(b, {}).get(what) for b in (EAGER, REFERENCE, OURS)]
    kept = [v for v, b in zip(found, (EAGER, REFERENCE, OURS), strict=True)
            if v is not None or (b != EAGER and what == "compile_s")]  # fmt: skip
    return " / ".join(_number(v, digits) for v in kept) if any(kept) else "-"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"


def failures(records: Iterable[Record]) -> list[str]:
    return [
        f"{r['model']} {r['work']} {r['mode']}: {why}" for r in records for why in r["failures"]
    ]


def one_line(record: Record) -> str:
    if "speed" not in record or not record["speed"]:
        return f"{record['model']} {record['work']} {record['mode']}: " + "; ".join(
            record["failures"]
        )
    walls = [record["backends"][b].get("wall_ms") for b in (EAGER, REFERENCE, OURS)]
    text = " / ".join(_number(w, 2) for w in walls)
    speeds = ", ".join(f"{v:.2f} over {k}" for k, v in record["speed"].items())
    wrong = "".join(f"; FAILED {f}" for f in record["failures"])
    return f"{record['model']} {record['work']} {record['mode']}: {text} ms, {speeds}{wrong}"


def _pipe(some: Iterable[str]) -> str:
    return "| " + " | ".join(some) + " |"
