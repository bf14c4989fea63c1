"""cuBLASLt as a provider: every algorithm its heuristics offer for a problem is a candidate, and so
are variants of the best of them.

The library multiplies column-major matrices, so a row-major result is computed as its transpose:
the operands change places and each is read the other way round. What it adds and applies itself is
used where a problem asks for it: a matrix (its `C`), a row (its bias), relu, gelu by tanh.

Numbers. Eager rounds the product to its own dtype before it adds or applies anything; the library
rounds once, at the end. For relu alone that is the same (it commutes with rounding), and for the
bias of addmm it is what eager does; a sum or a gelu in the epilogue comes out nearer to the exact
value than eager's, by one rounding, which we take for right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from tilewright import config
from tilewright.gemm.problem import GemmProblem, takes_tf32
from tilewright.gemm.provider import Argument, Effort, Kernel, register
from tilewright.gemm.roofline import roofline
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, make, rewrite
from tilewright.ir.program import Store, View
from tilewright.lower.activations import gelu
from tilewright.runtime import cublaslt as lt
from tilewright.runtime import store

Activation = Literal["", "relu", "gelu"]

_COUNTS: dict[Effort, int] = {"none": 8, "quick": 8, "default": 24, "max": 64}
_ALIGNMENT = 16  # bytes; what memory has at least here, and as much as any algorithm needs
_LARGEST = 2**31 - 1  # the library counts rows in 32 bits
_SLOWER = 0.02  # by which each algorithm is guessed to be slower than the one before it
_EPILOGUES: dict[Activation, int] = {"relu": lt.EPILOGUE_RELU, "gelu": lt.EPILOGUE_GELU}


@dataclass(frozen=True)
class Matrix:
    """A batch of matrices in memory: numbers of elements, from the buffer's first."""

    buffer: str
    dtype: torch.dtype
    size: tuple[int, int]  # rows, columns
    stride: tuple[int, int]
    offset: int
    batch: int
    step: int  # from one matrix to the next

    @property
    def turned(self) -> Matrix:
        return replace(self, size=self.size[::-1], stride=self.stride[::-1])

    @property
    def ld(self) -> int:
        """From column to column, where each column is contiguous; 0 where they are not."""
        (rows, cols), (down, across) = self.size, self.stride
        if rows > 1 and down != 1:
            return 0
        if cols == 1:  # there is no next column, so nothing forbids a distance that is aligned
            return -(-rows // 16) * 16
        return across if across >= rows else 0

    @property
    def is_row(self) -> bool:
        """A column that is the same in every place: what the library calls a bias."""
        (rows, cols), (down, across) = self.size, self.stride
        return (across == 0 or cols == 1) and (down == 1 or rows == 1)

    def window(self, tensor: torch.Tensor) -> torch.Tensor:
        size, stride = (self.batch, *self.size), (self.step, *self.stride)
        return tensor.as_strided(size, stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Product:
    """A problem in numbers: `out = activation(alpha * left @ right + sum of scale * term)`."""

    left: Matrix
    right: Matrix
    out: Matrix
    terms: tuple[tuple[float, Matrix], ...]  # each spread over the result's shape
    alpha: float
    activation: Activation

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The buffers, in the order they are passed."""
        every = (self.out, self.left, self.right, *(x for _, x in self.terms))
        return tuple(dict.fromkeys(x.buffer for x in every))

    def compute(self, *tensors: torch.Tensor) -> None:
        """The same with torch's own operations, from memory of any alignment."""
        given = dict(zip(self.names, tensors, strict=True))
        left, right, out = (x.window(given[x.buffer]) for x in (self.left, self.right, self.out))
        wide = _wide(self.out.dtype)
        # integers and their sums are exact in float64, which every device multiplies
        exact = torch.float64 if wide == torch.int32 else self.out.dtype
        total = torch.bmm(left.to(exact), right.to(exact))
        if self.terms or self.alpha != 1:
            total = total.to(wide) * self.alpha
        for scale, x in self.terms:
            total = total + x.window(given[x.buffer]).to(wide) * scale
        if self.activation == "relu":
            total = torch.relu(total)
        elif self.activation == "gelu":
            total = torch.nn.functional.gelu(total, approximate="tanh")
        out.copy_(total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are taken in."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype


# ---- from a problem to numbers


def product(problem: GemmProblem) -> Product | str:
    """The problem in numbers, or why the library cannot compute it."""
    if problem.op in ("mm_plus_mm", "mm_pair"):
        return "it is the sum of two products"
    if not all(o.is_plain for o in problem.operands):
        return "an operand is computed where it is read"
    if problem.symbols or any(ix.value_of(n) is None for n in problem.sizes):
        return "its sizes are known only at run time"
    if any(ix.value_of(n) == 0 for n in problem.sizes):
        return "it is empty"
    if problem.bias is not None and not problem.bias.is_plain:
        return "its bias is computed where it is read"
    left, right = (_matrix(o.view) for o in problem.operands)
    found = _finish(problem)
    if isinstance(found, str):
        return found
    out, terms, activation = found
    if problem.bias is not None and problem.beta != 0:
        terms = [(problem.beta, _matrix(problem.bias.view)), *terms]
    return Product(left, right, out, tuple(terms), problem.alpha, activation)


def _matrix(view: View) -> Matrix:
    size, stride = ([_number(e) for e in part] for part in (view.size, view.stride))
    batch, step = (size[0], stride[0]) if len(size) == 3 else (1, 0)
    return Matrix(view.buffer, view.dtype, (size[-2], size[-1]), (stride[-2], stride[-1]),
                  _number(view.offset), batch, step)  # fmt: skip


def _number(e: Expr) -> int:
    value = ix.value_of(e)
    assert value is not None, e
    return value


def _at(problem: GemmProblem, buffer: str, dtype: torch.dtype, index: Expr) -> Matrix | None:
    """What an index into a buffer walks over, where it is linear in the problem's loops."""
    steps = [ix.coefficient(index, v) for v in (problem.batch, problem.m, problem.n)]
    numbers = [None if s is None else ix.value_of(s) for s in steps]
    rest = ix.without(index, (problem.batch, problem.m, problem.n))
    batch, m, n, _ = (_number(e) for e in problem.sizes)
    offset, (step, down, across) = ix.value_of(rest), numbers
    if offset is None or free_vars(index) - {problem.batch, problem.m, problem.n}:
        return None
    if step is None or down is None or across is None:
        return None
    return Matrix(buffer, dtype, (m, n), (down, across), offset, batch, step)


# ---- what follows the product

Finish = tuple[Matrix, list[tuple[float, Matrix]], Activation]


def _finish(problem: GemmProblem) -> Finish | str:
    """Where the result goes, what is added to it and applied to it."""
    if not problem.epilogue:
        return _matrix(problem.result), [], ""
    last, *others = problem.epilogue
    if problem.keeps or others:
        return "it has several results"
    if last.mode != "set" or last.mask is not None or last.value.dtype != problem.dtype:
        return "its result is not stored as the library does"
    out = _at(problem, last.buffer, last.value.dtype, last.index)
    if out is None or problem.memory[last.buffer].dtype != last.value.dtype:
        return "its result is not a plain window"
    return _applied(problem, last, out)


def _applied(problem: GemmProblem, last: Store, out: Matrix) -> Finish | str:
    wide = _wide(problem.dtype)
    value = _widened(last.value, wide)
    activation, inside = _activation(value)
    own = _widened(problem.product, wide)
    parts = list(_sum(inside))
    if parts.count(own) != 1:
        return "the library cannot apply what follows the product"
    terms: list[tuple[float, Matrix]] = []
    for part in parts:
        if part is own:
            continue
        if part.op != "load" or len(part.src) != 1:
            return "the library cannot apply what follows the product"
        dtype = problem.memory[part.arg].dtype
        found = _at(problem, part.arg, dtype, part.src[0])
        if found is None:
            return "what is added to the product is not a plain window"
        terms.append((1.0, found))
    return out, terms, activation


def _widened(value: Expr, wide: torch.dtype) -> Expr:
    """The value without any rounding on the way to it."""

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if not node.dtype.is_floating_point:
            return None
        if node.op == "cast" and src[0].dtype.is_floating_point:
            return src[0]
        if node.op == "const":
            return const(node.arg, wide)
        return make("load", wide, src, node.arg) if node.op == "load" else None

    return rewrite(value, rule)


def _activation(value: Expr) -> tuple[Activation, Expr]:
    """What is applied last, and to what."""
    if value.op == "max":
        zero, inside = sorted(value.src, key=lambda e: not e.is_const)
        if zero.is_const and zero.arg == 0:
            return "relu", inside
    if value.op == "mul" and value.src[0].op == "mul":
        for inside in value.src[0].src:
            if not inside.is_const and gelu(inside, "tanh") is value:
                return "gelu", inside
    return "", value


def _sum(value: Expr) -> Iterator[Expr]:
    """The terms of a sum."""
    if value.op == "add":
        for part in value.src:
            yield from _sum(part)
    else:
        yield value


# ---- from numbers to a call


def arranged(p: Product) -> lt.Call | str:
    """The call of the library, or why there is none. The result's columns are its own columns, or
    its rows are: then all is computed transposed."""
    plain = (p.left, p.right, p.out, [x for _, x in p.terms])
    turned = (p.right.turned, p.left.turned, p.out.turned, [x.turned for _, x in p.terms])
    # Of a single row or column either can be said; the longer run is the one to tell of.
    order = (plain, turned) if p.out.size[0] > p.out.size[1] == 1 else (turned, plain)
    reason = ""
    for a, b, d, terms in order:
        found = _call(p, a, b, d, terms)
        if not isinstance(found, str):
            return found
        reason = reason or found
    return reason


def _call(p: Product, a: Matrix, b: Matrix, d: Matrix, terms: Sequence[Matrix]) -> lt.Call | str:
    numbers = _arithmetic(p)
    if isinstance(numbers, str):
        return numbers
    (a_layout, a_turned), (b_layout, b_turned) = _layout(a), _layout(b)
    d_layout = _plain_layout(d)
    if a_layout is None or b_layout is None or d_layout is None:
        return "a matrix is contiguous in neither direction"
    if d.batch > 1 and d.step == 0:
        return "its results overlap"
    if d.buffer in (a.buffer, b.buffer):
        return "it overwrites an operand"
    added = _added(p, terms, d)
    if isinstance(added, str):
        return added
    beta, c, bias = added
    c_layout = d_layout if c is d else _plain_layout(c)
    assert c_layout is not None
    layouts = (a_layout, b_layout, c_layout, d_layout)
    if any(max(x.rows, x.cols, x.ld, x.batch) > _LARGEST for x in layouts):
        return "it is too large for the library"
    compute, scale, reduction = numbers
    applied = _EPILOGUES.get(p.activation, 0) | (lt.EPILOGUE_BIAS if bias else 0)
    epilogue = applied or lt.EPILOGUE_DEFAULT
    at = [_pointer(p, x) for x in (a, b, c, d)]
    return lt.Call(*layouts, (a_turned, b_turned), compute, scale, p.alpha, beta, epilogue,
                   reduction, (at[0], at[1], at[2], at[3]), _pointer(p, bias) if bias else None,
                   bias.step if bias and d.batch > 1 else 0)  # fmt: skip


def _added(p: Product, terms: Sequence[Matrix], d: Matrix
           ) -> tuple[float, Matrix, Matrix | None] | str:  # fmt: skip
    """beta, C and the bias: at most one of each kind can be added."""
    beta, c, bias = 0.0, d, None
    for (scale, _), x in zip(p.terms, terms, strict=True):
        if x.dtype != d.dtype:
            return "what is added has another dtype"
        if x.is_row and bias is None and scale == 1:
            if x.buffer == d.buffer:
                return "it overwrites its bias"
            bias = x
        elif x.ld and beta == 0:
            if x.buffer == d.buffer and x != d:
                return "it overwrites what is added, in another order"
            beta, c = scale, x
        else:
            return "the library cannot add what is added"
    return beta, c, bias


def _layout(x: Matrix) -> tuple[lt.Layout | None, bool]:
    """The matrix, or its transpose, column by column; a single row is rather read along it."""
    turned = _plain_layout(x.turned)
    plain = _plain_layout(x)
    if plain is None or (turned is not None and x.size[0] == 1):
        return turned, True
    return plain, False


def _plain_layout(x: Matrix) -> lt.Layout | None:
    if not x.ld:
        return None
    step = x.step if x.batch > 1 else 0
    return lt.Layout(lt.CUDA_TYPES[x.dtype], *x.size, x.ld, x.batch, step)


def _pointer(p: Product, x: Matrix) -> lt.Pointer:
    offset = x.offset * x.dtype.itemsize
    return lt.Pointer(p.names.index(x.buffer), offset, math.gcd(_ALIGNMENT, offset))


def _arithmetic(p: Product) -> tuple[int, int, int] | str:
    """How sums are taken, the type of alpha and beta, and how partial sums may be added."""
    kinds, out = {p.left.dtype, p.right.dtype}, p.out.dtype
    pair = next(iter(kinds)) if len(kinds) == 1 else None
    types, flags = lt.CUDA_TYPES, torch.backends.cuda.matmul
    if pair == out == torch.float64:
        return lt.COMPUTE_64F, types[torch.float64], lt.REDUCTION_ANY
    if pair == out == torch.float32:
        compute = lt.COMPUTE_32F_FAST_TF32 if takes_tf32() else lt.COMPUTE_32F
        return compute, types[torch.float32], lt.REDUCTION_ANY
    if pair == torch.int8 and out == torch.int32 and p.alpha == 1 and not p.terms:
        return lt.COMPUTE_32I, types[torch.int32], lt.REDUCTION_ANY
    if pair in (torch.float16, torch.bfloat16) and out in (pair, torch.float32):
        half = pair == torch.float16
        reduced = (flags.allow_fp16_reduced_precision_reduction if half
                   else flags.allow_bf16_reduced_precision_reduction)  # fmt: skip
        reduction = lt.REDUCTION_ANY if reduced else lt.REDUCTION_COMPUTE_TYPE
        return lt.COMPUTE_32F, types[torch.float32], reduction
    return f"no product of {p.left.dtype} and {p.right.dtype} to {out}"


# ---- candidates


@dataclass(frozen=True)
class LtSource:
    """A call of one algorithm. It pickles with the algorithm, so nobody asks for it again."""

    name: str
    product: Product
    call: lt.Call
    algorithm: lt.Algorithm
    device: torch.device

    @property
    def text(self) -> str:
        return f"{self.name}  # {self.call}, {dict(self.algorithm.config)}"

    @cached_property
    def run(self) -> Callable[..., None]:
        """What a call comes down to: a C function over tensors."""
        return lt.load(self.name, self.call, self.algorithm, self.device, self.product.compute)

    def __call__(self, *args: Any) -> None:
        self.run(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return LtSource, (self.name, self.product, self.call, self.algorithm, self.device)


@dataclass(frozen=True)
class LtCandidate:
    """The algorithm the heuristics put at `rank`."""

    op: str
    rank: int
    source: LtSource
    estimate: float
    provider: str = "CUBLASLT"

    @property
    def name(self) -> str:
        return f"cublaslt_{self.op}_{self.rank}"

    @property
    def description(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.source.algorithm.config)

    @property
    def key(self) -> str:
        s = self.source
        return store.key("cublaslt", repr(s.product), repr(s.call), s.algorithm.data,
                         str(s.algorithm.version))  # fmt: skip

    def kernel(self) -> Kernel:
        arguments: tuple[Argument, ...] = tuple(("ptr", b) for b in self.source.product.names)
        return Kernel(self.source.name, self.source, arguments)


@register
class CublasLt:
    name = "CUBLASLT"

    def supports(self, problem: GemmProblem) -> str:
        if not problem.target.is_gpu:
            return "it computes on NVIDIA cards"
        if not config.triton.autotune_cublasLt:
            return "triton.autotune_cublasLt is off"
        reason = lt.why_not()
        if reason:
            return reason
        found = _prepared(problem)
        if isinstance(found, str):
            return found
        try:
            some = _algorithms(problem, found[1], "none")
        except RuntimeError as error:  # of the library or of the driver
            return f"cuBLASLt cannot be used: {error}"
        return "" if some else "the library has no algorithm for it"

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[LtCandidate]:
        found = _prepared(problem)
        if isinstance(found, str):
            return []
        numbers, call = found
        parts = [problem.op, *(["add"] if len(numbers.terms) > (problem.bias is not None) else []),
                 *([numbers.activation] if numbers.activation else [])]  # fmt: skip
        name = f"extern_kernels.cublaslt_{'_'.join(parts)}"
        device = _device(problem)
        best = roofline(problem)
        return [LtCandidate(problem.op, rank, LtSource(name, numbers, call, algorithm, device),
                            best * (1 + _SLOWER * rank))
                for rank, algorithm in enumerate(_algorithms(problem, call, effort))]  # fmt: skip


def _prepared(problem: GemmProblem) -> tuple[Product, lt.Call] | str:
    numbers = product(problem)
    if isinstance(numbers, str):
        return numbers
    call = arranged(numbers)
    return call if isinstance(call, str) else (numbers, call)


def _algorithms(problem: GemmProblem, call: lt.Call, effort: Effort) -> tuple[lt.Algorithm, ...]:
    return lt.algorithms(call, _COUNTS[effort], _device(problem), problem.target.key)


def _device(problem: GemmProblem) -> torch.device:
    return problem.memory[problem.writes[0]].device
