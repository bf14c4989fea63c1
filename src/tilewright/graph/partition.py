"""What the backward pass is given: the cut of a joint graph that moves the fewest bytes.

A value of the forward pass that the backward needs is either kept (written by the forward, unless
it is in memory anyway, and read by the backward) or computed again there from others. Keeping has
the price of the bytes that move, computing again is nearly free for what fuses and impossible for
what does not: the cheapest mix is a minimum cut. The graph's ends and how they are put together are
torch's; so are graphs in which the user says what to recompute.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.partitioners import NodeInfo, _size_of, min_cut_rematerialization_partition
from torch._ops import OpOverload

from tilewright import config
from tilewright.graph import attention, seeded, simplify
from tilewright.graph.distinct import store_distinct
from tilewright.graph.expose import expose, narrow_places
from tilewright.graph.flow import INFINITE, Network
from tilewright.graph.layout import channels_last
from tilewright.graph.passes import run as run_passes

aten = torch.ops.aten

Node = torch.fx.Node
Family = Callable[[Any], str | None]
"""The family of ops whose loops we generate that a target belongs to; None for an opaque call."""

BYTE = 64  # the price of a byte that moves, in units of the cheapest work on one byte
AGAIN = BYTE - 4  # of an input: where it is the same, nothing is written for it to be kept
HOLD = 3 * BYTE  # the price of holding a byte until the backward pass, for little gain
LAST_RESORT = 1 << 60  # dearer than any tensors
CHEAP = frozenset({"pointwise", "activations", "casts", "views", "join", "factories"})
EXACT = frozenset((  # what is the same whenever it is computed
    aten.add, aten.sub, aten.rsub, aten.mul, aten.neg, aten.abs, aten.relu, aten.where,
    aten.maximum, aten.minimum, aten.clamp, aten.clamp_min, aten.clamp_max,
))  # fmt: skip
GATHERS = frozenset({"indexing"})
OPAQUE = frozenset({None, "products"})
UNINITIALISED = frozenset((
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.empty_permuted.default, aten.new_empty.default, aten.new_empty_strided.default,
))  # fmt: skip


def partitioner(family: Family) -> Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]:
    """A `partition_fn` for AOTAutograd."""

    def partition(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int,
                  **options: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:  # fmt: skip
        def choose(graph: torch.fx.Graph, info: NodeInfo, memory_budget: float = 1) -> list[Node]:
            if memory_budget != 1 or annotated:
                return torchs_choice(graph, info, memory_budget)
            return kept(graph, info, num_fwd_outputs, family)

        run_passes("joint_custom_pre_pass", config.joint_custom_pre_pass, joint)
        annotated = any("recompute" in n.meta for n in joint.graph.nodes)
        attention.prune(joint.graph)
        if config.layout_optimization:
            channels_last(joint.graph)
        expose(joint.graph, lambda node: family(node.target) not in OPAQUE)
        narrow_places(joint.graph)
        store_distinct(joint.graph)
        if not annotated:
            simplify.remove_common(joint.graph, simplify.Facts(joint.graph))
        run_passes("joint_custom_post_pass", config.joint_custom_post_pass, joint)
        torchs_choice = partitioners.choose_saved_values_set
        with (
            _replaced(partitioners, "choose_saved_values_set", choose),
            # torch's own pass imports its compiler, which takes longer than everything here
            _replaced(functorch_config, "cse", annotated),
        ):
            return min_cut_rematerialization_partition(
                joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
            )

    return partition


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# ---- what the costs depend on


class Facts:
    """One joint graph: what fuses, what is in memory anyway, what must be in which pass."""

    def __init__(self, graph: torch.fx.Graph, info: NodeInfo, forward_outputs: int,
                 family: Family) -> None:  # fmt: skip
        self.info = info
        self._family = family
        results: Any = graph.output_node().args[0]
        self._returned = {base(n) for n in results[:forward_outputs] if isinstance(n, Node)}
        forward = [n for n in graph.nodes if n.op != "output" and not self.is_backward(n)]
        self.values = [n for n in forward if not is_alias(n)]
        self._level: dict[Node, int] = {}
        for n in self.values:
            below = max((self._level[base(i)] for i in n.all_input_nodes), default=0)
            self._level[n] = below + self.is_opaque(n)
        # asked of a tensor for each of its parts, of which a loop over its rows has many
        self.in_memory = functools.cache(self._in_memory)
        self.is_held_anyway = functools.cache(self._is_held_anyway)
        self.parts_overlap = functools.cache(_parts_overlap)

    def is_backward(self, node: Node) -> bool:
        return node in self.info.tangents_closure

    def kind(self, node: Node) -> str | None:
        return self._family(node.target) if node.op == "call_function" else None

    def is_opaque(self, node: Node) -> bool:
        """Whether operands and results are in memory: a library product, a fallback."""
        return (node.op == "call_function" and self.kind(node) in OPAQUE
                and node.target is not operator.getitem and not _is_number(node))  # fmt: skip

    def users(self, node: Node) -> Iterator[Node]:
        """What takes the value, as it is or through aliases."""
        for user in node.users:
            if is_alias(user) and not self.is_backward(user):
                yield from self.users(user)
                if user in self.info.required_bw_nodes:
                    yield user
            elif user.op != "output":
                yield user

    def needs(self, user: Node) -> bool:
        """Whether the backward pass has to compute this."""
        return self.is_backward(user) or user in self.info.required_bw_nodes

    def _in_memory(self, node: Node) -> bool:
        """Whether the forward pass stores the value whatever is decided here."""
        if node.op == "placeholder" or node in self._returned:
            return True
        if node.target is operator.getitem and self.is_opaque(_producer(node)):
            return True
        if self.is_opaque(node) or (_is_window(node) and self.in_memory(_whole(node))):
            return True
        users = [u for u in self.users(node) if self.info.is_required_fw(u)]
        return any(self.is_held_by(u, node) for u in users) or self._used_far_apart(node, users)

    def _is_held_anyway(self, node: Node) -> bool:
        """Whether an opaque call of the backward pass takes the value."""
        return any(self.is_held_by(u, node) and self.needs(u) for u in self.users(node))

    def is_held_by(self, user: Node, node: Node) -> bool:
        """Whether a call wants the value in memory."""
        return self.is_opaque(user) and not attention.is_read_by(user, node)

    def _used_far_apart(self, node: Node, users: list[Node]) -> bool:
        """Kernels before and after an opaque call use the value: storing it costs what computing it
        twice does, when it is computed from two or more tensors of its size."""
        levels = {self._level[u] for u in users}
        if len(levels) < 2:
            return False
        sources = {base(i) for i in node.all_input_nodes}
        return sum(size(i) for i in sources) >= 2 * size(node)


# ---- prices


def recompute_price(node: Node, facts: Facts) -> int:
    """Of computing the value in the backward pass, given its operands there."""
    if node.op == "placeholder" or node.meta.get("unbacked_bindings"):
        return INFINITE
    if node.target in UNINITIALISED or _is_number(node) or node.op == "get_attr":
        return 0
    if _asks_for_equals(node):
        return INFINITE
    kind = facts.kind(node)
    if _is_window(node) and facts.parts_overlap(_producer(node)):
        work = 1  # its base is read once for all of them
    elif _is_window(node):
        # it is read out of its base, or fuses with what computes that
        work = BYTE if facts.in_memory(_whole(node)) else 1
    elif kind in CHEAP or (kind == "losses" and _is_of_each(node)):
        work = 1
    elif kind in GATHERS:
        work = BYTE + BYTE // 8
    elif node.target is seeded.uniform:
        work = 4
    elif _is_view(node):
        work = 0
    else:
        return INFINITE
    if facts.is_held_anyway(node):
        # its own kernel in the backward pass, which reads as much as it writes
        work += BYTE * (2 if node.all_input_nodes else 1)
    return work * size(node)


def keep_prices(node: Node, facts: Facts) -> tuple[int, int]:
    """Of having the value in memory after the forward pass, and of kernels of ours reading it."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return 1, 0
    if _is_number(node):
        return LAST_RESORT, 0
    if isinstance(value, (tuple, list, dict)) or node.target in UNINITIALISED:
        return INFINITE, 0
    if not isinstance(value, torch.Tensor):  # an object that is handed on
        return 0, 0
    bytes_ = size(node)
    write = 0 if facts.in_memory(node) else BYTE
    if node.all_input_nodes and all(facts.is_held_anyway(base(i)) for i in node.all_input_nodes):
        write += HOLD
    return write * bytes_, (AGAIN if node.op == "placeholder" else BYTE) * bytes_


# ---- the cut


def kept(graph: torch.fx.Graph, info: NodeInfo, forward_outputs: int,
         family: Family) -> list[Node]:  # fmt: skip
    """The values the forward pass hands to the backward.

    A value has three vertices. On the sink's side are: `computed`, if the backward computes it;
    `stored`, if the backward has it in memory; `read`, if kernels of ours use it there.
    """
    facts = Facts(graph, info, forward_outputs, family)
    network = Network()
    prices = {n: recompute_price(n, facts) for n in facts.values}
    computed = {n: network.vertex() for n in facts.values}
    for node, here in computed.items():
        stored, read = network.vertex(), network.vertex()
        write_price, read_price = keep_prices(node, facts)
        network.edge(network.source, here, prices[node])
        network.edge(here, stored, write_price)
        network.edge(here, read, read_price)
        network.edge(stored, read, INFINITE)
        for user in facts.users(node):
            where = stored if facts.is_held_by(user, node) or is_alias(user) else read
            if facts.needs(user):
                network.edge(where, network.sink, INFINITE)
            if user in computed and prices[user] < INFINITE:
                network.edge(where, computed[user], INFINITE)
        if node in info.required_bw_nodes:
            network.edge(stored, network.sink, INFINITE)
    given = network.cut()
    return _first_met(facts, {n for n, vertex in computed.items() if given[vertex]})


def _first_met(facts: Facts, available: set[Node]) -> list[Node]:
    """Those of the available values that computing the backward pass from them reaches."""
    reached: set[Node] = set()
    asked = facts.info.required_bw_nodes
    waiting = [n for n in facts.values if n in asked or any(map(facts.needs, facts.users(n)))]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            if node not in available:
                waiting += operands(node)
    return [n for n in facts.values if n in reached and n in available]


# ---- what a node is


def size(node: Node) -> int:
    return _size_of(node)


def is_alias(node: Node) -> bool:
    """Whether a node gives its first operand's memory, all of it, another shape."""
    if not _is_view(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    source = _producer(node)
    return isinstance(source.meta.get("val"), torch.Tensor) and size(node) >= size(source)


def base(node: Node) -> Node:
    while is_alias(node):
        node = _producer(node)
    return node


def operands(node: Node) -> Iterator[Node]:
    """The values a node is computed from, and the sizes of the aliases it takes them through."""
    for source in node.all_input_nodes:
        if is_alias(source):
            yield from operands(source)
        else:
            yield source


def _is_view(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if not node.all_input_nodes:  # of a number: `conj` of a literal
        return False
    return node.target.is_view or node.target is aten._unsafe_view.default


def _parts_overlap(source: Node) -> bool:
    """Whether several parts of it are used that have much in common, as neighbours do."""
    return 2 * sum(size(n) for n in source.users if _is_window(n)) > 3 * size(source)


def _is_window(node: Node) -> bool:
    """A view of a part of a tensor, be it one of several that are made at once."""
    if node.target is operator.getitem:
        return _is_view(_producer(node))
    return (_is_view(node) and isinstance(node.meta.get("val"), torch.Tensor)
            and not is_alias(node))  # fmt: skip


def _whole(node: Node) -> Node:
    """What a node is a part of."""
    while node.target is operator.getitem or _is_view(node):
        node = _producer(node)
    return node


def _producer(node: Node) -> Node:
    return node.all_input_nodes[0]


def _asks_for_equals(node: Node) -> bool:
    """Whether computed numbers are compared for being the same, as with the largest of them. What
    is computed again may differ in the last bit: the vector of a function is not its scalar."""
    if node.target not in (aten.eq.Tensor, aten.ne.Tensor):
        return False
    floats = any(i.meta["val"].dtype.is_floating_point for i in node.all_input_nodes)
    return floats and not all(map(_is_exact, node.all_input_nodes))


def _is_exact(node: Node) -> bool:
    """Whether it is made of inputs by nothing that could give another last bit."""
    waiting, seen = [node], set[Node]()
    while waiting:
        here = waiting.pop()
        if here in seen or here.op == "placeholder":
            continue
        seen.add(here)
        exact = isinstance(here.target, OpOverload) and here.target.overloadpacket in EXACT
        if not (exact or _is_view(here)):
            return False
        waiting += here.all_input_nodes
    return True


def _is_of_each(node: Node) -> bool:
    """Whether a loss is left as it is of each element."""
    if not isinstance(node.meta["val"], torch.Tensor):
        return False
    counts = [size(n) // n.meta["val"].dtype.itemsize for n in (node, *node.all_input_nodes)]
    return counts[0] >= max(counts)


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
