"""On which device the values of a program for a card are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.pretend import run
from tilewright.backend import count_schedules
from tilewright.schedule.plan import Schedule

PROGRAMS: dict[str, Callable[..., Any]] = {
    "fill": lambda x: torch.fill(x, 3),
    "zero": lambda x: x.clone().zero_() + 0,
    "ldexp": lambda x: torch.ldexp(x, torch.ones_like(x)),
    "power of a number": lambda x: 2.0**x,
    "copied number": lambda x: torch.empty_like(x).copy_(torch.tensor(2.0)),
}


def devices(name: str) -> set[str]:
    plans: list[Schedule] = []
    torch._dynamo.reset()
    backend = count_schedules(lambda role, plan: plans.append(plan))
    with FakeTensorMode():
        x = torch.empty(5, 7, device="cuda", requires_grad=True)
        out = torch.compile(PROGRAMS[name], backend=backend)(x)
        if out.requires_grad:
            out.sum().backward()
    return {b.device.type for plan in plans for step in plan.steps for node in step.group.members
            for b in (plan.program.buffers[w] for w in node.writes)}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_where_the_result_is(name: str) -> None:
    assert run(devices, name) == {"cuda"}
