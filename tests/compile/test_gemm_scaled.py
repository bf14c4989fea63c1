"""Scaled products of eight-bit floats by Triton templates: numbers through the interpreter,
structure by compiling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.narrow import E4, KINDS, eight, expected, operands, scales
from tests.products import Made, interpret, problem
from tilewright import config
from tilewright.gemm import heuristics, narrow
from tilewright.gemm.heuristics import GemmConfig
from tilewright.gemm.hooks import DESCRIPTORS
from tilewright.gemm.provider import Kernel
from tilewright.gemm.templates import TritonTemplate
from tilewright.gemm.triton import TritonCandidate, TritonProvider
from tilewright.ir import index as ix
from tilewright.ir.build import cast, op
from tilewright.ir.expr import const
from tilewright.ir.program import View
from tilewright.runtime import triton_worker
from tilewright.runtime.cubin import facts
from tilewright.runtime.triton_build import TritonSource
from tilewright.target import Target

PROVIDER = TritonProvider()
E5, BF16, F16, F32 = torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32
SMALL = GemmConfig(16, 32, 32, 2, 4, group_m=2)
SPLIT = replace(SMALL, split_k=3)
ROW = GemmConfig(4, 16, 32, 2, 4)
TEMPLATES = {"mm": SMALL, "mm_split_k": SPLIT, "mm_persistent": SMALL, "mm_tma": SMALL,
             "mm_persistent_tma": SMALL, "mv": ROW}  # fmt: skip


@pytest.fixture(autouse=True)
def _tuning() -> Iterator[None]:
    with config.patch({"max_autotune": True, "triton.enable_persistent_tma_matmul": True}):
        yield


def made_of(m: int, n: int, k: int, kind: str = "tensor/tensor", **more: Any
            ) -> tuple[Made, Tensor]:  # fmt: skip
    """A problem, and what it is in float64."""
    left, right = more.pop("left", E4), more.pop("right", E4)
    a, b = operands(m, n, k, left, right)
    given = scales(kind, m, n, k)
    more.setdefault("dtype", BF16)
    made = problem("_scaled_mm", a, b, scales=given, **more)
    return made, expected(a, b, given, more.get("bias"))


def kernel_of(made: Made, template: str = "mm", c: GemmConfig | None = None) -> Kernel:
    chosen = TritonTemplate.all_templates[template]
    assert chosen.limits(made.problem) == ""
    return TritonCandidate(made.problem, chosen, c or TEMPLATES[template], template, 0.0).kernel()


def ran(made: Made, template: str = "mm", c: GemmConfig | None = None) -> str:
    kernel = kernel_of(made, template, c)
    interpret(made, kernel)
    assert isinstance(kernel.source, TritonSource)
    return kernel.source.text


def close(made: Made, wanted: Tensor, tolerance: float = 1e-2, name: str = "c") -> None:
    found = made.tensors[name].view(wanted.shape).double()
    scale = wanted.square().mean().sqrt().item() if wanted.numel() else 1.0
    torch.testing.assert_close(found, wanted, atol=tolerance * scale, rtol=tolerance)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", list(TEMPLATES))
def test_f8_4_scales_of_every_kind(kind: str, template: str) -> None:
    """F8-4, F8-5, MA-F5: in every template, one that fetches tiles through descriptors too; scales
    of rows wait until all is added up, those of blocks are applied inside the loop."""
    m = 3 if template == "mv" else 37
    made, wanted = made_of(m, 144, 272, kind, dtype=F32)
    text = ran(made, template)
    close(made, wanted, 1e-5)
    before = text[: text.rindex("tl.fma" if template == "mv" else "tl.dot")]
    assert ("tl.load(p_scale_b" in before) == ("128" in kind) and "tl.load(p_scale_b" in text


SIZES = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 131)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("seed", range(16))
def test_f8_4_fuzzed(seed: int) -> None:
    """F8-4, F8-5, F8-6: any number of rows and columns, strides of padded rows, offsets, both
    types, against float64 within what the accumulation allows."""
    g = torch.Generator().manual_seed(seed)

    def pick(*of: Any) -> Any:
        return of[int(torch.randint(len(of), (), generator=g))]

    m, n, k = pick(*SIZES), pick(*SIZES), pick(17, 31, 32, 33, 64, 127, 128, 129, 257)
    left, right = pick(E4, E5), pick(E4, E5)
    pad, skip = pick(0, 3, 16), pick(0, 1, 16)
    a = eight(m + 1, k + pad + skip, left)[1:, skip : skip + k]
    b = eight(n + 1, k + pad + skip, right)[1:, skip : skip + k].t()
    kind, out = pick(*KINDS), pick(BF16, F16, F32)
    given = scales(kind, m, n, k)
    bias = pick(None, torch.randn(n).to(BF16))
    made = problem(
        "_scaled_mm",
        a,
        b,
        scales=given,
        dtype=out,
        bias=bias,
        fast=pick(True, False),
        dynamic=pick((), (m,)) if m not in (n, k, 1) and kind[0] != "1" else (),
    )
    names = [name for name, t in TritonTemplate.all_templates.items()
             if name in TEMPLATES and t.limits(made.problem) == ""]  # fmt: skip
    c = GemmConfig(pick(16, 32), pick(16, 32, 64), pick(32, 64, 128), 2, 4, split_k=pick(1, 2))
    name = pick(*names)
    splits = TritonTemplate.all_templates[name].split
    made.tensors["c"].fill_(torch.nan)
    ran(made, name, ROW if name == "mv" else c if splits else replace(c, split_k=1))
    close(made, expected(a, b, given, bias), {BF16: 1e-2, F16: 1e-3, F32: 2e-5}[out])


@pytest.mark.parametrize("template", ["mm", "mm_tma", "mm_persistent_tma"])
def test_f8_4_a_bias_is_added_to_what_was_scaled(template: str) -> None:
    """F8-4, MA-F5."""
    made, wanted = made_of(33, 48, 64, "row/row", bias=torch.randn(48).bfloat16())
    ran(made, template)
    close(made, wanted)


def test_ma_f4_rows_by_columns() -> None:
    """MA-F4: other layouts are refused with the operand's strides; what has no elements is not
    looked at; scales that are not float32 are nobody's here."""
    a, b = operands(32, 48, 64)
    given = torch.ones(()), torch.ones(())
    template = TritonTemplate.all_templates["mm"]
    turned = problem("_scaled_mm", eight(64, 32).t(), b, scales=given, dtype=BF16)
    assert "left operand has to be row-major, and has the strides (1, 32)" in (
        template.limits(turned.problem))  # fmt: skip
    flat = problem("_scaled_mm", a, eight(64, 48), scales=given, dtype=BF16)
    assert "right operand has to be column-major, and has the strides (48, 1)" in (
        template.limits(flat.problem))  # fmt: skip
    empty = problem("_scaled_mm", a[:0], eight(64, 48), scales=given, dtype=BF16)
    assert template.limits(empty.problem) == ""
    assert not PROVIDER.candidates(turned.problem, "max")
    said = refused((32, 2), (2, 48), torch.float8_e8m0fnu)
    assert "float8_e8m0fnu[32, 2] and float8_e8m0fnu[2, 48]" in said


def refused(left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype = F32,
            size: tuple[int, int, int] = (256, 384, 512)) -> str:  # fmt: skip
    m, n, k = (ix.as_index(s) for s in size)
    place = narrow.loops(ix.ONE, m, n, k)[1:]

    def view(name: str, given: tuple[int, ...]) -> View:
        dims = tuple(map(const, given))
        return View(name, dims, tuple(ix.contiguous_strides(list(dims))), ix.ZERO, dtype)

    found = narrow.scaled(view("s", left), view("t", right), place, (m, n, k))
    return found if isinstance(found, str) else ""


def test_ma_f5_pairs_of_scales() -> None:
    """MA-F5, F8-6: what is supported, and a reason that names both shapes for all else."""
    fine = (((), ()), ((1,), (1,)), ((256, 1), (1, 384)), ((256, 4), (4, 3)), ((256, 4), (4, 384)),
            ((2, 4), (4, 384)))  # fmt: skip
    assert not any(refused(*pair) for pair in fine)
    others = (((2, 4), (4, 3)), ((256, 3), (4, 384)), ((256, 4), (1, 384)), ((256, 16), (16, 384)),
              ((255, 1), (1, 384)), ((256, 4), (4,)))  # fmt: skip
    for left, right in others:
        shown = " and ".join(f"float32{[*shape]}" for shape in (left, right))
        assert shown in refused(left, right), (left, right)


def test_ma_f6_k_and_blocks_of_k() -> None:
    """MA-F6: k is more than 16 (32 on sm_100), blocks of it 32 at least; sums are float32; one
    number is spread over the tile; what was asked of sums is in the description."""
    template = TritonTemplate.all_templates["mm"]
    for k, arch, fits in ((16, "sm_90", False), (17, "sm_90", True), (31, "sm_100", False),
                          (32, "sm_100", True), (64, "sm_80", False)):  # fmt: skip
        made, _ = made_of(32, 32, k, target=Target(arch))
        assert (template.limits(made.problem) == "") == fits, (k, arch)
    for space in ("DEFAULT", "EXHAUSTIVE"):
        with config.patch({"max_autotune_gemm_search_space": space}):
            made, _ = made_of(64, 64, 17)
            found = heuristics.get_template_heuristic("mm", "cuda", "_scaled_mm")
            assert min(c.block_k for c in found.get_template_configs(made.problem)) >= 32
    for fast in (False, True):
        made, wanted = made_of(32, 32, 64, fast=fast, dtype=F16)
        for c in PROVIDER.candidates(made.problem, "max"):
            assert "ACC_TYPE=tl.float32" in c.description
            assert f"USE_FAST_ACCUM={fast}" in c.description
        text = ran(made)
        assert ("max_num_imprecise_acc" in text) != fast
        close(made, wanted, 1e-3)


def test_quantised_after() -> None:
    """Scaled, cut off and cast to eight bits in the product's own epilogue."""
    step, out = torch.tensor(0.25), torch.empty(33, 48, dtype=E4)

    def quantised(b: Any, c: Any) -> Any:
        x = op("mul", cast(c, F32), b.read("step", step))
        x = op("max", op("min", x, const(448.0, F32)), const(-448.0, F32))
        return {"out": (out, cast(x, E4))}

    made, wanted = made_of(33, 48, 64, "row/row", epilogue=quantised, keeps=False)
    text = ran(made)
    assert "p_c" not in text and "tri_fp8.at_once" in text
    rounded = (wanted.to(BF16).float() * 0.25).clamp(-448, 448).to(E4)
    near = (made.tensors["out"].view(33, 48).double() - rounded.double()).abs()
    assert (near <= 0.13 * rounded.double().abs() + 2e-3).all()  # a step of three bits
    assert (near == 0).double().mean() > 0.9


@pytest.mark.parametrize("template", ["mm", "mm_persistent", "mm_persistent_tma"])
@pytest.mark.parametrize("out", [E4, E5])
def test_ma_a8_results_of_eight_bits(out: torch.dtype, template: str) -> None:
    """Of scaled products alone, which then are what rounding the sums gives."""
    made, wanted = made_of(33, 48, 64, "tensor/tensor", dtype=out)
    assert PROVIDER.supports(made.problem) == "" and PROVIDER.candidates(made.problem, "quick")
    ran(made, template)
    rounded = wanted.float().to(out).double()
    found = made.tensors["c"].view(33, 48).double()
    step = float(torch.finfo(out).eps)
    assert ((found - rounded).abs() <= step * rounded.abs() + 2e-3).all()
    assert (found == rounded).double().mean() > 0.99
    plain = problem("mm", torch.randn(32, 32).half(), torch.randn(32, 32).half(), dtype=out)
    assert "no template multiplies" in PROVIDER.supports(plain.problem)


def test_quantised_before() -> None:
    """The left operand is cast where it is read: the matrix units get what memory would have."""
    x, step = torch.randn(20, 90), torch.tensor(100.0)
    b, given = eight(48, 90).t(), (torch.tensor(0.01), torch.tensor(2.0))

    def quantised(builder: Any) -> Any:
        value = op("mul", builder.read("x", x, builder.m, builder.k), builder.read("step", step))
        return cast(op("max", op("min", value, const(448.0, F32)), const(-448.0, F32)), E4)

    q = (x * step).clamp(-448, 448).to(E4)
    made = problem("_scaled_mm", q, b, scales=given, dtype=F32, prologue={0: quantised})
    for template in ("mm", "mm_split_k", "mm_persistent"):
        ran(made, template)
        close(made, expected(q, b, given), 1e-5)
    assert "register" in TritonTemplate.all_templates["mm_tma"].limits(made.problem)


def test_one_operand_is_both_and_is_read_after() -> None:
    """x @ x.t(), and its own elements in the epilogue: bytes there, floats in the loop."""
    x, out = eight(48, 48), torch.empty(48, 48)
    given = torch.ones(()), torch.ones(())
    made = problem("_scaled_mm", x, x.t(), scales=given, dtype=F32, epilogue=lambda b, c: {
        "out": (out, op("add", c, cast(b.read("x0", x, b.m, b.n), F32)))})  # fmt: skip
    ran(made)
    close(made, expected(x, x.t(), given) + x.double(), 1e-5, "out")


def test_int_mm_scaled_to_halves() -> None:
    """Sums are exact integers; the scale and the cast are the epilogue's."""
    a, b = (torch.randint(-128, 128, n, dtype=torch.int8) for n in ((20, 40), (40, 33)))
    s, out = torch.rand(1, 33), torch.empty(20, 33, dtype=BF16)

    def scaled(b: Any, c: Any) -> Any:
        return {"out": (out, cast(op("mul", cast(c, F32), b.read("s", s, b.m, b.n)), BF16))}

    made = problem("_int_mm", a, b, dtype=torch.int32, epilogue=scaled)
    for template in ("mm", "mm_persistent"):
        made.tensors["c"].fill_(0)
        ran(made, template)
        assert torch.equal(made.tensors["c"].view(20, 33), a.int() @ b.int())
        wanted = ((a.int() @ b.int()).float() * s).bfloat16()
        assert torch.equal(made.tensors["out"].view(20, 33), wanted)
    names = {c.name for c in PROVIDER.candidates(made.problem, "max")}
    assert names and not any("mv" in name or "split" in name for name in names)


# ---- compiled for cards that are not there


def meta(*size: int, dtype: torch.dtype = E4) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def compiled(candidate: TritonCandidate) -> dict[str, Any]:
    source = candidate.kernel().source
    assert isinstance(source, TritonSource)
    made = triton_worker.build(source.order(source.configs[0]))
    return {**made, "facts": facts(made["cubin"], made["name"])}


def on_a_card(kind: str, template: str, arch: str, c: GemmConfig, fast: bool, **more: Any
              ) -> dict[str, Any]:  # fmt: skip
    m, n, k = 4096, 4096, 4096
    given = [meta(*s.shape, dtype=F32) if s.dim() < 2 else meta(*s.t().shape, dtype=F32).t()
             for s in scales(kind, m, n, k)]  # fmt: skip
    made = problem("_scaled_mm", meta(m, k), meta(n, k).t(), scales=given, dtype=BF16, fast=fast,
                   target=Target(arch), **more)  # fmt: skip
    chosen = TritonTemplate.all_templates[template]
    assert chosen.limits(made.problem) == ""
    assert not heuristics.exceeds(made.problem, c)
    found = compiled(TritonCandidate(made.problem, chosen, c, template, 0.0))
    estimate = heuristics.get_shared_memory_estimation(made.problem, c, epilogue=True)
    assert found["shared"] <= max(estimate, DESCRIPTORS)
    return found


@pytest.mark.parametrize(
    ("kind", "template", "fast"),
    [("tensor/tensor", "mm_persistent_tma", True), ("row/row", "mm", False),
     ("row/row", "mm_tma", False), ("1x128/128x128", "mm", True),
     ("1x128/128x128", "mm_persistent_tma", False)],
)  # fmt: skip
def test_ma_f1_instructions_of_hopper(kind: str, template: str, fast: bool) -> None:
    """MA-F1, MA-F2, MA-F3, F8-4, F8-5: eight-bit floats go from memory to the matrix units without
    the registers; nothing spills."""
    c = GemmConfig(128, 128, 128, 3, 8)
    found = on_a_card(kind, template, "sm_90", c, fast)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in found["ptx"]
    copies = "cp.async.bulk.tensor" if "tma" in template else "cp.async.cg.shared.global"
    assert copies in found["ptx"]
    assert found["facts"].stack == 0
