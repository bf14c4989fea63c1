"""Sums of matrix products as one product: `a0 @ b0 + a1 @ b1` is `[a0 a1] @ [b0 b1]`, joined along
the dimension that is summed.

The gradient of a weight that is used in every step of a loop is such a sum, of as many products as
there are steps. Each would be written and read again whole; put side by side, only the operands
move. Taken where that is less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

aten = torch.ops.aten

Node = torch.fx.Node

EXACT = (torch.float32, torch.float64)  # low-precision eager rounds every product and every sum
TRANSPOSED = (aten.t.default, aten.permute.default, aten.transpose.int)  # of a matrix


def join_products(graph: torch.fx.Graph, written: set[int | None]) -> bool:
    """Rewrite in place; operands in storages of `written` stay where they are read."""
    changed = False
    for root in list(graph.nodes):
        if _is_sum(root) and not any(_is_part(root, user) for user in root.users):
            changed |= _join(root, written)
    return changed


def _join(root: Node, written: set[int | None]) -> bool:
    leaves = _leaves(root)
    products = [n for n in dict.fromkeys(leaves) if leaves.count(n) == 1 and _is_product(n)]
    products = [n for n in products if not any(_storage(a) in written for a in n.args)]
    if len(products) < 2 or not _pays(products):
        return False
    make = Maker(root, root)
    left = _side_by_side(make, [n.args[0] for n in products], 1)
    right = _side_by_side(make, [n.args[1] for n in products], 0)
    total = make(aten.mm.default, left, right)
    for other in leaves:
        if other not in products:
            total = make(aten.add.Tensor, other, total)
    total.meta["val"] = root.meta["val"]
    root.replace_all_uses_with(total)
    return True


def _is_sum(node: Node) -> bool:
    return (node.op == "call_function" and node.target is aten.add.Tensor and not node.kwargs
            and all(_shape(a) is not None and _shape(a) == _shape(node)
                    for a in node.args))  # fmt: skip


def _is_part(node: Node, user: Node) -> bool:
    """Whether a sum is nothing but a summand of a larger one."""
    return len(node.users) == 1 and _is_sum(user) and user.args.count(node) == 1


def _leaves(root: Node) -> list[Node]:
    found: list[Node] = []
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if node is root or (_is_sum(node) and any(_is_part(node, u) for u in node.users)):
            stack += reversed(node.args)
        else:
            found.append(node)
    return found


def _is_product(node: Node) -> bool:
    return (node.target is aten.mm.default and len(node.users) == 1
            and node.meta["val"].dtype in EXACT
            and all(_shape(a) is not None for a in node.args))  # fmt: skip


def _pays(products: Sequence[Node]) -> bool:
    """Whether putting the operands side by side, and reading that, moves fewer elements than
    writing and reading the products."""
    shapes = [_shape(a) for n in products for a in n.args]
    operands = sum(shape[0] * shape[1] for shape in shapes if shape is not None)
    rows, columns = products[0].meta["val"].shape
    return operands < (len(products) - 1) * rows * columns


def _side_by_side(make: Maker, parts: Sequence[Any], dim: int) -> Node:
    if all(p.target in TRANSPOSED for p in parts):  # along rows, as they are in memory
        return make(aten.t.default, make(aten.cat.default, [p.args[0] for p in parts], 1 - dim))
    return make(aten.cat.default, list(parts), dim)


class Maker:
    """Makes nodes in front of one node, with fake values of their own. They come from the user's
    line of `like`."""

    def __init__(self, before: Node, like: Node) -> None:
        self.before = before
        self.like = like
        (value, *_) = pytree.tree_leaves(like.meta["val"])
        self.mode: Any = value.fake_mode

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.before.graph.inserting_before(self.before):
            made = self.before.graph.call_function(target, args, kwargs)
        made.meta = dict(self.like.meta)
        made.meta.pop("tensor_meta", None)
        with self.mode:
            made.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return made


def _shape(node: Any) -> tuple[int, int] | None:
    """Rows and columns of a matrix, where they are known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return None
    sizes: list[Any] = list(value.shape)
    return (sizes[0], sizes[1]) if all(isinstance(n, int) for n in sizes) else None


def _storage(node: Any) -> int | None:
    return node.meta["val"].untyped_storage()._cdata
