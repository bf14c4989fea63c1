"""`freezing`: what is made of weights alone is made once, and again when they change."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright import metrics
from tilewright.host.frozen import Frozen


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    metrics.reset()
    with torch.no_grad():
        yield


def frozen(f: Any, **options: Any) -> Any:
    return torch.compile(f, backend="tilewright", options={"freezing": True, **options})


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each time that weights were computed with."""
    seen: list[int] = []
    make = Frozen.__init__

    def counting(self: Frozen, once: Any, *args: Any) -> None:
        def counted(given: list[Any]) -> Any:
            seen.append(len(given))
            return once(given)

        make(self, counted, *args)

    monkeypatch.setattr(Frozen, "__init__", counting)
    return seen


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.exp() + 1)


def test_weights_are_computed_with_once(folds: list[int]):
    m, x = Scaled(), torch.randn(3, 4)
    f = frozen(m)
    for _ in range(3):
        torch.testing.assert_close(f(x), m(x))
    assert folds == [1]


def test_written_weights_are_seen(folds: list[int]):
    m, x = Scaled(), torch.randn(3, 4)
    f = frozen(m)
    f(x)
    m.weight.mul_(2)
    torch.testing.assert_close(f(x), m(x))
    m.load_state_dict({"weight": torch.randn(4, 4)})
    torch.testing.assert_close(f(x), m(x))
    m.weight = nn.Parameter(torch.randn(4, 4))
    torch.testing.assert_close(f(x), m(x))
    assert len(folds) == 4


def test_modules_of_one_class_have_their_own():
    f, modules = frozen(lambda m, x: m(x)), [Scaled(), Scaled()]
    for m in (*modules, *modules):
        x = torch.randn(3, 4)
        torch.testing.assert_close(f(m, x), m(x))


def test_weights_of_inference_mode_may_change_unseen():
    with torch.inference_mode():
        m, x = Scaled(), torch.randn(3, 4)
        f = frozen(m)
        f(x)
        m.weight.mul_(2)
        torch.testing.assert_close(f(x), m(x))


def test_weights_are_not_kept_alive():
    m, x = Scaled(), torch.randn(3, 4)
    f = frozen(lambda m, x: m(x))
    f(m, x)
    weight = weakref.ref(m.weight)
    del m
    gc.collect()
    assert weight() is None


def normalised(layer: nn.Module, norm: nn.Module) -> nn.Sequential:
    norm.running_mean.normal_()  # type: ignore[operator, union-attr]
    norm.running_var.uniform_(0.5, 2)  # type: ignore[operator, union-attr]
    for p in norm.parameters():
        p.normal_()
    return nn.Sequential(layer, norm).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("layer", "norm", "size"),
    [
        (nn.Conv2d, nn.BatchNorm2d, (2, 3, 6, 6)),
        (nn.Conv1d, nn.BatchNorm1d, (2, 3, 6)),
        (nn.Linear, nn.BatchNorm1d, (5, 3)),
    ],
)
def test_a_batch_norm_is_part_of_the_weight(layer: Any, norm: Any, size: Any, bias: bool):
    shape = (3, 8) if layer is nn.Linear else (3, 8, 3)
    m, x = normalised(layer(*shape, bias=bias), norm(8)), torch.randn(*size)
    wanted = m(x)
    torch.testing.assert_close(frozen(m)(x), wanted, rtol=1e-4, atol=1e-4)
    assert metrics.fallback_nodes == 1
    alone = metrics.generated_kernel_count
    torch._dynamo.reset()
    metrics.reset()
    torch.testing.assert_close(frozen(nn.Sequential(m, nn.ReLU()))(x), wanted.relu(),
                               rtol=1e-4, atol=1e-4)  # fmt: skip
    assert metrics.generated_kernel_count == alone + 1  # the norm is in none of them


def test_a_norm_that_others_read_stays():
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()
    norm.running_mean.normal_()  # type: ignore[operator, union-attr]

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = conv(x)
        return y, norm(y)

    x = torch.randn(1, 3, 5, 5)
    torch.testing.assert_close(frozen(f)(x), f(x), rtol=1e-4, atol=1e-4)


def test_statistics_that_are_updated_are_not_frozen(folds: list[int]):
    m, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 5, 5)
    f = frozen(m)
    for _ in range(2):
        before = m[1].running_mean.clone()
        torch.testing.assert_close(f(x), m(x), rtol=1e-4, atol=1e-4)
        assert not torch.equal(before, m[1].running_mean)
    assert folds == []


def test_casts_of_weights_are_made_once(folds: list[int]):
    m, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(5, 8)
    f = frozen(m)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(f(x), m(x), rtol=2e-2, atol=2e-2)
    assert folds == [4]


def test_what_is_returned_is_the_users_own():
    class Both(Scaled):
        def forward(self, x: Tensor) -> Any:
            w = self.weight * 2
            return x @ w, w, (self.weight + 1).t()

    m, x = Both(), torch.randn(3, 4)
    f = frozen(m)
    f(x)[1].zero_()
    f(x)[2].zero_()
    torch.testing.assert_close(f(x), m(x))


def test_what_would_be_much_larger_is_made_again(folds: list[int]):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.a[:, None] * self.a)

    m, x = Outer(), torch.randn(3, 64)
    torch.testing.assert_close(frozen(m)(x), m(x), rtol=1e-4, atol=1e-4)
    assert folds == []


def test_training_is_as_without(folds: list[int]):
    m, x = Scaled(), torch.randn(3, 4)
    with torch.enable_grad():
        frozen(m)(x).sum().backward()
        assert m.weight.grad is not None
        wanted = torch.autograd.grad(m(x).sum(), m.weight)[0]
    torch.testing.assert_close(m.weight.grad, wanted)
    assert folds == []


def test_a_report_shows_what_runs_at_every_call():
    report = tilewright.explain(Scaled(), options={"freezing": True})(torch.randn(3, 4))
    once, rest = report.graphs
    assert [part.is_kernel for part in once.parts] == [True]
    assert [part.name for part in rest.parts] == ["mm"]


def test_sizes_may_change(folds: list[int]):
    m = Scaled()
    f = torch.compile(m, backend="tilewright", dynamic=True, options={"freezing": True})
    for n in (3, 5, 7):
        x = torch.randn(n, 4)
        torch.testing.assert_close(f(x), m(x))
    assert folds == [1]
