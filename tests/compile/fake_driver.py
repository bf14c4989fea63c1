"""A stand-in for the CUDA driver, so that all of the host side runs without a card."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tilewright.runtime import driver


class _Launch(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint),
                ("shared", ctypes.c_uint), ("attributes", ctypes.c_uint),
                ("stream", ctypes.c_uint64), ("words", ctypes.c_uint64 * 40)]  # fmt: skip


@dataclass(frozen=True)
class Launch:
    name: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    attributes: int
    stream: int
    words: tuple[int, ...]  # eight bytes of each parameter


class FakeDriver:
    def __init__(self, made: driver.Driver) -> None:
        self.library = made.library
        self.library.fake_launch.restype = ctypes.POINTER(_Launch)

    @property
    def launches(self) -> list[Launch]:
        found = [self.library.fake_launch(k)[0] for k in range(self.library.fake_launches())]
        return [Launch(f.name.decode(), tuple(f.grid), f.block, f.shared, f.attributes, f.stream,
                       tuple(f.words)) for f in found]  # fmt: skip

    def clear(self) -> None:
        self.library.fake_clear()

    def fail_next(self, code: int) -> None:
        self.library.fake_fail(code)

    @property
    def loads(self) -> int:
        return self.library.fake_loads()

    @property
    def contexts_set(self) -> int:
        return self.library.fake_contexts()

    @property
    def shared_asked(self) -> int:
        return self.library.fake_shared()


@functools.cache
def _library() -> str:
    folder = tempfile.mkdtemp(prefix="fake-driver-")
    made = f"{folder}/libfakecuda.so"
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-w", source, "-o", made], check=True)
    return made


@contextmanager
def fake_driver() -> Iterator[FakeDriver]:
    with driver.use(_library()) as made:
        fake = FakeDriver(made)
        fake.clear()
        yield fake
