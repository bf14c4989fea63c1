"""Eight-bit floats, as the bytes that are in memory, for generated Triton kernels."""

# Triton compiles these functions from their text; they have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(__name__.endswith("interpreted"))

if INTERPRETED:
    from tilewright.runtime.interpret import plain as jit
else:
    jit = triton.jit


@jit
def read(x, man: tl.constexpr, bias: tl.constexpr, inf: tl.constexpr, nan: tl.constexpr,
         uz: tl.constexpr):  # fmt: skip
    """A byte as the number it stands for; `inf` and `nan` are codes, -1 for none."""
    shift: tl.constexpr = 23 - man
    u = x.to(tl.int32)
    magnitude = u & 0x7F
    sign = (u & 0x80) << 24
    body = magnitude << shift
    normal = body + ((127 - bias) << 23)
    unit: tl.constexpr = (128 - bias) << 23
    whole = (body + unit).to(tl.float32, bitcast=True)
    one = (body * 0 + unit).to(tl.float32, bitcast=True)
    tiny = (whole - one).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < (1 << man), tiny, normal)
    if uz:
        bits = tl.where(u == 0x80, 0x7FC00000, bits | sign)
    else:
        bits = tl.where(magnitude == inf, 0x7F800000, bits)
        bits = tl.where(magnitude >= nan, 0x7FC00000, bits) | sign
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@jit
def given(x, man: tl.constexpr, bias: tl.constexpr, inf: tl.constexpr, nan: tl.constexpr):
    """The same by an instruction of the card (H200: 7168x7168 to bfloat16 41 us, 49 us)."""
    if INTERPRETED:
        return read(x, man, bias, inf, nan, False)
    return x.to(tl.float8e4nv if man == 3 else tl.float8e5, bitcast=True).to(tl.float32)


@jit
def rounded(x, man: tl.constexpr, bias: tl.constexpr, largest: tl.constexpr, beyond: tl.constexpr,
            uz: tl.constexpr):  # fmt: skip
    """Rounded to nearest, ties to even; `beyond` is the code of what is too large."""
    shift: tl.constexpr = 23 - man
    u = x.to(tl.int32, bitcast=True)
    a = u & 0x7FFFFFFF
    sign = (u >> 24) & 0x80
    smallest: tl.constexpr = (128 - bias) << 23
    normal = (a - ((127 - bias) << 23) + ((1 << (shift - 1)) - 1) + ((a >> shift) & 1)) >> shift
    anchor: tl.constexpr = smallest + (shift << 23)
    unit = (a * 0 + anchor).to(tl.float32, bitcast=True)
    tiny = (a.to(tl.float32, bitcast=True) + unit).to(tl.int32, bitcast=True) - anchor
    r = tl.where(a < smallest, tiny, normal)
    r = tl.where(r > largest, beyond, r)
    r = tl.where(a >= (160 << 23), beyond, r)
    r = tl.where(a > 0x7F800000, 0x80 if uz else 0x7F, r)
    if uz:
        r = tl.where((r == 0) | (r == 0x80), r, r | sign)
    else:
        r = r | sign
    return r.to(tl.uint8)


@jit
def at_once(x, man: tl.constexpr, bias: tl.constexpr, largest: tl.constexpr, beyond: tl.constexpr,
            within: tl.constexpr):  # fmt: skip
    """The same by an instruction of the card: it gives the largest number for what is too large,
    which none is if all are `within`."""
    if INTERPRETED:
        return rounded(x, man, bias, largest, beyond, False)
    if man == 3 and not within and beyond != largest:  # the instruction makes NaN of NaN
        x = tl.where(tl.abs(x) <= 464, x, float("nan"))
    near = x.to(tl.float8e4nv if man == 3 else tl.float8e5).to(tl.uint8, bitcast=True)
    if man == 2 and not within:
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        other = tl.where(x != x, 0x7F, beyond) | sign
        near = tl.where(tl.abs(x) < 61440, near, other.to(tl.uint8))
    return near
