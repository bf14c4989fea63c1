"""Products of eight-bit operands and of packed weights on a card.

Their twins are in `tests/cpu/test_fp8.py`, `tests/compile/test_gemm_scaled.py`,
`tests/compile/test_gemm_packed.py`, `tests/compile/test_gemm_tiled_weights.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gemm_programs import most_fused
from tests.gpu.cases import case, check, cuda
from tests.gpu.gemm_cases import BF16, F16, FEW, code
from tests.narrow import KINDS, LAYERS, K, expected, micro, scales, tiled
from tilewright import metrics
from tilewright.tune import select

E4, E5, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32
TRITON = {"max_autotune_gemm_backends": "TRITON"}
NEAR: dict[str, Any] = {"rtol": 2e-2, "atol": 5e-2}
EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}


def eight(*size: int, dtype: torch.dtype = E4) -> Tensor:
    return cuda(*size).to(dtype)


def scaled(out: torch.dtype = BF16, fast: bool = False) -> Callable[..., Tensor]:
    def call(a: Tensor, b: Tensor, s: Tensor, t: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch._scaled_mm(a, b, s, t, bias=bias, out_dtype=out, use_fast_accum=fast)

    return call


def there_and_back(dtype: torch.dtype, x: Tensor) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).to(x.dtype)


@case
def casts_to_eight_bits() -> None:
    """F8-1, F8-2, F8-3."""
    for dtype in (E4, E5):
        for wide in (F16, BF16, F32):
            x = (cuda(33, 129) * 60).to(wide)
            for dynamic in (False, True):
                check(functools.partial(there_and_back, dtype), x, tolerance=EXACT, dynamic=dynamic)
        check(functools.partial(there_and_back, dtype), cuda(1) * 1e6, tolerance=EXACT)

    def largest_and_cast(x: Tensor, scale: Tensor, keep: Tensor) -> Tensor:
        keep.fill_(x.abs().amax())
        return (x * scale).clamp(-448, 448).to(E4).float()

    check(largest_and_cast, cuda(64, 300), cuda() + 3, cuda(), tolerance=EXACT)


@case
def scaled_products() -> None:
    """MA-F3, F8-4, F8-6: every template, by rows and by everything, with a bias, any rows."""
    for name in ("triton_mm_\\d", "mm_split_k", "mm_persistent_\\d", "mm_tma", "persistent_tma"):
        for fast in (False, True):
            for given in ((cuda(256, 1).abs(), cuda(1, 512).abs()), (cuda().abs(), cuda().abs())):
                code(scaled(fast=fast), eight(256, 1024), eight(512, 1024).t(), *given, **TRITON,
                     **{"triton.enable_persistent_tma_matmul": True, "tolerance": NEAR,
                        "test_configs.autotune_choice_name_regex": name})  # fmt: skip
    for m, n, k in ((1, 16, 32), (17, 64, 32), (129, 176, 272)):
        a, b, bias = eight(m, k), eight(n, k).t(), cuda(n, dtype=BF16)
        code(scaled(), a, b, cuda(m, 1).abs(), cuda(1, n).abs(), bias, **TRITON, tolerance=NEAR)
    code(scaled(F16), eight(64, 64, dtype=E5), eight(64, 64).t(), cuda().abs(), cuda().abs(),
         **TRITON, tolerance=NEAR)  # fmt: skip


@case
def scaled_products_of_any_rows() -> None:
    """F8-6: one compilation."""
    call = torch.compile(scaled(), backend="tilewright", dynamic=True, options={**FEW, **TRITON})
    b, t = eight(512, 256).t(), cuda(1, 512).abs()
    for m in (16, 33, 250):
        given = eight(m, 256), b, cuda(m, 1).abs(), t
        torch.testing.assert_close(call(*given), scaled()(*given), **NEAR)


@case
def scales_of_blocks() -> None:
    """F8-5: against float64, and eager where that has them."""
    for kind in KINDS[2:]:
        for m, n, k in ((256, 384, 512), (37, 144, 272)):
            a, b = eight(m, k), eight(n, k).t()
            given = [s.cuda() for s in scales(kind, m, n, k)]
            wanted = expected(a.cpu(), b.cpu(), [s.cpu() for s in given]).cuda()
            call = torch.compile(scaled(), backend="tilewright", options={**FEW, **TRITON})
            found = call(a, b, *given).double()
            assert (found - wanted).abs().max() < 2e-2 * wanted.abs().max(), (kind, m, n, k)


@case
def quantised_around_a_product() -> None:
    """MA-F1, MA-F2: rows are quantised in the program, before and behind a product."""

    def f(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        scale = 448 / x.float().abs().amax(1, keepdim=True)
        q = (x.float() * scale).clamp(-448, 448).to(E4)
        y = torch._scaled_mm(q, w.t(), scale.reciprocal(), t, out_dtype=BF16, use_fast_accum=True)
        return (y.relu().float() * 0.1).clamp(-448, 448).to(E4).float()

    tolerance = {"rtol": 0.14, "atol": 0.05}
    for m in (16, 256):
        code(f, cuda(m, 512, dtype=BF16), eight(1024, 512), cuda(1, 1024).abs() / 100, **TRITON,
             tolerance=tolerance)  # fmt: skip


@case
def integers_multiplied_and_scaled() -> None:
    """Sums of bytes are exact, and scaled behind them."""
    a, b = (torch.randint(-128, 128, (n, 256), device="cuda").to(torch.int8) for n in (64, 512))
    code(torch._int_mm, a, b.t(), **TRITON, tolerance=EXACT)
    code(lambda a, b, s: (torch._int_mm(a, b.t()).float() * s).to(BF16), a, b, cuda(1, 512),
         **TRITON, tolerance=EXACT)  # fmt: skip


@case
def packed_weights() -> None:
    """Eight and four bits, packed in every way, for few rows."""
    select.add_preprocessing_fn(most_fused)
    try:
        for function, weights in LAYERS.values():
            for rows in (1, 16, 64):
                given = [w.cuda() for w in weights()]
                x = cuda(rows, K, dtype=BF16) / K**0.5
                exact = function(x.double(), *(w.double() if w.is_floating_point() else w
                                               for w in given))  # fmt: skip
                call: Any = torch.compile(function, backend="tilewright", dynamic=False,
                                          options={**FEW, **TRITON})  # fmt: skip
                error = (call(x, *given).double() - exact).abs().max()
                assert error <= 4 * (function(x, *given).double() - exact).abs().max()
    finally:
        select.clear_preprocessing_fns()


@case
def weights_in_tiles() -> None:
    """The library's packing of four bits, read as it lies: pieces, groups and rows of all kinds."""
    packed = torch.ops.aten._weight_int4pack_mm
    for inner, group in ((2, 32), (4, 64), (8, 128), (8, 32), (4, 256)):
        q = torch.randint(0, 16, (K, 2 * K), device="cuda")
        pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)
        w = torch.ops.aten._convert_weight_to_int4pack(pairs, inner)
        assert torch.equal(w, tiled(q.cpu(), inner).cuda()), "the layout is another"
        s = cuda(2 * K // group, K, 2, dtype=BF16)
        for rows in (1, 5, 16, 64):
            code(lambda x, w, s, group=group: packed(x, w, group, s).relu() + 1,
                 cuda(rows, 2 * K, dtype=BF16) / 16, w, s, **TRITON, tolerance=NEAR)  # fmt: skip


@case
def layers_of_eight_bits() -> None:
    """F8-4: `linear` by float8 with what follows it."""
    x, w = cuda(128, 256, dtype=BF16), eight(512, 256)

    def f(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        q = x.clamp(-448, 448).to(E4)
        return F.gelu(scaled()(q, w.t(), torch.ones((), device="cuda"), t), approximate="tanh")

    code(f, x, w, cuda().abs() / 10, **TRITON, tolerance=NEAR)


@case
def micro_scales() -> None:
    """F8-7: one kernel for each operand, bit for bit eager's, of its strides."""
    given = cuda(256, 512, dtype=BF16), cuda(384, 512, dtype=BF16)
    before = metrics.generated_kernel_count
    found = torch.compile(lambda x, w: (*micro(x), *micro(w)), backend="tilewright")(*given)
    assert metrics.generated_kernel_count - before == 2
    for one, other in zip(found, (*micro(given[0]), *micro(given[1])), strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
