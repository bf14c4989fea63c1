"""The user's own passes over a graph (`post_grad_custom_post_pass` and its like).

A pass changes a graph in place, and need not say what shapes its new nodes have: after it, the
values of all that it changed are computed again from their operands'.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from tilewright.errors import GraphPassError
from tilewright.options import GraphPass

Node = torch.fx.Node


def run(name: str, passes: GraphPass | None, gm: torch.fx.GraphModule,
        inference: bool = False) -> None:  # fmt: skip
    """The passes of one option, on a graph whose nodes have no values yet or are given them."""
    if passes is None:
        return
    before = {node: _said(node) for node in gm.graph.nodes}
    for function in passes.functions:
        try:
            if _asks_for_inference(function):
                function(gm.graph, is_inference=inference)
            else:
                function(gm.graph)
            gm.graph.lint()
        except Exception as why:
            raise GraphPassError(
                f"{getattr(function, '__name__', type(function).__name__)!r} of the option "
                f"{name!r} failed: {type(why).__name__}: {why}"
            ) from why
    if any("val" in node.meta for node in before):
        _revalue(gm.graph, before)
    gm.recompile()


def _asks_for_inference(function: Any) -> bool:
    """The reference's class for passes that take a second argument; it need not be loaded."""
    return any(c.__name__ == "CustomInferenceAwareGraphPass" for c in type(function).__mro__)


def _said(node: Node) -> tuple[Any, ...]:
    return (node.target, node.args, dict(node.kwargs))


def _revalue(graph: torch.fx.Graph, before: dict[Node, tuple[Any, ...]]) -> None:
    """Values for the nodes that are new or were changed, and for what follows from them."""
    changed: set[Node] = set()
    for node in graph.nodes:
        same = "val" in node.meta and before.get(node) == _said(node)
        if node.op != "call_function" or (same and changed.isdisjoint(node.all_input_nodes)):
            continue
        args, kwargs = map_arg((node.args, node.kwargs), _value)
        with _mode_of(args, kwargs):
            value = node.target(*args, **kwargs)
        if not (same and _alike(node.meta["val"], value)):
            node.meta["val"] = value
            changed.add(node)


def _value(node: Node) -> Any:
    return node.meta["val"]


def _mode_of(*given: Any) -> Any:
    """Where operators compute shapes alone."""
    leaves = pytree.tree_leaves(given)
    found = next((v.fake_mode for v in leaves if isinstance(v, FakeTensor)), None)
    context = TracingContext.try_get()
    if found is None and context is not None:
        found = context.fake_mode
    return found if found is not None else FakeTensorMode()


def _alike(old: Any, new: Any) -> bool:
    """Whether what follows from a value is the same."""
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return False
    facts = [(t.dtype, t.device, tuple(t.shape), t.stride() if t.layout == torch.strided else ())
             for t in (old, new)]  # fmt: skip
    return str(facts[0]) == str(facts[1])
