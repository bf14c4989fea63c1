"""The honest counter, kernel by kernel (BM-2), and the compatible one where the two part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright
from tests.fuzz.build import Build
from tests.traffic import Case, count
from tilewright.ir.program import Store
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.traffic import moved

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
