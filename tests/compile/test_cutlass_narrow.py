"""Products of eight-bit operands by CUTLASS: `_int_mm` and `_scaled_mm`, alone and with what
follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compile import visitors
from tests.compile.as_cuda import as_cuda
from tests.compile.cutlass import BF16, F16, F32, ON, ran
from tests.products import Made
from tilewright import config, metrics
from tilewright.errors import NoValidChoicesError
from tilewright.gemm import fuse
from tilewright.gemm.cutlass import filter
from tilewright.gemm.cutlass.arrange import arranged
from tilewright.gemm.cutlass.bind import CutlassSource
from tilewright.gemm.cutlass.evt import epilogue
from tilewright.gemm.problem import GemmProblem
from tilewright.testing import run_and_get_code

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
M, N, K = 128, 96, 64


def fp8(rows: int, columns: int, dtype: torch.dtype = E4) -> torch.Tensor:
    """Small whole numbers: sums of their products are exact."""
    return torch.randint(-3, 4, (rows, columns)).float().to(dtype)


def scaled(out: torch.dtype = BF16, fast: bool = False) -> Any:
    def call(
        a: torch.Tensor,
        b: torch.Tensor,
        sa: torch.Tensor,
        sb: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch._scaled_mm(a, b, sa, sb, bias=bias, out_dtype=out, use_fast_accum=fast)

    return call


def operands(left: torch.dtype = E4, right: torch.dtype = E4) -> tuple[torch.Tensor, torch.Tensor]:
    return fp8(M, K, left), fp8(N, K, right).t()


SCALES = {"rows": ((M, 1), (1, N)), "tensor": ((), ())}


def _names(problem: GemmProblem, **options: Any) -> list[str]:
    with config.patch({**ON, **{f"cuda.{k}": v for k, v in options.items()}}):
        found = arranged(problem)
        assert not isinstance(found, str), found
        return [op.name for op in filter.fitting(found, 90, "13.0")]


@pytest.mark.parametrize("kind", list(SCALES))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_cu_c12_scaled(kind: str, bias: bool, fast: bool, tmp_path: Path) -> None:
    """CU-C12, CU-C15, CU-C17, CU-C18: one kernel; its visitor multiplies by both scales, then
    adds; the kernel's own arithmetic is run on the host."""
    a, b = operands()
    scales = [torch.rand(shape) + 0.5 for shape in SCALES[kind]]
    added = [torch.randn(N).bfloat16()] if bias else []
    called, code = ran(scaled(BF16, fast), a, b, *scales, *added)
    assert len(called) == 1 and "triton_" not in code
    source = called[0]
    assert ("fastaccum" in source.label) == fast
    assert source.label.endswith("epi_tma")
    check(
        source,
        {
            "a": a,
            "b": b,
            "scale_a": scales[0],
            "scale_b": scales[1],
            **({"bias": added[0]} if bias else {}),
        },
        (a.float() @ b.float()),
        tmp_path,
    )


def check(
    source: CutlassSource, given: dict[str, torch.Tensor], sums: torch.Tensor, folder: Path
) -> None:
    """The visitor over memory of the host, against torch's own scaled product."""
    found = epilogue(source.problem)
    assert not isinstance(found, str)
    tensors = {
        name: t.reshape(-1) if t.is_contiguous() else t.t().reshape(-1) for name, t in given.items()
    }
    tensors["c"] = torch.empty(M * N, dtype=source.problem.dtype)
    made = Made(source.problem, tensors, {})
    (functions,) = visitors.compiled([found], folder)
    stored = visitors.run(made, found, functions, sums.reshape(1, M, N))
    total = sums * given["scale_a"] * given["scale_b"]
    total = total + given["bias"].float() if "bias" in given else total
    torch.testing.assert_close(stored["c"][0], total.to(source.problem.dtype))


@pytest.mark.parametrize(("left", "right"), [(E4, E5), (E5, E4), (E4, E4)])
def test_cu_c13_two_kinds_of_fp8(left: torch.dtype, right: torch.dtype) -> None:
    a, b = operands(left, right)
    with as_cuda():
        problem = _problem(scaled(F16), a, b, torch.tensor(1.0), torch.tensor(2.0))
    # all that end so: 16 of 40 with sums in fewer bits, 8 of 30 without
    assert len(_names(problem)) == 8
    short = {E4: "e4m3", E5: "e5m2"}
    assert all(f"gemm_{short[left]}_{short[right]}_f32_void_f16" in n for n in _names(problem))


def test_cu_c14_fewer_bits() -> None:
    a, b = operands()
    scales = torch.rand(M, 1), torch.rand(1, N)
    for fast, count in ((True, 16), (False, 8)):
        with as_cuda():
            names = _names(_problem(scaled(BF16, fast), a, b, *scales), cutlass_tma_only=True)
        assert len(names) == count
        assert all(("fastaccum" in name) == fast for name in names)


def _problem(function: Any, *args: torch.Tensor) -> GemmProblem:
    """Of the one product in a program, alone."""
    found: list[GemmProblem] = []
    original = fuse.site

    def site(*given: Any) -> Any:
        made = original(*given)
        if isinstance(made, fuse.Site):
            found.append(made.bare.problem)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse, "site", site)
        compiled = torch.compile(
            function,
            backend="tilewright",
            dynamic=False,
            options={**ON, "max_autotune_gemm_backends": "ATEN", "fx_graph_cache": False},
        )
        run_and_get_code(compiled, *args)
    return found[-1]


def test_cu_c16_quantised_in_the_program() -> None:
    """Rows are scaled, multiplied, scaled again and multiplied again."""

    def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = 448.0 / x.float().abs().amax(1, keepdim=True).clamp(min=1e-12)
        return (x.float() * scale).clamp(-448, 448).to(E4), scale.reciprocal()

    w, ws = fp8(K, K), torch.rand(1, K) + 0.5

    def f(x: torch.Tensor, w: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q, s = quantised(x)
            x = torch._scaled_mm(q, w.t(), s, ws, out_dtype=BF16, use_fast_accum=True)
        return x

    called, _ = ran(f, torch.randn(M, K).bfloat16(), w, ws, tolerance=0.05)
    assert len(called) == 2 and called[0].key == called[1].key


def test_cu_c18_fused_after() -> None:
    a, b = operands()
    called, _ = ran(lambda *t: torch.relu(scaled()(*t)), a, b, torch.rand(M, 1), torch.rand(1, N))
    assert len(called) == 1 and len(called[0].problem.epilogue) == 1
    assert metrics.counters["inductor"]["cuda_epilogue_fusion_counter"] == 1


def test_cu_c12_dynamic() -> None:
    """One source for all sizes."""
    sources = set()
    for m, n, k in ((M, N, K), (256, 64, 128)):
        a, b = fp8(m, k), fp8(n, k).t()
        called, _ = ran(scaled(), a, b, torch.rand(m, 1), torch.rand(1, n), dynamic=True)
        assert called[0].problem.symbols
        sources.add(called[0].source.text)
    assert len(sources) == 1


def test_cu_c9_integers() -> None:
    """CU-C9: exactly equal; only rows by columns: 56 operations, and of rows that begin at
    multiples of 8 those that copy without descriptors."""
    a = torch.randint(0, 5, (100, 16)).to(torch.int8)
    b = torch.randint(0, 5, (32, 16)).to(torch.int8).t()
    called, _ = ran(torch._int_mm, a, b, tolerance=0.0)
    assert len(called) == 1 and "_s8_s8_s32_void_s32" in called[0].label
    with as_cuda():
        assert len(_names(_problem(torch._int_mm, a, b))) == 56
        assert all("cpasync" in n for n in _names(_problem(torch._int_mm, a[:, :8], b[:8])))
    with pytest.raises(Exception, match=NoValidChoicesError.__name__):
        ran(torch._int_mm, a, b.contiguous())


def test_cu_c10_integers_of_known_sizes_alone() -> None:
    a = torch.randint(0, 5, (100, 16)).to(torch.int8)
    b = torch.randint(0, 5, (32, 16)).to(torch.int8).t()
    with pytest.raises(Exception, match="known sizes alone"):
        ran(torch._int_mm, a, b, dynamic=True)


def test_integers_scaled_to_halves(tmp_path: Path) -> None:
    """Sums become float32 once, as eager's do."""
    a = torch.randint(-128, 128, (M, K)).to(torch.int8)
    b = torch.randint(-128, 128, (N, K)).to(torch.int8).t()
    s, bias = torch.rand(1, N) / 1000, torch.randn(N)
    called, _ = ran(
        lambda a, b, s, bias: (torch._int_mm(a, b).float() * s + bias).half(),
        a,
        b,
        s,
        bias,
        tolerance=1e-3,
    )
    assert len(called) == 1
    found = epilogue(called[0].problem)
    assert not isinstance(found, str)
    (functions,) = visitors.compiled([found], tmp_path)
    names = {
        leaf.access.buffer: t
        for leaf, t in zip(
            [x for x in found.leaves if x.access is not None],
            _in_order(found, s, bias),
            strict=True,
        )
        if leaf.access is not None
    }
    sums = (a.double() @ b.double()).float()
    stored = visitors.run(
        Made(called[0].problem, names, {}), found, functions, sums.reshape(1, M, N)
    )
    torch.testing.assert_close(next(iter(stored.values()))[0], (sums * s + bias).half())


def _in_order(found: Any, s: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    """The problem names what it reads in the order it is first read."""
    leaves = [x.access.buffer for x in found.leaves if x.access is not None]
    assert leaves == sorted(leaves) and len(leaves) == 2
    return [s.reshape(-1), bias]


def test_cu_c19_scales_of_blocks_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales that are not float32, or not of rows and columns."""
    from tilewright.gemm import narrow
    from tilewright.ir import index as ix
    from tilewright.ir.program import Opaque, Origin, View

    def view(name: str, rows: int, columns: int, dtype: torch.dtype) -> View:
        size = tuple(map(ix.as_index, (rows, columns)))
        return View(name, size, (size[1], ix.ONE), ix.ZERO, dtype)

    a, b, out = view("a", M, K, E4), view("b", K, N, E4), view("c", M, N, BF16)
    place = narrow.loops(ix.ONE, a.size[0], b.size[1], a.size[1])[1:]
    for scales in (
        (view("s", M, 2, torch.float8_e8m0fnu), view("t", 2, N, torch.float8_e8m0fnu)),
        (view("s", M, K // 32, F32), view("t", K // 32, N, F32)),
    ):
        call = Opaque("s", None, (a, b, *scales), {}, (), (), Origin(()))
        assert "of blocks" in str(narrow._scaled(call, place, out))


def test_on_a_cpu_the_library_computes() -> None:
    a = torch.randint(0, 5, (32, 16)).to(torch.int8)
    b = torch.randint(0, 5, (16, 24)).to(torch.int8)
    f = torch.compile(torch._int_mm, backend="tilewright", options={"max_autotune": True})
    assert torch.equal(f(a, b), torch._int_mm(a, b))


# ---- halves by int8


def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b.to(a.dtype))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_cu_c11_an_operand_is_converted_where_it_is_read(dtype: torch.dtype) -> None:
    """CU-C11: one kernel, no copy of the operand in another dtype; the product is computed
    transposed, for CUTLASS takes the narrow operand on the left."""
    a = torch.randn(M, K).to(dtype)
    b = torch.randint(-8, 8, (N, K)).to(torch.int8).t()
    called, code = ran(mixed, a, b)
    assert len(called) == 1 and "triton_" not in code
    short = {F16: "f16", BF16: "bf16"}[dtype]
    assert f"gemm_s8_{short}_f32_void_{short}_cvt_" in called[0].label
    assert "_tnn_" in called[0].label and "_shfl" not in called[0].label
    names = [called[0].names[k] for k in called[0].addresses]
    problem = called[0].problem
    assert problem.memory[names[0]].dtype == torch.int8 and names[1] == "a"
    assert called[0]._worked_out(()).values[:4] == (N, M, K, 1)


def test_cu_c11_with_what_follows(tmp_path: Path) -> None:
    """A row of the result is a column of its transpose; the visitor is run on the host."""
    a = torch.randint(-3, 4, (M, K)).half()
    b = torch.randint(-3, 4, (N, K)).to(torch.int8).t()
    x, y = torch.randn(N).half(), torch.randn(M, N).half()
    called, _ = ran(lambda a, b, x, y: torch.tanh(mixed(a, b) + x) * y, a, b, x, y)
    assert len(called) == 1
    text = called[0].source.text
    assert "Sm90ColBroadcast" in text and "Sm90RowBroadcast" not in text
    found = epilogue(called[0].problem)
    assert not isinstance(found, str)
    assert [leaf.kind for leaf in found.leaves if leaf.access is not None] == ["row", "source"]
    kinds = [leaf.kind for leaf in found.turned.leaves if leaf.access is not None]
    assert kinds == ["column", "source"]


def test_cu_c11_switched_off() -> None:
    a = torch.randn(M, K).half()
    b = torch.randint(-8, 8, (N, K)).to(torch.int8).t()
    called, _ = ran(mixed, a, b, use_mixed_mm=False)
    assert len(called) == 1 and "_s8_" not in called[0].label


def test_cu_c11_other_layouts_are_converted_first() -> None:
    a = torch.randn(M, K).half()
    b = torch.randint(-8, 8, (K, N)).to(torch.int8)
    called, _ = ran(mixed, a, b)
    assert len(called) == 1 and "_s8_" not in called[0].label
