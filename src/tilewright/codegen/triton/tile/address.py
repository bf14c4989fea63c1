"""Where the rows of a tile are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.codegen.triton.tile.interleaved import is_even
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, walk
from tilewright.schedule.nests.segments import Segment

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel


def address(k: Kernel, buffer: str, index: Expr, place: str) -> str:
    """`place` is the text of the index. Where memory runs across, rows are added last: they are
    so many bytes apart then, which is part of an access, where each would have an address to
    compute and to keep (softmax of columns of 128 in rows of 863 bfloat16: 48 registers, 106).
    Not for single floats, of which too many would be in flight (H200: softmax over 1 of
    95x512x511 floats 75 us, 97 us so)."""
    w, plain = k.w, f"{k.pointer(buffer)} + ({place})"
    rows = [a for a in k.shape.inner if a in w.support(index)]
    if len(rows) != 1 or w.index_type != "tl.int32":
        return plain
    (axis,) = rows
    if k.shape.serial:
        return _of_a_round(k, buffer, index, axis, place)
    if not k.shape.across:
        return plain
    step, rest = ix.coefficient(index, axis.var), ix.without(index, [axis.var])
    if step is None or ix.value_of(step) is None or axis is k.repeated:
        return plain
    if not w.support(rest) or place != w.index(index):
        return plain
    if k.buffers[buffer].dtype.itemsize >= 4 and not is_even(index, k.shape.parallel[0], 2):
        return plain
    by = f"*{w.index(step)}"
    first = "" if k.shape.persistent else f"{w.blocks.rounds[axis][0]}{by} + "
    whole = f"{k.pointer(buffer)} + {first}{w.index(rest)} + {axis.name}base{by}"
    before = 0 if k.chunked is None else k.chunked.before * (ix.value_of(step) or 0)
    return f"{whole} + {before}" if before else whole  # of all pieces one address


def _of_a_round(k: Kernel, buffer: str, index: Expr, axis: Axis, place: str) -> str:
    """Of rows one after the other: where one begins is added first, for the same reason."""
    rest = ix.without(index, [axis.var])
    along = ix.coefficient(index, axis.var) is ix.ONE and not k.shape.across
    if not along or not k.w.support(rest) or place != k.w.index(index):
        return f"{k.pointer(buffer)} + ({place})"
    return f"{k.pointer(buffer)} + {k.w.index(rest)} + {axis.name}base"


def may_repeat(shape: Shape, segment: Segment, axis: Axis) -> bool:
    """Whether the last row may stand for those beyond it, where memory runs across: it changes no
    extreme, and nothing has to be chosen for each element (H200: argmax of columns of 333 of
    1168x333x240 bfloat16 56.9 us, 58.5 us; largest of 874903 rows of 97 45.0 us, 45.8 us)."""
    nodes = list(walk(*(e for m in segment.members for e in m.exprs)))
    kinds = {n.arg.kind for n in nodes if n.op == "reduce"}
    cut = any(n.op in ("ifloordiv", "imod") and axis.var in free_vars(n) for n in nodes)
    return (shape.across and not cut and kinds <= {"max", "min", "argmax", "argmin"}
            and all(m.reduce for m in segment.members) and not shape.ends(axis))  # fmt: skip
