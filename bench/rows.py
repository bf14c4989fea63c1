"""Rows of a benchmark on a card, each of them measured as if it were the only one.

A benchmark names its rows and says what they come to. They are measured by a process of its own,
part by part, each part with a share of the time: what a part has no time for is left out, and done
at the end if time is left. All that is found is written at once, a line of JSON for each row that
begins and for each that ends. A row that raises says so; one that leaves the card unusable, ends
the process, or takes longer than it may costs itself, for the next process begins with the next.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Found = dict[str, Any]
UNUSABLE = 3  # the exit code of a process whose card is
GRACE = 10.0  # seconds a process may take to end
LOOK = 0.2  # seconds between two looks at a process
LINE = 200  # characters of an error that are kept


@dataclass(frozen=True)
class Row:
    """`measure` gives figures by name; `shown` among them is printed."""

    part: str
    name: str
    measure: Callable[[], Found]
    seconds: float = 60.0  # it may take

    @property
    def id(self) -> tuple[str, str]:
        return self.part, self.name


class Book:
    """What was found so far, in a file that one process at a time writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def lines(self) -> list[Found]:
        if not self.path.exists():
            return []
        whole = self.path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def begun(self) -> set[tuple[str, str]]:
        return {(line["part"], line["row"]) for line in self.lines()}

    def found(self) -> list[Found]:
        return [line for line in self.lines() if "begins" not in line]

    def under_way(self) -> Found | None:
        lines = self.lines()
        return lines[-1] if lines and "begins" in lines[-1] else None


# ---- in the process that measures


def measured(rows: Iterable[Row], shares: Mapping[str, float], book: Book, end: float) -> None:
    """Every row that nobody began yet; `end` is in seconds since 1970."""
    done = book.begun()
    parts: dict[str, list[Row]] = {}
    for row in rows:
        if row.id not in done:
            parts.setdefault(row.part, []).append(row)
    left, late = sum(shares[part] for part in parts), list[Row]()
    for part, mine in parts.items():
        now = time.time()
        until = now + shares[part] / left * (end - now)
        left -= shares[part]
        print(f"\n# {part}, {until - now:.0f} s", flush=True)
        for row in mine:
            if time.time() > until:
                late.append(row)
            else:
                _one(row, book)
    for row in late:
        if time.time() > end - 5:
            book.write(part=row.part, row=row.name, left_out=True)
        else:
            _one(row, book)


def _one(row: Row, book: Book) -> None:
    began = time.time()
    book.write(part=row.part, row=row.name, begins=began, seconds=row.seconds)
    try:
        found = row.measure()
    except Exception as error:
        traceback.print_exc()
        found = {"failed": said(error)}
    book.write(part=row.part, row=row.name, took=time.time() - began, **found)
    print(f"{row.name:44} {found.get('shown', found.get('failed', 'done'))}", flush=True)
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        _tidy(sys.modules["torch"].cuda)


def _tidy(cuda: Any) -> None:
    try:
        cuda.empty_cache()
        cuda.synchronize()
    except Exception as error:
        print(f"the card is unusable after this: {said(error)}", flush=True)
        os._exit(UNUSABLE)


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LINE]}"


# ---- in the one that waits for it


def supervised(module: str, arguments: Sequence[str], book: Book, end: float) -> None:
    """Processes of `python -m module`, until one has come to the end of the rows."""
    while time.time() < end:
        known = len(book.lines())
        command = [sys.executable, "-m", module, *arguments,
                   "--worker", str(end), "--out", str(book.path)]  # fmt: skip
        process = subprocess.Popen(command, start_new_session=True)
        why = _watched(process, book, end)
        row = book.under_way()
        if row is not None:
            book.write(part=row["part"], row=row["row"], failed=why)
            print(f"{row['part']}, {row['row']}: {why}", flush=True)
        if process.returncode == 0 or len(book.lines()) == known:
            return  # all is done, or nothing can be


def _watched(process: subprocess.Popen[bytes], book: Book, end: float) -> str:
    """Why it ended, if a row was under way then."""
    while process.poll() is None:
        time.sleep(LOOK)
        row, now = book.under_way(), time.time()
        slow = row is not None and now > row["begins"] + row["seconds"]
        if slow or now > end + GRACE:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"took longer than {row['seconds']:.0f} s" if slow and row else "out of time"
    return f"ended the process with code {process.returncode}"


# ---- the command


def parser(name: str, about: str | None, parts: Iterable[str]) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog=f"python -m {name}", description=about, formatter_class=raw)
    made.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; or all")
    made.add_argument("--minutes", type=float, default=8.7, help="for all parts together")
    made.add_argument("--only", default="", help="rows with this in their names")
    made.add_argument("--out", type=Path, help="what is found, row by row; or a file in $OUT")
    made.add_argument("--here", action="store_true", help="in this process: what breaks ends it")
    made.add_argument("--worker", type=float, default=0.0, help=argparse.SUPPRESS)
    return made


def run(name: str, given: argparse.Namespace, arguments: Sequence[str], rows: Iterable[Row],
        shares: Mapping[str, float], verdict: Callable[[list[Found]], list[str]]
        ) -> int:  # fmt: skip
    """Measures, as one process or as the one that waits; and prints the verdict."""
    rows = [row for row in rows if given.only in row.name]
    if given.worker:
        measured(rows, shares, Book(given.out), given.worker)
        return 0
    folder = Path(os.environ.get("OUT") or tempfile.gettempdir())
    path = given.out or folder / f"{name.rpartition('.')[2]}-{os.getpid()}.jsonl"
    path.unlink(missing_ok=True)
    book, end = Book(path), time.time() + 60 * given.minutes
    if given.here:
        measured(rows, shares, book, end)
    else:
        supervised(name, arguments, book, end)
    lines = verdict(book.found())
    path.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), f"\n(all rows: {path})", flush=True)
    return 0


def mark(is_met: bool) -> str:
    return "met " if is_met else "MISS"


def rest(found: Sequence[Found]) -> list[str]:
    """What failed and what was left out, for the end of a verdict."""
    failed = [
        f"     failed: {f['part']}, {f['row']}: {f['failed']}" for f in found if "failed" in f
    ]
    late: dict[str, int] = {}
    for f in found:
        late[f["part"]] = late.get(f["part"], 0) + ("left_out" in f)
    return [*failed, *(f"     left out for want of time: {count} of {part}"
                       for part, count in late.items() if count)]  # fmt: skip
