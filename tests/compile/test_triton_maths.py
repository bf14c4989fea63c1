"""What stands for functions of libdevice in generated Triton kernels: how far off it is, and where
it is put. The interpreter has torch's exponentials and logarithms for the card's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.cubin import build, kernels_of
from tests.compile.interp import Interpreter
from tilewright.runtime.interpret import Interpreted

COUNT = 1 << 16
KERNEL = """
import triton
import triton.language as tl
from tilewright.runtime import tri, tri_maths


@triton.jit
def kernel(p, q, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(q + at, FUNCTION(tl.load(p + at)))
"""
Function = Callable[[Tensor], Tensor]


def _softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x))


def _tanh_softplus(x: Tensor) -> Tensor:
    u = torch.exp(x.clamp(max=20))  # the same by another way, or little is left where it is small
    return u * (u + 2) / (u * (u + 2) + 2)


def _of(name: str, x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    text = KERNEL.replace("FUNCTION", name)
    run = Interpreted(text, "kernel", ["*fp32", "*fp32"], {"BLOCK": x.numel()})
    run(1, x.data_ptr(), made.data_ptr())
    return made


@pytest.mark.parametrize(("name", "exact", "low", "high", "off"), [
    ("tri_maths.log1p_power", _softplus, -80, 0, 4e-7),
    ("tri_maths.softplus", _softplus, -80, 88, 4e-7),
    ("tri_maths.tanh_softplus", _tanh_softplus, -80, 88, 4e-7),
    ("tri_maths.summed_log1p_power", _softplus, -4, 0, 4e-7),
    ("tri_maths.summed_softplus", _softplus, -4, 88, 4e-7),
    ("tri_maths.fast_log1p_power", _softplus, -30, 0, 4e-6),
    ("tri_maths.fast_softplus", _softplus, -30, 88, 4e-6),
    ("tri_maths.fast_tanh_softplus", _tanh_softplus, -30, 88, 4e-6),
    ("tri_maths.fast_log1p", torch.log1p, -0.999, 4, 4e-6),
    ("tri_maths.fast_log", torch.log, 0, 4, 4e-6),
    ("tri_maths.fast_expm1", torch.expm1, -9, 9, 4e-6),
    ("tri.fast_tanh", torch.tanh, -9, 9, 4e-6),
])  # fmt: skip
def test_functions_are_off_by_little(name: str, exact: Function, low: float, high: float,
                                     off: float) -> None:  # fmt: skip
    half = COUNT // 2
    away = torch.logspace(-7, -1, half // 2) * max(-low, high)
    near = (away, -away) if low < 0 < high else (away + low, high - away)
    x = torch.cat((torch.linspace(low + 1e-4, high, half), *near)).float().clamp(low, high)
    true = exact(x.double())
    wrong = ((_of(name, x) - true) / true)[true != 0].abs().max()
    assert float(wrong) < off


def test_logarithms_of_the_smallest_numbers() -> None:
    x = torch.tensor([1e-45, 1e-40, 1.1e-38, 1.2e-38])
    torch.testing.assert_close(_of("tri_maths.fast_log", x), x.log())


def _places_off(made: Tensor, true: Tensor, beside: Tensor) -> float:
    """How far off, in last places of what it is beside."""
    last = torch.nextafter(beside, torch.full_like(beside, torch.inf)) - beside
    return float(((made - true) / last).abs().max())


@pytest.mark.parametrize(("low", "high", "off"), [
    (1e-44, 1e-38, 1.0), (1e-38, 0.5, 2.5), (0.5, 1.0, 4.0), (1.0, 3.0, 5.0), (3.0, 5.0, 5.0),
    (5.0, 4e36, 3.0),
])  # fmt: skip
def test_logarithms_of_the_gamma_function(low: float, high: float, off: float) -> None:
    """Also next to one and two, where there is little of them (CUDA's are off by six places)."""
    x = torch.logspace(math.log10(low), math.log10(high), COUNT, dtype=torch.float64).float()
    true = torch.lgamma(x.double())
    assert _places_off(_of("tri_maths.lgamma", x), true, true.abs().float()) < off


def test_logarithms_of_the_gamma_function_of_negative_numbers() -> None:
    x = -torch.cat((torch.linspace(1e-9, 50, COUNT - 256), torch.logspace(-30, 6, 256)))
    x = torch.where(x == x.round(), x - 0.25, x)  # there is none of whole numbers
    wide = x.double()
    parts = (math.pi / (wide * torch.sin(math.pi * wide))).abs().log().abs()
    made, true = _of("tri_maths.lgamma", x), torch.lgamma(wide)
    assert _places_off(made, true, (parts + torch.lgamma(-wide).abs()).float()) < 4


def test_logarithms_of_the_gamma_function_of_what_is_seldom() -> None:
    x = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -1.0, -2.0, -1e10, -4.2e36, 4.2e36, 1.0, 2.0,
         1e-40, -1e-40, -1e-20, -8388607.5]  # fmt: skip
    x = torch.tensor(x)
    torch.testing.assert_close(_of("tri_maths.lgamma", x), torch.lgamma(x), equal_nan=True)


@pytest.mark.parametrize("name", ["sin", "cos"])
@pytest.mark.parametrize("high", [1.0, 30.0, 1e5])
def test_sines_and_cosines(name: str, high: float) -> None:
    """Also right beside their zeros (CUDA's are off by two places)."""
    quarters = (torch.arange(1, COUNT // 4 + 1).double() * (math.pi / 2)).float() % high
    x = torch.cat((torch.linspace(-high, high, COUNT // 2), quarters, quarters * (1 - 2**-23)))
    true = getattr(torch, name)(x.double())
    assert _places_off(_of(f"tri_maths.{name}", x), true, true.abs().float()) < 1.5


def test_sines_and_cosines_of_what_is_seldom() -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 1e-20, 100001.0,
                      -3e5, 1e10, -1e20, 3e38, 1e30, -1e6, 99999.0])  # fmt: skip
    for fn in (torch.sin, torch.cos):
        made = _of(f"tri_maths.{fn.__name__}", x)
        torch.testing.assert_close(made, fn(x), equal_nan=True)
        assert torch.equal(made.signbit()[:2], fn(x).signbit()[:2])


def test_a_sine_and_a_cosine_have_most_in_common() -> None:
    """Three steps take an angle to less than half a quarter, once for both."""
    (both,) = kernels_of(lambda x: x.sin() + x.cos(), torch.empty(1 << 20))
    (one,) = kernels_of(torch.sin, torch.empty(1 << 20))
    quarters = "0fCB400000"  # what is taken off again after rounding to an integer
    assert both.config == one.config
    assert build(both).ptx.count(quarters) == build(one).ptx.count(quarters) > 0
    (wide,) = kernels_of(torch.cos, torch.empty(1 << 20, dtype=torch.float64))
    assert "libdevice.cos(" in wide.text


def test_tiles_of_angles_have_no_empty_lanes() -> None:
    """Rows of 160: five pieces of 32, not one of 256."""

    def embedded(t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(torch.arange(160) * -0.05)
        return torch.cat((angles.cos(), angles.sin()), -1).bfloat16()

    (kernel,) = kernels_of(embedded, torch.empty(1 << 16))
    assert kernel.config.kwargs["XBLOCK"] == 32


def test_what_is_seldom_is_behind_a_branch() -> None:
    """Of each element; doubles are the library's."""
    (kernel,) = kernels_of(torch.lgamma, torch.empty(1 << 20))
    assert "tri_maths.lgamma(" in kernel.text
    made = build(kernel)
    assert "lg2.approx" not in made.ptx
    assert made.ptx.count("bra") >= 1
    (kernel,) = kernels_of(torch.lgamma, torch.empty(1 << 20, dtype=torch.float64))
    assert "libdevice.lgamma(" in kernel.text


def test_special_functions_of_what_many_elements_share_are_computed_once() -> None:
    kernels = kernels_of(lambda x, t: (torch.lgamma(x + t) - torch.lgamma(t)).mean(),
                         torch.empty(4096, 2000), torch.empty(2000))  # fmt: skip
    assert [k.text.count("lgamma(") for k in kernels] == [1, 1, 0]


SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 89.0, 88.0, -104.0, -1.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("fn", "name"), [
    (lambda x: _softplus(x.float()).to(x.dtype), "softplus"), (F.softplus, "softplus"),
    (F.mish, "tanh_softplus"), (F.logsigmoid, "log1p_power"),
    (lambda x: torch.logaddexp(x, 1 - x), "log1p_power"),
    (torch.log1p, "fast_log1p"), (torch.log, "fast_log"), (F.elu, "fast_expm1"),
])  # fmt: skip
def test_functions_and_what_is_in_them(fn: Function, name: str, dtype: torch.dtype) -> None:
    """With what is infinite and what is none; only results of few bits are coarse."""
    x = torch.cat((torch.linspace(-30, 30, 400), torch.logspace(-20, 0, 150), SPECIAL)).to(dtype)
    few = dtype == torch.bfloat16
    text = _text(fn, x, rtol=2**-7 if few else 2e-6, atol=1e-12)
    assert (f"tri_maths.fast_{name.removeprefix('fast_')}(" in text) == few
    assert few or name.startswith("fast_") or f"tri_maths.{name}(" in text


def _text(fn: Callable[..., Any], *args: Tensor, rtol: float, atol: float) -> str:
    torch._dynamo.reset()
    backend = Interpreter()
    made = torch.compile(lambda *args: fn(*args), backend=backend)(*args)
    torch.testing.assert_close(made, fn(*args), equal_nan=True, rtol=rtol, atol=atol)
    return backend.kernels[0].text


def test_a_tanh_that_one_is_added_to_has_no_other_form_near_zero() -> None:
    x = torch.linspace(-9, 9, 999).bfloat16()
    text = _text(lambda x: F.gelu(x, approximate="tanh"), x, rtol=2**-7, atol=1e-6)
    assert "tri.tanh_beside_one(" in text
    assert "tri.fast_tanh(" in _text(lambda x: torch.tanh(x) * 2, x, rtol=2**-7, atol=1e-12)


def _scaled(x: Tensor) -> Tensor:
    return x.float() / x.float().abs().amax(-1, keepdim=True)


def test_what_many_are_divided_by_is_turned_into_a_factor() -> None:
    """Where results have few bits, or are sums."""
    x = torch.randn(5, 64).bfloat16()
    assert "tri_rows.by_shared(" in _text(lambda x: _scaled(x).bfloat16(), x, rtol=2**-7, atol=0)
    assert "tri_rows.by_shared(" in _text(lambda x: _scaled(x).sum(-1), x, rtol=1e-6, atol=1e-6)
    assert "tri_rows.div_by_shared(" in _text(_scaled, x, rtol=0, atol=0)
    both = _text(lambda x: (_scaled(x), _scaled(x).sum(-1)), x, rtol=1e-6, atol=1e-6)
    assert "tri_rows.by_shared(" not in both


def test_factors_are_finite_of_the_smallest_divisors() -> None:
    x = torch.tensor([[1e-40, 0.0, 5e-41], [1e-30, 2e-30, -1e-38]]).repeat(1, 16)
    _text(lambda x: _scaled(x).bfloat16(), x, rtol=2**-7, atol=0)


def test_losses_take_the_joint_function() -> None:
    x, y = torch.randn(64, 64) * 9, torch.rand(64, 64)
    text = _text(F.binary_cross_entropy_with_logits, x, y, rtol=1e-6, atol=0)
    assert "tri_maths.summed_log1p_power(" in text
    each = functools.partial(F.binary_cross_entropy_with_logits, reduction="none")
    assert "tri_maths.log1p_power(" in _text(each, x, y, rtol=1e-6, atol=1e-9)


def test_shares_of_a_sum_are_divided_by_less_work() -> None:
    """What is left of rows that are infinite, or nothing, is as in eager."""
    x = torch.randn(6, 70) * 20
    x[1, 3], x[2, 4], x[3, 5], x[4] = torch.inf, torch.nan, -torch.inf, -torch.inf
    softmax = functools.partial(torch.softmax, dim=-1)
    assert "tri_rows.share(" in _text(softmax, x, rtol=1e-6, atol=1e-20)

    def other(x: Tensor) -> Tensor:  # which may be less than one
        powers = (x - x.mean(-1, keepdim=True)).exp()
        return powers / powers.sum(-1, keepdim=True)

    assert "tri_rows.share(" not in _text(other, x, rtol=1e-6, atol=1e-20)


def test_counts_of_a_row_take_32_bits() -> None:
    text = _text(lambda x: (x > 1).sum(-1), torch.randn(9, 77), rtol=0, atol=0)
    assert text.count("tl.int64") == 1  # of what is stored
