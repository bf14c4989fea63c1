"""Ops whose parts are worth keeping, or drawing again, are taken apart in a joint graph.

An op that we lower whole hides choices from the partitioner: a mask of one byte where it saves the
four of an operand, the statistics of a row where it saves the row, a seed where it saves a mask.
Only training graphs are touched, and the formulas are those of the lowerings.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from tilewright import config
from tilewright.graph import seeded
from tilewright.graph.sums import Maker

aten, prims = torch.ops.aten, torch.ops.prims

Node = torch.fx.Node


Fuses = Callable[[Node], bool]
"""Whether a node becomes part of a kernel of ours."""


def expose(graph: torch.fx.Graph, fuses: Fuses) -> None:
    """Take apart what has a rule, in place."""
    for node in list(graph.nodes):
        rule = RULES.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            rule(_Builder(node, fuses))
            if not node.users:
                graph.erase_node(node)


class _Builder:
    """Makes nodes in front of one node (or `before` another), with fake values of their own."""

    def __init__(self, node: Node, fuses: Fuses) -> None:
        self.node = node
        self.before = node
        self.fuses = fuses
        source: Any = node.args[0]
        self.mode: Any = source.meta["val"].fake_mode

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.node.graph.inserting_before(self.before):
            made = self.node.graph.call_function(target, args, kwargs)
        made.meta = dict(self.node.meta)
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            made.meta["val"] = target(*values[0], **values[1])
        made.meta.pop("tensor_meta", None)
        return made

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


def _sign(make: _Builder) -> None:
    """As a byte, which is enough for it. Of neighbours' differences there are several signs, as
    many bytes as what they are of."""
    x: Any = make.node.args[0]
    dtype = x.meta["val"].dtype
    windows = any(n.target is aten.slice.Tensor for n in x.all_input_nodes)
    if dtype.is_floating_point and not windows:
        sign = make(prims.convert_element_type.default, make(aten.sgn.default, x), torch.int8)
        make.becomes(make(prims.convert_element_type.default, sign, dtype))


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
    powers = make(aten.exp.default, low)
    total = make(aten.sum.dim_IntList, powers, [dim], True)
    if make.node.target is aten._softmax.default:
        out = make(aten.div.Tensor, powers, total)
    else:
        out = make(aten.sub.Tensor, low, make(aten.log.default, total))
    if result.dtype != wide:
        out = make(prims.convert_element_type.default, out, result.dtype)
    make.becomes(out)


def _softmax(make: _Builder) -> None:
    """On a card, where nothing stores a result in float32 but for the backward pass, which may have
    it from its input: a softmax of float32 between tensors of sixteen bits, as in attention (H200:
    131072 rows of 1024 331 us, both passes; 2.1 GB would move otherwise)."""
    result = make.node.meta["val"]
    backward, users = aten._softmax_backward_data.default, list(_users(make.node))
    others = [u for u in users if u.target is not backward]
    wide = result.device.type == "cuda" and result.dtype == torch.float32
    narrowed = all(u.op == "call_function" and make.fuses(u) and _is_narrow(u.meta["val"])
                   for u in others)  # fmt: skip
    if wide and narrowed and len(others) < len(users):
        _log_softmax(make)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.itemsize == 2


# ---- normalised values


def _norm(make: _Builder, shapes: _Shapes, weight: int, bias: int | None, mean: bool) -> None:
    """Where loops use what a norm gives, let it follow from the input and the statistics: the
    backward pass has those anyway. Statistics that were rounded are left alone."""
    node = make.node
    out, *statistics = node.meta["val"][: 3 if mean else 2]
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    results = [user for user in node.users if user.args[1] == 0]
    used = any(make.fuses(user) for result in results for user in _users(result))
    if not used or any(s.dtype != wide for s in statistics):
        return
    make.before = node.next
    parts = [shapes(make, make(operator.getitem, node, 1 + k)) for k in range(len(statistics))]
    value = _in_type(make, node.args[0], wide)
    if mean:
        value = make(aten.sub.Tensor, value, parts[0])
    value = make(aten.mul.Tensor, value, parts[-1])
    for op, position in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        parameter = None if position is None else node.args[position]
        if parameter is not None:
            value = make(op, value, shapes(make, _in_type(make, parameter, wide)))
    value = _in_type(make, value, out.dtype)
    value.meta["val"] = out  # laid out as the norm's result is, which its operand need not be
    for result in results:
        result.replace_all_uses_with(value)
        node.graph.erase_node(result)


_Shapes = Callable[[_Builder, Node], Node]


def _as_it_is(make: _Builder, t: Node) -> Node:
    return t


def _per_channel(make: _Builder, t: Node) -> Node:
    rank = make.node.meta["val"][0].dim()
    return make(aten.view.default, t, [-1, *[1] * (rank - 2)])


def _in_type(make: _Builder, t: Any, dtype: torch.dtype) -> Any:
    same = t.meta["val"].dtype == dtype
    return t if same else make(prims.convert_element_type.default, t, dtype)


def _users(node: Node) -> Iterator[Node]:
    """What takes a value, also through views."""
    for user in node.users:
        if isinstance(user.target, OpOverload) and user.target.is_view:
            yield from _users(user)
        else:
            yield user


def _layer_norm(make: _Builder) -> None:
    _norm(make, _as_it_is, weight=2, bias=3, mean=True)


def _rms_norm(make: _Builder) -> None:
    _norm(make, _as_it_is, weight=2, bias=None, mean=False)


def _group_norm(make: _Builder) -> None:
    batch, channels, _, groups = make.node.args[3:7]
    if isinstance(channels, int) and isinstance(groups, int):

        def shapes(make: _Builder, t: Node) -> Node:
            if t.meta["val"].dim() == 1:
                return _per_channel(make, t)
            wide = make(aten.expand.default, make(aten.unsqueeze.default, t, 2),
                        [batch, groups, channels // groups])  # fmt: skip
            flat = make(aten.clone.default, wide, memory_format=torch.contiguous_format)
            rank = make.node.meta["val"][0].dim()
            return make(aten.view.default, flat, [batch, channels, *[1] * (rank - 2)])

        _norm(make, shapes, weight=1, bias=2, mean=True)


def _batch_norm(make: _Builder) -> None:
    # otherwise the statistics are the running ones
    if make.node.target is aten._native_batch_norm_legit.no_stats or make.node.args[5]:
        _norm(make, _per_channel, weight=1, bias=2, mean=True)


RULES: dict[Any, Callable[[_Builder], None]] = {
    aten.threshold_backward.default: _threshold_backward,
    aten.hardtanh_backward.default: _hardtanh_backward,
    aten.sgn.default: _sign,
    aten.sign.default: _sign,
    aten.native_dropout.default: _dropout,
    aten._log_softmax.default: _log_softmax,
    aten._softmax.default: _softmax,
    aten.native_layer_norm.default: _layer_norm,
    aten._fused_rms_norm.default: _rms_norm,
    aten.native_group_norm.default: _group_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm,
}


# ---- places of maxima


def narrow_places(graph: torch.fx.Graph) -> None:
    """Let the backward pass take the places of maxima in as few bytes as a plane needs: eight are
    what a pooling gives, two are enough for planes of up to 32768 elements."""
    for node in graph.find_nodes(
        op="call_function", target=aten.max_pool2d_with_indices_backward.default
    ):
        source, places = node.args[1], node.args[-1]
        if not isinstance(source, torch.fx.Node) or not isinstance(places, torch.fx.Node):
            continue
        plane = source.meta["val"].shape[-2:]
        if any(isinstance(n, torch.SymInt) for n in plane) or plane[0] * plane[1] > 1 << 31:
            continue
        dtype = torch.int16 if plane[0] * plane[1] <= 1 << 15 else torch.int32
        make = Maker(places.next, places)
        small = make(prims.convert_element_type.default, places, dtype)
        wide = make(prims.convert_element_type.default, small, torch.int64)
        node.replace_input_with(places, wide)
