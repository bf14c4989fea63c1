"""A matrix turned whose rows begin anywhere in memory, moved sixteen bytes at once.

A tile of such a matrix can neither be read nor written so as it is: each of its rows begins
elsewhere. Here it is read with every row from where sixteen bytes begin, and written with every
column from where a sector of memory begins; in between each element is looked up in shared memory,
where rows are as far behind sixteen bytes as in memory, so that an element is found by its row and
column alone.
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
def head(row, V: tl.constexpr, PITCH: tl.constexpr, GAP: tl.constexpr):
    """Where rows begin in shared memory. V are sixteen bytes."""
    return row * PITCH + row // V * GAP


@jit
def row_of(behind, V: tl.constexpr, PITCH: tl.constexpr, GAP: tl.constexpr, KEPT: tl.constexpr):
    """The rows that sixteen bytes in shared memory belong to, the first of which begins `behind`
    them: where two rows meet, to the second."""
    last = (tl.arange(0, KEPT // V) * V + (V - 1) - behind).to(tl.uint32)
    group = last // (V * PITCH + GAP)
    return (group * V + tl.minimum((last - group * (V * PITCH + GAP)) // PITCH, V - 1)).to(tl.int32)


@jit
def rows(read, place, stop, inside, head, V: tl.constexpr):
    """Elements of such rows, which begin at `place` in memory and at `head` in shared memory, as
    far behind sixteen bytes there as here, up to `stop`."""
    first = tl.arange(0, place.numel) * V + ((place & -V) - (head & -V))
    inside = (inside & (first < stop))[:, None] & (tl.arange(0, V)[None, :] >= 0)
    each = tl.multiple_of(first[:, None] + tl.arange(0, V)[None, :], [1, V])
    inside = tl.max_constancy(inside, [1, V])
    return tl.load(read + tl.max_contiguous(each, [1, V]), inside, other=0)


@jit
def pieces_of(VECTORS: tl.constexpr, APART: tl.constexpr, PIECES: tl.constexpr):
    """Which sixteen bytes of which column each is: a warp has eight of each of four columns, almost
    all of which are in other banks of shared memory."""
    each = tl.arange(0, PIECES)
    eight = each // 32 % (VECTORS // 8)
    four = each // (4 * VECTORS)
    column = four // APART * (4 * APART) + four % APART + each // 8 % 4 * APART
    return eight * 8 + each % 8, column


@jit
def looked_up(tile, spot):
    flat = tl.reshape(spot, [spot.numel]).to(tl.int32)
    return tl.reshape(tl.gather(tl.reshape(tile, [tile.numel]), flat, 0), spot.shape)


@jit
def put(written, place, found, inside):
    """Sixteen bytes each."""
    V: tl.constexpr = found.shape[1]
    lane = tl.arange(0, V)[None, :]
    each = tl.multiple_of(place[:, None] + lane, [1, V])
    inside = tl.max_constancy(inside[:, None] & (lane >= 0), [1, V])
    tl.store(written + tl.max_contiguous(each, [1, V]), found, inside)


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
