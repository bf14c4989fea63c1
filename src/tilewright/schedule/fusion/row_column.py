"""One order for nests that walk the same data differently: what reduces over rows accumulates while
the rows run one after the other through the members that go along them.

`fit_in_order` finds such an order; `split/policy.py` says into how many parallel parts it is worth
cutting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright import rules
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, walk
from tilewright.ir.program import Nest
from tilewright.schedule.fusion.legality import (
    Fit,
    Misfit,
    first_conflict,
    guides,
    is_alone,
    match_loops,
)
from tilewright.schedule.nests.access import all_loops
from tilewright.schedule.nests.hints import hint_product, work
from tilewright.schedule.nests.segments import segments_of


def fit_in_order(left: Fit, right: Fit, position: Mapping[str, int]) -> Fit | Misfit:
    """Two groups as one in which the loops that some members reduce run one after the other."""
    reason = Misfit("no common buffer")
    if not any(m.reduce for m in (*left.members, *right.members)):
        return Misfit("nothing is folded")
    for a, b, buffer in guides(left, right):
        matched = match_loops(left, right, a, b, buffer)
        if isinstance(matched, Misfit):
            reason = matched
            continue
        members = (*matched[0].members, *matched[1].members)
        found = _in_order(tuple(sorted(members, key=lambda m: position[m.name])))
        if isinstance(found, Fit):
            return found
        reason = found
    return reason


def _in_order(nests: tuple[Nest, ...]) -> Fit | Misfit:
    reason = Misfit("no loop is common to all")
    for outer, serial in orders(nests):
        found = problem(nests, outer, serial)
        if not found:
            return Fit(nests, outer, serial)
        reason = Misfit(found)
    return reason


def orders(nests: Sequence[Nest]) -> list[tuple[tuple[Expr, ...], tuple[Expr, ...]]]:
    """Loops all nests have, to run in parallel and one after the other; fewest partial results
    first. A nest reduces all of the latter or none of them."""
    first, *rest = nests
    common = [v for v in all_loops(first) if all(v in all_loops(m) for m in rest)]
    if not common:
        return []
    along = contiguous(nests)
    outer = tuple(v for v in common if v is not along and all(v in m.loops for m in nests))
    kinds: dict[tuple[bool, ...], list[Expr]] = {}
    for v in common:
        folded = tuple(v in m.reduce for m in nests)
        if any(folded):
            kinds.setdefault(folded, []).append(v)
    found: list[tuple[int, tuple[Expr, ...]]] = []
    for folded, loops in kinds.items():
        # the loop along memory stays inside, where it is vectorised
        kept = [v for v in loops if v is not along] or loops
        results = sum(hint_product(v.src[0] for v in m.loops)
                      for m, f in zip(nests, folded, strict=True) if f)  # fmt: skip
        found.append((results + (1 << 40 if along in kept else 0), _by_nesting(kept, nests)))
    return [(outer, serial) for _, serial in sorted(found, key=lambda pair: pair[0])]


def contiguous(nests: Sequence[Nest]) -> Expr | None:
    """The loop that steps by one through what most is read of."""
    indices = [n.src[0] for m in nests for n in loads(*m.exprs)]
    if not indices:
        return None
    most = max(indices, key=lambda i: i.memo("points", points))
    return next((v for v in sorted(free_vars(most), key=lambda v: v.key)
                 if ix.coefficient(most, v) is ix.ONE), None)  # fmt: skip


def points(index: Expr) -> int:
    return hint_product(v.src[0] for v in free_vars(index))


def _by_nesting(loops: list[Expr], nests: Sequence[Nest]) -> tuple[Expr, ...]:
    longest = max(nests, key=lambda m: len(all_loops(m)))
    order = {v: k for k, v in enumerate(all_loops(longest))}
    return tuple(sorted(loops, key=lambda v: order[v]))


def folds_over(nest: Nest, serial: Sequence[Expr]) -> bool:
    return any(v in nest.reduce for v in serial)


def problem(nests: tuple[Nest, ...], outer: tuple[Expr, ...], serial: tuple[Expr, ...]) -> str:
    """Why the nests cannot run in this order, or an empty string."""
    for m in nests:
        if is_alone(m):
            return is_alone(m)
        if folds_over(m, serial):
            why = _carries(m, outer, serial)
            if why:
                return why
    small = max(work(m) for m in nests) <= rules.ORDERED_SMALL.limit
    if len(segments_of(nests, outer)) > 1 and not small:
        row = max(hint_product(v.src[0] for v in all_loops(m) if v not in (*outer, *serial))
                  for m in nests)  # fmt: skip
        if row < rules.ORDERED_ROW.limit:
            return "the rows are too short to run one after the other"
    return first_conflict(nests, (*outer, *serial))


def _carries(nest: Nest, outer: tuple[Expr, ...], serial: tuple[Expr, ...]) -> str:
    """Why the nest cannot keep its reductions while others run, or an empty string."""
    columns = [v for v in nest.loops if v not in outer]
    if columns and len(nest.reduce) > len(serial):
        return "it reduces within rows and across them"
    if hint_product(v.src[0] for v in columns) > rules.ACCUMULATORS.limit:
        return "it has too many results to keep them near"
    arg = any(n.op == "reduce" and n.arg.kind.startswith("arg") for n in walk(*nest.exprs))
    if arg and nest.reduce[: len(serial)] != serial:
        return "the first of equal elements would be another"
    return ""
