"""Triton kernels as users write them, and what lets them be compiled into programs without a card.

Dynamo looks at Triton kernels only where it finds a card that can run them; `seen()` makes it look.
On CPU tensors such a kernel runs in Triton's interpreter, and `eager(kernel)` runs it there too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils._triton
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

TWO = tl.constexpr(2)


@contextlib.contextmanager
def seen() -> Iterator[None]:
    with mock.patch.object(torch.utils._triton, "has_triton", return_value=True):
        yield


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside)
    tl.store(out + at, total, mask=inside)


@triton.jit
def sin_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.sin(tl.load(x + at, mask=inside)), mask=inside)


@triton.jit
def two_sin_kernel(x, first, second, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.sin(tl.load(x + at, mask=inside))
    tl.store(first + at, value, mask=inside)
    tl.store(second + at, value, mask=inside)


# ---- programs whose traffic is specified


def add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    add_kernel[(x.numel(),)](x, y, out, x.numel(), BLOCK=16)
    return out


def added_beside(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    t = x + 1
    return add(x, y), t


def added_before(x: Tensor, y: Tensor) -> Tensor:
    out = add(x, y)
    x.add_(1)
    return out


def added_view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    view = x.view(-1)
    return add(x, y), view * 2


def added_before_view(x: Tensor, y: Tensor) -> Tensor:
    view = x.view(-1)
    out = add(x, y)
    view.mul_(2)
    return out


def added_to_itself(x: Tensor) -> Tensor:
    return add(x, x.view(-1))


class Sin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        sin_kernel[(x.numel(),)](x, out, x.numel(), BLOCK=4)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        out = torch.empty_like(g)
        sin_kernel[(g.numel(),)](saved, out, g.numel(), BLOCK=4)
        return out


class TwoSin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        first, second = torch.empty_like(x), torch.empty_like(x)
        two_sin_kernel[(x.numel(),)](x, first, second, x.numel(), BLOCK=4)
        ctx.save_for_backward(x, second)
        return first

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, second = ctx.saved_tensors
        return g * second.sigmoid() * x


# ---- without compiling


def eager(kernel: Any) -> Any:
    """The kernel as eager runs it, on CPU tensors."""
    return InterpretedFunction(kernel.fn)


@triton.jit
def broken_kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(x + at, value + undefined_name)  # noqa: F821
