"""Triton text of types, literals, casts, folds and the operations of `ir.ops.TABLE`.

Eight-bit floats have no type here: their value is the byte in memory, and casts from and to them
are spelled out, so that they round as in eager on every architecture.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from tilewright.ir.expr import Expr
from tilewright.ir.ops import POLYNOMIALS

TYPE: dict[torch.dtype, str] = {
    torch.float64: "tl.float64", torch.float32: "tl.float32", torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16", torch.int64: "tl.int64", torch.int32: "tl.int32",
    torch.int16: "tl.int16", torch.int8: "tl.int8", torch.uint8: "tl.uint8",
    torch.uint16: "tl.uint16", torch.uint32: "tl.uint32", torch.uint64: "tl.uint64",
    torch.bool: "tl.int1", torch.float8_e4m3fn: "tl.uint8", torch.float8_e5m2: "tl.uint8",
    torch.float8_e4m3fnuz: "tl.uint8", torch.float8_e5m2fnuz: "tl.uint8",
}  # fmt: skip

SIGNATURE: dict[torch.dtype, str] = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16",
    torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16",
    torch.int8: "*i8", torch.uint8: "*u8", torch.uint16: "*u16", torch.uint32: "*u32",
    torch.uint64: "*u64", torch.bool: "*i1", torch.float8_e4m3fn: "*u8",
    torch.float8_e5m2: "*u8", torch.float8_e4m3fnuz: "*u8", torch.float8_e5m2fnuz: "*u8",
}  # fmt: skip
"""How Triton names a pointer to elements of a type."""

FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
                 torch.float8_e5m2fnuz))  # fmt: skip
FP8_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_SMALL = (torch.float16, torch.bfloat16)


# ---- literals


def number(value: bool | int | float, dtype: torch.dtype) -> str:
    """A literal as Python text."""
    if dtype == torch.bool:
        return str(bool(value))
    if not dtype.is_floating_point:
        return str(int(value))
    value = float(value)
    if dtype == torch.float32:
        value = torch.tensor(value, dtype=dtype).item()
    if math.isnan(value) or math.isinf(value):
        return f'float("{value}")'
    return repr(value)


def neutral(kind: str, dtype: torch.dtype) -> str:
    """What a reduction starts from."""
    if kind in ("sum", "any", "xor", "logsumexp_sum"):
        return number(0, dtype)
    if kind in ("prod", "all"):
        return number(1, dtype)
    largest = kind in ("min", "argmin")
    if dtype.is_floating_point:
        return number(math.inf if largest else -math.inf, dtype)
    if dtype == torch.bool:
        return str(largest)
    limits = torch.iinfo(dtype)
    return str(limits.max if largest else limits.min)


# ---- casts


@functools.cache
def _e4m3fn_beyond() -> int:
    """Newer releases of torch saturate, older ones give NaN."""
    return int(torch.tensor(1e6).to(torch.float8_e4m3fn).view(torch.uint8).item())


def _fp8(dtype: torch.dtype, part: Literal["from", "to"]) -> tuple[str, ...]:
    """What a conversion from or to an eight-bit float is told of its type."""
    man = 3 if dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz) else 2
    uz = dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    bias = (7 if man == 3 else 15) + uz
    inf = 0x7C if dtype == torch.float8_e5m2 else -1
    nan = 0x80 if uz else (0x7F if man == 3 else 0x7D)
    if part == "from":
        return tuple(map(str, (man, bias, inf, nan, uz)))
    largest = 0x7F if uz else (0x7E if man == 3 else 0x7B)
    beyond = 0x80 if uz else (_e4m3fn_beyond() if man == 3 else 0x7C)
    return tuple(map(str, (man, bias, largest, beyond, uz)))


def fp8_at_once(text: str, source: Expr, to: torch.dtype, made: Mapping[str, Expr]) -> str:
    """A float in a type of `FP8_LARGEST`, by the card's own instruction. `made` are the values of
    the buffers the kernel makes."""
    *facts, _ = _fp8(to, "to")
    largest = FP8_LARGEST[to]
    within = str(_is_within(source, largest) or is_scaled(source, largest, made))
    arguments = (cast(text, source.dtype, torch.float32), *facts, within)
    return f"tri_fp8.at_once({', '.join(arguments)})"


def fp8_read(text: str, source: torch.dtype, to: torch.dtype) -> str:
    """The other way."""
    *facts, _ = _fp8(source, "from")
    return cast(f"tri_fp8.given({', '.join((text, *facts))})", torch.float32, to)


def _is_within(e: Expr, largest: float) -> bool:
    """Whether a value was cut off at both sides."""
    sides: set[str] = set()
    while e.op in ("min", "max") and any(s.is_const for s in e.src):
        at = next(k for k, s in enumerate(e.src) if s.is_const)
        if abs(e.src[at].arg) <= largest:
            sides.add(e.op)
        e = e.src[1 - at]
    return len(sides) == 2


def is_scaled(e: Expr, largest: float, made: Mapping[str, Expr]) -> bool:
    """Whether a value was scaled by the largest of its row, so that this is no larger than what the
    type has (H200: groups of 128 bfloat16)."""

    def value(e: Expr) -> Expr:
        return made.get(e.arg, e) if e.op == "load" else e

    if e.op not in ("div", "mul") or e.dtype != torch.float32:
        return False
    scale = value(e.src[1])
    if scale.op != "div":
        return False
    top, limit = (value(s) for s in (scale.src if e.op == "div" else reversed(scale.src)))
    while top.op == "max" and any(s.is_const for s in top.src):
        top = value(next(s for s in top.src if not s.is_const))
    if not limit.is_const or not 0 < limit.arg <= largest:
        return False
    folded = value(top.src[0]) if top.op == "reduce" and top.arg.kind == "max" else top
    return folded is not top and folded.op == "abs" and value(folded.src[0]) is value(e.src[0])


def cast(text: str, source: torch.dtype, to: torch.dtype) -> str:
    """A value of one type in another, rounded as in eager."""
    if source == to:
        return text
    if source in FP8:
        read = f"tri_fp8.read({', '.join((text, *_fp8(source, 'from')))})"
        return cast(read, torch.float32, to)
    if to == torch.bool:
        return f"({text} != 0)"
    if to in FP8:
        given = (cast(text, source, torch.float32), *_fp8(to, "to"))
        return f"tri_fp8.rounded({', '.join(given)})"
    if to in _SMALL and source != torch.float32:
        text = f"{text}.to(tl.float32)"  # as eager: through float
    if source in _SMALL and to != torch.float32:
        text, source = f"{text}.to(tl.float32)", torch.float32
    if source.is_floating_point and to in (torch.int8, torch.int16, torch.uint8, torch.uint16):
        text = f"{text}.to(tl.int32)"  # what does not fit keeps its low bits
    if source.is_floating_point and to == torch.uint32:
        text = f"{text}.to(tl.int64)"
    return f"{text}.to({TYPE[to]})"


# ---- operations


def _infix(symbol: str, on_bool: str) -> Callable[..., str]:
    def text(e: Expr, a: str, b: str) -> str:
        return f"({a} {on_bool if e.dtype == torch.bool else symbol} {b})"

    return text


def _compare(symbol: str) -> Callable[..., str]:
    def text(e: Expr, a: str, b: str) -> str:
        if e.src[0].dtype == torch.bool:
            return f"({a}.to(tl.int8) {symbol} {b}.to(tl.int8))"
        return f"({a} {symbol} {b})"

    return text


def _extreme(name: str, on_bool: str) -> Callable[..., str]:
    def text(e: Expr, a: str, b: str) -> str:
        if e.dtype == torch.bool:
            return f"({a} {on_bool} {b})"
        if e.dtype.is_floating_point:
            return f"tri.{name}({a}, {b})"
        return f"tl.{name}({a}, {b})"

    return text


def _division(name: str, on_float: str) -> Callable[..., str]:
    def text(e: Expr, a: str, b: str) -> str:
        whole = not e.dtype.is_floating_point
        return f"tri.int_{name}({a}, {b})" if whole else on_float.format(a=a, b=b)

    return text


def _call(name: str) -> Callable[..., str]:
    return lambda e, *args: f"{name}({', '.join(args)})"


def _library(name: str) -> Callable[..., str]:
    return _call(f"libdevice.{name}")


def _own_float(name: str) -> Callable[..., str]:
    """A function of our own for floats, the library's for doubles."""
    return lambda e, a: f"{'tri_maths' if e.dtype == torch.float32 else 'libdevice'}.{name}({a})"


def _special(name: str) -> Callable[..., str]:
    """A function of our own, in double."""

    def text(e: Expr, *args: str) -> str:
        wide = (a if e.dtype == torch.float64 else f"{a}.to(tl.float64)" for a in args)
        return f"tri_special.{name}({', '.join(wide)}).to({TYPE[e.dtype]})"

    return text


def _polynomial(name: str) -> Callable[..., str]:
    """In the type itself, so that it overflows where eager's does."""
    return _call(f"tri_special.{name}")


def _random(e: Expr, seed: str, place: str) -> str:
    made = torch.float64 if drawn(e) == "rand64" else torch.float32
    return cast(f"tri.{drawn(e)}({seed}, {place})", made, e.dtype)


def drawn(e: Expr) -> str:
    """What draws the numbers of a random operation."""
    return "rand64" if e.dtype == torch.float64 and e.op == "rand" else e.op


def random_block(e: Expr, shape: str, counter: str, seed: str, *bounds: str) -> str:
    """The same for places that follow each other, all those of each counter at once."""
    made = {"rand64": torch.float64, "randint": torch.int64}.get(drawn(e), torch.float32)
    numbers = f"tri.{drawn(e)}_block({', '.join((seed, counter, *bounds))})"
    return cast(f"tl.reshape({numbers}, {shape})", made, e.dtype)


def below_block(shape: str, counter: str, seed: str, limit: float) -> str:
    """Which of them are below a number between zero and one: they are steps of 2**-24."""
    least = math.ceil(torch.tensor(limit, dtype=torch.float32).item() * 2**24)
    return f"tl.reshape(tri.below_block({seed}, {counter}, {least << 8}), {shape})"


PER_COUNTER = {"rand": 4, "randn": 4, "rand64": 2, "randint": 2}


def _unless_bool(template: str) -> Callable[..., str]:
    return lambda e, a: a if e.src[0].dtype == torch.bool else template.format(a=a)


def _signbit(e: Expr, a: str) -> str:
    if e.src[0].dtype.is_floating_point:
        return f"tri.signbit({a})"
    return f"({a}.to(tl.int8) < 0)" if e.src[0].dtype == torch.bool else f"({a} < 0)"


def _bitcast(e: Expr, a: str) -> str:
    if TYPE[e.dtype] == TYPE[e.src[0].dtype]:
        return a
    return f"{a}.to({TYPE[e.dtype]}, bitcast=True)"


LIBRARY = (
    "exp2", "expm1", "log", "log2", "log10", "log1p", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "trunc", "rsqrt",
    "atan2", "hypot", "copysign", "nextafter",
)  # fmt: skip

SPECIAL = (
    "erfinv", "digamma", "i0", "i0e", "i1", "i1e", "ndtri", "log_ndtr", "erfcx", "bessel_j0",
    "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0", "modified_bessel_i1",
    "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0",
    "scaled_modified_bessel_k1", "spherical_bessel_j0", "airy_ai", "igamma", "igammac", "zeta",
)  # fmt: skip

OPS: dict[str, Callable[..., str]] = {
    "add": _infix("+", "|"),
    "sub": _infix("-", "^"),
    "mul": _infix("*", "&"),
    "div": lambda e, a, b: f"tri.div({a}, {b})",
    "floordiv": _division("floordiv", "tri.floordiv({a}, {b})"),
    "truncdiv": _division("truncdiv", "libdevice.trunc(tri.div({a}, {b}))"),
    "mod": _division("mod", "tri.mod({a}, {b})"),
    "fmod": _division("fmod", "libdevice.fmod({a}, {b})"),
    "min": _extreme("minimum", "&"),
    "max": _extreme("maximum", "|"),
    "pow": lambda e, a, b: f"libdevice.pow({a}, {b})" if e.dtype.is_floating_point
    else f"tri.int_pow({a}, {b})",
    "gcd": _call("tri.gcd"),
    # Triton's minus is a difference from zero, which has no sign where zero is taken from zero
    "neg": lambda e, a: f"({a} * -1.0)" if e.dtype.is_floating_point else f"(-{a})",
    "abs": _unless_bool("tl.abs({a})"),
    "sign": _unless_bool("tri.sign({a})"),
    "signbit": _signbit,
    **{name: _compare(symbol) for name, symbol in (
        ("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="),
    )},
    "bit_and": _infix("&", "&"),
    "bit_or": _infix("|", "|"),
    "bit_xor": _infix("^", "^"),
    "bit_not": lambda e, a: f"({a} == 0)" if e.dtype == torch.bool else f"(~{a})",
    "shl": _call("tri.shl"),
    "shr": _call("tri.shr"),
    "where": _call("tl.where"),
    "isnan": lambda e, a: f"({a} != {a})",
    "cast": lambda e, a: cast(a, e.src[0].dtype, e.dtype),
    "bitcast": _bitcast,
    "index": lambda e, i, size: f"tl.where(({i} >= 0) & ({i} < {size}), {i}, 0)",
    "floor": _call("tl.floor"),
    "ceil": _call("tl.ceil"),
    "round": _library("nearbyint"),
    "sqrt": _call("tri.sqrt"),
    **{name: _own_float(name) for name in ("lgamma", "sin", "cos")},
    "exp": _call("tri.exp"),
    "sigmoid": _call("tri.sigmoid"),
    **{name: _library(name) for name in LIBRARY},
    **{name: _special(name) for name in SPECIAL},
    **{name: _polynomial(name) for name in POLYNOMIALS},
    "rand": _random,
    "randn": _random,
    "randint": lambda e, seed, offset, low, high: cast(
        f"tri.randint({seed}, {offset}, {low}, {high})", torch.int64, e.dtype),
}  # fmt: skip

COMBINE = {"sum": "tri.add", "prod": "tri.mul", "min": "tri.minimum", "max": "tri.maximum",
           "any": "tri.either", "all": "tri.both", "xor": "tri.differ", "argmin": "tri.argmin",
           "argmax": "tri.argmax", "welford": "tri.welford"}  # fmt: skip
"""Two partial results of a fold as one."""

RUNNING = {"sum": "tri.add", "prod": "tri.mul", "logsumexp": "tri_logs.sums",
           "max": "tri.later_max", "min": "tri.later_min", "sort": "tri.in_order"}  # fmt: skip
"""The same of a scan."""

COARSE = {"exp": "tri.fast_exp({0})", "sigmoid": "tri.fast_sigmoid({0})",
          "erf": "tri.fast_erf({0})", "tanh": "tri.fast_tanh({0})",
          "expm1": "tri_maths.fast_expm1({0})", "log": "tri_maths.fast_log({0})",
          "log1p": "tri_maths.fast_log1p({0})", "div": "({0} / {1})"}  # fmt: skip
ERF_BESIDE_ONE = "tri.erf_beside_one({0})"
BY_A_SUM = "({0} * (1.0 / {1}))"
BY_SHARED = "tri_rows.by_shared({0}, {1})"
BY_FAR = "tri_rows.by_far({0}, {1})"
SILU = "({0} * tri.fast_sigmoid({0}))"
"""Float32 operations where only the first twenty bits will be seen."""

STEPS = frozenset(("floor", "ceil", "trunc", "round", "eq", "ne", "lt", "le", "gt", "ge",
                   "floordiv", "truncdiv", "mod", "fmod"))  # fmt: skip
"""Operations that make a large difference of a small one."""
PERIODIC = frozenset(("sin", "cos", "tan"))
"""Those of which every turn counts: an angle of thousands has few bits left behind its point."""
