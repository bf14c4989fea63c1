"""The kernel of points of which each stores several results beside each other.

A matrix or a box that is made of a point is as many stores as it has components, each of every so
many-th element: a warp touches all lines of its points with every one of them. Here the components
are a tile, which is turned through shared memory and stored as one: a warp writes whole lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.analysis.operations import scatters
from tilewright.codegen.triton.plan.config import Config, power
from tilewright.codegen.triton.plan.plan import KernelPlan
from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.codegen.triton.tile.interleaved import Interleaved, Place, step
from tilewright.codegen.triton.tile.kernel import Kernel
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, loads
from tilewright.ir.program import Store

# one point for each thread (H200: rotations of 2097152 vectors to nine floats 33 us, 42 us by two)
WARPS = (4, 8, 2)


def aos_store(facts: KernelFacts) -> KernelPlan | str:
    """The kernel of such a group (H200: rotations of 2097152 vectors to nine
    floats 33 us, 181 us with a store for each of these, 126 us in pieces of sixteen bytes)."""
    group, shape = facts.group, facts.shape
    if reason := facts.not_pointwise:
        return reason
    if shape.rank != 1 or group.row_programs:
        return "loops do not run over memory as one"
    if not _vectors(shape, group.local):
        return "no point stores several results beside each other"
    x = shape.parallel[0]
    among = tuple(Config(((x.block, 32 * warps),), warps) for warps in WARPS)
    made = _Vectors(facts.program, group, shape, facts.target, facts.wide, among)
    return KernelPlan.of(made)


@dataclass(frozen=True)
class Vector:
    """So many places of a buffer beside each other, the first of them at an index."""

    buffer: str
    index: Expr
    count: int

    @property
    def places(self) -> list[Place]:
        return [(self.buffer, ix.add(self.index, k)) for k in range(self.count)]


def _vectors(shape: Shape, local: frozenset[str]) -> list[Vector]:
    """What is stored of a point beside each other, and not read: all that there is up to the next
    point."""
    flat = shape.flat()
    read = {n.arg for n in flat.loads}
    near: dict[tuple[str, Expr], list[Store]] = {}
    for m in flat.members:
        for s in m.stores:
            plain = s.mode == "set" and s.mask is None and not scatters(m) and not loads(s.index)
            if plain and s.buffer not in read | local:
                terms = dict(ix.poly(s.index))
                terms.pop((), 0)
                near.setdefault((s.buffer, ix.from_poly(terms)), []).append(s)
    found: list[Vector] = []
    for (buffer, base), stores in near.items():
        offsets = sorted(ix.poly(s.index).get((), 0) for s in stores)
        first, count = offsets[0], len(offsets)
        apart = step(stores[0].index, flat.parallel[0])
        if (
            rules.COMPONENTS.limit <= count <= rules.MOST_COMPONENTS.limit
            and count == apart
            and offsets == [*range(first, first + count)]
        ):
            found.append(Vector(buffer, ix.add(base, first), count))
    return found


class _Components(Interleaved):
    """The text of stores of whole vectors."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        found = _vectors(kernel.shape, kernel.local)
        self._vectors = {place: v for v in found for place in v.places}
        self._values: dict[Place, str] = {}  # of vectors that are not whole yet

    def store(self, store: Store, value: str) -> bool:
        vector = self._vectors.get((store.buffer, store.index))
        if vector is None:
            return super().store(store, value)
        w = self.w
        support = frozenset((self.axis,))
        if w.support(store.value) != support:
            value = w.let(f"tl.broadcast_to({value}, {w.shape(support)})")
        self._values[store.buffer, store.index] = value
        if all(p in self._values for p in vector.places):
            self._whole(vector)
        return True

    def _whole(self, vector: Vector) -> None:
        """Lanes behind the last component have it again, and are not stored."""
        w, count = self.w, vector.count
        lanes = power(count)
        values = [self._values[p] for p in vector.places]
        values += values[-1:] * (lanes - count)
        tile = w.let(f"tl.reshape({_joined(values)}, [{self.axis.block}, {lanes}])")
        lane = f"tl.arange(0, {lanes})[None, :]"
        mask = w.mask(frozenset((self.axis,)))
        masks = [f"({mask})[:, None]"] if mask else []
        masks += [f"({lane} < {count})"] if count < lanes else []
        masked = f", {' & '.join(masks)}" if masks else ""
        place = f"({w.index(vector.index)})[:, None] + {lane}"
        w.line(f"tl.store({self.kernel.pointer(vector.buffer)} + ({place}), {tile}{masked})")


def _joined(values: Sequence[str]) -> str:
    """Values by the bits of their number, the last bit last."""
    if len(values) == 1:
        return values[0]
    return f"tl.join({_joined(values[::2])}, {_joined(values[1::2])})"


class _Vectors(Kernel):
    accesses = _Components
