"""Products with a 2:4 sparse left operand, by kernels of CUTLASS 2.x."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass
from torch.sparse.semi_structured import SparseSemiStructuredTensorCUTLASS

from tests.compile.cutlass import BF16, CUTLASS, F16, ON, by_torch
from tilewright import config
from tilewright.errors import NoValidChoicesError
from tilewright.gemm import choose as choosing
from tilewright.gemm import sparse
from tilewright.gemm.cutlass import arrange, filter, operations
from tilewright.gemm.cutlass.bind import CutlassSource
from tilewright.gemm.plan import Described, Memory
from tilewright.ir import index as ix
from tilewright.ir.program import Buffer, Opaque, Origin, Program, View
from tilewright.testing import run_and_get_code


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    choosing._memo.clear()


def left(m: int, k: int, dtype: torch.dtype = F16, pattern: tuple[int, ...] = (0, 0, 1, 1)
         ) -> torch.Tensor:  # fmt: skip
    """Small whole numbers, two of every four."""
    kept = torch.tensor(pattern).repeat(m, k // 4)
    return (torch.randint(1, 4, (m, k)) * kept).to(dtype)


def product(values: torch.Tensor, meta: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch._sparse_semi_structured_mm(values, meta, right)


def integers(values: torch.Tensor, meta: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch._sparse_semi_structured_mm(values, meta, right, out_dtype=torch.int32)


def compiled(
    function: Any, *args: Any, dynamic: bool = False, **options: Any
) -> tuple[list[CutlassSource], Any, str]:
    given = {**ON, "fx_graph_cache": False, **options}
    with by_torch() as called:
        f = torch.compile(function, backend="tilewright", dynamic=dynamic, options=given)
        result, code = run_and_get_code(f, *args)
    return called, result, "\n".join(code)


@pytest.mark.parametrize(
    ("dtype", "m", "n", "k"),
    [(F16, 32, 8, 64), (F16, 64, 256, 192), (BF16, 96, 128, 128), (torch.int8, 32, 32, 128)],
)
@pytest.mark.parametrize("columns", [False, True])
def test_cu_c20_the_dense_product(
    dtype: torch.dtype, m: int, n: int, k: int, columns: bool
) -> None:
    """CU-C20: equal to the product of the whole matrix; the right operand by rows or columns."""
    dense = left(m, k, dtype)
    values, meta = sparse_semi_structured_from_dense_cutlass(dense)
    right = torch.randint(-3, 4, (k, n)).to(dtype)
    right = right.t().contiguous().t() if columns or dtype == torch.int8 else right
    function = integers if dtype == torch.int8 else product
    called, result, code = compiled(function, values, meta, right)
    assert torch.equal(result.double(), dense.double() @ right.double())
    (source,) = called
    assert source.source.name in code
    short = {F16: "f16_s16832spgemm_f16", BF16: "bf16_s16832spgemm_bf16",
             torch.int8: "i16864spgemm_s8"}[dtype]  # fmt: skip
    assert source.label.startswith(f"cutlass_tensorop_{short}_")
    assert f"_t{'n' if columns or dtype == torch.int8 else 't'}_" in source.label
    numbers = dict(zip(_names(source), source._worked_out(()).values, strict=True))
    assert (numbers["M"], numbers["N"], numbers["K"]) == (m, n, k)
    assert (numbers["lda"], numbers["ldd"], numbers["lde"]) == (k // 2, n, 2 * m)


def _names(source: CutlassSource) -> list[str]:
    head = source.source.text.partition('extern "C"')[2].partition(") {")[0]
    kinds = ("int64_t ", "float ")
    parts = [part.strip() for part in head.partition("(\n")[2].replace("\n", " ").split(",")]
    return [p.split()[-1] for p in parts if p.startswith(kinds)]


def test_cu_c20_a_tensor_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-C20: `torch.mm` of what `to_sparse_semi_structured` makes."""
    dense = left(32, 64)
    values, meta = sparse_semi_structured_from_dense_cutlass(dense)
    tensor = SparseSemiStructuredTensorCUTLASS(
        dense.shape, packed=values, meta=meta, packed_t=None, meta_t=None,
        compressed_swizzled_bitmask=None,
    )  # fmt: skip
    right = torch.randint(-3, 4, (64, 8)).half()
    called, result, _ = compiled(torch.mm, tensor, right)
    assert len(called) == 1 and torch.equal(result, dense @ right)


def test_cu_c21_what_is_offered() -> None:
    """CU-C21: matrices alone; k a multiple of the tile's; values, right operand, metadata in this
    order; and nothing that ends the product in another way than by storing it."""
    values, meta = sparse_semi_structured_from_dense_cutlass(left(64, 192))
    right = torch.randn(192, 64).half()
    called, _, _ = compiled(product, values, meta, right)
    problem = called[0].problem
    assert [called[0].names[k] for k in called[0].addresses] == ["a", "b", "a2", "c"]
    with config.patch(ON):
        every = [c.operation for c in CUTLASS.candidates(problem, "max")]
        known = operations.operations(90, "13.0")["f16", "f16", "f32"]
    fitting = [o for o in known if o.kind == "sparse" and o.layouts == "ttt" and o.d == "f16"]
    assert len(fitting) == 13
    assert {o.name for o in every} == {o.name for o in fitting if 192 % o.tile[2] == 0}
    assert len(every) == 8  # tiles of 64 along k, and not those of 128
    found = arrange.arranged(problem)
    assert not isinstance(found, str)
    dense = next(o for o in known if o.kind == "universal3x")
    assert filter.adapted(dense, found) == "of another kind"
    called, _, code = compiled(lambda v, m, r: torch.relu(product(v, m, r)), values, meta, right)
    assert len(called) == 1 and not called[0].problem.epilogue and "triton_" in code


def test_operands_are_in_memory_first() -> None:
    """What makes an operand is a kernel before it; and with others alone the call is torch's."""
    dense = left(64, 64)
    values, meta = sparse_semi_structured_from_dense_cutlass(dense)
    right = torch.randint(-3, 4, (64, 32)).half()
    called, result, code = compiled(lambda v, e, r: product(v * 2, e, r + 1), values, meta, right)
    assert len(called) == 1 and "triton_" in code
    assert torch.equal(result, (dense * 2) @ (right + 1))
    with pytest.raises(Exception, match="_sparse_semi_structured_mm"):  # which a CPU has not
        compiled(product, values, meta, right, max_autotune_gemm_backends="TRITON")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("rows", "whole groups of 32"),
        ("k", "no operation of CUTLASS"),
        ("columns", "no operation of CUTLASS"),
    ],
)
def test_cu_c21_what_is_refused(change: str, why: str) -> None:
    m, n, k = {"rows": (48, 64, 64), "k": (64, 64, 96), "columns": (64, 36, 64)}[change]
    kept = torch.tensor((0, 0, 1, 1)).repeat(m, k // 4)
    values = torch.ones(m, k // 2).half()
    meta = torch.full((m, k // 16), 0x4444, dtype=torch.int16)
    assert kept.shape == (m, k)
    with pytest.raises(Exception, match=NoValidChoicesError.__name__) as caught:
        compiled(product, values, meta, torch.randn(k, n).half())
    assert why in str(caught.value)


def test_cu_c21_sizes_must_agree() -> None:
    """CU-C21: what is no sparse product stays the library's own call."""

    def view(name: str, dtype: torch.dtype, *size: int, turned: bool = False) -> View:
        sizes = tuple(map(ix.as_index, size))
        stride = (ix.ONE, sizes[0]) if turned else (sizes[1], ix.ONE)
        return View(name, sizes, stride, ix.ZERO, dtype)

    right, out = view("r", F16, 64, 8), view("c", F16, 32, 8)
    values, meta = view("v", F16, 32, 32), view("m", torch.int16, 32, 4)
    program = Program(buffers={
        v.buffer: Buffer(v.buffer, v.dtype, torch.device("cuda", 0), v.size, v.stride)
        for v in (values, meta, right, out)}, inputs=[], symbols={})  # fmt: skip
    target = torch.ops.aten._sparse_semi_structured_mm.default
    told = {
        "its metadata is of another matrix": (values, view("m", torch.int16, 32, 2), right),
        "its metadata is not contiguous": (values, view("m", torch.int16, 32, 4, turned=True),
                                           right),
        "no kernels for": (values, view("m", torch.int32, 32, 4), right),
    }  # fmt: skip
    with config.patch(ON):
        for why, args in told.items():
            call = Opaque("s", target, args, {}, (), (), Origin(()))
            assert why in str(sparse.parsed(program, call, out))
        call = Opaque("s", target, (values, meta, right), {}, (), (), Origin(()))
        assert isinstance(sparse.parsed(program, call, out), sparse.SparseProblem)


def test_what_it_is_compared_with_is_right() -> None:
    """The library's call where ATen has no kernel: as everywhere but on sm_8x."""
    for dtype, out_dtype in ((BF16, BF16), (torch.int8, torch.int32)):
        dense = left(32, 128, dtype, (1, 0, 0, 1))
        values, meta = sparse_semi_structured_from_dense_cutlass(dense)
        right, out = torch.randint(-4, 5, (128, 8)).to(dtype), torch.empty(32, 8, dtype=out_dtype)
        sparse.multiplied(values, meta, right, out=out)
        assert torch.equal(out.double(), dense.double() @ right.double())


def test_metadata_is_valid_while_it_is_timed() -> None:
    """Two places of every four, and not one twice."""
    size, stride = (ix.as_index(32), ix.as_index(4)), (ix.as_index(4), ix.ONE)
    meta = Buffer("a2", torch.int16, torch.device("cpu"), size, stride)
    ordinary = sparse.ORDINARY[torch.int16]
    held = Memory(Described((meta,), (), (), contents=(("a2", (ordinary,)),))).sets[0]["a2"]
    assert len(held) == 128 and set(held.tolist()) == {0x4444}
    values = torch.ones(32, 32).half()
    out = torch.empty(32, 8).half()
    sparse.multiplied(values, held.view(32, 4), torch.ones(64, 8).half(), out=out)
    assert (out == 32).all()
