"""Which operations need not be exact, as what is seen of their results is rounded anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from tilewright.codegen.triton.analysis.quantise import is_moderate
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
from tilewright.ir.expr import Expr, walk

if TYPE_CHECKING:
    from tilewright.codegen.triton.plan.tiling import Shape


def may_convert(shape: Shape) -> bool:
    """Whether the card's own instruction may make eight-bit floats: not such as are stored in rows
    and in columns too. ptxas up to 12.9 then stores other bytes in one of them (H200, Triton 3.6: a
    quarter of 512x384; triton issue 11111), and does not where integers made the bytes."""
    stores = [s for s in shape.flat().stores if s.value.dtype in FP8]
    along = {frozenset(a.var for a in shape.axes if ix.coefficient(s.index, a.var) is ix.ONE)
             for s in stores}  # fmt: skip
    return len(along) < 2


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


def _adds_one(e: Expr) -> bool:
    return e.op in ("add", "sub") and any(s.is_const and abs(s.arg) == 1 for s in e.src)


def _is_power_of_minus(e: Expr, x: Expr) -> bool:
    """Whether this is `exp(-x) + 1`, which is as large as it is small."""
    powers = [s for s in e.src if s.op == "exp"] if _adds_one(e) and e.op == "add" else []
    return bool(powers) and powers[0].src[0].op == "neg" and powers[0].src[0].src[0] is x


def _is_sum(e: Expr) -> bool:
    return e.op == "reduce" and e.arg.kind == "sum"
