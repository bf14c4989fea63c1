"""What was measured, for ever: one row per (subject, trial, environment), in SQLite.

The file is shared by all processes of a user. A measurement is never taken twice in the same
environment, and a choice among the same trials is never made twice. A file that cannot be read is
set aside and started anew: losing it costs time, never a wrong answer. Every decision is a line of
`tuning.jsonl` as well, for people and scripts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import sqlite3
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from tilewright import caches, config, metrics
from tilewright.runtime import remote, store
from tilewright.tune.results import Subject, Timing

log = logging.getLogger("tilewright.tune")

VERSION = 1  # of the tables
_PATIENCE = 30.0  # seconds to wait for another process's write
PAUSE = 60.0  # seconds without the records, once that was in vain
LOG_BYTES = 8 << 20  # of the decision log; then it starts anew, and one old file is kept

_TABLES = """
create table if not exists trials (
    subject text, trial text, environment text, name text, provider text,
    reason text, median_us real, spread real, samples integer, checked integer, final integer,
    at real,
    primary key (subject, trial, environment));
create table if not exists choices (
    subject text, offered text, environment text, trial text, description text, at real,
    primary key (subject, offered, environment));
create table if not exists subjects (subject text primary key, title text, facts text);
"""
# What was chosen last is looked for before anything is measured: among 300 000 choices for 0.4 s,
# with this for 0.06 s (EPYC). It is no part of the tables: a file without it gets it.
_INDEX = "create index if not exists latest on choices (environment, at)"
_FILES = ("-wal", "-shm", "")  # of the database, by what their names end with
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """What is known of a trial: how long it takes, or why it is rejected."""

    trial: str  # its key
    name: str
    provider: str
    timing: Timing | None = None
    reason: str = ""
    checked: bool = False  # its result was compared with the reference
    final: bool = False  # it was sampled until it was clear who is faster


@dataclass(frozen=True)
class Choice:
    """Which trial was chosen."""

    trial: str
    description: str


def measured(subject: Subject) -> dict[str, Row]:
    """What earlier runs in this environment found, by trial; own rows before those of read-only
    folders."""
    if not subject.key:
        return {}
    where = (subject.key, environment(subject.device))
    query = ("select trial, name, provider, reason, median_us, spread, samples, checked, final "
             "from trials where subject = ? and environment = ?")  # fmt: skip
    found = {row[0]: _row(*row) for answer in _from_layers(query, where) for row in answer}
    own = _with(lambda db: db.execute(query, where).fetchall(), [])
    return {**found, **{row[0]: _row(*row) for row in own}}


def _row(trial: str, name: str, provider: str, reason: str, median: float | None,
         spread: float | None, samples: int | None, *marks: int) -> Row:  # fmt: skip
    time = None  # also where others have written what is no time
    if isinstance(median, float) and isinstance(spread, float) and isinstance(samples, int) and (
            median > 0 and spread >= 0 and samples > 0):  # fmt: skip
        time = Timing(median, spread, samples)
    return Row(trial, name, provider, time, reason, *map(bool, marks))


def keep(subject: Subject, rows: Sequence[Row]) -> None:
    """Add or replace rows."""
    where, now = environment(subject.device), time.time()
    values = [(subject.key, r.trial, where, r.name, r.provider, r.reason, *_numbers(r.timing),
               int(r.checked), int(r.final), now) for r in rows]  # fmt: skip
    about = (subject.key, subject.title, _json(subject.facts))

    def write(db: sqlite3.Connection) -> None:
        with db:
            db.execute("insert or replace into subjects values (?, ?, ?)", about)
            db.executemany(
                "insert or replace into trials values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values
            )

    if values and subject.key:
        _with(write, None, writes=True)


def _numbers(found: Timing | None) -> tuple[float | None, ...]:
    return (None, None, None) if found is None else (found.median_us, found.spread, found.samples)


def chosen(subject: Subject, offered: str) -> Choice | None:
    """What was chosen in this environment when the same was offered."""
    if not subject.key:
        return None
    where = (subject.key, offered, environment(subject.device))
    query = ("select trial, description from choices "
             "where subject = ? and offered = ? and environment = ?")  # fmt: skip
    own = _with(lambda db: db.execute(query, where).fetchall(), [])
    answers = [own] if own else _from_layers(query, where)
    return next((Choice(*row) for answer in answers for row in answer), None)


def nearest(subject: Subject) -> str:
    """The description of what was chosen here for the problem most like this one: the same
    operation and dtype, of sizes that are nearest. Empty where there is none."""
    sizes: Any = subject.facts.get("sizes")
    if not isinstance(sizes, Sequence) or not sizes:
        return ""
    query = ("select s.facts, c.description from subjects s "
             "join choices c on c.subject = s.subject "
             "where c.environment = ? and s.subject != ? "
             "order by c.at desc limit 2000")  # fmt: skip
    where = (environment(subject.device), subject.key)
    best, found = math.inf, ""
    for text, description in _with(lambda db: db.execute(query, where).fetchall(), []):
        facts = _parsed(text)
        same = all(facts.get(part) == subject.facts.get(part) for part in ("op", "dtype"))
        distance = _distance(sizes, facts.get("sizes")) if same else math.inf
        if distance < best:
            best, found = distance, description
    return found


def _distance(sizes: Sequence[Any], others: Any) -> float:
    """How far apart two problems are; infinitely where their sizes are not numbers, or not as
    many."""
    if not isinstance(others, list) or len(cast("list[Any]", others)) != len(sizes):
        return math.inf
    pairs = list(zip(sizes, cast("list[Any]", others), strict=True))
    if not all(isinstance(n, int) and n >= 0 for pair in pairs for n in pair):
        return math.inf
    return sum(abs(math.log(a + 1) - math.log(b + 1)) for a, b in pairs)


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def choose(subject: Subject, offered: str, choice: Choice) -> None:
    if not subject.key:
        return
    values = (subject.key, offered, environment(subject.device), choice.trial, choice.description,
              time.time())  # fmt: skip

    def write(db: sqlite3.Connection) -> None:
        with db:
            db.execute("insert or replace into choices values (?, ?, ?, ?, ?, ?)", values)

    _with(write, None, writes=True)
    for tell in on_choice:
        tell(subject.key)


on_choice: list[Callable[[str], None]] = []  # told of each subject that something was chosen for


def elsewhere(subject: Subject) -> list[str]:
    """Other environments in which this subject was measured: what a miss differs from."""
    query = "select distinct environment from trials where subject = ? and environment != ?"
    where = (subject.key, environment(subject.device))
    return [row[0] for row in _with(lambda db: db.execute(query, where).fetchall(), [])]


# ---- as data: for other processes and machines

_COLUMNS: dict[str, tuple[str, ...]] = {
    "subjects": ("subject", "title", "facts"),
    "trials": ("subject", "trial", "environment", "name", "provider", "reason", "median_us",
               "spread", "samples", "checked", "final", "at"),
    "choices": ("subject", "offered", "environment", "trial", "description", "at"),
}  # fmt: skip
KEYS = {"subjects": ("subject",), "trials": ("subject", "trial", "environment"),
        "choices": ("subject", "offered", "environment")}  # fmt: skip
_NUMBERS = {"median_us", "spread", "samples", "checked", "final", "at"}
Tables = dict[str, list[dict[str, Any]]]  # table -> rows


def exported(subject: str | None = None) -> Tables:
    """All that is recorded, or what is of one subject, as plain data that people can read."""

    def read(db: sqlite3.Connection) -> Tables:
        found: Tables = {}
        for table, columns in _COLUMNS.items():
            query = f"select {', '.join(columns)} from {table}"
            where = () if subject is None else (subject,)
            rows = db.execute(query + (" where subject = ?" if where else ""), where)
            found[table] = [dict(zip(columns, row, strict=True)) for row in rows]
        return found

    return _with(read, {table: [] for table in _COLUMNS})


def rows_of(subject: Subject) -> Tables:
    return exported(subject.key)


def take(tables: Mapping[str, Any]) -> int:
    """Add what another process or machine recorded; newer rows stay. Rows of any other form than
    ours are left out. Gives how many were taken."""
    checked = cleaned(tables)

    def write(db: sqlite3.Connection) -> int:
        count = 0
        with db:
            for table, rows in checked.items():
                columns = _COLUMNS[table]
                marks = ", ".join("?" * len(columns))
                keys = ", ".join(KEYS[table])
                sets = ", ".join(f"{c} = excluded.{c}" for c in columns)
                newer = f"do update set {sets} where excluded.at > at"
                text = (f"insert into {table} values ({marks}) on conflict ({keys}) "
                        + (newer if "at" in columns else "do nothing"))  # fmt: skip
                for row in rows:
                    count += db.execute(text, [row[c] for c in columns]).rowcount
        return count

    return _with(write, 0, writes=True) if any(checked.values()) else 0


def cleaned(tables: Any) -> Tables:
    """The rows of our form, of what somebody says are tables."""
    found = cast("dict[str, Any]", tables) if isinstance(tables, dict) else {}
    return {table: [row for row in _listed(found.get(table)) if _is_row(table, row)]
            for table in _COLUMNS}  # fmt: skip


def _listed(rows: Any) -> list[Any]:
    return cast("list[Any]", rows) if isinstance(rows, list) else []


def _is_row(table: str, row: Any) -> bool:
    return isinstance(row, dict) and row.keys() == set(_COLUMNS[table]) and all(
        _is_number(value) if name in _NUMBERS else _is_text(value)
        for name, value in row.items())  # fmt: skip


def _is_number(value: Any) -> bool:
    """Whether SQLite has such a number, or none."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and abs(value) < 1 << 63)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


# ---- a server


def fetch(subject: Subject) -> Tables | None:
    """What others found of a subject in an environment like this one, by the server."""
    if not remote.enabled() or not subject.key:
        return None
    key = _remote_key(subject)
    data = None if key in _not_there else remote.get(key)
    if data is None:
        _not_there.add(key)
        return None
    tables = cleaned(_parsed(data.decode(errors="replace")))
    found = {t: [row for row in rows if _is_about(row, subject)] for t, rows in tables.items()}
    if not remote.is_signed():  # of whom, nobody knows: what fails and what is right is seen here
        found["trials"] = [{**row, "checked": 0} for row in found["trials"] if not row["reason"]]
    return found if any(found.values()) else None


def _is_about(row: dict[str, Any], subject: Subject) -> bool:
    here = environment(subject.device)
    return row["subject"] == subject.key and row.get("environment", here) == here


_not_there: set[str] = set()  # on the server, when it was asked: it is asked once
caches.register(_not_there.clear)


def had_from_others(subject: Subject) -> bool:
    """Whether others had something of a subject, which now is in our records."""
    tables = fetch(subject)
    if tables is None:
        return False
    take(tables)
    return True


def offer(subject: Subject, tables: Tables) -> None:
    """Let others have what was found of a subject in this environment."""
    if remote.enabled() and subject.key:
        here = environment(subject.device)
        own = {table: [r for r in rows if r.get("environment", here) == here]
               for table, rows in tables.items()}  # fmt: skip
        key = _remote_key(subject)
        remote.put(key, json.dumps(own).encode())
        _not_there.discard(key)


def share(subject: Subject) -> None:
    """Let others have all that is recorded of a subject."""
    if remote.enabled():
        offer(subject, rows_of(subject))


def _remote_key(subject: Subject) -> str:
    return "tuned:" + store.key(subject.key, environment(subject.device), config.cache_key_tag)


# ---- the environment


def environment(device: torch.device) -> str:
    """All that a time depends on beside the kernel: the processor and the versions, as text."""
    if device.type == "cuda":
        # torch types this index as int, but it is None for a plain "cuda": the current card
        index = cast("int | None", device.index)
        return _card(torch.cuda.current_device() if index is None else index)
    return f"{_cpu()} | {torch.get_num_threads()} threads | torch {torch.__version__}"


@functools.cache
def _card(index: int) -> str:
    card = torch.cuda.get_device_properties(index)
    parts = [card.name, f"sm_{card.major}{card.minor}", f"{card.multi_processor_count} SMs",
             f"torch {torch.__version__}", f"triton {_version('triton')}",
             f"driver {_driver()}"]  # fmt: skip
    return " | ".join(parts)


@functools.cache
def _cpu() -> str:
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        match = re.search(r"Module[^\n]*?\s(\d+(?:\.\d+)+)", text)
        if match:
            return match[1]
    return "unknown"


# ---- the file


class _File:
    """The database of the cache folder in use, opened once per process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._open: _Open | None = None
        self._path = Path()  # of the file that was last opened, or tried
        self._inherited: list[_Open] = []  # a parent's: to close them would be to meddle with its
        # when it is read again, and written to, after others did not let go of it
        self._until = {False: 0.0, True: 0.0}

    def is_left_alone(self, writes: bool) -> bool:
        return time.monotonic() < self._until[writes]

    def leave_alone(self, writes: bool, why: Exception) -> None:
        """Others hold it, and do not go on: nobody waits for them again for a while."""
        self._until[writes] = time.monotonic() + PAUSE
        log.warning("the tuning records are not %s for %g s: %s",
                    "written to" if writes else "read", PAUSE, why)  # fmt: skip

    def connection(self) -> sqlite3.Connection:
        path = store.root() / "tuning.db"
        if self._open is not None:
            if self._open.is_still(path):
                return self._open.db
            self.close()
        try:
            self._path = path
            db = _opened(path)
        except _OtherVersion:  # of this program: each keeps its own
            self._path = path.with_name(f"tuning-{VERSION}.db")
            db = _opened(self._path)
        self._open = _Open(path, os.getpid(), _number(self._path), self._path, db)
        return db

    def forget(self) -> None:
        self._until = {False: 0.0, True: 0.0}
        self.close()

    def close(self) -> None:
        with self.lock:
            if self._open is not None and self._open.process == os.getpid():
                self._open.db.close()
            elif self._open is not None:
                self._inherited.append(self._open)
            self._open = None

    def set_aside(self, why: Exception) -> None:
        """Move a broken file away, with what belongs to it."""
        path = self._path
        self.close()
        to = path.with_name(f"{path.name}.broken-{int(time.time())}-{os.getpid()}")
        for suffix in _FILES:
            with contextlib.suppress(OSError):
                os.replace(f"{path}{suffix}", f"{to}{suffix}")
        log.warning("the tuning records cannot be read (%s); they are now %s, and new ones are "
                    "begun: what they held will be measured again", why, to)  # fmt: skip


@dataclass(frozen=True)
class _Open:
    """A file that is open, and which it is: another may have come in its place."""

    asked: Path
    process: int
    number: int
    path: Path
    db: sqlite3.Connection

    def is_still(self, asked: Path) -> bool:
        return (self.asked == asked and self.process == os.getpid()
                and self.number == _number(self.path))  # fmt: skip


def _number(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return -1


class _OtherVersion(sqlite3.DatabaseError):
    """The tables are those of another version of this program."""


def _opened(path: Path) -> sqlite3.Connection:
    for suffix in _FILES:
        with contextlib.suppress(FileNotFoundError):
            _look_at_file(Path(f"{path}{suffix}"))
    db = sqlite3.connect(path, timeout=_PATIENCE, check_same_thread=False)
    try:
        with contextlib.suppress(OSError):
            os.chmod(path, 0o600)
        found = db.execute("pragma user_version").fetchone()[0]
        if found not in (0, VERSION):
            raise _OtherVersion(f"it is of version {found}, not {VERSION}")
        db.execute("pragma journal_mode = wal")
        db.execute("pragma synchronous = normal")
        if found == 0:
            db.executescript(f"begin immediate; {_TABLES} pragma user_version = {VERSION}; commit;")
        _look_at_tables(db)
        db.execute("pragma busy_timeout = 0")
        with contextlib.suppress(sqlite3.OperationalError):  # somebody writes: next time
            db.execute(_INDEX)
        db.execute(f"pragma busy_timeout = {int(1000 * _PATIENCE)}")
    except BaseException:
        db.close()
        raise
    return db


def _look_at_file(path: Path) -> None:
    """Raises where it is none, or another user's: the folder is ours, so it can be moved away."""
    facts = os.lstat(path)
    if not stat.S_ISREG(facts.st_mode):
        raise sqlite3.DatabaseError(f"{path.name} is no file")
    if facts.st_uid != os.geteuid():
        raise sqlite3.DatabaseError(f"it belongs to another user ({facts.st_uid})")
    if facts.st_mode & 0o600 != 0o600:  # of who had an unusual umask, and was killed before this
        os.chmod(path, 0o600)


def _look_at_tables(db: sqlite3.Connection) -> None:
    """Raises where they are another program's, or gone."""
    for table, columns in _COLUMNS.items():
        found = tuple(row[1] for row in db.execute(f"pragma table_info({table})"))
        if found != columns:
            raise sqlite3.DatabaseError(f"its table {table!r} is not ours")


_file = _File()
caches.register(_file.forget)


def _from_layers(query: str, where: tuple[str, ...]) -> list[list[Any]]:
    """What the databases of read-only folders answer."""
    found: list[list[Any]] = []
    for folder in store.layers():
        path = folder / "tuning.db"
        with contextlib.suppress(sqlite3.Error, OSError):
            if path.exists():
                name = urllib.parse.quote(os.fsencode(path))
                db = sqlite3.connect(f"file:{name}?mode=ro&immutable=1", uri=True)
                with contextlib.closing(db):
                    found.append(db.execute(query, where).fetchall())
    return found


def _with(work: Callable[[sqlite3.Connection], T], otherwise: T, writes: bool = False) -> T:
    """Do something with the database. One that is broken is begun anew; one that cannot be used
    now (locked, full disk, read-only) is done without."""
    with _file.lock:
        for _ in range(2):
            if _file.is_left_alone(writes):
                break
            began = time.monotonic()
            try:
                return work(_file.connection())
            except sqlite3.OperationalError as error:
                metrics.counters["tune"][f"records not used: {error}"] += 1
                if "locked" in str(error) and time.monotonic() - began >= 0.9 * _PATIENCE:
                    _file.leave_alone(writes, error)
                return otherwise
            except (UnicodeError, OverflowError) as error:  # what no table can have
                metrics.counters["tune"][f"records not used: {type(error).__name__}"] += 1
                return otherwise
            except sqlite3.DatabaseError as error:
                _file.set_aside(error)
    return otherwise


# ---- the log of decisions


def log_path() -> Path:
    return store.root() / "tuning.jsonl"


def write_log(entry: Mapping[str, Any]) -> None:
    """One line. Lines of several processes do not mix: each is one write at the end."""
    path = log_path()
    line = (_json({"at": time.time(), **entry}) + "\n").encode()
    try:
        if path.exists() and path.stat().st_size + len(line) > LOG_BYTES:
            os.replace(path, path.with_name(path.name + ".1"))
        # a pipe in its place would be waited for, once it is full
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        handle = os.open(path, flags, 0o600)
        try:
            os.fchmod(handle, 0o600)  # whatever the umask
            end = os.fstat(handle).st_size
            torn = (
                end > 0 and os.pread(handle, 1, end - 1) != b"\n"
            )  # by who was killed, or a full disk
            os.write(handle, b"\n" + line if torn else line)
        finally:
            os.close(handle)
    except OSError as error:
        metrics.counters["tune"][f"log not written: {error.strerror}"] += 1


def _json(value: Any) -> str:
    return json.dumps(_plain(value), default=str)


def _plain(value: Any) -> Any:
    """With keys that JSON can have, and floats it can."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
