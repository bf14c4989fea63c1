"""`python -m bench.repeat_tuning [--runs 20] [--problems 10] [--backends LIST] [--out FILE]`.

The same problems are tuned again and again, each time knowing nothing of the times before (kernels
that were built are kept), on the card or, without one, on the CPU. Printed are how often tunings
agree with the most common winner, and how far apart the times of differing winners are: each time
taken of all winners of a problem in one more race, by the clock that tunes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright
from tilewright import config
from tilewright.gemm import choose
from tilewright.gemm.plan import Plan
from tilewright.tune import clock, race, select
from tilewright.tune.choices import ChoiceCaller, caller


@dataclass(frozen=True)
class Case:
    """A product with what surrounds it."""

    name: str
    function: Callable[..., Any]
    m: int
    n: int
    k: int
    batch: int = 0
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, device: str) -> tuple[Tensor, ...]:
        lead = (self.batch,) if self.batch else ()
        x = torch.randn(*lead, self.m, self.k, device=device).to(self.dtype)
        return x, torch.randn(*lead, self.n, self.k, device=device).to(self.dtype)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.mT


def relu(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(x @ w.mT)


def gelu(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w.mT)


CARD = [
    Case("prefill", product, 4096, 4096, 4096), Case("decode1", product, 1, 4096, 4096),
    Case("decode16", product, 16, 14336, 4096), Case("tokens128", product, 128, 6144, 4096),
    Case("cube1000", product, 1000, 1000, 1000), Case("large_k", product, 64, 128, 65536),
    Case("skinny", product, 16384, 512, 512), Case("heads", product, 512, 512, 128, 32),
    Case("relu", relu, 1024, 4096, 1024), Case("gelu", gelu, 2048, 2048, 512),
]  # fmt: skip
CPU = [Case(f"{f.__name__}{m}", f, m, 256, 128, dtype=torch.float32)
       for f in (product, relu) for m in (1, 16, 64, 100, 256)]  # fmt: skip


class Seen:
    """What the tuner was last offered."""

    def __init__(self) -> None:
        self.offered: list[ChoiceCaller] = []

    def look(self, choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
        self.offered = list(choices)
        return choices


def tuned(case: Case, inputs: Sequence[Tensor], seen: Seen) -> str:
    """Compile once, with nothing remembered: who won."""
    torch._dynamo.reset()
    choose._memo.clear()
    choose.decisions.clear()
    select.add_preprocessing_fn(seen.look)
    try:
        options = {"max_autotune_gemm": True, "fx_graph_cache": False}
        torch.compile(case.function, backend="tilewright", options=options)(*inputs)
    finally:
        select.clear_preprocessing_fns()
    (decision,) = choose.decisions
    return decision.winner


def apart(seen: Seen, winners: Sequence[str], device: torch.device) -> float:
    """How much slower than the fastest the slowest of several winners is, taken in turns."""
    plans = [c.trial for c in seen.offered if isinstance(c.trial, Plan)]
    fresh = [caller(p) for p in plans if f"{p.candidate.name} for {p.fusion.problem}" in winners]
    sets = plans[0].work.bench.memory.count
    made = clock.of(device)
    for choice in fresh:
        choice.trial.finish()
        choice.bench = made.bench(choice.trial.run, sets)

    def take(choice: ChoiceCaller) -> bool:
        assert choice.bench is not None
        choice.samples.append(choice.bench.sample())
        return True

    turns = [{c: c.samples[-1] for c in fresh if take(c)} for _ in range(200)]
    times = [t.median_us for t in race.paired(fresh, turns).values()]
    return max(times) / min(times) - 1


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("--runs", type=int, default=20)
    parse.add_argument("--problems", type=int, default=10)
    parse.add_argument("--backends", default=config.max_autotune_gemm_backends)
    parse.add_argument("--seconds", type=float, default=145.0, help="after which no run is begun")
    parse.add_argument("--out")
    args = parse.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cases = (CARD if device.type == "cuda" else CPU)[: args.problems]
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    changes = {"autotune_local_cache": False, "max_autotune_gemm_backends": args.backends}
    with config.patch(changes):
        for k, case in enumerate(cases):
            # each has its share of the time that is left
            end = time.perf_counter() + (began + args.seconds - time.perf_counter()) / (
                len(cases) - k
            )
            rows.append(repeated(case, args.runs, device, end))
    total = sum(r["runs"] for r in rows)
    same = sum(r["same"] for r in rows)
    worst = max(r["apart"] for r in rows)
    print(f"tilewright {tilewright.__version__} on {device}: {total} tunings of {len(rows)} "
          f"problems in {time.perf_counter() - began:.0f} s; {100 * same / total:.1f} % choose the "
          f"most common winner, differing winners are within {100 * worst:.2f} %")  # fmt: skip
    if args.out:
        with open(args.out, "w") as file:
            json.dump(rows, file, indent=1)


def repeated(case: Case, runs: int, device: torch.device, end: float) -> dict[str, Any]:
    seen = Seen()
    inputs = case.inputs(device.type)
    winners: list[str] = []
    seconds: list[float] = []
    while len(winners) < runs and (not winners or time.perf_counter() < end):
        start = time.perf_counter()
        winners.append(tuned(case, inputs, seen))
        seconds.append(time.perf_counter() - start)
    counts = Counter(winners)
    same = counts.most_common(1)[0][1]
    between = apart(seen, list(counts), device) if len(counts) > 1 else 0.0
    print(f"{case.name:12} {same:3} of {len(winners):3} the same, {100 * between:5.2f} % apart, "
          f"{statistics.median(seconds):5.2f} s each: {dict(counts)}", flush=True)  # fmt: skip
    return {"name": case.name, "runs": len(winners), "same": same, "apart": between,
            "winners": dict(counts), "seconds": seconds}  # fmt: skip


if __name__ == "__main__":
    main()
