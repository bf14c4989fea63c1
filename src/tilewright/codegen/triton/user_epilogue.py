"""What is done with each element of a user's kernel's result, as a part of that kernel.

A kernel that stores once into memory nobody has written to, whose result only one pointwise nest
reads, stores what that nest would: the text of its store is changed, and one launch and one buffer
go. Whatever is not plainly like that stays as its author wrote it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from tilewright.codegen.triton.tile.lower import RANDOM
from tilewright.codegen.triton.tile.ops import OPS, TYPE, number
from tilewright.codegen.triton.tile.render import imports
from tilewright.graph.user_kernels import Launch
from tilewright.ir.expr import Expr, loads, syms
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Buffer, Nest, Node, Opaque, Program, View


def with_epilogues(program: Program) -> Program:
    """The program with pointwise nests in the users' kernels whose results they read."""
    calls = [n for n in program.nodes if isinstance(n, Opaque) and isinstance(n.target, Launch)]
    if not calls:
        return program
    users: dict[str, list[Node]] = {}
    for node in program.nodes:
        for b in node.reads | node.writes:
            users.setdefault(b, []).append(node)
    new: dict[str, Node | None] = {}
    for call in calls:
        found = _with_epilogue(program, call, users)
        if found is not None:
            new[call.name], nest = found
            new[nest.name] = None
    nodes = (new.get(n.name, n) for n in program.nodes)
    return replace(program, nodes=[n for n in nodes if n is not None])


def _with_epilogue(program: Program, call: Opaque, users: dict[str, list[Node]]
                   ) -> tuple[Opaque, Nest] | None:  # fmt: skip
    launch: Launch = call.target
    visible = program.visible
    for name in launch.writes:
        view = call.kwargs[name]
        buffer = program.buffers[view.buffer]
        if buffer.kind != "temporary" or buffer.name in visible or buffer.name not in call.fills:
            continue
        given = [v for v in call.kwargs.values() if isinstance(v, View) and v.buffer == buffer.name]
        readers = [n for n in users[buffer.name] if n is not call]
        nest = readers[0] if len(readers) == 1 else None
        if len(given) != 1 or not isinstance(nest, Nest):
            continue
        target = _target(program, nest, buffer, users)
        text = "" if target is None else changed(launch, name, nest.stores[0].value)
        if target is None or not text:
            continue
        made = replace(launch, kernel=replace(launch.kernel, text=text))

        def renamed(names: Sequence[str], old: str = buffer.name,
                    now: str = target.name) -> tuple[str, ...]:  # fmt: skip
            return tuple(now if b == old else b for b in names)

        kwargs = {**call.kwargs, name: replace(view, buffer=target.name)}
        return replace(call, target=made, kwargs=kwargs, mutates=renamed(call.mutates),
                       fills=renamed(call.fills), covers=()), nest  # fmt: skip
    return None


def _target(program: Program, nest: Nest, buffer: Buffer,
            users: dict[str, list[Node]]) -> Buffer | None:  # fmt: skip
    """Where the nest puts the same elements of what it makes of the buffer, and of nothing else."""
    if nest.reduce or len(nest.stores) != 1:
        return None
    (store,) = nest.stores
    read = loads(*nest.exprs)
    target = program.buffers[store.buffer]
    if len(read) != 1 or len(read[0].src) != 1 or store.mode != "set" or store.mask is not None:
        return None
    if read[0].src[0] is not store.index or target.kind != "temporary" or target is buffer:
        return None
    if (target.size, target.stride, target.dtype) != (buffer.size, buffer.stride, buffer.dtype):
        return None
    first = users[target.name][0]
    writers = [n for n in users[target.name] if target.name in n.writes]
    return target if first is nest and writers == [nest] else None


# ---- the text


def changed(launch: Launch, parameter: str, value: Expr) -> str:
    """The kernel's text with `value`, of what it is about to store, stored; or nothing."""
    kernel = launch.kernel
    (read,) = loads(value)
    outside = _around(value, read)
    if any(n.op in RANDOM or (n.op not in TABLE and n.op != "const") for n in outside):
        return ""  # it needs numbers, or the place of the element
    if syms(*outside) - syms(read) or launch.descriptors:
        return ""
    if not kernel.text or re.search(r"\b(tri|tri_\w+|libdevice|_epilogue)\b", kernel.text):
        return ""
    if re.search(r"\btl\b", kernel.text) and "import triton.language as tl" not in kernel.text:
        return ""
    place = _stored_once(kernel.text, kernel.name, parameter)
    if place is None:
        return ""
    start, end = place
    data = kernel.text.encode()
    text = b"".join((data[:start], b"_epilogue(", data[start:end], b")", data[end:])).decode()
    body = f"    return {_text(value, read)}"
    helper = "\n".join(("@triton.jit", "def _epilogue(value):",
                        f"    x = value.to({TYPE[read.dtype]})", body))  # fmt: skip
    return "\n".join((text, *imports([helper]), "", "", helper, ""))


def _around(value: Expr, leaf: Expr) -> list[Expr]:
    """The nodes of an expression that are not inside `leaf`."""
    found: dict[Expr, None] = {}
    stack = [value]
    while stack:
        node = stack.pop()
        if node is not leaf and node not in found:
            found[node] = None
            stack.extend(node.src)
    return list(found)


def _text(value: Expr, read: Expr) -> str:
    if value is read:
        return "x"
    if value.op == "const":
        return f"tl.full([], {number(value.arg, value.dtype)}, {TYPE[value.dtype]})"
    return OPS[value.op](value, *(_text(s, read) for s in value.src))


def _stored_once(text: str, function: str, parameter: str) -> tuple[int, int] | None:
    """The bytes of the value that the kernel's only store through a parameter stores; None if there
    are more, or the pointer goes anywhere else."""
    tree = ast.parse(text)
    body = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    pointers = _derived(body, parameter)
    stores = [n for n in ast.walk(body) if isinstance(n, ast.Call) and _is_store(n)
              and n.args and _names(n.args[0]) & pointers]  # fmt: skip
    if len(stores) != 1:
        return None
    (store,) = stores
    values = [*store.args[1:2], *(k.value for k in store.keywords if k.arg == "value")]
    inside = {id(n) for n in ast.walk(store.args[0])}
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and node is not store and id(node) not in inside:
            given = [*node.args, *(k.value for k in node.keywords)]
            if any(_names(a) & pointers for a in given):
                return None
    others = [*store.args[1:], *(k.value for k in store.keywords)]
    if (
        len(values) != 1
        or isinstance(values[0], ast.Constant)
        or any(_names(v) & pointers for v in others)
    ):
        return None
    (value,) = values
    lengths = map(len, text.encode().splitlines(keepends=True))
    starts = list(accumulate(lengths, initial=0))
    assert value.end_lineno is not None and value.end_col_offset is not None
    return (starts[value.lineno - 1] + value.col_offset,
            starts[value.end_lineno - 1] + value.end_col_offset)  # fmt: skip


def _is_store(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "store"


def _derived(body: ast.FunctionDef, parameter: str) -> set[str]:
    """The parameter and the names that values made of it are given."""
    found = {parameter}
    while True:
        before = len(found)
        for node in ast.walk(body):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if node.value is not None and _names(node.value) & found:
                    found |= set[str]().union(*(_names(t) for t in targets))
        if len(found) == before:
            return found


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
