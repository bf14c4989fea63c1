"""Programs for a card, run on CPU tensors: all of the CUDA path but the card.

While `as_cuda()` is entered, every buffer of a lowered program says it is on `cuda:0`. So grouping,
Triton kernels, the host program and its launches are those of a card, and only memory is the
host's: kernels run in Triton's interpreter, or (`fake`) reach a driver that only remembers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.fx

from tests.compile.fake_driver import FakeDriver, fake_driver
from tilewright import config, pipeline
from tilewright.host import support
from tilewright.ir.program import Program
from tilewright.lower.graph import lower
from tilewright.runtime import launch
from tilewright.runtime.interpret import Interpreted, interpreting
from tilewright.runtime.triton_build import Built, TritonSource
from tilewright.runtime.user_kernel import executed

CARD = torch.device("cuda", 0)


def _lower(gm: torch.fx.GraphModule, *args: Any) -> Program:
    program = lower(gm, *args)
    program.buffers = {name: replace(b, device=CARD) for name, b in program.buffers.items()}
    return program


def _stream(device: int) -> int:
    return 7


def _cells(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


class _Counters:
    """Integers that are zero: kernels must leave them so."""

    def __init__(self, device: int) -> None:
        self._kept = torch.zeros(1 << 16, dtype=torch.int32)

    def get(self, stream: int, count: int) -> torch.Tensor:
        assert count <= self._kept.numel() and not self._kept.any()
        return self._kept


def interpreted(source: TritonSource, built: Built, device: int) -> launch.Launcher:
    """In place of `launch.load`."""
    if source.order_of:
        return _users(source, built)
    kernel = Interpreted(source.text, source.name, source.types, dict(built.config.constants))

    def call(stream: int, x: int, y: int, z: int, *args: Any) -> None:
        assert (stream, y, z) == (7, 1, 1)
        given = args[:-1] if source.scratched else args  # the interpreter needs no scratch memory
        kernel(x, *(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in given))

    return call


def _users(source: TritonSource, built: Built) -> launch.Launcher:
    """A kernel of a user's: it may have helpers, and a grid of more than one dimension."""
    function = executed(source.text, interpreted=True)[source.name]
    names = [name for name, _ in source.params]

    def call(stream: int, x: int, y: int, z: int, *args: Any) -> None:
        assert stream == 7
        given = dict(zip(names, args, strict=True))
        with interpreting():
            function.run(grid=(x, y, z), warmup=False, **given, **dict(built.config.constants))

    return call


@contextmanager
def as_cuda(arch: str = "sm_90") -> Iterator[None]:
    """Kernels are compiled for the card, and run in the interpreter."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(launch, "load", interpreted))
        stack.enter_context(_relabelled(arch))
        yield


@contextmanager
def as_fake_cuda(arch: str = "sm_90") -> Iterator[FakeDriver]:
    """Kernels are compiled for the card, and launched by a driver that only remembers."""
    with ExitStack() as stack:
        made = stack.enter_context(fake_driver())
        stack.enter_context(_relabelled(arch))
        yield made


@contextmanager
def _relabelled(arch: str) -> Iterator[None]:
    torch._dynamo.reset()
    with (
        mock.patch.object(pipeline, "lower", _lower),
        mock.patch.object(support, "empty_cuda", support.empty_cpu),
        mock.patch.object(support, "raw_stream", _stream),
        mock.patch.object(support, "pinned", _cells),
        mock.patch.object(support, "Counters", _Counters),
        config.patch({"cuda.arch": arch, "fx_graph_cache": False}),
    ):
        yield
    torch._dynamo.reset()
