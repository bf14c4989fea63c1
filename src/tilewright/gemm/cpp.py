"""Products on the CPU by C++ kernels: register tiles, packed operands, the epilogue in the cache.

Candidates differ in how the product is walked (`cpp_source.Config`). They are ordered by a model of
the time for arithmetic, packing and finishing; the first few are worth measuring.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import torch

from tilewright import config as options
from tilewright.codegen.cpp.emit import uses_flag
from tilewright.codegen.cpp.text import CTYPE
from tilewright.gemm.cpp_source import (
    FETCHED,
    Config,
    Unit,
    element,
    is_in_place,
    lanes_of,
    rows_along,
    side,
    step,
    stores_of,
    sum_dtype,
    write,
)
from tilewright.gemm.problem import GemmProblem, Operand
from tilewright.gemm.provider import Argument, Effort, Kernel, register
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, loads, walk
from tilewright.ir.ops import TABLE
from tilewright.runtime.cxx import ArgKind, CxxSource, key_of

MOST: dict[Effort, int] = {"none": 1, "quick": 2, "default": 6, "max": 12}
FEW = 16  # rows of a product that is read once and not packed
REGISTERS = {"avx512": 28, "avx2": 12, "scalar": 8}  # for sums; others hold what is multiplied
# Rows by vectors. Few rows with AVX-512: an element of each is loaded at every step, and twelve
# rows some pages apart are all that a place in the nearest cache holds (Xeon of 2023, two cores
# that neighbours share: 512x256x1024 takes 1068 us by 6x4, 1211 by 12x2, 1344 by 14x2).
TILES = {"avx512": ((6, 4), (8, 3), (12, 2), (28, 1)), "avx2": ((6, 2), (4, 3), (12, 1)),
         "scalar": ((4, 2),)}  # fmt: skip
# Of tiles of pairs, the sums held at once; and how much faster than vectors of floats.
PAIRED: dict[Unit, tuple[int, int, float]] = {"amx_bf16": (32, 2, 10.0),
                                              "avx512_bf16": (14, 2, 2.0)}  # fmt: skip
# What pairs hold without rounding: they have eight bits of a number, and the range of float32.
EXACT = frozenset((torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn,
                   torch.float8_e5m2))  # fmt: skip
NEAR, MANY = 24, 192  # rows of P at once: few that stay in the nearest cache, or the most of others
# Steps of k between two visits to the sums; what is tried first comes first.
DEPTHS = {"avx512": (768, 384, 256), "avx2": (384, 768, 256), "scalar": (384, 768, 256)}
# Nanoseconds per element on one core of an EPYC of 2021 (AVX2): the fits that ordered what was
# measured there.
COPY, TURN = 0.3, 0.5  # packing all of an operand
NEXT = 0.15  # packing what is needed next, fetched ahead
READ = 0.06  # from a cache that is shared
ROW, TURNED_ROW = 0.05, 0.15  # finishing
WORTH = 10_000  # nanoseconds of work per thread that are worth starting it
# Parts of the time for arithmetic, where K is walked in blocks: of coming back to the sums, times
# the depth of a block; and of a panel that the first-level cache does not hold beside its rows.
VISIT, FAR, L1 = 15.0, 0.04, 32 << 10
COMMON = frozenset({"cast", "add", "mul", "sub", "where"})  # say nothing about an epilogue


@dataclass(frozen=True)
class CppCandidate:
    problem: GemmProblem
    config: Config
    number: int
    threads: int  # of OpenMP; -1: as many as there are

    @property
    def provider(self) -> str:
        return "CPP"

    @property
    def name(self) -> str:
        return f"cpp_{self.problem.op}_{self.number}"

    @property
    def description(self) -> str:
        return self.config.description

    @property
    def estimate(self) -> float:
        return estimate(self.problem, self.config)

    @property
    def key(self) -> str:
        return key_of(self._source)

    def kernel(self) -> Kernel:
        return Kernel(_kernel_name(self.problem), self._source, self._written[1])

    @cached_property
    def _written(self) -> tuple[str, tuple[Argument, ...]]:
        return write(self.problem, self.config, self.threads)

    @property
    def _source(self) -> CxxSource:
        text, arguments = self._written
        kinds = cast(tuple[ArgKind, ...], tuple(kind for kind, _ in arguments))
        target, unit = self.problem.target, self.config.unit
        flags = target.flags_for(unit) if unit else target.cxx_flags
        return CxxSource(text, "kernel", kinds, flags)


def _kernel_name(problem: GemmProblem) -> str:
    """`cpp_fused_addmm_erf`: the product and what is special about its epilogue."""
    exprs = [s.value for s in problem.epilogue]
    exprs += [o.value for o in problem.operands if not o.is_plain]
    ops = sorted({n.op for n in walk(*exprs) if n.op in TABLE} - COMMON)
    return "_".join(["cpp_fused", problem.op, *ops[:4]])


@register
class CppProvider:
    name = "CPP"

    def supports(self, problem: GemmProblem) -> str:
        if problem.target.is_gpu:
            return "C++ kernels are for the CPU"
        if problem.op == "mm_pair":
            return "one result at a time"
        if problem.is_block_scaled:
            return "a scale changes along k"
        if any(ix.value_of(e) == 0 for e in problem.sizes[:3]):
            return "there is nothing to compute"
        unknown = [b.dtype for b in problem.buffers if b.dtype not in CTYPE]
        if unknown:
            return f"no C++ type for {unknown[0]}"
        if sum_dtype(problem).is_floating_point != problem.dtype.is_floating_point:
            return f"a product of {problem.operands[0].dtype} is not added up in {problem.dtype}"
        return _check_epilogue(problem) or _check_flag(problem)

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[CppCandidate]:
        if self.supports(problem):
            return ()
        limit = min(MOST[effort], options.test_configs.max_mm_configs or MOST[effort])
        found = _varied(problem, configurations(problem))[:limit]
        found.sort(key=lambda c: estimate(problem, c))
        return [CppCandidate(problem, c, i, options.cpp.threads) for i, c in enumerate(found)]


# ---- what can be fused


def _check_epilogue(problem: GemmProblem) -> str:
    """Rows are finished as soon as they are there, in any order."""
    stores = stores_of(problem)
    for s in stores:
        if s.mode != "set":
            return f"the epilogue combines with what {s.buffer} holds"
        if any(n.arg == problem.result.buffer for n in loads(*s.exprs)):
            return "the epilogue reads other elements of the product"
        if any(n.op in ("reduce", "scan", "part") for n in walk(*s.exprs)):
            return "the epilogue folds"
    written = {s.buffer: s.index for s in stores}
    if len(written) < len(stores):
        return "the epilogue stores twice to one buffer"
    for n in loads(*(o.value for o in problem.operands)):
        if n.arg in written:
            return f"the epilogue overwrites the operand {n.arg}"
    for n in loads(*(e for s in stores for e in s.exprs)):
        if n.arg in written and n.src[0] is not written[n.arg]:
            return f"the epilogue reads elements of {n.arg} that it overwrites"
    return ""


def _check_flag(problem: GemmProblem) -> str:
    exprs = [e for s in stores_of(problem) for e in s.exprs]
    exprs += [o.value for o in problem.operands]
    return "an index or an integer division is checked" if uses_flag(*exprs) else ""


# ---- configurations


def configurations(problem: GemmProblem) -> Iterator[Config]:
    """All that make sense, in no order."""
    _, m, n, _ = problem.hints
    for q in (problem.n, problem.m):
        yield from _paired(problem, q)
        yield from _packed(problem, q)
    yield from _dots(problem, *((problem.m, problem.n) if m <= n else (problem.n, problem.m)))
    yield from _streams(problem, *((problem.m, problem.n) if m <= n else (problem.n, problem.m)))


def _varied(problem: GemmProblem, configs: Iterable[Config]) -> list[Config]:
    """By what the model says, but of those that differ in their depth alone all others later: the
    model knows little about depth."""
    found = sorted(dict.fromkeys(configs), key=lambda c: estimate(problem, c))
    best = estimate(problem, found[0])
    kinds: dict[tuple[object, ...], Config] = {}
    for c in found:
        if estimate(problem, c) <= 1.2 * best:
            kinds.setdefault((c.way, c.unit, c.q, c.rows, c.pack_p), c)
    first = list(kinds.values())
    return [*first, *(c for c in found if c not in first)]


def _name(loop: Expr) -> Literal["m", "n"]:
    return "m" if loop.arg == "m" else "n"


def _depth(problem: GemmProblem, most: int) -> int:
    """K in equal blocks."""
    k = max(1, problem.hints[3])
    blocks = -(-k // most)
    return max(8, -(-k // blocks // 8) * 8)


def _packed(problem: GemmProblem, q: Expr) -> Iterator[Config]:
    p = problem.m if q is problem.n else problem.n
    in_place = not _packs(problem, p, problem.k, fetched=False)
    size = sum_dtype(problem).itemsize
    for rows, vecs in TILES[problem.target.isa]:
        width = vecs * lanes_of(problem)
        for most in DEPTHS[problem.target.isa]:
            kc = _depth(problem, most * 4 // size)
            pc = max(1, _rows_at_once(problem, q, kc) // rows) * rows
            qc = max(1, min(512, problem.target.l2 // 4 // (pc * size)) // width) * width
            for pack in (False, True) if in_place else (True,):
                yield Config("packed", _name(q), rows, vecs, kc, pc, qc, pack, True)


def _rows_at_once(problem: GemmProblem, q: Expr, kc: int) -> int:
    """Of P: few, which stay in the nearest cache, where the second-level cache holds what a thread
    has of Q and can give it again for each; else as many as a quarter of that cache holds."""
    size = sum_dtype(problem).itemsize
    columns = -(-ix.likely(q.src[0]) // _threads())
    if columns * problem.hints[3] * size <= problem.target.l2 // 2:
        return NEAR
    return min(MANY, problem.target.l2 // 4 // (kc * size))


def _threads() -> int:
    return options.cpp.threads if options.cpp.threads > 0 else torch.get_num_threads()


def _paired(problem: GemmProblem, q: Expr) -> Iterator[Config]:
    """Pairs of bfloat16, where the processor multiplies them: of what they hold exactly."""
    if any(o.dtype not in EXACT for o in problem.operands):
        return
    if sum_dtype(problem) != torch.float32:
        return
    l2 = problem.target.l2
    for unit, (rows, vecs, _) in PAIRED.items():
        if unit not in problem.target.units:
            continue
        width = vecs * lanes_of(problem)
        for most in (768, 1536):
            kc = _up(_depth(problem, most), 32)
            pc = max(1, min(256, l2 // 4 // (kc * 2)) // rows) * rows
            qc = max(1, min(512, l2 // 4 // (pc * 4)) // width) * width
            yield Config("packed", _name(q), rows, vecs, kc, pc, qc, True, True, unit)


def _dots(problem: GemmProblem, few: Expr, many: Expr) -> Iterator[Config]:
    """Both operands contiguous along k, or at least packed that way."""
    count = ix.likely(few.src[0])
    if count > FEW or not all(_along_k(problem, o) for o in side(problem, many)):
        return
    pack_p, pack_q = _packs(problem, many, problem.k), _packs(problem, few, problem.k, False)
    for vecs in range(1, min(max(count, 1), 6) + 1):
        rows = min(REGISTERS[problem.target.isa] // vecs, 8)
        kc, pc = _depth(problem, 1024), 48 // rows * rows
        yield Config("dot", _name(few), rows, vecs, kc, pc, FEW // vecs * vecs, pack_p, pack_q)


def _packs(problem: GemmProblem, loop: Expr, along: Expr, fetched: bool = True) -> bool:
    """Whether one side has to be packed: not if it is contiguous along a loop, and of the sums'
    type, or of one that vectors are made of as they are `fetched`."""
    wide = fetched and sum_dtype(problem) == torch.float32
    operands = side(problem, loop)
    kinds = {getattr(element(problem, o), "dtype", None) for o in operands}
    ready = all(is_in_place(problem, o, along, FETCHED if wide else ()) for o in operands)
    return not ready or len(kinds) > 1


def _along_k(problem: GemmProblem, o: Operand) -> bool:
    return any(ix.coefficient(n.src[0], problem.k) is ix.ONE for n in loads(o.value))


def _streams(problem: GemmProblem, few: Expr, many: Expr) -> Iterator[Config]:
    """The long side contiguous along its own loop: read in place for few rows, or each thread packs
    what it needs next."""
    count = max(1, ix.likely(few.src[0]))
    along = [any(ix.coefficient(n.src[0], many) is ix.ONE for n in loads(o.value))
             for o in side(problem, many)]  # fmt: skip
    if not all(along):
        return
    registers = REGISTERS[problem.target.isa]
    most = max(rows for rows, vecs in TILES[problem.target.isa] if vecs > 1)
    pack_p = _packs(problem, few, problem.k, fetched=False)
    pack_q = _packs(problem, many, many)
    size = sum_dtype(problem).itemsize
    for rows in sorted(range(min(3, count), min(most, count) + 1), key=lambda r: _up(count, r))[:2]:
        # the sums, a step's vectors, and an element of each row in turn
        vecs = 8 if rows == 1 else max(1, min(8, (registers + 3) // (rows + 1)))
        width = vecs * lanes_of(problem)
        pc = min(_up(count, rows), 264 // rows * rows)
        if count <= FEW:
            for most_k, wide in ((512, 256), (16, 1024)):
                kc, qc = _depth(problem, most_k), _up(wide, width)
                yield Config("stream", _name(many), rows, vecs, kc, pc, qc, pack_p, pack_q)
        if count > FEW // 2 and rows * vecs >= registers * 3 // 4:
            qc = max(1, problem.target.l2 // 4 // (pc * size) // width) * width
            kc = _depth(problem, 384 * 4 // size)
            yield Config("stream", _name(many), rows, vecs, kc, pc, qc, pack_p, True)


# ---- the model


def estimate(problem: GemmProblem, c: Config) -> float:
    """Microseconds, on as many cores as are worth it."""
    b, m, n, k = problem.hints
    q, p = (n, m) if c.q == "n" else (m, n)
    k *= len(problem.operands) // 2
    width = c.vecs * (1 if c.way == "dot" else lanes_of(problem))
    reached = _efficiency(problem, c) - _depth_costs(problem, c)
    arithmetic = _up(p, c.rows) * _up(q, width) * k / (6 * lanes_of(problem)) / reached
    arithmetic /= PAIRED[c.unit][2] if c.unit else 1
    packing = 0.0
    if c.way == "packed":
        packing = q * k * _packing(problem, c.q, "q")
    elif c.way == "stream" and c.pack_q:
        packing = q * k * NEXT * -(-p // c.pc)
    if c.pack_p:
        blocks = -(-q // c.qc) if c.way != "dot" else 1
        packing += p * k * blocks * _packing(problem, "m" if c.q == "n" else "n", "k")
    along = c.way == "dot" or rows_along(problem).arg == c.q
    ns = max(arithmetic, (p + q) * k * READ) + packing + m * n * (ROW if along else TURNED_ROW)
    return b * ns / 1000 / max(1, min(_threads(), b * ns / WORTH))


def _efficiency(problem: GemmProblem, c: Config) -> float:
    """The part of the multiply-add units' peak that the innermost loop reaches."""
    loads = (c.rows + c.vecs) / (c.rows * c.vecs)
    if c.way == "packed" and not c.unit and problem.target.isa == "avx512":
        return 0.93 * (1.45 - max(loads, 0.45))
    visits = 16 / (c.kc + 16) / c.vecs if c.way == "stream" else 0.0  # to the sums
    return (0.8 if c.way == "dot" else 0.93) * min(1.0, 0.9 / max(loads, 0.75)) - visits


def _depth_costs(problem: GemmProblem, c: Config) -> float:
    """What part of that a block of such a depth costs; known of the machine above alone."""
    if c.way != "packed" or problem.target.isa != "avx2":
        return 0.0
    line = (c.vecs * lanes_of(problem) + 2 * c.rows) * sum_dtype(problem).itemsize
    visits = VISIT / c.kc if problem.hints[3] > c.kc else 0.0
    return visits + (FAR if c.kc * line > L1 else 0.0)


def _packing(problem: GemmProblem, name: str, along: str) -> float:
    """Of an element that is to be contiguous along a loop; `q` means the side's own."""
    loop = problem.m if name == "m" else problem.n
    wanted = problem.k if along == "k" else loop
    return max(COPY if step(problem, o, wanted) in (None, ix.ONE) else TURN
               for o in side(problem, loop))  # fmt: skip


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
