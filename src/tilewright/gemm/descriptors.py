"""Tensor descriptors: which matrices a card moves by itself, and the text that has it do so.

A matrix can be moved if one of its dimensions is contiguous and every other step, and its start,
is a multiple of sixteen bytes. What is only known at run time may be taken for granted: it is
assumed, and calls for which it does not hold take the kernel that reads through pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright import config
from tilewright.gemm.padded import is_slow
from tilewright.gemm.problem import GemmProblem
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, walk
from tilewright.ir.program import Store, View

UNIT = 16  # bytes that rows of a matrix start at multiples of
LONGEST = 2**31 - 1  # elements of a dimension
MOST = 4  # descriptors of a kernel: operands, and what it stores
ROOM = 32  # float32 elements of scratch that a descriptor takes
NARROWEST = 32  # elements of a contiguous dimension of single bytes
BEYOND = 2**31  # what an assumption is where it does not hold, at least
DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8,
                    torch.float8_e4m3fn, torch.float8_e5m2))  # fmt: skip


@dataclass(frozen=True)
class Matrix:
    """A window the card moves tiles of, its contiguous dimension last."""

    buffer: str
    start: Expr
    sizes: tuple[Expr, ...]  # [batch,] across, along
    steps: tuple[Expr, ...]  # of all but the last
    turned: bool  # rows are what is contiguous down a column
    assumed: tuple[Expr, ...] = ()  # below 2**31 at every call that may use the descriptor


def matrix(view: View) -> Matrix | str:
    """The window for a descriptor, or why it cannot have one."""
    if view.dtype not in DTYPES:
        return f"there are no descriptors for {view.dtype}"
    rows, columns = view.stride[-2:]
    if ix.ONE not in (rows, columns):
        return "an operand has no contiguous dimension"
    turned = columns is not ix.ONE
    order = (*range(len(view.size) - 2), *((-1, -2) if turned else (-2, -1)))
    sizes, steps = (tuple(part[k] for k in order) for part in (view.size, view.stride))
    if any(ix.value_of(step) == 0 for step in steps):
        return "an operand repeats its rows"
    if view.dtype.itemsize == 1 and (ix.value_of(sizes[-1]) or NARROWEST) < NARROWEST:
        return f"rows of fewer than {NARROWEST} bytes"
    assumed = _lengths(sizes)
    if isinstance(assumed, str):
        return assumed
    for step in (*steps[:-1], view.offset):
        rest = ix.mod(ix.mul(step, view.dtype.itemsize), UNIT)
        if rest is ix.ZERO:
            continue
        if rest.is_const or ix.likely(rest):
            return "rows of an operand do not start at multiples of 16 bytes"
        assumed += (ix.mul(rest, BEYOND),)
    return Matrix(view.buffer, view.offset, sizes, steps[:-1], turned, assumed)


def _lengths(sizes: Sequence[Expr]) -> tuple[Expr, ...] | str:
    """What has to be below 2**31: lengths that are known are looked at once, here."""
    if any((ix.value_of(n) or 0) > LONGEST for n in sizes):
        return "an operand is too long for a tensor descriptor"
    return tuple(n for n in sizes if ix.value_of(n) is None and ix.bounds(n)[1] > LONGEST)


def written(problem: GemmProblem, store: Store) -> Matrix | str:
    """The window that a store of the epilogue fills, or why a descriptor cannot."""
    p = problem
    steps = [ix.coefficient(store.index, v) for v in p.place]
    if store.mask is not None or any(s is None or free_vars(s) for s in steps):
        return "the epilogue does not store a matrix"
    known = tuple(s for s in steps if s is not None)
    start = ix.without(store.index, list(p.place))
    if ix.linearize(p.place, known, start) is not store.index:
        return "the epilogue does not store a matrix"
    sizes = tuple(v.src[0] for v in p.place)
    view = View(store.buffer, sizes, known, start, p.memory[store.buffer].dtype)
    return matrix(view)


def stores(problem: GemmProblem) -> tuple[Store, ...]:
    """All that a kernel stores: the product, where it is kept, and the epilogue."""
    p = problem
    own = (Store(p.result.buffer, p.product.src[0], p.product),) if p.keeps else ()
    return (*own, *p.epilogue)


def assumed(problem: GemmProblem) -> tuple[Expr, ...]:
    """What has to hold at a call, of a problem that has no limits."""
    made = [matrix(o.view) for o in problem.operands]
    if config.triton.enable_template_tma_store:
        made += [written(problem, s) for s in stores(problem)]
    return tuple(dict.fromkeys(e for m in made if isinstance(m, Matrix) for e in m.assumed))


def limits(problem: GemmProblem) -> str:
    """Why tiles cannot be moved by descriptors, or an empty string.

    Without being asked for they are offered where the library is out of the race: a result whose
    rows start anywhere, of operands whose rows do not (2048x50257x768 in bfloat16 on an H200: 273
    us, 284 us without descriptors, 1677 us by the library)."""
    if not config.triton.enable_persistent_tma_matmul and not is_slow(problem):
        return "triton.enable_persistent_tma_matmul is off"
    if problem.target.capability < (9, 0):
        return "cards before Hopper have no tensor descriptors"
    if any(n.op == "index" for s in problem.epilogue for n in walk(*s.exprs)):
        return "a position in the epilogue has to be checked"
    if any(not o.is_plain for o in problem.operands):
        return "a prologue needs the operand in registers"
    made = [matrix(o.view) for o in problem.operands]
    if config.triton.enable_template_tma_store:
        sinks = [written(problem, s) for s in stores(problem)]
        if any(isinstance(m, str) for m in sinks):
            why = next(m for m in sinks if isinstance(m, str))
            return f"the result is to be stored by descriptors: {why}".replace("an operand", "it")
        made += sinks
    if len(made) > MOST:
        return f"it takes more than {MOST} descriptors"
    return next((m for m in made if isinstance(m, str)), "")


# ---- text


@dataclass(frozen=True)
class Words:
    """How a matrix is spelled in a kernel: `lengths` and `blocks` are by loop (`batch`, `m`, ...),
    `loops` those of the matrix, in the order of its view."""

    name: str
    base: str
    loops: tuple[str, ...]
    steps: tuple[str, ...]
    wide: bool  # positions have 64 bits, those of descriptors 32

    def _narrow(self, text: str) -> str:
        return f"tl.cast({text}, tl.int32)" if self.wide and not text.isdecimal() else text

    def _order(self, turned: bool) -> tuple[str, ...]:
        return (*self.loops[:-2], *reversed(self.loops[-2:])) if turned else self.loops

    def made(self, turned: bool, batch: str, block_n: str = "BLOCK_N") -> str:
        """The line that makes the descriptor."""
        lengths = {"batch": batch, "m": "M", "n": "N", "k": "K"}
        blocks = {"batch": "1", "m": "BLOCK_M", "n": block_n, "k": "BLOCK_K"}
        order = self._order(turned)
        sizes = ", ".join(self._narrow(lengths[v]) for v in order)
        shape = ", ".join(blocks[v] for v in order)
        return (f"desc_{self.name} = tl.make_tensor_descriptor({self.base}, [{sizes}], "
                f"[{', '.join(self.steps)}, 1], [{shape}])")  # fmt: skip

    def _at(self, turned: bool, n: str = "") -> str:
        at = {"batch": "batch", "m": "pid_m * BLOCK_M", "n": n or "pid_n * BLOCK_N", "k": "k0"}
        return ", ".join(self._narrow(at[v]) for v in self._order(turned))

    def loaded(self, turned: bool) -> str:
        blocks = {"m": "BLOCK_M", "n": "BLOCK_N", "k": "BLOCK_K"}
        tile = f"desc_{self.name}.load([{self._at(turned)}])"
        if len(self.loops) == 3:
            shape = ", ".join(blocks[v] for v in self._order(turned)[1:])
            tile = f"tl.reshape({tile}, [{shape}])"
        return f"tl.trans({tile})" if turned else tile

    def stored(self, turned: bool, value: str, block_n: str, n: str) -> str:
        value = f"tl.trans({value})" if turned else value
        if len(self.loops) == 3:
            shape = f"1, {block_n}, BLOCK_M" if turned else f"1, BLOCK_M, {block_n}"
            value = f"tl.reshape({value}, [{shape}])"
        return f"desc_{self.name}.store([{self._at(turned, n)}], {value})"
