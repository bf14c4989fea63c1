"""The expression node: one immutable, hash-consed type for values and for indices.

Equal means identical, so common subexpressions, caching and comparison cost nothing. An expression
never refers to Python code: it prints, hashes, substitutes and is rewritten.

Leaves and special nodes (every other `op` is a row of `ops.TABLE` or an index op of `index.py`):

| op       | src               | arg           | meaning                                   |
|----------|-------------------|---------------|-------------------------------------------|
| `const`  |                   | Python number | a literal of `dtype`                      |
| `var`    | (size,)           | name          | a loop variable in `[0, size)`            |
| `sym`    |                   | `Sym`         | a number known when the program is called |
| `load`   | (index[, mask])   | buffer name   | an element of a buffer; 0 where not mask  |
| `reduce` | values            | `Reduce`      | all of the nest's reduction loops folded  |
| `scan`   | values            | `Scan`        | running fold along one loop               |
| `part`   | (reduce or scan,) | position      | one result of a fold with several         |
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

INDEX = torch.int64


@dataclass(frozen=True)
class Sym:
    """A run-time number: a dynamic size (`int64`) or a host scalar (`float64`, `bool`)."""

    name: str
    lower: int | None = None
    upper: int | None = None
    hint: int | None = None


@dataclass(frozen=True)
class Reduce:
    """How a `reduce` node folds: `kind` is a key of `ops.REDUCTIONS`."""

    kind: str


@dataclass(frozen=True)
class Scan:
    """How a `scan` node folds along the loop variable named `axis`."""

    kind: str
    axis: str


class Expr:
    """`Expr(op, dtype, src, arg)`; build through `make`, which returns the one equal object."""

    __slots__ = ("__weakref__", "_memo", "arg", "dtype", "key", "op", "src")
    op: str
    dtype: torch.dtype
    src: tuple[Expr, ...]
    arg: Any
    key: str  # a structural digest: the same in every process, so generated text is too
    _memo: dict[str, Any] | None

    def __repr__(self) -> str:
        from tilewright.ir.show import show_expr  # show.py renders nodes, so it imports this file

        return show_expr(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.op, self.dtype, self.src, self.arg)

    def memo(self, name: str, compute: Callable[[Expr], Any]) -> Any:
        """A derived fact, computed once for the life of the node."""
        if self._memo is None:
            self._memo = {}
        elif name in self._memo:
            return self._memo[name]
        found = self._memo[name] = compute(self)
        return found

    def knows(self, name: str) -> bool:
        return self._memo is not None and name in self._memo

    @property
    def is_const(self) -> bool:
        return self.op == "const"


_interned: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()


def _identity(arg: Any) -> Any:
    """Tell `0.0` from `-0.0`, and let a NaN equal itself: literals are the same by their bits."""
    return arg.hex() if isinstance(arg, float) else arg


def make(op: str, dtype: torch.dtype, src: tuple[Expr, ...] = (), arg: Any = None) -> Expr:
    identity = (op, dtype, src, _identity(arg), type(arg))
    found = _interned.get(identity)
    if found is not None:
        return found
    node = object.__new__(Expr)
    node.op, node.dtype, node.src, node.arg, node._memo = op, dtype, src, arg, None
    text = f"{op}|{dtype}|{_identity(arg)!r}|{'|'.join(s.key for s in src)}"
    node.key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return _interned.setdefault(identity, node)


def const(value: bool | int | float, dtype: torch.dtype = INDEX) -> Expr:
    if dtype.is_floating_point:
        return make("const", dtype, (), float(value))
    return make("const", dtype, (), bool(value) if dtype == torch.bool else int(value))


def var(name: str, size: Expr) -> Expr:
    return make("var", INDEX, (size,), name)


def sym(name: str, dtype: torch.dtype = INDEX, lower: int | None = None,
        upper: int | None = None, hint: int | None = None) -> Expr:  # fmt: skip
    return make("sym", dtype, (), Sym(name, lower, upper, hint))


def load(buffer: str, dtype: torch.dtype, index: Expr, mask: Expr | None = None) -> Expr:
    return make("load", dtype, (index,) if mask is None else (index, mask), buffer)


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every node below the roots once, sources before their users. Iterative: no depth limit."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((s, False) for s in reversed(node.src) if s not in seen)


def rewrite(root: Expr, rule: Callable[[Expr, tuple[Expr, ...]], Expr | None]) -> Expr:
    """Rebuild `root` bottom-up. `rule(node, new_src)` gives the replacement, or None to rebuild."""
    done: dict[Expr, Expr] = {}
    for node in walk(root):
        src = tuple(done[s] for s in node.src)
        new = rule(node, src)
        done[node] = rebuild(node, src) if new is None else new
    return done[root]


def rebuild(node: Expr, src: tuple[Expr, ...]) -> Expr:
    """The same operation over other sources, simplified again where the sources changed."""
    if all(a is b for a, b in zip(node.src, src, strict=True)):
        return node
    simplify = REBUILD.get(node.op)
    return make(node.op, node.dtype, src, node.arg) if simplify is None else simplify(node, src)


REBUILD: dict[str, Callable[[Expr, tuple[Expr, ...]], Expr]] = {}
"""How to rebuild an op through its simplifying constructor; filled by `index.py`, `build.py`."""


def substitute(root: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    """Replace every occurrence of the keys at once; what replaces them is not looked into."""
    mapping = {k: v for k, v in mapping.items() if k is not v or k.op != "var"}
    others = any_inside(root, mapping)
    if not others and free_vars(root).isdisjoint(mapping):
        return root
    done: dict[Expr, Expr] = dict(mapping)
    stack = [root]
    while stack:  # not `walk`: nothing below a replaced node is visited
        node = stack[-1]
        if node in done:
            stack.pop()
            continue
        if node.op == "var" or (not others and free_vars(node).isdisjoint(mapping)):
            done[stack.pop()] = node
            continue
        waiting = [s for s in node.src if s not in done]
        if waiting:
            stack.extend(waiting)
            continue
        done[stack.pop()] = rebuild(node, tuple(done[s] for s in node.src))
    return done[root]


def any_inside(root: Expr, mapping: Mapping[Expr, Expr]) -> bool:
    """Whether a key that is not a variable occurs below `root`."""
    keys = {k for k in mapping if k.op != "var"}
    return bool(keys) and any(node in keys for node in walk(root))


def free_vars(root: Expr) -> frozenset[Expr]:
    """The loop variables `root` depends on (not those inside a variable's own size)."""
    return _gathered(root, "vars", _own_vars)


def _own_vars(node: Expr) -> frozenset[Expr]:
    return frozenset((node,)) if node.op == "var" else frozenset()


def buffers(root: Expr) -> frozenset[str]:
    """The buffers `root` reads."""
    return _gathered(root, "buffers", _own_buffer)


def _own_buffer(node: Expr) -> frozenset[str]:
    return frozenset((node.arg,)) if node.op == "load" else frozenset()


def _gathered(root: Expr, name: str, own: Callable[[Expr], frozenset[Any]]) -> frozenset[Any]:
    """What `own` gives for the nodes under `root` together, remembered at each of them."""
    if root.knows(name):
        return _known(root, name)
    stack = [root]  # not recursive: expressions can be deep
    while stack:
        node = stack[-1]
        below = () if node.op == "var" else node.src
        waiting = [s for s in below if not s.knows(name)]
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        parts = [_known(s, name) for s in below]
        found = own(node).union(*parts)
        # most nodes read what one of their sources reads: share that set
        shared = next((p for p in parts if len(p) == len(found)), found)
        node.memo(name, lambda _, value=shared: value)
    return _known(root, name)


def _known(node: Expr, name: str) -> frozenset[Any]:
    return node.memo(name, lambda _: frozenset())


def loads(*roots: Expr) -> list[Expr]:
    if len(roots) == 1:
        return list(roots[0].memo("loads", _loads))
    return list(dict.fromkeys(node for root in roots for node in root.memo("loads", _loads)))


def _loads(root: Expr) -> tuple[Expr, ...]:
    return tuple(node for node in walk(root) if node.op == "load")


def syms(*roots: Expr) -> set[Expr]:
    return {node for node in walk(*roots) if node.op == "sym"}
