"""Convolutions of one point as products (`config.conv_1x1_as_mm`).

Each pixel's channels are a row that is multiplied by the weights. An image with its channels last
is that matrix as it lies; of one with its channels first each plane is a column, and the product is
of the weights with it. Nothing is copied either way; images laid out otherwise stay convolutions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from tilewright.graph.sums import Maker

aten = torch.ops.aten

Node = torch.fx.Node


def as_products(gm: torch.fx.GraphModule, channels_last: bool = False) -> int:
    """How many convolutions became products, in place; if asked, only of images that are one."""
    found = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    made = sum(_became_product(node, channels_last) for node in found)
    if made:
        gm.graph.lint()
        gm.recompile()
    return made


def _became_product(node: Node, channels_last: bool) -> bool:
    if not _is_of_points(node) or (channels_last and not _is_last(node.args[0])):
        return False
    make = Maker(node, node)
    result = _rows(make, node) if _is_last(node.args[0]) else _planes(make, node)
    if result.meta["val"].stride() != node.meta["val"].stride():
        node.graph.eliminate_dead_code()
        return False
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return True


def _is_of_points(node: Node) -> bool:
    image, weight, _, stride, padding, dilation, transposed, _, groups = node.args
    x, w = _value(image), _value(weight)
    if x is None or w is None or transposed or groups != 1 or x.dim() != w.dim() or x.dim() < 3:
        return False
    still = all(n == 1 for part in (stride, dilation, w.shape[2:]) for n in part)  # type: ignore[union-attr]
    known = all(type(n) is int for n in (*x.shape, *w.shape))
    return (still and known and all(n == 0 for n in padding) and x.numel() > 0  # type: ignore[union-attr]
            and w.is_contiguous() and (_is_last(image) or x.is_contiguous()))  # fmt: skip


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is_last(node: Any) -> bool:
    """Whether channels are next to each other, and there is more than one to tell by."""
    value = node.meta["val"]
    moved = value.permute(0, *range(2, value.dim()), 1)
    return moved.is_contiguous() and not value.is_contiguous()


def _rows(make: Maker, node: Node) -> Node:
    image, weight, bias = node.args[:3]
    n, channels, *space = image.meta["val"].shape  # type: ignore[union-attr]
    out = weight.meta["val"].shape[0]  # type: ignore[union-attr]
    rank = 2 + len(space)
    moved = make(aten.permute.default, image, [0, *range(2, rank), 1])
    rows = make(aten.view.default, moved, [-1, channels])
    columns = make(aten.t.default, make(aten.view.default, weight, [out, channels]))
    if bias is None:
        product = make(aten.mm.default, rows, columns)
    else:
        product = make(aten.addmm.default, bias, rows, columns)
    pixels = make(aten.view.default, product, [n, *space, out])
    return make(aten.permute.default, pixels, [0, rank - 1, *range(1, rank - 1)])


def _planes(make: Maker, node: Node) -> Node:
    image, weight, bias = node.args[:3]
    n, channels, *space = image.meta["val"].shape  # type: ignore[union-attr]
    out = weight.meta["val"].shape[0]  # type: ignore[union-attr]
    rows = make(aten.view.default, weight, [out, channels])
    if n == 1:
        planes = make(aten.view.default, image, [channels, -1])
        added = None if bias is None else make(aten.unsqueeze.default, bias, 1)
        product = (make(aten.mm.default, rows, planes) if added is None
                   else make(aten.addmm.default, added, rows, planes))  # fmt: skip
    else:
        planes = make(aten.view.default, image, [n, channels, -1])
        many = make(aten.expand.default, make(aten.unsqueeze.default, rows, 0), [n, -1, -1])
        added = None if bias is None else make(aten.view.default, bias, [1, out, 1])
        product = (make(aten.bmm.default, many, planes) if added is None
                   else make(aten.baddbmm.default, added, many, planes))  # fmt: skip
    return make(aten.view.default, product, [n, out, *space])
