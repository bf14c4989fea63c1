"""Programs as users write them: shapes, mutation, random numbers, modes, modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from tests.programs import (  # noqa: F401
    BACKEND,
    EAGER_RANDOM,
    check,
    compiled,
    counting,
    fresh_compiler,
    leaf,
    same,
)

# Shapes


def softened(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x * 2 + y, dim=-1).sum(0) * x.shape[0]


def test_static_shapes_compile_once_per_shape() -> None:
    call, counter = counting(softened, dynamic=False)
    for rows in (4, 4, 6, 6, 4):
        x, y = torch.randn(rows, 8), torch.randn(8)
        same(call(x, y), softened(x, y))
    assert counter.frame_count == 2


def test_dynamic_shapes_compile_once() -> None:
    call, counter = counting(softened, dynamic=True)
    for rows, columns in ((4, 8), (5, 9), (17, 3), (2, 64), (33, 100)):
        x, y = torch.randn(rows, columns), torch.randn(columns)
        same(call(x, y), softened(x, y))
    assert counter.frame_count == 1


def test_dynamic_training_compiles_once() -> None:
    call, counter = counting(softened, dynamic=True)
    for rows, columns in ((4, 8), (5, 9), (17, 3)):
        x, y = leaf(rows, columns, dtype=torch.float64), leaf(columns, dtype=torch.float64)
        grads = torch.autograd.grad(call(x, y).square().sum(), (x, y))
        same(grads, torch.autograd.grad(softened(x, y).square().sum(), (x, y)))
    assert counter.frame_count == 1


def test_marked_dynamic_compiles_once() -> None:
    call, counter = counting(softened)
    for rows in (3, 8, 21):
        x, y = torch.randn(rows, 16), torch.randn(16)
        torch._dynamo.mark_dynamic(x, 0)
        same(call(x, y), softened(x, y))
    assert counter.frame_count == 1


def test_automatic_dynamic_compiles_twice() -> None:
    call, counter = counting(softened)
    for rows in (3, 8, 21, 40):
        x, y = torch.randn(rows, 16), torch.randn(16)
        same(call(x, y), softened(x, y))
    assert counter.frame_count == 2


def test_dynamic_sizes_in_arithmetic_and_views() -> None:
    def function(x: Tensor) -> tuple[Tensor, int]:
        rows, columns = x.shape
        halves = x.reshape(rows // 2, 2, columns)
        return halves.mean(1) / (rows * columns) + torch.arange(columns), rows + 1

    call, counter = counting(function, dynamic=True)
    for rows, columns in ((4, 6), (8, 10), (12, 2)):
        x = torch.randn(rows, columns)
        same(call(x), function(x))
    assert counter.frame_count == 1


def test_integer_and_float_arguments() -> None:
    def function(x: Tensor, n: int, scale: float) -> Tensor:
        return x.repeat(n, 1) * scale + n

    call = compiled(function, dynamic=True)
    for n, scale in ((2, 0.5), (3, 1.5), (7, -2.0)):
        x = torch.randn(3, 4)
        same(call(x, n, scale), function(x, n, scale))


# Sizes known only when run


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_nonzero() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.nonzero(x > 0)
        return found, (found * 2 + 1).sum(0)

    call, counter = counting(function, dynamic=True)
    for rows in (5, 9):
        x = torch.randn(rows, 4)
        same(call(x), function(x))
    empty = -torch.ones(9, 4)
    same(call(empty), function(empty))
    assert counter.frame_count == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_masked_select() -> None:
    def function(x: Tensor) -> Tensor:
        return x.masked_select(x > 0).exp() + 1

    check(function, torch.randn(6, 7))
    check(function, leaf(6, 7))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_boolean_mask_indexing() -> None:
    check(lambda x, m: x[m].relu() * 2, torch.randn(6, 7), torch.rand(6) > 0.5)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_item_as_a_value() -> None:
    call, counter = counting(lambda x, n: x * n.item() + 1, dynamic=True)
    for n in (3, 5, -2):
        x = torch.randn(4)
        same(call(x, torch.tensor(n)), x * n + 1)
    assert counter.frame_count == 1


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_item_as_a_size() -> None:
    def function(n: Tensor) -> Tensor:
        size = n.item()
        torch._check(size >= 0)
        torch._check(size < 1000)
        return torch.ones(size).cumsum(0) * 2

    call, counter = counting(function)
    for n in (3, 8, 500):
        same(call(torch.tensor(n)), torch.ones(n).cumsum(0) * 2)
    assert counter.frame_count == 1
    same(call(torch.tensor(0)), torch.ones(0))


def test_unique_and_repeat_interleave() -> None:
    def function(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return torch.unique(x) * 2, torch.repeat_interleave(x, counts) + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(function, torch.randint(0, 4, (9,)), torch.randint(0, 3, (9,)))


# Mutation and aliasing


def test_input_is_mutated() -> None:
    check(lambda x, y: x.add_(y).mul_(2), torch.randn(4, 5), torch.randn(5))


def test_view_of_an_input_is_mutated() -> None:
    def function(x: Tensor) -> Tensor:
        x[:, 1:3].mul_(3)
        x.t()[0].zero_()
        return x.sum(0)

    check(function, torch.randn(4, 5))


def test_mutation_of_a_copied_value_reaches_nobody() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        before = y + 1
        y.mul_(0)
        return before, y

    check(function, torch.randn(4, 5))


def test_transposed_input_is_mutated() -> None:
    check(lambda x: x.copy_(torch.arange(20.0).view(5, 4)), torch.randn(4, 5).t())


def test_same_tensor_twice() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    a, b = torch.arange(6.0), torch.arange(6.0)
    same(compiled(function)(a, a), function(b, b))
    same(a, b)


def test_overlapping_views_of_one_tensor() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return y + 1

    a, b = torch.arange(8.0), torch.arange(8.0)
    same(compiled(function)(a[:6], a[2:]), function(b[:6], b[2:]))
    same(a, b)


def test_output_is_the_input() -> None:
    call = compiled(lambda x: (x, x * 2))
    x = torch.randn(3)
    assert call(x)[0] is x


def test_outputs_alias_inputs_and_each_other() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.exp()
        return x.view(-1), y, y.t()

    x = torch.randn(3, 4)
    flat, exp, transposed = compiled(function)(x)
    assert flat.data_ptr() == x.data_ptr()
    assert exp.data_ptr() == transposed.data_ptr()
    same((flat, exp, transposed), function(x))
    exp.zero_()
    assert not transposed.any()


def test_views_as_outputs() -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = x * 2
        return [y[1:], y.permute(2, 0, 1), y.unsqueeze(0).expand(3, -1, -1, -1), *y.split(2, 1)]

    check(function, torch.randn(3, 4, 5))
    check(function, leaf(3, 4, 5))


def test_in_place_chain_on_temporaries() -> None:
    def function(x: Tensor, i: Tensor) -> Tensor:
        y = torch.zeros(5, 4)
        y.index_add_(0, i, x)
        y[0] += 1
        y[:, -1] = 7
        y.clamp_(min=-0.5).relu_()
        return y.index_put_((i,), x, accumulate=True)

    check(function, torch.randn(6, 4), torch.tensor([0, 1, 1, 4, 2, 0]))


def test_slice_assignment_and_data_dependence() -> None:
    def function(x: Tensor) -> Tensor:
        for i in range(1, x.shape[0]):
            x[i] = x[i] + x[i - 1]
        return x * 1

    check(function, torch.randn(5, 3))


def test_in_place_with_gradients() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y[:, 0] = 0
        y.mul_(x)
        return y.exp()

    check(function, leaf(4, 5))


# Random numbers


def test_seeded_runs_repeat_and_calls_differ() -> None:
    call = compiled(lambda x: (torch.rand_like(x), torch.randn(100), torch.randint(0, 1000, (50,))))
    x = torch.empty(1000)
    torch.manual_seed(3)
    first, second = call(x), call(x)
    torch.manual_seed(3)
    same([call(x), call(x)], [first, second], rtol=0, atol=0)
    for a, b in zip(first, second, strict=True):
        assert not torch.equal(a, b)
    torch.manual_seed(4)
    assert not torch.equal(call(x)[0], first[0])


def test_random_distributions() -> None:
    def function() -> tuple[Tensor, ...]:
        n = 200_000
        kinds = (torch.rand(n), torch.randn(n), torch.bernoulli(torch.full((n,), 0.3)))
        return (*kinds, torch.randint(5, 15, (n,)).float(), torch.empty(n).exponential_(2.0))

    uniform, normal, coin, integer, exponential = compiled(function)()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert integer.unique().tolist() == list(range(5, 15))
    moments = [(t.mean().item(), t.std().item()) for t in (uniform, normal, coin, integer)]
    wanted = [(0.5, 0.2887), (0.0, 1.0), (0.3, 0.4583), (9.5, 2.8723)]
    for got, want in zip(moments, wanted, strict=True):
        assert got == pytest.approx(want, abs=0.03)
    assert exponential.mean().item() == pytest.approx(0.5, abs=0.02)
    # Neighbours and halves are independent.
    for t in (uniform, normal):
        for a, b in ((t[:-1], t[1:]), (t[:100_000], t[100_000:])):
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.02


def test_fallback_random_is_eager() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        noise = torch.randn_like(x) + torch.rand(x.shape)
        return noise * 2, F.dropout(x, 0.4), torch.randperm(10), torch.bernoulli(x.sigmoid())

    call = compiled(function, options=EAGER_RANDOM)
    x = torch.randn(20, 30)
    for seed in (0, 1):
        torch.manual_seed(seed)
        expected = [function(x), function(x)]
        torch.manual_seed(seed)
        same([call(x), call(x)], expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_in_training(dtype: torch.dtype) -> None:
    """The gradient is zero exactly where the output is, and scaled elsewhere."""
    call = compiled(lambda x: F.dropout(x, 0.25, training=True))
    x = (torch.rand(200, 100) + 1).to(dtype).requires_grad_()
    y = call(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    kept = y != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)
    assert torch.equal(grad != 0, kept)
    torch.testing.assert_close(y[kept], (x / 0.75)[kept])
    torch.testing.assert_close(grad[kept], torch.full_like(grad[kept], 1 / 0.75))


def test_dropout_module_train_and_eval() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
    call = torch.compile(model, backend=BACKEND)
    x = torch.randn(8, 16)
    assert not torch.equal(call(x), call(x))
    model.eval()
    same(call(x), model(x))


# Modes of torch


def test_autocast() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).softmax(-1)

    out = check(function, leaf(4, 16), tolerance={"rtol": 2e-2, "atol": 2e-2})
    assert out.dtype == torch.bfloat16


def test_autocast_around_the_call() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu() + 1

    x, w = torch.randn(4, 8), torch.randn(8, 8)
    call = compiled(function)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = call(x, w), function(x, w)
    same(got, want)
    assert got.dtype == torch.bfloat16
    same(call(x, w), function(x, w))


def test_no_grad_inside_and_outside() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            frozen = x.exp()
        return frozen, x * frozen

    check(function, leaf(5))
    call = compiled(lambda x: x.sin() * 2)
    x = leaf(5)
    with torch.no_grad():
        assert not call(x).requires_grad
    assert call(x).requires_grad


def test_inference_mode() -> None:
    model = nn.Linear(6, 3)
    call = compiled(lambda x: model(x).relu())
    x = torch.randn(2, 6)
    with torch.inference_mode():
        y = call(x)
        same(y, model(x).relu())
    assert y.is_inference()


def test_requires_grad_may_change() -> None:
    call, counter = counting(lambda x, y: (x * y).tanh())
    for needs in ((False, False), (True, False), (False, True), (True, True), (False, False)):
        x = torch.randn(4).requires_grad_(needs[0])
        y = torch.randn(4).requires_grad_(needs[1])
        out = call(x, y)
        same(out, (x * y).tanh())
        wanted = [t for t in (x, y) if t.requires_grad]
        if wanted:
            expected = torch.autograd.grad((x * y).tanh().sum(), wanted)
            same(torch.autograd.grad(out.sum(), wanted), expected)
    assert counter.frame_count == 4


# Modules


def train(model: nn.Module, call: Callable[..., Tensor], steps: int = 3) -> list[Tensor]:
    """Losses of a few steps of plain gradient descent."""
    torch.manual_seed(5)
    losses: list[Tensor] = []
    for _ in range(steps):
        model.zero_grad()
        loss = call(torch.randn(6, 3, 8, 8)).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
        losses.append(loss.detach())
    return losses


def make_convnet() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convnet_trains(layout: torch.memory_format) -> None:
    """Running statistics are buffers that the graph mutates."""
    ours, eagers = (make_convnet().to(memory_format=layout) for _ in range(2))
    losses = train(ours, compiled(ours))
    torch.testing.assert_close(losses, train(eagers, eagers), rtol=1e-4, atol=1e-5)
    for (name, a), e in zip(ours.state_dict().items(), eagers.state_dict().values(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert ours[1].num_batches_tracked == 3


def test_channels_last_output_keeps_its_strides() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    y = compiled(model)(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, model(x), check_stride=True, rtol=1e-4, atol=1e-5)


def test_attention_block() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    check(lambda x: layer(x), leaf(2, 7, 32), tolerance={"rtol": 1e-4, "atol": 1e-4})


def test_embedding_and_cross_entropy() -> None:
    table, head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20)

    def function(tokens: Tensor) -> Tensor:
        logits = head(table(tokens))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=0)

    tokens = torch.randint(0, 20, (3, 5))
    weights = (table.weight, head.weight, head.bias)
    expected = torch.autograd.grad(function(tokens), weights)
    loss = compiled(function)(tokens)
    same(loss, function(tokens))
    same(torch.autograd.grad(loss, weights), expected)


def test_recurrent_network() -> None:
    lstm = nn.LSTM(6, 8, 2, batch_first=True)
    call = torch.compile(lstm, backend=BACKEND)
    x = torch.randn(3, 5, 6)
    same(call(x), lstm(x))


def test_graph_break_makes_two_graphs() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.exp() + 1
        torch._dynamo.graph_break()
        return y.log() * x

    counter = CompileCounterWithBackend(BACKEND)
    call = torch.compile(function, backend=counter)
    x = leaf(6)
    out = call(x)
    same(out, function(x))
    same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(function(x).sum(), x))
    assert counter.frame_count == 2


def test_checkpoint() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        y = checkpoint(lambda t: F.gelu(first(t)), x, use_reentrant=False)
        return second(y).tanh()

    check(function, leaf(4, 6))


def test_hooks() -> None:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, inputs, output: output * 2)

    def function(x: Tensor) -> Tensor:
        y = layer(x)
        y.register_hook(lambda grad: grad * 3)
        return y.sin()

    x = leaf(2, 4)
    call = torch.compile(function, backend=BACKEND)
    out = call(x)
    same(out, function(x))
    same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(function(x).sum(), x))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
        functools.partial(torch.optim.Adam, lr=0.01, foreach=True),
        functools.partial(torch.optim.AdamW, lr=0.01, foreach=False, weight_decay=0.1),
        functools.partial(torch.optim.RMSprop, lr=0.01, foreach=True),
    ],
    ids=["sgd-foreach", "sgd", "adam-foreach", "adamw", "rmsprop-foreach"],
)
def test_optimizer_step(make: Callable[..., torch.optim.Optimizer]) -> None:
    shapes = ((5, 4), (7,), (2, 3, 2))
    start = [torch.randn(s) for s in shapes]
    grads = [[torch.randn(s) for s in shapes] for _ in range(4)]

    def final(wrap: Callable[[Any], Any]) -> list[Tensor]:
        params = [nn.Parameter(t.clone()) for t in start]
        optimizer = make(params)
        step = wrap(lambda: optimizer.step())
        for round_grads in grads:
            for p, g in zip(params, round_grads, strict=True):
                p.grad = g.clone()
            step()
        state = [t for s in optimizer.state.values() for t in s.values()]
        return [p.detach() for p in params] + [t for t in state if isinstance(t, Tensor)]

    ours = final(lambda f: torch.compile(f, backend=BACKEND))
    torch.testing.assert_close(ours, final(lambda f: f), rtol=1e-5, atol=1e-6)
