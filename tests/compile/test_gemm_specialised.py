"""Products whose loads, sums and stores have warps of their own: in the interpreter, and compiled
for Blackwell and Hopper."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.test_gemm_descriptors import BOTH, F16, r, stored_by, tiled_mm
from tests.products import interpret, problem
from tests.programs import compiled
from tilewright import config
from tilewright.gemm import choose, heuristics
from tilewright.gemm.heuristics import GemmConfig
from tilewright.gemm.templates import TritonTemplate
from tilewright.gemm.triton import TritonCandidate, TritonProvider
from tilewright.runtime import triton_worker
from tilewright.runtime.triton_build import TritonSource
from tilewright.target import Target
from tilewright.testing import run_and_get_code

NAME = "blackwell_ws_persistent_device_tma"
TEMPLATE = TritonTemplate.all_templates[NAME]
BLACKWELL = Target("sm_100")
ONLY: dict[str, Any] = {
    "max_autotune": True, "triton.enable_persistent_tma_matmul": True,
    "test_configs.max_mm_configs": 4, "max_autotune_gemm_backends": "TRITON",
    "test_configs.autotune_choice_name_regex": NAME,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> Generator[None]:
    choose._memo.clear()
    with config.patch({"max_autotune": True, "triton.enable_persistent_tma_matmul": True}):
        yield


def code_of(function: Callable[..., Any], *args: Tensor, dynamic: bool, pieces: int,
            tma_store: bool) -> str:  # fmt: skip
    options = {**ONLY, "triton.enable_template_tma_store": tma_store,
               "test_configs.autotune_choice_desc_regex": f"EPILOGUE_SUBTILE={pieces}"}  # fmt: skip
    with as_cuda("sm_100"):
        call = compiled(function, options=options, dynamic=dynamic)
        result, code = run_and_get_code(call, *args)
    torch.testing.assert_close(result, function(*args), rtol=1e-2, atol=1e-2)
    return "\n".join(code)


# Of the 48 programs each value of every pair of settings: pieces go with the number of the layout.
GRID = [(layout, dynamic, store, (1, 2, 4)[(k + dynamic + 2 * store) % 3])
        for k, layout in enumerate(BOTH) for dynamic in (False, True)
        for store in (False, True)]  # fmt: skip


ALL = [(layout, dynamic, store, pieces) for layout in BOTH for dynamic in (False, True)
       for store in (False, True) for pieces in (1, 2, 4)]  # fmt: skip


def with_the_rest(few: list[Any]) -> list[Any]:
    """All 48, those that are not among the few with the slow sweeps."""
    return [case if case in few else pytest.param(*case, marks=pytest.mark.slow) for case in ALL]


def tiled(left: bool, right: bool) -> tuple[Callable[..., Any], tuple[Tensor, Tensor]]:
    """256x384 and 384x128, made in the program."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        a, b = a.repeat(8, 8), b.repeat(8, 8)
        return torch.mm(a.t() if left else a, b.t() if right else b)

    return function, (r(48, 32) if left else r(32, 48), r(16, 48) if right else r(48, 16))


def stores_of(code: str, tma_store: bool) -> int:
    kernel = code[code.index("def triton_tem_fused_") :].partition("'''")[0]
    return len(re.findall(r"desc_to_\w+\.store\(|tl\.store\(", kernel))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("layout", "dynamic", "tma_store", "pieces"), with_the_rest(GRID))
def test_ma_e1_e3_mm(layout: tuple[bool, bool], dynamic: bool, tma_store: bool,
                     pieces: int) -> None:  # fmt: skip
    """As many stores as pieces."""
    function, args = tiled(*layout)
    code = code_of(function, *args, dynamic=dynamic, pieces=pieces, tma_store=tma_store)
    assert stored_by(code) == ("descriptor" if tma_store else "pointer")
    assert stores_of(code, tma_store) == pieces and "warp_specialize=WARP_SPECIALIZE" in code


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("layout", "dynamic", "tma_store", "pieces"), with_the_rest(GRID[::3]))
def test_ma_e2_e3_addmm(layout: tuple[bool, bool], dynamic: bool, tma_store: bool,
                        pieces: int) -> None:  # fmt: skip
    _, args = tiled_mm(layout)

    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.repeat(8, 8), b.repeat(8, 8)
        left, right = a.t() if layout[0] else a, b.t() if layout[1] else b
        return torch.addmm(x.repeat(8), left, right)

    code = code_of(function, r(31), *args, dynamic=dynamic, pieces=pieces, tma_store=tma_store)
    assert stored_by(code) == ("descriptor" if tma_store else "pointer")
    assert stores_of(code, tma_store) == pieces


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(70, 80, 72), (1, 33, 8), (130, 257, 16)])
def test_ma_e3_pieces_are_the_whole(pieces: int, sizes: tuple[int, int, int]) -> None:
    """With what follows in each of them; sizes that are no multiple of a piece."""
    m, n, k = sizes
    a, b, bias = r(m, k), r(n, k).t(), r(n)
    out = torch.zeros(m, n)
    made = problem("addmm", a, b, bias=bias, target=BLACKWELL, keeps=False,
                   epilogue=lambda b, c: {"y": (out, c)}, dtype=torch.float16)  # fmt: skip
    c = GemmConfig(16, 64, 16, 2, 4, epilogue_subtile=pieces)
    kernel = TritonCandidate(made.problem, TEMPLATE, c, "x", 0.0).kernel()
    assert kernel.source.text.count("tl.store(") == pieces
    interpret(made, kernel)
    torch.testing.assert_close(out, torch.addmm(bias, a, b).float(), rtol=1e-2, atol=1e-2)


def test_ma_e3_batches() -> None:
    a, b = r(3, 40, 72), r(3, 72, 48)
    for store in (False, True):
        with config.patch({"triton.enable_template_tma_store": store}):
            made = problem("bmm", a, b, target=BLACKWELL)
            c = GemmConfig(16, 32, 16, 2, 4, epilogue_subtile=2)
            interpret(made, TritonCandidate(made.problem, TEMPLATE, c, "x", 0.0).kernel())
        found = made.tensors["c"].view(3, 40, 48)
        torch.testing.assert_close(found, torch.bmm(a, b), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("op", ["mm", "addmm"])
def test_ma_e4_exhaustive_configurations(op: str) -> None:
    found = heuristics.get_template_heuristic(NAME, "cuda", op)
    assert isinstance(found, heuristics.SpecialisedHeuristic)
    with config.patch(max_autotune_gemm_search_space="EXHAUSTIVE"):
        every = list(found.table(problem("mm", r(64, 64), r(64, 64)).problem))
    assert len(every) >= 128 and all(type(c) is GemmConfig for c in every)
    values = {name: {getattr(c, name) for c in every}
              for name in ("block_m", "block_n", "block_k", "group_m", "num_stages", "num_warps",
                           "epilogue_subtile")}  # fmt: skip
    blocks = {32, 64, 128, 256}
    assert values == {"block_m": blocks, "block_n": blocks, "block_k": blocks, "group_m": {8},
                      "num_stages": {2, 3, 4, 5, 6}, "num_warps": {4, 8},
                      "epilogue_subtile": {1, 2, 4}}  # fmt: skip


def meta(*size: int, dtype: torch.dtype = F16) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def test_ma_e5_who_is_offered_it() -> None:
    """In place of Hopper's template, where descriptors can be; each number of pieces among the
    first."""
    made = problem("mm", meta(4096, 4096), meta(4096, 4096).t(), target=BLACKWELL).problem
    hopper = TritonTemplate.all_templates["mm_persistent_tma"]
    assert TEMPLATE.limits(made) == "" and "in its place" in hopper.limits(made)
    for arch in ("sm_90", "sm_120"):
        other = replace(made, target=Target(arch))
        assert "not specialised on this card" in TEMPLATE.limits(other)
        assert hopper.limits(other) == ""
    odd = problem("mm", meta(21, 11), meta(11, 31), target=BLACKWELL).problem
    assert "16 bytes" in TEMPLATE.limits(odd)
    offered = [c for c in TritonProvider().candidates(made, "max") if NAME in c.name]
    assert {c.config.epilogue_subtile for c in offered} == {1, 2, 4}  # type: ignore[attr-defined]
    with config.patch({"triton.enable_epilogue_subtiling": True}):
        offered = [c for c in TritonProvider().candidates(made, "max") if NAME in c.name]
    assert {c.config.epilogue_subtile for c in offered} == {2, 4}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("warps", "stages", "apart"), [(4, 3, True), (8, 2, True), (2, 3, False),
                                                        (4, 1, False)])  # fmt: skip
def test_ma_e6_too_few_warps_or_stages(warps: int, stages: int, apart: bool) -> None:
    """The configuration stays, and its warps do everything."""
    a, b = r(70, 72), r(72, 80)
    made = problem("mm", a, b, target=BLACKWELL)
    c = GemmConfig(64, 64, 32, stages, warps)
    candidate = TritonCandidate(made.problem, TEMPLATE, c, "x", 0.0)
    assert f"WARP_SPECIALIZE={apart}" in candidate.description
    kernel = candidate.kernel()
    text = kernel.source.text
    assert "flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE" in text
    assert "stored += NUM_SMS" in text  # counted apart
    interpret(made, kernel)
    found = made.tensors["c"].view(70, 80)
    torch.testing.assert_close(found, a @ b, rtol=1e-2, atol=1e-2)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("arch", ["sm_100", "sm_90"])
@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("tma_store", [False, True])
def test_ma_e6_compiled(arch: str, pieces: int, tma_store: bool) -> None:
    """Warps of their own on Blackwell, with their share of registers; Hopper's units elsewhere."""
    made = problem("mm", meta(4096, 4096), meta(4096, 4096).t(), target=Target(arch))
    with config.patch({"triton.enable_template_tma_store": tma_store}):
        c = GemmConfig(128, 128, 64, 3, 4, epilogue_subtile=pieces)
        source = TritonCandidate(made.problem, TEMPLATE, c, "x", 0.0).kernel().source
        assert isinstance(source, TritonSource)
        found = triton_worker.build(source.order(source.configs[0]))
    if arch == "sm_100":
        assert "tcgen05.mma" in found["ptx"] and "setmaxnreg" in found["ptx"]
        assert found["num_warps"] > 4
    else:
        assert "wgmma" in found["ptx"]
    assert ("bulk.tensor.2d.global.shared" in found["ptx"]) == tma_store
    assert found["shared"] <= Target(arch).shared_memory
