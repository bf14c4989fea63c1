"""Products with weights of four bits in the tiles of a matrix unit (`_weight_int4pack_mm`).

    result[m, n] = sum over k of x[m, k] * ((weights[n, k] - 8) * scale[k // group, n] + zero[...])

Weights lie as the matrix units of NVIDIA's cards take them, in tiles of 8 columns by 16 of k, of
which `inner` neighbours along k are one piece of memory: [n / 8][k / (16 inner)][8][4][inner / 2]
words of 32 bits. The 4 are pairs of columns of a tile, and a word has 8 numbers of two tiles, in
ascending bits: first those whose k is even, of both halves of either tile, then those beside them.
So the digits of k in a piece are (j, t, h, c, b), of inner / 2, 2, 2, 4 and 2, and its number is
4 b + 2 t + h of word (inner / 2) c + j: j the pair of tiles, t the tile, h its half, c the pair of
columns, b the one of both.

A sum may be taken in any order: the problem's k walks memory, word by word and number by number,
and what `x` is read at is where that is (`natural`). So words are loaded as they lie, sixteen bytes
at once, and pairs of `x`. Each is lessened by 8, scaled and moved in float32 and rounded once, as
by ATen's fused operation. For sizes known only at run time the call is ATen's, which competes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tilewright.gemm.problem import Operand, loops, plain
from tilewright.gemm.provider import enabled
from tilewright.gemm.weights import WeightsProblem, is_contiguous
from tilewright.ir import index as ix
from tilewright.ir.build import cast, op, where
from tilewright.ir.expr import Expr, const, free_vars, load, loads, substitute
from tilewright.ir.program import Opaque, Program, View
from tilewright.target import Target

aten = torch.ops.aten
OP = "_weight_int4pack_mm"
INNER = (2, 4, 8)  # tiles along k in a piece of memory
GROUPS = (32, 64, 128, 256)  # neighbours along k with a scale in common
COLUMNS, DEPTH = 8, 16  # of a tile
IN_WORD = 8
MIDDLE = 8.0  # what a number is lessened by
DRAWN = 1021  # words that weights repeat while they are timed: a prime, not to meet again in a row


@dataclass(frozen=True)
class TiledProblem(WeightsProblem):
    """Its k is the order in memory; scales and zeros are in the right operand's value."""

    inner: int = 8
    group: int = 128

    @property
    def tile_k(self) -> int:
        return DEPTH * self.inner

    @property
    def positions(self) -> tuple[tuple[Expr, ...], ...]:
        at = natural(self.k, self.inner)
        return (self.m, at), (at, self.n)

    @property
    def given(self) -> tuple[View | int, ...]:
        x, weights = (o.view for o in self.operands)
        _, n, k = (ix.value_of(e) for e in self.sizes[1:])
        assert n is not None and k is not None
        words = (n // COLUMNS, k // self.tile_k, 32, self.inner // 2)
        read = {e for e in loads(self.operands[1].value) if e.dtype == x.dtype}
        first = min(read, key=_start)  # a scale is before its zero
        scales = _dense(first.arg, (k // self.group, n, 2), const(_start(first)), x.dtype)
        return x, _dense(weights.buffer, words, weights.offset, torch.int32), self.group, scales

    @property
    def contents(self) -> dict[str, tuple[int, ...]]:
        return {self.operands[1].view.buffer: _drawn()}


def _start(element: Expr) -> int:
    """Where the first of such elements is."""
    at = element.src[0]
    start = ix.value_of(substitute(at, dict.fromkeys(free_vars(at), ix.ZERO)))
    assert start is not None
    return start


def _dense(buffer: str, size: Sequence[int], offset: Expr, dtype: torch.dtype) -> View:
    sizes = tuple(map(const, size))
    return View(buffer, sizes, tuple(ix.contiguous_strides(list(size))), offset, dtype)


@lru_cache(1)
def _drawn() -> tuple[int, ...]:
    draw = random.Random(0)
    return tuple(draw.randrange(-(2**31), 2**31) for _ in range(DRAWN))


# ---- the layout


def natural(at: Expr, inner: int) -> Expr:
    """What k of the product is at a place along the k of the problem: numbers of a word in pairs
    that are neighbours, for which `x` is read in pairs. Digits are divided first and reduced then:
    so Triton sees the pairs."""
    word = ix.floordiv(at, IN_WORD)
    pair, column = ix.mod(word, inner // 2), ix.mod(ix.floordiv(word, inner // 2), 4)
    half = ix.mod(ix.floordiv(at, 2), 4)  # of either of two tiles
    digits = (ix.floordiv(at, DEPTH * inner), pair, half, column, ix.mod(at, 2))
    return ix.linearize(digits, (DEPTH * inner, 2 * DEPTH, DEPTH // 2, 2, 1))


def bits(number: int) -> int:
    """Where in its word a number is, of those in the order of `natural`."""
    return 4 * (4 * (number % 2) + number // 2)


def unpacked(words: View, scales: View, place: tuple[Expr, Expr], inner: int, group: int,
             dtype: torch.dtype) -> Expr:  # fmt: skip
    """The weight at (k, n), of the k of the problem."""
    k, n = place
    piece = DEPTH * inner
    word = ix.floordiv(k, IN_WORD)
    of_row = 2 * inner  # words of a column in a piece
    tile = words.size[1].arg * COLUMNS * of_row
    at = ix.linearize((ix.floordiv(n, COLUMNS), ix.floordiv(word, of_row), ix.mod(n, COLUMNS),
                       ix.mod(word, of_row)),
                      (tile, COLUMNS * of_row, of_row, 1), words.offset)  # fmt: skip
    held = load(words.buffer, torch.int32, at)
    made = _number(held, IN_WORD - 1)
    for p in reversed(range(IN_WORD - 1)):
        made = where(op("eq", ix.mod(k, IN_WORD), const(p)), _number(held, p), made)
    of = ix.floordiv(k if group % piece == 0 else natural(k, inner), group)
    first = ix.linearize((of, n), scales.stride[:2], scales.offset)
    scale, zero = (cast(load(scales.buffer, dtype, ix.add(first, step)), torch.float32)
                   for step in (0, 1))  # fmt: skip
    less = op("sub", cast(made, torch.float32), const(MIDDLE, torch.float32))
    return cast(op("add", op("mul", less, scale), zero), dtype)


def _number(word: Expr, number: int) -> Expr:
    shifted = op("shr", word, const(bits(number), torch.int32))
    return op("bit_and", shifted, const(15, torch.int32))


# ---- from a call


def is_tuned(call: Opaque) -> bool:
    return call.target is aten._weight_int4pack_mm.default


def parsed(program: Program, call: Opaque, result: View) -> TiledProblem | str:
    """The problem, in the program's names, or why it is the library's."""
    target = Target.of(program.buffers[result.buffer].device)
    if not target.is_gpu or target.arch.startswith("gfx"):
        return "only NVIDIA's cards have this layout"
    if not {p.name for p in enabled()} & {"ATEN", "TRITON"}:
        return "neither ATEN nor TRITON is in max_autotune_gemm_backends"
    x, words, group, scales = (*call.args, *call.kwargs.values())
    tensors = (x, words, scales, result)
    if not all(isinstance(t, View) for t in tensors):
        return "its arguments are not all tensors in memory"
    if any(ix.value_of(e) is None for t in tensors for e in (*t.size, *t.stride, t.offset)):
        return "a size is known only at run time"
    reason = _refused(x, words, group, scales)
    if reason:
        return reason
    inner = 2 * words.size[3].arg
    b, m, n, k = loops(ix.ONE, x.size[0], result.size[1], x.size[1])
    value = unpacked(words, scales, (k, n), inner, group, x.dtype)
    right = replace(words, size=(k.src[0], n.src[0]), stride=(ix.ONE, k.src[0]), dtype=x.dtype)
    left = plain(x, (m, natural(k, inner)))
    used = sorted({t.buffer for t in tensors})
    return TiledProblem(
        OP, b, m, n, k, (left, Operand(right, value, is_plain=False)), result,
        tuple(program.buffers[name] for name in used), target, inner=inner, group=group,
    )  # fmt: skip


def _refused(x: View, words: View, group: object, scales: View) -> str:
    """What the library refuses, which says so when it is called, or what no kernel reads."""
    if [len(t.size) for t in (x, words, scales)] != [2, 4, 3]:
        return "its operands are not a matrix, tiles, and pairs in groups"
    if (x.dtype, words.dtype, scales.dtype) != (torch.bfloat16, torch.int32, torch.bfloat16):
        return f"no kernels for {x.dtype} by {words.dtype} with scales of {scales.dtype}"
    tiles, pieces, lanes, half = (e.arg for e in words.size)
    k, inner = x.size[1].arg, 2 * half
    if inner not in INNER or lanes != 32 or group not in GROUPS or k % group:
        return f"no kernels for {inner} tiles in a piece and groups of {group}"
    wanted = (k // group, COLUMNS * tiles, 2)
    if pieces * DEPTH * inner != k or tuple(e.arg for e in scales.size) != wanted:
        return "its operands do not fit each other"
    return "" if all(map(is_contiguous, (x, words, scales))) else "its operands are not contiguous"


__all__ = ["TiledProblem", "is_tuned", "parsed"]
