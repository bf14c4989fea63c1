"""What tests of the CUTLASS backend have in common: problems, operations and a card that is not
there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from tests.compile.as_cuda import as_cuda
from tilewright import config, metrics
from tilewright.gemm.cutlass.bind import CutlassSource
from tilewright.gemm.cutlass.provider import Cutlass, CutlassCandidate
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.provider import PROVIDERS
from tilewright.testing import run_and_get_code

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CUTLASS: Cutlass = PROVIDERS["CUTLASS"]  # type: ignore[assignment]
ON: dict[str, Any] = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "CUTLASS",
    "cuda.arch": "sm_90",
    "cuda.version": "13.0",
    "cuda.cutlass_epilogue_fusion_enabled": True,
}


def col(rows: int, columns: int, dtype: torch.dtype = F16) -> torch.Tensor:
    """A matrix of so many columns, contiguous along them, transposed."""
    return torch.empty(rows, columns, dtype=dtype).t()


def offered(problem: GemmProblem, **options: Any) -> list[CutlassCandidate]:
    """All candidates, as many as the options allow."""
    with config.patch({**ON, **_dotted(options)}):
        assert CUTLASS.supports(problem) == ""
        return list(CUTLASS.candidates(problem, "max"))


def refused(problem: GemmProblem, **options: Any) -> str:
    with config.patch({**ON, **_dotted(options)}):
        reason = CUTLASS.supports(problem)
        assert reason
        return reason


def _dotted(options: dict[str, Any]) -> dict[str, Any]:
    """`cutlass_tma_only=True` is an option of the group."""
    return {
        f"cuda.{k}" if k.startswith(("cutlass_", "arch", "version", "enable_")) else k: v
        for k, v in options.items()
    }


def operations(problem: GemmProblem, **options: Any) -> list[str]:
    """Names of the operations offered, each once."""
    return list(dict.fromkeys(c.operation.name for c in offered(problem, **options)))


def _built(self: CutlassSource) -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


@contextmanager
def by_torch() -> Iterator[list[CutlassSource]]:
    """Programs for a card, whose CUTLASS kernels torch computes on memory of the host; gives those
    that were called."""
    called: list[CutlassSource] = []

    def call(self: CutlassSource, *args: Any) -> None:
        called.append(self)
        self._worked_out(tuple(args[self._buffers :]))
        self._otherwise(*args)

    with ExitStack() as stack:
        stack.enter_context(as_cuda())
        stack.enter_context(mock.patch.object(CutlassSource, "__call__", call))
        stack.enter_context(mock.patch.object(CutlassSource, "submit", _built))
        yield called


def ran(
    function: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = False,
    tolerance: float = 2e-2,
    **options: Any,
) -> tuple[list[CutlassSource], str]:
    """A program compiled for a card with CUTLASS alone, compared with eager; the kernels it
    called, and its text."""
    metrics.reset()
    with by_torch() as called:
        compiled = torch.compile(
            function,
            backend="tilewright",
            dynamic=dynamic,
            options={**ON, "fx_graph_cache": False, **_dotted(options)},
        )
        result, code = run_and_get_code(compiled, *args)
    torch.testing.assert_close(result, function(*args), rtol=tolerance, atol=tolerance)
    return called, "\n".join(code)
