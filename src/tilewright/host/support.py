"""What a generated host program imports. Small and fast: it runs at every call."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch.utils._pytree import key_get

log = logging.getLogger("tilewright.run")

try:  # the same allocation with less argument parsing; private, so it may go away
    from torch._C._dynamo.guards import _empty_strided_cpu as empty_cpu  # type: ignore[import]
except ImportError:

    def empty_cpu(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)


try:
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_cuda  # type: ignore[import]
except ImportError:

    def empty_cuda(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def raw_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# the same without making a Python object of the stream; private, so it may go away
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", raw_stream)


def exchange_device(device: int) -> int:
    """Make a CUDA device the current one, and say which was."""
    return torch.cuda._exchange_device(device)


class Turn(threading.local):
    """What programs of this thread work in, which no result is part of. Recordings for one stream
    run one after the other, and have it in common."""

    stream: int | None = None  # that something is recorded for
    scratch: torch.Tensor | None = None
    used = 0  # bytes that programs have asked for

    @contextlib.contextmanager
    def recorded(self, stream: int, scratch: torch.Tensor | None) -> Generator[None]:
        self.stream, self.scratch, self.used = stream, scratch, 0
        try:
            yield
        finally:
            self.stream = self.scratch = None


turn = Turn()
APART = 512  # bytes from which to which memory is handed out


def scratch_cuda(size: tuple[int], stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Bytes that a program has while it runs."""
    start = turn.used
    turn.used += -(-size[0] // APART) * APART
    if turn.scratch is None or turn.used > turn.scratch.numel():
        return empty_cuda(size, stride, dtype)
    return turn.scratch[start : start + size[0]]


class Counters:
    """Integers of one program that are zero, and that its kernels leave zero."""

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)
        self._kept: dict[tuple[int, bool], torch.Tensor] = {}  # by stream, and of its recordings

    def get(self, stream: int, count: int) -> torch.Tensor:
        """Those of a stream. While a graph is recorded nothing can be kept that is made: what an
        earlier call has made for recordings of the stream is taken, so that no replay has to clear
        it. Of graphs that others record nobody knows where they will run: each has its own."""
        recording = torch.cuda.is_current_stream_capturing()
        mine = turn.stream if recording else stream
        found = None if mine is None else self._kept.get((mine, recording))
        if found is not None and found.numel() >= count:
            return found
        found = torch.zeros(count, dtype=torch.int32, device=self._device)
        if not recording:
            self._kept[stream, False] = found
            self._kept[stream, True] = torch.zeros_like(found)
        return found


def empty(size: Any, stride: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def laid_out(t: torch.Tensor | None, size: Any, stride: Any) -> torch.Tensor | None:
    """`t` with the layout the program was compiled for; a copy if an op gave another. Some give
    nothing for a result that was not asked for."""
    if t is None or t.stride() == stride or t.numel() == 0:
        return t
    if all(a == b or n == 1 for a, b, n in zip(t.stride(), stride, t.size(), strict=True)):
        return t
    return torch.empty_strided(size, stride, dtype=t.dtype, device=t.device).copy_(t)


def sized(t: torch.Tensor, size: Any, site: str) -> None:
    """Sizes that depend on values are those that the program was told of (`torch._check`)."""
    if t.size() != size:
        raise RuntimeError(f"a result has sizes {tuple(t.size())} where the program was told of "
                           f"{tuple(size)}  {site}")  # fmt: skip


try:  # the same without the dispatcher, 0.5 instead of 3 us; private too
    from torch._C._dynamo.guards import _reinterpret_tensor as window  # type: ignore[import]
except ImportError:

    def window(t: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
        """A view of the memory of `t`, whose own first element is at `offset` zero."""
        return torch.as_strided(t, size, stride, t.storage_offset() + offset)


class OutOfRangeError(IndexError, RuntimeError):
    """Eager raises one or the other, depending on the operator."""


def recast(t: torch.Tensor, size: Any, stride: Any, dtype: torch.dtype,
           start: int) -> torch.Tensor:  # fmt: skip
    """The memory of `t` from byte `start` on with another type and layout."""
    begin = (t.storage_offset() * t.element_size() + start) // dtype.itemsize
    made = torch.empty(0, dtype=dtype, device=t.device)
    return made.set_(t.untyped_storage(), begin, size, stride)  # type: ignore[call-overload]


class Flag:
    """A cell a kernel writes to when it meets bad data."""

    def __init__(self) -> None:
        self.cell = ctypes.c_int64(0)
        self.address = ctypes.addressof(self.cell)

    def check(self, kernel: str, location: str) -> None:
        code = self.cell.value
        if not code:
            return
        self.cell.value = 0
        raise bad_data(code, kernel, location)


BLOCKING = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") == "1"


class DeviceFlag:
    """Cells that kernels of a card write to when they meet bad data, one per kernel.

    They are in host memory the card can reach. The card runs behind the host, so what it met
    is an error of the next call, recorded or not; with CUDA_LAUNCH_BLOCKING=1 of the call itself.
    What no call is left to raise is logged at the end of the process.
    """

    def __init__(self, kernels: dict[str, str]) -> None:
        self.kernels = kernels  # name -> location in the user's program
        self.cells = pinned(len(kernels))
        start = self.cells.data_ptr()
        self.seen = (ctypes.c_int64 * len(kernels)).from_address(start)
        self.addresses = [start + 8 * k for k in range(len(kernels))]
        self.place = (start, len(kernels))
        _flags.add(self)

    def check(self) -> None:
        if any(self.seen):
            error = self.taken()
            if error is not None:
                raise error

    def check_now(self) -> None:
        """At the end of a call, where the host waits for every kernel anyway."""
        if BLOCKING:
            self.check()

    def taken(self) -> Exception | None:
        """What was met, once."""
        for k, (name, location) in enumerate(self.kernels.items()):
            code, self.seen[k] = self.seen[k], 0
            if code:
                return bad_data(code, name, location, "" if BLOCKING else EARLIER)
        return None


EARLIER = (" in an earlier call: a card runs behind the host; with CUDA_LAUNCH_BLOCKING=1 in the "
           "environment the call itself raises")  # fmt: skip
_flags: weakref.WeakSet[DeviceFlag] = weakref.WeakSet()


@atexit.register
def _report() -> None:
    for flag in list(_flags):
        error = flag.taken()
        if error is not None:
            log.error("%s", error)


def pinned(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64, pin_memory=True)


def bad_data(code: int, kernel: str, location: str, when: str = "") -> Exception:
    where = f" ({location})" if location else ""
    if code & 1:
        return OutOfRangeError(f"index or value out of range in {kernel}{where}{when}")
    return RuntimeError(f"ZeroDivisionError: integer division by zero in {kernel}{where}{when}")


def on_device(call: Callable[[list[Any]], Any], device: int) -> Callable[[list[Any]], Any]:
    """The program with a CUDA device made the current one around it."""

    def run(args: list[Any]) -> Any:
        before = exchange_device(device)
        try:
            return call(args)
        finally:
            exchange_device(before)

    return run


def resolve(path: str) -> Any:
    """An object by its dotted path, such as `torch.ops.aten.mm.default` or `operator:add`."""
    module, _, name = path.partition(":")
    if not name:
        found: Any = torch
        for part in path.split(".")[1:]:
            found = getattr(found, part)
        return found
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


__all__ = [
    "Counters",
    "DeviceFlag",
    "Flag",
    "empty",
    "empty_cpu",
    "empty_cuda",
    "exchange_device",
    "key_get",
    "laid_out",
    "math",
    "raw_stream",
    "recast",
    "resolve",
    "scratch_cuda",
    "sized",
    "torch",
    "window",
]
