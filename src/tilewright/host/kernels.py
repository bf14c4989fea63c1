"""Generated kernels as the host program calls them, and as they are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tilewright.attention import choose as attention
from tilewright.codegen.cpp.kernel import CppKernel
from tilewright.codegen.triton.launch import Param, TritonKernel
from tilewright.gemm.place import Implementation
from tilewright.gemm.provider import Source
from tilewright.host.program import KernelCall
from tilewright.host.spare import Spare
from tilewright.host.text import number
from tilewright.ir import index as ix
from tilewright.ir.expr import syms
from tilewright.ir.program import Buffer, Program
from tilewright.runtime.cxx import ArgKind, CxxSource
from tilewright.runtime.triton_build import FLOATS, FUSED, Sample, TritonConfig, TritonSource
from tilewright.schedule.fusion.group import Group
from tilewright.target import Target


def cpp(program: Program, kernel: CppKernel, name: str) -> tuple[KernelCall, CxxSource]:
    kinds: list[ArgKind] = [p.kind for p in kernel.params]
    if kernel.checked:
        kinds.append("ptr")
    args = tuple(
        ("address", f"{p.name}.data_ptr() + {p.start * program.buffers[p.name].dtype.itemsize}")
        if p.start else (p.kind, p.name)
        for p in kernel.params
    )  # fmt: skip
    return KernelCall(name, args, kernel.checked), CxxSource(kernel.text, kernel.name, tuple(kinds))


def triton(program: Program, kernel: TritonKernel, wide: TritonKernel | None, name: str,
           device: torch.device) -> tuple[KernelCall, TritonSource]:  # fmt: skip
    """`wide` is the kernel with 64-bit indices, where the other may be too narrow."""
    args = tuple((p.kind, p.name) for p in kernel.params)
    index = device.index or 0
    source = _source(program, kernel, Target.of(device), index)
    if wide is not None:
        source = replace(source, wide=_source(program, wide, Target.of(device), index))
    return KernelCall(name, args, kernel.checked, index, kernel.assume,
                      workspace=ix.as_index(kernel.workspace),
                      counters=ix.as_index(kernel.counters)), source  # fmt: skip


def chosen(program: Program, made: Implementation | attention.Implementation,
           number: int) -> tuple[KernelCall, Source]:  # fmt: skip
    """The kernel that was chosen for a product, or for attention."""
    kernel, source = made.kernel, made.kernel.source
    name = f"{kernel.name}_{number}".replace(".", "_")
    device = program.buffers[made.result].device
    if isinstance(source, TritonSource):
        return KernelCall(name, made.arguments, kernel.checked, device.index or 0, kernel.assume,
                          workspace=kernel.workspace, counters=kernel.counters), source  # fmt: skip
    plain = not isinstance(source, CxxSource)
    return KernelCall(name, made.arguments, kernel.checked, plain=plain), source


def spare(program: Program, group: Group, name: str) -> tuple[KernelCall, Spare]:
    """Torch's own operations in place of a kernel."""
    made = Spare.of(program, group)
    args = tuple(("ptr" if n in program.buffers else "int", n) for n in made.names)
    return KernelCall(name, args, checked=False, plain=True), made


def _source(program: Program, kernel: TritonKernel, target: Target, device: int) -> TritonSource:
    major, minor = target.capability
    own = {"workspace": (torch.float32, kernel.workspace),
           "counters": (torch.int32, kernel.counters)}  # fmt: skip
    sample = [own[p.name] if p.name in own else _sample(program, p) for p in kernel.params]
    grid, *beside = (tuple((number(extent), block) for extent, block in grid)
                     for grid in (kernel.grid, *kernel.beside))  # fmt: skip
    extents = [extent for grid in (kernel.grid, *kernel.beside) for extent, _ in grid]
    at_once = kernel.counters and not kernel.ticketed
    return TritonSource(
        kernel.text,
        kernel.name,
        kernel.arguments,
        tuple(
            TritonConfig(c.constants, c.num_warps, c.num_stages, c.registers)
            for c in kernel.configs
        ),
        capability=10 * major + minor,
        shared_memory=target.shared_memory,
        aligned=frozenset(p.argument for p in kernel.params if _is_aligned(p)),
        grid=grid,
        beside=tuple(beside),
        sample=(*sample, *([(torch.int64, 1)] if kernel.checked else [])),
        sizes=tuple(sorted((s.arg.name, ix.likely(s)) for s in syms(*extents))),
        device=device,
        shrinks=not kernel.counters,
        options=(
            *(FUSED if kernel.joins else FLOATS),
            *((("launch_pdl", True),) if kernel.early else ()),
            *((("launch_cooperative_grid", True),) if at_once else ()),
        ),
    )


def _is_aligned(p: Param) -> bool:
    """Whether an argument is likely a multiple of 16: memory is, unless a view starts inside."""
    if p.kind == "ptr":
        return p.multiple == 16
    return p.kind == "int" and p.hint is not None and p.hint % 16 == 0


def _sample(program: Program, p: Param) -> Sample | int | float:
    if p.kind == "ptr":
        buffer = program.buffers[p.name]
        return Sample(buffer.dtype, _elements(buffer), p.high, p.meets)
    return 1.0 if p.kind == "float" else (16 if p.hint is None else p.hint)


def _elements(buffer: Buffer) -> int:
    """Likely elements from the first to the last in memory."""
    last = [(ix.likely(n) - 1) * ix.likely(s) for n, s in zip(buffer.size, buffer.stride,
                                                               strict=True)]  # fmt: skip
    return max(1, 1 + sum(last))


def spares(program: Program, groups: Sequence[Group],
           made: Sequence[tuple[KernelCall, object] | None]
           ) -> dict[str, tuple[Spare | attention.Resort, tuple[int, ...]]]:  # fmt: skip
    """For each Triton kernel its last resort, and which of its arguments that takes."""
    found: dict[str, tuple[Spare | attention.Resort, tuple[int, ...]]] = {}
    for group, item in zip(groups, made, strict=True):
        if item is None or not isinstance(item[1], TritonSource):
            continue
        chosen: object = None if group.call is None else group.call.target
        if isinstance(chosen, attention.Implementation):
            given = chosen.kernel.arguments
            found[item[0].name] = chosen.resort, tuple(range(len(given)))
            continue
        if isinstance(chosen, Implementation):
            resort = Spare.product(chosen.problem)
            given = [name for _, name in chosen.kernel.arguments]
        else:
            resort = Spare.of(program, group)
            given = [name for _, name in item[0].args]
        if set(resort.names) <= set(given):
            found[item[0].name] = resort, tuple(given.index(n) for n in resort.names)
    return found
