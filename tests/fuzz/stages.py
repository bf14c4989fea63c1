"""Where did it go wrong? The same graph through eager, the interpreter, and generated code."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes

from tilewright import pipeline
from tilewright.graph import decompositions
from tilewright.graph.simplify import simplify
from tilewright.ir import interp
from tilewright.ir.program import Program
from tilewright.ir.verify import verify
from tilewright.lower.graph import lower
from tilewright.schedule.plan import Schedule, schedule

STAGES = ("lowered", "scheduled", "fused", "generated")


@dataclass
class Graph:
    """One graph AOTAutograd gave, with what each stage made of it."""

    eager: torch.fx.GraphModule
    program: Program
    plan: Schedule
    constants: dict[str, Any]
    generated: Callable[[list[Any]], Any] | None = None

    def run(self, stage: str, args: Sequence[Any]) -> Any:
        if stage == "eager":
            return torch.fx.Interpreter(self.eager).run(*args)
        if stage == "lowered":
            return interp.run(self.program, args, self.constants)
        if stage == "generated":
            assert self.generated is not None, "captured without code"
            return self.generated(list(args))
        return interp.run_steps(self.plan.program, self.plan.steps, args, self.constants,
                                fused=stage == "fused")  # fmt: skip


@dataclass
class Capture:
    """A backend that keeps every graph, and what it was called with."""

    generate: bool = True
    graphs: list[Graph] = field(default_factory=list[Graph])
    calls: list[tuple[Graph, list[Any]]] = field(default_factory=list[tuple[Graph, list[Any]]])

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return aot_autograd(
            fw_compiler=self._compile,
            bw_compiler=self._compile,
            inference_compiler=self._compile,
            decompositions=decompositions.table(),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )(gm, inputs)

    def _compile(self, gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        with _disable_current_modes():
            eager = copy.deepcopy(gm)
            generated = pipeline.compile_graph(copy.deepcopy(gm)) if self.generate else None
            simplify(gm)
            program = lower(gm)
            verify(program)
            constants = {n: operator.attrgetter(p)(gm) for n, p in program.constants.items()}
            graph = Graph(eager, program, schedule(program), constants, generated)
        self.graphs.append(graph)

        def call(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            self.calls.append((graph, [_copy(a) for a in given]))
            return torch.fx.Interpreter(graph.eager).run(*given)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def capture(function: Callable[..., Any], *args: Any, generate: bool = False,
            **options: Any) -> Capture:  # fmt: skip
    """Compile and call `function`, and keep its graphs."""
    torch._dynamo.reset()
    found = Capture(generate)
    torch.compile(function, backend=found, fullgraph=True, **options)(*args)
    return found


def first_wrong(found: Capture, same: Callable[[Any, Any], bool]) -> str:
    """The first stage of the first call whose results or mutated arguments are not eager's."""
    for number, (graph, args) in enumerate(found.calls):
        want = _run(graph, "eager", args)
        for stage in STAGES if graph.generated is not None else STAGES[:-1]:
            try:
                good = same(_run(graph, stage, args), want)
            except Exception as error:
                return f"graph {number}, {stage}: {type(error).__name__}: {error}"
            if not good:
                return f"graph {number}, {stage}: other values than eager"
    return ""


def _run(graph: Graph, stage: str, args: Sequence[Any]) -> list[Any]:
    mine = [_copy(a) for a in args]
    kept = list(mine)
    result = graph.run(stage, mine)
    return [*result, *kept]


def _copy(value: Any) -> Any:
    """A copy with the same layout, elements that share memory still sharing it."""
    if not isinstance(value, Tensor):
        return value
    extent = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
    memory = torch.as_strided(value.detach(), (extent if value.numel() else 0,), (1,))
    return torch.as_strided(memory.clone(), value.shape, value.stride(), 0)
