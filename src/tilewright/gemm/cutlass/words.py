"""The names by which other programs know this backend, over our own structure.

A program that lists CUTLASS's choices for a product by itself does it with layouts:

    choices = []
    CUTLASS3xGemmTemplate.add_cutlass_gemm_choices(choices, layout, [x, w])

Each choice is a `CUTLASSTemplateCaller`, as those that take part in tuning are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright import config
from tilewright.errors import NoValidChoicesError
from tilewright.gemm.cutlass import arrange, filter, install
from tilewright.gemm.cutlass.filter import Ranked
from tilewright.gemm.cutlass.install import cutlass_key, try_import_cutlass
from tilewright.gemm.cutlass.matrices import max_alignment
from tilewright.gemm.cutlass.operations import Operation, gen_ops
from tilewright.gemm.cutlass.provider import Cutlass, CutlassCandidate
from tilewright.gemm.cutlass.serialization import get_cutlass_operation_serializer
from tilewright.gemm.problem import GemmProblem, Op, loops, plain
from tilewright.ir.expr import Expr, const
from tilewright.ir.program import Buffer, View
from tilewright.runtime import nvcc
from tilewright.runtime.nvcc import CUDACompileError, NvccSource
from tilewright.target import Target
from tilewright.tune.choices import ChoiceCaller, CUTLASSTemplateCaller, ExternKernelCaller

log = logging.getLogger("tilewright.cutlass")

CUDATemplateCaller = CUTLASSTemplateCaller


@dataclass(frozen=True)
class FixedLayout:
    """Where a tensor lies, decided."""

    device: torch.device | str
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int] = ()
    offset: int = 0

    def strides(self) -> tuple[int, ...]:
        if self.stride:
            return tuple(self.stride)
        found: list[int] = []
        step = 1
        for n in reversed(self.size):
            found.insert(0, step)
            step *= n
        return tuple(found)


@dataclass(frozen=True)
class FlexibleLayout(FixedLayout):
    """The same, not decided: contiguous, if nobody says otherwise."""

    def as_fixed(self) -> FixedLayout:
        return FixedLayout(self.device, self.dtype, self.size, self.strides(), self.offset)


@dataclass(frozen=True)
class CUDATemplateBuffer:
    """A tensor by name: what a product is computed of."""

    name: str
    layout: FixedLayout


def get_max_alignment(layout: FixedLayout) -> int:
    """Elements that can be moved at once: the most that divide the contiguous size, the offset and
    every other distance."""
    strides = layout.strides()
    if 1 not in strides:
        return 1
    along = len(strides) - 1 - strides[::-1].index(1)
    others = [s for k, s in enumerate(strides) if k != along]
    return max_alignment(layout.dtype, [layout.size[along], layout.offset, *others])


class CUTLASSTemplate:
    """What is computed, and the operations that compute it."""

    def __init__(
        self, name: str, input_nodes: Sequence[CUDATemplateBuffer], layout: FixedLayout
    ) -> None:
        self.name = name
        self.input_nodes = tuple(input_nodes)
        self.layout = layout


class CUTLASSGemmTemplate(CUTLASSTemplate):
    """A product of two matrices, or batches of them; a third is added: the nodes are X, W, Bias,
    and `input_reorder` says in which order the call has them."""

    is_3x = True

    def __init__(
        self,
        input_nodes: Sequence[CUDATemplateBuffer],
        layout: FixedLayout,
        alpha: float = 1.0,
        beta: float = 0.0,
        input_reorder: Sequence[int] | None = None,
        use_fast_accum: bool | None = None,
    ) -> None:
        super().__init__("cutlass_gemm", input_nodes, layout)
        self.alpha, self.beta = alpha, beta
        self.input_reorder = input_reorder
        self.use_fast_accum = use_fast_accum
        reason = self.mismatch()
        if reason:
            raise ValueError(f"the layouts are not of a product: {reason}")

    def mismatch(self) -> str:
        """Why these are not the layouts of a product, or an empty string."""
        sizes = [node.layout.size for node in self.input_nodes]
        if not 2 <= len(sizes) <= 5:
            return f"{len(sizes)} inputs"
        left, right = sizes[:2]
        if left[-1] != right[-2]:
            return f"K is {left[-1]} and {right[-2]}"
        shape = (*left[:-2], left[-2], right[-1])
        one = 1 in (*left[:-2], *right[:-2])
        if len(left) != len(right) or (left[:-2] != right[:-2] and not one):
            return "batches differ"
        if len(sizes) == 3 and not _spreads(sizes[2], shape):
            return f"{tuple(sizes[2])} is not spread over {shape}"
        return ""

    @classmethod
    def add_cutlass_gemm_choices(
        cls,
        choices: list[ChoiceCaller],
        layout: FixedLayout,
        input_nodes: Sequence[CUDATemplateBuffer],
        alpha: float = 1.0,
        beta: float = 0.0,
        input_reorder: Sequence[int] | None = None,
        use_fast_accum: bool | None = None,
    ) -> None:
        """All choices for a product: each operation in each order of tiles."""
        template = cls(input_nodes, layout, alpha, beta, input_reorder, use_fast_accum)
        for operation in template.gen_ops():
            for swizzle in filter.swizzles():
                template.maybe_append_choice(choices, op=operation, swizzle=swizzle)

    def gen_ops(self) -> list[Operation]:
        """Those that fit, by name, as many as `cuda.cutlass_max_profiling_configs`."""
        found = self._arranged()
        if isinstance(found, str):
            return []
        every = filter.fitting(found, install.architecture(), install.version())
        return list(every[: config.cuda.cutlass_max_profiling_configs])

    def filter_op(self, operation: Operation) -> Operation | None:
        """The operation made for this product, or none."""
        found = self._arranged()
        if isinstance(found, str):
            return None
        made = filter.adapted(operation, found)
        return made if isinstance(made, Operation) else None

    def maybe_append_choice(
        self, choices: list[ChoiceCaller], *, op: Operation, swizzle: int = 1
    ) -> NotImplementedError | None:
        """Add a choice; or what kept it from being one."""
        found = self._arranged()
        if isinstance(found, str):
            return NotImplementedError(found)
        row = Ranked(op, found, filter.estimate(op, found, self.problem.target))
        candidate = CutlassCandidate(self.problem, row, swizzle, len(choices), row.estimate)
        choices.append(CUTLASSTemplateCaller(Offered(candidate)))
        return None

    def render(self, op: Operation) -> str:
        """The C++ source, for the layouts that the nodes have now."""
        found = self._arranged()
        if isinstance(found, str):
            raise NotImplementedError(found)
        made = filter.adapted(op, found)
        if isinstance(made, str):
            raise NotImplementedError(f"{op.name} does not compute these layouts: {made}")
        if (made.layouts, made.c) != (op.layouts, op.c):
            log.warning("layouts have changed since %s was listed: it is made anew for %s%s, with "
                        "%s as C", op.name, made.layouts[:2], made.layouts[2], made.c)  # fmt: skip
        return CutlassCandidate(self.problem, Ranked(made, found, 0.0), 1, 0, 0.0).rendered.text

    def _arranged(self) -> arrange.Arranged | str:
        return arrange.arranged(self.problem)

    @property
    def problem(self) -> GemmProblem:
        """In our own terms. Buffers are named by the nodes, so a tensor used twice is one."""
        x, w, *rest = self.input_nodes
        batched = len(x.layout.size) == 3
        left, right, out = _view(x), _view(w), _view(CUDATemplateBuffer("c", self.layout))
        sizes = (
            left.size[0] if batched else const(1),
            left.size[-2],
            right.size[-1],
            left.size[-1],
        )
        b, m, n, k = loops(*sizes)
        lead = (b,) if batched else ()
        added = None
        if rest:
            wide = _spread(rest[0], [int(e.arg) for e in out.size])
            added = plain(_view(wide), (*lead, m, n))
        ops: dict[tuple[bool, bool], Op] = {
            (False, False): "mm",
            (False, True): "addmm",
            (True, False): "bmm",
            (True, True): "baddbmm",
        }
        nodes = {
            node.name: node for node in (*self.input_nodes, CUDATemplateBuffer("c", self.layout))
        }
        buffers = tuple(_buffer(nodes[name]) for name in sorted(nodes))
        operands = (plain(left, (*lead, m, k)), plain(right, (*lead, k, n)))
        return GemmProblem(
            ops[batched, bool(rest)],
            b,
            m,
            n,
            k,
            operands,
            out,
            buffers,
            Target(config.cuda.arch or f"sm_{install.architecture()}"),
            added,
            self.alpha,
            self.beta,
        )


class CUTLASS3xGemmTemplate(CUTLASSGemmTemplate):
    """Kernels of sm_90 and later."""


class CUTLASS2xGemmTemplate(CUTLASSGemmTemplate):
    """Kernels of earlier cards, which later ones run too."""

    is_3x = False


@dataclass(frozen=True)
class Offered:
    """A candidate that nobody has planned for: it can be shown and built, and not timed."""

    candidate: CutlassCandidate
    is_library: bool = False
    compiles: bool = True
    provider: str = "CUTLASS"

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def description(self) -> str:
        return self.candidate.description

    @property
    def key(self) -> str:
        return self.candidate.key

    @property
    def estimate(self) -> float:
        return self.candidate.estimate

    def start(self) -> None:
        nvcc.submit(self.candidate.source)

    def wait(self, seconds: float) -> bool:
        return nvcc.submit(self.candidate.source).done()

    def finish(self) -> None:
        nvcc.submit(self.candidate.source).result()

    def run(self, stream: int, which: int) -> None:
        raise NotImplementedError("nobody has made memory for this choice")

    def check(self) -> str:
        return ""


def _view(node: CUDATemplateBuffer) -> View:
    layout = node.layout
    size, stride = (tuple(map(const, part)) for part in (layout.size, layout.strides()))
    return View(node.name, size, stride, const(layout.offset), layout.dtype)


def _buffer(node: CUDATemplateBuffer) -> Buffer:
    layout = node.layout
    last = sum((n - 1) * s for n, s in zip(layout.size, layout.strides(), strict=True))
    return Buffer(
        node.name,
        layout.dtype,
        torch.device(layout.device),
        (const(layout.offset + last + 1),),
        (const(1),),
    )


def _spread(node: CUDATemplateBuffer, size: Sequence[int]) -> CUDATemplateBuffer:
    own, strides = list(node.layout.size), list(node.layout.strides())
    missing = len(size) - len(own)
    wide = [0] * missing + [
        0 if n == 1 and want != 1 else s
        for n, s, want in zip(own, strides, size[missing:], strict=True)
    ]
    return CUDATemplateBuffer(
        node.name,
        FixedLayout(
            node.layout.device, node.layout.dtype, tuple(size), tuple(wide), node.layout.offset
        ),
    )


def _spreads(size: Sequence[int], shape: Sequence[int]) -> bool:
    pairs = zip(reversed(size), reversed(shape), strict=False)
    return len(size) <= len(shape) and all(n in (1, want) for n, want in pairs)


# ---- compiling


class CUDACodeCache:
    """Sources and what nvcc made of them."""

    @classmethod
    def compile(cls, source: str, kind: str, name: str = "kernel") -> tuple[str, str, str]:
        """The output, the key of the source, and where the source is."""
        made = _source(source, name)
        if kind not in nvcc.KINDS:
            raise NotImplementedError(f"nvcc makes {', '.join(nvcc.KINDS)} here, and no {kind!r}")
        output = nvcc.build(made, kind)
        return str(output), made.key, str(nvcc.source_path(made.key))

    @classmethod
    def load(cls, source: str, kind: str, name: str = "kernel") -> tuple[Any, str, str]:
        """The same, loaded."""
        if kind != "so":
            raise RuntimeError(f"only shared libraries are loaded, and no {kind!r}")
        output, key, path = cls.compile(source, kind, name)
        return nvcc.load(nvcc.Path(output), name, ()), key, path


def _source(text: str, name: str) -> NvccSource:
    return NvccSource(
        text, name, (), install.architecture(), install.include_paths(), cutlass_key().decode()
    )


def cuda_standalone_runner_compile_command(source: str, output: str) -> str:
    """What compiles a source that was made with `cuda.generate_test_runner` to a program."""
    made = nvcc.command([source], output, "exe", install.architecture(), install.include_paths())
    return " ".join(made)


@dataclass
class CUDACompileSourceCapturingContext:
    """Gathers the sources that are compiled while it is entered."""

    sources: list[str] = field(default_factory=list[str])

    def __enter__(self) -> CUDACompileSourceCapturingContext:
        nvcc.listeners.append(self.sources)
        return self

    def __exit__(self, *_: object) -> None:
        nvcc.listeners[:] = [x for x in nvcc.listeners if x is not self.sources]


__all__ = [
    "CUDACodeCache",
    "CUDACompileError",
    "CUDACompileSourceCapturingContext",
    "CUDATemplateBuffer",
    "CUDATemplateCaller",
    "CUTLASS2xGemmTemplate",
    "CUTLASS3xGemmTemplate",
    "CUTLASSGemmTemplate",
    "CUTLASSTemplate",
    "CUTLASSTemplateCaller",
    "Cutlass",
    "ExternKernelCaller",
    "Expr",
    "FixedLayout",
    "FlexibleLayout",
    "NoValidChoicesError",
    "cuda_standalone_runner_compile_command",
    "cutlass_key",
    "gen_ops",
    "get_cutlass_operation_serializer",
    "get_max_alignment",
    "try_import_cutlass",
]
