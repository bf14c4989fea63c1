"""The order in which a kernel walks the loops of its group: the one that memory runs along.

Loops go from the longest stride to the shortest, by the access that moves most; what is only
brought into another order may be walked in the order it is read in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from tilewright import rules
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads
from tilewright.ir.program import Nest
from tilewright.schedule.fusion.legality import all_loops
from tilewright.schedule.nests.hints import hint, hint_product
from tilewright.schedule.nests.transform import reduces_or_scans
from tilewright.target import LINE, SECTOR

SECTORS = 2 * SECTOR  # bytes that memory is read by


def strides_of(index: Expr, loops: Sequence[Expr]) -> dict[Expr, int]:
    """A likely stride along each loop; where it is not affine, one that sorts it outside."""
    found: dict[Expr, int] = {}
    for v in loops:
        stride = ix.coefficient(index, v)
        if stride is None:
            found[v] = 1 << 40 if v in free_vars(index) else 1 << 50
        else:
            found[v] = abs(hint(stride)) or 1 << 50
    return found


def _reaches(index: Expr, loops: Sequence[Expr]) -> dict[Expr, int]:
    """The same, where rows that are gathered in a table are as far apart as it is long, and so
    are neighbours that images are enlarged by: pairs of the rows of a matrix are in the cache
    when all of its pairs are next to each other (H200: 351 products of 27 rows of 16384x128
    bfloat16 210 us, 1108 us one pair after the other)."""
    found = strides_of(index, loops)
    for monomial, factor in ix.poly(index).items():
        reach = ix.bounds(ix.from_poly({monomial: factor}))[1]
        for v in loops:
            at = [a for a in monomial if v in free_vars(a)]
            if found[v] == 1 << 40 and at and all(a.op in ("index", "imin", "imax") for a in at):
                found[v] = int(min(reach, 1 << 40))
    return found


def _main_access(members: Sequence[Nest]) -> Expr | None:
    """The index that decides the order of loops: a store that walks most, or a reduction's load."""
    best: tuple[int, Expr] | None = None
    for m in members:
        total = hint_product(v.src[0] for v in all_loops(m))
        indices = [n.src[0] for n in loads(*m.exprs)] if m.reduce else [s.index for s in m.stores]
        for index in indices:
            walked = hint_product(v.src[0] for v in all_loops(m) if v in free_vars(index))
            score = walked + total // 4
            if best is None or score > best[0]:
                best = score, index
    return None if best is None else best[1]


def read_in_pieces(members: Sequence[Nest]) -> Expr | None:
    """The index of what is read in another order than it is stored, where that would be done in
    pieces that do not fill memory's sectors: better to read all of them, and to store in pieces
    (H200: halves of rotary embeddings of 80 bfloat16, heads before positions, 44.9 us, 63.0 us).
    Also where tables that are most of what is read come again sooner so, from the nearest cache
    (halves of 64 bfloat16, heads before positions, 64 us, 74 us; of 128 122 us, 196 us; but of 128
    floats 94 us, 93 us)."""
    index = None if any(m.reduce for m in members) else _main_access(members)
    if index is None:
        return None
    loops = tuple(sorted(free_vars(index), key=lambda v: v.arg))
    nodes = dict.fromkeys(loads(*(e for m in members for e in m.exprs)))
    for node in nodes:
        if len(loops) < 2 or free_vars(node.src[0]) != frozenset(loops):
            continue
        stored, read = strides_of(index, loops), strides_of(node.src[0], loops)
        if max(*stored.values(), *read.values(), 0) >= 1 << 40:
            continue
        run, order, other = 1, longest_first(loops, stored), longest_first(loops, read)
        for v in reversed(order):
            run *= hint(v.src[0]) if stored[v] == read[v] == run else 1
        piece = run * node.dtype.itemsize
        short = rules.TILE_SIDE.limit <= run and piece <= rules.READ_ORDER_PIECE.limit
        if order != other and short and (
            piece % SECTORS or (piece <= LINE and _come_sooner(nodes, other, order))):  # fmt: skip
            return node.src[0]
    return None


def _come_sooner(nodes: Iterable[Expr], order: tuple[Expr, ...], than: tuple[Expr, ...]) -> bool:
    """Whether most of what is read at a point comes again soon in an order, and late in another."""
    sooner = [
        _again(n.src[0], order)
        <= rules.REUSED_SOON.limit
        < rules.REUSED_LATE.limit
        <= _again(n.src[0], than)
        for n in nodes
    ]
    bytes_ = [n.dtype.itemsize for n in nodes]
    return 2 * sum(b for b, is_table in zip(bytes_, sooner, strict=True) if is_table) > sum(bytes_)


def _again(index: Expr, order: tuple[Expr, ...]) -> int:
    """The points after which the same places come again."""
    inner = takewhile(free_vars(index).__contains__, reversed(order))
    return hint_product(v.src[0] for v in inner)


def longest_first(loops: tuple[Expr, ...], strides: dict[Expr, int]) -> tuple[Expr, ...]:
    return tuple(sorted(loops, key=lambda v: -strides.get(v, 1 << 50)))


def ordered_loops(members: list[Nest], outer: tuple[Expr, ...]
             ) -> tuple[list[Nest], tuple[Expr, ...]]:  # fmt: skip
    """Loops from the longest stride to the shortest, so that the flat index walks memory."""
    main = read_in_pieces(members) or _main_access(members)
    if main is None:
        return members, outer
    every = tuple(dict.fromkeys(v for m in members for v in all_loops(m)))
    strides = {**_reaches(main, every), **_beside_others(members, main, outer)}
    ordered: list[Nest] = []
    for m in members:
        if reduces_or_scans(m, "scan"):
            ordered.append(m)
            continue
        own = _main_access([m])
        mine = strides if own is None else {**_reaches(own, all_loops(m)), **{
            v: s for v, s in strides.items() if s < 1 << 40}}  # fmt: skip
        ordered.append(
            replace(m, loops=longest_first(m.loops, mine), reduce=longest_first(m.reduce, mine))
        )
    return ordered, _in_common_first(ordered, longest_first(outer, strides))


def _in_common_first(members: list[Nest], outer: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The loops with those first that rows are read along which others have in common, where
    these are most of what is read, as places of eight bytes: a program with several rows loads
    them once (H200: biases of 1024x1024 gathered for 128 planes of bfloat16 220 us, 375 us)."""
    made = frozenset[str]().union(*(m.writes for m in members))
    rows = {n for m in members for n in loads(*m.exprs)
            if free_vars(n.src[0]) - set(outer) and n.arg not in made}  # fmt: skip
    own = sum(n.dtype.itemsize for n in rows if free_vars(n.src[0]) >= set(outer))
    common = [n for n in rows if n.dtype.itemsize == 8 and set(outer) & free_vars(n.src[0])]
    shared = [v for v in outer if any(v in free_vars(n.src[0]) for n in common)]
    if len(common) != 1 or len(shared) == len(outer) or not 0 < 4 * own <= 8:
        return outer
    return (*shared, *(v for v in outer if v not in shared))


def _beside_others(members: list[Nest], main: Expr, outer: tuple[Expr, ...]) -> dict[Expr, int]:
    """Strides along shared loops that what is read most does not have, as that over the second of
    two rows of a tensor that are multiplied: those of results, which are stored one after the other
    then. Not where columns are read one after the other (gradients of distances 85 us, 192 us)."""
    found: dict[Expr, int] = {}
    nodes = {n for m in members for n in loads(*m.exprs)}
    most = {n.arg for n in nodes if n.src[0] is main}
    if any(ix.coefficient(main, v) is ix.ONE for v in outer) or sum(
        n.arg in most for n in nodes) < 2:  # fmt: skip
        return found
    for s in (s for m in members if m.reduce for s in m.stores):
        steps = [(v, ix.coefficient(s.index, v)) for v in outer if v not in free_vars(main)]
        found |= {v: abs(hint(step)) for v, step in steps if step is not None and hint(step)}
    return found
