"""A host program is verified before it is kept, and one that is not sound costs speed alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from tests.fuzz.build import Build
from tests.programs import compiled
from tilewright import config, metrics, pipeline
from tilewright.host import verify
from tilewright.host.program import KernelCall
from tilewright.ir import index as ix
from tilewright.ir.program import Opaque, Origin, Store
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.memory import Pool, Slot, Step
from tilewright.schedule.plan import Schedule
from tilewright.testing import fresh_cache

Fault = Callable[[Schedule], None]


def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Two products with loops before, between and after them."""
    y = torch.softmax(x.sin() @ w, 1)
    z = torch.softmax(y @ w, 0)
    return z.sum(1), z * 2


def _step(plan: Schedule, holds: Callable[[Step], Any]) -> Step:
    return next(step for step in plan.steps if holds(step))


def no_allocation(plan: Schedule) -> None:
    _step(plan, lambda s: s.allocate).allocate.pop()


def freed_twice(plan: Schedule) -> None:
    freed = _step(plan, lambda s: s.free)
    plan.steps[-1].free.append(freed.free[0])


def freed_early(plan: Schedule) -> None:
    before, freed = next((a, b) for a, b in pairwise(plan.steps)
                         if set(b.free) & (a.group.writes - a.group.local))  # fmt: skip
    name = min(set(freed.free) & before.group.writes)
    freed.free.remove(name)
    before.free.append(name)


def never_freed_but_returned(plan: Schedule) -> None:
    plan.steps[-1].free.append(min(plan.program.visible))


def out_of_order(plan: Schedule) -> None:
    """Only what runs: memory is made and freed where it was."""
    first, second = plan.steps[0], plan.steps[1]
    first.group, second.group = second.group, first.group


def unwritten(plan: Schedule) -> None:
    """A product reads memory that is there, and holds nothing."""
    step = _step(plan, lambda s: s.group.call is not None and s.allocate == [])
    call = step.group.call
    assert call is not None
    view = call.args[0]
    other = replace(plan.program.buffers[view.buffer], name="blank")
    plan.program.buffers["blank"] = other
    step.allocate.append("blank")
    step.group = replace(
        step.group, call=replace(call, args=(replace(view, buffer="blank"), *call.args[1:]))
    )


def same_memory(plan: Schedule) -> None:
    """A product writes where its operand is."""
    step = next(s for s in plan.steps if s.group.call is not None and s.free)
    call = step.group.call
    assert call is not None
    (made,) = call.results
    assert made is not None
    step.group = replace(step.group, call=replace(call, results=(), mutates=(made,)))
    step.reuse.append((made, step.free.pop()))


FAULTS: list[tuple[Fault, str]] = [
    (no_allocation, "is not there"),
    (freed_twice, "is freed, and is not there"),
    (freed_early, "is not there"),
    (never_freed_but_returned, "is freed, and is a result"),
    (out_of_order, "which is not there|which nothing has written"),
    (unwritten, "it reads blank, which nothing has written"),
    (same_memory, "which is the same memory"),
]


@contextmanager
def injected(fault: Fault, times: int = 99) -> Generator[None]:
    """The scheduler has a fault the first so many times."""
    left = [times]
    real = pipeline.planned

    def planned(*args: Any) -> Schedule:
        plan = real(*args)
        if left[0]:
            left[0] -= 1
            fault(plan)
        return plan

    with mock.patch.object(pipeline, "planned", planned), fresh_cache():
        yield


def given() -> tuple[Tensor, Tensor]:
    return torch.randn(13, 24), torch.randn(24, 24)


@pytest.mark.parametrize(("fault", "reason"), FAULTS, ids=lambda f: getattr(f, "__name__", ""))
def test_what_is_not_sound_is_an_error_where_it_is_asked_for(fault: Fault, reason: str) -> None:
    with injected(fault), pytest.raises(BackendCompilerFailed, match=reason):
        compiled(program)(*given())


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("fault", [f for f, _ in FAULTS], ids=lambda f: f.__name__)
def test_what_is_not_sound_costs_speed_alone(
    fault: Fault, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The unfused plan, or where that has the fault too, torch's own operations; one warning."""
    x, w = given()
    caplog.set_level(logging.WARNING)
    with config.patch({"verify_ir": False}), injected(fault, times):
        found = compiled(program)(x, w)
    torch.testing.assert_close(found, program(x, w))
    (said,) = caplog.messages
    instead = "the library computes its products" if times == 1 else "torch runs its graph"
    assert f"is not sound, so {instead}: " in said and "TILEWRIGHT_VERIFY_IR=1" in said
    assert sum(metrics.counters["host"].values()) == 1


def test_gradients_sizes_and_writes_survive_a_fault() -> None:
    """The graph that torch runs is one with numbers for arguments, saved values, and stores."""

    def function(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
        y = torch.tanh(x @ w)
        kept.add_(y.detach().sum(0))
        return y.view(-1, 2, 12).sum(1)

    with config.patch({"verify_ir": False}), injected(freed_twice_anywhere):
        call = compiled(function, dynamic=True)
        for rows in (6, 10):
            x, w = torch.randn(rows, 24), torch.randn(24, 24, requires_grad=True)
            other = w.detach().clone().requires_grad_()
            mine, theirs = torch.zeros(24), torch.zeros(24)
            found, expected = call(x, w, mine), function(x, other, theirs)
            torch.testing.assert_close((found, mine), (expected, theirs))
            found.sin().sum().backward()
            expected.sin().sum().backward()
            torch.testing.assert_close(w.grad, other.grad)
    assert sum(metrics.counters["host"].values()) == 2  # forward and backward


def freed_twice_anywhere(plan: Schedule) -> None:
    plan.steps[-1].free += ["nowhere", "nowhere"]


def test_an_exception_while_assembling_is_no_exception_of_the_users() -> None:
    x, w = given()
    with (
        config.patch({"verify_ir": False}),
        fresh_cache(),
        mock.patch.object(pipeline, "assemble", side_effect=KeyError("buf7")),
    ):
        torch.testing.assert_close(compiled(program)(x, w), program(x, w))


# ---- the text


TEXT = """\
from tilewright.host.support import empty_cpu
flag = 1


def call(args):
    a, s0, = args
    args.clear()
{}
    return (out, s0, )
"""


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (("out = empty_cpu((s0,))", "kernel(a, out, flag)", "del a"), ""),
        (("out = empty_cpu((s1,))",), "s1 is used and nothing makes it"),
        (("kernel(a, out)", "out = a"), "out is used and nothing makes it"),
        (("out = a", "del a", "kernel(a)"), "a is used after it was freed"),
        (("out = a", "del a", "del a"), "a is freed twice"),
        (("out = a", "del b"), "b is freed and nothing made it"),
        (("out = a", "del a", "a = out", "del a"), ""),
        (("out = other(a)",), "other is used and nothing makes it"),
        (("out = kernel(lambda: (s0, s2))",), "s2 is used and nothing makes it"),
        (("del out", "out = a"), "out is freed and nothing made it"),
        (("if s0: out = a",), "`if s0: out = a` is neither a call, an assignment nor a deletion"),
        (("out = kernel(a, out=a, x='b c', y=\"it's\")  # z's",), ""),
        (("out = a.size(0) + a.gone",), ""),
        (("out = (kernel if s0 < 2 else wide)(a)",), "wide is used and nothing makes it"),
    ],
)
def test_names_of_a_text(lines: tuple[str, ...], reason: str) -> None:
    body = "\n".join(f"    {line}" for line in lines)
    assert verify.misused_name(TEXT.format(body), {"kernel"}) == reason


def test_a_text_without_its_function() -> None:
    assert verify.misused_name("x = 1\n", ()) == "it has no function `call`"


# ---- the steps of a plan, one fault each


def _plan() -> tuple[Schedule, list[KernelCall | None]]:
    """Steps as the compiler makes them, and the calls of their kernels."""
    seen: list[tuple[Schedule, list[KernelCall | None]]] = []
    real = verify.misused_memory

    def watched(program: Any, steps: Any, calls: Any) -> str:
        seen.append((Schedule(program, steps, []), calls))
        return real(program, steps, calls)

    with mock.patch.object(verify, "misused_memory", watched), fresh_cache():
        compiled(program)(*given())
    return seen[0]


def _fault(plan: Schedule, calls: list[KernelCall | None]) -> str:
    return verify.misused_memory(plan.program, plan.steps, calls)


def test_a_kernel_is_given_what_its_group_touches() -> None:
    plan, calls = _plan()
    assert _fault(plan, calls) == ""
    at, call = next((k, c) for k, c in enumerate(calls) if c is not None)
    other = next(b for b in sorted(plan.program.visible))
    calls[at] = replace(call, args=(*call.args, ("ptr", other)))
    assert f"is given {other}, which its group does not touch" in _fault(plan, calls)
    calls[at] = replace(call, args=(*call.args, ("address", f"{other}.data_ptr() + 8")))
    assert f"is given {other}, which its group does not touch" in _fault(plan, calls)


def test_a_kernel_is_given_all_that_it_writes() -> None:
    """Also what it reads, and overwrites."""
    plan, calls = _plan()
    overwritten: set[str] = set()
    for k, call in enumerate(calls):
        group = plan.steps[k].group
        for name in sorted(group.writes - group.local) if call is not None else ():
            calls[k] = replace(call, args=tuple(a for a in call.args if a[1] != name))
            assert f"is not given {name}, which it is to write" in _fault(plan, calls)
            overwritten |= {name} & group.reads
        calls[k] = call
    assert overwritten and _fault(plan, calls) == ""


def test_memory_is_made_once() -> None:
    plan, calls = _plan()
    made = _step(plan, lambda s: s.allocate)
    plan.steps[plan.steps.index(made) + 1].allocate.append(made.allocate[0])
    assert f"{made.allocate[0]} is made twice" in _fault(plan, calls)


def test_memory_of_arguments_and_results_is_not_used_again() -> None:
    plan, calls = _plan()
    argument = next(n for n in plan.program.inputs if n in plan.program.buffers)
    result = min(plan.program.visible)
    for name, at in ((argument, 0), (result, len(plan.steps))):
        steps = [*plan.steps]
        steps.insert(at, Step(Group(call=replace(NOTHING, name="idle")), reuse=[("again", name)]))
        plan.program.buffers["again"] = plan.program.buffers[name]
        reason = verify.misused_memory(plan.program, steps, [*calls, None])
        assert reason == f"idle: again takes the memory of {name}, which is needed after the call"


NOTHING = Opaque("", None, (), {}, (), (), Origin(()))


def test_buffers_of_a_pool_lie_apart() -> None:
    plan, calls = _plan()
    step = _step(plan, lambda s: s.allocate)
    name = step.allocate.pop()
    device, size = plan.program.buffers[name].device, plan.program.buffers[name].bytes
    plan.program.buffers["beside"] = replace(plan.program.buffers[name], name="beside")
    step.carve.append(Slot(name, "pool0", ix.ZERO))
    assert f"{name} lies in pool0, which is not there" in _fault(plan, calls)
    step.pools.append(Pool("pool0", device, ix.mul(size, 2)))
    step.carve.append(Slot("beside", "pool0", size))
    assert _fault(plan, calls) == ""
    step.carve[-1] = Slot("beside", "pool0", ix.sub(size, 4))
    assert f"beside lies where {name} is still needed" in _fault(plan, calls)


def _passed_on() -> tuple[Build, list[Step], tuple[str, ...]]:
    """A value in a pool is overwritten by the next, which is called otherwise; then the result is
    written to the same place."""
    b = Build()
    x, one, two, last = b.input(8), *(b.buffer((8,)) for _ in range(3))
    (i,) = b.loops(8)
    stores = Store(one, i, b.at(x, i)), Store(one, i, b.at(one, i)), Store(last, i, b.at(x, i))
    first, then, after = (Step(Group((b.nest([i], s),), (i,))) for s in stores)
    first.pools.append(Pool("pool0", torch.device("cpu"), ix.as_index(32)))
    first.carve.append(Slot(one, "pool0", ix.ZERO))
    then.reuse.append((two, one))
    then.free.append(two)
    after.carve.append(Slot(last, "pool0", ix.ZERO))
    b.returns(last)
    return b, [first, then, after], (one, two, last)


def test_a_place_in_a_pool_is_taken_until_what_is_there_dies() -> None:
    """Whatever it is called meanwhile."""
    b, steps, (_, two, last) = _passed_on()
    assert verify.misused_memory(b.program, steps, [None] * 3) == ""
    steps[1].free.clear()
    reason = verify.misused_memory(b.program, steps, [None] * 3)
    assert reason == f"nest3: {last} lies where {two} is still needed"


def test_memory_by_another_name_holds_what_was_written_by_the_first() -> None:
    """And nothing if that was not; a result has to be written."""
    b, steps, (one, two, last) = _passed_on()
    (i,) = b.loops(8)
    steps[1].free.clear()
    steps[2].carve.clear()
    steps[2].allocate.append(last)
    steps[2].group = Group((b.nest([i], Store(last, i, b.at(two, i))),), (i,))
    assert verify.misused_memory(b.program, steps, [None] * 3) == ""
    steps[1].group = Group((b.nest([i], Store(one, i, b.at(one, i))),), (i,))
    for k, found in ((2, ""), (1, f"nest4: it reads {two}, which nothing has written")):
        made = steps[k].group
        steps[k].group = Group(call=replace(NOTHING, name="idle"))
        reason = verify.misused_memory(b.program, steps, [None] * 3)
        assert reason == (found or f"{last} is returned, and nothing writes it")
        steps[k].group = made
