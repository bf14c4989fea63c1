"""`python -m bench.gemm_bf16`: linear layers of bfloat16 on the CPU, by which of its units.

Eager against tilewright with `mode="max-autotune"`, in turns, from empty caches; and of each layer
the fastest of our kernels, with the unit it multiplies by, beside the library's time as they were
tuned. Made for processors with AMX or AVX-512 BF16.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.gemm_cpu import BF16, OURS, Case, gelu, plain, silu
from bench.measure import (
    EAGER,
    compile_with,
    difference,
    empty_caches,
    geomean,
    interleave,
    keep_freed_memory,
    machine,
)
from tilewright.gemm.choose import decisions
from tilewright.target import Target
from tilewright.tune import select
from tilewright.tune.choices import ChoiceCaller

CASES = (
    Case("prefill up", gelu, 512, 2048, 8192, BF16),
    Case("prefill down", plain, 512, 8192, 2048, BF16),
    Case("prefill out", plain, 512, 2048, 2048, BF16),
    Case("bert up", gelu, 256, 768, 3072, BF16),
    Case("bert down", plain, 256, 3072, 768, BF16),
    Case("decode 1", silu, 1, 2048, 8192, BF16),
    Case("decode 4", silu, 4, 2048, 8192, BF16),
    Case("decode 16", silu, 16, 2048, 8192, BF16),
    Case("decode 64", silu, 64, 2048, 8192, BF16),
)
Found = dict[str, tuple[float, str, str]]  # by name: microseconds, provider, description


def tuned(found: Found) -> Callable[..., None]:
    """Notes what each choice took."""

    def note(times: Mapping[ChoiceCaller, float], *_: object) -> None:
        found.update({c.name: (1000 * ms, c.provider, c.description) for c, ms in times.items()})

    return note


def unit(description: str) -> str:
    parts = dict(part.split("=") for part in description.split(", ") if "=" in part)
    return parts.get("UNIT", "float32") + " " + parts.get("WAY", "")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", default="", metavar="REGEX", help="Only layers whose name matches.")
@click.option("--rounds", default=9, show_default=True, help="Samples per layer and backend.")
@click.option("--seconds", default=600.0, show_default=True, help="No layer is begun later.")
def main(only: str, rounds: int, seconds: float) -> None:
    """Linear layers of bfloat16: eager, and tilewright by the units of the processor."""
    keep_freed_memory()
    console = Console(width=150)
    for key, value in machine().items():
        console.print(f"[bold]{key:>11}[/bold]  {value}", highlight=False)
    units = ", ".join(sorted(Target.host().units)) or "none"
    console.print(f"units: {units}; {torch.get_num_threads()} threads", highlight=False)
    heads = ("layer", "rows", "features", "outputs", "eager us", "ours us", "x eager", "chosen",
             "library us", "our best us", "unit", "TFLOP/s")  # fmt: skip
    table = Table(*heads)
    gains: list[float] = []
    began = time.perf_counter()
    with empty_caches(), torch.no_grad():
        for case in CASES:
            if time.perf_counter() - began > seconds:
                break
            if not re.search(only, case.name):
                continue
            found: Found = {}
            select.add_feedback_saver(tuned(found))
            inputs = case.inputs()
            expected = case.layer(*inputs)
            run = compile_with(case.layer, OURS, mode="max-autotune")
            wrong = difference(expected, run(*inputs))
            select.clear_feedback_savers()
            if wrong:
                console.print(f"{case.name}: {wrong}", highlight=False)
                continue
            calls: dict[str, Callable[[], Tensor]] = {
                EAGER: lambda case=case, inputs=inputs: case.layer(*inputs),
                OURS: lambda run=run, inputs=inputs: run(*inputs),
            }
            times = interleave(calls, rounds, 0.02)
            eager, ours = times[EAGER].median, times[OURS].median
            gains.append(eager / ours)
            cpp = [(us, text) for us, who, text in found.values() if who == "CPP"]
            best, text = min(cpp, default=(float("nan"), ""))
            library = min((us for us, who, _ in found.values() if who == "ATEN"), default=0.0)
            chosen = decisions[-1].winner.split(" ")[0]
            table.add_row(case.name, *map(str, (case.rows, case.features, case.outputs)),
                          f"{eager * 1e6:.0f}", f"{ours * 1e6:.0f}", f"{eager / ours:.2f}", chosen,
                          f"{library:.0f}", f"{best:.0f}", unit(text),
                          f"{case.flops / best / 1e6:.2f}")  # fmt: skip
    console.print(table)
    if gains:
        console.print(f"over eager: geomean {geomean(gains):.2f}, least {min(gains):.2f}")


if __name__ == "__main__":
    main()
