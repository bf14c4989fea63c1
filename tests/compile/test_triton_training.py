"""Groups whose rows are cut into chunks: losses, statistics and sums that leave partial results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import programs
from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tests.compile.test_triton_in_turn import for_card
from tests.limits import limit
from tilewright.lower import rows as rows_of
from tilewright.testing import run_and_get_code


def test_a_mean_of_losses_leaves_the_rows_in_one_pass() -> None:
    """The rows are too long to stay in registers while losses are added up: they are folded in a
    kernel of their own, in one pass."""
    x, t = torch.empty(8192, 128256, dtype=torch.bfloat16), torch.zeros(8192, dtype=torch.int64)
    made = kernels_of(lambda x, t: F.cross_entropy(x, t), x, t)
    assert sum("for roffset" in k.text for k in made) == 1
    assert "tri.online" in made[0].text
    for kernel in made:
        assert build(kernel).spills == 0


def test_rows_of_losses_that_all_run_at_once() -> None:
    """Of 2982 programs of four warps a card of 132 processors would run 2112 first."""
    x, t = torch.empty(2982, 30522, dtype=torch.bfloat16), torch.zeros(2982, dtype=torch.int64)
    kernel, *_ = kernels_of(lambda x, t: F.cross_entropy(x.float(), t), x, t)
    assert kernel.config.num_warps == 2


@pytest.mark.parametrize("classes", [32000, 50257])
def test_all_threads_of_a_gradient_of_losses_run(classes: int) -> None:
    """64 warps on a processor, with 32 registers each."""
    x = torch.empty(8192, classes, dtype=torch.bfloat16)
    rows = torch.empty(8192)

    def gradient(x: Tensor, top: Tensor, total: Tensor) -> Tensor:
        return (torch.exp(x.float() - top[:, None] - total[:, None]) * 0.1 - 0.3).bfloat16()

    (kernel,) = kernels_of(gradient, x, rows, rows)
    assert (kernel.config.num_warps, kernel.config.registers) == (8, 32)
    assert build(kernel).spills == 0
    assert kernel.configs[1] == replace(kernel.config, registers=None)


def test_chunks_that_end_sooner() -> None:
    x = torch.randn(2, 33001)
    check(lambda x: torch.softmax(x, -1), x, rtol=1e-5, atol=1e-5)
    check(lambda x: (x.var(-1), x.argmax(-1), x.sum()), x, rtol=1e-4, atol=1e-4)
    check(lambda x: (x.var(0), x.sum(1)), torch.randn(501, 303), rtol=1e-4, atol=1e-4)


def test_losses_train() -> None:
    x, t = torch.randn(96, 40, requires_grad=True), torch.randint(0, 40, (96,))
    check(lambda x, t: F.cross_entropy(x, t), x.detach(), t)


def test_a_softmax_of_any_length_goes_where_its_scores_were() -> None:
    """The result takes the place of the product it is computed from: a later loop reads the scores
    again before it stores there."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-2, -1) * 0.125
        bias = torch.ones_like(scores, dtype=torch.bool).tril().logical_not()
        return torch.softmax(scores.masked_fill(bias, float("-inf")), -1) @ v

    args = [torch.randn(2, 3, 19, 8) for _ in range(3)]
    with as_cuda():
        fn = torch.compile(attention, backend="tilewright", dynamic=True)
        found, code = run_and_get_code(fn, *args)
    torch.testing.assert_close(found, attention(*args), rtol=1e-4, atol=1e-5)
    assert sum("@triton.jit" in text and "tri.online" in text for text in code) == 1


def _softmax_of_a_norm(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return torch.softmax(F.layer_norm(x, x.shape[-1:], w, b), -1).square().sum(0)


def _norm_of_gelu(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return F.layer_norm(F.gelu(x), x.shape[-1:], w, b)


def _twice_normed(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return F.layer_norm(F.rms_norm(x, x.shape[-1:], w), x.shape[-1:], b)


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [128, 300])
@pytest.mark.parametrize("f", [_softmax_of_a_norm, _norm_of_gelu, _twice_normed])
def test_gradients_of_norms_whose_rows_run_in_order(f: Callable[..., Any], size: int) -> None:
    """Numbers of a row are loaded beside rows that run one after the other, and the place of each
    depends on the row: the kernels compile, and compute what eager does."""
    with as_cuda():
        args = [torch.randn(65, size), torch.randn(size), torch.randn(size)]
        loose = {"rtol": 1e-4, "atol": 1e-4}
        programs.check(f, *(a.requires_grad_() for a in args), tolerance=loose)


def test_a_small_network_trains() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))
    x, y = torch.randn(32, 64), torch.randn(32, 8)
    gradients: list[list[Tensor]] = []
    with as_cuda():
        for call in (model, torch.compile(model, backend="tilewright")):
            model.zero_grad()
            F.mse_loss(call(x), y).backward()
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


def test_gradients_of_a_table_gather_their_rows() -> None:
    """Runs of none, of a few, and of more than are added at once."""
    ids, table = torch.randint(0, 40, (9, 20)), torch.randn(50, 70, requires_grad=True)
    loose = {"rtol": 1e-4, "atol": 1e-4}
    with mock.patch.object(rows_of, "worthwhile", return_value=True), as_cuda():
        programs.check(lambda i, t: F.embedding(i, t, 3) * 2, ids, table, tolerance=loose)


def test_what_is_added_to_a_table_is_computed_where_it_is_added() -> None:
    """Zeros of the type of a gradient are no reader of it."""
    table, x = torch.randn(30, 16, requires_grad=True), torch.randn(40, 16)
    at = torch.arange(40) % 7

    def loss(table: Tensor, at: Tensor, x: Tensor) -> Tensor:
        return F.mse_loss(table[at], x)

    with as_cuda():
        fn = torch.compile(loss, backend="tilewright")
        (found,), text = run_and_get_code(lambda: torch.autograd.grad(fn(table, at, x), table))
    assert text[-1].count("@triton.jit") == 2 and "tl.atomic_add(" in text[-1]
    torch.testing.assert_close(found, torch.autograd.grad(loss(table, at, x), table)[0])


def test_rows_that_a_key_does_not_have_are_branched_around() -> None:
    """What is not added is not computed: of rows found beside the first, few have any."""

    def gradient(grad: Tensor, ids: Tensor) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(grad * 2, ids, 32000, -1, False)

    grad = torch.empty(32768, 2048, dtype=torch.bfloat16)
    with mock.patch.object(rows_of, "worthwhile", return_value=True):
        *_, beside, last = kernels_of(gradient, grad, torch.empty(32768, dtype=torch.int64))
    assert last.text.count("if tri.any_of") == rows_of.FEW + 1
    assert beside.text.count("if tri.any_of") == 1 and "tl.atomic_add" in beside.text
    made = build(last)
    assert made.widest("ld.global") == made.widest("st.global") == 16 and not made.spills


def test_rows_that_no_cache_keeps_are_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one program each, where several do not hold them and nothing is loaded that the kernel has
    stored before."""
    limit(monkeypatch, "TICKETED_PROGRAMS", 1)
    limit(monkeypatch, "TICKETED_FEW_ROWS", 1)
    limit(monkeypatch, "COOPERATIVE_ROW", 1 << 40)

    def f(x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) * x.std(1, keepdim=True)

    def again(x: Tensor) -> Any:
        y = x * 2
        return y, y - y.amax(1, keepdim=True)

    x = torch.randn(20, 1 << 17)
    for fn in (f, again):
        with as_cuda():
            found, code = run_and_get_code(torch.compile(fn, backend="tilewright"), x)
        torch.testing.assert_close(found, fn(x), rtol=1e-4, atol=1e-4)
        assert "num_stages=STAGES" in "\n".join(code)


def test_smoothed_labels_need_one_walk_of_a_row() -> None:
    """The sum of a row of log softmax is that of its input, less so often what is subtracted; that
    of the gradient of a row is what all places have, so often, and what is added at one of them."""
    x, t = (torch.randn(9, 17008) * 3 + 9000).requires_grad_(), torch.randint(0, 17008, (9,))

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x, t, label_smoothing=0.1)

    def step(f: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        out = f(x)
        return out, *torch.autograd.grad(out, x)

    with as_cuda():
        found, code = run_and_get_code(step, torch.compile(loss, backend="tilewright"))
    for one, expected in zip(found, step(loss), strict=True):
        torch.testing.assert_close(one, expected)
    assert "".join(code).count("for roffset") == 2  # whole blocks, and what is left of the row


def test_sums_of_a_channel_are_taken_together() -> None:
    """What uses them is over a group's channels, and is in another kernel."""

    def backward(grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor) -> Any:
        return torch.ops.aten.native_group_norm_backward(
            grad, x, mean, inverse, weight, 4, 64, 1024, 8, [True, True, True])  # fmt: skip

    x, rows = torch.empty(4, 64, 32, 32, dtype=torch.bfloat16), torch.empty(4, 8)
    sums, *_ = for_card(backward, x, torch.empty_like(x), rows, torch.empty_like(rows),
                        torch.empty(64, dtype=torch.bfloat16))  # fmt: skip
    assert sums.text.count("tl.reduce(") == 2
