"""Kernels of a function for a card that is not there: `bench/cubin.py` compiles them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench import cubin
from bench.cubin import Compiled, build
from tilewright.codegen.triton.launch import TritonKernel

__all__ = ["Compiled", "build", "kernels_of"]


def kernels_of(fn: Callable[..., Any], *args: Tensor, **how: Any) -> list[TritonKernel]:
    """One at least: tests look at each."""
    found = cubin.kernels_of(fn, *args, **how)
    assert found, "nothing is launched"
    return found
