"""What is computed of the elements of a kernel, where that decides how many a thread has."""

from __future__ import annotations

from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.ir.expr import Expr, free_vars, walk
from tilewright.ir.ops import TABLE


def has_long_code(shape: Shape) -> bool:
    """Whether a function is among the operations that has a branch for large numbers: small blocks
    wait less for each other, and have registers enough (H200: sines and cosines of 65536x256 floats
    36.9 us by 1024, 41.9 us by 4096)."""
    return bool(shape.ops & {"sin", "cos", "tan"})


def reduces_often(shape: Shape) -> bool:
    """Whether a row is reduced so often that few threads of many elements have less to do: all
    of them meet for each reduction (H200: four reductions of 16384 rows of 4096 bfloat16 38 us
    by four warps, 44 us by eight; of 65536 of 1024 34 us by two rows of a warp, 51 us by two of
    four; two reductions 32 us either way)."""
    folded = {n for n in shape.nodes if n.op == "reduce"}
    return len(folded) > 2


def nests_functions(shape: Shape) -> bool:
    """Whether elements take a function of a function: more threads wait less for each other (H200:
    binary cross entropy of 16384x4096 bfloat16 68.5 us, 72.8 us by sixteen warps)."""
    nodes = set(shape.nodes)
    return any(n.op in TABLE and n.src and n.src[0].op in TABLE and n.dtype.is_floating_point
               and min(TABLE[n.op].cost, TABLE[n.src[0].op].cost) >= 20 for n in nodes)  # fmt: skip


def functions_of_each(shape: Shape) -> int:
    """How many expensive functions each element of a row takes: where several, two rows have few
    threads (H200: softmax of 1024 capped bfloat16 134 us, 138 us by four warps; gumbel softmax
    of 512 floats 96 us, 103 us by four rows of four warps)."""
    return sum(n.op in TABLE and TABLE[n.op].cost >= 20 and n.dtype.is_floating_point
               for n in along(shape))  # fmt: skip


def along(shape: Shape) -> list[Expr]:
    """What is computed for each element of a row, and not once of what is reduced of it."""
    own = shape.row_loops
    found: dict[Expr, None] = dict.fromkeys(own)
    for n in walk(*(e for m in shape.members for e in m.exprs)):
        if n.op == "load":
            moves = bool(own & free_vars(n.src[0]))
        else:
            moves = n.op not in ("reduce", "scan") and any(s in found for s in n.src)
        if moves:
            found[n] = None
    return list(found)


def is_heavy(shape: Shape) -> bool:
    """Whether a special function is among the operations: long code, so few elements a thread."""
    return any(n.op in TABLE and TABLE[n.op].cost >= 60 and n.dtype.is_floating_point
               for n in shape.nodes)  # fmt: skip
