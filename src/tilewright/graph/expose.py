"""Ops whose parts are worth keeping, or drawing again, are taken apart in a joint graph.

An op that we lower whole hides choices from the partitioner: a mask of one byte where it saves the
four of an operand, the statistics of a row where it saves the row, a seed where it saves a mask.
Only training graphs are touched, and the formulas are those of the lowerings.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from tilewright import config
from tilewright.graph import seeded

aten, prims = torch.ops.aten, torch.ops.prims

Node = torch.fx.Node


def expose(graph: torch.fx.Graph) -> None:
    """Take apart what has a rule, in place."""
    for node in list(graph.nodes):
        rule = RULES.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            rule(_Builder(node))
            if not node.users:
                graph.erase_node(node)


class _Builder:
    """Makes nodes in front of one node, with fake values of their own."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.node.graph.inserting_before(self.node):
            made = self.node.graph.call_function(target, args, kwargs)
        made.meta = dict(self.node.meta)
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            made.meta["val"] = target(*values[0], **values[1])
        made.meta.pop("tensor_meta", None)
        return made

    @property
    def mode(self) -> Any:
        found: Any = self.node.args[0]
        return found.meta["val"].fake_mode

    def becomes(self, new: Node) -> None:
        """`new`, made here, takes the node's place and its layout: lowering goes by fake values."""
        new.meta["val"] = self.node.meta["val"]
        self.node.replace_all_uses_with(new)


# ---- masks


def _threshold_backward(make: _Builder) -> None:
    grad, x, threshold = make.node.args
    make.becomes(make(aten.masked_fill.Scalar, grad, make(aten.le.Scalar, x, threshold), 0))


def _hardtanh_backward(make: _Builder) -> None:
    grad, x, low, high = make.node.args
    inside = make(aten.bitwise_and.Tensor, make(aten.gt.Scalar, x, low),
                  make(aten.lt.Scalar, x, high))  # fmt: skip
    outside = make(aten.bitwise_not.default, inside)
    make.becomes(make(aten.masked_fill.Scalar, grad, outside, 0))


# ---- random numbers


def _dropout(make: _Builder) -> None:
    x: Any = make.node.args[0]
    p = make.node.args[1]
    train = make.node.args[2] if len(make.node.args) > 2 else True
    if not train or not isinstance(p, float) or not 0 < p < 1 or config.fallback_random:
        return
    fake = x.meta["val"]
    number = sum(n.target is seeded.seed for n in make.node.graph.nodes)
    seed = make(seeded.seed, number, device=fake.device)
    mask = make(aten.lt.Scalar, make(seeded.uniform, seed, _sizes(make, x)), 1 - p)
    result = make(aten.native_dropout_backward.default, x, mask, 1 / (1 - p))
    for user in list(make.node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(mask if user.args[1] else result)
        user.graph.erase_node(user)


def _sizes(make: _Builder, x: Node) -> list[Any]:
    """A tensor's sizes, the symbolic ones as nodes."""
    return [
        make(aten.sym_size.int, x, dim) if isinstance(n, torch.SymInt) else n
        for dim, n in enumerate(x.meta["val"].size())
    ]


# ---- statistics


def _log_softmax(make: _Builder) -> None:
    x, dim, _ = make.node.args
    fake, result = x.meta["val"], make.node.meta["val"]  # type: ignore[union-attr]
    if fake.dim() == 0 or any(n == 0 for n in fake.shape if isinstance(n, int)):
        return
    wide = torch.float64 if result.dtype == torch.float64 else torch.float32
    if fake.dtype != wide:
        x = make(prims.convert_element_type.default, x, wide)
    low = make(aten.sub.Tensor, x, make(aten.amax.default, x, [dim], True))
    total = make(aten.sum.dim_IntList, make(aten.exp.default, low), [dim], True)
    out = make(aten.sub.Tensor, low, make(aten.log.default, total))
    if result.dtype != wide:
        out = make(prims.convert_element_type.default, out, result.dtype)
    make.becomes(out)


RULES: dict[Any, Callable[[_Builder], None]] = {
    aten.threshold_backward.default: _threshold_backward,
    aten.hardtanh_backward.default: _hardtanh_backward,
    aten.native_dropout.default: _dropout,
    aten._log_softmax.default: _log_softmax,
}
