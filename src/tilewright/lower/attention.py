"""`flex_attention` and its backward as nodes of attention.

The functions of a score and of a position arrive as graphs of numbers. Lowered by the families of
their operators they become expressions over a position: whatever they read that is not in memory,
such as a mask that was computed from indices, is computed where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch._dynamo import _trace_wrapped_higher_order_op as indexing
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch.fx.node import map_arg

from tilewright import config
from tilewright.graph.attention import BY_COLUMN, BY_ROW, NO_BLOCKS, OWN, known_int
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.attention import GRAD, LN2, SCORE, Attention, Sparse, element, memory_of
from tilewright.ir.expr import Expr, const, free_vars, load, loads, rewrite, syms, var
from tilewright.ir.program import Store, View
from tilewright.lower.context import Fill, Lowering, as_view, is_plain
from tilewright.lower.opaque import as_argument, plain
from tilewright.lower.table import LOWERINGS, Unsupported
from tilewright.lower.tensor import Tensor, is_stored, pointwise
from tilewright.lower.wrappers import FUNCTIONS

aten = torch.ops.aten
assert indexing.zeros_and_scatter, "importing it registers the operator"
zeros_and_scatter: Any = torch.ops.flex_lib.zeros_and_scatter.default
Node = torch.fx.Node

TYPES = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))


@dataclass
class _Site:
    """One call: its operands in memory, and the variables its expressions are over."""

    ctx: Lowering
    node: Node
    query: Node
    key: Node
    value: Node
    views: list[View] = field(default_factory=list[View])

    def __post_init__(self) -> None:
        fakes = [n.meta["val"] for n in (self.query, self.key, self.value)]
        for t in fakes:
            if not is_plain(t) or t.dtype not in TYPES or t.device.type not in self.ctx.devices:
                raise Unsupported(f"attention over {t.dtype} on {t.device}")
        if len({t.dtype for t in fakes}) > 1:
            raise Unsupported("attention over operands of different types")
        sizes = self.ctx.sizes
        batch, heads, rows, _ = sizes.tuple(fakes[0].shape)
        of_keys, key_heads, columns, _ = sizes.tuple(fakes[1].shape)
        known = ix.value_of(heads), ix.value_of(key_heads)
        if heads is not key_heads and (None in known or 0 in known):
            raise Unsupported("a number of heads that is not known")
        if of_keys is not batch and of_keys is not ix.ONE:
            raise Unsupported("batches of keys that may be fewer")
        self.group = 1 if heads is key_heads else (known[0] or 1) // (known[1] or 1)
        self.repeats = of_keys is not batch  # one batch of keys for all
        self.place = var("b", batch), var("h", heads), var("m", rows), var("n", columns)
        self.dtype: torch.dtype = fakes[0].dtype
        wide = self.dtype == torch.float64
        self.working = torch.float64 if wide else torch.float32
        self.device: torch.device = fakes[0].device
        self.views = [self.operand(n) for n in (self.query, self.key, self.value)]
        if self.repeats:
            self.views[1:] = [
                replace(v, size=(batch, *v.size[1:]), stride=(ix.ZERO, *v.stride[1:]))
                for v in self.views[1:]
            ]

    def operand(self, node: Node) -> View:
        """In memory, its elements along the last dimension next to each other."""
        found = self.ctx.env[node]
        if not isinstance(found, Tensor):
            raise Unsupported("operand is not a plain strided tensor")
        view = as_view(found)
        if view is None or not (view.stride[-1] is ix.ONE or view.size[-1] is ix.ONE):
            fake = node.meta["val"]
            stride = self.ctx.sizes.tuple(fake.stride())
            found = self._kept(node, self.ctx.copy(found, stride if stride[-1] is ix.ONE else None))
            view = as_view(found)
            assert view is not None
        return view

    def _kept(self, node: Node, stored: Tensor) -> Tensor:
        """In memory from here on, unless this call is not lowered after all."""
        self.ctx.detached.append((node, self.ctx.env[node]))
        self.ctx.env[node] = stored
        return stored

    def number(self, e: Expr) -> Tensor:
        return Tensor((), e.dtype, self.device, e)

    def position(self) -> list[Tensor]:
        """The four numbers that say where a score is."""
        return [self.number(v) for v in self.place]

    def graph(self, node: Any) -> torch.fx.GraphModule:
        module = getattr(self.node.graph.owning_module, str(node.target), None)
        if not isinstance(module, torch.fx.GraphModule):
            raise Unsupported("a function of scores that is not a graph")
        return module

    def inline(self, node: Any, given: Sequence[Tensor], others: Sequence[Any]) -> list[Any]:
        """What a graph gives for these numbers, with memory beside them."""
        memory = [self.ctx.env[o] if isinstance(o, Node) else o for o in others]
        return inlined(self.ctx, self.graph(node), [*given, *memory], self.device)

    def expression(self, node: Any, given: Sequence[Tensor], others: Sequence[Any]) -> Expr:
        (found,) = self.inline(node, given, others)
        return self.of_position(found)

    def of_position(self, found: Any) -> Expr:
        if not isinstance(found, Tensor):
            raise Unsupported("a function of scores that does not give a number")
        if any(n is not ix.ONE for n in found.size):
            raise Unsupported("a function of scores that gives several")
        e = found.body
        if not free_vars(e) <= set(self.place):
            raise Unsupported("a function of scores that is not of a position alone")
        return e

    # ---- block masks

    def sparse(self, tables: Sequence[Any], own: Any, other: Any) -> Sparse | None:
        """Lists of blocks, unless they say that there is one that has everything."""
        count, place, full_count, full_place = tables
        own, other = known_int(own), known_int(other)
        if own is None or other is None:
            raise Unsupported("blocks whose sizes are not known")
        if own == other == NO_BLOCKS:
            return None
        blocks, most = self._table(place).size[-2:]
        i, j = var("i", blocks), var("j", most)
        return Sparse(own, other, i, j, self._read(count, i), self._read(place, i, j),
                      None if full_count is None else self._read(full_count, i),
                      None if full_place is None else self._read(full_place, i, j))  # fmt: skip

    def _table(self, node: Node) -> Tensor:
        found = self.ctx.env[node]
        if not isinstance(found, Tensor):
            raise Unsupported("a table of blocks that is not a plain tensor")
        return found

    def _read(self, node: Node, *place: Expr) -> Expr:
        """An element of a table, whose batches and heads may be one for all."""
        t = self._table(node)
        if not is_stored(t) and loads(t.body):
            t = self._kept(node, self.ctx.realize(t))
        lead = [ix.ZERO if n is ix.ONE else v for n, v in zip(t.size, self.place, strict=False)]
        return build.cast(t.at((*lead[:2], *place)), torch.int64)


def inlined(ctx: Lowering, gm: torch.fx.GraphModule, given: Sequence[Any], device: torch.device
            ) -> list[Any]:  # fmt: skip
    """The results of a graph over numbers, as expressions."""
    known: dict[Node, Any] = {}
    waiting = iter(given)
    for node in gm.graph.nodes:
        match node.op:
            case "placeholder":
                known[node] = next(waiting)
            case "get_attr":
                known[node] = _constant(gm, node, device)
            case "call_function":
                known[node] = _called(ctx, node, known)
            case _:
                results: Any = node.args[0]
                single = results if isinstance(results, (tuple, list)) else [results]
                return [known[r] if isinstance(r, Node) else r for r in single]
    raise Unsupported("a graph without results")


def _constant(gm: torch.fx.GraphModule, node: Node, device: torch.device) -> Tensor:
    value = getattr(gm, str(node.target), None)
    value = getattr(value, "constant", value)
    if type(value) is not torch.Tensor or value.dim() or not is_plain(value):
        raise Unsupported("a constant that is not a number")
    return Tensor((), value.dtype, device, const(value.item(), value.dtype))


_SAME = frozenset((aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default,
                   aten.clone.default))  # fmt: skip


def _called(ctx: Lowering, node: Node, known: dict[Node, Any]) -> Any:
    if node.target is zeros_and_scatter:
        shape, indices, values = plain(map_arg(tuple(node.args), lambda n: known[n]))
        return Scattered(tuple(ctx.sizes.tuple(shape)), tuple(indices), values)
    args, kwargs = map_arg((tuple(node.args), dict(node.kwargs)), lambda n: known[n])
    if node.target in _SAME:
        return args[0]
    if any(isinstance(a, (Scattered, Sums)) for a in args):
        return _added(node, args, kwargs)
    lowering = LOWERINGS.get(node.target)
    if lowering is None:
        raise Unsupported(f"{node.target} in a function of scores")
    with ctx.at(node):
        return lowering(ctx, *args, **kwargs)


def _added(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Sums:
    """Memory that is read at several places has the sum of their gradients."""
    if node.target is not aten.add.Tensor or kwargs:
        raise Unsupported(f"{node.target} of a gradient of memory")
    parts = [p for a in args for p in (a.parts if isinstance(a, Sums) else (a,))]
    if not all(isinstance(p, Scattered) for p in parts):
        raise Unsupported("a gradient of memory that is not read one by one")
    return Sums(tuple(parts))


# ---- forward


def forward(ctx: Lowering, node: Node) -> list[Any]:
    query, key, value, score_mod, block_mask, scale, _, others, of_mask = node.args
    site = _Site(ctx, node, query, key, value)  # type: ignore[arg-type]
    made = _node(site, block_mask, scale, score_mod, (others, of_mask))
    used = [n.args[1] for n in node.users]
    fakes = node.meta["val"]
    made = replace(made, maxima=2 in used)
    target, args = _canonical(ctx, made, site.views)
    results = fakes if made.maxima else fakes[:2]
    found = ctx.call(target, args, {}, tuple(results), aliases=False)
    _forget(ctx, node)
    return [*found, *([] if made.maxima else [None])]


def _node(site: _Site, block_mask: Any, scale: Any, score_mod: Any, others: Any) -> Attention:
    scale = scale.meta.get("val") if isinstance(scale, Node) else scale
    if isinstance(scale, torch.SymFloat) and not scale.node.expr.free_symbols:
        scale = float(scale.node.expr)
    if not isinstance(scale, (int, float)):
        raise Unsupported("a scale that is not known")
    score = site.number(element(SCORE, site.working))
    changed = site.expression(score_mod, [score, *site.position()], others[0])
    mask = site.expression(block_mask[-1], site.position(), others[1])
    if mask.dtype != torch.bool:
        mask = build.op("ne", mask, const(0, mask.dtype))
    made = Attention(*site.place, site.group, float(scale), build.cast(changed, site.working), mask)
    sizes = block_mask[OWN : OWN + 2]
    sparse = site.sparse(block_mask[BY_ROW : BY_ROW + 4], *sizes)
    return replace(made, sparse=sparse)


# ---- backward


@dataclass(frozen=True)
class Scattered:
    """The gradient of memory that is read at one place for each score."""

    size: tuple[Expr, ...]
    indices: tuple[Tensor, ...]
    values: Tensor


@dataclass(frozen=True)
class Sums:
    """Several of them together."""

    parts: tuple[Scattered, ...]


def backward(ctx: Lowering, node: Node) -> list[Any]:
    (query, key, value, out, lse, grad_out, grad_lse, score_mod, joint, block_mask, scale, _,
     others, of_mask) = node.args  # fmt: skip
    site = _Site(ctx, node, query, key, value)  # type: ignore[arg-type]
    if grad_out is None or site.repeats:
        raise Unsupported("a gradient of sums alone, or of keys that all batches share")
    made = _node(site, block_mask, scale, score_mod, (others, of_mask))
    sizes = block_mask[OWN : OWN + 2]  # type: ignore[index]
    turned = site.sparse(block_mask[BY_COLUMN : BY_COLUMN + 4], *reversed(sizes))  # type: ignore[index]
    score, ds = (site.number(element(name, site.working)) for name in (SCORE, GRAD))
    gradient, *rest = site.inline(joint, [score, *site.position(), ds], others)  # type: ignore[arg-type]
    made = replace(made, turned=turned,
                   gradient=build.cast(site.of_position(gradient), site.working))  # fmt: skip
    fakes = node.meta["val"]
    captured = _Captured(site, fakes[3])
    stores = captured.stores(rest[4:])
    if stores and site.device.type != "cpu" and (
        config.deterministic or torch.are_deterministic_algorithms_enabled()):  # fmt: skip
        raise Unsupported("what programs add to memory comes in any order")
    delta = _delta(site, out, grad_out, grad_lse)  # type: ignore[arg-type]
    more = [site.operand(grad_out), as_argument(ctx, lse), delta]  # type: ignore[arg-type]
    made = replace(made, stores=stores)
    target, args = _canonical(ctx, made, [*site.views, *more])
    found = ctx.call(target, args, {}, tuple(fakes[:3]), tuple(captured.names), aliases=False)
    _forget(ctx, node)
    return [*found, captured.results()]


def _delta(site: _Site, out: Node, grad_out: Node, grad_lse: Node | None) -> View:
    """What a row's gradients of scores have in common: a sum over the row."""
    ctx = site.ctx
    both = [ctx.env[n] for n in (out, grad_out)]
    if not all(isinstance(t, Tensor) for t in both):
        raise Unsupported("operand is not a plain strided tensor")
    product = pointwise(lambda a, b: build.op("mul", build.cast(a, site.working),
                                              build.cast(b, site.working)), *both)  # fmt: skip
    (total,) = ctx.reduce("sum", product, [3], False, Fill(site.working))
    if grad_lse is not None:

        def less(a: Expr, b: Expr) -> Expr:
            natural = build.op("mul", build.cast(b, site.working), const(1 / LN2, site.working))
            return build.op("sub", a, natural)

        total = pointwise(less, total, ctx.env[grad_lse])
    return ctx.view_of(total)


class _Captured:
    """Gradients of what a score's function reads: sums over all scores, in float32 or wider."""

    def __init__(self, site: _Site, fakes: Sequence[Any]) -> None:
        self.site = site
        self.fakes = fakes
        self.made: list[Tensor | None] = []
        self.names: list[str] = []

    def stores(self, gradients: Sequence[Any]) -> tuple[Store, ...]:
        found: list[Store] = []
        for fake, given in zip(self.fakes, gradients, strict=True):
            if fake is None or given is None:
                self.made.append(None)
            else:
                found += self._stores(fake, given)
        return tuple(found)

    def _stores(self, fake: torch.Tensor, given: Any) -> list[Store]:
        ctx, working = self.site.ctx, self.site.working
        if fake.dtype not in TYPES:
            raise Unsupported(f"a gradient of {fake.dtype}")
        size = ctx.sizes.tuple(fake.shape)
        zero = Tensor(size, working, self.site.device, const(0, working))
        sums = ctx.copy(zero)
        self.made.append(sums)
        buffer = ctx.program.buffers[sums.body.arg]
        self.names.append(buffer.name)
        parts = given.parts if isinstance(given, Sums) else (given,)
        found: list[Store] = []
        for part in parts:
            if isinstance(part, Scattered):
                places = [_wrapped(self.site.of_position(t), n)
                          for t, n in zip(part.indices, size, strict=True)]  # fmt: skip
                value = self.site.of_position(part.values)
            elif not size:
                places, value = [], self.site.of_position(part)
            else:
                raise Unsupported("a gradient of memory that is not read one by one")
            index = ix.linearize(places, buffer.stride)
            found.append(Store(buffer.name, index, build.cast(value, working), "add"))
        return found

    def results(self) -> list[Tensor | None]:
        return [None if t is None else t.to(fake.dtype)
                for t, fake in zip(self.made, self.fakes, strict=True)]  # fmt: skip


def _wrapped(i: Expr, size: Expr) -> Expr:
    i = build.cast(i, torch.int64)
    place = build.where(build.op("lt", i, ix.ZERO), build.op("add", i, size), i)
    return build.op("index", place, size)


# ---- the node with names of its own


def _canonical(ctx: Lowering, made: Attention, views: Sequence[View]
               ) -> tuple[Attention, tuple[Any, ...]]:  # fmt: skip
    """The node in the names of its arguments, and the arguments."""
    written = list(made.added)
    names = [n for n in memory_of(made.exprs) if n not in written] + written
    own = {name: f"x{k}" for k, name in enumerate(names)}

    def rule(e: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if e.op != "load" or e.arg not in own:
            return None
        return load(own[e.arg], e.dtype, *src)

    def over(e: Expr | None) -> Any:
        return None if e is None else rewrite(e, rule)

    def over_sparse(s: Sparse | None) -> Sparse | None:
        return None if s is None else replace(
            s, count=over(s.count), place=over(s.place), full_count=over(s.full_count),
            full_place=over(s.full_place))  # fmt: skip

    stores = tuple(Store(own[s.buffer], over(s.index), over(s.value), s.mode) for s in made.stores)
    buffers = [ctx.program.buffers[n] for n in names]
    renamed = tuple(replace(b, name=own[b.name]) for b in buffers)
    sizes = [e for b in buffers for e in (*b.size, *b.stride)]
    numbers = sorted(syms(*made.exprs, *(v.src[0] for v in made.place), *sizes,
                          *(e for v in views for e in (*v.size, *v.stride, v.offset))),
                     key=lambda e: e.arg.name)  # fmt: skip
    target = replace(made, score=over(made.score), mask=over(made.mask),
                     gradient=over(made.gradient), stores=stores, buffers=renamed,
                     numbers=tuple(numbers), sparse=over_sparse(made.sparse),
                     turned=over_sparse(made.turned))  # fmt: skip
    whole = [View(b.name, b.size, b.stride, ix.ZERO, b.dtype) for b in buffers]
    return target, (*views, *whole, *numbers)


def _forget(ctx: Lowering, node: Node) -> None:
    """Graphs that have become expressions are not needed when the program runs."""
    for arg in node.all_input_nodes:
        name = f"constant_{arg.name}"
        if arg.op == "get_attr" and set(arg.users) == {node}:
            ctx.program.constants.pop(name, None)


FUNCTIONS[flex_attention] = forward
FUNCTIONS[flex_attention_backward] = backward

__all__ = ["backward", "forward"]
