"""Statements: a block of C++ with the values computed so far, so that each is computed once."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import contextmanager

import torch

from tilewright.codegen.cpp.text import CTYPE, OPS, index_op_text, index_text, literal
from tilewright.errors import CodegenError
from tilewright.ir import build
from tilewright.ir.expr import Expr, loads, walk
from tilewright.ir.ops import INDEX_OPS

LoadText = Callable[[Expr, "Writer"], str]


class Writer:
    """Text with indentation, and one scope of known values per open brace."""

    def __init__(self, names: Callable[[Expr], str], load: LoadText) -> None:
        self.lines: list[str] = []
        self._depth = 1
        self._scopes: list[dict[Expr, str]] = [{}]
        self._names = names
        self._load = load
        self._count = 0

    def line(self, text: str) -> None:
        self.lines.append(("" if text.startswith("#") else "    " * self._depth) + text)

    @contextmanager
    def block(self, head: str) -> Generator[None]:
        self.line(head + " {")
        self._depth += 1
        self._scopes.append({})
        yield
        self._scopes.pop()
        self._depth -= 1
        self.line("}")

    def fresh(self, family: str = "t") -> str:
        self._count += 1
        return f"{family}{self._count}"

    def know(self, e: Expr, text: str) -> None:
        """From here on in this block, `e` is this text."""
        if e.op in ("reduce", "scan", "part") and self.known(e) is not None:
            self._forget_users(e)
        self._scopes[-1][e] = text

    def _forget_users(self, fold: Expr) -> None:
        """Two nests may fold the same expression over other loops: what was made of the first fold
        is not what the second gives."""
        for scope in self._scopes:
            for e in [e for e in scope if e is not fold and any(n is fold for n in walk(e))]:
                del scope[e]

    def forget(self, buffer: str) -> None:
        """From here on, what was computed from this buffer's old contents is not known."""
        for scope in self._scopes:
            for e in [e for e in scope if any(n.arg == buffer for n in loads(e))]:
                del scope[e]

    def known(self, e: Expr) -> str | None:
        for scope in reversed(self._scopes):
            if e in scope:
                return scope[e]
        return None

    def value(self, e: Expr) -> str:
        """`e` as an operand: emits what is needed for it, once."""
        stack = [e]
        while stack:
            node = stack[-1]
            if self.known(node) is not None:
                stack.pop()
                continue
            waiting = [s for s in self._needs(node) if self.known(s) is None]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            self._define(node)
        found = self.known(e)
        assert found is not None
        return found

    def prepare(self, e: Expr) -> None:
        """Compute here what `e` needs; sums of indices themselves stay part of their use."""
        for node in _atoms(e) if e.op in ("iadd", "imul") else (e,):
            if node.op not in ("var", "const", "sym"):
                self.value(node)

    def hoist(self, exprs: Sequence[Expr], loop: Expr, written: Container[str]) -> None:
        """Compute here, before a loop, what is the same at all of its points. The compiler often
        cannot: for all it knows, a store inside may change what is loaded."""
        nodes = list(walk(*exprs))
        same: set[Expr] = set()
        for node in nodes:
            changes = node.op in ("reduce", "scan", "part") or node.arg in written
            if node is not loop and not changes and all(s in same for s in node.src):
                same.add(node)
        for node in nodes:
            if node not in same:
                for source in node.src:
                    if source in same:
                        self.prepare(source)

    def index(self, e: Expr) -> str:
        """`e` as an array index."""
        return index_text(e, self.value)

    def _needs(self, node: Expr) -> tuple[Expr, ...]:
        if node.op in ("var", "const", "sym"):
            return ()
        if node.op in INDEX_OPS or node.op == "load":  # their operands become one index text
            return tuple(n for n in _atoms(node) if n.op not in ("var", "const", "sym"))
        if _is_of_half(node):
            return (build.cast(node.src[0], torch.float32),)
        if _is_one_plus_erf(node):
            return node.src[0].src
        return node.src[0].src if _only_rounds(node) else node.src

    def _define(self, node: Expr) -> None:
        if node.op == "const":
            self.know(node, literal(node.arg, node.dtype))
        elif node.op in ("var", "sym"):
            self.know(node, self._names(node))
        elif node.op in ("iadd", "imul"):
            self._temporary(node, self.index(node))
        elif node.op in INDEX_OPS:
            self._temporary(node, index_op_text(node.op, *(self.index(s) for s in node.src)))
        elif node.op == "load":
            self._temporary(node, self._load(node, self))
        elif _only_rounds(node):
            kind = CTYPE[node.src[0].dtype]
            self._temporary(node, f"tw::rounded<{kind}>({self.value(node.src[0].src[0])})")
        elif _is_one_plus_erf(node):
            self._temporary(node, f"tw::one_plus_erf({self.value(node.src[0].src[0])})")
        elif _is_of_half(node):
            (wide,) = self._needs(node)
            self._temporary(node, OPS["cast"](node, self.value(wide)))
        elif node.op in OPS:
            operands = [self.value(s) for s in node.src]
            self._temporary(node, OPS[node.op](node, *operands))
        else:
            raise CodegenError(f"no C++ for {node.op}; it must be folded before its use")

    def _temporary(self, node: Expr, text: str) -> None:
        name = self.fresh()
        self.line(f"const {CTYPE[node.dtype]} {name} = {text};")
        self.know(node, name)


def _is_of_half(node: Expr) -> bool:
    """Whether a half becomes something other than a float: by way of the float, which every use
    shares. Converted twice in one loop, its sum came out wrong (g++ 12.2, and right again with
    `-fno-code-hoisting`; 2026-11-15)."""
    return (node.op == "cast" and node.src[0].dtype == torch.float16
            and node.dtype not in (torch.float16, torch.float32))  # fmt: skip


def _only_rounds(node: Expr) -> bool:
    """Whether a float is made a 16-bit float and a float again."""
    if node.op != "cast" or node.dtype != torch.float32:
        return False
    (small,) = node.src
    narrow = small.op == "cast" and small.dtype in (torch.bfloat16, torch.float16)
    return narrow and small.src[0].dtype == torch.float32


def _is_one_plus_erf(node: Expr) -> bool:
    """Whether this is twice the normal distribution, which is less work than an `erf` as such."""
    if node.op != "add" or node.dtype != torch.float32:
        return False
    erf, one = node.src
    return erf.op == "erf" and one.op == "const" and one.arg == 1


def _atoms(node: Expr) -> Iterator[Expr]:
    """What the index text of a node is made of, below its sums and products."""
    for source in node.src:
        if source.op in ("iadd", "imul"):
            yield from _atoms(source)
        else:
            yield source


def uses_flag(*exprs: Expr) -> bool:
    """Whether computing these may report bad data in `tw_bad`."""
    return any(
        n.op == "index" or (n.op in ("floordiv", "truncdiv", "mod", "fmod")
                            and not n.dtype.is_floating_point and n.dtype != torch.bool)
        for n in walk(*exprs)
    )  # fmt: skip
