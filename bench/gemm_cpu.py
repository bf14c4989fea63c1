"""`python -m bench.gemm_cpu`: linear layers with what follows them, on the CPU, in one run.

Eager, the reference and tilewright, both compilers with `mode="max-autotune"`. The layers are those
of the demo and of the model zoo at its `small` size, and a transformer's at 768 features.

A column has eager's own kernels behind `torch.compile`, with a backend that changes nothing: what
is missing to eager there no backend can win back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo import register_backend

from bench.measure import (
    EAGER,
    REFERENCE,
    Timing,
    compile_with,
    difference,
    empty_caches,
    geomean,
    interleave,
    keep_freed_memory,
    machine,
)

OURS = "tilewright"
NOTHING = "nothing"
BF16, F32 = torch.bfloat16, torch.float32

Layer = Callable[..., Tensor]


@register_backend(name=NOTHING)  # pyright: ignore[reportUntypedFunctionDecorator]
def unchanged(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    return graph.forward


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def gelu_tanh(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b))


def silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.linear(x, w, b))


def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(x, w, b)


@dataclass(frozen=True)
class Case:
    name: str
    layer: Layer
    rows: int
    features: int
    outputs: int
    dtype: torch.dtype = F32

    def inputs(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)

        def made(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        n, k = self.outputs, self.features
        found = (made(self.rows, k), made(n, k) / k**0.5, made(n))
        return (*found, made(self.rows, n)) if self.layer is residual else found

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.features * self.outputs


CASES = (
    Case("demo up", gelu, 512, 128, 512),
    Case("demo down", residual, 512, 512, 128),
    Case("demo logits", plain, 512, 128, 1000),
    Case("gpt up", gelu_tanh, 512, 256, 1024),
    Case("gpt down", residual, 512, 1024, 256),
    Case("bert up", gelu, 512, 288, 1152),
    Case("bert down", residual, 512, 1152, 288),
    Case("bert head", gelu, 512, 288, 288),
    Case("vit up", gelu, 580, 192, 768),
    Case("mlp up", gelu, 256, 768, 3072),
    Case("mlp down", plain, 256, 3072, 768),
    Case("mlp relu", relu, 1024, 768, 3072),
    Case("decode 1", silu, 1, 768, 3072),
    Case("decode 16", silu, 16, 768, 3072),
    Case("bf16 up", gelu, 256, 768, 3072, BF16),
    Case("bf16 decode", silu, 4, 768, 3072, BF16),
)


def measured(case: Case, backends: list[str], rounds: int) -> tuple[dict[str, Timing], str]:
    """Times per call of those that are right, and what went wrong with the others."""
    torch._dynamo.reset()
    inputs = case.inputs()
    expected = case.layer(*inputs)
    calls: dict[str, Callable[[], Tensor]] = {}
    notes: list[str] = []
    for name in backends:
        run = compile_with(case.layer, name, mode=None if name == NOTHING else "max-autotune")
        start = time.perf_counter()
        wrong = difference(expected, run(*inputs))
        notes += [f"{name}: {wrong}"] if wrong else []
        if name not in (EAGER, NOTHING):
            notes.append(f"{name} compiled in {time.perf_counter() - start:.1f} s")
        if wrong is None:
            calls[name] = lambda run=run: run(*inputs)
    return interleave(calls, rounds, 0.02), "; ".join(notes)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", default="", metavar="REGEX", help="Only layers whose name matches.")
@click.option("--rounds", default=25, show_default=True, help="Samples per layer and backend.")
@click.option("--threads", default=0, help="OpenMP threads; 0: as torch comes.")
@click.option("--reference/--no-reference", default=True, help="Whether to compile with it too.")
def main(only: str, rounds: int, threads: int, reference: bool) -> None:
    """Linear layers with their activations: eager, the reference, tilewright."""
    if threads:
        torch.set_num_threads(threads)
    keep_freed_memory()
    console = Console(width=140)
    for key, value in machine().items():
        console.print(f"[bold]{key:>11}[/bold]  {value}", highlight=False)
    backends = [EAGER, NOTHING, *([REFERENCE] if reference else []), OURS]
    table = Table("layer", "rows", "features", "outputs", *(f"{b} us" for b in backends), "GFLOP/s",
                  *(f"over {b}" for b in backends[:-1]))  # fmt: skip
    gains: dict[str, list[float]] = {b: [] for b in backends[:-1]}
    with empty_caches(), torch.no_grad():
        for case in CASES:
            if not re.search(only, case.name):
                continue
            times, note = measured(case, backends, rounds)
            console.print(f"{case.name}: {note}", highlight=False)
            if OURS not in times:
                continue
            ours = times[OURS].median
            shown = [f"{times[b].median * 1e6:.0f}" if b in times else "-" for b in backends]
            for b in gains:
                gains[b] += [times[b].median / ours] if b in times else []
            over = [f"{times[b].median / ours:.2f}" if b in times else "-" for b in gains]
            table.add_row(case.name, *map(str, (case.rows, case.features, case.outputs)), *shown,
                          f"{case.flops / ours / 1e9:.0f}", *over)  # fmt: skip
    console.print(table)
    for b, found in gains.items():
        if found:
            console.print(f"over {b}: geomean {geomean(found):.2f}, least {min(found):.2f}")


if __name__ == "__main__":
    main()
