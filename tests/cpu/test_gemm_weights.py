"""Products with packed weights on the CPU: what is one kernel, and that the library competes.

Where values are to be equal, operands and scales have few bits: sums are exact in any order, so a
result that is rounded at another place than eager's, or more than once, differs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gemm_programs import most_fused
from tests.programs import compiled
from tilewright import metrics
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPP: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "CPP",
                       "test_configs.max_mm_configs": 1}  # fmt: skip
BOTH = {**CPP, "max_autotune_gemm_backends": "ATEN,CPP"}
packed = torch.ops.aten._weight_int8pack_mm


@pytest.fixture(autouse=True)
def fused() -> Generator[None]:
    torch.manual_seed(0)
    select.add_preprocessing_fn(most_fused)
    with fresh_cache():
        yield
    select.clear_preprocessing_fns()


def made(fn: Callable[..., Any], *args: Any, options: dict[str, Any] = CPP,
         dynamic: bool | None = None) -> tuple[Any, int, str]:  # fmt: skip
    """The result of a compiled function, how many kernels it is, and its code."""
    before = metrics.generated_kernel_count
    call = compiled(fn, options=options, dynamic=dynamic)
    result, code = run_and_get_code(call, *args)
    return result, metrics.generated_kernel_count - before, "\n".join(code)


def weights(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randint(-128, 128, (n, k), dtype=torch.int8), few_bits(n).to(dtype)


def few_bits(*shape: int) -> Tensor:
    return (2 * torch.randint(1, 8, shape) + 1) / 1024


def whole(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-8, 9, (m, k)).to(dtype)


# ---- weights of eight bits


@pytest.mark.parametrize(("dtype", "m"), [
    (BF16, 1), (BF16, 3), (BF16, 64), (F32, 1), (F32, 3), (F32, 64), (F16, 3),
])  # fmt: skip
def test_a_layer_is_one_kernel(dtype: torch.dtype, m: int) -> None:
    """What is quick to compute again is fused in front; of two bytes it is a kernel by itself, as
    in front of any product."""

    def layer(x: Tensor, w: Tensor, s: Tensor, bias: Tensor, more: Tensor) -> Tensor:
        return F.gelu(packed(x.relu(), w, s) + bias) + more

    w, s = weights(33, 64, dtype)
    given = whole(m, 64, dtype), w, s, torch.randn(33).to(dtype), torch.randn(m, 33).to(dtype)
    result, count, code = made(layer, *given)
    torch.testing.assert_close(result, layer(*given))
    assert count == (1 if dtype == F32 else 2) and "extern_" not in code


@pytest.mark.parametrize(("dtype", "m"), [(BF16, 64), (F16, 3), (F32, 1)])
def test_it_is_scaled_before_it_is_rounded(dtype: torch.dtype, m: int) -> None:
    x, (w, s) = whole(m, 96, dtype), weights(31, 96, dtype)
    result, count, code = made(lambda x, w, s: packed(x, w, s).relu(), x, w, s)
    assert torch.equal(result, packed(x, w, s).relu())
    assert count == 1 and "extern_" not in code
    twice = ((x.float() @ w.float().t()).to(dtype) * s).relu()
    assert dtype == F32 or not torch.equal(result, twice), "the case tells them apart"


def kept(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = packed(x, w, s)
    return y, y * 2


def part(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return packed(x[2:, :32], w[3:, :32].contiguous(), s[3:]) * 2


def again(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return packed(x, w, s) * packed(x, w, s + 1).relu()


@pytest.mark.parametrize("fn", [kept, part, again])
@pytest.mark.parametrize("m", [6, 0])
def test_views_and_what_is_needed_twice(fn: Callable[..., Any], m: int) -> None:
    x, (w, s) = whole(m + 2, 64, BF16)[2 if m == 0 else 0 :], weights(33, 64, BF16)
    if fn is part and m == 0:
        x = whole(2, 64, BF16)
    result, _, code = made(fn, x, w, s)
    torch.testing.assert_close(result, fn(x, w, s), rtol=0, atol=0)
    assert ("extern_" in code) == (m == 0), "of nothing the library makes nothing"


def test_the_library_competes() -> None:
    """First among the choices: of equals the first is taken. It alone is called where nothing is
    tuned, where C++ is not among the backends, and for sizes known only at run time."""
    seen: list[list[str]] = []

    def listed(choices: list[Any]) -> list[Any]:
        seen.append([c.name for c in choices])
        return choices[:1]

    select.clear_preprocessing_fns()
    select.add_preprocessing_fn(listed)
    x, (w, s) = whole(3, 64, BF16), weights(33, 64, BF16)
    fn = lambda x, w, s: packed(x, w, s).relu()  # noqa: E731
    result, count, code = made(fn, x, w, s, options=BOTH)
    assert torch.equal(result, fn(x, w, s)) and count == 1
    assert "extern_aten__weight_int8pack_mm" in code
    (names,) = seen
    assert names[0] == "_weight_int8pack_mm" and any("epilogue" in n for n in names[1:])
    for options, dynamic in (({}, None), ({**CPP, "max_autotune_gemm_backends": "ATEN"}, None),
                             ({**CPP, "max_autotune_gemm_backends": "TRITON"}, None),
                             (BOTH, True)):  # fmt: skip
        torch._dynamo.reset()
        result, count, code = made(fn, x, w, s, options=options, dynamic=dynamic)
        assert torch.equal(result, fn(x, w, s)) and count == 1
        assert "extern_aten__weight_int8pack_mm" in code


def test_what_the_library_refuses_is_refused() -> None:
    x, (w, s) = whole(4, 64, BF16), weights(33, 64, BF16)
    fn = lambda x, w, s: packed(x, w, s).relu()  # noqa: E731
    for given in ((x.t().contiguous().t(), w, s), (x, w, s.float())):
        with pytest.raises(RuntimeError) as eager:
            fn(*given)
        with pytest.raises(RuntimeError) as ours:
            made(fn, *given)
        assert str(eager.value).splitlines()[0] in str(ours.value)


# ---- scaled products


@pytest.mark.parametrize(("out", "kind", "m", "rows"), [
    (BF16, E4M3, 64, True), (F32, E5M2, 3, True), (F16, E4M3, 1, False), (E4M3, E4M3, 64, False),
])  # fmt: skip
def test_a_scaled_product_is_one_kernel(out: torch.dtype, kind: torch.dtype, m: int, rows: bool
                                        ) -> None:  # fmt: skip
    """With one scale for all or one for each row, a bias, and what follows."""
    left, right = (torch.randint(-4, 5, (size, 64)).to(dtype)
                   for size, dtype in ((m, kind), (33, E4M3)))  # fmt: skip
    s, t = few_bits(m, 1) * 256, few_bits(1, 33) * 256
    s, t = (s, t) if rows else (s[0, 0], t[0, 0])
    bias = torch.randint(-9, 10, (33,)).to(BF16) if rows else None

    def fn(a: Tensor, b: Tensor, s: Tensor, t: Tensor, bias: Tensor | None) -> Tensor:
        y = torch._scaled_mm(a, b.t(), s, t, bias=bias, out_dtype=out)
        return y.float().relu() * 2

    result, count, code = made(fn, left, right, s, t, bias)
    assert torch.equal(result, fn(left, right, s, t, bias))
    assert result.abs().max() > 0 and count == 1 and "extern_" not in code


def test_a_scaled_product_of_any_number_of_rows() -> None:
    """Rounding what is multiplied is fused to it where it is next to nothing beside the other."""

    def fn(x: Tensor, w: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return torch._scaled_mm((x / s).to(E4M3), w.t(), s, t, out_dtype=BF16).relu()

    w, s, t = torch.randn(64, 64).to(E4M3), torch.rand(()) + 1, torch.rand(())
    x = torch.randn(1, 64)
    result, count, code = made(fn, x, w, s, t)
    torch.testing.assert_close(result, fn(x, w, s, t))
    assert count == 1 and "extern_" not in code
    torch._dynamo.reset()
    call = compiled(fn, options=BOTH, dynamic=True)
    for m in (40, 3):
        x = torch.randn(m, 64)
        torch.testing.assert_close(call(x, w, s, t), fn(x, w, s, t))


# ---- weights of four bits


def test_the_neighbours_of_four_bits_are_a_kernel_each() -> None:
    """Their layout is the library's own, which alone multiplies them."""
    op = torch.ops.aten._weight_int4pack_mm_for_cpu
    numbers = torch.randint(0, 16, (64, 64), dtype=torch.int32)
    w = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    groups = (torch.rand(2, 64, 2) / 10).to(BF16)

    def fn(x: Tensor, w: Tensor, groups: Tensor, bias: Tensor, more: Tensor) -> Tensor:
        return F.gelu(op(x.relu() * 2, w, 32, groups) + bias) + more

    given = whole(3, 64, BF16), w, groups, torch.randn(64).to(BF16), torch.randn(3, 64).to(BF16)
    result, count, code = made(fn, *given, options=BOTH)
    torch.testing.assert_close(result, fn(*given))
    assert count == 2 and "extern_aten__weight_int4pack_mm_for_cpu" in code
