"""Calls that the loop IR does not look into: their arguments as windows on memory, their results
as buffers, and the ATen fallback."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from tilewright import metrics
from tilewright.errors import LoweringError, at_node
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Handle, Opaque, View
from tilewright.lower.context import Lowering, as_view
from tilewright.lower.sizes import shape_env, unbacked, undefined
from tilewright.lower.tensor import Tensor

aten = torch.ops.aten


def same_layout(view: View, stride: tuple[Expr, ...]) -> bool:
    return all(
        a is b or n is ix.ONE for a, b, n in zip(view.stride, stride, view.size, strict=True)
    )


def storage_of(fake: torch.Tensor) -> int:
    return fake.untyped_storage()._cdata


# Products, and how each is called to write into memory it is given.
INTO: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.addmm.default: aten.addmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
}

# Products take any strides as they come; most other ops that AOTAutograd leaves in the graph were
# written for the layout their callers prepared (a `contiguous()` just before is no accident).
_ANY_LAYOUT = frozenset(INTO)


def opaque_arguments(ctx: Lowering, node: torch.fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with every tensor as a view of memory, laid out as eager has it."""
    any_layout = node.target in _ANY_LAYOUT
    if _wants_contiguous(node.target):
        return _contiguous_arguments(ctx, node)
    args, kwargs = map_arg((tuple(node.args), dict(node.kwargs)),
                           lambda arg: as_argument(ctx, arg, any_layout))  # fmt: skip
    return plain(args), plain(kwargs)


def _wants_contiguous(target: Any) -> bool:
    """Whether the op says that it can only read tensors without gaps, in order."""
    tag = getattr(torch.Tag, "needs_contiguous_strides", None)
    return tag is not None and isinstance(target, OpOverload) and tag in target.tags


def _contiguous_arguments(ctx: Lowering, node: torch.fx.Node
                          ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    def found(arg: torch.fx.Node) -> Any:
        value = ctx.env[arg]
        if not isinstance(value, Tensor):
            return value
        stride = ix.contiguous_strides(value.size)
        view = as_view(value)
        if view is None or not same_layout(view, stride):
            view = as_view(ctx.copy(value, stride))
        assert view is not None
        return view

    args, kwargs = map_arg((tuple(node.args), dict(node.kwargs)), found)
    return plain(args), plain(kwargs)


def as_argument(ctx: Lowering, arg: torch.fx.Node, any_layout: bool = False) -> Any:
    """A node's value as a call takes it: a window on memory, a number, a handle."""
    found = ctx.env[arg]
    if not isinstance(found, Tensor):
        return found
    view = as_view(found)
    stride = ctx.sizes.tuple(arg.meta["val"].stride())
    if view is None or not (any_layout or same_layout(view, stride)):
        found = ctx.env[arg] = ctx.copy(found, stride)
        view = as_view(found)
        assert view is not None
    # eager's strides also where a dimension has one element: ATen tells layouts apart by them
    return view if any_layout else replace(view, stride=stride)


def plain(tree: Any) -> Any:
    """FX's immutable containers as ordinary ones."""
    if isinstance(tree, (list, tuple)):
        items = [plain(x) for x in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {k: plain(v) for k, v in tree.items()}
    return tree


def fallback(ctx: Lowering, node: torch.fx.Node) -> Any:
    """Let ATen (or the higher-order operator itself) compute this node."""
    if not isinstance(node.target, (OpOverload, HigherOrderOperator)) and not callable(node.target):
        raise LoweringError(f"cannot call {node.target}", site=at_node(node))
    if node.target is not operator.getitem:
        metrics.fallback_nodes += 1
        metrics.fallback_ops[str(node.target)] += 1
    return call_out(ctx, node, node.target)


def call_out(ctx: Lowering, node: torch.fx.Node, target: Any) -> Any:
    """The node's value by a call of `target`, which takes what the node's own target does."""
    args, kwargs = opaque_arguments(ctx, node)
    value = node.meta.get("val")
    if node.target in INTO and isinstance(value, torch.Tensor):
        stride = ctx.strides(value, any(user.op == "output" for user in node.users))
        if stride != ctx.sizes.tuple(value.stride()):
            return _into(ctx, node, args, kwargs, stride)
    binds: list[tuple[str, Any]] = []
    new = unbacked(value, node.meta)
    for symbol, path in (new or undefined(value, ctx.defined)).items():
        bound = ctx.sizes.symbol(symbol, shape_env(value))
        assert bound is not None
        ctx.program.symbols[symbol.name] = bound
        ctx.defined.add(symbol.name)
        binds.append((symbol.name, path))
    result = ctx.call(target, args, kwargs, value, _mutated(node, args, kwargs), tuple(binds),
                      may_alias(node.target))  # fmt: skip
    if node.meta.get("unbacked_bindings"):
        made = ctx.program.nodes[-1]
        assert isinstance(made, Opaque)
        ctx.program.nodes[-1] = replace(made, data_sized=True)
    if isinstance(result, Tensor) and value is not None and storage_of(value) in ctx.shared:
        ctx.owners.setdefault(result.body.arg, storage_of(value))
    return lift(ctx, result)


def _into(ctx: Lowering, node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any],
          stride: tuple[Expr, ...]) -> Tensor:  # fmt: skip
    """A product stored with strides of ours."""
    value = node.meta["val"]
    made = ctx.buffer(ctx.sizes.tuple(value.size()), value.dtype, value.device, stride)
    out = View(made.name, made.size, made.stride, ix.ZERO, made.dtype)
    ctx.program.nodes.append(
        Opaque(ctx.fresh("call"), INTO[node.target], args, kwargs, (), (), ctx.origin(), out=out)
    )
    return ctx.stored(made)


def may_alias(target: Any) -> bool:
    """Whether a result can share memory with an operand, by the op's own word."""
    if not isinstance(target, OpOverload):
        return True
    return any(r.alias_info is not None for r in target._schema.returns)


def lift(ctx: Lowering, result: Any) -> Any:
    """Name the results that are not plain tensors, so that later calls can take them."""
    call = ctx.program.nodes[-1]
    assert isinstance(call, Opaque)
    if call.single:
        return result if isinstance(result, Tensor) else Handle(f"{call.name}_r0")
    return [r if isinstance(r, Tensor) else _lift_item(ctx, call, k, r)
            for k, r in enumerate(result)]  # fmt: skip


def _lift_item(ctx: Lowering, call: Opaque, k: int, value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return ctx.sizes.index(value)
    return value if value is None else Handle(f"{call.name}_r{k}")


def _mutated(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The buffers an op writes, from its schema."""
    if not isinstance(node.target, OpOverload):
        return ()
    found: list[str] = []
    for k, arg in enumerate(node.target._schema.arguments):
        if arg.alias_info is None or not arg.alias_info.is_write:
            continue
        given = args[k] if k < len(args) else kwargs.get(arg.name)
        found += [v.buffer for v in pytree.tree_leaves(given, is_leaf=lambda x: isinstance(x, View))
                  if isinstance(v, View)]  # fmt: skip
    return tuple(found)
