"""What a provider of products is, and the list of them.

A provider offers candidates for a problem. Generic code never asks which provider it has: it
filters, builds, verifies and times candidates, and hands the winner's kernel to the host program.
A new provider is one class, registered with `register`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from tilewright import config
from tilewright.gemm.problem import GemmProblem
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.runtime.cxx import CxxSource
from tilewright.runtime.triton_build import TritonSource

Effort = Literal["none", "quick", "default", "max"]
Argument = tuple[str, str]  # (ptr, int or float; buffer or symbol)


class LibrarySource(Protocol):
    """A call into a library that is loaded already. It pickles, and is called with tensors (for
    `ptr` arguments) and numbers, in the order of the kernel's arguments, on the current stream."""

    @property
    def text(self) -> str:
        """For a reader of the generated program."""
        ...

    def __call__(self, *args: Any) -> None: ...


@runtime_checkable
class CompiledSource(LibrarySource, Protocol):
    """One that is compiled before its first call, in the background."""

    def submit(self) -> Future[Any]:
        """Begin; the same one for equal sources."""
        ...


Source = CxxSource | TritonSource | CompiledSource | LibrarySource


@dataclass(frozen=True)
class Kernel:
    """One launch: what is built, and what it is called with, in the problem's names.

    Two arguments may be memory of the kernel's own: `workspace`, of so many float32 elements with
    any contents, and `counters`, of so many int32 elements that are zero before each launch and
    zero again after it: they are made once for a stream, and kept.
    """

    name: str  # as shown: triton_tem_fused_addmm_relu, cpp_fused_..., extern_kernels.mm
    source: Source
    arguments: tuple[Argument, ...]
    checked: bool = False  # it takes the address of an error flag as its last argument
    assume: tuple[Expr, ...] = ()  # must be below 2**31 at a call, or `source.wide` is launched
    workspace: Expr = ix.ZERO
    counters: Expr = ix.ZERO


class Candidate(Protocol):
    """One way to compute a problem. Frozen; equal candidates are one."""

    @property
    def name(self) -> str:
        """`mm` of ATen, `triton_mm_3`, `cublaslt_mm_0`: unique among a problem's candidates."""
        ...

    @property
    def provider(self) -> str: ...

    @property
    def description(self) -> str:
        """`KEY=value` pairs, sorted, comma-separated; empty for library calls."""
        ...

    @property
    def estimate(self) -> float:
        """Microseconds, by a model of the card: what is tried first, and what is not tried."""
        ...

    @property
    def key(self) -> str:
        """Of what will run, the same in every process: its measurements are kept under it."""
        ...

    def kernel(self) -> Kernel:
        """The launch; cheap: text is made, nothing is built."""
        ...


class Provider(Protocol):
    name: str  # as in `config.max_autotune_gemm_backends`

    def supports(self, problem: GemmProblem) -> str:
        """Why it has nothing to offer for this problem, or an empty string."""
        ...

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[Candidate]:
        """Best first by the model, all of them valid: what cannot fit is not among them."""
        ...


PROVIDERS: dict[str, Provider] = {}
FUSION_COUNTERS: dict[str, tuple[str, ...]] = {}
"""By provider: what counts the stores of epilogues that its kernels compute."""


def register(make: Callable[[], Provider]) -> Callable[[], Provider]:
    """Class decorator: the provider joins the list under its name."""
    made = make()
    PROVIDERS[made.name] = made
    return make


log = logging.getLogger("tilewright.choose")
_told: set[str] = set()


def enabled() -> list[Provider]:
    """Those the options name, in the order they were registered."""
    for name in unknown():
        if name not in _told:
            _told.add(name)
            log.warning("option 'max_autotune_gemm_backends' names %s, which is no backend here: "
                        "there are %s", name, ", ".join(sorted(PROVIDERS)))  # fmt: skip
    return [p for p in PROVIDERS.values() if p.name in _named()]


def unknown() -> list[str]:
    """Names in the options that nobody has registered: other compilers' backends, or mistakes."""
    return sorted(_named() - PROVIDERS.keys())


def _named() -> set[str]:
    return {n.strip().upper() for n in config.max_autotune_gemm_backends.split(",") if n.strip()}
