"""`generate(program, group, target)`: the Triton kernel of one fusion group.

`planned(...)` asks the strategies in order, and the first that suits a group makes its plan; the
others before it say why they do not. `generate` writes what was planned. A new strategy is a
function of `KernelFacts` that gives a plan or a reason, and a line in `STRATEGIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tilewright import config
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.combo import combined
from tilewright.codegen.triton.launch import TritonKernel
from tilewright.codegen.triton.plan.config import Config
from tilewright.codegen.triton.plan.configs import configs
from tilewright.codegen.triton.plan.plan import Declined, KernelPlan
from tilewright.codegen.triton.plan.tiling import Shape, other_residency, shape_of
from tilewright.codegen.triton.rewrite.unmask_loads import unmask_loads
from tilewright.codegen.triton.strategies.aos_store import aos_store
from tilewright.codegen.triton.strategies.chunked import chunked_rows
from tilewright.codegen.triton.strategies.cooperative_rows import cooperative_rows
from tilewright.codegen.triton.strategies.histogram import histogram
from tilewright.codegen.triton.strategies.misaligned_columns import misaligned_columns
from tilewright.codegen.triton.strategies.misaligned_rows import is_better_walked, misaligned_rows
from tilewright.codegen.triton.strategies.packed_rows import with_rest
from tilewright.codegen.triton.strategies.prefetched_rows import prefetched_rows
from tilewright.codegen.triton.strategies.preloaded_scan import preloaded_scan
from tilewright.codegen.triton.strategies.remainder import remainder
from tilewright.codegen.triton.strategies.resident_columns import (
    configs_of_columns,
    resident_columns,
)
from tilewright.codegen.triton.strategies.scan import block_scan
from tilewright.codegen.triton.strategies.shifted_copy import shifted_copy
from tilewright.codegen.triton.strategies.short_rows import short_rows
from tilewright.codegen.triton.strategies.small_matrices import small_matrices
from tilewright.codegen.triton.strategies.split_reduction import split_reduction
from tilewright.codegen.triton.strategies.stencil import stencil
from tilewright.codegen.triton.strategies.transpose import transpose
from tilewright.codegen.triton.strategies.transpose_few_rows import transpose_few_rows
from tilewright.codegen.triton.strategies.unrolled_columns import unrolled_columns
from tilewright.codegen.triton.tile.kernel import Kernel
from tilewright.codegen.triton.tile.online_softmax import passes
from tilewright.errors import CodegenError
from tilewright.ir.program import Program
from tilewright.schedule.fusion.group import Group
from tilewright.target import Target


@dataclass(frozen=True)
class Strategy:
    """One way to write kernels: `plan` is how it writes this one, or why it does not."""

    name: str
    plan: Callable[[KernelFacts], KernelPlan | str]


@dataclass(frozen=True)
class Refinement:
    """A change of a plan's modes that may come on top of others, or why it does not suit."""

    name: str
    refine: Callable[[KernelFacts], Shape | str]


def limits(program: Program, group: Group, target: Target) -> str:
    """Why a group cannot be one Triton kernel, or an empty string. A single nest always can."""
    shapes = (shape_of(program, part) for part in group.kernels)
    return next((found for found in shapes if isinstance(found, str)), "")


def generate(program: Program, group: Group, target: Target, name: str = "",
             wide: bool = False) -> TritonKernel:  # fmt: skip
    """`name` ends the kernel's name; `wide` asks for 64-bit indices."""
    return planned(program, group, target, wide).write(name)


def planned(program: Program, group: Group, target: Target, wide: bool = False) -> KernelPlan:
    """How the kernel of a group will be written."""
    group = unmask_loads(program, group)
    parts = [(part, _axes(program, part)) for part in group.kernels]
    if len(parts) > 1:
        own = [Kernel(program, part, shape, target, wide) for part, shape in parts]
        largest = max(own, key=lambda kernel: kernel.work)
        emit = partial(combined, program, parts, own, wide=wide)
        name = f"combo of {len(parts)} kernels (below: the largest of them)"
        return KernelPlan(largest.shape, largest.configs, emit, name)
    facts = KernelFacts(program, group, parts[0][1], target, wide)
    facts, declined = _refined(facts, (SPLIT,))
    for strategy in STRATEGIES:
        found = strategy.plan(facts)
        if isinstance(found, KernelPlan):
            return replace(found, strategy=found.strategy or strategy.name,
                           declined=(*declined, *found.declined))  # fmt: skip
        declined.append(Declined(strategy.name, found))
    raise AssertionError("the last strategy suits every group")


def _axes(program: Program, part: Group) -> Shape:
    shape = shape_of(program, part)
    if isinstance(shape, str):
        raise CodegenError(f"no Triton kernel for this group: {shape}")
    return replace(shape, reread=len(passes(shape.flat(), part.local)) > 1)


def _refined(facts: KernelFacts, refinements: tuple[Refinement, ...]
             ) -> tuple[KernelFacts, list[Declined]]:  # fmt: skip
    declined: list[Declined] = []
    for refinement in refinements:
        found = refinement.refine(facts)
        if isinstance(found, Shape):
            facts = replace(facts, shape=found)
        else:
            declined.append(Declined(refinement.name, found))
    return facts, declined


def _kernel(facts: KernelFacts, among: tuple[Config, ...] = ()) -> Kernel:
    return Kernel(facts.program, facts.group, facts.shape, facts.target, facts.wide, among)


# ---- strategies that change the tile alone


def _of(plan: Callable[[KernelFacts], Shape | str]) -> Callable[[KernelFacts], KernelPlan | str]:
    """The strategy of a tile that the general kernel can write."""

    def planned(facts: KernelFacts) -> KernelPlan | str:
        shape = plan(facts)
        return shape if isinstance(shape, str) else KernelPlan.of(
            _kernel(replace(facts, shape=shape)))  # fmt: skip

    return planned


def _columns(facts: KernelFacts) -> KernelPlan | str:
    shape = resident_columns(facts)
    if isinstance(shape, str):
        return shape
    among = configs_of_columns(shape, facts.target)
    return KernelPlan.of(_kernel(replace(facts, shape=shape), among))


def _is_measured() -> bool:
    return config.max_autotune or config.max_autotune_pointwise


def _either(facts: KernelFacts) -> KernelPlan | str:
    """Rows in registers and rows block by block as one text, for the tuner to choose."""
    if not _is_measured():
        return "kernels are not measured (max_autotune_pointwise)"
    other = other_residency(facts.group, facts.shape)
    if isinstance(other, str):
        return other
    form, other = _general(facts), misaligned_rows(facts.program, facts.group, other)
    held, walked = (form, other) if form.persistent else (other, form)
    found = tuple(replace(c, persistent=int(shape.persistent)) for shape in (form, other)
                  for c in configs(facts.program, shape, facts.target))  # fmt: skip
    both = [_kernel(replace(facts, shape=shape), found) for shape in (held, walked)]
    return KernelPlan(form, found, partial(both[0].either, both[1]))


def _general(facts: KernelFacts) -> Shape:
    """The tile, its rows moved as suits where they begin, in one block or two."""
    shape = misaligned_rows(facts.program, facts.group, facts.shape)
    found = remainder(replace(facts, shape=shape))
    return shape if isinstance(found, str) else found


def _residency(facts: KernelFacts) -> Shape | str:
    """Rows block by block that would fit in registers, where that is better."""
    other = other_residency(facts.group, facts.shape)
    if isinstance(other, str):
        return other
    form, other = _general(facts), misaligned_rows(facts.program, facts.group, other)
    return other if is_better_walked(facts.group, form, other) else "rows are as fast in registers"


def _tile(facts: KernelFacts) -> KernelPlan:
    """The tile as it is: pointwise, rows or columns in one block, or block by block."""
    form, declined = _residency(facts), list[Declined]()
    if isinstance(form, str):
        form, declined = _general(facts), [Declined("looped instead of persistent", form)]
    refined, others = _refined(replace(facts, shape=form), REFINEMENTS)
    made = _kernel(refined)
    plan = KernelPlan.of(made)
    if made.packed is not None:
        rest = _kernel(replace(facts, shape=replace(facts.shape, misaligned=True)), made.configs)
        plan = replace(plan, emit=partial(with_rest, made, rest))
    return replace(plan, strategy=_named(refined.shape), declined=(*declined, *others))


def _named(shape: Shape) -> str:
    if not shape.inner:
        return "pointwise"
    what = "columns" if shape.across else "rows"
    return f"{'persistent' if shape.persistent else 'looped'} {what}"


SPLIT = Refinement("split rows, the last program finishes", split_reduction)
STRATEGIES = (
    Strategy("histogram in shared memory", histogram),
    Strategy("transpose of misaligned rows", transpose),
    Strategy("transpose of few rows", transpose_few_rows),
    Strategy("shifted copy", shifted_copy),
    Strategy("stencil, several points a thread", stencil),
    Strategy("array-of-structs stores", aos_store),
    Strategy("resident columns", _columns),
    Strategy("resident rows of several programs", _of(cooperative_rows)),
    Strategy("resident rows in chunks", _of(chunked_rows)),
    Strategy("several short rows a warp", _of(short_rows)),
    Strategy("persistent or looped, as measured", _either),
    Strategy("scan of preloaded chunks", _of(preloaded_scan)),
    Strategy("columns of small misaligned matrices", _of(small_matrices)),
    Strategy("tile", _tile),
)
"""In the order in which they are asked."""
REFINEMENTS = (
    Refinement("scans block by block", block_scan),
    Refinement("unrolled columns", unrolled_columns),
    Refinement("misaligned columns through shared memory", misaligned_columns),
    Refinement("prefetched rows", prefetched_rows),
)
"""Of the general tile, in the order in which they come on top of each other."""
