"""How a kernel's tile touches memory: widths, rows that are gathered, what runs along rows."""

from __future__ import annotations

from tilewright.codegen.triton.analysis.operations import is_gathered
from tilewright.codegen.triton.plan.config import clamp
from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars
from tilewright.ir.program import Program, StoreMode


def vector_of(program: Program, shape: Shape) -> int:
    """Elements in sixteen bytes of the narrowest buffer the kernel walks."""
    return clamp(4, 16 // min(sizes(program, shape), default=4), 8)


def sizes(program: Program, shape: Shape) -> list[int]:
    """The sizes of all that the kernel reads and writes."""
    return [program.buffers[b].dtype.itemsize for m in shape.members for b in m.reads | m.writes]


def floats_of(program: Program, shape: Shape) -> list[int]:
    """The sizes of the numbers that the kernel reads and writes, which are computed as no less than
    sixteen bits."""
    kinds = {program.buffers[b].dtype for m in shape.members for b in m.reads | m.writes}
    return [max(2, kind.itemsize) for kind in kinds if kind.is_floating_point]


def reads_rows(shape: Shape) -> bool:
    """Whether rows are read that are gathered."""
    x = shape.parallel[-1]
    flat = shape.flat()
    return any(
        ix.coefficient(n.src[0], x.var) is ix.ONE and is_gathered(n.src[0]) for n in flat.loads
    )


def writes_rows(shape: Shape, mode: StoreMode) -> bool:
    """Whether rows are stored so at places that are gathered."""
    x = shape.parallel[-1]
    return any(s.mode == mode and is_gathered(s.index)
               and ix.coefficient(s.index, x.var) is ix.ONE
               for s in shape.flat().stores)  # fmt: skip


def reduces_pairs_of_rows(shape: Shape) -> bool:
    """Whether rows are reduced with others, all of which come again with others, be it that they
    are gathered in one table: they come from the cache, and what threads do to meet is seen."""
    own = shape.row_loops
    outer = {v for a in shape.parallel for v in a.loops}
    rows = {n for n in shape.loads if own & free_vars(n.src[0])}
    found = {n.arg for n in rows if is_gathered(n.src[0])}
    looked_up = [n for n in rows if n.arg in found]
    again = len(looked_up) > len(found) or not found
    stored = any(own & free_vars(s.index) for s in shape.stores)
    return not stored and again and len(rows) > 1 and all(
        n in looked_up or outer - free_vars(n.src[0]) for n in rows)  # fmt: skip


def own_rows(shape: Shape) -> set[Expr]:
    """What is loaded along rows that are other ones for each program, and not made by the kernel:
    where a program keeps all of it, it has to have registers (H200: mixtures of ten 52 us, 103 us;
    norms and differences of two of 512 bfloat16 35 us, 46 us)."""
    own = shape.row_loops
    return {n for n in shape.loads if n.arg not in shape.written
            and own & free_vars(n.src[0]) and free_vars(n.src[0]) - own}  # fmt: skip


def stores_rows(shape: Shape) -> bool:
    """Whether something is stored along rows."""
    return any(shape.row_loops & free_vars(s.index) for s in shape.stores)


def read_along(shape: Shape) -> set[str]:
    """What is loaded along rows or columns."""
    inner = shape.row_loops
    return {n.arg for n in shape.loads if inner & free_vars(n)}


def given_along(shape: Shape) -> set[str]:
    """What is loaded so, and not made by the kernel itself."""
    return read_along(shape).difference(*(m.writes for m in shape.members))
