"""What timing in a process of its own costs beside timing here: `python -m bench.tuning_overhead`.

The same products are tuned both ways in turns, with the libraries that are built already, so that
what differs is asking, and making inputs there. The seconds of the first are the process's start.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from tilewright import caches, config, metrics
from tilewright.testing import fresh_cache
from tilewright.tune import child

SHAPES = ((64, 64, 64), (128, 256, 64), (256, 256, 256), (512, 512, 256))


def programs(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(m, k, device=device), torch.randn(k, n, device=device))
            for m, n, k in SHAPES]  # fmt: skip


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(a @ b)


def tuned(inputs: list[tuple[torch.Tensor, torch.Tensor]], apart: bool) -> tuple[float, float]:
    """Seconds of compiling, with kernels built and nothing measured; and benchmarks made."""
    metrics.reset()
    caches.clear()
    began = time.perf_counter()
    options: dict[str, Any] = {
        "max_autotune": True,
        "autotune_in_subproc": apart,
        "fx_graph_cache": False,
    }
    for a, b in inputs:
        torch._dynamo.reset()
        torch.compile(product, backend="tilewright", dynamic=False, options=options)(a, b)
    kind = "gpu" if inputs[0][0].is_cuda else "cpu"
    count = metrics.counters["inductor"][f"benchmarking.Benchmarker.benchmark_{kind}"]
    return time.perf_counter() - began, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--products", type=int, default=len(SHAPES), help="how many of them")
    options = parser.parse_args()
    inputs = programs(options.device)[: options.products]
    with fresh_cache(), config.patch(autotune_local_cache=False):
        tuned(inputs, False)  # kernels are built
        began = time.perf_counter()
        child.asked(time.time)
        print(f"the process starts in {time.perf_counter() - began:.2f} s")
        tuned(inputs, True)
        found: dict[bool, list[float]] = {False: [], True: []}
        for k in range(options.rounds):
            for apart in (False, True) if k % 2 else (True, False):
                seconds, count = tuned(inputs, apart)
                found[apart].append(seconds)
                where = "in its own process" if apart else "in this process"
                print(f"{where}: {seconds:.2f} s, {count:.0f} candidates timed")
    ratios = [a / b for a, b in zip(found[True], found[False], strict=True)]
    here, there = (statistics.median(found[apart]) for apart in (False, True))
    print(f"{len(inputs)} products: {here:.2f} s here, {there:.2f} s in a process of their own; "
          f"{statistics.median(ratios):.2f} times")  # fmt: skip


if __name__ == "__main__":
    main()
