"""What one graph compiles to, as data: it is kept on disk and loaded in any later process."""

from __future__ import annotations

import functools
import json
import logging
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from tilewright import caches, config, metrics
from tilewright.attention.choose import Resort
from tilewright.errors import BuildError, location_of
from tilewright.gemm.choose import Decision
from tilewright.gemm.problem import sm_carveout, takes_tf32
from tilewright.gemm.provider import CompiledSource, LibrarySource
from tilewright.graph.boundary import EVERYTHING, Boundary
from tilewright.graph.digest import Undigestible, digest
from tilewright.host import cudagraphs
from tilewright.host.program import HostProgram, Kernel
from tilewright.host.refit import Refit
from tilewright.host.spare import Spare
from tilewright.lower.table import OVERRIDES
from tilewright.runtime import cxx, launch, native, store
from tilewright.runtime.cxx import CxxSource, Loaded, Submitted
from tilewright.runtime.triton_build import TritonSource
from tilewright.runtime.user_kernel import UserSource
from tilewright.target import Target
from tilewright.tune import kernels as tune
from tilewright.tune import user_kernels
from tilewright.tune.kernels import Waiting

log = logging.getLogger("tilewright.build")

Source = CxxSource | TritonSource | UserSource | Spare | LibrarySource


def begin(source: Source) -> None:
    """Start building a kernel, if it is one that is built, and return at once."""
    match source:
        case UserSource():
            user_kernels.submit(source)
        case CxxSource():
            cxx.submit([source])
        case TritonSource():
            tune.submit(source)
        case CompiledSource():
            source.submit()
        case _:
            pass


@dataclass
class Artifact:
    """The host program, its kernels by name, and what compiling it added to the metrics."""

    host: HostProgram
    kernels: dict[str, Source] = field(default_factory=dict[str, Source])
    spares: dict[str, tuple[Spare | Resort, tuple[int, ...]]] = field(
        default_factory=dict[str, "tuple[Spare | Resort, tuple[int, ...]]"]
    )  # for each Triton kernel: torch's own operations, and where its arguments are
    counted: metrics.Delta = field(default_factory=metrics.Delta)
    complete: bool = True  # nothing was left undecided for want of time: it may be kept
    replay: cudagraphs.Facts | None = None  # where it is to be recorded as a CUDA graph
    decisions: tuple[Decision, ...] = ()  # who computes its products, and why
    groups: str = ""  # what was fused, and why not further, for a reader
    hints: tuple[str, ...] = ()  # what costs time

    def build(self) -> Building:
        """Start building what is missing, of every language, and return at once."""
        found = self.kernels.values()
        for source in found:
            begin(source)
        return Building(
            cxx.submit([s for s in found if isinstance(s, CxxSource)]),
            [tune.submit(s) for s in found if isinstance(s, TritonSource)],
        )

    @property
    def names(self) -> set[str]:
        """What the host program's text is given."""
        return {*self.host.constants, *self.host.attributes, *self.kernels,
                *(f"{name}_wide" for name in self.kernels)}  # fmt: skip

    def constants(self, gm: torch.fx.GraphModule) -> dict[str, Any]:
        """What the program takes from the graph it was made from, by its own names."""
        paths = self.host.attributes.items()
        return {name: operator.attrgetter(path)(gm) for name, path in paths}

    def load(self, constants: Mapping[str, Any],
             locations: Mapping[str, str]) -> Callable[[list[Any]], Any]:  # fmt: skip
        """A callable, given the graph's constants and where its nodes are in the user's files."""
        building = self.build()
        compiled, built = iter(building.cxx.result()), iter(building.triton)
        functions: dict[str, Kernel] = {}
        loaded: dict[str, Loaded] = {}
        grids: dict[str, str] = {}
        for name, source in self.kernels.items():
            match source:
                case CxxSource():
                    loaded[name] = next(compiled)
                    functions[name] = loaded[name].function
                case TritonSource():
                    self._launcher(name, source, next(built), functions, grids)
                case UserSource():
                    functions[name] = user_kernels.load(source)
                    if source.wide is not None:
                        functions[f"{name}_wide"] = user_kernels.later(source.widened())
                case _:
                    functions[name] = source
        call: Any = self.host.load(functions, constants, locations, grids)
        native.when_ready(lambda _: call.names.update(
            {name: kernel.function for name, kernel in loaded.items()}))  # fmt: skip
        return cudagraphs.replayed(call, self.replay)

    def _launcher(self, name: str, source: TritonSource, waiting: Waiting,
                  functions: dict[str, Kernel], grids: dict[str, str]) -> None:  # fmt: skip
        try:
            chosen = tune.chosen(source, waiting)
        except BuildError as error:
            functions[name] = functions[f"{name}_wide"] = self._replacement(name, error)
            grids[name] = "1"
            return
        grids[name] = source.programs(chosen.config)
        known = self.spares.get(name)
        refit = Refit(name, source, chosen.config, *known) if known is not None else None
        try:
            functions[name] = launch.load(source, chosen, source.device)
            launch.keep_running(functions[name], refit)
        except RuntimeError as error:  # the driver's, which knows the card best
            if refit is None or isinstance(error, BuildError):
                raise
            log.debug("%s cannot be loaded: %s", name, error)
            functions[name] = refit
        if source.wide is not None:
            wide = launch.later(replace(source.wide, configs=(chosen.config,), shrinks=False),
                                source.device)  # fmt: skip
            functions[f"{name}_wide"] = wide
            wide.spare = self._spare(name) if known is not None else None

    def _replacement(self, name: str, error: BuildError) -> Kernel:
        """What runs where Triton did not compile a kernel, called as the kernel would be."""
        metrics.counters["triton"]["kernels that did not compile"] += 1
        log.warning("%s is replaced by torch's own operations: %s", name, error)
        return self._spare(name)

    def _spare(self, name: str) -> Kernel:
        """Torch's own operations, called as the kernel would be."""
        spare, order = self.spares[name]
        return lambda stream, x, y, z, *args: spare(*(args[k] for k in order))

    def text(self, locations: Mapping[str, str]) -> str:
        """The host program for a reader, with the first configuration of every kernel."""
        grids = {name: source.programs(source.configs[0])
                 for name, source in self.kernels.items()
                 if isinstance(source, TritonSource)}  # fmt: skip
        return self.host.filled(locations, grids)


def node_by_node(gm: torch.fx.GraphModule) -> Artifact:
    """The graph as it is, run by torch alone. It is not kept."""
    run = torch.fx.Interpreter(gm).boxed_run
    text = "def call(args):\n    return run(args)\n"
    return Artifact(HostProgram(text, {"run": run}), complete=False)


@dataclass(frozen=True)
class Building:
    """Kernels under way."""

    cxx: Submitted
    triton: Sequence[Waiting]


def locations(gm: torch.fx.GraphModule) -> dict[str, str]:
    """Node name -> the user's file and line."""
    return {node.name: location_of(node) for node in gm.graph.nodes if node.op != "output"}


def key(gm: torch.fx.GraphModule, boundary: Boundary = EVERYTHING) -> str | None:
    """The name of this graph's artefact, or None if the graph cannot be told apart."""
    if not config.fx_graph_cache or config.force_disable_caches:
        return None
    try:
        tell_passes_apart()
        text = digest(gm)
    except Undigestible as why:
        metrics.counters["graph_cache"][f"not cached: {why}"] += 1
        return None
    name = named(text, repr(boundary), *(Target.of(card).key for card in _cards(gm)))
    _parts[name] = _described(text, boundary, gm)
    return name


def tell_passes_apart() -> None:
    """Nothing is kept of graphs that were changed by who knows what."""
    names = config.passes_without_identity()
    if names:
        raise Undigestible(f"functions without a `uuid()` in {', '.join(names)}")


def named(*made_from: str) -> str:
    """The name of what this compiler, with these options, makes for this machine; and with what is
    written into kernels: how float32 is multiplied, for how many SMs, and whether sums come in one
    order and memory is filled."""
    settings: Any = torch.utils.deterministic
    same = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    taken = repr(sorted((str(target), digest) for target, digest in OVERRIDES.items()))
    written = str(takes_tf32()), str(sm_carveout()), str(same)
    return store.key(*made_from, repr(config.code_key()), torch.__version__, compiler_digest(),
                     Target.host().key, taken, *written)  # fmt: skip


# ---- why a graph was not found


_parts: dict[str, dict[str, str]] = {}  # artefact -> what its name was made from
caches.register(_parts.clear)


def _described(text: str, boundary: Boundary, gm: torch.fx.GraphModule) -> dict[str, str]:
    """What the name of a graph's artefact is made from, part by part."""
    options = {f"option {name}": repr(value) for name, value in config.code_key()}
    cards = {f"card {k}": Target.of(card).key for k, card in enumerate(_cards(gm))}
    return {"graph": store.key(text), "boundary": repr(boundary), "torch": torch.__version__,
            "tilewright": compiler_digest()[:12], "machine": Target.host().key, **cards,
            **options}  # fmt: skip


def difference(name: str) -> str:
    """Which parts of a name are not those under which the same graph was kept last: why it was not
    found. Empty where the graph itself is new."""
    now = _parts.get(name)
    kept = None if now is None else store.get(_parts_path(now))
    if now is None or kept is None:
        return ""
    before: dict[str, str] = json.loads(kept)
    parts = [f"{part} {before.get(part, 'none')} -> {now.get(part, 'none')}"
             for part in dict.fromkeys((*before, *now))
             if before.get(part) != now.get(part)]  # fmt: skip
    return ", ".join(parts) or "it was dropped, or never finished"


def _parts_path(parts: Mapping[str, str]) -> Path:
    return store.path(store.key("parts", parts["graph"]), ".parts")


def _cards(gm: torch.fx.GraphModule) -> list[torch.device]:
    """The cards the graph has tensors on."""
    values = pytree.tree_leaves([node.meta.get("val") for node in gm.graph.nodes])
    found = {t.device for t in values if isinstance(t, torch.Tensor) and t.device.type == "cuda"}
    return sorted(found, key=str)


def find(name: str) -> Artifact | None:
    """The kept artefact; one that cannot be read (another Python, a torn disk) counts as none."""
    try:
        data = store.get(store.path(name, ".graph"))
        found = None if data is None else pickle.loads(data)
    except Exception:
        return None
    return found if isinstance(found, Artifact) else None


def keep(name: str, artifact: Artifact) -> None:
    try:
        data = pickle.dumps(artifact)
    except Exception as why:  # a constant that does not pickle: the graph is compiled each time
        metrics.counters["graph_cache"][f"not cached: {type(why).__name__}"] += 1
        return
    if store.keep(store.path(name, ".graph"), data) and name in _parts:
        store.keep(_parts_path(_parts[name]), json.dumps(_parts[name]).encode())


@functools.cache
def compiler_digest() -> str:
    """Changes whenever the compiler itself does."""
    root = Path(__file__).parent.parent
    files = sorted(p for p in root.rglob("*") if p.suffix in (".py", ".h", ".cpp", ".jinja"))
    return store.key(*(p.read_bytes() for p in files))
