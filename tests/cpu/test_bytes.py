"""The honest counter, kernel by kernel (BM-2), and the compatible one where the two part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright
from tests.fuzz.build import Build
from tests.traffic import Case, count
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.program import Opaque, Store, View
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.traffic import Traffic, accessed, moved, traffic

MILLION = 1_000_000


def bytes_of(program: Callable[..., Any], *inputs: Tensor) -> list[int]:
    (graph,) = tilewright.explain(program)(*inputs).graphs
    return [part.moved for part in graph.parts]


def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype)


def test_bm_2_in_place() -> None:
    def f(x: Tensor) -> None:
        x.add_(1)

    assert bytes_of(f, empty(1000, 1000)) == [8 * MILLION]


def test_bm_2_unused_input() -> None:
    half = torch.float16
    found = bytes_of(lambda a, b, c: a + c, *(empty(5, MILLION, dtype=half) for _ in range(3)))
    assert found == [30 * MILLION]


def test_bm_2_reduction() -> None:
    found = bytes_of(lambda a: a.sum(1), empty(1000, 20, 1000, dtype=torch.float16))
    assert found == [42 * MILLION]


def test_bm_2_norm() -> None:
    x, w = empty(1000, 1000), empty(1000)
    found = bytes_of(lambda x, w: torch.nn.functional.layer_norm(x, (1000,), w, w), x, w)
    assert found == [8 * MILLION + 4000]


def test_bm_2_slice_add() -> None:
    # only the slice of `a` is read
    found = bytes_of(lambda a, b: a[:, :1000] + b, empty(1000, 3000), empty(1000, 1000))
    assert found == [12 * MILLION]


def test_bm_2_two_slices_and_the_same_slice_twice() -> None:
    a = empty(1000, 1000)
    assert bytes_of(lambda a: a[:, :500] + a[:, 500:], a) == [6 * MILLION]
    assert bytes_of(lambda a: (a[:, :500] + 1) * a[:, :500], a) == [4 * MILLION]
    both = bytes_of(lambda a: (a[:, :500].sum(1), a[:, :500].cos()), a)
    assert sum(both) == 4 * MILLION + 4000


def test_bm_2_slice_beside_what_is_computed() -> None:
    """0.052 GB: of one operand a slice is read, and both are written beside each other."""
    a, b = empty(1000, 3000), empty(1000, 5500)
    found = bytes_of(lambda a, b: torch.cat([a[:, :1000] + 1, b]), a, b[:, :1000].clone())
    assert found == [4 * (MILLION + MILLION + 2 * MILLION)]
    whole = bytes_of(lambda a, b: torch.cat([a[:, :1000] + 1, b], 1), a, b)
    assert sum(whole) == 4 * 2 * (MILLION + 5 * MILLION + MILLION // 2) == 52 * MILLION


def test_bm_2_scatter() -> None:
    """0.200 GB: places, what is added there, and the target both ways."""

    def f(x: Tensor, i: Tensor, y: Tensor) -> None:
        x.index_add_(0, i, y)

    n = 8 * MILLION + MILLION // 3
    given = empty(n), torch.zeros(n, dtype=torch.int64), empty(n)
    found = bytes_of(f, *given)
    assert found == [n * (8 + 4 + 4 + 4)]


def test_bm_2_scan_of_one_row() -> None:
    """0.400 GB: what is scanned in parts is read and written once."""
    assert sum(bytes_of(lambda a: a.cumsum(0), empty(50 * MILLION))) == 400 * MILLION


def test_bm_2_product_of_a_slice() -> None:
    found = bytes_of(lambda a, b: a[:500] @ b, empty(3000, 100), empty(100, 1000))
    assert found == [4 * (500 * 100 + 100 * 1000 + 500 * 1000)]


def test_bm_2_scan() -> None:
    assert sum(bytes_of(lambda a: a.cumsum(1), empty(1000, 1000))) == 8 * MILLION


def test_what_a_kernel_has_written_it_does_not_read() -> None:
    """A result that the same kernel uses is stored, and is still at hand."""

    def function(a: Tensor) -> tuple[Tensor, Tensor]:
        b = a.sum(1, keepdim=True)
        return b, a - b

    assert bytes_of(function, empty(100, 100)) == [4 * (100 * 100 + 100 + 100 * 100)]


@pytest.mark.parametrize("written", [8, 4])
def test_part_of_a_buffer_that_a_kernel_wrote_is_not_read(written: int) -> None:
    """What it did not write is."""
    b = Build()
    x, between, out = b.input(16), b.buffer((16,)), b.buffer((8,))
    i, j = b.loops(8, written)
    first = b.nest([j], Store(between, j, b.at(x, j)))
    second = b.nest([i], Store(out, i, b.at(between, i)))
    found = moved(b.program, Group((first, second), ()), {between})
    again = 0 if written == 8 else 8
    assert found == {x: 4 * written, between: 4 * (written + again), out: 4 * 8}


# ---- group by group, of programs written by hand


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64])
def test_elements_count_by_the_bytes_of_their_own_type(dtype: torch.dtype) -> None:
    """In a kernel and in a call, read and written."""
    b = Build()
    x, wide, end = b.input(10, dtype=dtype), b.buffer((10,), torch.int16), b.buffer((10,), dtype)
    (i,) = b.loops(10)
    kernel = Group((b.nest([i], Store(wide, i, build.cast(b.at(x, i), torch.int16))),))
    call = Group(call=b.call(torch.ops.aten.clone.default, (b.view(wide),), end))
    size = 10 * dtype.itemsize
    assert moved(b.program, kernel, {x}) == {x: size, wide: 20}
    assert moved(b.program, call, {x, wide}) == {wide: 20, end: size}
    assert accessed(b.program, kernel) == accessed(b.program, call) == size + 20


def test_a_call_that_writes_a_part_of_a_buffer_is_charged_that_part() -> None:
    """Where its only result is put: in neither count is it the whole, nor is it read."""
    b = Build()
    x, whole = b.input(4, 5), b.buffer((4, 30))
    window = replace(b.view(whole), size=b.view(x).size, offset=ix.as_index(10))
    call = b.call(torch.ops.aten.neg.default, (b.view(x),), None)
    group = Group(call=replace(call, results=(), out=window))
    for filled in ({x}, {x, whole}):
        assert moved(b.program, group, filled) == {x: 4 * 20, whole: 4 * 20}
    assert accessed(b.program, group) == 4 * (20 + 20)


def changing(b: Build, target: View, *args: View) -> Opaque:
    call = b.call(torch.ops.aten.add_.Tensor, (target, *args), None)
    return replace(call, results=(), mutates=(target.buffer,))


def test_what_a_call_changes_it_reads_and_writes() -> None:
    """As far as its window goes; what holds nothing yet, or is only filled, is written alone."""
    b = Build()
    x, target = b.input(3), b.buffer((30,))
    part = replace(b.view(target), size=b.view(x).size)
    call = changing(b, part, b.view(x))
    for filled, fills, times in (({x, target}, (), 2), ({x}, (), 1), ({x, target}, (target,), 1)):
        group = Group(call=replace(call, fills=fills))
        assert moved(b.program, group, filled) == {x: 12, target: times * 12}
        assert accessed(b.program, group) == 12 + 2 * 4 * 30, "the compatible count knows no part"


def test_a_call_is_charged_for_a_buffer_once_however_often_it_is_given() -> None:
    """Two windows count for what each touches, equal ones once, and never more than there is."""
    b = Build()
    x, out = b.input(10), b.buffer((10,))

    def of(*windows: tuple[int, int]) -> dict[str, int]:
        given = [replace(b.view(x), size=(ix.as_index(n),), offset=ix.as_index(at))
                 for at, n in windows]  # fmt: skip
        call = b.call(torch.ops.aten.cat.default, (given,), out)
        return moved(b.program, Group(call=call), {x})

    assert of((0, 3), (5, 2)) == {x: 4 * 5, out: 4 * 10}
    assert of((0, 3), (0, 3)) == {x: 4 * 3, out: 4 * 10}
    assert of((0, 8), (1, 8)) == {x: 4 * 10, out: 4 * 10}


def test_what_overlaps_counts_no_more_than_there_is() -> None:
    b = Build()
    x, out = b.input(10), b.buffer((10,))
    (i,) = b.loops(8)
    total = build.op("add", b.at(x, i), b.at(x, ix.add(i, 2)))
    last = Store(out, ix.add(i, 2), total)
    assert moved(b.program, Group((b.nest([i], Store(out, i, total), last),)), {x}) == {
        x: 40, out: 40}  # fmt: skip


def test_what_a_scatter_adds_to_is_read_as_often_as_it_is_written() -> None:
    """Once for each value at looked-up places, and no more than there is."""
    for places, times in ((6, 6), (50, 10)):
        b = Build()
        x, at, out = b.input(places), b.input(places, dtype=torch.int64), b.buffer((10,))
        (i,) = b.loops(places)
        place = build.op("index", b.at(at, i), ix.as_index(10))
        adds = Group((b.nest([i], Store(out, place, b.at(x, i), "add")),))
        given = {x: 4 * places, at: 8 * places}
        assert moved(b.program, adds, {x, at, out}) == {**given, out: 2 * 4 * times}
        assert accessed(b.program, adds) == 12 * places + 4 * (times + min(10, places))
        puts = Group((b.nest([i], Store(out, place, b.at(x, i))),))
        assert moved(b.program, puts, {x, at, out}) == {**given, out: 4 * times}
        assert accessed(b.program, puts) == accessed(b.program, adds), "its target is read too"


def test_all_that_is_added_to_a_place_counts() -> None:
    b = Build()
    x, at, out = b.input(3, 2), b.input(3, dtype=torch.int64), b.buffer((10,))
    i, j = b.loops(3, 2)
    place = build.op("index", b.at(at, i), ix.as_index(10))
    adds = Group((b.nest([i, j], Store(out, place, b.at(x, i, j), "add")),))
    assert moved(b.program, adds, {x, at, out}) == {x: 24, at: 24, out: 2 * 24}


def test_a_store_under_a_mask_may_leave_what_was_there() -> None:
    b = Build()
    x, out, end = b.input(8), b.buffer((8,)), b.buffer((8,))
    (i,) = b.loops(8)
    below = build.op("lt", i, ix.as_index(5))
    first = b.nest([i], Store(out, i, b.at(x, i), mask=below))
    then = b.nest([i], Store(end, i, b.at(out, i)))
    assert moved(b.program, Group((first, then)), {x, out}) == {x: 32, out: 64, end: 32}
    whole = replace(first, stores=(replace(first.stores[0], mask=None),))
    assert moved(b.program, Group((whole, then)), {x, out}) == {x: 32, out: 32, end: 32}
    assert accessed(b.program, Group((first, then))) == 4 * (8 + 2 * 8 + 8)
    assert accessed(b.program, Group((whole, then))) == 4 * (8 + 8 + 8)


def test_what_was_written_whole_is_not_read_however_it_is_walked() -> None:
    """What was read of it before that is."""
    b = Build()
    x, between, out = b.input(8), b.buffer((8,)), b.buffer((8,))
    (i,) = b.loops(8)
    first = b.nest([i], Store(between, i, b.at(x, i)))
    back = b.nest([i], Store(out, i, b.at(between, ix.sub(7, i))))
    size = {x: 32, between: 32, out: 32}
    assert moved(b.program, Group((first, back)), {x, between}) == size
    assert moved(b.program, Group((back, first)), {x, between}) == {**size, between: 64}
    assert accessed(b.program, Group((first, back))) == 4 * 24
    assert accessed(b.program, Group((back, first))) == 4 * 32


def test_parts_of_a_launch_are_charged_one_by_one() -> None:
    """What both read counts twice."""
    b = Build()
    x, *outs = b.input(8), b.buffer((8,)), b.buffer((4,))
    (i,), (j,) = b.loops(8), b.loops(4)
    parts = (Group((b.nest([i], Store(outs[0], i, b.at(x, i))),)),
             Group((b.nest([j], Store(outs[1], j, b.at(x, j))),)))  # fmt: skip
    both = Group(parts=parts)
    assert moved(b.program, both, {x}) == {x: 4 * (8 + 4), outs[0]: 32, outs[1]: 16}
    assert accessed(b.program, both) == sum(accessed(b.program, part) for part in parts) == 96


def test_the_least_is_what_arguments_results_and_calls_need() -> None:
    """What passes from kernel to kernel is not in it; what a call takes or gives is. A buffer holds
    something once a group has written it, and what never leaves a kernel is not counted."""
    b = Build()
    x, passed, product, end = b.input(8), b.buffer((8,)), b.buffer((8,)), b.buffer((8,))
    (i,) = b.loops(8)
    first = Group((b.nest([i], Store(passed, i, b.at(x, i))),))
    second = Group((b.nest([i], Store(product, i, b.at(passed, i))),))
    call = Group(call=changing(b, b.view(product), b.view(x)))
    third = b.nest([i], Store(end, i, b.at(product, i)))
    groups = [first, second, call, Group((third,))]
    b.returns(end)
    assert traffic(b.program, groups) == [
        Traffic(64, 64, 32), Traffic(64, 64, 32), Traffic(96, 96, 96), Traffic(64, 64, 64),
    ]  # fmt: skip
    joined = replace(first, members=(*first.members, *second.members))
    assert traffic(b.program, [joined])[0] == Traffic(96, 96, 32)
    held = replace(joined, local=frozenset({passed}))
    assert traffic(b.program, [held])[0] == Traffic(64, 64, 32)


def test_a_product_of_two_parts_of_one_tensor_reads_both() -> None:
    found = bytes_of(lambda x: x[:5] @ x[5:].t(), empty(10, 8))
    assert found == [4 * (5 * 8 + 5 * 8 + 5 * 5)]


def test_gathers_by_extent() -> None:
    table, at = empty(10_000, 64), torch.zeros(50, dtype=torch.int64)
    assert bytes_of(lambda t, i: t[i].cos(), table, at) == [50 * 8 + 2 * 50 * 64 * 4]


@pytest.mark.parametrize(
    ("program", "inputs", "compatible", "honest"),
    [
        # C3: a fused kernel is charged the whole buffer, and so is a library call
        (lambda a: (a[:5].sum(1) + 1).cos(), "f32[10,10]", 105, 55),
        (lambda a: (a[:5].sum(1), a[:5].cos()), "f32[10,10]", 155, 105),
        (lambda a, b: a[:5] @ b, "f32[10,10] f32[10,10]", 250, 200),
        # C2: an unfused kernel at most its iterations
        (lambda a: a[:5] + 1, "f32[10,10]", 100, 100),
        (lambda a: a[:5] + a[5:], "f32[10,10]", 150, 150),  # for each way it walks a buffer
        (lambda a: a[:2] + a[2:4], "f32[10,10]", 60, 60),
        (lambda a: a + a.t(), "f32[10,10]", 200, 200),
    ],
)
def test_the_two_counters(program: Callable[..., Any], inputs: str, compatible: int,
                          honest: int) -> None:  # fmt: skip
    found = count(Case("", 0, program, inputs))
    assert (found.elements, found.moved) == (compatible, honest)
