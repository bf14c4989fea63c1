"""`python -m bench.gpu_memory [names]`: memory-bound programs on a card.

Eager, the reference and tilewright run the same program on the same inputs. Times are of the device
alone: CUDA graphs of as many calls as last a millisecond, so that starting a graph does not count,
over several sets of inputs where one would stay in the cache, replayed in turns. The fewest bytes
are those of the inputs and outputs, each once; "of copy" is the time these would take at the copy
bandwidth measured in the same run, over the time it took. Kernels are compiled by several processes
first: compile time is not measured here.

`--usual`, `--written` and so on measure other lists (`LISTS`; `--help` says what each has), and
`--random N --seed S` programs that are drawn, of the kinds that models have.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.drawn_programs import drawn
from bench.gpu_programs import PROGRAMS, GpuProgram
from bench.kernels import copy_bandwidth
from bench.measure import clone, compile_with, difference, geomean, leaves, run_all
from bench.served_programs import SERVED
from bench.small_programs import SMALL
from bench.trained_programs import TRAINED
from bench.usual_programs import USUAL
from bench.various_programs import VARIOUS
from bench.written_programs import WRITTEN
from tilewright.tune.clock import between

LISTS: dict[str, tuple[Sequence[GpuProgram], str]] = {
    "usual": (USUAL, "programs of more kinds"),
    "written": (WRITTEN, "pieces of programs as users write them"),
    "served": (SERVED, "what a server of models does between its products"),
    "trained": (TRAINED, "more of training, its optimizers among them"),
    "various": (VARIOUS, "programs of many fields"),
    "small": (SMALL, "programs of small sizes, whose inputs stay in the cache"),
}
BACKENDS = ("eager", "inductor", "tilewright")
OURS = BACKENDS[-1]
LEAST = 1000.0  # microseconds a graph lasts
MOST_CALLS = 50
MOST_SETS = 64
CACHE = 240 << 20  # bytes of which nothing is left in a card's cache when they are read again
ROUNDS = 9
AHEAD = 60.0  # seconds for compiling ahead; what is left is compiled when it is measured
NO_NAME = "no program of this list has a name that begins so: its file in bench/ has them"
Args = tuple[Any, ...]


def run_program(program: GpuProgram, fn: Callable[..., Any], args: Args,
                given: list[Tensor] | None = None) -> Any:  # fmt: skip
    """`given` are the gradients that come in, ones where there are none yet."""
    if not program.backward:
        return fn(*args)
    out = leaves(fn(*args))
    wanted = [a for a in leaves(args) if a.requires_grad]
    return out, torch.autograd.grad(out, wanted, given or [torch.ones_like(o) for o in out])


def fewest_bytes(program: GpuProgram, args: Args, result: Any) -> int:
    if program.moved is not None:
        return program.moved(args, result)
    passes = 2 if program.backward else 1
    moved = sum(t.nbytes for t in leaves(args)) + sum(t.nbytes for t in leaves(result))
    moved += passes * sum(args[k].nbytes for k in program.again)
    if program.name.startswith("embedding"):  # rows that are read, not the whole table
        moved += leaves(result)[0].nbytes - args[1].nbytes
    if program.backward:  # the gradients that come in, and what both passes need once more
        moved += sum(t.nbytes for t in leaves(result[0]))
        if not program.name.startswith("embedding"):
            moved += max(t.nbytes for t in leaves(args))
    return moved


# ---- time on the device


class Recorded:
    """A graph of several calls, over all sets of arguments in turn."""

    def __init__(self, call: Callable[[Args], Any], sets: Sequence[Args]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for args in (*sets, sets[0]):
                call(args)
            stream.synchronize()
            once = between(lambda: [call(args) for args in sets]) / len(sets)
            wanted = min(MOST_CALLS, math.ceil(LEAST / once))
            self.calls = -(-wanted // len(sets)) * len(sets)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                for k in range(self.calls):
                    kept = call(sets[k % len(sets)])
                    del kept
        self.graph.replay()
        torch.cuda.synchronize()

    def sample(self) -> float:
        """Microseconds of a call."""
        return between(self.graph.replay) / self.calls


def in_turns(recorded: dict[str, Recorded]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in recorded}
    for _ in range(ROUNDS):
        for name, graph in recorded.items():
            times[name].append(graph.sample())
    return {name: statistics.median(taken) for name, taken in times.items()}


def kernel_times(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """The kernels of a call and their microseconds, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    return [(e.key[:80], e.self_device_time_total / 3) for e in seen.key_averages()]


# ---- one program


def measured(program: GpuProgram, backends: Sequence[str], bandwidth: float) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    args = program.inputs()
    expected = run_program(program, program.fn, clone(args))
    size = sum(t.nbytes for t in (*leaves(args), *leaves(expected)))
    row: dict[str, Any] = {"bytes": fewest_bytes(program, args, expected)}
    sets = [args, *(program.inputs() for _ in range(min(MOST_SETS, CACHE // size)))]
    given = [torch.ones_like(o) for o in leaves(expected[0])] if program.backward else None
    recorded: dict[str, Recorded] = {}
    for backend in backends:
        try:
            fn = compile_with(program.fn, backend)
            actual = run_program(program, fn, args)
            wrong = None if program.random else difference(expected, actual)
            del actual
            if wrong:
                row[backend] = f"wrong: {wrong}"
                continue
            call = functools.partial(run_program, program, fn, given=given)
            recorded[backend] = Recorded(call, sets)
            if backend == OURS:
                row["kernels"] = kernel_times(functools.partial(call, args))
        except Exception as error:
            traceback.print_exc()
            row[backend] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        torch.cuda.synchronize()
    row |= in_turns(recorded)
    if isinstance(row[OURS], float):
        row["of copy"] = row["bytes"] / bandwidth / row[OURS]
    return row


def line(name: str, row: dict[str, Any], backends: Sequence[str]) -> str:
    times = [f"{row[b]:.1f}" if isinstance(row[b], float) else str(row[b])[:70] for b in backends]
    ours = row[OURS]
    if not isinstance(ours, float):
        return f"| {name} | {' | '.join(times)} |" + " |" * len(backends)
    over = [f"{row[b] / ours:.2f}" if isinstance(row[b], float) else "" for b in backends[:-1]]
    return f"| {name} | {' | '.join([*times, *over])} | {row['of copy']:.0%} |"


def summary(rows: Sequence[dict[str, Any]], backends: Sequence[str]) -> list[str]:
    whole = [r for r in rows if all(isinstance(r[b], float) for b in backends)]
    if not whole:
        return []
    columns = [[r[b] / r[OURS] for r in whole] for b in backends[:-1]]
    copies = [r["of copy"] for r in whole]
    blank = " |" * len(backends)
    means = " | ".join(f"{geomean(c):.2f}" for c in columns)
    worst = " | ".join(f"{min(c):.2f}" for c in columns)
    return [f"| geomean ({len(whole)}) |{blank} {means} | {geomean(copies):.0%} |",
            f"| worst |{blank} {worst} | {min(copies):.0%} |"]  # fmt: skip


def memory(end: float, raw: dict[str, Any], programs: Sequence[GpuProgram] = PROGRAMS,
           backends: Sequence[str] = BACKENDS) -> list[str]:  # fmt: skip
    """The table; programs that begin after `end` (of `time.perf_counter`) are left out."""
    bandwidth = copy_bandwidth()
    heads = ["program", *(f"{b} us" for b in backends), *(f"x {b}" for b in backends[:-1]),
             "of copy"]  # fmt: skip
    lines = [f"copy bandwidth {bandwidth / 1e6:.2f} TB/s", "", f"| {' | '.join(heads)} |",
             "|---" * len(heads) + "|"]  # fmt: skip
    for program in programs:
        if time.perf_counter() > end:
            lines.append(f"| {program.name} | out of time |" + " |" * (len(heads) - 2))
            continue
        row = measured(program, backends, bandwidth)
        raw[program.name] = row
        lines.append(line(program.name, row, backends))
        shown = ", ".join(f"{name} {us:.1f}" for name, us in row.get("kernels", []))
        print(lines[-1], f"   {shown}", sep="\n", flush=True)
        torch.cuda.empty_cache()
    return [*lines, *summary(list(raw.values()), backends)]


# ---- compiling ahead


def compile_ahead(jobs: int, arguments: Sequence[str] = ()) -> None:
    """Each program once under each backend that compiles, in several processes. They choose
    programs by the same arguments, and each takes its share."""
    command = [sys.executable, "-m", "bench.gpu_memory", *arguments]
    run_all([[*command, "--ahead", f"{k}/{jobs}"] for k in range(jobs)], AHEAD)


def _ahead(programs: Sequence[GpuProgram], backends: Sequence[str]) -> None:
    for program in programs:
        args = program.inputs()
        for backend in backends:
            if backend != "eager":
                run_program(program, compile_with(program.fn, backend), args)
        del args
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def named(programs: Sequence[GpuProgram], names: Sequence[str]) -> list[GpuProgram]:
    """Those whose names begin with one of these; all if there are none."""
    return [p for p in programs if not names or p.name.startswith(tuple(names))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_memory", description=__doc__)
    parser.add_argument("names", nargs="*", help="what names of programs begin with; all")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="comma list, in order")
    parser.add_argument("--budget", type=float, default=300, help="seconds in all")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile ahead")
    parser.add_argument("--random", type=int, default=0, help="so many programs that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of those")
    for name, (_, what) in LISTS.items():
        parser.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_argument("--out", type=Path, help="a JSON file of all times")
    parser.add_argument("--ahead", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    backends = options.backends.split(",")
    asked = [programs for name, (programs, _) in LISTS.items() if getattr(options, name)]
    programs = asked[0] if asked else PROGRAMS
    if options.random:
        programs = drawn(options.random, options.seed)
    chosen = named(programs, options.names) or parser.error(NO_NAME)
    if options.ahead:
        share, jobs = options.ahead.split("/")
        _ahead(chosen[int(share) :: int(jobs)], backends)
        return
    end = time.perf_counter() + options.budget
    compile_ahead(min(options.jobs, len(chosen)), sys.argv[1:])
    print(f"compiled ahead, {end - time.perf_counter():.0f} s left", flush=True)
    raw: dict[str, Any] = {}
    lines = memory(end, raw, chosen, backends)
    if options.out:
        options.out.write_text(json.dumps(raw, indent=1))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
