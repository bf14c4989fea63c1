"""`Attention`: the node of attention, forward or backward, with its score and mask as expressions.

For every batch `b`, query head `h`, query `m` and key `n`, with `g = h // group`:

    score = scale * sum over d of q[b, h, m, d] * k[b, g, n, d]
    s     = `score` expression of it          where the `mask` expression holds, -inf elsewhere
    out   = sum over n of softmax(s)[n] * v[b, g, n]        zero where every s is -inf
    lse   = log2 of the sum over n of exp(s), and the largest s over ln 2 where `maxima` are wanted

Backward, of the gradient of `out` and `delta` (the sum over a row of out times that gradient, less
the gradient of the natural logarithm of the sum):

    p  = exp(s - lse * ln 2)
    dv = sum over m of p * grad_out;    ds = p * (grad_out . v - delta)
    dscore = `gradient` expression of score and ds, zero where the mask does not hold
    dq = scale * sum over n of dscore * k;    dk = scale * sum over m of dscore * q
    stores: what each point adds to the gradients of memory that the score expression reads

An expression reads `score` and `ds` as element 0 of buffers of those names, memory as buffers `x0`,
`x1`, ..., and names a position by the four variables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tilewright.ir import build, interp
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, load, loads, substitute
from tilewright.ir.program import Buffer, Nest, Origin, Program, Store

SCORE, GRAD = "score", "ds"
LN2 = math.log(2)


@dataclass(frozen=True)
class Sparse:
    """Which blocks there is something in. Of block `i` of queries (or keys), `count` says how many
    blocks of the others are computed with the mask, `place` which is the `j`-th; of `full` ones the
    mask holds everywhere."""

    own: int  # elements of a block of those that have a list
    other: int  # elements of a block in a list
    i: Expr
    j: Expr
    count: Expr
    place: Expr
    full_count: Expr | None = None
    full_place: Expr | None = None

    @property
    def exprs(self) -> tuple[Expr, ...]:
        full = (self.full_count, self.full_place)
        return (self.count, self.place, *(e for e in full if e is not None))


@dataclass(frozen=True)
class Attention:
    """What an opaque call of attention has for a target: called with q, k, v, then backward the
    gradient of the result, `lse` and `delta`, then `buffers` and `numbers`."""

    batch: Expr  # loop variables; their sizes are the problem's
    head: Expr
    row: Expr
    column: Expr
    group: int  # query heads of a key head
    scale: float
    score: Expr
    mask: Expr
    buffers: tuple[Buffer, ...] = ()  # x0, x1, ...; those that `stores` add to come last
    numbers: tuple[Expr, ...] = ()  # run-time numbers in the expressions
    sparse: Sparse | None = None  # of blocks of queries
    turned: Sparse | None = None  # of blocks of keys
    maxima: bool = False
    gradient: Expr | None = None  # of a backward
    stores: tuple[Store, ...] = ()

    @property
    def is_backward(self) -> bool:
        return self.gradient is not None

    @property
    def place(self) -> tuple[Expr, Expr, Expr, Expr]:
        return self.batch, self.head, self.row, self.column

    @property
    def working(self) -> torch.dtype:
        """What scores are computed in."""
        return self.score.dtype

    @cached_property
    def exprs(self) -> tuple[Expr, ...]:
        sparse = [e for s in (self.sparse, self.turned) if s is not None for e in s.exprs]
        own = [self.score, self.mask, *([self.gradient] if self.gradient is not None else [])]
        return (*own, *(e for s in self.stores for e in s.exprs), *sparse)

    @property
    def added(self) -> tuple[str, ...]:
        """The buffers that a backward adds to."""
        return tuple(dict.fromkeys(s.buffer for s in self.stores))

    @property
    def operands(self) -> int:
        return 6 if self.is_backward else 3

    # ---- by torch's own operations

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """With the whole matrix of scores in memory: what is left where no kernel can be had, and
        what kernels are compared with."""
        with torch.no_grad(), torch.device(args[0].device):
            return self._backward(args) if self.is_backward else self._forward(args)

    def _scores(self, args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores before and after the expression, and where the mask holds."""
        q, k = (t.to(self.working) for t in args[:2])
        raw = q @ self._spread(k).transpose(-2, -1) * self.scale
        after, mask = torch.empty_like(raw), torch.empty_like(raw, dtype=torch.bool)
        if raw.numel():
            self._run({"after": (after, self.score), "mask": (mask, self.mask)}, {SCORE: raw}, args)
        return raw, after.masked_fill_(~mask, -math.inf), mask

    def _spread(self, t: torch.Tensor) -> torch.Tensor:
        return t.repeat_interleave(self.group, 1) if self.group > 1 else t

    def _forward(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        q, v = args[0], args[2]
        _, s, _ = self._scores(args)
        if not s.shape[-1]:
            none = torch.full(q.shape[:3], -math.inf, dtype=torch.float32)
            return (q.new_zeros((*q.shape[:3], v.shape[-1])), none, none)
        weights = torch._safe_softmax(s, -1)
        lse = torch.where((s == -math.inf).all(-1), -math.inf, s.logsumexp(-1))
        out = (weights @ self._spread(v.to(self.working))).to(q.dtype)
        return out, (lse / LN2).float(), (s.amax(-1) / LN2).float()

    def _backward(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        q, k, v, grad_out, lse, delta = args[:6]
        raw, s, mask = self._scores(args)
        lse = lse.to(self.working)[..., None] * LN2
        p = torch.where(lse == -math.inf, 0, torch.exp(s - lse))
        grad_out = grad_out.to(self.working)
        dv = p.transpose(-2, -1) @ grad_out
        dp = grad_out @ self._spread(v.to(self.working)).transpose(-2, -1)
        given = {SCORE: raw, GRAD: p * (dp - delta[..., None])}
        ds = torch.empty_like(raw)
        assert self.gradient is not None
        if raw.numel():
            self._run({"after": (ds, self.gradient)}, given, args, self.stores)
        ds = torch.where(mask, ds, 0) * self.scale
        dq = ds @ self._spread(k.to(self.working))
        dk = ds.transpose(-2, -1) @ q.to(self.working)
        if self.group > 1:
            dk, dv = (t.unflatten(1, (-1, self.group)).sum(2) for t in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _run(self, made: dict[str, tuple[torch.Tensor, Expr]], given: dict[str, torch.Tensor],
             args: Sequence[Any], stores: Sequence[Store] = ()) -> None:  # fmt: skip
        """Evaluate expressions at all points, of scores and into tensors by name."""
        own_memory = zip(self.buffers, args[self.operands :], strict=False)
        memory = {b: t for b, t in own_memory if t is not None}  # not all of it is read here
        numbers = args[self.operands + len(self.buffers) :]
        tensors = {**given, **{name: t for name, (t, _) in made.items()}}
        size = tuple(v.src[0] for v in self.place)
        where = ix.linearize(self.place, ix.contiguous_strides(size))
        own = {load(name, self.working, ix.ZERO): load(name, self.working, where) for name in given}
        plain = [Buffer(n, t.dtype, t.device, size, ix.contiguous_strides(size))
                 for n, t in tensors.items()]  # fmt: skip
        program = Program({b.name: b for b in (*plain, *memory)})
        program.inputs = [*tensors, *(b.name for b in memory), *(e.arg.name for e in self.numbers)]
        program.symbols = {e.arg.name: e for e in self.numbers}
        written = [Store(n, where, substitute(e, own)) for n, (_, e) in made.items()]
        held = substitute(self.mask, own)
        written += [Store(s.buffer, substitute(s.index, own), substitute(s.value, own), s.mode,
                          held if s.mask is None else build.both(held, s.mask))
                    for s in stores]  # fmt: skip
        nest = Nest("attention", self.place, (), tuple(written), Origin(()))
        interp.run_nodes(program, [nest], [*tensors.values(), *memory.values(), *numbers], ())


def element(name: str, dtype: torch.dtype) -> Expr:
    """What stands for the score, or its gradient, in an expression."""
    return load(name, dtype, ix.ZERO)


def memory_of(exprs: Sequence[Expr]) -> list[str]:
    """The buffers that expressions read, in the order they do, without scores."""
    found = dict.fromkeys(n.arg for n in loads(*exprs))
    return [name for name in found if name not in (SCORE, GRAD)]


TRUE = const(True, torch.bool)

__all__ = ["GRAD", "LN2", "SCORE", "TRUE", "Attention", "Sparse", "element", "memory_of"]
