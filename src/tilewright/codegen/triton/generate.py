"""`generate(program, group, target)`: the Triton kernel of one fusion group."""

from __future__ import annotations

from dataclasses import replace

from tilewright import config
from tilewright.codegen.triton.columns import configs_of_columns, holding_columns
from tilewright.codegen.triton.combo import combined
from tilewright.codegen.triton.configs import configs
from tilewright.codegen.triton.counted import counted
from tilewright.codegen.triton.fetch import fetching
from tilewright.codegen.triton.held import holding
from tilewright.codegen.triton.kernel import Kernel
from tilewright.codegen.triton.laid import laid
from tilewright.codegen.triton.leaning import is_better_walked, leaning
from tilewright.codegen.triton.made import TritonKernel
from tilewright.codegen.triton.matrices import matrices
from tilewright.codegen.triton.moved import moved
from tilewright.codegen.triton.online import passes
from tilewright.codegen.triton.packed import with_rest
from tilewright.codegen.triton.parts import in_parts
from tilewright.codegen.triton.rest import resting
from tilewright.codegen.triton.shape import Shape, otherwise, shape_of
from tilewright.codegen.triton.siblings import together
from tilewright.codegen.triton.sliding import sliding
from tilewright.codegen.triton.tiles import in_tiles
from tilewright.codegen.triton.turned import turned
from tilewright.codegen.triton.under_way import under_way
from tilewright.codegen.triton.unmasked import unmasked
from tilewright.codegen.triton.unrolled import unrolled
from tilewright.codegen.triton.vectors import vectors
from tilewright.codegen.triton.walk import walking
from tilewright.codegen.triton.windows import windows
from tilewright.errors import CodegenError
from tilewright.ir.program import Program
from tilewright.schedule.group import Group
from tilewright.target import Target


def limits(program: Program, group: Group, target: Target) -> str:
    """Why a group cannot be one Triton kernel, or an empty string. A single nest always can."""
    shapes = (shape_of(program, part) for part in group.kernels)
    return next((found for found in shapes if isinstance(found, str)), "")


def generate(program: Program, group: Group, target: Target, name: str = "",
             wide: bool = False) -> TritonKernel:  # fmt: skip
    """`name` ends the kernel's name; `wide` asks for 64-bit indices."""
    parts: list[tuple[Group, Shape]] = []
    group = unmasked(program, group)
    for part in group.kernels:
        shape = shape_of(program, part)
        if isinstance(shape, str):
            raise CodegenError(f"no Triton kernel for this group: {shape}")
        shape.again = len(passes(shape.flat(), part.local)) > 1
        parts.append((part, shape))
    if len(parts) > 1:
        return combined(program, parts, target, name, wide)
    shape = in_parts(parts[0][1], target)
    for form in (counted, turned, laid, moved, windows, vectors):
        if (made := form(program, group, shape, target, name, wide)) is not None:
            return made
    if (held := holding_columns(program, group, shape, target)).held:
        among = configs_of_columns(held, target)
        return Kernel(program, group, held, target, wide, among).generate(name)
    if (held := together(program, group, shape, target)).held or (
        held := holding(program, group, shape, target)).held:  # fmt: skip
        return Kernel(program, group, held, target, wide).generate(name)
    if (tiled := in_tiles(program, group, shape)).tiled:
        return Kernel(program, group, tiled, target, wide).generate(name)
    other = otherwise(group, shape)
    measured = config.max_autotune or config.max_autotune_pointwise
    form = resting(leaning(program, group, shape))
    if other is not None:
        other = leaning(program, group, other)
        if not measured and is_better_walked(group, form, other):
            form = other
    if other is None or not measured:
        if (scanned := under_way(program, group, shape, target)).under_way:
            return Kernel(program, group, scanned, target, wide).generate(name)
        if (piece := matrices(program, group, shape, target)).slid:
            return Kernel(program, group, piece, target, wide).generate(name)
        form = unrolled(program, walking(program, group, form, target), target)
        form = sliding(form, target)
        form = fetching(program, group, form, target)
        made = Kernel(program, group, form, target, wide)
        if made.packed is None:
            return made.generate(name)
        plain = Kernel(program, group, replace(shape, odd=True), target, wide, made.configs)
        return with_rest(made, plain, name)
    shape = form
    held, walked = (shape, other) if shape.persistent else (other, shape)
    found = [replace(c, held=int(form.persistent)) for form in (shape, other)
             for c in configs(program, form, target)]  # fmt: skip
    both = [Kernel(program, group, form, target, wide, tuple(found)) for form in (held, walked)]
    return both[0].either(both[1], name)
