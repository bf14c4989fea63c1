"""The user's own passes run where they say, and are a part of what a kept program is found by."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from tilewright import config, metrics
from tilewright.errors import InvalidOptionError
from tilewright.testing import fresh_cache

aten = torch.ops.aten
# torch 2.11 has no class for passes that ask whether a graph is of inference
CustomInferenceAwareGraphPass: Any = getattr(
    custom_graph_pass, "CustomInferenceAwareGraphPass",
    type("CustomInferenceAwareGraphPass", (CustomGraphPass,), {}))  # fmt: skip
POST = ["joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass",
        "post_grad_custom_post_pass"]  # fmt: skip


def f(x: Tensor) -> Tensor:
    return x.sin() * 2


def cosine(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is aten.sin.default:
            node.target = aten.cos.default


def cosine_before(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if node.target == "sin":
            node.target = "cos"


class Named(CustomGraphPass):
    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name, self.change = name, change

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.change(graph)

    def uuid(self) -> str:
        return self.name


def compiled(g: Callable[..., Any] = f, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(g, backend="tilewright", fullgraph=True, options=options)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", POST)
def test_a_pass_changes_the_graph(name: str, train: bool):
    x = torch.randn(5, requires_grad=train)
    torch.testing.assert_close(compiled(**{name: cosine})(x), x.cos() * 2)


def test_a_pass_changes_the_graph_that_was_captured_and_its_gradient():
    x = torch.randn(5, requires_grad=True)
    found = compiled(pre_grad_custom_pass=cosine_before)(x)
    torch.testing.assert_close(found, x.cos() * 2)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(gradient, -2 * x.sin())


def test_several_passes_run_in_order():
    seen: list[str] = []
    given = [lambda g: seen.append("first"), lambda g: seen.append("second")]
    compiled(post_grad_custom_pre_pass=given)(torch.randn(3))
    assert seen == ["first", "second"]


def test_new_nodes_need_no_values():
    def shorter(graph: torch.fx.Graph) -> None:
        (sine,) = (n for n in graph.nodes if n.target is aten.sin.default)
        with graph.inserting_before(sine):
            half = graph.call_function(aten.slice.Tensor, (sine.args[0], 0, 0, 2))
        sine.replace_input_with(sine.args[0], half)

    x = torch.randn(6, 3)
    found = compiled(lambda x: x.sin().sum(0), post_grad_custom_pre_pass=shorter)(x)
    torch.testing.assert_close(found, x[:2].sin().sum(0))


@pytest.mark.parametrize("train", [False, True])
def test_a_pass_may_ask_for_inference(train: bool):
    seen: list[bool] = []

    class Asks(CustomInferenceAwareGraphPass):
        def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
            seen.append(is_inference)

        def uuid(self) -> None:
            return None

    compiled(post_grad_custom_post_pass=Asks())(torch.randn(3, requires_grad=train))
    assert seen == [not train]


def test_a_pass_without_identity_keeps_its_programs_out_of_the_caches():
    x, seen = torch.randn(5), []
    with fresh_cache():
        for _ in range(2):
            metrics.reset()
            compiled(post_grad_custom_pre_pass=seen.append)(x)
            assert metrics.cache_hits == 0
    assert len(seen) == 2
    told = [why for name in ("capture", "graph_cache") for why in metrics.counters[name]]
    assert any("`uuid()` in post_grad_custom_pre_pass" in why for why in told)


def test_programs_are_found_by_what_their_passes_say():
    x = torch.randn(5)
    with fresh_cache():
        for name, change, hits in (
            ("cosine", cosine, 0), ("cosine", cosine, 1), ("nothing", lambda graph: None, 0),
        ):  # fmt: skip
            metrics.reset()
            found = compiled(post_grad_custom_post_pass=Named(name, change))(x)
            assert metrics.cache_hits == hits
            torch.testing.assert_close(found, (x.cos() if change is cosine else x.sin()) * 2)


def test_a_pass_that_fails_is_named():
    def broken(graph: torch.fx.Graph) -> None:
        raise KeyError("nowhere")

    with pytest.raises(Exception, match="'broken' of the option 'pre_grad_custom_pass' failed"):
        compiled(pre_grad_custom_pass=broken)(torch.randn(3))


def test_what_is_no_function_is_refused():
    with pytest.raises(InvalidOptionError, match="it must be function of a graph or None"):
        config.patch(pre_grad_custom_pass=[cosine, 3])


def test_another_process_is_told_the_name_alone():
    with config.patch(pre_grad_custom_pass=Named("one", lambda graph: None)):
        told = pickle.loads(pickle.dumps(config.pre_grad_custom_pass))
        assert repr(told) == repr(config.pre_grad_custom_pass) == "GraphPass(\"'one'\",)"
