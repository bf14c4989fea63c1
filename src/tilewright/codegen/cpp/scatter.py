"""Stores that combine with what is there, or go to gathered places.

Threads split only loops along which no two iterations can meet; all others run in order, so the
result is the same on any number of threads.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from tilewright.codegen.cpp.text import CTYPE, memory_type
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, walk
from tilewright.ir.program import Nest, Store
from tilewright.schedule.nests.hints import hint

if TYPE_CHECKING:
    from tilewright.codegen.cpp.kernel import Kernel

BLOCK = 128  # elements of the innermost loop one thread takes along at a time


def scatters(nest: Nest) -> bool:
    return any(s.mode != "set" or s.mask is not None or any(n.op == "load" for n in _below(s.index))
               for s in nest.stores)  # fmt: skip


def write_scatter(k: Kernel, nest: Nest) -> None:
    """Loops safe to split outside, except the contiguous one, of which each thread has blocks."""
    w = k.w
    safe = [v for v in nest.loops if all(_disjoint(s.index, v) for s in nest.stores)]
    row = next((v for v in safe if all(_stride(s.index, v) == 1 for s in nest.stores)), None)
    split = [v for v in safe if v is not row]
    in_order = [v for v in nest.loops if v not in safe]
    by_row = row is not None and in_order and not split and _goes_by_row(nest, row)
    if row is not None and by_row and k.threads() != "never":
        _by_owner(k, nest, row)
        return
    heads = [k.for_loop(v) for v in split]
    size = "" if row is None else w.index(row.src[0])
    if row is not None:
        heads.append(f"for (int64_t block = 0; block < {size}; block += {BLOCK})")
    with ExitStack() as stack:
        threads = k.threads()
        if heads and threads != "never":
            collapse = f" collapse({len(heads)})" if len(heads) > 1 else ""
            w.line(f"#pragma omp parallel for{collapse} schedule(static){threads}{k.flag_clause()}")
        for head in heads:
            stack.enter_context(w.block(head))
        if row is not None:
            w.line(f"const int64_t last = {size} - block < {BLOCK} ? {size} : block + {BLOCK};")
        for v in in_order:
            stack.enter_context(w.block(k.for_loop(v)))
        if row is not None:
            if _moves_together(nest, row):
                k.hoist([nest], row)  # blocks are not empty
                w.line(f"#pragma omp simd{k.flag_clause()}")
            name = row.arg
            stack.enter_context(w.block(f"for (int64_t {name} = block; {name} < last; ++{name})"))
        for store in nest.stores:
            with ExitStack() as masked:
                _scatter_store(k, store, masked)


def _goes_by_row(nest: Nest, row: Expr) -> bool:
    return len(nest.stores) == 1 and hint(row.src[0]) >= 16 and _moves_together(nest, row)


def _by_owner(k: Kernel, nest: Nest, row: Expr) -> None:
    """Every row of the target belongs to one thread, which takes what goes there, in order."""
    w = k.w
    (store,) = nest.stores
    w.line(f"#pragma omp parallel{k.threads()}{k.flag_clause()}")
    with ExitStack() as stack:
        stack.enter_context(w.block(""))
        w.line("const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();")
        for v in nest.loops:
            if v is not row:
                stack.enter_context(w.block(k.for_loop(v)))
        target = w.index(ix.without(store.index, [row]))
        w.line(f"if (({target}) / ({w.index(row.src[0])}) % all != me) continue;")
        if ix.bounds(row.src[0])[0] >= 1:
            k.hoist([nest], row)  # the place that a row is taken from, and whether there is one
        w.line(f"#pragma omp simd{k.flag_clause()}")
        with w.block(k.for_loop(row)), ExitStack() as masked:
            _scatter_store(k, store, masked)


def _moves_together(nest: Nest, row: Expr) -> bool:
    """Whether a whole row goes to one place: then it vectorises."""
    return all(row not in free_vars(n) for s in nest.stores for n in _below(s.index)
               if n.op == "load") and all(s.mask is None for s in nest.stores)  # fmt: skip


def _scatter_store(k: Kernel, store: Store, stack: ExitStack) -> None:
    w = k.w
    if store.mask is not None:
        stack.enter_context(w.block(f"if ({w.value(store.mask)})"))
    buffer = k.buffers[store.buffer]
    target = k.element(store.buffer, store.index)
    value = w.value(store.value)
    memory = memory_type(buffer.dtype)
    if store.mode == "set":
        w.line(f"{target} = tw::cast<{memory}>({value});")
        return
    wide = "float" if CTYPE[buffer.dtype].startswith("tw::") else CTYPE[buffer.dtype]
    operation = f"tw::{store.mode}(tw::cast<{wide}>({target}), tw::cast<{wide}>({value}))"
    w.line(f"{target} = tw::cast<{memory}>({operation});")


def _below(e: Expr) -> list[Expr]:
    return list(walk(e))


def _disjoint(index: Expr, v: Expr) -> bool:
    """Whether different values of `v` always store to different elements, whatever is gathered,
    also where `v` itself decides what is."""
    step = abs(_stride(index, v))
    if step == 0:
        return False
    reach = ix.mul(step, v.src[0])
    smaller: Expr = ix.ZERO
    for monomial, c in ix.poly(index).items():
        if v in monomial or not monomial:
            continue
        if ix.known_le(reach, abs(c)) and all(a.op in ("index", "var", "load") for a in monomial):
            continue
        if len(monomial) == 1 and monomial[0].op in ("var", "index"):
            extent = monomial[0].src[-1]  # an index is below the size it was checked against
            smaller = ix.add(smaller, ix.mul(abs(c), ix.sub(extent, 1)))
            continue
        return False
    return ix.known_lt(smaller, step) and _aligned(index, v, reach)


def _stride(index: Expr, v: Expr) -> int:
    """How far apart the places of neighbouring `v` are, gathered numbers aside; 0: not known."""
    found = 0
    for monomial, c in ix.poly(index).items():
        if v in monomial:
            if monomial != (v,):
                return 0
            found += c
    return found


def _aligned(index: Expr, v: Expr, reach: Expr) -> bool:
    """Whether all larger strides are multiples of the block that `v` walks."""
    for monomial, c in ix.poly(index).items():
        if v in monomial or not monomial:
            continue
        if ix.known_le(reach, abs(c)) and ix.mod(abs(c), reach) is not ix.ZERO:
            return False
    return True
