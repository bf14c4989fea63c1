"""The CUDA driver, through ctypes: contexts, modules, functions and their attributes.

Only what a launcher needs. `use(path)` names another library in place of the driver's, with which
everything that runs on a card can be tested without one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from tilewright import caches
from tilewright.errors import BuildError

LIBRARY = "libcuda.so.1"

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_DEFAULT_SHARED = 48 * 1024  # what a block may have without asking

_library = LIBRARY


@dataclass(frozen=True)
class Function:
    """A loaded kernel of one device: the driver's handle, and the context it lives in."""

    address: int
    context: int
    module: int


class Driver:
    def __init__(self, path: str) -> None:
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            raise BuildError(
                f"the CUDA driver cannot be loaded: {error}",
                command=(path,),
                stderr="",
                hint="tensors are on a CUDA device, so a driver should be installed",
            ) from error
        self.check(self.library.cuInit(0), "cuInit")

    def check(self, code: int, what: str) -> None:
        if code == 0:
            return
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(code, ctypes.byref(text))
        said = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"CUDA error: {said} ({what} gave {code})")

    def call(self, name: str, *args: Any) -> None:
        self.check(getattr(self.library, name)(*args), name)

    def address(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0

    @functools.cache  # noqa: B019 - drivers are kept for ever anyway
    def context(self, device: int) -> int:
        """The primary context of a device: the one torch uses."""
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        return context.value or 0

    @contextlib.contextmanager
    def current(self, device: int) -> Generator[int]:
        context = self.context(device)
        self.call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
        try:
            yield context
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def load(self, cubin: bytes, name: str, shared: int, device: int) -> Function:
        """Load a binary on a device, and let its kernel use the shared memory it needs."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with self.current(device) as context:
            self.call("cuModuleLoadData", ctypes.byref(module), cubin)
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            if shared > _DEFAULT_SHARED:
                self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
                self.call("cuFuncSetAttribute", function, _PREFERRED_CARVEOUT, 100)
        return Function(function.value or 0, context, module.value or 0)


@functools.cache
def _open(path: str) -> Driver:
    return Driver(path)


def driver() -> Driver:
    return _open(_library)


@contextlib.contextmanager
def use(path: str) -> Generator[Driver]:
    """Another library in place of the driver's, for tests."""
    global _library
    before, _library = _library, path
    caches.clear()
    try:
        yield driver()
    finally:
        _library = before
        caches.clear()
