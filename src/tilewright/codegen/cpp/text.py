"""C++ text of types, literals, index expressions and the operations of `ir.ops.TABLE`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tilewright.ir.expr import Expr
from tilewright.ir.ops import POLYNOMIALS

CTYPE: dict[torch.dtype, str] = {
    torch.float64: "double", torch.float32: "float", torch.float16: "tw::f16",
    torch.bfloat16: "tw::bf16", torch.int64: "int64_t", torch.int32: "int32_t",
    torch.int16: "int16_t", torch.int8: "int8_t", torch.uint8: "uint8_t",
    torch.uint16: "uint16_t", torch.uint32: "uint32_t", torch.uint64: "uint64_t",
    torch.bool: "bool", torch.float8_e4m3fn: "tw::f8e4m3fn", torch.float8_e5m2: "tw::f8e5m2",
    torch.float8_e4m3fnuz: "tw::f8e4m3fnuz", torch.float8_e5m2fnuz: "tw::f8e5m2fnuz",
}  # fmt: skip


def memory_type(dtype: torch.dtype) -> str:
    """The type a buffer's elements have in memory: a bool is a byte, which vectorises."""
    return "uint8_t" if dtype == torch.bool else CTYPE[dtype]


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "true" if value else "false"
    if dtype.is_floating_point:
        return _float_literal(float(value), dtype)
    if dtype == torch.uint64:
        return f"{int(value)}ULL"
    if value == -(2**63):
        return "INT64_MIN"
    return f"INT64_C({int(value)})" if dtype == torch.int64 else f"{CTYPE[dtype]}({int(value)})"


def _float_literal(value: float, dtype: torch.dtype) -> str:
    if math.isnan(value):
        text = '__builtin_nanf("")'
    elif math.isinf(value):
        text = "__builtin_inff()" if value > 0 else "(-__builtin_inff())"
    elif dtype == torch.float64:
        return f"({value!r})" if value < 0 else repr(value)
    else:
        rounded = torch.tensor(value, dtype=torch.float32).item()
        if math.isinf(rounded):
            return _float_literal(rounded, dtype)
        text = f"{rounded!r}f"
        text = f"({text})" if rounded < 0 or str(rounded).startswith("-") else text
    if dtype == torch.float64:
        return f"double({text})"
    return text if dtype == torch.float32 else f"tw::cast<{CTYPE[dtype]}>({text})"


def index_text(e: Expr, atom: Callable[[Expr], str]) -> str:
    """Sums and products as C++; `atom` renders everything they are made of."""
    match e.op:
        case "const":
            return str(e.arg)
        case "iadd":
            return "(" + " + ".join(index_text(s, atom) for s in e.src) + ")"
        case "imul":
            return "*".join(index_text(s, atom) for s in e.src)
        case _:
            return atom(e)


def index_op_text(op: str, a: str, b: str) -> str:
    """The index operations that get a variable of their own."""
    match op:
        case "ifloordiv":
            return f"tw::index_floordiv({a}, {b})"
        case "imod":
            return f"tw::index_mod({a}, {b})"
        case _:
            return f"tw::{op[1:]}(int64_t({a}), int64_t({b}))"


PRELUDE = '#include "tw.h"\n'


def _call(name: str) -> Callable[..., str]:
    return lambda e, *args: f"tw::{name}({', '.join(args)})"


def _infix(symbol: str) -> Callable[..., str]:
    return lambda e, a, b: f"({a} {symbol} {b})"


def _division(name: str) -> Callable[..., str]:
    """Integer division can fail: it reports to `tw_bad`."""

    def text(e: Expr, a: str, b: str) -> str:
        return f"tw::{name}({a}, {b}{'' if e.dtype.is_floating_point else ', tw_bad'})"

    return text


def _random(e: Expr, seed: str, offset: str) -> str:
    name = "randd" if e.dtype == torch.float64 and e.op == "rand" else e.op
    return f"tw::cast<{CTYPE[e.dtype]}>(tw::{name}({seed}, {offset}))"


def _logic(symbol: str, name: str) -> Callable[..., str]:
    def text(e: Expr, a: str, b: str) -> str:
        return f"({a} {symbol} {b})" if e.dtype == torch.bool else f"tw::{name}({a}, {b})"

    return text


OPS: dict[str, Callable[..., str]] = {
    **{name: _call(name) for name in (
        "add", "sub", "mul", "div", "min", "max", "pow", "gcd", "neg", "abs", "sign", "signbit",
        "shl", "shr", "isnan", "floor", "ceil", "trunc", "round", "sqrt", "rsqrt", "exp", "exp2",
        "expm1",
        "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
        "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "digamma",
        "sigmoid", "i0", "i0e", "i1", "i1e", "ndtri", "log_ndtr", "erfcx", "bessel_j0",
        "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0", "modified_bessel_i1",
        "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0",
        "scaled_modified_bessel_k1", "spherical_bessel_j0", "airy_ai", "atan2", "hypot",
        "copysign", "nextafter", "igamma", "igammac", "zeta", *POLYNOMIALS,
    )},
    **{name: _division(name) for name in ("floordiv", "mod", "fmod")},
    "truncdiv": lambda e, a, b: f"tw::trunc({a} / {b})" if e.dtype.is_floating_point
    else f"tw::truncdiv({a}, {b}, tw_bad)",
    **{name: _infix(symbol) for name, symbol in (
        ("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="),
    )},
    "bit_and": _logic("&", "bit_and"),
    "bit_or": _logic("|", "bit_or"),
    "bit_xor": _logic("^", "bit_xor"),
    "bit_not": lambda e, a: f"!{a}" if e.dtype == torch.bool else f"tw::bit_not({a})",
    "where": lambda e, c, a, b: f"({c} ? {a} : {b})",
    "cast": lambda e, a: f"tw::cast<{CTYPE[e.dtype]}>({a})",
    "bitcast": lambda e, a: f"tw::bit_cast<{CTYPE[e.dtype]}>({a})",
    "index": lambda e, i, size: f"tw::index({i}, {size}, tw_bad)",
    "rand": _random,
    "randn": _random,
    "randint": lambda e, seed, offset, low, high: f"tw::randint({seed}, {offset}, {low}, {high})",
}  # fmt: skip


def combine(kind: str, a: str, b: str) -> str:
    """Two partial folds into one, for the folds with a plain accumulator."""
    match kind:
        case "any":
            return f"({a} | {b})"
        case "all":
            return f"({a} & {b})"
        case "xor":
            return f"({a} ^ {b})"
        case "sum":
            return f"tw::add({a}, {b})"
        case "prod":
            return f"tw::mul({a}, {b})"
        case _:
            return f"tw::{kind}({a}, {b})"


def neutral(kind: str, dtype: torch.dtype) -> str:
    """What a fold starts from."""
    match kind:
        case "sum" | "any" | "xor":
            return literal(0, dtype)
        case "prod" | "all":
            return literal(1, dtype)
        case "max" | "argmax":
            return f"tw::limits<{CTYPE[dtype]}>::lowest"
        case _:
            return f"tw::limits<{CTYPE[dtype]}>::highest"
