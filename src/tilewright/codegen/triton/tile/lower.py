"""Statements: lines of a kernel with the values computed so far, so that each is computed once.

Every value is a tensor of the tile's rank, of extent one along the axes it does not depend on.
Index arithmetic is done in the kernel's own index type; an index that is used as a number becomes
an int64 first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewright.codegen.triton.analysis.quantise import Whole, is_far_from_zero, is_within, whole
from tilewright.codegen.triton.analysis.rounding import is_exact, rounded
from tilewright.codegen.triton.plan.tiling import Axis
from tilewright.codegen.triton.tile.barriers import Barriers
from tilewright.codegen.triton.tile.known import Known
from tilewright.codegen.triton.tile.ops import (
    BY_FAR,
    BY_SHARED,
    COARSE,
    OPS,
    PER_COUNTER,
    TYPE,
    below_block,
    cast,
    drawn,
    fp8_at_once,
    fp8_read,
    number,
    random_block,
)
from tilewright.errors import CodegenError
from tilewright.ir import index as ix
from tilewright.ir.expr import INDEX, Expr, loads, walk
from tilewright.ir.ops import INDEX_OPS, SURE

Support = frozenset[Axis]
NOWHERE: Support = frozenset()
RANDOM = ("rand", "randn", "randint")
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_LITERALS = ("add", "sub", "mul", *_COMPARE)  # beside a tensor, a plain number takes its type


@dataclass(frozen=True)
class Numerics:
    """How exactly operations of a kernel are computed, and which forms they have."""

    rounds_pairs: frozenset[Axis] = frozenset()  # along which floats can be rounded two at a time
    narrow: frozenset[Expr] = frozenset()  # roundings to bfloat16 that are left to LLVM
    fp8: Collection[torch.dtype] = ()  # types that the card itself converts
    made: Mapping[str, Expr] = field(default_factory=dict[str, Expr])  # values of its buffers
    coarse: Mapping[Expr, str] = field(default_factory=dict[Expr, str])
    """Text of operations whose last bits will not be seen."""
    joint: Mapping[Expr, tuple[str, Expr]] = field(default_factory=dict[Expr, tuple[str, Expr]])
    """Functions of functions, as one."""
    shares: frozenset[Expr] = frozenset()  # quotients by a sum that they are part of
    seldom: tuple[Expr, ...] = ()  # choices that are not made for most tiles
    valued: frozenset[Expr] = frozenset()  # symbols that are numbers, of 64 bits


@dataclass(frozen=True)
class Load:
    """A load from memory, of zeros where its mask does not hold."""

    place: str
    mask: str = ""
    policy: str = ""  # of the cache

    def __str__(self) -> str:
        masked = f", {self.mask}, other=0" if self.mask else ""
        return f"tl.load({self.place}{masked}{self.policy})"


@dataclass
class Blocks:
    """The first point of the block at hand, of axes."""

    starts: dict[Axis, str] = field(default_factory=dict[Axis, str])
    rounds: dict[Axis, tuple[str, int]] = field(default_factory=dict[Axis, tuple[str, int]])
    """Of a loop, with its largest block."""
    programs: dict[Axis, tuple[str, int]] = field(default_factory=dict[Axis, tuple[str, int]])
    """Of what each program has one of, with its largest block."""


class Writer:
    """Text with indentation, and one scope of known values per open block."""

    def __init__(self, axes: list[Axis], rank: int, index_type: str,
                 name: Callable[[Expr], str], load: Callable[[Expr], str | Load],
                 check: Callable[[str, Expr], None]) -> None:  # fmt: skip
        self.lines: list[str] = []
        self.barriers = Barriers(self.line)
        self.rank = rank
        self.index_type = index_type
        self.masked: set[Axis] = set()
        self.ends: dict[Axis, Support] = {}  # what else decides where an axis ends
        self.blocks = Blocks()
        self.ends_of_rows: dict[Axis, tuple[str, str]] = {}  # block and mask of a tile of these
        self.numerics = Numerics()
        self._keep_rows = False
        self._axis = {axis.var: axis for axis in axes if axis.loops}
        self._depth = 1
        self._known = Known()
        self._name, self._load, self._check = name, load, check
        self._count = 0
        self._support: dict[Expr, Support] = {}

    # ---- text

    def line(self, text: str) -> None:
        self.lines.append("    " * self._depth + text)

    @contextmanager
    def block(self, head: str) -> Generator[None]:
        self.line(head + ":")
        self._depth += 1
        with self.apart(), self.barriers.perhaps():
            yield
        self._depth -= 1

    @contextmanager
    def apart(self) -> Generator[None]:
        """What becomes known inside is forgotten after it."""
        self._known.enter()
        yield
        self._known.leave()

    def fresh(self, family: str = "t") -> str:
        self._count += 1
        return f"{family}{self._count}"

    def begin(self, program: str, early: bool) -> None:
        """The first lines of a kernel: which program this is, and where it may start `early`, that
        it waits for what was before it."""
        if early:
            self.line("tri.begin()")
        wide = ".to(tl.int64)" if self.index_type == "tl.int64" else ""
        self.line(f"pid = {program}{wide}")

    def let(self, text: str, family: str = "t") -> str:
        name = self.fresh(family)
        self.line(f"{name} = {text}")
        return name

    # ---- what is known

    def know(self, e: Expr, text: str) -> None:
        """From here on in this block, `e` is this text."""
        if e.op in ("reduce", "scan", "part") and self.known(e) is not None:
            self._known.forget(lambda other: other is not e and any(n is e for n in walk(other)))
        self._known.add(e, text)

    def forget(self, buffer: str) -> None:
        """From here on, what was computed from this buffer's old contents is not known."""
        self._known.forget(lambda e: any(n.arg == buffer for n in loads(e)))

    def known(self, e: Expr) -> str | None:
        return self._known.name(e)

    def know_blank(self, e: Expr, name: str) -> None:
        """The same of what was loaded with zeros outside the tile's axes."""
        self.know(e, name)
        self._known.blank.add(name)

    def is_blank(self, name: str) -> bool:
        return name in self._known.blank

    def stand_in(self, axis: Axis, made: Expr, block: str) -> Expr:
        """A variable that runs along an axis in blocks of its own; their masks end in `mask`."""
        self._axis[made] = axis
        self.ends_of_rows[axis] = block, f"{made.arg}mask"
        self.know(made, made.arg)
        return made

    @contextmanager
    def elsewhere(self, axes: Support, kept: dict[Expr, str]) -> Generator[None]:
        """In another tile along axes: what changes along them is not known there, but `kept` is,
        and takes up what becomes known."""
        common = self._known.where(lambda e: not axes & self.support(e))
        with self._known.only(dict(common), kept):
            yield

    def computes(self, **changed: Any) -> None:
        """From here on, operations are computed so."""
        self.numerics = replace(self.numerics, **changed)

    # ---- shapes

    def support(self, *exprs: Expr) -> Support:
        """The axes along which these change."""
        for node in walk(*exprs):
            if node in self._support:
                continue
            if node.op == "var":
                found = frozenset((self._axis[node],)) if node in self._axis else NOWHERE
                if any(a.start is not None for a in found):  # where it begins is the row's
                    found = self.covered(found)
            elif node.op == "ifloordiv" and self._stays(node) is not None:
                found = NOWHERE
            else:
                found = NOWHERE.union(*(self._support[s] for s in node.src))
            if node.op == "reduce" and not self._keep_rows:
                found = frozenset(a for a in found if not a.name.startswith("r"))
            self._support[node] = found
        return NOWHERE.union(*(self._support[e] for e in exprs))

    def folds_keep_rows(self, keep: bool) -> None:
        """Whether folds from here on are over serial loops: one result per point of a row."""
        self._keep_rows = keep
        self._support.clear()

    def covered(self, support: Support) -> Support:
        """With what the masks of these axes depend on."""
        return support.union(*(self.ends.get(a, NOWHERE) for a in support))

    def extents(self, support: Support) -> list[str]:
        """The lengths of a tile, one for each of its dimensions."""
        found = ["1"] * self.rank
        for axis in support:
            found[axis.dim] = self.ends_of_rows.get(axis, (axis.block, ""))[0]
        return found

    def shape(self, support: Support) -> str:
        return f"[{', '.join(self.extents(support))}]"

    def mask(self, support: Support, *conditions: str) -> str:
        """Where the tile is inside the axes, and the conditions hold; empty: everywhere."""
        names = sorted(support & self.masked, key=lambda a: a.name)
        return " & ".join([*(self.inside(a) for a in names), *conditions])

    def inside(self, axis: Axis) -> str:
        """The mask of an axis in the tile at hand."""
        return self.ends_of_rows.get(axis, ("", f"{axis.name}mask"))[1]

    def spread(self, text: str, have: Support, want: Support) -> str:
        """An index over a larger part of the tile, or over a part at all."""
        if have and want <= have:
            return text
        return f"tl.full({self.shape(want | have)}, 0, {self.index_type}) + {text}"

    # ---- values

    def value(self, e: Expr) -> str:
        """`e` as a name or a literal: emits what is needed for it, once."""
        stack = [e]
        while stack:
            node = stack[-1]
            if self.known(node) is not None:
                stack.pop()
                continue
            waiting = [s for s in self._needs(node) if self.known(s) is None]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            self._define(node)
        found = self.known(e)
        assert found is not None
        return found

    def operand(self, e: Expr) -> str:
        """`e` as a tensor of its own type: what operations and stores take."""
        text = self.value(e)
        if not is_index(e):
            return text
        if (known := self._known.wide_name(e)) is not None:
            return known
        if e in self.numerics.valued:
            wide = self.let(f"tl.full({self.shape(NOWHERE)}, 0, tl.int64) + {self._name(e)}")
            self._known.add_wide(e, wide)
            return wide
        if e.op in ("iadd", "imul") or not self.support(e):
            text = f"({self.spread(text, self.support(e), NOWHERE)})"
        wide = self.let(f"{text}.to(tl.int64)") if self.index_type != "tl.int64" else text
        self._known.add_wide(e, wide)
        return wide

    def index(self, e: Expr) -> str:
        """`e` in the index type, as part of an index."""
        match e.op:
            case "const":
                return _whole(e.arg)
            case "iadd":
                return "(" + " + ".join(self._parts(e)) + ")"
            case "imul":
                return "*".join(self._parts(e))
            case _ if is_index(e):
                return self.value(e)
            case _:
                return f"{self.value(e)}.to({self.index_type})"

    def _parts(self, e: Expr) -> list[str]:
        """Of a sum or product. Lanes of a loop count in 32 bits, also where these are too few for
        what is made of them."""
        parts = [self.index(s) for s in e.src]
        low, high = ix.bounds(e)
        if self.index_type == "tl.int64" and (low < -(2**31) or high >= 2**31):
            first = next((k for k, s in enumerate(e.src) if not s.is_const), None)
            if first is not None and not parts[first].isdigit():
                parts[first] = f"({parts[first]}).to(tl.int64)"
        return parts

    def _needs(self, node: Expr) -> tuple[Expr, ...]:
        if node.op in ("var", "const", "sym"):
            return ()
        if node.op in INDEX_OPS:
            return tuple(_atoms(node))
        if self._adds_seldom(node):
            return node.src[1], node.src[0].src[0]
        if node in self.numerics.joint:
            return self.numerics.joint[node][1:]
        if (found := whole(node)) is not None:
            return found.source.src if self._is_whole_quotient(found) else (found.source,)
        coarse = self.numerics.coarse.get(node)
        if node in self.numerics.seldom or (coarse is not None and "{1}" not in coarse):
            return node.src[:1]
        if drawn := _compared(node):
            return drawn.src
        if (source := self._rounded(node)) is not None:
            return (source,)
        if node.op in ("load", "index"):
            place = node.src[node.op == "index"]
            rest = node.src[1:] if node.op == "load" else node.src[:1]
            inside = tuple(_atoms(place)) if place.op in ("iadd", "imul") else (place,)
            return (*inside, *rest)
        return node.src

    def _define(self, node: Expr) -> None:
        match node.op:
            case "const":
                one = self.shape(NOWHERE)
                literal = number(node.arg, node.dtype)
                if literal == "-0.0":  # Triton takes it for zero
                    self.know(node, f"(-tl.full({one}, 0.0, {TYPE[node.dtype]}))")
                else:
                    self.know(node, f"tl.full({one}, {literal}, {TYPE[node.dtype]})")
            case "sym" if node.dtype == INDEX:
                name = self._name(node)
                narrow = node in self.numerics.valued and self.index_type != "tl.int64"
                self.know(node, f"{name}.to({self.index_type})" if narrow else name)
            case "sym":
                filled = f"tl.full({self.shape(NOWHERE)}, 0, {TYPE[node.dtype]})"
                self.know(node, self.let(f"{filled} + {self._name(node)}"))
            case "var":
                self.know(node, self._name(node))
            case "iadd" | "imul":
                self.know(node, self.let(self.index(node)))
            case "ifloordiv" | "imod" | "imin" | "imax":
                self.know(node, self.let(self._index_op(node)))
            case "load":
                made = self._load(node)
                if self.known(node) is None:  # not yet with another
                    blank = isinstance(made, Load) and made.mask and not made.policy
                    (self.know_blank if blank else self.know)(node, self.let(str(made)))
            case "index":
                self.know(node, self._checked(node))
            case _ if node in self.numerics.seldom or self._adds_seldom(node):
                self._branch(node)
            case op if op in OPS:
                self.know(node, self.let(self._operation(node)))
            case op:
                raise CodegenError(f"no Triton for {op}; it must be folded before its use")

    def _operation(self, node: Expr) -> str:
        if (
            node.op in _COMPARE
            and all(is_index(s) or s.is_const for s in node.src)
            and any(is_index(s) for s in node.src)
        ):
            text = OPS[node.op](node, *(f"({self.index(s)})" for s in node.src))
            return text if self.support(node) else self._lifted(text, "tl.int1")
        if node.op == "cast" and is_index(node.src[0]):
            source = node.src[0]
            text = f"({self.spread(self.index(source), self.support(source), NOWHERE)})"
            return cast(text, INDEX if node.dtype != INDEX else torch.int32, node.dtype)
        if node.op in RANDOM and (block := self._drawn_at_once(node)):
            return block
        if (drawn := _compared(node)) and (block := self._drawn_at_once(drawn, node.src[1].arg)):
            return block
        if (source := self._rounded(node)) is not None:
            text = self.operand(source)
            return text if is_exact(source) else f"tri.rounded({text})"
        if node in self.numerics.joint:
            return self.numerics.joint[node][0].format(self.operand(self.numerics.joint[node][1]))
        if node in self.numerics.coarse:
            text = self.numerics.coarse[node]
            if text == COARSE["div"] and self._is_shared(node.src[1], node):
                text = BY_FAR if is_far_from_zero(node.src[1], self.numerics.made) else BY_SHARED
            return text.format(*(self.operand(s) for s in self._needs(node)))
        if (found := whole(node)) is not None:
            return self._whole(found)
        if node.op == "cast" and node.src[0].dtype in self.numerics.fp8:
            return fp8_read(self.operand(node.src[0]), node.src[0].dtype, node.dtype)
        if node.op == "cast" and node.dtype in self.numerics.fp8:
            source = node.src[0]
            return fp8_at_once(self.operand(source), source, node.dtype, self.numerics.made)
        if node.op == "div" and node.dtype == torch.float32 and self._is_shared(node.src[1], node):
            far = is_far_from_zero(node.src[1], self.numerics.made)
            name = "div_by_far" if far else "div_by_shared"
            name = "share" if node in self.numerics.shares else name
            return f"tri_rows.{name}({', '.join(self.operand(s) for s in node.src)})"
        plain = node.op in _LITERALS and node.src[0].dtype in (torch.float32, torch.int32)
        operands: list[str] = []
        for k, s in enumerate(node.src):
            other = node.src[1 - k] if plain else s
            if plain and s.is_const and not other.is_const and str(s.arg) != "-0.0":
                text = number(s.arg, s.dtype)
                operands.append(f"({text})" if text.startswith("-") else text)
            else:
                operands.append(self.operand(s))
        return OPS[node.op](node, *operands)

    def _is_whole_quotient(self, found: Whole) -> bool:
        """Whether an integer is made of floats that are divided by one they have in common."""
        e = found.source
        shared = e.op == "div" and e not in self.numerics.coarse and self._is_shared(e.src[1], e)
        return shared and self.known(e) is None

    def _whole(self, found: Whole) -> str:
        within = is_within(found, self.numerics.made)
        if not self._is_whole_quotient(found):
            return found.text(f"tri.nearest({self.operand(found.source)})", within)
        operands = ", ".join(self.operand(s) for s in found.source.src)
        far = is_far_from_zero(found.source.src[1], self.numerics.made)
        return found.text(f"tri_rows.nearest_quotient({operands}, {far}, {within})", within)

    def _is_shared(self, e: Expr, node: Expr) -> bool:
        """Whether many elements of a node have this value in common."""
        return self.support(e) < self.support(node)

    def _rounded(self, node: Expr) -> Expr | None:
        """The floats that a node takes through bfloat16: if that changes none of them, or if two go
        at a time, where one at a time would go through the unit for exponentials and the like."""
        source = rounded(node)
        if source is None or is_exact(source):
            return source
        how = self.numerics
        paired = how.rounds_pairs & self.support(node) and node.src[0] not in how.narrow
        return source if paired else None

    def _drawn_at_once(self, node: Expr, limit: float | None = None) -> str:
        """Random numbers along the last axis they change along, if their places follow each other
        and every block begins with a counter; else nothing. With a limit, which are below it."""
        place, count = node.src[1], PER_COUNTER[drawn(node)]
        axis = max(self.support(place), key=lambda a: a.dim, default=None)
        if (
            axis is None
            or axis not in self.blocks.starts
            or ix.coefficient(place, axis.var) is not ix.ONE
        ):
            return ""
        rest = ix.sub(place, axis.var)
        if axis in self.support(rest, *node.src[2:]) or ix.mod(rest, count) is not ix.ZERO:
            return ""
        where = ", ".join(":" if d == axis.dim else "None" for d in range(self.rank))
        lanes = f"tl.arange(0, {axis.block} // {count})" + (f"[{where}]" if self.rank > 1 else "")
        first = self.index(ix.floordiv(rest, count))
        counter = self.let(f"({first}) + ({self.blocks.starts[axis]}) // {count} + {lanes}")
        seed, *bounds = (self.operand(s) for s in (node.src[0], *node.src[2:]))
        if limit is not None:
            return below_block(self.shape(self.support(place)), counter, seed, limit)
        return random_block(node, self.shape(self.support(place)), counter, seed, *bounds)

    def _adds_seldom(self, node: Expr) -> bool:
        choices = self.numerics.seldom
        return node.op == "add" and node.src[0] in choices and node.src[0].src[2].arg == 0

    def _branch(self, node: Expr) -> None:
        """A choice whose first value is computed for tiles with some of it, or a sum with it."""
        choice = node if node in self.numerics.seldom else node.src[0]
        chosen, other = self.operand(choice.src[0]), number(choice.src[2].arg, node.dtype)
        tile = self.shape(self.covered(self.support(node)))
        before = f"tl.full({tile}, {other}, {TYPE[node.dtype]})"
        if node is not choice:
            before = f"tl.broadcast_to({self.operand(node.src[1])}, {tile})"
        made = self.let(before)
        rows = " * ".join(a.block for a in self.support(choice.src[0]))
        with self.block(f"if tri.any_of({chosen})"):
            value = self.operand(choice.src[1])  # of a tile of one row all is chosen
            value = f"({value} if {rows} == 1 else tl.where({chosen}, {value}, {other}))"
            self.line(f"{made} = {value}" if node is choice else f"{made} = {made} + {value}")
        self.know(node, made)

    def _lifted(self, text: str, dtype: str) -> str:
        """A scalar as a tensor of the tile's rank."""
        return f"tl.full({self.shape(NOWHERE)}, 0, {dtype}) | {text}"

    def _stays(self, node: Expr) -> Axis | None:
        """The axis of a loop each block of which lies in one piece of the length divided by: the
        quotient is one number, and the remainder follows the lanes."""
        axis = self._axis.get(node.src[0])
        length = ix.value_of(node.src[1])
        blocks = (
            self.blocks.rounds | self.blocks.programs
            if node.op == "ifloordiv"
            else self.blocks.rounds
        )
        if axis not in blocks or length is None or length % blocks[axis][1]:
            return None
        return axis if node.src[0] is axis.var else None  # not lanes that are two for each point

    def _index_op(self, node: Expr) -> str:
        a, b = (f"({self.index(s)})" for s in node.src)
        if node.op in ("ifloordiv", "imod") and (axis := self._stays(node)) is not None:
            first, _ = self.blocks.rounds.get(axis) or self.blocks.programs[axis]
            first = f"tl.full({self.shape(NOWHERE)}, 0, {self.index_type}) + {first}"
            if node.op == "ifloordiv":
                return f"({first}) // {b}"
            return f"({first}) % {b} + {axis.name}base"
        if (axis := self.wraps(node)) is not None:
            return f"tri.wrapped(pid * {axis.block}, {b}, {axis.block})"
        if node.op in ("imin", "imax"):
            return f"tl.{node.op[1:]}imum({a}, {b})"
        if ix.known_nonneg(node.src[0]):
            by = "//" if node.op == "ifloordiv" else "%"
            if self.index_type == "tl.int32" and ix.value_of(node.src[1]) is not None:
                return f"({a}.to(tl.uint32) {by} {b}).to(tl.int32)"  # nothing to do for a sign
            return f"{a} {by} {b}"
        return f"tri.index_{'floordiv' if node.op == 'ifloordiv' else 'mod'}({a}, {b})"

    def wraps(self, node: Expr) -> Axis | None:
        """The one axis of a tile, where a node is what its points leave when divided by a number
        that pieces of eight are not parts of; also what points beyond its end leave."""
        if node.op != "imod" or self.rank > 1:
            return None
        size = ix.value_of(node.src[1]) or 0
        axis = next((a for a in self.numerics.rounds_pairs if a.var is node.src[0]), None)
        if axis is None or size < 8 or size % 8 == 0:
            return None
        return axis if self.known(axis.var) == f"{axis.name}base" else None

    def _checked(self, node: Expr) -> str:
        place, size = self.operand(node.src[0]), self.index(node.src[1])
        if node.arg == SURE:
            return self.let(f"{place}.to({self.index_type})")
        ok = self.let(f"({place} >= 0) & ({place} < {size})")
        self._check(f"({ok} == 0)", node)
        return self.let(f"tl.where({ok}, {place}, 0).to({self.index_type})")


def _whole(number: int) -> str:
    """Triton takes what needs 32 bits for unsigned, and that divides nothing signed."""
    return f"tl.full([], {number}, tl.int64)" if number.bit_length() == 32 else str(number)


def _compared(node: Expr) -> Expr | None:
    """The uniform numbers of which a node says which are below a constant."""
    if node.op != "lt" or not node.src[1].is_const or node.src[0].op != "rand":
        return None
    known = node.src[0].dtype == torch.float32 and 0 < node.src[1].arg < 1
    return node.src[0] if known else None


def is_index(e: Expr) -> bool:
    """Whether the value is computed in the kernel's index type."""
    return e.op in INDEX_OPS or e.op in ("var", "index") or (e.op == "sym" and e.dtype == INDEX)


def _atoms(node: Expr) -> Iterator[Expr]:
    """What the index text of a node is made of, below its sums and products."""
    for source in node.src:
        if source.op in ("iadd", "imul"):
            yield from _atoms(source)
        elif source.op != "const":
            yield source
