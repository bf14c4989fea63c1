"""Overwriting memory: when a value may be changed where it lies, and when it must be copied first.

A graph is functional: `index_put(x, ...)` is a new tensor. It may take over the memory of `x` when
nobody needs what that memory holds now, and the memory is ours to change: it was allocated by the
program, or it is an argument that gets its final contents later (`copy_`), or one that was donated.
Values that still have to be computed from the old contents are stored first, where that moves fewer
bytes than a copy of `x`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx

from tilewright import config, metrics
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, loads
from tilewright.ir.program import Store
from tilewright.lower.context import Lowering, as_view
from tilewright.lower.table import LOWERINGS
from tilewright.lower.tensor import Tensor, placeholders, reads_buffer
from tilewright.lower.values import tensors

aten = torch.ops.aten
Node = torch.fx.Node


def take(ctx: Lowering, t: Tensor, stride: Sequence[Expr] | None = None) -> Tensor:
    """`t` in memory that the current node may overwrite: its own, or a copy of it.

    The node's arguments behind the first must not read that memory: they need it unchanged.
    """
    return t if overwritable(ctx, t, others(ctx)) else copied(ctx, t, stride)


def copied(ctx: Lowering, t: Tensor, stride: Sequence[Expr] | None) -> Tensor:
    """A copy that would not be needed if the memory of `t` were free."""
    if as_view(t) is not None:
        metrics.counters["inplace"]["missed"] += 1
        metrics.counters["inplace"]["missed_bytes"] += _bytes(t)
    return ctx.copy(t, None if stride is None else tuple(stride))


def overwritable(ctx: Lowering, t: Tensor, operands: Sequence[Node] = (),
                 written: Node | None = None) -> bool:  # fmt: skip
    """Whether the memory of `t` is free to change; if so, whatever still needs it was stored.

    `operands` read what they need while the memory changes, so they must not be read from it.
    `written` is the node whose value `t` is, if all of that is to change and nothing beside it.
    """
    found = as_view(t)
    if found is None or not config.inplace_buffers or any(s is ix.ZERO for s in found.stride):
        return False
    name = found.buffer
    kind = ctx.program.buffers[name].kind
    if name in ctx.exposed or not (kind == "temporary" or _is_spent(ctx, name)):
        return False
    if reading(ctx, name, operands):
        return False
    views = views_of(written)
    waiting = [n for n in ctx.env.readers(name) if not is_replaced(ctx, n, views.get(n))]
    cost = sum(_bytes(x) for n in waiting for x in tensors(ctx.env[n]))
    # an argument that is copied instead is written once more in the end
    if waiting and cost >= _bytes(t) * (1 if kind == "temporary" else 3):
        return False
    for n in waiting:
        ctx.detach(n)
    return True


_SCATTERS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.as_strided_scatter.default: aten.as_strided.default,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


def views_of(node: Node | None) -> dict[Node, Node]:
    """What a value is a view of, directly or not: each with the view of it that was taken."""
    found: dict[Node, Node] = {}
    while node is not None and getattr(node.target, "is_view", False):
        base = node.all_input_nodes[0]
        found[base] = node
        node = base
    return found


def is_replaced(ctx: Lowering, node: Node, view: Node | None) -> bool:
    """Whether nothing after the current node uses what `node` holds in this view of it.

    The graph has `node` with the view replaced for a call that writes to a view of a tensor.
    """
    for user in ctx.waiting(node):
        if view is None or user.target not in _SCATTERS or node in user.all_input_nodes[1:]:
            return False
        same = view.target is _SCATTERS[user.target] and (view.args[1:], view.kwargs) == (
            user.args[2:], user.kwargs)  # fmt: skip
        if not same and not is_replaced(ctx, user, view):
            return False
    return True


def reading(ctx: Lowering, buffer: str, nodes: Sequence[Node]) -> list[Node]:
    return [n for n in nodes if any(reads_buffer(x, buffer) for x in tensors(ctx.env[n]))]


def _is_spent(ctx: Lowering, buffer: str) -> bool:
    """An argument whose present contents are nobody's: donated, or overwritten in the end."""
    if buffer in ctx.program.donated:
        return True
    return any(n.op == "placeholder" and as_view(ctx.env[n]) is not None and _written_later(ctx, n)
               for n in ctx.env.readers(buffer))  # fmt: skip


def _written_later(ctx: Lowering, argument: Node) -> bool:
    return any(user.target is aten.copy_.default and user.args[0] is argument
               and user not in ctx.env for user in argument.users)  # fmt: skip


def others(ctx: Lowering) -> list[Node]:
    """The current node's arguments behind the first."""
    assert ctx.node is not None
    found: list[Node] = []
    torch.fx.map_arg((ctx.node.args[1:], ctx.node.kwargs), found.append)
    return found


def _bytes(t: Tensor) -> int:
    return max(ix.likely(t.numel), 0) * t.dtype.itemsize


# ---- a window of a tensor replaced


def put_window(ctx: Lowering, t: Tensor, src: Tensor,
               position: Callable[..., Sequence[Expr]]) -> Tensor | None:  # fmt: skip
    """`t` with the elements at `position(point of src)` replaced, in the memory of `t`.

    None where that saves nothing: the memory is needed, or the result would never be stored.
    """
    points = placeholders(src.size)
    old = t.at(position(*points))
    found = as_view(t)
    if found is not None and src.at(points) is old:
        return t  # what was computed there already
    if found is None or not _is_stored_anyway(ctx, t) or not overwritable(ctx, t):
        return None
    where = old.src[0]
    if any(n.arg == found.buffer and n.src[0] is not where for n in loads(src.body)):
        src = ctx.copy(src)
    ctx.nest(points, (), [Store(found.buffer, where, src.at(points))])
    return t


def _is_stored_anyway(ctx: Lowering, t: Tensor) -> bool:
    """Whether the result will lie in memory: an argument does; else a user may want it there."""
    found = as_view(t)
    assert ctx.node is not None
    if found is None:
        return False
    if ctx.program.buffers[found.buffer].kind == "input":
        return True
    return any(u.op == "output" or u.target not in LOWERINGS for u in ctx.node.users)
