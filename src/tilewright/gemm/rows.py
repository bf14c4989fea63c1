"""Norms in front of a product, computed by the product: what is reduced over a row of its left
operand, and what becomes of the row then, is done where the row is read, and nothing is stored.

There are two ways, and both are expressions:

- The row is walked first. The operand's value has `reduce` nodes whose values walk a loop of their
  own, `row`, over all of k. What is computed is what the kernel in front would have stored.
- The row is scaled last. Where an element is a product with a number of its row, as in an RMS norm,
  that number can wait (`GemmProblem.factor`): the sums it is made of are taken while k is walked,
  of what is loaded anyway. The operand is then rounded before it is scaled and not after.

A program walks all of its rows, however many programs have the same ones: it is for few rows, of
which a kernel in front takes longer to start than to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tilewright.gemm import parts
from tilewright.gemm.problem import GemmProblem, Op
from tilewright.ir import build
from tilewright.ir.expr import Expr, const, free_vars, rebuild, rewrite, substitute, walk
from tilewright.ir.program import Nest, Store
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import is_alone

OPS: tuple[Op, ...] = ("mm", "addmm", "mm_pair", "_weight_int8pack_mm", "_weight_int4pack_mm")
KINDS = frozenset(("sum", "max", "min", "welford"))
MOST_WALKED = 64  # rows of a product whose programs walk them first
MOST_SCALED = 512  # and of one that scales them last: what is computed for each tile is little
SCALED_LAST = (torch.bfloat16, torch.float32)  # float16 may be too small for rows as they are


def value(groups: Sequence[Group], problem: GemmProblem) -> Expr | str:
    """The left operand at its position, of what is in memory before the groups run, or why not.
    The last of them makes it, and nobody else needs what the others make."""
    operand, last = problem.operands[0], groups[-1]
    if last.writes - last.local != {operand.view.buffer}:
        return "it makes more than this operand"
    reason = next((r for r in (_refused(g, problem) for g in groups) if r), "")
    if reason:
        return reason
    members = [m for g in groups for m in g.members]
    found = _inlined(members, operand.view.buffer, problem)
    if isinstance(found, str):
        return found
    store, loops = found
    where = parts.solved(store.index, loops, operand.view, problem.positions[0])
    if where is None:
        return "its loops are not those of the operand"
    result = substitute(store.value, where)
    for node in walk(result):
        if node.op == "reduce" and not free_vars(node) <= {problem.m, problem.row}:
            return "it reduces over other than its rows"
    return result


def _refused(group: Group, problem: GemmProblem) -> str:
    if problem.op not in OPS:
        return f"no template of {problem.op} reduces rows"
    if problem.hints[1] > MOST_SCALED:
        return "it reduces, and rows are many: what it takes is little beside the product"
    if group.when is not None or group.call is not None or group.parts or group.serial:
        return "it is not a single loop nest"
    for m in group.members:
        if "scan" in m.ops or "index" in m.ops:
            return "it scans, or checks indices"
        if is_alone(m):
            return is_alone(m)
        if any(s.mode != "set" or s.mask is not None for s in m.stores):
            return "it stores parts of what it makes"
        if any(n.arg.kind not in KINDS for n in walk(*m.exprs) if n.op == "reduce"):
            return "it reduces in a way that no template does"
    return ""


def _inlined(members: Sequence[Nest], buffer: str, problem: GemmProblem
             ) -> tuple[Store, Sequence[Expr]] | str:  # fmt: skip
    """The store of the operand, and the loops it is in. What is reduced walks `row`."""
    made: dict[str, tuple[Expr, Expr]] = {}
    found: tuple[Store, Sequence[Expr]] | None = None
    for m in members:
        if m.reduce and [v.src[0] for v in m.reduce] != [problem.k.src[0]]:
            return "it reduces over other than its rows"
        bound = dict.fromkeys(m.reduce, problem.row)
        for s in m.stores:
            value = _in_terms_of(made, s.value)
            if value is None:
                return "it reads other points of what it computes"
            value = _bound(value, bound)
            made[s.buffer] = s.index, value
            if s.buffer == buffer:
                found = replace(s, value=value), m.loops
    return found or "it makes more than this operand"


def _in_terms_of(made: dict[str, tuple[Expr, Expr]], value: Expr) -> Expr | None:
    """With what was made in place of its loads, where each is of the point at hand."""
    if any(made[n.arg][0] is not n.src[0] or len(n.src) > 1
           for n in walk(value) if n.op == "load" and n.arg in made):  # fmt: skip
        return None
    return rewrite(value, lambda node, _: made[node.arg][1]
                   if node.op == "load" and node.arg in made else None)  # fmt: skip


def _bound(value: Expr, to: dict[Expr, Expr]) -> Expr:
    """What is reduced, over another loop."""
    folds = {n: substitute(n, to) for n in walk(value) if n.op == "reduce"} if to else {}
    return substitute(value, folds) if folds else value


# ---- what can wait


def factored(problem: GemmProblem, value: Expr) -> tuple[Expr, Expr] | str:
    """An element without a factor that its row has in common, and that factor, whose sums are over
    the problem's own k; or why there is none."""
    if value.dtype not in SCALED_LAST:
        return f"rows of {value.dtype} are not scaled last: what they are before may be too large"
    rest, factor = _apart(problem, value) or (value, None)
    if factor is None:
        return "its elements are no products with a number of their row"
    folds = [n for n in walk(factor) if n.op == "reduce"]
    if any(n.arg.kind != "sum" or any(i.op == "reduce" for i in walk(*n.src)) for n in folds):
        return "its rows are not reduced by sums alone"
    at = {problem.row: problem.positions[0][1]}
    return rest, substitute(factor, at)


def _apart(problem: GemmProblem, e: Expr) -> tuple[Expr, Expr | None] | None:
    if not any(n.op == "reduce" for n in walk(e)):
        return e, None
    if problem.k not in free_vars(e):
        return const(1.0, e.dtype), build.cast(e, torch.float32)
    of = [_apart(problem, s) for s in e.src]
    if e.op not in ("cast", "neg", "mul", "div") or not e.dtype.is_floating_point:
        return None
    if any(o is None or not o[0].dtype.is_floating_point for o in of):
        return None
    rests, factors = zip(*(o for o in of if o is not None), strict=True)
    rest = rebuild(e, rests)
    if e.op in ("mul", "div") and None not in factors:
        return rest, build.op(e.op, *factors)
    if e.op == "div" and factors[0] is None:
        return rest, build.op("div", const(1.0, torch.float32), factors[1])
    return rest, next(f for f in factors if f is not None)


__all__ = ["MOST_SCALED", "MOST_WALKED", "factored", "value"]
