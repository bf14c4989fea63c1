"""Attention in the graph that Dynamo captured, before anything is differentiated.

Written out by hand (products, scale, mask, softmax, product) it becomes one call, so its backward
is one too. A mask that depends on no input is looked at once, here: one that holds everywhere is
left out, and the lower triangle is `is_causal`, for which libraries have faster kernels.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch._higher_order_ops.flex_attention import flex_attention
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from tilewright import config, metrics
from tilewright.graph import attention

Node = torch.fx.Node
MOST_ELEMENTS = 1 << 26  # of a mask that is computed to be looked at
MOST_NODES = 64

PRODUCTS = frozenset((torch.matmul, operator.matmul, "matmul", "__matmul__"))
SOFTMAX = frozenset((torch.softmax, F.softmax, torch.nn.functional.softmax, "softmax"))
DIVIDED = frozenset((operator.truediv, torch.div, "div", operator.itruediv))
SCALED = frozenset((operator.mul, torch.mul, "mul", operator.imul)) | DIVIDED
ADDED = frozenset((operator.add, torch.add, operator.iadd, "add"))
FILLED = frozenset((torch.masked_fill, "masked_fill"))
DROPPED = frozenset((F.dropout, torch.dropout))
CONVERTED = frozenset(("to", "type_as", "float", "half", "bfloat16"))
WHOLE = frozenset((F.scaled_dot_product_attention,))


def recognise(gm: torch.fx.GraphModule) -> None:
    """Rewrite the graph in place."""
    if not config.attention:
        return
    changed = False
    for node in list(gm.graph.nodes):
        if _kind(node) in WHOLE or node.target is flex_attention:
            _settle(node)
        if _kind(node) in WHOLE:
            changed |= _look_at_mask(gm, node)
        elif _kind(node) in PRODUCTS:
            found = _apart(node)
            if found is not None:
                _replace(gm.graph, node, found)
                metrics.counters["attention"]["recognised"] += 1
                changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _settle(node: Node) -> None:
    """Heads, widths and the sizes of blocks are facts of a model: where sizes are symbols, these
    become numbers."""
    if node.target is flex_attention:
        block_mask: Any = node.args[4]
        for size in map(_value, block_mask[attention.OWN : -1]):
            if isinstance(size, torch.SymInt):
                int(size)
    given = [*node.args[:3], *(node.kwargs.get(n) for n in ("query", "key", "value"))]
    for value in map(_value, given):
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            for n in (value.size(1), value.size(3)):
                if isinstance(n, torch.SymInt) and not free_unbacked_symbols(n):
                    int(n)  # a guard


def _kind(node: Any) -> Any:
    called = isinstance(node, Node) and node.op in ("call_function", "call_method")
    return node.target if called else None


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else node


# ---- masks that are the same at every call


def _look_at_mask(gm: torch.fx.GraphModule, node: Node) -> bool:
    mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    causal = node.kwargs.get("is_causal", node.args[5] if len(node.args) > 5 else False)
    if not isinstance(mask, Node) or causal is not False:
        return False
    known = _constant(gm, mask)
    if known is None or known.dtype != torch.bool:
        return False
    everywhere = bool(known.all())
    if not everywhere and not _is_lower(known):
        return False
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args,
                     strict=False)) | dict(node.kwargs)  # fmt: skip
    given["attn_mask"] = None
    given["is_causal"] = not everywhere
    node.args, node.kwargs = (), given
    return True


def _is_lower(mask: torch.Tensor) -> bool:
    rows, columns = mask.shape[-2:] if mask.dim() > 1 else (0, 1)
    lower = torch.ones(rows, columns, dtype=torch.bool).tril()
    return rows == columns and bool((mask == lower).all())


def _constant(gm: torch.fx.GraphModule, mask: Node) -> torch.Tensor | None:
    """The mask itself, where no input has a part in it and it is cheap to compute."""
    fake = _value(mask)
    sizes: list[Any] = list(fake.shape) if isinstance(fake, torch.Tensor) else [None]
    if not all(isinstance(n, int) for n in sizes):
        return None
    order = _ancestors(mask)
    if order is None or fake.numel() > MOST_ELEMENTS:
        return None
    known: dict[Node, Any] = {}
    try:
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for node in order:
                args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
                args, kwargs = _on_host(args), _on_host(kwargs)
                method = node.op == "call_method"
                call: Any = getattr(args[0], str(node.target)) if method else node.target
                known[node] = call(*args[1:] if method else args, **kwargs)
    except Exception:  # whatever it is made by, it is not known
        return None
    found = known[mask]
    return found if isinstance(found, torch.Tensor) else None


def _on_host(tree: Any) -> Any:
    if isinstance(tree, torch.device):
        return torch.device("cpu")
    if isinstance(tree, (tuple, list)) and type(tree) is not torch.Size:
        return type(tree)(_on_host(t) for t in tree) if type(tree) in (tuple, list) else tuple(
            _on_host(t) for t in tree)  # fmt: skip
    if isinstance(tree, dict):
        return {k: _on_host(v) for k, v in tree.items()}
    return "cpu" if isinstance(tree, str) and tree.startswith("cuda") else tree


def _ancestors(node: Node) -> list[Node] | None:
    """All that a node is made of, in order, if it is of numbers alone and has no effects."""
    found: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        here = waiting.pop()
        if here in found:
            continue
        if here.op not in ("call_function", "call_method") or len(found) >= MOST_NODES:
            return None
        if not isinstance(_value(here), torch.Tensor) or _is_random(here):
            return None
        found[here] = None
        waiting += here.all_input_nodes
    return sorted(found)


def _is_random(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return "rand" in name or "dropout" in name or "bernoulli" in name or name.endswith("_")


# ---- attention written out


@dataclass(frozen=True)
class Found:
    query: Node
    turned: Node  # keys, turned around
    value: Node
    scale: float
    added: Node | None
    filled: tuple[Node, float] | None


def _apart(node: Node) -> Found | None:
    """The attention whose last product this is."""
    weights, value = _pair(node)
    while _kind(weights) in CONVERTED or _drops_nothing(weights):
        if len(weights.users) != 1:
            return None
        weights = weights.args[0]
    if _kind(weights) not in SOFTMAX or len(weights.users) != 1 or not _is_last(weights):
        return None
    scores: Any = weights.args[0]
    filled: tuple[Node, float] | None = None
    added: Node | None = None
    scale = 1.0
    while isinstance(scores, Node) and len(scores.users) == 1:
        kind = _kind(scores)
        if kind in PRODUCTS:
            query, turned = _pair(scores)
            found = Found(query, turned, value, scale, added, filled)
            return found if _fits(found) else None
        rest: list[Any]
        inner, *rest = scores.args
        if kind == "float":
            scores = inner
        elif kind in FILLED and filled is None and added is None and scale == 1.0:
            if len(rest) != 2 or not isinstance(rest[1], (int, float)):
                return None
            filled, scores = (rest[0], float(rest[1])), inner
        elif kind in ADDED and added is None and scale == 1.0 and len(rest) == 1:
            if not isinstance(rest[0], Node) or scores.kwargs:
                return None
            added, scores = rest[0], inner
        elif kind in SCALED and len(rest) == 1 and isinstance(rest[0], (int, float)):
            scale *= 1 / rest[0] if kind in DIVIDED else rest[0]
            scores = inner
        else:
            return None
    return None


def _pair(node: Node) -> tuple[Any, Any]:
    return (node.args[0], node.args[1]) if len(node.args) == 2 else (None, None)


def _drops_nothing(node: Any) -> bool:
    if _kind(node) not in DROPPED:
        return False
    given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
    return given.get("p", 0.5) == 0 or given.get("training", given.get("train", True)) is False


def _is_last(node: Node) -> bool:
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    value = _value(node)
    return isinstance(value, torch.Tensor) and dim in (-1, value.dim() - 1)


def _fits(found: Found) -> bool:
    query, turned, value = (_value(n) for n in (found.query, found.turned, found.value))
    if not all(isinstance(t, torch.Tensor) and t.dim() == 4 for t in (query, turned, value)):
        return False
    if attention.refused_apart((query, turned.transpose(-2, -1), value)):
        return False
    same = query.shape[:2] == turned.shape[:2] == value.shape[:2]
    masks = [n for n in (found.added, found.filled[0] if found.filled else None) if n is not None]
    scores = (*query.shape[:3], turned.shape[3])
    return same and math.isfinite(found.scale) and all(_spreads(_value(m), scores) for m in masks)


def _spreads(mask: Any, shape: tuple[Any, ...]) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.dim() > 4 or mask.requires_grad:
        return False
    lead = 4 - mask.dim()
    return all(n == 1 or n == of for n, of in zip(mask.shape, shape[lead:], strict=True))


def _replace(graph: torch.fx.Graph, node: Node, found: Found) -> None:
    fill = None if found.filled is None else found.filled[1]
    mask = None if found.filled is None else found.filled[0]
    with graph.inserting_before(node):
        args = (found.query, found.turned, found.value, found.scale, found.added, mask, fill)
        made = graph.call_function(attention.written_out, args)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


__all__ = ["recognise"]
