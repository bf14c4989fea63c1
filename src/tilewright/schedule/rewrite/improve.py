"""Rewrites of the program that grouping alone cannot make, each taken only if it saves bytes.

- A nest that reads different buffers in different parts of its loops (a concatenation, padding) is
  cut there, so that each part can join what makes its operand; or what has an operand in common
  with it, as the halves of a rotary embedding have.
- A sum of a library product and something else becomes the product's own accumulating form.
- A copy of a product's result goes: the product writes where the copy would.

The first two are weighed by grouping the neighbourhood of the change with and without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

import torch

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, var, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Buffer, Nest, Node, Opaque, Program, Store, View
from tilewright.lower.join import MAX_POINTWISE_CAT_WORK
from tilewright.lower.opaque import INTO
from tilewright.schedule.fusion.group import Search
from tilewright.schedule.fusion.legality import is_alone
from tilewright.schedule.nests.access import Touches, all_loops, disjoint, touched
from tilewright.schedule.nests.transform import cut_points, drop_masks, substitute_nest

aten = torch.ops.aten

MOST_TRIALS = 64  # changes weighed in one program
NEIGHBOURHOOD = 24  # nodes grouped to weigh one
MOST_PIECES = 64
MOST_CHOICES = 6  # parts of one loop that a kernel tells apart as it goes; more are cut

ACCUMULATING = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}


def improved(program: Program, nodes: Sequence[Node]) -> list[Node]:
    state = _State(program, nodes)
    for node in nodes:
        if isinstance(node, Nest) and not is_alone(node):
            state.cut(node)
    for node in state.nodes:
        if isinstance(node, Nest):
            state.accumulate(node)
    return placed(program, state.nodes)


@dataclass(frozen=True)
class Box:
    """A part of a nest's iterations: for each loop the pieces from `first` up to `last`."""

    first: tuple[int, ...]
    last: tuple[int, ...]


class _State:
    """The program while it is changed: what is in the place of each of its nodes."""

    def __init__(self, program: Program, nodes: Sequence[Node]) -> None:
        self.program = program
        self.slots: list[list[Node]] = [[n] for n in nodes]
        self.place = {n.name: k for k, n in enumerate(nodes)}
        self.visible = program.visible
        self.users: dict[str, dict[str, Node]] = {}
        self.writers: dict[str, dict[str, Node]] = {}
        for node in nodes:
            self._note(node)
        self.trials = 0

    def _note(self, node: Node) -> None:
        for b in node.reads | node.writes:
            self.users.setdefault(b, {})[node.name] = node
            writers = self.writers.setdefault(b, {})
            if b in node.writes:
                writers[node.name] = node

    @property
    def nodes(self) -> list[Node]:
        return [n for slot in self.slots for n in slot]

    def _swap(self, old: Sequence[Node], new: Sequence[Node]) -> None:
        """`new` in the place of the last of `old`."""
        where = max(self.place[n.name] for n in old)
        for node in old:
            slot = self.slots[self.place.pop(node.name)]
            slot.remove(node)
            for b in node.reads | node.writes:
                del self.users[b][node.name]
                self.writers[b].pop(node.name, None)
        self.slots[where] += new
        for node in new:
            self.place[node.name] = where
            self._note(node)

    def _only_for(self, buffer: str, reader: Nest) -> Node | None:
        """Who makes a temporary that nobody but `reader` reads."""
        if self.program.buffers[buffer].kind != "temporary" or buffer in self.visible:
            return None
        users = self.users[buffer]
        if len(users) - (reader.name in users) != 1:
            return None
        (maker,) = (n for name, n in users.items() if name != reader.name)
        return maker if buffer in maker.writes else None

    # ---- weighing

    def _cheaper(self, old: Sequence[Node], new: Sequence[Node]) -> Search | None:
        """The neighbourhood grouped with `new` for `old`, if that moves fewer bytes."""
        if self.trials >= MOST_TRIALS:
            return None
        self.trials += 1
        near = self._near([*old, *new])
        after = placed(self.program, _swapped(near, old, new))
        before = self._grouped(near, near)
        found = self._grouped(after, near)
        return found if found.bytes() < before.bytes() else None

    def _grouped(self, nodes: Sequence[Node], instead_of: Sequence[Node]) -> Search:
        """`nodes` grouped; who else uses their buffers, outside `instead_of`, is counted too."""
        total = Counter(b for n in nodes for b in n.reads | n.writes)
        inside = Counter(b for n in instead_of for b in n.reads | n.writes)
        for b in total:
            total[b] += len(self.users.get(b, ())) - inside[b]
        search = Search(self.program, nodes, total)
        search.run()
        return search

    def _near(self, around: Sequence[Node]) -> list[Node]:
        """What touches the same buffers, and what touches theirs, in the program's order."""
        names: dict[str, None] = {}
        ring: Iterable[Node] = around
        for _ in range(2):
            found: list[Node] = []
            for node in ring:
                for b in sorted(node.reads | node.writes):
                    nearest = islice(self.users.get(b, {}).values(), 8)
                    found += [n for n in nearest if n.name not in names]
            new = list(dict.fromkeys(n.name for n in found))
            room = max(0, NEIGHBOURHOOD - len(names)) if names else len(new)
            names.update(dict.fromkeys(new[:room]))
            ring = found
        places = sorted({self.place[name] for name in names})
        return [n for k in places for n in self.slots[k] if n.name in names]

    # ---- cutting

    def cut(self, nest: Nest) -> None:
        points = [cut_points(nest, v) for v in nest.loops]
        count = 1
        for p in points:
            count *= len(p) + 1
        if not 1 < count <= MOST_PIECES:
            return
        grid = [Box(at, at) for at in product(*(range(len(p) + 1) for p in points))]
        parts = [_part(nest, points, box) for box in grid]
        if _are_alike(nest, parts):
            return
        if max(len(p) for p in points) >= MOST_CHOICES:
            self._swap([nest], parts)
            return
        if _overlap(parts) or _computes_all(nest, parts):
            self._swap([nest], parts)
            return
        if not any(self._only_for(b, nest) for b in nest.reads):
            return
        boxed = {part.name: box for part, box in zip(parts, grid, strict=True)}
        found = self._cheaper([nest], parts)
        if found is None:
            return
        idle = [boxed[name] for name in boxed if found.is_apart(name, boxed.keys())]
        busy = [box for box in grid if box not in idle]
        boxes = sorted([*busy, *_joined(idle, len(points))], key=lambda box: box.first)
        self._swap([nest], [_part(nest, points, box) for box in boxes])

    # ---- accumulating products

    def accumulate(self, nest: Nest) -> None:
        if self.trials >= MOST_TRIALS:
            return
        found = self._sum_with_product(nest)
        if found is None:
            return
        call, out, other = found
        made = self._operand(nest, call, out, other)
        if made is None:
            return
        operand, before = made
        target = ACCUMULATING[call.target]
        new = replace(call, name=f"{call.name}_sum", target=target,
                      args=(operand, *call.args), results=(), out=out)  # fmt: skip
        new = _whole(self.program, replace(new, target=INTO[target]), target)
        if self._cheaper([call, nest], [*before, new]) is not None:
            self._swap([call, nest], [*before, new])

    def _sum_with_product(self, nest: Nest) -> tuple[Opaque, View, Expr] | None:
        """(the product, where the sum is stored, the other summand)."""
        if nest.reduce or len(nest.stores) != 1:
            return None
        (store,) = nest.stores
        if store.value.op != "add" or store.value.dtype not in (torch.float32, torch.float64):
            return None  # low-precision eager rounds the product before it adds
        for mine, other in (store.value.src, store.value.src[::-1]):
            if mine.op != "load" or len(mine.src) != 1 or other is mine or not loads(other):
                continue
            call = self._only_for(mine.arg, nest)
            if not isinstance(call, Opaque) or call.target not in ACCUMULATING:
                continue
            out = _target(self.program, nest, mine, store)
            if out is not None and mine.arg not in {n.arg for n in loads(other)} and (
                self._may_wait(call, nest)):  # fmt: skip
                return call, out, other
        return None

    def _may_wait(self, call: Opaque, nest: Nest) -> bool:
        """Whether the call may run as late as the nest: nothing it reads is written before."""
        start, end = self.place[call.name], self.place[nest.name]
        return not any(start < self.place[n.name] < end
                       for b in call.reads for n in self.writers[b].values())  # fmt: skip

    def _operand(self, nest: Nest, call: Opaque, out: View,
                 other: Expr) -> tuple[View, list[Nest]] | None:  # fmt: skip
        """The other summand as a view, and the nest that stores it if nothing does yet."""
        (result,) = call.results
        assert result is not None
        buffer = self.program.buffers[result]
        loops = _loops_of(nest, buffer, next(n for n in loads(*nest.exprs) if n.arg == result))
        assert loops is not None
        if other.op == "load" and len(other.src) == 1 and other.arg != out.buffer:
            found = _view(self.program.buffers[other.arg], other.src[0], loops, buffer)
            if found is not None:
                return found, []
        if other.dtype != buffer.dtype or out.buffer in {n.arg for n in loads(other)}:
            return None
        size = tuple(n if v is None or v in free_vars(other) else ix.ONE
                     for n, v in zip(buffer.size, loops, strict=True))  # fmt: skip
        name = f"{result}_add"
        made = Buffer(name, buffer.dtype, buffer.device, size, ix.contiguous_strides(size))
        self.program.buffers[name] = made
        point = [ix.ZERO if v is None or n is ix.ONE else v
                 for n, v in zip(size, loops, strict=True)]  # fmt: skip
        index = ix.linearize(point, made.stride)
        store = Store(name, index, other)
        view = _view(made, index, loops, buffer)
        if view is None:
            return None
        inner = tuple(v for v in nest.loops if v in free_vars(other))
        return view, [Nest(f"{nest.name}_add", inner, (), (store,), nest.origin)]


def _swapped(nodes: Sequence[Node], old: Sequence[Node], new: Sequence[Node]) -> list[Node]:
    gone = {n.name for n in old}
    last = max((k for k, n in enumerate(nodes) if n.name in gone), default=-1)
    result: list[Node] = []
    for k, node in enumerate(nodes):
        if node.name not in gone:
            result.append(node)
        if k == last:
            result += new
    return result


# ---- parts of a nest


def _part(nest: Nest, points: Sequence[Sequence[Expr]], box: Box) -> Nest:
    mapping: dict[Expr, Expr] = {}
    loops: list[Expr] = []
    for v, cuts, first, last in zip(nest.loops, points, box.first, box.last, strict=True):
        ends = [ix.ZERO, *cuts, v.src[0]]
        start, size = ends[first], ix.sub(ends[last + 1], ends[first])
        if size is ix.ONE:
            mapping[v] = start
            continue
        piece = var(v.arg, size)
        loops.append(piece)
        if size is not v.src[0]:
            mapping[v] = ix.add(piece, start)
    where = "_".join(str(k) for k in (*box.first, *box.last))
    part = drop_masks(substitute_nest(nest, mapping, loops, nest.reduce))
    return replace(part, name=f"{nest.name}_{where}")


def _are_alike(nest: Nest, parts: Sequence[Nest]) -> bool:
    """Whether most of what one part reads others read too, as windows do that reach over an edge:
    each would be a kernel as large as all of them."""
    return sum(len(loads(*p.exprs)) for p in parts) > 2 * len(loads(*nest.exprs))


def _computes_all(nest: Nest, parts: Sequence[Nest]) -> bool:
    """Whether parts with the same loops have so much arithmetic each that an element should not
    have that of all of them, as where sines lie beside cosines: one kernel runs them together."""
    if any(p.loops != parts[0].loops or p.reduce for p in parts):
        return False
    work = [_work(p) for p in parts]
    return _work(nest) - max(work) > MAX_POINTWISE_CAT_WORK


def _work(nest: Nest) -> int:
    return sum(TABLE[node.op].cost for node in walk(*nest.exprs) if node.op in TABLE)


def _overlap(parts: Sequence[Nest]) -> bool:
    """Whether parts have the same loops, and each reads at every point what another does: one
    kernel runs them together and reads it once."""
    if any(p.loops != parts[0].loops or p.reduce for p in parts):
        return False
    read = [{n for n in loads(*p.exprs) if set(p.loops) <= free_vars(n.src[0])} for p in parts]
    return all(any(mine & other for k, other in enumerate(read) if k != j)
               for j, mine in enumerate(read))  # fmt: skip


def _joined(boxes: Sequence[Box], rank: int) -> list[Box]:
    """Neighbouring boxes as one, along one loop after the other from the innermost."""
    found = list(boxes)
    for axis in reversed(range(rank)):
        merged: list[Box] = []
        for box in sorted(found, key=lambda b: (b.first[:axis], b.first[axis + 1 :], b.first)):
            if merged and _continues(merged[-1], box, axis):
                merged[-1] = Box(merged[-1].first, box.last)
            else:
                merged.append(box)
        found = merged
    return found


def _continues(a: Box, b: Box, axis: int) -> bool:
    others = [k for k in range(len(a.first)) if k != axis]
    return a.last[axis] + 1 == b.first[axis] and all(
        a.first[k] == b.first[k] and a.last[k] == b.last[k] for k in others)  # fmt: skip


# ---- results in their place


def placed(program: Program, nodes: Sequence[Node]) -> list[Node]:
    """Library calls that write straight to where a copy of their result would go."""
    visible = program.visible
    makers = {n.results[0]: n for n in nodes
              if isinstance(n, Opaque) and n.target in INTO and len(n.results) == 1}  # fmt: skip
    users = _users(nodes)
    place = {n.name: k for k, n in enumerate(nodes)}
    new: dict[str, Node | None] = {}
    touches: dict[str, Touches] = {}  # of the buffers that copies go to
    for node in nodes:
        copied = _copied(node)
        call = makers.get(copied.arg) if copied is not None else None
        if call is None or copied is None or copied.arg in visible or len(users[copied.arg]) != 2:
            continue
        assert isinstance(node, Nest)
        out = _target(program, node, copied, node.stores[0])
        if out is None or out.buffer in call.reads:
            continue
        if out.buffer not in touches:
            touches[out.buffer] = _touches(out.buffer, users[out.buffer])
        between = [n for n in touches[out.buffer].near(out.window)
                   if place[call.name] < place[n.name] < place[node.name]]  # fmt: skip
        if all(_keeps_off(n, out) for n in between):
            new[node.name] = None
            made = new[call.name] = replace(call, target=INTO[call.target], results=(), out=out)
            touches[out.buffer].add(made)
    changed = (new.get(n.name, n) for n in nodes)
    return [n for n in changed if n is not None]


def _users(nodes: Sequence[Node]) -> dict[str, list[Node]]:
    users: dict[str, list[Node]] = {}
    for node in nodes:
        for b in node.reads | node.writes:
            users.setdefault(b, []).append(node)
    return users


def _touches(buffer: str, nodes: Sequence[Node]) -> Touches:
    found = Touches(buffer)
    for node in nodes:
        found.add(node)
    return found


def _keeps_off(node: Node, target: View) -> bool:
    """Whether a node certainly touches nothing of the target."""
    found = touched(node, target.buffer)
    return bool(found) and all(disjoint(target.window, i) for i in found)


def _copied(node: Node) -> Expr | None:
    """What a nest copies, if copying is all it does."""
    if not isinstance(node, Nest) or node.reduce or len(node.stores) != 1:
        return None
    (store,) = node.stores
    value = store.value
    plain = value.op == "load" and len(value.src) == 1 and not is_alone(node)
    return value if plain and len(loads(*store.exprs)) == 1 else None


def _target(program: Program, nest: Nest, source: Expr, store: Store) -> View | None:
    """Where the nest puts the whole of the buffer it loads `source` of, as a view shaped like
    that buffer."""
    buffer, target = program.buffers[source.arg], program.buffers[store.buffer]
    if buffer.dtype != target.dtype or store.mode != "set" or store.mask is not None:
        return None
    loops = _loops_of(nest, buffer, source)
    if loops is None or len([v for v in loops if v is not None]) != len(nest.loops):
        return None
    return _view(target, store.index, loops, buffer)


def _loops_of(nest: Nest, buffer: Buffer, source: Expr) -> list[Expr | None] | None:
    """For each dimension of a buffer the loop that runs along all of it."""
    found: list[Expr | None] = []
    for size, stride in zip(buffer.size, buffer.stride, strict=True):
        v = next((v for v in all_loops(nest) if v.src[0] is size and v not in found
                  and ix.coefficient(source.src[0], v) is stride), None)  # fmt: skip
        if v is None and size is not ix.ONE:
            return None
        found.append(v)
    rest = ix.without(source.src[0], [v for v in found if v is not None])
    return found if rest is ix.ZERO else None


def _view(buffer: Buffer, index: Expr, loops: Sequence[Expr | None], like: Buffer) -> View | None:
    """The elements of `buffer` at `index`, with a dimension for each of `loops`."""
    strides: list[Expr] = []
    for v in loops:
        stride = ix.ZERO if v is None else ix.coefficient(index, v)
        if stride is None or free_vars(stride) or not ix.known_nonneg(stride):
            return None
        strides.append(stride)
    offset = ix.without(index, [v for v in loops if v is not None])
    if free_vars(offset) or loads(offset):
        return None
    return View(buffer.name, like.size, ix.settled_strides(like.size, strides), offset,
                buffer.dtype)  # fmt: skip


def _whole(program: Program, call: Opaque, plain: object) -> Opaque:
    """A call that fills all of a new buffer needs no memory given: it makes its own."""
    assert call.out is not None
    b = program.buffers[call.out.buffer]
    if b.kind == "temporary" and call.out.size == b.size and call.out.stride == b.stride:
        return replace(call, target=plain, results=(b.name,), out=None)
    return call
