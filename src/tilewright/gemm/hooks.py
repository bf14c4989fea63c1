"""What a template leaves open: sizes, loads of the operands' tiles, and the stores of the result.

A template is Triton text with hooks. It says which tile a program has (`m`, `n` and, of a batch,
`batch`) and walks `k` in blocks that start at `k0`; the hooks write everything that depends on the
problem. An index that is affine in `k` is split, so that only a scalar changes from block to block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tilewright import config
from tilewright.codegen.triton.emit import Writer
from tilewright.codegen.triton.facts import coarse, narrow, valued
from tilewright.codegen.triton.kernel import BAD_INDEX
from tilewright.codegen.triton.shape import Axis
from tilewright.codegen.triton.text import SIGNATURE, TYPE, cast
from tilewright.gemm.padded import is_slow
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.provider import Argument
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, make, rebuild, rewrite, substitute, var, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Store

NAMES = ("a", "b", "a2", "b2")  # of the operands' tiles in a template's text
WORKSPACE, COUNTERS = "workspace", "counters"
DESCRIPTORS = 128  # float32 elements of the workspace, for the tensor descriptors of a program
SMALL = (torch.float16, torch.bfloat16)
BYTES: dict[torch.dtype, tuple[str, tuple[int, int]]] = {
    torch.int8: ("", (0, 0)), torch.uint8: ("", (0, 0)),
    torch.float8_e5m2: ("tl.float8e5", (8, 0)), torch.float8_e4m3fn: ("tl.float8e4nv", (8, 9)),
}  # fmt: skip
"""Eight-bit types that cards turn into sixteen-bit floats, and since which of them."""
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


@dataclass
class Text:
    """The lines of one hook, at no indentation: those before the loop over k, those inside."""

    before: list[str] = field(default_factory=list[str])
    inside: list[str] = field(default_factory=list[str])


class _Writer(Writer):
    """With names that are unique in the whole kernel."""

    names: Callable[[], int]
    bytes: Mapping[torch.dtype, str]  # eight-bit types to the card's own, if not the same

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
        self._scopes.append({})
        self._wide.append({})


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
        self.m = Tile("m", (problem.m,), 0, "BLOCK_M")
        self.n = Tile("n", (problem.n,), 1, "BLOCK_N")

    # ---- facts

    def _exprs(self) -> list[Expr]:
        p = self.problem
        found = [o.value for o in p.operands]
        found += [] if p.bias is None or p.beta == 0 else [p.bias.value]
        return [*found, p.product, *(e for s in p.epilogue for e in s.exprs)]

    def _assumed(self) -> list[Expr] | None:
        p = self.problem
        names = {*p.reads, *p.writes}
        largest = max(self.shape.block_m, self.shape.block_n, self.shape.block_k)
        return narrow(self._exprs(), p.sizes, [b for b in p.buffers if b.name in names], largest)

    def is_even(self, v: Expr) -> bool:
        """Whether blocks end where the loop does, for sure."""
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
        w.valued = self.valued
        w.masked = {a for a in (self.m, self.n) if a in axes and not self.is_even(a.var)}
        w.know(self.problem.batch, "batch")
        return w

    # ---- hooks

    def size(self, v: Expr) -> str:
        """The size of a loop."""
        return self.writer([], lambda e: "").index(v.src[0])

    def tile(self) -> list[str]:
        """The rows and columns of block (`pid_m`, `pid_n`), and which of them exist."""
        p = self.problem
        lines = [
            "m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]",
            "n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]",
        ]
        lines += [] if self.is_even(p.m) else ["mmask = m < M"]
        return lines + ([] if self.is_even(p.n) else ["nmask = n < N"])

    def operand(self, name: str, row: int | None = None) -> Text:
        """The loads of an operand's tile (`a`, `b`), rows by columns. With `row` it is that row of
        the left operand alone (`a_0`), lying along the rows of the right one."""
        if (name, row) not in self._operands:
            position = NAMES.index(name)
            if self.shape.tma:
                return self._operands.setdefault((name, row), self._descriptor(position))
            value = self.problem.operands[position].value
            if row is not None:
                value = substitute(value, {self.problem.m: const(row)})
                made = _Operand(self, value, f"{name}_{row}", [], 0)
            elif position % 2:
                made = _Operand(self, value, name, [self.n], 0)
            else:
                made = _Operand(self, value, name, [self.m], 1)
            self._operands[name, row] = made.text()
        return self._operands[name, row]

    def _descriptor(self, position: int) -> Text:
        """The card fetches the operand's tiles by itself; what is outside the operand is zero."""
        name, view = NAMES[position], self.problem.operands[position].view
        rows, columns = (("M", "K"), ("K", "N"))[position % 2]
        at = {"M": "pid_m * BLOCK_M", "N": "pid_n * BLOCK_N", "K": "k0"}
        turned = view.stride[-1] is not ix.ONE
        if turned:
            rows, columns = columns, rows
        w = self.writer([], lambda e: "")
        start = "" if view.offset is ix.ZERO else f" + {w.index(view.offset)}"
        stride = w.index(view.stride[-1 if turned else -2])
        base = f"{self.pointer(view.buffer)}{start}"
        sizes = f"[{rows}, {columns}], [{stride}, 1], [BLOCK_{rows}, BLOCK_{columns}]"
        tile = f"desc_{name}.load([{at[rows]}, {at[columns]}])"
        tile = f"tl.trans({tile})" if turned else tile
        return Text(
            [f"desc_{name} = tl.make_tensor_descriptor({base}, {sizes})"], [f"{name} = {tile}"]
        )

    def store(self, total: str) -> list[str]:
        """From the accumulator to what is in memory."""
        return _Epilogue(self).lines(total)

    def gather(self, total: str) -> list[str]:
        """A share of the sum goes to the workspace; `arrived` says how many were there before."""
        workspace, counters = self.pointer(WORKSPACE), self.pointer(COUNTERS)
        own = f" + grid_m * grid_n * (SPLIT_K * {DESCRIPTORS})" if self.shape.tma else ""
        return [
            "lanes = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]",
            f"shares = {workspace}{own} + spot.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N)",
            f"tl.store(shares + part * (BLOCK_M * BLOCK_N) + lanes, {total})",
            "tl.debug_barrier()  # all threads have stored before one of them says so",
            f'arrived = tl.atomic_add({counters} + spot, 1, sem="acq_rel")',
        ]

    def total(self, total: str) -> list[str]:
        """The shares of all, always added in the same order; the counter is zero again."""
        share = 'tl.load(shares + k0 * (BLOCK_M * BLOCK_N) + lanes, cache_modifier=".cg")'
        return [
            f"tl.store({self.pointer(COUNTERS)} + spot, 0)",
            f"{total} = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)",
            "for k0 in range(SPLIT_K):",
            f"    {total} += {share}",
        ]

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
            found.append((("ptr", buffer), SIGNATURE[dtype]))
        for e in sorted(self.numbers, key=lambda e: e.arg.name):
            if e.dtype == torch.float64:
                found.append((("float", e.arg.name), "fp64"))
            else:
                kind = "i64" if self.wide or e in self.valued else "i32"
                found.append((("int", e.arg.name), kind))
        return found


class _Operand:
    """The loads of one tile: `across` are the axes besides k, which is dimension `dim`."""

    def __init__(self, hooks: Hooks, value: Expr, name: str, across: list[Axis], dim: int) -> None:
        p = hooks.problem
        self.hooks, self.value, self.name = hooks, narrowed(value), name
        self.k = Tile(f"k{name}", (p.k,), dim, "BLOCK_K")
        self.lane = Tile(f"lane_{name}", (var(f"lane_{name}", const(hooks.shape.block_k)),), dim,
                         "BLOCK_K")  # fmt: skip
        self.across = across
        self.axes = [*across, self.k]
        self.w = w = hooks.writer([*self.axes, self.lane], self._load)
        self.even = hooks.is_even(p.k)
        if not self.even:
            w.masked.add(self.k)
        for axis in across:
            w.know(axis.var, axis.name)
        self.split: dict[Expr, tuple[str, str, str]] = {}

    def text(self) -> Text:
        w, k, lane = self.w, self.hooks.problem.k, self.lane.name
        where = "[None, :]" if self.k.dim else "[:, None]"
        wide = ".to(tl.int64)" if self.hooks.wide else ""
        w.line(f"{lane} = tl.arange(0, BLOCK_K){where}{wide}")
        w.know(self.lane.var, lane)
        for node in walk(self.value):
            if node.op == "load" and k in free_vars(node):
                self._divide(node)
            elif k not in free_vars(node) and (node.op == "load" or node.op in TABLE):
                w.value(node)
        before = w.taken()
        w.inner()
        w.know(k, f"(k0 + {lane})")
        if not self.even:
            w.line(f"{self.k.name}mask = {lane} < K - k0")
        text = w.operand(self.value)
        support = w.support(self.value)
        if not set(self.axes) <= support:
            text = f"tl.broadcast_to({text}, {w.shape(frozenset(self.axes))})"
        if not self.even and not keeps_zero(self.value, k):
            text = f"tl.where({self.k.name}mask, {text}, 0)"
        w.line(f"{self.name} = {text}")
        return Text(before, w.taken())

    def _divide(self, node: Expr) -> None:
        """Split an affine index: where the tile starts, how far a step in k goes, its lanes."""
        w, k = self.w, self.hooks.problem.k
        index = node.src[0]
        slope = ix.coefficient(index, k)
        lanes = [a.var for a in self.across]
        if slope is None or free_vars(slope) & set(lanes):
            return
        place = substitute(index, {k: self.lane.var})
        start = ix.without(place, [*lanes, self.lane.var])
        base = self.hooks.pointer(node.arg)
        if start is not ix.ZERO:
            base = w.let(f"{base} + ({w.index(start)})", "base")
        rest = ix.sub(place, start)
        have = w.support(rest)
        want = frozenset((*(a for a in self.axes if a in w.support(node)), self.lane)) - {self.k}
        offsets = w.let(w.spread(w.index(rest), have, want), "off")
        self.split[node] = base, w.index(slope), offsets

    def _load(self, node: Expr) -> str:
        w = self.w
        support = w.support(*node.src)
        mask = w.mask(support, *(w.operand(s) for s in node.src[1:]))
        masked = f", {mask}, other=0" if mask else ""
        if node in self.split:
            base, slope, offsets = self.split[node]
            k0 = "(tl.full([1, 1], 0, tl.int64) + k0)" if self.hooks.wide else "k0"
            step = f" + {k0}" if slope == "1" else f" + {k0} * {slope}"
            return f"tl.load({base}{step} + {offsets}{masked})"
        place = w.spread(w.index(node.src[0]), w.support(node.src[0]), support)
        return f"tl.load({self.hooks.pointer(node.arg)} + ({place}){masked})"


class _Epilogue:
    """Scaling, bias, rounding, and the stores."""

    def __init__(self, hooks: Hooks) -> None:
        p = hooks.problem
        self.hooks = hooks
        self.w = w = hooks.writer([hooks.m, hooks.n], self._load)
        w.know(p.m, "m")
        w.know(p.n, "n")
        results = [s.value for s in p.epilogue if s.buffer in p.writes]
        made = {s.buffer: s.value for s in p.epilogue}
        w.coarse = coarse([e for s in p.epilogue for e in s.exprs], results, made)

    def lines(self, total: str) -> list[str]:
        p, w = self.hooks.problem, self.w
        made = accumulator(p)
        if p.alpha != 1:
            total = w.let(f"{total} * {p.alpha!r}")
        if p.bias is not None and p.beta != 0:
            bias = cast(w.operand(p.bias.value), p.bias.dtype, made)
            total = w.let(f"{total} + {bias}" + (f" * {p.beta!r}" if p.beta != 1 else ""))
        w.know(p.product, w.let(cast(total, made, p.dtype), "c"))
        if p.keeps:
            self._store(Store(p.result.buffer, p.product.src[0], p.product))
        for store in p.epilogue:
            self._store(store)
        return w.taken()

    def _load(self, node: Expr) -> str:
        w = self.w
        support = w.support(*node.src)
        place = w.spread(w.index(node.src[0]), w.support(node.src[0]), support)
        mask = w.mask(support, *(w.operand(s) for s in node.src[1:]))
        masked = f", {mask}, other=0" if mask else ""
        return f"tl.load({self.hooks.pointer(node.arg)} + ({place}){masked})"

    def _store(self, store: Store) -> None:
        w, p = self.w, self.hooks.problem
        value = cast(w.operand(store.value), store.value.dtype, p.memory[store.buffer].dtype)
        support = frozenset((self.hooks.m, self.hooks.n))
        place = w.spread(w.index(store.index), w.support(store.index), support)
        conditions = [] if store.mask is None else [w.operand(store.mask)]
        mask = w.mask(support, *conditions)
        masked = f", {mask}" if mask else ""
        if w.support(store.value) != support:
            value = f"tl.broadcast_to({value}, {w.shape(support)})"
        w.line(f"tl.store({self.hooks.pointer(store.buffer)} + ({place}), {value}{masked})")


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


def tma_limits(problem: GemmProblem) -> str:
    """Why operands cannot be read through tensor descriptors, or an empty string.

    Without being asked for they are offered where the library is out of the race: a result whose
    rows start anywhere, of operands whose rows do not (2048x50257x768 in bfloat16 on an H200: 273
    us, 284 us without descriptors, 1677 us by the library)."""
    if not config.triton.enable_persistent_tma_matmul and not is_slow(problem):
        return "triton.enable_persistent_tma_matmul is off"
    if problem.target.capability < (9, 0):
        return "cards before Hopper have no tensor descriptors"
    if any(n.op == "index" for s in problem.epilogue for n in walk(*s.exprs)):
        return "a position in the epilogue has to be checked"
    for operand in problem.operands:
        if not operand.is_plain:
            return "a prologue needs the operand in registers"
        size, stride = operand.view.size[-2:], operand.view.stride[-2:]
        across = stride[0] if stride[1] is ix.ONE else stride[1]
        if ix.ONE not in stride:
            return "an operand has no contiguous dimension"
        for step in (across, operand.view.offset):
            if ix.mod(ix.mul(step, operand.dtype.itemsize), 16) is not ix.ZERO:
                return "rows of an operand do not start at multiples of 16 bytes"
        if any(ix.bounds(n)[1] >= 2**31 for n in size if ix.value_of(n) is not None):
            return "an operand is too long for a tensor descriptor"
        if ix.value_of(across) == 0:
            return "an operand repeats its rows"
    return ""


def limits(problem: GemmProblem) -> str:
    """Why hooks cannot be written for a problem, or an empty string."""
    p = problem
    loops = {p.batch, p.m, p.n, p.k}
    for e in [*(o.value for o in p.operands), *(x for s in p.epilogue for x in s.exprs)]:
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
