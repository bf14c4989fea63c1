"""Products of eight-bit operands: calls of `_int_mm` and `_scaled_mm` as problems.

`_scaled_mm` multiplies the sum of products by one number for each of its rows, or for all, and by
one for each of its columns, or for all; or each product by numbers that 128 of them have in common.
Then it adds a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewright.gemm.problem import SCALED, GemmProblem, Operand, loops, plain
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, load
from tilewright.ir.program import Opaque, Program, View
from tilewright.ir.show import number
from tilewright.target import Target

aten = torch.ops.aten
EIGHTS = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
# After the operands and the scales, in the order of `_scaled_mm`.
_GIVEN = ("bias", "scale_result", "out_dtype", "use_fast_accum")


def parsed(program: Program, call: Opaque, op: Any, result: View) -> GemmProblem | str:
    """The problem, still in the program's names, or why only the library can compute it."""
    target = Target.of(program.buffers[result.buffer].device)
    tensors = [a for a in call.args[:2] if isinstance(a, View)]
    if len(tensors) != 2 or any(len(t.size) != 2 for t in tensors):
        return "its arguments are not all tensors in memory"
    left, right = tensors
    b, m, n, k = loops(ix.ONE, left.size[0], right.size[1], left.size[1])
    operands = plain(left, (m, k)), plain(right, (k, n))
    scales: tuple[Operand, ...] = ()
    bias, fast = None, False
    if op == "_scaled_mm":
        found = _scaled(call, (m, n, k), result)
        if isinstance(found, str):
            return found
        scales, bias, fast = found
    used = {v.buffer for v in (*tensors, *(s.view for s in scales), result)}
    used |= set() if bias is None else {bias.view.buffer}
    return GemmProblem(
        op, b, m, n, k, operands, result, tuple(program.buffers[name] for name in sorted(used)),
        target, bias, scales=scales, fast=fast,
    )  # fmt: skip


def _scaled(call: Opaque, place: tuple[Expr, Expr, Expr], result: View
            ) -> tuple[tuple[Operand, ...], Operand | None, bool] | str:  # fmt: skip
    """Both scales, what is added, and whether sums may be taken in fewer bits."""
    if not {call.args[0].dtype, call.args[1].dtype} <= EIGHTS:
        return "no kernels for these operands"
    given = {**dict(zip(_GIVEN, call.args[4:], strict=False)), **call.kwargs}
    scales = [*call.args[2:4]]
    if len(scales) != 2 or any(not isinstance(s, View) for s in scales):
        return "its scales are not tensors"
    if given.get("scale_result") is not None:
        return "its result is scaled"
    found = scaled(scales[0], scales[1], place, (*result.size, call.args[0].size[1]))
    if isinstance(found, str):
        return found
    bias = given.get("bias")
    if bias is not None:
        bias = _spread(bias, place[:2], result.size) if isinstance(bias, View) else None
        if bias is None:
            return "what it adds is not a row"
    return found, bias, bool(given.get("use_fast_accum", False))


def scaled(left: View, right: View, place: Sequence[Expr], size: Sequence[Expr]
           ) -> tuple[Operand, Operand] | str:  # fmt: skip
    """Both scales at a position (m, n, k) of a product of these sizes: two numbers, a column and a
    row, or blocks of 128 along k that are rows, or as high, of the operand on one side at least."""
    shown = " and ".join(_shown(v) for v in (left, right))
    if any(v.dtype != torch.float32 for v in (left, right)):
        return f"its scales are of blocks that no template has, or not float32: {shown}"
    (m, n, k), (rows, columns, depth) = place, size
    spread = [_spread(v, (m, n), (rows, columns)) for v in (left, right)]
    if spread[0] is not None and spread[1] is not None:
        return spread[0], spread[1]
    if len(left.size) != 2 or len(right.size) != 2:
        return _refused(shown, rows, columns, depth)
    blocks = ix.floordiv(ix.add(depth, SCALED - 1), SCALED)
    turned = replace(right, size=right.size[::-1], stride=right.stride[::-1])
    found = [_blocks(v, at, of, k, blocks) for v, at, of in ((left, m, rows),
                                                            (turned, n, columns))]  # fmt: skip
    one, other = found
    if one is None or other is None or (one[1] and other[1]):
        return _refused(shown, rows, columns, depth)
    return Operand(left, one[0]), Operand(right, other[0])


def _shown(view: View) -> str:
    size = ", ".join(map(number, view.size))
    return f"{str(view.dtype).removeprefix('torch.')}[{size}]"


def _refused(shown: str, rows: Expr, columns: Expr, depth: Expr) -> str:
    return (
        f"its scales are of blocks that no template has: {shown} of a product of {number(rows)} by "
        f"{number(columns)} over {number(depth)}"
    )


def _blocks(view: View, at: Expr, size: Expr, k: Expr, blocks: Expr) -> tuple[Expr, bool] | None:
    """An element for position `at` of `size` and for `k`; and whether a block is 128 high."""
    high = view.size[0] is ix.floordiv(ix.add(size, SCALED - 1), SCALED) is not size
    if view.size[1] is not blocks or not (high or view.size[0] is size):
        return None
    place = ix.floordiv(at, SCALED) if high else at
    index = ix.add(ix.mul(place, view.stride[0]), ix.mul(ix.floordiv(k, SCALED), view.stride[1]))
    return load(view.buffer, view.dtype, ix.add(index, view.offset)), high


def _spread(view: View, place: Sequence[Expr], size: Sequence[Expr]) -> Operand | None:
    """A number, a row or a column, read at a position of the result; the view is as it is given."""
    lead = len(size) - len(view.size)
    if lead < 0:
        return None
    index = view.offset
    for at, n, stride, want in zip(place[lead:], view.size, view.stride, size[lead:], strict=True):
        if n is want and n is not ix.ONE:
            index = ix.add(index, ix.mul(at, stride))
        elif n is not ix.ONE:
            return None
    return Operand(view, load(view.buffer, view.dtype, index))


__all__ = ["EIGHTS", "parsed"]
