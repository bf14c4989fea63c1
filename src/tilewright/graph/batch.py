"""Ops that are alike and need nothing of each other, as one batched op.

`config.batch_fusion` names what is batched. Operands are stacked, the op runs once over all of
them, and every user takes its part of the result. One product of many small matrices keeps a
processor busy where each alone does not; the price is the copy that stacks the operands, so nothing
is batched unless asked for. Products of different sizes (`group_linear`) are one too, with zeros
around the smaller operands. A batch of pointwise ops saves launches alone, and ops that were fused
with their neighbours no longer are: where a graph would move many more bytes with such batches, it
has none.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload

from tilewright import config, metrics
from tilewright.graph.simplify import Facts, is_pure
from tilewright.graph.sums import TRANSPOSED, Maker

aten = torch.ops.aten

Node = torch.fx.Node
Results = dict[Node, Node]  # who takes the place of whom

EXACT = (torch.float32, torch.float64)  # low-precision eager rounds a norm once, at its end


# Launches are worth some traffic to who asks for batches: results of ops between products are
# copied once more (a gate: 1.2 times the bytes), ops in front of a concatenation had three times.
MOST_ADDED = 1.5


def batch(gm: torch.fx.GraphModule, bytes_of: Callable[[torch.fx.GraphModule], int]) -> None:
    """Batch what `config.batch_fusion` names, in place. `bytes_of` says what a graph moves."""
    wanted = [name.strip() for name in config.batch_fusion.split(",") if name.strip()]
    for name in wanted:
        kind = KINDS[name]
        before = copy.deepcopy(gm.graph) if kind.is_weighed else None
        made = _batch_kind(gm.graph, kind)
        if before is not None and made and _adds(bytes_of, gm, before):
            gm.graph = before
            metrics.counters["batch_fusion"][f"{name} refused: more bytes"] += sum(made.values())
            continue
        for target, count in made.items():
            metrics.counters["batch_fusion"][name] += count
            if kind.is_weighed:
                metrics.counters["batch_fusion"][target] += count
    if wanted:
        gm.graph.lint()
        gm.recompile()


def _adds(bytes_of: Callable[[torch.fx.GraphModule], int], gm: torch.fx.GraphModule,
          before: torch.fx.Graph) -> bool:  # fmt: skip
    return bytes_of(gm) > MOST_ADDED * bytes_of(torch.fx.GraphModule(gm, before))


def _batch_kind(graph: torch.fx.Graph, kind: Kind) -> dict[str, int]:
    """How many batches were made, by operator."""
    written = Facts(graph).written
    alike: dict[Hashable, list[Node]] = {}
    for node in graph.nodes:
        found = kind.key(node) if node.op == "call_function" and node.users else None
        if found is not None and not _touches(node, written):
            alike.setdefault(found, []).append(node)
    made: dict[str, int] = {}
    for nodes in alike.values():
        target, count = str(nodes[0].target), _batch_alike(graph, nodes, kind)
        if count:
            made[target] = made.get(target, 0) + count
    return made


@dataclass(frozen=True)
class Kind:
    """What may be batched: nodes of one `key`, of a choice of them those that `keep` leaves (the
    first is one), by what `make` puts in their place."""

    key: Callable[[Node], Hashable | None]
    make: Callable[[Maker, Sequence[Node]], Results]
    keep: Callable[[Sequence[Node]], Sequence[Node]] = lambda nodes: nodes
    is_weighed: bool = False  # taken back where it adds bytes; counted by operator, too


def _batch_alike(graph: torch.fx.Graph, nodes: Sequence[Node], kind: Kind) -> int:
    """How many batches were made of them."""
    left, count = list(nodes), 0
    while len(left) >= config.batch_fusion_min_size:
        # a batch makes its members' users wait for all its operands: the rest is looked at anew
        chosen = kind.keep(independent_subset(left, ancestors(graph, left)))
        if len(chosen) >= config.batch_fusion_min_size and _make_room(graph, chosen):
            count += 1
            maker = Maker(chosen[-1].next, chosen[-1])
            for old, new in kind.make(maker, chosen).items():
                new.meta["val"] = old.meta["val"]  # results share no memory that they did not
                old.replace_all_uses_with(new)
            for node in chosen:
                for part in list(node.users):
                    graph.erase_node(part)
                graph.erase_node(node)
        left = [node for node in left if node not in chosen]
    return count


def ancestors(graph: torch.fx.Graph, marked: Iterable[Node]) -> dict[Node, int]:
    """For each node which of the marked ones it needs, directly or not, one bit for each."""
    bit = {node: 1 << k for k, node in enumerate(marked)}
    found: dict[Node, int] = {}
    for node in graph.nodes:
        needs = 0
        for source in node.all_input_nodes:
            needs |= found[source] | bit.get(source, 0)
        found[node] = needs
    return found


def independent_subset(nodes: Sequence[Node], needs: Mapping[Node, int]) -> list[Node]:
    """The first node and, in order, each that needs none of those taken before, up to the largest
    size of a batch. `needs` are the bits of `ancestors(graph, nodes)`."""
    chosen: list[Node] = []
    taken = 0
    for k, node in enumerate(nodes):
        if len(chosen) < config.batch_fusion_max_size and not needs[node] & taken:
            chosen.append(node)
            taken |= 1 << k
    return chosen


def _make_room(graph: torch.fx.Graph, chosen: Sequence[Node]) -> bool:
    """Move what needs a member behind the last of them; False if that would change effects."""
    first, last = chosen[0], chosen[-1]
    needs = ancestors(graph, chosen)
    late: list[Node] = []
    node = first.next
    while node is not last:
        if needs[node] and node not in chosen:
            late.append(node)
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return False
        node = node.next
    if not all(is_pure(node) for node in late):
        return False
    for node in reversed(late):
        last.append(node)
    return True


# ---- what is batched


def _layout(node: Any) -> tuple[Any, ...] | None:
    """Type and sizes of a tensor, for comparing."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    sizes = (n.node.expr if isinstance(n, torch.SymInt) else n for n in value.size())
    return (value.dtype, value.device, *sizes)


def _touches(node: Node, written: set[int | None]) -> bool:
    operands = [n.meta.get("val") for n in node.all_input_nodes]
    return any(isinstance(t, torch.Tensor) and t.untyped_storage()._cdata in written
               for t in operands)  # fmt: skip


def _linear_key(node: Node) -> Hashable | None:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return None
    layouts = [_layout(a) for a in node.args]
    if None in layouts or (len(layouts) == 3 and len(layouts[0] or ()) != 3):
        return None  # a bias is one row
    return (node.target, *layouts)


def _linears(make: Maker, nodes: Sequence[Node]) -> Results:
    left = stacked(make, [n.args[-2] for n in nodes])
    right = stacked(make, [n.args[-1] for n in nodes])
    if nodes[0].target is aten.mm.default:
        return _parts(make, nodes, make(aten.bmm.default, left, right))
    bias = make(aten.unsqueeze.default, stacked(make, [n.args[0] for n in nodes]), 1)
    return _parts(make, nodes, make(aten.baddbmm.default, bias, left, right))


# products of different sizes are made of one size by zeros: at most so many times the arithmetic
MOST_PADDED = 2.0


def _group_key(node: Node) -> Hashable | None:
    layouts = _linear_key(node)
    if layouts is None or _extents(node) is None:
        return None
    value = node.meta["val"]
    return node.target, value.dtype, value.device


def _extents(node: Node) -> tuple[int, int, int] | None:
    """Rows, inner size and columns of a product, where they are known and none is zero."""
    (m, k), n = node.args[-2].meta["val"].shape, node.args[-1].meta["val"].shape[1]  # type: ignore[union-attr]
    if any(isinstance(e, torch.SymInt) or not e for e in (m, k, n)):
        return None
    return m, k, n


def _largest(nodes: Sequence[Node]) -> tuple[int, ...]:
    return tuple(max(sizes) for sizes in zip(*filter(None, map(_extents, nodes)), strict=True))


def _near(nodes: Sequence[Node]) -> Sequence[Node]:
    """The first, and of the others those with which little is computed for nothing."""
    chosen = [nodes[0]]
    for node in nodes[1:]:
        both = [*chosen, node]
        wanted = sum(math.prod(_extents(n) or ()) for n in both)
        if len(both) * math.prod(_largest(both)) <= MOST_PADDED * wanted:
            chosen = both
    return chosen


def _grouped(make: Maker, nodes: Sequence[Node]) -> Results:
    m, k, n = _largest(nodes)
    left = stacked(make, [_padded(make, node.args[-2], m, k) for node in nodes])
    right = stacked(make, [_padded(make, node.args[-1], k, n) for node in nodes])
    if nodes[0].target is aten.mm.default:
        whole = make(aten.bmm.default, left, right)
    else:
        rows = stacked(make, [_padded(make, node.args[0], n) for node in nodes])
        whole = make(aten.baddbmm.default, make(aten.unsqueeze.default, rows, 1), left, right)
    found: Results = {}
    for node, part in _parts(make, nodes, whole).items():
        rows, _, columns = _extents(node) or (0, 0, 0)
        for dim, size, most in ((0, rows, m), (1, columns, n)):
            part = part if size == most else make(aten.slice.Tensor, part, dim, 0, size)
        found[node] = part
    return found


def _padded(make: Maker, node: Any, *sizes: int) -> Node:
    """A tensor with zeros behind it in each dimension."""
    value = node.meta["val"]
    if _is_transposed(node) and len(sizes) == 2:  # as it is in memory
        return make(aten.t.default, _padded(make, node.args[0], *reversed(sizes)))
    room = [n for size, whole in zip(reversed(value.shape), reversed(sizes), strict=True)
            for n in (0, whole - size)]  # fmt: skip
    return make(aten.constant_pad_nd.default, node, room, 0.0) if any(room) else node


def _norm_key(node: Node) -> Hashable | None:
    if node.target is not aten.native_layer_norm.default or len(node.args) != 5:
        return None
    x, shape, weight, bias, eps = node.args
    found = _layout(x)
    if (
        found is None
        or found[0] not in EXACT
        or any(user.target is not operator.getitem for user in node.users)
    ):
        return None
    return found, str(shape), _layout(weight), _layout(bias), eps


def _norms(make: Maker, nodes: Sequence[Node]) -> Results:
    shape, eps = nodes[0].args[1], nodes[0].args[4]
    x = stacked(make, [n.args[0] for n in nodes])
    whole = make(aten.native_layer_norm.default, x, shape, None, None, eps)
    out, *moments = (make(operator.getitem, whole, k) for k in range(3))
    rank, inner = x.meta["val"].dim(), len(shape)  # type: ignore[arg-type]
    for position, target in ((2, aten.mul.Tensor), (3, aten.add.Tensor)):
        if nodes[0].args[position] is not None:
            factors = stacked(make, [n.args[position] for n in nodes])
            for _ in range(rank - 1 - inner):
                factors = make(aten.unsqueeze.default, factors, 1)
            out = make(target, out, factors)
    return {part: make(aten.select.int, (out, *moments)[part.args[1]], 0, k)  # type: ignore[index]
            for k, node in enumerate(nodes) for part in node.users}  # fmt: skip


def _pointwise_key(node: Node) -> Hashable | None:
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    own = _layout(node)
    tensors = [a for a in node.args if isinstance(a, Node)]
    others = [a for a in node.args if not isinstance(a, Node)]
    if own is None or not tensors or any(isinstance(v, Node) for v in node.kwargs.values()):
        return None
    layouts = [_layout(a) for a in tensors]
    if len(own) == 2 or any(found is None or found[2:] != own[2:] for found in layouts):
        return None  # operands of other sizes are broadcast: they would not be once stacked
    if any(not isinstance(a, bool | int | float | str | None) for a in others):
        return None
    places = tuple(isinstance(a, Node) for a in node.args)
    return target, own, *layouts, places, repr(others), repr(sorted(node.kwargs.items()))


def _pointwise(make: Maker, nodes: Sequence[Node]) -> Results:
    first = nodes[0]
    args = [stacked(make, [n.args[k] for n in nodes]) if isinstance(a, Node) else a
            for k, a in enumerate(first.args)]  # fmt: skip
    return _parts(make, nodes, make(first.target, *args, **first.kwargs))


KINDS: dict[str, Kind] = {
    "linear": Kind(_linear_key, _linears),
    "group_linear": Kind(_group_key, _grouped, keep=_near),
    "layer_norm": Kind(_norm_key, _norms),
    "pointwise": Kind(_pointwise_key, _pointwise, is_weighed=True),
}


def stacked(make: Maker, parts: Sequence[Any]) -> Node:
    """Tensors of one size along a new first dimension; the same one over and over is not copied."""
    if all(p is parts[0] for p in parts):
        one = make(aten.unsqueeze.default, parts[0], 0)
        size = one.meta["val"].size()
        return make(aten.expand.default, one, [len(parts), *(-1 for _ in size[1:])])
    if all(_is_transposed(p) for p in parts):  # along rows, as they are in memory
        return make(aten.transpose.int, stacked(make, [p.args[0] for p in parts]), 1, 2)
    if (found := _stacked_before(parts)) is not None:
        whole, at = found
        return make(aten.slice.Tensor, whole, 0, at[0], at[-1] + 1, at.step)
    return make(aten.cat.default, [make(aten.unsqueeze.default, p, 0) for p in parts], 0)


def _stacked_before(parts: Sequence[Any]) -> tuple[Node, range] | None:
    """What the parts are of and which, if they are parts of one batch at even distances."""
    if any(p.target is not aten.select.int or p.args[1] != 0 for p in parts):
        return None
    whole, places = parts[0].args[0], [p.args[2] for p in parts]
    step = places[1] - places[0] if len(places) > 1 else 1
    if step <= 0 or any(p.args[0] is not whole for p in parts):
        return None
    at = range(places[0], places[-1] + 1, step)
    return (whole, at) if places[0] >= 0 and places == list(at) else None


def _is_transposed(node: Node) -> bool:
    value = node.meta["val"]
    swaps = node.target is aten.t.default or [*node.args[1:]] in ([[1, 0]], [0, 1], [1, 0])
    return node.target in TRANSPOSED and value.dim() == 2 and swaps


def _parts(make: Maker, nodes: Sequence[Node], whole: Node) -> Results:
    return {node: make(aten.select.int, whole, 0, k) for k, node in enumerate(nodes)}
