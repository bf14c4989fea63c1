"""Loads that are the same all along a row, or in all rounds of a loop, but for their masks.

What is guarded by a comparison of two loops, as the upper triangle of a matrix of pairs, is loaded
only where it holds. A side of the pair has few elements, and with a mask of both sides it is loaded
for each pair: without one it is loaded once (H200: decays of 16 x 2000 x 2000 pairs of boxes
1027 us with masks).
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.triton.analysis.index_width import span
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, load, loads, rewrite, walk
from tilewright.ir.program import Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.nests.transform import replace_exprs


def unmask_loads(program: Program, group: Group) -> Group:
    """A group that reduces, with such loads made everywhere, and zero where their masks say so."""
    if not any(m.reduce for m in group.members):
        return group
    shared = frozenset(group.outer)

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if node.op == "where":
            return build.where(src[0], _where_it_holds(src[1], src[0]), src[2])
        if node.op != "load" or len(src) == 1:
            return None
        index, mask = src
        same_along = free_vars(mask) - free_vars(index) - shared
        if not same_along or loads(index) or not _is_inside(program, node.arg, index):
            return None
        return build.where(mask, load(node.arg, node.dtype, index), const(0, node.dtype))

    members = (replace_exprs(m, lambda e: rewrite(e, rule)) for m in group.members)
    return replace(group, members=tuple(members))


def _where_it_holds(value: Expr, condition: Expr) -> Expr:
    """What is chosen under a condition, with loads as they are that are chosen under the same."""
    if any(n.op in ("index", "reduce", "scan") for n in walk(value)):
        return value  # a place has to be one everywhere

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        plain = node.op == "where" and src[1].op == "load" and len(src[1].src) == 1
        return src[1] if plain and src[0] is condition else None

    return rewrite(value, rule)


def _is_inside(program: Program, buffer: str, index: Expr) -> bool:
    found = program.buffers[buffer]
    end = span(found.size, found.stride)
    return ix.known_nonneg(index) and ix.known_lt(index, end)
