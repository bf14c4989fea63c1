"""Strange programs (`tests/strange.py`) by CUTLASS and by the CuTe DSL's library, without a card:
sums by torch, and what follows by the text of the kernel itself. Each is right, or apart with a
reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from tests.compile.as_cuda import as_cuda
from tests.compile.test_cutlass_drawn import computed
from tests.cutedsl import evaluate, of
from tests.strange import Strange, strange
from tilewright import config
from tilewright.errors import NoValidChoicesError
from tilewright.gemm import choose as choosing
from tilewright.gemm import fuse
from tilewright.gemm.cutedsl import build, quack, toolchain
from tilewright.gemm.cutedsl.epilogue import Epilogue, translated
from tilewright.gemm.cutedsl.provider import CuteDSLProvider
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.gemm.cutlass.bind import CutlassSource
from tilewright.gemm.cutlass.provider import Cutlass
from tilewright.gemm.problem import GemmProblem, window

pytest.importorskip("nvidia_cutlass_dsl", reason="the CuTe DSL is not installed")
pytest.importorskip("cutlass_library", reason="CUTLASS is not installed")
M, N, K = 24, 40, 16
POINTS = 50  # of a result that the stand-in of the DSL computes
ON: dict[str, Any] = {
    "max_autotune": True, "fx_graph_cache": False, "cuda.arch": "sm_90", "cuda.version": "13.0",
    "cuda.cutlass_epilogue_fusion_enabled": True, "cuda.cutlass_max_profiling_configs": 1,
}  # fmt: skip
Call = Callable[..., Any]


class Seen:
    """What happened to the products of a program."""

    def __init__(self) -> None:
        self.fused = self.calls = 0
        self.reasons: list[str] = []


@contextmanager
def by_cutlass(seen: Seen, folder: Path) -> Iterator[None]:
    def call(self: CutlassSource, *args: Any) -> None:
        seen.calls += 1
        if self.problem.epilogue:
            seen.fused += 1
            computed(self, args, folder / str(seen.calls))
        else:
            self._otherwise(*args)

    def submit(self: CutlassSource) -> Any:
        done = mock.Mock()
        done.result.return_value = None
        return done

    with (
        mock.patch.object(CutlassSource, "__call__", call),
        mock.patch.object(CutlassSource, "submit", submit),
    ):
        yield


@contextmanager
def by_cutedsl(seen: Seen, folder: Path) -> Iterator[None]:
    problems: dict[str, GemmProblem] = {}
    made = quack.QuackCandidate.kernel

    def kernel(self: quack.QuackCandidate) -> Any:
        found = made(self)
        assert isinstance(found.source, CuteSource)
        problems[found.source.request.key] = self.problem
        return found

    def call(self: CuteSource, *args: Any) -> None:
        seen.calls += 1
        p = problems[self.request.key]
        seen.fused += bool(p.epilogue)
        _elements(p, args, self)

    with ExitStack() as stack:
        for where, name, what in (
            (quack.QuackCandidate, "kernel", kernel), (CuteSource, "__call__", call),
            (build, "make", lambda request: request.key), (toolchain, "why_not", lambda: ""),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(where, name, what))
        yield


def _elements(p: GemmProblem, args: tuple[Any, ...], source: CuteSource) -> None:
    """One call: by torch, and some elements once more by the function that the kernel calls."""
    assert source.otherwise is not None
    source.otherwise(*args)
    found = translated(p)
    assert isinstance(found, Epilogue), found
    _, arguments = quack.request(p, quack.CONFIGS[0])
    given = {name: a for (_, name), a in zip(arguments, args, strict=True)}
    left, right = (window(o.view, given).float() for o in p.operands)
    total = left @ right
    names = ", ".join(("acc", *(o.name for o in found.operands)))
    lines = [*found.lines, f"return ({', '.join(found.values)},)"]
    function = evaluate(f"def f({names}):\n" + "".join(f"    {x}\n" for x in lines))["f"]
    beside = [window(o.view, given) for o in found.operands]
    results = [window(r.view, given) for r in found.results]
    for at in zip(*(torch.randint(n, (POINTS,)).tolist() for n in total.shape), strict=True):
        values = function(of(total[at]), *(of(t[at].float()) for t in beside))
        for result, value in zip(results, values, strict=True):
            result[at] = value.t.to(result.dtype)


PROVIDERS = {"CUTLASS": (by_cutlass, Cutlass), "CUTEDSL": (by_cutedsl, CuteDSLProvider)}


def compare(made: Strange, compiled: Call, args: tuple[torch.Tensor, ...]) -> None:
    near = 2e-2 if made.smooth else 1e-3
    for one, other in zip(compiled(*args), made(*args), strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=near, atol=near)


def checked(seed: int, backend: str, folder: Path, dynamic: bool) -> Seen:
    made, seen = strange(seed), Seen()
    choosing._memo.clear()
    torch._dynamo.reset()
    running, provider = PROVIDERS[backend]
    find, ask = fuse.site, provider.supports

    def supports(self: Any, problem: GemmProblem) -> str:
        why = ask(self, problem)
        seen.reasons.extend([why] if why else [])
        return why

    def site(*given: Any) -> Any:
        found = find(*given)
        seen.reasons.extend([found] if isinstance(found, str) else found.refused.values())
        return found

    folder.mkdir(exist_ok=True)
    with (
        as_cuda(),
        config.patch({**ON, "max_autotune_gemm_backends": backend}),
        mock.patch.object(fuse, "site", site),
        mock.patch.object(provider, "supports", supports),
        running(seen, folder),
    ):
        compiled = torch.compile(made, backend="tilewright", dynamic=dynamic, fullgraph=True)
        sizes = ((M, N, K), (2 * M, N + 8, 3 * K)) if dynamic else ((M, N, K),)
        try:
            for size in sizes:
                compare(made, compiled, made.inputs(*size))
        except BackendCompilerFailed as failed:  # nobody else is asked
            if NoValidChoicesError.__name__ not in str(failed):
                raise
    assert seen.fused or seen.reasons, "it is apart, and nobody says why"
    return seen


@pytest.mark.parametrize("seed", [1, 8])
def test_a_strange_program(seed: int, tmp_path: Path) -> None:
    """CUTLASS has drawn programs in `test_cutlass_drawn.py`; of these it has its turn below."""
    assert checked(seed, "CUTEDSL", tmp_path, dynamic=False).fused


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
@pytest.mark.parametrize("backend", list(PROVIDERS))
def test_more_strange_programs(first: int, backend: str, tmp_path: Path) -> None:
    fused = 0
    for seed in range(first, first + 20):
        fused += checked(seed, backend, tmp_path / str(seed), dynamic=seed % 3 == 0).fused
    assert fused >= 2
