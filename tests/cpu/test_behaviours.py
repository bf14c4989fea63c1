"""Specified behaviours that are facts of a schedule or of generated text: which kernels there are,
what they read, how often they walk a row. Little is built here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.cubin import kernels_of
from tests.cpu.test_reductions import alike
from tests.fuzz.build import Build
from tests.fuzz.stages import capture, first_wrong
from tests.programs import compiled
from tests.traffic import Case, block_mask, count
from tilewright import config, metrics
from tilewright.codegen.triton.plan.tiling import Shape, run_along, shape_of
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, var
from tilewright.ir.program import Nest, Store
from tilewright.schedule.fusion.legality import Fit, align
from tilewright.schedule.nests.transform import merge, split_divisions
from tilewright.schedule.plan import Schedule

FP8 = torch.float8_e4m3fn


def plan_of(function: Callable[..., Any], *args: Any, **options: Any) -> Schedule:
    """Of the only graph, every stage of which gives eager's values."""
    found = capture(function, *args, **options)
    wrong = first_wrong(found, alike)
    assert not wrong, wrong
    (graph,) = found.graphs
    return graph.plan


def kernels(plan: Schedule) -> list[tuple[str, ...]]:
    return [tuple(m.name for m in s.group.nodes if isinstance(m, Nest)) for s in plan.steps
            if s.group.is_kernel]  # fmt: skip


# ---- loops


def strides(nest: Nest, buffer: str) -> list[int | None]:
    """Steps through a buffer of the loops in order, those that are folded last."""
    (index,) = nest.indices[buffer]
    found = [ix.coefficient(index, v) for v in (*nest.loops, *nest.reduce)]
    return [None if step is None else ix.value_of(step) for step in found]


def test_lo_5_loops_are_not_turned_without_gain() -> None:
    """A fold, a pointwise op and a fold the other way: the large input is read as it lies."""

    def function(x: Tensor) -> Tensor:
        return x.sum(-1).exp().sum(0)

    plan = plan_of(function, torch.randn(48, 40, 24))
    first = next(m for s in plan.steps for m in s.group.members if "arg0" in m.reads)
    found = strides(first, "arg0")
    assert found == sorted(found, key=lambda n: -(n or 0))


def test_lo_6_what_only_has_to_come_first_does() -> None:
    """The gradient of an embedding is scattered from `g`, which is changed afterwards."""

    def function(g: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        scattered = torch.ops.aten.embedding_dense_backward(g, i, 30, -1, False)
        turned = g.t().contiguous()
        g.mul_(2)
        return scattered, turned + 1

    found = capture(function, torch.randn(20, 8), torch.randint(0, 30, (20,)))
    assert not first_wrong(found, alike)
    order = [node.name for s in found.graphs[0].plan.steps for node in s.group.nodes]
    nodes = {node.name: node for node in found.graphs[0].plan.program.nodes}
    last = max(k for k, n in enumerate(order) if "arg0" in nodes[n].writes)
    assert all("arg0" not in nodes[n].reads for n in order[last + 1 :])


def test_lo_10_fp8_cast_and_its_transposed_copy() -> None:
    def function(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        small = (x * scale).to(FP8)
        return small, small.t().contiguous()

    found = count(Case("fp8", 0, function, "f32[256,512] f32[1]"))
    assert (found.kernels, found.elements) == (1, 1 + 256 * 512 * 6 // 4)
    (on_a_card,) = kernels_of(function, torch.empty(256, 512), torch.empty(1))
    assert on_a_card.text.count("tl.load(") == 2
    # bytes by the card's own instruction came out wrong in one of the two
    assert "tri_fp8.rounded(" in on_a_card.text and "at_once(" not in on_a_card.text
    (alone,) = kernels_of(lambda x, s: function(x, s)[1], torch.empty(256, 512), torch.empty(1))
    assert "tri_fp8.at_once(" in alone.text


def transposed_sum() -> tuple[Build, tuple[Expr, Expr], str, str, str]:
    """x[i, j] + y[j, i] into z[i, j]."""
    b = Build()
    x, y, z = b.input(64, 96), b.input(96, 64), b.buffer((64, 96))
    i, j = b.loops(64, 96)
    b.nest([i, j], Store(z, b.index(z, i, j), build.op("add", b.at(x, i, j), b.at(y, j, i))))
    return b, (i, j), x, y, z


def test_lo_14_bytes_that_are_contiguous_along_each_loop() -> None:
    b, (i, j), *_ = transposed_sum()
    (nest,) = b.program.nodes
    assert isinstance(nest, Nest)
    whole = 64 * 96 * 4
    assert run_along(b.program, [nest], [i, j]) == {i: whole, j: 2 * whole}


def test_lo_14_positions_read_from_memory_are_contiguous_along_nothing() -> None:
    plan = schedule_of(lambda x, i: x[i], torch.randn(90), torch.randint(0, 90, (70,)))
    (step,) = plan.steps
    (nest,) = step.group.members
    (loop,) = nest.loops
    assert run_along(plan.program, [nest], [loop]) == {loop: 70 * 8 + 70 * 4}


def schedule_of(function: Callable[..., Any], *args: Any) -> Schedule:
    (graph,) = capture(function, *args).graphs
    return graph.plan


def pass_through(b: Build, source: str, target: str, loops: tuple[Expr, ...]) -> Nest:
    flat = len(b.program.buffers[target].size) == 1
    size = [v.src[0] for v in loops]
    at = ix.linearize(loops, ix.contiguous_strides(size))
    value = build.op("exp", b.at(source, at) if len(b.program.buffers[source].size) == 1
                     else b.at(source, *loops))  # fmt: skip
    b.nest(list(loops), Store(target, at if flat else b.index(target, *loops), value))
    found = b.program.nodes[-1]
    assert isinstance(found, Nest)
    return found


def test_lo_14_two_nests_get_the_loops_both_can_be_cut_into() -> None:
    """60 elements walked 12 by 5 and 4 by 15 have loops of 4, 3 and 5 in common."""
    b = Build()
    x, middle, out = b.input(60), b.buffer((60,)), b.buffer((60,))
    p, q = var("p", ix.as_index(12)), var("q", ix.as_index(5))
    r, s = var("r", ix.as_index(4)), var("s", ix.as_index(15))
    one, two = pass_through(b, x, middle, (p, q)), pass_through(b, middle, out, (r, s))
    fit = align(Fit((one,), one.loops), Fit((two,), two.loops), {one.name: 0, two.name: 1})
    assert isinstance(fit, Fit)
    assert [ix.value_of(v.src[0]) for v in fit.outer] == [4, 3, 5]


def test_lo_14_the_factor_of_a_tile_comes_from_quotients_and_remainders() -> None:
    b = Build()
    x, out = b.input(12, 8), b.buffer((96,))
    (v,) = b.loops(96)
    b.nest([v], Store(out, v, b.at(x, ix.mod(v, 12), ix.floordiv(v, 12))))
    (nest,) = b.program.nodes
    assert isinstance(nest, Nest)
    cut = split_divisions(nest)
    assert [ix.value_of(u.src[0]) for u in cut.loops] == [8, 12]
    assert not cut.ops & {"ifloordiv", "imod"}


def shape_for(function: Callable[..., Any], *args: Any) -> Shape:
    plan = schedule_of(function, *args)
    (step,) = plan.steps
    shape = shape_of(plan.program, step.group)
    assert isinstance(shape, Shape)
    return shape


TILED: dict[str, tuple[int, Callable[..., Any], list[tuple[int, ...]]]] = {
    "one layout": (1, lambda x, y: x + y, [(64, 96)] * 2),
    "two layouts": (2, lambda x, y: x + y.t(), [(64, 96), (96, 64)]),
    "three layouts": (3, lambda a, b, c: a + b.permute(1, 2, 0) + c.permute(2, 0, 1),
                      [(32, 32, 32)] * 3),
    "a tiny dimension": (1, lambda x, y: x + y.t(), [(2, 4096), (4096, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("name", TILED)
def test_lo_15_the_rank_of_a_tile_follows_the_layouts(name: str) -> None:
    rank, function, sizes = TILED[name]
    assert len(shape_for(function, *map(torch.randn, sizes)).parallel) == rank


def test_lo_15_loops_become_one_only_where_the_map_is_undone() -> None:
    """A mixed-radix index is taken apart again; one that visits elements twice is not."""
    b = Build()
    x, out = b.input(60), b.buffer((60,))
    p, q = var("p", ix.as_index(12)), var("q", ix.as_index(5))
    nest = pass_through(b, x, out, (p, q))
    found = merge([nest], p, q)
    assert found is not None and ix.value_of(found[1].src[0]) == 60
    overlapping = Build()
    x, out = overlapping.input(60), overlapping.buffer((12, 5))
    i, j = overlapping.loops(12, 5)
    value = overlapping.at(x, ix.add(i, j))
    overlapping.nest([i, j], Store(out, overlapping.index(out, i, j), value))
    (nest,) = overlapping.program.nodes
    assert isinstance(nest, Nest)
    assert merge([nest], i, j) is None


def test_pf_30_which_blocks_have_neighbours_is_never_stored_by_position() -> None:
    """1024 by 1024 answers are folded into those of 8 by 8 blocks: nothing that is stored is larger
    than a number for each position."""
    plans = [graph.plan for graph in capture(block_mask).graphs]
    sizes = [ix.likely(b.numel) for plan in plans for b in plan.program.buffers.values()]
    assert max(sizes) == 1024
    kept = {b for plan in plans for s in plan.steps for b in s.group.local}
    assert len(sizes) - len(kept) < 40


# ---- softmax


def loops_over_rows(function: Callable[..., Any], *size: int) -> list[int]:
    """Of each kernel; the last block of a row, with masks, may have a loop beside the others'."""
    walks = re.compile(r"for \w+ in (?!range\(rfull,|range\(\w+, rrest,)")
    return [len(walks.findall(k.text)) for k in kernels_of(function, torch.empty(size))]


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_os_1_long_rows_are_walked_twice_and_short_ones_held(name: str) -> None:
    function = getattr(torch, name)
    assert loops_over_rows(lambda x: function(x, 1), 512, 50304) == [2]
    assert loops_over_rows(lambda x: function(x, 1), 4096, 1024) == [0]
    assert loops_over_rows(lambda x: function(x, 1), 4096, 2048) == [0]


def test_os_5_a_huge_row_is_folded_in_parts_and_a_row_of_one_not_at_all() -> None:
    assert loops_over_rows(lambda x: x.softmax(1), 4096, 1) == [0]
    parts = kernels_of(lambda x: x.softmax(1), torch.empty(1, 1 << 22))
    assert [k.name.split("_")[1] for k in parts] == ["red", "red", "per", "poi"]
    assert loops_over_rows(lambda x: x.softmax(1), 1, 1 << 22) == [1, 1, 0, 0]


@pytest.mark.parametrize("dim", [0, 1])
def test_os_2_the_largest_and_the_sum_need_one_walk(dim: int) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        most = x.amax(dim, keepdim=True)
        return most, (x - most).exp().sum(dim, keepdim=True)

    size = (4096, 20000) if dim == 1 else (20000, 65536)
    assert loops_over_rows(function, *size) == [1]


def test_os_6_attention_is_left_to_the_library_and_turned_operands_are_one_kernel() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    plan = plan_of(attention, *torch.randn(3, 2, 4, 16, 8))
    calls = [s.group.call for s in plan.steps if s.group.call is not None]
    assert any("attention" in str(c.target) for c in calls)
    assert loops_over_rows(lambda x: x.permute(0, 2, 1).softmax(-1), 8, 20000, 512) == [2]


# ---- shared launches


def test_ck_6_shared_launches_follow_the_sizes_of_each_call() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return a.sin(), b.cos() + 1, c.exp()

    with config.patch(combo_kernels=True):
        metrics.reset()
        run = compiled(function, dynamic=True)
        for sizes in ((10, 20, 30), (500, 3, 70), (2, 900, 4)):
            inputs = [torch.randn(n) for n in sizes]
            torch.testing.assert_close(run(*inputs), function(*inputs))
        assert metrics.generated_kernel_count == 1


@pytest.mark.parametrize(("shared", "launches"), [(False, 3), (True, 2)])
def test_ck_7_beside_rows_with_columns_and_single_numbers(shared: bool, launches: int) -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return x.sum(0), x.sum(1), y.sum(), z.amax() + 1, y.sin(), (z * z).cos()

    inputs = torch.randn(64, 8), torch.randn(33), torch.randn(21)
    with config.patch(combo_kernels=shared):
        plan = plan_of(function, *inputs)
    assert [bool(step.group.serial) for step in plan.steps].count(True) == 1
    assert len(kernels(plan)) == launches


# ---- padding


def test_pd_2_what_is_seen_has_eager_strides() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.transpose(1, 2) + 1
        return y.sum(1), y.sum(1, keepdim=True).expand(3, 9, 17), y, x.amax(2, keepdim=True)

    x = torch.randn(3, 17, 9)
    graph, args = capture(function, x).calls[0]
    for ours, theirs in zip(graph.run("fused", args), graph.run("eager", args), strict=True):
        assert ours.stride() == theirs.stride()


def test_pd_5_a_padded_concatenation_is_written_once() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return F.pad(torch.cat([a.sin(), b * 2], 1), (0, 3), value=0.5)

    plan = plan_of(function, torch.randn(10, 7), torch.randn(10, 6))
    assert len(kernels(plan)) == 1
    assert count(Case("pad", 0, function, "f32[10,7] f32[10,6]")).elements == 10 * (7 + 6 + 16)
    made = [b for b in plan.program.buffers.values() if b.kind != "input"]
    kept = [b for b in made if not any(b.name in s.group.local for s in plan.steps)]
    assert len(kept) == 1


PADDED: dict[str, tuple[Callable[..., Any], int, int]] = {
    "a product": (lambda a, b: F.pad(a @ b, (0, 6), value=2.0), 1, 100 + 100 + 160),
    "an argument": (lambda a, b: F.pad(a, (0, 6)), 1, 100 + 160),
    "what is fused anyway": (lambda a, b: F.pad(a.exp() + b, (0, 6)), 1, 100 + 100 + 160),
    "what is also returned": (lambda a, b: (c := a @ b, F.pad(c, (0, 6))), 1, 560),
}


@pytest.mark.parametrize("name", PADDED)
def test_pd_6_padding_on_the_right_is_written_around_its_source(name: str) -> None:
    function, made, elements = PADDED[name]
    assert len(kernels(plan_of(function, torch.randn(10, 10), torch.randn(10, 10)))) == made
    assert count(Case(name, 0, function, "f32[10,10] f32[10,10]")).elements == elements


def test_pd_6_what_is_padded_may_change_before_and_after() -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        c = a @ b
        c.add_(1)
        padded = F.pad(c, (0, 6), value=2.0)
        c.mul_(3)
        padded[:, -1] = 7
        return padded, c

    plan_of(function, torch.randn(10, 10), torch.randn(10, 10))
