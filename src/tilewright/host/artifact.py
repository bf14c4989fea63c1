"""What one graph compiles to, as data: it is kept on disk and loaded in any later process."""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx

from tilewright import config, metrics
from tilewright.errors import at_node
from tilewright.graph.boundary import EVERYTHING, Boundary
from tilewright.graph.digest import Undigestible, digest
from tilewright.host.program import HostProgram
from tilewright.runtime import store
from tilewright.runtime.cxx import CxxSource, Submitted, submit
from tilewright.target import Target


@dataclass
class Artifact:
    """The host program, its kernels by name, and what compiling it added to the metrics."""

    host: HostProgram
    kernels: dict[str, CxxSource] = field(default_factory=dict[str, CxxSource])
    counted: metrics.Delta = field(default_factory=metrics.Delta)

    def build(self) -> Submitted:
        return submit(list(self.kernels.values()))

    def constants(self, gm: torch.fx.GraphModule) -> dict[str, Any]:
        """What the program takes from the graph it was made from, by its own names."""
        paths = self.host.attributes.items()
        return {name: operator.attrgetter(path)(gm) for name, path in paths}

    def load(self, constants: Mapping[str, Any],
             locations: Mapping[str, str]) -> Callable[[list[Any]], Any]:  # fmt: skip
        """A callable, given the graph's constants and where its nodes are in the user's files."""
        built = self.build().result()
        functions = {name: k.function for name, k in zip(self.kernels, built, strict=True)}
        return self.host.load(functions, constants, locations)


def locations(gm: torch.fx.GraphModule) -> dict[str, str]:
    """Node name -> the user's file and line."""
    return {node.name: at_node(node).location for node in gm.graph.nodes if node.op != "output"}


def key(gm: torch.fx.GraphModule, boundary: Boundary = EVERYTHING) -> str | None:
    """The name of this graph's artefact, or None if the graph cannot be told apart."""
    if not config.fx_graph_cache or config.force_disable_caches:
        return None
    try:
        text = digest(gm)
    except Undigestible as why:
        metrics.counters["graph_cache"][f"not cached: {why}"] += 1
        return None
    return named(text, repr(boundary))


def named(*made_from: str) -> str:
    """The name of what this compiler, with these options, makes for this machine."""
    return store.key(*made_from, repr(config.code_key()), torch.__version__, _compiler_digest(),
                     Target.host().key)  # fmt: skip


def find(name: str) -> Artifact | None:
    """The kept artefact; one that cannot be read (another Python, a torn disk) counts as none."""
    data = store.get(store.path(name, ".graph"))
    if data is None:
        return None
    try:
        found = pickle.loads(data)
    except Exception:
        return None
    return found if isinstance(found, Artifact) else None


def keep(name: str, artifact: Artifact) -> None:
    try:
        data = pickle.dumps(artifact)
    except Exception as why:  # a constant that does not pickle: the graph is compiled each time
        metrics.counters["graph_cache"][f"not cached: {type(why).__name__}"] += 1
        return
    store.put_atomic(store.path(name, ".graph"), data)


@functools.cache
def _compiler_digest() -> str:
    """Changes whenever the compiler itself does."""
    root = Path(__file__).parent.parent
    files = sorted(p for p in root.rglob("*") if p.suffix in (".py", ".h", ".cpp", ".jinja"))
    return store.key(*(p.read_bytes() for p in files))
