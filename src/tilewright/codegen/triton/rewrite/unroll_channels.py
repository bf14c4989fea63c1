"""Short loops along which what is gathered lies at the same places, as the channels of an image
that is sampled: as several stores of one point, so that these are computed once for all."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright import rules
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads
from tilewright.ir.program import Nest
from tilewright.schedule.nests.access import all_loops
from tilewright.schedule.nests.hints import hint_product
from tilewright.schedule.nests.transform import unroll

DRAWN = frozenset(("rand", "randn", "randint"))


def unroll_channels(members: list[Nest], outer: tuple[Expr, ...]
                     ) -> tuple[list[Nest], tuple[Expr, ...]]:  # fmt: skip
    """The members and the loops they share without such a loop, if there is one. As an axis of a
    tile its points would be as many as a power of two, and all threads would compute the places
    (H200: three channels of 16x512x512 floats sampled at 1/16 of a pixel each 97 us, 128 us as
    tiles of 128x4, 124 us each by itself)."""
    if not outer or any(m.reduce or m.ops & {"scan", *DRAWN} for m in members):
        return members, outer
    own = {v for m in members for v in all_loops(m) if v not in outer}
    for v in (*sorted(own, key=lambda v: v.arg), *outer[:-1]):
        rest = tuple(u for u in outer if u is not v)
        busy = bool(rest) and hint_product(u.src[0] for u in rest) >= rules.CHANNEL_POINTS.limit
        if busy and own <= {v} and _is_written_out(members, v, rest[-1]):
            return [unroll(m, v) if v in m.loops else m for m in members], rest
    return members, outer


def _is_written_out(members: Sequence[Nest], v: Expr, last: Expr) -> bool:
    """Whether elements are gathered one by one at places that do not change along a loop, and
    nothing lies in memory along it."""
    count = ix.value_of(v.src[0]) or 0
    nests = [m for m in members if v in m.loops]
    if not 2 <= count <= rules.CHANNELS.limit or any(m.writes & m.reads for m in nests):
        return False
    found = {n for m in nests for n in loads(*m.exprs)}
    indices = [*(n.src[0] for n in found), *(s.index for m in nests for s in m.stores)]
    if any(ix.coefficient(i, v) is ix.ONE for i in indices):
        return False
    looked_up = [n.src[0] for n in found if last in _looked_up_by(n.src[0])]
    return 0 < count * len(looked_up) <= rules.CHANNEL_LOADS.limit and all(
        ix.value_of(ix.coefficient(i, v) or ix.ZERO) and v not in _looked_up_by(i)
        for i in looked_up)  # fmt: skip


def _looked_up_by(index: Expr) -> set[Expr]:
    """The loops that change a part of an index that is read from memory."""
    parts = (a for monomial in ix.poly(index) for a in monomial if loads(a))
    return {v for a in parts for v in free_vars(a)}
