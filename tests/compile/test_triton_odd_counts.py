"""Tensors of an odd number of elements, in Triton's interpreter and compiled: all but the last of
them are moved sixteen bytes at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import build, kernels_of
from tests.compile.interp import Interpreter, check
from tests.limits import limit
from tilewright.testing import run_and_get_code

BF16, F32 = torch.bfloat16, torch.float32


def _random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def _chosen(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x.clamp(-1, 1) * y, y)


def _several(x: Tensor) -> Any:
    return x * 2, x > 0, (x * 8).to(torch.int8), x.double(), x.float()


def _in_place(x: Tensor, y: Tensor) -> Any:
    z = x + y
    x.copy_(z * 2)
    return x, z


COUNTS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "chosen": (_chosen, lambda: (
        _random(57, 57), _random(57, 57), torch.rand(57, 57) < 0.5)),
    "several types": (_several, lambda: (_random(57, 59),)),
    "in place": (_in_place, lambda: (_random(6001), _random(6001))),
    "one more than blocks": (lambda x: x + 1, lambda: (_random(4097),)),
    "one less than blocks": (lambda x: x + 1, lambda: (_random(4095),)),
    "even": (lambda x: x * 3, lambda: (_random(6002, dtype=F32),)),
    "columns": (lambda x, b: F.relu(x + b), lambda: (_random(57, 57), _random(57))),
    "rows": (lambda x, s: x * s, lambda: (_random(57, 71), _random(57, 1))),
    "channels": (lambda x, c: x + c[:, None], lambda: (_random(3, 7, 81), _random(7))),
    "rolled": (lambda x: torch.roll(x + 1, 3, -1), lambda: (_random(57, 57),)),
    "looked up": (lambda x, i: x[i] + 1, lambda: (
        _random(300), torch.randint(0, 300, (6001,)))),
    "one number for all": (lambda x, s: x * s, lambda: (_random(6001), _random(dtype=F32))),
}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for large tensors is done for small ones too."""
    limit(monkeypatch, "PEELED_TENSOR", 1000)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.usefixtures("small")
def test_odd_counts(name: str) -> None:
    fn, make = COUNTS[name]
    kernels = check(fn, *make())
    assert any("xtail" in k.text for k in kernels)


@pytest.mark.usefixtures("small")
def test_a_count_that_is_not_known() -> None:
    """One kernel for all: also those of less than a piece."""
    backend = Interpreter()
    fn = torch.compile(lambda x: (x * 2, x > 0), backend=backend, dynamic=True)
    for count in (6001, 6032, 5, 16, 15, 17, 33):
        x = _random(count)
        doubled, positive = fn(x)
        assert torch.equal(doubled, x * 2) and torch.equal(positive, x > 0)
    assert len(backend.kernels) == 1 and "xtail" in backend.kernels[0].text


@pytest.mark.usefixtures("small")
def test_random_numbers_are_those_of_their_places() -> None:
    x = torch.ones(6003)
    torch.manual_seed(3)
    expected = torch.compile(lambda x: F.dropout(x, 0.3), backend="tilewright")(x)
    with as_cuda():
        torch.manual_seed(3)
        ours = torch.compile(lambda x: F.dropout(x, 0.3), backend="tilewright")
        actual, code = run_and_get_code(ours, x)
    assert "xtail" in "".join(code)
    torch.testing.assert_close(actual, expected)


def test_small_even_or_heavy_ones_stay_as_they_are() -> None:
    for fn, count in ((torch.neg, 9999), (torch.neg, 1 << 17), (torch.special.i0, 99999)):
        (kernel,) = kernels_of(fn, torch.empty(count))
        assert "xtail" not in kernel.text


def _bias(x: Tensor, b: Tensor) -> Tensor:
    return F.silu(x + b)


WIDE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "bfloat16": (lambda x: x + 1, (torch.empty(74747, 335, dtype=BF16),)),
    "float32": (lambda x: x + 1, (torch.empty(3418, 9041),)),
    "with a mask": (_chosen, (
        torch.empty(74747, 335, dtype=BF16), torch.empty(74747, 335, dtype=BF16),
        torch.empty(74747, 335, dtype=torch.bool))),
    "to int8": (lambda x, s: (x / s).to(torch.int8), (
        torch.empty(9935, 2311, dtype=BF16), torch.empty(()))),
    "rows": (lambda x, s: x * s, (
        torch.empty(14001, 711, dtype=BF16), torch.empty(14001, 1, dtype=BF16))),
    "columns": (_bias, (torch.empty(231, 54179, dtype=BF16), torch.empty(54179, dtype=BF16))),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDE)
def test_odd_counts_are_moved_sixteen_bytes_at_once(name: str) -> None:
    fn, args = WIDE[name]
    (kernel,) = kernels_of(fn, *args)
    made = build(kernel)
    assert made.widest("ld.global") == 16 and made.widest("st.global") == 16
    # the end is a tile of its own, one element for each thread
    assert len(re.findall(r"st\.global\.b\d+", made.ptx)) == 1


def test_of_several_wide_tensors_a_thread_has_fewer_elements() -> None:
    """What else it reads is small, and stays in cache."""
    for dtype, block in ((torch.float32, 1024), (BF16, 2048)):
        args = [torch.empty(1 << 22, dtype=dtype) for _ in range(3)]
        (kernel,) = kernels_of(lambda a, b, c: (a * b + c).bfloat16(), *args)
        assert (kernel.config.kwargs["XBLOCK"], kernel.config.num_warps) == (block, 4)
    rows = [torch.empty(1 << 14, 256, dtype=BF16), *(torch.empty(256, dtype=BF16) for _ in "abcde")]
    (kernel,) = kernels_of(lambda x, a, b, c, d, e: (x - a) * b + c * d - e, *rows)
    assert kernel.config.kwargs["XBLOCK"] == 2048


def test_one_number_is_loaded_once() -> None:
    (kernel,) = kernels_of(lambda x, s: x * s, torch.empty(1 << 20), torch.empty(()))
    assert len(re.findall(r"ld\.global\.b32", build(kernel).ptx)) == 1


# ---- folds of all elements

FOLDS: dict[str, Callable[[Tensor], Any]] = {
    "largest": lambda x: x.abs().amax(),
    "sum": lambda x: x.double().sum(),
    "place": lambda x: x.argmax(),
    "moments": lambda x: torch.var_mean(x.double()),
    "exponentials": lambda x: torch.logsumexp(x.double(), (0, 1)),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", FOLDS)
def test_folds_of_all_begin_where_memory_is_read_best(name: str) -> None:
    x = _random(1511, 1537, dtype=F32)  # too much for programs to hold
    expected = FOLDS[name](x)
    with as_cuda():
        actual, code = run_and_get_code(torch.compile(FOLDS[name], backend="tilewright"), x)
    torch.testing.assert_close(actual, expected)
    assert "rfull" in code[0] and "1537" not in code[0]
