"""What generated Triton kernels call for running logarithms of sums of exponentials.

These are pairs: the largest value so far, and the sum of exponentials relative to it. What is small
beside the largest has no digits to lose.
"""

# Triton compiles these functions from their text; they have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton.language as tl

if __name__.endswith("interpreted"):
    from tilewright.runtime.interpret import helpers, libdevice
    from tilewright.runtime.interpret import plain as jit

    add, maximum = helpers("tri").add, helpers("tri").maximum
else:
    from triton.language.extra import libdevice

    from tilewright.runtime.tri import add, jit, maximum


@jit
def _small(x, top):
    """The exponential of how far a value is from the largest; of equal ones of any size one."""
    away = tl.where(x == top, 0.0, -tl.abs(x - top))
    return libdevice.exp2(away * 1.4426950408889634)


@jit
def sums(m, s, m_b, s_b):
    """Of two sets: the larger of both stays as it is."""
    first = m >= m_b
    more = tl.where(first, s_b, s) * _small(m, m_b)
    return maximum(m, m_b), tl.where(first, s, s_b) + more


@jit
def log_of(m, s):
    return m + libdevice.log(s)


@jit
def total(x, axis: tl.constexpr):
    """Of all values along an axis."""
    top = tl.reduce(x, axis, maximum, keep_dims=True)
    return top, tl.reduce(_small(x, top), axis, add, keep_dims=True)


@jit
def _largest(m, p, m_b, p_b):
    """Of two sets, one after the other: the largest, and that of all but the last value."""
    return maximum(m, m_b), maximum(m, p_b)


@jit
def _decayed(d, s, d_b, s_b):
    """Of two sets: by what sums before them become smaller, and their own."""
    return d * d_b, s * d_b + s_b


@jit
def scan(x, m, s, axis: tl.constexpr, back: tl.constexpr):
    """After each value along an axis, with what was before the first. The largest are found before
    anything is summed: a value is larger than all before it, which become smaller, or is small
    beside them. So there is one exponential for each value, not for every two sets that are joined
    (H200: cumulative logarithms of 16384 rows of 2048 floats 85 us, 106 us so)."""
    nothing = tl.full(x.shape, float("-inf"), x.dtype)
    top, before = tl.associative_scan((x, nothing), axis, _largest, reverse=back)
    top, before = maximum(m, top), maximum(m, before)
    larger, small = x > before, _small(x, before)
    steps = tl.where(larger, small, 1.0), tl.where(larger, 1.0, small)
    decay, own = tl.associative_scan(steps, axis, _decayed, reverse=back)
    return top, s * decay + own


@jit
def last(top, s, axis: tl.constexpr, back: tl.constexpr):
    """What such a scan ends with."""
    count: tl.constexpr = s.shape[axis]
    lane = tl.expand_dims(tl.arange(0, count), 1 - axis)
    own = tl.where(lane == (0 if back else count - 1), s, 0.0)
    return tl.reduce(top, axis, maximum, keep_dims=True), tl.reduce(own, axis, add, keep_dims=True)
