"""What strategies decide: the plan of a kernel, and which declined and why, as `explain` has it.

Nothing is built: programs are traced for a card that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright
from tests.pretend import pretended, run
from tilewright.codegen.triton.launch import Summary

BF16 = torch.bfloat16
Program = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], torch.dtype]

PROGRAMS: dict[str, Program] = {
    "softmax": (lambda x: torch.softmax(x, -1), ((8192, 8192),), BF16),
    "long softmax": (lambda x: torch.softmax(x, -1), ((7000, 13813),), BF16),
    "few long rows": (lambda x: torch.log_softmax(x, -1), ((100, 1 << 20),), BF16),
    "short rows": (lambda x: torch.nn.functional.layer_norm(x, (160,)), ((131072, 160),), BF16),
    "gelu": (lambda x: torch.nn.functional.gelu(x), ((4096, 4096),), BF16),
    "transpose": (lambda x: x.t().contiguous(), ((8191, 8191),), BF16),
    "cat": (lambda x, y: torch.cat((x, y), -1), ((8000, 9001), (8000, 9001)), BF16),
    "pool": (lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1), ((64, 64, 112, 112),), BF16),
    "norm of columns": (lambda x: x / x.float().pow(2).mean(1, keepdim=True).sqrt().to(BF16),
                        ((32, 768, 96, 96),), BF16),
    "scan": (lambda x: x.cumsum(-1), ((7259, 4959),), BF16),
    "column sum": (lambda x: x.sum(0), ((65536, 1024),), BF16),
}  # fmt: skip


def plan_of(name: str, **options: Any) -> Summary:
    """The plan of the largest loop kernel of a program; in a process that believes in a card."""
    function, shapes, dtype = PROGRAMS[name]
    with FakeTensorMode():
        args = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        explanation = tilewright.explain(function, options=options)(*args)
    (graph,) = explanation.graphs
    kernel = max((part for part in graph.parts if part.is_kernel), key=lambda part: part.moved)
    assert kernel.plan is not None
    assert all(line in str(explanation) for line in (kernel.plan.config, kernel.plan.residency))
    return kernel.plan


@pytest.mark.parametrize(
    ("name", "strategy", "residency", "access"),
    [
        ("softmax", "persistent rows", "rows in registers, in one block", "direct"),
        ("gelu", "pointwise", "each element once", "direct"),
        ("transpose", "transpose of misaligned rows", "each element once", None),
        ("cat", "shifted copy", "each element once", None),
        ("pool", "stencil, several points a thread", "each element once", "direct"),
        ("long softmax", "resident rows in chunks", None,
         "misaligned rows peeled: 8 elements at once, head and tail beside"),
        ("few long rows", "resident rows of several programs", None, "direct"),
        ("column sum", "looped columns", "loop over blocks of columns", "direct"),
        ("short rows", "several short rows a warp", None, "direct"),
        ("scan", "scan of preloaded chunks", None, None),
        ("norm of columns", "resident columns", None, "direct"),
    ],
)  # fmt: skip
def test_a_plan_says_how_a_kernel_is_written(
    name: str, strategy: str, residency: str | None, access: str | None
) -> None:
    plan = run(plan_of, name)
    assert plan.strategy == strategy
    assert residency in (None, plan.residency)
    assert access in (None, plan.access)


@pretended
def test_all_strategies_before_the_one_chosen_say_why_they_declined() -> None:
    from tilewright.codegen.triton.generate import SPLIT, STRATEGIES

    order = [SPLIT.name, *(strategy.name for strategy in STRATEGIES)]
    for name in PROGRAMS:
        plan = plan_of(name)
        assert all(reason for _, reason in plan.declined)
        asked = [strategy for strategy, _ in plan.declined if strategy in order]
        last = order.index(plan.strategy) if plan.strategy in order else len(order) - 1
        assert asked == order[:last], name


@pretended
def test_a_reason_names_what_would_have_to_change() -> None:
    reasons = dict(plan_of("softmax").declined)
    assert (
        reasons["resident rows in chunks"]
        == "rows have at most 8192 elements: one block holds them"
    )
    assert reasons["resident columns"] == "memory does not run across what is reduced"
    assert reasons["persistent or looped, as measured"].startswith("kernels are not measured")
    measured = plan_of("softmax", max_autotune_pointwise=True)
    assert measured.strategy == "persistent or looped, as measured"
    assert measured.config.endswith("more may be measured")


@pretended
def test_a_row_of_several_programs_says_how_many() -> None:
    assert plan_of("few long rows").cooperation == "64 programs; they meet"
    assert plan_of("softmax").cooperation == "one program"
