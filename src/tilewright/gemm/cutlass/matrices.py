"""Matrices as CUTLASS sees them: which way they are contiguous, how far apart rows are, and how
many elements can be moved at once.

Distances are expressions: they are numbers of a call, not of a source. What is assumed about a
distance that is known only at a call (that it is a multiple of so many elements) is assumed of its
likely value, and looked at again at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import View

BYTES = 16  # of the widest access, and what memory starts at a multiple of
SHORT: dict[torch.dtype, str] = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "s8",
    torch.uint8: "u8",
    torch.int16: "s16",
    torch.int32: "s32",
    torch.int64: "s64",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "b1",
}
"""CUTLASS's short names."""

CPP: dict[str, str] = {
    "f16": "cutlass::half_t",
    "bf16": "cutlass::bfloat16_t",
    "f32": "float",
    "f64": "double",
    "e4m3": "cutlass::float_e4m3_t",
    "e5m2": "cutlass::float_e5m2_t",
    "tf32": "cutlass::tfloat32_t",
    "s8": "int8_t",
    "u8": "uint8_t",
    "s16": "int16_t",
    "u16": "uint16_t",
    "s32": "int32_t",
    "u32": "uint32_t",
    "s64": "int64_t",
    "u64": "uint64_t",
    "b1": "bool",
    "void": "void",
}
METADATA = {torch.int16: "uint16_t", torch.int32: "uint32_t"}
"""C++ types; what says where a sparse matrix has elements is unsigned."""


@dataclass(frozen=True)
class Matrix:
    """A batch of matrices in a buffer."""

    buffer: str
    dtype: torch.dtype
    major: str  # "t": along a row, "n": along a column
    ld: Expr  # from one row (column) to the next
    step: Expr  # from one matrix to the next
    offset: Expr
    alignment: int  # elements
    assumed: tuple[Expr, ...] = ()  # multiples of the alignment, known at a call

    @property
    def turned(self) -> Matrix:
        return replace(self, major="n" if self.major == "t" else "t")

    @property
    def bytes(self) -> int:
        return self.alignment * self.dtype.itemsize


def matrix(view: View) -> Matrix | str:
    """A view as a batch of matrices, or why it is none."""
    return matrix_of(view.buffer, view.dtype, view.size, view.stride, view.offset)


def matrix_of(
    buffer: str, dtype: torch.dtype, size: Sequence[Expr], stride: Sequence[Expr], offset: Expr
) -> Matrix | str:
    rows, cols = size[-2:]
    down, across = stride[-2:]
    step = stride[0] if len(size) == 3 and size[0] is not ix.ONE else ix.ZERO
    if cols is ix.ONE and down is not ix.ONE and across is not ix.ONE:
        across = ix.ONE  # never walked
    if across is ix.ONE or (cols is ix.ONE and down is not ix.ONE):
        major, along, ld, many = "t", cols, down, rows
    elif down is ix.ONE or rows is ix.ONE:
        major, along, ld, many = "n", rows, across, cols
    else:
        sizes, distances = (tuple(map(ix.likely, part)) for part in (size, stride))
        return (
            f"a matrix is contiguous in neither direction: its sizes are {sizes}, distances "
            f"{distances}"
        )
    if many is ix.ONE:  # there is no next one: the distance may be said to be anything
        ld = _rounded(along, BYTES)
    if step is ix.ZERO and len(size) == 3 and size[0] is not ix.ONE:
        step = ix.ZERO
    needed = [e for e in (along, ld, step, offset) if e is not ix.ZERO]
    if many is ix.ONE:
        needed = [e for e in needed if e is not ld]
    width = max_alignment(dtype, needed)
    assumed = tuple(e for e in needed if ix.value_of(e) is None)
    return Matrix(buffer, dtype, major, ld, step, offset, width, assumed)


def _rounded(e: Expr, unit: int) -> Expr:
    return ix.mul(ix.floordiv(ix.add(e, unit - 1), unit), unit)


def widths(dtype: torch.dtype) -> tuple[int, ...]:
    """Elements that can be moved at once, most first."""
    match dtype.itemsize if SHORT.get(dtype) else 0:
        case 1:
            return 16, 8, 4, 2
        case 2:
            return 8, 4, 2, 1
        case 4:
            return 4, 2, 1
        case _:
            raise NotImplementedError(f"CUTLASS moves no {dtype}")


def max_alignment(dtype: torch.dtype, distances: Sequence[Expr | int]) -> int:
    """The most elements that divide all of these, by their likely values."""
    numbers = [d if isinstance(d, int) else ix.likely(d) for d in distances]
    return next((w for w in widths(dtype) if all(n % w == 0 for n in numbers)), 1)
