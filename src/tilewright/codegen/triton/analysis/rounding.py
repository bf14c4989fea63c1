"""Floats that pass through sixteen bits: which are such numbers already, which stay so narrow, and
where a product would not be rounded at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from tilewright.ir.expr import Expr, walk

_CHOOSE = ("max", "min", "neg", "abs")  # whose results are among what they take, or minus that
_SHORT = (torch.bfloat16, torch.float16)


def rounded(e: Expr) -> Expr | None:
    """What `e` rounds: floats that go through bfloat16 and back."""
    inner = e.src[0] if e.op == "cast" and e.dtype == torch.float32 else None
    through = inner is not None and inner.dtype == torch.bfloat16 and _is_rounding(inner)
    return inner.src[0] if inner is not None and through else None


def is_exact(e: Expr) -> bool:
    """Whether these floats are numbers that bfloat16 has."""
    return e.memo("is a bfloat16", _is_exact)


def _is_exact(e: Expr) -> bool:
    if e.is_const:
        return _has(torch.bfloat16, e)
    if e.op == "cast":
        return e.src[0].dtype == torch.bfloat16
    return e.op in _CHOOSE and all(is_exact(s) for s in e.src)


def kept_narrow(exprs: Sequence[Expr], made: Mapping[str, Expr]) -> frozenset[Expr]:
    """Roundings to bfloat16 of what is computed in that type, two by one instruction, and of what
    goes into it. LLVM finds these sums and products, of floats that are used once, if nothing else
    comes between (H200 code of silu and a product: 168 instructions, 224 through floats). `made`
    are the values of the buffers the kernel makes."""
    nodes = list(walk(*exprs))
    uses = Counter(s for n in nodes for s in n.src)
    uses.update(exprs)
    steps = {n for n in nodes if n.dtype == torch.bfloat16 and _is_step(n) and uses[n.src[0]] == 1}
    return frozenset(steps).union(*(_taken(n, made) for n in steps))


def skips_a_rounding(exprs: Sequence[Expr], made: Mapping[str, Expr]) -> bool:
    """Whether a product that is rounded to sixteen bits goes into a sum of such numbers: one
    instruction for both, of that type, would not round it."""
    return any(n.src[0].op != "mul" and any(_is_step(s) and s.src[0].op == "mul"
                                            for s in _taken(n, made))
               for n in walk(*exprs) if _is_step(n))  # fmt: skip


def _taken(step: Expr, made: Mapping[str, Expr]) -> set[Expr]:
    """The roundings that a step takes numbers from."""
    found = {s.src[0] for s in step.src[0].src if s.op == "cast"}
    return {n for n in (made.get(n.arg, n) if n.op == "load" else n for n in found)
            if _is_rounding(n)}  # fmt: skip


def _is_rounding(e: Expr) -> bool:
    return e.op == "cast" and e.dtype in _SHORT and e.src[0].dtype == torch.float32


def _is_step(e: Expr) -> bool:
    """Whether it is the rounded result of one operation of that type: floats have more than twice
    its bits, so that rounding their result is rounding once."""
    return _is_rounding(e) and e.src[0].op in ("add", "sub", "mul") and all(
        (s.op == "cast" and s.src[0].dtype == e.dtype) or (s.is_const and _has(e.dtype, s))
        for s in e.src[0].src
    )  # fmt: skip


def _has(dtype: torch.dtype, const: Expr) -> bool:
    return float(torch.tensor(const.arg, dtype=dtype)) == const.arg
