"""The `torch.compile` entry: capture through AOTAutograd, one `compile_graph` per graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes

from tilewright import config
from tilewright.graph import decompositions
from tilewright.pipeline import compile_graph

Inputs = Sequence[Any]


def compile_fx(gm: torch.fx.GraphModule, example_inputs: Inputs, *, mode: str | None = None,
               options: dict[str, Any] | None = None) -> Callable[..., Any]:  # fmt: skip
    """What `torch.compile(backend="tilewright", mode=..., options=...)` calls."""
    wanted = {**config.options_for_mode(mode), **config.checked(options or {})}
    # The backward graph is compiled later, perhaps on another thread: it gets the same options.
    chosen = {**config.snapshot(), **wanted}

    def compiler(graph: torch.fx.GraphModule, inputs: Inputs) -> Callable[..., Any]:
        # outside the tracing modes: literals are folded with real tensors
        with config.patch(chosen), _disable_current_modes():
            return compile_graph(graph)

    with config.patch(chosen), decompositions.keep_whole():
        return aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=decompositions.table(),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)
