"""Seals: what stands at the end of every artefact, so that nothing else is ever taken for it.

A seal holds the length of what precedes it, its digest, and a signature of that digest by a key of
the cache folder, which only its owner can read. The digest is of the file's name too: an artefact
that was put in the place of another is as foreign as one that was cut short. Loaders of ELF files
and of pickles do not look beyond their end, so a sealed file is loaded as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import struct
from pathlib import Path
from typing import BinaryIO

MAGIC = b"TWSEAL01"
_FORM = struct.Struct("<8sQ32s32s")
SIZE = _FORM.size
KEY = ".key"  # the file of a folder's key
_BLOCK = 1 << 20


class Broken(Exception):
    """Why a file is not what its name says."""


def seal(draft: Path, name: str, key: bytes) -> int:
    """Seal a file that was just written, for the name it is to have; have it on the disk, and for
    its owner alone. Gives the length of what was sealed."""
    with open(draft, "r+b") as file:
        os.fchmod(file.fileno(), 0o600)
        length = os.fstat(file.fileno()).st_size
        digest = _digest(file, name, length)
        file.seek(length)
        file.write(_FORM.pack(MAGIC, length, digest, _sign(key, digest)))
        file.flush()
        os.fsync(file.fileno())
    return length


def sealed(data: bytes, name: str, key: bytes) -> bytes:
    """The bytes of a sealed file."""
    digest = hashlib.sha256(name.encode() + b"\0" + data).digest()
    return data + _FORM.pack(MAGIC, len(data), digest, _sign(key, digest))


def check(file: BinaryIO, name: str, key: bytes | None) -> int:
    """The length of what is sealed; without a key its signature is not looked at. Raises `Broken`
    for anything but a whole and unchanged file of that name."""
    size = os.fstat(file.fileno()).st_size
    if size < SIZE:
        raise Broken("it is cut short")
    file.seek(size - SIZE)
    magic, length, digest, signature = _FORM.unpack(file.read(SIZE))
    if magic != MAGIC or length != size - SIZE:
        raise Broken("it is cut short, or was not written by this program")
    if not hmac.compare_digest(_digest(file, name, length), digest):
        raise Broken("its contents are not those that were written under this name")
    if key is not None and not hmac.compare_digest(_sign(key, digest), signature):
        raise Broken("it is not signed with this folder's key")
    return length


def _digest(file: BinaryIO, name: str, length: int) -> bytes:
    digest = hashlib.sha256(name.encode() + b"\0")
    file.seek(0)
    while length > 0:
        block = file.read(min(length, _BLOCK))
        if not block:
            raise Broken("it is cut short")
        digest.update(block)
        length -= len(block)
    return digest.digest()


def _sign(key: bytes, digest: bytes) -> bytes:
    return hmac.digest(key, digest, "sha256")


def key_of(folder: Path) -> bytes:
    """The key of a cache folder, made if there is none that this user alone can read."""
    path = folder / KEY
    found = _read_key(path)
    for _ in range(2):
        if found is not None:
            return found
        draft = folder / f"{KEY}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "wb") as file:
                os.fchmod(handle, 0o600)  # whatever the umask
                file.write(secrets.token_bytes(32))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)  # of several processes the first one's stays
            found = _read_key(path)
            if found is None:  # somebody else's, or no key at all
                if path.is_dir() and not path.is_symlink():
                    os.replace(path, draft.with_suffix(".aside"))
                os.replace(draft, path)
                found = _read_key(path)
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
    raise OSError(f"{path} cannot be read")


def _read_key(path: Path) -> bytes | None:
    try:
        # a pipe would be waited for
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        facts = os.fstat(handle)
        own = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()
        data = os.read(handle, 64) if own else b""
    except OSError:
        return None
    finally:
        os.close(handle)
    return data if not facts.st_mode & 0o077 and len(data) == 32 else None
