"""The gradient of what was picked: one element of each row, by gather or by max along a dimension.

It is zero but at one place of each row. Written as zeros into which a scatter stores, it is all in
memory before anything reads it; as a comparison of places it is computed where it is read (labels
gathered from a log softmax of 8192 rows of 10000: 328 MB move instead of 983). Only a backward pass
is looked at: that the positions lie inside their rows was checked by the forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from tilewright.graph.sums import Maker

aten = torch.ops.aten

Node = torch.fx.Node

_SCATTERS = (aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
_ZEROS: dict[Any, int] = {  # where the sizes are among the arguments
    aten.new_zeros.default: 1, aten.zeros.default: 0, aten.full.default: 0,
}  # fmt: skip


def compared(graph: torch.fx.Graph) -> None:
    """Replace such scatters, in place."""
    for target in _SCATTERS:
        for node in graph.find_nodes(op="call_function", target=target):
            _compare(node)


def _compare(node: Node) -> None:
    into, dim, index, src = node.args
    size = size_of_zeros(into)
    if size is None or not isinstance(index, Node) or not isinstance(dim, int):
        return
    picked, whole = index.meta["val"].shape, node.meta["val"].shape
    dim %= max(len(whole), 1)
    if len(whole) < 2 or len(picked) != len(whole) or picked[dim] != 1:
        return
    if any(a != b for d, (a, b) in enumerate(zip(picked, whole, strict=True)) if d != dim):
        return
    if isinstance(src, Node) and src.meta["val"].shape != picked:
        return
    make = Maker(node, node)
    place = make(aten.arange.default, size[dim], device=node.meta["val"].device)
    for _ in whole[dim + 1 :]:
        place = make(aten.unsqueeze.default, place, -1)
    hit = make(aten.eq.Tensor, index, place)
    value = src if isinstance(src, Node) else _number(make, src, node)
    found = make(aten.where.self, hit, value, _number(make, 0, node))
    found.meta["val"] = node.meta["val"]  # it lies as the scatter's result did
    node.replace_all_uses_with(found)
    node.graph.erase_node(node)


def size_of_zeros(node: Any) -> Any:
    """The sizes a tensor of zeros was asked for with; None of any other."""
    if not isinstance(node, Node) or node.target not in _ZEROS:
        return None
    if node.target is aten.full.default and node.args[1] != 0:
        return None
    return node.args[_ZEROS[node.target]]


def _number(make: Maker, value: Any, like: Node) -> Node:
    fake = like.meta["val"]
    return make(aten.full.default, [], value, dtype=fake.dtype, device=fake.device)
