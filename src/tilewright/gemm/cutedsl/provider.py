"""The CuTe DSL provider: candidates of every library of kernels that is written in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tilewright import config
from tilewright.gemm.cutedsl import gated, grouped, quack, toolchain
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.provider import Candidate, Effort, register
from tilewright.ir import index as ix

MOST: dict[Effort, int | None] = {"none": 1, "quick": 3, "default": 8, "max": None}
PRODUCTS = ((quack.why_not, quack.limits, quack.candidates),)
PAIRS = ((quack.why_not, gated.limits, gated.candidates),)
"""Each says why it is not there, why it cannot, and gives candidates, best first."""


GROUPED = grouped.choices  # its operator is lowered by it from here on


@register
class CuteDSLProvider:
    name = "CUTEDSL"

    def supports(self, problem: GemmProblem) -> str:
        target = problem.target
        if not target.is_gpu:
            return "CuTe kernels run on cards"
        if not toolchain.architecture(target):
            return f"the CuTe DSL compiles for no {target.arch}"
        if toolchain.why_not():
            return toolchain.why_not()
        if not (config.max_autotune or config.max_autotune_gemm):
            return "nothing is measured without max_autotune or max_autotune_gemm"
        if any(ix.value_of(s) == 0 for s in problem.sizes):
            return "it is empty"
        reasons = [absent() or limits(problem) for absent, limits, _ in _families(problem)]
        return "" if "" in reasons else "; ".join(dict.fromkeys(reasons))

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[Candidate]:
        if self.supports(problem):
            return []
        found = [list(made(problem)) for absent, limits, made in _families(problem)
                 if not absent() and not limits(problem)]  # fmt: skip
        ordered = sorted(itertools.chain(*found), key=lambda c: c.estimate)
        return ordered[: MOST[effort]]


def _families(problem: GemmProblem) -> Sequence[Any]:
    return PAIRS if problem.op == "mm_pair" else PRODUCTS
