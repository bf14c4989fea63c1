"""Floats as the nearest integers, cut off at both sides: numbers that are quantized.

One instruction rounds and converts. To round to a float first takes another of the unit that is
the slowest, and of a quotient that will be an integer nobody sees the sign of zero (H200: int8 of
975545 rows of 89 bfloat16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewright.codegen.triton.tile.ops import TYPE, is_scaled
from tilewright.ir.expr import Expr

_TYPES = (torch.int8, torch.uint8, torch.int16, torch.int32)
_LARGEST = 1 << 22  # numbers whose halves are exact by far
_WIDE = (torch.bfloat16, torch.float32)  # which have the same exponents
_SMALLEST = 2.0**-64  # divisors whose reciprocals are far from infinite


@dataclass(frozen=True)
class Whole:
    """An integer, the float it is made of, and what cuts it off, innermost first."""

    node: Expr
    source: Expr
    limits: tuple[tuple[str, int], ...]

    def text(self, nearest: str, within: bool) -> str:
        for name, limit in () if within else self.limits:
            nearest = f"tl.{name}imum({nearest}, {limit})"
        return (
            nearest if self.node.dtype == torch.int32 else f"{nearest}.to({TYPE[self.node.dtype]})"
        )


def whole(node: Expr) -> Whole | None:
    """What an integer is rounded from. What is no number is zero, so zero has to be within its
    limits."""
    if node.op != "cast" or node.dtype not in _TYPES:
        return None
    limits: list[tuple[str, int]] = []
    e = node.src[0]
    while e.op in ("min", "max") and any(s.is_const for s in e.src):
        at = next(k for k, s in enumerate(e.src) if s.is_const)
        limit = e.src[at].arg
        if limit != limit or abs(limit) >= 2**31 or limit != int(limit):
            return None
        if (limit < 0) if e.op == "min" else (limit > 0):
            return None
        limits.append((e.op, int(limit)))
        e = e.src[1 - at]
    if e.op != "round" or e.dtype != torch.float32:
        return None
    return Whole(node, e.src[0], tuple(reversed(limits)))


def is_within(found: Whole, made: Mapping[str, Expr]) -> bool:
    """Whether it was scaled by the largest of its row, so that nothing is infinite, and nothing
    there to be cut off: the scale is not rounded by as much as half of one."""
    e, most = found.source, min([_LARGEST, *(abs(limit) for _, limit in found.limits)])
    return e.op == "div" and is_far_from_zero(e.src[1], made) and is_scaled(e, most, made)


def is_far_from_zero(e: Expr, made: Mapping[str, Expr]) -> bool:
    """`made` are the values of the buffers the kernel makes."""
    return _least(e, made) >= _SMALLEST


def is_moderate(e: Expr, made: Mapping[str, Expr]) -> bool:
    """Whether the reciprocal of a number is one that floats have, as of the scale of a row that is
    quantized."""
    e = made.get(e.arg, e) if e.op == "load" else e
    return e.op == "div" and e.src[1].is_const and e.src[1].arg >= 8 and is_far_from_zero(e, made)


def _least(e: Expr, made: Mapping[str, Expr]) -> float:
    """No value of an expression is smaller, if it is positive."""
    e = made.get(e.arg, e) if e.op == "load" else e
    if e.is_const:
        return float(e.arg)
    if e.op == "cast" and e.dtype in _WIDE and e.src[0].dtype in _WIDE:
        return _least(e.src[0], made) * (1 - 2**-8)  # it may be rounded down
    if e.op == "max":
        return max(_least(s, made) for s in e.src)
    if e.op in ("div", "mul") and e.src[1].is_const and e.src[1].arg > 0:
        least = _least(e.src[0], made)
        return least / e.src[1].arg if e.op == "div" else least * e.src[1].arg
    return -1.0
