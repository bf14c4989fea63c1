"""What is said of a mask over a rectangle, against the mask at each of its points."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.attention.ranges import FALSE, M0, M1, N0, N1, TRUE, holds
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, load, var, walk
from tilewright.ir.interp import _apply, _index_op
from tilewright.ir.ops import TABLE

ROWS, COLUMNS = 14, 17
ROW, COLUMN = var("i", ix.as_index(ROWS)), var("j", ix.as_index(COLUMNS))
op = build.op


def evaluated(root: Expr, known: Mapping[Expr, Tensor]) -> Tensor:
    done: dict[Expr, Any] = dict(known)
    for node in walk(root):
        if node not in done:
            src = [done[s] for s in node.src]
            if node.op == "const":
                done[node] = torch.tensor(node.arg, dtype=node.dtype)
            else:
                done[node] = _apply(node, src) if node.op in TABLE else _index_op(node.op, src)
    return done[root]


def judged(mask: Expr) -> list[tuple[bool, bool, bool, bool]]:
    """Of rectangles of all kinds: whether the mask holds anywhere, everywhere, and what is said."""
    points = {ROW: torch.arange(ROWS)[:, None], COLUMN: torch.arange(COLUMNS)[None]}
    grid = evaluated(mask, points).expand(ROWS, COLUMNS)
    draw = random.Random(0)
    starts = [(draw.randrange(ROWS), draw.randrange(COLUMNS)) for _ in range(300)]
    ends = [(a, min(a + draw.choice((0, 1, 3, 8)), ROWS - 1),
             b, min(b + draw.choice((0, 1, 3, 8)), COLUMNS - 1)) for a, b in starts]  # fmt: skip
    corners = dict(zip((M0, M1, N0, N1), torch.tensor(ends).unbind(1), strict=True))
    found = holds(mask, ROW, COLUMN)
    said = [evaluated(e, corners).expand(len(ends)).tolist() for e in (found.maybe, found.surely)]
    return [(bool(grid[a : b + 1, c : d + 1].any()), bool(grid[a : b + 1, c : d + 1].all()), *pair)
            for (a, b, c, d), *pair in zip(ends, *said, strict=True)]  # fmt: skip


NUMBERS: dict[str, Expr] = {
    "row": ROW,
    "ahead": op("sub", ROW, COLUMN),
    "behind": op("sub", op("add", COLUMN, const(3)), ROW),
    "sum": ix.add(ROW, COLUMN),
    "twice": op("add", op("mul", ROW, const(2)), COLUMN),
    "less": op("add", op("mul", COLUMN, const(-3)), ROW),
    "block": ix.floordiv(COLUMN, 4),
    "against": op("neg", COLUMN),
    "apart": op("abs", op("sub", op("add", ROW, const(2)), COLUMN)),
    "index": ix.add(ix.mul(ROW, 2), ix.mul(COLUMN, -1)),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("compared", ["lt", "le", "gt", "ge"])
def test_a_sum_of_positions_is_told_exactly(name: str, compared: str) -> None:
    """Each is largest and least at corners, and takes every value that matters between."""
    for limit in (-5, 0, 3, 6, 20):
        for mask in (op(compared, NUMBERS[name], const(limit)),
                     op(compared, const(limit), NUMBERS[name])):  # fmt: skip
            found = judged(mask)
            assert found
            for anywhere, everywhere, maybe, surely in found:
                assert maybe >= anywhere and surely <= everywhere
                if name != "apart":  # its least value is not looked for inside
                    assert (maybe, surely) == (anywhere, everywhere)


@pytest.mark.parametrize("compared", ["eq", "ne"])
def test_blocks_that_are_equal(compared: str) -> None:
    """As those of documents; two ranges that meet may be equal."""
    mask = op(compared, ix.floordiv(ROW, 4), ix.floordiv(COLUMN, 4))
    found = judged(mask)
    assert all(maybe >= anywhere and surely <= everywhere
               for anywhere, everywhere, maybe, surely in found)  # fmt: skip
    tells = {(maybe, surely) for _, _, maybe, surely in found}
    assert tells == {(True, False), (True, True), (False, False)}
    certain = [pair for pair in found if pair[2] == pair[3]]
    assert all(pair[:2] == pair[2:] for pair in certain)


def test_masks_of_masks() -> None:
    """Windows and prefixes: both, either, not, by what is known of each; what is read from memory
    may hold or not."""
    causal = op("ge", ROW, COLUMN)
    near = op("le", op("sub", ROW, COLUMN), const(4))
    prefix = op("lt", COLUMN, const(3))
    for mask in (op("bit_and", causal, near), op("bit_or", causal, prefix), op("bit_not", causal),
                 op("bit_not", op("bit_and", causal, op("bit_not", prefix)))):  # fmt: skip
        found = judged(mask)
        assert all(maybe >= anywhere and surely <= everywhere
                   for anywhere, everywhere, maybe, surely in found)  # fmt: skip
        assert {True, False} == {f[2] for f in found} == {f[3] for f in found}
    read = load("documents", torch.bool, ROW)
    alone, beside = (holds(m, ROW, COLUMN) for m in (read, op("bit_and", causal, read)))
    assert (alone.maybe, alone.surely, alone.tells) == (TRUE, FALSE, False)
    assert beside.surely is FALSE and beside.maybe is holds(causal, ROW, COLUMN).maybe
