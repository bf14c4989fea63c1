"""What the backward pass is given: right gradients, few bytes; and the cut itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.programs import check, leaf
from tests.traffic import CASES, Case, count, tensors
from tilewright.backend import count_schedules
from tilewright.graph import partition
from tilewright.graph.flow import INFINITE, Network
from tilewright.testing import run_and_get_code

TRAINED = [case for case in CASES if case.train]


# small ones: what is left out is large, random, launches Triton kernels on a card, or has an opaque
# op without an implementation
SMALL = [c for c in TRAINED if c.reference < 1e5 and c.name not in ("PF-55", "PF-56", "PF-58")]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_gradients_of_the_counted_programs(case: Case) -> None:
    given = [torch.randn(t.shape).requires_grad_() for t in tensors(case.inputs, "meta")]
    check(case.program, *given, tolerance={"rtol": 1e-4, "atol": 1e-4}, fullgraph=False)


def saved(function: Callable[..., Any], *inputs: Tensor) -> list[tuple[torch.dtype, int]]:
    """Type and number of elements of what the compiled forward pass keeps."""
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        torch.compile(function, backend="tilewright", dynamic=False)(*inputs)
    return sorted(((t.dtype, t.numel()) for t in kept.values()), key=str)


def test_relu_keeps_a_mask() -> None:
    assert saved(torch.relu, leaf(5, 7)) == [(torch.bool, 35)]


def test_what_both_sides_of_a_product_use_is_kept() -> None:
    """Neither of the two it is the sum of: the forward pass stores it for what comes later."""

    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        both = x + y
        return (both.exp() @ w) * both

    given = leaf(16, 8), leaf(16, 8), leaf(8, 8)
    three = [(torch.float32, 128)] * 3  # the sum, its exponential and the product
    assert saved(function, *given) == [*three, (torch.float32, 64)]
    check(function, *given, tolerance={"rtol": 1e-4, "atol": 1e-4})


def test_which_is_the_smallest_is_kept_and_not_found_again() -> None:
    """The exponential of a vector may differ from the scalar one in the last bit: computed again,
    none would be the smallest."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.silu(x) + x
        smallest = y.amin(1)
        return smallest, F.layer_norm(smallest, (3,))

    x = torch.randn(65, 4, 3, dtype=torch.float64, requires_grad=True)
    assert (torch.bool, x.numel()) in saved(function, x)
    check(function, x, tolerance={"rtol": 1e-9, "atol": 1e-9})


def test_which_equal_what_is_computed_is_kept_and_not_found_again() -> None:
    """One side is an input, and the other may come out otherwise: both are read there anyway."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x == F.silu(y), x * y, x.sin() * y)

    given = leaf(5, 8), leaf(5, 8)
    assert (torch.bool, 40) in saved(function, *given)
    check(function, *given)


def test_which_of_two_is_larger_is_found_again() -> None:
    """Where products and differences of inputs are compared, as quantile losses do."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        error = y[:, None] - x
        return torch.maximum(0.3 * error, -0.7 * error).mean()

    x, y = leaf(6, 5), torch.randn(6)
    x.data[0, 0], x.data[1, 1] = y[0], float("nan")
    assert saved(function, x, y) == [(torch.float32, 30), (torch.float32, 6)]
    check(function, x, y)


def test_a_sign_is_kept_in_a_byte() -> None:
    x, y = leaf(9, 5), torch.randn(9, 5)
    x.data[0, 0], x.data[1, 1] = y[0, 0], float("nan")
    assert saved(F.l1_loss, x, y) == [(torch.int8, 45)]
    check(F.l1_loss, x, y)


def test_losses_of_each_element_are_found_again() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (F.binary_cross_entropy_with_logits(x, y, reduction="none") * x.sigmoid()).mean()

    x, y = leaf(9, 5), torch.rand(9, 5)
    assert saved(function, x, y) == [(torch.float32, 45), (torch.float32, 45)]
    check(function, x, y)
    check(function, x, y, dynamic=True)


def test_an_operand_of_a_product_is_kept_once() -> None:
    x, w = leaf(8, 16), leaf(16, 4)
    # relu's result is kept for the product's gradient, and its mask follows from it
    kept = saved(lambda x, w: x.relu() @ w, x, w)
    assert sorted(n for _, n in kept) == [16 * 4, 8 * 16]


def test_parts_of_an_input_are_in_memory_anyway() -> None:
    def function(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return a.tanh() * b.exp()

    x = leaf(5, 6)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        torch.compile(function, backend="tilewright")(x)
    assert {t.untyped_storage().data_ptr() for t in kept} == {x.untyped_storage().data_ptr()}
    check(function, x)


def test_what_is_asked_grows_with_the_steps_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes a row: what all rows of a tensor tell is not asked again for each of them."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        for a, b in zip(x, y, strict=True):
            state = torch.sigmoid(state * a) + b
        return state

    asked = 0
    sized = partition.size

    def size(node: torch.fx.Node) -> int:
        nonlocal asked
        asked += 1
        return sized(node)

    monkeypatch.setattr(partition, "size", size)
    counts: list[int] = []
    for steps in (8, 16, 32):
        torch._dynamo.reset()
        asked = 0
        with FakeTensorMode():
            given = [torch.randn(steps, 5, requires_grad=True) for _ in range(2)]
            decide = count_schedules(lambda role, plan: None)
            torch.compile(function, backend=decide)(*given).sum().backward()
        counts.append(asked)
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]) > 0


def test_cross_entropy_keeps_statistics_not_probabilities() -> None:
    x, target = leaf(6, 50), torch.randint(0, 50, (6,))
    kept = saved(lambda x, t: F.cross_entropy(x, t), x, target)
    statistics, labels = [(torch.float32, 6)] * 2, (torch.int64, 6)
    count = (torch.float32, 1)
    assert kept == [count, (torch.float32, 300), *statistics, labels], "the input itself"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_log_softmax(dtype: torch.dtype, dim: int) -> None:
    loose = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    check(lambda x: F.log_softmax(x.sin(), dim) * 2, leaf(7, 9, dtype=dtype), tolerance=loose)


def test_log_softmax_of_odd_shapes() -> None:
    check(lambda x: F.log_softmax(x, 0), leaf())
    check(lambda x: F.log_softmax(x, 1), leaf(3, 0))
    check(lambda x: F.log_softmax(x, 1), leaf(3, 5), dynamic=True)
    check(lambda x, t: F.cross_entropy(x, t), leaf(4, 11), torch.randint(0, 11, (4,)))


@pytest.mark.parametrize("function", [F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.threshold])
def test_masks(function: Callable[..., Tensor]) -> None:
    rest = (0.2, 0.5) if function is F.threshold else ()
    x = leaf(9, 5)
    x.data[0, 0], x.data[1, 1], x.data[2, 2] = float("nan"), 0.0, 6.0
    check(lambda x: function(x, *rest).cos(), x)
    check(lambda x: function(x, *rest).cos(), leaf(3, 4), dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_dropout_draws_the_same_mask_in_backward(dynamic: bool) -> None:
    x = leaf(64, 65)
    f = torch.compile(lambda x: F.dropout(x, 0.25), backend="tilewright", dynamic=dynamic)
    first, second = f(x), f(x)
    (grad,) = torch.autograd.grad(first, x, torch.ones_like(first))
    assert torch.equal(grad == 0, first == 0) and grad.unique().numel() == 2
    assert not torch.equal(first, second)
    assert abs((grad == 0).float().mean().item() - 0.25) < 0.05


def test_two_dropouts_differ() -> None:
    x = leaf(32, 32)
    f = torch.compile(lambda x: (F.dropout(x), F.dropout(x)), backend="tilewright")
    a, b = f(x)
    assert not torch.equal(a, b)
    (a.sum() + 2 * b.sum()).backward()
    assert torch.allclose(x.grad * x.detach(), (a + 2 * b).detach())  # type: ignore[operator]


def test_dropout_repeats_with_torchs_seed() -> None:
    x = leaf(100)
    f = torch.compile(lambda x: F.dropout(x), backend="tilewright")
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(f(x))
    assert torch.equal(*results)


def test_dropout_of_certain_and_disabled_rates() -> None:
    for p, train in ((0.0, True), (1.0, True), (0.5, False)):
        check(lambda x, p=p, train=train: F.dropout(x, p, train).sin(), leaf(4, 5))


NORMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "layer": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (4, 5, 6)),
    "layer of two": (lambda x, w, b: F.layer_norm(x, (5, 6), None, w + b), (4, 5, 6)),
    "rms": (lambda x, w, b: torch.ops.aten._fused_rms_norm(x, [6], w, 1e-5)[0] + b, (4, 5, 6)),
    "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (4, 6, 5)),
    "group": (lambda x, w, b: F.group_norm(x, 3, w, b), (4, 6, 5)),
    "group of one": (lambda x, w, b: F.group_norm(x, 1, None) * w.sum() + b.sum(), (3, 6, 2, 5)),
    "flat batch": (lambda x, w, b: F.batch_norm(x, w.detach().clone(), b.detach().exp(), None, None,
                                                True), (7, 6)),
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_norms_that_loops_use(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    norm, size = NORMS[name]
    shape = (5, 6) if name == "layer of two" else (6,)
    x, w, b = (torch.randn(n).to(dtype).requires_grad_() for n in (size, shape, shape))
    loose = {"rtol": 0.1, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    check(lambda *given: norm(*given).sin(), x, w, b, tolerance=loose, dynamic=dynamic)


def test_a_normalised_value_is_computed_again() -> None:
    model = torch.nn.LayerNorm(50)
    kept = saved(lambda x: F.gelu(model(x)), leaf(40, 50))
    # input, statistics, parameters
    assert [n for _, n in kept] == [40 * 50, 40, 40, 50, 50]


@pytest.mark.parametrize("name", ["layer", "rms", "group"])
def test_a_norm_that_loops_use_keeps_its_layout(name: str) -> None:
    norm, size = NORMS[name]
    x, w, b = leaf(*size[::-1]), leaf(6), leaf(6)

    def program(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = norm(x.cos().permute(2, 1, 0), w, b)
        return y, y.sin()

    expected = program(x, w, b)
    actual = torch.compile(program, backend="tilewright")(x, w, b)
    assert [t.stride() for t in actual] == [t.stride() for t in expected]
    torch.testing.assert_close(actual, expected)


def test_group_norms_are_computed_again_from_the_convolution_they_are_of() -> None:
    x, v, w = leaf(2, 4, 9, 9), leaf(8, 4, 3, 3), leaf(8, 8, 3, 3)

    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        y = F.silu(F.group_norm(F.conv2d(x, v, padding=1), 2))
        return F.group_norm(F.conv2d(y, w, padding=1), 2).square()

    images = [n for _, n in saved(program, x, v, w) if n == 2 * 8 * 9 * 9]
    assert len(images) == 3  # two results of convolutions, and the operand of one


def test_checkpointing_is_the_users_choice() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w) @ w

    def f(x: Tensor, w: Tensor) -> Tensor:
        out = checkpoint(block, x, w, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out.sin()

    check(f, leaf(6, 6), leaf(6, 6))

    def backward() -> None:
        torch.compile(f, backend="tilewright")(leaf(6, 6), leaf(6, 6)).sum().backward()

    _, codes = run_and_get_code(backward)
    assert codes[1].count("mm") > codes[0].count("mm")  # the backward computes the products again


def test_values_used_in_both_passes_through_views() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        a, b = (x @ w).view(4, 2, 6).chunk(2, -1)
        return (a.transpose(0, 1) * b.transpose(0, 1).exp()).reshape(2, 12) @ w[:, :3].repeat(4, 1)

    check(f, leaf(4, 3), torch.randn(3, 12).requires_grad_())


def test_dynamic_sizes_reach_the_backward_pass() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.sum(0) / x.shape[0]).cos() * x.exp().view(-1, x.shape[1]) * x.shape[1]

    check(f, leaf(5, 3), dynamic=True)


def random_network(seed: int) -> tuple[list[tuple[int, int, int]], int]:
    draw = random.Random(seed)
    n = draw.randint(3, 14)
    prices = [0, 1, 2, 5, 9, INFINITE]
    return [(draw.randrange(n), draw.randrange(n), draw.choice(prices))
            for _ in range(draw.randint(2, 40))], n  # fmt: skip


@pytest.mark.parametrize("seed", range(200))
def test_cuts_are_cheapest(seed: int) -> None:
    edges, n = random_network(seed)
    network, other = Network(), nx.DiGraph()
    for _ in range(n - 2):
        network.vertex()
    other.add_nodes_from(range(n))
    for tail, head, price in edges:
        network.edge(tail, head, price)
        if tail != head and price:
            before = other.get_edge_data(tail, head, {"capacity": 0})["capacity"]
            other.add_edge(tail, head, capacity=before + price)
    given = network.cut()
    assert given[network.source] and not given[network.sink]
    price = sum(price for tail, head, price in edges if given[tail] and not given[head])
    least = nx.minimum_cut_value(other, 0, 1)
    assert price == least or (price >= INFINITE and least >= INFINITE)


def test_training_counts_do_not_depend_on_a_second_compilation() -> None:
    case = next(c for c in TRAINED if c.name == "PF-44")
    assert count(case) == count(case)


def test_ri_7_an_uninitialised_tensor_is_made_again() -> None:
    """RI-7: What the backward pass writes into is not kept from the forward pass."""
    case = next(c for c in TRAINED if c.name == "PF-58")
    assert count(case).nodes == (9, 9)  # no kernel fills or copies it


def test_equal_calls_of_both_passes_are_one() -> None:
    def f(x: Tensor) -> Tensor:
        return x.exp() * 2 + x.exp()

    assert saved(f, leaf(6, 6)) == [(torch.float32, 36)]
    check(f, leaf(6, 6))


def test_places_of_maxima_are_kept_in_two_bytes() -> None:
    """What a pooling gives are eight; a plane of 12 by 10 elements needs one and a half."""

    def function(x: Tensor) -> Tensor:
        return F.max_pool2d(x.sin(), 3, 2, 1).exp()

    x = torch.randn(2, 3, 12, 10, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = torch.compile(function, backend="tilewright", fullgraph=True)(x)
    assert torch.int64 not in {t.dtype for t in saved}
    (gradient,) = torch.autograd.grad(result.sum(), x)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close(gradient, expected)
