"""What follows a product as an epilogue visitor of CUTLASS: which memory it reads and writes, and
the arithmetic between, or why that cannot be.

CUTLASS visits the tiles of a result with a graph of nodes: the accumulator, loads (of the matrix C,
of others, of a row, a column, a number), computations and stores. Its library of computations is
small; but a computation may be any function of elements. So each result of ours is one computation,
written from the expression it has in the IR: the same operations, the same roundings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from tilewright.gemm.cutlass.matrices import BYTES, SHORT, max_alignment
from tilewright.gemm.problem import GemmProblem
from tilewright.ir import index as ix
from tilewright.ir.build import cast, op
from tilewright.ir.expr import Expr, free_vars, loads, rewrite, sym, walk
from tilewright.ir.ops import INDEX_OPS
from tilewright.ir.program import Store

FLOATS = frozenset((torch.float32, torch.float16, torch.bfloat16))
READ = FLOATS | {torch.float8_e4m3fn, torch.float8_e5m2}
STAGED = 2  # matrices beside C that go through shared memory; more of them go past it

ACCUMULATOR = sym("accumulator", torch.float32)
ALPHA, BETA = sym("alpha", torch.float32), sym("beta", torch.float32)

Kind = Literal["accumulator", "source", "matrix", "row", "column", "scalar", "number"]
Strides = tuple[Expr, Expr, Expr]  # along m, n, batch


@dataclass(frozen=True)
class Access:
    """Elements of a buffer, one for each of the result's: `offset + strides . (m, n, batch)`."""

    buffer: str
    dtype: torch.dtype
    strides: Strides
    offset: Expr
    alignment: int  # elements of its contiguous direction that are moved at once
    assumed: tuple[Expr, ...] = ()

    @property
    def major(self) -> str:
        """`t` along rows, `n` along columns, or neither."""
        m, n, _ = self.strides
        return "t" if n is ix.ONE else "n" if m is ix.ONE else ""

    @property
    def is_wide(self) -> bool:
        """Whether a tensor descriptor can describe it."""
        return bool(self.major) and self.alignment * self.dtype.itemsize % BYTES == 0

    @property
    def turned(self) -> Access:
        m, n, batch = self.strides
        return Access(
            self.buffer, self.dtype, (n, m, batch), self.offset, self.alignment, self.assumed
        )


@dataclass(frozen=True)
class Leaf:
    """What a computation begins with; `value` stands for it in expressions."""

    kind: Kind
    value: Expr
    access: Access | None = None  # of what is in memory
    number: Expr | float = 0.0  # of a number: known at a call


@dataclass(frozen=True)
class Result:
    """A store, and the leaves its value is computed of, by position."""

    access: Access
    value: Expr
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Epilogue:
    """All of it. The last result is CUTLASS's D."""

    leaves: tuple[Leaf, ...]
    results: tuple[Result, ...]

    @property
    def d(self) -> Result:
        return self.results[-1]

    @cached_property
    def c(self) -> Leaf | None:
        return next((leaf for leaf in self.leaves if leaf.kind == "source"), None)

    @property
    def buffers(self) -> tuple[str, ...]:
        """In memory, in the order of their first use, without repetition."""
        every = [x.access for x in self.leaves] + [r.access for r in self.results]
        return tuple(dict.fromkeys(a.buffer for a in every if a is not None))

    @property
    def operations(self) -> tuple[str, ...]:
        """What is computed, for the name of a kernel."""
        plain = {"cast", "const", "sym", "load", "var", *INDEX_OPS}
        nodes = walk(*(r.value for r in self.results))
        return tuple(sorted({n.op for n in nodes if n.op not in plain}))

    @property
    def turned(self) -> Epilogue:
        """The same of the transposed product."""
        kinds: dict[Kind, Kind] = {"row": "column", "column": "row"}
        leaves = tuple(
            Leaf(
                kinds.get(x.kind, x.kind),
                x.value,
                None if x.access is None else x.access.turned,
                x.number,
            )
            for x in self.leaves
        )
        results = tuple(Result(r.access.turned, r.value, r.inputs) for r in self.results)
        return Epilogue(leaves, results)


# ---- from a problem


def epilogue(problem: GemmProblem) -> Epilogue | str:
    """All that the problem does with the sum of products, or why CUTLASS cannot."""
    stores = list(problem.epilogue)
    total = _total(problem)
    if problem.keeps:
        own = Store(problem.result.buffer, problem.product.src[0], total)
        stores.append(own)
    stores = [
        Store(s.buffer, s.index, _with(problem, s.value, total), s.mode, s.mask) for s in stores
    ]
    reason = _refused(problem, stores)
    if reason:
        return reason
    return _arranged(problem, stores)


def _total(problem: GemmProblem) -> Expr:
    """The product as eager stores it, over the accumulator."""
    if problem.scales:
        return _scaled(problem)
    total = ACCUMULATOR if problem.bias is None else op("mul", ALPHA, ACCUMULATOR)
    if problem.bias is not None and problem.beta != 0:
        total = op("add", total, op("mul", BETA, cast(problem.bias.value, torch.float32)))
    return cast(total, problem.dtype)


def _scaled(problem: GemmProblem) -> Expr:
    total = ACCUMULATOR
    for scale in problem.scales:
        total = op("mul", total, scale.value)
    if problem.bias is not None:
        total = op("add", total, cast(problem.bias.value, torch.float32))
    return cast(total, problem.dtype)


def _with(problem: GemmProblem, value: Expr, total: Expr) -> Expr:
    own = problem.product

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if node is own:
            return total
        # sums of integers are converted, once, to what is computed in
        whole = node.op == "cast" and node.src[0] is own and own.dtype == torch.int32
        return ACCUMULATOR if whole and node.dtype == torch.float32 else None

    return rewrite(value, rule)


def _refused(problem: GemmProblem, stores: Sequence[Store]) -> str:
    written = {s.buffer for s in stores}
    if written & set(problem.reads):
        return "it overwrites what it reads"
    if len(written) < len(stores):
        return "it writes a buffer in parts"
    for s in stores:
        if s.mode != "set" or s.mask is not None:
            return f"it combines with what {s.buffer} holds"
        if problem.memory[s.buffer].dtype not in FLOATS:
            return f"no result of {problem.memory[s.buffer].dtype} is stored"
        reason = next(_unsupported(problem, s.value), "")
        if reason:
            return reason
    if not any(ACCUMULATOR in walk(s.value) for s in stores):
        return "it does not use the product"
    return ""


def _unsupported(problem: GemmProblem, value: Expr) -> Iterator[str]:
    """Reasons why an expression cannot be a computation."""
    for node in _values(value):
        if node.op == "load":
            if len(node.src) > 1:
                yield "it reads memory under a condition"
            elif node.arg == problem.result.buffer:
                yield "it reads other elements of the product"
            elif node.dtype not in READ:
                yield f"no {node.dtype} is read in an epilogue"
        elif _number(node) is not None:
            continue
        elif node.op == "var":
            yield "it depends on the position in the result"
        elif node.op == "cast":
            if node.dtype not in FLOATS | {torch.bool}:
                yield f"nothing is converted to {node.dtype} in an epilogue"
        elif node.op not in TEXT and node.op not in ("const", "sym"):
            yield f"CUTLASS has no {node.op} in an epilogue"
        elif node.dtype not in FLOATS | {torch.bool}:
            yield f"nothing is computed in {node.dtype} in an epilogue"


def _values(value: Expr) -> Iterator[Expr]:
    """Nodes that are values of elements, users first: not those of an index, nor of a number."""
    seen: set[Expr] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if node.op not in ("load", "var") and _number(node) is None:
            stack.extend(reversed(node.src))


def _number(node: Expr) -> Expr | None:
    """What a node is, where that is known when the program is called: a number of the user's, or
    one computed of sizes."""
    if node in (ACCUMULATOR, ALPHA, BETA) or node.dtype != torch.float32:
        return None
    if node.op == "sym":
        return node
    if node.op != "cast":
        return None
    (inside,) = node.src
    plain = inside.op == "sym" or inside.dtype == torch.int64
    return inside if plain and not loads(inside) and not free_vars(inside) else None


def _arranged(problem: GemmProblem, stores: Sequence[Store]) -> Epilogue | str:
    found: dict[Expr, Leaf] = {}
    for s in stores:
        for node in _leaves(s.value):
            if node not in found:
                made = _leaf(problem, node)
                if isinstance(made, str):
                    return made
                found[node] = made
    leaves = _with_source(list(found.values()))
    order = {leaf.value: k for k, leaf in enumerate(leaves)}
    results: list[Result] = []
    for s in stores:
        dtype = problem.memory[s.buffer].dtype
        access = _access(problem, s.buffer, dtype, s.index)
        if isinstance(access, str):
            return access
        access = _spread(problem, access)
        inputs = tuple(sorted(order[node] for node in _leaves(s.value)))
        results.append(Result(access, _unrounded(s.value, dtype), inputs))
    wide = [r for r in results if r.access.is_wide]
    if not wide:
        return "no result has rows that begin at multiples of 16 bytes"
    last = wide[0]  # what is stored last is CUTLASS's D
    return Epilogue(tuple(leaves), (*(r for r in results if r is not last), last))


def _spread(problem: GemmProblem, access: Access) -> Access:
    """A store of one row, or one column: the next would be any distance away, and not none."""
    (m, n, batch), (_, rows, columns, _) = access.strides, problem.sizes
    if rows is ix.ONE:
        m = _rounded(columns)
    if columns is ix.ONE:
        n = ix.ONE if m is not ix.ONE else _rounded(rows)
    return replace(access, strides=(m, n, batch))


def _rounded(e: Expr) -> Expr:
    return ix.mul(ix.floordiv(ix.add(e, BYTES - 1), BYTES), BYTES)


def _unrounded(value: Expr, dtype: torch.dtype) -> Expr:
    """Storing rounds by itself."""
    inner = value.src[0] if value.op == "cast" and value.dtype == dtype else value
    return inner if inner.dtype == torch.float32 else value


def _leaves(value: Expr) -> list[Expr]:
    """Those an expression is computed of, the accumulator first."""
    found = [n for n in _values(value) if n.op in ("load", "sym") or _number(n) is not None]
    # by nothing that depends on a size: equal sources are to have equal texts
    return sorted(
        found,
        key=lambda n: (
            n is not ACCUMULATOR,
            n.op == "load",
            n.arg if n.op == "load" else str(n.arg),
        ),
    )


def _leaf(problem: GemmProblem, node: Expr) -> Leaf | str:
    if node is ACCUMULATOR:
        return Leaf("accumulator", node)
    if node is ALPHA or node is BETA:
        return Leaf("number", node, number=problem.alpha if node is ALPHA else problem.beta)
    number = _number(node)
    if number is not None:
        return Leaf("number", node, number=number)
    access = _access(problem, node.arg, node.dtype, node.src[0])
    if isinstance(access, str):
        return access
    m, n, _ = access.strides
    match (m is ix.ZERO, n is ix.ZERO):
        case True, True:
            return Leaf("scalar", node, access)
        case True, False if n is ix.ONE:
            return Leaf("row", node, access)
        case False, True if m is ix.ONE:
            return Leaf("column", node, access)
        case _:
            return Leaf("matrix", node, access)


def _with_source(leaves: list[Leaf]) -> list[Leaf]:
    """With one matrix as CUTLASS's C, which it has a place in shared memory for."""
    for k, leaf in enumerate(leaves):
        good = leaf.access is not None and leaf.access.is_wide and leaf.access.dtype in FLOATS
        if leaf.kind == "matrix" and good:
            return [*leaves[:k], Leaf("source", leaf.value, leaf.access), *leaves[k + 1 :]]
    return leaves


def _access(problem: GemmProblem, buffer: str, dtype: torch.dtype, index: Expr) -> Access | str:
    loops = (problem.m, problem.n, problem.batch)
    steps = [ix.coefficient(index, v) for v in loops]
    if any(s is None for s in steps) or free_vars(index) - set(loops):
        return f"{buffer} is not read or written at a fixed distance from one element to the next"
    strides = tuple(
        ix.ZERO if v.src[0] is ix.ONE or s is None else s for v, s in zip(loops, steps, strict=True)
    )
    offset = ix.without(index, loops)
    m, n, batch = strides
    along = problem.n if n is ix.ONE else problem.m
    needed = [along.src[0], m, n, batch, offset]
    needed = [e for e in needed if (e is not ix.ZERO and e is not ix.ONE) or e is along.src[0]]
    if m is not ix.ONE and n is not ix.ONE:
        return Access(buffer, dtype, (m, n, batch), offset, 1)
    width = max_alignment(dtype, needed)
    assumed = tuple(e for e in needed if ix.value_of(e) is None) if width > 1 else ()
    return Access(buffer, dtype, (m, n, batch), offset, width, assumed)


# ---- arithmetic as C++

TEXT: dict[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    # not-a-number wins, as in torch
    "max": "({0} > {1} || {0} != {0}) ? {0} : {1}",
    "min": "({0} < {1} || {0} != {0}) ? {0} : {1}",
    "neg": "-{0}",
    "abs": "fabsf({0})",
    "sign": "float(({0} > 0.0f) - ({0} < 0.0f))",
    "sqrt": "sqrtf({0})",
    "rsqrt": "1.0f / sqrtf({0})",
    "exp": "expf({0})",
    "exp2": "exp2f({0})",
    "expm1": "expm1f({0})",
    "log": "logf({0})",
    "log2": "log2f({0})",
    "log10": "log10f({0})",
    "log1p": "log1pf({0})",
    "sin": "sinf({0})",
    "cos": "cosf({0})",
    "tan": "tanf({0})",
    "tanh": "tanhf({0})",
    "erf": "erff({0})",
    "erfc": "erfcf({0})",
    "sigmoid": "1.0f / (1.0f + expf(-{0}))",
    "pow": "powf({0}, {1})",
    "floor": "floorf({0})",
    "ceil": "ceilf({0})",
    "trunc": "truncf({0})",
    "round": "rintf({0})",
    "copysign": "copysignf({0}, {1})",
    "hypot": "hypotf({0}, {1})",
    "atan": "atanf({0})",
    "atan2": "atan2f({0}, {1})",
    "sinh": "sinhf({0})",
    "cosh": "coshf({0})",
    "where": "{0} ? {1} : {2}",
    "isnan": "{0} != {0}",
    "signbit": "signbit({0})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "bit_and": "bool({0} & {1})",
    "bit_or": "bool({0} | {1})",
    "bit_xor": "bool({0} ^ {1})",
    "bit_not": "!{0}",
}
"""Operations of the IR on floats and truth values. Those beside are refused with their names."""


def computation(name: str, value: Expr, inputs: Sequence[Expr]) -> list[str]:
    """A function of elements, as the lines of a C++ struct."""
    names: dict[Expr, str] = {leaf: f"x{k}" for k, leaf in enumerate(inputs)}
    lines: list[str] = []
    stack = [(value, False)]
    while stack:
        node, expanded = stack.pop()
        if node in names:
            continue
        if not expanded:
            stack.append((node, True))
            stack.extend((s, False) for s in reversed(node.src))
            continue
        text = _text(node, [names[s] for s in node.src])
        if text in names.values():  # a conversion that changes nothing
            names[node] = text
            continue
        names[node] = f"t{len(lines)}"
        kind = "bool" if node.dtype == torch.bool else "float"
        lines.append(f"    {kind} t{len(lines)} = {text};")
    given = ", ".join(f"float x{k}" for k in range(len(inputs)))
    last = names[value] if value.dtype != torch.bool else f"float({names[value]})"
    return [
        f"struct {name} {{",
        f"  CUTLASS_HOST_DEVICE static float at({given}) {{",
        *lines,
        f"    return {last};",
        "  }",
        "};",
    ]


def _text(node: Expr, src: Sequence[str]) -> str:
    if node.op == "const":
        return literal(node.arg, node.dtype)
    if node.op != "cast":
        return TEXT[node.op].format(*src)
    before, after = node.src[0].dtype, node.dtype
    if after == torch.bool:
        return f"{src[0]} != 0.0f"
    if before == torch.bool:
        return f"{src[0]} ? 1.0f : 0.0f"
    if after == torch.float32 or after == before:
        return src[0]
    return f"rounded_{SHORT[after]}({src[0]})"


def literal(value: float, dtype: torch.dtype = torch.float32) -> str:
    if dtype == torch.bool:
        return "true" if value else "false"
    rounded: float = torch.tensor(value, dtype=dtype).item()
    if math.isnan(rounded):
        return "NAN"
    if math.isinf(rounded):
        return "INFINITY" if rounded > 0 else "-INFINITY"
    return f"{rounded!r}f"
