"""`python -m bench.gpu_attention`: attention on a card, eager, the reference and tilewright in one
run.

Each case is compiled, compared with eager in float32, and timed forward and, where it is trained,
forward and backward, by CUDA events around calls that take turns. The table ends with geometric
means, the worst case against eager, and the reached TFLOP/s of the causal 8192x128 case. Peak
memory is the most that one call had beside its operands.

`--only TEXT` takes the cases whose names have it, `--reference` measures the reference too,
`--mode` is the mode both are compiled with, and `--host` runs the short list on the CPU: processor
time of one thread, for others may have the cores. No case begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.attention_cases import FLEX, HOST, SDPA, Case
from bench.measure import geomean

TURNS = 20
WARM = 3
LEAST = 0.98  # of eager's speed: what is under it is listed
WANTED = {"sdpa": 1.15}  # over eager, in the geometric mean of the cases of a kind


@dataclass
class Measured:
    milliseconds: float
    megabytes: float
    error: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--mode", default="default")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=560)
    args = parser.parse_args(argv)
    device = "cpu" if args.host else "cuda"
    dtype = getattr(torch, "float32" if args.host else args.dtype)
    cases = [c for c in (HOST if args.host else [*SDPA, *FLEX]) if args.only in c.name]
    backends = ["eager", "tilewright", *(["inductor"] if args.reference else [])]
    if args.host:
        torch.set_num_threads(1)
    end = time.perf_counter() + args.seconds
    gains: dict[tuple[str, str], list[float]] = {}
    slow: list[str] = []
    for case in cases:
        if time.perf_counter() > end:
            print(f"{case.name}: out of time")
            continue
        for trained in (False, True) if case.trained else (False,):
            found = _case(case, device, dtype, backends, trained, args.mode)
            name = f"{case.name}{' with gradients' if trained else ''}"
            print(_line(name, found, case, trained), flush=True)
            ours = found.get("tilewright")
            for other in backends:
                theirs = found.get(other)
                if other == "tilewright" or ours is None or theirs is None:
                    continue
                gain = theirs.milliseconds / ours.milliseconds
                gains.setdefault((case.name.split()[0], other), []).append(gain)
                if other == "eager" and gain < LEAST:
                    slow.append(f"{name} {gain:.2f}")
    print(*_verdicts(gains), sep="\n")
    print(f"slower than eager: {', '.join(slow) or 'none'}")


def _verdicts(gains: Mapping[tuple[str, str], Sequence[float]]) -> list[str]:
    """Of each kind of case: as fast as eager and the reference each time, and by how much on the
    whole."""
    lines: list[str] = []
    for (kind, other), values in sorted(gains.items()):
        wanted = WANTED.get(kind, 1.0) if other == "eager" else 1.0
        least = LEAST if other == "eager" or kind == "flex" else 0.0
        met = geomean(values) >= wanted and min(values) >= least
        lines.append(f"{kind}: {geomean(values):.3f} over {other} (geomean of {len(values)}, least "
                     f"{min(values):.3f}): {'met' if met else 'NOT MET'} ({wanted}, none under "
                     f"{least})")  # fmt: skip
    return lines


def _case(case: Case, device: str, dtype: torch.dtype, backends: Sequence[str], trained: bool,
          mode: str) -> dict[str, Measured]:  # fmt: skip
    torch.manual_seed(0)
    given = case.sizes.operands(device, dtype, trained)
    call = case.make(case.sizes, device)
    exact = _exact(call, given)
    runs: dict[str, Callable[[], Any]] = {}
    for backend in backends:
        fn = call
        if backend != "eager":
            torch._dynamo.reset()
            fn = torch.compile(call, backend=backend, mode=None if mode == "default" else mode)
        runs[backend] = _run(fn, given, trained)
    found: dict[str, Measured] = {}
    for backend, run in list(runs.items()):
        try:
            for _ in range(WARM):
                run()
            memory = _memory(run, device)
            error = _error(run(), exact)
        except (RuntimeError, NotImplementedError, torch._dynamo.exc.BackendCompilerFailed) as why:
            print(f"  {backend} cannot: {type(why).__name__}: {str(why)[:200]}")
            del runs[backend]
            continue
        found[backend] = Measured(0.0, memory, error)
    times: dict[str, list[float]] = {backend: [] for backend in runs}
    for _ in range(TURNS):
        for backend, run in runs.items():
            times[backend].append(_timed(run, device))
    for backend, values in times.items():
        # others may have the cores of a host: they only ever make a call longer
        found[backend].milliseconds = min(values) if device == "cpu" else statistics.median(values)
    return found


def _run(fn: Callable[..., Any], given: Sequence[torch.Tensor], trained: bool) -> Callable[[], Any]:
    def run() -> Any:
        if not trained:
            with torch.no_grad():
                return fn(*given)
        out = fn(*given)
        grads = torch.autograd.grad(out.sum(), list(given))
        del grads
        return out.detach()

    return run


def _exact(call: Callable[..., Any], given: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """In float32, where all scores fit in memory."""
    q, k = given[:2]
    if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] > 1 << 30:
        return None
    with torch.no_grad():
        return call(*(t.float() for t in given))


def _error(found: torch.Tensor, exact: torch.Tensor | None) -> float:
    return float("nan") if exact is None else float((found.float() - exact).abs().max())


def _memory(run: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def _timed(run: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        start = time.process_time()
        run()
        return (time.process_time() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000)  # the host is ahead of the card
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def _line(name: str, found: dict[str, Measured], case: Case, trained: bool) -> str:
    s = case.sizes
    flops = 4.0 * s.b * s.h * s.m * s.n * s.d * (3.5 if trained else 1.0)
    flops *= 0.5 if "causal" in case.name else 1.0
    parts = [f"{name:60}"]
    for backend, m in found.items():
        rate = flops / m.milliseconds / 1e9
        parts.append(f"{backend} {m.milliseconds:.3f} ms {rate:.0f} TFLOP/s {m.megabytes:.0f} MB "
                     f"off {m.error:.1e}")  # fmt: skip
    return " | ".join(parts)


if __name__ == "__main__":
    main()
