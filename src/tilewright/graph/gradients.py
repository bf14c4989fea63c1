"""The gradients of a wide convolution, one after the other.

One call that gives both the gradient of an image and that of the weight has the image and its
gradient in memory together, and on the CPU the library's copies of both in its own layout beside
them. Where the image is most of what the call touches (a skip connection beside what is put
together with it), the weight's gradient comes first, and then that of the image, a transposed
convolution which does not take the image: that can go in between. The library computes them one by
one in any case (72 channels to 24, 96 x 96: 23.9 ms apart and 23.7 together, 7.1 MB beside the
image instead of 12.5; AVX2, one thread, 2026-11-15).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from tilewright.graph.sums import Maker

aten = torch.ops.aten

Node = torch.fx.Node

WIDE = 2  # times as large as the result's gradient is an image that is worth a second call


def one_by_one(graph: torch.fx.Graph) -> None:
    """Take such calls apart, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        margins = _margins(node)
        mask: Any = node.args[-1]
        if margins is None or not (mask[0] and mask[1]):
            continue
        gradient, _, weight, _, stride, padding, dilation, _, _, groups, _ = node.args
        make = Maker(node, node)
        first = make(aten.convolution_backward.default, *node.args[:-1], [False, *mask[1:]])
        second = make(aten.convolution.default, gradient, weight, None, stride, padding, dilation,
                      True, margins, groups)  # fmt: skip
        for user in list(node.users):
            assert user.target is operator.getitem
            if user.args[1]:
                user.replace_input_with(node, first)
            else:
                second.meta["val"] = user.meta["val"]
                user.replace_all_uses_with(second)
                graph.erase_node(user)
        graph.erase_node(node)


def _margins(node: Node) -> list[int] | None:
    """What the gradient of a wide image has beyond the places that a transposed convolution of the
    result's gradient reaches; None where the calls stay one."""
    given: list[Any] = [n.meta["val"] for n in node.args[:3] if isinstance(n, Node)]
    gradient, image, weight = given
    sizes = [n for t in given for n in t.shape]
    if image.device.type != "cpu" or not all(isinstance(n, int) for n in sizes):
        return None
    stride, padding, dilation, transposed = node.args[4:8]
    plain = all(t.is_contiguous() for t in given)  # the library copies no others
    single = weight.shape[2:].numel() == 1  # these it does not copy
    if not plain or single or transposed or image.numel() < WIDE * gradient.numel():
        return None
    found: list[int] = []
    steps: Any = zip(stride, padding, dilation, strict=True)  # type: ignore[arg-type]
    for d, (step, pad, apart) in enumerate(steps, start=2):
        reached = (gradient.shape[d] - 1) * step - 2 * pad + apart * (weight.shape[d] - 1) + 1
        found.append(image.shape[d] - reached)
    return found
