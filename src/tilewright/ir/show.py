"""Text of expressions and programs, for people and for tests.

`show_expr` is Python: with the names of `NAMESPACE` it evaluates back to the same object.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ir.expr import Expr, Reduce, Scan, Sym, make
from tilewright.ir.program import Nest, Node, Opaque, Output, Program, View

NAMESPACE: dict[str, Any] = {"E": make, "torch": torch, "Sym": Sym, "Reduce": Reduce, "Scan": Scan,
                             "inf": float("inf"), "nan": float("nan")}  # fmt: skip

_INFIX = {"iadd": " + ", "imul": "*", "ifloordiv": " // ", "imod": " % ", "add": " + ",
          "sub": " - ", "mul": " * ", "div": " / ", "lt": " < ", "le": " <= ", "gt": " > ",
          "ge": " >= ", "eq": " == ", "ne": " != ", "bit_and": " & ", "bit_or": " | "}  # fmt: skip


def show_expr(e: Expr) -> str:
    """The constructor call that makes this node."""
    src = "".join(f"{show_expr(s)}, " for s in e.src)
    arg = "" if e.arg is None else f", {e.arg!r}"
    return f"E({e.op!r}, {e.dtype}, ({src}){arg})"


def read_expr(text: str) -> Expr:
    """The inverse of `show_expr`."""
    return eval(text, dict(NAMESPACE))


def brief(e: Expr) -> str:
    """As a person would write it."""
    match e.op:
        case "const":
            return repr(e.arg)
        case "var":
            return str(e.arg)
        case "sym":
            return e.arg.name
        case "load":
            mask = f" if {brief(e.src[1])}" if len(e.src) == 2 else ""
            return f"{e.arg}[{brief(e.src[0])}{mask}]"
        case "cast" | "bitcast":
            return f"{str(e.dtype).removeprefix('torch.')}({brief(e.src[0])})"
        case "reduce":
            return f"{e.arg.kind}({', '.join(brief(s) for s in e.src)})"
        case "scan":
            return f"scan_{e.arg.kind}[{e.arg.axis}]({', '.join(brief(s) for s in e.src)})"
        case "part":
            return f"{brief(e.src[0])}.{e.arg}"
        case op if op in _INFIX:
            return "(" + _INFIX[op].join(brief(s) for s in e.src) + ")"
        case _:
            return f"{e.op}({', '.join(brief(s) for s in e.src)})"


def number(e: Expr) -> str:
    """A size as Python text, in the names of its symbols."""
    match e.op:
        case "const":
            return repr(e.arg)
        case "sym":
            return e.arg.name
        case "iadd":
            return "(" + " + ".join(number(s) for s in e.src) + ")"
        case "imul":
            return "*".join(number(s) for s in e.src)
        case "ifloordiv":
            return f"({number(e.src[0])} // ({number(e.src[1])}))"
        case "imod":
            return f"({number(e.src[0])} % ({number(e.src[1])}))"
        case "imin" | "imax":
            return f"{e.op[1:]}({number(e.src[0])}, {number(e.src[1])})"
        case _:
            raise ValueError(f"the host program cannot compute {e.op}")


def show_nest(nest: Nest) -> str:
    loops = ", ".join(f"{v.arg} < {brief(v.src[0])}" for v in nest.loops)
    folds = ", ".join(f"{v.arg} < {brief(v.src[0])}" for v in nest.reduce)
    lines = [f"{nest.name}: for {loops or 'one point'}" + (f"; fold {folds}" if folds else "")
             + f"  # {' '.join(nest.origin.nodes)} {nest.origin.location}"]  # fmt: skip
    for s in nest.stores:
        sign = "=" if s.mode == "set" else f"{s.mode}="
        mask = "" if s.mask is None else f" if {brief(s.mask)}"
        lines.append(f"    {s.buffer}[{brief(s.index)}] {sign} {brief(s.value)}{mask}")
    return "\n".join(lines)


def show_call(call: Opaque) -> str:
    results = ", ".join(r or "_" for r in call.results)
    if call.out is not None:
        results = _output(call.out)
    return f"{call.name}: {results} = {call.target}({', '.join(sorted(call.reads))})"


def show_node(node: Node) -> str:
    return show_nest(node) if isinstance(node, Nest) else show_call(node)


def _output(o: Output) -> str:
    if isinstance(o, View):
        size, stride = (", ".join(brief(e) for e in es) for es in (o.size, o.stride))
        return f"{o.buffer}[({size}), ({stride}), {brief(o.offset)}]"
    return brief(o) if isinstance(o, Expr) else str(o)


def show(value: Any) -> str:
    """A program, or anything made of groups (a schedule), as text."""
    if isinstance(value, Program):
        lines = [f"inputs {', '.join(value.inputs)}"]
        for b in value.buffers.values():
            layout = f"{[brief(s) for s in b.size]} {[brief(s) for s in b.stride]}"
            lines.append(f"buffer {b.name}: {b.dtype} {layout} {b.kind}")
        lines += [show_node(n) for n in value.nodes]
        return "\n".join([*lines, "outputs " + ", ".join(_output(o) for o in value.outputs)])
    steps = getattr(value, "steps", None)
    if steps is None:
        return repr(value)
    lines = []
    for k, step in enumerate(steps):
        group = step.group
        lines.append(f"group {k}: outer {[v.arg for v in group.outer]} local {sorted(group.local)} "
                     f"allocate {step.allocate} reuse {step.reuse} free {step.free}")  # fmt: skip
        for node in group.nodes:
            lines += ["    " + line for line in show_node(node).splitlines()]
        lines += [f"    not with {name}: {why}" for name, why in group.refused.items()]
    return "\n".join(lines)
