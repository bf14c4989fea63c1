"""Bags, sampled grids and their gradients, margins, distances, searches, quantisation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.native import check

aten = torch.ops.aten
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- embedding bags


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str, dynamic: bool) -> None:
    """Bags of different lengths, empty ones among them; padding; the last offset given."""

    def function(i: torch.Tensor, w: torch.Tensor, o: torch.Tensor) -> Any:
        closed = torch.cat([o, torch.full((1,), i.shape[0])])
        return (
            F.embedding_bag(i, w, o, mode=mode) + 1,
            F.embedding_bag(i, w, o, mode=mode, padding_idx=2),
            F.embedding_bag(i, w, closed, mode=mode, include_last_offset=True),
        )

    check(function, torch.tensor([1, 2, 4, 2, 5, 4, 2, 2]), torch.randn(6, 5),
          torch.tensor([0, 3, 3, 6, 8]), dynamic=dynamic, grad=True, exact=False)  # fmt: skip


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_length(mode: str) -> None:
    def function(i: torch.Tensor, w: torch.Tensor) -> Any:
        return F.embedding_bag(i, w, mode=mode), F.embedding_bag(i, w, mode=mode, padding_idx=1)

    indices = torch.tensor([[1, 2, 3], [1, 1, 1], [5, 0, 1]])
    check(function, indices, torch.randn(6, 5), grad=True, exact=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_weighted_bags(dynamic: bool) -> None:
    def function(i: torch.Tensor, w: torch.Tensor, o: torch.Tensor, s: torch.Tensor) -> Any:
        return (
            F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s),
            F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s, padding_idx=2),
        )

    check(function, torch.tensor([1, 2, 4, 2, 5]), torch.randn(6, 5), torch.tensor([0, 2, 2]),
          torch.randn(5), dynamic=dynamic, grad=True, exact=False)  # fmt: skip


def test_all_results_of_a_bag() -> None:
    def function(w: torch.Tensor, i: torch.Tensor, o: torch.Tensor) -> Any:
        return [aten._embedding_bag(w, i, o, False, mode, False, None, False, padding)
                for mode in range(3) for padding in (-1, 2)]  # fmt: skip

    check(function, torch.randn(6, 5), torch.tensor([1, 2, 4, 2, 5]), torch.tensor([0, 2, 2]),
          exact=False)  # fmt: skip


def test_a_bag_of_nothing() -> None:
    check(lambda i, w, o: F.embedding_bag(i, w, o), torch.zeros(0, dtype=torch.int64),
          torch.randn(4, 3), torch.tensor([0, 0]))  # fmt: skip


def test_an_index_outside_the_table_is_an_error() -> None:
    compiled = torch.compile(F.embedding_bag, backend="tilewright")
    with pytest.raises(IndexError):
        compiled(torch.tensor([1, 9]), torch.randn(4, 3), torch.tensor([0, 1]))


# ---- grid sampling


@pytest.mark.covering(2)
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample_gradients(mode: str, padding: str, align: bool) -> None:
    def function(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, mode, padding, align)

    check(function, torch.randn(2, 3, 4, 5), torch.randn(2, 3, 2, 2) * 1.5, grad=True, exact=False)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_grid_sample_gradients_of_volumes(mode: str) -> None:
    def function(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, mode, "reflection", False)

    check(function, torch.randn(1, 2, 4, 3, 1), torch.randn(1, 2, 3, 2, 3) * 1.5, dynamic=True,
          grad=True, exact=False)  # fmt: skip


# ---- margins and distances


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_margin_losses(reduction: str, dynamic: bool) -> None:
    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, many: torch.Tensor) -> Any:
        return (
            F.multi_margin_loss(x, y, reduction=reduction),
            F.multi_margin_loss(x, y, p=2, margin=0.5, weight=w.detach(), reduction=reduction),
            F.multilabel_margin_loss(x, many, reduction=reduction),
            F.multilabel_margin_loss(x[0], many[0], reduction=reduction),
        )

    many = torch.tensor([[1, 3, -1, 0], [2, 2, 0, 1], [-1, 0, 1, 2]])
    check(function, torch.randn(3, 4), torch.tensor([1, 0, 3]), torch.rand(4), many,
          dynamic=dynamic, grad=True, exact=False)  # fmt: skip


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, INF])
def test_distances(p: float) -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> Any:
        direct = torch.cdist(a, b, p, compute_mode="donot_use_mm_for_euclid_dist")
        return direct, F.pdist(a[1], p)

    a, b = torch.randn(2, 5, 3), torch.randn(1, 4, 3)
    b[0, 1] = a[0, 2]  # a distance of zero has a gradient of zero
    check(function, a, b, grad=True, exact=False)


def test_distances_of_dynamic_sizes() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.cdist(a, b, 1.0), F.pdist(a, 3.0)

    check(function, torch.randn(7, 3), torch.randn(4, 3), dynamic=True, grad=True, exact=False)


# ---- special functions and neighbours

POLYNOMIALS = [name for name in dir(torch.special) if "_polynomial_" in name]


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials(name: str) -> None:
    polynomial = getattr(torch.special, name)

    def function(x: torch.Tensor, n: torch.Tensor) -> Any:
        return polynomial(x, n), polynomial(x, 3), polynomial(1.5, n)

    check(function, torch.randn(50, dtype=torch.float64), torch.arange(-1, 49) % 12, exact=False)


def test_neighbours_in_bfloat16() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-40, 3.39e38, -2.5])
    a, b = (t.contiguous().bfloat16() for t in torch.meshgrid(values, values, indexing="ij"))
    check(lambda x, y: torch.nextafter(x, y).view(torch.int16), a, b)


# ---- searches and positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_searches_in_dynamic_sequences(dtype: torch.dtype) -> None:
    def function(s: torch.Tensor, v: torch.Tensor) -> Any:
        return (torch.bucketize(v, s), torch.bucketize(v, s, right=True, out_int32=True),
                torch.searchsorted(s, v), torch.searchsorted(s, 3))  # fmt: skip

    values = torch.arange(-2, 30).to(dtype)
    sequence = torch.tensor([0, 3, 3, 3, 7, 12, 25]).to(dtype)
    check(function, sequence, values, dynamic=True)
    compiled = torch.compile(torch.bucketize, backend="tilewright", dynamic=True)
    for count in (7, 5, 2):
        given = sequence[:count].clone()
        torch.testing.assert_close(compiled(values, given), torch.bucketize(values, given))


@pytest.mark.parametrize("dynamic", [False, True])
def test_repeats_and_positions(dynamic: bool) -> None:
    def function(x: torch.Tensor, r: torch.Tensor, m: torch.Tensor) -> Any:
        return (
            torch.repeat_interleave(x, r, dim=0, output_size=7) + 1,
            torch.nonzero_static(m, size=4),
            torch.nonzero_static(m, size=30, fill_value=7),
            torch.nonzero_static(x[0, 0], size=2),
        )

    check(function, torch.randn(4, 3), torch.tensor([2, 0, 4, 1]), torch.rand(4, 5) > 0.5,
          dynamic=dynamic)  # fmt: skip


# ---- quantisation and copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_quantize(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> Any:
        return (
            aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 3, -8, 7),
            aten.fake_quantize_per_channel_affine_cachemask(x, s, z, 1, -8, 7),
            aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
                x, s[:1], z[:1], z[1:2], -8, 7),
        )  # fmt: skip

    x = torch.randn(40, 3)
    # by channels, what eager makes of an infinity depends on the processor
    x[0] = torch.tensor([NAN, 1e6, -INF])
    zero_points = torch.tensor([0, 2, -1], dtype=torch.int32)
    check(function, x.to(dtype), torch.tensor([0.1, 0.05, 0.3]), zero_points)


def test_fake_quantize_of_infinities() -> None:
    x = torch.tensor([NAN, INF, -INF])
    check(lambda x: aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 3, -8, 7), x)


def test_fake_quantize_gradient() -> None:
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7), torch.randn(40),
          grad=True)  # fmt: skip


def test_random_integers_below_a_tensor() -> None:
    def function(x: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return torch.randint_like(x, high)

    drawn = torch.compile(function, backend="tilewright")(torch.empty(1000), torch.tensor(7))
    assert set(drawn.tolist()) == set(range(7))
    torch._dynamo.reset()
    check(lambda x: torch.randint_like(x, torch.tensor(1)), torch.empty(10))
