"""A matrix turned whose rows begin anywhere in memory, moved sixteen bytes at once.

A tile of such a matrix can neither be read nor written so as it is: each of its rows begins
elsewhere. Here it is read with every row from where sixteen bytes begin, and written with every
column from where a piece of memory begins; in between each element is looked up in shared memory.
"""

# Triton compiles these functions from their text; they have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton.language as tl

if __name__.endswith("interpreted"):
    from tilewright.runtime.interpret import plain as jit
else:
    from tilewright.runtime.tri import jit


@jit
def turned(read, written, pid, rows: tl.constexpr, columns: tl.constexpr, V: tl.constexpr,
           PIECE: tl.constexpr, YBLOCK: tl.constexpr, XBLOCK: tl.constexpr):  # fmt: skip
    """`written[y * rows + x] = read[x * columns + y]`. V elements are sixteen bytes; a tile has V
    lanes more than YBLOCK along y, and PIECE more than XBLOCK along x."""
    YLANES: tl.constexpr = YBLOCK + V
    XLANES: tl.constexpr = XBLOCK + PIECE
    xblocks = (rows + PIECE - 1 + XBLOCK - 1) // XBLOCK
    x0 = pid % xblocks * XBLOCK
    y0 = pid // xblocks * YBLOCK
    # every row is put down further on than the one before, so that a column is not in one bank
    row = tl.arange(0, XLANES)[:, None]
    lane = tl.arange(0, YLANES)[None, :]
    x = x0 - (PIECE - 1) + row
    vector = (x * columns + y0) // V + ((lane // V - row // V) & (YLANES // V - 1))
    inside = (x >= 0) & (x < rows) & (vector * V < rows * columns)
    place = tl.max_contiguous(tl.multiple_of(vector * V + lane % V, [1, V]), [1, V])
    tile = tl.load(read + place, tl.max_constancy(inside, [1, V]), other=0)
    # a warp has sixteen times sixteen bytes of each of two columns: almost all in other banks
    each = tl.arange(0, YLANES * XLANES)
    k = each % (16 * V) + each // (32 * V) % (XLANES // (16 * V)) * (16 * V)
    c = each // (16 * V) % 2 + each // (2 * XLANES) * 2
    start = (y0 + c) * rows
    slide = start % PIECE
    x = tl.minimum(k, XBLOCK - 1) - slide
    lean = (x * (columns % V) + (x0 * columns + y0) % V) & (V - 1)
    x += PIECE - 1
    lane = lean + tl.minimum(c, YBLOCK - 1) + (x & -V)
    spot = x * YLANES + (lane & (YLANES - 1))
    found = tl.gather(tl.reshape(tile, [XLANES * YLANES]), spot.to(tl.int32), 0)
    first = x0 + k // V * V
    inside = (c < YBLOCK) & (y0 + c < columns) & (k < XBLOCK)
    inside = inside & (first >= slide) & (first + V <= slide + rows)
    place = tl.max_contiguous(tl.multiple_of(start - slide + x0 + k, V), V)
    tl.store(written + place, found, tl.max_constancy(inside, V))
    if x0 == 0:
        _ends(read, written, y0, rows, columns, V, YBLOCK)


@jit
def _ends(read, written, y0, rows: tl.constexpr, columns: tl.constexpr, V: tl.constexpr,
          YBLOCK: tl.constexpr):  # fmt: skip
    """What is not in whole vectors of a tile's columns, at both ends of them."""
    c = tl.arange(0, YBLOCK + V)[:, None]
    start = (y0 + c) * rows
    slide = start % V
    two = tl.arange(0, 2 * V)[None, :]
    head = (slide + V - 1) // V * V - slide
    tail = (slide + rows) // V * V - slide
    x = tl.where(two < V, two, tail + two - V)
    inside = ((two < V) == (x < head)) & (x < rows) & (c < YBLOCK) & (y0 + c < columns)
    tl.store(written + (start + x), tl.load(read + (x * columns + y0 + c), inside, other=0), inside)
