"""Functions of functions that are less work as one, and what need not be exact as it is only part
of sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tilewright.codegen.triton.tile.ops import COARSE
from tilewright.ir.expr import Expr, walk

# What is part of a sum as these are, by position: no error grows in them that is not eager's too.
_PARTS = {"add": {0, 1}, "sub": {0, 1}, "mul": {0, 1}, "neg": {0}, "where": {1, 2}, "div": {0}}


def functions(exprs: Sequence[Expr], results: Sequence[Expr], made: Mapping[str, Expr],
              coarse: Mapping[Expr, str]) -> dict[Expr, tuple[str, Expr]]:  # fmt: skip
    """Their text, and what they take."""
    found: dict[Expr, tuple[str, Expr]] = {}
    nodes = list(walk(*exprs))
    terms = _terms(exprs, results, made)
    alone = {s for n in nodes if not _adds_one(n) for s in n.src} | {*made.values(), *exprs}
    for n in nodes:
        inner = n.src[0] if n.op == "tanh" else n
        if n.dtype == torch.float32 and inner.op == "log1p" and inner.src[0].op == "exp":
            y = inner.src[0].src[0]
            kind = "fast_" if n in coarse else "summed_" if n in terms else ""
            name = "log1p_power" if y.op == "neg" and y.src[0].op == "abs" else "softplus"
            if n.op == "tanh":
                kind, name = kind.replace("summed_", ""), "tanh_softplus"
            found[n] = f"tri_maths.{kind}{name}({{0}})", y
        elif n.op == "tanh" and n in coarse and n not in alone:
            found[n] = "tri.tanh_beside_one({0})", n.src[0]
    return found


def divisions(exprs: Sequence[Expr], results: Sequence[Expr], made: Mapping[str, Expr]
              ) -> dict[Expr, str]:  # fmt: skip
    """Quotients that are only part of sums (H200: cosine similarity of 16384 rows of 4096 bfloat16
    61 us, 81 us exact)."""
    return {n: COARSE["div"] for n in _terms(exprs, results, made)
            if n.op == "div" and n.dtype == torch.float32}  # fmt: skip


def shares(exprs: Sequence[Expr], made: Mapping[str, Expr]) -> frozenset[Expr]:
    """Exponentials relative to the largest of a row over their sum: softmax."""

    def value(e: Expr) -> Expr:
        return made.get(e.arg, e) if e.op == "load" else e

    def is_share(n: Expr) -> bool:
        a, b = (value(s) for s in n.src)
        if b.op != "reduce" or b.arg.kind != "sum" or value(b.src[0]) is not a or a.op != "exp":
            return False
        top = value(a.src[0].src[1]) if a.src[0].op == "sub" else a
        return top.op == "reduce" and top.arg.kind == "max" and (
            value(top.src[0]) is value(a.src[0].src[0]))  # fmt: skip

    return frozenset(n for n in walk(*exprs) if n.op == "div" and is_share(n))


def _terms(exprs: Sequence[Expr], results: Sequence[Expr], made: Mapping[str, Expr]) -> set[Expr]:
    """Numbers that nobody sees but as part of a sum: there, an error in the last bits of one is no
    more than those of the additions. `made` are the values of the buffers the kernel makes."""
    local = set(made.values()) - set(results)
    waiting = [(e, False) for e in exprs if e not in local]
    seen, terms = set[Expr](), set[Expr]()
    while waiting:
        node, is_term = waiting.pop()
        node = made.get(node.arg, node) if node.op == "load" else node
        if node in (terms if is_term else seen):
            continue
        (terms if is_term else seen).add(node)
        if not is_term:
            own = {0} if node.op == "reduce" and node.arg.kind == "sum" else set[int]()
        else:
            own = _PARTS.get(node.op, set[int]())
        waiting += [(s, k in own) for k, s in enumerate(node.src)]
    return terms - seen


def _adds_one(e: Expr) -> bool:
    return e.op in ("add", "sub") and any(s.is_const and abs(s.arg) == 1 for s in e.src)
