"""Control flow and regions: their bodies are compiled, once for all who call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as mapped
from torch.utils import _pytree as pytree

from tilewright import metrics, pipeline

WEIGHT = torch.randn(4, 4) / 4


@pytest.fixture(autouse=True)
def _no_bodies_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_bodies", {})


@torch.compiler.nested_compile_region
def region(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w) * 2


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() - 1, (x,))


def nested(x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.max() > 1, lambda x: x.exp() + 1, lambda x: x * x - 1, (x,))

    return torch.cond(x.sum() > 0, inner, lambda x: x.cos() - 1, (x,))


def rounds(x: Tensor) -> Any:
    start = torch.tensor(0)
    return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x.sin() * 0.5 + x), (start, x))


def scanned(x: Tensor) -> Any:
    return scan(lambda c, x: (c + x.sin(), c * x), torch.zeros(x.shape[1]), x)


def rows(x: Tensor) -> Tensor:
    return mapped(lambda x, y: (x + y).sin() * y, x, torch.ones(x.shape[1]))


def regions(x: Tensor) -> Tensor:
    for _ in range(3):
        x = region(x, WEIGHT)
    return x


def check(f: Callable[..., Any], train: bool, **how: Any) -> None:
    torch._dynamo.reset()
    metrics.reset()
    compiled = torch.compile(f, backend="tilewright", fullgraph=True, **how)
    for x in (torch.rand(6, 4), -torch.rand(6, 4), torch.rand(6, 4) + 1):
        given = [x.clone().requires_grad_(train) for _ in range(2)]
        results = [g(x) for g, x in zip((f, compiled), given, strict=True)]
        torch.testing.assert_close(results[1], results[0])
        if train:
            sums = [sum(t.sum() for t in pytree.tree_leaves(r) if t.requires_grad) for r in results]
            grads = [torch.autograd.grad(s, x)[0] for s, x in zip(sums, given, strict=True)]
            torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("f", "bodies"), [(branches, 2), (nested, 4), (rounds, 2), (scanned, 1),
                                           (rows, 1), (regions, 3)])  # fmt: skip
def test_bodies_are_compiled(f: Callable[..., Any], bodies: int, train: bool):
    check(f, train)
    told = metrics.counters["control"]
    assert told["bodies compiled"] + told["bodies shared"] == bodies * (1 + train)
    assert not [why for why in told if "left to eager" in why]


def test_a_region_is_compiled_once_and_shared():
    check(regions, train=False)
    told = metrics.counters["control"]
    assert (told["invoke_subgraph"], told["bodies compiled"]) == (3, 1)
    assert metrics.generated_kernel_count == 1  # tanh and the product by two; ATen multiplies


def test_a_region_forward_and_backward_is_compiled_once_each():
    torch._dynamo.reset()
    metrics.reset()
    x = torch.randn(6, 4, requires_grad=True)
    torch.compile(regions, backend="tilewright", fullgraph=True)(x).sum().backward()
    told = metrics.counters["control"]
    assert (told["invoke_subgraph"], told["bodies compiled"]) == (6, 2)


def test_bodies_of_dynamic_sizes():
    torch._dynamo.reset()
    metrics.reset()
    compiled = torch.compile(branches, backend="tilewright", fullgraph=True, dynamic=True)
    for n in (3, 6, 17):
        for x in (torch.rand(n, 5), -torch.rand(n, 5)):
            torch.testing.assert_close(compiled(x), branches(x))
    assert metrics.counters["control"]["bodies compiled"] == 2


def test_operands_that_lie_otherwise_than_the_body_was_traced_with():
    def f(x: Tensor) -> Tensor:
        return mapped(lambda row: row.cumsum(0) + 1, x)

    torch._dynamo.reset()
    x = torch.randn(5, 3, 4).permute(2, 0, 1)
    torch.testing.assert_close(torch.compile(f, backend="tilewright")(x), f(x))
