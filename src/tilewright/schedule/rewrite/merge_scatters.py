"""Rows that go to the same places of several tensors, as keys and values go to a cache, as one
nest: where to is read and checked once, and one kernel moves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.expr import loads
from tilewright.ir.program import Nest, Node, Opaque, Origin, Program
from tilewright.schedule.nests.transform import rename

MOST = 4  # tensors


def merge_scatters(program: Program, nodes: Sequence[Node]) -> list[Node]:
    """The nodes, on a card, with such nests as one (H200: 32768 rows of 1024 bfloat16 put to pages
    of two caches 70.0 us, 71.2 us by two kernels)."""
    found: list[Node] = []
    for node in nodes:
        before = range(len(found) - 1, -1, -1) if _puts(program, node) else ()
        k = next((k for k in before if _may_join(program, found[k], node)), None)
        if k is None:
            found.append(node)
            continue
        first, between = found[k], found[k + 1 :]
        both = _joined(first, node)
        assert both is not None
        if all(_are_apart(node, other) for other in between):
            found[k] = both
        elif all(_are_apart(first, other) for other in between):
            found[k:] = [*between, both]
        else:
            found.append(node)
    return found


def _may_join(program: Program, first: Node, second: Node) -> bool:
    apart = _puts(program, first) and _are_apart(first, second)
    return apart and _joined(first, second) is not None


def _puts(program: Program, node: Node) -> bool:
    """Whether it only stores what it reads elsewhere, at places that are gathered on a card."""
    return isinstance(node, Nest) and not node.reduce and bool(node.loops) and all(
        loads(s.index) and s.mode == "set" and s.mask is None
        and program.buffers[s.buffer].device.type == "cuda" for s in node.stores)  # fmt: skip


def _are_apart(node: Node, other: Node) -> bool:
    """Whether it does not matter which of them is first."""
    if any(isinstance(n, Opaque) and n.binds for n in (node, other)):
        return False
    return not (node.writes & (other.reads | other.writes) or other.writes & node.reads)


def _joined(first: Node, second: Node) -> Nest | None:
    """Both as one nest, if they have the same points and places."""
    if not (isinstance(first, Nest) and isinstance(second, Nest)):
        return None
    if [v.src[0] for v in first.loops] != [v.src[0] for v in second.loops]:
        return None
    if len(first.stores) + len(second.stores) > MOST:
        return None
    same = rename(second, dict(zip(second.loops, first.loops, strict=True)))
    if {s.index for s in same.stores} != {s.index for s in first.stores}:
        return None
    nodes = dict.fromkeys((*first.origin.nodes, *second.origin.nodes))
    origin = Origin(tuple(nodes), first.origin.location)
    return replace(first, stores=(*first.stores, *same.stores), origin=origin)
