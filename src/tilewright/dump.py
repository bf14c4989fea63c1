"""`TILEWRIGHT_DEBUG`: what the compiler does, shown as far as asked.

| level | shows |
|---|---|
| 1 | a line per graph on stderr: kernels, library calls, bytes, seconds |
| 2 | the groups, and for each pair that was not fused the reason, on stderr |
| 3 | generated sources, as numbered files in `config.debug_root()` |
| 4 | the graph and the IR after every stage, in the same folder |
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import Any

import torch.fx

from tilewright import config, metrics
from tilewright.host.artifact import Source
from tilewright.ir.show import show
from tilewright.runtime.cxx import CxxSource

_numbers = itertools.count()


def stage(name: str, value: Any) -> None:
    """The state after a stage."""
    if config.debug >= 2 and name == "scheduled":
        print(show(value), file=sys.stderr)
    if config.debug >= 4:
        graph = isinstance(value, torch.fx.GraphModule)
        _write(name, value.print_readable(False) if graph else show(value))


def code(host: str, kernels: Mapping[str, Source]) -> None:
    """The generated code of a graph, for listeners and for the dump."""
    if config.debug < 3 and not metrics.on_code:
        return
    sources = "\n".join(f"{_comment(source)} {name}\n{source.text}"
                        for name, source in kernels.items())  # fmt: skip
    for listener in metrics.on_code:
        listener(f"{host}\n{sources}")
    if config.debug >= 3:
        _write("host", host)
        _write("kernels", sources)


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
            f"{', from the cache' if cached else ''}",
            file=sys.stderr,
        )


def _write(name: str, text: str) -> None:
    folder = config.debug_root()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{next(_numbers):04d}_{name}.txt").write_text(text)
