"""Loads that are issued before what does not need them: rows that wait for no reduction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tilewright import rules
from tilewright.ir.expr import Expr, free_vars, loads, walk
from tilewright.ir.program import Nest

if TYPE_CHECKING:
    from tilewright.codegen.triton.plan.tiling import Shape


def early_loads(shape: Shape, local: frozenset[str]) -> list[Expr]:
    """What is loaded for a row as a whole and waits for no reduction: under way before the row
    is walked, or a kernel of many rows would wait for it once for each. Where nothing is
    reduced, all of few loads: none of them stays behind a store, which might be to the same
    memory for all that a compiler knows."""
    alone = [m for s, axis in shape.segments if axis is None for m in s.members]
    found = loads(*(e for m in alone for e in m.exprs))
    results = [s for m in alone for s in m.stores if s.buffer not in local]
    if shape.gathered and not shape.serial:
        several = len(results) > 1 and any(n.op == "index" for s in results for n in walk(s.index))
        return first(shape, _beside_looked_up(shape, found, several))
    waits = len(results) > 1 and len(found) <= rules.EARLY_LOADS.limit and not shape.gathered
    if shape.serial or not (shape.inner or waits):
        return []
    return first(shape, [*found, *(e for e in _own_rows(shape) if e not in found)])


def _beside_looked_up(shape: Shape, found: Sequence[Expr], several: bool) -> list[Expr]:
    """What does not wait for what is gathered, places first (H200: 256 pairs of images of 65536
    floats, each pair in the parts of a step that is gathered, 47.6 us, 48.4 us). Where only
    stores go to such places, if there are `several`."""
    plain = [e for e in found if not any(n.op == "index" for n in walk(e))]
    seldom = any(s.mask is not None for s in shape.stores)
    if (len(plain) == len(found) and not several) or len(plain) > rules.EARLY_LOADS.limit or seldom:
        return []
    return sorted(plain, key=lambda e: shape.parallel[-1].var in free_vars(e))


def first(shape: Shape, found: Sequence[Expr]) -> list[Expr]:
    """Those loads that neither a reduction nor a store has to come before."""
    made = shape.written
    return [e for e in found
            if not any(n.op in ("reduce", "scan") or n.arg in made for n in walk(e))]  # fmt: skip


def _own_rows(shape: Shape) -> list[Expr]:
    """What is loaded for several reductions of a row: the second tensor of two does not wait for
    the first reduction (H200: cosine similarity of 16384 rows of 4096 bfloat16 61 us, 81 us).
    Where reductions read nothing but rows of all programs, what is read after them, or nothing
    comes from memory until then (the gradient of a supervised contrast of 8192x8192 bfloat16, in
    which labels are compared and counted first, 122 us, 139 us). What is the same for all rows
    comes from the cache soon enough, and would take registers until it is used (its forward pass
    155 us with labels loaded where they are compared, 179 us before the largest value is found)."""
    moved = any(a.start is not None or a.vector for a in shape.inner)
    if not shape.persistent or shape.chunk or shape.packed or shape.misaligned or moved:
        return []
    own = shape.row_loops
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
