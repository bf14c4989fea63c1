"""Grouped products: in the interpreter, forward and gradients, with what follows, and compiled."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.test_gemm_compile import compiled as built
from tests.programs import compiled, counting
from tilewright import config, metrics
from tilewright.gemm import choose, grouped
from tilewright.gemm.triton import TritonCandidate, TritonProvider
from tilewright.ir import index as ix
from tilewright.ir.program import Buffer, Opaque, Origin, Program, View
from tilewright.target import Target
from tilewright.testing import run_and_get_code

BF16 = torch.bfloat16
TUNED: dict[str, Any] = {"max_autotune": True, "test_configs.max_mm_configs": 1,
                         "max_autotune_gemm_backends": "TRITON"}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> None:
    choose._memo.clear()


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.aten._grouped_mm(a, b, ends)


def exact(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """In float64, group by group; what is in no group is zero."""
    a, b, bounds = a.double(), b.double(), [0, *ends.tolist()]
    if b.dim() == 2:
        return torch.stack([a[:, s:e] @ b[s:e] for s, e in pairwise(bounds)])
    out = a.new_zeros(a.shape[0], b.shape[2])
    for g, (s, e) in enumerate(pairwise(bounds)):
        out[s:e] = a[s:e] @ b[g]
    return out


def run(function: Callable[..., Any], *args: Tensor, **options: Any) -> tuple[Any, str]:
    with as_cuda():
        call = compiled(function, options={**TUNED, **options})
        found, code = run_and_get_code(call, *args)
    assert not any("is replaced by torch's own" in c for c in code)
    return found, "\n".join(code)


def check(found: Tensor, wanted: Tensor, steps: float = 2.0) -> None:
    """Within roundings of the result: sums are of float32."""
    scale = wanted.abs() + wanted.square().mean().sqrt()
    error = (found.double() - wanted).abs() / scale
    assert float(error.max()) <= steps * torch.finfo(found.dtype).eps, float(error.max())


def offsets(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


GROUPS: dict[str, tuple[int, ...]] = {
    "even": (16, 32, 48), "empty ones": (0, 0, 40, 48, 48), "odd": (1, 4, 37, 48), "one": (48,),
    "many": tuple(range(1, 49)),
}  # fmt: skip


@pytest.mark.parametrize("groups", GROUPS)
def test_rows_in_groups(groups: str) -> None:
    ends = offsets(*GROUPS[groups])
    a, b = torch.randn(48, 40).to(BF16), torch.randn(len(ends), 40, 24).to(BF16)
    found, code = run(grouped_mm, a, b, ends)
    assert "triton_tem_fused_" in code and "extern_" not in code
    check(found, exact(a, b, ends))


def test_rows_beyond_the_last_group_are_nobodys() -> None:
    a, b, ends = torch.randn(48, 16).to(BF16), torch.randn(2, 16, 8).to(BF16), offsets(16, 30)
    found, _ = run(grouped_mm, a, b, ends)
    check(found[:30], exact(a, b, ends)[:30])


@pytest.mark.parametrize("groups", ["even", "empty ones"])
def test_k_in_groups(groups: str) -> None:
    """What a gradient of the groups' matrices is; one of nothing is zero."""
    ends = offsets(*GROUPS[groups])
    a, b = torch.randn(48, 24).to(BF16).t(), torch.randn(48, 40).to(BF16)
    found, code = run(grouped_mm, a, b, ends)
    assert "triton_tem_fused_" in code and "extern_" not in code
    check(found, exact(a, b, ends))


def test_what_follows_is_in_the_same_kernel() -> None:
    """As a mixture of experts has it: a weight for each row, and a gate."""
    a, b, ends = torch.randn(32, 16).to(BF16), torch.randn(2, 16, 24).to(BF16), offsets(11, 32)
    gate, weight = torch.randn(32, 24).to(BF16), torch.randn(32, 1).to(BF16)

    def layer(a: Tensor, b: Tensor, ends: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.silu(grouped_mm(a, b, ends)) * gate * weight

    found, code = run(layer, a, b, ends, gate, weight)
    assert "triton_tem_fused_" in code and "triton_poi_" not in code
    wanted = torch.nn.functional.silu(exact(a, b, ends)) * gate.double() * weight.double()
    check(found, wanted, steps=4.0)


def test_trained() -> None:
    """Three grouped products, each of them a template."""
    a = torch.randn(32, 16).to(BF16).requires_grad_()
    b = torch.randn(3, 16, 24).to(BF16).requires_grad_()
    ends, weights = offsets(8, 8, 32), torch.randn(32, 24).to(BF16)
    with as_cuda(), config.patch(**TUNED):
        found = compiled(grouped_mm)(a, b, ends)
        mine = torch.autograd.grad(found, (a, b), weights)
    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    wanted = exact(wide[0], wide[1], ends)
    theirs = torch.autograd.grad(wanted, wide, weights.double())
    for x, y in zip((found.detach(), *mine), (wanted.detach(), *theirs), strict=True):
        check(x, y)


def test_sizes_that_change() -> None:
    """Rows in one compilation; other offsets are other numbers alone."""
    b = torch.randn(3, 16, 8).to(BF16)
    metrics.reset()
    with as_cuda(), config.patch(**TUNED):
        call, counter = counting(grouped_mm)
        for rows, ends in ((32, (5, 6, 32)), (7, (0, 7, 7)), (50, (16, 32, 50))):
            a = torch.randn(rows, 16).to(BF16)
            torch._dynamo.mark_dynamic(a, 0)
            check(call(a, b, offsets(*ends)), exact(a, b, offsets(*ends)))
            assert metrics.counters["gemm"] == {"TRITON": 1}
    assert counter.frame_count == 1


@pytest.mark.parametrize("seed", range(4))
def test_drawn(seed: int) -> None:
    """Sizes, strides and offsets nobody chose."""
    draw = random.Random(seed)
    count, rows = draw.randint(1, 9), draw.choice([1, 3, 17, 31, 64, 97])
    k, n = (8 * draw.randint(1, 9) for _ in range(2))
    ends = offsets(*sorted(draw.randint(0, rows) for _ in range(count - 1)), rows)
    a = torch.randn(k, rows).to(BF16).t() if draw.random() < 0.5 and rows % 8 == 0 else (
        torch.randn(rows, k + 8).to(BF16)[:, 8:])  # fmt: skip
    b = torch.randn(count, n, k).to(BF16).mT if draw.random() < 0.5 else (
        torch.randn(count + 1, k, n).to(BF16)[1:])  # fmt: skip
    found, _ = run(grouped_mm, a, b, ends)
    check(found, exact(a, b, ends))


# ---- without a program


def problem(a: Tensor, b: Tensor, count: int, arch: str) -> grouped.GroupedProblem | str:
    ends = torch.empty(count, dtype=torch.int32, device="meta")
    shape = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (count, a.shape[0], b.shape[-1])
    given = {"a": a, "b": b, "ends": ends, "out": torch.empty(shape, dtype=a.dtype, device="meta")}
    views = {name: View(name, tuple(map(ix.as_index, t.shape)), tuple(map(ix.as_index, t.stride())),
                        ix.ZERO, t.dtype) for name, t in given.items()}  # fmt: skip
    buffers = {v.buffer: Buffer(v.buffer, v.dtype, torch.device("cuda", 0), v.size, v.stride)
               for v in views.values()}  # fmt: skip
    args = views["a"], views["b"], views["ends"], None, None
    call = Opaque("call", grouped.TARGETS[0], args, {}, ("out",), (), Origin(()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped.Target, "of", lambda device: Target(arch))
        return grouped.parsed(Program(buffers=buffers), call, views["out"])


def meta(*size: int) -> Tensor:
    return torch.empty(*size, dtype=BF16, device="meta")


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("along_k", [False, True])
def test_compiled_for_cards(arch: str, along_k: bool) -> None:
    """The matrix units of each, and nothing spilled."""
    made = problem(meta(1024, 4096).t(), meta(1024, 2048), 8, arch) if along_k else (
        problem(meta(4096, 1024), meta(8, 1024, 2048), 8, arch))  # fmt: skip
    assert isinstance(made, grouped.GroupedProblem)
    with config.patch(max_autotune=True):
        first = TritonProvider().candidates(made, "none")[0]
        assert isinstance(first, TritonCandidate)
        found = built(first)
    assert found["facts"].stack == 0
    assert {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}[arch] in found["ptx"]


REFUSED = {
    "it is a batch of products": (meta(4, 8, 16), meta(4, 16, 8)),
    "or its columns are in groups": (meta(4, 8, 16), meta(16, 8)),
    "no template multiplies groups of torch.int8": (meta(8, 16).to(torch.int8),
                                                    meta(4, 16, 8).to(torch.int8)),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_the_librarys(why: str) -> None:
    found = problem(*REFUSED[why], 4, "sm_90")
    assert isinstance(found, str) and why in found


def test_offsets_while_it_is_timed() -> None:
    made = problem(meta(512, 64), meta(4, 64, 32), 4, "sm_90")
    assert isinstance(made, grouped.GroupedProblem)
    assert made.contents == {"ends": (128, 256, 384, 512)} and made.hints == (4, 128, 32, 64)
