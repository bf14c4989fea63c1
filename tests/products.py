"""Problems made of tensors, without the compiler around them, and their kernels run on tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewright.gemm import narrow
from tilewright.gemm.problem import GemmProblem, Op, Operand, loops, plain
from tilewright.gemm.provider import Kernel
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, load, sym
from tilewright.ir.program import Buffer, Store, View
from tilewright.runtime.interpret import Interpreted
from tilewright.runtime.triton_build import TritonSource
from tilewright.target import Target

HOPPER = Target("sm_90")
Value = Callable[["Builder"], Expr]


@dataclass
class Builder:
    """A problem under way: memory is named, and expressions read it at positions."""

    sizes: tuple[Expr, Expr, Expr, Expr]
    batched: bool
    device: torch.device
    names: dict[int, Expr]  # values of dynamic sizes, and their symbols
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    other: Expr = ix.ZERO  # an element of the second of two products
    shared: bool = False  # tensors of one storage are windows on one buffer

    def __post_init__(self) -> None:
        self.batch, self.m, self.n, self.k = loops(*self.sizes)

    def number(self, n: int) -> Expr:
        return self.names.get(n, const(n))

    def view(self, name: str, t: torch.Tensor) -> View:
        """A tensor's own memory as a buffer, and the tensor as a window on it."""
        storage = t.untyped_storage().nbytes() // t.element_size()
        if self.shared:
            start = t.untyped_storage().data_ptr()
            same = (n for n, b in self.tensors.items() if b.untyped_storage().data_ptr() == start)
            name = next(same, name)
        base = t.as_strided((storage,), (1,), 0) if storage else t.reshape(-1)
        size, stride = (tuple(map(self.number, v)) for v in (t.shape, t.stride()))
        self.tensors[name] = base
        dense = tuple(map(const, t.stride())) == tuple(ix.contiguous_strides(list(t.shape)))
        whole = dense and t.storage_offset() == 0
        layout = (size, stride) if whole else ((const(storage),), (const(1),))
        self.buffers[name] = Buffer(name, t.dtype, self.device, *layout, "input")
        return View(name, size, stride, const(t.storage_offset()), t.dtype)

    def read(self, name: str, t: torch.Tensor, *place: Expr) -> Expr:
        """An element of a tensor; dimensions of size one are read at 0."""
        view = self.view(name, t)
        at = [ix.ZERO if n == 1 else p for n, p in zip(t.shape, place, strict=True)]
        return load(name, t.dtype, ix.linearize(at, view.stride, view.offset))


@dataclass(frozen=True)
class Made:
    problem: GemmProblem
    tensors: Mapping[str, torch.Tensor]  # memory by name, outputs included
    values: Mapping[str, int]  # of symbols


def problem(
    op: Op, *given: torch.Tensor, dtype: torch.dtype | None = None, target: Target = HOPPER,
    bias: torch.Tensor | None = None, alpha: float = 1.0, beta: float = 1.0,
    dynamic: Sequence[int] = (), device: str = "cuda", prologue: Mapping[int, Value] | None = None,
    epilogue: Callable[[Builder, Expr], Mapping[str, tuple[torch.Tensor, Expr]]] | None = None,
    keeps: bool = True, out: torch.Tensor | None = None,
    scales: Sequence[torch.Tensor] = (), fast: bool = False,
) -> Made:  # fmt: skip
    """Of the operands given (with a prologue one only says its sizes and dtype). Sizes that are in
    `dynamic` become symbols. `epilogue` gives (where, what) of further results by name, of a pair
    of products with the second as `builder.other`; `scales` are given as `_scaled_mm` takes them.
    Of a pair tensors of one storage are windows on one buffer."""
    left, right = given[:2]
    names = {n: sym(f"s{k}", lower=0, hint=n) for k, n in enumerate(dynamic)}
    batched = left.dim() == 3
    b = left.shape[0] if batched else 1
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    builder = Builder(tuple(names.get(s, const(s)) for s in (b, m, n, k)), batched,  # type: ignore[arg-type]
                      torch.device(device, 0), names, shared=op == "mm_pair")  # fmt: skip
    lead = (builder.batch,) if batched else ()
    operands: list[Operand] = []
    for at, t in enumerate(given):
        place = (*lead, builder.k, builder.n) if at % 2 else (*lead, builder.m, builder.k)
        made = (prologue or {}).get(at)
        if made is not None:
            size, stride = (tuple(map(builder.number, v)) for v in (t.shape, t.stride()))
            view = View(f"virtual{at}", size, stride, ix.ZERO, t.dtype)
            operands.append(Operand(view, made(builder), is_plain=False))
        else:
            operands.append(plain(builder.view(f"x{at}", t), place))
    shape = (b, m, n) if batched else (m, n)
    fresh = torch.empty(shape, dtype=dtype or left.dtype, device=left.device)
    result = fresh if out is None else out
    view = builder.view("c", result)
    added = None
    if bias is not None:
        wide = bias.expand(result.shape)
        added = plain(builder.view("bias", wide), (*lead, builder.m, builder.n))
    factors: Any = ()
    if scales:
        views = [builder.view(f"scale_{side}", t) for side, t in zip("ab", scales, strict=True)]
        place = builder.m, builder.n, builder.k
        factors = narrow.scaled(views[0], views[1], place, tuple(v.src[0] for v in place))
        assert not isinstance(factors, str), factors
    made_problem = GemmProblem(
        op, builder.batch, builder.m, builder.n, builder.k, tuple(operands), view, (), target,
        added, alpha, beta, keeps, scales=factors, fast=fast,
        second=builder.view("c2", torch.empty_like(result)) if op == "mm_pair" else None,
    )  # fmt: skip
    if made_problem.second is not None:
        builder.other = made_problem.other
    stores: list[Store] = []
    if epilogue is not None:
        for name, (where, what) in epilogue(builder, made_problem.product).items():
            seen = builder.view(name, where)
            stores.append(
                Store(name, ix.linearize(made_problem.place, seen.stride, seen.offset), what)
            )
    buffers = tuple(builder.buffers[name] for name in sorted(builder.buffers))
    values = {e.arg.name: n for n, e in names.items()}
    return Made(
        replace(made_problem, epilogue=tuple(stores), buffers=buffers), builder.tensors, values
    )


def arguments(made: Made, kernel: Kernel) -> list[Any]:
    """What a kernel is launched with, memory of its own included."""
    device = next(iter(made.tensors.values())).device
    own = {
        "workspace": torch.full((ix.evaluate(kernel.workspace, made.values),), torch.nan),
        "counters": torch.zeros(ix.evaluate(kernel.counters, made.values), dtype=torch.int32),
    }
    memory = {**made.tensors, **{name: t.to(device) for name, t in own.items()}}
    found: list[Any] = [memory[name] if kind == "ptr" else made.values[name]
                        for kind, name in kernel.arguments]  # fmt: skip
    if kernel.checked:
        found.append(torch.zeros(1, dtype=torch.int64, device=device))
    return found


def programs(made: Made, source: TritonSource) -> int:
    return int(eval(source.programs(source.configs[0]), {}, dict(made.values)))


def interpret(made: Made, kernel: Kernel, wide: bool = False) -> list[Any]:
    """Run in Triton's interpreter; results are in `made.tensors`."""
    source = kernel.source
    assert isinstance(source, TritonSource)
    if wide:
        assert source.wide is not None
        source = source.wide
    run = Interpreted(source.text, source.name, source.types, dict(source.configs[0].constants))
    given = arguments(made, kernel)
    addresses = [g.data_ptr() if isinstance(g, torch.Tensor) else g for g in given]
    if source.scratched:  # the interpreter needs none
        addresses.pop()
    run(programs(made, source), *addresses)
    return given
