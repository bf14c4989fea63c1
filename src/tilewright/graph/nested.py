"""A sum of sums as one: what is folded along memory has no rows, which may be short or odd."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload

from tilewright.graph.sums import EXACT, Maker

aten = torch.ops.aten

Node = torch.fx.Node

SUMS = (aten.sum.dim_IntList, aten.sum.default)
ROWS = (aten.sum.dim_IntList, aten.mean.dim)
SCALES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default)


def sum_of_sums(node: Node) -> Node | None:
    """`x.sum(-1).mean()` as the sum of all of `x` over the number of rows, with what the row sums
    are multiplied by in between."""
    if node.kwargs or len(node.args) != 1 or node.meta["val"].dtype not in EXACT:
        return None
    scales: list[Node] = []
    inner: Any = node.args[0]
    while _is_scaled(inner):
        scales.append(inner)
        inner = inner.args[0]
    if not _is_row_sum(inner):
        return None
    x: Any = inner.args[0]
    rows, size = inner.meta["val"].numel(), x.meta["val"].numel()
    if not isinstance(size, int) or size == 0 or not _is_of_each(x):
        return None
    make = Maker(node, node)
    found = make(aten.sum.default, x)
    for scale in reversed(scales):
        found = make(scale.target, found, *scale.args[1:])
    parts = (1 if node.target in SUMS else rows) * (1 if inner.target in SUMS else size // rows)
    return found if parts == 1 else make(aten.div.Tensor, found, float(parts))


def _is_row_sum(node: Any) -> bool:
    if not isinstance(node, Node) or node.target not in ROWS or len(node.users) != 1:
        return False
    x: Any = node.args[0]
    return not node.kwargs and x.meta["val"].dtype == node.meta["val"].dtype


def _is_scaled(node: Any) -> bool:
    """Whether each element is multiplied by a number, for one reader."""
    if not isinstance(node, Node) or node.target not in SCALES or len(node.users) != 1:
        return False
    return not node.kwargs and all(
        isinstance(a, (int, float)) and math.isfinite(a) for a in node.args[1:])  # fmt: skip


def _is_of_each(x: Node) -> bool:
    """Whether elements depend on those at their own place alone: where rows are folded for them
    first, they are on the chip when the row is summed."""
    waiting, seen = [x], set[Node]()
    while waiting:
        here = waiting.pop()
        if here in seen or here.op in ("placeholder", "get_attr"):
            continue
        seen.add(here)
        target = here.target
        if not isinstance(target, OpOverload) or not (
            target.is_view or torch.Tag.pointwise in target.tags
            or target is torch.ops.prims.convert_element_type.default
        ):  # fmt: skip
            return False
        waiting += here.all_input_nodes
    return True
