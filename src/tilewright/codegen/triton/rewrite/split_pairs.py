"""Loops over two points whose places lie beside each other on one side alone, in what is read or in
what is stored, as two stores: what is beside each other is then moved as one
(`tile/interleaved.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, rewrite, walk
from tilewright.ir.program import Nest
from tilewright.schedule.nests.transform import (
    drop_masks,
    plainly,
    read_everywhere,
    substitute_nest,
)


def split_pairs(members: list[Nest], outer: tuple[Expr, ...]
                  ) -> tuple[list[Nest], tuple[Expr, ...]]:  # fmt: skip
    """The members and their loops without such a loop, if there is one."""
    if len(members) != 1 or len(outer) < 2:
        return members, outer
    (nest,) = members
    if nest.reduce or any(s.mode != "set" or s.mask is not None or s.buffer in nest.reads
                          for s in nest.stores):  # fmt: skip
        return members, outer
    for pair in reversed(outer):
        loops = tuple(v for v in nest.loops if v is not pair)
        if ix.value_of(pair.src[0]) != 2 or len(loops) != len(outer) - 1:
            continue
        last = pair is outer[-1]
        if (_is_put_together if last else _is_taken_apart)(nest, pair):
            return [_in_two(nest, pair, loops)], tuple(v for v in outer if v is not pair)
    return members, outer


def _is_put_together(nest: Nest, pair: Expr) -> bool:
    """Whether the points are stored beside each other, but lie apart in what is read, or are not
    made alike."""
    compared = (n for n in walk(*nest.exprs) if n.op in ("lt", "ge"))
    return _are_beside([s.index for s in nest.stores], pair) and (
        any(ix.coefficient(i, pair) is not ix.ONE for i in _read(nest, pair))
        or any(free_vars(n) == frozenset((pair,)) for n in compared))  # fmt: skip


def _is_taken_apart(nest: Nest, pair: Expr) -> bool:
    """Whether the points are read beside each other, but stored apart, sixteen bytes or more."""
    return _are_beside(_read(nest, pair), pair) and all(
        ix.mod(ix.coefficient(s.index, pair) or ix.ONE, 8) is ix.ZERO for s in nest.stores
    )


def _read(nest: Nest, pair: Expr) -> list[Expr]:
    return [n.src[0] for n in loads(*nest.exprs) if pair in free_vars(n.src[0])]


def _are_beside(places: Sequence[Expr], pair: Expr) -> bool:
    """Whether the two points of a loop are neighbours, the first of them at even places."""
    return bool(places) and all(ix.mod(ix.sub(i, pair), 2) is ix.ZERO for i in places)


def _in_two(nest: Nest, pair: Expr, loops: tuple[Expr, ...]) -> Nest:
    parts = (drop_masks(substitute_nest(nest, {pair: ix.as_index(k)}, loops, ())) for k in (0, 1))
    stores = tuple(replace(s, value=rewrite(s.value, plainly)) for m in parts for s in m.stores)
    return read_everywhere(replace(nest, loops=loops, stores=stores))
