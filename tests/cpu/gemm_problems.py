"""Problems made of real tensors, for tests of the providers of products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.gemm.problem import GemmProblem, Op, Operand, loops, plain
from tilewright.gemm.provider import Kernel
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, load, sym
from tilewright.ir.program import Buffer, Store, View
from tilewright.runtime import cxx
from tilewright.target import Target


@dataclass
class Made:
    """A problem, the tensors behind its buffers, and the values of its symbols."""

    problem: GemmProblem
    tensors: dict[str, Tensor]
    numbers: dict[str, int]

    def at(self, name: str, tensor: Tensor, *strides: int) -> Expr:
        """An element of one more tensor at the position [batch,] m, n, with its strides there."""
        p = self.problem
        self.tensors[name] = tensor
        buffer = _buffer(name, tensor)
        buffers = tuple(sorted((*p.buffers, buffer), key=lambda b: b.name))
        self.problem = replace(p, buffers=buffers)
        return load(name, tensor.dtype, ix.linearize(p.place, strides, _offset(tensor)))

    def finish(self, stores: Sequence[tuple[str, Tensor, Expr]], keeps: bool = False) -> None:
        """The epilogue: values stored to new tensors of the result's shape."""
        found: list[Store] = []
        for name, tensor, value in stores:
            index = self.at(name, tensor, *tensor.stride()).src[0]
            found.append(Store(name, index, value))
        self.problem = replace(self.problem, epilogue=tuple(found), keeps=keeps)
        if not keeps:
            buffers = tuple(b for b in self.problem.buffers if b.name != "c")
            self.problem = replace(self.problem, buffers=buffers)

    def call(self, kernel: Kernel) -> None:
        assert isinstance(kernel.source, cxx.CxxSource)
        (built,) = cxx.build([kernel.source])
        built(*self.arguments(kernel))

    def arguments(self, kernel: Kernel) -> list[int]:
        return [self.tensors[n].untyped_storage().data_ptr() if kind == "ptr" else self.numbers[n]
                for kind, n in kernel.arguments]  # fmt: skip


def _buffer(name: str, tensor: Tensor) -> Buffer:
    numel = tensor.untyped_storage().nbytes() // tensor.itemsize
    return Buffer(name, tensor.dtype, tensor.device, (ix.as_index(numel),), (ix.ONE,))


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def product(left: Tensor, right: Tensor, out: Tensor, *, bias: Tensor | None = None,
            dynamic: bool = False, second: tuple[Tensor, Tensor] | None = None,
            **scale: float) -> Made:  # fmt: skip
    """The problem of `left @ right (+ bias)` into `out`; if dynamic, all numbers are symbols."""
    numbers: dict[str, int] = {}

    def number(value: int, name: str) -> Expr:
        if not dynamic:
            return ix.as_index(value)
        numbers[name] = value
        return sym(name, lower=0, hint=value)

    batched = left.dim() == 3
    b = number(left.shape[0], "s_b") if batched else ix.ONE
    m, n, k = (number(v, s) for v, s in ((left.shape[-2], "s_m"), (right.shape[-1], "s_n"),
                                         (left.shape[-1], "s_k")))  # fmt: skip
    batch, mv, nv, kv = loops(b, m, n, k)
    lead_size, lead = ((b,), (batch,)) if batched else ((), ())

    def view(name: str, tensor: Tensor, *size: Expr) -> View:
        stride = tuple(ix.as_index(s) if s <= 1 else number(s, f"s_{name}{i}")
                       for i, s in enumerate(tensor.stride()))  # fmt: skip
        return View(name, (*lead_size, *size), stride, ix.as_index(_offset(tensor)),
                    tensor.dtype)  # fmt: skip

    tensors: dict[str, Tensor] = {"a": left, "b": right, "c": out}
    operands = [plain(view("a", left, m, k), (*lead, mv, kv)),
                plain(view("b", right, k, n), (*lead, kv, nv))]  # fmt: skip
    if second is not None:
        tensors["e"], tensors["f"] = second
        operands += [plain(view("e", second[0], m, k), (mv, kv)),
                     plain(view("f", second[1], k, n), (kv, nv))]  # fmt: skip
    added: Operand | None = None
    op: Op = "mm_plus_mm" if second else "bmm" if batched else "mm"
    if bias is not None:
        tensors["d"] = bias
        op = "baddbmm" if batched else "addmm"
        added = plain(view("d", bias.expand_as(out), m, n), (*lead, mv, nv))
    buffers = tuple(_buffer(name, t) for name, t in sorted(tensors.items()))
    settings: dict[str, Any] = {"bias": added, **scale}
    made = GemmProblem(op, batch, mv, nv, kv, tuple(operands), view("c", out, m, n), buffers,
                       Target.host(), **settings)  # fmt: skip
    return Made(made, tensors, numbers)


def exact(left: Tensor, right: Tensor) -> Tensor:
    """The product in float64."""
    return left.double() @ right.double()


def close(actual: Tensor, expected: Tensor, k: int) -> None:
    """Near the exact result, for a sum of `k` products."""
    eps = torch.finfo(actual.dtype).eps
    size = float(expected.abs().max()) if expected.numel() else 0.0
    kept = 1e-6 if actual.dtype != torch.float64 else 1e-14
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2 * eps,
                               atol=kept * max(k, 16) ** 0.5 * max(size, 1.0))  # fmt: skip
