"""What a program of inference computes of its weights alone, in a graph of its own.

With `freezing`, casts, scales and other layouts of weights are computed once and kept for as long
as the weights stay as they are. For the graph that runs at every call they are arguments. A batch
norm after a convolution or a product becomes part of its weight and bias.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from tilewright.graph.simplify import Facts, is_pure, remove_dead
from tilewright.graph.sums import EXACT, Maker

aten = torch.ops.aten

Node = torch.fx.Node

# A value this many times as large as what it is made of is rather made again: an outer product of
# two weights, say. An int8 weight as float32 is four times as large, an int4 one eight times.
GROWTH = 8

BATCH_NORM = aten._native_batch_norm_legit_no_training.default
CONVOLUTION = aten.convolution.default


@dataclass(frozen=True)
class Parted:
    """`once` takes the arguments `weights` and gives the values that `rest` takes after the
    arguments `kept`; all by their positions in the graph that was parted."""

    once: torch.fx.GraphModule
    rest: torch.fx.GraphModule
    weights: tuple[int, ...]
    kept: tuple[int, ...]


def parted(gm: torch.fx.GraphModule, static: Sequence[int]) -> Parted | None:
    """The graph in two, `static` being the positions of weights; None where nothing is computed of
    them alone. The graph that is given may be changed, to another with the same results."""
    graph = gm.graph
    arguments = graph.find_nodes(op="placeholder")
    weights = _Weights(graph, [arguments[k] for k in static])
    for node in graph.find_nodes(op="call_function", target=BATCH_NORM):
        _join(node, weights)
    remove_dead(graph)
    weights = _Weights(graph, [arguments[k] for k in static])
    made, needed = _boundary(graph, weights)
    if not made:
        return None
    used = [k for k in static if any(arguments[k] in weights.under(n) for n in made)]
    once = _computing(gm, [arguments[k] for k in used], made)
    kept = [k for k, n in enumerate(arguments) if k not in static or n in needed]
    rest = _given(gm, [arguments[k] for k in kept], made, needed)
    return Parted(once, rest, tuple(used), tuple(kept))


class _Weights:
    """Which calls depend on weights alone, and on which: those they are made of."""

    def __init__(self, graph: torch.fx.Graph, static: Sequence[Node]) -> None:
        self._facts = Facts(graph)
        self._under: dict[Node, frozenset[Node]] = {}
        for node in graph.nodes:
            if not self._stays(node):
                continue
            if node in static:
                self._under[node] = frozenset((node,))
            elif is_pure(node) and all(n in self._under for n in node.all_input_nodes):
                made_of = [self._under[n] for n in node.all_input_nodes]
                self._under[node] = frozenset[Node]().union(*made_of)

    def under(self, node: Node) -> frozenset[Node]:
        return self._under.get(node, frozenset())

    def _stays(self, node: Node) -> bool:
        """Whether it has a known size, and memory that nobody writes to."""
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            return all(isinstance(t, torch.Tensor) for t in value)
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return False
        sizes: list[Any] = [*value.shape, *value.stride()]
        return (all(isinstance(n, int) for n in sizes)
                and _storage(node) not in self._facts.written)  # fmt: skip

    def is_kept(self, node: Node) -> bool:
        """Whether the call computes a tensor that is worth its memory."""
        value = node.meta.get("val")
        if not self.under(node) or node.op != "call_function" or not _is_tensor(value):
            return False
        if any(_storage(n) == _storage(node) for n in node.all_input_nodes):
            return False  # a view, which costs nothing
        if _storage(node) in self._facts.returned:
            return False  # the user may write to it
        return _bytes(node) <= GROWTH * sum(map(_bytes, self.under(node)))


def _boundary(graph: torch.fx.Graph, weights: _Weights) -> tuple[list[Node], set[Node]]:
    """The calls that are made once, and all others that the rest needs."""
    made: dict[Node, None] = {}
    needed: set[Node] = set()
    waiting = [n for n in graph.nodes if n.op != "placeholder" and not weights.under(n)]
    while waiting:
        node = waiting.pop()
        if node in needed or node in made:
            continue
        if weights.is_kept(node):
            made[node] = None
        else:
            needed.add(node)
            waiting += node.all_input_nodes
    return [n for n in graph.nodes if n in made], needed


def _computing(gm: torch.fx.GraphModule, weights: Sequence[Node], made: Sequence[Node]
               ) -> torch.fx.GraphModule:  # fmt: skip
    above: set[Node] = set()
    waiting = list(made)
    while waiting:
        node = waiting.pop()
        if node not in above:
            above.add(node)
            waiting += node.all_input_nodes
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {n: _argument(graph, n) for n in weights}
    for node in gm.graph.nodes:
        if node in above and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in made))
    return torch.fx.GraphModule(gm, graph)


def _given(gm: torch.fx.GraphModule, kept: Sequence[Node], made: Sequence[Node],
           needed: set[Node]) -> torch.fx.GraphModule:  # fmt: skip
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {n: _argument(graph, n) for n in (*kept, *made)}
    for node in gm.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return torch.fx.GraphModule(gm, graph)


def _argument(graph: torch.fx.Graph, node: Node) -> Node:
    new = graph.placeholder(node.name)
    new.meta = dict(node.meta)
    return new


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize


# ---- a batch norm as a part of what is before it


def _join(norm: Node, weights: _Weights) -> None:
    """Scale the weight and bias of the convolution or product that is normalised."""
    source, *parameters = norm.args[:5]
    scale, shift, mean, variance = parameters
    if not isinstance(source, Node) or len(source.users) != 1:
        return
    results = [u for u in norm.users if u.target is operator.getitem]
    if len(results) != len(norm.users) or any(u.args[1] != 0 and u.users for u in results):
        return
    tensors = [n for n in (*parameters, *_affine(source)) if n is not None]
    if not _affine(source) or not all(_fits(n, source, weights) for n in tensors):
        return
    make = Maker(norm, source)
    factor = make(aten.rsqrt.default, make(aten.add.Scalar, variance, norm.args[6]))
    if scale is not None:
        factor = make(aten.mul.Tensor, factor, scale)
    weight, bias = _affine(source)
    offset = make(aten.neg.default, mean) if bias is None else make(aten.sub.Tensor, bias, mean)
    offset = make(aten.mul.Tensor, offset, factor)
    if shift is not None:
        offset = make(aten.add.Tensor, offset, shift)
    rank = weight.meta["val"].dim()
    if source.target is CONVOLUTION:
        scaled = make(aten.mul.Tensor, weight, make(aten.view.default, factor,
                                                    [-1] + [1] * (rank - 1)))  # fmt: skip
        joined = make(CONVOLUTION, source.args[0], scaled, offset, *source.args[3:])
    else:
        at = 0 if source.target is aten.mm.default else 1
        scaled = make(aten.mul.Tensor, weight, factor)
        joined = make(aten.addmm.default, offset, source.args[at], scaled)
    joined.meta["val"] = source.meta["val"]
    for result in results:
        if result.args[1] == 0:
            result.replace_all_uses_with(joined)


def _affine(source: Node) -> tuple[Any, ...]:
    """Weight and bias of a convolution or product whose second dimension is normalised."""
    if source.target is CONVOLUTION and not source.args[6]:
        return source.args[1], source.args[2]
    if source.target is aten.mm.default:
        return source.args[1], None
    if source.target is aten.addmm.default and not source.kwargs:
        bias: Any = source.args[0]
        return (source.args[2], bias) if bias.meta["val"].dim() == 1 else ()
    return ()


def _fits(node: Any, source: Node, weights: _Weights) -> bool:
    """Whether it is a weight, of a type in which the product can be rounded elsewhere."""
    return (isinstance(node, Node) and bool(weights.under(node))
            and node.meta["val"].dtype in EXACT
            and node.meta["val"].dtype == source.meta["val"].dtype)  # fmt: skip
