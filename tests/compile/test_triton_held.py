"""Long rows of sixteen bits that a program holds in pieces, in the interpreter and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tests.limits import limit

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def residual(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, F.layer_norm(total, total.shape[-1:], weight)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().to(torch.int8), scale


def _groups(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 2, weight))


CASES: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
    (softmax, (normal(17, 10001),)),
    (softmax, (normal(17, 16408, dtype=F16),)),
    (residual, (normal(17, 9003, dtype=F16), normal(17, 9003, dtype=F16) * 2,
                 normal(9003, dtype=F16))),
    (residual, (normal(17, 17008), normal(17, 17008) * 2, normal(17008))),
    (_quantized, (normal(17, 12345),)),
    (_groups, (normal(9, 4, 6100), normal(4))),
    (softmax, (normal(17, 16908, dtype=F32),)),
    (_normed, (normal(17, 9004, dtype=F32), normal(9004, dtype=F32))),
]  # fmt: skip


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("fn", "args"), CASES)
def test_rows_are_loaded_once(fn: Callable[..., Any], args: tuple[Tensor, ...],
                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    limit(monkeypatch, "CHUNKED_PER_SM", 0)
    (kernel,) = check(fn, *args, rtol=2e-2, atol=2e-2)
    assert ("tri_rows.anew(" in kernel.text) == (args[0].dtype != F32)
    pieces = -(-args[0][0].numel() // (2 if fn is _groups else 1) // kernel.config.kwargs["RBLOCK"])
    rows = sum(a.ndim > 1 for a in args)
    ends = rows if "redge" in kernel.text else 0
    loads = [line for line in kernel.text.splitlines() if "tl.load(p0" in line or (
        rows > 1 and "tl.load(p1" in line)]  # fmt: skip
    assert len(loads) == rows * pieces + ends


def test_as_many_programs_as_registers_allow() -> None:
    """Of rows of 40960 elements two on a processor."""
    x, w = torch.empty(32, 320, 64, 64, dtype=BF16), torch.empty(320, dtype=BF16)
    (kernel,) = kernels_of(lambda x, w: F.silu(F.group_norm(x, 32, w)), x, w)
    made = build(kernel)
    assert (kernel.config.num_warps, kernel.config.registers) == (16, 64) and not made.spills
    assert made.widest("ld.global") == made.widest("st.global") == 16


def test_long_rows_of_floats_are_held_by_all_threads_of_a_processor() -> None:
    (kernel,) = kernels_of(softmax, torch.empty(1711, 32768))
    assert (kernel.config.num_warps, kernel.config.registers) == (32, 64)
    assert kernel.text.count("tl.load(") == 8 and not build(kernel).spills


def test_few_rows_that_are_walked_again_are_at_work_at_once() -> None:
    """No more than a cache keeps."""
    (kernel,) = kernels_of(softmax, torch.empty(832, 103720, dtype=BF16))
    assert (kernel.config.kwargs["RBLOCK"], kernel.config.num_warps) == (16384, 32)


def test_a_warp_has_two_rows_of_which_much_is_kept() -> None:
    def distance(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = F.normalize(x.float(), dim=-1), F.normalize(y.float(), dim=-1)
        return (x * y).sum(-1), (x - y).square().sum(-1)

    x = torch.empty(65536, 512, dtype=BF16)
    (kernel,) = kernels_of(distance, x, x)
    assert (kernel.config.kwargs["XBLOCK"], kernel.config.num_warps) == (2, 1)


def test_weights_of_the_next_piece_are_loaded_before_one_is_stored() -> None:
    x, w = torch.empty(4000, 17000, dtype=BF16), torch.empty(17000, dtype=BF16)
    (kernel,) = kernels_of(_normed, x, w)
    moves = [line.split("tl.")[1][:9] for line in kernel.text.splitlines()
             if "tl.load(p1" in line or "tl.store(" in line]  # fmt: skip
    count = moves.count("load(p1 +")
    assert count > 4
    assert moves == ["load(p1 +", *["load(p1 +", "store(p2 "] * (count - 1), "store(p2 "]


def test_which_rows_are_not_held_in_pieces() -> None:
    """Few or wide ones, such as fit as floats or do not fit at all, and what is dear to make."""
    few, wide, long = (torch.empty(n, size, dtype=kind) for n, size, kind in (
        (264, 20000, BF16), (4000, 20000, torch.float32), (4000, 50000, BF16)))  # fmt: skip
    short = torch.empty(4000, 12000, dtype=BF16)
    kernels = [k for x in (few, wide, long, short) for k in kernels_of(softmax, x)]
    kernels += kernels_of(lambda x: softmax(torch.erf(x)), torch.empty(4000, 20000, dtype=BF16))
    assert not any("tri_rows.anew(" in k.text for k in kernels)
