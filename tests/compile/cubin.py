"""Kernels of a function for a card that is not there: `bench/cubin.py` compiles them."""

from bench.cubin import Compiled, build, kernels_of

__all__ = ["Compiled", "build", "kernels_of"]
