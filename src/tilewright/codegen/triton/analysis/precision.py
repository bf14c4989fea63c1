"""What is known of a group's expressions before its Triton kernel is written: which indices fit 32
bits, which operations need not be exact, which numbers are not only sizes, where stores may meet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from tilewright.codegen.triton.analysis.quantise import is_moderate
from tilewright.codegen.triton.tile.lower import is_index
from tilewright.codegen.triton.tile.ops import (
    BY_A_SUM,
    COARSE,
    ERF_BESIDE_ONE,
    FP8,
    PERIODIC,
    SILU,
    STEPS,
)
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, rewrite, walk
from tilewright.ir.ops import INDEX_OPS, TABLE
from tilewright.ir.program import Buffer, Nest, Store
from tilewright.runtime import HELPERS

if TYPE_CHECKING:
    from tilewright.codegen.triton.plan.tiling import Shape

LARGEST = 2**31 - 1
FEW = 8  # loads whose values a thread has room for


def may_convert(shape: Shape) -> bool:
    """Whether the card's own instruction may make eight-bit floats: not such as are stored in rows
    and in columns too. ptxas up to 12.9 then stores other bytes in one of them (H200, Triton 3.6: a
    quarter of 512x384; triton issue 11111), and does not where integers made the bytes."""
    stores = [s for m in shape.flat().members for s in m.stores if s.value.dtype in FP8]
    along = {frozenset(a.var for a in shape.axes if ix.coefficient(s.index, a.var) is ix.ONE)
             for s in stores}  # fmt: skip
    return len(along) < 2


def narrow(exprs: Sequence[Expr], extents: Sequence[Expr], buffers: Sequence[Buffer],
           largest: int) -> list[Expr] | None:  # fmt: skip
    """Numbers that must be below 2**31 at a call for 32-bit indices to do; None where they cannot.
    Lanes outside an axis go `largest` beyond its end. Places that were found before are folded as
    indices too, however few of them there are."""
    nodes = list(walk(*exprs))
    folded = [n.src[1] for n in nodes if n.op == "reduce" and n.arg.kind in ("argmin", "argmax")]
    extents = [*extents, *(n.src[1] for n in walk(*folded) if n.op == "index")]
    for e in [*extents, *(n for n in nodes if n.op in INDEX_OPS)]:
        low, high = ix.bounds(e)
        if (math.isfinite(high) and high + largest > LARGEST) or (
            math.isfinite(low) and low < -LARGEST
        ):
            return None
    spans = [span(b.size, b.stride) for b in buffers]
    assumed = [s for s in dict.fromkeys([*extents, *spans]) if ix.bounds(s)[1] + largest > LARGEST]
    return None if any(ix.value_of(s) is not None for s in assumed) else assumed


def coarse(exprs: Sequence[Expr], results: Sequence[Expr], made: Mapping[str, Expr]
           ) -> dict[Expr, str]:  # fmt: skip
    """The text of operations that need not be exact, as what is made of them is rounded to sixteen
    bits or less before it is a result, or part of one. `made` are the values of the buffers the
    kernel makes."""
    if not all(e.dtype.is_floating_point for e in results):
        return {}
    nodes = list(walk(*exprs))
    angles = [s for n in nodes if n.op in PERIODIC for s in n.src]
    exact = {s for n in nodes if _is_step(n) for s in n.src} | _in_full([*results, *angles], made)
    exact = exact - _only_summed(nodes, results, made) | _scaled_to_eight_bits(nodes, made)
    found = {n: COARSE[n.op] for n in nodes
             if n.op in COARSE and n.dtype == torch.float32 and n not in exact}  # fmt: skip
    alone = {s for n in nodes if not _adds_one(n) for s in n.src} | {*made.values(), *exprs}
    for n in found:
        if n.op == "erf" and n not in alone:
            found[n] = ERF_BESIDE_ONE
        elif n.op == "div" and _is_sum(made.get(n.src[1].arg, n.src[1])):
            found[n] = BY_A_SUM  # of a row: its reciprocal is computed once
        elif n.op == "div" and is_moderate(n.src[1], made):
            found[n] = BY_A_SUM
        elif n.op == "div" and _is_power_of_minus(n.src[1], n.src[0]):
            found[n] = SILU
    return found


def _scaled_to_eight_bits(nodes: Sequence[Expr], made: Mapping[str, Expr]) -> set[Expr]:
    """Quotients that are rounded to eight bits, or by which what is so was scaled: of numbers of
    sixteen bits one in a thousand lies halfway between two such, and the last bit decides."""
    waiting = [n.src[0] for n in nodes if n.op == "cast" and n.dtype in FP8]
    found: set[Expr] = set()
    while waiting:
        node = waiting.pop()
        node = made.get(node.arg, node) if node.op == "load" else node
        if node in found or node.op not in ("div", "mul", "min", "max"):
            continue
        found.add(node)
        waiting += node.src
    return {n for n in found if n.op == "div"}


def _only_summed(nodes: Sequence[Expr], results: Sequence[Expr], made: Mapping[str, Expr]
                 ) -> set[Expr]:  # fmt: skip
    """Exponentials relative to the largest of a row that nothing but their sum is made of: an error
    of a millionth in proportion to what is left to the largest does not show in it (H200: cross
    entropy of 482408 rows of 160 bfloat16 86 us, 117 us exact)."""

    def value(e: Expr) -> Expr:
        return made.get(e.arg, e) if e.op == "load" else e

    def is_largest(e: Expr) -> bool:
        e = value(e)
        return (e.op == "reduce" and e.arg.kind == "max") or (
            e.op == "where" and any(is_largest(s) for s in e.src[1:]))  # fmt: skip

    summed = {value(n.src[0]) for n in nodes if _is_sum(n)}
    else_used = {value(s) for n in nodes if not _is_sum(n) for s in n.src}
    return {
        e for e in summed - else_used - {value(r) for r in results}
        if e.op == "exp" and e.src[0].op == "sub" and is_largest(e.src[0].src[1])
    }  # fmt: skip


def _in_full(results: Sequence[Expr], made: Mapping[str, Expr]) -> set[Expr]:
    """All that is part of a result and not rounded to sixteen bits on the way: sums of rounded
    gradients are floats, and yet nobody sees more of these (H200: the backward pass of a gelu with
    a bias, 267421 rows of 512 bfloat16, 235 us, 340 us with all bits)."""
    found: set[Expr] = set()
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        node = made.get(node.arg, node) if node.op == "load" else node
        if node not in found and not _are_narrow({node.dtype}):
            found.add(node)
            waiting += node.src
    return found


def joins(exprs: Sequence[Expr], results: set[torch.dtype]) -> bool:
    """Whether products and sums may be rounded as one: nobody can see it in results of these types
    (H200: group norm of 512 rows of 65536 bfloat16 43.8 us, 44.8 us)."""
    steps = [n for n in walk(*exprs) if _is_step(n)]
    return _are_narrow(results) and not any(_is_joined(n) for n in walk(*steps))


def _is_joined(e: Expr) -> bool:
    """Whether one instruction could do for a product and a sum here."""
    return e.op == "reduce" or (e.op in ("add", "sub") and any(s.op == "mul" for s in e.src))


def _are_narrow(results: set[torch.dtype]) -> bool:
    return all(d.is_floating_point and d.itemsize <= 2 for d in results)


def _is_step(e: Expr) -> bool:
    return e.op in STEPS or (e.op == "cast" and not e.dtype.is_floating_point)


def early_loads(shape: Shape, local: frozenset[str]) -> list[Expr]:
    """What is loaded for a row as a whole and waits for no fold: under way before the row is
    walked, or a kernel of many rows would wait for it once for each. Where nothing is folded, all
    of few loads: none of them stays behind a store, which might be to the same memory for all that
    a compiler knows."""
    alone = [m for s, axis in shape.segments if axis is None for m in s.members]
    found = loads(*(e for m in alone for e in m.exprs))
    results = [s for m in alone for s in m.stores if s.buffer not in local]
    if shape.looked_up and not shape.serial:
        several = len(results) > 1 and any(n.op == "index" for s in results for n in walk(s.index))
        return first(shape, _beside_looked_up(shape, found, several))
    waits = len(results) > 1 and len(found) <= FEW and not shape.looked_up
    if shape.serial or not (shape.inner or waits):
        return []
    return first(shape, [*found, *(e for e in _own_rows(shape) if e not in found)])


def _beside_looked_up(shape: Shape, found: Sequence[Expr], several: bool) -> list[Expr]:
    """What does not wait for what is looked up, places first (H200: 256 pairs of images of 65536
    floats, each pair in the parts of a step that is looked up, 47.6 us, 48.4 us). Where only stores
    go to such places, if there are `several`."""
    plain = [e for e in found if not any(n.op == "index" for n in walk(e))]
    seldom = any(s.mask is not None for m in shape.members for s in m.stores)
    if (len(plain) == len(found) and not several) or len(plain) > FEW or seldom:
        return []
    return sorted(plain, key=lambda e: shape.parallel[-1].var in free_vars(e))


def first(shape: Shape, found: Sequence[Expr]) -> list[Expr]:
    """Those loads that neither a fold nor a store has to come before."""
    made = frozenset[str]().union(*(m.writes for m in shape.members))
    return [e for e in found
            if not any(n.op in ("reduce", "scan") or n.arg in made for n in walk(e))]  # fmt: skip


def _own_rows(shape: Shape) -> list[Expr]:
    """What is loaded for several folds of a row: the second tensor of two does not wait for the
    first one's fold (H200: cosine similarity of 16384 rows of 4096 bfloat16 61 us, 81 us). Where
    folds read nothing but rows of all programs, what is read after them, or nothing comes from
    memory until then (the gradient of a supervised contrast of 8192x8192 bfloat16, in which labels
    are compared and counted first, 122 us, 139 us). What is the same for all rows comes from the
    cache soon enough, and would take registers until it is used (its forward pass 155 us with
    labels loaded where they are compared, 179 us before the largest value is found)."""
    moved = any(a.lean is not None or a.piece for a in shape.inner)
    if not shape.persistent or shape.held or shape.packed or shape.odd or moved:
        return []
    own = {v for axis in shape.inner for v in axis.loops}
    many = any(axis.likely > 1 for axis in shape.parallel)

    def along(members: Iterable[Nest]) -> list[Expr]:
        found = loads(*(e for m in members for e in m.exprs))
        plain = (e for e in found if not any(n.op == "index" for n in walk(e)))
        return [e for e in plain if own & free_vars(e.src[0])]

    def is_own(e: Expr) -> bool:
        return not many or not free_vars(e.src[0]) <= own

    folded = along(m for m in shape.members if m.reduce)
    late = folded and not any(is_own(e) for e in folded)
    return [e for e in (along(shape.members) if late else folded) if is_own(e)]


def imports(lines: Sequence[str]) -> list[str]:
    body = "\n".join(lines)
    helpers = [name for name in HELPERS if re.search(rf"\b{name}\.", body)]
    found = ["import triton", "import triton.language as tl"]
    if "libdevice." in body:
        found.append("from triton.language.extra import libdevice")
    if helpers:
        found.append(f"from tilewright.runtime import {', '.join(helpers)}")
    return found


def valued(exprs: Sequence[Expr], stores: Sequence[Store]) -> frozenset[Expr]:
    """Symbols that are numbers of the program, such as seeds, and not only sizes."""
    found: set[Expr] = set()
    for node in walk(*exprs):
        if node.op == "load":
            operands = node.src[1:]
        elif node.op == "index":
            operands = node.src[:1]
        elif node.op not in TABLE or (TABLE[node.op].result == "bool" and all(
            is_index(s) or s.is_const for s in node.src
        )):  # fmt: skip
            continue  # index arithmetic, or a comparison of indices
        else:
            operands = node.src
        found |= {s for s in operands if s.op == "sym"}
    found |= {s.value for s in stores if s.value.op == "sym"}
    return frozenset(found)


def positions(members: Sequence[Nest]) -> dict[str, int]:
    """Buffers of numbers that are positions and nothing else, and likely how many places there
    are."""
    found: dict[str, int] = {}
    exprs = [e for m in members for e in m.exprs]
    for node in walk(*exprs):
        if node.op == "index":
            size = ix.likely(node.src[1])
            for n in loads(node.src[0]):
                found[n.arg] = min(size, found.get(n.arg, size))
    plain = [rewrite(e, lambda node, src: ix.ZERO if node.op == "index" else None) for e in exprs]
    for n in loads(*plain):
        found.pop(n.arg, None)
    return found


def meeting(members: Sequence[Nest], buffers: Mapping[str, Buffer]) -> dict[str, str]:
    """Buffers that stores may meet in, as they go to positions that were read, and how they combine
    where what they leave depends on which comes first."""
    stores = [s for m in members for s in m.stores if any(n.op == "index" for n in walk(s.index))]
    return {s.buffer: s.mode for s in stores if s.mode == "set" or (
        s.mode in ("add", "mul") and buffers[s.buffer].dtype.is_floating_point)}  # fmt: skip


def _adds_one(e: Expr) -> bool:
    return e.op in ("add", "sub") and any(s.is_const and abs(s.arg) == 1 for s in e.src)


def _is_power_of_minus(e: Expr, x: Expr) -> bool:
    """Whether this is `exp(-x) + 1`, which is as large as it is small."""
    powers = [s for s in e.src if s.op == "exp"] if _adds_one(e) and e.op == "add" else []
    return bool(powers) and powers[0].src[0].op == "neg" and powers[0].src[0].src[0] is x


def _is_sum(e: Expr) -> bool:
    return e.op == "reduce" and e.arg.kind == "sum"


def span(size: Sequence[Expr], stride: Sequence[Expr]) -> Expr:
    return ix.add(1, *(ix.mul(ix.sub(n, 1), s) for n, s in zip(size, stride, strict=True)))
