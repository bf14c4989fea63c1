"""Constructors of value expressions. They fold literals and drop what provably changes nothing.

Floating-point rules are exact: `x + 0.0` stays (it turns -0.0 into 0.0), `x * 1.0` goes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright import config
from tilewright.ir.expr import INDEX, REBUILD, Expr, Reduce, Scan, const, load, make, rewrite, walk
from tilewright.ir.index import bounds, known_le, known_lt, known_nonneg
from tilewright.ir.ops import INDEX_OPS, TABLE

TRUE, FALSE = const(True, torch.bool), const(False, torch.bool)
_TRAPPING = frozenset(("floordiv", "truncdiv", "mod", "fmod"))  # integers over zero are an error
_FOLDABLE = frozenset(TABLE) - {"rand", "randn", "randint", "index", "bitcast"}


def op(name: str, *src: Expr, arg: Any = None) -> Expr:
    """One row of the operation table applied; the dtype follows from the row."""
    row = TABLE[name]
    if len(src) != row.arity:
        raise ValueError(f"{name} takes {row.arity} operands, got {len(src)}")
    dtype = {"same": src[0].dtype, "bool": torch.bool, "second": src[-1].dtype, "index": INDEX,
             "arg": arg}[row.result]  # fmt: skip
    simpler = _simplify(name, dtype, src)
    if simpler is not None:
        return simpler
    if name in _FOLDABLE and all(s.op == "const" for s in src):
        return _fold(name, dtype, src)
    return make(name, dtype, src, arg if row.result in ("arg", "index") else None)


def _fold(name: str, dtype: torch.dtype, src: tuple[Expr, ...]) -> Expr:
    values = [torch.tensor(s.arg, dtype=s.dtype) for s in src]
    try:
        result = TABLE[name].ref(*values, *([dtype] if name == "cast" else []))
    except RuntimeError:  # an integer division by zero is the program's error, when it runs
        return make(name, dtype, src, dtype if name == "cast" else None)
    return const(result.item(), dtype)


def _simplify(name: str, dtype: torch.dtype, src: tuple[Expr, ...]) -> Expr | None:
    match name:
        case "cast" if src[0].dtype == dtype:
            return src[0]
        case "cast" if src[0].op == "cast" and _widens(src[0].src[0].dtype, src[0].dtype, dtype):
            return op("cast", src[0].src[0], arg=dtype)
        case "cast" if src[0].op == "cast" and _only_rounds(src[0], dtype):
            return src[0].src[0]
        case "where" if src[0].op == "const":
            return src[1] if src[0].arg else src[2]
        case "where" if src[1] is src[2]:
            return src[1]
        case "bit_and" if dtype == torch.bool:
            return _absorb(src, TRUE, FALSE)
        case "bit_or" if dtype == torch.bool:
            return _absorb(src, FALSE, TRUE)
        case "bit_not" if src[0].op == "bit_not":
            return src[0].src[0]
        case "mul" | "div" if src[1].op == "const" and src[1].arg == 1:
            return src[0]
        case "div" if src[1].op == "const" and _has_reciprocal(src[1].arg):
            return op("mul", src[0], const(1 / src[1].arg, dtype))
        case "mul" if src[0].op == "const" and src[0].arg == 1:
            return src[1]
        case "add" | "sub" if src[1].op == "const" and src[1].arg == 0 and not _is_float(dtype):
            return src[0]
        case "lt" if src[0].dtype == INDEX and _is_index(src[0]) and _is_index(src[1]):
            return _index_lt(src[0], src[1])
        case "ge" if src[0].dtype == INDEX and _is_index(src[0]) and _is_index(src[1]):
            less = _index_lt(src[0], src[1])
            return None if less is None else (FALSE if less is TRUE else TRUE)
        case "index" if known_nonneg(src[0]) and known_lt(src[0], src[1]):
            return src[0]
        case _:
            return None


def _has_reciprocal(number: float) -> bool:
    """Whether dividing is multiplying: by a power of two that every float type has."""
    return 2**-14 <= abs(number) <= 2**14 and abs(math.frexp(number)[0]) == 0.5


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _is_index(e: Expr) -> bool:
    return e.op in INDEX_OPS or e.op in ("const", "var", "sym", "index")


def _index_lt(a: Expr, b: Expr) -> Expr | None:
    if known_lt(a, b):
        return TRUE
    return FALSE if bounds(a)[0] >= bounds(b)[1] or known_le(b, a) else None


def _widens(a: torch.dtype, b: torch.dtype, c: torch.dtype) -> bool:
    """Whether converting a -> b -> c is the same as a -> c, because b holds every value of a."""
    if not (a.is_floating_point and b.is_floating_point and c.is_floating_point):
        return False
    # eight-bit floats have no promotion
    return b.itemsize > a.itemsize > 1 and torch.promote_types(a, b) == b


def _only_rounds(inner: Expr, dtype: torch.dtype) -> bool:
    """Whether float32 -> bfloat16 -> float32 may be skipped: only when asked for."""
    return (not config.emulate_precision_casts and inner.src[0].dtype == dtype
            and dtype.is_floating_point and inner.dtype.is_floating_point)  # fmt: skip


def _absorb(src: tuple[Expr, ...], unit: Expr, zero: Expr) -> Expr | None:
    a, b = src
    if a is unit or a is b or b is zero:
        return b
    return a if b is unit or a is zero else None


def cast(a: Expr, dtype: torch.dtype) -> Expr:
    return op("cast", a, arg=dtype)


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    return op("where", condition, a, b)


def both(a: Expr, b: Expr) -> Expr:
    return op("bit_and", a, b)


def reduce(kind: str, *values: Expr, dtype: torch.dtype | None = None) -> Expr:
    return make("reduce", dtype or values[0].dtype, values, Reduce(kind))


def scan(kind: str, axis: Expr, *values: Expr) -> Expr:
    return make("scan", values[0].dtype, values, Scan(kind, axis.arg))


def part(fold: Expr, position: int, dtype: torch.dtype | None = None) -> Expr:
    return make("part", dtype or fold.dtype, (fold,), position)


def require(value: Expr, condition: Expr) -> Expr:
    """`value`; where `condition` does not hold the program raises an error when it runs.

    An index into a table of one is zero or an error, and nothing less zero is itself.
    """
    zero = op("index", where(condition, const(0), const(-1)), const(1))
    return op("sub", value, cast(zero, value.dtype))


def guard(value: Expr, mask: Expr) -> Expr:
    """`value` computed only where `mask`: its loads are not made elsewhere, and give 0 there. What
    the mask itself is made of is known everywhere, and stays as it is: a position that says whether
    it is inside is one value, not another one under each mask (H200: bilinear samples of
    16x3x512x512 floats computed the positions of all four corners five times)."""
    if mask is TRUE:
        return value
    known = frozenset(walk(mask))

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if node in known:
            return node
        if node.op == "load":
            inner = both(src[1], mask) if len(src) == 2 else mask
            return load(node.arg, node.dtype, src[0], inner)
        if node.op == "index":  # a position that is not used must not fail its check either
            size = src[1] if known_lt(0, src[1]) else where(mask, src[1], const(1))
            return op("index", where(mask, src[0], const(0)), size, arg=node.arg)
        if node.op in _TRAPPING and not _is_float(node.dtype):
            return op(node.op, src[0], where(mask, src[1], const(1, node.dtype)))
        return None

    return rewrite(value, rule)


def _rebuild(node: Expr, src: tuple[Expr, ...]) -> Expr:
    return op(node.op, *src, arg=node.arg)


def _reload(node: Expr, src: tuple[Expr, ...]) -> Expr:
    """One that has become certain, as when a part of a concatenation is taken, is a plain one."""
    return make("load", node.dtype, src[:1] if src[-1] is TRUE else src, node.arg)


REBUILD.update(dict.fromkeys(TABLE, _rebuild))
REBUILD["load"] = _reload
