"""Kernels under their names in the profiles of `torch.profiler`.

A kernel is called by its address, so a profile would not know of it. While one is recorded, a
program runs with its kernels in regions that have their names; at other times it asks whether one
is, which takes 20 ns (Xeon, one core).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

_START = "def call(args):\n"
_ASKS = "    if profiler._is_profiler_enabled: return profiled(args)\n"


def asking(text: str, namespace: dict[str, Any], kernels: Collection[str]) -> str:
    """The text of a program that asks, and what it needs for it in its namespace."""
    namespace["profiler"] = profiler
    namespace["profiled"] = _profiled(namespace, kernels)
    return text.replace(_START, _START + _ASKS, 1)


class _Off:
    _is_profiler_enabled = False


def _profiled(namespace: dict[str, Any], kernels: Collection[str]) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        named = {name: _named(name, namespace[name]) for name in kernels}
        twin = FunctionType(namespace["call"].__code__, {**namespace, **named, "profiler": _Off})
        return twin(args)

    return run


def _named(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with _RecordFunctionFast(name):
            return kernel(*args)

    return call
