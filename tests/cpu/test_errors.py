"""Errors say where and what to do, and survive the way between processes."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.fx

from tilewright import errors
from tilewright.errors import (
    BuildError,
    LoweringError,
    NoValidChoicesError,
    Site,
    TilewrightError,
    UnknownModeError,
    UnknownOptionError,
    at_node,
    user_frame,
)

TRACE = """\
  File "/home/me/model.py", line 12, in forward
    return self.linear(x) + 1
  File "/opt/lib/site-packages/torch/nn/modules/linear.py", line 130, in forward
    return F.linear(input, self.weight, self.bias)
"""


def node_with(trace: str | None) -> torch.fx.Node:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.sin, (x,))
    if trace is not None:
        node.meta["stack_trace"] = trace
    return node


def test_at_node_finds_the_users_line_below_torchs_own_frames():
    site = at_node(node_with(TRACE))
    assert site.location == "/home/me/model.py:12"
    assert site.source == "return self.linear(x) + 1"
    assert site.function == "forward"
    assert "sin" in site.node


def test_at_node_without_a_trace_still_names_the_node():
    site = at_node(node_with(None))
    assert site.location == ""
    assert "sin" in site.node


def test_at_node_of_an_argument_names_the_line_that_first_uses_it():
    node = node_with(TRACE)
    (argument,) = node.all_input_nodes
    assert at_node(argument).location == "/home/me/model.py:12"
    assert "placeholder" in at_node(argument).node


def test_user_frame_when_every_frame_is_torchs():
    inside = "\n".join(TRACE.splitlines()[2:])
    frame = user_frame(inside)
    assert frame is not None
    assert frame.line == 130
    assert user_frame("no frames here") is None


def test_at_node_on_a_graph_captured_by_dynamo():
    sites: list[Site] = []

    def look(gm: torch.fx.GraphModule, _inputs: list[torch.Tensor]):
        sites.extend(at_node(n) for n in gm.graph.nodes if n.op == "call_function")
        return gm.forward

    def f(x):
        return torch.sin(x)  # the line looked for

    torch.compile(f, backend=look)(torch.ones(2))
    assert sites[0].file == __file__
    assert sites[0].source.startswith("return torch.sin(x)")


def test_message_carries_stage_node_line_and_hint():
    error = LoweringError(
        "cannot lower sin", stage="lower", site=at_node(node_with(TRACE)), hint="use cos"
    )
    text = str(error)
    for part in ("cannot lower sin", "lower", "torch.sin", "model.py:12", "self.linear", "use cos"):
        assert part in text


def test_locate_fills_only_what_is_missing():
    near = Site("near")
    error = TilewrightError("x", site=near).locate(stage="lower", site=Site("far"))
    assert (error.stage, error.site) == ("lower", near)


@pytest.mark.parametrize(
    "error",
    [
        LoweringError("m", stage="lower", site=Site("n", "f.py", 3, "g", "s"), hint="h"),
        BuildError("m", command=["g++", "-O3", "a b.cpp"], stderr="a.cpp:1: error: no"),
        NoValidChoicesError("m", reasons={"triton_mm_0": "out of shared memory"}),
        UnknownOptionError("optoin", nearest="option"),
        UnknownModeError("fast", ["default"]),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_pickle(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_build_error_shows_the_command_and_both_ends_of_a_long_output():
    stderr = "\n".join(f"line {n}" for n in range(1000))
    text = str(BuildError("m", command=["g++", "a b.cpp"], stderr=stderr))
    assert "g++ 'a b.cpp'" in text
    assert "line 0\n" in text
    assert "line 999" in text
    assert "960 lines left out" in text


def test_no_valid_choices_lists_reasons():
    text = str(NoValidChoicesError("nothing left", reasons={"a": "too big", "b": "too slow"}))
    assert "a: too big" in text
    assert "b: too slow" in text


def test_every_error_has_the_common_base():
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, TilewrightError), name
            assert issubclass(value, RuntimeError), name
