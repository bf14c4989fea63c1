"""What is fused, in which order groups run, and whose memory is used again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.build import Build, executable
from tests.fuzz.stages import capture, first_wrong
from tests.programs import compiled
from tilewright import config, metrics
from tilewright.ir import build, interp
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, load
from tilewright.ir.program import Handle, Opaque, Program, Store, View
from tilewright.ir.verify import verify_nest
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.plan import Schedule, schedule
from tilewright.schedule.split import online_softmax

F32 = torch.float32


def kernels(function: Callable[..., Any], *inputs: Any, **options: Any) -> int:
    """How many kernels one graph becomes; the result is checked against eager."""
    before = metrics.generated_kernel_count
    got = compiled(function, **options)(*inputs)
    torch.testing.assert_close(got, function(*inputs), rtol=1e-4, atol=1e-4)
    return metrics.generated_kernel_count - before


def plan_of(function: Callable[..., Any], *inputs: Any, **options: Any) -> Schedule:
    (graph,) = capture(function, *inputs, **options).graphs
    return graph.plan


# ---- what fuses


@pytest.mark.parametrize(
    ("function", "shape", "count"),
    [
        pytest.param(lambda x: (x.exp() + 1).tanh() * x, (64, 65), 1, id="a chain"),
        pytest.param(lambda x: F.softmax(x, -1), (64, 65), 1, id="softmax"),
        pytest.param(lambda x: F.log_softmax(x.sin(), -1) * 2, (64, 65), 1, id="log softmax"),
        pytest.param(lambda x: F.layer_norm(x, (65,)), (64, 65), 1, id="layer norm"),
        pytest.param(lambda x: F.rms_norm(x, (65,)), (64, 65), 1, id="rms norm"),
        pytest.param(lambda x: (x * 2).sum(-1), (64, 65), 1, id="pointwise into reduction"),
        pytest.param(lambda x: x.sum(-1).exp() + 1, (64, 65), 1, id="reduction into pointwise"),
        pytest.param(lambda x: (x.sin(), x.cos()), (64, 65), 1, id="two readers of one input"),
        pytest.param(lambda x: (x.sum(-1), x.amax(-1)), (64, 65), 1, id="two folds of one input"),
        pytest.param(lambda x: x - x.mean(-1, keepdim=True), (64, 65), 1, id="centred"),
        pytest.param(lambda x: x.t().contiguous().exp(), (64, 65), 1, id="through a transpose"),
        pytest.param(lambda x: x.reshape(-1).exp().reshape(65, 64), (64, 65), 1, id="a reshape"),
    ],
)
def test_fused(function: Callable[..., Any], shape: tuple[int, ...], count: int) -> None:
    assert kernels(function, torch.randn(shape)) == count


def test_fused_with_dynamic_sizes_too() -> None:
    def function(x: Tensor) -> Tensor:
        return F.softmax(F.layer_norm(x, x.shape[-1:]), -1)

    assert kernels(function, torch.randn(64, 65), dynamic=True) == 1


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y: (x.exp(), y.exp()), id="nothing in common"),
        pytest.param(lambda x, y: (x.exp() - x.sum(), y[0, 0]), id="a full fold, then its users"),
    ],
)
def test_not_fused(function: Callable[..., Any]) -> None:
    assert kernels(function, torch.randn(64, 65), torch.randn(33, 70)) == 2


def test_a_refusal_has_a_reason() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x + 1).sum(-1)
        return y, F.pad(y, (0, 15)).unfold(-1, 16, 1).amax(-1)

    steps = plan_of(function, torch.randn(200, 9)).steps
    reasons = [why for step in steps for why in step.group.refused.values()]
    assert any("at other points of the shared loops" in why for why in reasons)


def test_the_limit_of_a_group_is_kept() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [(x + k).sum(-1) for k in range(6)]

    with config.patch(max_fusion_size=2):
        steps = plan_of(function, torch.randn(64, 33)).steps
    assert [len(s.group.members) for s in steps] == [2, 2, 2]


# ---- what may not be fused, or not be seen


def check(b: Build, *outputs: str, inputs: list[Tensor]) -> Schedule:
    """All ways of running the program agree."""
    program = b.returns(*outputs)
    plan = schedule(program)
    for step in plan.steps:
        for member in step.group.members:
            verify_nest(program, member)
    want = interp.run(program, [t.clone() for t in inputs])
    results = {
        "scheduled": interp.run_steps(program, plan.steps, [t.clone() for t in inputs]),
        "fused": interp.run_steps(program, plan.steps, [t.clone() for t in inputs], fused=True),
        "generated": executable(program, plan)([t.clone() for t in inputs]),
    }
    for name, got in results.items():
        for a, e in zip(got, want, strict=True):
            torch.testing.assert_close(
                a, e, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    return plan


def plus(a: Expr, number: float) -> Expr:
    return build.op("add", a, const(number, F32))


def test_windows_wait_for_all_of_what_they_read() -> None:
    """A window reads what other iterations write: at the same strides, but not the same places."""
    b = Build()
    x, y, z = b.input(5000), b.buffer((5000,)), b.buffer((5000,))
    i, r = b.loops(5000, 16)
    b.nest([i], Store(y, i, build.op("exp", b.at(x, i))))
    place = ix.add(i, r)
    inside = build.op("lt", place, const(5000))
    window = build.where(inside, load(y, F32, place, inside), const(0.0, F32))
    b.nest([i], Store(z, i, build.reduce("max", window)), reduce=[r])
    plan = check(b, z, inputs=[torch.randn(5000)])
    assert len(plan.steps) == 2


def test_a_value_computed_before_a_write_is_not_used_after_it() -> None:
    b = Build()
    x, before, after = b.input(64), b.buffer((64,)), b.buffer((64,))
    (i,) = b.loops(64)
    b.nest([i], Store(before, i, build.op("exp", b.at(x, i))))
    b.nest([i], Store(x, i, plus(b.at(x, i), 1)))
    b.nest([i], Store(after, i, build.op("exp", b.at(x, i))))
    plan = check(b, before, after, x, inputs=[torch.randn(64)])
    assert len(plan.steps) == 1


def test_a_local_value_survives_a_write_to_what_it_was_made_from() -> None:
    """The variance reads its values twice; the second time their source has changed."""
    b = Build()
    x, y, out = b.input(32, 200), b.buffer((32, 200)), b.buffer((32,))
    i, j = b.loops(32, 200)
    at = b.index(x, i, j)
    b.nest([i, j], Store(y, at, build.op("mul", b.at(x, i, j), b.at(x, i, j))))
    b.nest([i, j], Store(x, at, plus(b.at(x, i, j), 1)))
    b.nest([i], Store(out, i, build.part(build.reduce("welford", b.at(y, i, j)), 1)), reduce=[j])
    check(b, out, x, inputs=[torch.randn(32, 200)])


def test_what_is_written_twice_is_not_computed_again() -> None:
    b = Build()
    x, t, y = b.input(8), b.buffer((8,)), b.buffer((8,))
    (i,) = loops = b.loops(8)
    nests = (b.nest(loops, Store(t, i, b.at(x, i))), b.nest(loops, Store(t, i, const(2.0, F32))),
             b.nest(loops, Store(y, i, b.at(t, i))))  # fmt: skip
    assert online_softmax.recomputed_members(b.program, nests, {t}) == nests
    groups = [Group((n,), n.loops) for n in nests]
    assert online_softmax._dropped(b.program, groups, nests[0]) == groups


def test_a_masked_read_of_a_local_value_is_zero_elsewhere() -> None:
    b = Build()
    x, y, z = b.input(64), b.buffer((64,)), b.buffer((64,))
    (i,) = b.loops(64)
    b.nest([i], Store(y, i, plus(b.at(x, i), 1)))
    b.nest([i], Store(z, i, load(y, F32, i, build.op("lt", i, const(40)))))
    plan = check(b, z, inputs=[torch.randn(64)])
    assert plan.steps[0].group.local == {y}


def test_masked_and_unmasked_stores_of_one_nest() -> None:
    b = Build()
    x, y, z = b.input(64), b.input(64), b.input(64)
    (i,) = b.loops(64)
    b.nest([i], Store(y, i, b.at(x, i), mask=build.op("lt", i, const(9))), Store(z, i, b.at(x, i)))
    check(b, y, z, inputs=[torch.randn(64), torch.randn(64), torch.randn(64)])


def test_readers_of_old_contents_run_before_the_write() -> None:
    """Write after read, in both directions of the index."""
    b = Build()
    x, y, z = b.input(64), b.buffer((64,)), b.buffer((64,))
    (i,) = b.loops(64)
    b.nest([i], Store(y, i, b.at(x, ix.sub(63, i))))
    b.nest([i], Store(x, i, plus(b.at(x, i), 1)))
    b.nest([i], Store(z, i, b.at(x, ix.sub(63, i))))
    plan = check(b, y, z, x, inputs=[torch.randn(64)])
    assert len(plan.steps) == 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_mutated_arguments(dynamic: bool) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        old = x.flip(0)
        x.mul_(2)
        y.copy_(x.t() + old.t())
        return old + x, y.sum(0)

    found = capture(function, torch.randn(20, 20), torch.randn(20, 20), generate=True,
                    dynamic=dynamic)  # fmt: skip

    def same(got: Any, want: Any) -> bool:
        return all(torch.allclose(a, b) for a, b in zip(got, want, strict=True)
                   if isinstance(b, Tensor))  # fmt: skip

    assert first_wrong(found, same) == ""


# ---- order


def test_fusion_never_makes_a_cycle() -> None:
    """`c` could join `a`, but the call between them needs `a` and is needed by `c`."""
    b = Build()
    x, a, m, c = b.input(16, 16), b.buffer((16, 16)), b.buffer((16, 16)), b.buffer((16, 16))
    i, j = b.loops(16, 16)
    at = b.index(x, i, j)
    b.nest([i, j], Store(a, at, plus(b.at(x, i, j), 1)))
    b.call(torch.ops.aten.mm.default, (b.view(a), b.view(x)), m)
    b.nest([i, j], Store(c, at, build.op("mul", b.at(a, i, j), b.at(m, i, j))))
    plan = check(b, c, inputs=[torch.randn(16, 16)])
    assert [s.group.call is not None for s in plan.steps] == [False, True, False]


def test_a_call_that_takes_a_handle_runs_after_its_maker() -> None:
    """The first group waits for a later call, so what only needs a handle must wait as well."""
    b = Build()
    x, a, m, c = b.input(16, 16), b.buffer((16, 16)), b.buffer((16, 16)), b.buffer((16, 16))
    last = b.buffer((16, 16))
    i, j = b.loops(16, 16)
    at = b.index(x, i, j)
    b.nest([i, j], Store(a, at, plus(b.at(x, i, j), 1)))
    b.call(torch.ops.aten.mm.default, (b.view(x), b.view(x)), m)
    b.nest([i, j], Store(c, at, build.op("add", b.at(a, i, j), b.at(m, i, j))))
    made = b.call(torch.ops.aten.to_sparse.default, (b.view(a),), None)
    b.call(torch.ops.aten.to_dense.default, (Handle(f"{made.name}_r0"),), last)
    plan = check(b, c, last, inputs=[torch.randn(16, 16)])
    names = [step.group.nodes[0].name for step in plan.steps]
    assert names.index(made.name) < names.index("call5")


def test_what_nobody_reads_is_not_computed() -> None:
    def function(x: Tensor) -> Tensor:
        x.exp().sum(0)
        return x + 1

    steps = plan_of(function, torch.randn(64, 65)).steps
    assert [len(s.group.members) for s in steps] == [1]


# ---- memory


def buffers_allocated(plan: Schedule) -> list[str]:
    return [name for step in plan.steps for name in step.allocate]


def test_local_values_need_no_memory() -> None:
    plan = plan_of(lambda x: F.softmax(x.sin(), -1), torch.randn(64, 65))
    (step,) = plan.steps
    assert len(step.group.local) == 4
    assert len(step.allocate) == 1


def _chain(b: Build, x: str, count: int, source: Callable[[str], Expr], i: Expr) -> list[str]:
    made: list[str] = []
    for _ in range(count):
        y = b.buffer((64,))
        b.nest([i], Store(y, i, source(x)))
        made.append(y)
        x = y
    return made


def test_dead_memory_is_used_again() -> None:
    """Each step reads the one before backwards, so nothing fuses and nothing is in place; and it
    takes too much work to do it twice."""
    b = Build()
    x = b.input(64)
    (i,) = b.loops(64)
    made = _chain(b, x, 6, lambda s: build.op("sin", b.at(s, ix.sub(63, i))), i)
    plan = check(b, made[-1], inputs=[torch.randn(64)])
    assert len(plan.steps) == 6
    assert len(buffers_allocated(plan)) == 2
    assert sum(len(s.reuse) for s in plan.steps) == 4
    with config.patch(allow_buffer_reuse=False):
        assert len(buffers_allocated(schedule(b.program))) == 6


def test_a_result_may_take_the_place_of_its_operand() -> None:
    b = Build()
    x, m, a, s = b.input(16, 16), b.buffer((16, 16)), b.buffer((16, 16)), b.buffer((16, 16))
    last = b.buffer((16, 16))
    i, j = b.loops(16, 16)
    at = b.index(x, i, j)
    b.nest([i, j], Store(a, at, b.at(x, j, i)))
    b.call(torch.ops.aten.mm.default, (b.view(a), b.view(x)), m)
    product = build.op("mul", b.at(a, i, j), b.at(m, i, j))
    b.nest([i, j], Store(s, at, build.op("sin", product)))
    b.nest([i, j], Store(last, at, b.at(s, ix.sub(15, i), j)))
    plan = check(b, last, inputs=[torch.randn(16, 16)])
    assert {old for step in plan.steps for new, old in step.reuse if new == s} & {a, m}
    with config.patch(inplace_buffers=False):
        plan = schedule(b.program)
        assert not {old for step in plan.steps for new, old in step.reuse if new == s}


def test_memory_of_arguments_and_results_is_never_given_away() -> None:
    b = Build()
    x = b.input(64)
    (i,) = b.loops(64)
    made = _chain(b, x, 5, lambda s: plus(b.at(s, ix.sub(63, i)), 1), i)
    plan = check(b, *made, inputs=[torch.randn(64)])
    assert [p for step in plan.steps for p in step.reuse] == []
    given = {old for step in plan.steps for _, old in step.reuse}
    assert x not in given


@pytest.mark.parametrize("aliases", [False, True])
def test_memory_a_call_returned_is_reused_unless_it_may_be_shared(aliases: bool) -> None:
    b = Build()
    x, m, y = b.input(8, 8), b.buffer((8, 8)), b.buffer((8, 8))
    i, j = b.loops(8, 8)
    b.call(torch.ops.aten.mm.default, (b.view(x), b.view(x)), m)
    call = b.program.nodes[-1]
    assert isinstance(call, Opaque)
    b.program.nodes[-1] = replace(call, aliases=aliases)
    b.nest([i, j], Store(y, b.index(y, i, j), plus(b.at(m, i, j), 1)))
    plan = check(b, y, inputs=[torch.randn(8, 8)])
    assert plan.steps[-1].reuse == ([] if aliases else [(y, m)])


def live_ranges(program: Program, plan: Schedule) -> None:
    """No step touches memory that was given to another buffer, or freed."""
    holder: dict[str, str] = {}  # memory -> the buffer it holds
    where: dict[str, str] = {}  # buffer -> its memory
    for step in plan.steps:
        for name in step.allocate:
            holder[name], where[name] = name, name
        for new, old in step.reuse:
            where[new] = where[old]
            holder[where[old]] = new
        group = step.group
        reused = {old for _, old in step.reuse}
        for name in (group.reads | group.writes) - group.local:
            if program.buffers[name].kind == "temporary" and name in where and name not in reused:
                assert holder.get(where[name]) == name, f"{name} was overwritten"
        for name in step.free:
            holder.pop(where.get(name, ""), None)
    for output in program.outputs:
        if isinstance(output, View) and output.buffer in where:
            assert holder[where[output.buffer]] == output.buffer


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_agree_with_the_program(seed: int) -> None:
    """Random nests over few buffers: forwards and backwards, folds, writes over arguments."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(0, n, (), generator=generator))

    b = Build()
    names = [b.input(12, 12), b.input(12, 12)]
    i, j = b.loops(12, 12)
    for _ in range(9):
        x, y = names[draw(len(names))], names[draw(len(names))]
        ways = [(i, j), (j, i), (ix.sub(11, i), j), (i, ix.sub(11, j)), (i, 0), (0, j)]
        value = build.op(("add", "sub", "max")[draw(3)], b.at(x, *ways[draw(4)]),
                         b.at(y, *ways[draw(6)]))  # fmt: skip
        kind = draw(6)
        if kind == 0:
            row = b.buffer((12, 12))
            b.nest([i], Store(row, b.index(row, i, 0), build.reduce("max", value)), reduce=[j])
            whole = b.buffer((12, 12))
            b.nest([i, j], Store(whole, b.index(whole, i, j), b.at(row, i, 0)))
            names.append(whole)
        elif kind == 1:
            target = names[draw(2)]
            own = build.op("mul", b.at(target, i, j), const(0.5, F32))
            b.nest([i, j], Store(target, b.index(target, i, j), own))
        else:
            out = b.buffer((12, 12))
            b.nest([i, j], Store(out, b.index(out, i, j), value))
            names.append(out)
    outputs = [names[-1], names[len(names) // 2], names[0]]
    inputs = [torch.randn(12, 12, generator=generator) for _ in range(2)]
    plan = check(b, *outputs, inputs=inputs)
    live_ranges(b.program, plan)


# ---- counting


def test_bytes_of_a_fused_chain() -> None:
    kernels(lambda x: (x.exp() + 1).sin(), torch.randn(64, 128))
    assert metrics.num_bytes_accessed == 2 * 64 * 128 * 4
    assert metrics.num_bytes_moved == 2 * 64 * 128 * 4


def test_kernel_counts_add_up_over_graphs() -> None:
    x = torch.randn(64, 65, requires_grad=True)
    compiled(lambda t: F.softmax(t, -1).square().sum())(x).backward()
    assert metrics.generated_kernel_count == 2
    assert x.grad is not None
