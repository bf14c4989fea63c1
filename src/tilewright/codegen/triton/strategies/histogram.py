"""Counts of few places, to which the same number is added again and again, as in a histogram.

As atomic additions all wait for each other. Here each program counts those of its own elements in
shared memory, block by block, and adds what it has found once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.analysis.index_width import span
from tilewright.codegen.triton.launch import TritonKernel
from tilewright.codegen.triton.plan.config import Config, clamp, power
from tilewright.codegen.triton.plan.plan import KernelPlan
from tilewright.codegen.triton.plan.tiling import Axis, Shape
from tilewright.codegen.triton.tile.kernel import Kernel
from tilewright.codegen.triton.tile.ops import TYPE
from tilewright.ir import index as ix
from tilewright.ir.counts import is_count
from tilewright.ir.expr import Expr
from tilewright.ir.program import Buffer, Program
from tilewright.schedule.fusion.group import Group
from tilewright.target import Target

EACH = "EACH"  # elements of a program


def histogram(facts: KernelFacts) -> KernelPlan | str:
    """The kernel of such a group (H200: 33554432 floats in 256 bins 145 us by
    4096, 158 us by 1024; 239 us as additions to 1024 copies, 345 us to copies side by side)."""
    program, group, shape, target = facts.program, facts.group, facts.shape, facts.target
    if reason := facts.not_pointwise:
        return reason
    if group.row_programs or len(shape.members) != 1 or len(shape.members[0].stores) != 1:
        return "more than one tensor is written"
    ((store,),) = (m.stores for m in shape.members)
    buffer, axis = program.buffers[store.buffer], Axis("x", shape.members[0].loops, 0)
    if store.buffer in shape.members[0].reads or not is_count(
        store, axis.loops, _places(buffer), buffer.dtype):  # fmt: skip
        return "it does not add one number to few places again and again"
    (segment, _), *_ = shape.segments
    form = Shape((axis,), ((segment, None),), 1, members=shape.members)
    configs = _configs(axis, target)
    return KernelPlan.of(_Counted(program, group, form, target, facts.wide, configs))


def _places(buffer: Buffer) -> Expr:
    return span(buffer.size, buffer.stride)


def _configs(axis: Axis, target: Target) -> tuple[Config, ...]:
    sms = max(target.sms, 1)
    most = clamp(
        rules.LEAST_HISTOGRAM_BLOCK.limit,
        power(axis.likely / sms) // 2,
        rules.HISTOGRAM_BLOCK.limit,
    )
    found: dict[Config, None] = {}
    for block in (most, most // 2):
        rounds = -(-axis.likely // (rules.HISTOGRAM_PROGRAMS.limit * sms * block))
        found[
            Config(((axis.block, block), (EACH, rounds * block)), rules.HISTOGRAM_WARPS.limit)
        ] = None
    return tuple(found)


class _Counted(Kernel):
    def __init__(self, program: Program, group: Group, shape: Shape, target: Target, wide: bool,
                 among: tuple[Config, ...]) -> None:  # fmt: skip
        super().__init__(program, group, shape, target, wide, among)
        self.interleaved.read, self.interleaved.written = {}, {}
        (x,) = self.shape.parallel
        whole = x.size and all(x.size % c.kwargs[EACH] == 0 for c in among)
        self.w.masked = set() if whole else {x}

    def whole(self, name: str, lines: Sequence[str]) -> TritonKernel:
        (x,) = self.shape.parallel
        return replace(super().whole(name, lines), grid=((x.extent, EACH),))

    def body(self) -> None:
        w, (x,) = self.w, self.shape.parallel
        ((store,),) = (m.stores for m in self.shape.members)
        buffer = self.buffers[store.buffer]
        places = ix.value_of(_places(buffer)) or 0
        bins = max(power(places), 2)
        w.begin(self.first, self.early)
        w.line(f"tl.static_assert({EACH} % {x.block} == 0)")
        w.line(f"xlast = tl.minimum(pid * {EACH} + {EACH}, {w.index(x.extent)})")
        w.line(f"found = tl.full([{bins}], 0, tl.int32)")
        with w.block(f"for xfirst in range(pid * {EACH}, xlast, {x.block})"):
            w.line(f"xbase = xfirst + {self.lanes(x)}")
            w.know(x.var, "xbase")
            if x in w.masked:
                w.line("xmask = xbase < xlast")
            points = frozenset((x,))
            place = w.spread(w.index(store.index), w.support(store.index), points)
            mask = w.mask(points, *([] if store.mask is None else [w.operand(store.mask)]))
            masked = f", mask=tl.broadcast_to({mask}, [{x.block}])" if mask else ""
            place = f"({place}).to(tl.int32)"
            w.line(f"found += tl.histogram({place}, {bins}{masked})")
        lanes, dtype = f"tl.arange(0, {bins})", TYPE[buffer.dtype]
        some = f", mask={lanes} < {places}" if places < bins else ""
        value = f"found.to({dtype}) * {self.value(store)}"
        w.line(f'tl.atomic_add({self.pointer(store.buffer)} + {lanes}, {value}{some}, '
               f'sem="relaxed")')  # fmt: skip
