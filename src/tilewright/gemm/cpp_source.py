"""The C++ kernel of a product: a struct that says how its operands are packed and its rows are
finished. `runtime/include/tw_gemm.h` holds the loops around it, and says what P and Q are.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tilewright.codegen.cpp.emit import Writer
from tilewright.codegen.cpp.text import CTYPE, PRELUDE, memory_type
from tilewright.gemm.problem import GemmProblem, Operand
from tilewright.gemm.provider import Argument
from tilewright.ir import index as ix
from tilewright.ir.build import cast, op
from tilewright.ir.expr import Expr, const, load, loads, substitute, var
from tilewright.ir.program import Store

Way = Literal["packed", "stream", "dot"]
Unit = Literal["", "avx512_bf16", "amx_bf16"]  # what multiplies; none: the sums' own vectors
UNITS = {"avx512_bf16": "PAIRS", "amx_bf16": "TILES"}  # as `tw_pairs.h` has them
# What vectors of float32 are made of on their way from memory into registers.
FETCHED = frozenset({torch.bfloat16, torch.float16, torch.int8, torch.uint8})
SUM = "the sum over k"  # what the epilogue's product is made of: an element of the finished row
CACHE_LINE = 64  # bytes
TURNED_K, TURNED_ROWS = 64, 16  # of an operand with a prologue that is turned around when packed


@dataclass(frozen=True)
class Config:
    """How a product is walked; `tw_gemm.h` explains the parameters."""

    way: Way
    q: Literal["m", "n"]  # the loop along which there are vectors of columns
    rows: int
    vecs: int
    kc: int
    pc: int
    qc: int
    pack_p: bool
    pack_q: bool
    unit: Unit = ""

    @property
    def description(self) -> str:
        values = {"UNIT": self.unit} if self.unit else {}
        values |= {"WAY": self.way, "Q": self.q, "ROWS": self.rows, "VECS": self.vecs,
                  "KC": self.kc, "PC": self.pc, "QC": self.qc, "PACK_P": int(self.pack_p),
                  "PACK_Q": int(self.pack_q)}  # fmt: skip
        return ", ".join(f"{k}={v}" for k, v in sorted(values.items()))


def sum_dtype(problem: GemmProblem) -> torch.dtype:
    """What products are added up in."""
    kinds = {problem.dtype, *(o.dtype for o in problem.operands)}
    if any(k.is_floating_point for k in kinds):
        return torch.float64 if torch.float64 in kinds else torch.float32
    return torch.int64 if torch.int64 in kinds else torch.int32


def lanes_of(problem: GemmProblem) -> int:
    """Elements of the vectors of a tile: what a register holds, 16 bytes where code is scalar."""
    return max(problem.target.vector_bytes, 16) // sum_dtype(problem).itemsize


def side(problem: GemmProblem, loop: Expr) -> tuple[Operand, ...]:
    """The operands with this loop, one per pass."""
    return problem.operands[0::2] if loop is problem.m else problem.operands[1::2]


def element(problem: GemmProblem, operand: Operand) -> Expr | None:
    """The load of an operand that needs no more than to be made of the sums' type."""
    value = operand.value
    while value.op == "cast" and value.dtype == sum_dtype(problem):
        value = value.src[0]
    return value if value.op == "load" and len(value.src) == 1 else None


def step(problem: GemmProblem, operand: Operand, loop: Expr) -> Expr | None:
    """How far the elements of such an operand are apart along a loop."""
    found = element(problem, operand)
    return None if found is None else ix.coefficient(found.src[0], loop)


def is_in_place(problem: GemmProblem, operand: Operand, loop: Expr,
                kinds: Container[torch.dtype] = ()) -> bool:  # fmt: skip
    """Whether it can be read where it is, contiguous along a loop: it is of the sums' type, or of
    one of these."""
    found = element(problem, operand)
    known = found is not None and (found.dtype == sum_dtype(problem) or found.dtype in kinds)
    return known and step(problem, operand, loop) is ix.ONE


def rows_along(problem: GemmProblem) -> Expr:
    """The loop of the epilogue that is vectorised: `n`, unless more is contiguous along `m`."""
    indices = [s.index for s in stores_of(problem)]
    n, m = (sum(ix.coefficient(i, v) is ix.ONE for i in indices) for v in (problem.n, problem.m))
    return problem.m if m > n else problem.n


def stores_of(problem: GemmProblem) -> tuple[Store, ...]:
    """All that is stored, over elements of the sum."""
    total = load(SUM, sum_dtype(problem), ix.ZERO)
    if problem.alpha != 1:
        total = op("mul", total, const(problem.alpha, total.dtype))
    for scale in problem.scales:
        total = op("mul", total, cast(scale.value, total.dtype))
    if problem.bias is not None and problem.beta != 0:
        bias = cast(problem.bias.value, total.dtype)
        if problem.beta != 1:
            bias = op("mul", bias, const(problem.beta, total.dtype))
        total = op("add", total, bias)
    # a loop of one point may be left out of an index
    single = {v: ix.ZERO for v in problem.place if v.src[0] is ix.ONE}
    product = substitute(problem.product, single)
    known = {product: cast(total, problem.dtype)}
    own = Store(problem.result.buffer, product.src[0], known[product])

    def over(e: Expr) -> Expr:
        return substitute(substitute(e, single), known)

    found = [own] if problem.keeps else []
    for s in problem.epilogue:
        mask = None if s.mask is None else over(s.mask)
        found.append(Store(s.buffer, over(s.index), over(s.value), s.mode, mask))
    return tuple(found)


def write(problem: GemmProblem, config: Config, threads: int) -> tuple[str, tuple[Argument, ...]]:
    """The text of the kernel, whose function is called `kernel`, and what that is called with."""
    return _Source(problem, config, threads).write()


class _Source:
    def __init__(self, problem: GemmProblem, config: Config, threads: int) -> None:
        self.problem, self.config, self.threads = problem, config, threads
        self.dtype = sum_dtype(problem)
        self.packed = torch.bfloat16 if config.unit else self.dtype  # what operands are packed as
        self.pointers: dict[str, str] = {}
        self.numbers: dict[Expr, str] = {}
        self.q = problem.n if config.q == "n" else problem.m
        self.p = problem.m if config.q == "n" else problem.n
        self.width = config.vecs * (1 if config.way == "dot" else lanes_of(problem))
        self.along = self.p if config.way == "dot" else rows_along(problem)

    # ---- the whole

    def write(self) -> tuple[str, tuple[Argument, ...]]:
        c = self.config
        facts = {"LANES": lanes_of(self.problem), "ROWS": c.rows, "VECS": c.vecs, "KC": c.kc,
                 "PC": c.pc, "QC": c.qc, "PASSES": len(self.problem.operands) // 2,
                 "THREADS": self.threads}  # fmt: skip
        flags = {"PACK_P": c.pack_p, "PACK_Q": c.pack_q, "ALONG_Q": self.along is self.q}
        lines = [f"using T = {CTYPE[self.dtype]};", f"using E = {CTYPE[self.packed]};"]
        lines += [f"using {t} = {self._type(loop, packed)};" for t, loop, packed in
                  (("PT", self.p, c.pack_p), ("QT", self.q, c.pack_q))]  # fmt: skip
        lines.append(f"static constexpr tw::gemm::Way WAY = tw::gemm::{c.way.upper()};")
        if c.unit:
            lines.append(f"static constexpr tw::gemm::Unit UNIT = tw::gemm::{UNITS[c.unit]};")
        lines += [f"static constexpr int64_t {k} = {v};" for k, v in facts.items()]
        lines += [f"static constexpr bool {k} = {str(v).lower()};" for k, v in flags.items()]
        batch, *_, k_size = self.problem.sizes
        sizes = {"batches": batch, "p_size": self.p.src[0], "q_size": self.q.src[0],
                 "k_size": k_size}  # fmt: skip
        for name, size in sizes.items():
            lines += self._function(f"int64_t {name}()", lambda w, e=size: _return(w, w.index(e)))
        lines += self._access("p", self.p, c.pack_p)
        lines += self._access("q", self.q, c.pack_q)
        lines += self._rows("p", self.p) if c.pack_p else []
        if c.way == "dot":
            lines += self._rows("q", self.q) if c.pack_q else []
        else:
            lines += self._panel()
        lines += [*self._row(), *(self._expect() if self.along is self.q else [])]
        return self._assembled(lines)

    def _type(self, loop: Expr, packed: bool) -> str:
        """Of the elements of one side where they are read."""
        found = element(self.problem, side(self.problem, loop)[0])
        return CTYPE[self.dtype] if packed or found is None else CTYPE[found.dtype]

    def _assembled(self, lines: list[str]) -> tuple[str, tuple[Argument, ...]]:
        arguments: list[Argument] = [("ptr", b) for b in self.pointers]
        memory = self.problem.memory
        types = [f"{memory_type(memory[b].dtype)}*" for b in self.pointers]
        for e in self.numbers:
            real = e.dtype == torch.float64
            arguments.append(("float" if real else "int", e.arg.name))
            types.append("double" if real else "int64_t")
        names = [*self.pointers.values(), *self.numbers.values()]
        head = [f"{t} {name}" for t, name in zip(types, names, strict=True)]
        struct = [*(f"{h};" for h in head), *lines]
        header, walk = ("tw_pairs.h", "Pairs") if self.config.unit else ("tw_gemm.h", "Loops")
        text = f'{PRELUDE}#include "{header}"\nnamespace {{\nstruct Product {{\n'
        text += "\n".join("    " + line for line in struct)
        text += f'\n}};\n}}\nextern "C" void kernel({", ".join(head)}) {{\n'
        made = f"Product{{{', '.join(names)}}}"
        text += f"    tw::gemm::run<Product, tw::gemm::{walk}>({made});\n}}\n"
        return text, tuple(arguments)

    def _function(self, head: str, body: Callable[[Writer], None]) -> list[str]:
        """A member function. Pointers are its own: a store of bytes might change the struct's."""
        w = Writer(self._name, self._load)
        body(w)
        text = "\n".join(w.lines)
        used = [p for p in self.pointers.values() if f"{p}[" in text]
        own = [f"    auto* const {p} = this->{p};" for p in used]
        return [f"{head} const {{", *own, *w.lines, "}"]

    # ---- names and memory

    def _name(self, e: Expr) -> str:
        if e.op == "var":
            return str(e.arg)
        return self.numbers.setdefault(e, f"number{len(self.numbers)}")

    def _element(self, buffer: str, index: Expr, w: Writer) -> str:
        pointer = self.pointers.setdefault(buffer, f"memory{len(self.pointers)}_")
        return f"{pointer}[{w.index(index)}]"

    def _load(self, node: Expr, w: Writer) -> str:
        if node.arg == SUM:
            return "sums[at]"
        text = self._element(node.arg, node.src[0], w)
        if len(node.src) == 2:
            text = f"tw::masked({w.value(node.src[1])}, &{text})"
        return f"({text} != 0)" if node.dtype == torch.bool else text

    # ---- operands

    def _passes(self, w: Writer, operands: Sequence[Operand],
                body: Callable[[Operand], None]) -> None:  # fmt: skip
        for number, operand in enumerate(operands):
            if len(operands) == 1:
                body(operand)
            else:
                last = number == len(operands) - 1
                with w.block("else" if last else f"if (pass == {number})"):
                    body(operand)

    def _access(self, name: str, loop: Expr, packed: bool) -> list[str]:
        """Where an operand's element is, and how far apart its rows or steps of k are."""
        operands, k = side(self.problem, loop), self.problem.k
        across = k if name == "q" and self.config.way == "stream" else loop

        def address(w: Writer, o: Operand) -> None:
            found = element(self.problem, o)
            assert found is not None
            _return(w, f"&{self._element(found.arg, found.src[0], w)}")

        def distance(w: Writer, o: Operand) -> None:
            found = step(self.problem, o, across)
            assert found is not None
            _return(w, w.index(found))

        def at(w: Writer) -> None:
            self._passes(w, operands, lambda o: address(w, o))

        def stride(w: Writer) -> None:
            self._passes(w, operands, lambda o: distance(w, o))

        if packed:
            return []
        kind = f"{name.upper()}T"
        where = (
            f"const {kind}* {name}_at(int64_t pass, int64_t batch, int64_t k, int64_t {loop.arg})"
        )
        return [*self._function(where, at),
                *self._function(f"int64_t {name}_stride(int64_t pass)", stride)]  # fmt: skip

    def _rows(self, name: str, loop: Expr) -> list[str]:
        """Rows of an operand, each contiguous along k."""
        head = (f"void {name}_rows(int64_t pass, E* out, int64_t stride, int64_t batch, int64_t k0,"
                " int64_t kc, int64_t r0, int64_t rows)")  # fmt: skip
        k = self.problem.k

        def one(w: Writer, o: Operand) -> None:
            if self._walks(o, k, loop) is k:
                with w.block("for (int64_t i = 0; i < rows; ++i)"):
                    w.line(f"const int64_t {loop.arg} = r0 + i;")
                    self._fill(w, o, k, ("k0", "kc"), "out[i*stride + at]")
            elif self._turns(o, loop):
                self._turn(w, o, (loop, "r0"), k, ("out", "stride", "rows", "kc"))
            else:
                with w.block(f"for (int64_t base = 0; base < kc; base += {TURNED_ROWS})"):
                    w.line(f"alignas(64) E some[{TURNED_ROWS}*PC];")
                    w.line(_rest(TURNED_ROWS))
                    with w.block("for (int64_t i = 0; i < steps; ++i)"):
                        w.line("const int64_t k = k0 + base + i;")
                        self._fill(w, o, loop, ("r0", "rows"), "some[i*PC + at]")
                    w.line("tw::transpose_tile(out + base, stride, some, PC, rows, steps);")

        operands = side(self.problem, loop)
        return self._function(head, lambda w: self._passes(w, operands, lambda o: one(w, o)))

    def _panel(self) -> list[str]:
        """A panel of Q: `width` columns next to each other for every step of k."""
        head = ("void q_panel(int64_t pass, E* out, int64_t batch, int64_t k0, int64_t kc,"
                " int64_t q0, int64_t cols)")  # fmt: skip
        k, width = self.problem.k, self.width

        def one(w: Writer, o: Operand) -> None:
            if self._walks(o, self.q, k) is self.q:
                w.line("auto fill = [&](int64_t count) __attribute__((always_inline)) {")
                with w.block("for (int64_t i = 0; i < kc; ++i)"):
                    w.line("const int64_t k = k0 + i;")
                    self._fetch_next(w, o)
                    self._fill(w, o, self.q, ("q0", "count"), f"out[i*{width} + at]")
                w.line("};")
                w.line(f"if (cols == {width}) fill({width}); else fill(cols);")
            elif self._turns(o, k):
                self._turn(w, o, (self.q, "q0"), self.q, ("out", str(width), "kc", "cols"))
            else:
                with w.block(f"for (int64_t base = 0; base < kc; base += {TURNED_K})"):
                    w.line(f"alignas(64) E some[{width}*{TURNED_K}];")
                    w.line(_rest(TURNED_K))
                    w.line("const int64_t k1 = k0 + base;")
                    with w.block("for (int64_t i = 0; i < cols; ++i)"):
                        w.line(f"const int64_t {self.q.arg} = q0 + i;")
                        self._fill(w, o, k, ("k1", "steps"), f"some[i*{TURNED_K} + at]")
                    w.line(f"tw::transpose_tile(out + base*{width}, {width}, some, {TURNED_K}, "
                           "steps, cols);")  # fmt: skip
            with w.block(f"for (int64_t i = 0; cols < {width} && i < kc; ++i)"):
                w.line(f"for (int64_t at = cols; at < {width}; ++at) out[i*{width} + at] = E(0);")

        operands = side(self.problem, self.q)
        return self._function(head, lambda w: self._passes(w, operands, lambda o: one(w, o)))

    def _fetch_next(self, w: Writer, o: Operand) -> None:
        """Have the same step of the next panel brought near: steps are too far apart for the
        processor to see where this goes."""
        found = element(self.problem, o)
        if found is not None:
            there = substitute(found.src[0], {self.q: ix.add(var("q0", ix.ONE), self.width)})
            w.line(f"__builtin_prefetch(&{self._element(found.arg, there, w)});")

    def _walks(self, o: Operand, first: Expr, second: Expr) -> Expr:
        """The loop along which an operand is read: the first unless only the second is better."""
        found = loads(o.value)
        one, two = (sum(ix.coefficient(n.src[0], v) is ix.ONE for n in found)
                    for v in (first, second))  # fmt: skip
        return second if two > one else first

    def _turns(self, o: Operand, loop: Expr) -> bool:
        """Whether memory is packed by turning it around: it is of the type, along a loop."""
        found = element(self.problem, o)
        is_one = step(self.problem, o, loop) is ix.ONE
        return found is not None and found.dtype == self.packed and is_one

    def _fill(self, w: Writer, o: Operand, loop: Expr, span: tuple[str, str], to: str) -> None:
        """Elements along a loop, from `span[0]` on."""
        value = cast(o.value, self.packed)
        w.hoist([value], loop, ())
        w.line("#pragma omp simd")
        with w.block(f"for (int64_t at = 0; at < {span[1]}; ++at)"):
            w.line(f"const int64_t {loop.arg} = {span[0]} + at;")
            w.line(f"{to} = {w.value(value)};")

    def _turn(self, w: Writer, o: Operand, start: tuple[Expr, str], across: Expr,
              tile: tuple[str, str, str, str]) -> None:  # fmt: skip
        """A tile of memory turned around, from `start` of a loop and `k0` on: `tile` is where to,
        its width, and how many elements there are along what is contiguous and across."""
        w.line(f"const int64_t k = k0, {start[0].arg} = {start[1]};")
        found, distance = element(self.problem, o), step(self.problem, o, across)
        assert found is not None and distance is not None
        source = self._element(found.arg, found.src[0], w)
        out, width, *counts = tile
        args = [out, width, f"&{source}", w.index(distance), *counts]
        w.line(f"tw::transpose_tile({', '.join(args)});")

    # ---- the epilogue

    def _row(self) -> list[str]:
        """What is done with a row of the product, along the loop that is vectorised."""
        along = self.along
        other = self.problem.m if along is self.problem.n else self.problem.n
        head = (f"TW_INLINE void row(int64_t batch, int64_t {other.arg}, int64_t start,"
                " int64_t count, const T* sums)")  # fmt: skip
        stores = stores_of(self.problem)
        written = {SUM, *(s.buffer for s in stores)}

        def body(w: Writer) -> None:
            w.hoist([e for s in stores for e in s.exprs], along, written)
            w.line("#pragma omp simd")
            with w.block("for (int64_t at = 0; at < count; ++at)"):
                w.line(f"const int64_t {along.arg} = start + at;")
                for s in stores:
                    self._store(w, s, stores)

        return self._function(head, body)

    def _expect(self) -> list[str]:
        """Ahead of a row of a tile: memory that is contiguous along it, and that it has alone."""
        stores = stores_of(self.problem)
        used = {(n.arg, n.src[0]): 0 for n in loads(*(e for s in stores for e in s.exprs))
                if n.arg != SUM and len(n.src) == 1}  # fmt: skip
        used |= {(s.buffer, s.index): 1 for s in stores}

        def body(w: Writer) -> None:
            for (buffer, index), written in used.items():
                along, across = (ix.coefficient(index, v) for v in (self.q, self.p))
                if along is not ix.ONE or across in (None, ix.ZERO):
                    continue
                line = CACHE_LINE // self.problem.memory[buffer].dtype.itemsize
                for at in range(0, self.width, line):
                    there = substitute(index, {self.q: ix.add(self.q, at)})
                    w.line(f"__builtin_prefetch(&{self._element(buffer, there, w)}, {written});")

        head = f"TW_INLINE void expect(int64_t batch, int64_t {self.p.arg}, int64_t {self.q.arg})"
        return self._function(head, body)

    def _store(self, w: Writer, s: Store, stores: Sequence[Store]) -> None:
        dtype = self.problem.memory[s.buffer].dtype
        value = w.value(cast(s.value, dtype))
        for node in loads(*(e for other in stores for e in other.exprs)):
            if node.arg == s.buffer and node.src == (s.index,):
                w.know(node, value)  # what later stores read of it
        text = f"{self._element(s.buffer, s.index, w)} = "
        text += f"uint8_t({value});" if dtype == torch.bool else f"{value};"
        w.line(text if s.mask is None else f"if ({w.value(s.mask)}) {text}")


def _rest(step: int) -> str:
    """How many steps of k there are from `base` on, of a number at a time."""
    return f"const int64_t steps = kc - base < {step} ? kc - base : {step};"


def _return(w: Writer, text: str) -> None:
    w.line(f"return {text};")
