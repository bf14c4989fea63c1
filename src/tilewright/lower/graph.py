"""`lower(gm)`: one walk over the FX graph. Each node goes to its lowering, or to ATen."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from tilewright import config, metrics
from tilewright.errors import LoweringError, TilewrightError, at_node
from tilewright.graph.attention import is_read_by
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, loads, sym
from tilewright.ir.program import Buffer, Handle, Opaque, Program, View
from tilewright.lower import families
from tilewright.lower.context import Lowering, as_told, as_view, is_number, is_plain
from tilewright.lower.control import CONTROL, controlled
from tilewright.lower.layouts import along_operands, is_for_loops
from tilewright.lower.opaque import fallback, opaque_arguments, same_layout, storage_of
from tilewright.lower.sizes import symbols_of, unbacked, undefined
from tilewright.lower.table import LOWERINGS, Unsupported, family
from tilewright.lower.tensor import Tensor, cost, is_stored
from tilewright.lower.user_kernels import launched
from tilewright.lower.wrappers import FUNCTIONS

aten = torch.ops.aten

families.load()


def lower(gm: torch.fx.GraphModule, devices: frozenset[str] = frozenset({"cpu"}),
          donated: Sequence[int] = (), pads_results: bool = False) -> Program:  # fmt: skip
    """The program of one functional ATen graph, whose nodes carry fake values in `meta["val"]`.

    Loops are made for tensors on `devices`; what is elsewhere is left to ATen. `donated` are the
    positions of arguments that nobody reads after the call. With `pads_results` the strides of
    results may be larger than the graph's.
    """
    ctx = Lowering(devices)
    storages = _result_storages(gm)
    ctx.shared = frozenset(storage for storage, count in storages.items() if count > 1)
    ctx.returned = frozenset(storages)
    ctx.pads_results = pads_results
    ctx.program.donated = _donated(gm, donated)
    for node in gm.graph.nodes:
        ctx.node = node
        try:
            _STEPS[node.op](ctx, gm, node)
        except TilewrightError:
            raise
        except Exception as error:
            raise LoweringError(f"{type(error).__name__}: {error}", site=at_node(node)) from error
    ctx.finish()
    ctx.program.symbols.update(ctx.sizes.symbols)
    ctx.program.derived.update(ctx.sizes.derived)
    metrics.ir_nodes += len(ctx.program.nodes)
    return ctx.program


# ---- inputs and constants


def _donated(gm: torch.fx.GraphModule, positions: Sequence[int]) -> frozenset[str]:
    """The donated arguments that share memory with no other."""
    fakes = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    plain = {k: storage_of(t) for k, t in enumerate(fakes)
             if isinstance(t, torch.Tensor) and is_plain(t)}  # fmt: skip
    times = Counter(plain.values())
    return frozenset(f"arg{k}" for k in positions if k in plain and times[plain[k]] == 1)


def _placeholder(ctx: Lowering, gm: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    value = node.meta.get("val")
    name = f"arg{len(ctx.program.inputs)}"
    ctx.program.inputs.append(name)
    ctx.defined |= symbols_of(value)
    if isinstance(value, torch.Tensor) and is_plain(value):
        buffer = Buffer(name, value.dtype, value.device, ctx.sizes.tuple(value.size()),
                        ctx.sizes.tuple(value.stride()), "input")  # fmt: skip
        ctx.program.buffers[name] = buffer
        ctx.owners[name] = storage_of(value)
        ctx.env[node] = ctx.places[node] = ctx.stored(buffer)
    elif isinstance(value, torch.SymInt):
        found = ctx.sizes.index(value)
        ctx.env[node] = found
        ctx.program.symbols[name] = found
    elif isinstance(value, (torch.SymFloat, torch.SymBool, int, float, bool)):
        dtype = torch.bool if isinstance(value, (bool, torch.SymBool)) else (
            torch.int64 if isinstance(value, int) else torch.float64)  # fmt: skip
        ctx.env[node] = ctx.program.symbols[name] = sym(name, dtype)
    else:
        ctx.env[node] = Handle(name)


def _get_attr(ctx: Lowering, gm: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    number = _literal(value)
    if number is not None:
        ctx.env[node] = Tensor((), number.dtype, value.device, number)
        return
    name = f"constant_{node.name}"
    ctx.program.constants[name] = str(node.target)
    if isinstance(value, torch.Tensor) and is_plain(value) and type(value) in (
        torch.Tensor, torch.nn.Parameter):  # fmt: skip
        buffer = Buffer(name, value.dtype, value.device, ctx.sizes.tuple(value.size()),
                        ctx.sizes.tuple(value.stride()), "constant")  # fmt: skip
        ctx.program.buffers[name] = buffer
        ctx.env[node] = ctx.stored(buffer)
    else:
        ctx.env[node] = Handle(name)


def _literal(value: Any) -> Expr | None:
    """The number in a tensor without dimensions."""
    value = getattr(value, "constant", value)  # what a fake tensor was made from, if known
    if type(value) is not torch.Tensor or value.dim() or not is_plain(value):
        return None
    return const(value.item(), value.dtype) if value.dtype in _LITERALS else None


_LITERALS = frozenset((
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.bool,
))  # fmt: skip


# ---- calls


def _call(ctx: Lowering, gm: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
        ctx.env[node] = _number(ctx, node, value)
        return
    if node.target is operator.getitem:
        source, position = node.args
        assert isinstance(source, torch.fx.Node)
        if not isinstance(ctx.env[source], Handle):
            ctx.env[node] = ctx.env[source][position]
            return
    mark, ctx.detached = len(ctx.program.nodes), []
    try:
        ctx.env[node] = _lowered(ctx, node)
    except Unsupported:
        del ctx.program.nodes[mark:]
        for changed, before in reversed(ctx.detached):
            ctx.env[changed] = before
        ctx.env[node] = fallback(ctx, node)


def _lowered(ctx: Lowering, node: torch.fx.Node) -> Any:
    """The node's value by a lowering of ours."""
    if node.target is triton_kernel_wrapper_functional:
        return launched(ctx, node)
    if node.target in CONTROL:
        return controlled(ctx, node)
    if node.target in FUNCTIONS:
        found = FUNCTIONS[node.target](ctx, node)
        if found is not NotImplemented:
            return found
    lowering = LOWERINGS.get(node.target)
    device = None if lowering is None else _native_device(ctx, node)
    if lowering is None or device is None:
        raise Unsupported("no loops are made for it")
    args, kwargs = _arguments(ctx, node, device)
    result = lowering(ctx, *args, **kwargs)
    metrics.native_nodes += 1
    return _settle(ctx, node, result)


def _arguments(ctx: Lowering, node: torch.fx.Node, device: torch.device
               ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    def lookup(arg: torch.fx.Node) -> Any:
        found = ctx.env[arg]
        if isinstance(found, Handle):
            raise Unsupported("operand is not a plain strided tensor")
        if isinstance(found, Tensor) and found.device != device:
            return ctx.as_number(found, device)
        return found

    return map_arg((tuple(node.args), dict(node.kwargs)), lookup)


def _native_device(ctx: Lowering, node: torch.fx.Node) -> torch.device | None:
    """The one device all tensors in and out are on, if they are plain and we make loops for it.

    A CPU tensor without dimensions may be operand of another device's op, as in eager. Sizes that
    only the call can tell (a slice between unknown ends) are read off its result.
    """
    if node.meta.get("unbacked_bindings") or (not node.all_input_nodes and _takes_tensor(node)):
        return None
    results = _tensors(node.meta.get("val"))
    operands = _tensors([arg.meta.get("val") for arg in node.all_input_nodes])
    if not all(is_plain(t) for t in (*results, *operands)):
        return None
    devices = {t.device for t in (*results, *operands)}
    if len(devices) > 1:
        devices = {t.device for t in results} | {t.device for t in operands if not is_number(t)}
    if len(devices) != 1:
        return torch.device("cpu") if not devices else None
    (device,) = devices
    return device if device.type in ctx.devices else None


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


def _takes_tensor(node: torch.fx.Node) -> bool:
    """Whether the op expects a tensor first: a plain number there is for ATen to convert."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.arguments and str(schema.arguments[0].type) == "Tensor")


def _number(ctx: Lowering, node: torch.fx.Node, value: Any) -> Expr:
    """A node that gives a number: an index expression, or computed by the host program."""
    if isinstance(value, bool | int | float):
        dtype = torch.bool if isinstance(value, bool) else (
            torch.int64 if isinstance(value, int) else torch.float64)  # fmt: skip
        return const(value, dtype)
    new = unbacked(value, node.meta) or undefined(value, ctx.defined)
    if isinstance(value, torch.SymInt) and not new:
        found = ctx.sizes.try_index(value)
        if found is not None:
            return found
    binds = [(s.name, path) for s, path in new.items()]
    plain = [name for name, path in binds if not path and isinstance(value, torch.SymInt)]
    if plain:
        (name,) = plain
        result = ctx.sizes.index(value)
    else:
        name = ctx.fresh("number")
        result = sym(name, torch.int64 if isinstance(value, torch.SymInt) else
                     torch.bool if isinstance(value, torch.SymBool) else torch.float64)  # fmt: skip
        binds.append((name, ()))
    ctx.program.symbols[name] = result
    ctx.defined |= {name for name, _ in binds}
    args, kwargs = opaque_arguments(ctx, node)
    ctx.program.nodes.append(
        Opaque(ctx.fresh("call"), node.target, args, kwargs, (), (), ctx.origin(), tuple(binds))
    )
    if plain and result.is_const:
        _told(ctx, name, result)
    return result


def _told(ctx: Lowering, name: str, result: Expr) -> None:
    """A number that is data, of which the program was told what it is: another one is an error."""
    given = ctx.fresh("number")
    ctx.program.symbols[given] = sym(given, torch.int64)
    ctx.program.nodes.append(
        Opaque(ctx.fresh("call"), as_told, (sym(name, torch.int64), result), {}, (), (),
               ctx.origin(), ((given, ()),))
    )  # fmt: skip


def _settle(ctx: Lowering, node: torch.fx.Node, result: Any) -> Any:
    """Decide which results are stored now; check them against the graph's own types and sizes."""
    value = node.meta["val"]
    if isinstance(result, Tensor):
        return _settle_one(ctx, node, result, value, node)
    if isinstance(result, (tuple, list)):
        parts = {n.args[1]: n for n in node.users if n.target is operator.getitem}
        settled: list[Any] = []
        for k, (r, v) in enumerate(zip(result, value, strict=True)):
            user = parts.get(k)
            settled.append(_settle_one(ctx, node, r, v, user) if isinstance(r, Tensor) else r)
        return settled
    return result


def _settle_one(ctx: Lowering, node: torch.fx.Node, t: Tensor, fake: torch.Tensor,
                holder: torch.fx.Node | None) -> Tensor:  # fmt: skip
    if t.dtype != fake.dtype:
        raise LoweringError(f"{node.target} was lowered to {t.dtype}, the graph says {fake.dtype}",
                            site=at_node(node))  # fmt: skip
    if len(t.size) != fake.dim():
        raise LoweringError(f"{node.target} was lowered to rank {len(t.size)}, the graph says "
                            f"{fake.dim()}", site=at_node(node))  # fmt: skip
    if t.device != fake.device and not is_stored(t):  # made of numbers alone, which are nowhere
        t = replace(t, device=fake.device)
    if storage_of(fake) in ctx.shared:
        return _claim(ctx, t, fake)
    if holder is not None and should_store(ctx, holder, t):
        is_result = any(user.op == "output" for user in holder.users)
        stride = ctx.strides(fake, is_result)
        along = along_operands(t, stride, holder.users) if is_for_loops(holder) else None
        return ctx.realize(t, along or stride)
    return t


def _claim(ctx: Lowering, t: Tensor, fake: torch.Tensor) -> Tensor:
    """`t` in memory that no other storage's results use, laid out as they are."""
    storage = storage_of(fake)
    stride = ctx.sizes.tuple(fake.stride())
    found = as_view(t)
    if (found is None or not same_layout(found, stride)
            or ctx.owners.setdefault(found.buffer, storage) != storage):  # fmt: skip
        t = ctx.copy(t, stride)
        ctx.owners[t.body.arg] = storage
    return t


# What takes a tensor's type and place, and none of its elements: as zeros that its sums go into.
SHAPED_ALIKE = frozenset((
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default,
))  # fmt: skip
LARGE = 1 << 25  # bytes that no cache keeps
MANY_TIMES = 8
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
REPEATED_WORK = 12  # some quotients are, if rows of them are repeated many times
REPEATED = 64
MASK_WORK, MASK_READS = 20, 2  # of an element of a mask, beside the products of a score
SPREAD_WORK = 48  # two functions or more are worth computing once, if spread over many elements


def should_store(ctx: Lowering, holder: torch.fx.Node, t: Tensor) -> bool:
    """Whether computing `t` once and keeping it beats computing it again in every user."""
    if is_stored(t):
        return False
    most = config.realize_acc_reads_size_threshold
    if most is not None and _bytes_read(ctx, t) >= most:
        return True
    work, reads = cost(t.body)
    if work < MASK_WORK and reads <= MASK_READS and _is_mask(holder):
        return False  # a mask: attention computes it where it is used
    if work > 16 * config.realize_opcount_threshold or reads > config.realize_acc_reads_threshold:
        return True
    if not free_vars(t.body) and _elements(holder) != 1:
        return False  # one number for all elements, as a mean's gradient
    if sum(user.target not in SHAPED_ALIKE for user in holder.users) > 1:
        if reads > 1 and any(user.op == "output" for user in holder.users):
            return True  # it is stored anyway: the others read one buffer in place of several
        if work < SPREAD_WORK and (
            _is_made_of_little(ctx, holder, t) or (reads <= 1 and _are_places(holder))
        ):
            return False
        return work >= 4 or reads > config.realize_reads_threshold
    if work >= REPEATED_WORK and _is_repeated(holder):
        return True
    return work >= SPREAD_WORK and _is_spread(holder)


def _is_mask(holder: torch.fx.Node) -> bool:
    """Whether only attention reads it, at the positions of scores, perhaps through views."""
    return bool(holder.users) and all(
        is_read_by(user, holder) or (family(user.target) == "views" and _is_mask(user))
        for user in holder.users
    )


def _bytes_read(ctx: Lowering, t: Tensor) -> int:
    read = (ctx.program.buffers[name] for name in {n.arg for n in loads(t.body)})
    return sum(ix.likely(b.numel) * b.dtype.itemsize for b in read if b.kind == "temporary")


def _is_made_of_little(ctx: Lowering, holder: torch.fx.Node, t: Tensor) -> bool:
    """Whether all that a tensor is made of is far smaller, as what all pairs of rows differ by, so
    that to read that again takes less than to write this. Its users are few, and none needs it in
    memory (H200: distances of 2048 points from 2048 others, eight times, with gradients)."""
    read = [ctx.program.buffers[name] for name in {n.arg for n in loads(t.body)}]
    size = sum(ix.likely(b.numel) * b.dtype.itemsize for b in read)
    own = (_elements(holder) or 0) * t.dtype.itemsize
    computed = all(torch.Tag.pointwise in getattr(u.target, "tags", ()) or u.target in _SUMS
                   for u in holder.users)  # fmt: skip
    return own >= LARGE and 0 < MANY_TIMES * size <= own and computed and len(holder.users) <= 3


def _are_places(holder: torch.fx.Node) -> bool:
    """Whether these only say where something is, as the block and the slot of a cache: for whole
    rows of it they are computed again for nothing, and to store them is a kernel more."""
    return all(user.target in (aten.index.Tensor, aten.index_put.default) for user in holder.users)


def _is_spread(holder: torch.fx.Node) -> bool:
    """Whether a user computes many elements from each of the holder's."""
    own = _elements(holder)
    return own is not None and any((_elements(user) or 0) >= 4 * own for user in holder.users)


def _is_repeated(holder: torch.fx.Node) -> bool:
    """Whether rows of the holder are repeated many times, as the gradient of a mean over what is
    between the first and the last dimension: no tile has one of it alone (H200: gradients of
    normalised means of 256x511x768 bfloat16, 201 MB, 109 us)."""
    own, length = _elements(holder), _length(holder)
    waiting, reached = list(holder.users), set[torch.fx.Node]()
    while waiting and own is not None and own > length >= REPEATED:
        user = waiting.pop()
        if user not in reached:
            reached.add(user)
            many = (_elements(user) or 0) >= max(REPEATED * own, LARGE // 2)
            if many and _length(user) == length:
                return True
            waiting += user.users if family(user.target) == "views" else ()
    return False


def _length(node: torch.fx.Node) -> int:
    """Elements of a row, where it is a literal."""
    value = node.meta.get("val")
    sizes: list[Any] = list(value.size()) if isinstance(value, torch.Tensor) else []
    return sizes[-1] if sizes and isinstance(sizes[-1], int) else 0


def _elements(node: torch.fx.Node) -> int | None:
    """The number of elements, where it is a literal."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or any(
        isinstance(n, torch.SymInt) for n in value.size()
    ):
        return None
    return math.prod(value.size())


# ---- outputs


def _output(ctx: Lowering, gm: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Results keep eager's layout, and share memory exactly where eager's do."""
    owners = dict(ctx.owners)
    for arg in node.args[0]:  # type: ignore[union-attr]
        if not isinstance(arg, torch.fx.Node):
            ctx.program.outputs.append(None if arg is None else const(arg))  # type: ignore[arg-type]
            continue
        value = ctx.env[arg]
        if not isinstance(value, Tensor):
            ctx.program.outputs.append(value)
            continue
        ctx.program.outputs.append(_output_view(ctx, arg, value, owners))


def _output_view(ctx: Lowering, arg: torch.fx.Node, t: Tensor, owners: dict[str, Any]) -> View:
    fake = arg.meta["val"]
    found = as_view(t)
    storage = storage_of(fake)
    given = found is not None and ctx.program.buffers[found.buffer].kind != "temporary"
    stride = ctx.sizes.tuple(fake.stride()) if given else ctx.strides(fake, is_result=True)
    if found is None or owners.get(found.buffer, storage) != storage or not same_layout(
        found, stride):  # fmt: skip
        with ctx.at(arg):
            ctx.env[arg] = ctx.copy(t, stride)
        found = as_view(ctx.env[arg])
        assert found is not None
    owners[found.buffer] = storage
    return replace(found, stride=stride)  # eager's, also where a dimension has one element


def _result_storages(gm: torch.fx.GraphModule) -> Counter[int]:
    """The storages that results are in, with how many of them. Where that is more than one, what
    makes them is stored once."""
    results = {arg for arg in gm.graph.output_node().args[0]  # type: ignore[union-attr]
               if isinstance(arg, torch.fx.Node)}  # fmt: skip
    fakes = [arg.meta.get("val") for arg in results]
    return Counter(storage_of(f) for f in fakes if isinstance(f, torch.Tensor) and is_plain(f))


_STEPS: dict[str, Callable[[Lowering, torch.fx.GraphModule, torch.fx.Node], None]] = {
    "placeholder": _placeholder,
    "get_attr": _get_attr,
    "call_function": _call,
    "output": _output,
}
