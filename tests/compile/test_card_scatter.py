"""What is scattered on a card, and what its gradients would be scattered for elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compile.card import CARD, results, with_gradients
from tests.compile.cubin import kernels_of
from tests.compile.test_triton_stencils import kernels
from tests.pretend import pretended
from tilewright.ir import index as ix
from tilewright.ir.expr import free_vars, walk
from tilewright.ir.program import Nest
from tilewright.lower.graph import lower


@pretended
def test_values_where_many_meet() -> None:
    places = torch.randint(0, 7, (3001,))

    def counted(base: Tensor, places: Tensor) -> Tensor:
        return base.index_add(0, places, torch.ones_like(places).to(base.dtype))

    for base in (torch.arange(7), torch.arange(7.0), torch.arange(7.0).half()):
        (found,) = results(counted, base, places)
        assert torch.equal(found, counted(base, places))


@pretended
def test_values_where_neighbours_meet_in_a_column() -> None:
    """Each column has copies of its own, and those of a place lie side by side."""
    table, places = torch.randn(3, 4), torch.randint(0, 3, (90, 70))
    biases = with_gradients(lambda t, i: t[i].permute(2, 0, 1), (0,))
    found = results(biases, table, places, torch.ones(4, 90, 70))
    expected = biases(table, places, torch.ones(4, 90, 70))
    torch.testing.assert_close(found, [expected[0], *expected[1]])
    rows = torch.randint(0, 3, (4000,))  # neighbours that go to neighbouring places
    values = torch.randn(4000, 4)
    (found_rows,) = results(lambda t, i, v: t.index_add(0, i, v), table, rows, values)
    torch.testing.assert_close(found_rows, table.index_add(0, rows, values), rtol=1e-4, atol=1e-4)


@pretended
def test_columns_that_meet_nowhere_share_all_copies() -> None:
    """Of 16 columns each would have one copy in 16 otherwise."""
    with FakeTensorMode():
        table, values = torch.empty(32, 16, device="cuda"), torch.empty(16, 99, 99, device="cuda")
        places = torch.empty(99, 99, dtype=torch.int64, device="cuda")
        gm = make_fx(lambda t, i, v: [t.index_put((i,), v.permute(1, 2, 0), accumulate=True)])(
            table, places, values
        )
    nests = [n for n in lower(gm, CARD).nodes if isinstance(n, Nest)]
    (added,) = (s for n in nests for s in n.stores if s.mode == "add")
    (copy,) = (n for n in walk(added.index) if n.op == "imod")
    columns = {v for v in free_vars(added.index) if ix.value_of(v.src[0]) == 16}
    assert columns and not columns & free_vars(copy)
    assert ix.coefficient(added.index, columns.pop()) is copy.src[1]


@pretended
def test_rows_have_copies_of_more_places_than_elements_have() -> None:
    """As the means of clusters; what is added one by one to as many places has none."""
    table, rows = torch.randn(100, 64), torch.randint(0, 100, (25600,))
    values = torch.randn(25600, 64)
    with FakeTensorMode():
        given = [torch.empty(t.size(), dtype=t.dtype, device="cuda")
                 for t in (table, rows, values)]  # fmt: skip
        by_row = make_fx(lambda t, i, v: [t.index_add(0, i, v)])(*given)
        single = make_fx(lambda t, i, v: [t.view(-1).put(i, v, accumulate=True)])(
            given[0], torch.empty(64 * 25600, dtype=torch.int64, device="cuda"), given[2].view(-1)
        )
    for gm, copies in ((by_row, True), (single, False)):
        nests = [n for n in lower(gm, CARD).nodes if isinstance(n, Nest)]
        (added,) = (s for n in nests for s in n.stores if s.mode == "add")
        assert any(n.op == "imod" for n in walk(added.index)) == copies
    (found,) = results(lambda t, i, v: t.index_add(0, i, v), table, rows, values)
    torch.testing.assert_close(found, table.index_add(0, rows, values), rtol=1e-4, atol=1e-3)


@pretended
def test_extremes_of_floats_keep_a_nan() -> None:
    x, into = torch.randn(500, 4), torch.randn(20, 4)
    x[3, 1], x[7], x[8], x[9] = float("nan"), -0.0, float("inf"), -float("inf")
    into[2, 2] = float("nan")
    into[3, 3] = -into[2, 2]
    index = torch.randint(0, 20, (500, 1)).expand(500, 4)
    for kind in ("amax", "amin"):
        (found,) = results(lambda a, i, b, k=kind: a.scatter_reduce(0, i, b, k), into, index, x)
        torch.testing.assert_close(
            found, into.scatter_reduce(0, index, x, kind), equal_nan=True, rtol=0, atol=0
        )


def routed(weights: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    into = weights.new_zeros(len(weights), 11)
    return into.scatter(1, places, weights), into.bool().scatter(1, places, True)


@pretended
def test_few_of_each_row_are_chosen_where_it_is_computed() -> None:
    weights, places = torch.rand(13, 3), torch.randint(0, 11, (13, 3))
    places[5:, 2] = places[5:, 0]  # the last of several stays
    for found, expected in zip(
        results(routed, weights, places), routed(weights, places), strict=True
    ):
        assert torch.equal(found, expected)
    assert len(kernels(lambda x: routed(x, x.long()), (13, 3))) == 1


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_gradients_of_copies_are_added_up_in_one_kernel(mode: str) -> None:
    def back(grad: Tensor) -> Tensor:
        fn = with_gradients(lambda x: F.interpolate(x, scale_factor=(2, 3), mode=mode), [0])
        return fn(grad[:, :, ::2, ::3], grad * 2)[1][0]

    assert len(kernels_of(back, torch.empty(2, 3, 8, 12))) == 1


def test_the_largest_of_what_is_computed_is_not_looked_up() -> None:
    made = kernels_of(lambda x: x.softmax(-1).max(-1), torch.empty(65536, 1000))
    assert len(made) == 1


def test_what_only_gives_its_size_is_not_stored_for_that() -> None:
    def gradient(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        scaled = x / y
        return scaled.new_zeros(50, 8).index_put((index,), scaled, accumulate=True)

    made = kernels_of(gradient, *torch.empty(2, 100, 8), torch.zeros(100, dtype=torch.int64))
    assert len(made) == 2 and made[0].text.count("tl.load") == 0


def test_what_is_looked_up_for_a_row_is_loaded_once() -> None:
    def bag(table: Tensor, index: Tensor) -> Tensor:
        return table[index].sum(1)

    (kernel,) = kernels_of(bag, torch.empty(1000, 64), torch.zeros(32768, 20, dtype=torch.int64))
    assert kernel.config.kwargs == {"XBLOCK": 64, "RBLOCK": 32}
