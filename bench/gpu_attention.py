"""`python -m bench.gpu_attention`: attention on a card, eager, the reference and tilewright in one
run.

Each case is compiled, compared with eager in a wider type, and timed forward and, where it is
trained, forward and backward, by CUDA events around calls that take turns. Then come a verdict on
each kind of case against eager and the reference, on values, on the reached TFLOP/s of the causal
8192x128 case beside the libraries', on memory over lengths and on compilations. Peak memory is the
most that one call had beside its operands.

`--only TEXT` takes the cases whose names have it, `--reference` measures the reference too,
`--mode` is the mode both are compiled with, and `--host` runs the short list on the CPU: processor
time of one thread, for others may have the cores. `--small` shortens lengths, to try the command
where there is no card. On a card several processes (`--part`) fill the caches of compilers first.
No case begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.exc
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from bench.attention_cases import FLEX, HOST, JUDGED, SDPA, Case, Sizes, flex
from bench.measure import geomean

TURNS = 20
WARM = 3
LEAST = 0.98  # of eager's speed: what is under it is listed
WANTED = {("cuda", "sdpa"): 1.15}  # over eager, in the geometric mean of the cases of a kind
PARTS = 8  # processes
WAIT = 200.0  # seconds for them
RATES = (650.0, 550.0)  # TFLOP/s, forward and backward, unless the libraries reach less
STEPS = 4  # of the type's rounding that a result may be further off than eager's
LIBRARIES = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
FAILURES = (RuntimeError, NotImplementedError, torch._dynamo.exc.TorchDynamoException)


@dataclass
class Measured:
    milliseconds: float
    megabytes: float
    error: float


@dataclass
class Table:
    """What was measured, by case, whether it was trained, and backend."""

    rows: dict[tuple[str, bool], dict[str, Measured]] = field(
        default_factory=dict[tuple[str, bool], dict[str, Measured]])  # fmt: skip
    missing: list[str] = field(default_factory=list[str])
    device: str = "cuda"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--mode", default="default")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=450)
    parser.add_argument("--part", default="", help="K/N: only compile every Nth case")
    args = parser.parse_args(argv)
    device = "cpu" if args.host else "cuda"
    dtype = getattr(torch, "float32" if args.host else args.dtype)
    cases = [c for c in (HOST if args.host else [*FLEX, *SDPA]) if args.only in c.name]
    if args.host:
        torch.set_num_threads(1)
    else:
        print(torch.cuda.get_device_name(), torch.__version__, torch.backends.cudnn.version())
    start = time.perf_counter()
    theirs = ["inductor"] if args.reference else []
    if args.part:
        k, count = map(int, args.part.split("/"))
        short = [c.shorter() if args.small else c for c in cases]
        return _compile(short[k::count], device, dtype, ["tilewright", *theirs], args.mode)
    if not args.host:
        _fill_caches(sys.argv[1:] if argv is None else argv, start + WAIT)
    table = Table(device=device)
    for case in cases:
        spent = time.perf_counter() - start
        if spent > args.seconds:
            table.missing.append(case.name)
            continue
        backends = ["eager", "tilewright", *theirs]
        if case.name == JUDGED and not args.host:
            backends += LIBRARIES
        short = case.shorter() if args.small else case
        for trained in (False, True) if case.trained else (False,):
            found = _case(short, device, dtype, backends, trained, args.mode)
            table.rows[case.name, trained] = found
            print(_line(short, found, trained), flush=True)
    print(f"{time.perf_counter() - start:.0f} s")
    more = [] if args.host or args.only else [_memory_over_lengths, _compilations]
    print(*_verdicts(table, torch.finfo(dtype).eps), sep="\n")
    for check in more:
        print(_safely(check, device, dtype, args.small), flush=True)


# ---- compiling before anything is timed


def _fill_caches(given: Sequence[str], end: float) -> None:
    """In processes of their own: what takes a compiler long is found on disk afterwards."""
    command = [sys.executable, "-m", "bench.gpu_attention", *given, "--part"]
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    parts = max(1, min(PARTS, (os.cpu_count() or 2) // 2))
    running = [subprocess.Popen([*command, f"{k}/{parts}"], env=env, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL) for k in range(parts)]  # fmt: skip
    for process in running:
        try:
            process.wait(max(0.0, end - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    print(f"caches were filled by {parts} processes", flush=True)


def _compile(cases: Sequence[Case], device: str, dtype: torch.dtype, backends: Sequence[str],
             mode: str) -> None:  # fmt: skip
    for case in cases:
        for trained in (False, True) if case.trained else (False,):
            torch.manual_seed(0)
            given = case.sizes.operands(device, dtype, trained)
            call = case.make(case.sizes, device)
            for backend in backends:
                with contextlib.suppress(*FAILURES):
                    _run(_compiled(call, backend, mode), given, trained)()


def _name(case: str, trained: bool) -> str:
    return f"{case}{' with gradients' if trained else ''}"


# ---- verdicts


def _verdicts(table: Table, eps: float) -> list[str]:
    """As fast as eager and the reference each time, and by how much on the whole; as accurate; at
    the rate that was asked for."""
    gains: dict[tuple[str, str], dict[str, float]] = {}
    wrong: list[str] = []
    for (case, trained), found in table.rows.items():
        name, ours = _name(case, trained), found.get("tilewright")
        if ours is None:
            wrong.append(f"{name}: no result")
            continue
        for other, theirs in found.items():
            if other in ("eager", "inductor"):
                of = gains.setdefault((case.split()[0], other), {})
                of[name] = theirs.milliseconds / ours.milliseconds
        eager = found.get("eager")
        if eager is not None and ours.error > 2 * eager.error + STEPS * eps:
            wrong.append(f"{name}: off {ours.error:.1e}, eager {eager.error:.1e}")
    wanted = {kind: WANTED.get((table.device, kind), 1.0) for kind, _ in gains}
    lines = [_gained(kind, other, values, wanted[kind] if other == "eager" else 1.0)
             for (kind, other), values in sorted(gains.items())]  # fmt: skip
    lines.append(_verdict("values", not wrong, "; ".join(wrong) or f"{len(table.rows)} as eager's"))
    if JUDGED in {case for case, _ in table.rows}:
        lines.append(_rates(table))
    lines.append(_verdict("all cases", not table.missing, f"{len(table.missing)} out of time"))
    return lines


def _verdict(what: str, met: bool, told: str) -> str:
    return f"{what}: {'met' if met else 'NOT MET'} ({told})"


def _gained(kind: str, other: str, values: Mapping[str, float], wanted: float) -> str:
    least = LEAST if other == "eager" or kind == "flex" else 0.0
    slow = [f"{name} {gain:.2f}" for name, gain in values.items() if gain < least]
    mean = geomean(list(values.values()))
    told = (f"geomean of {len(values)} {mean:.3f}, wanted {wanted}; under {least}: "
            f"{', '.join(slow) or 'none'}")  # fmt: skip
    return _verdict(f"{kind} over {other}", mean >= wanted and not slow, told)


def _rates(table: Table) -> str:
    """Of the judged case: what was asked for, or the best that the libraries give there."""
    case = next(c for c in SDPA if c.name == JUDGED)
    forward, trained = (table.rows.get((JUDGED, t), {}) for t in (False, True))
    rates: dict[str, tuple[float, float]] = {}
    for who in ("tilewright", "eager", *LIBRARIES):
        if who in forward and who in trained:
            first, both = forward[who].milliseconds, trained[who].milliseconds
            back = max(both - first, 1e-6)
            rates[who] = case.flops / first / 1e9, 2.5 * case.flops / back / 1e9
    if "tilewright" not in rates:
        return _verdict("rates", False, "not measured")
    best = [max(r[k] for r in rates.values()) for k in range(2)]
    met = all(rates["tilewright"][k] >= min(RATES[k], LEAST * best[k]) for k in range(2))
    told = ", ".join(f"{who} {a:.0f} and {b:.0f}" for who, (a, b) in rates.items())
    return _verdict("TFLOP/s forward and backward", met, told)


def _safely(check: Callable[[str, torch.dtype, bool], str], device: str, dtype: torch.dtype,
            small: bool) -> str:  # fmt: skip
    try:
        return check(device, dtype, small)
    except FAILURES as why:
        return _verdict(check.__name__.strip("_"), False, f"{type(why).__name__}: {why}"[:300])


def _memory_over_lengths(device: str, dtype: torch.dtype, small: bool) -> str:
    """Of a trained call with a bias by distance: twice the length, twice the memory."""
    found: list[float] = []
    for length in (256, 512) if small else (4096, 8192):
        s = Sizes(1, 8, 8, length, length, 64)
        given = s.operands(device, dtype, True)
        torch._dynamo.reset()
        call = torch.compile(flex("relative")(s, device), backend="tilewright")
        run = _run(call, given, True)
        run()
        found.append(_memory(run, device))
    told = f"{found[0]:.1f} and {found[1]:.1f} MB for twice the length"
    return _verdict("memory linear in length", small or found[1] <= 2.2 * found[0], told)


def _compilations(device: str, dtype: torch.dtype, small: bool) -> str:
    """One compilation for all lengths."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = torch.compile(flex_attention, backend="tilewright", dynamic=True)
    off = 0.0
    for length in (96, 160, 208) if small else (1000, 2048, 3333):
        q, k, v = Sizes(2, 4, 4, length, length, 64).operands(device, dtype, False)
        with torch.no_grad():
            exact = flex_attention(q.float(), k.float(), v.float())
            off = max(off, _error(call(q, k, v), exact))  # type: ignore[arg-type]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return _verdict("one compilation for all lengths", graphs == 1 and off < 0.02,
                    f"{graphs} graphs, off {off:.1e}")  # fmt: skip


# ---- one case


def _case(case: Case, device: str, dtype: torch.dtype, backends: Sequence[str], trained: bool,
          mode: str) -> dict[str, Measured]:  # fmt: skip
    torch.manual_seed(0)
    given = case.sizes.operands(device, dtype, trained)
    call = case.make(case.sizes, device)
    exact = _exact(call, given)
    runs: dict[str, Callable[[], Any]] = {}
    for backend in backends:
        runs[backend] = _run(_compiled(call, backend, mode), given, trained)
    found: dict[str, Measured] = {}
    for backend, run in list(runs.items()):
        try:
            for _ in range(WARM):
                run()
            memory = _memory(run, device)
            error = _error(run(), exact)
        except FAILURES as why:
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


def _compiled(call: Callable[..., Any], backend: str, mode: str) -> Callable[..., Any]:
    if backend == "eager":
        return call
    if backend in LIBRARIES:
        return _by_library(call, LIBRARIES[backend])
    torch._dynamo.reset()
    return torch.compile(call, backend=backend, mode=None if mode == "default" else mode)


def _by_library(call: Callable[..., Any], library: SDPBackend) -> Callable[..., Any]:
    def run(*given: torch.Tensor) -> Any:
        with sdpa_kernel(library):
            return call(*given)

    return run


def _run(fn: Callable[..., Any], given: Sequence[torch.Tensor], trained: bool) -> Callable[[], Any]:
    weights: list[torch.Tensor] = []  # the gradient of the result, as a projection leaves it

    def run() -> Any:
        if not trained:
            with torch.no_grad():
                return fn(*given)
        out = fn(*given)
        if not weights:
            weights.append(torch.randn_like(out))
        torch.autograd.grad(out, list(given), weights[0])
        return out.detach()

    return run


def _exact(call: Callable[..., Any], given: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """In a wider type, where all scores fit in memory."""
    q, k = given[:2]
    if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] > 1 << 30:
        return None
    with torch.no_grad():
        return call(*(t.double() if t.dtype == torch.float32 else t.float() for t in given))


def _error(found: torch.Tensor, exact: torch.Tensor | None) -> float:
    return float("nan") if exact is None else float((found.to(exact.dtype) - exact).abs().max())


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


def _line(case: Case, found: dict[str, Measured], trained: bool) -> str:
    flops = case.flops * (3.5 if trained else 1.0)
    parts = [f"{_name(case.name, trained):60}"]
    for backend, m in found.items():
        rate = flops / m.milliseconds / 1e9
        parts.append(f"{backend} {m.milliseconds:.3f} ms {rate:.0f} TFLOP/s {m.megabytes:.0f} MB "
                     f"off {m.error:.1e}")  # fmt: skip
    return " | ".join(parts)


if __name__ == "__main__":
    main()
