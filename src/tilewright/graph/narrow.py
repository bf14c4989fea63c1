"""Products of eight bits that torch has several operators for, as the one that is chosen for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_TENSOR, _ROW, _1X128, _128X128 = 0, 1, 4, 5  # `torch.nn.functional.ScalingType`


def _scaled(left: Tensor, right: Tensor, scale_a: Sequence[Tensor], recipe_a: Sequence[int],
            swizzle_a: Sequence[int], scale_b: Sequence[Tensor], recipe_b: Sequence[int],
            swizzle_b: Sequence[int], bias: Tensor | None, out_dtype: torch.dtype | None,
            contraction_dim: Sequence[int] = (), use_fast_accum: bool = False) -> Any:  # fmt: skip
    """`torch.nn.functional.scaled_mm` where `_scaled_mm` has the same recipes: that tells them by
    the sizes of the scales, and takes those of the right operand transposed."""
    if len(scale_a) != 1 or len(scale_b) != 1 or any((*swizzle_a, *swizzle_b, *contraction_dim)):
        return NotImplemented
    one, other = scale_a[0], scale_b[0]
    recipes = recipe_a[0], recipe_b[0]
    if recipes not in _PAIRS or any(s.dtype != torch.float32 for s in (one, other)):
        return NotImplemented
    if recipes[0] != _TENSOR:
        k = left.size(1)
        one = _of_rows(one, recipes[0], left.size(0), k)
        other = _of_rows(other, recipes[1], right.size(1), k).t()
    return aten._scaled_mm.default(left, right, one, other, bias, None, out_dtype, use_fast_accum)


_PAIRS = frozenset(((_TENSOR, _TENSOR), (_ROW, _ROW), (_1X128, _1X128), (_1X128, _128X128),
                    (_128X128, _1X128)))  # fmt: skip


def _of_rows(scale: Tensor, recipe: int, rows: Any, k: Any) -> Tensor:
    """The scale of an operand: [rows, or blocks of them; one, or blocks along k]."""
    if recipe == _ROW:
        return scale.reshape(rows, 1)
    if recipe == _1X128:
        return scale
    return scale[: (k + 127) // 128].t()  # rows of a multiple of four


OWN: dict[Any, Callable[..., Any]] = (
    {aten._scaled_mm_v2.default: _scaled} if hasattr(aten, "_scaled_mm_v2") else {}
)
"""Decompositions."""
