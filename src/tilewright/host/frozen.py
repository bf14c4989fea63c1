"""A program in two: what is computed of weights alone, and what runs at every call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

Program = Callable[[list[Any]], Any]


class Frozen:
    """Calls `once` with the weights, and again when they are others or were written to; `rest` at
    every call, with what `once` gave. Positions are those of the arguments of a call."""

    _boxed_call = True

    def __init__(self, once: Program, rest: Program, weights: Sequence[int],
                 kept: Sequence[int]) -> None:  # fmt: skip
        self._once, self._rest = once, rest
        self._weights, self._kept = tuple(weights), tuple(kept)
        self._known: tuple[list[_Seen], list[Any]] | None = None

    def __call__(self, args: list[Any]) -> Any:
        known = self._known
        weights = self._weights
        if known is None or not all(
            seen.is_same(args[k]) for seen, k in zip(known[0], weights, strict=True)
        ):
            given = [args[k] for k in weights]
            known = self._known = [_Seen(t) for t in given], list(self._once(given))
        passed = [args[k] for k in self._kept]
        args.clear()
        return self._rest([*passed, *known[1]])


class _Seen:
    """A weight as it was. It is not kept alive."""

    __slots__ = ("_of", "_version")

    def __init__(self, t: torch.Tensor) -> None:
        self._of = weakref.ref(t)
        self._version = _version(t)

    def is_same(self, t: torch.Tensor) -> bool:
        return self._of() is t and self._version == _version(t) is not None


def _version(t: torch.Tensor) -> int | None:
    """How often it was written to. Tensors made in inference mode do not count that: what is made
    of them is made at every call."""
    return None if t.is_inference() else t._version
