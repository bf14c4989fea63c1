"""Rows with a longer pitch: the rule for strides, where it is used, and results as eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs import check, compiled, leaf
from tilewright import config
from tilewright.ir import index as ix
from tilewright.lower.pitch import pitched
from tilewright.testing import run_and_get_code

ALIGN = {"padding_alignment_bytes": 32, "padding_stride_threshold": 0}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with config.patch(force_disable_caches=True):
        yield


def rule(size: tuple[int, ...], stride: tuple[int, ...],
         dtype: torch.dtype = torch.float32) -> list[int | None]:  # fmt: skip
    given = tuple(map(ix.as_index, size)), tuple(map(ix.as_index, stride))
    return [ix.value_of(s) for s in pitched(*given, dtype)]


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        ((2, 16, 2047), (2047 * 16, 2047, 1), [2048 * 16, 2048, 1]),
        ((2, 16, 127), (127 * 16, 127, 1), [127 * 16, 127, 1]),
        ((2, 16, 64, 63), (16 * 64 * 63, 1, 63 * 16, 16), [16 * 64 * 63, 1, 63 * 16, 16]),
        ((16, 2047), (1, 16), [1, 16]),
        ((2047, 16), (1, 2047), [1, 2048]),
        ((4, 2047), (4000, 1), [4000, 1]),
        ((4, 2047), (0, 1), [0, 1]),
        ((), (), []),
        ((7,), (1,), [1]),
    ],
)
def test_pd_01_rule(size: tuple[int, ...], stride: tuple[int, ...], expected: list[int]) -> None:
    """2047 becomes 2048 and what is outside is scaled along; short rows, channels last, gaps and
    repeats stay."""
    assert rule(size, stride) == expected


def test_pd_01_the_pitch_is_counted_in_bytes() -> None:
    assert rule((3, 2050), (2050, 1), torch.float64) == [2064, 1]
    assert rule((3, 2050), (2050, 1), torch.bfloat16) == [2112, 1]
    with config.patch(padding_alignment_bytes=32):
        assert rule((3, 2050), (2050, 1)) == [2056, 1]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_pd_03_a_projection_is_stored_with_a_pitch_and_its_gradients_stay(bias: bool) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        scores = F.linear(x, w, b if bias else None)
        return (scores.softmax(-1) * scores.detach().sin()).sum()

    inputs = leaf(6, 5), leaf(1027, 5), leaf(1027)
    with config.patch(comprehensive_padding=True):
        with torch.no_grad():
            text = "\n".join(run_and_get_code(compiled(function), *inputs)[1])
        torch._dynamo.reset()
        check(function, *inputs, tolerance={"rtol": 1e-4, "atol": 1e-5})
    assert "1056" in text, "1027 elements are 4108 bytes, and 33 * 128 bytes are 1056 elements"


PROGRAMS: dict[str, Callable[..., Any]] = {
    "between": lambda a, b: ((a @ b).exp() @ b).sin(),
    "twice": lambda a, b: (lambda c: (c.sum(0), c @ b, c.amax(1)))((a.sin() + b).exp()),
    "viewed": lambda a, b: (a @ b).t().reshape(-1)[3:] + 1,
    "returned": lambda a, b: (lambda c: (c, c.t(), (c + 1) @ b))(a @ b),
    "joined": lambda a, b: torch.cat([a @ b, b.softmax(1)], 1) * 2,
    "changed": lambda a, b: (lambda c: c.index_add_(0, torch.tensor([1, 3]), b[:2]))(a @ b) @ a,
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_pd_02_only_what_is_in_between_is_padded(name: str, dynamic: bool) -> None:
    """Results and arguments have eager's strides; values are eager's."""
    with config.patch(comprehensive_padding=True, **ALIGN):
        check(PROGRAMS[name], torch.randn(13, 13), torch.randn(13, 13), dynamic=dynamic,
              tolerance={"rtol": 1e-4, "atol": 1e-4})  # fmt: skip


@pytest.mark.parametrize(
    ("function", "size", "align", "expected"),
    [
        (lambda x: x + 1, (6, 13), 32, (16, 1)),
        (lambda x: x + 1, (6, 13), 128, (32, 1)),
        (lambda x: x + 1, (3, 6, 13), 32, (96, 16, 1)),
        (lambda x: (x + 1).permute(1, 0, 2), (3, 6, 13), 32, (16, 96, 1)),
        (lambda x: x.softmax(-1), (6, 13), 32, (16, 1)),
        (lambda x: x @ x.t(), (13, 6), 32, (16, 1)),
        (lambda x: x.sum(0), (6, 13), 32, (1,)),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_pd_04_results_are_padded_where_asked_for(
    function: Callable[[Tensor], Tensor], size: tuple[int, ...], align: int,
    expected: tuple[int, ...], dynamic: bool,
) -> None:  # fmt: skip
    x = torch.randn(size)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    options = {**ALIGN, "padding_alignment_bytes": align, "pad_outputs": True}
    with config.patch(**options), torch.no_grad():
        found = compiled(function)(x)
    torch.testing.assert_close(found, function(x))
    if not dynamic or size[0] != 13:  # a dynamic row has no pitch to know
        assert found.stride() == expected


def test_pd_04_what_is_an_argument_or_needs_a_gradient_stays() -> None:
    x, w = torch.randn(6, 13), leaf(13, 13)
    with config.patch(pad_outputs=True, **ALIGN):
        same, changed = compiled(lambda x: (x.t(), x.add_(1)))(x)
        assert same.stride() == (1, 13) and changed.data_ptr() == x.data_ptr()
        torch._dynamo.reset()
        check(lambda x, w: (x @ w).sin(), x, w, tolerance={"rtol": 1e-4, "atol": 1e-5})
