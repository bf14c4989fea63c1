"""The border with `ShapeEnv`: sympy sizes in, index expressions out. Nothing else sees sympy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import (
    CallMethodKey,
    resolve_unbacked_bindings,
    statically_known_true,
)
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from tilewright import config
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, sym
from tilewright.ir.program import Derived

_BINARY: dict[str, Callable[[Expr, Expr], Expr]] = {
    "FloorDiv": ix.floordiv,
    "CleanDiv": ix.floordiv,
    "PythonMod": ix.mod,
    "Mod": ix.mod,
    "CeilDiv": lambda a, b: ix.neg(ix.floordiv(ix.neg(a), b)),
    "Max": ix.maximum,
    "Min": ix.minimum,
}


class Sizes:
    """Converts the numbers of one graph; remembers each symbol it has met."""

    def __init__(self) -> None:
        self.symbols: dict[str, Expr] = {}
        self.derived: dict[str, Derived] = {}
        self._done: dict[sympy.Basic, Expr | None] = {}

    def index(self, value: Any) -> Expr:
        """An int or SymInt as an index expression; an expression the algebra lacks is an error."""
        if isinstance(value, Expr):
            return value
        if isinstance(value, int):
            return const(value)
        found = self.try_index(value)
        if found is None:
            raise ValueError(f"size expression {value} cannot be expressed")
        return found

    def try_index(self, value: torch.SymInt) -> Expr | None:
        node = value.node
        if not node.expr.is_Symbol and node.hint == 1 and statically_known_true(value == 1):
            return ix.ONE  # by a guard: dimensions of one are broadcast, and are no part of a view
        return self._convert(node.expr, node.shape_env)

    def tuple(self, values: Any) -> tuple[Expr, ...]:
        return tuple(self.index(v) for v in values)

    def _convert(self, e: Any, env: Any) -> Expr | None:
        if e not in self._done:
            found = self._convert_new(e, env)
            self._done[e] = self._derive(e, env) if found is None and e.is_integer else found
        return self._done[e]

    def _derive(self, e: Any, env: Any) -> Expr:
        """A whole number the index algebra lacks (a size times a fraction): the host program
        computes it, and here it is a symbol of its own."""
        name = f"size{len(self.derived)}"
        known = {s: self.symbol(s, env) for s in e.free_symbols}
        self.derived[name] = Derived(PythonPrinter().doprint(e), frozenset(s.name for s in known))
        value = e.xreplace({s: sympy.Integer(k.arg.hint) for s, k in known.items()
                            if k is not None and k.arg.hint is not None})  # fmt: skip
        hint = int(value) if value.is_number else None
        self.symbols[name] = sym(name, lower=0, hint=hint)
        return self.symbols[name]

    def _convert_new(self, e: Any, env: Any) -> Expr | None:
        if e.is_Integer:
            return const(int(e))
        if e.is_Symbol:
            return self.symbol(e, env)
        parts = [self._convert(a, env) for a in e.args]
        known = [p for p in parts if p is not None]
        if len(known) != len(parts) or not known:
            return None
        if e.is_Add:
            return ix.add(*known)
        if e.is_Mul:
            return ix.mul(*known)
        name = type(e).__name__
        if name in ("Pow", "PowByNatural") and known[1].op == "const" and known[1].arg >= 0:
            return ix.mul(1, *[known[0]] * known[1].arg)
        if name == "ModularIndexing":
            return ix.mod(ix.floordiv(known[0], known[1]), known[2])
        if name not in _BINARY:
            return None
        total = known[0]
        for operand in known[1:]:  # Max and Min take any number
            total = _BINARY[name](total, operand)
        return total

    def symbol(self, s: Any, env: Any) -> Expr | None:
        if s.name not in self.symbols:
            lower, upper = _range(s, env)
            self.symbols[s.name] = sym(s.name, lower=lower, upper=upper, hint=_hint(s, env))
        return self.symbols[s.name]


def unbacked(value: Any, meta: dict[str, Any]) -> dict[Any, Any]:
    """The sizes a node brings into being: symbol -> path into its result."""
    found = meta.get("unbacked_bindings")
    if not found:
        return {}
    return resolve_unbacked_bindings(shape_env(value), found) or {}


def undefined(value: Any, defined: set[str]) -> dict[Any, Any]:
    """The symbols that are sizes of a result, or the result itself, and that nothing before gave:
    torch does not say so for what composite ops read, nor for the state of a generator."""
    found: dict[Any, Any] = {}
    for path, leaf in pytree.tree_leaves_with_path(value):
        sizes = leaf.size() if isinstance(leaf, torch.Tensor) else ()
        places = [((CallMethodKey("size"), pytree.SequenceKey(k)), n)
                  for k, n in enumerate(sizes)]  # fmt: skip
        for inside, n in [((), leaf), *places]:
            expr = n.node.expr if isinstance(n, torch.SymInt) else None
            if expr is not None and expr.is_Symbol and expr.name not in defined:
                found.setdefault(expr, (*path, *inside))
    return found


def shape_env(value: Any) -> Any:
    """The `ShapeEnv` behind the first symbolic number in `value`."""
    for n in _symbolic(value):
        return n.node.shape_env
    raise ValueError("no symbolic number to take the ShapeEnv from")


def symbols_of(value: Any) -> set[str]:
    """The names of the symbols in a number, or in the sizes and strides of tensors."""
    return {s.name for n in _symbolic(value) for s in n.node.expr.free_symbols}


def _symbolic(value: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(value):
        strided = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        numbers = (*leaf.size(), *leaf.stride(), leaf.storage_offset()) if strided else (leaf,)
        yield from (n for n in numbers
                    if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)))  # fmt: skip


def _range(s: Any, env: Any) -> tuple[int | None, int | None]:
    found = env.var_to_range.get(s)
    if found is None:
        return None, None
    return _finite(found.lower), _finite(found.upper)


def _finite(bound: Any) -> int | None:
    """Bounds near the top of int64 mean "unknown"."""
    try:
        value = float(bound)
    except TypeError:
        return None
    return int(bound) if math.isfinite(value) and abs(value) < 2**62 else None


def _hint(s: Any, env: Any) -> int | None:
    for name in ("backed_var_to_val", "var_to_val"):  # the name differs between torch versions
        if hasattr(type(env), name) or name in vars(env):
            value = getattr(env, name).get(s, config.unbacked_symint_fallback)
            # what a jagged dimension has in place of a number stands for no size
            return int(value) if isinstance(value, (int, sympy.Integer)) else None
    return None
