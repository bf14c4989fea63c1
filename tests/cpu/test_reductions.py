"""Reductions that share a kernel with what walks the same data in another order, and reductions cut
into chunks. Traffic of the same programs is in `tests/traffic.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.cpu.against_eager import check
from tests.fuzz.stages import capture, first_wrong
from tests.limits import limit
from tests.programs import compiled
from tilewright import config, metrics
from tilewright.ir import index as ix
from tilewright.schedule.fusion import group
from tilewright.schedule.plan import Schedule
from tilewright.schedule.split import apply
from tilewright.target import Target
from tilewright.testing import run_and_get_code


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are cut too, so that there is little to compute here."""
    limit(monkeypatch, "CHUNK_WORK", 64)
    limit(monkeypatch, "LARGE_WORK", 256)


@pytest.fixture
def for_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules are made as for an H100; what they compute can be run here all the same."""
    card = type("Card", (), {"of": staticmethod(lambda device: Target("sm_90"))})
    monkeypatch.setattr(group, "Target", card)
    monkeypatch.setattr(apply, "Target", card)


def plans(function: Callable[..., Any], *args: Any, **options: Any) -> list[Schedule]:
    """What is scheduled; every stage up to there gives eager's values."""
    found = capture(function, *args, **options)
    wrong = first_wrong(found, alike)
    assert not wrong, wrong
    return [graph.plan for graph in found.graphs]


def alike(ours: Any, theirs: Any) -> bool:
    def same(a: Any, b: Any) -> bool:
        if not isinstance(b, Tensor):
            return a is b or a == b
        loose = 0.05 if b.dtype.itemsize < 4 else 2e-4
        return torch.allclose(a.double(), b.double(), loose, loose, equal_nan=True)

    return all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def kernels(found: list[Schedule]) -> list[list[str]]:
    """The nests of each kernel of the last graph."""
    return [[m.name for m in step.group.members] for step in found[-1].steps]


def serial_loops(found: list[Schedule]) -> int:
    return sum(len(step.group.serial) > 0 for plan in found for step in plan.steps)


def whole_numbers(*size: int) -> Tensor:
    """Many equal elements, sums without rounding."""
    return torch.randint(-5, 6, size).float()


def with_nan(*size: int) -> Tensor:
    x = torch.randn(*size)
    x[size[0] // 3, 1] = x[size[0] // 2, 1] = float("nan")
    return x


FOLDS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "sum": lambda x: (x.sum(0), x.sum(1)),
    "mean": lambda x: (x.mean(0), x.mean(1)),
    "prod": lambda x: ((x / 4).prod(0), x.sum(1)),
    "extremes": lambda x: (x.amax(0), x.amin(0), x.amax(1)),
    "any and all": lambda x: ((x > 4).any(0), (x > -5).all(0), x.sum(1)),
    "positions": lambda x: (x.argmax(0), x.argmin(0), x.sum(1)),
    "variance": lambda x: (x.var(0), x.std(0), x.sum(1)),
    "all of it": lambda x: (x.sum(), x.amax(), x.sum(1)),
    "position in all of it": lambda x: (x.argmax(), x.argmin(), x.amax(1)),
    "variance of all of it": lambda x: (x.var(), x.sum(1)),
    "everything": lambda x: (x.sum(0), x.amax(1), x.sum(), x.cos()),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", FOLDS)
@pytest.mark.parametrize("rows", [3, 67])
def test_rows_and_columns(kind: str, rows: int) -> None:
    """RD-1, RD-4: any fold over rows and columns; a prime number of rows fills no chunk evenly."""
    for x in (whole_numbers(rows, 20), with_nan(rows, 20)):
        found = plans(FOLDS[kind], x)
        assert serial_loops(found) == 1
        # results for columns and for everything are finished in kernels of their own
        assert len(found[0].steps) == (1 if rows == 3 else 3 if kind == "everything" else 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", FOLDS)
@pytest.mark.parametrize("rows", [3, 67])
@pytest.mark.usefixtures("for_a_card")
def test_rows_and_columns_on_a_card(kind: str, rows: int) -> None:
    plans(FOLDS[kind], with_nan(rows, 20))


@pytest.mark.parametrize("kind", ["sum", "variance", "positions", "stored too"])
@pytest.mark.usefixtures("for_a_card")
def test_rows_that_are_in_no_chunk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RD-4: rows that are dealt to chunks in turn, and one more: what folds the chunks' results
    takes it as a chunk of its own, with no deviation from itself."""
    for name, value in (("LARGE_WORK", 1 << 12), ("SPLIT_WORK", 1 << 12), ("CYCLIC_WORK", 1 << 10)):
        limit(monkeypatch, name, value)
    functions: dict[str, Callable[[Tensor], Any]] = {
        "sum": lambda x: x.float().sum(0), "variance": lambda x: torch.var_mean(x.float(), 0),
        "positions": lambda x: (x.argmax(0), x.amin(0)),
        "stored too": lambda x: (x * 2, (x * 2).float().sum(0)),
    }  # fmt: skip
    x = whole_numbers(601, 21).bfloat16()
    x[600, ::2] += 1000.0
    (plan,) = plans(functions[kind], x)
    parts = [b for b in plan.program.buffers.values() if "_part" in b.name]
    assert 8 in {ix.value_of(b.size[0]) for b in parts}, "601 is eight times 75 and one"
    (plan,) = plans(lambda x: x.float().sum(1), whole_numbers(5, 640, 21).bfloat16())
    sizes = [b.size for b in plan.program.buffers.values() if "_part" in b.name]
    assert [[ix.value_of(n) for n in size] for size in sizes] == [[5, 8, 21]], "as they are read"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_rows_and_columns_generated(dtype: torch.dtype) -> None:
    """RD-1: the kernels, for accumulation types wide and narrow."""
    x = (torch.randn(211, 40) * 3).to(dtype)
    error = {torch.float32: 1e-4, torch.float64: 1e-10, torch.int32: 0}.get(dtype, 1e-2)
    check(lambda x: (x.sum(0), x.sum(1), x.sum(), x.amax(0)), x, rtol=error, atol=error)


@pytest.mark.parametrize("kind", ["positions", "variance", "any and all", "prod"])
def test_folds_generated(kind: str) -> None:
    check(FOLDS[kind], whole_numbers(211, 40), rtol=1e-4, atol=1e-4)
    check(FOLDS[kind], with_nan(211, 40), rtol=1e-4, atol=1e-4)


def test_rows_behind_the_data_are_not_touched() -> None:
    """RD-4: the rows are part of a larger tensor, poisoned behind them."""
    whole = torch.full((250, 48), float("nan"))
    whole[:237] = torch.randn(237, 48)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(0), x.sum(1), x.amax()

    rows = whole[:237]  # as it is: a copy would have nothing behind it
    found = compiled(function)(rows)
    assert all(t.isfinite().all() for t in found)
    torch.testing.assert_close(found, function(rows), rtol=1e-4, atol=1e-4)
    with as_cuda():
        torch.testing.assert_close(compiled(function)(rows), function(rows), rtol=1e-4, atol=1e-4)


def test_rd_4_several_tensors_of_partial_sums_coexist() -> None:
    """Two pairs of rows and columns at once, each with memory of its own for what is not done."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.sum(0), x.sum(1), y.sum(0), y.sum(1)

    args = torch.randn(237, 48), torch.randn(190, 24)
    assert serial_loops(plans(function, *args)) == 2
    check(function, *args, rtol=1e-4, atol=1e-4)


def test_three_dimensions() -> None:
    """RD-1: leading dimensions are one loop of rows; a kept one stays parallel."""
    x = torch.randn(7, 15, 32)
    assert serial_loops(plans(lambda x: (x.sum((0, 1)), x.sum(2)), x)) == 1
    assert serial_loops(plans(lambda x: (x.sum(1), x.sum(2)), x)) == 1
    check(lambda x: (x.sum((0, 1)), x.sum(2), x.sum(1)), x, rtol=1e-4, atol=1e-4)


NORMS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), 2),
    "layer norm without bias": (lambda x, w: F.layer_norm(x, x.shape[-1:], w), 1),
    "rms norm": (lambda x, w: F.rms_norm(x, x.shape[-1:], w), 1),
    "keepdim": (lambda x, w: x * w.view(1, -1) / x.abs().mean(1, keepdim=True), 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_norm_backward(name: str, dtype: torch.dtype) -> None:
    """RD-2, RD-8: input and parameter gradients in one kernel, partial ones added up in another;
    parameter gradients are rounded to their own type there."""
    norm, count = NORMS[name]
    x = torch.randn(53, 32, dtype=dtype, requires_grad=True)
    parameters = [torch.randn(32, dtype=dtype, requires_grad=True) for _ in range(count)]
    found = capture(norm, x, *parameters)
    given = [t.detach().clone().requires_grad_() for t in (x, *parameters)]
    torch._dynamo.reset()
    out = torch.compile(norm, backend=found, fullgraph=True)(*given)
    out.float().square().mean().backward()
    backward = found.graphs[-1]
    assert len(backward.plan.steps) == 2
    assert sum(bool(step.group.serial) for step in backward.plan.steps) == 1
    wrong = first_wrong(found, alike)
    assert not wrong, wrong


def test_norm_backward_generated() -> None:
    norm, _ = NORMS["layer norm"]
    args = torch.randn(57, 48), torch.randn(48), torch.randn(48)
    weight = torch.randn(57, 48)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        own = [x.clone().requires_grad_() for x in args]
        return torch.autograd.grad((function(*own) * weight).sum(), own)

    torch._dynamo.reset()
    ours = gradients(torch.compile(norm, backend="tilewright"))
    for a, b in zip(ours, gradients(norm), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_new_sizes_need_no_new_code() -> None:
    """RD-3: chunks have a fixed length, so a new number of rows is another number of chunks."""
    torch._dynamo.reset()
    metrics.reset()
    compiled = torch.compile(lambda x: (x.sum(0), x.sum(1)), backend="tilewright", dynamic=True)
    for rows in (300, 1, 17, 2000, 33):
        x = torch.randn(rows, 40)
        for a, b in zip(compiled(x), (x.sum(0), x.sum(1)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert metrics.generated_kernel_count == 3  # one row is a program of its own


def test_sums_of_sizes() -> None:
    """RD-8: the number of rows is a sum of dynamic sizes."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.cat([x, y])
        return z.sum(0), (z * 2).sum(1)

    check(function, torch.randn(130, 20), torch.randn(57, 20), dynamic=True, rtol=1e-4, atol=1e-4)


def test_a_fold_that_the_rows_need_is_finished_first() -> None:
    """RD-6: what reads the columns' sums does not run with the rows that make them."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        columns = x.sum(0)
        return columns, (x * columns).sum(1)

    found = plans(function, torch.randn(70, 64))
    assert len(kernels(found)) == 2
    check(function, torch.randn(70, 64), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("size", "together"),
    [((64, 64), 18944), ((128, 128), 74752), ((400, 24), 44896), ((40, 400), 75360)],
)
def test_never_more_bytes_than_apart(size: tuple[int, int], together: int) -> None:
    """RD-5: sizes near each other, or too few rows: a cut is made where it saves bytes."""
    rows, columns = size
    for dims, moved in (((0, 1), together), ((0,), None), ((1,), None)):
        metrics.reset()
        plans(lambda x, dims=dims: tuple(x.sum(d) for d in dims), torch.randn(size))
        apart = 4 * (rows * columns + (columns if dims == (0,) else rows))
        assert metrics.num_bytes_accessed == (moved or apart)
    assert together < 4 * (2 * rows * columns + rows + columns)


def test_norms_with_common_weights() -> None:
    """RD-7: three norms, three walks over rows and columns for their gradients, by one text."""

    def function(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.rms_norm(t, (32,), w) for t in (x, y, z))

    given = [torch.randn(60, 32, requires_grad=True) for _ in range(3)]
    weight = torch.randn(32, requires_grad=True)
    directions = [torch.randn(60, 32) for _ in range(3)]

    def gradients(call: Callable[..., Any]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*given, weight), (*given, weight), directions)

    expected = gradients(function)
    found, (_, backward) = run_and_get_code(lambda: gradients(compiled(function)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    _, *texts = re.split(r"^// cpp_\w+\n", backward, flags=re.M)
    # each writes a gradient and its part of the weights'; what is left adds up the parts
    assert len(re.findall(r"_part0 = empty_cpu", backward)) == 3
    assert len(texts) == 4 and len({text.strip() for text in texts[:3]}) == 1


def test_what_uses_a_partial_fold_joins_the_last_step() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        columns = x.sum(0)
        return x.sum(1), columns.relu() + 1, columns.to(torch.bfloat16)

    assert len(kernels(plans(function, torch.randn(100, 64)))) == 2


def test_a_large_use_of_a_small_fold_runs_in_parallel() -> None:
    """A scale found over everything, then applied: the last fold keeps to its own small kernel."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        top = x.abs().amax()
        return x.sum(1), x / top

    for step in plans(function, torch.randn(100, 64))[-1].steps:
        assert step.group.outer or all(m.reduce or not m.loops for m in step.group.members)


@pytest.mark.usefixtures("for_a_card")
def test_a_card_is_kept_busy() -> None:
    """A loss over everything is cut into chunks; its last operations follow in a small kernel."""
    found = plans(lambda x, y: (x - y).square().mean().sqrt() * 2,
                  torch.randn(30, 40), torch.randn(30, 40))  # fmt: skip
    first, last = (step.group for step in found[-1].steps)
    assert len(first.outer) == 1 and not last.outer and len(last.members) > 1
    plans(lambda x: x - x.mean(), torch.randn(30, 40))
    plans(lambda x: x.softmax(0), torch.randn(400, 8))
    plans(lambda x: (x.sum(1), x.mean(1).exp()), torch.randn(3, 2001))
    plans(lambda x: (x.sum(), x.add_(1)), torch.randn(40, 81))


@pytest.mark.parametrize("size", [(0, 30), (30, 0), (0,), (1, 1), (1, 400), (400, 1)])
def test_no_elements_or_one(size: tuple[int, ...]) -> None:
    check(lambda x: (x.sum(0), x.sum(-1), x.sum(), x.cos()), torch.randn(size))


# ---- softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_is_as_accurate_as_eager(dtype: torch.dtype, dim: int) -> None:
    """OS-3: the largest element is exact, and the largest error as eager's, give or take a unit in
    the last place: 1.17 of it along rows of float32, 0.29 along columns."""
    x = (torch.randn(600, 300) * 4).to(dtype)
    exact = x.double().softmax(dim)
    torch._dynamo.reset()
    program = torch.compile(lambda x: (x.softmax(dim), x.amax(dim)), backend="tilewright")
    ours, most = program(x)
    assert torch.equal(most, x.amax(dim))
    error = (ours.double() - exact).abs().max()
    assert error <= 1.2 * (x.softmax(dim).double() - exact).abs().max()


@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_of_masked_parts(dim: int) -> None:
    """OS-4: a part of a row that is minus infinity throughout gives no NaN."""
    x = torch.randn(300, 300)
    x = x.masked_fill(torch.ones(300, 300).tril() == 0, float("-inf"))
    for y in (x, x.t().contiguous()):
        y = y.clone()
        y[0, 0] = y[-1, -1] = 0.0
        check(lambda x: (x.softmax(dim), x.log_softmax(dim)), y)


def test_softmax_keeps_plain_loops_on_the_cpu() -> None:
    """OS-5: the row is in cache, and a second pass over it costs less than scaling sums."""
    (plan,) = plans(lambda x: x.softmax(1), torch.randn(20, 5000))
    (step,) = plan.steps
    kinds = [n for m in step.group.members for n in m.reduce]
    assert len(kinds) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_halves_are_summed_beside_another_use_of_them(dtype: torch.dtype) -> None:
    x, y = (torch.arange(65) / 8).half(), torch.ones(65, dtype=dtype)

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y * x.to(dtype), x.sum(0) + x

    actual = torch.compile(program, backend="tilewright")(x, y)
    torch.testing.assert_close(actual, program(x, y))


@pytest.mark.parametrize(("channels", "threads", "lanes"),
                         [(32, -1, 16), (32, 1, 32), (64, -1, 32), (128, -1, 64)])  # fmt: skip
def test_channels_are_more_than_one_tile(channels: int, threads: int, lanes: int) -> None:
    """A norm of 32 channels was one tile, so one thread's: a training step of a small convnet took
    15.3 ms and takes 7.9 (eager 9.2; two cores of an AMD EPYC, torch 2.13, 2026-11-19)."""
    x = torch.randn(2, channels, 20, 20).to(memory_format=torch.channels_last)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean((0, 2, 3), keepdim=True)) * x.var((0, 2, 3), keepdim=True)

    with config.patch({"cpp.threads": threads}):
        found, (code,) = run_and_get_code(torch.compile(fn, backend="tilewright"), x)
    assert f"tile += {lanes})" in code
    assert code.count("tile += ") == code.count(f"tile += {lanes})")
    torch.testing.assert_close(found, fn(x), rtol=1e-4, atol=1e-4)


def test_place_of_an_extreme_of_a_function():
    """A function gives another last bit for a vector than for one element: no element was equal to
    the greatest of its chunk, and the place was another chunk's."""
    find = compiled(lambda x: x.sin().t().argmax())
    x = torch.zeros(5, 7)
    for number in range(300):
        x[1, 6] = 1.2 + number / 1000
        assert find(x) == 31


def test_chunks_of_long_rows_are_added_up_in_double() -> None:
    """A thousand chunks in float32 are ten times as far off."""
    x = torch.rand(2, 1 << 22) + 0.5
    found = torch.compile(lambda x: x.sum(1), backend="tilewright")(x)
    torch.testing.assert_close(found.double(), x.double().sum(1), rtol=1.2e-7, atol=0)
