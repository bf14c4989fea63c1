"""A compiled kernel as the host program calls it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tilewright.errors import TilewrightError
from tilewright.gemm.cutedsl import build
from tilewright.gemm.cutedsl.build import Number, Pointer, Request
from tilewright.runtime import driver

log = logging.getLogger("tilewright.build")
FAR = 1 << 39  # bytes: a tensor descriptor's strides have 36 bits, of pieces of 16 bytes


@dataclass(frozen=True)
class CuteSource:
    """Called with tensors and integers in the order of the request's arguments, on the current
    stream. It pickles: a process that did not compile it finds it in the store."""

    name: str
    request: Request
    device: int
    otherwise: Callable[..., Any] | None = None  # for memory that is not aligned as was assumed
    multiples: tuple[tuple[int, int], ...] = ()  # (which integer, of what it has to be a multiple)
    scratch: int = 0  # bytes of memory of its own: the last argument
    near: tuple[int, int] | None = None  # tensors that one descriptor reaches both of

    @property
    def text(self) -> str:
        return self.request.text

    def submit(self) -> Future[Any]:
        """Have it compiled."""
        return build.submit(self.request)

    def __call__(self, *args: Any) -> None:
        self._run(*args)

    @cached_property
    def _run(self) -> Callable[..., None]:
        try:
            loaded = build.load(self.request)
            loaded.ready(self.device)
        except (RuntimeError, OSError, TilewrightError) as error:
            if self.otherwise is None:
                raise
            log.warning("%s is computed by torch's own operations: %s", self.name, error)
            return self.otherwise
        return CuteDSLKernelWrapper(self, loaded)

    def __reduce__(self) -> tuple[Any, ...]:
        return CuteSource, (self.name, self.request, self.device, self.otherwise, self.multiples,
                            self.scratch, self.near)  # fmt: skip


class CuteDSLKernelWrapper:
    """What a call comes down to: addresses, a look at their alignment, one C call."""

    def __init__(self, source: CuteSource, loaded: build.Loaded) -> None:
        self.source = source
        kinds = source.request.arguments
        self._aligned = [(k, a.align - 1) for k, a in enumerate(kinds) if isinstance(a, Pointer)]
        self._function = loaded.function
        self._function.restype = ctypes.c_int
        self._function.argtypes = [
            *(ctypes.c_int32 if a == Number("Int32") else ctypes.c_int64 for a in kinds),
            ctypes.c_void_p,
        ]
        self._device = source.device
        self._card = torch.device("cuda", source.device)

    def __call__(self, *args: Any) -> None:
        self.run(*args, stream=current_stream(self._device))

    def run(self, *args: Any, stream: int) -> None:
        given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        if self.source.scratch:  # freed at once: what follows on the stream comes after it
            made = torch.empty(self.source.scratch, dtype=torch.uint8, device=self._card)
            given.append(made.data_ptr())
        if any(given[k] & bits for k, bits in self._aligned) or any(
            given[k] % n for k, n in self.source.multiples
        ):
            self._elsewhere(args, "memory at multiples of 16 bytes")
            return
        near = self.source.near
        if near is not None and abs(given[near[0]] - given[near[1]]) >= FAR:
            self._elsewhere(args, "operands that are near each other")
            return
        code = self._function(*given, stream)
        if code:
            driver.driver().check(code, self.source.name)

    def _elsewhere(self, args: tuple[Any, ...], assumed: str) -> None:
        if self.source.otherwise is None:
            raise RuntimeError(f"{self.source.name} is compiled for {assumed}")
        self.source.otherwise(*args)


def current_stream(device: int) -> int:
    """The current stream of a device; the default one where there is no card."""
    return torch._C._cuda_getCurrentRawStream(device) if torch.cuda.is_available() else 0
