"""The executable specification of a `Program`.

`verify` is cheap enough to run always. What needs arithmetic on indices, or looks at every pair of
accesses, runs with `config.verify_ir`, as all tests do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright import config
from tilewright.errors import VerifyError
from tilewright.ir import index as ix
from tilewright.ir.expr import INDEX, Expr, free_vars, loads, walk
from tilewright.ir.ops import INDEX_OPS, REDUCTIONS, SCANS, TABLE, Op
from tilewright.ir.program import Buffer, Nest, Program, Store, View

_LEAVES = ("const", "var", "sym", "load", "reduce", "scan", "part")
# rows whose sources are not of one type; `_row` says what they are instead
_MIXED = ("where", "cast", "bitcast", "index", "rand", "randn", "randint")


def verify(program: Program) -> None:
    """Every buffer is written before it is read, every variable bound, every dtype as declared."""
    written = {b.name for b in program.buffers.values() if b.kind != "temporary"}
    for node in program.nodes:
        missing = {b for b in node.reads - written if b in program.buffers} - node.writes
        if missing:
            raise VerifyError(f"{node.name} reads {sorted(missing)[0]} before anything writes it")
        if isinstance(node, Nest):
            verify_nest(program, node)
        written |= node.writes
    for output in program.outputs:
        if isinstance(output, View) and output.buffer not in written:
            raise VerifyError(f"output {output.buffer} is never written")


def verify_nest(program: Program, nest: Nest) -> None:
    """One nest on its own: also what a scheduler's transformations must keep true."""
    bound = {*nest.loops, *nest.reduce}
    if len(bound) != len(nest.loops) + len(nest.reduce):
        raise VerifyError(f"{nest.name}: the same loop twice")
    for store in nest.stores:
        _verify_store(program, nest, store)
    _verify_order(nest)
    for e in walk(*nest.exprs):
        problem = _problem(program, nest, e, bound)
        if problem:
            raise VerifyError(f"{nest.name}: {problem}")
    if config.verify_ir:
        _verify_accesses(program, nest)


def _verify_store(program: Program, nest: Nest, store: Store) -> None:
    buffer = program.buffers.get(store.buffer)
    if buffer is None:
        raise VerifyError(f"{nest.name} stores into {store.buffer}, which is not a buffer")
    if store.value.dtype != buffer.dtype:
        raise VerifyError(f"{nest.name} stores {store.value.dtype} into {store.buffer}, which "
                          f"holds {buffer.dtype}")  # fmt: skip
    if store.mask is not None and store.mask.dtype != torch.bool:
        raise VerifyError(f"{nest.name}: the mask of a store is {store.mask.dtype}")
    if store.index.dtype != INDEX:
        raise VerifyError(f"{nest.name}: the index of a store is {store.index.dtype}")
    folded = set(nest.reduce)
    for e in store.exprs:
        loose = _outside_folds(e) & folded
        if loose:
            raise VerifyError(f"{nest.name}: {min(v.arg for v in loose)} is a reduction loop, and "
                              f"is used outside a reduction")  # fmt: skip


def _outside_folds(root: Expr) -> set[Expr]:
    """The variables an expression depends on other than through a `reduce` node."""
    found: set[Expr] = set()
    seen: set[Expr] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node.op == "var":
            found.add(node)
        elif node not in seen and node.op != "reduce":
            seen.add(node)
            stack.extend(node.src)
    return found


def _verify_order(nest: Nest) -> None:
    """Stores of one nest do not see each other: the order of a nest's points is free."""
    for k, store in enumerate(nest.stores):
        for later in nest.stores[k + 1 :]:
            if any(n.arg == store.buffer for n in loads(*later.exprs)):
                raise VerifyError(f"{nest.name} reads {store.buffer}, which an earlier store of "
                                  f"the same nest writes")  # fmt: skip


# ---- one expression


def _problem(program: Program, nest: Nest, e: Expr, bound: set[Expr]) -> str:
    """What is wrong with this node, its sources being right; or an empty string."""
    row = TABLE.get(e.op)
    if row is not None:
        return _row(e, row)
    match e.op:
        case "var":
            return "" if e in bound else f"variable {e.arg} is not one of its loops"
        case "load":
            return _load(program.buffers.get(e.arg), e)
        case "reduce":
            return _reduce(nest, e)
        case "scan":
            return _scan(nest, e)
        case "part":
            return _part(e)
        case op if op in INDEX_OPS:
            return "" if all(s.dtype == INDEX for s in (e, *e.src)) else f"{op} over other types"
        case op:
            return "" if op in _LEAVES else f"unknown operation {op}"


def _row(e: Expr, row: Op) -> str:
    types = [s.dtype for s in e.src]
    if len(types) != row.arity:
        return f"{e.op} takes {row.arity} operands, not {len(types)}"
    if row.floats_only and not types[0].is_floating_point:
        return f"{e.op} of {types[0]}"
    if e.op not in _MIXED and len(set(types)) > 1:
        return f"{e.op} over different types ({', '.join(map(str, types))})"
    if e.op == "where" and (types[0] != torch.bool or types[1] != types[2]):
        return f"where({', '.join(map(str, types))})"
    if e.op == "index" and set(types) != {INDEX}:
        return f"an index of {types[0]} into a size of {types[1]}"
    expected = {"same": types[0], "bool": torch.bool, "second": types[-1], "index": INDEX,
                "arg": e.arg}[row.result]  # fmt: skip
    return "" if e.dtype == expected else f"{e.op} gives {expected}, the node says {e.dtype}"


def _load(buffer: Buffer | None, e: Expr) -> str:
    if buffer is None:
        return f"reads {e.arg}, which is not a buffer"
    if e.dtype != buffer.dtype:
        return f"reads {e.dtype} from {e.arg}, which holds {buffer.dtype}"
    if e.src[0].dtype != INDEX:
        return f"reads {e.arg} at an index of {e.src[0].dtype}"
    return "" if len(e.src) == 1 or e.src[1].dtype == torch.bool else f"masks {e.arg} with numbers"


def _reduce(nest: Nest, e: Expr) -> str:
    fold = REDUCTIONS.get(e.arg.kind)
    if fold is None:
        return f"unknown reduction {e.arg.kind}"
    if not nest.reduce:
        return "a reduction without reduction loops"
    if len(e.src) != fold.inputs:
        return f"{e.arg.kind} folds {fold.inputs} values, not {len(e.src)}"
    inner = any(n.op in ("reduce", "scan") for n in walk(*e.src))
    return "a reduction inside a reduction" if inner else ""


def _scan(nest: Nest, e: Expr) -> str:
    fold = SCANS.get(e.arg.kind)
    if fold is None:
        return f"unknown scan {e.arg.kind}"
    if len(e.src) != fold.inputs:
        return f"a running {e.arg.kind} takes {fold.inputs} values, not {len(e.src)}"
    known = any(v.arg == e.arg.axis for v in nest.loops)
    return "" if known else f"scans along {e.arg.axis}, which is not one of its loops"


def _part(e: Expr) -> str:
    (fold,) = e.src
    table = {"reduce": REDUCTIONS, "scan": SCANS}.get(fold.op)
    if table is None:
        return f"a part of {fold.op}, which has only one"
    outputs = table[fold.arg.kind].outputs
    return "" if 0 <= e.arg < outputs else f"part {e.arg} of a fold with {outputs}"


# ---- indices


def _verify_accesses(program: Program, nest: Nest) -> None:
    if any(ix.value_of(v.src[0]) == 0 for v in (*nest.loops, *nest.reduce)):
        return  # no point, so no access
    for node in loads(*nest.exprs):
        if len(node.src) == 1:
            _verify_inside(nest, program.buffers[node.arg], node.src[0])
    for store in nest.stores:
        if store.mask is None:
            _verify_inside(nest, program.buffers[store.buffer], store.index)
            _verify_once(nest, store)


def _verify_inside(nest: Nest, buffer: Buffer, index: Expr) -> None:
    """An affine index over known sizes takes the ends of its bounds, so they must be inside."""
    extent = _extent(buffer)
    if extent is None or not _affine(index):
        return
    low, high = ix.bounds(index)
    if low < 0 or high >= extent:
        raise VerifyError(f"{nest.name} touches {buffer.name} at {low} to {high}, outside its "
                          f"{extent} elements")  # fmt: skip


def _extent(buffer: Buffer) -> int | None:
    """Elements from the first to the last; None if sizes are not known."""
    total = 1
    for size, stride in zip(buffer.size, buffer.stride, strict=True):
        n, step = ix.value_of(size), ix.value_of(stride)
        if n is None or step is None:
            return None
        if n == 0:
            return 0
        total += (n - 1) * step
    return total


def _affine(index: Expr) -> bool:
    """A sum of distinct variables of known size, each times a literal."""
    return all(not m or (len(m) == 1 and m[0].op == "var" and m[0].src[0].is_const)
               for m in ix.poly(index))  # fmt: skip


def _verify_once(nest: Nest, store: Store) -> None:
    """A plain store at computed places never writes two values to one element: every loop that
    changes the value must change the place."""
    if store.mode != "set" or loads(store.index):
        return
    changing = free_vars(store.value)
    still = [v for v in _moving(nest.loops) if v in changing and v not in free_vars(store.index)]
    if still:
        raise VerifyError(f"{nest.name}: every iteration of {still[0].arg} stores to the same "
                          f"element of {store.buffer}")  # fmt: skip


def _moving(loops: Sequence[Expr]) -> list[Expr]:
    return [v for v in loops if v.src[0] is not ix.ONE]


__all__ = ["verify", "verify_nest"]
