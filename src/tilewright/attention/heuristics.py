"""Blocks of the templates for cards: rows of data, best first, and a model of the time.

The first of each row is what a card of its kind is known to like; without measurements of our own
the sizes are those that fit registers: sums of a block of queries and the products of one block of
keys. Under `max_autotune` all of a row are measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.attention.problem import AttentionProblem
from tilewright.gemm.roofline import flops
from tilewright.ir import index as ix


@dataclass(frozen=True)
class Blocks:
    m: int
    n: int
    warps: int
    stages: int


# By the elements of a query or value, at most: (sixteen bits), (float32).
FORWARD: dict[int, tuple[tuple[Blocks, ...], tuple[Blocks, ...]]] = {
    64: ((Blocks(128, 128, 8, 3), Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 3)),
         (Blocks(128, 32, 4, 3), Blocks(64, 32, 4, 2))),
    128: ((Blocks(128, 64, 8, 3), Blocks(128, 128, 8, 2), Blocks(64, 64, 4, 3)),
          (Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 2))),
    256: ((Blocks(64, 64, 4, 2), Blocks(128, 32, 8, 2), Blocks(64, 32, 4, 2)),
          (Blocks(32, 32, 4, 2), Blocks(32, 16, 4, 1))),
    1024: ((Blocks(32, 32, 4, 1), Blocks(16, 16, 4, 1)), (Blocks(16, 16, 4, 1),)),
}  # fmt: skip
# More keys than these spill: the sums of a block of keys and of values stay in registers.
BACKWARD: dict[int, tuple[tuple[Blocks, ...], tuple[Blocks, ...]]] = {
    64: ((Blocks(64, 64, 4, 3), Blocks(32, 128, 8, 3), Blocks(32, 64, 4, 2)),
         (Blocks(32, 64, 4, 2), Blocks(32, 32, 4, 1))),
    128: ((Blocks(64, 64, 8, 2), Blocks(32, 128, 8, 2), Blocks(32, 64, 4, 2)),
          (Blocks(32, 32, 4, 2), Blocks(16, 32, 4, 1))),
    256: ((Blocks(32, 64, 8, 2), Blocks(32, 32, 4, 2), Blocks(16, 32, 4, 1)),
          (Blocks(16, 32, 4, 1), Blocks(16, 16, 4, 1))),
    1024: ((Blocks(16, 16, 4, 1),), (Blocks(16, 16, 4, 1),)),
}  # fmt: skip
DECODING = (Blocks(16, 128, 4, 3), Blocks(16, 64, 4, 3), Blocks(16, 64, 2, 2))
DECODING_WIDE = (Blocks(16, 64, 4, 2), Blocks(16, 32, 4, 1))
FEW_ROWS = 32  # queries of a key head for which keys are shared out
SHARE = 256  # keys that are worth a program of their own
EFFICIENCY = 0.45  # of a card's peak, by a template
WIDEST = 1024
LAUNCH = 5.0  # microseconds of a kernel that has nothing to do


def row(table: dict[int, tuple[tuple[Blocks, ...], tuple[Blocks, ...]]], problem: AttentionProblem
        ) -> tuple[Blocks, ...]:  # fmt: skip
    width = max(ix.likely(w) for w in problem.widths)
    found = next(table[w] for w in sorted(table) if width <= w)
    return found[problem.dtype == torch.float32]


def turned(blocks: Blocks) -> Blocks:
    """For programs that have queries rather than keys."""
    return Blocks(blocks.n, blocks.m, blocks.warps, blocks.stages)


def decoding(problem: AttentionProblem) -> tuple[Blocks, ...]:
    wide = max(ix.likely(w) for w in problem.widths) > 128 or problem.dtype == torch.float32
    return DECODING_WIDE if wide else DECODING


def shares(problem: AttentionProblem) -> int:
    """How many programs share out the keys of a few queries, so that all SMs have some."""
    b, h, m, n = problem.hints
    group = problem.node.group
    if problem.is_backward or m * group > FEW_ROWS:
        return 1
    programs = max(1, b * (h // group))
    wanted = min(2 * problem.target.sms // programs, n // SHARE)
    return 1 << max(0, min(wanted, 64)).bit_length() - 1 if wanted > 1 else 1


def estimate(problem: AttentionProblem) -> float:
    """Microseconds."""
    peak = flops(problem.target, problem.dtype)  # a microsecond
    return problem.flops / (peak * EFFICIENCY) + LAUNCH * (2 if problem.is_backward else 1)
