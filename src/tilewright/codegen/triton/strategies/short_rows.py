"""Short rows in tiles: a row by a few threads, several of them by a warp.

A block of a power of two leaves up to half of its lanes empty, and all threads of a warp have to
meet for each row that it reduces. In as many narrow tiles as a row is long no lane is empty but
in the last of them; tiles meet in the threads that have them, and a row has few of these. They
are held as the chunks of long rows are (`strategies/chunked.py`), but nothing is computed again:
it is little.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewright import rules
from tilewright.codegen.triton.analysis.accesses import own_rows, reduces_pairs_of_rows, stores_rows
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.analysis.operations import is_gathered
from tilewright.codegen.triton.analysis.work import along, is_heavy
from tilewright.codegen.triton.plan.config import below, power
from tilewright.codegen.triton.plan.tiling import Shape, cannot_hand_over
from tilewright.codegen.triton.strategies.misaligned_rows import (
    has_computed_places,
    misaligned_rows,
    rows_alike,
)
from tilewright.codegen.triton.tile.paired import PAIR
from tilewright.codegen.triton.tile.reduce import reduced_type
from tilewright.ir.expr import free_vars
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.nests.hints import hint_product


def short_rows(facts: KernelFacts) -> Shape | str:
    """The shape with rows in tiles, where they are many and short."""
    if reason := _unsuited(facts):
        return reason
    shape, group, size = facts.shape, facts.group, facts.length
    form = misaligned_rows(facts.program, group, replace(shape, chunk=size))
    piece = form.inner[0].vector
    if form.packed:
        return "rows lie one after the other: several are moved as one piece"
    if form.misaligned and not piece and size > rules.SHORT_ROW_TILE.limit:
        return "rows are misaligned, and not all of them alike"
    if size <= rules.SHORT_ROW_TILE.limit:
        tile = _of_few(group, form, size)
    elif not piece:
        tile = _of_even(shape, size)
    elif piece == PAIR:
        tile = _of_pairs(shape, size)
    else:
        tile = _of_odd(shape, size)
    if not tile:
        return "rows are as fast in one block"
    return replace(form, short=True, chunk=tile)


def _of_even(shape: Shape, size: int) -> int:
    """Even rows are as fast as memory in a block, but for a few (H200): such as are only
    reduced, with exponentials of their elements (cross entropy of 131072 rows of 1000 bfloat16
    62 us, 100 us; but where one is taken of two sums of a row, of 4096 of 2048, 22.9 us, the
    sums in a block 18.5 us), short ones that leave much of it empty (layer norm of 160 69 us, 85
    us; but of two of them 71 us, 67 us, and of 160 floats 68 us, 66 us), and such with a mask of
    each element that do (softmax of 2504 float16 54 us, 64 us) or that are quantized (int8 of
    1280 float16 105 us, 113 us), or that are made of several rows which are gathered (layer norm
    of three of 768 55 us, 62 us; of one 77 us, 48 us), by a warp each. Also pairs of rows
    (products of 27 rows of 128 bfloat16 174 us, 227 us)."""
    nodes = shape.nodes
    empty = 4 * size <= 3 * power(size)
    rows = own_rows(shape)
    masked = any(n.dtype == torch.bool for n in rows)
    width = max((n.dtype.itemsize for n in rows), default=4)
    short = len(rows) == 1 and size <= (
        rules.SHORT_SPARSE_ROW.limit * 2 // width
        if rows_alike(shape.flat())
        else rules.SHORT_SPARSE_ROW.limit
    )
    folded = not stores_rows(shape) and any(n.op == "exp" for n in along(shape))
    quantized = any(
        n.op == "cast" and n.dtype.itemsize == 1 for n in nodes if n.dtype != torch.bool
    )
    if (
        empty
        and 2 * rules.SHORT_ROW_WARP.limit < size < 4 * rules.SHORT_ROW_WARP.limit
        and sum(is_gathered(n.src[0]) for n in rows) > 1
    ):
        return rules.SHORT_ROW_WARP.limit
    tiled = folded or reduces_pairs_of_rows(shape) or (empty and (masked or short or quantized))
    return (
        max(rules.SHORT_ROW_TILE.limit, power(size / rules.SHORT_ROW_TILES.limit)) if tiled else 0
    )


def _of_few(group: Group, form: Shape, size: int) -> int:
    """Of few floats four at a time, where a block would be empty by a quarter (H200: likelihoods of
    1048576 rows of 17 60 us, 101 us; of 17 with what is stored for gradients 106 us, 118 us;
    mixtures of ten 40 us, 53 us). Even ones that are stored are faster in a block (gradients of
    these 98 us, 107 us)."""
    wide = all(n.dtype.itemsize == 4 for n in own_rows(form))
    empty = size > rules.SHORTEST_ROW_TILE.limit * 2 and 4 * size <= 3 * power(size)
    own = set(form.inner[0].loops)
    stored = any(own & free_vars(s.index) for s in form.stores if s.buffer not in group.local)
    return (
        rules.SHORTEST_ROW_TILE.limit if wide and empty and (form.misaligned or not stored) else 0
    )


def _of_pairs(shape: Shape, size: int) -> int:
    """Not such with weights: these are taken twice, from threads that have others. Fewer threads
    for short rows that are only reduced, with less to do for each (H200: focal losses of 1048576
    rows of 91 bfloat16 59 us, 74 us by eight; cross entropy of 65 60 us, 81 us; of 127 60 us, 58
    us)."""
    if rows_alike(shape.flat()):
        return 0
    few = size <= rules.SHORT_PAIRS.limit and not stores_rows(shape)
    fewest = rules.SHORT_PAIR_TILE.limit // 2 if few else rules.SHORT_PAIR_TILE.limit
    return max(fewest, power(size / rules.SHORT_PAIR_TILES.limit))


def _of_odd(shape: Shape, size: int) -> int:
    """By one warp, or by more where rows would not fit its registers (H200: layer norm of 1501
    bfloat16 72 us, 76 us by two; of 5001 74 us by four, 97 us by single elements); of several rows
    fewer tiles (softmax with a mask of 1441 36 us by two, 38 us by one; layer norm of a sum, of
    4095 70 us by four, 74 us by two). Wide weights leave no room."""
    flat = shape.flat()
    alike = rows_alike(flat)
    if any(n.arg in alike and n.dtype.itemsize > 2 for n in flat.loads):
        return 0
    several = len(own_rows(shape)) > 1
    full = 8 * size > 7 * power(size)
    if (
        full
        and not (alike or several)
        and (stores_rows(shape) or size <= 4 * rules.SHORT_ROW_WARP.limit)
    ):
        return 0  # a block is as good (cross entropy of 1001 43 us, 46 us in tiles)
    if several:
        return max(rules.SHORT_ROW_WARP.limit, below(4 * size // 11))
    return max(rules.SHORT_ROW_WARP.limit, power(size / rules.SHORT_ROW_TILES.limit))


def _unsuited(facts: KernelFacts) -> str:
    shape = facts.shape
    if reason := facts.not_rows or facts.not_plain or facts.finds_places or facts.draws:
        return reason
    if shape.row_programs:
        return "several programs share a row"
    if not shape.persistent:
        return "rows do not fit in registers"
    shortest, longest = rules.SHORTEST_ROW_TILE.limit, rules.SHORT_ROW.limit
    if not shortest < facts.length <= longest:
        return f"rows do not have between {shortest} and {longest} elements"
    if hint_product(a.extent for a in shape.axes) < rules.SHORT_ROWS_ELEMENTS.limit:
        return f"all rows have fewer than {rules.SHORT_ROWS_ELEMENTS.limit} elements"
    if is_heavy(shape):
        return "a special function makes for long code"
    if has_computed_places(shape):
        return "each element has a place of its own to compute in some operand"
    nodes = [n for n in shape.nodes if n.op == "reduce"]
    if any(reduced_type(n.src[0].dtype) != torch.float32 for n in nodes):
        return "a reduction is not computed in float32"
    return cannot_hand_over(facts.group, replace(shape, persistent=False))
