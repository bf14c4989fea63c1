"""What the caller of a graph does with its arguments and results, and what follows for the graph.

AOTAutograd ends a graph that mutates an argument with `copy_(argument, value)`. A result that is a
view of `value` is, for the user, a view of the argument: it is returned as one. That keeps its
place in the argument's storage, from which AOTAutograd rebuilds it, and leaves `value` with nobody
who needs it apart from the argument.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

aten = torch.ops.aten
Node = torch.fx.Node


@dataclass(frozen=True)
class Boundary:
    """`visible`: how many leading results go to the user (None: all); the others are saved for the
    backward pass. `donated`: positions of arguments nobody reads after the call."""

    visible: int | None = None
    donated: tuple[int, ...] = ()
    role: str = "inference"


EVERYTHING = Boundary()


def return_arguments(gm: torch.fx.GraphModule, boundary: Boundary) -> None:
    """Let results that are views of what an argument becomes be views of the argument."""
    graph = gm.graph
    final = final_values(graph)
    if not final:
        return
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    visible = len(results) if boundary.visible is None else boundary.visible
    for k, result in enumerate(results[:visible]):
        if isinstance(result, Node):
            with graph.inserting_before(output):
                results[k] = _through_argument(result, final)
    output.args = (tuple(results),)


def final_values(graph: torch.fx.Graph) -> dict[Node, Node]:
    """Value -> the `copy_` that makes it the contents of an argument, laid out alike."""
    found: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        into, value = node.args[:2]
        if not isinstance(into, Node) or not isinstance(value, Node):
            continue
        if into.op == "placeholder" and value.op == "call_function" and _alike(into, value):
            found[value] = node
    return found


def _through_argument(result: Node, final: dict[Node, Node]) -> Node:
    """`result` as the same view of an argument, if it is a view of the argument's final value."""
    chain: list[Node] = []
    node = result
    while node not in final:
        steps = _view_steps(node)
        source = steps[-1].args[0] if steps else None
        if not isinstance(source, Node) or not _same_storage(node, source):
            return result
        chain += steps
        node = source
    made = final[node]
    for step in reversed(chain):
        made = _replay(step, made)
    return made if _alike(made, result) else result


def _replay(step: Node, source: Node) -> Node:
    args: Any = (source, *step.args[1:])
    made = source.graph.call_function(step.target, args, dict(step.kwargs))  # type: ignore[arg-type]
    made.meta = dict(step.meta)
    given, named = map_arg((args, dict(step.kwargs)), lambda n: n.meta["val"])
    made.meta["val"] = step.target(*given, **named)  # type: ignore[operator]
    return made


def _view_steps(node: Node) -> list[Node]:
    """The calls that make it a view of what the last of them is given: one, or two where it is one
    of several parts. None where it is no view."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return [node, node.args[0]] if _is_view(node.args[0]) else []
    return [node] if _is_view(node) and isinstance(node.meta.get("val"), torch.Tensor) else []


def _is_view(node: Node) -> bool:
    """In the memory of the first argument, by the op's own word, and counted from there."""
    if not isinstance(node.target, OpOverload) or node.target is aten.as_strided.default:
        return False
    returns = node.target._schema.returns
    return (len(returns) == 1 and returns[0].alias_info is not None
            and not returns[0].alias_info.is_write)  # fmt: skip


def _same_storage(a: Node, b: Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
            and x.untyped_storage()._cdata == y.untyped_storage()._cdata)  # fmt: skip


def _alike(a: Node, b: Node) -> bool:
    """Same type and layout, without asking the solver. Where they start in their storages does
    not matter: an argument may begin anywhere, and a view of it counts from there."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    if x.dtype != y.dtype or x.device != y.device or x.dim() != y.dim():
        return False
    if x.layout != torch.strided or y.layout != torch.strided:
        return False
    return [_plain(n) for n in (*x.size(), *x.stride())] == [
        _plain(n) for n in (*y.size(), *y.stride())]  # fmt: skip


def _plain(n: Any) -> Any:
    return n.node.expr if isinstance(n, torch.SymInt) else n
