"""What follows a product, in the terms of a kernel that loads and stores whole tiles.

Such a kernel calls a function for each element of the accumulator, or for one of each of two.
Beside it stand operands: a row (one value for each column), a column, a tile, or one number; it
gives the elements of the results. `translated` says which operands and results an epilogue comes
down to, and writes the function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tilewright.gemm.cutedsl import vocabulary
from tilewright.gemm.cutedsl.writer import CSE, Writer, limits
from tilewright.gemm.problem import GemmProblem
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads
from tilewright.ir.program import View

Kind = Literal["row", "col", "tile", "scalar"]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
RESULTS = (*FLOATS, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Beside:
    """An operand of the function, or a result: its name, and the window it is in memory."""

    name: str
    kind: Kind
    view: View


SUMS = ("acc", "other")  # what the function calls the accumulator, and that of a second product


@dataclass(frozen=True)
class Epilogue:
    operands: tuple[Beside, ...]
    results: tuple[Beside, ...]  # the first is the kernel's own
    lines: tuple[str, ...]
    values: tuple[str, ...]  # of the results


def translated(problem: GemmProblem) -> Epilogue | str:
    """The function, or why there is none."""
    try:
        return _Translation(problem).made()
    except NotImplementedError as why:
        return str(why)


class _Translation:
    def __init__(self, problem: GemmProblem) -> None:
        self.problem = problem
        self.operands: dict[Expr, Beside] = {}

    def made(self) -> Epilogue:
        p = self.problem
        exprs = [e for s in p.epilogue for e in (s.value, *([s.mask] if s.mask else []))]
        reason = limits(exprs)
        if reason:
            raise NotImplementedError(reason)
        if any(s.mode != "set" or s.mask is not None for s in p.epilogue):
            raise NotImplementedError("the epilogue stores only some elements, or adds to them")
        loops = {p.batch, p.m, p.n}
        for s in p.epilogue:
            if any(v in loops for v in _positions(s.value)):
                raise NotImplementedError("the epilogue computes with positions")
        bias = None if p.bias is None or p.beta == 0 else p.bias.value
        read = dict.fromkeys(loads(*([] if bias is None else [bias]),
                                   *(s.value for s in p.epilogue)))  # fmt: skip
        for node in read:
            if node not in self._sums():
                self._operand(node)
        return self._function(bias)

    def _sums(self) -> dict[Expr, str]:
        """What stands for the products in the epilogue, and the sum each of them rounds."""
        p = self.problem
        found = (p.product,) if p.second is None else (p.product, p.other)
        return dict(zip(found, SUMS, strict=False))

    def _function(self, bias: Expr | None) -> Epilogue:
        p = self.problem
        w = Writer(CSE(), _nothing, _nothing)
        for node, found in self.operands.items():
            w.know(node, w.let(vocabulary.cast(found.name, torch.float32, node.dtype)))
        for node, total in self._sums().items():
            if p.alpha != 1:
                total = w.let(f"{total} * cutlass.Float32({p.alpha!r})")
            if bias is not None:
                added = vocabulary.cast(w.value(bias), bias.dtype, torch.float32)
                scale = "" if p.beta == 1 else f" * cutlass.Float32({p.beta!r})"
                total = w.let(f"{total} + {added}{scale}")
            w.know(node, w.let(vocabulary.cast(total, torch.float32, p.dtype)))
        stores = [(p.result.buffer, p.product.src[0], p.product)] if p.keeps else []
        stores += [(s.buffer, s.index, s.value) for s in p.epilogue]
        results, values = [], []
        for k, (buffer, index, value) in enumerate(stores):
            dtype = p.memory[buffer].dtype
            if dtype not in RESULTS:
                raise NotImplementedError(f"a result of {dtype} is not stored by tiles")
            view = self._window(buffer, dtype, index)
            if view is None or _kind(view) != "tile":
                raise NotImplementedError("a result is not a plain window")
            results.append(Beside(f"o{k}", "tile", view))
            rounded = vocabulary.cast(w.value(value), value.dtype, dtype)
            values.append(w.let(f"tw.to({rounded}, cutlass.Float32)"))
        return Epilogue(tuple(self.operands.values()), tuple(results), tuple(w.lines),
                        tuple(values))  # fmt: skip

    def _operand(self, node: Expr) -> None:
        index, *masks = node.src
        if masks:
            raise NotImplementedError("an operand is read where a mask holds")
        dtype = self.problem.memory[node.arg].dtype
        if dtype not in FLOATS:
            raise NotImplementedError(f"an operand of {dtype} is not loaded by tiles")
        view = self._window(node.arg, dtype, index)
        if view is None:
            raise NotImplementedError("an operand is not a plain window")
        kind = _kind(view)
        step = {"row": view.stride[-1], "col": view.stride[-2]}.get(kind, ix.ONE)
        if step is not ix.ONE:
            raise NotImplementedError("an operand is read with steps")
        self.operands[node] = Beside(f"x{len(self.operands)}", kind, view)

    def _window(self, buffer: str, dtype: torch.dtype, index: Expr) -> View | None:
        """What an index walks over, where it is linear in the problem's loops."""
        p = self.problem
        place = p.place
        steps = [ix.coefficient(index, v) for v in place]
        if any(s is None or free_vars(s) for s in steps) or free_vars(index) - set(place):
            return None
        rest = ix.without(index, place)
        sizes = [p.sizes[0], *p.sizes[1:3]] if p.is_batched else list(p.sizes[1:3])
        return View(buffer, tuple(sizes), tuple(s for s in steps if s is not None), rest, dtype)


def _kind(view: View) -> Kind:
    down, across = (s is not ix.ZERO or n is ix.ONE for s, n in zip(
        view.stride[-2:], view.size[-2:], strict=True))  # fmt: skip
    if down and across:
        return "tile"
    return "row" if across else "col" if down else "scalar"


def _positions(value: Expr) -> set[Expr]:
    """Loop variables that a value is computed with, beside where it loads."""
    found: set[Expr] = set()
    left, seen = [value], {value}
    while left:
        node = left.pop()
        if node.op == "var":
            found.add(node)
        elif node.op != "load":
            left += [s for s in node.src if s not in seen]
            seen.update(node.src)
    return found


def _nothing(name: Expr | str) -> str:
    raise NotImplementedError(f"the epilogue needs {name}")


def steps(views: Sequence[View]) -> list[tuple[Expr, int]]:
    """Strides and offsets that the card's tile loads need to be multiples of 16 bytes, with how
    many elements that is."""
    found: list[tuple[Expr, int]] = []
    for v in views:
        whole = 16 // v.dtype.itemsize
        found += [(s, whole) for s, n in zip(v.stride, v.size, strict=True)
                  if s is not ix.ONE and n is not ix.ONE]  # fmt: skip
        found.append((v.offset, whole))
    return found
