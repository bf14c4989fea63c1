"""`tilewright.explain`: what a program was fused into, the bytes it moves, why no further, and how
each loop kernel of a card is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch.utils import _pytree as pytree

from tilewright import pipeline
from tilewright.backend import count_schedules
from tilewright.codegen.triton.launch import Summary
from tilewright.report import LIBRARY, Graph, Part, Refusal, graph
from tilewright.schedule.plan import Schedule

__all__ = ["LIBRARY", "Explanation", "Graph", "Part", "Refusal", "explain"]


@dataclass(frozen=True)
class Explanation:
    graphs: tuple[Graph, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        return "\n".join(map(str, self.graphs)) or "nothing was compiled"


def explain(function: Callable[..., Any], *, mode: str | None = None,
            options: dict[str, Any] | None = None) -> Callable[..., Explanation]:  # fmt: skip
    """See `tilewright.explain`."""

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        found: list[tuple[str, Schedule, dict[int, Summary]]] = []
        torch._dynamo.reset()
        backend = count_schedules(
            lambda role, plan: found.append((role, plan, pipeline.kernel_plans(plan))))  # fmt: skip
        compiled = torch.compile(function, backend=backend, mode=mode, options=options)
        _run_backward(compiled(*args, **kwargs))
        torch._dynamo.reset()
        return Explanation(tuple(graph(*one) for one in found))

    return explained


def _run_backward(result: Any) -> None:
    """Compile the backward pass too, leaving every `.grad` as it is."""
    outputs = [t for t in pytree.tree_leaves(result)
               if isinstance(t, torch.Tensor) and t.requires_grad]  # fmt: skip
    leaves = list(dict.fromkeys(leaf for t in outputs for leaf in _leaves(t)))
    if leaves:
        directions = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, leaves, directions, allow_unused=True)


def _leaves(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors an output's gradient flows to."""
    waiting: list[Any] = [t.grad_fn]
    seen: set[Any] = set()
    while waiting:
        step = waiting.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        if hasattr(step, "variable"):
            yield step.variable
        waiting += [following for following, _ in step.next_functions]
