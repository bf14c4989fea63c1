"""Behaviours of max-autotune that any target shows, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from tests.cpu.test_gemm_fuse import site
from tests.programs import compiled
from tilewright import config, metrics
from tilewright.gemm import aten
from tilewright.gemm.aten import AtenCall
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select

BOTH: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": " aten, Cpp "}


@pytest.fixture(autouse=True)
def _few() -> Iterator[None]:
    """Two templates of C++ for each product: more take their compilers' time and show no more."""
    with config.patch({"test_configs.max_mm_configs": 2}):
        yield


def counter(name: str) -> int:
    return metrics.counters["inductor"][name]


def twice(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The same in two precisions: four products, two problems."""
    a16, b16, c16 = (t.to(torch.bfloat16) for t in (a, b, c))
    return (a @ b) @ c, (a16 @ b16) @ c16


def test_ma_l2_l3_four_products_are_two_problems_and_are_tuned_once() -> None:
    args = tuple(torch.randn(48, 48) / 48 for _ in range(3))
    options = {**BOTH, "fx_graph_cache": False, "prologue_fusion": False}
    with fresh_cache():
        before = counter("select_algorithm_precompile")
        torch.testing.assert_close(compiled(twice, options=options)(*args), twice(*args),
                                   rtol=1e-2, atol=1e-2)  # fmt: skip
        assert counter("select_algorithm_precompile") - before == 2
        torch._dynamo.reset()
        before = counter("select_algorithm_precompile")
        torch.testing.assert_close(compiled(twice, options=options)(*args), twice(*args),
                                   rtol=1e-2, atol=1e-2)  # fmt: skip
        assert counter("select_algorithm_precompile") == before


def test_ma_o11_nothing_fails_to_compile_for_a_tiny_product() -> None:
    before = counter("select_algorithm_num_precompilation_exceptions")
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    with fresh_cache():
        call = torch.compile(torch.mm, backend="tilewright", mode="max-autotune")
        torch.testing.assert_close(call(x, y), x @ y)
    assert counter("select_algorithm_num_precompilation_exceptions") == before


def renamed(x: Tensor, y: Tensor, z: Tensor, other: Tensor) -> Tensor:
    product = x * y
    product.diagonal().copy_(other)
    result = torch.mm(product, z)
    result.diagonal().add_(1)
    return result


def several(x: Tensor, number: Tensor) -> tuple[Any, ...]:
    return x + x, number.item(), x * x, x @ x, x**2


@pytest.mark.parametrize("backends", ["ATEN", "CPP", "ATEN,CPP"])
def test_ma_j2_mutation_around_a_product(backends: str) -> None:
    args = (torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3), torch.randn(3))
    options = {"max_autotune": True, "max_autotune_gemm_backends": backends}
    with fresh_cache():
        torch.testing.assert_close(compiled(renamed, options=options)(*args), renamed(*args))


def test_ma_j3_small_groups_around_a_product() -> None:
    args = (torch.randn(64, 64), torch.tensor(3))
    codes: list[list[str]] = []
    for _ in range(2):  # two schedulings make the same groups in the same order
        with fresh_cache(), torch._dynamo.config.patch(capture_scalar_outputs=True):
            options = {**BOTH, "max_autotune_gemm_backends": "CPP", "max_fusion_size": 2,
                       "deterministic": True}  # fmt: skip
            found, code = run_and_get_code(compiled(several, options=options), *args)
        torch.testing.assert_close(found, several(*args), rtol=1e-4, atol=1e-4)
        codes.append(code)
    assert codes[0] == codes[1]


def test_ma_a9_only_library_choices_train() -> None:
    """Where no template is offered."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 57)
    x, target = torch.randn(32, 24, requires_grad=True), torch.randint(0, 57, (32,))

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(layer(x), target)

    wanted = (x, layer.weight, layer.bias)
    expected = torch.autograd.grad(loss(x, target), wanted)
    options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}
    with fresh_cache():
        found = torch.autograd.grad(compiled(loss, options=options)(x, target), wanted)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_ma_b3_a_row_is_added_as_a_row() -> None:
    """The library has an epilogue for it."""
    row = site(torch.addmm, torch.randn(10), torch.randn(6, 4), torch.randn(4, 10)).bare.problem
    call = aten.AtenCandidate(row).kernel().source
    assert isinstance(call, AtenCall)
    assert len(call.views[0].size) == 1
    _, code = run_and_get_code(
        compiled(torch.addmm, options={"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}),
        torch.randn(10), torch.randn(6, 4), torch.randn(4, 10))  # fmt: skip
    assert "extern_aten_addmm_default(arg0, " in code[0]


def both_strided(x1: Tensor, y1: Tensor, x2: Tensor, y2: Tensor) -> Tensor:
    return x1 @ y1 + x2 @ y2


@pytest.mark.parametrize(
    ("ids", "function", "rank"),
    [("MA-C3", both_strided, 4), ("MA-P7", torch.mm, 2), ("MA-P8", torch.addmm, 3)],
)
def test_operands_in_columns_with_gaps(ids: str, function: Callable[..., Any], rank: int) -> None:
    """Benchmark inputs have the real extent in memory."""
    strided = [torch.randn(20 * 57).as_strided((50, 20), (1, 57)) for _ in range(2)]
    plain = [torch.randn(20, 12) for _ in range(2)]
    args = [strided[0], plain[0], strided[1], plain[1]][:rank]
    if function is torch.addmm:
        args = [torch.randn(12), strided[0], plain[0]]
    for backends in ("CPP", "ATEN,CPP"):
        with fresh_cache():
            options = {"max_autotune": True, "max_autotune_gemm_backends": backends}
            found = compiled(function, options=options)(*args)
        torch.testing.assert_close(found, function(*args), rtol=1e-3, atol=1e-3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("space", ["DEFAULT", "EXHAUSTIVE"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_ma_i1_empty_sums_of_products(dynamic: bool, space: str) -> None:
    def both(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return a @ b + c @ d

    options = {"max_autotune": True, "max_autotune_gemm_search_space": space}
    with fresh_cache():
        call = compiled(both, options=options, dynamic=dynamic)
        for rows in (0, 3) if dynamic and space == "DEFAULT" else (0,):
            args = [torch.randn(s) for s in ((rows, 64), (64, 1536)) * 2]
            found = call(*args)
            assert found.shape == (rows, 1536) and found.dtype == torch.float32
            torch.testing.assert_close(found, both(*args), rtol=1e-4, atol=1e-3)


EMPTY: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "MA-I2": (lambda a, b: torch.sin(a) @ b, ((0, 10), (10, 100))),
    "MA-I3": (torch.addmm, ((100,), (0, 10), (10, 100))),
}


@pytest.mark.parametrize("ids", EMPTY)
@pytest.mark.parametrize("dynamic", [False, True])
def test_no_rows(ids: str, dynamic: bool) -> None:
    function, sizes = EMPTY[ids]
    args = [torch.randn(s) for s in sizes]
    found = compiled(function, options={"max_autotune": True}, dynamic=dynamic)(*args)
    assert found.shape == (0, 100) and found.dtype == torch.float32


@pytest.mark.parametrize("waits", [False, True])
def test_ma_q2_no_choice_takes_a_finite_time(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Whether the choice waits for what surrounds the product or not."""
    lookup = select.AlgorithmSelectorCache.lookup

    def never(self: Any, *args: Any) -> Any:
        return dict.fromkeys(lookup(self, *args), math.inf)

    monkeypatch.setattr(select.AlgorithmSelectorCache, "lookup", never)
    options = {"max_autotune": True, "max_autotune_gemm_backends": "CPP",
               "benchmark_epilogue_fusion": waits}  # fmt: skip
    with fresh_cache(), pytest.raises(BackendCompilerFailed, match="NoValidChoicesError"):
        compiled(lambda x: (x @ x).relu(), options=options)(torch.zeros(16, 16))


@pytest.mark.parametrize("backends", ["ATEN", "CPP", "ATEN,CPP"])
def test_ma_p9_a_batch_of_one_that_is_not_stepped_over(backends: str) -> None:
    left = torch.randn(57 * 20).as_strided((1, 50, 20), (0, 1, 57))
    right = torch.randn(20 * 12).as_strided((1, 20, 12), (0, 12, 1))
    assert left.stride(0) == right.stride(0) == 0
    options = {"max_autotune": True, "max_autotune_gemm_backends": backends}
    with fresh_cache():
        found = compiled(torch.bmm, options=options)(left, right)
    torch.testing.assert_close(found, torch.bmm(left, right), rtol=1e-3, atol=1e-3)


def test_ma_q4_errors_reach_the_user_as_compile_errors() -> None:
    options = {"max_autotune": True, "max_autotune_gemm_backends": ""}
    with pytest.raises(BackendCompilerFailed, match="NoValidChoicesError: no choices to select"):
        compiled(torch.mm, options=options)(torch.zeros(2, 2), torch.zeros(2, 2))


def test_ma_a1_mode_and_options() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with fresh_cache():
        ways: list[dict[str, Any]] = [{"mode": "max-autotune"}, {"options": BOTH}, {}]
        for how in ways:
            torch._dynamo.reset()
            call = torch.compile(torch.mm, backend="tilewright", fullgraph=True, **how)
            torch.testing.assert_close(call(x, y), x @ y)
    with pytest.raises(RuntimeError, match=r"[Ee]ither mode or options"):
        torch.compile(torch.mm, backend="tilewright", mode="max-autotune", options=BOTH)
