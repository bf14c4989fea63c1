"""Programs at the edge of what operators take: what they must refuse, and data-dependent sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.cpu.against_eager import check, compiled
from tilewright import config
from tilewright.testing import run_and_get_code

# ---- what eager refuses is refused

ROW = torch.tensor([9])
CELL = torch.tensor([[9]])
X = torch.arange(30.0).reshape(5, 6)
REFUSED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "index": (lambda x, i: x[i], (X, ROW)),
    "index from the end": (lambda x, i: x[i], (X, torch.tensor([-6]))),
    "gather": (lambda x, i: x.gather(0, i), (X, CELL)),
    "gather negative": (lambda x, i: x.gather(0, i), (X, torch.tensor([[-1]]))),
    "index_select": (lambda x, i: x.index_select(0, i), (X, ROW)),
    "embedding": (lambda x, i: F.embedding(i, x), (X, ROW)),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), (X, CELL)),
    "index_add": (lambda x, i: x.index_add(0, i, x[:1]), (X, ROW)),
    "index_put": (lambda x, i: x.index_put((i,), x[:1]), (X, ROW)),
    "take": (lambda x, i: x.take(i), (X, torch.tensor([40]))),
    "cross_entropy": (lambda x, i: F.cross_entropy(x, i), (X, torch.tensor([0, 9, 1, 1, 1]))),
    "division by zero": (lambda x: 7 // x, (torch.tensor([1, 0]),)),
    "remainder by zero": (lambda x: 7 % x, (torch.tensor([1, 0]),)),
    "greatest of nothing": (lambda x: x.max(0), (torch.zeros(0, 3),)),
    "position of bool": (lambda x: x.argmax(), (torch.tensor([True, False]),)),
    "probability": (lambda x: F.binary_cross_entropy(x, x.round()), (torch.tensor([0.2, 1.5]),)),
    "probability NaN": (lambda x: F.binary_cross_entropy(x, x * 0), (torch.tensor([torch.nan]),)),
    "too few repeats": (
        lambda n, x: torch.repeat_interleave(x, n, 0, output_size=5),
        (torch.tensor([1, 2, 0, 3, 1]), X),
    ),
    "negative repeats": (
        lambda n, x: torch.repeat_interleave(x, n, 0, output_size=5),
        (torch.tensor([1, -2, 3, 2, 1]), X),
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_as_in_eager(name: str) -> None:
    """With an error that a handler of eager's catches."""
    fn, args = REFUSED[name]
    with pytest.raises((IndexError, RuntimeError)) as theirs:
        fn(*args)
    with pytest.raises(type(theirs.value)):
        compiled(fn)(*args)


def test_repeats_and_probabilities_in_range() -> None:
    repeats, x = torch.tensor([1, 2, 0, 3, 1]), torch.rand(5, 3)
    check(lambda n, x: torch.repeat_interleave(x, n, 0, output_size=7), repeats, x)
    check(lambda x: F.binary_cross_entropy(x, x.round()), torch.tensor([0.0, 1.0, 0.3]))


# ---- sizes that depend on data


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_read_from_tensors(dynamic: bool) -> None:
    x = torch.randn(7, 3)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(lambda x, at: torch.tensor_split(x, at), x, torch.tensor([1, 4]), dynamic=dynamic,
              fallbacks=True)  # fmt: skip
        check(lambda flag: flag.item(), torch.tensor(True), dynamic=dynamic, fallbacks=True)
        check(lambda v, x: x * v.item(), torch.tensor(2.5), x, dynamic=dynamic, fallbacks=True)


@pytest.mark.parametrize("pools", [False, True])
def test_a_size_computed_of_a_number_is_not_needed_before_it_is_known(pools: bool) -> None:
    def part(x: torch.Tensor) -> Any:
        rows = x[: int(x.abs().sum().item()) % 5 + 1] + 1
        return rows, (rows * 2).sort(0)[0]

    planned = config.patch({"memory_planning": pools})
    with torch._dynamo.config.patch(capture_scalar_outputs=True), planned:
        check(part, torch.randn(9, 4), fallbacks=True)


def test_checkpoint_replays_eager_random_numbers() -> None:
    """The saved state of the generator has a size that nothing else gives."""
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda a: F.dropout(torch.relu(a @ w), 0.5), x, use_reentrant=False).sum()

    found = []
    for fn in (loss, torch.compile(loss, backend="tilewright", dynamic=True,
                                   options={"fallback_random": True})):  # fmt: skip
        torch.manual_seed(3)
        found.append(torch.autograd.grad(fn(x, w), (x, w)))
    torch.testing.assert_close(found[1], found[0])


def test_numbers_where_tensors_are_expected() -> None:
    check(torch.vmap(torch.vmap(lambda a: a * 2)), torch.randn(3, 4), fallbacks=True)


def test_interpolation_of_nothing() -> None:
    check(lambda x: F.interpolate(x, scale_factor=2), torch.zeros(0, 3, 4, 4), fallbacks=True)


def test_groups_of_no_channels() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.group_norm(x, 2)) + x

    x = torch.zeros(3, 0, 0, 3)
    try:
        f(x)
    except RuntimeError as refused:  # since torch 2.15
        with pytest.raises(Exception, match=str(refused)):
            torch.compile(f, backend="tilewright")(x)
    else:
        check(f, x, fallbacks=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_padding_that_takes_away_keeps_the_layout(dynamic: bool) -> None:
    x = torch.randn(5, 7, 10).transpose(1, 2)
    check(lambda x: F.pad(x, (0, 0, 0, 6 - x.size(1))), x, dynamic=dynamic)
    check(lambda x: F.pad(x, (-1, -2)), x, dynamic=dynamic)


# ---- g++ 12 mixes up the lanes of masked loads that are neighbours


@pytest.mark.parametrize("columns", [2, 3, 4])
def test_neighbouring_loads_under_a_condition(columns: int) -> None:
    def normalised(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.amax(-1, keepdim=True) == 0, 0.0, torch.softmax(x, -1))

    def padded(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten._unsafe_masked_index(x, m[:, None], [torch.arange(16)[:, None],
                                                torch.arange(columns)], 0.0)  # fmt: skip
        return y / y.sum(-1, keepdim=True)

    x = torch.rand(16, columns) + 0.5
    check(normalised, x)
    check(padded, x, torch.arange(16) % 3 != 0)


AFTER_NORM: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rotated": lambda h, c: h * c + torch.cat((-h[..., 8:], h[..., :8]), -1) * c,
    "interleaved": lambda h, c: h * c + torch.stack((-h[..., 1::2], h[..., ::2]), -1).flatten(-2),
    "flipped": lambda h, c: h * c - h.flip(-1),
    "heads flipped": lambda h, c: h * c - 2 * h.flip(1),
    "rolled": lambda h, c: h * c + h.roll(3, -1),
    "next head": lambda h, c: h[:, 1:] * c - h[:, :-1],
    "every other head": lambda h, c: h[:, ::2] * c * h[:, 1::2],
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", AFTER_NORM)
@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_that_are_read_elsewhere(name: str, dynamic: bool) -> None:
    """Heads are normalised and then read at other places of the same row, as rotary embeddings do:
    what is kept between the two loops has gaps in the buffer it stands for."""

    def fn(x: Tensor, y: Tensor, weight: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        def heads(t: Tensor) -> Tensor:
            t = t.view(2, t.shape[1], -1, 16)
            t = t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6)
            return AFTER_NORM[name]((weight * t).transpose(1, 2), c)

        return heads(x), heads(y)

    args = torch.randn(2, 17, 64), torch.randn(2, 17, 32), torch.randn(16), torch.randn(17, 16)
    got = torch.compile(fn, backend="tilewright", dynamic=dynamic)(*args)
    torch.testing.assert_close(got, fn(*args))


def test_a_single_row_is_given_to_libraries_as_dense_layouts_have_it() -> None:
    """Their strides decide which kernels a library takes; some it refuses."""

    def expert(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(x @ gate.t()) * (x @ up.t())

    x, gate, up = (torch.randn(n, 64, requires_grad=True) for n in (1, 96, 96))
    compiled = torch.compile(expert, backend="tilewright")

    def gradients(fn: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(fn(x, gate, up).sum(), (x, gate, up))

    found, code = run_and_get_code(gradients, compiled)
    torch.testing.assert_close(found, gradients(expert), rtol=1e-4, atol=1e-4)
    calls = [line for text in code for line in text.splitlines() if "= extern_" in line]
    assert any("addmm" in line for line in calls)
    assert not any("(1, 1,)" in line for line in calls)


def test_a_tensor_without_memory_is_refused():
    """A kernel would write where there is nothing."""
    function = compiled(lambda x: x.sin().sum(0))
    function(torch.ones(3, 4))
    with FakeTensorMode(), pytest.raises(RuntimeError, match="FakeTensor, which has no memory"):
        function(torch.empty(3, 4))


def test_tensors_of_devices_without_kernels_are_torchs(caplog):
    x = torch.empty(3, 4, device="meta")
    result = compiled(lambda x: (x @ x.t()).softmax(-1))(x)
    assert result.shape == (3, 3) and result.device.type == "meta"
    assert not [r for r in caplog.records if r.name.startswith("tilewright") and r.levelno > 20]


NOTHING: dict[str, Callable[..., Any]] = {
    "index": lambda x, i: (x * 2)[i],
    "gather": lambda x, i: x.gather(0, i[:, None].expand(2, 3)),
    "embedding": lambda x, i: F.embedding(i, x).sin(),
    "index_select": lambda x, i: x.index_select(0, i) + 1,
    "index_put": lambda x, i: (x * 2).index_put((i,), torch.ones(2, 3)),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None].expand(2, 3), torch.ones(2, 3)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_an_index_into_nothing_is_refused(name):
    """There is no first element to go on with."""
    values, index = torch.randn(6, 3), torch.tensor([0, 2])

    def chosen(x, mask, i):
        return NOTHING[name](x[mask], i)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compiled(chosen)
        everything = torch.full((6,), True)
        torch.testing.assert_close(run(values, everything, index), NOTHING[name](values, index))
        with pytest.raises((IndexError, RuntimeError), match=r"out of"):
            run(values, ~everything, index)
    with pytest.raises((IndexError, RuntimeError), match=r"out of|should be positive"):
        compiled(NOTHING[name])(values[:0], index)
