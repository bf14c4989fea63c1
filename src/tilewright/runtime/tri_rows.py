"""Rows, for generated Triton kernels: such as begin between two places of sixteen bytes, loaded in
whole pieces and moved into place in registers; and values that a whole row has."""

# Triton compiles these functions from their text; they have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton.language as tl

if __name__.endswith("interpreted"):
    from tilewright.runtime.interpret import helpers
    from tilewright.runtime.interpret import plain as jit

    div_by_shared = helpers("tri").div
else:
    from tilewright.runtime.tri import jit

    @jit
    def div_by_shared(a, b):
        """Of floats with a divisor in common, rounded as a division: its reciprocal and what is
        left over by that. A division takes three times as long, and more for zeros, which masked
        elements are (H200: causal softmax of 205 floats 97 us, 142 us)."""
        k = tl.where(tl.abs(b) < 2.0**-64, 2.0**64, 1.0)  # or the reciprocal might be infinite
        a, b = a * k, b * k
        r = tl.div_rn(tl.full(b.shape, 1.0, tl.float32), b)
        q = a * r
        left = tl.fma(q, tl.broadcast_to(-b, q.shape), a)
        more = tl.fma(left, tl.broadcast_to(r, q.shape), q)
        return tl.where(tl.abs(left) > 0, more, q)  # no number is left of an infinite quotient


PIECE = 8  # elements of a piece


@jit
def _halves(x):
    """The first half of each piece and the second, where a piece is all dimensions but two."""
    if len(x.shape) == 5:
        halves = tl.permute(x, (0, 1, 3, 4, 2))
    elif len(x.shape) == 4:
        halves = tl.permute(x, (0, 1, 3, 2))
    else:
        halves = x
    return tl.split(halves)


@jit
def slid(p, start, lane, mask, X: tl.constexpr, R: tl.constexpr):
    """What is at `start + lane` of a row: lanes run in whole pieces of eight from a multiple of
    eight, `start` is any number. Two neighbouring pieces of memory have all of a piece of lanes;
    it is picked by halving, four elements further or not, then two, then one."""
    first = (start >> 3) * 8
    away = start - first
    parted = away != 0  # or there may be no memory behind the last piece
    if mask is None:
        here = tl.load(p + (first + lane))
        after = tl.load(p + (first + lane + 8), parted, other=0)
    else:
        here = tl.load(p + (first + lane), mask, other=0)
        after = tl.load(p + (first + lane + 8), mask & parted, other=0)
    a, b = _halves(tl.reshape(here, [X, R // 8, 2, 2, 2]))
    c, d = _halves(tl.reshape(after, [X, R // 8, 2, 2, 2]))
    by = (away & 4)[:, :, None, None] != 0
    a, b, c = tl.where(by, b, a), tl.where(by, c, b), tl.where(by, d, c)
    p0, p1 = _halves(a)
    p2, p3 = _halves(b)
    p4, p5 = _halves(c)
    by = (away & 2)[:, :, None] != 0
    p0, p1, p2 = tl.where(by, p1, p0), tl.where(by, p2, p1), tl.where(by, p3, p2)
    p3, p4 = tl.where(by, p4, p3), tl.where(by, p5, p4)
    e0, e1 = _halves(p0)
    e2, e3 = _halves(p1)
    e4, e5 = _halves(p2)
    e6, e7 = _halves(p3)
    e8, _ = _halves(p4)
    by = (away & 1) != 0
    e0, e1, e2 = tl.where(by, e1, e0), tl.where(by, e2, e1), tl.where(by, e3, e2)
    e3, e4, e5 = tl.where(by, e4, e3), tl.where(by, e5, e4), tl.where(by, e6, e5)
    e6, e7 = tl.where(by, e7, e6), tl.where(by, e8, e7)
    even = tl.join(tl.join(e0, e4), tl.join(e2, e6))
    odd = tl.join(tl.join(e1, e5), tl.join(e3, e7))
    return tl.reshape(tl.join(even, odd), [X, R])
