"""Configurations of Triton templates: which there are, which fit, and which to try first.

Each template has a heuristic: a singleton that lists configurations for a problem, taken from a
table per architecture, scaled to the problem's sizes, each once. `estimate` is a roofline model of
a configuration on a problem; candidates are tried in its order.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright import config
from tilewright.codegen.triton.plan.config import clamp, power
from tilewright.gemm import parts
from tilewright.gemm.hooks import UNITS
from tilewright.gemm.problem import SCALED, GemmProblem, Operand, sm_carveout, takes_tf32
from tilewright.gemm.roofline import buffer_bytes
from tilewright.ir import index as ix
from tilewright.ir.expr import loads, walk
from tilewright.ir.ops import TABLE
from tilewright.target import Rates, Target

MOST_REGISTERS = 255  # a thread can have
LEAST_GROUP = 64  # neighbours along k that have a scale in common, for blocks no longer than these
MOST_PARTIAL = 64 << 20  # bytes of shares that a split of k may leave in memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class GemmConfig:
    """Blocks of the result and of k, and how a program runs: stages of its pipeline, its warps, how
    many rows of blocks are walked together, how many programs share a block's loop over k, and in
    how many pieces a block is stored."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    group_m: int = 8
    split_k: int = 1
    epilogue_subtile: int = 1

    @property
    def accumulator_registers(self) -> float:
        """Of a thread, for the block of the result alone."""
        return self.block_m * self.block_n / (32 * self.num_warps)


def _made(rows: str) -> tuple[GemmConfig, ...]:
    """`m n k stages warps [group [split [pieces]]]` per line."""
    return tuple(GemmConfig(*map(int, row.split())) for row in rows.split(";"))


# ---- tables, for operands of two bytes

_HOPPER = _made(
    "128 256 64 3 8; 128 128 64 4 8; 128 128 64 3 4; 256 128 64 3 8; 64 256 64 4 4;"
    "64 128 64 4 4; 128 64 64 4 4; 64 64 64 4 4; 64 64 128 4 4; 64 128 128 3 4; 128 64 128 3 4;"
    "64 32 128 4 4; 64 16 128 5 4; 32 64 128 4 4; 32 128 64 4 4; 32 32 128 5 4;"
    "16 64 128 4 4; 16 128 64 5 4; 16 32 256 4 4; 16 128 128 3 4; 16 64 256 3 4; 16 32 128 6 4;"
    "16 16 256 5 2; 16 32 128 5 2"
)
_AMPERE = _made(
    "128 256 32 3 8; 128 128 32 4 4; 128 128 64 3 8; 256 128 32 3 8; 128 64 32 4 4;"
    "64 128 32 4 4; 64 128 64 3 4; 128 64 64 3 4; 64 64 64 3 4; 64 64 32 5 4; 64 32 64 4 4;"
    "32 64 64 5 4; 32 64 128 3 4; 32 32 128 4 4; 16 64 128 4 4; 16 128 64 4 4; 16 32 256 3 4;"
    "16 32 128 5 2; 16 16 256 3 2"
)
_SMALL = _made(  # cards with 100 KiB of shared memory
    "128 128 32 3 8; 128 64 32 4 4; 64 128 32 4 4; 128 256 32 2 8; 64 64 64 3 4; 64 64 32 4 4;"
    "64 32 64 4 4; 32 64 64 4 4; 32 32 128 3 4; 16 64 128 3 4; 16 32 128 4 4; 16 128 64 3 4;"
    "16 16 256 2 2"
)
TABLES: dict[str, tuple[GemmConfig, ...]] = {
    "sm_80": _AMPERE, "sm_86": _SMALL, "sm_89": _SMALL, "sm_90": _HOPPER, "sm_100": _HOPPER,
    "sm_120": _SMALL,
}  # fmt: skip
_SUMS = _made(  # two products in one accumulator; not scaled to the sizes
    "64 64 32 2 4; 64 64 32 3 8; 64 64 32 4 16; 64 32 32 4 8; 32 64 32 4 8; 128 128 32 1 8;"
    "64 64 64 1 8; 32 32 128 1 8; 64 64 16 2 4; 32 32 16 1 2"
)
_BLACKWELL = _made(  # with group, split and pieces; compiled and interpreted so far, not timed
    "128 256 64 3 8 8 1 2; 128 256 64 3 8 8 1 1; 128 256 64 3 8 8 1 4; 128 128 64 4 4 8 1 1;"
    "128 128 64 4 8 8 1 2; 256 128 64 3 8 8 1 2; 128 128 128 3 4 8 1 2; 128 64 64 5 4 8 1 1;"
    "64 128 64 5 4 8 1 1; 64 64 128 4 4 8 1 1; 64 256 64 4 4 8 1 4"
)
_INT8 = _made(
    "128 256 128 3 8; 128 128 128 3 8; 64 128 128 4 4; 128 64 128 4 4; 64 64 128 4 4;"
    "64 64 64 3 4; 32 64 128 4 4; 16 64 256 3 4; 16 32 256 4 4"
)
_HOPPER_EIGHTS = _made(  # eight-bit floats: 128 of k are one scale, and what is added up at once
    "128 256 128 3 8; 128 128 128 4 8; 256 128 128 3 8; 128 128 128 4 4; 64 256 128 4 4;"
    "64 128 128 4 4; 128 64 128 4 4; 64 64 128 5 4; 64 128 256 3 4; 64 64 256 4 4; 64 32 256 4 4;"
    "64 32 128 6 4; 64 16 256 5 4; 32 64 128 5 4; 32 128 128 4 4; 16 64 128 5 4; 16 128 128 5 4;"
    "16 32 256 5 4; 16 64 256 4 4; 16 16 256 6 2; 16 16 512 4 4"
)
_SMALL_EIGHTS = _made(
    "128 128 64 3 8; 128 64 64 4 4; 64 128 64 4 4; 64 64 128 3 4; 64 64 64 4 4; 64 32 128 4 4;"
    "32 64 128 4 4; 32 32 128 4 4; 16 64 128 4 4; 16 32 256 3 4; 16 16 256 4 2"
)
EIGHTS: dict[str, tuple[GemmConfig, ...]] = {
    "sm_89": _SMALL_EIGHTS, "sm_90": _HOPPER_EIGHTS, "sm_100": _HOPPER_EIGHTS,
    "sm_120": _SMALL_EIGHTS,
}  # fmt: skip
_ROWS = _made(  # without the matrix unit: many bytes of the right operand in flight
    "1 16 256 3 4; 1 8 512 3 4; 1 32 128 3 4; 1 64 64 3 4; 1 128 32 3 4; 1 4 1024 2 4;"
    "1 32 256 2 8; 1 128 64 2 8; 1 64 128 2 8; 1 8 256 4 2; 1 256 16 3 4"
)
_BLOCKS = (16, 32, 64, 128, 256)


def exhaustive() -> Iterator[GemmConfig]:
    """Every combination whose accumulator a thread's registers can hold."""
    for m, n, k, stages, warps in itertools.product(_BLOCKS, _BLOCKS, _BLOCKS, range(1, 6),
                                                    (2, 4, 8)):  # fmt: skip
        made = GemmConfig(m, n, k, stages, warps)
        if made.accumulator_registers <= MOST_REGISTERS:
            yield made


# ---- what fits


def available_sms(target: Target) -> int:
    """SMs that a product may have."""
    return max(1, target.sms - sm_carveout())


def operand_bytes(problem: GemmProblem) -> int:
    return max(o.dtype.itemsize for o in problem.operands)


def get_shared_memory_estimation(problem: GemmProblem, config: GemmConfig, *,
                                 epilogue: bool = False) -> int:  # fmt: skip
    """Bytes of shared memory: the stages of both operands' tiles; with `epilogue` an upper bound
    that counts turning the accumulator for the store as if it did not use the same memory."""
    c = config
    tiles = c.block_m + c.block_n * (2 if problem.op == "mm_pair" else 1)
    size = operand_bytes(problem) * tiles * c.block_k * c.num_stages + 128
    if not epilogue:
        return size
    element = 4 if problem.op in ("addmm", "baddbmm") else problem.dtype.itemsize
    return size + element * c.block_m * (c.block_n + 16 // element)


def exceeds(problem: GemmProblem, config: GemmConfig, staged: int = 0) -> str:
    """Why a configuration cannot run on the card, or an empty string. Nothing is compiled. `staged`
    are bytes that wait to be stored."""
    need = get_shared_memory_estimation(problem, config) + staged
    have = problem.target.shared_memory
    if need > have:
        return f"needs {need} bytes of shared memory, and a block may have {have}"
    if sums(problem) * config.accumulator_registers > MOST_REGISTERS:
        return (
            f"needs {sums(problem) * config.accumulator_registers:.0f} registers for its "
            "accumulator alone"
        )
    if problem.is_block_scaled and config.block_k > SCALED:
        return f"a block of k has {config.block_k // SCALED} scales"
    return ""


def longest(problem: GemmProblem) -> int:
    """Of a block of k: what is unpacked has a scale for each group of neighbours along k, and of a
    block that lies in one group one is loaded for each column."""
    values = [o.value for o in problem.operands if not o.is_plain]
    divisors = (ix.value_of(n.src[1]) for n in walk(*values)
                if n.op == "ifloordiv" and n.src[0] is problem.k)  # fmt: skip
    powers = (d for d in divisors if d is not None and d >= LEAST_GROUP and not d & (d - 1))
    return min(powers, default=1 << 20)


def sums(problem: GemmProblem) -> int:
    """How many accumulators a program has. Each product of a pair has one; what is added up in
    fewer bits, or is to be scaled, is added to the rest every 128 of k."""
    if problem.op == "mm_pair":
        return 2
    eight = problem.operands[0].dtype in UNITS and problem.target.capability[0] == 9
    return 2 if problem.is_block_scaled or (eight and not problem.fast) else 1


def scaled(configs: Iterable[GemmConfig], problem: GemmProblem) -> Iterator[GemmConfig]:
    """Blocks no larger than the problem, and no more warps than blocks can feed; each once."""
    _, m, n, k = problem.hints
    least_k = max(32 if operand_bytes(problem) == 1 else 16, problem.tile_k)
    most_k = longest(problem)
    seen: set[GemmConfig] = set()
    for c in configs:
        bm, bn = (clamp(16, min(b, power(s)), b) for b, s in ((c.block_m, m), (c.block_n, n)))
        bk = clamp(least_k, min(c.block_k, power(k), most_k), max(c.block_k, least_k))
        made = replace(c, block_m=bm, block_n=bn, block_k=bk,
                       num_warps=max(1, min(c.num_warps, bm * bn // 256)))  # fmt: skip
        if made not in seen:
            seen.add(made)
            yield made


def exhaustive_specialised() -> Iterator[GemmConfig]:
    """The same for templates with specialised warps."""
    blocks = (32, 64, 128, 256)
    for m, n, k, stages, warps, pieces in itertools.product(blocks, blocks, blocks, range(2, 7),
                                                            (4, 8), (1, 2, 4)):  # fmt: skip
        made = GemmConfig(m, n, k, stages, warps, epilogue_subtile=pieces)
        if made.accumulator_registers <= MOST_REGISTERS:
            yield made


def _wider(configs: Iterable[GemmConfig], factor: int) -> Iterator[GemmConfig]:
    """For operands `factor` times as wide: as many bytes of k."""
    for c in configs:
        yield replace(c, block_k=max(16, c.block_k // factor))


# ---- the model


# Microseconds, fitted to 432 products on an H200, as `target.Rates` of sm_90 were.
_LAUNCH = 2.0
_LATENCY = 0.5  # from asking memory to having
_START = 0.42  # of a program
_STORE = 0.46  # of a block of 128 by 128
_AREAS = ((128 * 256, 1.0), (128 * 128, 0.91), (64 * 64, 0.7), (0, 0.6))
"""Elements of a block, and how much of the matrix units those of its size use."""
_OTHERS = 50  # registers a thread needs beside its accumulator
_LANES = 2.2e5  # operations a microsecond of an SM outside of its matrix units
_SHARES = 52_500.0  # bytes a microsecond in which one program adds the shares of others


def rate(problem: GemmProblem) -> float:
    """How fast the matrix units are on the problem's operands, of what they do on two bytes."""
    dtype = problem.operands[0].dtype
    if dtype == torch.float32:
        return 0.45 if takes_tf32() else 0.06
    return 2.0 if dtype.itemsize == 1 else 1.0


def traffic(problem: GemmProblem) -> int:
    """Bytes that must move between memory and the card."""
    b, m, n, k = problem.hints
    moved = 0
    for k_of, operand in enumerate(problem.operands):
        if not operand.is_plain:
            inside = {n.arg for n in loads(operand.value)}
            moved += sum(buffer_bytes(problem.memory[name]) for name in inside)
            continue
        moved += b * k * (n if k_of % 2 else m) * operand.dtype.itemsize
    operands = {o.view.buffer for o in problem.operands}
    operands |= {n.arg for o in problem.operands for n in loads(o.value)}
    outside = [name for name in problem.reads if name not in operands]
    for name in (*outside, *problem.writes):
        buffer = problem.memory[name]
        moved += min(max(ix.likely(buffer.numel), 0), b * m * n) * buffer.dtype.itemsize
    return moved


def is_unpacked(operand: Operand) -> bool:
    """Whether what is in memory is less than what is multiplied."""
    shifted = any(n.op == "shr" for n in walk(operand.value))
    narrow = any(n.dtype.itemsize < operand.dtype.itemsize for n in loads(operand.value))
    return not operand.is_plain and (narrow or shifted)


def width(problem: GemmProblem, operand: Operand) -> float:
    """Bytes in memory of an element."""
    if operand.is_plain:
        return float(operand.dtype.itemsize)
    inside = {n.arg for n in loads(operand.value)}
    elements = math.prod(max(1, ix.likely(n)) for n in operand.view.size)
    return sum(buffer_bytes(problem.memory[name]) for name in inside) / elements


@dataclass(frozen=True)
class _Access:
    """How an operand lies in memory."""

    along_k: bool  # its contiguous dimension is k
    aligned: bool  # its rows start at multiples of four bytes: they are copied without registers

    @classmethod
    def of(cls, problem: GemmProblem, k: int) -> _Access:
        operand, is_right = problem.operands[k], bool(k)
        last = operand.view.stride[-1] is ix.ONE
        across = operand.view.stride[-2 if last else -1]
        step = (ix.value_of(across) or 16) * operand.dtype.itemsize
        # rows that are normalised where they are read lie as what is never stored would
        normed = k == 0 and (problem.factor is not None or problem.walks_rows)
        copied = operand.is_plain or is_unpacked(operand) or normed
        return cls(last != is_right, copied and step % 4 == 0)

    def waste(self, along: int, across: int, itemsize: float) -> float:
        """Bytes read for one that is needed, of a tile of so many elements along k and across."""
        run = (along if self.along_k else across) * itemsize
        return max(1.0, 64 / run)


def _registers(problem: GemmProblem, c: GemmConfig, dot: bool) -> float:
    """Of a thread; what cannot be copied past the registers is held in them."""
    left, right = (_Access.of(problem, k) for k in range(2))
    held = sum(size * c.block_k for size, a in ((c.block_m, left), (c.block_n, right))
               if not a.aligned)  # fmt: skip
    own = sums(problem) * c.accumulator_registers + _OTHERS if dot else 128
    return own + held / (32 * c.num_warps)


def resident(problem: GemmProblem, c: GemmConfig, dot: bool) -> int:
    """Programs that an SM runs at once."""
    target = problem.target
    registers = min(MOST_REGISTERS, _registers(problem, c, dot))
    stages = c if c.block_m >= 64 else replace(c, num_stages=max(1, c.num_stages - 1))
    memory = get_shared_memory_estimation(problem, stages) + 1024
    threads = 32 * c.num_warps
    by_threads = min(target.threads_per_sm // threads, int(65536 // (registers * threads)))
    return max(1, min(target.shared_memory_per_sm // memory, by_threads))


def _step(problem: GemmProblem, c: GemmConfig, card: Rates, dot: bool) -> float:
    """Microseconds an SM works on one block of k."""
    efficiency = next(share for least, share in _AREAS if c.block_m * c.block_n >= least)
    speed = card.matrix / problem.target.sms * rate(problem)
    compute = 2 * c.block_m * c.block_n * c.block_k / (speed * (efficiency if dot else 0.03))
    loaded = 0.0
    for k, (operand, block) in enumerate(zip(problem.operands[:2], (c.block_m, c.block_n),
                                             strict=True)):  # fmt: skip
        access, size = _Access.of(problem, k), width(problem, operand)
        slow = 1.0 if access.aligned else 5.5
        loaded += block * c.block_k * size * access.waste(c.block_k, block, size) * slow
        if not operand.is_plain:
            compute += block * c.block_k * _operations(problem, operand) / _LANES
    spilled = max(0.0, _registers(problem, c, dot) - 200) / 60
    return max(compute, loaded / card.cache) * (1 + spilled)


def _operations(problem: GemmProblem, operand: Operand) -> float:
    """For an element, of an operand that is computed where it is read: of those that are unpacked
    from one element of memory each has a value of its own."""
    found = parts.packed(operand.value, (problem.k, problem.n, problem.m))
    values = [operand.value] if found is None else parts.unpacked(operand.value, *found)[1]
    return sum(n.op in TABLE for n in walk(*values)) / len(values)


def estimate(problem: GemmProblem, c: GemmConfig, dot: bool = True, persistent: bool = False
             ) -> float:  # fmt: skip
    """Microseconds a configuration takes, roughly: memory and arithmetic overlap, rounds of
    programs follow each other."""
    b, m, n, k = (max(1, s) for s in problem.hints)
    target = problem.target
    card = target.rates
    tiles = b * -(-m // c.block_m) * -(-n // c.block_n)
    steps = -(-k // (c.block_k * c.split_k)) * (len(problem.operands) // 2)
    live = 1 if persistent else resident(problem, c, dot)
    programs = tiles * c.split_k
    one = _step(problem, c, card, dot)

    def turn(at_once: int) -> float:
        # a block of k takes at least its share of the latency, however little there is to do
        step = max(at_once * one, _LATENCY / max(1, c.num_stages - 1))
        return steps * step + _START + _STORE * at_once * c.block_m * c.block_n / 16384

    whole, rest = divmod(-(-programs // target.sms), live)
    busy = whole * turn(live) + (turn(rest) if rest else 0.0)
    memory = traffic(problem) / card.memory / min(1.0, programs / target.sms)
    first = -(-programs // target.sms) * _walked(problem, c, card)
    return _LAUNCH + first + (busy**6 + memory**6) ** (1 / 6) + _sharing(c, tiles, card)


def _walked(problem: GemmProblem, c: GemmConfig, card: Rates) -> float:
    """Microseconds in which a program reduces its rows before it multiplies them: they come from
    the cache, block after block."""
    folds = {n for n in walk(problem.operands[0].value) if n.op == "reduce"}
    passes = sum(2 if n.arg.kind == "welford" else 1 for n in folds)
    rows = c.block_m * problem.hints[3] * width(problem, problem.operands[0])
    return passes * (rows / card.cache + _LATENCY)


def _sharing(c: GemmConfig, tiles: int, card: Rates) -> float:
    """Of a split k: shares go to cache, and the last program of a block reads them all."""
    if c.split_k == 1:
        return 0.0
    block = 4 * c.split_k * c.block_m * c.block_n
    return 0.4 + block / _SHARES + 2 * tiles * block / (1.5 * card.memory)


# ---- heuristics of templates


class TemplateHeuristic:
    """No configurations: what a template without heuristics has."""

    def get_template_configs(self, problem: GemmProblem) -> Iterator[GemmConfig]:
        """For a problem, each once; the model orders them later."""
        return iter(())


class MMTemplateHeuristic(TemplateHeuristic):
    """From the tables. A test or a user may set `mm_configs` or `exhaustive_configs`."""

    dot = True  # whether it uses the matrix unit

    def __init__(self) -> None:
        self.mm_configs: Sequence[GemmConfig] = ()  # none: the architecture's own
        self.exhaustive_configs: Sequence[GemmConfig] = ()

    def table(self, problem: GemmProblem) -> Iterable[GemmConfig]:
        """What is tried for a problem, before scaling."""
        is_float = problem.operands[0].dtype.is_floating_point
        if config.max_autotune_gemm_search_space.upper() == "EXHAUSTIVE" and is_float:
            return self.exhaustive_configs or exhaustive()
        if self.mm_configs:
            return self.mm_configs
        if not is_float:
            return _INT8
        if operand_bytes(problem) == 1:
            return EIGHTS.get(problem.target.arch.rstrip("af"), _SMALL_EIGHTS)
        known = TABLES.get(problem.target.arch.rstrip("af"), _AMPERE)
        return _wider(known, max(1, operand_bytes(problem) // 2))

    def get_template_configs(self, problem: GemmProblem) -> Iterator[GemmConfig]:
        fitting = (c for c in scaled(self.table(problem), problem) if not exceeds(problem, c))
        return itertools.islice(fitting, config.test_configs.max_mm_configs)


class PersistentHeuristic(MMTemplateHeuristic):
    """Only where there are more blocks than the card runs at once."""

    def table(self, problem: GemmProblem) -> Iterable[GemmConfig]:
        found = super().table(problem)
        if self.mm_configs or self.exhaustive_configs:
            return found
        return [c for c in found if c.block_m * c.block_n >= 128 * 64]


def staged(problem: GemmProblem, c: GemmConfig) -> int:
    """Bytes of shared memory that results wait in, to be stored through descriptors."""
    if not config.triton.enable_template_tma_store:
        return 0
    sizes = [problem.memory[name].dtype.itemsize for name in problem.writes]
    return sum(sizes) * c.block_m * c.block_n // c.epilogue_subtile


def for_groups_of_warps(configs: Iterable[GemmConfig], problem: GemmProblem
                        ) -> Iterator[GemmConfig]:  # fmt: skip
    """Scaled, but for blocks of at least 64 rows and four warps: the matrix units of Hopper. The
    card fills what is beyond a matrix with zeros."""
    most = (c for c in configs if c.num_warps >= 4 and c.block_m >= 64)
    made = (replace(c, block_m=max(64, c.block_m), num_warps=max(4, c.num_warps))
            for c in scaled(most, problem))  # fmt: skip
    yield from dict.fromkeys(made)


class PersistentTMAHeuristic(PersistentHeuristic):
    """Of the large blocks those with warps enough for Hopper's matrix units."""

    def get_template_configs(self, problem: GemmProblem) -> Iterator[GemmConfig]:
        every = for_groups_of_warps(self.table(problem), problem)
        fitting = (c for c in every if not exceeds(problem, c, staged(problem, c)))
        return itertools.islice(fitting, config.test_configs.max_mm_configs)


NARROWEST_PIECE = 16  # columns of what is stored at once


class SpecialisedHeuristic(MMTemplateHeuristic):
    """Of the table for cards whose loops have specialised warps."""

    def table(self, problem: GemmProblem) -> Iterable[GemmConfig]:
        if config.max_autotune_gemm_search_space.upper() == "EXHAUSTIVE":
            return self.exhaustive_configs or exhaustive_specialised()
        return self.mm_configs or _wider(_BLACKWELL, max(1, operand_bytes(problem) // 2))

    def get_template_configs(self, problem: GemmProblem) -> Iterator[GemmConfig]:
        every = dict.fromkeys(map(_in_pieces, for_groups_of_warps(self.table(problem), problem)))
        fitting = (c for c in every if not exceeds(problem, c, staged(problem, c)))
        return itertools.islice(fitting, config.test_configs.max_mm_configs)


def _in_pieces(c: GemmConfig) -> GemmConfig:
    """Of no fewer columns than can be stored at once."""
    least = 2 if config.triton.enable_epilogue_subtiling else 1
    pieces = min(max(least, c.epilogue_subtile), max(1, c.block_n // NARROWEST_PIECE))
    return replace(c, epilogue_subtile=pieces)


class MMPlusMMHeuristic(MMTemplateHeuristic):
    """Blocks of k must be shorter than k, and nothing is scaled."""

    def get_template_configs(self, problem: GemmProblem) -> Iterator[GemmConfig]:
        k = problem.hints[3]
        table = self.mm_configs or _SUMS
        fitting = (c for c in table if c.block_k < k and not exceeds(problem, c))
        return itertools.islice(fitting, config.test_configs.max_mm_configs)


class SplitKHeuristic(MMTemplateHeuristic):
    """The loop over k shared out, where blocks are fewer than the card runs at once."""

    def get_template_configs(self, problem: GemmProblem) -> Iterator[GemmConfig]:
        fitting = (s for c in scaled(self.table(problem), problem) for s in self.splits(problem, c)
                   if not exceeds(problem, s))  # fmt: skip
        return itertools.islice(fitting, config.test_configs.max_mm_configs)

    def splits(self, problem: GemmProblem, c: GemmConfig) -> Iterator[GemmConfig]:
        b, m, n, k = problem.hints
        if config.triton.num_decompose_k_splits == 0:
            return
        if c.split_k > 1:  # a list of one's own says how
            yield c
            return
        tiles = b * -(-m // c.block_m) * -(-n // c.block_n)
        room = problem.target.sms * resident(problem, c, self.dot)
        if tiles == 0 or not problem.operands[0].dtype.is_floating_point:
            return
        for split in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128):
            share = 4 * tiles * split * c.block_m * c.block_n
            if tiles * split > 2 * room or k < 2 * split * c.block_k or share > MOST_PARTIAL:
                return
            yield replace(c, split_k=split)


class TMAHeuristic(SplitKHeuristic):
    """With and without shares of k; blocks of at least 64 rows, for Hopper's own matrix units."""

    def get_template_configs(self, problem: GemmProblem) -> Iterator[GemmConfig]:
        table = for_groups_of_warps(self.table(problem), problem)
        every = (s for c in table for s in (c, *self.splits(problem, c)))
        fitting = (c for c in every if not exceeds(problem, c, staged(problem, c)))
        return itertools.islice(fitting, config.test_configs.max_mm_configs)


class RowsHeuristic(SplitKHeuristic):
    """Without the matrix unit, for a few rows; with and without shares of k."""

    dot = False

    def get_template_configs(self, problem: GemmProblem) -> Iterator[GemmConfig]:
        _, m, n, k = problem.hints
        table = self.mm_configs or _ROWS
        seen: dict[GemmConfig, None] = {}
        for c in table:
            rows = power(m)
            bn = min(c.block_n, power(n))
            bk = min(max(c.block_k // rows, 16), power(k), longest(problem))
            bk = max(bk, problem.tile_k)
            seen[replace(c, block_m=rows, block_n=bn, block_k=bk)] = None
        every = (s for c in seen for s in itertools.chain((c,), self.splits(problem, c)))
        return itertools.islice(dict.fromkeys(every), config.test_configs.max_mm_configs)


# ---- the registry

_Key = tuple[str, str | None, str | None]  # template, device type, op; None: any
_registered: dict[_Key, type[TemplateHeuristic]] = {}
_instances: dict[type[TemplateHeuristic], TemplateHeuristic] = {}


def _uid(template: str) -> str:
    return template if "::" in template else f"triton::{template}"


def register_template_heuristic(template: str, device_type: str | None = None,
                                op: str | None = None) -> Any:  # fmt: skip
    """Class decorator: the heuristic of a template (`mm` or `triton::mm`) on a device, of an op."""

    def register(cls: type[TemplateHeuristic]) -> type[TemplateHeuristic]:
        _registered[_uid(template), device_type, op] = cls
        return cls

    return register


def get_registered_heuristic_class(template: str, device_type: str, op: str
                                   ) -> type[TemplateHeuristic] | None:  # fmt: skip
    """The nearest registration: what names the device and the op goes before what does not."""
    uid = _uid(template)
    for key in ((uid, device_type, op), (uid, None, op), (uid, device_type, None),
                (uid, None, None)):  # fmt: skip
        if key in _registered:
            return _registered[key]
    return None


def get_template_heuristic(template: str, device_type: str, op: str) -> TemplateHeuristic:
    """The one instance of the heuristic's class in this process."""
    cls = get_registered_heuristic_class(template, device_type, op)
    if cls is None:
        log.error("no heuristic is registered for the template %s: it offers nothing", template)
        cls = TemplateHeuristic
    if cls not in _instances:
        _instances[cls] = cls()
    return _instances[cls]


@contextmanager
def override_template_heuristics(
    device_type: str, template_op_pairs: Sequence[tuple[str, str]],
    override_heuristic_class: type[TemplateHeuristic] = TemplateHeuristic
) -> Generator[None]:  # fmt: skip
    """Inside, the named (template, op) have this heuristic; without one, no configurations."""
    before = dict(_registered)
    for template, op in template_op_pairs:
        _registered[_uid(template), device_type, op] = override_heuristic_class
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before)
        _instances.pop(override_heuristic_class, None)


for _name, _class in (("mm", MMTemplateHeuristic), ("bmm", MMTemplateHeuristic),
                      ("mm_plus_mm", MMPlusMMHeuristic), ("mm_split_k", SplitKHeuristic),
                      ("mv", RowsHeuristic), ("mm_persistent", PersistentHeuristic),
                      ("mm_tma", TMAHeuristic), ("grouped_mm", MMTemplateHeuristic),
                      ("mm_pair", MMTemplateHeuristic),
                      ("blackwell_ws_persistent_device_tma", SpecialisedHeuristic),
                      ("mm_persistent_tma", PersistentTMAHeuristic)):  # fmt: skip
    register_template_heuristic(_name)(_class)
