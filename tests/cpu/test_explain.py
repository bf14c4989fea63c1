"""`tilewright.explain`: the parts, their bytes, and the reasons."""

from __future__ import annotations

import torch
from torch import Tensor

import tilewright
from tilewright.explanation import LIBRARY


def product_and_softmax(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x.sin() @ w, dim=-1)


def test_kernels_calls_and_bytes() -> None:
    (graph,) = tilewright.explain(product_and_softmax)(
        torch.randn(20, 30), torch.randn(30, 40)
    ).graphs
    assert graph.role == "inference"
    assert [part.is_kernel for part in graph.parts] == [True, False, True]
    sin, mm, softmax = graph.parts
    assert (sin.ops[0], mm.ops, softmax.ops[-1]) == ("sin", ("mm",), "_softmax")
    assert sin.moved == 4 * 2 * 600
    assert mm.moved == 4 * (600 + 1200 + 800)
    assert softmax.moved == 4 * 2 * 800
    assert graph.moved == graph.least  # what is between kernels and calls has to be in memory
    assert "test_explain.py" in sin.location


def test_the_reason_for_each_pair() -> None:
    (graph,) = tilewright.explain(product_and_softmax)(
        torch.randn(20, 30), torch.randn(30, 40)
    ).graphs
    assert [(r.first, r.second, r.reason) for r in graph.refusals] == [
        (0, 1, LIBRARY), (1, 2, LIBRARY)]  # fmt: skip
    assert graph.refusals[0].shared == ("buf0 float32[20, 30]",)


def test_two_kernels_say_why_they_are_two() -> None:
    def f(x: Tensor) -> Tensor:
        return x.cumsum(0).flip(0).cumsum(1) + x.sort().values

    (graph,) = tilewright.explain(f)(torch.randn(50, 60)).graphs
    kernels = {part.number for part in graph.parts if part.is_kernel}
    pairs = [r for r in graph.refusals if {r.first, r.second} <= kernels]
    assert pairs and all(r.reason and r.reason != LIBRARY for r in pairs)
    assert graph.moved > graph.least


def test_forward_and_backward_and_no_gradients_left() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    found = tilewright.explain(model)(torch.randn(3, 8))
    assert [graph.role for graph in found.graphs] == ["forward", "backward"]
    assert all(p.grad is None for p in model.parameters())


def test_the_report_is_readable() -> None:
    text = str(tilewright.explain(product_and_softmax)(torch.randn(20, 30), torch.randn(30, 40)))
    first, *parts = text.splitlines()
    assert first == "inference: 2 kernels, 1 library call, moves 21.6 kB, at least 21.6 kB"
    assert "kernel" in parts[0] and "4.8 kB" in parts[0] and "sin" in parts[0]
    assert parts[3] == f"  0 and 1 share buf0 float32[20, 30]: {LIBRARY}"


def test_dynamic_sizes_and_nothing_to_compile() -> None:
    f = tilewright.explain(torch.compiler.disable(lambda x: x))
    assert str(f(torch.ones(2))) == "nothing was compiled"


def test_options_are_those_of_the_compiler() -> None:
    x = torch.randn(9, 9)
    (fused,) = tilewright.explain(lambda x: x.sin().sum(1).cos())(x).graphs
    (single,) = tilewright.explain(lambda x: x.sin().sum(1).cos(),
                                   options={"max_fusion_size": 1})(x).graphs  # fmt: skip
    assert len(fused.parts) == 1 < len(single.parts)
    assert single.refusals[0].reason == "the group is full"
    assert single.moved > single.least == fused.moved
