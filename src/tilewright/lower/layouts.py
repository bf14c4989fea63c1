"""Where the elements of values lie that only loops of ours see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads
from tilewright.lower.table import family
from tilewright.lower.tensor import Size, Tensor, placeholders

CARDS = frozenset(("cuda",))  # devices whose kernels walk any dimension
PLACES = frozenset((torch.ops.aten.as_strided.default,))
Node = torch.fx.Node


def along_operands(t: Tensor, traced: Size, users: Iterable[Node]) -> Size | None:
    """The strides of a value that lies as all does that it is computed of, and that its users read
    beside it; none where it was traced so. Eager's layer norm of channels that are not last in
    memory has them last: what is computed of both is moved by single elements (H200: gradients of
    layer norm and gelu of 64x192x56x56 bfloat16 4.7 ms)."""
    if t.device.type not in CARDS:
        return None
    where = placeholders(t.size)
    own = {v for v in where if v.op == "var"}
    whole = [n.src[0] for n in loads(t.body) if own <= free_vars(n.src[0])]
    found = {_order([ix.coefficient(index, v) for v in where]) for index in whole}
    beside = {_order_of(i) for u in users for i in u.all_input_nodes if _is_like(i, t)}
    if len(found) != 1 or not beside <= found or found == {_order(traced)}:
        return None
    order = found.pop() or ()
    strides = ix.contiguous_strides([t.size[k] for k in order])
    return tuple(s for _, s in sorted(zip(order, strides, strict=True))) or None


def is_for_loops(node: Node) -> bool:
    """Whether nothing takes the value, or a view of it, as memory."""
    for user in node.users:
        kind = family(user.target)
        if user.op == "output" or user.target in PLACES or kind in (None, "products"):
            return False
        if kind == "views" and not is_for_loops(user):
            return False
    return True


def _order(strides: Sequence[Expr | None]) -> tuple[int, ...] | None:
    """The dimensions, outermost in memory first."""
    known = [None if s is None else ix.value_of(s) for s in strides]
    if None in known:
        return None
    return tuple(sorted(range(len(known)), key=lambda k: -(known[k] or 0)))


def _order_of(node: Node) -> tuple[int, ...] | None:
    strides = node.meta["val"].stride()
    return _order([ix.as_index(s) if isinstance(s, int) else None for s in strides])


def _is_like(node: Node, t: Tensor) -> bool:
    """Whether a node gives as many elements that are in memory, as an argument."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    sizes: list[Any] = list(value.shape)
    if [n for n in sizes if isinstance(n, int)] != [ix.value_of(n) for n in t.size]:
        return False
    while family(node.target) == "views":
        node = node.all_input_nodes[0]
    return node.op == "placeholder" or family(node.target) in (None, "products")
