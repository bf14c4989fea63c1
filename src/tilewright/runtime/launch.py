"""Loaded Triton kernels, as callables that cost little more than the driver's own launch.

`kernel(stream, x, y, z, *arguments)`: tensors (or addresses) and numbers in the order of the
kernel's parameters. A small extension module does it in C; where it cannot be built (no compiler,
no Python headers) the same is done through ctypes, in several times the time.

A kernel is built for arguments that are multiples of 16, which lets it move 16 bytes at once; a
call with another argument goes to a second build, which is made when it is first needed, for those
that are multiples even then (H200: a view of labels that begins between two, beside 131 MB of
logits: 751 us with nothing moved at once).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from tilewright import caches
from tilewright.runtime import native, triton_build
from tilewright.runtime.driver import Driver, driver
from tilewright.runtime.triton_build import Built, TritonSource

Launcher = Callable[..., None]

INVALID_VALUE, TOO_MUCH = 1, 701  # what the driver says of a launch that does not fit
MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
HIDDEN = 4  # room for the parameters Triton appends; a kernel reads as many as it has

# How a parameter of each Triton type is passed: p address, i 32 bits, l 64 bits, f and d floats.
# Small integers are read from the low bytes of a word.
KINDS = {"i1": "i", "i8": "i", "u8": "i", "i16": "i", "u16": "i", "i32": "i", "u32": "i",
          "i64": "l", "u64": "l", "fp32": "f", "fp64": "d"}  # fmt: skip
_CTYPES: dict[str, Any] = {"p": ctypes.c_uint64, "i": ctypes.c_int64, "l": ctypes.c_int64,
                           "f": ctypes.c_float, "d": ctypes.c_double}  # fmt: skip


def kinds_of(source: TritonSource) -> str:
    """A letter per parameter, a capital where it must be a multiple of 16."""
    found = ["p" if kind.startswith("*") else KINDS[kind] for kind in source.types]
    letters = (letter.upper() if name in source.aligned else letter
               for letter, (name, _) in zip(found, source.params, strict=True))  # fmt: skip
    return "".join(letters) + ("p" if source.scratched else "")


def load(source: TritonSource, built: Built, device: int) -> Launcher:
    """A built kernel on a device, ready to be called."""
    binary, kinds = built.binary, kinds_of(source)
    found = _loaded.get((binary.key, kinds, device))
    if found is None:
        made = driver()
        function = made.load(binary.cubin, binary.name, binary.shared, device)
        flags = (1 if binary.cooperative else 0) | (2 if binary.pdl else 0)
        module = _extension()
        build = module.Kernel if module is not None else _Slow
        found = build(binary.name, _otherwise(source, built, device), function.address,
                      function.context, kinds, binary.num_warps, binary.shared, flags,
                      binary.num_ctas, *_addresses(made))  # fmt: skip
        _loaded[binary.key, kinds, device] = found
    return found


_loaded: dict[tuple[str, str, int], Launcher] = {}
caches.register(_loaded.clear)


class Later:
    """A kernel that is built when it is first called, for what is aligned then; `spare` is called
    where that fails."""

    def __init__(self, source: TritonSource, device: int) -> None:
        self._source = source
        self._device = device
        self._made: Launcher | None = None
        self.spare: Launcher | None = None

    def __call__(self, *args: Any) -> None:
        if self._made is None:
            try:
                source = _aligned_for(self._source, args[4:])
                self._made = load(source, triton_build.build(source), self._device)
            except RuntimeError:
                if self.spare is None:
                    raise
                self._made = self.spare
            else:
                keep_running(self._made, self.spare)
        self._made(*args)


def later(source: TritonSource, device: int) -> Later:
    return Later(source, device)


def keep_running(kernel: Any, spare: Launcher | None) -> None:
    """What is called in place of the kernel for a launch that does not fit the card."""
    if getattr(kernel, "spare", spare) is None:
        kernel.spare = spare
    if isinstance(other := getattr(kernel, "otherwise", None), Later) and other.spare is None:
        other.spare = spare


def is_refusal(error: RuntimeError) -> bool:
    """Whether the driver refused a kernel that does not fit: a smaller one may."""
    return any(f"CUDA error {code} when" in str(error) for code in (INVALID_VALUE, TOO_MUCH))


def _otherwise(source: TritonSource, built: Built, device: int) -> Launcher | None:
    """The same configuration (the grid depends on it) for arguments of any alignment."""
    if not source.aligned:
        return None
    if source.unaligned is not None:
        return later(source.unaligned, device)
    return later(replace(source, configs=(built.config,), shrinks=False), device)


def _aligned_for(source: TritonSource, args: Sequence[Any]) -> TritonSource:
    found = (name for (name, _), a in zip(source.params, args, strict=False)
             if name in source.aligned and not _plain(a) & 15)  # fmt: skip
    return replace(source, aligned=frozenset(found))


def _addresses(made: Driver) -> tuple[int, ...]:
    names = ("cuLaunchKernel", "cuLaunchKernelEx", "cuCtxSetCurrent")
    return tuple(made.address(name) for name in names)


# ---- what replaying a recorded program needs


def pointer_reader() -> Callable[[list[Any]], tuple[int, ...]]:
    """A function of arguments: the address of each tensor, 0 for what is none."""
    module = _extension()
    if module is not None:
        return module.pointers
    return lambda args: tuple(a.data_ptr() if hasattr(a, "data_ptr") else 0 for a in args)


def copier() -> Callable[[int, int, int, int], None]:
    """`copy(to, from, bytes, stream)`, from device memory to device memory."""
    made, module = driver(), _extension()
    if module is not None:
        return functools.partial(module.copy, made.address("cuMemcpyDtoDAsync_v2"))
    copy = made.library.cuMemcpyDtoDAsync_v2
    copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    return lambda to, start, size, stream: made.check(copy(to, start, size, stream), "a copy")


def graph_starter() -> Callable[[int, int], int] | None:
    """`start(graph, stream)`, the driver's answer: 0 for success. None without the extension."""
    extension = _extension()
    if extension is None:
        return None
    return functools.partial(extension.start_graph, driver().address("cuGraphLaunch"))


def replayer() -> Callable[..., Callable[[list[Any]], Any]] | None:
    """`Replay` of the extension for this driver, if there is both."""
    extension = _extension()
    if extension is None:
        return None
    names = ("cuGraphLaunch", "cuStreamIsCapturing", "cuMemcpyDtoDAsync_v2")
    return functools.partial(extension.Replay, tuple(driver().address(n) for n in names))


@functools.cache
def turns() -> AbstractContextManager[Any]:
    """What one thread at a time is in, to record or to replay. `Replay` is in it by itself."""
    extension = _extension()
    return threading.RLock() if extension is None else _Turns(extension)


class _Turns:
    def __init__(self, extension: Any) -> None:
        self._begin = extension.begin_turn
        self._end = extension.end_turn

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *_: object) -> None:
        self._end()


# ---- the extension module


def _extension() -> Any:
    return native.module()


class _Slow:
    """The same callable through ctypes."""

    def __init__(self, name: str, otherwise: Launcher | None, function: int, context: int,
                 kinds: str, *rest: int) -> None:  # fmt: skip
        warps, shared, flags, clusters, launch, _, set_context = rest
        if flags or clusters != 1:
            raise RuntimeError(f"{name} needs a launch that only the extension module can do")
        self.name = name
        self.otherwise = otherwise
        self.spare: Launcher | None = None
        self._types = [_CTYPES[k.lower()] for k in kinds]
        self._aligned = [i for i, k in enumerate(kinds) if k.isupper()]
        self._array = ctypes.c_void_p * (len(kinds) + HIDDEN)
        self._nothing = ctypes.c_uint64(0)
        self._hidden = [ctypes.addressof(self._nothing)] * HIDDEN
        self._fixed = (32 * warps, 1, 1, shared)
        self._function = function
        self._context = context
        words = [ctypes.c_uint] * 7
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *words, ctypes.c_void_p,
                                        ctypes.c_void_p, ctypes.c_void_p)(launch)  # fmt: skip
        self._set_context = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(set_context)

    def __call__(self, stream: int, x: int, y: int, z: int, *args: Any) -> None:
        if len(args) != len(self._types):
            raise TypeError(f"{self.name} takes {len(self._types)} arguments")
        values = [t(_plain(a)) for t, a in zip(self._types, args, strict=True)]
        if self.otherwise is not None and any(values[i].value & 15 for i in self._aligned):
            self.otherwise(stream, x, y, z, *args)
            return
        params = self._array(*map(ctypes.addressof, values), *self._hidden)
        if not (x and y and z):
            return
        code = INVALID_VALUE
        if all(n <= most for n, most in zip((x, y, z), MOST_PROGRAMS, strict=True)):
            code = self._launch(self._function, x, y, z, *self._fixed, stream, params, None)
        if code == 201:  # a thread new to CUDA
            self._set_context(self._context)
            code = self._launch(self._function, x, y, z, *self._fixed, stream, params, None)
        if code in (INVALID_VALUE, TOO_MUCH) and self.spare is not None:
            self.spare(stream, x, y, z, *args)
        elif code:
            raise RuntimeError(f"CUDA error {code} when launching {self.name}")


def _plain(value: Any) -> Any:
    if value is None:
        return 0
    return value if isinstance(value, (int, float)) else value.data_ptr()
