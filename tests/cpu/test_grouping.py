"""Grouping by bytes: what is joined, cut, written in place or launched together, and that all of it
computes what eager does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.graphs import FAMILIES
from bench.growth import deciding_seconds
from tests.fuzz.build import Build
from tests.pretend import run
from tests.programs import calls_of, compiled
from tests.traffic import Case, count
from tilewright import config, metrics, rules
from tilewright.graph.simplify import simplify
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, load, var
from tilewright.ir.program import Nest, Program, Store
from tilewright.lower.context import Lowering
from tilewright.lower.graph import lower
from tilewright.schedule.fusion.group import Search
from tilewright.schedule.fusion.legality import (
    Fit,
    Misfit,
    align,
    conflict,
    first_conflict,
    is_alone,
)
from tilewright.schedule.nests.access import disjoint, signature, terms, within
from tilewright.schedule.order.topological import Order
from tilewright.schedule.plan import schedule
from tilewright.schedule.rewrite import improve, scan_epilogue

cat = torch.cat


def counted(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[int, int]:
    """(elements, generated kernels) of a program whose result, and whose inputs afterwards, are
    checked against eager's."""
    torch._dynamo.reset()
    metrics.reset()
    mine, theirs = [x.clone() for x in inputs], [x.clone() for x in inputs]
    got, want = compiled(function, **options)(*mine), function(*theirs)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    return metrics.num_bytes_accessed // 4, metrics.generated_kernel_count


# ---- columns that are read again


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [
        ((2, 96, 14, 14), 1),  # a cache keeps what a thread has
        ((4, 96, 56, 56), 2),
        ((1, 16, 48, 48), 1),  # few of one thread
        ((1, 16, 64, 64), 2),
    ],
)
def test_channels_are_one_kernel_while_a_cache_has_them(
    shape: tuple[int, ...], kernels: int
) -> None:
    x = torch.randn(shape).to(memory_format=torch.channels_last)

    def fn(x: Tensor) -> Tensor:
        return torch.relu(x - x.mean((0, 2, 3), keepdim=True))

    read_again = x.numel() + 2 * shape[1] if kernels == 2 else 0
    assert counted(fn, x) == (2 * x.numel() + read_again, kernels)


# ---- concatenation and padding


JOINS: dict[str, Callable[..., Any]] = {
    "product_in_place": lambda a, b: cat([a @ a, b.sin()]),
    "product_in_columns": lambda a, b: cat([b.sin(), a @ a], 1),
    "two_products": lambda a, b: cat([a @ b, b @ a], 1),
    "folds": lambda a, b: cat([a.sum(0), b.sum(1)]) + 10,
    "softmax": lambda a, b: cat([a.softmax(1), b.softmax(1)]).cos(),
    "softmax_columns": lambda a, b: cat([a.softmax(1), b.softmax(1)], 1).cos() * 2,
    "padded": lambda a, b: F.pad(cat([a @ a, b]), (2, 3), value=0.5),
    "padded_rows": lambda a, b: F.pad(a @ b, (0, 0, 1, 2)) + 1,
    "many": lambda a, b: cat([F.gelu(a + k) for k in range(9)] + [b]) + 10,
    "then_fold": lambda a, b: (cat([F.gelu(a), b.sin()], 1) + 1).sum(1),
    "used_twice": lambda a, b: (lambda c: (c.exp(), c.sum(0)))(cat([a.softmax(0), b])),
    "stacked": lambda a, b: torch.stack([a.sum(1), b.amax(1)], 1).exp(),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", JOINS)
def test_joined(name: str, dynamic: bool) -> None:
    counted(JOINS[name], torch.randn(6, 6), torch.randn(6, 6), dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_joined_in_other_types(dtype: torch.dtype) -> None:
    a, b = torch.randn(4, 3, 5).to(dtype), torch.randn(4, 5, 3).to(dtype)
    elements, _ = counted(lambda a, b: cat([a @ b, (b @ a)[:, :3, :3]], 2), a, b)
    assert elements == 448 * dtype.itemsize // 4


def test_a_product_writes_into_its_place() -> None:
    a, b = torch.randn(10, 10), torch.randn(10, 10)
    assert counted(lambda a, b: cat([b.sin(), a @ a], 1), a, b) == (400, 1)
    assert counted(lambda a, b: cat([a @ b, b @ a]), a, b)[0] == 600


def test_a_product_does_not_overwrite_what_is_read_later() -> None:
    def function(x: Tensor, a: Tensor) -> Tensor:
        product = a @ a
        before = x.sin()
        x.copy_(product)
        return before

    counted(function, torch.randn(8, 8), torch.randn(8, 8))


def test_parts_of_one_result_share_a_launch() -> None:
    a, b = torch.randn(10, 10), torch.randn(7, 10)
    assert counted(lambda a, b: cat([a.sin(), b.cos()]), a, b) == (340, 1)
    assert counted(lambda a, b: F.pad(cat([a @ a, b]), (2, 2)), a, b)[1] == 1


# ---- products that accumulate


def residual(x: Tensor, a: Tensor) -> Tensor:
    return x + a @ a


def test_a_sum_with_a_product_is_one_call() -> None:
    x, a = torch.randn(10, 10), torch.randn(10, 10)
    assert counted(residual, x, a) == (300, 0)
    assert counted(residual, x[0].clone(), a)[0] == 210
    assert counted(residual, torch.randn(4, 10, 10), torch.randn(4, 10, 10)) == (1200, 0)


def test_low_precision_products_are_rounded_before_the_sum() -> None:
    assert counted(residual, *torch.randn(2, 10, 10).bfloat16().unbind())[1] == 1


def test_a_product_of_values_that_change_does_not_wait() -> None:
    def function(x: Tensor, a: Tensor) -> Tensor:
        product = a @ a
        a.add_(1)
        return product + x

    counted(function, torch.randn(8, 8), torch.randn(8, 8))


# ---- computed again


def test_cheap_values_are_computed_again() -> None:
    """Two kernels that cannot be one both read `x`: neither reads what the other stored."""

    def function(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x + b) * 2
        return y.softmax(1), y.cumsum(1)

    elements, _ = counted(function, torch.randn(100, 80), torch.randn(80))
    assert elements == 4 * 8000 + 2 * 80


def test_what_changes_is_not_read_again() -> None:
    def function(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x + b) * 2
        first = y.softmax(1)
        x.mul_(3)
        return first, y.cumsum(1)

    counted(function, torch.randn(100, 80), torch.randn(80))


def test_part_of_a_buffer_is_not_taken_for_all_of_it() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return cat([a, a, F.mish(b)], -2).logsumexp((0, 1))

    counted(function, torch.randn(1, 33, 4), torch.randn(1, 33, 4))


# ---- loops (LO-1 to LO-13)


def one_kernel(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> int:
    elements, kernels = counted(function, *inputs, **options)
    assert kernels == 1
    return elements


def test_lo_01_rows_over_dimensions_that_do_not_merge() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x.permute(1, 0, 2).sum(2) + 1) @ y

    elements, kernels = counted(function, torch.randn(20, 20, 30), torch.randn(20, 20))
    assert (elements, kernels) == (20 * 20 * 30 + 20 * 20 + 3 * 20 * 20, 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_lo_02_contiguous_and_transposed_operands(dynamic: bool) -> None:
    with config.patch(realize_opcount_threshold=0):
        one_kernel(lambda a, b: a * 2 + (b * 3).t(), torch.randn(24, 20), torch.randn(20, 24),
                   dynamic=dynamic)  # fmt: skip


def test_lo_03_row_sums_and_a_transposed_copy() -> None:
    elements = one_kernel(lambda x: (x.sum(1), x.t().contiguous()), torch.randn(64, 96))
    assert elements == 64 * 96 * 2 + 64


def test_lo_04_stored_pointwise_into_an_outer_reduction() -> None:
    with config.patch(realize_opcount_threshold=0):
        one_kernel(lambda x: (x.exp() + 1).sin().sum(0), torch.randn(48, 32))


def test_lo_07_a_small_common_operand_is_no_reason_to_fuse() -> None:
    def function(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x + w, y + w[:, None]

    _, kernels = counted(function, torch.randn(300, 64), torch.randn(64, 300), torch.randn(64))
    assert kernels == 2


def test_lo_07_a_view_of_a_common_operand_is_that_operand() -> None:
    """Seen as a row, in parts, without its first rows."""
    for view in (lambda x: x.view(-1), lambda x: x.view(4, 75, 8, 8), lambda x: x[12:].flatten()):
        f = lambda x, view=view: (x + 1, view(x) * 2)  # noqa: E731
        elements = one_kernel(f, torch.randn(300, 64))
        assert elements == 300 * 64 * 2 + view(torch.empty(300, 64)).numel()


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


LO_08: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reshaped": lambda x, w: rms_norm(x.reshape(-1, 4, 32), w),
    "sliced": lambda x, w: rms_norm(x[:, :64].reshape(-1, 2, 32), w),
    "transposed": lambda x, w: rms_norm(x.reshape(-1, 4, 32).transpose(0, 1), w),
    "after_pointwise": lambda x, w: rms_norm((x.sin() * 2).reshape(-1, 4, 32), w),
}


@pytest.mark.parametrize("name", LO_08)
def test_lo_08_norms_of_the_last_part_of_a_reshape(name: str) -> None:
    one_kernel(LO_08[name], torch.randn(24, 128), torch.randn(32))


def test_lo_09_grouped_quantisation_before_a_product() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        groups = x.reshape(-1, 8, 16)
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return (groups / scale).round().reshape(-1, 128) @ y, scale

    assert counted(function, torch.randn(32, 128), torch.randn(128, 8))[1] == 1


def test_lo_09_an_attempt_in_vain_leaves_no_trace() -> None:
    """Loops are split and renamed on the way to a refusal, in copies alone."""
    b = Build()
    x, middle, out = b.input(60), b.buffer((60,)), b.buffer((60,))
    p, q = b.loops(12, 5)
    (r,) = b.loops(60)
    one = b.nest([p, q], Store(middle, ix.add(ix.mul(p, 5), q), b.at(x, ix.add(ix.mul(p, 5), q))))
    turned = ix.sub(59, r)
    two = b.nest([r], Store(out, r, b.at(middle, turned)))
    before = repr(one), repr(two)
    fit = align(Fit((one,), one.loops), Fit((two,), two.loops), {one.name: 0, two.name: 1})
    assert isinstance(fit, Misfit) and fit.reason
    assert (repr(one), repr(two)) == before and one.loops == (p, q) and two.loops == (r,)


def rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    normed = rms_norm(x, w)
    a, b = normed.chunk(2, -1)
    return normed * cos + cat([-b, a], -1) * sin


def interleaved_rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    normed = rms_norm(x, w)
    a, b = normed[..., ::2], normed[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def test_lo_13_norm_then_rope() -> None:
    x, w = torch.randn(2, 3, 40, 32), torch.randn(32)
    whole, half = torch.randn(2, 40, 32), torch.randn(2, 40, 16)
    elements = one_kernel(rope, x, w, *whole.unbind())
    assert elements == 2 * x.numel() + w.numel() + whole.numel()
    one_kernel(interleaved_rope, x, w, *half.unbind())


def test_lo_13_with_sequences_of_any_length() -> None:
    x, w, cos, sin = torch.randn(2, 3, 40, 32), torch.randn(32), torch.randn(40, 32), torch.ones(32)
    torch._dynamo.mark_dynamic(x, 2)
    torch._dynamo.mark_dynamic(cos, 0)
    metrics.reset()
    torch.testing.assert_close(compiled(rope)(x, w, cos, sin), rope(x, w, cos, sin))
    assert metrics.generated_kernel_count == 1


def test_values_are_read_elsewhere_in_the_row_they_were_computed_in() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.softmax(-1)
        return y.flip(-1) + y.roll(3, -1)

    counted(function, torch.randn(70, 33))


# ---- shared launches (CK-1 to CK-4, CK-9, CK-10)


def six(*x: Tensor) -> list[Tensor]:
    return [t.sin() + k for k, t in enumerate(x)]


SIX = tuple(torch.randn(n) for n in (10, 20, 30, 40, 50, 60))


def test_ck_01_independent_kernels_share_a_launch() -> None:
    assert counted(six, *SIX)[1] == 6
    with config.patch(combo_kernels=True):
        assert counted(six, *SIX)[1] == 1


def test_ck_01_with_arguments_changed_in_place() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a.add_(1)
        b.mul_(2)
        return c.exp()

    with config.patch(combo_kernels=True):
        assert counted(function, *SIX[:3])[1] == 1


@pytest.mark.parametrize(("pointwise_only", "most"), [(False, 2), (True, 3)])
def test_ck_02_reductions_and_pointwise(pointwise_only: bool, most: int) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return a.sum(1), b.amax(1), c.sin(), d.cos()

    inputs = torch.randn(30, 20), torch.randn(40, 30), torch.randn(50), torch.randn(7, 9)
    with config.patch(combo_kernels=True, combo_kernels_pointwise_only=pointwise_only):
        assert counted(function, *inputs)[1] == most


def test_ck_03_kernels_over_tiles_are_launched_apart() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return a + b.t(), c.sin(), d.cos()

    inputs = torch.randn(30, 20), torch.randn(20, 30), torch.randn(50), torch.randn(60)
    with config.patch(combo_kernels=True):
        assert counted(function, *inputs)[1] == 2


def launches_beside_small_ones(size: int) -> int:
    """On a card that is not there."""

    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return a.sin(), b.cos(), c.exp()

    case = Case("", 0, function, f"f32[50] f32[60] f32[{size}]", options={"combo_kernels": True})
    return count(case, "cuda").kernels


MOST_SHARED = rules.SHARED_LAUNCH_BYTES.limit


@pytest.mark.parametrize(
    ("elements", "launches"), [(70, 1), (MOST_SHARED // 8, 1), (MOST_SHARED // 8 + 1, 2)]
)
def test_ck_03_a_large_kernel_is_launched_alone(elements: int, launches: int) -> None:
    """What takes long to run gains nothing by a launch less; each reads and writes four bytes."""
    assert run(launches_beside_small_ones, elements) == launches


@pytest.mark.parametrize(("most", "launches"), [(8, 1), (3, 2), (2, 3)])
def test_ck_04_the_most_kernels_of_a_launch(most: int, launches: int) -> None:
    with config.patch(combo_kernels=True, combo_kernel_max_num_nodes=most):
        assert counted(six, *SIX)[1] == launches


def test_ck_09_lists_fuse_element_by_element() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
        added = torch._foreach_add([a.sin(), b], [c, d])
        return [x * 2 for x in torch._foreach_mul(added, 3.0)]

    inputs = torch.randn(10, 3), torch.randn(33), torch.randn(10, 3), torch.randn(33)
    with config.patch(combo_kernels=True):
        assert counted(function, *inputs) == (3 * 63, 1)


def test_ck_10_long_lists_are_split_and_updated_in_place() -> None:
    def function(*x: Tensor) -> None:
        torch._foreach_add_(list(x), 1.0)

    inputs = [torch.randn(5 + k) for k in range(12)]
    with config.patch(combo_kernels=True, combo_kernel_max_num_nodes=64,
                      combo_kernel_max_num_args=8):  # fmt: skip
        elements, kernels = counted(function, *inputs)
    assert (elements, kernels) == (2 * sum(x.numel() for x in inputs), 2)


# ---- the parts of the search


def test_disjoint_parts() -> None:
    i, j = var("i", ix.as_index(10)), var("j", ix.as_index(5))
    row = ix.mul(i, 20)
    assert disjoint(i, ix.add(i, 10)) and not disjoint(i, ix.add(i, 9))
    assert disjoint(ix.add(row, j), ix.add(row, j, 5)) and disjoint(ix.add(row, j, 25), row)
    assert not disjoint(ix.add(row, j), ix.add(row, j, 4))
    assert disjoint(ix.mul(i, 2), ix.add(ix.mul(i, 2), 1))
    flat = ix.add(ix.mul(ix.floordiv(i, 5), 10), ix.mod(i, 5))  # the same rows by one loop
    assert disjoint(flat, ix.add(flat, 5)) and not disjoint(flat, ix.add(flat, 4))
    end = ix.add(row, j, 16)  # of a row, and the first element of the next
    assert not disjoint(end, ix.add(row, j)) and disjoint(ix.add(row, j, 15), ix.add(row, j))


def test_how_far_a_mask_lets_a_loop_go() -> None:
    v, ten = var("v", ix.as_index(10)), ix.as_index(10)

    def between(op: str, left: Expr, right: int) -> Expr:
        return build.op(op, left, ix.as_index(right))

    back = ix.sub(ten, v)
    for mask, expected in (
        (None, (0, 9)), (between("lt", v, 6), (0, 5)), (between("ge", v, 3), (3, 9)),
        (build.op("bit_and", between("lt", v, 6), between("ge", v, 3)), (3, 5)),
        (between("lt", back, 4), (7, 9)), (between("ge", back, 4), (0, 6)),
        (between("lt", ix.mul(v, 2), 6), (0, 9)), (between("ge", ix.mul(v, 2), 6), (0, 9)),
    ):  # fmt: skip
        assert tuple(map(ix.value_of, within(v, mask))) == expected


def test_an_order_stays_right_while_groups_are_joined() -> None:
    order = Order([set(), {0}, {1}, {0}, {3}, {2, 4}])
    assert order.between(0, 2) == "another kernel must run between them"
    gap = order.between(1, 4)
    assert not isinstance(gap, str)
    order.join(1, 4, gap)  # 3 now has to come before 1, 2 after it
    ranks = [order.rank[k] for k in (0, 3, 1, 2, 5)]
    assert ranks == sorted(ranks)
    assert isinstance(order.between(0, 5), str)


def ladder(count: int) -> Program:
    """Rows and their sums, each reading what came shortly before."""
    b = Build()
    made: list[tuple[str, int]] = [(b.input(64, 96), 2)]
    i, j = b.loops(64, 96)
    for k in range(count):
        value = build.op("exp", b.at(made[-1][0], *(i, j)[: made[-1][1]]))
        other, rank = made[max(0, len(made) - 2 - k % 7)]
        value = build.op("add", value, b.at(other, *(i, j)[:rank]))
        if k % 5:
            made.append((b.buffer((64, 96)), 2))
            b.nest([i, j], Store(made[-1][0], b.index(made[-1][0], i, j), value))
        else:
            made.append((b.buffer((64,)), 1))
            b.nest([i], Store(made[-1][0], i, build.reduce("sum", value)), reduce=[j])
    return b.returns(made[-1][0])


def test_effort_grows_with_the_graph() -> None:
    """Pairs tried and groups looked at: twice the nodes are at most 2.3 times the work."""

    def effort(count: int) -> int:
        program = ladder(count)
        search = Search(program, program.nodes)
        search.run()
        return sum(search.tries.values()) + search.order.work

    assert effort(600) <= 2.3 * effort(300)


def fan(count: int) -> Program:
    """Many readers of one argument, each with a library call of its own."""
    b = Build()
    x, made = b.input(16, 16), list[str]()
    i, j = b.loops(16, 16)
    for _ in range(count // 2):
        product, made_here = b.buffer((16, 16)), b.buffer((16, 16))
        b.call(torch.ops.aten.mm.default, (b.view(x), b.view(x)), product)
        value = build.op("add", b.at(x, i, j), b.at(product, j, i))
        b.nest([i, j], Store(made_here, b.index(x, i, j), value))
        made.append(made_here)
    return b.returns(*made)


@pytest.fixture
def early_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bounded however large the graph is has its bound reached in small graphs."""
    monkeypatch.setattr(improve, "MOST_TRIALS", 4)
    monkeypatch.setattr(config, "max_fusion_size", 8)


@pytest.mark.usefixtures("early_bounds")
@pytest.mark.parametrize("program", [ladder, fan])
def test_the_whole_schedule_grows_with_the_graph(program: Callable[[int], Program]) -> None:
    """From the program to the memory plan."""

    def effort(count: int) -> int:
        given = program(count)
        return calls_of(lambda: schedule(given))

    effort(50)
    assert effort(200) <= 2.3 * effort(100)


@pytest.mark.usefixtures("early_bounds")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_stage_grows_with_the_graph(family: str) -> None:
    """From the graph to the memory plan. `python -m bench --suite growth` has the seconds."""

    def effort(count: int) -> int:
        gm = FAMILIES[family](count)
        return calls_of(lambda: deciding_seconds(gm))

    effort(60)
    assert effort(240) <= 2.3 * effort(120)


def test_a_loop_that_keeps_the_results_of_all_its_steps_asks_of_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not of each pair: what put 444 results side by side took 5 of 6.8 s to tell them apart."""
    asked = Counter[str]()

    def count(owner: Any, question: str) -> None:
        real = getattr(owner, question)

        def counting(*args: Any) -> Any:
            asked[question] += 1
            return real(*args)

        monkeypatch.setattr(owner, question, counting)

    count(improve, "disjoint")
    count(scan_epilogue, "reduces_or_scans")
    count(Lowering, "_is_lazy")

    def effort(steps: int) -> Counter[str]:
        asked.clear()
        deciding_seconds(FAMILIES["recurrence"](9 * steps))
        return Counter(asked)

    few, many = effort(40), effort(80)
    assert {question: n for question, n in many.items() if n > 2.1 * few[question]} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_few_questions_are_asked_for_each_node(family: str) -> None:
    """Pairs of groups tried, and groups looked at to keep them in order."""
    gm = FAMILIES[family](200)
    simplify(gm)
    program = lower(gm)
    search = Search(program, program.nodes)
    search.run()
    assert sum(search.tries.values()) <= 2 * len(program.nodes)
    assert search.order.work <= 4 * len(program.nodes)


# ---- what is never fused


def test_a_nest_that_scatters_scans_or_has_no_points_is_alone() -> None:
    b = Build()
    x, places, out = b.input(8), b.input(8, dtype=torch.int64), b.buffer((8,))
    (i,) = b.loops(8)
    value, place = b.at(x, i), b.at(places, i)
    plain = b.nest([i], Store(out, i, value))
    assert is_alone(plain) == ""
    assert is_alone(b.nest([i], Store(out, i, value, "add"))) == "it scatters"
    masked = Store(out, i, value, mask=build.op("lt", i, ix.as_index(5)))
    assert is_alone(b.nest([i], masked)) == "it scatters"
    looked_up = Store(out, build.op("index", place, ix.as_index(8)), value)
    assert is_alone(b.nest([i], looked_up)) == "it stores at gathered indices"
    assert is_alone(b.nest([i], Store(out, i, build.scan("sum", i, value)))) == "it scans"
    (none,) = b.loops(0)
    for loops in ([none], [i, none]):
        assert is_alone(b.nest(loops, Store(out, none, b.at(x, none)))) == "it has no points"


@pytest.mark.parametrize("shift", [0, 1, 7, 8])
def test_a_value_is_needed_where_it_was_written(shift: int) -> None:
    """A nest that reads `shift` elements ahead of one that writes eight follows it in one loop only
    where it meets what the same iteration wrote, or nothing of it."""
    b = Build()
    x, between, out = b.input(16), b.buffer((16,)), b.buffer((8,))
    (i,) = b.loops(8)
    earlier = b.nest([i], Store(between, i, b.at(x, i)))
    later = b.nest([i], Store(out, i, b.at(between, ix.add(i, shift))))
    shifted = f"{between} is needed at other points of the shared loops"
    assert conflict(earlier, later, (i,)) == ("" if shift in (0, 8) else shifted)
    ahead = b.nest([i], Store(between, ix.add(i, shift), b.at(x, i)))
    assert conflict(later, ahead, (i,)) == "", "what it read is overwritten in the same iteration"


def test_rows_that_reach_into_the_next_are_not_a_block() -> None:
    """A nest over rows of ten follows one that wrote them, in one loop over rows, where it stays
    within each."""
    b = Build()
    x, between = b.input(64), b.buffer((64,))
    i, j, k, m = b.loops(4, 10, 9, 5)
    row = ix.mul(i, 10)
    wrote = b.nest([i, j], Store(between, ix.add(row, j), b.at(x, j)))

    def reads(at: Expr, *loops: Expr) -> Nest:
        out = b.buffer(tuple(v.src[0].arg for v in loops))
        return b.nest(list(loops), Store(out, b.index(out, *loops), b.at(between, at)))

    shifted = f"{between} is needed at other points of the shared loops"
    assert conflict(wrote, reads(ix.add(row, j), i, j), (i,)) == ""
    assert conflict(wrote, reads(ix.add(row, k, 1), i, k), (i,)) == "", "the rest of its row"
    assert conflict(wrote, reads(ix.add(row, j, 1), i, j), (i,)) == shifted
    (longer,) = b.loops(15)
    assert conflict(wrote, reads(ix.add(row, longer), i, longer), (i,)) == shifted
    some = b.nest([i, m], Store(between, ix.add(row, ix.mul(m, 2)), b.at(x, m)))
    assert conflict(some, reads(ix.add(row, m), i, m), (i,)) == ""
    assert conflict(some, reads(ix.add(row, ix.mul(m, 3)), i, m), (i,)) == shifted


def test_what_overlapping_rows_read_is_not_overwritten_beside_them() -> None:
    b = Build()
    x, out = b.buffer((64,)), b.buffer((4, 10))
    i, j = b.loops(4, 10)
    for step, why in ((10, ""), (5, f"{x} is needed at other points of the shared loops")):
        row = ix.mul(i, step)
        read = b.nest([i, j], Store(out, b.index(out, i, j), b.at(x, ix.add(row, j))))
        first = b.nest([i], Store(x, row, build.op("neg", b.at(out, i, ix.ZERO))))
        assert conflict(read, first, (i,)) == why


def test_a_sum_is_complete_only_after_its_loop() -> None:
    b = Build()
    x, total, out = b.buffer((4, 6)), b.buffer((4,)), b.buffer((4, 6))
    i, j = b.loops(4, 6)
    sums = b.nest([i], Store(total, i, build.reduce("sum", b.at(x, i, j))), reduce=[j])
    then = b.nest([i, j], Store(out, b.index(out, i, j), b.at(total, i)))
    assert conflict(sums, then, (i,)) == ""
    incomplete = "is complete only after the loop over the group"
    assert conflict(sums, then, (i, j)) == f"{total} {incomplete}"
    change = b.nest([i, j], Store(x, b.index(x, i, j), b.at(out, i, j)))
    assert conflict(sums, change, (i,)) == "", "a row is read whole before it is changed"
    assert conflict(sums, change, (i, j)) == f"{x} {incomplete}"


def asked_of(earlier: Nest, later: Nest, outer: tuple[Expr, ...]) -> set[str]:
    """What stands against one kernel of the two, whoever is asked; align may be given either
    first."""
    position = {earlier.name: 0, later.name: 1}
    one, other = Fit((earlier,), outer), Fit((later,), outer)
    fits = align(one, other, position), align(other, one, position)
    for fit in fits:
        if isinstance(fit, Fit):
            assert [m.name for m in fit.members] == [earlier.name, later.name]
    reasons = (fit.reason if isinstance(fit, Misfit) else "" for fit in fits)
    return {conflict(earlier, later, outer), first_conflict((earlier, later), outer), *reasons}


@pytest.mark.parametrize("kind", ["read after write", "write after read", "write after write"])
def test_whatever_meets_at_other_points_is_apart(kind: str) -> None:
    """Iterations run in any order: one must not change what another reads or writes."""
    first, _, second = kind.partition(" after ")[::-1]
    b = Build()
    x, y, common, out = b.input(8), b.input(8), b.buffer((9,)), b.buffer((8,))
    (i,) = b.loops(8)

    def touching(how: str, at: Expr, other: str) -> Nest:
        store = Store(common, at, b.at(other, i))
        return b.nest([i], store if how == "write" else Store(out, i, b.at(common, at)))

    earlier = touching(first, i, x)
    assert asked_of(earlier, touching(second, i, y), (i,)) == {""}
    elsewhere = f"{common} is needed at other points of the shared loops"
    assert asked_of(earlier, touching(second, ix.add(i, 1), y), (i,)) == {elsewhere}


def test_each_nest_is_asked_about_all_before_it() -> None:
    b = Build()
    x, common = b.input(9), b.buffer((9,))
    (i,) = b.loops(8)
    nests = [b.nest([i], Store(common, i, b.at(x, i)))]
    for shift in (0, 1):
        nests.append(b.nest([i], Store(b.buffer((8,)), i, b.at(common, ix.add(i, shift)))))
    assert first_conflict(nests[:2], (i,)) == first_conflict(nests[1:], (i,)) == ""
    assert first_conflict(nests, (i,)) == f"{common} is needed at other points of the shared loops"
    assert first_conflict(nests, (i,), {x}) == ""


def test_how_far_a_row_is_walked() -> None:
    """From its last element backwards, by steps of another length, and as far as a mask lets each
    of the loads; a store goes everywhere."""
    b = Build()
    x, common, out = b.input(10), b.buffer((64,)), b.buffer((4, 10))
    i, j = b.loops(4, 10)
    row = ix.mul(i, 10)
    wrote = b.nest([i, j], Store(common, ix.add(row, j), b.at(x, j)))
    below = build.op("lt", j, ix.as_index(9))

    def reads(*values: Expr) -> str:
        value = values[0] if len(values) == 1 else build.op("add", *values)
        return conflict(wrote, b.nest([i, j], Store(out, b.index(out, i, j), value)), (i,))

    shifted = f"{common} is needed at other points of the shared loops"
    assert reads(b.at(common, ix.sub(ix.add(row, 9), j))) == ""
    assert reads(b.at(common, ix.sub(ix.add(row, 8), j))) == shifted
    assert reads(b.at(common, ix.add(ix.mul(i, 9), j))) == shifted
    after = ix.add(row, j, 1)
    some, every = b.at(common, after, mask=below), b.at(common, after)
    assert reads(some) == ""
    assert reads(every) == reads(some, every) == reads(every, some) == shifted
    moves = b.nest([i, j], Store(common, after, some))
    assert conflict(wrote, moves, (i,)) == shifted


def test_kernels_share_the_loops_along_which_all_step_alike() -> None:
    """Of rows and columns only the rows, where a row is read the other way round; only the columns,
    where all read one row; none, where the rows come the other way round."""
    b = Build()
    x, common, out = b.input(4, 6), b.buffer((4, 6)), b.buffer((4, 6))
    i, j = b.loops(4, 6)
    place = b.index(out, i, j)
    first = b.nest([i, j], Store(common, place, b.at(x, i, j)))
    position = {first.name: 0}

    def shared(value: Expr) -> list[int] | str:
        then = b.nest([i, j], Store(out, place, value))
        fit = align(Fit((first,), (i, j)), Fit((then,), (i, j)), position | {then.name: 1})
        if isinstance(fit, Misfit):
            return fit.reason
        return [ix.value_of(v.src[0]) or 0 for v in fit.outer]

    assert shared(b.at(common, i, j)) == [4, 6]
    assert shared(b.at(common, i, ix.sub(5, j))) == [4]
    assert shared(b.at(common, i, ix.ZERO)) == [4]
    assert shared(b.at(common, ix.ZERO, j)) == [6]
    elsewhere = f"{common} is needed at other points of the shared loops"
    assert shared(b.at(common, ix.sub(3, i), j)) == elsewhere
    assert shared(b.at(common, i, ix.add(j, 1))) == elsewhere


def test_loops_correspond_by_stride_and_extent() -> None:
    """A longer loop is split to meet a shorter one, and one without a counterpart keeps out of the
    way of the others' names."""
    b = Build()
    x = b.input(6, 8)
    i, j = b.loops(6, 8)
    (flat,) = b.loops(48)
    few, most = b.loops(6, 7)

    def nest(loops: tuple[Expr, ...], at: Expr) -> Nest:
        out = b.buffer(tuple(ix.value_of(v.src[0]) or 0 for v in loops))
        return b.nest(loops, Store(out, b.index(out, *loops), build.op("neg", load_of(x, at))))

    def load_of(buffer: str, at: Expr) -> Expr:
        return load(buffer, b.program.buffers[buffer].dtype, at)

    def aligned(one: Nest, other: Nest) -> Fit | Misfit:
        return align(Fit((one,), one.loops), Fit((other,), other.loops),
                     {one.name: 0, other.name: 1})  # fmt: skip

    row = ix.add(ix.mul(i, 8), j)
    whole, rows = nest((flat,), flat), nest((i, j), row)
    for fit in (aligned(rows, whole), aligned(whole, rows)):
        assert isinstance(fit, Fit)
        assert [ix.value_of(v.src[0]) for v in fit.outer] == [6, 8]
        assert {m.loops for m in fit.members} == {fit.outer}
    part = aligned(rows, nest((few, most), ix.add(ix.mul(few, 8), most)))
    assert isinstance(part, Fit) and part.outer == (i,)
    one, other = part.members
    assert one.loops[0] is other.loops[0] and len({one.loops[1].arg, other.loops[1].arg}) == 2
    assert aligned(rows, nest((most,), most)) == Misfit("no loops in common")
    p, q = b.loops(6, 6)
    square = (p, q)
    along, across = (nest(square, ix.add(ix.mul(p, s), ix.mul(q, t))) for s, t in ((6, 1), (1, 6)))
    turned = aligned(along, across)
    assert isinstance(turned, Fit)
    assert turned.members[0].indices[x] == turned.members[1].indices[x]
    serial = Fit((rows,), (i,), (j,))
    together = align(serial, Fit((whole,), (flat,)), {})
    assert together == Misfit("their loops run one after the other")


def test_what_an_access_touches() -> None:
    """Told by strides, extents and where it starts; what loops are called says nothing."""
    i, j, short = var("i", ix.as_index(10)), var("j", ix.as_index(10)), var("i", ix.as_index(9))
    once = var("k", ix.ONE)
    row = ix.add(ix.mul(i, 4), 3)
    assert signature(row) == signature(ix.add(ix.mul(j, 4), 3)) == signature(ix.add(row, once))
    others = [ix.add(ix.mul(i, 4), 2), ix.add(ix.mul(i, 5), 3), ix.add(ix.mul(short, 4), 3),
              ix.add(row, j), ix.mod(row, 7)]  # fmt: skip
    assert len({signature(e) for e in (row, *others)}) == 6
    found = terms(ix.add(row, j), (i,))
    assert found is not None and found[0] == {i: ix.as_index(4)} and found[1] is ix.add(j, 3)
    assert terms(ix.mod(row, 7), (i,)) is None


def test_what_runs_backwards_or_past_its_row_is_not_apart() -> None:
    i, j = var("i", ix.as_index(4)), var("j", ix.as_index(5))
    row, back = ix.mul(i, 10), ix.sub(3, i)
    assert disjoint(back, ix.add(i, 4)) and not disjoint(back, ix.add(i, 3))
    assert disjoint(ix.sub(-1, i), i) and not disjoint(ix.neg(i), i)
    left = ix.sub(ix.add(row, 4), j)  # the first five of each row, from the last
    assert disjoint(left, ix.add(row, j, 5)) and not disjoint(ix.sub(left, 1), ix.add(row, j, 5))
    assert not disjoint(row, ix.add(ix.mul(j, 10), ix.ZERO)), "the same, and one row more"
    assert not disjoint(row, row)


def test_sums_into_places_are_a_kernel_of_their_own() -> None:
    """What reads the places waits until all is added: it is not in the kernel that adds."""

    def function(x: Tensor, at: Tensor) -> Tensor:
        return torch.zeros(5).index_add(0, at, x).exp() * 2

    x, at = torch.randn(40), torch.randint(0, 5, (40,))
    metrics.reset()
    with config.patch(force_disable_caches=True):
        found = compiled(function)(x, at)
    torch.testing.assert_close(found, function(x, at), rtol=1e-4, atol=1e-4)
    assert metrics.generated_kernel_count == 3
