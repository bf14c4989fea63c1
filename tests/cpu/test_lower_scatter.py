"""Scatters and their reductions, into positions that repeat."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tests import programs
from tests.cpu.native import check
from tilewright.graph.decompositions import table
from tilewright.ir import index as ix
from tilewright.ir.expr import const
from tilewright.lower import rows as rows_of
from tilewright.lower.tensor import Tensor
from tilewright.testing import run_and_get_code


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _given(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = torch.randint(0, 6, (4, 3, 5))
    if dtype.is_floating_point:
        return torch.randn(4, 6, 5).to(dtype), index, torch.randn(4, 3, 5).to(dtype)
    return torch.randint(-9, 9, (4, 6, 5)), index, torch.randint(-9, 9, (4, 3, 5))


@pytest.mark.parametrize("dynamic", [False, True])
def test_scatter(dynamic: bool) -> None:
    def function(x: torch.Tensor, g: torch.Tensor, s: torch.Tensor) -> Any:
        return (x.scatter(1, g, 2.5) + 1, x.scatter(1, g, s) + 1, x.scatter_add(1, g, s))

    x, _, s = _given(torch.float32)
    check(function, x, torch.rand(4, 6, 5).argsort(1)[:, :3], s, dynamic=dynamic, grad=True)


@pytest.mark.filterwarnings("ignore:The reduce argument")
def test_scatter_with_a_reduction() -> None:
    x, g, s = _given(torch.float32)
    check(lambda x, g, s: (x.scatter(1, g, s, reduce="add"), x.scatter(1, g, 2.0,
                           reduce="multiply")), x, g, s, exact=False)  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("kind", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce(kind: str, dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, g: torch.Tensor, s: torch.Tensor) -> Any:
        return [x.scatter_reduce(1, g, s, kind, include_self=own) for own in (True, False)]

    check(function, *_given(dtype), exact=False)


def test_scatter_reduce_keeps_nans() -> None:
    x, s = torch.randn(5), torch.tensor([1.0, float("nan"), 2.0])
    check(lambda x, i, s: (x.scatter_reduce(0, i, s, "amax"), x.scatter_reduce(0, i, s, "amin")),
          x, torch.tensor([1, 2, 2]), s)  # fmt: skip


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("kind", ["prod", "mean", "amax", "amin"])
def test_index_reduce(kind: str) -> None:
    def function(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        return [x.index_reduce(1, i, s, kind, include_self=own) for own in (True, False)]

    x, _, s = _given(torch.float32)
    check(function, x, torch.tensor([1, 4, 1]), s, exact=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_whole_slices(dynamic: bool) -> None:
    def function(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        return (
            x.index_add(1, i, s) + 1,
            x.index_add(1, i, s, alpha=2) + 1,
            x.index_copy(1, i, s) + 1,
            x.index_fill(1, -i, 2.0) + 1,
            x.put(-i, s[:, 0, 0][:3]),
            x.put(i, s[:, 0, 0][:3], accumulate=True),
        )

    x, _, s = _given(torch.float32)
    check(function, x, torch.tensor([1, 4, 2]), s, dynamic=dynamic, grad=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_into_what_repeats(dynamic: bool) -> None:
    def function(x: torch.Tensor) -> Any:
        wide = x.expand(x.shape[1], x.shape[1])
        return (torch.select_scatter(wide, wide[0] * 2, 0, 1),
                torch.slice_scatter(wide, wide[:2] * 3, 0, 1, 3),
                torch.diagonal_scatter(wide, wide[0] * 4))  # fmt: skip

    check(function, torch.randn(1, 5), dynamic=dynamic)
    traced = make_fx(function, decomposition_table=table(), tracing_mode="fake")(torch.randn(1, 5))
    scatters = [n for n in traced.graph.nodes if "scatter" in str(n.target)]
    assert len(scatters) == 3
    assert all("clone" in str(n.args[0].target) for n in scatters)


@pytest.mark.parametrize("dynamic", [False, True])
def test_index_put(dynamic: bool) -> None:
    def function(x: torch.Tensor, i: torch.Tensor, n: torch.Tensor, s: torch.Tensor) -> Any:
        a = x.clone()
        a[i, :, n] = s[:3, 0, :1]
        return (
            a,
            x.index_put((i, n), s[0, 0, 0]),
            x.index_put((i,), s[:3, :1], accumulate=True),
            x.index_put((i, i), s[:3, 0], accumulate=True),
            x.index_put((i[:1].expand(3), i[:1].expand(3)), s[:3, 0], accumulate=True),
        )

    x, _, s = _given(torch.float32)
    check(function, x, torch.tensor([2, 0, 3]), torch.tensor([-1, 0, -3]), s, dynamic=dynamic,
          grad=True)  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_index_put_where_a_mask_holds(dynamic: bool) -> None:
    def function(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Any:
        a, b, c = x.clone(), x.clone(), x.clone()
        a[m] = 2.0
        b[m[:, :, 0]] = v
        c[:, m[0]] = 0
        return a, b, c, x.index_put((m,), v[0], accumulate=True)

    check(function, torch.randn(4, 6, 5), torch.rand(4, 6, 5) > 0.5, torch.randn(5),
          dynamic=dynamic)  # fmt: skip


def test_truth_values_saturate() -> None:
    check(lambda m, i: (m.index_add(0, i, m[:3]), m.index_put((i,), m[:1], accumulate=True)),
          torch.rand(4, 6) > 0.5, torch.tensor([2, 2, 3]))  # fmt: skip


def test_sum_over_many_threads_is_exact() -> None:
    """Every element lands: integers, so that any order gives the same sum."""
    index = torch.randint(0, 7, (200_000,))
    check(lambda x, i: x.index_add(0, i, i + 1), torch.zeros(7, dtype=torch.int64), index)


def test_no_elements_and_no_dimensions() -> None:
    none = torch.empty(0, 1, dtype=torch.int64)
    check(lambda x, e: (x.scatter(1, e, 1.0) + 1, x.index_add(0, e[:, 0], x[:0]) + 1),
          torch.randn(4, 6), none)  # fmt: skip
    check(lambda z, i: (z.scatter(0, i, 2.0) + 1, z.scatter_add(0, i, z) + 1,
                        z.index_add(0, i, z) + 1, z.index_copy(0, i, z) + 1,
                        z.index_fill(0, i, 3) + 1, z.scatter_reduce(0, i, z, "mean")),
          torch.tensor(1.5), torch.tensor(0))  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1])
def test_large_scatters_run_on_threads(dim: int) -> None:
    """Columns go to places of their own, whatever each gathers, and are shared among threads."""
    x, s = torch.zeros(40, 300), torch.randint(-8, 8, (60, 300)).float()
    index = torch.randint(0, 40, (60, 300))
    if dim:
        x, s, index = x.t().contiguous(), s.t().contiguous(), index.t().contiguous()

    def function(x: torch.Tensor, g: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.scatter_add(dim, g, s)

    check(function, x, index, s)
    _, (code,) = run_and_get_code(torch.compile(function, backend="tilewright"), x, index, s)
    added = code
    assert "tw::index" in added and "#pragma omp parallel" in added


def test_a_scatter_that_meets_nowhere() -> None:
    """Every row is added to once: there is no loop to keep in order."""
    x = torch.randn(96, 128)
    check(lambda x, s: x.index_add(0, torch.arange(96), s), x, torch.randn(96, 128))
    check(lambda x, s: x.scatter_add(0, torch.arange(96)[:, None].expand(96, 128), s), x, x.sin())


@pytest.mark.parametrize(("count", "rows", "padding"), [
    (99, 40, None), (200, 5, 3), (3, 40, None), (64, 1, None), (1500, 700, 5)
])  # fmt: skip
def test_gradients_of_a_table_gather_their_rows(count: int, rows: int, padding: int | None) -> None:
    """Runs of every length: none, a few, and more than are added at once."""
    ids, table = torch.randint(0, rows, (count,)), torch.randn(rows, 70, requires_grad=True)
    with mock.patch.object(rows_of, "worthwhile", return_value=True):
        programs.check(lambda i, t: F.embedding(i, t, padding) * 2, ids, table,
                       tolerance={"rtol": 1e-4, "atol": 1e-4})  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_added_to_others_are_gathered(dtype: torch.dtype) -> None:
    """Their sum is rounded once, so it is compared with one of floats."""

    def added(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, index, source) * 2

    x, source = torch.randn(40, 3, 23).to(dtype), torch.randn(99, 3, 23).to(dtype)
    index = torch.randint(0, 40, (99,))
    with mock.patch.object(rows_of, "worthwhile", return_value=True):
        actual = programs.compiled(added)(x, index, source)
    torch.testing.assert_close(actual, added(x.float(), index, source.float()).to(dtype))


@pytest.mark.parametrize(("count", "rows", "width", "dtype", "gathers"), [
    (32768, 32000, 2048, torch.bfloat16, True),
    (8192, 128256, 4096, torch.bfloat16, True),
    (32768, 32000, 2048, torch.float32, True),
    (8192, 50257, 768, torch.float32, False),  # nothing is rounded, and most rows are only cleared
    (65536, 1000, 512, torch.bfloat16, False),  # long runs
    (4096, 30000, 64, torch.bfloat16, False),
])  # fmt: skip
def test_which_tables_gather_their_gradients(count: int, rows: int, width: int, dtype: torch.dtype,
                                            gathers: bool) -> None:  # fmt: skip
    size = (ix.as_index(count), ix.as_index(width))
    for device, wanted in (("cuda", gathers), ("cpu", False)):
        values = Tensor(size, dtype, torch.device(device), const(0, dtype))
        assert rows_of.worthwhile(values, ix.as_index(rows)) == wanted


def test_gradients_of_rows_that_a_table_does_not_have() -> None:
    """The keys that are kept are short: what they would be cut to is not taken for a row."""

    def f(grad: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.embedding_dense_backward(grad, ids, 40, -1, False)

    ids = torch.tensor([1, 2, 1 << 16])
    with mock.patch.object(rows_of, "worthwhile", return_value=True), pytest.raises(IndexError):
        programs.compiled(f)(torch.randn(3, 8), ids)
