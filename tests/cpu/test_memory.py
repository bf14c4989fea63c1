"""Memory planning: what is allocated, whose memory is used again, and how much is alive at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.models import UNet
from tests import kernels as user
from tests.fuzz.build import Build
from tests.fuzz.stages import capture
from tests.programs import check, compiled, copy, fresh_compiler, same
from tilewright import config
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Buffer, Nest, Store
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.memory import Step, peak, plan, profile, same_bytes
from tilewright.schedule.order import defer
from tilewright.schedule.order.peak_memory import ORDERS, Facts, orders
from tilewright.schedule.plan import Schedule, schedule
from tilewright.schedule.pool import _Row, pooled
from tilewright.testing import run_and_get_code

__all__ = ["fresh_compiler"]


def host(function: Callable[..., Any], *inputs: Any, **options: Any) -> str:
    """The host program's text; the result is checked against eager."""
    want = function(*(theirs := [copy(x) for x in inputs]))
    got, code = run_and_get_code(
        compiled(function, **options), *(mine := [copy(x) for x in inputs])
    )
    same((got, mine), (want, theirs), rtol=1e-4, atol=1e-4)
    return code[0]


def allocations(text: str) -> int:
    return len(re.findall(r"= empty\w*\(", text))


def plan_of(function: Callable[..., Any], *inputs: Any) -> Schedule:
    (graph,) = capture(function, *inputs).graphs
    return graph.plan


# ---- in place


def test_a_result_overwrites_what_a_product_returned() -> None:
    text = host(lambda x, b: F.relu(x @ x + b), torch.randn(16, 16), torch.randn(16))
    assert allocations(text) == 0


def test_rows_are_overwritten_by_their_softmax() -> None:
    text = host(lambda x: torch.softmax(x @ x, 1), torch.randn(16, 16))
    assert allocations(text) == 0


def test_memory_with_gaps_is_nobody_elses() -> None:
    size = ix.as_index(4), ix.as_index(8)
    gaps = Buffer("a", torch.float32, torch.device("cpu"), size, (ix.as_index(16), ix.ONE))
    dense = replace(gaps, stride=(ix.as_index(8), ix.ONE))
    assert same_bytes(dense, replace(dense, name="b"))
    assert not same_bytes(gaps, replace(gaps, name="b"))
    assert not same_bytes(gaps, dense) and not same_bytes(dense, gaps)
    assert not same_bytes(dense, replace(dense, device=torch.device("meta")))
    assert not same_bytes(dense, replace(dense, dtype=torch.float16))


def test_what_is_scanned_is_not_overwritten() -> None:
    """How far ahead a scan reads is its kernel's own affair."""
    assert allocations(host(lambda x: (x @ x).cumsum(0), torch.randn(16, 16))) == 1
    assert allocations(host(lambda x: (x @ x).cumsum(1), torch.randn(16, 16))) == 1


def test_what_is_folded_with_more_is_not_overwritten() -> None:
    """It is read again for every element of the fold."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ x)[..., None] * w).sum(-1)

    assert allocations(host(function, torch.randn(16, 16), torch.randn(16, 16, 40))) == 1


def test_a_value_read_elsewhere_in_the_kernel_is_not_overwritten() -> None:
    text = host(lambda x: (lambda m: m + m.t())(x @ x), torch.randn(16, 16))
    assert allocations(text) == 1


def test_columns_are_overwritten_once_their_sums_are_there() -> None:
    text = host(lambda x: (lambda m: m + m.sum(0))(x @ x), torch.randn(16, 16))
    assert allocations(text) == 0


def test_columns_are_not_overwritten_while_rows_are_still_read() -> None:
    """Result `i` needs row `i` whole and column `i`: both lie at the same elements, and what one
    turn of the loop writes the next would read."""

    def scaled_by_rows(x: Tensor) -> Tensor:
        values = torch.sort(x, 0).values
        return values.t() * values.sum(1)[:, None]

    assert allocations(host(scaled_by_rows, torch.randn(40, 40))) == 1


def test_a_small_result_does_not_keep_the_memory_of_a_large_one() -> None:
    def first_rows(x: Tensor) -> Tensor:
        return torch.sort(x, 0).values[:8] * 2

    result = compiled(first_rows)(torch.randn(64, 16))
    assert result.untyped_storage().nbytes() == 8 * 16 * 4


def test_memory_is_not_kept_over_the_peak() -> None:
    """The first product is dead, and as large as what is made in the end; between them is more."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        more = ((y * (x @ x).sum()) @ x).sum()
        return ((x * more) @ x).sum()

    most: list[int] = []
    for reuses in (False, True):
        with config.patch(allow_buffer_reuse=reuses):
            made = plan_of(function, torch.randn(32, 32), torch.randn(320, 32))
            most.append(peak(made.program, made.steps))
    assert most[0] == most[1] >= 2 * 4 * 320 * 32


def test_what_is_kept_counts_for_what_is_kept_after_it() -> None:
    """Two values are dead before the step in the middle, which leaves room for one of them."""
    b = Build()
    x, first, second, sums, middle, p, q = b.input(64), *(
        b.buffer((n,)) for n in (64, 64, 60, 100, 64, 64))  # fmt: skip

    def filled(buffer: str, size: int, *reads: str) -> Group:
        (i,) = b.loops(size)
        read = [b.at(r, i) for r in reads]
        value = build.op("add", *read) if len(read) == 2 else b.at(x, ix.mod(i, 64))
        return Group((b.nest([i], Store(buffer, i, value)),), (i,))

    groups = [filled(first, 64), filled(second, 64), filled(sums, 60, first, second),
              filled(middle, 100), filled(p, 64), filled(q, 64)]  # fmt: skip
    b.returns(p, q)
    assert overwritten(b, *groups) == [[], [], [], [], [(p, second)], []]
    assert profile(b.program, plan(b.program, groups)) == [
        4 * n for n in (64, 128, 188, 164, 64, 128)]  # fmt: skip


def test_memory_laid_out_alike_is_taken_before_what_died_last() -> None:
    b = Build()
    x, alike, other, out = b.input(8), b.buffer((8,)), b.buffer((2, 4)), b.buffer((8,))
    (i,) = b.loops(8)
    groups = [
        Group((b.nest([i], Store(name, i, b.at(x, i))),), (i,)) for name in (alike, other, out)
    ]
    b.returns(out)
    assert overwritten(b, *groups) == [[], [(other, alike)], [(out, other)]], "what there is"
    (j,) = b.loops(2)
    both = build.op("add", b.at(alike, j), b.at(other, j, 0))
    end = b.buffer((2,))
    groups.insert(2, Group((b.nest([j], Store(end, j, both)),), (j,)))
    b.returns(out, end)
    assert overwritten(b, *groups) == [[], [], [], [(out, alike)]]


def test_other_shapes_of_as_many_bytes() -> None:
    def function(x: Tensor) -> Tensor:
        a = (x @ x).view(2, 8, 16)
        return a.transpose(0, 1).reshape(16, 16) @ x

    host(function, torch.randn(16, 16))
    host(function, torch.randn(16, 16), dynamic=False)


def test_memory_of_another_type() -> None:
    def function(x: Tensor) -> Tensor:
        a = (x @ x).sin()
        b = a.flip(0).to(torch.int32)
        c = b.cumsum(0, dtype=torch.int32)
        return (c.flip(0) @ c).float()

    for dynamic in (False, True):
        host(function, torch.randn(16, 16) * 3, dynamic=dynamic)


def test_as_many_elements_of_fewer_bytes_give_no_memory() -> None:
    def function(x: Tensor) -> Tensor:
        narrow = x @ x
        wide = (narrow.flip(0) @ x).double()
        sums = wide.cumsum(0)
        return sums.flip(1) @ sums

    plan = plan_of(function, torch.randn(16, 16))
    assert {b.numel.arg for b in plan.program.buffers.values()} == {256}
    assert [step.reuse for step in plan.steps if step.reuse] == []


# ---- in place, group by group


def overwritten(b: Build, *groups: Group) -> list[list[tuple[str, str]]]:
    """Of each group (new, old) where it writes a new buffer over an old one."""
    return [step.reuse for step in plan(b.program, groups)]


def made(b: Build, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[str, Group]:
    """A value that a library call returns, and the call."""
    x, value = b.input(*shape, dtype=dtype), b.buffer(shape, dtype)
    return value, Group(call=b.call(torch.ops.aten.clone.default, (b.view(x),), value))


def test_arguments_are_not_ours_to_overwrite() -> None:
    """But those that are given away are; a result is nobody's but the caller's."""
    b = Build()
    x, first, last = b.input(8), b.buffer((8,)), b.buffer((8,))
    (i,) = b.loops(8)
    groups = [Group((b.nest([i], Store(first, i, b.at(x, i))),)),
              Group((b.nest([i], Store(last, i, b.at(first, i))),))]  # fmt: skip
    b.returns(last)
    assert overwritten(b, *groups) == [[], [(last, first)]]
    assert profile(b.program, plan(b.program, groups)) == [32, 32]
    b.program.donated = frozenset({x})
    assert overwritten(b, *groups) == [[(first, x)], [(last, first)]]
    assert profile(b.program, plan(b.program, groups)) == [32, 32]
    b.returns(first, last)
    assert overwritten(b, *groups) == [[(first, x)], []]
    b.program.donated = frozenset()
    b.program.buffers[x] = replace(b.program.buffers[x], kind="constant")
    assert overwritten(b, *groups) == [[], []]
    assert plan(b.program, groups)[0].free == [], "a constant is there for the next call"


def test_one_value_gives_its_memory_to_one_result() -> None:
    b = Build()
    value, call = made(b, 8)
    p, q = b.buffer((8,)), b.buffer((8,))
    (i,) = b.loops(8)
    both = b.nest([i], Store(p, i, b.at(value, i)), Store(q, i, build.op("neg", b.at(value, i))))
    b.returns(p, q)
    assert overwritten(b, call, Group((both,), (i,))) == [[], [(p, value)]]
    (nest,) = plan(b.program, [call, Group((both,), (i,))])[1].group.members
    assert [s.buffer for s in nest.stores] == [value, q]


def test_only_the_last_to_read_a_value_overwrites_it() -> None:
    """Whether those are kernels or nests of one kernel."""
    b = Build()
    value, call = made(b, 8)
    p, q = b.buffer((8,)), b.buffer((8,))
    (i,) = b.loops(8)
    first = b.nest([i], Store(p, i, b.at(value, i)))
    then = b.nest([i], Store(q, i, build.op("add", b.at(value, i), b.at(p, i))))
    b.returns(p, q)
    assert overwritten(b, call, Group((first,), (i,)), Group((then,), (i,))) == [
        [], [], [(q, value)]]  # fmt: skip
    assert overwritten(b, call, Group((first, then), (i,))) == [[], [(q, value)]]
    with config.patch(inplace_buffers=False):
        assert overwritten(b, call, Group((first, then), (i,))) == [[], []]


def test_what_is_read_at_other_places_is_not_overwritten() -> None:
    """By the nest that stores, or by one after it; nor where a store leaves some as they were."""
    b = Build()
    value, call = made(b, 8)
    out, sums = b.buffer((8,)), b.buffer((1,))
    i, j = b.loops(8, 8)
    once = b.loops(1)[0]
    at, back = b.at(value, i), b.at(value, ix.sub(7, i))
    b.returns(out, sums)

    def over(value: Expr, mask: Expr | None = None, mode: Any = "set") -> list[tuple[str, str]]:
        store = Store(out, i, value, mode, mask)
        return overwritten(b, call, Group((b.nest([i], store),), (i,)))[1]

    assert over(build.op("neg", at)) == [(out, value)]
    assert over(back) == over(build.op("add", at, back)) == []
    assert over(at, build.op("lt", i, ix.as_index(5))) == over(at, mode="add") == []
    whole = b.nest([once], Store(sums, once, build.reduce("sum", b.at(value, j))), reduce=[j])
    plain = b.nest([i], Store(out, i, at))
    assert overwritten(b, call, Group((whole, plain)))[1] == [(out, value)]
    assert overwritten(b, call, Group((plain, whole)))[1] == []
    rows = b.buffer((8,))
    again = b.nest([i], Store(rows, i, build.reduce("sum", b.at(value, j))), reduce=[j])
    assert overwritten(b, call, Group((again, plain)))[1] == [(out, value)]
    assert overwritten(b, call, Group((again, plain), (i,)))[1] == [], "the next row reads it"


def test_what_is_folded_is_not_overwritten_by_its_fold() -> None:
    """It is read again for each element of the loop it is folded over."""
    b = Build()
    value, call = made(b, 8)
    w, out = b.input(8, 5), b.buffer((8,))
    i, j = b.loops(8, 5)
    total = build.reduce("sum", build.op("mul", b.at(value, i), b.at(w, i, j)))
    fold = b.nest([i], Store(out, i, total), reduce=[j])
    b.returns(out)
    assert overwritten(b, call, Group((fold,), (i,))) == [[], []]


def test_what_a_call_may_have_kept_is_not_overwritten() -> None:
    b = Build()
    value, call = made(b, 8)
    (i,) = b.loops(8)
    out = b.buffer((8,))
    group = Group((b.nest([i], Store(out, i, b.at(value, i))),), (i,))
    b.returns(out)
    assert call.call is not None
    assert overwritten(b, call, group) == [[], [(out, value)]]
    assert overwritten(b, Group(call=replace(call.call, aliases=True)), group) == [[], []]


def test_what_a_call_may_have_kept_is_not_passed_on() -> None:
    b = Build()
    value, call = made(b, 8)
    small, late = b.buffer((2,)), b.buffer((8,))
    i, j = b.loops(8, 2)
    last = Group((b.nest([j], Store(small, j, b.at(value, j))),), (j,))
    after = Group((b.nest([i], Store(late, i, b.at(b.input(8), i))),), (i,))
    b.returns(small, late)
    assert call.call is not None
    assert overwritten(b, call, last, after) == [[], [], [(late, value)]]
    assert overwritten(b, Group(call=replace(call.call, aliases=True)), last, after) == [[]] * 3
    b.program.buffers[late] = replace(b.program.buffers[late], device=torch.device("meta"))
    assert overwritten(b, call, last, after) == [[]] * 3, "memory of another device"


def test_what_would_not_be_one_kernel_any_more_overwrites_nothing() -> None:
    b = Build()
    value, call = made(b, 8)
    (i,) = b.loops(8)
    out = b.buffer((8,))
    group = Group((b.nest([i], Store(out, i, b.at(value, i))),), (i,))
    b.returns(out)
    for reason, reuse in (("", [(out, value)]), ("it has no room", [])):
        steps = plan(b.program, [call, group], lambda program, group, reason=reason: reason)
        assert steps[1].reuse == reuse


def test_kernels_of_one_launch_do_not_overwrite_what_another_reads() -> None:
    b = Build()
    value, call = made(b, 8)
    p, q = b.buffer((8,)), b.buffer((8,))
    (i,) = b.loops(8)
    one = Group((b.nest([i], Store(p, i, b.at(value, i))),), (i,))
    other = Group((b.nest([i], Store(q, i, b.at(value, i))),), (i,))
    alone = Group((b.nest([i], Store(q, i, b.at(b.input(8), i))),), (i,))
    b.returns(p, q)
    assert overwritten(b, call, Group(parts=(one, alone))) == [[], [(p, value)]]
    assert overwritten(b, call, Group(parts=(one, other))) == [[], []]


# ---- donated buffers


def test_what_was_saved_for_backward_is_overwritten() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).exp() * 2).sum()

    x, w = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
    want = torch.autograd.grad(function(x, w), (x, w))

    def step(x: Tensor, w: Tensor) -> Any:
        return torch.autograd.grad(call(x, w), (x, w))

    call = compiled(function)
    got, codes = run_and_get_code(step, x, w)
    torch.testing.assert_close(got, want)
    backward = codes[-1]
    assert re.search(r"buf\d+ = arg\d+  # memory used again", backward)


def test_a_result_is_kept_though_effects_come_before_it() -> None:
    """The inverse is saved as well as returned, behind a token: it is not the backward pass's."""
    x = torch.tensor([[-1.5]], requires_grad=True)
    y = compiled(torch.linalg.inv)(x)
    seen = y.detach().clone()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, -(1 / x**2).detach())
    torch.testing.assert_close(y.detach(), seen, rtol=0, atol=0)


# ---- how much is alive


def test_mp_6_a_new_version_of_a_buffer_allocates_nothing() -> None:
    """MP-6"""
    b = Build()
    x, first, last = b.input(512), b.buffer((512,)), b.buffer((512,))
    (i,) = b.loops(512)
    at = b.index(x, i)
    b.nest([i], Store(first, at, build.op("sin", b.at(x, i))))
    call = b.call(torch.ops.aten.add_.Tensor, (b.view(first), b.view(x)), None)
    b.program.nodes[-1] = replace(call, mutates=(first,))
    b.nest([i], Store(last, at, b.at(first, ix.sub(511, i))))
    plan = schedule(b.returns(last))
    assert profile(plan.program, plan.steps)[:2] == [2048, 2048]
    assert plan.steps[1].allocate == [] and first not in plan.steps[1].free
    assert peak(plan.program, plan.steps) == 4096


def wide(x: Tensor, *ws: Tensor) -> list[Tensor]:
    """Breadth first, many large values live at once; depth first, one or two."""
    return [(x @ w) @ w[:, :1] for w in ws]


def test_mp_5_the_order_with_the_lowest_peak_is_taken() -> None:
    """MP-5"""
    inputs = [torch.randn(32, 32) for _ in range(7)]
    with config.patch(reorder_for_peak_memory=False):
        plan = plan_of(wide, *inputs)
    groups = [step.group for step in plan.steps]
    facts = Facts(plan.program, groups)
    peaks = {name: facts.peak(order(facts)) for name, order in ORDERS.items()}
    chosen, *_ = orders(plan.program, list(reversed_independent(facts, groups)))
    best = Facts(plan.program, chosen)
    assert best.peak(range(len(chosen))) <= min(peaks.values())
    assert peaks["depth first"] < peaks["breadth first"]
    for order in ORDERS.values():
        _respects(facts, order(facts))
    check(wide, *inputs, tolerance={"rtol": 1e-4, "atol": 1e-2})


def test_mp_5_groups_are_moved_across_the_peak() -> None:
    """MP-5: the product that makes less is better made last, as the other lets an operand die."""
    b = Build()
    x, y, a, early, late = b.input(8), *(b.buffer((n,)) for n in (2048, 1024, 512, 2048))
    for result, operands in ((y, [x]), (a, [x]), (early, [y]), (late, [y, a])):
        b.call(torch.ops.aten.clone.default, tuple(map(b.view, operands)), result)
    program = b.returns(early, late)
    groups = [Group(call=node) for node in program.nodes if not isinstance(node, Nest)]
    facts = Facts(program, groups)
    assert min(facts.peak(order(facts)) for order in ORDERS.values()) == 4 * 5632
    chosen, *_ = orders(program, groups)
    assert [min(g.writes) for g in chosen] == [y, a, late, early]
    assert Facts(program, chosen).peak(range(4)) == 4 * 5120


def test_mp_5_results_wait_with_what_is_there_for_them_alone() -> None:
    """MP-5: each table's gradient is filled, then added to; a chain that frees more comes first."""
    b = Build()
    x, g, saved, end = b.input(8), *(b.buffer((n,)) for n in (1024, 4096, 16))
    tables = [b.buffer((2048,)) for _ in range(3)]
    view = b.view

    def call(result: str, *operands: str) -> None:
        b.call(torch.ops.aten.clone.default, tuple(map(view, operands)), result)

    call(g, x)
    call(saved, x)
    for table in tables:
        filled = b.buffer((2048,))
        call(filled, x)
        call(table, filled, g)
    call(end, g, saved)
    program = b.returns(*tables, end)
    groups = [Group(call=node) for node in program.nodes if not isinstance(node, Nest)]
    chosen, *_ = orders(program, groups)
    assert Facts(program, groups).peak(range(len(groups))) == 4 * (1024 + 4096 + 4 * 2048)
    assert Facts(program, chosen).peak(range(len(chosen))) == 4 * (1024 + 16 + 4 * 2048)


def test_a_result_of_another_type_overwrites_nothing() -> None:
    """A kernel knows a buffer by one type: as many bytes are not enough to be written in place."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).to(torch.int32)

    inputs = 9 * torch.randn(8, 16), torch.randn(16, 8)
    assert [step.reuse for step in plan_of(function, *inputs).steps] == [[], []]
    check(function, *inputs)


def test_a_result_overwrites_an_operand_while_rows_are_summed_too() -> None:
    """Rows run one after the other: each is read, overwritten, and added to the sums of columns."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        z = y - y.mean(1, keepdim=True)
        return z, z.sum(0)

    inputs = torch.randn(64, 48), torch.randn(48, 4096)
    plan = plan_of(function, *inputs)
    assert any(step.group.serial for step in plan.steps)
    assert any(step.group.serial and step.reuse for step in plan.steps)
    check(function, *inputs, tolerance={"rtol": 1e-3, "atol": 1e-2})


def reversed_independent(facts: Facts, groups: list[Any]) -> list[Any]:
    """A legal order that is bad for memory: breadth first."""
    return [groups[k] for k in ORDERS["breadth first"](facts)]


def _respects(facts: Facts, order: list[int]) -> None:
    assert sorted(order) == list(range(len(facts.needs)))
    place = {k: n for n, k in enumerate(order)}
    assert all(place[n] < place[k] for k, needs in enumerate(facts.needs) for n in needs)


@pytest.mark.parametrize("name", list(ORDERS))
def test_mp_5_every_order_gives_the_same_results(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MP-5"""
    monkeypatch.setattr(Facts, "peak", lambda self, order: 0 if order == mine(self) else 1)
    mine = ORDERS[name]
    with config.patch(fx_graph_cache=False):
        inputs = [torch.randn(8, 8) for _ in range(4)]
        check(wide, *inputs, tolerance={"rtol": 1e-4, "atol": 1e-3})


def test_mp_9_conditional_subgraphs_keep_their_order() -> None:
    """MP-9"""

    def function(p: Tensor, x: Tensor) -> Tensor:
        a = torch.cond(p, lambda t: t.sin(), lambda t: t.cos(), (x,))
        b = torch.cond(p, lambda t: t + 1, lambda t: t - 1, (x,))
        return b * 2 + a

    plan = plan_of(function, torch.tensor(True), torch.randn(4))
    calls = [s.group.call.origin.nodes[-1] for s in plan.steps if s.group.call is not None]
    assert [c for c in calls if c.startswith("cond")] == ["cond", "cond_1"]
    host(function, torch.tensor(True), torch.randn(4))


# ---- pools


def three_alive(x: Tensor, y: Tensor) -> Tensor:
    return (x.cumsum(0) @ x.cumsum(1)) @ y.cumsum(0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_mp_1_buffers_alive_at_once_come_from_one_pool(dynamic: bool) -> None:
    """MP-1"""
    with config.patch(memory_planning=True):
        text = host(three_alive, torch.randn(5, 5), torch.randn(5, 5), dynamic=dynamic)
    assert len(re.findall(r"pool\d+ = empty", text)) == 1
    assert len(re.findall(r"= recast\(pool0", text)) == 2
    if dynamic:
        assert re.search(r"pool0 = empty_cpu\(\(.* // \(", text)


def test_a_slot_is_taken_once_it_is_free() -> None:
    """The smallest that is large enough; what is read in the step itself is not free yet."""
    row = _Row("pool", torch.device("cpu"), 0)
    lives = (("a", 128, 0, 1), ("b", 64, 0, 1), ("c", 64, 1, 2), ("d", 64, 2, 3), ("e", 128, 2, 4),
             ("f", 192, 5, 5))  # fmt: skip
    for name, size, start, end in lives:
        row.take(name, ix.as_index(size), start, end)
    assert row.taken == [("a", 0, 0), ("b", 1, 0), ("c", 2, 1), ("d", 1, 2), ("e", 0, 2),
                         ("f", 3, 5)]  # fmt: skip
    assert [ix.value_of(e) for e in row.starts()] == [0, 128, 192, 256, 448]


def test_mp_1_where_the_buffers_of_a_pool_lie() -> None:
    """MP-1: in whole lines, one behind the other; a place is free when what overwrote it in place
    is dead; what is returned in the end is in none, and each device has pools of its own."""
    b = Build()
    a, d, e, f, g, h, other, result, out = (b.buffer((n,)) for n in (8, 8, 20, 8, 25, 8, 8, 8, 8))
    b.program.buffers[other] = replace(b.program.buffers[other], device=torch.device("meta"))
    b.returns(out)
    steps = [Step(Group()), Step(Group(), [a, result]), Step(Group(), [e], [(d, a)]),
             Step(Group(), [f, other], free=[e]), Step(Group(), [g], [(out, result)], [d]),
             Step(Group(), [h], free=[f, g, h, other])]  # fmt: skip
    pooled(b.program, steps)
    assert [step.allocate for step in steps] == [[], [result], [], [], [], []]
    pools = [[(p.name, p.device.type, ix.value_of(p.size)) for p in step.pools] for step in steps]
    assert pools == [[], [("pool0", "cpu", 256)], [], [("pool1", "meta", 64)], [], []]
    places = [[(s.buffer, s.pool, ix.value_of(s.start)) for s in step.carve] for step in steps]
    assert places == [[], [(a, "pool0", 0)], [(e, "pool0", 64)],
                      [(f, "pool0", 192), (other, "pool1", 0)], [(g, "pool0", 64)],
                      [(h, "pool0", 0)]]  # fmt: skip


def test_mp_4_a_pool_of_unknown_size_waits_for_it() -> None:
    """MP-4"""

    def function(x: Tensor) -> Tensor:
        kept = x[x > 0]
        return kept.cumsum(0).flip(0).cumsum(0).sin()

    with (
        config.patch(memory_planning=True),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        text = host(function, torch.randn(50))
    pool = re.search(r"pool\d+ = empty_cpu\(\(.*u0", text)
    assert pool is not None and text.index("u0 = ") < pool.start()


# ---- MP-10


def test_a_result_nobody_reads_gives_no_memory() -> None:
    """It may not be there: attention on a card returns nothing for some of its results."""
    matrix = torch.randn(16, 16)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.linalg.eigh(x)[0]
        return values, torch.sin(x + values)

    plan = plan_of(function, matrix @ matrix.t())
    (call,) = [step.group.call for step in plan.steps if step.group.call is not None]
    assert call.results[1] is not None, "the vectors, as large as the last result"
    assert call.results[1] not in [old for step in plan.steps for _, old in step.reuse]


def test_mp_10_dead_buffers_are_reused_and_live_slices_are_not() -> None:
    """MP-10"""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([x @ y, y @ x])
        first = whole[:5]
        a = first.cumsum(0)
        b = a.flip(0).cumsum(0)
        return whole[5:] * 2, b.flip(0).cumsum(0) + first

    text = host(function, torch.randn(5, 5), torch.randn(5, 5))
    assert (allocations(text), text.count("# memory used again")) == (2, 3)


def test_mp_10_four_kernels_of_the_users_and_a_sum_need_two_allocations() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(4):
            out = torch.empty_like(x)
            user.sin_kernel[(x.numel(),)](x, out, x.numel(), BLOCK=4)
            x = out
        return x + 1

    x = torch.randn(12)
    expected = x.sin().sin().sin().sin() + 1
    with user.seen():
        got, code = run_and_get_code(compiled(function), x)
    torch.testing.assert_close(got, expected)
    assert (allocations(code[0]), code[0].count("# memory used again")) == (2, 3)


# ---- limits that keep memory low


def test_mp_7_reductions_of_two_products_do_not_keep_both_alive() -> None:
    """MP-7"""

    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a @ c).sum(-1) + (b @ c).sum(-1)

    inputs = torch.randn(64, 8), torch.randn(64, 8), torch.randn(8, 512)
    plan = plan_of(function, *inputs)
    product = 64 * 512 * 4
    assert peak(plan.program, plan.steps) < 2 * product
    host(function, *inputs)


@pytest.mark.parametrize(("most", "kernels"), [(None, 1), (3, 2), (2, 3)])
def test_mp_8_a_cap_on_bytes_read_splits_a_long_chain(most: int | None, kernels: int) -> None:
    """MP-8"""

    def function(x: Tensor, *ys: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for y in ys:
            total = total + (x @ y).sin()
        return total

    size = 16 * 16 * 4
    with config.patch(realize_acc_reads_size_threshold=most and most * size):
        plan = plan_of(function, *(torch.randn(16, 16) for _ in range(5)))
    assert sum(step.group.call is None for step in plan.steps) == kernels


# ---- parts of a concatenation that wait


def test_a_concatenation_is_not_alive_before_most_of_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A skip connection is kept by itself, where that needs less memory than to keep all of what it
    is put beside."""
    monkeypatch.setattr(defer, "LEAST_GAIN", 64)
    model = UNet(8, 2).eval()
    image = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        check(model, image, tolerance={"rtol": 1e-4, "atol": 1e-4})
        late = plan_of(model, image)
        monkeypatch.setattr(defer, "MOST_DELAYS", 0)
        early = plan_of(model, image)
    assert peak(late.program, late.steps) < 0.9 * peak(early.program, early.steps)
    assert sum(b.accessed for b in late.bytes) < 1.1 * sum(b.accessed for b in early.bytes)


@pytest.mark.parametrize("changed", [None, 1, 2])
def test_a_part_does_not_wait_for_what_changes_its_operands(
    changed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half of `joined` is made of `v` and `scale`: not after one of the steps in which
    `scale` may be written."""
    monkeypatch.setattr(defer, "LEAST_GAIN", 64)
    b = Build()
    n, most = 64, 1024
    (i,), (j,) = b.loops(n), b.loops(most - n)
    x, scale, v, joined = b.input(n), b.input(n), b.buffer((n,)), b.buffer((most,))
    large, part, out = b.buffer((most,)), b.buffer((n,)), b.buffer((most,))
    making = b.nest([i], Store(v, i, build.op("sin", b.at(x, i))))
    early = b.nest([i], Store(joined, i, build.op("mul", b.at(v, i), b.at(scale, i))))
    groups = [Group((making, early), (i,))]
    for step in (1, 2):
        call = b.call(torch.ops.aten.add_.Tensor, (b.view(scale), b.view(x)), None)
        written = (scale,) if step == changed else ()
        groups.append(Group(call=replace(call, mutates=written)))
    groups.append(Group(call=b.call(torch.ops.aten.repeat.default, (b.view(v), [16]), large)))
    taken = b.nest([i], Store(part, i, b.at(large, i)))
    rest = b.nest([j], Store(joined, ix.add(j, n), b.at(part, ix.mod(j, n))))
    (k,) = b.loops(most)
    last = b.nest([k], Store(out, k, build.op("neg", b.at(joined, k))))
    groups += [Group((nest,), nest.loops) for nest in (taken, rest, last)]
    found = defer.deferred(b.returns(out), groups)
    assert (len(found) == len(groups) + 1) == (changed is None)
    if changed is None:
        assert found[0].members == (making,) and found[5].members == (early,)
