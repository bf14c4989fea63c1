"""Attention on the CPU by C++ kernels: a struct that says where operands lie and what becomes of a
score. `runtime/include/tw_attention.h` holds the loops around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast as as_type

import torch

from tilewright import config as options
from tilewright.attention.problem import AttentionProblem, at
from tilewright.attention.provider import Launch, Plan, register
from tilewright.attention.ranges import FALSE, M0, M1, N0, N1, TRUE
from tilewright.codegen.cpp.emit import Writer, uses_flag
from tilewright.codegen.cpp.text import CTYPE, PRELUDE, literal, memory_type
from tilewright.gemm.provider import Argument, Effort, Kernel
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.attention import SCORE, Sparse, element
from tilewright.ir.expr import Expr, const, free_vars, substitute, var, walk
from tilewright.runtime.cxx import ArgKind, CxxSource, key_of

FLOATS = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
# Keys of a register tile, and vectors of queries beside them: sums, the vectors, one broadcast.
TILES = {"avx512": (6, 4), "avx2": (6, 2), "scalar": (4, 1)}
FEW_TILE = 8  # keys of a tile of one vector of queries
KEYS = (64, 128)  # at a time
TURNED = frozenset((torch.float32, torch.float64, torch.bool, torch.uint8))
PEAK = {"avx512": 60.0, "avx2": 30.0, "scalar": 4.0}  # multiply-adds a nanosecond, one core


@dataclass(frozen=True)
class Config:
    tile: int
    vecs: int
    keys: int
    flat: bool

    @property
    def description(self) -> str:
        return f"FLAT={int(self.flat)}, KEYS={self.keys}, TILE={self.tile}, VECS={self.vecs}"


@dataclass(frozen=True)
class CppCandidate:
    problem: AttentionProblem
    config: Config
    number: int
    threads: int
    provider: str = "CPP"

    @property
    def name(self) -> str:
        return f"cpp_attention_{self.number}"

    @property
    def description(self) -> str:
        return self.config.description

    @property
    def estimate(self) -> float:
        p, c = self.problem, self.config
        lanes = c.vecs * lanes_of(p)
        b, h, m, _ = p.hints
        group = p.node.group if c.flat else 1
        rows = max(1, m * group)
        waste = -(-rows // lanes) * lanes / rows
        threads = self.threads if self.threads > 0 else torch.get_num_threads()
        share = min(threads, max(1, b * h // group * -(-rows // lanes)))
        wide = 2.0 if p.dtype == torch.float64 else 1.0
        return p.flops / 2 * waste * wide / PEAK[p.target.isa] / 1000 / share * (64 + c.keys) / 128

    @property
    def key(self) -> str:
        return key_of(self._source)

    def plan(self) -> Plan:
        _, arguments, checked = self._written
        kernel = Kernel("cpp_fused_attention", self._source, arguments, checked)
        return Plan((Launch(kernel, self.problem.writes),))

    @cached_property
    def _written(self) -> tuple[str, tuple[Argument, ...], bool]:
        return _Source(self.problem, self.config, self.threads).write()

    @property
    def _source(self) -> CxxSource:
        text, arguments, checked = self._written
        kinds = [kind for kind, _ in arguments] + (["ptr"] if checked else [])
        return CxxSource(text, "kernel", as_type(tuple[ArgKind, ...], tuple(kinds)),
                         self.problem.target.cxx_flags)  # fmt: skip


@register
class CppProvider:
    name = "CPP"

    def supports(self, problem: AttentionProblem) -> str:
        if problem.target.is_gpu:
            return "C++ kernels are for the CPU"
        if problem.is_backward:
            return "C++ kernels compute attention forward"
        if problem.dtype not in FLOATS:
            return f"no kernel multiplies {problem.dtype}"
        unknown = [b.dtype for b in problem.buffers if b.dtype not in CTYPE]
        if unknown:
            return f"no C++ type for {unknown[0]}"
        if any(n.op in ("reduce", "scan", "part", "rand", "randn") for n in _nodes(problem)):
            return "a score folds or draws numbers"
        return ""

    def candidates(self, problem: AttentionProblem, effort: Effort) -> Sequence[CppCandidate]:
        if self.supports(problem):
            return ()
        tile, vecs = TILES[problem.target.isa]
        rows = problem.hints[2]
        flat = may_flatten(problem) and rows < vecs * lanes_of(problem)
        rows *= problem.node.group if flat else 1
        fitting = max(1, min(vecs, -(-rows // lanes_of(problem))))
        tile = tile if fitting > 1 else FEW_TILE  # sums that do not wait for each other
        found = [Config(tile, fitting, keys, flat) for keys in KEYS]
        made = [CppCandidate(problem, c, k, options.cpp.threads) for k, c in enumerate(found)]
        made.sort(key=lambda c: c.estimate)
        return made if effort != "none" else made[:1]


def _nodes(problem: AttentionProblem) -> list[Expr]:
    return list(walk(*problem.node.exprs))


def lanes_of(problem: AttentionProblem) -> int:
    return max(problem.target.vector_bytes, 16) // problem.node.working.itemsize


def may_flatten(problem: AttentionProblem) -> bool:
    """Whether the heads of a key head can be side by side: lists of blocks are the same for them,
    and of one block of queries."""
    sparse = problem.node.sparse
    if sparse is None:
        return problem.node.group > 1
    rows = ix.value_of(problem.sizes[2])
    same = all(problem.node.head not in free_vars(e) for e in sparse.exprs)
    return problem.node.group > 1 and same and rows is not None and rows <= sparse.own


class _Source:
    def __init__(self, problem: AttentionProblem, config: Config, threads: int) -> None:
        self.problem, self.node, self.config = problem, problem.node, config
        self.threads = threads
        self.pointers: dict[str, str] = {}
        self.numbers: dict[Expr, str] = {}
        self.checked = False

    def write(self) -> tuple[str, tuple[Argument, ...], bool]:
        p, n = self.problem, self.node
        types = {"T": n.working, "O": p.results[0].dtype}
        lines = [f"using {name} = {CTYPE[t]};" for name, t in types.items()]
        c = self.config
        facts = {"LANES": lanes_of(p), "VECS": c.vecs, "TILE": c.tile, "KEYS": c.keys,
                 "THREADS": self.threads}  # fmt: skip
        flags = {"FLAT": c.flat, "SPARSE": n.sparse is not None, "MAXIMA": n.maxima}
        lines += [f"static constexpr int64_t {k} = {v};" for k, v in facts.items()]
        lines += [f"static constexpr bool {k} = {str(v).lower()};" for k, v in flags.items()]
        lines.append(f"static constexpr double SCALE = {literal(n.scale, torch.float64)};")
        b, h, m, k = p.sizes
        sizes = {"batches": b, "heads": h, "rows": m, "columns": k, "d": p.widths[0],
                 "dv": p.widths[1], "group": const(n.group),
                 "own": const(n.sparse.own) if n.sparse else const(1 << 60),
                 "other": const(n.sparse.other) if n.sparse else const(1 << 60)}  # fmt: skip
        for name, size in sizes.items():
            lines += self._function(f"int64_t {name}()", lambda w, e=size: _return(w, w.index(e)))
        lines += self._operands()
        lines += self._tables(n.sparse)
        lines += self._rectangle("maybe", p.holds.maybe)
        lines += self._rectangle("surely", p.holds.surely)
        lines += self._scores("masked", masked=True)
        lines += self._scores("unmasked", masked=False)
        return self._assembled(lines)

    def _assembled(self, lines: list[str]) -> tuple[str, tuple[Argument, ...], bool]:
        arguments: list[Argument] = [("ptr", b) for b in self.pointers]
        memory = self.problem.memory
        types = [f"{memory_type(memory[b].dtype)}*" for b in self.pointers]
        for e in self.numbers:
            real = e.dtype == torch.float64
            arguments.append(("float" if real else "int", e.arg.name))
            types.append("double" if real else "int64_t")
        names = [*self.pointers.values(), *self.numbers.values()]
        if self.checked:
            types.append("int64_t*")
            names.append("tw_err")
        head = [f"{t} {name}" for t, name in zip(types, names, strict=True)]
        text = f'{PRELUDE}#include "tw_attention.h"\nnamespace {{\nstruct Attention {{\n'
        text += "\n".join("    " + line for line in [*(f"{h};" for h in head), *lines])
        text += f'\n}};\n}}\nextern "C" void kernel({", ".join(head)}) {{\n'
        text += f"    tw::attention::run(Attention{{{', '.join(names)}}});\n}}\n"
        return text, tuple(arguments), self.checked

    # ---- names and memory

    def _function(self, head: str, body: Callable[[Writer], None]) -> list[str]:
        w = Writer(self._name, self._load)
        body(w)
        text = "\n".join(w.lines)
        used = [p for p in self.pointers.values() if f"{p}[" in text]
        own = [f"    auto* const {p} = this->{p};" for p in used]
        return [f"TW_INLINE {head} const {{", *own, *w.lines, "}"]

    def _name(self, e: Expr) -> str:
        if e.op == "var":
            return str(e.arg)
        return self.numbers.setdefault(e, f"number{len(self.numbers)}")

    def _element(self, buffer: str, index: Expr, w: Writer) -> str:
        pointer = self.pointers.setdefault(buffer, f"memory_{buffer}_")
        return f"{pointer}[{w.index(index)}]"

    def _load(self, node: Expr, w: Writer) -> str:
        if node.arg == SCORE:
            return "row_[i_]"
        text = self._element(node.arg, node.src[0], w)
        if len(node.src) == 2:
            text = f"tw::masked({w.value(node.src[1])}, &{text})"
        return f"({text} != 0)" if node.dtype == torch.bool else text

    # ---- functions of the struct

    def _operands(self) -> list[str]:
        p, (b, h, m, n) = self.problem, self.node.place
        q, k, v = p.views
        places = {"query": (q, (b, h, m)), "key": (k, (b, h, n)), "value": (v, (b, h, n))}
        places |= {"out": (p.results[0], (b, h, m)), "lse": (p.results[1], (b, h, m))}
        if self.node.maxima:
            places["maximum"] = p.results[2], (b, h, m)
        lines: list[str] = []
        for name, (view, place) in places.items():
            args = ", ".join(f"int64_t {e.arg}" for e in place)
            where = at(view, *place)

            def body(w: Writer, view: str = view.buffer, where: Expr = where) -> None:
                _return(w, f"&{self._element(view, where, w)}")

            lines += self._function(f"auto* {name}({args})", body)
        steps = {"key_stride": k.stride[2], "value_stride": v.stride[2],
                 "out_step": p.results[0].stride[3]}  # fmt: skip
        for name, e in steps.items():
            lines += self._function(f"int64_t {name}()", lambda w, e=e: _return(w, w.index(e)))
        return lines

    def _tables(self, sparse: Sparse | None) -> list[str]:
        empty = const(0)
        found = {"count": empty, "place": empty, "full_count": empty, "full_place": empty}
        if sparse is not None:
            found |= {"count": sparse.count, "place": sparse.place,
                      "full_count": sparse.full_count or empty,
                      "full_place": sparse.full_place or empty}  # fmt: skip
        lines = ["int64_t block_of(int64_t m) const { return m / own(); }"]
        for name, e in found.items():
            args = "int64_t b, int64_t h, int64_t i" + (", int64_t j" if "place" in name else "")
            lines += self._function(
                f"int64_t {name}({args})", lambda w, e=e: _return(w, w.value(e))
            )
        return lines

    def _rectangle(self, name: str, e: Expr) -> list[str]:
        args = ", ".join(f"int64_t {x}" for x in ("b", "h", *(v.arg for v in (M0, M1, N0, N1))))
        if uses_flag(e):
            e = TRUE if name == "maybe" else FALSE
        return self._function(f"bool {name}({args})", lambda w: _return(w, w.value(e)))

    def _turned(self, value: Expr) -> dict[str, Expr]:
        """Memory that runs along keys, such as a mask that is stored: a block of it is turned
        around first, for the lanes are queries, and would be looked up one by one."""
        found: dict[str, Expr] = {}
        row, column = self.node.row, self.node.column
        for e in walk(value):
            if e.op != "load" or e.arg == SCORE or len(e.src) != 1:
                continue
            step, across = (ix.coefficient(e.src[0], v) for v in (column, row))
            plain = step is ix.ONE and across is not None and not free_vars(across)
            if plain and across is not ix.ZERO and e.dtype in TURNED:
                found[f"turned{len(found)}_"] = e
        return found

    def _turn(self, w: Writer, name: str, load: Expr) -> None:
        row, column = self.node.row, self.node.column
        across = ix.coefficient(load.src[0], row)
        assert across is not None
        start = substitute(load.src[0], {column: var("n0_", column.src[0]),
                                         row: var("m0_", row.src[0])})  # fmt: skip
        w.line(f"alignas(64) {memory_type(load.dtype)} {name}[task.KEYS * task.ROWS];")
        at = self._element(load.arg, start, w)
        w.line(f"tw::transpose_tile({name}, task.ROWS, &{at}, {w.index(across)}, count_, rows_);")

    def _scores(self, name: str, masked: bool) -> list[str]:
        """What becomes of the scores of some keys, in place."""
        node = self.node
        head = f"void {name}(auto& task, int64_t n0_, int64_t count_)"
        infinite = const(float("-inf"), node.working)
        value = node.score
        if masked:
            value = build.where(node.mask, value, infinite)
        if value is element(SCORE, node.working):
            return [f"TW_INLINE {head} const {{}}"]
        turned = {} if self.config.flat else self._turned(value)
        loops = {node.row, node.column} | ({node.head} if self.config.flat else set())
        flagged = uses_flag(value)
        self.checked |= flagged

        def body(w: Writer) -> None:
            w.line("const int64_t b = task.b;")
            if not self.config.flat:
                w.line("const int64_t h = task.h;")
            if flagged:
                w.line("int tw_bad = 0;")
            if turned:
                w.line("const int64_t m0_ = task.m, left_ = task.last + 1 - task.m;")
                w.line("const int64_t rows_ = left_ < task.ROWS ? left_ : task.ROWS;")
            for name, load in turned.items():
                self._turn(w, name, load)
            _hoist(w, value, loops)
            with w.block("for (int64_t j_ = 0; j_ < count_; ++j_)"):
                w.line("const int64_t n = n0_ + j_;")
                w.line("T* const row_ = task.scores + j_ * task.ROWS;")
                _hoist(w, value, loops - {node.column})
                w.line("#pragma omp simd" + (" reduction(|:tw_bad)" if flagged else ""))
                with w.block("for (int64_t i_ = 0; i_ < task.ROWS; ++i_)"):
                    w.line("const int64_t m = task.row(i_);")
                    for name, load in turned.items():
                        w.know(load, f"{CTYPE[load.dtype]}({name}[j_ * task.ROWS + i_])")
                    if self.config.flat:
                        w.line("const int64_t h = task.head(i_);")
                    w.line(f"row_[i_] = {w.value(value)};")
            if flagged:
                w.line("if (tw_bad) __atomic_or_fetch(tw_err, tw_bad, __ATOMIC_RELAXED);")

        return self._function(head, body)


def _hoist(w: Writer, value: Expr, loops: set[Expr]) -> None:
    """Compute here what none of these loops changes."""
    nodes = list(walk(value))
    same = {e for e in nodes if not free_vars(e) & loops
            and not any(n.op == "load" and n.arg == SCORE for n in walk(e))}  # fmt: skip
    for node in nodes:
        if node not in same:
            for source in node.src:
                if source in same:
                    w.prepare(source)


def _return(w: Writer, text: str) -> None:
    w.line(f"return {text};")


__all__ = ["CppProvider"]
