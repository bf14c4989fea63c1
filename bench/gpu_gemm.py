"""`python -m bench.gpu_gemm`: products on a card, eager, the reference and tilewright in one run.

Each case is compiled with autotuning from empty caches, checked against eager in float64, and timed
on the device by replays of a CUDA graph of several calls over rotating inputs. Everybody reads the
same inputs, writes where the others write, and takes turns in an order that is drawn each time; how
much faster one is than another is said by what they took in the same turn, for the clock of a card
at its limit of power is another one every few milliseconds. The table ends with geometric means;
tuning seconds are counted per backend, without those in which torch imports its own compiler.

With `--reference` the reference's kernels are first compiled in several processes, which keep the
kernels and nothing of what they measure: it tunes by itself, on a card that nobody else uses, from
kernels that are there. Its seconds are therefore counted for the cases of `COLD` alone, of which
nothing is compiled ahead; ours are always from empty caches.

`--random N --seed S` measures products that are drawn instead, of the kinds that models have, or
with `--kind fused` groups of a product and what surrounds it.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.gemm_cases import FUSED, PRODUCTS, Case, drawn, drawn_groups
from bench.measure import geomean, leaves, run_all
from tilewright.gemm.choose import decisions
from tilewright.tune.clock import between

CALLS = 10  # in one graph
LED = 2000.0  # microseconds of a replay above which what starting it costs does not show
WARM = 0.1  # seconds of turns until the card is at its limit of power, if it comes there
TURNS = 8, 100  # fewest and most
SPENT = 0.2  # seconds for all between those
SETS = 4  # of inputs that take turns, or more where they are small
CACHE = 120 << 20  # bytes that are surely past the card's cache
JOBS = 8  # processes that compile the reference's kernels
AHEAD = 90.0  # seconds for that; what is left is compiled when it is measured
LEAST = 0.98  # of eager's speed: what is under it is listed
COLD = ("mm 4096x14336x4096", "mm 64x6144x4096", "bias + relu")  # what names begin with


# ---- measuring


def compiled(fn: Callable[..., Any], backend: str) -> Callable[..., Any]:
    if backend == "eager":
        return fn
    torch._dynamo.reset()
    mode = "max-autotune-no-cudagraphs"
    return torch.compile(fn, backend=backend, mode=mode, dynamic=False)


def sets_of(case: Case) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(0)
    first = case.inputs()
    size = sum(t.nbytes for t in first)
    return [first, *(case.inputs() for _ in range(max(1, min(16, CACHE // size + 1))))]


def error(result: Any, expected: Any) -> float:
    pairs = zip(leaves(result), leaves(expected), strict=True)
    return max(float((one.double() - right).norm() / right.norm()) for one, right in pairs)


def in_float64(case: Case, args: tuple[Tensor, ...]) -> Any:
    return case.fn(*(a.double() if a.is_floating_point() else a for a in args))


class Recorder:
    """Makes graphs that have their memory in common: results, and the libraries' own, which where
    they lie makes a difference of some percent to."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def recorded(self, fn: Callable[..., Any], sets: list[tuple[Tensor, ...]]
                 ) -> torch.cuda.CUDAGraph:  # fmt: skip
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            for args in sets[:2]:
                fn(*args)
            self._stream.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                for k in range(CALLS):
                    fn(*sets[k % len(sets)])
        return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph]) -> list[dict[str, float]]:
    """Microseconds of a call of each, turn by turn."""
    order, rng = list(graphs), random.Random(0)
    turns: list[dict[str, float]] = []
    led = True
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < WARM or len(turns) < 1:
        turns.append({name: replayed(graphs[name], led) for name in order})
        led = min(turns[-1].values()) * CALLS < LED
    turns = []
    while len(turns) < TURNS[0] or (len(turns) < TURNS[1] and spent < WARM + SPENT):
        rng.shuffle(order)
        turns.append({name: replayed(graphs[name], led) for name in order})
        spent = time.perf_counter() - began
    return turns


def replayed(graph: torch.cuda.CUDAGraph, led: bool) -> float:
    """Microseconds of a call; `led` by the same, behind which the host starts it."""
    if led:
        graph.replay()
    return between(graph.replay) / CALLS


def ratio(turns: list[dict[str, float]], other: str) -> float:
    """How many times as fast ours is: the mean of the middle half of what single turns say."""
    found = sorted(turn[other] / turn["tilewright"] for turn in turns)
    return statistics.fmean(found[len(found) // 4 : len(found) - len(found) // 4])


def row(case: Case, backends: list[str]) -> dict[str, Any]:
    sets = sets_of(case)
    found: dict[str, Any] = {"case": case.name, "fused": case.fused}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    recorder = Recorder()
    expected = in_float64(case, sets[0])
    for backend in backends:
        try:
            began = time.perf_counter()
            fn = compiled(case.fn, backend)
            result = fn(*sets[0])
            torch.cuda.synchronize()
            found[f"{backend} s"] = time.perf_counter() - began
            found[f"{backend} error"] = error(result, expected)
            del result
            graphs[backend] = recorder.recorded(fn, sets)
        except Exception as why:
            traceback.print_exc()
            found[f"{backend} failed"] = f"{type(why).__name__}: {' '.join(str(why).split())[:200]}"
    del expected
    turns = in_turns(graphs)
    found["us"] = {name: statistics.median(turn[name] for turn in turns) for name in graphs}
    if "tilewright" in graphs:
        found["x"] = {name: ratio(turns, name) for name in graphs}
        found["chosen"] = chosen()
    return found


def chosen() -> str:
    """What the last decision was, for the table."""
    last = decisions[-1]
    return f"{last.winner.partition(' for ')[0]} ({last.why})"[:90]


def line(found: dict[str, Any], backends: list[str]) -> str:
    us = found["us"]
    times = " | ".join(f"{us[b]:.1f}" if b in us else found.get(f"{b} failed", "-")[:40]
                       for b in backends)  # fmt: skip
    times_as_fast = found.get("x", {})
    ratios = [f"{times_as_fast[b]:.2f}" if b in times_as_fast else "-"
              for b in backends if b != "tilewright"]  # fmt: skip
    seconds = " | ".join(f"{found.get(f'{b} s', 0):.1f}" for b in backends if b != "eager")
    wrong = found.get("tilewright error", 9) / max(found.get("eager error", 1e-9), 1e-9)
    return (f"| {found['case']} | {times} | {' | '.join(ratios)} | {seconds} | {wrong:.2f} | "
            f"{found.get('chosen', '')} |")  # fmt: skip


def summary(rows: list[dict[str, Any]], backends: list[str]) -> list[str]:
    lines: list[str] = []
    for fused in (False, True):
        ours = [r["x"] for r in rows if r["fused"] is fused and "x" in r]
        for other in [b for b in backends if b != "tilewright"]:
            ratios = [x[other] for x in ours if other in x]
            if ratios:
                kind = "fused" if fused else "products"
                lines.append(f"{kind}: {geomean(ratios):.3f} over {other} (geomean of "
                             f"{len(ratios)}, worst {min(ratios):.2f})")  # fmt: skip
    slow = [r for r in rows if r.get("x", {}).get("eager", 9) < LEAST]
    lines += [f"under {LEAST} of eager: {r['case']}, {r['x']['eager']:.3f}, {r['us']['eager']:.2f} "
              f"us, {r['chosen']}" for r in slow]  # fmt: skip
    cold = [r for r in rows if r["cold"]] if "inductor" in backends else rows
    for b in backends[1:]:
        lines.append(f"{b}: {sum(r.get(f'{b} s', 0) for r in cold):.1f} s to compile and tune "
                     f"{len(cold)} from empty caches")  # fmt: skip
    return lines


# ---- the reference's kernels


def is_cold(case: Case) -> bool:
    return case.name.startswith(COLD)


def compile_ahead(cases: list[Case]) -> None:
    """The reference's kernels for these cases, in several processes."""
    known = PRODUCTS + FUSED
    places = [str(known.index(c)) for c in cases if c in known and not is_cold(c)]
    shares = [",".join(share) for k in range(JOBS) if (share := places[k::JOBS])]
    run_all([[sys.executable, "-m", "bench.gpu_gemm", "--ahead", share] for share in shares], AHEAD,
            TORCHINDUCTOR_COMPILE_THREADS="2")  # fmt: skip


def ahead(cases: list[Case]) -> None:
    """In a process of its own: kernels are kept, and neither times nor programs."""
    import torch._inductor.config as reference

    kept = {"fx_graph_cache": False, "autotune_local_cache": False}
    quick = {"inductor_default_autotune_warmup": 1, "inductor_default_autotune_rep": 1}
    known = {k: v for k, v in {**kept, **quick}.items() if hasattr(reference, k)}
    with reference.patch(known):
        for case in cases:
            compiled(case.fn, "inductor")(*case.inputs())
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--reference", action="store_true", help="measure the reference too")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--kind", choices=("all", "products", "fused"), default="all")
    parser.add_argument("--random", type=int, default=0, help="so many that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of those")
    parser.add_argument("--out", default="")
    parser.add_argument("--ahead", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ahead:
        ahead([(PRODUCTS + FUSED)[int(k)] for k in options.ahead.split(",")])
        return
    backends = ["eager", *(["inductor"] if options.reference else []), "tilewright"]
    cases = {"all": PRODUCTS + FUSED, "products": PRODUCTS, "fused": FUSED}[options.kind]
    if options.random:
        draw = drawn_groups if options.kind == "fused" else drawn
        cases = draw(options.random, options.seed)
    end = time.perf_counter() + options.seconds
    head = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    columns = ["case", *(f"{b} us" for b in backends), *(f"x {b}" for b in backends[:-1]),
               *(f"{b} s" for b in backends[1:]), "error / eager's", "chosen"]  # fmt: skip
    cases = [c for c in cases if options.only in c.name]
    if options.reference:
        compile_ahead(cases)
        head += f"; compiled ahead, {end - time.perf_counter():.0f} s left"
    print(head, f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n", flush=True)
    torch.compile(torch.neg, backend="eager")(torch.ones(1))  # imports all of Dynamo: seconds
    rows: list[dict[str, Any]] = []
    show = functools.partial(print, flush=True)
    # those from empty caches first: nothing they have in common with others is there yet
    for case in sorted(cases, key=lambda c: not (options.reference and is_cold(c))):
        if time.perf_counter() > end:
            show(f"| {case.name} | out of time |")
            continue
        rows.append({**row(case, backends), "cold": is_cold(case)})
        show(line(rows[-1], backends))
        torch.cuda.empty_cache()
        if options.out:
            with open(options.out, "w") as file:
                json.dump(rows, file, indent=1)
    print(*summary(rows, backends), sep="\n", flush=True)


if __name__ == "__main__":
    main()
