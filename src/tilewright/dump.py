"""`TILEWRIGHT_DEBUG`: what the compiler does, shown as far as asked.

| level | shows |
|---|---|
| 1 | a line per graph on stderr: kernels, library calls, bytes, seconds |
| 2 | the groups, and for each pair that was not fused the reason, on stderr |
| 3 | generated sources, as numbered files in `config.debug_root()`; the line of a graph names it |
| 4 | the graph and the IR after every stage, in the same folder |

A program from the cache shows the same, but for the stages that it did not go through again.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx
from torch._logging import LazyString, getArtifactLogger, trace_structured
from torch._logging._internal import log_registry, trace_log

from tilewright import config, metrics, report
from tilewright.gemm.choose import Decision
from tilewright.host.artifact import Source
from tilewright.ir.show import show
from tilewright.runtime.cxx import CxxSource

_numbers = itertools.count()


def stage(name: str, value: Any) -> None:
    """The state after a stage."""
    if config.debug >= 2 and name == "scheduled":
        print(report.graph("graph", value), file=sys.stderr)
    if config.debug >= 4:
        if isinstance(value, torch.fx.GraphModule):
            _write(name, value.print_readable(False), "py")
        else:
            _write(name, show(value), "txt")


def decided_before(groups: str, decisions: Sequence[Decision]) -> None:
    """What is shown of a program that was compiled by an earlier process, or earlier in this."""
    if config.debug >= 2:
        print(groups, file=sys.stderr)
    if config.autotune_show or config.debug >= 1:
        for decision in decisions:
            print(f"{decision.site}: {decision.winner} ({decision.why}), from the cache",
                  file=sys.stderr)  # fmt: skip


def code(host: str, kernels: Mapping[str, Source]) -> None:
    """The generated code of a graph, for listeners, torch's own logs and the dump."""
    traced = trace_log.hasHandlers() and bool(trace_log.handlers)
    logged = any(map(_logged, ("output_code", "kernel_code")))
    if config.debug < 3 and not metrics.on_code and not traced and not logged:
        return
    sources = "\n".join(f"{_comment(source)} {name}\n{source.text}"
                        for name, source in kernels.items())  # fmt: skip
    for listener in metrics.on_code:
        listener(f"{host}\n{sources}")
    _LOGS["output_code"].debug("%s\n%s", host, sources)
    _LOGS["kernel_code"].debug("%s", sources)
    trace_structured("inductor_output_code", lambda: {"filename": "tilewright_program.py"},
                     payload_fn=lambda: f"{host}\n{sources}")  # fmt: skip
    if config.debug >= 3:
        _write("host", host, "py")
        for name, source in kernels.items():
            _write(name, source.text, "cpp" if isinstance(source, CxxSource) else "py")


def reasons(groups: str, hints: Sequence[str], decisions: Sequence[Decision]) -> None:
    """What was fused and chosen, in torch's own logs (`TORCH_LOGS`, `TORCH_TRACE`)."""
    for hint in hints:
        _LOGS["perf_hints"].debug("%s", hint)
    for name in ("fusion", "schedule"):
        _LOGS[name].debug("%s", groups)
    for decision in decisions:
        _LOGS["autotuning"].debug("%s: %s (%s)", decision.site, decision.winner, decision.why)
        _artifact("tilewright_decision", f"{decision.site}: {decision.winner} ({decision.why})")
    _artifact("tilewright_groups", groups)


def graph(gm: torch.fx.GraphModule) -> None:
    """The graph that is about to be compiled, in torch's own logs."""
    _LOGS["post_grad_graphs"].debug("%s", LazyString(lambda: gm.print_readable(False)))
    trace_structured("inductor_post_grad_graph", payload_fn=lambda: gm.print_readable(False))


def _artifact(name: str, text: str) -> None:
    trace_structured("artifact", lambda: {"name": name, "encoding": "string"},
                     payload_fn=lambda: text)  # fmt: skip


def _logged(name: str) -> bool:
    return _LOGS[name].isEnabledFor(logging.DEBUG)


# The artifacts of `TORCH_LOGS`, as far as the installed torch has them: below a log of torch's,
# which has its handlers.
_LOGS: dict[str, logging.Logger] = {
    name: getArtifactLogger("torch._dynamo.backends.tilewright", name)
    if name in log_registry.artifact_names else logging.getLogger(f"tilewright.dump.{name}")
    for name in ("output_code", "kernel_code", "fusion", "schedule", "autotuning", "perf_hints",
                 "post_grad_graphs")
}  # fmt: skip


def _comment(source: Source) -> str:
    return "//" if isinstance(source, CxxSource) else "#"


def summary(counted: metrics.Delta, seconds: float, cached: bool) -> None:
    """One line per graph."""
    if config.debug >= 1:
        calls = ", ".join(f"{op} x{n}" for op, n in counted.fallback_ops.most_common(4))
        print(
            f"tilewright: {counted.generated_kernel_count} kernels for {counted.native_nodes} "
            f"nodes, {counted.fallback_nodes} ATen calls{f' ({calls})' if calls else ''}, "
            f"{counted.num_bytes_moved / 1e6:.3g} MB moved, {seconds:.3g} s"
            f"{', from the cache' if cached else ''}"
            f"{f', written to {config.debug_root()}' if config.debug >= 3 else ''}",
            file=sys.stderr,
        )


def _write(name: str, text: str, ending: str) -> None:
    folder = config.debug_root()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{next(_numbers):04d}_{name}.{ending}").write_text(text)
