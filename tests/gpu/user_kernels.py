"""Users' Triton kernels on a card; eager launches the same ones."""

from __future__ import annotations

from typing import Any
from unittest import SkipTest

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tests import kernels as user
from tests.gpu.cases import case, check, cuda
from tilewright import metrics


def _add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    n = x.numel()
    user.add_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, BLOCK=256)
    return out


@case
def user_kernels() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        total = _add(x.relu(), y)
        parts = torch.empty(2, x.numel(), device=x.device)
        user.two_sin_kernel[(x.numel(),)](total, parts[0], parts[1], x.numel(), BLOCK=4)
        user.sin_kernel[(x.numel(),)](x, x, x.numel(), BLOCK=4)
        return total * 2, parts.sum(0)

    check(f, cuda(1000), cuda(1000))
    check(lambda x, y: _add(x[3:], y[1:-2]).cos(), cuda(1000), cuda(1000))
    assert metrics.counters["user_kernels"]["launched by Triton"] == 0


@case
def user_kernels_of_any_size() -> None:
    compiled = torch.compile(_add, backend="tilewright", dynamic=True)
    for n in (33, 1024, 100_000, 7):
        x, y = cuda(n), cuda(n)
        assert torch.equal(compiled(x, y), x + y)
    assert metrics.cache_misses <= 1


@case
def user_kernels_train() -> None:
    check(user.Sin.apply, cuda(500, grad=True), native=False)
    torch._dynamo.reset()
    check(lambda x: user.TwoSin.apply(x).sum(), cuda(500, grad=True))


@triton.autotune([triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((64, 1), (1024, 4))],
                 key=["n"], restore_value=["out"])  # fmt: skip
@triton.jit
def _tuned(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(out + at, at < n) + tl.load(x + at, at < n), at < n)


@case
def user_kernels_are_tuned() -> None:
    """UT-5: trying settings changes nothing; another value of the key is tried on its own."""

    def f(x: Tensor, out: Tensor) -> Tensor:
        n = x.numel()
        _tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
        return out + 1

    for n in (100_000, 5000):
        torch._dynamo.reset()
        check(f, cuda(n), cuda(n), calls=2, dynamic=False)


@triton.jit
def _tile(source, target, BLOCK: tl.constexpr):
    at = [tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK]
    target.store(at, source.load(at) * 2)


@case
def user_kernels_with_descriptors() -> None:
    """UT-8."""
    if torch.cuda.get_device_capability() < (9, 0):
        raise SkipTest("tensor descriptors need a card of compute capability 9.0")

    def f(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        blocks = [TensorDescriptor.from_tensor(t, [32, 32]) for t in (x, out)]
        _tile[(4, 4)](*blocks, BLOCK=32)
        return out + 1

    check(f, cuda(128, 128))


@case
def user_kernels_are_replayed() -> None:
    check(lambda x, y: _add(_add(x, y), y).cos(), cuda(1000), cuda(1000), calls=4,
          mode="reduce-overhead")  # fmt: skip
    assert metrics.counters["cudagraphs"]["recorded"] > 0


@case
def user_kernels_that_do_not_compile() -> None:
    def f(x: Tensor) -> Tensor:
        user.broken_kernel[(1,)](x, 16)
        return x

    said = ""
    try:
        torch.compile(f, backend="tilewright")(cuda(16))
    except Exception as error:
        said = str(error)
    assert "tests/kernels.py" in said and "undefined_name" in said
