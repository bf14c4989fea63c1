"""Stores that count: the same number is added to few places again and again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Store

MOST_PLACES = 1024  # that a program keeps counts of
MEET = 256  # points for each of many that meet
_ADDED = (torch.float32, torch.float64, torch.int32, torch.int64)


def is_count(store: Store, loops: Sequence[Expr], places: Expr, dtype: torch.dtype) -> bool:
    """Whether a store at the points of loops, to a buffer of so many elements, does that. Infinity
    is no such number: places that are met by none would have no number of it."""
    points = ix.value_of(ix.product(v.src[0] for v in loops if v.op == "var")) or 0
    few = ix.value_of(places) or 0
    return (store.mode == "add" and store.value.is_const and math.isfinite(store.value.arg)
            and dtype in _ADDED and 0 < few <= MOST_PLACES and points >= MEET * few)  # fmt: skip
