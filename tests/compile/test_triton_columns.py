"""Columns folded on a card: rows of any width are read in wide accesses, rows that no chunk has are
folded too, and folds of what lies in pieces have programs enough."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda, as_fake_cuda
from tests.compile.cubin import build, kernels_of
from tests.compile.interp import Interpreter, check
from tests.compile.test_triton_in_turn import for_card
from tests.limits import limit
from tilewright.codegen.triton.plan.config import Config
from tilewright.testing import limited, run_and_get_code

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LARGE_WORK", 1 << 12), ("SPLIT_WORK", 1 << 12), ("CYCLIC_WORK", 1 << 10)):
        limit(monkeypatch, name, value)


def _whole(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Numbers whose sums are exact in any order."""
    return torch.randint(-50, 50, shape).to(dtype)


def _check(fn: Callable[..., Any], *args: Tensor) -> str:
    """What eager gives, on a card that is interpreted; the kernels' text."""
    torch._dynamo.reset()
    with as_cuda():
        compiled = torch.compile(fn, backend="tilewright", dynamic=False)
        found, code = run_and_get_code(compiled, *args)
    torch.testing.assert_close(found, fn(*args), equal_nan=True, rtol=1e-4, atol=1e-4)
    return "\n".join(code)


def test_the_first_of_all_that_are_smallest() -> None:
    """What a fold begins with has no place: a column of nothing else began nowhere."""
    x = _whole(301, 40)
    x[:, 9] = float("-inf")
    _check(lambda x: x.argmax(0), x)


def test_columns_of_numbers_that_are_nowhere() -> None:
    """A card has room for several programs of these on a processor, and none of them loads."""

    def places(x: Tensor) -> Tensor:
        at = torch.arange(300 * x.shape[0], device=x.device).view(300, x.shape[0])
        return (at % 7).sum(0)

    with as_fake_cuda() as made:
        torch.compile(places, backend="tilewright", dynamic=False)(torch.zeros(40000))
        assert len(made.launches) == 1


def _unusual() -> Tensor:
    x = _whole(601, 21)
    x[7, 3] = x[599, 5] = x[600, 5] = float("nan")
    x[:, 9] = float("-inf")
    return x


COLUMNS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "extremes": (lambda x: (x.argmax(0), x.amax(0)), lambda: (_unusual(),)),
    "moments": (lambda x: torch.var_mean(x.float(), 0), lambda: (_whole(601, 21),)),
    "few columns": (lambda x: x.float().sum(0), lambda: (_whole(5001, 3),)),
    "two loops": (lambda x: x.float().sum((0, 1)), lambda: (_whole(30, 40, 21),)),
    "a batch": (lambda x: x.float().sum(1), lambda: (_whole(5, 640, 21),)),
    "buffers": (lambda x, y, w: (x * y * w).float().sum(0),
                lambda: (_whole(599, 53), _whole(599, 53), _whole(53))),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_columns(name: str) -> None:
    fn, make = COLUMNS[name]
    text = _check(fn, *make())
    assert "+ rbase*" in text and len(re.findall("p0 +.*%", text)) == 0


def test_a_number_of_rows_that_is_not_known() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x.float().sum(0), x.argmax(0)

    with as_cuda():
        compiled = torch.compile(fn, backend="tilewright")
        for size in (601, 17, 1):
            x = _whole(size, 53)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), fn(x))


def test_pieces() -> None:
    """Folds over what lies in pieces, of odd lengths too."""
    text = _check(lambda x: (x.float().sum((0, 2)), torch.var_mean(x.float(), (0, 2))),
                  _whole(9, 7, 101))  # fmt: skip
    assert len(re.findall("numel = 63$", text, re.M)) == 1


SHAPES = [((10897, 32, 177), (0,)), ((3652, 32, 1155), (0, 1)), ((323604, 232), (0,)),
          ((2001, 54179), (0,)), ((512, 400, 177), (1,)), ((359, 145, 1759), (0, 2)),
          ((1070, 69, 1219), (0, 2))]  # fmt: skip


@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
def test_processors_have_enough_to_do_to_the_end(shape: tuple[int, ...], dims: tuple[int, ...]
                                                 ) -> None:  # fmt: skip
    kernel, *_ = for_card(lambda x: x.float().sum(dims), torch.empty(shape, dtype=BF16))
    waves = kernel.programs({}) / 132
    assert waves > 1.5 and waves / math.ceil(waves) > 0.85


@pytest.mark.parametrize("shape", [(116864, 1155), (2001, 54179)], ids=str)
def test_rows_of_odd_width_are_read_in_wide_accesses(shape: tuple[int, ...]) -> None:
    made = build(for_card(lambda x: x.float().sum(0), torch.empty(shape, dtype=BF16))[0])
    assert "cp.async.cg.shared.global" in made.ptx or made.widest("ld.global") == 16
    assert "ld.global.b16" not in made.ptx and made.spills == 0


@pytest.mark.parametrize(("width", "warps"), [(104, 2), (100, 4), (102, 8), (101, 16)])
def test_a_thread_has_as_many_short_columns_as_it_loads_at_once(width: int, warps: int) -> None:
    (kernel,) = kernels_of(lambda x: x.float().sum(1), torch.empty(20000, 24, width, dtype=BF16))
    assert (kernel.config.kwargs["XBLOCK"], kernel.config.num_warps) == (512, warps)


@pytest.mark.parametrize(("width", "ahead"), [(389, False), (384, True)])
def test_few_columns_of_single_floats_are_not_fetched_ahead(width: int, ahead: bool) -> None:
    """Those of a row would all be in one bank of shared memory."""
    (kernel,) = kernels_of(lambda x: x.sum(0), torch.empty(2042, width))
    assert ("cp.async" in build(kernel).ptx) == ahead


def test_rows_that_are_left_are_not_kept_for_long() -> None:
    """What folds them runs before what comes next, so that their memory is free then."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w).float().sum(0), (w @ w.t()).sin()

    x, w = torch.empty(20001, 32, dtype=BF16), torch.empty(32, 32, dtype=BF16)
    texts = [kernel.text for kernel in for_card(fn, x, w)]
    assert ["sin(" in text for text in texts] == [False, False, True]


def _gradients(x: Tensor, bias: Tensor, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a bias, the rows of which are stored before they are folded."""
    along = torch.where(x + bias > 0, given, 0)
    return along, along.float().sum(0), along.amax(0)


def _gradients_of_squares(x: Tensor, bias: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """With a number for each element that nothing else sees."""
    kept = F.relu(x + bias)
    along = torch.where(kept <= 0, 0, given * (2 * kept))
    return along, along.float().sum(0)


@pytest.mark.parametrize("fn", [_gradients, _gradients_of_squares])
@pytest.mark.parametrize("rows", [601, 608])
def test_rows_that_are_stored_and_folded_are_dealt_too(fn: Callable[..., Any], rows: int) -> None:
    """Those that are in no chunk are stored by a kernel of their own."""
    text = _check(fn, _whole(rows, 21), _whole(21), _whole(rows, 21))
    assert text.count("tl.program_id") == (3 if rows % 8 else 2)
    assert text.count("empty_cuda") == (4 if fn is _gradients_of_squares else 6)


def test_odd_rows_of_gradients_are_read_and_written_in_wide_accesses() -> None:
    wide, *_ = for_card(_gradients, *(torch.empty(n, 6487, dtype=BF16) for n in (22666, 1, 22666)))
    made = build(wide)
    assert made.widest("st.global") == 16 and "cp.async.cg" in made.ptx and made.spills == 0


@pytest.mark.parametrize(("width", "chunks"), [(120, 136), (128, 128)])
def test_rows_that_are_no_whole_lines_are_dealt_out(width: int, chunks: int) -> None:
    """So many of them beside each other are: each program has lines of its own."""
    shapes = ((371135, width), (1, width), (371135, width))
    first, *_ = for_card(_gradients, *(torch.empty(*s, dtype=BF16) for s in shapes))
    assert first.programs({}) == -(-chunks * width // 64)
    assert (f"roffset*{chunks * width}" in first.text) == (width % 64 > 0)


def test_what_is_rounded_before_it_is_summed_needs_no_more_bits() -> None:
    """Sums of parts are floats, of gradients that nobody sees all bits of."""

    def sums(x: Tensor) -> tuple[Tensor, Tensor]:
        along = x.float().exp()
        return along.bfloat16(), along.bfloat16().sum(0)

    x = torch.empty(267421, 512, dtype=BF16)
    assert "tri.fast_exp" in for_card(sums, x)[0].text
    assert "tri.fast_exp" not in for_card(lambda x: (sums(x)[0], x.float().exp().sum(0)), x)[0].text


def test_what_many_chunks_leave_is_folded_in_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"PARTIAL_RESULTS": 64, "LARGE_WORK": 64, "CYCLIC_ROWS": 4,
             "CYCLIC_WORK": 16, "CHUNK_WORK": 16}  # fmt: skip
    for name, value in small.items():
        limit(monkeypatch, name, value)
    text = _check(lambda x: (x.float().sum(0), x.argmax(0)), _whole(601, 21))
    assert text.count("tl.program_id") > 2


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_place_is_looked_for_row_after_row(dtype: torch.dtype) -> None:
    x = torch.randint(-3, 3, (3, 9, 48)).to(dtype)
    x[0, 1:3, 7], x[1, :, 9] = torch.nan, -torch.inf
    with limited("UNROLLED_PER_SM", 0):
        (kernel,) = check(lambda x: (x.argmax(1), x.argmin(1), x.amax(1) + 1), x)
    assert "tl.static_range(0, 9)" in kernel.text
    (kernel,) = kernels_of(lambda x: x.argmax(1), torch.empty(64, 21, 256, 256, dtype=dtype))
    made = build(kernel)
    assert made.widest("ld.global") == 16 and made.spills == 0


def test_places_in_enlarged_rows_are_looked_for_along_them() -> None:
    def classes(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=4, mode="bilinear").argmax(1)

    with limited("UNROLLED_PER_SM", 0):
        (kernel,) = check(classes, torch.randn(2, 9, 6, 8))
    assert "tl.static_range(0, 9)" in kernel.text and "% (32)" in kernel.text


def test_short_columns_that_are_only_folded_belong_to_one_thread_each() -> None:
    (kernel,) = kernels_of(lambda x: x.mean(0), torch.empty(26, 872, 1571, dtype=BF16))
    made = build(kernel)
    assert made.shared == 0 and "ld.global.v4.b32" in made.ptx and made.spills == 0


@pytest.mark.parametrize(("width", "most"), [(512, 1024), (520, 2048)])
def test_columns_that_are_held_have_few_threads(width: int, most: int) -> None:
    """They meet in shared memory."""
    (kernel,) = kernels_of(lambda x: torch.softmax(x, 1), torch.empty(762, 128, width, dtype=BF16))
    made = build(kernel)
    assert made.shared <= most and made.widest("ld.global") == 16 and made.spills == 0


def test_rows_of_a_column_have_no_addresses_of_their_own() -> None:
    (kernel,) = kernels_of(lambda x: torch.softmax(x, 1), torch.empty(40, 1024, 1083, dtype=BF16))
    held = Config((("XBLOCK", 32), ("RBLOCK", 1024)), 16)
    text = build(replace(kernel, configs=(held,))).ptx
    assert text.count("mul.wide") < text.count("ld.global")


def test_rows_beyond_the_last_cost_nothing_for_each_element() -> None:
    """Extremes see the last one again; of moments only the last block has a mask."""
    extreme, *_ = for_card(lambda x: x.argmax(1), torch.empty(1168, 333, 240, dtype=BF16))
    assert "rmask" not in extreme.text
    moments, *_ = for_card(lambda x: x.var(0), torch.empty(30849, 48, 128, dtype=BF16))
    assert [text.count("rmask") > 0 for text in moments.text.split("for roffset")] == [
        False, False, True]  # fmt: skip


def test_what_is_written_where_it_was_read_is_not_zero_outside() -> None:
    """Running statistics of each image, which are then folded over the images."""

    def fn(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.instance_norm(x, mean, var, use_input_stats=True, momentum=0.5)

    x, mean, var = torch.randn(3, 5, 7, requires_grad=True), torch.randn(5), torch.rand(5)
    expected = mean.clone(), var.clone()
    fn(x, *expected)
    torch.compile(fn, backend=Interpreter(), dynamic=True)(x, mean, var)
    torch.testing.assert_close((mean, var), expected)


def test_short_odd_columns_are_not_left_in_parts() -> None:
    """What is left for every sixteen rows would be much of what is read."""
    x = torch.empty(2324, 128, 479, dtype=BF16)
    assert len(for_card(lambda x: torch.std_mean(x, 1), x)) == 1
    assert len(for_card(lambda x: x.float().square().sum(1), x)) == 1


def test_what_all_columns_of_a_program_are_multiplied_by_is_loaded_once() -> None:
    """A block of columns is of one image: its rows' weights are a row of numbers, no tile."""

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        return (x * weight[..., None]).sum(1)

    (kernel,) = check(fn, torch.randn(6, 80, 256), torch.randn(6, 80), rtol=1e-4, atol=1e-4)
    assert "+ xfirst) // (256)" in kernel.text
    odd, *_ = check(fn, torch.randn(6, 80, 200), torch.randn(6, 80), rtol=1e-4, atol=1e-4)
    assert "xfirst" not in odd.text


SLIDING: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "sums": (lambda x: x.float().sum(0), (19, 703)),
    "some of both": (lambda x: (x.float().square().sum(1) + 1).sqrt(), (3, 24, 613)),
    "both ends": (lambda x: (x.amax(1), -x.amin(1)), (3, 21, 519)),
}


@pytest.mark.parametrize("name", SLIDING)
def test_odd_rows_are_folded_from_where_their_pieces_begin(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "SHIFTED_COLUMNS_PER_SM", 0)
    limit(monkeypatch, "CYCLIC_ROWS", 0)
    limit(monkeypatch, "LARGE_WORK", 1 << 20)  # programs enough
    fn, size = SLIDING[name]
    assert "xslide" in _check(fn, _whole(*size))


def test_odd_rows_are_loaded_sixteen_bytes_at_once() -> None:
    (kernel,) = for_card(lambda x: x.mean(0), torch.empty(109, 481, 793, dtype=BF16))
    made = build(kernel)
    assert made.widest("ld.global") == 16 and made.spills == 0
    assert "shfl" not in made.ptx  # what is moved into place goes through shared memory


def test_what_rows_and_columns_have_in_common_does_not_keep_a_product_in_memory() -> None:
    """It is made again of what it was made of, not stored for the one number that all wait for."""

    def fn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        update = x * ((a / a.mean()).rsqrt()[:, None] * b.rsqrt()[None])
        return update / update.square().mean().sqrt()

    made = for_card(fn, torch.empty(4096, 4096), torch.empty(4096), torch.empty(4096))
    assert sum(any(p.name == "arg0" for p in kernel.params) for kernel in made) == 2


def test_folds_of_several_buffers_have_few_rows_at_once() -> None:
    x, y = (torch.empty(400, 300, 512, dtype=torch.bfloat16) for _ in range(2))
    (one,) = kernels_of(lambda x: x.sum(1), x)
    (two,) = kernels_of(lambda x, y: (x * y).sum(1), x, y)
    assert [k.config.kwargs["RBLOCK"] for k in (one, two)] == [64, 32]
