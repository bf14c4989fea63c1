"""The kernel of rows that are rolled, padded or put side by side: pieces of memory that move as
they are, though not by whole sixteen bytes.

Most blocks lie within one piece of each of them. There one number says how far an element comes,
and which piece it belongs to is the same for all: whole sixteen bytes are loaded and slid into
place (`tri_rows.slid`). Only the other blocks look up where each element is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tilewright import rules
from tilewright.codegen.triton.analysis.facts import KernelFacts
from tilewright.codegen.triton.plan.plan import KernelPlan
from tilewright.codegen.triton.plan.tiling import Axis
from tilewright.codegen.triton.strategies.misaligned_rows import misaligned_rows
from tilewright.codegen.triton.strategies.transpose import Moving
from tilewright.ir import index as ix
from tilewright.ir.expr import INDEX, Expr, free_vars, loads, walk
from tilewright.target import PIECE

SLID = (2, 4)  # bytes of elements that are


def shifted_copy(facts: KernelFacts) -> KernelPlan | str:
    """The kernel of such a group (H200: three of 359x25x1747 bfloat16 side by side
    52 us, 83 us by single elements; two of 8000x9001 147 us, 155 us; two of 8979x4097 one after the
    other 71 us, 78 us as two kernels; 10390x5001 float16 rolled 52 us, 55 us; the first third of
    3655x32768 bfloat16 and the rest of it 120 us, 127 us)."""
    program, group, shape, flat = facts.program, facts.group, facts.shape, facts.flat
    if reason := facts.not_pointwise or facts.scatters:
        return reason
    if shape.rank != 1 or shape.scattered:
        return "loops do not run over memory as one"
    (axis,) = shape.parallel
    fewest = rules.SHIFTED_BYTES.limit
    if (axis.size or 0) * min(SLID) < fewest:
        return f"fewer than {fewest} bytes are moved, or only the call knows how many"
    pieces = _Pieces(axis, [e for m in flat.members for e in m.exprs])
    stores = flat.stores
    if not pieces.may_move({*group.local, *(s.buffer for s in stores)}) or not all(
        pieces.slope(s.index) == 1 and pieces.is_even(s.index) for s in stores):  # fmt: skip
        return "it does not put long pieces of tensors at places that are shifted by constants"
    made = _Moved(program, group, misaligned_rows(program, group, shape), facts.target, facts.wide)
    made.pieces = pieces
    if made.w.index_type != "tl.int32":
        return "places need 64-bit indices"
    return KernelPlan.of(made)


class _Pieces:
    """What is read and chosen along an axis by expressions."""

    def __init__(self, axis: Axis, exprs: list[Expr]) -> None:
        self.x = axis.var
        nodes = [n for n in walk(*exprs) if self.x in free_vars(n)]
        self.loads = list(loads(*exprs))
        self.compared = [n for n in nodes if n.op in ("lt", "ge") and n.src[0].dtype == INDEX]
        self.divided = [n for n in nodes if n.op in ("ifloordiv", "imod")]

    def may_move(self, made: Collection[str]) -> bool:
        """Whether all that is read moves in long pieces, and something not by sixteen bytes."""
        if any((ix.value_of(n.src[1]) or 0) < rules.SHIFTED_PIECE.limit for n in self.divided):
            return False
        if any(self.slope(n.src[0]) not in (0, 1)
               for n in (*self.loads, *self.divided, *self.compared)):  # fmt: skip
            return False
        if any(self.x in free_vars(n.src[1]) for n in self.compared):
            return False
        if any(n.arg in made or not all(map(self._is_known, n.src[1:])) for n in self.loads):
            return False
        return any(n.dtype.itemsize in SLID and self.slope(n.src[0]) == 1
                   and not all(map(self.is_even, n.src)) for n in self.loads)  # fmt: skip

    def _is_known(self, mask: Expr) -> bool:
        """Whether it says the same of all elements of a block within one piece."""
        if mask.op == "bit_and":
            return all(map(self._is_known, mask.src))
        return mask in self.compared

    def slope(self, e: Expr) -> int | None:
        """How far apart neighbours of a piece are in an index."""
        if self.x not in free_vars(e):
            return 0
        match e.op:
            case "var":
                return 1
            case "iadd":
                found = [self.slope(s) for s in e.src]
                return None if None in found else sum(s or 0 for s in found)
            case "imul" if len(e.src) == 2 and e.src[1].is_const:
                slope = self.slope(e.src[0])
                return None if slope is None else slope * e.src[1].arg
            case "imod":
                return self.slope(e.src[0])
            case "ifloordiv":
                return 0
            case _:
                return None

    def is_even(self, e: Expr) -> bool:
        """Whether an index, or what is compared, is of sixteen bytes as a whole."""
        match e.op:
            case "const":
                return e.dtype != INDEX or e.arg % PIECE == 0
            case "var":
                return e is self.x
            case "imul":
                return any(map(self.is_even, e.src))
            case "ifloordiv":
                return False
            case _:
                return all(map(self.is_even, e.src))


class _Moved(Moving):
    pieces: _Pieces

    def body(self) -> None:
        self._programs()
        w, (axis,) = self.w, self.shape.parallel
        w.line(f"first = pid * {axis.block}")
        everywhere = w.masked
        with w.block(f"if {' & '.join(self._inside(axis))}"):
            w.masked = everywhere - {axis}
            self._slide(axis)
            self.stores(self.shape.members)
            w.masked = everywhere
        with w.block("else"):
            self._segments()

    def _at_first(self, indices: Iterable[Expr]) -> list[str]:
        """Indices where a block begins."""
        w = self.w
        with w.apart():
            w.know(self.pieces.x, "first")
            texts = [w.index(i) for i in indices]
            return [text if text.isidentifier() else w.let(text) for text in texts]

    def _inside(self, axis: Axis) -> list[str]:
        """What has to be so of a block within one piece of all that is divided or compared."""
        found = [] if axis.start is None else ["(pid > 0)"]  # that one has the end
        if axis in self.w.masked:
            found.append(f"(first + {axis.block} <= {'xnumel' if axis.start is None else 'xtail'})")
        pieces = self.pieces
        divided = {ix.mod(*n.src): n.src[1].arg for n in pieces.divided if pieces.slope(n.src[0])}
        compared = dict.fromkeys(ix.sub(*n.src) for n in pieces.compared if pieces.slope(n.src[0]))
        for place, size in zip(self._at_first(divided), divided.values(), strict=True):
            found.append(f"({place} + {axis.block} <= {size})")
        for place in self._at_first(compared):
            found.append(f"(({place} >= 0) | ({place} + {axis.block} <= 0))")
        return found

    def _slide(self, axis: Axis) -> None:
        """All that is loaded, and chosen by its place."""
        w, pieces = self.w, self.pieces
        away = self._at_first(ix.sub(*n.src) for n in pieces.compared)
        for node, place in zip(pieces.compared, away, strict=True):
            by = "<" if node.op == "lt" else ">="
            w.know(node, w.let(f"tl.full([1], 0, tl.int1) | ({place} {by} 0)"))
        starts = self._at_first(n.src[0] for n in pieces.loads)
        for node, start in zip(pieces.loads, starts, strict=True):
            slope, from_ = pieces.slope(node.src[0]), self.pointer(node.arg)
            mask = "".join(w.operand(s) for s in node.src[1:])
            if slope and node.dtype.itemsize in SLID:
                end = f"{mask or None}, {axis.block}"
                w.know(node, w.let(f"tri_rows.slid_as_one({from_}, {start}, {end})"))
                continue
            lanes = f"tl.arange(0, {axis.block})" if slope else "tl.full([1], 0, tl.int32)"
            masked = f", {mask}, other=0" if mask else ""
            w.know(node, w.let(f"tl.load({from_} + ({start} + {lanes}){masked})"))
