"""Type promotion and rounding, as eager does them, for every op family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes

from tilewright.ir import build
from tilewright.ir.expr import Expr, sym
from tilewright.lower.context import Lowering
from tilewright.lower.formula import literal
from tilewright.lower.tensor import Tensor, pointwise

LOW_PRECISION = frozenset((
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
))  # fmt: skip

Operand = Tensor | Expr | int | float | bool


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """What arithmetic on `dtype` is done in: float32 for the low-precision floats."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def promoted(ctx: Lowering, operands: tuple[Any, ...], kind: KIND = KIND.DEFAULT
             ) -> tuple[torch.dtype, torch.dtype]:  # fmt: skip
    """(type to compute in, type of the result) for these operands, by eager's rules."""
    fakes = [_fake(x) for x in operands if x is not None]
    computation, result = elementwise_dtypes(*fakes, type_promotion_kind=kind)
    return compute_type(computation), result


def _fake(x: Operand) -> Any:
    """Something of the same type and rank category as `x`, which is all that promotion looks at."""
    if isinstance(x, Tensor):
        return torch.empty((1,) * x.rank, dtype=x.dtype, device="meta")
    if isinstance(x, Expr):
        return 1.0 if x.dtype.is_floating_point else (x.dtype == torch.bool) or 1
    return x


def scalar(value: Expr | int | float | bool, dtype: torch.dtype) -> Expr:
    """A Python or symbolic number as an expression of `dtype`."""
    return build.cast(value, dtype) if isinstance(value, Expr) else literal(value, dtype)


def operand(ctx: Lowering, x: Operand, dtype: torch.dtype) -> Tensor:
    """`x` as a tensor of `dtype`; a number is a tensor without dimensions."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    return Tensor((), dtype, torch.device("cpu"), scalar(x, dtype))


def elementwise(ctx: Lowering, fn: Callable[..., Expr], *operands: Operand,
                kind: KIND = KIND.DEFAULT, rounds: int = 0) -> Tensor:  # fmt: skip
    """`fn` over the promoted, broadcast operands; the result is rounded to the promoted type.

    The first `rounds` operands are first rounded to the common type. That matters beside
    low-precision tensors, for numbers and for tensors without dimensions: most eager ops round
    them, but products and quotients take their second operand at full precision.
    """
    fakes = [_fake(x) for x in operands]
    computation, result = elementwise_dtypes(*fakes, type_promotion_kind=kind)
    common = result
    if kind == KIND.ALWAYS_BOOL:  # of truth values, what is compared has the type that counts
        common = elementwise_dtypes(*fakes, type_promotion_kind=KIND.NO_OPMATH)[1]
    tensors: list[Tensor] = []
    for k, x in enumerate(operands):
        t = operand(ctx, x, common) if k < rounds else x
        tensors.append(operand(ctx, t, compute_type(computation)))
    out = pointwise(fn, *tensors)
    return out if kind == KIND.ALWAYS_BOOL else out.to(result)


__all__ = ["KIND", "LOW_PRECISION", "Operand", "compute_type", "elementwise", "operand", "promoted",
           "scalar", "sym"]  # fmt: skip
