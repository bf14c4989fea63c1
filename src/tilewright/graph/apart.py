"""Attention that was written out: products, what is done to scores, softmax, dropout, product.

`matched` finds it in the graph that Dynamo captured; `written_out` is what is traced in its place.
What is done to scores is a list of steps in the user's order: `scale` by a number, `times` or
`over` a tensor, `add` a tensor times a number, `fill` with a number where a tensor holds, `keep`
scores where one holds and fill the rest, `tanh`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from typing import cast as as_type

import torch
import torch.fx
import torch.nn.functional as F
from torch._higher_order_ops.flex_attention import flex_attention

from tilewright import config
from tilewright.graph import attention

Node = torch.fx.Node
Step = tuple[str, float, Any]  # what, its number, and its tensor or node

PRODUCTS = frozenset((torch.matmul, operator.matmul, "matmul", "__matmul__", torch.bmm, "bmm"))
SUMMED = frozenset((torch.baddbmm, "baddbmm"))
SOFTMAX = frozenset((torch.softmax, F.softmax, "softmax"))
DIVIDED = frozenset((operator.truediv, torch.div, "div", operator.itruediv, "div_"))
SCALED = frozenset((operator.mul, torch.mul, "mul", operator.imul, "mul_")) | DIVIDED
SUBTRACTED = frozenset((operator.sub, torch.sub, operator.isub, "sub", "sub_"))
ADDED = frozenset((operator.add, torch.add, operator.iadd, "add", "add_")) | SUBTRACTED
FILLED = frozenset((torch.masked_fill, "masked_fill", "masked_fill_"))
CHOSEN = frozenset((torch.where, "where"))
TANH = frozenset((torch.tanh, F.tanh, "tanh", "tanh_"))
DROPPED = frozenset((F.dropout, torch.dropout))
CONVERTED = frozenset(("to", "type_as", "type", "float", "half", "bfloat16"))
VIEWED = frozenset(("view", "reshape", torch.reshape))
TURNED = frozenset((torch.transpose, "transpose"))
BETWEEN = CONVERTED | DROPPED | VIEWED  # a softmax and the last product
CHANGES = CONVERTED | VIEWED | SCALED | ADDED | FILLED | CHOSEN | TANH


def kind_of(node: Any) -> Any:
    called = isinstance(node, Node) and node.op in ("call_function", "call_method")
    return node.target if called else None


def value_of(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else node


def _above(node: Any) -> Any:
    """What a node changes: its first argument."""
    return node.args[0]


# ---- what is traced


def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                steps: Sequence[Step], dropout: float = 0.0, group: int = 1, causal: bool = False
                ) -> torch.Tensor:  # fmt: skip
    """Each key head and value stands for `group` heads. `causal`: queries see no later keys."""
    if query.dim() == 3:
        steps = [(what, by, _with_heads(t)) for what, by, t in steps]
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        return written_out(query, key, value, steps, dropout, group, causal).squeeze(1)
    way = way_of((query, key, value), steps, dropout, group)
    if way == "kernel":
        return _by_kernel((query, key, value), steps, causal)
    if group > 1:
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    if way == "library":
        return _by_library((query, key, value), steps, dropout, causal)
    scores = torch.matmul(query, key.transpose(-2, -1))
    for step in steps:
        scores = _taken(step, scores, step[2])
    if causal:
        below = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = torch.where(below, scores, -math.inf)
    weights = torch.softmax(scores, -1, torch.float32).to(value.dtype)
    return torch.matmul(F.dropout(weights, dropout), value)


def way_of(operands: attention.Operands, steps: Sequence[Step], dropout: float, group: int) -> str:
    """Who is to compute it: kernels of ours, a library, or nobody as a whole."""
    query = operands[0]
    tensors = [t for _, _, t in steps if t is not None]
    on_card = query.device.type == "cuda"
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    fixed = config.deterministic or torch.are_deterministic_algorithms_enabled()
    reason = attention.refused(operands, query if on_card else None, dropout, False, group > 1)
    if on_card and all(what == "scale" for what, _, _ in steps):
        reason = reason or "the library computes it without a mask"
    if not reason and not (trained and (fixed or not on_card)):
        return "kernel"
    if any(t.dtype.is_complex or t.is_nested for t in (*operands, *tensors)):
        return ""
    if not _is_a_sum(steps) or not all(attention.is_some(t) for t in operands):
        return ""
    same = len({t.dtype for t in (*operands, *tensors) if t.dtype.is_floating_point}) == 1
    if not same or query.dtype not in attention.TYPES or config.fallback_random:
        return ""
    if on_card:
        return "" if fixed and trained else "library"
    return "" if dropout or trained or query.device.type != "cpu" else "library"


def _is_a_sum(steps: Sequence[Step]) -> bool:
    """Whether something added to scaled scores does it all, also for gradients: those of scores
    that were filled with a number are zero."""
    sums = ("scale", "add")
    return all(what in sums or (by == -math.inf and what != "tanh") for what, by, _ in steps)


def _taken(step: Step, scores: torch.Tensor, other: Any) -> torch.Tensor:
    what, by, _ = step
    match what:
        case "scale":
            return scores * by
        case "times":
            return scores * other
        case "over":
            return scores / other
        case "add":
            return scores + (other if by == 1.0 else other * by)
        case "fill":
            return torch.where(other, by, scores)
        case "keep":
            return torch.where(other, scores, by)
        case _:
            return torch.tanh(scores)


def _leading(steps: Sequence[Step]) -> tuple[float, Sequence[Step]]:
    """The scale that comes first, and the rest."""
    count = next((k for k, s in enumerate(steps) if s[0] != "scale"), len(steps))
    return math.prod((s[1] for s in steps[:count]), start=1.0), steps[count:]


def _by_kernel(operands: attention.Operands, steps: Sequence[Step], causal: bool) -> torch.Tensor:
    query, key, value = operands
    scale, steps = _leading(steps)
    held = tuple(attention.four(t) for _, _, t in steps if t is not None)

    def changed(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, m: torch.Tensor,
                n: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:  # fmt: skip
        waiting = iter(rest)
        for step in steps:
            other = None if step[2] is None else attention.element(next(waiting), (b, h, m, n))
            score = _taken(step, score, other)
        return score

    def holds(b: torch.Tensor, h: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return m >= n if causal else torch.ones_like(b, dtype=torch.bool)

    tables = attention.no_blocks(query, key)
    call: Any = flex_attention
    out, lse, _ = call(query, key, value, changed, (*tables, holds), scale, {}, held, ())
    out = out.contiguous()
    if not any(what == "add" or by == -math.inf for what, by, _ in steps):
        return out
    # a row of which nothing is left: not a number, as of a softmax of nothing but minus infinity
    return torch.where((lse == -math.inf)[..., None], math.nan, out)


def _by_library(operands: attention.Operands, steps: Sequence[Step], dropout: float, causal: bool
                ) -> torch.Tensor:  # fmt: skip
    query, key, value = operands
    scale, steps = _leading(steps)
    mask: torch.Tensor | None = None
    for what, by, other in steps:
        if what == "scale":
            scale, mask = scale * by, None if mask is None else mask * by
        elif what == "add":
            more = other if by == 1.0 else other * by
            mask = more if mask is None else mask + more
        else:
            kept = other if what == "keep" else ~other
            added = torch.zeros((), dtype=query.dtype, device=query.device)
            mask = torch.where(kept, added if mask is None else mask, by)
    if mask is not None and causal:
        below = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device)
        mask, causal = torch.where(below.tril(), mask, -math.inf), False
    given = None if mask is None else attention.four(mask).to(query.dtype)
    out = attention.attention(query, key, value, given, dropout, causal, scale=scale).contiguous()
    if given is None or not any(what == "add" or by == -math.inf for what, by, _ in steps):
        return out
    return torch.where((given == -math.inf).all(-1, keepdim=True), math.nan, out)


def _with_heads(t: Any) -> Any:
    return t.unsqueeze(1) if isinstance(t, torch.Tensor) and t.dim() == 3 else t


# ---- what is found


@dataclass(frozen=True)
class Found:
    query: Node
    key: Node
    turned: bool  # keys are turned around already: what is multiplied is their transpose
    value: Node
    steps: tuple[Step, ...]
    dropout: float
    causal: bool = False


Number = Callable[[Any], float | None]  # of a number, or of what is one at every call


def matched(node: Node, number: Number) -> Found | None:
    """The attention whose last product this is."""
    last, value = _pair(node)
    weights, dropout = last, 0.0
    chain: list[Node] = [node]
    while kind_of(weights) in BETWEEN:
        if len(weights.users) != 1:
            return None
        chain.append(weights)
        if kind_of(weights) in DROPPED:
            p = _dropped(weights)
            if p is None or (p and dropout):
                return None
            dropout = dropout or p
        weights = _above(weights)
    if kind_of(weights) not in SOFTMAX or len(weights.users) != 1 or not _is_last(weights):
        return None
    if not all(map(_is_plain, (weights, value))):
        return None
    walk = _Scores(number, tuple(value_of(weights).shape))
    product = walk.up(_above(weights))
    if product is None or product.target is torch.einsum:
        return None
    query, key, scale = _factors(product)
    if not isinstance(query, Node) or not isinstance(key, Node) or not isinstance(value, Node):
        return None
    if product.target in SUMMED and not walk.bias(product):
        return None
    if not walk.asking <= set(chain) or _is_disturbed(product, [*chain, *walk.chain]):
        return None
    shape = value_of(product).shape
    if value_of(last).shape != shape or value_of(weights).shape[-1] != shape[-1]:
        return None
    steps = tuple(_unviewed(s, shape) for s in (("scale", scale, None), *reversed(walk.steps))
                  if s[:2] != ONE)  # fmt: skip
    turned, inner = _turned(key)
    found = Found(query, inner, turned, value, steps, dropout)
    return found if _fits(found, key, product) else None


ONE = ("scale", 1.0)
INPLACE = frozenset(("iadd", "isub", "imul", "itruediv", "setitem"))


def _unviewed(step: Step, shape: tuple[Any, ...]) -> Step:
    """Its tensor by itself, if that is over scores as they are."""
    what, by, other = step
    if not isinstance(other, tuple) or len(other[1]) != len(shape) or other[1] != tuple(shape):
        return step
    return what, by, other[0]


def _is_disturbed(product: Node, chain: Sequence[Node]) -> bool:
    """Whether something else is changed in place meanwhile: what takes the place of all this reads
    at its end what parts of it read before."""
    own, here, last = set(chain), product.next, chain[0]
    while here is not last:
        name = here.target if isinstance(here.target, str) else getattr(here.target, "__name__", "")
        changes = (name.endswith("_") and not name.endswith("__")) or name in INPLACE
        if changes and here not in own:
            return True
        here = here.next
    return False


class _Scores:
    """From a softmax up to the product of its scores."""

    def __init__(self, number: Number, shape: tuple[Any, ...]) -> None:
        self.number = number
        self.steps: list[Step] = []  # the last first
        self.viewed: tuple[Any, ...] | None = shape  # that scores have here
        self.chain: list[Node] = []
        self.asking: set[Node] = set()  # they read of scores only what type they have

    def up(self, scores: Any) -> Node | None:
        while isinstance(scores, Node):
            asking = {u for u in scores.users if _asks_type(u, scores)}
            if len(scores.users) - len(asking) != 1:
                return None
            self.asking |= asking
            self.chain.append(scores)
            kind = kind_of(scores)
            if kind in PRODUCTS or kind in SUMMED or kind is torch.einsum:
                return scores
            if kind in CONVERTED:
                scores = _above(scores)
                continue
            if kind in VIEWED:
                scores = _above(scores)
                self.viewed = tuple(getattr(value_of(scores), "shape", ()))
                continue
            scores = self._step(kind, scores)
        return None

    def _step(self, kind: Any, node: Node) -> Any:
        """What a step is done to, or None."""
        args: Any = node.args
        if kind in TANH:
            return self._with(("tanh", 1.0, None), args[0])
        if kind in FILLED and len(args) == 3:
            return self._filled("fill", args[1], args[2], args[0])
        if kind in CHOSEN and len(args) == 3:
            own = kind == "where"
            mask, yes = (args[1], args[0]) if own else (args[0], args[1])
            if self.number(args[2]) is not None:
                return self._filled("keep", mask, args[2], yes)
            return None if own else self._filled("fill", mask, yes, args[2])
        if len(args) != 2:
            return None
        if kind in SCALED and not node.kwargs:
            return self._scaled(kind, args)
        return self._added(kind, node) if kind in ADDED else None

    def _scaled(self, kind: Any, args: Any) -> Any:
        by = self.number(args[1])
        if by is None and kind not in DIVIDED and (own := self.number(args[0])) is not None:
            by, args = own, (args[1], args[0])
        if by is None and all(isinstance(value_of(a), torch.Tensor) for a in args):
            return self._by_tensor(kind, args)
        if by is None or (kind in DIVIDED and by == 0):
            return None
        return self._with(("scale", 1 / by if kind in DIVIDED else by, None), args[0])

    def _by_tensor(self, kind: Any, args: Any) -> Any:
        inner, other = args
        if kind in DIVIDED:
            return self._with(("over", 1.0, other), inner)
        if not self._leads(inner):
            inner, other = other, inner
        return self._with(("times", 1.0, other), inner)

    def _added(self, kind: Any, node: Node) -> Any:
        sign = -1.0 if kind in SUBTRACTED else 1.0
        by: Any = node.kwargs.get("alpha", 1)
        inner, other = as_type(tuple[Any, Any], node.args)
        if set(node.kwargs) - {"alpha"} or not isinstance(by, (int, float)):
            return None
        if not isinstance(other, Node) or not isinstance(inner, Node):
            return None
        if not self._leads(inner) and kind not in SUBTRACTED and by == 1:
            inner, other = other, inner
        return self._with(("add", sign * by, other), inner)

    def _leads(self, node: Any) -> bool:
        """Whether scores come from here."""
        waiting: list[Any] = [node]
        seen: set[Any] = set()
        while waiting:
            here = waiting.pop()
            kind = kind_of(here)
            if kind in PRODUCTS or kind in SUMMED or kind is torch.einsum:
                return True
            if kind in CHANGES and here not in seen:
                seen.add(here)
                waiting += here.all_input_nodes
        return False

    def _filled(self, what: str, mask: Any, by: Any, inner: Any) -> Any:
        number = self.number(by)
        if number is None or not isinstance(mask, Node):
            return None
        held = value_of(mask)
        if not isinstance(held, torch.Tensor) or held.dtype != torch.bool:
            return None
        return self._with((what, number, mask), inner)

    def _with(self, step: Step, inner: Any) -> Any:
        if step[2] is not None and self.viewed is not None:
            step = (step[0], step[1], (step[2], self.viewed))
        self.steps.append(step)
        return inner

    def bias(self, product: Node) -> bool:
        """What a product is added to is a step as well."""
        given = _summed(product)
        beta = given.get("beta", 1)
        if beta == 0:
            return True
        if not isinstance(beta, (int, float)) or not isinstance(given.get("input"), Node):
            return False
        self.viewed = None
        self._with(("add", float(beta), given["input"]), product)
        return True


def _summed(product: Node) -> dict[str, Any]:
    return {**dict(zip(("input", "batch1", "batch2"), product.args, strict=False)),
            **product.kwargs}  # fmt: skip


def _asks_type(user: Node, node: Node) -> bool:
    return kind_of(user) == "type_as" and user.args[1] is node and user.args[0] is not node


def _is_plain(node: Any) -> bool:
    fake = value_of(node)
    return isinstance(fake, torch.Tensor) and attention.is_plain(fake)


def _factors(product: Node) -> tuple[Any, Any, float]:
    if kind_of(product) not in SUMMED:
        return (*_pair(product), 1.0)
    given = _summed(product)
    alpha = given.get("alpha", 1)
    known = isinstance(alpha, (int, float)) and "out" not in given
    return (given.get("batch1"), given.get("batch2"), float(alpha)) if known else (None, None, 1.0)


def _pair(node: Node) -> tuple[Any, Any]:
    return (node.args[0], node.args[1]) if len(node.args) == 2 else (None, None)


def expand_einsums(graph: torch.fx.Graph, node: Node, number: Number) -> None:
    """Where the last product of attention is, the einsums of both products become `matmul`s."""
    weights: Any = node.args[1] if len(node.args) == 3 else None
    while kind_of(weights) in CONVERTED or kind_of(weights) in DROPPED:
        weights = _above(weights)
    product = _Scores(number, ()).up(_above(weights)) if kind_of(weights) in SOFTMAX else None
    if product is None or _equation(node) is None or not _is_plain(node):
        return
    if kind_of(product) is torch.einsum and _equation(product) is not None:
        _as_product(graph, product)
    _as_product(graph, node)


def _equation(node: Node) -> tuple[list[int], list[int], list[int]] | None:
    """An einsum as a product: how each operand's dimensions are put in order, and the result's."""
    text: Any = node.args[0]
    if len(node.args) != 3 or not isinstance(text, str) or "." in text or "->" not in text:
        return None
    of, result = text.replace(" ", "").split("->")
    a, _, b = of.partition(",")
    both = [c for c in result if c in a and c in b]
    summed = [c for c in a if c in b and c not in result]
    m, n = ([c for c in result if c in own and c not in other] for own, other in ((a, b), (b, a)))
    order = [[*both, *m, *summed], [*both, *summed, *n], [*both, *m, *n]]
    if [len(m), len(n), len(summed)] != [1, 1, 1] or len(both) not in (1, 2):
        return None
    if [sorted(o) for o in order] != [sorted(a), sorted(b), sorted(result)]:
        return None
    return ([a.index(c) for c in order[0]], [b.index(c) for c in order[1]],
            [order[2].index(c) for c in result])  # fmt: skip


def _as_product(graph: torch.fx.Graph, node: Node) -> None:
    found = _equation(node)
    assert found is not None
    with graph.inserting_before(node):
        a, b = (_permuted(graph, of, dims) for of, dims in zip(node.args[1:], found, strict=False))
        made = graph.call_function(torch.matmul, (a, b))
        made.meta = {"example_value": torch.matmul(value_of(a), value_of(b))}
        made = _permuted(graph, made, found[2])
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _permuted(graph: torch.fx.Graph, node: Any, dims: Sequence[int]) -> Node:
    if list(dims) == sorted(dims):
        return node
    made = graph.call_method("permute", (node, *dims))
    made.meta = {"example_value": value_of(node).permute(dims)}
    return made


def _dropped(node: Any) -> float | None:
    """How many are dropped, or None where that is not known."""
    given: dict[str, Any] = (
        dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
    )
    p = given.get("p", 0.5)
    if given.get("training", given.get("train", True)) is False:
        return 0.0
    return float(p) if isinstance(p, (int, float)) and 0 <= p < 1 else None


def _is_last(node: Any) -> bool:
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    value = value_of(node)
    return isinstance(value, torch.Tensor) and dim in (-1, value.dim() - 1)


def _turned(key: Node) -> tuple[bool, Node]:
    """Keys as they were before they were turned around."""
    if kind_of(key) in TURNED and len(key.args) == 3:
        value: Any = value_of(key)
        dims = {int(d) % value.dim() for d in key.args[1:] if isinstance(d, int)}
        if dims == {value.dim() - 2, value.dim() - 1} and isinstance(key.args[0], Node):
            return False, key.args[0]
    return True, key


def _fits(found: Found, key: Node, product: Node) -> bool:
    query, turned, value = (value_of(n) for n in (found.query, key, found.value))
    tensors = [query, turned, value, value_of(product)]
    if not all(isinstance(t, torch.Tensor) and t.dim() == query.dim() for t in tensors):
        return False
    dims = query.dim()
    if dims not in (3, 4) or any(math.isnan(s[1]) for s in found.steps):
        return False
    attention.settle((query, turned.transpose(-2, -1), value))
    lead = dims - 2
    if not query.shape[:lead] == turned.shape[:lead] == value.shape[:lead]:
        return False
    shape = tuple(value_of(product).shape)
    steps: list[Step] = []
    for what, by, other in found.steps:
        fake = None if other is None else _spread(other, shape)
        if other is not None and fake is None:
            return False
        steps.append((what, by, fake))
    key_ = turned.transpose(-2, -1)
    if dims == 3:
        query, key_, value = (t.unsqueeze(1) for t in (query, key_, value))
        steps = [(what, by, _with_heads(t)) for what, by, t in steps]
    return bool(way_of((query, key_, value), steps, found.dropout, 1))


def _spread(other: Any, shape: tuple[Any, ...]) -> torch.Tensor | None:
    """What is added to scores, or decides over them, if it can be read at their positions."""
    viewed = None
    if isinstance(other, tuple):
        other, viewed = other
    fake = value_of(other)
    if not isinstance(fake, torch.Tensor):
        return None
    if viewed is not None:
        sizes = (*viewed, *shape)
        if not all(isinstance(n, int) for n in sizes) or not _fit(fake, viewed):
            return None
        return fake.expand(viewed).reshape(shape)
    return fake if _fit(fake, shape) else None


def _fit(fake: torch.Tensor, shape: tuple[Any, ...]) -> bool:
    lead = len(shape) - fake.dim()
    pairs = zip(fake.shape, shape[max(0, lead) :], strict=True) if lead >= 0 else [(2, 3)]
    return all(n == 1 or n == of for n, of in pairs)


def replace(graph: torch.fx.Graph, node: Node, found: Found, group: int) -> None:
    """Put the call in place of the last product, with key heads that `group` heads share."""
    key = found.key
    steps: list[Step] = []
    with graph.inserting_before(node):
        if found.turned:
            key = graph.call_method("transpose", (key, -2, -1))
        for what, by, other in found.steps:
            if isinstance(other, tuple):
                shape = (*value_of(found.query).shape[:-1], value_of(found.value).shape[-2])
                wide = graph.call_method("expand", (other[0], *other[1]))
                other = graph.call_method("reshape", (wide, *shape))
            steps.append((what, by, other))
        args = (found.query, key, found.value, steps, found.dropout, group, found.causal)
        made = graph.call_function(written_out, args)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


__all__ = [
    "PRODUCTS",
    "Found",
    "expand_einsums",
    "kind_of",
    "matched",
    "replace",
    "value_of",
    "written_out",
]
