"""Rows of odd lengths in Triton's interpreter and compiled: they begin anywhere in memory, and are
moved sixteen bytes at once nonetheless."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda, as_fake_cuda
from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tests.compile.test_triton_in_turn import for_card
from tests.limits import limit
from tilewright import config
from tilewright.runtime.triton_build import SPILLED
from tilewright.testing import run_and_get_code

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def _scaled(x: Tensor, row: Tensor) -> Tensor:
    return (x.float() - row.float()).to(x.dtype)


def _residual(x: Tensor, y: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, F.layer_norm(total, total.shape[-1:], weight)


ROWS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), lambda: (_random(17, 3001),)),
    "one more than a block": (lambda x: torch.softmax(x, -1), lambda: (_random(17, 4097),)),
    "one less than a block": (lambda x: torch.softmax(x, -1), lambda: (_random(17, 4095),)),
    "half": (lambda x: torch.softmax(x, -1), lambda: (_random(17, 2345, dtype=F16),)),
    "walked": (lambda x: torch.log_softmax(x, -1), lambda: (_random(17, 17003),)),
    "sum": (lambda x: x.float().sum(-1), lambda: (_random(17, 2999),)),
    "several folds": (lambda x: (x.argmax(-1), x.amin(-1), x.float().sum(-1)),
                      lambda: (_random(17, 17003),)),
    "several folds of rows that are held": (
        lambda x: (x.argmax(-1), x.argmin(-1), x.amin(-1), torch.var_mean(x.float(), -1)),
        lambda: (_random(17, 3001),)),
    "moments": (lambda x: torch.var_mean(x.float(), -1), lambda: (_random(17, 17003),)),
    "folds and a row": (lambda x: (x * 2, x.float().sum(-1)), lambda: (_random(17, 2999),)),
    "layer norm": (lambda x, w: F.layer_norm(x, x.shape[-1:], w), lambda: (
        _random(17, 17003), _random(17003))),
    "wide weights": (lambda x, w: (x.float() * w).sum(-1), lambda: (
        _random(17, 17003), _random(17003, dtype=F32))),
    "a mask that others share": (lambda x, m: torch.where(m, x, -1e4).amax(-1), lambda: (
        _random(3, 5, 17003), torch.rand(5, 17003) < 0.3)),
    "a mask that others share beside rows that are held": (
        lambda x, m: torch.softmax(torch.where(m, x, -1e4), -1), lambda: (
            _random(9, 2, 901), torch.rand(2, 901) < 0.3)),
    "bytes that others share": (lambda x, q: (x.float() + q).amax(-1), lambda: (
        _random(9, 2, 2501), torch.randint(-9, 9, (2, 2501), dtype=torch.int8))),
    "a residual that is stored": (_residual, lambda: (
        _random(17, 17003), _random(17, 17003), _random(17003))),
    "a residual that is held": (_residual, lambda: (_random(17, 3001), _random(17, 3001))),
    "a mask": (lambda x, m: torch.softmax(x.masked_fill(m, -1e4), -1), lambda: (
        _random(17, 2501), torch.rand(17, 2501) < 0.3)),
    "a part of rows": (lambda x: torch.softmax(x[:, 3:2900], -1), lambda: (_random(17, 4000),)),
    "rows apart": (lambda x: torch.softmax(x[::2, :-2], -1), lambda: (_random(35, 2503),)),
    "pointwise rows": (_scaled, lambda: (_random(17, 2501), _random(17, 1, dtype=F32))),
    "pointwise of a part": (lambda x, row: _scaled(x[:, 5:], row), lambda: (
        _random(17, 4000), _random(17, 1, dtype=F32))),
    "looked up": (lambda i, x: x[i] * 2, lambda: (torch.randint(0, 9, (20,)), _random(17, 2501))),
    "short, looked up": (lambda i, x: x[i] * 2, lambda: (
        torch.randint(0, 17, (21,)), _random(17, 601))),
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ROWS)
def test_odd_rows(name: str) -> None:
    fn, make = ROWS[name]
    kernels = check(fn, *make(), rtol=2**-7, atol=1e-5)
    assert any("slide" in k.text for k in kernels)


@pytest.mark.parametrize("config", [4])
def test_other_configurations(config: int) -> None:
    for name in ("softmax", "several folds of rows that are held", "walked", "pointwise rows"):
        fn, make = ROWS[name]
        check(fn, *make(), config=config, rtol=2**-7, atol=1e-5)


def test_training_with_an_odd_number_of_classes() -> None:
    """Both passes, as the whole compiler cuts them."""
    x, t = _random(17, 2501).requires_grad_(), torch.randint(0, 2501, (17,))

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(compiled(x), x)

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), t)

    (expected,) = torch.autograd.grad(loss(x), x)
    with as_cuda():
        compiled = torch.compile(loss, backend="tilewright")
        (found,), code = run_and_get_code(step, x)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-5)
    assert "rslide" in "".join(code) and "xslide" in "".join(code)


def test_both_forms_of_a_row_are_candidates() -> None:
    """Held as it is, or walked from sixteen bytes to sixteen bytes."""
    fn, make = ROWS["softmax"]
    x = make()[0]
    with config.patch(max_autotune_pointwise=True):
        (kernel,) = check(fn, x, rtol=2**-7, atol=1e-5)
        forms = [dict(c.constants)["HELD"] for c in kernel.configs]
        assert sorted(set(forms)) == [0, 1] and "rslide" in kernel.text
        check(fn, x, config=forms.index(0), rtol=2**-7, atol=1e-5)
    assert build(kernel, config=forms.index(0)).widest("st.global") == 16


def test_places_beyond_31_bits() -> None:
    x = torch.empty(1, dtype=BF16).expand(90001, 50257)
    (kernel,) = kernels_of(lambda x: torch.softmax(x, -1), x)
    assert "tl.int64" in kernel.text


def test_a_length_that_is_not_known() -> None:
    fn, make = ROWS["softmax"]
    kernels = check(fn, *make(), dynamic=True, rtol=2**-7, atol=1e-5)
    assert any("slide" in k.text for k in kernels)


def test_a_thread_has_neighbours_of_rows_that_are_likely_even() -> None:
    with as_fake_cuda():
        fn = torch.compile(lambda x: x.float().logsumexp(-1), backend="tilewright", dynamic=True)
        _, (text,) = run_and_get_code(fn, torch.empty(64, 2048, dtype=BF16))
    assert "[XBLOCK, RBLOCK // 8, 8]" in text


def test_no_rows_and_rows_of_nothing() -> None:
    check(lambda x: torch.softmax(x, -1), _random(0, 3001))
    check(lambda x: x.float().sum(-1), _random(4, 0))


@pytest.mark.parametrize("length", [17003, 17008])
def test_three_walks_of_a_row(length: int) -> None:
    """There, back and there again: what a loop leaves out of a row's end is in the next one."""

    def f(x: Tensor) -> Tensor:
        y = x.float() - x.float().mean(-1, keepdim=True)
        return y / (y.abs().sum(-1, keepdim=True) + (y * y).amax(-1, keepdim=True))

    x = _random(20, length)
    kernels = check(f, x, rtol=1e-3, atol=1e-5)
    assert max(k.text.count("tl.load") for k in kernels) == 6


def test_rows_that_are_even_short_or_wide_stay_as_they_are() -> None:
    for shape, dtype in (((512, 4096), BF16), ((512, 3000), BF16), ((512, 3001), F32),
                         ((512, 501), BF16)):  # fmt: skip
        for kernel in kernels_of(lambda x: torch.softmax(x, -1), torch.empty(shape, dtype=dtype)):
            assert "slide" not in kernel.text


def test_rows_of_channels_are_moved_by_single_elements() -> None:
    """The scale of each is looked up: neighbours of a thread would look it up again and again."""
    x, scale = torch.empty(64, 320, 17, 17, dtype=BF16), torch.empty(320, dtype=BF16)
    (kernel,) = kernels_of(lambda x, w: F.group_norm(x, 32, w, w), x, scale)
    assert "slide" not in kernel.text and kernel.config.num_warps == 4
    assert build(kernel).widest("ld.global") == 2


def test_short_odd_rows_have_a_warp() -> None:
    for length, dtype, block in ((323, F32, 1), (205, F32, 2)):
        x = torch.empty(48255, length, dtype=dtype)
        (kernel,) = kernels_of(lambda x: torch.softmax(x, -1), x)
        assert kernel.config.kwargs["XBLOCK"] == block and kernel.config.num_warps == 1
        (kernel,) = kernels_of(lambda x: x.float().sum(-1), x)
        assert kernel.config.kwargs["XBLOCK"] >= 2 * block and kernel.config.num_warps == 1


def test_as_many_odd_rows_are_at_work_as_even_ones() -> None:
    """Four of 8191 on a processor: their threads have 32 registers, and keep nothing elsewhere."""
    (kernel,) = kernels_of(lambda x: torch.softmax(x, -1), torch.empty(8191, 8191, dtype=BF16))
    assert kernel.config.registers == 32 and kernel.config.num_warps == 16
    assert not build(kernel).spills


def test_a_divisor_that_a_row_has_is_divided_by_once() -> None:
    """Masked elements are zeros, and of those a division takes longest."""
    x = torch.empty(48255, 323, dtype=F32)
    (kernel,) = kernels_of(lambda x: torch.softmax(x, -1), x)
    assert build(kernel).ptx.count("div.rn.f32") == kernel.config.kwargs["XBLOCK"]


# ---- short rows


def _each(x: Tensor) -> Any:
    y = x.float()
    scaled = y * 3 / y.abs().amax(-1, keepdim=True)
    return x.argmax(-1), torch.var_mean(y, -1), scaled.to(x.dtype)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def _seen(x: Tensor) -> Tensor:
    seen = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    return torch.softmax(x.masked_fill(~seen, float("-inf")), -1)


PACKED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), (_random(53, 85),)),
    "no rows are left over": (lambda x: torch.log_softmax(x, -1), (_random(56, 85),)),
    "quantized": (_quantized, (_random(53, 71, dtype=F16),)),
    "several": (_each, (_random(53, 33),)),
    "places in a row": (_seen, (_random(3, 33, 33),)),
    "a number for each row": (lambda x, y: torch.softmax(x * y, -1), (
        _random(53, 99), _random(53, 1))),
    "a choice for each row": (lambda x, y: torch.where(y > 0, torch.softmax(x, -1), x), (
        _random(53, 99), _random(53, 1))),
    "two tensors": (lambda x, y: torch.softmax(x + y, -1), (_random(133, 9), _random(133, 9))),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_rows_one_after_the_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "PACKED_ELEMENTS", 0)
    fn, args = PACKED[name]
    (kernel,) = check(fn, *args, rtol=2**-7, atol=1e-5)
    assert "tri_rows.turned" in kernel.text
    assert ("return" in kernel.text) == (name != "no rows are left over")


def test_rows_one_after_the_other_are_moved_sixteen_bytes_at_once() -> None:
    x = torch.empty(459563, 45, dtype=F16)
    (kernel,) = kernels_of(lambda x: torch.softmax(x, -1), x)
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16
    assert not made.spills


IN_PAIRS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), (_random(17, 389),)),
    "several": (_each, (_random(17, 131),)),
    "weights": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), (
        _random(17, 249), _random(249), _random(249))),
    "a residual": (_residual, (_random(17, 493), _random(17, 493), _random(493))),
    "a part of rows": (lambda x: torch.softmax(x[:, 3:400], -1), (_random(17, 501),)),
    "places in a row": (_seen, (_random(131, 131),)),
    "a mask": (lambda x, m: torch.softmax(x.masked_fill(m, -1e4), -1), (
        _random(17, 257), torch.rand(17, 257) < 0.3)),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PAIRS)
def test_rows_in_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "PAIRED_WEIGHTED_ELEMENTS", 0)
    fn, args = IN_PAIRS[name]
    (kernel,) = check(fn, *args, rtol=2**-7, atol=1e-5)
    assert "rodd" in kernel.text
    made = build(kernel)
    assert made.widest("ld.global") == 4
    assert made.shared < 512  # weights are laid out as rows are


WIDE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), (torch.empty(512, 4097, dtype=BF16),)),
    "log softmax": (lambda x: torch.log_softmax(x, -1), (torch.empty(64, 50257, dtype=BF16),)),
    "sum": (lambda x: x.float().sum(-1), (torch.empty(512, 4097, dtype=BF16),)),
    "moments": (lambda x: torch.var_mean(x.float(), -1), (torch.empty(64, 50257, dtype=BF16),)),
    "pointwise": (_scaled, (torch.empty(64, 50257, dtype=BF16), torch.empty(64, 1))),
}


@pytest.mark.parametrize("name", WIDE)
def test_odd_rows_are_moved_sixteen_bytes_at_once(name: str) -> None:
    fn, args = WIDE[name]
    (kernel,) = kernels_of(fn, *args)
    made = build(kernel)
    assert made.widest("ld.global") == 16
    assert name in ("sum", "moments") or made.widest("st.global") == 16
    assert made.spills <= SPILLED
    # the ends of a row are a tile of their own, one element for each thread
    assert len(re.findall(r"ld\.global\S*\.b16", made.ptx)) <= 1


def test_what_is_stored_on_the_way_is_moved_at_once_too() -> None:
    x = torch.empty(1348, 17649, dtype=BF16)
    (kernel,) = kernels_of(_residual, x, x, torch.empty(17649, dtype=BF16))
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16
    assert not made.spills


@pytest.mark.parametrize("length", [389, 493])
def test_weights_do_not_lay_out_rows_that_begin_anywhere(length: int) -> None:
    """A thread with eight neighbours of the weights would have eight of each row, loaded one by one
    from every eighth place, and brought to where they are stored through shared memory."""
    x = torch.empty(4096, length, dtype=BF16)
    weight = torch.empty(length, dtype=BF16)
    (kernel,) = kernels_of(lambda x, w: F.layer_norm(x, x.shape[-1:], w), x, weight)
    assert build(kernel).shared < 512


def test_weights_beside_rows_are_loaded_sixteen_bytes_at_once() -> None:
    """Single elements are loaded at the ends of rows only."""
    x, weight = torch.empty(1348, 17649, dtype=BF16), torch.empty(17649, dtype=BF16)
    (kernel,) = kernels_of(lambda x, w: F.layer_norm(x, x.shape[-1:], w, w), x, weight)
    narrow = re.findall(r"ld\.global[.:\w]*\.b16\b", build(kernel).ptx)
    assert "tri_rows.slid(" in kernel.text and len(narrow) <= 3


def test_long_rows_are_held_where_that_is_faster() -> None:
    """By sixteen warps, so that two are at work on a processor."""

    def family(fn: Callable[..., Any], *args: Tensor) -> str:
        (kernel,) = kernels_of(fn, *args)
        assert kernel.config.num_warps <= 16 or kernel.config.registers == 32
        return kernel.name.split("_")[1]

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    rows = {n: torch.empty(2000, n, dtype=BF16) for n in (8191, 10000, 10001, 16384)}
    assert all(family(lambda x: torch.softmax(x, -1), x) == "per" for x in rows.values())
    assert family(norm, rows[10000]) == family(norm, rows[10001]) == "per"
    assert family(norm, rows[16384]) == "red"
    other = torch.empty_like(rows[10000])
    assert family(lambda x, y: norm(x + y), rows[10000], other) == "per"
    # what is read once either way is walked
    assert all(family(lambda x: torch.logsumexp(x.float(), -1), x) == "red"
               for n, x in rows.items() if n > 8192)  # fmt: skip


def test_masks_beside_rows_are_loaded_in_words() -> None:
    """Wherever they begin: single bytes at the ends of rows only."""
    x, mask = torch.empty(8, 3365, 3365, dtype=BF16), torch.empty(3365, 3365, dtype=torch.bool)
    (kernel,) = kernels_of(lambda x, m: torch.softmax(torch.where(m, x, -1e4), -1), x, mask)
    made = build(kernel)
    assert (kernel.config.num_warps, made.spills) == (4, 0)
    assert len(re.findall(r"ld\.global[.:\w]*\.b8\b", made.ptx)) <= 1 and made.shared < 512


def test_a_row_that_is_added_to_odd_rows_is_found_by_few_divisions() -> None:
    """One for eight elements."""
    x, row = _random(37, 77), _random(77)
    (kernel,) = check(lambda x, row: x * 2 + row, x, row)
    assert "tri.wrapped(" in kernel.text


@pytest.mark.parametrize(("rows", "size", "warps"),
                         [(4406, 3873, 8), (33554, 2001, 4), (761461, 161, 1)])  # fmt: skip
def test_odd_rows_of_floats_that_are_folded_both_ways_stay_in_registers(
    rows: int, size: int, warps: int
) -> None:
    """Two of them, and what they add to: none is fetched ahead, one float at a time."""

    def gradients(x: Tensor, weight: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        slope = (given * weight * x).sum(-1, keepdim=True)
        return given * weight - x * slope, (given * x).sum(0)

    x = torch.empty(rows, size)
    kernel, *_ = for_card(gradients, x, torch.empty(size), x)
    made = build(kernel)
    assert "for s0offset" in kernel.text and made.spills == 0 and "cp.async" not in made.ptx
    assert kernel.config.num_warps == warps


def test_all_of_a_row_is_under_way_before_its_first_fold() -> None:
    """And of its elements none has an address of its own."""

    def gradients(x: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        total, slope = given.sum(-1, keepdim=True), (given * x).sum(-1, keepdim=True)
        return given - total - x * slope, (given * x).sum(0)

    kernel, *_ = for_card(gradients, torch.empty(24660, 2049), torch.empty(24660, 2049))
    _, loop = kernel.text.split("for s0offset")
    before = loop[: loop.index("= tl.reduce(")]
    assert before.count("tl.load(") == loop.count("tl.load(") == 2
    ptx = build(kernel).ptx
    assert 4 * ptx.count("mul.wide") < ptx.count("ld.global")


@pytest.mark.parametrize(("rows", "length", "ahead"), [(960, 36864, 0), (542, 1 << 18, 5)])
def test_long_rows_that_are_walked_once(rows: int, length: int, ahead: int) -> None:
    (kernel,) = kernels_of(
        lambda x: x.float().square().sum(-1), torch.empty(rows, length, dtype=BF16)
    )
    assert (kernel.config.kwargs["RBLOCK"], kernel.config.ahead) == (2048, ahead)
    assert ("cp.async" in build(kernel).ptx) == bool(ahead)
