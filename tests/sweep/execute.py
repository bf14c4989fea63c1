"""Run one case eagerly and on one backend, and classify what happened."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import guards
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from tests.sweep.cases import DTYPES, Group, operators
from tests.sweep.compare import Mismatch, compare, tolerance_for
from tests.sweep.samples import Sample, clone, seed, to_float64

BASELINE = "aot_eager"
# Compiled code draws its own random numbers unless told to draw eager's.
_OPTIONS: dict[str, dict[str, Any]] = {
    "tilewright": {"fallback_random": True},
    "inductor": {"fallback_random": True},
}
# These return memory nobody has written, so only shape, dtype and strides mean anything.
_UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)

# Outcomes. "stride" is the lesser failure: the values are right, the memory layout is not eager's.
PASS = "pass"
NOT_COMPILED = "not compiled"
EAGER_ERROR = "eager error"
NO_SAMPLES = "no samples"
SOFT = "stride"
HARD = ("wrong value", "wrong meta", "exception", "crash", "timeout")
_MISMATCH = {"value": "wrong value", "meta": "wrong meta", "stride": SOFT}


@dataclass(frozen=True)
class Outcome:
    """``graphs`` counts what reached the backend: with none, nothing was tested."""

    status: str
    stage: str = ""
    text: str = ""
    graphs: int = 0
    breaks: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status == SOFT or self.status in HARD

    @property
    def severity(self) -> int:
        return 2 if self.status in HARD else int(self.status == SOFT)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def prepare(threads: int) -> None:
    """Settings of a worker process."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    # Running a frame eagerly because it was recompiled too often would look like a pass.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.suppress_errors = False
    # Only a measurement for dynamo's log, at 26 ms a compilation a third of the sweep's time.
    guards.profile_guard_manager = _no_profile


def _no_profile(*_: Any) -> float:
    return 0.0


def load_backend(backend: str) -> str | Callable[..., Any]:
    """A name that dynamo knows, or ``module:function``."""
    module, colon, function = backend.partition(":")
    if colon:
        return getattr(importlib.import_module(module), function)
    return backend


class _Call:
    """The observable results of calls: outputs, inputs afterwards, gradients. All gradients are
    along the directions of the first call, rounded as its results are: a float64 reference along
    others would be the reference of something else."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._directions: list[torch.Tensor] = []
        self.stage = "forward"

    def observe(self, function: Callable[..., Any], sample: Sample) -> Any:
        """``sample`` is consumed: operators may write into it."""
        self.stage = "forward"
        seed()
        output = function(*sample.args, **sample.kwargs)
        inputs = [t for t in tree_leaves((sample.args, sample.kwargs)) if _is_tensor(t)]
        gradients = None
        if self._group.direction == "backward":
            self.stage = "backward"
            gradients = self._gradients(sample.differentiable(output), inputs)
        written = [t.detach() for t in inputs]
        return {"output": _listed(output), "gradients": gradients, "inputs": written}

    def _gradients(self, output: Any, inputs: list[torch.Tensor]
                   ) -> list[torch.Tensor | None] | None:  # fmt: skip
        outputs = [t for t in tree_leaves(output) if _is_tensor(t) and t.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        if not outputs or not wanted:
            return None
        if [d.shape for d in self._directions] != [t.shape for t in outputs]:
            seed()
            self._directions = [torch.randn(t.shape).to(t.device, t.dtype) for t in outputs]
        directions = [d.to(t.dtype) for d, t in zip(self._directions, outputs, strict=True)]
        return list(torch.autograd.grad(outputs, wanted, directions, allow_unused=True))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _listed(output: Any) -> Any:
    """Named result tuples as plain lists: eager and compiled may name their types apart."""
    return list(output) if isinstance(output, tuple) else output


def run(group: Group, sample: Sample, backend: str) -> Outcome:
    """Never raises for what the operator, the compiler or the backend does."""
    started = time.perf_counter()
    outcome = _run(group, sample, backend)
    seconds = round(time.perf_counter() - started, 4)
    return replace(outcome, seconds=seconds)


def _run(group: Group, sample: Sample, backend: str) -> Outcome:
    """With dynamo's defaults, and where they break the graph also with all that it can capture."""
    op = operators()[group.op]
    call = _Call(group)
    try:
        expected = call.observe(op.op, clone(sample))
    except Exception as error:
        return Outcome(EAGER_ERROR, call.stage, first_line(error))
    outcome = _attempt(group, sample, backend, expected)
    if outcome.failed or not outcome.breaks:
        return outcome
    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    ):
        whole = _attempt(group, sample, backend, expected)
    return whole if whole.breaks < outcome.breaks else outcome


def _attempt(group: Group, sample: Sample, backend: str, expected: Any) -> Outcome:
    op = operators()[group.op]
    call = _Call(group)
    with _fresh_dynamo():
        try:
            actual = call.observe(_compiled(op.op, group, backend), clone(sample))
        except Exception as error:
            return Outcome("exception", _stage(error, call.stage), first_line(error))
        graphs = counters["stats"]["unique_graphs"]
        breaks = sum(counters["graph_break"].values())
    if not graphs:
        return Outcome(NOT_COMPILED, breaks=breaks)

    @functools.cache
    def exact() -> Any:
        with contextlib.suppress(Exception):
            return call.observe(op.op, clone(to_float64(sample)))
        return None

    values = op.name not in _UNINITIALISED
    tolerance = tolerance_for(op, DTYPES[group.dtype])
    found = compare(actual, expected, tolerance, values=values, exact=exact)
    return _classify(found, graphs, breaks)


def _classify(found: Mismatch | None, graphs: int, breaks: int) -> Outcome:
    if found is None:
        return Outcome(PASS, graphs=graphs, breaks=breaks)
    return Outcome(_MISMATCH[found.kind], "compare", found.text, graphs, breaks)


def _compiled(function: Callable[..., Any], group: Group, backend: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.compile(
        call,
        backend=load_backend(backend),
        dynamic=group.mode == "dynamic",
        options=_OPTIONS.get(backend),
    )


@contextlib.contextmanager
def _fresh_dynamo() -> Generator[None]:
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()


def _stage(error: Exception, stage: str) -> str:
    if isinstance(error, BackendCompilerFailed):
        return f"compile {stage}"
    if type(error).__module__.startswith("torch._dynamo"):
        return f"capture {stage}"
    return f"run {stage}"


def first_line(error: BaseException) -> str:
    """Type and the first line that says something, without what changes from run to run."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if text.startswith("backend=") and len(lines) > 1:
        text = lines[1]
    return f"{type(error).__name__}: {text}"[:300]
