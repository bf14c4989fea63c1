"""Moving what was tuned and built to other machines: `pack`, `unpack`, `merge`, `diff`, `validate`.

A pack is one file: a description of the machine it was made on, the records of tuning, and the
artefacts. `unpack` checks every digest, and that this machine is of the same kind, and says what
differs where it is not. A pack holds programs: unpack those of people you would run a program of.
`torch.compiler.save_cache_artifacts` carries the same.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tilewright import config
from tilewright.errors import TilewrightError
from tilewright.host.artifact import compiler_digest
from tilewright.runtime import seal, store
from tilewright.target import Target
from tilewright.tune import memory, records

FORMAT = 1
_MANIFEST, _RECORDS, _FILES = "manifest.json", "records.json", "files/"
MOST = 1 << 30  # bytes of one file of a pack
_FOR_PEOPLE = (".cpp", ".cu", ".lock")  # sources are text, and builds wait for each other at locks


class PackError(TilewrightError):
    """A pack that cannot be used here, and why."""


def machine() -> dict[str, str]:
    """What results and kernels depend on, part by part."""
    found = {
        "format": str(FORMAT),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": torch.__version__,
        "tilewright": compiler_digest()[:12],
        "cpu": Target.host().key,
        "cpu tuning": records.environment(torch.device("cpu")),
    }
    if torch.cuda.is_available():
        found["card"] = records.environment(torch.device("cuda"))
    return found


# Kernels of another CPU may not run here; another version of torch names its graphs differently.
_MUST_MATCH = ("format", "python", "torch", "tilewright", "cpu")


@dataclass(frozen=True)
class Pack:
    """What is in a pack, all of it checked."""

    machine: dict[str, str]
    records: records.Tables
    files: dict[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class Difference:
    """What one pack has and another has not, and what both have and is not the same."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.only_first or self.only_second or self.changed)

    def __str__(self) -> str:
        lines = [*(f"- {n}" for n in self.only_first), *(f"+ {n}" for n in self.only_second),
                 *(f"~ {n}" for n in self.changed)]  # fmt: skip
        return "\n".join(lines) or "no difference"


def pack(path: str | Path, *, used_only: bool = False) -> Pack:
    """Write all that is in the cache folder, or what this process has used of it, to a file."""
    root = store.root()
    found = ((f.name, f) for f, _ in store.files(root)) if not used_only else store.used.items()
    files: dict[str, bytes] = {}
    for name, file in found:
        if file.suffix not in _FOR_PEOPLE and (data := store.get(file)) is not None:
            files[name] = data
    made = Pack(machine(), records.exported(), files)
    _write(Path(path), made)
    return made


def unpack(path: str | Path, *, force: bool = False) -> int:
    """Add what is in a pack to the cache folder: what was tuned on machines of this kind, and what
    was built. Refuses a pack of another kind of machine with the parts that differ, unless forced
    to take its records. Gives how many files and records were new."""
    found = read(path)
    wrong = validate(found)
    if wrong and not force:
        hint = "tune here, or take its records alone with force=True (--force)"
        raise PackError(f"{path} is not for this machine: {'; '.join(wrong)}", hint=hint)
    new, lost = add(found, with_files=not wrong)
    if lost:
        raise PackError(f"{lost} files of {path} could not be written to {store.root()}",
                        hint="make room, or set config.cache_dir (or TILEWRIGHT_CACHE_DIR)"
                        )  # fmt: skip
    return new


def add(found: Pack, *, with_files: bool = True) -> tuple[int, int]:
    """How many files and records are new, and how many files could not be written."""
    count, lost = records.take(found.records), 0
    for name, data in found.files.items() if with_files else ():
        key = store.split(name)
        assert key is not None  # `read` has looked
        target = store.path(*key)
        if not target.exists():
            kept = store.keep(target, data)
            count, lost = count + kept, lost + (not kept)
    return count, lost


def validate(found: Pack | str | Path) -> list[str]:
    """Why a pack is not for this machine, part by part; nothing where it is."""
    pack = found if isinstance(found, Pack) else read(found)
    here = machine()
    wrong = [f"{part} is {pack.machine.get(part)!r} there and {here.get(part)!r} here"
             for part in _MUST_MATCH if pack.machine.get(part) != here.get(part)]  # fmt: skip
    for part in ("card",):
        if part in pack.machine and part in here and pack.machine[part] != here[part]:
            theirs, ours = pack.machine[part].split(" | "), here[part].split(" | ")
            wrong += [f"{a!r} there is {b!r} here" for a, b in zip(theirs, ours, strict=False)
                      if a != b]  # fmt: skip
    return wrong


def merge(into: str | Path, *packs: str | Path) -> Pack:
    """One pack of several, of one kind of machine; of equal rows the newest stay."""
    found = [read(p) for p in packs]
    for other, path in zip(found[1:], packs[1:], strict=True):
        differ = [part for part in _MUST_MATCH
                  if other.machine.get(part) != found[0].machine.get(part)]  # fmt: skip
        if differ:
            raise PackError(f"{path} is of another kind of machine than {packs[0]}: "
                            f"{', '.join(differ)} differ",
                            hint="merge packs of one kind of machine")  # fmt: skip
    tables: records.Tables = {}
    for one in found:
        for table, rows in one.records.items():
            tables.setdefault(table, []).extend(rows)
    newest = {table: list(_newest(table, rows)) for table, rows in tables.items()}
    files = {name: data for one in found for name, data in one.files.items()}
    made = Pack(found[0].machine, newest, files)
    _write(Path(into), made)
    return made


def _newest(table: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row.get(c) for c in records.KEYS[table])
        if key not in found or row.get("at", 0) >= found[key].get("at", 0):
            found[key] = row
    return iter(found.values())


def diff(first: str | Path, second: str | Path) -> Difference:
    """What two packs differ in: files by name, choices by what they are for."""
    a, b = (_contents(read(p)) for p in (first, second))
    return Difference(tuple(sorted(a.keys() - b.keys())), tuple(sorted(b.keys() - a.keys())),
                      tuple(sorted(n for n in a.keys() & b.keys() if a[n] != b[n])))  # fmt: skip


def _contents(found: Pack) -> dict[str, str]:
    titles = {r["subject"]: r["title"] for r in found.records.get("subjects", [])}
    files = {f"file {name}": hashlib.sha256(data).hexdigest() for name, data in found.files.items()}
    chosen = {
        f"choice for {titles.get(r['subject'], r['subject'])} ({r['subject'][:8]}, "
        f"{r['offered'][:8]}) on {r['environment']}": r["trial"]
        for r in found.records.get("choices", [])
    }
    return {**files, **chosen}


# ---- the file


def _write(path: Path, made: Pack) -> None:
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in made.files.items()}
    tables = json.dumps(made.records).encode()
    manifest = {"machine": made.machine, "at": time.time(), "files": sums,
                "records": hashlib.sha256(tables).hexdigest()}  # fmt: skip
    if not path.name:
        raise PackError(f"{str(path)!r} is no name of a file", hint="name the file to write")
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(draft, "w:gz", compresslevel=3) as tar:
            _put(tar, _MANIFEST, json.dumps(manifest, indent=1).encode())
            _put(tar, _RECORDS, tables)
            for name, data in made.files.items():
                _put(tar, _FILES + name, data)
        draft.replace(path)
    except OSError as error:
        raise PackError(f"{path} cannot be written: {error.strerror or error}",
                        hint="name a file in a folder you can write to") from error  # fmt: skip
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    tar.addfile(member, io.BytesIO(data))


def read(path: str | Path) -> Pack:
    """A pack, with every name and digest checked. Nothing is written, and nothing executed."""
    try:
        # parts of known length one after the other, so that no more is unpacked than is looked at
        with gzip.open(path) as whole, tarfile.open(fileobj=_Limited(whole), mode="r|") as tar:
            parts = dict(_members(tar))
        manifest = json.loads(parts.pop(_MANIFEST))
        tables, sums, kind = parts.pop(_RECORDS), manifest["files"], manifest["machine"]
        files = {name.removeprefix(_FILES): data for name, data in parts.items()}
        broken = [n for n, data in files.items() if hashlib.sha256(data).hexdigest() != sums.get(n)]
        if broken or files.keys() != sums.keys():
            raise ValueError(f"files are missing or changed: {', '.join(broken) or 'some'}")
        if hashlib.sha256(tables).hexdigest() != manifest["records"]:
            raise ValueError("the records are changed")
        rows = records.cleaned(json.loads(tables))
        return Pack({str(k): str(v) for k, v in kind.items()}, rows, files)
    except PackError:
        raise
    except Exception as error:  # whatever a damaged file has tarfile, zlib and json raise
        why = str(error).partition("\n")[0].rstrip(":")  # tarfile tells of all that it tried
        raise PackError(f"{path} is not a pack that can be read: {why}",
                        hint="make one with `tilewright pack FILE`") from error  # fmt: skip


class _Limited(io.RawIOBase):
    """What is unpacked, up to what a cache folder may hold and there is memory for: a small file
    may stand for any amount of zeros."""

    def __init__(self, whole: gzip.GzipFile) -> None:
        self._whole = whole
        room = memory.room(torch.device("cpu"))
        self._left = room if config.cache_max_bytes is None else min(config.cache_max_bytes, room)

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._left:
            raise ValueError("it holds more than the cache folder may, or there is memory for")
        data = self._whole.read(size)
        self._left -= len(data)
        return data


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """Members by name: none that is no plain file, or whose name is none of ours."""
    for member in tar:
        name = member.name
        inside = name.startswith(_FILES) and store.split(name.removeprefix(_FILES)) is not None
        ours = inside or name in (_MANIFEST, _RECORDS)
        file = tar.extractfile(member) if member.isreg() and ours and member.size <= MOST else None
        if file is None:
            raise ValueError(f"{name!r} does not belong there")
        yield name, file.read()


# ---- torch's own way

_KIND = "tilewright"


def carry() -> None:
    """Have `torch.compiler.save_cache_artifacts` carry what this process reads and writes, and
    `load_cache_artifacts` put it in our folder."""
    from torch.compiler import _cache

    if _KIND in _cache.CacheArtifactFactory._artifact_types:
        return

    @_cache.CacheArtifactFactory.register
    class _Artifact(_cache.CacheArtifact):  # pyright: ignore[reportUnusedClass]
        def populate_cache(self) -> None:
            name = store.split(self.key)
            if name is not None:
                store.keep(store.path(*name), self.content)
            elif self.key.startswith("records "):
                with contextlib.suppress(ValueError, RecursionError, AttributeError):
                    records.take(json.loads(self.content))

        @staticmethod
        def type() -> str:
            return _KIND

    def note(name: str, path: Path) -> None:
        with contextlib.suppress(OSError):
            data = path.read_bytes()[: -seal.SIZE]
            _cache.CacheArtifactManager.record_artifact(_KIND, name, data)

    def recorded(subject: str) -> None:
        data = json.dumps(records.exported(subject)).encode()
        _cache.CacheArtifactManager.record_artifact(_KIND, f"records {subject}", data)

    store.on_use.append(note)
    records.on_choice.append(recorded)
