"""The operations CUTLASS has for an architecture: listed by its own library once, then kept.

The library makes tens of thousands of objects in two seconds. What can compute a product of ours is
kept as `Operation`s, frozen rows of what a kernel is rendered from: in memory by dtype, and in the
cache folder as a file of rows (1 MB, 20 ms to read).
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tilewright import caches, config, metrics
from tilewright.gemm.cutlass import install
from tilewright.runtime import store

log = logging.getLogger("tilewright.cutlass")

TOO_MANY = 1111  # levels above it list millions of operations
ELEMENTS = frozenset(("f16", "bf16", "e4m3", "e5m2", "s8"))  # of operands
ACCUMULATORS = frozenset(("f32", "tf32", "s32"))
KINDS = {"Universal3x": "universal3x", "Universal": "universal", "Sparse": "sparse"}

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """What tells one kernel of CUTLASS from another. Dtypes and layouts are CUTLASS's short names:
    `f16`, `void`; `t` row-major, `n` column-major."""

    kind: str  # universal3x, universal (2.x), sparse (2.x)
    arch: int
    opcode: str  # tensorop, sptensorop
    a: str
    b: str
    accumulator: str
    c: str
    d: str
    layouts: str  # of a, b and d: tnt
    aligned: Numbers  # of a, b, c, d, in elements
    tile: Numbers
    cluster: Numbers
    stages: int
    warps: Numbers
    instruction: Numbers
    math: str  # C++ name of how it multiplies
    fast: bool  # 2.x: sums in fewer bits
    scheduler: str  # C++ names of these three
    kernel_schedule: str
    epilogue_schedule: str
    suffixes: tuple[str, str, str]  # what each of them adds to the name
    mixed: str = ""  # how operands of two widths meet
    swizzling: str = ""  # 2.x: C++ name

    @property
    def is_3x(self) -> bool:
        return self.kind == "universal3x"

    @property
    def is_tma(self) -> bool:
        """Whether results go through tensor descriptors: what an epilogue can be fused to."""
        return self.is_3x and self.epilogue_schedule.rpartition("::")[2].startswith("Tma")

    @property
    def block(self) -> Numbers:
        """Rows and columns of the result that one block computes. From sm_100 on `tile` is what a
        cluster does, and an instruction can be two blocks'."""
        if self.arch < 100:
            return self.tile[:2]
        m, n = self.instruction[:2]
        return (m // 2 if "2Sm" in self.kernel_schedule else m, n)

    @property
    def is_clustered_by_the_call(self) -> bool:
        """Whether how many blocks share what they load is said at the call."""
        return self.cluster[0] == 0

    @property
    def is_fast(self) -> bool:
        """Whether sums of fp8 are taken in fewer bits than float32 has."""
        return self.fast or "fastaccum" in self.suffixes[1]

    @property
    def is_stream_k(self) -> bool:
        return "StreamK" in self.scheduler

    @property
    def name(self) -> str:
        """CUTLASS's own `configuration_name()`."""
        widest = max(self.aligned[:2])
        if not self.is_3x:
            return self._name_2x(widest)
        tile, cluster = ("x".join(map(str, part)) for part in (self.tile, self.cluster))
        types = f"{self.a}_{self.b}_{self.accumulator}_{self.c}_{self.d}{self.mixed}"
        fast = "fastaccum" if self.fast else ""
        # CUTLASS names C's layout: D has the same
        return (
            f"cutlass3x_sm{self.arch}_{self.opcode}_{fast}gemm_{types}_{tile}_{cluster}"
            f"_{self.stages}_{self.layouts}_align{widest}{''.join(self.suffixes)}"
        )

    def _name_2x(self, widest: int) -> str:
        core = {"f32": "s", "s32": "i", "f16": "h"}[self.accumulator]
        core += "".join(map(str, self.instruction)) + ("fastaccum" if self.fast else "")
        core += "spgemm" if self.kind == "sparse" else "gemm"
        if self.a != self.b:
            core += f"_{self.a}_{self.b}"
        elif self.a != self.accumulator:
            core += f"_{self.a}"
        core = f"{self.c}_{core}" if self.c != self.accumulator else core
        m, n, k = self.tile
        return (
            f"cutlass_{self.opcode}_{core}_{m}x{n}_{k}x{self.stages}_{self.layouts[:2]}"
            f"_align{widest}"
        )


# ---- CUTLASS's own list


def gen_ops() -> dict[Any, Any]:
    """Operations for the card and the toolkit of the options, as CUTLASS's objects."""
    return _gen_ops_cached(str(install.architecture()), install.version())


def _gen_ops_cached(arch: str | None, version: str | None) -> dict[Any, Any]:
    """All of an architecture, as CUTLASS nests them: kind, then more, then a list."""
    if not arch or not version:
        log.error("CUTLASS has no operations for the architecture %r and CUDA %r", arch, version)
        return {}
    return _generated(str(install.normalized(arch)), _short(version), _level(), ())


@functools.cache
def _generated(arch: str, version: str, level: str, more: tuple[int, ...]) -> dict[Any, Any]:
    number = install.normalized(arch)
    generator = install.module("generator")
    made = [
        n for n in (*more, 90 if number in (100, 103) else 0, 100 if number == 103 else number) if n
    ]
    functions = [getattr(generator, f"GenerateSM{n}", None) for n in made]
    if None in functions:
        raise NotImplementedError(f"this CUTLASS lists no operations for sm_{number}")
    listed = sorted({*more, 100 if number == 103 else number})
    manifest = install.module("manifest").Manifest(_arguments(listed, level))
    for generate in functions:
        assert generate is not None
        generate(manifest, version)
    metrics.counters["cutlass"]["listed"] += 1
    return manifest.operations


def _arguments(archs: Sequence[int], level: str) -> SimpleNamespace:
    """What its command line would give."""
    return SimpleNamespace(
        architectures=";".join(map(str, archs)),
        instantiation_level=level,
        operations="gemm",
        kernels="all",
        ignore_kernels="",
        exclude_kernels="",
        kernel_filter_file=None,
        selected_kernel_list=None,
        interface_dir=None,
        curr_build_dir="",
        build_dir="",
        generator_target="",
        filter_by_cc=True,
        disable_full_archs_compilation=False,
    )


def flattened(nested: Any) -> Iterator[Any]:
    """The operations of a nested mapping."""
    for item in nested.values() if isinstance(nested, dict) else nested:
        if isinstance(item, (dict, list)):
            yield from flattened(item)
        else:
            yield item


def _level() -> str:
    text = config.cuda.cutlass_instantiation_level
    if not text.isdigit():
        return "0"
    if int(text) > TOO_MANY:
        log.warning(
            "cuda.cutlass_instantiation_level = %s lists millions of operations, in "
            "minutes: %s is as far as it pays",
            text,
            TOO_MANY,
        )
    return text


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


# ---- ours

Index = Mapping[tuple[str, str, str], tuple[Operation, ...]]  # by dtypes of a, b and the sums


def operations(arch: int, version: str) -> Index:
    """What can compute products of ours, by dtype. On sm_90 older kernels are among them, which
    multiply half by int8 and by sparse matrices."""
    return _operations(
        arch, _short(version), _level(), config.cuda.cutlass_dir, config.force_disable_caches
    )


@functools.cache
def _operations(arch: int, version: str, level: str, _root: str | None, uncached: bool) -> Index:
    path = store.root() / f"configs_{_file_key(arch, version, level)[:8]}.json"
    rows = None if uncached else _read(path)
    if rows is None:
        rows = _listed(arch, version, level)
        if not uncached:
            text = json.dumps([astuple(row) for row in rows], separators=(",", ":"))
            store.put_atomic(path, text.encode())
    found: dict[tuple[str, str, str], list[Operation]] = {}
    for row in rows:
        found.setdefault((row.a, row.b, row.accumulator), []).append(row)
    return {key: tuple(group) for key, group in found.items()}


def _file_key(arch: int, version: str, level: str) -> str:
    here = Path(__file__)
    return store.key(
        "cutlass",
        install.cutlass_key(),
        str(arch),
        version,
        level,
        here.read_bytes(),
        here.with_name("serialization.py").read_bytes(),
    )


def _read(path: Path) -> list[Operation] | None:
    data = store.get(path)
    if data is None:
        return None
    try:
        return [_row(row) for row in json.loads(data)]
    except (ValueError, TypeError) as error:
        log.warning(
            "the list of CUTLASS's operations in %s cannot be read (%s): made again", path, error
        )
        return None


def _row(values: Sequence[Any]) -> Operation:
    if len(values) != len(fields(Operation)):
        raise ValueError("a row of another length")
    found: list[Any] = [tuple(v) if isinstance(v, list) else v for v in values]
    return Operation(*found)


def _listed(arch: int, version: str, level: str) -> list[Operation]:
    more = (80,) if arch == 90 else ()
    names = _Names()
    every = flattened(_generated(str(arch), version, level, more))
    return [names.row(op) for op in every if names.can_be_ours(op)]


class _Names:
    """CUTLASS's tables, looked up once."""

    def __init__(self) -> None:
        lib = install.module("library")
        self.lib = lib
        self.types: Mapping[Any, str] = lib.DataTypeNames

    def can_be_ours(self, op: Any) -> bool:
        """What is decided without a problem: 13220 of 21268 pass, a third of them of our kinds."""
        lib = self.lib
        kind = op.gemm_kind.name
        if kind not in KINDS or op.is_complex():
            return False
        if op.tile_description.math_instruction.opcode_class == lib.OpcodeClass.Simt:
            return False
        row, column = lib.LayoutType.RowMajor, lib.LayoutType.ColumnMajor
        if (op.A.layout, op.B.layout) != (row, column) and kind != "Sparse":
            return False
        elements = {self.types[op.A.element], self.types[op.B.element]}
        return elements <= ELEMENTS and self.types[op.accumulator_type()] in ACCUMULATORS

    def row(self, op: Any) -> Operation:
        lib, tile = self.lib, op.tile_description
        math = tile.math_instruction
        short = lib.ShortLayoutTypeNames
        fast = math.math_operation == lib.MathOperation.multiply_add_fast_accum
        scheduler, kernel, ending, suffixes = self._schedules(op)
        return Operation(
            kind=KINDS[op.gemm_kind.name],
            arch=op.arch,
            opcode=lib.OpcodeClassNames[math.opcode_class],
            a=self.types[op.A.element],
            b=self.types[op.B.element],
            accumulator=self.types[op.accumulator_type()],
            c=self.types[op.C.element],
            d=self.types[op.D.element],
            layouts="".join(short[x.layout] for x in (op.A, op.B, op.C)),
            aligned=tuple(x.alignment for x in (op.A, op.B, op.C, op.D)),
            tile=tuple(tile.tile_shape),
            cluster=tuple(tile.cluster_shape),
            stages=tile.stages,
            warps=tuple(tile.warp_count),
            instruction=tuple(math.instruction_shape),
            math=lib.MathOperationTag.get(math.math_operation, ""),
            fast=fast,
            scheduler=scheduler,
            kernel_schedule=kernel,
            epilogue_schedule=ending,
            suffixes=suffixes,
            mixed=op.mixed_input_mode_name() if op.mixed_input_mode else "",
            swizzling=lib.SwizzlingFunctorTag[op.swizzling_functor],
        )

    def _schedules(self, op: Any) -> tuple[str, str, str, tuple[str, str, str]]:
        lib = self.lib
        if not op.is_3x:
            return "", "", "", ("", "", "")
        suffixes = (
            lib.TileSchedulerSuffixes[op.tile_scheduler],
            lib.KernelScheduleSuffixes[op.kernel_schedule],
            lib.EpilogueScheduleSuffixes[op.epilogue_schedule],
        )
        return (
            lib.TileSchedulerTag[op.tile_scheduler],
            lib.KernelScheduleTag[op.kernel_schedule],
            lib.EpilogueScheduleTag[op.epilogue_schedule],
            suffixes,
        )


for _memo in (_generated, _operations):
    caches.register(_memo.cache_clear)
