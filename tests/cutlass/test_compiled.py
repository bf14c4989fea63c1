"""CUTLASS kernels of every kind, compiled by nvcc for sm_90a: half a minute each, so not in CI.

`make test-all` runs them. One more is compiled in `tests/compile/test_cutlass_build.py`.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

from tests.compile.cutlass import BF16, F16, col, offered, ran
from tests.compile.test_cutlass_build import _checked
from tests.compile.test_cutlass_evt import _drawn
from tests.compile.test_cutlass_sparse import compiled, integers, left, product
from tests.products import Made, problem
from tilewright import config
from tilewright.gemm.cutlass.bind import CutlassSource
from tilewright.gemm.cutlass.evt import Epilogue, epilogue
from tilewright.gemm.cutlass.words import cuda_standalone_runner_compile_command
from tilewright.runtime import nvcc

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def addmm(shape: tuple[int, ...]) -> Made:
    return problem("addmm", torch.empty(256, 512, dtype=F16), col(1024, 512),
                   bias=torch.empty(shape, dtype=F16), alpha=2.0, beta=0.5)  # fmt: skip


def bmm() -> Made:
    return problem("baddbmm", torch.empty(4, 256, 512, dtype=BF16),
                   torch.empty(4, 512, 1024, dtype=BF16),
                   bias=torch.empty(4, 1, 1024, dtype=BF16))  # fmt: skip


def mm(a: torch.Tensor, b: torch.Tensor) -> Made:
    return problem("mm", a, b)


CASES: dict[str, tuple[Callable[[], Made], str]] = {
    "stream-K, batches, a row for each": (bmm, "128x128x64_2x1x1.*stream_k.*cooperative_epi_tma"),
    "copies without descriptors": (lambda: addmm((1024,)), "1x1x1.*cpasync_warpspecialized_epi"),
    "a column": (lambda: addmm((256, 1)), "64x256x64_1x2x1.*pingpong_epi_tma"),
    "a matrix as C": (lambda: addmm((256, 1024)), "128x256x64_2x1x1.*_cooperative_epi_tma"),
    "a number": (lambda: addmm((1, 1)), "64x256x64_2x1x1.*pingpong_epi_tma"),
    "column by row": (lambda: mm(col(512, 256), torch.empty(512, 1024, dtype=F16)),
                      "64x256x64_2x1x1.*pingpong_epi_tma"),
    "CUTLASS's own schedule": (lambda: mm(torch.empty(256, 512, dtype=F16), col(1024, 512)),
                               "128x128x64_2x1x1_0_tnt_align8$"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_compiles(name: str) -> None:
    make, pattern = CASES[name]
    _checked(offered(make().problem, cutlass_op_allowlist_regex=pattern)[0])


def scaled(fast: bool, out: torch.dtype = BF16) -> Callable[..., torch.Tensor]:
    return lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=out, use_fast_accum=fast)


def _fp8(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, 64).to(dtype)


def _int8(rows: int) -> torch.Tensor:
    return torch.ones(rows, 64, dtype=torch.int8)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "fp8 by rows": (scaled(False), lambda: (_fp8(128, E4), _fp8(96, E4).t(), torch.rand(128, 1),
                                            torch.rand(1, 96))),
    "fp8 of two kinds": (scaled(True, F16), lambda: (_fp8(128, E4), _fp8(96, E5).t(),
                                                     torch.rand(()), torch.rand(()))),
    "integers": (torch._int_mm, lambda: (torch.ones(128, 64, dtype=torch.int8),
                                         torch.ones(96, 64, dtype=torch.int8).t())),
    "halves by int8": (lambda a, b: torch.mm(a, b.to(F16)),
                       lambda: (torch.ones(128, 64, dtype=F16), _int8(96).t())),
    "integers to halves": (lambda a, b, s: (torch._int_mm(a, b).float() * s).half(),
                           lambda: (torch.ones(128, 64, dtype=torch.int8),
                                    torch.ones(96, 64, dtype=torch.int8).t(), torch.rand(1, 96))),
}  # fmt: skip


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_programs_compile(name: str) -> None:
    function, inputs = PROGRAMS[name]
    called, _ = ran(function, *inputs(), tolerance=0.05)
    _loaded(called[0])


@pytest.mark.parametrize("dtype", [F16, torch.int8])
def test_cu_c20_sparse_products_compile(dtype: torch.dtype) -> None:
    dense = left(64, 128, dtype)
    values, meta = sparse_semi_structured_from_dense_cutlass(dense)
    right = torch.ones(64, 128, dtype=dtype).t()
    called, _, _ = compiled(integers if dtype == torch.int8 else product, values, meta, right)
    _loaded(called[0])


def _loaded(source: CutlassSource) -> None:
    with config.patch({"cuda.arch": "sm_90", "cuda.version": "13.0"}):
        assert nvcc.loaded(source.source, source.key).name == source.source.name


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_random_epilogues_compile(seed: int) -> None:
    rng = random.Random(seed)
    made = next(m for m, _ in (_drawn(rng) for _ in range(40))
                if isinstance(epilogue(m.problem), Epilogue))  # fmt: skip
    pattern = "64x256x64_2x1x1.*pingpong_epi_tma"
    _checked(offered(made.problem, cutlass_op_allowlist_regex=pattern)[0])


def test_cu_f13_a_program_around_a_kernel(tmp_path: Path) -> None:
    """CU-F13: it compiles; on a card it runs (`tests/gpu/test_cutlass.py`)."""
    pattern = "64x256x64_2x1x1.*pingpong_epi_nosmem"
    with config.patch({"cuda.generate_test_runner": True, "cuda.arch": "sm_90"}):
        made = mm(torch.empty(256, 128, dtype=F16), col(512, 128))
        source = offered(made.problem, cutlass_op_allowlist_regex=pattern)[0].source
        (tmp_path / "kernel.cu").write_text(source.text)
        command = cuda_standalone_runner_compile_command(
            str(tmp_path / "kernel.cu"), str(tmp_path / "kernel")
        )
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kernel").exists()
