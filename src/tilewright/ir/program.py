"""Buffers, loop nests and opaque calls: a `Program` is what lowering makes of one graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, loads, syms, var, walk

StoreMode = Literal["set", "add", "mul", "min", "max"]
BufferKind = Literal["input", "constant", "temporary"]


@dataclass(frozen=True)
class Buffer:
    """Memory with a name. Indices into it count elements from its first byte's element.

    `size` and `stride` are the layout the buffer is allocated with (or, for an input, arrives
    with): facts from the moment it exists.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    size: tuple[Expr, ...]
    stride: tuple[Expr, ...]
    kind: BufferKind = "temporary"

    @cached_property
    def numel(self) -> Expr:
        return ix.product(self.size)

    @cached_property
    def bytes(self) -> Expr:
        return ix.mul(self.numel, self.dtype.itemsize)

    @cached_property
    def is_dense(self) -> bool:
        """Whether its elements lie next to each other, each once."""
        left = [(s, n) for n, s in zip(self.size, self.stride, strict=True) if n is not ix.ONE]
        step: Expr = ix.ONE
        while left:
            k = next((k for k, (s, _) in enumerate(left) if s is step), None)
            if k is None:
                return False
            step = ix.mul(step, left.pop(k)[1])
        return True


@dataclass(frozen=True)
class View:
    """A strided window on a buffer: what an opaque call takes, or the graph returns."""

    buffer: str
    size: tuple[Expr, ...]
    stride: tuple[Expr, ...]
    offset: Expr
    dtype: torch.dtype

    @cached_property
    def window(self) -> Expr:
        """Its elements as an index over loops of its own."""
        loops = [ix.ZERO if n is ix.ONE else var(f"w{k}", n) for k, n in enumerate(self.size)]
        return ix.linearize(loops, self.stride, self.offset)


@dataclass(frozen=True)
class Handle:
    """A run-time value that is not a plain strided tensor: opaque calls hand it on by name."""

    name: str


@dataclass(frozen=True)
class Store:
    """`buffer[index] = value`, or combined with what is there (`mode`), atomically if it may race.

    A masked store (`mask`) writes only where the mask holds.
    """

    buffer: str
    index: Expr
    value: Expr
    mode: StoreMode = "set"
    mask: Expr | None = None

    @property
    def exprs(self) -> tuple[Expr, ...]:
        found = (self.index, self.value)
        return found if self.mask is None else (*found, self.mask)


@dataclass(frozen=True)
class Origin:
    """Where a node came from: the FX nodes' names and the user's source line."""

    nodes: tuple[str, ...]
    location: str = ""


@dataclass(frozen=True)
class Nest:
    """A perfect loop nest. `loops` run in parallel; `reduce` are folded by `reduce` nodes.

    Loop order is from the outermost. Variables carry their own sizes.
    """

    name: str
    loops: tuple[Expr, ...]
    reduce: tuple[Expr, ...]
    stores: tuple[Store, ...]
    origin: Origin

    @cached_property
    def exprs(self) -> tuple[Expr, ...]:
        return tuple(e for store in self.stores for e in store.exprs)

    @cached_property
    def ops(self) -> frozenset[str]:
        """The operations its expressions are made of."""
        return frozenset(node.op for node in walk(*self.exprs))

    @cached_property
    def reads(self) -> frozenset[str]:
        return frozenset(node.arg for node in loads(*self.exprs))

    @cached_property
    def writes(self) -> frozenset[str]:
        return frozenset(store.buffer for store in self.stores)

    @cached_property
    def indices(self) -> dict[str, tuple[Expr, ...]]:
        """Every index at which each buffer is touched, stores first."""
        found: dict[str, dict[Expr, None]] = {}
        for store in self.stores:
            found.setdefault(store.buffer, {})[store.index] = None
        for node in loads(*self.exprs):
            found.setdefault(node.arg, {})[node.src[0]] = None
        return {b: tuple(indices) for b, indices in found.items()}

    @cached_property
    def loaded(self) -> dict[str, tuple[Expr, ...]]:
        """Every index at which each buffer is read."""
        found: dict[str, dict[Expr, None]] = {}
        for node in loads(*self.exprs):
            found.setdefault(node.arg, {})[node.src[0]] = None
        return {b: tuple(indices) for b, indices in found.items()}

    @property
    def symbols(self) -> set[Expr]:
        sizes = tuple(v.src[0] for v in (*self.loops, *self.reduce))
        return syms(*self.exprs, *sizes)


@dataclass(frozen=True)
class Opaque:
    """A call the loop IR does not look into: a library product, a fallback, a sub-graph.

    `args` and `kwargs` are the call's own, with `View`, `Expr` and nested containers in place of
    tensors and sizes. `results[i]` names the buffer that holds flattened result `i` (None: no
    tensor). `mutates` are buffers it writes.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[str | None, ...]
    mutates: tuple[str, ...]
    origin: Origin
    binds: tuple[tuple[str, Any], ...] = ()  # (symbol, path into the result) for unbacked sizes
    single: bool = True  # the result is one tensor, not a tuple
    aliases: bool = False  # a result may share memory with an operand
    fills: tuple[str, ...] = ()  # those of `mutates` it writes to without reading them
    covers: tuple[str, ...] = ()  # those of `fills` of which it leaves nothing as it was
    generated: bool = False  # the target is a kernel of ours
    out: View | None = None  # where the only result is written, by a target that takes `out=`
    data_sized: bool = False  # sizes of results depend on values, and are to be checked

    @cached_property
    def reads(self) -> frozenset[str]:
        return frozenset(leaf.buffer for leaf in leaves((self.args, self.kwargs))
                         if isinstance(leaf, View))  # fmt: skip

    @cached_property
    def writes(self) -> frozenset[str]:
        out = () if self.out is None else (self.out.buffer,)
        return frozenset((*(r for r in self.results if r is not None), *self.mutates, *out))

    @cached_property
    def indices(self) -> dict[str, tuple[Expr, ...]]:
        """Every index at which each buffer is touched, as far as it is known."""
        found: dict[str, dict[Expr, None]] = {}
        for leaf in leaves((self.args, self.kwargs, self.out)):
            if isinstance(leaf, View):
                found.setdefault(leaf.buffer, {})[leaf.window] = None
        return {b: tuple(indices) for b, indices in found.items()}

    @property
    def symbols(self) -> set[Expr]:
        found: list[Expr] = []
        for leaf in leaves((self.args, self.kwargs, self.out)):
            if isinstance(leaf, Expr):
                found.append(leaf)
            elif isinstance(leaf, View):
                found.extend((*leaf.size, *leaf.stride, leaf.offset))
        return syms(*found)


Node = Nest | Opaque
Output = View | Expr | Handle | None


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        yield from leaves(tuple(tree.values()))
    elif isinstance(tree, slice):
        yield from leaves((tree.start, tree.stop, tree.step))
    else:
        yield tree


@dataclass(frozen=True)
class Derived:
    """A whole number that the host program computes of others, as Python text."""

    text: str
    symbols: frozenset[str]


@dataclass
class Program:
    """One graph after lowering: nodes in an order that respects every dependence.

    `inputs` name the arguments in order: a buffer, or a symbol for a number. `outputs` are views,
    numbers as expressions, or None.
    """

    buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    nodes: list[Node] = field(default_factory=list[Node])
    inputs: list[str] = field(default_factory=list[str])
    outputs: list[Output] = field(default_factory=list["Output"])
    symbols: dict[str, Expr] = field(default_factory=dict[str, Expr])
    derived: dict[str, Derived] = field(default_factory=dict[str, "Derived"])
    constants: dict[str, str] = field(default_factory=dict[str, str])  # name -> graph attribute
    bodies: set[str] = field(default_factory=set[str])  # constants that are graphs to be compiled
    donated: frozenset[str] = frozenset()  # inputs that nobody reads after the call

    @property
    def visible(self) -> set[str]:
        """The buffers that results are in."""
        return {o.buffer for o in self.outputs if isinstance(o, View)}

    def behind(self, symbol: str) -> set[str]:
        """The symbols that have to be known for one to be: itself, or those it is computed of."""
        found = self.derived.get(symbol)
        return {symbol} if found is None else set(found.symbols)


def rewritten(members: Sequence[Nest]) -> set[str]:
    """Buffers whose contents change after something in the kernel has read or written them."""
    touched: set[str] = set()
    found: set[str] = set()
    for m in members:
        touched |= m.reads
        found |= touched & m.writes
        touched |= m.writes
    return found
