"""What a loop nest stores, as a value at a position: also where several stores make a tensor, each
a part of it. Two numbers of four bits come from one byte: what is unpacked is stored in parts
that lie between each other, or behind each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, loads, substitute, var, walk
from tilewright.ir.program import Store, View
from tilewright.schedule.nests.access import terms

Place = tuple[Expr, ...]
PARTS = (8, 4, 2)  # that an element of memory may be unpacked to


def value(stores: Sequence[Store], loops: Sequence[Expr], view: View, place: Place) -> Expr | None:
    """What these stores put at a position in the view, where they make all of it once."""
    if len(stores) == 1:
        where = solved(stores[0].index, loops, view, place)
        return None if where is None else substitute(stores[0].value, where)
    ordered = [(ix.value_of(ix.sub(s.index, stores[0].index)), s) for s in stores]
    known = sorted((at, k) for k, (at, _) in enumerate(ordered) if at is not None)
    if len(known) != len(stores):
        return None
    in_order = [stores[k] for _, k in known]
    starts = [at - known[0][0] for at, _ in known]
    for shape, where, which in _divided(view, place, len(stores), starts):
        found = [solved(ix.sub(s.index, at), loops, shape, where)
                 for s, at in zip(in_order, starts, strict=True)]  # fmt: skip
        if any(f is None for f in found):
            continue
        values = [substitute(s.value, f) for s, f in zip(in_order, found, strict=True) if f]
        made = values[-1]
        for k in reversed(range(len(values) - 1)):
            made = build.where(build.op("eq", which, const(k)), values[k], made)
        return made
    return None


def _divided(view: View, place: Place, count: int, starts: Sequence[int]
             ) -> Iterator[tuple[View, Place, Expr]]:  # fmt: skip
    """The view of the first of `count` parts that begin at `starts`, the position in a part, and
    the part's number."""
    for dim, (at, n, s) in enumerate(zip(place, view.size, view.stride, strict=True)):
        size, stride = ix.value_of(n), ix.value_of(s)
        if size is None or stride is None or size % count:
            continue
        each = size // count
        between = (stride, count * stride, ix.floordiv(at, count), ix.mod(at, count))
        behind = (each * stride, stride, ix.mod(at, each), ix.floordiv(at, each))
        for step, apart, inner, which in (between, behind):
            if list(starts) == [k * step for k in range(count)]:
                sizes, strides, inside = list(view.size), list(view.stride), list(place)
                sizes[dim], strides[dim], inside[dim] = const(each), const(apart), inner
                shape = replace(view, size=tuple(sizes), stride=tuple(strides))
                yield shape, tuple(inside), which


# ---- what is unpacked


def packed(value: Expr, loops: Sequence[Expr]) -> tuple[Expr, int] | None:
    """The loop along which neighbours are in one element of memory, and how many of them."""
    for v in loops:
        size = ix.value_of(v.src[0])
        found = [n.src[1].arg for n in walk(value)
                 if n.op == "imod" and n.src[0] is v and n.src[1].op == "const"]  # fmt: skip
        count = next((p for p in PARTS if p in found), None)
        if count is None or size is None or size % count:
            continue
        unit, values = unpacked(value, v, count)
        common = set[Expr].intersection(*(set(loads(part)) for part in values))
        if any(unit in free_vars(n) for n in common):
            return v, count
    return None


def unpacked(value: Expr, along: Expr, count: int) -> tuple[Expr, list[Expr]]:
    """A loop over the elements of memory, and the value of each of those that are in one."""
    u = var(f"{along.arg}{count}", ix.floordiv(along.src[0], count))
    return u, [substitute(value, {along: ix.add(ix.mul(u, count), k)}) for k in range(count)]


# ---- indices


def solved(index: Expr, loops: Sequence[Expr], view: View, place: Place
           ) -> dict[Expr, Expr] | None:  # fmt: skip
    """The loops in terms of a position in the view, where the index walks all of the view once."""
    found = terms(index, loops)
    if found is None or found[1] is not view.offset or len(found[0]) != len(loops):
        return None
    steps = found[0]
    dims = [(at, n, s) for at, n, s in zip(place, view.size, view.stride, strict=True)
            if n is not ix.ONE]  # fmt: skip
    for form in _merged(dims):
        where = _radix(steps, form)
        if where is not None:
            return where
    return None


Dim = tuple[Expr, Expr, Expr]  # (position, size, stride)


def _merged(dims: Sequence[Dim]) -> list[list[Dim]]:
    """The dimensions as they are, and with neighbours that are one in memory taken as one."""
    forms = [list(dims)]
    for k in range(len(dims) - 1):
        (at, n, s), (at2, n2, s2) = dims[k], dims[k + 1]
        if s is ix.mul(n2, s2):
            joined = (ix.add(ix.mul(at, n2), at2), ix.mul(n, n2), s2)
            forms += _merged([*dims[:k], joined, *dims[k + 2 :]])
    return forms


def _radix(steps: Mapping[Expr, Expr], dims: Sequence[Dim]) -> dict[Expr, Expr] | None:
    """Each loop as a digit of one dimension's position."""
    left = dict(steps)
    where: dict[Expr, Expr] = {}
    for at, size, stride in dims:
        below: Expr = ix.ONE
        while below is not size:
            v = next((v for v, s in left.items() if s is ix.mul(stride, below)), None)
            if v is None:
                return None
            del left[v]
            digit = ix.floordiv(at, below)
            below = ix.mul(below, v.src[0])
            where[v] = digit if below is size else ix.mod(digit, v.src[0])
            if _exceeds(below, size):
                return None
    return None if left else where


def _exceeds(a: Expr, b: Expr) -> bool:
    return a is not b and not ix.known_le(a, b)
