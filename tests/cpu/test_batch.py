"""Batching of ops that are alike (`config.batch_fusion`): what is batched, and that results and
gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.graphs import Graph
from tests.programs import check, leaf
from tilewright import config, metrics
from tilewright.errors import InvalidOptionError
from tilewright.graph.batch import ancestors, independent_subset

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    metrics.reset()
    with config.patch(force_disable_caches=True, batch_fusion_min_size=2):
        yield


def batches(kind: str) -> int:
    return metrics.counters["batch_fusion"][kind]


@pytest.mark.covering(2)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_gb_01_linears_of_one_shape_are_one_product(
    bias: bool, shared: bool, dynamic: bool
) -> None:
    def function(x: Tensor, *given: Tensor) -> list[Tensor]:
        weights, biases = given[:4], given[4:8]
        rows = [x] * 4 if shared else [x, x + 1, x * 2, x.cos()]
        return [F.linear(r, w, b if bias else None).relu() * k
                for k, (r, w, b) in enumerate(zip(rows, weights, biases, strict=True))]  # fmt: skip

    weights = [leaf(7, 5) for _ in range(4)]
    with config.patch(batch_fusion="linear"):
        check(function, leaf(6, 5), *weights, *(leaf(7) for _ in range(4)), dynamic=dynamic,
              tolerance={"rtol": 1e-5, "atol": 1e-5})  # fmt: skip
    assert batches("linear") == 3  # forward, and the gradients of what is multiplied and of weights


def test_gb_01_only_what_is_asked_for_and_enough_of_it() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [x @ a, x @ b]

    inputs = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    check(function, *inputs)
    torch._dynamo.reset()
    with config.patch(batch_fusion="linear", batch_fusion_min_size=3):
        check(function, *inputs)
    assert batches("linear") == 0
    torch._dynamo.reset()
    with config.patch(batch_fusion="linear"):
        check(function, *inputs)
    assert batches("linear") == 1
    with pytest.raises(InvalidOptionError):
        config.batch_fusion = "convolution"


def test_gb_01_products_that_need_each_other_stay_apart() -> None:
    def function(x: Tensor, a: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(x @ a)
        return x

    with config.patch(batch_fusion="linear"):
        check(function, torch.randn(4, 4), torch.randn(4, 4))
    assert batches("linear") == 0


@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
def test_gb_02_layer_norms_of_one_shape_are_one(affine: bool) -> None:
    norms = nn.ModuleList(nn.LayerNorm(9, elementwise_affine=affine) for _ in range(3))
    for p in norms.parameters():
        nn.init.normal_(p)

    def function(*given: Tensor) -> list[Tensor]:
        return [norm(x) for norm, x in zip(norms, given, strict=True)]

    with config.patch(batch_fusion="layer_norm"):
        check(function, *(leaf(4, 5, 9) for _ in range(3)),
              tolerance={"rtol": 1e-5, "atol": 1e-5})  # fmt: skip
    assert batches("layer_norm") == 1


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "clamp": lambda x: x.clamp(-0.5, 0.75),
    "nan_to_num": lambda x: torch.nan_to_num(x / x.trunc()),
    "detach": lambda x: x.detach().sigmoid(),
    "add": lambda x: x + x.flip(0),
}


STACKED = {"relu": 3, "nan_to_num": 13, "detach": 1, "clamp": 4}
"""Operations that are one for all of four, forward and backward, where they are not one of each."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in POINTWISE), ("tanh", torch.bfloat16)],
    ids=str,
)
def test_gb_03_pointwise_ops_are_stacked_and_computed_once(name: str, dtype: torch.dtype) -> None:
    """Between products, whose operands and results are in memory anyway."""

    def function(v: Tensor, w: Tensor, *given: Tensor) -> list[Tensor]:
        return [POINTWISE[name](x @ v) @ w for x in given]

    given = [leaf(6, 16, dtype=dtype) for _ in range(4)]
    error = 2e-2 if dtype == torch.bfloat16 else 1e-4
    with config.patch(batch_fusion="pointwise"):
        check(function, leaf(16, 5, dtype=dtype), leaf(5, 16, dtype=dtype), *given,
              tolerance={"rtol": error, "atol": error})  # fmt: skip
    assert batches("pointwise") == STACKED.get(name, 2)


@pytest.mark.parametrize("op", [F.relu, F.gelu, torch.tanh])
def test_gb_03_a_batch_that_adds_traffic_is_refused(op: Callable[[Tensor], Tensor]) -> None:
    """PF-06, PF-07: the ops are fused with what reads their results; stacked they are not."""

    def function(*given: Tensor) -> Tensor:
        return torch.cat([op(x) for x in given]) + 10

    inputs = [torch.randn(10, 10) for _ in range(16)]
    with config.patch(batch_fusion="linear,layer_norm,pointwise"):
        check(function, *inputs)
    assert batches("pointwise") == 0
    assert batches("pointwise refused: more bytes") == 1
    assert metrics.num_bytes_accessed == 4 * 2 * 16 * 100


def test_gb_03_dropped_numbers_are_the_same_for_everyone() -> None:
    def function(*given: Tensor) -> list[Tensor]:
        torch.manual_seed(3)
        return [F.dropout(x, 0.5) * 2 for x in given]

    with config.patch(batch_fusion="pointwise", fallback_random=True):
        check(function, *(torch.randn(6, 3) for _ in range(4)), fullgraph=False)


def test_gb_05_subsets_are_greedy_ordered_and_bounded() -> None:
    g = Graph()
    x = g.input(4, 4)
    first = [g(aten.mm.default, x, g.input(4, 4)) for _ in range(3)]
    below = [g(aten.mm.default, first[0], x), g(aten.mm.default, first[2], x)]
    other = g(aten.mm.default, x, g.input(4, 4))
    g.returns(*below, other, first[1])
    nodes = [*first, *below, other]
    needs = ancestors(g.graph, nodes)
    assert independent_subset(nodes, needs) == [*first, other]
    assert independent_subset(nodes, needs) == [*first, other]  # the same again
    assert independent_subset(below, ancestors(g.graph, below)) == below
    with config.patch(batch_fusion_max_size=2):
        assert independent_subset(nodes, needs) == first[:2]
        assert independent_subset([first[0], *below], ancestors(g.graph, [first[0], *below])) == [
            first[0],
            below[1],
        ]


def test_gb_05_a_batch_never_waits_for_itself() -> None:
    """Two pairs that may each be batched, but not both: each needs one of the other."""

    def function(a: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
        left = torch.tanh(a @ w)
        right = torch.tanh(b @ w)
        return [left @ w, right @ w, (left + right) @ w]

    with config.patch(batch_fusion="linear"):
        check(function, torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4),
              tolerance={"rtol": 1e-5, "atol": 1e-5})  # fmt: skip
    assert batches("linear") == 2


def test_results_share_no_memory_and_arguments_are_changed_in_order() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        first = x @ a
        x.add_(1)
        return [first, x @ b, x @ a]

    with config.patch(batch_fusion="linear,pointwise"):
        found = check(function, torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4),
                      tolerance={"rtol": 1e-5, "atol": 1e-5})  # fmt: skip
    assert len({t.untyped_storage().data_ptr() for t in found}) == 3


# ---- products of different shapes


SHAPES = ((6, 5, 7), (4, 5, 7), (6, 3, 8), (5, 5, 5))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_gb_04_linears_of_different_shapes_are_one_product(bias: bool) -> None:
    def function(*given: Tensor) -> list[Tensor]:
        return [F.linear(x, w, b if bias else None).relu()
                for x, w, b in zip(given[::3], given[1::3], given[2::3], strict=True)]  # fmt: skip

    inputs = [leaf(*size) for m, k, n in SHAPES for size in ((m, k), (n, k), (n,))]
    with config.patch(batch_fusion="group_linear"):
        check(function, *inputs, tolerance={"rtol": 1e-5, "atol": 1e-5})
    assert batches("group_linear") == 3  # forward, gradients of the rows and of the weights


def test_gb_04_little_is_computed_for_nothing() -> None:
    """A long product stays by itself; those of one shape need no zeros."""

    def function(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> list[Tensor]:
        return [a @ w, b @ w, c @ w]

    inputs = torch.randn(8, 4), torch.randn(200, 4), torch.randn(8, 4), torch.randn(4, 4)
    with config.patch(batch_fusion="group_linear"):
        check(function, *inputs, tolerance={"rtol": 1e-5, "atol": 1e-5})
    assert batches("group_linear") == 1


def test_gb_04_infinities_stay_where_they_are() -> None:
    def function(a: Tensor, b: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
        return [a @ v, b @ w]

    a, b, v, w = torch.randn(4, 4), torch.randn(5, 3), torch.randn(4, 3), torch.randn(3, 4)
    a[0, 0], w[1, 1] = float("inf"), float("nan")
    with config.patch(batch_fusion="group_linear"):
        check(function, a, b, v, w, tolerance={"rtol": 1e-5, "atol": 1e-5})
    assert batches("group_linear") == 1


def test_gb_04_gates_are_batched_as_a_whole() -> None:
    """Two linears, a sigmoid and a product for each of three inputs, and a linear behind: one
    product for all gates and one for what follows, one kernel's worth of each pointwise op."""
    gate, transform, after = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 4)

    def function(*given: Tensor) -> list[Tensor]:
        return [after(gate(x) * torch.sigmoid(transform(x))) for x in given]

    with config.patch(batch_fusion="linear,pointwise"), torch.no_grad():
        check(function, *(torch.randn(6, 5) for _ in range(3)),
              tolerance={"rtol": 1e-5, "atol": 1e-5})  # fmt: skip
    assert batches("linear") == 2
    assert batches("aten.sigmoid.default") == 1 and batches("aten.mul.Tensor") == 1
    assert batches("pointwise") == 2
