"""The records of tuning: what is kept, shared by processes, and survives a broken file."""

from __future__ import annotations

import contextvars
import json
import logging
import os
import sqlite3
import threading

import pytest

from tests.cpu.fake_trials import CPU, subject
from tilewright import config, metrics
from tilewright.runtime import store
from tilewright.testing import fresh_cache
from tilewright.tune import records
from tilewright.tune.records import Choice, Row
from tilewright.tune.results import Subject, Timing


@pytest.fixture(autouse=True)
def folder():
    with fresh_cache() as found:
        yield found


def row(name: str, us: float | None = 5.0, reason: str = "") -> Row:
    time = None if us is None else Timing(us, 0.1, 9)
    return Row(name, name, "TRITON", time, reason, us is not None, us is not None)


def test_rows_come_back_as_they_were():
    rows = [row("a"), row("b", None, "does not fit")]
    records.keep(subject(), rows)
    assert records.measured(subject()) == {r.trial: r for r in rows}
    assert records.measured(subject("another")) == {}
    records.keep(subject(), [row("a", 7.0)])
    found = records.measured(subject())["a"].timing
    assert found is not None and found.median_us == 7.0


def test_choices_belong_to_what_was_offered():
    records.choose(subject(), "these", Choice("a", "BLOCK=4"))
    assert records.chosen(subject(), "these") == Choice("a", "BLOCK=4")
    assert records.chosen(subject(), "those") is None


def test_a_subject_without_a_key_is_not_remembered():
    nameless = Subject("", "of this process", CPU)
    records.keep(nameless, [row("a")])
    records.choose(nameless, "these", Choice("a", ""))
    assert records.measured(nameless) == {} and records.chosen(nameless, "these") is None


def test_the_environment_names_processor_threads_and_torch():
    import torch

    text = records.environment(CPU)
    assert f"torch {torch.__version__}" in text
    assert f"{torch.get_num_threads()} threads" in text


@pytest.mark.parametrize("content", [b"this is not a database" * 100, b"\0" * 4096])
def test_a_broken_file_is_set_aside_with_one_warning(folder, content, caplog):
    (folder / "tuning.db").write_bytes(content)
    with caplog.at_level(logging.WARNING, "tilewright.tune"):
        assert records.measured(subject()) == {}
        records.keep(subject(), [row("a")])
        assert list(records.measured(subject())) == ["a"]
    assert len(caplog.records) == 1 and "measured again" in caplog.text
    (aside,) = folder.glob("tuning.db.broken-*")
    assert aside.read_bytes() == content


def test_a_file_that_breaks_while_open_is_set_aside(folder):
    records.keep(subject(), [row("a")])
    records._file.close()
    data = bytearray((folder / "tuning.db").read_bytes())
    data[100:] = os.urandom(len(data) - 100)
    (folder / "tuning.db").write_bytes(data)
    records.keep(subject(), [row("b")])
    assert list(records.measured(subject())) == ["b"]


def test_two_versions_keep_records_beside_each_other(folder):
    records.keep(subject(), [row("a")])
    records._file.close()
    with sqlite3.connect(folder / "tuning.db") as db:
        db.execute("pragma user_version = 999")
    assert records.measured(subject()) == {}
    records.keep(subject(), [row("b")])
    assert list(records.measured(subject())) == ["b"]
    assert not list(folder.glob("tuning.db.broken-*"))
    with sqlite3.connect(folder / "tuning.db") as db:
        assert db.execute("select trial from trials").fetchall() == [("a",)]


def test_a_locked_file_is_done_without(folder, monkeypatch):
    records.keep(subject(), [row("a")])
    records._file.close()
    monkeypatch.setattr(records, "_PATIENCE", 0.05)
    other = sqlite3.connect(folder / "tuning.db")
    other.execute("begin immediate")
    try:
        records.keep(subject(), [row("b")])
        assert list(records.measured(subject())) == ["a"]  # readers do not wait
        assert sum(metrics.counters["tune"].values()) == 1
    finally:
        other.rollback()
        other.close()
    records.keep(subject(), [row("b")])
    assert sorted(records.measured(subject())) == ["a", "b"]


def test_several_processes_write_at_once(folder):
    children = []
    for k in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for i in range(10):
                    records.keep(subject(), [row(f"{k}-{i}")])
                    records.write_log({"of": k, "text": "x" * 500})
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    assert len(records.measured(subject())) == 40
    lines = records.log_path().read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 40


def test_threads_share_the_connection():
    threads = [threading.Thread(target=contextvars.copy_context().run,
                                args=(records.keep, subject(), [row(f"{k}")]))
               for k in range(8)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(records.measured(subject())) == 8


def test_half_a_line_costs_no_other() -> None:
    records.write_log({"k": 1})
    with records.log_path().open("a") as log:
        log.write('{"k": 2, "ti')
    records.write_log({"k": 3})
    first, half, last = records.log_path().read_text().splitlines()
    assert (json.loads(first)["k"], json.loads(last)["k"]) == (1, 3)
    assert half == '{"k": 2, "ti'


def test_the_log_is_bounded(monkeypatch):
    monkeypatch.setattr(records, "LOG_BYTES", 2000)
    for k in range(100):
        records.write_log({"k": k, "time": float("inf"), ("a", "tuple"): 1})
    assert records.log_path().stat().st_size <= 2000
    assert json.loads(records.log_path().read_text().splitlines()[-1])["k"] == 99
    assert records.log_path().with_name("tuning.jsonl.1").exists()


def test_without_caches_nothing_outlives_the_process(folder):
    with config.patch(force_disable_caches=True):
        records.keep(subject(), [row("a")])
        assert list(records.measured(subject())) == ["a"]
        assert store.root() != folder
    assert not (folder / "tuning.db").exists()
