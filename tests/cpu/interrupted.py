"""A program that is interrupted while it is tuned; run by `test_tune_interrupt.py`.

`python -m tests.cpu.interrupted [NAME]`: a product by many slow candidates and by C++ kernels. It
says `at NAME` when the candidate NAME is first run, and waits there for the signal; for the name
`building` it says so when a compiler is started. At the end it says how many were timed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.programs import compiled
from tilewright import metrics
from tilewright.gemm import aten, provider
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.provider import Effort, Kernel
from tilewright.runtime import store

COUNT = 12
said: set[str] = set()


def say(what: str) -> None:
    if what not in said:
        said.add(what)
        print(what, flush=True)


@dataclass(frozen=True)
class Slow:
    """The library's product, after a while."""

    name: str
    call: aten.AtenCall

    @property
    def text(self) -> str:
        return self.name

    def __call__(self, *args: Any) -> None:
        self.call(*args)
        time.sleep(0.002)
        if self.name in sys.argv:
            say(f"at {self.name}")
            time.sleep(60)


@dataclass(frozen=True)
class SlowCandidate:
    problem: GemmProblem
    number: int
    provider: str = "SLOW"
    description: str = ""

    @property
    def name(self) -> str:
        return f"slow_{self.number}"

    @property
    def estimate(self) -> float:
        return 100.0 + self.number

    @property
    def key(self) -> str:
        return store.key(self.problem.key, self.name)

    def kernel(self) -> Kernel:
        made = aten.AtenCandidate(self.problem).kernel()
        assert isinstance(made.source, aten.AtenCall)
        return Kernel(self.name, Slow(self.name, made.source), made.arguments)


@provider.register
class SlowProvider:
    name = "SLOW"

    def supports(self, problem: GemmProblem) -> str:
        return "" if problem.is_bare else "products alone"

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[SlowCandidate]:
        return [SlowCandidate(problem, k) for k in range(COUNT)]


def main() -> None:
    if "building" in sys.argv:
        started = subprocess.Popen.__init__

        def start(self: Any, args: Any, *more: Any, **named: Any) -> None:
            started(self, args, *more, **named)
            if "g++" in str(args) or "c++" in str(args):
                say("building")

        subprocess.Popen.__init__ = start  # type: ignore[method-assign]
    options = {"max_autotune_gemm_backends": "CPP,SLOW", "max_autotune": True,
               "autotune_in_subproc": False, "autotune_effort": "max",
               "test_configs.max_mm_configs": 2}  # fmt: skip
    x, y = torch.randn(33, 20), torch.randn(20, 24)
    torch.testing.assert_close(compiled(torch.mm, options=options)(x, y), x @ y)
    count = metrics.counters["inductor"]["benchmarking.Benchmarker.benchmark_cpu"]
    print("timed", count, flush=True)


if __name__ == "__main__":
    main()
