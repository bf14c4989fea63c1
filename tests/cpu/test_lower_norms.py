"""Normalisations against eager, forward and backward, natively; mixed types and run-time sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cpu.against_eager import check, compiled
from tests.cpu.gradients import check_training
from tilewright.testing import run_and_get_code

F32, BF16 = torch.float32, torch.bfloat16
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
HALF = {"rtol": 6e-2, "atol": 6e-2}


def limits(dtype: torch.dtype) -> dict[str, float]:
    return HALF if dtype == BF16 else CLOSE


@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("x_type", "w_type"), [(F32, F32), (BF16, BF16), (BF16, F32)])
class TestTypes:
    """Input, parameters: the second is what autocast gives."""

    def test_layer_norm(self, x_type: torch.dtype, w_type: torch.dtype, dynamic: bool) -> None:
        def f(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
            return [F.layer_norm(x, (37,), w, b), F.layer_norm(x, (37,))]

        check_training(f, torch.randn(4, 6, 37).to(x_type), torch.randn(37).to(w_type),
                       torch.randn(37).to(w_type), dynamic=dynamic, **limits(x_type))  # fmt: skip

    def test_group_norm(self, x_type: torch.dtype, w_type: torch.dtype, dynamic: bool) -> None:
        def f(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
            return [F.group_norm(x, 3, w, b), F.group_norm(x, 2), F.instance_norm(x, weight=w)]

        check_training(f, torch.randn(2, 6, 5, 4).to(x_type), torch.randn(6).to(w_type),
                       torch.randn(6).to(w_type), dynamic=dynamic, **limits(x_type))  # fmt: skip

    def test_batch_norm(self, x_type: torch.dtype, w_type: torch.dtype, dynamic: bool) -> None:
        mean, variance = torch.randn(6).to(w_type), (torch.rand(6) + 0.5).to(w_type)

        def f(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
            ours, theirs = mean.clone(), variance.clone()
            return [
                F.batch_norm(x, ours, theirs, w, b, True, 0.3), ours, theirs,
                F.batch_norm(x, None, None, w, b, True),
                F.batch_norm(x, mean, variance, w, b, False),
            ]  # fmt: skip

        check_training(f, torch.randn(4, 6, 5).to(x_type), torch.randn(6).to(w_type),
                       torch.randn(6).to(w_type), dynamic=dynamic, **limits(x_type))  # fmt: skip


def test_a_module_updates_its_running_statistics() -> None:
    x = torch.randn(2, 8, 5, 3, 4).unbind()
    ours, theirs = nn.BatchNorm2d(5), nn.BatchNorm2d(5)
    theirs.load_state_dict(ours.state_dict())
    x = [torch.randn(8, 5, 3, 4).contiguous(memory_format=torch.channels_last) for _ in x]
    run = compiled(ours)
    for step in x:
        torch.testing.assert_close(run(step), theirs(step), check_stride=True, **CLOSE)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x[0]), theirs(x[0]), **CLOSE)


def test_rms_norm() -> None:
    def f(x: Tensor, w: Tensor) -> list[Tensor]:
        return [F.rms_norm(x, (24,), w), F.rms_norm(x, (6, 24), eps=0.1)]

    check_training(f, torch.randn(4, 6, 24), torch.randn(24), **CLOSE)


def test_fused_rms_norm() -> None:
    x, w, grad = torch.randn(4, 24), torch.randn(24), torch.randn(4, 24)

    def f(x: Tensor, w: Tensor, grad: Tensor) -> list[Tensor]:
        out, inverse = torch.ops.aten._fused_rms_norm(x, [24], w, 1e-3)
        return [out, *torch.ops.aten._fused_rms_norm_backward(grad, x, [24], inverse, w,
                                                              [True, True])]  # fmt: skip

    x.requires_grad_(), w.requires_grad_()
    expected = F.rms_norm(x, (24,), w, 1e-3)
    gradients = torch.autograd.grad(expected, (x, w), grad)
    actual = compiled(f)(x.detach(), w.detach(), grad)
    torch.testing.assert_close(actual, [expected.detach(), *gradients], **CLOSE)


def test_norms_of_nothing_and_of_one() -> None:
    def f(empty: Tensor, one: Tensor) -> list[Tensor]:
        return [F.layer_norm(empty, (5,)), F.group_norm(empty[..., None], 5),
                F.layer_norm(one, (1,)), F.local_response_norm(one[None], 2)]  # fmt: skip

    check(f, torch.randn(0, 5), torch.randn(3, 1), fallbacks=True)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_weight_norm(dim: int) -> None:
    size = [1, 1, 1]
    size[dim] = (4, 6, 5)[dim]
    check_training(lambda v, g: torch._weight_norm(v, g, dim), torch.randn(4, 6, 5),
                   torch.randn(size), **CLOSE)  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_renorm(dtype: torch.dtype) -> None:
    def f(x: Tensor) -> list[Tensor]:
        return [torch.renorm(x, 2, 0, 1.0), torch.renorm(x, 1, 2, 0.5), x.renorm(3, 1, 2.0)]

    check(f, torch.randn(4, 6, 5).to(dtype), **limits(dtype))


def test_statistics_of_far_away_values() -> None:
    """A mean far from zero does not drown the variance."""
    x = torch.randn(8, 1000) + 3000
    ours = compiled(lambda t: F.layer_norm(t, (1000,)))(x)
    exact = F.layer_norm(x.double(), (1000,))
    assert (ours - exact).abs().max() < 2e-3


@pytest.mark.parametrize("shape", [(4, 5, 3, 7), (2, 3, 4, 4)])
def test_batch_norm_rounds_its_statistics_where_eager_does(shape: tuple[int, ...]) -> None:
    """To the bit, up to the order of float32 sums: even the count is rounded."""
    x, grad = (torch.randn(shape).bfloat16() for _ in range(2))
    weight, bias = (torch.rand(shape[1]).bfloat16() for _ in range(2))

    def both(x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        found = torch.ops.aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
        back = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, None, None, found[1], found[2], True, 1e-5, [True, True, True]
        )
        return [*found, *back]

    args = (x, grad, weight, bias)
    for a, e in zip(compiled(both)(*args), both(*args), strict=True):
        apart = (a != e).double().mean().item()
        assert apart < 0.005, f"{apart:.1%} of the elements differ"


@pytest.mark.parametrize("shape", [(4, 7), (70000, 2)])
def test_float16_holds_neither_the_sum_of_squares_nor_the_count(shape: tuple[int, int]) -> None:
    x = (150 * torch.randn(shape)).half()
    ours = compiled(lambda t: F.batch_norm(t, None, None, training=True))(x)
    exact = F.batch_norm(x.double(), None, None, training=True)
    assert (ours - exact).abs().max() < 4e-3


# ---- columns that a group of rows folds, one group after the other


def channels(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Statistics of channels that are last in memory, then of groups of them, then the image."""
    n, c = x.shape[:2]
    variance, mean = torch.var_mean(x, (2, 3), correction=0)
    groups = mean.view(n, 4, c // 4)
    middle = groups.mean(2, keepdim=True)
    spread = (variance.view(n, 4, -1) + (groups - middle).square()).mean(2, keepdim=True)
    whole = (n, 4, c // 4)
    centred = x - middle.expand(whole).reshape(n, c, 1, 1)
    scaled = centred * (spread + 1e-5).rsqrt().expand(whole).reshape(n, c, 1, 1)
    return scaled * w[:, None, None], x.amax((2, 3)), (x * scaled).sum((2, 3)).softmax(-1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [(3, 64, 7, 9), (2, 96, 5, 4), (1, 40, 33, 31), (2, 12, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_channels_that_are_last_are_folded_side_by_side(
    size: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = (5 + 2 * torch.randn(size)).to(dtype).contiguous(memory_format=torch.channels_last)
    w = torch.randn(size[1]).to(dtype)
    x[0, 1, 2, 2] = 40.0
    got = torch.compile(channels, backend="tilewright")(x, w)
    right = channels(x.double(), w.double())
    for ours, eager, exact in zip(got, channels(x, w), right, strict=True):
        assert ours.dtype == eager.dtype and ours.stride() == eager.stride()
        rounding = 8 * torch.finfo(dtype).eps * exact.abs().max().clamp_min(1)
        allowed = (eager.double() - exact).abs().max() * 2 + rounding
        assert (ours.double() - exact).abs().max() <= allowed


# ---- layouts


LAST, FIRST = torch.channels_last, torch.contiguous_format


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("given", [LAST, FIRST])
@pytest.mark.parametrize("wanted", [LAST, FIRST])
@pytest.mark.parametrize("channels", [4, 8])
def test_a_group_norm_reads_its_image_once_in_any_layout(
    given: torch.memory_format, wanted: torch.memory_format, channels: int
) -> None:
    """Its passes over a group whose channels are apart are over a copy that stays in cache, and
    what is stored few channels at once is computed along the places."""

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.silu(F.group_norm(x, 8, w, b))
        return y.contiguous(memory_format=wanted)

    x = torch.randn(4, 8 * channels, 16, 16).contiguous(memory_format=given)
    w, b = torch.randn(2, 8 * channels).unbind()
    actual, (code,) = run_and_get_code(torch.compile(f, backend="tilewright"), x, w, b)
    expected = f(x, w, b)
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    kernel = code[code.index("static void part0") :]
    assert kernel.count("for (int64_t d0 ") == 1  # in one kernel
    if given is LAST:
        assert kernel.count("= p0[") == 1
    if given is not wanted:
        inside = kernel[kernel.rindex("#pragma omp simd") :]
        assert "r2r3" in inside.splitlines()[1] or "r3r4" in inside.splitlines()[1]


def test_rows_that_are_looked_up_are_folded_along_themselves() -> None:
    """A short loop beside, of heads, does not make the fold walk edges, which lie anywhere."""

    def f(x: Tensor, i: Tensor, j: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        return score.exp(), (x[i] * x[j]).sum(-1)

    args = torch.randn(50, 4, 16), torch.randint(50, (400,)), torch.randint(50, (400,))
    score = torch.randn(400, 4)
    actual, (code,) = run_and_get_code(torch.compile(f, backend="tilewright"), *args, score)
    torch.testing.assert_close(actual, f(*args, score), rtol=1e-4, atol=1e-4)
    assert "acc" in code and "[lane]" not in code


def test_a_channels_deviation_is_inverted_once_and_not_for_every_place() -> None:
    """Where its variance is not written by the kernel that reads it."""

    def function(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.relu(F.batch_norm(x, mean, variance))

    x = torch.randn(2, 24, 9, 7).to(memory_format=torch.channels_last)
    statistics = torch.randn(24), torch.rand(24) + 0.5
    result, (text,) = run_and_get_code(compiled(function), x, *statistics)
    torch.testing.assert_close(result, function(x, *statistics))
    table, _, rows = text.partition("for (int64_t d0d2d3")
    assert "tw::rsqrt" in table and "tw::rsqrt" not in rows


def test_what_the_kernel_itself_changes_is_in_no_table() -> None:
    def function(x: Tensor) -> Tensor:
        x.add_(1)
        return x * torch.rsqrt(x[0] + 1)

    check(function, torch.rand(40, 24))
