"""Calls that write to their arguments, which the graph shows as functions.

A custom operator that mutates arrives as `auto_functionalized_v2(op, ...)`: a call on copies of
what it writes, which gives the copies. Here it is the call itself, on the original memory where
`mutation.overwritable` allows, on a copy elsewhere; what nobody initialised is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops import auto_functionalize as af
from torch._ops import OpOverload
from torch.fx.node import map_arg

from tilewright import metrics
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, load
from tilewright.lower.context import Lowering, as_view, is_plain
from tilewright.lower.mutation import copied, is_replaced, overwritable, reading, views_of
from tilewright.lower.opaque import (
    as_argument,
    lift,
    may_alias,
    plain,
    same_layout,
    storage_of,
)
from tilewright.lower.table import Unsupported
from tilewright.lower.tensor import Tensor, placeholders

aten = torch.ops.aten
Node = torch.fx.Node

UNINITIALISED = frozenset((
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.empty_permuted.default, aten.new_empty.default, aten.new_empty_strided.default,
    torch.ops.prims.empty_strided.default, torch.ops.prims.empty_permuted.default,
))  # fmt: skip


# ---- memory to write to


_OUT = getattr(torch.Tag, "out", None)  # operators have it from torch 2.13 on


def own(ctx: Lowering, given: Node, others: Sequence[Node]) -> Tensor:
    """The value of `given`, laid out as eager has it, in memory that the current node may write.

    `others` are the call's other arguments. One that shares memory with `given` in eager may go on
    doing so; one that only happens to be read from the same buffer gets memory of its own.
    """
    fake = given.meta["val"]
    stride = ctx.sizes.tuple(fake.stride())
    if given.target in UNINITIALISED:
        return ctx.stored(ctx.buffer(ctx.sizes.tuple(fake.size()), fake.dtype, fake.device, stride))
    _store_base(ctx, given)
    t: Tensor = ctx.env[given]
    found = as_view(t)
    if found is None:
        return ctx.copy(t, stride)
    if not same_layout(found, stride) or not overwritable(ctx, t, written=given):
        return copied(ctx, t, stride)
    for other in reading(ctx, found.buffer, others):
        if storage_of(other.meta["val"]) != storage_of(fake):
            ctx.detach(other)
    return t


def _store_base(ctx: Lowering, given: Node) -> None:
    """Give a tensor memory before a part of it is written, if nobody wants what the part held and
    somebody wants the rest: so the part is written in its place, rather than put there later."""
    views = views_of(given)
    base = next(reversed(views), None)
    if base is None or base.op == "placeholder":
        return
    before = ctx.based.get(base) is ctx.node  # for another part of it
    if as_view(ctx.env[base]) is not None and not before:
        return
    if not ctx.waiting(base) or not all(is_replaced(ctx, n, v) for n, v in views.items()):
        return
    fake = base.meta["val"]
    stride = ctx.sizes.tuple(fake.stride())
    if before:
        pass
    elif base.target in UNINITIALISED:
        made = ctx.buffer(ctx.sizes.tuple(fake.size()), fake.dtype, fake.device, stride)
        ctx.env[base] = ctx.stored(made)
    else:
        ctx.env[base] = ctx.copy(ctx.env[base], stride)
    ctx.based[base] = ctx.node
    stored = as_view(ctx.env[base])
    assert stored is not None
    start = ctx.sizes.index(fake.storage_offset())
    for view in views.values():
        part = view.meta["val"]
        size = ctx.sizes.tuple(part.size())
        begin = ix.sub(ctx.sizes.index(part.storage_offset()), start)
        index = ix.linearize(placeholders(size), ctx.sizes.tuple(part.stride()),
                             ix.add(stored.offset, begin))  # fmt: skip
        ctx.env[view] = Tensor(size, part.dtype, part.device, load(stored.buffer, part.dtype,
                                                                   index))  # fmt: skip


# ---- custom operators


def functionalized(ctx: Lowering, node: Node) -> list[Any]:
    """`auto_functionalized_v2(op, ..., _all_bases=[...])` gives op's results and the new bases."""
    op, given, bases = _parts(node)
    if _OUT in op.tags:
        raise Unsupported("an operator that makes its outputs")
    names, types = af.get_mutable_args(op)
    made: Any = bases  # only their number matters
    views = af.read_view_information_from_args(names, types, given, made)
    owned = _own_all(ctx, node, bases)
    for name in names:
        given[name] = _regenerated(ctx, views[name], bases, owned)
    return _run(ctx, node, op, given, owned)


def functionalized_old(ctx: Lowering, node: Node) -> list[Any]:
    """`auto_functionalized(op, ...)`: every mutated argument stands for itself."""
    op, given, _ = _parts(node)
    names, _ = af.get_mutable_args(op)
    results: list[Any] = []
    for name in names:
        value = given[name]
        nodes = list(value) if isinstance(value, (list, tuple)) else [value]
        owned = _own_all(ctx, node, nodes)
        given[name] = owned if isinstance(value, (list, tuple)) else owned[0]
        results.append(given[name])
    return _run(ctx, node, op, given, results)


def _parts(node: Node) -> tuple[OpOverload, dict[str, Any], list[Node]]:
    op, given = node.args[0], dict(node.kwargs)
    bases: Any = given.pop("_all_bases", [])
    if not isinstance(op, OpOverload) or "_op_schema" in given:
        raise Unsupported("a higher-order operator that mutates")
    tensors: list[Any] = []
    map_arg(dict(node.kwargs), lambda n: tensors.append(n.meta["val"]))
    if not all(is_plain(t) for t in tensors if isinstance(t, torch.Tensor)):
        raise Unsupported("operand is not a plain strided tensor")
    return op, given, list(bases)


def _own_all(ctx: Lowering, node: Node, nodes: Sequence[Node | None]) -> list[Tensor | None]:
    return [None if n is None else own(ctx, n, [m for m in node.all_input_nodes if m is not n])
            for n in nodes]  # fmt: skip


def _regenerated(ctx: Lowering, info: Any, bases: list[Node],
                 owned: Sequence[Tensor | None]) -> Any:  # fmt: skip
    """A mutated argument as the view of its base that it was."""
    if info is None:
        return None
    if isinstance(info, list):
        return [_regenerated(ctx, item, bases, owned) for item in info]  # pyright: ignore
    base = owned[info.base_index]
    assert base is not None
    if isinstance(info, af.SliceViewInfo):
        return _sliced(ctx, base, info)
    if isinstance(info, af.AsStridedViewInfo):
        return _strided(ctx, base, bases[info.base_index].meta["val"], info)
    return base


def _number(ctx: Lowering, value: Any) -> Expr:
    return ctx.env[value] if isinstance(value, Node) else ctx.sizes.index(value)


def _sliced(ctx: Lowering, base: Tensor, info: af.SliceViewInfo) -> Tensor:
    start, end = _number(ctx, info.start), _number(ctx, info.end)
    dim = int(info.dim)
    size = (*base.size[:dim], ix.sub(end, start), *base.size[dim + 1 :])
    points = placeholders(size)
    where = [ix.add(p, start) if k == dim else p for k, p in enumerate(points)]
    return Tensor(size, base.dtype, base.device, base.at(where))


def _strided(ctx: Lowering, base: Tensor, fake: torch.Tensor, info: af.AsStridedViewInfo) -> Tensor:
    found = as_view(base)
    assert found is not None
    begin = ix.sub(_number(ctx, info.storage_offset), ctx.sizes.index(fake.storage_offset()))
    size = tuple(_number(ctx, n) for n in info.size)
    stride = [_number(ctx, n) for n in info.stride]
    index = ix.linearize(placeholders(size), stride, ix.add(found.offset, begin))
    return Tensor(size, base.dtype, base.device, load(found.buffer, base.dtype, index))


def _run(ctx: Lowering, node: Node, op: OpOverload, given: dict[str, Any],
         owned: Sequence[Any]) -> list[Any]:  # fmt: skip
    """Call the operator with `Tensor`s it writes and nodes it reads; its results, then `owned`."""
    written: list[str] = []

    def argument(value: Any) -> Any:
        if isinstance(value, Tensor):
            found = as_view(value)
            assert found is not None
            written.append(found.buffer)
            return found
        if isinstance(value, (list, tuple)):
            return [argument(item) for item in value]  # pyright: ignore
        return as_argument(ctx, value) if isinstance(value, Node) else plain(value)

    kwargs = {name: argument(value) for name, value in given.items()}
    made: tuple[Any, ...] = tuple(node.meta["val"])[: len(node.meta["val"]) - len(owned)]
    value = made[0] if len(op._schema.returns) < 2 else made
    metrics.fallback_nodes += 1
    metrics.fallback_ops[str(op)] += 1
    result = ctx.call(op, (), kwargs, value, tuple(dict.fromkeys(written)), (), may_alias(op))
    lifted = lift(ctx, result)
    return [*(lifted if isinstance(value, tuple) else [lifted]), *owned]


FUNCTIONS: dict[Any, Callable[[Lowering, Node], Any]] = {
    af.auto_functionalized_v2: functionalized,
    af.auto_functionalized: functionalized_old,
}
