"""Kernels without inner loops: every member runs at every point of the same loops.

Three things are done to the loops here. A loop whose masks depend on its own variable is cut where
they change, and a mask of an outer variable is decided outside, so that no load in the vectorised
loop is conditional. Reads that are contiguous along another loop than the vectorised one go through
transposed tiles. Long single loops are left to the threads as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from tilewright.codegen.cpp.draws import drawn_at_once, write_drawn
from tilewright.codegen.cpp.emit import uses_flag
from tilewright.codegen.cpp.text import CTYPE, memory_type
from tilewright.ir import index as ix
from tilewright.ir.build import FALSE, TRUE
from tilewright.ir.expr import INDEX, Expr, free_vars, loads, substitute, var, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Nest, Store
from tilewright.schedule.nests.hints import hint, hint_product
from tilewright.schedule.nests.transform import cuts, drop_masks, replace_exprs, substitute_nest

if TYPE_CHECKING:
    from tilewright.codegen.cpp.kernel import Kernel

CHUNK = 4096  # elements of the vectorised loop one thread takes at a time
TILE_LANES, TILE_ROWS = 64, 32  # a transposed tile; each row read is two cache lines of floats
MOST_VARIANTS = 6  # copies of the loop body worth their compile time
MOST_NODES = 900  # in all copies together

LONGEST_TABLE, MOST_TABLES = 2048, 8
TABLE_COST = 5  # operations an expression has to save

Members = Sequence[Nest]


def write_pointwise(k: Kernel, members: Members) -> None:
    """The loops of `k.outer` around all members, the last of them vectorised."""
    *shared, lane = k.outer
    threads = k.threads()
    across = _across(members, shared, lane)
    draws = drawn_at_once(members, lane) if across is None and not k.flag_clause() else []
    with ExitStack() as region:
        if threads != "never":
            # a lone loop combines the flag itself, in its own directive
            flag = "" if not shared else k.flag_clause()
            k.w.line(f"#pragma omp parallel{threads}{flag}")
            region.enter_context(k.w.block(""))
        if draws:
            write_drawn(k, members, draws, threads != "never")
            return
        if shared and across is None:
            _tables(k, members, shared, lane)
        if not shared:
            for part, v in _pieces(members, lane):
                k.w.line(
                    f"#pragma omp {'for ' if threads != 'never' else ''}simd"
                    f"{' schedule(static)' if threads != 'never' else ''}{k.flag_clause()}"
                )
                with k.w.block(k.for_loop(v)):
                    k.point(part)
        elif across is not None:
            _transposed(k, members, shared, across, lane, threads != "never")
        else:
            _rows(k, members, shared, lane, threads != "never")


def _rows(k: Kernel, members: Members, shared: list[Expr], lane: Expr, parallel: bool) -> None:
    w = k.w
    heads = [k.for_loop(v) for v in shared]
    short = 0 < (ix.value_of(lane.src[0]) or 0) <= CHUNK
    if not short:
        heads.append(f"for (int64_t tile = 0; tile < {w.index(lane.src[0])}; tile += {CHUNK})")
    with ExitStack() as stack:
        k.open_loops(stack, heads, parallel)
        if not short:
            size = w.index(lane.src[0])
            w.line(f"const int64_t stop = {size} - tile < {CHUNK} ? {size} : tile + {CHUNK};")
            k.hoist(members, lane)
            w.line(f"#pragma omp simd{k.flag_clause()}")
            with w.block(f"for (int64_t {lane.arg} = tile; {lane.arg} < stop; ++{lane.arg})"):
                k.point(members)
            return
        for decided, conditions in _decided(members, lane):
            with ExitStack() as branch:
                if conditions:
                    branch.enter_context(w.block(f"if ({' && '.join(_texts(k, conditions))})"))
                k.hoist(decided, lane)
                for part, v in _pieces(decided, lane):
                    w.line(f"#pragma omp simd{k.flag_clause()}")
                    with w.block(k.for_loop(v)):
                        k.point(part)


def _texts(k: Kernel, conditions: Sequence[tuple[Expr, bool]]) -> Iterator[str]:
    for condition, holds in conditions:
        yield ("" if holds else "!") + k.w.value(condition)


# ---- masks


def _size(members: Members) -> int:
    return len(set(walk(*(e for m in members for e in m.exprs))))


def _pieces(members: Members, v: Expr) -> list[tuple[Members, Expr]]:
    """The loop `v` cut where its masks change: for each piece the members over its own loop."""
    extent = ix.value_of(v.src[0])
    points = [] if extent is None else cuts(members, v)
    many = len(points) + 1
    if extent is None or not points or many > MOST_VARIANTS or many * _size(members) > MOST_NODES:
        return [(members, v)]
    result: list[tuple[Members, Expr]] = []
    for start, end in zip([0, *points], [*points, extent], strict=True):
        piece = var(v.arg, ix.as_index(end - start))
        mapping = {v: ix.add(piece, start)}
        result.append(([drop_masks(_over(m, mapping, v, piece)) for m in members], piece))
    return result


def _over(nest: Nest, mapping: dict[Expr, Expr], old: Expr, new: Expr) -> Nest:
    return substitute_nest(nest, mapping, [new if u is old else u for u in nest.loops], nest.reduce)


def _decided(members: Members, lane: Expr
             ) -> list[tuple[Members, list[tuple[Expr, bool]]]]:  # fmt: skip
    """The members under every outcome of the masks that do not depend on the vectorised loop."""
    masks = _outer_masks(members, lane)
    pieces = len(cuts(members, lane)) + 1 if ix.value_of(lane.src[0]) is not None else 1
    many = pieces << len(masks)
    if not masks or many > MOST_VARIANTS or many * _size(members) > MOST_NODES:
        return [(members, [])]
    result: list[tuple[Members, list[tuple[Expr, bool]]]] = []
    for outcome in range(1 << len(masks)):
        holds = [not outcome >> j & 1 for j in range(len(masks))]
        mapping = {m: TRUE if h else FALSE for m, h in zip(masks, holds, strict=True)}
        result.append(([_settled(n, mapping) for n in members],
                       list(zip(masks, holds, strict=True))))  # fmt: skip
    return result


def _settled(nest: Nest, known: dict[Expr, Expr]) -> Nest:
    return drop_masks(replace_exprs(nest, lambda e: substitute(e, known)))


def _outer_masks(members: Members, lane: Expr) -> list[Expr]:
    """Conditions on loads that are the same along the whole vectorised loop."""
    found: dict[Expr, None] = {}
    for m in members:
        for node in walk(*m.exprs):
            if node.op == "load" and len(node.src) == 2:
                for part in _conjuncts(node.src[1]):
                    if lane not in free_vars(part) and not _reads(part) and not part.is_const:
                        found[part] = None
    return list(found)


def _reads(e: Expr) -> bool:
    return any(n.op == "load" for n in walk(e))


def _conjuncts(mask: Expr) -> Iterator[Expr]:
    if mask.op == "bit_and":
        for source in mask.src:
            yield from _conjuncts(source)
    else:
        yield mask


# ---- tables


def _tables(k: Kernel, members: Members, shared: list[Expr], lane: Expr) -> None:
    """What depends on the vectorised loop alone is computed once, not again for every row."""
    w = k.w
    extent = ix.value_of(lane.src[0]) or 0
    few = hint_product(v.src[0] for v in shared) < 16
    if few or not 8 <= extent <= LONGEST_TABLE or cuts(members, lane):
        return
    for node in _worth_a_table(members, lane)[:MOST_TABLES]:
        low, high = ix.bounds(node) if node.dtype == INDEX else (0, 1 << 31)
        narrow = low >= -(1 << 31) and high < 1 << 31  # 32-bit positions can be gathered from
        name = w.fresh("table")
        w.line(f"alignas(64) {'int32_t' if narrow else CTYPE[node.dtype]} {name}[{extent}];")
        w.line("#pragma omp simd")
        with w.block(k.for_loop(lane)):
            w.line(f"{name}[{lane.arg}] = {w.value(node)};")
        w.know(node, f"int64_t({name}[{lane.arg}])" if narrow else f"{name}[{lane.arg}]")


def _worth_a_table(members: Members, lane: Expr) -> list[Expr]:
    """The largest expressions of the loop variable alone that cost more than reading memory: of
    places, and of elements that nobody here changes, as one over a channel's deviation (a batch
    norm and SiLU of 9.6 MB, one thread: 1.11 ms, 0.82 with a table; AVX512, 2026-11-19)."""
    roots = [e for m in members for e in m.exprs]
    only = frozenset((lane,))
    written = {s.buffer for m in members for s in m.stores}
    alone = {n for n in walk(*roots) if free_vars(n) == only and n.dtype != torch.bool
             and not uses_flag(n) and not any(r.arg in written or len(r.src) > 1 for r in loads(n))
             }  # fmt: skip
    needed = [s for n in walk(*roots) if n not in alone for s in n.src if s in alone]
    needed += [e for e in roots if e in alone]
    return [n for n in dict.fromkeys(needed) if _cost(n) >= TABLE_COST]


def _cost(e: Expr) -> int:
    return sum(TABLE[n.op].cost for n in walk(e) if n.op in TABLE)


# ---- transposed tiles


def _turned(members: Members, lane: Expr, u: Expr) -> list[Expr]:
    """Loads contiguous along `u` and not along the vectorised loop."""
    found: dict[Expr, None] = {}
    written = {s.buffer for m in members for s in m.stores}
    for m in members:
        for node in walk(*m.exprs):
            if node.op != "load" or len(node.src) == 2 or node.arg in written:
                continue
            along = ix.coefficient(node.src[0], lane)
            if along is None or along in (ix.ZERO, ix.ONE) or ix.bounds(along)[0] <= 1:
                continue
            if ix.coefficient(node.src[0], u) is ix.ONE:
                found[node] = None
    return list(found)


def _across(members: Members, shared: list[Expr], lane: Expr) -> Expr | None:
    """The loop to tile together with the vectorised one, if that pays."""
    if hint(lane.src[0]) < 8:
        return None
    wanted = [(len(_turned(members, lane, u)), u) for u in shared if hint(u.src[0]) >= 8]
    best = max(wanted, key=lambda p: p[0], default=(0, None))
    return best[1] if best[0] else None


def _transposed(k: Kernel, members: Members, shared: list[Expr], u: Expr, lane: Expr,
                parallel: bool) -> None:  # fmt: skip
    w = k.w
    k.headers.add("tw_tile.h")
    turned = _turned(members, lane, u)
    lanes, rows = w.index(lane.src[0]), w.index(u.src[0])
    heads = [k.for_loop(v) for v in shared if v is not u]
    heads.append(f"for (int64_t row = 0; row < {rows}; row += {TILE_ROWS})")
    heads.append(f"for (int64_t tile = 0; tile < {lanes}; tile += {TILE_LANES})")
    with ExitStack() as stack:
        k.open_loops(stack, heads, parallel)
        w.line(f"const int64_t us = {_rest(u, rows, 'row', TILE_ROWS)};")
        w.line(f"const int64_t ls = {_rest(lane, lanes, 'tile', TILE_LANES)};")
        corner = {u: var("row", u.src[0]), lane: var("tile", lane.src[0])}

        def turn(node: Expr, target: str, width: str) -> None:
            stride = ix.coefficient(node.src[0], lane)
            assert stride is not None
            source = k.element(node.arg, substitute(node.src[0], corner))
            w.line(f"tw::transpose_tile({target}, {width}, &{source}, {w.index(stride)}, us, ls);")

        copied = _copied(k, members, lane, turned)
        if copied is not None:
            width = ix.coefficient(copied.index, u)
            assert width is not None
            target = k.element(copied.buffer, substitute(copied.index, corner))
            turn(copied.value, f"&{target}", w.index(width))
            return
        names: dict[Expr, str] = {}
        for node in turned:
            names[node] = w.fresh("x")
            w.line(f"alignas(64) {memory_type(node.dtype)} "
                   f"{names[node]}[{TILE_ROWS * TILE_LANES}];")  # fmt: skip
            turn(node, names[node], str(TILE_LANES))
        with w.block("for (int64_t ku = 0; ku < us; ++ku)"):
            w.line(f"const int64_t {u.arg} = row + ku;")
            w.line(f"#pragma omp simd{k.flag_clause()}")
            with w.block("for (int64_t kl = 0; kl < ls; ++kl)"):
                w.line(f"const int64_t {lane.arg} = tile + kl;")
                for node, name in names.items():
                    text = f"{name}[ku*{TILE_LANES} + kl]"
                    w.know(node, f"({text} != 0)" if node.dtype == torch.bool else text)
                k.point(members)


def _rest(v: Expr, size: str, start: str, step: int) -> str:
    """The extent of a tile; a literal where all are whole."""
    if (ix.value_of(v.src[0]) or 1) % step == 0:
        return str(step)
    return f"{size} - {start} < {step} ? {size} - {start} : {step}"


def _copied(k: Kernel, members: Members, lane: Expr, turned: list[Expr]) -> Store | None:
    """The store of a kernel that only turns a tensor around, in memory of the same type."""
    stores = [s for m in members for s in m.stores]
    if len(stores) != 1 or turned != [stores[0].value]:
        return None
    (store,) = stores
    same = k.buffers[store.buffer].dtype == store.value.dtype
    return store if same and ix.coefficient(store.index, lane) is ix.ONE else None
