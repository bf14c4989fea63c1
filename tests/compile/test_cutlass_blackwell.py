"""CUTLASS's kernels for sm_100: rendered with its descriptors, and compiled by `make test-all`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compile.cutlass import BF16, CUTLASS, F16, F32, ON, col
from tests.products import Builder, Made, problem
from tilewright import config
from tilewright.errors import InvalidOptionError
from tilewright.gemm.cutlass import filter, operations, provider
from tilewright.gemm.cutlass.operations import Operation
from tilewright.gemm.cutlass.provider import CutlassCandidate
from tilewright.ir.build import cast, op
from tilewright.ir.expr import Expr, const
from tilewright.runtime import nvcc
from tilewright.target import Target

BLACKWELL = {**ON, "cuda.arch": "sm_100"}
# As CUTLASS lists it: by pairs of blocks, how many of them share what they load is for the call.
LISTED = Operation(
    kind="universal3x", arch=100, opcode="tensorop", a="f16", b="f16", accumulator="f32", c="f16",
    d="f16", layouts="tnn", aligned=(8, 8, 8, 8), tile=(256, 128, 64), cluster=(0, 0, 1), stages=0,
    warps=(4, 1, 1), instruction=(256, 128, 16), math="cutlass::arch::OpMultiplyAdd", fast=False,
    scheduler="void", kernel_schedule="cutlass::gemm::KernelTmaWarpSpecialized2SmSm100",
    epilogue_schedule="cutlass::epilogue::TmaWarpSpecialized2Sm", suffixes=("", "_2sm", "_epi_tma"),
)  # fmt: skip
STATIC = replace(LISTED, tile=(256, 512, 64), cluster=(2, 4, 1))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two of its operations: listing all 127 808 takes ten seconds."""
    rows = {("f16", "f16", "f32"): (LISTED, STATIC)}
    monkeypatch.setattr(filter, "operations", lambda arch, version: rows)
    filter._filtered.clear()
    with config.patch(BLACKWELL):
        yield
    filter._filtered.clear()


def fused(b: Builder, c: Expr) -> Any:
    """F = accumulator + C + aux; E = relu(F) + bias; D = E + F, with a row beside."""
    shape = (256, 512)
    x, aux = (
        cast(b.read(name, torch.empty(shape, dtype=F16), b.m, b.n), F32) for name in ("C", "aux")
    )
    bias = b.read("bias", torch.empty(256, 1), b.m, b.n)
    row = cast(b.read("row", torch.empty(1, 512, dtype=BF16), b.m, b.n), F32)
    f = op("add", op("add", cast(c, F32), x), aux)
    d = op("add", op("add", op("max", f, const(0.0, F32)), op("mul", row, bias)), f)
    return {"D": (torch.empty(shape, dtype=F16), cast(d, F16)), "F": (torch.empty(shape), f)}


def made(epilogue: Any = None) -> Made:
    return problem("mm", torch.empty(256, 128, dtype=F16), col(512, 128), epilogue=epilogue,
                   keeps=epilogue is None, target=Target("sm_100"))  # fmt: skip


def offered(epilogue: Any = None) -> list[CutlassCandidate]:
    one = made(epilogue).problem
    assert CUTLASS.supports(one) == ""
    return [c for c in CUTLASS.candidates(one, "max") if c.swizzle == 1]


def test_cu_h20_descriptors_of_sm_100(listed: None) -> None:
    """CU-H20: what describes memory is sm_100's, with both strides and two things that are not
    supported; nodes keep the names of sm_90."""
    text = offered(fused)[0].rendered.text
    head = "using Descriptor = collective::detail::Sm100EpilogueDescriptor<\n"
    assert head in text
    told = text.partition(head)[2].partition(">;\n")[0]
    assert "cutlass::arch::OpClassTensorOp, MmaTile" in told and told.endswith("false, false")
    assert "ElementAccumulator, ElementC, ElementD, EpilogueSchedule" in told
    assert "TagToStrideC_t<LayoutC>" in told and "TagToStrideC_t<LayoutD>" in told
    assert "Sm100AuxLoadDescriptor<Descriptor" in text
    assert "Sm100AuxStoreDescriptor<Descriptor" in text
    for node in ("AccFetch", "SrcFetch", "AuxLoad", "ColBroadcast<0, Tile", "RowBroadcast<0, Tile",
                 "Compute", "AuxStore", "TopologicalVisitor"):  # fmt: skip
        assert f"fusion::Sm90{node}" in text, node
    assert "using MmaTile = Shape<_256, _128, _64>;" in text
    assert "using Tile = typename Descriptor::TileShape;" in text
    assert "cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, MmaTile, Cluster" in text
    flags = " ".join(nvcc.flags(offered(fused)[0].source.arch))
    assert "arch=compute_100a,code=[sm_100a,compute_100a]" in flags


def test_cu_d12_clusters_of_the_call(listed: None) -> None:
    """CU-D12: from both options, as arguments, so that they are no other binary; operations with a
    cluster of their own say nothing."""
    free = next(c for c in offered() if c.operation.is_clustered_by_the_call)
    fixed = next(c for c in offered() if not c.operation.is_clustered_by_the_call)
    assert "using Cluster = Shape<int, int, _1>;" in free.rendered.text
    assert "using Cluster = Shape<_2, _4, _1>;" in fixed.rendered.text
    assert "hw_info.cluster" not in fixed.rendered.text
    for name in ("cluster_shape", "cluster_shape_fallback"):
        line = f"arguments.hw_info.{name} = dim3(unsigned({name}_m), unsigned({name}_n), 1);"
        assert line in free.rendered.text

    def numbers(c: CutlassCandidate) -> dict[str, Any]:
        names = [name for name, _, _ in c.rendered.numbers]
        return dict(zip(names, c.kernel().source._worked_out(()).values, strict=True))  # type: ignore[union-attr]

    found = numbers(free)
    assert (found["cluster_shape_m"], found["cluster_shape_n"]) == (2, 1)
    named = {"cuda.cutlass_dynamic_cluster_shape": "4,4,1",
             "cuda.cutlass_dynamic_cluster_fallback": [2, 2, 1]}  # fmt: skip
    with config.patch(named):
        other = next(c for c in offered() if c.operation.is_clustered_by_the_call)
        found = numbers(other)
    keys = [f"cluster_shape{part}_{side}" for part in ("", "_fallback") for side in "mn"]
    assert [found[key] for key in keys] == [4, 4, 2, 2]
    assert other.binary == free.binary
    with (
        pytest.raises(InvalidOptionError),
        config.patch({"cuda.cutlass_dynamic_cluster_shape": "4,4"}),
    ):
        pass


def test_blocks_are_what_is_counted(listed: None) -> None:
    """Two blocks share an instruction of 256 rows; a cluster's tile is not a block's."""
    assert LISTED.block == (128, 128) == STATIC.block
    assert replace(LISTED, kernel_schedule="KernelTmaWarpSpecialized1SmSm100").block == (256, 128)
    assert all(c.operation.is_tma and c.operation.layouts == "tnt" for c in offered(fused))
    auto = replace(LISTED, epilogue_schedule="cutlass::epilogue::collective::EpilogueScheduleAuto")
    assert not auto.is_tma


def test_other_cards_are_refused() -> None:
    one = problem("mm", torch.empty(64, 64, dtype=F16), col(64, 64), target=Target("sm_120"))
    with config.patch({**ON, "cuda.arch": "sm_120"}):
        assert "sm_120" in CUTLASS.supports(one.problem)
    assert provider.RENDERED == (90, 100)


@pytest.mark.slow
def test_cu_d12_of_all_operations() -> None:
    """CU-D12: 56 of 344 for halves."""
    every = operations.operations(100, "13.0")["f16", "f16", "f32"]
    halves = [o for o in every if o.d == "f16"]
    assert len(halves) == 344
    assert sum(o.is_clustered_by_the_call for o in halves) == 56


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", [None, fused])
@pytest.mark.skipif(not nvcc.find(), reason="no nvcc: install the CUDA toolkit")
def test_cu_h20_compiles(listed: None, epilogue: Any) -> None:
    """CU-H20, CU-D12: for sm_100a."""
    candidate = next(c for c in offered(epilogue) if c.operation.is_clustered_by_the_call)
    path = nvcc.build(candidate.source, "so")
    assert nvcc.load(path, candidate.source.name, candidate.source.args).name in str(
        candidate.source.text
    )
