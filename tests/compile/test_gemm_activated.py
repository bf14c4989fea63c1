"""In default mode the library of a card adds and applies what it can in the call of a product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.programs import compiled
from tilewright import config, metrics
from tilewright.gemm import activated
from tilewright.gemm.choose import decisions
from tilewright.testing import fresh_cache, run_and_get_code

BF16, F32 = torch.bfloat16, torch.float32
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b))


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def apart(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(x @ w.t() + b)


def drawn(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (torch.randn(rows, 40, dtype=dtype), torch.randn(24, 40, dtype=dtype) / 6,
            torch.randn(24, dtype=dtype))  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 16, 33])
@pytest.mark.parametrize("layer", [relu, gelu, apart], ids=lambda f: f.__name__)
def test_one_call_for_a_layer(layer: Layer, rows: int, dtype: torch.dtype) -> None:
    given = drawn(rows, dtype)
    with as_cuda(), fresh_cache(), torch.no_grad():
        found, (code, *_) = run_and_get_code(compiled(layer), *given)
    tolerance = 1e-4 if dtype == F32 else 3e-2
    torch.testing.assert_close(found, layer(*given), rtol=tolerance, atol=tolerance)
    assert metrics.counters["gemm"]["addmm_activation by the model"] == 1
    assert metrics.generated_kernel_count == 0
    assert code.count("extern_kernels_addmm_activation_0(") == 1
    assert "us saved" in decisions[-1].why


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda x, w, b: F.gelu(F.linear(x, w, b)), id="gelu by erf"),
        pytest.param(lambda x, w, b: F.relu(F.linear(x, w)), id="nothing is added"),
        pytest.param(lambda x, w, b: (lambda y: (y, F.relu(y)))(F.linear(x, w, b)), id="kept"),
        pytest.param(lambda x, w, b: F.relu(F.linear(x, w, b)).float(), id="another type"),
        pytest.param(lambda x, w, b: F.relu(F.linear(x, w, b)).t().contiguous(), id="turned"),
        pytest.param(lambda x, w, b: F.silu(F.linear(x, w, b)), id="silu"),
        pytest.param(
            lambda x, w, b: F.relu(torch.addmm(b, x, w.t(), alpha=0.5)), id="a scaled product"
        ),
    ],
)
def test_what_the_library_cannot_do_is_a_kernel(layer: Callable[..., object]) -> None:
    given = drawn(33, BF16)
    with as_cuda(), fresh_cache(), torch.no_grad():
        found = compiled(layer)(*given)
    torch.testing.assert_close(found, layer(*given), rtol=3e-2, atol=3e-2)
    assert not metrics.counters["gemm"]["addmm_activation by the model"]


def test_nothing_is_fused_where_it_is_not_asked_for() -> None:
    with as_cuda(), fresh_cache(), torch.no_grad(), config.patch({"epilogue_fusion": False}):
        compiled(relu)(*drawn(33, BF16))
    assert not metrics.counters["gemm"]["addmm_activation by the model"]


def test_a_long_sum_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activated, "WORTH", 1e9)
    with as_cuda(), fresh_cache(), torch.no_grad():
        compiled(relu)(*drawn(33, BF16))
    assert not metrics.counters["gemm"]["addmm_activation by the model"]
