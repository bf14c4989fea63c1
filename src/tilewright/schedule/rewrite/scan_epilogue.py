"""What is made of a scan's results, each by itself, stored by the scan.

A scan runs in order, so it is grouped with no others. But what a pointwise nest makes of one of
its results can be made where that is, and stored from the last point to the first as well as
from the first to the last: sums over what comes later are those of rows reversed, reversed
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, loads, rewrite
from tilewright.ir.program import Nest, Node, Program, Store
from tilewright.schedule.fusion.legality import is_alone
from tilewright.schedule.nests.access import terms
from tilewright.schedule.nests.transform import reduces_or_scans, substitute_nest
from tilewright.target import Target


def stored_by_scans(program: Program, nodes: Sequence[Node]) -> list[Node]:
    """The nodes with scans that store what only one nest makes of their results."""
    found = list(nodes)
    scans = [n for n in nodes if isinstance(n, Nest) and reduces_or_scans(n, "scan")]
    for node in nodes:
        if not scans or not isinstance(node, Nest) or not _may_follow(node):
            continue
        scan = next((n for n in scans if n.writes & node.reads), None)
        made = None if scan is None else _joined(program, found, scan, node)
        if made is not None:
            found = [made if n is node else n for n in found if n is not scan]
            scans = [n for n in found if isinstance(n, Nest) and reduces_or_scans(n, "scan")]
    return found


def _may_follow(nest: Nest) -> bool:
    return not nest.reduce and not is_alone(nest) and not nest.ops & {"rand", "randn", "randint"}


def _joined(program: Program, nodes: Sequence[Node], scan: Nest, nest: Nest) -> Nest | None:
    """The scan with the stores of the nest, in the place of the nest, if that is possible and
    spares a buffer."""
    if not all(Target.of(program.buffers[b].device).is_gpu for b in scan.writes | nest.writes):
        return None  # vectors of a CPU have no part in a scan
    first, last = nodes.index(scan), nodes.index(nest)
    between = [n for n in nodes[first + 1 : last] if n.writes & (scan.reads | scan.writes)
               or n.reads & scan.writes]  # fmt: skip
    if between or nest.writes & (scan.reads | scan.writes):
        return None
    if any(s.mode != "set" or s.mask is not None for s in scan.stores):
        return None
    places = {s.buffer: s for s in scan.stores}
    read = [n for n in loads(*nest.exprs) if n.arg in places]
    mapping = _mapping(scan, nest, places[read[0].arg].index, read[0].src[0])
    if mapping is None:
        return None
    swapped = substitute_nest(nest, mapping, scan.loops, ())
    if any(n.src != (places[n.arg].index,) for n in loads(*swapped.exprs) if n.arg in places):
        return None
    needed = program.visible.union(*(n.reads | n.writes for n in nodes[last + 1 :]))
    kept = [s for s in scan.stores
            if s.buffer in needed or program.buffers[s.buffer].kind != "temporary"]  # fmt: skip
    spared = scan.writes - {s.buffer for s in kept}
    if not spared or _width(program, nest.writes - program.visible) > _width(program, spared):
        return None
    return replace(swapped, stores=(*kept, *(_with(program, s, places) for s in swapped.stores)))


def _width(program: Program, buffers: Iterable[str]) -> int:
    return sum(program.buffers[b].dtype.itemsize for b in buffers)


def _mapping(scan: Nest, nest: Nest, stored: Expr, read: Expr) -> dict[Expr, Expr] | None:
    """Where a nest reads what the scan stores at each of its points: its loops in terms of the
    scan's, all of them the same way around or the other."""
    there, here = terms(stored, scan.loops), terms(read, nest.loops)
    if there is None or here is None or len(nest.loops) != len(scan.loops):
        return None
    strides = {(s, v.src[0]): v for v, s in there[0].items()}
    if len(strides) != len(scan.loops) or len(here[0]) != len(nest.loops):
        return None
    found: dict[Expr, Expr] = {}
    for v, stride in here[0].items():
        if (same := strides.pop((stride, v.src[0]), None)) is not None:
            found[v] = same
        elif (turned := strides.pop((ix.neg(stride), v.src[0]), None)) is not None:
            found[v] = ix.sub(ix.sub(v.src[0], ix.ONE), turned)
    return found if len(found) == len(nest.loops) else None


def _with(program: Program, store: Store, places: Mapping[str, Store]) -> Store:
    """The store with what was stored in the place of what was read."""

    def value(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if node.op != "load" or node.arg not in places:
            return None
        return build.cast(places[node.arg].value, program.buffers[node.arg].dtype)

    return replace(store, value=rewrite(store.value, value))
