"""Linear layers on the CPU by C++ templates: what is one kernel, and what is merely right (CG-*).

Weights are arguments like any other: nothing is packed ahead of a call, so nothing is kept.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.test_gemm_programs import most_fused
from tests.programs import compiled
from tilewright import metrics
from tilewright.gemm import cpp
from tilewright.runtime import cxx
from tilewright.target import Target
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TEMPLATE: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "CPP",
                            "test_configs.max_mm_configs": 1}  # fmt: skip


@pytest.fixture(autouse=True)
def fused() -> Generator[None]:
    select.add_preprocessing_fn(most_fused)
    with fresh_cache():
        yield
    select.clear_preprocessing_fns()


def r(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.25).to(dtype)


def kernels(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None,
            tolerance: float = 2e-3, **options: Any) -> tuple[int, str]:  # fmt: skip
    """How many kernels a program is, and its code; results are compared with eager's."""
    before = metrics.generated_kernel_count
    call = compiled(fn, options={**TEMPLATE, **options}, dynamic=dynamic)
    result, code = run_and_get_code(call, *args)
    torch.testing.assert_close(result, fn(*args), rtol=tolerance, atol=tolerance)
    return metrics.generated_kernel_count - before, "\n".join(code)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_cg_1_a_linear_layer_is_one_template(dtype: torch.dtype) -> None:
    """With one row and a thousand, products of one number and of a thousand, one column of the
    result and a thousand, two dimensions and three."""
    loose = 2e-3 if dtype == F32 else 3e-2
    for shape, n, bias in (
        ((1,), 1003, True),
        ((2,), 1, False),
        ((5, 7), 48, True),
        ((1000,), 19, False),
    ):
        k = {1003: 1001, 19: 1}.get(n, 27)
        x, w = r(*shape, k, dtype=dtype), r(n, k, dtype=dtype)
        given = (x, w, r(n, dtype=dtype)) if bias else (x, w)
        count, code = kernels(F.linear, *given, tolerance=loose)
        assert count == 1 and "extern_" not in code, (shape, n, k)


EPILOGUES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid, "leaky relu": F.leaky_relu, "hardtanh": F.hardtanh,
    "div": lambda x: x / 3, "elu": F.elu, "square": torch.square,
}  # fmt: skip


def test_cg_2_what_is_applied_to_a_layer_is_in_its_kernel() -> None:
    weights = [r(20 + k, 24) for k in range(len(EPILOGUES))]
    biases = [r(len(w)) for w in weights]

    def each(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        rows = zip(EPILOGUES.values(), weights, biases, strict=True)
        return [apply(F.linear(x, w, b)) for apply, w, b in rows]

    count, code = kernels(each, r(9, 24), weights, biases)
    assert count == len(EPILOGUES) and "extern_" not in code


@pytest.mark.parametrize("rank", [2, 3])
def test_cg_2_unary_and_binary_chains(rank: int) -> None:
    def chain(x: Tensor, w: Tensor, b: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(F.relu(F.linear(x, w, b)) * other - other) + 1

    lead = (3, 5)[: rank - 1]
    count, _ = kernels(chain, r(*lead, 24), r(40, 24), r(40), r(*lead, 40))
    assert count == 1


REINDEXED: dict[str, Callable[..., Any]] = {
    "transpose": lambda x, w, y: F.relu(F.linear(x, w).t()) + 1,
    "permute": lambda x, w, y: F.relu(F.linear(x, w)).view(4, 6, 5, 8).permute(0, 2, 1, 3) * 2,
    "reshape": lambda x, w, y: F.relu(F.linear(x, w)).reshape(12, 80) + 1,
    "several": lambda x, w, y: (F.linear(x, w) + y).view(4, 6, 40).transpose(0, 1).relu(),
    "gather": lambda x, w, y: F.linear(x, w)[torch.tensor([3, 0, 3, 23])] * 2,
    "rows added by number": lambda x, w, y: F.linear(x, w) + y[torch.arange(23, -1, -1)],
    "shared": lambda x, w, y: (z := F.linear(x, w), z.relu(), z + y),
    "reduced": lambda x, w, y: F.linear(x, w).softmax(-1),
    "transposed operand": lambda x, w, y: F.relu(F.linear(x.t().contiguous().t(), w)),
}  # fmt: skip


@pytest.mark.parametrize("name", REINDEXED)
def test_cg_3_epilogues_behind_views(name: str) -> None:
    """Fused where every element of the product is used once in its place; right everywhere."""
    count, code = kernels(REINDEXED[name], r(24, 16), r(40, 16), r(24, 40))
    assert count == {"gather": 2, "reduced": 2}.get(name, 1), code


def test_cg_3_the_operand_of_an_epilogue_is_overwritten() -> None:
    def in_place(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        y.add_(F.linear(x, w))
        return y.relu()

    x, w, y = r(24, 16), r(40, 16), r(24, 40)
    expected = y + F.linear(x, w)
    result = compiled(in_place, options=TEMPLATE)(x, w, y)
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(result, expected.relu(), rtol=2e-3, atol=2e-3)


def test_cg_4_registers_of_the_machine_and_one_kernel_for_equal_layers() -> None:
    """Tiles follow the instruction set; AMX has no kernel of its own: the library is timed."""
    most = {isa: max(rows * vecs for rows, vecs in cpp.TILES[isa]) for isa in cpp.TILES}
    assert most["avx512"] > most["avx2"] > most["scalar"]
    for isa in ("avx512", "avx2", "scalar"):
        assert most[isa] <= cpp.REGISTERS[isa], isa
        assert bool(Target("x86_64", isa=isa).cxx_flags) is (isa != "scalar")

    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = F.relu(F.linear(x, w))
        return x

    built: set[str] = set()
    load = cxx._build

    def seen(source: cxx.CxxSource, order: Any) -> cxx.Loaded:
        if "tw::gemm" in source.text:
            built.add(source.text)
        return load(source, order)

    with mock.patch.object(cxx, "_build", seen):
        assert kernels(layers, r(9, 32), *(r(32, 32) for _ in range(3)))[0] == 3
    assert len(built) == 1, "three calls of one kernel"


def test_cg_5_weights_of_eight_bits() -> None:
    """They are widened where they are multiplied. Several on one input are right, too; those of
    four bits are the library's own packed call."""

    def one(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, w.to(x.dtype)) * scale

    def two(x: Tensor, w: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return torch.cat([one(x, w, scale), one(x, v, scale)], -1)

    w, v = (torch.randint(-128, 128, (40, 64), dtype=torch.int8) for _ in range(2))
    x, scale = r(6, 64, dtype=BF16), (torch.rand(40) / 100).to(BF16)
    count, code = kernels(one, x, w, scale, tolerance=3e-2)
    assert count == 1 and "extern_" not in code
    kernels(two, x, w, v, scale, tolerance=3e-2)

    packed = torch.randint(0, 255, (64, 32), dtype=torch.uint8)
    groups = torch.rand(2, 64, 2).to(BF16) / 10

    def four(x: Tensor, w: Tensor, groups: Tensor) -> Tensor:
        made = torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, 32, groups)
        return F.relu(made)

    kernels(four, x, packed, groups, tolerance=3e-2)


def test_cg_6_a_product_of_integers_is_scaled_in_one_kernel() -> None:
    """Rows are rounded to eight bits, multiplied as integers, and scaled back."""

    def quantised(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / 127
        rounded = (x / step).round().clamp(-128, 127).to(torch.int8)
        return F.relu(torch._int_mm(rounded, w.t()).float() * step * scale)

    w = torch.randint(-128, 128, (40, 64), dtype=torch.int8)
    count, code = kernels(quantised, r(32, 64), w, torch.rand(40))
    assert count == 2 and "extern_" not in code, "rounding, and the product with what follows"


@pytest.mark.parametrize("options", [
    {"coordinate_descent_tuning": True}, {"cpp.threads": 1}, {"cpp.threads": 2},
    pytest.param({"max_autotune_gemm_search_space": "EXHAUSTIVE", "test_configs.max_mm_configs": 3},
                 marks=pytest.mark.slow),
], ids=repr)  # fmt: skip
def test_cg_7_however_it_is_walked_the_result_is_the_same(options: dict[str, Any]) -> None:
    """Slices of k, blocks for caches, threads (`test_blocks_of_any_size` has each by itself)."""
    x, w = r(70, 900), r(50, 900)
    select.clear_preprocessing_fns()
    kernels(lambda x, w: F.relu(F.linear(x, w)), x, w, **options)


@pytest.mark.parametrize("widths", [(40, 40), (40, 24)])
def test_cg_8_layers_of_one_input(widths: tuple[int, int]) -> None:
    """Side by side, and one as the gate of the other: a kernel each."""

    def beside(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return F.relu(F.linear(x, w)), F.linear(x, v) + 1

    def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.silu(F.linear(x, w)) * F.linear(x, v)

    x, w, v = r(9, 32), r(widths[0], 32), r(widths[1], 32)
    assert kernels(beside, x, w, v)[0] == 2
    if widths[0] == widths[1]:
        assert kernels(gated, x, w, v)[0] == 2


BATCHED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "plain": (torch.bmm, (r(3, 9, 16), r(3, 16, 20))),
    "relu": (lambda x, y: F.relu(x @ y) * 2, (r(3, 9, 16), r(3, 16, 20))),
    "permuted": (lambda x, y: x.permute(1, 0, 2) @ y, (r(9, 3, 16), r(3, 16, 20))),
    "of itself": (lambda x: x @ x, (r(3, 12, 12),)),
    "broadcast": (lambda x, y: x @ y, (r(1, 9, 16).expand(3, 9, 16), r(3, 16, 20))),
    "offset": (lambda x, y: x @ y[1:], (r(3, 9, 16), r(4, 16, 20))),
    "two fused": (lambda x, y, z: torch.tanh((x @ y) * 0.5 + z).relu(),
                  (r(3, 9, 16), r(3, 16, 20), r(9, 20))),
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BATCHED)
def test_cg_9_batched_products(name: str, dynamic: bool) -> None:
    function, args = BATCHED[name]
    count, code = kernels(function, *args, dynamic=dynamic)
    assert count == 1, code


def test_cg_10_weights_are_not_kept_and_may_be_shared() -> None:
    def tied(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, w)), w.t())

    x, w = r(9, 32), r(40, 32)
    call = compiled(tied, options=TEMPLATE)
    torch.testing.assert_close(call(x, w), tied(x, w), rtol=2e-3, atol=2e-3)
    kept = weakref.ref(w)
    del w
    gc.collect()
    assert kept() is None, "a packed copy, or the weight itself, is held by the program"
