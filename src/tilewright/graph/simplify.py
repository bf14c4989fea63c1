"""Rules on the traced graph, applied in place before it is lowered.

A rule looks at one call and either returns a node (existing, or new and just before the call) that
every user takes instead, or None. Rules keep two promises:

- values, dtypes, sizes and the order of effects stay as they are;
- what the graph returns shares memory with an input, or with another result, only where it did
  before. So a node that is returned is replaced only by one that lives in the same storage.

Lowering inlines views and pointwise ops, so a rule earns its place by making a kernel or a copy
disappear, by exposing a better library call, or by leaving fewer nodes to lower.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch._higher_order_ops.auto_functionalize import (
    auto_functionalized,
    auto_functionalized_v2,
)
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from tilewright import config
from tilewright.graph.complex import pair_of
from tilewright.graph.nested import sum_of_sums
from tilewright.graph.sums import join_products

aten = torch.ops.aten

Node = torch.fx.Node
Rule = Callable[[Node], Node | None]


def simplify(gm: torch.fx.GraphModule) -> None:
    """Apply every rule until none applies, then drop what is dead."""
    graph = gm.graph
    for _ in range(8):  # chains shrink by one link per round; deeper ones are left as they are
        facts = Facts(graph)
        changed = remove_common(graph, facts)
        for node in list(graph.nodes):
            changed |= _apply(node, facts)
        if config.pattern_matcher and not changed:
            changed = join_products(graph, facts.written)
        remove_dead(graph)
        if not changed:
            break
    graph.lint()
    gm.recompile()


def _apply(node: Node, facts: Facts) -> bool:
    if node.op != "call_function" or not node.users or _fake(node) is None:
        return False
    for _, rule in RULES_OF.get(node.target) or RULES_OF.get(str(node.target), ()):
        new = rule(node)
        if new is not None and facts.may_replace(node, new):
            node.replace_all_uses_with(new)
            return True
    return False


class Facts:
    """Which memory a graph is given, writes and returns; storages are those of the fake tensors."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.given: set[int | None] = set()
        self.written: set[int | None] = set()
        self.returned: set[int | None] = set()
        self.shared: set[int | None] = set()  # that several results are views of
        self.restrided: set[int | None] = set()  # whose places are named by absolute offsets
        for node in graph.nodes:
            if node.target in (aten.as_strided.default, aten.as_strided_scatter.default):
                self.restrided.add(_storage(node.args[0]))
            if node.op in ("placeholder", "get_attr"):
                self.given.add(_storage(node))
            elif node.op == "output":
                for storage in map(_storage, node.all_input_nodes):
                    (self.shared if storage in self.returned else self.returned).add(storage)
            else:
                self.written.update(_storage(n) for n in _written_args(node))

    def may_replace(self, node: Node, new: Node) -> bool:
        """Whether all users of `node` may take `new`, which has the same value.

        A view of `node` that is returned needs no care here: its fake tensor still says whose
        memory it is in, and lowering copies a result that would be in another's. Several results
        in the memory of `node` must stay together, so then it stays.
        """
        old_storage, new_storage = _storage(node), _storage(new)
        if old_storage is not None and old_storage == new_storage:
            return True
        if {old_storage, new_storage} & self.written or new_storage is None:
            return False
        if old_storage in self.restrided or old_storage in self.shared:
            return False
        if not any(user.op == "output" for user in node.users):
            return True
        if not _same_tensor(node, new):
            return False  # results keep their layout
        if new_storage in self.given or new_storage in self.returned:
            return False
        self.returned.add(new_storage)
        return True


# ---- what a rule may look at


def _fake(node: Any) -> torch.Tensor | None:
    """The fake tensor a node stands for; None for numbers and tuples."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _storage(node: Node) -> int | None:
    fake = _fake(node)
    try:
        return None if fake is None else fake.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return None


def _same(a: Any, b: Any) -> bool:
    """Sizes and strides are the same without asking the solver (no guard is made)."""
    if len(a) != len(b):
        return False
    return all(_same_number(x, y) for x, y in zip(a, b, strict=True))


def _same_number(a: Any, b: Any) -> bool:
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return not isinstance(a, torch.SymInt) and not isinstance(b, torch.SymInt) and a == b


def _same_tensor(node: Node, other: Any) -> bool:
    """Whether both stand for tensors of the same size, strides, dtype and device."""
    a, b = _fake(node), _fake(other)
    if a is None or b is None or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.layout != torch.strided or b.layout != torch.strided:
        return False
    return _same(a.size(), b.size()) and _same(a.stride(), b.stride())


def _argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _insert(before: Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Node:
    """A new call that stands for the same value as the node it is to replace."""
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, args, kwargs)
    made.meta = dict(before.meta)
    return made


# ---- no-ops


def _same_as_input(node: Node) -> Node | None:
    """The op changed neither size, layout, dtype nor device, and by its nature not the values."""
    (source, *_) = node.args
    return source if isinstance(source, Node) and _same_tensor(node, source) else None


def _identity_permute(node: Node) -> Node | None:
    order = _permutation(node)
    return _same_as_input(node) if order == sorted(order or ()) else None


def _identity_slice(node: Node) -> Node | None:
    step = _argument(node, 4, "step", 1)
    return _same_as_input(node) if step == 1 else None


def _whole_slice_scatter(node: Node) -> Node | None:
    """`slice_scatter` over the full range is its source."""
    source = node.args[1]
    if _argument(node, 5, "step", 1) != 1 or not isinstance(source, Node):
        return None
    return source if _same_tensor(node, source) else None


def _integer(node: Node) -> Node | None:
    """Rounding an integer, for ops that leave integers as they are."""
    fake = _fake(node)
    if fake is None or fake.dtype.is_floating_point or fake.dtype.is_complex:
        return None
    return _same_as_input(node) if len(node.args) == 1 else None


def _neutral(neutral: int, floats: bool) -> Rule:
    """`x op c` is `x`. For floats only where it keeps every value: `x + 0.0` does not (-0.0)."""

    def rule(node: Node) -> Node | None:
        fake = _fake(node)
        if fake is None or len(node.args) != 2 or fake.dtype == torch.bool:
            return None
        if (fake.dtype.is_floating_point or fake.dtype.is_complex) and not floats:
            return None
        number = node.args[1]
        if isinstance(number, bool) or not isinstance(number, (int, float)) or number != neutral:
            return None
        if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
            return None
        return _same_as_input(node)

    return rule


def _single_cat(node: Node) -> Node | None:
    tensors = node.args[0]
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 1:
        return None
    (source,) = tensors
    return source if isinstance(source, Node) and _same_tensor(node, source) else None


# ---- chains


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def _view_of_view(node: Node) -> Node | None:
    """A reshape does not care how its input was shaped, if both are views of the same memory."""
    inner, size = node.args
    if not isinstance(inner, Node) or inner.target not in _VIEWS:
        return None
    source = inner.args[0]
    if not isinstance(source, Node) or not _is_contiguous(source) or not _is_contiguous(node):
        return None
    return _insert(node, aten.view.default, (source, size))


def _is_contiguous(node: Node) -> bool:
    """Only for sizes that are known: for others the answer would be a guard."""
    fake = _fake(node)
    if fake is None or fake.layout != torch.strided:
        return False
    return not any(isinstance(s, torch.SymInt) for s in fake.size()) and fake.is_contiguous()


def _permutation(node: Any) -> list[int] | None:
    """How a call orders the dimensions of its input, if that is all it does."""
    fake = _fake(node)
    if fake is None:
        return None
    rank, args = fake.dim(), node.args
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [order[d] for d in args[1]]
    if node.target is aten.t.default:
        return order[::-1]
    if node.target is aten.transpose.int and rank:
        a, b = args[1:]
        order[a], order[b] = order[b], order[a]
        return order
    return None


def _permute_of_permute(node: Node) -> Node | None:
    outer, inner = _permutation(node), _permutation(node.args[0])
    if outer is None or inner is None:
        return None
    source = _argument(_argument(node, 0, "self"), 0, "self")
    order = [inner[d] for d in outer]
    if order == list(range(len(order))) and isinstance(source, Node):
        return source if _same_tensor(node, source) else None
    return _insert(node, aten.permute.default, (source, order))


_CONVERSIONS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def _conversion_chain(node: Node) -> Node | None:
    """a -> b -> c is a -> c where b holds every value of a."""
    inner = node.args[0]
    if not isinstance(inner, Node) or inner.target not in _CONVERSIONS:
        return None
    source = inner.args[0]
    a, b, c = _fake(source), _fake(inner), _fake(node)
    if a is None or b is None or c is None or not isinstance(source, Node):
        return None
    if not (a.device == b.device == c.device) or not _holds(b.dtype, a.dtype):
        return None
    if set(inner.kwargs) - {"dtype"} or not _same(a.stride(), b.stride()):
        return None
    if a.dtype == c.dtype:
        return source if _same_tensor(node, source) else None
    return _insert(node, node.target, (source, *node.args[1:]), **node.kwargs)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow`, its sign of zero included, is one of `wide`."""
    if wide == narrow:
        return True
    if narrow == torch.bool:
        return not wide.is_complex
    if wide.is_complex or narrow.is_complex or narrow.is_floating_point != wide.is_floating_point:
        return False
    if wide.is_floating_point:
        if narrow.itemsize == 1 or wide.itemsize == 1:  # torch does not promote 8-bit floats
            return wide.itemsize > 1
        return torch.promote_types(wide, narrow) == wide and wide.itemsize > narrow.itemsize
    a, b = torch.iinfo(wide), torch.iinfo(narrow)
    return a.min <= b.min and a.max >= b.max


# ---- products


def _bias_into_addmm(node: Node) -> Node | None:
    """`mm(a, b) + bias` is one library call when the bias is the same for every row.

    Where only pointwise ops follow, the addition costs nothing as part of their loop.
    """
    left, right = node.args[:2]
    if not config.pattern_matcher:
        return None
    if node.kwargs.get("alpha", 1) != 1 or all(_is_pointwise(user) for user in node.users):
        return None
    for product, bias in ((left, right), (right, left)):
        found = _biased(node, product, bias)
        if found is not None:
            return found
    return None


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _biased(node: Node, product: Any, bias: Any) -> Node | None:
    if not isinstance(product, Node) or not isinstance(bias, Node) or len(product.users) != 1:
        return None
    reshaped = product.target in _VIEWS
    mm = product.args[0] if reshaped else product
    if not isinstance(mm, Node) or mm.target is not aten.mm.default or len(mm.users) != 1:
        return None
    out, row, rows = _fake(node), _fake(bias), _fake(mm)
    if out is None or row is None or rows is None or not _same_tensor(node, product):
        return None
    # low-precision eager rounds the product before it adds; addmm would not
    if row.dtype != rows.dtype or rows.dtype not in (torch.float32, torch.float64):
        return None
    if not _same(row.size(), rows.size()[1:]) or not _same(out.size()[-1:], row.size()):
        return None
    if not reshaped:
        return _insert(node, aten.addmm.default, (bias, *mm.args))
    made = _insert(node, aten.addmm.default, (bias, *mm.args))
    made.meta = dict(mm.meta)
    return _insert(node, aten.view.default, (made, product.args[1]))


def _multiply_add(node: Node) -> Node | None:
    """`fma(a, b, c)` as the ATen op for the same."""
    a, b, c = node.args
    if not isinstance(a, Node) or not isinstance(c, Node):
        return None
    if isinstance(b, Node):
        return _insert(node, aten.addcmul.default, (c, a, b))
    return _insert(node, aten.add.Tensor, (c, a), alpha=b)


# ---- the rule list


NAMED_RULES: list[tuple[str, Rule, tuple[Any, ...]]] = [
    ("identity view", _same_as_input, (*_VIEWS, aten.expand.default, aten.squeeze.dims)),
    ("alias", _same_as_input, (aten.alias.default, aten.detach.default,
                               aten.lift_fresh_copy.default)),
    ("identity permute", _identity_permute, (aten.permute.default,)),
    ("identity slice", _identity_slice, (aten.slice.Tensor,)),
    ("identity copy", _same_as_input, (aten.clone.default, torch.ops.prims.device_put.default,
                                       *_CONVERSIONS)),
    ("whole slice_scatter", _whole_slice_scatter, (aten.slice_scatter.default,)),
    ("single cat", _single_cat, (aten.cat.default,)),
    ("rounding an integer", _integer, (aten.ceil.default, aten.floor.default, aten.round.default,
                                       aten.trunc.default)),
    ("add zero", _neutral(0, floats=False), (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor,
                                             aten.sub.Scalar)),
    ("times one", _neutral(1, floats=True), (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
                                             aten.div.Scalar)),
    ("first power", _neutral(1, floats=True), (aten.pow.Tensor_Scalar,)),
    ("view of view", _view_of_view, _VIEWS),
    ("permute of permute", _permute_of_permute, (aten.permute.default, aten.t.default,
                                                 aten.transpose.int)),
    ("conversion of conversion", _conversion_chain, _CONVERSIONS),
    ("bias into addmm", _bias_into_addmm, (aten.add.Tensor,)),
    ("sum of sums", sum_of_sums, (aten.sum.default, aten.mean.default)),
    ("complex as pairs", pair_of, (aten.view_as_real.default,)),
    # by name: torch defines this op only once something has traced it
    ("multiply-add", _multiply_add, ("prims.fma.default",)),
]  # fmt: skip

RULES_OF: dict[Any, list[tuple[str, Rule]]] = {}
for _name, _rule, _targets in NAMED_RULES:
    for _target in _targets:
        RULES_OF.setdefault(_target, []).append((_name, _rule))


# ---- dead code


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _written_args(node: Node) -> Iterator[Node]:
    """What a call changes. The functional forms of calls that mutate count as well: lowering gives
    them the original memory where it can, and in eager no copy of it may be the same memory."""
    given: Any = ()
    schema = getattr(node.target, "_schema", None)
    if node.target is triton_kernel_wrapper_functional:
        values: Any = node.kwargs["kwargs"]
        given = [values[name] for name in node.kwargs["tensors_to_clone"]]  # type: ignore[union-attr]
    elif node.target in _FUNCTIONAL:
        given = (node.args, node.kwargs)
    elif schema is not None and schema.is_mutable:
        given = [_argument(node, k, argument.name) for k, argument in enumerate(schema.arguments)
                 if argument.alias_info is not None and argument.alias_info.is_write]  # fmt: skip
    yield from (n for n in pytree.tree_leaves(given) if isinstance(n, Node))


_FUNCTIONAL: frozenset[Any] = frozenset((auto_functionalized, auto_functionalized_v2))


def _is_random(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def is_pure(node: Node) -> bool:
    """Whether a call does nothing but give a value that depends on its arguments alone."""
    if node.op != "call_function" or _is_random(node) or node.meta.get("unbacked_bindings"):
        return False
    if node.target is operator.getitem:
        return True
    return (isinstance(node.target, OpOverload) and not _writes(node) and not node.is_impure()
            and node.target.namespace in ("aten", "prims")
            and "empty" not in node.target._schema.name)  # fmt: skip


def remove_dead(graph: torch.fx.Graph) -> None:
    """Erase calls without users. Random ops stay: the numbers after them depend on them."""
    for node in reversed(list(graph.nodes)):
        if not node.users and _is_droppable(node):
            graph.erase_node(node)


def _is_droppable(node: Node) -> bool:
    """A call without users may go unless it writes, asserts, or binds a size."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or node.is_impure() or node.meta.get("unbacked_bindings"):
        return False
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.returns) and not _writes(node) and not _is_random(node)
    if node.target is triton_kernel_wrapper_functional:
        return True  # all it does is write to tensors nobody wants
    return node.target is operator.getitem or node.target in _NUMBERS


_NUMBERS = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.neg, operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt,
    operator.ge, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_float, torch.sym_int,
    torch.sym_sum,
}  # fmt: skip


# ---- common subexpressions


def remove_common(graph: torch.fx.Graph, facts: Facts) -> bool:
    """Let equal calls be one. What reads memory is equal only if nothing was written in between."""
    seen: dict[Any, Node] = {}
    writes: dict[int | None, int] = {}
    changed = False
    for node in list(graph.nodes):
        if node.op == "call_function" and _writes(node):
            for storage in map(_storage, _written_args(node)):
                writes[storage] = writes.get(storage, 0) + 1
        key = _key(node, writes)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is not node and (_fake(node) is None or facts.may_replace(node, first)):
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            changed = True
    return changed


def _key(node: Node, writes: dict[int | None, int]) -> Any:
    if not is_pure(node):
        return None
    versions = tuple(writes.get(_storage(n), 0) for n in node.all_input_nodes)
    key = (node.target, _compared(node.args), _compared(node.kwargs), versions)
    try:
        hash(key)
    except TypeError:  # an argument that cannot be compared
        return None
    return key


def _compared(value: Any) -> Any:
    """What an argument is equal by: neither is `1` the same as `1.0`, nor `0.0` as `-0.0`."""
    if isinstance(value, (tuple, list)):
        return type(value), *map(_compared, cast("Sequence[Any]", value))
    if isinstance(value, dict):
        return dict, *((k, _compared(v)) for k, v in cast("dict[str, Any]", value).items())
    return type(value), repr(value) if isinstance(value, float) else value
