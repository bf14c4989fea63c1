"""Sums of matrix products as one product, where that moves less.

`a0 @ b + a1 @ b` is `(a0 + a1) @ b`: half the work. The gradient of `x @ x.T` is such a sum.

`a0 @ b0 + a1 @ b1` is `[a0 a1] @ [b0 b1]`, joined along the dimension that is summed. The gradient
of a weight that is used in every step of a loop is such a sum, of as many products as there are
steps. Each would be written and read again whole; put side by side, only the operands move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
        if _is_sum(root):
            changed |= _share(root, written)
    for root in list(graph.nodes):
        if _is_sum(root) and not any(_is_part(root, user) for user in root.users):
            changed |= _join(root, written)
    return changed


# ---- products that have an operand in common


@dataclass(frozen=True)
class Side:
    """An operand of a product: a node, or its transpose."""

    node: Node
    turned: bool

    @property
    def transpose(self) -> Side:
        return Side(self.node, not self.turned)

    def made(self, make: Maker) -> Node:
        return make(aten.transpose.int, self.node, -2, -1) if self.turned else self.node

    @property
    def elements(self) -> int:
        return math.prod(self.node.meta["val"].shape)


def _share(root: Node, written: set[int | None]) -> bool:
    """Of a sum of two products with the same operand on one side."""
    first, second = (_sides(a) for a in root.args)
    if first is None or second is None or not root.meta["val"].is_contiguous():
        return False
    if any(_storage(side.node) in written for side in (*first, *second)):
        return False
    for k in (0, 1):
        both, common = (first[1 - k], second[1 - k]), first[k]
        less = 2 * both[0].elements <= common.elements + 2 * root.meta["val"].numel()
        if common == second[k] and less:
            make = Maker(root, root)
            total = make(aten.add.Tensor, *(side.made(make) for side in both))
            pair = (common.made(make), total)
            product = aten.mm.default if root.meta["val"].dim() == 2 else aten.bmm.default
            made = make(product, *(pair if k == 0 else pair[::-1]))
            made.meta["val"] = root.meta["val"]
            root.replace_all_uses_with(made)
            return True
    return False


def _sides(node: Any) -> tuple[Side, Side] | None:
    """Both operands of a product that nobody else reads, or of the transpose of one."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    if _is_transpose(node):
        found = _sides(node.args[0])
        return None if found is None else (found[1].transpose, found[0].transpose)
    if node.target not in (aten.mm.default, aten.bmm.default):
        return None
    if node.meta["val"].dtype not in EXACT or None in map(_size, node.args):
        return None
    left, right = (_side(a) for a in node.args)
    return left, right


def _side(node: Any) -> Side:
    return _side(node.args[0]).transpose if _is_transpose(node) else Side(node, False)


def _is_transpose(node: Any) -> bool:
    """Whether the node swaps the last two dimensions and nothing else."""
    value = node.meta.get("val")
    rank = value.dim() if isinstance(value, torch.Tensor) else 0
    if node.target is aten.t.default:
        return rank == 2
    if rank < 2 or node.target not in TRANSPOSED:
        return False
    order = list(range(rank))
    if node.target is aten.transpose.int:
        one, other = node.args[1:]
        order[one], order[other] = order[other], order[one]
    else:
        order = [d % rank for d in node.args[1]]
    return order == [*range(rank - 2), rank - 1, rank - 2]


def _size(node: Any) -> tuple[int, ...] | None:
    """The sizes of a tensor, where they are known."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    sizes: list[Any] = list(value.shape)
    return tuple(sizes) if all(isinstance(n, int) for n in sizes) else None


# ---- products side by side


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
    """Of two tensors as large as itself, all of known sizes."""
    if node.op != "call_function" or node.target is not aten.add.Tensor or node.kwargs:
        return False
    size = _size(node)
    return size is not None and all(_size(a) == size for a in node.args)


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
    size = _size(node)
    return (size[0], size[1]) if size is not None and len(size) == 2 else None


def _storage(node: Any) -> int | None:
    return node.meta["val"].untyped_storage()._cdata
