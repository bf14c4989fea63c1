"""Sizes, views and arguments as Python text."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from tilewright.ir.expr import Expr
from tilewright.ir.program import Buffer, Handle, View
from tilewright.ir.show import number


def numbers(es: Sequence[Expr]) -> str:
    return "(" + "".join(f"{number(e)}, " for e in es).strip() + ")"


def view(v: View, buffer: Buffer) -> str:
    """The buffer itself where the window is all of it."""
    if v.size == buffer.size and v.stride == buffer.stride and v.offset.arg == 0:
        return v.buffer
    return f"window({v.buffer}, {numbers(v.size)}, {numbers(v.stride)}, {number(v.offset)})"


def argument(value: Any, buffers: dict[str, Buffer], constant: Callable[[Any], str]) -> str:
    """An argument of an opaque call; what has no text of its own becomes a constant."""

    def text(x: Any) -> str:
        return argument(x, buffers, constant)

    match value:
        case View():
            return view(value, buffers[value.buffer])
        case Expr():
            return number(value)
        case Handle():
            return value.name
        case bool() | int() | str() | None:
            return repr(value)
        case float():
            return repr(value) if value == value and abs(value) != float("inf") else (
                f'float("{value}")')  # fmt: skip
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case torch.device():
            return f"torch.device({str(value)!r})"
        case slice():
            return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
        case list():
            return "[" + ", ".join(text(x) for x in value) + "]"
        case tuple():
            return "(" + "".join(text(x) + ", " for x in value) + ")"
        case dict():
            return "{" + ", ".join(f"{text(k)}: {text(v)}" for k, v in value.items()) + "}"
        case _:
            return constant(value)


def target_path(target: Any) -> str | None:
    """A path from which the callable can be found again in another process."""
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    if isinstance(target, HigherOrderOperator):
        found = getattr(torch.ops.higher_order, target._name, None)
        return f"torch.ops.higher_order.{target._name}" if found is target else None
    module: str = getattr(target, "__module__", None) or ""
    name: str = getattr(target, "__qualname__", None) or ""
    if isinstance(target, type(operator.add)):  # a builtin: operator's live in `_operator`
        module = module.lstrip("_")
    return f"{module}:{name}" if module and name and "<" not in name else None
