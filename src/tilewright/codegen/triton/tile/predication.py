"""What is not done for most rows of a kernel: branches take the place of masks."""

from __future__ import annotations

from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.codegen.triton.tile.lower import Writer
from tilewright.ir.expr import Expr, walk
from tilewright.ir.program import Nest


def row_conditions(shape: Shape, w: Writer) -> tuple[Expr, ...]:
    """Of rows that look up several others, those that not every row has: to load and to add nothing
    takes as long (H200: gathered gradients of 2048 bfloat16, of which a row has one on average but
    up to four, 79 us with masks)."""
    if not shape.gathered:
        return ()
    found: dict[Expr, None] = {}
    for node in walk(*(e for m in shape.members for e in m.exprs)):
        if node.op != "where" or not node.src[2].is_const:
            continue
        rows = w.covered(w.support(node.src[0]))
        looks = any(n.op == "index" for n in walk(node.src[1]))
        if looks and rows and not any(a.dim for a in rows):
            found[node] = None
    return tuple(found) if len(found) > 2 else ()


def some_rows(nest: Nest, shape: Shape, w: Writer) -> str:
    """Whether anything is stored of the rows of a tile, where a mask says that for rows as a whole;
    nothing where there is no such mask."""
    masks = {s.mask for s in nest.stores}
    mask = next(iter(masks), None)
    if len(masks) != 1 or mask is None or not shape.gathered:
        return ""
    support = w.covered(w.support(mask))
    if any(a.dim for a in support):
        return ""
    return f"tri.any_of({w.mask(support, w.operand(mask))})"
