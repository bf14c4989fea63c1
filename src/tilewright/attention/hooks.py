"""What the templates of attention leave open: which block a program has, loads of tiles, what
becomes of a score, and the stores.

A tile has queries along its first dimension and keys along its second: `m` is a column, `n` a row,
`nt` the same keys as a column. The names of masks say which of a block exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tilewright.attention.problem import AttentionProblem, at
from tilewright.attention.ranges import M0, M1, N0, N1, TRUE
from tilewright.codegen.triton.plan.tiling import Axis
from tilewright.codegen.triton.tile.kernel import BAD_INDEX
from tilewright.codegen.triton.tile.lower import Writer
from tilewright.codegen.triton.tile.ops import SIGNATURE
from tilewright.gemm.hooks import Tile
from tilewright.gemm.provider import Argument
from tilewright.ir import index as ix
from tilewright.ir.attention import GRAD, SCORE, Sparse, element
from tilewright.ir.expr import Expr, const, var
from tilewright.ir.program import Store, View

LOG2E = 1.4426950408889634
LANES = 128  # blocks that are looked at together
LOCAL = {"part_out": torch.float32, "part_lse": torch.float32}
LEAST = -3.4028234663852886e38  # of float32
FAR = (1 << 31) - (1 << 20)


class _Writer(Writer):
    """With names that are unique in the whole kernel."""

    names: Callable[[], int]

    def fresh(self, family: str = "t") -> str:
        return f"{family}{self.names()}"

    def taken(self) -> list[str]:
        found = [line.removeprefix("    ") for line in self.lines]
        self.lines.clear()
        return found

    def along(self, axis: Axis, *loops: Expr) -> None:
        """These change along an axis as well."""
        for v in loops:
            self._axis[v] = axis

    def is_tile(self, e: Expr, axes: Sequence[Axis]) -> None:
        """This is a tile along axes, wherever it comes from."""
        self._support[e] = frozenset(axes)


def is_wide(problem: AttentionProblem) -> bool:
    """Whether indices need 64 bits, or may at some call."""
    if problem.node.numbers:
        return True
    spans = [1 + sum((ix.likely(n) - 1) * ix.likely(s) for n, s in
                     zip(b.size, b.stride, strict=True)) for b in problem.buffers]  # fmt: skip
    return max(spans) > FAR


class Hooks:
    """The text of one kernel of a problem. `blocks` are the largest that it is built with, all of
    them powers of two. `keys`: a program has keys, and walks queries."""

    def __init__(self, problem: AttentionProblem, blocks: dict[str, int], keys: bool = False,
                 flat: bool = False, split: int = 1) -> None:  # fmt: skip
        self.problem, self.node = problem, problem.node
        self.blocks, self.keys, self.flat = blocks, keys, flat
        self.split = split > 1
        self.pointers: dict[str, str] = {}
        self.numbers: dict[Expr, str] = {}
        self.marked: list[list[str]] = []
        self.checked = False
        self._count = 0
        self.wide = is_wide(problem)
        self.index_type = "tl.int64" if self.wide else "tl.int32"
        self.key_head = var("g", self.node.head.src[0])
        self.m = Tile("m", (self.node.row,), 0, "BLOCK_M")
        self.n = Tile("n", (self.node.column,), 1, "BLOCK_N")
        self.lists = self.node.turned if keys else self.node.sparse

    # ---- names

    def mark(self, lines: Sequence[str]) -> str:
        self.marked.append(list(lines))
        return f"@{len(self.marked) - 1}@"

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _name(self, e: Expr) -> str:
        if e.op == "var":
            return str(e.arg)
        return self.number(e)

    def number(self, e: Expr) -> str:
        return self.numbers.setdefault(e, f"n_{e.arg.name}")

    def pointer(self, buffer: str) -> str:
        return self.pointers.setdefault(buffer, f"p_{buffer}")

    def writer(self, axes: Sequence[Axis], rank: int = 2) -> _Writer:
        def check(bad: str, node: Expr) -> None:
            self.checked = True
            w.line(f"tri.report(err, {w.mask(w.support(node), bad)}, {BAD_INDEX})")

        def load(node: Expr) -> str:
            support = w.support(*node.src)
            place = w.spread(w.index(node.src[0]), w.support(node.src[0]), support)
            mask = w.mask(support, *(w.operand(s) for s in node.src[1:]))
            masked = f", {mask}, other=0" if mask else ""
            return f"tl.load({self.pointer(node.arg)} + ({place}){masked})"

        w = _Writer(list(axes), rank, self.index_type, self._name, load, check)
        w.names = self._next
        return w

    def tile_writer(self, masked: bool = True) -> _Writer:
        """For expressions over a tile of scores."""
        w = self.writer([self.m, self.n])
        if self.flat:
            w.along(self.m, self.node.head)
        w.masked = {self.m, self.n}
        return w

    def scalar(self, e: Expr) -> str:
        return self.writer([]).index(e)

    def size(self, of: str) -> str:
        places = {"b": 0, "h": 1, "m": 2, "n": 3}
        return self.scalar(self.problem.sizes[places[of]])

    @property
    def group(self) -> int:
        return self.node.group

    @property
    def least(self) -> str:
        return repr(LEAST)

    # ---- which block

    def tile(self) -> str:
        lists = self.lists
        block, length = ("BLOCK_N", "N") if self.keys else ("BLOCK_M", "M")
        rows = f"{length} * {self.group}" if self.flat else length
        lines: list[str] = []
        if lists is None or self.flat:
            lines.append(f"tiles = ({rows} + {block} - 1) // {block}")
        else:
            lines += [f"each = ({lists.own} + {block} - 1) // {block}",
                      f"tiles = ({length} + {lists.own} - 1) // {lists.own} * each"]  # fmt: skip
        heads = self.scalar(self.problem.sizes[1])
        shared = self.flat or self.keys
        lines += [
            "tile = tiles - 1 - pid % tiles",  # the last first: masks leave the most of them
            "pid = pid // tiles",
            f"heads = {heads}" + (f" // {self.group}" if shared else ""),
            "b = pid // heads",
            f"{'g' if shared else 'h'} = pid % heads",
        ]
        lines += [] if shared else [f"g = h // {self.group}"]
        if self.flat:
            lines += [
                "r = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]",
                f"mask_m = r < M * {self.group}",
                f"h = tl.minimum(g * {self.group} + r // M, heads * {self.group} - 1)",
                "m = r % M",
                "mmask = mask_m",
                "i = 0",
            ]
            return self.mark(lines)
        if lists is None:
            lines += [f"begin = tile * {block}", f"bound = {length}"]
        else:
            lines += ["i = tile // each",
                      f"begin = i * {lists.own} + tile % each * {block}",
                      f"bound = tl.minimum({length}, (i + 1) * {lists.own})"]  # fmt: skip
        lines += self._keys("begin", "bound") if self.keys else self._queries("begin", "bound")
        return self.mark(lines)

    def _queries(self, begin: str, bound: str) -> list[str]:
        return [f"m = {begin} + tl.arange(0, BLOCK_M)[:, None]", f"mask_m = m < {bound}",
                "mmask = mask_m"]  # fmt: skip

    def _keys(self, begin: str, bound: str) -> list[str]:
        return [f"n = {begin} + tl.arange(0, BLOCK_N)[None, :]", f"mask_n = n < {bound}",
                f"nt = {begin} + tl.arange(0, BLOCK_N)[:, None]", f"mask_t = nt < {bound}",
                "nmask = mask_n"]  # fmt: skip

    def columns(self) -> str:
        return self.mark(self._keys("start", "end"))

    def rows(self) -> str:
        return self.mark(self._queries("start", "end"))

    # ---- what is walked

    @property
    def walked(self) -> str:
        return "BLOCK_M" if self.keys else "BLOCK_N"

    @property
    def length(self) -> str:
        return "M" if self.keys else "N"

    @property
    def other(self) -> int:
        assert self.lists is not None
        return self.lists.other

    @property
    def pieces(self) -> str:
        block, length = self.walked, self.length
        size = ix.value_of(self.problem.sizes[2 if self.keys else 3])
        if size is not None and self.other <= size:
            return f"({self.other} + {block} - 1) // {block}"
        return f"(tl.minimum({self.other}, {length}) + {block} - 1) // {block}"

    def lists_of(self) -> list[bool]:
        assert self.lists is not None
        return [False] if self.lists.full_count is None else [False, True]

    def count(self, full: bool) -> str:
        lists = self._lists()
        return self._table("count", lists.full_count if full else lists.count)

    def listed(self, full: bool) -> str:
        lists = self._lists()
        return self._table("listed", lists.full_place if full else lists.place)

    def _lists(self) -> Sparse:
        assert self.lists is not None
        return self.lists

    def _table(self, name: str, e: Expr | None) -> str:
        assert e is not None
        w = self.writer([], rank=0)
        if self.flat:
            w.know(self.node.head, "0")
        text = w.operand(e)
        return self.mark([*w.taken(), f"{name} = {text}.to({self.index_type})"])

    def stretches(self) -> list[tuple[bool, str, str]]:
        """Runs of blocks, and whether the mask, or the end, has to be looked at in them."""
        if self.node.mask is TRUE:
            size = ix.value_of(self.problem.sizes[2 if self.keys else 3])
            if size is not None and size % self.blocks[self.walked] == 0:
                return [(False, "first", "last")]
            return [(False, "first", "full1"), (True, "full1", "last")]
        if self.problem.holds.surely is TRUE or not self.problem.holds.tells or self.flat:
            return [(True, "first", "last")]
        return [(True, "first", "full0"), (False, "full0", "full1"), (True, "full1", "last")]

    def ranges(self) -> str:
        """Where there is anything to compute, and where no mask is needed, in blocks."""
        block, length = self.walked, self.length
        lines = [f"blocks = ({length} + {block} - 1) // {block}"]
        known = self.problem.holds
        if self.node.mask is TRUE or not known.tells or self.flat:
            full = f"{length} // {block}" if self.node.mask is TRUE else "blocks"
            return self.mark([*lines, "first = blocks * 0", "last = blocks", "full0 = first",
                              f"full1 = {full}"])  # fmt: skip
        axis = Tile("c", (var("c", const(1 << 40)),), 1, str(LANES))
        own, theirs = ((N0, N1), (M0, M1)) if self.keys else ((M0, M1), (N0, N1))
        size, step = ("N", "BLOCK_N") if self.keys else ("M", "BLOCK_M")
        w = self.writer([axis])
        w.along(axis, *theirs)
        lines += [
            f"{own[0].arg} = begin",
            f"{own[1].arg} = tl.minimum(begin + {step}, {size}) - 1",
            *("first = blocks", "last = blocks * 0", "full0 = blocks", "full1 = blocks"),
        ]
        look = [
            f"c = c0 + tl.arange(0, {LANES})[None, :]",
            "inside = c < blocks",
            f"{theirs[0].arg} = c * {block}",
            f"{theirs[1].arg} = tl.minimum({theirs[0].arg} + {block}, {length}) - 1",
        ]
        texts = [w.operand(e) for e in (known.maybe, known.surely)]
        found = w.taken()
        look += [
            *found,
            f"may = inside & {texts[0]}",
            f"sure = inside & {texts[1]} & ({theirs[0].arg} + {block} <= {length})",
        ]
        lines += [
            f"for c0 in range(0, blocks, {LANES}):",
            *("    " + line for line in look),
            f"    first = tl.minimum(first, {_least('may')})",
            "    last = tl.maximum(last, tl.reduce(tl.where(may, c + 1, 0), None, tri.maximum))",
            f"    full0 = tl.minimum(full0, {_least('sure')})",
            f"for c0 in range(0, blocks, {LANES}):",
            *("    " + line for line in look),
            "    ends = inside & (sure == 0) & (c > full0)",
            f"    full1 = tl.minimum(full1, {_least('ends')})",
            "first = tl.minimum(first, last)",
            "full0 = tl.minimum(tl.maximum(full0, first), last)",
            "full1 = tl.minimum(tl.maximum(full1, full0), last)",
        ]
        return self.mark(lines)

    # ---- loads and stores

    def _index(self, view: View, keys: bool, name: str = "nt") -> str:
        """Where rows of an operand begin: a column for queries, and for keys by their name."""
        b, h, m, n = self.node.place
        heads = self.key_head if keys else h
        w = self.writer([self.m])
        if self.flat:
            w.along(self.m, h)
        for e, text in ((b, "b"), (h, "h"), (m, "m"), (self.key_head, "g")):
            w.know(e, text)
        w.know(n, name)
        text = w.index(at(view, b, heads, n if keys else m))
        assert not w.lines, "an index of rows is a sum of products"
        return text

    def _column(self, rows: str) -> str:
        """What makes a sum that may be one number a column of rows, or a row of keys."""
        return f"tl.full([1, 1], 0, {self.index_type}) + {rows} * 0 + "

    def load(self, of: str, name: str, mask: str, along: str) -> str:
        """A tile of an operand: rows of it along the first dimension, unless they are turned."""
        view = next(v for v in self.problem.views if v.buffer == of)
        keys = of in ("k", "v")
        by = "n" if mask == "mask_n" else "nt"  # turned: keys along the second dimension
        rows = self._index(view, keys, by)
        wide = self._column(by if keys else "m")
        inside = [mask]
        width = ix.value_of(view.size[-1])
        block = "BLOCK_D" if along in ("x", "xt") else "BLOCK_DV"
        if width is None or width != self.blocks[block]:
            inside.append(f"({along} < {self.scalar(view.size[-1])})")
        text = (
            f"tl.load({self.pointer(of)} + ({wide}{rows} + {along}), {' & '.join(inside)}, other=0)"
        )
        return self.mark([f"{name} = {text}"])

    def row_facts(self) -> str:
        lse, delta = (next(v for v in self.problem.views if v.buffer == n)
                      for n in ("lse", "delta"))  # fmt: skip
        wide = self._column("m")
        lines: list[str] = []
        for name, view in (("lse", lse), ("delta", delta)):
            place = f"{self.pointer(name)} + ({wide}{self._index(view, False)})"
            lines.append(f"{name} = tl.load({place}, mask_m, other=0)")
        return self.mark([*lines, 'lse = tl.where(lse == float("-inf"), 0.0, lse)'])

    def store(self, whole: bool = False) -> str:
        """The result and its sums, or those of a part of the keys."""
        if self.split and not whole:
            h = self.scalar(self.problem.sizes[1])
            rows = self.scalar(ix.product(self.problem.sizes[:3]))
            dv = self.scalar(self.problem.widths[1])
            return self.mark([
                f"at = part * {rows} + (b * {h} + h) * M + m",
                f"tl.store({self.pointer('part_lse')} + at, lse, mask_m)",
                f"tl.store({self.pointer('part_out')} + (at * {dv} + y), acc, mask_m & (y < {dv}))",
            ])  # fmt: skip
        out, lse, *rest = self.problem.results
        w = self.writer([])
        wide = self._column("m")
        step = w.index(out.stride[-1])
        dv = self.scalar(self.problem.widths[1])
        dtype = f"{self.pointer('out')}.dtype.element_ty"
        place = f"{self.pointer('out')} + ({wide}{self._index(out, False)} + y * {step})"
        lines = [
            f"tl.store({place}, acc.to({dtype}), mask_m & (y < {dv}))",
            f"tl.store({self.pointer('lse')} + ({wide}{self._index(lse, False)}), lse, mask_m)",
        ]
        for view in rest:
            where = f"{wide}{self._index(view, False)}"
            lines.append(f"tl.store({self.pointer(view.buffer)} + ({where}), most, mask_m)")
        return self.mark(lines)

    def store_gradient(self, of: str, name: str, mask: str, along: str) -> str:
        view = next(v for v in self.problem.results if v.buffer == of)
        rows = self._index(view, of != "dq")
        wide = self._column("m" if of == "dq" else "nt")
        width, step = self.scalar(view.size[-1]), self.scalar(view.stride[-1])
        scaled = name if of == "dv" else f"({name} * {self.node.scale!r})"
        pointer = self.pointer(of)
        place = f"{pointer} + ({wide}{rows} + {along} * {step})"
        value = f"{scaled}.to({pointer}.dtype.element_ty)"
        return self.mark([f"tl.store({place}, {value}, {mask} & ({along} < {width}))"])

    # ---- parts brought together

    @property
    def all_rows(self) -> str:
        return self.scalar(ix.product(self.problem.sizes[:3]))

    def partial_sum(self) -> str:
        place = f"{self.pointer('part_lse')} + part * ROWS + r"
        return self.mark([f'found = tl.load({place}, mask_m, other=float("-inf"))'])

    def partial_values(self) -> str:
        dv = self.scalar(self.problem.widths[1])
        place = f"{self.pointer('part_out')} + ((part * ROWS + r) * {dv} + y)"
        return self.mark([f"values = tl.load({place}, mask_m & (y < {dv}), other=0)"])

    def place(self) -> str:
        h = self.scalar(self.problem.sizes[1])
        return self.mark(["m = r % M", f"h = r // M % {h}", f"b = r // M // {h}"])

    # ---- scores

    @property
    def is_plain(self) -> bool:
        """Whether scores are products that are scaled, in units of ln 2. Others are as they are:
        the least number of a type, in such units, would be minus infinity."""
        return self.node.score is element(SCORE, self.node.working)

    def units(self, text: str) -> str:
        """A difference of scores in units of ln 2."""
        return text if self.is_plain else f"({text}) * {LOG2E!r}"

    def score(self, name: str, masked: bool) -> str:
        """From products to scores, minus infinity where the mask does not hold."""
        node = self.node
        plain = element(SCORE, node.working)
        if self.is_plain:
            lines = [f"{name} = {name} * {node.scale * LOG2E!r}"]
            w = self.tile_writer()
        else:
            lines = [f"raw = {name} * {node.scale!r}"]
            w = self.tile_writer()
            w.is_tile(plain, (self.m, self.n))
            w.know(plain, "raw")
            text = w.operand(node.score)
            lines += [*w.taken(), f"{name} = {text}"]
        return self.mark([*lines, *self._hidden(w, name, masked)])

    def _hidden(self, w: _Writer, name: str, masked: bool) -> list[str]:
        """Where the mask does not hold, or there is no such key."""
        inside = "mask_n"
        lines: list[str] = []
        if masked and self.node.mask is not TRUE:
            text = w.operand(self.node.mask)
            lines += w.taken()
            inside = f"{inside} & {text}"
        elif not masked and self._is_even():
            return lines
        return [*lines, f'{name} = tl.where({inside}, {name}, float("-inf"))']

    def _is_even(self) -> bool:
        """Whether blocks that are walked without a mask lie inside all keys, for sure."""
        if self.keys:
            return False
        if self.lists is None:
            return True  # blocks of such runs are whole
        size = ix.value_of(self.problem.sizes[3])
        block = self.blocks["BLOCK_N"]
        return self.other % block == 0 and size is not None and size % block == 0

    def gradient(self, masked: bool, adds: bool) -> str:
        """From products to the weights `p` and the gradient of the products."""
        node = self.node
        raw, ds = (element(name, node.working) for name in (SCORE, GRAD))
        assert node.gradient is not None
        w = self.tile_writer()
        for e in (raw, ds):
            w.is_tile(e, (self.m, self.n))
        lines = [f"raw = raw * {node.scale!r}"]
        w.know(raw, "raw")
        text = w.operand(node.score)
        lines += [*w.taken(), f"s = {text} * {LOG2E!r}"]
        held = "mask_n & mask_m"
        if masked and node.mask is not TRUE:
            mask = w.operand(node.mask)
            lines += w.taken()
            held = f"{held} & {mask}"
        lines += [f"held = {held}", "p = tl.where(held, tl.exp2(s - lse), 0.0)",
                  "ds = p * (dp - delta)"]  # fmt: skip
        w.know(ds, "ds")
        text = w.operand(node.gradient)
        lines += [*w.taken(), f"back = tl.where(held, {text}, 0.0)"]
        if adds:
            for store in node.stores:
                lines += self._add(w, store)
        lines.append("ds = back")
        return self.mark(lines)

    def _add(self, w: _Writer, store: Store) -> list[str]:
        """What a tile adds to memory: summed first along what the place does not depend on."""
        value = f"tl.where(held, {w.operand(store.value)}, 0.0)"
        index = store.index
        have = w.support(index)
        place = w.index(index)
        lines = w.taken()
        tile = frozenset((self.m, self.n))
        value = f"tl.broadcast_to({value}, {w.shape(tile)})"
        mask = "held"
        if self._is_once(store):
            place = f"tl.broadcast_to({w.spread(place, have, tile)}, {w.shape(tile)})"
            return [*lines, f"tl.store({self.pointer(store.buffer)} + {place}, {value}, held)"]
        if self.m not in have and self.n not in have:
            value, mask = f"tl.reduce({value}, None, tri.add)", ""
            place = f"{place}"
            where = f"{self.pointer(store.buffer)} + {place}"
            return [*lines, f"tl.atomic_add({where}, {value})"]
        if self.m not in have:
            value, mask = f"tl.reduce({value}, 0, tri.add, keep_dims=True)", "mask_n"
        elif self.n not in have:
            value, mask = f"tl.reduce({value}, 1, tri.add, keep_dims=True)", "mask_m"
        place = w.spread(place, have, have)
        where = f"{self.pointer(store.buffer)} + ({place})"
        return [*lines, f"tl.atomic_add({where}, {value}, {mask})"]

    def _is_once(self, store: Store) -> bool:
        """Whether no two scores add to the same element, as to those of a bias of all scores."""
        loops = [v for v in self.node.place if v.src[0] is not ix.ONE]
        steps = [(ix.coefficient(store.index, v), v.src[0]) for v in loops]
        known = [(step, size) for step, size in steps if step is not None]
        alone = sum(s.buffer == store.buffer for s in self.node.stores) == 1
        return alone and len(known) == len(steps) and ix.separate(known)

    # ---- the whole

    @property
    def params(self) -> list[tuple[Argument, str, str]]:
        """Arguments, their names in the text, and their Triton types."""
        found: list[tuple[Argument, str, str]] = []
        for buffer in sorted(self.pointers):
            dtype = LOCAL.get(buffer) or self.problem.memory[buffer].dtype
            found.append((("ptr", buffer), self.pointers[buffer], SIGNATURE[dtype]))
        for e in sorted(self.numbers, key=lambda e: e.arg.name):
            real = e.dtype == torch.float64
            kind = ("float", "fp64") if real else ("int", "i64")
            found.append(((kind[0], e.arg.name), self.numbers[e], kind[1]))
        return found


def _least(which: str) -> str:
    return f"tl.reduce(tl.where({which}, c, blocks), None, tri.minimum)"


__all__ = ["LOCAL", "Hooks", "is_wide"]
