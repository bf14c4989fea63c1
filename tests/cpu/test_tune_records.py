"""The records of tuning: what is kept, shared by processes, and survives a broken file."""

from __future__ import annotations

import contextvars
import json
import logging
import math
import os
import sqlite3
import threading

import pytest

from tests.cpu.fake_trials import CPU, subject
from tilewright import caches, config, metrics
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
    monkeypatch.setattr(records, "PAUSE", 0.0)
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


def test_one_that_never_lets_go_is_waited_for_once(folder, monkeypatch):
    """A process that was stopped in the middle of a write."""
    records.keep(subject(), [row("a")])
    records._file.close()
    monkeypatch.setattr(records, "_PATIENCE", 0.2)
    other = sqlite3.connect(folder / "tuning.db")
    other.execute("begin immediate")
    try:
        for k in range(5):
            records.keep(subject(), [row(f"{k}")])
        told = {k: v for k, v in metrics.counters["tune"].items() if "locked" in k}
        assert list(told.values()) == [1]
        assert list(records.measured(subject())) == ["a"]
    finally:
        other.rollback()
        other.close()
    caches.clear()
    records.keep(subject(), [row("b")])
    assert sorted(records.measured(subject())) == ["a", "b"]


@pytest.mark.parametrize("what", ["another program's", "without tables", "a folder"])
def test_a_file_that_is_not_ours_is_set_aside(folder, what):
    path = folder / "tuning.db"
    folder.mkdir(mode=0o700, exist_ok=True)
    if what == "a folder":
        path.mkdir()
    else:
        other = sqlite3.connect(path)
        if what == "another program's":
            other.execute("create table trials (something text)")
        other.execute(f"pragma user_version = {records.VERSION}")
        other.commit()
        other.close()
    records.keep(subject(), [row("a")])
    assert list(records.measured(subject())) == ["a"]
    assert len(list(folder.glob("tuning.db.broken-*"))) == 1


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
def test_what_belongs_to_it_and_is_no_file_is_set_aside(folder, suffix):
    """It could otherwise never be written to again."""
    records.keep(subject(), [row("a")])
    caches.clear()
    other = folder / f"tuning.db{suffix}"
    other.unlink(missing_ok=True)
    other.mkdir()
    records.keep(subject(), [row("a")])
    assert records.measured(subject()) == {"a": row("a")}
    assert other.is_file()


def test_a_file_of_another_user_is_set_aside(folder, monkeypatch):
    """Begun by root, say, in a folder of the user's."""
    records.keep(subject(), [row("a")])
    caches.clear()
    facts = os.lstat

    def lstat(path):
        found = list(facts(path))
        found[4] += str(path).endswith("tuning.db")
        return os.stat_result(found)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lstat)
        with pytest.raises(sqlite3.DatabaseError, match="belongs to another user"):
            records._opened(folder / "tuning.db")


def test_of_two_versions_the_broken_one_is_set_aside(folder):
    folder.mkdir(mode=0o700, exist_ok=True)
    other = sqlite3.connect(folder / "tuning.db")
    other.execute("pragma user_version = 77")
    other.commit()
    other.close()
    theirs = (folder / "tuning.db").read_bytes()
    (folder / f"tuning-{records.VERSION}.db").write_bytes(b"garbage" * 1000)
    records.keep(subject(), [row("a")])
    assert list(records.measured(subject())) == ["a"]
    assert (folder / "tuning.db").read_bytes() == theirs


def test_a_file_in_the_place_of_the_one_that_is_open(folder):
    """Somebody emptied the cache folder, and another process began anew."""
    records.keep(subject(), [row("a")])
    held = os.open(folder / "tuning.db", os.O_RDONLY)  # its number does not come again
    for suffix in ("", "-wal", "-shm"):
        (folder / f"tuning.db{suffix}").unlink(missing_ok=True)
    sqlite3.connect(folder / "tuning.db").execute("create table others (x)").connection.close()
    records.keep(subject(), [row("b")])
    os.close(held)
    records._file.close()
    assert list(records.measured(subject())) == ["b"]


def test_what_no_table_can_have_is_left_out(folder):
    records.keep(subject(), [Row("a", "\udcff", "P", None, "a path that is no text: \udcff")])
    assert records.measured(subject()) == {}
    good = {"subject": "s", "trial": "t", "environment": "e", "name": "n", "provider": "p",
            "reason": "", "median_us": 1.0, "spread": 0.0, "samples": 3, "checked": 1, "final": 1,
            "at": 1.0}  # fmt: skip
    for wrong in ({"samples": 10**30}, {"name": "\ud800"}, {"median_us": math.nan}, {"at": "1"}):
        assert records.take({"trials": [{**good, **wrong}]}) == 0
    assert records.take({"trials": 3, "choices": [3, None]}) == 0
    for half in ({"samples": None}, {"spread": None}):
        assert records.take({"trials": [{**good, **half, "trial": str(half)}]}) == 1
    found = [
        records._row("t", "n", "p", "", 1.0, None, 3),
        records._row("t", "n", "p", "", 1, 0.0, None),
    ]
    assert [r.timing for r in found] == [None, None]


def test_problems_whose_sizes_are_no_numbers_are_like_nobody(folder):
    def sized(key, sizes):
        return Subject(key, key, CPU, facts={"op": "mm", "dtype": "f", "sizes": sizes})

    for k, sizes in enumerate((["s0", "s1"], [-5, 3], [10**400, 1], [None, 2], [64, 32])):
        one = sized(f"{k}", sizes)
        records.keep(one, [row("a")])
        records.choose(one, "", records.Choice("a", f"of {k}"))
    assert records.nearest(sized("new", [60, 30])) == "of 4"
    assert records.nearest(sized("new", ["s0", 30])) == ""
    assert records._parsed("[" * 100_000) == {}


def test_many_records_do_not_make_a_product_wait(folder):
    """The choices of a kind of machine are looked at from the last one on, and not sorted; also in
    a file that was begun without the means for it."""
    records.keep(subject(), [row("a")])
    records._file.close()
    with sqlite3.connect(folder / "tuning.db") as db:
        db.execute("drop index latest")
    records.keep(subject(), [row("a")])
    asked: list[str] = []
    records._file.connection().set_trace_callback(asked.append)
    records.nearest(subject("new", op="mm", dtype="f", sizes=[3, 4, 5]))
    with sqlite3.connect(folder / "tuning.db") as db:
        (plan,) = [db.execute(f"explain query plan {q}").fetchall() for q in asked if "join" in q]
    told = [step[3] for step in plan]
    assert any("latest" in step for step in told) and not any("TEMP" in step for step in told), told


def test_read_only_folders_may_have_any_name(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/100%25 of#it?\xe9")
    with config.patch(cache_dir=folder):
        records.keep(subject(), [row("a")])
    caches.clear()
    given = {"cache_dir": str(tmp_path / "own"), "cache_read_only_dirs": folder}
    with config.patch(given):
        assert list(records.measured(subject())) == ["a"]


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
