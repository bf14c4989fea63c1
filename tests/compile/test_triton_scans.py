"""Scans of rows that are held, walked by one program or by several, and of columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tests.pretend import pretended
from tilewright.ir.expr import walk as nodes_of
from tilewright.ir.program import Nest
from tilewright.lower.graph import lower
from tilewright.testing import limited

BF16 = torch.bfloat16
LONG = 17001  # elements of a row that no program holds
Case = tuple[Callable[[Tensor], Any], tuple[int, ...], torch.dtype]


def _numbers(*size: int, dtype: torch.dtype) -> Tensor:
    """In the first row some are infinite, and in the second all are, where they can be."""
    torch.manual_seed(0)
    made = 3 * torch.randn(*size)
    if dtype.is_floating_point:
        made[0, 7::1000] = -torch.inf
        made[1] = -torch.inf
    return made.to(dtype) if dtype != torch.bool else made > 0


# ---- long rows

WALKED: dict[str, Case] = {
    "sum": (lambda x: x.cumsum(-1), (3, LONG), torch.float32),
    "sum of an even row": (lambda x: x.cumsum(-1), (LONG + 7,), torch.int32),
    "sum of what was computed": (lambda x: (x[:, 1:] * 2 + 1).cumsum(-1), (3, LONG), torch.float32),
    "largest and where": (lambda x: x.cummax(-1), (3, LONG), torch.float32),
    "exponentials backwards": (lambda x: x.flip(-1).logcumsumexp(-1), (3, LONG), torch.float32),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", WALKED)
def test_long_rows_are_walked_with_the_next_block_under_way(name: str, together: bool) -> None:
    fn, size, dtype = WALKED[name]
    with limited("SCAN_PROGRAMS", 2 * together):
        (kernel,) = check(fn, _numbers(*size, dtype=dtype), rtol=1e-4, atol=1e-4)
    assert kernel.text.count("for roffset in") == 1 + together
    assert kernel.ticketed == together
    before, within = kernel.text.split("for roffset in")[-2:]
    assert "tl.load(" in before
    assert within.index("tl.load(") < within.index("scan(")


def test_a_long_row_of_any_length_is_walked() -> None:
    for length in (LONG, LONG + 7):
        x = torch.randn(300, length).to(BF16)[:2]
        (kernel,) = check(lambda x: x.cumsum(-1), x, dynamic=True, rtol=2e-2, atol=2e-1)
        assert "tl.load(" in kernel.text.split("for roffset in")[0]


def test_long_odd_rows_are_moved_sixteen_bytes_at_once() -> None:
    (kernel,) = kernels_of(lambda x: x.cumsum(1), torch.empty(377, 87913))
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16
    assert made.spills == 0
    assert not kernel.counters  # these rows are enough


# ---- rows that are held

HELD: dict[str, Case] = {
    "sum": (lambda x: x.cumsum(-1), (9, 801), torch.float32),
    "wide sum": (lambda x: x.cumsum(-1, dtype=torch.float32), (9, 801), BF16),
    "largest and where": (lambda x: x.cummax(-1), (9, 801), torch.float32),
    "exponentials": (lambda x: x.logcumsumexp(-1), (9, 801), torch.float32),
}


@pytest.mark.parametrize("name", HELD)
def test_ends_of_odd_rows_are_scanned_beside_what_is_moved_at_once(name: str) -> None:
    fn, size, dtype = HELD[name]
    (kernel,) = check(fn, _numbers(*size, dtype=dtype), rtol=1e-4, atol=1e-4)
    assert "rtwo" in kernel.text


@pretended
def test_a_card_carries_floats_as_they_are() -> None:
    with FakeTensorMode():
        gm = make_fx(lambda x: (x.cumsum(-1), x.logcumsumexp(-1)))(torch.empty(4, 9, device="cuda"))
    program = lower(gm, frozenset({"cuda"}))
    nodes = [n for m in program.nodes if isinstance(m, Nest) for n in nodes_of(*m.exprs)]
    assert {n.dtype for n in nodes if n.op == "scan"} == {torch.float32}


def test_logarithms_are_taken_of_what_was_summed() -> None:
    """Once for each element, not for every two that are joined."""
    x = torch.randn(4, 900) * 30
    x[1, 500:] = torch.inf
    x[2, 77] = torch.nan
    (kernel,) = check(lambda x: x.logcumsumexp(-1), x, rtol=1e-6, atol=1e-6)
    assert kernel.text.count("tri_logs.log_of(") == 1


def test_a_thread_has_32_of_a_long_row_that_is_held() -> None:
    """With half as many, two rows at work on a processor leave memory idle."""
    x = torch.empty(8192, 8192, dtype=BF16)
    (kernel,) = kernels_of(lambda x: x.cumsum(-1, dtype=torch.float32), x)
    assert kernel.config.num_warps == 8


# ---- rows that are under way at once

UNDER_WAY: dict[str, Case] = {
    "sum": (lambda x: x.cumsum(-1), (5, 1003), BF16),
    "sum of an even row": (lambda x: (x * 2).cumsum(-1), (3, 1000), BF16),
    "exponentials of two warps": (lambda x: x.logcumsumexp(-1), (3, 515), torch.float16),
    "floats of two warps": (lambda x: x.cumsum(-1), (5, 403), torch.float32),
}


@pytest.mark.parametrize("name", UNDER_WAY)
def test_all_of_a_row_is_under_way_before_it_is_scanned(name: str) -> None:
    fn, size, dtype = UNDER_WAY[name]
    most = 2 if "two" in name else 4
    with (limited("PRELOADED_MISALIGNED", 0), limited("PRELOADED_ALIGNED", 0),
          limited("PRELOADED_PER_SM", 0), limited("PRELOADED_CHUNKS", most)):  # fmt: skip
        (kernel,) = check(fn, _numbers(*size, dtype=dtype), rtol=2e-2, atol=2e-1)
    before, within = kernel.text.split("scan(", 1)
    assert before.count("tl.load(") == -(-(size[1] + 7) // kernel.config.kwargs["RBLOCK"])
    assert "tl.load(" not in within and kernel.config.num_warps == 1 + ("two" in name)


def test_one_warp_scans_a_row_sixteen_bytes_at_once() -> None:
    (kernel,) = kernels_of(lambda x: x.cumsum(-1), torch.empty(7205, 4959, dtype=BF16))
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16
    assert made.spills == made.shared == 0


# ---- columns

COLUMNS: dict[str, Case] = {
    "sum": (lambda x: x.cumsum(1), (3, 37, 24), torch.float32),
    "sum of odd rows": (lambda x: x.cumsum(1), (3, 64, 19), BF16),
    "integers": (lambda x: x.cumsum(1), (3, 37, 24), torch.int32),
    "largest and where": (lambda x: x.cummax(1), (3, 37, 24), torch.float32),
    "exponentials": (lambda x: x.logcumsumexp(1), (3, 37, 24), torch.float32),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_thread_walks_a_column(name: str) -> None:
    fn, size, dtype = COLUMNS[name]
    with limited("SCAN_BYTES_PER_SM", 0):
        (kernel,) = check(fn, _numbers(*size, dtype=dtype), rtol=1e-4, atol=1e-4)
    assert kernel.config.num_warps in (1, 4)
    odd = size[-1] % 2
    assert ("tl.load(" in kernel.text.split("for roffset in")[0]) == bool(odd)


def test_threads_share_nothing_of_columns_they_scan() -> None:
    (kernel,) = kernels_of(lambda x: x.cumsum(1), torch.empty(34538, 64, 72, dtype=BF16))
    made = build(kernel, config=1)  # the first may not fit, with some compilers
    assert made.widest("ld.global") == made.widest("st.global") == 16
    assert made.spills == 0 and made.shared == 0 and "shfl" not in made.ptx
    assert kernel.config.kwargs["RBLOCK"] == 32


STACKED: dict[str, Case] = {
    "sum": (lambda x: x.cumsum(1), (3, 72, 99), BF16),
    "exponentials": (lambda x: x.logcumsumexp(1), (3, 64, 515), torch.float16),
    "of what was computed": (lambda x: (x * 0.25).exp().cumprod(1), (5, 64, 51), BF16),
}


@pytest.mark.parametrize("name", STACKED)
def test_odd_rows_are_moved_as_one_and_scanned_in_between(name: str) -> None:
    fn, size, dtype = STACKED[name]
    with limited("SCANNED_MATRICES_PER_SM", 0):
        (kernel,) = check(fn, _numbers(*size, dtype=dtype), rtol=2e-2, atol=1e-1)
    assert "tri_rows.in_a_row(" in kernel.text


@pytest.mark.parametrize("size", [(317, 352, 391), (34538, 64, 71)])
def test_odd_rows_as_one_are_moved_sixteen_bytes_at_once(size: tuple[int, ...]) -> None:
    (kernel,) = kernels_of(lambda x: x.cumsum(1), torch.empty(size, dtype=BF16))
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16
    assert made.spills == 0 and "shfl" not in made.ptx  # a thread has whole columns


def test_columns_that_all_run_at_once_have_rows_under_way() -> None:
    """Rows are added to addresses last: 64 registers let all programs run, 115 do not."""
    (kernel,) = kernels_of(lambda x: x.cumsum(1), torch.empty(60, 351, 2063, dtype=BF16))
    before, within = kernel.text.split("for roffset in")
    assert "rbase*2063" in before and within.count("rbase*2063") == 2
    assert "next" in before and kernel.config.kwargs["RBLOCK"] == 32


def test_few_columns_are_shared() -> None:
    (kernel,) = kernels_of(lambda x: x.cumsum(0), torch.empty(8192, 8192, dtype=BF16))
    assert kernel.config.num_warps > 1


@pytest.mark.parametrize("largest", [True, False])
def test_places_that_nobody_asks_for_are_neither_scanned_nor_stored(largest: bool) -> None:
    """Of two zeros the later one counts, and a NaN stays."""
    x = _numbers(6, 800, dtype=torch.float32)
    x[2] = torch.zeros(800).copysign(x[2])
    x[3, 300] = torch.nan
    (kernel,) = check(lambda x: (x.cummax(-1) if largest else x.cummin(-1))[0], x)
    assert "tl.int64" not in kernel.text and kernel.text.count("tl.store(") == 1
    signs = lambda x: torch.signbit((x.cummax(-1) if largest else x.cummin(-1))[0])  # noqa: E731
    check(signs, x[2:3])


def test_few_threads_scan_a_row_that_is_part_of_its_block() -> None:
    for size, warps in ((2520, 4), (4096, 8)):
        (kernel,) = kernels_of(lambda x: x.cummax(-1)[0], torch.empty(8192, size))
        assert kernel.config.num_warps == warps and build(kernel).spills == 0
