"""Layouts, which are those of the fake values on the nodes, decided once for the whole graph.

`channels_last` is a choice, for graphs of inference and for joint graphs before they are parted:
the library's convolutions of images are faster that way, and loops go along with whatever layout
they are given. What the graph returns keeps its own.

`eager_strides` is a correction. Eager lays a result out after the first operand that says how, and
an expanded operand says nothing. torch's shape functions convert half precision operands first,
which makes an expanded one contiguous: from then on it does say something. And on the CPU eager's
`max_unpool2d` keeps channels last, of which its shape function knows nothing.
"""

from __future__ import annotations

import collections
import contextlib
import operator
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from tilewright.graph.simplify import is_pure

aten = torch.ops.aten

Node = torch.fx.Node


# What a byte of a copy into the other layout costs beside what a convolution gains for each byte of
# its image and of its result, which the library otherwise puts into a layout of its own and back.
# One thread, AVX-512, float32, 2026-11-18: 27 convolutions, of 1 to 1024 channels, grouped and
# depthwise ones too, gained 0.016 to 0.13 ms of a megabyte, 0.045 in the middle, as much in their
# gradients; a copy cost 0.10 to 0.24 ms of a megabyte, 0.12 in the middle.
COPY = 3

# Groups of channels that are folded are short, and apart, with channels last: beside a copy of the
# image, this many times (4x64x32x32, 8 groups, one thread, 2026-11-18: group norm and silu 0.40 ms
# instead of 0.12, with gradients 1.83 instead of 0.35).
FOLDED: dict[Any, int] = {
    aten.native_group_norm.default: 2,
    aten.native_group_norm_backward.default: 12,
}

# On a card the library's own copies move as many bytes as ours, of weights too, and a group norm
# reaches half of the copy bandwidth, not two thirds (H200, docs/measurements/2026-11-16-h200.md).
COPY_ON_CARD = 1
FOLDED_ON_CARD: dict[Any, int] = {
    aten.native_group_norm.default: 1,
    aten.native_group_norm_backward.default: 2,
}

CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def channels_last(graph: torch.fx.Graph) -> bool:
    """Lay out images with their channels last, where that pays; says whether it did."""
    calls = (n for target in CONVOLUTIONS
             for n in graph.find_nodes(op="call_function", target=target))  # fmt: skip
    images = {n for n in calls if _is_image(n) and not _is_laid_out(n)}
    if not images:
        return False
    if _Trial(graph, images, set(graph.nodes)).pays():
        return True
    wide, following = _wide_ones({n for n in images if not _is_on_card(n)})
    return bool(wide) and _Trial(graph, wide, following).is_legal()


class _Trial:
    """Convolutions with channels last and the calls that go along with them: done, and undone
    where it does not pay."""

    def __init__(self, graph: torch.fx.Graph, images: set[Node], following: set[Node]) -> None:
        self._graph, self._images = graph, images
        self._before = {n: (n.args, n.kwargs, n.meta) for n in graph.nodes}
        values = {n: n.meta["val"] for n in graph.nodes if _tensor(n) is not None}
        meeting = _meeting(graph)
        for node in graph.nodes:
            node.meta = dict(node.meta)
        moved: set[Node] = set()
        copies: dict[Node, Node] = {}
        for node in list(graph.nodes):
            if node in images:
                _convert(node, moved, copies)
            elif moved.intersection(node.all_input_nodes):
                if node.op != "output" and node in following:
                    _follow(node, values, moved)
                else:
                    _give_back(node, values, moved)
        self._legal = not moved & meeting

    def is_legal(self) -> bool:
        if not self._legal:
            self._undo()
        return self._legal

    def pays(self) -> bool:
        gained = sum(map(_touched, self._images))
        copied = sum(self._copied(n) for n in self._graph.nodes)
        dear = COPY_ON_CARD if any(map(_is_on_card, self._images)) else COPY
        pays = self._legal and gained > dear * copied and all(map(_obeys, self._images))
        if not pays:
            self._undo()
        return pays

    def _copied(self, node: Node) -> int:
        """The bytes of copies that a node is, or is worth."""
        if node not in self._before:
            return _bytes(node)
        folded = (FOLDED_ON_CARD if _is_on_card(node) else FOLDED).get(node.target, 0)
        return folded * _bytes(node.args[0]) if folded and _is_channels_last(node.args[0]) else 0

    def _undo(self) -> None:
        for node in reversed(list(self._graph.nodes)):
            if node in self._before:
                node.args, node.kwargs, node.meta = self._before[node]
        for node in reversed(list(self._graph.nodes)):
            if node not in self._before:
                self._graph.erase_node(node)


def _wide_ones(images: set[Node]) -> tuple[set[Node], set[Node]]:
    """Convolutions of images that are large beside their results, and what makes those images alone
    of others: the library would make a copy of each that is laid out otherwise, and what a skip
    connection is put beside, or what a bottleneck widens, is most of what is alive."""
    forward = {n for n in images if n.target is aten.convolution.default and not n.args[6]}
    wide = {n for n in forward if _bytes(n.args[0]) >= 2 * _bytes(n) and not _is_single(n)}
    following: set[Node] = set()
    made = set(wide)
    for node in wide:
        _trace(node.args[0], {node}, following, made.union(forward), made)
    return made, following


def _trace(value: Any, users: set[Node], following: set[Node], images: set[Node],
           made: set[Node]) -> None:  # fmt: skip
    """Note the calls that make `value` elementwise of what a convolution gives, for `users` alone,
    and that convolution."""
    chain: list[Node] = []
    while value.op == "call_function" and {u for u in value.users if u.users} <= {*users, *chain}:
        if value in images:
            following.update(chain)
            made.add(value)
            return
        if not _is_elementwise(value):
            return
        chain.append(value)
        full = [n for n in value.all_input_nodes
                if _tensor(n) is None or _bytes(n) >= _bytes(chain[0])]  # fmt: skip
        if len(full) != 1:
            return
        value = full[0]


def _is_elementwise(node: Node) -> bool:
    return node.target is operator.getitem or node.target is aten.clone.default or (
        isinstance(node.target, OpOverload)
        and (torch.Tag.pointwise in node.target.tags
             or node.target is aten._native_batch_norm_legit_no_training.default)
    )  # fmt: skip


def _is_single(node: Node) -> bool:
    """Whether a convolution looks at single pixels: the library takes those as they are."""
    weight = _tensor(node.args[1])
    return weight is not None and weight.shape[2:].numel() == 1


def _bytes(node: Any) -> int:
    tensor = _tensor(node)
    return 0 if tensor is None else tensor.numel() * tensor.itemsize


def eager_strides(graph: torch.fx.Graph) -> None:
    """Give results the strides they have in eager, and all that follows theirs."""
    before = {n: n.meta["val"] for n in graph.nodes if _tensor(n) is not None}
    moved: set[Node] = set()
    for node in list(graph.nodes):
        if node.op == "output":
            return
        if moved.intersection(node.all_input_nodes):
            _follow(node, before, moved)
        if _is_doubtful(node):
            _evaluate_in_float(node)
        elif _unpools_channels_last(node):
            _put_channels_last(node)
        else:
            continue
        if not _same_strides(node.meta["val"], before[node]):
            moved.add(node)


def _is_doubtful(node: Node) -> bool:
    """Whether the node is elementwise, of half precision, and has operands of several layouts, one
    of them expanded."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    tensors = [t for n in node.all_input_nodes if (t := _tensor(n)) is not None]
    return (
        len(tensors) > 1
        and _tensor(node) is not None
        and any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
        and any(_is_expanded(t) for t in tensors)
        and not all(_is_expanded(t) or t.is_contiguous() for t in tensors)
    )


def _unpools_channels_last(node: Node) -> bool:
    if node.target is not aten.max_unpool2d.default or (x := _tensor(node.args[0])) is None:
        return False
    return x.device.type == "cpu" and suggest_memory_format(x) is torch.channels_last


def _put_channels_last(node: Node) -> None:
    old: Any = node.meta["val"]
    with old.fake_mode, _no_guards(old.fake_mode):
        node.meta["val"] = torch.empty_like(old, memory_format=torch.channels_last)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(statically_known_true(s == 0) for s in tensor.stride())


def _evaluate_in_float(node: Node) -> None:
    """The node's value, laid out as if its operands were float32."""
    target: Any = node.target

    def stand_in(n: Node) -> Any:
        t = _tensor(n)
        if t is None or t.dtype not in (torch.bfloat16, torch.float16):
            return n.meta["val"]
        return torch.empty_strided(t.shape, t.stride(), dtype=torch.float32, device=t.device)

    old: Any = node.meta["val"]
    with old.fake_mode, _no_guards(old.fake_mode):
        args, kwargs = map_arg((node.args, node.kwargs), stand_in)
        stride = target(*args, **kwargs).stride()
        node.meta["val"] = torch.empty_strided(old.shape, stride, dtype=old.dtype,
                                               device=old.device)  # fmt: skip


def _no_guards(mode: Any) -> Any:
    return mode.shape_env.suppress_guards() if mode.shape_env else contextlib.nullcontext()


def _same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(statically_known_true(a == b)
               for a, b in zip(one.stride(), other.stride(), strict=True))  # fmt: skip


def _is_image(node: Node) -> bool:
    """Whether a convolution, or its gradients, is of images whose sizes are known."""
    operands = [_tensor(n) for n in _operands(node)]
    if any(t is None or t.dim() != 4 or t.device.type not in ("cpu", "cuda") for t in operands):
        return False
    sizes: list[Any] = [n for t in operands if t is not None for n in t.shape]
    types = {t.dtype for t in operands if t is not None}
    return all(isinstance(n, int) and n > 0 for n in sizes) and len(types) == 1 and types <= FLOATS


def _is_on_card(node: Node) -> bool:
    made = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(t, torch.Tensor) and t.device.type == "cuda" for t in made)


FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))


def _operands(node: Node) -> tuple[Any, ...]:
    """The image and the weight; of gradients, the result's first."""
    return tuple(node.args[: 3 if node.target is aten.convolution_backward.default else 2])


def _is_laid_out(node: Node) -> bool:
    return all(_is_channels_last(n) for n in _operands(node)[:-1])


def _is_channels_last(node: Any) -> bool:
    return node.meta["val"].is_contiguous(memory_format=torch.channels_last)


def _obeys(node: Node) -> bool:
    """Whether the library's result lies as its image does: not all of its kernels go by that."""
    value = node.meta["val"]
    result = value[0] if isinstance(value, tuple | list) else value
    return result is None or result.is_contiguous(memory_format=torch.channels_last)


def _touched(node: Node) -> int:
    """The bytes of images and results that the library would lay out otherwise; on a card those of
    weights too, but it has kernels for one channel a group with images as they are."""
    *_, image, weight = _operands(node)
    weights = _bytes(weight) if _is_on_card(node) else 0
    if _is_on_card(node) and weight.meta["val"].shape[1] == 1:
        return weights
    if node.target is aten.convolution.default:
        return _bytes(image) + _bytes(node) + weights
    mask: Any = node.args[10]
    return sum(mask[:2]) * (_bytes(node.args[0]) + _bytes(image) + weights)


def _meeting(graph: torch.fx.Graph) -> set[Node]:
    """Results that share memory: copies of them would not."""
    results = [n for n in graph.output_node().all_input_nodes if _tensor(n) is not None]
    owners = collections.Counter(map(_storage, results))
    return {n for n in results if owners[_storage(n)] > 1}


def _storage(node: Node) -> int:
    return node.meta["val"].untyped_storage()._cdata


def _convert(node: Node, moved: set[Node], copies: dict[Node, Node]) -> None:
    # on the CPU weights stay: the library orders them in its own way at every call, whatever they
    # come as; on a card it would copy each before its convolution, where ours share launches
    count = len(_operands(node)) - (not _is_on_card(node))
    node.args = (*(_copied(node, n, copies) for n in node.args[:count]), *node.args[count:])
    _evaluate(node)
    moved.add(node)


def _copied(before: Node, source: Any, copies: dict[Node, Node]) -> Node:
    if _is_channels_last(source):
        return source
    if source in copies:
        return copies[source]
    with before.graph.inserting_before(before):
        made = before.graph.call_function(aten.clone.default, (source,),
                                          {"memory_format": torch.channels_last})  # fmt: skip
    made.meta = dict(source.meta)
    _evaluate(made)
    copies[source] = made
    return made


def _follow(node: Node, before: dict[Node, Any], moved: set[Node]) -> None:
    """A call whose operands have a new layout has one too, if it goes by theirs."""
    if not is_pure(node) or node.target is aten.as_strided.default:
        _give_back(node, before, moved)
        return
    old = node.meta.get("val")
    try:
        _evaluate(node)
    except (
        RuntimeError,
        ValueError,
    ):  # a view that would have to copy: loops read whatever there is
        node.meta["val"] = old
        return
    moved.add(node)


def _give_back(node: Node, before: dict[Node, Any], moved: set[Node]) -> None:
    """Let the node have its operands as they were."""
    for source in node.all_input_nodes:
        if source in moved and _tensor(source) is not None:
            if source.meta["val"].stride() == before[source].stride():
                continue
            with node.graph.inserting_before(node):
                copy = node.graph.call_function(aten.clone.default, (source,))
            copy.meta = {**source.meta, "val": before[source]}
            node.replace_input_with(source, copy)


def _evaluate(node: Node) -> None:
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with _mode(args):
        node.meta["val"] = target(*args, **kwargs)
    node.meta.pop("tensor_meta", None)


def _mode(values: Any) -> Any:
    found: list[Any] = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    return found[0].fake_mode


def _tensor(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None
