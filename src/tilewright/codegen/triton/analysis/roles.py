"""What buffers hold that a launcher has to know: positions, and places at which stores may meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir import index as ix
from tilewright.ir.expr import loads, rewrite, walk
from tilewright.ir.program import Buffer, Nest


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
