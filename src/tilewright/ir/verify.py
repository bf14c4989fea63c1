"""The executable specification of a `Program`. Cheap enough to run always."""

from __future__ import annotations

from tilewright.errors import VerifyError
from tilewright.ir.expr import Expr, walk
from tilewright.ir.ops import INDEX_OPS, REDUCTIONS, SCANS, TABLE
from tilewright.ir.program import Nest, Opaque, Program, View

_LEAVES = ("const", "var", "sym", "load", "reduce", "scan", "part")


def verify(program: Program) -> None:
    """Every buffer is written before it is read, every variable bound, every dtype as declared."""
    written = {b.name for b in program.buffers.values() if b.kind != "temporary"}
    for node in program.nodes:
        missing = {b for b in node.reads - written if b in program.buffers} - node.writes
        if missing:
            raise VerifyError(f"{node.name} reads {sorted(missing)[0]} before anything writes it")
        if isinstance(node, Nest):
            _verify_nest(program, node)
        written |= node.writes
    for output in program.outputs:
        if isinstance(output, View) and output.buffer not in written:
            raise VerifyError(f"output {output.buffer} is never written")


def _verify_nest(program: Program, nest: Nest) -> None:
    bound = {*nest.loops, *nest.reduce}
    for store in nest.stores:
        if store.value.dtype != program.buffers[store.buffer].dtype:
            raise VerifyError(f"{nest.name} stores {store.value.dtype} into {store.buffer}, which "
                              f"holds {program.buffers[store.buffer].dtype}")  # fmt: skip
    for e in walk(*nest.exprs):
        _verify_expr(nest, e, bound)


def _verify_expr(nest: Nest, e: Expr, bound: set[Expr]) -> None:
    if e.op not in TABLE and e.op not in INDEX_OPS and e.op not in _LEAVES:
        raise VerifyError(f"{nest.name}: unknown operation {e.op}")
    if e.op == "var" and e not in bound:
        raise VerifyError(f"{nest.name}: variable {e.arg} is not one of its loops")
    if e.op == "reduce" and e.arg.kind not in REDUCTIONS:
        raise VerifyError(f"{nest.name}: unknown reduction {e.arg.kind}")
    if e.op == "reduce" and not nest.reduce:
        raise VerifyError(f"{nest.name}: a reduction without reduction loops")
    if e.op == "scan" and e.arg.kind not in SCANS:
        raise VerifyError(f"{nest.name}: unknown scan {e.arg.kind}")
    if e.op in TABLE and e.op not in ("where", "cast", "bitcast", "index") and len(e.src) > 1:
        if len({s.dtype for s in e.src}) > 1:
            types = ", ".join(str(s.dtype) for s in e.src)
            raise VerifyError(f"{nest.name}: {e.op} over different types ({types})")


__all__ = ["Opaque", "verify"]
