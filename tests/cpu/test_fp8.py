"""Eight-bit floats: casts, quantisation and scaled products, on a CPU and as a card would compute
them, in Triton's interpreter."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compile.as_cuda import as_cuda
from tests.gemm_programs import host, most_fused
from tests.narrow import expected, micro, operands, scales
from tilewright import config, metrics
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
WHERE = {"a CPU": nullcontext, "a card": as_cuda}


def same(function: Callable[..., Any], *args: Any, where: str = "a card", **options: Any) -> int:
    """Equal to eager bit for bit, with its strides; how many kernels there are."""
    metrics.reset()
    with WHERE[where](), fresh_cache():
        call = torch.compile(function, backend="tilewright", **options)
        given = [a.clone() if isinstance(a, Tensor) else a for a in args]
        found = call(*given)
    wanted = function(*args)
    pairs = zip((found, *given), (wanted, *args), strict=True)
    for one, other in pairs:
        for a, b in zip(_all(one), _all(other), strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride()
            assert torch.equal(
                *(t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (a, b))
            )
    return metrics.generated_kernel_count


def _all(value: Any) -> tuple[Tensor, ...]:
    found = value if isinstance(value, tuple) else (value,)
    return tuple(t for t in found if isinstance(t, Tensor))


@pytest.mark.parametrize("where", list(WHERE))
@pytest.mark.parametrize("eight", [E4, E5])
def test_f8_1_casts(eight: torch.dtype, where: str) -> None:
    """F8-1: there and back, with sizes that are known when it runs; from one to the other, too."""
    for wide in (F16, BF16, F32):
        for dynamic in (False, True):
            x = (torch.randn(9, 70) * 60).to(wide)
            assert same(lambda x: x.to(eight).to(x.dtype), x, where=where, dynamic=dynamic) == 1
    x = torch.randn(40).to(E4 if eight == E5 else E5)
    assert same(lambda x: x.to(eight), x, where=where) == 1


@pytest.mark.parametrize("where", list(WHERE))
@pytest.mark.parametrize("eight", [E4, E5])
def test_f8_2_saturated(eight: torch.dtype, where: str) -> None:
    """F8-2: what is too large is cut off first; one element has a block."""
    largest = torch.finfo(eight).max
    special = torch.tensor([0.0, -0.0, 1e-9, 447.9, 464.0, 1e9, float("inf"), float("-inf")])
    for x in (torch.cat([special, torch.randn(200) * 300]), torch.randn(1), torch.randn(1, 1)):
        for wide in (F32, BF16):
            f = lambda x: x.clamp(-largest, largest).to(eight)  # noqa: E731
            assert same(f, x.to(wide), where=where, dynamic=False) == 1


@pytest.mark.parametrize("where", list(WHERE))
def test_f8_3_the_largest_and_quantised(where: str) -> None:
    """F8-3: alone, kept in memory that was given, behind a layer norm."""

    def largest(x: Tensor, scale: Tensor, keep: Tensor) -> Tensor:
        keep.fill_(x.abs().amax())
        return (x * scale).clamp(-448, 448).to(E4)

    def alone(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return (x.float() * scale).clamp(-448, 448).to(E4), x.abs().amax()

    def by_rows(x: Tensor, keepdim: bool) -> tuple[Tensor, Tensor]:
        scale = 448 / x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        return (x * scale).clamp(-448, 448).to(E4), x.abs().amax(-1, keepdim=keepdim)

    x, scale = torch.randn(12, 80), torch.tensor(3.0)
    same(largest, x, scale, torch.zeros(()), where=where)
    same(alone, x.to(BF16), scale, where=where)
    for keepdim in (False, True):
        assert same(lambda x, keepdim=keepdim: by_rows(x, keepdim), x, where=where) == 1

    def after_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (F.layer_norm(x, (80,), w, b) * 4).round().clamp(-448, 448).to(E4)

    assert same(after_norm, x, torch.randn(80), torch.randn(80), where=where) == 1


# ---- products


def eight(*size: int, dtype: torch.dtype = E4) -> Tensor:
    return torch.randn(size).to(dtype)


def product(function: Callable[..., Tensor], *args: Any, dynamic: bool | None = False,
            tolerance: float = 2e-2, arch: str = "sm_90", backends: str = "TRITON",
            **options: Any) -> str:  # fmt: skip
    """Near to eager, by the template with the most in it; the generated program."""
    select.add_preprocessing_fn(most_fused)
    try:
        one = {"test_configs.max_mm_configs": 1, **options}
        with as_cuda(arch), config.patch(one), fresh_cache():
            given: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": backends}
            call = torch.compile(function, backend="tilewright", dynamic=dynamic, options=given)
            found, code = run_and_get_code(call, *args)
    finally:
        select.clear_preprocessing_fns()
    wanted = function(*args)
    assert found.dtype == wanted.dtype and found.stride() == wanted.stride()
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)
    return "\n".join(code)


def called(code: str) -> list[str]:
    return re.findall(r"^ *(triton_\w+|extern_\w+)\(", host(code), re.M)


def scaled(out: torch.dtype = BF16, fast: bool = True) -> Callable[..., Tensor]:
    def call(a: Tensor, b: Tensor, s: Tensor, t: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch._scaled_mm(a, b, s, t, bias=bias, out_dtype=out, use_fast_accum=fast)

    return call


TMA: dict[str, Any] = {"triton.enable_persistent_tma_matmul": True,
       "test_configs.autotune_choice_name_regex": "mm_persistent_tma"}  # fmt: skip


def quantised(x: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    most = x.abs().amax(1, keepdim=True) if per_row else x.abs().amax()
    scale = 448.0 / most.float()
    return (x.float() * scale).clamp(-448, 448).to(E4), scale.reciprocal()


SPECIALISED = "blackwell_ws_persistent_device_tma"


@pytest.mark.covering(1)
@pytest.mark.parametrize("tma_store", [False, True])
@pytest.mark.parametrize(
    ("per_row", "dynamic", "arch"),
    [(False, False, "sm_90"), (True, True, "sm_90"),
     *((per_row, dynamic, "sm_100") for per_row in (False, True) for dynamic in (False, True))],
)  # fmt: skip
def test_ma_f1_through_descriptors(
    per_row: bool, dynamic: bool, arch: str, tma_store: bool
) -> None:
    """MA-F1, MA-F2, MA-F3, F8-4: scales of everything to halves, of rows to bfloat16; the template
    reads operands through descriptors that it makes, on Hopper and on Blackwell, which has one of
    its own."""
    dtype = BF16 if per_row else F16
    a, s = quantised(torch.randn(32, 48).to(dtype).repeat(8, 8), per_row)
    b, t = quantised(torch.randn(16, 48).to(dtype).repeat(8, 8), per_row)
    options = {**TMA, "triton.enable_template_tma_store": tma_store}
    if arch == "sm_100":
        options["test_configs.autotune_choice_name_regex"] = SPECIALISED
    code = product(scaled(dtype), a, b.t(), s, t.t() if per_row else t, dynamic=dynamic, arch=arch,
                   **options)  # fmt: skip
    assert (re.search(r"^ *s\d+ = arg", host(code), re.M) is not None) == dynamic
    assert "triton_tem_fused__scaled_mm" in host(code) and "extern_" not in host(code)
    kernel = code[code.index("def triton_tem_fused_") :].partition("'''")[0]
    assert "desc_a.load(" in kernel and "desc_b.load(" in kernel
    assert ("desc_to_" in kernel) == tma_store and ("tl.store(" in kernel) != tma_store
    assert ("warp_specialize=" in kernel) == (arch == "sm_100")


def test_f8_4_with_what_surrounds_it() -> None:
    """F8-4: a bias; what follows, quantised again; what comes before, with few rows."""
    a, b, s, t = eight(40, 64), eight(48, 64).t(), torch.rand(40, 1), torch.rand(1, 48)
    assert len(called(product(scaled(fast=False), a, b, s, t, torch.randn(48).to(BF16)))) == 1
    again = lambda *x: (scaled()(*x).relu().float() * 0.5).clamp(-448, 448).to(E4)  # noqa: E731
    code = product(again, a, b, s, t, tolerance=0.14)
    assert len(called(code)) == 1 and "tri_fp8.at_once" in code

    def before(x: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return scaled()((x.float() / s).clamp(-448, 448).to(E4), b, s, t)

    x, b, s = torch.randn(3, 64).to(BF16), eight(512, 64).t(), torch.tensor(0.1)
    assert len(called(product(before, x, b, s, torch.tensor(2.0)))) == 1
    many = torch.randn(64, 64).to(BF16)  # would be quantised again for every tile
    assert len(called(product(before, many, b, s, torch.tensor(2.0)))) == 2


def test_f8_4_by_either_name() -> None:
    """F8-4, F8-5: `torch.nn.functional.scaled_mm` is the same product."""
    kinds = F.ScalingType  # type: ignore[attr-defined]
    a, b = eight(40, 64), eight(48, 64).t()
    for kind, s, t in ((kinds.TensorWise, torch.rand(1), torch.rand(1)),
                       (kinds.RowWise, torch.rand(40, 1), torch.rand(1, 48))):  # fmt: skip
        f = lambda a, b, s, t, kind=kind: F.scaled_mm(a, b, s, kind, t, kind)  # noqa: E731
        assert called(product(f, a, b, s, t))[0].startswith("triton_tem_fused__scaled_mm")


@pytest.mark.parametrize("kind", ["1x128/128x128", "1x128/1x128", "128x128/1x128"])
def test_f8_5_scales_of_blocks(kind: str) -> None:
    """F8-5: inside the loop, in a whole program, by both names of the operator; eager has these
    only on a card."""
    a, b = operands(128, 128, 256)
    s, t = scales(kind, 128, 128, 256)
    kinds = {"1x128": F.ScalingType.BlockWise1x128, "128x128": F.ScalingType.BlockWise128x128}  # type: ignore[attr-defined]
    left, _, right = kind.partition("/")

    def padded(x: Tensor) -> Tensor:  # blocks along k up to a multiple of four
        return F.pad(x, (0, 2)).contiguous().t()

    second = [padded(x) if side == "128x128" else y
              for x, y, side in ((s, s, left), (t.t(), t.t(), right))]  # fmt: skip

    def other(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return F.scaled_mm(a, b, s, kinds[left], t, kinds[right])

    options: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    for function, given in ((scaled(), (s, t)), (other, second)):
        with as_cuda(), config.patch({"test_configs.max_mm_configs": 1}), fresh_cache():
            call = torch.compile(function, backend="tilewright", dynamic=False, options=options)
            found, code = run_and_get_code(call, a, b, *given)
        text = "\n".join(code)
        assert len(called(text)) == 1 and " += tl.dot(a, b) * " in text
        wanted = expected(a, b, (s, t))
        assert (found.double() - wanted).abs().max() < 1e-2 * wanted.abs().max()


def test_f8_6_any_number_of_rows() -> None:
    """F8-6: one compilation for all numbers of rows; the smallest k that eager takes."""
    metrics.reset()
    options: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    with as_cuda(), fresh_cache(), config.patch({"test_configs.max_mm_configs": 1}):
        call = torch.compile(scaled(), backend="tilewright", dynamic=True, options=options)
        for m in (17, 5, 33, 128):
            a, b, s, t = eight(m, 32), eight(48, 32).t(), torch.rand(m, 1), torch.rand(1, 48)
            torch.testing.assert_close(call(a, b, s, t), scaled()(a, b, s, t), rtol=2e-2, atol=2e-2)
    assert metrics.generated_kernel_count == 0  # nothing could be measured: the library's call
    for m, n, k in ((1, 16, 16), (3, 16, 32), (7, 32, 16)):
        code = product(scaled(), eight(m, k), eight(n, k).t(), torch.rand(m, 1), torch.rand(1, n),
                       backends="ATEN,TRITON")  # fmt: skip
        assert "extern_aten__scaled_mm" in code


def test_f8_6_is_refused_in_eagers_words() -> None:
    """F8-6, MA-F4, MA-F5: a k that is no multiple of 16, operands that lie otherwise (with their
    strides), scales of other sizes (with both)."""
    with FakeTensorMode():

        def on_card(*size: int, dtype: torch.dtype = E4) -> Tensor:
            return torch.empty(size, dtype=dtype, device="cuda")

        one = on_card(dtype=F32)
        rows, columns = on_card(32, 1, dtype=F32), on_card(1, 48, dtype=F32)
        a, b = on_card(32, 64), on_card(48, 64).t()
        wrong: tuple[tuple[tuple[Tensor, ...], str], ...] = (
            ((on_card(32, 40), on_card(48, 40).t(), one, one), "divisible by 16"),
            ((on_card(64, 32).t(), b, one, one), r"row_major, got stride \(1, 32\)"),
            ((a, on_card(64, 48), one, one), r"col_major, got stride \(48, 1\)"),
            ((a, b, rows.t(), columns), r"scale_a.size\(\)=\(1, 32\).*scale_b.size\(\)=\(1, 48\)"),
        )  # fmt: skip
        for given, said in wrong:
            torch._dynamo.reset()
            call = torch.compile(scaled(), backend="tilewright", dynamic=False)
            with pytest.raises(Exception, match=f"(?s){said}"):
                call(*given)


def test_f8_7_micro_scales() -> None:
    """F8-7: 32 of a row have a scale of eight bits, and scales lie in tiles of 128 by 4: one kernel
    for each operand; operands keep their strides."""

    x, w = torch.randn(128, 256).to(BF16), torch.randn(128, 256).to(BF16)
    assert same(lambda x, w: (*micro(x), *micro(w)), x, w, dynamic=False) == 2
