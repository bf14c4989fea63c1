"""`Lowering`: builds the `Program` of one graph. Op families call it; nothing here knows an op."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from tilewright import config
from tilewright.errors import location_of
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, load, loads, substitute, sym, var
from tilewright.ir.ops import STEPS
from tilewright.ir.program import Buffer, Nest, Opaque, Origin, Program, Store, StoreMode, View
from tilewright.lower.pitch import pitched
from tilewright.lower.sizes import Sizes
from tilewright.lower.tensor import (
    Size,
    Tensor,
    expand,
    is_stored,
    placeholders,
    view,
)
from tilewright.lower.values import Values

MOST_ORIGINS = 12  # enough to recognise a kernel by


@dataclass(frozen=True)
class Fill:
    """A reduction's result: what is stored of the folded value, with which type."""

    dtype: torch.dtype
    value: Callable[[Expr], Expr] = lambda fold: fold


class Lowering:
    """The state of lowering one graph: the program so far, and where each node came from."""

    def __init__(self, devices: frozenset[str]) -> None:
        self.devices = devices  # the kinds of device that loops are made for
        self.program = Program()
        self.sizes = Sizes()
        self.defined: set[str] = set()  # the symbols that inputs and calls so far give
        self.node: torch.fx.Node | None = None
        self.env = Values()
        self.places: dict[Any, Tensor] = {}  # where arguments lie, whatever becomes of their values
        self.shared: frozenset[int] = frozenset()  # storages several results are views of
        self.returned: frozenset[int] = frozenset()  # storages of all results
        self.pads_results = False  # rows of results may have a longer pitch than eager's
        self.owners: dict[str, int] = {}  # buffer -> storage, of arguments and of shared results
        self.detached: list[tuple[torch.fx.Node, Any]] = []  # with the values they had before
        self.based: dict[torch.fx.Node, torch.fx.Node | None] = {}  # stored for a call that writes
        self.exposed: set[str] = set()  # buffers whose memory a value we cannot see into may share
        self._unstored: dict[torch.fx.Node, list[torch.fx.Node]] = {}  # operands, as far as known
        self._counts: dict[str, int] = {}
        self._seeds: dict[torch.device, int] = {}  # random ops so far

    # ---- names and origins

    def fresh(self, family: str) -> str:
        count = self._counts.get(family, 0)
        self._counts[family] = count + 1
        return f"{family}{count}"

    @contextmanager
    def at(self, node: torch.fx.Node) -> Generator[None]:
        """What is made inside belongs to this node."""
        before, self.node = self.node, node
        yield
        self.node = before

    def origin(self) -> Origin:
        """The current node and what was computed only as part of it, in the graph's order."""
        if self.node is None:
            return Origin(())
        found = [self.node]
        for node in found:
            lazy = self._lazy_inputs(node, MOST_ORIGINS)
            found += [n for n in lazy if n not in found][: MOST_ORIGINS - len(found)]
        return Origin(tuple(n.name for n in reversed(found)), location_of(self.node))

    def _lazy_inputs(self, node: torch.fx.Node, most: int) -> list[torch.fx.Node]:
        """The first operands that are not stored. Those that are will stay so, and are not looked
        at again: putting a thousand tensors together makes a nest of each."""
        left, found = self._unstored.get(node, node.all_input_nodes), list[torch.fx.Node]()
        seen = 0
        while seen < len(left) and len(found) < most:
            if self._is_lazy(left[seen]):
                found.append(left[seen])
            seen += 1
        self._unstored[node] = [*found, *left[seen:]]
        return found

    def _is_lazy(self, node: torch.fx.Node) -> bool:
        t = self.env.get(node)
        return node.op == "call_function" and isinstance(t, Tensor) and not is_stored(t)

    # ---- buffers

    def buffer(self, size: Size, dtype: torch.dtype, device: torch.device,
               stride: Size | None = None, family: str = "buf") -> Buffer:  # fmt: skip
        made = Buffer(self.fresh(family), dtype, device, size,
                      stride or ix.contiguous_strides(size))  # fmt: skip
        self.program.buffers[made.name] = made
        return made

    def strides(self, fake: torch.Tensor, is_result: bool) -> Size:
        """The strides a value is stored with: those it was traced with, or such rows padded."""
        stride = self.sizes.tuple(fake.stride())
        storage = fake.untyped_storage()._cdata
        if is_result:
            pads = self.pads_results and storage not in self.shared
        else:
            pads = config.comprehensive_padding and storage not in self.returned
        return pitched(self.sizes.tuple(fake.size()), stride, fake.dtype) if pads else stride

    def stored(self, buffer: Buffer) -> Tensor:
        """The tensor held by a buffer."""
        index = ix.linearize(placeholders(buffer.size), buffer.stride)
        body = load(buffer.name, buffer.dtype, index)
        return Tensor(buffer.size, buffer.dtype, buffer.device, body)

    def realize(self, t: Tensor, stride: Size | None = None) -> Tensor:
        """`t` as one plain load per element; stores it unless it already is."""
        return t if is_stored(t) else self.copy(t, stride or self._layout(t))

    def _layout(self, t: Tensor) -> Size | None:
        """Where `t` is an operand of the current node with its channels last: its strides."""
        for node in () if self.node is None else self.node.all_input_nodes:
            found = self.env.get(node)
            same = isinstance(found, Tensor) and found.body is t.body and found.size == t.size
            if same and len(t.size) == 4 and _static(t.size):
                fake = node.meta["val"]
                if fake.is_contiguous(memory_format=torch.channels_last):
                    return self.sizes.tuple(fake.stride())
        return None

    def copy(self, t: Tensor, stride: Size | None = None) -> Tensor:
        """`t` stored in a new buffer of its own, one element for each of its own."""
        if stride is not None and any(s is ix.ZERO for s in stride):  # repeated along a dimension
            once = tuple(ix.ONE if s is ix.ZERO else n for n, s in zip(t.size, stride, strict=True))
            apart = tuple(ix.ONE if s is ix.ZERO else s for s in stride)
            return expand(self.copy(view(t, once, lambda *indices: indices), apart), t.size)
        made = self.buffer(t.size, t.dtype, t.device, stride)
        self.assign(made, t)
        return self.stored(made)

    def assign(self, buffer: Buffer, t: Tensor) -> None:
        """Store every element of `t` into `buffer`, whose size is the same."""
        where = placeholders(t.size)
        self.nest(where, (), [Store(buffer.name, ix.linearize(where, buffer.stride), t.body)],
                  order=buffer.stride)  # fmt: skip

    def nest(self, loops: Sequence[Expr], reduce: Sequence[Expr], stores: Sequence[Store],
             order: Sequence[Expr] | None = None) -> None:  # fmt: skip
        """Append a loop nest. Loops of one iteration are dropped; `order` gives each loop's stride
        in the result, so that the innermost loop walks memory in steps of one."""
        kept = [(v, k) for k, v in enumerate(loops) if v.op == "var"]
        if order is not None:
            strides = order
            kept.sort(key=lambda pair: -ix.likely(strides[pair[1]]))
        self.program.nodes.append(
            Nest(self.fresh("nest"), tuple(v for v, _ in kept),
                 tuple(v for v in reduce if v.op == "var"), tuple(stores), self.origin())
        )  # fmt: skip

    # ---- reductions

    def reduce(self, kind: str, t: Tensor | Sequence[Tensor], dims: Sequence[int], keepdim: bool,
               *fills: Fill, stride: Size | None = None, unrolls: bool = True
               ) -> tuple[Tensor, ...]:  # fmt: skip
        """Fold `t` (all tensors of one size) over `dims`; one result per fill.

        A fold with several results (`welford`) is a `reduce` node that fills take apart with
        `build.part`. One that `unrolls` is written out if it is short.
        """
        tensors = [t] if isinstance(t, Tensor) else list(t)
        size, device = tensors[0].size, tensors[0].device
        folded = set(dims)
        loops = [ix.ZERO if k in folded or s is ix.ONE else var(f"d{k}", s)
                 for k, s in enumerate(size)]  # fmt: skip
        inner = [var(f"r{k}", s) for k, s in enumerate(size) if k in folded and s is not ix.ONE]
        if not inner and self._unroll(kind, tensors, loops, inner) is None:
            inner = [var(f"r{dims[0] if dims else 0}", ix.ONE)]  # a fold needs a loop to run in
        point = [next((r for r in inner if r.arg == f"r{k}"), loops[k]) for k in range(len(size))]
        out_size = tuple(ix.ONE if k in folded else s
                         for k, s in enumerate(size) if keepdim or k not in folded)  # fmt: skip
        unrolled = self._unroll(kind, tensors, loops, inner) if unrolls or not inner else None
        values = [x.at(point) for x in tensors]
        if any(v.src[0] is ix.ZERO for v in inner):  # of nothing: there is no place to read
            values = [const(0, value.dtype) for value in values]
        fold = build.reduce(kind, *values, dtype=values[-1].dtype) if unrolled is None else unrolled
        positions = [v for k, v in enumerate(loops) if keepdim or k not in folded]
        if unrolled is not None:
            return tuple(self._renumber(f.value(fold), out_size, positions, device) for f in fills)
        stores, results = [], []
        for fill in fills:
            made = self.buffer(out_size, fill.dtype, device, stride)
            index = ix.linearize(positions, made.stride)
            stores.append(Store(made.name, index, fill.value(fold)))
            results.append(self.stored(made))
        self.nest(loops, inner, stores)
        return tuple(results)

    def _unroll(self, kind: str, tensors: Sequence[Tensor], loops: Sequence[Expr],
                inner: Sequence[Expr]) -> Expr | None:  # fmt: skip
        """A short fold written out, so that it can be part of a larger expression."""
        if kind not in STEPS or len(inner) > 1:
            return None
        (t,) = tensors
        if inner and not self.is_short(t, int(inner[0].arg[1:])):
            return None
        count = (ix.value_of(inner[0].src[0]) or 0) if inner else 1
        total: Expr | None = None
        for k in range(count):
            point = [const(k) if inner and inner[0].arg == f"r{d}" else loops[d]
                     for d in range(t.rank)]  # fmt: skip
            value = t.at(point)
            total = value if total is None else build.op(STEPS[kind], total, value)
        return total

    def is_short(self, t: Tensor, dim: int) -> bool:
        """Whether what is made of all elements along a dimension is written out."""
        count = ix.value_of(t.size[dim]) or 0
        few = 0 < count <= config.unroll_reductions_threshold
        return few and not self._is_apart(t, dim)

    def _is_apart(self, t: Tensor, dim: int) -> bool:
        """Whether the elements along a dimension are of other rows of a buffer just made (on a card
        also of the same row): a kernel has those at hand in a fold, not at other points of its own
        loops."""
        along = placeholders(t.size)[dim]
        near = ix.ONE if t.device.type == "cpu" else None
        made = (n for n in loads(t.body) if self.program.buffers[n.arg].kind == "temporary")
        return any(along in free_vars(n.src[0]) and ix.coefficient(n.src[0], along) is not near
                   for n in made)  # fmt: skip

    def _renumber(self, body: Expr, size: Size, positions: Sequence[Expr],
                  device: torch.device) -> Tensor:  # fmt: skip
        """A body over the loops of a reduction as a tensor over its own placeholders."""
        own = placeholders(size)
        mapping = {v: p for v, p in zip(positions, own, strict=True) if v.op == "var"}
        return Tensor(size, body.dtype, device, substitute(body, mapping))

    # ---- scatter

    def scatter(self, into: Tensor, size: Size, index: Callable[..., Sequence[Expr]],
                value: Callable[..., Expr], mode: StoreMode = "set",
                mask: Callable[..., Expr] | None = None) -> Tensor:  # fmt: skip
        """A copy of `into` in which, for every point of `size`, the element at `index(point)` is
        replaced by (or combined with) `value(point)`."""
        target = self.copy(into)
        buffer = self.program.buffers[target.body.arg]
        loops = placeholders(size)
        where = ix.linearize(tuple(index(*loops)), buffer.stride)
        store = Store(buffer.name, where, value(*loops), mode,
                      None if mask is None else mask(*loops))  # fmt: skip
        self.nest(loops, (), [store])
        return target

    # ---- strided access, for opaque calls and outputs

    def view_of(self, t: Tensor, stride: Size | None = None) -> View:
        """`t` as a strided window on a buffer; stores it first if it is not one."""
        found = as_view(t)
        if found is None:
            found = as_view(self.copy(t, stride))
            assert found is not None, "a stored tensor is a view of its buffer"
        return found

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any,
             mutates: tuple[str, ...] = (), binds: tuple[tuple[str, Any], ...] = (),
             aliases: bool = True) -> Any:  # fmt: skip
        """An opaque call. `value` is what it gives, as fake tensors; returns the same structure
        with a `Tensor` over a new buffer for each."""
        self.flush_writes(mutates)
        single = not isinstance(value, (tuple, list))
        made: list[Any] = []
        names: list[str | None] = []
        for item in [value] if single else value:
            if isinstance(item, torch.Tensor) and is_plain(item):
                buffer = self.buffer(self.sizes.tuple(item.size()), item.dtype, item.device,
                                     self.sizes.tuple(item.stride()))  # fmt: skip
                names.append(buffer.name)
                made.append(self.stored(buffer))
            else:
                names.append(None)
                made.append(item)
        self.program.nodes.append(
            Opaque(self.fresh("call"), target, args, kwargs, tuple(names), mutates, self.origin(),
                   binds, single, aliases)
        )  # fmt: skip
        if aliases:
            self.exposed |= self.program.nodes[-1].reads | self.program.nodes[-1].writes
        return made[0] if single else type(value)(made)

    def launch(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
               mutates: tuple[str, ...], fills: tuple[str, ...], covers: tuple[str, ...]
               ) -> None:  # fmt: skip
        """A call that gives nothing back: all it does is write to buffers, which are free."""
        self.program.nodes.append(
            Opaque(self.fresh("call"), target, args, kwargs, (), mutates, self.origin(),
                   fills=fills, covers=covers)
        )  # fmt: skip

    # ---- mutation

    def flush_writes(self, buffers: Sequence[str]) -> None:
        """Before these buffers change, store every tensor still to be used that reads them."""
        for name in buffers:
            for node in self.env.readers(name):
                if self.needed(node):
                    self.detach(node)

    def detach(self, node: torch.fx.Node) -> None:
        """Give a value memory of its own, before what it is computed from changes."""
        self.detached.append((node, self.env[node]))
        self.env[node] = self._detached(self.env[node])

    def _detached(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._detached(item) for item in value]
        return self.copy(value) if isinstance(value, Tensor) else value

    def needed(self, node: torch.fx.Node) -> bool:
        """Whether a node after the current one uses this node's value (not only its place)."""
        return bool(self.waiting(node))

    def waiting(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The nodes after the current one that use this node's value."""
        return [user for user in node.users if user not in self.env and user is not self.node
                and not _overwrites(user, node)]  # fmt: skip

    # ---- random numbers

    def seed(self, device: torch.device) -> Expr:
        """A number drawn from torch's generator once per random op and call of the program."""
        if device.type != "cpu":  # drawn where it is used: the host does not wait, graphs replay
            count = self._seeds.get(device, 0)
            self._seeds[device] = count + 1
            seeds = f"seeds_{device.type}{device.index or 0}"
            self.program.buffers[seeds] = Buffer(seeds, torch.int64, device,
                                                 (ix.as_index(count + 1),), (ix.ONE,))  # fmt: skip
            return load(seeds, torch.int64, ix.as_index(count))
        name = self.fresh("seed")
        bound = sym(name)
        self.program.symbols[name] = bound
        self.program.nodes.append(
            Opaque(self.fresh("call"), draw_seed, (), {}, (), (), self.origin(), ((name, ()),))
        )
        return bound

    def finish(self) -> None:
        """Draw all seeds of a device by one call, before everything else."""
        for device, count in self._seeds.items():
            name = f"seeds_{device.type}{device.index or 0}"
            self.program.nodes.insert(
                0, Opaque(f"draw_{name}", draw_seeds, (count, device), {}, (name,), (), Origin(()))
            )

    # ---- numbers held in CPU tensors

    def as_number(self, t: Tensor, device: torch.device) -> Tensor:
        """A CPU tensor without dimensions as an operand on another device: the host reads it, and
        a kernel gets it as an argument. An integer may have more bits than a size: it is copied."""
        if not loads(t.body):
            return Tensor(t.size, t.dtype, device, t.body)
        view = as_view(self.realize(t))
        assert view is not None
        if not (t.dtype.is_floating_point or t.dtype == torch.bool):
            made = self.buffer(t.size, t.dtype, device)
            self.program.nodes.append(
                Opaque(self.fresh("call"), torch.ops.aten._to_copy.default, (view,),
                       {"device": device}, (made.name,), (), self.origin())
            )  # fmt: skip
            return self.stored(made)
        name = self.fresh("number")
        bound = self.program.symbols[name] = sym(name, torch.float64)
        self.program.nodes.append(
            Opaque(self.fresh("call"), read_number, (view,), {}, (), (), self.origin(),
                   ((name, ()),))
        )  # fmt: skip
        return Tensor(t.size, t.dtype, device, build.cast(bound, t.dtype))


def _overwrites(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether `user` does nothing with `node` but replace its contents."""
    return user.target is torch.ops.aten.copy_.default and node not in user.args[1:]


def draw_seed() -> int:
    """A fresh seed from the default generator: seeded runs repeat, calls differ."""
    return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64).item())


def draw_seeds(count: int, device: torch.device) -> torch.Tensor:
    """The same from the generator of a device, without waiting for it."""
    return torch.randint(0, 2**63 - 1, (count,), dtype=torch.int64, device=device)


def read_number(t: torch.Tensor) -> float:
    return float(t.item())


def as_told(found: Any, told: Any) -> Any:
    """Called by a program that was compiled for a number it reads to be this one."""
    if found != told:
        raise RuntimeError(f"a number is {found} where the program was told that it is {told}")
    return found


def is_number(t: torch.Tensor) -> bool:
    """Whether eager takes `t` as a number beside tensors of another device."""
    return t.device.type == "cpu" and t.dim() == 0


def is_plain(t: torch.Tensor) -> bool:
    """Whether raw strided memory is all there is to `t` (not sparse, quantised, complex, ...)."""
    return (
        t.layout == torch.strided
        and not t.is_quantized
        and not t.is_complex()
        and t.dtype in PLAIN_TYPES
        and not t.is_neg()
    )


PLAIN_TYPES = frozenset((
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
))  # fmt: skip


def as_view(t: Tensor) -> View | None:
    """The strided window `t` is, if its body is one plain affine load."""
    body = t.body
    if not is_stored(t) or body.dtype != t.dtype:
        return None
    index = body.src[0]
    points = placeholders(t.size)
    strides: list[Expr] = []
    for p in points:
        stride = ix.ZERO if p.op != "var" else ix.coefficient(index, p)
        if stride is None or free_vars(stride) or _is_negative(stride):
            return None
        strides.append(stride)
    offset = ix.without(index, [p for p in points if p.op == "var"])
    if free_vars(offset) or loads(offset):
        return None
    return View(body.arg, t.size, ix.settled_strides(t.size, strides), offset, t.dtype)


def _static(size: Size) -> bool:
    return all(n.op == "const" for n in size)


def _is_negative(stride: Expr) -> bool:
    """A stride keeps its sign whatever the sizes are, so their hints decide what bounds cannot."""
    return not ix.known_nonneg(stride) and ix.likely(stride) < 0
