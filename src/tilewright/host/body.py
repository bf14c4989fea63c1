"""A compiled graph that an operator of another program calls: a branch, the inside of a loop, a
region that is called many times."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from tilewright.errors import LoweringError
from tilewright.host.support import laid_out

Layout = tuple[int, ...] | str | None  # strides; "contiguous", whatever the size; not a tensor


class Body:
    """A program called with its operands one by one. Operands come as an operator has them, a slice
    of something larger perhaps, and are laid out as the program was compiled for."""

    def __init__(self, program: Any, single: bool, layouts: Sequence[Layout]) -> None:
        names = getattr(program, "names", {})
        unknown = set(program.__code__.co_names) - names.keys() - vars(builtins).keys()
        missing = sorted(n for n in unknown if n.startswith(("s", "u", "size")) and n[-1].isdigit())
        if missing:
            raise LoweringError(f"sizes that no operand has: {', '.join(missing)}")
        self._program = program
        self._single = single
        self._layouts = tuple(layouts)

    def __call__(self, *operands: Any) -> Any:
        given = [_as_compiled(t, layout) for t, layout in zip(operands, self._layouts, strict=True)]
        result = self._program(given)
        return result[0] if self._single else result

    def __reduce__(self) -> tuple[Any, ...]:
        origin = self._program.origin
        state = (self._program.artifact, dict(origin.constants), dict(origin.locations))
        return _again, (*state, self._single, self._layouts)


def _again(artifact: Any, constants: dict[str, Any], locations: dict[str, str], single: bool,
           layouts: Sequence[Layout]) -> Body:  # fmt: skip
    program = artifact.load(constants, locations)
    program.artifact = artifact
    program.origin = _Origin(constants, locations)
    return Body(program, single, layouts)


class _Origin:
    def __init__(self, constants: dict[str, Any], locations: dict[str, str]) -> None:
        self.constants = constants
        self.locations = locations


def _as_compiled(t: Any, layout: Layout) -> Any:
    if layout is None or not isinstance(t, torch.Tensor):
        return t
    if isinstance(layout, str):
        return t.contiguous()
    return laid_out(t, t.size(), layout)


def layouts(gm: torch.fx.GraphModule) -> list[Layout]:
    """How the operands lie in memory that the graph was traced with."""
    found: list[Layout] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            found.append(None)
            continue
        stride: tuple[Any, ...] = value.stride()
        if all(isinstance(n, int) for n in stride):
            found.append(tuple(stride))
        elif value.is_contiguous():
            found.append("contiguous")
        else:
            raise LoweringError("an operand with symbolic strides that is not contiguous")
    return found


def as_tuple(gm: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, bool]:
    """The graph with its results in a tuple, and whether it had one without. Compiling changes a
    graph, and others may still want this one: it is a copy."""
    graph = torch.fx.Graph()
    result: Any = graph.graph_copy(gm.graph, {})
    single = not isinstance(result, (tuple, list))
    graph.output((result,) if single else tuple(result))
    return torch.fx.GraphModule(gm, graph), single
