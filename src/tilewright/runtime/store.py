"""The artefact store: content-addressed files shared by all processes of a user.

A file's name is the hash of everything that went into it, so a file that exists is right and is
never rewritten. Files appear by rename only: a reader sees a whole file or none, whoever else is
writing the same one, and whenever they are killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tilewright import caches, config
from tilewright.errors import TilewrightError

log = logging.getLogger("tilewright.store")
ABANDONED = 86400.0  # seconds after which nobody is still writing a draft

_serial = itertools.count()
_tidied: set[Path] = set()


def root() -> Path:
    """The folder of the store that is written to; it exists when this returns."""
    if config.force_disable_caches:
        return _private_root(os.getpid())
    folder = config.cache_root()
    if not _can_be_written(folder, os.getpid()):
        return _private_root(os.getpid())
    _require_folder(folder)
    return folder


@functools.cache
def _can_be_written(folder: Path, pid: int) -> bool:
    """Whether a file can be: a process that cannot keep what it builds should run all the same."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        log.warning(
            "the cache folder %s cannot be written to (%s): what is not there is built for this "
            "process alone; set config.cache_dir (or TILEWRIGHT_CACHE_DIR) to one that can",
            folder,
            error.strerror or error,
        )
        return False
    return True


caches.register(_can_be_written.cache_clear)


def key(*parts: str | bytes) -> str:
    """The name of what is made from `parts`, in hexadecimal. The lengths are hashed too, so
    moving text from one part to the next gives another key."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:40]


def path(key: str, suffix: str) -> Path:
    """Where the artefact `key` with this suffix is, or will be."""
    # A level of folders keeps each of them small after years of use.
    name = Path(key[:2], f"{key}{suffix}")
    here = root()
    if not config.force_disable_caches and here != config.cache_root():  # which is read only
        with contextlib.suppress(OSError):
            kept = config.cache_root() / name
            if kept.exists():
                return kept
    return here / name


def put_atomic(target: Path, content: bytes | Callable[[Path], object]) -> Path:
    """Put a file in place in one step.

    `content` is its bytes, or a function that writes the file whose path it is given. If that
    raises, nothing is left behind. When several processes put the same file, the last one stays.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}.{next(_serial)}.tmp")
    try:
        if callable(content):
            _require_folder(target.parent)
            content(draft)
        else:
            _write(draft, content)
        try:
            os.replace(draft, target)
        except FileNotFoundError:
            # Somebody emptied the cache between writing and renaming.
            if callable(content):
                _require_folder(target.parent)
                content(draft)
            else:
                _write(draft, content)
            os.replace(draft, target)
    except OSError as error:
        raise _unusable(target.parent, error) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    _tidy(target.parent)
    return target


def _tidy(folder: Path) -> None:
    """Remove drafts of processes that were killed, the first time that one writes to a folder."""
    if folder in _tidied:
        return
    _tidied.add(folder)
    with contextlib.suppress(OSError):
        for draft in folder.glob(".*.tmp"):
            if time.time() - draft.stat().st_mtime > ABANDONED:
                draft.unlink(missing_ok=True)


def get(target: Path) -> bytes | None:
    """The bytes of an artefact, or None when it is not there."""
    try:
        return target.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(target.parent, error) from error


def _write(draft: Path, data: bytes) -> None:
    try:
        draft.write_bytes(data)
    except FileNotFoundError:  # first file of this folder, or the folder was just deleted
        _require_folder(draft.parent)
        draft.write_bytes(data)


def _require_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> TilewrightError:
    return TilewrightError(
        f"the cache folder {folder} cannot be used: {error.strerror or error}",
        hint="set config.cache_dir (or TILEWRIGHT_CACHE_DIR) to a folder you can write to",
    )


@functools.cache
def _private_root(pid: int) -> Path:
    """A folder for this process alone, deleted when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="tilewright-"))

    def remove() -> None:
        if os.getpid() == pid:  # a forked child must not delete its parent's folder
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
