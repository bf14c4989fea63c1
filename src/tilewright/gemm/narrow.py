"""Products of eight-bit operands: calls of `_int_mm` and `_scaled_mm` as problems.

`_scaled_mm` multiplies the sum of products by one number for each of its rows, or for all, and by
one for each of its columns, or for all; then it adds a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.gemm.problem import GemmProblem, Operand, loops, plain
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, load
from tilewright.ir.program import Opaque, Program, View
from tilewright.target import Target

aten = torch.ops.aten
EIGHTS = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
# After the operands and the scales, in the order of `_scaled_mm`.
_GIVEN = ("bias", "scale_result", "out_dtype", "use_fast_accum")


def parsed(program: Program, call: Opaque, op: Any, result: View) -> GemmProblem | str:
    """The problem, still in the program's names, or why only the library can compute it."""
    target = Target.of(program.buffers[result.buffer].device)
    if not target.is_gpu:
        return "on a CPU the library alone multiplies eight bits"
    tensors = [a for a in call.args[:2] if isinstance(a, View)]
    if len(tensors) != 2 or any(len(t.size) != 2 for t in tensors):
        return "its arguments are not all tensors in memory"
    left, right = tensors
    b, m, n, k = loops(ix.ONE, left.size[0], right.size[1], left.size[1])
    operands = plain(left, (m, k)), plain(right, (k, n))
    scales: tuple[Operand, ...] = ()
    bias, fast = None, False
    if op == "_scaled_mm":
        found = _scaled(call, (m, n), result)
        if isinstance(found, str):
            return found
        scales, bias, fast = found
    used = {v.buffer for v in (*tensors, *(s.view for s in scales), result)}
    used |= set() if bias is None else {bias.view.buffer}
    return GemmProblem(
        op, b, m, n, k, operands, result, tuple(program.buffers[name] for name in sorted(used)),
        target, bias, scales=scales, fast=fast,
    )  # fmt: skip


def _scaled(call: Opaque, place: tuple[Expr, Expr], result: View
            ) -> tuple[tuple[Operand, ...], Operand | None, bool] | str:  # fmt: skip
    """Both scales, what is added, and whether sums may be taken in fewer bits."""
    if not {call.args[0].dtype, call.args[1].dtype} <= EIGHTS:
        return "no kernels for these operands"
    given = {**dict(zip(_GIVEN, call.args[4:], strict=False)), **call.kwargs}
    scales = [*call.args[2:4]]
    if len(scales) != 2 or any(not isinstance(s, View) for s in scales):
        return "its scales are not tensors"
    if any(s.dtype != torch.float32 for s in scales):
        return "its scales are of blocks, and not of rows and columns"
    if given.get("scale_result") is not None:
        return "its result is scaled"
    found = [_spread(s, place, result.size) for s in scales]
    if any(f is None for f in found):
        return "its scales are of blocks, and not of rows and columns"
    bias = given.get("bias")
    if bias is not None:
        bias = _spread(bias, place, result.size) if isinstance(bias, View) else None
        if bias is None:
            return "what it adds is not a row"
    made = tuple(f for f in found if f is not None)
    return made, bias, bool(given.get("use_fast_accum", False))


def _spread(view: View, place: tuple[Expr, Expr], size: Sequence[Expr]) -> Operand | None:
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
