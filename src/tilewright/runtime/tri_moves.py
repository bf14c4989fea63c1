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
def rows(read, start, stop, V: tl.constexpr, LANES: tl.constexpr):
    """Elements of every row from the last place of sixteen bytes at or before its `start`, up to
    `stop`, which is 0 for none. V are sixteen bytes. Each row is put down further on than the ones
    before, so that neighbours in a column are not in one bank of shared memory."""
    row = tl.arange(0, start.shape[0])[:, None]
    lane = tl.arange(0, LANES)[None, :]
    vector = start // V + ((lane // V - row // V) & (LANES // V - 1))
    inside = tl.max_constancy((vector * V < stop) & (stop > 0), [1, V])
    place = tl.max_contiguous(tl.multiple_of(vector * V + lane % V, [1, V]), [1, V])
    tile = tl.load(read + place, inside, other=0)
    return tl.reshape(tile, [start.shape[0] * LANES])


@jit
def looked_up(tile, row, lane, V: tl.constexpr, LANES: tl.constexpr):
    """Elements of such rows."""
    spot = row * LANES + ((lane + (row & -V)) & (LANES - 1))
    return tl.gather(tile, spot.to(tl.int32), 0)


@jit
def column_of(each, V: tl.constexpr, LANES: tl.constexpr):
    """Columns of a tile that a warp has sixteen bytes sixteen times of two of: almost all of what
    it looks up is in other banks."""
    return each // (16 * V) % 2 + each // (2 * LANES) * 2


@jit
def row_of(each, V: tl.constexpr, LANES: tl.constexpr):
    return each % (16 * V) + each // (32 * V) % (LANES // (16 * V)) * (16 * V)


@jit
def turned(read, written, begin, to, pid, rows_: tl.constexpr, columns: tl.constexpr,
           V: tl.constexpr, LEAN: tl.constexpr, PIECE: tl.constexpr, YBLOCK: tl.constexpr,
           XBLOCK: tl.constexpr):  # fmt: skip
    """`written[to + y * rows + x] = read[begin + x * columns + y]`. A tile has LEAN lanes more than
    YBLOCK along y, V where rows begin anywhere, and PIECE more than XBLOCK along x."""
    YLANES: tl.constexpr = YBLOCK + LEAN
    XLANES: tl.constexpr = XBLOCK + PIECE
    xblocks = (rows_ + PIECE - 1 + XBLOCK - 1) // XBLOCK
    x0 = pid % xblocks * XBLOCK
    y0 = pid // xblocks * YBLOCK
    x = x0 - (PIECE - 1) + tl.arange(0, XLANES)[:, None]
    stop = tl.where((x >= 0) & (x < rows_), begin + (x + 1) * columns, 0)
    tile = rows(read, begin + tl.maximum(x, 0) * columns + y0, stop, V, YLANES)
    each = tl.arange(0, YLANES * XLANES)
    c = column_of(each, V, XLANES)
    k = row_of(each, V, XLANES)
    start = to + (y0 + c) * rows_
    slide = start % PIECE
    x = tl.minimum(k, XBLOCK - 1) - slide
    lane = tl.minimum(c, YBLOCK - 1)
    if LEAN:
        lane += (x * (columns % V) + (begin + x0 * columns + y0) % V) & (V - 1)
    found = looked_up(tile, x + PIECE - 1, lane, V, YLANES)
    first = x0 + k // V * V
    inside = (c < YBLOCK) & (y0 + c < columns) & (k < XBLOCK)
    inside = inside & (first >= slide) & (first + V <= slide + rows_)
    place = tl.max_contiguous(tl.multiple_of(start - slide + x0 + k, V), V)
    tl.store(written + place, found, tl.max_constancy(inside, V))
    if x0 == 0:
        _ends(read, written, begin, to, y0, rows_, columns, V, YLANES, YBLOCK)


@jit
def _ends(read, written, begin, to, y0, rows: tl.constexpr, columns: tl.constexpr, V: tl.constexpr,
          LANES: tl.constexpr, YBLOCK: tl.constexpr):  # fmt: skip
    """What is not in whole vectors of a tile's columns, at both ends of them."""
    c = tl.arange(0, LANES)[:, None]
    start = to + (y0 + c) * rows
    x, inside = edges(start % V, rows, V)
    inside = inside & (c < YBLOCK) & (y0 + c < columns)
    found = tl.load(read + (begin + x * columns + y0 + c), inside, other=0)
    tl.store(written + (start + x), found, inside)


@jit
def edges(slide, size, V: tl.constexpr):
    """Places of what is not in whole vectors of a piece of memory, which begins `slide` behind a
    place of one."""
    two = tl.arange(0, 2 * V)
    head = (slide + V - 1) // V * V - slide
    tail = (slide + size) // V * V - slide
    at = tl.where(two < V, two, tail + two - V)
    return at, ((two < V) == (at < head)) & (at < size)


# ---- few rows


@jit
def kept_rows(V: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr):
    """Which row each element in shared memory belongs to, ROWS behind all of them: rows that are V
    apart are next to each other there, so that what V threads look up in them is in other banks."""
    row = tl.arange(0, KEPT).to(tl.uint32) // LANES
    far: tl.constexpr = ROWS // V
    return tl.where(row < ROWS, row // far + row % far * V, ROWS).to(tl.int32)


@jit
def kept(read, start, stop, V: tl.constexpr, LANES: tl.constexpr, KEPT: tl.constexpr):
    """Elements of every row from the last place of sixteen bytes at or before its `start`, up to
    its `stop`."""
    each = tl.arange(0, KEPT).to(tl.uint32)
    first = (start & -V) + (each // V % (LANES // V) * V).to(tl.int32)
    inside = tl.max_constancy(first < stop, V)
    place = tl.max_contiguous(tl.multiple_of(first + (each % V).to(tl.int32), V), V)
    return tl.load(read + place, inside, other=0)


@jit
def found_in(tile, row, lane, further, V: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Elements of such rows, and those that are so much further on: what a thread has found out for
    eight elements it knows for all its others."""
    spot = (row & (V - 1)) * (ROWS // V * LANES) + (row & -V) * (LANES // V) + lane + further
    found = tl.gather(tile, tl.reshape(spot.to(tl.int32), [spot.numel]), 0)
    return tl.reshape(found, spot.shape)


@jit
def pieces(FULL: tl.constexpr, PIECES: tl.constexpr, V: tl.constexpr):
    """So many pieces of V elements, and the place of each element; of all beyond FULL the last."""
    each = tl.arange(0, PIECES * V)[None, :]
    piece = each // V
    return piece, tl.minimum(piece, FULL - 1) * V + each % V
