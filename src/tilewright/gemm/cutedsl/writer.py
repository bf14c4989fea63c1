"""Expressions as lines of CuTe text, each value computed once.

A value is a scalar of its own type in registers; an index is an `Int32`, or an `Int64` where memory
is larger. A load with a mask is inside an `if`: where the mask is false it is not executed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch

from tilewright.gemm.cutedsl import vocabulary
from tilewright.gemm.cutedsl.types import named, number
from tilewright.ir.expr import INDEX, Expr, walk
from tilewright.ir.ops import INDEX_OPS
from tilewright.ir.program import Store

_INFIX = {"iadd": "+", "imul": "*", "ifloordiv": "//", "imod": "%"}


class CSE:
    """Names of expressions: the same text is computed once in a scope."""

    def __init__(self, prefix: str = "tmp") -> None:
        self.prefix = prefix
        self._scopes: list[dict[str, str]] = [{}]
        self._count = 0

    def fresh(self) -> str:
        self._count += 1
        return f"{self.prefix}{self._count - 1}"

    def find(self, text: str) -> str | None:
        return next((s[text] for s in reversed(self._scopes) if text in s), None)

    def generate(self, lines: list[str], text: str) -> str:
        """The variable of an expression; its line is added where there was none."""
        found = self.find(text)
        if found is None:
            found = self._scopes[-1][text] = self.fresh()
            lines.append(f"{found} = {text}")
        return found

    @contextmanager
    def scope(self) -> Generator[None]:
        """What is computed inside is not known after it."""
        self._scopes.append({})
        try:
            yield
        finally:
            self._scopes.pop()


class Writer:
    """Lines of one place in a kernel. `name` gives the text of a loop variable or a symbol, and
    `buffer` that of a buffer's memory as a tensor of one dimension."""

    def __init__(self, cse: CSE, name: Callable[[Expr], str], buffer: Callable[[str], str],
                 wide: bool = False) -> None:  # fmt: skip
        self.lines: list[str] = []
        self.cse = cse
        self._name, self._buffer = name, buffer
        self._wide = wide
        self._index = "cutlass.Int64" if wide else "cutlass.Int32"
        self._known: dict[Expr, str] = {}
        self._indices: dict[Expr, str] = {}

    def know(self, e: Expr, text: str) -> None:
        """`e` has a variable already."""
        self._known[e] = text

    def let(self, text: str) -> str:
        return self.cse.generate(self.lines, text)

    # ---- values

    def value(self, e: Expr) -> str:
        """The variable, or the literal, of a value."""
        for node in walk(e):
            if node not in self._known and _is_value(node):
                self._known[node] = self._made(node)
        return self._known[e] if e in self._known else self._made(e)

    def _made(self, e: Expr) -> str:
        if e.op == "const":
            return number(e.arg, e.dtype)
        if e.op == "load":
            return self._load(e)
        if e.op == "sym" and e.dtype != INDEX:
            return self._name(e)
        if _is_index(e):
            return self.let(f"cutlass.Int64({self.index(e)})")
        return self.let(vocabulary.text(e, *(self._known.get(s) or self._made(s) for s in e.src)))

    def _load(self, e: Expr) -> str:
        place = f"{self._buffer(e.arg)}[{self.index(e.src[0])}]"
        if len(e.src) == 1:
            found = self.let(place)
            return self.let(f"({found} != 0)") if e.dtype == torch.bool else found
        mask = self.value(e.src[1])
        return self.masked(mask, place, number(0, e.dtype), e.dtype)

    def masked(self, mask: str, place: str, fill: str, dtype: torch.dtype) -> str:
        """What is in memory where the mask holds, the fill elsewhere: there nothing is read."""
        found = self.cse.fresh()
        read = f"({place} != 0)" if dtype == torch.bool else place
        self.lines += [f"{found} = {fill}", f"if {mask}:", f"    {found} = {read}"]
        return found

    # ---- indices

    def index(self, e: Expr) -> str:
        """The text of a position; sums and products are left to the compiler to share."""
        found = self._indices.get(e)
        if found is None:
            found = self._indices[e] = self._index_text(e)
        return found

    def _index_text(self, e: Expr) -> str:
        if e.op == "const":
            return str(int(e.arg))
        if e.op in ("var", "sym") and e.dtype == INDEX:
            name = self._name(e)
            return f"cutlass.Int64({name})" if self._wide else name
        if e.op in ("imin", "imax"):
            a, b = (self.index(s) for s in e.src)
            return f"cutlass.{e.op.removeprefix('i')}({a}, {b})"
        if e.op in _INFIX:
            return "(" + f" {_INFIX[e.op]} ".join(self.index(s) for s in e.src) + ")"
        return self.let(f"{self._index}({self.value(e)})")

    # ---- stores

    def store(self, store: Store, dtype: torch.dtype, mask: str = "") -> None:
        """A value into memory of a type, where the masks hold."""
        text = vocabulary.cast(self.value(store.value), store.value.dtype, dtype)
        if dtype == torch.bool:
            text = f"tw.to({text}, cutlass.Uint8)"
        place = f"{self._buffer(store.buffer)}[{self.index(store.index)}]"
        conditions = [mask] if mask else []
        conditions += [] if store.mask is None else [self.value(store.mask)]
        if not conditions:
            self.lines.append(f"{place} = {text}")
            return
        text = self.let(text)
        self.lines += [f"if {' & '.join(conditions)}:", f"    {place} = {text}"]


def _is_index(e: Expr) -> bool:
    return e.op in INDEX_OPS or e.op == "var" or (e.op == "sym" and e.dtype == INDEX)


def _is_value(e: Expr) -> bool:
    """Whether it has a variable of its own wherever it is used."""
    return not (_is_index(e) or e.op == "const" or e.op == "load")


def limits(exprs: Mapping[str, Expr] | list[Expr]) -> str:
    """Why there is no text for expressions, or an empty string."""
    roots = list(exprs.values()) if isinstance(exprs, Mapping) else exprs
    for node in walk(*roots):
        if node.op in ("reduce", "scan", "part"):
            return f"a {node.op} is not done inside a template"
        if node.op == "sym" and node.dtype != INDEX:
            return "a number of the host's that is no size"
        if node.op in vocabulary.REASONS:
            return f"{node.op}: {vocabulary.REASONS[node.op]}"
        try:
            if node.op in vocabulary.OPS:
                vocabulary.text(node, *("x" for _ in node.src))
            elif node.op in ("load", "const"):
                named(node.dtype)
        except NotImplementedError as why:
            return str(why)
    return ""


__all__ = ["CSE", "Writer", "limits"]
