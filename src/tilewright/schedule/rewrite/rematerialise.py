"""Values computed again where they are used, because that moves fewer bytes than storing them.

A grouping leaves some values in memory only because kernels that could not be joined both need
them. Where such a value is cheap, and a kernel reads what it is made of anyway or could read it
for less, that kernel computes it itself. And a card's kernel reduces rows, not rows of rows: a
short reduction that another one reads is written out inside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import product

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import INDEX, Expr, const, free_vars, loads, rewrite, substitute, var, walk
from tilewright.ir.ops import STEPS, TABLE
from tilewright.ir.program import Buffer, Nest, Node, Program
from tilewright.schedule.fusion.group import Search
from tilewright.schedule.fusion.legality import is_alone
from tilewright.schedule.nests.access import terms
from tilewright.schedule.nests.hints import hint_bytes, hint_product, work
from tilewright.schedule.nests.transform import replace_exprs
from tilewright.target import Target

MOST_WORK = 16  # additions that are cheaper than an access to memory
MOST_SPREAD = 128  # of a value that is computed from a few others
SPREAD = 4  # times what it is computed from
MOST_TERMS = 64  # of a reduction that is written out
MOST_REPEATS = 2  # times a value may be computed in each kernel that needs it


def recomputed(program: Program, search: Search) -> list[Node] | None:
    """The program with such values computed where they are used; None if there are none."""
    visible = program.visible
    home = {part: k for k, parts in search.parts.items() for part in parts}
    users: dict[str, list[int]] = {}
    for k, node in enumerate(search.nodes):
        for b in node.reads | node.writes:
            users.setdefault(b, []).append(k)
    written = {b: k for k, node in enumerate(search.nodes) for b in node.writes}  # by whom last
    changed: dict[int, Nest | None] = {}
    for maker, node in enumerate(search.nodes):
        if not isinstance(node, Nest) or not is_cheap(program, node):
            continue
        (store,) = node.stores
        buffer = program.buffers[store.buffer]
        readers = [k for k in users[buffer.name] if k != maker]
        if buffer.kind != "temporary" or buffer.name in visible or maker in changed:
            continue
        if any(k in changed or buffer.name in search.nodes[k].writes for k in readers):
            continue
        if any(written.get(b, -1) > maker for b in node.reads):
            continue
        away = [k for k in readers if home[k] != home[maker]]
        new = {k: inlined(search.nodes[k], node, buffer) for k in away}
        if away and all(new.values()) and _gain(program, search, maker, away, home) > 0:
            changed.update(new)
            if len(away) == len(readers):
                changed[maker] = None
    if not changed:
        return None
    found = (changed.get(k, node) for k, node in enumerate(search.nodes))
    return [node for node in found if node is not None]


# ---- short folds on a card


def written_out(program: Program, nodes: Sequence[Node]) -> list[Node]:
    """The program with short reductions that only another reduction reads as a part of that."""
    visible = program.visible
    users: dict[str, list[int]] = {}
    for k, node in enumerate(nodes):
        for b in node.reads | node.writes:
            users.setdefault(b, []).append(k)
    written = {b: k for k, node in enumerate(nodes) for b in node.writes}
    found: list[Node | None] = list(nodes)
    for maker, node in enumerate(nodes):
        if not isinstance(node, Nest) or not node.reduce or len(node.stores) != 1:
            continue
        buffer = program.buffers[node.stores[0].buffer]
        readers = [k for k in users[buffer.name] if k != maker]
        if buffer.kind != "temporary" or buffer.name in visible or len(readers) != 1:
            continue
        reader = found[readers[0]]
        if not isinstance(reader, Nest) or not reader.reduce or buffer.name in reader.writes:
            continue
        if any(written.get(b, -1) > maker for b in node.reads) or found[maker] is not node:
            continue
        if _is_broadcast(program, node, buffer) and Target.of(buffer.device).is_gpu:
            plain = _without_folds(node)
            new = None if plain is None else inlined(reader, plain, buffer)
            if new is not None:
                found[maker], found[readers[0]] = None, new
    return [node for node in found if node is not None]


def _is_broadcast(program: Program, nest: Nest, buffer: Buffer) -> bool:
    """Whether its results are many beside what it reads."""
    read = sum(hint_bytes(program.buffers[b]) for b in nest.reads)
    return 16 * hint_bytes(buffer) >= read


def _without_folds(nest: Nest) -> Nest | None:
    """The nest with its reductions as plain arithmetic; None if they are not short or not
    simple."""
    count = ix.value_of(ix.product(v.src[0] for v in nest.reduce))
    if count is None or not 0 < count <= MOST_TERMS or is_alone(nest):
        return None
    kinds = {n.arg.kind for n in walk(*nest.exprs) if n.op == "reduce"}
    if not kinds <= STEPS.keys():
        return None
    sizes = [range(ix.value_of(v.src[0]) or 0) for v in nest.reduce]
    points = [dict(zip(nest.reduce, map(ix.as_index, at), strict=True)) for at in product(*sizes)]

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if node.op != "reduce":
            return None
        terms_ = [build.cast(substitute(src[0], point), node.dtype) for point in points]
        return reduce(lambda a, b: build.op(STEPS[node.arg.kind], a, b), terms_)

    return replace(replace_exprs(nest, lambda e: rewrite(e, rule)), reduce=())


# ---- values computed again


def is_cheap(program: Program, nest: Nest) -> bool:
    """Whether a nest computes one value per element of one buffer, with little work; or with some,
    from so few numbers that what it computes is most of what moves."""
    if nest.reduce or len(nest.stores) != 1 or is_alone(nest):
        return False
    nodes = [n for n in walk(nest.stores[0].value) if n.op in TABLE]
    cost = sum(TABLE[n.op].cost for n in nodes)
    if cost <= MOST_WORK:
        return True
    buffer = program.buffers[nest.stores[0].buffer]
    if cost > MOST_SPREAD:
        return False
    read = sum(hint_bytes(program.buffers[b]) for b in nest.reads)
    if SPREAD * read <= hint_bytes(buffer):
        return True
    # what a whole row or column has in common is not made for each element
    each = sum(TABLE[n.op].cost for n in nodes if free_vars(n) >= set(nest.loops))
    return Target.of(buffer.device).is_gpu and each <= MOST_WORK


def _gain(program: Program, search: Search, maker: int, away: list[int],
          home: Mapping[int, int]) -> int:  # fmt: skip
    """Bytes that are not moved when the nodes `away` compute what `maker` does themselves."""
    node = search.nodes[maker]
    assert isinstance(node, Nest)
    buffer = program.buffers[node.stores[0].buffer]
    groups = {home[k] for k in away}
    gain = hint_bytes(buffer) * (1 + len(groups))
    for g in groups:
        gain -= sum(hint_bytes(program.buffers[b]) for b in node.reads if b not in search.touch[g])
    if len(search.parts[home[maker]]) == 1:
        gain += sum(hint_bytes(program.buffers[b]) for b in node.reads)
    return gain


def inlined(reader: Node, maker: Nest, buffer: Buffer) -> Nest | None:
    """The reader with the maker's value in place of loads of what it stores; None if the reader
    would compute it too often, or at places that are hard to tell."""
    (store,) = maker.stores
    steps = _digits(store.index, maker)
    if not isinstance(reader, Nest) or steps is None or is_alone(reader):
        return None
    # a thread of a card makes once what all elements have in common
    common = not maker.loops and Target.of(buffer.device).is_gpu
    if not common and work(reader) > MOST_REPEATS * max(hint_product(buffer.size), 1):
        return None
    taps = {n.src[0] for n in loads(*reader.exprs) if n.arg == buffer.name}
    if len(taps) > MOST_REPEATS and any(len(places) > 1 for places in maker.loaded.values()):
        return None  # windows of windows
    value = build.cast(store.value, buffer.dtype)

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if node.op != "load" or node.arg != buffer.name:
            return None
        inside, back = _where(build.TRUE if len(src) == 1 else src[1])
        rest = substitute(src[0], inside)
        places: dict[Expr, Expr] = {}
        for v, stride in steps:
            place, rest = ix.floordiv(rest, stride), ix.mod(rest, stride)
            places[v] = substitute(place, back)
        body = substitute(value, places)
        if len(src) == 1:
            return body
        return build.where(src[1], build.guard(body, src[1]), const(0, buffer.dtype))

    new = replace_exprs(reader, lambda e: rewrite(e, rule))
    divided = {"ifloordiv", "imod"} & (new.ops - reader.ops - maker.ops)
    return None if divided else replace(new, name=f"{reader.name}_{maker.name}")


def _where(mask: Expr) -> tuple[dict[Expr, Expr], dict[Expr, Expr]]:
    """Loops by others that only run where a mask holds, as far as it says from where or up to where
    a loop does; and the other way round."""
    ends: dict[Expr, tuple[int, int]] = {}
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node.op == "bit_and":
            waiting += node.src
        if node.op not in ("ge", "lt") or node.src[0].dtype != INDEX:
            continue
        terms_ = dict(ix.poly(ix.sub(*node.src)))
        by = -terms_.pop((), 0)
        if len(terms_) != 1 or set(terms_.values()) != {1}:
            continue
        ((v, *more),) = terms_
        size = None if more or v.op != "var" else ix.value_of(v.src[0])
        if size is not None:
            low, high = ends.get(v, (0, size))
            ends[v] = (max(low, by), high) if node.op == "ge" else (low, min(high, by))
    inside: dict[Expr, Expr] = {}
    back: dict[Expr, Expr] = {}
    for v, (low, high) in ends.items():
        new = var(f"{v.arg}_inside", ix.as_index(max(high - low, 1)))
        inside[v], back[new] = ix.add(new, low), ix.sub(v, low)
    return inside, back


def _digits(index: Expr, nest: Nest) -> list[tuple[Expr, Expr]] | None:
    """The loops of a store that fills its buffer without gaps, with their strides, descending."""
    found = terms(index, nest.loops)
    if found is None or found[1] is not ix.ZERO or len(found[0]) != len(nest.loops):
        return None
    steps = sorted(found[0].items(), key=lambda step: -hint_product([step[1]]))
    within: Expr = ix.ONE
    for v, stride in reversed(steps):
        if stride is not within:
            return None
        within = ix.mul(within, v.src[0])
    return steps
