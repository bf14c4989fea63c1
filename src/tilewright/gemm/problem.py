"""`GemmProblem`: a matrix product with what the scheduler wants fused to it, as one frozen value.

The problem is self-contained and canonical: buffers have names of their own (`a`, `b`, `c`, `x0`,
...), loops are the four variables below, and nothing refers to the program it came from. Two places
of one program, or two programs, that ask for the same product have equal problems and one `key`.

What is computed, for every point of `batch`, `m` and `n` (mm_plus_mm adds a second such sum):

    total = alpha * sum over k of left(batch, m, k) * right(batch, k, n) + beta * bias(batch, m, n)
    c     = total rounded to the product's own dtype; of mm_pair c2 is a second such sum
    store[index] = value    for each store of the epilogue, whose loads of `c` mean that value

In a scaled product each term of the sum is multiplied by all `scales`. Those of rows, of columns or
of everything do not depend on k and can wait until all is added up; those of blocks are the same
for `SCALED` neighbours along k. A `factor` is of a row, and made of sums over k (`rows.py`).

An operand is a plain window on memory, or, with a prologue, any expression over its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, load, loads, make, substitute, syms, var, walk
from tilewright.ir.program import Buffer, Nest, Node, Opaque, Origin, Store, View
from tilewright.ir.show import show_expr
from tilewright.runtime import store
from tilewright.target import Target

aten = torch.ops.aten

Op = Literal[
    "mm", "addmm", "bmm", "baddbmm", "mm_plus_mm", "_int_mm", "_scaled_mm", "_grouped_mm",
    "mm_pair", "_sparse_semi_structured_mm", "_weight_int8pack_mm", "_weight_int4pack_mm",
]  # fmt: skip
NARROW: tuple[Op, ...] = ("_int_mm", "_scaled_mm")
SCALED = 128  # elements along k that have a scale in common, where it depends on k


@dataclass(frozen=True)
class Operand:
    """A matrix, or a batch of them: the element at a position is `value`.

    `view` is the window eager would read: [batch,] rows, columns. With a prologue nothing is there
    and only its sizes and dtype count.
    """

    view: View
    value: Expr
    is_plain: bool = True  # `value` is the load of `view` at the position

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype


@dataclass(frozen=True)
class GemmProblem:
    op: Op
    batch: Expr  # loop variables; their sizes are the problem's
    m: Expr
    n: Expr
    k: Expr
    operands: tuple[Operand, ...]  # left, right; then those of a second product
    result: View  # of the product itself, on the buffer `c`: [batch,] m, n
    buffers: tuple[Buffer, ...]  # all that is read or written, `c` included; sorted by name
    target: Target
    bias: Operand | None = None  # of addmm and baddbmm, expanded to the result's shape
    alpha: float = 1.0
    beta: float = 1.0
    keeps: bool = True  # `c` is itself needed in memory
    epilogue: tuple[Store, ...] = ()
    scales: tuple[Operand, ...] = ()  # of scaled products, at a position of the result and of k
    fast: bool = False  # of _scaled_mm: sums may be taken in fewer bits
    ends: Operand | None = None  # of _grouped_mm: where a group ends
    second: View | None = None  # of mm_pair: the second product's result
    factor: Expr | None = None  # what a row of the product is multiplied by, before all else

    # ---- sizes

    @property
    def sizes(self) -> tuple[Expr, Expr, Expr, Expr]:
        """Of batch, m, n, k."""
        return self.batch.src[0], self.m.src[0], self.n.src[0], self.k.src[0]

    @property
    def hints(self) -> tuple[int, int, int, int]:
        """Likely values of the sizes of batch, m, n, k."""
        b, m, n, k = (ix.likely(e) for e in self.sizes)
        return b, m, n, k

    @property
    def is_batched(self) -> bool:
        return self.op in ("bmm", "baddbmm")

    @property
    def dtype(self) -> torch.dtype:
        """Of the product's own result."""
        return self.result.dtype

    @property
    def out_dtype(self) -> torch.dtype | None:
        """The result's dtype, where the call asks for another than the operands'."""
        same = self.dtype == self.operands[0].dtype or self.op in NARROW
        return None if same else self.dtype

    @property
    def is_block_scaled(self) -> bool:
        """Whether a scale depends on k, so that it is applied before all is added up."""
        return any(self.k in free_vars(s.value) for s in self.scales)

    @property
    def row(self) -> Expr:
        """The loop over a row of the left operand that `reduce` nodes of its value walk."""
        return var("row", self.k.src[0])

    @property
    def walks_rows(self) -> bool:
        """Whether rows of the left operand are reduced before it is multiplied."""
        return any(n.op == "reduce" for n in walk(self.operands[0].value))

    @property
    def tile_k(self) -> int:
        """Neighbours along k that lie together in memory, in an order of their own: a block of k
        has all of them."""
        return 1

    @property
    def reads_again(self) -> bool:
        """Whether an element of an operand is loaded more than once."""
        return True

    @property
    def providers(self) -> tuple[Any, ...]:
        """Who alone can compute it; none: whoever is enabled."""
        return ()

    @property
    def library(self) -> Any:
        """The candidate that others are compared with; none: ATen's."""
        return None

    @property
    def contents(self) -> dict[str, tuple[int, ...]]:
        """What integers buffers hold while it is timed, again and again; others hold zeros."""
        return {}

    @property
    def operator(self) -> Opaque | None:
        """What computes it in the library, where that is no product."""
        return None

    @property
    def flops(self) -> int:
        b, m, n, k = self.hints
        return 2 * b * m * n * k * (len(self.operands) // 2)

    # ---- memory

    @cached_property
    def memory(self) -> dict[str, Buffer]:
        return {b.name: b for b in self.buffers}

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Buffers read, in order of their names."""
        values = [o.value for o in (*self.operands, *self.scales)]
        if self.bias is not None and self.beta != 0:
            values.append(self.bias.value)
        values += [] if self.ends is None else [self.ends.value]
        values += [] if self.factor is None else [self.factor]
        values += [e for s in self.epilogue for e in s.exprs]
        own = {self.result.buffer, *([] if self.second is None else [self.second.buffer])}
        found = {node.arg for node in loads(*values)} - own
        return tuple(sorted(found))

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Buffers written, `c` first where it is kept."""
        own = (self.result.buffer,) if self.keeps else ()
        return tuple(dict.fromkeys((*own, *(s.buffer for s in self.epilogue))))

    @cached_property
    def symbols(self) -> tuple[Expr, ...]:
        """Run-time numbers that sizes, strides and values depend on, in order of their names."""
        exprs = [*self.sizes, *(o.value for o in self.operands), _at(self.result, self.place)]
        exprs += [] if self.bias is None else [self.bias.value]
        exprs += [o.value for o in self.scales]
        exprs += [] if self.ends is None else [self.ends.value]
        exprs += [] if self.factor is None else [self.factor]
        exprs += [e for s in self.epilogue for e in s.exprs]
        return tuple(sorted(syms(*exprs), key=lambda e: e.arg.name))

    @property
    def place(self) -> tuple[Expr, ...]:
        """The position in the result: [batch,] m, n."""
        return (self.batch, self.m, self.n) if self.is_batched else (self.m, self.n)

    @property
    def product(self) -> Expr:
        """What stands for the product in the epilogue: an element of `c`."""
        return load(self.result.buffer, self.dtype, _at(self.result, self.place))

    @property
    def other(self) -> Expr:
        """What stands for the second product in the epilogue."""
        assert self.second is not None
        return load(self.second.buffer, self.second.dtype, _at(self.second, self.place))

    # ---- variants

    @property
    def is_bare(self) -> bool:
        """Whether it is the product alone."""
        return not self.epilogue and all(o.is_plain for o in self.operands)

    @cached_property
    def bare(self) -> GemmProblem:
        """The product alone, of operands in memory."""
        if self.is_bare:
            return self
        operands = tuple(
            o if o.is_plain else plain(o.view, position)
            for o, position in zip(self.operands, self.positions, strict=True)
        )
        made = replace(self, operands=operands, epilogue=(), keeps=True, factor=None)
        used = {*made.reads, *made.writes}
        return replace(made, buffers=tuple(b for b in self.buffers if b.name in used))

    @property
    def positions(self) -> tuple[tuple[Expr, ...], ...]:
        """Of an element of each operand: [batch,] m, k and [batch,] k, n."""
        lead = (self.batch,) if self.is_batched else ()
        pair = ((*lead, self.m, self.k), (*lead, self.k, self.n))
        return pair * (len(self.operands) // 2)

    @cached_property
    def key(self) -> str:
        """The same in every process, for equal problems alone."""
        return store.key("gemm", self.describe())

    def describe(self) -> str:
        """All of it as text."""
        scale = f"alpha={self.alpha} beta={self.beta} keeps={self.keeps}"
        lines = [f"{self.op} {self.target.key} {scale} {self.sizes}"]
        lines += [f"{o.view} = {show_expr(o.value)}" for o in self.operands]
        lines += [f"bias {self.bias.view}"] if self.bias is not None else []
        lines += [f"scale {o.view} = {show_expr(o.value)} fast={self.fast}" for o in self.scales]
        lines += (
            []
            if self.ends is None
            else [f"ends {self.ends.view} {type(self).__name__} {self.place}"]
        )
        lines += [] if self.second is None else [f"second {self.second}"]
        lines += [] if self.factor is None else [f"factor {show_expr(self.factor)}"]
        lines += [f"{self.result}", *map(str, self.buffers), *map(str, self.epilogue)]
        return "\n".join(lines)

    def __str__(self) -> str:
        """For people: `addmm 1024x4096x512 bf16 + epilogue`."""
        b, m, n, k = self.hints
        size = f"{b}x{m}x{n}x{k}" if self.is_batched else f"{m}x{n}x{k}"
        kind = str(self.dtype).removeprefix("torch.")
        fused = " + prologue" if any(not o.is_plain for o in self.operands) else ""
        return f"{self.op} {size} {kind}{fused}{' + epilogue' if self.epilogue else ''}"


def takes_tf32() -> bool:
    """Whether float32 products may be computed with ten bits, as torch is set at this moment. Read
    where setting it through either of torch's interfaces shows, and nothing raises."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def sm_carveout() -> int:
    """How many SMs torch is told, at this moment, to leave to others."""
    return torch._C._get_sm_carveout_experimental() or 0


# ---- what it means


def into(op: str, dtype: torch.dtype | None) -> OpOverload:
    """The library's product into memory; with `dtype` it takes that after the operands."""
    found = getattr(aten, op)
    return found.out if dtype is None else found.dtype_out


def window(view: View, given: Mapping[str, Any]) -> torch.Tensor:
    """A view of the memory that is given by name, sizes among it where the view depends on any."""
    memory: torch.Tensor = given[view.buffer]
    known = tuple((name, value) for name, value in given.items() if isinstance(value, int))
    size, stride, offset = _placed(view, known)
    return memory.as_strided(size, stride, memory.storage_offset() + offset)


@lru_cache(1024)
def _placed(view: View, known: tuple[tuple[str, int], ...]
            ) -> tuple[tuple[int, ...], tuple[int, ...], int]:  # fmt: skip
    """Size, stride and offset: worked out at every call they take as long as a small product."""
    sizes = dict(known)
    size, stride = (tuple(ix.evaluate(e, sizes) for e in part) for part in (view.size, view.stride))
    return size, stride, ix.evaluate(view.offset, sizes)


def definition(problem: GemmProblem) -> tuple[Node, ...]:
    """The problem as nodes of the IR: operands, the library's product, what follows. Buffers that
    the problem itself does not touch (prologues' operands, a product not kept) are used as well."""
    folds, first = statistics(problem)
    nodes: list[Node] = [nest for nest, _ in folds]
    own = problem.operator
    lead = (problem.batch,) if problem.is_batched else ()
    for k, (operand, place) in enumerate(zip(problem.operands, problem.positions, strict=True)):
        is_image = len(operand.view.size) != len(place)  # a convolution's own reading of it
        if not (operand.is_plain or is_image) and problem.bare.operands[k].is_plain:
            index = _at(operand.view, place)
            value = operand.value if k % 2 else first
            over = (problem.k, problem.n) if k % 2 else (problem.m, problem.k)
            made = Store(operand.view.buffer, index, value)
            nodes.append(Nest(f"operand{k}", (*lead, *over), (), (made,), _ORIGIN))
    if own is not None:
        after = Nest("epilogue", problem.place, (), problem.epilogue, _ORIGIN)
        return (*nodes, own, after) if problem.epilogue else (*nodes, own)
    views = [o.view for o in problem.operands]
    if problem.op == "mm_plus_mm":
        second = [problem.result, *views[2:]]
        nodes += [_call("mm", views[:2], problem.result, {}, None),
                  _call("addmm", second, problem.result, {}, None)]  # fmt: skip
    elif problem.op == "mm_pair":
        assert problem.second is not None
        nodes += [_call("mm", views[:2], problem.result, {}, None),
                  _call("mm", views[2:], problem.second, {}, None)]  # fmt: skip
    elif problem.op == "_scaled_mm":
        views += [o.view for o in (*problem.scales, *([problem.bias] if problem.bias else []))]
        given = {"out_dtype": problem.dtype, "use_fast_accum": problem.fast}
        nodes.append(_call(problem.op, views, problem.result, given, None))
    else:
        scale: dict[str, Any] = {}
        if problem.bias is not None:
            views.insert(0, problem.bias.view)
            scale = {"alpha": problem.alpha, "beta": problem.beta}
        nodes.append(_call(problem.op, views, problem.result, scale, problem.out_dtype))
    if problem.epilogue:
        nodes.append(Nest("epilogue", problem.place, (), problem.epilogue, _ORIGIN))
    return tuple(nodes)


def statistics(problem: GemmProblem) -> tuple[list[tuple[Nest, Buffer]], Expr]:
    """What is reduced over rows of the left operand, each into a buffer; and the operand in terms
    of these, scaled where its product is."""
    value, found = problem.operands[0].value, list[tuple[Nest, Buffer]]()
    if problem.factor is not None:
        wide = make("cast", torch.float32, (value,), torch.float32)
        scaled = make("mul", torch.float32, (wide, problem.factor))
        value = make("cast", value.dtype, (scaled,), value.dtype)
    known: dict[Expr, Expr] = {}
    for node in walk(value):
        several = node.op == "reduce" and node.arg.kind == "welford"
        if node.op != "part" and (node.op != "reduce" or several):
            continue
        name, m = f"row{len(found)}", problem.m
        over = problem.k if problem.k in free_vars(node) else problem.row
        store = Store(name, m, substitute(node, known))
        device = problem.memory[problem.result.buffer].device
        buffer = Buffer(name, node.dtype, device, (m.src[0],), (ix.ONE,), "temporary")
        found.append((Nest(name, (m,), (over,), (store,), _ORIGIN), buffer))
        known[node] = load(name, node.dtype, m)
    return found, substitute(value, known)


_ORIGIN = Origin(())


def _call(op: str, views: Sequence[View], out: View, scale: dict[str, Any],
          dtype: torch.dtype | None) -> Opaque:  # fmt: skip
    args = (*views, *([] if dtype is None else [dtype]))
    return Opaque(op, into(op, dtype), args, scale, (), (), _ORIGIN, out=out)


# ---- building problems


def loops(batch: Expr, m: Expr, n: Expr, k: Expr) -> tuple[Expr, Expr, Expr, Expr]:
    """The canonical variables over these sizes."""
    return var("batch", batch), var("m", m), var("n", n), var("k", k)


def plain(view: View, place: tuple[Expr, ...]) -> Operand:
    """An operand that is a window on memory."""
    return Operand(view, load(view.buffer, view.dtype, _at(view, place)))


def _at(view: View, place: tuple[Expr, ...]) -> Expr:
    return ix.linearize(place, view.stride, view.offset)
