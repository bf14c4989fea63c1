"""Weights of eight and four bits, unpacked where a product reads them: whole programs in Triton's
interpreter, and problems by the unpacking written out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.test_gemm_compile import compiled
from tests.gemm_programs import host, most_fused
from tests.narrow import LAYERS, K, bytes_, r
from tests.products import Builder, Made, interpret, problem
from tilewright import config
from tilewright.gemm.exact import unrounded
from tilewright.gemm.heuristics import GemmConfig
from tilewright.gemm.templates import TritonTemplate
from tilewright.gemm.triton import TritonCandidate
from tilewright.ir import index as ix
from tilewright.ir.build import cast, op, where
from tilewright.ir.expr import Expr, const, load
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    select.add_preprocessing_fn(most_fused)
    with config.patch({"max_autotune": True}):
        yield
    select.clear_preprocessing_fns()


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("name", "rows"), [*((name, 1) for name in LAYERS), ("between", 17)])
def test_weights_are_unpacked_where_they_are_read(name: str, rows: int) -> None:
    """One kernel, which reads the weights as they are in memory; as near to float64 as eager."""
    function, weights = LAYERS[name]
    x, given = r(rows, K) / K**0.5, weights()
    with as_cuda(), config.patch({"test_configs.max_mm_configs": 1}), fresh_cache():
        options: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
        call = torch.compile(function, backend="tilewright", dynamic=False, options=options)
        found, code = run_and_get_code(call, x, *given)
    called = re.findall(r"^ *(triton_\w+|extern_\w+)\(", host("\n".join(code)), re.M)
    assert len(called) == 1 and called[0].startswith("triton_tem_fused_"), called
    exact = function(x.double(), *(t.double() if t.is_floating_point() else t for t in given))
    limit = 4 * (function(x, *given).double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= limit


@pytest.mark.parametrize("rows", [1, 17])
def test_the_operator_with_weights_of_eight_bits(rows: int) -> None:
    """`_weight_int8pack_mm` and what follows are one kernel, which widens weights; its scale is
    applied before the one rounding: sums of these numbers are exact."""

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return torch.relu(torch.ops.aten._weight_int8pack_mm(x, w, s)) + 1

    x = torch.randint(-8, 9, (rows, 64)).to(BF16)
    w, s = torch.randint(-128, 128, (48, 64), dtype=torch.int8), (r(48).abs() + 0.1).to(BF16)
    with as_cuda(), config.patch({"test_configs.max_mm_configs": 1}), fresh_cache():
        options: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
        call = torch.compile(function, backend="tilewright", dynamic=False, options=options)
        found, code = run_and_get_code(call, x, w, s)
    called = re.findall(r"^ *(triton_\w+|extern_\w+)\(", host("\n".join(code)), re.M)
    assert len(called) == 1 and called[0].startswith("triton_tem_fused_"), called
    exact = ((x.double() @ w.double().t()) * s.double()).to(BF16).relu() + 1
    assert torch.equal(found, exact)


# ---- problems


def packed(m: int, n: int, k: int, group: int, axis: str, device: str = "cpu") -> Made:
    """Four bits, two of them in a byte of neighbours along an axis; less 8, times a scale."""

    def made(*size: int, dtype: torch.dtype) -> Tensor:
        if device == "meta" or dtype != torch.uint8:
            drawn = torch.empty(size, device="meta") if device == "meta" else torch.randn(size)
            return drawn.to(dtype)
        return bytes_(*size)

    x, shape = made(m, k, dtype=F16), made(n, k, dtype=F16).t()
    s = made(n, -(-k // group), dtype=F16)
    p = made(n, k // 2, dtype=torch.uint8) if axis == "k" else made(k, n // 2, dtype=torch.uint8)

    def value(b: Builder) -> Expr:
        along = b.k if axis == "k" else b.n
        at = (b.n, ix.floordiv(b.k, 2)) if axis == "k" else (b.k, ix.floordiv(b.n, 2))
        byte = load("p", p.dtype, ix.linearize(at, b.view("p", p).stride))
        low = op("bit_and", byte, const(15, torch.uint8))
        high = op("shr", byte, const(4, torch.uint8))
        q = where(op("eq", ix.mod(along, 2), const(0)), low, high)
        scale = load("s", F16, ix.linearize((b.n, ix.floordiv(b.k, group)), b.view("s", s).stride))
        shifted = op("sub", cast(q, F32), const(8.0, F32))
        return cast(op("mul", shifted, cast(scale, F32)), F16)

    return problem("mm", x, shape, dtype=F32, prologue={1: value})


def in_float64(made: Made, m: int, n: int, k: int, group: int, axis: str) -> Tensor:
    x, p, s = (made.tensors[name] for name in ("x0", "p", "s"))
    shape = (n, k // 2) if axis == "k" else (k, n // 2)
    q = torch.stack([p.view(shape) & 15, p.view(shape) >> 4], -1).flatten(1).double() - 8
    q = q if axis == "k" else q.t()
    scale = s.view(n, -1).double().repeat_interleave(group, 1)[:, :k]
    return x.view(m, k).double() @ (q * scale).half().double().t()


@pytest.mark.parametrize("axis", ["k", "n"])
@pytest.mark.parametrize(("template", "blocks"), [
    ("mm", (16, 32, 32)), ("mm", (32, 16, 64)), ("mm_split_k", (16, 32, 32)),
    ("mm_persistent", (16, 32, 64)), ("mv", (4, 16, 64))])  # fmt: skip
def test_neighbours_in_a_byte(template: str, blocks: tuple[int, int, int], axis: str) -> None:
    """Along either axis, in every template, at sizes that blocks do not fit."""
    split = 2 if template == "mm_split_k" else 1
    c = GemmConfig(*blocks, 2, 4, split_k=split)
    for m, n, k, group in ((3, 34, 130, 32), (4, 62, 126, 64), (1, 2, 34, 128)):
        made = packed(m, n, k, group, axis)
        chosen = TritonTemplate.all_templates[template]
        assert chosen.limits(made.problem) == ""
        kernel = TritonCandidate(made.problem, chosen, c, template, 0.0).kernel()
        made.tensors["c"].fill_(torch.nan)
        interpret(made, kernel)
        wanted = in_float64(made, m, n, k, group, axis)
        found = made.tensors["c"].view(m, n).double()
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())
        assert kernel.source.text.count("tl.load(p_p ") == 1
        if n > 2:  # bytes behind a row are not read
            assert ("< N // 2" in kernel.source.text) == (axis == "n")


@pytest.mark.parametrize(("m", "template", "c"), [
    (1, "mv", GemmConfig(1, 32, 128, 3, 4)), (16, "mm", GemmConfig(16, 64, 128, 4, 4)),
    (64, "mm", GemmConfig(64, 64, 128, 4, 4))])  # fmt: skip
def test_packed_weights_are_copied_sixteen_bytes_at_once(m: int, template: str, c: GemmConfig
                                                         ) -> None:  # fmt: skip
    """Of a group as long as a block of k one scale is loaded for each column; nothing spills."""
    made = packed(m, 4096, 4096, 128, "k", "meta")
    chosen = TritonTemplate.all_templates[template]
    found = compiled(TritonCandidate(made.problem, chosen, c, template, 0.0))
    assert "cp.async.cg.shared.global" in found["ptx"] and found["facts"].stack == 0
    assert len(re.findall(r"ld\.global", found["ptx"])) <= 8


def test_whole_numbers_are_not_rounded_there_and_back() -> None:
    """Less a zero point they are still whole; beyond 256 bfloat16 has not all of them, and what a
    scale makes of them is rounded as in eager."""
    byte = load("p", torch.uint8, const(0))

    def steps(less: float) -> Expr:
        lessened = op("sub", cast(cast(byte, BF16), F32), const(less, F32))
        scaled = op("mul", cast(cast(lessened, BF16), F32), const(0.3, F32))
        return cast(scaled, BF16)

    plain = op("sub", cast(byte, F32), const(8.0, F32))
    assert unrounded(steps(8.0)) is cast(op("mul", plain, const(0.3, F32)), BF16)
    far = op("sub", cast(byte, F32), const(300.0, F32))
    kept = cast(cast(far, BF16), F32)
    assert unrounded(steps(300.0)) is cast(op("mul", kept, const(0.3, F32)), BF16)
