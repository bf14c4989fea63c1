"""A problem in CUTLASS's terms: matrices with a layout and an alignment, and what is done with the
sum of products; or why CUTLASS cannot compute it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tilewright import config
from tilewright.gemm.cutlass.evt import Epilogue, epilogue
from tilewright.gemm.cutlass.matrices import BYTES, SHORT, Matrix, matrix, matrix_of
from tilewright.gemm.cutlass.render import Plain
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.sparse import SparseProblem
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars
from tilewright.ir.program import View

# What sums are taken in, by the dtypes of the operands in either order.
_HALVES = (torch.float16, torch.bfloat16)
_EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2)
OPERANDS = frozenset((*_HALVES, *_EIGHTS, torch.int8, torch.float32))
RESULTS = frozenset((torch.float16, torch.bfloat16, torch.int32))
LARGEST = 2**31 - 1  # CUTLASS counts rows and columns in 32 bits
GROUPED = 64  # bytes of a column of metadata whose order is not that of the rows


def accumulator(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    """What products of these are added up in."""
    for dtype in (left, right):
        assert dtype in OPERANDS, f"CUTLASS multiplies no {dtype}"
    if left == right == torch.int8:
        return torch.int32
    if left == right or {left, right} <= set(_EIGHTS):
        return torch.float32
    pair = {left, right}
    if torch.int8 in pair and pair & set(_HALVES):
        return torch.float32
    raise NotImplementedError(f"CUTLASS does not multiply {left} by {right}")


@dataclass(frozen=True)
class Arranged:
    """A problem to list operations for."""

    a: Matrix
    b: Matrix
    sizes: tuple[Expr, Expr, Expr, Expr]  # batch, m, n, k
    hints: tuple[int, int, int, int]
    dtype: torch.dtype  # of the product itself
    plain: Plain | None  # as every operation can
    fused: Epilogue | None  # as those can that store through tensor descriptors
    is_dynamic: bool
    fast: bool | None = None  # fp8: whether sums may be taken in fewer bits; none: not asked
    meta: Matrix | None = None  # where the left operand is 2:4 sparse: what it has where

    @property
    def elements(self) -> tuple[str, str, str]:
        sums = accumulator(self.a.dtype, self.b.dtype)
        return SHORT[self.a.dtype], SHORT[self.b.dtype], SHORT[sums]

    @property
    def d(self) -> tuple[torch.dtype, str, int]:
        """Dtype, layout and alignment of the result that CUTLASS calls D."""
        if self.fused is not None:
            d = self.fused.d.access
            return d.dtype, d.major, d.alignment
        assert self.plain is not None
        return self.plain.d.dtype, self.plain.d.major, self.plain.d.alignment

    @property
    def turned(self) -> Arranged:
        """The transposed product: operands change places."""
        batch, m, n, k = self.sizes
        b, rows, columns, depth = self.hints
        plain = self.plain and replace(
            self.plain, d=self.plain.d.turned, c=self.plain.c and self.plain.c.turned
        )
        return replace(
            self,
            a=self.b.turned,
            b=self.a.turned,
            sizes=(batch, n, m, k),
            hints=(b, columns, rows, depth),
            plain=plain,
            fused=self.fused and self.fused.turned,
        )


def arranged(problem: GemmProblem) -> Arranged | str:
    """The problem, or why CUTLASS cannot compute it."""
    if isinstance(problem, SparseProblem):
        return _sparse(problem)
    reason = _refused(problem)
    if reason:
        return reason
    left, right = (_operand(problem, k) for k in range(2))
    if isinstance(left, str):
        return left
    if isinstance(right, str):
        return right
    eight = 1 in (left.dtype.itemsize, right.dtype.itemsize)
    if eight and (left.major, right.major) != ("t", "n"):
        return "8-bit operands are multiplied row by column alone"
    plain, fused = _finish(problem)
    if isinstance(fused, str):
        if plain is None:
            return fused
        fused = None
    made = Arranged(
        left,
        right,
        problem.sizes,
        problem.hints,
        problem.dtype,
        plain,
        fused,
        bool(problem.symbols),
        problem.fast if problem.scales else None,
    )
    # of two widths, CUTLASS takes the narrow one on the left
    return made.turned if left.dtype.itemsize > right.dtype.itemsize else made


def _sparse(problem: SparseProblem) -> Arranged | str:
    """By kernels of earlier cards, which end a product in no other way than by storing it."""
    if problem.epilogue:
        return "no operation for sparse matrices ends a product so"
    if not problem.is_bare:
        return _COMPUTED
    values, right_view, where, result = problem.views
    left, right, d = (matrix(v) for v in (values, right_view, result))
    for found in (left, right, d):
        if isinstance(found, str):
            return found
    assert isinstance(left, Matrix) and isinstance(right, Matrix) and isinstance(d, Matrix)
    if (left.major, d.major) != ("t", "t"):
        return "sparse operands and their results are row-major alone"
    wide = BYTES // where.dtype.itemsize
    if ix.mod(where.offset, wide) is not ix.ZERO:
        return "its metadata does not begin at a multiple of 16 bytes"
    if problem.hints[1] % (GROUPED // where.dtype.itemsize):
        return f"its rows are not whole groups of {GROUPED // where.dtype.itemsize}"
    # two columns of it are interleaved: from one pair to the next
    step = ix.mul(where.size[0], 2)
    meta = Matrix(where.buffer, where.dtype, "n", step, ix.ZERO, where.offset, wide)
    return Arranged(
        left,
        right,
        problem.sizes,
        problem.hints,
        problem.dtype,
        Plain(d, None),
        None,
        False,
        meta=meta,
    )


def _operand(problem: GemmProblem, k: int) -> Matrix | str:
    """An operand in memory; of int8 also one that is converted where it is read."""
    operand, place = problem.operands[k], problem.positions[k]
    if operand.is_plain:
        return matrix(operand.view)
    value = operand.value
    inside = value.src[0] if value.op == "cast" else value
    plain = inside.op == "load" and len(inside.src) == 1 and inside.dtype == torch.int8
    if not plain or value.dtype not in _HALVES or not config.use_mixed_mm:
        return _COMPUTED
    index = inside.src[0]
    steps = [ix.coefficient(index, v) for v in place]
    if any(s is None for s in steps) or free_vars(index) - set(place):
        return _COMPUTED
    strides = [s for s in steps if s is not None]
    return matrix_of(inside.arg, inside.dtype, operand.view.size, strides, ix.without(index, place))


_COMPUTED = "an operand is computed where it is read"


def _refused(problem: GemmProblem) -> str:
    if problem.op in ("mm_plus_mm", "mm_pair"):
        return "it is the sum of two products"
    if problem.is_block_scaled:
        return "its scales are of blocks of k"
    if problem.factor is not None or all(not o.is_plain for o in problem.operands):
        return _COMPUTED
    if problem.bias is not None and not problem.bias.is_plain:
        return "its bias is computed where it is read"
    left, right = (o.dtype for o in problem.operands)
    if left not in OPERANDS - {torch.float32} or right not in OPERANDS - {torch.float32}:
        return f"CUTLASS is not offered for products of {left} and {right}"
    try:
        accumulator(left, right)
    except NotImplementedError as error:
        return str(error)
    if problem.dtype not in RESULTS:
        return f"CUTLASS is not offered for results of {problem.dtype}"
    if any(ix.value_of(n) == 0 for n in problem.sizes):
        return "it is empty"
    if max(problem.hints) > LARGEST:
        return "it is too large for CUTLASS"
    return ""


def _finish(problem: GemmProblem) -> tuple[Plain | None, Epilogue | str | None]:
    """Both ways to end it, where there are both."""
    if problem.scales:
        return None, epilogue(problem)
    plain = None if problem.epilogue else _scaled(problem)
    if plain is not None and plain.c is None and problem.alpha == 1:
        return plain, None  # a visitor would do the same
    if problem.dtype == torch.int32 and not problem.epilogue:
        return plain, None
    return plain, epilogue(problem)


def _scaled(problem: GemmProblem) -> Plain | None:
    d = matrix(problem.result)
    if isinstance(d, str):
        return None
    if problem.bias is None or problem.beta == 0:
        return Plain(d, None, problem.alpha, 0.0)
    c = _spread(problem.bias.view)
    if c is None or c.dtype != d.dtype:
        return None
    return Plain(d, c, problem.alpha, problem.beta)


def _spread(view: View) -> Matrix | None:
    """A matrix, a row or a column that is the same for all the others: its distance is 0."""
    down, across = view.stride[-2:]
    found = matrix(view)
    if isinstance(found, str):
        return None
    if down is ix.ZERO or across is ix.ZERO:
        return found if down is ix.ONE or across is ix.ONE else None
    return found
