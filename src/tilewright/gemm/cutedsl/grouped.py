"""Grouped products: rows of one matrix in groups, each with a matrix of its own (`_grouped_mm`).

Where the groups begin is in the card's memory, and is read by the kernel: other offsets, or another
number of rows in a group, are no other kernel. An empty group has no tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from tilewright import config
from tilewright.gemm.cutedsl import call, quack, toolchain
from tilewright.gemm.cutedsl.build import Number, Pointer, Request
from tilewright.gemm.cutedsl.entry import Rendered
from tilewright.gemm.cutedsl.epilogue import steps
from tilewright.gemm.cutedsl.kernel import IMPORTS, Fused
from tilewright.gemm.cutedsl.quack import Config
from tilewright.gemm.cutedsl.template import Layout
from tilewright.gemm.cutedsl.types import named
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, syms
from tilewright.ir.program import View
from tilewright.ir.show import number
from tilewright.lower.context import Lowering
from tilewright.lower.wrappers import FUNCTIONS
from tilewright.runtime import store
from tilewright.target import Target

MOST_GROUPS = 1024  # the threads of the block that writes where groups begin
BASELINE = Config(128, 256, 2, 1, False)
DEFAULTS: tuple[Config, ...] = (
    BASELINE, Config(128, 128, 1, 1, True), Config(128, 192, 1, 1, True),
    Config(64, 256, 1, 1, True), Config(64, 128, 1, 1, True), Config(128, 128, 2, 1, True),
    Config(256, 128, 1, 1, False), Config(128, 256, 1, 1, False),
)  # fmt: skip
EXHAUSTIVE: tuple[Config, ...] = tuple(dict.fromkeys((*DEFAULTS, *quack.CONFIGS)))
BLACKWELL: tuple[Config, ...] = tuple(dict.fromkeys((Config(128, 256, 1, 1), *quack.BLACKWELL)))


def limits(views: Sequence[View], layout: Layout, **numbers: Any) -> str:
    """Why no choice is offered, or an empty string."""
    reason = _unasked() or toolchain.why_not() or quack.why_not()
    if reason:
        return reason
    if numbers:
        return f"it has {', '.join(sorted(numbers))}"
    if _target(layout).arch not in quack.GENERATIONS:
        return "the kernels are Hopper's and Blackwell's"
    if len(views) != 3 or [len(v.size) for v in views] != [2, 3, 1]:
        return "it is not rows of one matrix, a matrix for each group, and offsets"
    a, b, offsets = views
    if {a.dtype, b.dtype, layout.buffer.dtype} != {torch.bfloat16} or offsets.dtype != torch.int32:
        return "only bfloat16 is multiplied, with offsets of 32 bits"
    count = ix.value_of(offsets.size[0])
    if count is None or not 0 < count <= MOST_GROUPS or offsets.stride[0] is not ix.ONE:
        return f"the number of groups is not between 1 and {MOST_GROUPS}"
    if any(ix.value_of(n) is None for n in (*b.size, a.size[1])):
        return "a size other than the number of rows is known only at run time"
    windows = [a, b, layout.view]
    if any(ix.ONE not in v.stride[-2:] for v in windows):
        return "a matrix is contiguous in neither direction"
    if any(ix.mod(e, whole) is not ix.ZERO for e, whole in steps(windows)):
        return "rows do not start at multiples of 16 bytes"
    return ""


def _unasked() -> str:
    if not (config.max_autotune or config.max_autotune_gemm):
        return "nothing is measured without max_autotune or max_autotune_gemm"
    backends = {b.strip().upper() for b in config.max_autotune_gemm_backends.split(",")}
    return "" if "CUTEDSL" in backends else "CUTEDSL is not in max_autotune_gemm_backends"


def _target(layout: Layout) -> Target:
    """The card the result is for; where none can be asked and none is named, Hopper."""
    device = layout.buffer.device
    known = config.cuda.arch is not None or torch.cuda.is_available()
    return Target.of(device) if known and device.type == "cuda" else Target("sm_90")


def configurations(target: Target) -> tuple[Config, ...]:
    first, few, every = BASELINE, DEFAULTS, EXHAUSTIVE
    if target.arch != "sm_90":
        first, few, every = BLACKWELL[0], BLACKWELL, BLACKWELL
    if not config.cutedsl_enable_autotuning:
        return (first,)
    return every if config.max_autotune_gemm_search_space.upper() == "EXHAUSTIVE" else few


def choices(found: list[Any], views: Sequence[View], layout: Layout, **numbers: Any) -> None:
    if limits(views, layout, **numbers):
        return
    for k, chosen in enumerate(configurations(_target(layout))):
        found.append(GroupedCaller(f"cutedsl_grouped_mm_{k}", chosen, tuple(views), layout))


def offsets(rows: int, groups: int, itemsize: int = 2) -> tuple[int, ...]:
    """Where groups end while they are timed: evenly, at whole pieces of 16 bytes, the last at the
    end. Anything else would read beyond memory, or leave nothing to do."""
    whole = 16 // itemsize
    ends = [round(rows * (k + 1) / groups / whole) * whole for k in range(groups - 1)]
    return (*(min(e, rows) for e in ends), rows)


@dataclass(frozen=True)
class _Template:
    name: str = "grouped_mm"
    reads_once: bool = False


@dataclass(frozen=True)
class GroupedCaller:
    """A choice as `CuteDSLTemplateCaller` is one."""

    name: str
    config: Config
    input_nodes: tuple[View, ...]
    layout: Layout
    mutated: tuple[str, ...] = ()
    template: _Template = _Template()
    hooked: tuple[bool, frozenset[int]] = (False, frozenset())
    withheld: str = ""

    @property
    def description(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in sorted(self.config.described.items()))

    def info_dict(self) -> dict[str, Any]:
        return {"name": self.name, "backend": "CuteDSL", "template": "grouped_mm",
                **self.config.described}  # fmt: skip

    def hash_key(self) -> str:
        return store.key("grouped", quack.version(), toolchain.version(), self.rendered().text)

    def with_fused(self, fused: Fused, input_nodes: Sequence[View], layout: Layout, name: str
                   ) -> GroupedCaller:  # fmt: skip
        return replace(self, input_nodes=tuple(input_nodes), layout=layout, name=name)

    def contents(self) -> dict[int, tuple[int, ...]]:
        """What integers the inputs have while they are timed, by their place."""
        rows, groups = self.input_nodes[0].size[0], self.input_nodes[2].size[0]
        return {2: offsets(ix.likely(rows), ix.likely(groups))}

    def request(self, target: Target) -> Request:
        made = self.rendered(target)
        return Request(made.text, made.entry, tuple(kind for _, kind in made.params),
                       toolchain.architecture(target))  # fmt: skip

    def rendered(self, target: Target | None = None) -> Rendered:
        a, b, offs = self.input_nodes
        out = self.layout.view
        names = list(dict.fromkeys(v.buffer for v in (a, b, offs, out)))
        dtypes = {v.buffer: v.dtype for v in (a, b, offs, out)}
        exprs = [e for v in (a, b, offs, out) for e in (*v.size, *v.stride, v.offset)]
        symbols = sorted({s.arg.name for s in syms(*exprs)})
        groups = ix.value_of(offs.size[0])
        assert groups is not None
        target = target or _target(self.layout)
        generation, sms = quack.GENERATIONS[target.arch], target.sms
        # Blackwell's kernel has no ping-pong: sums are not in registers
        manner = f"pingpong={self.config.pingpong}, is_persistent=True, " if generation == 9 else ""
        text = _TEXT.format(
            imports=IMPORTS,
            params=", ".join((*(f"p_{n}: cute.Pointer" for n in names),
                              *(f"{s}: cutlass.Int32" for s in symbols),
                              "p_scratch: cute.Pointer", "stream: cuda.CUstream")),
            a=_tensor(a), b=_tensor(quack.turned(b)), offs=_tensor(offs), out=_tensor(out),
            groups=groups, threads=-(-groups // 32) * 32, dtype=named(a.dtype),
            m=self.config.m, n=self.config.n, cm=self.config.cluster_m, cn=self.config.cluster_n,
            manner=manner, generation=generation,
            clusters=max(1, sms // (self.config.cluster_m * self.config.cluster_n)),
        )  # fmt: skip
        params: list[Any] = [(("ptr", n), Pointer(dtypes[n])) for n in names]
        params += [(("int", s), Number()) for s in symbols]
        params.append((("scratch", str(4 * (groups + 1))), Pointer(torch.int32)))
        return Rendered(text, "grouped", tuple(params))


def _tensor(view: View) -> str:
    start = f"p_{view.buffer}"
    if view.offset is not ix.ZERO:
        start += f" + {number(view.offset)}"
    # Groups are windows that begin anywhere: the DSL lays them out of numbers of the call alone.
    size = "".join(f"cutlass.Int32({number(e)}), " for e in view.size)
    stride = "".join(f"{_step(e, view)}, " for e in view.stride)
    return f"cute.make_tensor({start}, cute.make_layout(({size}), stride=({stride})))"


def _step(e: Expr, view: View) -> str:
    if ix.value_of(e) in (0, 1):
        return number(e)
    return f"cute.assume(cutlass.Int64({number(e)}), divby={16 // view.dtype.itemsize})"


_TEXT = """\
{imports}
from quack.epilogue.frontend import EpiMod
from quack.rounding import RoundingMode
from quack.tile_scheduler import TileSchedulerOptions
from quack.varlen_utils import VarlenArguments

def epilogue(acc):
    return {{"D": acc}}

MOD = EpiMod(epilogue)
KERNEL = MOD._mint((), {generation}, False, False, (), RoundingMode.RN, (), False)

@cute.kernel
def begin(ends: cute.Tensor, starts: cute.Tensor):
    k = cute.arch.thread_idx()[0]
    if k == 0:
        starts[0] = cutlass.Int32(0)
    if k < {groups}:
        starts[k + 1] = ends[k]

@cute.jit
def grouped({params}):
    a = {a}
    b = {b}
    ends = {offs}
    out = {out}
    starts = cute.make_tensor(p_scratch, cute.make_layout(({groups} + 1,), stride=(1,)))
    begin(ends, starts).launch(grid=(1, 1, 1), block=({threads}, 1, 1), stream=stream)
    gemm = KERNEL(cutlass.Float32, {dtype}, ({m}, {n}), ({cm}, {cn}, 1), {manner}use_pdl=False)
    gemm(a, b, out, None, KERNEL.EpilogueArguments(),
         TileSchedulerOptions(cutlass.Int32({clusters}), max_swizzle_size=cutlass.Int32(8)),
         VarlenArguments(mCuSeqlensM=starts), stream)
"""


def lowered(ctx: Lowering, node: Node) -> Any:
    """Where it is asked for; otherwise the call is nobody's here."""
    return NotImplemented if _unasked() else call.lowered(choices, ctx, node, also_operator=True)


if hasattr(torch.ops.aten, "_grouped_mm"):
    FUNCTIONS[torch.ops.aten._grouped_mm.default] = lowered
