"""The op table: which function lowers which ATen overload. One place per op: its family's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

LoweringFn = Callable[..., Any]

LOWERINGS: dict[Any, LoweringFn] = {}
OVERRIDES: dict[Any, str] = {}  # targets that users have taken over, and a digest of by what


class Unsupported(Exception):
    """Raised by a lowering for a case it leaves to ATen; the message says which."""


def lowers(*targets: OpOverload | OpOverloadPacket) -> Callable[[LoweringFn], LoweringFn]:
    """Register `fn(ctx, *args, **kwargs)` for overloads, or for every overload of a packet."""

    def register(fn: LoweringFn) -> LoweringFn:
        for target in targets:
            for overload in _overloads(target):
                if overload in LOWERINGS:
                    raise ValueError(f"{overload} is lowered twice")
                LOWERINGS[overload] = fn
        return fn

    return register


def family(target: Any) -> str | None:
    """The file of a target's lowering, which says what kind of op it is; None if it has none."""
    found = LOWERINGS.get(target)
    return None if found is None else found.__module__.rpartition(".")[2]


def _overloads(target: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target]
