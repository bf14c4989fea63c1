"""Largest values and sums of exponentials relative to them, which one walk along a row finds."""

from __future__ import annotations

import torch

from tilewright.ir.expr import Expr, loads, walk
from tilewright.ir.program import Nest
from tilewright.schedule.fusion.legality import is_alone


def is_pair(nest: Nest, top: Nest) -> bool:
    """Whether all that a nest reduces are exponentials relative to the largest values `top`
    finds."""
    folds = [n for n in walk(*nest.exprs) if n.op == "reduce"]
    if not folds or is_alone(nest) or len(top.stores) != 1 or nest.reduce != top.reduce:
        return False
    (store,) = top.stores
    largest = store.value
    if largest.op != "reduce" or largest.arg.kind != "max" or nest.loops != top.loops:
        return False
    base = [n for n in loads(*nest.exprs) if n.arg == store.buffer]
    return len(base) == 1 and base[0].src == (store.index,) and all(
        _is_power(n, largest.src[0], base[0]) for n in folds)  # fmt: skip


def _is_power(fold: Expr, value: Expr, base: Expr) -> bool:
    power = fold.src[0]
    if fold.arg.kind != "sum" or power.op != "exp" or power.dtype != torch.float32:
        return False
    away = power.src[0]
    return away.op == "sub" and away.src == (value, base) and base.dtype == torch.float32
