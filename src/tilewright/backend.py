"""The `torch.compile` entries: capture through AOTAutograd, one compilation per graph."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.fx
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import GlobalStateSource
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._guards import CompileContext, TracingContext
from torch._higher_order_ops import triton_kernel_wrap
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from tilewright import config, metrics, monitor
from tilewright.errors import location_of
from tilewright.undisturbed import undisturbed

with undisturbed():
    from tilewright import capture, saved, sharing
    from tilewright.graph import decompositions, user_kernels
    from tilewright.graph.boundary import EVERYTHING, Boundary
    from tilewright.graph.partition import partitioner
    from tilewright.graph.passes import run as run_passes
    from tilewright.graph.recognise import recognise
    from tilewright.lower.table import family
    from tilewright.pipeline import Compiled, compile_frozen, compile_graph, decide
    from tilewright.runtime import cxx, native, triton_build
    from tilewright.schedule.plan import Schedule

log = logging.getLogger("tilewright.backend")

Inputs = Sequence[Any]


def compile_fx(gm: torch.fx.GraphModule, example_inputs: Inputs, *, mode: str | None = None,
               options: dict[str, Any] | None = None) -> Callable[..., Any]:  # fmt: skip
    """What `torch.compile(backend="tilewright", mode=..., options=...)` calls."""
    return _capture(compile_graph, gm, example_inputs, mode, options)


def count_fx(gm: torch.fx.GraphModule, example_inputs: Inputs, *, mode: str | None = None,
             options: dict[str, Any] | None = None) -> Callable[..., Any]:  # fmt: skip
    """The same under the name `tilewright_count`: graphs are compiled as far as `metrics` needs,
    and run by eager. Fake tensors do, so the program may be for a card that is not there."""
    return count_schedules(lambda role, plan: None)(gm, example_inputs, mode=mode, options=options)


def count_schedules(seen: Callable[[str, Schedule], None]) -> Callable[..., Callable[..., Any]]:
    """A backend that counts, and shows what was decided for each graph."""

    def count(gm: torch.fx.GraphModule, boundary: Boundary) -> Compiled:
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        seen(boundary.role, decide(torch.fx.GraphModule(gm, graph), boundary))

        def run(args: list[Any]) -> Any:
            given = tuple(args)
            args.clear()  # as compiled programs do: the caller holds nothing alive
            return gm(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: torch.fx.GraphModule, example_inputs: Inputs, *, mode: str | None = None,
                options: dict[str, Any] | None = None) -> Callable[..., Any]:  # fmt: skip
        return _capture(count, gm, example_inputs, mode, options)

    return backend


CompileOne = Callable[[torch.fx.GraphModule, Boundary], Compiled]

# Threads compile one after the other, as Dynamo has it for forward graphs: what AOTAutograd and the
# counters are asked meanwhile is the process's.
_one_at_a_time = threading.RLock()


def _capture(compile_one: CompileOne, gm: torch.fx.GraphModule, example_inputs: Inputs,
             mode: str | None, options: dict[str, Any] | None) -> Callable[..., Any]:  # fmt: skip
    wanted = {**config.options_for_mode(mode), **config.checked(options or {})}
    # The backward graph is compiled later, perhaps on another thread: it gets the same options.
    chosen = {**config.snapshot(), **wanted}
    if _within_forward_mode():
        return gm.forward
    with (_one_at_a_time, _interruptible(), config.patch(chosen), decompositions.keep_whole(),
          undisturbed()):  # fmt: skip
        saves = compile_one is compile_graph and saved.is_wanted()
        name = capture.key(gm, example_inputs) if compile_one is compile_graph else None
        entry = capture.find(name) if name is not None else None
        monitor.happened("compilation", _cause(gm))
        native.start()  # built beside all that follows, where it is not yet
        _lean_calls()
        if entry is not None and not saves:
            before = capture.restore(entry, gm, example_inputs)
            if before is not None:
                return before
        if compile_one is compile_graph and any(map(_on_card, example_inputs)):
            triton_build.prepare()  # it starts while the graph is traced
        if compile_one is not compile_graph:
            return _traced(compile_one, gm, example_inputs, chosen, None)
        recording = capture.Recording(name, gm, saves)
        if not saves:
            return _traced(compile_one, gm, example_inputs, chosen, recording)
        with saved.asked_plainly():
            function = _traced(compile_one, gm, example_inputs, chosen, recording)
        return saved.Saved(function, recording)


def _traced(compile_one: CompileOne, gm: torch.fx.GraphModule, example_inputs: Inputs,
            chosen: dict[str, Any],
            recording: capture.Recording | None) -> Callable[..., Any]:  # fmt: skip
    saves = recording is not None and recording.saves  # what is saved goes without weights

    def compiled(graph: torch.fx.GraphModule, boundary: Boundary,
                 weights: Sequence[int] = ()) -> Compiled:  # fmt: skip
        # outside the tracing modes: literals are folded with real tensors
        with (_one_at_a_time, _interruptible(), config.patch(chosen), _disable_current_modes(),
              undisturbed()):  # fmt: skip
            user_kernels.rename(graph.graph)
            if boundary.role == "backward":
                monitor.happened("compilation", "the gradients of a graph compiled before")
            if recording is not None and boundary.role == "backward":
                recording.backward_graph = capture.graph_bytes(graph)
            if config.freezing and weights and not saves:
                program = compile_frozen(graph, weights, compile_one)
            else:
                program = compile_one(graph, boundary)
            if recording is not None:
                recording.compiled(boundary.role, program)
            return program

    def inference(graph: torch.fx.GraphModule, inputs: Inputs) -> Compiled:
        return compiled(graph, EVERYTHING, _facts().static_input_indices or ())

    def forward(graph: torch.fx.GraphModule, inputs: Inputs) -> Compiled:
        return compiled(graph, Boundary(capture.visible(_facts()), role="forward"))

    def backward(graph: torch.fx.GraphModule, inputs: Inputs) -> Compiled:
        donated = capture.donated(_facts())
        return compiled(graph, Boundary(visible=0, donated=donated, role="backward"))

    aot = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        decompositions=decompositions.table(),
        partition_fn=partitioner(family),
        keep_inference_input_mutations=True,
    )
    run_passes("pre_grad_custom_pass", config.pre_grad_custom_pass, gm)
    recognise(gm)
    with _own_answers():
        if recording is None:
            return aot(gm, example_inputs)
        with capture.watching(recording):
            function = aot(gm, example_inputs)
    return recording.returned(function, example_inputs)


def _within_forward_mode() -> bool:
    """Whether arguments may carry tangents, which only eager's operators take along. What is
    compiled outside of `forward_ad.dual_level` is not called within, and the other way round."""
    context, level = TracingContext.try_get(), forward_ad._current_level
    if context is not None:
        guard = GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL)
        context.guards_context.dynamo_guards.add(guard)
    if level >= 0:
        metrics.counters["capture"]["left to eager: within forward_ad.dual_level"] += 1
        log.warning("within `forward_ad.dual_level` graphs run in eager, for kernels carry no "
                    "tangents: `torch.func.jvp` inside of the function is compiled")  # fmt: skip
    return level >= 0


@contextlib.contextmanager
def _interruptible() -> Generator[None]:
    """After Ctrl-C nothing more is built, and the user sees no more of the way to where it was than
    there is above us."""
    try:
        yield
    except KeyboardInterrupt as stop:
        cxx.abandon()
        raise KeyboardInterrupt(*stop.args) from None


_after: list[Callable[[], None]] = []  # what is to be as before once a frame is compiled


def _lean_calls() -> None:
    """The frame that is being compiled goes without what a call of it need not pay for; Dynamo is
    as before when its compilation ends."""
    handler = dynamo_callback.callback_handler
    if _after or CompileContext.try_get() is None:
        return
    if _as_before not in handler.end_callbacks:  # a reset of Dynamo's removes it
        handler.register_end_callback(_as_before)
    _after.append(_without_events())
    _after.append(_without_wrapper())


def _as_before(_: Any) -> None:
    while _after:
        _after.pop()()


def _without_events() -> Callable[[], None]:
    """Dynamo puts two events for profilers into a compiled frame: 7 of the 30 us that calling a
    graph of one kernel took (machine of an H200, torch 2.11, 2026-11-15)."""
    before = dynamo_config.record_runtime_overhead
    dynamo_config.record_runtime_overhead = False
    return functools.partial(setattr, dynamo_config, "record_runtime_overhead", before)


def _without_wrapper() -> Callable[[], None]:
    """Dynamo wraps what a backend gives it in a function that keeps it away from there: eight calls
    of Python, 2 us where caches hold something else and 10 us where it is all in memory (2 cores,
    torch 2.13, 2026-11-16). An entry does the same in C, and is left as it is."""
    context, innermost = (getattr(eval_frame, name, None) for name in _WRAPPING)
    if context is None or innermost is None:
        return lambda: None
    before = context.__call__

    def wrapped(self: Any, function: Any) -> Any:
        inner = innermost(function)
        return inner if native.is_entry(inner) else before(self, function)

    context.__call__ = wrapped
    return functools.partial(setattr, context, "__call__", before)


_WRAPPING = ("DisableContext", "innermost_fn")  # of Dynamo's, private: they may go away


def _own_answers() -> Any:
    """Torch asks what a user's Triton kernel writes to. It has an answer of its own, which needs a
    card and the whole of its other compiler."""
    return mock.patch.object(triton_kernel_wrap, "get_mutated_tensors", user_kernels.written)


def _cause(gm: torch.fx.GraphModule) -> str:
    """Why a graph is compiled: what Dynamo says of it, and where it is."""
    nodes = (location_of(n) for n in gm.graph.nodes if n.op not in ("placeholder", "output"))
    where = next((place for place in nodes if place), "a graph without a place")
    facts: Any = getattr(dynamo_utils.get_metrics_context(), "_metrics", {})
    why = str(facts.get("recompile_reason") or "")
    return f"{where}: {why.strip() or 'it was never compiled for such inputs'}"


def _on_card(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _facts() -> ViewAndMutationMeta:
    """What AOTAutograd found out about the function it is compiling."""
    found = TracingContext.get().fw_metadata
    assert found is not None
    return found


# ---- being found by name


class _Backends(dict[str, Any]):
    """Dynamo's backends by name. Threads that look ours up for the first time at once all load it,
    and the second to register it would be refused (`duplicate name`)."""

    def __contains__(self, name: object) -> bool:
        found = super().__contains__(name)
        again = found and name in _OURS and sys._getframe(1).f_code is _register_code
        return found and not again


_OURS: dict[str, Callable[..., Any]] = {"tilewright": compile_fx, "tilewright_count": count_fx}
_register_code = getattr(registry.register_backend, "__code__", None)


def _be_found() -> None:
    known = getattr(registry, "_COMPILER_FNS", None)  # private: it may go away
    if known is None or isinstance(known, _Backends):
        return
    for function in _OURS.values():
        function._tags = ()  # type: ignore[attr-defined]
    registry._COMPILER_FNS = _Backends({**known, **_OURS})


_be_found()
sharing.carry()
