"""Graphs of any number of nodes, in families: what the effort of the compiler is measured on."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg

aten = torch.ops.aten

ROWS, COLUMNS = 64, 96


class Graph:
    """An FX graph under construction whose nodes carry their fake values."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.mode = FakeTensorMode()
        self.count = 0

    def input(self, *size: int) -> torch.fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(size)
        return node

    def __call__(self, target: Callable[..., Any], *args: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
        self.count += 1
        return node

    def returns(self, *results: torch.fx.Node) -> torch.fx.GraphModule:
        self.graph.output(results)
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)


def chain(count: int) -> torch.fx.GraphModule:
    """One value after the other."""
    g = Graph()
    value, other = g.input(ROWS, COLUMNS), g.input(ROWS, COLUMNS)
    while g.count < count:
        value = g(aten.sin.default, g(aten.add.Tensor, value, other))
    return g.returns(value)


def ladder(count: int) -> torch.fx.GraphModule:
    """Rows and their sums, each reading what came shortly before."""
    g = Graph()
    made = [g.input(ROWS, COLUMNS)]
    while g.count < count:
        k = len(made)
        other = made[max(0, k - 2 - k % 7)]
        value = g(aten.add.Tensor, g(aten.exp.default, made[-1]), other)
        made.append(value if k % 5 else g(aten.sum.dim_IntList, value, [1], True))
    return g.returns(made[-1])


def fan(count: int) -> torch.fx.GraphModule:
    """Many readers of one argument, each with a product of its own; all are returned."""
    g = Graph()
    x, made = g.input(16, 16), list[torch.fx.Node]()
    while g.count < count:
        scaled = g(aten.mul.Tensor, x, float(len(made)))
        product = g(aten.mm.default, scaled, x)
        made.append(g(aten.add.Tensor, x, g(aten.permute.default, product, [1, 0])))
    return g.returns(*made)


def reductions(count: int) -> torch.fx.GraphModule:
    """Sums over rows, over columns and over all, each of the last result scaled by them."""
    g = Graph()
    value = g.input(ROWS, COLUMNS)
    dims = ([0], [1], [0, 1])
    while g.count < count:
        folded = g(aten.amax.default, value, dims[g.count % 3], True)
        value = g(aten.sub.Tensor, value, folded)
        total = g(aten.sum.dim_IntList, g(aten.exp.default, value), dims[g.count // 3 % 3], True)
        value = g(aten.div.Tensor, value, total)
    return g.returns(value)


def transformer(count: int) -> torch.fx.GraphModule:
    """Layers of attention and a feed-forward block, with weights of their own."""
    g = Graph()
    tokens, width, heads = 32, 64, 4
    x = g.input(tokens, width)
    while g.count < count:
        y = _norm(g, x, width)
        q, k, v = (_heads(g, _linear(g, y, width, width), heads) for _ in range(3))
        scores = g(aten.bmm.default, q, g(aten.permute.default, k, [0, 2, 1]))
        weights = g(aten._softmax.default, g(aten.mul.Tensor, scores, 0.25), -1, False)
        mixed = g(aten.permute.default, g(aten.bmm.default, weights, v), [1, 0, 2])
        mixed = g(aten.reshape.default, mixed, [tokens, width])
        x = g(aten.add.Tensor, x, _linear(g, mixed, width, width))
        wide = g(aten.gelu.default, _linear(g, _norm(g, x, width), width, 4 * width))
        x = g(aten.add.Tensor, x, _linear(g, wide, 4 * width, width))
    return g.returns(x)


def _linear(g: Graph, x: torch.fx.Node, inner: int, outer: int) -> torch.fx.Node:
    weight = g(aten.permute.default, g.input(outer, inner), [1, 0])
    return g(aten.addmm.default, g.input(outer), x, weight)


def _norm(g: Graph, x: torch.fx.Node, width: int) -> torch.fx.Node:
    whole = g(aten.native_layer_norm.default, x, [width], g.input(width), g.input(width), 1e-5)
    return g(operator.getitem, whole, 0)


def _heads(g: Graph, x: torch.fx.Node, heads: int) -> torch.fx.Node:
    value = x.meta["val"]
    assert isinstance(value, FakeTensor)
    tokens, width = value.shape
    parts = g(aten.view.default, x, [tokens, heads, width // heads])
    return g(aten.permute.default, parts, [1, 0, 2])


def recurrence(count: int) -> torch.fx.GraphModule:
    """A state that every step forgets a part of and adds to, with a product of each; all are put
    side by side (a selective state space, unrolled)."""
    g = Graph()
    batch, width, states, steps = 2, 32, 8, max(1, count // 9)
    kept, added = (g.input(batch, width, steps, states) for _ in range(2))
    read, state = g.input(batch, steps, states), g.input(batch, width, states)
    made: list[torch.fx.Node] = []
    for k in range(steps):
        past = g(aten.mul.Tensor, g(aten.select.int, kept, 2, k), state)
        state = g(aten.add.Tensor, past, g(aten.select.int, added, 2, k))
        column = g(aten.unsqueeze.default, g(aten.select.int, read, 1, k), -1)
        made.append(g(aten.select.int, g(aten.bmm.default, state, column), 2, 0))
    apart = [g(aten.unsqueeze.default, m, -1) for m in made]
    return g.returns(g(aten.cat.default, apart, -1))


FAMILIES: dict[str, Callable[[int], torch.fx.GraphModule]] = {
    "chain": chain,
    "ladder": ladder,
    "fan": fan,
    "reductions": reductions,
    "transformer": transformer,
    "recurrence": recurrence,
}
