"""Programs as users write them: custom operators, control flow, kinds of tensors, values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from tests.programs import BACKEND, check, compiled, fresh_compiler, leaf, same  # noqa: F401

# Custom operators


@torch.library.custom_op("tilewright_programs::scaled_sin", mutates_args=())
def scaled_sin(x: Tensor, scale: float) -> Tensor:
    return torch.from_numpy(x.detach().numpy().copy()).sin() * scale


@scaled_sin.register_fake
def _scaled_sin_fake(x: Tensor, scale: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _scaled_sin_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _scaled_sin_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad * ctx.saved_tensors[0].cos() * ctx.scale, None


scaled_sin.register_autograd(_scaled_sin_backward, setup_context=_scaled_sin_setup)


@torch.library.custom_op("tilewright_programs::push", mutates_args={"buffer"})
def push(buffer: Tensor, value: Tensor) -> None:
    buffer[1:] = buffer[:-1].clone()
    buffer[0] = value


def test_custom_op_with_gradient() -> None:
    check(lambda x: scaled_sin(x * 2, 3.0) + x, leaf(4, 5))
    check(lambda x: scaled_sin(x.t(), 3.0) + 1, torch.randn(4, 5), dynamic=True)


def test_custom_op_that_mutates() -> None:
    def function(buffer: Tensor, x: Tensor) -> Tensor:
        temporary = buffer * 2
        push(temporary, x.exp())
        push(buffer, x)
        return temporary + buffer

    check(function, torch.randn(4, 3), torch.randn(3))


def test_custom_autograd_function() -> None:
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(-1, 1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * (x.abs() < 0.5) * 10

    check(lambda x: Clipped.apply(x * 2) + x, leaf(20))


# Control flow


def test_cond() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0, lambda a, b: (a + b).relu(), lambda a, b: (a * b).exp(), (x, y)
        )

    y = torch.randn(4)
    for x in (torch.ones(4), -torch.ones(4)):
        check(function, x, y)
        check(function, x.clone().requires_grad_(), y.clone().requires_grad_())


def test_while_loop() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def function(n: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return while_loop(lambda i, _: i > 0, lambda i, t: (i - 1, t * 1.5 + 1), (n, x))

    call = compiled(function)
    for n in (0, 1, 5):
        x = torch.randn(3)
        got, expected = call(torch.tensor(n), x), x
        for _ in range(n):
            expected = expected * 1.5 + 1
        same(list(got), [torch.tensor(0), expected])


def test_scan() -> None:
    from torch._higher_order_ops.scan import scan

    def function(start: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        return scan(lambda c, x: (c * 0.5 + x, c.sin() + x), start, xs)

    carry, outputs = compiled(function)(torch.zeros(3), xs := torch.randn(6, 3))
    state, expected = torch.zeros(3), []
    for x in xs:
        expected.append(state.sin() + x)
        state = state * 0.5 + x
    torch.testing.assert_close(carry, state)
    torch.testing.assert_close(outputs, torch.stack(expected))


def test_nested_compile_region() -> None:
    @torch.compiler.nested_compile_region
    def block(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sin() + x

    def function(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = block(x, w)
        return x

    check(function, torch.randn(4, 5), torch.randn(5))
    check(function, leaf(4, 5), leaf(5))


def test_vmap_and_grad_transforms() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda a, b: (a * b).sin().sum()), (0, None))(x, w)

    check(function, torch.randn(4, 5), torch.randn(5))


# Kinds of tensors


def test_complex() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = torch.complex(x, y)
        return z * z.conj() + 1j, z.abs(), z.angle(), torch.view_as_real(z.exp()), z.real + z.imag

    check(function, torch.randn(4, 5), torch.randn(4, 5))
    check(lambda z: (z * 2).abs() + z.real, leaf(5, dtype=torch.complex64))
    check(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=16) + 1, leaf(3, 16))


def test_sparse() -> None:
    sparse = torch.eye(4).to_sparse()
    call = torch.compile(lambda s, x: torch.sparse.mm(s, x).relu() + 1, backend=BACKEND)
    x = torch.randn(4, 3)
    same(call(sparse, x), x.relu() + 1)
    made = torch.compile(lambda t: (t * 2).to_sparse().to_dense() + 1, backend=BACKEND)
    same(made(x), x * 2 + 1)


def test_quantised() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x * 2, 0.1, 10, torch.quint8).dequantize() + 1

    call = torch.compile(function, backend=BACKEND)
    x = torch.randn(4, 5)
    same(call(x), function(x))


def test_fake_quantise() -> None:
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127) * 2, leaf(4, 5))


@pytest.mark.parametrize("dynamic", [False, True])
def test_zero_size_tensors(dynamic: bool) -> None:
    def function(x: Tensor) -> list[Tensor]:
        total = x.sum(), x.sum(1), x.prod(0), (x > 0).all()
        return [x.exp() + 1, *total, torch.cat([x, x + 1]), x.softmax(-1), x.mean()]

    check(function, torch.empty(0, 5), dynamic=dynamic)
    check(function, torch.empty(5, 0), dynamic=dynamic)
    check(lambda x: x @ x.t(), torch.empty(3, 0), dynamic=dynamic)


def test_zero_dimensional_tensors() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x + y, x.sum(), x.softmax(0), x.unsqueeze(0) * y, x.cumsum(0), x.max(), x.argmax()]

    check(function, torch.tensor(2.0), torch.tensor(-3.0))
    check(lambda x: (x * 2).exp(), leaf())


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 3:],
        lambda x: x[:1].expand(6, 8),
        lambda x: x.flip(1),
        lambda x: x.as_strided((4, 3), (3, 1)),
        lambda x: x.view(2, 3, 8).permute(2, 0, 1),
        lambda x: x.unfold(1, 3, 2),
    ],
    ids=["transposed", "stepped", "offset", "expanded", "flipped", "overlap", "permuted", "window"],
)
def test_odd_strides(make: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x * 2 + 1, x.sum(0), x.sum(-1), x.flip(0) - x, x.exp().transpose(0, 1)

    base = torch.randn(6, 8)
    same(compiled(function)(make(base)), function(make(base)))
    same(compiled(function, dynamic=True)(make(base)), function(make(base)))
    inner = compiled(lambda x: function(make(x * 3)))
    same(inner(base), function(make(base * 3)))


def test_output_strides_are_eagers() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x + y, y + x, torch.empty_like(x).fill_(1), x.contiguous() + 1, x.clone(), x.t() * 2

    x, y = torch.randn(5, 4).t(), torch.randn(4, 5)
    same(compiled(function)(x, y), function(x, y))


# Values


def test_integer_division_and_remainder() -> None:
    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        return [
            a // b,
            a % b,
            torch.div(a, b, rounding_mode="trunc"),
            torch.div(a, b, rounding_mode="floor"),
            torch.fmod(a, b),
            a / b,
            torch.remainder(a, -3),
            a // -3,
        ]

    a = torch.tensor([7, -7, 7, -7, 0, 6, -6, 1])
    b = torch.tensor([2, 2, -2, -2, 5, 3, 3, -4])
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        check(function, a.to(dtype), b.to(dtype))
    check(function, a.float(), b.float())


def test_integer_overflow_wraps() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [x + 1, x * 3, -x, x.sum(), x << 1, x - x.min(), x.abs()]

    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        check(function, torch.tensor([limits.max, limits.min, 1, limits.max - 1], dtype=dtype))


def test_nan_and_signed_zero() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [
            torch.minimum(x, y),
            torch.maximum(x, y),
            torch.fmin(x, y),
            torch.fmax(x, y),
            x.relu(),
            x.clamp(-1, 1),
            x.clamp(min=0.0),
            torch.where(x > y, x, y),
            x.sign(),
            x.round(),
            -x,
            x.abs(),
            torch.copysign(y, x),
            x == y,
            x != y,
            x <= y,
            x.trunc(),
            x.ceil(),
        ]

    nan, inf = float("nan"), float("inf")
    values = torch.tensor([nan, 0.0, -0.0, inf, -inf, 1.5, -2.5, 0.5, -0.5, 1e-40])
    x, y = values.repeat_interleave(10), values.repeat(10)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        a, b = x.to(dtype), y.to(dtype)
        for got, want in zip(compiled(function)(a, b), function(a, b), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            # of 0.0 and -0.0, eager's bfloat16 fmin and fmax take another than its float32 ones
            if want.is_floating_point() and dtype != torch.bfloat16:
                number = ~want.isnan()
                assert torch.equal(got.signbit()[number], want.signbit()[number])


def test_nan_in_reductions() -> None:
    def function(x: Tensor) -> list[Any]:
        return [x.max(1), x.min(1), x.argmax(1), x.amax(1), x.sum(1), x.cummax(1), x.softmax(1)]

    x = torch.randn(5, 33)
    x[1, 7] = x[1, 20] = float("nan")
    x[2, 0], x[3, 32] = float("inf"), float("-inf")
    x[4] = 2.0
    check(function, x)


def test_float_to_integer_casts() -> None:
    def function(x: Tensor) -> list[Tensor]:
        kinds = (torch.int64, torch.int32, torch.int8, torch.bool, torch.bfloat16, torch.float64)
        return [x.to(kind) for kind in kinds]

    check(function, torch.tensor([0.0, -0.9, 1.9, -2.5, 100.0, 1e-3, -127.0]))


@pytest.mark.parametrize("bad", [5, -6, 1 << 40])
def test_index_out_of_range_is_an_error(bad: int) -> None:
    """After the error the process and the compiled function still work."""
    programs: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, i: x[i] + 1,
        lambda x, i: x.index_select(0, i) * 2,
        lambda x, i: x.gather(0, i.unsqueeze(1)) + 1,
        lambda x, i: F.embedding(i, x) * 2,
        lambda x, i: torch.zeros(5, 3).index_put((i,), x[:2]) + 1,
        lambda x, i: torch.zeros(5, 3).scatter(0, i.unsqueeze(1), x[:2]) + 1,
    ]
    x = torch.randn(5, 3)
    for function in programs:
        call = compiled(function)
        good = torch.tensor([1, 4])
        same(call(x, good), function(x, good))
        with pytest.raises((IndexError, RuntimeError)):
            call(x, torch.tensor([1, bad]))
        same(call(x, good), function(x, good))


def test_negative_indices() -> None:
    check(lambda x, i: x[i, :-1] + x[-1, 1:], torch.randn(5, 4), torch.tensor([-1, 0, -5, 4]))


def test_type_promotion() -> None:
    def function(i: Tensor, f: Tensor, h: Tensor, z: Tensor, b: Tensor) -> list[Tensor]:
        return [
            i + 1,
            i + 1.5,
            i * f,
            f + z,
            h + z,
            h + f,
            i + z,
            h * 2.5,
            b + 1,
            b + b,
            b * 1.5,
            i / 2,
            i.sum(),
            b.sum(),
            torch.where(b, h, f),
            torch.where(b, 1, f),
            torch.cat([h, f]),
            i > 1.5,
            b & (i > 0),
            i**2,
            2**f,
            i.mean(dtype=torch.float64),
        ]

    zero_dim = torch.tensor(2.5, dtype=torch.float64)
    i, f = torch.arange(-3, 3, dtype=torch.int32), torch.randn(6)
    check(function, i, f, torch.randn(6, dtype=torch.bfloat16), zero_dim, torch.rand(6) > 0.5)


def test_mixed_dtypes_with_gradients() -> None:
    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (x * y).to(torch.float64).sin() * w + y.sum()

    check(
        function,
        leaf(4, 5),
        leaf(5, dtype=torch.bfloat16),
        leaf(4, 5, dtype=torch.float64),
        tolerance={"rtol": 2e-2, "atol": 2e-2},
    )


def test_bfloat16_sum_is_accurate() -> None:
    x = torch.rand(4, 50_000).to(torch.bfloat16)
    exact = x.double().sum(1)
    error = (compiled(lambda t: t.sum(1))(x).double() - exact).abs() / exact
    assert error.max() < 2**-8


def test_float32_reductions_are_accurate() -> None:
    """Against float64, with a mean far from zero: one pass over squares would lose it."""
    x = torch.randn(3, 100_000) + 1000
    wanted = (x.double().mean(1), x.double().var(1), x.double().sum(1))
    for got, want in zip(
        compiled(lambda t: (t.mean(1), t.var(1), t.sum(1)))(x), wanted, strict=True
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


def test_many_inputs_and_outputs() -> None:
    check(lambda *ts: [t * i + ts[0] for i, t in enumerate(ts)], *(leaf(3) for _ in range(40)))


def test_structured_inputs_and_outputs() -> None:
    def function(batch: dict[str, Any]) -> dict[str, Any]:
        x, (y, scale) = batch["x"], batch["rest"]
        return {"sum": x + y * scale, "parts": [x, (y, None)], "name": "done"}

    check(function, {"x": torch.randn(3), "rest": (torch.randn(3), 2.0)})
