"""Random epilogues in whole programs, by the arithmetic of their visitors: each CUTLASS kernel of a
program is computed on memory of the host by the C++ that nvcc is given (`visitors.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cutlass_cases import drawn
from tests.compile import visitors
from tests.compile.cutlass import ON, by_torch
from tests.products import Made
from tilewright import metrics
from tilewright.gemm import choose as choosing
from tilewright.gemm import fuse
from tilewright.gemm.cutlass.bind import CutlassSource
from tilewright.gemm.cutlass.evt import Epilogue, epilogue
from tilewright.gemm.cutlass.provider import Cutlass
from tilewright.gemm.problem import GemmProblem, window

M, N, K = 24, 40, 16


def computed(source: CutlassSource, args: tuple[Any, ...], folder: Path) -> None:
    """One call: the sums by torch, all that follows by the visitor."""
    problem = source.problem
    given = dict(zip(source.names, args, strict=True))
    a, b = (window(o.view, given).float() for o in problem.operands)
    found = epilogue(problem)
    assert isinstance(found, Epilogue), found
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    values = {name: v for name, v in given.items() if isinstance(v, int)}
    made = Made(problem, tensors, values)
    folder.mkdir()
    ((functions),) = visitors.compiled([found], folder)
    sums = (a @ b).reshape(-1, a.shape[-2], b.shape[-1])
    stored = visitors.run(made, found, functions, sums)
    for result in found.results:
        visitors.window(made, result.access).copy_(stored[result.access.buffer])


def _checked(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> str:
    """A program's results are eager's; why it was not fused, or an empty string."""
    made = drawn(seed)
    torch.manual_seed(seed)
    choosing._memo.clear()
    metrics.reset()
    calls = 0
    reasons: list[str] = []
    find, ask = fuse.site, Cutlass.supports

    def supports(self: Cutlass, problem: GemmProblem) -> str:
        why = ask(self, problem)
        reasons.extend([why] if why and problem.epilogue else [])
        return why

    def site(*given: Any) -> Any:
        found = find(*given)
        reasons.extend([found] if isinstance(found, str) else found.refused.values())
        return found

    def call(self: CutlassSource, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if self.problem.epilogue:
            computed(self, args, folder / f"{seed}_{calls}")
        else:
            self._otherwise(*args)

    options = {**ON, "fx_graph_cache": False, "cuda.cutlass_max_profiling_configs": 1}
    with by_torch():
        monkeypatch.setattr(CutlassSource, "__call__", call)
        monkeypatch.setattr(fuse, "site", site)
        monkeypatch.setattr(Cutlass, "supports", supports)
        compiled = torch.compile(made, backend="tilewright", dynamic=dynamic, options=options)
        for m, n, k in ((M, N, K), (2 * M, N + 8, 3 * K)) if dynamic else ((M, N, K),):
            args = made.inputs(m, n, k, "cpu")
            result, right = compiled(*args), made(*args)
            for one, other in zip(result, right, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        monkeypatch.undo()
    assert calls, "no CUTLASS kernel was called"
    if metrics.counters["inductor"]["cutlass_epilogue_fusion_counter"]:
        return ""
    assert reasons, "it is apart, and nobody says why"
    return reasons[0]


@pytest.mark.parametrize("seed", [0, 2, 5, 11])
@pytest.mark.parametrize("dynamic", [False, True])
def test_drawn_programs(
    seed: int, dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CU-E7: under dynamic shapes distances of what is read are numbers of a call."""
    why = _checked(seed, tmp_path, monkeypatch, dynamic)
    assert not why or drawn(seed).odd


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_more_drawn_programs(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is the same for a whole column or row may be computed apart, once."""
    for seed in range(first, first + 20):
        torch._dynamo.reset()
        why = _checked(seed, tmp_path, monkeypatch, dynamic=seed % 3 == 0)
        assert not why or drawn(seed).odd or why == "its parts have different loops", (seed, why)
