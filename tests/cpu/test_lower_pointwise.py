"""Pointwise ops against eager: values, types, NaN, signed zeros, strides, sizes, mutation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.against_eager import check, compiled

nan, inf = math.nan, math.inf
ODD = [nan, inf, -inf, 0.0, -0.0, 1e-40, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 7.3, -11.7, 0.3]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int8, torch.uint8]


def odd(dtype: torch.dtype) -> Tensor:
    return torch.tensor(ODD).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every odd number beside every other."""
    x = odd(dtype)
    first, second = torch.meshgrid(x, x, indexing="ij")
    return first.contiguous(), second.contiguous()


def all_of(*fns: Callable[..., Any]) -> Callable[..., list[Any]]:
    """One graph for many ops: compiling is what takes the time."""
    return lambda *args: [fn(*args) for fn in fns]


UNARY = all_of(
    torch.abs, torch.neg, torch.sign, torch.floor, torch.ceil, torch.trunc, torch.round,
    torch.isnan, torch.isinf, torch.isposinf, torch.isneginf, torch.isfinite, torch.signbit,
    torch.logical_not, torch.nan_to_num, torch.square, torch.reciprocal, torch.frac, torch.angle,
    torch.relu, lambda x: torch.nan_to_num(x, 1.0, 2.0, -3.0), lambda x: x.clamp(-0.3, 2),
    lambda x: x.clamp(min=0.0), lambda x: x.clamp(max=-0.0), lambda x: x.clamp(2, 1),
)  # fmt: skip
SMOOTH = all_of(
    torch.exp, torch.exp2, torch.expm1, torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt,
    torch.rsqrt, torch.tan, torch.asin, torch.acos, torch.atan, torch.sinh, torch.cosh, torch.tanh,
    torch.asinh, torch.acosh, torch.atanh, torch.erf, torch.erfc, torch.erfinv, torch.sigmoid,
    torch.lgamma, torch.digamma, torch.logit, lambda x: torch.logit(x, 0.2), torch.sinc,
    torch.deg2rad, torch.rad2deg, torch.special.entr, lambda x: torch.polygamma(1, x),
    lambda x: torch.polygamma(3, x.abs()), torch.special.i1e,
)  # fmt: skip
BINARY = all_of(
    torch.maximum, torch.minimum, torch.eq, torch.ne, torch.lt, torch.le,
    torch.gt, torch.ge, torch.logical_and, torch.logical_or, torch.logical_xor, torch.copysign,
    torch.heaviside, torch.add, torch.sub, torch.mul, torch.div, torch.isclose,
    lambda a, b: torch.where(a > b, a, b), lambda a, b: torch.clamp(a, b, a),
    lambda a, b: torch.add(a, b, alpha=0.3), lambda a, b: torch.rsub(a, b, alpha=2),
)  # fmt: skip
DIVISION = all_of(
    torch.remainder, torch.fmod, torch.floor_divide,
    lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    lambda a, b: torch.div(a, b, rounding_mode="floor"),
)  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_odd_numbers(dtype: torch.dtype) -> None:
    check(UNARY, odd(dtype), bits=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_odd_pairs(dtype: torch.dtype) -> None:
    check(BINARY, *pairs(dtype), bits=True)
    check(all_of(torch.fmax, torch.fmin), *pairs(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions(dtype: torch.dtype) -> None:
    x = torch.cat([odd(dtype)[:-2], torch.linspace(-5, 5, 103, dtype=dtype)])
    check(SMOOTH, x, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=1e-5)


def test_functions_in_bfloat16_round_once() -> None:
    check(SMOOTH, torch.linspace(-3, 3, 101).bfloat16())


@pytest.mark.parametrize("dtype", FLOATS)
def test_division(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(2000) * 20).to(dtype), torch.randn(2000).to(dtype)
    check(DIVISION, a, b, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", INTS)
def test_integers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    low = 0 if dtype == torch.uint8 else -100
    a = torch.randint(low, 100, (501,), dtype=dtype)
    b = torch.randint(low, 100, (501,), dtype=dtype)
    b = torch.where(b == 0, 3, b).to(dtype)
    check(DIVISION, a, b)
    check(all_of(torch.add, torch.mul, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor,
                 torch.maximum, torch.true_divide, lambda a, b: ~a, lambda a, b: a**3,
                 lambda a, b: a << (b % 9).abs(), lambda a, b: a >> (b % 9).abs(),
                 lambda a, b: a + 1.5, lambda a, b: a.sqrt(), lambda a, b: torch.floor(a),
                 torch.gcd, torch.lcm), a, b)  # fmt: skip


def test_integer_division_by_zero_is_an_error() -> None:
    fn = compiled(lambda a, b: a // b)
    with pytest.raises(RuntimeError, match=r"(?i)zero"):
        fn(torch.ones(5, dtype=torch.int64), torch.tensor([1, 2, 0, 3, 4]))


def test_booleans() -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    check(all_of(torch.add, torch.mul, torch.logical_xor, torch.bitwise_and, torch.maximum,
                 torch.eq, torch.lt, lambda a, b: ~a, lambda a, b: a + 1, lambda a, b: a * 2.5,
                 lambda a, b: a**2, lambda a, b: a / b.float()), a, b)  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_powers(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-4, 4, 301), torch.tensor([nan, inf, -inf, 0.0, -0.0])]).to(dtype)
    exponents = [0, 1, 2, 3, -1, -2, 0.5, -0.5, 4, 1.7]
    check(all_of(*(lambda x, p=p: x**p for p in exponents), lambda x: 2**x, lambda x: 0.3**x,
                 lambda x: x.abs() ** x, lambda x: torch.float_power(x, 2)), x)  # fmt: skip


def test_small_powers_are_products() -> None:
    x = torch.linspace(-4, 4, 301)
    check(lambda x: (x**2, x**3), x, rtol=0, atol=0)
    power, root = compiled(lambda x: (x**0.5, x.sqrt()))(x.abs())
    assert torch.equal(power, root)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_frexp(dtype: torch.dtype) -> None:
    check(lambda x: tuple(torch.frexp(x)), odd(dtype)[3:], bits=False, rtol=0, atol=0)


def test_rounding_to_decimals() -> None:
    x = torch.linspace(-30, 30, 301)
    check(lambda x: (x.round(decimals=1), x.round(decimals=-1)), x, rtol=0, atol=0)


PROMOTION = all_of(
    lambda f, i, b, z: f + i, lambda f, i, b, z: f * b, lambda f, i, b, z: i * z,
    lambda f, i, b, z: i + b, lambda f, i, b, z: f + 1, lambda f, i, b, z: i + 0.5,
    lambda f, i, b, z: i / 2, lambda f, i, b, z: i < 2.5, lambda f, i, b, z: f.bfloat16() + z,
    lambda f, i, b, z: f.bfloat16() * 0.3, lambda f, i, b, z: f.bfloat16() > 0.3,
    lambda f, i, b, z: torch.where(b, f.half(), i), lambda f, i, b, z: torch.where(b, 1.0, i),
    lambda f, i, b, z: torch.lerp(f, z.float(), 0.3),
    lambda f, i, b, z: torch.addcmul(f, f, z, value=0.3),
    lambda f, i, b, z: torch.addcdiv(f.bfloat16(), f.bfloat16(), f.bfloat16() + 9, value=0.3),
)  # fmt: skip


def test_promotion() -> None:
    f = torch.randn(4, 3)
    check(PROMOTION, f, torch.arange(3), torch.tensor([True, False, True]),
          torch.tensor(0.7, dtype=torch.float64))  # fmt: skip


CASTS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
         torch.int16, torch.uint8, torch.bool]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_casts(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2.7, 100.4, 0.3, 3.5]).to(dtype)
    check(lambda x: [x.to(d) for d in CASTS], x, rtol=0, atol=0)
    check(lambda x: x.bfloat16().float() + x.half().float(), x, rtol=0, atol=0)


ACTIVATIONS = all_of(
    F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, F.mish, F.hardswish,
    F.hardsigmoid, lambda x: F.hardtanh(x, -0.3, 0.7), lambda x: F.elu(x, 0.7), F.selu,
    lambda x: F.celu(x, 0.7), lambda x: F.softplus(x, 2.0, 3.0), lambda x: F.leaky_relu(x, 0.3),
    lambda x: F.threshold(x, 0.3, 0.1), F.hardshrink, F.softshrink, F.logsigmoid, F.relu6,
    F.tanhshrink, F.softsign, torch.sigmoid, torch.tanh, lambda x: torch.logit(x, 0.1),
    lambda x: F.glu(x, 0), lambda x: F.prelu(x, torch.tensor([0.2], dtype=x.dtype)),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-5, 5, 201), torch.tensor([3.0, -3.0, 0.0, 0.3, -0.3])]).to(dtype)
    check(lambda x: [*ACTIVATIONS(x), F.silu(x.view(2, -1).t())], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_gradients(dtype: torch.dtype) -> None:
    x = torch.linspace(-5, 5, 200).to(dtype)

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        total = sum((y.float() * (k + 1)).sum() for k, y in enumerate(compute(leaf)))
        (found,) = torch.autograd.grad(total, leaf)
        return found

    compute: Callable[[Tensor], list[Tensor]] = ACTIVATIONS
    expected = gradient(x)
    compute = compiled(ACTIVATIONS)
    # in bfloat16 the sum over all activations rounds, and in another order
    rtol, atol = (0.05, 0.5) if dtype == torch.bfloat16 else (1e-4, 1e-4)
    torch.testing.assert_close(gradient(x), expected, rtol=rtol, atol=atol)


SIZES = [(), (1,), (0,), (3, 0, 2), (7,), (5, 1, 9), (2, 3, 4, 5)]


@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_broadcasting(size: tuple[int, ...]) -> None:
    x = torch.randn(size)
    check(lambda x, y: (x + y, (x * y).relu(), x > y), x, torch.randn(x.shape[-1:]))


def test_strides_follow_eager() -> None:
    x = torch.randn(4, 6, 5).permute(2, 0, 1)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    check(lambda x, y: (x * 2 + x.exp(), y + 1, x[1:, ::2].abs(), x.clone(), y.contiguous()),
          x, image)  # fmt: skip


def test_dynamic_sizes_compile_once() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("tilewright")
    torch._dynamo.reset()

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return F.gelu(x + y) * x.shape[0] + torch.where(x > 0, x, y)

    ours = torch.compile(fn, backend=counter, dynamic=True)
    for n in (5, 8, 17):
        x, y = torch.randn(n, 3), torch.randn(3)
        torch.testing.assert_close(ours(x, y), fn(x, y))
    assert counter.frame_count == 1


def test_inputs_are_changed_in_place() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        before = x * 3
        x.add_(1)
        y.copy_(x.t() + y.t())  # reads another place of y than it writes
        x[1:, ::2].mul_(2)
        return before, x + y

    check(fn, torch.randn(4, 4), torch.randn(4, 4))
    check(fn, torch.randn(4, 4).t(), torch.randn(4, 4), dynamic=True)


def test_cross_product() -> None:
    check(lambda a, b: (torch.linalg.cross(a, b), torch.cross(a, b, dim=1)),
          torch.randn(2, 3, 3), torch.randn(1, 3, 3))  # fmt: skip
