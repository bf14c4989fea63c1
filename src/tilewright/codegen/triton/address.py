"""Addresses of the elements of a tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr

if TYPE_CHECKING:
    from tilewright.codegen.triton.kernel import Kernel


def address(k: Kernel, buffer: str, index: Expr, place: str) -> str:
    """`place` is the text of the index. Where memory runs across, rows are added last: they are so
    many bytes apart then, which is part of an access, where each would have an address to compute
    and to keep (softmax of columns of 128 in rows of 863 bfloat16: 48 registers, 106)."""
    w, plain = k.w, f"{k.pointer(buffer)} + ({place})"
    rows = [a for a in k.shape.inner if a in w.support(index)]
    if not k.shape.across or k.shape.serial or len(rows) != 1 or w.index_type != "tl.int32":
        return plain
    (axis,) = rows
    step, rest = ix.coefficient(index, axis.var), ix.without(index, [axis.var])
    if step is None or ix.value_of(step) is None or not w.support(rest) or place != w.index(index):
        return plain
    by = f"*{w.index(step)}"
    first = "" if k.shape.persistent else f"{w.rounds[axis][0]}{by} + "
    return f"{k.pointer(buffer)} + {first}{w.index(rest)} + {axis.name}base{by}"
