"""Transformations of a loop nest. Each returns a new nest that computes the same."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import (
    INDEX,
    Expr,
    const,
    free_vars,
    load,
    loads,
    rewrite,
    substitute,
    var,
    walk,
)
from tilewright.ir.program import Nest, Store


def substitute_nest(nest: Nest, mapping: Mapping[Expr, Expr], loops: Sequence[Expr],
                    reduce: Sequence[Expr]) -> Nest:  # fmt: skip
    """The nest over other loops: `mapping` says what each old variable is in terms of the new."""

    def swap(store: Store) -> Store:
        mask = None if store.mask is None else substitute(store.mask, mapping)
        return replace(store, index=substitute(store.index, mapping),
                       value=substitute(store.value, mapping), mask=mask)  # fmt: skip

    return replace(nest, loops=tuple(loops), reduce=tuple(reduce),
                   stores=tuple(swap(s) for s in nest.stores))  # fmt: skip


def rename(nest: Nest, names: Mapping[Expr, Expr]) -> Nest:
    """Variables replaced by variables of the same size."""
    names = {v: u for v, u in names.items() if v is not u}
    if not names.keys() & {*nest.loops, *nest.reduce}:
        return nest
    return _renamed(nest, tuple(names.items()))


@functools.lru_cache(1 << 10)  # each way to run groups together asks for the same names
def _renamed(nest: Nest, names: tuple[tuple[Expr, Expr], ...]) -> Nest:
    to = dict(names)
    return substitute_nest(nest, to, [to.get(v, v) for v in nest.loops],
                           [to.get(v, v) for v in nest.reduce])  # fmt: skip


def halves(v: Expr, inner: Expr, loops: Iterable[Expr]) -> tuple[Expr, Expr]:
    """Two loops for `v`, the inner of extent `inner`, which divides its size; called as none of
    `loops` is."""
    taken = {u.arg for u in loops}
    outer = ix.floordiv(v.src[0], inner)
    return var(unused(f"{v.arg}o", taken), outer), var(unused(f"{v.arg}i", taken), inner)


def unused(name: str, taken: Container[str]) -> str:
    """The name, or one like it that is not taken."""
    others = (f"{name}_{k}" for k in itertools.count(1))
    return next(n for n in itertools.chain([name], others) if n not in taken)


def split(nest: Nest, v: Expr, high: Expr, low: Expr) -> Nest:
    """Loop `v` as the two `halves` of it."""
    mapping = {v: ix.add(ix.mul(high, low.src[0]), low)}

    def spread(vs: Sequence[Expr]) -> list[Expr]:
        return [w for u in vs for w in ((high, low) if u is v else (u,))]

    return substitute_nest(nest, mapping, spread(nest.loops), spread(nest.reduce))


def split_divisions(nest: Nest) -> Nest:
    """Split loops so that quotients and remainders by literal factors of their sizes vanish.

    A reshape that merges dimensions reads `x[v // 8, v % 8]`; over two loops that is affine again,
    which vectorises and can be matched with other nests.
    """
    for _ in range(8):
        found = _division(nest)
        if found is None:
            return nest
        v, inner = found
        nest = split(nest, v, *halves(v, inner, (*nest.loops, *nest.reduce)))
    return nest


def _division(nest: Nest) -> tuple[Expr, Expr] | None:
    candidates: list[tuple[int, Expr, Expr]] = []
    if not nest.ops & {"ifloordiv", "imod"}:
        return None
    mine = set(nest.loops) | set(nest.reduce)
    for node in walk(*nest.exprs):
        if node.op not in ("ifloordiv", "imod"):
            continue
        inside, divisor = node.src
        extent = ix.value_of(divisor)
        if inside not in mine or extent is None:
            continue
        size = ix.value_of(inside.src[0])
        if size is not None and 1 < extent < size and size % extent == 0:
            candidates.append((extent, inside, divisor))
    if not candidates or _scans(nest):
        return None
    _, v, divisor = min(candidates, key=lambda c: (c[0], c[1].arg))
    return v, divisor


def _scans(nest: Nest) -> bool:
    return "scan" in nest.ops


def merge(nests: Sequence[Nest], outer: Expr, inner: Expr, compared: bool = False
          ) -> tuple[list[Nest], Expr] | None:  # fmt: skip
    """Two loops, the second directly inside the first, as one; None if an index would need `//`.
    What is `compared` with the first may be compared with both."""
    if inner.src[0] is ix.ZERO or outer.src[0] is ix.ZERO:
        return None
    if any(_walks_apart(i, outer, inner) for nest in nests for i in _indices(nest)):
        return None  # the common case, told without substituting
    joined = var(f"{outer.arg}{inner.arg}", ix.mul(outer.src[0], inner.src[0]))
    mapping = {outer: ix.floordiv(joined, inner.src[0]), inner: ix.mod(joined, inner.src[0])}
    merged: list[Nest] = []
    for nest in nests:
        present = [outer in (*nest.loops, *nest.reduce), inner in (*nest.loops, *nest.reduce)]
        if not any(present):
            merged.append(nest)
            continue
        if not all(present):
            return None

        def join(vs: Sequence[Expr]) -> list[Expr]:
            return [joined if v is outer else v for v in vs if v is not inner]

        new = substitute_nest(nest, mapping, join(nest.loops), join(nest.reduce))
        if compared:
            new = replace_exprs(new, lambda e: rewrite(e, _undivided))
        if any(n.op in ("ifloordiv", "imod") and joined in free_vars(n) and n not in _before(nest)
               for n in walk(*new.exprs)):  # fmt: skip
            return None
        merged.append(new)
    return merged, joined


def _undivided(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
    """`x // n + k < b` is `x < (b - k) * n`."""
    if node.op not in ("lt", "ge") or src[0].dtype != INDEX or not src[1].is_const:
        return None
    terms = dict(ix.poly(src[0]))
    more = terms.pop((), 0)
    if len(terms) != 1:
        return None
    ((quotient, *others), factor), *_ = terms.items()
    if others or factor != 1 or quotient.op != "ifloordiv":
        return None
    x, n = quotient.src
    if not n.is_const or n.arg <= 0:
        return None
    return build.op(node.op, x, ix.mul(n, src[1].arg - more))


def _indices(nest: Nest) -> Iterator[Expr]:
    yield from (store.index for store in nest.stores)
    yield from (node.src[0] for node in loads(*nest.exprs))


def _walks_apart(index: Expr, outer: Expr, inner: Expr) -> bool:
    """Whether an affine index steps over the two loops other than as over one."""
    step, stride = ix.coefficient(index, outer), ix.coefficient(index, inner)
    return None not in (step, stride) and step is not ix.mul(stride or 0, inner.src[0])


def _before(nest: Nest) -> set[Expr]:
    return {n for n in walk(*nest.exprs) if n.op in ("ifloordiv", "imod")}


def reduces_or_scans(nest: Nest, op: str) -> bool:
    return op in nest.ops


def replace_exprs(nest: Nest, change: Callable[[Expr], Expr]) -> Nest:
    """Every index, value and mask of the nest changed."""

    def swap(store: Store) -> Store:
        mask = None if store.mask is None else change(store.mask)
        return replace(store, index=change(store.index), value=change(store.value), mask=mask)

    return replace(nest, stores=tuple(swap(s) for s in nest.stores))


def drop_masks(nest: Nest) -> Nest:
    """Loads whose mask has become a literal: plain where it holds, zero where it does not."""

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if node.op != "load" or len(src) == 1 or not src[1].is_const:
            return None
        return load(node.arg, node.dtype, src[0]) if src[1].arg else const(0, node.dtype)

    return replace_exprs(nest, lambda e: rewrite(e, rule))


def plainly(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
    """A comparison of places of a piece as one of pieces: `8 * q - 3 >= 0` is `q >= 1`, as is that
    of all that lies right before a piece. What is read everywhere has no mask."""
    if node.op == "load" and src[1:] == (build.TRUE,):
        return load(node.arg, node.dtype, src[0])
    if node.op not in ("ge", "lt") or src[0].dtype != INDEX or not src[1].is_const:
        return None
    terms = dict(ix.poly(ix.sub(*src)))
    least = -terms.pop((), 0)
    by = math.gcd(*terms.values()) if terms else 1
    whole = ix.from_poly({m: c // by for m, c in terms.items()})
    return build.op(node.op, whole, ix.as_index(-(-least // by)))


def read_everywhere(nest: Nest) -> Nest:
    """What is read here where a comparison holds, and there where it does not, has no mask."""
    masks: dict[tuple[str, Expr], set[Expr]] = {}
    for n in loads(*nest.exprs):
        if len(n.src) > 1:
            masks.setdefault((n.arg, n.src[0]), set()).add(n.src[1])
    whole = {place for place, found in masks.items()
             if any(m.op == "lt" and build.op("ge", *m.src) in found for m in found)}  # fmt: skip

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        plain = node.op == "load" and (node.arg, node.src[0]) in whole
        return load(node.arg, node.dtype, src[0]) if plain else None

    return replace_exprs(nest, lambda e: rewrite(e, rule)) if whole else nest


def unroll(nest: Nest, v: Expr) -> Nest:
    """A short loop written out: one store per value of its variable."""
    count = ix.value_of(v.src[0])
    assert count is not None
    copies = [drop_masks(substitute_nest(nest, {v: ix.as_index(k)},
                                         [u for u in nest.loops if u is not v], nest.reduce))
              for k in range(count)]  # fmt: skip
    return replace(copies[0], stores=tuple(s for copy in copies for s in copy.stores))


def cut_points(nest: Nest, v: Expr) -> list[Expr]:
    """Where along `v` a comparison of it changes, in order; none where the order is not known."""
    found: list[Expr] = []
    for node in walk(*nest.exprs) if nest.ops & {"lt", "ge"} else ():
        if node.op not in ("lt", "ge") or node.src[0].dtype != v.dtype:
            continue
        p = ix.poly(ix.sub(*node.src))
        slope = p.get((v,), 0)
        rest = ix.from_poly({m: c for m, c in p.items() if m != (v,)})
        if abs(slope) != 1 or free_vars(rest) or loads(rest):
            continue
        point = ix.neg(rest) if slope == 1 else ix.add(rest, 1)
        if point in found or not (ix.known_lt(0, point) and ix.known_lt(point, v.src[0])):
            continue
        after = next((k for k, other in enumerate(found) if ix.known_lt(point, other)), len(found))
        if not all(ix.known_lt(other, point) for other in found[:after]):
            return []
        found.insert(after, point)
    return found


def cuts(nests: Sequence[Nest], v: Expr) -> list[int]:
    """Where along `v` a comparison of it with a literal changes, in order."""
    extent = ix.value_of(v.src[0])
    found: set[int] = set()
    for nest in nests:
        for node in walk(*nest.exprs):
            if node.op in ("lt", "ge") and node.src[0].dtype == v.dtype:
                found.update(_changes(node, v))
    return sorted(c for c in found if extent is not None and 0 < c < extent)


def _changes(comparison: Expr, v: Expr) -> tuple[int, ...]:
    """The first `v` on the other side of `slope*v + rest < 0`."""
    p = ix.poly(ix.sub(*comparison.src))
    slope, rest = p.get((v,), 0), p.get((), 0)
    if not slope or set(p) - {(v,), ()}:
        return ()
    return (-(rest // slope),) if slope > 0 else (rest // -slope + 1,)
