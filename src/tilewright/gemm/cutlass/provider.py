"""CUTLASS as a provider: each operation that fits a problem, in each order of its tiles, is a
candidate. Orders share a binary, and so do problems that differ in sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tilewright import caches, config, metrics
from tilewright.gemm.cutlass import arrange, filter, install
from tilewright.gemm.cutlass.bind import Assumption, CutlassSource, worked_out
from tilewright.gemm.cutlass.evt import Access, Epilogue
from tilewright.gemm.cutlass.filter import Ranked
from tilewright.gemm.cutlass.matrices import Matrix
from tilewright.gemm.cutlass.operations import Operation
from tilewright.gemm.cutlass.render import Plain, Rendered, Request, render
from tilewright.gemm.cutlass.runner import runner
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.provider import FUSION_COUNTERS, Argument, Effort, Kernel, register
from tilewright.runtime import nvcc, store
from tilewright.runtime.nvcc import NvccSource
from tilewright.tune.choices import effort as effort_asked

# Operations that are built for each effort, and orders of tiles that each is timed in.
MOST: dict[Effort, int | None] = {"none": 1, "quick": 4, "default": 8, "max": None}
ORDERS: dict[Effort, int | None] = {"none": 1, "quick": 1, "default": 2, "max": None}
PREFERRED = (2, 1, 4, 8)  # orders, for a result of more tiles than a card has processors
LATER = 0.004  # part of the time that an order is guessed to be behind the one before it
RENDERED = (90, 100)  # architectures
OPS = ("mm", "addmm", "bmm", "int_mm", "scaled_mm", "sparse_semi_structured_mm")
_OPTION_OF = {
    "baddbmm": "bmm",
    "_int_mm": "int_mm",
    "_scaled_mm": "scaled_mm",
    "_sparse_semi_structured_mm": "sparse_semi_structured_mm",
}

FUSION_COUNTERS["CUTLASS"] = ("cuda_epilogue_fusion_counter", "cutlass_epilogue_fusion_counter")


@dataclass(frozen=True)
class CutlassCandidate:
    """An operation in one order of tiles, for one problem."""

    problem: GemmProblem
    row: Ranked
    swizzle: int
    number: int
    estimate: float
    provider: str = "CUTLASS"

    @property
    def operation(self) -> Operation:
        return self.row.operation

    @property
    def name(self) -> str:
        return f"cutlass_{self.problem.op}_{self.number}"

    @property
    def description(self) -> str:
        return f"{self.operation.name} swizzle={self.swizzle}"

    @property
    def key(self) -> str:
        return store.key("cutlass", self.binary, self.problem.key, str(self.swizzle))

    @cached_property
    def binary(self) -> str:
        """Of the kernel without its order of tiles: what is built once."""
        return self.source.key

    @cached_property
    def rendered(self) -> Rendered:
        p = self.row.problem
        finish = p.fused if p.fused is not None and self.operation.is_tma else p.plain
        assert finish is not None
        shared = filter.clusters() if self.operation.is_clustered_by_the_call else ()
        return rendered(Request(self.operation, p.a, p.b, p.sizes, finish, p.meta, shared))

    @cached_property
    def source(self) -> NvccSource:
        made = self.rendered
        text = made.text
        if config.cuda.generate_test_runner and not self.problem.symbols:
            values = [worked_out(v, {}, self.swizzle, self.problem.target.sms)
                      for _, _, v in made.numbers]  # fmt: skip
            text += runner(self.problem, made, values)
        return NvccSource(
            text,
            made.name,
            made.args,
            _arch(self.problem),
            install.include_paths(),
            install.cutlass_key().decode(),
        )

    def kernel(self) -> Kernel:
        made, memory = self.rendered, self.problem.memory
        names = [b for b in memory if b in {*self.problem.reads, *self.problem.writes}]
        numbers = {s.arg.name: s.dtype.is_floating_point for s in self.problem.symbols}
        names += numbers
        kinds = {name: "float" if is_float else "int" for name, is_float in numbers.items()}
        arguments: tuple[Argument, ...] = tuple((kinds.get(name, "ptr"), name) for name in names)
        source = CutlassSource(
            self.source,
            self.binary,
            self.operation.name,
            tuple(names),
            tuple(names.index(b) for b in made.buffers),
            tuple(value for _, _, value in made.numbers),
            tuple(self._assumptions()),
            self.swizzle,
            self.problem.target.sms,
            self.problem,
        )
        return Kernel(made.name, source, arguments)

    def _assumptions(self) -> list[Assumption]:
        buffers = self.rendered.buffers
        found: dict[Assumption, None] = {}
        for x in _windows(self.row.problem, self.operation):
            multiple = x.alignment * x.dtype.itemsize
            found[Assumption(buffers.index(x.buffer), None, multiple)] = None
            for e in x.assumed:
                found[Assumption(-1, e, x.alignment)] = None
        return [a for a in found if a.multiple > 1]

    def info_dict(self) -> dict[str, str]:
        """Facts for a table of choices."""
        op = self.operation
        return {
            "backend": "CUDA",
            "op_type": "CUTLASS3xGemmTemplate" if op.is_3x else "CUTLASS2xGemmTemplate",
            "op_conf_name": op.name,
            "op_arch": str(op.arch),
            "tile_shape": str(op.tile),
            "epilogue_schedule": op.epilogue_schedule,
            "kernel_schedule": op.kernel_schedule,
            "element_accumulator": op.accumulator,
            "op_name": op.name,
            "instruction_shape": str(op.instruction),
            "swizzle": str(self.swizzle),
        }

    def hash_key(self) -> str:
        """Of this choice; `kernel_hash_key` is that of its binary, which orders of tiles share."""
        return f"cutlass_gemm-{self.binary}-{self.swizzle}"

    def kernel_hash_key(self) -> str:
        return f"cutlass_gemm-{self.binary}"


def _windows(p: arrange.Arranged, op: Operation) -> list[Matrix | Access]:
    finish = p.fused if p.fused is not None and op.is_tma else p.plain
    found: list[Matrix | Access] = [p.a, p.b, *([] if p.meta is None else [p.meta])]
    if isinstance(finish, Epilogue):
        leaves = [x.access for x in finish.leaves if x.kind in ("matrix", "source")]
        found += [a for a in leaves if a is not None]
        return [*found, *(r.access for r in finish.results)]
    assert isinstance(finish, Plain)
    return [*found, finish.d, *([finish.c] if finish.c is not None else [])]


def rendered(request: Request) -> Rendered:
    """The source; that of equal requests is rendered once (`cuda.enable_caching_codegen`)."""
    found = _rendered.get(request) if config.cuda.enable_caching_codegen else None
    if found is None:
        metrics.counters["cutlass"]["rendered"] += 1
        found = _rendered[request] = render(request)
    return found


_rendered: dict[Request, Rendered] = {}
caches.register(_rendered.clear)


@register
class Cutlass:
    name = "CUTLASS"

    def supports(self, problem: GemmProblem) -> str:
        """Why nothing is offered, or an empty string."""
        return (
            self._unavailable(problem)
            or self._unwanted(problem)
            or self._unfit(problem)
            or self._unbuilt(problem)
        )

    def _unavailable(self, problem: GemmProblem) -> str:
        if not problem.target.is_gpu or torch.version.hip:
            return "CUTLASS computes on NVIDIA cards"
        if not (config.max_autotune or config.max_autotune_gemm):
            return "nothing is measured without max_autotune or max_autotune_gemm"
        if not install.try_import_cutlass():
            return f"CUTLASS is not there: {install.HOW}"
        if _arch(problem) not in RENDERED:
            return f"kernels are rendered for sm_90 and sm_100, and not for {problem.target.arch}"
        return ""

    def _unwanted(self, problem: GemmProblem) -> str:
        if not is_enabled(problem.op):
            return f"{problem.op} is not among cuda.cutlass_enabled_ops"
        _, m, n, k = problem.hints
        least = config.cuda.cutlass_backend_min_gemm_size
        if m * n * k <= 0 or m * n * k < least:
            return f"it is smaller than cuda.cutlass_backend_min_gemm_size = {least}"
        if problem.epilogue and not config.cuda.cutlass_epilogue_fusion_enabled:
            return "cuda.cutlass_epilogue_fusion_enabled is off"
        if problem.dtype == torch.int32 and problem.symbols:
            return "products of integers are offered for known sizes alone"
        return ""

    def _unfit(self, problem: GemmProblem) -> str:
        found = arrange.arranged(problem)
        if isinstance(found, str):
            return found
        if filter.fitting(found, _arch(problem), install.version()):
            return ""
        if problem.epilogue:
            return "no operation of CUTLASS can end the product so"
        return "no operation of CUTLASS has these dtypes, layouts and alignments"

    def _unbuilt(self, problem: GemmProblem) -> str:
        if nvcc.find() or self.candidates(problem, effort_asked()):
            return ""
        return f"there is no nvcc, nor a kernel that was built elsewhere: {nvcc.HOW}"

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[CutlassCandidate]:
        """Without nvcc those that were built on another machine."""
        every = self._candidates(problem, effort)
        return every if nvcc.find() else [c for c in every if nvcc.is_built(c.binary)]

    def _candidates(self, problem: GemmProblem, effort: Effort) -> list[CutlassCandidate]:
        found = arrange.arranged(problem)
        if isinstance(found, str):
            return []
        rows = filter.ranked(found, _arch(problem), problem.target)
        limited = config.cuda.cutlass_max_profiling_configs is not None
        if not limited:
            rows = rows[: MOST[effort]]
        made: list[CutlassCandidate] = []
        for row in rows:
            for place, swizzle in enumerate(_orders(row, problem, None if limited else effort)):
                estimate = row.estimate * (1 + LATER * place)
                made.append(CutlassCandidate(problem, row, swizzle, len(made), estimate))
        return made


def _arch(problem: GemmProblem) -> int:
    return install.normalized(problem.target.arch)


def _orders(row: Ranked, problem: GemmProblem, effort: Effort | None) -> list[int]:
    """Orders of tiles to try, likely ones first; one, where all tiles are computed at once, or
    where the operation has its own."""
    named = filter.swizzles()
    if not row.operation.is_3x:
        return [1]
    if effort is None:
        return list(named)
    batch, m, n, _ = row.problem.hints
    rows, columns = row.operation.block
    if effort != "max" and batch * -(-m // rows) * -(-n // columns) <= problem.target.sms:
        return [1] if 1 in named else [named[0]]
    order = sorted(named, key=lambda s: PREFERRED.index(s) if s in PREFERRED else len(PREFERRED))
    return order[: ORDERS[effort]]


def is_enabled(op: str) -> bool:
    """Whether `cuda.cutlass_enabled_ops` has an operator."""
    text = config.cuda.cutlass_enabled_ops.strip().lower()
    if text == "all":
        return True
    return _OPTION_OF.get(op, op) in {part.strip() for part in text.split(",") if part.strip()}
