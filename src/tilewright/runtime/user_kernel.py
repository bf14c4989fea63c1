"""The user's Triton kernels at run time.

A kernel of plain pointers and numbers on a card is built and launched like a generated one
(`static`). The others are run from here: on CPU tensors by Triton's interpreter; with tensor
descriptors, memory of their own or a text that cannot leave its process, by Triton's own launcher.

Each is called as a generated kernel is: `kernel(stream, x, y, z, *arguments)`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import linecache
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.errors import BuildError, UserKernelError
from tilewright.graph.user_kernels import Launch, Setting, UserKernel
from tilewright.runtime.triton_build import TritonSource

Run = Callable[..., None]


@dataclass(frozen=True)
class UserSource:
    """A kernel with what is known of its arguments; `names` are those it is called with, in order,
    and `writes` those it writes to."""

    kernel: UserKernel
    names: tuple[str, ...]
    writes: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    descriptors: tuple[tuple[str, tuple[Any, ...]], ...]
    options: tuple[tuple[str, Any], ...]
    device: torch.device
    static: TritonSource | None = None  # a configuration for each setting
    wide: TritonSource | None = None  # the same for numbers of more than 31 bits

    @classmethod
    def of(cls, launch: Launch, names: tuple[str, ...], device: torch.device) -> UserSource:
        return cls(launch.kernel, names, launch.writes, launch.constants, launch.descriptors,
                   launch.options, device)  # fmt: skip

    @property
    def text(self) -> str:
        found = self.kernel
        return f"# {found.location}\n{found.text or f'# {found.reason}'}"

    def widened(self) -> UserSource:
        return replace(self, static=self.wide, wide=None)

    def arguments(self, setting: Setting, given: tuple[Any, ...]) -> dict[str, Any]:
        """All that the kernel is called with, descriptors made: one for each tensor and block."""
        found = {**dict(self.constants), **dict(zip(self.names, given, strict=True)),
                 **dict(setting.constants)}  # fmt: skip
        made: dict[tuple[Any, ...], Any] = {}
        for name, block in self.descriptors:
            t = found[name]
            key = (t.data_ptr(), t.size(), t.stride(), block)
            if key not in made:
                made[key] = _descriptor(t, block)
            found[name] = made[key]
        return found


def _descriptor(t: torch.Tensor, block: tuple[Any, ...]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(t, list(block))


def _function(kernel: UserKernel) -> Any:
    """Triton's object for a kernel, without its settings."""
    if kernel.live is None:
        return executed(kernel.text)[kernel.name]
    found = kernel.live
    while not hasattr(found, "params"):
        found = found.fn
    return found


@functools.lru_cache(maxsize=256)
def executed(text: str, interpreted: bool = False) -> dict[str, Any]:
    """What a kernel's text defines. Triton finds the lines of its functions by their file."""
    file = f"<kernel {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "kernel", "__file__": file}
    if interpreted:
        _interpreter().import_all()
    with _jit_interprets() if interpreted else contextlib.nullcontext():
        exec(compile(text, file, "exec"), namespace)
    if interpreted:
        _interpreter().users(namespace)
    return namespace


# ---- the interpreter


def _interpreter() -> Any:
    """It imports Triton, so it is imported by programs that use it and by no others."""
    return importlib.import_module("tilewright.runtime.interpret")


def interpreted(source: UserSource, setting: Setting) -> Run:
    kernel = source.kernel
    if kernel.text:
        function = executed(kernel.text, interpreted=True)[kernel.name]
    else:
        function = _interpreter().function(_function(kernel).fn)

    def run(stream: int, x: int, y: int, z: int, *given: Any) -> None:
        with _interpreter().interpreting():
            function.run(grid=(x, y, z), warmup=False, **source.arguments(setting, given))

    return run


@contextlib.contextmanager
def _jit_interprets() -> Generator[None]:
    knobs: Any = importlib.import_module("triton").knobs.runtime
    before, knobs.interpret = knobs.interpret, True
    try:
        yield
    finally:
        knobs.interpret = before


# ---- Triton's own launcher


def by_triton(source: UserSource, setting: Setting) -> Run:
    function = _function(source.kernel)
    options = {**dict(source.options), **dict(setting.options)}

    def run(stream: int, x: int, y: int, z: int, *given: Any) -> None:
        if x and y and z:
            function[(x, y, z)](**source.arguments(setting, given), **options)

    return run


# ---- errors


def refused(kernel: UserKernel, error: BuildError) -> UserKernelError:
    """A kernel that does not compile, with the user's own line."""
    line = error.line and kernel.origin(error.line)
    return UserKernelError(
        f"Triton does not compile your kernel {kernel.name}: {error.why or error.message}",
        where=line or kernel.location,
        report=error.stderr,
    )
