"""Control flow and regions: operators whose operands include graphs of their own.

Each such graph, a body, is compiled like any other, once for all who call it (`pipeline`); here its
operator becomes a call of a function below, which gets the compiled bodies where eager has graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from tilewright import metrics
from tilewright.ir.program import Handle
from tilewright.lower.context import Lowering
from tilewright.lower.opaque import call_out

Body = Any  # called with its operands, gives a tuple


def cond(pred: Any, true: Body, false: Body, operands: Any) -> Any:
    return (true if pred else false)(*operands)


def while_loop(goes_on: Body, body: Body, carried: Any, others: Any, *rest: Any) -> Any:
    if rest and rest[0]:  # operands are written to: torch knows which
        return _eager("while_loop")(goes_on, body, carried, others, *rest)
    values = [v.clone() if isinstance(v, torch.Tensor) else v for v in carried]
    while bool(goes_on(*values, *others)):
        values = list(body(*values, *others))
    return tuple(values)


def invoke_subgraph(body: Body, identifier: Any, *operands: Any) -> Any:
    return body(*operands)


def hints_wrapper(body: Body, args: Any, kwargs: Any, hints: Any) -> Any:
    return body(*args, **kwargs)


def map_impl(body: Body, xs: Any, others: Any) -> Any:
    return tuple(_rows(body(*(x[k] for x in xs), *others) for k in range(xs[0].size(0))))


def scan(body: Body, init: Any, xs: Any, others: Any) -> Any:
    carried: list[Any] = list(init)

    def steps() -> Iterator[Any]:
        for k in range(xs[0].size(0)):
            found = body(*carried, *(x[k] for x in xs), *others)
            carried[:] = found[: len(carried)]
            yield found[len(carried) :]

    rows = _rows(steps())
    return (*carried, *rows)


def _rows(steps: Iterator[Any]) -> list[Any]:
    """The results of all steps, one below the other."""
    found = [list(step) for step in steps]
    return [torch.stack(values) for values in zip(*found, strict=True)]


def while_loop_stack_output(goes_on: Body, body: Body, carried: Any, others: Any, *rest: Any
                            ) -> Any:  # fmt: skip
    """The values of every round: what a backward pass needs."""
    if rest and rest[0]:
        return _eager("while_loop_stack_output")(goes_on, body, carried, others, *rest)
    values = list(carried)
    rounds: list[list[Any]] = []
    while bool(goes_on(*values, *others)):
        values = [torch.as_tensor(v) for v in body(*values, *others)]
        rounds.append(values)
    if not rounds:
        return tuple(v.unsqueeze(0).clone() if isinstance(v, torch.Tensor) else v for v in carried)
    return tuple(torch.stack(found) for found in zip(*rounds, strict=True))


def _eager(name: str) -> Any:
    """What torch runs itself, which calls bodies whoever made them."""
    op: Any = getattr(torch.ops.higher_order, name)
    return op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]


_RUNS = (cond, while_loop, invoke_subgraph, hints_wrapper, map_impl, scan, while_loop_stack_output)
CONTROL: dict[Any, Any] = {
    op: run for run in _RUNS
    if (op := getattr(torch.ops.higher_order, run.__name__, None)) is not None
}  # fmt: skip


def bodies(gm: torch.fx.GraphModule) -> dict[str, torch.fx.GraphModule]:
    """The graphs that control flow alone refers to, by the name of the node that has them."""
    found: dict[str, torch.fx.GraphModule] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = getattr(gm, str(node.target), None)
        if isinstance(value, torch.fx.GraphModule) and node.users and all(
            user.target in CONTROL for user in node.users):  # fmt: skip
            found[node.name] = value
    return found


def controlled(ctx: Lowering, node: torch.fx.Node) -> Any:
    """The operator as a call of ours, with its bodies by name."""
    metrics.counters["control"][str(node.target)] += 1
    for arg in node.all_input_nodes:
        if arg.op == "get_attr" and isinstance(handle := ctx.env[arg], Handle) and all(
            user.target in CONTROL for user in arg.users):  # fmt: skip
            ctx.program.bodies.add(handle.name)
    return call_out(ctx, node, CONTROL[node.target])
