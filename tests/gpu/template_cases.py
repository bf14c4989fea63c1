"""Triton templates for products on a card: descriptors, whose conditions are looked at when a
product is called, and the SMs that are left to others."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gemm_programs import host
from tests.gpu.cases import case, cuda
from tests.gpu.gemm_cases import BF16, F16, FEW, code, rounded
from tests.gpu.spec_cases import failing
from tilewright.gemm import composed
from tilewright.gemm.heuristics import GemmConfig, MMTemplateHeuristic, get_template_heuristic
from tilewright.testing import fresh_cache, run_and_get_code

TMA: dict[str, Any] = {
    "triton.enable_persistent_tma_matmul": "1", "triton.native_matmul": False,
    "test_configs.autotune_choice_name_regex": "mm_persistent_tma",
}  # fmt: skip


def stored_by(text: str) -> str:
    assert text.count("tl.make_tensor_descriptor(") >= 2
    return "descriptor" if "desc_to_" in text else "pointer"


@case
def tiled_operands_through_descriptors() -> None:
    """MA-D1, MA-D2, MA-D19: in every layout, as the program makes them, dynamic or not, stored
    either way, and with an epilogue."""
    for left in (False, True):
        for right in (False, True):

            def operands(a: Tensor, b: Tensor, left: bool = left, right: bool = right
                         ) -> tuple[Tensor, Tensor]:  # fmt: skip
                a, b = a.repeat(8, 8), b.repeat(8, 8)
                return a.t() if left else a, b.t() if right else b

            programs: tuple[Callable[..., Tensor], ...] = (
                lambda x, a, b, of=operands: torch.mm(*of(a, b)),
                lambda x, a, b, of=operands: torch.addmm(x.repeat(8), *of(a, b)),
                lambda x, a, b, of=operands: torch.relu(torch.mm(*of(a, b))),
            )
            args = (cuda(31, dtype=F16), cuda(*((11, 21) if left else (21, 11)), dtype=F16),
                    cuda(*((31, 11) if right else (11, 31)), dtype=F16))  # fmt: skip
            for function in programs:
                for dynamic, store in ((False, False), (False, True), (True, False), (True, True)):
                    options = {**FEW, **TMA, "triton.enable_template_tma_store": store}
                    call = torch.compile(function, backend="tilewright", dynamic=dynamic,
                                         options=options)  # fmt: skip
                    with fresh_cache():
                        found, text = run_and_get_code(call, *args)
                    torch.testing.assert_close(found, function(*args), **rounded(F16, 88))
                    assert stored_by("\n".join(text)) == ("descriptor" if store else "pointer")


@case
def descriptors_that_cannot_be() -> None:
    """MA-D5, MA-D6."""
    said = failing(torch.addmm, cuda(31, dtype=F16), cuda(21, 11, dtype=F16),
                   cuda(11, 31, dtype=F16), **TMA)  # fmt: skip
    assert "NoValidChoicesError" in said
    out = torch.empty(21, 31, dtype=F16, device="cuda")
    mm = lambda a, b, out: torch.mm(a, b, out=out)  # noqa: E731
    args = cuda(21, 32, dtype=F16), cuda(31, 32, dtype=F16).t(), out
    said = failing(mm, *args, **TMA, **{"triton.enable_template_tma_store": True})
    assert "NoValidChoicesError" in said
    text = code(mm, *args, **TMA, tolerance=rounded(F16, 32))
    assert stored_by(text) == "pointer"


@case
def descriptors_of_any_number_of_rows() -> None:
    """MA-D7, MA-D8: one compilation; a row length that is a symbol is looked at in each call."""
    for function, bias in ((torch.mm, ()), (torch.addmm, (cuda(248, dtype=F16),))):
        a, b = cuda(168, 88, dtype=F16), cuda(88, 248, dtype=F16)
        torch._dynamo.reset()
        torch._dynamo.mark_dynamic(a, 0)
        call = torch.compile(function, backend="tilewright", options={**FEW, **TMA})
        call(*bias, a, b)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for m in (7, 100, 4097):
                left = cuda(m, 88, dtype=F16)
                wanted = function(*bias, left, b)
                torch.testing.assert_close(call(*bias, left, b), wanted, **rounded(F16, 88))
    torch._dynamo.reset()
    call = torch.compile(torch.mm, backend="tilewright", dynamic=True, options={**FEW, **TMA})
    for k in (88, 96, 90, 1003):
        a, b = cuda(40, k, dtype=F16), cuda(k, 64, dtype=F16)
        torch.testing.assert_close(call(a, b), a @ b, **rounded(F16, k))


@case
def batches_through_descriptors() -> None:
    """MA-D22: a batch is a dimension of the descriptor."""
    for store in (False, True):
        for a in (cuda(5, 136, 88, dtype=F16), cuda(5, 88, 136, dtype=F16).mT):
            text = code(torch.bmm, a, cuda(5, 88, 248, dtype=F16), **TMA,
                        **{"triton.enable_template_tma_store": store},
                        tolerance=rounded(F16, 88))  # fmt: skip
            assert stored_by(text) == ("descriptor" if store else "pointer")


@case
def descriptors_of_more_than_32_bits() -> None:
    """MA-D13: an operand of 2**32 elements."""
    a, b = cuda(1280, 65536, dtype=F16) / 16, cuda(65536, 65536, dtype=F16) / 16
    options = {**TMA, "max_autotune_gemm_backends": "TRITON", "test_configs.max_mm_configs": 1}
    text = code(torch.mm, a, b, **options, tolerance={"rtol": 1e-2, "atol": 1e-2})
    assert "tl.cast(k0, tl.int32)" in text


@case
def some_sms_are_left_to_others() -> None:
    """MA-D9: as many programs as there are SMs left."""
    a, b = cuda(2560, 2560, dtype=BF16), cuda(2560, 2560, dtype=BF16).t()
    options = {**FEW, **TMA, "max_autotune_gemm_backends": "TRITON",
               "test_configs.max_mm_configs": 1}  # fmt: skip
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for kept in (None, 0, 27):
        torch._C._set_sm_carveout_experimental(kept)
        try:
            torch._dynamo.reset()
            call = torch.compile(torch.mm, backend="tilewright", options=options)
            call(a, b)
            with torch.profiler.profile() as profile:
                call(a, b)
                torch.cuda.synchronize()
        finally:
            torch._C._set_sm_carveout_experimental(None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            # the first configuration has blocks of 128 by 256 or fewer: 200 at least
            assert _grid(path.read_text()) == sms - (kept or 0)


def _grid(trace: str) -> int:
    (event,) = (e for e in json.loads(trace)["traceEvents"]
                if "triton_tem" in e.get("name", "") and "grid" in e.get("args", {}))  # fmt: skip
    x, y, z = event["args"]["grid"]
    return x * y * z


@case
def three_products_and_their_workspaces() -> None:
    """MA-D17, MA-D18."""
    found = get_template_heuristic("mm_persistent_tma", "cuda", "mm")
    assert isinstance(found, MMTemplateHeuristic)
    found.mm_configs = [GemmConfig(128, 128, 64, 4, 8)]
    args = tuple(cuda(4608, 2048, dtype=BF16) / 8 for _ in range(3))
    w = cuda(2048, 7040, dtype=BF16) / 8
    try:
        text = code(lambda a, b, c, w: (a @ w, b @ w, c @ w), *args, w, **TMA,
                    max_autotune_gemm_backends="TRITON", tolerance=rounded(BF16, 2048))  # fmt: skip
    finally:
        found.mm_configs = ()
    assert text.count("workspace = empty_cuda(") == 3


PARTS: dict[str, Any] = {
    "max_autotune_gemm_backends": "TRITON", "comprehensive_padding": False, "shape_padding": False,
    "test_configs.autotune_choice_name_regex": "decompose_k",
}  # fmt: skip


def long(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return cuda(m, k, dtype=dtype) * k**-0.25, cuda(k, n, dtype=dtype) * k**-0.25


@case
def long_sums_in_parts() -> None:
    """MA-H1, MA-H3, MA-H4: alone, with what follows, and of a transposed operand."""
    for sizes in ((32, 32, 32768), (64, 128, 200000), (64, 64, 177147)):
        for dtype in (F16, BF16):
            a, b = long(*sizes, dtype)
            stored = a.t().contiguous()
            programs: tuple[tuple[Callable[..., Tensor], Tensor], ...] = (
                (torch.mm, a), (lambda a, b: (a @ b).relu(), a), (lambda a, b: a.t() @ b, stored),
            )  # fmt: skip
            for function, left in programs:
                text = code(function, left, b, **PARTS, tolerance={"rtol": 2e-2, "atol": 2e-2})
                parts = int(re.findall(r"decompose_k_mm_(\d+)_split_\d+\(", text)[0])
                assert sizes[2] % parts == 0 and 2 <= parts <= sizes[2] // max(sizes[:2])
                assert "bmm_dtype" in text and "triton_red_fused_decompose_k" in text


@case
def sums_of_unknown_length() -> None:
    """MA-H2, MA-H5: not of sizes that may be anything; with symbols where it is asked for."""
    a, b = long(32, 32, 32768, F16)
    call = torch.compile(torch.mm, backend="tilewright", dynamic=True,
                         options={**FEW, "max_autotune_gemm_backends": "TRITON"})  # fmt: skip
    found, text = run_and_get_code(call, a, b)
    torch.testing.assert_close(found, a @ b, rtol=2e-2, atol=2e-2)
    assert "decompose_k" not in "".join(text)
    before = composed.too_short
    composed.too_short = lambda problem: ""
    try:
        a, b = long(32, 64, 32768, BF16)
        torch._dynamo.reset()
        torch._dynamo.mark_dynamic(a, 0)
        fn = lambda a, b: (torch.stack((a, a)).view(-1, 32768) @ b).relu()  # noqa: E731
        text = code(fn, a, b, **PARTS, tolerance={"rtol": 4e-2, "atol": 4e-2})
        assert "decompose_k_mm_" in text and re.search(r"s\d+\*2", text)
    finally:
        composed.too_short = before


@case
def parts_have_the_strides_of_the_result() -> None:
    """MA-H7, MA-H8."""
    a = cuda(32768, 256, dtype=BF16) / 16
    b = (cuda(32768, 1152, dtype=BF16) / 16)[:, :1096]
    options = {**PARTS, "triton.decompose_k_threshold": 8}
    text = code(lambda a, b: a.t() @ b, a, b, **options, tolerance={"rtol": 4e-2, "atol": 4e-2})
    assert "(256, 1096,), (1096, 1,)" in text
    short = {**PARTS, "triton.decompose_k_threshold": 16}
    assert "NoValidChoicesError" in failing(torch.mm, *long(32, 32, 256, F16), **short)


@case
def products_of_copies() -> None:
    """MA-H10 to MA-H14: where it is forced."""
    before = composed.use_contiguous
    composed.use_contiguous = lambda problem: True
    options = {**PARTS, "test_configs.autotune_choice_name_regex": "contiguous"}
    try:
        for m, n, k in ((64, 128, 256), (256, 512, 1024)):
            for dtype in (F16, BF16, torch.float32):
                a, b = cuda(m, k, dtype=dtype), cuda(n, k, dtype=dtype)
                text = code(lambda a, b: (a @ b.t()).relu(), a, b, **options,
                            tolerance=rounded(dtype, k))  # fmt: skip
                assert "contiguous_mm_" in text
    finally:
        composed.use_contiguous = before


TEMPLATES = {"max_autotune_conv_backends": "TRITON", "max_autotune_gemm_backends": "TRITON"}
LAST = torch.channels_last


@case
def convolutions_as_products() -> None:
    """MA-G4, MA-G6, MA-G7: lines, images and volumes, of groups, laid out either way."""
    for dtype in (F16, torch.float32):
        loose = rounded(dtype, 576)
        for last in (False, True):
            x, w = cuda(4, 64, 28, 28, dtype=dtype), cuda(96, 64, 3, 3, dtype=dtype)
            bias, more = cuda(96, dtype=dtype), cuda(4, 96, 28, 28, dtype=dtype)
            if last:
                x, w, more = (t.to(memory_format=LAST) for t in (x, w, more))
            text = code(lambda x, w, b, r: (F.conv2d(x, w, b, padding=1) + r).relu(), x, w, bias,
                        more, **TEMPLATES, tolerance=loose)  # fmt: skip
            assert "triton_tem_fused_" in text and "extern_aten_convolution" not in text
            code(lambda x, w: F.conv2d(x, w, stride=2, groups=4), x,
                 cuda(96, 16, 3, 3, dtype=dtype), **TEMPLATES, tolerance=loose)  # fmt: skip
            code(lambda x, w: torch.cat((y := F.conv2d(x, w, padding=1), y + 1)), x, w,
                 **TEMPLATES, tolerance=loose)  # fmt: skip
        code(lambda x, w: F.conv1d(x, w, padding=2), cuda(3, 40, 100, dtype=dtype),
             cuda(48, 40, 5, dtype=dtype), **TEMPLATES, tolerance=loose)  # fmt: skip
        code(lambda x, w: F.conv3d(x, w, padding=1), cuda(2, 16, 9, 10, 11, dtype=dtype),
             cuda(24, 16, 3, 3, 3, dtype=dtype), **TEMPLATES, tolerance=loose)  # fmt: skip
    for kernel in (1, 3):
        args = torch.empty(0, 256, 14, 14, device="cuda"), cuda(256, 256, kernel, kernel)
        code(lambda x, w: F.conv2d(x, w), *args)


@case
def convolutions_of_one_point() -> None:
    """MA-G1, MA-G2, MA-G5."""
    x, w, b = cuda(4, 3, 32, 32).to(memory_format=LAST), cuda(16, 3, 1, 1), cuda(16)
    with torch.no_grad():
        text = code(lambda x, w, b: F.conv2d(x, w, b), x, w, b, **TEMPLATES,
                    tolerance={"rtol": 0.0, "atol": 1e-2})  # fmt: skip
    assert "extern_" not in text
    options = {"max_autotune_conv_backends": "", "layout_optimization": False}
    said = failing(lambda x, w: F.conv2d(x, w), cuda(2, 3, 16, 16), cuda(3, 3, 1, 1), **options)
    assert "NoValidChoicesError" in said
    x, w = cuda(4, 3, 224, 224).to(memory_format=LAST), cuda(64, 3, 1, 1)

    def sliced(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x[:, :, : a.nonzero().size(0), : b.nonzero().size(0)], w)

    call = torch.compile(sliced, backend="tilewright", options=FEW)
    for _ in range(2):
        a, b = (torch.randint(0, 2, (224,), device="cuda") for _ in range(2))
        torch.testing.assert_close(call(x, a, b), sliced(x, a, b), rtol=2e-2, atol=2e-2)


@case
def norms_of_rows() -> None:
    """Computed by the product that reads them, either way, in every template that can."""

    def rms(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, x.shape[-1:], g), w)

    def layer(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, x.shape[-1:], g, g), w)

    def gate(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], g)
        return F.silu(F.linear(y, w[:384])) * F.linear(y, w[384:])

    for function, names in ((rms, ("scaled", "rows")), (layer, ("rows",)), (gate, ("scaled",))):
        for rows in (1, 5, 64):
            templates = ("mm_pair",) if function is gate else ("mm", "mm_split_k",
                                                               *(["mv"] * (rows < 8)))  # fmt: skip
            for name in (f"triton_{t}_\\d+_prologue_{way}" for t in templates for way in names):
                args = [cuda(*size, dtype=BF16) for size in ((rows, 1000), (1000,), (768, 1000))]
                text = code(function, *args, max_autotune_gemm_backends="TRITON",
                            tolerance={"rtol": 3e-2, "atol": 0.5},
                            **{"test_configs.autotune_choice_name_regex": name})  # fmt: skip
                called = re.findall(r"^ *(triton_\w+|extern_\w+)\(", host(text), re.M)
                assert len(called) == 1, called
