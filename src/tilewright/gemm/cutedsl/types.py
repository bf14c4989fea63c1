"""Types of the IR in the CuTe DSL."""

from __future__ import annotations

import math

import torch

TYPE: dict[torch.dtype, str] = {
    torch.float64: "Float64", torch.float32: "Float32", torch.float16: "Float16",
    torch.bfloat16: "BFloat16", torch.int64: "Int64", torch.int32: "Int32", torch.int16: "Int16",
    torch.int8: "Int8", torch.uint8: "Uint8", torch.uint16: "Uint16", torch.uint32: "Uint32",
    torch.uint64: "Uint64", torch.bool: "Boolean", torch.float8_e4m3fn: "Float8E4M3FN",
    torch.float8_e5m2: "Float8E5M2",
}  # fmt: skip
"""Of a value."""


def memory(dtype: torch.dtype) -> str:
    """Of an element in memory: a bool is a byte."""
    return "Uint8" if dtype == torch.bool else TYPE[dtype]


def named(dtype: torch.dtype) -> str:
    """As generated text has it: `cutlass.Float32`."""
    if dtype not in TYPE:
        raise NotImplementedError(f"the CuTe DSL has no {dtype}")
    return f"cutlass.{TYPE[dtype]}"


def number(value: bool | int | float, dtype: torch.dtype) -> str:
    """A literal."""
    return f"{named(dtype)}({bare(value, dtype)})"


def bare(value: bool | int | float, dtype: torch.dtype) -> str:
    """A literal that takes the type of what is beside it."""
    if dtype == torch.bool:
        return str(bool(value))
    if not dtype.is_floating_point:
        return str(int(value))
    value = float(value)
    if dtype == torch.float32 and math.isfinite(value):
        value = torch.tensor(value, dtype=dtype).item()
    return repr(value) if math.isfinite(value) else f'float("{value}")'
