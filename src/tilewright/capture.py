"""AOTAutograd once: what it made of a Dynamo graph is kept, and a later process starts from there.

Tracing, decomposing and partitioning are most of a warm start. What they come to is small: the
compiled forward and backward graphs, which the store has already, and the values AOTAutograd builds
its runtime wrapper from (views, mutations, which outputs need gradients). Those values are written
down when the wrapper is built; on a hit the same wrapper is built from them again.

Whatever cannot be told apart across processes, or is wrapped in more than that one wrapper, is
captured anew each time, and `metrics.counters["capture"]` says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import pickle
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import AOTConfig
from torch._functorch.aot_autograd import AOT_COUNTER
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.symbol import SymT, symbol_is_type

from tilewright import config, metrics
from tilewright.errors import location_of
from tilewright.graph.digest import Undigestible, digest_captured
from tilewright.host import artifact
from tilewright.pipeline import Compiled, Origin, load_graph
from tilewright.runtime import native, store
from tilewright.target import Target

Inputs = Sequence[Any]
Call = Callable[..., Any]

# What the wrapper is given that belongs to one process; each is made anew.
_OWN_TO_A_PROCESS = {"compiled_fw_func", "compiled_bw_func", "aot_config", "bw_compiler",
                     "lazy_backward_info", "try_save_cache_entry"}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One compiled graph: its artefact, its constants, and for each of its nodes the number of a
    node of Dynamo's that comes from the same line."""

    artifact: str
    constants: dict[str, Any]
    places: dict[str, int]


@dataclass(frozen=True)
class Entry:
    """All that a later process needs; `backward` is None for a graph without gradients."""

    forward: Part
    backward: Part | None
    wrapper: dict[str, Any]
    guards: str | None  # on symbolic sizes, that tracing and lowering relied on
    backward_graph: bytes | None  # compiled autograd traces through it


def key(gm: torch.fx.GraphModule, inputs: Inputs) -> str | None:
    """The name of this graph's entry; None if there is none to be had."""
    if not config.fx_graph_cache or config.force_disable_caches:
        return None
    try:
        artifact.tell_passes_apart()
        text = digest_captured(gm, inputs)
        autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009  (it has no type stubs)
        if autograd._top_saved_tensors_default_hooks(True) is not None:
            raise Undigestible("hooks on saved tensors")
        if any(True for _ in gm.parameters()) or any(True for _ in gm.buffers()):
            raise Undigestible("parameters that are not inputs")
    except Undigestible as why:
        _uncached(str(why))
        return None
    return artifact.named("captured", text, _surroundings())


def _surroundings() -> str:
    """What tracing asks of the process rather than of the graph."""
    devices = ("cpu", "cuda")
    cuda = torch.backends.cuda
    facts: tuple[Any, ...] = (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices],
        torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled,
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(), functorch_config.get_hash().hex(),
        Target.of("cuda").key if torch.cuda.is_initialized() else "",
    )  # fmt: skip
    return repr(facts)


def _uncached(why: str) -> None:
    metrics.counters["capture"][f"not kept: {why}"] += 1


# ---- on a miss: writing down


class Recording:
    """Watches one capture, and keeps it once all of its graphs are compiled, if it has a name. One
    that may be saved elsewhere does not need to have one, nor do its graphs."""

    def __init__(self, name: str | None, gm: torch.fx.GraphModule, saves: bool = False) -> None:
        self.name = name
        self.saves = saves
        self.programs: dict[str, Any] = {}
        self.lines = _line_numbers(gm)
        self.wrapper: dict[str, Any] | None = None
        self.built: Any = None  # the wrapper AOTAutograd made of these values
        self.plain: Call | None = None  # the program, where the wrapper only calls it
        self.has_own = any(True for _ in gm.parameters()) or any(True for _ in gm.buffers())
        env = _symbols(TracingContext.try_get())
        self.earlier_guards = len(env.guards) if env is not None else 0  # Dynamo's, of its bytecode
        self.parts: dict[str, Part] = {}
        self.guards: str | None = None
        self.backward_graph: bytes | None = None
        self.finished = False  # AOTAutograd has returned, and what it returned was looked at
        self.refused = ""

    def compiled(self, role: str, program: Compiled) -> None:
        """A graph of this capture was compiled; the backward perhaps long after the forward."""
        origin: Origin | None = getattr(program, "origin", None)
        if origin is None or (origin.artifact is None and not self.saves):
            self.refused = self.refused or "a graph that is not kept"
        elif role in self.parts:
            self.refused = self.refused or "several graphs"
        else:
            places = {node: self.lines[at] for node, at in origin.locations.items()
                      if at in self.lines}  # fmt: skip
            self.parts[role] = Part(origin.artifact or "", dict(origin.constants), places)
            self.programs[role] = program if self.saves else None
        self._keep()

    def returned(self, function: Any, inputs: Inputs) -> Call:
        """AOTAutograd has returned this function; what is to be called in its place."""
        inner: Any = function
        for _ in range(2):  # `disable`, and the unpacking of arguments
            inner = getattr(inner, "__wrapped__", None)
        context = TracingContext.try_get()
        if self.wrapper is None or inner is not self.built:
            self.refused = self.refused or "inputs that share memory, or more than one wrapper"
            self.plain = None
        elif context is None or context.fakify_first_call:
            self.refused = self.refused or "a capture outside torch.compile"
        elif context.guards_context.aotautograd_guards:
            self.refused = self.refused or "inputs that may share memory"
        elif _is_unusual(self.wrapper):
            self.refused = self.refused or "subclasses, effects or functional random state"
        else:
            self._note_guards(context, inputs)
        self.finished = True
        if self.refused and self.name is not None:
            _uncached(self.refused)
        self._keep()
        return function if self.plain is None or self.has_own else native.entry(self.plain)

    def _note_guards(self, context: TracingContext, inputs: Inputs) -> None:
        env = _symbols(context)
        sizes = _symbolic(inputs)
        if env is None:
            return
        if any(symbol_is_type(s, SymT.FLOAT) for g in env.guards[self.earlier_guards :]
               for s in g.expr.free_symbols):  # fmt: skip
            if not self.saves:
                self.refused = self.refused or "a number that the graph was made for"
                return
            self.name = None  # Dynamo saves its guard with the program, which the store would not
        if not sizes:
            return
        if any(env.is_unbacked_symint(s) for x in sizes for s in x.node.expr.free_symbols):
            self.refused = self.refused or "sizes that are data"
            return
        guards = env.get_pruned_guards(sizes)
        self.guards = env.produce_guards_expression(placeholders=sizes, guards=guards)

    def entry(self) -> Entry | None:
        """All of it, once there is nothing to come and nothing against it."""
        wanted = {"inference"} if "inference" in self.parts else {"forward", "backward"}
        if self.refused or not self.finished or set(self.parts) != wanted:
            return None
        assert self.wrapper is not None
        forward = self.parts.get("inference") or self.parts["forward"]
        return Entry(forward, self.parts.get("backward"), self.wrapper, self.guards,
                     self.backward_graph)  # fmt: skip

    def _keep(self) -> None:
        entry = self.entry()
        if self.name is None or entry is None:
            return
        try:
            data = pickle.dumps(entry)
        except Exception as why:  # anything a user's constant or metadata may raise
            _uncached(f"{type(why).__name__} while writing it")
            return
        store.keep(store.path(self.name, ".captured"), data)


@contextlib.contextmanager
def watching(recording: Recording) -> Generator[None]:
    """Write down what AOTAutograd gives its own wrappers while it captures."""
    training: Any = runtime_wrappers.AOTDispatchAutograd.post_compile
    inference: Any = runtime_wrappers.RuntimeWrapper.post_compile

    def with_gradients(*args: Any, **kwargs: Any) -> Any:
        given = _by_name(training, args, kwargs)
        recording.wrapper = {k: v for k, v in given.items() if k not in _OWN_TO_A_PROCESS}
        recording.built = training(*args, **kwargs)
        return recording.built

    def without(self: Any, compiled: Any, aot_config: Any, *, runtime_metadata: Any) -> Any:
        built = inference(self, compiled, aot_config, runtime_metadata=runtime_metadata)
        if not self.trace_joint:
            recording.wrapper = {"disable_amp": self.disable_amp, "fw_metadata": runtime_metadata}
            if _is_plain(recording.wrapper):
                built = recording.plain = _plainly(compiled)
            recording.built = built
        return built

    wrappers = runtime_wrappers.AOTDispatchAutograd, runtime_wrappers.RuntimeWrapper
    with (
        mock.patch.object(wrappers[0], "post_compile", staticmethod(with_gradients)),
        mock.patch.object(wrappers[1], "post_compile", without),
    ):
        yield


def _by_name(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name: one object that holds them since torch 2.12, loose before."""
    if len(args) == 1 and dataclasses.is_dataclass(args[0]):
        return {f.name: getattr(args[0], f.name) for f in dataclasses.fields(args[0])}
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def _is_unusual(wrapper: dict[str, Any]) -> bool:
    """Whether more wrappers than the one we build again took part."""
    meta = wrapper["fw_metadata"]
    return bool(wrapper.get("maybe_subclass_meta") is not None
                or wrapper.get("backward_state_indices")
                or meta.tokens or meta.is_rng_op_functionalized
                or meta.num_graphsafe_rng_states)  # fmt: skip


def _is_plain(wrapper: dict[str, Any]) -> bool:
    """Whether all that the wrapper of an inference graph does is to call the program."""
    meta = wrapper["fw_metadata"]
    written = any(i.mutates_data or i.mutates_metadata for i in meta.input_info)
    return not (written or wrapper["disable_amp"] or meta.num_outputs_aliased
                or meta.dynamic_outputs or meta.grad_enabled_mutation is not None
                or meta.tokens)  # fmt: skip


def _plainly(program: Call) -> Call:
    """What the wrapper does then, in a tenth of its time."""
    if getattr(program, "pure", False):
        return program
    is_enabled, enable = torch.is_grad_enabled, torch._C._set_grad_enabled

    def run(args: list[Any]) -> Any:
        if not is_enabled():
            return program(args)
        enable(False)
        try:
            return program(args)
        finally:
            enable(True)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _line_numbers(gm: torch.fx.GraphModule) -> dict[str, int]:
    """The user's file and line -> the first node that comes from it."""
    found: dict[str, int] = {}
    for number, node in enumerate(gm.graph.nodes):
        if node.op != "output":
            found.setdefault(location_of(node), number)
    found.pop("", None)
    return found


def _symbols(context: TracingContext | None) -> ShapeEnv | None:
    mode = context.fake_mode if context is not None else None
    return mode.shape_env if mode is not None else None


def _symbolic(inputs: Inputs) -> list[torch.SymInt]:
    """The symbolic sizes among the inputs, which are inputs of their own."""
    return [x for x in inputs if isinstance(x, torch.SymInt) and not x.node.is_constant()]


def graph_bytes(gm: torch.fx.GraphModule) -> bytes | None:
    """A graph as its code and constants; None if it holds what cannot be written."""
    try:
        return pickle.dumps(gm.__reduce__())
    except Exception:
        return None


def _graph_of(data: bytes) -> torch.fx.GraphModule:
    make, args = pickle.loads(data)
    return make(*args)


# ---- on a hit: building the wrapper again


def find(name: str) -> Entry | None:
    data = store.get(store.path(name, ".captured"))
    if data is None:
        return None
    try:
        found = pickle.loads(data)
    except Exception:  # another Python, a torn disk: as if it were not there
        return None
    return found if isinstance(found, Entry) else None


def restore(entry: Entry, gm: torch.fx.GraphModule, inputs: Inputs) -> Call | None:
    """The callable AOTAutograd gave the first time, or None if a part of it is no longer kept."""
    where = [location_of(n) if n.op != "output" else "" for n in gm.graph.nodes]
    forward = _load(entry.forward, where)
    backward = _load(entry.backward, where) if entry.backward is not None else None
    if forward is None or (entry.backward is not None and backward is None):
        return None
    if not _guards_hold(entry, inputs):
        return None
    metrics.counters["capture"]["hit"] += 1
    return rebuilt(entry, [forward] if backward is None else [forward, backward])


def rebuilt(entry: Entry, programs: Sequence[Compiled]) -> Call:
    """The wrapper that AOTAutograd built around these programs."""
    forward, backward = programs[0], programs[1] if len(programs) > 1 else None
    settings = AOTConfig(fw_compiler=None, bw_compiler=None, partition_fn=None, decompositions=None,
                         num_params_buffers=0, aot_id=next(AOT_COUNTER),
                         keep_inference_input_mutations=True)  # fmt: skip
    if backward is None and _is_plain(entry.wrapper):
        wrapped = _plainly(forward)
    elif backward is None:
        wrapped = runtime_wrappers.RuntimeWrapper(
            indices_of_inps_to_detach=[],
            trace_joint=False,
            disable_amp=entry.wrapper["disable_amp"],
        ).post_compile(forward, settings, runtime_metadata=entry.wrapper["fw_metadata"])
    else:
        wrapped = _with_gradients(entry, forward, backward, settings)
    return native.entry(wrapped)


def _load(part: Part, where: Sequence[str]) -> Compiled | None:
    places = {node: where[number] for node, number in part.places.items()}
    return load_graph(Origin(part.artifact, part.constants, places))


def _guards_hold(entry: Entry, inputs: Inputs) -> bool:
    """Whether the sizes satisfy what the programs rely on; from here on Dynamo guards it too."""
    if entry.guards is None:
        return True
    env = _symbols(TracingContext.try_get())
    return env is not None and bool(env.evaluate_guards_expression(entry.guards, _symbolic(inputs)))


def _with_gradients(entry: Entry, forward: Compiled, backward: Compiled, settings: Any) -> Call:
    make: Any = runtime_wrappers.AOTDispatchAutograd.post_compile
    graph = entry.backward_graph
    facts = entry.wrapper["fw_metadata"]
    if given := donated(facts):
        backward = _sparing(backward, given)
        facts.bw_donated_idxs = []
    own = {
        "compiled_fw_func": forward,
        "compiled_bw_func": torch._dynamo.disable(backward, reason="a compiled backward pass"),
        "aot_config": settings,
        "lazy_backward_info": runtime_wrappers.CachedAutogradLazyBackwardCompileInfo(
            functools.partial(_graph_of, graph)) if graph is not None else None,
        "bw_compiler": None,
        "try_save_cache_entry": None,
    }  # fmt: skip
    spec: Any = getattr(runtime_wrappers, "AOTDispatchAutogradCompileSpec", None)
    if spec is not None:
        return make(spec(**entry.wrapper, **own))
    own.pop("bw_compiler")
    return make(**entry.wrapper, **own)


def visible(facts: Any) -> int:
    """How many results of a forward pass are seen outside, the tokens that come first included."""
    return facts.num_forward_returns + len(facts.tokens)


def donated(facts: Any) -> tuple[int, ...]:
    """Which arguments of a backward pass nobody else has. torch does not count the tokens before
    what a forward pass returns: a result of the user's would pass for something saved."""
    return () if facts.tokens else tuple(facts.bw_donated_idxs or ())


def _sparing(backward: Compiled, donated: tuple[int, ...]) -> Compiled:
    """A backward that overwrites what it is given, for callers who may want it again. Traced anew,
    the first of them would have had a program made that does not."""

    def call(args: list[Any]) -> Any:
        if torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
            for k in donated:
                if isinstance(t := args[k], torch.Tensor):
                    args[k] = torch.empty_strided(
                        t.size(), t.stride(), dtype=t.dtype, device=t.device
                    ).copy_(t)
        return backward(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


__all__ = ["Recording", "find", "graph_bytes", "key", "rebuilt", "restore", "watching"]
