"""What a generated host program imports. Small and fast: it runs at every call."""

from __future__ import annotations

import ctypes
import importlib
import math
from typing import Any

import torch
from torch.utils._pytree import key_get

try:  # the same allocation with less argument parsing; private, so it may go away
    from torch._C._dynamo.guards import _empty_strided_cpu as empty_cpu  # type: ignore[import]
except ImportError:

    def empty_cpu(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)


def empty(size: Any, stride: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def laid_out(t: torch.Tensor, size: Any, stride: Any) -> torch.Tensor:
    """`t` with the layout the program was compiled for; a copy if an op gave another."""
    if t.stride() == stride or t.numel() == 0:
        return t
    if all(a == b or n == 1 for a, b, n in zip(t.stride(), stride, t.size(), strict=True)):
        return t
    return torch.empty_strided(size, stride, dtype=t.dtype, device=t.device).copy_(t)


try:  # the same without the dispatcher, 0.5 instead of 3 us; private too
    from torch._C._dynamo.guards import _reinterpret_tensor as window  # type: ignore[import]
except ImportError:

    def window(t: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
        """A view of the memory of `t`, whose own first element is at `offset` zero."""
        return torch.as_strided(t, size, stride, t.storage_offset() + offset)


class OutOfRangeError(IndexError, RuntimeError):
    """Eager raises one or the other, depending on the operator."""


class Flag:
    """A cell a kernel writes to when it meets bad data."""

    def __init__(self) -> None:
        self.cell = ctypes.c_int64(0)
        self.address = ctypes.addressof(self.cell)

    def check(self, kernel: str, location: str) -> None:
        code = self.cell.value
        if not code:
            return
        self.cell.value = 0
        where = f" ({location})" if location else ""
        if code & 1:
            raise OutOfRangeError(f"index or value out of range in {kernel}{where}")
        raise RuntimeError(f"ZeroDivisionError: integer division by zero in {kernel}{where}")


def resolve(path: str) -> Any:
    """An object by its dotted path, such as `torch.ops.aten.mm.default` or `operator:add`."""
    module, _, name = path.partition(":")
    if not name:
        found: Any = torch
        for part in path.split(".")[1:]:
            found = getattr(found, part)
        return found
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


__all__ = [
    "Flag",
    "empty",
    "empty_cpu",
    "key_get",
    "laid_out",
    "math",
    "resolve",
    "torch",
    "window",
]
