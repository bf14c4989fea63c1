"""A tensor during lowering: an expression over index placeholders.

Whether it is stored makes no difference to its users: reading it at other indices is a
substitution, so a view is a new tensor over the same loads and a pointwise op is a larger
expression. Placeholders are `d0, d1, ...` with the sizes of the dimensions; a dimension of size one
has index zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, buffers, free_vars, loads, substitute, var, walk
from tilewright.ir.ops import INDEX_OPS, TABLE

Size = tuple[Expr, ...]


@dataclass(frozen=True)
class Tensor:
    size: Size
    dtype: torch.dtype
    device: torch.device
    body: Expr

    @property
    def rank(self) -> int:
        return len(self.size)

    @property
    def numel(self) -> Expr:
        return ix.product(self.size)

    def at(self, indices: Sequence[ix.IndexLike]) -> Expr:
        """The element at these indices (one per dimension)."""
        mapping = {
            p: ix.as_index(i)
            for p, i in zip(placeholders(self.size), indices, strict=True)
            if p.op == "var"
        }
        return substitute(self.body, mapping)

    def to(self, dtype: torch.dtype) -> Tensor:
        return self.map(lambda e: build.cast(e, dtype))

    def map(self, fn: Callable[[Expr], Expr]) -> Tensor:
        body = fn(self.body)
        return Tensor(self.size, body.dtype, self.device, body)


def placeholders(size: Size) -> tuple[Expr, ...]:
    return tuple(ix.ZERO if s is ix.ONE else var(f"d{k}", s) for k, s in enumerate(size))


def from_indices(size: Size, device: torch.device, body: Callable[..., Expr]) -> Tensor:
    """The tensor whose element at `i, j, ...` is `body(i, j, ...)`."""
    value = body(*placeholders(size))
    return Tensor(size, value.dtype, device, value)


def view(t: Tensor, size: Size, reindex: Callable[..., Sequence[ix.IndexLike]]) -> Tensor:
    """`t` seen with another size: element `i, j, ...` is `t` at `reindex(i, j, ...)`."""
    return Tensor(size, t.dtype, t.device, t.at(tuple(reindex(*placeholders(size)))))


def expand(t: Tensor, size: Size) -> Tensor:
    """Broadcast to `size`: aligned at the last dimension, dimensions of one repeated."""
    if t.size == size:
        return t
    lead = len(size) - t.rank

    def reindex(*indices: Expr) -> list[Expr]:
        return [ix.ZERO if s is ix.ONE else i
                for s, i in zip(t.size, indices[lead:], strict=True)]  # fmt: skip

    return view(t, size, reindex)


def broadcast_size(tensors: Sequence[Tensor]) -> Size:
    rank = max((t.rank for t in tensors), default=0)
    size: list[Expr] = []
    for k in range(rank):
        dims = [t.size[k - (rank - t.rank)] for t in tensors if k >= rank - t.rank]
        size.append(next((d for d in dims if d is not ix.ONE), ix.ONE))
    return tuple(size)


def pointwise(fn: Callable[..., Expr], *tensors: Tensor) -> Tensor:
    """`fn` of the elements of the broadcast tensors."""
    size = broadcast_size(tensors)
    body = fn(*(expand(t, size).body for t in tensors))
    # a zero-dimensional CPU tensor may meet tensors of another device; they decide
    device = next((t.device for t in tensors if t.rank), tensors[0].device)
    return Tensor(size, body.dtype, device, body)


COMPUTED_INDEX = 16  # work from which on an index is a computation rather than a view


def cost(body: Expr) -> tuple[int, int]:
    """(arithmetic in additions, number of loads), each distinct node once; index sums are free.

    Where a position decides which of several operands is used, one of them is: the average. Where
    a value decides, all are looked at.
    """
    return body.memo("cost", _cost)


def _cost(body: Expr) -> tuple[int, int]:
    work, reads, always = 0, 0, 0
    masks: set[Expr] = set()
    for node in walk(body):
        if node.op == "load":
            by_value = len(node.src) > 1 and bool(buffers(node.src[1]))
            reads += not by_value
            always += by_value
            masks.update(() if by_value else node.src[1:])
        elif node.op in TABLE:
            work += TABLE[node.op].cost
        elif node.op in INDEX_OPS and node.op not in ("iadd", "imul"):
            work += 2
    choices = max(len(masks), 1)
    return (work if always else work // choices), -(-reads // choices) + always


def is_stored(t: Tensor) -> bool:
    """Whether reading an element is one plain load: storing it again would only copy."""
    if t.body.op != "load" or len(t.body.src) != 1 or loads(t.body.src[0]):
        return False
    return cost(t.body)[0] < COMPUTED_INDEX


def reads_buffer(t: Tensor, buffer: str) -> bool:
    return buffer in buffers(t.body)


__all__ = [
    "Size", "Tensor", "broadcast_size", "cost", "expand", "free_vars", "from_indices", "is_stored",
    "placeholders", "pointwise", "reads_buffer", "view",
]  # fmt: skip
