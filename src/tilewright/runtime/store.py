"""The artefact store: content-addressed files shared by all processes of a user.

A file's name is the hash of everything that went into it, and its end a seal of its contents
(`seal.py`), so a file that is there whole is right, and is never rewritten. Files appear by rename
only, once they are on the disk: a reader sees a whole file or none, whoever else is writing the
same one, and whenever they are killed. What does not match its seal is dropped and made again.

The folder is its owner's alone. One that belongs to somebody else, or that others can write to, is
passed over, with a warning, in favour of a folder of this process's own. Read-only folders under it
(`config.cache_read_only_dirs`) are looked into for what it does not have. Nothing of this ever
fails a compilation: what cannot be kept is made again next time.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import itertools
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import BinaryIO

from tilewright import caches, config, metrics
from tilewright.errors import TilewrightError
from tilewright.runtime import remote, seal

log = logging.getLogger("tilewright.store")
ABANDONED = 86400.0  # seconds after which nobody is still writing a draft
TOUCHED = 3600.0  # seconds after which a use of a file is worth writing down
SWEEP = 3600.0  # seconds after which a folder is measured again
KEPT = 0.8  # part of its limit that a folder is brought back to
SHORT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room
MEMORY = "/dev/shm"
_UNWRITABLE = "it cannot be written to"

_KEY = re.compile(r"[0-9a-f]{40}")
_SUFFIX = re.compile(r"(\.[A-Za-z0-9_-]+)+")
_serial = itertools.count()
_tidied: set[Path] = set()
_refused: set[Path] = set()  # of read-only folders: broken, and not to be dropped
_written: dict[Path, int] = {}  # bytes since the folder was last measured
_lock = threading.Lock()
used: dict[str, Path] = {}  # artefacts that this process has read or written, by file name
on_use: list[Callable[[str, Path], None]] = []  # told of each of them


# ---- folders


def root() -> Path:
    """The folder of the store that is written to; it exists when this returns."""
    if config.force_disable_caches:
        return _private_root(os.getpid())
    folder = _wanted()
    if folder is None or _unusable_because(folder, os.getpid()):
        return _private_root(os.getpid())
    try:
        _make(folder)
    except OSError as error:  # it was there a moment ago
        _warn_once(f"the cache folder {folder} is gone, and cannot be made again ({error.strerror}"
                   "): what is built is for this process alone")  # fmt: skip
        return _private_root(os.getpid())
    return folder


def is_lasting() -> bool:
    """Whether what is kept is there for later processes."""
    return root() not in _of_this_process


_of_this_process: set[Path] = set()


def _wanted() -> Path | None:
    try:
        return config.cache_root()
    except RuntimeError:
        _warn_once("there is no home folder for the cache: what is built is for this process "
                   "alone; set config.cache_dir (or TILEWRIGHT_CACHE_DIR)")  # fmt: skip
        return None


@functools.cache
def _warn_once(text: str) -> None:
    log.warning(text)


@functools.cache
def _unusable_because(folder: Path, pid: int) -> str:
    """Why a folder is not written to, or nothing; told once."""
    why, advice = "", "set config.cache_dir (or TILEWRIGHT_CACHE_DIR) to one that can"
    try:
        _make(folder)
        why = distrusted(folder)
        if why:
            advice = f"`chmod go-w {folder}`, or set config.cache_dir to a folder of your own"
        else:
            if stat.S_IMODE(os.stat(folder).st_mode) & 0o077:
                with contextlib.suppress(OSError):
                    os.chmod(folder, 0o700)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 16))
            seal.key_of(folder)
    except OSError as error:
        why = f"{_UNWRITABLE} ({error.strerror or error})"
    if why:
        log.warning("the cache folder %s is not used: %s; what is not there is built for this "
                    "process alone: %s", folder, why, advice)  # fmt: skip
    return why


def distrusted(folder: Path, owners: tuple[int, ...] = ()) -> str:
    """Why what is in a folder may be somebody else's, or nothing."""
    facts = os.stat(folder)
    if facts.st_uid not in (os.geteuid(), *owners):
        return f"it belongs to another user ({facts.st_uid})"
    if facts.st_mode & 0o022:
        return "others can write to it"
    return ""


def layers() -> list[Path]:
    """Folders that are only read, in order: that of the options where it cannot be written to, and
    `config.cache_read_only_dirs`. Each is this user's or the system's, and nobody else's."""
    if config.force_disable_caches:
        return []
    named = [Path(p).expanduser() for p in config.cache_read_only_dirs.split(os.pathsep) if p]
    own = _wanted()
    if own is not None and _unusable_because(own, os.getpid()).startswith(_UNWRITABLE):
        named.insert(0, own)
    return [folder for folder in named if not _distrusted_layer(folder)]


@functools.cache
def _distrusted_layer(folder: Path) -> str:
    try:
        why = distrusted(folder, owners=(0,))
    except OSError:
        return "it is not there"
    if why:
        log.warning("the read-only cache folder %s is not used: %s", folder, why)
    return why


for _memo in (_unusable_because, _distrusted_layer, _warn_once):
    caches.register(_memo.cache_clear)
caches.register(_refused.clear)
caches.register(used.clear)


def _make(folder: Path) -> None:
    """A folder, and those it is in, that its owner can use whatever the umask takes away."""
    if folder.is_dir():
        return
    _make(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        os.chmod(folder, 0o700)
    if not folder.is_dir():  # a file, or a link that leads nowhere
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


@functools.cache
def _private_root(pid: int) -> Path:
    """A folder for this process alone, deleted when it ends; in memory where the disk is full."""
    try:
        folder = _temporary(None)
    except OSError:
        return _memory_root(pid)
    _remove_at_exit(folder, pid)
    return folder


@functools.cache
def _memory_root(pid: int) -> Path:
    try:
        folder = _temporary(MEMORY)
    except OSError as error:
        raise TilewrightError(
            f"there is no place for what is built: neither the cache folder nor a temporary one "
            f"can be written to, nor {MEMORY} ({error.strerror or error})",
            hint="make room, or set config.cache_dir (or TILEWRIGHT_CACHE_DIR) to a folder you "
            "can write to",
        ) from error
    _remove_at_exit(folder, pid)
    return folder


def _temporary(where: str | None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tilewright-", dir=where))
    os.chmod(folder, 0o700)  # whatever the umask
    return folder


def _remove_at_exit(folder: Path, pid: int) -> None:
    _of_this_process.add(folder)

    def remove() -> None:
        if os.getpid() == pid:  # a forked child must not delete its parent's folder
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


# ---- names


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
    here = _in(root(), key, suffix)
    if not here.exists():
        for folder in layers():
            found = _in(folder, key, suffix)
            with contextlib.suppress(OSError):
                if found not in _refused and found.exists():
                    return found
    return here


def _in(folder: Path, key: str, suffix: str) -> Path:
    if not _KEY.fullmatch(key) or not _SUFFIX.fullmatch(suffix):
        raise ValueError(f"{key + suffix!r} is no name of an artefact")
    # A level of folders keeps each of them small after years of use.
    return folder / key[:2] / f"{key}{suffix}"


def split(name: str) -> tuple[str, str] | None:
    """Key and suffix of an artefact's file name; None for any other name."""
    found, dot, suffix = name.partition(".")
    valid = _KEY.fullmatch(found) and _SUFFIX.fullmatch(dot + suffix)
    return (found, dot + suffix) if valid else None


# ---- writing


def put_atomic(target: Path, content: bytes | Callable[[Path], object], *, plain: bool = False,
               share: bool = True) -> Path:  # fmt: skip
    """Put a file in place in one step, sealed, unless it is `plain` text for people, and `share` it
    through the server, where there is one.

    `content` is its bytes, or a function that writes the file whose path it is given. If that
    raises, nothing is left behind. When several processes put the same file, the last one stays.
    """
    if target.parent.parent in layers():  # it is there, but not good: ours goes before it
        target = root() / target.parent.name / target.name
    draft = target.with_name(f".{target.name}.{_own_name(os.getpid())}.{next(_serial)}.tmp")
    size = 0
    try:
        for attempt in (1, 2):
            try:
                _make_folder_of(target)
                if callable(content):
                    content(draft)
                else:
                    _write(draft, content)
                if not plain:
                    size = seal.seal(draft, target.name, _key_for(target))
                _replace(draft, target)
                break
            except FileNotFoundError:  # somebody emptied the cache meanwhile
                if attempt == 2:
                    raise
    except OSError as error:
        raise unusable(target.parent.parent, error) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    _tidy(target.parent)
    _wrote(target, size)
    if not plain:
        _use(target)
        if share and remote.shares_kernels() and target.parent.parent == root():
            remote.put(f"file:{target.name}", target.read_bytes()[:size])
    return target


def keep(target: Path, data: bytes, *, plain: bool = False, share: bool = True) -> bool:
    """Put a file in place if that can be done: what is kept only saves time."""
    try:
        put_atomic(target, data, plain=plain, share=share)
    except TilewrightError as error:
        metrics.counters["store"]["not kept"] += 1
        _warn_once(f"what is built is not kept: {str(error).splitlines()[0]}")
        return False
    return True


def build(target: Path, make: Callable[[Path], object]) -> Path:
    """Put a file in place that has to be somewhere: where the disk is full, in a folder for files
    that do not last, or in memory. Gives where it is."""
    try:
        return put_atomic(target, make)
    except TilewrightError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            raise
        metrics.counters["store"]["built elsewhere"] += 1
        _warn_once(f"what is built is not kept: {str(error).splitlines()[0]}")
        for folder in (_private_root, _memory_root):
            with contextlib.suppress(OSError, TilewrightError):
                return put_atomic(folder(os.getpid()) / target.parent.name / target.name, make)
        raise


@functools.cache
def _own_name(pid: int) -> str:
    """Of this process's drafts. Its number says too little: processes of several machines or
    containers that share a folder may have the same one."""
    return f"{pid}.{secrets.token_hex(4)}"


def _make_folder_of(target: Path) -> None:
    folder = target.parent
    if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        _aside(folder)
    _make(folder)


def _write(draft: Path, data: bytes) -> None:
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "wb") as file:
        os.fchmod(handle, 0o600)  # whatever the umask
        file.write(data)


def _replace(draft: Path, target: Path) -> None:
    try:
        os.replace(draft, target)
    except (IsADirectoryError, NotADirectoryError):
        _aside(target)
        os.replace(draft, target)


def _aside(path: Path) -> None:
    """Move what is in the way of an artefact, and none itself."""
    name = f".{path.name}.{_own_name(os.getpid())}.{next(_serial)}.aside"
    os.replace(path, path.with_name(name))


def _key_for(target: Path) -> bytes:
    """The key of the folder of the store that a file is in."""
    folder = target.parent.parent
    try:
        facts = os.stat(folder / seal.KEY)
    except OSError:  # a new folder, one that was just emptied, or a link that leads nowhere
        return seal.key_of(folder)
    return _known_key(folder, facts.st_ino, facts.st_mtime_ns)


@functools.cache
def _known_key(folder: Path, number: int, time: int) -> bytes:
    return seal.key_of(folder)


def unusable(folder: Path, error: OSError) -> TilewrightError:
    return TilewrightError(
        f"the cache folder {folder} cannot be used: {error.strerror or error}",
        hint="set config.cache_dir (or TILEWRIGHT_CACHE_DIR) to a folder you can write to",
    )


# ---- reading


def get(target: Path) -> bytes | None:
    """The bytes of an artefact, or None when it is not there, or is not what was put there."""
    opened = _opened(target)
    if opened is None:
        return None
    file, length = opened
    with file:
        file.seek(0)
        data = file.read(length)
    _use(target)
    return data


def is_good(target: Path) -> bool:
    """Whether an artefact is there and is what was put there; it may be loaded by its path."""
    opened = _opened(target)
    if opened is None:
        return False
    opened[0].close()
    _use(target)
    return True


@contextlib.contextmanager
def loadable(file: Path) -> Generator[str]:
    """The path to load a library by, which then is done without: that of a copy in memory where
    nothing is executed from its file system."""
    if not os.statvfs(file.parent).f_flag & os.ST_NOEXEC:
        yield str(file)
        return
    with open(os.memfd_create(file.name), "wb") as copy:
        with open(file, "rb") as source:
            shutil.copyfileobj(source, copy)
        copy.flush()
        # The loader takes a path that it has seen for the library it had there, and numbers of
        # files come again: these mean the same, and are never written alike.
        written = "".join((".//", "./")[bit == "1"] for bit in f"{next(_serial):b}")
        yield f"/proc/self/fd/{written}{copy.fileno()}"


def _opened(target: Path) -> tuple[BinaryIO, int] | None:
    try:
        handle = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return _opened(target) if _fetched(target) else None
    except OSError:
        return None  # a link, or not ours to read
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode):
        os.close(handle)
        _drop(target, "it is no file")
        return None
    file = open(handle, "rb")  # noqa: SIM115  (who asked closes it)
    try:
        own = _is_own(target)
        if facts.st_uid not in (os.geteuid(), *(() if own else (0,))) or facts.st_mode & 0o022:
            raise seal.Broken("it is another user's, or others can write to it")
        return file, seal.check(file, target.name, _key_for(target) if own else None)
    except (seal.Broken, OSError) as why:
        file.close()
        _drop(target, str(why))
        return None


def _fetched(target: Path) -> bool:
    """Whether a file that is not there was had from the server, and put in its place."""
    if not remote.shares_kernels() or target.parent.parent != root():
        return False
    data = remote.get(f"file:{target.name}")
    if data is None:
        return False
    return keep(target, data, share=False)


def _is_own(target: Path) -> bool:
    """Whether a file is in a folder that this process writes to."""
    folder = target.parent.parent
    return folder == root() or folder not in layers()


def _drop(target: Path, why: str) -> None:
    metrics.counters["store"]["dropped"] += 1
    log.warning("%s is made again: %s", target, why)
    if not _is_own(target):
        _refused.add(target)
        return
    with contextlib.suppress(OSError):
        if target.is_dir():
            _aside(target)
        else:
            target.unlink()


def _use(target: Path) -> None:
    used[target.name] = target
    for tell in on_use:
        tell(target.name, target)
    with contextlib.suppress(OSError):
        if abs(time.time() - target.stat().st_mtime) > TOUCHED and _is_own(target):
            os.utime(target)


# ---- keeping it small


def _tidy(folder: Path) -> None:
    """Remove drafts of processes that were killed, the first time that one writes to a folder."""
    if folder in _tidied:
        return
    _tidied.add(folder)
    with contextlib.suppress(OSError):
        for draft in (*folder.glob(".*.tmp"), *folder.glob(".*.aside")):
            if time.time() - draft.lstat().st_mtime > ABANDONED:
                if draft.is_dir() and not draft.is_symlink():
                    shutil.rmtree(draft, ignore_errors=True)
                else:
                    draft.unlink(missing_ok=True)


def _wrote(target: Path, size: int) -> None:
    """Measure the folder now and then, and forget what was not used for longest."""
    limit = config.cache_max_bytes
    folder = target.parent.parent
    with _lock:
        first = folder not in _written
        _written[folder] = _written.get(folder, 0) + size
        if limit is None or not (_written[folder] > limit // 16 or (first and _is_due(folder))):
            return
        _written[folder] = 0
    with contextlib.suppress(OSError):
        _write(folder / ".swept", b"")
        sweep(folder, limit, spare=target)


def _is_due(folder: Path) -> bool:
    try:
        return abs(time.time() - (folder / ".swept").stat().st_mtime) > SWEEP
    except OSError:
        return True


def sweep(folder: Path, limit: int, spare: Path | None = None) -> int:
    """Bring a folder below its limit: what was not used for longest goes. Gives its bytes."""
    found = [(facts.st_mtime, facts.st_size, file) for file, facts in files(folder)]
    total = sum(size for _, size, _ in found)
    if total <= limit:
        return total
    for _, size, file in sorted(found):
        if total <= KEPT * limit:
            break
        if file != spare:
            with contextlib.suppress(OSError):
                file.unlink()
                total -= size
                metrics.counters["store"]["evicted"] += 1
    return total


def files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The artefacts of a folder, and text beside them."""
    with contextlib.suppress(OSError):
        for part in os.scandir(folder):
            if len(part.name) == 2 and part.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    for entry in os.scandir(part.path):
                        if split(entry.name) and entry.is_file(follow_symlinks=False):
                            with contextlib.suppress(OSError):
                                yield Path(entry.path), entry.stat()
