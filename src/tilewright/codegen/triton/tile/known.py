"""The names of what a kernel has computed so far, in one scope for each block of its text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from tilewright.ir.expr import Expr

Scope = dict[Expr, str]


class Known:
    """The innermost scope is the last. An index that is used as a number has a name for that too,
    of 64 bits."""

    def __init__(self) -> None:
        self._scopes: list[Scope] = [{}]
        self._wide: list[Scope] = [{}]
        self.blank: set[str] = set()  # names of what was loaded with zeros outside the tile's axes

    def enter(self) -> None:
        self._scopes.append({})
        self._wide.append({})

    def leave(self) -> None:
        self._scopes.pop()
        self._wide.pop()

    def name(self, e: Expr) -> str | None:
        return next((scope[e] for scope in reversed(self._scopes) if e in scope), None)

    def wide_name(self, e: Expr) -> str | None:
        return next((scope[e] for scope in reversed(self._wide) if e in scope), None)

    def add(self, e: Expr, name: str) -> None:
        self._scopes[-1][e] = name

    def add_wide(self, e: Expr, name: str) -> None:
        self._wide[-1][e] = name

    def forget(self, which: Callable[[Expr], bool]) -> None:
        for scope in (*self._scopes, *self._wide):
            for e in [e for e in scope if which(e)]:
                del scope[e]

    def where(self, which: Callable[[Expr], bool]) -> Mapping[Expr, str]:
        """What is known of some values."""
        return {e: name for scope in self._scopes for e, name in scope.items() if which(e)}

    @contextmanager
    def only(self, *scopes: Scope) -> Generator[None]:
        """While nothing is known but what these scopes have."""
        before, wide = self._scopes, self._wide
        self._scopes, self._wide = [*scopes], [{}]
        yield
        self._scopes, self._wide = before, wide
