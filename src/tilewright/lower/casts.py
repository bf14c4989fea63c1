"""Casts, copies, and the ops that change nothing about the values of a real tensor."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ir.expr import loads
from tilewright.ir.program import Store
from tilewright.lower.context import Lowering
from tilewright.lower.promote import Operand, operand
from tilewright.lower.table import Unsupported, lowers
from tilewright.lower.tensor import Tensor, expand, is_stored, placeholders

aten, prims = torch.ops.aten, torch.ops.prims


@lowers(
    aten.clone.default, aten.alias.default, aten.detach.default, aten.positive.default,
    aten.conj_physical.default, aten._conj.default, aten.real.default, aten.resolve_conj.default,
    aten.resolve_neg.default, aten.contiguous.default, aten._fw_primal.default,
    aten.alias_copy.default, aten.detach_copy.default, aten.lift.default, aten.lift_fresh.default,
    aten.lift_fresh_copy.default, prims.view_of.default, prims.clone.default,
)  # fmt: skip
def same(ctx: Lowering, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The layout a copy asks for is in the graph's fake value, which outputs follow."""
    return x


@lowers(prims.convert_element_type.default)
def convert(ctx: Lowering, x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


@lowers(aten._to_copy.default)
def to_copy(ctx: Lowering, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return x if dtype is None else x.to(dtype)


@lowers(aten.copy.default)
def copy(ctx: Lowering, x: Tensor, source: Operand, non_blocking: bool = False) -> Tensor:
    return expand(operand(ctx, source, x.dtype), x.size)


@lowers(aten.fill.Scalar, aten.fill.Tensor)
def fill(ctx: Lowering, x: Tensor, value: Operand) -> Tensor:
    return expand(operand(ctx, value, x.dtype), x.size)


@lowers(aten.zero.default)
def zero(ctx: Lowering, x: Tensor) -> Tensor:
    return fill(ctx, x, 0)


@lowers(aten.copy_.default)
def copy_into(ctx: Lowering, into: Tensor, source: Operand, non_blocking: bool = False) -> Tensor:
    """Write `source` into the memory of an input.

    Everything that still reads the old contents is stored first; so is the source, if the element
    it computes for one place reads another place of the same memory.
    """
    assert ctx.node is not None
    place, given = ctx.node.args[:2]
    into = ctx.places.get(place, into)
    if not is_stored(into):
        raise Unsupported("the destination is not a window on memory")
    target, where = into.body.arg, into.body.src[0]
    if isinstance(given, torch.fx.Node) and ctx.env[given] == into:
        return into  # what computes it works in place
    ctx.flush_writes([target])
    if isinstance(given, torch.fx.Node):
        source = ctx.env[given]
    value = expand(operand(ctx, source, into.dtype), into.size)
    if any(node.arg == target and node.src[0] is not where for node in loads(value.body)):
        value = ctx.copy(value)
    ctx.nest(placeholders(into.size), (), [Store(target, where, value.body)])
    return into
