"""CuTe text of the operations of `ir.ops.TABLE`: each row has text, or the reason it has none.

Text is the same for a scalar and for a `TensorSSA`. What has none stays a loop kernel of its own:
a reason, not an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tilewright.gemm.cutedsl.types import TYPE, named
from tilewright.ir.expr import Expr
from tilewright.ir.ops import POLYNOMIALS

Text = Callable[..., str]
FP8_LARGEST = {torch.float8_e4m3fn: 448.0}
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16,
          torch.uint32, torch.uint64)  # fmt: skip


def _infix(symbol: str, on_bool: str) -> Text:
    def text(e: Expr, a: str, b: str) -> str:
        return f"({a} {on_bool if e.dtype == torch.bool else symbol} {b})"

    return text


def _compare(symbol: str) -> Text:
    def text(e: Expr, a: str, b: str) -> str:
        if e.src[0].dtype == torch.bool:
            a, b = (f"tw.to({x}, cutlass.Int32)" for x in (a, b))
        return f"({a} {symbol} {b})"

    return text


def _extreme(name: str, on_bool: str) -> Text:
    return lambda e, a, b: (
        f"({a} {on_bool} {b})" if e.dtype == torch.bool else f"tw.{name}({a}, {b})"
    )


def _call(name: str) -> Text:
    return lambda e, *args: f"{name}({', '.join(args)})"


def _math(name: str) -> Text:
    return _call(f"cute.math.{name}")


def _unless_bool(name: str) -> Text:
    return lambda e, a: a if e.src[0].dtype == torch.bool else f"{name}({a})"


def _pow(e: Expr, a: str, b: str) -> str:
    if not e.dtype.is_floating_point:
        raise NotImplementedError("pow of integers: the DSL has that of floats alone")
    return f"tw.pow({a}, {b})"


def _signbit(e: Expr, a: str) -> str:
    if e.src[0].dtype == torch.bool:
        return f"({a} & False)"
    return f"tw.signbit({a})"


@functools.cache
def _beyond() -> float:
    """What eager makes of a number beyond the largest: newer releases of torch saturate."""
    return torch.tensor(1e6).to(torch.float8_e4m3fn).float().item()


def cast(text: str, source: torch.dtype, to: torch.dtype) -> str:
    """A value of one type in another, rounded as in eager."""
    if source == to:
        return text
    for dtype in (source, to):
        if dtype not in TYPE:
            raise NotImplementedError(f"cast from {source} to {to}: the CuTe DSL has no {dtype}")
    if to == torch.float8_e5m2:
        raise NotImplementedError(f"cast from {source} to {to}: the card saturates, eager does not")
    if to == torch.float8_e4m3fn:
        return f"tw.to_fp8({text}, {named(to)}, {FP8_LARGEST[to]}, float('{_beyond()}'))"
    if source in (torch.float8_e4m3fn, torch.float8_e5m2) and to != torch.float32:
        text = f"tw.to({text}, cutlass.Float32)"
    return f"tw.to({text}, {named(to)})"


def _bitcast(e: Expr, a: str) -> str:
    if e.dtype.itemsize != e.src[0].dtype.itemsize:
        raise NotImplementedError("bitcast between types of different width")
    if torch.bool in (e.dtype, e.src[0].dtype):
        raise NotImplementedError("bitcast of bool: it is no byte in registers")
    return f"{a}.bitcast({named(e.dtype)})"


OPS: dict[str, Text] = {
    "add": _infix("+", "|"),
    "sub": _infix("-", "^"),
    "mul": _infix("*", "&"),
    "div": lambda e, a, b: f"({a} / {b})",
    "floordiv": _call("tw.floordiv"),
    "truncdiv": _call("tw.truncdiv"),
    "mod": _call("tw.mod"),
    "fmod": _call("tw.fmod"),
    "min": _extreme("minimum", "&"),
    "max": _extreme("maximum", "|"),
    "pow": _pow,
    "neg": lambda e, a: f"(-{a})",
    "abs": _unless_bool("tw.absolute"),
    "sign": _unless_bool("tw.sign"),
    "signbit": _signbit,
    **{name: _compare(symbol) for name, symbol in (
        ("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="),
    )},
    "bit_and": _infix("&", "&"),
    "bit_or": _infix("|", "|"),
    "bit_xor": _infix("^", "^"),
    "bit_not": lambda e, a: f"({a} ^ True)" if e.dtype == torch.bool else f"(~{a})",
    "shl": _call("tw.shl"),
    "shr": _call("tw.shr"),
    "where": _call("tw.where"),
    "isnan": _call("tw.isnan"),
    "cast": lambda e, a: cast(a, e.src[0].dtype, e.dtype),
    "bitcast": _bitcast,
    "floor": _math("floor"),
    "ceil": _math("ceil"),
    "trunc": _math("trunc"),
    "round": _math("roundeven"),
    "exp": _call("tw.exp"),
    "sigmoid": _call("tw.sigmoid"),
    "hypot": _call("tw.hypot"),
    **{name: _math(name) for name in (
        "sqrt", "rsqrt", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan",
        "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
        "atan2", "copysign",
    )},
}  # fmt: skip

_NO_FUNCTION = "the CuTe DSL has no such function, and ours are written for Triton"
REASONS: dict[str, str] = {
    "gcd": "it loops for as long as its operands say",
    "index": "a kernel of the DSL cannot report an index out of range",
    "nextafter": _NO_FUNCTION,
    **dict.fromkeys((
        "erfinv", "lgamma", "digamma", "i0", "i0e", "i1", "i1e", "ndtri", "log_ndtr", "erfcx",
        "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0",
        "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1",
        "scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0",
        "airy_ai", "igamma", "igammac", "zeta", *POLYNOMIALS,
    ), _NO_FUNCTION),
    **dict.fromkeys(("rand", "randn", "randint"),
                    "random numbers are drawn by kernels that draw four at a time"),
}  # fmt: skip


def text(e: Expr, *args: str) -> str:
    """An operation over its operands' texts; `NotImplementedError` names what there is not."""
    found = OPS.get(e.op)
    if found is None:
        why = REASONS.get(e.op, "there is no such operation")
        raise NotImplementedError(f"{e.op}({', '.join(args)}): {why}")
    return found(e, *args)
