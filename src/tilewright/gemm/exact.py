"""Roundings that change nothing: whole numbers of a few bits are in every float what they are.

What is unpacked from eight or four bits becomes a sixteen-bit float, is lessened by a zero point
and scaled; in eager every step is rounded to sixteen bits. Done for every element that a product
reads, conversions there and back are most of the work.
"""

from __future__ import annotations

import torch

from tilewright.ir.expr import Expr, make, rewrite, walk

LARGEST = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24}
"""Whole numbers up to these are exact."""
_BYTES = {torch.int8: (-128, 127), torch.uint8: (0, 255)}
Range = tuple[int, int]


def unrounded(value: Expr) -> Expr:
    """Without conversions to sixteen bits that lose nothing, and back to float32."""
    known = _ranges(value)

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if node.op != "cast" or node.dtype != torch.float32 or node.src[0].op != "cast":
            return None
        small, inner = node.src[0], node.src[0].src[0]
        found = known.get(inner)
        if small.dtype.itemsize != 2 or found is None or not _fits(found, small.dtype):
            return None
        made = src[0].src[0]
        return made if made.dtype == torch.float32 else make("cast", torch.float32, (made,),
                                                             torch.float32)  # fmt: skip

    return rewrite(value, rule)


def _fits(found: Range, dtype: torch.dtype) -> bool:
    return max(map(abs, found)) <= LARGEST.get(dtype, 0)


def _ranges(value: Expr) -> dict[Expr, Range]:
    """Between which whole numbers nodes are, where they are any."""
    known: dict[Expr, Range] = {}
    for node in walk(value):
        found = _range(node, known)
        if found is not None:
            known[node] = found
    return known


def _range(node: Expr, known: dict[Expr, Range]) -> Range | None:
    if node.op == "const":
        whole = not isinstance(node.arg, bool) and node.arg == node.arg // 1
        return (int(node.arg), int(node.arg)) if whole else None
    if node.op == "load":
        return _BYTES.get(node.dtype)
    of = [known.get(s) for s in node.src]
    if node.op == "bit_and":
        kept = [s.arg for s in node.src if s.op == "const" and s.arg >= 0]
        return (0, min(kept)) if kept else None
    first = of[0] if of else None
    second = of[1] if len(of) > 1 else None
    if first is None:
        return None
    if node.op == "cast":
        float_ = node.dtype.is_floating_point and node.src[0].dtype != node.dtype
        return first if float_ and _fits(first, node.dtype) else None
    if node.op == "shr" and second is not None and first[0] >= 0 and second[0] == second[1] >= 0:
        return first[0] >> second[0], first[1] >> second[0]
    if node.op in ("add", "sub") and second is not None and node.dtype == torch.float32:
        other = second if node.op == "add" else (-second[1], -second[0])
        made = first[0] + other[0], first[1] + other[1]
        return made if _fits(made, node.dtype) else None
    return None
