"""Rows of a benchmark that raise, crash or never end cost themselves alone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import rows
from bench.rows import Book, Found, Row

SHARES = {"good": 2.0, "bad": 1.0}


def raises() -> Found:
    raise ValueError("of no use")


def dies() -> Found:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hangs() -> Found:
    time.sleep(600)
    return {}


def every_row() -> Iterator[Row]:
    yield Row("good", "one", lambda: {"x": 1})
    for function in (dies, raises, hangs):
        yield Row("bad", function.__name__, function, seconds=1.0)
    yield Row("bad", "last", lambda: {"x": 3})


def main(arguments: list[str]) -> int:
    given = rows.parser("tests.cpu.test_bench_rows", "", SHARES).parse_args(arguments)
    return rows.run("tests.cpu.test_bench_rows", given, arguments, every_row(), SHARES, rows.rest)


def test_each_row_costs_itself_alone(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert main(["--out", str(out), "--minutes", "0.5"]) == 0
    found = {line["row"]: line for line in Book(out).found()}
    assert list(found) == ["one", "dies", "raises", "hangs", "last"]
    assert (found["one"]["x"], found["last"]["x"]) == (1, 3)
    assert found["dies"]["failed"] == "ended the process with code -11"
    assert found["raises"]["failed"] == "ValueError: of no use"
    assert found["hangs"]["failed"] == "took longer than 1 s"
    assert [line.split(": ")[1] for line in out.with_suffix(".txt").read_text().splitlines()] == [
        "bad, dies", "bad, raises", "bad, hangs"]  # fmt: skip


def test_what_there_is_no_time_for_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = Book(tmp_path / "rows.jsonl")
    made = [Row("good", str(k), lambda: {"x": 1}) for k in range(3)]
    rows.measured(made, SHARES, book, time.time() - 1)
    assert rows.rest(book.found()) == ["     left out for want of time: 3 of good"]
    book.path.write_text(book.path.read_text() + '{"part": "good", "row"')  # a line cut short
    rows.measured(made, SHARES, book, time.time() + 9)
    assert len(book.found()) == 3 and "good" not in capsys.readouterr().out.split("# good")[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
