"""Complex arithmetic whose result is taken apart, done with floats.

Kernels have no complex numbers. In memory one is a pair of floats along a last dimension, and a
graph that makes complex numbers of pairs, as rotary embeddings do, hands them back as pairs by
`view_as_real`. What lies between is written with the pairs, so that it becomes loops as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from tilewright.graph.sums import Maker

aten = torch.ops.aten
Node = torch.fx.Node


def pair_of(node: Node) -> Node | None:
    """What `view_as_real` gives, made without complex numbers; None if that cannot be."""
    source = _operand(node)
    pairs = _Pairs(Maker(node, node))
    return pairs.of(source) if source.target in PAIRS and pairs.can(source) else None


class _Pairs:
    """The pairs that complex nodes stand for; each is made once."""

    def __init__(self, make: Maker) -> None:
        self.make = make
        self._made: dict[Node, Node] = {}

    def can(self, node: Any) -> bool:
        """Whether there is a pair for this node. What nothing is known of is taken apart itself."""
        if not _is_complex(node):
            return False
        if node.target in PAIRS:
            return PAIRS[node.target][0](self, node)
        return not node.meta["val"].is_conj()

    def of(self, node: Node) -> Node:
        if node not in self._made:
            found = PAIRS.get(node.target)
            self._made[node] = (self.make(aten.view_as_real.default, node) if found is None
                                else found[1](self, node))  # fmt: skip
        return self._made[node]

    def aligned(self, node: Node, result: Node) -> Node:
        """The pair of an operand with as many dimensions as that of the result."""
        pair = self.of(node)
        for _ in range(result.meta["val"].dim() + 1 - pair.meta["val"].dim()):
            pair = self.make(aten.unsqueeze.default, pair, 0)
        return pair

    def parts(self, node: Node) -> tuple[Node, Node]:
        pair = self.of(node)
        return self.make(aten.select.int, pair, -1, 0), self.make(aten.select.int, pair, -1, 1)

    def joined(self, real: Node, imaginary: Node) -> Node:
        ends = [self.make(aten.unsqueeze.default, part, -1) for part in (real, imaginary)]
        return self.make(aten.cat.default, ends, -1)


def _operand(node: Node, position: int = 0) -> Node:
    found = node.args[position]
    assert isinstance(found, Node)
    return found


def _is_complex(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.is_complex()


# ---- whether there is a pair


def _always(pairs: _Pairs, node: Node) -> bool:
    return True


def _of_one(pairs: _Pairs, node: Node) -> bool:
    return pairs.can(node.args[0])


def _of_both(pairs: _Pairs, node: Node) -> bool:
    return not node.kwargs and all(_is_complex(a) and _alike(pairs, a, node) for a in node.args)


def _of_any(pairs: _Pairs, node: Node) -> bool:
    return all(isinstance(a, (int, float)) or _alike(pairs, a, node) for a in node.args)


def _alike(pairs: _Pairs, operand: Any, node: Node) -> bool:
    """Whether an operand has the result's precision, and a pair if it is complex."""
    value = operand.meta.get("val") if isinstance(operand, Node) else None
    if not isinstance(value, torch.Tensor) or value.device != node.meta["val"].device:
        return False
    if value.is_complex():
        return value.dtype == node.meta["val"].dtype and pairs.can(operand)
    return value.dtype == node.meta["val"].dtype.to_real()


# ---- which it is


def _given(pairs: _Pairs, node: Node) -> Node:
    return _operand(node)


def _polar(pairs: _Pairs, node: Node) -> Node:
    make, length, angle = pairs.make, _operand(node), _operand(node, 1)
    real, imaginary = (make(aten.mul.Tensor, length, make(f, angle))
                       for f in (aten.cos.default, aten.sin.default))  # fmt: skip
    return pairs.joined(real, imaginary)


def _same(pairs: _Pairs, node: Node) -> Node:
    return pairs.of(_operand(node))


def _product(pairs: _Pairs, node: Node) -> Node:
    make, (a, b) = pairs.make, node.args
    if _is_complex(a) and _is_complex(b):
        (ar, ai), (br, bi) = pairs.parts(_operand(node)), pairs.parts(_operand(node, 1))
        mul, add, sub = aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor
        return pairs.joined(make(sub, make(mul, ar, br), make(mul, ai, bi)),
                            make(add, make(mul, ar, bi), make(mul, ai, br)))  # fmt: skip
    position = 0 if _is_complex(a) else 1
    by = node.args[1 - position]
    by = make(aten.unsqueeze.default, by, -1) if isinstance(by, Node) else by
    return make(aten.mul.Tensor, pairs.aligned(_operand(node, position), node), by)


def _each(pairs: _Pairs, node: Node) -> Node:
    """Part by part."""
    operands = [pairs.aligned(_operand(node, k), node) for k in range(len(node.args))]
    return pairs.make(node.target, *operands)


def _conjugate(pairs: _Pairs, node: Node) -> Node:
    real, imaginary = pairs.parts(_operand(node))
    return pairs.joined(real, pairs.make(aten.neg.default, imaginary))


def _unsqueezed(pairs: _Pairs, node: Node) -> Node:
    dim: Any = node.args[1]
    return pairs.make(aten.unsqueeze.default, _same(pairs, node), dim - 1 if dim < 0 else dim)


def _viewed(pairs: _Pairs, node: Node) -> Node:
    size: Any = node.args[1]
    return pairs.make(aten.view.default, _same(pairs, node), [*size, 2])


Can = Callable[[_Pairs, Node], bool]
PAIRS: dict[Any, tuple[Can, Callable[[_Pairs, Node], Node]]] = {
    aten.view_as_complex.default: (_always, _given),
    aten.polar.default: (_always, _polar),
    aten.mul.Tensor: (_of_any, _product),
    aten.add.Tensor: (_of_both, _each),
    aten.sub.Tensor: (_of_both, _each),
    aten.neg.default: (_of_one, _each),
    aten._conj.default: (_of_one, _conjugate),
    aten.clone.default: (_of_one, _same),
    aten.unsqueeze.default: (_of_one, _unsqueezed),
    aten.view.default: (_of_one, _viewed),
}
