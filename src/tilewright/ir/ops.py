"""The scalar operations of the IR, one row each: arity, result type, cost, and torch reference.

A code generator has one text per row (`codegen/cpp/text.py`, ...); a completeness test fails when a
cell is missing. Sources of a row have one common dtype unless the row says otherwise; low-precision
floats never reach arithmetic (they are cast to float32 first), so rows see float32/64, ints, bool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tilewright.ir import philox

Result = Literal["same", "bool", "second", "index", "arg"]


CALL = 20


@dataclass(frozen=True)
class Op:
    name: str
    arity: int
    ref: Callable[..., Any]
    result: Result = "same"  # dtype of the result: of the first source, bool, ...
    cost: int = 1  # in additions; from CALL on a function call, worth not repeating
    floats_only: bool = False


def _rows(*rows: Op) -> dict[str, Op]:
    return {row.name: row for row in rows}


def _float1(ref: Callable[..., Any], cost: int = 20, name: str | None = None) -> Op:
    return Op(name or ref.__name__.removeprefix("special_"), 1, ref, cost=cost, floats_only=True)


def _float2(ref: Callable[..., Any], cost: int = 30, name: str | None = None) -> Op:
    return Op(name or ref.__name__, 2, ref, cost=cost, floats_only=True)


def _compare(name: str) -> Op:
    return Op(name, 2, getattr(torch, name), result="bool")


def _mathlike(a: torch.Tensor, b: torch.Tensor, mode: str) -> torch.Tensor:
    return torch.div(a, b, rounding_mode=mode)


_S = torch.special

POLYNOMIALS = (
    *(f"chebyshev_polynomial_{kind}" for kind in "tuvw"),
    *(f"shifted_chebyshev_polynomial_{kind}" for kind in "tuvw"),
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l",
    "legendre_polynomial_p",
)  # fmt: skip
"""Orthogonal polynomials of (x, degree); the degree is a whole float."""

TABLE: dict[str, Op] = _rows(
    # arithmetic; integers wrap
    Op("add", 2, torch.add),
    Op("sub", 2, torch.sub),
    Op("mul", 2, torch.mul),
    Op("div", 2, torch.true_divide, cost=4, floats_only=True),
    Op("floordiv", 2, lambda a, b: _mathlike(a, b, "floor"), cost=20),
    Op("truncdiv", 2, lambda a, b: _mathlike(a, b, "trunc"), cost=20),
    Op("mod", 2, torch.remainder, cost=20),
    Op("fmod", 2, torch.fmod, cost=20),
    Op("min", 2, torch.minimum),
    Op("max", 2, torch.maximum),
    Op("pow", 2, torch.pow, cost=40),
    Op("gcd", 2, torch.gcd, cost=60),
    Op("neg", 1, torch.neg),
    Op("abs", 1, torch.abs),
    Op("sign", 1, torch.sign, cost=2),
    Op("signbit", 1, torch.signbit, result="bool"),
    # comparison, logic, selection
    *(_compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    Op("bit_and", 2, torch.bitwise_and),
    Op("bit_or", 2, torch.bitwise_or),
    Op("bit_xor", 2, torch.bitwise_xor),
    Op("bit_not", 1, torch.bitwise_not),
    Op("shl", 2, torch.bitwise_left_shift),
    Op("shr", 2, torch.bitwise_right_shift),
    Op("where", 3, torch.where, result="second"),
    Op("isnan", 1, torch.isnan, result="bool", floats_only=True),
    # conversion: the target type is `arg` of the node
    Op("cast", 1, lambda a, to: a.to(to), result="arg"),
    Op("bitcast", 1, lambda a, to: a.view(to), result="arg", cost=0),
    # an index that is checked against its table's size when the program runs
    Op("index", 2, lambda i, size: i, result="index"),
    # rounding
    *(_float1(ref, 1) for ref in (torch.floor, torch.ceil, torch.trunc, torch.round)),
    # elementary functions
    _float1(torch.sqrt, 6),
    _float1(torch.rsqrt, 8),
    *(_float1(ref) for ref in (
        torch.exp, torch.exp2, torch.expm1, torch.log, torch.log2, torch.log10, torch.log1p,
        torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan,
        torch.sinh, torch.cosh, torch.tanh, torch.asinh, torch.acosh, torch.atanh,
        torch.erf, torch.erfc, torch.erfinv, torch.sigmoid,
    )),
    # special functions
    *(_float1(ref, 60) for ref in (
        torch.lgamma, torch.digamma, torch.i0, _S.i0e, _S.i1, _S.i1e, _S.ndtri, _S.log_ndtr,
        _S.erfcx, _S.bessel_j0, _S.bessel_j1, _S.bessel_y0, _S.bessel_y1, _S.modified_bessel_i0,
        _S.modified_bessel_i1, _S.modified_bessel_k0, _S.modified_bessel_k1,
        _S.scaled_modified_bessel_k0, _S.scaled_modified_bessel_k1, _S.spherical_bessel_j0,
        _S.airy_ai,
    )),
    *(_float2(ref) for ref in (torch.atan2, torch.hypot)),
    _float2(torch.copysign, 1),
    _float2(torch.nextafter, 4),
    _float2(torch.igamma, 60),
    _float2(torch.igammac, 60),
    _float2(_S.zeta, 60, "zeta"),
    *(_float2(getattr(_S, name), 60, name) for name in POLYNOMIALS),
    # random numbers: (seed: int64, offset: int64[, low, high]); Philox, so any order gives the same
    Op("rand", 2, philox.rand, result="arg", cost=30),
    Op("randn", 2, philox.randn, result="arg", cost=60),
    Op("randint", 4, philox.randint, result="arg", cost=30),
)  # fmt: skip

SURE = "sure"  # of an index: it needs no check
INDEX_OPS = ("iadd", "imul", "ifloordiv", "imod", "imin", "imax")


@dataclass(frozen=True)
class Fold:
    """A way to fold many values into one: its number of values in and out, and the torch form."""

    inputs: int
    outputs: int
    ref: Callable[..., Any]


# folds that are one operation on what was folded so far and the next value
STEPS = {"sum": "add", "prod": "mul", "min": "min", "max": "max", "any": "bit_or", "all": "bit_and"}

REDUCTIONS: dict[str, Fold] = {
    "sum": Fold(1, 1, lambda x, dim: torch.sum(x, dim, dtype=x.dtype)),
    "prod": Fold(1, 1, lambda x, dim: torch.prod(x, dim, dtype=x.dtype)),
    "min": Fold(1, 1, lambda x, dim: torch.amin(x, dim)),
    "max": Fold(1, 1, lambda x, dim: torch.amax(x, dim)),
    "any": Fold(1, 1, lambda x, dim: torch.any(x, dim)),
    "all": Fold(1, 1, lambda x, dim: torch.all(x, dim)),
    "xor": Fold(1, 1, lambda x, dim: torch.sum(x, dim) % 2 == 1),
    # (value, position) -> position of the first extreme; a NaN counts as the extreme
    "argmin": Fold(2, 1, lambda x, i, dim: i.flatten()[torch.argmin(x, dim)]),
    "argmax": Fold(2, 1, lambda x, i, dim: i.flatten()[torch.argmax(x, dim)]),
    # value -> (mean, sum of squared deviations)
    "welford": Fold(1, 2, lambda x, dim: (x.mean(dim), x.var(dim, correction=0) * x.shape[dim])),
}

SCANS: dict[str, Fold] = {
    "sum": Fold(1, 1, torch.cumsum),
    "prod": Fold(1, 1, torch.cumprod),
    "logsumexp": Fold(1, 1, torch.logcumsumexp),
    # not a running fold: the element at a place is that of the row in ascending order
    "sort": Fold(1, 1, lambda x, dim: torch.sort(x, dim).values),
    # (value, position) -> (extreme so far, its last position)
    "max": Fold(2, 2, lambda x, i, dim: torch.cummax(x, dim)),
    "min": Fold(2, 2, lambda x, i, dim: torch.cummin(x, dim)),
}
