"""Attention in the graph that Dynamo captured, before anything is differentiated.

Written out by hand (products, scale, mask, softmax, product: `apart.py`) it becomes one call, so
its backward is one too. Keys that are copied for the heads that share them are not. A mask that
depends on no input is looked at once, here: one that holds everywhere is left out, and the lower
triangle is `is_causal`, for which libraries have faster kernels.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch._higher_order_ops.flex_attention import flex_attention
from torch.fx.node import map_arg

from tilewright import config, metrics
from tilewright.graph import apart, attention
from tilewright.graph.apart import kind_of, value_of

Node = torch.fx.Node
MOST_ELEMENTS = 1 << 26  # of a mask that is computed to be looked at
MOST_NODES = 64
HUGE = -1e9  # of a score to which this is added, or that becomes it, nothing is left

WHOLE = frozenset((F.scaled_dot_product_attention,))
REPEATED = frozenset((torch.repeat_interleave, "repeat_interleave"))
SPREAD = (slice(None), slice(None), None)  # keys with a dimension for the heads that share them


def recognise(gm: torch.fx.GraphModule) -> None:
    """Rewrite the graph in place."""
    if not config.attention:
        return
    changed = False
    for node in list(gm.graph.nodes):
        if node.target is torch.einsum:
            apart.expand_einsums(gm.graph, node, lambda n: _number(gm, n))
    for node in list(gm.graph.nodes):
        if kind_of(node) in WHOLE or node.target is flex_attention:
            _settle(node)
        if kind_of(node) in WHOLE:
            changed |= _look_at_mask(gm, node) | _share_heads(node)
        elif kind_of(node) in apart.PRODUCTS:
            found = apart.matched(node, lambda n: _number(gm, n))
            if found is not None:
                found = _without_constants(gm, found)
                group, key, value = _shared(found.key, found.value)
                found = replace(found, key=key, value=value)
                apart.replace(gm.graph, node, found, group)
                metrics.counters["attention"]["recognised"] += 1
                changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _number(gm: torch.fx.GraphModule, value: Any) -> float | None:
    """A number, or a tensor that is one at every call."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    fake = value_of(value)
    if not isinstance(value, Node) or not isinstance(fake, torch.Tensor) or fake.dim():
        return None
    known = _constant(gm, value)
    return None if known is None else float(known)


# ---- keys and values that are repeated for heads that share them


def _share_heads(node: Node) -> bool:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.pop("enable_gqa", False):
        return False
    group, given["key"], given["value"] = _shared(given["key"], given["value"])
    if group == 1:
        return False
    node.target, node.args, node.kwargs = attention.repeated, (), {**given, "group": group}
    return True


def _shared(key: Any, value: Any) -> tuple[int, Any, Any]:
    """How many heads share one, and keys and values before they were repeated."""
    found = [_unrepeated(n) for n in (key, value)]
    if found[0][0] == found[1][0]:
        return found[0][0], found[0][1], found[1][1]
    return 1, key, value


def _unrepeated(node: Any) -> tuple[int, Any]:
    kind, whole = kind_of(node), value_of(node)
    spread: Any = None
    row: Any = None
    if not isinstance(whole, torch.Tensor) or whole.dim() != 4:
        return 1, node
    if kind in REPEATED and len(node.args) == 3:
        dim, by = node.args[2], node.args[1]
        return (by, node.args[0]) if dim in (1, -3) and isinstance(by, int) else (1, node)
    if kind in REPEATED and len(node.args) == 2 and set(node.kwargs) == {"dim"}:
        by = node.args[1]
        known = node.kwargs["dim"] in (1, -3) and isinstance(by, int)
        return (by, node.args[0]) if known else (1, node)
    spread = node.args[0] if kind in apart.VIEWED else None
    row = spread.args[0] if kind_of(spread) == "expand" else None
    source = row.args[0] if kind_of(row) in (operator.getitem, "unsqueeze", torch.unsqueeze) else 0
    sizes: list[Any] = [tuple(getattr(value_of(n), "shape", ())) for n in (source, row, spread)]
    if [len(s) for s in sizes] != [4, 5, 5]:
        return 1, node
    place: Any = row.args[1]
    fits = place == 2 if isinstance(place, int) else _is_spread(place)
    b, heads, group, *rest = list(sizes[2])
    same = sizes[0] == (b, heads, *rest) and tuple(whole.shape) == (b, heads * group, *rest)
    return (group, source) if fits and same and isinstance(group, int) else (1, node)


def _is_spread(place: Any) -> bool:
    known = isinstance(place, tuple) and place[:3] == SPREAD and len(place) <= 5
    return known and all(p == slice(None) or p is Ellipsis for p in place[3:])


def _settle(node: Node) -> None:
    """Heads, widths and the sizes of blocks are facts of a model: where sizes are symbols, these
    become numbers."""
    if node.target is flex_attention:
        block_mask: Any = node.args[4]
        for size in map(value_of, block_mask[attention.OWN : -1]):
            if isinstance(size, torch.SymInt):
                int(size)
    given = [*node.args[:3], *(node.kwargs.get(n) for n in ("query", "key", "value"))]
    attention.settle([t for t in map(value_of, given) if isinstance(t, torch.Tensor)])


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


def _without_constants(gm: torch.fx.GraphModule, found: apart.Found) -> apart.Found:
    """Steps that hide nothing are left out, and one that hides what is above the diagonal."""
    if found.turned:
        return found
    for k, (what, by, other) in enumerate(found.steps):
        known = _constant(gm, other) if isinstance(other, Node) else None
        kept = None if known is None else _kept(what, by, known)
        if kept is None:
            continue
        rest = (*found.steps[:k], *found.steps[k + 1 :])
        if bool(kept.all()):
            return _without_constants(gm, replace(found, steps=rest))
        number = by if what != "add" or known is None else float(known.min())
        if _is_lower(kept) and _is_square(found) and _stays_hidden(number, k, rest):
            return replace(found, steps=rest, causal=True)
    return found


def _kept(what: str, by: float, known: torch.Tensor) -> torch.Tensor | None:
    """Where a step leaves scores as they are, if it leaves nothing of the rest."""
    if what == "add" and by == 1.0:
        zero = known == 0
        return zero if bool((zero | (known == known.min())).all()) and known.min() <= HUGE else None
    if what in ("fill", "keep") and by <= HUGE:
        return known if what == "keep" else ~known
    return None


def _stays_hidden(number: float, at: int, rest: Sequence[apart.Step]) -> bool:
    """Whether what became this number has no part in a softmax, also of a row where other steps
    hide all that is left."""
    if number != -math.inf:
        return all(what == "scale" and by > 0 for what, by, _ in rest)
    return all(what == "add" or (what == "scale" and by > 0) for what, by, _ in rest[at:])


def _is_square(found: apart.Found) -> bool:
    query, key = value_of(found.query), value_of(found.key)
    return query.size(-2) == key.size(-2)


def _is_lower(mask: torch.Tensor) -> bool:
    rows, columns = mask.shape[-2:] if mask.dim() > 1 else (0, 1)
    lower = torch.ones(rows, columns, dtype=torch.bool).tril()
    return rows == columns and bool((mask == lower).all())


def _constant(gm: torch.fx.GraphModule, mask: Node) -> torch.Tensor | None:
    """The mask itself, where no input has a part in it and it is cheap to compute."""
    fake = value_of(mask)
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
        if not isinstance(value_of(here), torch.Tensor) or _is_random(here):
            return None
        found[here] = None
        waiting += here.all_input_nodes
    return sorted(found)


def _is_random(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return "rand" in name or "dropout" in name or "bernoulli" in name or name.endswith("_")


__all__ = ["recognise"]
