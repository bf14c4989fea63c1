"""Which of CUTLASS's operations compute a problem, and in which order they are worth trying.

An operation is listed for one layout and one alignment; it is made for a problem by changing those,
which changes its name. The library's rows are never changed: each problem has its own.
"""

from __future__ import annotations

import logging
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright import caches, config, metrics
from tilewright.gemm.cutlass import install, nvidia_model
from tilewright.gemm.cutlass.arrange import Arranged
from tilewright.gemm.cutlass.matrices import BYTES, SHORT
from tilewright.gemm.cutlass.operations import Numbers, Operation, operations
from tilewright.target import Target

log = logging.getLogger("tilewright.cutlass")

KEPT = 50  # problems whose operations are remembered


def fitting(problem: Arranged, arch: int, version: str) -> tuple[Operation, ...]:
    """All operations for a problem, by name; those of 50 problems are remembered."""
    key = _key(problem, arch, version)
    found = _filtered.get(key)
    if found is not None:
        log.debug("the operations for %s are known", key)
        return found
    metrics.counters["cutlass"]["filtered"] += 1
    found = _fitting(problem, arch, version)
    log.debug("Got cutlass configs: total number of ops: %d", len(found))
    if not found:
        log.info(
            "no operation of CUTLASS for %s by %s: layouts and alignments are %s",
            *problem.elements[:2],
            _laid(problem),
        )
    if len(_filtered) < KEPT:
        _filtered[key] = found
    return found


_filtered: dict[object, tuple[Operation, ...]] = {}
caches.register(_filtered.clear)


def _laid(p: Arranged) -> tuple[object, ...]:
    """What of a problem decides which operations there are."""
    c = p.plain.c if p.plain is not None else None
    source = p.fused.c.access if p.fused is not None and p.fused.c is not None else None
    return (
        p.elements,
        p.a.major,
        p.a.alignment,
        p.b.major,
        p.b.alignment,
        p.d,
        p.dtype,
        p.plain is not None,
        c and (c.dtype, c.major, c.alignment, str(c.ld)),
        p.fused is not None,
        source and (source.dtype, source.major),
        p.is_dynamic,
        p.fast,
        p.meta is not None and p.sizes[3],  # whole tiles of k alone are computed
    )


def _key(p: Arranged, arch: int, version: str) -> object:
    o = config.cuda
    options = (
        o.cutlass_op_allowlist_regex,
        o.cutlass_op_denylist_regex,
        o.cutlass_tma_only,
        o.cutlass_instantiation_level,
        o.cutlass_max_profiling_configs,
        o.cutlass_dir,
    )
    return _laid(p), options, arch, version


def _fitting(p: Arranged, arch: int, version: str) -> tuple[Operation, ...]:
    found: dict[str, Operation] = {}
    for op in operations(arch, version).get(p.elements, ()):
        made = adapted(op, p)
        if isinstance(made, Operation) and _is_named(made.name):
            found.setdefault(made.name, made)
    return tuple(found[name] for name in sorted(found))


def _is_named(name: str) -> bool:
    """Whether the options allow it."""
    allow, deny = config.cuda.cutlass_op_allowlist_regex, config.cuda.cutlass_op_denylist_regex
    if allow and not re.search(allow, name):
        return False
    return not (deny and re.search(deny, name))


def adapted(op: Operation, p: Arranged) -> Operation | str:
    """The operation made for a problem, or why it is none of the problem's."""
    if p.meta is not None:
        return _sparse(op, p)
    if op.kind != "universal3x":
        return "of another kind"
    dtype, major, alignment = p.d
    if op.d != SHORT[p.dtype]:
        return "it stores another dtype"
    a, b, _, _ = op.aligned
    if a > p.a.alignment or b > p.b.alignment:
        return "rows of an operand do not begin where it can load"
    visited = p.fused is not None and op.is_tma  # rows of its D are known to begin well
    if op.aligned[3] > alignment and not visited:
        return "rows of the result do not begin where it can store"
    if op.is_stream_k and p.is_dynamic:
        return "its workspace depends on sizes known only at run time"
    if config.cuda.cutlass_tma_only and not op.is_tma:
        return "it stores without tensor descriptors (cuda.cutlass_tma_only)"
    if p.fast is not None and op.is_fast != p.fast:
        return "it takes sums in fewer bits" if op.is_fast else "it takes sums in all bits"
    if op.mixed and op.mixed != "_cvt":
        return "it scales an operand"
    source = _source(op, p)
    if source is None:
        return "it cannot end the product so"
    element, c_alignment = source
    aligned = (p.a.alignment, p.b.alignment, c_alignment, alignment)
    return replace(
        op, layouts=f"{p.a.major}{p.b.major}{major}", aligned=aligned, c=element, d=SHORT[dtype]
    )


def _sparse(op: Operation, p: Arranged) -> Operation | str:
    if op.kind != "sparse":
        return "of another kind"
    dtype, _, alignment = p.d
    if op.layouts[:2] != p.a.major + p.b.major:
        return "of other layouts"
    if op.d != SHORT[dtype]:
        return "it stores another dtype"
    a, b, _, d = op.aligned
    d = min(d, BYTES // dtype.itemsize)  # of its results it moves 16 bytes at most
    if a > p.a.alignment or b > p.b.alignment or d > alignment:
        return "rows do not begin where it can load and store"
    if p.hints[3] % op.tile[2] or (p.b.major == "n" and p.hints[3] // 2 % b):
        return "k is not a multiple of its tile"
    if config.cuda.cutlass_tma_only:
        return "it stores without tensor descriptors (cuda.cutlass_tma_only)"
    return replace(op, aligned=(a, b, d, d))


def _source(op: Operation, p: Arranged) -> tuple[str, int] | None:
    """Dtype and alignment of C, which may be none; None where this operation cannot end it."""
    if p.fused is not None and op.is_tma:
        c = p.fused.c
        if c is None or c.access is None:
            return "void", op.aligned[2]
        return SHORT[c.access.dtype], c.access.alignment
    if p.plain is None:
        return None
    c = p.plain.c
    if c is None:
        return "void", op.aligned[2]
    if op.aligned[2] > c.alignment or not op.suffixes[2].startswith("_epi_nosmem"):
        return None
    return SHORT[c.dtype], c.alignment


# ---- the order

# Parts of a card's peak that a kernel reaches on large problems. By tile: rows and columns of the
# sums that a warp group holds; 256x256 has more of them than registers. Guesses from NVIDIA's
# published figures for H100; no card has been asked yet.
TILES = {
    (128, 256): 1.0,
    (256, 128): 1.0,
    (128, 128): 0.93,
    (64, 256): 0.85,
    (64, 128): 0.78,
    (128, 64): 0.8,
    (64, 64): 0.6,
    (256, 256): 0.35,
    (128, 192): 0.97,
    (256, 64): 0.85,
}
SCHEDULES = (("cpasync", 0.55), ("pingpong", 1.0), ("cooperative", 0.99), ("warpspecialized", 0.85))
UNSAID = 0.9  # where CUTLASS chooses the schedule itself
SPILLS = 0.4  # 128 threads holding 256 columns of 128 rows in registers
UNSTAGED = 0.93  # results that go past shared memory
STREAMED = 0.95  # partial sums that meet in memory
MEETING = 3.0  # microseconds for that
STARTS = 2.5  # microseconds of a launch, before the first sums and after the last
ALIKE = 2  # of operations with one tile and one way of sharing it out, those tried before others
PEAK = {"f16": 8.0e8, "bf16": 8.0e8, "e4m3": 1.6e9, "e5m2": 1.6e9, "s8": 1.6e9}  # per microsecond
FASTER = {100: 2.3}  # than these, by NVIDIA's figures of both
BANDWIDTH = 4.0e6  # bytes per microsecond


def estimate(op: Operation, p: Arranged, target: Target) -> float:
    """Microseconds, by a model of the card: waves of tiles, or the bytes that move."""
    batch, m, n, k = (max(1, h) for h in p.hints)
    rows, columns = op.block
    shared = clusters()[:2] if op.is_clustered_by_the_call else op.cluster
    across = [
        _up(math.ceil(size / tile), cluster)
        for size, tile, cluster in ((m, rows, shared[0]), (n, columns, shared[1]))
    ]
    tiles = across[0] * across[1] * batch
    sms = max(1, target.sms)
    waves = tiles / sms if op.is_stream_k and tiles > sms / 2 else float(math.ceil(tiles / sms))
    if op.is_stream_k and tiles < sms:
        waves = max(tiles / sms, 0.25)  # idle processors share the sums
    narrow = max(p.a.dtype.itemsize, p.b.dtype.itemsize)
    peak = PEAK["f16" if narrow == 2 else "e4m3"] * FASTER.get(op.arch, 1.0) / sms
    work = 2.0 * rows * columns * k / (peak * efficiency(op))
    moved = batch * (
        m * k * p.a.dtype.itemsize + n * k * p.b.dtype.itemsize + m * n * p.d[0].itemsize
    )
    ends = STARTS + (MEETING if op.is_stream_k else 0.0)
    return max(waves * work, moved / BANDWIDTH) + ends


def efficiency(op: Operation) -> float:
    """The part of the peak that the kernel reaches."""
    rows, columns = op.block
    found = TILES.get((rows, columns), 0.7)
    schedule = op.suffixes[1]
    found *= next((part for word, part in SCHEDULES if word in schedule), UNSAID)
    if "cooperative" not in schedule and rows * columns > 128 * 128 and rows > 64:
        found *= SPILLS
    found *= 1.0 if op.is_tma else UNSTAGED
    return found * (STREAMED if op.is_stream_k else 1.0)


def _up(n: int, unit: int) -> int:
    return -(-n // max(1, unit)) * max(1, unit)


@dataclass(frozen=True)
class Ranked:
    """An operation, the problem as it computes it (or its transpose), and the model's time."""

    operation: Operation
    problem: Arranged
    estimate: float


def ranked(p: Arranged, arch: int, target: Target) -> list[Ranked]:
    """Those that fit, by the model; by name where the options say how many are tried."""
    found = fitting(p, arch, install.version())
    rows = [Ranked(op, p, estimate(op, p, target)) for op in found]
    most = config.cuda.cutlass_max_profiling_configs
    if most is not None:
        return rows[:most]
    return varied(ordered(rows, target))


def ordered(rows: Sequence[Ranked], target: Target) -> list[Ranked]:
    """Best first by our model; where NVIDIA's is installed, tiles are ordered by that one, and ours
    says what it does not know: how warps take turns, and how long it takes where sums are shared
    out."""
    known = {
        (r.operation.tile, r.operation.cluster): nvidia_model.microseconds(
            target,
            r.problem.hints,
            (r.operation.a, r.operation.b, r.operation.d),
            r.operation.tile,
            r.operation.cluster,
        )
        for r in rows
    }
    if not any(known.values()):
        return sorted(rows, key=lambda r: (r.estimate, r.operation.name))
    best: dict[Numbers, float] = {}  # of a tile, by our model
    for r in sorted(rows, key=lambda r: (r.operation.is_stream_k, r.estimate)):
        best.setdefault(r.operation.tile, r.estimate)
    usual = statistics.median(t / best[tile] for (tile, _), t in known.items() if t)

    def time(r: Ranked) -> tuple[float, str]:
        theirs = known[r.operation.tile, r.operation.cluster]
        if theirs is None or r.operation.is_stream_k:
            return usual * r.estimate, r.operation.name
        return theirs * r.estimate / best[r.operation.tile], r.operation.name

    return sorted(rows, key=time)


def varied(rows: Sequence[Ranked]) -> list[Ranked]:
    """Best first, but of those that are alike few before all others: where the model is wrong about
    a tile, it is wrong about all of its kind."""
    first: list[Ranked] = []
    seen: dict[object, int] = {}
    for row in rows:
        kind = row.operation.block, row.operation.is_stream_k
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= ALIKE:
            first.append(row)
    return [*first, *(r for r in rows if r not in first)]


def swizzles() -> tuple[int, ...]:
    """Orders of tiles the options name."""
    return tuple(int(n) for n in config.cuda.cutlass_max_profiling_swizzle_options.split(","))


def clusters() -> tuple[int, int, int, int]:
    """Rows and columns of blocks that share what they load, where the call says; and of fewer,
    where so many do not fit. (A cluster is flat: the third number is 1.)"""
    o = config.cuda
    named = (o.cutlass_dynamic_cluster_shape, o.cutlass_dynamic_cluster_fallback)
    (a, b, *_), (c, d, *_) = ([int(n) for n in text.split(",")] for text in named)
    return a, b, c, d
