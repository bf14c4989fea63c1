"""Sums of powers times something of each element, as the divergence of two softmaxes or the entropy
of one: they need no pass of their own either.

The powers are relative to more than the largest value of a row, as to the logarithm of their sum,
and what they are multiplied with is less such numbers too. What a row has in common is taken out of
the sum: that of `exp(x - c) * (a + d)` is `exp(m - c)` times that of `exp(x - m) * a` and `d` times
that of `exp(x - m)`, neither of which waits for `c` and `d`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewright.ir.expr import Expr, free_vars, walk

Terms = tuple[tuple[bool, Expr], ...]  # what is added, and whether it is subtracted instead


@dataclass(frozen=True)
class Weighted:
    """`total` sums powers of what `largest` folds and of `base`, each times the sum of `weight`,
    which elements have of their own, and `more`; all of it is divided by `divisors`."""

    total: Expr
    largest: Expr
    base: Terms
    weight: Terms
    more: Terms
    divisors: tuple[Expr, ...]


class Matching:
    """`made` gives what a load stands for that the kernel itself stored, `kept` are the buffers it
    writes, `row` is the loop of a row."""

    def __init__(self, largest: Sequence[Expr], made: Callable[[Expr], Expr],
                 kept: frozenset[str], row: Expr) -> None:  # fmt: skip
        self.made, self.kept, self.row = made, kept, row
        self.tops = {made(n.src[0]): n for n in largest}

    def weighted(self, node: Expr) -> Weighted | None:
        value = self.made(node.src[0])
        if node.arg.kind != "sum" or value.op != "mul" or value.dtype != torch.float32:
            return None
        for power, factor in (value.src, value.src[::-1]):
            if found := self._of(node, self.made(power), factor):
                return found
        return None

    def _of(self, node: Expr, power: Expr, factor: Expr) -> Weighted | None:
        divisors: list[Expr] = []
        while power.op == "div" and self._is_common(power.src[1]):
            divisors.append(power.src[1])
            power = self.made(power.src[0])
        if power.op != "exp" or power.dtype != torch.float32:
            return None
        (own, base), (weight, more) = self._parted(power.src[0]), self._parted(factor)
        if len(own) != 1 or own[0][0] or own[0][1] not in self.tops or not weight:
            return None
        if any(self._waits(e) for _, e in weight):
            return None
        return Weighted(node, self.tops[own[0][1]], base, weight, more, tuple(divisors))

    def _parted(self, e: Expr) -> tuple[Terms, Terms]:
        """What each element of a row has of a sum, and what all of them have: first what is taken
        first from an element, as the largest values, which may be all but equal."""
        terms = sorted(self._terms(e, False, 0), key=lambda term: -term[0])
        own = tuple((less, t) for _, less, t in terms if not self._is_common(t))
        return own, tuple((less, t) for _, less, t in terms if self._is_common(t))

    def _terms(self, e: Expr, less: bool, depth: int) -> list[tuple[int, bool, Expr]]:
        e = self.made(e)
        single = e in self.tops or self._is_common(e) or e.dtype != torch.float32
        if single or e.op not in ("add", "sub", "neg"):
            return [(depth, less, e)]
        signs = (less != (e.op == "neg"), less != (e.op == "sub"))
        return [t for s, sign in zip(e.src, signs, strict=False)
                for t in self._terms(s, sign, depth + 1)]  # fmt: skip

    def _is_common(self, e: Expr) -> bool:
        return self.row not in free_vars(e)

    def _waits(self, e: Expr) -> bool:
        """Whether something is made of what is reduced."""
        return any(n.op in ("reduce", "scan") or (n.op == "load" and n.arg in self.kept)
                   for n in walk(e))  # fmt: skip
