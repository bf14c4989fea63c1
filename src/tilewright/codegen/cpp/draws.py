"""Random numbers for a stretch of the vectorised loop at once: four to a counter, none left over.

At a single point three of the four words a counter gives would be computed for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, substitute, var, walk
from tilewright.ir.program import Nest
from tilewright.schedule.nests.transform import cuts

if TYPE_CHECKING:
    from tilewright.codegen.cpp.kernel import Kernel

STRETCH = 512  # numbers drawn at once: they stay in the first level of cache
_KINDS = {"rand": "tw::uniforms", "randn": "tw::normals"}


def drawn_at_once(members: Sequence[Nest], lane: Expr) -> list[Expr]:
    """The random numbers whose places follow each other along the loop, if its body is the same at
    all of its points."""
    if ix.value_of(lane.src[0]) is not None and cuts(members, lane):
        return []
    nodes = [n for m in members for n in walk(*m.exprs)]
    if any(n.op == "load" and len(n.src) == 2 for n in nodes):
        return []
    return [n for n in dict.fromkeys(nodes) if n.op in _KINDS and n.dtype == torch.float32
            and lane not in free_vars(n.src[0])
            and ix.coefficient(n.src[1], lane) is ix.ONE]  # fmt: skip


def write_drawn(k: Kernel, members: Sequence[Nest], draws: Sequence[Expr], parallel: bool) -> None:
    """The loops of the kernel, the last of them in stretches."""
    w = k.w
    *shared, lane = k.outer
    size = w.index(lane.src[0])
    heads = [k.for_loop(v) for v in shared]
    heads.append(f"for (int64_t tile = 0; tile < {size}; tile += {STRETCH})")
    with ExitStack() as stack:
        k.open_loops(stack, heads, parallel)
        w.line(f"const int64_t stop = {size} - tile < {STRETCH} ? {size} : tile + {STRETCH};")
        first = {lane: var("tile", lane.src[0])}
        names = {node: w.fresh("drawn") for node in draws}
        for node, name in names.items():
            seed, place = w.value(node.src[0]), w.index(substitute(node.src[1], first))
            w.line(f"alignas(64) float {name}[{STRETCH}];")
            w.line(f"tw::draw({name}, {seed}, {place}, stop - tile, {_KINDS[node.op]}());")
        k.hoist(members, lane)
        w.line("#pragma omp simd")
        with w.block(f"for (int64_t {lane.arg} = tile; {lane.arg} < stop; ++{lane.arg})"):
            for node, name in names.items():
                w.know(node, f"{name}[{lane.arg} - tile]")
            k.point(members)
