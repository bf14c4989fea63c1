"""What a template leaves open: sizes, loads of the operands' tiles, and the stores of the result.

A template is Triton text with hooks. It says which tile a program has (`m`, `n` and, of a batch,
`batch`) and walks `k` in blocks that start at `k0`; the hooks write everything that depends on the
problem. An index that is affine in `k` is split, so that only a scalar changes from block to block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from tilewright.codegen.triton.analysis.index_width import narrow, valued
from tilewright.codegen.triton.analysis.precision import coarse
from tilewright.codegen.triton.plan.config import power
from tilewright.codegen.triton.plan.tiling import Axis
from tilewright.codegen.triton.tile.kernel import BAD_INDEX
from tilewright.codegen.triton.tile.lower import Writer
from tilewright.codegen.triton.tile.ops import FP8_LARGEST, SIGNATURE, TYPE, cast
from tilewright.gemm import descriptors, parts
from tilewright.gemm.descriptors import Matrix, Words
from tilewright.gemm.exact import unrounded
from tilewright.gemm.problem import SCALED, GemmProblem, takes_tf32
from tilewright.gemm.provider import Argument
from tilewright.gemm.row_hooks import MOST_HELD, RowWalk, folds
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, make, rebuild, rewrite, substitute, var, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Store
from tilewright.ir.show import number

NAMES = ("a", "b", "a2", "b2")  # of the operands' tiles in a template's text
WORKSPACE, COUNTERS = "workspace", "counters"
FEWEST_K, FEWEST_K_BLACKWELL = 17, 32  # of a product of eight-bit floats
DESCRIPTORS = descriptors.MOST * descriptors.ROOM  # float32 elements of a program's workspace
SMALL = (torch.float16, torch.bfloat16)
BYTES: dict[torch.dtype, tuple[str, tuple[int, int]]] = {
    torch.int8: ("", (0, 0)), torch.uint8: ("", (0, 0)),
    torch.float8_e5m2: ("tl.float8e5", (8, 0)), torch.float8_e4m3fn: ("tl.float8e4nv", (8, 9)),
}  # fmt: skip
"""Eight-bit types that cards turn into sixteen-bit floats, and since which of them."""
UNITS = {torch.float8_e5m2: "fp8e5", torch.float8_e4m3fn: "fp8e4nv"}
"""Eight-bit floats that matrix units multiply, as Triton names them."""
_EXACT = frozenset(("add", "sub", "mul", "neg", "abs", "min", "max", "where", "cast", "sqrt", "eq",
                    "ne", "lt", "le", "gt", "ge", "floor", "ceil", "trunc", "round"))  # fmt: skip
"""Operations whose value at zero is the same on the card as here."""


@dataclass(frozen=True)
class Tile(Axis):
    """An axis whose block is one of the template's constants."""

    constant: str = ""

    @property
    def block(self) -> str:
        return self.constant


@dataclass(frozen=True)
class Shape:
    """What a rendering depends on beside the problem: its blocks, and where they fit exactly."""

    block_m: int
    block_n: int
    block_k: int
    wide: bool = False
    tma: bool = False  # operands are read through tensor descriptors
    rows: bool = False  # without the matrix unit: elements are multiplied as they are added up
    described: bool = False  # results are stored through them
    pieces: int = 1  # along n, in which a block of the result is stored
    split: bool = False  # the loop over k is shared out

    @property
    def piece(self) -> str:
        """The constant that is a piece's columns."""
        return "BLOCK_N" if self.pieces == 1 else "PIECE_N"


@dataclass
class Text:
    """The lines of one hook, at no indentation: those before the loop over k, those inside."""

    before: list[str] = field(default_factory=list[str])
    inside: list[str] = field(default_factory=list[str])


class _Writer(Writer):
    """With names that are unique in the whole kernel."""

    names: Callable[[], int]
    bytes: Mapping[torch.dtype, str]  # eight-bit types to the card's own, if not the same
    inline: bool = False  # texts are not given names

    def let(self, text: str, family: str = "t") -> str:
        return f"({text})" if self.inline else super().let(text, family)

    def fresh(self, family: str = "t") -> str:
        return f"{family}{self.names()}"

    def _operation(self, node: Expr) -> str:
        """A byte becomes a sixteen-bit float at once: each has a value for every byte's."""
        if node.op != "cast" or node.dtype not in SMALL or node.src[0].dtype not in self.bytes:
            return super()._operation(node)
        kind = self.bytes[node.src[0].dtype]
        text = self.operand(node.src[0])
        text = f"{text}.to({kind}, bitcast=True)" if kind else text
        return f"{text}.to({TYPE[node.dtype]})"

    def taken(self) -> list[str]:
        """The lines so far, which are then no longer here."""
        found = [line.removeprefix("    ") for line in self.lines]
        self.lines.clear()
        return found

    def inner(self) -> None:
        """From here on, what is computed is computed again in every round of the loop."""
        self._known.enter()


class Hooks:
    """The text of one problem, for blocks of one shape."""

    def __init__(self, problem: GemmProblem, shape: Shape) -> None:
        self.problem = problem
        self.shape = shape
        self.pointers: dict[str, str] = {}
        self.numbers: dict[Expr, str] = {}
        self.checked = False
        self._count = 0
        self._operands: dict[tuple[str, int | None], Text] = {}
        self.assume = self._assumed()
        self.wide = shape.wide or self.assume is None
        self.index_type = "tl.int64" if self.wide else "tl.int32"
        self.valued = valued(self._exprs(), problem.epilogue)
        self.eights = _typed(problem)
        self.m = Tile("m", (problem.m,), 0, "BLOCK_M")
        self.n = Tile("n", (problem.n,), 1, "BLOCK_N")

    # ---- facts

    def _exprs(self) -> list[Expr]:
        p = self.problem
        found = [o.value for o in p.operands]
        found += [] if p.bias is None or p.beta == 0 else [p.bias.value]
        found += [s.value for s in p.scales]
        found += [] if p.ends is None else [p.ends.value]
        found += [] if p.factor is None else [p.factor]
        return [*found, p.product, *(e for s in p.epilogue for e in s.exprs)]

    def _assumed(self) -> list[Expr] | None:
        p = self.problem
        names = {*p.reads, *p.writes}
        largest = max(self.shape.block_m, self.shape.block_n, self.shape.block_k)
        return narrow(self._exprs(), p.sizes, [b for b in p.buffers if b.name in names], largest)

    @property
    def grouped(self) -> Expr | None:
        """The loop that groups are parts of."""
        p = self.problem
        if p.ends is None:
            return None
        return p.m if p.batch not in p.place else p.k

    def is_even(self, v: Expr) -> bool:
        """Whether blocks end where the loop does, for sure."""
        if v is self.grouped:
            return False
        block = {self.problem.m: self.shape.block_m, self.problem.n: self.shape.block_n}
        size = ix.value_of(v.src[0])
        return size is not None and size % block.get(v, self.shape.block_k) == 0

    # ---- names

    def _name(self, e: Expr) -> str:
        if e.op == "var":
            return str(e.arg)
        return self.numbers.setdefault(e, f"n{len(self.numbers)}")

    def pointer(self, buffer: str) -> str:
        return self.pointers.setdefault(buffer, f"p_{buffer}")

    def _next(self) -> int:
        self._count += 1
        return self._count

    def writer(self, axes: Sequence[Axis], load: Callable[[Expr], str]) -> _Writer:
        def check(bad: str, node: Expr) -> None:
            self.checked = True
            mask = w.mask(w.support(node), bad)
            w.line(f"tri.report(err, {mask}, {BAD_INDEX})")

        w = _Writer(list(axes), 2, self.index_type, self._name, load, check)
        w.names = self._next
        w.bytes = {d: kind for d, (kind, since) in BYTES.items()
                   if self.problem.target.capability >= since}  # fmt: skip
        fp8 = FP8_LARGEST if self.problem.target.capability >= (8, 9) else ()
        w.computes(fp8=fp8, valued=self.valued)
        w.masked = {a for a in axes if a.name in ("m", "n") and not self.is_even(a.var)}
        w.know(self.problem.batch, "batch")
        return w

    # ---- hooks

    def size(self, v: Expr) -> str:
        """The size of a loop, as one text: there is no line before it for a part of it."""
        w = self.writer([], lambda e: "")
        w.inline = True
        return w.index(v.src[0])

    def tile(self) -> list[str]:
        """The rows and columns of block (`pid_m`, `pid_n`), and which of them exist."""
        p = self.problem
        rows = "first" if self.grouped is p.m else "pid_m * BLOCK_M"
        lines = [
            f"m = {rows} + tl.arange(0, BLOCK_M)[:, None]",
            "n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]",
        ]
        last = "end" if self.grouped is p.m else "M"
        lines += [] if self.is_even(p.m) else [f"mmask = m < {last}"]
        return lines + ([] if self.is_even(p.n) else ["nmask = n < N"])

    def operand(self, name: str, row: int | None = None) -> Text:
        """The loads of an operand's tile (`a`, `b`), rows by columns. With `row` it is that row of
        the left operand alone (`a_0`), lying along the rows of the right one."""
        if (name, row) not in self._operands:
            position = NAMES.index(name)
            if self.shape.tma:
                return self._operands.setdefault((name, row), self._descriptor(position))
            value = self.problem.operands[position].value
            if self.shape.rows and self.problem.is_block_scaled:
                wide = make("cast", torch.float32, (value,), torch.float32)
                value = make("mul", torch.float32, (wide, self.problem.scales[position].value))
            sums = [n.src[0] for n in self.sums] if position == 0 else []
            if row is not None:
                here = {self.problem.m: const(row)}
                sums = [substitute(e, here) for e in sums]
                made = _Operand(self, substitute(value, here), f"{name}_{row}", [], 0, sums)
            elif position % 2:
                made = _Operand(self, value, name, [self.n], 0)
            else:
                made = _Operand(self, value, name, [self.m], 1, sums)
            self._operands[name, row] = made.text()
        return self._operands[name, row]

    def _descriptor(self, position: int) -> Text:
        """The card fetches the operand's tiles by itself; what is outside the operand is zero."""
        name, view = NAMES[position], self.problem.operands[position].view
        found = descriptors.matrix(view)
        assert isinstance(found, Matrix)
        words = self._words(name, found, (("m", "k"), ("k", "n"))[position % 2])
        made = words.made(found.turned, self.size(self.problem.batch))
        return Text([made], [f"{name} = {words.loaded(found.turned)}"])

    def _words(self, name: str, m: Matrix, loops: tuple[str, ...]) -> Words:
        w = self.writer([], lambda e: "")
        start = "" if m.start is ix.ZERO else f" + {w.index(m.start)}"
        lead = ("batch",) if len(m.sizes) == 3 else ()
        steps = tuple(w.index(step) for step in m.steps)
        return Words(name, f"{self.pointer(m.buffer)}{start}", (*lead, *loops), steps, self.wide)

    def end(self, group: str) -> str:
        """The address of where a group ends, or a block of groups."""
        ends = self.problem.ends
        assert ends is not None
        (step,), offset = ends.view.stride, ends.view.offset
        w = self.writer([], lambda e: "")
        start = "" if offset is ix.ZERO else f" + {w.index(offset)}"
        return f"{self.pointer(ends.view.buffer)}{start} + ({group}) * {w.index(step)}"

    def sinks(self) -> list[str]:
        """The descriptors that results are stored through."""
        lines: list[str] = []
        for store in descriptors.stores(self.problem) if self.shape.described else ():
            found, words = self.sink(store)
            lines.append(words.made(found.turned, self.size(self.problem.batch), self.shape.piece))
        if self.shape.pieces > 1:
            lines.insert(0, f"PIECE_N: tl.constexpr = BLOCK_N // {self.shape.pieces}")
        return lines

    def sink(self, store: Store) -> tuple[Matrix, Words]:
        found = descriptors.written(self.problem, store)
        assert isinstance(found, Matrix)
        return found, self._words(f"to_{store.buffer}", found, ("m", "n"))

    def dot(self, total: str, left: str, right: str) -> list[str]:
        """A block of k is multiplied and added up."""
        p = self.problem
        if p.is_block_scaled:
            lines, scale = self._scales()
            return [*lines, f"{total} += tl.dot({left}, {right}) * {scale}"]
        exact = self.eights and not p.fast
        total_type = accumulator(p)
        if not total_type.is_floating_point:  # Triton before 3.7 has to be told
            return [f"{total} = tl.dot({left}, {right}, {total}, out_dtype={TYPE[total_type]})"]
        more = f', input_precision="{"tf32" if allow_tf32(p) else "ieee"}"'
        more += f", max_num_imprecise_acc={min(SCALED, self.shape.block_k)}" if exact else ""
        return [f"{total} = tl.dot({left}, {right}, {total}{more})"]

    def _scales(self) -> tuple[list[str], str]:
        """What the block of k that starts at `k0` is multiplied by: all of it by the same."""
        p, k0 = self.problem, f"(tl.full([1, 1], 0, {self.index_type}) + k0)"
        w = self.writer([self.m, self.n], lambda node: self.read(w, node))
        for v, text in ((p.m, "m"), (p.n, "n"), (p.k, k0)):
            w.know(v, text)
        scale = " * ".join(w.operand(s.value) for s in p.scales)
        return w.taken(), scale

    def read(self, w: _Writer, node: Expr) -> str:
        """A load of the tile at hand."""
        support = w.support(*node.src)
        place = w.spread(w.index(node.src[0]), w.support(node.src[0]), support)
        place = f"{self.pointer(node.arg)} + ({place})"
        return self.loaded(node, place, w.mask(support, *(w.operand(s) for s in node.src[1:])))

    def loaded(self, node: Expr, place: str, mask: str, typed: bool = False) -> str:
        """A load; bytes where not asked for `typed` elements, which the matrix units multiply."""
        eight = node.arg in self.eights
        masked = f", {mask}, other={0.0 if eight else 0}" if mask else ""
        text = f"tl.load({place}{masked})"
        return f"{text}.to(tl.uint8, bitcast=True)" if eight and not typed else text

    def store(self, total: str) -> list[str]:
        """From the accumulator to what is in memory, in pieces along n."""
        pieces = self.shape.pieces
        if pieces == 1:
            return _Epilogue(self, self.n).lines(total)
        names, lines = [total], list[str]()
        while len(names) < pieces:
            columns = f"BLOCK_N // {2 * len(names)}"
            halves = [(f"{name}0", f"{name}1") for name in names]
            for name, (low, high) in zip(names, halves, strict=True):
                turned = f"tl.permute(tl.reshape({name}, (BLOCK_M, 2, {columns})), (0, 2, 1))"
                lines.append(f"{low}, {high} = tl.split({turned})")
            names = [name for pair in halves for name in pair]
        axis = Tile("n", (self.problem.n,), 1, self.shape.piece)
        for k, name in enumerate(names):
            lines.append(f"n = {self._column(k)} + tl.arange(0, PIECE_N)[None, :]")
            lines += [] if self.is_even(self.problem.n) else ["nmask = n < N"]
            lines += _Epilogue(self, axis, self._column(k)).lines(name)
        return lines

    def _column(self, k: int) -> str:
        """The first column of a piece."""
        return f"pid_n * BLOCK_N + {k} * PIECE_N" if k else "pid_n * BLOCK_N"

    @cached_property
    def sums(self) -> list[Expr]:
        """What is summed over k beside the product, to scale its rows."""
        return [] if self.problem.factor is None else folds(self.problem.factor)

    def row_sum(self, j: int) -> str:
        """One of these, of each row at hand."""
        if not self.shape.rows:
            return f"tl.reduce(row_a{j}, 1, tri.add, keep_dims=True)"
        rows = ix.value_of(self.problem.m.src[0])
        assert rows is not None
        made = "tl.full([BLOCK_M, 1], 0.0, tl.float32)"
        for row in range(rows):
            one = f"tl.reduce(row_a_{row}{j}, 0, tri.add, keep_dims=True)"
            made = f"tl.where(m == {row}, {one}, {made})"
        return made

    def gather(self, total: str) -> list[str]:
        """A share of the sum goes to the workspace; `arrived` says how many were there before."""
        workspace, counters = self.pointer(WORKSPACE), self.pointer(COUNTERS)
        own = f" + grid_m * grid_n * (SPLIT_K * {DESCRIPTORS})" if self.shape.tma else ""
        size = "SPLIT_K * BLOCK_M * BLOCK_N"
        size += f" + SPLIT_K * BLOCK_M * {len(self.sums)}" if self.sums else ""
        rows = [f"tl.store({self._of_rows('part', j)}, {self.row_sum(j)})"
                for j in range(len(self.sums))]  # fmt: skip
        return [
            "lanes = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]",
            f"shares = {workspace}{own} + spot.to(tl.int64) * ({size})",
            f"tl.store(shares + part * (BLOCK_M * BLOCK_N) + lanes, {total})",
            *rows,
            "tl.debug_barrier()  # all threads have stored before one of them says so",
            f'arrived = tl.atomic_add({counters} + spot, 1, sem="acq_rel")',
        ]

    def total(self, total: str) -> list[str]:
        """The shares of all, always added in the same order; the counter is zero again."""
        share = 'tl.load(shares + each * (BLOCK_M * BLOCK_N) + lanes, cache_modifier=".cg")'
        return [
            f"tl.store({self.pointer(COUNTERS)} + spot, 0)",
            f"{total} = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)",
            *(f"row{j} = tl.full((BLOCK_M, 1), 0, tl.float32)" for j in range(len(self.sums))),
            "for each in range(SPLIT_K):",
            f"    {total} += {share}",
            *(f'    row{j} += tl.load({self._of_rows("each", j)}, cache_modifier=".cg")'
              for j in range(len(self.sums))),
        ]  # fmt: skip

    def _of_rows(self, part: str, j: int) -> str:
        """Where a share has the sums of its rows: behind all shares."""
        lanes = "tl.arange(0, BLOCK_M)[:, None]"
        at = f"({part} * {len(self.sums)} + {j}) * BLOCK_M"
        return f"shares + SPLIT_K * BLOCK_M * BLOCK_N + {at} + {lanes}"

    # ---- the whole

    @property
    def names(self) -> list[str]:
        """The parameters of the text; in the order of what they stand for, so that two kernels of
        one problem can stand in for each other."""
        numbers = sorted(self.numbers, key=lambda e: e.arg.name)
        return [*(self.pointers[b] for b in sorted(self.pointers)),
                *(self.numbers[e] for e in numbers)]  # fmt: skip

    @property
    def params(self) -> list[tuple[Argument, str]]:
        """The arguments in the order of the text, with their Triton types."""
        found: list[tuple[Argument, str]] = []
        for buffer in sorted(self.pointers):
            dtype = torch.float32 if buffer == WORKSPACE else torch.int32
            if buffer not in (WORKSPACE, COUNTERS):
                dtype = self.problem.memory[buffer].dtype
            kind = f"*{UNITS[dtype]}" if buffer in self.eights else SIGNATURE[dtype]
            found.append((("ptr", buffer), kind))
        for e in sorted(self.numbers, key=lambda e: e.arg.name):
            if e.dtype == torch.float64:
                found.append((("float", e.arg.name), "fp64"))
            else:
                kind = "i64" if self.wide or e in self.valued else "i32"
                found.append((("int", e.arg.name), kind))
        return found


class _Operand:
    """The loads of one tile: `across` are the axes besides k, which is dimension `dim`.

    Where neighbours along an axis are unpacked from one element of memory, that is loaded once: a
    tile of each of them is made, and these are put together, neighbour by neighbour.
    """

    def __init__(self, hooks: Hooks, value: Expr, name: str, across: list[Axis], dim: int,
                 sums: Sequence[Expr] = ()) -> None:  # fmt: skip
        p = hooks.problem
        self.hooks, self.name, self.dim = hooks, name, dim
        whole = narrowed(value)
        self.is_plain = whole.op == "load"
        packed = parts.packed(whole, [p.k, *(a.var for a in across)])
        self.along, self.count = packed or (p.k, 1)
        self.of_k = self.count if self.along is p.k else 1  # of one element, along k
        unit, self.values = parts.unpacked(whole, *packed) if packed else (p.k, [whole])
        self.values = [unrounded(v) for v in self.values]
        self.depth = unit if self.of_k > 1 else p.k  # the loop over k, in elements of memory
        block = f"BLOCK_K // {self.of_k}" if self.of_k > 1 else "BLOCK_K"
        self.k = Tile(f"k{name}", (self.depth,), dim, block)
        lanes = var(f"lane_{name}", const(hooks.shape.block_k // self.of_k))
        self.lane = Tile(f"lane_{name}", (lanes,), dim, block)
        self.across = across
        if packed and self.of_k == 1:
            (axis,) = across
            constant = f"{axis.block} // {self.count}"
            self.across = [Tile(f"{axis.name}{name}", (unit,), axis.dim, constant)]
        self.axes = [*self.across, self.k]
        held = max(hooks.shape.block_k, MOST_HELD // hooks.shape.block_m)
        held = min(held, power(ix.likely(p.row.src[0])))
        row = Tile("row", (p.row,), 1, str(held))
        self.sums = list(sums)  # over k, beside the product
        self.w = w = hooks.writer([*self.axes, self.lane, row], self._load)
        self.walk = RowWalk(w, row, held, hooks.wide)
        self.even = hooks.is_even(p.k)
        if not self.even:
            w.masked.add(self.k)
        # where tiles start, how far the one at the first k of a block is, and lanes
        self.split: dict[Expr, tuple[str, Expr, str]] = {}

    def text(self) -> Text:
        w, k, lane = self.w, self.depth, self.lane.name
        per = f" // {self.of_k}" if self.of_k > 1 else ""
        where = "[None, :]" if self.k.dim else "[:, None]"
        wide = ".to(tl.int64)" if self.hooks.wide else ""
        w.line(f"{lane} = tl.arange(0, {self.k.block}){where}{wide}")
        w.know(self.lane.var, lane)
        self._begin_across()
        self.walk.write(self.values)
        inside = set(walk(*(e for n in folds(*self.values) for e in n.src)))
        for node in walk(*self.values, *self.sums):
            if node in inside and self.hooks.problem.row in free_vars(node):
                continue
            if node.op == "load" and k in free_vars(node):
                self._divide(node)
            elif k not in free_vars(node) and (node.op == "load" or node.op in TABLE):
                w.value(node)
        for j, _ in enumerate(self.sums):
            shape = w.shape(frozenset(self.axes))
            w.line(f"row_{self.name}{j} = tl.full({shape}, 0.0, tl.float32)")
        before = w.taken()
        w.inner()
        self.first = f"k0{per}"
        w.know(k, f"({self.first} + {lane})")
        w.blocks.rounds[self.k] = self.first, self.hooks.shape.block_k // self.of_k
        w.line(f"{self.k.name}base = {lane}")
        if not self.even:
            w.line(f"{self.k.name}mask = {lane} < (K - k0){per}" if per else
                   f"{self.k.name}mask = {lane} < K - k0")  # fmt: skip
        tiles = [self._tile(value) for value in self.values]
        w.line(f"{self.name} = {self._together(tiles)}")
        for j, value in enumerate(self.sums):
            w.line(f"row_{self.name}{j} += {self._tile(value)}")
        return Text(before, w.taken())

    def _begin_across(self) -> None:
        """Where the tile is along the other axis."""
        w = self.w
        for axis in self.across:
            if axis.var.arg == axis.name:  # as the template has it
                w.know(axis.var, axis.name)
                continue
            of = "n" if axis.dim else "m"
            lanes = f"tl.arange(0, {axis.block}){'[None, :]' if axis.dim else '[:, None]'}"
            w.line(f"{axis.name} = pid_{of} * ({axis.block}) + {lanes}")
            w.know(axis.var, axis.name)
            if not self.hooks.is_even(self.along):
                w.line(f"{axis.name}mask = {axis.name} < {of.upper()} // {self.count}")
                w.masked.add(axis)

    def _tile(self, value: Expr) -> str:
        """A value for each element of the tile, zero beyond the last k."""
        w = self.w
        text = w.operand(value)
        if not set(self.axes) <= w.support(value):
            text = f"tl.broadcast_to({text}, {w.shape(frozenset(self.axes))})"
        if not self.even and not keeps_zero(value, self.depth):
            text = f"tl.where({self.k.name}mask, {text}, 0)"
        if value.dtype in UNITS and not self.is_plain:
            text = f"{text}.to({BYTES[value.dtype][0]}, bitcast=True)"
        return text

    def _together(self, tiles: list[str]) -> str:
        """Neighbours next to each other: Triton does so along the last dimension."""
        if len(tiles) == 1:
            return tiles[0]
        dim = self.dim if self.of_k > 1 else 1 - self.dim
        other = next(a for a in self.axes if a.dim != dim).block
        block = next(a for a in self.axes if a.dim == dim).block
        turned = tiles if dim else [f"tl.trans({t})" for t in tiles]
        so_far = 1
        while len(turned) > 1:
            half = len(turned) // 2
            so_far *= 2
            turned = [self.w.let(f"tl.join({a}, {b}).reshape({other}, {block} * {so_far})")
                      for a, b in zip(turned[:half], turned[half:], strict=True)]  # fmt: skip
        return turned[0] if dim else f"tl.trans({turned[0]})"

    def _divide(self, node: Expr) -> None:
        """Split an index: where the tile starts, how far the block of k at hand is, its lanes."""
        w, k = self.w, self.depth
        index = node.src[0]
        anywhere = self.hooks.grouped is self.hooks.problem.k  # blocks begin where groups do
        far = advance(index, k, 1 if anywhere else self.hooks.shape.block_k // self.of_k)
        lanes = [a.var for a in self.across]
        if far is None or free_vars(far) & set(lanes):
            return
        place = substitute(index, {k: self.lane.var})
        if self.lane.var not in free_vars(place) and far is not ix.ZERO:
            return  # one element for all of a block
        start = ix.without(place, [*lanes, self.lane.var])
        base = self.hooks.pointer(node.arg)
        if start is not ix.ZERO:
            base = w.let(f"{base} + ({w.index(start)})", "base")
        rest = ix.sub(place, start)
        have = w.support(rest)
        want = frozenset((*(a for a in self.axes if a in w.support(node)), self.lane)) - {self.k}
        offsets = w.let(w.spread(w.index(rest), have, want), "off")
        self.split[node] = base, far, offsets

    def _load(self, node: Expr) -> str:
        w = self.w
        support = w.support(*node.src)
        mask = w.mask(support, *(w.operand(s) for s in node.src[1:]))
        if node not in self.split:
            return self.hooks.read(w, node)
        base, far, offsets = self.split[node]
        return self.hooks.loaded(node, f"{base}{self._far(far)} + {offsets}", mask, self.is_plain)

    def _far(self, far: Expr) -> str:
        """How far the block at hand is, to be added."""
        w, hooks = self.w, self.hooks
        slope = ix.coefficient(far, self.depth)
        scalar = f"(tl.full([1, 1], 0, {hooks.index_type}) + {self.first})"
        if slope is None:
            first = var(f"first_{self.name}", self.depth.src[0])
            w.know(first, scalar)
            return f" + {w.index(substitute(far, {self.depth: first}))}"
        k0 = self.first if self.of_k == 1 else f"({self.first})"
        k0 = scalar if hooks.wide else k0
        step = w.index(slope)
        return f" + {k0}" if step == "1" else f" + {k0} * {step}"


class _Epilogue:
    """Scaling, bias, rounding, and the stores, of the columns of `n` that begin at `column`."""

    def __init__(self, hooks: Hooks, n: Tile, column: str = "pid_n * BLOCK_N") -> None:
        p = hooks.problem
        self.hooks, self.axes, self.column = hooks, frozenset((hooks.m, n)), column
        self.w = w = hooks.writer([hooks.m, n], lambda node: hooks.read(w, node))
        w.know(p.m, "m")
        w.know(p.n, "n")
        results = [s.value for s in p.epilogue if s.buffer in p.writes]
        made = {s.buffer: s.value for s in p.epilogue}
        w.computes(coarse=coarse([e for s in p.epilogue for e in s.exprs], results, made))

    def lines(self, total: str) -> list[str]:
        p, w = self.hooks.problem, self.w
        made = accumulator(p)
        second = f"{total}2"
        if p.factor is not None:
            for j, node in enumerate(self.hooks.sums):
                w.know(node, f"row{j}" if self.hooks.shape.split else w.let(self.hooks.row_sum(j)))
            scale = w.operand(p.factor)
            second = w.let(f"{second} * {scale}") if p.second is not None else second
            total = w.let(f"{total} * {scale}")
        if p.alpha != 1:
            total = w.let(f"{total} * {p.alpha!r}")
        if p.scales and not p.is_block_scaled:
            total = w.let(" * ".join([total, *(w.operand(s.value) for s in p.scales)]))
        if p.bias is not None and p.beta != 0:
            bias = cast(w.operand(p.bias.value), p.bias.dtype, made)
            total = w.let(f"{total} + {bias}" + (f" * {p.beta!r}" if p.beta != 1 else ""))
        w.know(p.product, w.let(cast(total, made, p.dtype), "c"))
        if p.second is not None:
            w.know(p.other, w.let(cast(second, made, p.dtype), "c"))
        if p.keeps:
            self._store(Store(p.result.buffer, p.product.src[0], p.product))
        for store in p.epilogue:
            self._store(store)
        return w.taken()

    def _store(self, store: Store) -> None:
        w, p, shape = self.w, self.hooks.problem, self.hooks.shape
        value = cast(w.operand(store.value), store.value.dtype, p.memory[store.buffer].dtype)
        if w.support(store.value) != self.axes:
            value = f"tl.broadcast_to({value}, {w.shape(self.axes)})"
        if shape.described:
            found, words = self.hooks.sink(store)
            w.line(words.stored(found.turned, value, shape.piece, self.column))
            return
        place = w.spread(w.index(store.index), w.support(store.index), self.axes)
        conditions = [] if store.mask is None else [w.operand(store.mask)]
        mask = w.mask(self.axes, *conditions)
        masked = f", {mask}" if mask else ""
        w.line(f"tl.store({self.hooks.pointer(store.buffer)} + ({place}), {value}{masked})")


def advance(index: Expr, k: Expr, block: int) -> Expr | None:
    """How far an index is at a k that is a multiple of `block`, for what is added to that k adds
    the same to it everywhere; None where it does not. What is left of k when it is divided is the
    same in all blocks that have whole multiples of the divisor."""
    found: list[Expr] = []
    for atoms, factor in ix.poly(index).items():
        inside = [a for a in atoms if k in free_vars(a)]
        if not inside:
            continue
        ahead = _ahead(inside[0], k, block)
        if len(inside) > 1 or ahead is None:
            return None
        others = list(atoms)
        others.remove(inside[0])
        found.append(ix.mul(factor, ahead[0], *others))
    return ix.add(*found) if found else ix.ZERO


def _ahead(e: Expr, k: Expr, block: int) -> tuple[Expr, int] | None:
    """The same of one factor, and a number that all it can be are multiples of (0: it is 0)."""
    if e is k:
        return k, block
    if e.op not in ("ifloordiv", "imod") or e.src[1].op != "const":
        return None
    inner, by = _ahead(e.src[0], k, block), int(e.src[1].arg)
    if inner is None or inner[1] % by:
        return None
    if e.op == "imod":
        return ix.ZERO, 0
    return ix.floordiv(inner[0], by), inner[1] // by


def narrowed(value: Expr) -> Expr:
    """Bytes that become float32 only to be rounded to sixteen bits become that at once."""

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if node.op != "cast" or node.dtype not in SMALL:
            return None
        wide = src[0]
        if wide.op != "cast" or wide.dtype != torch.float32 or wide.src[0].dtype not in BYTES:
            return None
        return make("cast", node.dtype, wide.src, node.dtype)

    return rewrite(value, rule)


def _typed(problem: GemmProblem) -> frozenset[str]:
    """The buffers whose elements are what the matrix units multiply eight bits of: a tile of bytes
    would go through the registers to become that."""
    plain = (o.view for o in problem.operands if o.is_plain and o.dtype in UNITS)
    return frozenset(v.buffer for v in plain)


def allow_tf32(problem: GemmProblem) -> bool:
    """Whether float32 operands are rounded to TF32: as torch is told for its own products."""
    is_wide = problem.operands[0].dtype == torch.float32
    return is_wide and takes_tf32()


def accumulator(problem: GemmProblem) -> torch.dtype:
    """What products are summed in."""
    return torch.float32 if problem.operands[0].dtype.is_floating_point else torch.int32


def keeps_zero(value: Expr, k: Expr) -> bool:
    """Whether a value is zero wherever everything it loads along `k` is: then tiles that end beyond
    the last k are right without looking."""
    done: dict[Expr, Expr] = {}
    for node in walk(value):
        if node.op == "load" and k in free_vars(node):
            done[node] = const(0, node.dtype)
        elif node.op in _EXACT:
            done[node] = rebuild(node, tuple(done[s] for s in node.src))
        else:
            done[node] = node
    found = done[value]
    return found.is_const and found.arg == 0


def scaled_limits(problem: GemmProblem) -> str:
    """Why the matrix units cannot multiply these eight-bit floats, or an empty string."""
    left, right = problem.operands
    if problem.target.capability < (8, 9):
        return "cards before Ada do not multiply eight-bit floats"
    if not {left.dtype, right.dtype} <= UNITS.keys():
        return f"no matrix unit multiplies {left.dtype} by {right.dtype}"
    empty = ix.ZERO in (*left.view.size, *right.view.size)
    for operand, name, last in ((left, "left", "row"), (right, "right", "column")):
        stride = operand.view.stride
        runs = stride[1] if last == "row" else stride[0]
        if operand.is_plain and not empty and runs is not ix.ONE:
            shown = ", ".join(map(number, stride))
            return f"the {name} operand has to be {last}-major, and has the strides ({shown})"
    k = problem.hints[3]
    fewest = FEWEST_K_BLACKWELL if problem.target.capability >= (10, 0) else FEWEST_K
    if k < fewest:
        return f"k is {k}: the matrix units take {fewest} of eight bits at least"
    return ""


def limits(problem: GemmProblem) -> str:
    """Why hooks cannot be written for a problem, or an empty string."""
    p = problem
    loops = {p.batch, p.m, p.n, p.k}
    exprs = [o.value for o in (*p.operands[1:], *p.scales)]
    if not free_vars(p.operands[0].value) <= loops | {p.row}:
        return "an expression walks loops that are not the product's"
    exprs += [] if p.walks_rows else [p.operands[0].value]
    for e in [*exprs, *(x for s in p.epilogue for x in s.exprs)]:
        if not free_vars(e) <= loops:
            return "an expression walks loops that are not the product's"
        odd = next((n.op for n in walk(e) if n.op in ("reduce", "scan", "part")), "")
        if odd:
            return f"a {odd} is not done inside a product"
    for store in p.epilogue:
        if store.mode != "set":
            return "the epilogue adds to memory"
        if p.k in free_vars(store.value):
            return "the epilogue walks k"
    return ""
